//! Requests with clips: what is cancelled while the tower looks leaves nothing behind but what it has
//! seen.

use cpu::{Cpu, CpuOptions};
use engine::{
    ClipOptions, DraftChoice, Engine, EngineOptions, Frame, LoadOptions, Probing, Request, Source,
};
use serde_json::{Map, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Frames of the clip.
const FRAMES: usize = 48;
/// How long is waited for what takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(120);

fn start(model: &str) -> Engine {
    let options = LoadOptions {
        draft: DraftChoice::Auto,
        probing: Probing::Skip {
            reason: "a test".into(),
        },
        context: Some(4096),
        sequences: 2,
        ..LoadOptions::default()
    };
    let backend = Cpu::new(CpuOptions::default()).unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    let source = Source::Folder(folder.join(model));
    let model = engine::load(Arc::new(backend), &source, &options).unwrap();
    Engine::start(model, EngineOptions::default())
}

/// A question about a clip whose frames all differ.
fn ask(engine: &Engine) -> Request {
    let (height, width) = (64, 64);
    let frame = |i: usize| {
        let pixel = |p: usize| [(p + 5 * i) as u8, (p * i) as u8, (90 + i) as u8];
        Frame::new(height, width, (0..height * width).flat_map(pixel).collect())
    };
    let frames: Vec<Frame> = (0..FRAMES).map(frame).collect();
    let options = ClipOptions {
        frames: Some(FRAMES),
        ..ClipOptions::default()
    };
    let (vision, text) = (engine.vision().unwrap(), engine.text());
    let clip = vision.frames(&frames, Some(8.0), options).unwrap();
    assert!(clip.looks() >= FRAMES / 2 && clip.rows() >= clip.looks());
    let content = json!([{"type": "video"}, {"type": "text", "text": "What moves?"}]);
    let messages = json!([{"role": "user", "content": content}]);
    let tokens = text.encode_chat(&messages, None, true, &Map::new());
    let placed = vision.place(tokens.unwrap(), vec![clip], &text.tokenizer);
    let (prompt, media) = placed.unwrap();
    Request {
        media,
        max_tokens: Some(16),
        ignore_eos: true,
        ..Request::new(prompt)
    }
}

fn story(engine: &Engine) -> Request {
    let prompt = engine.text().encode_prompt("Once upon a time").unwrap();
    Request {
        max_tokens: Some(32),
        ignore_eos: true,
        ..Request::new(prompt)
    }
}

#[test]
fn a_clip_that_is_cancelled_while_the_tower_looks_changes_nothing() {
    for model in ["tiny-gemma4-vision", "tiny-qwen3.5-vision"] {
        let cold = start(model);
        let (told, ids, _) = cold.complete(story(&cold)).unwrap();
        let (answer, answer_ids, outcome) = cold.complete(ask(&cold)).unwrap();
        assert!(outcome.usage.media_tokens.videos > 0 && outcome.usage.media_tokens.pictures == 0);
        let looks = cold.counters().media.encoded.load(Ordering::Relaxed);

        let engine = start(model);
        let counts = &engine.counters().media;
        let token = engine.submit(ask(&engine), Box::new(|_| true)).unwrap();
        let since = Instant::now();
        while counts.encoded.load(Ordering::Relaxed) == 0 {
            assert!(since.elapsed() < PATIENCE, "{model}: the tower looks");
            std::thread::yield_now();
        }
        token.cancel();
        // Between two looks others are served.
        let beside = engine.complete(story(&engine)).unwrap();
        assert_eq!((beside.0, beside.1), (told, ids), "{model}");
        while engine.counters().cancelled.load(Ordering::Relaxed) == 0 {
            assert!(since.elapsed() < PATIENCE, "{model}: it is cancelled");
            std::thread::yield_now();
        }
        let seen = counts.encoded.load(Ordering::Relaxed);
        println!("{model}: {seen} of {looks} looks before it was cancelled");
        // What was seen is known.
        let again = engine.complete(ask(&engine)).unwrap();
        assert_eq!((again.0, again.1), (answer, answer_ids), "{model}");
        assert_eq!(counts.known.load(Ordering::Relaxed), seen, "{model}");
        assert_eq!(counts.encoded.load(Ordering::Relaxed), looks, "{model}");
    }
}
