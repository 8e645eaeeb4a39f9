//! A GGUF file has all of a model: weights, and the vocabulary under its keys. It
//! answers as the folder that it was made from.

use convert::gguf::{Store, TensorInfo, Writer};
use convert::{vocabulary, vocabulary_keys};
use cpu::{Activations, Cpu, CpuOptions};
use engine::{DraftChoice, LoadOptions, Source, load};
use quant::Format;
use serde_json::{Map, json};
use speculate::{DraftLength, Sampling, StreamOptions};
use std::path::PathBuf;
use std::sync::Arc;
use suites::repository;
use text::TextFiles;
use text::gguf::Vocabulary;
use weights::Checkpoint;
use weights::gguf::{Export, Value};

fn bundled(name: &str) -> PathBuf {
    repository(format!("models/{name}"))
}

/// The bundled model `name` as a file, matrices in `format` where their rows
/// are whole blocks of it and else in `f32`.
fn file(name: &str, format: &'static Format) -> Vec<u8> {
    let folder = bundled(name);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let export = Export::of(&checkpoint).unwrap();
    let f32s = |values: &[f32]| {
        values
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .collect::<Vec<u8>>()
    };
    let (mut tensors, mut data) = (Vec::new(), Vec::new());
    let mut add = |name: String, shape: Vec<usize>, format: &'static Format, values: &[f32]| {
        let bytes = match format.name {
            "f32" => f32s(values),
            _ => quant::encode(format, values, shape[1], quant::Scalar::F32).codes,
        };
        tensors.push(TensorInfo {
            name,
            shape,
            store: Store::Numbers(format),
        });
        data.push(bytes);
    };
    for (name, values) in export.derived() {
        add(name.into(), vec![values.len()], &quant::F32, &values);
    }
    for name in checkpoint
        .names()
        .filter(|n| !n.ends_with(".scales") && !n.ends_with(".biases"))
    {
        let (stored, rewrite) = export.name(name).unwrap();
        let shape = checkpoint.shape(name).unwrap();
        let n = shape.iter().product();
        let (rows, cols) = (shape[0], n / shape[0]);
        let mut values = match (rewrite.is_norm(), shape.len()) {
            (true, _) => checkpoint.norm(name, n).unwrap(),
            (false, 2) => checkpoint.matrix(name, rows, cols).unwrap().to_f32(),
            _ => checkpoint.vector(name, n).unwrap(),
        };
        rewrite.apply(&mut values, rows, cols).unwrap();
        match shape.len() {
            2 if cols.is_multiple_of(format.block) => {
                add(stored, vec![rows, cols], format, &values)
            }
            1 => add(stored, shape, &quant::F32, &values),
            _ => add(stored, vec![rows, cols], &quant::F32, &values),
        }
    }
    let metadata = export.metadata();
    let mut keys: Vec<(&str, Value<'_>)> = metadata
        .iter()
        .map(|(k, v)| (k.as_str(), v.clone()))
        .collect();
    let written = |keys: &[(&str, Value<'_>)]| {
        let mut writer = Writer::new(Vec::new(), keys, tensors).unwrap();
        data.iter().for_each(|bytes| writer.write(bytes).unwrap());
        writer.finish().unwrap()
    };
    if !folder.join("tokenizer.json").exists() {
        return written(&keys); // a drafter has its target's
    }
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    let files = [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ];
    let [tokenizer, config, template, generation] = files.map(read);
    let files = TextFiles {
        tokenizer: &tokenizer,
        tokenizer_config: Some(&config),
        chat_template: Some(&template),
        generation_config: Some(&generation),
        config: None,
    };
    let size = checkpoint.shape("embed_tokens.weight").unwrap()[0];
    let vocabulary = Vocabulary::from_files(&files, size).unwrap();
    keys.extend(vocabulary_keys(&vocabulary));
    written(&keys)
}

/// A folder of files, removed with the value.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str, files: &[(&str, Vec<u8>)]) -> Folder {
        let path = std::env::temp_dir().join(format!("engine-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        for (name, bytes) in files {
            std::fs::write(path.join(name), bytes).unwrap();
        }
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0); // a leftover harms nobody
    }
}

/// The greedy answer of the model at `path`, and its drafter.
fn answer(
    path: PathBuf,
    draft: DraftChoice,
    activations: Activations,
) -> (Vec<u32>, Option<&'static str>) {
    let cpu = Cpu::new(CpuOptions {
        threads: 1,
        activations,
        ..CpuOptions::default()
    });
    let options = LoadOptions {
        draft,
        ..LoadOptions::default()
    };
    let mut model = load(Arc::new(cpu.unwrap()), &Source::Folder(path), &options).unwrap();
    let unused = &model.info.unused_tensors;
    assert!(
        unused.iter().all(|name| name.starts_with("mtp.")),
        "{unused:?}"
    );
    let messages =
        json!([{"role": "user", "content": "Tell me a story about a rabbit and a kite."}]);
    let prompt = model
        .text
        .encode_chat(&messages, None, true, &Map::new())
        .unwrap();
    let options = StreamOptions {
        sampling: Sampling::default(),
        max_tokens: 24,
        stop_tokens: model.text.stop_tokens.ids().into(),
        draft: DraftLength::Fixed(3),
        logprobs: None,
    };
    let mut stream = model.speculator.open(prompt, options).unwrap();
    while stream.finish().is_none() {
        model.speculator.round(&mut [&mut stream], 64).unwrap();
    }
    (stream.tokens().to_vec(), model.info.drafter)
}

#[test]
fn a_file_of_f32_answers_as_the_folder_it_was_made_from() {
    let files = Folder::new(
        "f32",
        &[
            ("gemma.gguf", file("tiny-gemma4", &quant::F32)),
            (
                "gemma-assistant.gguf",
                file("tiny-gemma4-assistant", &quant::F32),
            ),
            ("qwen.gguf", file("tiny-qwen3.5", &quant::F32)),
        ],
    );
    for (folder, file, drafter) in [
        ("tiny-gemma4", "gemma.gguf", "assistant"),
        ("tiny-qwen3.5", "qwen.gguf", "mtp"),
    ] {
        let answer = |path| answer(path, DraftChoice::Auto, Activations::F32);
        let (expected, _) = answer(bundled(folder));
        let (found, found_drafter) = answer(files.0.join(file));
        assert_eq!(found, expected, "{folder}");
        assert_eq!(found_drafter, Some(drafter));
    }
}

#[test]
fn drafts_change_no_answer_of_a_quantized_file() {
    for name in ["q8_0", "q4_k"] {
        let format = quant::format(name).unwrap();
        let files = Folder::new(name, &[("qwen.gguf", file("tiny-qwen3.5", format))]);
        let answer = |draft| answer(files.0.join("qwen.gguf"), draft, Activations::Int8).0;
        assert_eq!(
            answer(DraftChoice::Named("mtp", None)),
            answer(DraftChoice::None),
            "{name}"
        );
    }
}

#[test]
fn a_vocabulary_survives_its_keys() {
    let bytes = file("tiny-gemma4", quant::format("q8_0").unwrap());
    let checkpoint = Checkpoint::from_bytes("", vec![("a.gguf".into(), bytes.into())]).unwrap();
    let metadata = checkpoint.metadata().unwrap();
    let found = vocabulary(&metadata);
    let keys: Vec<(&str, Value<'_>)> = vocabulary_keys(&found);
    for (key, value) in &keys {
        assert_eq!(metadata.get(key).as_ref(), Some(value), "{key}");
    }
    assert_eq!(
        (found.bos, found.eos, &found.ends[..]),
        (Some(2), Some(5), &[1, 13][..])
    );
}
