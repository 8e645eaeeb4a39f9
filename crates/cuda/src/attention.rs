//! Keys, values and attention (kernels/attention*.cu, kernels/kv_append.cu).

use crate::args::{Activations, Address, Args, AttentionArgs, HeadJobs};
use crate::constants::{ATTENTION_WGMMA, PAGE_UNIT_KEYS, SPLIT_KEYS};
use crate::elementwise::threads;
use crate::launch::{Device, Launch};
use crate::machine::Grid;
use crate::memory::Block;
use crate::pack::TILE;
use crate::record::{Bound, Rows};
use crate::{Cuda, Kernel};
use backend::{Attention, Kv, KvFormat, KvFormats, KvSpec, PAGE_ROWS};
use fusion::rules::heads::MAX_JOBS;
use fusion::{HeadRole, Kind, Op, Operand};
use quant::{KvLayout, Scalar};
use std::sync::Arc;

/// Rows that share a step's keys well enough for one block each split.
const FEW_ROWS: usize = 64;

/// Largest memory for partial results.
const PARTIAL_BYTES: usize = 256 << 20;

/// How the kernels can keep keys and values.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kept {
    Plain(Scalar),
    Q8,
}

/// One layer's keys and values, and how they are stored.
pub(crate) struct Pages {
    spec: KvSpec,
    keys: Block,
    values: Block,
    kept: Kept,
    /// Columns of a head as it lies in the pages, where tensor cores take them so: whole tiles, of
    /// which those beyond the head's own columns are zeros.
    tiles: Option<usize>,
    ring: Option<Ring>,
    prompts: Option<Prompts>,
}

/// Queries of a tile of tensor cores.
const QUERIES: usize = 16;

/// Keys by columns of a tile of theirs, and of their values.
const TILE_VALUES: usize = 32 * 32;

/// Bytes of a tile.
fn tile_bytes(kept: Kept) -> usize {
    match kept {
        Kept::Plain(scalar) => TILE_VALUES * scalar.bytes(),
        Kept::Q8 => TILE_VALUES + 2 * 32,
    }
}

/// How blocks of `attention_pipelined_1` and `attention_pipelined_2` bring keys and values to shared memory.
#[derive(Clone, Copy)]
struct Ring {
    /// Stages of each of a block's warps.
    depth: usize,
    /// Bytes of a stage: two tiles and a barrier.
    stage_bytes: usize,
    /// Tiles of queries that a block takes, at most.
    most_queries: usize,
}

impl Ring {
    const WARPS: usize = 8;
    const DEEPEST: usize = 4;

    /// The one for heads of `head_dim` columns where a block has `most` bytes, if any fits.
    fn new(head_dim: usize, tile_bytes: usize, most: usize) -> Option<Self> {
        let ring = |most_queries| {
            let mut ring = Ring {
                depth: 0,
                stage_bytes: 2 * tile_bytes + 8,
                most_queries,
            };
            let left = most.saturating_sub(ring.shared(head_dim, most_queries));
            ring.depth = (left / (Self::WARPS * ring.stage_bytes)).min(Self::DEEPEST);
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
struct Prompts {
    /// Queries of a block.
    queries: usize,
    stages: usize,
    /// Bytes.
    shared: usize,
}

impl Prompts {
    const STAGE: usize = 16384;

    /// For heads of `head_dim` columns where a block has `most` bytes, if it can.
    fn new(head_dim: usize, most: usize) -> Option<Self> {
        let queries = match head_dim {
            256 => 128,
            512 => 64,
            _ => return None,
        };
        // Queries, probabilities of a split, each page's maximum and sum; of a query the sum so
        // far, and the maximum for each warpgroup.
        let fixed =
            queries * (2 * head_dim + 2 * SPLIT_KEYS + 8 * SPLIT_KEYS / PAGE_ROWS + 4) + 4 * 128;
        // Beside them two barriers a stage, 16 bytes, and 112 to align what comes after.
        let left = most.checked_sub(fixed + 128)?;
        // As many of each of the rings.
        let stages = left / (Self::STAGE + 16) / (head_dim / 256) * (head_dim / 256);
        (stages > 3).then_some(Prompts {
            queries,
            stages,
            shared: fixed + stages * Self::STAGE,
        })
    }
}

fn kernel(name: &'static str, pages: &Pages) -> Kernel {
    let number = match pages.kept {
        Kept::Plain(Scalar::F32) => 0,
        Kept::Plain(Scalar::F16) => 1,
        Kept::Plain(Scalar::Bf16) => 2,
        Kept::Q8 => 3,
    };
    let file = match name {
        "kv_append" | "norm_rope_append" => "kv_append",
        _ => "attention",
    };
    let mut kernel = Kernel::new(file, name);
    kernel.defines.extend([
        ("KV_FORMAT", number),
        ("TENSOR_CORES", usize::from(pages.tiles.is_some())),
        ("HEAD_DIM", pages.tiles.unwrap_or(0)),
        (
            "HEAD_COLUMNS",
            pages.tiles.map_or(0, |_| pages.spec.head_dim),
        ),
        ("STAGES", pages.ring.map_or(0, |ring| ring.depth)),
    ]);
    kernel
}

/// The same of warpgroups.
fn prompts_kernel(prompts: Prompts, pages: &Pages) -> Kernel {
    let mut kernel = kernel("attention_wgmma", pages);
    kernel.file = ATTENTION_WGMMA;
    kernel.defines.pop();
    kernel.defines.push(("STAGES", prompts.stages));
    kernel
}

/// What the kernels can keep.
pub(crate) fn formats() -> KvFormats {
    use quant::kv::{BF16, F16, F32, Q8_0};
    KvFormats::same(vec![&BF16, &F16, &F32, &Q8_0])
}

/// How keys and values in `format` are kept, if the kernels can.
pub(crate) fn kept(format: KvFormat) -> Option<Kept> {
    match format.k.layout {
        _ if format.k != format.v => None,
        KvLayout::Plain(scalar) => Some(Kept::Plain(scalar)),
        _ => (format.k.name == "q8_0").then_some(Kept::Q8),
    }
}

pub(crate) fn kv(cuda: &Cuda, spec: KvSpec) -> Kv {
    let kept = kept(spec.format).expect("a format that the device keeps");
    assert!(spec.head_dim <= 512, "a head of at most 512 columns");
    // Blocks of q8_0 have a scale, which leaves no room for columns that are not there.
    let tiles = match kept {
        Kept::Plain(Scalar::F32) => None,
        Kept::Plain(_) if spec.head_dim.is_multiple_of(4) => {
            Some(spec.head_dim.next_multiple_of(32))
        }
        _ => spec.head_dim.is_multiple_of(32).then_some(spec.head_dim),
    };
    let columns = tiles.unwrap_or(spec.head_dim);
    let values = spec.pages * spec.heads * PAGE_ROWS * columns;
    let bytes = match kept {
        Kept::Plain(scalar) => values * scalar.bytes(),
        Kept::Q8 => values / TILE_VALUES * tile_bytes(kept),
    };
    let block = || Block::zeroed(&cuda.device.driver, bytes, "memory for keys and values");
    assert!(tiles.is_some() || kept != Kept::Q8, "heads of whole blocks");
    Kv {
        spec,
        storage: Box::new(Arc::new(Pages {
            spec,
            keys: block(),
            values: block(),
            kept,
            tiles,
            ring: tiles
                .filter(|e| *e == spec.head_dim)
                .and_then(|e| Ring::new(e, tile_bytes(kept), cuda.device.driver.shared)),
            prompts: tiles
                .filter(|e| *e == spec.head_dim)
                .filter(|_| cuda.device.driver.arch == 90 && kept != Kept::Q8)
                .and_then(|e| Prompts::new(e, cuda.device.driver.shared)),
        })),
    }
}

/// Where page `page` of a layer's keys and of its values lie, and the bytes of either.
fn page_blocks(kv: &Kv, page: usize) -> ([Address; 2], usize) {
    let pages = pages(kv);
    let bytes = pages.keys.bytes / kv.spec.pages;
    let blocks = [&pages.keys, &pages.values];
    (
        blocks.map(|block| block.address + (page * bytes) as Address),
        bytes,
    )
}

/// Copies a page.
pub(crate) fn copy(cuda: &Cuda, kv: &Kv, from: usize, to: usize) {
    cuda.flush();
    let (from, bytes) = page_blocks(kv, from);
    let (to, _) = page_blocks(kv, to);
    for (to, from) in to.into_iter().zip(from) {
        cuda.device.driver.copy(to, from, bytes);
    }
}

/// The bytes of a page: its keys, then its values.
pub(crate) fn save(cuda: &Cuda, kv: &Kv, page: usize) -> Vec<u8> {
    cuda.flush();
    let (blocks, bytes) = page_blocks(kv, page);
    let mut saved = vec![0; 2 * bytes];
    for (to, from) in saved.chunks_exact_mut(bytes.max(1)).zip(blocks) {
        cuda.device.driver.read(to, from);
    }
    saved
}

/// Makes a page what [`save`] has saved, if `bytes` are as many.
pub(crate) fn load(cuda: &Cuda, kv: &Kv, page: usize, bytes: &[u8]) -> bool {
    let (blocks, n) = page_blocks(kv, page);
    if bytes.len() != 2 * n {
        return false;
    }
    cuda.flush();
    for (to, from) in blocks.into_iter().zip(bytes.chunks_exact(n.max(1))) {
        cuda.device.driver.write(to, from);
    }
    true
}

/// A layer's keys and values on the device.
pub(crate) fn pages(kv: &Kv) -> &Arc<Pages> {
    kv.storage.downcast_ref().expect("memory of this backend")
}

/// The keys and values that `operand` is.
fn bound<'a>(l: &'a Launch<'_>, operand: Operand) -> &'a Pages {
    match l.bound(operand) {
        Bound::Kv(pages) => pages,
        _ => unreachable!("recorded as a KV cache"),
    }
}

/// Launches what writes keys and values as they are.
pub(crate) fn append(l: &Launch<'_>, op: &Op) {
    let Kind::KvAppend {
        kv,
        group,
        heads,
        head_dim,
        batch,
    } = op.kind
    else {
        unreachable!("called for this kind");
    };
    let (p, n) = (bound(l, kv), l.len(op.inputs[0]));
    let args = Args::default()
        .ptr(p.keys.address)
        .ptr(p.values.address)
        .ptr(l.address(op.inputs[0]))
        .ptr(l.address(op.inputs[1]))
        .ptr(l.rows(batch).address)
        .int(group)
        .int(heads)
        .int(head_dim)
        .long(n);
    l.device
        .launch(&kernel("kv_append", p), Grid::each(n), args);
}

/// Launches norms and rotations of heads, and what writes keys and values.
pub(crate) fn heads_append(l: &Launch<'_>, op: &Op) {
    let Kind::HeadsAppend {
        kv,
        group,
        head_dim,
        batch,
        rope,
        eps,
        jobs,
    } = &op.kind
    else {
        unreachable!("called for this kind");
    };
    let p = bound(l, *kv);
    let rope = rope.map(|rope| l.frequencies(rope.table));
    let mut all = HeadJobs {
        frequencies: rope.map_or(0, |r| r.address),
        batch: l.rows(*batch).address,
        keys: p.keys.address,
        values: p.values.address,
        head_dim: *head_dim as i32,
        offset: rope.map_or(0, |r| r.pair_offset) as i32,
        pairs: rope.map_or(0, |r| r.pairs) as i32,
        group: *group as i32,
        eps: *eps,
        ..HeadJobs::default()
    };
    let (mut inputs, mut outputs) = (op.inputs.iter(), op.outputs.iter());
    let mut next = || l.address(*inputs.next().expect("as many inputs as the jobs have"));
    let mut heads = 0;
    for i in 0..=MAX_JOBS {
        all.first[i] = heads as i32;
        let Some(job) = jobs.get(i) else { continue };
        heads += job.heads;
        let is = |role| usize::from(job.role == role);
        let (normed, turned) = (usize::from(job.is_normed), usize::from(job.is_rotated));
        let (key, value) = (is(HeadRole::Key), is(HeadRole::Value));
        all.kind[i] = (normed | turned << 1 | key << 2 | value << 3) as i32;
        all.x[i] = next();
        all.weight[i] = if job.is_weighted { next() } else { 0 };
        if job.is_normed {
            all.y[i] = l.address(*outputs.next().expect("an output for each norm"));
        }
    }
    let [rows, _] = l.shape(op.inputs[0]);
    let grid = Grid {
        shared: 4 * head_dim,
        ..Grid::new(rows * heads, threads(*head_dim))
    };
    let args = Args::default().of(&all);
    l.device.launch(&kernel("norm_rope_append", p), grid, args);
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
    Cut::new(p, attention, rows.n, rows.ahead).is_split && p.spec.head_dim.is_multiple_of(TILE)
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
    let args = AttentionArgs {
        q: l.address(op.inputs[0]),
        keys: p.keys.address,
        values: p.values.address,
        batch: rows.address,
        y: l.address(op.outputs[0]),
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
    if step.cut.is_split {
        step.launch_splits();
        step.launch_merge(&l.f16_output(op, op.outputs[0]));
    } else {
        step.launch_whole();
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
                let grid = self.grid(tiles * QUERIES, 1, 32 * Ring::WARPS, shared);
                self.launch(name, grid);
            }
            None => self.launch("attention_decode", self.grid_of_tiles(4)),
        }
    }

    /// Launches the merge of partial results, which writes an f16 copy of them too.
    fn launch_merge(&self, f16: &Activations) {
        let args = Args::default().of(&self.args).of(f16);
        let columns = self.pages.spec.head_dim.div_ceil(TILE);
        let grid = Grid::new(self.rows.n * self.heads * columns, 128);
        let kernel = kernel("attention_merge", self.pages);
        self.device.launch(&kernel, grid, args);
    }

    /// Launches what computes each row's result in one go.
    fn launch_whole(&self) {
        let (head_dim, most) = (self.pages.spec.head_dim, self.device.driver.shared);
        let ring = self.pages.ring.and_then(|r| r.shared_all(head_dim, most));
        if let Some(prompts) = self.pages.prompts {
            let grid = self.grid(prompts.queries, 0, 384, prompts.shared);
            let kernel = prompts_kernel(prompts, self.pages);
            let args = Args::default().of(&self.args);
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
