//! Weights and their products (kernels/gemv*.cu, kernels/embed.cu).

use crate::args::MatrixGroup;
use crate::driver::{Address, Args, Driver, Grid};
use crate::elementwise::half;
use crate::fuse::Deferred;
use crate::gemm;
use crate::memory::{Block, Half, address, address_mut};
use crate::moe::ExpertTable;
use crate::pack::{self, Packing, TILE, TILE_ROWS};
use crate::step::Tokens;
use crate::{Cuda, Kernel};
use backend::{Matrix, Tensor, TokenGroups};
use quant::{Scalar, Stored};
use std::sync::OnceLock;

/// Threads of a block that ranks groups of tokens.
const GROUPS: usize = 128;

/// Rows of activations that one tensor-core product takes.
const TOKENS: usize = 8;

/// Rows of activations that are too few for [`gemm`].
const FEW: usize = 32;

/// Bytes of shared memory that a warp of `gemv_pipelined` takes: its pipeline, and its partial
/// results on their way to the other slices.
const FEED_SHARED: usize = FEED_PIPELINE + FEED_SUMS;
pub(crate) const FEED_PIPELINE: usize = 12_384;
pub(crate) const FEED_SUMS: usize = 2_048;

/// Tiles of a slice that `gemv_pipelined` has room for.
pub(crate) const FEED_TILES: usize = 32;

/// Warps of `gemv_pipelined` on a multiprocessor.
pub(crate) const FEED_WARPS: usize = 16;

/// A matrix on the device.
pub(crate) struct Weights {
    block: Block,
    /// Absent for f32.
    packed: Option<Tiles>,
    /// Where a layer's experts lie, kept with the first of them.
    pub(crate) experts: OnceLock<ExpertTable>,
}

/// How a packed matrix is walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tiles {
    pub(crate) packing: Packing,
    /// Tiles of a row.
    pub(crate) tiles: usize,
    /// Runs that a row's tiles are cut into, and tiles of a run. They decide the
    /// order of the sum, so they depend on the matrix alone.
    pub(crate) slices: usize,
    pub(crate) per: usize,
}

impl Tiles {
    pub(crate) fn new(packing: Packing, cols: usize) -> Self {
        let tiles = cols.div_ceil(TILE);
        let most = if tiles < 128 { 8 } else { 16 };
        let per = tiles.div_ceil(most.min(tiles.div_ceil(4)));
        Tiles {
            packing,
            tiles,
            slices: tiles.div_ceil(per),
            per,
        }
    }

    pub(crate) fn kernel(&self, file: &'static str, name: &'static str) -> Kernel {
        let mut kernel = Kernel::new(file, name);
        kernel.defines = self.packing.defines();
        // One compilation serves every shape of the same number of warps.
        kernel.defines.push(("SLICES", self.slices));
        let unroll = match self.packing {
            Packing::Plain | Packing::Codes { bits: 5.., .. } => 2,
            Packing::Codes { .. } | Packing::E4m3 { .. } => 4,
        };
        kernel.defines.push(("UNROLL", unroll));
        kernel
    }
}

impl Weights {
    pub(crate) fn address(&self) -> Address {
        self.block.address
    }

    pub(crate) fn tiles(&self) -> Option<Tiles> {
        self.packed
    }
}

pub(crate) fn matrix(cuda: &Cuda, parts: &[Stored<'_>]) -> Matrix {
    let cols = parts[0].cols;
    assert!(parts.iter().all(|p| p.cols == cols), "parts of one width");
    let rows: usize = parts.iter().map(|p| p.rows).sum();
    let format = parts[0].format.name;
    let what = format!("a matrix of {rows} by {cols} weights in {format}");
    let weights = match Packing::of(parts) {
        None => {
            let values: Vec<f32> = parts.iter().flat_map(Stored::to_f32).collect();
            Weights {
                block: Block::of(&cuda.driver, &values, &what),
                packed: None,
                experts: OnceLock::new(),
            }
        }
        Some(packing) => Weights {
            block: Block::of(&cuda.driver, &pack::pack(packing, parts), &what),
            packed: Some(Tiles::new(packing, cols)),
            experts: OnceLock::new(),
        },
    };
    Matrix::new(rows, cols, format, weights.block.bytes, Box::new(weights))
}

/// Random weights, made on the device.
pub(crate) fn random_matrix(
    cuda: &Cuda,
    rows: usize,
    cols: usize,
    format: &'static quant::Format,
) -> Matrix {
    let packing = if format.can_encode() {
        let row = quant::encode(format, &vec![0.0; cols], cols, Scalar::Bf16);
        Packing::of(&[row.view()])
    } else {
        // Codes that others write, with a scale a row.
        let (codes, scales) = (vec![0; format.code_bytes(cols)], [0; 4]);
        Packing::of(&[Stored {
            format,
            rows: 1,
            cols,
            codes: &codes,
            scale: Scalar::F32,
            scales: &scales,
            biases: &[],
            tiles: quant::Tiles::of_rows(cols),
            mapping: None,
        }])
    };
    let packing = packing.expect("a format that is packed");
    let tiles = Tiles::new(packing, cols);
    let (of_tiles, of_factors) = pack::bytes(packing, rows, cols);
    let bytes = of_tiles + of_factors;
    let block = Block::new(&cuda.driver, bytes, "random weights");
    let args = Args::default()
        .ptr(block.address)
        .float((cols as f32).sqrt().recip())
        .long(of_tiles / 4)
        .long(bytes / 4);
    cuda.launch(
        &tiles.kernel("embed", "random_tiles"),
        Grid::each(bytes / 4),
        args,
    );
    // Products ask for weights before they wait for other kernels.
    cuda.driver.wait();
    let weights = Weights {
        block,
        packed: Some(tiles),
        experts: OnceLock::new(),
    };
    Matrix::new(rows, cols, format.name, bytes, Box::new(weights))
}

pub(crate) fn embed(cuda: &Cuda, table: &Matrix, tokens: &[u32], scale: f32) -> Tensor {
    assert!(
        tokens.iter().all(|&t| (t as usize) < table.rows),
        "tokens of the table"
    );
    let w = table.storage::<Weights>();
    let y = cuda.tensor(tokens.len(), table.cols);
    let n = tokens.len() * table.cols;
    // A recorded step reads its own tokens, whatever they are by then.
    let recorded = cuda.recorded_tokens(tokens);
    let uploaded = recorded.is_none().then(|| cuda.arena.of(tokens));
    let [ids, batch] = match recorded {
        Some(Tokens::Rows(batch)) => [0, batch],
        Some(Tokens::Chosen(ids)) => [ids, 0],
        None => [uploaded.as_ref().map_or(0, |ids| ids.address), 0],
    };
    let args = Args::default().ptr(w.address());
    let args = args.ptr(ids).ptr(batch).ptr(address(&y));
    let (kernel, args) = match w.packed {
        None => (Kernel::new("gemv_f32", "embed_f32"), args.int(table.cols)),
        Some(t) => (
            t.kernel("embed", "embed"),
            args.int(table.rows).int(table.cols).int(t.tiles),
        ),
    };
    cuda.launch(&kernel, Grid::each(n), args.float(scale).long(n));
    y
}

/// One matrix' product, ready to be launched.
pub(crate) struct Single {
    pub(crate) tiles: Tiles,
    pub(crate) w: Address,
    pub(crate) y: Address,
    /// Rows of the matrix, and of its input.
    pub(crate) rows: usize,
    pub(crate) n: usize,
    pub(crate) launch: (Kernel, Grid, Args),
}

/// Has the product of a gate that waits wait with it, of few rows; returns whether it does.
fn defer_product(cuda: &Cuda, x: &Tensor, w: &Matrix, y: &mut Tensor) -> bool {
    let weights = w.storage::<Weights>();
    match (cuda.driver.take_deferred(), weights.packed) {
        (Some(Deferred::Glu(mut glu)), Some(tiles))
            if x.rows() <= FEW && glu.y == address(x) && glu.product.is_none() =>
        {
            let y = address_mut(y);
            glu.product = Some(Single {
                tiles,
                w: weights.address(),
                y,
                rows: w.rows,
                n: x.rows(),
                launch: few(cuda, (x.rows(), &glu.half), tiles, &[(w, y)]),
            });
            cuda.driver.defer(Deferred::Glu(glu));
            true
        }
        (other, _) => {
            other.into_iter().for_each(|ops| cuda.driver.defer(ops));
            false
        }
    }
}

pub(crate) fn matmul_into(cuda: &Cuda, x: &Tensor, w: &[&Matrix], y: &mut [Tensor]) {
    let n = x.rows();
    for (w, y) in w.iter().zip(&*y) {
        assert_eq!(
            (w.cols, w.rows, n),
            (x.cols(), y.cols(), y.rows()),
            "shapes of a product"
        );
    }
    if let ([w], [y]) = (w, &mut *y)
        && defer_product(cuda, x, w, y)
    {
        return;
    }
    let mut rest: Vec<(&Matrix, Address)> = w
        .iter()
        .copied()
        .zip(y.iter_mut().map(address_mut))
        .collect();
    while let Some(&(first, _)) = rest.first() {
        let tiles = first.storage::<Weights>().packed;
        let same = rest
            .iter()
            .take_while(|(w, _)| w.storage::<Weights>().packed == tiles)
            .count();
        let group: Vec<_> = rest.drain(..same.min(4)).collect();
        match tiles {
            None => group.iter().for_each(|&(w, y)| plain(cuda, x, w, y)),
            Some(tiles) if n > FEW => gemm::product(cuda, x, tiles, &group),
            Some(tiles) => {
                let half = half(cuda, x);
                let (kernel, grid, args) = few(cuda, (n, &half), tiles, &group);
                cuda.launch(&kernel, grid, args);
            }
        }
    }
}

fn plain(cuda: &Cuda, x: &Tensor, w: &Matrix, y: Address) {
    let args = Args::default()
        .ptr(w.storage::<Weights>().address())
        .ptr(address(x))
        .ptr(0)
        .ptr(y)
        .int(w.rows)
        .int(w.cols);
    let grid = Grid::rect(w.rows.div_ceil(8), x.rows(), 256);
    cuda.launch(&Kernel::new("gemv_f32", "gemv_f32"), grid, args);
}

/// Whether products of a few rows go through pipelines in shared memory.
pub(crate) fn feeds(driver: &Driver) -> bool {
    driver.arch >= 90 && driver.shared >= FEED_WARPS * FEED_SHARED
}

/// Up to four matrices of one packing and width.
pub(crate) type Group<'a> = [(&'a Matrix, Address)];

/// Rows of tiles in a group.
fn row_tiles(group: &Group<'_>) -> usize {
    group.iter().map(|(w, _)| w.rows.div_ceil(TILE_ROWS)).sum()
}

/// The kernels' struct of a group, and blocks of `r` rows of tiles that it takes.
pub(crate) fn matrices(group: &Group<'_>, r: usize) -> (MatrixGroup, usize) {
    let mut matrices = MatrixGroup {
        first_block: [i32::MAX; 4],
        ..MatrixGroup::default()
    };
    let mut blocks = 0;
    for (i, (w, y)) in group.iter().enumerate() {
        matrices.w[i] = w.storage::<Weights>().address();
        matrices.y[i] = *y;
        matrices.rows[i] = w.rows as i32;
        matrices.first_block[i] = blocks as i32;
        blocks += w.rows.div_ceil(TILE_ROWS * r);
    }
    (matrices, blocks)
}

/// The kernel of a group and `n` rows, few of them.
fn few(
    cuda: &Cuda,
    (n, half): (usize, &Half),
    tiles: Tiles,
    group: &Group<'_>,
) -> (Kernel, Grid, Args) {
    let feeds = feeds(&cuda.driver) && tiles.per <= FEED_TILES;
    // Blocks of two rows of tiles read activations half as often, if that leaves
    // enough of them.
    let (name, r, tokens) = if feeds {
        match n {
            ..=3 => ("gemv_pipelined_3", 1, TOKENS),
            4..=TOKENS => ("gemv_pipelined_8", 1, TOKENS),
            _ => ("gemv_pipelined_16", 1, 2 * TOKENS),
        }
    } else if n > TOKENS {
        ("gemv_1x16", 1, 2 * TOKENS)
    } else if row_tiles(group) >= 4 * cuda.driver.sms {
        ("gemv_2x8", 2, TOKENS)
    } else {
        ("gemv_1x8", 1, TOKENS)
    };
    let (matrices, blocks) = matrices(group, r);
    let args = Args::default()
        .of(&matrices)
        .of(&half.args())
        .int(n)
        .int(tiles.tiles)
        .int(tiles.per);
    let grid = Grid::rect(blocks, n.div_ceil(tokens), 32 * tiles.slices);
    let (grid, args) = if feeds {
        let most = cuda.driver.sms * (FEED_WARPS / tiles.slices);
        let grid = Grid {
            blocks: (blocks.min(most), grid.blocks.1),
            shared: tiles.slices * FEED_SHARED,
            ..grid
        };
        (grid, args.int(blocks))
    } else {
        (grid, args)
    };
    (
        tiles.kernel(if feeds { "gemv_pipelined" } else { "gemv" }, name),
        grid,
        args,
    )
}

pub(crate) fn matmul_rows(cuda: &Cuda, x: &Tensor, w: &Matrix, ids: &[Vec<u32>]) -> Tensor {
    let n_ids = ids.first().map_or(0, Vec::len);
    assert!(
        ids.len() == x.rows() && ids.iter().all(|i| i.len() == n_ids),
        "as many rows of the matrix for each row"
    );
    let all: Vec<u32> = ids.concat();
    assert!(
        all.iter().all(|&id| (id as usize) < w.rows),
        "rows of the matrix"
    );
    rows_of(cuda, x, w, cuda.arena.of(&all).address, n_ids)
}

/// Scores of the tokens of each row's best groups, and the tokens.
pub(crate) fn matmul_groups(
    cuda: &Cuda,
    x: &Tensor,
    w: &Matrix,
    scores: &Tensor,
    groups: &TokenGroups,
) -> [Tensor; 2] {
    let (n, size) = (groups.top() * groups.size(), groups.size());
    assert_eq!(
        scores.cols() * size,
        groups.list().ids().len(),
        "a score for each group"
    );
    let ids = cuda.tensor(x.rows(), n);
    let args = Args::default()
        .ptr(address(scores))
        .ptr(address(groups.list().on_device()))
        .ptr(address(&ids))
        .int(scores.cols())
        .int(size)
        .int(groups.top());
    let grid = Grid::rect(scores.cols().div_ceil(GROUPS), x.rows(), GROUPS);
    cuda.launch(&Kernel::new("choose", "best_groups"), grid, args);
    [rows_of(cuda, x, w, address(&ids), n), ids]
}

/// Products with the `n_ids` rows of `w` that each row of `x` has at `ids`.
fn rows_of(cuda: &Cuda, x: &Tensor, w: &Matrix, ids: Address, n_ids: usize) -> Tensor {
    let weights = w.storage::<Weights>();
    let y = cuda.tensor(x.rows(), n_ids);
    match weights.packed {
        None => {
            let args = Args::default()
                .ptr(weights.address())
                .ptr(address(x))
                .ptr(ids)
                .ptr(address(&y))
                .int(n_ids)
                .int(w.cols);
            let grid = Grid::rect(n_ids.div_ceil(8), x.rows(), 256);
            cuda.launch(&Kernel::new("gemv_f32", "gemv_f32"), grid, args);
        }
        Some(tiles) => {
            let args = Args::default()
                .ptr(weights.address())
                .ptr(address(&y))
                .of(&half(cuda, x).args())
                .ptr(ids)
                .int(n_ids)
                .int(w.rows)
                .int(tiles.tiles)
                .int(tiles.per);
            let grid = Grid::rect(n_ids.div_ceil(TILE_ROWS), x.rows(), 32 * tiles.slices);
            cuda.launch(&tiles.kernel("gemv", "gemv_gather"), grid, args);
        }
    }
    y
}
