//! Sums over the tokens of a row that have the same bits in any order: of how much the row's
//! largest logit exceeds each.

use crate::math::{MASS_ONE, ln, mass};

/// The standard deviation of logits.
///
/// Their distances from the largest are rounded down to multiples of 2^-12, and count as 2^12
/// at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deviation {
    n: u64,
    sum: u64,
    squares: u128,
}

impl Deviation {
    /// The deviation of the numbers above -inf among `logits`, `top` being the largest of the row.
    pub fn of(top: f32, logits: impl Iterator<Item = f32>) -> Self {
        let mut deviation = Deviation::default();
        deviation.extend(top, logits);
        deviation
    }

    /// The deviation of `n` logits, whose distances from the largest add up to `sum` and their squares
    /// to `squares`, in those units.
    pub fn of_sums(n: u64, sum: u64, squares: u128) -> Self {
        Deviation { n, sum, squares }
    }

    /// How many numbers above -inf there are.
    pub fn n(&self) -> u64 {
        self.n
    }

    /// Adds `logits`, of the same row.
    pub fn extend(&mut self, top: f32, logits: impl Iterator<Item = f32>) {
        for logit in logits {
            let counts = u64::from(logit > f32::NEG_INFINITY);
            let distance = counts * u64::from((((top - logit) * 4096.0) as u32).min(1 << 24));
            self.n += counts;
            self.sum += distance;
            self.squares += u128::from(distance * distance);
        }
    }

    /// The standard deviation.
    pub fn sigma(&self) -> f64 {
        let variance = u128::from(self.n) * self.squares - u128::from(self.sum).pow(2);
        (variance as f64).sqrt() / (self.n as f64 * 4096.0)
    }
}

/// How surprising the tokens of a distribution are.
///
/// A token's mass times its distance from the likeliest is rounded down to a multiple of 2^-40,
/// the distance itself to one of 2^-20.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Surprise {
    mass: u64,
    distance: u64,
}

impl Surprise {
    /// The surprise of tokens of this `mass`, each times its distance adding up to `distance`, in those
    /// units.
    pub fn of_sums(mass: u64, distance: u64) -> Self {
        Surprise { mass, distance }
    }

    /// Adds tokens of the scaled logits `z`, the largest of all being `top`.
    pub fn extend(&mut self, top: f32, z: impl Iterator<Item = f32>) {
        for z in z {
            let mass = mass(z - top);
            // Never more than 2^60: `d e^-d` is at most 1/e.
            self.distance += (mass * u64::from(((top - z) * 1_048_576.0) as u32)) >> 20;
            self.mass += mass;
        }
    }

    /// The mass of all tokens.
    pub fn mass(&self) -> u64 {
        self.mass
    }

    /// How much likelier, as a logarithm, the likeliest token is than a token that is chosen, in
    /// the mean.
    pub fn mean(&self) -> f32 {
        (self.distance as f64 / self.mass as f64) as f32
    }

    /// The entropy, in units of e.
    pub fn entropy(&self) -> f32 {
        ln((self.mass as f64 / MASS_ONE) as f32) + self.mean()
    }
}

/// What some ways of sampling ask of a whole row of logits, as they are. Of a row whose largest is not
/// finite, the sums say nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moments {
    /// The largest logit; -inf if there is none above it, +inf if one is NaN.
    pub largest: f32,
    /// The deviation of the logits above -inf.
    pub deviation: Deviation,
    /// How surprising the tokens are.
    pub surprise: Surprise,
}

impl Moments {
    /// The moments of `row`.
    ///
    /// ```
    /// let moments = backend::moments::Moments::of(&[1.0, 3.0, f32::NEG_INFINITY]);
    /// assert_eq!((moments.largest, moments.deviation.n()), (3.0, 2));
    /// assert_eq!(moments.deviation.sigma(), 1.0);
    /// ```
    pub fn of(row: &[f32]) -> Self {
        let larger = |a: f32, b: f32| if b.is_nan() { f32::INFINITY } else { a.max(b) };
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, larger);
        let mut moments = Moments {
            largest,
            deviation: Deviation::default(),
            surprise: Surprise::default(),
        };
        if largest.is_finite() {
            moments.deviation = Deviation::of(largest, row.iter().copied());
            moments.surprise.extend(largest, row.iter().copied());
        }
        moments
    }
}
