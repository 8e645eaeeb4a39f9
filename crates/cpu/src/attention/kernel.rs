//! One task of attention: a block of queries against some splits of their context.
//!
//! ```text
//! q             rotated where keys are
//! for each split, each page of 64 keys:
//!   scores        p[query][key] = q · k          microkernels of M queries x R blocks of 16 keys
//!   online softmax  p = exp(scale p - max)       a query at a time
//!   values        part = part c + Σ p v          microkernels of M queries x R vectors of columns
//! then, from the left:  total = merge(total, part), rotated back where values are rotated
//! ```

mod coded;

use super::plan::{PARTIAL_STATE, PartialSlots, Task};
use super::prefetch::PrefetchRange;
use super::softmax::{OnlineSoftmax, merge};
use crate::arch::{Element, Kernel, Lanes, Registers, load, store};
use crate::kv::{BLOCK, KvView, STRIP};
use crate::microkernel::{Operands, Prefetch, accumulate, microkernels};
use crate::pool::DisjointSlice;
use backend::{Attention, Batch, KvFormat, KvSpec, PAGE_ROWS, SPLIT_ROWS};
use half::bf16;
use std::ops::Range;

/// Queries that read a page of bf16 as it is stored, at most: each microkernel call converts what
/// it reads, and more queries than these would need several calls.
const MAX_DIRECT: usize = 8;

/// The arguments of the op, as tasks use them.
pub(super) struct AttendArgs<'a> {
    /// `[rows, heads, e]`
    pub(super) q: &'a [f32],
    pub(super) k: KvView<'a>,
    pub(super) v: KvView<'a>,
    pub(super) spec: KvSpec,
    /// Columns of a value row, padding included.
    pub(super) width: usize,
    pub(super) attention: &'a Attention,
    pub(super) batch: &'a Batch,
}

impl AttendArgs<'_> {
    /// Query heads that share a key/value head.
    pub(super) fn group(&self) -> usize {
        self.attention.heads / self.spec.heads
    }

    /// Where a task's query `i` starts in the queries and in the output.
    pub(super) fn place(&self, task: &Task, i: usize) -> usize {
        let (group, heads) = (self.group(), self.attention.heads);
        let row = task.rows.start + i / task.heads.len();
        let head = task.kv_head * group + task.heads.start + i % task.heads.len();
        (row * heads + head) * self.spec.head_dim
    }

    /// Cache rows that row `r` of the step sees.
    pub(super) fn visible(&self, r: usize) -> Range<usize> {
        self.attention.visible(self.batch.rows[r])
    }
}

/// A worker's scratch memory for one task.
pub(super) struct Scratch<'a> {
    /// `[queries, e]`
    q: &'a mut [f32],
    /// Scores, then probabilities: `[queries, 64]`
    p: &'a mut [f32],
    /// The current split's results: `[queries, width]`
    part: &'a mut [f32],
    /// The results of the splits before: `[queries, width]`
    total: &'a mut [f32],
    /// Converted keys, `[blocks, e, 16]`, or values, `[64, STRIP]`.
    converted: &'a mut [f32],
    /// The online softmax of each query.
    states: &'a mut [OnlineSoftmax],
}

impl<'a> Scratch<'a> {
    /// Values that a task of `queries` queries needs, without softmax states.
    pub(super) fn len(queries: usize, head_dim: usize, width: usize) -> usize {
        let converted = PAGE_ROWS * head_dim.max(STRIP);
        queries * (head_dim.next_multiple_of(16) + PAGE_ROWS + 2 * width) + converted
    }

    /// Cuts [`Self::len`] values.
    pub(super) fn new(
        values: &'a mut [f32],
        states: &'a mut [OnlineSoftmax],
        queries: usize,
        head_dim: usize,
        width: usize,
    ) -> Self {
        let (q, values) = values.split_at_mut(queries * head_dim.next_multiple_of(16));
        let (p, values) = values.split_at_mut(queries * PAGE_ROWS);
        let (part, values) = values.split_at_mut(queries * width);
        let (total, converted) = values.split_at_mut(queries * width);
        Scratch {
            q,
            p,
            part,
            total,
            converted,
            states,
        }
    }
}

/// Some columns of a page's values: those of row `key` start at `key * stride`.
struct ValueColumns<'a, E> {
    values: &'a [E],
    stride: usize,
    /// Which columns of the head.
    cols: Range<usize>,
}

/// Runs one task.
pub(super) struct Attend<'a> {
    pub(super) args: &'a AttendArgs<'a>,
    pub(super) task: &'a Task,
    pub(super) scratch: Scratch<'a>,
    /// The end of the task's cache rows.
    pub(super) end: usize,
    pub(super) out: &'a DisjointSlice<'a, f32>,
    /// Partial results, `[.., width + PARTIAL_STATE]`: the values, then maximum and sum.
    pub(super) partials: &'a DisjointSlice<'a, f32>,
}

impl Kernel for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        let args = self.args;
        let (head_dim, width) = (args.spec.head_dim, args.width);
        let rows = self.task.rows.clone();
        let n = self.task.n_queries();
        for i in 0..n {
            let from = args.place(self.task, i);
            let q = &mut self.scratch.q[i * head_dim..][..head_dim];
            q.copy_from_slice(&args.q[from..][..head_dim]);
            if let Some(rotation) = args.spec.format.k.rotation {
                rotation.rotate(q);
            }
        }
        self.scratch.states[..n].fill(OnlineSoftmax::FRESH);
        for split in self.task.splits.clone() {
            for s in &mut self.scratch.states[..n] {
                (s.max, s.sum) = (f32::NEG_INFINITY, 0.0);
            }
            self.scratch.part[..n * width].fill(0.0);
            let keys = args.visible(rows.start).start..args.visible(rows.end - 1).end;
            let first = keys.start.max(split * SPLIT_ROWS) / PAGE_ROWS * PAGE_ROWS;
            for page in (first..keys.end.min((split + 1) * SPLIT_ROWS)).step_by(PAGE_ROWS) {
                self.page::<L>(page);
            }
            match self.task.partials {
                Some(slots) => self.keep_partial(slots, n),
                None => self.merge_split::<L>(n),
            }
        }
        if self.task.partials.is_none() {
            for i in 0..n {
                let at = args.place(self.task, i);
                // SAFETY: these queries are this task's.
                let out = unsafe { self.out.part(at..at + head_dim) };
                let total = &self.scratch.total[i * width..][..width];
                let sum = self.scratch.states[i].total_sum;
                finish::<L>(total, sum, args.spec.format, out);
            }
        }
    }
}

impl Attend<'_> {
    /// Adds the page of keys that starts at cache row `page`.
    #[inline(always)]
    fn page<L: Lanes>(&mut self, page: usize) {
        let args = self.args;
        let (active, seen) = self.active_queries(page);
        if active.is_empty() {
            return;
        }
        let unit = self.unit(page);
        let (k, v) = (args.k.unit(unit), args.v.unit(unit));
        let blocks = seen.start / BLOCK..seen.end.div_ceil(BLOCK);
        // Values are prefetched while keys are scored, and the other way round.
        let values = PrefetchRange::of(v.rows(blocks.start * BLOCK..blocks.end * BLOCK));
        let mut next_keys = PrefetchRange::NOTHING;
        if page + PAGE_ROWS < self.end {
            next_keys = PrefetchRange::of(args.k.unit(self.unit(page + PAGE_ROWS)).bytes);
        }
        // Few queries have no use for converted keys and values but their own.
        let (direct_k, direct_v) = if active.len() <= MAX_DIRECT {
            (k.as_bf16(), v.as_bf16())
        } else {
            (None, None)
        };
        self.score_page::<L>(k, direct_k, blocks, active.clone(), values);
        for i in active.clone() {
            let p = &mut self.scratch.p[i * PAGE_ROWS..][..PAGE_ROWS];
            self.scratch.states[i]
                .add_page::<L>(args.attention.scale, p.as_chunks_mut::<BLOCK>().0);
        }
        self.add_values::<L>(v, direct_v, seen, active, next_keys);
    }

    /// The unit of keys or values that holds cache row `row` of the task's sequence and head.
    #[inline(always)]
    fn unit(&self, row: usize) -> usize {
        let args = self.args;
        let page = args.batch.page(self.task.seq, args.attention.group, row);
        page * args.spec.heads + self.task.kv_head
    }

    /// The queries that see some of the page at cache row `page`, and the keys that any of them
    /// sees. Notes in each query's state which keys it sees itself.
    #[inline(always)]
    fn active_queries(&mut self, page: usize) -> (Range<usize>, Range<usize>) {
        let group = self.task.heads.len();
        // Rows ascend, so those that see some of this page are neighbors.
        let (mut active, mut seen) = (0..0, 0..0);
        for (i, r) in self.task.rows.clone().enumerate() {
            let visible = self.args.visible(r);
            let first = visible.start.clamp(page, page + PAGE_ROWS) - page;
            let last = visible.end.clamp(page, page + PAGE_ROWS) - page;
            for s in &mut self.scratch.states[i * group..(i + 1) * group] {
                (s.first, s.last) = (first, last);
            }
            if first < last {
                if active.is_empty() {
                    (active.start, seen) = (i * group, first..last);
                }
                active.end = (i + 1) * group;
                seen = seen.start.min(first)..seen.end.max(last);
            }
        }
        (active, seen)
    }

    /// Scores blocks `blocks` of a page's keys for queries `active`, some blocks at a time.
    #[inline(always)]
    fn score_page<L: Lanes>(
        &mut self,
        k: KvView<'_>,
        direct: Option<&[bf16]>,
        blocks: Range<usize>,
        active: Range<usize>,
        mut ahead: PrefetchRange,
    ) {
        let head_dim = self.args.spec.head_dim;
        let decodes = coded::decodes::<L>(k, active.len());
        let mut b = blocks.start;
        while b < blocks.end {
            let r = match (L::REGISTERS, active.len(), blocks.end - b) {
                (_, _, coded::KEY_BLOCKS..) if decodes => coded::KEY_BLOCKS,
                (Registers::Wide, ..=4, 4..) => 4,
                (Registers::Wide, _, 2..) => 2,
                _ => 1,
            };
            let ahead = ahead.take(blocks.end - b, r);
            if decodes && r == coded::KEY_BLOCKS {
                self.score_codes::<L>(k, b, active.clone(), ahead);
            } else if let Some(k) = direct {
                let k = &k[b * BLOCK * head_dim..];
                self.score_blocks::<L, bf16>(k, b, r, active.clone(), ahead);
            } else {
                let converted = std::mem::take(&mut self.scratch.converted);
                k.keys::<L>(b..b + r, converted);
                self.score_blocks::<L, f32>(converted, b, r, active.clone(), ahead);
                self.scratch.converted = converted;
            }
            b += r;
        }
    }

    /// `p[i][key] = q[i] · k[key]` for queries `active` and the `r` blocks of
    /// keys from block `b` on, the first in `k`.
    #[inline(always)]
    fn score_blocks<L: Lanes, E: Element>(
        &mut self,
        k: &[E],
        b: usize,
        r: usize,
        active: Range<usize>,
        mut ahead: PrefetchRange,
    ) {
        let mut i = active.start;
        while i < active.end {
            let left = active.end - i;
            let m = queries_at_once::<L>(left, r == 4);
            let prefetch = ahead.take(left, m).over(self.args.spec.head_dim);
            microkernels! {
                (L::REGISTERS, m, r) => |M, R| {
                    L::call(Score::<E, M, R> { attend: self, k, i, b, prefetch })
                };
                Wide:
                    (1, 4) (2, 4) (4, 4)
                    (1, 2) (2, 2) (4, 2) (6, 2) (8, 2)
                    (1, 1) (2, 1) (4, 1) (6, 1) (8, 1);
                Narrow: (1, 1) (2, 1) (4, 1);
            }
            i += m;
        }
    }

    /// `part = part * correction + Σ p v` for queries `active` and the values of keys `seen`.
    #[inline(always)]
    fn add_values<L: Lanes>(
        &mut self,
        v: KvView<'_>,
        direct: Option<&[bf16]>,
        seen: Range<usize>,
        active: Range<usize>,
        mut ahead: PrefetchRange,
    ) {
        let width = self.args.width;
        if let Some(values) = direct {
            let columns = ValueColumns {
                values,
                stride: width,
                cols: 0..width,
            };
            self.add_columns::<L, bf16>(&columns, active, ahead);
            return;
        }
        if self.adds_codes::<L>(v, active.clone()) {
            self.add_codes::<L>(v, active, ahead);
            return;
        }
        let converted = std::mem::take(&mut self.scratch.converted);
        for col in (0..width).step_by(STRIP) {
            let cols = col..(col + STRIP).min(width);
            v.values::<L>(seen.clone(), col, converted);
            let ahead = ahead.take(width - col, cols.len());
            let columns = ValueColumns {
                values: &*converted,
                stride: STRIP,
                cols,
            };
            self.add_columns::<L, f32>(&columns, active.clone(), ahead);
        }
        self.scratch.converted = converted;
    }

    /// [`Self::add_values`] for some columns: a few queries at a time, the keys that all of them
    /// see together and the others apart, ascending for each query.
    #[inline(always)]
    fn add_columns<L: Lanes, E: Element>(
        &mut self,
        columns: &ValueColumns<'_, E>,
        active: Range<usize>,
        mut ahead: PrefetchRange,
    ) {
        let none = PrefetchRange::NOTHING;
        let mut i = active.start;
        while i < active.end {
            let left = active.end - i;
            let m = queries_at_once::<L>(left, false);
            let ahead = ahead.take(left, m);
            let mut corrections = [1.0; 8];
            let (mut first, mut last) = (0, PAGE_ROWS);
            for (c, s) in corrections.iter_mut().zip(&self.scratch.states[i..i + m]) {
                (first, last) = (first.max(s.first), last.min(s.last));
                *c = s.correction;
            }
            // Without keys in common, each query is added up on its own.
            let common = first < last;
            for (m, c) in corrections[..m].iter_mut().enumerate() {
                let s = self.scratch.states[i + m];
                let before = s.first..if common { first } else { s.last };
                if !before.is_empty() {
                    self.add_rows::<L, E, 1>(columns, i + m, before, [*c], none);
                    *c = 1.0;
                }
            }
            if common {
                let (keys, c) = (first..last, &corrections);
                microkernels! {
                    (L::REGISTERS, m) => |M| {
                        self.add_rows::<L, E, M>(columns, i, keys, first_of(c), ahead)
                    };
                    Wide: 8 6 4 2 1;
                    Narrow: 4 2 1;
                }
                for m in 0..m {
                    let after = last..self.scratch.states[i + m].last;
                    if !after.is_empty() {
                        self.add_rows::<L, E, 1>(columns, i + m, after, [1.0], none);
                    }
                }
            }
            i += m;
        }
    }

    /// Adds the values of `keys` to the `M` queries from `i`, some vectors of columns at a time.
    #[inline(always)]
    fn add_rows<L: Lanes, E: Element, const M: usize>(
        &mut self,
        columns: &ValueColumns<'_, E>,
        i: usize,
        keys: Range<usize>,
        corrections: [f32; M],
        mut ahead: PrefetchRange,
    ) {
        use Registers::{Narrow, Wide};
        let cols = columns.cols.len();
        let mut col = 0;
        while col < cols {
            let left = (cols - col) / 16;
            let r = match (L::REGISTERS, M, left) {
                (Wide, 1..=4, 4..) | (Narrow, 1, 4..) => 4,
                (Wide, _, 2..) | (Narrow, 2, 2..) => 2,
                _ => 1,
            };
            let prefetch = ahead.take(left, r).over(keys.len());
            let keys = keys.clone();
            macro_rules! call {
                ($R:literal) => {
                    L::call(AddBlock::<E, M, $R> {
                        attend: self,
                        columns,
                        i,
                        keys,
                        col,
                        corrections,
                        prefetch,
                    })
                };
            }
            match (L::REGISTERS, M, r) {
                (Wide, 1..=4, 4) | (Narrow, 1, 4) => call!(4),
                (Wide, _, 2) | (Narrow, 2, 2) => call!(2),
                _ => call!(1),
            }
            col += 16 * r;
        }
    }

    /// Merges a finished split into the totals of the splits before it.
    #[inline(always)]
    fn merge_split<L: Lanes>(&mut self, n: usize) {
        let width = self.args.width;
        for i in 0..n {
            let s = &mut self.scratch.states[i];
            if s.saw_nothing() {
                continue;
            }
            let (total, part) = (
                &mut self.scratch.total[i * width..][..width],
                &self.scratch.part[i * width..][..width],
            );
            if s.total_sum < 0.0 {
                (s.total_max, s.total_sum) = (s.max, s.sum);
                total.copy_from_slice(part);
            } else {
                (s.total_max, s.total_sum) =
                    merge::<L>(total, (s.total_max, s.total_sum), part, (s.max, s.sum));
            }
        }
    }

    /// Keeps a finished split as a partial result; a negative sum says that it saw nothing.
    #[inline(always)]
    fn keep_partial(&self, slots: PartialSlots, n: usize) {
        let (width, len) = (self.args.width, self.args.width + PARTIAL_STATE);
        for i in 0..n {
            let s = self.scratch.states[i];
            let at = (slots.start + i * slots.splits) * len;
            // SAFETY: this split of these queries is this task's.
            let out = unsafe { self.partials.part(at..at + len) };
            out[..width].copy_from_slice(&self.scratch.part[i * width..][..width]);
            (out[width], out[width + 1]) = (s.max, if s.saw_nothing() { -1.0 } else { s.sum });
        }
    }
}

/// Scores of the `M` queries from `i` with the `R` blocks of `k`, of which `b` is the first.
struct Score<'s, 'a, E, const M: usize, const R: usize> {
    attend: &'s mut Attend<'a>,
    k: &'s [E],
    i: usize,
    b: usize,
    prefetch: Prefetch,
}

impl<E: Element, const M: usize, const R: usize> Kernel for Score<'_, '_, E, M, R> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let head_dim = self.attend.args.spec.head_dim;
        let scratch = &mut self.attend.scratch;
        let mut acc = [[L::splat(0.0); R]; M];
        let operands = Operands {
            x: scratch.q[self.i * head_dim..][..M * head_dim].as_ptr(),
            x_stride: head_dim,
            w: self.k[..R * BLOCK * head_dim].as_ptr(),
            w_step: BLOCK,
            w_stride: BLOCK * head_dim,
            k: head_dim,
            prefetch: self.prefetch,
        };
        // SAFETY: `M` queries and `R` blocks of `e` columns, sliced above.
        unsafe { accumulate::<L, E, M, R>(&mut acc, operands) };
        for (m, acc) in acc.into_iter().enumerate() {
            for (r, lanes) in acc.into_iter().enumerate() {
                let at = (self.i + m) * PAGE_ROWS + (self.b + r) * BLOCK;
                store(lanes, &mut scratch.p[at..][..BLOCK]);
            }
        }
    }
}

/// Adds the values of `keys` in `R` vectors of columns, from `col` of `columns` on, to the `M` queries from `i`.
struct AddBlock<'s, 'a, E, const M: usize, const R: usize> {
    attend: &'s mut Attend<'a>,
    columns: &'s ValueColumns<'s, E>,
    i: usize,
    keys: Range<usize>,
    col: usize,
    corrections: [f32; M],
    prefetch: Prefetch,
}

impl<E: Element, const M: usize, const R: usize> Kernel for AddBlock<'_, '_, E, M, R> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let AddBlock {
            columns, keys, col, ..
        } = self;
        let (width, stride) = (self.attend.args.width, columns.stride);
        let scratch = &mut self.attend.scratch;
        let to = |m: usize, r: usize| (self.i + m) * width + columns.cols.start + col + 16 * r;
        let mut acc = [[L::splat(0.0); R]; M];
        for (m, acc) in acc.iter_mut().enumerate() {
            for (r, lanes) in acc.iter_mut().enumerate() {
                let part = &scratch.part[to(m, r)..][..16];
                *lanes = load::<L>(part) * L::splat(self.corrections[m]);
            }
        }
        let w = &columns.values[keys.start * stride + col..];
        assert!(
            w.len() >= (keys.len() - 1) * stride + 16 * R,
            "values of these keys"
        );
        let p = &scratch.p[self.i * PAGE_ROWS + keys.start..];
        let operands = Operands {
            x: p[..(M - 1) * PAGE_ROWS + keys.len()].as_ptr(),
            x_stride: PAGE_ROWS,
            w: w.as_ptr(),
            w_step: stride,
            w_stride: 16,
            k: keys.len(),
            prefetch: self.prefetch,
        };
        // SAFETY: probabilities of `M` queries and values of the keys, checked above.
        unsafe { accumulate::<L, E, M, R>(&mut acc, operands) };
        for (m, acc) in acc.into_iter().enumerate() {
            for (r, lanes) in acc.into_iter().enumerate() {
                store(lanes, &mut scratch.part[to(m, r)..][..16]);
            }
        }
    }
}

/// Queries that one microkernel call takes of `left`; fewer where it takes four blocks of keys.
#[inline(always)]
fn queries_at_once<L: Lanes>(left: usize, four_blocks: bool) -> usize {
    match (L::REGISTERS, left) {
        (Registers::Wide, 8..) if !four_blocks => 8,
        (Registers::Wide, 6..) if !four_blocks => 6,
        (Registers::Wide | Registers::Narrow, 4..) => 4,
        (Registers::Wide | Registers::Narrow, 2..) => 2,
        _ => 1,
    }
}

/// The first `M` of eight values.
#[inline(always)]
fn first_of<const M: usize>(values: &[f32; 8]) -> [f32; M] {
    std::array::from_fn(|m| values[m])
}

/// `out = total / sum`, rotated back where values are rotated.
#[inline(always)]
fn finish<L: Lanes>(total: &[f32], sum: f32, format: KvFormat, out: &mut [f32]) {
    let sum = L::splat(sum);
    for (total, out) in total.chunks(16).zip(out.chunks_mut(16)) {
        store(load::<L>(total) / sum, out);
    }
    if let Some(rotation) = format.v.rotation {
        rotation.undo(out);
    }
}

/// Merges the splits of one block of queries that were tasks of their own.
pub(super) struct MergeSplits<'a> {
    pub(super) args: &'a AttendArgs<'a>,
    pub(super) block: &'a Task,
    /// Partial results by split.
    pub(super) splits: usize,
    /// The block's, `[queries, splits, width + PARTIAL_STATE]`.
    pub(super) partials: &'a mut [f32],
    pub(super) out: &'a DisjointSlice<'a, f32>,
}

impl Kernel for MergeSplits<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (args, width) = (self.args, self.args.width);
        let len = width + PARTIAL_STATE;
        let queries = self.partials.chunks_exact_mut(self.splits * len);
        for (i, partials) in queries.enumerate() {
            let mut splits = partials
                .chunks_exact_mut(len)
                .map(|p| p.split_at_mut(width))
                .filter(|(_, s)| s[1] >= 0.0 || s[1].is_nan());
            let (total, state) = splits.next().expect("a row sees at least one key");
            let mut state = (state[0], state[1]);
            for (part, s) in splits {
                state = merge::<L>(total, state, part, (s[0], s[1]));
            }
            let at = args.place(self.block, i);
            // SAFETY: these queries are this block's.
            let out = unsafe { self.out.part(at..at + args.spec.head_dim) };
            finish::<L>(total, state.1, args.spec.format, out);
        }
    }
}
