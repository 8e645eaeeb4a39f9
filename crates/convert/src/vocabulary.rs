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

/// The vocabulary that the metadata of a GGUF file hold.
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

/// The keys and values that a GGUF file has for `vocabulary`.
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
        // Gemma's tokens have no scores, but programs ask for them.
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

/// Tokens in the vocabulary of a configuration; 0 if it does not say.
pub(crate) fn text_size(config: &Json) -> usize {
    let text = ["text_config", "transformer_layer_config"]
        .iter()
        .find_map(|part| config.get(part).filter(|c| c.is_object()));
    text.unwrap_or(config)["vocab_size"].as_u64().unwrap_or(0) as usize
}
