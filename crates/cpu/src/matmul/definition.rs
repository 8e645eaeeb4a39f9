//! The definition of a product of quantized weights with 8-bit activations, whose bits every
//! kernel has.
//!
//! Weights keep their codes: `w[c] = scale_g code[c] + bias_g`, or
//! `w[c] = scale_g level[code[c]]`, for the columns of group `g`. The activations of
//! a row are quantized in the same groups,
//!
//! ```text
//! d_g = max |x| / 127        q[c] = round(x[c] 127 / max |x|)
//! ```
//!
//! (`d_g` is NaN if an `x` is not finite: codes would hide that a model computes nothing.)
//!
//! and a product is, for ascending groups and from `y = 0`,
//!
//! ```text
//! y = fma(scale_g Σ code[c] q[c], d_g, y)        the sum is an exact integer
//! y = fma(bias_g, d_g Σ q[c], y)                 only where there are biases
//! ```
//!
//! with `level[code[c]]` for `code[c]` where codes stand for levels. Where columns were rotated
//! before they were coded, `x` is rotated first ([`quant::Rotated::turn`]). [`dot`] computes it.
//!
//! No SIMD, no threads, no panels.

use backend::math::Float;
use quant::{Format, Rotated, Row, Zero};
use std::borrow::Cow;

/// Quantizes one group of activations to `q`; returns `d` and `Σ q`.
fn round_group(x: &[f32], q: &mut [i8]) -> (f32, f32) {
    let top = x
        .iter()
        .fold(0.0, |top, &x| Float::maximum(Float::maximum(x, -x), top));
    let inverse = if top > 0.0 { 127.0 / top } else { 0.0 };
    let mut sum = 0.0;
    for (q, x) in q.iter_mut().zip(x) {
        // The bounds matter for infinities only.
        let rounded = Float::minimum((x * inverse).round_even(), 127.0);
        let rounded = Float::maximum(rounded, -127.0);
        *q = rounded as i8;
        sum += rounded;
    }
    // Nothing is added unless a value is not finite.
    let poison = x.iter().fold(0.0, |poison, &x| poison + x * 0.0);
    (top / 127.0 + poison, sum)
}

/// The product of one stored row with activations quantized to 8 bits: what
/// [`crate::Activations::Int8`] computes for every output, in this order.
///
/// `x` has as many values as the row has columns.
///
/// # Panics
///
/// If the format has no codes, or `x` is not as wide as the row.
pub fn dot(format: &Format, row: Row<'_>, x: &[f32]) -> f32 {
    let view = format.codes().expect("a format with codes");
    let groups = x.len() / view.group;
    let mut codes = vec![0; x.len()];
    let (mut scales, mut biases) = (vec![0.0; groups], vec![0.0; groups]);
    format.unpack(row, &mut codes, &mut scales, &mut biases);
    let mut x = Cow::Borrowed(x);
    if let Some(rotated) = view.rotated {
        let blocks = x.to_mut().as_chunks_mut::<{ Rotated::BLOCK }>().0;
        blocks.iter_mut().for_each(|x| rotated.turn(x));
    }
    let mut y = 0.0f32;
    let mut q = vec![0; view.group];
    for (g, x) in x.chunks_exact(view.group).enumerate() {
        let (d, sum) = round_group(x, &mut q);
        let codes = &codes[g * view.group..(g + 1) * view.group];
        let level = |code: u8| match view.zero {
            Zero::Bias => i32::from(code),
            Zero::Levels(levels) => i32::from(levels[usize::from(code)]),
        };
        let products = codes.iter().zip(&q).map(|(&c, &q)| level(c) * i32::from(q));
        let exact: i32 = products.sum();
        y = (exact as f32 * scales[g]).mul_add(d, y);
        if view.zero == Zero::Bias {
            y = biases[g].mul_add(d * sum, y);
        }
    }
    y
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantizing_keeps_the_largest_value_and_its_sign() {
        let mut q = [0; 4];
        assert_eq!(round_group(&[0.0; 4], &mut q), (0.0, 0.0));
        let (d, sum) = round_group(&[0.5, -2.0, 1.0, 0.0], &mut q);
        assert_eq!((q, d, sum), ([32, -127, 64, 0], 2.0 / 127.0, -31.0));
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(round_group(&[0.5, odd, 1.0, 0.0], &mut q).0.is_nan());
        }
    }
}
