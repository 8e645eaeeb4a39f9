//! Activations rounded to 8 bits, in the order in which kernels read them.

use crate::arch::{Detected, Kernel, Lanes, TILE_DEPTH};
use crate::device::Cpu;
use crate::elementwise::WORK_RANGE;
use crate::memory::{bytes, bytes_mut, values, values_mut};
use crate::microkernel::even;
use crate::pool::DisjointSlice;
use backend::Tensor;
use std::ops::Range;

/// Rows of rounded activations in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowBlocks {
    /// Rows of a block, in tiles at most [`TILE_ROWS`]; the last may have fewer.
    pub(crate) rows: usize,
    /// In tiles, each row's columns of a group together, in a line of [`TILE_DEPTH`] where
    /// smaller groups have places of their own; else all rows' eights.
    pub(crate) tiles: bool,
}

impl RowBlocks {
    /// Each row on its own, for vectors.
    pub(crate) const SINGLE: RowBlocks = RowBlocks {
        rows: 1,
        tiles: false,
    };

    /// RowBlocks of `rows` rows, for vectors.
    pub(crate) fn vectors(isa: Detected, rows: usize) -> Self {
        RowBlocks {
            rows: even(rows, isa.most_byte_rows()),
            tiles: false,
        }
    }

    /// Bytes that a row's columns of a group of `group` take.
    pub(crate) fn line(self, group: usize) -> usize {
        if self.tiles {
            group.max(TILE_DEPTH)
        } else {
            group
        }
    }
}

/// Activations in 8 bits, by group.
///
/// Rows come in blocks, as many as a kernel takes at once, in the order in which it
/// reads them. The last block of a run may have fewer; in tiles there is one run,
/// and its last block keeps the room of all rows, whose factors are zeros.
pub(crate) struct QuantizedActivations {
    pub(crate) group: usize,
    pub(crate) cols: usize,
    pub(crate) blocks: RowBlocks,
    /// From the first page boundary on, of each block: `[cols / 8, rows, 8]` bytes,
    /// in tiles `[groups, rows, line]`, of [`RowBlocks::line`].
    q: Tensor,
    /// Of each block: `[groups, rows, GROUP_FACTORS]`.
    factors: Tensor,
}

/// What is known of a group of a row: `d`, `d Σ q`, and the integers `−8 Σ q` and
/// `−128 Σ q`.
pub(crate) const GROUP_FACTORS: usize = 4;

/// Where tiles of activations start. Sums leave their tiles for the same places
/// of a page: a load waits for every store on its way to the same place of another.
const PAGE: usize = 4096;

/// The bytes of `storage` from the first page boundary on.
fn from_page(storage: &[i8]) -> usize {
    storage.as_ptr().align_offset(PAGE)
}

/// Values that one worker rounds at a time.
const ROUNDED: usize = 4 << 10;

/// Rounds some columns of one block of rows.
struct QuantizeRows<'a> {
    /// The rows from their first.
    x: &'a [f32],
    cols: usize,
    /// Groups of the columns.
    groups: Range<usize>,
    /// Rows that there is room for.
    rows: usize,
    group: usize,
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
        // From one eight of a row to its next, and to the next row's.
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
            for (g, x) in x.chunks_exact(group).enumerate() {
                let x = x.as_chunks::<16>().0;
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
                self.factors[GROUP_FACTORS * (g * rows + m)..][..GROUP_FACTORS].copy_from_slice(&[
                    d,
                    d * sum,
                    bits(-8),
                    bits(-128),
                ]);
            }
        }
    }
}

impl QuantizedActivations {
    /// Rounds each of `runs` of `x`; in tiles, the only one.
    pub(crate) fn new(
        cpu: &Cpu,
        x: &Tensor,
        group: usize,
        blocks: RowBlocks,
        runs: &[Range<usize>],
    ) -> Self {
        let (rows, cols, block) = (x.rows(), x.cols(), blocks.rows);
        let groups = cols / group;
        let room = match blocks.tiles {
            true => rows.next_multiple_of(block),
            false => rows,
        };
        let line = blocks.line(group);
        let mut q = cpu.tensor(1, (room * groups * line + PAGE).div_ceil(4));
        let mut factors = cpu.tensor(room, GROUP_FACTORS * groups);
        {
            let x = values(x);
            let q = bytes_mut::<i8>(values_mut(&mut q));
            let start = from_page(q);
            let q = DisjointSlice::new(&mut q[start..]);
            let factors = DisjointSlice::new(values_mut(&mut factors));
            // Some groups of one block.
            let round = |range: Range<usize>, part: Range<usize>| {
                let n = range.len();
                let of = |each: usize| {
                    let first = range.start * groups * each;
                    first + part.start * n * each..first + part.end * n * each
                };
                // SAFETY: every part of every block is visited once.
                let (q, factors) = unsafe { (q.part(of(line)), factors.part(of(GROUP_FACTORS))) };
                cpu.isa.run(QuantizeRows {
                    x: &x[range.start * cols..range.end.min(rows) * cols],
                    cols,
                    groups: part,
                    rows: n,
                    group,
                    blocks,
                    q,
                    factors,
                });
            };
            match runs {
                [only] => {
                    let part = cpu.pool.even(groups, ROUNDED / (block * group));
                    let parts = groups.div_ceil(part);
                    let n = only.len().div_ceil(block);
                    cpu.pool.each(n * parts, 1, |_, range| {
                        for i in range {
                            let start = only.start + i / parts * block;
                            let end = if blocks.tiles { room } else { only.end };
                            let first = i % parts * part;
                            round(
                                start..(start + block).min(end),
                                first..(first + part).min(groups),
                            );
                        }
                    });
                }
                _ => {
                    let chunk = WORK_RANGE.div_ceil(cols * block);
                    cpu.pool.each(runs.len(), chunk, |_, range| {
                        for run in &runs[range] {
                            for start in run.clone().step_by(block) {
                                round(start..(start + block).min(run.end), 0..groups);
                            }
                        }
                    });
                }
            }
        }
        QuantizedActivations {
            group,
            cols,
            blocks,
            q,
            factors,
        }
    }

    /// Whether these are rounded in groups of `group` columns and in `blocks`.
    pub(crate) fn is_for(&self, group: usize, blocks: RowBlocks) -> bool {
        (self.group, self.blocks) == (group, blocks)
    }

    /// Rows `run`, one of the runs or rows rounded in blocks of one.
    pub(crate) fn view(&self, run: Range<usize>) -> ActivationView<'_> {
        let room = match self.blocks.tiles {
            true => run.len().next_multiple_of(self.blocks.rows),
            false => run.len(),
        };
        let groups = self.cols / self.group;
        let part = |n: usize| run.start * groups * n..(run.start + room) * groups * n;
        let q = bytes(values(&self.q));
        ActivationView {
            cols: self.cols,
            rows: run.len(),
            block: self.blocks.rows,
            q: &q[from_page(q)..][part(self.blocks.line(self.group))],
            factors: &values(&self.factors)[part(GROUP_FACTORS)],
        }
    }
}

/// QuantizedActivations rows as the kernels read them: see [`QuantizedActivations`].
#[derive(Clone, Copy)]
pub(crate) struct ActivationView<'a> {
    pub(crate) cols: usize,
    pub(crate) rows: usize,
    pub(crate) block: usize,
    pub(crate) q: &'a [i8],
    pub(crate) factors: &'a [f32],
}
