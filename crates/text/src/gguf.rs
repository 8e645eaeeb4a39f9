//! The vocabulary of a GGUF file to the files of a checkpoint, and back.
//!
//! A GGUF file lists tokens, their kinds and merges. What a `tokenizer.json` says beside
//! that (normalizer, pre-tokenizer, decoder) it replaces by a name. Two kinds are known:
//! `gpt2`, byte-level with a named pre-tokenizer, and `gemma4`, with `▁` for a space and
//! byte tokens for what nothing else spells. Either becomes a `tokenizer.json` again, so
//! there is one loader.
//!
//! The container is the caller's: nothing here reads or writes GGUF keys.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use crate::error::within;
use crate::tokenizer::VOCAB_MAX;
use crate::{Text, TextError, TextFiles};

/// The kind of a token in a GGUF file (`tokenizer.ggml.token_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A word or a part of one.
    Normal = 1,
    /// The token for text that no other token spells.
    Unknown = 2,
    /// A control token: structure, not text.
    Control = 3,
    /// Text that is one token wherever it stands, matched before all else.
    UserDefined = 4,
    /// A row of the embedding that no text becomes.
    Unused = 5,
    /// A token for a single byte.
    Byte = 6,
}

impl Kind {
    /// The kind with this number in GGUF files; an unknown number is a normal token.
    pub fn numbered(number: i64) -> Kind {
        match number {
            2 => Kind::Unknown,
            3 => Kind::Control,
            4 => Kind::UserDefined,
            5 => Kind::Unused,
            6 => Kind::Byte,
            _ => Kind::Normal,
        }
    }
}

/// The regular expressions of byte-level pre-tokenizers, by their name in GGUF files.
const SPLITS: &[(&str, &str)] = &[
    (
        "qwen35",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    (
        "qwen2",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
];

/// Control tokens that GGUF files of Gemma 4 mark as text, so that programs show them.
const SHOWN: &[&str] = &[
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|\"|>",
];

/// The part of a GGUF file's metadata that concerns text: tokens, merges, chat template,
/// sampling.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Vocabulary<'a> {
    /// `tokenizer.ggml.model`.
    pub model: Cow<'a, str>,
    /// `tokenizer.ggml.pre`.
    pub pre: Option<Cow<'a, str>>,
    /// `tokenizer.ggml.tokens`, by id.
    pub tokens: Vec<Cow<'a, str>>,
    /// `tokenizer.ggml.token_type`, one for each token.
    pub kinds: Vec<Kind>,
    /// `tokenizer.ggml.merges`, two tokens with a space between them.
    pub merges: Vec<Cow<'a, str>>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<u64>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<u64>,
    /// `tokenizer.ggml.eot_token_id` and other ends of a turn.
    pub ends: Vec<u64>,
    /// `tokenizer.ggml.padding_token_id`.
    pub padding: Option<u64>,
    /// `tokenizer.ggml.add_bos_token`.
    pub add_bos: Option<bool>,
    /// `tokenizer.chat_template`.
    pub chat_template: Option<Cow<'a, str>>,
    /// `generation_config.json`'s sampler settings (`general.sampling.*`).
    pub sampling: Map<String, Value>,
}

impl Vocabulary<'_> {
    /// Loads tokenizer, template, stop tokens and sampling of the file.
    ///
    /// # Errors
    ///
    /// If the kind of vocabulary or its pre-tokenizer is not known, or as
    /// [`TextFiles::load`].
    pub fn load(&self) -> Result<Text, TextError> {
        within("vocabulary size", self.tokens.len(), VOCAB_MAX)?;
        let tokenizer = self.tokenizer()?.to_string();
        let token = |id: Option<u64>| {
            let id = usize::try_from(id?).ok()?;
            Some(json!(self.tokens.get(id)?))
        };
        let config = json!({
            "bos_token": token(self.bos),
            "eos_token": token(self.eos),
            "pad_token": token(self.padding),
            "add_bos_token": self.add_bos,
        });
        let ends: Vec<u64> = self.eos.iter().chain(&self.ends).copied().collect();
        let mut generation = self.sampling.clone();
        if !ends.is_empty() {
            generation.insert("eos_token_id".into(), json!(ends));
        }
        TextFiles {
            tokenizer: tokenizer.as_bytes(),
            tokenizer_config: Some(config.to_string().as_bytes()),
            chat_template: self.chat_template.as_deref().map(str::as_bytes),
            generation_config: Some(Value::Object(generation).to_string().as_bytes()),
            config: None,
        }
        .load()
    }

    /// The `tokenizer.json` that stands for the file.
    fn tokenizer(&self) -> Result<Value, TextError> {
        let bad = |reason: String| TextError::BadTokenizer { reason };
        let mut outline = match &*self.model {
            "gemma4" => gemma4(self.unknown()),
            "gpt2" => {
                let pre = self.pre.as_deref().unwrap_or("nothing");
                let known = SPLITS.iter().find(|(name, _)| *name == pre);
                let (_, split) = known.ok_or_else(|| {
                    let names: Vec<&str> = SPLITS.iter().map(|(name, _)| *name).collect();
                    bad(format!(
                        "the file names the splitting rule `{}`; known are {}",
                        short(pre),
                        names.join(", ")
                    ))
                })?;
                gpt2(split)
            }
            other => {
                return Err(bad(format!(
                    "the file has a vocabulary of kind `{}`; known are gemma4, gpt2",
                    short(other)
                )));
            }
        };
        let kind = |id: usize| self.kinds.get(id).copied().unwrap_or(Kind::Normal);
        let (mut vocab, mut added) = (Map::new(), Vec::new());
        for (id, token) in self.tokens.iter().enumerate() {
            let shown = self.model == "gemma4" && SHOWN.contains(&&**token);
            let special = match kind(id) {
                Kind::Unused => continue,
                Kind::Control | Kind::Unknown => Some(true),
                Kind::UserDefined => Some(shown),
                Kind::Normal | Kind::Byte => None,
            };
            vocab.insert(token.to_string(), json!(id));
            if let Some(special) = special {
                added.push(json!({
                    "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": special,
                }));
            }
        }
        let pair = |merge: &Cow<'_, str>| {
            let (left, right) = merge.split_once(' ')?;
            Some(json!([left, right]))
        };
        let merges: Option<Vec<Value>> = self.merges.iter().map(pair).collect();
        let merges = merges.ok_or_else(|| bad("a merge of the file is not two tokens".into()))?;
        outline["model"]["vocab"] = Value::Object(vocab);
        outline["model"]["merges"] = Value::Array(merges);
        outline["added_tokens"] = Value::Array(added);
        Ok(outline)
    }

    /// The token for text that no other token spells.
    fn unknown(&self) -> Option<&str> {
        let marked = self.kinds.iter().position(|kind| *kind == Kind::Unknown);
        let named = || self.tokens.iter().position(|token| token == "<unk>");
        self.tokens.get(marked.or_else(named)?).map(AsRef::as_ref)
    }
}

impl Vocabulary<'static> {
    /// The inverse of [`Vocabulary::load`]: what a GGUF file has to say about a checkpoint's
    /// text. `size` is the number of rows of the embedding; rows behind the tokenizer's last
    /// token become unused tokens.
    ///
    /// # Errors
    ///
    /// If a file is malformed, or GGUF files have no name for the kind of tokenizer.
    pub fn from_files(files: &TextFiles<'_>, size: usize) -> Result<Self, TextError> {
        let parse = |file, bytes: Option<&[u8]>| match bytes {
            Some(bytes) => serde_json::from_slice::<Value>(bytes)
                .map_err(|source| TextError::BadJson { file, source }),
            None => Ok(Value::Null),
        };
        let tokenizer = parse("tokenizer.json", Some(files.tokenizer))?;
        let config = parse("tokenizer_config.json", files.tokenizer_config)?;
        let generation = parse("generation_config.json", files.generation_config)?;
        let text = files.load()?;
        let (model, pre) = kind_of(&tokenizer).ok_or_else(|| TextError::BadTokenizer {
            reason: "GGUF files have no name for its normalizer and pre-tokenizer: write safetensors instead".into(),
        })?;
        within("vocabulary size", size, VOCAB_MAX)?;
        let (tokens, kinds) = rows(&tokenizer, model == "gemma4", size)?;
        let merges = tokenizer["model"]["merges"].as_array();
        let id_of = |key: &str| {
            let content = crate::stop::token_content(&config[key])?;
            text.tokenizer.id_of(content).map(u64::from)
        };
        let eos = id_of("eos_token");
        let ends = text.stop_tokens.ids().iter().map(|&id| u64::from(id));
        let ends: Vec<u64> = ends.filter(|id| Some(*id) != eos).collect();
        let template = (files.chat_template)
            .map(|bytes| String::from_utf8_lossy(bytes).into_owned())
            .or_else(|| config["chat_template"].as_str().map(str::to_owned));
        let mut sampling = generation.as_object().cloned().unwrap_or_default();
        // GGUF files have no key for text that is not sampled.
        if generation["do_sample"] == false {
            sampling.insert("temperature".into(), json!(0.0));
        }
        Ok(Vocabulary {
            model: model.into(),
            pre: pre.map(Cow::Borrowed),
            merges: merges.into_iter().flatten().map(merge).collect(),
            bos: id_of("bos_token"),
            padding: id_of("pad_token"),
            eos,
            ends,
            add_bos: config["add_bos_token"].as_bool(),
            chat_template: template.map(Cow::Owned),
            sampling,
            tokens,
            kinds,
        })
    }
}

/// The tokens of a `tokenizer.json` and their kinds, one for each of the embedding's `size`
/// rows. Rows without a token are unused.
fn rows(
    tokenizer: &Value,
    is_gemma: bool,
    size: usize,
) -> Result<(Vec<Cow<'static, str>>, Vec<Kind>), TextError> {
    let mut tokens: Vec<Cow<'_, str>> = (0..size).map(|id| format!("[PAD{id}]").into()).collect();
    let mut kinds = vec![Kind::Unused; size];
    let mut put = |id: &Value, token: &str, kind: Kind| {
        let id = id.as_u64().and_then(|id| usize::try_from(id).ok());
        let id = id.filter(|id| *id < size).ok_or(TextError::BadField {
            file: "tokenizer.json",
            field: "id",
            reason: "expected a row of the embedding",
        })?;
        (tokens[id], kinds[id]) = (token.to_owned().into(), kind);
        Ok::<(), TextError>(())
    };
    let vocab = tokenizer["model"]["vocab"].as_object();
    for (token, id) in vocab.into_iter().flatten() {
        let is_byte = is_gemma && token.len() == 6 && token.starts_with("<0x");
        put(id, token, if is_byte { Kind::Byte } else { Kind::Normal })?;
    }
    for token in tokenizer["added_tokens"].as_array().into_iter().flatten() {
        let content = token["content"].as_str().unwrap_or_default();
        let is_special = token["special"] == true && !(is_gemma && SHOWN.contains(&content));
        let kind = match (is_gemma && content == "<unk>", is_special) {
            (true, _) => Kind::Unknown,
            (_, true) => Kind::Control,
            (_, false) => Kind::UserDefined,
        };
        put(&token["id"], content, kind)?;
    }
    Ok((tokens, kinds))
}

/// A merge of a `tokenizer.json` as GGUF files write it: two tokens, a space between them.
fn merge(merge: &Value) -> Cow<'static, str> {
    match merge {
        Value::String(both) => both.clone().into(),
        pair => {
            let part = |i: usize| pair[i].as_str().unwrap_or_default();
            format!("{} {}", part(0), part(1)).into()
        }
    }
}

/// The first 40 characters of `word`, which comes from a file, as a message may show them.
fn short(word: &str) -> String {
    word.chars()
        .take(40)
        .flat_map(char::escape_default)
        .collect()
}

/// A `tokenizer.json` of the kind `gemma4`, without its vocabulary: `▁` for spaces, and
/// `unknown` as its token for text that no other token spells.
fn gemma4(unknown: Option<&str>) -> Value {
    json!({
        "version": "1.0",
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false,
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]},
        "model": {"type": "BPE", "unk_token": unknown, "fuse_unk": true, "byte_fallback": true},
    })
}

/// A `tokenizer.json` of the kind `gpt2`, without its vocabulary: byte-level, with the
/// regular expression `rule` as its pre-tokenizer.
fn gpt2(rule: &str) -> Value {
    json!({
        "version": "1.0",
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "fuse_unk": false, "byte_fallback": false},
    })
}

/// The names that a GGUF file has for a `tokenizer.json`: the kind of vocabulary, and the
/// pre-tokenizer if it is byte-level. `None` if there are none.
fn kind_of(tokenizer: &Value) -> Option<(&'static str, Option<&'static str>)> {
    let gemma = gemma4(None);
    let same = |made: &Value, key: &str| tokenizer[key] == made[key];
    if same(&gemma, "normalizer") && same(&gemma, "decoder") {
        return Some(("gemma4", None));
    }
    let like = |rule: &str| {
        let made = gpt2(rule);
        same(&made, "pre_tokenizer") && same(&made, "normalizer")
    };
    let (name, _) = SPLITS.iter().find(|(_, rule)| like(rule))?;
    Some(("gpt2", Some(name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Specials;
    use crate::testing::model_dir;

    /// Text that tokenizers disagree about.
    const TRICKY: &[&str] = &[
        "",
        " ",
        "  two  spaces   and\ttabs\n\n\nlines \r\n end ",
        "Hello, world! It's we'll I'VE 'd",
        "numbers 1 22 333 4444 3.14 1,000,000",
        "你好,世界。こんにちは 안녕하세요 Привет नमस्ते",
        "e\u{301} versus é, Å Å, ﬁ ligature",
        "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽",
        "zero\u{200d}width\u{200b} \u{feff}bom \u{fffd} \u{0} \u{10ffff}",
        "<|turn>user\nHi<turn|> <|im_start|>x<|im_end|> <bos><eos><unk><pad>",
        "<|tool_call>call:f{a:<|\"|>b<|\"|>}<tool_call|><|channel>thought<channel|>",
        "▁ already ▁▁ there, <0x41> and <0xE5>",
        "```rust\nfn main() { println!(\"{}\", 1+1); }\n```",
        "[PAD8190] </s> <s> <|endoftext|>",
    ];

    fn read(model: &str, name: &str) -> Vec<u8> {
        std::fs::read(model_dir(model).join(name)).unwrap()
    }

    fn vocabulary(model: &str) -> Vocabulary<'static> {
        let files = [
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "generation_config.json",
        ];
        let [tokenizer, config, template, generation] = files.map(|name| read(model, name));
        let files = TextFiles {
            tokenizer: &tokenizer,
            tokenizer_config: Some(&config),
            chat_template: Some(&template),
            generation_config: Some(&generation),
            config: None,
        };
        Vocabulary::from_files(&files, 8192).unwrap()
    }

    #[test]
    fn a_vocabulary_is_as_good_as_the_files_it_was_made_from() {
        for (model, kind, pre) in [
            ("tiny-gemma4", "gemma4", None),
            ("tiny-qwen3.5", "gpt2", Some("qwen35")),
        ] {
            let made = vocabulary(model);
            assert_eq!((&*made.model, made.pre.as_deref()), (kind, pre));
            let (text, source) = (
                made.load().unwrap(),
                TextFiles::open(&model_dir(model)).unwrap(),
            );
            for tricky in TRICKY {
                for special in [false, true] {
                    let ids = text.tokenizer.encode(tricky, special).unwrap();
                    assert_eq!(
                        ids,
                        source.tokenizer.encode(tricky, special).unwrap(),
                        "{model} {tricky:?}"
                    );
                    for specials in [Specials::Show, Specials::Skip] {
                        assert_eq!(
                            text.tokenizer.detokenize(&ids, specials),
                            source.tokenizer.detokenize(&ids, specials),
                            "{model} {tricky:?}"
                        );
                    }
                }
            }
            assert_eq!(text.tokenizer.vocab_size(), source.tokenizer.vocab_size());
            for id in 0..8192 {
                assert_eq!(
                    text.tokenizer.token_bytes(id),
                    source.tokenizer.token_bytes(id),
                    "{model} {id}"
                );
                assert_eq!(
                    text.tokenizer.is_special(id),
                    source.tokenizer.is_special(id),
                    "{model} {id}"
                );
            }
            assert_eq!(text.stop_tokens.ids(), source.stop_tokens.ids());
            assert_eq!(text.sampling.temperature(), source.sampling.temperature());
            assert_eq!(text.bos(), source.bos());
            let messages = json!([{"role": "user", "content": "Hi there"}]);
            let chat = |text: &Text| {
                text.encode_chat(&messages, None, true, &Map::new())
                    .unwrap()
            };
            assert_eq!(chat(&text), chat(&source));
        }
    }

    #[test]
    fn a_kind_without_a_token_names_nothing() {
        let mut vocabulary = vocabulary("tiny-gemma4");
        vocabulary.kinds = vec![Kind::Normal; 8192];
        vocabulary.kinds.push(Kind::Unknown);
        assert_eq!(
            vocabulary.load().unwrap().tokenizer.id_of("<0x41>"),
            Some(97)
        );
    }

    #[test]
    fn a_vocabulary_of_another_kind_is_refused_by_name() {
        let refusal = |change: fn(&mut Vocabulary<'static>)| {
            let mut vocabulary = vocabulary("tiny-qwen3.5");
            change(&mut vocabulary);
            vocabulary.load().unwrap_err().to_string()
        };
        assert!(
            refusal(|v| v.model = "rwkv".into()).contains("of kind `rwkv`; known are gemma4, gpt2")
        );
        assert!(
            refusal(|v| v.pre = Some("gpt-4o".into())).contains("rule `gpt-4o`; known are qwen35")
        );
        assert!(refusal(|v| v.pre = None).contains("splitting rule"));
        assert!(refusal(|v| v.merges.push("alone".into())).contains("not two tokens"));
        assert!(refusal(|v| v.merges.push("not there".into())).contains("unusable tokenizer.json"));
        assert!(refusal(|v| v.tokens.clear()).contains("unusable tokenizer.json"));
    }
}
