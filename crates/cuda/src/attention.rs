//! Attention over pages of keys and values (kernels/attention*.cu).

use crate::args::{Activations, Args, AttentionArgs};
use crate::constants::{ATTENTION_WGMMA, MERGE_COLUMNS, PAGE_UNIT_KEYS, SPLIT_KEYS};
use crate::dry::declared_shared;
use crate::kv::{Pages, bound, kernel, undo_rotations};
use crate::launch::{Device, Launch};
use crate::machine::{Grid, Kernel};
use crate::pack::TILE;
use crate::record::Rows;
use backend::{Attention, KvFormat, PAGE_ROWS};
use fusion::{Kind, Op};
use quant::{KvLayout, KvRowFormat};

/// Rows that share a step's keys well enough for one block each split.
const FEW_ROWS: usize = 64;

/// Largest memory for partial results.
const PARTIAL_BYTES: usize = 256 << 20;

/// Queries of a tile of tensor cores.
const QUERIES: usize = 16;

/// Keys by columns of a tile of theirs, and of their values.
const TILE_VALUES: usize = 32 * 32;

/// The most columns of results, of all query tiles of a block together, for which two blocks fit in a
/// multiprocessor's registers.
pub(crate) const MOST_RESULTS: usize = 512;

/// Bytes of shared memory that a block takes beside its own.
const BLOCK_RESERVE: usize = 1024;

/// Bytes of the scales of a stage's two tiles, where they have some.
const STAGE_SCALES: usize = 64 * 2;

/// Bytes of two tiles and their scales.
fn stage_bytes(format: &KvRowFormat) -> usize {
    match format.layout {
        KvLayout::Plain(scalar) => 2 * TILE_VALUES * scalar.bytes(),
        KvLayout::Coded { bits, .. } | KvLayout::Levels { bits } => {
            2 * TILE_VALUES * usize::from(bits) / 8 + STAGE_SCALES
        }
    }
}

/// How blocks of `attention_pipelined_1` and `attention_pipelined_2` bring keys and values to shared memory.
#[derive(Clone, Copy)]
pub(crate) struct Ring {
    /// Stages of each of a block's warps.
    pub(crate) depth: usize,
    /// Bytes of a stage, of keys or of values, and its barrier.
    stage_bytes: usize,
    /// Tiles of queries that a block takes, at most.
    most_queries: usize,
    /// Blocks on a multiprocessor at once, of one query tile and of two: two hide each other's waits, where shared
    /// memory and registers have room for both.
    pub(crate) blocks: [usize; 2],
}

impl Ring {
    const WARPS: usize = 8;
    const DEEPEST: usize = 4;

    /// The one for heads of `head_dim` columns where a block has `most` bytes, if any fits.
    pub(crate) fn new(head_dim: usize, format: KvFormat, most: usize) -> Option<Self> {
        let ring = |most_queries| {
            let mut ring = Ring {
                depth: 0,
                stage_bytes: stage_bytes(format.k).max(stage_bytes(format.v)) + 8,
                most_queries,
                blocks: [1; 2],
            };
            let left = most.saturating_sub(ring.shared(head_dim, most_queries));
            ring.depth = (left / (Self::WARPS * ring.stage_bytes)).min(Self::DEEPEST);
            ring.blocks = [1, 2].map(|tiles| {
                let two = 2 * (ring.shared(head_dim, tiles) + BLOCK_RESERVE);
                let fit = two <= most + BLOCK_RESERVE && tiles * head_dim <= MOST_RESULTS;
                1 + usize::from(fit)
            });
            ring
        };
        let mut rings = [2, 1].into_iter().map(ring);
        rings.find(|ring| head_dim.is_multiple_of(256) && ring.depth > 1)
    }

    /// Bytes that a block of so many tiles of queries takes, as its kernel cuts them: queries,
    /// scores of a split, each page's maximum and sum, stages and their barriers.
    fn shared(&self, head_dim: usize, tiles: usize) -> usize {
        tiles * QUERIES * (2 * head_dim + 4 * SPLIT_KEYS + 8 * SPLIT_KEYS / PAGE_ROWS)
            + Self::WARPS * self.depth * self.stage_bytes
    }

    /// Bytes of shared memory for `attention_pipelined_all`, which has two tiles of queries, half of the stages and
    /// the results so far; nothing, if a block has not so many.
    fn shared_all(self, head_dim: usize, most: usize) -> Option<usize> {
        let half = Ring {
            depth: self.depth / 2,
            ..self
        };
        let bytes = half.shared(head_dim, 2) + 2 * QUERIES * 4 * head_dim;
        (bytes <= most).then_some(bytes)
    }
}

/// How a block of warpgroups takes prompts, as its kernel cuts its memory.
#[derive(Clone, Copy)]
pub(crate) struct Prompts {
    /// Queries of a block.
    queries: usize,
    stages: usize,
    /// Bytes.
    shared: usize,
    /// Whether all units of keys are pages, each of which is computed from scores to results (PAGES_ONLY).
    pages_only: bool,
}

impl Prompts {
    const STAGE: usize = 16384;

    /// For heads of `head_dim` columns where a block has `most` bytes, if it can. `pages_only`: all
    /// units of keys are pages; not with 512 columns, where two warpgroups need all probabilities of a page.
    pub(crate) fn new(head_dim: usize, most: usize, pages_only: bool) -> Option<Self> {
        let queries = match head_dim {
            256 => 128,
            512 if !pages_only => 64,
            _ => return None,
        };
        // A split's probabilities.
        let probabilities = if pages_only { 0 } else { 2 * SPLIT_KEYS };
        // Queries, each page's maximum and sum, probabilities; of a query the sum so far, and the
        // maximum for each warpgroup.
        let of_query = 2 * head_dim + 8 * SPLIT_KEYS / PAGE_ROWS + probabilities + 4;
        let fixed = queries * of_query + 4 * 128;
        let left = most.checked_sub(fixed + declared_shared(ATTENTION_WGMMA))?;
        // As many of each of the rings.
        let rings = head_dim / 256;
        let stages = left / Self::STAGE / rings * rings;
        // Queries arrive in f32 where probabilities and stages lie later.
        let fits = 4 * queries * head_dim <= queries * probabilities + stages * Self::STAGE;
        (stages > 3 && fits).then_some(Prompts {
            queries,
            stages,
            shared: fixed + stages * Self::STAGE,
            pages_only,
        })
    }

    /// What the kernel is compiled with.
    pub(crate) fn defines(self) -> [(&'static str, usize); 2] {
        [
            ("STAGES", self.stages),
            ("PAGES_ONLY", usize::from(self.pages_only)),
        ]
    }
}

/// The kernel of warpgroups.
fn prompts_kernel(prompts: Prompts, pages: &Pages) -> Kernel {
    let mut kernel = kernel(ATTENTION_WGMMA, pages);
    kernel.file = ATTENTION_WGMMA;
    kernel.defines.pop();
    kernel.defines.extend(prompts.defines());
    kernel
}

/// How a step's attention is cut.
struct Cut {
    /// Units of keys that a row sees at most.
    units: usize,
    /// Whether a window is so short that its units are pages.
    has_short_window: bool,
    /// Bytes of partial results.
    bytes: usize,
    /// Whether rows are so few that units are computed apart and merged.
    is_split: bool,
}

impl Cut {
    /// For `n` rows, of which one sees at most `ahead` cache rows beyond its own: rows of an
    /// image see each other. Steps with such rows are not recorded.
    fn new(p: &Pages, attention: &Attention, n: usize, ahead: usize) -> Self {
        let columns = p.tiles.unwrap_or(p.spec.head_dim);
        // As many as any row of this memory can see, so that a longer text changes no launch.
        let fine = |keys: usize| p.tiles.is_some() && keys <= PAGE_UNIT_KEYS;
        let keys = p.spec.rows.min(p.spec.pages * PAGE_ROWS);
        // A window may begin and end within units, however few pages there are.
        let is_fine = fine(attention.window.unwrap_or(keys));
        let unit = if is_fine { PAGE_ROWS } else { SPLIT_KEYS };
        let seen = attention.window.map_or(keys, |w| w + ahead + unit);
        let before = if p.tiles.is_none() || is_fine {
            0
        } else {
            PAGE_UNIT_KEYS / PAGE_ROWS
        };
        let units = before + seen.div_ceil(unit);
        let bytes = 4 * n * attention.heads * units * (2 + columns);
        Cut {
            units,
            has_short_window: attention.window.is_some_and(fine),
            bytes,
            is_split: n <= FEW_ROWS && bytes <= PARTIAL_BYTES,
        }
    }
}

/// Whether attention of `rows` can write the f16 copy of its result.
pub(crate) fn writes_f16(p: &Pages, attention: &Attention, rows: &Rows) -> bool {
    let is_split = Cut::new(p, attention, rows.n, rows.ahead).is_split;
    let is_turned = p.spec.format.v.rotation.is_some();
    p.spec.head_dim.is_multiple_of(TILE) && (is_split || is_turned || p.prompts.is_some())
}

/// Launches attention.
pub(crate) fn attend(l: &Launch<'_>, op: &Op) {
    let Kind::Attend {
        kv,
        attention,
        batch,
        ..
    } = op.kind
    else {
        unreachable!("called for this kind");
    };
    let (p, rows) = (bound(l, kv), l.rows(batch));
    let cut = Cut::new(p, &attention, rows.n, rows.ahead);
    let bytes = if cut.is_split { cut.bytes } else { 0 };
    let partials = l.device.arena.buffer(bytes);
    let (q, y) = (l.address(op.inputs[0]), op.outputs[0]);
    // Only the merge of splits and attention by warpgroups can leave `y` out.
    let y = match cut.is_split || p.prompts.is_some() {
        true => l.address_if_read(y),
        false => l.address(y),
    };
    let args = AttentionArgs {
        q,
        keys: p.keys.address,
        values: p.values.address,
        batch: rows.address,
        y,
        partials: partials.address,
        scale: attention.scale,
        group: attention.group as i32,
        heads: attention.heads as i32,
        kv_heads: p.spec.heads as i32,
        head_dim: p.spec.head_dim as i32,
        units: cut.units as i32,
        window: attention.window.unwrap_or(0) as u32,
    };
    let step = Step {
        device: l.device,
        pages: p,
        rows,
        heads: attention.heads,
        cut,
        args,
    };
    let f16 = l.f16_output(op, op.outputs[0]);
    if step.cut.is_split {
        step.launch_splits();
        step.launch_merge(&f16);
    } else {
        step.launch_whole(&f16);
        if let Some(rotation) = p.spec.format.v.rotation {
            let shape = [rows.n, attention.heads, p.spec.head_dim];
            undo_rotations(l.device, rotation, y, &f16, shape);
        }
    }
}

/// Attention of a step's rows.
struct Step<'a> {
    device: &'a Device,
    pages: &'a Pages,
    rows: Rows,
    /// Query heads.
    heads: usize,
    cut: Cut,
    args: AttentionArgs,
}

impl Step<'_> {
    /// Query heads of a key head.
    fn heads_of_key(&self) -> usize {
        self.heads / self.pages.spec.heads
    }

    fn launch(&self, name: &'static str, grid: Grid) {
        let args = Args::default().of(&self.args);
        self.device.launch(&kernel(name, self.pages), grid, args);
    }

    /// Blocks of so many queries for each key head, the last of a sequence perhaps partly
    /// empty; `busy` for each multiprocessor, for one split each if there are enough.
    fn grid(&self, queries: usize, busy: usize, threads: usize, shared: usize) -> Grid {
        let (blocks, columns) = match self.pages.tiles {
            Some(_) => {
                let rest = self.rows.seqs * (queries - 1);
                let all = self.rows.n * self.heads_of_key() + rest;
                (all / queries, self.pages.spec.heads)
            }
            None => (self.rows.n * self.heads, 1),
        };
        let spread = busy * self.device.driver.sms / (blocks * columns).max(1);
        let spread = spread.clamp(1, self.cut.units);
        Grid {
            shared,
            ..Grid::rect(blocks, columns * spread, threads)
        }
    }

    /// [`Step::grid`] of blocks that take one tile of queries.
    fn grid_of_tiles(&self, busy: usize) -> Grid {
        let all = !self.cut.is_split;
        let shared = self.pages.tiles.map_or(0, |e| shared(e, all));
        self.grid(QUERIES, busy, 128, shared)
    }

    /// Launches partial results of units of keys.
    fn launch_splits(&self) {
        match self.pages.ring {
            _ if self.cut.has_short_window => {
                self.launch("attention_decode_pages", self.grid_of_tiles(4));
            }
            Some(ring) => {
                let tiles = (self.rows.n * self.heads_of_key()).div_ceil(QUERIES);
                let tiles = ring.most_queries.min(tiles);
                let name = ["attention_pipelined_1", "attention_pipelined_2"][tiles - 1];
                let shared = ring.shared(self.pages.spec.head_dim, tiles);
                let busy = ring.blocks[tiles - 1];
                let grid = self.grid(tiles * QUERIES, busy, 32 * Ring::WARPS, shared);
                self.launch(name, grid);
            }
            None => self.launch("attention_decode", self.grid_of_tiles(4)),
        }
    }

    /// Launches the merge of partial results, which writes an f16 copy of them too.
    fn launch_merge(&self, f16: &Activations) {
        let args = Args::default().of(&self.args).of(f16);
        let blocks = self.pages.spec.head_dim.div_ceil(MERGE_COLUMNS);
        let grid = Grid::new(self.rows.n * self.heads * blocks, MERGE_COLUMNS);
        let kernel = kernel("attention_merge", self.pages);
        self.device.launch(&kernel, grid, args);
    }

    /// Launches what computes each row's result in one go, and an f16 copy if warpgroups do.
    fn launch_whole(&self, f16: &Activations) {
        let (head_dim, most) = (self.pages.spec.head_dim, self.device.driver.shared);
        let ring = self.pages.ring.and_then(|r| r.shared_all(head_dim, most));
        let of_window = self
            .pages
            .window_prompts
            .filter(|_| self.cut.has_short_window);
        if let Some(prompts) = of_window.or(self.pages.prompts) {
            let grid = self.grid(prompts.queries, 0, 384, prompts.shared);
            let kernel = prompts_kernel(prompts, self.pages);
            let args = Args::default().of(&self.args).of(f16);
            self.device.launch(&kernel, grid, args);
        } else if let Some(shared) = ring {
            let grid = self.grid(2 * QUERIES, 0, 32 * Ring::WARPS, shared);
            self.launch("attention_pipelined_all", grid);
        } else {
            self.launch("attention_all", self.grid_of_tiles(0));
        }
    }
}

/// Bytes of shared memory that a block of tensor cores takes, as its kernel cuts it: queries,
/// scores of a split, and the results so far.
fn shared(head_dim: usize, all: bool) -> usize {
    QUERIES * (2 * head_dim + 4 * SPLIT_KEYS + if all { 4 * head_dim } else { 0 })
}
