//! Encoding a prompt in which some spellings of control tokens are text.
//!
//! The `tokenizers` crate cuts a text at its added tokens first, then normalizes,
//! pre-tokenizes and encodes what lies between. Only the cuts are made here, as the
//! crate makes them, but not at a spelling that has a stand-in in it; the rest is the
//! crate's own.

use tokenizers::normalizer::Range;
use tokenizers::{
    Model, NormalizedString, Normalizer, OffsetType, PreTokenizedString, PreTokenizer, Token,
};

use crate::added::{Piece, failed};
use crate::control::{Control, StandIns};
use crate::error::{TextError, contain, within};
use crate::tokenizer::{TEXT_BYTES_MAX, Tokenizer};

/// A rendered prompt, its stand-ins put back.
#[derive(Debug)]
pub(crate) struct Prompt {
    pub(crate) text: String,
    /// Where characters stood that had a stand-in.
    broken: Vec<usize>,
    /// Added tokens that no stand-in breaks.
    found: Vec<(usize, std::ops::Range<usize>)>,
}

impl Tokenizer {
    /// Puts the stand-ins of `rendered` back.
    pub(crate) fn mend(&self, rendered: &str, stand_ins: &StandIns) -> Prompt {
        let mut prompt = Prompt {
            text: String::with_capacity(rendered.len()),
            broken: Vec::new(),
            found: Vec::new(),
        };
        let mut from = 0;
        let take = |prompt: &mut Prompt, run: &str| {
            let finder = &self.cutter().plain;
            finder.find(run, prompt.text.len(), &mut prompt.found);
            prompt.text.push_str(run);
        };
        for (at, c) in rendered.char_indices() {
            if let Some(original) = stand_ins.original(c) {
                take(&mut prompt, &rendered[from..at]);
                prompt.broken.push(prompt.text.len());
                prompt.text.push(original);
                from = at + c.len_utf8();
            }
        }
        take(&mut prompt, &rendered[from..]);
        prompt
    }

    /// Turns a prompt into ids; spellings that were broken are text.
    ///
    /// # Errors
    ///
    /// If the text is longer than [`TEXT_BYTES_MAX`], the tokenizer fails, or its model
    /// reads a control token out of text.
    pub(crate) fn encode_mended(
        &self,
        prompt: Prompt,
        control: &Control,
    ) -> Result<Vec<u32>, TextError> {
        within("text bytes", prompt.text.len(), TEXT_BYTES_MAX)?;
        contain("the tokenizer", || {
            self.encode_cut(prompt, control).map_err(failed)
        })
    }

    fn encode_cut(&self, prompt: Prompt, control: &Control) -> tokenizers::Result<Vec<u32>> {
        let (inner, cutter) = (self.inner(), self.cutter());
        let Prompt {
            text,
            broken,
            found,
        } = prompt;
        let pieces = cutter.plain.cut(&text, found, |_, _, _| true);
        let mut prompt = PreTokenizedString::from(text.as_str());
        prompt.split(|_, text| Ok(sliced(&text, pieces.clone())))?;
        prompt.split(|_, mut text| {
            if let Some(normalizer) = inner.get_normalizer() {
                normalizer.normalize(&mut text)?;
            }
            let mut found = Vec::new();
            cutter.normalized.find(text.get(), 0, &mut found);
            let pieces = cutter
                .normalized
                .cut(text.get(), found, |id, token, bytes| {
                    let Some(slice) = text.slice(Range::Normalized(bytes.clone())) else {
                        return false;
                    };
                    let (start, end) = slice.offsets_original();
                    let next = broken.partition_point(|&at| at < start);
                    let is_whole = broken.get(next).is_none_or(|&at| at >= end);
                    !control.contains(id)
                        || is_whole && slice.get_original().trim() == token.content
                });
            Ok(sliced(&text, pieces))
        })?;
        let is_control = |id: &&u32| control.contains(**id);
        let count = |ids: &[u32]| ids.iter().filter(is_control).count();
        let cut: Vec<u32> = prompt
            .get_splits(
                tokenizers::OffsetReferential::Normalized,
                tokenizers::OffsetType::Byte,
            )
            .into_iter()
            .filter_map(|(_, _, tokens)| tokens.as_ref())
            .flatten()
            .map(|token| token.id)
            .collect();
        if let Some(pre_tokenizer) = inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut prompt)?;
        }
        inner
            .get_model()
            .tokenize_in_pretokenized(&mut prompt, None)?;
        let ids = prompt
            .into_encoding(None, 0, OffsetType::None)?
            .get_ids()
            .to_vec();
        if count(&ids) != count(&cut) {
            return Err(
                "a message spells a control token, and this tokenizer knows it as a word".into(),
            );
        }
        Ok(ids)
    }
}

/// `text` as tokens and the text between them.
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

    /// The ids of `text` with cuts made here; the first character of each of `spelled` is
    /// broken.
    fn cut(tokenizer: &Tokenizer, text: &str, spelled: &str) -> Vec<u32> {
        let control = Control::new(tokenizer, [], []).unwrap();
        let messages = json!([text.replace(spelled, "")]);
        assert!(
            control
                .broken(&messages, None, &Map::new())
                .unwrap()
                .is_none()
                || spelled.is_empty()
        );
        let broken = control
            .broken(&json!([spelled]), None, &Map::new())
            .unwrap();
        let (written, stand_ins) = match &broken {
            Some(broken) => (broken.messages[0].as_str().unwrap(), &broken.stand_ins),
            None => (spelled, &StandIns::default()),
        };
        let rendered = text.replace(spelled, written);
        let prompt = tokenizer.mend(&rendered, stand_ins);
        assert_eq!(prompt.text, text);
        tokenizer.encode_mended(prompt, &control).unwrap()
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
    fn broken_spellings_are_text_and_others_tokens() {
        for tokenizer in odd() {
            let count = |ids: &[u32]| ids.iter().filter(|&&id| id == 3).count();
            let whole = "</s>a</s>b</s>";
            // One normalizer marks the start of a text, and the token is found only there.
            let n_plain = count(&tokenizer.encode(whole, false).unwrap());
            assert!([1, 3].contains(&n_plain));
            // The second is broken.
            let control = Control::new(&tokenizer, [], []).unwrap();
            let broken = control
                .broken(&json!(["</s>"]), None, &Map::new())
                .unwrap()
                .unwrap();
            let written = broken.messages[0].as_str().unwrap();
            let prompt = tokenizer.mend(&format!("</s>a{written}b</s>"), &broken.stand_ins);
            assert_eq!(prompt.text, whole);
            let ids = tokenizer.encode_mended(prompt, &control).unwrap();
            assert_eq!(count(&ids), n_plain.min(2));
        }
        // Compatibility forms become the spelling when they are normalized, and not a token.
        let nfkc = &odd()[3];
        assert!(nfkc.encode("＜/s＞", false).unwrap().contains(&3));
        let control = Control::new(nfkc, [], []).unwrap();
        let prompt = nfkc.mend("＜/s＞</s>", &StandIns::default());
        let ids = nfkc.encode_mended(prompt, &control).unwrap();
        assert_eq!(ids.iter().filter(|&&id| id == 3).count(), 1);
    }

    proptest::proptest! {
        #[test]
        fn cuts_are_those_of_the_crate(
            text in "(<\\|im_end\\|>|<\\|turn>|<turn\\|>|<think>|</s>|<s>|<l>|<r>|<both>|<w>|[a-b<>|/ \n]|  |.|字|e\u{301}){0,24}"
        ) {
            for tokenizer in MODELS.iter().map(|model| &***model).chain(&odd()) {
                let whole = tokenizer.mend(&text, &StandIns::default());
                let control = Control::new(tokenizer, [], []).unwrap();
                let ids = tokenizer.encode_mended(whole, &control).unwrap();
                proptest::prop_assert_eq!(ids, tokenizer.encode(&text, false).unwrap());
            }
        }

        #[test]
        fn text_around_what_is_broken_is_encoded_as_ever(text in "[a-zA-Z0-9 .,\n字é]{0,30}") {
            for model in MODELS {
                let whole = format!("{text}<{text}");
                proptest::prop_assert_eq!(cut(model, &whole, "<"), model.encode(&whole, false).unwrap());
            }
        }
    }
}
