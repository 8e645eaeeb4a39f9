//! Tokenizers for tests: the two bundled vocabularies, and tiny ones whose
//! every field a test can change.

use std::path::PathBuf;
use std::sync::LazyLock;

use serde_json::{Value, json};

use crate::Tokenizer;

/// The tokenizer of a bundled Gemma 4, with byte fallback.
pub(crate) static GEMMA: LazyLock<Tokenizer> = LazyLock::new(|| load("tiny-gemma4"));
/// The tokenizer of a bundled Qwen 3.5, byte-level.
pub(crate) static QWEN: LazyLock<Tokenizer> = LazyLock::new(|| load("tiny-qwen3.5"));
/// Both bundled tokenizers.
pub(crate) const MODELS: [&LazyLock<Tokenizer>; 2] = [&GEMMA, &QWEN];

/// The folder of a bundled model.
pub(crate) fn model_dir(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../models")
        .join(name)
}

fn load(name: &str) -> Tokenizer {
    let json = std::fs::read(model_dir(name).join("tokenizer.json")).unwrap();
    Tokenizer::from_bytes(&json).unwrap()
}

/// The bytes of `ids` end to end.
pub(crate) fn bytes_of(tokenizer: &Tokenizer, ids: &[u32], show_special: bool) -> Vec<u8> {
    ids.iter()
        .filter(|&&id| show_special || !tokenizer.is_special(id))
        .flat_map(|&id| tokenizer.token_bytes(id).to_vec())
        .collect()
}

/// A byte-level tokenizer of three entries.
pub(crate) fn small_bpe() -> Value {
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{"id": 2, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": {"a": 0, "b": 1, "<s>": 2}, "merges": []}
    })
}

/// A SentencePiece-like tokenizer of nine entries with the given decoder.
pub(crate) fn sentencepiece(decoder: Value) -> Value {
    let mut json = small_bpe();
    json["post_processor"] = Value::Null;
    json["pre_tokenizer"] = Value::Null;
    json["decoder"] = decoder;
    json["model"]["vocab"] =
        json!({"▁": 0, "▁a": 1, "<s>": 2, "▁▁": 3, "b": 4, "▁c▁": 5, "<0x20>": 6, "c▁d": 7});
    json
}
