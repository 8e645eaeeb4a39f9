//! The state of drafters whose head has a memory of its own: a row for each of the target's,
//! made from a *feature* of it, and no guess.
//!
//! Where no stream wants a draft, rows wait, as features, and are read some at a time: a step of
//! the head reads all its weights, however few rows it has. The last rows of a text always wait where
//! the head looks further ahead than one token ([`super::layered`]).

use super::coverage::Coverage;
use super::learned::{self, Learned, Mark};
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
    /// Rows before the end of a text that wait, at least.
    lookahead: usize,
    /// Where else another text can begin, if any wait.
    marks: Vec<Mark>,
    pub(super) coverage: Coverage,
}

impl HeadState {
    /// The state of a text of which the head has read no row. The last `lookahead` rows of it wait, or
    /// all.
    pub(super) fn open(memory: &Arc<Mutex<Memory>>, lookahead: usize) -> Result<Self, MemoryFull> {
        let sequence = lock(memory).open()?;
        Ok(HeadState::new(memory, sequence, lookahead))
    }

    fn new(memory: &Arc<Mutex<Memory>>, sequence: Sequence, lookahead: usize) -> Self {
        HeadState {
            memory: memory.clone(),
            sequence,
            unread: Vec::new(),
            n_unread: 0,
            lookahead,
            marks: Vec::new(),
            coverage: Coverage::default(),
        }
    }

    /// Rows that wait.
    pub(super) fn n_unread(&self) -> usize {
        self.n_unread
    }

    fn learned(&self) -> Learned<'_> {
        Learned {
            read: self.sequence.len(),
            n_unread: self.n_unread,
            lookahead: self.lookahead,
            marks: &self.marks,
        }
    }

    /// Keeps what it takes to begin another text where `target` has snapshots; `features`, of `cols`
    /// values, are those of all rows that the head has not read.
    fn mark(&mut self, target: &Sequence, features: &[f32], cols: usize) {
        if self.lookahead == 0 {
            return;
        }
        let first = self.sequence.len();
        let known = first..first + features.len() / cols;
        let snapshots = target.snapshots().iter().filter(|s| !s.is_freed());
        let places: Vec<usize> = snapshots.map(|s| s.rows()).collect();
        let (marks, lookahead) = (&mut self.marks, self.lookahead);
        learned::renew(marks, &places, lookahead, known, (features, cols));
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

impl DraftState for HeadState {
    fn keep(&mut self) {
        lock(&self.memory).keep(&mut self.sequence);
    }

    fn cut(&mut self, rows: usize) {
        let n_unread = rows.saturating_sub(self.sequence.len()).min(self.n_unread);
        self.unread.truncate(n_unread * self.width());
        self.n_unread = n_unread;
        self.marks.retain(|mark| mark.rows <= rows);
        lock(&self.memory).cut(&mut self.sequence, rows);
    }

    fn lacking_pages(&self, rows: usize) -> usize {
        self.sequence.lacking_pages(rows)
    }

    fn forkable(&self, rows: usize) -> usize {
        let (memory, sequence) = self.own();
        let forkable = |rows| memory.forkable(sequence, rows);
        self.learned().start(rows, forkable).rows
    }

    fn fork(&self, backend: &dyn Backend, rows: usize) -> Result<Box<dyn DraftState>, MemoryFull> {
        let learned = self.learned();
        let mut memory = lock(&self.memory);
        let start = learned.start(rows, |rows| memory.forkable(&self.sequence, rows));
        assert_eq!(start.rows, rows, "so many rows of a state can be shared");
        let sequence = memory.fork(backend, &self.sequence, start.read)?;
        let mut fork = HeadState::new(&self.memory, sequence, self.lookahead);
        fork.n_unread = start.n_unread();
        fork.unread = start.features(&self.unread, self.width());
        let marks = self.marks.iter().filter(|mark| mark.rows <= rows);
        fork.marks = marks.cloned().collect();
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
            marks: self.marks.clone(),
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

/// Whether a state in `memory`, with features of `cols` values and `lookahead` rows that always wait,
/// can be `saved`, in `n_pieces` pieces.
pub(super) fn fits(
    memory: &Mutex<Memory>,
    (cols, lookahead): (usize, usize),
    saved: Option<&SavedDraft>,
    n_pieces: usize,
) -> bool {
    saved.is_some_and(|saved| {
        let values = saved.n_unread.checked_mul(cols);
        let rows = saved.outline.rows.checked_add(saved.n_unread);
        saved.n_unread <= UNREAD_MAX
            && rows.is_some_and(|rows| {
                let waits = saved.n_unread >= lookahead.min(rows);
                waits && learned::are_marks(&saved.marks, rows, (cols, lookahead))
            })
            && values == Some(saved.unread.len())
            && lock(memory).fits(&saved.outline, n_pieces)
    })
}

/// [`Drafter::restorable`](super::Drafter::restorable) of a state in `memory`.
pub(super) fn restorable(
    memory: &Mutex<Memory>,
    lookahead: usize,
    saved: Option<&SavedDraft>,
    rows: usize,
) -> usize {
    let memory = lock(memory);
    saved.map_or(0, |saved| {
        let forkable = |rows| memory.restorable(&saved.outline, rows);
        learned_of(saved, lookahead).start(rows, forkable).rows
    })
}

/// What a head has learned of the text of `saved`.
fn learned_of(saved: &SavedDraft, lookahead: usize) -> Learned<'_> {
    Learned {
        read: saved.outline.rows,
        n_unread: saved.n_unread,
        lookahead,
        marks: &saved.marks,
    }
}

/// [`Drafter::restore`](super::Drafter::restore) of a state in `memory`, with features of `cols`
/// values and `lookahead` rows that always wait.
pub(super) fn restore(
    memory: &Arc<Mutex<Memory>>,
    (cols, lookahead): (usize, usize),
    saved: Option<&SavedDraft>,
    rows: usize,
) -> Result<Restored, MemoryFull> {
    let none = SavedDraft::default();
    let saved = saved.unwrap_or(&none);
    let mut own = lock(memory);
    let learned = learned_of(saved, lookahead);
    let start = learned.start(rows, |rows| own.restorable(&saved.outline, rows));
    let (sequence, pieces) = own.restore(&saved.outline, start.read)?;
    drop(own);
    let mut state = HeadState::new(memory, sequence, lookahead);
    state.n_unread = start.n_unread();
    state.unread = start.features(&saved.unread, cols);
    let marks = saved.marks.iter().filter(|mark| mark.rows <= rows);
    state.marks = marks.cloned().collect();
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
        let unread = std::mem::take(&mut state.unread);
        state.mark(request.sequence, &unread, features.cols());
        state.unread = unread;
        rest = others;
    }
}

/// The features of all rows that the head has not read, in the order of `requests`; those
/// of the round's rows are `features`. Those that the head is to run again still wait.
pub(super) fn with_unread(
    b: &dyn Backend,
    features: Tensor,
    requests: &mut [DraftRequest<'_>],
) -> Tensor {
    let waits = |r: &mut DraftRequest<'_>| {
        let state = r.state.of::<HeadState>();
        state.n_unread + state.lookahead > 0
    };
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
        let first = values.len();
        values.append(&mut state.unread);
        values.extend_from_slice(own);
        let unread = &values[first..];
        state.mark(request.sequence, unread, cols);
        state.n_unread = state.lookahead.min(unread.len() / cols);
        state.unread = unread[unread.len() - state.n_unread * cols..].to_vec();
        rest = others;
    }
    b.upload(values.len() / cols, cols, &values)
}
