//! Weights and their products (kernels/gemv*.cu, kernels/embed.cu).

use crate::args::{Activations, Address, Args, MatrixGroup};
use crate::constants::{GEMV_PIPELINE_BYTES, GEMV_REDUCTION_BYTES};
use crate::driver::Driver;
use crate::dry::declared_shared;
use crate::launch::{Device, Launch};
use crate::machine::Grid;
use crate::memory::{Block, Cell};
use crate::moe::ExpertTable;
use crate::pack::{self, Packer, Packing, TILE, TILE_ROWS};
use crate::record::Bound;
use crate::tuning::ProductTuning;
use crate::{Cuda, Kernel, elementwise, gemm, gpu};
use backend::Matrix;
use fusion::{Kind, Op, Operand, Value};
use quant::{Scalar, Stored};
use std::sync::{Arc, OnceLock};

/// Threads of a block that ranks groups of tokens.
const RANK_THREADS: usize = 128;

/// Rows of activations that one tensor-core product takes.
const MMA_ROWS: usize = 8;

/// Rows of activations that a GEMV takes at once, at most.
pub(crate) const GEMV_ROWS: usize = 2 * MMA_ROWS;

/// Bytes of shared memory that a warp of `gemv_pipelined` takes.
const PIPELINED_SHARED: usize = GEMV_PIPELINE_BYTES + GEMV_REDUCTION_BYTES;

/// Tiles of a slice that `gemv_pipelined` has room for, at most.
pub(crate) const MAX_SLICE_TILES: usize = 32;

/// Warps of `gemv_pipelined` on a multiprocessor.
pub(crate) const PIPELINED_WARPS: usize = 16;

/// A matrix on the device.
pub(crate) struct Weights {
    block: Block,
    /// Outputs, and inputs.
    pub(crate) rows: usize,
    pub(crate) cols: usize,
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
    /// Slices that a row's tiles are cut into (split-K). They decide the order of the sum, so they
    /// depend on the matrix alone.
    pub(crate) slices: usize,
    /// Tiles of a slice, at most.
    pub(crate) per_slice: usize,
}

impl Tiles {
    /// Whether products take rotated activations.
    pub(crate) fn is_rotated(&self) -> bool {
        matches!(self.packing, Packing::Rotated { .. })
    }

    pub(crate) fn new(packing: Packing, cols: usize) -> Self {
        let tiles = cols.div_ceil(TILE);
        let most = if tiles < 128 { 8 } else { 16 };
        let per_slice = tiles.div_ceil(most.min(tiles.div_ceil(4)));
        Tiles {
            packing,
            tiles,
            slices: tiles.div_ceil(per_slice),
            per_slice,
        }
    }

    pub(crate) fn kernel(&self, file: &'static str, name: &'static str) -> Kernel {
        let mut kernel = Kernel::new(file, name);
        kernel.defines = self.packing.defines();
        // One compilation serves every shape of the same number of warps.
        kernel.defines.push(("SLICES", self.slices));
        kernel
    }

    /// A kernel of `gemv.cu`.
    pub(crate) fn gemv(&self, name: &'static str, tuning: ProductTuning) -> Kernel {
        let mut kernel = self.kernel("gemv", name);
        kernel.defines.push(("UNROLL", tuning.unroll));
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

    /// Bytes of its tiles and factors.
    pub(crate) fn bytes(&self) -> usize {
        self.block.bytes
    }

    /// A matrix of random weights, made on the device.
    pub(crate) fn random(device: &Device, packing: Packing, rows: usize, cols: usize) -> Self {
        let tiles = Tiles::new(packing, cols);
        let (of_tiles, of_factors) = pack::bytes(packing, rows, cols);
        let bytes = of_tiles + of_factors;
        let block = Block::new(&device.driver, bytes, "random weights");
        let args = Args::default()
            .ptr(block.address)
            .float((cols as f32).sqrt().recip())
            .long(of_tiles / 4)
            .long(bytes / 4);
        let kernel = tiles.kernel("embed", "random_tiles");
        device.launch(&kernel, Grid::each(bytes / 4), args);
        // Products ask for weights before they wait for other kernels.
        device.driver.wait();
        Weights {
            block,
            rows,
            cols,
            packed: Some(tiles),
            experts: OnceLock::new(),
        }
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
                block: Block::of(&cuda.device.driver, &values, &what),
                rows,
                cols,
                packed: None,
                experts: OnceLock::new(),
            }
        }
        Some(packing) => {
            cuda.device
                .prepare(packing, pack::bytes(packing, rows, cols).0);
            Weights {
                block: upload(&cuda.device.driver, &Packer::new(packing, parts), &what),
                rows,
                cols,
                packed: Some(Tiles::new(packing, cols)),
                experts: OnceLock::new(),
            }
        }
    };
    Matrix::new(
        rows,
        cols,
        format,
        weights.block.bytes,
        Box::new(Arc::new(weights)),
    )
}

/// Packs a matrix into a block on the device: some bands are copied while the next are packed.
fn upload(driver: &Arc<Driver>, of: &Packer<'_>, what: &str) -> Block {
    let (bands, (of_tiles, of_factors)) = (of.bands(), of.band_bytes());
    let block = Block::new(driver, bands * (of_tiles + of_factors), what);
    let mut factors = vec![0; bands * of_factors];
    let some = (gpu::STAGE_BYTES / of_tiles).max(1);
    for (i, factors) in factors.chunks_mut(some * of_factors).enumerate() {
        let first = i * some;
        let to = block.address + (first * of_tiles) as Address;
        let bytes = factors.len() / of_factors * of_tiles;
        driver.fill(to, bytes, |tiles| of.pack(first, tiles, factors));
    }
    driver.write(block.address + (bands * of_tiles) as Address, &factors);
    block
}

/// How weights stored in `format` are packed, whatever their scales are; `None` for f32.
pub(crate) fn packing_of(format: &'static quant::Format) -> Option<Packing> {
    // Whole groups of any format.
    let cols = 1024;
    if format.can_encode() {
        let row = quant::encode(format, &vec![0.0; cols], cols, Scalar::Bf16);
        return Packing::of(&[row.view()]);
    }
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
}

/// A matrix of random weights, made on the device.
pub(crate) fn random_matrix(
    cuda: &Cuda,
    rows: usize,
    cols: usize,
    format: &'static quant::Format,
) -> Matrix {
    let packing = packing_of(format).expect("a format that is packed");
    let (of_tiles, of_factors) = pack::bytes(packing, rows, cols);
    cuda.device.prepare(packing, of_tiles);
    let weights = Weights::random(&cuda.device, packing, rows, cols);
    Matrix::new(
        rows,
        cols,
        format.name,
        of_tiles + of_factors,
        Box::new(Arc::new(weights)),
    )
}

/// The matrix on the device.
pub(crate) fn weights(w: &Matrix) -> &Arc<Weights> {
    w.storage::<Arc<Weights>>()
}

/// The rotated activations that matrices of rotated columns are multiplied with, made of `x` when
/// they are first asked for.
#[derive(Default)]
struct RotatedInput(Option<Arc<Cell>>);

impl RotatedInput {
    fn of(&mut self, l: &Launch<'_>, x: Value) -> Activations {
        let made = self.0.get_or_insert_with(|| {
            let [rows, cols] = l.shape(x);
            elementwise::rotate(l.device, l.address(x), [rows, cols])
        });
        made.activations(&l.device.arena)
    }
}

/// The weights that `operand` is.
pub(crate) fn bound<'a>(l: &'a Launch<'_>, operand: Operand) -> &'a Weights {
    match l.bound(operand) {
        Bound::Weights(w) => w,
        _ => unreachable!("recorded as weights"),
    }
}

pub(crate) fn embed(l: &Launch<'_>, op: &Op) {
    let Kind::Embed {
        table,
        tokens,
        scale,
    } = op.kind
    else {
        unreachable!("called for this kind");
    };
    let Bound::Tokens(tokens) = l.bound(tokens) else {
        unreachable!("recorded as tokens");
    };
    let (w, n) = (bound(l, table), l.len(op.outputs[0]));
    let args = Args::default().ptr(w.address());
    let args = args.ptr(tokens.ids).ptr(tokens.batch);
    let args = args.ptr(l.address(op.outputs[0]));
    let (kernel, args) = match w.packed {
        None => (Kernel::new("gemv_f32", "embed_f32"), args.int(w.cols)),
        Some(t) => (
            t.kernel("embed", "embed"),
            args.int(w.rows).int(w.cols).int(t.tiles),
        ),
    };
    l.device
        .launch(&kernel, Grid::each(n), args.float(scale).long(n));
}

pub(crate) fn product(l: &Launch<'_>, op: &Op) {
    let Kind::Product { weights } = &op.kind else {
        unreachable!("called for this kind");
    };
    let x = op.inputs[0];
    let [n, _] = l.shape(x);
    let each = weights.iter().zip(&op.outputs);
    let mut rest: Vec<(&Weights, Address)> =
        each.map(|(&w, &y)| (bound(l, w), l.address(y))).collect();
    let mut rotated = RotatedInput::default();
    let mut input = |tiles: Tiles| match tiles.is_rotated() {
        true => rotated.of(l, x),
        false => l.f16_input(op),
    };
    while let Some(&(first, _)) = rest.first() {
        let tiles = first.packed;
        let same = rest.iter().take_while(|(w, _)| w.packed == tiles).count();
        let group: Vec<_> = rest.drain(..same.min(4)).collect();
        match tiles {
            None => group.iter().for_each(|&(w, y)| {
                product_f32(l.device, (l.address(x), n), w, 0, (y, w.rows));
            }),
            Some(tiles) => {
                let tuning = l.device.tuning(tiles.packing);
                multiply(l.device, (n, &input(tiles)), tiles, &group, tuning);
            }
        }
    }
}

/// Launches the products of `n` rows `x` with a group of matrices, computed as `tuning` says.
pub(crate) fn multiply(
    device: &Device,
    (n, x): (usize, &Activations),
    tiles: Tiles,
    group: &Group<'_>,
    tuning: ProductTuning,
) {
    if gemm::is_faster(&device.driver, n, tiles, group, tuning) {
        return gemm::product(device, x, n, tiles, group);
    }
    let (kernel, grid, args) = gemv(device, (n, x), tiles, group, tuning);
    device.launch(&kernel, grid, args);
}

/// Launches the product of `n` rows at `x` with weights in f32, or with those of their rows that
/// `ids` names for each row: `y` has so many columns.
fn product_f32(
    device: &Device,
    (x, n): (Address, usize),
    w: &Weights,
    ids: Address,
    (y, cols): (Address, usize),
) {
    let args = Args::default()
        .ptr(w.address())
        .ptr(x)
        .ptr(ids)
        .ptr(y)
        .int(cols)
        .int(w.cols);
    let grid = Grid::rect(cols.div_ceil(8), n, 256);
    device.launch(&Kernel::new("gemv_f32", "gemv_f32"), grid, args);
}

/// Whether products of a few rows go through pipelines in shared memory.
pub(crate) fn has_pipelines(driver: &Driver) -> bool {
    driver.arch >= 90 && driver.shared >= PIPELINED_WARPS * PIPELINED_SHARED
}

/// Up to four matrices of one packing and width.
pub(crate) type Group<'a> = [(&'a Weights, Address)];

/// Rows of tiles in a group.
pub(crate) fn row_tiles(group: &Group<'_>) -> usize {
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
        matrices.w[i] = w.address();
        matrices.y[i] = *y;
        matrices.rows[i] = w.rows as i32;
        matrices.first_block[i] = blocks as i32;
        blocks += w.rows.div_ceil(TILE_ROWS * r);
    }
    (matrices, blocks)
}

/// The GEMV of a group and `n` rows: kernel, grid and arguments.
fn gemv(
    device: &Device,
    (n, x): (usize, &Activations),
    tiles: Tiles,
    group: &Group<'_>,
    tuning: ProductTuning,
) -> (Kernel, Grid, Args) {
    let is_pipelined = tuning.pipelines && tiles.per_slice <= MAX_SLICE_TILES;
    // Blocks of two rows of tiles read activations half as often, if that leaves
    // enough of them.
    let (name, r, tokens) = if is_pipelined {
        match n {
            ..=3 => ("gemv_pipelined_3", 1, MMA_ROWS),
            4..=MMA_ROWS => ("gemv_pipelined_8", 1, MMA_ROWS),
            _ => ("gemv_pipelined_16", 1, GEMV_ROWS),
        }
    } else if n > MMA_ROWS {
        ("gemv_1x16", 1, GEMV_ROWS)
    } else if row_tiles(group) >= tuning.two_row_tiles_from.saturating_mul(device.driver.sms) {
        ("gemv_2x8", 2, MMA_ROWS)
    } else {
        ("gemv_1x8", 1, MMA_ROWS)
    };
    let (matrices, blocks) = matrices(group, r);
    let args = Args::default()
        .of(&matrices)
        .of(x)
        .int(n)
        .int(tiles.tiles)
        .int(tiles.per_slice);
    let grid = Grid::rect(blocks, n.div_ceil(tokens), 32 * tiles.slices);
    if !is_pipelined {
        return (tiles.gemv(name, tuning), grid, args);
    }
    let resident = device.driver.sms * (PIPELINED_WARPS / tiles.slices);
    let grid = Grid {
        blocks: (blocks.min(resident), grid.blocks.1),
        shared: tiles.slices * PIPELINED_SHARED,
        ..grid
    };
    let grid = device.driver.spread_few(grid, declared_shared(name));
    let mut kernel = tiles.kernel("gemv_pipelined", name);
    let run = blocks.div_ceil(grid.blocks.0);
    let most = most_stage_row_tiles(tiles.packing, n).min(tuning.row_tiles_at_once);
    let at_once = stage_row_tiles(most, run);
    kernel.defines.push(("STAGE_ROW_TILES", at_once));
    (kernel, grid, args.int(blocks))
}

/// Row tiles that a block of `gemv_pipelined` multiplies at once, at most `most`, of its run of `run` of them. The run is
/// cut into as few groups as can be, and all but the last are of this size. A stage of the pipeline holds one group's tiles,
/// so a smaller group leaves room for more stages.
fn stage_row_tiles(most: usize, run: usize) -> usize {
    run.div_ceil(run.div_ceil(most))
}

/// The largest group of row tiles that `gemv_pipelined` takes with `n` rows of activations.
///
/// More would need more places for results than the kernel has, leave a warp less than two
/// stages in its 12 KB of shared memory, or take the copy engine more than two copies a stage.
pub(crate) fn most_stage_row_tiles(packing: Packing, n: usize) -> usize {
    match (packing, packing.tile_bytes()) {
        (_, ..=1088) if n > MMA_ROWS => 2,
        _ if n > MMA_ROWS => 1,
        (Packing::Plain | Packing::E4m3 { .. }, _) => 2,
        _ => 4,
    }
}

/// Launches the choice of each row's best groups of tokens.
pub(crate) fn best_groups(l: &Launch<'_>, op: &Op) {
    let Kind::BestGroups { groups } = op.kind else {
        unreachable!("called for this kind");
    };
    let Bound::Groups { size, top } = *l.bound(groups) else {
        unreachable!("recorded as groups");
    };
    let [n, count] = l.shape(op.inputs[0]);
    let args = Args::default()
        .ptr(l.address(op.inputs[0]))
        .ptr(l.address(op.inputs[1]))
        .ptr(l.address(op.outputs[0]))
        .int(count)
        .int(size)
        .int(top);
    let grid = Grid::rect(count.div_ceil(RANK_THREADS), n, RANK_THREADS);
    l.device
        .launch(&Kernel::new("choose", "best_groups"), grid, args);
}

/// Launches products with the rows of a matrix that each row of the input has ids of.
pub(crate) fn chosen_product(l: &Launch<'_>, op: &Op) {
    let Kind::ChosenProduct { weights } = op.kind else {
        unreachable!("called for this kind");
    };
    let w = bound(l, weights);
    let (x, ids, y) = (op.inputs[0], l.address(op.inputs[1]), op.outputs[0]);
    let [n, n_ids] = l.shape(y);
    let Some(tiles) = w.packed else {
        return product_f32(l.device, (l.address(x), n), w, ids, (l.address(y), n_ids));
    };
    let mut rotated = RotatedInput::default();
    let activations = match tiles.is_rotated() {
        true => rotated.of(l, x),
        false => l.f16_input(op),
    };
    let args = Args::default()
        .ptr(w.address())
        .ptr(l.address(y))
        .of(&activations)
        .ptr(ids)
        .int(n_ids)
        .int(w.rows)
        .int(tiles.tiles)
        .int(tiles.per_slice);
    let grid = Grid::rect(n_ids.div_ceil(TILE_ROWS), n, 32 * tiles.slices);
    let kernel = tiles.gemv("gemv_gather", l.device.tuning(tiles.packing));
    l.device.launch(&kernel, grid, args);
}
