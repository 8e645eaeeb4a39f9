//! The one inner loop of products and attention: a block of sums in registers.
//!
//! `acc[m][r] ← fma(w[k][r], x[m][k], acc[m][r])` for ascending `k`, with 16
//! lanes in each `w[k][r]`. Every output has its own accumulator, so a block's
//! shape changes speed and never bits.

use crate::arch::{Element, Lanes};

/// Bytes between the vector being read and the line asked for. Without asking,
/// memory time and arithmetic add up: on Sapphire Rapids one row of 4-bit weights
/// then reads at 0.8 of what it does with 2 to 8 KiB. Asking for lines as if they
/// were read once only (`prefetchnta`) halves the speed there.
pub(crate) const PREFETCH_DISTANCE: usize = 4096;

/// Steps between two requests.
pub(crate) const PREFETCH_STEPS: usize = 8;

/// Where a block's operands lie, in elements.
#[derive(Clone, Copy)]
pub(crate) struct Operands<W> {
    /// `x[m][k]` is at `m * x_stride + k`.
    pub(crate) x: *const f32,
    pub(crate) x_stride: usize,
    /// The 16 lanes of `w[k][r]` start at `k * w_step + r * w_stride`.
    pub(crate) w: *const W,
    pub(crate) w_step: usize,
    pub(crate) w_stride: usize,
    /// Steps.
    pub(crate) k: usize,
    /// What to ask for meanwhile.
    pub(crate) fetch: Prefetch,
}

/// What to ask for while weights are read: [`PREFETCH_STEPS`] steps at a time.
#[derive(Clone, Copy)]
pub(crate) enum Prefetch {
    /// Nothing.
    None,
    /// The same weights, [`PREFETCH_DISTANCE`] bytes on; they must be read in order (`w_step`
    /// 16).
    Ahead,
    /// So many lines a time, from an address on.
    Lines(*const u8, usize),
}

/// Adds all steps to `acc`.
///
/// # Safety
///
/// All operands are readable.
#[inline(always)]
pub(crate) unsafe fn accumulate<L: Lanes, W: Element, const M: usize, const R: usize>(
    acc: &mut [[L; R]; M],
    o: Operands<W>,
) {
    let mut sums = *acc;
    let mut k = 0;
    macro_rules! step {
        ($k:expr) => {{
            // SAFETY: step `k < o.k` of readable operands.
            unsafe {
                let w = o.w.add($k * o.w_step);
                let mut lanes = [L::splat(0.0); R];
                for r in 0..R {
                    lanes[r] = W::load::<L>(&*w.add(r * o.w_stride).cast::<[W; 16]>());
                }
                for m in 0..M {
                    let x = L::splat(*o.x.add(m * o.x_stride + $k));
                    for r in 0..R {
                        sums[m][r] = lanes[r].mul_add(x, sums[m][r]);
                    }
                }
            }
        }};
    }
    while k + PREFETCH_STEPS <= o.k {
        match o.fetch {
            Prefetch::None => {}
            Prefetch::Ahead => {
                for r in 0..R {
                    let w = o.w.wrapping_add(k * o.w_step + r * o.w_stride);
                    for i in 0..PREFETCH_STEPS * 16 * size_of::<W>() / 64 {
                        L::prefetch(w.cast::<u8>().wrapping_add(PREFETCH_DISTANCE + 64 * i));
                    }
                }
            }
            Prefetch::Lines(from, n) => {
                for i in k / PREFETCH_STEPS * n..(k / PREFETCH_STEPS + 1) * n {
                    L::prefetch(from.wrapping_add(64 * i));
                }
            }
        }
        for i in 0..PREFETCH_STEPS {
            step!(k + i);
        }
        k += PREFETCH_STEPS;
    }
    while k < o.k {
        step!(k);
        k += 1;
    }
    *acc = sums;
}

/// `n` things in as few and as even parts of at most `most` as can be: the size
/// of a part.
pub(crate) fn even(n: usize, most: usize) -> usize {
    n.div_ceil(n.div_ceil(most).max(1)).max(1)
}
