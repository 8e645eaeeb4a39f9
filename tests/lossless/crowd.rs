//! Many texts of all lengths in a memory for few: some wait, some are preempted and go on later, all end, and each
//! is the text of a request that was alone, plainly decoded.

use crate::beside::{Tokens, submit};
use crate::writing::one_thread;
use engine::{
    DraftChoice, Engine, EngineError, EngineOptions, KvMemory, LoadOptions, Model, PAGE_ROWS,
    Probing, Request, Sampling, Source,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use suites::repository;

/// One with sliding windows, and one with recurrent state and a head of its own.
const MODELS: [&str; 2] = ["models/tiny-gemma4", "models/tiny-qwen3.5"];
/// The head of the first.
const ASSISTANT: &str = "models/tiny-gemma4-assistant";

/// Requests at once.
const REQUESTS: usize = 64;
/// Whole contexts that memory has room for.
const WHOLE: usize = 16;
/// Tokens of a whole context.
const CONTEXT: usize = 4 * PAGE_ROWS;
/// How long is waited for what takes seconds.
const PATIENCE: Duration = Duration::from_secs(300);

#[test]
fn many_texts_in_a_memory_for_few_are_those_of_texts_alone() {
    for model in MODELS {
        let one = LoadOptions {
            sequences: 1,
            ..options()
        };
        let alone = start(load(model, &one).unwrap());
        let want: Vec<Vec<u32>> = (0..REQUESTS)
            .map(|i| written(&submit(&alone, request(i), || {}).0))
            .collect();
        drop(alone);
        for draft in [DraftChoice::None, DraftChoice::Auto] {
            let drafts = matches!(draft, DraftChoice::Auto);
            let crowded = LoadOptions {
                draft,
                drafters: vec![Source::Folder(repository(ASSISTANT))],
                kv_memory: KvMemory::Bytes(bytes(model)),
                ..options()
            };
            let crowded = load(model, &crowded).unwrap();
            assert_eq!(crowded.info.kv_tokens, WHOLE * CONTEXT, "{model}");
            assert_eq!(crowded.info.drafter.is_some(), drafts, "{model}");
            let crowded = start(crowded);
            let asked: Vec<_> = (0..REQUESTS)
                .map(|i| submit(&crowded, request(i), || {}).0)
                .collect();
            for (i, (asked, want)) in asked.iter().zip(&want).enumerate() {
                let what = format!("{model}, drafts {drafts}, text {i}");
                assert!(written(asked) == *want, "{what}");
            }
            let counters = crowded.counters();
            let read = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
            assert_eq!(read(&counters.finished), REQUESTS as u64, "{model}");
            // Drafts let some texts end long before others, which may leave room enough.
            let preemptions = read(&counters.preemptions);
            assert!(drafts || preemptions > 0, "{model}: memory was short");
        }
    }
}

fn options() -> LoadOptions {
    LoadOptions {
        draft: DraftChoice::None,
        probing: Probing::Skip {
            reason: "a test".into(),
        },
        context: Some(CONTEXT),
        sequences: REQUESTS,
        chunk: Some(64),
        ..LoadOptions::default()
    }
}

fn load(model: &str, options: &LoadOptions) -> Result<Model, EngineError> {
    let backend = one_thread();
    let source = Source::Folder(repository(model));
    engine::load(Arc::new(backend), &source, options)
}

fn start(model: Model) -> Engine {
    Engine::start(model, EngineOptions::default())
}

/// Bytes in which [`WHOLE`] contexts fit beside what [`REQUESTS`] take whatever their length.
fn bytes(model: &str) -> u64 {
    let tight = LoadOptions {
        kv_memory: KvMemory::Bytes(1),
        ..options()
    };
    let least = match load(model, &tight) {
        Err(EngineError::KvTooSmall { least, .. }) => least,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("one byte is too little"),
    };
    let model = load(model, &options()).unwrap();
    let page =
        model.request_bytes(CONTEXT).target - model.request_bytes(CONTEXT - PAGE_ROWS).target;
    least + ((WHOLE - 1) * CONTEXT / PAGE_ROWS) as u64 * page
}

/// Request number `i`: the first ones write more than the 64 tokens that there is room for when they begin, the
/// others are short or long, two of them as long as the context; greedy or sampled.
fn request(i: usize) -> Request {
    let (n_prompt, n_written) = match i {
        0..24 => (45 + i % 20, Some(90)),
        24 | 44 => (150, None),
        _ => (
            [8, 40, 70, 100, 130, 190][i % 6] + i % 5,
            Some(2 + i * 7 % 23),
        ),
    };
    let prompt = (0..n_prompt).map(|k| (300 + (k * k * 7 + i * (k + 3) * 11) % 531) as u32);
    Request {
        max_tokens: n_written,
        ignore_eos: true,
        sampling: Sampling {
            temperature: [0.0, 0.8][i / 2 % 2],
            seed: i as u64,
            ..Sampling::default()
        },
        ..Request::new(prompt.collect())
    }
}

/// What was written.
fn written(inbox: &Tokens) -> Vec<u32> {
    let tokens = inbox.recv_timeout(PATIENCE);
    tokens.expect("every request ends")
}
