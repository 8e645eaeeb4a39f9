//! Attention over paged keys and values.
//!
//! Keys come in transposed blocks of 16 ([`crate::kv`]), so that a score is a lane and is
//! summed over the head's columns in order.
//!
//! The rows of a sequence and the query heads of a group read the same keys, so they form one
//! block of *queries*: a page of 64 keys is loaded once for all of them, scored
//! (`[queries, 64]`), and its values are added. Few queries read the page as it is stored; for
//! many it is converted to `f32` first, a part that fits the first-level cache at a time. Where
//! queries see different parts of a page, the part they share is done together and the rest one
//! by one, keys ascending for each.
//!
//! Long contexts are cut at multiples of [`SPLIT_ROWS`] (split-K) and merged from the left
//! as the definition says; whether splits run on one worker or many, and whether the heads of a
//! group are one block or several, depends on how many other tasks there are ([`plan`]), and
//! changes no bit.

mod kernel;
mod plan;
mod prefetch;
mod softmax;

pub(crate) use plan::Plan;

use crate::device::Device;
use crate::kv::KvPages;
use crate::memory::{values, values_mut};
use crate::pool::{DisjointSlice, worker_scratch};
use backend::{Attention, Batch, Kv, KvSpec, SPLIT_ROWS, Tensor};
use kernel::{Attend, AttendArgs, MergeSplits, Scratch};
use plan::{PARTIAL_STATE, Sizes, Task};
use softmax::OnlineSoftmax;
use std::ops::Range;

/// Multiply-adds of scores below which handing out work costs more than it saves.
const MIN_PARALLEL: usize = 32 << 10;

/// `softmax(scale q·kᵀ) v` over the visible cache rows.
///
/// # Panics
///
/// If the queries have another shape than `[rows, heads, e]`, or key/value heads are not shared
/// evenly.
pub(crate) fn attend(
    device: &Device,
    plan: &mut Plan,
    q: &Tensor,
    kv: &Kv,
    attention: &Attention,
    batch: &Batch,
) -> Tensor {
    let KvSpec {
        heads: kv_heads,
        head_dim,
        ..
    } = kv.spec;
    let cols = attention.heads * head_dim;
    assert_eq!(
        (q.rows(), q.cols()),
        (batch.n_rows(), cols),
        "shape of the queries"
    );
    assert!(
        attention.heads.is_multiple_of(kv_heads),
        "key/value heads are shared evenly"
    );
    let pages = kv
        .storage
        .downcast_ref::<KvPages>()
        .expect("memory of this backend");
    let args = AttendArgs {
        q: values(q),
        k: pages.k.view(),
        v: pages.v.view(),
        spec: kv.spec,
        width: pages.width,
        attention,
        batch,
    };
    let mut y = device.tensor(batch.n_rows(), cols);
    let keys: usize = batch.rows.iter().map(|&r| attention.visible(r).len()).sum();
    let is_little = keys * cols < MIN_PARALLEL;
    let sizes = Sizes {
        kv_heads,
        group: args.group(),
        width: pages.width,
        n_workers: if is_little {
            1
        } else {
            device.pool.n_workers()
        },
    };
    plan.cut(&batch.seqs, sizes, |r| args.visible(r));
    let mut partials = device.tensor(1, plan.n_partials * (pages.width + PARTIAL_STATE));
    let out = DisjointSlice::new(values_mut(&mut y));
    let partials = DisjointSlice::new(values_mut(&mut partials));
    let is_split = plan.is_split();
    let (blocks, tasks, states) = plan.parts();
    run_tasks(device, &args, sizes, tasks, states, &out, &partials);
    if is_split {
        merge_splits(device, &args, blocks, &out, &partials);
    }
    y
}

/// Runs all tasks, on one thread if they were cut for one.
fn run_tasks(
    device: &Device,
    args: &AttendArgs<'_>,
    sizes: Sizes,
    tasks: &[Task],
    states: &mut Vec<OnlineSoftmax>,
    out: &DisjointSlice<'_, f32>,
    partials: &DisjointSlice<'_, f32>,
) {
    let (head_dim, width, queries) = (args.spec.head_dim, args.width, sizes.queries());
    let len = Scratch::len(queries, head_dim, width);
    let mut scratch = device.tensor(sizes.n_workers, len);
    states.resize(sizes.n_workers * queries, OnlineSoftmax::FRESH);
    let scratch = DisjointSlice::new(values_mut(&mut scratch));
    let states = DisjointSlice::new(states);
    let run = |worker: usize, range: Range<usize>| {
        for task in &tasks[range] {
            // SAFETY: a worker's scratch is its own.
            let (values, states) = unsafe {
                (
                    worker_scratch(&scratch, worker, len),
                    states.part(worker * queries..(worker + 1) * queries),
                )
            };
            let end = args.visible(task.rows.end - 1).end;
            device.isa.run(Attend {
                args,
                task,
                scratch: Scratch::new(values, states, queries, head_dim, width),
                end: end.min(task.splits.end * SPLIT_ROWS),
                out,
                partials,
            });
        }
    };
    if sizes.n_workers == 1 {
        run(0, 0..tasks.len());
    } else {
        device.pool.each(tasks.len(), 1, run);
    }
}

/// Merges the partial results of all blocks.
fn merge_splits(
    device: &Device,
    args: &AttendArgs<'_>,
    blocks: &[Task],
    out: &DisjointSlice<'_, f32>,
    partials: &DisjointSlice<'_, f32>,
) {
    let len = args.width + PARTIAL_STATE;
    device.pool.each(blocks.len(), 4, |_, range| {
        for block in &blocks[range] {
            let slots = block.partials.expect("every split is a task");
            let n = block.n_queries() * slots.splits;
            // SAFETY: partial results of different blocks are apart.
            let partials = unsafe { partials.part(slots.start * len..(slots.start + n) * len) };
            device.isa.run(MergeSplits {
                args,
                block,
                splits: slots.splits,
                partials,
                out,
            });
        }
    });
}
