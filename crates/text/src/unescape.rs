//! Encoding a prompt with escaped spellings of control tokens (`control`), which are text.
//!
//! The `tokenizers` crate splits a text at its added tokens first, then normalizes,
//! pre-tokenizes and encodes what lies between. The splits alone are made here, as the
//! crate makes them, but not at a spelling that holds a placeholder.

use tokenizers::normalizer::Range;
use tokenizers::{
    Model, NormalizedString, Normalizer, OffsetType, PreTokenizedString, PreTokenizer, Token,
};

use crate::added::{Piece, failed};
use crate::control::{ControlTokens, Placeholders};
use crate::error::{TextError, contain, within};
use crate::tokenizer::{TEXT_BYTES_MAX, Tokenizer};

/// A rendered prompt with the original characters instead of placeholders.
#[derive(Debug)]
pub(crate) struct Prompt {
    /// The whole prompt.
    pub(crate) text: String,
    /// The bytes of `text` that had a placeholder, ascending.
    escaped: Vec<usize>,
    /// Added tokens without a placeholder in their spelling: number and bytes.
    found: Vec<(usize, std::ops::Range<usize>)>,
}

impl Tokenizer {
    /// Puts the original characters into `rendered` in place of `placeholders`.
    pub(crate) fn unescape(&self, rendered: &str, placeholders: &Placeholders) -> Prompt {
        let mut prompt = Prompt {
            text: String::with_capacity(rendered.len()),
            escaped: Vec::new(),
            found: Vec::new(),
        };
        let mut from = 0;
        let take = |prompt: &mut Prompt, run: &str| {
            let finder = &self.added_tokens().plain;
            finder.find(run, prompt.text.len(), &mut prompt.found);
            prompt.text.push_str(run);
        };
        for (at, c) in rendered.char_indices() {
            if let Some(original) = placeholders.original(c) {
                take(&mut prompt, &rendered[from..at]);
                prompt.escaped.push(prompt.text.len());
                prompt.text.push(original);
                from = at + c.len_utf8();
            }
        }
        take(&mut prompt, &rendered[from..]);
        prompt
    }

    /// Turns a prompt into ids. Escaped spellings of control tokens are text.
    ///
    /// # Errors
    ///
    /// [`TextError::TooLarge`] if the text is longer than [`TEXT_BYTES_MAX`];
    /// [`TextError::Encode`] if the tokenizer fails, or finds an escaped control token in its
    /// learned vocabulary.
    pub(crate) fn encode_unescaped(
        &self,
        prompt: Prompt,
        control: &ControlTokens,
    ) -> Result<Vec<u32>, TextError> {
        within("text bytes", prompt.text.len(), TEXT_BYTES_MAX)?;
        contain("the tokenizer", || {
            self.encode_split(prompt, control).map_err(failed)
        })
    }

    /// Turns a text into ids in which no special token is one: whatever the text spells is text.
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode).
    pub fn encode_as_text(&self, text: &str) -> Result<Vec<u32>, TextError> {
        within("text bytes", text.len(), TEXT_BYTES_MAX)?;
        let added = self.added_tokens();
        let is_text = |id: u32| self.is_special(id);
        let mut found = Vec::new();
        added.plain.find(text, 0, &mut found);
        contain("the tokenizer", || {
            let pieces = added.plain.split(text, found, |id, _, _| !is_text(id));
            let mut prompt = self
                .split_at(text, &pieces, |text, found| {
                    added
                        .normalized
                        .split(text.get(), found, |id, _, _| !is_text(id))
                })
                .map_err(failed)?;
            self.encode_pieces(&mut prompt).map_err(failed)
        })
    }

    /// `text`, split at `pieces`, and what lies between them normalized and split again by
    /// `split`, which is given the added tokens found there.
    fn split_at(
        &self,
        text: &str,
        pieces: &[Piece],
        split: impl Fn(&NormalizedString, Vec<(usize, std::ops::Range<usize>)>) -> Vec<Piece>,
    ) -> tokenizers::Result<PreTokenizedString> {
        let (inner, added) = (self.inner(), self.added_tokens());
        let mut prompt = PreTokenizedString::from(text);
        prompt.split(|_, text| Ok(sliced(&text, pieces.to_vec())))?;
        prompt.split(|_, mut text| {
            if let Some(normalizer) = inner.get_normalizer() {
                normalizer.normalize(&mut text)?;
            }
            let mut found = Vec::new();
            added.normalized.find(text.get(), 0, &mut found);
            let pieces = split(&text, found);
            Ok(sliced(&text, pieces))
        })?;
        Ok(prompt)
    }

    /// The ids of a text that is split at its added tokens.
    fn encode_pieces(&self, prompt: &mut PreTokenizedString) -> tokenizers::Result<Vec<u32>> {
        let inner = self.inner();
        if let Some(pre_tokenizer) = inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(prompt)?;
        }
        inner.get_model().tokenize_in_pretokenized(prompt, None)?;
        let prompt = std::mem::replace(prompt, PreTokenizedString::from(""));
        let encoding = prompt.into_encoding(None, 0, OffsetType::None)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// [`encode_unescaped`](Self::encode_unescaped), with the errors of the `tokenizers` crate.
    fn encode_split(
        &self,
        prompt: Prompt,
        control: &ControlTokens,
    ) -> tokenizers::Result<Vec<u32>> {
        let added = self.added_tokens();
        let Prompt {
            text,
            escaped,
            found,
        } = prompt;
        let pieces = added.plain.split(&text, found, |_, _, _| true);
        let mut prompt = self.split_at(&text, &pieces, |text, found| {
            added
                .normalized
                .split(text.get(), found, |id, token, bytes| {
                    let Some(slice) = text.slice(Range::Normalized(bytes.clone())) else {
                        return false;
                    };
                    let (start, end) = slice.offsets_original();
                    let next = escaped.partition_point(|&at| at < start);
                    let is_whole = escaped.get(next).is_none_or(|&at| at >= end);
                    !control.contains(id)
                        || is_whole && slice.get_original().trim() == token.content
                })
        })?;
        let is_control = |id: &&u32| control.contains(**id);
        let count = |ids: &[u32]| ids.iter().filter(is_control).count();
        let split: Vec<u32> = prompt
            .get_splits(
                tokenizers::OffsetReferential::Normalized,
                tokenizers::OffsetType::Byte,
            )
            .into_iter()
            .filter_map(|(_, _, tokens)| tokens.as_ref())
            .flatten()
            .map(|token| token.id)
            .collect();
        let ids = self.encode_pieces(&mut prompt)?;
        if count(&ids) != count(&split) {
            return Err(
                "a message spells a control token that this tokenizer also has as a word: leave it out"
                    .into(),
            );
        }
        Ok(ids)
    }
}

/// `text` split into `pieces`: tokens, and the text between them.
fn sliced(
    text: &NormalizedString,
    pieces: Vec<Piece>,
) -> Vec<(NormalizedString, Option<Vec<Token>>)> {
    pieces
        .into_iter()
        .filter_map(|(id, bytes)| {
            let slice = text.slice(Range::Normalized(bytes))?;
            let tokens = id.map(|id| {
                let value = slice.get().to_owned();
                let n = value.len();
                vec![Token::new(id, value, (0, n))]
            });
            Some((slice, tokens))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::*;
    use crate::testing::{MODELS, small_bpe};

    /// The ids of `text` with splits made here; each `spelled` in it is escaped.
    fn split(tokenizer: &Tokenizer, text: &str, spelled: &str) -> Vec<u32> {
        let control = ControlTokens::new(tokenizer, [], []).unwrap();
        let messages = json!([text.replace(spelled, "")]);
        assert!(
            control
                .escape(&messages, None, &Map::new())
                .unwrap()
                .is_none()
                || spelled.is_empty()
        );
        let escaped = control
            .escape(&json!([spelled]), None, &Map::new())
            .unwrap();
        let (written, placeholders) = match &escaped {
            Some(escaped) => (escaped.messages[0].as_str().unwrap(), &escaped.placeholders),
            None => (spelled, &Placeholders::default()),
        };
        let rendered = text.replace(spelled, written);
        let prompt = tokenizer.unescape(&rendered, placeholders);
        assert_eq!(prompt.text, text);
        tokenizer.encode_unescaped(prompt, &control).unwrap()
    }

    /// Tokenizers whose added tokens are normalized, strip white space or are words.
    fn odd() -> Vec<Tokenizer> {
        let token = |id: u32, content: &str, more: Value| {
            let mut token = json!({"id": id, "content": content, "special": true, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false});
            for (key, value) in more.as_object().unwrap() {
                token[key] = value.clone();
            }
            token
        };
        let normalizers = [
            Value::Null,
            json!({"type": "Lowercase"}),
            json!({"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}),
            json!({"type": "NFKC"}),
        ];
        let make = |normalizer: Value| {
            let mut json = small_bpe();
            json["normalizer"] = normalizer;
            json["added_tokens"] = json!([
                token(2, "<s>", json!({})),
                token(3, "</s>", json!({"normalized": true})),
                token(4, "<l>", json!({"lstrip": true})),
                token(5, "<r>", json!({"rstrip": true})),
                token(
                    6,
                    "<both>",
                    json!({"lstrip": true, "rstrip": true, "normalized": true})
                ),
                token(7, "<w>", json!({"single_word": true})),
                token(8, "  ", json!({"special": false})),
                token(9, "<s>a", json!({"special": false, "normalized": true})),
            ]);
            Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
        };
        normalizers.into_iter().map(make).collect()
    }

    #[test]
    fn escaped_spellings_are_text_and_others_tokens() {
        for tokenizer in odd() {
            let count = |ids: &[u32]| ids.iter().filter(|&&id| id == 3).count();
            let whole = "</s>a</s>b</s>";
            // One normalizer marks the start of a text, and the token is found only there.
            let n_plain = count(&tokenizer.encode(whole, false).unwrap());
            assert!([1, 3].contains(&n_plain));
            // The second is escaped.
            let control = ControlTokens::new(&tokenizer, [], []).unwrap();
            let escaped = control
                .escape(&json!(["</s>"]), None, &Map::new())
                .unwrap()
                .unwrap();
            let written = escaped.messages[0].as_str().unwrap();
            let prompt = tokenizer.unescape(&format!("</s>a{written}b</s>"), &escaped.placeholders);
            assert_eq!(prompt.text, whole);
            let ids = tokenizer.encode_unescaped(prompt, &control).unwrap();
            assert_eq!(count(&ids), n_plain.min(2));
        }
        // Compatibility forms become the spelling when they are normalized, and not a token.
        let nfkc = &odd()[3];
        assert!(nfkc.encode("＜/s＞", false).unwrap().contains(&3));
        let control = ControlTokens::new(nfkc, [], []).unwrap();
        let prompt = nfkc.unescape("＜/s＞</s>", &Placeholders::default());
        let ids = nfkc.encode_unescaped(prompt, &control).unwrap();
        assert_eq!(ids.iter().filter(|&&id| id == 3).count(), 1);
    }

    proptest::proptest! {
        #[test]
        fn splits_are_those_of_the_crate(
            text in "(<\\|im_end\\|>|<\\|turn>|<turn\\|>|<think>|</s>|<s>|<l>|<r>|<both>|<w>|[a-b<>|/ \n]|  |.|字|e\u{301}){0,24}"
        ) {
            for tokenizer in MODELS.iter().map(|model| &***model).chain(&odd()) {
                let whole = tokenizer.unescape(&text, &Placeholders::default());
                let control = ControlTokens::new(tokenizer, [], []).unwrap();
                let ids = tokenizer.encode_unescaped(whole, &control).unwrap();
                proptest::prop_assert_eq!(ids, tokenizer.encode(&text, false).unwrap());
            }
        }

        #[test]
        fn text_around_an_escaped_spelling_is_encoded_as_ever(text in "[a-zA-Z0-9 .,\n字é]{0,30}") {
            for model in MODELS {
                let whole = format!("{text}<{text}");
                proptest::prop_assert_eq!(split(model, &whole, "<"), model.encode(&whole, false).unwrap());
            }
        }
    }

    #[test]
    fn a_text_that_spells_special_tokens_is_text() {
        for tokenizer in MODELS {
            let special = tokenizer
                .added()
                .iter()
                .filter(|&&id| tokenizer.is_special(id));
            let spelled: Vec<String> = special.filter_map(|&id| tokenizer.entry(id)).collect();
            assert!(spelled.len() > 2);
            for text in ["", "a", "One two\n\tthree 媽 🤗", "<think>a</think>"] {
                let plain = tokenizer.encode(text, false).unwrap();
                if plain.iter().all(|&id| !tokenizer.is_special(id)) {
                    assert_eq!(tokenizer.encode_as_text(text).unwrap(), plain, "{text:?}");
                }
            }
            for spelling in &spelled {
                let text = format!("a {spelling}{spelling} b");
                let ids = tokenizer.encode_as_text(&text).unwrap();
                assert!(
                    ids.iter().all(|&id| !tokenizer.is_special(id)),
                    "{spelling}"
                );
                assert_eq!(tokenizer.detokenize(&ids, crate::Specials::Show), text);
            }
        }
    }
}
