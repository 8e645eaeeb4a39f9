//! Draft lengths on machines and texts that are made up.

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
        lengths.verified(&mut ledger, Guesser::HEAD, drafted, accepted);
        let next = lengths.choose(&[of_one_head(&ledger, 6)])[0].tokens;
        let (verify, draft) = ((world.step)(1 + drafted), (world.draft)(next));
        let ms = |ms: f64| Duration::from_secs_f64(ms / 1e3);
        let cost = RoundCost {
            streams: 1,
            rows: 1 + drafted,
            context: 100,
            experts: None,
            drafts: guessed(next),
            verify: ms(verify),
            draft: ms(draft),
            by_head: [None; MAX_HEADS],
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

/// What the draft of a stream with one head depends on, where up to `most` tokens are wanted.
fn of_one_head(ledger: &Ledger, most: usize) -> LengthInput<'_> {
    LengthInput {
        may_be_cut: false,
        ledger,
        wish: DraftLength::UpTo(most),
        room: 16,
        context: 100,
        heads: Guessers::heads(1),
        pinned: None,
        copy: None,
    }
}

fn guessed(guessed: usize) -> Longest {
    Longest::by(Guesser::HEAD, guessed)
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
            lengths.verified(&mut Ledger::default(), Guesser::HEAD, 6, 6);
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
        lengths.verified(&mut good, Guesser::HEAD, 4, 4);
        lengths.verified(&mut bad, Guesser::HEAD, 4, 0);
    }
    for rows in 2..=10 {
        lengths.took(&RoundCost {
            streams: 2,
            rows,
            context: 9,
            experts: None,
            drafts: guessed(rows / 2),
            verify: Duration::from_micros(1000 + 200 * rows as u64),
            draft: Duration::from_micros(10),
            by_head: [None; MAX_HEADS],
        });
    }
    let input = |ledger, wish| LengthInput {
        may_be_cut: false,
        ledger,
        wish,
        room: 4,
        context: 9,
        heads: Guessers::heads(1),
        pinned: None,
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
        unlucky.verified(&mut Ledger::default(), Guesser::HEAD, 4, 0);
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
    let next =
        |lengths: &Lengths, ledger: &Ledger| lengths.choose(&[of_one_head(ledger, 4)])[0].tokens;
    assert!(next(&lengths, &ledger) > 0);
    lengths.verified(&mut ledger, Guesser::HEAD, 3, 3);
    assert_eq!(next(&lengths, &ledger), 0);
}

/// What a stream chooses that may copy and has a head, where a guess of the head is right `head` of 10 times and a
/// copied token `copy` of 10 times, and each takes `row` milliseconds to verify, the head's `draft` to
/// draft: rounds that the head guessed for, rounds that were copied, and milliseconds a token.
fn with_copies(head: u64, copy: u64, (row, draft): (f64, f64)) -> (usize, usize, f64) {
    let mut lengths = Lengths::default();
    let mut ledger = Ledger::default();
    let is_right =
        |round: u64, position: usize, of_ten: u64| (round * 7 + 3 * position as u64) % 10 < of_ten;
    let mut plan = Plan::default();
    let (mut by_head, mut copied, mut ms, mut tokens) = (0, 0, 0.0, 0);
    for round in 0..600 {
        let first_wrong =
            |of_ten: u64, n: usize| (0..n).take_while(|&p| is_right(round, p, of_ten)).count();
        let of_ten = [head, copy][usize::from(plan.guesser == Guesser::Ngram)];
        let accepted = first_wrong(of_ten, plan.tokens);
        lengths.verified(&mut ledger, plan.guesser, plan.tokens, accepted);
        let n_tested = 8.min(accepted + 1);
        lengths.proposed(&mut ledger, 4, n_tested, first_wrong(copy, n_tested));
        let next = lengths.choose(&[LengthInput {
            may_be_cut: false,
            copy: Some(Copy {
                matched: 4,
                tokens: 8,
            }),
            ..of_one_head(&ledger, 8)
        }])[0];
        let verify = 10.0 + row * plan.tokens as f64;
        let guessed = Longest::of([next]).guessed();
        let drafting = draft * guessed as f64;
        let cost = RoundCost {
            streams: 1,
            rows: 1 + plan.tokens,
            context: 100,
            experts: None,
            drafts: Longest::of([next]),
            verify: Duration::from_secs_f64(verify / 1e3),
            draft: Duration::from_secs_f64(drafting / 1e3),
            by_head: [None; MAX_HEADS],
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
        lengths.verified(&mut guesses, Guesser::HEAD, 4, 4);
        lengths.verified(&mut copies, Guesser::HEAD, 4, 0);
        lengths.proposed(&mut copies, 5, 8, 8);
        lengths.proposed(&mut guesses, 2, 1, 0);
        lengths.took(&RoundCost {
            streams: 2,
            rows,
            context: 9,
            experts: None,
            drafts: guessed(rows / 3),
            verify: Duration::from_micros(10_000 + 100 * rows as u64),
            draft: Duration::from_micros(300 * (rows as u64 / 3)),
            by_head: [None; MAX_HEADS],
        });
    }
    let input = |ledger, matched| LengthInput {
        may_be_cut: false,
        context: 9,
        copy: Some(Copy { matched, tokens: 8 }),
        ..of_one_head(ledger, 8)
    };
    let plans = lengths.choose(&[input(&copies, 5), input(&guesses, 2)]);
    assert_eq!(plans[0].guesser, Guesser::Ngram, "{plans:?}");
    assert_eq!(plans[1].guesser, Guesser::HEAD, "{plans:?}");
    assert!(plans.iter().all(|plan| plan.tokens >= 4), "{plans:?}");
}

/// The lengths that one stream of a mixture of 64 experts chooses in the second half of 400 rounds, nine of ten of whose
/// guesses are right. A step takes 2 ms, 0.1 for each row and 0.8 for each expert; row `i` of the text chooses the
/// experts from `chosen(i)` on. The device tells which, or not.
fn of_mixture(lengths: &mut Lengths, chosen: &dyn Fn(usize) -> usize, tells: bool) -> Vec<usize> {
    let mut ledger = Ledger::default();
    let (mut drafted, mut at) = (0, 0);
    let mut all = Vec::new();
    for round in 0..400u64 {
        let rows = 1 + drafted;
        let choices: Vec<backend::Choice> = (at..at + rows)
            .map(|row| [0, 1].map(|i| ((chosen(row) + i) % 64, 0.5)).to_vec())
            .collect();
        let mut marks = ExpertMarks::default();
        marks.push(64, &choices);
        let accepted = (0..drafted)
            .take_while(|&p| !(round * 7 + p as u64).is_multiple_of(10))
            .count();
        lengths.verified(&mut ledger, Guesser::HEAD, drafted, accepted);
        let text = TextRows {
            rows: 0..rows,
            kept: accepted + 1,
        };
        let experts = match tells {
            true => lengths.touched(&marks, &mut [(&mut ledger, text)]),
            false => marks.union(0..rows).len(),
        } as f64;
        let next = lengths.choose(&[of_one_head(&ledger, 8)])[0].tokens;
        let cost = RoundCost {
            streams: 1,
            rows,
            context: 100,
            experts: tells.then_some(experts),
            drafts: guessed(next),
            verify: Duration::from_secs_f64((2.0 + 0.1 * rows as f64 + 0.8 * experts) / 1e3),
            draft: Duration::from_secs_f64(0.05e-3 * next as f64),
            by_head: [None; MAX_HEADS],
        };
        lengths.took(&cost);
        lengths.book(&mut ledger, &cost, accepted + 1);
        at += accepted + 1;
        drafted = next;
        all.push(next);
    }
    all.split_off(200)
}

#[test]
fn a_text_whose_rows_share_experts_has_longer_drafts() {
    let same = |_| 5;
    let scattered = |row: usize| 2 * row + 7 * (row / 32);
    let mut lengths = Lengths::default();
    // Texts take turns, so that what is known of steps is of both.
    let mut last = (0.0, 0.0);
    for _ in 0..3 {
        last.1 = mean(&of_mixture(&mut lengths, &scattered, true));
        last.0 = mean(&of_mixture(&mut lengths, &same, true));
    }
    assert!(last.0 > 5.0 && last.1 < 4.5, "{last:?}");
    let expert_ms = lengths.costs().expert_ms();
    assert!((0.6..0.85).contains(&expert_ms), "{expert_ms}");
}

#[test]
fn what_a_mixture_takes_goes_by_rows_where_the_device_does_not_tell() {
    let mut lengths = Lengths::default();
    let chosen = of_mixture(&mut lengths, &|_| 5, false);
    assert!(mean(&chosen) > 4.0, "{chosen:?}");
    assert_eq!(lengths.costs().expert_ms(), 0.0);
    assert!(
        lengths
            .costs()
            .points()
            .iter()
            .all(|point| point.experts == 0)
    );
}
