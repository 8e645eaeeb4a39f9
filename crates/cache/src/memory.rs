//! Device memory of one model and the sequences that share it.

use crate::{KvLayer, KvPlan, MemoryFull, MemoryPlan, PagePool, Sequence};
use backend::{
    Backend, Batch, BatchSeq, Delta, DeltaSpec, Kv, KvSpec, MAX_TENTATIVE, NO_PAGE, PAGE_ROWS, Row,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Snapshots of recurrent state that there is always room for, for each sequence: as much memory
/// again as the states of running sequences take.
const SNAPSHOTS_A_SEQUENCE: usize = 1;

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
    pub kv_format: KvPlan,
    /// Pages that running sequences have together in each group, those of windows no more than they can see. Fewer than
    /// all of them could fill, and whoever runs them has to stop one where [`Memory::n_free_full_pages`] is too little;
    /// as many as that if absent. There are always enough for one sequence.
    pub running_pages: Option<usize>,
    /// Room for what ended texts leave, beyond what running sequences do not need.
    pub kept: KeptSize,
}

/// Room for what ended texts leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeptSize {
    /// Pages of each group without a window.
    pub pages: usize,
    /// Snapshots: slots of recurrent state, and pages of each group with a window.
    pub snapshots: usize,
}

impl KeptSize {
    /// What `budget` bytes have room for beside a memory of `size`: as many bytes of snapshots as of pages, where
    /// models have either. `bytes_of` says what memories of a size take.
    pub fn within(budget: u64, size: &MemorySize, bytes_of: impl Fn(&MemorySize) -> usize) -> Self {
        let bytes = |kept| bytes_of(&MemorySize { kept, ..*size }) as u64;
        let none = bytes(KeptSize::default());
        let one = |pages, snapshots| bytes(KeptSize { pages, snapshots }).saturating_sub(none);
        let (page, snapshot) = (one(1, 0), one(0, 1));
        let share = if page > 0 && snapshot > 0 {
            budget / 2
        } else {
            budget
        };
        let number = |each: u64| usize::try_from(share.checked_div(each).unwrap_or(0));
        KeptSize {
            pages: number(page).unwrap_or(usize::MAX),
            snapshots: number(snapshot).unwrap_or(usize::MAX),
        }
    }
}

impl MemorySize {
    /// The [`running_pages`](MemorySize::running_pages) with which memories take `budget` bytes at most; none where
    /// all that sequences can need is no more. `bytes_of` says what those of a size take.
    ///
    /// # Errors
    ///
    /// The bytes that are needed at least, where `budget` does not have room for a sequence as long as
    /// the context.
    pub fn running_pages_within(
        &self,
        budget: u64,
        bytes_of: impl Fn(&MemorySize) -> usize,
    ) -> Result<Option<usize>, u64> {
        let bytes = |running_pages| {
            let size = MemorySize {
                running_pages,
                ..*self
            };
            bytes_of(&size) as u64
        };
        let one = self.pages(None);
        let least = bytes(Some(one));
        if least > budget {
            return Err(least);
        }
        if bytes(None) <= budget {
            return Ok(None);
        }
        // More pages take more bytes: those that fit, and those that do not.
        let (mut fits, mut exceeds) = (one, self.sequences.saturating_mul(one));
        while exceeds - fits > 1 {
            let middle = fits + (exceeds - fits) / 2;
            match bytes(Some(middle)) <= budget {
                true => fits = middle,
                false => exceeds = middle,
            }
        }
        Ok(Some(fits))
    }

    /// The longest [`context`](MemorySize::context), of `most` tokens at most, of which memories have room for one whole
    /// in `budget` bytes, beside what each of the other sequences takes whatever its length; 0 if there is none. It is
    /// a number of whole pages, unless it is `most`. `bytes_of` says what memories of a size take.
    pub fn context_within(
        &self,
        budget: u64,
        most: usize,
        bytes_of: impl Fn(&MemorySize) -> usize,
    ) -> usize {
        let fits = |context| {
            let size = MemorySize {
                context,
                running_pages: Some(0),
                ..*self
            };
            bytes_of(&size) as u64 <= budget
        };
        if fits(most) {
            return most;
        }
        let (mut fitting, mut exceeding) = (0, most.div_ceil(PAGE_ROWS));
        while exceeding - fitting > 1 {
            let middle = fitting + (exceeding - fitting) / 2;
            match fits(middle * PAGE_ROWS) {
                true => fitting = middle,
                false => exceeding = middle,
            }
        }
        fitting * PAGE_ROWS
    }

    /// Tokens for which running sequences have keys and values together, in layers that see all tokens.
    pub fn running_tokens(&self) -> usize {
        let one = self.pages(None);
        let pages = self
            .running_pages
            .map_or(usize::MAX, |pages| pages.max(one));
        let all = self.sequences.saturating_mul(one);
        // A page of each sequence may be filled in part.
        let tokens = self.sequences.saturating_mul(self.context);
        pages.min(all).saturating_mul(PAGE_ROWS).min(tokens)
    }

    /// Slots of recurrent state: of sequences, and of snapshots.
    fn slots(&self) -> usize {
        let planned = self.sequences.saturating_mul(1 + SNAPSHOTS_A_SEQUENCE);
        planned.saturating_add(self.kept.snapshots)
    }

    /// Pages of a group with `window`, for all sequences and what ended ones leave.
    ///
    /// A sequence has a page of a window only for rows for which it has one of each group without a window, so where
    /// sequences share these, they need no more of those together; but for one page each, which may be copied in the
    /// one group and not in the other.
    fn all_pages(&self, window: Option<usize>) -> usize {
        let kept = match window {
            None => self.kept.pages,
            Some(w) => self.kept.snapshots.saturating_mul(window_pages(w)),
        };
        let one = self.pages(window);
        let most = self.sequences.saturating_mul(one);
        let planned = match self.running_pages {
            None => most,
            Some(pages) => {
                let beside = window.map_or(0, |_| self.sequences);
                let shared = pages.max(self.pages(None)).saturating_add(beside);
                shared.clamp(one, most.max(one))
            }
        };
        planned.saturating_add(kept)
    }

    /// Rows that one sequence can get at once: beside those of a step its tentative ones, and for the memory of a
    /// draft head as many again, which the head has left unread in earlier rounds.
    fn most_rows(&self) -> usize {
        self.step_rows.saturating_add(2 * MAX_TENTATIVE)
    }

    /// Pages one sequence can need at once in a group with `window`.
    pub(crate) fn pages(&self, window: Option<usize>) -> usize {
        let whole = self.context.div_ceil(PAGE_ROWS);
        match window {
            None => whole,
            // A step's rows look back one window, and either end may cut a page.
            Some(w) => {
                let rows = w.saturating_add(self.most_rows());
                whole.min(rows.div_ceil(PAGE_ROWS) + 1)
            }
        }
    }
}

/// Pages that have the rows which a row behind them sees through a window of `window` rows.
fn window_pages(window: usize) -> usize {
    window.div_ceil(PAGE_ROWS) + 1
}

/// Keys, values and recurrent states of all sequences of one model.
pub struct Memory {
    /// By group, by layer of the group.
    pub kv: Vec<Vec<Kv>>,
    /// By gated-delta layer: slots of all sequences and snapshots.
    pub delta: Vec<Delta>,
    plan: MemoryPlan,
    size: MemorySize,
    pub(crate) pools: Arc<Mutex<Pools>>,
}

/// What a memory hands out, by number. Its sequences know the pools too, to give back what
/// they hold when they are dropped.
#[derive(Debug)]
pub(crate) struct Pools {
    /// By attention group.
    pub(crate) pages: Vec<PagePool>,
    /// Where the recurrent states of sequences and of snapshots lie.
    pub(crate) slots: PagePool,
    /// Sequences that are open and not kept.
    pub(crate) n_open: usize,
}

impl Pools {
    /// The pools of a memory, even after a panic elsewhere: each change of them is whole.
    pub(crate) fn lock(pools: &Mutex<Pools>) -> MutexGuard<'_, Pools> {
        pools.lock().unwrap_or_else(PoisonError::into_inner)
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
            .map(|g| PagePool::new(size.all_pages(g.window)))
            .collect();
        let kv = plan
            .groups
            .iter()
            .zip(&pools)
            .map(|(group, pool)| {
                let spec = |layer: &KvLayer| KvSpec {
                    pages: pool.n_pages(),
                    rows: size.context,
                    heads: layer.heads,
                    head_dim: layer.head_dim,
                    format: size.kv_format.of(layer, group.window),
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
                    slots: size.slots(),
                    ..spec
                })
            })
            .collect();
        let pools = Pools {
            pages: pools,
            slots: PagePool::new(size.slots()),
            n_open: 0,
        };
        Memory {
            kv,
            delta,
            plan,
            size,
            pools: Arc::new(Mutex::new(pools)),
        }
    }

    /// Bytes that `plan` takes at `size`, for a plan made before loading. More than there can
    /// be count as `usize::MAX`.
    pub fn bytes(plan: &MemoryPlan, size: &MemorySize) -> usize {
        let groups = plan.groups.iter();
        let pages = groups.map(|group| {
            let bytes = group.page_bytes(&size.kv_format);
            size.all_pages(group.window).saturating_mul(bytes)
        });
        let states = size.slots().saturating_mul(plan.state_bytes());
        pages.fold(states, usize::saturating_add)
    }

    /// Whether pages, slots and snapshots of `plan` at `size` have numbers: fewer than
    /// 2³² − 1 of a kind.
    pub fn has_numbers(plan: &MemoryPlan, size: &MemorySize) -> bool {
        let pages = plan.groups.iter().map(|g| size.all_pages(g.window));
        let most = pages.chain([size.slots()]).max();
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

    /// Pages in use and pages in all, over all groups. A page with several owners counts
    /// once.
    pub fn pages_used(&self) -> (usize, usize) {
        let pools = Pools::lock(&self.pools);
        let all = pools.pages.iter().map(PagePool::n_pages).sum::<usize>();
        let free = pools.pages.iter().map(PagePool::n_free).sum::<usize>();
        (all - free, all)
    }

    /// The fewest free pages of a group.
    pub fn n_free_pages(&self) -> usize {
        let pools = Pools::lock(&self.pools);
        let free = pools.pages.iter().map(PagePool::n_free).min();
        free.unwrap_or(usize::MAX)
    }

    /// The fewest free pages of a group without a window, which is what longer sequences take.
    pub fn n_free_full_pages(&self) -> usize {
        let pools = Pools::lock(&self.pools);
        let full = self.full_groups().map(|g| pools.pages[g].n_free());
        full.min().unwrap_or(usize::MAX)
    }

    /// Pages that nobody but `sequences` has to have, at least, in each group without a window: those that
    /// are free, or that only sequences beside these have.
    pub fn full_pages_beside<'a>(
        &self,
        sequences: impl Iterator<Item = &'a Sequence> + Clone,
    ) -> usize {
        let pools = Pools::lock(&self.pools);
        let beside = self.full_groups().map(|g| {
            // Sequences share pages. Others wait for room at every step, so a page is looked up, not hashed.
            let mut is_beside = vec![true; pools.pages[g].n_pages()];
            let held = sequences.clone().flat_map(|s| &s.tables[g]);
            held.for_each(|&page| is_beside[page as usize] = false);
            is_beside.into_iter().filter(|&beside| beside).count()
        });
        beside.min().unwrap_or(usize::MAX)
    }

    /// The groups without a window.
    fn full_groups(&self) -> impl Iterator<Item = usize> {
        let groups = self.plan.groups.iter().enumerate();
        groups
            .filter(|(_, group)| group.window.is_none())
            .map(|(g, _)| g)
    }

    /// Sequences that are open and not [kept](Memory::keep).
    pub fn n_open(&self) -> usize {
        Pools::lock(&self.pools).n_open
    }

    /// A new, empty sequence.
    ///
    /// # Errors
    ///
    /// [`MemoryFull::Sequences`] if as many as planned are open, [`MemoryFull::Snapshots`] if
    /// snapshots have taken all slots of recurrent state.
    pub fn open(&mut self) -> Result<Sequence, MemoryFull> {
        let mut pools = Pools::lock(&self.pools);
        if pools.n_open == self.size.sequences {
            return Err(MemoryFull::Sequences(self.size.sequences));
        }
        let slot = pools.slots.take();
        let slot = slot.ok_or(MemoryFull::Snapshots(pools.slots.n_pages()))?;
        pools.n_open += 1;
        drop(pools);
        Ok(Sequence::new(self, Some(slot)))
    }

    /// A sequence that remembers nothing, takes no place and cannot run: it stands where one was.
    pub fn absent(&self) -> Sequence {
        Sequence::new(self, None)
    }

    /// Ends a sequence and frees what nobody else owns of it, as dropping it does.
    pub fn close(&mut self, sequence: Sequence) {
        drop(sequence);
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
    /// If more rows are tentative than [`MAX_TENTATIVE`], there are more rows than
    /// [`MemorySize::step_rows`] and twice as many as may be tentative, or the sequence is [kept](Memory::keep).
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
            tokens.len() <= self.size.most_rows(),
            "rows of a step have a limit"
        );
        let slot = sequence.slot.expect("a sequence that is not kept") as usize;
        let len = sequence.len + tokens.len();
        if len > self.size.context {
            return Err(MemoryFull::Context(self.size.context));
        }
        self.take_pages(sequence, len)?;
        let rows = batch.n_rows()..batch.n_rows() + tokens.len();
        batch.tokens.extend_from_slice(tokens);
        batch
            .rows
            .extend((sequence.len..len).map(|i| Row::text(i as u32)));
        let tables = push_tables(batch, sequence);
        batch.seqs.push(BatchSeq {
            rows,
            slot,
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
    /// If the sequence is empty or [kept](Memory::keep).
    pub fn peek(&self, batch: &mut Batch, sequence: &Sequence, token: u32) {
        assert!(sequence.len > 0, "there is something to read");
        let row = batch.n_rows();
        batch.tokens.push(token);
        batch.rows.push(Row::reader(sequence.len as u32));
        let tables = push_tables(batch, sequence);
        batch.seqs.push(BatchSeq {
            rows: row..row + 1,
            slot: sequence.slot.expect("a sequence that is not kept") as usize,
            is_new: false,
            kept: 0,
            certain: 0,
            tables,
        });
    }

    /// Takes the pages that `sequence` lacks for `len` rows, after it has given back those it
    /// needs no more.
    fn take_pages(&self, sequence: &mut Sequence, len: usize) -> Result<(), MemoryFull> {
        let mut pools = Pools::lock(&self.pools);
        let wanted = len.div_ceil(PAGE_ROWS);
        self.release(&mut pools, sequence, wanted);
        for (pool, table) in pools.pages.iter().zip(&sequence.tables) {
            if wanted.saturating_sub(table.len()) > pool.n_free() {
                return Err(MemoryFull::Pages(pool.n_pages()));
            }
        }
        for (pool, table) in pools.pages.iter_mut().zip(&mut sequence.tables) {
            while table.len() < wanted {
                table.push(pool.take().expect("counted above"));
            }
        }
        Ok(())
    }

    /// Gives back the oldest pages of `sequence` that no later row can see, as many as it
    /// would have above its share with `wanted` pages in all. The others stay for
    /// [`Memory::fork`].
    fn release(&self, pools: &mut Pools, sequence: &mut Sequence, wanted: usize) {
        let tables = sequence.tables.iter_mut().zip(&self.plan.groups);
        for (pool, (table, group)) in pools.pages.iter_mut().zip(tables) {
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
