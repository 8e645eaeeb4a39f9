//! What rounds cost: milliseconds by rows, streams, draft length and context, as measured.

use super::{Guesser, Plan};
use std::collections::BTreeMap;
use std::time::Duration;

/// The first octave of context; shorter contexts share its times.
const FIRST_OCTAVE: u32 = 10;
/// Rounds after which the time of a plain step is measured again.
const STALE: u64 = 1024;
/// Times seen after which a time is believed, however odd.
const BELIEVED: f64 = 3.0;

/// What one round took. Rounds with prompt rows are not comparable and are left
/// out.
#[derive(Clone, Copy, Debug)]
pub struct RoundCost {
    /// Streams in the round.
    pub streams: usize,
    /// Rows the target ran.
    pub rows: usize,
    /// Tokens of the longest stream.
    pub context: usize,
    /// The drafts after the rows.
    pub drafts: Longest,
    /// Time of the target, choosing included.
    pub verify: Duration,
    /// Time of the drafter.
    pub draft: Duration,
}

/// The longest drafts of a round, by who guesses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Longest {
    /// Tokens that the head guesses.
    pub guessed: usize,
    /// Tokens that are copied.
    pub copied: usize,
}

impl Longest {
    /// Of these drafts.
    pub fn of(plans: impl IntoIterator<Item = Plan>) -> Self {
        plans.into_iter().fold(Longest::default(), |longest, plan| {
            let Plan { guesser, tokens } = plan;
            match guesser {
                Guesser::Head => Longest {
                    guessed: longest.guessed.max(tokens),
                    ..longest
                },
                Guesser::Ngram => Longest {
                    copied: longest.copied.max(tokens),
                    ..longest
                },
            }
        })
    }
}

/// What rounds have taken, and from it what the next ones will.
#[derive(Clone, Debug, Default)]
pub struct Costs {
    /// The target's time by octave of context, then rows.
    verify: BTreeMap<u32, Curve>,
    /// The drafter's time by octave of context and streams, then by the tokens that the head guesses.
    draft: BTreeMap<(u32, usize), Curve>,
    /// The drafter's time in rounds whose drafts are all copies, by octave of context and streams, then by
    /// the tokens of the longest copy: the head reads what copies have written.
    reading: BTreeMap<(u32, usize), Curve>,
    rounds: u64,
}

impl Costs {
    /// Takes note of what a round took.
    pub fn learn(&mut self, cost: &RoundCost) {
        self.rounds += 1;
        let octave = octave(cost.context);
        let ms = |d: Duration| d.as_secs_f64() * 1e3;
        self.verify
            .entry(octave)
            .or_default()
            .learn(cost.rows, ms(cost.verify), self.rounds);
        let (curves, count) = match cost.drafts {
            Longest { guessed: 0, copied } if copied > 0 => (&mut self.reading, copied),
            Longest { guessed, .. } => (&mut self.draft, guessed),
        };
        curves
            .entry((octave, cost.streams))
            .or_insert_with(Curve::from_nothing)
            .learn(count, ms(cost.draft), self.rounds);
    }

    /// Milliseconds of a round of `streams` streams without drafts, if one like it was seen of
    /// late.
    pub fn plain_step(&self, context: usize, streams: usize) -> Option<f64> {
        let curve = self.verify.get(&octave(context))?;
        let fresh = |p: &Point| p.last + STALE > self.rounds;
        curve.0.range(..=streams).any(|(_, p)| fresh(p)).then(|| {
            let draft = self.draft.get(&(octave(context), streams));
            curve.at(streams) + draft.map_or(0.0, |curve| curve.at(0))
        })
    }

    /// Whether any round of such a context was timed.
    pub fn has(&self, context: usize) -> bool {
        self.verify.contains_key(&octave(context))
    }

    /// Whether rounds of this kind were timed often enough to be believed.
    pub fn is_believed(
        &self,
        context: usize,
        streams: usize,
        rows: usize,
        drafts: Longest,
    ) -> bool {
        let octave = octave(context);
        let (curve, count) = self.drafting((octave, streams), drafts);
        let seen = |curve: Option<&Curve>, count| {
            let point = curve.and_then(|curve| curve.0.get(&count));
            point.is_some_and(|p| p.seen >= BELIEVED)
        };
        seen(self.verify.get(&octave), rows) && seen(curve, count)
    }

    /// Milliseconds that a round of `rows` rows usually takes, with these drafts after it.
    pub fn usual(&self, context: usize, streams: usize, rows: usize, drafts: Longest) -> f64 {
        self.verify_ms(context, rows) + self.draft_ms(context, streams, drafts)
    }

    /// Milliseconds that the target usually takes for `rows` rows; 0 where no round of such a
    /// context was timed.
    pub fn verify_ms(&self, context: usize, rows: usize) -> f64 {
        let curve = self.verify.get(&octave(context));
        curve.map_or(0.0, |curve| curve.at(rows))
    }

    /// Milliseconds that drafting usually takes for such drafts of `streams` streams; 0 where no round
    /// like it was timed.
    pub fn draft_ms(&self, context: usize, streams: usize, drafts: Longest) -> f64 {
        let (curve, count) = self.drafting((octave(context), streams), drafts);
        curve.map_or(0.0, |curve| curve.at(count))
    }

    /// The curve of the drafter's time for such drafts, and where in it they are.
    fn drafting(&self, key: (u32, usize), drafts: Longest) -> (Option<&Curve>, usize) {
        match drafts {
            Longest { guessed: 0, copied } if copied > 0 => (self.reading.get(&key), copied),
            Longest { guessed, .. } => (self.draft.get(&key), guessed),
        }
    }

    /// Milliseconds of a round with these drafts, one for each stream.
    pub fn with_drafts(&self, context: usize, plans: &[Plan]) -> f64 {
        let rows = plans.len() + plans.iter().map(|plan| plan.tokens).sum::<usize>();
        let longest = Longest::of(plans.iter().copied());
        self.usual(context, plans.len(), rows, longest)
    }
}

/// Which contexts share their times: each twice as long as the one before.
fn octave(context: usize) -> u32 {
    (context | 1).ilog2().max(FIRST_OCTAVE)
}

/// Milliseconds by a count, of rows or of tokens.
#[derive(Clone, Debug, Default)]
struct Curve(BTreeMap<usize, Point>);

#[derive(Clone, Copy, Debug)]
struct Point {
    /// The usual time.
    ms: f64,
    /// Times it was measured.
    seen: f64,
    /// The round that it was last measured in.
    last: u64,
}

impl Curve {
    /// A curve that starts with no time for a count of 0.
    fn from_nothing() -> Self {
        let nothing = Point {
            ms: 0.0,
            seen: 0.0,
            last: 0,
        };
        Curve(BTreeMap::from([(0, nothing)]))
    }

    /// Takes note of a time: the least of the first ones, then nearer to the lesser ones,
    /// since a machine is held up by others now and then, and never helped.
    fn learn(&mut self, count: usize, ms: f64, round: u64) {
        let point = self.0.entry(count).or_insert(Point {
            ms,
            seen: 0.0,
            last: round,
        });
        point.seen += 1.0;
        point.last = round;
        point.ms = if point.seen == 1.0 {
            ms
        } else if ms < point.ms {
            let share = if point.seen > BELIEVED { 0.5 } else { 1.0 };
            point.ms + share * (ms - point.ms)
        } else if point.seen > BELIEVED {
            point.ms + 0.1 * (ms.min(2.0 * point.ms) - point.ms)
        } else {
            point.ms
        };
    }

    /// The time of `count`: between the nearest counts on a line; beyond the last one on the
    /// line of the last two, never falling. A single point counts for all, and no point is 0.
    fn at(&self, count: usize) -> f64 {
        // No step takes longer than its rows one by one: a time that says so was held up,
        // until it was measured some times.
        let first = self.0.first_key_value().filter(|(x, _)| **x > 0);
        let each = first.map(|(&x, p)| p.ms / x as f64);
        let ms = |x: usize, p: &Point| {
            let cap = each.filter(|_| p.seen < BELIEVED);
            cap.map_or(p.ms, |each| p.ms.min(each * x as f64))
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
            (Some((&x, p)), None) => match self.0.range(..x).next_back() {
                Some(before) => {
                    let (slope, beyond) = line(before, (&x, p));
                    if slope > 0.0 { beyond } else { ms(x, p) }
                }
                None => ms(x, p),
            },
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
            (0..4).for_each(|round| curve.learn(count, ms, round));
        }
        curve
    }

    #[test]
    fn times_between_counts_lie_on_a_line_and_never_fall_beyond_them() {
        let rising = curve(&[(1, 10.0), (3, 14.0)]);
        assert_eq!(
            [0, 1, 2, 3, 5].map(|n| rising.at(n)),
            [10.0, 10.0, 12.0, 14.0, 18.0]
        );
        let falling = curve(&[(1, 10.0), (3, 6.0)]);
        assert_eq!([2, 5].map(|n| falling.at(n)), [8.0, 6.0]);
        assert_eq!(curve(&[(4, 9.0)]).at(99), 9.0);
        assert_eq!(Curve::default().at(7), 0.0);
    }

    #[test]
    fn a_first_time_that_exceeds_its_rows_one_by_one_is_not_believed() {
        let mut curve = curve(&[(1, 10.0)]);
        curve.learn(2, 400.0, 9);
        assert_eq!(curve.at(2), 20.0);
        (0..3).for_each(|_| curve.learn(2, 30.0, 9));
        assert_eq!(curve.at(2), 30.0);
    }
}
