//! Another number of samples a second, by band-limited interpolation.
//!
//! ```text
//! y[n] = Σ_k x[k] h(n R / S - k)        R samples a second become S
//! h(t) = c sinc(c t) w(t / T)           c = C min(1, S / R), T = W / min(1, S / R)
//! w(u) = I0(β √(1 - u²)) / I0(β)        Kaiser's window
//! ```
//!
//! Where `R / S` is a ratio of small numbers, as many sets of weights are enough as its divisor is
//! large. Where it is not, sums with the two nearest of evenly spaced sets are interpolated, which is off
//! by 3e-7 at most, `(π / 2048)² / 8`. Each set has the sum 1 but for its rounding to f32; sums are f64.

use std::f64::consts::PI;

/// The frequency of half the amplitude, of half the lower rate: between what passes and what does not.
const C: f64 = 0.956_5;
/// Samples of the lower rate from the middle of the kernel to its end.
const W: f64 = 92.0;
/// The shape of the window: an attenuation of 120 dB.
const BETA: f64 = 12.265;

/// Sets of weights, at most, for a kernel that is not stretched.
const SETS: usize = 2048;
/// Samples that are made between two questions whether to go on.
const STEP: usize = 1024;

/// Samples `x` at another rate: `rates` are the one that they have and the one that they get. Asks
/// `go_on` now and then, and ends with its error.
pub(super) fn resample<E>(
    x: &[f32],
    rates: [u32; 2],
    mut go_on: impl FnMut() -> Result<(), E>,
) -> Result<Vec<f32>, E> {
    let divisor = gcd(rates[0], rates[1]);
    let [from, to] = rates.map(|rate| (rate / divisor) as usize);
    let mut bank = Bank::new(from, to);
    // To the nearest.
    let n = ((2 * x.len() * to + from) / (2 * from)).max(1);
    let mut out = Vec::with_capacity(n);
    for first in (0..n).step_by(STEP) {
        go_on()?;
        let samples = first..n.min(first + STEP);
        out.extend(samples.map(|i| bank.sample(x, i * from / to, i * from % to)));
    }
    Ok(out)
}

/// Sets of weights, as they are needed.
struct Bank {
    kernel: Kernel,
    /// Places between two input samples at which an output sample may lie.
    places: usize,
    /// Weights for an output sample that is a multiple of `1 / (sets.len() - 1)` behind an input sample.
    sets: Vec<Box<[f32]>>,
}

impl Bank {
    /// For `from` input samples to `to` output samples.
    fn new(from: usize, to: usize) -> Bank {
        let ratio = from as f64 / to as f64;
        let sets = match to <= SETS {
            true => to,
            false => (SETS as f64 / ratio.max(1.0)).ceil() as usize,
        };
        Bank {
            kernel: Kernel::new(ratio),
            places: to,
            sets: vec![Box::default(); sets + 1],
        }
    }

    /// The output sample that is `place` places behind input sample `at`.
    fn sample(&mut self, x: &[f32], at: usize, place: usize) -> f32 {
        let sets = self.sets.len() - 1;
        let (set, rest) = (place * sets / self.places, place * sets % self.places);
        let before = self.sum(x, at, set);
        if rest == 0 {
            return before as f32;
        }
        let share = rest as f64 / self.places as f64;
        (before + share * (self.sum(x, at, set + 1) - before)) as f32
    }

    fn sum(&mut self, x: &[f32], at: usize, set: usize) -> f64 {
        let after = set as f64 / (self.sets.len() - 1) as f64;
        let weights = &mut self.sets[set];
        if weights.is_empty() {
            *weights = self.kernel.weights(after);
        }
        self.kernel.sum(x, at, weights)
    }
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
    fn sum(&self, x: &[f32], at: usize, weights: &[f32]) -> f64 {
        let first = (at + 1).saturating_sub(self.reach);
        let skipped = (first + self.reach) - (at + 1);
        let x = x.get(first..).unwrap_or(&[]);
        let products = weights[skipped..].iter().zip(x);
        products.fold(0.0, |sum, (w, x)| sum + f64::from(*w) * f64::from(*x))
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
