//! The same on a GPU. Each test says so and tests nothing where there is none.

use crate::blocks::assert_lossless_with_blocks;
use crate::constrained::assert_constraints_hold;
use crate::disk::assert_files_change_nothing;
use crate::edits::assert_edits_hold;
use crate::formats::{assert_lossless_in_formats, two};
use crate::guesses::assert_same_guesses;
use crate::kept::assert_kept_texts_change_nothing;
use crate::long::{self, assert_lossless_over_splits};
use crate::media::{SEEING, assert_pictures_change_nothing};
use crate::mixed::assert_mixed_batches_hold;
use crate::outputs::assert_kept_rows_are_the_same;
use crate::packed::{ROTATED, assert_lossless_stored_as};
use crate::pooled::assert_vectors_hold;
use crate::preempt::assert_preemption_changes_nothing;
use crate::reuse::assert_reuse_changes_nothing;
use crate::samplings;
use crate::several::{assert_drafters_can_be_replaced, assert_several_heads_change_nothing};
use crate::share::assert_sharing_changes_nothing;
use crate::sound::{HEARING, assert_sounds_change_nothing};
use crate::subjects::{Draft, Subject, TINY, TRAINED, greedy_prompts, prompts, vocab};
use crate::writing::{Setup, assert_same, compressed, in_turn, rotated, write};
use backend::{Backend, TokenList};
use cache::KvPlan;
use cpu::{Cpu, CpuOptions};
use speculate::DraftLength::Fixed;
use speculate::Sampling;
use speculate::sample::{History, Scratch, choose, choose_among};
use std::sync::Arc;
use suites::{Recorder, Rng};

/// A GPU; nothing, and a line that says so, where there is none.
fn gpu() -> Option<Arc<dyn Backend>> {
    match cuda::Cuda::new(gpu_options()) {
        Ok(gpu) => Some(Arc::new(gpu)),
        Err(e) => {
            eprintln!("!!! SKIPPED, nothing is tested on a GPU: {e}");
            None
        }
    }
}

/// Gives each model and its number to `test`, all at once.
fn for_each_model_at_once(test: impl Fn(usize, Subject) + Sync) {
    std::thread::scope(|scope| {
        for (s, &subject) in TINY.iter().chain(TRAINED).enumerate() {
            let test = &test;
            scope.spawn(move || test(s, subject));
        }
    });
}

#[test]
fn speculation_never_changes_a_token_on_a_gpu() {
    if gpu().is_none() {
        return;
    }
    // Each on a stream of its own: a GPU has room for all of them.
    for_each_model_at_once(assert_lossless_on_a_gpu);
}

#[test]
fn speculation_never_changes_a_token_with_rotated_weights_on_a_gpu() {
    let Some(gpu) = gpu() else { return };
    assert_lossless_stored_as(ROTATED, TRAINED, &[gpu.clone(), gpu]);
}

/// Gemma 4's per-layer inputs are one kernel where the matrices of both products are in one format, which those of the
/// bundled model are not.
#[test]
fn speculation_never_changes_a_token_of_fused_per_layer_inputs_on_a_gpu() {
    let Some(gpu) = gpu() else { return };
    let has_them = |subject: &&Subject| subject.target == "models/tiny-gemma4-e";
    let subject = *TRAINED.iter().find(has_them).unwrap();
    let formats = [("q4_0", "none"), ("bf16", "none")];
    assert_lossless_stored_as(formats, &[subject], &[gpu.clone(), gpu]);
}

#[test]
fn speculation_never_changes_a_token_of_a_constrained_text_on_a_gpu() {
    let Some(gpu) = gpu() else { return };
    for (s, &subject) in TINY.iter().chain(TRAINED).enumerate() {
        assert_constraints_hold(s, subject, &gpu);
    }
}

#[test]
fn speculation_never_changes_a_token_with_any_block_drafter_on_a_gpu() {
    let Some(gpu) = gpu() else { return };
    assert_lossless_with_blocks(false, &gpu);
}

#[test]
fn hidden_rows_do_not_depend_on_which_are_kept_on_a_gpu() {
    let Some(gpu) = gpu() else { return };
    for (s, &subject) in TINY.iter().chain(TRAINED).enumerate() {
        assert_kept_rows_are_the_same(subject, &gpu, in_turn(subject, &gpu, s));
    }
}

#[test]
fn several_heads_change_no_token_on_a_gpu() {
    let Some(gpu) = gpu() else { return };
    for (s, &subject) in TINY.iter().chain(TRAINED).enumerate() {
        assert_several_heads_change_nothing(s, subject, &gpu);
    }
}

#[test]
fn drafters_can_be_replaced_on_a_gpu() {
    let Some(gpu) = gpu() else { return };
    assert_drafters_can_be_replaced(&gpu);
}

#[test]
fn edits_on_a_gpu_make_the_texts_of_the_host() {
    let Some(gpu) = gpu() else { return };
    // Leaves edits and choices to the host.
    let host = Box::new(cuda::Cuda::new(gpu_options()).unwrap());
    let host: Arc<dyn Backend> = Arc::new(Recorder::new(host));
    assert_edits_hold(&gpu, &host);
}

#[test]
fn speculation_never_changes_a_token_after_pictures_on_a_gpu() {
    let Some(gpu) = gpu() else { return };
    for &subject in SEEING {
        assert_pictures_change_nothing(subject, [&gpu, &gpu]);
    }
    for &subject in HEARING {
        assert_sounds_change_nothing(subject, [&gpu, &gpu]);
    }
}

#[test]
fn a_beginning_that_is_remembered_changes_nothing_on_a_gpu() {
    if gpu().is_none() {
        return;
    }
    // One after the other takes longer than all other tests of a GPU.
    for_each_model_at_once(|s, subject| {
        let gpu = gpu().expect("there was one");
        assert_reuse_changes_nothing(s, subject, &gpu);
    });
}

#[test]
fn beginnings_of_kept_and_running_texts_change_nothing_on_a_gpu() {
    let Some(gpu) = gpu() else { return };
    for (s, &subject) in TINY.iter().chain(TRAINED).enumerate() {
        assert_kept_texts_change_nothing(s, subject, &gpu);
        assert_sharing_changes_nothing(s, subject, &gpu);
    }
}

#[test]
fn what_one_stream_asks_of_speculation_changes_no_other_on_a_gpu() {
    let Some(gpu) = gpu() else { return };
    for (s, &subject) in TINY.iter().chain(TRAINED).enumerate() {
        assert_mixed_batches_hold(s, subject, &gpu);
    }
}

#[test]
fn preempted_streams_write_the_same_on_a_gpu() {
    let Some(gpu) = gpu() else { return };
    for (s, &subject) in TINY.iter().chain(TRAINED).enumerate() {
        assert_preemption_changes_nothing(s, subject, &gpu);
    }
}

#[test]
fn gpu_vectors_depend_on_nothing_but_their_text() {
    let Some(gpu) = gpu() else { return };
    let exact = CpuOptions {
        activations: cpu::Activations::F32,
        ..CpuOptions::default()
    };
    let cpu: Arc<dyn Backend> = Arc::new(Cpu::new(exact).unwrap());
    for &subject in TRAINED {
        let [got, want] = [&gpu, &cpu].map(|b| assert_vectors_hold(subject, b));
        for (kind, (got, want)) in got.iter().flatten().zip(want.iter().flatten()).enumerate() {
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let cosine = dot(got, want) / (dot(got, got) * dot(want, want)).sqrt();
            assert!(cosine > 0.999, "{} vector {kind}: {cosine}", subject.target);
        }
    }
}

#[test]
fn a_beginning_from_a_file_changes_nothing_on_a_gpu() {
    let Some(gpu) = gpu() else { return };
    for (s, &subject) in TINY.iter().chain(TRAINED).enumerate() {
        let mut formats = vec![KvPlan::both(&quant::kv::BF16)];
        // The others have heads smaller than a block.
        if subject.target.contains("qwen") {
            formats.push(compressed());
        }
        if subject.target.starts_with("models/") {
            formats.push(rotated("turbo4"));
        }
        assert_files_change_nothing(s, subject, &formats, &gpu);
    }
}

#[test]
fn speculation_never_changes_a_token_of_a_long_context_on_a_gpu() {
    let Some(gpu) = gpu() else { return };
    for (s, &subject) in TINY.iter().enumerate() {
        assert_lossless_over_splits(s, subject, &long::formats(subject), &gpu);
    }
}

#[test]
fn speculation_never_changes_a_token_of_a_long_context_in_rotated_formats_on_a_gpu() {
    let Some(gpu) = gpu() else { return };
    for (s, &subject) in TRAINED.iter().enumerate().step_by(2) {
        assert_lossless_over_splits(s, subject, &two(), &gpu);
    }
}

#[test]
fn speculation_never_changes_a_token_in_any_format_of_keys_and_values_on_a_gpu() {
    let (Some(one), Some(other)) = (gpu(), gpu()) else {
        return;
    };
    assert_lossless_in_formats(&[one, other]);
}

fn assert_lossless_on_a_gpu(s: usize, subject: Subject) {
    let gpu: Arc<dyn Backend> = Arc::new(cuda::Cuda::new(gpu_options()).unwrap());
    let exact = CpuOptions {
        activations: cpu::Activations::F32,
        threads: 1,
        ..CpuOptions::default()
    };
    let cpu: Arc<dyn Backend> = Arc::new(Cpu::new(exact).unwrap());
    // Leaves the choice of tokens to the host.
    let host = Box::new(cuda::Cuda::new(gpu_options()).unwrap());
    let host: Arc<dyn Backend> = Arc::new(Recorder::new(host));
    let trained = subject.target.strip_prefix("models/");
    let prompts = match trained {
        Some(name) => greedy_prompts(name),
        None => prompts(8, vocab(subject), s as u64),
    };
    let setup = |backend, draft, draft_max, chunk, width, kv_format| Setup {
        draft,
        length: Fixed(draft_max),
        chunk,
        width,
        kv_format,
        shortlist: chunk == 33,
        ..Setup::plain(subject, backend)
    };
    for (i, (what, sampling)) in samplings().into_iter().enumerate() {
        // Codes for every other way of choosing; other models, and EAGLE-3 heads, have
        // heads smaller than a block of them.
        let codes = i % 2 == 1 && subject.target.contains("qwen");
        let other = match codes {
            true => quant::kv_format("q8_0").unwrap(),
            false => &quant::kv::F32,
        };
        for kv in [&quant::kv::BF16, other]
            .map(KvPlan::both)
            .into_iter()
            .take(if trained.is_some() { 1 } else { 2 })
        {
            let plain = setup(&gpu, Draft::None, 0, 512, 1, kv);
            let want = write(&plain, &prompts, 0, &sampling, &[]).texts;
            if i == 1 && trained.is_none() {
                let plain = setup(&host, Draft::None, 0, 512, 1, kv);
                let texts = write(&plain, &prompts[..1], 0, &sampling, &[]).texts;
                assert_eq!(texts, want[..1], "{} by the host", subject.target);
            }
            for draft in [
                Draft::None,
                Draft::Head,
                Draft::Eagle3,
                Draft::Block,
                Draft::Model,
                Draft::Ngram,
                Draft::Oracle,
            ] {
                let is_small = matches!(draft, Draft::Eagle3 | Draft::Block);
                let missing = subject.lacks(draft) || is_small && kv.base.k == other && codes;
                if missing {
                    continue;
                }
                let cells = [(3, 64, 1), (8, 512, 3), (1, 7, 8), (2, 33, 2)];
                let n = if draft == Draft::Head { 2 } else { 1 };
                for (draft_max, chunk, width) in [cells[i], cells[3]].into_iter().take(n) {
                    let setup = setup(&gpu, draft, draft_max, chunk, width, kv);
                    let got = write(&setup, &prompts, 0, &sampling, &want);
                    assert_same(&setup, what, &got, &want);
                    println!(
                        "{} {draft:?} {what}: {} of {} accepted at length {draft_max}",
                        subject.target, got.accepted, got.drafted
                    );
                }
            }
            if i == 0 {
                let plain = setup(&cpu, Draft::None, 0, 512, 8, kv);
                let cpu = write(&plain, &prompts, 0, &sampling, &[]).texts;
                let mut same = 0;
                for (i, (gpu, cpu)) in want.iter().zip(&cpu).enumerate() {
                    match gpu.parting(cpu) {
                        None => same += 1,
                        Some(at) => println!(
                            "{}: text {i} parts at token {at}: {}, on the CPU {}",
                            subject.target,
                            gpu.said(at),
                            cpu.said(at)
                        ),
                    }
                }
                println!(
                    "{}: {same} of {} greedy texts are the CPU's",
                    subject.target,
                    prompts.len()
                );
            }
        }
    }
}

#[test]
fn drafts_in_one_go_on_a_gpu_are_those_of_single_steps() {
    let Some(chaining) = gpu() else { return };
    let host = Box::new(cuda::Cuda::new(gpu_options()).unwrap());
    let host: Arc<dyn Backend> = Arc::new(Recorder::new(host));
    assert_same_guesses(&host, &chaining);
}

#[test]
fn tokens_chosen_on_a_gpu_are_the_hosts() {
    let Some(gpu) = gpu() else { return };
    let mut rng = Rng(7);
    let mut scratch = Scratch::default();
    for cols in [1, 5, 300, 4_099, 4_099, 4_099, 262_144] {
        for spread in [0.001, 1.0, 12.0, 100.0] {
            // Many equal ones, some that are none; small ones more often than large ones.
            let logit = |rng: &mut Rng| {
                let steps = [8.0, 1e6][rng.below(2) as usize];
                let v = (f64::from(rng.below(1 << 20)) / 524_288.0 - 1.0) * steps;
                let v = v.round() / steps;
                match rng.below(1000) {
                    0 => f32::NEG_INFINITY,
                    1 => f32::NAN,
                    2 => -0.0,
                    // The largest, some of them equal once they are scaled.
                    3 => f32::from_bits((spread as f32).to_bits() + rng.below(8)),
                    _ => (v * v * v * spread) as f32,
                }
            };
            let rows = 24;
            let logits: Vec<f32> = (0..rows * cols).map(|_| logit(&mut rng)).collect();
            let mut of = |n| rng.below(n) as usize;
            let samplings: Vec<Sampling> = (0..rows)
                .map(|_| Sampling {
                    temperature: [0.0, 0.3, 0.7, 1.0, 2.5, 1.2e-38][of(6)],
                    top_k: [0, 0, 1, 5, 40, 5_000][of(6)],
                    top_p: [1.0, 1.0, 0.9, 0.5, 0.999_999_9, 1e-6][of(6)],
                    min_p: [0.0, 0.0, 0.05, 1.0][of(4)],
                    seed: of(u32::MAX) as u64,
                    ..Sampling::default()
                })
                .collect();
            let position = |row: usize| row as u64 + (1 << 33);
            let choices: Option<Vec<_>> = samplings
                .iter()
                .enumerate()
                .map(|(row, s)| s.on_device(position(row)))
                .collect();
            let choices = choices.unwrap();
            let x = gpu.upload(rows, cols, &logits);
            let mut ids: Vec<u32> = (0..cols as u32).map(|i| 3 * i + i % 3).collect();
            ids.rotate_left(cols / 3);
            for list in [None, Some(TokenList::new(&*gpu, ids))] {
                let got = gpu.choose_tokens(&x, list.as_ref(), &choices).unwrap();
                for (row, (s, got)) in samplings.iter().zip(got).enumerate() {
                    let logits = &logits[row * cols..][..cols];
                    let (history, position) = (History::new(s, &[]), position(row));
                    let want = match &list {
                        None => choose(s, &history, position, logits, &mut scratch),
                        Some(list) => {
                            choose_among(s, &history, position, list.ids(), logits, &mut scratch)
                        }
                    };
                    assert_eq!(got, want, "row {row} of {cols}, spread {spread}, {s:?}");
                }
            }
        }
    }
}

/// Compiled code is named by its content, so that tests can share it.
fn gpu_options() -> cuda::CudaOptions {
    cuda::CudaOptions {
        cache: Some(std::env::temp_dir().join("paceline-cuda-tests")),
        kernels: std::env::var_os("CUDA_KERNELS").map(Into::into),
        ..Default::default()
    }
}
