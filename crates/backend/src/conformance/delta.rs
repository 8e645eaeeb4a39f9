//! The gated delta rule, with rows that are taken back.

use super::{Noise, Pair, same};
use crate::{Backend, Batch, BatchSeq, Delta, DeltaSpec, DeltaWeights, MAX_TENTATIVE, Row, Tensor};
use std::ops::Range;

pub(super) const DELTA: &[DeltaSpec] = &[
    DeltaSpec {
        slots: 3,
        key_heads: 2,
        value_heads: 4,
        key_dim: 16,
        value_dim: 24,
        conv_taps: 4,
    },
    DeltaSpec {
        slots: 3,
        key_heads: 1,
        value_heads: 1,
        key_dim: 20,
        value_dim: 16,
        conv_taps: 2,
    },
    DeltaSpec {
        slots: 3,
        key_heads: 2,
        value_heads: 2,
        key_dim: 24,
        value_dim: 80,
        conv_taps: 3,
    },
    DeltaSpec {
        slots: 3,
        key_heads: 1,
        value_heads: 3,
        key_dim: 64,
        value_dim: 128,
        conv_taps: 4,
    },
];

/// Inputs of a gated-delta layer, by row.
pub(super) struct DeltaRows {
    channels: usize,
    heads: usize,
    qkv: Vec<f32>,
    b: Vec<f32>,
    a: Vec<f32>,
}

impl DeltaRows {
    fn new(noise: &mut Noise, spec: &DeltaSpec, n: usize) -> Self {
        let (channels, heads) = (spec.channels(), spec.value_heads);
        DeltaRows {
            channels,
            heads,
            qkv: noise.values(n * channels, 2.0),
            b: noise.values(n * heads, 4.0),
            a: noise.values(n * heads, 3.0),
        }
    }

    fn run(
        &self,
        b: &dyn Backend,
        state: &mut Delta,
        weights: &DeltaWeights,
        batch: &Batch,
        rows: &[Range<usize>],
    ) -> Tensor {
        let upload = |values: &[f32], cols: usize| {
            let picked: Vec<f32> = rows
                .iter()
                .flat_map(|r| &values[r.start * cols..r.end * cols])
                .copied()
                .collect();
            b.upload(batch.n_rows(), cols, &picked)
        };
        let (qkv, beta, a) = (
            upload(&self.qkv, self.channels),
            upload(&self.b, self.heads),
            upload(&self.a, self.heads),
        );
        b.gated_delta(state, weights, &qkv, &beta, &a, batch)
    }
}

pub(super) fn delta_weights(
    noise: &mut Noise,
    spec: &DeltaSpec,
) -> impl Fn(&dyn Backend) -> DeltaWeights {
    let (channels, taps, heads) = (spec.channels(), spec.conv_taps, spec.value_heads);
    let conv = noise.values(channels * taps, 1.0);
    let decay: Vec<f32> = noise
        .values(heads, 1.0)
        .iter()
        .map(|d| -d.abs() - 0.01)
        .collect();
    let dt_bias = noise.values(heads, 1.0);
    move |b| DeltaWeights {
        conv: b.upload(channels, taps, &conv),
        decay: b.upload(1, heads, &decay),
        dt_bias: b.upload(1, heads, &dt_bias),
    }
}

/// One sequence's share of a step: slot, rows, of which certain, and how many
/// tentative rows of its last step stay; new if absent.
pub(super) type DeltaShare = (usize, usize, usize, Option<usize>);

pub(super) fn delta_batch(shares: &[DeltaShare]) -> Batch {
    let mut batch = Batch::default();
    for &(slot, n, certain, kept) in shares {
        let first = batch.n_rows();
        batch.rows.extend((0..n as u32).map(Row::text));
        batch.seqs.push(BatchSeq {
            rows: first..first + n,
            slot,
            is_new: kept.is_none(),
            kept: kept.unwrap_or(0),
            certain,
            tables: Vec::new(),
        });
    }
    batch
}

pub(super) fn gated_delta_equals(got: &dyn Backend, want: &dyn Backend) {
    let pair = Pair { got, want };
    let mut noise = Noise(9);
    for spec in DELTA {
        let weights = pair.each(delta_weights(&mut noise, spec));
        let (mut state, mut state_want) = pair.each(|b| b.delta(*spec));
        // Every number of kept rows of a full step, then odd mixtures.
        let mut steps: Vec<Vec<DeltaShare>> = vec![
            vec![(0, 5, 5, None), (2, 1, 0, None)],
            vec![(1, 2, 1, None)],
        ];
        steps.extend((0..=MAX_TENTATIVE).map(|kept| {
            let last = if kept == 0 { 0 } else { MAX_TENTATIVE };
            vec![(0, MAX_TENTATIVE, 0, Some(kept.min(last)))]
        }));
        steps.extend([
            vec![(1, 1, 1, Some(1)), (2, 4, 1, Some(0))],
            vec![(2, 3, 2, Some(3)), (0, 40, 33, Some(9))],
            vec![(0, 1, 1, Some(7)), (1, 1, 0, Some(0)), (2, 17, 1, Some(1))],
            vec![(1, 3, 0, None), (0, 2, 2, Some(0)), (2, 1, 1, Some(16))],
            vec![(1, 1, 1, Some(2))],
        ]);
        let n_steps = steps.len();
        // Slot 1 as it is then goes on in slot 0, and in itself.
        steps.push(vec![(0, 3, 1, Some(0)), (1, 2, 2, Some(0))]);
        // Slot 0 with tentative rows goes on in slot 2, some of them kept, and in slot 1 what
        // was saved of it.
        steps.push(vec![(1, 1, 1, Some(0)), (0, 5, 1, Some(1))]);
        let moves = steps.len();
        steps.push(vec![
            (2, 2, 1, Some(3)),
            (1, 2, 1, Some(2)),
            (0, 1, 1, Some(4)),
        ]);
        steps.push(vec![(2, 1, 1, Some(1)), (1, 1, 1, Some(0))]);
        for (i, shares) in steps.iter().enumerate() {
            if i == n_steps {
                pair.got.delta_copy(&mut state, 1, 0);
                pair.want.delta_copy(&mut state_want, 1, 0);
            } else if i == moves {
                for (b, state) in [(pair.got, &mut state), (pair.want, &mut state_want)] {
                    b.delta_copy(state, 0, 2);
                    let bytes = b.delta_save(state, 0);
                    assert!(!b.delta_load(state, 1, &bytes[1..]), "not a slot's bytes");
                    assert!(b.delta_load(state, 1, &bytes), "what was saved is loaded");
                }
            }
            let batch = delta_batch(shares);
            let rows = DeltaRows::new(&mut noise, spec, batch.n_rows());
            let all = 0..batch.n_rows();
            let all = std::slice::from_ref(&all);
            let case = format!("{spec:?}, (slot, rows, certain, kept) {shares:?}");
            let got = rows.run(got, &mut state, &weights.0, &batch, all);
            let want = rows.run(want, &mut state_want, &weights.1, &batch, all);
            pair.compare_tensors("gated_delta", &case, &got, &want);
        }
    }
}

pub(super) fn gated_delta_rows_are_independent(b: &dyn Backend) {
    let mut noise = Noise(16);
    for spec in DELTA {
        let weights = delta_weights(&mut noise, spec)(b);
        let n = 60;
        let cols = spec.value_heads * spec.value_dim;
        let rows = DeltaRows::new(&mut noise, spec, n);
        let mut state = b.delta(*spec);
        let all = 0..n;
        let all = std::slice::from_ref(&all);
        let together = rows.run(
            b,
            &mut state,
            &weights,
            &delta_batch(&[(1, n, n, None)]),
            all,
        );
        let together = b.download(&together);
        for (certain, tentative) in [
            (1, 0),
            (3, 0),
            (0, 1),
            (0, 4),
            (1, 3),
            (1, MAX_TENTATIVE),
            (7, 5),
        ] {
            // Some rows of every step are taken back and come again, next to
            // another sequence's.
            let mut done = 0;
            let mut kept = None;
            while done < n {
                let certain = certain.min(n - done);
                let step = (certain + tentative).min(n - done);
                let other = (0, 2, 1, None);
                let batch = delta_batch(&[(2, step, certain, kept), other]);
                let y = rows.run(b, &mut state, &weights, &batch, &[done..done + step, 0..2]);
                let case = format!(
                    "{spec:?}, {certain} certain of rows {done}..{}",
                    done + step
                );
                let want = &together[done * cols..(done + step) * cols];
                same(
                    "gated_delta",
                    &case,
                    cols,
                    &b.download(&y)[..step * cols],
                    want,
                );
                let stay = if done + step == n {
                    step - certain
                } else {
                    noise.below(step - certain + 1)
                };
                // A step must make way.
                let stay = if certain + stay == 0 {
                    step - certain
                } else {
                    stay
                };
                kept = Some(stay);
                done += certain + stay;
            }
        }
    }
}
