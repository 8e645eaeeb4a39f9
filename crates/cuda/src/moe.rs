//! Mixtures of experts (kernels/moe_*.cu): rows choose on the device, and an expert's
//! weights are read once for all rows that chose it.

use crate::driver::{Address, Args, Grid};
use crate::elementwise::{glu_alone, half, number, threads};
use crate::fuse::{Beside, Deferred, End, Glu, Mixed};
use crate::matmul::{FEED_SUMS, FEED_TILES, FEED_WARPS, Single, Tiles, Weights, feeds};
use crate::memory::{Block, Buffer, Half, address};
use crate::pack::{Packing, TILE_ROWS};
use crate::{Cuda, Kernel, args, gemm};
use backend::{Activation, Experts, Matrix, Tensor};
use std::sync::Arc;

/// Experts of a row, at most: a lane has a rank.
const MAX_RANKS: usize = 32;

/// Rows that one block chooses for, a warp each.
const FEW_ROWS: usize = 16;

/// Threads of a block of `route_and_group`.
const ROUTE_THREADS: usize = 32 * FEW_ROWS;

/// Warps of the block of `group_pairs`.
const GROUP_WARPS: usize = 32;

/// Warps of a block of `moe_gemv_glu`, a row tile each.
pub(crate) const GATED_WARPS: usize = 8;

/// Bytes of a tile of 8 rows that `moe_gemv_glu` computes for itself.
const MADE: usize = 8 * (64 * 2 + 2 * 4);

/// Tiles that such a block makes, at most: every other block of its expert makes them again.
const MOST_MADE: usize = 64;

/// Where a layer's experts lie; nothing, if they are stored in different formats.
pub(crate) type ExpertTable = Option<Table>;

/// Addresses of a layer's experts, by expert.
pub(crate) struct Table {
    gate_up: Addresses,
    down: Addresses,
    scale: Option<Block>,
}

/// The matrices of one kind, by expert.
struct Addresses {
    weights: Block,
    tiles: Option<Tiles>,
}

/// Rows whose experts are fed through rings in shared memory, at most: as many as a
/// tensor-core product takes.
const FED_ROWS: usize = 8;

/// Bytes of shared memory that a warp of `moe_gemv_pipelined` has for its slice of the rows
/// and for stages of weights.
pub(crate) const EXPERTS_SPACE: usize = 12_160;

/// Bytes of a tile of a row there: values, their rescale and the scale of the slice.
pub(crate) const RECORD: usize = 64 * 2 + 16;

/// Bytes of a tile of a row in `moe_gemv_glu_pipelined`, and stages of a warp there.
pub(crate) const GATED_RECORD: usize = 192;
pub(crate) const GATED_STAGES: usize = 4;

/// Bytes of an expert in shared memory, with two numbers of each of its pairs.
const LISTED: usize = CHOSEN + 2 * 4;
/// Bytes of the kernels' `ActiveExpert`.
const CHOSEN: usize = size_of::<args::ActiveExpert>();

/// Bytes of the kernels' `ExpertBlock`.
const SOME: usize = size_of::<args::ExpertBlock>();

/// Pairs of an expert, on average, from which on they are multiplied as many rows are.
const MANY_PAIRS: usize = 24;

/// Bytes of shared memory that a block of `moe_gemv_glu_pipelined` takes, at most, so that two fit.
const GATED_SHARED: usize = 115_000;

/// Whether kernels that feed experts take the format: those whose codes lanes bring.
fn fed(cuda: &Cuda, tiles: Tiles, n: usize) -> bool {
    matches!(tiles.packing, Packing::Codes { .. }) && has_list(cuda, n)
}

/// Whether experts that so many rows choose are listed for them.
fn has_list(cuda: &Cuda, n: usize) -> bool {
    n <= FED_ROWS && feeds(&cuda.driver)
}

/// The kernel of experts' first product that has room for `n` rows, and its blocks' shared memory.
fn feed_experts(
    cuda: &Cuda,
    tiles: Tiles,
    n: usize,
    pairs: usize,
) -> Option<(&'static str, usize)> {
    let bytes = tiles.packing.tile_bytes();
    // The kernels' row_tiles_per_stage(1).
    let rows = match bytes {
        ..=640 => 4,
        641..=1152 => 2,
        _ => 1,
    };
    let left = EXPERTS_SPACE.checked_sub((n * tiles.per * RECORD).next_multiple_of(128))?;
    let name = match left / (rows * bytes).next_multiple_of(32) {
        5.. => "moe_gemv_pipelined_5",
        4 => "moe_gemv_pipelined_4",
        2.. => "moe_gemv_pipelined_2",
        _ => return None,
    };
    let shared = tiles.slices * (EXPERTS_SPACE + FEED_SUMS) + pairs * LISTED;
    let fits = tiles.per <= FEED_TILES && shared <= cuda.driver.shared;
    (fed(cuda, tiles, n) && fits).then_some((name, shared))
}

/// Shared memory of a block of `feed_gated`, if that is for `n` rows of `pairs` pairs.
fn feed_gated(cuda: &Cuda, tiles: Tiles, n: usize, pairs: usize) -> Option<usize> {
    let bytes = tiles.packing.tile_bytes();
    // The kernel's stages of STAGE_TILES tiles.
    let stages = GATED_STAGES * bytes * if bytes <= 640 { 4 } else { 2 };
    let shared = GATED_WARPS * stages + tiles.tiles * 8 * GATED_RECORD + (pairs + 1) * LISTED;
    (fed(cuda, tiles, n) && shared <= GATED_SHARED).then_some(shared)
}

fn addresses<'a>(
    cuda: &Cuda,
    matrices: impl Iterator<Item = &'a Matrix> + Clone,
) -> Option<Addresses> {
    let all = matrices.map(|m| m.storage::<Weights>());
    let tiles = all.clone().next().and_then(|w| w.tiles());
    if all.clone().any(|w| w.tiles() != tiles) {
        return None;
    }
    let table = |list: Vec<u64>| Block::of(&cuda.driver, &list, "a table of experts");
    Some(Addresses {
        weights: table(all.map(|w| w.address()).collect()),
        tiles,
    })
}

/// The step's pairs of row and rank, by expert.
struct Lists {
    pairs: Buffer,
    lists: Buffer,
    /// For the kernels that feed experts: [`CHOSEN`] bytes each.
    chosen: Option<Buffer>,
    /// For those of many pairs an expert: [`SOME`] bytes each, and how many there can be.
    blocks: Option<(Buffer, usize)>,
    /// Experts that can be in use.
    most: usize,
    top_k: usize,
    /// Of the step.
    rows: usize,
}

/// `y[pair] = w[expert of pair] x`; `x` has a row for each pair, or one for each row.
fn product(
    cuda: &Cuda,
    w: &Addresses,
    (x, x_half): (u64, &Half),
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
            cuda.launch(&Kernel::new("gemv_f32", "moe_gemv_f32"), grid, args);
        }
        Some(tiles) if let Some((list, most)) = &lists.blocks => {
            let blocks = gemm::Blocks {
                list: list.address,
                pairs: lists.pairs.address,
                top_k: lists.top_k,
                most: *most,
            };
            let w = (w.weights.address, tiles);
            gemm::grouped(cuda, x_half, by_pair, w, (y, rows), &blocks);
        }
        Some(tiles) => {
            let pairs = lists.rows * lists.top_k;
            let blocks = cuda.driver.sms * (FEED_WARPS / tiles.slices);
            // With a row tile or two a block, a ring has nothing to run ahead of.
            let enough = pairs * rows.div_ceil(TILE_ROWS) > 2 * blocks;
            let feed = feed_experts(cuda, tiles, lists.rows, pairs);
            let feed = feed.filter(|_| !by_pair && enough);
            if let Some(((name, shared), chosen)) = feed.zip(lists.chosen.as_ref()) {
                let args = Args::default()
                    .ptr(chosen.address)
                    .ptr(y)
                    .of(&x_half.args())
                    .ptr(lists.pairs.address)
                    .int(lists.rows)
                    .int(lists.top_k)
                    .int(rows)
                    .int(tiles.tiles)
                    .int(tiles.per);
                let grid = Grid::new(blocks, 32 * tiles.slices);
                return cuda.launch(
                    &tiles.kernel("moe_gemv", name),
                    Grid { shared, ..grid },
                    args,
                );
            }
            let args = Args::default()
                .ptr(w.weights.address)
                .ptr(y)
                .of(&x_half.args())
                .ptr(lists.lists.address)
                .ptr(lists.pairs.address)
                .int(lists.top_k)
                .int(usize::from(by_pair))
                .int(rows)
                .int(tiles.tiles)
                .int(tiles.per);
            let grid = Grid::rect(rows.div_ceil(2 * TILE_ROWS), lists.most, 32 * tiles.slices);
            let name = match lists.rows {
                ..=FEW_ROWS => "moe_gemv_8",
                _ => "moe_gemv_16",
            };
            cuda.launch(&tiles.kernel("moe_gemv", name), grid, args);
        }
    }
}

/// `y[pair] = w[expert of pair] (activation(gate) up)` of what `both` has for the pair, and a
/// product that has nothing to do with experts but its shape.
fn product_gated(
    cuda: &Cuda,
    (w, tiles): (&Addresses, Tiles),
    (both, cols): (Address, usize),
    (y, rows): (Address, usize),
    lists: &Lists,
    activation: Activation,
    everyone: Option<(&Single, &Half, usize)>,
) {
    let shared_expert = everyone.map(|(single, half, n)| args::SharedExpert {
        w: single.w,
        y: single.y,
        x: half.args(),
        n_rows: n as i32,
    });
    let shared_expert = shared_expert.unwrap_or_default();
    let pairs = lists.rows * lists.top_k;
    let feed = feed_gated(cuda, tiles, lists.rows, pairs).zip(lists.chosen.as_ref());
    if let Some((shared, chosen)) = feed {
        let args = Args::default()
            .ptr(chosen.address)
            .ptr(y)
            .ptr(both)
            .ptr(lists.pairs.address)
            .int(number(activation))
            .int(pairs)
            .int(rows)
            .int(cols)
            .int(tiles.tiles)
            .int(tiles.per)
            .of(&shared_expert);
        let grid = Grid::new(2 * cuda.driver.sms, 32 * GATED_WARPS);
        return cuda.launch(
            &tiles.kernel("moe_gemv_glu", "moe_gemv_glu_pipelined"),
            Grid { shared, ..grid },
            args,
        );
    }
    let args = Args::default()
        .ptr(w.weights.address)
        .ptr(y)
        .ptr(both)
        .ptr(lists.lists.address)
        .ptr(lists.pairs.address)
        .int(number(activation))
        .int(rows)
        .int(cols)
        .int(tiles.tiles)
        .int(tiles.per)
        .of(&shared_expert);
    let columns = lists.most + usize::from(everyone.is_some());
    let grid = Grid {
        shared: tiles.tiles * MADE,
        ..Grid::rect(
            rows.div_ceil(GATED_WARPS * TILE_ROWS),
            columns,
            32 * GATED_WARPS,
        )
    };
    cuda.launch(&tiles.kernel("moe_gemv_glu", "moe_gemv_glu"), grid, args);
}

/// The weight of each pair of row and rank, and the pairs by expert. A gate is made beside
/// them, or by itself, and its product left to the caller.
fn route(
    cuda: &Cuda,
    scores: &Tensor,
    table: &Table,
    top_k: usize,
    mut glu: Option<&Glu>,
) -> (Buffer, Lists) {
    let (n, count) = (scores.rows(), scores.cols());
    let pairs = n * top_k;
    let most = count.min(pairs);
    let kernel = |name| Kernel::new("moe_route", name);
    // An expert's last block may be of a single pair.
    let blocks = (n > FEW_ROWS && pairs >= MANY_PAIRS * count && gemm::warpgroups(&cuda.driver))
        .then(|| pairs / gemm::PAIRS + most);
    let weights = cuda.arena.buffer(4 * pairs);
    let lists = Lists {
        lists: cuda.arena.buffer(4 * (1 + 3 * most)),
        pairs: cuda.arena.buffer(4 * pairs),
        chosen: has_list(cuda, n).then(|| cuda.arena.buffer(CHOSEN * (1 + 2 * pairs))),
        blocks: blocks.map(|blocks| (cuda.arena.buffer(SOME * (1 + blocks)), blocks)),
        most,
        top_k,
        rows: n,
    };
    let mut written = [&weights, &lists.lists, &lists.pairs]
        .map(|b| b.address)
        .to_vec();
    written.extend(lists.chosen.as_ref().map(|b| b.address));
    let reads = |glu: &Glu| [glu.gate.0, glu.x.0].iter().any(|at| written.contains(at));
    if let Some(alone) = glu.take_if(|glu| n > FEW_ROWS || glu.copy != 0 || reads(glu)) {
        let (kernel, grid, args) = glu_alone(alone);
        cuda.launch(&kernel, grid, args);
    }
    let args = Args::default()
        .ptr(address(scores))
        .ptr(table.scale.as_ref().map_or(0, |s| s.address));
    if n <= FEW_ROWS {
        let args = args
            .ptr(weights.address)
            .ptr(lists.lists.address)
            .ptr(lists.pairs.address)
            .int(count)
            .int(top_k)
            .int(n)
            .of(&glu.map_or(args::GluArgs::default(), Glu::args))
            .ptr(table.gate_up.weights.address)
            .ptr(table.down.weights.address)
            .ptr(lists.chosen.as_ref().map_or(0, |b| b.address));
        let grid = Grid {
            shared: 4 * n * (count + 2 * top_k),
            ..Grid::new(
                1 + glu.map_or(0, |g| g.shares(ROUTE_THREADS) * g.rows),
                ROUTE_THREADS,
            )
        };
        cuda.launch(&kernel("route_and_group"), grid, args);
        return (weights, lists);
    }
    let chosen = cuda.arena.buffer(4 * pairs);
    let args = args.ptr(chosen.address).ptr(weights.address);
    let args = args.int(count).int(top_k).int(n);
    let grid = Grid {
        shared: 4 * 4 * count,
        ..Grid::new(n.div_ceil(4), 128)
    };
    cuda.launch(&kernel("route"), grid, args);
    let args = Args::default()
        .ptr(chosen.address)
        .ptr(lists.lists.address)
        .ptr(lists.pairs.address)
        .ptr(lists.blocks.as_ref().map_or(0, |(list, _)| list.address))
        .int(count)
        .int(pairs)
        .int(gemm::PAIRS);
    let grid = Grid {
        shared: 4 * count * (1 + GROUP_WARPS),
        ..Grid::new(1, 32 * GROUP_WARPS)
    };
    cuda.launch(&kernel("group_pairs"), grid, args);
    (weights, lists)
}

pub(crate) fn moe(cuda: &Cuda, x: &Tensor, scores: &Tensor, experts: &Experts) -> Tensor {
    let (n, hidden) = (x.rows(), x.cols());
    let (count, top_k) = (experts.experts.len(), experts.top_k);
    let first = &experts.experts[0];
    let inner = first.down.cols;
    assert_eq!(
        (scores.rows(), scores.cols(), first.gate_up.cols),
        (n, count, hidden),
        "a score an expert"
    );
    let table = first.gate_up.storage::<Weights>().experts.get_or_init(|| {
        let all = experts.experts.iter();
        let scale = experts.scale.as_ref();
        Some(Table {
            gate_up: addresses(cuda, all.clone().map(|e| &e.gate_up))?,
            down: addresses(cuda, all.map(|e| &e.down))?,
            scale: scale.map(|s| Block::of(&cuda.driver, s, "factors of experts")),
        })
    });
    let Some(table) = table.as_ref().filter(|_| top_k <= MAX_RANKS) else {
        return backend::moe::grouped(cuda, x, scores, experts);
    };
    let pairs = n * top_k;
    // A gate and a product of it that wait, of a dense block or a shared expert.
    let beside = match cuda.driver.take_deferred() {
        Some(Deferred::Glu(glu)) if glu.y != address(x) => Some(glu),
        other => {
            other.into_iter().for_each(|ops| cuda.driver.defer(ops));
            None
        }
    };
    let (weights, lists) = route(cuda, scores, table, top_k, beside.as_ref());
    let fits = |t: &Tiles| {
        n <= FEW_ROWS && n * t.tiles <= MOST_MADE || feed_gated(cuda, *t, n, pairs).is_some()
    };
    let gated = table.down.tiles.filter(fits);
    let gated = gated.filter(|_| table.gate_up.tiles.is_some());
    // The product goes with those of experts, if it has their shape.
    let (mut everyone, mut half_of_all) = (None, None);
    if let Some(glu) = beside {
        half_of_all = Some(glu.half.clone());
        everyone = glu.product;
        let apart = |s: &mut Single| Some(s.tiles) != gated || s.rows != hidden || s.n != n;
        if let Some(single) = everyone.take_if(apart) {
            let (kernel, grid, args) = single.launch;
            cuda.launch(&kernel, grid, args);
        }
    }
    let both = cuda.tensor(pairs, 2 * inner);
    let x_half: Arc<Half> = half(cuda, x);
    product(
        cuda,
        &table.gate_up,
        (address(x), &x_half),
        (address(&both), 2 * inner),
        hidden,
        &lists,
        false,
    );
    let parts = cuda.arena.buffer(4 * pairs * hidden);
    let gate = address(&both);
    if let Some(tiles) = gated {
        let everyone = everyone.as_ref().zip(half_of_all.as_deref());
        product_gated(
            cuda,
            (&table.down, tiles),
            (gate, inner),
            (parts.address, hidden),
            &lists,
            experts.activation,
            everyone.map(|(single, half)| (single, half, n)),
        );
    } else {
        let h = cuda.tensor(pairs, inner);
        let glu = Glu {
            gate: (gate, 2 * inner),
            x: (gate + 4 * inner as Address, 2 * inner),
            y: address(&h),
            copy: 0,
            rows: pairs,
            cols: inner,
            activation: experts.activation,
            half: Arc::new(Half::new(&cuda.arena, pairs, inner)),
            product: None,
        };
        let (kernel, grid, args) = glu_alone(&glu);
        cuda.launch(&kernel, grid, args);
        product(
            cuda,
            &table.down,
            (address(&h), &glu.half),
            (parts.address, hidden),
            inner,
            &lists,
            true,
        );
    }
    let y = cuda.tensor(n, hidden);
    // A shared expert and a norm may follow.
    cuda.driver.defer(Deferred::Mixed(Mixed {
        parts,
        weights,
        y: address(&y),
        rows: n,
        cols: hidden,
        top_k,
        beside: Beside::Nothing,
    }));
    y
}

/// The kernel of a row's sum over its experts.
pub(crate) fn combine_alone(m: &Mixed) -> (Kernel, Grid, Args) {
    let n = m.rows * m.cols;
    let args = Args::default()
        .ptr(m.parts.address)
        .ptr(m.weights.address)
        .ptr(m.y)
        .int(m.cols)
        .int(m.top_k)
        .long(n);
    (Kernel::new("moe_combine", "combine"), Grid::each(n), args)
}

/// The kernel of a sum of rows, a mixture among them, and of what is made of it.
pub(crate) fn end(end: &End, m: &Mixed) -> (Kernel, Grid, Args) {
    let args = Args::default().of(&args::ExpertOutputs {
        parts: m.parts.address,
        weights: m.weights.address,
        y: m.y,
        top_k: m.top_k as i32,
    });
    let (name, args) = match &m.beside {
        Beside::Nothing => unreachable!("a mixture that nothing is beside"),
        Beside::Gated { by, .. } => {
            let args = args.of(&args::GatedSharedExpert {
                x: by.x,
                gate: by.gate,
                gated: by.y,
                activation: number(by.activation) as i32,
            });
            let args = args.ptr(end.from).ptr(end.x);
            ("moe_shared_norm", args)
        }
        Beside::Norms { dense, own, .. } => {
            let own = own.as_ref().expect("the norm of what was added");
            let args = args.of(&args::DenseBranch {
                dense: dense.x,
                dense_weight: dense.weight,
                own_weight: own.weight,
                sum: dense.y,
                own: own.y,
            });
            let args = args.ptr(end.from).ptr(end.x).ptr(end.post);
            ("moe_dense_norm", args)
        }
    };
    let args = args.int(end.cols).float(end.factor).float(end.eps);
    let grid = Grid::rows(end.rows, threads(end.cols));
    (
        Kernel::new("moe_combine", name),
        grid,
        args.of(&end.epilogue()),
    )
}
