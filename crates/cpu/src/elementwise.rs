//! Elementwise ops.

use crate::arch::{Kernel, Lanes};
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
    }
}

/// `activation(gate) * x` for each element.
pub(crate) fn glu(device: &Device, gate: Tensor, x: &Tensor, activation: Activation) -> Tensor {
    match activation {
        Activation::Silu => apply(device, Silu, gate, Some(x)),
        Activation::GeluTanh => apply(device, GeluTanh, gate, Some(x)),
        Activation::Sigmoid => apply(device, Sigmoid, gate, Some(x)),
    }
}
