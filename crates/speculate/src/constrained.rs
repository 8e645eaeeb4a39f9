//! A stream under a constraint: the masks of its rows, drafts that fit, and tokens that end it.

use crate::constraint::{Constraint, ConstraintError, mask};
use crate::stream::{Finish, Stream};
use backend::TokenMask;

impl Stream {
    /// Has `constraint`, which has seen no token yet, decide which tokens the stream may write.
    ///
    /// # Panics
    ///
    /// If the stream has written a token.
    pub fn constrain(&mut self, constraint: Box<dyn Constraint>) {
        assert!(
            self.output().is_empty(),
            "a stream that has written nothing"
        );
        self.constraint = Some(constraint);
    }

    /// Why the stream has failed, if it has ended with [`Finish::Constraint`].
    pub fn failure(&self) -> Option<&ConstraintError> {
        self.failure.as_ref()
    }

    /// The mask of the row after the last known token and after each token of the draft, in a
    /// vocabulary of `vocab` tokens; `None` where all tokens may follow, and everywhere without a
    /// constraint.
    ///
    /// Where the constraint cannot tell what follows a part of the draft, the draft ends one token before: the
    /// stream fails when its text has come to that point, as it would without a draft.
    pub(crate) fn masks(&mut self, vocab: usize) -> Vec<Option<TokenMask>> {
        let rows = self.draft.len() + 1;
        let Some(constraint) = &mut self.constraint else {
            return vec![None; rows];
        };
        let mut masks = Vec::with_capacity(rows);
        let mut pushed = 0;
        let mut words = vec![0; vocab.div_ceil(32)];
        let error = loop {
            match mask(&mut **constraint, vocab, &mut words) {
                Ok(mask) => masks.push(mask),
                Err(error) => break Some(error),
            }
            let Some(&token) = self.draft.get(pushed) else {
                break None;
            };
            match constraint.push(token) {
                Ok(true) => pushed += 1,
                // Nothing after a refused token can stay.
                Ok(false) => break None,
                Err(error) => break Some(error),
            }
        };
        constraint.pop(pushed);
        if let Some(error) = error {
            match masks.len() {
                0 => self.fail(error),
                known => self.draft.truncate(known - 1),
            }
        }
        masks.resize(rows, None);
        masks
    }

    /// Finds the tokens that the next draft begins with, for a drafter that is to guess `n` more.
    /// Returns how long the draft may be with both, `room` at most; 0 if there is no room for a guess.
    pub(crate) fn begin_draft(&mut self, n: usize, room: usize) -> usize {
        self.given.clear();
        if let Some(constraint) = self.constraint.as_mut().filter(|_| n > 0) {
            self.given = constraint.forced(room);
        }
        let limit = (self.given.len() + n).min(room);
        if limit > self.given.len() { limit } else { 0 }
    }

    /// Makes the draft one that the constraint lets pass, `room` tokens at most: forced tokens
    /// in place of guesses, and nothing after a guess that may not come. Where a refused guess is
    /// to be rejected by its probability (`keeps_refused`), it stays as the draft's last token.
    pub(crate) fn fit_draft(&mut self, room: usize, keeps_refused: bool) {
        let Some(constraint) = &mut self.constraint else {
            return;
        };
        let guesses = std::mem::take(&mut self.draft);
        let mut guess_probs = std::mem::take(&mut self.draft_probs).into_iter();
        let mut draft: Vec<u32> = Vec::new();
        let (mut n_guessed, mut n_refused) = (None, 0);
        self.draft_forced.clear();
        while draft.len() < room && !constraint.must_end() {
            let at = draft.len();
            let forced = constraint.forced(room - at);
            // A guess counts as long as all before it are in the draft.
            let guess = guesses.get(at).filter(|_| guesses.starts_with(&draft));
            let tokens = match (forced.is_empty(), guess) {
                (false, _) => &forced[..],
                (true, Some(guess)) => std::slice::from_ref(guess),
                (true, None) => break,
            };
            if !forced.is_empty() {
                n_guessed.get_or_insert(at);
            }
            for &token in tokens {
                if constraint.push(token) != Ok(true) {
                    n_refused = 1;
                }
                let prob = guess_probs.next().filter(|_| forced.is_empty());
                if keeps_refused {
                    let point = || vec![(token, 1.0)];
                    self.draft_probs.push(prob.unwrap_or_else(point));
                }
                draft.push(token);
                self.draft_forced.push(!forced.is_empty());
            }
            if n_refused > 0 {
                break;
            }
        }
        constraint.pop(draft.len() - n_refused);
        if !keeps_refused {
            draft.truncate(draft.len() - n_refused);
        }
        self.n_guessed = n_guessed.unwrap_or(draft.len());
        self.draft = draft;
    }

    /// Appends `token` to the text, if the constraint lets it; ends the stream if not, or if the
    /// text is complete with it.
    pub(crate) fn append(&mut self, token: u32) {
        let Some(constraint) = &mut self.constraint else {
            self.tokens.push(token);
            return;
        };
        match constraint.push(token) {
            Ok(true) => {
                self.tokens.push(token);
                if constraint.must_end() {
                    self.finish = Some(Finish::Complete);
                }
            }
            Ok(false) => {
                let why =
                    "no token that may come next can be chosen: the request suppresses all of them";
                self.fail(ConstraintError(why.to_owned()));
            }
            Err(error) => self.fail(error),
        }
    }

    fn fail(&mut self, error: ConstraintError) {
        self.failure = Some(error);
        self.finish = Some(Finish::Constraint);
    }
}
