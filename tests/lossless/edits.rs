//! Penalties, DRY, biases and what is suppressed: edits of logits on a device make the host's texts,
//! with speculation and without.

use crate::subjects::{Draft, Subject, TINY, TRAINED, greedy_prompts, prompts, vocab};
use crate::writing::{Setup, Text, assert_same, best_cpu, one_thread, write};
use crate::{samplings, shaped};
use backend::Backend;
use cache::KvPlan;
use speculate::DraftLength::{Fixed, UpTo};
use speculate::Sampling;
use speculate::sample::Breakers;
use std::sync::Arc;
use suites::Recorder;

/// Every way of editing logits, alone and together, and what the host chooses beside it.
fn editing(vocab: u32) -> Vec<(&'static str, Sampling)> {
    let base = Sampling {
        temperature: 0.9,
        seed: 31,
        ..Sampling::default()
    };
    let repetition = Sampling {
        repetition_penalty: 1.3,
        ..base.clone()
    };
    let counts = Sampling {
        temperature: 0.0,
        presence_penalty: 0.4,
        frequency_penalty: -0.3,
        ..base.clone()
    };
    let dry = Sampling {
        top_k: 30,
        dry_multiplier: 1.5,
        dry_allowed_length: 1,
        dry_breakers: Breakers::new([vec![4], vec![7, 8]]),
        ..base.clone()
    };
    let lists = Sampling {
        top_p: 0.95,
        // Token 9 comes three times: its sums are rounded one after the other.
        logit_bias: vec![(9, 0.1), (3, 1.5), (9, 0.7), (5, -2.0), (9, -0.3)],
        suppress: vec![9, 11, 3],
        ..base.clone()
    };
    let early = Sampling {
        min_p: 0.02,
        min_tokens: 40,
        end_tokens: (0..vocab / 2).collect(),
        ..base.clone()
    };
    let coins = Sampling {
        xtc_probability: 0.4,
        xtc_threshold: 0.05,
        ..samplings()[2].1.clone()
    };
    let window = Sampling {
        repetition_penalty: 1.4,
        frequency_penalty: 0.3,
        // Reaches back into the prompt first, and soon no more.
        repeat_last_n: Some(12),
        ..base.clone()
    };
    let shapes = Sampling {
        repetition_penalty: 1.1,
        dynatemp_range: 0.7,
        dynatemp_exponent: 1.3,
        top_n_sigma: 2.0,
        top_p: 0.9,
        ..base.clone()
    };
    // Nothing is left to choose from: the lowest token, though edited rows give none.
    let nothing = Sampling {
        suppress: (0..vocab).collect(),
        repetition_penalty: 1.1,
        ..base
    };
    let [_, _, (penalties, all)] = samplings();
    let (every, shaped) = shaped();
    vec![
        ("repetition", repetition),
        ("counts", counts),
        ("DRY", dry),
        ("lists", lists),
        ("a least length", early),
        ("penalties and XTC", coins),
        ("penalties of the last tokens", window),
        ("dynamic temperature and sigma", shapes),
        ("nothing to choose from", nothing),
        (penalties, all),
        (every, shaped),
    ]
}

/// Asserts that texts of `subject` on `device` are those that the host chooses on `host`, which
/// computes the same logits.
fn assert_edits_are_the_hosts(
    s: usize,
    subject: Subject,
    device: &Arc<dyn Backend>,
    host: &Arc<dyn Backend>,
) {
    let prompts = match subject.target.strip_prefix("models/") {
        Some(name) => greedy_prompts(name)[..3].to_vec(),
        None => prompts(3, vocab(subject), 170 + s as u64),
    };
    for (i, (what, sampling)) in editing(vocab(subject)).into_iter().enumerate() {
        let is_empty = what == "nothing to choose from";
        let setup = |backend, draft, length, chunk, width| Setup {
            draft,
            length,
            chunk,
            width,
            // Constraints and edits of the same rows.
            constrained: (s + i) % 3 == 1 && !is_empty,
            kv_format: KvPlan::both(&quant::kv::BF16),
            ..Setup::plain(subject, backend)
        };
        let plain = setup(host, Draft::None, Fixed(0), 512, 2);
        let want = write(&plain, &prompts, 0, &sampling, &[]).texts;
        if is_empty {
            let is_lowest = |text: &Text| text.output().iter().all(|&token| token == 0);
            assert!(want.iter().all(is_lowest), "the lowest token");
        }
        let cases = [
            (Draft::None, Fixed(0), 64, 3),
            (Draft::Oracle, [UpTo(8), Fixed(5)][i % 2], 33, [3, 1][i % 2]),
            (Draft::Head, Fixed(3), 64, 2),
            (Draft::Eagle3, Fixed(2), 64, 3),
            (Draft::Ngram, Fixed(5), 7, 2),
            (Draft::Block, Fixed(4), 33, 3),
        ];
        for (c, (draft, length, chunk, width)) in cases.into_iter().enumerate() {
            let lacks = subject.lacks(draft);
            // Of the drafters one a sampling, in turn.
            if lacks || c > 1 && !(c + i + s).is_multiple_of(3) {
                continue;
            }
            let setup = setup(device, draft, length, chunk, width);
            let got = write(&setup, &prompts, 0, &sampling, &want);
            assert_same(&setup, what, &got, &want);
            if draft == Draft::Oracle {
                assert!(got.accepted > 0, "{what}: some guesses are right");
            }
        }
    }
}

#[test]
fn edits_on_a_device_make_the_texts_of_the_host() {
    let host: Arc<dyn Backend> = best_cpu();
    let device: Arc<dyn Backend> = Arc::new(Recorder::choosing(Box::new(one_thread())));
    for (s, &subject) in TINY.iter().enumerate() {
        assert_edits_are_the_hosts(s, subject, &device, &host);
    }
    assert_edits_are_the_hosts(0, TRAINED[0], &device, &host);
}

/// Asserts that rows edited on `device`, a GPU, give the texts of rows edited on `host`.
pub(crate) fn assert_edits_hold(device: &Arc<dyn Backend>, host: &Arc<dyn Backend>) {
    for (s, &subject) in TINY.iter().chain(TRAINED).enumerate() {
        assert_edits_are_the_hosts(s, subject, device, host);
    }
}
