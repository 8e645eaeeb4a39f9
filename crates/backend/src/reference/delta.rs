//! The gated delta rule, row by row and head by head, and what a slot remembers of it.

use super::sum_squares;
use crate::{BatchSeq, DeltaSpec, MAX_TENTATIVE, math};

/// One slot of a gated-delta layer.
#[derive(Clone)]
pub(super) struct DeltaSlot {
    /// `[nv, dk, dv]` after the certain rows of the last step.
    pub(super) state: Vec<f32>,
    /// Rows before the convolution: `taps - 1` that end where `state` does, then
    /// the tentative ones. `[taps - 1 + MAX_TENTATIVE, C]`
    pub(super) history: Vec<f32>,
    /// What the tentative rows did to the state, by row and head.
    pub(super) updates: Vec<Vec<Update>>,
}

impl DeltaSlot {
    /// Brings the slot to where the step of `seq` begins: empty if the sequence is new, and past
    /// the tentative rows of the last step that were kept. Returns what the convolution reads:
    /// the rows before the step's own `rows`, then those, `[taps - 1 + n, C]`.
    pub(super) fn begin(&mut self, spec: &DeltaSpec, seq: &BatchSeq, rows: &[f32]) -> Vec<f32> {
        let (channels, size) = (spec.channels(), spec.key_dim * spec.value_dim);
        if seq.is_new {
            self.state.fill(0.0);
            self.history.fill(0.0);
            self.updates.clear();
        }
        for updates in self.updates.drain(..).take(seq.kept) {
            for (head, update) in updates.iter().enumerate() {
                update.apply(&mut self.state[head * size..][..size]);
            }
        }
        let past = (spec.conv_taps - 1) * channels;
        let kept = seq.kept * channels;
        self.history.copy_within(kept..kept + past, 0);
        let mut before = self.history[..past].to_vec();
        before.extend_from_slice(rows);
        before
    }
}

impl DeltaSlot {
    /// State, history and updates, in little-endian order.
    pub(super) fn save(&self) -> Vec<u8> {
        let updates = self.updates.iter().flatten();
        let updates =
            updates.flat_map(|u| [u.decay].into_iter().chain(u.k.clone()).chain(u.d.clone()));
        let lasting = self.state.iter().chain(&self.history).copied();
        let values = lasting.chain(updates);
        values.flat_map(f32::to_le_bytes).collect()
    }

    /// Becomes what [`DeltaSlot::save`] has saved of a slot of `spec`, if `bytes` can be that.
    pub(super) fn load(&mut self, spec: &DeltaSpec, bytes: &[u8]) -> bool {
        let (values, odd) = bytes.as_chunks();
        let values: Vec<f32> = values.iter().map(|&v| f32::from_le_bytes(v)).collect();
        let n_lasting = self.state.len() + self.history.len();
        let update = 1 + spec.key_dim + spec.value_dim;
        let Some(updates) = values.get(n_lasting..).filter(|_| odd.is_empty()) else {
            return false;
        };
        let row = spec.value_heads * update;
        if !updates.len().is_multiple_of(row) || updates.len() / row > MAX_TENTATIVE {
            return false;
        }
        let (state, history) = values[..n_lasting].split_at(self.state.len());
        self.state.copy_from_slice(state);
        self.history.copy_from_slice(history);
        let head = |values: &[f32]| Update {
            decay: values[0],
            k: values[1..=spec.key_dim].to_vec(),
            d: values[1 + spec.key_dim..].to_vec(),
        };
        let rows = updates.chunks_exact(row);
        let rows = rows.map(|row| row.chunks_exact(update).map(head).collect());
        self.updates = rows.collect();
        true
    }
}

/// `S ← S decay + k dᵀ`
#[derive(Clone)]
pub(super) struct Update {
    decay: f32,
    k: Vec<f32>,
    d: Vec<f32>,
}

impl Update {
    fn apply(&self, state: &mut [f32]) {
        let dv = self.d.len();
        for (i, row) in state.chunks_exact_mut(dv).enumerate() {
            for (s, &d) in row.iter_mut().zip(&self.d) {
                *s = self.k[i].mul_add(d, *s * self.decay);
            }
        }
    }
}

/// `silu` of the convolution by `taps: [C, taps]` over the first rows of `rows: [_, C]`: `[C]`.
pub(super) fn convolve(spec: &DeltaSpec, taps: &[f32], rows: &[f32]) -> Vec<f32> {
    let (channels, n_taps) = (spec.channels(), spec.conv_taps);
    let channel = |c: usize| {
        let taps = &taps[c * n_taps..][..n_taps];
        let column = |j: usize| rows[j * channels + c];
        math::silu((0..n_taps).fold(0.0, |acc, j| taps[j].mul_add(column(j), acc)))
    };
    (0..channels).map(channel).collect()
}

/// One row of one head: `s ← s decay + k dᵀ` with `d = beta (v - (s decay)ᵀ k)`, then
/// `out = sᵀ q`. Query, key and value are the head's columns of `conv: [C]`; `s` is `[dk, dv]`.
pub(super) fn delta_head(
    spec: &DeltaSpec,
    head: usize,
    conv: &[f32],
    (decay, beta): (f32, f32),
    s: &mut [f32],
    out: &mut [f32],
) -> Update {
    let &DeltaSpec {
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        ..
    } = spec;
    let normed = |first: usize, factor: f32| -> Vec<f32> {
        let x = &conv[first..first + key_dim];
        let inverse = 1.0 / (sum_squares(x) + 1e-6).sqrt();
        x.iter().map(|x| x * inverse * factor).collect()
    };
    let key_head = head / (value_heads / key_heads);
    let q = normed(key_head * key_dim, 1.0 / (key_dim as f32).sqrt());
    let k = normed((key_heads + key_head) * key_dim, 1.0);
    let v = &conv[2 * key_heads * key_dim + head * value_dim..][..value_dim];
    let d: Vec<f32> = (0..value_dim)
        .map(|j| {
            let sum = (0..key_dim).fold(0.0, |acc: f32, i| {
                (s[i * value_dim + j] * decay).mul_add(k[i], acc)
            });
            (v[j] - sum) * beta
        })
        .collect();
    let update = Update { decay, k, d };
    update.apply(s);
    for (j, out) in out.iter_mut().enumerate() {
        *out = (0..key_dim).fold(0.0, |acc: f32, i| s[i * value_dim + j].mul_add(q[i], acc));
    }
    update
}
