//! Text to token ids, and token ids to bytes.
//!
//! A thin wrapper of the `tokenizers` crate: sizes are checked before it sees
//! anything, its panics end as errors, and truncation or padding written into
//! a tokenizer file is switched off (a prompt must never be cut in silence).
//! Ids become bytes by code of our own ([`crate::pieces`]), and bytes text in
//! [`crate::detokenizer`].

use std::collections::HashSet;
use std::sync::OnceLock;

use serde::Deserialize;
use serde_json::Value;

use crate::added::AddedTokens;
use crate::cover::{Cover, is_kept};
use crate::error::{TextError, contain, within};
use crate::pieces::{Lead, PieceRule, Pieces};

/// Largest `tokenizer.json` in bytes; a vocabulary of 262,000 tokens takes 33 MB.
pub const TOKENIZER_FILE_BYTES_MAX: usize = 128 << 20;
/// Longest text of one [`Tokenizer::encode`] in bytes: four for each token of a context of
/// 4 million.
pub const TEXT_BYTES_MAX: usize = 16 << 20;
/// Largest token id, plus one. Tables are this long, so a file cannot ask for
/// 16 GB with one id.
pub const VOCAB_MAX: usize = 1 << 22;
/// Bytes of a text below which [`Tokenizer::refuse_over`] estimates nothing: it is encoded in
/// milliseconds.
const LONG_TEXT_BYTES: usize = 64 << 10;
/// Bytes for each allowed token below which [`Tokenizer::refuse_over`] estimates nothing.
const LONG_TOKEN_BYTES: usize = 8;
/// The largest factor by which a normalizer may lengthen a text in bytes.
///
/// `▁` for a space is three times; the longest Unicode composition is 18 times.
pub const NORMALIZER_GROWTH_MAX: usize = 64;

/// A checkpoint's tokenizer: text to token ids, and token ids to bytes.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The rule that maps an entry of the vocabulary to bytes.
    rule: PieceRule,
    /// How the first token of a text loses the space that encoding added.
    lead: Lead,
    /// The bytes of every token.
    pieces: Pieces,
    /// Ids of tokens that are structure, not text.
    special: HashSet<u32>,
    /// Ids of tokens that stand beside the learned vocabulary, ascending.
    added: Vec<u32>,
    /// Whether the bytes of a text's tokens, end to end, are the text where it is ASCII.
    is_kept: bool,
    /// The sorted vocabulary that bounds the number of tokens; made for the first long text.
    cover: OnceLock<Cover>,
    /// The tokens beside the learned vocabulary, ready to be found in a text.
    added_tokens: AddedTokens,
}

/// The parts of a `tokenizer.json` that are read here; the vocabulary is skipped.
#[derive(Deserialize)]
struct Outline {
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    model: ModelOutline,
}

/// Whether a token beside the learned vocabulary takes the white space around it.
#[derive(Default, Deserialize)]
#[serde(default)]
struct AddedToken {
    lstrip: bool,
    rstrip: bool,
}

/// The `model` of a `tokenizer.json` without its vocabulary.
#[derive(Default, Deserialize)]
#[serde(default)]
struct ModelOutline {
    r#type: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    byte_fallback: bool,
}

impl Outline {
    /// Whether every ASCII byte of a text is a byte of its tokens and the other way
    /// round, as far as the file says: nothing is dropped, added or replaced but
    /// spaces by their mark.
    fn keeps_ascii(&self, rule: &PieceRule, lead: Lead) -> bool {
        let is_set = |affix: &Option<String>| affix.as_ref().is_some_and(|a| !a.is_empty());
        let model = &self.model;
        let is_reversed = match rule {
            PieceRule::ByteLevel => has_byte_level(&self.pre_tokenizer),
            PieceRule::Pieces { byte_fallback, .. } => *byte_fallback && model.byte_fallback,
        };
        is_reversed
            && lead == Lead::Keep
            && model.r#type.as_deref() == Some("BPE")
            && !is_set(&model.continuing_subword_prefix)
            && !is_set(&model.end_of_word_suffix)
            && !self.added_tokens.iter().any(|t| t.lstrip || t.rstrip)
            && is_kept(&self.normalizer)
            && is_kept(&self.pre_tokenizer)
    }
}

/// Whether a pre-tokenizer is byte-level, or has a step that is.
fn has_byte_level(step: &Value) -> bool {
    let inner = step["pretokenizers"].as_array();
    step["type"] == "ByteLevel" || inner.is_some_and(|steps| steps.iter().any(has_byte_level))
}

impl Tokenizer {
    /// Loads the bytes of a `tokenizer.json`.
    ///
    /// # Errors
    ///
    /// If the file is larger than [`TOKENIZER_FILE_BYTES_MAX`], is malformed,
    /// or has a decoder whose tokens have no bytes of their own.
    pub fn from_bytes(json: &[u8]) -> Result<Self, TextError> {
        within("tokenizer.json bytes", json.len(), TOKENIZER_FILE_BYTES_MAX)?;
        let outline: Outline =
            serde_json::from_slice(json).map_err(|source| TextError::BadJson {
                file: "tokenizer.json",
                source,
            })?;
        let (rule, lead) = PieceRule::from_json(&outline.decoder)?;
        within(
            "normalizer growth",
            growth(&outline.normalizer),
            NORMALIZER_GROWTH_MAX,
        )?;

        contain("the tokenizer loader", || {
            let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(bad)?;
            inner.with_truncation(None).map_err(bad)?;
            inner.with_padding(None);
            without_word_cache(&mut inner);
            let n_ids = inner
                .get_vocab(true)
                .into_values()
                .max()
                .map_or(0, |id| id as usize + 1);
            within("vocabulary size", n_ids, VOCAB_MAX)?;
            let pieces = Pieces::new(&rule, n_ids, |id| inner.id_to_token(id))?;
            let singles: HashSet<&[u8]> = (0..n_ids as u32)
                .map(|id| pieces.get(id))
                .filter(|bytes| bytes.len() == 1)
                .collect();
            let is_kept = outline.keeps_ascii(&rule, lead)
                && (0..128_u8).all(|byte| singles.contains(&[byte][..]));
            let added_tokens = AddedTokens::new(&inner)?;
            let decoder = inner.get_added_tokens_decoder();
            let mut added: Vec<u32> = decoder.keys().copied().collect();
            added.sort_unstable();
            let special = decoder
                .into_iter()
                .filter(|(_, token)| token.special)
                .map(|(id, _)| id)
                .collect();
            Ok(Self {
                inner,
                rule,
                lead,
                pieces,
                special,
                added,
                is_kept,
                cover: OnceLock::new(),
                added_tokens,
            })
        })
    }

    /// Turns text into ids. Special tokens spelled out in `text` become their ids;
    /// `add_special` also adds the tokens of the tokenizer's post-processor, such as a
    /// beginning-of-sequence token.
    ///
    /// A text that was rendered from a chat template has its special tokens
    /// already: pass `false` for it.
    ///
    /// # Errors
    ///
    /// If `text` is longer than [`TEXT_BYTES_MAX`] or the tokenizer fails.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        within("text bytes", text.len(), TEXT_BYTES_MAX)?;
        contain("the tokenizer", || {
            let encoding =
                self.inner
                    .encode_fast(text, add_special)
                    .map_err(|err| TextError::Encode {
                        reason: err.to_string(),
                    })?;
            Ok(encoding.get_ids().to_vec())
        })
    }

    /// Refuses a `text` that certainly has more than `limit` tokens, without encoding it. A
    /// text of at most `limit` tokens is never refused; a longer one may pass.
    ///
    /// # Errors
    ///
    /// [`TextError::TooManyTokens`] with a lower bound of the number of tokens.
    pub(crate) fn refuse_over(&self, text: &str, limit: usize) -> Result<(), TextError> {
        let is_long = text.len() > LONG_TEXT_BYTES.max(limit.saturating_mul(LONG_TOKEN_BYTES));
        if !is_long || !self.is_kept {
            return Ok(());
        }
        let cover = self.cover.get_or_init(|| Cover::new(&self.pieces));
        let at_least = cover.tokens(&self.pieces, text, limit + 1);
        if at_least > limit {
            return Err(TextError::TooManyTokens { at_least, limit });
        }
        Ok(())
    }

    /// The bytes that `id` adds to a text; empty for an id that is not in the
    /// vocabulary, such as the padding rows of a model's embedding.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.pieces.get(id)
    }

    /// The largest id plus one. A model's logits may have more columns.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// The id of the vocabulary entry spelled `token`.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The vocabulary entry of `id`, in the tokenizer's own alphabet.
    pub fn entry(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Whether `id` is marked special: structure, not text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// Ids of the tokens that stand beside the learned vocabulary, ascending: control
    /// tokens, and marks of reasoning or tool calls.
    pub fn added(&self) -> &[u32] {
        &self.added
    }

    /// Id and spelling of each token that stands beside the learned vocabulary.
    pub(crate) fn added_spellings(&self) -> Vec<(u32, String)> {
        let all = self.inner.get_added_tokens_decoder().into_iter();
        all.map(|(id, token)| (id, token.content)).collect()
    }

    /// The tokenizer of the `tokenizers` crate.
    pub(crate) fn inner(&self) -> &tokenizers::Tokenizer {
        &self.inner
    }

    /// The added tokens, ready to be found in a text.
    pub(crate) fn added_tokens(&self) -> &AddedTokens {
        &self.added_tokens
    }

    /// How the first token of a text loses the space that encoding added.
    pub(crate) fn lead(&self) -> Lead {
        self.lead
    }

    /// The text of `ids` by the decoder of the `tokenizers` crate.
    #[cfg(test)]
    pub(crate) fn reference(&self, ids: &[u32], skip_special: bool) -> String {
        self.inner.decode(ids, skip_special).unwrap()
    }

    /// The bytes of `id` where it is the first token of a text.
    pub(crate) fn first_bytes(&self, id: u32) -> Vec<u8> {
        match (self.lead, self.entry(id)) {
            (Lead::DropMarks { mark }, Some(entry)) => self.rule.bytes(&entry.replace(mark, "")),
            _ => self.token_bytes(id).to_vec(),
        }
    }
}

/// Switches off the cache of words that were split before.
///
/// The crate keeps 10,000 words for each thread and never evicts one. A tokenizer that does
/// not split at spaces takes a whole message for a word, so the cache would grow with every
/// new text, by 7.7 KB for 240 bytes.
fn without_word_cache(inner: &mut tokenizers::Tokenizer) {
    let mut model = inner.get_model().clone();
    model.resize_cache(0);
    inner.with_model(model);
}

/// The error for a file that the `tokenizers` crate refuses.
fn bad(err: tokenizers::Error) -> TextError {
    TextError::BadTokenizer {
        reason: err.to_string(),
    }
}

/// An upper bound of the factor by which `normalizer` lengthens a text in bytes.
fn growth(normalizer: &Value) -> usize {
    match normalizer["type"].as_str() {
        Some("Sequence") => normalizer["normalizers"]
            .as_array()
            .into_iter()
            .flatten()
            .fold(1, |product, step| product.saturating_mul(growth(step))),
        Some("Replace") => {
            let to = normalizer["content"].as_str().map_or(0, str::len);
            match normalizer["pattern"]["String"].as_str() {
                Some(from) => to.div_ceil(from.len().max(1)).max(1),
                // A regular expression may match the empty text beside every character.
                None => to + 1,
            }
        }
        Some("Prepend") => normalizer["prepend"].as_str().map_or(0, str::len) + 1,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::detokenizer::Specials;
    use crate::testing::{GEMMA, MODELS, QWEN, small_bpe};

    #[test]
    fn text_survives_the_round_trip() {
        let texts = [
            "",
            " ",
            "  two  spaces ",
            "Hello, world!\n\n\ttabs\r\n",
            "你好,世界。こんにちは 안녕하세요",
            "السَّلامُ عَلَيْكُم ورحمة الله",
            "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽",
            "zero\u{200d}width\u{200b} \u{feff}bom \u{202e}rtl",
            "\u{fffd} \u{0} \u{7f} \u{10ffff}",
            "\\ud83d \\udc00 written out",
        ];
        for model in MODELS {
            for text in texts {
                let ids = model.encode(text, false).unwrap();
                assert_eq!(model.detokenize(&ids, Specials::Show), text);
                assert!(ids.iter().all(|&id| (id as usize) < model.vocab_size()));
            }
        }
    }

    #[test]
    fn detokenize_agrees_with_the_reference_on_encoded_text() {
        for model in MODELS {
            for text in ["Once upon a time", " 你好 👩‍👩‍👧", "a<|turn>b", "x\u{0}y"] {
                let ids = model.encode(text, false).unwrap();
                let reference = model.inner.decode(&ids, false).unwrap();
                assert_eq!(model.detokenize(&ids, Specials::Show), reference);
                let reference = model.inner.decode(&ids, true).unwrap();
                assert_eq!(model.detokenize(&ids, Specials::Skip), reference);
            }
        }
    }

    /// Lone surrogates cannot reach us as `&str`; JSON that spells one is
    /// refused by the parser, and a replacement character is ordinary text.
    #[test]
    fn lone_surrogate_escapes_never_become_text() {
        assert!(serde_json::from_str::<String>(r#""\ud83d""#).is_err());
        assert!(serde_json::from_str::<String>(r#""\udc00x""#).is_err());
        let emoji: String = serde_json::from_str(r#""\ud83d\ude00""#).unwrap();
        for model in MODELS {
            let ids = model.encode(&emoji, false).unwrap();
            assert_eq!(model.detokenize(&ids, Specials::Skip), "😀");
        }
    }

    #[test]
    fn special_tokens_in_text_are_one_id() {
        assert_eq!(GEMMA.encode("<|turn>", false).unwrap(), [4]);
        assert_eq!(QWEN.encode("<|im_end|>", false).unwrap(), [8162]);
        assert!(GEMMA.is_special(4) && QWEN.is_special(8162) && !QWEN.is_special(0));
        assert_eq!(QWEN.id_of("<|im_end|>"), Some(8162));
        assert_eq!(QWEN.id_of("no such token"), None);
    }

    #[test]
    fn tokens_have_bytes() {
        assert_eq!(GEMMA.token_bytes(GEMMA.id_of("<0xE5>").unwrap()), [0xE5]);
        assert_eq!(GEMMA.token_bytes(GEMMA.id_of("▁a").unwrap()), b" a");
        assert_eq!(QWEN.token_bytes(QWEN.id_of("Ġa").unwrap()), b" a");
        assert_eq!(
            QWEN.token_bytes(QWEN.id_of("<|im_end|>").unwrap()),
            b"<|im_end|>"
        );
        assert_eq!(QWEN.token_bytes(8186), b"");
        assert_eq!(QWEN.token_bytes(u32::MAX), b"");
        assert_eq!(QWEN.vocab_size(), 8186);
        assert_eq!(GEMMA.vocab_size(), 8192);
    }

    #[test]
    fn a_million_repeated_characters_encode_and_come_back() {
        for ch in ["a", " ", "\n", "!", "0", "字", "👍", "\u{301}", "\t "] {
            let text = ch.repeat(1_000_000);
            for model in MODELS {
                let ids = model.encode(&text, false).unwrap();
                assert!(model.detokenize(&ids, Specials::Show) == text, "{ch:?}");
            }
        }
    }

    #[test]
    fn a_text_that_cannot_fit_is_refused_before_it_is_encoded() {
        let text = "rabbit ".repeat(1_000_000);
        for model in MODELS {
            let start = std::time::Instant::now();
            let refused = model.refuse_over(&text, 8192);
            assert!(matches!(
                refused,
                Err(TextError::TooManyTokens {
                    at_least: 8193,
                    limit: 8192
                })
            ));
            // Encoding it takes a hundred times as long.
            assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
        }
    }

    #[test]
    fn a_text_that_fits_is_never_refused() {
        // The longest tokens of both, composed marks, and tokens across the borders of scripts.
        let texts = [
            " ",
            "\n",
            "rabbit ",
            "e\u{301}",
            "a字 b",
            "▁▁ ",
            "the they them ",
            "<|im_end|>",
            "<bos>x",
        ];
        for text in texts.map(|text| text.repeat((LONG_TEXT_BYTES / text.len()) + 99)) {
            for model in MODELS {
                let n = model.encode(&text, false).unwrap().len();
                assert!(model.refuse_over(&text, n).is_ok(), "{}", &text[..9]);
            }
        }
        // Tokenizers that may drop text prove nothing.
        let unknown = Tokenizer::from_bytes(small_bpe().to_string().as_bytes()).unwrap();
        assert!(unknown.refuse_over(&"c".repeat(1 << 20), 1).is_ok());
    }

    #[test]
    fn the_text_limit_holds() {
        let text = "a".repeat(TEXT_BYTES_MAX + 1);
        assert!(matches!(
            GEMMA.encode(&text, false),
            Err(TextError::TooLarge {
                limit: TEXT_BYTES_MAX,
                ..
            })
        ));
    }

    #[test]
    fn bad_files_are_errors() {
        let good = small_bpe();
        assert!(Tokenizer::from_bytes(good.to_string().as_bytes()).is_ok());
        let change = |pointer: &str, value: Value| {
            let mut json = good.clone();
            *json.pointer_mut(pointer).unwrap() = value;
            Tokenizer::from_bytes(json.to_string().as_bytes())
                .map(|_| ())
                .unwrap_err()
        };
        change("/decoder", json!(7));
        change("/decoder", json!({"type": "Sequence", "decoders": 1}));
        change("/model", json!(null));
        change("/model/vocab", json!({"a": -1}));
        change("/model/merges", json!([["a", "zzz"]]));
        change("/added_tokens", json!([{"id": 1}]));
        change(
            "/pre_tokenizer",
            json!({"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": false}),
        );
        assert!(matches!(
            change("/model/vocab", json!({"a": 4_000_000_000_u32})),
            TextError::TooLarge {
                what: "vocabulary size",
                ..
            } | TextError::BadTokenizer { .. }
        ));
        assert!(matches!(
            change(
                "/normalizer",
                json!({"type": "Replace", "pattern": {"String": "a"}, "content": "b".repeat(65)})
            ),
            TextError::TooLarge {
                what: "normalizer growth",
                ..
            }
        ));
        let twice =
            json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(9)});
        assert!(matches!(
            change(
                "/normalizer",
                json!({"type": "Sequence", "normalizers": [twice, twice]})
            ),
            TextError::TooLarge {
                what: "normalizer growth",
                found: 81,
                ..
            }
        ));
        for bytes in [
            &b""[..],
            b"{",
            b"[]",
            b"{}",
            b"null",
            b"\xff\xfe",
            b"{\"decoder\":{}}",
        ] {
            assert!(Tokenizer::from_bytes(bytes).is_err());
        }
    }

    #[test]
    fn truncation_written_into_the_file_is_ignored() {
        let mut json = small_bpe();
        json["truncation"] =
            json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
        json["padding"] = json!({"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"});
        let tokenizer = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
        assert_eq!(tokenizer.encode("babab", false).unwrap().len(), 5);
    }

    proptest::proptest! {
        #[test]
        fn any_text_survives_the_byte_fallback_tokenizer(text in ".{0,40}") {
            // Gemma's normalizer only writes `▁` for a space, so `▁` itself is
            // the one character that cannot come back.
            let ids = GEMMA.encode(&text, false).unwrap();
            proptest::prop_assert_eq!(GEMMA.detokenize(&ids, Specials::Show), text.replace('▁', " "));
        }

        #[test]
        fn no_encoding_is_shorter_than_the_cover(text in "([a-d <>\\n]|[a-z]{1,9} |.|\u{301}|字){0,60}") {
            for model in MODELS {
                let cover = model.cover.get_or_init(|| Cover::new(&model.pieces));
                let at_least = cover.tokens(&model.pieces, &text, usize::MAX);
                proptest::prop_assert!(model.is_kept);
                proptest::prop_assert!(at_least <= model.encode(&text, false).unwrap().len());
            }
        }

        #[test]
        fn any_damage_to_a_file_is_survived(at in 0..2000_usize, byte: u8) {
            let mut bytes = small_bpe().to_string().into_bytes();
            let at = at % bytes.len();
            bytes[at] = byte;
            let _ = Tokenizer::from_bytes(&bytes);
        }
    }
}
