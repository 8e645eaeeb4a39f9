//! Activations quantized to 8 bits, in the order in which kernels read them.
//!
//! A row is quantized in the groups of the weights, as [`super::definition`] says, and rotated
//! before that where the weights' columns are. Rows come in blocks, as many as a kernel takes at once:
//!
//! ```text
//! vectors:  block = [cols / 8, rows, 8] bytes      the eights of all rows side by side
//! tiles:    block = [groups, rows, line] bytes     each row's columns of a group together
//! ```

use crate::arch::{Detected, Kernel, Lanes, TILE_DEPTH, TILE_ROWS};
use crate::device::Device;
use crate::memory::{bytes, bytes_mut, values, values_mut};
use crate::microkernel::even;
use crate::pool::{DisjointSlice, WORK_RANGE};
use backend::Tensor;
use quant::Rotated;
use std::ops::Range;

/// How rows of quantized activations are grouped in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowBlocks {
    /// Rows of a block, for tiles at most [`TILE_ROWS`](crate::arch::TILE_ROWS); the last
    /// block may have fewer.
    pub(crate) rows: usize,
    /// Whether the blocks are for tile registers.
    pub(crate) tiles: bool,
}

impl RowBlocks {
    /// Each row on its own, for vectors.
    pub(crate) const SINGLE: RowBlocks = RowBlocks {
        rows: 1,
        tiles: false,
    };

    /// Blocks for vectors, where there are `rows` rows.
    pub(crate) fn vectors(isa: Detected, rows: usize) -> Self {
        RowBlocks {
            rows: even(rows, isa.most_byte_rows()),
            tiles: false,
        }
    }

    /// Bytes of a row's columns of a group of `group`. Where smaller groups than [`TILE_DEPTH`]
    /// share a tile, each has a line of that many bytes, with zeros beside it.
    pub(crate) fn line(self, group: usize) -> usize {
        let share = self.tiles && self.rows * TILE_DEPTH <= TILE_ROWS * group;
        if share { group.max(TILE_DEPTH) } else { group }
    }

    /// Numbers that are kept of a group of a row.
    pub(crate) fn factors(self) -> usize {
        if self.tiles {
            TILE_FACTORS
        } else {
            GROUP_FACTORS
        }
    }
}

/// Activations in 8 bits, by group.
///
/// Each run of rows is cut in blocks, the last of which may have fewer rows. For tiles there is
/// one run, whose last block has memory for all rows; the factors of absent rows are zeros.
pub(crate) struct QuantizedActivations {
    /// Columns of a group.
    pub(crate) group: usize,
    /// How columns were rotated first, if they were.
    rotated: Option<Rotated>,
    pub(crate) cols: usize,
    pub(crate) blocks: RowBlocks,
    /// The blocks' bytes, from the first page boundary on.
    q: Tensor,
    /// Factors of each block: `[groups, rows, RowBlocks::factors]`.
    factors: Tensor,
}

/// Numbers that are kept of a group of a row: `d`, `d Σ q`, and the integers `−8 Σ q` and
/// `−128 Σ q`.
pub(crate) const GROUP_FACTORS: usize = 4;

/// The first ones of [`GROUP_FACTORS`], which tiles need. More would take the place of
/// activations in the first-level cache.
pub(crate) const TILE_FACTORS: usize = 2;

/// The alignment of the blocks' bytes. Sums leave their tiles for the same places of a page as
/// the activations come from: a load waits for every store under way to the same place of
/// another page.
const PAGE: usize = 4096;

/// Where the first page boundary of `storage` is.
fn from_page(storage: &[i8]) -> usize {
    storage.as_ptr().align_offset(PAGE)
}

/// Values that one worker quantizes at a time.
const QUANTIZED_RANGE: usize = 4 << 10;

/// Quantizes some columns of one block of rows.
struct QuantizeRows<'a> {
    /// The rows, from their first column on.
    x: &'a [f32],
    cols: usize,
    /// Groups of columns.
    groups: Range<usize>,
    /// Rows that the block has memory for.
    rows: usize,
    group: usize,
    rotated: Option<Rotated>,
    blocks: RowBlocks,
    q: &'a mut [i8],
    factors: &'a mut [f32],
}

impl Kernel for QuantizeRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (rows, group, line) = (self.rows, self.group, self.blocks.line(self.group));
        let q = self.q.as_chunks_mut::<8>().0;
        // From one eight of a row to its next, and to that of the next row.
        let (along, down) = if self.blocks.tiles {
            (1, line / 8)
        } else {
            (rows, 1)
        };
        if line > group {
            q.fill([0; 8]);
        }
        if self.x.len() < rows * self.cols {
            self.factors.fill(0.0);
        }
        for (m, x) in self.x.chunks_exact(self.cols).enumerate() {
            let x = &x[self.groups.start * group..self.groups.end * group];
            let mut turned = [0.0; Rotated::BLOCK];
            for (g, own) in x.chunks_exact(group).enumerate() {
                let mut own = own;
                if let Some(rotated) = &self.rotated {
                    let place = g * group % Rotated::BLOCK;
                    if place == 0 {
                        turned.copy_from_slice(&x[g * group..][..Rotated::BLOCK]);
                        rotated.turn(&mut turned);
                    }
                    own = &turned[place..place + group];
                }
                let x = own.as_chunks::<16>().0;
                let mut top = L::splat(0.0);
                let mut poison = L::splat(0.0);
                for x in x {
                    let x = L::load(x);
                    top = x.maximum(x.negate()).maximum(top);
                    poison = poison + x * L::splat(0.0);
                }
                let top = top.max_lane();
                let inverse = L::splat(if top > 0.0 { 127.0 / top } else { 0.0 });
                // Whole numbers far below 2²⁴: exact in any order.
                let mut sum = L::splat(0.0);
                for (i, x) in x.iter().enumerate() {
                    let rounded = (L::load(x) * inverse).round_even();
                    let rounded = rounded.minimum(L::splat(127.0)).maximum(L::splat(-127.0));
                    let mut bytes = [0; 16];
                    rounded.store_i8(&mut bytes);
                    let (halves, _) = bytes.as_chunks::<8>();
                    let place = (self.groups.start + g) * group % line / 8;
                    let eight = g * line / 8 * rows + m * down + (place + 2 * i) * along;
                    q[eight] = halves[0];
                    q[eight + along] = halves[1];
                    sum = sum + rounded;
                }
                let (d, sum) = (top / 127.0 + poison.sum(), sum.sum());
                let bits = |times: i32| f32::from_bits((times * sum as i32) as u32);
                let all = [d, d * sum, bits(-8), bits(-128)];
                let n = self.blocks.factors();
                self.factors[n * (g * rows + m)..][..n].copy_from_slice(&all[..n]);
            }
        }
    }
}

/// Input and output of a quantization: what its workers share.
struct Quantize<'a> {
    device: &'a Device,
    /// `[n_rows, cols]`
    x: &'a [f32],
    n_rows: usize,
    cols: usize,
    group: usize,
    rotated: Option<Rotated>,
    blocks: RowBlocks,
    q: DisjointSlice<'a, i8>,
    factors: DisjointSlice<'a, f32>,
}

impl Quantize<'_> {
    /// Quantizes groups `groups` of the block with rows `rows`, of which some may be absent.
    ///
    /// # Safety
    ///
    /// Every group of every block is quantized once.
    unsafe fn block(&self, rows: Range<usize>, groups: Range<usize>) {
        let (n, n_groups) = (rows.len(), self.cols / self.group);
        let part = |each: usize| {
            let first = rows.start * n_groups * each;
            first + groups.start * n * each..first + groups.end * n * each
        };
        let line = self.blocks.line(self.group);
        // SAFETY: these groups are quantized here only.
        let (q, factors) = unsafe {
            (
                self.q.part(part(line)),
                self.factors.part(part(self.blocks.factors())),
            )
        };
        self.device.isa.run(QuantizeRows {
            x: &self.x[rows.start * self.cols..rows.end.min(self.n_rows) * self.cols],
            cols: self.cols,
            groups,
            rows: n,
            group: self.group,
            rotated: self.rotated,
            blocks: self.blocks,
            q,
            factors,
        });
    }

    /// Quantizes a single run of rows, which has memory up to row `end`; workers share blocks
    /// and groups.
    fn one_run(&self, run: &Range<usize>, end: usize) {
        let (block, groups) = (self.blocks.rows, self.cols / self.group);
        let some = self
            .device
            .pool
            .even_chunk(groups, QUANTIZED_RANGE / (block * self.group));
        // What is rotated together stays together.
        let some = match self.rotated {
            Some(_) => some.next_multiple_of(Rotated::BLOCK / self.group),
            None => some,
        };
        let parts = groups.div_ceil(some);
        let n = run.len().div_ceil(block);
        self.device.pool.each(n * parts, 1, |_, range| {
            for i in range {
                let start = run.start + i / parts * block;
                let first = i % parts * some;
                let (rows, groups) = (
                    start..(start + block).min(end),
                    first..(first + some).min(groups),
                );
                // SAFETY: every part of every block is visited once.
                unsafe { self.block(rows, groups) };
            }
        });
    }

    /// Quantizes several runs of rows; workers share runs.
    fn many_runs(&self, runs: &[Range<usize>]) {
        let (block, groups) = (self.blocks.rows, self.cols / self.group);
        let chunk = WORK_RANGE.div_ceil(self.cols * block);
        self.device.pool.each(runs.len(), chunk, |_, range| {
            for run in &runs[range] {
                for start in run.clone().step_by(block) {
                    let rows = start..(start + block).min(run.end);
                    // SAFETY: every block is visited once.
                    unsafe { self.block(rows, 0..groups) };
                }
            }
        });
    }
}

impl QuantizedActivations {
    /// Quantizes each of `runs` of `x` in groups of `group`, `rotated` if that is given; for tiles
    /// there must be one run.
    pub(crate) fn new(
        device: &Device,
        x: &Tensor,
        (group, rotated): (usize, Option<Rotated>),
        blocks: RowBlocks,
        runs: &[Range<usize>],
    ) -> Self {
        let (rows, cols) = (x.rows(), x.cols());
        let groups = cols / group;
        // Rows with memory.
        let padded = match blocks.tiles {
            true => rows.next_multiple_of(blocks.rows),
            false => rows,
        };
        let line = blocks.line(group);
        let mut q = device.tensor(1, (padded * groups * line + PAGE).div_ceil(4));
        let mut factors = device.tensor(padded, blocks.factors() * groups);
        {
            let q = bytes_mut::<i8>(values_mut(&mut q));
            let start = from_page(q);
            let quantize = Quantize {
                device,
                x: values(x),
                n_rows: rows,
                cols,
                group,
                rotated,
                blocks,
                q: DisjointSlice::new(&mut q[start..]),
                factors: DisjointSlice::new(values_mut(&mut factors)),
            };
            match runs {
                [only] => quantize.one_run(only, if blocks.tiles { padded } else { only.end }),
                _ => quantize.many_runs(runs),
            }
        }
        QuantizedActivations {
            group,
            rotated,
            cols,
            blocks,
            q,
            factors,
        }
    }

    /// Whether these are quantized in groups of `group` columns, rotated in the same way, and in
    /// `blocks`.
    pub(crate) fn is_for(
        &self,
        (group, rotated): (usize, Option<Rotated>),
        blocks: RowBlocks,
    ) -> bool {
        (self.group, self.rotated, self.blocks) == (group, rotated, blocks)
    }

    /// Rows `run`: one of the runs, or any rows where each is a block.
    pub(crate) fn view(&self, run: Range<usize>) -> ActivationView<'_> {
        let padded = match self.blocks.tiles {
            true => run.len().next_multiple_of(self.blocks.rows),
            false => run.len(),
        };
        let groups = self.cols / self.group;
        let part = |n: usize| run.start * groups * n..(run.start + padded) * groups * n;
        let q = bytes(values(&self.q));
        ActivationView {
            cols: self.cols,
            rows: run.len(),
            block: self.blocks.rows,
            q: &q[from_page(q)..][part(self.blocks.line(self.group))],
            factors: &values(&self.factors)[part(self.blocks.factors())],
        }
    }
}

/// Rows of [`QuantizedActivations`] as the kernels read them.
#[derive(Clone, Copy)]
pub(crate) struct ActivationView<'a> {
    pub(crate) cols: usize,
    pub(crate) rows: usize,
    /// Rows of a block.
    pub(crate) block: usize,
    /// The blocks' bytes.
    pub(crate) q: &'a [i8],
    /// Factors of each block: `[groups, rows, RowBlocks::factors]`.
    pub(crate) factors: &'a [f32],
}
