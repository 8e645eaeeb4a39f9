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

/// The mask of what may come next, in a vocabulary of `vocab` tokens; `words` is a buffer.
pub(crate) fn mask(
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
