//! Products: from the op to the kernel, and from the whole matrix to a worker's part of it.
//!
//! Plain weights lie in `panels`, those with codes in `coded` unless the
//! activations are to stay in `f32`. Both come in panels of 16 rows; a product
//! is cut into pieces of some panels each, and several matrices of one input are
//! one job.

use super::activations::{Blocks, Rounded};
use super::quantized::{Coded, Piece};
use super::weights::Weights;
use super::{amx, pack, plain};
use crate::arch::Detected;
use crate::device::Cpu;
use crate::memory::{values, values_mut};
use crate::pool::Split;
use backend::{Matrix, Tensor};
use std::ops::Range;

/// Bytes of weights that one worker claims at a time.
pub(crate) const PIECE: usize = 128 << 10;

/// Multiply-adds below which handing out work costs more than it saves.
const ALONE: usize = 96 << 10;

/// One input, rounded at most once for each size of group and kind of blocks.
struct Inputs<'a, F> {
    x: &'a Tensor,
    blocks: F,
    rounded: [Option<Rounded>; MANY],
}

/// Matrices of one job; more are done in several.
const MANY: usize = 8;

impl<'a, F: Fn(&Coded) -> Blocks> Inputs<'a, F> {
    /// Rounds each of `runs`, in the blocks that the weights want.
    fn new<'w>(
        cpu: &Cpu,
        x: &'a Tensor,
        blocks: F,
        runs: &[Range<usize>],
        weights: impl Iterator<Item = &'w Weights>,
    ) -> Self {
        let mut rounded = [const { None::<Rounded> }; MANY];
        let mut n = 0;
        for weights in weights {
            let Weights::Coded(w) = weights else { continue };
            let wanted = blocks(w);
            if !rounded[..n]
                .iter()
                .flatten()
                .any(|r| r.is_for(w.group, wanted))
            {
                rounded[n] = Some(Rounded::new(cpu, x, w.group, wanted, runs));
                n += 1;
            }
        }
        Inputs { x, blocks, rounded }
    }

    fn rounded(&self, w: &Coded) -> &Rounded {
        let blocks = (self.blocks)(w);
        let mut all = self.rounded.iter().flatten();
        all.find(|r| r.is_for(w.group, blocks))
            .expect("rounded for every matrix")
    }
}

/// One matrix of a job, and the rows of the input that it is for.
struct Job<'a> {
    weights: &'a Weights,
    rows: Range<usize>,
    n_panels: usize,
    /// Panels of a piece.
    chunk: usize,
    /// Pieces of the matrices before this one.
    first: usize,
    y: Split<'a, f32>,
}

impl<'a> Job<'a> {
    /// `y = x wᵀ` for `rows` of `x`; its pieces follow the `first`.
    fn new(cpu: &Cpu, w: &'a Matrix, rows: Range<usize>, first: usize, y: Split<'a, f32>) -> Self {
        let weights = w.storage::<Weights>();
        let packing = weights.packing();
        let (n_panels, bytes) = (packing.n_panels(), packing.panel_bytes());
        // A few pieces for each worker at least, in fours, to feed the kernel.
        let fair = n_panels.div_ceil(4 * cpu.pool.n_workers()).max(1);
        let chunk = (PIECE / bytes.max(1)).clamp(1, fair).next_multiple_of(4);
        Job {
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

    fn run<F: Fn(&Coded) -> Blocks>(
        &self,
        cpu: &Cpu,
        worker: usize,
        inputs: &Inputs<'_, F>,
        piece: usize,
    ) {
        let start = (piece - self.first) * self.chunk;
        let range = start..(start + self.chunk).min(self.n_panels);
        match self.weights {
            Weights::Plain(w) => {
                let cols = inputs.x.cols();
                let x = &values(inputs.x)[self.rows.start * cols..self.rows.end * cols];
                plain::piece(cpu, worker, w, x, self.rows.len(), range, &self.y);
            }
            Weights::Coded(w) => {
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
    for (w, y) in w.chunks(MANY).zip(y.chunks_mut(MANY)) {
        let inputs = Inputs::new(
            cpu,
            x,
            |w: &Coded| row_blocks(w, cpu.isa, rows),
            std::slice::from_ref(&(0..rows)),
            w.iter().map(|w| w.storage()),
        );
        let (mut work, mut first) = (0, 0);
        let mut y = y.iter_mut();
        let jobs: [Option<Job<'_>>; MANY] = std::array::from_fn(|i| {
            let w = w.get(i)?;
            let y = y.next().expect("as many as matrices");
            assert_eq!(
                (w.cols, w.rows, rows),
                (x.cols(), y.cols(), y.rows()),
                "shapes of a product"
            );
            work += rows * w.rows * w.cols;
            let job = Job::new(cpu, w, 0..rows, first, Split::new(values_mut(y)));
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
        if work < ALONE {
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
    let blocks = |_: &Coded| Blocks::vectors(cpu.isa, longest);
    let inputs = Inputs::new(cpu, x, blocks, runs, all().map(|w| w.storage()));
    let mut y = cpu.tensor(x.rows(), rows);
    {
        let out = Split::new(values_mut(&mut y));
        let job = |i: usize| {
            let run = runs[i].clone();
            let y = out.after(run.start * rows);
            Job::new(cpu, w(i), run, 0, y)
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
        if x.rows() * rows * cols < ALONE {
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
    let weights = w.storage::<Weights>();
    let inputs = Inputs::new(
        cpu,
        x,
        |_: &Coded| Blocks::SINGLE,
        std::slice::from_ref(&(0..x.rows())),
        std::iter::once(weights),
    );
    let mut y = cpu.tensor(x.rows(), n_ids);
    let groups = n_ids.div_ceil(16);
    let out = Split::new(values_mut(&mut y));
    let chunk = (ALONE / 4 / (16 * w.cols).max(1)).max(1);
    cpu.pool.each(ids.len() * groups, chunk, |worker, range| {
        for i in range {
            let (row, at) = (i / groups, i % groups * 16);
            let ids = &ids[row][at..(at + 16).min(n_ids)];
            // SAFETY: every group of outputs is visited once.
            let y = unsafe { out.part(row * n_ids + at..row * n_ids + at + ids.len()) };
            match weights {
                Weights::Plain(w) => {
                    let x = &values(inputs.x)[row * x.cols()..][..x.cols()];
                    plain::chosen(cpu, worker, w, x, ids, y);
                }
                Weights::Coded(w) => {
                    quantized_chosen(cpu, worker, w, inputs.rounded(w), row, ids, y);
                }
            }
        }
    });
    y
}

/// Rows `tokens` of `table`, times `scale`.
pub(crate) fn embed(cpu: &Cpu, table: &Matrix, tokens: &[u32], scale: f32) -> Tensor {
    let weights = table.storage::<Weights>();
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
            match weights {
                Weights::Plain(w) => w.row(token, scale, y),
                Weights::Coded(w) => w.row(token, scale, y),
            }
        }
    });
    y
}

/// How the kernels take `rows` rows of activations: in tiles from as many on as they
/// are faster with.
fn row_blocks(w: &Coded, isa: Detected, rows: usize) -> Blocks {
    let tiles = amx::block(w, rows).filter(|_| isa.has_tiles());
    tiles.map_or_else(
        || Blocks::vectors(isa, rows),
        |rows| Blocks { rows, tiles: true },
    )
}

/// Panels `range` of `w` for rows `run` of `x`, as `worker`.
fn quantized_piece(
    cpu: &Cpu,
    worker: usize,
    w: &Coded,
    x: &Rounded,
    run: Range<usize>,
    range: Range<usize>,
    y: &Split<'_, f32>,
) {
    debug_assert_eq!((w.group, w.cols), (x.group, x.cols));
    pack::each(cpu, w, worker, range, |range, data| {
        let piece = Piece {
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
    w: &Coded,
    x: &Rounded,
    row: usize,
    ids: &[u32],
    y: &mut [f32],
) {
    let n_out = y.len();
    let y = &Split::new(y);
    pack::chosen(cpu, w, worker, ids, |data| {
        let piece = Piece {
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
