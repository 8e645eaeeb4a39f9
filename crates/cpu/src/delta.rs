//! The gated delta rule and the convolution in front of it.
//!
//! Two jobs. The first ([`prepare`]) makes what rows have ready before the recurrence:
//! convolved channels, normalized queries and keys, decays and gates. The second ([`recur`]) runs
//! the recurrence over blocks of each head's state. [`state`] is the layer's memory.

mod prepare;
mod recur;
mod state;

pub(crate) use state::{copy, delta, load, save};

use crate::device::Device;
use crate::memory::values;
use backend::{Batch, Delta, DeltaWeights, MAX_TENTATIVE, Tensor};
use state::{LayerState, Shape};

/// One gated-delta layer between its projections: `[n, nv dv]`.
///
/// # Panics
///
/// If shapes differ from the layer's, or a sequence has more than [`MAX_TENTATIVE`] tentative
/// rows.
pub(crate) fn gated_delta(
    device: &Device,
    delta: &mut Delta,
    weights: &DeltaWeights,
    qkv: &Tensor,
    b: &Tensor,
    a: &Tensor,
    batch: &Batch,
) -> Tensor {
    let spec = delta.spec;
    let shape = Shape::new(spec);
    let (channels, n) = (shape.channels, batch.n_rows());
    assert_eq!(
        (qkv.cols(), b.cols(), a.cols()),
        (channels, spec.value_heads, spec.value_heads),
        "columns of the projections"
    );
    assert_eq!(
        (qkv.rows(), b.rows(), a.rows()),
        (n, n, n),
        "a row for each of the step's"
    );
    assert_eq!(
        (weights.conv.rows(), weights.conv.cols()),
        (channels, spec.conv_taps),
        "taps of each channel"
    );
    for seq in &batch.seqs {
        let tentative = seq.rows.len() - seq.certain;
        assert!(tentative <= MAX_TENTATIVE, "{tentative} tentative rows");
    }
    let state = delta
        .storage
        .downcast_mut::<LayerState>()
        .expect("memory of this backend");
    let (conv, gates) = prepare::prepare(device, &shape, state, weights, (qkv, b, a), batch);
    let out = recur::recur(device, &shape, state, (&conv, &gates), batch);
    for seq in &batch.seqs {
        state.remember(&shape, seq, values(qkv));
    }
    out
}
