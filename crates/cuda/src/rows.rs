//! Ops that look at one row at a time (kernels/rows.cu).

use crate::driver::{Args, Grid};
use crate::memory::{Block, Buffer, Half, Values, address, address_mut};
use crate::{Cuda, Kernel};
use backend::{Activation, Batch, Rope, Tensor};

/// Threads of a kernel that gives each row of `width` columns a block. The order
/// of a norm's sum depends on it, so it depends on the width alone.
fn threads(width: usize) -> usize {
    width.next_multiple_of(32).min(512)
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
pub(crate) fn half(cuda: &Cuda, x: &Tensor) -> std::sync::Arc<Half> {
    let (rows, cols) = (x.rows(), x.cols());
    let values = x.storage::<Values>();
    values.half(|maxima| {
        let made = maxima.is_none().then(|| {
            let parts = cols.div_ceil(SHARE);
            let maxima = cuda.arena.buffer(4 * rows * parts);
            let args = Args::default()
                .ptr(address(x))
                .ptr(maxima.address)
                .int(cols);
            cuda.launch(&kernel("maxima"), Grid::rect(parts, rows, 256), args);
            maxima
        });
        let maxima = maxima.or(made.as_ref()).expect("made where absent").address;
        to_half(cuda, address(x), maxima, [rows, cols])
    })
}

/// Values for products of `x: [rows, cols]`, whose largest by [`SHARE`] are known.
pub(crate) fn to_half(cuda: &Cuda, x: u64, maxima: u64, [rows, cols]: [usize; 2]) -> Half {
    let half = Half::new(&cuda.arena, rows, cols);
    let parts = cols.div_ceil(SHARE);
    let args = Args::default()
        .ptr(x)
        .ptr(maxima)
        .int(cols)
        .int(parts)
        .words(&half.words());
    cuda.launch(&kernel("to_half"), Grid::rect(parts, rows, 256), args);
    half
}

/// Widest row of a norm that a block keeps in registers.
const WIDEST: usize = 12 * 512;

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
    // Whole rows go to products next; heads do not.
    let half = (width == cols && width <= WIDEST).then(|| Half::new(&cuda.arena, rows, cols));
    let args = Args::default()
        .ptr(address(x))
        .ptr(weight.map_or(0, address))
        .ptr(address(&y))
        .int(width)
        .float(eps);
    let (name, args) = if width > WIDEST {
        ("rms_norm_wide", args)
    } else {
        let half = half.as_ref().map_or([0; 4], Half::words);
        ("rms_norm", args.words(&half))
    };
    let grid = Grid::new(rows * (cols / width), threads(width));
    cuda.launch(&kernel(name), grid, args);
    y.storage_mut::<Values>().set_half(half);
    y
}

pub(crate) fn add(cuda: &Cuda, mut x: Tensor, y: &Tensor) -> Tensor {
    assert_eq!(
        (x.rows(), x.cols()),
        (y.rows(), y.cols()),
        "shapes of a sum"
    );
    let n = x.rows() * x.cols();
    let args = Args::default().ptr(address_mut(&mut x)).ptr(address(y));
    cuda.launch(&kernel("add"), Grid::each(n), args.long(n));
    x
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
    let half = Half::new(&cuda.arena, rows, cols);
    let args = Args::default()
        .ptr(address_mut(&mut x))
        .ptr(address(y))
        .ptr(post.map_or(0, address))
        .ptr(address(next))
        .ptr(address(&n))
        .int(cols)
        .float(factor)
        .float(eps)
        .words(&half.words());
    cuda.launch(&kernel("add_norm"), Grid::new(rows, threads(cols)), args);
    n.storage_mut::<Values>().set_half(Some(half));
    (x, n)
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
    let frequencies = frequencies(cuda, x, rope);
    let y = cuda.tensor(rows, cols);
    let heads = cols / head_dim;
    let args = Args::default()
        .ptr(address(x))
        .ptr(address(weight))
        .ptr(address(&y))
        .ptr(frequencies)
        .ptr(cuda.batch(batch))
        .int(heads)
        .int(head_dim)
        .int(rope.pair_offset)
        .int(rope.frequencies.len())
        .float(eps);
    let grid = Grid {
        shared: 4 * head_dim,
        ..Grid::new(rows * heads, threads(head_dim))
    };
    cuda.launch(&kernel("norm_rope"), grid, args);
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
    let maxima = glu_into(
        cuda,
        [(to, cols), (address(x), cols)],
        to,
        [rows, cols],
        activation,
    );
    gate.storage_mut::<Values>().set_maxima(maxima);
    gate
}

/// `y = activation(gate) x`, rows of either so many columns apart. Returns the
/// largest values, for [`to_half`].
pub(crate) fn glu_into(
    cuda: &Cuda,
    [gate, x]: [(u64, usize); 2],
    y: u64,
    [rows, cols]: [usize; 2],
    activation: Activation,
) -> Buffer {
    let parts = cols.div_ceil(SHARE);
    let maxima = cuda.arena.buffer(4 * rows * parts);
    let args = Args::default()
        .ptr(gate.0)
        .ptr(x.0)
        .long(gate.1)
        .long(x.1)
        .ptr(y)
        .ptr(maxima.address)
        .int(cols)
        .int(number(activation));
    cuda.launch(&kernel("glu"), Grid::rect(parts, rows, 256), args);
    maxima
}

pub(crate) fn gate_rows(cuda: &Cuda, x: &Tensor, gate: &Tensor, activation: Activation) -> Tensor {
    assert_eq!((gate.rows(), gate.cols()), (x.rows(), 1), "one gate a row");
    let y = cuda.tensor(x.rows(), x.cols());
    let n = x.rows() * x.cols();
    let args = Args::default()
        .ptr(address(x))
        .ptr(address(gate))
        .ptr(address(&y))
        .int(x.cols())
        .int(number(activation))
        .long(n);
    cuda.launch(&kernel("gate_rows"), Grid::each(n), args);
    y
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
    let (rows, cols) = (x.rows(), x.cols());
    let parts = cols.div_ceil(2048).min(64);
    let values = cuda.arena.buffer(4 * rows * parts);
    let places = cuda.arena.buffer(4 * rows * parts);
    let best = cuda.arena.buffer(4 * rows);
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
        .ptr(best.address)
        .int(cols)
        .int(parts);
    cuda.launch(&kernel("argmax"), Grid::new(rows, 256), args);
    let mut found = vec![0u32; rows];
    cuda.driver.read(&mut found, best.address);
    found
}
