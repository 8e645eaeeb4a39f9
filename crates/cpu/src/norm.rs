//! Normalization: root mean square norms and layer norms.

use crate::arch::{Kernel, Lanes, for_each, map, map_two, update_two};
use crate::device::Device;
use crate::memory::{values, values_mut};
use crate::pool::{DisjointSlice, WORK_RANGE_LONG};
use backend::Tensor;

/// `Σ x²` in 16 partial sums. Lanes past the end of `x` add a positive zero, which changes no
/// bit of a sum of squares.
#[inline(always)]
pub(crate) fn sum_squares<L: Lanes>(x: &[f32]) -> f32 {
    let mut lanes = L::splat(0.0);
    for_each::<L>(x, |x| lanes = x.mul_add(x, lanes));
    lanes.sum()
}

/// Normalizes whole runs of `width` values.
struct Norm<'a> {
    x: &'a [f32],
    weight: Option<&'a [f32]>,
    y: &'a mut [f32],
    width: usize,
    eps: f32,
}

impl Kernel for Norm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        for (x, y) in self
            .x
            .chunks_exact(self.width)
            .zip(self.y.chunks_exact_mut(self.width))
        {
            let inverse = 1.0 / (sum_squares::<L>(x) / self.width as f32 + self.eps).sqrt();
            let inverse = L::splat(inverse);
            match self.weight {
                Some(weight) => map_two::<L>(x, weight, y, |x, w| x * inverse * w),
                None => map::<L>(x, y, |x| x * inverse),
            }
        }
    }
}

/// `x / sqrt(mean(x²) + eps) * weight` over each run of `width` columns.
///
/// # Panics
///
/// If rows of `x` are not whole runs, or there is not a weight for each column of a run.
pub(crate) fn rms_norm(
    device: &Device,
    x: &Tensor,
    weight: Option<&Tensor>,
    width: usize,
    eps: f32,
) -> Tensor {
    assert!(
        x.cols().is_multiple_of(width),
        "whole runs of the norm's width"
    );
    let weight = weight.map(|w| {
        assert_eq!(w.cols(), width, "a weight for each column of a run");
        values(w)
    });
    let mut y = device.tensor(x.rows(), x.cols());
    let (x, out) = (values(x), DisjointSlice::new(values_mut(&mut y)));
    let n = x.len() / width;
    device.pool.each(
        n,
        device.pool.even_chunk(n, WORK_RANGE_LONG.div_ceil(width)),
        |_, range| {
            let range = range.start * width..range.end * width;
            // SAFETY: ranges are disjoint.
            let y = unsafe { out.part(range.clone()) };
            device.isa.run(Norm {
                x: &x[range],
                weight,
                y,
                width,
                eps,
            });
        },
    );
    y
}

/// Normalizes whole rows around their means.
struct LayerNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    bias: &'a [f32],
    y: &'a mut [f32],
    eps: f32,
}

impl Kernel for LayerNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let cols = self.weight.len();
        let rows = self.x.chunks_exact(cols);
        for (x, y) in rows.zip(self.y.chunks_exact_mut(cols)) {
            let mut lanes = L::splat(0.0);
            for_each::<L>(x, |x| lanes = lanes + x);
            let mean = L::splat(lanes.sum() / cols as f32);
            map::<L>(x, y, |x| x - mean);
            let inverse = 1.0 / (sum_squares::<L>(y) / cols as f32 + self.eps).sqrt();
            let inverse = L::splat(inverse);
            update_two::<L>(y, self.weight, self.bias, |d, weight, bias| {
                (d * inverse).mul_add(weight, bias)
            });
        }
    }
}

/// `(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` of each row.
///
/// # Panics
///
/// If `weight` or `bias` is not one row as wide as `x`.
pub(crate) fn layer_norm(
    device: &Device,
    x: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    eps: f32,
) -> Tensor {
    let (n, cols) = (x.rows(), x.cols());
    for row in [weight, bias] {
        assert_eq!(
            (row.rows(), row.cols()),
            (1, cols),
            "a value for each column"
        );
    }
    let mut y = device.tensor(n, cols);
    let (x, out) = (values(x), DisjointSlice::new(values_mut(&mut y)));
    let chunk = device
        .pool
        .even_chunk(n, WORK_RANGE_LONG.div_ceil(cols.max(1)));
    device.pool.each(n, chunk, |_, range| {
        let range = range.start * cols..range.end * cols;
        // SAFETY: ranges are disjoint.
        let y = unsafe { out.part(range.clone()) };
        device.isa.run(LayerNorm {
            x: &x[range],
            weight: values(weight),
            bias: values(bias),
            y,
            eps,
        });
    });
    y
}
