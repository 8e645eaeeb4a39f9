//! The elementary functions, once, for every width of vector.
//!
//! A result must have the same bits on every instruction set, so nothing here
//! calls a platform's `libm`: each function is a polynomial over IEEE
//! operations that round correctly (`+ - * /`, square root, fused multiply-add,
//! rounding to an integer). [`Float`] is that set of operations; `f32` has it
//! here, a backend gives it to its vectors.
//!
//! Absolute errors against `f64`: see the tests.

use std::ops::{Add, Div, Mul, Sub};

/// Correctly rounded `f32` arithmetic on one or many lanes.
pub trait Float:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    /// `x` in every lane.
    fn splat(x: f32) -> Self;
    /// `self * by + plus`, rounded once.
    fn mul_add(self, by: Self, plus: Self) -> Self;
    /// The larger; the second operand if either is not a number.
    fn maximum(self, other: Self) -> Self;
    /// The smaller; the second operand if either is not a number.
    fn minimum(self, other: Self) -> Self;
    /// Rounded to the nearest integer, ties to even.
    fn round_even(self) -> Self;
    /// Square root.
    fn root(self) -> Self;
    /// `2^self` for an integer in `-126..=127`, made from bits.
    fn exp2_integer(self) -> Self;
    /// `then` where `self < than`, else `otherwise`.
    fn if_below(self, than: Self, then: Self, otherwise: Self) -> Self;
}

impl Float for f32 {
    #[inline(always)]
    fn splat(x: f32) -> f32 {
        x
    }
    #[inline(always)]
    fn mul_add(self, by: f32, plus: f32) -> f32 {
        f32::mul_add(self, by, plus)
    }
    #[inline(always)]
    fn maximum(self, other: f32) -> f32 {
        if self > other { self } else { other }
    }
    #[inline(always)]
    fn minimum(self, other: f32) -> f32 {
        if self < other { self } else { other }
    }
    #[inline(always)]
    fn round_even(self) -> f32 {
        self.round_ties_even()
    }
    #[inline(always)]
    fn root(self) -> f32 {
        self.sqrt()
    }
    #[inline(always)]
    fn exp2_integer(self) -> f32 {
        f32::from_bits((((self as i32) + 127) as u32) << 23)
    }
    #[inline(always)]
    fn if_below(self, than: f32, then: f32, otherwise: f32) -> f32 {
        if self < than { then } else { otherwise }
    }
}

/// Arguments above this give `exp(EXP_MAX)`: the last whole power of two.
pub const EXP_MAX: f32 = 88.0;
/// Arguments below this give 0: results would be subnormal.
pub const EXP_MIN: f32 = -87.0;

// Cody–Waite split of ln 2: the high part has trailing zeros, so `n * HI` is exact.
const LN2_HI: f32 = 0.693_359_4;
const LN2_LO: f32 = -2.121_944_4e-4;
// The first f32 below π/2's rounding, and what it leaves.
const PI_2_HI: f32 = 1.570_796_4;
const PI_2_LO: f32 = -4.371_139e-8;

/// `e^x`, with 0 below [`EXP_MIN`] and saturation above [`EXP_MAX`].
///
/// `x = n ln 2 + r`, `|r| <= ln 2 / 2`, Taylor to `r^7` (remainder 5e-9).
#[inline(always)]
pub fn exp<F: Float>(x: F) -> F {
    let c = F::splat;
    let y = x.minimum(c(EXP_MAX)).maximum(c(EXP_MIN));
    let n = (y * c(std::f32::consts::LOG2_E)).round_even();
    let r = n.mul_add(c(-LN2_HI), y);
    let r = n.mul_add(c(-LN2_LO), r);
    let p = c(1.0 / 5040.0);
    let p = p.mul_add(r, c(1.0 / 720.0));
    let p = p.mul_add(r, c(1.0 / 120.0));
    let p = p.mul_add(r, c(1.0 / 24.0));
    let p = p.mul_add(r, c(1.0 / 6.0));
    let p = p.mul_add(r, c(0.5));
    let p = p.mul_add(r, c(1.0));
    let p = p.mul_add(r, c(1.0));
    x.if_below(c(EXP_MIN), c(0.0), p * n.exp2_integer())
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid<F: Float>(x: F) -> F {
    F::splat(1.0) / (F::splat(1.0) + exp(F::splat(0.0) - x))
}

/// `x * sigmoid(x)`.
#[inline(always)]
pub fn silu<F: Float>(x: F) -> F {
    x * sigmoid(x)
}

/// `tanh x = 1 - 2 / (e^2x + 1)`; exact to 1e-7 absolutely, not relatively.
#[inline(always)]
pub fn tanh<F: Float>(x: F) -> F {
    let c = F::splat;
    c(1.0) - c(2.0) / (exp(x + x) + c(1.0))
}

/// GELU with the tanh approximation:
/// `x/2 (1 + tanh u) = x sigmoid(2u)`, `u = sqrt(2/π) (x + 0.044715 x³)`.
#[inline(always)]
pub fn gelu_tanh<F: Float>(x: F) -> F {
    // 2 sqrt(2/π)
    let u2 = F::splat(1.595_769) * (x * x * x).mul_add(F::splat(0.044_715), x);
    x * sigmoid(u2)
}

/// GELU by the error function: `x Φ(x)`, `Φ(x) = (1 + erf(x / √2)) / 2`.
///
/// `Φ(-|x|) = t p(t) exp(-x²/2) / 2` with `t = 1 / (1 + 0.3275911 |x| / √2)` and a polynomial of
/// degree 4, by Abramowitz and Stegun, 7.1.26: exact to 8e-8 absolutely.
#[inline(always)]
pub fn gelu<F: Float>(x: F) -> F {
    let c = F::splat;
    let size = x.maximum(c(0.0) - x);
    // 0.3275911 / √2
    let t = c(1.0) / size.mul_add(c(0.231_641_9), c(1.0));
    let p = c(1.061_405_4);
    let p = p.mul_add(t, c(-1.453_152_1));
    let p = p.mul_add(t, c(1.421_413_8));
    let p = p.mul_add(t, c(-0.284_496_72));
    let p = p.mul_add(t, c(0.254_829_6));
    let below = c(0.5) * (p * t) * exp(c(-0.5) * x * x);
    x * x.if_below(c(0.0), below, c(1.0) - below)
}

/// `(sin x, cos x)` for `|x|` up to about 1e6.
///
/// `x = n π/2 + r`, `|r| <= π/4`, Taylor to `r^9` and `r^10`; the first
/// subtraction is exact because both terms are multiples of its last bit.
#[inline(always)]
pub fn sin_cos<F: Float>(x: F) -> (F, F) {
    let c = F::splat;
    let n = (x * c(std::f32::consts::FRAC_2_PI)).round_even();
    let r = n.mul_add(c(-PI_2_HI), x);
    let r = n.mul_add(c(-PI_2_LO), r);
    let r2 = r * r;
    let s = c(1.0 / 362_880.0);
    let s = s.mul_add(r2, c(-1.0 / 5040.0));
    let s = s.mul_add(r2, c(1.0 / 120.0));
    let s = s.mul_add(r2, c(-1.0 / 6.0));
    let s = (s * r2).mul_add(r, r);
    let k = c(-1.0 / 3_628_800.0);
    let k = k.mul_add(r2, c(1.0 / 40_320.0));
    let k = k.mul_add(r2, c(-1.0 / 720.0));
    let k = k.mul_add(r2, c(1.0 / 24.0));
    let k = k.mul_add(r2, c(-0.5));
    let k = k.mul_add(r2, c(1.0));
    // Quadrant 0..4, as a number: n mod 4 without integers.
    let q = n - c(4.0) * (n * c(0.25) - c(0.375)).round_even();
    let q = q.if_below(c(0.0), q + c(4.0), q);
    let q = q.if_below(c(3.5), q, q - c(4.0));
    let minus = |x: F| c(0.0) - x;
    // q = 0: (s, k); 1: (k, -s); 2: (-s, -k); 3: (-k, s)
    let swap = |even: F, odd: F| {
        let low = q.if_below(c(0.5), even, odd);
        let high = q.if_below(c(2.5), minus(even), minus(odd));
        q.if_below(c(1.5), low, high)
    };
    let sin = swap(s, k);
    let cos = {
        let low = q.if_below(c(0.5), k, minus(s));
        let high = q.if_below(c(2.5), minus(k), s);
        q.if_below(c(1.5), low, high)
    };
    (sin, cos)
}

/// `ln x` for positive, normal `x`.
///
/// `x = m 2^e` with `m` in `[√½, √2)`; `ln m = 2 artanh((m-1)/(m+1))`.
#[inline(always)]
pub fn ln(x: f32) -> f32 {
    let bits = x.to_bits();
    // 0x3f3504f3 is √½: subtracting it first puts the mantissa's cut there.
    let shifted = bits.wrapping_sub(0x3f35_04f3);
    let e = (shifted as i32) >> 23;
    let m = f32::from_bits(bits.wrapping_sub((e as u32) << 23));
    let tail = artanh_double((m - 1.0) / (m + 1.0));
    (e as f32).mul_add(LN2_HI, (e as f32).mul_add(LN2_LO, tail))
}

/// `ln(1 + x)` for `x >= 0`, without losing small `x`.
#[inline(always)]
pub fn ln_1p(x: f32) -> f32 {
    if x < 0.4 {
        artanh_double(x / (2.0 + x))
    } else {
        ln(1.0 + x)
    }
}

/// `2 artanh s` for `|s| <= 0.18` (series to `s^11`).
#[inline(always)]
fn artanh_double(s: f32) -> f32 {
    let s2 = s * s;
    let p = 2.0 / 11.0_f32;
    let p = p.mul_add(s2, 2.0 / 9.0);
    let p = p.mul_add(s2, 2.0 / 7.0);
    let p = p.mul_add(s2, 2.0 / 5.0);
    let p = p.mul_add(s2, 2.0 / 3.0);
    (p * s2).mul_add(s, 2.0 * s)
}

/// `ln(1 + e^x)`.
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    let positive = if x > 0.0 { x } else { 0.0 };
    positive + ln_1p(exp(-x.abs()))
}

/// The mass of `exp(0)`.
pub const MASS_ONE: f64 = (1u64 << 40) as f64;

/// This far below the maximum a mass is 0: `e^-29 < 2^-41`.
pub const NO_MASS: f32 = 29.0;

/// `e^d` in units of 2^-40, for `d <= 0`; 0 below [`NO_MASS`] and for what is not
/// a number.
///
/// `d = n ln 2 + r`, `|r| <= ln 2 / 2`, Taylor to `r^7`. Not [`exp`]: fused
/// multiply-add is a call on a plain x86-64 build, and this runs over vocabularies.
#[inline(always)]
pub fn mass(d: f32) -> u64 {
    // Adding it rounds to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0; // 1.5 · 2^23
    const ROUND_MASS: f64 = 4096.0; // units of 2^-40
    // Cody–Waite split of ln 2: the high part has 9 bits, so `n * HI` is exact.
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    let d = if d > -NO_MASS - 1.0 {
        d
    } else {
        -NO_MASS - 1.0
    };
    let shifted = d * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = d - n * LN2_HI - n * LN2_LO;
    let p = 1.0 / 5040.0;
    let p = p * r + 1.0 / 720.0;
    let p = p * r + 1.0 / 120.0;
    let p = p * r + 1.0 / 24.0;
    let p = p * r + 1.0 / 6.0;
    let p = p * r + 0.5;
    let p = p * r + 1.0;
    let p = p * r + 1.0;
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits());
    let e = f32::from_bits(p.to_bits().wrapping_add(n << 23));
    (f64::from(e) + ROUND_MASS).to_bits() - ROUND_MASS.to_bits()
}

/// Adds 16 lanes as a balanced tree: `i` and `i+8`, then `i+4`, `i+2`, `i+1`.
///
/// Every sum over a row keeps 16 partial sums, lane `l` adding elements `l`,
/// `l+16`, … in ascending order, and ends in this tree. It is what a vector
/// unit of any width can do with equal bits.
#[inline(always)]
pub fn sum_tree(lanes: [f32; 16]) -> f32 {
    let mut lanes = lanes;
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worst(
        range: std::ops::Range<f32>,
        f: impl Fn(f32) -> f32,
        exact: impl Fn(f64) -> f64,
        relative: bool,
    ) -> f64 {
        let n = 200_000;
        (0..n)
            .map(|i| range.start + (range.end - range.start) * (i as f32 / n as f32))
            .map(|x| {
                let (got, want) = (f64::from(f(x)), exact(f64::from(x)));
                (got - want).abs() / if relative { want.abs().max(1e-30) } else { 1.0 }
            })
            .fold(0.0, f64::max)
    }

    /// The probability of less than `x`, by its series: `½ + φ(x) (x + x³/3 + x⁵/15 + …)`.
    fn normal_probability(x: f64) -> f64 {
        let (mut term, mut sum) = (x, x);
        for n in 1..200 {
            term *= x * x / f64::from(2 * n + 1);
            sum += term;
        }
        0.5 + sum * (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt()
    }

    #[test]
    fn functions_are_as_exact_as_stated() {
        assert!(worst(-86.9..87.9, exp, f64::exp, true) < 2.5e-7);
        assert!(worst(-100.0..100.0, sigmoid, |x| 1.0 / (1.0 + (-x).exp()), false) < 1.2e-7);
        assert!(worst(-20.0..20.0, tanh, f64::tanh, false) < 1.8e-7);
        assert!(worst(-30.0..30.0, |x| sin_cos(x).0, f64::sin, false) < 1.2e-7);
        assert!(worst(-30.0..30.0, |x| sin_cos(x).1, f64::cos, false) < 1.2e-7);
        assert!(worst(0.0..262_144.0, |x| sin_cos(x).0, f64::sin, false) < 1.2e-7);
        assert!(worst(0.0..262_144.0, |x| sin_cos(x).1, f64::cos, false) < 1.2e-7);
        assert!(worst(1e-6..100.0, ln, f64::ln, false) < 4e-7);
        assert!(worst(-30.0..30.0, softplus, |x| x.exp().ln_1p(), true) < 5e-7);
        let gelu = |x: f64| {
            0.5 * x
                * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        };
        assert!(worst(-8.0..8.0, gelu_tanh, gelu, false) < 1e-6);
        assert!(worst(-8.0..8.0, super::gelu, |x| x * normal_probability(x), false) < 1e-6);
    }

    #[test]
    fn exp_ends_at_zero_and_never_overflows() {
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-87.1f32), 0.0);
        assert_eq!(exp(0.0f32), 1.0);
        assert!(exp(f32::INFINITY).is_finite());
    }

    #[test]
    fn masses_are_exponentials_in_units_of_2_to_the_minus_40() {
        assert_eq!(mass(0.0), 1 << 40);
        for d in [f32::NAN, f32::NEG_INFINITY, -NO_MASS, -NO_MASS - 1.0, -1e30] {
            assert_eq!(mass(d), 0);
        }
        for i in 0..29_000 {
            let d = i as f32 * -1e-3;
            let exact = f64::from(d).exp() * MASS_ONE;
            assert!((mass(d) as f64 - exact).abs() <= 0.5 + 2e-7 * exact, "{d}");
        }
    }
}
