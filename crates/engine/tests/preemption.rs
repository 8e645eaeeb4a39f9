//! Preemption: requests that have to give their memory to others say what they would have said, and every
//! one of them ends.

use cpu::{Cpu, CpuOptions};
use engine::{
    CancelToken, DraftChoice, Embedding, Engine, EngineError, EngineOptions, Event, FinishReason,
    GrammarSpec, KvMemory, LoadOptions, Pooling, Probing, Request, RequestOutcome, Sampling,
    Source, TopLogprobs, WrittenToken,
};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const CONTEXT: usize = 512;
/// One with sliding windows, and one with recurrent state.
const MODELS: [&str; 2] = ["tiny-gemma4", "tiny-qwen3.5"];
/// Much longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(120);

fn options(sequences: usize) -> LoadOptions {
    LoadOptions {
        draft: DraftChoice::Auto,
        probing: Probing::Skip {
            reason: "a test".into(),
        },
        context: Some(CONTEXT),
        sequences,
        chunk: Some(32),
        ..LoadOptions::default()
    }
}

fn load(model: &str, options: &LoadOptions) -> Result<engine::Model, EngineError> {
    let backend = Cpu::new(CpuOptions {
        threads: 1,
        ..CpuOptions::default()
    });
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    engine::load(
        Arc::new(backend.unwrap()),
        &Source::Folder(folder.join(model)),
        options,
    )
}

/// An engine for `sequences` requests, with as much memory as they can need.
fn roomy(model: &str, sequences: usize) -> Engine {
    let model = load(model, &options(sequences)).unwrap();
    Engine::start(model, EngineOptions::default())
}

/// An engine for `sequences` requests, with as little memory as one can need.
fn tight(model: &str, sequences: usize, reuse: bool) -> Engine {
    let with = |kv_memory| LoadOptions {
        kv_memory: KvMemory::Bytes(kv_memory),
        ..options(sequences)
    };
    let least = match load(model, &with(1)) {
        Err(EngineError::KvTooSmall { least, context, .. }) => {
            assert_eq!(context, CONTEXT);
            least
        }
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("one byte is too little"),
    };
    assert!(load(model, &with(least - 1)).is_err());
    let model = load(model, &with(least)).unwrap();
    let options = EngineOptions {
        reuse,
        ..EngineOptions::default()
    };
    Engine::start(model, options)
}

fn prompt(salt: usize, n: usize) -> Vec<u32> {
    (0..n)
        .map(|i| (300 + (i * i * 7 + salt * (i + 3) * 11) % 531) as u32)
        .collect()
}

/// Request number `i`: greedy or sampled, with log-probabilities or a grammar, or for a vector.
fn request(engine: &Engine, i: usize) -> Request {
    let plain = Request {
        max_tokens: Some(140 + i % 40),
        ignore_eos: true,
        ..Request::new(prompt(i, 20 + i * 13 % 40))
    };
    let sampled = Sampling {
        temperature: 0.9,
        repetition_penalty: 1.1,
        seed: i as u64,
        ..Sampling::default()
    };
    match i % 5 {
        0 => plain,
        1 => Request {
            sampling: sampled,
            logprobs: Some(TopLogprobs::of_logits(2)),
            ..plain
        },
        2 => Request {
            grammar: Some(
                engine
                    .compile(&GrammarSpec::Regex("([a-z]{3,9} ){40}".into()))
                    .unwrap(),
            ),
            stop: vec!["zzz".into()],
            ignore_eos: false,
            ..plain
        },
        3 => Request {
            sampling: sampled,
            trace: true,
            ..plain
        },
        _ => Request {
            embedding: Some(Embedding {
                pooling: Pooling::Mean,
                ..Embedding::default()
            }),
            ..plain
        },
    }
}

/// What a request has said.
#[derive(Debug, Default, PartialEq)]
struct Said {
    text: String,
    tokens: Vec<WrittenToken>,
    finish: Option<FinishReason>,
    vectors: Vec<Vec<f32>>,
    /// Tokens of the prompt and of the text.
    usage: (usize, usize),
}

fn submit(engine: &Engine, request: Request) -> (Receiver<Event>, CancelToken) {
    let (events, inbox) = channel();
    let sink = Box::new(move |event| events.send(event).is_ok());
    let cancel = engine.submit(request, sink).unwrap();
    (inbox, cancel)
}

/// Waits for the end of a request that has said some of it in `said`.
fn hear(inbox: &Receiver<Event>, said: &mut Said, until_first: bool) -> Option<RequestOutcome> {
    let deadline = Instant::now() + PATIENCE;
    let mut read = 0;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match inbox.recv_timeout(left).expect("the request gets on") {
            Event::Prefill { done, .. } => {
                assert!(done >= read, "the prompt is read once, as far as one sees");
                read = done;
            }
            Event::Round(_) => {}
            Event::Text(segments) => {
                for segment in segments {
                    said.text += &segment.text;
                    said.tokens.extend(segment.tokens);
                }
                if until_first {
                    return None;
                }
            }
            Event::Done(outcome) => {
                said.finish = Some(outcome.finish.clone());
                said.vectors = outcome.embedding.clone();
                said.usage = (outcome.usage.prompt_tokens, outcome.usage.completion_tokens);
                return Some(*outcome);
            }
            Event::Failed(error) => panic!("{error}"),
        }
    }
}

fn whole(inbox: &Receiver<Event>) -> (Said, RequestOutcome) {
    let mut said = Said::default();
    let outcome = hear(inbox, &mut said, false).unwrap();
    (said, outcome)
}

#[test]
fn requests_that_run_out_of_memory_say_the_same() {
    const N: usize = 15;
    for model in MODELS {
        let alone = roomy(model, 1);
        let want: Vec<Said> = (0..N)
            .map(|i| whole(&submit(&alone, request(&alone, i)).0).0)
            .collect();
        for reuse in [true, false] {
            let engine = tight(model, 4, reuse);
            let asked = (0..N).map(|i| {
                let request = Request {
                    // A few of equal priority, and some before and after them.
                    priority: [0, 0, 1, -1][i * 7 % 4],
                    client: i as u64 % 3,
                    ..request(&engine, i)
                };
                submit(&engine, request)
            });
            let asked: Vec<_> = asked.collect();
            let mut preemptions = 0;
            for (i, (inbox, _)) in asked.iter().enumerate() {
                let (said, outcome) = whole(inbox);
                assert!(said == want[i], "{model} {reuse} request {i}");
                preemptions += outcome.timings.preemptions;
            }
            let counters = engine.counters();
            assert_eq!(
                counters.preemptions.load(Ordering::Relaxed),
                preemptions,
                "{model}"
            );
            assert!(preemptions >= 1, "{model}: nothing was preempted");
            assert_eq!(counters.failed.load(Ordering::Relaxed), 0);
            assert_eq!(counters.running.load(Ordering::Relaxed), 0);
            assert_eq!(counters.waiting.load(Ordering::Relaxed), 0);
        }
    }
}

#[test]
fn a_request_of_higher_priority_takes_the_place_of_another() {
    for model in MODELS {
        let engine = roomy(model, 1);
        let low = || Request {
            priority: 5,
            max_tokens: Some(180),
            ..request(&engine, 1)
        };
        let (want, outcome) = whole(&submit(&engine, low()).0);
        assert_eq!(outcome.timings.preemptions, 0);
        let (inbox, _) = submit(&engine, low());
        let mut said = Said::default();
        hear(&inbox, &mut said, true);
        // One of equal priority waits; the other two do not.
        let (equal, _) = submit(
            &engine,
            Request {
                priority: 5,
                ..request(&engine, 3)
            },
        );
        let (high, _) = submit(&engine, request(&engine, 0));
        let (higher, _) = submit(
            &engine,
            Request {
                priority: -5,
                ..request(&engine, 4)
            },
        );
        whole(&higher);
        whole(&high);
        assert_eq!(said.finish, None, "{model}: the first has not ended");
        let outcome = hear(&inbox, &mut said, false).unwrap();
        assert!(said == want, "{model}");
        assert!(outcome.timings.preemptions >= 1, "{model}");
        let (_, outcome) = whole(&equal);
        assert_eq!(outcome.timings.preemptions, 0, "{model}");
    }
}

#[test]
fn a_preempted_request_can_be_cancelled() {
    let engine = roomy(MODELS[0], 1);
    let low = Request {
        priority: 1,
        max_tokens: Some(180),
        ..request(&engine, 0)
    };
    let (inbox, cancel) = submit(&engine, low);
    let mut said = Said::default();
    hear(&inbox, &mut said, true);
    let (high, _) = submit(
        &engine,
        Request {
            max_tokens: Some(200),
            ..request(&engine, 5)
        },
    );
    let mut first = Said::default();
    hear(&high, &mut first, true);
    cancel.cancel();
    let outcome = hear(&inbox, &mut said, false).unwrap();
    assert_eq!(outcome.finish, FinishReason::Cancelled);
    assert_eq!(outcome.usage.completion_tokens, said.tokens.len());
    hear(&high, &mut first, false);
    let counters = engine.counters();
    assert_eq!(counters.cancelled.load(Ordering::Relaxed), 1);
    assert_eq!(counters.waiting.load(Ordering::Relaxed), 0);
}

#[test]
fn many_requests_of_any_size_and_priority_all_end() {
    let engine = tight(MODELS[1], 3, true);
    let mut state = 12345u64;
    let mut random = |n: usize| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) as usize % n
    };
    let mut asked = Vec::new();
    for i in 0..40 {
        let n_prompt = 1 + random(CONTEXT / 2);
        let request = Request {
            max_tokens: Some(1 + random(50)),
            priority: random(3) as i64,
            client: random(4) as u64,
            ignore_eos: true,
            ..Request::new(prompt(random(9), n_prompt))
        };
        let most = request.max_tokens.unwrap();
        asked.push((i, most, submit(&engine, request)));
    }
    for (i, most, (inbox, _)) in &asked {
        let (said, _) = whole(inbox);
        assert_eq!(said.usage.1, *most, "request {i}");
    }
}
