//! What is found in texts that somebody has spoilt.

use super::cells::{Cell, Engagement, Plain, Prompted, Verdict, late_token, late_words};
use super::exit_code;
use super::features::{FEATURES, Mode};
use super::table::{Counts, Table};
use super::writing::{Run, Script, Written};
use engine::{Channel, DraftLength, DrafterCounts, FinishReason, Logprobs, WrittenToken};
use std::process::ExitCode;

const LENGTHS: &[Option<DraftLength>] = &[Some(DraftLength::Fixed(2)), None];

/// A text of six tokens.
fn text() -> Written {
    let token = |id: u32| WrittenToken {
        id,
        text: format!("{id} "),
        logprobs: Some(Logprobs {
            logprob: -0.5,
            top: Vec::new(),
        }),
    };
    Written {
        tokens: (0..6).map(|id| (Channel::Answer, token(id))).collect(),
        parts: vec![(Channel::Answer, "0 1 2 3 4 5 ".into())],
        calls: Vec::new(),
        finish: FinishReason::Length,
    }
}

/// What a feature has written twice without a drafter.
fn plain(feature: usize) -> Plain {
    let prompted = |kind| Prompted {
        kind,
        script: Script::default(),
        texts: vec![text(), text()],
    };
    Plain {
        feature: &FEATURES[feature],
        mode: Mode::Greedy,
        prompts: Ok(vec![prompted("prose"), prompted("code")]),
    }
}

/// The cell of a drafter that writes the same and then does as `spoil` says to run number n.
fn cell(feature: usize, spoil: impl Fn(usize, &mut Run)) -> Cell {
    joined(feature, &[], spoil)
}

/// The cell of a drafter in which `heads` are joined; it writes what plain decoding does, and then does as `spoil` says to
/// run number n.
fn joined(feature: usize, heads: &[&str], spoil: impl Fn(usize, &mut Run)) -> Cell {
    let mut n = 0;
    plain(feature).compare(("fake", heads), LENGTHS, &mut |_, _| {
        let mut run = Run {
            texts: vec![text(), text()],
            drafted: 10,
            accepted: 4,
            by_drafter: Vec::new(),
            cached: 1,
        };
        spoil(n, &mut run);
        n += 1;
        Ok(run)
    })
}

#[test]
fn a_stop_ends_a_text_late_also_one_that_repeats_itself() {
    assert_eq!(late_words("one two three four five six"), Some("five"));
    // Each word comes early, and so does each pair.
    let again = "a kite a kite a kite a kite a kite";
    let stop = late_words(again).unwrap();
    let end = again.find(stop).unwrap() + stop.len();
    assert!(end > again.len() * 2 / 3 && end < again.len(), "{stop}");
    assert_eq!(late_words("kite"), Some("kite"));
    assert_eq!(late_words(" \n"), None);
    assert_eq!(late_token(&[1, 2, 3, 1, 2, 4, 3, 5, 1]), Some(5));
    assert_eq!(late_token(&[1, 2, 1, 2, 1, 2]), None);
}

#[test]
fn equal_texts_are_equal() {
    let same = cell(0, |_, _| {});
    assert_eq!(
        (same.result, same.engagement),
        (Verdict::Equal, Engagement::Engaged)
    );
    assert_eq!((same.texts, same.drafted, same.accepted), (8, 40, 16));
    assert_eq!(exit_code(&[same]), ExitCode::SUCCESS);
    assert_eq!(exit_code(&[]), ExitCode::FAILURE);
}

#[test]
fn one_other_token_is_a_difference() {
    // In the second prompt's last run, the second text.
    let other = cell(0, |n, run| {
        if n == 3 {
            run.texts[1].tokens[4].1.id = 99;
        }
    });
    assert_eq!(other.result, Verdict::Differs);
    let first = other.difference.clone().unwrap();
    assert_eq!(
        (first.prompt, first.text, &*first.draft, first.token),
        ("code", 1, "auto", 4)
    );
    assert_eq!(exit_code(&[cell(0, |_, _| {}), other]), ExitCode::FAILURE);
}

#[test]
fn the_least_difference_of_anything_else_counts() {
    type Spoiler = fn(&mut Run);
    let spoilers: [(Spoiler, usize); 6] = [
        (
            |run| {
                let logprobs = run.texts[0].tokens[2].1.logprobs.as_mut().unwrap();
                logprobs.logprob = logprobs.logprob.next_up();
            },
            2,
        ),
        (|run| drop(run.texts[0].tokens.pop()), 5),
        (|run| run.texts[0].parts[0].1.push('x'), 6),
        (|run| run.texts[0].finish = FinishReason::Stop, 6),
        (|run| run.texts[0].calls.push("f".into()), 6),
        (|run| drop(run.texts.pop()), 0),
    ];
    for (i, (spoil, token)) in spoilers.into_iter().enumerate() {
        let other = cell(0, |_, run| spoil(run));
        assert_eq!(other.result, Verdict::Differs, "{i}");
        assert_eq!(other.difference.unwrap().token, token, "{i}");
    }
}

#[test]
fn a_cancelled_text_is_a_beginning() {
    let cancel = |tokens: usize, wrong: bool| {
        cell(0, |_, run| {
            let text = &mut run.texts[0];
            text.tokens.truncate(tokens);
            text.finish = FinishReason::Cancelled;
            if wrong {
                text.tokens[1].1.id = 99;
            }
        })
    };
    assert_eq!(cancel(3, false).result, Verdict::Equal);
    assert_eq!(cancel(3, true).difference.unwrap().token, 1);
    // Nobody has been cancelled who wrote to the end.
    assert_eq!(cancel(6, false).result, Verdict::Differs);
}

#[test]
fn a_cell_without_drafts_proves_nothing() {
    let idle = cell(0, |_, run| (run.drafted, run.accepted) = (0, 0));
    assert_eq!(idle.result, Verdict::NotEngaged);
    assert_eq!(exit_code(&[idle]), ExitCode::FAILURE);
    let wrong = cell(0, |_, run| run.accepted = 0);
    assert_eq!(
        (wrong.result, wrong.engagement),
        (Verdict::Equal, Engagement::Drafted)
    );
    let warm = FEATURES.iter().position(|f| f.name == "warm prefix");
    let cold = cell(warm.unwrap(), |_, run| run.cached = 0);
    assert_eq!(cold.result, Verdict::NotEngaged);
    let mut broken = plain(0);
    let failed = broken.compare(("fake", &[]), LENGTHS, &mut |_, _| Err("no memory".into()));
    assert_eq!(failed.result, Verdict::Failed);
    assert_eq!(exit_code(&[failed]), ExitCode::FAILURE);
    broken.prompts = Err("no tools".to_owned().into());
    let lacking = broken.compare(("fake", &[]), LENGTHS, &mut |_, _| unreachable!());
    assert_eq!(lacking.result, Verdict::NotApplicable);
    assert_eq!(exit_code(&[lacking]), ExitCode::SUCCESS);
}

#[test]
fn each_of_joined_heads_has_to_draft() {
    let cell = |second: &[&str]| {
        joined(0, &["mtp", "dspark"], |n, run| {
            let who = if n == 2 { second } else { &["mtp"] };
            let counts = |name: &&str| DrafterCounts {
                drafter: (*name).to_owned(),
                rounds: 2,
                drafted: 5,
                accepted: 1,
            };
            run.by_drafter = who.iter().map(counts).collect();
        })
    };
    let lame = cell(&["ngram"]);
    assert_eq!(lame.result, Verdict::NotEngaged);
    assert_eq!(lame.reason.as_deref(), Some("dspark drafted nothing"));
    let both = cell(&["mtp", "dspark"]);
    assert_eq!(both.result, Verdict::Equal);
    let by: Vec<(&str, u64)> = both
        .by_drafter
        .iter()
        .map(|of| (&*of.drafter, of.drafted))
        .collect();
    assert_eq!(by, [("mtp", 20), ("dspark", 5)]);
}

#[test]
fn the_table_says_what_differs() {
    let cells = [
        cell(0, |_, _| {}),
        Cell {
            mode: "sampled",
            ..cell(0, |_, run| run.texts[0].tokens[3].1.id = 7)
        },
    ];
    let table = Table::new(["fake"].into_iter(), ["temperature"].into_iter());
    let (head, row) = (table.head(), table.row(&cells));
    assert_eq!(head.find("greedy"), row.find("=="));
    assert_eq!(head.find("sampled"), row.find("differs at token 3"));
    assert!(
        row.ends_with("sampled: text 0 after `prose`, drafts of 2"),
        "{row}"
    );
    assert_eq!(
        Counts::of(&cells).line(),
        "2 cells: 1 == (1 engaged), 1 differ, 0 not engaged, 0 failed, 0 n/a"
    );
}
