//! Pages of keys and values: how they are stored, and what writes them (kernels/kv_*.cu).

use crate::args::{Activations, Address, Args, HeadJobs};
use crate::attention::{Prompts, Ring};
use crate::constants::{HEAD_WARPS, VALUE_ROWS};
use crate::elementwise::threads;
use crate::launch::{Device, Launch};
use crate::machine::Grid;
use crate::memory::Block;
use crate::pack::TILE;
use crate::record::Bound;
use crate::{Cuda, Kernel};
use backend::{Kv, KvFormat, KvFormats, KvSpec, PAGE_ROWS};
use fusion::rules::heads::MAX_JOBS;
use fusion::{HeadRole, Kind, Op, Operand};
use quant::kv::Rotation;
use quant::{KvLayout, KvRowFormat, Scalar};
use std::sync::Arc;

/// One layer's keys and values, and how they are stored.
pub(crate) struct Pages {
    pub(crate) spec: KvSpec,
    pub(crate) keys: Block,
    pub(crate) values: Block,
    /// Columns of a head as it lies in the pages, where tensor cores take them so: whole tiles, of
    /// which those beyond the head's own columns are zeros.
    pub(crate) tiles: Option<usize>,
    pub(crate) ring: Option<Ring>,
    /// How warpgroups take prompts, if they do.
    pub(crate) prompts: Option<Prompts>,
    /// How they take prompts of layers with so short a window that all units of keys are pages, where that differs.
    pub(crate) window_prompts: Option<Prompts>,
}

impl Pages {
    fn rotates(&self) -> bool {
        let KvFormat { k, v } = self.spec.format;
        k.rotation.is_some() || v.rotation.is_some()
    }
}

/// The kernels' number of a layout, the bits of a code, and the columns that are rotated together.
fn numbers(format: &KvRowFormat) -> [usize; 3] {
    let [number, bits] = match format.layout {
        KvLayout::Plain(Scalar::F32) => [0, 32],
        KvLayout::Plain(Scalar::F16) => [1, 16],
        KvLayout::Plain(Scalar::Bf16) => [2, 16],
        KvLayout::Coded { bits, .. } => [3, bits.into()],
        KvLayout::Levels { bits } => [4, bits.into()],
    };
    [number, bits, format.rotation.map_or(0, group_of)]
}

/// Columns of a group of a rotation.
fn group_of(rotation: Rotation) -> usize {
    match rotation {
        Rotation::Groups64 => 64,
        Rotation::Groups128 => 128,
    }
}

/// What kernels of keys and values in `format` are compiled with.
pub(crate) fn format_defines(format: KvFormat) -> [(&'static str, usize); 6] {
    let ([key, key_bits, key_group], [value, value_bits, value_group]) =
        (numbers(format.k), numbers(format.v));
    [
        ("KEY_FORMAT", key),
        ("KEY_BITS", key_bits),
        ("KEY_ROTATION", key_group),
        ("VALUE_FORMAT", value),
        ("VALUE_BITS", value_bits),
        ("VALUE_ROTATION", value_group),
    ]
}

/// A kernel for pages like these.
pub(crate) fn kernel(name: &'static str, pages: &Pages) -> Kernel {
    let file = match name {
        "kv_append" | "norm_rope_append" | "norm_rope_append_rows" | "norm_append_values" => {
            "kv_append"
        }
        _ => "attention",
    };
    let mut kernel = Kernel::new(file, name);
    kernel.defines.extend(format_defines(pages.spec.format));
    let blocks = pages.ring.map_or([1; 2], |ring| ring.blocks);
    kernel.defines.extend([
        ("TENSOR_CORES", usize::from(pages.tiles.is_some())),
        ("HEAD_DIM", pages.tiles.unwrap_or(0)),
        (
            "HEAD_COLUMNS",
            pages.tiles.map_or(0, |_| pages.spec.head_dim),
        ),
        ("BLOCKS_1", blocks[0]),
        ("BLOCKS_2", blocks[1]),
        ("STAGES", pages.ring.map_or(0, |ring| ring.depth)),
    ]);
    kernel
}

/// What the kernels can keep: whatever they find a layout for.
pub(crate) fn formats() -> KvFormats {
    KvFormats::all()
}

pub(crate) fn kv(cuda: &Cuda, spec: KvSpec) -> Kv {
    assert!(spec.head_dim <= 512, "a head of at most 512 columns");
    let both = [spec.format.k, spec.format.v];
    let is = |layout| both.map(|format| format.layout == KvLayout::Plain(layout));
    // Packed rows are whole blocks, which leaves no room for columns that are not there.
    let tiles = match is(Scalar::F32) {
        [false, false] if spec.head_dim.is_multiple_of(4) => {
            Some(spec.head_dim.next_multiple_of(32))
        }
        _ => None,
    };
    let columns = tiles.unwrap_or(spec.head_dim);
    let pages = |format: &KvRowFormat| {
        let fits = spec.head_dim.is_multiple_of(format.block);
        assert!(fits, "heads of whole blocks of {}", format.name);
        let bytes = spec.pages * spec.heads * PAGE_ROWS * format.row_bytes(columns);
        Block::zeroed(&cuda.device.driver, bytes, "memory for keys and values")
    };
    let is_plain = both.iter().all(|f| matches!(f.layout, KvLayout::Plain(_)));
    let prompts = |pages_only| {
        tiles
            .filter(|e| *e == spec.head_dim)
            .filter(|_| cuda.device.driver.arch == 90 && is_plain)
            .and_then(|e| Prompts::new(e, cuda.device.driver.shared, pages_only))
    };
    Kv {
        spec,
        storage: Box::new(Arc::new(Pages {
            spec,
            keys: pages(spec.format.k),
            values: pages(spec.format.v),
            tiles,
            ring: tiles
                .filter(|e| *e == spec.head_dim)
                .and_then(|e| Ring::new(e, spec.format, cuda.device.driver.shared)),
            prompts: prompts(false),
            window_prompts: prompts(false).and_then(|_| prompts(true)),
        })),
    }
}

/// Where page `page` of a layer's keys and of its values lie, and the bytes of each.
fn page_blocks(kv: &Kv, page: usize) -> [(Address, usize); 2] {
    let pages = pages(kv);
    [&pages.keys, &pages.values].map(|block| {
        let bytes = block.bytes / kv.spec.pages;
        (block.address + (page * bytes) as Address, bytes)
    })
}

/// Copies a page.
pub(crate) fn copy(cuda: &Cuda, kv: &Kv, from: usize, to: usize) {
    cuda.flush();
    let blocks = page_blocks(kv, from).into_iter().zip(page_blocks(kv, to));
    for ((from, bytes), (to, _)) in blocks {
        cuda.device.driver.copy(to, from, bytes);
    }
}

/// The bytes of a page: its keys, then its values.
pub(crate) fn save(cuda: &Cuda, kv: &Kv, page: usize) -> Vec<u8> {
    cuda.flush();
    let blocks = page_blocks(kv, page);
    let mut saved = vec![0; blocks.iter().map(|(_, bytes)| bytes).sum()];
    let (keys, values) = saved.split_at_mut(blocks[0].1);
    for (to, (from, _)) in [keys, values].into_iter().zip(blocks) {
        cuda.device.driver.read(to, from);
    }
    saved
}

/// Makes a page what [`save`] has saved, if `bytes` are as many.
pub(crate) fn load(cuda: &Cuda, kv: &Kv, page: usize, bytes: &[u8]) -> bool {
    let [(keys, n_keys), (values, n_values)] = page_blocks(kv, page);
    if bytes.len() != n_keys + n_values {
        return false;
    }
    cuda.flush();
    let (of_keys, of_values) = bytes.split_at(n_keys);
    cuda.device.driver.write(keys, of_keys);
    cuda.device.driver.write(values, of_values);
    true
}

/// A layer's keys and values on the device.
pub(crate) fn pages(kv: &Kv) -> &Arc<Pages> {
    kv.storage.downcast_ref().expect("memory of this backend")
}

/// The keys and values that `operand` is.
pub(crate) fn bound<'a>(l: &'a Launch<'_>, operand: Operand) -> &'a Pages {
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
    let [rows, _] = l.shape(op.inputs[0]);
    let takes_rows =
        p.tiles.is_some() && head_dim.is_multiple_of(TILE) && rows >= 2 * l.device.driver.sms;
    let values = p.spec.format.v;
    // A kernel that takes several rows of values at once does not rotate them by position.
    let are_apart =
        takes_rows && matches!(values.layout, KvLayout::Plain(_)) && values.rotation.is_none();
    let mut apart = all;
    for job in jobs {
        let is = |role| usize::from(job.role == role);
        let (normed, turned) = (usize::from(job.is_normed), usize::from(job.is_rotated));
        let (key, value) = (is(HeadRole::Key), is(HeadRole::Value));
        let of = JobArgs {
            heads: job.heads,
            kind: (normed | turned << 1 | key << 2 | value << 3) as i32,
            x: next(),
            weight: if job.is_weighted { next() } else { 0 },
            y: match job.is_normed {
                true => l.address_if_read(*outputs.next().expect("an output for each norm")),
                false => 0,
            },
        };
        let is_apart = are_apart && job.role == HeadRole::Value && !job.is_rotated;
        of.add_to(if is_apart { &mut apart } else { &mut all });
    }
    // A head, and what becomes of it before it is rotated in groups.
    let of_head = 4 * head_dim * (1 + usize::from(p.rotates()));
    let launch = |name, jobs: &HeadJobs, grid| {
        let args = Args::default().of(jobs);
        l.device.launch(&kernel(name, p), grid, args);
    };
    if takes_rows {
        let grid = Grid {
            // Sines and cosines besides.
            shared: 8 * rope.map_or(0, |r| r.pairs) + HEAD_WARPS * of_head,
            ..Grid::new(rows, 32 * HEAD_WARPS)
        };
        launch("norm_rope_append_rows", &all, grid);
    } else {
        let grid = Grid {
            shared: of_head,
            ..Grid::new(rows * all.first[MAX_JOBS] as usize, threads(*head_dim))
        };
        launch("norm_rope_append", &all, grid);
    }
    let heads = apart.first[MAX_JOBS] as usize;
    if heads > 0 {
        assert_eq!(apart.first[1], apart.first[MAX_JOBS], "one job of values");
        let warps = rows.div_ceil(VALUE_ROWS) * heads;
        let grid = Grid::new(warps.div_ceil(HEAD_WARPS), 32 * HEAD_WARPS);
        launch("norm_append_values", &apart, grid);
    }
}

/// What a kernel is told of one job, as [`HeadJobs`] has it.
struct JobArgs {
    heads: usize,
    kind: i32,
    x: Address,
    weight: Address,
    y: Address,
}

impl JobArgs {
    /// Adds the job to `jobs`, in the first place that is free.
    fn add_to(self, jobs: &mut HeadJobs) {
        let last = jobs.first[MAX_JOBS];
        let i = (0..MAX_JOBS).find(|i| jobs.first[*i] == last);
        let i = i.expect("room for every job of an op");
        jobs.x[i] = self.x;
        jobs.weight[i] = self.weight;
        jobs.y[i] = self.y;
        jobs.kind[i] = self.kind;
        // Places behind it stay free: they begin where this job ends.
        jobs.first[i + 1..].fill(last + self.heads as i32);
    }
}

/// Turns results of attention over rotated values at `y` back where they are, `heads` heads in each of `rows` rows, and
/// writes an f16 copy of them too.
pub(crate) fn undo_rotations(
    device: &Device,
    rotation: Rotation,
    y: Address,
    f16: &Activations,
    [rows, heads, head_dim]: [usize; 3],
) {
    let group = group_of(rotation);
    let parts = rows * heads * head_dim.div_ceil(group);
    let args = Args::default()
        .ptr(y)
        .of(f16)
        .int(heads)
        .int(head_dim)
        .int(group)
        .long(parts);
    let kernel = Kernel::new("kv_rotate", "undo_rotations");
    device.launch(&kernel, Grid::new(parts.div_ceil(4), 128), args);
}
