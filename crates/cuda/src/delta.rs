//! The gated delta rule (kernels/delta.cu).

use crate::driver::{Args, Grid, two};
use crate::memory::{Block, address};
use crate::{Cuda, Kernel};
use backend::{Batch, Delta, DeltaSpec, DeltaWeights, MAX_TENTATIVE, Tensor};

/// One layer's states.
struct States {
    state: Block,
    history: Block,
    updates: Block,
}

/// Blocks that share a head's columns.
fn shares(value_dim: usize) -> usize {
    if value_dim.is_multiple_of(32) { 4 } else { 1 }
}

pub(crate) fn delta(cuda: &Cuda, spec: DeltaSpec) -> Delta {
    assert!(
        (2..=8).contains(&spec.conv_taps) && spec.value_dim <= 256 && spec.key_dim <= 256,
        "2 to 8 taps and heads of at most 256: {spec:?}"
    );
    let block = |values: usize| {
        Block::zeroed(
            &cuda.driver,
            4 * spec.slots * values,
            "memory for recurrent states",
        )
    };
    let DeltaSpec {
        value_heads,
        key_dim,
        value_dim,
        conv_taps,
        ..
    } = spec;
    Delta {
        spec,
        storage: Box::new(States {
            state: block(value_heads * key_dim * value_dim),
            history: block((conv_taps - 1 + MAX_TENTATIVE) * spec.channels()),
            updates: block(
                MAX_TENTATIVE * value_heads * (shares(value_dim) * (1 + key_dim) + value_dim),
            ),
        }),
    }
}

/// `of` are the projections `qkv`, `b` and `a`.
pub(crate) fn gated_delta(
    cuda: &Cuda,
    delta: &mut Delta,
    weights: &DeltaWeights,
    of: [&Tensor; 3],
    batch: &Batch,
) -> Tensor {
    let [qkv, b, a] = of;
    let spec = delta.spec;
    let DeltaSpec {
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        conv_taps,
        ..
    } = spec;
    let (n, channels) = (batch.n_rows(), spec.channels());
    assert_eq!(
        (qkv.cols(), b.cols(), a.cols()),
        (channels, value_heads, value_heads),
        "columns of the projections"
    );
    assert!(
        batch
            .seqs
            .iter()
            .all(|s| s.rows.len() - s.certain <= MAX_TENTATIVE),
        "at most {MAX_TENTATIVE} tentative rows"
    );
    let states = delta
        .storage
        .downcast_ref::<States>()
        .expect("memory of this backend");
    let words = [
        states.state.address,
        states.history.address,
        states.updates.address,
        cuda.batch(batch),
        two(key_heads, value_heads),
        two(key_dim, value_dim),
        channels as u64,
    ];
    // As many as keep a column's part in registers, and a block in 1024 threads.
    let parts = if value_dim <= 128 { 8 } else { 4 };
    let shares = shares(value_dim);
    let threads = parts * (value_dim / shares).next_multiple_of(8);
    let kernel = |name| {
        let mut kernel = Kernel::new("delta", name);
        kernel.defines.extend([
            ("DK", key_dim),
            ("DV", value_dim),
            ("PARTS", parts),
            ("SHARES", shares),
            ("TAPS", conv_taps),
            ("THREADS", threads),
        ]);
        kernel
    };
    let mixed = cuda.tensor(n, channels);
    let gates = cuda.arena.buffer(8 * n * value_heads);
    let y = cuda.tensor(n, value_heads * value_dim);
    let args = Args::default()
        .words(&words)
        .ptr(address(qkv))
        .ptr(address(&weights.conv))
        .ptr(address(&mixed))
        .ptr(address(b))
        .ptr(address(a))
        .ptr(address(&weights.decay))
        .ptr(address(&weights.dt_bias))
        .ptr(gates.address);
    let seqs = batch.seqs.len();
    let blocks = channels.div_ceil(key_dim);
    cuda.launch(
        &kernel("delta_conv"),
        Grid::rect(blocks, seqs, key_dim.next_multiple_of(32)),
        args,
    );
    let args = Args::default()
        .words(&words)
        .ptr(address(&mixed))
        .ptr(gates.address)
        .ptr(address(&y));
    cuda.launch(
        &kernel("delta_rule"),
        Grid::rect(value_heads * shares, seqs, threads),
        args,
    );
    y
}
