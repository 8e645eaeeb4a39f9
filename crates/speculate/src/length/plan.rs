//! What the length of a draft depends on, and what is decided of it.

use super::Ledger;
use crate::draft::NGRAM;

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

/// Who guesses the tokens of a draft.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Guesser {
    /// The draft head, or whatever [`Drafter`](crate::Drafter) there is.
    #[default]
    Head,
    /// The n-grams of the text: the draft copies what followed the last time.
    Ngram,
}

impl Guesser {
    /// All of them.
    pub const ALL: [Guesser; 2] = [Guesser::Head, Guesser::Ngram];

    /// The guesser's name where `head` is that of the head, as users type it and as records have it.
    pub fn name(self, head: Option<&str>) -> Option<&str> {
        match self {
            Guesser::Head => head,
            Guesser::Ngram => Some(NGRAM),
        }
    }
}

/// Who may guess for a text, of those that a model has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guessers([bool; Guesser::ALL.len()]);

impl Guessers {
    /// Whether `guesser` may.
    pub fn has(self, guesser: Guesser) -> bool {
        self.0[guesser as usize]
    }
}

impl Default for Guessers {
    /// All.
    fn default() -> Self {
        Guessers([true; Guesser::ALL.len()])
    }
}

impl FromIterator<Guesser> for Guessers {
    /// These alone.
    fn from_iter<I: IntoIterator<Item = Guesser>>(iter: I) -> Self {
        let mut guessers = Guessers([false; Guesser::ALL.len()]);
        iter.into_iter()
            .for_each(|guesser| guessers.0[guesser as usize] = true);
        guessers
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
    /// The longest draft that has room.
    pub room: usize,
    /// Tokens of the stream so far: prompt and output.
    pub context: usize,
    /// Whether a head could guess.
    pub has_head: bool,
    /// What could be copied, if anything.
    pub copy: Option<Copy>,
}

impl LengthInput<'_> {
    /// The longest draft that `guesser` could make, that is asked for and has room.
    pub(super) fn most(&self, guesser: Guesser) -> usize {
        let able = match guesser {
            Guesser::Head => [0, usize::MAX][usize::from(self.has_head)],
            Guesser::Ngram => self.copy.map_or(0, |copy| copy.tokens),
        };
        self.wish.max().min(self.room).min(able)
    }

    /// Whether there is room for a draft and something to guess it from, whether one is wanted or not.
    pub(crate) fn could_draft(&self) -> bool {
        self.room > 0 && (self.has_head || self.copy.is_some())
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
