//! The rule of start-up trials: which of several ways to compute the same bits is taken on this machine.
//!
//! Speeds of shared machines change from one moment to the next. So choices are timed in turns, round after round, and
//! the first one, the default, is kept unless another is clearly faster.

/// How much faster than the first choice another has to be in the median of rounds: 3 %.
pub const WORTH: f64 = 0.03;

/// Which choice is clearly the fastest, given the speed of each choice in each round, and the median speed of each.
///
/// A choice is clearly faster than the first one if it was so in three quarters of the rounds, and by more than
/// [`WORTH`] in the median. If none is, the first one is the answer.
///
/// ```
/// let default = vec![0.80, 0.82, 0.78, 0.80];
/// let other = vec![0.90, 0.91, 0.77, 0.88];
/// let (chosen, medians) = backend::trial::clear_choice(&[default, other]);
/// assert_eq!(chosen, 1);
/// assert_eq!(medians, [0.80, 0.90]);
/// ```
pub fn clear_choice(speeds: &[Vec<f64>]) -> (usize, Vec<f64>) {
    let median = |all: &Vec<f64>| quartiles(&mut all.clone())[1];
    let medians: Vec<f64> = speeds.iter().map(median).collect();
    let is_clear = |i: &usize| {
        let rounds = speeds[*i].iter().zip(&speeds[0]);
        let faster = rounds.filter(|(other, first)| other > first).count();
        4 * faster >= 3 * speeds[0].len() && medians[*i] > (1.0 + WORTH) * medians[0]
    };
    let clear = (1..speeds.len()).filter(is_clear);
    let chosen = clear.max_by(|&a, &b| medians[a].total_cmp(&medians[b]));
    (chosen.unwrap_or(0), medians)
}

/// The values that a quarter, half and three quarters of `values` are not above; zeros of none.
pub fn quartiles(values: &mut [f64]) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|n| values.get(values.len() * n / 4).copied().unwrap_or(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_taken_only_where_it_is_clearly_faster() {
        let first = vec![0.80, 0.82, 0.78, 0.80];
        let by = |factor: f64| first.iter().map(|speed| speed * factor).collect::<Vec<_>>();
        let chosen = |others: &[Vec<f64>]| {
            let all: Vec<_> = std::iter::once(first.clone())
                .chain(others.to_vec())
                .collect();
            clear_choice(&all).0
        };
        assert_eq!(chosen(&[by(1.02), by(0.9)]), 0, "not by enough");
        assert_eq!(chosen(&[by(1.05), by(1.1)]), 2, "the fastest");
        assert_eq!(
            chosen(&[vec![0.7, 0.7, 0.95, 0.95]]),
            0,
            "not in most rounds"
        );
        let (_, medians) = clear_choice(&[first.clone(), by(2.0)]);
        assert_eq!(medians, [0.80, 1.60]);
        assert_eq!(quartiles(&mut [4.0, 1.0, 3.0, 2.0]), [2.0, 3.0, 4.0]);
        assert_eq!(quartiles(&mut []), [0.0; 3]);
    }
}
