//! Drafters: whatever guesses ahead of the target.
//!
//! A drafter sees every row that stays, prompt rows and accepted rows alike, with
//! the target's true hidden row, if it [needs](Drafter::needs_all_hidden) that of every row, and the token that followed;
//! then it guesses.
//! What it guesses can cost time, never change a token.
//!
//! What a drafter remembers of a text is the text's, not the drafter's: a [`DraftState`]
//! that [`Drafter::state`] makes and each [`DraftRequest`] brings along.

mod assistant;
mod block;
mod chained;
mod coverage;
mod forced;
mod head_state;
mod hidden;
mod layered;
mod learned;
mod model;
mod model_state;
mod ngram;
mod ngram_index;
mod state;
mod stretch;

pub use assistant::Assistant;
pub use block::Block;
pub use chained::Chained;
pub(crate) use chained::media;
pub use forced::Forced;
pub use hidden::HiddenRows;
pub use learned::Mark;
pub use model::{DraftModel, MODEL};
pub(crate) use ngram::Ngrams;
pub use ngram::{NGRAM, NGRAM_HELP};
pub use state::{Derived, DraftState, NoState, SavedDraft};

use crate::length::{MAX_HEADS, StopRule};
use crate::prompt::Spans;
use crate::sample::{History, Sampling, TokenProbs};
use backend::{Backend, NO_TOKEN, Tensor};
use cache::{Memory, MemoryFull, Piece, Sequence};
use models::Target;
use stretch::Stretch;

/// All who may guess for the texts of a model: heads, which are drafters with models of their own, and the n-grams
/// of each text. In each round whoever promises most guesses for a text.
#[derive(Default)]
pub struct Drafters {
    pub(crate) heads: Vec<Box<dyn Drafter>>,
    pub(crate) copies: bool,
}

impl Drafters {
    /// Nobody drafts.
    pub fn none() -> Self {
        Drafters::default()
    }

    /// The n-grams of each text.
    pub fn ngrams() -> Self {
        Drafters::none().with_ngrams()
    }

    /// `head`, whose guesses depend on more than the text.
    pub fn head(head: Box<dyn Drafter>) -> Self {
        Drafters::none().with_head(head)
    }

    /// `head`, too, after those that there are.
    ///
    /// # Panics
    ///
    /// If there are [`MAX_HEADS`] already.
    #[must_use]
    pub fn with_head(mut self, head: Box<dyn Drafter>) -> Self {
        assert!(
            self.heads.len() < MAX_HEADS,
            "as many heads as there may be"
        );
        self.heads.push(head);
        self
    }

    /// These, and the heads of `others` after their own; n-grams if either has them.
    ///
    /// # Panics
    ///
    /// If these are more than [`MAX_HEADS`] heads.
    #[must_use]
    pub fn with(self, others: Drafters) -> Self {
        let copies = self.copies || others.copies;
        let all = others.heads.into_iter().fold(self, Drafters::with_head);
        Drafters { copies, ..all }
    }

    /// The n-grams of each text, too.
    #[must_use]
    pub fn with_ngrams(self) -> Self {
        Drafters {
            copies: true,
            ..self
        }
    }

    /// The names of all: of the heads, then of the n-grams if these may guess.
    pub fn names(&self) -> Vec<&'static str> {
        let heads = self.heads.iter().map(|head| head.name());
        heads.chain(self.copies.then_some(NGRAM)).collect()
    }

    /// The layers of the target whose entering rows the heads read, one head after the other.
    pub(crate) fn taps(&self) -> Vec<usize> {
        let heads = self.heads.iter();
        heads.flat_map(|head| head.taps()).copied().collect()
    }
}

impl From<Option<Box<dyn Drafter>>> for Drafters {
    fn from(head: Option<Box<dyn Drafter>>) -> Self {
        head.map_or_else(Drafters::none, Drafters::head)
    }
}

/// The target as a drafter may use it.
#[derive(Clone, Copy)]
pub struct TargetView<'a> {
    /// Where it runs.
    pub b: &'a dyn Backend,
    /// The model.
    pub model: &'a dyn Target,
    /// The target's KV cache and states.
    pub memory: &'a Memory,
    /// The round's rows inside it, `[n, H]` for each of [`Drafter::taps`].
    pub taps: &'a [Tensor],
}

/// One stream's wish for a draft, after a round.
pub struct DraftRequest<'a> {
    /// The target's sequence.
    pub sequence: &'a Sequence,
    /// What the drafter remembers of the stream, made by [`Drafter::state`].
    pub state: &'a mut (dyn DraftState + 'static),
    /// The stream's text: every token known, the pending one last.
    pub tokens: &'a [u32],
    /// The media spans of the stream's prompt.
    pub spans: &'a Spans,
    /// Numbers of the rows of the round's step that stay, ascending. The last one is
    /// cache row `sequence.len() - 1`; after each comes its token in `tokens`.
    pub kept: std::ops::Range<usize>,
    /// Tokens wanted, at most, those of `given` among them; 0 while the prompt is not finished.
    pub limit: usize,
    /// Tokens that the draft begins with, because a constraint leaves no choice about them: what is
    /// to be guessed comes after them. Fewer than `limit`, where that is not 0. A drafter may also
    /// ignore them, and guess them itself.
    pub given: &'a [u32],
    /// How the stream samples.
    pub sampling: &'a Sampling,
    /// The stream's token counts, `tokens` included. Whatever is pushed is popped again.
    pub history: &'a mut History,
    /// Takes the probabilities that each token of the draft is drawn from, if wanted. A
    /// drafter that could not have drawn another token leaves it empty.
    pub draft_probs: Option<&'a mut Vec<TokenProbs>>,
    /// Takes how sure the drafter is of each token of the draft, from 0 to 1, if that is wanted: the probability of
    /// its likeliest token there, by logits as they are. A drafter that does not know leaves it empty.
    pub confidences: Option<&'a mut Vec<f32>>,
    /// When a drafter that guesses token by token may end the draft before `limit`; it asks for `confidences`, too.
    pub stop: Option<&'a StopRule>,
}

impl<'a> DraftRequest<'a> {
    /// The tokens that followed the rows that stay.
    fn following(&self) -> &'a [u32] {
        let end = self.sequence.len();
        &self.tokens[end - self.kept.len() + 1..=end]
    }
}

/// A state that is restored, and where each piece of what was saved goes, or none for a piece that is
/// not needed.
pub(crate) type Restored = (Box<dyn DraftState>, Vec<Option<Piece>>);

/// Whatever guesses ahead of the target.
pub trait Drafter: Send {
    /// Name, as users type it.
    fn name(&self) -> &'static str;

    /// The target's layers whose entering rows it reads ([`models::Taps`]), the same
    /// in every round.
    fn taps(&self) -> &[usize] {
        &[]
    }

    /// Whether the drafter reads the hidden rows of all rows that stay, and not only of those after which a token was
    /// chosen. Steps of more than 64 rows for texts that no such drafter reads leave the other rows out of the target's
    /// last layers.
    fn needs_all_hidden(&self) -> bool {
        true
    }

    /// Whether it guesses token by token where the device does not chain guesses by itself, says how sure it was of
    /// each, and ends the draft where [`DraftRequest::stop`] tells it to.
    fn stops(&self) -> bool {
        false
    }

    /// A state for a text of which the drafter has seen no row.
    ///
    /// # Errors
    ///
    /// [`MemoryFull`] if the drafter's own memory has no room.
    fn state(&self) -> Result<Box<dyn DraftState>, MemoryFull> {
        Ok(Box::new(NoState))
    }

    /// Whether a state of this drafter can be `saved`, in `n_pieces` pieces.
    fn fits(&self, saved: Option<&SavedDraft>, n_pieces: usize) -> bool {
        saved.is_none() && n_pieces == 0
    }

    /// The most rows, `rows` at most, with which [`DraftState::fork`] can begin once `saved`, which
    /// [fits](Drafter::fits), is restored that far.
    fn restorable(&self, _saved: Option<&SavedDraft>, rows: usize) -> usize {
        rows
    }

    /// The state of an ended text that has learned the first `rows` rows of `saved`, and where each of
    /// its pieces goes, or none for one that so many rows do not need. Nobody may use the state
    /// before all of these are [loaded](DraftState::load_piece).
    ///
    /// # Errors
    ///
    /// [`MemoryFull`] if the drafter's own memory has no room.
    ///
    /// # Panics
    ///
    /// If so many rows are not [restorable](Drafter::restorable).
    fn restore(&self, _saved: Option<&SavedDraft>, _rows: usize) -> Result<Restored, MemoryFull> {
        Ok((self.state()?, Vec::new()))
    }

    /// Free pages of the drafter's own memory.
    fn n_free_pages(&self) -> usize {
        usize::MAX
    }

    /// Learns the rows that stay of a round, then drafts up to `limit` tokens for
    /// each request, in order. `hidden` has all of the round's rows, or those after which a token was chosen.
    fn draft(
        &mut self,
        target: TargetView<'_>,
        hidden: &HiddenRows,
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>>;
}

/// The last token of `draft` as the next step reads it. After a row that gave no token the
/// rest of the draft does not count ([`NO_TOKEN`]), so any token will do.
fn newest(draft: &[u32]) -> Option<u32> {
    let known = |&token: &u32| if token == NO_TOKEN { 0 } else { token };
    draft.last().map(known)
}

/// Tokens that all of `active` want after `n` of them, up to where the given ones of one of them
/// end.
fn shortest(requests: &[DraftRequest<'_>], active: &[usize], n: usize) -> usize {
    let limits = active.iter().map(|&r| requests[r].limit);
    let given = active.iter().map(|&r| requests[r].given.len());
    let end = limits.chain(given.filter(|&given| given > n)).min();
    end.map_or(0, |end| end - n)
}

/// Tokens that all of `active` get in one go after `n` of them: one where they may stop after it.
fn steps(requests: &[DraftRequest<'_>], active: &[usize], n: usize) -> usize {
    let may_stop = active.iter().any(|&r| requests[r].stop.is_some());
    let steps = shortest(requests, active, n);
    if may_stop { steps.min(1) } else { steps }
}

/// Whether the drafts of `active` end here, because another guess of each would bring less than its time is worth. They
/// share that time, so that none ends alone.
fn stop(requests: &[DraftRequest<'_>], active: &[usize]) -> bool {
    let gain = |&r: &usize| {
        let request = &requests[r];
        let confidences = request.confidences.as_deref().filter(|c| !c.is_empty());
        Some(request.stop?.gain(confidences?))
    };
    let gains: Option<Vec<f64>> = active.iter().map(gain).collect();
    gains.is_some_and(|gains| gains.iter().sum::<f64>() < 0.0)
}

/// The requests that still want a token after `n` of them.
fn wanting(requests: &[DraftRequest<'_>], n: usize) -> Vec<usize> {
    (0..requests.len())
        .filter(|&r| requests[r].limit > n)
        .collect()
}
