//! Sums over the tokens of a row that have the same bits in any order: of how much the row's
//! largest logit exceeds each.

use backend::math::{MASS_ONE, ln, mass};

/// The standard deviation of logits.
///
/// Their distances from the largest are rounded down to multiples of 2^-12, and count as 2^12
/// at most.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Deviation {
    n: u64,
    sum: u64,
    squares: u128,
}

impl Deviation {
    /// The deviation of the numbers above -inf among `logits`, `top` being the largest of the row.
    pub(super) fn of(top: f32, logits: impl Iterator<Item = f32>) -> Self {
        let mut deviation = Deviation::default();
        deviation.extend(top, logits);
        deviation
    }

    /// Adds `logits`, of the same row.
    pub(super) fn extend(&mut self, top: f32, logits: impl Iterator<Item = f32>) {
        for logit in logits {
            let counts = u64::from(logit > f32::NEG_INFINITY);
            let distance = counts * u64::from((((top - logit) * 4096.0) as u32).min(1 << 24));
            self.n += counts;
            self.sum += distance;
            self.squares += u128::from(distance * distance);
        }
    }

    /// The standard deviation.
    pub(super) fn sigma(&self) -> f64 {
        let variance = u128::from(self.n) * self.squares - u128::from(self.sum).pow(2);
        (variance as f64).sqrt() / (self.n as f64 * 4096.0)
    }
}

/// How surprising the tokens of a distribution are.
///
/// A token's mass times its distance from the likeliest is rounded down to a multiple of 2^-40,
/// the distance itself to one of 2^-20.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Surprise {
    mass: u64,
    distance: u64,
}

impl Surprise {
    /// Adds tokens of the scaled logits `z`, the largest of all being `top`.
    pub(super) fn extend(&mut self, top: f32, z: impl Iterator<Item = f32>) {
        for z in z {
            let mass = mass(z - top);
            // Never more than 2^60: `d e^-d` is at most 1/e.
            self.distance += (mass * u64::from(((top - z) * 1_048_576.0) as u32)) >> 20;
            self.mass += mass;
        }
    }

    /// The mass of all tokens.
    pub(super) fn mass(&self) -> u64 {
        self.mass
    }

    /// How much likelier, as a logarithm, the likeliest token is than a token that is chosen, in
    /// the mean.
    pub(super) fn mean(&self) -> f32 {
        (self.distance as f64 / self.mass as f64) as f32
    }

    /// The entropy, in units of e.
    pub(super) fn entropy(&self) -> f32 {
        ln((self.mass as f64 / MASS_ONE) as f32) + self.mean()
    }
}
