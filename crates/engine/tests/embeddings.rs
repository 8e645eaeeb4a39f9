//! Embeddings: the same vectors alone, beside texts, in chunks of any size and with any number
//! of threads.

use cpu::{Cpu, CpuOptions};
use engine::{
    DraftChoice, Embedding, Engine, EngineOptions, Event, FinishReason, LoadOptions, Pooling,
    Probing, Rejected, Request, Source,
};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

const CONTEXT: usize = 128;
/// One with sliding windows, and one with recurrent state.
const MODELS: [&str; 2] = ["tiny-gemma4", "tiny-qwen3.5"];

fn start(model: &str, chunk: usize, threads: usize) -> Engine {
    let backend = Cpu::new(CpuOptions {
        threads,
        ..CpuOptions::default()
    });
    let options = LoadOptions {
        draft: DraftChoice::Named("ngram", None),
        probing: Probing::Skip {
            reason: "a test".into(),
        },
        context: Some(CONTEXT),
        sequences: 3,
        chunk: Some(chunk),
        ..LoadOptions::default()
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    let source = Source::Folder(folder.join(model));
    let model = engine::load(Arc::new(backend.unwrap()), &source, &options).unwrap();
    Engine::start(model, EngineOptions::default())
}

fn prompt(n: usize) -> Vec<u32> {
    (0..n).map(|i| (300 + i * i * 7 % 531) as u32).collect()
}

fn request(n: usize, pooling: Pooling) -> Request {
    Request {
        embedding: Some(Embedding {
            pooling,
            ..Embedding::default()
        }),
        ..Request::new(prompt(n))
    }
}

fn text() -> Request {
    Request {
        max_tokens: Some(24),
        ignore_eos: true,
        ..Request::new(prompt(33))
    }
}

/// Submits `request`; its events come from the receiver.
fn submit(engine: &Engine, request: Request) -> Receiver<Event> {
    let (events, inbox) = channel();
    let sink = Box::new(move |event| events.send(event).is_ok());
    engine.submit(request, sink).unwrap();
    inbox
}

/// The vectors of a request that has been submitted; it writes nothing.
fn vectors(inbox: &Receiver<Event>) -> Vec<Vec<f32>> {
    loop {
        match inbox.recv().unwrap() {
            Event::Prefill { .. } => {}
            Event::Done(outcome) => {
                assert_eq!(outcome.finish, FinishReason::Length);
                assert_eq!(outcome.usage.completion_tokens, 0);
                assert!(!outcome.speculation.engaged);
                return outcome.embedding;
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn vectors_depend_on_neither_chunks_nor_threads_nor_company() {
    for model in MODELS {
        let first = start(model, 512, 1);
        let alone = Pooling::ALL.map(|p| vectors(&submit(&first, request(70, p))));
        assert_eq!(alone[3].len(), 70);
        assert!(alone[0] != alone[1] && alone[0] != alone[2] && alone[1] != alone[2]);
        assert_eq!(alone[0][0], alone[3][69], "the last row");
        assert_eq!(alone[2][0], alone[3][0], "the first row");
        let (words, ids, _) = first.complete(text()).unwrap();
        for (chunk, threads) in [(1, 2), (7, 1), (64, 2)] {
            let engine = start(model, chunk, threads);
            let (events, said) = channel();
            let sink = Box::new(move |event| events.send(event).is_ok());
            engine.submit(text(), sink).unwrap();
            let asked = Pooling::ALL.map(|p| submit(&engine, request(70, p)));
            for (inbox, want) in asked.iter().zip(&alone) {
                assert!(vectors(inbox) == *want, "{model}: chunk {chunk}");
            }
            let mut beside = String::new();
            let mut tokens = Vec::new();
            for event in said {
                if let Event::Text(segments) = event {
                    for segment in segments {
                        beside.push_str(&segment.text);
                        tokens.extend(segment.tokens.iter().map(|token| token.id));
                    }
                }
            }
            assert_eq!((beside, tokens), (words.clone(), ids.clone()), "{model}");
        }
    }
}

#[test]
fn a_prompt_may_fill_the_context_and_no_more() {
    let engine = start(MODELS[0], 64, 1);
    let full = vectors(&submit(&engine, request(CONTEXT, Pooling::Last)));
    let norm: f64 = full[0].iter().map(|&x| f64::from(x).powi(2)).sum();
    assert!((norm - 1.0).abs() < 1e-6, "{norm}");
    let refused = engine.complete(request(CONTEXT + 1, Pooling::Last));
    assert!(matches!(refused, Err(Rejected::PromptTooLong { .. })));
    let mut odd = request(9, Pooling::Last);
    odd.embedding.as_mut().unwrap().dimensions = Some(engine.info().hidden_size + 1);
    assert!(matches!(
        engine.complete(odd),
        Err(Rejected::BadParameter(_))
    ));
}

#[test]
fn only_the_last_row_goes_on_from_the_prefix_cache() {
    for model in MODELS {
        let cold = start(model, 64, 1);
        let engine = start(model, 64, 1);
        let words = Request {
            max_tokens: Some(1),
            ignore_eos: true,
            ..Request::new(prompt(100))
        };
        engine.complete(words).unwrap();
        for pooling in Pooling::ALL {
            let (_, _, got) = engine.complete(request(110, pooling)).unwrap();
            let (_, _, want) = cold.complete(request(110, pooling)).unwrap();
            assert!(got.embedding == want.embedding, "{model} {pooling:?}");
            let may_reuse = pooling == Pooling::Last;
            assert!(got.usage.cached_tokens == 0 || may_reuse, "{pooling:?}");
            let must = may_reuse && model == "tiny-gemma4";
            assert!(got.usage.cached_tokens > 0 || !must, "{pooling:?}");
        }
    }
}
