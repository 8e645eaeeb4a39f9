//! Products with many rows of activations (kernels/gemm.cu, kernels/gemm_wgmma.cu).

use crate::Kernel;
use crate::args::{Activations, Address, Args, ExpertGroup, SliceSums};
use crate::constants::{GEMM_ROWS, GEMM_TILES, GEMM_WGMMA};
use crate::driver::Driver;
use crate::launch::{ARRIVALS_BYTES, Device};
use crate::machine::Grid;
use crate::matmul::{GEMV_ROWS, Group, Tiles, matrices, row_tiles};
use crate::memory::Buffer;
use crate::pack::{Packing, TILE, TILE_ROWS};
use crate::tuning::{GemmFrom, ProductTuning};

/// GEMM without warpgroups.
#[derive(Clone, Copy)]
pub(crate) struct Simple {
    packing: Packing,
    /// Whether weights go straight to registers, and not through shared memory.
    weights_in_registers: bool,
}

impl Simple {
    /// For blocks that can have so many bytes of shared memory.
    pub(crate) fn new(packing: Packing, shared: usize) -> Self {
        let through_shared = Simple {
            packing,
            weights_in_registers: false,
        };
        Simple {
            packing,
            weights_in_registers: packing == Packing::Plain || through_shared.shared() > shared,
        }
    }

    /// Bytes of shared memory of a block: two stages of activations and of codes, and its results
    /// so far.
    fn shared(self) -> usize {
        let codes = match self.weights_in_registers {
            true => 0,
            false => GEMM_TILES * self.packing.tile_bytes(),
        };
        2 * (GEMM_ROWS * 2 * TILE + codes) + 4 * GEMM_ROWS * GEMM_TILES * TILE_ROWS
    }

    pub(crate) fn kernel(self, name: &'static str) -> Kernel {
        let mut kernel = Kernel::new("gemm", name);
        kernel.defines = self.packing.defines();
        let in_registers = usize::from(self.weights_in_registers);
        kernel.defines.push(("WEIGHTS_IN_REGISTERS", in_registers));
        kernel
    }
}

/// Rows of activations of a block that shares a multiprocessor with another.
const FEW_ROWS: usize = 32;

/// Rows of activations, at most, whose products may be split into the slices of K among multiprocessors.
const SPLIT_ROWS: usize = 64;

/// Rows of activations of the largest blocks, in which a tile of weights that was dequantized serves the most products.
/// Registers hold the fragments of one tile then: half of them are made while the products of the other half run.
const MOST_ROWS: usize = 192;

/// How blocks of warpgroups use shared memory.
#[derive(Clone, Copy)]
pub(crate) struct Warpgroups {
    packing: Packing,
    /// Rows of activations of a block.
    rows: usize,
}

impl Warpgroups {
    /// Bytes of shared memory that a block can have; most stages that are of use.
    const SHARED: usize = 227 << 10;
    const MOST: usize = 8;

    /// Blocks that share a multiprocessor.
    fn blocks_per_sm(self) -> usize {
        if self.rows == FEW_ROWS { 2 } else { 1 }
    }

    /// Bytes of a tile's columns of the activations: values, and the units of their slices.
    fn inputs(self) -> usize {
        self.rows * (2 * TILE + 4)
    }

    /// Tiles of a row tile in a stage: with more of them, copies are fewer and larger, and dequantizing a tile runs beside
    /// the products of the one before. Blocks of [`MOST_ROWS`] overlap halves of a tile instead, and have room for few
    /// stages.
    fn stage_tiles(self) -> usize {
        match (self.rows, self.packing.tile_bytes()) {
            (FEW_ROWS, ..=640) => 4,
            (FEW_ROWS, 1153..) | (MOST_ROWS, _) => 1,
            _ => 2,
        }
    }

    /// Bytes of a stage, and stages.
    fn memory(self) -> (usize, usize) {
        let stage = self.stage_tiles() * (self.inputs() + GEMM_TILES * self.packing.tile_bytes());
        let stage = stage.next_multiple_of(1024);
        // Of each block's shared memory the system takes 1024 bytes. Stages start at multiples of 1024; their barriers
        // are in another such piece.
        let shared = (Self::SHARED + 1024) / self.blocks_per_sm() - 1024;
        (stage, ((shared - 2048) / stage).min(Self::MOST))
    }

    pub(crate) fn new(packing: Packing, rows: usize) -> Self {
        Warpgroups { packing, rows }
    }

    fn grid(self, blocks: usize) -> Grid {
        let (stage, stages) = self.memory();
        Grid {
            shared: 1024 + stages * stage,
            ..Grid::new(blocks, 384)
        }
    }

    /// Blocks of weight rows that go through the activations together, an even number near the one with which `sms`
    /// blocks at once read the fewest bytes of weights and activations.
    fn together(self, sms: usize) -> usize {
        let weights = GEMM_TILES * self.packing.tile_bytes();
        let best = (sms * self.inputs() / weights).isqrt();
        (best.div_ceil(2) * 2).max(2)
    }

    /// Launches what brings `n` rows of activations to the order in which warpgroups read them.
    fn swizzle(self, device: &Device, x: &Activations, n: usize, tiles: Tiles) -> Buffer {
        let wide = n.div_ceil(self.rows);
        let inputs = device.arena.buffer(wide * tiles.tiles * self.inputs());
        let args = Args::default().of(x).ptr(inputs.address);
        let args = args.int(n).int(tiles.per_slice);
        let grid = Grid::rect(tiles.tiles, wide, 2 * self.rows);
        device.launch(&self.kernel("swizzle_activations"), grid, args);
        inputs
    }

    pub(crate) fn kernel(self, name: &'static str) -> Kernel {
        let mut kernel = Kernel::new(GEMM_WGMMA, name);
        kernel.defines = self.packing.defines();
        let own = [
            ("ROWS", self.rows),
            ("STAGES", self.memory().1),
            ("STAGE_TILES", self.stage_tiles()),
        ];
        kernel.defines.extend(own);
        kernel
    }
}

/// Whether warpgroups multiply, on the one architecture where they do so.
pub(crate) fn warpgroups(driver: &Driver) -> bool {
    driver.arch == 90 && driver.shared >= Warpgroups::SHARED
}

/// Whether products of `n` rows with a group of matrices are a GEMM, and not a GEMV, which reads weights again for
/// every [`GEMV_ROWS`] rows.
pub(crate) fn is_faster(
    driver: &Driver,
    n: usize,
    tiles: Tiles,
    group: &Group<'_>,
    tuning: ProductTuning,
) -> bool {
    match tuning.gemm_from {
        GemmFrom::Rows(rows) => n >= rows,
        GemmFrom::KibAgain(kib) => {
            let weights = row_tiles(group) * tiles.tiles * tiles.packing.tile_bytes();
            let again = (n.div_ceil(GEMV_ROWS) - 1) * weights;
            n > SPLIT_ROWS || again >= (kib << 10) * driver.sms
        }
    }
}

/// Products of up to four matrices of one packing and width.
pub(crate) fn product(device: &Device, x: &Activations, n: usize, tiles: Tiles, group: &Group<'_>) {
    let packing = tiles.packing;
    let (matrices, blocks) = matrices(group, GEMM_TILES);
    let matrices = Args::default().of(&matrices);
    let count = |args: Args| args.int(n).int(tiles.tiles).int(tiles.per_slice);
    if !warpgroups(&device.driver) {
        let simple = Simple::new(packing, device.driver.shared);
        let grid = Grid {
            shared: simple.shared(),
            ..Grid::rect(blocks, n.div_ceil(GEMM_ROWS), 256)
        };
        let (padded, slices) = (tiles.tiles * TILE, tiles.slices);
        let units = 2 * n * padded;
        let buffer = device.arena.buffer(units + 4 * n * slices);
        let own = Activations {
            values: buffer.address,
            scales: buffer.address + units as Address,
            stride: padded as i32,
        };
        let args = Args::default().of(x).of(&own);
        let args = args.int(tiles.tiles).int(tiles.per_slice);
        let pieces = Grid::rect(tiles.tiles.div_ceil(8), n, 256);
        device.launch(&simple.kernel("rescale_to_slices"), pieces, args);
        let args = count(matrices.of(&own));
        return device.launch(&simple.kernel("gemm"), grid, args);
    }
    if n <= SPLIT_ROWS {
        return split(device, x, n, tiles, (matrices, blocks));
    }
    // Clusters of two blocks share their activations.
    let (even, most) = (blocks.next_multiple_of(2), device.driver.sms);
    // How long blocks of so many rows take: one after the other, and fewer rows more for each.
    let items = |rows: usize| even * n.div_ceil(rows);
    let time = |&rows: &usize| items(rows).div_ceil(most) * (rows + 64);
    let rows = [MOST_ROWS, 128, 64].into_iter().min_by_key(time);
    let rows = rows.expect("some");
    let own = Warpgroups::new(packing, rows);
    let inputs = own.swizzle(device, x, n, tiles);
    let grid = Grid {
        cluster: 2,
        ..own.grid(items(rows).min(most / 2 * 2))
    };
    let args = count(matrices.ptr(inputs.address))
        .int(blocks)
        .int(items(rows))
        .int(own.together(most));
    device.launch(&own.kernel("gemm_wgmma"), grid, args);
}

/// Launches products of at most [`SPLIT_ROWS`] rows. Blocks of row tiles that are left once all multiprocessors have had
/// the same number of them are split into the slices of K, if they are few.
fn split(
    device: &Device,
    x: &Activations,
    n: usize,
    tiles: Tiles,
    (matrices, blocks): (Args, usize),
) {
    let rows = if n <= FEW_ROWS { FEW_ROWS } else { SPLIT_ROWS };
    let own = Warpgroups::new(tiles.packing, rows);
    let inputs = own.swizzle(device, x, n, tiles);
    let sms = device.driver.sms;
    let slots = sms * own.blocks_per_sm();
    let rest = blocks % slots;
    // Sums of slices go through memory: not worth it where most multiprocessors have a block of the rest anyway.
    let is_split =
        tiles.slices > 1 && 4 * rest < 3 * sms && 4 * GEMM_TILES * rest <= ARRIVALS_BYTES;
    let split = if is_split { rest } else { 0 };
    let whole = blocks - split;
    let items = whole + split * tiles.slices;
    let sums = split * tiles.slices * GEMM_TILES * TILE_ROWS * rows;
    let sums = device.arena.buffer(4 * sums);
    let args = matrices.ptr(inputs.address);
    let args = args.int(n).int(tiles.tiles).int(tiles.per_slice);
    let args = args
        .of(&SliceSums {
            sums: sums.address,
            counters: device.arrivals.address,
            slices: tiles.slices as i32,
        })
        .int(whole)
        .int(items);
    let grid = own.grid(items.min(slots));
    device.launch(&own.kernel("gemm_wgmma_split"), grid, args);
}

/// Pairs of one expert, at most, that a block of a grouped GEMM takes, of so many pairs of all experts. It dequantizes its
/// weights once for all of them.
pub(crate) fn pairs_of_block(pairs: usize, experts: usize) -> usize {
    if pairs >= MANY_PAIRS * experts {
        128
    } else {
        64
    }
}

/// Pairs of an expert, on average, from which on blocks take up to 128 of them.
const MANY_PAIRS: usize = 96;

/// Blocks of pairs of one expert each.
pub(crate) struct Blocks {
    pub(crate) list: Address,
    pub(crate) pairs: Address,
    pub(crate) top_k: usize,
    /// How many there can be.
    pub(crate) most: usize,
    /// Pairs of a block, at most.
    pub(crate) rows: usize,
}

/// `y[pair] = w[expert of pair] x`, by experts' `rows` and where their weights lie; `x` has a row for
/// each pair, or one for each row.
pub(crate) fn grouped(
    device: &Device,
    x: &Activations,
    by_pair: bool,
    (table, tiles): (Address, Tiles),
    (y, rows): (Address, usize),
    blocks: &Blocks,
) {
    let own = Warpgroups::new(tiles.packing, blocks.rows);
    let inputs = device
        .arena
        .buffer(blocks.most * tiles.tiles * own.inputs());
    let args = Args::default()
        .of(x)
        .ptr(inputs.address)
        .ptr(blocks.list)
        .ptr(blocks.pairs)
        .int(blocks.top_k)
        .int(usize::from(by_pair))
        .int(tiles.per_slice);
    let grid = Grid::rect(tiles.tiles, blocks.most, 2 * blocks.rows);
    device.launch(&own.kernel("swizzle_expert_activations"), grid, args);
    let args = Args::default()
        .of(&ExpertGroup {
            table,
            blocks: blocks.list,
            pairs: blocks.pairs,
            y,
            rows: rows as i32,
        })
        .ptr(inputs.address)
        .int(tiles.tiles)
        .int(tiles.per_slice);
    let grid = own.grid(device.driver.sms);
    device.launch(&own.kernel("moe_gemm_wgmma"), grid, args);
}
