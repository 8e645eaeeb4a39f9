//! Token ids to text, one token at a time.
//!
//! A token may end in the middle of a character. What is held back is at most
//! the three bytes of one unfinished character, so text leaves as early as it
//! can, never splits a code point, and is the same however the tokens arrive:
//!
//! `push(a) + push(b) + … + finish() = detokenize([a, b, …])`.
//!
//! The state is a dozen bytes and `Copy`: to make it forget tokens, keep the
//! copy from before them.

use crate::pieces::Lead;
use crate::tokenizer::Tokenizer;

/// Whether special tokens (structure, such as the end of a turn) appear in the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Specials {
    /// Special tokens are left out of the text.
    Skip,
    /// Special tokens are spelled out in the text.
    Show,
}

/// Turns the token ids of one text into characters, one token at a time.
///
/// The state is small and `Copy`: a copy from before some tokens has forgotten them.
#[derive(Clone, Copy, Debug)]
pub struct Detokenizer {
    specials: Specials,
    /// Whether no token has contributed yet.
    is_first: bool,
    /// How many characters were dropped from the start of the text ([`Lead::Strip`]);
    /// `None` once another character stood first.
    n_stripped: Option<usize>,
    /// The bytes of an unfinished character, `held[..n_held]`: the beginning of one in UTF-8.
    held: [u8; 3],
    /// How many bytes of `held` count.
    n_held: u8,
}

impl Detokenizer {
    /// Starts a text: a space that the tokenizer put before the first word is dropped
    /// again.
    pub fn new(specials: Specials) -> Self {
        Self {
            specials,
            is_first: true,
            n_stripped: Some(0),
            held: [0; 3],
            n_held: 0,
        }
    }

    /// Goes on after other text, as a completion of an unfinished sentence does: the
    /// leading space of the first token is kept.
    pub fn after_text(specials: Specials) -> Self {
        Self {
            is_first: false,
            n_stripped: None,
            ..Self::new(specials)
        }
    }

    /// Takes the next token and returns the characters that it completes.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        let mut text = String::new();
        self.push_onto(tokenizer, id, &mut text);
        text
    }

    /// Takes the next token and appends the characters that it completes to `text`.
    pub fn push_onto(&mut self, tokenizer: &Tokenizer, id: u32, text: &mut String) {
        if self.specials == Specials::Skip && tokenizer.is_special(id) {
            return;
        }
        let start = text.len();
        if self.is_first && matches!(tokenizer.lead(), Lead::DropMarks { .. }) {
            if tokenizer.entry(id).is_none() {
                return;
            }
            self.bytes_onto(&tokenizer.first_bytes(id), text);
        } else {
            self.bytes_onto(tokenizer.token_bytes(id), text);
        }
        self.is_first = false;
        if let Lead::Strip { ch, n } = tokenizer.lead() {
            self.strip(ch, n, start, text);
        }
    }

    /// Ends the text: an unfinished character becomes one U+FFFD.
    pub fn finish(self) -> &'static str {
        if self.n_held > 0 { "\u{fffd}" } else { "" }
    }

    /// Ends a part of the text and starts the next one, which follows it; returns what
    /// [`finish`](Self::finish) returns.
    pub fn part(&mut self) -> &'static str {
        let end = self.finish();
        *self = Self::after_text(self.specials);
        end
    }

    /// Appends the characters that `bytes` complete, and holds back an unfinished one.
    fn bytes_onto(&mut self, bytes: &[u8], text: &mut String) {
        let joined;
        let mut rest = bytes;
        if self.n_held > 0 {
            joined = [&self.held[..usize::from(self.n_held)], bytes].concat();
            rest = &joined;
            self.n_held = 0;
        }
        for chunk in rest.utf8_chunks() {
            text.push_str(chunk.valid());
            let broken = chunk.invalid();
            if broken.is_empty() {
                continue;
            }
            let is_last = std::ptr::eq(broken.as_ptr_range().end, rest.as_ptr_range().end);
            if is_last && is_unfinished(broken) {
                self.held[..broken.len()].copy_from_slice(broken);
                self.n_held = broken.len() as u8;
            } else {
                text.push('\u{fffd}');
            }
        }
    }

    /// Drops up to `n` characters `ch` from the start of the whole text, whose newest part
    /// is `text[start..]`.
    fn strip(&mut self, ch: char, n: usize, start: usize, text: &mut String) {
        while let Some(n_stripped) = self.n_stripped {
            let Some(first) = text[start..].chars().next() else {
                return;
            };
            if first == ch && n_stripped < n {
                text.remove(start);
                self.n_stripped = Some(n_stripped + 1);
            } else {
                self.n_stripped = None;
            }
        }
    }
}

impl Tokenizer {
    /// Turns ids into text in one go: the text that a [`Detokenizer`] streams. Bytes that
    /// are not UTF-8 become U+FFFD, one for each maximal
    /// ill-formed part (the rule of `String::from_utf8_lossy`).
    pub fn detokenize(&self, ids: &[u32], specials: Specials) -> String {
        let mut stream = Detokenizer::new(specials);
        let mut text = String::new();
        for &id in ids {
            stream.push_onto(self, id, &mut text);
        }
        text.push_str(stream.finish());
        text
    }
}

/// Whether more bytes could still complete `bytes` to a character.
fn is_unfinished(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|err| err.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::testing::{GEMMA, MODELS, QWEN, bytes_of, sentencepiece};

    fn stream(tokenizer: &Tokenizer, ids: &[u32], specials: Specials) -> String {
        let mut detokenizer = Detokenizer::new(specials);
        let mut text = String::new();
        for &id in ids {
            text.push_str(&detokenizer.push(tokenizer, id));
        }
        text + detokenizer.finish()
    }

    /// The definition, written without a stream.
    fn one_shot(tokenizer: &Tokenizer, ids: &[u32], specials: Specials) -> String {
        let bytes = bytes_of(tokenizer, ids, specials == Specials::Show);
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn ids() -> impl Strategy<Value = Vec<u32>> {
        // Byte tokens of both vocabularies are among the first few hundred, so
        // broken UTF-8 is common.
        vec(prop_oneof![0..600_u32, 8140..8200_u32, 0..8200_u32], 0..40)
    }

    proptest! {
        #[test]
        fn streaming_equals_one_shot(ids in ids(), show: bool) {
            let specials = if show { Specials::Show } else { Specials::Skip };
            for model in MODELS {
                let text = stream(model, &ids, specials);
                prop_assert_eq!(&text, &one_shot(model, &ids, specials));
                prop_assert_eq!(&text, &model.detokenize(&ids, specials));
            }
        }

        #[test]
        fn the_byte_level_stream_equals_the_reference(ids in ids(), show: bool) {
            let specials = if show { Specials::Show } else { Specials::Skip };
            let reference = QWEN.reference(&ids, !show);
            prop_assert_eq!(stream(&QWEN, &ids, specials), reference);
        }

        #[test]
        fn a_kept_copy_forgets_the_tokens_after_it(kept in ids(), dropped in ids(), next in ids()) {
            for model in MODELS {
                let mut detokenizer = Detokenizer::new(Specials::Show);
                let mut text = String::new();
                kept.iter().for_each(|&id| detokenizer.push_onto(model, id, &mut text));
                let copy = detokenizer;
                dropped.iter().for_each(|&id| { detokenizer.push(model, id); });
                detokenizer = copy;
                next.iter().for_each(|&id| detokenizer.push_onto(model, id, &mut text));
                text.push_str(detokenizer.finish());
                let all = [kept.clone(), next.clone()].concat();
                prop_assert_eq!(text, model.detokenize(&all, Specials::Show));
            }
        }

        #[test]
        fn leading_spaces_agree_with_the_reference(ids in vec(0..9_u32, 0..12), strip in 0..4_usize, skip: bool) {
            for decoder in [
                json!({"type": "Sequence", "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "ByteFallback"}, {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": strip, "stop": 0}]}),
                json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}),
                json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true}),
                json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": true}),
            ] {
                let json = sentencepiece(decoder).to_string();
                let ours = Tokenizer::from_bytes(json.as_bytes()).unwrap();
                let reference = tokenizers::Tokenizer::from_bytes(&json).unwrap();
                let specials = if skip { Specials::Skip } else { Specials::Show };
                prop_assert_eq!(stream(&ours, &ids, specials), reference.decode(&ids, skip).unwrap());
            }
        }
    }

    #[test]
    fn a_character_leaves_only_when_it_is_whole() {
        let byte = |b: u8| GEMMA.id_of(&format!("<0x{b:02X}>")).unwrap();
        let mut detokenizer = Detokenizer::new(Specials::Skip);
        let pieces: Vec<String> = "😀"
            .bytes()
            .map(|b| detokenizer.push(&GEMMA, byte(b)))
            .collect();
        assert_eq!(pieces, ["", "", "", "😀"]);
        // A lead byte that a non-continuation follows is gone at once.
        assert_eq!(detokenizer.push(&GEMMA, byte(0xF0)), "");
        assert_eq!(
            detokenizer.push(&GEMMA, GEMMA.id_of("▁a").unwrap()),
            "\u{fffd} a"
        );
        assert_eq!(detokenizer.push(&GEMMA, byte(0xE5)), "");
        assert_eq!(detokenizer.finish(), "\u{fffd}");
    }

    #[test]
    fn a_continuation_keeps_its_leading_space() {
        let json = sentencepiece(
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}),
        );
        let tokenizer = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
        let hello = tokenizer.id_of("▁a").unwrap();
        assert_eq!(
            Detokenizer::new(Specials::Skip).push(&tokenizer, hello),
            "a"
        );
        assert_eq!(
            Detokenizer::after_text(Specials::Skip).push(&tokenizer, hello),
            " a"
        );
    }

    #[test]
    fn special_tokens_are_skipped_or_shown() {
        let ids = [8161, QWEN.id_of("Hello").unwrap_or(0), 8162];
        assert!(!QWEN.detokenize(&ids, Specials::Skip).contains("<|im"));
        assert!(
            QWEN.detokenize(&ids, Specials::Show)
                .ends_with("<|im_end|>")
        );
        // An id without an entry is silent either way.
        assert_eq!(QWEN.detokenize(&[8190, u32::MAX], Specials::Show), "");
    }
}
