//! A stream under a constraint: the masks of its rows, drafts that fit, and tokens that end it.

use crate::constraint::{Constraint, ConstraintError, mask};
use crate::sample::TokenProbs;
use crate::stream::{Finish, Stream};
use backend::TokenMask;

impl Stream {
    /// Has `constraint` decide which tokens the stream may write. It has seen none yet.
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
        let mut probs = std::mem::take(&mut self.draft_probs).into_iter();
        let mut fitted = Fitted::default();
        while fitted.draft.len() < room && !constraint.must_end() {
            let forced = constraint.forced(room - fitted.draft.len());
            let is_forced = !forced.is_empty();
            for token in forced {
                let guessed = guesses.get(fitted.draft.len()) == Some(&token);
                probs.next();
                fitted.goes_on &= guessed;
                if constraint.push(token) != Ok(true) {
                    fitted.ends = true;
                    break;
                }
                fitted.push(token, vec![(token, 1.0)], true);
            }
            if is_forced && !fitted.ends {
                continue;
            }
            let guess = guesses.get(fitted.draft.len()).copied();
            let Some(guess) = guess.filter(|_| fitted.goes_on && !fitted.ends) else {
                break;
            };
            let prob = probs.next();
            let is_allowed = constraint.push(guess) == Ok(true);
            if is_allowed || keeps_refused {
                fitted.push(guess, prob.unwrap_or_else(|| vec![(guess, 1.0)]), false);
            }
            if !is_allowed {
                fitted.n_refused = usize::from(keeps_refused);
                break;
            }
        }
        constraint.pop(fitted.draft.len() - fitted.n_refused);
        self.stats.forced += fitted.n_forced as u64;
        self.n_guessed = fitted.n_guessed.unwrap_or(fitted.draft.len());
        self.draft = fitted.draft;
        self.draft_probs = if keeps_refused {
            fitted.probs
        } else {
            Vec::new()
        };
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

/// A draft while it is fitted to a constraint.
struct Fitted {
    draft: Vec<u32>,
    probs: Vec<TokenProbs>,
    /// Whether the drafter's guesses still follow the draft.
    goes_on: bool,
    ends: bool,
    n_forced: usize,
    /// Tokens before the first forced one, if there is one.
    n_guessed: Option<usize>,
    /// 1 if the last token may not come.
    n_refused: usize,
}

impl Default for Fitted {
    fn default() -> Self {
        Fitted {
            draft: Vec::new(),
            probs: Vec::new(),
            goes_on: true,
            ends: false,
            n_forced: 0,
            n_guessed: None,
            n_refused: 0,
        }
    }
}

impl Fitted {
    fn push(&mut self, token: u32, probs: TokenProbs, is_forced: bool) {
        if is_forced {
            self.n_guessed.get_or_insert(self.draft.len());
            self.n_forced += 1;
        }
        self.draft.push(token);
        self.probs.push(probs);
    }
}
