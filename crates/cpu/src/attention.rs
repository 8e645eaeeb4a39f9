//! Attention over paged keys and values.
//!
//! Keys come in transposed blocks of 16 (`kv`), so that a score is a lane and is
//! summed over the head's columns in order.
//!
//! The rows of a sequence and the query heads of a group read the same keys, so
//! they form one block of *queries*: a tile of 64 keys is loaded once for all of
//! them, scored (`[queries, 64]`), and its values are added. Few queries read it
//! as it lies; for many it is converted to `f32` first, a piece that fits the
//! first cache at a time. Where queries see different parts of a tile, the part
//! they share is done together and the rest one by one, keys ascending for each.
//!
//! Long contexts are cut at multiples of [`SPLIT_ROWS`] and merged from the left
//! as the definition says; whether splits run on one worker or many is a
//! question of how many other pieces of work there are.

use crate::arch::{Element, Kernel, Lanes, load, store};
mod plan;

pub(crate) use plan::Plan;

use crate::device::Cpu;
use crate::kv::{BLOCK, KvPages, KvView, STRIP};
use crate::memory::{values, values_mut};
use crate::microkernel::{Operands, PREFETCH_STEPS, Prefetch, accumulate};
use crate::pool::{DisjointSlice, worker_scratch};
use backend::math;
use backend::{Attention, Batch, Kv, KvFormat, KvSpec, PAGE_ROWS, SPLIT_ROWS, Tensor};
use half::bf16;
use plan::{FRESH, OnlineSoftmax, PartialSlots, Task};
use quant::turbo;
use std::ops::Range;
use std::sync::PoisonError;

/// Queries that are worked on together: their vectors, scores and sums should
/// fit the second cache.
const QUERIES: usize = 64;

/// Queries that read a tile as it lies, at most: each kernel call converts what
/// it reads, and more queries than these would need several calls.
const DIRECT: usize = 8;

/// Values of partial results that may be kept apart for a parallel merge.
const PARTIALS: usize = 8 << 20;

/// Multiply-adds of scores below which handing out work costs more than it saves.
const MIN_PARALLEL: usize = 32 << 10;

/// What a task needs of the op's arguments.
struct AttendArgs<'a> {
    q: &'a [f32],
    k: KvView<'a>,
    v: KvView<'a>,
    spec: KvSpec,
    width: usize,
    attention: &'a Attention,
    batch: &'a Batch,
}

impl AttendArgs<'_> {
    /// Query heads that share a key/value head.
    fn group(&self) -> usize {
        self.attention.heads / self.spec.heads
    }

    /// Where a task's query `i` starts in the queries and in the output.
    fn place(&self, task: &Task, i: usize) -> usize {
        let (group, heads) = (self.group(), self.attention.heads);
        ((task.rows.start + i / group) * heads + task.kv_head * group + i % group)
            * self.spec.head_dim
    }

    /// Cache rows that row `r` of the step sees.
    fn visible(&self, r: usize) -> Range<usize> {
        self.attention.visible(self.batch.rows[r])
    }
}

/// A worker's room for one task.
struct Scratch<'a> {
    /// `[queries, e]`
    q: &'a mut [f32],
    /// Scores, then probabilities: `[queries, 64]`
    p: &'a mut [f32],
    /// `[queries, width]`
    part: &'a mut [f32],
    /// `[queries, width]`
    total: &'a mut [f32],
    /// Converted keys, `[blocks, e, 16]`, or values, `[64, STRIP]`.
    tile: &'a mut [f32],
    /// Of each query: maximum and sum of the part and of the total, the part's
    /// last correction.
    stats: &'a mut [OnlineSoftmax],
}

/// Columns of a tile's values: row `key`'s are at `key * stride`.
struct ValueColumns<'a, E> {
    values: &'a [E],
    stride: usize,
    /// Which columns of the head.
    cols: Range<usize>,
}

/// Memory to ask for while something else is worked on.
#[derive(Clone, Copy)]
struct PrefetchRange {
    from: *const u8,
    lines: usize,
}

impl PrefetchRange {
    const NOTHING: PrefetchRange = PrefetchRange {
        from: std::ptr::null(),
        lines: 0,
    };

    fn of<T>(memory: &[T]) -> Self {
        PrefetchRange {
            from: memory.as_ptr().cast(),
            lines: size_of_val(memory) / 64,
        }
    }

    /// Takes the share of `part` in `whole`.
    #[inline(always)]
    fn share(&mut self, whole: usize, part: usize) -> Self {
        let lines = (self.lines * part).div_ceil(whole.max(1)).min(self.lines);
        let share = PrefetchRange { lines, ..*self };
        self.from = self.from.wrapping_add(64 * lines);
        self.lines -= lines;
        share
    }

    /// Spreads the requests over `k` steps.
    #[inline(always)]
    fn fetch(self, k: usize) -> Prefetch {
        match self.lines.div_ceil((k / PREFETCH_STEPS).max(1)) {
            0 => Prefetch::None,
            lines => Prefetch::Lines(self.from, lines),
        }
    }
}

impl<'a> Scratch<'a> {
    /// Values of a room, [`OnlineSoftmax`] apart.
    fn len(queries: usize, head_dim: usize, width: usize) -> usize {
        let tile = PAGE_ROWS * head_dim.max(STRIP);
        queries * (head_dim.next_multiple_of(16) + PAGE_ROWS + 2 * width) + tile
    }

    fn new(
        values: &'a mut [f32],
        stats: &'a mut [OnlineSoftmax],
        queries: usize,
        head_dim: usize,
        width: usize,
    ) -> Self {
        let (q, values) = values.split_at_mut(queries * head_dim.next_multiple_of(16));
        let (p, values) = values.split_at_mut(queries * PAGE_ROWS);
        let (part, values) = values.split_at_mut(queries * width);
        let (total, tile) = values.split_at_mut(queries * width);
        Scratch {
            q,
            p,
            part,
            total,
            tile,
            stats,
        }
    }
}

/// Runs one task.
struct Attend<'a> {
    args: &'a AttendArgs<'a>,
    task: &'a Task,
    room: Scratch<'a>,
    /// The first cache row past those of the task.
    end: usize,
    out: &'a DisjointSlice<'a, f32>,
    /// Partial sums `[.., width + 16]`: the values, then maximum and sum.
    partials: &'a DisjointSlice<'a, f32>,
}

impl Kernel for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        let args = self.args;
        let (group, head_dim, width) = (args.group(), args.spec.head_dim, args.width);
        let rows = self.task.rows.clone();
        let n = rows.len() * group;
        for i in 0..n {
            let from = args.place(self.task, i);
            self.room.q[i * head_dim..][..head_dim].copy_from_slice(&args.q[from..][..head_dim]);
        }
        self.room.stats[..n].fill(FRESH);
        for split in self.task.splits.clone() {
            for s in &mut self.room.stats[..n] {
                (s.max, s.sum) = (f32::NEG_INFINITY, 0.0);
            }
            self.room.part[..n * width].fill(0.0);
            let keys = args.visible(rows.start).start..args.visible(rows.end - 1).end;
            let first = keys.start.max(split * SPLIT_ROWS) / PAGE_ROWS * PAGE_ROWS;
            for tile in (first..keys.end.min((split + 1) * SPLIT_ROWS)).step_by(PAGE_ROWS) {
                self.tile::<L>(tile);
            }
            match self.task.apart {
                Some(apart) => self.keep(apart, n),
                None => self.merge::<L>(n),
            }
        }
        if self.task.apart.is_none() {
            for i in 0..n {
                let at = args.place(self.task, i);
                // SAFETY: these queries are this task's.
                let out = unsafe { self.out.part(at..at + head_dim) };
                finish::<L>(
                    &self.room.total[i * width..][..width],
                    self.room.stats[i].total_sum,
                    args.spec.format,
                    out,
                );
            }
        }
    }
}

impl Attend<'_> {
    /// One page of keys, from cache row `tile` on.
    #[inline(always)]
    fn tile<L: Lanes>(&mut self, tile: usize) {
        let args = self.args;
        let (group, head_dim, width) = (args.group(), args.spec.head_dim, args.width);
        // Rows ascend, so those that see some of this tile are neighbours.
        let (mut active, mut union) = (0..0, 0..0);
        for (i, r) in self.task.rows.clone().enumerate() {
            let visible = args.visible(r);
            let first = visible.start.clamp(tile, tile + PAGE_ROWS) - tile;
            let last = visible.end.clamp(tile, tile + PAGE_ROWS) - tile;
            for s in &mut self.room.stats[i * group..(i + 1) * group] {
                (s.first, s.last) = (first, last);
            }
            if first < last {
                if active.is_empty() {
                    (active.start, union) = (i * group, first..last);
                }
                active.end = (i + 1) * group;
                union = union.start.min(first)..union.end.max(last);
            }
        }
        if active.is_empty() {
            return;
        }
        let unit = |tile: usize| {
            let page = args.batch.page(self.task.seq, args.attention.group, tile);
            page * args.spec.heads + self.task.kv_head
        };
        let (k, v) = (args.k.unit(unit(tile)), args.v.unit(unit(tile)));
        let blocks = union.start / BLOCK..union.end.div_ceil(BLOCK);
        // Keys are scored while values are asked for, and the other way round.
        let mut values = PrefetchRange::of(v.rows(blocks.start * BLOCK..blocks.end * BLOCK));
        let mut next_keys = PrefetchRange::NOTHING;
        if tile + PAGE_ROWS < self.end {
            next_keys = PrefetchRange::of(args.k.unit(unit(tile + PAGE_ROWS)).bytes);
        }
        // Few queries have no use for converted keys and values but their own.
        let direct = (active.len() <= DIRECT).then(|| (k.as_bf16(), v.as_bf16()));
        let mut b = blocks.start;
        while b < blocks.end {
            let r = match (L::SUMS, active.len(), blocks.end - b) {
                (24, ..=4, 4..) => 4,
                (24, _, 2..) => 2,
                _ => 1,
            };
            let share = values.share(blocks.end - b, r);
            if let Some((Some(k), _)) = direct {
                self.scores::<L, bf16>(&k[b * BLOCK * head_dim..], b, r, active.clone(), share);
            } else {
                let room = std::mem::take(&mut self.room.tile);
                k.keys::<L>(b..b + r, room);
                self.scores::<L, f32>(room, b, r, active.clone(), share);
                self.room.tile = room;
            }
            b += r;
        }
        for i in active.clone() {
            self.softmax::<L>(i);
        }
        if let Some((_, Some(values))) = direct {
            let strip = ValueColumns {
                values,
                stride: width,
                cols: 0..width,
            };
            self.add_strip::<L, bf16>(&strip, active, next_keys);
            return;
        }
        let room = std::mem::take(&mut self.room.tile);
        for col in (0..width).step_by(STRIP) {
            let cols = col..(col + STRIP).min(width);
            v.values::<L>(union.clone(), col, room);
            let share = next_keys.share(width - col, cols.len());
            let strip = ValueColumns {
                values: &*room,
                stride: STRIP,
                cols,
            };
            self.add_strip::<L, f32>(&strip, active.clone(), share);
        }
        self.room.tile = room;
    }

    /// `p[i][key] = q[i] · k[key]` for queries `active` and the `r` blocks of
    /// keys from block `b` on, the first in `k`.
    #[inline(always)]
    fn scores<L: Lanes, E: Element>(
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
            let m = together::<L>(left, r == 4);
            let fetch = ahead.share(left, m).fetch(self.args.spec.head_dim);
            match (L::SUMS, r, m) {
                (24, 4, 4) => self.score::<L, E, 4, 4>(k, i, b, fetch),
                (24, 4, 2) => self.score::<L, E, 2, 4>(k, i, b, fetch),
                (24, 4, _) => self.score::<L, E, 1, 4>(k, i, b, fetch),
                (24, 2, 8) => self.score::<L, E, 8, 2>(k, i, b, fetch),
                (24, 2, 6) => self.score::<L, E, 6, 2>(k, i, b, fetch),
                (24, 2, 4) => self.score::<L, E, 4, 2>(k, i, b, fetch),
                (24, 2, 2) => self.score::<L, E, 2, 2>(k, i, b, fetch),
                (24, 2, _) => self.score::<L, E, 1, 2>(k, i, b, fetch),
                (24, _, 8) => self.score::<L, E, 8, 1>(k, i, b, fetch),
                (24, _, 6) => self.score::<L, E, 6, 1>(k, i, b, fetch),
                (24 | 6, _, 4) => self.score::<L, E, 4, 1>(k, i, b, fetch),
                (24 | 6, _, 2) => self.score::<L, E, 2, 1>(k, i, b, fetch),
                _ => self.score::<L, E, 1, 1>(k, i, b, fetch),
            }
            i += m;
        }
    }

    /// Scores of `M` queries with the `R` blocks of `k`.
    #[inline(always)]
    fn score<L: Lanes, E: Element, const M: usize, const R: usize>(
        &mut self,
        k: &[E],
        i: usize,
        b: usize,
        fetch: Prefetch,
    ) {
        let head_dim = self.args.spec.head_dim;
        let mut acc = [[L::splat(0.0); R]; M];
        let operands = Operands {
            x: self.room.q[i * head_dim..][..M * head_dim].as_ptr(),
            x_stride: head_dim,
            w: k[..R * BLOCK * head_dim].as_ptr(),
            w_step: BLOCK,
            w_stride: BLOCK * head_dim,
            k: head_dim,
            fetch,
        };
        // SAFETY: `M` queries and `R` blocks of `e` columns, sliced above.
        unsafe { accumulate::<L, E, M, R>(&mut acc, operands) };
        for (m, acc) in acc.into_iter().enumerate() {
            for (r, lanes) in acc.into_iter().enumerate() {
                store(
                    lanes,
                    &mut self.room.p[(i + m) * PAGE_ROWS + (b + r) * BLOCK..][..BLOCK],
                );
            }
        }
    }

    /// Turns a query's scores into probabilities and moves its maximum and sum.
    #[inline(always)]
    fn softmax<L: Lanes>(&mut self, i: usize) {
        let scale = L::splat(self.args.attention.scale);
        let s = &mut self.room.stats[i];
        if s.first >= s.last {
            return;
        }
        let p = &mut self.room.p[i * PAGE_ROWS..][..PAGE_ROWS];
        let p = p.as_chunks_mut::<BLOCK>().0;
        let blocks = s.first / BLOCK..s.last.div_ceil(BLOCK);
        let whole = s.first == 0 && s.last == PAGE_ROWS;
        let none = L::splat(f32::NEG_INFINITY);
        let mut max = none;
        for b in blocks.clone() {
            let mut x = L::load(&p[b]) * scale;
            if !whole {
                x = mask(x, b, s.first..s.last, none);
            }
            x.store(&mut p[b]);
            max = x.maximum(max);
        }
        let largest = max.max_lane();
        let new = if largest > s.max { largest } else { s.max };
        // The exponential of zero is one; it is worth knowing, because a maximum
        // seldom moves.
        s.correction = if s.max == new && new.is_finite() {
            1.0
        } else {
            math::exp(s.max - new)
        };
        s.max = new;
        let (new, zero) = (L::splat(new), L::splat(0.0));
        let mut sum = zero;
        for b in blocks {
            let mut x = math::exp(L::load(&p[b]) - new);
            if !whole {
                x = mask(x, b, s.first..s.last, zero);
            }
            x.store(&mut p[b]);
            sum = sum + x;
        }
        s.sum = s.sum * s.correction + sum.sum();
    }

    /// `part = part * correction + Σ p v` for queries `active` and the columns of
    /// `strip`: a few queries at a time, the keys that all of them see together
    /// and the others apart.
    #[inline(always)]
    fn add_strip<L: Lanes, E: Element>(
        &mut self,
        strip: &ValueColumns<'_, E>,
        active: Range<usize>,
        mut ahead: PrefetchRange,
    ) {
        let mut i = active.start;
        while i < active.end {
            let left = active.end - i;
            let m = together::<L>(left, false);
            let ahead = ahead.share(left, m);
            let mut corrections = [1.0; 8];
            let (mut first, mut last) = (0, PAGE_ROWS);
            for (c, s) in corrections.iter_mut().zip(&self.room.stats[i..i + m]) {
                (first, last) = (first.max(s.first), last.min(s.last));
                *c = s.correction;
            }
            let none = PrefetchRange::NOTHING;
            // Without keys in common, each query goes its own way.
            let common = first < last;
            for (m, c) in corrections[..m].iter_mut().enumerate() {
                let s = self.room.stats[i + m];
                let before = s.first..if common { first } else { s.last };
                if !before.is_empty() {
                    self.add_rows::<L, E, 1>(strip, i + m, before, [*c], none);
                    *c = 1.0;
                }
            }
            if common {
                let (keys, c) = (first..last, &corrections);
                match (L::SUMS, m) {
                    (24, 8) => self.add_rows::<L, E, 8>(strip, i, keys, head(c), ahead),
                    (24, 6) => self.add_rows::<L, E, 6>(strip, i, keys, head(c), ahead),
                    (24 | 6, 4) => self.add_rows::<L, E, 4>(strip, i, keys, head(c), ahead),
                    (24 | 6, 2) => self.add_rows::<L, E, 2>(strip, i, keys, head(c), ahead),
                    _ => self.add_rows::<L, E, 1>(strip, i, keys, head(c), ahead),
                }
                for m in 0..m {
                    let after = last..self.room.stats[i + m].last;
                    if !after.is_empty() {
                        self.add_rows::<L, E, 1>(strip, i + m, after, [1.0], none);
                    }
                }
            }
            i += m;
        }
    }

    /// Adds the values of `keys` to `M` queries.
    #[inline(always)]
    fn add_rows<L: Lanes, E: Element, const M: usize>(
        &mut self,
        strip: &ValueColumns<'_, E>,
        i: usize,
        keys: Range<usize>,
        corrections: [f32; M],
        mut ahead: PrefetchRange,
    ) {
        let cols = strip.cols.len();
        let mut col = 0;
        while col < cols {
            let left = (cols - col) / 16;
            let r = match (L::SUMS, M, left) {
                (24, 1..=4, 4..) | (6, 1, 4..) => 4,
                (24, _, 2..) | (6, 2, 2..) => 2,
                _ => 1,
            };
            let fetch = ahead.share(left, r).fetch(keys.len());
            let keys = keys.clone();
            match (L::SUMS, M, r) {
                (24, 1..=4, 4) | (6, 1, 4) => {
                    self.add_block::<L, E, M, 4>(strip, i, keys, col, corrections, fetch);
                }
                (24, _, 2) | (6, 2, 2) => {
                    self.add_block::<L, E, M, 2>(strip, i, keys, col, corrections, fetch);
                }
                _ => self.add_block::<L, E, M, 1>(strip, i, keys, col, corrections, fetch),
            }
            col += 16 * r;
        }
    }

    /// `R` vectors of columns from the strip's column `col`.
    #[inline(always)]
    fn add_block<L: Lanes, E: Element, const M: usize, const R: usize>(
        &mut self,
        strip: &ValueColumns<'_, E>,
        i: usize,
        keys: Range<usize>,
        col: usize,
        corrections: [f32; M],
        fetch: Prefetch,
    ) {
        let (width, stride) = (self.args.width, strip.stride);
        let to = |m: usize, r: usize| (i + m) * width + strip.cols.start + col + 16 * r;
        let mut acc = [[L::splat(0.0); R]; M];
        for (m, acc) in acc.iter_mut().enumerate() {
            for (r, lanes) in acc.iter_mut().enumerate() {
                *lanes = load::<L>(&self.room.part[to(m, r)..][..16]) * L::splat(corrections[m]);
            }
        }
        let w = &strip.values[keys.start * stride + col..];
        assert!(
            w.len() >= (keys.len() - 1) * stride + 16 * R,
            "values of these keys"
        );
        let operands = Operands {
            x: self.room.p[i * PAGE_ROWS + keys.start..][..(M - 1) * PAGE_ROWS + keys.len()]
                .as_ptr(),
            x_stride: PAGE_ROWS,
            w: w.as_ptr(),
            w_step: stride,
            w_stride: 16,
            k: keys.len(),
            fetch,
        };
        // SAFETY: probabilities of `M` queries and values of the keys, checked above.
        unsafe { accumulate::<L, E, M, R>(&mut acc, operands) };
        for (m, acc) in acc.into_iter().enumerate() {
            for (r, lanes) in acc.into_iter().enumerate() {
                store(lanes, &mut self.room.part[to(m, r)..][..16]);
            }
        }
    }

    /// Merges a finished split into the totals, from the right.
    #[inline(always)]
    fn merge<L: Lanes>(&mut self, n: usize) {
        let width = self.args.width;
        for i in 0..n {
            let s = &mut self.room.stats[i];
            if s.saw_nothing() {
                continue;
            }
            let (total, part) = (
                &mut self.room.total[i * width..][..width],
                &self.room.part[i * width..][..width],
            );
            if s.total_sum < 0.0 {
                (s.total_max, s.total_sum) = (s.max, s.sum);
                total.copy_from_slice(part);
            } else {
                (s.total_max, s.total_sum) =
                    join::<L>(total, (s.total_max, s.total_sum), part, (s.max, s.sum));
            }
        }
    }

    /// Puts a finished split aside; a negative sum says that it saw nothing.
    #[inline(always)]
    fn keep(&self, apart: PartialSlots, n: usize) {
        let width = self.args.width;
        for i in 0..n {
            let s = self.room.stats[i];
            let at = (apart.start + i * apart.splits) * (width + 16);
            // SAFETY: this split of these queries is this task's.
            let out = unsafe { self.partials.part(at..at + width + 16) };
            out[..width].copy_from_slice(&self.room.part[i * width..][..width]);
            (out[width], out[width + 1]) = (s.max, if s.saw_nothing() { -1.0 } else { s.sum });
        }
    }
}

/// Queries that one call takes of `left`.
#[inline(always)]
fn together<L: Lanes>(left: usize, is_wide: bool) -> usize {
    match (L::SUMS, left) {
        (24, 8..) if !is_wide => 8,
        (24, 6..) if !is_wide => 6,
        (24 | 6, 4..) => 4,
        (24 | 6, 2..) => 2,
        _ => 1,
    }
}

/// The first `M` of eight.
#[inline(always)]
fn head<const M: usize>(values: &[f32; 8]) -> [f32; M] {
    std::array::from_fn(|m| values[m])
}

/// `otherwise` in lanes of block `b` that are not among `keys`.
#[inline(always)]
fn mask<L: Lanes>(x: L, b: usize, keys: Range<usize>, otherwise: L) -> L {
    let key = L::iota() + L::splat((b * BLOCK) as f32);
    let x = key.if_below(L::splat(keys.end as f32), x, otherwise);
    key.if_below(L::splat(keys.start as f32), otherwise, x)
}

/// `left ← left exp(m₁ - m) + right exp(m₂ - m)`, `m` the larger maximum;
/// returns it and the sums joined likewise.
#[inline(always)]
fn join<L: Lanes>(
    left: &mut [f32],
    (max, sum): (f32, f32),
    right: &[f32],
    (max2, sum2): (f32, f32),
) -> (f32, f32) {
    let new = if max2 > max { max2 } else { max };
    let (c, c2) = (math::exp(max - new), math::exp(max2 - new));
    for (left, right) in left.chunks_mut(16).zip(right.chunks(16)) {
        store(
            load::<L>(left) * L::splat(c) + load::<L>(right) * L::splat(c2),
            left,
        );
    }
    (new, sum * c + sum2 * c2)
}

/// `out = total / sum`, turned back where values are rotated.
#[inline(always)]
fn finish<L: Lanes>(total: &[f32], sum: f32, format: KvFormat, out: &mut [f32]) {
    let sum = L::splat(sum);
    for (total, out) in total.chunks(16).zip(out.chunks_mut(16)) {
        store(load::<L>(total) / sum, out);
    }
    if format.v.is_rotated() {
        turbo::unrotate(out);
    }
}

/// Joins the splits of one block of queries that ran apart.
struct MergeSplits<'a> {
    apart: PartialSlots,
    n: usize,
    width: usize,
    partials: &'a mut [f32],
    /// Where query `i`'s output starts.
    place: &'a dyn Fn(usize) -> usize,
    head_dim: usize,
    format: KvFormat,
    out: &'a DisjointSlice<'a, f32>,
}

impl Kernel for MergeSplits<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let room = self.width + 16;
        for i in 0..self.n {
            let mine =
                &mut self.partials[i * self.apart.splits * room..][..self.apart.splits * room];
            let mut splits = mine
                .chunks_exact_mut(room)
                .map(|p| p.split_at_mut(self.width))
                .filter(|(_, s)| s[1] >= 0.0 || s[1].is_nan());
            let (total, stats) = splits.next().expect("a row sees at least one key");
            let mut stats = (stats[0], stats[1]);
            for (part, s) in splits {
                stats = join::<L>(total, stats, part, (s[0], s[1]));
            }
            let at = (self.place)(i);
            // SAFETY: these queries are this block's.
            let out = unsafe { self.out.part(at..at + self.head_dim) };
            finish::<L>(total, stats.1, self.format, out);
        }
    }
}

/// `softmax(scale q·kᵀ) v` over the visible cache rows.
pub(crate) fn attend(
    cpu: &Cpu,
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
    let mut y = cpu.tensor(batch.n_rows(), cols);
    let mut plan = cpu
        .attention_plan
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let Plan {
        blocks,
        tasks,
        stats,
    } = &mut *plan;
    let group = attention.heads / kv_heads;
    let block_rows = (QUERIES / group).max(1);
    let visible = |r: usize| attention.visible(batch.rows[r]);

    blocks.clear();
    for (seq, s) in batch.seqs.iter().enumerate() {
        for first in s.rows.clone().step_by(block_rows) {
            let rows = first..(first + block_rows).min(s.rows.end);
            let splits = visible(rows.start).start / SPLIT_ROWS
                ..visible(rows.end - 1).end.div_ceil(SPLIT_ROWS);
            for kv_head in 0..kv_heads {
                blocks.push(Task {
                    seq,
                    kv_head,
                    rows: rows.clone(),
                    splits: splits.clone(),
                    apart: None,
                });
            }
        }
    }
    // Later rows see more: the longest first, so that the last pieces are short.
    blocks.reverse();

    let width = pages.width;
    let n_partials: usize = blocks
        .iter()
        .map(|b| b.rows.len() * group * b.splits.len())
        .sum();
    let few = blocks.len() < 4 * cpu.pool.n_workers() && blocks.iter().any(|b| b.splits.len() > 1);
    let apart = few && cpu.pool.n_workers() > 1 && n_partials * (width + 16) <= PARTIALS;
    tasks.clear();
    if apart {
        let mut start = 0;
        for block in blocks.iter_mut() {
            let splits = block.splits.len();
            block.apart = Some(PartialSlots { start, splits });
            for (i, split) in block.splits.clone().enumerate() {
                let apart = Some(PartialSlots {
                    start: start + i,
                    splits,
                });
                tasks.push(Task {
                    splits: split..split + 1,
                    apart,
                    ..block.clone()
                });
            }
            start += block.rows.len() * group * splits;
        }
    }
    let mut partials = cpu.tensor(1, if apart { n_partials * (width + 16) } else { 0 });
    let queries = block_rows * group;
    let room = Scratch::len(queries, head_dim, width);
    let mut rooms = cpu.tensor(cpu.pool.n_workers(), room);
    stats.resize(cpu.pool.n_workers() * queries, FRESH);

    let out = DisjointSlice::new(values_mut(&mut y));
    let partials = DisjointSlice::new(values_mut(&mut partials));
    let (rooms, stats) = (
        DisjointSlice::new(values_mut(&mut rooms)),
        DisjointSlice::new(stats),
    );
    let tasks = if apart { &*tasks } else { &*blocks };
    {
        let args = AttendArgs {
            q: values(q),
            k: pages.k.side(),
            v: pages.v.side(),
            spec: kv.spec,
            width,
            attention,
            batch,
        };
        let run = |worker: usize, range: Range<usize>| {
            for task in &tasks[range] {
                // SAFETY: a worker's room is its own.
                let (values, stats) = unsafe {
                    (
                        worker_scratch(&rooms, worker, room),
                        stats.part(worker * queries..(worker + 1) * queries),
                    )
                };
                let room = Scratch::new(values, stats, queries, head_dim, width);
                let end = args
                    .visible(task.rows.end - 1)
                    .end
                    .min(task.splits.end * SPLIT_ROWS);
                cpu.isa.run(Attend {
                    args: &args,
                    task,
                    room,
                    end,
                    out: &out,
                    partials: &partials,
                });
            }
        };
        let keys: usize = batch.rows.iter().map(|&r| attention.visible(r).len()).sum();
        if keys * cols < MIN_PARALLEL {
            run(0, 0..tasks.len());
        } else {
            cpu.pool.each(tasks.len(), 1, run);
        }
        if apart {
            cpu.pool.each(blocks.len(), 4, |_, range| {
                for block in &blocks[range] {
                    let apart = block.apart.expect("set above");
                    let n = block.rows.len() * group;
                    let start = apart.start * (width + 16);
                    // SAFETY: partial results of different blocks are apart.
                    let partials =
                        unsafe { partials.part(start..start + n * apart.splits * (width + 16)) };
                    let place = |i: usize| args.place(block, i);
                    cpu.isa.run(MergeSplits {
                        apart,
                        n,
                        width,
                        partials,
                        place: &place,
                        head_dim,
                        format: kv.spec.format,
                        out: &out,
                    });
                }
            });
        }
    }
    y
}
