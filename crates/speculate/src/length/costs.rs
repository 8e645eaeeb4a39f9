//! What rounds cost: milliseconds by rows, streams, draft length and context, as measured; of a mixture, by the experts
//! that a step touches, too.

use super::curve::{Curve, Point, Touched};
use super::expert_time::ExpertTime;
use super::{Guesser, MAX_HEADS, Plan};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// The first octave of context; shorter contexts share its times.
const FIRST_OCTAVE: u32 = 10;
/// Rounds after which the time of a plain step is measured again.
const STALE: u64 = 1024;
/// Times seen after which a time is believed, however odd.
pub(crate) const BELIEVED: f64 = 3.0;

/// Time of each head of a round, by its number; absent for heads that there are not.
pub type HeadTimes = [Option<Duration>; MAX_HEADS];

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
    /// Experts that the step has touched, each counted in every mixture; `None` where that is not known, and of
    /// models without mixtures.
    pub experts: Option<f64>,
    /// The drafts after the rows.
    pub drafts: Longest,
    /// Time of the target, choosing included.
    pub verify: Duration,
    /// Time of drafting.
    pub draft: Duration,
    /// Time of each head therein. What is left of [`RoundCost::draft`] without the others is counted as the
    /// first head's.
    pub by_head: HeadTimes,
}

impl RoundCost {
    /// Time of each head, by its number.
    fn heads(&self) -> impl Iterator<Item = (usize, Duration)> {
        let others = self.by_head.into_iter().enumerate().skip(1);
        let others = others.filter_map(|(head, time)| Some((head, time?)));
        let of_others: Duration = others.clone().map(|(_, time)| time).sum();
        [(0, self.draft.saturating_sub(of_others))]
            .into_iter()
            .chain(others)
    }
}

/// The longest drafts of a round, by who guesses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Longest {
    /// Tokens that each head guesses.
    pub by_head: [usize; MAX_HEADS],
    /// Tokens that are copied.
    pub copied: usize,
}

impl Longest {
    /// Drafts of `tokens` tokens by `guesser` alone.
    pub fn by(guesser: Guesser, tokens: usize) -> Self {
        Longest::of([Plan { guesser, tokens }])
    }

    /// The longest drafts among `plans`.
    pub fn of(plans: impl IntoIterator<Item = Plan>) -> Self {
        let mut longest = Longest::default();
        for Plan { guesser, tokens } in plans {
            let most = match guesser {
                Guesser::Head(head) => &mut longest.by_head[head],
                Guesser::Ngram => &mut longest.copied,
            };
            *most = tokens.max(*most);
        }
        longest
    }

    /// What `head` does for such drafts, and for how many tokens: it guesses, or reads what others have written.
    fn of_head(&self, head: usize) -> (CostOf, usize) {
        let own = self.by_head[head];
        let of_others = self.guessed().max(self.copied);
        match own == 0 && of_others > 0 {
            true => (CostOf::Reading, of_others),
            false => (CostOf::Draft, own),
        }
    }

    /// Tokens that a head guesses, whichever.
    pub fn guessed(&self) -> usize {
        self.by_head.into_iter().max().unwrap_or(0)
    }
}

/// What a [`CostPoint`] is the time of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CostOf {
    /// A step of the target, by rows.
    Verify,
    /// A draft of a head, by its tokens.
    Draft,
    /// A head's reading of rows whose draft is copied or another head's, by the tokens of that draft.
    Reading,
    /// One more expert of a mixture that a step of the target touches; its count is 1.
    Expert,
}

/// Whether a number is 0; serde hands a reference over.
fn is_zero(n: &usize) -> bool {
    *n == 0
}

/// The usual time of one kind of step or draft, to be kept and [read again](Costs::of_points).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CostPoint {
    /// What took the time.
    pub of: CostOf,
    /// The number of the head that took it, from 0; 0 for a step of the target.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub head: usize,
    /// The binary logarithm of the context, rounded down; shorter contexts than 2,048 tokens share one.
    pub octave: u32,
    /// Streams of the round; 0 for a step of the target, where that takes its time by rows alone.
    pub streams: usize,
    /// Rows of the step, or tokens of the draft.
    pub count: usize,
    /// Experts that the step touched in that time; 0 without mixtures.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub experts: usize,
    /// The usual time, in nanoseconds.
    pub ns: u64,
    /// Times it was measured, 3 at most: after so many it is believed.
    pub seen: u8,
}

impl CostPoint {
    /// The usual time, in milliseconds.
    pub fn ms(&self) -> f64 {
        self.ns as f64 / 1e6
    }
}

/// What rounds have taken, and from it what the next ones will.
///
/// Where no round of a context or of so many streams was timed, the times of the nearest shorter context, or of
/// the nearest number of streams, stand in.
#[derive(Clone, Debug, Default)]
pub struct Costs {
    /// The target's time by octave of context, and by streams where it depends on them, then by rows.
    verify: BTreeMap<Kind, Curve>,
    /// Whether the target's time depends on how many streams the rows are of.
    by_streams: bool,
    /// Each head's time by octave of context and streams, then by the tokens that it guesses.
    draft: [BTreeMap<Kind, Curve>; MAX_HEADS],
    /// Each head's time in rounds whose drafts are all of others, by octave of context and streams, then by
    /// the tokens of the longest one: the head reads what these have written.
    reading: [BTreeMap<Kind, Curve>; MAX_HEADS],
    /// The time of one more expert of a mixture.
    expert: ExpertTime,
    rounds: u64,
}

/// Octave of context, and streams: 0 for the target's time, where it depends on rows alone.
type Kind = (u32, usize);

impl Costs {
    /// No times yet, of a device on which a step of the target takes its time `by_streams` as well as by rows: one that
    /// works on streams side by side takes longer for eight rows of one stream than for one row of eight.
    pub(super) fn counted(by_streams: bool) -> Self {
        Costs {
            by_streams,
            ..Costs::default()
        }
    }

    /// These times, of a device on which a step's time also goes `by_streams`.
    pub(super) fn counting(self, by_streams: bool) -> Self {
        Costs {
            by_streams: self.by_streams || by_streams,
            ..self
        }
    }

    /// What [`Costs::points`] said.
    pub fn of_points(points: &[CostPoint]) -> Self {
        let mut costs = Costs::counted(
            points
                .iter()
                .any(|point| point.of == CostOf::Verify && point.streams > 0),
        );
        for point in points.iter().filter(|point| point.head < MAX_HEADS) {
            let known = Point {
                ms: point.ms(),
                experts: (point.experts > 0).then_some(point.experts as f64),
                seen: f64::from(point.seen),
                last: 0,
            };
            let (curves, fresh): (_, fn() -> Curve) = match point.of {
                CostOf::Expert => {
                    costs.expert = ExpertTime::known(point.ms());
                    continue;
                }
                CostOf::Verify => (&mut costs.verify, Curve::default),
                CostOf::Draft => (&mut costs.draft[point.head], Curve::from_nothing),
                CostOf::Reading => (&mut costs.reading[point.head], Curve::from_nothing),
            };
            let curve = curves.entry((point.octave, point.streams));
            curve.or_insert_with(fresh).0.insert(point.count, known);
        }
        costs
    }

    /// The times that were measured, in the order of kind, head, context, streams and count, that of an expert last.
    pub fn points(&self) -> Vec<CostPoint> {
        let of_heads = [
            (CostOf::Draft, &self.draft),
            (CostOf::Reading, &self.reading),
        ];
        let of_heads = of_heads.into_iter().flat_map(|(of, heads)| {
            let heads = heads.iter().enumerate();
            heads.map(move |(head, curves)| (of, head, curves))
        });
        let mut points = Vec::new();
        for (of, head, curves) in [(CostOf::Verify, 0, &self.verify)]
            .into_iter()
            .chain(of_heads)
        {
            for (&(octave, streams), curve) in curves {
                let measured = curve.0.iter().filter(|(_, point)| point.seen > 0.0);
                points.extend(measured.map(|(&count, point)| CostPoint {
                    of,
                    head,
                    octave,
                    streams,
                    count,
                    experts: point.experts.map_or(0, |experts| experts.round() as usize),
                    ns: nanoseconds(point.ms),
                    seen: point.seen.min(BELIEVED) as u8,
                }));
            }
        }
        let expert = self.expert.ms();
        points.extend((expert > 0.0).then(|| CostPoint {
            of: CostOf::Expert,
            head: 0,
            octave: FIRST_OCTAVE,
            streams: 0,
            count: 1,
            experts: 1,
            ns: nanoseconds(expert),
            seen: BELIEVED as u8,
        }));
        points
    }

    /// Takes note of what a round took.
    pub fn learn(&mut self, cost: &RoundCost) {
        self.rounds += 1;
        let octave = octave(cost.context);
        let ms = |d: Duration| d.as_secs_f64() * 1e3;
        let verify = ms(cost.verify);
        if let Some(experts) = cost.experts {
            self.learn_expert((octave, cost.rows), experts, verify);
        }
        let touched = self.touched(cost.experts);
        let kind = self.step_kind(cost.context, cost.streams);
        let curve = entry(&mut self.verify, kind, Curve::default);
        curve.learn(cost.rows, verify, touched, self.rounds);
        if self.by_streams {
            // The times of another number of streams stood in here.
            curve.drop_guesses_around(cost.rows);
        }
        for (head, time) in cost.heads() {
            let (curves, count) = match cost.drafts.of_head(head) {
                (CostOf::Reading, count) => (&mut self.reading[head], count),
                (_, count) => (&mut self.draft[head], count),
            };
            let curve = entry(curves, (octave, cost.streams), Curve::from_nothing);
            curve.learn(count, ms(time), None, self.rounds);
        }
    }

    /// Takes note of a step of `rows` rows that is no round's, and that touched `experts` in `time`: it tells what an
    /// expert takes beside others of its kind.
    pub(crate) fn learn_step(&mut self, rows: usize, experts: f64, time: Duration) {
        self.learn_expert((u32::MAX, rows), experts, time.as_secs_f64() * 1e3);
    }

    /// Fits the time of an expert to a step of this kind.
    fn learn_expert(&mut self, kind: (u32, usize), experts: f64, ms: f64) {
        let points = self.verify.values().flat_map(|curve| curve.0.values());
        let each = points.filter_map(|point| Some(point.ms / point.experts?));
        // In no step do its experts take longer than all of it.
        let most = each.fold(ms / experts.max(1.0), f64::min);
        self.expert.learn(kind, experts, ms, most);
    }

    /// Milliseconds that a step of the target takes for each expert that it touches; 0 where that is not known, and
    /// without mixtures.
    pub fn expert_ms(&self) -> f64 {
        self.expert.ms()
    }

    /// Which steps of the target share their times.
    fn step_kind(&self, context: usize, streams: usize) -> Kind {
        (octave(context), if self.by_streams { streams } else { 0 })
    }

    fn touched(&self, experts: Option<f64>) -> Touched {
        experts.map(|experts| (experts, self.expert.ms()))
    }

    /// Milliseconds of a round of `streams` streams without drafts, if one like it was seen of
    /// late.
    pub fn plain_step(&self, context: usize, streams: usize) -> Option<f64> {
        let kind = self.step_kind(context, streams);
        let curve = nearest(&self.verify, kind)?;
        let fresh = |p: &Point| p.last + STALE > self.rounds;
        // What stands in for it may be times of more streams, whose steps all have more rows.
        let stands_in = self.by_streams && !self.verify.contains_key(&kind);
        let least = curve.0.keys().next().copied().filter(|_| stands_in);
        let most = streams.max(least.unwrap_or(0));
        curve
            .0
            .range(..=most)
            .any(|(_, p)| fresh(p))
            .then(|| curve.at(streams, None) + self.draft_ms(context, streams, Longest::default()))
    }

    /// Whether any round of such a context, or of a shorter one, was timed.
    pub fn has(&self, context: usize) -> bool {
        nearest(&self.verify, (octave(context), 0)).is_some()
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
        // What other heads read meanwhile is little.
        let drafting = (0..MAX_HEADS).filter(|&head| drafts.by_head[head] > 0);
        let mut drafting: Vec<usize> = drafting.collect();
        if drafting.is_empty() {
            drafting.push(0);
        }
        let seen = |curve: Option<&Curve>, count| {
            let point = curve.and_then(|curve| curve.0.get(&count));
            point.is_some_and(|p| p.seen >= BELIEVED)
        };
        let is_known = |head| {
            let (curves, count) = self.drafting(head, drafts);
            seen(curves.get(&(octave, streams)), count)
        };
        seen(self.verify.get(&self.step_kind(context, streams)), rows)
            && drafting.into_iter().all(is_known)
    }

    /// What [`Costs::usual`] and, of that, [`Costs::draft_ms`] say of a round like this one, if such rounds were timed
    /// often enough to be believed, or lie between kinds that were.
    pub(super) fn believed(&self, cost: &RoundCost) -> Option<(f64, f64)> {
        let RoundCost {
            streams,
            rows,
            context,
            experts,
            drafts,
            ..
        } = *cost;
        let octave = octave(context);
        let verify = self.verify.get(&self.step_kind(context, streams))?;
        let verify = verify.believed(rows, self.touched(experts))?;
        let is_idle = drafts.guessed() == 0;
        let mut drafting = 0.0;
        for head in 0..MAX_HEADS {
            let (curves, count) = self.drafting(head, drafts);
            // What heads read that do not draft is little.
            drafting += if drafts.by_head[head] > 0 || (is_idle && head == 0) {
                let curve = curves.get(&(octave, streams))?;
                curve.believed(count, None)?
            } else {
                let curve = nearest(curves, (octave, streams));
                curve.map_or(0.0, |curve| curve.at(count, None))
            };
        }
        Some((verify + drafting, drafting))
    }

    /// Milliseconds that a round of `rows` rows usually takes, with these drafts after it, if the step touches so many
    /// `experts`: as many as usual, if that is not known.
    pub fn usual(
        &self,
        context: usize,
        streams: usize,
        (rows, experts): (usize, Option<f64>),
        drafts: Longest,
    ) -> f64 {
        self.verify_ms(context, streams, (rows, experts)) + self.draft_ms(context, streams, drafts)
    }

    /// Milliseconds that the target usually takes for `rows` rows of `streams` streams that touch so many `experts`, or
    /// as many as usual; 0 where no round was timed.
    pub fn verify_ms(
        &self,
        context: usize,
        streams: usize,
        (rows, experts): (usize, Option<f64>),
    ) -> f64 {
        let curve = nearest(&self.verify, self.step_kind(context, streams));
        curve.map_or(0.0, |curve| curve.at(rows, self.touched(experts)))
    }

    /// Milliseconds that drafting usually takes for such drafts of `streams` streams; 0 where none
    /// was timed.
    pub fn draft_ms(&self, context: usize, streams: usize, drafts: Longest) -> f64 {
        let of_head = |head| {
            let (curves, count) = self.drafting(head, drafts);
            let curve = nearest(curves, (octave(context), streams));
            curve.map_or(0.0, |curve| curve.at(count, None))
        };
        (0..MAX_HEADS).map(of_head).sum()
    }

    /// The curves of the time of `head` for such drafts, and where in one they are.
    fn drafting(&self, head: usize, drafts: Longest) -> (&BTreeMap<Kind, Curve>, usize) {
        match drafts.of_head(head) {
            (CostOf::Reading, count) => (&self.reading[head], count),
            (_, count) => (&self.draft[head], count),
        }
    }
}

/// The curve of `kind`, to learn from: where there is none, it starts with the times of the [`nearest`] one, which
/// count as never measured.
fn entry(curves: &mut BTreeMap<Kind, Curve>, kind: Kind, fresh: fn() -> Curve) -> &mut Curve {
    if !curves.contains_key(&kind) {
        let curve = nearest(curves, kind).map_or_else(fresh, Curve::as_a_guess);
        curves.insert(kind, curve);
    }
    curves.get_mut(&kind).expect("a curve of this kind")
}

/// The curve of `kind`; where there is none, that of the nearest number of streams in the longest context that is no
/// longer, or in the shortest one.
fn nearest(curves: &BTreeMap<Kind, Curve>, (octave, streams): Kind) -> Option<&Curve> {
    let shorter = curves.range(..=(octave, usize::MAX)).next_back();
    let &(octave, _) = shorter.or_else(|| curves.iter().next())?.0;
    let kinds = curves.range((octave, 0)..=(octave, usize::MAX));
    let (_, curve) = kinds.min_by_key(|&(&(_, n), _)| n.abs_diff(streams))?;
    Some(curve)
}

/// `ms` in whole nanoseconds.
fn nanoseconds(ms: f64) -> u64 {
    (ms * 1e6).round() as u64
}

/// Which contexts share their times: each twice as long as the one before.
fn octave(context: usize) -> u32 {
    (context | 1).ilog2().max(FIRST_OCTAVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_other_numbers_of_streams_stand_in_until_there_are_own_ones() {
        let mut costs = Costs::counted(true);
        let took = |streams: usize, rows: usize, ms: u64| RoundCost {
            streams,
            rows,
            context: 100,
            experts: None,
            drafts: Longest::default(),
            verify: Duration::from_millis(ms),
            draft: Duration::ZERO,
            by_head: [None; MAX_HEADS],
        };
        (1..=9).for_each(|rows| costs.learn(&took(1, rows, 10 + rows as u64)));
        let ms = |costs: &Costs, streams, rows| costs.verify_ms(100, streams, (rows, None));
        assert_eq!([ms(&costs, 1, 6), ms(&costs, 4, 6)], [16.0; 2]);
        costs.learn(&took(4, 4, 20));
        costs.learn(&took(4, 8, 40));
        assert_eq!(ms(&costs, 4, 6), 30.0, "between the two of four streams");
        assert_eq!(ms(&costs, 1, 6), 16.0);
        // Five streams go by four, whose steps all have fewer rows; three too, though these have more.
        assert_eq!(ms(&costs, 5, 8), 40.0);
        assert!(costs.plain_step(100, 3).is_some());
        let again = Costs::of_points(&costs.points());
        assert_eq!([ms(&again, 4, 6), ms(&again, 1, 6)], [30.0, 16.0]);
        assert!(
            Costs::of_points(&again.points())
                .plain_step(100, 3)
                .is_some()
        );
    }

    fn cost(streams: usize, rows: usize, context: usize, ms: (u64, u64)) -> RoundCost {
        RoundCost {
            streams,
            rows,
            context,
            experts: None,
            drafts: Longest::by(Guesser::HEAD, rows / streams - 1),
            verify: Duration::from_millis(ms.0),
            draft: Duration::from_millis(ms.1),
            by_head: [None; MAX_HEADS],
        }
    }

    #[test]
    fn what_is_not_known_of_a_context_or_a_batch_is_what_is_known_of_the_nearest() {
        let mut costs = Costs::default();
        assert!(!costs.has(100) && costs.plain_step(100, 1).is_none());
        for _ in 0..4 {
            costs.learn(&cost(1, 1, 100, (10, 0)));
            costs.learn(&cost(1, 5, 100, (14, 4)));
        }
        let three = Longest::by(Guesser::HEAD, 3);
        assert_eq!(costs.plain_step(60_000, 1), Some(10.0));
        assert_eq!(costs.usual(60_000, 2, (3, None), three), 12.0 + 3.0);
        // The first time measured there replaces the guess at its place, and no other.
        costs.learn(&cost(1, 1, 60_000, (30, 0)));
        assert_eq!(costs.verify_ms(60_000, 1, (1, None)), 30.0);
        assert_eq!(costs.verify_ms(60_000, 1, (5, None)), 14.0);
        assert_eq!(costs.verify_ms(100, 1, (1, None)), 10.0);
        let one = Longest::default();
        assert!(costs.is_believed(100, 1, 1, one) && !costs.is_believed(60_000, 1, 1, one));
        // A shorter context than all that were timed has the times of the shortest.
        let mut long = Costs::default();
        long.learn(&cost(1, 1, 60_000, (30, 0)));
        assert_eq!(long.verify_ms(5, 1, (1, None)), 30.0);
    }

    #[test]
    fn costs_read_again_are_believed_as_they_were() {
        let mut costs = Costs::default();
        for (rows, ms) in [(1, (10, 1)), (4, (12, 3)), (9, (17, 8))] {
            (0..4).for_each(|_| costs.learn(&cost(1, rows, 100, ms)));
            costs.learn(&cost(3, 3 * rows, 5000, ms));
        }
        let copy = RoundCost {
            drafts: Longest::by(Guesser::Ngram, 6),
            ..cost(1, 1, 100, (10, 2))
        };
        costs.learn(&copy);
        let points = costs.points();
        let written = serde_json::to_string(&points).unwrap();
        let read: Vec<CostPoint> = serde_json::from_str(&written).unwrap();
        let again = Costs::of_points(&read);
        assert_eq!(again.points(), points);
        assert_eq!(again.plain_step(100, 1), costs.plain_step(100, 1));
        for rows in 1..12 {
            assert_eq!(
                again.verify_ms(100, 1, (rows, None)),
                costs.verify_ms(100, 1, (rows, None))
            );
        }
        assert!(again.is_believed(100, 1, 4, cost(1, 4, 0, (0, 0)).drafts));
    }

    #[test]
    fn the_time_of_an_expert_is_kept_with_the_experts_of_the_steps() {
        let mut costs = Costs::default();
        // 4 ms, a quarter for each row and 0.05 for each expert, of which texts touch more or fewer.
        let mixture = |rows: usize, experts: f64| RoundCost {
            experts: Some(experts),
            verify: Duration::from_secs_f64((4.0 + 0.25 * rows as f64 + 0.05 * experts) / 1e3),
            ..cost(1, rows, 100, (0, 0))
        };
        for i in 0..60 {
            for rows in [1, 4, 8] {
                let experts = 20.0 + 2.0 * rows as f64 + f64::from((i * 7 + 3) % 9);
                costs.learn(&mixture(rows, experts));
            }
        }
        assert!(
            (costs.expert_ms() - 0.05).abs() < 0.002,
            "{}",
            costs.expert_ms()
        );
        for (rows, experts) in [(1, 22.0), (4, 20.0), (6, 36.0), (8, 50.0)] {
            let want = mixture(rows, experts).verify.as_secs_f64() * 1e3;
            let got = costs.verify_ms(100, 1, (rows, Some(experts)));
            assert!(
                (got - want).abs() < 0.05,
                "{got} of {want}: {rows} rows, {experts}"
            );
        }
        let again = Costs::of_points(&costs.points());
        assert_eq!(again.points(), costs.points());
        let (now, before) = (
            again.verify_ms(100, 1, (4, Some(20.0))),
            costs.verify_ms(100, 1, (4, Some(20.0))),
        );
        // Experts are remembered as whole ones.
        assert!((now - before).abs() < 0.05, "{now} of {before}");
    }

    #[test]
    fn steps_outside_of_rounds_tell_what_an_expert_takes_and_nothing_else() {
        let mut costs = Costs::default();
        let step = RoundCost {
            experts: Some(30.0),
            ..cost(1, 8, 100, (6, 0))
        };
        (0..3).for_each(|_| costs.learn(&step));
        assert_eq!(costs.expert_ms(), 0.0);
        for _ in 0..6 {
            costs.learn_step(8, 20.0, Duration::from_millis(4));
            costs.learn_step(8, 40.0, Duration::from_millis(6));
        }
        assert!(
            (costs.expert_ms() - 0.1).abs() < 0.02,
            "{}",
            costs.expert_ms()
        );
        assert_eq!(costs.verify_ms(100, 1, (8, None)), 6.0);
        let fewer = costs.verify_ms(100, 1, (8, Some(10.0)));
        assert!((fewer - 4.0).abs() < 0.4, "{fewer}");
    }
}
