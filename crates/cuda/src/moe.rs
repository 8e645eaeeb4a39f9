//! Mixtures of experts (kernels/moe.cu): rows choose on the device, and an expert's
//! weights are read once for all rows that chose it.

use crate::driver::{Address, Args, Grid};
use crate::fuse::{Beside, Deferred, End, Glu, Mixed};
use crate::memory::{Block, Buffer, Half, address};
use crate::pack::TILE_ROWS;
use crate::product::{Single, Tiles, Weights};
use crate::rows::{glu_alone, half, number, threads};
use crate::{Cuda, Kernel};
use backend::{Activation, Experts, Matrix, Tensor};
use std::sync::Arc;

/// Experts of a row, at most: a lane has a rank.
const MAX_RANKS: usize = 32;

/// Rows that one block chooses for, a warp each.
const FEW_ROWS: usize = 16;

/// Warps of the block of `group`.
const GROUP_WARPS: usize = 32;

/// Warps of a block of `product_gated`, a row of tiles each.
const GATED_WARPS: usize = 8;

/// Bytes of a tile of 8 rows that `product_gated` makes for itself.
const MADE: usize = 8 * (64 * 2 + 16);

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
    factors: Option<Block>,
    tiles: Option<Tiles>,
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
    let factors: Vec<u64> = all.clone().map(|w| w.factors()).collect();
    Some(Addresses {
        weights: table(all.map(|w| w.address()).collect()),
        factors: factors.iter().any(|&f| f != 0).then(|| table(factors)),
        tiles,
    })
}

/// The step's pairs of row and rank, by expert.
struct Lists {
    pairs: Buffer,
    lists: Buffer,
    /// Experts that can be in use.
    most: usize,
    top_k: usize,
    /// Whether an expert has few pairs.
    few: bool,
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
            cuda.launch(&Kernel::new("plain", "product_experts"), grid, args);
        }
        Some(tiles) => {
            let args = Args::default()
                .ptr(w.weights.address)
                .ptr(w.factors.as_ref().map_or(0, |f| f.address))
                .ptr(y)
                .words(&x_half.words())
                .ptr(lists.lists.address)
                .ptr(lists.pairs.address)
                .int(lists.top_k)
                .int(usize::from(by_pair))
                .int(rows)
                .int(tiles.tiles)
                .int(tiles.per);
            let grid = Grid::rect(rows.div_ceil(2 * TILE_ROWS), lists.most, 32 * tiles.slices);
            let name = match lists.few {
                true => "product_experts",
                false => "product_experts_many",
            };
            cuda.launch(&tiles.kernel(name), grid, args);
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
    let mut words = [0; 7];
    if let Some((single, half, n)) = everyone {
        words[..3].copy_from_slice(&[single.w, single.factors, single.y]);
        words[3..6].copy_from_slice(&half.words());
        words[6] = n as u64;
    }
    let args = Args::default()
        .ptr(w.weights.address)
        .ptr(w.factors.as_ref().map_or(0, |f| f.address))
        .ptr(y)
        .ptr(both)
        .ptr(lists.lists.address)
        .ptr(lists.pairs.address)
        .int(number(activation))
        .int(rows)
        .int(cols)
        .int(tiles.tiles)
        .int(tiles.per)
        .words(&words);
    let columns = lists.most + usize::from(everyone.is_some());
    let grid = Grid {
        shared: tiles.tiles * MADE,
        ..Grid::rect(
            rows.div_ceil(GATED_WARPS * TILE_ROWS),
            columns,
            32 * GATED_WARPS,
        )
    };
    cuda.launch(&tiles.kernel("product_gated"), grid, args);
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
    let kernel = |name| Kernel::new("moe", name);
    let weights = cuda.arena.buffer(4 * pairs);
    let lists = Lists {
        lists: cuda.arena.buffer(4 * (1 + 3 * most)),
        pairs: cuda.arena.buffer(4 * pairs),
        most,
        top_k,
        few: n <= FEW_ROWS,
    };
    let written = [&weights, &lists.lists, &lists.pairs].map(|b| b.address);
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
            .words(&glu.map_or([0; 10], Glu::words))
            .ptr(table.gate_up.weights.address)
            .ptr(table.down.weights.address);
        let grid = Grid {
            shared: 4 * n * (count + 2 * top_k),
            ..Grid::new(1 + glu.map_or(0, |g| g.shares() * g.rows), 512)
        };
        cuda.launch(&kernel("route_group"), grid, args);
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
        .int(count)
        .int(pairs);
    let grid = Grid {
        shared: 4 * count * (1 + GROUP_WARPS),
        ..Grid::new(1, 32 * GROUP_WARPS)
    };
    cuda.launch(&kernel("group"), grid, args);
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
    let fits = |t: &Tiles| n <= FEW_ROWS && n * t.tiles <= MOST_MADE;
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
    (Kernel::new("moe", "combine"), Grid::each(n), args)
}

/// The kernel of a sum of rows, a mixture among them, and of what is made of it.
pub(crate) fn end(end: &End, m: &Mixed) -> (Kernel, Grid, Args) {
    let parts = [m.parts.address, m.weights.address, m.y, m.top_k as u64];
    let args = Args::default().words(&parts);
    let (name, args) = match &m.beside {
        Beside::Nothing => unreachable!("a mixture that nothing is beside"),
        Beside::Gated { by, .. } => {
            let by = [by.x, by.gate, by.y, number(by.activation) as u64];
            let args = args.words(&by).ptr(end.from).ptr(end.x);
            ("mixed_norm", args)
        }
        Beside::Norms { dense, own, .. } => {
            let own = own.as_ref().expect("the norm of what was added");
            let by = [dense.x, dense.weight, own.weight, dense.y, own.y];
            let args = args.words(&by).ptr(end.from).ptr(end.x).ptr(end.post);
            ("mixture_norm", args)
        }
    };
    let args = args.int(end.cols).float(end.factor).float(end.eps);
    let grid = Grid::new(end.rows, threads(end.cols));
    (
        Kernel::new("moe", name),
        grid,
        args.words(&end.next_words()),
    )
}
