//! Keys and values in every format of few bits: what is written depends on the format, and not on
//! drafts, or on where a text began.
//!
//! Heads of the tiny seeded models are smaller than a group of rotated columns, so these are the
//! trained ones.

use crate::disk::assert_files_change_nothing;
use crate::long::{assert_lossless_over_splits, assert_lossless_past_4k};
use crate::samplings;
use crate::subjects::{Draft, TRAINED, greedy_prompts};
use crate::writing::{Setup, assert_same_with_drafts, backend, best_cpu, plan};
use backend::Backend;
use cache::KvPlan;
use cpu::Isa;
use speculate::DraftLength::{Fixed, UpTo};
use std::sync::Arc;

/// Each format that rotates, and each of fifth bits, as that of keys and of values, and plans in which layers have
/// different ones.
const PLANS: [&str; 10] = [
    "turbo4",
    "turbo3",
    "turbo2",
    "rot-q8_0,rot-q4_0",
    "rot-q5_0,turbo2",
    "rot-q4_0,rot-q5_0",
    "q5_0",
    "turbo4,rot-q8_0",
    "turbo3,turbo2,protect=1:rot-q5_0/turbo4",
    "turbo4,turbo3,protect=2:q8_0/turbo4,window=q8_0,gqa=6",
];

/// Two for tests that take formats in turn.
pub(crate) fn two() -> [KvPlan; 2] {
    [plan("turbo4,turbo3,protect=1"), plan("rot-q4_0,turbo2")]
}

#[test]
fn speculation_never_changes_a_token_in_any_format_of_keys_and_values() {
    let isas = Isa::available();
    assert_lossless_in_formats(&[1, 2].map(|threads| backend(*isas.last().unwrap(), threads)));
}

/// Asserts that the trained subjects write the same with every drafter as by plain decoding, with keys and
/// values by each of [`PLANS`], on one of `backends` as on the other.
pub(crate) fn assert_lossless_in_formats(backends: &[Arc<dyn Backend>; 2]) {
    let drafts = [
        (Draft::Head, Fixed(3), 64, 2),
        (Draft::Eagle3, UpTo(8), 33, 3),
        (Draft::Block, Fixed(7), 512, 1),
        (Draft::Model, Fixed(4), 33, 3),
        (Draft::Ngram, Fixed(5), 7, 3),
        (Draft::Portfolio, UpTo(8), 64, 1),
        (Draft::Oracle, Fixed(8), 512, 3),
    ];
    for &subject in TRAINED {
        let name = subject.target.strip_prefix("models/").unwrap();
        let prompts = &greedy_prompts(name)[..3];
        let (mut texts, mut drafted) = (Vec::new(), 0);
        for (p, text) in PLANS.into_iter().enumerate() {
            let kv_format = plan(text);
            let (what, sampling) = &samplings()[p % 3];
            let plain = Setup {
                kv_format,
                ..Setup::plain(subject, &backends[p % 2])
            };
            // Each plan with every other drafter, and each drafter with keys of every kind.
            let cells = drafts.into_iter().enumerate();
            let cells = cells.filter(|(d, cell)| (p + d) % 2 == 0 || cell.0 == Draft::Head);
            let sampling = (*what, sampling);
            let (want, n, _) =
                assert_same_with_drafts(&plain, backends, cells, prompts, sampling, p);
            drafted += n;
            texts.push(want);
        }
        assert!(drafted > 100, "{name} has drafted");
        // Plans three apart are sampled alike, so it is their formats that tell them apart.
        for (a, b) in texts.iter().zip(&texts[3..]) {
            assert_ne!(a, b, "{name}: another format, other logits");
        }
    }
}

#[test]
fn speculation_never_changes_a_token_of_a_long_context_in_rotated_formats() {
    let best = best_cpu();
    for (s, &subject) in TRAINED.iter().enumerate().step_by(2) {
        assert_lossless_over_splits(s, subject, &two(), &best);
    }
}

#[test]
fn speculation_never_changes_a_token_past_4k_tokens_in_compressed_formats() {
    let best = best_cpu();
    for (target, text) in [
        ("models/tiny-gemma4-e", "turbo4,turbo3,window=q8_0"),
        ("models/tiny-qwen3.5-moe", "q8_0,turbo4"),
    ] {
        let subject = TRAINED.iter().find(|subject| subject.target == target);
        assert_lossless_past_4k(*subject.unwrap(), plan(text), &best);
    }
}

#[test]
fn a_beginning_from_a_file_changes_nothing_in_rotated_formats() {
    let best = best_cpu();
    for (s, &subject) in TRAINED.iter().enumerate() {
        assert_files_change_nothing(s, subject, &two(), &best);
    }
}
