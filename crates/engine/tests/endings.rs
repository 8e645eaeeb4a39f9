//! What is known when a request has ended, and when an engine has.

mod bundled;

use engine::{
    Counters, DraftChoice, Engine, EngineOptions, Event, Rejected, Request, RequestOutcome, Sink,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Longest wait for anything; a test that needs it has found a hang.
const PATIENCE: Duration = Duration::from_secs(120);

fn start(overlap: bool) -> Engine {
    let model = bundled::load("tiny-qwen3.5", DraftChoice::Auto, 1);
    let options = EngineOptions {
        overlap,
        ..EngineOptions::default()
    };
    Engine::start(model, options)
}

fn request(engine: &Engine, tokens: usize) -> Request {
    Request {
        max_tokens: Some(tokens),
        ignore_eos: true,
        ..Request::new(engine.text().encode_prompt("Once upon a time").unwrap())
    }
}

/// What a request of `tokens` tokens comes to, whose last token takes its reader as long as all before it took, and
/// the milliseconds from its prompt to that token.
fn read_slowly(engine: &Engine, tokens: usize) -> (RequestOutcome, f64) {
    let (ended, inbox) = channel();
    let begun = Instant::now();
    let (mut came, mut n) = (0.0, 0);
    let sink = move |event: Event| {
        match event {
            Event::Text(segments) => {
                n += segments.iter().map(|s| s.tokens.len()).sum::<usize>();
                if n == tokens {
                    let took = begun.elapsed();
                    came = took.as_secs_f64() * 1e3;
                    while begun.elapsed() < 2 * took {
                        std::hint::spin_loop();
                    }
                }
            }
            Event::Done(outcome) => return ended.send((*outcome, came)).is_ok(),
            _ => {}
        }
        true
    };
    engine
        .submit(request(engine, tokens), Box::new(sink))
        .unwrap();
    inbox.recv_timeout(PATIENCE).unwrap()
}

#[test]
fn decoding_lasts_from_the_first_token_to_the_last() {
    for overlap in [true, false] {
        let engine = start(overlap);
        let (one, _) = read_slowly(&engine, 1);
        let times = one.timings;
        assert_eq!(
            (times.decode_ms, times.decode_tokens_per_second),
            (0.0, 0.0)
        );
        let (many, came) = read_slowly(&engine, 30);
        assert_eq!(many.usage.completion_tokens, 30);
        let took = many.timings.decode_ms;
        assert!(0.0 < took && took < came, "{took} {came}");
    }
}

/// The gauges of `counters` that are 0 without an engine.
fn gauges(counters: &Counters) -> [usize; 6] {
    [
        &counters.running,
        &counters.waiting,
        &counters.pages_used,
        &counters.pages,
        &counters.kept_texts,
        &counters.kept_bytes,
    ]
    .map(|gauge: &AtomicUsize| gauge.load(Ordering::Acquire))
}

#[test]
fn an_engine_that_panics_leaves_no_gauge_behind() {
    for overlap in [true, false] {
        let engine = start(overlap);
        engine.complete(request(&engine, 4)).unwrap();
        let counters: Arc<Counters> = engine.counters().clone();
        assert!(gauges(&counters)[3] > 0, "an engine has pages");
        let sink = |event: Event| match event {
            Event::Text(_) => panic!("on purpose"),
            _ => true,
        };
        // As many as run and one that waits.
        let requests =
            (0..=engine.info().sequences).map(|_| (request(&engine, 40), Box::new(sink) as Sink));
        engine.submit_all(requests.collect()).unwrap();
        let begun = Instant::now();
        while gauges(&counters) != [0; 6] {
            assert!(begun.elapsed() < PATIENCE, "{:?}", gauges(&counters));
            std::thread::yield_now();
        }
        let refused = engine.complete(request(&engine, 4));
        assert!(matches!(refused, Err(Rejected::Stopped)), "{refused:?}");
        assert_eq!(gauges(&counters), [0; 6]);
        assert_eq!(counters.finished.load(Ordering::Relaxed), 1);
    }
}
