//! Sequences: one text's part of a memory, and every way to make it forget, go back or
//! share.

use crate::memory::{Memory, Pools, SNAPSHOTS_A_SEQUENCE};
use crate::{MemoryFull, PagePool};
use backend::{Backend, NO_PAGE, PAGE_ROWS};
use std::sync::{Arc, Mutex};

/// One text's part of a [`Memory`]. Dropping it gives back all that it holds.
///
/// `len` rows are remembered. The first `base` of them are certain: recurrent state is
/// stored after row `base`, so [`Memory::truncate`] forgets only rows past it.
#[derive(Debug)]
pub struct Sequence {
    pub(crate) pools: Arc<Mutex<Pools>>,
    pub(crate) len: usize,
    pub(crate) base: usize,
    pub(crate) slot: u32,
    /// By group: page of rows `i * PAGE_ROWS ..`, or [`NO_PAGE`] once it has left the window.
    pub(crate) tables: Vec<Vec<u32>>,
    /// Recurrent state as it was, ascending by rows.
    snapshots: Vec<Snapshot>,
}

/// A saved copy of recurrent state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Snapshot {
    /// Number of the snapshot in its pool, which counts how many sequences refer to it.
    id: u32,
    /// Rows that the state has seen.
    rows: usize,
}

impl Sequence {
    /// Rows remembered.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is remembered.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Pages that it holds, over all groups; those it shares included.
    pub fn n_pages(&self) -> usize {
        let pages = self.tables.iter().flatten();
        pages.filter(|&&page| page != NO_PAGE).count()
    }

    pub(crate) fn new(memory: &Memory, slot: u32) -> Self {
        Sequence {
            pools: memory.pools.clone(),
            len: 0,
            base: 0,
            slot,
            tables: vec![Vec::new(); memory.plan().groups.len()],
            snapshots: Vec::new(),
        }
    }

    /// Whether row `len` could be written: it begins a page, or its page has no other
    /// owner.
    pub(crate) fn can_write(&self, pools: &Pools, len: usize) -> bool {
        let alone = |(pool, table): (&PagePool, &Vec<u32>)| {
            let page = table.get(len / PAGE_ROWS);
            page.is_none_or(|&page| page == NO_PAGE || pool.owners(page) == 1)
        };
        len.is_multiple_of(PAGE_ROWS) || pools.pages.iter().zip(&self.tables).all(alone)
    }

    /// Forgets the rows from row `len` on, and gives back the pages that have none left.
    fn cut(&mut self, len: usize) {
        self.len = len;
        let mut pools = Pools::lock(&self.pools);
        for (pool, table) in pools.pages.iter_mut().zip(&mut self.tables) {
            give(pool, table.drain(len.div_ceil(PAGE_ROWS)..));
        }
    }

    /// Gives back the snapshots of more than `rows` rows.
    fn drop_snapshots_after(&mut self, rows: usize) {
        let mut pools = Pools::lock(&self.pools);
        while let Some(newest) = self.snapshots.pop_if(|snapshot| snapshot.rows > rows) {
            pools.snapshots.give(newest.id);
        }
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        let mut pools = Pools::lock(&self.pools);
        pools.slots.give(self.slot);
        for snapshot in self.snapshots.drain(..) {
            pools.snapshots.give(snapshot.id);
        }
        for (pool, table) in pools.pages.iter_mut().zip(&mut self.tables) {
            give(pool, table.drain(..));
        }
    }
}

/// Ends one owner's hold on each of `pages`.
fn give(pool: &mut PagePool, pages: impl Iterator<Item = u32>) {
    pages
        .filter(|&page| page != NO_PAGE)
        .for_each(|page| pool.give(page));
}

impl Memory {
    /// Forgets all rows of `sequence` from row `len` on: rollback of tentative rows.
    ///
    /// # Panics
    ///
    /// If certain rows would be forgotten, or there are fewer rows than `len`.
    pub fn truncate(&mut self, sequence: &mut Sequence, len: usize) {
        assert!(
            (sequence.base..=sequence.len).contains(&len),
            "rows {}..{} can be forgotten, not those from {len}",
            sequence.base,
            sequence.len
        );
        sequence.cut(len);
    }

    /// Saves the recurrent state after all rows of `sequence`, so that it and its forks can
    /// go back to it. The oldest snapshot makes room if the sequence has
    /// [`SNAPSHOTS_A_SEQUENCE`] already. Does nothing for a model without recurrent state.
    ///
    /// # Panics
    ///
    /// If some rows are tentative.
    pub fn snapshot(&mut self, backend: &dyn Backend, sequence: &mut Sequence) {
        assert_eq!(sequence.base, sequence.len, "all rows are certain");
        if self.delta.is_empty() || sequence.is_empty() {
            return;
        }
        let id = {
            let mut pools = Pools::lock(&self.pools);
            if sequence.snapshots.len() == SNAPSHOTS_A_SEQUENCE {
                pools.snapshots.give(sequence.snapshots.remove(0).id);
            }
            let id = pools.snapshots.take();
            id.expect("as many snapshots as all sequences may refer to")
        };
        let to = self.snapshot_slot(id);
        for delta in &mut self.delta {
            backend.delta_copy(delta, sequence.slot as usize, to);
        }
        let rows = sequence.len;
        sequence.snapshots.push(Snapshot { id, rows });
    }

    /// The most rows, `len` at most, that `sequence` can go back to by
    /// [`Memory::restore`]: its windows still hold all that the next row would see, a
    /// snapshot has the recurrent state, and no other sequence reads the page that the next
    /// row would be written to.
    pub fn restorable(&self, sequence: &Sequence, len: usize) -> usize {
        let pools = Pools::lock(&self.pools);
        let mut len = len.min(sequence.len);
        if !sequence.can_write(&pools, len) {
            len -= len % PAGE_ROWS;
        }
        if !self.delta.is_empty() && len < sequence.base {
            let snapshots = sequence.snapshots.iter().rev();
            let mut usable =
                snapshots.filter(|s| s.rows <= len && sequence.can_write(&pools, s.rows));
            len = usable.next().map_or(0, |snapshot| snapshot.rows);
        }
        if self.windows_hold(sequence, len) {
            len
        } else {
            0
        }
    }

    /// Forgets all rows of `sequence` from row `len` on, certain or not, so that another text
    /// can go on from there.
    ///
    /// # Panics
    ///
    /// If the sequence cannot go back there ([`Memory::restorable`]).
    pub fn restore(&mut self, backend: &dyn Backend, sequence: &mut Sequence, len: usize) {
        assert_eq!(
            self.restorable(sequence, len),
            len,
            "a sequence of {} rows can go back there",
            sequence.len
        );
        if len < sequence.base {
            if len > 0 {
                self.load_snapshot(backend, sequence, sequence.slot, len);
            }
            sequence.base = len;
        }
        sequence.drop_snapshots_after(len);
        sequence.cut(len);
    }

    /// The most rows, `len` at most, with which [`Memory::fork`] can begin another
    /// sequence: whole pages of certain rows, as far as windows still hold all that the next
    /// row would see and a snapshot has the recurrent state.
    pub fn forkable(&self, sequence: &Sequence, len: usize) -> usize {
        let certain = len.min(sequence.len).min(sequence.base);
        let mut rows = certain / PAGE_ROWS * PAGE_ROWS;
        if !self.delta.is_empty() {
            let mut snapshots = sequence.snapshots.iter().rev();
            let usable = snapshots.find(|s| s.rows <= rows && s.rows.is_multiple_of(PAGE_ROWS));
            rows = usable.map_or(0, |snapshot| snapshot.rows);
        }
        if self.windows_hold(sequence, rows) {
            rows
        } else {
            0
        }
    }

    /// A new sequence that remembers the first `rows` rows of `sequence`, whose pages and
    /// snapshots both own from now on. Either can go on, forget and end as if alone.
    ///
    /// # Errors
    ///
    /// [`MemoryFull::Sequences`] if as many sequences as planned are open.
    ///
    /// # Panics
    ///
    /// If so many rows cannot be shared ([`Memory::forkable`]).
    pub fn fork(
        &mut self,
        backend: &dyn Backend,
        sequence: &Sequence,
        rows: usize,
    ) -> Result<Sequence, MemoryFull> {
        assert_eq!(
            self.forkable(sequence, rows),
            rows,
            "so many rows of a sequence of {} can be shared",
            sequence.len
        );
        let mut fork = self.open()?;
        if rows > 0 && !self.delta.is_empty() {
            self.load_snapshot(backend, sequence, fork.slot, rows);
        }
        fork.len = rows;
        fork.base = rows;
        let mut pools = Pools::lock(&self.pools);
        let tables = fork.tables.iter_mut().zip(&sequence.tables);
        for (pool, (shared, table)) in pools.pages.iter_mut().zip(tables) {
            shared.extend_from_slice(&table[..rows / PAGE_ROWS]);
            let pages = shared.iter().filter(|&&page| page != NO_PAGE);
            pages.for_each(|&page| pool.share(page));
        }
        let snapshots = sequence.snapshots.iter();
        fork.snapshots = snapshots.filter(|s| s.rows <= rows).copied().collect();
        let ids = fork.snapshots.iter().map(|snapshot| snapshot.id);
        ids.for_each(|id| pools.snapshots.share(id));
        drop(pools);
        Ok(fork)
    }

    /// Pages that belong to `sequences` and to nobody else, over all groups.
    pub fn pages_only_of<'a>(&self, sequences: impl Iterator<Item = &'a Sequence>) -> usize {
        let pools = Pools::lock(&self.pools);
        let mut held: Vec<Vec<usize>> = pools.pages.iter().map(|p| vec![0; p.n_pages()]).collect();
        for sequence in sequences {
            for (held, table) in held.iter_mut().zip(&sequence.tables) {
                let pages = table.iter().filter(|&&page| page != NO_PAGE);
                pages.for_each(|&page| held[page as usize] += 1);
            }
        }
        let only = |(pool, held): (&PagePool, Vec<usize>)| {
            let pages = (0..).zip(held).filter(|&(_, n)| n > 0);
            pages.filter(|&(page, n)| n == pool.owners(page)).count()
        };
        pools.pages.iter().zip(held).map(only).sum()
    }

    /// Copies the snapshot of `rows` rows that `sequence` refers to into `slot`.
    fn load_snapshot(
        &mut self,
        backend: &dyn Backend,
        sequence: &Sequence,
        slot: u32,
        rows: usize,
    ) {
        if self.delta.is_empty() {
            return;
        }
        let snapshot = sequence.snapshots.iter().find(|s| s.rows == rows);
        let from = self.snapshot_slot(snapshot.expect("restorable or forkable").id);
        for delta in &mut self.delta {
            backend.delta_copy(delta, from, slot as usize);
        }
    }

    /// Where a snapshot lies among the slots of recurrent state: after those of sequences.
    fn snapshot_slot(&self, id: u32) -> usize {
        self.size().sequences + id as usize
    }

    /// Whether all that a row after the first `len` rows would see is still there.
    fn windows_hold(&self, sequence: &Sequence, len: usize) -> bool {
        let mut tables = sequence.tables.iter().zip(&self.plan().groups);
        tables.all(|(table, group)| {
            let window = group.window.unwrap_or(usize::MAX);
            let first = (len + 1).saturating_sub(window) / PAGE_ROWS;
            table.get(first).is_none_or(|&page| page != NO_PAGE)
        })
    }
}
