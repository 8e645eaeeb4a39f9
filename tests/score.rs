//! Scores of given texts: the same however the text is cut into steps, and what the
//! log-probabilities of a written text say.

use backend::Backend;
use cache::{KeptSize, Memory, MemorySize};
use cpu::{Cpu, CpuOptions};
use models::load_target;
use speculate::{
    DraftLength, RoundError, Sampling, Speculator, Stream, StreamOptions, TopLogprobs,
};
use std::sync::Arc;
use std::time::Duration;
use suites::repository;
use weights::Checkpoint;

const CONTEXT: usize = 96;
/// A family with sliding windows and one with recurrent state.
const MODELS: [&str; 2] = ["gemma4-dense", "qwen3_5-dense"];

fn speculator(model: &str, step_rows: usize) -> Speculator {
    let b: Arc<dyn Backend> = Arc::new(Cpu::new(CpuOptions::default()).unwrap());
    let folder = repository("tests/golden/checkpoints").join(model);
    let target = load_target(&*b, &Checkpoint::open(&folder).unwrap()).unwrap();
    let size = MemorySize {
        sequences: 1,
        context: CONTEXT,
        step_rows,
        kv_format: cache::KvPlan::both(&quant::kv::F32),
        running_pages: None,
        kept: KeptSize::default(),
    };
    let memory = Memory::new(&*b, target.plan(), size);
    Speculator::new(b, target, memory, None)
}

fn text(n: usize) -> Vec<u32> {
    (0..n).map(|i| (5 + i * i * 7 % 53) as u32).collect()
}

#[test]
fn scores_do_not_depend_on_the_steps_that_a_text_is_cut_into() {
    let text = text(CONTEXT);
    for model in MODELS {
        let whole = speculator(model, CONTEXT).score(&text, 1).unwrap();
        assert_eq!(whole.len(), text.len() - 1);
        assert!(whole.iter().all(|&score| score < 0.0), "{whole:?}");
        for step_rows in [1, 7, 40] {
            let mut speculator = speculator(model, step_rows);
            for first in [1, 7, 8, 50, CONTEXT - 1] {
                let scores = speculator.score(&text, first).unwrap();
                assert_eq!(scores, whole[first - 1..], "{model}: {step_rows} {first}");
            }
            assert!(speculator.score(&text, CONTEXT).unwrap().is_empty());
            assert_eq!(speculator.memory().pages_used().0, 0, "every page is back");
        }
    }
}

#[test]
fn a_written_text_has_the_scores_that_its_log_probabilities_say() {
    for model in MODELS {
        let mut speculator = speculator(model, 16);
        let prompt = text(9);
        let options = StreamOptions {
            sampling: Sampling::default(),
            max_tokens: 40,
            stop_tokens: Arc::new([]),
            draft: DraftLength::Fixed(0),
            logprobs: Some(TopLogprobs::of_logits(0)),
        };
        let mut stream: Stream = speculator.open(prompt.clone(), options).unwrap();
        while stream.finish().is_none() {
            speculator.round(&mut [&mut stream], 16).unwrap();
        }
        let said: Vec<f32> = stream.take_logprobs().iter().map(|l| l.logprob).collect();
        let tokens = stream.tokens().to_vec();
        speculator.close(stream);
        let scores = speculator.score(&tokens, prompt.len()).unwrap();
        assert_eq!(scores.len(), said.len());
        for (score, said) in scores.iter().zip(said) {
            // The latter are sums in f32.
            assert!((score - f64::from(said)).abs() < 1e-5, "{score} {said}");
        }
    }
}

#[test]
fn a_text_longer_than_the_context_is_an_error_and_leaves_nothing_behind() {
    let mut speculator = speculator(MODELS[0], 16);
    // The last token is not run.
    assert!(speculator.score(&text(CONTEXT + 1), 1).is_ok());
    let error = speculator.score(&text(CONTEXT + 2), 1).unwrap_err();
    assert!(matches!(error, RoundError::Memory(_)), "{error}");
    assert_eq!(speculator.memory().pages_used().0, 0, "every page is back");
    assert!(speculator.score(&text(20), 1).is_ok());
}

#[test]
fn timing_takes_time_and_gives_every_page_back() {
    for model in MODELS {
        let mut speculator = speculator(model, 16);
        let step = speculator.time_step(&text(60), &text(8)).unwrap();
        let first = speculator.time_step(&[], &text(1)).unwrap();
        let prefill = speculator.time_prefill(&text(CONTEXT)).unwrap();
        assert!([step, first, prefill].iter().all(|&t| t > Duration::ZERO));
        assert_eq!(speculator.memory().pages_used().0, 0, "every page is back");
    }
}
