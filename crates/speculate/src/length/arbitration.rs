//! Who guesses where a model has several heads, on machines and texts that are made up.

use super::*;
use std::time::Duration;

/// One head on a made-up machine.
#[derive(Clone, Copy)]
struct Head<'a> {
    /// Milliseconds of a draft, by its tokens.
    draft: &'a dyn Fn(usize) -> f64,
    /// Milliseconds of reading what another one has drafted.
    reading: f64,
    /// Whether the guess at a position of a round is right.
    right: &'a dyn Fn(u64, usize) -> bool,
}

/// What came of a text.
struct Outcome {
    /// Rounds that each head has drafted for.
    rounds: [usize; MAX_HEADS],
    /// Rounds that each head has drafted for in the second half.
    later: [usize; MAX_HEADS],
    /// Milliseconds a token.
    pace: f64,
}

const STEP_MS: f64 = 10.0;
/// Milliseconds of each row after the first.
const ROW_MS: f64 = 0.3;

/// Costs of all drafts of `heads`, as calibration measures them.
fn calibrated(heads: &[Head<'_>]) -> Lengths {
    let mut lengths = Lengths::default();
    for _ in 0..4 {
        for tokens in [0, 1, 3, 7] {
            for h in 0..heads.len() {
                let plan = Plan {
                    guesser: Guesser::Head(h),
                    tokens,
                };
                lengths.took(&cost(heads, tokens, plan));
            }
        }
    }
    lengths
}

/// A round that verifies `drafted` tokens and is followed by the draft of `next`.
fn cost(heads: &[Head<'_>], drafted: usize, next: Plan) -> RoundCost {
    let ms = |ms: f64| Duration::from_secs_f64(ms / 1e3);
    let mut by_head = HeadTimes::default();
    for (h, head) in heads.iter().enumerate() {
        let is_guesser = next.guesser == Guesser::Head(h);
        by_head[h] = Some(ms(match next.tokens {
            0 => 0.0,
            n if is_guesser => (head.draft)(n),
            _ => head.reading,
        }));
    }
    RoundCost {
        streams: 1,
        rows: 1 + drafted,
        context: 100,
        experts: None,
        drafts: Longest::of([next]),
        verify: ms(STEP_MS + ROW_MS * drafted as f64),
        draft: by_head.into_iter().flatten().sum(),
        by_head,
    }
}

/// Has `heads` draft for a text of `n` rounds.
fn run(heads: &[Head<'_>], lengths: &mut Lengths, n: u64) -> Outcome {
    let mut ledger = Ledger::default();
    let mut plan = Plan::default();
    let (mut ms, mut tokens) = (0.0, 0);
    let mut outcome = Outcome {
        rounds: [0; MAX_HEADS],
        later: [0; MAX_HEADS],
        pace: 0.0,
    };
    for round in 0..n {
        let Guesser::Head(by) = plan.guesser else {
            unreachable!("nothing is copied")
        };
        let is_right = |&position: &usize| (heads[by].right)(round, position);
        let accepted = (0..plan.tokens).take_while(is_right).count();
        lengths.verified(&mut ledger, plan.guesser, plan.tokens, accepted);
        let next = lengths.choose(&[LengthInput {
            may_be_cut: false,
            ledger: &ledger,
            wish: DraftLength::UpTo(7),
            room: 16,
            context: 100,
            heads: Guessers::heads(heads.len()),
            pinned: None,
            copy: None,
        }])[0];
        let cost = cost(heads, plan.tokens, next);
        lengths.took(&cost);
        lengths.book(&mut ledger, &cost, accepted + 1);
        ms += (cost.verify + cost.draft).as_secs_f64() * 1e3;
        tokens += accepted + 1;
        if let Guesser::Head(head) = next.guesser
            && next.tokens > 0
        {
            outcome.rounds[head] += 1;
            outcome.later[head] += usize::from(round >= n / 2);
        }
        plan = next;
    }
    outcome.pace = ms / tokens as f64;
    outcome
}

fn often(round: u64, position: usize) -> bool {
    !(round * 7 + 3 * position as u64).is_multiple_of(5)
}

fn never(_: u64, _: usize) -> bool {
    false
}

const ALWAYS: Head<'_> = Head {
    draft: &|n| 0.4 * n as f64,
    reading: 0.05,
    right: &|_, _| true,
};

/// As right as [`ALWAYS`], and ten times as dear.
const DEAR: Head<'_> = Head {
    draft: &|n| 4.0 * n as f64,
    ..ALWAYS
};

const NEVER: Head<'_> = Head {
    right: &never,
    ..ALWAYS
};

#[test]
fn a_head_that_is_always_right_and_cheap_is_used_wherever_it_stands() {
    let often = Head {
        right: &often,
        ..ALWAYS
    };
    for (heads, best) in [
        ([often, ALWAYS], 1),
        ([ALWAYS, often], 0),
        ([DEAR, ALWAYS], 1),
        ([ALWAYS, DEAR], 0),
    ] {
        let outcome = run(&heads, &mut calibrated(&heads), 1000);
        let later = outcome.later;
        assert!(later[best] > 470, "{later:?}");
        let alone = run(&[ALWAYS], &mut calibrated(&[ALWAYS]), 1000);
        let share = outcome.pace / alone.pace;
        assert!(share < 1.08, "{share} of its time alone");
    }
}

#[test]
fn a_head_that_is_never_right_is_tried_rarely_and_costs_little() {
    let often = Head {
        right: &often,
        ..ALWAYS
    };
    let alone = run(&[often], &mut calibrated(&[often]), 4000);
    for (heads, wrong) in [([NEVER, often], 0), ([often, NEVER], 1)] {
        // The model's record is splendid, so that only this text shows what the guesses are worth.
        let mut lengths = calibrated(&heads);
        for _ in 0..300 {
            lengths.verified(&mut Ledger::default(), Guesser::Head(wrong), 6, 6);
        }
        let outcome = run(&heads, &mut lengths, 4000);
        assert!(outcome.later[wrong] <= 8, "{:?}", outcome.later);
        assert!(outcome.rounds[wrong] >= 2, "{:?}", outcome.rounds);
        // What it takes to read what the other one has written is part of it.
        let share = outcome.pace / alone.pace;
        assert!(share < 1.03, "{share} of the time without it");
    }
}

#[test]
fn heads_that_are_never_right_cost_a_bounded_time() {
    for dear in [0.4, 4.0] {
        let draft = |n: usize| dear * n as f64;
        let never = Head {
            draft: &draft,
            ..NEVER
        };
        let heads = [never, never, never];
        let mut lengths = calibrated(&heads);
        for head in (0..3).map(Guesser::Head) {
            for _ in 0..1000 {
                lengths.verified(&mut Ledger::default(), head, 6, 6);
            }
        }
        let outcome = run(&heads, &mut lengths, 2000);
        let total = outcome.pace * 2000.0;
        let one_round = ROW_MS * 7.0 + dear * 7.0;
        let bound = LOSS_STEPS * STEP_MS + LOSS_SHARE * total + 5.0 * one_round;
        let lost = total - 2000.0 * STEP_MS;
        assert!(lost <= bound, "{lost} of {bound}");
    }
}

#[test]
fn a_head_whose_text_has_come_is_found_again() {
    let early = Head {
        right: &|round, _| round < 1000,
        ..ALWAYS
    };
    let late = Head {
        right: &|round, _| round >= 1000,
        ..ALWAYS
    };
    let heads = [early, late];
    let outcome = run(&heads, &mut calibrated(&heads), 4000);
    assert!(outcome.rounds[0] > 900, "{:?}", outcome.rounds);
    assert!(outcome.later[1] > 1900, "{:?}", outcome.later);
    // Beside one that is right now and then, and pays, it is found by tries alone.
    let seldom = Head {
        right: &|round, p| (round * 7 + 3 * p as u64) % 10 < 4,
        ..ALWAYS
    };
    let heads = [seldom, late];
    let outcome = run(&heads, &mut calibrated(&heads), 4000);
    assert!(outcome.rounds[0] > 900, "{:?}", outcome.rounds);
    assert!(outcome.later[1] > 1900, "{:?}", outcome.later);
}

#[test]
fn a_pinned_guesser_drafts_where_it_can() {
    let lengths = Lengths::default();
    let ledger = Ledger::default();
    let plan = |pinned, n_heads| {
        lengths.choose(&[LengthInput {
            may_be_cut: false,
            ledger: &ledger,
            wish: DraftLength::Fixed(3),
            room: 16,
            context: 9,
            heads: Guessers::heads(n_heads),
            pinned: Some(pinned),
            copy: Some(Copy {
                matched: 4,
                tokens: 2,
            }),
        }])[0]
    };
    let by = |guesser, tokens| Plan { guesser, tokens };
    assert_eq!(plan(Guesser::Head(1), 2), by(Guesser::Head(1), 3));
    assert_eq!(plan(Guesser::HEAD, 2), by(Guesser::HEAD, 3));
    assert_eq!(plan(Guesser::Ngram, 2), by(Guesser::Ngram, 2));
    // A head that there is not leaves the choice to the others.
    assert_eq!(plan(Guesser::Head(1), 1), by(Guesser::HEAD, 3));
}

#[test]
fn those_that_can_guess_take_turns() {
    let ledger = Ledger::default();
    let turns = |n_heads, tokens, room| {
        let input = LengthInput {
            may_be_cut: false,
            ledger: &ledger,
            wish: DraftLength::Fixed(3),
            room,
            context: 9,
            heads: Guessers::heads(n_heads),
            pinned: None,
            copy: (tokens > 0).then_some(Copy { matched: 4, tokens }),
        };
        [4, 5, 6, 7].map(|round| input.in_turn(round))
    };
    let [first, second, copy] = [Guesser::Head(0), Guesser::Head(1), Guesser::Ngram].map(Some);
    assert_eq!(turns(2, 2, 16), [second, copy, first, second]);
    // Where there is nothing to copy, the heads go on without.
    assert_eq!(turns(2, 0, 16), [first, second, first, second]);
    assert_eq!(turns(0, 0, 16), [None; 4]);
    assert_eq!(turns(2, 2, 0), [None; 4]);
}

#[test]
fn streams_of_one_round_may_have_heads_of_their_own() {
    let heads = [ALWAYS, ALWAYS];
    let mut lengths = calibrated(&heads);
    let (mut first, mut second) = (Ledger::default(), Ledger::default());
    for _ in 0..50 {
        for (ledger, right) in [(&mut first, 0), (&mut second, 1)] {
            for head in 0..2 {
                let accepted = if head == right { 6 } else { 0 };
                lengths.verified(ledger, Guesser::Head(head), 6, accepted);
            }
        }
    }
    let input = |ledger| LengthInput {
        may_be_cut: false,
        ledger,
        wish: DraftLength::UpTo(7),
        room: 16,
        context: 100,
        heads: Guessers::heads(2),
        pinned: None,
        copy: None,
    };
    let plans = lengths.choose(&[input(&first), input(&second)]);
    assert_eq!(plans[0].guesser, Guesser::Head(0), "{plans:?}");
    assert_eq!(plans[1].guesser, Guesser::Head(1), "{plans:?}");
    assert!(plans.iter().all(|plan| plan.tokens >= 4), "{plans:?}");
}
