//! What the bundled vision models say of generated pictures and clips, word for word as transformers has
//! them say it (`tests/golden/caption.py`): files, resizing, which frames are looked at, prompts, towers and
//! text models, all at once.

use cache::KvPlan;
use std::io::Cursor;
use std::sync::Arc;

use cpu::{Activations, Cpu, CpuOptions};
use engine::{
    ClipOptions, ClipSource, DraftChoice, Engine, EngineOptions, LoadOptions, MediaItem,
    MediaLimits, Probing, Request, Source,
};
use image::codecs::gif::GifEncoder;
use image::{Delay, DynamicImage, ImageFormat, RgbImage};
use serde_json::{Map, Value, json};
use suites::drawing::draw;
use suites::repository;

fn start(model: &str, draft: DraftChoice, activations: Activations) -> Engine {
    let options = LoadOptions {
        draft,
        probing: Probing::Skip {
            reason: "a test".into(),
        },
        context: Some(1024),
        kv_format: KvPlan::both(&quant::kv::F32),
        ..LoadOptions::default()
    };
    // Two tests run at once.
    let cpu = CpuOptions {
        activations,
        threads: 1,
        ..CpuOptions::default()
    };
    let source = Source::Folder(repository(format!("models/{model}")));
    let model = engine::load(Arc::new(Cpu::new(cpu).unwrap()), &source, &options);
    Engine::start(model.unwrap(), EngineOptions::default())
}

/// The frames of a scene, as the file of a picture or of an animation.
fn file(scene: &Value, fps: u32) -> Vec<u8> {
    let frames = draw(scene).into_iter().map(|frame| {
        let (width, height) = (frame.width() as u32, frame.height() as u32);
        RgbImage::from_raw(width, height, frame.rgb().to_vec()).unwrap()
    });
    let frames: Vec<RgbImage> = frames.collect();
    let mut bytes = Cursor::new(Vec::new());
    if let [picture] = &frames[..] {
        picture.write_to(&mut bytes, ImageFormat::Png).unwrap();
        return bytes.into_inner();
    }
    let mut encoder = GifEncoder::new(&mut bytes);
    for frame in frames {
        let frame = DynamicImage::from(frame).into_rgba8();
        let delay = Delay::from_numer_denom_ms(1000, fps);
        let frame = image::Frame::from_parts(frame, 0, 0, delay);
        encoder.encode_frame(frame).unwrap();
    }
    drop(encoder);
    bytes.into_inner()
}

/// What `engine` says of a scene.
fn answer(engine: &Engine, scene: &Value, fps: u32) -> String {
    let vision = engine.vision().unwrap();
    let limits = MediaLimits::default();
    let file = file(scene, fps);
    let is_clip = scene["frames"].as_array().unwrap().len() > 1;
    let item: MediaItem = match is_clip {
        true => vision.open_clip(ClipSource::File(file), ClipOptions::default(), &limits),
        false => vision.open(file, None, &limits),
    }
    .unwrap();
    let kind = if is_clip { "video" } else { "image" };
    let content = json!([{"type": kind}, {"type": "text", "text": scene["question"]}]);
    let messages = json!([{"role": "user", "content": content}]);
    let text = engine.text();
    let tokens = text.encode_chat(&messages, None, true, &Map::new());
    let placed = vision.place(tokens.unwrap(), vec![item], &text.tokenizer);
    let (prompt, media) = placed.unwrap();
    let request = Request {
        media,
        max_tokens: Some(40),
        ..Request::new(prompt)
    };
    engine.complete(request).unwrap().0
}

#[test]
fn gemma4_says_of_pictures_and_clips_what_transformers_has_it_say() {
    assert_captions("tiny-gemma4-vision");
}

#[test]
fn qwen3_5_says_of_pictures_and_clips_what_transformers_has_it_say() {
    assert_captions("tiny-qwen3.5-vision");
}

/// Asserts that `model` says of every scene what is stored of it.
fn assert_captions(model: &str) {
    let stored = std::fs::read(repository("tests/golden/captions.json")).unwrap();
    let stored: Value = serde_json::from_slice(&stored).unwrap();
    let fps = stored["fps"].as_u64().unwrap() as u32;
    let scenes = stored["scenes"].as_array().unwrap();
    let is_clip = |scene: &&Value| scene["frames"].as_array().unwrap().len() > 1;
    let clips = scenes.iter().filter(is_clip).count();
    assert!(clips >= 20 && scenes.len() - clips >= 100);
    // With drafts too: the text is the same.
    let engines =
        [DraftChoice::None, DraftChoice::Auto].map(|draft| start(model, draft, Activations::F32));
    let mut right = 0;
    for (i, scene) in scenes.iter().enumerate() {
        let want = scene["answers"][model].as_str().unwrap();
        let got = answer(&engines[i % 2], scene, fps);
        assert_eq!(got, want, "{model}: scene {i}: {}", scene["question"]);
        right += usize::from(got == scene["right"].as_str().unwrap());
    }
    println!("{model}: {right} of {} are right", scenes.len());
    assert!(right * 10 > scenes.len() * 7, "{model}: {right} are right");
}
