//! The gated delta rule (kernels/delta.cu).

use crate::args;
use crate::args::{Address, Args};
use crate::constants::{CHUNK_ROWS, ROWS_AHEAD};
use crate::elementwise::number;
use crate::launch::{ARRIVALS_BYTES, Device, Launch};
use crate::machine::Grid;
use crate::memory::Block;
use crate::record::{Bound, Rows};
use crate::{Cuda, Kernel};
use backend::{Activation, Delta, DeltaSpec, MAX_TENTATIVE};
use fusion::{Kind, Op};
use std::sync::Arc;

/// Rows of a step that are few enough for one kernel.
const FEW_ROWS: usize = 16;

/// Columns of values of a block.
fn columns(spec: &DeltaSpec) -> usize {
    spec.value_dim / shares(spec.value_dim)
}

/// Floats of a key in shared memory (kernels/delta.cu: KEY_FLOATS).
fn key_floats(spec: &DeltaSpec) -> usize {
    let parts = parts(spec.value_dim);
    (spec.key_dim.div_ceil(parts).next_multiple_of(4) + 4) * parts
}

/// Floats of a row in shared memory (kernels/delta.cu: ROW_FLOATS).
fn row_floats(spec: &DeltaSpec) -> usize {
    2 * key_floats(spec) + (columns(spec) + 2).next_multiple_of(4)
}

/// Bytes of the kernels' RecurrenceMemory in a block of so many threads.
fn recurrence_memory(spec: &DeltaSpec, threads: usize) -> usize {
    let update = key_floats(spec) + (columns(spec) + 1).next_multiple_of(4);
    let sums = 2 * threads * (1 + output_rows(threads));
    4 * sums.max(MAX_TENTATIVE * update)
}

/// Bytes of shared memory that `delta_fused` declares, at most: its RecurrenceMemory and two flags, of which alignment
/// to 16 makes 32 bytes. A test holds this to what is compiled, for blocks are spread by it.
pub(crate) fn declared_by_few(spec: &DeltaSpec) -> usize {
    recurrence_memory(spec, threads(spec)) + 2 * 16
}

/// Bytes of shared memory that `delta_fused` asks for.
fn shared_of_few(spec: &DeltaSpec, rows: usize) -> usize {
    let raw = 2 * spec.key_dim + columns(spec);
    4 * (rows * row_floats(spec) + (spec.conv_taps - 1 + rows) * raw)
}

/// One layer's states.
pub(crate) struct States {
    spec: DeltaSpec,
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
            &cuda.device.driver,
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
        storage: Box::new(Arc::new(States {
            spec,
            state: block(value_heads * key_dim * value_dim),
            history: block((conv_taps - 1 + MAX_TENTATIVE) * spec.channels()),
            updates: block(
                MAX_TENTATIVE * value_heads * (shares(value_dim) * (1 + key_dim) + value_dim),
            ),
        })),
    }
}

/// A layer's states on the device.
pub(crate) fn states(delta: &Delta) -> &Arc<States> {
    let states = delta.storage.downcast_ref();
    states.expect("memory of this backend")
}

/// Copies a slot.
pub(crate) fn copy(cuda: &Cuda, delta: &Delta, from: usize, to: usize) {
    cuda.flush();
    let (from, to) = (slot_blocks(delta, from), slot_blocks(delta, to));
    for ((from, bytes), (to, _)) in from.into_iter().zip(to) {
        cuda.device.driver.copy(to, from, bytes);
    }
}

/// Where the parts of a slot lie, and the bytes of each: state, history and updates.
fn slot_blocks(delta: &Delta, slot: usize) -> [(Address, usize); 3] {
    let states = states(delta);
    [&states.state, &states.history, &states.updates].map(|block| {
        let bytes = block.bytes / delta.spec.slots;
        (block.address + (slot * bytes) as Address, bytes)
    })
}

/// The bytes of a slot.
pub(crate) fn save(cuda: &Cuda, delta: &Delta, slot: usize) -> Vec<u8> {
    cuda.flush();
    let mut saved = Vec::new();
    for (from, bytes) in slot_blocks(delta, slot) {
        let first = saved.len();
        saved.resize(first + bytes, 0);
        cuda.device.driver.read(&mut saved[first..], from);
    }
    saved
}

/// Makes a slot what [`save`] has saved, if `bytes` are as many.
pub(crate) fn load(cuda: &Cuda, delta: &Delta, slot: usize, mut bytes: &[u8]) -> bool {
    let blocks = slot_blocks(delta, slot);
    if blocks.iter().map(|(_, n)| n).sum::<usize>() != bytes.len() {
        return false;
    }
    cuda.flush();
    for (to, n) in blocks {
        let (part, rest) = bytes.split_at(n);
        cuda.device.driver.write(to, part);
        bytes = rest;
    }
    true
}

/// Parts of a column, as many as keep a thread's part in registers, and a block in 1024 threads.
fn parts(value_dim: usize) -> usize {
    if value_dim <= 128 { 8 } else { 4 }
}

/// Threads of a block that has a share of a head's columns, a part of a column each.
fn threads(spec: &DeltaSpec) -> usize {
    parts(spec.value_dim) * (spec.value_dim / shares(spec.value_dim)).next_multiple_of(8)
}

/// Parts of a column that a thread of `delta_rule` has: two, where its registers have room for them and two warps are
/// left. Then half as many threads exchange half as many sums through shared memory.
pub(crate) fn parts_of_rule(spec: &DeltaSpec) -> usize {
    let has_two = parts(spec.value_dim) == 8 && spec.key_dim <= 128 && threads(spec) >= 128;
    if has_two { 2 } else { 1 }
}

/// Kernel `name` of kernels/delta.cu, whose threads have so many parts of a column each.
pub(crate) fn kernel(spec: &DeltaSpec, name: &'static str, thread_parts: usize) -> Kernel {
    let threads = threads(spec) / thread_parts;
    let mut kernel = Kernel::new("delta", name);
    kernel.defines.extend([
        ("DK", spec.key_dim),
        ("DV", spec.value_dim),
        ("PARTS", parts(spec.value_dim)),
        ("THREAD_PARTS", thread_parts),
        ("COLUMN_SPLITS", shares(spec.value_dim)),
        ("TAPS", spec.conv_taps),
        ("THREADS", threads),
        ("OUTPUT_ROWS", output_rows(threads)),
    ]);
    kernel
}

/// Rows whose results a block of so many threads adds up and stores together: 2, 4 or 8, as its shared memory has room
/// for.
fn output_rows(threads: usize) -> usize {
    1 << (2048 / threads).clamp(2, 8).ilog2()
}

/// Bytes of shared memory that `delta_fused` asks for, for the rows of a step, if they are few
/// enough for it.
fn fused(device: &Device, spec: &DeltaSpec, rows: &Rows) -> Option<usize> {
    let shared = shared_of_few(spec, rows.n);
    let fits = 4 * rows.seqs * (spec.key_heads + spec.value_heads) <= ARRIVALS_BYTES
        && shared + declared_by_few(spec) + 1024 <= device.driver.shared;
    (rows.n <= FEW_ROWS && fits).then_some(shared)
}

/// Whether one kernel computes the rows of a step, which can go on with a norm and a gate.
pub(crate) fn is_single(device: &Device, spec: &DeltaSpec, rows: &Rows) -> bool {
    fused(device, spec, rows).is_some()
}

/// Launches the gated delta rule and, perhaps, the norm and the gate that follow.
pub(crate) fn gated_delta(l: &Launch<'_>, op: &Op) {
    let (state, batch, gate) = match op.kind {
        Kind::Delta { state, batch, .. } => (state, batch, None),
        Kind::DeltaNormGlu {
            state,
            batch,
            eps,
            activation,
            ..
        } => (state, batch, Some((eps, activation))),
        _ => unreachable!("called for the delta rule"),
    };
    let Bound::Delta(states) = l.bound(state) else {
        unreachable!("recorded as recurrent states");
    };
    let (rows, spec) = (l.rows(batch), states.spec);
    let memory = args::Delta {
        state: states.state.address,
        history: states.history.address,
        updates: states.updates.address,
        batch: rows.address,
        nk: spec.key_heads as i32,
        nv: spec.value_heads as i32,
        dk: spec.key_dim as i32,
        dv: spec.value_dim as i32,
        channels: spec.channels() as i32,
    };
    let step = Step {
        l,
        op,
        spec,
        rows,
        memory,
    };
    match fused(l.device, &spec, &rows) {
        Some(shared) => step.launch_fused(shared, gate),
        None => step.launch_by_parts(),
    }
}

/// The gated delta rule of a step's rows.
struct Step<'a> {
    l: &'a Launch<'a>,
    op: &'a Op,
    spec: DeltaSpec,
    rows: Rows,
    memory: args::Delta,
}

impl Step<'_> {
    fn at(&self, input: usize) -> Address {
        self.l.address(self.op.inputs[input])
    }

    /// The state, the projection of keys and values, and the convolution's weights.
    fn inputs(&self) -> Args {
        let args = Args::default().of(&self.memory);
        args.ptr(self.at(0)).ptr(self.at(3))
    }

    /// The projections of gates, and the factors and biases of decays.
    fn gates(&self) -> [Address; 4] {
        [1, 2, 4, 5].map(|input| self.at(input))
    }

    fn kernel(&self, name: &'static str) -> Kernel {
        kernel(&self.spec, name, 1)
    }

    /// A block for each share of a value head, and each sequence, whose threads have so many parts of a column each.
    fn grid(&self, thread_parts: usize) -> Grid {
        let shares = shares(self.spec.value_dim);
        let blocks = self.spec.value_heads * shares;
        Grid::rect(blocks, self.rows.seqs, threads(&self.spec) / thread_parts)
    }

    /// Launches one kernel for everything, which asks for `shared` bytes of shared memory.
    fn launch_fused(&self, shared: usize, gate: Option<(f32, Activation)>) {
        let (l, op) = (self.l, self.op);
        let y = l.address(op.outputs[0]);
        let args = self.gates().into_iter().fold(self.inputs(), Args::ptr);
        let epilogue = gate.map(|(eps, activation)| args::GatedNormEpilogue {
            weight: self.at(6),
            gate: self.at(7),
            n: l.address_if_read(op.outputs[1]),
            y: l.reuse_if_read(op.inputs[7], op.outputs[2]),
            f16: l.f16_written(op, op.outputs[2]),
            eps,
            activation: number(activation) as i32,
        });
        let args = args.ptr(y).ptr(l.device.arrivals.address);
        let args = args.of(&epilogue.unwrap_or_default());
        let grid = Grid {
            shared,
            ..self.grid(1)
        };
        let declared = declared_by_few(&self.spec);
        let grid = l.device.driver.spread_few(grid, declared);
        l.device.launch(&self.kernel("delta_fused"), grid, args);
    }

    /// Launches the convolution with the gates, and then the rule.
    fn launch_by_parts(&self) {
        let (device, spec) = (self.l.device, &self.spec);
        let y = self.l.address(self.op.outputs[0]);
        let (n, channels) = (self.rows.n, spec.channels());
        let mixed = device.arena.buffer(4 * n * channels);
        let gates = device.arena.buffer(8 * n * spec.value_heads);
        let args = self.inputs().ptr(mixed.address);
        let args = self.gates().into_iter().fold(args, Args::ptr);
        let runs = self.rows.longest.div_ceil(CHUNK_ROWS);
        let grid = Grid::rect(
            channels.div_ceil(spec.key_dim),
            runs * self.rows.seqs,
            spec.key_dim.next_multiple_of(32),
        );
        device.launch(&self.kernel("delta_conv"), grid, args.ptr(gates.address));
        let args = Args::default()
            .of(&self.memory)
            .ptr(mixed.address)
            .ptr(gates.address)
            .ptr(y)
            .ptr(self.at(0));
        let parts = parts_of_rule(spec);
        let grid = Grid {
            shared: 4 * 2 * ROWS_AHEAD * row_floats(spec),
            ..self.grid(parts)
        };
        let grid = device
            .driver
            .spread(grid, recurrence_memory(spec, grid.threads));
        device.launch(&kernel(spec, "delta_rule", parts), grid, args);
    }
}
