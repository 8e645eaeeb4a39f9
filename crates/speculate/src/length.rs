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
mod expect;
mod ledger;
mod plan;

pub(crate) use costs::BELIEVED;
pub use costs::{CostOf, CostPoint, Costs, Longest, RoundCost};
pub use expect::{DraftInput, Expectation};
pub use ledger::{LOSS_SHARE, LOSS_STEPS, Ledger};
pub use plan::{Copy, DraftLength, Guesser, Guessers, LengthInput, Plan};

use ledger::Acceptances;

/// How much of what a round taught about its own stream still counts a round later.
const KEEP_STREAM: f64 = 0.96;
/// How much of what a round taught about streams to come still counts a round later.
const KEEP_MODEL: f64 = 0.998;
/// The chance of a head's first guess before there was a round.
const FIRST_CHANCE: f64 = 0.8;
/// The chance of a copied token before there was a round, by the tokens of the match before it, from 0.
const FIRST_COPY: [f64; 6] = [0.2, 0.2, 0.3, 0.5, 0.6, 0.7];
/// Chances below this are not worth looking at.
const FAINT: f64 = 0.02;
/// The least chance of a head's guess that a new text starts with, however rarely guesses about
/// others were accepted: it may differ.
const LEAST_PRIOR: f64 = 0.25;

/// Decides on draft lengths, and on who drafts, from what rounds have cost and brought.
#[derive(Clone, Debug, Default)]
pub struct Lengths {
    /// How often guesses were accepted, over all streams.
    acceptance: Acceptances,
    costs: Costs,
}

impl Lengths {
    /// What rounds have cost so far.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// Takes `costs` for what rounds cost, until they are measured.
    pub fn set_costs(&mut self, costs: Costs) {
        self.costs = costs;
    }

    /// Forgets what guesses were worth of which `before` did not know; times are kept.
    pub(crate) fn forget_guesses_since(&mut self, before: &Lengths) {
        self.acceptance = before.acceptance.clone();
    }

    /// The next drafts, one for each of `streams`.
    pub fn choose(&self, streams: &[LengthInput<'_>]) -> Vec<Plan> {
        let likelier: Vec<Guesser> = streams.iter().map(|s| self.likelier(s)).collect();
        let start = |(s, &guesser): (&LengthInput<'_>, &Guesser)| match s.is_fixed() {
            true => Plan {
                guesser,
                tokens: s.most(guesser),
            },
            false => Plan::default(),
        };
        let mut plans: Vec<Plan> = streams.iter().zip(&likelier).map(start).collect();
        let context = streams.iter().map(|s| s.context).max().unwrap_or(0);
        let Some(plain) = self.costs.plain_step(context, streams.len()) else {
            for (i, stream) in streams.iter().enumerate() {
                if !stream.is_fixed() && !stream.ledger.tried {
                    plans[i] = self.likely(stream, likelier[i]);
                }
            }
            return plans;
        };
        let may_grow = |s: &LengthInput<'_>| !s.is_fixed() && s.ledger.may_draft(plain);
        let grows: Vec<bool> = streams.iter().map(may_grow).collect();
        let mut best = self.best_by(streams, context, &plans, &grows, &likelier);
        for (i, stream) in streams.iter().enumerate() {
            if grows[i] && best[i].tokens == 0 && stream.ledger.is_curious() {
                best[i] = self.likely(stream, likelier[i]);
            }
        }
        best
    }

    /// The plans of most expected tokens a millisecond where all of `streams` that can have the head
    /// guess, all copy that can, or each does what is likelier to be right. A head takes the same time for one
    /// stream as for several, so that who guesses is chosen for all together.
    fn best_by(
        &self,
        streams: &[LengthInput<'_>],
        context: usize,
        plans: &[Plan],
        grows: &[bool],
        likelier: &[Guesser],
    ) -> Vec<Plan> {
        let with = |guesser: &dyn Fn(usize) -> Guesser| {
            let mut plans = plans.to_vec();
            for (i, plan) in plans.iter_mut().enumerate().filter(|(i, _)| grows[*i]) {
                plan.guesser = guesser(i);
            }
            self.best(streams, context, plans, grows)
        };
        let mut best = with(&|i| likelier[i]);
        if streams.iter().any(|s| s.has_head && s.copy.is_some()) {
            for all in Guesser::ALL {
                let other = with(&|_| all);
                if other.1 > best.1 {
                    best = other;
                }
            }
        }
        best.0
    }

    /// The lengths of most expected tokens a millisecond, from those of `plans` on, and these tokens a
    /// millisecond. Drafts of streams that may grow get longer by one guess at a time, the likeliest first.
    fn best(
        &self,
        streams: &[LengthInput<'_>],
        context: usize,
        mut plans: Vec<Plan>,
        grows: &[bool],
    ) -> (Vec<Plan>, f64) {
        // The chance that all of a stream's guesses so far are accepted.
        let mut reached = vec![1.0; streams.len()];
        let mut tokens = streams.len() as f64;
        for (i, stream) in streams.iter().enumerate() {
            for position in 0..plans[i].tokens {
                reached[i] *= self.chance(stream, plans[i].guesser, position);
                tokens += reached[i];
            }
        }
        let mut best = plans.clone();
        let mut best_rate = tokens / self.costs.with_drafts(context, &plans);
        loop {
            let next = (0..streams.len())
                .filter(|&i| grows[i] && plans[i].tokens < streams[i].most(plans[i].guesser))
                .map(|i| {
                    let chance = self.chance(&streams[i], plans[i].guesser, plans[i].tokens);
                    (i, reached[i] * chance)
                })
                .max_by(|a, b| a.1.total_cmp(&b.1));
            let Some((i, chance)) = next.filter(|n| n.1 > FAINT) else {
                return (best, best_rate);
            };
            plans[i].tokens += 1;
            reached[i] = chance;
            tokens += chance;
            let rate = tokens / self.costs.with_drafts(context, &plans);
            if rate > best_rate {
                best_rate = rate;
                best.copy_from_slice(&plans);
            }
        }
    }

    /// Who is to guess for `stream`: whoever is expected to have more tokens accepted.
    fn likelier(&self, stream: &LengthInput<'_>) -> Guesser {
        let expected = |guesser: Guesser| {
            let mut reached = 1.0;
            let each = (0..stream.most(guesser)).map(|position| {
                reached *= self.chance(stream, guesser, position);
                reached
            });
            each.sum::<f64>()
        };
        let (by_head, by_copy) = (expected(Guesser::Head), expected(Guesser::Ngram));
        match by_copy > by_head {
            true => Guesser::Ngram,
            false => Guesser::Head,
        }
    }

    /// The draft up to where it is rather accepted than not, of at least 1 token where there is
    /// room.
    fn likely(&self, stream: &LengthInput<'_>, guesser: Guesser) -> Plan {
        let mut reached = 1.0;
        let likely = |&position: &usize| {
            reached *= self.chance(stream, guesser, position);
            reached >= 0.5
        };
        let most = stream.most(guesser);
        let tokens = (0..most).take_while(likely).count().max(1).min(most);
        Plan { guesser, tokens }
    }

    /// Takes note of a stream's verified draft.
    pub fn verified(
        &mut self,
        ledger: &mut Ledger,
        guesser: Guesser,
        n_drafted: usize,
        n_accepted: usize,
    ) {
        // Copies are judged by `proposed`, whether they were drafts or not.
        if guesser == Guesser::Head {
            let own = &mut ledger.acceptance.head;
            own.learn(KEEP_STREAM, n_drafted, n_accepted);
            if n_drafted > 0 {
                let head = &mut self.acceptance.head;
                head.learn(KEEP_MODEL, n_drafted, n_accepted);
            }
        }
        ledger.verified(n_drafted, n_accepted);
    }

    /// Takes note of what a copy would have been worth, whether it was the draft or not: of its
    /// first `n_tested` tokens, before which the text is known, the first `n_right` are the text's.
    pub fn proposed(
        &mut self,
        ledger: &mut Ledger,
        matched: usize,
        n_tested: usize,
        n_right: usize,
    ) {
        let all = [
            (KEEP_STREAM, &mut ledger.acceptance),
            (KEEP_MODEL, &mut self.acceptance),
        ];
        for (keep, acceptance) in all {
            acceptance.copies(matched).learn(keep, n_tested, n_right);
        }
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
            drafts,
            ..
        } = *cost;
        let Some(plain) = self.costs.plain_step(context, streams) else {
            return;
        };
        if self.costs.is_believed(context, streams, rows, drafts) {
            let ms = self.costs.usual(context, streams, rows, drafts);
            ledger.enter(ms, emitted, plain);
        }
    }

    /// The chance that the guess at `position` of a draft by `guesser` is accepted if those before it are.
    fn chance(&self, stream: &LengthInput<'_>, guesser: Guesser, position: usize) -> f64 {
        let own = &stream.ledger.acceptance;
        let matched = stream.copy.map_or(0, |copy| copy.matched);
        let (all, own, first, least) = match guesser {
            Guesser::Head => (&self.acceptance.head, &own.head, FIRST_CHANCE, LEAST_PRIOR),
            Guesser::Ngram => {
                let first = FIRST_COPY[matched.min(FIRST_COPY.len() - 1)];
                let all = self.acceptance.of_copies(matched);
                (all, own.of_copies(matched), first, 0.0)
            }
        };
        let prior = (0..=position).fold(first, |prior, p| all.chance(p, prior));
        own.chance(position, prior.max(least))
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
            lengths.verified(&mut ledger, Guesser::Head, drafted, accepted);
            let next = lengths.choose(&[LengthInput {
                ledger: &ledger,
                wish: DraftLength::UpTo(6),
                room: 16,
                context: 100,
                has_head: true,
                copy: None,
            }])[0]
                .tokens;
            let (verify, draft) = ((world.step)(1 + drafted), (world.draft)(next));
            let ms = |ms: f64| Duration::from_secs_f64(ms / 1e3);
            let cost = RoundCost {
                streams: 1,
                rows: 1 + drafted,
                context: 100,
                drafts: guessed(next),
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

    fn guessed(guessed: usize) -> Longest {
        Longest { guessed, copied: 0 }
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
                lengths.verified(&mut Ledger::default(), Guesser::Head, 6, 6);
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
            lengths.verified(&mut good, Guesser::Head, 4, 4);
            lengths.verified(&mut bad, Guesser::Head, 4, 0);
        }
        for rows in 2..=10 {
            lengths.took(&RoundCost {
                streams: 2,
                rows,
                context: 9,
                drafts: guessed(rows / 2),
                verify: Duration::from_micros(1000 + 200 * rows as u64),
                draft: Duration::from_micros(10),
            });
        }
        let input = |ledger, wish| LengthInput {
            ledger,
            wish,
            room: 4,
            context: 9,
            has_head: true,
            copy: None,
        };
        let up_to = DraftLength::UpTo(4);
        let tokens = |plans: Vec<Plan>| plans.iter().map(|plan| plan.tokens).collect::<Vec<_>>();
        let chosen = tokens(lengths.choose(&[input(&bad, up_to), input(&good, up_to)]));
        assert_eq!(chosen, [0, 4]);
        // A fixed length is kept whatever it costs, and cut to the room.
        let chosen = tokens(lengths.choose(&[
            input(&bad, DraftLength::Fixed(9)),
            input(&good, DraftLength::UpTo(0)),
        ]));
        assert_eq!(chosen, [4, 0]);
        // From the first round on, when no cost is known and guesses of others were wrong.
        let mut unlucky = Lengths::default();
        for _ in 0..50 {
            unlucky.verified(&mut Ledger::default(), Guesser::Head, 4, 0);
        }
        let chosen = tokens(unlucky.choose(&[
            input(&Ledger::default(), DraftLength::Fixed(3)),
            input(&Ledger::default(), up_to),
        ]));
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
                has_head: true,
                copy: None,
            }])[0]
                .tokens
        };
        assert!(next(&lengths, &ledger) > 0);
        lengths.verified(&mut ledger, Guesser::Head, 3, 3);
        assert_eq!(next(&lengths, &ledger), 0);
    }

    /// What a stream chooses that may copy and has a head, where a guess of the head is right `head` of 10 times and a
    /// copied token `copy` of 10 times, and each takes `row` milliseconds to verify, the head's `draft` to
    /// draft: rounds that the head guessed for, rounds that were copied, and milliseconds a token.
    fn with_copies(head: u64, copy: u64, (row, draft): (f64, f64)) -> (usize, usize, f64) {
        let mut lengths = Lengths::default();
        let mut ledger = Ledger::default();
        let is_right = |round: u64, position: usize, of_ten: u64| {
            (round * 7 + 3 * position as u64) % 10 < of_ten
        };
        let mut plan = Plan::default();
        let (mut by_head, mut copied, mut ms, mut tokens) = (0, 0, 0.0, 0);
        for round in 0..600 {
            let first_wrong =
                |of_ten: u64, n: usize| (0..n).take_while(|&p| is_right(round, p, of_ten)).count();
            let of_ten = [head, copy][plan.guesser as usize];
            let accepted = first_wrong(of_ten, plan.tokens);
            lengths.verified(&mut ledger, plan.guesser, plan.tokens, accepted);
            let n_tested = 8.min(accepted + 1);
            lengths.proposed(&mut ledger, 4, n_tested, first_wrong(copy, n_tested));
            let next = lengths.choose(&[LengthInput {
                ledger: &ledger,
                wish: DraftLength::UpTo(8),
                room: 16,
                context: 100,
                has_head: true,
                copy: Some(Copy {
                    matched: 4,
                    tokens: 8,
                }),
            }])[0];
            let verify = 10.0 + row * plan.tokens as f64;
            let guessed = Longest::of([next]).guessed;
            let drafting = draft * guessed as f64;
            let cost = RoundCost {
                streams: 1,
                rows: 1 + plan.tokens,
                context: 100,
                drafts: Longest::of([next]),
                verify: Duration::from_secs_f64(verify / 1e3),
                draft: Duration::from_secs_f64(drafting / 1e3),
            };
            lengths.took(&cost);
            lengths.book(&mut ledger, &cost, accepted + 1);
            by_head += usize::from(guessed > 0);
            copied += usize::from(next.tokens > 0 && next.guesser == Guesser::Ngram);
            ms += verify + drafting;
            tokens += accepted + 1;
            plan = next;
        }
        (by_head, copied, ms / tokens as f64)
    }

    #[test]
    fn whoever_promises_more_tokens_a_millisecond_drafts() {
        let (by_head, copied, _) = with_copies(9, 1, (0.5, 1.0));
        assert!(by_head > 550 && copied < 30, "{by_head} {copied}");
        let (by_head, copied, _) = with_copies(2, 9, (0.5, 1.0));
        assert!(copied > 550 && by_head < 30, "{by_head} {copied}");
        // As good as the head, and it costs nothing.
        let (by_head, copied, _) = with_copies(9, 9, (0.5, 3.0));
        assert!(copied > 550 && by_head < 30, "{by_head} {copied}");
        // Neither pays.
        let (by_head, copied, ms) = with_copies(1, 1, (3.0, 3.0));
        assert!(by_head + copied < 60, "{by_head} {copied}");
        assert!(ms < 1.05 * 10.0, "{ms}");
    }

    #[test]
    fn streams_of_one_round_have_drafters_of_their_own() {
        let mut lengths = Lengths::default();
        let (mut copies, mut guesses) = (Ledger::default(), Ledger::default());
        for rows in [2, 4, 8, 12, 2, 4, 8, 12, 2, 4, 8, 12] {
            lengths.verified(&mut guesses, Guesser::Head, 4, 4);
            lengths.verified(&mut copies, Guesser::Head, 4, 0);
            lengths.proposed(&mut copies, 5, 8, 8);
            lengths.proposed(&mut guesses, 2, 1, 0);
            lengths.took(&RoundCost {
                streams: 2,
                rows,
                context: 9,
                drafts: guessed(rows / 3),
                verify: Duration::from_micros(10_000 + 100 * rows as u64),
                draft: Duration::from_micros(300 * (rows as u64 / 3)),
            });
        }
        let input = |ledger, matched| LengthInput {
            ledger,
            wish: DraftLength::UpTo(8),
            room: 16,
            context: 9,
            has_head: true,
            copy: Some(Copy { matched, tokens: 8 }),
        };
        let plans = lengths.choose(&[input(&copies, 5), input(&guesses, 2)]);
        assert_eq!(plans[0].guesser, Guesser::Ngram, "{plans:?}");
        assert_eq!(plans[1].guesser, Guesser::Head, "{plans:?}");
        assert!(plans.iter().all(|plan| plan.tokens >= 4), "{plans:?}");
    }
}
