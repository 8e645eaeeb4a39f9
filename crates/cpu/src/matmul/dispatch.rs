//! Products: from the op to the kernel, and from the whole matrix to a worker's part of it.
//!
//! Plain weights lie in `panels`, those with codes in `coded` unless the
//! activations are to stay in `f32`. Both come in panels of 16 rows; a product
//! is cut into pieces of some panels each, and several matrices of one input are
//! one job.

use super::activations::{QuantizedActivations, RowBlocks};
use super::quantized::{QuantizedPanels, QuantizedWork};
use super::weights::PackedWeights;
use super::{amx, pack, plain};
use crate::arch::Detected;
use crate::device::Cpu;
use crate::memory::{values, values_mut};
use crate::pool::DisjointSlice;
use backend::{Matrix, Tensor};
use std::ops::Range;

/// Bytes of weights that one worker claims at a time.
pub(crate) const WORK_RANGE_BYTES: usize = 128 << 10;

/// Multiply-adds below which handing out work costs more than it saves.
const MIN_PARALLEL: usize = 96 << 10;

/// One input, rounded at most once for each size of group and kind of blocks.
struct QuantizedInputs<'a, F> {
    x: &'a Tensor,
    blocks: F,
    rounded: [Option<QuantizedActivations>; MAX_MATRICES],
}

/// Matrices of one job; more are done in several.
const MAX_MATRICES: usize = 8;

impl<'a, F: Fn(&QuantizedPanels) -> RowBlocks> QuantizedInputs<'a, F> {
    /// Rounds each of `runs`, in the blocks that the weights want.
    fn new<'w>(
        cpu: &Cpu,
        x: &'a Tensor,
        blocks: F,
        runs: &[Range<usize>],
        weights: impl Iterator<Item = &'w PackedWeights>,
    ) -> Self {
        let mut rounded = [const { None::<QuantizedActivations> }; MAX_MATRICES];
        let mut n = 0;
        for weights in weights {
            let PackedWeights::QuantizedPanels(w) = weights else {
                continue;
            };
            let wanted = blocks(w);
            if !rounded[..n]
                .iter()
                .flatten()
                .any(|r| r.is_for(w.group, wanted))
            {
                rounded[n] = Some(QuantizedActivations::new(cpu, x, w.group, wanted, runs));
                n += 1;
            }
        }
        QuantizedInputs { x, blocks, rounded }
    }

    fn rounded(&self, w: &QuantizedPanels) -> &QuantizedActivations {
        let blocks = (self.blocks)(w);
        let mut all = self.rounded.iter().flatten();
        all.find(|r| r.is_for(w.group, blocks))
            .expect("rounded for every matrix")
    }
}

/// One matrix of a job, and the rows of the input that it is for.
struct Product<'a> {
    weights: &'a PackedWeights,
    rows: Range<usize>,
    n_panels: usize,
    /// PlainPanels of a piece.
    chunk: usize,
    /// Pieces of the matrices before this one.
    first: usize,
    y: DisjointSlice<'a, f32>,
}

impl<'a> Product<'a> {
    /// `y = x wᵀ` for `rows` of `x`; its pieces follow the `first`.
    fn new(
        cpu: &Cpu,
        w: &'a Matrix,
        rows: Range<usize>,
        first: usize,
        y: DisjointSlice<'a, f32>,
    ) -> Self {
        let weights = w.storage::<PackedWeights>();
        let packing = weights.packing();
        let (n_panels, bytes) = (packing.n_panels(), packing.panel_bytes());
        // A few pieces for each worker at least, in fours, to feed the kernel.
        let fair = n_panels.div_ceil(4 * cpu.pool.n_workers()).max(1);
        let chunk = (WORK_RANGE_BYTES / bytes.max(1))
            .clamp(1, fair)
            .next_multiple_of(4);
        Product {
            weights,
            rows,
            n_panels,
            chunk,
            first,
            y,
        }
    }

    fn n_pieces(&self) -> usize {
        self.n_panels.div_ceil(self.chunk)
    }

    fn run<F: Fn(&QuantizedPanels) -> RowBlocks>(
        &self,
        cpu: &Cpu,
        worker: usize,
        inputs: &QuantizedInputs<'_, F>,
        piece: usize,
    ) {
        let start = (piece - self.first) * self.chunk;
        let range = start..(start + self.chunk).min(self.n_panels);
        match self.weights {
            PackedWeights::Plain(w) => {
                let cols = inputs.x.cols();
                let x = &values(inputs.x)[self.rows.start * cols..self.rows.end * cols];
                plain::piece(cpu, worker, w, x, self.rows.len(), range, &self.y);
            }
            PackedWeights::QuantizedPanels(w) => {
                let x = inputs.rounded(w);
                quantized_piece(cpu, worker, w, x, self.rows.clone(), range, &self.y);
            }
        }
    }
}

/// `y = x wᵀ` for each `w`, as one job.
pub(crate) fn matmul_into(cpu: &Cpu, x: &Tensor, w: &[&Matrix], y: &mut [Tensor]) {
    assert_eq!(w.len(), y.len(), "an output for each matrix");
    let rows = x.rows();
    for (w, y) in w.chunks(MAX_MATRICES).zip(y.chunks_mut(MAX_MATRICES)) {
        let inputs = QuantizedInputs::new(
            cpu,
            x,
            |w: &QuantizedPanels| row_blocks(w, cpu.isa, rows),
            std::slice::from_ref(&(0..rows)),
            w.iter().map(|w| w.storage()),
        );
        let (mut work, mut first) = (0, 0);
        let mut y = y.iter_mut();
        let jobs: [Option<Product<'_>>; MAX_MATRICES] = std::array::from_fn(|i| {
            let w = w.get(i)?;
            let y = y.next().expect("as many as matrices");
            assert_eq!(
                (w.cols, w.rows, rows),
                (x.cols(), y.cols(), y.rows()),
                "shapes of a product"
            );
            work += rows * w.rows * w.cols;
            let job = Product::new(cpu, w, 0..rows, first, DisjointSlice::new(values_mut(y)));
            first += job.n_pieces();
            Some(job)
        });
        let piece = |worker: usize, i: usize| {
            let mut jobs = jobs.iter().flatten();
            let job = jobs
                .find(|job| i < job.first + job.n_pieces())
                .expect("a piece of some matrix");
            job.run(cpu, worker, &inputs, i);
        };
        if work < MIN_PARALLEL {
            (0..first).for_each(|i| piece(0, i));
        } else {
            let each = |worker, range: Range<usize>| range.for_each(|i| piece(worker, i));
            cpu.pool.each(first, 1, each);
        }
    }
}

/// `y[r] = x[r] wᵀ` with the matrix `w(i)` for run `i` of rows, as one job. The runs
/// follow each other and cover `x`; the matrices are of one shape.
pub(crate) fn matmul_runs<'a>(
    cpu: &Cpu,
    x: &Tensor,
    runs: &[Range<usize>],
    w: impl Fn(usize) -> &'a Matrix + Sync,
) -> Tensor {
    let all = || (0..runs.len()).map(&w);
    let (rows, cols) = all().next().map_or((0, 0), |w| (w.rows, w.cols));
    let alike = |w: &Matrix| (w.rows, w.cols) == (rows, x.cols());
    assert!(all().all(alike), "shapes of a product");
    let longest = runs.iter().map(Range::len).max().unwrap_or(0);
    let blocks = |_: &QuantizedPanels| RowBlocks::vectors(cpu.isa, longest);
    let inputs = QuantizedInputs::new(cpu, x, blocks, runs, all().map(|w| w.storage()));
    let mut y = cpu.tensor(x.rows(), rows);
    {
        let out = DisjointSlice::new(values_mut(&mut y));
        let job = |i: usize| {
            let run = runs[i].clone();
            let y = out.after(run.start * rows);
            Product::new(cpu, w(i), run, 0, y)
        };
        // As many pieces for each, of which formats with smaller panels need fewer.
        let most = (0..runs.len()).map(|i| job(i).n_pieces()).max();
        let most = most.unwrap_or(0);
        let piece = |worker: usize, i: usize| {
            let job = job(i / most);
            if i % most < job.n_pieces() {
                job.run(cpu, worker, &inputs, i % most);
            }
        };
        let n = runs.len() * most;
        if x.rows() * rows * cols < MIN_PARALLEL {
            (0..n).for_each(|i| piece(0, i));
        } else {
            let each = |worker, range: Range<usize>| range.for_each(|i| piece(worker, i));
            cpu.pool.each(n, 1, each);
        }
    }
    y
}

/// `y[r][i] = x[r] · w[ids[r][i]]`.
pub(crate) fn matmul_rows(cpu: &Cpu, x: &Tensor, w: &Matrix, ids: &[Vec<u32>]) -> Tensor {
    assert_eq!(
        (w.cols, x.rows()),
        (x.cols(), ids.len()),
        "shapes of a product"
    );
    let n_ids = ids.first().map_or(0, Vec::len);
    assert!(ids.iter().all(|i| i.len() == n_ids), "as many for each row");
    let known = |&id: &u32| (id as usize) < w.rows;
    assert!(ids.iter().flatten().all(known), "rows of the matrix");
    let weights = w.storage::<PackedWeights>();
    let inputs = QuantizedInputs::new(
        cpu,
        x,
        |_: &QuantizedPanels| RowBlocks::SINGLE,
        std::slice::from_ref(&(0..x.rows())),
        std::iter::once(weights),
    );
    let mut y = cpu.tensor(x.rows(), n_ids);
    let groups = n_ids.div_ceil(16);
    let out = DisjointSlice::new(values_mut(&mut y));
    let chunk = (MIN_PARALLEL / 4 / (16 * w.cols).max(1)).max(1);
    cpu.pool.each(ids.len() * groups, chunk, |worker, range| {
        for i in range {
            let (row, at) = (i / groups, i % groups * 16);
            let ids = &ids[row][at..(at + 16).min(n_ids)];
            // SAFETY: every group of outputs is visited once.
            let y = unsafe { out.part(row * n_ids + at..row * n_ids + at + ids.len()) };
            match weights {
                PackedWeights::Plain(w) => {
                    let x = &values(inputs.x)[row * x.cols()..][..x.cols()];
                    plain::chosen(cpu, worker, w, x, ids, y);
                }
                PackedWeights::QuantizedPanels(w) => {
                    quantized_chosen(cpu, worker, w, inputs.rounded(w), row, ids, y);
                }
            }
        }
    });
    y
}

/// Rows `tokens` of `table`, times `scale`.
pub(crate) fn embed(cpu: &Cpu, table: &Matrix, tokens: &[u32], scale: f32) -> Tensor {
    let weights = table.storage::<PackedWeights>();
    let cols = table.cols;
    let mut y = cpu.tensor(tokens.len(), cols);
    let out = DisjointSlice::new(values_mut(&mut y));
    // A row is read 16 times as wide as it is, so few are worth sharing.
    let chunk = (MIN_PARALLEL / 16 / cols.max(1)).max(1);
    cpu.pool.each(tokens.len(), chunk, |_, range| {
        for i in range {
            let token = tokens[i] as usize;
            assert!(token < table.rows, "row {token} of {}", table.rows);
            // SAFETY: every row is visited once.
            let y = unsafe { out.part(i * cols..(i + 1) * cols) };
            match weights {
                PackedWeights::Plain(w) => w.row(token, scale, y),
                PackedWeights::QuantizedPanels(w) => w.row(token, scale, y),
            }
        }
    });
    y
}

/// How the kernels take `rows` rows of activations: in tiles from as many on as they
/// are faster with.
fn row_blocks(w: &QuantizedPanels, isa: Detected, rows: usize) -> RowBlocks {
    let tiles = amx::block(w, rows).filter(|_| isa.has_tiles());
    tiles.map_or_else(
        || RowBlocks::vectors(isa, rows),
        |rows| RowBlocks { rows, tiles: true },
    )
}

/// PlainPanels `range` of `w` for rows `run` of `x`, as `worker`.
fn quantized_piece(
    cpu: &Cpu,
    worker: usize,
    w: &QuantizedPanels,
    x: &QuantizedActivations,
    run: Range<usize>,
    range: Range<usize>,
    y: &DisjointSlice<'_, f32>,
) {
    debug_assert_eq!((w.group, w.cols), (x.group, x.cols));
    pack::each(cpu, w, worker, range, |range, data| {
        let piece = QuantizedWork {
            w,
            data,
            n_out: w.rows,
            x: x.view(run.clone()),
            range,
            y,
        };
        match x.blocks.tiles {
            true => amx::multiply(cpu, piece),
            false => piece.multiply(cpu),
        }
    });
}

/// Up to 16 chosen rows of `w` for one row of `x`, as `worker`.
fn quantized_chosen(
    cpu: &Cpu,
    worker: usize,
    w: &QuantizedPanels,
    x: &QuantizedActivations,
    row: usize,
    ids: &[u32],
    y: &mut [f32],
) {
    let n_out = y.len();
    let y = &DisjointSlice::new(y);
    pack::chosen(cpu, w, worker, ids, |data| {
        let piece = QuantizedWork {
            w,
            data,
            n_out,
            x: x.view(row..row + 1),
            range: 0..1,
            y,
        };
        piece.multiply(cpu);
    });
}
