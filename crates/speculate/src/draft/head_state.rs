//! The state of drafters whose head has a memory of its own: a row for each of the target's,
//! made from a *feature* of it, and no guess.
//!
//! Where no stream wants a draft, rows wait, as features, and are read some at a time: a step of
//! the head reads all its weights, however few rows it has.

use super::coverage::Coverage;
use super::{DraftRequest, DraftState, Restored, SavedDraft};
use backend::{Backend, Batch, MAX_TENTATIVE, Tensor};
use cache::{Memory, MemoryFull, Piece, Sequence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Rows of a stream that wait to be read, at most: no more than a draft leaves, so that
/// reading them holds up a draft by little and takes no step of a new size.
const UNREAD_MAX: usize = MAX_TENTATIVE;

/// What a head remembers of a text: its own keys and values of the rows that it has
/// read, and the features of rows that wait.
pub(super) struct HeadState {
    /// The head's memory, which all of its states share.
    memory: Arc<Mutex<Memory>>,
    pub(super) sequence: Sequence,
    /// Features of the rows that follow those of `sequence`: `[n_unread, F]`.
    unread: Vec<f32>,
    n_unread: usize,
    pub(super) coverage: Coverage,
}

impl HeadState {
    /// The state of a text of which the head has read no row.
    pub(super) fn open(memory: &Arc<Mutex<Memory>>) -> Result<Self, MemoryFull> {
        let sequence = lock(memory).open()?;
        Ok(HeadState::new(memory, sequence))
    }

    fn new(memory: &Arc<Mutex<Memory>>, sequence: Sequence) -> Self {
        HeadState {
            memory: memory.clone(),
            sequence,
            unread: Vec::new(),
            n_unread: 0,
            coverage: Coverage::default(),
        }
    }

    /// Values of the features of a row that waits; 0 if none does.
    fn width(&self) -> usize {
        self.unread.len().checked_div(self.n_unread).unwrap_or(0)
    }

    /// The head's memory, locked, and the sequence in it that belongs to this state.
    fn own(&self) -> (MutexGuard<'_, Memory>, &Sequence) {
        (lock(&self.memory), &self.sequence)
    }
}

/// The most rows, `rows` at most, with which a state can begin after one of which `read` rows are in
/// the head's memory, where `forkable` says as much of these, and `n_unread` wait after them.
fn learned(
    rows: usize,
    (read, n_unread): (usize, usize),
    forkable: impl Fn(usize) -> usize,
) -> usize {
    if rows > read && forkable(read) == read {
        return rows.min(read + n_unread);
    }
    forkable(rows)
}

impl DraftState for HeadState {
    fn keep(&mut self) {
        lock(&self.memory).keep(&mut self.sequence);
    }

    fn cut(&mut self, rows: usize) {
        let n_unread = rows.saturating_sub(self.sequence.len()).min(self.n_unread);
        self.unread.truncate(n_unread * self.width());
        self.n_unread = n_unread;
        lock(&self.memory).cut(&mut self.sequence, rows);
    }

    fn lacking_pages(&self, rows: usize) -> usize {
        self.sequence.lacking_pages(rows)
    }

    fn forkable(&self, rows: usize) -> usize {
        let (memory, sequence) = self.own();
        let forkable = |rows| memory.forkable(sequence, rows);
        learned(rows, (sequence.len(), self.n_unread), forkable)
    }

    fn fork(&self, backend: &dyn Backend, rows: usize) -> Result<Box<dyn DraftState>, MemoryFull> {
        let read = rows.min(self.sequence.len());
        let sequence = lock(&self.memory).fork(backend, &self.sequence, read)?;
        let mut fork = HeadState::new(&self.memory, sequence);
        fork.n_unread = rows - read;
        fork.unread = self.unread[..fork.n_unread * self.width()].to_vec();
        Ok(Box::new(fork))
    }

    fn saved(&self) -> Option<(SavedDraft, Vec<Piece>)> {
        let (memory, sequence) = self.own();
        let (outline, pieces) = memory.outline(sequence);
        let (n_unread, unread) = (self.n_unread, self.unread.clone());
        let saved = SavedDraft {
            outline,
            n_unread,
            unread,
        };
        Some((saved, pieces))
    }

    fn has_all_of(&self, saved: &SavedDraft) -> bool {
        let (memory, sequence) = self.own();
        memory.has_all_of(sequence, &saved.outline) && self.n_unread == saved.n_unread
    }

    fn save_piece(&self, backend: &dyn Backend, piece: Piece) -> Vec<u8> {
        lock(&self.memory).save_piece(backend, piece)
    }

    fn load_piece(&mut self, backend: &dyn Backend, piece: Piece, bytes: &[u8]) -> bool {
        lock(&self.memory).load_piece(backend, piece, bytes)
    }
}

/// A head's memory. A panic elsewhere leaves it whole: sequences are changed in one go.
pub(super) fn lock(memory: &Mutex<Memory>) -> MutexGuard<'_, Memory> {
    memory.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a state in `memory`, with features of `cols` values, can be `saved`, in `n_pieces` pieces.
pub(super) fn fits(
    memory: &Mutex<Memory>,
    cols: usize,
    saved: Option<&SavedDraft>,
    n_pieces: usize,
) -> bool {
    saved.is_some_and(|saved| {
        let values = saved.n_unread.checked_mul(cols);
        saved.n_unread <= UNREAD_MAX
            && values == Some(saved.unread.len())
            && lock(memory).fits(&saved.outline, n_pieces)
    })
}

/// [`Drafter::restorable`](super::Drafter::restorable) of a state in `memory`.
pub(super) fn restorable(memory: &Mutex<Memory>, saved: Option<&SavedDraft>, rows: usize) -> usize {
    let memory = lock(memory);
    saved.map_or(0, |saved| {
        let forkable = |rows| memory.restorable(&saved.outline, rows);
        learned(rows, (saved.outline.rows, saved.n_unread), forkable)
    })
}

/// [`Drafter::restore`](super::Drafter::restore) of a state in `memory`, with features of `cols`
/// values.
pub(super) fn restore(
    memory: &Arc<Mutex<Memory>>,
    cols: usize,
    saved: Option<&SavedDraft>,
    rows: usize,
) -> Result<Restored, MemoryFull> {
    let none = SavedDraft::default();
    let saved = saved.unwrap_or(&none);
    let read = rows.min(saved.outline.rows);
    let (sequence, pieces) = lock(memory).restore(&saved.outline, read)?;
    let mut state = HeadState::new(memory, sequence);
    state.n_unread = rows - read;
    state.unread = saved.unread[..state.n_unread * cols].to_vec();
    Ok((Box::new(state), pieces))
}

/// Adds rows for `tokens` to `sequence` and `batch`.
pub(super) fn push(
    memory: &mut Memory,
    batch: &mut Batch,
    sequence: &mut Sequence,
    tokens: &[u32],
    certain: usize,
) {
    let pushed = memory.push(batch, sequence, tokens, certain);
    pushed.expect("the head's memory is as large as the target's");
}

/// Whether the round's rows of `request` can wait until a draft is wanted.
pub(super) fn may_wait(request: &mut DraftRequest<'_>) -> bool {
    let n_unread = request.state.of::<HeadState>().n_unread;
    request.limit == 0 && n_unread + request.kept.len() <= UNREAD_MAX
}

/// Keeps the features of the round's rows, which are in the order of `requests`.
pub(super) fn leave_unread(b: &dyn Backend, features: &Tensor, requests: &mut [DraftRequest<'_>]) {
    let values = b.download(features);
    let mut rest = &values[..];
    for request in requests {
        let (own, others) = rest.split_at(request.kept.len() * features.cols());
        let state = request.state.of::<HeadState>();
        state.unread.extend_from_slice(own);
        state.n_unread += request.kept.len();
        rest = others;
    }
}

/// The features of all rows that the head has not read, in the order of `requests`; those
/// of the round's rows are `features`.
pub(super) fn with_unread(
    b: &dyn Backend,
    features: Tensor,
    requests: &mut [DraftRequest<'_>],
) -> Tensor {
    let waits = |r: &mut DraftRequest<'_>| r.state.of::<HeadState>().n_unread > 0;
    if !requests.iter_mut().any(waits) {
        return features;
    }
    let cols = features.cols();
    let new = b.download(&features);
    let mut rest = &new[..];
    let mut values = Vec::new();
    for request in requests {
        let (own, others) = rest.split_at(request.kept.len() * cols);
        let state = request.state.of::<HeadState>();
        values.append(&mut state.unread);
        state.n_unread = 0;
        values.extend_from_slice(own);
        rest = others;
    }
    b.upload(values.len() / cols, cols, &values)
}
