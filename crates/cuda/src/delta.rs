//! The gated delta rule (kernels/delta.cu).

use crate::args;
use crate::driver::{Address, Args, Grid};
use crate::elementwise::{norm_alone, number};
use crate::fuse::{Deferred, Norm};
use crate::memory::{Block, Half, address};
use crate::pack::TILE;
use crate::{Cuda, Kernel};
use backend::{Activation, Batch, Delta, DeltaSpec, DeltaWeights, MAX_TENTATIVE, Tensor};
use std::sync::Arc;

/// Memory for how many of the blocks that share a value head or a key head are done.
pub(crate) const ARRIVALS_BYTES: usize = 64 << 10;

/// Rows of a step that are few enough for one kernel.
const FEW_ROWS: usize = 16;

/// Rows whose convolution is a block's, where they are more.
pub(crate) const RUN: usize = 32;

/// Bytes of shared memory that `delta_fused` asks for, and those that it declares.
fn shared_of_few(spec: &DeltaSpec, parts: usize, width: usize, rows: usize) -> (usize, usize) {
    let side = spec.key_dim.div_ceil(parts).next_multiple_of(4) + 4;
    let row = 2 * side * parts + (width + 2).next_multiple_of(4);
    let raw = 2 * spec.key_dim + width;
    let update = side * parts + (width + 1).next_multiple_of(4);
    (
        4 * (rows * row + (spec.conv_taps - 1 + rows) * raw),
        4 * MAX_TENTATIVE * update,
    )
}

/// A step of the recurrence, of few rows, that waits for what is made of it.
pub(crate) struct Rule {
    launch: (Kernel, Grid),
    args: Args,
    /// What it reads of the projections, which blocks may do after others are done.
    reads: [Address; 3],
    pub(crate) y: Address,
    value_dim: usize,
    pub(crate) norm: Option<Norm>,
    gate: Option<(Address, Arc<Half>, Activation)>,
}

impl Rule {
    /// Takes the norm of its heads along, if it can.
    pub(crate) fn take_norm(&mut self, norm: &Norm) -> bool {
        let fits = norm.x == self.y
            && norm.head_dim == self.value_dim
            && self.value_dim.is_multiple_of(TILE)
            && norm.weight != 0
            && self.norm.is_none()
            && !self.reads.contains(&norm.y);
        if fits {
            self.norm = Some(*norm);
        }
        fits
    }

    /// Takes `gate = activation(gate) x` along, `x` being the norm, if it can.
    pub(crate) fn take_gate(
        &mut self,
        [gate, x]: [Address; 2],
        half: &Arc<Half>,
        activation: Activation,
    ) -> bool {
        let at = half.address();
        let fits = self.norm.is_some_and(|norm| norm.y == x)
            && self.gate.is_none()
            && !self.reads.contains(&at)
            && at != self.y;
        if fits {
            self.gate = Some((gate, half.clone(), activation));
        }
        fits
    }

    /// Its kernels.
    pub(crate) fn launches(self) -> Vec<(Kernel, Grid, Args)> {
        let mut epilogue = args::GatedNormEpilogue::default();
        let mut alone = None;
        match (self.norm, &self.gate) {
            (Some(norm), Some((gate, half, activation))) => {
                epilogue = args::GatedNormEpilogue {
                    weight: norm.weight,
                    n: norm.y,
                    gate: *gate,
                    f16: half.args(),
                    eps: norm.eps,
                    activation: number(*activation) as i32,
                };
            }
            (norm, _) => alone = norm.as_ref().map(norm_alone),
        }
        let (kernel, grid) = self.launch;
        let rule = (kernel, grid, self.args.of(&epilogue));
        [Some(rule), alone].into_iter().flatten().collect()
    }
}

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

/// Copies a slot.
pub(crate) fn copy(cuda: &Cuda, delta: &Delta, from: usize, to: usize) {
    let states = delta.storage.downcast_ref::<States>();
    let states = states.expect("memory of this backend");
    for block in [&states.state, &states.history, &states.updates] {
        let bytes = block.bytes / delta.spec.slots;
        let at = |slot: usize| block.address + (slot * bytes) as Address;
        cuda.driver.copy(at(to), at(from), bytes);
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
    let memory = args::Delta {
        state: states.state.address,
        history: states.history.address,
        updates: states.updates.address,
        batch: cuda.batch(batch),
        nk: key_heads as i32,
        nv: value_heads as i32,
        dk: key_dim as i32,
        dv: value_dim as i32,
        channels: channels as i32,
    };
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
            ("COLUMN_SPLITS", shares),
            ("TAPS", conv_taps),
            ("THREADS", threads),
        ]);
        kernel
    };
    let y = cuda.tensor(n, value_heads * value_dim);
    let seqs = batch.seqs.len();
    let args = Args::default().of(&memory).ptr(address(qkv));
    let args = args.ptr(address(&weights.conv));
    let projections = [b, a, &weights.decay, &weights.dt_bias].map(address);
    let (shared, declared) = shared_of_few(&spec, parts, value_dim / shares, n);
    let fits = 4 * seqs * (key_heads + value_heads) <= ARRIVALS_BYTES
        && shared + declared + 1024 <= cuda.driver.shared;
    if n <= FEW_ROWS && fits {
        let args = projections.into_iter().fold(args, Args::ptr);
        let grid = Grid {
            shared,
            ..Grid::rect(value_heads * shares, seqs, threads)
        };
        // A norm of heads and a gate may follow.
        cuda.driver.defer(Deferred::Rule(Rule {
            launch: (kernel("delta_fused"), grid),
            args: args.ptr(address(&y)).ptr(cuda.arrivals.address),
            reads: [qkv, b, a].map(address),
            y: address(&y),
            value_dim,
            norm: None,
            gate: None,
        }));
        return y;
    }
    let mixed = cuda.tensor(n, channels);
    let gates = cuda.arena.buffer(8 * n * value_heads);
    let args = projections
        .into_iter()
        .fold(args.ptr(address(&mixed)), Args::ptr)
        .ptr(gates.address);
    let longest = batch.seqs.iter().map(|s| s.rows.len()).max();
    let runs = longest.unwrap_or(0).div_ceil(RUN);
    cuda.launch(
        &kernel("delta_conv"),
        Grid::rect(
            channels.div_ceil(key_dim),
            runs * seqs,
            key_dim.next_multiple_of(32),
        ),
        args,
    );
    let args = Args::default()
        .of(&memory)
        .ptr(address(&mixed))
        .ptr(gates.address)
        .ptr(address(&y))
        .ptr(address(qkv));
    cuda.launch(
        &kernel("delta_rule"),
        Grid::rect(value_heads * shares, seqs, threads),
        args,
    );
    y
}
