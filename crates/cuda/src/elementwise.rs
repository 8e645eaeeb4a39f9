//! Ops that look at one row at a time (kernels/elementwise.cu, kernels/row_norm.cu, kernels/run_norm.cu,
//! kernels/moe_combine.cu).

use crate::Kernel;
use crate::args::{
    Address, Args, DenseBranch, ExpertOutputs, GatedSharedExpert, GluArgs, NormEpilogue,
};
use crate::constants::GLU_TILES;
use crate::launch::{Device, Launch};
use crate::machine::Grid;
use crate::memory::Cell;
use crate::pack::TILE;
use crate::record::Bound;
use backend::{Activation, NearAttention};
use fusion::{Kind, Op, SumTerm, Value};
use std::sync::Arc;

/// Partial sums that a norm makes of a row of `width` columns: one for each two columns, and at most
/// 1024. A block that keeps one row in registers has as many threads. The order of the whole sum depends
/// on this number, so it depends on the width alone.
pub(crate) fn threads(width: usize) -> usize {
    width.div_ceil(2).next_multiple_of(32).min(1024)
}

fn kernel(name: &'static str) -> Kernel {
    Kernel::new("elementwise", name)
}

/// Rows from which on a thread makes [`ROW_FOLD`] partial sums of its row, if the row has 512 or more:
/// blocks are smaller, so several rows are on their way at once in a multiprocessor. Gates of so many rows
/// have threads that take several pairs of columns.
pub(crate) const MANY_ROWS: usize = 512;

/// Partial sums of a row that one thread makes where there are [`MANY_ROWS`]; a power of two.
pub(crate) const ROW_FOLD: usize = 4;

/// Kernel `name` of `file`, which keeps rows of `width` columns in registers and has a thread make `fold` of
/// a row's partial sums.
pub(crate) fn row_kernel(
    file: &'static str,
    name: &'static str,
    width: usize,
    fold: usize,
) -> Kernel {
    let pairs = width.div_ceil(2 * threads(width) / fold);
    let mut kernel = Kernel::new(file, name);
    kernel.defines = vec![("PAIRS_PER_THREAD", pairs), ("ROW_FOLD", fold)];
    kernel
}

/// Columns of a run, at most, that one warp normalizes.
const WIDEST_RUN: usize = 4 * TILE;

/// Kernel `name` of kernels/run_norm.cu, whose warps take runs of `width` columns.
pub(crate) fn run_kernel(name: &'static str, width: usize) -> Kernel {
    let mut kernel = Kernel::new("run_norm", name);
    kernel.defines = vec![("RUN_TILES", width / TILE)];
    kernel
}

/// Launches kernel `name` of `file`, which keeps rows of `width` columns in registers. Few rows may have a `cluster`
/// of blocks each.
fn launch_rows(
    device: &Device,
    (file, name): (&'static str, &'static str),
    [rows, width]: [usize; 2],
    cluster: bool,
    args: Args,
) {
    let threads = threads(width);
    let fold = if rows >= MANY_ROWS && threads >= 512 && threads.is_multiple_of(32 * ROW_FOLD) {
        ROW_FOLD
    } else {
        1
    };
    let grid = if cluster && fold == 1 {
        Grid::rows(rows, threads)
    } else {
        Grid::new(rows, threads / fold)
    };
    device.launch(&row_kernel(file, name, width, fold), grid, args);
}

/// The kernels' number of an activation.
pub(crate) fn number(activation: Activation) -> usize {
    match activation {
        Activation::Silu => 0,
        Activation::GeluTanh => 1,
        Activation::Sigmoid => 2,
        Activation::Gelu => 3,
    }
}

/// Threads of a block that takes a part of a row, two columns a thread.
const PART: usize = 256;

/// Widest row of a norm that a block keeps in registers.
pub(crate) const WIDEST: usize = 6 * 1024;

/// Widest head that a block normalizes and rotates.
pub(crate) const WIDEST_HEAD: usize = 512;

/// A kernel of kernels/elementwise.cu, its blocks and its arguments.
type Call = (&'static str, Grid, Args);

/// Launches an op of one kernel of kernels/elementwise.cu.
pub(crate) fn launch(l: &Launch<'_>, op: &Op) {
    let (kernel, grid, args) = match &op.kind {
        Kind::RmsNorm {
            width,
            eps,
            is_weighted,
        } => return rms_norm(l, op, *width, *eps, *is_weighted),
        Kind::Glu { .. } | Kind::GluColumns { .. } => return glu(l, op),
        Kind::LayerNorm { eps } => layer_norm(l, op, *eps),
        Kind::Affine { has_factor } => affine(l, op, *has_factor),
        Kind::AttendNear(near) => attend_near(l, op, near),
        Kind::Activate { activation } => {
            let n = l.len(op.inputs[0]);
            let x = l.in_place(op.inputs[0], op.outputs[0]);
            let args = Args::default().ptr(x).int(number(*activation)).long(n);
            ("activate_all", Grid::each(n), args)
        }
        Kind::Clamp { low, high } => {
            let n = l.len(op.inputs[0]);
            let x = l.in_place(op.inputs[0], op.outputs[0]);
            let args = Args::default().ptr(x).float(*low).float(*high).long(n);
            ("clamp", Grid::each(n), args)
        }
        Kind::Add => add(l, op),
        Kind::Scale { factor: by } | Kind::Softcap { cap: by } => {
            let n = l.len(op.inputs[0]);
            let x = l.in_place(op.inputs[0], op.outputs[0]);
            let args = Args::default().ptr(x).float(*by).long(n);
            (op.kind.name(), Grid::each(n), args)
        }
        Kind::GateRows { activation } => gate_rows(l, op, *activation),
        Kind::Gather { rows } => gather(l, op, l.bound(*rows)),
        Kind::ReplaceRows { pairs, n } => replace_rows(l, op, l.bound(*pairs), *n),
        Kind::Columns { first } => columns(l, op, *first),
        Kind::Concat => concat(l, op),
        Kind::Rope(rope) => rotation(l, op, rope),
        Kind::NormRope { rope, eps } => norm_rope(l, op, rope, *eps),
        Kind::NormGlu { .. } => return norm_glu(l, op),
        Kind::ToF16 => to_f16(l, op),
        other => unreachable!("{} is launched elsewhere", other.name()),
    };
    l.device.launch(&self::kernel(kernel), grid, args);
}

fn add(l: &Launch<'_>, op: &Op) -> Call {
    let [x, y] = [op.inputs[0], op.inputs[1]];
    let n = l.len(x);
    let y = l.address(y);
    let args = Args::default().ptr(l.in_place(x, op.outputs[0])).ptr(y);
    ("add", Grid::each(n), args.long(n))
}

/// Threads of a block that normalizes a row around its mean. The order of the sums depends on it,
/// so it is one number for all widths.
const LAYER_NORM_THREADS: usize = 256;

fn layer_norm(l: &Launch<'_>, op: &Op, eps: f32) -> Call {
    let y = op.outputs[0];
    let [rows, cols] = l.shape(y);
    let args = [op.inputs[0], op.inputs[1], op.inputs[2], y]
        .into_iter()
        .fold(Args::default(), |args, x| args.ptr(l.address(x)));
    let grid = Grid::new(rows, LAYER_NORM_THREADS);
    ("layer_norm", grid, args.int(cols).float(eps))
}

fn affine(l: &Launch<'_>, op: &Op, has_factor: bool) -> Call {
    let x = op.inputs[0];
    let (cols, n) = (l.shape(x)[1], l.len(x));
    let factor = if has_factor {
        l.address(op.inputs[1])
    } else {
        0
    };
    let shift = l.address(*op.inputs.last().expect("a shift"));
    let args = Args::default()
        .ptr(l.in_place(x, op.outputs[0]))
        .ptr(factor)
        .ptr(shift)
        .int(cols)
        .long(n);
    ("affine", Grid::each(n), args)
}

/// A warp a head of a row.
fn attend_near(l: &Launch<'_>, op: &Op, near: &NearAttention) -> Call {
    let y = op.outputs[0];
    let [rows, cols] = l.shape(y);
    let inputs = op.inputs.iter().copied().chain([y]);
    let args = inputs.fold(Args::default(), |args, x| args.ptr(l.address(x)));
    let args = args.int(near.heads).int(cols / near.heads).int(near.window);
    let grid = Grid::rect(near.heads, rows, 32);
    ("attend_near", grid, args.float(near.cap))
}

fn columns(l: &Launch<'_>, op: &Op, first: usize) -> Call {
    let [x, y] = [op.inputs[0], op.outputs[0]];
    let ([_, from], [_, cols], n) = (l.shape(x), l.shape(y), l.len(y));
    let start = l.address(x) + 4 * first as Address;
    let args = Args::default().ptr(start).ptr(l.address(y)).int(from);
    ("columns", Grid::each(n), args.int(cols).long(n))
}

fn concat(l: &Launch<'_>, op: &Op) -> Call {
    let ([a, b], y) = ([op.inputs[0], op.inputs[1]], op.outputs[0]);
    let args = [a, b, y]
        .into_iter()
        .fold(Args::default(), |args, x| args.ptr(l.address(x)));
    let args = args.int(l.shape(a)[1]).int(l.shape(b)[1]).long(l.len(y));
    ("concat", Grid::each(l.len(y)), args)
}

fn rotation(l: &Launch<'_>, op: &Op, rope: &fusion::Rope) -> Call {
    let f = l.frequencies(rope.table);
    let [rows, cols] = l.shape(op.inputs[0]);
    let n = rows * (cols / rope.head_dim) * f.pairs;
    let args = Args::default()
        .ptr(l.in_place(op.inputs[0], op.outputs[0]))
        .ptr(f.address)
        .ptr(l.rows(rope.batch).address)
        .int(cols)
        .int(rope.head_dim)
        .int(f.pair_offset)
        .int(f.pairs)
        .long(n);
    ("rope", Grid::each(n), args)
}

fn norm_rope(l: &Launch<'_>, op: &Op, rope: &fusion::Rope, eps: f32) -> Call {
    let f = l.frequencies(rope.table);
    let [rows, cols] = l.shape(op.inputs[0]);
    let (head_dim, heads) = (rope.head_dim, cols / rope.head_dim);
    let args = Args::default()
        .ptr(l.address(op.inputs[0]))
        .ptr(l.address(op.inputs[1]))
        .ptr(l.address(op.outputs[0]))
        .ptr(f.address)
        .ptr(l.rows(rope.batch).address)
        .int(heads)
        .int(head_dim)
        .int(f.pair_offset)
        .int(f.pairs)
        .float(eps);
    let grid = Grid {
        shared: 4 * head_dim,
        ..Grid::new(rows * heads, threads(head_dim))
    };
    ("norm_rope", grid, args)
}

fn norm_glu(l: &Launch<'_>, op: &Op) {
    let Kind::NormGlu {
        width,
        eps,
        is_weighted,
        activation,
    } = op.kind
    else {
        unreachable!("called for this kind");
    };
    let [n, y] = [op.outputs[0], op.outputs[1]];
    let gate = *op.inputs.last().expect("a gate");
    let args = Args::default()
        .ptr(l.address(op.inputs[0]))
        .ptr(if is_weighted {
            l.address(op.inputs[1])
        } else {
            0
        })
        .ptr(l.address_if_read(n))
        .ptr(l.address(gate))
        .ptr(l.reuse_if_read(gate, y));
    let end = |args: Args| {
        args.float(eps)
            .int(number(activation))
            .of(&l.f16_written(op, y))
    };
    let runs = l.len(n) / width;
    if runs >= MANY_ROWS && width.is_multiple_of(TILE) && width <= WIDEST_RUN {
        let kernel = run_kernel("rms_norm_glu_runs", width);
        let grid = Grid::new(runs.div_ceil(8), 256);
        return l.device.launch(&kernel, grid, end(args).long(runs));
    }
    let kernel = ("row_norm", "rms_norm_glu");
    let args = end(args.int(width));
    launch_rows(l.device, kernel, [runs, width], false, args);
}

fn to_f16(l: &Launch<'_>, op: &Op) -> Call {
    let x = op.inputs[0];
    let [rows, cols] = l.shape(x);
    let args = Args::default()
        .ptr(l.address(x))
        .int(cols)
        .of(&l.f16_output(op, x));
    let grid = Grid::rect(rows, cols.div_ceil(2 * PART), PART);
    ("to_activations", grid, args)
}

/// Activations for matrices of rotated columns, of `x: [rows, cols]`.
pub(crate) fn rotate(device: &Device, x: Address, [rows, cols]: [usize; 2]) -> Arc<Cell> {
    let rotated = Cell::f16(rows, cols);
    let args = Args::default().ptr(x).int(cols);
    let args = args.of(&rotated.activations(&device.arena));
    let grid = Grid::rect(rows, cols.div_ceil(2 * PART), PART);
    device.launch(&kernel("rotate_to_activations"), grid, args);
    rotated
}

fn rms_norm(l: &Launch<'_>, op: &Op, width: usize, eps: f32, is_weighted: bool) {
    let (x, y) = (op.inputs[0], op.outputs[0]);
    let args = Args::default()
        .ptr(l.address(x))
        .ptr(if is_weighted {
            l.address(op.inputs[1])
        } else {
            0
        })
        .ptr(l.address(y))
        .int(width)
        .float(eps);
    let runs = l.len(x) / width;
    if width > WIDEST {
        return l
            .device
            .launch(&kernel("rms_norm_wide"), Grid::new(runs, 512), args);
    }
    let args = args.of(&l.f16_output(op, y));
    launch_rows(
        l.device,
        ("row_norm", "rms_norm"),
        [runs, width],
        false,
        args,
    );
}

/// The kernels' struct of a gate: `activation(gate) x`, of columns of `x` from number `first` on,
/// to `y` and perhaps `copy`, where those columns go besides.
pub(crate) fn glu_args(
    l: &Launch<'_>,
    op: &Op,
    activation: Activation,
    [gate, x, y]: [Value; 3],
    (first, copy): (usize, Option<Value>),
) -> GluArgs {
    let [_, cols] = l.shape(y);
    let x_at = l.address(x) + 4 * first as Address;
    let copy = copy.map_or(0, |copy| l.address(copy));
    let f16 = l.f16_written(op, y);
    let gate_at = l.address(gate);
    GluArgs {
        gate: gate_at,
        x: x_at,
        gate_stride: cols as u64,
        x_stride: l.shape(x)[1] as u64,
        y: l.reuse_if_read(gate, y),
        copy,
        cols: cols as i32,
        activation: number(activation) as i32,
        f16,
    }
}

/// Chunks of a row of a gate: two columns for each thread of a block.
pub(crate) fn glu_chunks(cols: usize, threads: usize) -> usize {
    cols.div_ceil(2 * threads)
}

/// Launches a gate of `rows` by itself.
pub(crate) fn launch_glu(device: &Device, glu: &GluArgs, rows: usize) {
    let cols = glu.cols as usize;
    let args = Args::default().of(glu);
    if rows < MANY_ROWS {
        let grid = Grid::rect(rows, glu_chunks(cols, PART), PART);
        return device.launch(&kernel("glu"), grid, args);
    }
    let of_block = PART / 32 * GLU_TILES;
    let blocks = (rows * cols.div_ceil(TILE)).div_ceil(of_block);
    device.launch(&kernel("glu_rows"), Grid::new(blocks, PART), args.int(rows));
}

fn glu(l: &Launch<'_>, op: &Op) {
    let (activation, columns) = match op.kind {
        Kind::Glu { activation } => (activation, (0, None)),
        Kind::GluColumns { activation, first } => (activation, (first, op.outputs.get(1).copied())),
        _ => unreachable!("called for gates"),
    };
    let y = op.outputs[0];
    let glu = glu_args(l, op, activation, [op.inputs[0], op.inputs[1], y], columns);
    launch_glu(l.device, &glu, l.shape(y)[0]);
}

fn gate_rows(l: &Launch<'_>, op: &Op, activation: Activation) -> Call {
    let (y, n) = (op.outputs[0], l.len(op.outputs[0]));
    let args = Args::default()
        .ptr(l.address(op.inputs[0]))
        .ptr(l.address(op.inputs[1]))
        .ptr(l.address(y))
        .int(l.shape(y)[1])
        .int(number(activation))
        .long(n);
    ("gate_rows", Grid::each(n), args)
}

fn replace_rows(l: &Launch<'_>, op: &Op, pairs: &Bound, n_pairs: usize) -> Call {
    let Bound::Numbers(pairs) = pairs else {
        unreachable!("recorded as numbers of rows");
    };
    let [x, embeddings] = [op.inputs[0], op.inputs[1]];
    let cols = l.shape(x)[1];
    let n = n_pairs * cols;
    let args = Args::default()
        .ptr(l.in_place(x, op.outputs[0]))
        .ptr(l.address(embeddings))
        .ptr(pairs.address)
        .int(cols)
        .long(n);
    ("replace_rows", Grid::each(n), args)
}

fn gather(l: &Launch<'_>, op: &Op, rows: &Bound) -> Call {
    let Bound::Numbers(numbers) = rows else {
        unreachable!("recorded as numbers of rows");
    };
    let (y, n) = (op.outputs[0], l.len(op.outputs[0]));
    let args = Args::default()
        .ptr(l.address(op.inputs[0]))
        .ptr(numbers.address)
        .ptr(l.address(y))
        .int(l.shape(y)[1])
        .long(n);
    ("gather", Grid::each(n), args)
}

/// Launches the sum of the residual stream and something, and norms of it.
pub(crate) fn residual_norm(l: &Launch<'_>, op: &Op) {
    let Kind::ResidualNorm {
        term,
        has_post,
        factor,
        eps,
        norms,
    } = op.kind
    else {
        unreachable!("called for this kind");
    };
    let at = |i: usize| l.address(op.inputs[i]);
    let (x, sum) = (op.inputs[0], op.outputs[0]);
    let [rows, cols] = l.shape(sum);
    let experts = |top_k: usize| ExpertOutputs {
        parts: at(1),
        weights: at(2),
        top_k: top_k as i32,
    };
    // Everything before the norms' weights.
    let terms = op.inputs.len() - norms;
    let post = if has_post { at(terms - 1) } else { 0 };
    let mut epilogue = NormEpilogue::default();
    for i in 0..norms {
        epilogue.weight[i] = at(terms + i);
        epilogue.y[i] = l.address_if_read(op.outputs[1 + i]);
        epilogue.f16[i] = l.f16_output(op, op.outputs[1 + i]);
    }
    epilogue.count = norms as i32;
    if norms == 0 && op.f16_of(sum).is_some() {
        epilogue.f16[0] = l.f16_output(op, sum);
        epilogue.count = 1;
    }
    let (kernel, args) = match term {
        SumTerm::Plain => {
            let (y, from) = (at(1), at(0));
            let args = Args::default().ptr(from).ptr(l.reuse(x, sum)).ptr(y);
            (("row_norm", "add_norm"), args.ptr(post))
        }
        SumTerm::SharedExpert { top_k, activation } => {
            let shared = GatedSharedExpert {
                x: at(3),
                gate: at(4),
                activation: number(activation) as i32,
            };
            let args = Args::default().of(&experts(top_k)).of(&shared);
            let args = args.ptr(at(0)).ptr(l.reuse(x, sum));
            (("moe_combine", "moe_shared_norm"), args)
        }
        SumTerm::DenseBranch { top_k } => {
            let branch = DenseBranch {
                dense: at(3),
                dense_weight: at(4),
                own_weight: at(5),
            };
            let args = Args::default().of(&experts(top_k)).of(&branch);
            let args = args.ptr(at(0)).ptr(l.reuse(x, sum)).ptr(post);
            (("moe_combine", "moe_dense_norm"), args)
        }
    };
    let args = args.int(cols).float(factor).float(eps).of(&epilogue);
    launch_rows(l.device, kernel, [rows, cols], true, args);
}

/// Has the column of each row's largest value written to `best`, or what `names` has
/// for it, unless that is 0; [`backend::NO_TOKEN`] for a row that gives none.
pub(crate) fn largest(
    device: &Device,
    x: Address,
    [rows, cols]: [usize; 2],
    names: Address,
    best: Address,
) {
    let parts = cols.div_ceil(2048).min(64);
    let values = device.arena.buffer(4 * rows * parts);
    let places = device.arena.buffer(4 * rows * parts);
    let args = Args::default()
        .ptr(x)
        .ptr(values.address)
        .ptr(places.address)
        .int(cols);
    device.launch(&kernel("argmax_parts"), Grid::rect(parts, rows, 256), args);
    let args = Args::default()
        .ptr(values.address)
        .ptr(places.address)
        .ptr(names)
        .ptr(best)
        .int(parts);
    device.launch(&kernel("argmax"), Grid::new(rows, 256), args);
}
