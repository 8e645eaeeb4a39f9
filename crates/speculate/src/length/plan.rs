//! What the length of a draft depends on, and what is decided of it.

use super::Ledger;
use super::guesser::{Guesser, Guessers};

/// How long a stream's drafts are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftLength {
    /// This many tokens, in every round that has room for them.
    Fixed(usize),
    /// As many tokens as pay, and at most this many.
    UpTo(usize),
}

impl DraftLength {
    /// The longest draft; 0 turns speculation off.
    pub fn max(self) -> usize {
        match self {
            DraftLength::Fixed(n) | DraftLength::UpTo(n) => n,
        }
    }
}

/// A copy that the n-grams of a text propose as the next draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// Tokens of the match that it follows.
    pub matched: usize,
    /// Tokens of the copy.
    pub tokens: usize,
}

/// What the length of one stream's next draft depends on.
#[derive(Clone, Copy, Debug)]
pub struct LengthInput<'a> {
    /// What the stream's drafts have cost and brought so far.
    pub ledger: &'a Ledger,
    /// The length that the stream asks for.
    pub wish: DraftLength,
    /// Whether a draft may be cut, once it is made, where its guesses are not worth a row.
    pub may_be_cut: bool,
    /// The longest draft that has room.
    pub room: usize,
    /// Tokens of the stream so far: prompt and output.
    pub context: usize,
    /// The heads that could guess.
    pub heads: Guessers,
    /// What could be copied, if anything.
    pub copy: Option<Copy>,
    /// Who is to guess wherever it can, instead of whoever promises most.
    pub pinned: Option<Guesser>,
}

impl LengthInput<'_> {
    /// The longest draft that `guesser` could make, that is asked for and has room.
    pub(super) fn most(&self, guesser: Guesser) -> usize {
        let able = match guesser {
            Guesser::Head(_) => [0, usize::MAX][usize::from(self.heads.has(guesser))],
            Guesser::Ngram => self.copy.map_or(0, |copy| copy.tokens),
        };
        self.wish.max().min(self.room).min(able)
    }

    /// Whether there is room for a draft and something to guess it from, whether one is wanted or not.
    pub(crate) fn could_draft(&self) -> bool {
        self.room > 0 && (self.heads.n_heads() > 0 || self.copy.is_some())
    }

    /// Who of those that can guess does so in round `round`, if all do in turn.
    pub(crate) fn in_turn(&self, round: usize) -> Option<Guesser> {
        let could = |&guesser: &Guesser| self.most(guesser) > 0;
        let able: Vec<Guesser> = Guesser::ALL.into_iter().filter(could).collect();
        (!able.is_empty()).then(|| able[round % able.len()])
    }

    /// Who guesses where `guesser` is meant to.
    pub(super) fn pinned_or(&self, guesser: Guesser) -> Guesser {
        let pinned = self.pinned.filter(|&pinned| self.most(pinned) > 0);
        pinned.unwrap_or(guesser)
    }

    pub(super) fn is_fixed(&self) -> bool {
        matches!(self.wish, DraftLength::Fixed(_))
    }
}

/// The next draft of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Who is to guess.
    pub guesser: Guesser,
    /// Tokens to guess, at most; 0 for no draft.
    pub tokens: usize,
}
