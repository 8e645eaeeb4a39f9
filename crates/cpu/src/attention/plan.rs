//! How the queries of a step are cut into tasks.
//!
//! The rows of a sequence and the query heads of a group that read the same keys form *blocks*
//! of queries. A block is one task, or one task for each split of its context where there would
//! be too few tasks for the workers. Where that, too, leaves half of them without a task, the heads
//! of a group are shared among several blocks. No tensors, no arithmetic on them.

use super::softmax::OnlineSoftmax;
use backend::{BatchSeq, SPLIT_ROWS};
use std::ops::Range;

/// Queries that are worked on together: their vectors, scores and sums should
/// fit the second-level cache.
const QUERIES: usize = 64;

/// Values of partial results that may be kept for a parallel merge.
const MAX_PARTIALS: usize = 8 << 20;

/// Values beside the columns of a partial result: maximum and sum, on a cache line of their own.
pub(super) const PARTIAL_STATE: usize = 16;

/// A block of queries against some splits of their context.
#[derive(Clone, Debug)]
pub(super) struct Task {
    /// The sequence's number in the batch.
    pub(super) seq: usize,
    pub(super) kv_head: usize,
    /// Query heads, of those that share the key/value head.
    pub(super) heads: Range<usize>,
    /// Rows of the batch.
    pub(super) rows: Range<usize>,
    pub(super) splits: Range<usize>,
    /// Where partial results go, if each split of these rows is a task.
    pub(super) partials: Option<PartialSlots>,
}

impl Task {
    /// Queries of the block.
    pub(super) fn n_queries(&self) -> usize {
        self.rows.len() * self.heads.len()
    }
}

/// Query `i`'s partial result of split `s` has number `start + i * splits + s`, with
/// `s` counted from the block's first split.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartialSlots {
    pub(super) start: usize,
    pub(super) splits: usize,
}

/// Sizes that the cut depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) kv_heads: usize,
    /// Query heads that share a key/value head.
    pub(super) group: usize,
    /// Columns of a result, padding included.
    pub(super) width: usize,
    pub(super) n_workers: usize,
}

impl Sizes {
    /// Rows of a block.
    fn block_rows(&self) -> usize {
        (QUERIES / self.group).max(1)
    }

    /// The most queries of a block.
    pub(super) fn queries(&self) -> usize {
        self.block_rows() * self.group
    }
}

/// The tasks of a step. Kept between calls, so that none allocates.
#[derive(Default)]
pub(crate) struct Plan {
    pub(super) blocks: Vec<Task>,
    /// A task for each split of each block; empty if blocks are tasks.
    split_tasks: Vec<Task>,
    /// Partial results of all tasks; 0 if blocks are tasks.
    pub(super) n_partials: usize,
    /// Softmax states of all workers' queries.
    pub(super) states: Vec<OnlineSoftmax>,
}

impl Plan {
    /// Cuts the rows of `seqs` into tasks; row `r` sees cache rows `visible(r)`.
    pub(super) fn cut(
        &mut self,
        seqs: &[BatchSeq],
        sizes: Sizes,
        visible: impl Fn(usize) -> Range<usize>,
    ) {
        let block_rows = sizes.block_rows();
        self.blocks.clear();
        for (seq, s) in seqs.iter().enumerate() {
            for first in s.rows.clone().step_by(block_rows) {
                let rows = first..(first + block_rows).min(s.rows.end);
                let splits = visible(rows.start).start / SPLIT_ROWS
                    ..visible(rows.end - 1).end.div_ceil(SPLIT_ROWS);
                for kv_head in 0..sizes.kv_heads {
                    self.blocks.push(Task {
                        seq,
                        kv_head,
                        heads: 0..sizes.group,
                        rows: rows.clone(),
                        splits: splits.clone(),
                        partials: None,
                    });
                }
            }
        }
        // Later rows see more: the longest first, so that the last tasks are short.
        self.blocks.reverse();
        self.cut_heads(sizes);
        self.cut_splits(sizes);
    }

    /// Shares the heads of each block among several blocks, if half of the workers or more have no task even with one
    /// for each split: every block reads its keys again, so fewer idle workers are not worth it.
    fn cut_heads(&mut self, sizes: Sizes) {
        let tasks: usize = self.blocks.iter().map(|b| b.splits.len()).sum();
        if tasks == 0 || 2 * tasks > sizes.n_workers || sizes.group == 1 {
            return;
        }
        let parts = sizes.n_workers.div_ceil(tasks).min(sizes.group);
        let n_blocks = self.blocks.len();
        for _ in 1..parts {
            self.blocks.extend_from_within(..n_blocks);
        }
        // From the last place on: a block is read before its place is taken.
        for at in (0..self.blocks.len()).rev() {
            let part = at % parts;
            self.blocks[at] = Task {
                heads: part * sizes.group / parts..(part + 1) * sizes.group / parts,
                ..self.blocks[at / parts].clone()
            };
        }
    }

    /// Makes a task of each split if blocks are too few for the workers.
    fn cut_splits(&mut self, sizes: Sizes) {
        let (blocks, n_workers) = (&mut self.blocks, sizes.n_workers);
        self.split_tasks.clear();
        self.n_partials = 0;
        let n_partials = |b: &Task| b.n_queries() * b.splits.len();
        let all = blocks.iter().map(n_partials).sum::<usize>();
        let few = blocks.len() < 4 * n_workers && blocks.iter().any(|b| b.splits.len() > 1);
        if !few || n_workers == 1 || all * (sizes.width + PARTIAL_STATE) > MAX_PARTIALS {
            return;
        }
        for block in blocks {
            let (start, splits) = (self.n_partials, block.splits.len());
            self.n_partials += n_partials(block);
            block.partials = Some(PartialSlots { start, splits });
            for (i, split) in block.splits.clone().enumerate() {
                let start = start + i;
                self.split_tasks.push(Task {
                    splits: split..split + 1,
                    partials: Some(PartialSlots { start, splits }),
                    ..block.clone()
                });
            }
        }
    }

    /// Whether each split is a task, and its partial results are to be merged.
    pub(super) fn is_split(&self) -> bool {
        !self.split_tasks.is_empty()
    }

    /// Blocks, tasks and softmax states.
    pub(super) fn parts(&mut self) -> (&[Task], &[Task], &mut Vec<OnlineSoftmax>) {
        let tasks = if self.is_split() {
            &self.split_tasks
        } else {
            &self.blocks
        };
        (&self.blocks, tasks, &mut self.states)
    }
}

#[cfg(test)]
mod tests {
    use super::{Plan, Sizes};
    use backend::{BatchSeq, SPLIT_ROWS};
    use std::ops::Range;

    /// The plan for sequences of so many `rows` each, which see `context` rows before their own.
    fn cut(rows: &[usize], context: usize, sizes: Sizes) -> Plan {
        let mut seqs = Vec::new();
        let mut first = 0;
        for &n in rows {
            seqs.push(BatchSeq {
                rows: first..first + n,
                slot: 0,
                is_new: false,
                kept: 0,
                certain: n,
                tables: Vec::new(),
            });
            first += n;
        }
        let start = |r: usize| {
            seqs.iter()
                .find(|s| s.rows.contains(&r))
                .unwrap()
                .rows
                .start
        };
        let visible = |r: usize| -> Range<usize> { 0..context + r - start(r) + 1 };
        let mut plan = Plan::default();
        plan.cut(&seqs, sizes, visible);
        plan
    }

    /// Asserts that each query is in one task for each of its splits, and each partial result in a place of its own.
    fn assert_is_whole(plan: &mut Plan, sizes: Sizes, n_rows: usize) {
        let (is_split, n_partials) = (plan.is_split(), plan.n_partials);
        let (_, tasks, _) = plan.parts();
        let n_queries = n_rows * sizes.kv_heads * sizes.group;
        let mut splits = vec![Vec::new(); n_queries];
        let mut places = vec![false; n_partials];
        for task in tasks {
            assert!(task.n_queries() <= sizes.queries());
            assert_eq!(task.partials.is_some(), is_split);
            for (i, row) in task.rows.clone().enumerate() {
                for (j, head) in task.heads.clone().enumerate() {
                    let query = (row * sizes.kv_heads + task.kv_head) * sizes.group + head;
                    splits[query].extend(task.splits.clone());
                    if let Some(slots) = task.partials {
                        assert_eq!(task.splits.len(), 1);
                        let at = slots.start + (i * task.heads.len() + j) * slots.splits;
                        assert!(!std::mem::replace(&mut places[at], true), "{tasks:?}");
                    }
                }
            }
        }
        assert!(places.into_iter().all(|taken| taken), "{tasks:?}");
        for mut splits in splits {
            splits.sort_unstable();
            let all: Vec<usize> = (0..splits.len()).collect();
            assert!(!splits.is_empty() && splits == all, "{tasks:?}");
        }
    }

    #[test]
    fn every_query_is_in_one_task_a_split_and_half_of_the_workers_have_one() {
        for (kv_heads, group) in [(1, 6), (2, 3), (1, 1), (4, 8), (2, 5)] {
            for n_workers in [1, 2, 3, 8, 64] {
                let sizes = Sizes {
                    kv_heads,
                    group,
                    width: 64,
                    n_workers,
                };
                for (rows, context) in [
                    (&[1][..], 100),
                    (&[5], 100),
                    (&[1], 3 * SPLIT_ROWS),
                    (&[2, 1, 40], SPLIT_ROWS - 1),
                    (&[300], 700),
                ] {
                    let mut plan = cut(rows, context, sizes);
                    assert_is_whole(&mut plan, sizes, rows.iter().sum());
                    let heads = rows.len() * kv_heads * group;
                    let (blocks, tasks, _) = plan.parts();
                    let what = format!("{sizes:?}, {rows:?} after {context}: {tasks:?}");
                    assert!(2 * tasks.len() > n_workers.min(heads), "{what}");
                    let rows = blocks.iter().map(|b| (b.seq, b.rows.start));
                    assert!(
                        rows.is_sorted_by(|a, b| a >= b),
                        "the longest first: {what}"
                    );
                }
            }
        }
    }
}
