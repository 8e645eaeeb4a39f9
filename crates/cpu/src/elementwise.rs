//! Elementwise ops.

use crate::arch::{Kernel, Lanes, update_one, update_two};
use crate::device::Device;
use crate::memory::{values, values_mut};
use crate::pool::{DisjointSlice, WORK_RANGE_LONG};
use backend::{Activation, Tensor, math};

/// A function of two elements.
pub(crate) trait Op: Copy + Sync {
    fn apply<L: Lanes>(self, x: L, y: L) -> L;
}

/// `x + y`
#[derive(Clone, Copy)]
pub(crate) struct Add;
impl Op for Add {
    #[inline(always)]
    fn apply<L: Lanes>(self, x: L, y: L) -> L {
        x + y
    }
}

/// `x` times a factor; ignores `y`.
#[derive(Clone, Copy)]
pub(crate) struct Scale(pub(crate) f32);
impl Op for Scale {
    #[inline(always)]
    fn apply<L: Lanes>(self, x: L, _: L) -> L {
        x * L::splat(self.0)
    }
}

/// `cap tanh(x / cap)`, NaN where `x` is not finite; ignores `y`.
#[derive(Clone, Copy)]
pub(crate) struct Softcap(pub(crate) f32);
impl Op for Softcap {
    #[inline(always)]
    fn apply<L: Lanes>(self, x: L, _: L) -> L {
        let cap = L::splat(self.0);
        cap * math::tanh(x / cap) + x * L::splat(0.0)
    }
}

/// `x`, or the bound that it lies beyond; ignores `y`.
#[derive(Clone, Copy)]
pub(crate) struct Clamp {
    pub(crate) low: f32,
    pub(crate) high: f32,
}
impl Op for Clamp {
    #[inline(always)]
    fn apply<L: Lanes>(self, x: L, _: L) -> L {
        let (low, high) = (L::splat(self.low), L::splat(self.high));
        let x = x.if_below(low, low, x);
        high.if_below(x, high, x)
    }
}

/// A gate's function alone; ignores `y`.
#[derive(Clone, Copy)]
struct Alone<O>(O);
impl<O: Op> Op for Alone<O> {
    #[inline(always)]
    fn apply<L: Lanes>(self, x: L, _: L) -> L {
        self.0.apply(x, L::splat(1.0))
    }
}

/// `silu(x) y`
#[derive(Clone, Copy)]
struct Silu;
impl Op for Silu {
    #[inline(always)]
    fn apply<L: Lanes>(self, x: L, y: L) -> L {
        math::silu(x) * y
    }
}

/// `gelu_tanh(x) y`
#[derive(Clone, Copy)]
struct GeluTanh;
impl Op for GeluTanh {
    #[inline(always)]
    fn apply<L: Lanes>(self, x: L, y: L) -> L {
        math::gelu_tanh(x) * y
    }
}

/// `sigmoid(x) y`
#[derive(Clone, Copy)]
struct Sigmoid;
impl Op for Sigmoid {
    #[inline(always)]
    fn apply<L: Lanes>(self, x: L, y: L) -> L {
        math::sigmoid(x) * y
    }
}

/// `gelu(x) y`
#[derive(Clone, Copy)]
struct Gelu;
impl Op for Gelu {
    #[inline(always)]
    fn apply<L: Lanes>(self, x: L, y: L) -> L {
        math::gelu(x) * y
    }
}

/// `x ← op(x, y)`, or `op(x, x)` without `y`.
struct Apply<'a, O> {
    op: O,
    x: &'a mut [f32],
    y: Option<&'a [f32]>,
}

impl<O: Op> Kernel for Apply<'_, O> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (x, rest) = self.x.as_chunks_mut::<16>();
        match self.y {
            Some(y) => {
                let (y, y_rest) = y.as_chunks::<16>();
                for (x, y) in x.iter_mut().zip(y) {
                    self.op.apply(L::load(x), L::load(y)).store(x);
                }
                if !rest.is_empty() {
                    let lanes = L::load_part(rest);
                    self.op.apply(lanes, L::load_part(y_rest)).store_part(rest);
                }
            }
            None => {
                for x in x {
                    let lanes = L::load(x);
                    self.op.apply(lanes, lanes).store(x);
                }
                if !rest.is_empty() {
                    let lanes = L::load_part(rest);
                    self.op.apply(lanes, lanes).store_part(rest);
                }
            }
        }
    }
}

/// `op(x, y)` for each element, or `op(x, x)` without `y`.
///
/// # Panics
///
/// If `x` and `y` differ in shape.
pub(crate) fn apply<O: Op>(device: &Device, op: O, mut x: Tensor, y: Option<&Tensor>) -> Tensor {
    let y = y.map(|y| {
        assert_eq!((x.rows(), x.cols()), (y.rows(), y.cols()), "equal shapes");
        values(y)
    });
    let out = values_mut(&mut x);
    let n = out.len();
    let out = DisjointSlice::new(out);
    let lines = n.div_ceil(16);
    let chunk = device.pool.even_chunk(lines, WORK_RANGE_LONG / 16);
    device.pool.each(lines, chunk, |_, range| {
        let range = 16 * range.start..n.min(16 * range.end);
        // SAFETY: ranges are disjoint.
        let x = unsafe { out.part(range.clone()) };
        device.isa.run(Apply {
            op,
            x,
            y: y.map(|y| &y[range]),
        });
    });
    x
}

/// `activation(gate) * x` of one vector of 16 lanes.
#[inline(always)]
pub(crate) fn gated<L: Lanes>(activation: Activation, gate: L, x: L) -> L {
    match activation {
        Activation::Silu => Silu.apply(gate, x),
        Activation::GeluTanh => GeluTanh.apply(gate, x),
        Activation::Sigmoid => Sigmoid.apply(gate, x),
        Activation::Gelu => Gelu.apply(gate, x),
    }
}

/// `activation(gate) * x` for each element.
pub(crate) fn glu(device: &Device, gate: Tensor, x: &Tensor, activation: Activation) -> Tensor {
    match activation {
        Activation::Silu => apply(device, Silu, gate, Some(x)),
        Activation::GeluTanh => apply(device, GeluTanh, gate, Some(x)),
        Activation::Sigmoid => apply(device, Sigmoid, gate, Some(x)),
        Activation::Gelu => apply(device, Gelu, gate, Some(x)),
    }
}

/// `activation(x)` for each element.
pub(crate) fn activate(device: &Device, x: Tensor, activation: Activation) -> Tensor {
    match activation {
        Activation::Silu => apply(device, Alone(Silu), x, None),
        Activation::GeluTanh => apply(device, Alone(GeluTanh), x, None),
        Activation::Sigmoid => apply(device, Alone(Sigmoid), x, None),
        Activation::Gelu => apply(device, Alone(Gelu), x, None),
    }
}

/// Rows of `x` times `factor`, if there is one, plus `shift`.
struct Affine<'a> {
    x: &'a mut [f32],
    factor: Option<&'a [f32]>,
    shift: &'a [f32],
}

impl Kernel for Affine<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        for x in self.x.chunks_exact_mut(self.shift.len()) {
            match self.factor {
                Some(factor) => {
                    update_two::<L>(x, factor, self.shift, |x, factor, shift| {
                        x.mul_add(factor, shift)
                    });
                }
                None => update_one::<L>(x, self.shift, |x, shift| x + shift),
            }
        }
    }
}

/// `x * factor + shift` by column, or `x + shift`.
///
/// # Panics
///
/// If `factor` or `shift` is not one row as wide as `x`.
pub(crate) fn affine(
    device: &Device,
    mut x: Tensor,
    factor: Option<&Tensor>,
    shift: &Tensor,
) -> Tensor {
    let (n, cols) = (x.rows(), x.cols());
    let row = |row| {
        assert_eq!(
            (Tensor::rows(row), row.cols()),
            (1, cols),
            "a value for each column"
        );
        values(row)
    };
    let (factor, shift) = (factor.map(row), row(shift));
    let out = DisjointSlice::new(values_mut(&mut x));
    let chunk = device
        .pool
        .even_chunk(n, WORK_RANGE_LONG.div_ceil(cols.max(1)));
    device.pool.each(n, chunk, |_, range| {
        // SAFETY: ranges are disjoint.
        let x = unsafe { out.part(range.start * cols..range.end * cols) };
        device.isa.run(Affine { x, factor, shift });
    });
    x
}
