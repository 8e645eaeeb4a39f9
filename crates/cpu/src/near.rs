//! Attention to the rows right before a row, each distance with a key of its own.

use crate::arch::{Kernel, Lanes, load, update_one};
use crate::device::Device;
use crate::memory::{values, values_mut};
use crate::pool::{DisjointSlice, WORK_RANGE_LONG};
use backend::{NEAR_ROWS_MAX, NearAttention, Tensor, math};
use std::ops::Range;

/// Rows of queries, and everything that they attend to.
struct Near<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    relative: &'a [f32],
    attention: NearAttention,
    /// Columns of a row.
    cols: usize,
    rows: Range<usize>,
    /// Of `rows`.
    y: &'a mut [f32],
}

/// `q·(k + r)` in 16 partial sums. Lanes past the end add a product with a zero.
#[inline(always)]
fn score<L: Lanes>(q: &[f32], k: &[f32], r: &[f32]) -> f32 {
    let mut lanes = L::splat(0.0);
    for ((q, k), r) in q.chunks(16).zip(k.chunks(16)).zip(r.chunks(16)) {
        let (q, k, r): (L, L, L) = (load(q), load(k), load(r));
        lanes = q.mul_add(k + r, lanes);
    }
    lanes.sum()
}

impl Kernel for Near<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (cols, NearAttention { heads, cap, .. }) = (self.cols, self.attention);
        let e = cols / heads;
        let at = |row: usize, head: usize| row * cols + head * e..row * cols + (head + 1) * e;
        for (row, y) in self.rows.zip(self.y.chunks_exact_mut(cols)) {
            for (head, o) in y.chunks_exact_mut(e).enumerate() {
                let seen = self.attention.visible(row);
                let mut scores = [0.0f32; NEAR_ROWS_MAX];
                let scores = &mut scores[..seen.len()];
                let mut max = f32::NEG_INFINITY;
                for (s, key) in scores.iter_mut().zip(seen.clone()) {
                    let relative = &self.relative[at(row - key, head)];
                    let product =
                        score::<L>(&self.q[at(row, head)], &self.k[at(key, head)], relative);
                    *s = cap * math::tanh(product / cap);
                    max = if *s > max { *s } else { max };
                }
                let mut sum = 0.0;
                o.fill(0.0);
                for (s, key) in scores.iter().zip(seen) {
                    let p = math::exp(s - max);
                    sum += p;
                    let p = L::splat(p);
                    update_one::<L>(o, &self.v[at(key, head)], |o, v| p.mul_add(v, o));
                }
                o.iter_mut().for_each(|o| *o /= sum);
            }
        }
    }
}

/// `softmax(cap tanh(q·(k + r) / cap)) v` over each row and those right before it.
///
/// # Panics
///
/// As [`NearAttention::check`].
pub(crate) fn attend(
    device: &Device,
    [q, k, v]: [&Tensor; 3],
    relative: &Tensor,
    attention: &NearAttention,
) -> Tensor {
    attention.check(q, k, v, relative);
    let (n, cols) = (q.rows(), q.cols());
    let mut y = device.tensor(n, cols);
    let out = DisjointSlice::new(values_mut(&mut y));
    let chunk = WORK_RANGE_LONG.div_ceil(cols * attention.window);
    device
        .pool
        .each(n, device.pool.even_chunk(n, chunk), |_, rows| {
            // SAFETY: ranges are disjoint.
            let y = unsafe { out.part(rows.start * cols..rows.end * cols) };
            device.isa.run(Near {
                q: values(q),
                k: values(k),
                v: values(v),
                relative: values(relative),
                attention: *attention,
                cols,
                rows,
                y,
            });
        });
    y
}
