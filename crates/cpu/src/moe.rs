//! A mixture of experts.
//!
//! Rows are put in order of the experts they chose, so that an expert's weights
//! are read once a step however many rows chose it; products over all experts
//! are one job, cut at experts and panels. A row adds its experts by rank.

use crate::arch::{Kernel, Lanes, load, map, store};
mod routing;

pub(crate) use routing::Routing;

use crate::device::Cpu;
use crate::elementwise::{self, WORK_RANGE};
use crate::matmul;
use crate::memory::{values, values_mut};
use crate::pool::{DisjointSlice, worker_scratch};
use backend::{Activation, Choice, Experts, Tensor, math};
use std::sync::PoisonError;

/// [`Experts::choose`], compiled for the instruction set.
struct Choose<'a> {
    experts: &'a Experts,
    scores: &'a [f32],
    /// Room for as many.
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

/// One row's experts, added up: `y = Σ_rank w part`.
struct Combine<'a> {
    /// Weights, and where each expert's result starts in `parts`, by rank.
    choice: &'a [(f32, usize)],
    parts: &'a [f32],
    y: &'a mut [f32],
}

impl Kernel for Combine<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        for (i, y) in self.y.chunks_mut(16).enumerate() {
            let mut sum = L::splat(0.0);
            for &(weight, start) in self.choice {
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

/// Calls `row(i)` for all of `n` rows of `cols` values, on several workers if
/// they are many.
fn each_row(cpu: &Cpu, n: usize, cols: usize, row: impl Fn(usize) + Sync) {
    let chunk = WORK_RANGE.div_ceil(cols.max(1));
    cpu.pool.each(n, chunk, |_, range| range.for_each(&row));
}

/// Each row's experts, by `scores: [n, E]`: `[n, H]`.
pub(crate) fn moe(cpu: &Cpu, x: &Tensor, scores: &Tensor, experts: &Experts) -> Tensor {
    let (n, hidden, n_experts) = (x.rows(), x.cols(), experts.experts.len());
    assert_eq!(
        (scores.rows(), scores.cols()),
        (n, n_experts),
        "a score for each row and expert"
    );
    let mut plan = cpu.routing.lock().unwrap_or_else(PoisonError::into_inner);
    let Routing {
        choices,
        orders,
        ends,
        next,
        chosen,
        runs,
        rows,
        places,
    } = &mut *plan;
    let n_workers = cpu.pool.n_workers();
    orders.resize_with(n_workers, Vec::new);
    if choices.len() < n {
        choices.resize_with(n, Choice::new);
    }
    let choices = &mut choices[..n];
    let mut powers = cpu.tensor(n_workers, n_experts);
    {
        let all_scores = values(scores);
        let powers = DisjointSlice::new(values_mut(&mut powers));
        let (orders, choices) = (DisjointSlice::new(orders), DisjointSlice::new(choices));
        let chunk = WORK_RANGE.div_ceil((64 * n_experts).max(1));
        cpu.pool.each(n, chunk, |worker, range| {
            // SAFETY: a worker's room is its own.
            let (powers, order) = unsafe {
                (
                    worker_scratch(&powers, worker, n_experts),
                    &mut orders.part(worker..worker + 1)[0],
                )
            };
            for r in range {
                cpu.isa.run(Choose {
                    experts,
                    scores: &all_scores[r * n_experts..][..n_experts],
                    powers,
                    order,
                    // SAFETY: every row is visited once.
                    choice: unsafe { &mut choices.part(r..r + 1)[0] },
                });
            }
        });
    }

    // Places in order of experts, and then of rows: a counting sort.
    ends.clear();
    ends.resize(n_experts + 1, 0);
    for &(expert, _) in choices.iter().flatten() {
        ends[expert + 1] += 1;
    }
    for e in 0..n_experts {
        ends[e + 1] += ends[e];
    }
    let total = ends[n_experts];
    chosen.clear();
    chosen.extend((0..n_experts).filter(|&e| ends[e] < ends[e + 1]));
    runs.clear();
    runs.extend(chosen.iter().map(|&e| ends[e]..ends[e + 1]));
    next.clone_from(ends);
    rows.clear();
    rows.resize(total, 0);
    places.clear();
    for (r, choice) in choices.iter().enumerate() {
        for &(expert, weight) in choice {
            rows[next[expert]] = r;
            places.push((weight, next[expert] * hidden));
            next[expert] += 1;
        }
    }
    let (chosen, runs, rows, places) = (&*chosen, &*runs, &*rows, &*places);
    let of = |i: usize| &experts.experts[chosen[i]];

    let mut gathered = cpu.tensor(total, hidden);
    {
        let (from, to) = (values(x), DisjointSlice::new(values_mut(&mut gathered)));
        each_row(cpu, total, hidden, |i| {
            // SAFETY: every place is visited once.
            let to = unsafe { to.part(i * hidden..(i + 1) * hidden) };
            to.copy_from_slice(&from[rows[i] * hidden..][..hidden]);
        });
    }
    let both = matmul::matmul_runs(cpu, &gathered, runs, |i| &of(i).gate_up); // [total, 2 I]
    let inner = both.cols() / 2;
    let mut h = cpu.tensor(total, inner);
    {
        let (from, to) = (values(&both), DisjointSlice::new(values_mut(&mut h)));
        each_row(cpu, total, inner, |i| {
            // SAFETY: every row is visited once.
            let y = unsafe { to.part(i * inner..(i + 1) * inner) };
            cpu.isa.run(Glu {
                both: &from[2 * i * inner..][..2 * inner],
                activation: experts.activation,
                y,
            });
        });
    }
    let parts = matmul::matmul_runs(cpu, &h, runs, |i| &of(i).down); // [total, H]
    let mut out = cpu.tensor(n, hidden);
    {
        let (parts, out) = (values(&parts), DisjointSlice::new(values_mut(&mut out)));
        let top_k = places.len() / n.max(1);
        each_row(cpu, n, top_k * hidden, |r| {
            // SAFETY: every row is visited once.
            let y = unsafe { out.part(r * hidden..(r + 1) * hidden) };
            let choice = &places[r * top_k..(r + 1) * top_k];
            cpu.isa.run(Combine { choice, parts, y });
        });
    }
    out
}

/// `activation(gate[r]) x[r]`
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
pub(crate) fn gate_rows(cpu: &Cpu, x: &Tensor, gate: &Tensor, activation: Activation) -> Tensor {
    assert_eq!((gate.rows(), gate.cols()), (x.rows(), 1), "one gate a row");
    let (n, cols) = (x.rows(), x.cols());
    let mut y = cpu.tensor(n, cols);
    {
        let (x, gates, out) = (
            values(x),
            values(gate),
            DisjointSlice::new(values_mut(&mut y)),
        );
        each_row(cpu, n, cols, |r| {
            // SAFETY: every row is visited once.
            let y = unsafe { out.part(r * cols..(r + 1) * cols) };
            let x = &x[r * cols..][..cols];
            let gate = gates[r];
            cpu.isa.run(GateRow {
                gate,
                activation,
                x,
                y,
            });
        });
    }
    y
}
