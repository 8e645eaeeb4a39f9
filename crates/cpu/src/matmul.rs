//! Products, whichever way the weights are stored.
//!
//! Plain weights lie in `panels`, those with codes in `coded` unless the
//! activations are to stay in `f32`. Both come in panels of 16 rows; a product
//! is cut into pieces of some panels each, and several matrices of one input are
//! one job.

use crate::arch::{Blocks, ByteKernel, Bytes, Kernel, Lanes, TileKernel, Tiles};
use crate::coded::{self, Coded, Rounded};
use crate::memory::{values, values_mut};
use crate::packing::{Packing, Source};
use crate::panels::{self, Panels};
use crate::pool::Split;
use crate::tile::AHEAD;
use crate::{Activations, Cpu};
use backend::{Matrix, Tensor};
use quant::{Kept, Stored};
use std::hint::black_box;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Bytes of weights that one worker claims at a time.
const PIECE: usize = 128 << 10;

/// Multiply-adds below which handing out work costs more than it saves.
const ALONE: usize = 96 << 10;

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

/// A matrix as the kernels want it.
enum Weights {
    Plain(Panels),
    Coded(Coded),
}

impl Weights {
    /// How its panels are laid out, and where they come from.
    fn packing(&self) -> &dyn Packing {
        match self {
            Weights::Plain(w) => w,
            Weights::Coded(w) => w,
        }
    }
}

/// Packs `parts` as one matrix, or leaves them where they lie.
pub(crate) fn matrix(cpu: &Cpu, parts: &[Stored<'_>]) -> Matrix {
    let cols = parts[0].cols;
    assert!(parts.iter().all(|p| p.cols == cols), "parts of one width");
    let rows = parts.iter().map(|p| p.rows).sum::<usize>();
    let coded = match cpu.activations {
        Activations::Int8 => Coded::pack(cpu, parts),
        Activations::F32 => None,
    };
    let weights = coded.map_or_else(|| Weights::Plain(Panels::pack(cpu, parts)), Weights::Coded);
    let packing = weights.packing();
    let bytes = packing.n_panels() * packing.panel_bytes();
    let held = match packing.source() {
        Source::Packed(_) => bytes,
        Source::Mapped(_) => {
            cpu.left.fetch_add(bytes as u64, Relaxed);
            0
        }
    };
    Matrix::new(rows, cols, parts[0].format.name, held, Box::new(weights))
}

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
            if !rounded[..n].iter().flatten().any(|r| r.is_for(w, wanted)) {
                rounded[n] = Some(Rounded::new(cpu, x, w.group, wanted, runs));
                n += 1;
            }
        }
        Inputs { x, blocks, rounded }
    }

    fn rounded(&self, w: &Coded) -> &Rounded {
        let blocks = (self.blocks)(w);
        let mut all = self.rounded.iter().flatten();
        all.find(|r| r.is_for(w, blocks))
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
                panels::piece(cpu, worker, w, x, self.rows.len(), range, &self.y);
            }
            Weights::Coded(w) => {
                let x = inputs.rounded(w);
                coded::piece(cpu, worker, w, x, self.rows.clone(), range, &self.y);
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
            |w: &Coded| w.blocks(cpu.isa, rows),
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
    let blocks = |_: &Coded| cpu.isa.vectors(longest);
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

/// Adds up a slice of bytes as words.
struct Read<'a>(&'a [u8]);

impl Kernel for Read<'_> {
    type Output = u64;

    #[inline(always)]
    fn run<L: Lanes>(self) -> u64 {
        let words = self.0.as_chunks::<256>().0;
        let mut sums = [0u64; 32];
        for chunk in words {
            for line in [0, 64, 128, 192] {
                L::prefetch(chunk.as_ptr().wrapping_add(AHEAD + line));
            }
            for (sum, word) in sums.iter_mut().zip(chunk.as_chunks::<8>().0) {
                *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
            }
        }
        sums.into_iter().fold(0, u64::wrapping_add)
    }
}

/// Multiplies bytes in registers: `SUMS * steps` times 64, or `4 * steps` tiles.
struct Saturate {
    steps: usize,
}

impl Saturate {
    /// Sums under way: more than the latency of a multiplication needs.
    const SUMS: usize = 16;
}

impl ByteKernel for Saturate {
    type Output = ();

    #[inline(always)]
    fn run<B: Bytes>(self) {
        let codes = B::load(&[3; 64]);
        let mut sums = [B::zero(); Self::SUMS];
        for step in 0..self.steps {
            let x = [step as i8; 4];
            for sums in &mut sums {
                *sums = B::add(*sums, codes, x);
            }
        }
        for sums in sums {
            black_box(B::float(sums).sum());
        }
    }
}

impl TileKernel for Saturate {
    type Output = ();

    #[inline(always)]
    fn run<T: Tiles>(self) {
        // SAFETY: entered through `run_tiles`.
        let tiles = unsafe { T::configure(16, 64) };
        tiles.saturate(self.steps);
    }
}

/// Multiplies bytes on all threads; returns the operations.
pub(crate) fn saturate(cpu: &Cpu, tiles: bool, steps: usize) -> Option<u64> {
    let done = AtomicU64::new(0);
    if tiles && !cpu.isa.has_tiles() {
        return None;
    }
    cpu.pool.run(&|_| {
        let products = match tiles {
            true => {
                cpu.isa.run_tiles(Saturate { steps });
                4 * 16 * 16 * 64
            }
            false => {
                cpu.isa.run_bytes(Saturate { steps });
                Saturate::SUMS * 64
            }
        };
        done.fetch_add((2 * products * steps) as u64, Relaxed);
    });
    Some(done.into_inner())
}

/// Reads all bytes of `w`, in the pieces of a product.
pub(crate) fn read(cpu: &Cpu, w: &Matrix) -> u64 {
    let total = AtomicU64::new(0);
    let all = |bytes: &[u8]| {
        cpu.pool.each(bytes.len(), PIECE, |_, range| {
            total.fetch_add(cpu.isa.run(Read(&bytes[range])), Relaxed);
        });
    };
    match w.storage::<Weights>().packing().source() {
        Source::Packed(data) => all(data.of()),
        Source::Mapped(kept) => {
            for part in kept.iter().map(Kept::view) {
                [part.codes, part.scales, part.biases]
                    .into_iter()
                    .for_each(all);
            }
        }
    }
    total.into_inner()
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
                    panels::chosen(cpu, worker, w, x, ids, y);
                }
                Weights::Coded(w) => {
                    coded::chosen(cpu, worker, w, inputs.rounded(w), row, ids, y);
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
