//! Snapshots: what a row needs of the rows before it and their sequence will not keep.

use crate::Sequence;
use crate::memory::{Memory, Pools};
use crate::sequence::give;
use crate::start::{Start, first_seen};
use backend::{Backend, PAGE_ROWS};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a row after some rows of a text needs and pages of full attention do not have: the
/// recurrent state, and the pages of windows. Sequences share it; whoever needs its room more can
/// [free](Snapshot::free) it at any time, and nobody can go on from there then.
#[derive(Debug)]
pub struct Snapshot {
    pools: Arc<Mutex<Pools>>,
    /// Rows that the saved state has seen for good.
    pub(crate) base: usize,
    /// Rows that the state can be brought to: those after `base` are saved as updates.
    pub(crate) len: usize,
    /// What it holds, until it is freed.
    held: Mutex<Option<Held>>,
}

/// What a snapshot holds.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    /// Where the recurrent state lies, if the model has any.
    pub(crate) slot: Option<u32>,
    /// Pages of each group with a window, from the page of this number on; none where
    /// the sequence's own tables have them.
    pub(crate) windows: Vec<(usize, Vec<u32>)>,
}

impl Snapshot {
    pub(crate) fn new(sequence: &Sequence, (base, len): (usize, usize), held: Held) -> Arc<Self> {
        Arc::new(Snapshot {
            pools: sequence.pools.clone(),
            base,
            len,
            held: Mutex::new(Some(held)),
        })
    }

    /// Rows after which a sequence can go on from here, at the least.
    pub fn rows(&self) -> usize {
        self.base
    }

    /// Whether it has been freed.
    pub fn is_freed(&self) -> bool {
        self.held().is_none()
    }

    /// Whether it has a slot of recurrent state.
    pub fn has_state(&self) -> bool {
        self.held().is_some_and(|held| held.slot.is_some())
    }

    /// Gives back all that it holds, whoever else has it.
    pub fn free(&self) {
        let held = self.lock().take();
        let Some(mut held) = held else { return };
        let mut pools = Pools::lock(&self.pools);
        if let Some(slot) = held.slot {
            pools.slots.give(slot);
        }
        for (pool, (_, pages)) in pools.pages.iter_mut().zip(&mut held.windows) {
            give(pool, pages.drain(..));
        }
    }

    /// Where forks can begin with what it holds, which is `held`.
    pub(crate) fn start(&self, held: &Held) -> Start {
        Start {
            base: self.base,
            len: self.len,
            has_windows: held.has_windows(),
        }
    }

    /// What it holds; none once it is freed.
    pub(crate) fn held(&self) -> Option<Held> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        self.free();
    }
}

impl Held {
    /// Whether it has the pages of windows that a row after the snapshot's own rows sees.
    pub(crate) fn has_windows(&self) -> bool {
        !self.windows.is_empty()
    }
}

impl Memory {
    /// Whether rows can be gone back to only where a snapshot was taken, or near the end of a
    /// sequence: the model has recurrent state or windows.
    pub fn takes_snapshots(&self) -> bool {
        self.has_state() || self.plan().groups.iter().any(|g| g.window.is_some())
    }

    /// Whether the model has recurrent state.
    pub fn has_state(&self) -> bool {
        !self.delta.is_empty()
    }

    /// Whether [`Memory::snapshot`] of `rows` rows of `sequence` would save all that it has to, as
    /// far as the sequence has it: its state has seen so many rows for good, and its windows still
    /// hold what the next row would see.
    pub fn has_for_snapshot(&self, sequence: &Sequence, rows: usize) -> bool {
        let has_state = !self.has_state() || sequence.base == rows;
        has_state
            && rows > 0
            && rows <= sequence.base
            && self.plan().windows_hold(&sequence.tables, rows)
    }

    /// Saves what a row after the first `rows` rows of `sequence` needs, so that forks can begin
    /// there. Returns false if there is no free slot for the recurrent state, and does nothing for
    /// a model that [needs no snapshots](Memory::takes_snapshots) or where there is one.
    ///
    /// # Panics
    ///
    /// If the sequence [has not](Memory::has_for_snapshot) what is to be saved, or is kept.
    pub fn snapshot(
        &mut self,
        backend: &dyn Backend,
        sequence: &mut Sequence,
        rows: usize,
    ) -> bool {
        assert!(
            self.has_for_snapshot(sequence, rows),
            "{rows} rows can be saved"
        );
        sequence.snapshots.retain(|s| !s.is_freed());
        let exists = sequence.snapshots.iter().any(|s| s.base == rows);
        if exists || !self.takes_snapshots() {
            return true;
        }
        let from = sequence.slot.expect("a sequence that is not kept");
        let mut slot = None;
        if self.has_state() {
            slot = Pools::lock(&self.pools).slots.take();
            let Some(to) = slot else { return false };
            for delta in &mut self.delta {
                backend.delta_copy(delta, from as usize, to as usize);
            }
        }
        let len = if self.has_state() { sequence.len } else { rows };
        let windows = self.share_windows(sequence, rows);
        let snapshot = Snapshot::new(sequence, (rows, len), Held { slot, windows });
        let at = sequence.snapshots.partition_point(|s| s.base < rows);
        sequence.snapshots.insert(at, snapshot);
        true
    }

    /// Takes hold of the pages that a row after the first `rows` rows of `sequence` sees through
    /// windows.
    fn share_windows(&self, sequence: &Sequence, rows: usize) -> Vec<(usize, Vec<u32>)> {
        let mut pools = Pools::lock(&self.pools);
        let tables = sequence.tables.iter().zip(&self.plan().groups);
        let share =
            |(pool, (table, group)): (&mut crate::PagePool, (&Vec<u32>, &crate::GroupPlan))| {
                let Some(window) = group.window else {
                    return (0, Vec::new());
                };
                let first = first_seen(window, rows);
                let pages = table[first..rows.div_ceil(PAGE_ROWS)].to_vec();
                pages.iter().for_each(|&page| pool.share(page));
                (first, pages)
            };
        pools.pages.iter_mut().zip(tables).map(share).collect()
    }
}
