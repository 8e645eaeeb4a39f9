//! Mixtures of experts (kernels/moe.cu): rows choose on the device, and an expert's
//! weights are read once for all rows that chose it.

use crate::driver::{Args, Grid};
use crate::memory::{Block, Half, address};
use crate::pack::TILE_ROWS;
use crate::product::{Tiles, Weights};
use crate::rows::{glu_into, half};
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
    lists: u64,
    pairs: u64,
    /// Experts that can be in use.
    most: usize,
    top_k: usize,
}

/// `y[pair] = w[expert of pair] x`; `x` has a row for each pair, or one for each row.
fn product(
    cuda: &Cuda,
    w: &Addresses,
    (x, x_half): (u64, &Half),
    y: &Tensor,
    cols: usize,
    lists: &Lists,
    by_pair: bool,
) {
    let rows = y.cols();
    match w.tiles {
        None => {
            let args = Args::default()
                .ptr(w.weights.address)
                .ptr(x)
                .ptr(lists.lists)
                .ptr(lists.pairs)
                .ptr(address(y))
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
                .ptr(address(y))
                .words(&x_half.words())
                .ptr(lists.lists)
                .ptr(lists.pairs)
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
    let most = count.min(pairs);
    let kernel = |name| Kernel::new("moe", name);
    let chosen = cuda.arena.buffer(4 * pairs);
    let weights = cuda.arena.buffer(4 * pairs);
    let (list, order) = (
        cuda.arena.buffer(4 * (1 + 3 * most)),
        cuda.arena.buffer(4 * pairs),
    );
    let args = Args::default()
        .ptr(address(scores))
        .ptr(table.scale.as_ref().map_or(0, |s| s.address))
        .ptr(chosen.address)
        .ptr(weights.address);
    if n <= FEW_ROWS {
        let args = args
            .ptr(list.address)
            .ptr(order.address)
            .int(count)
            .int(top_k)
            .int(n);
        let grid = Grid {
            shared: 4 * count * n.max(2),
            ..Grid::new(1, 512)
        };
        cuda.launch(&kernel("route_group"), grid, args);
    } else {
        let args = args.int(count).int(top_k).int(n);
        let grid = Grid {
            shared: 4 * 4 * count,
            ..Grid::new(n.div_ceil(4), 128)
        };
        cuda.launch(&kernel("route"), grid, args);
        let args = Args::default()
            .ptr(chosen.address)
            .ptr(list.address)
            .ptr(order.address)
            .int(count)
            .int(pairs);
        let grid = Grid {
            shared: 2 * 4 * count,
            ..Grid::new(1, 1024)
        };
        cuda.launch(&kernel("group"), grid, args);
    }
    let lists = Lists {
        lists: list.address,
        pairs: order.address,
        most,
        top_k,
    };
    let both = cuda.tensor(pairs, 2 * inner);
    let x_half: Arc<Half> = half(cuda, x);
    product(
        cuda,
        &table.gate_up,
        (address(x), &x_half),
        &both,
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
    let parts = cuda.tensor(pairs, hidden);
    product(
        cuda,
        &table.down,
        (address(&h), &h_half),
        &parts,
        inner,
        &lists,
        true,
    );
    let y = cuda.tensor(n, hidden);
    let args = Args::default()
        .ptr(address(&parts))
        .ptr(weights.address)
        .ptr(address(&y))
        .int(hidden)
        .int(top_k)
        .long(n * hidden);
    cuda.launch(&kernel("combine"), Grid::each(n * hidden), args);
    y
}
