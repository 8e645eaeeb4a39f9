//! Ops that look at one row at a time (kernels/rows.cu).

use crate::driver::{Address, Args, Grid};
use crate::fuse::{Deferred, Gated, MAX_JOBS, Mixed, Norm, Turn};
use crate::memory::{Block, Half, Values, address, address_mut};
use crate::pack::TILE;
use crate::{Cuda, Kernel, moe};
use backend::{Activation, Batch, Rope, Tensor};
use std::sync::Arc;

/// Threads of a kernel that gives each row of `width` columns a block, two columns
/// a thread. The order of a norm's sum depends on it, so it depends on the width
/// alone.
pub(crate) fn threads(width: usize) -> usize {
    width.div_ceil(2).next_multiple_of(32).min(1024)
}

fn kernel(name: &'static str) -> Kernel {
    Kernel::new("rows", name)
}

/// The kernels' number of an activation.
pub(crate) fn number(activation: Activation) -> usize {
    match activation {
        Activation::Silu => 0,
        Activation::GeluTanh => 1,
        Activation::Sigmoid => 2,
    }
}

/// Columns of a row that a block of 256 threads takes, where many share it.
const SHARE: usize = 1024;

/// `x` as products read it; made once a tensor.
pub(crate) fn half(cuda: &Cuda, x: &Tensor) -> Arc<Half> {
    let (rows, cols) = (x.rows(), x.cols());
    x.storage::<Values>().half(|| {
        let half = Half::new(&cuda.arena, rows, cols);
        let args = Args::default()
            .ptr(address(x))
            .int(cols)
            .words(&half.words());
        let grid = Grid::rect(cols.div_ceil(SHARE), rows, 256);
        cuda.launch(&kernel("to_half"), grid, args);
        half
    })
}

/// Widest row of a norm that a block keeps in registers.
const WIDEST: usize = 6 * 1024;

pub(crate) fn rms_norm(
    cuda: &Cuda,
    x: &Tensor,
    weight: Option<&Tensor>,
    width: usize,
    eps: f32,
) -> Tensor {
    let (rows, cols) = (x.rows(), x.cols());
    assert!(cols.is_multiple_of(width), "whole runs of the norm's width");
    let mut y = cuda.tensor(rows, cols);
    if width < cols && width <= WIDEST {
        let norm = Norm {
            x: address(x),
            weight: weight.map_or(0, address),
            y: address(&y),
            rows,
            heads: cols / width,
            head_dim: width,
            eps,
            turn: None,
        };
        defer_norm(cuda, norm);
        return y;
    }
    // Whole rows go to products next.
    let half =
        (width == cols && width <= WIDEST).then(|| Arc::new(Half::new(&cuda.arena, rows, cols)));
    if let (Some(weight), Some(half)) = (weight, &half)
        && let Some(old) = cuda.driver.take_deferred()
    {
        match old {
            // What it adds may be free by now, and so become the norm; that is written
            // by whoever read it.
            Deferred::Add { x: to, y: from, n }
                if to == address(x) && n == rows * cols && half.words()[0] != from =>
            {
                let of = [to, from, 0, address(weight), address(&y)];
                launch_add_norm(cuda, of, [rows, cols], 1.0, eps, half);
                y.storage_mut::<Values>().set_half(Some(half.clone()));
                return y;
            }
            other => cuda.driver.defer(other),
        }
    }
    let args = Args::default()
        .ptr(address(x))
        .ptr(weight.map_or(0, address))
        .ptr(address(&y))
        .int(width)
        .float(eps);
    if width > WIDEST {
        let grid = Grid::new(rows * (cols / width), 512);
        cuda.launch(&kernel("rms_norm_wide"), grid, args);
    } else {
        let args = args.words(&half.as_ref().map_or([0; 3], |h| h.words()));
        let grid = Grid::new(rows * (cols / width), threads(width));
        cuda.launch(&kernel("rms_norm"), grid, args);
    }
    y.storage_mut::<Values>().set_half(half);
    y
}

/// Has a norm of heads wait for others.
fn defer_norm(cuda: &Cuda, norm: Norm) {
    let mut norms = Vec::new();
    match cuda.driver.take_deferred() {
        Some(Deferred::Heads(old))
            if old.len() < MAX_JOBS && old.iter().all(|o| norm.goes_with(o)) =>
        {
            norms = old;
        }
        Some(other) => cuda.driver.defer(other),
        None => {}
    }
    norms.push(norm);
    cuda.driver.defer(Deferred::Heads(norms));
}

/// The kernel of one norm of heads.
pub(crate) fn norm_alone(norm: &Norm) -> (Kernel, Grid, Args) {
    let args = Args::default().ptr(norm.x).ptr(norm.weight).ptr(norm.y);
    let grid = Grid::new(norm.rows * norm.heads, threads(norm.head_dim));
    match norm.turn {
        None => {
            let args = args.int(norm.head_dim).float(norm.eps).words(&[0; 3]);
            (kernel("rms_norm"), grid, args)
        }
        Some(turn) => {
            let args = args
                .ptr(turn.frequencies)
                .ptr(turn.batch)
                .int(norm.heads)
                .int(norm.head_dim)
                .int(turn.pair_offset)
                .int(turn.pairs)
                .float(norm.eps);
            let shared = 4 * norm.head_dim;
            (kernel("norm_rope"), Grid { shared, ..grid }, args)
        }
    }
}

pub(crate) fn add(cuda: &Cuda, mut x: Tensor, y: &Tensor) -> Tensor {
    assert_eq!(
        (x.rows(), x.cols()),
        (y.rows(), y.cols()),
        "shapes of a sum"
    );
    // A norm of the sum may follow.
    let (to, y, n) = (address_mut(&mut x), address(y), x.rows() * x.cols());
    match cuda.driver.take_deferred() {
        Some(Deferred::Mixed(m)) if m.y == to && !m.added && m.gated.is_some_and(|g| g.y == y) => {
            let added = true;
            cuda.driver.defer(Deferred::Mixed(Mixed { added, ..m }));
        }
        other => {
            other.into_iter().for_each(|ops| cuda.driver.defer(ops));
            cuda.driver.defer(Deferred::Add { x: to, y, n });
        }
    }
    x
}

/// The kernel of a sum.
pub(crate) fn add_alone(x: u64, y: u64, n: usize) -> (Kernel, Grid, Args) {
    let args = Args::default().ptr(x).ptr(y).long(n);
    (kernel("add"), Grid::each(n), args)
}

pub(crate) fn add_norm(
    cuda: &Cuda,
    mut x: Tensor,
    y: &Tensor,
    (post, factor): (Option<&Tensor>, f32),
    next: &Tensor,
    eps: f32,
) -> (Tensor, Tensor) {
    let (rows, cols) = (x.rows(), x.cols());
    if cols > WIDEST {
        let normed = post.map(|w| rms_norm(cuda, y, Some(w), cols, eps));
        let x = scale(
            cuda,
            "scale",
            add(cuda, x, normed.as_ref().unwrap_or(y)),
            factor,
        );
        let next = rms_norm(cuda, &x, Some(next), cols, eps);
        return (x, next);
    }
    assert_eq!((y.rows(), y.cols()), (rows, cols), "shapes of a sum");
    assert!(
        next.cols() == cols && post.is_none_or(|w| w.cols() == cols),
        "a weight a column"
    );
    let mut n = cuda.tensor(rows, cols);
    let half = Arc::new(Half::new(&cuda.arena, rows, cols));
    let written = [address(&n), half.words()[0]];
    let mixed = if post.is_none() {
        moe::take_mixed(cuda, address(y), written)
    } else {
        None
    };
    if let Some((m, gated)) = mixed {
        let of = [address_mut(&mut x), address(next), address(&n)];
        moe::mixed_norm(cuda, (&m, gated), of, factor, eps, &half);
        n.storage_mut::<Values>().set_half(Some(half));
        return (x, n);
    }
    let post = post.map_or(0, address);
    let of = [
        address_mut(&mut x),
        address(y),
        post,
        address(next),
        address(&n),
    ];
    launch_add_norm(cuda, of, [rows, cols], factor, eps, &half);
    n.storage_mut::<Values>().set_half(Some(half));
    (x, n)
}

/// Of `x`, `y`, `post`, `next` and where the norm goes.
fn launch_add_norm(
    cuda: &Cuda,
    of: [u64; 5],
    [rows, cols]: [usize; 2],
    factor: f32,
    eps: f32,
    half: &Half,
) {
    let args = of.into_iter().fold(Args::default(), Args::ptr);
    let args = args.int(cols).float(factor).float(eps).words(&half.words());
    cuda.launch(&kernel("add_norm"), Grid::new(rows, threads(cols)), args);
}

pub(crate) fn norm_rope(
    cuda: &Cuda,
    x: &Tensor,
    weight: &Tensor,
    rope: &Rope,
    eps: f32,
    batch: &Batch,
) -> Tensor {
    let (rows, cols, head_dim) = (x.rows(), x.cols(), rope.head_dim);
    assert_eq!(
        (rows, weight.cols()),
        (batch.n_rows(), head_dim),
        "a row for each of the step's, a weight a column"
    );
    assert!(head_dim <= 512, "a head of at most 512 columns");
    let frequencies = frequencies(cuda, x, rope);
    let y = cuda.tensor(rows, cols);
    let norm = Norm {
        x: address(x),
        weight: address(weight),
        y: address(&y),
        rows,
        heads: cols / head_dim,
        head_dim,
        eps,
        turn: Some(Turn {
            frequencies,
            pair_offset: rope.pair_offset,
            pairs: rope.frequencies.len(),
            batch: cuda.batch(batch),
        }),
    };
    defer_norm(cuda, norm);
    y
}

/// `scale` or `softcap`.
pub(crate) fn scale(cuda: &Cuda, name: &'static str, mut x: Tensor, by: f32) -> Tensor {
    let n = x.rows() * x.cols();
    let args = Args::default().ptr(address_mut(&mut x)).float(by).long(n);
    cuda.launch(&kernel(name), Grid::each(n), args);
    x
}

pub(crate) fn glu(cuda: &Cuda, mut gate: Tensor, x: &Tensor, activation: Activation) -> Tensor {
    let (rows, cols) = (x.rows(), x.cols());
    assert_eq!((gate.rows(), gate.cols()), (rows, cols), "shapes of a gate");
    let to = address_mut(&mut gate);
    if let Some(half) = norm_glu(cuda, to, x, activation) {
        gate.storage_mut::<Values>().set_half(Some(Arc::new(half)));
        return gate;
    }
    let half = glu_into(
        cuda,
        [(to, cols), (address(x), cols)],
        to,
        [rows, cols],
        activation,
    );
    gate.storage_mut::<Values>().set_half(Some(Arc::new(half)));
    gate
}

/// `gate = activation(gate) x` together with the norm of `x`, if that is all that is
/// deferred and its runs are whole tiles.
fn norm_glu(cuda: &Cuda, gate: u64, x: &Tensor, activation: Activation) -> Option<Half> {
    let norms = match cuda.driver.take_deferred()? {
        Deferred::Heads(norms) => norms,
        other => {
            cuda.driver.defer(other);
            return None;
        }
    };
    let [norm] = norms[..] else {
        cuda.driver.defer(Deferred::Heads(norms));
        return None;
    };
    let fits = norm.y == address(x) && norm.turn.is_none() && norm.head_dim.is_multiple_of(TILE);
    let half = Half::new(&cuda.arena, x.rows(), x.cols());
    if !fits || half.words()[0] == norm.x {
        cuda.driver.defer(Deferred::Heads(norms));
        return None;
    }
    let args = Args::default()
        .ptr(norm.x)
        .ptr(norm.weight)
        .ptr(norm.y)
        .ptr(gate)
        .int(norm.head_dim)
        .float(norm.eps)
        .int(number(activation))
        .words(&half.words());
    let grid = Grid::new(norm.rows * norm.heads, threads(norm.head_dim));
    cuda.launch(&kernel("norm_glu"), grid, args);
    Some(half)
}

/// `y = activation(gate) x`, rows of either so many columns apart. Returns it as
/// products read it.
pub(crate) fn glu_into(
    cuda: &Cuda,
    [gate, x]: [(u64, usize); 2],
    y: u64,
    [rows, cols]: [usize; 2],
    activation: Activation,
) -> Half {
    let half = Half::new(&cuda.arena, rows, cols);
    let args = Args::default()
        .ptr(gate.0)
        .ptr(x.0)
        .long(gate.1)
        .long(x.1)
        .ptr(y)
        .int(cols)
        .int(number(activation))
        .words(&half.words());
    let grid = Grid::rect(cols.div_ceil(SHARE), rows, 256);
    cuda.launch(&kernel("glu"), grid, args);
    half
}

pub(crate) fn gate_rows(cuda: &Cuda, x: &Tensor, gate: &Tensor, activation: Activation) -> Tensor {
    assert_eq!((gate.rows(), gate.cols()), (x.rows(), 1), "one gate a row");
    let y = cuda.tensor(x.rows(), x.cols());
    let gated = Gated {
        x: address(x),
        gate: address(gate),
        y: address(&y),
        activation,
    };
    let shape = [x.rows(), x.cols()];
    match cuda.driver.take_deferred() {
        // The shared expert of a mixture, unless it is what the mixture adds up to.
        Some(Deferred::Mixed(m))
            if m.gated.is_none() && [m.rows, m.cols] == shape && m.y != gated.x =>
        {
            let gated = Some(gated);
            cuda.driver.defer(Deferred::Mixed(Mixed { gated, ..m }));
        }
        other => {
            other.into_iter().for_each(|ops| cuda.driver.defer(ops));
            let (kernel, grid, args) = gate_alone(gated, shape);
            cuda.launch(&kernel, grid, args);
        }
    }
    y
}

/// The kernel of a gate a row.
pub(crate) fn gate_alone(g: Gated, [rows, cols]: [usize; 2]) -> (Kernel, Grid, Args) {
    let n = rows * cols;
    let args = Args::default()
        .ptr(g.x)
        .ptr(g.gate)
        .ptr(g.y)
        .int(cols)
        .int(number(g.activation))
        .long(n);
    (kernel("gate_rows"), Grid::each(n), args)
}

pub(crate) fn gather(cuda: &Cuda, x: &Tensor, rows: &[usize]) -> Tensor {
    assert!(
        rows.iter().all(|&r| r < x.rows()),
        "rows of the tensor: {rows:?} of {}",
        x.rows()
    );
    let y = cuda.tensor(rows.len(), x.cols());
    let n = rows.len() * x.cols();
    let numbers: Vec<u32> = rows.iter().map(|&r| r as u32).collect();
    let numbers = cuda.arena.of(&numbers);
    let args = Args::default()
        .ptr(address(x))
        .ptr(numbers.address)
        .ptr(address(&y))
        .int(x.cols())
        .long(n);
    cuda.launch(&kernel("gather"), Grid::each(n), args);
    y
}

pub(crate) fn columns(cuda: &Cuda, x: &Tensor, first: usize, cols: usize) -> Tensor {
    assert!(first + cols <= x.cols(), "columns of the tensor");
    let y = cuda.tensor(x.rows(), cols);
    let n = x.rows() * cols;
    let args = Args::default()
        .ptr(address(x))
        .ptr(address(&y))
        .int(x.cols())
        .int(first)
        .int(cols)
        .long(n);
    cuda.launch(&kernel("columns"), Grid::each(n), args);
    y
}

pub(crate) fn concat(cuda: &Cuda, a: &Tensor, b: &Tensor) -> Tensor {
    assert_eq!(a.rows(), b.rows(), "rows to join");
    let y = cuda.tensor(a.rows(), a.cols() + b.cols());
    let n = y.rows() * y.cols();
    let args = Args::default()
        .ptr(address(a))
        .ptr(address(b))
        .ptr(address(&y))
        .int(a.cols())
        .int(b.cols())
        .long(n);
    cuda.launch(&kernel("concat"), Grid::each(n), args);
    y
}

/// Where the frequencies of `rope` lie, which fits the heads of `x`.
fn frequencies(cuda: &Cuda, x: &Tensor, rope: &Rope) -> u64 {
    assert!(x.cols().is_multiple_of(rope.head_dim), "whole heads");
    let pairs = rope.frequencies.len();
    assert!(
        pairs <= rope.pair_offset && rope.pair_offset + pairs <= rope.head_dim,
        "pairs that lie in a head and share no column"
    );
    let key: Vec<u32> = rope.frequencies.iter().map(|f| f.to_bits()).collect();
    cuda.state()
        .frequencies
        .entry(key)
        .or_insert_with(|| Block::of(&cuda.driver, &rope.frequencies, "rotary frequencies"))
        .address
}

pub(crate) fn rope(cuda: &Cuda, mut x: Tensor, rope: &Rope, batch: &Batch) -> Tensor {
    assert_eq!(x.rows(), batch.n_rows(), "a row for each of the step's");
    let pairs = rope.frequencies.len();
    let frequencies = frequencies(cuda, &x, rope);
    let n = x.rows() * (x.cols() / rope.head_dim) * pairs;
    let args = Args::default()
        .ptr(address_mut(&mut x))
        .ptr(frequencies)
        .ptr(cuda.batch(batch))
        .int(x.cols())
        .int(rope.head_dim)
        .int(rope.pair_offset)
        .int(pairs)
        .long(n);
    cuda.launch(&kernel("rope"), Grid::each(n), args);
    x
}

pub(crate) fn argmax(cuda: &Cuda, x: &Tensor) -> Vec<u32> {
    let best = cuda.arena.buffer(4 * x.rows());
    largest(cuda, x, 0, best.address);
    let mut found = vec![0u32; x.rows()];
    cuda.driver.read(&mut found, best.address);
    found
}

/// Has the column of each row's largest value written to `best`, or what `names` has
/// for it, unless that is 0.
pub(crate) fn largest(cuda: &Cuda, x: &Tensor, names: Address, best: Address) {
    let (rows, cols) = (x.rows(), x.cols());
    let parts = cols.div_ceil(2048).min(64);
    let values = cuda.arena.buffer(4 * rows * parts);
    let places = cuda.arena.buffer(4 * rows * parts);
    let args = Args::default()
        .ptr(address(x))
        .ptr(values.address)
        .ptr(places.address)
        .int(cols);
    cuda.launch(&kernel("argmax_parts"), Grid::rect(parts, rows, 256), args);
    let args = Args::default()
        .ptr(address(x))
        .ptr(values.address)
        .ptr(places.address)
        .ptr(names)
        .ptr(best)
        .int(cols)
        .int(parts);
    cuda.launch(&kernel("argmax"), Grid::new(rows, 256), args);
}
