//! Mixtures of experts (kernels/moe.cu): rows choose on the device, and an expert's
//! weights are read once for all rows that chose it.

use crate::driver::{Args, Grid, two};
use crate::fuse::{Deferred, Gated, Mixed};
use crate::memory::{Block, Buffer, Half, address};
use crate::pack::TILE_ROWS;
use crate::product::{Tiles, Weights};
use crate::rows::{glu_into, half, number, threads};
use crate::{Cuda, Kernel};
use backend::{Experts, Matrix, Tensor};
use std::sync::Arc;

/// Rows that one block chooses for, a warp each.
const FEW_ROWS: usize = 16;

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
            cuda.launch(&tiles.kernel("product_experts"), grid, args);
        }
    }
}

/// The weight of each pair of row and rank, and the pairs by expert.
fn route(cuda: &Cuda, scores: &Tensor, scale: Option<&Block>, top_k: usize) -> (Buffer, Lists) {
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
    };
    let args = Args::default()
        .ptr(address(scores))
        .ptr(scale.map_or(0, |s| s.address));
    if n <= FEW_ROWS {
        let args = args
            .ptr(weights.address)
            .ptr(lists.lists.address)
            .ptr(lists.pairs.address)
            .int(count)
            .int(top_k)
            .int(n);
        let grid = Grid {
            shared: 4 * n * (count + 2 * top_k),
            ..Grid::new(1, 512)
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
        shared: 2 * 4 * count,
        ..Grid::new(1, 1024)
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
    let Some(table) = table else {
        return backend::moe::grouped(cuda, x, scores, experts);
    };
    let pairs = n * top_k;
    let (weights, lists) = route(cuda, scores, table.scale.as_ref(), top_k);
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
    let h = cuda.tensor(pairs, inner);
    let gate = address(&both);
    let up = gate + 4 * inner as u64;
    let h_half = glu_into(
        cuda,
        [(gate, 2 * inner), (up, 2 * inner)],
        address(&h),
        [pairs, inner],
        experts.activation,
    );
    let parts = cuda.arena.buffer(4 * pairs * hidden);
    product(
        cuda,
        &table.down,
        (address(&h), &h_half),
        (parts.address, hidden),
        inner,
        &lists,
        true,
    );
    let y = cuda.tensor(n, hidden);
    // A shared expert and a norm may follow.
    cuda.driver.defer(Deferred::Mixed(Mixed {
        parts,
        weights,
        y: address(&y),
        rows: n,
        cols: hidden,
        top_k,
        gated: None,
        added: false,
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

/// What is deferred, if it is the sum of experts that goes to `y`, a shared one included,
/// and what a norm of it writes, `n` and `half`, is nothing that another row still reads.
pub(crate) fn take_mixed(cuda: &Cuda, y: u64, [n, half]: [u64; 2]) -> Option<(Mixed, Gated)> {
    match cuda.driver.take_deferred()? {
        Deferred::Mixed(m) if m.added && m.y == y && m.cols.is_multiple_of(2) => {
            let gated = m.gated.expect("what was added");
            if gated.gate != n && ![gated.x, gated.gate, gated.y].contains(&half) {
                return Some((m, gated));
            }
            cuda.driver.defer(Deferred::Mixed(m));
        }
        other => cuda.driver.defer(other),
    }
    None
}

/// The norm of a sum of experts, together with it: of `x`, `next` and where the norm goes.
pub(crate) fn mixed_norm(
    cuda: &Cuda,
    (m, gated): (&Mixed, Gated),
    [x, next, to]: [u64; 3],
    factor: f32,
    eps: f32,
    half: &Half,
) {
    let words = [
        m.parts.address,
        m.weights.address,
        gated.x,
        gated.gate,
        m.y,
        gated.y,
        two(m.top_k, number(gated.activation)),
    ];
    let args = Args::default()
        .words(&words)
        .ptr(x)
        .ptr(next)
        .ptr(to)
        .int(m.cols)
        .float(factor)
        .float(eps)
        .words(&half.words());
    let grid = Grid::new(m.rows, threads(m.cols));
    cuda.launch(&Kernel::new("moe", "mixed_norm"), grid, args);
}
