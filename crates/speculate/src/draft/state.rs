//! Draft state: what a drafter remembers of one text.

use super::Mark;
use backend::Backend;
use cache::{MemoryFull, Outline, Piece};
use std::any::Any;

/// What a drafter needs to have the state of an ended text again, beside the bytes of its pieces.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SavedDraft {
    /// What the state has in the drafter's own memory.
    pub outline: Outline,
    /// Rows learned that are not in the drafter's memory yet.
    pub n_unread: usize,
    /// What the drafter makes of them: as many values for each.
    pub unread: Vec<f32>,
    /// Where another state can begin before the end, if not everywhere; ascending.
    pub marks: Vec<Mark>,
}

/// What a drafter remembers of one text.
///
/// It belongs to the text, as the target's sequence does, and not to the drafter: it is kept and
/// forked with the sequence. Dropping it gives back the memory that it holds.
///
/// Rows are counted as in the target: a state that has learned `n` rows has seen the first
/// `n` rows of the text and, with each, the token after it.
pub trait DraftState: Any + Send {
    /// Ends the text: the state is only forked and cut from now on.
    fn keep(&mut self) {}

    /// Has the state of an ended text forget all rows from row `rows` on.
    fn cut(&mut self, rows: usize);

    /// Pages of the drafter's own memory that the state lacks before it has learned `rows` rows.
    fn lacking_pages(&self, _rows: usize) -> usize {
        0
    }

    /// The most rows, `rows` at most, with which [`DraftState::fork`] can begin another state.
    fn forkable(&self, rows: usize) -> usize;

    /// The state of another text that has the same first `rows` rows and the same token after
    /// them.
    ///
    /// # Errors
    ///
    /// [`MemoryFull`] if the drafter's own memory has no room.
    ///
    /// # Panics
    ///
    /// If so many rows cannot be shared ([`DraftState::forkable`]).
    fn fork(&self, backend: &dyn Backend, rows: usize) -> Result<Box<dyn DraftState>, MemoryFull>;

    /// What [`Drafter::restore`](super::Drafter::restore) needs to have the state of this ended text
    /// again, and where the bytes of its pieces lie; none for a state that can be made anew from
    /// the text.
    fn saved(&self) -> Option<(SavedDraft, Vec<Piece>)> {
        None
    }

    /// Whether the state still has all of `saved`, which it has said of itself.
    fn has_all_of(&self, _saved: &SavedDraft) -> bool {
        true
    }

    /// The bytes of `piece`, one of those of [`DraftState::saved`]. Waits for the device.
    ///
    /// # Panics
    ///
    /// If the state has no pieces.
    fn save_piece(&self, _backend: &dyn Backend, piece: Piece) -> Vec<u8> {
        unreachable!("{piece:?} of a state without pieces")
    }

    /// Makes `piece` of a state that is being restored what has been saved. Returns false if `bytes`
    /// cannot be that; the state is worth nothing then.
    fn load_piece(&mut self, _backend: &dyn Backend, _piece: Piece, _bytes: &[u8]) -> bool {
        false
    }
}

impl dyn DraftState {
    /// This state as the type that its drafter has made it.
    ///
    /// # Panics
    ///
    /// If another drafter has made it.
    pub fn of<S: DraftState>(&mut self) -> &mut S {
        let state: &mut dyn Any = self;
        state.downcast_mut().expect("a state of this drafter")
    }
}

/// A state that can be made anew from the text at any time, or that is empty: all of the
/// text's rows count as learned.
pub trait Derived: Default + Send + 'static {}

impl<S: Derived> DraftState for S {
    fn cut(&mut self, _rows: usize) {
        *self = S::default();
    }

    fn forkable(&self, rows: usize) -> usize {
        rows
    }

    fn fork(
        &self,
        _backend: &dyn Backend,
        _rows: usize,
    ) -> Result<Box<dyn DraftState>, MemoryFull> {
        Ok(Box::new(S::default()))
    }
}

/// Nothing, for drafters that remember nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoState;

impl Derived for NoState {}
