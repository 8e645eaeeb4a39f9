//! Speculation on equals speculation off, with `==`.
//!
//! For every family, drafter, way of sampling, draft length, prefill chunk, batch
//! width, thread count, instruction set, and weights packed or left in their files:
//! the same tokens, and log-probabilities of them, as plain decoding with the whole
//! prompt in one step. The axes and the grids are in this file, the models in
//! `subjects`, a cell in `writing`.
//!
//! Tiny random models reach every path in little time, but their heads guess
//! nothing right; so drafts that are partly right come from [`writing::oracle`], which
//! knows the text and spoils some of it, and the small trained models of `models/`
//! draft with their own heads.

mod beside;
mod blocks;
mod bounded;
mod constrained;
mod crowd;
mod disk;
mod edge;
mod edits;
mod far;
mod formats;
mod gpu;
mod guesses;
mod heads;
mod kept;
mod long;
mod media;
mod mixed;
mod outputs;
mod packed;
mod pooled;
mod preempt;
mod reuse;
mod several;
mod share;
mod sound;
mod subjects;
mod writing;

use backend::{Backend, Batch, Reference};
use cache::KvPlan;
use cpu::Isa;
use speculate::DraftLength::{self, Fixed, UpTo};
use speculate::Sampling;
use speculate::sample::Breakers;
use std::collections::HashMap;
use std::sync::Arc;
use subjects::{ALONE, Draft, Subject, TINY, TRAINED, greedy_prompts, prompts, vocab};
use suites::{CODED, Recorder, repository};
use weights::Checkpoint;
use writing::{Setup, assert_same, backend, best_cpu, compressed, rotated, write};

const DRAFT_LENGTHS: &[DraftLength] = &[
    Fixed(0),
    Fixed(1),
    Fixed(2),
    Fixed(3),
    Fixed(5),
    Fixed(8),
    UpTo(8),
];
const CHUNKS: &[usize] = &[1, 7, 64, 512];
const WIDTHS: &[usize] = &[1, 3, 8];
const CONTEXT: usize = 384;
const MAX_TOKENS: usize = 128;

fn samplings() -> [(&'static str, Sampling); 3] {
    [
        ("greedy", Sampling::default()),
        (
            "T=0.7 top-p 0.9",
            Sampling {
                temperature: 0.7,
                top_p: 0.9,
                seed: 17,
                ..Sampling::default()
            },
        ),
        (
            "T=1 with penalties",
            Sampling {
                temperature: 1.0,
                repetition_penalty: 1.2,
                presence_penalty: 0.3,
                frequency_penalty: 0.2,
                logit_bias: vec![(3, 1.5), (5, -2.0)],
                seed: 99,
                ..Sampling::default()
            },
        ),
    ]
}

/// Every sampler that the others leave out.
fn shaped() -> (&'static str, Sampling) {
    let sampling = Sampling {
        temperature: 1.1,
        dynatemp_range: 0.6,
        dynatemp_exponent: 1.2,
        top_n_sigma: 3.0,
        top_k: 60,
        typical_p: 0.95,
        min_p: 0.001,
        xtc_probability: 0.5,
        xtc_threshold: 0.08,
        dry_multiplier: 0.8,
        dry_allowed_length: 1,
        dry_penalty_last_n: Some(40),
        dry_breakers: Breakers::new([vec![4], vec![7, 8]]),
        min_tokens: 60,
        end_tokens: vec![6, 9, 11],
        seed: 5,
        ..Sampling::default()
    };
    ("T=1.1 with every sampler", sampling)
}

// The grid of tiny models is several tests, which run at the same time: it takes longer than all others together.

#[test]
fn speculation_never_changes_a_token_of_a_tiny_gemma4() {
    assert_lossless_over_grid(|s| s.whole_grid && s.target.contains("gemma4"));
}

#[test]
fn speculation_never_changes_a_token_of_a_tiny_qwen3_5() {
    assert_lossless_over_grid(|s| s.whole_grid && !s.target.contains("gemma4"));
}

#[test]
fn speculation_never_changes_a_token_of_other_tiny_models() {
    assert_lossless_over_grid(|s| !s.whole_grid);
}

/// Asserts that those of [`TINY`] that are `chosen` write in every cell what they write without drafts.
fn assert_lossless_over_grid(chosen: impl Fn(&Subject) -> bool) {
    let n_prompts = 208;
    let mut cells = 0;
    let mut texts = 0;
    let mut accepted: HashMap<(&str, Draft), (u64, u64)> = HashMap::new();
    let backends: Vec<(Isa, Arc<dyn Backend>)> = Isa::available()
        .into_iter()
        .flat_map(|isa| [1, 2].map(|threads| (isa, backend(isa, threads))))
        .collect();
    let mut grid = Vec::new();
    for d in 0..DRAFT_LENGTHS.len() {
        for c in 0..CHUNKS.len() {
            for k in 0..backends.len() {
                let ngrams = if (d + c + k) % 2 == 0 {
                    Draft::Ngram
                } else {
                    Draft::Portfolio
                };
                let drafts = [
                    Draft::Head,
                    Draft::Eagle3,
                    Draft::Block,
                    Draft::Model,
                    ngrams,
                    Draft::Oracle,
                ];
                grid.extend(drafts.map(|draft| (d, c, k, draft)));
            }
        }
    }
    for (s, &subject) in TINY.iter().enumerate().filter(|(_, s)| chosen(s)) {
        let prompts = prompts(n_prompts, vocab(subject), s as u64);
        let ways = samplings().into_iter().chain([shaped()]);
        for (w, (what, sampling)) in ways.enumerate() {
            let plain = |kv_format| Setup {
                kv_format,
                ..Setup::plain(subject, &backends.last().unwrap().1)
            };
            let mut formats = vec![
                KvPlan::both(&quant::kv::F32),
                KvPlan::both(&quant::kv::BF16),
            ];
            // The others, EAGLE-3 heads and block drafters have heads smaller than a block.
            if subject.target.contains("qwen") {
                formats.push(compressed());
            }
            let truth: Vec<_> = formats
                .into_iter()
                .map(|kv| (kv, write(&plain(kv), &prompts, 0, &sampling, &[]).texts))
                .collect();
            // The grid's axes vary together: each cell takes the next few prompts.
            let mut next = 0;
            for (g, &(d, c, k, draft)) in grid.iter().enumerate() {
                // The last two ways of sampling share the cells of one.
                if w >= 2 && (g / 4 + g) % 2 != w % 2 {
                    continue;
                }
                let (length, chunk) = (DRAFT_LENGTHS[d], CHUNKS[c]);
                let (isa, backend) = &backends[k];
                let every = match (subject.whole_grid, draft) {
                    (true, Draft::Eagle3 | Draft::Block | Draft::Model) => 3,
                    (true, _) => 1,
                    (false, _) => 5,
                };
                let thinned = !(d + 5 * c + 7 * k).is_multiple_of(every);
                if thinned || subject.lacks(draft) {
                    continue;
                }
                // The scalar path takes twenty times as long.
                let n = if *isa == Isa::Scalar { 1 } else { 3 };
                let first = if next + n > n_prompts { 0 } else { next };
                let range = first..first + n;
                next = range.end;
                let formats = if matches!(draft, Draft::Eagle3 | Draft::Block) {
                    2
                } else {
                    truth.len()
                };
                let (kv_format, truth) = &truth[(d + c + k) % formats];
                let width = WIDTHS[(d + k + c) % WIDTHS.len()];
                let setup = Setup {
                    subject,
                    backend,
                    draft,
                    length,
                    chunk,
                    width,
                    kv_format: *kv_format,
                    context: CONTEXT,
                    shortlist: (d + c) % 2 == 1,
                    mapped: (d + k) % 3 == 1,
                    constrained: false,
                };
                let (first, want) = (range.start, &truth[range.clone()]);
                let got = write(&setup, &prompts[range], first, &sampling, want);
                assert_same(&setup, what, &got, want);
                let entry = accepted.entry((subject.target, draft)).or_default();
                entry.0 += got.drafted;
                entry.1 += got.accepted;
                cells += 1;
                texts += n;
            }
        }
    }
    assert!(cells > 0, "a subject is chosen");
    println!("{cells} cells, {texts} texts of up to {MAX_TOKENS} tokens");
    for ((target, draft), (drafted, accepted)) in &accepted {
        println!("{target} {draft:?}: {accepted} of {drafted} accepted");
        assert!(*drafted > 1000, "{target} {draft:?} has drafted");
        let subject = TINY.iter().find(|s| s.target == *target).unwrap();
        if *draft == Draft::Model && subject.drafts_for_itself() {
            assert_eq!(accepted, drafted, "{target} knows what it writes");
        }
        if matches!(draft, Draft::Oracle | Draft::Ngram) {
            assert!(
                0 < *accepted && accepted < drafted,
                "{target} {draft:?}: some are accepted, some are not"
            );
        }
    }
}

#[test]
fn speculation_never_changes_a_token_of_a_trained_model() {
    for &subject in TRAINED {
        let name = subject.target.strip_prefix("models/").unwrap();
        let prompts = greedy_prompts(name);
        assert!(prompts.len() >= 15, "{name} has prompts");
        let best = Isa::available().pop().unwrap();
        let backends = [backend(best, 2), backend(best, 1)];
        for (s, (what, sampling)) in samplings().into_iter().enumerate() {
            let setup = |draft, length, chunk, width, backend| Setup {
                subject,
                backend,
                draft,
                length,
                chunk,
                width,
                kv_format: [
                    rotated("turbo4"),
                    compressed(),
                    KvPlan::both(&quant::kv::BF16),
                ][s],
                context: CONTEXT,
                shortlist: s == 1,
                mapped: draft != Draft::None && s != 1,
                constrained: false,
            };
            let plain = setup(Draft::None, Fixed(0), 512, 1, &backends[0]);
            let want = write(&plain, &prompts, 0, &sampling, &[]).texts;
            let mut cases = vec![
                (
                    Draft::Head,
                    [Fixed(3), UpTo(8), Fixed(1)][s],
                    [64, 512, 7][s],
                    [1, 3, 8][s],
                ),
                (Draft::Ngram, Fixed(5), 33, [8, 1, 3][s]),
                (
                    Draft::Portfolio,
                    [UpTo(8), Fixed(6), UpTo(16)][s],
                    [33, 512, 64][s],
                    [3, 1, 8][s],
                ),
            ];
            if subject.eagle3.is_some() {
                cases.push((
                    Draft::Eagle3,
                    [UpTo(8), Fixed(2), Fixed(3)][s],
                    64,
                    [3, 8, 1][s],
                ));
            }
            if subject.block.is_some() {
                cases.push((
                    Draft::Block,
                    [UpTo(8), Fixed(7), Fixed(3)][s],
                    [512, 33, 7][s],
                    [1, 3, 8][s],
                ));
            }
            cases.push((
                Draft::Model,
                [Fixed(4), UpTo(8), Fixed(2)][s],
                [33, 64, 512][s],
                [8, 1, 3][s],
            ));
            for (draft, length, chunk, width) in cases {
                let setup = setup(draft, length, chunk, width, &backends[s % 2]);
                let got = write(&setup, &prompts, 0, &sampling, &[]);
                assert_same(&setup, what, &got, &want);
                println!(
                    "{name} {draft:?} {what}: {} of {} accepted at length {length:?}",
                    got.accepted, got.drafted
                );
                if draft != Draft::Ngram {
                    assert!(
                        got.accepted * 4 > got.drafted,
                        "{name}: a trained head is right now and then"
                    );
                }
            }
        }
    }
}

#[test]
fn speculation_never_changes_a_token_over_coded_weights() {
    let isas = Isa::available();
    let backends: Vec<_> = isas.iter().map(|&isa| backend(isa, 1)).collect();
    let best = backends.last().unwrap();
    for (f, &target) in CODED.iter().enumerate() {
        let subject = Subject { target, ..ALONE };
        let checkpoint = Checkpoint::open(&repository(target)).unwrap();
        let has_head = checkpoint.has("mtp.norm.weight");
        let prompts = prompts(9, 96, f as u64);
        for (s, (what, sampling)) in samplings().into_iter().enumerate() {
            let setup = |draft, length, chunk, width, backend| Setup {
                subject,
                backend,
                draft,
                length,
                chunk,
                width,
                kv_format: KvPlan::both(&quant::kv::BF16),
                context: CONTEXT,
                shortlist: s == 2,
                mapped: (f + s) % 2 == 0,
                constrained: false,
            };
            let plain = Setup {
                shortlist: s == 2,
                ..Setup::plain(subject, best)
            };
            let want = write(&plain, &prompts, 0, &sampling, &[]).texts;
            let mut cells = vec![
                (
                    Draft::Oracle,
                    Fixed([3, 8, 1][s]),
                    [64, 1, 7][s],
                    [1, 3, 8][s],
                ),
                (Draft::Ngram, Fixed(5), 33, [8, 1, 3][s]),
            ];
            if has_head {
                cells.push((Draft::Head, Fixed(2), [7, 512, 64][s], [3, 8, 1][s]));
            }
            for (c, (draft, length, chunk, width)) in cells.into_iter().enumerate() {
                let k = (f + s + c) % backends.len();
                // The scalar path takes twenty times as long.
                let n = if isas[k] == Isa::Scalar {
                    1
                } else {
                    prompts.len()
                };
                let setup = setup(draft, length, chunk, width, &backends[k]);
                let got = write(&setup, &prompts[..n], 0, &sampling, &want);
                assert_same(&setup, what, &got, &want[..n]);
                assert!(got.drafted > 0, "{target} {draft:?} has drafted");
            }
        }
    }
}

#[test]
fn speculation_never_changes_a_token_of_a_long_context() {
    let best = best_cpu();
    for (s, &subject) in TINY.iter().enumerate() {
        long::assert_lossless_over_splits(s, subject, &long::formats(subject), &best);
    }
}

#[test]
fn a_rollback_that_is_off_by_one_does_not_go_unseen() {
    let subject = *TINY
        .iter()
        .find(|s| s.target.ends_with("qwen3_5-dense"))
        .unwrap();
    let prompts = prompts(6, 90, 5);
    let texts = |backend: Arc<dyn Backend>, draft, length, truth: &[_]| {
        let setup = Setup {
            draft,
            length: Fixed(length),
            chunk: 64,
            width: 3,
            kv_format: KvPlan::both(&quant::kv::F32),
            ..Setup::plain(subject, &backend)
        };
        write(&setup, &prompts, 0, &Sampling::default(), truth).texts
    };
    let want = texts(Arc::new(Reference), Draft::None, 0, &[]);
    let drafted = texts(Arc::new(Reference), Draft::Oracle, 3, &want);
    assert_eq!(drafted, want);
    let mistakes: [fn(&mut Batch); 2] = [
        |batch| {
            let seqs = batch.seqs.iter_mut();
            seqs.for_each(|s| s.kept = s.kept.saturating_sub(1));
        },
        |batch| {
            let seqs = batch.seqs.iter_mut();
            seqs.for_each(|s| s.certain = s.rows.len().min(s.certain + 1));
        },
    ];
    for mistake in mistakes {
        let wrong = Arc::new(Recorder::with_mistake(Box::new(Reference), mistake));
        let got = texts(wrong, Draft::Oracle, 3, &want);
        assert_ne!(got, want, "recurrent state after the wrong row");
    }
}
