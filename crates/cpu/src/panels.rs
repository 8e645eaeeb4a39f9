//! Plain weights in panels.
//!
//! A matrix is cut into panels of 16 rows, a row a lane: `[panel][k][16]`, so
//! that one vector load brings a column of 16 outputs and nothing is ever summed
//! across lanes. Missing rows of the last panel are zeros. Plain formats keep
//! their bytes; others are dequantized to `f32` when loaded.
//!
//! `y = fma(w, x, y)` over ascending columns, whatever the number of rows,
//! panels in flight or threads.

use crate::Cpu;
use crate::arch::{Element, Kernel, Lanes, even, load, store};
use crate::matmul::with_element;
use crate::memory::{elements, elements_mut};
use crate::packing::{self, Packing, Room, Source};
use crate::pool::Split;
use crate::tile::{Fetch, Operands, accumulate};
use half::{bf16, f16};
use quant::{Layout, Scalar, Stored};
use std::ops::Range;

/// Columns that are worked on at a time when there are more rows than a kernel
/// takes at once: a panel's share then stays in the first cache.
const DEPTH: usize = 512;

/// A matrix in panels.
pub(crate) struct Panels {
    pub(crate) scalar: Scalar,
    rows: usize,
    cols: usize,
    source: Source,
}

impl Panels {
    /// Packs `parts` as one matrix.
    pub(crate) fn pack(cpu: &Cpu, parts: &[Stored<'_>]) -> Self {
        let cols = parts[0].cols;
        let rows = parts.iter().map(|p| p.rows).sum::<usize>();
        let scalar = match parts[0].format.layout {
            Layout::Plain(scalar) if parts.iter().all(|p| p.format == parts[0].format) => scalar,
            _ => Scalar::F32,
        };
        let mut panels = Panels {
            scalar,
            rows,
            cols,
            source: Source::Mapped(Vec::new()),
        };
        panels.source = packing::source(cpu, &panels, parts);
        panels
    }

    /// Row `row`, times `factor`.
    pub(crate) fn row(&self, row: usize, factor: f32, out: &mut [f32]) {
        let data = match &self.source {
            Source::Packed(data) => data,
            Source::Mapped(kept) => return packing::row(kept, row, factor, out),
        };
        with_element!(self.scalar, W => {
            let values = data.of::<W>()[row / 16 * 16 * self.cols + row % 16..].iter().step_by(16);
            out.iter_mut().zip(values).for_each(|(out, w)| *out = w.widen() * factor);
        });
    }
}

impl Packing for Panels {
    fn rows(&self) -> usize {
        self.rows
    }

    fn panel_bytes(&self) -> usize {
        16 * self.cols * self.scalar.bytes()
    }

    fn source(&self) -> &Source {
        &self.source
    }

    fn put_row(&self, part: &Stored<'_>, row: usize, lane: usize, room: &mut Room, to: &mut [u8]) {
        let is_plain = part.format.layout == Layout::Plain(self.scalar);
        if !is_plain {
            room.values.resize(self.cols, 0.0);
            part.decode_row(row, &mut room.values);
        }
        with_element!(self.scalar, W => {
            let to = elements_mut::<W>(to)[lane..].iter_mut().step_by(16);
            if is_plain {
                let codes = part.row(row).codes;
                to.enumerate().for_each(|(c, to)| *to = W::at(codes, c));
            } else {
                to.zip(&room.values).for_each(|(to, &v)| *to = W::narrow(v));
            }
        });
    }

    fn copy_lane(&self, from: &[u8], lane: usize, to: &mut [u8], to_lane: usize) {
        with_element!(self.scalar, W => {
            let from = elements::<W>(from)[lane..].iter().step_by(16);
            let to = elements_mut::<W>(to)[to_lane..].iter_mut().step_by(16);
            to.zip(from).for_each(|(to, &from)| *to = from);
        });
    }
}

/// A number that can be read from the bytes of a stored row.
trait Packed: Element {
    fn narrow(value: f32) -> Self;
    fn at(codes: &[u8], i: usize) -> Self;
}
impl Packed for f32 {
    fn narrow(value: f32) -> f32 {
        value
    }
    fn at(codes: &[u8], i: usize) -> f32 {
        f32::from_le_bytes(codes[4 * i..4 * i + 4].try_into().expect("four bytes"))
    }
}
impl Packed for f16 {
    fn narrow(value: f32) -> f16 {
        f16::from_f32(value)
    }
    fn at(codes: &[u8], i: usize) -> f16 {
        f16::from_le_bytes([codes[2 * i], codes[2 * i + 1]])
    }
}
impl Packed for bf16 {
    fn narrow(value: f32) -> bf16 {
        bf16::from_f32(value)
    }
    fn at(codes: &[u8], i: usize) -> bf16 {
        bf16::from_le_bytes([codes[2 * i], codes[2 * i + 1]])
    }
}

/// One worker's piece of a product: some panels for all rows of `x`.
struct Piece<'a, W> {
    x: &'a [f32],
    rows: usize,
    panels: &'a Panels,
    /// Panels `range`.
    weights: &'a [W],
    range: Range<usize>,
    y: &'a Split<'a, f32>,
}

impl<W: Element> Kernel for Piece<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let most = match L::SUMS {
            24 => 8,
            6 => 4,
            _ => 1,
        };
        let block = even(self.rows, most);
        let depth = if self.rows <= block {
            self.panels.cols
        } else {
            DEPTH
        };
        let mut p = self.range.start;
        while p < self.range.end {
            let left = self.range.end - p;
            // Panels at once, so that few rows still have sums enough to hide the
            // latency of an addition (4 cycles, 2 a cycle).
            let r = match (L::SUMS, block) {
                (24, 1..=2) | (6, 1) if left >= 4 => 4,
                (24, _) | (6, 2) if left >= 2 => 2,
                _ => 1,
            };
            for first in (0..self.panels.cols.max(1)).step_by(depth.max(1)) {
                let cols = first..(first + depth).min(self.panels.cols);
                for row in (0..self.rows).step_by(block) {
                    let (at, cols) = ((row, p), cols.clone());
                    // SAFETY: as many rows from `row` and `r` panels from `p` exist.
                    unsafe {
                        match (L::SUMS, r, (self.rows - row).min(block)) {
                            (24 | 6, 4, 1) => self.block::<L, 1, 4>(at, cols),
                            (24, 4, _) => self.block::<L, 2, 4>(at, cols),
                            (24, 2, 8) => self.block::<L, 8, 2>(at, cols),
                            (24, 2, 7) => self.block::<L, 7, 2>(at, cols),
                            (24, 2, 6) => self.block::<L, 6, 2>(at, cols),
                            (24, 2, 5) => self.block::<L, 5, 2>(at, cols),
                            (24, 2, 4) => self.block::<L, 4, 2>(at, cols),
                            (24, 2, 3) => self.block::<L, 3, 2>(at, cols),
                            (24 | 6, 2, 2) => self.block::<L, 2, 2>(at, cols),
                            (24 | 6, 2, _) => self.block::<L, 1, 2>(at, cols),
                            (24, _, m @ 5..) => {
                                self.block::<L, 4, 1>((row, p), cols.clone());
                                for row in row + 4..row + m {
                                    self.block::<L, 1, 1>((row, p), cols.clone());
                                }
                            }
                            (24 | 6, _, 4) => self.block::<L, 4, 1>(at, cols),
                            (24 | 6, _, 3) => self.block::<L, 3, 1>(at, cols),
                            (24 | 6, _, 2) => self.block::<L, 2, 1>(at, cols),
                            _ => self.block::<L, 1, 1>(at, cols),
                        }
                    }
                }
            }
            p += r;
        }
    }
}

impl<W: Element> Piece<'_, W> {
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
        let k = self.panels.cols;
        let out = |m: usize, r: usize| {
            let first = (panel + r) * 16;
            let start = (row + m) * self.panels.rows + first;
            // SAFETY: parts of one block are used one at a time, and its panels
            // belong to this worker.
            unsafe {
                self.y
                    .part(start..start + (self.panels.rows - first).min(16))
            }
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
            fetch: if row == 0 { Fetch::Ahead } else { Fetch::None },
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

/// Panels `range` of `w` for all rows of `x`, as `worker`.
pub(crate) fn piece(
    cpu: &Cpu,
    worker: usize,
    w: &Panels,
    x: &[f32],
    rows: usize,
    range: Range<usize>,
    y: &Split<'_, f32>,
) {
    packing::each(cpu, w, worker, range, |range, panels| {
        with_element!(w.scalar, W => {
            let weights = elements(panels);
            cpu.isa.run(Piece::<W> { x, rows, panels: w, weights, range, y });
        });
    });
}

/// One panel against one row of `x`.
struct Chosen<'a, W> {
    x: &'a [f32],
    weights: &'a [W],
    y: &'a mut [f32],
}

impl<W: Element> Kernel for Chosen<'_, W> {
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
            fetch: Fetch::Ahead,
        };
        // SAFETY: one row of `x` and one panel of as many columns.
        unsafe { accumulate::<L, W, 1, 1>(&mut acc, operands) };
        store(acc[0][0], self.y);
    }
}

/// Up to 16 chosen rows of `w` for one row `x`, as `worker`.
pub(crate) fn chosen(cpu: &Cpu, worker: usize, w: &Panels, x: &[f32], ids: &[u32], y: &mut [f32]) {
    packing::chosen(cpu, w, worker, ids, |panel| {
        with_element!(w.scalar, W => {
            cpu.isa.run(Chosen::<W> { x, weights: elements(panel), y });
        });
    });
}
