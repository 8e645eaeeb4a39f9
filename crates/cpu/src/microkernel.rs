//! The inner loop of plain products and of attention: a block of sums in registers.
//!
//! ```text
//!              x[m][k]                 w[k][r]: 16 lanes
//!                 │ splat                 │ load
//!                 ▼                       ▼
//!   acc[m][r] ← fma(w[k][r], x[m][k], acc[m][r])      for ascending k
//! ```
//!
//! Every output has an accumulator of its own, so a block's shape (`M` rows by `R` vectors)
//! changes speed and never bits. [`microkernels!`] lists the shapes that are compiled.

use crate::arch::{Element, Lanes};
use crate::tuning::WeightReads;

/// Bytes between the vector being read and the cache line that is prefetched, where that is not
/// tuned.
pub(crate) const PREFETCH_DISTANCE: usize = WeightReads::DEFAULT.distance;

/// Columns between two prefetches of [`accumulate`].
pub(crate) const PREFETCH_STEPS: usize = 8;

/// Calls the microkernel for a block of some rows and vectors.
///
/// The table names the shapes, `(rows, vectors)`, that exist for each kind of
/// [`Registers`](crate::arch::Registers); scalar code has `(1, 1)` only. `M` and `R` are
/// constants in the call, so each shape is compiled as straight code. Kernels of one vector
/// leave it out: the table then lists rows.
///
/// ```text
/// microkernels! {
///     (L::REGISTERS, m, r) => |M, R| self.block::<L, M, R>(row, panel);
///     Wide: (4, 2) (2, 2) (1, 2) (4, 1) (2, 1) (1, 1);
///     Narrow: (2, 1) (1, 1);
/// }
/// ```
///
/// Panics at a shape that the table lacks.
macro_rules! microkernels {
    (
        ($registers:expr, $rows:expr, $vectors:expr) => |$M:ident, $R:ident| $call:expr;
        Wide: $(($wide_rows:literal, $wide_vectors:literal))*;
        Narrow: $(($narrow_rows:literal, $narrow_vectors:literal))*;
    ) => {
        // What other registers would have is not even compiled.
        if const { matches!($registers, $crate::arch::Registers::Wide) } {
            match ($rows, $vectors) {
                $(($wide_rows, $wide_vectors) => {
                    const $M: usize = $wide_rows;
                    const $R: usize = $wide_vectors;
                    $call
                })*
                _ => unreachable!("no such block for wide registers"),
            }
        } else if const { matches!($registers, $crate::arch::Registers::Narrow) } {
            match ($rows, $vectors) {
                $(($narrow_rows, $narrow_vectors) => {
                    const $M: usize = $narrow_rows;
                    const $R: usize = $narrow_vectors;
                    $call
                })*
                _ => unreachable!("no such block for narrow registers"),
            }
        } else {
            const $M: usize = 1;
            const $R: usize = 1;
            $call
        }
    };
    (
        ($registers:expr, $rows:expr) => |$M:ident| $call:expr;
        Wide: $($wide_rows:literal)*;
        Narrow: $($narrow_rows:literal)*;
    ) => {
        if const { matches!($registers, $crate::arch::Registers::Wide) } {
            match $rows {
                $($wide_rows => {
                    const $M: usize = $wide_rows;
                    $call
                })*
                _ => unreachable!("no such block for wide registers"),
            }
        } else if const { matches!($registers, $crate::arch::Registers::Narrow) } {
            match $rows {
                $($narrow_rows => {
                    const $M: usize = $narrow_rows;
                    $call
                })*
                _ => unreachable!("no such block for narrow registers"),
            }
        } else {
            const $M: usize = 1;
            $call
        }
    };
}
pub(crate) use microkernels;

/// The operands of a block of sums, with strides in elements.
#[derive(Clone, Copy)]
pub(crate) struct Operands<W> {
    /// Row `m`'s value of column `k` is at `m * x_stride + k`.
    pub(crate) x: *const f32,
    pub(crate) x_stride: usize,
    /// The 16 lanes of column `k` and vector `r` start at `k * w_step + r * w_stride`.
    pub(crate) w: *const W,
    pub(crate) w_step: usize,
    pub(crate) w_stride: usize,
    /// Columns.
    pub(crate) k: usize,
    /// What to prefetch meanwhile.
    pub(crate) prefetch: Prefetch,
}

/// What a block prefetches, every [`PREFETCH_STEPS`] columns.
#[derive(Clone, Copy)]
pub(crate) enum Prefetch {
    /// Nothing.
    None,
    /// Prefetches weights so many bytes ahead; they must be contiguous (`w_step` 16).
    Ahead(usize),
    /// Prefetches so many cache lines each time, from this address on.
    Lines(*const u8, usize),
}

impl Prefetch {
    /// Prefetches the lines of step `step`, which is one of [`PREFETCH_STEPS`] columns, where lines are
    /// spread over steps.
    #[inline(always)]
    pub(crate) fn step<L: Lanes>(self, step: usize) {
        if let Prefetch::Lines(from, n) = self {
            for i in step * n..(step + 1) * n {
                L::prefetch(from.wrapping_add(64 * i));
            }
        }
    }
}

/// Adds the products of all columns to `acc`.
///
/// # Safety
///
/// `M` rows of `x` and `R` vectors of `w` are readable for all of the operands' columns.
#[inline(always)]
pub(crate) unsafe fn accumulate<L: Lanes, W: Element, const M: usize, const R: usize>(
    acc: &mut [[L; R]; M],
    o: Operands<W>,
) {
    let mut sums = *acc;
    let mut k = 0;
    macro_rules! step {
        ($k:expr) => {{
            // SAFETY: column `k < o.k` of readable operands.
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
        match o.prefetch {
            Prefetch::None => {}
            Prefetch::Ahead(distance) => {
                for r in 0..R {
                    let w = o.w.wrapping_add(k * o.w_step + r * o.w_stride);
                    for i in 0..PREFETCH_STEPS * 16 * size_of::<W>() / 64 {
                        L::prefetch(w.cast::<u8>().wrapping_add(distance + 64 * i));
                    }
                }
            }
            Prefetch::Lines(..) => o.prefetch.step::<L>(k / PREFETCH_STEPS),
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

/// The size of the parts when `n` things are cut into the fewest parts of at most `most` things,
/// as evenly as possible.
pub(crate) fn even(n: usize, most: usize) -> usize {
    n.div_ceil(n.div_ceil(most).max(1)).max(1)
}
