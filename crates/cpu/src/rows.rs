//! Ops that copy rows and columns, and argmax.

use crate::arch::{Kernel, Lanes};
use crate::device::Device;
use crate::memory::{values, values_mut};
use crate::pool::{DisjointSlice, WORK_RANGE};
use backend::{Batch, NO_TOKEN, Tensor, nan_sign};

/// Rows `rows` of `x`, in this order.
pub(crate) fn gather(device: &Device, x: &Tensor, rows: &[usize]) -> Tensor {
    let cols = x.cols();
    let mut y = device.tensor(rows.len(), cols);
    if cols > 0 {
        let from = values(x);
        for (to, &row) in values_mut(&mut y).chunks_exact_mut(cols).zip(rows) {
            to.copy_from_slice(&from[row * cols..][..cols]);
        }
    }
    y
}

/// `x` with rows of `embeddings` in the place of the batch's media rows of this source.
pub(crate) fn replace(mut x: Tensor, embeddings: &Tensor, source: u32, batch: &Batch) -> Tensor {
    let cols = x.cols();
    assert_eq!(cols, embeddings.cols(), "rows of one width");
    let (to, from) = (values_mut(&mut x), values(embeddings));
    for media in batch.media.iter().filter(|m| m.source == source) {
        let row = &from[media.embedding as usize * cols..][..cols];
        to[media.row as usize * cols..][..cols].copy_from_slice(row);
    }
    x
}

/// Columns `first .. first + cols` of `x`.
pub(crate) fn columns(device: &Device, x: &Tensor, first: usize, cols: usize) -> Tensor {
    let mut y = device.tensor(x.rows(), cols);
    if cols > 0 {
        let rows = values(x).chunks_exact(x.cols());
        for (to, row) in values_mut(&mut y).chunks_exact_mut(cols).zip(rows) {
            to.copy_from_slice(&row[first..first + cols]);
        }
    }
    y
}

/// The columns of `a`, then those of `b`.
pub(crate) fn concat(device: &Device, a: &Tensor, b: &Tensor) -> Tensor {
    assert_eq!(a.rows(), b.rows(), "rows to join");
    let (left, right) = (a.cols(), b.cols());
    let mut y = device.tensor(a.rows(), left + right);
    let (a, b) = (values(a), values(b));
    for (i, to) in values_mut(&mut y)
        .chunks_exact_mut((left + right).max(1))
        .enumerate()
    {
        to[..left].copy_from_slice(&a[i * left..][..left]);
        to[left..].copy_from_slice(&b[i * right..][..right]);
    }
    y
}

/// Finds the column of a row's largest value, the first of equal ones; [`NO_TOKEN`] if a value is
/// NaN or the largest one is not finite.
struct Argmax<'a>(&'a [f32]);

impl Kernel for Argmax<'_> {
    type Output = usize;

    #[inline(always)]
    fn run<L: Lanes>(self) -> usize {
        /// Values searched one by one, once the largest is known.
        const BLOCK: usize = 256;
        let row = self.0;
        let mut best = f32::NEG_INFINITY;
        let mut block = 0;
        let mut signs = [0; 16];
        for (i, values) in row.chunks(BLOCK).enumerate() {
            let mut lanes = L::splat(best);
            let (whole, rest) = values.as_chunks::<16>();
            for x in whole {
                lanes = L::load(x).maximum(lanes);
                for (sign, &x) in signs.iter_mut().zip(x) {
                    *sign |= nan_sign(x);
                }
            }
            let mut largest = lanes.max_lane();
            for &x in rest {
                if x > largest {
                    largest = x;
                }
                signs[0] |= nan_sign(x);
            }
            if largest > best {
                (best, block) = (largest, i);
            }
        }
        if signs.iter().any(|&sign| sign < 0) || !best.is_finite() {
            return NO_TOKEN as usize;
        }
        let start = block * BLOCK;
        start
            + row[start..]
                .iter()
                .position(|&x| x == best)
                .expect("the largest is one of them")
    }
}

/// [`backend::confidence`], which the compiler makes vectors of.
struct Confidence<'a>(&'a [f32]);

impl Kernel for Confidence<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<L: Lanes>(self) -> f32 {
        backend::confidence(self.0)
    }
}

/// The probability of each row's likeliest token, to a few digits.
pub(crate) fn confidences(device: &Device, x: &Tensor) -> Vec<f32> {
    let rows = values(x).chunks_exact(x.cols().max(1));
    rows.map(|row| device.isa.run(Confidence(row))).collect()
}

/// The column of each row's largest value, the first of equal ones; [`NO_TOKEN`] if a value is NaN
/// or the largest one is not finite.
pub(crate) fn argmax(device: &Device, x: &Tensor) -> Vec<u32> {
    let cols = x.cols();
    let x = values(x);
    let mut best = vec![0; x.len() / cols.max(1)];
    let n = best.len();
    let out = DisjointSlice::new(&mut best);
    // Rows are searched whole; a long one is worth handing out.
    device
        .pool
        .each(n, (2 * WORK_RANGE / cols.max(1)).max(1), |_, range| {
            for row in range {
                // SAFETY: every row is visited once.
                let best = unsafe { &mut out.part(row..row + 1)[0] };
                *best = device.isa.run(Argmax(&x[row * cols..][..cols])) as u32;
            }
        });
    best
}
