//! Choosing scales and codes: least weighted squares over a few candidates.
//!
//! A group's scale is the best of the least-squares scales for a handful of ways
//! to cut off its ends; then the scales of a block are rounded to the integers
//! that the format has for them, and codes are chosen for what came out. An error
//! counts more where the value is large: `w = rms + |x|`, the weight of GGUF's own
//! tools.

use crate::block::{Pieces, to_half_scale};
use crate::{Codes, Zero};

/// The range of an integer sub-scale.
pub(super) type Range = (i8, i8);
pub(super) const SIX_BITS: Range = (-32, 31);
pub(super) const EIGHT_BITS: Range = (-128, 127);

/// Cuts tried on a group's ends, in tenths of a step.
const CUTS: i32 = 9;
/// Below this, a group is all zeros: its scale would not be a normal half.
const NOTHING: f32 = 1e-15;

/// The index of the level nearest to `x`, the first of two.
fn nearest(levels: &[i8], x: f32) -> u8 {
    let (first, last) = (i32::from(levels[0]), levels.len() as i32 - 1);
    // Levels one apart need no search.
    if i32::from(levels[levels.len() - 1]) - first == last {
        return (x.round_ties_even() as i32)
            .saturating_sub(first)
            .clamp(0, last) as u8;
    }
    let mut best = (f32::INFINITY, 0);
    for (code, &level) in levels.iter().enumerate() {
        let error = (f32::from(level) - x).abs();
        if error < best.0 {
            best = (error, code as u8);
        }
    }
    best.1
}

/// The importance of each value's error.
fn weight(x: &[f32]) -> impl Fn(f32) -> f32 + use<> {
    let rms = (x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32).sqrt();
    move |x| rms + x.abs()
}

/// The scale of `x ≈ scale · level`, of either sign.
fn scale_of(levels: &[i8], x: &[f32]) -> f32 {
    let far = x
        .iter()
        .fold(0.0f32, |far, &x| if x.abs() > far.abs() { x } else { far });
    if far.abs() < NOTHING {
        return 0.0;
    }
    let weight = weight(x);
    let end = f32::from(levels[0]);
    let step = f32::from(levels[1]) - end;
    let mut best = (0.0, far / end);
    for cut in -CUTS..=CUTS {
        let inverse = (end + 0.1 * cut as f32 * step) / far;
        let (mut xl, mut ll) = (0.0, 0.0);
        for &x in x {
            let level = f32::from(levels[usize::from(nearest(levels, x * inverse))]);
            xl += weight(x) * x * level;
            ll += weight(x) * level * level;
        }
        // The squared error is Σwx² − xl²/ll.
        if ll > 0.0 && xl * xl / ll > best.0 {
            best = (xl * xl / ll, xl / ll);
        }
    }
    best.1
}

/// Scale and bias of `x ≈ scale · code + bias` with codes up to `top`, `scale ≥ 0`
/// and `bias ≤ 0`.
fn range_of(top: f32, x: &[f32]) -> (f32, f32) {
    let low = x.iter().copied().fold(0.0, f32::min);
    let high = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if high - low < NOTHING {
        return (0.0, low);
    }
    let weight = weight(x);
    let mut best = (f32::INFINITY, (high - low) / top, low);
    for cut in -2 * CUTS..=CUTS {
        let inverse = (top + 0.1 * cut as f32) / (high - low);
        let code = |x: f32| ((x - low) * inverse).round_ties_even().clamp(0.0, top);
        let [mut w, mut wx, mut wc, mut wxc, mut wcc] = [0.0f32; 5];
        for &x in x {
            let (weight, code) = (weight(x), code(x));
            w += weight;
            wx += weight * x;
            wc += weight * code;
            wxc += weight * x * code;
            wcc += weight * code * code;
        }
        let determinant = w * wcc - wc * wc;
        // All codes equal, but for rounding: no line goes through one point.
        if determinant <= 1e-5 * w * wcc {
            continue;
        }
        let mut scale = (w * wxc - wx * wc) / determinant;
        let mut bias = (wcc * wx - wc * wxc) / determinant;
        if bias > 0.0 {
            (scale, bias) = (wxc / wcc, 0.0);
        }
        let error = |&x: &f32| {
            let error = scale * code(x) + bias - x;
            weight(x) * error * error
        };
        let error = x.iter().map(error).sum::<f32>();
        if error < best.0 {
            best = (error, scale, bias);
        }
    }
    (best.1, best.2)
}

/// The best codes for the scales and biases that `p` has.
pub(super) fn choose(view: &Codes, x: &[f32], p: &mut Pieces) {
    let top = ((1u32 << view.bits) - 1) as f32;
    for (g, x) in x.chunks_exact(view.group).enumerate() {
        let (scale, bias) = p.factors(view, g);
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        for (code, &x) in p.codes[g * view.group..].iter_mut().zip(x) {
            *code = match view.zero {
                Zero::Bias => ((x - bias) * inverse).round_ties_even().clamp(0.0, top) as u8,
                Zero::Levels(levels) => nearest(levels, x * inverse),
            };
        }
    }
}

/// One scale a block.
pub(super) fn fit_levels(view: &Codes, x: &[f32], p: &mut Pieces) {
    let Zero::Levels(levels) = view.zero else {
        unreachable!("a format with levels");
    };
    p.d[0] = to_half_scale(scale_of(levels, x));
    choose(view, x, p);
}

/// Signed sub-scales: the scale farthest from zero takes the end of the range.
pub(super) fn fit_k_levels(view: &Codes, (low, high): Range, x: &[f32], p: &mut Pieces) {
    let Zero::Levels(levels) = view.zero else {
        unreachable!("a format with levels");
    };
    let mut scales = [0.0f32; 16];
    let groups = x.chunks_exact(view.group);
    let n = groups.len();
    scales
        .iter_mut()
        .zip(groups)
        .for_each(|(s, x)| *s = scale_of(levels, x));
    let far = scales
        .iter()
        .fold(0.0f32, |far, &s| if s.abs() > far.abs() { s } else { far });
    p.d[0] = to_half_scale(far / f32::from(low));
    let inverse = if p.d[0] == 0.0 { 0.0 } else { 1.0 / p.d[0] };
    for (sub, scale) in p.scales.iter_mut().zip(&scales[..n]) {
        *sub = (scale * inverse)
            .round_ties_even()
            .clamp(low.into(), high.into()) as i8;
    }
    choose(view, x, p);
}

/// Sub-scales and sub-mins from 0 to `top`.
pub(super) fn fit_k_bias(view: &Codes, top: i8, x: &[f32], p: &mut Pieces) {
    let codes = ((1u32 << view.bits) - 1) as f32;
    let (mut scales, mut biases) = ([0.0f32; 16], [0.0f32; 16]);
    let groups = x.chunks_exact(view.group);
    let n = groups.len();
    for (g, x) in groups.enumerate() {
        (scales[g], biases[g]) = range_of(codes, x);
    }
    let top = f32::from(top);
    let share = |values: &[f32], end: f32, subs: &mut [i8]| {
        let d = to_half_scale(end / top);
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        for (sub, value) in subs.iter_mut().zip(values) {
            *sub = (value * inverse).round_ties_even().clamp(0.0, top) as i8;
        }
        d
    };
    p.d[0] = share(
        &scales[..n],
        scales.iter().copied().fold(0.0, f32::max),
        &mut p.scales,
    );
    p.m[0] = share(
        &biases[..n],
        biases.iter().copied().fold(0.0, f32::min),
        &mut p.mins,
    );
    choose(view, x, p);
}
