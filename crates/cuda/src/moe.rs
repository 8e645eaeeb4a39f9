//! Mixtures of experts (kernels/moe_*.cu): rows choose on the device, and an expert's
//! weights are read once for all rows that chose it.

use crate::args::{self, Activations, Address, Args, GluArgs};
use crate::constants::{
    GEMV_REDUCTION_BYTES, MOE_GLU_RECORD_BYTES, MOE_GLU_STAGES, MOE_GLU_WARPS, MOE_PIPELINE_BYTES,
    MOE_RECORD_BYTES,
};
use crate::dry::declared_shared;
use crate::elementwise::{glu_args, glu_chunks, launch_glu, number, rotate};
use crate::launch::{Device, Launch};
use crate::machine::Grid;
use crate::matmul::{self, MAX_SLICE_TILES, PIPELINED_WARPS, Tiles, Weights, has_pipelines};
use crate::memory::{Block, Buffer, Cell};
use crate::pack::{Packing, TILE_ROWS};
use crate::record::Bound;
use crate::{Kernel, gemm};
use backend::{Activation, Experts, Matrix};
use fusion::{Kind, Op, Operand};
use std::sync::Arc;

/// Experts of a row, at most: a lane has a rank.
pub(crate) const MAX_RANKS: usize = 32;

/// Rows that one block routes, at most: a warp each.
pub(crate) const ROUTE_ROWS: usize = 16;

/// Threads of a block of `route_and_group`.
const ROUTE_THREADS: usize = 32 * ROUTE_ROWS;

/// Warps of a block of `group_pairs`.
const GROUP_WARPS: usize = 32;

/// Pairs of a block of `group_pairs`; more, where [`MAX_GROUP_BLOCKS`] blocks do not suffice.
const GROUPED_PAIRS: usize = 1024;

/// Blocks of `group_pairs`, at most: each reads what all others have counted.
const MAX_GROUP_BLOCKS: usize = 64;

/// Bytes of a gated tile of 8 rows, which a block of `moe_gemv_glu` computes for itself.
const GLU_TILE_BYTES: usize = 8 * (64 * 2 + 2 * 4);

/// Gated tiles that a block of `moe_gemv_glu` computes, at most: every other block of its expert
/// computes them again.
const MAX_GLU_TILES: usize = 64;

/// Where a layer's experts lie; nothing, if they are stored in different formats.
pub(crate) type ExpertTable = Option<Arc<Table>>;

/// Addresses of a layer's experts, by expert.
pub(crate) struct Table {
    gate_up: Addresses,
    down: Addresses,
    scale: Option<Block>,
    /// Columns of what the second product reads.
    inner: usize,
    /// Columns of a row.
    hidden: usize,
    activation: Activation,
    /// The matrices at these addresses, but for the one that the table is kept with.
    _weights: Vec<Arc<Weights>>,
}

impl Table {
    /// Where the experts' own factors lie, 0 if they have none.
    fn scale_address(&self) -> Address {
        self.scale.as_ref().map_or(0, |scale| scale.address)
    }

    /// Whether the first product reads activations in f16 as they are: neither in f32 nor rotated.
    pub(crate) fn reads_f16(&self) -> bool {
        let tiles = self.gate_up.tiles;
        tiles.is_some_and(|tiles| !tiles.is_rotated())
    }
}

/// The matrices of one kind, by expert.
struct Addresses {
    weights: Block,
    tiles: Option<Tiles>,
    /// How many matrices there are.
    count: usize,
}

impl Addresses {
    fn is_rotated(&self) -> bool {
        self.tiles.is_some_and(|tiles| tiles.is_rotated())
    }

    /// A kernel of `moe_gemv` that multiplies them, walked as `tiles` says.
    fn gemv(&self, tiles: Tiles, name: &'static str) -> Kernel {
        gemv_kernel(tiles, self.count, name)
    }
}

/// Kernel `name` of the file `moe_gemv`, with registers for the scores of so many experts.
pub(crate) fn gemv_kernel(tiles: Tiles, experts: usize, name: &'static str) -> Kernel {
    let mut kernel = tiles.kernel("moe_gemv", name);
    let of_lane = experts.min(MAX_ROUTED_EXPERTS).div_ceil(32);
    kernel
        .defines
        .push(("SCORES_PER_LANE", of_lane.next_power_of_two().max(4)));
    kernel
}

/// Rows whose experts' weights go through pipelines in shared memory, at most: as many as a
/// tensor-core product takes.
const MAX_PIPELINED_ROWS: usize = 8;

/// Pairs of a row and an expert, at most, where experts' weights go through pipelines.
const MAX_PIPELINED_PAIRS: usize = MAX_PIPELINED_ROWS * MAX_RANKS;

/// Bytes of the kernels' `ActiveExpert`.
const ACTIVE_EXPERT_BYTES: usize = 16;

/// Bytes of shared memory for each pair of a block of `moe_gemv_routed`: room for an expert of its
/// own, and three numbers.
const ROUTED_PAIR_BYTES: usize = ACTIVE_EXPERT_BYTES + 3 * 4;

/// Bytes of shared memory of a block of `moe_gemv_routed` beside those of pairs: the first of its two
/// arrays of pairs' experts is rounded up to a multiple of four numbers.
const ROUTED_SPARE_BYTES: usize = 3 * 4;

/// Bytes of shared memory for each pair of a block of `moe_gemv_pipelined`: room for an expert of
/// its own, and two numbers.
const PIPELINED_PAIR_BYTES: usize = ACTIVE_EXPERT_BYTES + 2 * 4;

/// Bytes of shared memory for each pair of a block that reads a list of experts: room for an expert
/// of its own, and a number.
const LISTED_PAIR_BYTES: usize = ACTIVE_EXPERT_BYTES + 4;

const _: () = assert!(
    4 * (MAX_PIPELINED_PAIRS.next_multiple_of(4) + MAX_PIPELINED_PAIRS) <= GEMV_REDUCTION_BYTES,
    "pairs are sorted where partial sums lie later"
);

/// Bytes of matrices that may go to L2 for the second product while the first is computed: a
/// part of what the L2 of GPUs with pipelines has.
const MAX_PREFETCHED: usize = 12 << 20;

/// Experts whose scores fit the registers of a warp that routes a row.
const MAX_ROUTED_EXPERTS: usize = 512;

/// Bytes of the kernels' `ExpertBlock`.
const EXPERT_BLOCK_BYTES: usize = size_of::<args::ExpertBlock>();

/// Pairs of an expert, on average, from which on a grouped GEMM multiplies them.
const MIN_GROUPED_PAIRS: usize = 24;

/// Bytes of shared memory that a block of `moe_gemv_glu_pipelined` takes, at most, so that two fit.
const MAX_GLU_SHARED: usize = 115_000;

/// Whether the kernels of few rows, which route these themselves and stream codes, take `n` rows of
/// experts of this packing.
fn streams_codes(device: &Device, tiles: Tiles, n: usize) -> bool {
    let of_codes = matches!(
        tiles.packing,
        Packing::Codes { .. } | Packing::Rotated { .. }
    );
    of_codes && n <= MAX_PIPELINED_ROWS && has_pipelines(&device.driver)
}

/// The pipelined kernel of experts' first product that has room for `n` rows, and bytes of its
/// blocks' shared memory.
fn pipelined_gemv(
    device: &Device,
    tiles: Tiles,
    n: usize,
    pairs: usize,
) -> Option<(&'static str, usize)> {
    let bytes = tiles.packing.tile_bytes();
    // The kernels' PIPELINE_ROW_TILES.
    let rows = match bytes {
        ..=640 => 4,
        641..=1152 => 2,
        _ => 1,
    };
    let left = MOE_PIPELINE_BYTES
        .checked_sub((n * tiles.per_slice * MOE_RECORD_BYTES).next_multiple_of(128))?;
    let name = match left / (rows * bytes).next_multiple_of(32) {
        5.. => "moe_gemv_pipelined_5",
        4 => "moe_gemv_pipelined_4",
        2.. => "moe_gemv_pipelined_2",
        _ => return None,
    };
    let shared =
        tiles.slices * (MOE_PIPELINE_BYTES + GEMV_REDUCTION_BYTES) + pairs * PIPELINED_PAIR_BYTES;
    let fits = tiles.per_slice <= MAX_SLICE_TILES
        && shared + declared_shared(name) <= device.driver.shared;
    (streams_codes(device, tiles, n) && fits).then_some((name, shared))
}

/// How `moe_gemv_glu_pipelined` walks the experts' second product of `n` rows with `pairs` pairs, and bytes of its
/// blocks' shared memory; nothing, where it does not take them.
fn pipelined_glu(device: &Device, table: &Table, n: usize, pairs: usize) -> Option<(Tiles, usize)> {
    // What it makes of the gate is not rotated.
    let tiles = table.down.tiles.filter(|tiles| !tiles.is_rotated())?;
    let bytes = tiles.packing.tile_bytes();
    // The kernel's stages of STAGE_TILES tiles.
    let stages = MOE_GLU_STAGES * bytes * if bytes <= 640 { 4 } else { 2 };
    let shared = MOE_GLU_WARPS * stages
        + tiles.tiles * 8 * MOE_GLU_RECORD_BYTES
        + (pairs + 1) * LISTED_PAIR_BYTES;
    let fits = streams_codes(device, tiles, n) && shared <= MAX_GLU_SHARED;
    fits.then_some((tiles, shared))
}

/// The kernel of experts' first product whose blocks route rows themselves.
struct RoutedKernel {
    tiles: Tiles,
    name: &'static str,
    grid: Grid,
    /// How the second product is walked, if `moe_gemv_glu_pipelined` computes it, and bytes of its blocks' shared
    /// memory.
    second: Option<(Tiles, usize)>,
}

/// The kernel of the first product that takes `n` rows, each of which chooses `top_k` experts; nothing, where the rows
/// have to be routed before.
fn routed_kernel(device: &Device, table: &Table, top_k: usize, n: usize) -> Option<RoutedKernel> {
    let pairs = n * top_k;
    let tiles = table.gate_up.tiles?;
    if !streams_codes(device, tiles, n) || table.gate_up.count > MAX_ROUTED_EXPERTS {
        return None;
    }
    let rows = 2 * table.inner;
    let blocks = device.driver.sms * (PIPELINED_WARPS / tiles.slices);
    // With a row tile or two a block, a pipeline has nothing to run ahead of.
    let enough = pairs * rows.div_ceil(TILE_ROWS) > 2 * blocks;
    let pipelined = pipelined_gemv(device, tiles, n, pairs).filter(|_| enough);
    let threads = 32 * tiles.slices;
    let (name, grid, shared) = match pipelined {
        Some((name, shared)) => (name, Grid::new(blocks, threads), shared),
        None => {
            // One block of the last column hands on, the others compute a GLU.
            let most = table.gate_up.count.min(pairs).max(2);
            let grid = Grid::rect(rows.div_ceil(2 * TILE_ROWS) + 1, most, threads);
            (
                "moe_gemv_routed",
                grid,
                pairs * ROUTED_PAIR_BYTES + ROUTED_SPARE_BYTES,
            )
        }
    };
    Some(RoutedKernel {
        tiles,
        name,
        grid: Grid { shared, ..grid },
        second: pipelined_glu(device, table, n, pairs),
    })
}

fn addresses<'a>(
    device: &Device,
    matrices: impl Iterator<Item = &'a Matrix> + Clone,
) -> Option<Addresses> {
    let all = matrices.map(matmul::weights);
    let tiles = all.clone().next().and_then(|w| w.tiles());
    if all.clone().any(|w| w.tiles() != tiles) {
        return None;
    }
    let table = |list: &[u64]| Block::of(&device.driver, list, "a table of experts");
    let all: Vec<u64> = all.map(|w| w.address()).collect();
    Some(Addresses {
        weights: table(&all),
        tiles,
        count: all.len(),
    })
}

/// An expert's pairs cut into blocks, for all experts.
struct GroupedBlocks {
    list: Buffer,
    /// Blocks that there can be.
    most: usize,
    /// Pairs of a block, at most.
    pairs: usize,
}

/// The step's pairs of row and rank, by expert.
struct Lists {
    pairs: Buffer,
    lists: Buffer,
    /// The blocks of a grouped GEMM: [`EXPERT_BLOCK_BYTES`] bytes each.
    blocks: Option<GroupedBlocks>,
    /// Experts that can be in use.
    most: usize,
    top_k: usize,
    /// Rows of the step.
    rows: usize,
}

impl Lists {
    /// Room for the pairs of `n` rows, each of which chooses `top_k` experts of `table`.
    fn new(device: &Device, table: &Table, top_k: usize, n: usize) -> Self {
        let pairs = n * top_k;
        let most = table.gate_up.count.min(pairs);
        Lists {
            lists: device.arena.buffer(4 * (1 + 3 * most)),
            pairs: device.arena.buffer(4 * pairs),
            blocks: None,
            most,
            top_k,
            rows: n,
        }
    }
}

/// Bytes of each matrix of the second product of `pairs` pairs that go to L2 while the first is computed.
fn prefetched(table: &Table, pairs: usize) -> i32 {
    let bytes = table.down.tiles.map_or(0, |tiles| {
        table.hidden.div_ceil(TILE_ROWS) * tiles.tiles * tiles.packing.tile_bytes()
    });
    match pairs * bytes {
        ..=MAX_PREFETCHED => bytes as i32,
        _ => 0,
    }
}

/// `y[pair] = w[expert of pair] x`; `x` has a row for each pair, or one for each row.
fn product(
    device: &Device,
    w: &Addresses,
    (x, x_f16): (Address, &Activations),
    (y, rows): (u64, usize),
    cols: usize,
    lists: &Lists,
    by_pair: bool,
) {
    match w.tiles {
        None => {
            let args = Args::default()
                .ptr(w.weights.address)
                .ptr(x)
                .ptr(lists.lists.address)
                .ptr(lists.pairs.address)
                .ptr(y)
                .int(lists.top_k)
                .int(usize::from(by_pair))
                .int(rows)
                .int(cols);
            let grid = Grid::rect(rows.div_ceil(8), lists.most, 256);
            device.launch(&Kernel::new("gemv_f32", "moe_gemv_f32"), grid, args);
        }
        Some(tiles) if let Some(blocks) = &lists.blocks => {
            let blocks = gemm::Blocks {
                list: blocks.list.address,
                pairs: lists.pairs.address,
                top_k: lists.top_k,
                most: blocks.most,
                rows: blocks.pairs,
            };
            let w = (w.weights.address, tiles);
            gemm::grouped(device, x_f16, by_pair, w, (y, rows), &blocks);
        }
        Some(tiles) => {
            let args = Args::default()
                .ptr(w.weights.address)
                .ptr(y)
                .of(x_f16)
                .ptr(lists.lists.address)
                .ptr(lists.pairs.address)
                .int(lists.top_k)
                .int(usize::from(by_pair))
                .int(rows)
                .int(tiles.tiles)
                .int(tiles.per_slice);
            let grid = Grid::rect(rows.div_ceil(2 * TILE_ROWS), lists.most, 32 * tiles.slices);
            let name = match lists.rows {
                ..=ROUTE_ROWS => "moe_gemv_8",
                _ => "moe_gemv_16",
            };
            device.launch(&w.gemv(tiles, name), grid, args);
        }
    }
}

/// `y[pair] = w[expert of pair] (activation(gate) up)` of what `gate_up` has for the pair, and a
/// product that has nothing to do with experts but its shape.
fn product_glu(
    device: &Device,
    (w, tiles): (&Addresses, Tiles),
    (gate_up, cols): (Address, usize),
    (y, rows): (Address, usize),
    lists: &Lists,
    activation: Activation,
    shared_expert: Option<args::SharedExpert>,
) {
    let columns = lists.most + usize::from(shared_expert.is_some());
    let shared_expert = shared_expert.unwrap_or_default();
    let args = Args::default()
        .ptr(w.weights.address)
        .ptr(y)
        .ptr(gate_up)
        .ptr(lists.lists.address)
        .ptr(lists.pairs.address)
        .int(number(activation))
        .int(rows)
        .int(cols)
        .int(tiles.tiles)
        .int(tiles.per_slice)
        .of(&shared_expert);
    let grid = Grid {
        shared: tiles.tiles * GLU_TILE_BYTES,
        ..Grid::rect(
            rows.div_ceil(MOE_GLU_WARPS * TILE_ROWS),
            columns,
            32 * MOE_GLU_WARPS,
        )
    };
    device.launch(&tiles.kernel("moe_gemv_glu", "moe_gemv_glu"), grid, args);
}

/// `y[pair] = w[expert of pair] (activation(gate) up)` of what `gate_up` has for the pair, for the experts that
/// `routing` lists, and a product that has nothing to do with experts but its shape.
fn product_glu_pipelined(
    device: &Device,
    table: &Table,
    (tiles, shared): (Tiles, usize),
    routing: &args::Routing,
    (gate_up, y): (Address, Address),
    shared_expert: Option<args::SharedExpert>,
) {
    let args = Args::default()
        .ptr(routing.list)
        .ptr(y)
        .ptr(gate_up)
        .ptr(routing.pairs)
        .int(number(table.activation))
        .int((routing.rows * routing.top_k) as usize)
        .int(table.hidden)
        .int(table.inner)
        .int(tiles.tiles)
        .int(tiles.per_slice)
        .of(&shared_expert.unwrap_or_default());
    let grid = Grid {
        shared,
        ..Grid::new(2 * device.driver.sms, 32 * MOE_GLU_WARPS)
    };
    let name = "moe_gemv_glu_pipelined";
    device.launch(&tiles.kernel("moe_gemv_glu", name), grid, args);
}

/// The weight of each pair of row and rank, to `weights`, and the pairs by expert. A gate of as
/// many rows is computed beside them.
fn route(
    device: &Device,
    (scores, [n, count]): (Address, [usize; 2]),
    table: &Table,
    weights: Address,
    top_k: usize,
    glu: Option<&GluArgs>,
) -> Lists {
    let pairs = n * top_k;
    let kernel = |name| Kernel::new("moe_route", name);
    let buffer = |bytes| device.arena.buffer(bytes);
    let mut lists = Lists::new(device, table, top_k, n);
    let is_grouped = n > ROUTE_ROWS && gemm::warpgroups(&device.driver);
    let of_block = gemm::pairs_of_block(pairs, count);
    lists.blocks = (is_grouped && pairs >= MIN_GROUPED_PAIRS * count).then(|| {
        // An expert's last block may be of a single pair.
        let blocks = pairs / of_block + lists.most;
        GroupedBlocks {
            list: buffer(EXPERT_BLOCK_BYTES * (1 + blocks)),
            most: blocks,
            pairs: of_block,
        }
    });
    let args = Args::default().ptr(scores).ptr(table.scale_address());
    if n <= ROUTE_ROWS {
        let args = args
            .ptr(weights)
            .ptr(lists.lists.address)
            .ptr(lists.pairs.address)
            .int(count)
            .int(top_k)
            .int(n)
            .of(&glu.copied().unwrap_or_default());
        let of_glu = glu.map_or(0, |g| n * glu_chunks(g.cols as usize, ROUTE_THREADS));
        let grid = Grid {
            shared: 4 * n * (count + 2 * top_k),
            ..Grid::new(1 + of_glu, ROUTE_THREADS)
        };
        device.launch(&kernel("route_and_group"), grid, args);
        return lists;
    }
    let chosen = buffer(4 * pairs);
    let args = args.ptr(chosen.address).ptr(weights);
    let args = args.int(count).int(top_k).int(n);
    let grid = Grid {
        shared: 4 * 4 * count,
        ..Grid::new(n.div_ceil(4), 128)
    };
    device.launch(&kernel("route"), grid, args);
    let grouping = pairs.div_ceil(GROUPED_PAIRS).min(MAX_GROUP_BLOCKS);
    let counts = buffer(4 * grouping * count);
    if grouping > 1 {
        let args = Args::default().ptr(chosen.address).ptr(counts.address);
        let grid = Grid {
            shared: 4 * count,
            ..Grid::new(grouping, 32 * GROUP_WARPS)
        };
        device.launch(&kernel("count_pairs"), grid, args.int(count).int(pairs));
    }
    let args = Args::default()
        .ptr(chosen.address)
        .ptr(counts.address)
        .ptr(lists.lists.address)
        .ptr(lists.pairs.address)
        .ptr(lists.blocks.as_ref().map_or(0, |b| b.list.address))
        .int(count)
        .int(pairs)
        .int(of_block);
    let grid = Grid {
        shared: 4 * count * (2 + GROUP_WARPS),
        ..Grid::new(grouping, 32 * GROUP_WARPS)
    };
    device.launch(&kernel("group_pairs"), grid, args);
    lists
}

/// The table of a layer's experts; nothing, where kernels do not take them.
pub(crate) fn table(device: &Device, experts: &Experts) -> Option<Arc<Table>> {
    let first = &experts.experts[0];
    let of_first = matmul::weights(&first.gate_up);
    let table = of_first.experts.get_or_init(|| {
        let all = experts.experts.iter();
        let scale = experts.scale.as_ref();
        Some(Arc::new(Table {
            gate_up: addresses(device, all.clone().map(|e| &e.gate_up))?,
            down: addresses(device, all.map(|e| &e.down))?,
            scale: scale.map(|s| Block::of(&device.driver, s, "factors of experts")),
            inner: first.down.cols,
            hidden: first.down.rows,
            activation: experts.activation,
            _weights: (experts.experts.iter())
                .flat_map(|e| [&e.gate_up, &e.down])
                .skip(1)
                .map(|w| matmul::weights(w).clone())
                .collect(),
        }))
    });
    table.clone().filter(|_| experts.top_k <= MAX_RANKS)
}

/// How the second product is walked where one kernel computes the gate and that product, of `n`
/// rows that choose `top_k` experts each; nothing, where it does not.
fn fused_glu(device: &Device, table: &Table, top_k: usize, n: usize) -> Option<Tiles> {
    let routed = routed_kernel(device, table, top_k, n);
    if let Some((tiles, _)) = routed.and_then(|kernel| kernel.second) {
        return Some(tiles);
    }
    // What it makes of the gate is not rotated.
    let fits = |t: &Tiles| !t.is_rotated() && n <= ROUTE_ROWS && n * t.tiles <= MAX_GLU_TILES;
    let tiles = table.down.tiles.filter(fits);
    tiles.filter(|_| table.gate_up.tiles.is_some())
}

/// Whether the product of `n` rows with `w` goes beside the experts' second one: it has their shape.
pub(crate) fn joins(device: &Device, table: &Table, top_k: usize, w: &Weights, n: usize) -> bool {
    let tiles = fused_glu(device, table, top_k, n);
    tiles.is_some() && tiles == w.tiles() && w.rows == table.hidden
}

/// Launches what the experts make of each pair of row and rank.
pub(crate) fn experts(l: &Launch<'_>, op: &Op) {
    let device = l.device;
    let (experts, top_k, gate) = match op.kind {
        Kind::Experts { experts, top_k } => (experts, top_k, None),
        Kind::ExpertsBeside {
            experts,
            top_k,
            activation,
            product,
        } => (experts, top_k, Some((activation, product))),
        _ => unreachable!("called for experts"),
    };
    let Bound::Experts { table, .. } = l.bound(experts) else {
        unreachable!("recorded as experts");
    };
    let (x, scores) = (op.inputs[0], op.inputs[1]);
    let [n, hidden] = l.shape(x);
    let (pairs, inner) = (n * top_k, table.inner);
    let [parts, weights] = [op.outputs[0], op.outputs[1]];
    let glu = gate.map(|(activation, _)| {
        let of = [op.inputs[2], op.inputs[3], op.outputs[2]];
        glu_args(l, op, activation, of, (0, None))
    });
    let gate_up = device.arena.buffer(4 * pairs * 2 * inner);
    let (x, x_f16) = match table.reads_f16() {
        true => (0, l.f16_input(op)),
        false => (l.address(x), Activations::default()),
    };
    let rotated = (table.gate_up.is_rotated()).then(|| rotate(device, x, [n, hidden]));
    let rotated = rotated.as_ref().map(|x| x.activations(&device.arena));
    let x_f16 = rotated.unwrap_or(x_f16);
    let (parts, weights) = (l.address(parts), l.address(weights));
    let beside = gate.and_then(|(_, product)| product).zip(glu);
    let shared_expert = beside.map(|(w, glu)| shared_expert(l, op, w, &glu, n));
    let lists = if let Some(kernel) = routed_kernel(device, table, top_k, n) {
        let lists = Lists::new(device, table, top_k, n);
        let active =
            (kernel.second).map(|_| device.arena.buffer(ACTIVE_EXPERT_BYTES * (1 + pairs)));
        let routing = args::Routing {
            scores: l.address(scores),
            scale: table.scale_address(),
            weights,
            tables: [&table.gate_up, &table.down].map(|of| of.weights.address),
            list: active.as_ref().map_or(0, |list| list.address),
            lists: active.as_ref().map_or(lists.lists.address, |_| 0),
            pairs: lists.pairs.address,
            experts: table.gate_up.count as i32,
            top_k: top_k as i32,
            rows: n as i32,
            prefetched: prefetched(table, pairs),
        };
        let args = Args::default()
            .of(&routing)
            .ptr(gate_up.address)
            .of(&x_f16)
            .of(&glu.unwrap_or_default())
            .int(2 * inner)
            .int(kernel.tiles.tiles)
            .int(kernel.tiles.per_slice);
        let name = table.gate_up.gemv(kernel.tiles, kernel.name);
        device.launch(&name, kernel.grid, args);
        if let Some(second) = kernel.second {
            let between = (gate_up.address, parts);
            return product_glu_pipelined(device, table, second, &routing, between, shared_expert);
        }
        lists
    } else {
        let scores = (l.address(scores), l.shape(scores));
        let lists = route(device, scores, table, weights, top_k, glu.as_ref());
        product(
            device,
            &table.gate_up,
            (x, &x_f16),
            (gate_up.address, 2 * inner),
            hidden,
            &lists,
            false,
        );
        lists
    };
    if let Some(tiles) = fused_glu(device, table, top_k, n) {
        return product_glu(
            device,
            (&table.down, tiles),
            (gate_up.address, inner),
            (parts, hidden),
            &lists,
            table.activation,
            shared_expert,
        );
    }
    let h = device.arena.buffer(4 * pairs * inner);
    let h_f16 = Cell::f16(pairs, inner);
    let glu = GluArgs {
        gate: gate_up.address,
        x: gate_up.address + 4 * inner as Address,
        gate_stride: 2 * inner as u64,
        x_stride: 2 * inner as u64,
        y: h.address,
        copy: 0,
        cols: inner as i32,
        activation: number(table.activation) as i32,
        f16: h_f16.activations(&device.arena),
    };
    launch_glu(device, &glu, pairs);
    let rotated = (table.down.is_rotated()).then(|| rotate(device, h.address, [pairs, inner]));
    let own = rotated.as_ref();
    let own = own.map(|rotated| rotated.activations(&device.arena));
    product(
        device,
        &table.down,
        (h.address, &own.unwrap_or(glu.f16)),
        (parts, hidden),
        inner,
        &lists,
        true,
    );
}

/// The kernels' struct of the product of `n` rows that is computed beside the experts'.
fn shared_expert(
    l: &Launch<'_>,
    op: &Op,
    weights: Operand,
    glu: &GluArgs,
    n: usize,
) -> args::SharedExpert {
    let Bound::Weights(w) = l.bound(weights) else {
        unreachable!("recorded as weights");
    };
    args::SharedExpert {
        w: w.address(),
        y: l.address(op.outputs[3]),
        x: glu.f16,
        n_rows: n as i32,
    }
}

/// Launches the sum of each row's experts.
pub(crate) fn combine(l: &Launch<'_>, op: &Op) {
    let Kind::Combine { top_k } = op.kind else {
        unreachable!("called for this kind");
    };
    let y = op.outputs[0];
    let args = Args::default()
        .ptr(l.address(op.inputs[0]))
        .ptr(l.address(op.inputs[1]))
        .ptr(l.address(y))
        .int(l.shape(y)[1])
        .int(top_k)
        .long(l.len(y));
    let kernel = Kernel::new("moe_combine", "combine");
    l.device.launch(&kernel, Grid::each(l.len(y)), args);
}
