//! Online softmax: maximum and sum of scores that come a page of keys at a time.
//!
//! ```text
//! m' = max(m, max s)      c = exp(m - m')      p = exp(s - m')      l' = l c + Σ p
//! out' = out c + Σ p v
//! ```

use crate::arch::{Lanes, load, store};
use backend::math;
use std::ops::Range;

/// Keys of a block: one in each lane.
const BLOCK: usize = 16;

/// The state of one query.
#[derive(Clone, Copy)]
pub(super) struct OnlineSoftmax {
    /// Maximum and sum of the current split.
    pub(super) max: f32,
    pub(super) sum: f32,
    /// The factor of the results so far, before those of the current page are added.
    pub(super) correction: f32,
    /// Maximum and sum of the splits before the current one.
    pub(super) total_max: f32,
    /// Negative until there is a total.
    pub(super) total_sum: f32,
    /// Keys of the current page that the query sees.
    pub(super) first: usize,
    pub(super) last: usize,
}

impl OnlineSoftmax {
    /// The state of a query that has seen nothing.
    pub(super) const FRESH: OnlineSoftmax = OnlineSoftmax {
        max: 0.0,
        sum: 0.0,
        correction: 0.0,
        total_max: 0.0,
        total_sum: -1.0,
        first: 0,
        last: 0,
    };

    /// Whether none of the split's keys was visible: any score would have left
    /// a maximum, a sum, or NaN.
    pub(super) fn saw_nothing(&self) -> bool {
        self.max == f32::NEG_INFINITY && self.sum == 0.0
    }

    /// Turns the scores `p` of a page, times `scale`, into probabilities relative to the new
    /// maximum, and moves maximum and sum.
    #[inline(always)]
    pub(super) fn add_page<L: Lanes>(&mut self, scale: f32, p: &mut [[f32; BLOCK]]) {
        if self.first >= self.last {
            return;
        }
        let scale = L::splat(scale);
        let keys = self.first..self.last;
        let blocks = keys.start / BLOCK..keys.end.div_ceil(BLOCK);
        let whole = keys.start == 0 && keys.end == BLOCK * p.len();
        let none = L::splat(f32::NEG_INFINITY);
        let mut max = none;
        for b in blocks.clone() {
            let mut x = L::load(&p[b]) * scale;
            if !whole {
                x = mask(x, b, keys.clone(), none);
            }
            x.store(&mut p[b]);
            max = x.maximum(max);
        }
        let largest = max.max_lane();
        let new = if largest > self.max {
            largest
        } else {
            self.max
        };
        // The exponential of zero is one; it is worth knowing, because a maximum
        // seldom moves.
        self.correction = if self.max == new && new.is_finite() {
            1.0
        } else {
            math::exp(self.max - new)
        };
        self.max = new;
        let (new, zero) = (L::splat(new), L::splat(0.0));
        let mut sum = zero;
        for b in blocks {
            let mut x = math::exp(L::load(&p[b]) - new);
            if !whole {
                x = mask(x, b, keys.clone(), zero);
            }
            x.store(&mut p[b]);
            sum = sum + x;
        }
        self.sum = self.sum * self.correction + sum.sum();
    }
}

/// `otherwise` in lanes of block `b` that are not among `keys`.
#[inline(always)]
fn mask<L: Lanes>(x: L, b: usize, keys: Range<usize>, otherwise: L) -> L {
    let key = L::iota() + L::splat((b * BLOCK) as f32);
    let x = key.if_below(L::splat(keys.end as f32), x, otherwise);
    key.if_below(L::splat(keys.start as f32), otherwise, x)
}

/// Merges two splits: `left ← left exp(m₁ - m) + right exp(m₂ - m)`, `m` being the larger
/// maximum; returns it and the sums merged likewise.
#[inline(always)]
pub(super) fn merge<L: Lanes>(
    left: &mut [f32],
    (max, sum): (f32, f32),
    right: &[f32],
    (max2, sum2): (f32, f32),
) -> (f32, f32) {
    let new = if max2 > max { max2 } else { max };
    let (c, c2) = (math::exp(max - new), math::exp(max2 - new));
    for (left, right) in left.chunks_mut(16).zip(right.chunks(16)) {
        store(
            load::<L>(left) * L::splat(c) + load::<L>(right) * L::splat(c2),
            left,
        );
    }
    (new, sum * c + sum2 * c2)
}
