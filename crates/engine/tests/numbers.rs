//! A model that computes values that are not numbers: it is not loaded where the preflight
//! meets them, and a request that meets them later fails alone.

use engine::{
    DraftChoice, DraftLength, Engine, EngineOptions, Event, LoadOptions, Model, NO_TOKEN_REASON,
    Probing, Rejected, Request, Sampling, Source,
};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;

const NAN: [u8; 2] = 0x7fc0u16.to_le_bytes();
/// A token that one prompt has.
const DAMAGED: u32 = 4711;

fn bundled(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../models")
        .join(model)
}

/// A copy of a bundled model in which `rows` of the tensor `name` are NaN, all if absent.
fn damaged(model: &str, test: &str, name: &str, row: Option<usize>) -> Source {
    let to = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join(test)
        .join(model);
    let _ = fs::remove_dir_all(&to);
    fs::create_dir_all(&to).unwrap();
    for entry in fs::read_dir(bundled(model)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    let file = to.join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
    let (_, tensor) = header
        .as_object()
        .unwrap()
        .iter()
        .find(|(own, _)| own.ends_with(name))
        .expect("the tensor");
    assert_eq!(tensor["dtype"], "BF16");
    let at = |i: usize| 8 + n + tensor["data_offsets"][i].as_u64().unwrap() as usize;
    let (begin, end) = (at(0), at(1));
    let rows = tensor["shape"][0].as_u64().unwrap() as usize;
    let size = (end - begin) / rows;
    let part = match row {
        None => begin..end,
        Some(row) => begin + row * size..begin + (row + 1) * size,
    };
    for value in bytes[part].chunks_exact_mut(2) {
        value.copy_from_slice(&NAN);
    }
    fs::write(file, bytes).unwrap();
    Source::Folder(to)
}

fn load(source: &Source, draft: DraftChoice, probing: Probing) -> Result<Model, String> {
    let backend = cpu::Cpu::new(cpu::CpuOptions::default()).unwrap();
    let options = LoadOptions {
        draft,
        probing,
        context: Some(256),
        sequences: 3,
        ..LoadOptions::default()
    };
    let model = engine::load(Arc::new(backend), source, &options);
    model.map_err(|error| {
        let source = std::error::Error::source(&error).map(ToString::to_string);
        format!("{error}: {}", source.unwrap_or_default())
    })
}

fn unprobed() -> Probing {
    Probing::Skip {
        reason: "a test".into(),
    }
}

fn request(prompt: &[u32], temperature: f32) -> Request {
    let sampling = Sampling {
        temperature,
        seed: 7,
        ..Sampling::default()
    };
    Request {
        sampling,
        max_tokens: Some(24),
        ignore_eos: true,
        ..Request::new(prompt.to_vec())
    }
}

#[test]
fn a_model_of_nan_is_not_loaded_and_writes_nothing() {
    for model in ["tiny-qwen3.5", "tiny-gemma4"] {
        let source = damaged(model, "nan_norm", "model.norm.weight", None);
        for draft in [
            DraftChoice::Auto,
            DraftChoice::None,
            DraftChoice::Named("ngram", None),
        ] {
            let error = load(&source, draft.clone(), Probing::default()).err();
            let error = error.expect("a damaged model is not loaded");
            assert!(error.contains(NO_TOKEN_REASON), "{error}");
            let model = load(&source, draft, unprobed()).unwrap();
            let engine = Engine::start(model, EngineOptions::default());
            for temperature in [0.0, 1.0] {
                let failed = engine.complete(request(&[5, 6, 7], temperature)).err();
                assert_eq!(failed, Some(Rejected::Failed(NO_TOKEN_REASON.into())));
            }
        }
    }
}

#[test]
fn a_request_that_meets_nan_fails_alone() {
    // Per-layer embeddings are only looked up, so a damaged row shows where its token is read.
    let name = "tiny-gemma4-e";
    let table = "embed_tokens_per_layer.scales";
    let source = damaged(name, "nan_token", table, Some(DAMAGED as usize));
    let sound = [5, 6, 7, 8, 9];
    for (draft, temperature) in [
        (DraftChoice::Auto, 0.0),
        (DraftChoice::Auto, 1.0),
        (DraftChoice::None, 1.0),
    ] {
        let start = |source: &Source| {
            let model = load(source, draft.clone(), unprobed()).unwrap();
            Engine::start(model, EngineOptions::default())
        };
        let alone = start(&Source::Folder(bundled(name)));
        let want = alone.complete(request(&sound, temperature)).unwrap();
        let engine = start(&source);
        let (events, inbox) = channel();
        let submit = |id: u8, prompt: &[u32]| {
            let events = events.clone();
            let sink = Box::new(move |event| events.send((id, event)).is_ok());
            engine.submit(request(prompt, temperature), sink).unwrap();
        };
        submit(0, &sound);
        submit(1, &[5, DAMAGED, 7]);
        submit(2, &sound);
        drop(events);
        let (mut texts, mut failed) = (vec![Vec::new(); 3], Vec::new());
        for (id, event) in inbox.iter() {
            match event {
                Event::Text(segments) => {
                    let tokens = segments.iter().flat_map(|segment| &segment.tokens);
                    texts[usize::from(id)].extend(tokens.map(|token| token.id));
                }
                Event::Failed(reason) => failed.push((id, reason)),
                _ => {}
            }
        }
        assert_eq!(failed, [(1, NO_TOKEN_REASON.to_owned())]);
        assert_eq!(texts, [want.1.clone(), Vec::new(), want.1.clone()]);
        // What the failed one had is used again.
        for _ in 0..4 {
            let again = engine.complete(request(&sound, temperature)).unwrap();
            assert_eq!(again.1, want.1);
        }
    }
}

#[test]
fn a_drafter_of_nan_is_refused_with_the_reason_and_changes_no_text() {
    let model = "tiny-qwen3.5";
    let source = damaged(model, "nan_drafter", "mtp.norm.weight", None);
    let error = load(&source, DraftChoice::Named("mtp", None), Probing::default()).err();
    let error = error.expect("refused");
    assert!(error.contains("values that are not numbers"), "{error}");
    let auto = load(&source, DraftChoice::Auto, Probing::default()).unwrap();
    assert_eq!(auto.info.drafter, Some("ngram"));
    let reason = &auto.info.drafter_reason;
    assert!(reason.contains("values that are not numbers"), "{reason}");

    let write = |source: &Source, draft: DraftChoice, temperature: f32| {
        let engine = Engine::start(
            load(source, draft, unprobed()).unwrap(),
            EngineOptions::default(),
        );
        let mut request = request(&[5, 6, 7, 8, 9], temperature);
        request.draft = Some(DraftLength::Fixed(3));
        engine.complete(request).unwrap()
    };
    for temperature in [0.0, 1.0] {
        let drafted = write(&source, DraftChoice::Named("mtp", None), temperature);
        let sound = Source::Folder(bundled(model));
        let plain = write(&sound, DraftChoice::None, temperature);
        assert_eq!(drafted.1, plain.1);
        assert_eq!(drafted.2.speculation.drafted, 0);
    }
}
