//! Prepares a step's rows for the recurrence: convolved channels, normalized queries and keys,
//! decays and gates.

use super::state::{LayerState, MAX_TAPS, Shape};
use crate::arch::{Kernel, Lanes, load, store, update};
use crate::device::Device;
use crate::memory::{Buffer, values, values_mut};
use crate::norm::sum_squares;
use crate::pool::DisjointSlice;
use backend::{Batch, DeltaWeights, Tensor, math};
use std::ops::Range;

/// Channels that are convolved together.
const CHANNELS: usize = 512;

/// Products below which handing out work costs more than it saves.
const MIN_PARALLEL: usize = 32 << 10;

/// `[C, taps] → [taps, C]`
fn by_tap(taps: &[f32], n_taps: usize) -> Vec<f32> {
    let channels = taps.len() / n_taps;
    (0..taps.len())
        .map(|i| taps[i % channels * n_taps + i / channels])
        .collect()
}

/// Convolves some of one row's channels and passes them through SiLU.
struct Convolve<'a> {
    /// The inputs of these channels, oldest row first.
    rows: [&'a [f32]; MAX_TAPS],
    /// The factors of each input.
    taps: [&'a [f32]; MAX_TAPS],
    n_taps: usize,
    out: &'a mut [f32],
    /// How to normalize heads, if the channels are queries or keys.
    heads: Option<NormalizeHeads>,
}

/// Heads that are scaled to length 1, and then by a factor.
struct NormalizeHeads {
    /// Columns of a head.
    dim: usize,
    /// The first of the heads, queries and then keys.
    first: usize,
    /// Heads of queries.
    n_queries: usize,
    /// The factor of queries; keys have none.
    scale: f32,
}

impl Kernel for Convolve<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        match self.n_taps {
            4 => self.convolve::<L>(4),
            n => self.convolve::<L>(n),
        }
        if let Some(heads) = self.heads {
            for (head, x) in self.out.chunks_exact_mut(heads.dim).enumerate() {
                let is_query = heads.first + head < heads.n_queries;
                let inverse = L::splat(1.0 / (sum_squares::<L>(x) + 1e-6).sqrt());
                let factor = L::splat(if is_query { heads.scale } else { 1.0 });
                update::<L>(x, |x| x * inverse * factor);
            }
        }
    }
}

impl Convolve<'_> {
    /// `out = silu(Σ tap · row)`. `n_taps` known where this is inlined makes the inner loop
    /// straight.
    #[inline(always)]
    fn convolve<L: Lanes>(&mut self, n_taps: usize) {
        let (out, rest) = self.out.as_chunks_mut::<16>();
        // Vectors of each tap and its row, and what is left of them.
        let mut vectors: [[&[[f32; 16]]; 2]; MAX_TAPS] = [[&[]; 2]; MAX_TAPS];
        let mut rests: [[&[f32]; 2]; MAX_TAPS] = [[&[]; 2]; MAX_TAPS];
        for j in 0..n_taps {
            for (side, x) in [self.taps[j], self.rows[j]].into_iter().enumerate() {
                let (whole, rest) = x.as_chunks::<16>();
                (vectors[j][side], rests[j][side]) = (&whole[..out.len()], rest);
            }
        }
        for (i, out) in out.iter_mut().enumerate() {
            let mut acc = L::splat(0.0);
            for [tap, row] in &vectors[..n_taps] {
                acc = L::load(&tap[i]).mul_add(L::load(&row[i]), acc);
            }
            math::silu(acc).store(out);
        }
        if !rest.is_empty() {
            let mut acc = L::splat(0.0);
            for [tap, row] in &rests[..n_taps] {
                acc = L::load_part(tap).mul_add(L::load_part(row), acc);
            }
            math::silu(acc).store_part(rest);
        }
    }
}

/// Makes one row's decays and gates, `[2, nv]`, from `a, b: [nv]`.
struct Gates<'a> {
    a: &'a [f32],
    b: &'a [f32],
    decays: &'a [f32],
    dt_bias: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Gates<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (decays, betas) = self.out.split_at_mut(self.a.len());
        // Scalar, but with the instruction set's fused multiply-add.
        for (head, decay) in decays.iter_mut().enumerate() {
            let softplus = math::softplus(self.a[head] + self.dt_bias[head]);
            *decay = self.decays[head] * softplus;
        }
        for decays in decays.chunks_mut(16) {
            store(math::exp(load::<L>(decays)), decays);
        }
        for (b, betas) in self.b.chunks(16).zip(betas.chunks_mut(16)) {
            store(math::sigmoid(load::<L>(b)), betas);
        }
    }
}

/// The op's arguments and outputs. Work is cut in *units*: some channels of one row.
struct Prepare<'a> {
    device: &'a Device,
    shape: &'a Shape,
    state: &'a LayerState,
    batch: &'a Batch,
    /// `[n, C]`
    qkv: &'a [f32],
    /// `[n, nv]`
    b: &'a [f32],
    a: &'a [f32],
    /// `[taps, C]`
    taps: &'a [f32],
    decays: &'a [f32],
    dt_bias: &'a [f32],
    /// Zeros, for the rows before the first one of a sequence: `[C]`
    zeros: &'a [f32],
    /// Heads of a unit of queries and keys, which has whole heads.
    heads_a_unit: usize,
    /// How many units a row's queries and keys are cut into.
    head_units: usize,
    /// `[n, C]`
    conv: DisjointSlice<'a, f32>,
    /// `[n, 2, nv]`
    gates: DisjointSlice<'a, f32>,
}

impl<'a> Prepare<'a> {
    /// The channels of a unit.
    fn channels(&self, unit: usize) -> Range<usize> {
        let spec = &self.shape.spec;
        let (heads, key_dim) = (2 * spec.key_heads, spec.key_dim);
        if unit < self.head_units {
            let first = unit * self.heads_a_unit;
            first * key_dim..(first + self.heads_a_unit).min(heads) * key_dim
        } else {
            let first = heads * key_dim + (unit - self.head_units) * CHANNELS;
            first..(first + CHANNELS).min(self.shape.channels)
        }
    }

    /// Prepares unit `unit` of row `r`, and with the first unit the row's decays and gates.
    ///
    /// # Safety
    ///
    /// Every unit of every row is prepared once.
    unsafe fn unit(&self, r: usize, unit: usize) {
        let (spec, channels) = (&self.shape.spec, self.shape.channels);
        let mut seqs = self.batch.seqs.iter();
        let seq = seqs.find(|s| s.rows.contains(&r));
        let seq = seq.expect("every row is a sequence's");
        let range = self.channels(unit);
        let past = spec.conv_taps - 1;
        let (mut rows, mut taps) = ([&self.zeros[..0]; MAX_TAPS], [&self.zeros[..0]; MAX_TAPS]);
        for j in 0..spec.conv_taps {
            // Row `u` of those before the step and the step's own.
            let u = r - seq.rows.start + j;
            let row = if u >= past {
                &self.qkv[(seq.rows.start + u - past) * channels..][..channels]
            } else if seq.is_new {
                self.zeros
            } else {
                self.state.history_row(self.shape, seq, u)
            };
            rows[j] = &row[range.clone()];
            taps[j] = &self.taps[j * channels..][range.clone()];
        }
        let heads = (unit < self.head_units).then(|| NormalizeHeads {
            dim: spec.key_dim,
            first: range.start / spec.key_dim,
            n_queries: spec.key_heads,
            scale: 1.0 / (spec.key_dim as f32).sqrt(),
        });
        let at = r * channels;
        self.device.isa.run(Convolve {
            rows,
            taps,
            n_taps: spec.conv_taps,
            // SAFETY: every unit of every row is visited once, as promised.
            out: unsafe { self.conv.part(at + range.start..at + range.end) },
            heads,
        });
        if unit == 0 {
            let heads = r * spec.value_heads..(r + 1) * spec.value_heads;
            self.device.isa.run(Gates {
                a: &self.a[heads.clone()],
                b: &self.b[heads.clone()],
                decays: self.decays,
                dt_bias: self.dt_bias,
                // SAFETY: every row's first unit is visited once, as promised.
                out: unsafe { self.gates.part(2 * heads.start..2 * heads.end) },
            });
        }
    }
}

/// Convolved channels of all rows, `[n, C]`, queries and keys normalized; and decays and gates,
/// `[n, 2, nv]`.
pub(super) fn prepare(
    device: &Device,
    shape: &Shape,
    state: &LayerState,
    weights: &DeltaWeights,
    (qkv, b, a): (&Tensor, &Tensor, &Tensor),
    batch: &Batch,
) -> (Tensor, Tensor) {
    let (spec, n) = (&shape.spec, batch.n_rows());
    let mut zeros = device.tensor(1, shape.channels);
    values_mut(&mut zeros).fill(0.0);
    let mut conv = device.tensor(n, shape.channels);
    let mut gates = device.tensor(n, 2 * spec.value_heads);
    {
        let heads = 2 * spec.key_heads;
        let heads_a_unit = (CHANNELS / spec.key_dim).clamp(1, heads);
        let prepare = Prepare {
            device,
            shape,
            state,
            batch,
            qkv: values(qkv),
            b: values(b),
            a: values(a),
            taps: weights
                .conv
                .storage::<Buffer>()
                .repacked(|taps| by_tap(taps, spec.conv_taps)),
            decays: values(&weights.decay),
            dt_bias: values(&weights.dt_bias),
            zeros: values(&zeros),
            heads_a_unit,
            head_units: heads.div_ceil(heads_a_unit),
            conv: DisjointSlice::new(values_mut(&mut conv)),
            gates: DisjointSlice::new(values_mut(&mut gates)),
        };
        let value_units = (spec.value_heads * spec.value_dim).div_ceil(CHANNELS);
        let units = prepare.head_units + value_units;
        // SAFETY: every unit of every row is visited once, below.
        let unit = |i: usize| unsafe { prepare.unit(i / units, i % units) };
        if n * shape.channels * spec.conv_taps < MIN_PARALLEL {
            (0..n * units).for_each(unit);
        } else {
            device
                .pool
                .each(n * units, 2, |_, range| range.for_each(unit));
        }
    }
    (conv, gates)
}
