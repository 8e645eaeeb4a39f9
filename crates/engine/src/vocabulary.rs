//! The keys under which GGUF files have a vocabulary.
//!
//! `weights` knows the container and `text` the vocabulary; only here are both
//! known. The two functions are each other's inverse.

use serde_json::{Map, Value as Json, json};
use std::borrow::Cow;
use text::gguf::{Kind as TokenKind, Vocabulary};
use weights::gguf::{Kind, Metadata, Value};

/// Tokens that end a turn, beside the one that ends a text.
const ENDS: [&str; 2] = ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

/// Keys of sampler settings, and their names in `generation_config.json`.
const SAMPLING: &[(&str, &str)] = &[
    ("general.sampling.temp", "temperature"),
    ("general.sampling.top_k", "top_k"),
    ("general.sampling.top_p", "top_p"),
    ("general.sampling.min_p", "min_p"),
    ("general.sampling.penalty_repeat", "repetition_penalty"),
];

/// What a file's metadata say of text.
pub fn vocabulary<'a>(metadata: &Metadata<'a>) -> Vocabulary<'a> {
    let key = |key: &str| format!("tokenizer.ggml.{key}");
    let texts = |name: &str| match metadata.get(&key(name)) {
        Some(Value::Array(_, items)) => {
            let text = |item| match item {
                Value::String(text) => text,
                _ => Cow::Borrowed(""),
            };
            items.into_iter().map(text).collect()
        }
        _ => Vec::new(),
    };
    let kinds = metadata.get(&key("token_type"));
    let kinds = kinds.as_ref().and_then(Value::as_array).unwrap_or_default();
    let kind = |kind: &Value<'_>| TokenKind::numbered(kind.as_i64().unwrap_or(1));
    let id = |key: &str| metadata.scalar(key).and_then(|id| id.as_u64());
    let mut sampling = Map::new();
    for (key, name) in SAMPLING {
        let value = metadata.scalar(key);
        let number = value.and_then(|v| match v.as_i64() {
            Some(count) => Some(json!(count)),
            None => v.as_f64().map(|x| json!(x)),
        });
        sampling.extend(number.map(|number| ((*name).to_owned(), number)));
    }
    if let Some(Value::Array(_, ids)) = metadata.get(&key("suppress_tokens")) {
        let ids: Vec<Json> = ids.iter().map(|id| json!(id.as_i64())).collect();
        sampling.insert("suppress_tokens".into(), Json::Array(ids));
    }
    Vocabulary {
        model: metadata.text(&key("model")).unwrap_or_default(),
        pre: metadata.text(&key("pre")),
        tokens: texts("tokens"),
        kinds: kinds.iter().map(kind).collect(),
        merges: texts("merges"),
        bos: id(&key("bos_token_id")),
        eos: id(&key("eos_token_id")),
        ends: ENDS.iter().filter_map(|key| id(key)).collect(),
        padding: id(&key("padding_token_id")),
        add_bos: metadata
            .scalar(&key("add_bos_token"))
            .and_then(|v| v.as_bool()),
        chat_template: metadata.text("tokenizer.chat_template"),
        sampling,
    }
}

/// The keys that a file has for `vocabulary`.
pub fn vocabulary_keys<'a>(vocabulary: &'a Vocabulary<'_>) -> Vec<(&'static str, Value<'a>)> {
    let texts = |texts: &'a [Cow<'_, str>]| {
        let texts = texts.iter().map(|text| Value::from(&**text));
        Value::Array(Kind::String, texts.collect())
    };
    let id = |id: u64| Value::U32(id.try_into().unwrap_or(u32::MAX));
    let mut keys = vec![
        ("tokenizer.ggml.model", Value::from(&*vocabulary.model)),
        ("tokenizer.ggml.tokens", texts(&vocabulary.tokens)),
        ("tokenizer.ggml.merges", texts(&vocabulary.merges)),
        (
            "tokenizer.ggml.token_type",
            Value::Array(
                Kind::I32,
                (vocabulary.kinds.iter().map(|kind| Value::I32(*kind as i32))).collect(),
            ),
        ),
    ];
    let mut add = |key, value: Option<Value<'a>>| keys.extend(value.map(|value| (key, value)));
    add(
        "tokenizer.ggml.pre",
        vocabulary.pre.as_deref().map(Value::from),
    );
    add("tokenizer.ggml.bos_token_id", vocabulary.bos.map(id));
    add("tokenizer.ggml.eos_token_id", vocabulary.eos.map(id));
    add(
        "tokenizer.ggml.padding_token_id",
        vocabulary.padding.map(id),
    );
    for (key, end) in ENDS.into_iter().zip(&vocabulary.ends) {
        add(key, Some(id(*end)));
    }
    add(
        "tokenizer.ggml.add_bos_token",
        vocabulary.add_bos.map(Value::Bool),
    );
    let template = vocabulary.chat_template.as_deref();
    add("tokenizer.chat_template", template.map(Value::from));
    if vocabulary.model == "gemma4" {
        // Its tokens have no scores, but programs ask for them.
        let scores = vec![Value::F32(-1000.0); vocabulary.tokens.len()];
        add(
            "tokenizer.ggml.scores",
            Some(Value::Array(Kind::F32, scores)),
        );
        add("tokenizer.ggml.add_space_prefix", Some(Value::Bool(false)));
    }
    for (key, name) in SAMPLING {
        let value = vocabulary.sampling.get(*name);
        add(
            key,
            value.and_then(|v| match v.as_i64() {
                Some(count) => Some(Value::I32(count.try_into().ok()?)),
                None => Some(Value::F32(v.as_f64()? as f32)),
            }),
        );
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DraftChoice, LoadOptions, Source, load};
    use cpu::{Activations, Cpu, CpuOptions};
    use quant::Format;
    use speculate::{DraftLength, Sampling, StreamOptions};
    use std::path::{Path, PathBuf};
    use std::sync::Arc;
    use text::TextFiles;
    use weights::Checkpoint;
    use weights::gguf::{Export, Store, TensorInfo, Writer};

    fn bundled(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../models")
            .join(name)
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
    fn drafts_change_no_answer_of_a_quantised_file() {
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
}
