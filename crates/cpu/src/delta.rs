//! The gated delta rule and the convolution in front of it.
//!
//! Two jobs. The first makes what rows have in common: convolved channels,
//! normalised queries and keys, decays and gates. The second runs the
//! recurrence. Columns of a state never meet, so a head is cut into blocks of
//! 32 columns, `[dk][32]`, which stay in the first cache while all rows of the
//! step pass over them: memory is read once a step, not once a row.
//!
//! A row needs two passes over its block, one for `Sᵀk` and one that writes `S`
//! and adds up `Sᵀq`; the second pass of a row also makes the next row's first,
//! on the state it has in hand. That one needs `S` times the next row's decay, so
//! that is what is written, until the step's last row.
//!
//! Rows that may be rolled back run on a copy. What they did is kept as decays,
//! keys and `d`, and the kept ones are replayed at the start of the next step.

use crate::arch::{Kernel, Lanes, load, store, update};
use crate::device::Cpu;
use crate::memory::{Buffer, Region, values, values_mut};
use crate::norm::sum_squares;
use crate::pool::{DisjointSlice, worker_scratch};
use backend::math;
use backend::{Batch, BatchSeq, Delta, DeltaSpec, DeltaWeights, MAX_TENTATIVE, Tensor};
use std::ops::Range;

/// Columns of a state that are worked on together: with 128 key columns they
/// take 16 KiB, and their copy as much, so that two threads of a core can share
/// a first cache of 48 KiB or one have 32 KiB.
const COLUMNS: usize = 32;

/// Channels that are convolved together.
const CHANNELS: usize = 512;

/// The convolution's kernel is at most so many taps.
const MAX_TAPS: usize = 16;

/// Products below which handing out work costs more than it saves.
const MIN_PARALLEL: usize = 32 << 10;

/// One layer's memory, all slots.
struct Slots {
    slots: Vec<Slot>,
    /// `[slots, nv, dk, padded dv]`, cut in blocks: see [`Shape`].
    states: Region,
    /// What tentative rows did, twice: one half is replayed while the other is
    /// written. `[2, slots, MAX_TENTATIVE]` of each.
    decays: Vec<f32>,
    keys: Vec<f32>,
    deltas: Vec<f32>,
    /// Rows before the convolution, a ring a slot:
    /// `[slots, taps - 1 + MAX_TENTATIVE, C]`.
    history: Vec<f32>,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    /// Which half of the updates was written last.
    half: usize,
    /// How many updates that was.
    n_updates: usize,
    /// The ring's oldest row: `taps - 1` rows from here end where the state does.
    start: usize,
}

/// Sizes that everything here needs.
#[derive(Clone, Copy)]
struct Shape {
    spec: DeltaSpec,
    channels: usize,
    /// Columns of a state with padding.
    width: usize,
    /// Rows of the ring.
    ring: usize,
}

impl Shape {
    fn new(spec: DeltaSpec) -> Self {
        Shape {
            spec,
            channels: spec.channels(),
            width: spec.value_dim.next_multiple_of(16),
            ring: spec.conv_taps - 1 + MAX_TENTATIVE,
        }
    }

    /// Values of one head's state.
    fn state(&self) -> usize {
        self.spec.key_dim * self.width
    }

    /// Blocks of a head.
    fn blocks(&self) -> usize {
        self.width.div_ceil(COLUMNS)
    }

    /// Columns of block `block`, padding included.
    fn columns(&self, block: usize) -> Range<usize> {
        block * COLUMNS..((block + 1) * COLUMNS).min(self.width)
    }

    /// Values of all update keys of one row.
    fn keys(&self) -> usize {
        self.spec.key_heads * self.spec.key_dim
    }

    /// Values of all `d` of one row.
    fn deltas(&self) -> usize {
        self.spec.value_heads * self.width
    }
}

/// Memory for one layer.
pub(crate) fn delta(spec: DeltaSpec) -> Delta {
    let shape = Shape::new(spec);
    assert!(
        spec.conv_taps <= MAX_TAPS,
        "{} taps are more than {MAX_TAPS}",
        spec.conv_taps
    );
    let rows = 2 * spec.slots * MAX_TENTATIVE;
    let slots = Slots {
        slots: vec![Slot::default(); spec.slots],
        states: Region::sparse(4 * spec.slots * spec.value_heads * shape.state()),
        decays: vec![0.0; rows * spec.value_heads],
        keys: vec![0.0; rows * shape.keys()],
        deltas: vec![0.0; rows * shape.deltas()],
        history: vec![0.0; spec.slots * shape.ring * shape.channels],
    };
    Delta {
        spec,
        storage: Box::new(slots),
    }
}

/// Copies a slot whose newest rows are all certain: there is nothing to replay.
pub(crate) fn copy(delta: &mut Delta, from: usize, to: usize) {
    let shape = Shape::new(delta.spec);
    let slots = delta.storage.downcast_mut::<Slots>();
    let slots = slots.expect("memory of this backend");
    debug_assert_eq!(slots.slots[from].n_updates, 0, "all rows are certain");
    slots.slots[to] = slots.slots[from];
    let part = |n: usize| (from * n..(from + 1) * n, to * n);
    let (state, at) = part(shape.spec.value_heads * shape.state());
    slots.states.of_mut::<f32>().copy_within(state, at);
    let (history, at) = part(shape.ring * shape.channels);
    slots.history.copy_within(history, at);
}

/// `[C, taps] → [taps, C]`
fn by_tap(taps: &[f32], n_taps: usize) -> Vec<f32> {
    let channels = taps.len() / n_taps;
    (0..taps.len())
        .map(|i| taps[i % channels * n_taps + i / channels])
        .collect()
}

/// Some of one row's channels: convolved and passed through SiLU.
struct Convolve<'a> {
    /// The inputs of these channels, oldest row first.
    rows: [&'a [f32]; MAX_TAPS],
    /// Their factors.
    taps: [&'a [f32]; MAX_TAPS],
    n_taps: usize,
    first: usize,
    out: &'a mut [f32],
    /// Head size and factors, if the channels are heads to normalise.
    heads: Option<Heads<'a>>,
}

impl Kernel for Convolve<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        match self.n_taps {
            4 => self.convolve::<L>(4),
            n => self.convolve::<L>(n),
        }
        if let Some(Heads { dim, factors }) = self.heads {
            for (head, x) in self.out.chunks_exact_mut(dim).enumerate() {
                let inverse = L::splat(1.0 / (sum_squares::<L>(x) + 1e-6).sqrt());
                let factor = L::splat(factors(self.first / dim + head));
                update::<L>(x, |x| x * inverse * factor);
            }
        }
    }
}

impl Convolve<'_> {
    /// `n_taps` known where this is inlined makes the inner loop straight.
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

/// One row's decays and gates, `[2, nv]`, from `a, b: [nv]`.
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

struct Heads<'a> {
    dim: usize,
    factors: &'a dyn Fn(usize) -> f32,
}

/// What one block of one head needs to pass through the step's rows.
struct Recurrence<'a> {
    shape: Shape,
    /// Rows of the step.
    rows: Range<usize>,
    certain: usize,
    head: usize,
    block: usize,
    /// Updates to replay, oldest first.
    replay: Updates<'a>,
    n_replay: usize,
    is_new: bool,
    /// Where tentative rows' `d` of this head and block go: row `t` at
    /// `t * deltas` from `first_delta`.
    deltas: &'a DisjointSlice<'a, f32>,
    first_delta: usize,
    /// Convolved channels of all rows, `[n, C]`.
    conv: &'a [f32],
    /// Decays and gates of all rows, `[n, 2, nv]`.
    gates: &'a [f32],
    /// `[dk][columns]`
    state: &'a mut [f32],
    /// Room for a copy of `state`.
    copy: &'a mut [f32],
    out: &'a DisjointSlice<'a, f32>,
}

/// Half of the updates of one slot.
#[derive(Clone, Copy)]
struct Updates<'a> {
    decays: &'a [f32],
    keys: &'a [f32],
    deltas: &'a [f32],
}

impl Kernel for Recurrence<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        match self.shape.columns(self.block).len() / 16 {
            2 => self.block::<L, 2>(),
            _ => self.block::<L, 1>(),
        }
    }
}

impl Recurrence<'_> {
    /// The whole step on `R` vectors of columns.
    #[inline(always)]
    fn block<L: Lanes, const R: usize>(mut self) {
        let DeltaSpec {
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            ..
        } = self.shape.spec;
        let channels = self.shape.channels;
        let key_head = self.head / (value_heads / key_heads);
        let (conv, gates) = (self.conv, self.gates);
        let query = |r: usize| &conv[r * channels + key_head * key_dim..][..key_dim];
        let key = |r: usize| &conv[r * channels + (key_heads + key_head) * key_dim..][..key_dim];
        let head = self.head;
        let decay = |r: usize| gates[2 * r * value_heads + head];
        let beta = |r: usize| gates[(2 * r + 1) * value_heads + head];
        let columns = self.shape.columns(self.block);
        let columns = columns.start..columns.end.min(value_dim);
        let first_value = 2 * key_heads * key_dim + self.head * value_dim;

        if self.is_new {
            self.state.fill(0.0);
        }
        // `Sᵀk` of the first row, while the kept rows are replayed.
        let mut sums = [L::splat(0.0); R];
        if self.n_replay > 0 {
            self.replay::<L, R>(key_head);
        }
        if let Some(r) = self.rows.clone().next() {
            let k = key(r);
            let decay = L::splat(decay(r));
            for (s, &k) in self.state.chunks_exact(16 * R).zip(k) {
                let k = L::splat(k);
                for (i, s) in s.as_chunks::<16>().0.iter().enumerate() {
                    sums[i] = (L::load(s) * decay).mul_add(k, sums[i]);
                }
            }
        }
        for (i, r) in self.rows.clone().enumerate() {
            let values = &conv[r * channels + first_value..][..value_dim][columns.clone()];
            let beta = L::splat(beta(r));
            let mut d = [L::splat(0.0); R];
            for (c, d) in d.iter_mut().enumerate() {
                // A value absent from the last vector leaves its padding at 0.
                let v = values
                    .get(16 * c..(16 * c + 16).min(values.len()))
                    .map_or(L::splat(0.0), load::<L>);
                *d = (v - sums[c]) * beta;
            }
            if i >= self.certain {
                let at = self.first_delta + (i - self.certain) * self.shape.deltas();
                // SAFETY: this head's block of this slot is this piece's.
                let to = unsafe { self.deltas.part(at..at + 16 * R) };
                for (to, d) in to.as_chunks_mut::<16>().0.iter_mut().zip(d) {
                    d.store(to);
                }
            }
            let next = (r + 1 < self.rows.end).then(|| (decay(r + 1), key(r + 1)));
            let pass = Pass {
                decay: decay(r),
                k: key(r),
                q: query(r),
                d,
                next,
            };
            // The first tentative row reads the state and writes the copy. The
            // last one's state is not wanted.
            let (state, copy) = (self.state.as_mut_ptr(), self.copy.as_mut_ptr());
            let from = if i <= self.certain { state } else { copy };
            let to = if i < self.certain { state } else { copy };
            // The step's result stays as it is; other rows leave what the next
            // one starts with.
            let plain = i + 1 == self.certain;
            let decayed = i > 0 && i != self.certain;
            // SAFETY: both hold `dk` rows of `R` vectors; they are equal or apart.
            let outputs = unsafe {
                match (decayed, next.is_some(), plain) {
                    (false, true, false) => pass.run::<false, true, DECAYED>(from, to, &mut sums),
                    (false, true, true) => pass.run::<false, true, PLAIN>(from, to, &mut sums),
                    (false, false, true) => pass.run::<false, false, PLAIN>(from, to, &mut sums),
                    (false, false, false) => pass.run::<false, false, NONE>(from, to, &mut sums),
                    (true, true, false) => pass.run::<true, true, DECAYED>(from, to, &mut sums),
                    (true, true, true) => pass.run::<true, true, PLAIN>(from, to, &mut sums),
                    (true, false, true) => pass.run::<true, false, PLAIN>(from, to, &mut sums),
                    (true, false, false) => pass.run::<true, false, NONE>(from, to, &mut sums),
                }
            };
            let at = (r * value_heads + self.head) * value_dim;
            // SAFETY: this head's columns of this row are this piece's.
            let out = unsafe { self.out.part(at + columns.start..at + columns.end) };
            for (out, o) in out.chunks_mut(16).zip(outputs) {
                store(o, out);
            }
        }
    }

    /// `S ← S decay + k dᵀ` for each kept row of the last step.
    #[inline(always)]
    fn replay<L: Lanes, const R: usize>(&mut self, key_head: usize) {
        let shape = self.shape;
        let key_dim = shape.spec.key_dim;
        let column = self.head * shape.width + self.block * COLUMNS;
        for (i, s) in self.state.chunks_exact_mut(16 * R).enumerate() {
            let s = s.as_chunks_mut::<16>().0;
            let mut lanes = [L::splat(0.0); R];
            for (lanes, s) in lanes.iter_mut().zip(&*s) {
                *lanes = L::load(s);
            }
            for t in 0..self.n_replay {
                let decay = L::splat(self.replay.decays[t * shape.spec.value_heads + self.head]);
                let k = L::splat(self.replay.keys[t * shape.keys() + key_head * key_dim + i]);
                let d = self.replay.deltas[t * shape.deltas() + column..][..16 * R]
                    .as_chunks::<16>()
                    .0;
                for (lanes, d) in lanes.iter_mut().zip(d) {
                    *lanes = k.mul_add(L::load(d), *lanes * decay);
                }
            }
            for (lanes, s) in lanes.into_iter().zip(s) {
                lanes.store(s);
            }
        }
    }
}

/// What a [`Pass`] stores of the state: nothing, `S'`, or `S' decay'` for the
/// next row.
const NONE: u8 = 0;
const PLAIN: u8 = 1;
const DECAYED: u8 = 2;

/// One row's second pass over a block.
struct Pass<'a, L, const R: usize> {
    decay: f32,
    k: &'a [f32],
    q: &'a [f32],
    d: [L; R],
    /// Decay and key of the next row.
    next: Option<(f32, &'a [f32])>,
}

impl<L: Lanes, const R: usize> Pass<'_, L, R> {
    /// `S' = S decay + k dᵀ` from `from` (which holds `S decay` already, if
    /// `FROM_DECAYED`) to `to`; returns `S'ᵀq` and leaves `(S' decay')ᵀk'` of the
    /// next row in `sums` (if `NEXT`).
    ///
    /// # Safety
    ///
    /// `from` and `to` hold as many rows of `R` vectors as `k` has columns.
    #[inline(always)]
    unsafe fn run<const FROM_DECAYED: bool, const NEXT: bool, const STORE: u8>(
        &self,
        from: *const f32,
        to: *mut f32,
        sums: &mut [L; R],
    ) -> [L; R] {
        let decay = L::splat(self.decay);
        let (next_decay, next_k) = self.next.unwrap_or((0.0, self.k));
        let next_decay = L::splat(next_decay);
        let mut outputs = [L::splat(0.0); R];
        let mut following = [L::splat(0.0); R];
        for (i, ((&k, &q), &next_k)) in self.k.iter().zip(self.q).zip(next_k).enumerate() {
            let (k, q, next_k) = (L::splat(k), L::splat(q), L::splat(next_k));
            for r in 0..R {
                let at = (i * R + r) * 16;
                // SAFETY: row `i` and vector `r` exist; `s` is read before it is
                // written.
                let (s, to) = unsafe {
                    (
                        L::load(&*from.add(at).cast()),
                        &mut *to.add(at).cast::<[f32; 16]>(),
                    )
                };
                let s = if FROM_DECAYED { s } else { s * decay };
                let s = k.mul_add(self.d[r], s);
                outputs[r] = s.mul_add(q, outputs[r]);
                if STORE == PLAIN {
                    s.store(to);
                }
                if NEXT {
                    let s = s * next_decay;
                    if STORE == DECAYED {
                        s.store(to);
                    }
                    following[r] = s.mul_add(next_k, following[r]);
                }
            }
        }
        *sums = following;
        outputs
    }
}

/// One gated-delta layer between its projections.
pub(crate) fn gated_delta(
    cpu: &Cpu,
    state: &mut Delta,
    weights: &DeltaWeights,
    qkv: &Tensor,
    b: &Tensor,
    a: &Tensor,
    batch: &Batch,
) -> Tensor {
    let spec = state.spec;
    let shape = Shape::new(spec);
    let DeltaSpec {
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        conv_taps,
        ..
    } = spec;
    let (channels, n) = (shape.channels, batch.n_rows());
    assert_eq!(
        (qkv.cols(), b.cols(), a.cols()),
        (channels, value_heads, value_heads),
        "columns of the projections"
    );
    assert_eq!(
        (qkv.rows(), b.rows(), a.rows()),
        (n, n, n),
        "a row for each of the step's"
    );
    assert_eq!(
        (weights.conv.rows(), weights.conv.cols()),
        (channels, conv_taps),
        "taps of each channel"
    );
    let slots = state
        .storage
        .downcast_mut::<Slots>()
        .expect("memory of this backend");
    let (past, ring) = (conv_taps - 1, shape.ring);
    for seq in &batch.seqs {
        let tentative = seq.rows.len() - seq.certain;
        assert!(tentative <= MAX_TENTATIVE, "{tentative} tentative rows");
    }

    // What came before a sequence's first row.
    let mut zeros = cpu.tensor(1, channels);
    values_mut(&mut zeros).fill(0.0);
    let zeros = values(&zeros);
    let mut conv = cpu.tensor(n, channels);
    let mut gates = cpu.tensor(n, 2 * value_heads);
    {
        let taps = weights
            .conv
            .storage::<Buffer>()
            .repacked(|taps| by_tap(taps, conv_taps));
        let (qkv, b, a) = (values(qkv), values(b), values(a));
        let (decays, dt_bias) = (values(&weights.decay), values(&weights.dt_bias));
        let (conv, gates) = (
            DisjointSlice::new(values_mut(&mut conv)),
            DisjointSlice::new(values_mut(&mut gates)),
        );
        // Heads of queries and keys are whole in a unit; values have none.
        let heads_a_unit = (CHANNELS / key_dim).clamp(1, 2 * key_heads);
        let head_units = (2 * key_heads).div_ceil(heads_a_unit);
        let value_units = (value_heads * value_dim).div_ceil(CHANNELS);
        let units = head_units + value_units;
        let scale = 1.0 / (key_dim as f32).sqrt();
        let factors = |head: usize| if head < key_heads { scale } else { 1.0 };
        let piece = |i: usize| {
            let (r, unit) = (i / units, i % units);
            let seq = batch
                .seqs
                .iter()
                .find(|s| s.rows.contains(&r))
                .expect("every row is a sequence's");
            let slot = slots.slots[seq.slot];
            let range = if unit < head_units {
                let first = unit * heads_a_unit;
                first * key_dim..(first + heads_a_unit).min(2 * key_heads) * key_dim
            } else {
                let first = 2 * key_heads * key_dim + (unit - head_units) * CHANNELS;
                first..(first + CHANNELS).min(channels)
            };
            let (mut rows, mut by_tap) = ([&zeros[..0]; MAX_TAPS], [&zeros[..0]; MAX_TAPS]);
            for j in 0..conv_taps {
                // Row `u` of those before the step and the step's own.
                let u = r - seq.rows.start + j;
                let row = if u >= past {
                    &qkv[(seq.rows.start + u - past) * channels..][..channels]
                } else if seq.is_new {
                    zeros
                } else {
                    let at = seq.slot * ring + (slot.start + seq.kept + u) % ring;
                    &slots.history[at * channels..][..channels]
                };
                rows[j] = &row[range.clone()];
                by_tap[j] = &taps[j * channels..][range.clone()];
            }
            // SAFETY: every unit of every row is visited once.
            let out = unsafe { conv.part(r * channels + range.start..r * channels + range.end) };
            let heads = (unit < head_units).then_some(Heads {
                dim: key_dim,
                factors: &factors,
            });
            cpu.isa.run(Convolve {
                rows,
                taps: by_tap,
                n_taps: conv_taps,
                first: range.start,
                out,
                heads,
            });
            if unit == 0 {
                // SAFETY: every row's first unit is visited once.
                let out = unsafe { gates.part(2 * r * value_heads..2 * (r + 1) * value_heads) };
                let heads = r * value_heads..(r + 1) * value_heads;
                let (a, b) = (&a[heads.clone()], &b[heads]);
                cpu.isa.run(Gates {
                    a,
                    b,
                    decays,
                    dt_bias,
                    out,
                });
            }
        };
        if n * channels * conv_taps < MIN_PARALLEL {
            (0..n * units).for_each(piece);
        } else {
            cpu.pool
                .each(n * units, 2, |_, range| range.for_each(piece));
        }
    }

    let mut out = cpu.tensor(n, value_heads * value_dim);
    let room = key_dim * COLUMNS;
    let mut rooms = cpu.tensor(cpu.pool.n_workers(), room);
    {
        let (conv, gates) = (values(&conv), values(&gates));
        let (out, rooms) = (
            DisjointSlice::new(values_mut(&mut out)),
            DisjointSlice::new(values_mut(&mut rooms)),
        );
        let Slots {
            slots,
            states,
            decays,
            keys,
            deltas,
            ..
        } = slots;
        let n_slots = slots.len();
        let states = DisjointSlice::new(states.of_mut::<f32>());
        let (decays, keys, deltas) = (
            DisjointSlice::new(decays),
            DisjointSlice::new(keys),
            DisjointSlice::new(deltas),
        );
        let units = value_heads * shape.blocks();
        let piece = |worker: usize, i: usize| {
            let seq = &batch.seqs[i / units];
            let (head, block) = (i % units / shape.blocks(), i % shape.blocks());
            let slot = slots[seq.slot];
            let n_replay = if seq.is_new {
                0
            } else {
                seq.kept.min(slot.n_updates)
            };
            let half = |half: usize| (half * n_slots + seq.slot) * MAX_TENTATIVE;
            let (old, new) = (half(slot.half), half(1 - slot.half));
            let columns = shape.columns(block);
            // SAFETY: the half that is replayed is only read; this head's block of
            // the state is this piece's; a worker's room is its own.
            let (replay, state, copy) = unsafe {
                let replay = Updates {
                    decays: decays.read(old * value_heads..(old + n_replay) * value_heads),
                    keys: keys.read(old * shape.keys()..(old + n_replay) * shape.keys()),
                    deltas: deltas.read(old * shape.deltas()..(old + n_replay) * shape.deltas()),
                };
                let at = (seq.slot * value_heads + head) * shape.state() + columns.start * key_dim;
                (
                    replay,
                    states.part(at..at + columns.len() * key_dim),
                    worker_scratch(&rooms, worker, room),
                )
            };
            cpu.isa.run(Recurrence {
                shape,
                rows: seq.rows.clone(),
                certain: seq.certain,
                head,
                block,
                replay,
                n_replay,
                is_new: seq.is_new,
                deltas: &deltas,
                first_delta: new * shape.deltas() + head * shape.width + columns.start,
                conv,
                gates,
                state,
                copy,
                out: &out,
            });
            if i.is_multiple_of(units) {
                for (t, r) in (seq.rows.start + seq.certain..seq.rows.end).enumerate() {
                    // SAFETY: each sequence's first piece alone writes these.
                    let (to_decays, to_keys) = unsafe {
                        (
                            decays.part((new + t) * value_heads..(new + t + 1) * value_heads),
                            keys.part((new + t) * shape.keys()..(new + t + 1) * shape.keys()),
                        )
                    };
                    to_decays.copy_from_slice(&gates[2 * r * value_heads..][..value_heads]);
                    to_keys.copy_from_slice(&conv[r * channels + shape.keys()..][..shape.keys()]);
                }
            }
        };
        let total = batch.seqs.len() * units;
        if n * value_heads * key_dim * value_dim < MIN_PARALLEL {
            (0..total).for_each(|i| piece(0, i));
        } else {
            cpu.pool.each(total, 1, |worker, range| {
                range.for_each(|i| piece(worker, i))
            });
        }
    }
    for seq in &batch.seqs {
        remember(slots, shape, seq, values(qkv));
    }
    out
}

/// Moves a slot's ring past the certain rows and adds the step's.
fn remember(slots: &mut Slots, shape: Shape, seq: &BatchSeq, qkv: &[f32]) {
    let (past, ring, channels) = (shape.spec.conv_taps - 1, shape.ring, shape.channels);
    let slot = &mut slots.slots[seq.slot];
    let history = &mut slots.history[seq.slot * ring * channels..][..ring * channels];
    if seq.is_new {
        history[..past * channels].fill(0.0);
        slot.start = 0;
    } else {
        slot.start += seq.kept;
    }
    slot.start = (slot.start + seq.certain) % ring;
    // Rows `certain ..` of those before the step and the step's own.
    for u in seq.certain.max(past)..past + seq.rows.len() {
        let to = (slot.start + u - seq.certain) % ring;
        let from = (seq.rows.start + u - past) * channels;
        history[to * channels..][..channels].copy_from_slice(&qkv[from..][..channels]);
    }
    slot.half = 1 - slot.half;
    slot.n_updates = seq.rows.len() - seq.certain;
}
