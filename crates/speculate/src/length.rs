//! Draft length: how many tokens to ask the drafter for.
//!
//! What is decided here changes how soon tokens come, never which ones. A round
//! of `r` rows takes `verify(r) + draft(n)` milliseconds, as measured in earlier
//! rounds, and brings each stream one token and one more for every guess that is
//! accepted. Lengths are those for which the batch's expected tokens a
//! millisecond are most: 0 where plain decoding is.
//!
//! Guesses can be wrong about a text, so a stream's [`Ledger`] compares every
//! round with the plain rounds it replaced. A stream that has lost
//! [`LOSS_STEPS`] plain steps and [`LOSS_SHARE`] of its time drafts no more until
//! plain rounds have made the share smaller: speculation costs at most that, and
//! the first few rounds of each kind, which run cold. One
//! that does not draft tries one now and then, as far as that allows; every stream
//! tries a first.

use std::collections::BTreeMap;
use std::time::Duration;

/// Plain steps that speculation may lose a stream before it pauses.
pub const LOSS_STEPS: f64 = 4.0;
/// Part of a stream's time that speculation may lose besides.
pub const LOSS_SHARE: f64 = 0.02;

/// How much of what a round taught is left a round later, for its own stream
/// and for those that start after it.
const KEEP: (f64, f64) = (0.96, 0.998);
/// Rounds that a guess about a stream's acceptance weighs, before its own.
const PRIOR_ROUNDS: f64 = 4.0;
/// The chance of a model's first guess before there was a round.
const FIRST_CHANCE: f64 = 0.8;
/// Steps' times are kept apart by context, in octaves from this one.
const FIRST_OCTAVE: u32 = 10;
/// Rounds after which the time of a plain step is measured again.
const STALE: u64 = 1024;
/// Chances below this are not worth looking at.
const FAINT: f64 = 0.02;
/// The least that a text is thought of for what others were: it may differ.
const LEAST_PRIOR: f64 = 0.25;
/// Plain rounds after which a draft is tried again; twice as many after each try
/// that brought nothing, up to the second number.
const PROBE: (u32, u32) = (4, 64);
/// Times seen after which a time is believed, however odd.
const BELIEVED: f64 = 3.0;

/// How long a stream's drafts are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftLength {
    /// This long, in every round that has room for it.
    Fixed(usize),
    /// As long as pays, and at most this long.
    UpTo(usize),
}

impl DraftLength {
    /// The longest draft; 0 turns speculation off.
    pub fn max(self) -> usize {
        match self {
            DraftLength::Fixed(n) | DraftLength::UpTo(n) => n,
        }
    }
}

/// How often guesses were accepted, by position in the draft, of those whose
/// predecessors all were. Newer rounds count more.
#[derive(Clone, Debug, Default)]
pub struct Acceptance(Vec<Tested>);

#[derive(Clone, Copy, Debug, Default)]
struct Tested {
    tested: f64,
    accepted: f64,
}

impl Acceptance {
    fn learn(&mut self, keep: f64, n_drafted: usize, n_accepted: usize) {
        if self.0.len() < n_drafted {
            self.0.resize(n_drafted, Tested::default());
        }
        for (i, position) in self.0.iter_mut().enumerate() {
            position.tested *= keep;
            position.accepted *= keep;
            if i < n_drafted && i <= n_accepted {
                position.tested += 1.0;
                position.accepted += f64::from(u8::from(i < n_accepted));
            }
        }
    }

    /// The chance that the guess at `position` is accepted if those before it
    /// are; `prior` is the answer where nothing is known.
    fn chance(&self, position: usize, prior: f64) -> f64 {
        let known = self.0.get(position).copied().unwrap_or_default();
        (known.accepted + PRIOR_ROUNDS * prior) / (known.tested + PRIOR_ROUNDS)
    }
}

/// What speculation has cost one stream and saved it.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    acceptance: Acceptance,
    /// Milliseconds more than plain rounds would have taken.
    lost: f64,
    /// Milliseconds in all.
    elapsed: f64,
    /// Whether a draft was ever verified.
    tried: bool,
    /// Plain rounds since the last draft.
    idle: u32,
    /// Plain rounds after which a draft is tried again, if it was ever in vain.
    patience: u32,
}

impl Ledger {
    /// Milliseconds that the stream's rounds took beyond those of plain
    /// decoding, as far as that is known; negative if they were fewer.
    pub fn lost_ms(&self) -> f64 {
        self.lost
    }

    /// Whether a draft is to be tried though it does not promise to pay: a
    /// stream's first, and one after a long wait.
    fn curious(&self) -> bool {
        !self.tried || self.idle >= self.patience.max(PROBE.0)
    }

    fn may_draft(&self, plain_step: f64) -> bool {
        self.lost <= LOSS_STEPS * plain_step + LOSS_SHARE * self.elapsed
    }
}

/// What is asked about one stream.
#[derive(Clone, Copy, Debug)]
pub struct LengthInput<'a> {
    /// What its drafts came to so far.
    pub ledger: &'a Ledger,
    /// What it wishes.
    pub wish: DraftLength,
    /// The longest draft that has room.
    pub room: usize,
    /// Tokens of the stream so far: prompt and output.
    pub context: usize,
}

impl LengthInput<'_> {
    fn most(&self) -> usize {
        self.wish.max().min(self.room)
    }
}

/// What one round took. Rounds with prompt rows are not comparable and are left
/// out.
#[derive(Clone, Copy, Debug)]
pub struct RoundCost {
    /// Streams in it.
    pub streams: usize,
    /// Rows the target ran.
    pub rows: usize,
    /// Tokens of its longest stream.
    pub context: usize,
    /// The longest draft asked for after it.
    pub asked: usize,
    /// Time of the target, choosing included.
    pub verify: Duration,
    /// Time of the drafter.
    pub draft: Duration,
}

/// Decides on draft lengths from what rounds have cost and brought.
#[derive(Clone, Debug, Default)]
pub struct Lengths {
    acceptance: Acceptance,
    /// By octave of context, then rows.
    verify: BTreeMap<u32, Curve>,
    /// By octave of context and streams, then length.
    draft: BTreeMap<(u32, usize), Curve>,
    rounds: u64,
}

impl Lengths {
    /// The next drafts' lengths, one for each of `streams`.
    pub fn choose(&self, streams: &[LengthInput<'_>]) -> Vec<usize> {
        let start = |s: &LengthInput<'_>| match s.wish {
            DraftLength::Fixed(_) => s.most(),
            DraftLength::UpTo(_) => 0,
        };
        let mut lengths: Vec<usize> = streams.iter().map(start).collect();
        let context = streams.iter().map(|s| s.context).max().unwrap_or(0);
        let Some(plain) = self.plain_step(context, streams.len()) else {
            for (length, stream) in lengths.iter_mut().zip(streams) {
                if matches!(stream.wish, DraftLength::UpTo(_)) && !stream.ledger.tried {
                    *length = self.likely(stream);
                }
            }
            return lengths;
        };
        let grows: Vec<bool> = streams
            .iter()
            .map(|s| matches!(s.wish, DraftLength::UpTo(_)) && s.ledger.may_draft(plain))
            .collect();
        // The chance that all of a stream's guesses so far are accepted.
        let mut reached = vec![1.0; streams.len()];
        let mut tokens = streams.len() as f64;
        for (i, stream) in streams.iter().enumerate() {
            for position in 0..lengths[i] {
                reached[i] *= self.chance(stream.ledger, position);
                tokens += reached[i];
            }
        }
        let mut best = lengths.clone();
        let mut best_rate = tokens / self.cost(context, &lengths);
        loop {
            let next = (0..streams.len())
                .filter(|&i| grows[i] && lengths[i] < streams[i].most())
                .map(|i| (i, reached[i] * self.chance(streams[i].ledger, lengths[i])))
                .max_by(|a, b| a.1.total_cmp(&b.1));
            let Some((i, chance)) = next.filter(|n| n.1 > FAINT) else {
                break;
            };
            lengths[i] += 1;
            reached[i] = chance;
            tokens += chance;
            let rate = tokens / self.cost(context, &lengths);
            if rate > best_rate {
                best_rate = rate;
                best.copy_from_slice(&lengths);
            }
        }
        for (i, stream) in streams.iter().enumerate() {
            if grows[i] && best[i] == 0 && stream.ledger.curious() {
                best[i] = self.likely(stream);
            }
        }
        best
    }

    /// The length up to which a draft is rather accepted than not, at least 1
    /// where there is room.
    fn likely(&self, stream: &LengthInput<'_>) -> usize {
        let mut reached = 1.0;
        let likely = |&position: &usize| {
            reached *= self.chance(stream.ledger, position);
            reached >= 0.5
        };
        let length = (0..stream.most()).take_while(likely).count();
        length.max(1).min(stream.most())
    }

    /// Takes note of a stream's verified draft.
    pub fn verified(&mut self, ledger: &mut Ledger, n_drafted: usize, n_accepted: usize) {
        ledger.acceptance.learn(KEEP.0, n_drafted, n_accepted);
        if n_drafted > 0 {
            self.acceptance.learn(KEEP.1, n_drafted, n_accepted);
            ledger.tried = true;
            ledger.idle = 0;
            let patience = (2 * ledger.patience.max(PROBE.0 / 2)).min(PROBE.1);
            ledger.patience = if n_accepted > 0 { 0 } else { patience };
        } else {
            ledger.idle += 1;
        }
    }

    /// Takes note of what a round took.
    pub fn took(&mut self, cost: &RoundCost) {
        self.rounds += 1;
        let octave = octave(cost.context);
        let ms = |d: Duration| d.as_secs_f64() * 1e3;
        self.verify
            .entry(octave)
            .or_default()
            .learn(cost.rows, ms(cost.verify), self.rounds);
        self.draft
            .entry((octave, cost.streams))
            .or_insert_with(Curve::from_nothing)
            .learn(cost.asked, ms(cost.draft), self.rounds);
    }

    /// Enters a round that brought a stream `emitted` tokens into its ledger: with
    /// what such a round usually takes, since a hiccup is nobody's fault. The first
    /// rounds of a kind are not entered: they find caches and memory cold.
    pub fn book(&self, ledger: &mut Ledger, cost: &RoundCost, emitted: usize) {
        let RoundCost {
            streams,
            rows,
            context,
            asked,
            ..
        } = *cost;
        let Some(plain) = self.plain_step(context, streams) else {
            return;
        };
        if !self.is_believed(context, streams, rows, asked) {
            return;
        }
        let took = self.usual(context, streams, rows, asked);
        ledger.elapsed += took;
        // What was saved long ago does not pay for a loss now.
        let least = -2.0 * LOSS_STEPS * plain;
        ledger.lost = (ledger.lost + took - emitted as f64 * plain).max(least);
    }

    fn chance(&self, ledger: &Ledger, position: usize) -> f64 {
        let prior = (0..=position).fold(FIRST_CHANCE, |prior, p| self.acceptance.chance(p, prior));
        ledger.acceptance.chance(position, prior.max(LEAST_PRIOR))
    }

    /// Milliseconds of a round without drafts, if one like it was seen of late.
    fn plain_step(&self, context: usize, streams: usize) -> Option<f64> {
        let curve = self.verify.get(&octave(context))?;
        let fresh = |p: &Point| p.last + STALE > self.rounds;
        curve.0.range(..=streams).any(|(_, p)| fresh(p)).then(|| {
            let draft = self.draft.get(&(octave(context), streams));
            curve.at(streams) + draft.map_or(0.0, |curve| curve.at(0))
        })
    }

    /// Whether rounds of this kind were timed often enough.
    fn is_believed(&self, context: usize, streams: usize, rows: usize, asked: usize) -> bool {
        let octave = octave(context);
        let seen = |curve: Option<&Curve>, count| {
            let point = curve.and_then(|curve| curve.0.get(&count));
            point.is_some_and(|p| p.seen >= BELIEVED)
        };
        seen(self.verify.get(&octave), rows) && seen(self.draft.get(&(octave, streams)), asked)
    }

    /// Milliseconds of a round with drafts of these lengths.
    fn cost(&self, context: usize, lengths: &[usize]) -> f64 {
        let rows = lengths.len() + lengths.iter().sum::<usize>();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        self.usual(context, lengths.len(), rows, longest)
    }

    /// Milliseconds that a round of `rows` rows usually takes, with the drafts
    /// of `asked` tokens after it.
    fn usual(&self, context: usize, streams: usize, rows: usize, asked: usize) -> f64 {
        let octave = octave(context);
        let verify = self.verify.get(&octave).map_or(0.0, |curve| curve.at(rows));
        let draft = self.draft.get(&(octave, streams));
        verify + draft.map_or(0.0, |curve| curve.at(asked))
    }
}

fn octave(context: usize) -> u32 {
    (context | 1).ilog2().max(FIRST_OCTAVE)
}

/// Milliseconds by a count.
#[derive(Clone, Debug, Default)]
struct Curve(BTreeMap<usize, Point>);

#[derive(Clone, Copy, Debug)]
struct Point {
    ms: f64,
    seen: f64,
    /// The round that it was last seen in.
    last: u64,
}

impl Curve {
    /// One that starts with nothing for nothing.
    fn from_nothing() -> Self {
        let nothing = Point {
            ms: 0.0,
            seen: 0.0,
            last: 0,
        };
        Curve(BTreeMap::from([(0, nothing)]))
    }

    /// The least of the first times, then nearer to the lesser ones: a machine is
    /// held up by others now and then, and never helped.
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

    /// Between the nearest counts on a line; beyond the last one on the line of
    /// the last two, never falling. A single point counts for all.
    fn at(&self, count: usize) -> f64 {
        // No step takes longer than its rows one by one: until it was seen some
        // times, what says so was held up.
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

    /// A machine and a text: milliseconds of a step by rows, of a draft by
    /// length, and whether the guess at a position of a round is right.
    struct World<'a> {
        step: &'a dyn Fn(usize) -> f64,
        draft: &'a dyn Fn(usize) -> f64,
        right: &'a dyn Fn(u64, usize) -> bool,
    }

    /// Runs one stream until it has written `n` tokens; returns milliseconds,
    /// the last lengths and the ledger.
    fn run(world: &World<'_>, lengths: &mut Lengths, n: usize) -> (f64, Vec<usize>, Ledger) {
        let mut ledger = Ledger::default();
        let (mut total, mut tokens, mut round, mut drafted) = (0.0, 0, 0, 0);
        let mut chosen = Vec::new();
        while tokens < n {
            let accepted = (0..drafted)
                .take_while(|&p| (world.right)(round, p))
                .count();
            lengths.verified(&mut ledger, drafted, accepted);
            let next = lengths.choose(&[LengthInput {
                ledger: &ledger,
                wish: DraftLength::UpTo(6),
                room: 16,
                context: 100,
            }])[0];
            let (verify, draft) = ((world.step)(1 + drafted), (world.draft)(next));
            let ms = |ms: f64| Duration::from_secs_f64(ms / 1e3);
            let cost = RoundCost {
                streams: 1,
                rows: 1 + drafted,
                context: 100,
                asked: next,
                verify: ms(verify),
                draft: ms(draft),
            };
            lengths.took(&cost);
            lengths.book(&mut ledger, &cost, accepted + 1);
            total += verify + draft;
            tokens += accepted + 1;
            drafted = next;
            round += 1;
            chosen.push(next);
        }
        (total, chosen.split_off(chosen.len() / 2), ledger)
    }

    fn mean(lengths: &[usize]) -> f64 {
        lengths.iter().sum::<usize>() as f64 / lengths.len() as f64
    }

    #[test]
    fn free_rows_and_good_guesses_make_long_drafts() {
        let world = World {
            step: &|rows| 10.0 + 0.1 * rows as f64,
            draft: &|n| 0.2 * n as f64,
            right: &|round, p| !(round * 7 + p as u64).is_multiple_of(10),
        };
        let (total, lengths, _) = run(&world, &mut Lengths::default(), 2000);
        assert!(mean(&lengths) > 5.0, "{lengths:?}");
        assert!(total < 2000.0 * 10.1 / 3.0, "{total}");
    }

    #[test]
    fn dear_rows_and_bad_guesses_make_none() {
        let world = World {
            step: &|rows| 10.0 * rows as f64,
            draft: &|n| n as f64,
            right: &|round, p| (round + p as u64).is_multiple_of(3),
        };
        let (_, lengths, _) = run(&world, &mut Lengths::default(), 2000);
        assert!(mean(&lengths) < 0.2, "{lengths:?}");
    }

    #[test]
    fn a_kink_in_the_cost_ends_drafts_before_it() {
        let world = World {
            step: &|rows| if rows <= 4 { 10.0 } else { 20.0 },
            draft: &|n| 0.3 * n as f64,
            right: &|round, p| !(round * 3 + p as u64).is_multiple_of(5),
        };
        let (_, lengths, _) = run(&world, &mut Lengths::default(), 3000);
        let at_most_three = lengths.iter().filter(|&&n| n <= 3).count();
        assert!(at_most_three * 10 > lengths.len() * 9, "{lengths:?}");
        assert!(mean(&lengths) > 2.0, "{lengths:?}");
    }

    #[test]
    fn a_drafter_that_is_never_right_costs_a_bounded_time() {
        for penalty in [1.05, 1.5, 4.0] {
            let world = World {
                step: &|rows| if rows == 1 { 10.0 } else { 10.0 * penalty },
                draft: &|n| if n == 0 { 0.0 } else { 5.0 },
                right: &|_, _| false,
            };
            let mut lengths = Lengths::default();
            // The model's record is splendid, so that only the ledger holds it back.
            for _ in 0..1000 {
                lengths.verified(&mut Ledger::default(), 6, 6);
            }
            let (total, ..) = run(&world, &mut lengths, 1000);
            let plain = 1000.0 * 10.0;
            let one_round = 10.0 * penalty + 5.0 - 10.0;
            let bound = LOSS_STEPS * 10.0 + LOSS_SHARE * total + 5.0 * one_round;
            assert!(total - plain <= bound, "{} of {bound}", total - plain);
        }
    }

    #[test]
    fn a_text_that_turns_predictable_is_noticed() {
        let world = World {
            step: &|_| 10.0,
            draft: &|n| 1.5 * n as f64,
            right: &|round, _| round > 300,
        };
        let (_, lengths, ledger) = run(&world, &mut Lengths::default(), 2000);
        assert!(mean(&lengths) > 4.0, "{}", mean(&lengths));
        assert!(ledger.lost_ms() < 0.0);
    }

    #[test]
    fn a_batch_gives_its_rows_to_the_stream_that_uses_them() {
        let mut lengths = Lengths::default();
        let (mut good, mut bad) = (Ledger::default(), Ledger::default());
        for _ in 0..50 {
            lengths.verified(&mut good, 4, 4);
            lengths.verified(&mut bad, 4, 0);
        }
        for rows in 2..=10 {
            lengths.took(&RoundCost {
                streams: 2,
                rows,
                context: 9,
                asked: rows / 2,
                verify: Duration::from_micros(1000 + 200 * rows as u64),
                draft: Duration::from_micros(10),
            });
        }
        let input = |ledger, wish| LengthInput {
            ledger,
            wish,
            room: 4,
            context: 9,
        };
        let up_to = DraftLength::UpTo(4);
        let chosen = lengths.choose(&[input(&bad, up_to), input(&good, up_to)]);
        assert_eq!(chosen, [0, 4]);
        // A fixed length is kept whatever it costs, and cut to the room.
        let chosen = lengths.choose(&[
            input(&bad, DraftLength::Fixed(9)),
            input(&good, DraftLength::UpTo(0)),
        ]);
        assert_eq!(chosen, [4, 0]);
        // From the first round on, when no cost is known and guesses of others were wrong.
        let mut unlucky = Lengths::default();
        for _ in 0..50 {
            unlucky.verified(&mut Ledger::default(), 4, 0);
        }
        let chosen = unlucky.choose(&[
            input(&Ledger::default(), DraftLength::Fixed(3)),
            input(&Ledger::default(), up_to),
        ]);
        assert_eq!(chosen, [3, 1]);
    }

    #[test]
    fn a_machine_that_is_held_up_now_and_then_does_not_end_drafting() {
        let calls = std::cell::Cell::new(0u32);
        let world = World {
            step: &|_| {
                calls.set(calls.get() + 1);
                if calls.get() % 7 == 3 { 400.0 } else { 10.0 }
            },
            draft: &|n| 0.2 * n as f64,
            right: &|round, p| !(round * 7 + p as u64).is_multiple_of(10),
        };
        let (_, lengths, _) = run(&world, &mut Lengths::default(), 2000);
        assert!(mean(&lengths) > 5.0, "{lengths:?}");
    }

    #[test]
    fn a_cold_first_draft_does_not_end_drafting() {
        let drafts = std::cell::Cell::new(0);
        let world = World {
            step: &|rows| 1.0 + 0.05 * rows as f64,
            draft: &|n| {
                let is_first = n > 0 && drafts.replace(1) == 0;
                if is_first { 50.0 } else { 0.1 * n as f64 }
            },
            right: &|round, p| !(round * 7 + p as u64).is_multiple_of(10),
        };
        let (total, lengths, _) = run(&world, &mut Lengths::default(), 250);
        assert!(mean(&lengths) > 4.0, "{lengths:?}");
        assert!(total < 50.0 + 250.0 / 2.0, "{total}");
    }

    #[test]
    fn a_first_draft_is_tried_and_then_a_plain_step_is_timed() {
        let mut lengths = Lengths::default();
        let mut ledger = Ledger::default();
        let wish = DraftLength::UpTo(4);
        let next = |lengths: &Lengths, ledger: &Ledger| {
            lengths.choose(&[LengthInput {
                ledger,
                wish,
                room: 16,
                context: 100,
            }])[0]
        };
        assert!(next(&lengths, &ledger) > 0);
        lengths.verified(&mut ledger, 3, 3);
        assert_eq!(next(&lengths, &ledger), 0);
    }
}
