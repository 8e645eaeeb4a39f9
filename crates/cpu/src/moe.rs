//! A mixture of experts.
//!
//! Rows are put in order of the experts they chose, so that an expert's weights
//! are read once a step however many rows chose it; products over all experts
//! are one job, cut at experts and panels. A row adds its experts by rank.

mod routing;

pub(crate) use routing::Routing;

use crate::arch::{Kernel, Lanes, load, map, store};
use crate::device::Device;
use crate::elementwise;
use crate::matmul::{PackBuffer, matmul_runs};
use crate::memory::{values, values_mut};
use crate::pool::{DisjointSlice, WORK_RANGE, worker_scratch};
use backend::{Activation, Choice, Experts, Tensor, math};
use std::sync::Mutex;

/// [`Experts::choose`], compiled for the instruction set.
struct Choose<'a> {
    experts: &'a Experts,
    scores: &'a [f32],
    /// Scratch memory, a value for each score.
    powers: &'a mut [f32],
    order: &'a mut Vec<usize>,
    choice: &'a mut Choice,
}

impl Kernel for Choose<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let max = self
            .scores
            .iter()
            .fold(f32::NEG_INFINITY, |m, &s| if s > m { s } else { m });
        for (p, s) in self.powers.chunks_mut(16).zip(self.scores.chunks(16)) {
            store(math::exp(load::<L>(s) - L::splat(max)), p);
        }
        self.experts
            .choose_into(self.powers, self.order, self.choice);
    }
}

/// Adds up one row's experts: `y = Σ_rank w part`.
struct Combine<'a> {
    /// By rank: an expert's weight, and where its result starts in `parts`.
    terms: &'a [(f32, usize)],
    parts: &'a [f32],
    y: &'a mut [f32],
}

impl Kernel for Combine<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        for (i, y) in self.y.chunks_mut(16).enumerate() {
            let mut sum = L::splat(0.0);
            for &(weight, start) in self.terms {
                let part = load::<L>(&self.parts[start + 16 * i..][..y.len()]);
                sum = L::splat(weight).mul_add(part, sum);
            }
            store(sum, y);
        }
    }
}

/// `activation(gate) up` of rows `[gate, up]`.
struct Glu<'a> {
    both: &'a [f32],
    activation: Activation,
    y: &'a mut [f32],
}

impl Kernel for Glu<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (gate, up) = self.both.split_at(self.y.len());
        let all = gate
            .chunks(16)
            .zip(up.chunks(16))
            .zip(self.y.chunks_mut(16));
        for ((gate, up), y) in all {
            store(
                elementwise::gated(self.activation, load::<L>(gate), load::<L>(up)),
                y,
            );
        }
    }
}

/// Calls `row(i)` for each of `n` rows of `cols` values, on several workers if there are enough
/// values.
fn each_row(device: &Device, n: usize, cols: usize, row: impl Fn(usize) + Sync) {
    let chunk = WORK_RANGE.div_ceil(cols.max(1));
    device.pool.each(n, chunk, |_, range| range.for_each(&row));
}

/// The sum of each row's experts, `[n, H]`, chosen by `scores: [n, E]`.
///
/// # Panics
///
/// If there is not a score for each row and expert.
pub(crate) fn moe(
    device: &Device,
    buffers: &[Mutex<PackBuffer>],
    routing: &mut Routing,
    x: &Tensor,
    scores: &Tensor,
    experts: &Experts,
) -> Tensor {
    let (n, hidden, n_experts) = (x.rows(), x.cols(), experts.experts.len());
    assert_eq!(
        (scores.rows(), scores.cols()),
        (n, n_experts),
        "a score for each row and expert"
    );
    choose(device, scores, experts, routing);
    routing.note(n, n_experts);
    routing.sort(n, n_experts, hidden);
    let (runs, rows) = (&routing.runs, &routing.rows);
    let expert = |i: usize| &experts.experts[routing.chosen[i]];
    let x = gather(device, x, rows); // [places, H]
    let both = matmul_runs(device, buffers, &x, runs, |i| &expert(i).gate_up); // [.., 2 I]
    let inner = glu(device, &both, experts.activation); // [.., I]
    let parts = matmul_runs(device, buffers, &inner, runs, |i| &expert(i).down); // [.., H]
    combine(device, &parts, &routing.terms, (n, hidden))
}

/// Chooses the experts of each row by its scores.
fn choose(device: &Device, scores: &Tensor, experts: &Experts, routing: &mut Routing) {
    let (n, n_experts, n_workers) = (scores.rows(), scores.cols(), device.pool.n_workers());
    let Routing {
        choices, orders, ..
    } = routing;
    orders.resize_with(n_workers, Vec::new);
    if choices.len() < n {
        choices.resize_with(n, Choice::new);
    }
    let mut powers = device.tensor(n_workers, n_experts);
    let scores = values(scores);
    let powers = DisjointSlice::new(values_mut(&mut powers));
    let (orders, choices) = (DisjointSlice::new(orders), DisjointSlice::new(choices));
    let chunk = WORK_RANGE.div_ceil((64 * n_experts).max(1));
    device.pool.each(n, chunk, |worker, range| {
        // SAFETY: a worker's scratch memory is its own.
        let (powers, order) = unsafe {
            (
                worker_scratch(&powers, worker, n_experts),
                &mut orders.part(worker..worker + 1)[0],
            )
        };
        for r in range {
            device.isa.run(Choose {
                experts,
                scores: &scores[r * n_experts..][..n_experts],
                powers,
                order,
                // SAFETY: every row is visited once.
                choice: unsafe { &mut choices.part(r..r + 1)[0] },
            });
        }
    });
}

/// Rows `rows` of `x`, copied on several workers if they are many.
fn gather(device: &Device, x: &Tensor, rows: &[usize]) -> Tensor {
    let cols = x.cols();
    let mut gathered = device.tensor(rows.len(), cols);
    let (from, to) = (values(x), DisjointSlice::new(values_mut(&mut gathered)));
    each_row(device, rows.len(), cols, |i| {
        // SAFETY: every place is visited once.
        let to = unsafe { to.part(i * cols..(i + 1) * cols) };
        to.copy_from_slice(&from[rows[i] * cols..][..cols]);
    });
    gathered
}

/// `activation(gate) up` of rows `[gate, up]`, which are twice as wide as the result.
fn glu(device: &Device, both: &Tensor, activation: Activation) -> Tensor {
    let (n, cols) = (both.rows(), both.cols() / 2);
    let mut y = device.tensor(n, cols);
    let (from, to) = (values(both), DisjointSlice::new(values_mut(&mut y)));
    each_row(device, n, cols, |i| {
        // SAFETY: every row is visited once.
        let y = unsafe { to.part(i * cols..(i + 1) * cols) };
        device.isa.run(Glu {
            both: &from[2 * i * cols..][..2 * cols],
            activation,
            y,
        });
    });
    y
}

/// Adds up the experts of each row, `[n, H]`, from the results of all places.
fn combine(
    device: &Device,
    parts: &Tensor,
    terms: &[(f32, usize)],
    (n, hidden): (usize, usize),
) -> Tensor {
    let mut out = device.tensor(n, hidden);
    let (parts, to) = (values(parts), DisjointSlice::new(values_mut(&mut out)));
    let top_k = terms.len() / n.max(1);
    each_row(device, n, top_k * hidden, |r| {
        // SAFETY: every row is visited once.
        let y = unsafe { to.part(r * hidden..(r + 1) * hidden) };
        let terms = &terms[r * top_k..(r + 1) * top_k];
        device.isa.run(Combine { terms, parts, y });
    });
    out
}

/// `y = activation(gate) x` of one row.
struct GateRow<'a> {
    gate: f32,
    activation: Activation,
    x: &'a [f32],
    y: &'a mut [f32],
}

impl Kernel for GateRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let factor = L::splat(self.activation.apply(self.gate));
        map::<L>(self.x, self.y, |x| x * factor);
    }
}

/// `activation(gate) * x`, one `gate: [n, 1]` for all of a row's columns.
pub(crate) fn gate_rows(
    device: &Device,
    x: &Tensor,
    gate: &Tensor,
    activation: Activation,
) -> Tensor {
    assert_eq!((gate.rows(), gate.cols()), (x.rows(), 1), "one gate a row");
    let (n, cols) = (x.rows(), x.cols());
    let mut y = device.tensor(n, cols);
    {
        let (x, gates, out) = (
            values(x),
            values(gate),
            DisjointSlice::new(values_mut(&mut y)),
        );
        each_row(device, n, cols, |r| {
            // SAFETY: every row is visited once.
            let y = unsafe { out.part(r * cols..(r + 1) * cols) };
            let x = &x[r * cols..][..cols];
            let gate = gates[r];
            device.isa.run(GateRow {
                gate,
                activation,
                x,
                y,
            });
        });
    }
    y
}
