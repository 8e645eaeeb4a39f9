//! Any tokenizer: refused, or it turns text into tokens and back.
//!
//! An input that begins with `{` is a `tokenizer.json`. Any other says which good one
//! to change and how, or is the vocabulary of a GGUF file.

#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};
use std::borrow::Cow;
use text::gguf::{Kind, Vocabulary};
use text::{Specials, Text, TextFiles};

const WORDS: &[&str] = &[
    "",
    "a",
    "ab",
    "▁",
    " ",
    "<s>",
    "<unk>",
    "<0x41>",
    "[a-c]+",
    "(",
    "(?!x)",
    "(a*)*b",
    "BPE",
    "Unigram",
    "WordPiece",
    "WordLevel",
    "ByteLevel",
    "ByteFallback",
    "Fuse",
    "Strip",
    "Replace",
    "Metaspace",
    "Sequence",
    "Split",
    "Digits",
    "Punctuation",
    "Prepend",
    "NFC",
    "NFKC",
    "Lowercase",
    "String",
    "Regex",
    "Isolated",
    "Removed",
    "MergedWithPrevious",
    "first",
    "never",
    "TemplateProcessing",
    "A",
    "B",
    "id",
    "ids",
    "dropout",
    "unk_token",
    "unk_id",
    "vocab",
    "merges",
    "end_of_word_suffix",
    "continuing_subword_prefix",
    "max_input_chars_per_word",
    "eos_token_id",
    "eos_token",
    "bos_token",
    "temperature",
    "top_k",
    "added_tokens_decoder",
];

const TEXTS: &[&str] = &["", "ab ba", " <s>A\n\nb▁ 1234", "naïve 字 👍🏽 \u{301}\0"];

fuzz_target!(
    init: {
        // A library's panics are caught (`text` says so) and must not end the fuzzer.
        // Those that are not caught still do.
        std::panic::set_hook(Box::new(|_| {}));
    },
    |data: &[u8]| {
        if data.first() == Some(&b'{') {
            let files = TextFiles { tokenizer: data, ..TextFiles::default() };
            exercise(files.load().ok());
            return;
        }
        let Some((which, edits)) = data.split_first() else {
            return;
        };
        if which % 4 == 3 {
            exercise(vocabulary(edits).load().ok());
            return;
        }
        let mut files = json!([good(*which % 4), config(), generation()]);
        fuzz::edit(&mut files, WORDS, edits);
        if std::env::var_os("FUZZ_SHOW").is_some() {
            eprintln!("{files}");
        }
        let [tokenizer, config, generation] = [0, 1, 2].map(|i| files[i].to_string());
        let files = TextFiles {
            tokenizer: tokenizer.as_bytes(),
            tokenizer_config: Some(config.as_bytes()),
            generation_config: Some(generation.as_bytes()),
            ..TextFiles::default()
        };
        exercise(files.load().ok());
    }
);

/// Text to tokens and back.
fn exercise(text: Option<Text>) {
    let Some(text) = text else { return };
    for prompt in TEXTS {
        for ids in [
            text.encode_prompt(prompt),
            text.tokenizer.encode(prompt, false),
        ] {
            let Ok(ids) = ids else { continue };
            for specials in [Specials::Show, Specials::Skip] {
                let whole = text.tokenizer.detokenize(&ids, specials);
                // Tokens have bytes of their own, so a part's text begins the whole.
                let part = text.tokenizer.detokenize(&ids[..ids.len() / 2], specials);
                let part = part.trim_end_matches('\u{fffd}');
                assert!(whole.starts_with(part), "{part:?} does not begin {whole:?}");
            }
        }
    }
    let _ = text.tokenizer.token_bytes(u32::MAX);
    let _ = text.stop_tokens.ids();
}

/// A byte-level tokenizer, one of pieces, or one with a splitting rule and merges.
fn good(which: u8) -> Value {
    let token = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let mut json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [token(2, "<s>")],
        "normalizer": null, "pre_tokenizer": level, "post_processor": null, "decoder": level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": {"a": 0, "b": 1, "<s>": 2, "ab": 3, "Ġ": 4, "Ġb": 5}, "merges": [["a", "b"], ["Ġ", "b"]]}
    });
    match which {
        0 => {
            json["post_processor"] = json!({"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}}});
        }
        1 => {
            json["normalizer"] =
                json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
            json["pre_tokenizer"] = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false});
            json["decoder"] = json!({"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]});
            json["model"]["vocab"] = json!({"<unk>": 0, "▁": 1, "<s>": 2, "a": 3, "b": 4, "ab": 5, "<0x41>": 6, "▁a": 7});
            json["model"]["merges"] = json!([["a", "b"], ["▁", "a"]]);
            json["model"]["byte_fallback"] = json!(true);
            json["model"]["unk_token"] = json!("<unk>");
        }
        _ => {
            json["normalizer"] = json!({"type": "NFC"});
            json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": "[0-9]| ?[a-z]+| +(?![a-z])"}, "behavior": "Isolated", "invert": false},
                level]});
        }
    }
    json
}

fn config() -> Value {
    json!({"bos_token": "<s>", "eos_token": {"content": "<s>"}, "add_bos_token": true,
        "added_tokens_decoder": {"2": {"content": "<s>", "special": true}}})
}

fn generation() -> Value {
    json!({"eos_token_id": [2], "do_sample": true, "temperature": 0.7, "top_k": 3, "top_p": 0.9, "suppress_tokens": [1]})
}

/// A GGUF file's vocabulary: a count, ids, kinds, then words by number.
fn vocabulary(data: &[u8]) -> Vocabulary<'static> {
    let mut bytes = data.iter().copied();
    let mut next = || bytes.next().unwrap_or(0);
    let model = match next() {
        // Its splitting rules take long to compile.
        0 => "gpt2",
        1 => "bert",
        _ => "gemma4",
    };
    let pre = [Some("qwen35"), Some("qwen2"), None][usize::from(next() % 3)];
    let (n_tokens, n_kinds, n_merges) = (next() % 32, next() % 32, next() % 16);
    let id = |byte: u8| (byte < 64).then_some(u64::from(byte));
    let (bos, eos, padding) = (id(next()), id(next()), id(next()));
    let ends = vec![u64::from(next()), u64::MAX];
    let add_bos = Some(next() & 1 == 1);
    let kinds = (0..n_kinds)
        .map(|_| Kind::numbered(i64::from(next() % 8)))
        .collect();
    let word = |byte: u8| -> Cow<'static, str> {
        match WORDS.get(usize::from(byte)) {
            Some(word) => Cow::Borrowed(word),
            None => Cow::Owned(char::from(byte).to_string()),
        }
    };
    let tokens = (0..n_tokens).map(|_| word(next())).collect();
    let merges = (0..n_merges)
        .map(|_| Cow::Owned(format!("{} {}", word(next()), word(next()))))
        .collect();
    Vocabulary {
        model: model.into(),
        pre: pre.map(Cow::Borrowed),
        tokens,
        kinds,
        merges,
        bos,
        eos,
        ends,
        padding,
        add_bos,
        ..Vocabulary::default()
    }
}
