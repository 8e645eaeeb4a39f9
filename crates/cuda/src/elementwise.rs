//! Ops that look at one row at a time (kernels/elementwise.cu).

use crate::args::{Activations, GluArgs};
use crate::driver::{Address, Args, Grid};
use crate::fuse::{
    Beside, Columns, Deferred, End, Gated, Glu, MAX_JOBS, Mixed, Next, Norm, RowNorm, Term, Turn,
};
use crate::memory::{Block, Half, Values, address, address_mut};
use crate::pack::TILE;
use crate::{Cuda, Kernel};
use backend::{Activation, Batch, Rope, Tensor};
use std::sync::Arc;

/// Threads of a kernel that gives each row of `width` columns a block, two columns
/// a thread. The order of a norm's sum depends on it, so it depends on the width
/// alone.
pub(crate) fn threads(width: usize) -> usize {
    width.div_ceil(2).next_multiple_of(32).min(1024)
}

fn kernel(name: &'static str) -> Kernel {
    Kernel::new("elementwise", name)
}

/// The kernels' number of an activation.
pub(crate) fn number(activation: Activation) -> usize {
    match activation {
        Activation::Silu => 0,
        Activation::GeluTanh => 1,
        Activation::Sigmoid => 2,
    }
}

/// Threads of a block that takes a share of a row, two columns a thread.
const SHARE: usize = 256;

/// `x` as products read it; made once a tensor.
pub(crate) fn half(cuda: &Cuda, x: &Tensor) -> Arc<Half> {
    let (rows, cols) = (x.rows(), x.cols());
    x.storage::<Values>().half(|| {
        let half = Half::new(&cuda.arena, rows, cols);
        // The kernel that makes `x` can make it as well.
        match cuda.driver.take_deferred() {
            Some(Deferred::End(mut end))
                if end.x == address(x) && end.next.is_empty() && end.may_write(0, &half) =>
            {
                let half = Arc::new(half);
                end.next.push(Next {
                    weight: 0,
                    n: 0,
                    half: half.clone(),
                });
                cuda.driver.defer(Deferred::End(end));
                return half;
            }
            other => other.into_iter().for_each(|ops| cuda.driver.defer(ops)),
        }
        let args = Args::default().ptr(address(x)).int(cols).of(&half.args());
        let grid = Grid::rect(cols.div_ceil(2 * SHARE), rows, SHARE);
        cuda.launch(&kernel("to_activations"), grid, args);
        Arc::new(half)
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
    if let Some(weight) = weight
        && width == cols
        && width <= WIDEST
    {
        let half = Arc::new(Half::new(&cuda.arena, rows, cols));
        let norm = RowNorm {
            x: address(x),
            weight: address(weight),
            y: address(&y),
            rows,
            cols,
            eps,
            half: Some(half.clone()),
        };
        if defer_row_norm(cuda, norm) {
            y.storage_mut::<Values>().set_half(Some(half));
        }
        return y;
    }
    let args = Args::default()
        .ptr(address(x))
        .ptr(weight.map_or(0, address))
        .ptr(address(&y))
        .int(width)
        .float(eps);
    let runs = rows * (cols / width);
    if width > WIDEST {
        cuda.launch(&kernel("rms_norm_wide"), Grid::new(runs, 512), args);
    } else {
        let grid = Grid::new(runs, threads(width));
        cuda.launch(&kernel("rms_norm"), grid, args.of(&Activations::default()));
    }
    y
}

/// Has the norm of whole rows wait for others, or with what makes them. Returns whether
/// products will find what they read.
fn defer_row_norm(cuda: &Cuda, norm: RowNorm) -> bool {
    let bare = |norm: &RowNorm| RowNorm {
        half: None,
        ..norm.clone()
    };
    match cuda.driver.take_deferred() {
        Some(Deferred::Add { x, y, n }) if x == norm.x && n == norm.rows * norm.cols => {
            // A sum whose norm is wanted.
            let mut end = End {
                from: x,
                x,
                y: Term::Plain(y),
                post: 0,
                rows: norm.rows,
                cols: norm.cols,
                factor: 1.0,
                eps: norm.eps,
                next: Vec::new(),
            };
            if end.take(&norm) {
                cuda.driver.defer(Deferred::End(end));
                return true;
            }
            cuda.driver.defer(Deferred::Add { x, y, n });
        }
        Some(Deferred::End(mut end)) => {
            let taken = end.take(&norm);
            cuda.driver.defer(Deferred::End(end));
            if taken {
                return true;
            }
        }
        Some(Deferred::Mixed(mut m)) if [m.rows, m.cols] == [norm.rows, norm.cols] => {
            match &mut m.beside {
                Beside::Nothing if norm.x != m.y => {
                    m.beside = Beside::Norms {
                        dense: bare(&norm),
                        own: None,
                        added: false,
                    };
                    cuda.driver.defer(Deferred::Mixed(m));
                    return false;
                }
                Beside::Norms { dense, own, .. }
                    if own.is_none() && norm.x == m.y && norm.eps == dense.eps =>
                {
                    *own = Some(bare(&norm));
                    cuda.driver.defer(Deferred::Mixed(m));
                    return false;
                }
                Beside::Gated {
                    added: true,
                    onto: Some(x),
                    ..
                } if *x == norm.x => {
                    let (x, eps) = (*x, norm.eps);
                    let mut end = mixed_end(m, [x, x], 0, 1.0, eps);
                    let taken = end.take(&norm);
                    cuda.driver.defer(Deferred::End(end));
                    if taken {
                        return true;
                    }
                }
                _ => cuda.driver.defer(Deferred::Mixed(m)),
            }
        }
        other => other.into_iter().for_each(|ops| cuda.driver.defer(ops)),
    }
    cuda.driver.defer(Deferred::Norm(norm));
    true
}

/// `x = (from + mixture) factor`.
fn mixed_end(m: Mixed, [from, x]: [Address; 2], post: Address, factor: f32, eps: f32) -> End {
    End {
        from,
        x,
        post,
        rows: m.rows,
        cols: m.cols,
        y: Term::Mixed(Box::new(m)),
        factor,
        eps,
        next: Vec::new(),
    }
}

/// The kernel of a norm of whole rows.
pub(crate) fn row_norm_alone(norm: &RowNorm) -> (Kernel, Grid, Args) {
    let args = Args::default()
        .ptr(norm.x)
        .ptr(norm.weight)
        .ptr(norm.y)
        .int(norm.cols)
        .float(norm.eps)
        .of(&norm
            .half
            .as_ref()
            .map_or(Activations::default(), |h| h.args()));
    let grid = Grid::new(norm.rows, threads(norm.cols));
    (kernel("rms_norm"), grid, args)
}

/// The kernel of a sum of rows and of what is made of it.
pub(crate) fn end_alone(end: &End, y: Address) -> (Kernel, Grid, Args) {
    let args = Args::default()
        .ptr(end.from)
        .ptr(end.x)
        .ptr(y)
        .ptr(end.post);
    let args = args.int(end.cols).float(end.factor).float(end.eps);
    let grid = Grid::rows(end.rows, threads(end.cols));
    (kernel("add_norm"), grid, args.of(&end.epilogue()))
}

/// Has a norm of heads wait for others.
fn defer_norm(cuda: &Cuda, norm: Norm) {
    let mut norms = Vec::new();
    match cuda.driver.take_deferred() {
        Some(Deferred::Rule(mut rule)) => {
            let taken = rule.take_norm(&norm);
            cuda.driver.defer(Deferred::Rule(rule));
            if taken {
                return;
            }
        }
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
            let args = args
                .int(norm.head_dim)
                .float(norm.eps)
                .of(&Activations::default());
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
    let sum = match cuda.driver.take_deferred() {
        Some(Deferred::Mixed(mut m)) => {
            let mixture = m.y;
            let joined = match &mut m.beside {
                Beside::Gated { by, added, .. } if mixture == to && by.y == y && !*added => {
                    *added = true;
                    true
                }
                Beside::Gated { added, onto, .. } if mixture == y && *added && onto.is_none() => {
                    *onto = Some(to);
                    true
                }
                Beside::Norms { dense, own, added }
                    if dense.y == to && own.as_ref().is_some_and(|n| n.y == y) && !*added =>
                {
                    *added = true;
                    true
                }
                _ => false,
            };
            cuda.driver.defer(Deferred::Mixed(m));
            if joined {
                return x;
            }
            Deferred::Add { x: to, y, n }
        }
        // The norm of what is added.
        Some(Deferred::Norm(norm)) if norm.y == to && norm.y != y => Deferred::End(End {
            from: y,
            x: to,
            y: Term::Plain(norm.x),
            post: norm.weight,
            rows: norm.rows,
            cols: norm.cols,
            factor: 1.0,
            eps: norm.eps,
            next: Vec::new(),
        }),
        other => {
            other.into_iter().for_each(|ops| cuda.driver.defer(ops));
            Deferred::Add { x: to, y, n }
        }
    };
    cuda.driver.defer(sum);
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
    let y = address(y);
    let weight = post.map_or(0, address);
    let x_at = address_mut(&mut x);
    let plain = || End {
        from: x_at,
        x: x_at,
        y: Term::Plain(y),
        post: weight,
        rows,
        cols,
        factor,
        eps,
        next: Vec::new(),
    };
    let mut end = match cuda.driver.take_deferred() {
        Some(Deferred::Mixed(m)) if m.ends_with(y, post.is_some(), eps) => {
            mixed_end(m, [x_at; 2], weight, factor, eps)
        }
        other => {
            other.into_iter().for_each(|ops| cuda.driver.defer(ops));
            plain()
        }
    };
    let norm = RowNorm {
        x: x_at,
        weight: address(next),
        y: address(&n),
        rows,
        cols,
        eps,
        half: None,
    };
    if !end.may_write(norm.y, &half) {
        if let Term::Mixed(m) = end.y {
            cuda.driver.defer(Deferred::Mixed(*m));
        }
        end = plain();
    }
    end.push(&norm, &half);
    cuda.driver.defer(Deferred::End(end));
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
    let half = Arc::new(Half::new(&cuda.arena, rows, cols));
    let mut glu = Glu {
        gate: (to, cols),
        x: (address(x), cols),
        y: to,
        copy: 0,
        rows,
        cols,
        activation,
        half: half.clone(),
        product: None,
    };
    match cuda.driver.take_deferred() {
        Some(Deferred::Rule(mut rule)) => {
            let taken = rule.take_gate([to, address(x)], &half, activation);
            cuda.driver.defer(Deferred::Rule(rule));
            if taken {
                gate.storage_mut::<Values>().set_half(Some(half));
                return gate;
            }
        }
        Some(Deferred::Columns(of)) if of.y == address(x) && half.address() != of.x => {
            (glu.x, glu.copy) = ((of.start(), of.from), of.y);
        }
        other => other.into_iter().for_each(|ops| cuda.driver.defer(ops)),
    }
    cuda.driver.defer(Deferred::Glu(glu));
    gate.storage_mut::<Values>().set_half(Some(half));
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
    if !fits || half.address() == norm.x {
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
        .of(&half.args());
    let grid = Grid::new(norm.rows * norm.heads, threads(norm.head_dim));
    cuda.launch(&kernel("rms_norm_glu"), grid, args);
    Some(half)
}

/// The kernel of a gate.
pub(crate) fn glu_alone(glu: &Glu) -> (Kernel, Grid, Args) {
    let grid = Grid::rect(glu.shares(SHARE), glu.rows, SHARE);
    (kernel("glu"), grid, Args::default().of(&glu.args()))
}

impl Glu {
    /// Blocks of so many threads that share a row.
    pub(crate) fn shares(&self, threads: usize) -> usize {
        self.cols.div_ceil(2 * threads)
    }

    /// The kernels' struct.
    pub(crate) fn args(&self) -> GluArgs {
        GluArgs {
            gate: self.gate.0,
            x: self.x.0,
            gate_stride: self.gate.1 as u64,
            x_stride: self.x.1 as u64,
            y: self.y,
            copy: self.copy,
            cols: self.cols as i32,
            activation: number(self.activation) as i32,
            f16: self.half.args(),
        }
    }
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
            if matches!(m.beside, Beside::Nothing)
                && [m.rows, m.cols] == shape
                && m.y != gated.x =>
        {
            let beside = Beside::Gated {
                by: gated,
                added: false,
                onto: None,
            };
            cuda.driver.defer(Deferred::Mixed(Mixed { beside, ..m }));
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

pub(crate) fn replace_rows(
    cuda: &Cuda,
    mut x: Tensor,
    embeddings: &Tensor,
    source: u32,
    batch: &Batch,
) -> Tensor {
    assert_eq!(x.cols(), embeddings.cols(), "rows of one width");
    let of_source = batch.media.iter().filter(|m| m.source == source);
    let pairs: Vec<u32> = of_source.flat_map(|m| [m.row, m.embedding]).collect();
    let (rows, embedded) = (x.rows(), embeddings.rows());
    assert!(
        pairs
            .chunks_exact(2)
            .all(|p| (p[0] as usize) < rows && (p[1] as usize) < embedded),
        "rows of the step and of its embeddings"
    );
    if pairs.is_empty() {
        return x;
    }
    let n = pairs.len() / 2 * x.cols();
    let pairs = cuda.arena.of(&pairs);
    let args = Args::default()
        .ptr(address_mut(&mut x))
        .ptr(address(embeddings))
        .ptr(pairs.address)
        .int(embeddings.cols())
        .long(n);
    cuda.launch(&kernel("replace_rows"), Grid::each(n), args);
    x
}

pub(crate) fn columns(cuda: &Cuda, x: &Tensor, first: usize, cols: usize) -> Tensor {
    assert!(first + cols <= x.cols(), "columns of the tensor");
    let y = cuda.tensor(x.rows(), cols);
    // A gate of them may follow.
    cuda.driver.defer(Deferred::Columns(Columns {
        x: address(x),
        first,
        from: x.cols(),
        y: address(&y),
        rows: x.rows(),
        cols,
    }));
    y
}

/// The kernel of some of a tensor's columns.
pub(crate) fn columns_alone(of: Columns) -> (Kernel, Grid, Args) {
    let n = of.rows * of.cols;
    let args = Args::default().ptr(of.start()).ptr(of.y).int(of.from);
    (kernel("columns"), Grid::each(n), args.int(of.cols).long(n))
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

/// Where the frequencies of `rope`, which fits the heads of `x`, and behind them the axes
/// of positions lie, by pair.
fn frequencies(cuda: &Cuda, x: &Tensor, rope: &Rope) -> u64 {
    assert!(x.cols().is_multiple_of(rope.head_dim), "whole heads");
    rope.check();
    let frequencies = rope.frequencies.iter().map(|f| f.to_bits());
    let axes = (0..rope.frequencies.len()).map(|j| rope.axis(j) as u32);
    let words: Vec<u32> = frequencies.chain(axes).collect();
    let mut state = cuda.state();
    if let Some(known) = state.frequencies.get(&words) {
        return known.address;
    }
    let block = Block::of(&cuda.driver, &words, "rotary frequencies");
    let address = block.address;
    state.frequencies.insert(words, block);
    address
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
/// for it, unless that is 0; [`backend::NO_TOKEN`] for a row that gives none.
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
        .ptr(values.address)
        .ptr(places.address)
        .ptr(names)
        .ptr(best)
        .int(parts);
    cuda.launch(&kernel("argmax"), Grid::new(rows, 256), args);
}
