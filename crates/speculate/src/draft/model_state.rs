//! What a draft model remembers of a text: its own keys, values and recurrent state.
//!
//! All of it can be made anew from the text, so a state may have fewer rows than the target's
//! sequence, and counts as one that has learned them all: what it lacks is read before the next draft.

use super::head_state::lock;
use super::{DraftState, Restored, SavedDraft};
use backend::{Backend, MAX_TENTATIVE};
use cache::{Mark, Memory, MemoryFull, Piece, Sequence};
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// What a draft model remembers of a text.
pub(super) struct ModelState {
    /// The draft model's memory, which all of its states share.
    memory: Arc<Mutex<Memory>>,
    pub(super) sequence: Sequence,
    /// Tokens of the newest rows, which are guesses.
    guessed: Vec<u32>,
    /// Where a model with recurrent state goes back to after a draft.
    mark: Option<Mark>,
}

/// Slots of recurrent state in `memory` that texts which end must leave: one for each sequence that is
/// opened later, and one for the mark of each.
fn reserved_slots(memory: &Memory) -> usize {
    2 * memory.size().sequences - memory.n_open()
}

impl ModelState {
    /// The state of a text of which the draft model has read no row.
    pub(super) fn open(memory: &Arc<Mutex<Memory>>) -> Result<Self, MemoryFull> {
        let sequence = lock(memory).open()?;
        Ok(ModelState::new(memory, sequence))
    }

    fn new(memory: &Arc<Mutex<Memory>>, sequence: Sequence) -> Self {
        ModelState {
            memory: memory.clone(),
            sequence,
            guessed: Vec::new(),
            mark: None,
        }
    }

    /// Rows of tokens that the text had when they ran.
    fn n_true(&self) -> usize {
        self.sequence.len() - self.guessed.len()
    }

    /// Forgets the rows of guesses that are not in `tokens`, and all from row `most` on.
    pub(super) fn settle(&mut self, memory: &mut Memory, tokens: &[u32], most: usize) {
        let text = tokens.get(self.n_true()..).unwrap_or_default();
        let pairs = self.guessed.iter().zip(text);
        let n_right = pairs.take_while(|(guess, token)| guess == token).count();
        let rows = (self.n_true() + n_right).min(most);
        self.guessed.clear();
        memory.truncate(&mut self.sequence, rows);
    }

    /// Takes snapshots where the target's `sequence` has some, as far as there is room: texts that go on
    /// from there find as many rows here.
    pub(super) fn take_snapshots(
        &mut self,
        b: &dyn Backend,
        memory: &mut Memory,
        sequence: &Sequence,
    ) {
        if !memory.takes_snapshots() {
            return;
        }
        for snapshot in sequence.snapshots().iter().filter(|s| !s.is_freed()) {
            let has_room = memory.n_free_slots() > reserved_slots(memory);
            let rows = snapshot.rows();
            if has_room && memory.has_for_snapshot(&self.sequence, rows) {
                memory.snapshot(b, &mut self.sequence, rows);
            }
        }
    }

    /// Notes that guesses of a draft of `limit` tokens get rows from now on. False if there is no
    /// room to go back from them.
    pub(super) fn begin_guesses(
        &mut self,
        b: &dyn Backend,
        memory: &mut Memory,
        limit: usize,
    ) -> bool {
        if limit < 2 || !memory.has_state() {
            return true;
        }
        self.mark = memory.mark(b, &self.sequence);
        self.mark.is_some()
    }

    /// Notes that `draft` was made, of which all tokens but the last one have rows.
    pub(super) fn end_guesses(&mut self, memory: &mut Memory, draft: &[u32]) {
        match self.mark.take() {
            Some(mark) => memory.rewind(&mut self.sequence, mark),
            None => self.guessed = draft[..draft.len().saturating_sub(1)].to_vec(),
        }
    }
}

impl DraftState for ModelState {
    fn keep(&mut self) {
        let mut memory = lock(&self.memory);
        let rows = self.sequence.len() - self.guessed.len();
        self.guessed.clear();
        memory.truncate(&mut self.sequence, rows);
        memory.keep(&mut self.sequence);
        // A text that is read again later is worth less than one that cannot begin.
        if memory.n_free_slots() < reserved_slots(&memory) {
            memory.cut(&mut self.sequence, 0);
        }
    }

    fn cut(&mut self, rows: usize) {
        lock(&self.memory).cut(&mut self.sequence, rows);
    }

    fn lacking_pages(&self, rows: usize) -> usize {
        let context = lock(&self.memory).size().context;
        self.sequence.lacking_pages(rows.min(context))
    }

    fn forkable(&self, rows: usize) -> usize {
        rows
    }

    fn fork(&self, backend: &dyn Backend, rows: usize) -> Result<Box<dyn DraftState>, MemoryFull> {
        let mut memory = lock(&self.memory);
        let rows = memory.forkable(&self.sequence, rows.min(self.n_true()));
        let sequence = match memory.fork(backend, &self.sequence, rows) {
            Err(MemoryFull::Pages(_)) => memory.open()?,
            forked => forked?,
        };
        Ok(Box::new(ModelState::new(&self.memory, sequence)))
    }

    fn saved(&self) -> Option<(SavedDraft, Vec<Piece>)> {
        let (outline, pieces) = lock(&self.memory).outline(&self.sequence);
        let saved = SavedDraft {
            outline,
            ..SavedDraft::default()
        };
        Some((saved, pieces))
    }

    fn has_all_of(&self, saved: &SavedDraft) -> bool {
        lock(&self.memory).has_all_of(&self.sequence, &saved.outline)
    }

    fn save_piece(&self, backend: &dyn Backend, piece: Piece) -> Vec<u8> {
        lock(&self.memory).save_piece(backend, piece)
    }

    fn load_piece(&mut self, backend: &dyn Backend, piece: Piece, bytes: &[u8]) -> bool {
        lock(&self.memory).load_piece(backend, piece, bytes)
    }
}

/// After which of the rows `rows`, all but the first and the last, the target has its next snapshot of
/// `sequence`.
pub(super) fn due(sequence: &Sequence, rows: Range<usize>) -> Option<usize> {
    let snapshots = sequence.snapshots().iter().filter(|s| !s.is_freed());
    let mut at = snapshots.map(|s| s.rows());
    at.find(|&at| rows.start < at && at < rows.end)
}

/// How many of the rows `rows`, which run now, the recurrent state is to have seen for good: those up
/// to the next snapshot, if the others could be taken back. None if none is due.
pub(super) fn certain(sequence: &Sequence, rows: &Range<usize>) -> Option<usize> {
    let at = due(sequence, rows.clone())?;
    (rows.end - at <= MAX_TENTATIVE).then_some(at - rows.start)
}

/// Whether a state in `memory` can be `saved`, in `n_pieces` pieces.
pub(super) fn fits(memory: &Mutex<Memory>, saved: Option<&SavedDraft>, n_pieces: usize) -> bool {
    saved.is_some_and(|saved| {
        saved.n_unread == 0
            && saved.unread.is_empty()
            && lock(memory).fits(&saved.outline, n_pieces)
    })
}

/// [`Drafter::restore`](super::Drafter::restore) of a state in `memory`: as many of the rows as it
/// can begin with.
pub(super) fn restore(
    memory: &Arc<Mutex<Memory>>,
    saved: Option<&SavedDraft>,
    rows: usize,
) -> Result<Restored, MemoryFull> {
    let none = SavedDraft::default();
    let outline = &saved.unwrap_or(&none).outline;
    let mut own = lock(memory);
    let has_slot = own.n_free_slots() > reserved_slots(&own);
    let rows = own.restorable(outline, if has_slot { rows } else { 0 });
    let (sequence, pieces) = own.restore(outline, rows)?;
    drop(own);
    Ok((Box::new(ModelState::new(memory, sequence)), pieces))
}
