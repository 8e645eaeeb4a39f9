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
//! the first few rounds of each kind, which run cold. A stream that does not draft
//! tries a draft now and then, as far as that limit allows; every stream tries a first.
//!
//! Decisions only: what rounds cost is measured in `costs.rs`, what guesses were worth
//! is counted in `ledger.rs`.

mod costs;
mod ledger;

pub use costs::RoundCost;
pub use ledger::{LOSS_SHARE, LOSS_STEPS, Ledger};

use costs::Costs;
use ledger::Acceptance;

/// How much of what a round taught about its own stream still counts a round later.
const KEEP_STREAM: f64 = 0.96;
/// How much of what a round taught about streams to come still counts a round later.
const KEEP_MODEL: f64 = 0.998;
/// The chance of a model's first guess before there was a round.
const FIRST_CHANCE: f64 = 0.8;
/// Chances below this are not worth looking at.
const FAINT: f64 = 0.02;
/// The least chance that a new text starts with, however rarely guesses about others were
/// accepted: it may differ.
const LEAST_PRIOR: f64 = 0.25;

/// How long a stream's drafts are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftLength {
    /// This many tokens, in every round that has room for them.
    Fixed(usize),
    /// As many tokens as pay, and at most this many.
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

/// What the length of one stream's next draft depends on.
#[derive(Clone, Copy, Debug)]
pub struct LengthInput<'a> {
    /// What the stream's drafts have cost and brought so far.
    pub ledger: &'a Ledger,
    /// The length that the stream asks for.
    pub wish: DraftLength,
    /// The longest draft that has room.
    pub room: usize,
    /// Tokens of the stream so far: prompt and output.
    pub context: usize,
}

impl LengthInput<'_> {
    /// The longest draft that is asked for and has room.
    fn most(&self) -> usize {
        self.wish.max().min(self.room)
    }
}

/// Decides on draft lengths from what rounds have cost and brought.
#[derive(Clone, Debug, Default)]
pub struct Lengths {
    /// How often guesses were accepted, over all streams.
    acceptance: Acceptance,
    costs: Costs,
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
        let Some(plain) = self.costs.plain_step(context, streams.len()) else {
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
        let mut best = self.best(streams, context, lengths, &grows);
        for (i, stream) in streams.iter().enumerate() {
            if grows[i] && best[i] == 0 && stream.ledger.is_curious() {
                best[i] = self.likely(stream);
            }
        }
        best
    }

    /// The lengths of most expected tokens a millisecond, from `lengths` on. Those of streams
    /// that may grow get longer by one guess at a time, the likeliest first.
    fn best(
        &self,
        streams: &[LengthInput<'_>],
        context: usize,
        mut lengths: Vec<usize>,
        grows: &[bool],
    ) -> Vec<usize> {
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
        let mut best_rate = tokens / self.costs.with_drafts(context, &lengths);
        loop {
            let next = (0..streams.len())
                .filter(|&i| grows[i] && lengths[i] < streams[i].most())
                .map(|i| (i, reached[i] * self.chance(streams[i].ledger, lengths[i])))
                .max_by(|a, b| a.1.total_cmp(&b.1));
            let Some((i, chance)) = next.filter(|n| n.1 > FAINT) else {
                return best;
            };
            lengths[i] += 1;
            reached[i] = chance;
            tokens += chance;
            let rate = tokens / self.costs.with_drafts(context, &lengths);
            if rate > best_rate {
                best_rate = rate;
                best.copy_from_slice(&lengths);
            }
        }
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
        ledger.acceptance.learn(KEEP_STREAM, n_drafted, n_accepted);
        if n_drafted > 0 {
            self.acceptance.learn(KEEP_MODEL, n_drafted, n_accepted);
        }
        ledger.verified(n_drafted, n_accepted);
    }

    /// Takes note of what a round took.
    pub fn took(&mut self, cost: &RoundCost) {
        self.costs.learn(cost);
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
        let Some(plain) = self.costs.plain_step(context, streams) else {
            return;
        };
        if self.costs.is_believed(context, streams, rows, asked) {
            let ms = self.costs.usual(context, streams, rows, asked);
            ledger.enter(ms, emitted, plain);
        }
    }

    /// The chance that a stream's guess at `position` is accepted if those before it are.
    fn chance(&self, ledger: &Ledger, position: usize) -> f64 {
        let prior = (0..=position).fold(FIRST_CHANCE, |prior, p| self.acceptance.chance(p, prior));
        ledger.acceptance.chance(position, prior.max(LEAST_PRIOR))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

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
