//! Milliseconds by a count, as measured: of a step by its rows, of a draft by its tokens.
//!
//! Of a mixture of experts, a time of a step belongs to the experts that it touched. What a step takes is
//!
//! ```text
//! t(rows, experts) = t_rows(rows) + experts × t_expert
//! ```
//!
//! where `t_rows` is the curve of times less what their experts take. Without experts it is the times themselves.

use super::costs::BELIEVED;
use std::collections::BTreeMap;

/// Milliseconds by a count, of rows or of tokens.
#[derive(Clone, Debug, Default)]
pub(super) struct Curve(pub(super) BTreeMap<usize, Point>);

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Point {
    /// The usual time.
    pub(super) ms: f64,
    /// The experts that were touched in that time, of a mixture's steps.
    pub(super) experts: Option<f64>,
    /// Times it was measured.
    pub(super) seen: f64,
    /// The round that it was last measured in.
    pub(super) last: u64,
}

/// The experts that a step touches, and the milliseconds of one more; `None` where either is not known.
pub(super) type Touched = Option<(f64, f64)>;

impl Curve {
    /// A curve that starts with no time for a count of 0.
    pub(super) fn from_nothing() -> Self {
        Curve(BTreeMap::from([(0, Point::default())]))
    }

    /// A curve with the times of this one, as if none of them had been measured.
    pub(super) fn as_a_guess(&self) -> Self {
        let guess = |(&count, point): (&usize, &Point)| {
            (
                count,
                Point {
                    seen: 0.0,
                    ..*point
                },
            )
        };
        Curve(self.0.iter().map(guess).collect())
    }

    /// Takes note of a time: the least of the first ones, then nearer to the lesser ones,
    /// since a machine is held up by others now and then, and never helped. A time is compared with the usual one as
    /// if it had touched as many experts.
    pub(super) fn learn(&mut self, count: usize, ms: f64, touched: Touched, round: u64) {
        let point = self.0.entry(count).or_insert(Point {
            ms,
            experts: None,
            seen: 0.0,
            last: round,
        });
        point.seen += 1.0;
        point.last = round;
        if point.seen == 1.0 {
            point.ms = ms;
            point.experts = touched.map(|(experts, _)| experts);
            return;
        }
        point.experts = point.experts.or(touched.map(|(experts, _)| experts));
        let (more, expert_ms) = match (point.experts, touched) {
            (Some(usual), Some((experts, expert_ms))) => (experts - usual, expert_ms),
            _ => (0.0, 0.0),
        };
        let ms = ms - more * expert_ms;
        let (share, ms) = if ms < point.ms {
            let share = if point.seen > BELIEVED { 0.5 } else { 1.0 };
            (share, ms)
        } else if point.seen > BELIEVED {
            (0.1, ms.min(2.0 * point.ms))
        } else {
            return;
        };
        point.ms += share * (ms - point.ms);
        if let Some(experts) = &mut point.experts {
            *experts += share * more;
            point.ms += share * more * expert_ms;
        }
    }

    /// Forgets guesses between `count` and the nearest counts that were measured.
    pub(super) fn drop_guesses_around(&mut self, count: usize) {
        let is_measured = |&(_, point): &(&usize, &Point)| point.seen > 0.0;
        let below = self.0.range(..count).rev().find(is_measured);
        let above = self.0.range(count + 1..).find(is_measured);
        let (low, high) = (below.map(|(&n, _)| n), above.map(|(&n, _)| n));
        self.0.retain(|&n, point| {
            let is_between = match n < count {
                true => low.is_some_and(|low| n > low),
                false => high.is_some_and(|high| n < high),
            };
            point.seen > 0.0 || !is_between
        });
    }

    /// The time of `count`: between the nearest counts on a line; beyond the last one on its line
    /// with half of it, or with the one before it if none is so low, never falling: rows fill tiles, so the
    /// line of two counts that are near can be flat. A single point counts for all, and no point is 0.
    ///
    /// Without `touched`, steps touch as many experts as those that were measured did.
    pub(super) fn at(&self, count: usize, touched: Touched) -> f64 {
        let all_touch = self.0.values().all(|point| point.experts.is_some());
        let Some((experts, expert_ms)) = touched.filter(|_| all_touch) else {
            return self.along(count, 0.0);
        };
        self.along(count, expert_ms) + experts * expert_ms
    }

    /// The time of `count` if it was measured often enough to be believed, or lies between counts that were:
    /// then it is on the line between these, whatever was measured once or twice in between.
    pub(super) fn believed(&self, count: usize, touched: Touched) -> Option<f64> {
        let is_believed = |point: &Point| point.seen >= BELIEVED;
        if self.0.get(&count).is_some_and(is_believed) {
            return Some(self.at(count, touched));
        }
        let known = self.0.iter().filter(|(_, point)| is_believed(point));
        let known = Curve(known.map(|(&count, &point)| (count, point)).collect());
        let (first, _) = known.0.first_key_value()?;
        let (last, _) = known.0.last_key_value()?;
        (first..=last)
            .contains(&&count)
            .then(|| known.at(count, touched))
    }

    /// The time of `count` without that of experts, if each takes `expert_ms`.
    fn along(&self, count: usize, expert_ms: f64) -> f64 {
        // No step takes longer than its rows one by one: a time that says so was held up,
        // until it was measured some times.
        let first = self.0.first_key_value().filter(|(x, _)| **x > 0);
        let each = first.map(|(&x, p)| p.ms / x as f64);
        let ms = |x: usize, p: &Point| {
            let cap = each.filter(|_| p.seen < BELIEVED);
            let ms = cap.map_or(p.ms, |each| p.ms.min(each * x as f64));
            match p.experts {
                Some(experts) => (ms - experts * expert_ms).max(0.0),
                None => ms,
            }
        };
        let below = self.0.range(..=count).next_back();
        let above = self.0.range(count..).next();
        let line = |(&x0, p0): (&usize, &Point), (&x1, p1): (&usize, &Point)| {
            let slope = (ms(x1, p1) - ms(x0, p0)) / (x1 - x0) as f64;
            (slope, ms(x0, p0) + slope * (count as f64 - x0 as f64))
        };
        match (below, above) {
            (Some((&x, p)), Some((&y, _))) if x == y => ms(x, p),
            (Some(low), Some(high)) => line(low, high).1,
            (Some((&x, p)), None) => {
                let half = self.0.range(..=x / 2).next_back();
                match half.or_else(|| self.0.range(..x).next_back()) {
                    Some(before) => {
                        let (slope, beyond) = line(before, (&x, p));
                        if slope > 0.0 { beyond } else { ms(x, p) }
                    }
                    None => ms(x, p),
                }
            }
            (None, Some((&x, p))) => ms(x, p),
            (None, None) => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: &[(usize, f64)]) -> Curve {
        let mut curve = Curve::default();
        for &(count, ms) in points {
            (0..4).for_each(|round| curve.learn(count, ms, None, round));
        }
        curve
    }

    #[test]
    fn times_beyond_all_counts_follow_the_line_over_half_of_them() {
        // A tile has 8 rows: 9 to 16 take as long as two.
        let stairs = curve(&[(1, 58.0), (8, 88.0), (11, 148.0), (16, 152.0)]);
        assert_eq!(stairs.at(24, None), 216.0);
        assert_eq!(stairs.at(32, None), 280.0);
        // Nothing is known of half of it.
        assert_eq!(curve(&[(4, 10.0), (6, 12.0)]).at(8, None), 14.0);
    }

    #[test]
    fn times_between_counts_lie_on_a_line_and_never_fall_beyond_them() {
        let rising = curve(&[(1, 10.0), (3, 14.0)]);
        assert_eq!(
            [0, 1, 2, 3, 5].map(|n| rising.at(n, None)),
            [10.0, 10.0, 12.0, 14.0, 18.0]
        );
        let falling = curve(&[(1, 10.0), (3, 6.0)]);
        assert_eq!([2, 5].map(|n| falling.at(n, None)), [8.0, 6.0]);
        assert_eq!(curve(&[(4, 9.0)]).at(99, None), 9.0);
        assert_eq!(Curve::default().at(7, None), 0.0);
    }

    #[test]
    fn counts_between_believed_ones_are_believed_to_lie_on_their_line() {
        let mut curve = curve(&[(1, 10.0), (5, 18.0)]);
        curve.learn(3, 40.0, None, 9);
        curve.learn(7, 40.0, None, 9);
        let believed = [1, 2, 3, 5, 6, 7].map(|n| curve.believed(n, None));
        let [one, two, three, five] = [10.0, 12.0, 14.0, 18.0].map(Some);
        assert_eq!(believed, [one, two, three, five, None, None]);
        (0..2).for_each(|_| curve.learn(3, 30.0, None, 9));
        assert_eq!(curve.believed(3, None), Some(30.0));
        assert_eq!(Curve::default().believed(1, None), None);
    }

    #[test]
    fn a_first_time_that_exceeds_its_rows_one_by_one_is_not_believed() {
        let mut curve = curve(&[(1, 10.0)]);
        curve.learn(2, 400.0, None, 9);
        assert_eq!(curve.at(2, None), 20.0);
        (0..3).for_each(|_| curve.learn(2, 30.0, None, 9));
        assert_eq!(curve.at(2, None), 30.0);
    }

    #[test]
    fn a_step_that_touches_fewer_experts_is_as_much_cheaper_as_they_take() {
        // 2 ms, 1 for each row and 0.5 for each expert; rows of one text touch 4, 6 and 7.
        let time = |rows: f64, experts: f64| 2.0 + rows + 0.5 * experts;
        let mut mixture = Curve::default();
        for (rows, experts) in [(1, 4.0), (2, 6.0), (4, 7.0)] {
            let ms = time(rows as f64, experts);
            (0..4).for_each(|round| mixture.learn(rows, ms, Some((experts, 0.5)), round));
        }
        for (rows, experts) in [(2, 6.0), (2, 4.0), (2, 8.0), (3, 5.0), (4, 7.0), (9, 8.0)] {
            let told = mixture.at(rows, Some((experts, 0.5)));
            assert_eq!(
                told,
                time(rows as f64, experts),
                "{rows} rows, {experts} experts"
            );
        }
        // Nothing is known of its experts: as many as usual.
        assert_eq!(mixture.at(2, None), 7.0);
        // A step that touched more is compared as if it had not, and its experts are not forgotten.
        mixture.learn(2, time(2.0, 8.0), Some((8.0, 0.5)), 9);
        assert_eq!(mixture.at(2, None), 7.0 + 0.1 * 2.0 * 0.5);
        let told = mixture.at(2, Some((6.0, 0.5)));
        assert!((told - 7.0).abs() < 1e-12, "{told}");
    }
}
