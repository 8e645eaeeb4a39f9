//! Products with weights in panels.
//!
//! A matrix is cut into panels of 16 rows, a row a lane: `[panel][k][16]`, so
//! that one vector load brings a column of 16 outputs and nothing is ever summed
//! across lanes. Missing rows of the last panel are zeros. Plain formats keep
//! their bytes; the others are dequantized to `f32` when loaded.
//!
//! `y = fma(w, x, y)` over ascending columns, whatever the number of rows,
//! panels in flight or threads.

use crate::Cpu;
use crate::arch::{Element, Kernel, Lanes, load, store};
use crate::memory::{Region, values, values_mut};
use crate::pool::Split;
use crate::tile::{Operands, accumulate};
use backend::{Matrix, Tensor};
use half::{bf16, f16};
use quant::{Layout, Scalar, Stored};
use std::ops::Range;

/// Bytes of weights that one worker claims at a time.
const PIECE: usize = 128 << 10;

/// Multiply-adds below which handing out work costs more than it saves.
const ALONE: usize = 96 << 10;

/// Rows of `x` whose sums fit the registers; more are done in blocks over
/// [`DEPTH`] columns, which keep a panel's share in the first cache.
const ROWS: usize = 8;

/// Columns of a block when there are more than [`ROWS`] rows.
const DEPTH: usize = 512;

/// A matrix in panels.
pub(crate) struct Panels {
    pub(crate) scalar: Scalar,
    rows: usize,
    cols: usize,
    data: Region,
}

/// Runs `$body` with `$t` as the Rust type of `$scalar`.
macro_rules! with_element {
    ($scalar:expr, $t:ident => $body:expr) => {
        match $scalar {
            quant::Scalar::F32 => {
                type $t = f32;
                $body
            }
            quant::Scalar::F16 => {
                type $t = half::f16;
                $body
            }
            quant::Scalar::Bf16 => {
                type $t = half::bf16;
                $body
            }
        }
    };
}
pub(crate) use with_element;

impl Panels {
    /// Elements of one panel.
    fn panel(&self) -> usize {
        self.cols * 16
    }

    fn n_panels(&self) -> usize {
        self.rows.div_ceil(16)
    }

    /// Row `row`, in place: its elements are 16 apart.
    #[inline(always)]
    fn row<W: Element>(&self, row: usize) -> impl Iterator<Item = &W> {
        self.data.of::<W>()[row / 16 * self.panel()..][..self.panel()][row % 16..].iter().step_by(16)
    }
}

/// Packs `parts` as one matrix.
pub(crate) fn matrix(cpu: &Cpu, parts: &[Stored<'_>]) -> Matrix {
    let cols = parts[0].cols;
    assert!(parts.iter().all(|p| p.cols == cols), "parts of one width");
    let rows = parts.iter().map(|p| p.rows).sum::<usize>();
    let scalar = match parts[0].format.layout {
        Layout::Plain(scalar) if parts.iter().all(|p| p.format == parts[0].format) => scalar,
        _ => Scalar::F32,
    };
    let data = Region::zeroed(rows.div_ceil(16) * 16 * cols * scalar.bytes());
    let mut panels = Panels { scalar, rows, cols, data };
    with_element!(scalar, W => pack::<W>(cpu, parts, &mut panels));
    let bytes = panels.data.len();
    Matrix::new(rows, cols, parts[0].format.name, bytes, Box::new(panels))
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

fn pack<W: Packed>(cpu: &Cpu, parts: &[Stored<'_>], panels: &mut Panels) {
    let (rows, cols, panel) = (panels.rows, panels.cols, panels.panel());
    let n_panels = panels.n_panels();
    // The part and row within it of each row of the whole.
    let place = |mut row: usize| {
        for part in parts {
            if row < part.rows {
                return (part, row);
            }
            row -= part.rows;
        }
        unreachable!("rows are those of the parts")
    };
    let data = Split::new(panels.data.of_mut::<W>());
    cpu.pool.each(n_panels, 4, |_, range| {
        let mut values = vec![0.0; cols];
        for p in range {
            // SAFETY: every panel is visited once.
            let out = unsafe { data.part(p * panel..(p + 1) * panel) };
            for lane in 0..16.min(rows - p * 16) {
                let (part, row) = place(p * 16 + lane);
                let to = out[lane..].iter_mut().step_by(16);
                if part.format.layout == Layout::Plain(panels.scalar) {
                    let codes = part.row(row).codes;
                    to.enumerate().for_each(|(c, to)| *to = W::at(codes, c));
                } else {
                    part.decode_row(row, &mut values);
                    to.zip(&values).for_each(|(to, &v)| *to = W::narrow(v));
                }
            }
        }
    });
}

/// One worker's piece of a product: some panels for all rows of `x`.
struct Piece<'a, W> {
    x: &'a [f32],
    rows: usize,
    panels: &'a Panels,
    weights: &'a [W],
    range: Range<usize>,
    y: &'a Split<'a, f32>,
}

impl<W: Element> Kernel for Piece<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let depth = if self.rows <= ROWS { self.panels.cols } else { DEPTH };
        let mut p = self.range.start;
        while p < self.range.end {
            let left = self.range.end - p;
            // Panels at once, so that few rows still have sums enough to hide the
            // latency of an addition (4 cycles, 2 a cycle).
            let r = match (L::SUMS, self.rows) {
                (24, 1..=2) | (6, 1) if left >= 4 => 4,
                (24, _) | (6, 2) if left >= 2 => 2,
                _ => 1,
            };
            for first in (0..self.panels.cols.max(1)).step_by(depth.max(1)) {
                let cols = first..(first + depth).min(self.panels.cols);
                let mut row = 0;
                while row < self.rows {
                    let m = self.rows - row;
                    let (at, cols) = ((row, p), cols.clone());
                    // SAFETY: `m` rows from `row` and `r` panels from `p` exist.
                    row += unsafe {
                        match (L::SUMS, r, m) {
                            (24 | 6, 4, 1) => self.block::<L, 1, 4>(at, cols),
                            (24, 4, _) => self.block::<L, 2, 4>(at, cols),
                            (24, 2, 8..) => self.block::<L, 8, 2>(at, cols),
                            (24, 2, 7) => self.block::<L, 7, 2>(at, cols),
                            (24, 2, 6) => self.block::<L, 6, 2>(at, cols),
                            (24, 2, 5) => self.block::<L, 5, 2>(at, cols),
                            (24, 2, 4) => self.block::<L, 4, 2>(at, cols),
                            (24, 2, 3) => self.block::<L, 3, 2>(at, cols),
                            (24 | 6, 2, 2) => self.block::<L, 2, 2>(at, cols),
                            (24, 2, _) => self.block::<L, 1, 2>(at, cols),
                            (24, _, 8..) => self.block::<L, 8, 1>(at, cols),
                            (24 | 6, _, 4..) => self.block::<L, 4, 1>(at, cols),
                            (24 | 6, _, 2..) => self.block::<L, 2, 1>(at, cols),
                            _ => self.block::<L, 1, 1>(at, cols),
                        }
                    };
                }
            }
            p += r;
        }
    }
}

impl<W: Element> Piece<'_, W> {
    /// Adds columns `cols` to `M` rows of `R` panels; returns `M`.
    ///
    /// # Safety
    ///
    /// The rows and panels exist, and no other worker has these panels.
    #[inline(always)]
    unsafe fn block<L: Lanes, const M: usize, const R: usize>(
        &self,
        (row, panel): (usize, usize),
        cols: Range<usize>,
    ) -> usize {
        let k = self.panels.cols;
        let out = |m: usize, r: usize| {
            let first = (panel + r) * 16;
            let start = (row + m) * self.panels.rows + first;
            // SAFETY: parts of one block are used one at a time, and its panels
            // belong to this worker.
            unsafe { self.y.part(start..start + (self.panels.rows - first).min(16)) }
        };
        let mut acc = [[L::splat(0.0); R]; M];
        if cols.start > 0 {
            for m in 0..M {
                for r in 0..R {
                    acc[m][r] = load(out(m, r));
                }
            }
        }
        let operands = Operands {
            x: self.x[row * k + cols.start..].as_ptr(),
            x_stride: k,
            w: self.weights[(panel * k + cols.start) * 16..].as_ptr(),
            w_step: 16,
            w_stride: k * 16,
            k: cols.len(),
        };
        // SAFETY: `M` rows and `R` panels of `k` columns lie behind the pointers.
        unsafe {
            if row == 0 {
                accumulate::<L, W, M, R, true>(&mut acc, operands);
            } else {
                accumulate::<L, W, M, R, false>(&mut acc, operands);
            }
        }
        for m in 0..M {
            for r in 0..R {
                store(acc[m][r], out(m, r));
            }
        }
        M
    }
}

/// `y = x wᵀ` for each `w`, as one job.
pub(crate) fn matmul_into(cpu: &Cpu, x: &Tensor, w: &[&Matrix], y: &mut [Tensor]) {
    /// Matrices of one job; more are done in several.
    const MANY: usize = 8;
    assert_eq!(w.len(), y.len(), "an output for each matrix");
    let rows = x.rows();
    for (w, y) in w.chunks(MANY).zip(y.chunks_mut(MANY)) {
        let mut work = 0;
        let mut pieces = 0;
        let mut y = y.iter_mut();
        let jobs: [Option<(&Panels, usize, usize, Split<'_, f32>)>; MANY] = std::array::from_fn(|i| {
            let w = w.get(i)?;
            let y = y.next().expect("as many as matrices");
            assert_eq!((w.cols, w.rows, rows), (x.cols(), y.cols(), y.rows()), "shapes of a product");
            let panels = w.storage::<Panels>();
            work += rows * w.rows * w.cols;
            let bytes = (panels.panel() * panels.scalar.bytes()).max(1);
            // A few pieces for each worker at least, in fours, to feed the kernel.
            let fair = panels.n_panels().div_ceil(4 * cpu.pool.n_workers());
            let chunk = (PIECE / bytes).clamp(1, fair.max(1)).next_multiple_of(4);
            pieces += panels.n_panels().div_ceil(chunk);
            Some((panels, chunk, pieces, Split::new(values_mut(y))))
        });
        let x = values(x);
        let piece = |i: usize| {
            let job = jobs.iter().flatten().position(|(_, _, end, _)| i < *end).expect("a piece of some matrix");
            let (panels, chunk, end, y) = jobs[job].as_ref().expect("found above");
            let n_pieces = panels.n_panels().div_ceil(*chunk);
            let first = (i + n_pieces - end) * chunk;
            let range = first..(first + chunk).min(panels.n_panels());
            with_element!(panels.scalar, W => {
                cpu.isa.run(Piece::<W> { x, rows, panels, weights: panels.data.of(), range, y });
            });
        };
        if work < ALONE {
            (0..pieces).for_each(piece);
        } else {
            cpu.pool.each(pieces, 1, |_, range| range.for_each(piece));
        }
    }
}

/// 16 chosen rows of the weights against one row of `x`.
struct Chosen<'a, W> {
    x: &'a [f32],
    panels: &'a Panels,
    weights: &'a [W],
    ids: &'a [u32],
    y: &'a mut [f32],
}

impl<W: Element> Kernel for Chosen<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let panel = self.panels.panel();
        for (ids, y) in self.ids.chunks(16).zip(self.y.chunks_mut(16)) {
            let mut acc = [[L::splat(0.0)]];
            let whole = ids.len() == 16
                && ids[0].is_multiple_of(16)
                && ids.iter().zip(ids[0]..).all(|(&id, next)| id == next);
            if whole {
                let w = &self.weights[ids[0] as usize / 16 * panel..][..panel];
                let operands = Operands {
                    x: self.x.as_ptr(),
                    x_stride: 0,
                    w: w.as_ptr(),
                    w_step: 16,
                    w_stride: 0,
                    k: self.panels.cols,
                };
                // SAFETY: one row of `x` and one panel of as many columns.
                unsafe { accumulate::<L, W, 1, 1, true>(&mut acc, operands) };
            } else {
                let mut rows = [&self.weights[..0]; 16];
                for (row, &id) in rows.iter_mut().zip(ids) {
                    let id = id as usize;
                    assert!(id < self.panels.rows, "row {id} of {}", self.panels.rows);
                    *row = &self.weights[id / 16 * panel + id % 16..(id / 16 + 1) * panel];
                }
                for (k, &x) in self.x.iter().enumerate() {
                    let mut lanes = [0.0; 16];
                    for (lane, row) in lanes.iter_mut().zip(&rows[..ids.len()]) {
                        *lane = row[16 * k].widen();
                    }
                    acc[0][0] = L::load(&lanes).mul_add(L::splat(x), acc[0][0]);
                }
            }
            store(acc[0][0], y);
        }
    }
}

/// `y[r][i] = x[r] · w[ids[r][i]]`.
pub(crate) fn matmul_rows(cpu: &Cpu, x: &Tensor, w: &Matrix, ids: &[Vec<u32>]) -> Tensor {
    assert_eq!((w.cols, x.rows()), (x.cols(), ids.len()), "shapes of a product");
    let n_ids = ids.first().map_or(0, Vec::len);
    assert!(ids.iter().all(|i| i.len() == n_ids), "as many for each row");
    let panels = w.storage::<Panels>();
    let mut y = cpu.tensor(x.rows(), n_ids);
    let groups = n_ids.div_ceil(16);
    let (x, out) = (values(x), Split::new(values_mut(&mut y)));
    let chunk = (ALONE / 4 / (16 * w.cols).max(1)).max(1);
    cpu.pool.each(ids.len() * groups, chunk, |_, range| {
        for i in range {
            let (row, at) = (i / groups, i % groups * 16);
            let ids = &ids[row][at..(at + 16).min(n_ids)];
            // SAFETY: every group of outputs is visited once.
            let y = unsafe { out.part(row * n_ids + at..row * n_ids + at + ids.len()) };
            let x = &x[row * w.cols..][..w.cols];
            with_element!(panels.scalar, W => {
                cpu.isa.run(Chosen::<W> { x, panels, weights: panels.data.of(), ids, y });
            });
        }
    });
    y
}

/// Rows `tokens` of `table`, times `scale`.
pub(crate) fn embed(cpu: &Cpu, table: &Matrix, tokens: &[u32], scale: f32) -> Tensor {
    let panels = table.storage::<Panels>();
    let cols = table.cols;
    let mut y = cpu.tensor(tokens.len(), cols);
    let out = Split::new(values_mut(&mut y));
    // A row is read 16 times as wide as it is, so few are worth sharing.
    let chunk = (ALONE / 16 / cols.max(1)).max(1);
    cpu.pool.each(tokens.len(), chunk, |_, range| {
        for i in range {
            let token = tokens[i] as usize;
            assert!(token < table.rows, "row {token} of {}", table.rows);
            // SAFETY: every row is visited once.
            let y = unsafe { out.part(i * cols..(i + 1) * cols) };
            with_element!(panels.scalar, W => {
                y.iter_mut().zip(panels.row::<W>(token)).for_each(|(y, w)| *y = w.widen() * scale);
            });
        }
    });
    y
}
