//! Requests with sounds, to a model that hears and to one that does not. The one that hears is made here: the
//! bundled model that sees, and a front end of raw frames with weights of a fixed seed.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use crate::client::Server;
use crate::pictures::{base64, chat, details, picture, red, said, setup, with, words};

/// Samples that become a row.
const FRAME: usize = 640;

/// A safetensors file of the front end's one matrix.
fn front_end(width: usize) -> Vec<u8> {
    let mut state = 7u32;
    let values = (0..width * FRAME).flat_map(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) as f32 / 16_777_216.0 - 0.5).to_le_bytes()
    });
    let data: Vec<u8> = values.collect();
    let header = json!({"model.embed_audio.embedding_projection.weight":
        {"dtype": "F32", "shape": [width, FRAME], "data_offsets": [0, data.len()]}});
    let header = header.to_string().into_bytes();
    [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()
}

/// The folder of a model that sees and hears.
fn hearing() -> &'static str {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let seeing = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-gemma4-vision");
        let seeing = seeing.canonicalize().unwrap();
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("hearing");
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        let read = |name: &str| -> Value {
            serde_json::from_slice(&std::fs::read(seeing.join(name)).unwrap()).unwrap()
        };
        let mut config = read("config.json");
        config["audio_config"] = json!({"model_type": "gemma4_unified_audio"});
        for (key, token) in [("boa_token_id", 21), ("eoa_token_index", 22)] {
            config[key] = json!(token);
        }
        let width = config["text_config"]["hidden_size"].as_u64().unwrap() as usize;
        let mut index = read("model.safetensors.index.json");
        let matrix = "model.embed_audio.embedding_projection.weight";
        index["weight_map"][matrix] = json!("model-audio.safetensors");
        let template = std::fs::read_to_string(seeing.join("chat_template.jinja")).unwrap();
        let video = "{%- elif part.type == 'video' -%}<|video|>";
        assert!(template.contains(video));
        let audio = format!("{video}\n{{%- elif part.type == 'audio' -%}}<|audio|>");
        for (name, bytes) in [
            ("config.json", config.to_string().into_bytes()),
            (
                "model.safetensors.index.json",
                index.to_string().into_bytes(),
            ),
            ("model-audio.safetensors", front_end(width)),
            (
                "chat_template.jinja",
                template.replace(video, &audio).into_bytes(),
            ),
        ] {
            std::fs::write(folder.join(name), bytes).unwrap();
        }
        for entry in std::fs::read_dir(&seeing).unwrap() {
            let name = entry.unwrap().file_name();
            if !folder.join(&name).exists() {
                symlink(seeing.join(&name), folder.join(&name)).unwrap();
            }
        }
        folder
    });
    folder.to_str().unwrap()
}

/// A WAV file of 16 bits: a tone of `hertz`, `n` samples at 16 kHz.
fn wav(hertz: f64, n: u32) -> Vec<u8> {
    let mut file = b"RIFF".to_vec();
    file.extend((36 + 2 * n).to_le_bytes());
    file.extend(b"WAVEfmt \x10\0\0\0\x01\0\x01\0");
    file.extend(16_000u32.to_le_bytes());
    file.extend(32_000u32.to_le_bytes());
    file.extend(b"\x02\0\x10\0data");
    file.extend((2 * n).to_le_bytes());
    for i in 0..n {
        let at = (f64::from(i) * hertz * std::f64::consts::TAU / 16_000.0).sin();
        file.extend(((at * 9000.0) as i16).to_le_bytes());
    }
    file
}

fn sound(file: &[u8]) -> Value {
    json!({"type": "input_audio", "input_audio": {"data": base64(file), "format": "wav"}})
}

#[tokio::test]
async fn speculation_never_changes_what_is_said_of_a_sound() {
    let server = Server::start(setup(hearing())).await;
    let parts = |hertz| {
        [
            words("Listen: "),
            sound(&wav(hertz, 20_000)),
            words(" What is it?"),
        ]
    };
    let ask = with(&chat(&parts(440.0)), "logprobs", json!(true));
    let drafted = server.chat(&ask).await;
    let record = drafted.json()["speculation"].clone();
    assert!(record["drafted"].as_u64() > Some(0), "{record}");
    let plain = Server::start(setup(hearing())).await;
    let plain = plain.chat(&with(&ask, "speculation", json!("off"))).await;
    assert_eq!(plain.json()["speculation"]["engaged"], false);
    assert_eq!(said(&drafted), said(&plain));
    // 31.25 frames.
    assert_eq!(details(&drafted, "audio_tokens"), 32);
    let other = with(&chat(&parts(700.0)), "logprobs", json!(true));
    assert!(said(&server.chat(&other).await) != said(&plain), "it hears");
}

#[tokio::test]
async fn a_second_question_about_a_sound_runs_no_tower() {
    let server = Server::start(setup(hearing())).await;
    let counts = &server.engine.counters().media;
    let count = || [&counts.encoded, &counts.known].map(|n| n.load(Ordering::Relaxed));
    let long = "The rabbit and the kite went to the wind and the hill. ".repeat(12);
    let before = [words(&long), sound(&wav(440.0, 16_000))];
    let one = chat(&[&before[..], &[words(&long)]].concat());
    let first = server.chat(&one).await;
    assert_eq!((details(&first, "cached_tokens"), count()), (0, [1, 0]));
    let two = chat(&[&before[..], &[words(&long), words("And where?")]].concat());
    let second = server.chat(&two).await;
    assert_eq!(count(), [1, 1]);
    assert!(details(&second, "cached_tokens") > details(&second, "audio_tokens"));
    let cold = Server::start(setup(hearing())).await;
    assert_eq!(said(&cold.chat(&two).await), said(&second));
}

#[tokio::test]
async fn every_form_of_a_sound_is_the_same_and_stands_beside_pictures() {
    let server = Server::start(setup(hearing())).await;
    let file = wav(300.0, 9_000);
    let url = format!("data:audio/wav;base64,{}", base64(&file));
    let ask = |part: Value| chat(&[picture(&red()), part, words("What is it?")]);
    let first = server.chat(&ask(sound(&file))).await;
    assert!(details(&first, "image_tokens") > 0 && details(&first, "audio_tokens") == 15);
    for part in [
        json!({"type": "audio_url", "audio_url": {"url": url}}),
        json!({"type": "audio_url", "audio_url": url}),
    ] {
        assert_eq!(said(&server.chat(&ask(part)).await), said(&first));
    }
    let image = format!("data:image/png;base64,{}", red());
    let responses = json!({"max_output_tokens": 24, "temperature": 0, "input": [{"role": "user", "content": [
        {"type": "input_image", "image_url": image}, sound(&file), {"type": "input_text", "text": "What is it?"}]}]});
    let reply = server.post("/v1/responses", &responses).await;
    let text = reply.json()["output"][0]["content"][0]["text"].clone();
    assert_eq!(text, first.text(), "{reply:?}");
    let props = server.get("/props").await.json();
    assert_eq!(props["modalities"]["audio"], true, "{props}");
}

#[tokio::test]
async fn what_is_no_sound_is_refused_by_its_place() {
    let server = Server::start(setup(hearing())).await;
    let whole = wav(440.0, 9_000);
    let long = wav(440.0, 16_000 * 31);
    for (file, told) in [
        (&whole[..40], "cut off"),
        (&whole[..9_000], "are there"),
        (b"RIFF", "no known format"),
        (&long[..], "30 s at most"),
    ] {
        let reply = server.chat(&chat(&[words("a"), sound(file)])).await;
        assert_eq!(reply.status, 400, "{reply:?}");
        let error = reply.json()["error"].clone();
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(told), "{message}");
        assert_eq!(
            error["param"], "messages[0].content[1].input_audio",
            "{error}"
        );
    }
    let many = vec![sound(&whole); 17];
    let reply = server.chat(&chat(&many)).await;
    assert_eq!(reply.status, 400, "{reply:?}");
    let message = reply.json()["error"]["message"].to_string();
    assert!(message.contains("one sound too many"), "{message}");
}

#[tokio::test]
async fn a_model_that_does_not_hear_says_so() {
    for model in ["tiny-gemma4-vision", "tiny-qwen3.5"] {
        let server = Server::start(setup(model)).await;
        let reply = server
            .chat(&chat(&[sound(&wav(440.0, 9_000)), words("What?")]))
            .await;
        assert_eq!(reply.status, 400, "{reply:?}");
        let error = reply.json()["error"].clone();
        let message = error["message"].as_str().unwrap();
        assert!(
            message.contains("is a sound, and this model takes none"),
            "{message}"
        );
        assert!(message.contains("does not hear"), "{message}");
        assert_eq!(error["param"], "messages[0].content[0].input_audio");
    }
}
