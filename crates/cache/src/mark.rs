//! Marks: what a running sequence is now, so that it can be taken back there after steps that
//! [`Memory::truncate`] cannot undo.
//!
//! A step makes the rows of the step before it certain for the recurrent state. Whoever runs guesses
//! a row at a time, as a chain of steps does, marks the sequence before and rewinds it after.

use crate::Sequence;
use crate::memory::{Memory, Pools};
use backend::{Backend, MAX_TENTATIVE};
use std::sync::{Arc, Mutex};

/// What a sequence was when it was marked: its rows, and a copy of its recurrent state if the model
/// has any. Dropping it gives back the slot of the copy.
#[derive(Debug)]
pub struct Mark {
    pools: Arc<Mutex<Pools>>,
    len: usize,
    base: usize,
    slot: Option<u32>,
}

impl Drop for Mark {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            Pools::lock(&self.pools).slots.give(slot);
        }
    }
}

impl Memory {
    /// Free slots of recurrent state; as many as can be for a model without.
    pub fn n_free_slots(&self) -> usize {
        match self.has_state() {
            true => Pools::lock(&self.pools).slots.n_free(),
            false => usize::MAX,
        }
    }

    /// Marks what `sequence` is now. None if there is no free slot for a copy of its recurrent state.
    ///
    /// # Panics
    ///
    /// If the sequence is [kept](Memory::keep).
    pub fn mark(&mut self, backend: &dyn Backend, sequence: &Sequence) -> Option<Mark> {
        let from = sequence.slot.expect("a sequence that is not kept");
        let mut slot = None;
        if self.has_state() {
            let to = Pools::lock(&self.pools).slots.take()?;
            for delta in &mut self.delta {
                backend.delta_copy(delta, from as usize, to as usize);
            }
            slot = Some(to);
        }
        Some(Mark {
            pools: sequence.pools.clone(),
            len: sequence.len,
            base: sequence.base,
            slot,
        })
    }

    /// Takes `sequence` back to what it was when `mark` was made of it: rows that came after are
    /// forgotten, however many steps they came in.
    ///
    /// # Panics
    ///
    /// If rows have been forgotten since that the mark has, or more than [`MAX_TENTATIVE`] came
    /// after it: windows may have given up what its rows see.
    pub fn rewind(&mut self, sequence: &mut Sequence, mut mark: Mark) {
        assert!(
            (mark.len..=mark.len + MAX_TENTATIVE).contains(&sequence.len),
            "rows {}.. of {} can be forgotten",
            mark.len,
            sequence.len
        );
        if mark.slot.is_some() {
            // The mark gives back the slot of the state that is forgotten.
            std::mem::swap(&mut sequence.slot, &mut mark.slot);
        }
        sequence.base = mark.base;
        self.truncate(sequence, mark.len);
    }
}
