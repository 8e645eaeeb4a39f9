use super::*;
use crate::schema::{Known, Model, Round, StreamRound};
use proptest::prelude::*;

/// Milliseconds of a round of `rows` rows, and of a draft of `n` tokens.
fn verify(rows: usize) -> f64 {
    10.0 + rows as f64
}

fn draft(n: usize) -> f64 {
    0.5 * n as f64
}

/// A trace of one text: rounds of tokens asked for, drafted and accepted.
fn trace(rounds: &[(usize, usize, usize)]) -> ModelTrace {
    let mut context = 100;
    let written: usize = rounds.iter().map(|(.., accepted)| accepted + 1).sum();
    let mut left = written;
    let line = |(i, &(asked, drafted, accepted)): (usize, &(usize, usize, usize))| {
        let next = rounds.get(i + 1).map_or(0, |next| next.0);
        let stream = StreamRound {
            request: 7,
            round: Some(i as u64 + 1),
            known: 1,
            context,
            left: Some(left),
            drafter: (drafted > 0).then(|| "mtp".to_owned()),
            asked,
            drafted,
            accepted,
            emitted: accepted + 1,
            ..StreamRound::default()
        };
        context += stream.emitted;
        left -= stream.emitted;
        Round {
            rows: 1 + drafted,
            draft_asked: next,
            verify_ms: verify(1 + drafted),
            draft_ms: draft(next),
            streams: vec![stream],
            ..Round::default()
        }
    };
    let model = Model {
        name: "tiny".into(),
        draft_max: 4,
        ..Model::default()
    };
    ModelTrace {
        model,
        rounds: rounds.iter().enumerate().map(line).collect(),
    }
}

fn row(replay: &Replay, lengths: Lengths, draft: usize) -> Row {
    let mut rows = replay.rows.iter();
    let row = rows.find(|row| row.lengths == lengths && row.draft == draft);
    *row.unwrap_or_else(|| panic!("{replay:?}"))
}

fn of(drafter: &str, by_position: &[f64]) -> Acceptance {
    Acceptance {
        drafter: drafter.to_owned(),
        by_position: by_position.to_vec(),
    }
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-6 * a.abs().max(b.abs()).max(1.0)
}

#[test]
fn shorter_drafts_are_told_by_longer_ones() {
    // 40 rounds of three guesses, all right, and a token of the target: 160 tokens.
    let trace = trace(&[(3, 3, 3); 40]);
    let replay = replay(&trace, None).unwrap();
    assert_eq!((replay.texts, replay.left_out), (1, 0));
    assert_eq!(replay.acceptance, [of("mtp", &[1.0, 1.0, 1.0])]);
    let recorded = row(&replay, Lengths::Recorded, 3);
    assert_eq!((recorded.tokens, recorded.rounds), (160, 40.0));
    let fixed = row(&replay, Lengths::Fixed, 3);
    assert_eq!((fixed.rounds, fixed.extrapolated), (40.0, 0.0));
    assert_eq!(fixed.untimed, 0.0);
    assert!(close(fixed.ms, recorded.ms), "{replay:?}");
    // One guess a round, and always right: two tokens.
    let one = row(&replay, Lengths::Fixed, 1);
    assert_eq!(
        (one.rounds, one.extrapolated, one.untimed),
        (80.0, 0.0, 1.0)
    );
    let plain = row(&replay, Lengths::Plain, 0);
    assert_eq!((plain.rounds, plain.ms_saved), (160.0, 0.0));
    // Four guesses, of which those behind the draft of their round were made by nobody: one, two, three
    // and all of them, in turn.
    let four = row(&replay, Lengths::Fixed, 4);
    assert!(
        close(four.rounds, 32.0) && close(four.extrapolated, 10.0 / 16.0),
        "{four:?}"
    );
}

#[test]
fn a_wrong_guess_ends_shorter_and_longer_drafts_alike() {
    let mut rounds = vec![(3, 3, 1); 40];
    rounds.extend([(0, 0, 0); 10]);
    let replay = replay(&trace(&rounds), None).unwrap();
    for n in [2, 3, 4] {
        let fixed = row(&replay, Lengths::Fixed, n);
        // What the plain rounds wrote was guessed by nobody: a first guess is right, a second is not.
        assert!((45.0..50.0).contains(&fixed.rounds), "{fixed:?}");
    }
    assert_eq!(replay.acceptance, [of("mtp", &[1.0, 0.0])]);
    let plain = row(&replay, Lengths::Plain, 0);
    assert!(close(plain.ms, 90.0 * verify(1)), "{plain:?}");
}

#[test]
fn acceptance_is_told_of_each_drafter() {
    // Guesses of the head are right, copies are wrong.
    let rounds: Vec<_> = (0..40)
        .map(|i| if i % 2 == 0 { (2, 2, 2) } else { (2, 2, 0) })
        .collect();
    let mut both = trace(&rounds);
    both.model.drafters = vec!["mtp".to_owned(), NGRAM.to_owned()];
    for round in both.rounds.iter_mut().skip(1).step_by(2) {
        round.streams[0].drafter = Some(NGRAM.to_owned());
    }
    let replay = replay(&both, None).unwrap();
    let told = [of("mtp", &[1.0, 1.0]), of(NGRAM, &[0.0])];
    assert_eq!(replay.acceptance, told);
    // The token behind two right guesses was guessed by nobody. The head would have, and is always right.
    let one = row(&replay, Lengths::Fixed, 1);
    assert_eq!(one.rounds, 40.0, "{one:?}");
    // Forced tokens are nobody's guesses.
    let mut forced = trace(&[(2, 2, 2); 9]);
    forced
        .rounds
        .iter_mut()
        .for_each(|round| round.streams[0].drafter = None);
    assert_eq!(super::replay(&forced, None).unwrap().acceptance, []);
}

#[test]
fn where_a_drafter_finds_nothing_a_longer_wish_brings_nothing() {
    // Asked for three, it has one, which is right.
    let asked = trace(&[(3, 1, 1); 30]);
    // Asked for the one that there was to copy.
    let mut copied = trace(&[(1, 1, 1); 30]);
    copied.model.drafters = vec![NGRAM.to_owned()];
    for round in &mut copied.rounds {
        (round.copy_asked, round.draft_asked) = (round.draft_asked, 0);
        round.streams[0].found = Some(1);
    }
    for trace in [asked, copied] {
        let replay = replay(&trace, Some(DraftLength::UpTo(6))).unwrap();
        for n in 1..=6 {
            let fixed = row(&replay, Lengths::Fixed, n);
            assert_eq!((fixed.rounds, fixed.extrapolated), (30.0, 0.0), "{fixed:?}");
        }
        let recorded = row(&replay, Lengths::Recorded, 1);
        let fixed = row(&replay, Lengths::Fixed, 1);
        assert!((recorded.ms - fixed.ms).abs() < 60.0, "{replay:?}");
    }
}

#[test]
fn the_chooser_takes_what_pays() {
    let rows = |right: bool| {
        // All kinds of rounds, so that all are timed; a draft costs little.
        let rounds = (0..400).map(|i| (i % 5, i % 5, if right { i % 5 } else { 0 }));
        let replay = replay(&trace(&rounds.collect::<Vec<_>>()), None).unwrap();
        let [adaptive, plain, four] = [
            (Lengths::Adaptive, 4),
            (Lengths::Plain, 0),
            (Lengths::Fixed, 4),
        ]
        .map(|(lengths, draft)| row(&replay, lengths, draft).ms);
        (adaptive, plain, four)
    };
    let (adaptive, plain, four) = rows(true);
    assert!(
        adaptive < 1.1 * four && adaptive < 0.5 * plain,
        "{adaptive} {plain} {four}"
    );
    // Never right: no more than the chooser's limit is lost.
    let (adaptive, plain, four) = rows(false);
    assert!(
        adaptive < 1.05 * plain && four > 1.3 * plain,
        "{adaptive} {plain} {four}"
    );
}

#[test]
fn rounds_beside_prompts_take_what_they_took() {
    let mut trace = trace(&[(2, 2, 2); 40]);
    trace.rounds[5].prefill = true;
    trace.rounds[5].verify_ms += 500.0;
    trace.rounds[5].streams.push(StreamRound {
        request: 8,
        prefill: true,
        known: 64,
        ..StreamRound::default()
    });
    let replay = replay(&trace, None).unwrap();
    let recorded = row(&replay, Lengths::Recorded, 2);
    let fixed = row(&replay, Lengths::Fixed, 2);
    assert!(close(recorded.ms, fixed.ms), "{replay:?}");
    let plain = row(&replay, Lengths::Plain, 0);
    assert!(plain.ms > 500.0 + 120.0 * verify(1) - 1.0, "{plain:?}");
    assert!(close(replay.ms_over_usual, 1.0));
}

#[test]
fn plain_rounds_take_what_the_engine_says_where_the_trace_has_none() {
    let mut trace = trace(&[(3, 3, 3); 40]);
    let guessed = row(&replay(&trace, None).unwrap(), Lengths::Plain, 0);
    // The nearest rounds have four rows.
    assert!(close(guessed.ms, 160.0 * verify(4)) && guessed.untimed == 1.0);
    for round in &mut trace.rounds {
        (round.plain_ms, round.plain) = (Some(verify(1)), Some(Known::Measured));
    }
    let told = row(&replay(&trace, None).unwrap(), Lengths::Plain, 0);
    assert!(close(told.ms, 160.0 * verify(1)), "{told:?}");
    assert_eq!(told.untimed, 0.0);
}

#[test]
fn a_missing_round_parts_a_text_and_a_preempted_one_is_left_out() {
    let mut trace = trace(&[(2, 2, 2); 40]);
    trace.rounds.remove(20);
    trace.rounds[30].streams[0].prefill = true;
    let replay = replay(&trace, None).unwrap();
    assert_eq!((replay.texts, replay.left_out), (3, 1));
    let recorded = row(&replay, Lengths::Recorded, 2);
    assert_eq!((recorded.tokens, recorded.rounds), (38 * 3, 38.0));
}

#[test]
fn a_trace_without_rounds_says_so() {
    let empty = trace(&[]);
    assert_eq!(replay(&empty, None), Err(ReplayError::NoRounds));
    let fixed = replay(&trace(&[(3, 3, 0); 9]), Some(DraftLength::Fixed(2))).unwrap();
    let lengths: Vec<usize> = fixed.rows.iter().map(|row| row.draft).collect();
    assert_eq!(lengths, [3, 0, 2]);
}

proptest! {
    /// Rounds of any lengths, replayed with the lengths that they had.
    #[test]
    fn recorded_lengths_give_what_was_recorded(
        rounds in prop::collection::vec((0usize..6, 0usize..6, 0usize..6), 1..200),
    ) {
        let rounds = rounds.into_iter().map(|(asked, drafted, accepted)| {
            let drafted = drafted.min(asked);
            (asked, drafted, accepted.min(drafted))
        });
        // The last draft has room for no more than the text.
        let mut rounds: Vec<_> = rounds.collect();
        if let Some(last) = rounds.last_mut() {
            let room = last.2;
            *last = (room, room, room);
        }
        for i in (0..rounds.len()).rev() {
            let left: usize = rounds[i..].iter().map(|round| round.2 + 1).sum();
            let (asked, drafted, accepted) = rounds[i];
            rounds[i] = (asked.min(left - 1), drafted.min(left - 1), accepted);
        }
        let trace = trace(&rounds);
        let (stretches, left_out) = stretches(&trace.rounds, false);
        prop_assert_eq!((stretches.len(), left_out), (1, 0));
        let fit = Fit::new(&trace.rounds, &stretches).unwrap();
        prop_assert!(close(fit.scale, 1.0));
        let sum = with_lengths(&fit, &stretches, |stretch, place| {
            let round = &stretch.rounds[place.round];
            round.asked.max(round.drafted)
        });
        let took: f64 = trace.rounds.iter().map(|round| round.verify_ms + round.draft_ms).sum();
        prop_assert_eq!((sum.rounds, sum.unknown), (rounds.len() as f64, 0.0));
        let guesses: usize = rounds.iter().map(|(_, drafted, accepted)| (accepted + 1).min(*drafted)).sum();
        prop_assert_eq!(sum.guesses, guesses as f64);
        prop_assert!(close(sum.ms, took), "{} {}", sum.ms, took);
    }
}
