//! Sequences: one text's part of a memory, and every way to make it forget, stay or share.

use crate::memory::{Memory, Pools};
use crate::snapshot::Held;
use crate::{MemoryFull, PagePool, Snapshot};
use backend::{Backend, NO_PAGE, PAGE_ROWS};
use std::collections::HashSet;
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
    /// Where the recurrent state lies; none once the sequence is kept.
    pub(crate) slot: Option<u32>,
    /// By group: page of rows `i * PAGE_ROWS ..`, or [`NO_PAGE`] once it has left the window.
    pub(crate) tables: Vec<Vec<u32>>,
    /// Where forks can begin besides, ascending by rows.
    pub(crate) snapshots: Vec<Arc<Snapshot>>,
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

    /// The first rows that are certain: [`Memory::truncate`] forgets none of them.
    pub fn certain(&self) -> usize {
        self.base
    }

    /// Pages in its tables, over all groups; those it shares included.
    pub fn n_pages(&self) -> usize {
        let pages = self.tables.iter().flatten();
        pages.filter(|&&page| page != NO_PAGE).count()
    }

    /// Pages that the sequence would have to take in a group before it has `rows` rows.
    pub fn lacking_pages(&self, rows: usize) -> usize {
        let held = self.tables.iter().map(Vec::len).min().unwrap_or(usize::MAX);
        rows.div_ceil(PAGE_ROWS).saturating_sub(held)
    }

    /// The snapshots of the sequence, ascending by rows; some of them may be freed.
    pub fn snapshots(&self) -> &[Arc<Snapshot>] {
        &self.snapshots
    }

    /// Whether it cannot get rows: it is [kept](Memory::keep) or [absent](Memory::absent).
    pub fn is_closed(&self) -> bool {
        self.slot.is_none()
    }

    pub(crate) fn new(memory: &Memory, slot: Option<u32>) -> Self {
        Sequence {
            pools: memory.pools.clone(),
            len: 0,
            base: 0,
            slot,
            tables: vec![Vec::new(); memory.plan().groups.len()],
            snapshots: Vec::new(),
        }
    }

    /// Forgets the rows from row `len` on, and gives back the pages that have none left.
    fn cut(&mut self, len: usize) {
        self.len = len;
        let mut pools = Pools::lock(&self.pools);
        for (pool, table) in pools.pages.iter_mut().zip(&mut self.tables) {
            let first = len.div_ceil(PAGE_ROWS).min(table.len());
            give(pool, table.drain(first..));
        }
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        let mut pools = Pools::lock(&self.pools);
        if let Some(slot) = self.slot {
            pools.slots.give(slot);
            pools.n_open -= 1;
        }
        for (pool, table) in pools.pages.iter_mut().zip(&mut self.tables) {
            give(pool, table.drain(..));
        }
    }
}

/// Ends one owner's hold on each of `pages`.
pub(crate) fn give(pool: &mut PagePool, pages: impl Iterator<Item = u32>) {
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

    /// Ends `sequence`, so that another one can be opened, and keeps its rows for
    /// [`Memory::fork`]. All of them are certain from now on. Its recurrent state becomes a
    /// snapshot where it lies.
    ///
    /// # Panics
    ///
    /// If the sequence is kept already.
    pub fn keep(&mut self, sequence: &mut Sequence) {
        let slot = sequence.slot.take().expect("a sequence that is not kept");
        sequence.snapshots.retain(|s| !s.is_freed());
        let (base, len) = (sequence.base, sequence.len);
        let mut snapshots = sequence.snapshots.iter();
        let exists = snapshots.any(|s| s.base == base && s.len >= len);
        let mut pools = Pools::lock(&self.pools);
        pools.n_open -= 1;
        if self.has_state() && base > 0 && !exists {
            let held = Held {
                slot: Some(slot),
                windows: Vec::new(),
            };
            let snapshot = Snapshot::new(sequence, (base, len), held);
            sequence.snapshots.push(snapshot);
        } else {
            pools.slots.give(slot);
        }
        sequence.base = sequence.len;
    }

    /// Has a kept sequence forget its rows from row `rows` on, and its snapshots of more.
    ///
    /// # Panics
    ///
    /// If the sequence is not [kept](Memory::keep).
    pub fn cut(&mut self, sequence: &mut Sequence, rows: usize) {
        assert!(sequence.slot.is_none(), "a kept sequence");
        if rows < sequence.len {
            sequence.snapshots.retain(|snapshot| snapshot.len <= rows);
            sequence.cut(rows);
            sequence.base = rows;
        }
    }

    /// The most rows, `len` at most, with which [`Memory::fork`] can begin another
    /// sequence: certain rows, as far as windows hold all that the next row would see and a
    /// snapshot has the recurrent state.
    pub fn forkable(&self, sequence: &Sequence, len: usize) -> usize {
        let len = len.min(sequence.len).min(sequence.base);
        let newest_first = sequence.snapshots.iter().rev();
        let starts = newest_first.filter_map(|s| Some(s.start(&s.held()?)));
        self.plan().deepest(&sequence.tables, starts, len)
    }

    /// What `snapshot` holds, if a fork of `sequence` can begin with `rows` rows from there.
    fn usable(&self, sequence: &Sequence, snapshot: &Snapshot, rows: usize) -> Option<Held> {
        let held = snapshot.held()?;
        let start = snapshot.start(&held);
        let allows = self.plan().allows(&sequence.tables, start, rows);
        allows.then_some(held)
    }

    /// A new sequence that remembers the first `rows` rows of `sequence`, running or kept. Either
    /// can go on, forget and end as if alone.
    ///
    /// # Errors
    ///
    /// As [`Memory::open`], and [`MemoryFull::Pages`] if there is no page for the rows of the last
    /// page that is not full, which is copied.
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
        if rows == 0 {
            return Ok(fork);
        }
        let in_tables = self.plan().windows_hold(&sequence.tables, rows);
        let mut newest_first = sequence.snapshots.iter().rev();
        let usable = newest_first.find_map(|s| Some((s, self.usable(sequence, s, rows)?)));
        fork.len = rows;
        fork.base = rows;
        if self.has_state() {
            let (snapshot, held) = usable.as_ref().expect("forkable");
            let (from, to) = (held.slot.expect("state"), fork.slot.expect("running"));
            for delta in &mut self.delta {
                backend.delta_copy(delta, from as usize, to as usize);
            }
            fork.base = snapshot.base;
        }
        let seen = usable.as_ref().filter(|_| !in_tables);
        let seen = seen.map(|(_, held)| &held.windows[..]);
        self.share_pages(&mut fork, sequence, seen, rows);
        if !rows.is_multiple_of(PAGE_ROWS) {
            self.copy_last_page(backend, &mut fork, sequence, seen)?;
        }
        let inherited = sequence.snapshots.iter().filter(|s| s.len <= rows);
        fork.snapshots = inherited.cloned().collect();
        Ok(fork)
    }

    /// Shares the whole pages of the first `rows` rows of `sequence` with `fork`; of windows, those
    /// that `seen` has, if that is given.
    fn share_pages(
        &self,
        fork: &mut Sequence,
        sequence: &Sequence,
        seen: Option<&[(usize, Vec<u32>)]>,
        rows: usize,
    ) {
        let mut pools = Pools::lock(&self.pools);
        let n_whole = rows / PAGE_ROWS;
        for (g, (pool, table)) in pools.pages.iter_mut().zip(&mut fork.tables).enumerate() {
            match seen.filter(|_| self.plan().groups[g].window.is_some()) {
                None => table.extend_from_slice(&sequence.tables[g][..n_whole]),
                Some(windows) => {
                    let (first, pages) = &windows[g];
                    table.resize((*first).min(n_whole), NO_PAGE);
                    table.extend(pages.iter().take(n_whole - table.len()));
                }
            }
            let pages = table.iter().filter(|&&page| page != NO_PAGE);
            pages.for_each(|&page| pool.share(page));
        }
    }

    /// Gives `fork`, which has as many whole pages as it can, a copy of the page after those.
    fn copy_last_page(
        &mut self,
        backend: &dyn Backend,
        fork: &mut Sequence,
        sequence: &Sequence,
        seen: Option<&[(usize, Vec<u32>)]>,
    ) -> Result<(), MemoryFull> {
        for g in 0..fork.tables.len() {
            let at = fork.tables[g].len();
            let has_window = self.plan().groups[g].window.is_some();
            let from = match seen.filter(|_| has_window) {
                None => sequence.tables[g][at],
                Some(windows) => windows[g].1[at - windows[g].0],
            };
            let mut pools = Pools::lock(&self.pools);
            let pool = &mut pools.pages[g];
            let to = pool.take().ok_or(MemoryFull::Pages(pool.n_pages()))?;
            drop(pools);
            fork.tables[g].push(to);
            for kv in &mut self.kv[g] {
                backend.kv_copy(kv, from as usize, to as usize);
            }
        }
        Ok(())
    }

    /// Pages that belong to `sequences` and to nobody else, over all groups.
    pub fn pages_only_of<'a>(&self, sequences: impl Iterator<Item = &'a Sequence>) -> usize {
        self.group_pages_only_of(sequences).iter().sum()
    }

    /// Bytes of the pages that belong to `sequences` and to nobody else, and of the recurrent states
    /// that their snapshots have.
    pub fn bytes_only_of<'a>(
        &self,
        sequences: impl Iterator<Item = &'a Sequence> + Clone,
    ) -> usize {
        let snapshots = sequences.clone().flat_map(Sequence::snapshots);
        let slots: HashSet<u32> = snapshots.filter_map(|s| s.held()?.slot).collect();
        let pages = self.group_pages_only_of(sequences).into_iter();
        let pages = pages.zip(&self.plan().groups);
        let pages = pages.map(|(n, group)| n * group.page_bytes(&self.size().kv_format));
        pages.sum::<usize>() + slots.len() * self.plan().state_bytes()
    }

    /// [`Memory::pages_only_of`], by group.
    fn group_pages_only_of<'a>(&self, sequences: impl Iterator<Item = &'a Sequence>) -> Vec<usize> {
        let mut seen = HashSet::new();
        let mut held: Vec<Vec<u32>> = vec![Vec::new(); self.plan().groups.len()];
        let mut note = |g: usize, pages: &[u32]| {
            let pages = pages.iter().filter(|&&page| page != NO_PAGE);
            held[g].extend(pages);
        };
        for sequence in sequences {
            for (g, table) in sequence.tables.iter().enumerate() {
                note(g, table);
            }
            for snapshot in &sequence.snapshots {
                let held = snapshot
                    .held()
                    .filter(|_| seen.insert(Arc::as_ptr(snapshot)));
                for (g, (_, pages)) in held.iter().flat_map(|h| h.windows.iter().enumerate()) {
                    note(g, pages);
                }
            }
        }
        let pools = Pools::lock(&self.pools);
        let only = |(pool, mut held): (&PagePool, Vec<u32>)| {
            held.sort_unstable();
            let pages = held.chunk_by(|a, b| a == b);
            let alone = pages.filter(|page| page.len() == pool.owners(page[0]));
            alone.count()
        };
        pools.pages.iter().zip(held).map(only).collect()
    }
}
