//! Columns that were rotated before they were coded, 32 at a time.
//!
//! ```text
//! y = R w        R = H/√32 D(s), H the Hadamard butterfly, D(s) fixed signs
//! w = R⁻¹ y      R⁻¹ = D(s) H/√32
//! w · x = y · R x
//! ```
//!
//! So a product needs its activations rotated, once for all rows of a matrix, and no weight
//! rotated back. Every step is a rounded addition, subtraction or multiplication, smallest steps
//! first, so the result has the same bits wherever it is computed.

/// Columns that are rotated together.
pub(crate) const BLOCK: usize = 32;

/// Column `i` changes its sign where bit `i` is set: the signs of
/// `frac(i · 0.618…) ≥ 1/2`.
const SIGNS: u32 = 0x696B_4B4A;

/// `1/√32` as the public encoders have it.
const SCALE: f32 = 0.176_776_69;

/// A format's columns are rotated, in blocks of 32, before they are coded.
///
/// The format's own levels are no integers. [`Zero::Levels`](crate::Zero::Levels) has the nearest
/// ones in steps of [`Rotated::step`]; products of 8-bit activations use those. Decoded rows have
/// the format's own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotated {
    /// What one of an integer level is worth.
    pub step: f32,
    /// The level that each code stands for.
    pub levels: &'static [f32],
}

impl Rotated {
    /// Columns that are rotated together. A group of codes lies within one such block.
    pub const BLOCK: usize = BLOCK;

    /// `step R x`: the activations that integer levels, times their scales, are multiplied with.
    #[inline(always)]
    pub fn turn(&self, x: &mut [f32; BLOCK]) {
        turn(x, self.step * SCALE);
    }

    /// `R⁻¹ y`: the values of a block from its levels, times their scales.
    #[inline(always)]
    pub fn undo(y: &mut [f32; BLOCK]) {
        undo(y);
    }
}

/// `R x`.
pub(crate) fn rotate(x: &mut [f32; BLOCK]) {
    turn(x, SCALE);
}

/// `scale H D(s) x`.
#[inline(always)]
fn turn(x: &mut [f32; BLOCK], scale: f32) {
    for (i, value) in x.iter_mut().enumerate() {
        *value *= sign(i);
    }
    butterfly(x);
    for value in x {
        *value *= scale;
    }
}

/// `D(s) H/√32 y`.
#[inline(always)]
pub(crate) fn undo(y: &mut [f32; BLOCK]) {
    butterfly(y);
    for (i, value) in y.iter_mut().enumerate() {
        *value *= SCALE * sign(i);
    }
}

#[inline(always)]
fn sign(column: usize) -> f32 {
    if SIGNS >> column & 1 == 1 { -1.0 } else { 1.0 }
}

/// Sums and differences of columns 1, 2, 4, 8 and 16 apart.
#[inline(always)]
fn butterfly(x: &mut [f32; BLOCK]) {
    steps::<1>(x);
    steps::<2>(x);
    steps::<4>(x);
    steps::<8>(x);
    steps::<16>(x);
}

#[inline(always)]
fn steps<const STEP: usize>(x: &mut [f32; BLOCK]) {
    let y = *x;
    for (i, value) in x.iter_mut().enumerate() {
        let other = y[i ^ STEP];
        *value = if i & STEP == 0 {
            y[i] + other
        } else {
            other - y[i]
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_and_the_scale_are_what_their_definition_says() {
        for i in 0..BLOCK {
            let part = (i as f64 * 0.618_033_988_7).fract();
            assert_eq!(sign(i) < 0.0, part >= 0.5, "{i}");
        }
        assert_eq!(SCALE, 1.0 / 32f32.sqrt());
    }

    #[test]
    fn rotating_keeps_products_and_undoing_it_gives_the_values_back() {
        let of = |seed: usize| std::array::from_fn(|i| ((i * 37 + seed) % 29) as f32 / 8.0 - 1.5);
        let (w, x): ([f32; BLOCK], [f32; BLOCK]) = (of(3), of(11));
        let (mut y, mut turned) = (w, x);
        rotate(&mut y);
        let rotated = Rotated {
            step: 0.25,
            levels: &[],
        };
        rotated.turn(&mut turned);
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        assert!((dot(&w, &x) - 4.0 * dot(&y, &turned)).abs() < 1e-4);
        Rotated::undo(&mut y);
        assert!(y.iter().zip(&w).all(|(a, b)| (a - b).abs() < 1e-6));
        // The rotation is no identity.
        assert!((turned[0] - 0.25 * x[0]).abs() > 0.01);
    }
}
