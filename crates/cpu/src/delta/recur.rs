//! The recurrence of the gated delta rule, over blocks of a state's columns.
//!
//! Columns of a state never meet, so a head is cut into blocks of 32 columns, `[dk][32]`, which
//! stay in the first-level cache while all rows of the step pass over them: memory is read once
//! a step, not once a row.
//!
//! A row needs two passes over its block, one for `Sᵀk` and one that writes `S`
//! and adds up `Sᵀq`; the second pass of a row also makes the next row's first,
//! on the state it has in hand. That one needs `S` times the next row's decay, so
//! that is what is written, until the step's last row.
//!
//! Rows that may be rolled back run on a copy. What they did is kept as decays,
//! keys and `d`, and the kept ones are replayed at the start of the next step.

use super::state::{COLUMNS, LayerState, Shape, Slot};
use crate::arch::{Kernel, Lanes, load, store};
use crate::device::Device;
use crate::memory::{values, values_mut};
use crate::pool::{DisjointSlice, worker_scratch};
use backend::{Batch, BatchSeq, MAX_TENTATIVE, Tensor};
use std::ops::Range;

/// Products below which handing out work costs more than it saves.
const MIN_PARALLEL: usize = 32 << 10;

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

/// Some updates of one slot.
#[derive(Clone, Copy)]
struct Updates<'a> {
    decays: &'a [f32],
    keys: &'a [f32],
    deltas: &'a [f32],
}

/// Passes one block of one head through the step's rows.
struct Recurrence<'a> {
    shape: Shape,
    /// Rows of the step.
    rows: Range<usize>,
    /// How many of the rows, from the first on, are certain.
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
    /// Scratch memory for a copy of `state`.
    copy: &'a mut [f32],
    out: &'a DisjointSlice<'a, f32>,
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

impl<'a> Recurrence<'a> {
    /// The head of keys and queries that this head of values shares.
    #[inline(always)]
    fn key_head(&self) -> usize {
        self.head / (self.shape.spec.value_heads / self.shape.spec.key_heads)
    }

    /// Columns `head * key_dim ..` of row `r`'s channels, heads of queries first.
    #[inline(always)]
    fn key_columns(&self, r: usize, head: usize) -> &'a [f32] {
        let key_dim = self.shape.spec.key_dim;
        &self.conv[r * self.shape.channels + head * key_dim..][..key_dim]
    }

    #[inline(always)]
    fn query(&self, r: usize) -> &'a [f32] {
        self.key_columns(r, self.key_head())
    }

    #[inline(always)]
    fn key(&self, r: usize) -> &'a [f32] {
        self.key_columns(r, self.shape.spec.key_heads + self.key_head())
    }

    #[inline(always)]
    fn decay(&self, r: usize) -> f32 {
        self.gates[2 * r * self.shape.spec.value_heads + self.head]
    }

    #[inline(always)]
    fn beta(&self, r: usize) -> f32 {
        self.gates[(2 * r + 1) * self.shape.spec.value_heads + self.head]
    }

    /// The block's columns without padding.
    #[inline(always)]
    fn columns(&self) -> Range<usize> {
        let columns = self.shape.columns(self.block);
        columns.start..columns.end.min(self.shape.spec.value_dim)
    }

    /// The whole step on `R` vectors of columns.
    #[inline(always)]
    fn block<L: Lanes, const R: usize>(mut self) {
        let (value_heads, value_dim) = (self.shape.spec.value_heads, self.shape.spec.value_dim);
        if self.is_new {
            self.state.fill(0.0);
        }
        if self.n_replay > 0 {
            self.replay::<L, R>();
        }
        let mut sums = self.first_sums::<L, R>();
        let columns = self.columns();
        for (i, r) in self.rows.clone().enumerate() {
            let d = self.delta::<L, R>(r, &sums);
            if i >= self.certain {
                self.keep_delta(i - self.certain, &d);
            }
            let outputs = self.pass(i, r, d, &mut sums);
            let at = (r * value_heads + self.head) * value_dim;
            // SAFETY: this head's columns of this row are this block's.
            let out = unsafe { self.out.part(at + columns.start..at + columns.end) };
            for (out, o) in out.chunks_mut(16).zip(outputs) {
                store(o, out);
            }
        }
    }

    /// `(S decay)ᵀk` of the step's first row.
    #[inline(always)]
    fn first_sums<L: Lanes, const R: usize>(&self) -> [L; R] {
        let mut sums = [L::splat(0.0); R];
        if let Some(r) = self.rows.clone().next() {
            let k = self.key(r);
            let decay = L::splat(self.decay(r));
            for (s, &k) in self.state.chunks_exact(16 * R).zip(k) {
                let k = L::splat(k);
                for (i, s) in s.as_chunks::<16>().0.iter().enumerate() {
                    sums[i] = (L::load(s) * decay).mul_add(k, sums[i]);
                }
            }
        }
        sums
    }

    /// `d = (v - Sᵀk) beta` of row `r`.
    #[inline(always)]
    fn delta<L: Lanes, const R: usize>(&self, r: usize, sums: &[L; R]) -> [L; R] {
        let spec = &self.shape.spec;
        let first_value = 2 * spec.key_heads * spec.key_dim + self.head * spec.value_dim;
        let values = &self.conv[r * self.shape.channels + first_value..][..spec.value_dim];
        let values = &values[self.columns()];
        let beta = L::splat(self.beta(r));
        let mut d = [L::splat(0.0); R];
        for (c, d) in d.iter_mut().enumerate() {
            // A value absent from the last vector leaves its padding at 0.
            let v = values
                .get(16 * c..(16 * c + 16).min(values.len()))
                .map_or(L::splat(0.0), load::<L>);
            *d = (v - sums[c]) * beta;
        }
        d
    }

    /// Keeps `d` of tentative row `t`, for a replay.
    #[inline(always)]
    fn keep_delta<L: Lanes, const R: usize>(&self, t: usize, d: &[L; R]) {
        let at = self.first_delta + t * self.shape.deltas();
        // SAFETY: this head's block of this slot is this kernel's.
        let to = unsafe { self.deltas.part(at..at + 16 * R) };
        for (to, d) in to.as_chunks_mut::<16>().0.iter_mut().zip(d) {
            d.store(to);
        }
    }

    /// The second pass of row `r`, the step's row number `i`: returns its output and leaves the
    /// next row's `Sᵀk` in `sums`.
    #[inline(always)]
    fn pass<L: Lanes, const R: usize>(
        &mut self,
        i: usize,
        r: usize,
        d: [L; R],
        sums: &mut [L; R],
    ) -> [L; R] {
        let next = (r + 1 < self.rows.end).then(|| (self.decay(r + 1), self.key(r + 1)));
        let pass = Pass {
            decay: self.decay(r),
            k: self.key(r),
            q: self.query(r),
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
        unsafe {
            match (decayed, next.is_some(), plain) {
                (false, true, false) => pass.run::<false, true, DECAYED>(from, to, sums),
                (false, true, true) => pass.run::<false, true, PLAIN>(from, to, sums),
                (false, false, true) => pass.run::<false, false, PLAIN>(from, to, sums),
                (false, false, false) => pass.run::<false, false, NONE>(from, to, sums),
                (true, true, false) => pass.run::<true, true, DECAYED>(from, to, sums),
                (true, true, true) => pass.run::<true, true, PLAIN>(from, to, sums),
                (true, false, true) => pass.run::<true, false, PLAIN>(from, to, sums),
                (true, false, false) => pass.run::<true, false, NONE>(from, to, sums),
            }
        }
    }

    /// `S ← S decay + k dᵀ` for each kept row of the last step.
    #[inline(always)]
    fn replay<L: Lanes, const R: usize>(&mut self) {
        let (shape, key_head) = (self.shape, self.key_head());
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

/// What all blocks of a step share. Work is cut in *units*: a block of a head of a sequence.
struct Blocks<'a> {
    device: &'a Device,
    shape: &'a Shape,
    slots: &'a [Slot],
    states: DisjointSlice<'a, f32>,
    decays: DisjointSlice<'a, f32>,
    keys: DisjointSlice<'a, f32>,
    deltas: DisjointSlice<'a, f32>,
    conv: &'a [f32],
    gates: &'a [f32],
    scratch: DisjointSlice<'a, f32>,
    out: DisjointSlice<'a, f32>,
}

impl Blocks<'_> {
    /// Where the updates of a slot start in a half, in rows.
    fn half(&self, half: usize, slot: usize) -> usize {
        (half * self.slots.len() + slot) * MAX_TENTATIVE
    }

    /// Passes block `block` of head `head` through the rows of `seq`, as `worker`.
    ///
    /// # Safety
    ///
    /// Every block is visited once.
    unsafe fn block(&self, worker: usize, seq: &BatchSeq, head: usize, block: usize) {
        let shape = self.shape;
        let (value_heads, key_dim) = (shape.spec.value_heads, shape.spec.key_dim);
        let slot = self.slots[seq.slot];
        let n_replay = if seq.is_new {
            0
        } else {
            seq.kept.min(slot.n_updates)
        };
        let old = self.half(slot.half, seq.slot);
        let new = self.half(1 - slot.half, seq.slot);
        let end = old + n_replay;
        let columns = shape.columns(block);
        // SAFETY: the half that is replayed is only read.
        let replay = unsafe {
            Updates {
                decays: self.decays.read(old * value_heads..end * value_heads),
                keys: self.keys.read(old * shape.keys()..end * shape.keys()),
                deltas: self.deltas.read(old * shape.deltas()..end * shape.deltas()),
            }
        };
        let at = (seq.slot * value_heads + head) * shape.state() + columns.start * key_dim;
        // SAFETY: this head's block of the state is visited once, as promised; a worker's
        // scratch is its own.
        let (state, copy) = unsafe {
            (
                self.states.part(at..at + columns.len() * key_dim),
                worker_scratch(&self.scratch, worker, key_dim * COLUMNS),
            )
        };
        self.device.isa.run(Recurrence {
            shape: *shape,
            rows: seq.rows.clone(),
            certain: seq.certain,
            head,
            block,
            replay,
            n_replay,
            is_new: seq.is_new,
            deltas: &self.deltas,
            first_delta: new * shape.deltas() + head * shape.width + columns.start,
            conv: self.conv,
            gates: self.gates,
            state,
            copy,
            out: &self.out,
        });
    }

    /// Keeps decays and keys of the tentative rows of `seq`, for a replay.
    ///
    /// # Safety
    ///
    /// Every sequence is visited once.
    unsafe fn keep_updates(&self, seq: &BatchSeq) {
        let (shape, value_heads) = (self.shape, self.shape.spec.value_heads);
        let keys = shape.keys();
        let first = self.half(1 - self.slots[seq.slot].half, seq.slot);
        for (t, r) in (seq.rows.start + seq.certain..seq.rows.end).enumerate() {
            let to = first + t;
            // SAFETY: each sequence's rows are written once, as promised.
            let (to_decays, to_keys) = unsafe {
                (
                    self.decays.part(to * value_heads..(to + 1) * value_heads),
                    self.keys.part(to * keys..(to + 1) * keys),
                )
            };
            to_decays.copy_from_slice(&self.gates[2 * r * value_heads..][..value_heads]);
            to_keys.copy_from_slice(&self.conv[r * shape.channels + keys..][..keys]);
        }
    }
}

/// Runs the recurrence over all rows of a step: `[n, nv dv]`.
pub(super) fn recur(
    device: &Device,
    shape: &Shape,
    state: &mut LayerState,
    (conv, gates): (&Tensor, &Tensor),
    batch: &Batch,
) -> Tensor {
    let (spec, n) = (&shape.spec, batch.n_rows());
    let mut out = device.tensor(n, spec.value_heads * spec.value_dim);
    let mut scratch = device.tensor(device.pool.n_workers(), spec.key_dim * COLUMNS);
    let blocks = Blocks {
        device,
        shape,
        slots: &state.slots,
        states: DisjointSlice::new(state.states.elements_mut()),
        decays: DisjointSlice::new(&mut state.decays),
        keys: DisjointSlice::new(&mut state.keys),
        deltas: DisjointSlice::new(&mut state.deltas),
        conv: values(conv),
        gates: values(gates),
        scratch: DisjointSlice::new(values_mut(&mut scratch)),
        out: DisjointSlice::new(values_mut(&mut out)),
    };
    let units = spec.value_heads * shape.blocks();
    let unit = |worker: usize, i: usize| {
        let (seq, i) = (&batch.seqs[i / units], i % units);
        // SAFETY: every block of every sequence is visited once, and so is its first.
        unsafe {
            blocks.block(worker, seq, i / shape.blocks(), i % shape.blocks());
            if i == 0 {
                blocks.keep_updates(seq);
            }
        }
    };
    let total = batch.seqs.len() * units;
    if n * spec.value_heads * spec.key_dim * spec.value_dim < MIN_PARALLEL {
        (0..total).for_each(|i| unit(0, i));
    } else {
        device.pool.each(total, 1, |worker, range| {
            range.for_each(|i| unit(worker, i));
        });
    }
    out
}
