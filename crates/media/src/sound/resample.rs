//! Another number of samples a second, by band-limited interpolation.
//!
//! ```text
//! y[n] = Σ_k x[k] h(n R / S - k)        R samples a second become S
//! h(t) = c sinc(c t) w(t / T)           c = C min(1, S / R), T = W / min(1, S / R)
//! w(u) = I0(β √(1 - u²)) / I0(β)        Kaiser's window
//! ```
//!
//! `R / S` is a ratio of small numbers, so that as many sets of weights are enough as its divisor
//! is large. Each set has the sum 1 but for its rounding to f32; sums are f64.

use std::f64::consts::PI;

/// The frequency of half the amplitude, of half the lower rate: between what passes and what does not.
const C: f64 = 0.956_5;
/// Samples of the lower rate from the middle of the kernel to its end.
const W: f64 = 92.0;
/// The shape of the window: an attenuation of 120 dB.
const BETA: f64 = 12.265;

/// Samples `x` of rate `from` at rate `to`.
pub(super) fn resample(x: &[f32], from: u32, to: u32) -> Vec<f32> {
    let divisor = gcd(from, to);
    let (from, to) = ((from / divisor) as usize, (to / divisor) as usize);
    let kernel = Kernel::new(from as f64 / to as f64);
    let mut phases: Vec<Box<[f32]>> = vec![Box::default(); to];
    let sample = |i: usize| {
        let (at, phase) = (i * from / to, i * from % to);
        let weights = &mut phases[phase];
        if weights.is_empty() {
            *weights = kernel.weights(phase as f64 / to as f64);
        }
        kernel.sum(x, at, weights)
    };
    // To the nearest.
    let n = (2 * x.len() * to + from) / (2 * from);
    (0..n.max(1)).map(sample).collect()
}

fn gcd(a: u32, b: u32) -> u32 {
    match b {
        0 => a,
        _ => gcd(b, a % b),
    }
}

struct Kernel {
    /// Half the amplitude, in halves of the input's rate.
    c: f64,
    /// Where the window ends, in samples of the input.
    end: f64,
    /// Samples on each side.
    reach: usize,
    /// `I0(β)`
    top: f64,
}

impl Kernel {
    /// For `ratio` input samples an output sample.
    fn new(ratio: f64) -> Self {
        let end = W * ratio.max(1.0);
        Kernel {
            c: C / ratio.max(1.0),
            end,
            reach: end.ceil() as usize,
            top: bessel(BETA),
        }
    }

    /// Weights of the samples `1 - reach..=reach` from the one before an output that is `after` behind
    /// it.
    fn weights(&self, after: f64) -> Box<[f32]> {
        let reach = self.reach as i64;
        let weights = (1 - reach..=reach).map(|k| self.at(after - k as f64));
        let weights: Vec<f64> = weights.collect();
        let sum: f64 = weights.iter().sum();
        weights.iter().map(|w| (w / sum) as f32).collect()
    }

    /// `h(t)`, but for a factor.
    fn at(&self, t: f64) -> f64 {
        let u = t / self.end;
        if u.abs() >= 1.0 {
            return 0.0;
        }
        let x = PI * self.c * t;
        let sinc = if x == 0.0 { 1.0 } else { x.sin() / x };
        sinc * bessel(BETA * (1.0 - u * u).sqrt()) / self.top
    }

    /// The weighted sum around sample `at` of `x`, which has silence before and after it.
    fn sum(&self, x: &[f32], at: usize, weights: &[f32]) -> f32 {
        let first = (at + 1).saturating_sub(self.reach);
        let skipped = (first + self.reach) - (at + 1);
        let x = x.get(first..).unwrap_or(&[]);
        let products = weights[skipped..].iter().zip(x);
        products.fold(0.0, |sum, (w, x)| sum + f64::from(*w) * f64::from(*x)) as f32
    }
}

/// The modified Bessel function of the first kind and order 0.
fn bessel(x: f64) -> f64 {
    let (mut sum, mut term, quarter) = (1.0, 1.0, x * x / 4.0);
    let mut k = 1.0;
    while term > sum * 1e-17 {
        term *= quarter / (k * k);
        sum += term;
        k += 1.0;
    }
    sum
}
