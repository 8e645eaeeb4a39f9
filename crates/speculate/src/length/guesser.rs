//! Who guesses: one of the heads of a model, or the n-grams of a text.

use crate::draft::NGRAM;

/// Heads that may draft for one model, at most: one of each kind.
pub const MAX_HEADS: usize = 6;

/// Who guesses the tokens of a draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guesser {
    /// The draft head of this number, from 0 and below [`MAX_HEADS`]: any
    /// [`Drafter`](crate::Drafter) with a model.
    Head(usize),
    /// The n-grams of the text: the draft copies what followed the last time.
    Ngram,
}

impl Default for Guesser {
    /// The first head.
    fn default() -> Self {
        Guesser::HEAD
    }
}

impl Guesser {
    /// The first head, of most models the only one.
    pub const HEAD: Guesser = Guesser::Head(0);

    /// All heads that there may be, then n-grams.
    pub const ALL: [Guesser; MAX_HEADS + 1] = [
        Guesser::Head(0),
        Guesser::Head(1),
        Guesser::Head(2),
        Guesser::Head(3),
        Guesser::Head(4),
        Guesser::Head(5),
        Guesser::Ngram,
    ];

    /// The guesser's place in [`Guesser::ALL`].
    pub fn index(self) -> usize {
        match self {
            Guesser::Head(head) => head,
            Guesser::Ngram => MAX_HEADS,
        }
    }

    /// The guesser's name among `drafters`, those of a model with its heads first, as users type it and
    /// as records have it.
    pub fn name<'a>(self, drafters: &[&'a str]) -> Option<&'a str> {
        match self {
            Guesser::Head(head) => drafters.get(head).copied(),
            Guesser::Ngram => Some(NGRAM),
        }
    }
}

/// Who may guess for a text, of those that a model has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guessers([bool; Guesser::ALL.len()]);

impl Guessers {
    /// The first `n` heads alone.
    pub fn heads(n: usize) -> Self {
        (0..n).map(Guesser::Head).collect()
    }

    /// The first `n` heads, as far as they may.
    pub(crate) fn among(self, n: usize) -> Self {
        let heads = (0..n).map(Guesser::Head);
        heads.filter(|&head| self.has(head)).collect()
    }

    /// Whether `guesser` may.
    pub fn has(self, guesser: Guesser) -> bool {
        self.0[guesser.index()]
    }

    /// Heads that may guess.
    pub fn n_heads(self) -> usize {
        self.0[..MAX_HEADS].iter().filter(|&&has| has).count()
    }
}

impl Default for Guessers {
    /// All that a model has.
    fn default() -> Self {
        Guessers([true; Guesser::ALL.len()])
    }
}

impl FromIterator<Guesser> for Guessers {
    /// The guessers of `iter`, and no others.
    fn from_iter<I: IntoIterator<Item = Guesser>>(iter: I) -> Self {
        let mut guessers = Guessers([false; Guesser::ALL.len()]);
        iter.into_iter()
            .for_each(|guesser| guessers.0[guesser.index()] = true);
        guessers
    }
}
