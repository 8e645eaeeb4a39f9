//! Plain weights in panels, and products with them.
//!
//! A matrix is cut into panels of 16 rows, a row a lane: `[panel][k][16]`, so
//! that one vector load brings a column of 16 outputs and nothing is ever summed
//! across lanes. Missing rows of the last panel are zeros. Plain formats keep
//! their bytes; others are dequantized to `f32` when loaded.
//!
//! `y = fma(w, x, y)` over ascending columns, whatever the number of rows,
//! panels in flight or threads.

use super::pack::{self, PanelLayout, PanelSource, StoredRow, SuperblockLayout};
use super::pack_buffer::PackBuffer;
use crate::arch::{Element, Kernel, Lanes, Registers, load, store, with_element};
use crate::device::Device;
use crate::memory::{bytes, elements};
use crate::microkernel::{Operands, PREFETCH_DISTANCE, Prefetch, accumulate, even, microkernels};
use crate::pool::DisjointSlice;
use crate::tuning::{WeightKind, WeightReads};
use quant::{Scalar, Stored, WeightLayout};
use std::ops::Range;
use std::sync::Mutex;

/// Columns that are worked on at a time when there are more rows than a microkernel takes at
/// once: these columns of a panel then stay in the first-level cache.
const DEPTH: usize = 512;

/// A matrix of plain numbers in panels.
pub(crate) struct PlainPanels {
    pub(crate) scalar: Scalar,
    rows: usize,
    cols: usize,
    source: PanelSource,
}

impl PlainPanels {
    /// Packs `parts` as one matrix.
    pub(crate) fn pack(
        device: &Device,
        buffers: &[Mutex<PackBuffer>],
        parts: &[Stored<'_>],
    ) -> Self {
        let cols = parts[0].cols;
        let rows = parts.iter().map(|p| p.rows).sum::<usize>();
        let scalar = match parts[0].format.layout {
            WeightLayout::Plain(scalar) if parts.iter().all(|p| p.format == parts[0].format) => {
                scalar
            }
            _ => Scalar::F32,
        };
        let mut panels = PlainPanels {
            scalar,
            rows,
            cols,
            source: PanelSource::Mapped(Vec::new()),
        };
        panels.source = pack::source(device, buffers, &panels, parts);
        panels
    }

    /// Dequantizes row `row`, times `factor`.
    pub(crate) fn row(&self, row: usize, factor: f32, out: &mut [f32]) {
        let data = match &self.source {
            PanelSource::Packed(data) => data,
            PanelSource::Mapped(kept) => return pack::row(kept, row, factor, out),
        };
        with_element!(self.scalar, W => {
            let values = data.elements::<W>()[row / 16 * 16 * self.cols + row % 16..].iter().step_by(16);
            out.iter_mut().zip(values).for_each(|(out, w)| *out = w.widen() * factor);
        });
    }
}

impl PanelLayout for PlainPanels {
    fn rows(&self) -> usize {
        self.rows
    }

    fn panel_bytes(&self) -> usize {
        16 * self.cols * self.scalar.bytes()
    }

    fn source(&self) -> &PanelSource {
        &self.source
    }

    fn superblocks(&self) -> SuperblockLayout {
        SuperblockLayout {
            bytes: self.panel_bytes().max(1),
            arrays: [(self.cols, self.scalar.bytes()), (0, 0), (0, 0)],
        }
    }

    #[inline(always)]
    fn put_rows(&self, rows: &[StoredRow<'_>; 16], buffer: &mut PackBuffer, panel: &mut [u8]) {
        let is_plain = |p: &StoredRow<'_>| p.part.format.layout == WeightLayout::Plain(self.scalar);
        if rows.iter().all(is_plain) {
            let rows = rows.map(|p| p.part.row(p.row).codes);
            match self.scalar {
                Scalar::F32 => put_fours(&rows, panel, words),
                Scalar::F16 | Scalar::Bf16 => put_fours(&rows, panel, halves),
            }
        } else {
            assert_eq!(self.scalar, Scalar::F32, "what parts have not in common");
            buffer.values.resize(16 * self.cols, 0.0);
            for (values, p) in buffer.values.chunks_exact_mut(self.cols.max(1)).zip(rows) {
                p.part.decode_row(p.row, values);
            }
            let values: &[u8] = bytes(&buffer.values);
            let n = 4 * self.cols;
            let rows = std::array::from_fn(|lane| &values[lane * n..][..n]);
            put_fours(&rows, panel, words);
        }
    }
}

/// Four elements of `S` bytes.
type Four<const S: usize> = [[u8; S]; 4];

/// Four columns of four rows, the columns first.
#[inline(always)]
fn words(rows: [&Four<4>; 4]) -> [Four<4>; 4] {
    std::array::from_fn(|col| rows.map(|row| row[col]))
}

/// [`words`] of two bytes each, which compilers do not find out how to do with few
/// instructions: pairs of columns change places, then halves of two columns.
#[inline(always)]
fn halves(rows: [&Four<2>; 4]) -> [Four<2>; 4] {
    const EVEN: u64 = 0x0000_ffff_0000_ffff;
    const LOW: u64 = 0xffff_ffff;
    let [a, b, c, d] = rows.map(|row| {
        let [a, b, c, d] = row.map(|two| u64::from(u16::from_le_bytes(two)));
        a | b << 16 | c << 32 | d << 48
    });
    let two = |a: u64, b: u64| [a & EVEN | (b & EVEN) << 16, a >> 16 & EVEN | b & !EVEN];
    let four = |a: u64, b: u64| [a & LOW | b << 32, a >> 32 | b & !LOW];
    let ([even, odd], [later_even, later_odd]) = (two(a, b), two(c, d));
    let ([first, third], [second, fourth]) = (four(even, later_even), four(odd, later_odd));
    [first, second, third, fourth]
        .map(|col| std::array::from_fn(|i| ((col >> (16 * i)) as u16).to_le_bytes()))
}

/// Writes rows of elements of `S` bytes to a panel, four columns of four rows at a time.
#[inline(always)]
fn put_fours<const S: usize>(
    rows: &[&[u8]; 16],
    panel: &mut [u8],
    turn: impl Fn([&Four<S>; 4]) -> [Four<S>; 4],
) {
    let rows = rows.map(|row| row.as_chunks::<S>().0);
    let panel = panel.as_chunks_mut::<S>().0;
    let (cols, left) = panel.as_chunks_mut::<16>().0.as_chunks_mut::<4>();
    let first = 4 * cols.len();
    for (i, cols) in cols.iter_mut().enumerate() {
        for (k, rows) in rows.as_chunks::<4>().0.iter().enumerate() {
            let rows = rows.map(|row| row[4 * i..].first_chunk().expect("as many columns"));
            for (col, four) in cols.iter_mut().zip(turn(rows)) {
                col.as_chunks_mut::<4>().0[k] = four;
            }
        }
    }
    for (c, col) in left.iter_mut().enumerate() {
        *col = rows.map(|row| row[first + c]);
    }
}

/// One worker's range of a product: some panels for all rows of `x`.
pub(crate) struct PlainWork<'a, W> {
    /// `[rows, cols]`
    pub(crate) x: &'a [f32],
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// The elements of panels `range`.
    pub(crate) weights: &'a [W],
    /// Columns of the output.
    pub(crate) n_out: usize,
    pub(crate) range: Range<usize>,
    /// The output, `[rows, n_out]`.
    pub(crate) y: &'a DisjointSlice<'a, f32>,
    pub(crate) reads: WeightReads,
}

impl<W: Element> Kernel for PlainWork<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let block = even(self.rows, L::REGISTERS.most_rows());
        let cols = self.cols;
        let depth = if self.rows <= block { cols } else { DEPTH };
        let mut p = self.range.start;
        while p < self.range.end {
            let left = self.range.end - p;
            // Panels at once, so that few rows still have sums enough to hide the
            // latency of an addition (4 cycles, 2 a cycle).
            let most = self.reads.of_rows(block);
            let r = match (L::REGISTERS, block) {
                (Registers::Wide, 1) if left >= 8 && most >= 8 => 8,
                (Registers::Wide, 1..=2) | (Registers::Narrow, 1) if left >= 4 && most >= 4 => 4,
                (Registers::Wide, _) | (Registers::Narrow, 1..=2) if left >= 2 => 2,
                _ => 1,
            };
            for first in (0..cols.max(1)).step_by(depth.max(1)) {
                let cols = first..(first + depth).min(cols);
                for row in (0..self.rows).step_by(block) {
                    let m = (self.rows - row).min(block);
                    // SAFETY: rows `row .. row + m` and panels `p .. p + r` exist.
                    unsafe { self.some_rows::<L>((row, m), (p, r), cols.clone()) };
                }
            }
            p += r;
        }
    }
}

impl<W: Element> PlainWork<'_, W> {
    /// Adds columns `cols` to the `m` rows from `row` of the `r` panels from `p`.
    ///
    /// # Safety
    ///
    /// The rows and panels exist, and no other worker has these panels.
    #[inline(always)]
    unsafe fn some_rows<L: Lanes>(
        &self,
        (row, m): (usize, usize),
        (p, r): (usize, usize),
        cols: Range<usize>,
    ) {
        // More than four rows of a single panel: four of them, then one by one.
        if L::REGISTERS == Registers::Wide && r == 1 && m > 4 {
            // SAFETY: rows `row .. row + m` and panel `p` exist, as promised.
            unsafe {
                self.block::<L, 4, 1>((row, p), cols.clone());
                for row in row + 4..row + m {
                    self.block::<L, 1, 1>((row, p), cols.clone());
                }
            }
            return;
        }
        microkernels! {
            (L::REGISTERS, m, r) => |M, R| {
                // SAFETY: `M` rows and `R` panels exist, as promised.
                unsafe { self.block::<L, M, R>((row, p), cols) }
            };
            Wide:
                (1, 8) (1, 4) (2, 4)
                (1, 2) (2, 2) (3, 2) (4, 2) (5, 2) (6, 2) (7, 2) (8, 2)
                (1, 1) (2, 1) (3, 1) (4, 1);
            Narrow: (1, 4) (1, 2) (2, 2) (1, 1) (2, 1) (3, 1) (4, 1);
        }
    }

    /// Adds columns `cols` to `M` rows of `R` panels.
    ///
    /// # Safety
    ///
    /// The rows and panels exist, and no other worker has these panels.
    #[inline(always)]
    unsafe fn block<L: Lanes, const M: usize, const R: usize>(
        &self,
        (row, panel): (usize, usize),
        cols: Range<usize>,
    ) {
        let k = self.cols;
        let out = |m: usize, r: usize| {
            let first = (panel + r) * 16;
            let start = (row + m) * self.n_out + first;
            // SAFETY: parts of one block are used one at a time, and its panels
            // belong to this worker.
            unsafe { self.y.part(start..start + (self.n_out - first).min(16)) }
        };
        let mut acc = [[L::splat(0.0); R]; M];
        if cols.start > 0 {
            for (m, acc) in acc.iter_mut().enumerate() {
                for (r, lanes) in acc.iter_mut().enumerate() {
                    *lanes = load(out(m, r));
                }
            }
        }
        let operands = Operands {
            x: self.x[row * k + cols.start..].as_ptr(),
            x_stride: k,
            w: self.weights[((panel - self.range.start) * k + cols.start) * 16..].as_ptr(),
            w_step: 16,
            w_stride: k * 16,
            k: cols.len(),
            prefetch: if row == 0 {
                Prefetch::Ahead(self.reads.distance)
            } else {
                Prefetch::None
            },
        };
        // SAFETY: `M` rows and `R` panels of `k` columns lie behind the pointers.
        unsafe { accumulate::<L, W, M, R>(&mut acc, operands) };
        for (m, acc) in acc.into_iter().enumerate() {
            for (r, lanes) in acc.into_iter().enumerate() {
                store(lanes, out(m, r));
            }
        }
    }
}

/// Multiplies panels `range` of `w` with all rows of `x`. `buffer` is where a worker packs panels
/// that are not packed already.
pub(crate) fn multiply(
    device: &Device,
    buffer: &Mutex<PackBuffer>,
    w: &PlainPanels,
    x: &[f32],
    rows: usize,
    range: Range<usize>,
    y: &DisjointSlice<'_, f32>,
) {
    let reads = device.tuning.of(WeightKind::Plain);
    pack::each(device, w, buffer, range, |range, panels| {
        with_element!(w.scalar, W => {
            let weights = elements(panels);
            device.isa.run(PlainWork::<W> {
                x,
                rows,
                cols: w.cols,
                weights,
                n_out: w.rows,
                range,
                y,
                reads,
            });
        });
    });
}

/// Multiplies one panel with one row of `x`.
struct OnePanel<'a, W> {
    x: &'a [f32],
    weights: &'a [W],
    y: &'a mut [f32],
}

impl<W: Element> Kernel for OnePanel<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        assert_eq!(self.weights.len(), 16 * self.x.len(), "a panel for the row");
        let mut acc = [[L::splat(0.0)]];
        let operands = Operands {
            x: self.x.as_ptr(),
            x_stride: 0,
            w: self.weights.as_ptr(),
            w_step: 16,
            w_stride: 0,
            k: self.x.len(),
            prefetch: Prefetch::Ahead(PREFETCH_DISTANCE),
        };
        // SAFETY: one row of `x` and one panel of as many columns.
        unsafe { accumulate::<L, W, 1, 1>(&mut acc, operands) };
        store(acc[0][0], self.y);
    }
}

/// Multiplies up to 16 selected rows of `w` with one row `x`. `buffer` is where a worker packs
/// rows that do not lie in one panel.
pub(crate) fn multiply_selected(
    device: &Device,
    buffer: &Mutex<PackBuffer>,
    w: &PlainPanels,
    x: &[f32],
    ids: &[u32],
    y: &mut [f32],
) {
    pack::selected(device, w, buffer, ids, |panel| {
        with_element!(w.scalar, W => {
            device.isa.run(OnePanel::<W> { x, weights: elements(panel), y });
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::Detected;
    use crate::tests::{noise, noisy};
    use crate::{Activations, Isa};

    #[test]
    fn panels_hold_each_column_of_16_rows_for_every_format_and_instruction_set() {
        for format in noisy() {
            for cols in [1, 7, 96].map(|cols: usize| cols.next_multiple_of(format.block)) {
                let (owned, f32s) = (noise(format, cols), noise(&quant::F32, cols));
                for parts in [
                    vec![owned.view(), owned.view().slice(4..6), owned.view()],
                    vec![owned.view(), f32s.view().slice(0..13)],
                ] {
                    let alike = parts[1].format == format;
                    let scalar = match format.layout {
                        WeightLayout::Plain(scalar) if alike => scalar,
                        _ => Scalar::F32,
                    };
                    let values: Vec<f32> = parts.iter().flat_map(Stored::to_f32).collect();
                    let rows = values.len() / cols;
                    let mut want = vec![0; rows.next_multiple_of(16) * cols * scalar.bytes()];
                    for (i, &value) in values.iter().enumerate() {
                        let (row, c) = (i / cols, i % cols);
                        scalar.put(&mut want, (row / 16 * cols + c) * 16 + row % 16, value);
                    }
                    for isa in Isa::available() {
                        let isa = Detected::new(isa).expect("one that there is");
                        let device = Device::with(isa, 2, Activations::F32);
                        let buffers = [Mutex::default(), Mutex::default()];
                        let w = PlainPanels::pack(&device, &buffers, &parts);
                        let PanelSource::Packed(data) = &w.source else {
                            panic!("no file")
                        };
                        assert_eq!(w.scalar, scalar);
                        assert!(
                            data.elements::<u8>() == want,
                            "{}, {cols} columns, {isa:?}",
                            format.name
                        );
                    }
                }
            }
        }
    }
}
