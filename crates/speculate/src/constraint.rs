//! Constraints: what a grammar, a schema or a limit lets a stream write.
//!
//! ```text
//! row i of a round        logits after draft[..i]
//! mask i                  the tokens that may follow draft[..i]
//! choice i                made as ever, from logits that are -inf where mask i has no bit
//! ```
//!
//! The choice after each drafted token, and after the last one, is made under the mask of
//! its own row. So a choice never depends on the draft, and a constrained text with
//! speculation is the constrained text without it. A drafted token that its mask does not
//! have could not be chosen: the draft ends before it. Where only one token can follow, or
//! a grammar knows how a text goes on, the draft has that token, whatever the drafter would have
//! guessed; it is verified like any other.
//!
//! A constraint is a stack: a round pushes drafted tokens to see what may follow them, and
//! pops them again. Only tokens of the text stay.

use crate::sample::TokenProbs;
use crate::stream::{Finish, Stream};
use backend::TokenMask;

/// What limits the tokens of one stream, and how far its text has come.
pub trait Constraint: Send {
    /// Sets the bits of the tokens that may come next in `allowed`, which is all zero: 32 tokens a
    /// word, the lowest bit first. `false`, and no bits, if every token may. A token that
    /// ends the text counts as one that comes next.
    ///
    /// # Errors
    ///
    /// [`ConstraintError`] if that cannot be told; the stream fails then.
    fn allowed(&mut self, allowed: &mut [u32]) -> Result<bool, ConstraintError>;

    /// Appends `token`; `false`, and nothing changes, if it may not come next.
    ///
    /// # Errors
    ///
    /// [`ConstraintError`] if that cannot be told; the stream fails then.
    fn push(&mut self, token: u32) -> Result<bool, ConstraintError>;

    /// Takes the last `n` pushed tokens back.
    fn pop(&mut self, n: usize);

    /// How the text is sure or likely to go on, `most` tokens at most, each of which may come
    /// next after those before it. Empty if it depends on the model.
    fn forced(&mut self, most: usize) -> Vec<u32>;

    /// Whether the text is complete, so that nothing may follow but its end.
    fn must_end(&mut self) -> bool;
}

/// Why a constraint could not say what may come next.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConstraintError(pub String);

/// The masks of a stream's rows, and what has become of the constraint.
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

/// The mask of what may come next, in a vocabulary of `vocab` tokens; `words` is a buffer.
fn mask(
    constraint: &mut dyn Constraint,
    vocab: usize,
    words: &mut [u32],
) -> Result<Option<TokenMask>, ConstraintError> {
    words.fill(0);
    if !constraint.allowed(words)? {
        return Ok(None);
    }
    if words.iter().all(|&word| word == 0) {
        let why = "the grammar asks for text that no token of the model begins";
        return Err(ConstraintError(why.to_owned()));
    }
    Ok(Some(TokenMask::from_words(vocab, words.to_vec())))
}
