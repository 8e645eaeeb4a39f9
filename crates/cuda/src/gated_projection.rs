//! A narrow gate between two products of few rows, in one kernel (kernels/gated_projection.cu).

use crate::Kernel;
use crate::args::{self, Address, Args};
use crate::constants::{
    GATED_PROJECTION_TILES, GATED_ROW_TILES, GATED_ROWS, GATED_SLICE_TILES, GATED_WARPS_OF_SLICE,
};
use crate::driver::Driver;
use crate::dry::declared_shared;
use crate::elementwise::number;
use crate::launch::Launch;
use crate::machine::Grid;
use crate::matmul::{Tiles, Weights, bound};
use crate::pack::{TILE, TILE_ROWS};
use fusion::{Kind, Op};

/// The kernel's name, and its file's.
const NAME: &str = "gated_projection";

/// Rows of activations, at most: each cluster reads all weights.
const MOST_ROWS: usize = 2 * GATED_ROWS;

/// Blocks of a cluster, the best first: with 16 a block has half as many row tiles.
const BLOCKS: [usize; 2] = [16, 8];

/// Warps of a block, at most: more would have too few registers.
const MOST_WARPS: usize = 16;

/// The kernel for a gate whose matrix is walked as `tiles` says, and clusters of so many blocks.
pub(crate) fn kernel(tiles: Tiles, blocks: usize) -> Kernel {
    let mut kernel = tiles.kernel(NAME, NAME);
    kernel.defines.push(("GATED_BLOCKS", blocks));
    kernel
}

/// The matrix of a gate, and the one that multiplies what the gate lets through.
#[derive(Clone, Copy)]
pub(crate) struct Matrices<'a> {
    pub(crate) gate: &'a Weights,
    pub(crate) projection: &'a Weights,
}

impl Matrices<'_> {
    /// How the gate's matrix is walked, if tensor cores multiply `rows` rows with both and the kernel has room for them.
    fn tiles(self, rows: usize) -> Option<Tiles> {
        let [gate, projection] = [self.gate.tiles()?, self.projection.tiles()?];
        let fits = rows <= MOST_ROWS
            && gate.packing == projection.packing
            && !gate.is_rotated()
            && self.projection.cols == self.gate.rows
            && self.gate.rows.is_multiple_of(TILE_ROWS)
            && self.gate.rows <= GATED_ROW_TILES * TILE_ROWS
            && gate.per_slice <= GATED_SLICE_TILES
            && projection.slices == 1;
        fits.then_some(gate)
    }

    /// The launch for `rows` rows in clusters of so many `blocks`; nothing, if a block has no room for its part.
    fn grid(self, tiles: Tiles, rows: usize, blocks: usize, most_shared: usize) -> Option<Grid> {
        let band = tiles.packing.band();
        let gate_tiles = GATED_ROW_TILES / blocks;
        let row_tiles = self.projection.rows.div_ceil(TILE_ROWS);
        let of_block = row_tiles.div_ceil(blocks).next_multiple_of(band);
        let inner_tiles = self.projection.cols.div_ceil(TILE);
        let n_tiles = gate_tiles.next_multiple_of(band) * tiles.tiles + of_block * inner_tiles;
        let inputs = tiles.slices * tiles.per_slice * GATED_ROWS * TILE * 2;
        let shared = n_tiles * tiles.packing.tile_bytes() + inputs;
        let warps = GATED_WARPS_OF_SLICE * tiles.slices;
        let fits = of_block <= GATED_PROJECTION_TILES
            && warps <= MOST_WARPS
            && shared + declared_shared(NAME) <= most_shared;
        fits.then(|| Grid {
            shared,
            cluster: blocks,
            ..Grid::rect(blocks, rows.div_ceil(GATED_ROWS), 32 * warps)
        })
    }

    /// The kernel for `rows` rows, how the gate's matrix is walked, and the launch; nothing, if three kernels take them.
    fn launch(self, driver: &Driver, rows: usize) -> Option<(Kernel, Tiles, Grid)> {
        let tiles = self.tiles(rows).filter(|_| driver.arch >= 90)?;
        BLOCKS.into_iter().find_map(|blocks| {
            let kernel = kernel(tiles, blocks);
            let grid = self.grid(tiles, rows, blocks, driver.shared)?;
            (driver.clusters_at_once(&kernel, grid) > 0).then_some((kernel, tiles, grid))
        })
    }

    /// Whether one kernel takes `rows` rows.
    pub(crate) fn fit(self, driver: &Driver, rows: usize) -> bool {
        self.launch(driver, rows).is_some()
    }
}

/// Launches both products and the gate between them.
pub(crate) fn launch(l: &Launch<'_>, op: &Op) {
    let Kind::GatedProjection {
        gate,
        activation,
        first,
        projection,
    } = op.kind
    else {
        unreachable!("called for this kind");
    };
    let [gate, projection] = [gate, projection].map(|w| bound(l, w));
    let (v, z) = (op.inputs[1], op.outputs[0]);
    let [rows, _] = l.shape(z);
    let of_device = Matrices { gate, projection }.launch(&l.device.driver, rows);
    let (kernel, tiles, grid) = of_device.expect("fused where one kernel takes the rows");
    let args = Args::default()
        .of(&args::GatedProjection {
            gate: gate.address(),
            projection: projection.address(),
            v: l.address(v) + 4 * first as Address,
            v_stride: l.shape(v)[1] as u64,
            z: l.address(z),
            activation: number(activation) as i32,
            columns: gate.rows as i32,
            rows: projection.rows as i32,
        })
        .of(&l.f16_input(op))
        .int(rows)
        .int(tiles.tiles)
        .int(tiles.per_slice);
    l.device.launch(&kernel, grid, args);
}
