//! How the queries of a step are cut into tasks.
//!
//! The rows of a sequence and the query heads of a group that read the same keys form *blocks*
//! of queries. A block is one task, or one task for each split of its context where there would
//! be too few tasks for the workers. No tensors, no arithmetic on them.

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
    /// Rows of the batch.
    pub(super) rows: Range<usize>,
    pub(super) splits: Range<usize>,
    /// Where partial results go, if each split of these rows is a task.
    pub(super) partials: Option<PartialSlots>,
}

/// Query `i`'s partial result of split `s` has number `start + i * splits + s`, with
/// `s` counted from the block's first split.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartialSlots {
    pub(super) start: usize,
    pub(super) splits: usize,
}

/// Sizes that the cut depends on.
#[derive(Clone, Copy)]
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
                        rows: rows.clone(),
                        splits: splits.clone(),
                        partials: None,
                    });
                }
            }
        }
        // Later rows see more: the longest first, so that the last tasks are short.
        self.blocks.reverse();
        self.cut_splits(sizes);
    }

    /// Makes a task of each split if blocks are too few for the workers.
    fn cut_splits(&mut self, sizes: Sizes) {
        let (blocks, n_workers) = (&mut self.blocks, sizes.n_workers);
        self.split_tasks.clear();
        self.n_partials = 0;
        let n_partials = |b: &Task| b.rows.len() * sizes.group * b.splits.len();
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
