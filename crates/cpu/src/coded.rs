//! Products of coded weights with 8-bit activations.
//!
//! Weights keep their codes: `w[c] = scale_g code[c] + bias_g` for the columns of
//! group `g`. The activations of a row are rounded in the same groups,
//!
//! ```text
//! d_g = max |x| / 127        q[c] = round(x[c] 127 / max |x|)
//! ```
//!
//! and a product is, for ascending groups and from `y = 0`,
//!
//! ```text
//! y = fma(scale_g Σ code[c] q[c], d_g, y)        the sum is an exact integer
//! y = fma(bias_g, d_g Σ q[c], y)
//! ```
//!
//! [`dot`] is this definition. A panel holds, group after group, the codes of 16
//! rows, four columns of each row to a vector of 64 bytes (codes of up to 4 bits
//! in pairs, eight columns), and then 16 scales and 16 biases: one stream.
//! Codes of 2 and 3 bits take the room of 4, those of 5 and 6 bits that of 8.

use crate::Cpu;
use crate::arch::{ByteKernel, Bytes, Element, Kernel, Lanes, store};
use crate::elementwise::PIECE;
use crate::matmul::with_element;
use crate::memory::{Region, bytes, bytes_mut, values, values_mut};
use crate::pool::Split;
use crate::tile::AHEAD;
use backend::Tensor;
use backend::math::Float;
use quant::{Layout, Row, Scalar, Stored};
use std::ops::Range;

/// Code `c` of a bit stream of `bits`-wide codes.
fn code(codes: &[u8], bits: usize, c: usize) -> u8 {
    let (byte, shift) = (c * bits / 8, c * bits % 8);
    let high = codes.get(byte + 1).copied().unwrap_or(0);
    let both = u16::from_le_bytes([codes[byte], high]) >> shift;
    (both & ((1 << bits) - 1)) as u8
}

/// Rounds one group of activations to `q`; returns `d` and `Σ q`.
fn round_group(x: &[f32], q: &mut [i8]) -> (f32, f32) {
    let top = x
        .iter()
        .fold(0.0, |top, &x| Float::maximum(Float::maximum(x, -x), top));
    let inverse = if top > 0.0 { 127.0 / top } else { 0.0 };
    let mut sum = 0.0;
    for (q, x) in q.iter_mut().zip(x) {
        // The bounds matter for infinities only.
        let rounded = Float::minimum((x * inverse).round_even(), 127.0);
        let rounded = Float::maximum(rounded, -127.0);
        *q = rounded as i8;
        sum += rounded;
    }
    (top / 127.0, sum)
}

/// The product of one stored row with activations rounded to 8 bits: what
/// [`crate::Activations::Int8`] computes for every output, in this order.
///
/// # Panics
///
/// If the row's layout has no codes, or `x` is not as wide as the row.
pub fn dot(layout: Layout, row: Row<'_>, x: &[f32]) -> f32 {
    let Layout::Affine { bits, group } = layout else {
        panic!("a plain row has no codes");
    };
    let (bits, group) = (usize::from(bits), usize::from(group));
    assert_eq!(
        row.codes.len() * 8,
        x.len() * bits,
        "a code for each column"
    );
    let mut y = 0.0f32;
    let mut q = vec![0; group];
    for (g, x) in x.chunks_exact(group).enumerate() {
        let (d, sum) = round_group(x, &mut q);
        let codes = (0..group).map(|c| i32::from(code(row.codes, bits, g * group + c)));
        let exact: i32 = codes.zip(&q).map(|(c, &q)| c * i32::from(q)).sum();
        let (scale, bias) = (row.scale.get(row.scales, g), row.scale.get(row.biases, g));
        y = (exact as f32 * scale).mul_add(d, y);
        y = bias.mul_add(d * sum, y);
    }
    y
}

/// Activations in 8 bits, by group.
///
/// Rows come in blocks, as many as a kernel takes at once (the last block of a run
/// may be smaller), in the order in which it reads them.
pub(crate) struct Rounded {
    pub(crate) group: usize,
    cols: usize,
    /// Rows of a block.
    block: usize,
    /// Of each block: `[cols / 8, rows, 8]` bytes.
    q: Tensor,
    /// Of each block: `[groups, rows, 2]`, `d` and `d Σ q`.
    factors: Tensor,
}

/// Rounds one block of rows.
struct Round<'a> {
    x: &'a [f32],
    rows: usize,
    group: usize,
    q: &'a mut [i8],
    factors: &'a mut [f32],
}

impl Kernel for Round<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (rows, group) = (self.rows, self.group);
        let cols = self.x.len() / rows;
        let q = self.q.as_chunks_mut::<8>().0;
        for (m, x) in self.x.chunks_exact(cols).enumerate() {
            for (g, x) in x.chunks_exact(group).enumerate() {
                let x = x.as_chunks::<16>().0;
                let mut top = L::splat(0.0);
                for x in x {
                    let x = L::load(x);
                    top = x.maximum(x.negate()).maximum(top);
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
                    let eight = g * group / 8 + 2 * i;
                    q[eight * rows + m] = halves[0];
                    q[(eight + 1) * rows + m] = halves[1];
                    sum = sum + rounded;
                }
                let d = top / 127.0;
                self.factors[2 * (g * rows + m)..][..2].copy_from_slice(&[d, d * sum.sum()]);
            }
        }
    }
}

impl Rounded {
    /// Rounds each of `runs` of `x` in blocks of `block` rows.
    pub(crate) fn new(
        cpu: &Cpu,
        x: &Tensor,
        group: usize,
        block: usize,
        runs: &[Range<usize>],
    ) -> Self {
        let (rows, cols) = (x.rows(), x.cols());
        let mut q = cpu.tensor(rows, cols.div_ceil(4));
        let mut factors = cpu.tensor(rows, 2 * (cols / group));
        {
            let x = values(x);
            let q = Split::new(bytes_mut::<i8>(values_mut(&mut q)));
            let factors = Split::new(values_mut(&mut factors));
            let round = |range: Range<usize>| {
                let part = |n: usize| range.start * n..range.end * n;
                // SAFETY: every block is visited once.
                let (q, factors) =
                    unsafe { (q.part(part(cols)), factors.part(part(2 * (cols / group)))) };
                let (x, rows) = (&x[part(cols)], range.len());
                cpu.isa.run(Round {
                    x,
                    rows,
                    group,
                    q,
                    factors,
                });
            };
            let chunk = PIECE.div_ceil(cols * block);
            match runs {
                [only] => cpu
                    .pool
                    .each(only.len().div_ceil(block), chunk, |_, blocks| {
                        for b in blocks {
                            let start = only.start + b * block;
                            round(start..(start + block).min(only.end));
                        }
                    }),
                _ => cpu.pool.each(runs.len(), chunk, |_, range| {
                    for run in &runs[range] {
                        for start in run.clone().step_by(block) {
                            round(start..(start + block).min(run.end));
                        }
                    }
                }),
            }
        }
        Rounded {
            group,
            cols,
            block,
            q,
            factors,
        }
    }

    /// Rows `run`, one of the runs or rows rounded in blocks of one.
    fn view(&self, run: Range<usize>) -> Input<'_> {
        let part = |n: usize| run.start * n..run.end * n;
        Input {
            cols: self.cols,
            rows: run.len(),
            block: self.block,
            q: &bytes(values(&self.q))[part(self.cols)],
            factors: &values(&self.factors)[part(2 * (self.cols / self.group))],
        }
    }
}

/// Rounded rows as the kernels read them: see [`Rounded`].
#[derive(Clone, Copy)]
struct Input<'a> {
    cols: usize,
    rows: usize,
    block: usize,
    q: &'a [i8],
    factors: &'a [f32],
}

/// A matrix in panels of codes.
pub(crate) struct Coded {
    rows: usize,
    cols: usize,
    pub(crate) group: usize,
    scale: Scalar,
    /// Two codes a byte.
    pairs: bool,
    data: Region,
}

impl Coded {
    /// Vectors of codes of one group.
    fn vectors(&self) -> usize {
        self.group / if self.pairs { 8 } else { 4 }
    }

    /// Bytes of one group of a panel.
    fn unit(&self) -> usize {
        self.vectors() * 64 + 2 * 16 * self.scale.bytes()
    }

    /// Bytes of one panel.
    pub(crate) fn panel(&self) -> usize {
        self.cols / self.group * self.unit()
    }

    pub(crate) fn n_panels(&self) -> usize {
        self.rows.div_ceil(16)
    }

    /// All panels.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.data.of()
    }

    /// Where a group's column `j` of `lane` lies: byte and shift.
    fn place(&self, lane: usize, j: usize) -> (usize, usize) {
        if self.pairs {
            (j / 8 * 64 + lane * 4 + j % 4, j % 8 / 4 * 4)
        } else {
            (j / 4 * 64 + lane * 4 + j % 4, 0)
        }
    }

    /// Packs parts of one affine format; `None` if they are not.
    pub(crate) fn pack(cpu: &Cpu, parts: &[Stored<'_>]) -> Option<Self> {
        let first = &parts[0];
        let Layout::Affine { bits, group } = first.format.layout else {
            return None;
        };
        let like = |p: &Stored<'_>| p.format == first.format;
        if !parts.iter().all(like) || first.cols == 0 {
            return None;
        }
        let same_scale = parts.iter().all(|p| p.scale == first.scale);
        let (bits, group) = (usize::from(bits), usize::from(group));
        let rows = parts.iter().map(|p| p.rows).sum::<usize>();
        let mut coded = Coded {
            rows,
            cols: first.cols,
            group,
            // Every type of scale fits the widest.
            scale: if same_scale { first.scale } else { Scalar::F32 },
            pairs: bits <= 4,
            data: Region::zeroed(0),
        };
        let mut data = Region::zeroed(coded.n_panels() * coded.panel());
        let place = |mut row: usize| {
            for part in parts {
                if row < part.rows {
                    return part.row(row);
                }
                row -= part.rows;
            }
            unreachable!("rows are those of the parts")
        };
        let (panel, unit) = (coded.panel(), coded.unit());
        let all = Split::new(data.of_mut::<u8>());
        cpu.pool.each(coded.n_panels(), 4, |_, range| {
            for p in range {
                // SAFETY: every panel is visited once.
                let out = unsafe { all.part(p * panel..(p + 1) * panel) };
                for lane in 0..16.min(rows - p * 16) {
                    let row = place(p * 16 + lane);
                    for (g, out) in out.chunks_exact_mut(unit).enumerate() {
                        for j in 0..group {
                            let (byte, shift) = coded.place(lane, j);
                            out[byte] |= code(row.codes, bits, g * group + j) << shift;
                        }
                        let scales = &mut out[coded.vectors() * 64..];
                        coded.scale.put(scales, lane, row.scale.get(row.scales, g));
                        coded
                            .scale
                            .put(scales, 16 + lane, row.scale.get(row.biases, g));
                    }
                }
            }
        });
        coded.data = data;
        Some(coded)
    }

    /// Row `row` dequantized, times `factor`.
    pub(crate) fn row(&self, row: usize, factor: f32, out: &mut [f32]) {
        let panel = &self.data.of::<u8>()[row / 16 * self.panel()..][..self.panel()];
        let lane = row % 16;
        let units = panel.chunks_exact(self.unit());
        for (unit, out) in units.zip(out.chunks_exact_mut(self.group)) {
            let scales = &unit[self.vectors() * 64..];
            let (scale, bias) = (
                self.scale.get(scales, lane),
                self.scale.get(scales, 16 + lane),
            );
            for (j, out) in out.iter_mut().enumerate() {
                let (byte, shift) = self.place(lane, j);
                let code = unit[byte] >> shift & if self.pairs { 15 } else { 255 };
                *out = scale.mul_add(f32::from(code), bias) * factor;
            }
        }
    }
}

/// One worker's piece of a product: some panels for all rows.
struct Piece<'a> {
    w: &'a Coded,
    data: &'a [u8],
    /// Rows of the output: `w`'s, or as many as are wanted of one panel.
    n_out: usize,
    x: Input<'a>,
    range: Range<usize>,
    y: &'a Split<'a, f32>,
}

/// Panels `range` of `w` for rows `run` of `x`.
pub(crate) fn piece(
    cpu: &Cpu,
    w: &Coded,
    x: &Rounded,
    run: Range<usize>,
    range: Range<usize>,
    y: &Split<'_, f32>,
) {
    debug_assert_eq!((w.group, w.cols), (x.group, x.cols));
    let (data, n_out, x) = (w.data.of::<u8>(), w.rows, x.view(run));
    cpu.isa.run_bytes(Piece {
        w,
        data,
        n_out,
        x,
        range,
        y,
    });
}

/// Up to 16 chosen rows of `w` for one row of `x`: they are gathered into a
/// panel of their own in `room`.
pub(crate) fn chosen(
    cpu: &Cpu,
    w: &Coded,
    x: &Rounded,
    row: usize,
    ids: &[u32],
    y: &mut [f32],
    room: &mut [u8],
) {
    let panel = w.panel();
    let all = w.data.of::<u8>();
    let whole = ids[0].is_multiple_of(16) && ids.iter().zip(ids[0]..).all(|(&id, next)| id == next);
    let data = if whole {
        &all[ids[0] as usize / 16 * panel..][..panel]
    } else {
        let (unit, codes, scale) = (w.unit(), w.vectors() * 64, w.scale.bytes());
        for (lane, &id) in ids.iter().enumerate() {
            let from = &all[id as usize / 16 * panel..][..panel];
            let other = id as usize % 16;
            for (to, from) in room.chunks_exact_mut(unit).zip(from.chunks_exact(unit)) {
                for (to, from) in to[..codes].chunks_exact_mut(64).zip(from.chunks_exact(64)) {
                    to[4 * lane..4 * lane + 4].copy_from_slice(&from[4 * other..4 * other + 4]);
                }
                for at in [codes, codes + 16 * scale] {
                    to[at + lane * scale..][..scale]
                        .copy_from_slice(&from[at + other * scale..][..scale]);
                }
            }
        }
        &room[..panel]
    };
    let n_out = y.len();
    let y = &Split::new(y);
    cpu.isa.run_bytes(Piece {
        w,
        data,
        n_out,
        x: x.view(row..row + 1),
        range: 0..1,
        y,
    });
}

impl ByteKernel for Piece<'_> {
    type Output = ();

    #[inline(always)]
    fn run<B: Bytes>(self) {
        match self.w.pairs {
            true => self.panels::<B, true>(),
            false => self.panels::<B, false>(),
        }
    }
}

impl Piece<'_> {
    #[inline(always)]
    fn panels<B: Bytes, const PAIRS: bool>(&self) {
        let sums = <B::Lanes as Lanes>::SUMS;
        let mut p = self.range.start;
        while p < self.range.end {
            // With few rows, two panels at once keep more sums under way.
            let r = match (sums, self.x.rows) {
                (24, 1..=4) if self.range.end - p >= 2 => 2,
                _ => 1,
            };
            for row in (0..self.x.rows).step_by(self.x.block) {
                match (sums, r, (self.x.rows - row).min(self.x.block)) {
                    (24, 2, 1) => self.block::<B, PAIRS, 1, 2>(row, p),
                    (24, 2, 2) => self.block::<B, PAIRS, 2, 2>(row, p),
                    (24, 2, 3) => self.block::<B, PAIRS, 3, 2>(row, p),
                    (24, 2, _) => self.block::<B, PAIRS, 4, 2>(row, p),
                    (24, _, 8) => self.block::<B, PAIRS, 8, 1>(row, p),
                    (24, _, 7) => self.block::<B, PAIRS, 7, 1>(row, p),
                    (24, _, 6) => self.block::<B, PAIRS, 6, 1>(row, p),
                    (24, _, 5) => self.block::<B, PAIRS, 5, 1>(row, p),
                    (24 | 6, _, 4) => self.block::<B, PAIRS, 4, 1>(row, p),
                    (24 | 6, _, 3) => self.block::<B, PAIRS, 3, 1>(row, p),
                    (24 | 6, _, 2) => self.block::<B, PAIRS, 2, 1>(row, p),
                    _ => self.block::<B, PAIRS, 1, 1>(row, p),
                }
            }
            p += r;
        }
    }

    /// The block of `M` rows from `row`, `R` panels from `p`.
    #[inline(always)]
    #[expect(
        clippy::needless_range_loop,
        reason = "an index names the same row or panel in several arrays"
    )]
    fn block<B: Bytes, const PAIRS: bool, const M: usize, const R: usize>(
        &self,
        row: usize,
        p: usize,
    ) {
        let (cols, group, unit, panel) = (self.x.cols, self.w.group, self.w.unit(), self.w.panel());
        let (vectors, scale, groups) = (self.w.vectors(), self.w.scale, cols / group);
        let data = &self.data[p * panel..(p + R) * panel];
        let q = self.x.q[row * cols..(row + M) * cols].as_chunks::<8>().0;
        let factors = &self.x.factors[row * 2 * groups..(row + M) * 2 * groups];
        // Vectors of eight columns.
        let wide = if PAIRS { 1 } else { 2 };
        assert_eq!(
            (vectors * 8, groups * group),
            (wide * group, cols),
            "vectors fill the row"
        );
        assert!(
            vectors.is_multiple_of(4) && unit >= vectors * 64,
            "vectors come in fours"
        );
        let mut y = [[B::Lanes::splat(0.0); R]; M];
        for g in 0..groups {
            let mut sums = [[B::zero(); R]; M];
            // SAFETY: the slices above hold `R` panels of `groups` units, each with
            // `vectors` vectors, and `M` rows of `groups * group / 8` eights.
            unsafe {
                let mut codes = data.as_ptr().add(g * unit).cast::<[u8; 64]>();
                let mut x = q.as_ptr().add(g * (group / 8) * M).cast::<[i8; 4]>();
                let stride = panel / 64;
                for _ in 0..vectors / (2 * wide) {
                    for eight in 0..2 {
                        for r in 0..R {
                            let codes = codes.add(r * stride + eight * wide);
                            // One line for each that is read, never many at once: a
                            // burst waits for free buffers, and arithmetic with it.
                            if row == 0 {
                                for line in 0..wide {
                                    B::Lanes::prefetch(
                                        codes.wrapping_add(line).cast::<u8>().wrapping_add(AHEAD),
                                    );
                                }
                            }
                            let first = B::load(&*codes);
                            let (first, second) = if PAIRS {
                                (B::low(first), B::high(first))
                            } else {
                                (first, B::load(&*codes.add(1)))
                            };
                            for m in 0..M {
                                let x = x.add(2 * (eight * M + m));
                                if PAIRS {
                                    sums[m][r] = B::add_small(sums[m][r], first, *x);
                                    sums[m][r] = B::add_small(sums[m][r], second, *x.add(1));
                                } else {
                                    sums[m][r] = B::add(sums[m][r], first, *x);
                                    sums[m][r] = B::add(sums[m][r], second, *x.add(1));
                                }
                            }
                        }
                    }
                    codes = codes.add(2 * wide);
                    x = x.add(4 * M);
                }
            }
            for r in 0..R {
                let scales = &data[r * panel + g * unit + 64 * vectors..][..32 * scale.bytes()];
                if row == 0 {
                    for line in scales.chunks(64) {
                        B::Lanes::prefetch(line.as_ptr().wrapping_add(AHEAD));
                    }
                }
                let (scale, bias) = with_element!(scale, S => {
                    let at = scales.as_ptr().cast::<[S; 16]>();
                    // SAFETY: 16 scales and 16 biases, on a line of their own.
                    unsafe { (S::load::<B::Lanes>(&*at), S::load::<B::Lanes>(&*at.add(1))) }
                });
                for m in 0..M {
                    // SAFETY: two factors of `groups` groups and `M` rows, sliced above.
                    let (d, e) = unsafe {
                        let at = factors.as_ptr().add(2 * (g * M + m));
                        (B::Lanes::splat(*at), B::Lanes::splat(*at.add(1)))
                    };
                    y[m][r] = (B::float(sums[m][r]) * scale).mul_add(d, y[m][r]);
                    y[m][r] = bias.mul_add(e, y[m][r]);
                }
            }
        }
        for (m, y) in y.into_iter().enumerate() {
            for (r, y) in y.into_iter().enumerate() {
                let first = (p + r) * 16;
                let at = (row + m) * self.n_out + first;
                // SAFETY: these panels' outputs are this piece's.
                store(y, unsafe {
                    self.y.part(at..at + (self.n_out - first).min(16))
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_keeps_the_largest_value_and_its_sign() {
        let mut q = [0; 4];
        assert_eq!(round_group(&[0.0; 4], &mut q), (0.0, 0.0));
        let (d, sum) = round_group(&[0.5, -2.0, 1.0, 0.0], &mut q);
        assert_eq!((q, d, sum), ([32, -127, 64, 0], 2.0 / 127.0, -31.0));
    }
}
