//! A picture that arrives beside running texts: the tower looks in slices between rounds, for as little of their
//! time as can be, and all texts are those of requests that were alone, plainly decoded. What is
//! cancelled meanwhile leaves nothing behind.

use crate::writing::one_thread;
use engine::{
    CancelToken, Engine, EngineOptions, Event, Frame, LoadOptions, Probing, Request, Source,
};
use serde_json::{Map, json};
use speculate::DraftLength::Fixed;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use suites::{repository, test_pixels};

/// Models that see.
const SEEING: [&str; 2] = ["models/tiny-gemma4-vision", "models/tiny-qwen3.5-vision"];

/// Texts beside a picture.
const TEXTS: usize = 3;
/// Tokens of each of them, and of the answer about the picture.
const TOKENS: [usize; 2] = [400, 24];
/// How long is waited for what takes seconds.
const PATIENCE: Duration = Duration::from_secs(300);

fn start(model: &str) -> Engine {
    let options = LoadOptions {
        probing: Probing::Skip {
            reason: "a test".into(),
        },
        context: Some(2048),
        sequences: TEXTS + 1,
        ..LoadOptions::default()
    };
    let source = Source::Folder(repository(model));
    let backend = one_thread();
    let model = engine::load(Arc::new(backend), &source, &options).unwrap();
    let options = EngineOptions {
        tower_share: 1,
        ..EngineOptions::default()
    };
    Engine::start(model, options)
}

fn text(engine: &Engine, number: usize) -> Request {
    let prompt = format!("Story number {number}: once upon a time");
    Request {
        max_tokens: Some(TOKENS[0]),
        ignore_eos: true,
        ..Request::new(engine.text().encode_prompt(&prompt).unwrap())
    }
}

/// A question about a picture.
fn question(engine: &Engine) -> Request {
    let (height, width) = (320, 384);
    let frame = Frame::new(height, width, test_pixels(1, height, width));
    let vision = engine.vision().expect("a model that sees");
    let picture = vision.picture(&frame, None).unwrap();
    let content = json!([{"type": "image"}, {"type": "text", "text": "What is this?"}]);
    let messages = json!([{"role": "user", "content": content}]);
    let text = engine.text();
    let tokens = text.encode_chat(&messages, None, true, &Map::new());
    let placed = vision.place(tokens.unwrap(), vec![picture], &text.tokenizer);
    let (prompt, media) = placed.unwrap();
    Request {
        media,
        max_tokens: Some(TOKENS[1]),
        ignore_eos: true,
        ..Request::new(prompt)
    }
}

/// The tokens of an answer, as it ends.
pub(crate) type Tokens = Receiver<Vec<u32>>;

/// Submits `request`; `watch` sees the engine's counters at each event, on the engine's thread.
pub(crate) fn submit(
    engine: &Engine,
    request: Request,
    watch: impl Fn() + Send + 'static,
) -> (Tokens, CancelToken) {
    let (ended, inbox) = channel();
    let mut tokens = Vec::new();
    let sink = move |event: Event| {
        watch();
        match event {
            Event::Text(segments) => {
                let written = segments.iter().flat_map(|segment| &segment.tokens);
                tokens.extend(written.map(|token| token.id));
            }
            Event::Done(_) => return ended.send(std::mem::take(&mut tokens)).is_ok(),
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
        true
    };
    let token = engine.submit(request, Box::new(sink)).unwrap();
    (inbox, token)
}

/// What is written after `request` alone, without drafts.
fn plain(engine: &Engine, request: Request) -> Vec<u32> {
    let request = Request {
        draft: Some(Fixed(0)),
        ..request
    };
    engine.complete(request).unwrap().1
}

/// What texts and the question are answered with by an engine that does one thing at a time.
fn alone(model: &str) -> (Vec<Vec<u32>>, Vec<u32>) {
    let engine = start(model);
    let texts = (0..TEXTS).map(|number| plain(&engine, text(&engine, number)));
    let texts = texts.collect();
    let answer = plain(&engine, question(&engine));
    (texts, answer)
}

/// Starts all texts; each of their events calls `watch`. All of them run when this returns.
fn start_texts(engine: &Engine, watch: &Arc<dyn Fn() + Send + Sync>) -> Vec<Tokens> {
    let (running, inbox) = channel();
    let texts = (0..TEXTS).map(|number| {
        let (watch, running) = (watch.clone(), running.clone());
        let watch = move || {
            watch();
            // Nobody listens once all run.
            running.send(number).ok();
        };
        submit(engine, text(engine, number), watch).0
    });
    let texts: Vec<Tokens> = texts.collect();
    let mut waited: Vec<usize> = (0..TEXTS).collect();
    while !waited.is_empty() {
        let number = inbox.recv_timeout(PATIENCE).expect("texts start");
        waited.retain(|of| *of != number);
    }
    texts
}

fn assert_texts(what: &str, texts: &[Tokens], want: &[Vec<u32>]) {
    for (number, (text, want)) in texts.iter().zip(want).enumerate() {
        let got = text.recv_timeout(PATIENCE).expect("a text ends");
        assert!(got == *want, "{what}: text {number}");
    }
}

#[test]
fn a_tower_that_looks_in_slices_beside_texts_changes_no_token() {
    for model in SEEING {
        let (want, answer) = alone(model);
        let engine = start(model);
        let counters = engine.counters().clone();
        // Events of texts while the tower had begun and was not done.
        let seen = Arc::new(AtomicU64::new(0));
        let watch: Arc<dyn Fn() + Send + Sync> = {
            let (seen, counters) = (seen.clone(), counters.clone());
            Arc::new(move || {
                let of = |n: &AtomicU64| n.load(Ordering::Relaxed);
                if of(&counters.media.tower_micros) > 0 && of(&counters.media.encoded) == 0 {
                    seen.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        let texts = start_texts(&engine, &watch);
        let (about, _) = submit(&engine, question(&engine), || ());
        let got = about
            .recv_timeout(PATIENCE)
            .expect("the question is answered");
        assert!(got == answer, "{model}: the answer");
        assert_texts(model, &texts, &want);
        let events = seen.load(Ordering::Relaxed);
        println!("{model}: {events} events between slices");
        assert!(events > 0, "{model}: the tower looks beside texts");
        assert_eq!(counters.media.encoded.load(Ordering::Relaxed), 1);
        assert_eq!(counters.media.shown.load(Ordering::Relaxed), 1);
    }
}

#[test]
fn a_question_that_is_cancelled_while_the_tower_looks_leaves_nothing_behind() {
    for model in SEEING {
        let (want, answer) = alone(model);
        let engine = start(model);
        let counters = engine.counters().clone();
        let cancel: Arc<Mutex<Option<CancelToken>>> = Arc::default();
        // Microseconds of the tower when the request was gone.
        let micros = Arc::new(AtomicU64::new(0));
        let watch: Arc<dyn Fn() + Send + Sync> = {
            let (cancel, micros, counters) = (cancel.clone(), micros.clone(), counters.clone());
            Arc::new(move || {
                let of = |n: &AtomicU64| n.load(Ordering::Relaxed);
                let worked = of(&counters.media.tower_micros);
                if worked > 0
                    && let Some(token) = &*cancel.lock().unwrap_or_else(PoisonError::into_inner)
                {
                    token.cancel();
                }
                if of(&counters.cancelled) > 0 {
                    micros.store(worked, Ordering::Relaxed);
                }
            })
        };
        let texts = start_texts(&engine, &watch);
        let (about, token) = submit(&engine, question(&engine), || ());
        *cancel.lock().unwrap() = Some(token);
        about.recv_timeout(PATIENCE).expect_err("nobody answers");
        assert_texts(model, &texts, &want);
        let of = |n: &AtomicU64| n.load(Ordering::Relaxed);
        assert_eq!(of(&counters.cancelled), 1, "{model}");
        assert_eq!(
            of(&counters.media.encoded),
            0,
            "{model}: the tower was not done"
        );
        assert_eq!(
            of(&counters.media.tower_micros),
            of(&micros),
            "{model}: it stopped"
        );
        let again = engine.complete(question(&engine)).unwrap().1;
        assert!(again == answer, "{model}: asked once more");
        assert_eq!(of(&counters.media.encoded), 1, "{model}");
    }
}
