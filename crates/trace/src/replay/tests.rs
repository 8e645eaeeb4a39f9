use super::*;
use crate::schema::{HeadRound, Known, Model, Round, StreamRound};
use proptest::prelude::*;
use speculate::draft::NGRAM;

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

/// How often guesses of each drafter were accepted, by position.
fn acceptance(replay: &Replay) -> Vec<(&str, &[f64])> {
    let of = replay.by_drafter.iter();
    of.map(|of| (&*of.drafter, &*of.by_position)).collect()
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
    assert_eq!(acceptance(&replay), [("mtp", &[1.0, 1.0, 1.0][..])]);
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
    assert_eq!(acceptance(&replay), [("mtp", &[1.0, 0.0][..])]);
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
    let told = [("mtp", &[1.0, 1.0][..]), (NGRAM, &[0.0])];
    assert_eq!(acceptance(&replay), told);
    // The token behind two right guesses was guessed by nobody. The head would have, and is always right.
    let one = row(&replay, Lengths::Fixed, 1);
    assert_eq!(one.rounds, 40.0, "{one:?}");
    // Forced tokens are nobody's guesses.
    let mut forced = trace(&[(2, 2, 2); 9]);
    forced
        .rounds
        .iter_mut()
        .for_each(|round| round.streams[0].drafter = None);
    assert_eq!(super::replay(&forced, None).unwrap().by_drafter, []);
}

/// A trace of 160 rounds with drafts of 1 to 4 tokens in turn, which `mtp` and `dspark` make by turns: those of `mtp` are
/// right, of those of `dspark` the first token. A draft of `mtp` takes 0.5 ms a token, one of `dspark` 3 ms at any length,
/// and reading 0.25 ms.
fn two_heads() -> ModelTrace {
    let drafted = |i: usize| 1 + i / 2 % 4;
    let rounds: Vec<_> = (0..160)
        .map(|i| {
            (
                drafted(i),
                drafted(i),
                if i % 2 == 0 { drafted(i) } else { 1 },
            )
        })
        .collect();
    let mut both = trace(&rounds);
    both.model.drafters = vec!["mtp".to_owned(), "dspark".to_owned(), NGRAM.to_owned()];
    both.rounds[0].streams[0].left = Some(1000);
    for (i, round) in both.rounds.iter_mut().enumerate() {
        let stream = &mut round.streams[0];
        stream.expected_tokens = Some(2.5);
        let name = if i % 2 == 0 { "mtp" } else { "dspark" };
        stream.drafter = Some(name.to_owned());
        // The draft after the rows is the other's, and none after the last.
        let asked = if i + 1 < 160 { drafted(i + 1) } else { 0 };
        let (by_mtp, by_dspark) = match (asked, i % 2) {
            (0, _) => ((0, 0.0), (0, 0.0)),
            (n, 1) => ((n, draft(n)), (0, 0.25)),
            (n, _) => ((0, 0.25), (n, 3.0)),
        };
        round.heads = [by_mtp, by_dspark]
            .map(|(asked, ms)| HeadRound { asked, ms })
            .to_vec();
        round.draft_asked = asked;
        round.draft_ms = by_mtp.1 + by_dspark.1;
        (round.plain_ms, round.plain) = (Some(verify(1)), Some(Known::Measured));
    }
    both
}

#[test]
fn heads_are_told_apart() {
    let replay = replay(&two_heads(), None).unwrap();
    let [mtp, dspark] = &replay.by_drafter[..] else {
        panic!("{replay:?}");
    };
    assert_eq!((&*mtp.drafter, &*dspark.drafter), ("mtp", "dspark"));
    assert_eq!((mtp.rounds, mtp.drafted, mtp.accepted), (80, 200, 200));
    assert_eq!(
        (dspark.rounds, dspark.drafted, dspark.accepted),
        (80, 200, 80)
    );
    assert_eq!(mtp.by_position, [1.0; 4]);
    assert_eq!(dspark.by_position, [1.0, 0.0]);
    assert_eq!((mtp.tokens_per_round, dspark.tokens_per_round), (3.5, 2.0));
    assert_eq!(mtp.expected_tokens_per_round, Some(2.5));
    // The first draft was made beside the prompt, in no round of the trace.
    let (of_mtp, of_dspark) = (mtp.ms_per_draft.unwrap(), dspark.ms_per_draft.unwrap());
    assert!(
        close(of_mtp, 0.5 * 199.0 / 79.0) && close(of_dspark, 3.0),
        "{of_mtp} {of_dspark}"
    );
    assert!(close(mtp.ms_per_guess.unwrap(), 0.5), "{mtp:?}");
    assert!(
        close(dspark.ms_per_guess.unwrap(), 80.0 * 3.0 / 200.0),
        "{dspark:?}"
    );
    assert!(close(mtp.ms_reading.unwrap(), 80.0 * 0.25), "{mtp:?}");
    assert!(close(dspark.ms_reading.unwrap(), 79.0 * 0.25), "{dspark:?}");
    assert!(close(replay.ms_over_usual, 1.0), "{replay:?}");
}

#[test]
fn other_lengths_are_told_of_each_head_by_its_own_guesses_and_times() {
    let replay = replay(&two_heads(), None).unwrap();
    let row = |drafter: usize, lengths, draft| {
        let mut rows = replay.by_drafter[drafter].rows.iter();
        let row = rows.find(|row| row.lengths == lengths && row.draft == draft);
        *row.unwrap_or_else(|| panic!("{replay:?}"))
    };
    for (drafter, tokens) in [(0, [2.0, 3.0, 4.0, 5.0]), (1, [2.0; 4])] {
        let plain = row(drafter, Lengths::Plain, 0);
        assert_eq!((plain.tokens_per_round, plain.extrapolated), (1.0, 0.0));
        assert!(close(plain.ms_per_round, verify(1)), "{plain:?}");
        for n in 1..=4 {
            let fixed = row(drafter, Lengths::Fixed, n);
            let drafting = if drafter == 0 { draft(n) + 0.25 } else { 3.25 };
            let ms = verify(1 + n) + drafting;
            assert!(close(fixed.ms_per_round, ms), "{drafter} {n}: {fixed:?}");
            assert_eq!(fixed.tokens_per_round, tokens[n - 1], "{fixed:?}");
        }
        let recorded = row(drafter, Lengths::Recorded, 4);
        let told = &replay.by_drafter[drafter];
        assert_eq!(recorded.tokens_per_round, told.tokens_per_round);
        assert_eq!(recorded.extrapolated, 0.0);
    }
    // A quarter of the drafts had one token: what comes behind it is extrapolated.
    let two = row(0, Lengths::Fixed, 2);
    assert!(close(two.extrapolated, 20.0 / 160.0), "{two:?}");
}

#[test]
fn forced_tokens_are_no_guesses() {
    // One guess, which is right, and two forced tokens behind it.
    let mut trace = trace(&[(3, 3, 3); 40]);
    for round in &mut trace.rounds {
        let stream = &mut round.streams[0];
        (stream.forced, stream.forced_accepted, stream.guessed) = (2, 2, Some(1));
    }
    let replay = replay(&trace, None).unwrap();
    let mtp = &replay.by_drafter[0];
    assert_eq!((mtp.drafted, mtp.accepted), (40, 40));
    assert_eq!(mtp.by_position, [1.0]);
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
        round.streams[0].drafter = Some(NGRAM.to_owned());
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
        let (stretches, left_out) = stretches(&trace.rounds, &Names::of(&trace));
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
