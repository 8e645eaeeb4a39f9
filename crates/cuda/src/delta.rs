//! The gated delta rule (kernels/delta.cu, kernels/delta_chunk.cuh).

use crate::args;
use crate::args::{Address, Args};
use crate::constants::CONVOLUTION_ROWS;
use crate::driver::Driver;
use crate::elementwise::number;
use crate::launch::{ARRIVALS_BYTES, Device, Launch};
use crate::machine::Grid;
use crate::memory::Block;
use crate::record::{Bound, Rows};
use crate::{Cuda, Kernel};
use backend::{Activation, Delta, DeltaSpec, MAX_TENTATIVE};
use fusion::{Kind, Op};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Rows of a step that are few enough for one kernel.
const FEW_ROWS: usize = 16;

/// Columns of values that a block has.
const COLUMNS: usize = 32;

/// Parts of the columns of keys, that many pairs of warps have.
const DK_PARTS: usize = 4;

/// Threads of a block: for each part of the columns of keys, a warp for each 16 columns of values.
const THREADS: usize = 64 * DK_PARTS;

/// Rows of a chunk.
const CHUNK: usize = 16;

/// Rows that a slot remembers since its state, at most: those of a chunk that is not whole, and tentative ones.
const PENDING: usize = CHUNK - 1 + MAX_TENTATIVE;

/// Chunks, at most, that a step's rows of a sequence make beside one for each [`CHUNK`] of them: the first and the last
/// are not whole, and up to [`PENDING`] remembered rows come before them.
const EXTRA_CHUNKS: usize = 3;

/// Floats of a block's remembered values: a header of four, of which one is the number of certain rows, and of each row
/// its gates, x and d, as kernels/delta_chunk.cuh says.
const REMEMBERED_FLOATS: usize = 4 + PENDING * (4 + 2 * COLUMNS);

/// Blocks that share a head's columns of values.
fn splits(spec: &DeltaSpec) -> usize {
    spec.value_dim.div_ceil(COLUMNS)
}

/// Columns of keys, with the zeros that make tiles of 16 columns whole in each part.
fn key_columns(spec: &DeltaSpec) -> usize {
    spec.key_dim.next_multiple_of(16 * DK_PARTS)
}

/// Floats from one key or query to the next in shared memory (kernels/delta_chunk.cuh: KEY_STRIDE).
fn key_stride(spec: &DeltaSpec) -> usize {
    key_columns(spec) + 4
}

/// Bytes of ChunkMemory in kernels/delta_chunk.cuh: products by parts, x and d.
const CHUNK_MEMORY: usize =
    4 * (DK_PARTS * 2 * CHUNK * (COLUMNS + 8) + CHUNK * COLUMNS + CHUNK * (COLUMNS + 4));

/// Floats of ChunkMatrices in kernels/delta_chunk.cuh: two matrices, and four numbers a row.
const MATRIX_FLOATS: usize = 2 * CHUNK * CHUNK + 4 * CHUNK;

/// Bytes of PrepareMemory in kernels/delta_chunk.cuh: dot products by parts, decays and weights of keys, and matrices.
const PREPARE_MEMORY: usize =
    4 * (DK_PARTS * 2 * CHUNK * (CHUNK + 8) + CHUNK * (2 * CHUNK + 4) + MATRIX_FLOATS);

/// Bytes of shared memory that `delta_fused` declares, at most: its ChunkMemory, PrepareMemory and two flags, of which
/// alignment to 16 makes 32 bytes. A test holds this to what is compiled, for blocks are spread by it.
pub(crate) const DECLARED_BY_FUSED: usize = CHUNK_MEMORY + PREPARE_MEMORY + 2 * 16;

/// Bytes of shared memory that `delta_fused_cluster` declares: its ChunkMemory, PrepareMemory and HeadResults, of which
/// the barrier and a flag take 16. Blocks are spread by this, too.
pub(crate) fn declared_by_fused_cluster(spec: &DeltaSpec) -> usize {
    let rows = FEW_ROWS.div_ceil(splits(spec));
    CHUNK_MEMORY + PREPARE_MEMORY + 4 * rows * spec.value_dim + 16
}

/// Bytes of shared memory that `delta_fused` asks for, for a sequence of `rows` rows.
fn shared_of_few(spec: &DeltaSpec, rows: usize) -> usize {
    let key = key_stride(spec);
    let remembered = (PENDING + rows) * (key + COLUMNS + 2) + rows * key;
    4 * (remembered + (spec.conv_taps - 1 + rows) * (2 * spec.key_dim + COLUMNS))
}

/// Bytes of shared memory that `delta_rule` asks for: two chunks, or one where keys are wide.
fn shared_of_many(spec: &DeltaSpec) -> usize {
    let stages = if key_columns(spec) > 128 { 1 } else { 2 };
    4 * stages * (CHUNK * (2 * key_stride(spec) + COLUMNS) + MATRIX_FLOATS)
}

/// One layer's states.
pub(crate) struct States {
    spec: DeltaSpec,
    state: Block,
    history: Block,
    keys: Block,
    values: Block,
    /// The last epoch ([`crate::driver::Driver::epoch`]) with a kernel that writes them.
    written_in: AtomicU64,
}

impl States {
    /// Says that the kernel which is launched next writes the states. Whether no other kernel that may still run then
    /// does.
    pub(crate) fn begin_write(&self, driver: &Driver) -> bool {
        let now = driver.epoch();
        self.written_in.swap(now, Ordering::Relaxed) != now
    }
}

pub(crate) fn delta(cuda: &Cuda, spec: DeltaSpec) -> Delta {
    let DeltaSpec {
        conv_taps,
        key_dim,
        value_dim,
        ..
    } = spec;
    assert!(
        (2..=8).contains(&conv_taps)
            && key_dim <= 256
            && key_dim.is_multiple_of(2)
            && value_dim <= 256,
        "2 to 8 taps and heads of at most 256, of keys an even number: {spec:?}"
    );
    let block = |values: usize| {
        Block::zeroed(
            &cuda.device.driver,
            4 * spec.slots * values,
            "memory for recurrent states",
        )
    };
    let blocks = spec.value_heads * splits(&spec);
    Delta {
        spec,
        storage: Box::new(Arc::new(States {
            spec,
            state: block(blocks * key_columns(&spec) * COLUMNS),
            history: block((spec.conv_taps - 1 + MAX_TENTATIVE) * spec.channels()),
            keys: block(PENDING * spec.key_heads * spec.key_dim),
            values: block(blocks * REMEMBERED_FLOATS),
            written_in: AtomicU64::new(0),
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

/// Where the parts of a slot lie, and the bytes of each: state, history, keys and values.
fn slot_blocks(delta: &Delta, slot: usize) -> [(Address, usize); 4] {
    let s = states(delta);
    [&s.state, &s.history, &s.keys, &s.values].map(|block| {
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

/// Makes a slot what [`save`] has saved, if `bytes` are as many, and say of no more certain rows than a chunk can have
/// that is not whole: kernels go by that number.
pub(crate) fn load(cuda: &Cuda, delta: &Delta, slot: usize, mut bytes: &[u8]) -> bool {
    let blocks = slot_blocks(delta, slot);
    if blocks.iter().map(|(_, n)| n).sum::<usize>() != bytes.len() {
        return false;
    }
    let [.., (_, n_values)] = blocks;
    let values = &bytes[bytes.len() - n_values..];
    let mut certain = values
        .chunks_exact(4 * REMEMBERED_FLOATS)
        .map(|block| &block[..4]);
    let first = certain.next().expect("a value head");
    if first[0] as usize >= CHUNK || first[1..] != [0; 3] || certain.any(|other| other != first) {
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

/// Kernel `name` of kernels/delta.cu.
pub(crate) fn kernel(spec: &DeltaSpec, name: &'static str) -> Kernel {
    let mut kernel = Kernel::new("delta", name);
    kernel.defines.extend([
        ("DK", spec.key_dim),
        ("DV", spec.value_dim),
        ("DK_PARTS", DK_PARTS),
        ("CHUNK", CHUNK),
        ("COLUMNS", COLUMNS),
        ("TAPS", spec.conv_taps),
        ("EXTRA_CHUNKS", EXTRA_CHUNKS),
        ("FEW_ROWS", FEW_ROWS),
    ]);
    kernel
}

/// Bytes of shared memory that `delta_fused` asks for, for the rows of a step, if they are few
/// enough for it.
fn fused(device: &Device, spec: &DeltaSpec, rows: &Rows) -> Option<usize> {
    let shared = shared_of_few(spec, rows.longest);
    let fits = 4 * rows.seqs * (spec.key_heads + spec.value_heads) <= ARRIVALS_BYTES
        && shared + DECLARED_BY_FUSED + 1024 <= device.driver.shared;
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
        keys: states.keys.address,
        values: states.values.address,
        batch: rows.address,
        nk: spec.key_heads as i32,
        nv: spec.value_heads as i32,
        dk: spec.key_dim as i32,
        dv: spec.value_dim as i32,
        channels: spec.channels() as i32,
        is_settled: i32::from(states.begin_write(&l.device.driver)),
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
        kernel(&self.spec, name)
    }

    /// A block for each share of a value head, and each sequence, which asks for so much shared memory.
    fn grid(&self, shared: usize) -> Grid {
        let blocks = self.spec.value_heads * splits(&self.spec);
        Grid {
            shared,
            ..Grid::rect(blocks, self.rows.seqs, THREADS)
        }
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
        let grid = self.grid(shared);
        let in_cluster = self.kernel("delta_fused_cluster");
        let (kernel, grid) = match self.in_cluster(&in_cluster, grid, epilogue.is_some()) {
            Some(grid) => (in_cluster, grid),
            None => (
                self.kernel("delta_fused"),
                l.device.driver.spread_few(grid, DECLARED_BY_FUSED),
            ),
        };
        l.device
            .launch(&kernel, grid, args.of(&epilogue.unwrap_or_default()));
    }

    /// The launch in which blocks of a value head are a cluster, if they have results to exchange, and if there is room
    /// for all clusters at once: of more, some would wait until several multiprocessors near each other are free. While
    /// launches are collected to be compiled, nothing: to ask for room compiles the file, which has both kernels.
    fn in_cluster(&self, kernel: &Kernel, grid: Grid, has_gate: bool) -> Option<Grid> {
        let (spec, driver) = (&self.spec, &self.l.device.driver);
        let cluster = splits(spec);
        let exchanges = has_gate && cluster > 1 && spec.value_dim.is_multiple_of(64);
        if !exchanges || driver.arch < 90 || driver.is_collecting() {
            return None;
        }
        let grid = Grid { cluster, ..grid };
        let spread = driver.spread_few(grid, declared_by_fused_cluster(spec));
        let clusters = grid.blocks.0 * grid.blocks.1 / cluster;
        [spread, grid]
            .into_iter()
            .find(|&grid| driver.clusters_at_once(kernel, grid) >= clusters)
    }

    /// Launches the convolution with the gates, what chunks have that does not depend on the state, and then the rule.
    fn launch_by_parts(&self) {
        let (device, spec) = (self.l.device, &self.spec);
        let y = self.l.address(self.op.outputs[0]);
        let (n, channels) = (self.rows.n, spec.channels());
        let mixed = device.arena.buffer(4 * n * channels);
        let gates = device.arena.buffer(8 * n * spec.value_heads);
        let keys = spec.key_heads * spec.key_dim;
        let known_keys = device.arena.buffer(4 * self.rows.seqs * PENDING * keys);
        let args = self.inputs().ptr(mixed.address);
        let args = self.gates().into_iter().fold(args, Args::ptr);
        let runs = self.rows.longest.div_ceil(CONVOLUTION_ROWS);
        let grid = Grid::rect(
            channels.div_ceil(spec.key_dim),
            runs * self.rows.seqs,
            spec.key_dim.next_multiple_of(32),
        );
        let args = args.ptr(gates.address).ptr(known_keys.address);
        device.launch(&self.kernel("delta_conv"), grid, args);
        let chunks = n / CHUNK + EXTRA_CHUNKS * self.rows.seqs;
        let matrices = device
            .arena
            .buffer(4 * chunks * spec.value_heads * MATRIX_FLOATS);
        let args = Args::default().of(&self.memory).ptr(mixed.address);
        let prepare = args
            .ptr(gates.address)
            .ptr(known_keys.address)
            .ptr(matrices.address);
        let longest = (PENDING + self.rows.longest).div_ceil(CHUNK);
        let grid = Grid {
            shared: 4 * 2 * CHUNK * key_stride(spec),
            ..Grid::rect(longest * self.rows.seqs, spec.key_heads, THREADS)
        };
        device.launch(&self.kernel("delta_prepare"), grid, prepare);
        let args = Args::default().of(&self.memory).ptr(mixed.address);
        let args = args
            .ptr(matrices.address)
            .ptr(known_keys.address)
            .ptr(y)
            .ptr(self.at(0));
        let grid = self.grid(shared_of_many(spec));
        let grid = device.driver.spread(grid, CHUNK_MEMORY);
        device.launch(&self.kernel("delta_rule"), grid, args);
    }
}
