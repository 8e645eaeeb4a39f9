//! What one more expert adds to a step of a mixture: least squares with forgetting.
//!
//! ```text
//! x, y       = experts and milliseconds of a step, less the means of steps of its kind
//! t_expert   = (Σ x y + κ t_before) / (Σ x² + κ),   0 ≤ t_expert ≤ most
//! κ          = σ² / (most / 2)²
//! ```
//!
//! Steps of a kind have as many rows and contexts of one octave, so that what rows take does not count as what experts
//! do. `σ²` is the mean square of what the line leaves of `y`, bounded; steps that were held up are left out. `κ`
//! keeps `t_expert` where it was before as long as the measurements say less than their noise does. `most` is the time
//! of a step in which nothing but experts takes any.

use std::collections::BTreeMap;

/// How much of what a step taught still counts a step later.
const KEEP: f64 = 0.998;
/// The least share that a step has of the means of its kind.
const LEAST_SHARE: f64 = 0.05;
/// A step that takes so many times what others of its kind do was held up.
const HELD_UP: f64 = 3.0;
/// What the line leaves of a step's time counts up to this part of the usual time.
const MOST_LEFT: f64 = 0.25;

/// The milliseconds of one more expert, fitted to steps.
#[derive(Clone, Debug, Default)]
pub(super) struct ExpertTime {
    /// Means by kind of steps.
    kinds: BTreeMap<(u32, usize), Means>,
    /// Sums of squares and products.
    xx: f64,
    xy: f64,
    /// Sum of the squares of what the line leaves, and of weights.
    left: f64,
    weight: f64,
    /// The time that was known before there was a step.
    before: f64,
    ms: f64,
}

/// What steps of a kind have touched and taken.
#[derive(Clone, Copy, Debug, Default)]
struct Means {
    n: f64,
    experts: f64,
    ms: f64,
}

impl ExpertTime {
    /// The time of one more expert, if earlier steps have told.
    pub(super) fn known(ms: f64) -> Self {
        ExpertTime {
            before: ms,
            ms,
            ..ExpertTime::default()
        }
    }

    /// The milliseconds of one more expert; 0 as long as nothing says otherwise.
    pub(super) fn ms(&self) -> f64 {
        self.ms
    }

    /// Takes note of a step of a `kind` that touched `experts` in `ms`; an expert takes `most` at most.
    pub(super) fn learn(&mut self, kind: (u32, usize), experts: f64, ms: f64, most: f64) {
        let means = self.kinds.entry(kind).or_default();
        means.n += 1.0;
        if means.n == 1.0 || ms * HELD_UP < means.ms {
            // What there was before was held up.
            *means = Means {
                n: 1.0,
                experts,
                ms,
            };
            return;
        }
        let share = (1.0 / means.n).max(LEAST_SHARE);
        let x = experts - means.experts;
        let line = self.ms * x;
        let left = ms - means.ms - line;
        let is_held_up = left > (HELD_UP - 1.0) * means.ms;
        let left = left.clamp(-MOST_LEFT * means.ms, MOST_LEFT * means.ms);
        let y = line + left;
        means.experts += share * x;
        means.ms += share * y;
        if is_held_up {
            return;
        }
        let weight = 1.0 - share;
        for sum in [&mut self.xx, &mut self.xy, &mut self.left, &mut self.weight] {
            *sum *= KEEP;
        }
        self.xx += weight * x * x;
        self.xy += weight * x * y;
        self.left += weight * left * left;
        self.weight += weight;
        self.fit(most);
    }

    fn fit(&mut self, most: f64) {
        if most <= 0.0 || self.weight <= 0.0 {
            return;
        }
        let doubt = self.left / self.weight / (most / 2.0).powi(2);
        let sum = self.xx + doubt;
        if sum > 0.0 {
            self.ms = ((self.xy + doubt * self.before) / sum).clamp(0.0, most);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers from -1 to 1 that look random.
    fn noise(i: u64) -> f64 {
        let mut x = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x ^= x >> 29;
        x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x ^= x >> 32;
        (x % 2001) as f64 / 1000.0 - 1.0
    }

    /// What is fitted to `n` steps of 1 to 8 rows that take 5 ms, 0.5 a row and `expert` an expert.
    fn fitted(n: u64, expert: f64, held_up: impl Fn(u64) -> f64) -> ExpertTime {
        let mut time = ExpertTime::default();
        for i in 0..n {
            let rows = 1 + (i * 5 % 8) as usize;
            // More rows touch more experts, and texts differ.
            let experts = (20.0 + 6.0 * rows as f64 + 8.0 * noise(i)).round();
            let ms = 5.0 + 0.5 * rows as f64 + expert * experts;
            time.learn((10, rows), experts, ms + held_up(i), 0.3);
        }
        time
    }

    #[test]
    fn the_time_of_an_expert_is_found_beside_that_of_rows() {
        for expert in [0.0, 0.02, 0.1] {
            let ms = fitted(200, expert, |_| 0.0).ms();
            assert!((ms - expert).abs() < 0.004, "{ms} of {expert}");
        }
    }

    #[test]
    fn steps_that_are_held_up_do_not_change_it_much() {
        let held_up = |i: u64| 0.2 * noise(i + 9999) + if i % 11 == 3 { 300.0 } else { 0.0 };
        for expert in [0.02, 0.1] {
            let ms = fitted(1500, expert, held_up).ms();
            assert!((ms - expert).abs() < 0.003, "{ms} of {expert}");
        }
        // Not even the first one of a kind.
        let first = |i: u64| if i < 8 { 300.0 } else { 0.0 };
        let ms = fitted(200, 0.1, first).ms();
        assert!((ms - 0.1).abs() < 0.003, "{ms}");
    }

    #[test]
    fn it_stays_in_its_bounds_and_where_it_was_without_a_difference() {
        // Twice what a step can take of experts.
        assert_eq!(fitted(200, 0.6, |_| 0.0).ms(), 0.3);
        assert_eq!(fitted(200, -0.1, |_| 0.0).ms(), 0.0);
        let mut time = ExpertTime::known(0.07);
        for i in 0..50 {
            time.learn((10, 4), 30.0, 9.0 + noise(i), 0.3);
        }
        assert!((time.ms() - 0.07).abs() < 1e-9, "{}", time.ms());
    }

    #[test]
    fn a_machine_that_becomes_slower_is_followed() {
        let mut time = fitted(500, 0.05, |_| 0.0);
        for i in 0..3000 {
            let experts = 30.0 + 8.0 * noise(i);
            time.learn((10, 4), experts, 5.0 + 0.15 * experts, 0.3);
        }
        assert!((time.ms() - 0.15).abs() < 0.01, "{}", time.ms());
    }
}
