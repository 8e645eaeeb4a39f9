//! Device memory of one model and the sequences that share it.

use crate::{MemoryFull, MemoryPlan, PagePool};
use backend::{
    Backend, Batch, BatchSeq, Delta, DeltaSpec, Kv, KvFormat, KvSpec, MAX_TENTATIVE, NO_PAGE,
    PAGE_ROWS, Row,
};

/// How much to remember.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemorySize {
    /// Sequences at once.
    pub sequences: usize,
    /// Rows of one sequence, at most.
    pub context: usize,
    /// Rows of one sequence in one step, at most.
    pub step_rows: usize,
    /// How keys and values are stored.
    pub kv_format: KvFormat,
}

impl MemorySize {
    /// Pages one sequence can need at once in a group with `window`.
    fn pages(&self, window: Option<usize>) -> usize {
        let whole = self.context.div_ceil(PAGE_ROWS);
        match window {
            None => whole,
            // A step's rows look back one window, and either end may cut a page.
            Some(w) => {
                let rows = w.saturating_add(self.step_rows);
                whole.min(rows.saturating_add(MAX_TENTATIVE).div_ceil(PAGE_ROWS) + 1)
            }
        }
    }
}

/// Keys, values and recurrent states of all sequences of one model.
pub struct Memory {
    /// By group, by layer of the group.
    pub kv: Vec<Vec<Kv>>,
    /// By gated-delta layer.
    pub delta: Vec<Delta>,
    plan: MemoryPlan,
    size: MemorySize,
    pools: Vec<PagePool>,
    slots: PagePool,
}

/// One sequence's part of a [`Memory`].
///
/// `len` rows are remembered. The first `base` of them are certain: recurrent
/// state is stored after row `base`, so only rows past it can be forgotten.
#[derive(Debug)]
pub struct Sequence {
    len: usize,
    base: usize,
    /// Rows after which recurrent state is kept aside; 0 if none is.
    checkpoint: usize,
    slot: u32,
    /// By group: page of rows `i * PAGE_ROWS ..`.
    tables: Vec<Vec<u32>>,
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

    /// A number below [`MemorySize::sequences`] that no other open sequence has.
    pub fn slot(&self) -> usize {
        self.slot as usize
    }
}

impl Memory {
    /// Takes device memory for `plan`.
    ///
    /// # Panics
    ///
    /// If pages or slots do not [have numbers](Memory::has_numbers).
    pub fn new(backend: &dyn Backend, plan: MemoryPlan, size: MemorySize) -> Self {
        let pools: Vec<PagePool> = plan
            .groups
            .iter()
            .map(|g| PagePool::new(size.sequences * size.pages(g.window)))
            .collect();
        let kv = plan
            .groups
            .iter()
            .zip(&pools)
            .map(|(group, pool)| {
                let spec = |&(heads, head_dim)| KvSpec {
                    pages: pool.n_pages(),
                    heads,
                    head_dim,
                    format: size.kv_format,
                };
                group
                    .layers
                    .iter()
                    .map(spec)
                    .map(|spec| backend.kv(spec))
                    .collect()
            })
            .collect();
        let delta = plan
            .delta
            .iter()
            .map(|&spec| {
                backend.delta(DeltaSpec {
                    slots: 2 * size.sequences,
                    ..spec
                })
            })
            .collect();
        Memory {
            kv,
            delta,
            slots: PagePool::new(size.sequences),
            plan,
            size,
            pools,
        }
    }

    /// Bytes that `plan` takes at `size`, for a plan made before loading. More than there can
    /// be count as `usize::MAX`.
    pub fn bytes(plan: &MemoryPlan, size: &MemorySize) -> usize {
        let product = |factors: &[usize]| factors.iter().fold(1usize, |n, &f| n.saturating_mul(f));
        let kv = plan.groups.iter().flat_map(|g| {
            let rows = product(&[size.sequences, size.pages(g.window), PAGE_ROWS]);
            g.layers.iter().map(move |&(heads, head_dim)| {
                product(&[rows, heads, size.kv_format.row_bytes(head_dim)])
            })
        });
        let delta = plan.delta.iter().map(|d| {
            let state = d.value_heads * d.key_dim * d.value_dim;
            let updates = MAX_TENTATIVE * d.value_heads * (d.key_dim + d.value_dim + 1);
            let history = (d.conv_taps - 1 + MAX_TENTATIVE) * d.channels();
            product(&[4 * 2, size.sequences, state + updates + history])
        });
        kv.chain(delta).fold(0, usize::saturating_add)
    }

    /// Bytes of several `plans` at `size`, as of [`Memory::bytes`].
    pub fn all_bytes(plans: &[MemoryPlan], size: &MemorySize) -> usize {
        let bytes = plans.iter().map(|plan| Memory::bytes(plan, size));
        bytes.fold(0, usize::saturating_add)
    }

    /// Whether pages and slots of `plan` at `size` have numbers: fewer than 2³² − 1 of a kind.
    pub fn has_numbers(plan: &MemoryPlan, size: &MemorySize) -> bool {
        let pages = plan.groups.iter().map(|g| size.pages(g.window)).max();
        let most = pages.unwrap_or(0).max(2).checked_mul(size.sequences);
        most.is_some_and(|n| n < NO_PAGE as usize)
    }

    /// What is remembered of each row.
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// How much can be remembered.
    pub fn size(&self) -> &MemorySize {
        &self.size
    }

    /// Pages in use and pages in all, over all groups.
    pub fn pages_used(&self) -> (usize, usize) {
        let all = self.pools.iter().map(PagePool::n_pages).sum::<usize>();
        (
            all - self.pools.iter().map(PagePool::n_free).sum::<usize>(),
            all,
        )
    }

    /// A new, empty sequence.
    ///
    /// # Errors
    ///
    /// [`MemoryFull::Sequences`] if as many as planned are open.
    pub fn open(&mut self) -> Result<Sequence, MemoryFull> {
        let slot = self
            .slots
            .take()
            .ok_or(MemoryFull::Sequences(self.size.sequences))?;
        Ok(Sequence {
            len: 0,
            base: 0,
            checkpoint: 0,
            slot,
            tables: vec![Vec::new(); self.plan.groups.len()],
        })
    }

    /// Ends a sequence and frees its pages.
    pub fn close(&mut self, sequence: Sequence) {
        self.slots.give(sequence.slot);
        for (pool, table) in self.pools.iter_mut().zip(sequence.tables) {
            table
                .into_iter()
                .filter(|&p| p != NO_PAGE)
                .for_each(|p| pool.give(p));
        }
    }

    /// Gives `sequence` the next `tokens.len()` rows of `batch`. The first
    /// `certain` of them can not be forgotten later; the others can, one by one
    /// from the end, until the next call.
    ///
    /// # Errors
    ///
    /// [`MemoryFull`], and then nothing has changed.
    ///
    /// # Panics
    ///
    /// If more rows are tentative than [`MAX_TENTATIVE`], or there are more rows
    /// than the plan's `step_rows`.
    pub fn push(
        &mut self,
        batch: &mut Batch,
        sequence: &mut Sequence,
        tokens: &[u32],
        certain: usize,
    ) -> Result<(), MemoryFull> {
        assert!(
            certain <= tokens.len() && tokens.len() - certain <= MAX_TENTATIVE,
            "tentative rows have a limit"
        );
        assert!(
            tokens.len() <= self.size.step_rows + MAX_TENTATIVE,
            "rows of a step have a limit"
        );
        let len = sequence.len + tokens.len();
        if len > self.size.context {
            return Err(MemoryFull::Context(self.size.context));
        }
        let wanted = len.div_ceil(PAGE_ROWS);
        self.release(sequence, wanted);
        for (pool, table) in self.pools.iter().zip(&sequence.tables) {
            if wanted.saturating_sub(table.len()) > pool.n_free() {
                return Err(MemoryFull::Pages(pool.n_pages()));
            }
        }
        for (pool, table) in self.pools.iter_mut().zip(&mut sequence.tables) {
            while table.len() < wanted {
                table.push(pool.take().expect("counted above"));
            }
        }
        let rows = batch.n_rows()..batch.n_rows() + tokens.len();
        batch.tokens.extend_from_slice(tokens);
        batch
            .rows
            .extend((sequence.len..len).map(|i| Row::text(i as u32)));
        let tables = push_tables(batch, sequence);
        batch.seqs.push(BatchSeq {
            rows,
            slot: sequence.slot(),
            is_new: sequence.len == 0,
            kept: sequence.len - sequence.base,
            certain,
            tables,
        });
        // Without certain rows and recurrent state, all that could be forgotten still can.
        if certain > 0 || !self.delta.is_empty() {
            sequence.base = sequence.len + certain;
        }
        sequence.len = len;
        Ok(())
    }

    /// Adds one row to `batch` that reads everything `sequence` remembers and
    /// appends nothing: it stands at position `sequence.len()`.
    ///
    /// # Panics
    ///
    /// If the sequence is empty.
    pub fn peek(&self, batch: &mut Batch, sequence: &Sequence, token: u32) {
        assert!(sequence.len > 0, "there is something to read");
        let row = batch.n_rows();
        batch.tokens.push(token);
        batch.rows.push(Row::reader(sequence.len as u32));
        let tables = push_tables(batch, sequence);
        batch.seqs.push(BatchSeq {
            rows: row..row + 1,
            slot: sequence.slot(),
            is_new: false,
            kept: 0,
            certain: 0,
            tables,
        });
    }

    /// Gives back the oldest pages of `sequence` that no later row can see, as many as it
    /// would have above its share with `wanted` pages in all. The others stay for
    /// [`Memory::rewind`].
    fn release(&mut self, sequence: &mut Sequence, wanted: usize) {
        for ((pool, table), group) in self
            .pools
            .iter_mut()
            .zip(&mut sequence.tables)
            .zip(&self.plan.groups)
        {
            let Some(window) = group.window else { continue };
            // The next row stands at `len` and sees rows above `len - window`.
            let gone = (sequence.len + 1).saturating_sub(window) / PAGE_ROWS;
            let first = table.iter().take_while(|&&page| page == NO_PAGE).count();
            let held = table.len() - first;
            let more = wanted.saturating_sub(table.len());
            let over = (held + more).saturating_sub(self.size.pages(Some(window)));
            for page in table.iter_mut().take(gone).skip(first).take(over) {
                pool.give(std::mem::replace(page, NO_PAGE));
            }
        }
    }

    /// Forgets all rows of `sequence` from row `len` on.
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
        self.cut(sequence, len);
    }

    /// Forgets rows and the pages that have none left.
    fn cut(&mut self, sequence: &mut Sequence, len: usize) {
        sequence.len = len;
        for (pool, table) in self.pools.iter_mut().zip(&mut sequence.tables) {
            for page in table.drain(len.div_ceil(PAGE_ROWS)..) {
                if page != NO_PAGE {
                    pool.give(page);
                }
            }
        }
    }

    /// Keeps aside the recurrent state after all rows of `sequence`, in place of the one
    /// kept before, so that [`Memory::rewind`] can go back to it.
    ///
    /// # Panics
    ///
    /// If some rows are tentative.
    pub fn checkpoint(&mut self, backend: &dyn Backend, sequence: &mut Sequence) {
        assert_eq!(sequence.base, sequence.len, "all rows are certain");
        let slot = sequence.slot();
        for delta in &mut self.delta {
            backend.delta_copy(delta, slot, self.size.sequences + slot);
        }
        sequence.checkpoint = sequence.len;
    }

    /// The most rows, `len` at most, that `sequence` can go back to: all that a row after
    /// them would see is still there.
    pub fn rewindable(&self, sequence: &Sequence, len: usize) -> usize {
        let len = len.min(sequence.len);
        let len = match self.delta.is_empty() || len >= sequence.base {
            true => len,
            false if sequence.checkpoint <= len => sequence.checkpoint,
            false => 0,
        };
        let mut tables = sequence.tables.iter().zip(&self.plan.groups);
        let is_there = tables.all(|(table, group)| {
            let window = group.window.unwrap_or(usize::MAX);
            let first = (len + 1).saturating_sub(window) / PAGE_ROWS;
            table.get(first).is_none_or(|&page| page != NO_PAGE)
        });
        if is_there { len } else { 0 }
    }

    /// Forgets all rows of `sequence` from row `len` on, certain or not.
    ///
    /// # Panics
    ///
    /// If it cannot go back there ([`Memory::rewindable`]).
    pub fn rewind(&mut self, backend: &dyn Backend, sequence: &mut Sequence, len: usize) {
        assert_eq!(
            self.rewindable(sequence, len),
            len,
            "a sequence of {} rows can go back there",
            sequence.len
        );
        if len < sequence.base {
            let slot = sequence.slot();
            if len > 0 {
                for delta in &mut self.delta {
                    backend.delta_copy(delta, self.size.sequences + slot, slot);
                }
            }
            sequence.base = len;
        }
        if sequence.checkpoint > len {
            sequence.checkpoint = 0;
        }
        self.cut(sequence, len);
    }

    /// Pages that `sequence` holds, over all groups.
    pub fn pages_of(&self, sequence: &Sequence) -> usize {
        let pages = sequence.tables.iter().flatten();
        pages.filter(|&&page| page != NO_PAGE).count()
    }
}

/// Appends the sequence's page tables to the batch's.
fn push_tables(batch: &mut Batch, sequence: &Sequence) -> Vec<std::ops::Range<usize>> {
    sequence
        .tables
        .iter()
        .map(|table| {
            let start = batch.tables.len();
            batch.tables.extend_from_slice(table);
            start..batch.tables.len()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GroupPlan;
    use proptest::prelude::*;

    const WINDOW: usize = 100;

    fn memory(sequences: usize) -> Memory {
        let plan = MemoryPlan {
            groups: vec![
                GroupPlan {
                    window: Some(WINDOW),
                    layers: vec![(1, 16)],
                },
                GroupPlan {
                    window: None,
                    layers: vec![(1, 16)],
                },
            ],
            delta: vec![],
        };
        let size = MemorySize {
            sequences,
            context: 1000,
            step_rows: 70,
            kv_format: KvFormat::both(&quant::kv::F32),
        };
        Memory::new(&backend::Reference, plan, size)
    }

    proptest! {
        #[test]
        fn every_row_a_later_row_can_see_has_a_page_of_its_own(
            steps in proptest::collection::vec((0usize..3, 1usize..70, 0usize..9, 0usize..9), 1..60)
        ) {
            let mut memory = memory(3);
            let mut open: Vec<Sequence> = (0..3).map(|_| memory.open().unwrap()).collect();
            // Pages that each had to give back, as no more than its share is its own.
            let share = memory.size.pages(Some(WINDOW));
            let mut given = vec![0; 3];
            for (s, certain, tentative, forget) in steps {
                let mut batch = Batch::default();
                let tokens = vec![0; certain + tentative];
                if memory.push(&mut batch, &mut open[s], &tokens, certain).is_err() {
                    let mut fresh = memory.open();
                    prop_assert!(fresh.is_err());
                    memory.close(open.swap_remove(s));
                    given.swap_remove(s);
                    fresh = memory.open();
                    open.push(fresh.unwrap());
                    given.push(0);
                    continue;
                }
                let pages = open[s].len().div_ceil(PAGE_ROWS);
                given[s] = given[s].max(pages.saturating_sub(share));
                let len = open[s].len() - forget.min(tentative);
                memory.truncate(&mut open[s], len);
                for (g, window) in [Some(WINDOW), None].into_iter().enumerate() {
                    let mut taken = std::collections::HashSet::new();
                    for (sequence, &given) in open.iter().zip(&given) {
                        let first = window.map_or(0, |w| (sequence.len() + 1).saturating_sub(w));
                        let table = &sequence.tables[g];
                        prop_assert_eq!(table.len(), sequence.len().div_ceil(PAGE_ROWS));
                        let gone = table.iter().take_while(|&&page| page == NO_PAGE).count();
                        prop_assert!(gone * PAGE_ROWS <= first, "{} pages of {:?}", gone, table);
                        prop_assert_eq!(gone, window.map_or(0, |_| given), "{:?}", table);
                        for &page in &table[gone..] {
                            prop_assert!(page != NO_PAGE && taken.insert(page), "{:?}", table);
                        }
                    }
                    prop_assert_eq!(taken.len() + memory.pools[g].n_free(), memory.pools[g].n_pages());
                }
            }
        }

        #[test]
        fn a_sequence_alone_never_runs_out_of_its_share(chunks in proptest::collection::vec(1usize..70, 1..40)) {
            let mut memory = memory(1);
            let mut sequence = memory.open().unwrap();
            for n in chunks {
                let mut batch = Batch::default();
                match memory.push(&mut batch, &mut sequence, &vec![0; n + 16], n) {
                    Ok(()) => memory.truncate(&mut sequence, batch.rows[n - 1].sees.end as usize),
                    Err(e) => {
                        prop_assert_eq!(e, MemoryFull::Context(1000));
                        break;
                    }
                }
            }
            memory.close(sequence);
            prop_assert_eq!(memory.pages_used().0, 0);
        }

        #[test]
        fn a_sequence_goes_back_to_where_all_is_seen(steps in proptest::collection::vec((1usize..70, 0usize..400), 1..40)) {
            let mut memory = memory(1);
            let mut sequence = memory.open().unwrap();
            for (n, back) in steps {
                if memory.push(&mut Batch::default(), &mut sequence, &vec![0; n], n).is_err() {
                    memory.rewind(&backend::Reference, &mut sequence, 0);
                    prop_assert_eq!(memory.pages_of(&sequence), 0);
                    continue;
                }
                let len = sequence.len().saturating_sub(back);
                let rows = memory.rewindable(&sequence, len);
                // Nothing is gone before a window and more than a step have passed.
                prop_assert!(rows == len || rows == 0 && sequence.len() > WINDOW + 70);
                memory.rewind(&backend::Reference, &mut sequence, rows);
                prop_assert_eq!(sequence.len(), rows);
                for (table, window) in sequence.tables.iter().zip([Some(WINDOW), None]) {
                    prop_assert_eq!(table.len(), rows.div_ceil(PAGE_ROWS));
                    let first = window.map_or(0, |w| (rows + 1).saturating_sub(w) / PAGE_ROWS);
                    let seen = table.iter().skip(first);
                    prop_assert!(seen.clone().all(|&page| page != NO_PAGE), "{:?}", table);
                }
                prop_assert_eq!(memory.pages_of(&sequence), memory.pages_used().0);
            }
        }
    }

    #[test]
    #[should_panic(expected = "can be forgotten")]
    fn certain_rows_cannot_be_forgotten() {
        let mut memory = memory(1);
        let mut sequence = memory.open().unwrap();
        memory
            .push(&mut Batch::default(), &mut sequence, &[1, 2, 3], 2)
            .unwrap();
        memory.truncate(&mut sequence, 1);
    }
}
