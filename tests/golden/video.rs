//! A conversation with a clip, from frames to logits, against the public processors and models
//! (`video_outputs` of `tests/golden/vision.py`).

use super::{Golden, TOLERANCE};
use backend::Backend;
use cache::KvPlan;
use cpu::{Activations, Cpu, CpuOptions};
use engine::{
    ClipOptions, DraftChoice, Engine, EngineOptions, Frame, LoadOptions, MediaKind, PlacedMedia,
    Probing, Request, Source,
};
use serde_json::{Map, json};
use speculate::{MediaSpan, Prompt};
use std::sync::Arc;
use suites::{Recorder, repository, test_pixels};

/// An engine of `model` in exact numbers, and what listens to it.
fn start(model: &str) -> (Engine, Arc<Recorder>) {
    let cpu = Cpu::new(CpuOptions {
        activations: Activations::F32,
        ..CpuOptions::default()
    });
    let recorder = Arc::new(Recorder::new(Box::new(cpu.unwrap())));
    let b: Arc<dyn Backend> = recorder.clone();
    let options = LoadOptions {
        draft: DraftChoice::None,
        probing: Probing::Skip {
            reason: "a test".into(),
        },
        context: Some(1024),
        kv_format: KvPlan::both(&quant::kv::F32),
        ..LoadOptions::default()
    };
    let source = Source::Folder(repository(format!("models/{model}")));
    let model = engine::load(b, &source, &options).unwrap();
    (Engine::start(model, EngineOptions::default()), recorder)
}

/// Ten frames of 90 by 130 pixels.
fn frames() -> Vec<Frame> {
    let (height, width) = (90, 130);
    let rgb = test_pixels(10, height, width);
    let frames = rgb.chunks_exact(height * width * 3);
    frames
        .map(|rgb| Frame::new(height, width, rgb.to_vec()))
        .collect()
}

/// The prompt of the conversation, and the clip's rows in it.
fn prompt(engine: &Engine) -> (Vec<u32>, Vec<PlacedMedia>) {
    let vision = engine.vision().unwrap();
    let clip = vision.frames(&frames(), Some(5.0), ClipOptions::default());
    let content = json!([
        {"type": "text", "text": "Look: "}, {"type": "video"}, {"type": "text", "text": " What moves?"},
    ]);
    let messages = json!([{"role": "user", "content": content}]);
    let text = engine.text();
    let tokens = text.encode_chat(&messages, None, true, &Map::new());
    let items = vec![clip.unwrap()];
    vision
        .place(tokens.unwrap(), items, &text.tokenizer)
        .unwrap()
}

#[test]
fn a_conversation_with_a_clip_is_that_of_the_public_processors() {
    for model in ["tiny-gemma4-vision", "tiny-qwen3.5-vision"] {
        let file = format!("tests/golden/outputs/video-{model}.safetensors");
        let golden = Golden::open(&repository(file));
        let (engine, recorder) = start(model);
        let (tokens, media) = prompt(&engine);
        assert_eq!(tokens, golden.integers["tokens"], "{model}");
        assert!(media.iter().all(|part| part.kind() == MediaKind::Video));

        if let Some(stored) = golden.integers.get("positions") {
            let span = |part: &PlacedMedia| MediaSpan {
                rows: part.rows(),
                hash: [0; 16],
                grid: part.grid(),
                is_causal: false,
                embeddings: Arc::default(),
            };
            let spans = media.iter().map(span).collect();
            let positions = Prompt::with_media(tokens.clone(), spans).positions();
            let n = positions.len();
            for (row, at) in positions.iter().enumerate() {
                let want = [0, 1, 2].map(|axis| stored[axis * n + row]);
                assert_eq!(*at, want, "{model}: position of row {row}");
            }
        }

        let request = Request {
            media,
            max_tokens: Some(1),
            ignore_eos: true,
            ..Request::new(tokens)
        };
        engine.complete(request).unwrap();
        let got = (0..).map_while(|i| recorder.note_at("logits", i)).last();
        let (got, want) = (got.unwrap(), &golden.values["logits"]);
        // A step of a prompt has the logits of its last row.
        assert_eq!(got.len(), want.len(), "{model}");
        let scale = want.iter().fold(1.0f32, |m, x| m.max(x.abs()));
        let apart = got.iter().zip(want).map(|(g, w)| (g - w).abs());
        let worst = apart.fold(0.0, f32::max);
        assert!(
            worst <= TOLERANCE * scale,
            "{model}: logits differ by {worst} (values up to {scale})"
        );
    }
}
