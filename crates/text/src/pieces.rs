//! The bytes that a token stands for.
//!
//! A vocabulary entry is a string in the tokenizer's own alphabet; text is
//! bytes. The `decoder` of `tokenizer.json` says how to get from one to the
//! other, and two ways are in use:
//!
//! - **Byte level** (GPT-2, Qwen): every character of the entry is one byte,
//!   by a fixed table that maps the 188 printable Latin-1 bytes to themselves
//!   and the other 68 to U+0100 onwards.
//! - **Pieces** (SentencePiece, Gemma): the entry is text with `▁` for a
//!   space, and `<0xNN>` is one byte.
//!
//! Both give every token a fixed byte string, whatever stands before it (the one
//! exception is a leading space that some decoders drop). Text is the concatenation
//! of these strings, read as UTF-8. So tokens can be detokenized one at a time, each
//! log-probability belongs to some bytes of the text, and truncating a sequence never
//! changes the text before the end.
//!
//! Decoders without this property (WordPiece, CTC, regular expressions) are
//! refused at load.

use serde_json::Value;

use crate::error::{TextError, within};

/// Longest token in bytes; real vocabularies stay under 1 KiB.
pub const TOKEN_BYTES_MAX: usize = 64 * 1024;
/// Most steps of a tokenizer's decoder; Llama's has four.
pub const DECODER_STEPS_MAX: usize = 16;

/// How the first token of a text loses the space that encoding added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lead {
    /// The first token keeps its space.
    Keep,
    /// Up to `n` characters `ch` are dropped from the start of the text.
    Strip {
        /// The character that is dropped.
        ch: char,
        /// The most characters that are dropped.
        n: usize,
    },
    /// Every space mark of the first token is dropped (the Metaspace decoder).
    DropMarks {
        /// The mark that stands for a space, `▁`.
        mark: char,
    },
}

/// The rule that maps an entry of the vocabulary to bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PieceRule {
    /// Every character is one byte, by the table of byte-level vocabularies.
    ByteLevel,
    /// The entry is text with some replacements.
    Pieces {
        /// What is replaced, and by what, in this order.
        replace: Vec<(String, String)>,
        /// Whether an entry `<0xNN>` is one byte.
        byte_fallback: bool,
    },
}

impl PieceRule {
    /// Reads the `decoder` of a `tokenizer.json`.
    ///
    /// # Errors
    ///
    /// [`TextError::BadTokenizer`] if its tokens have no bytes of their own.
    pub(crate) fn from_json(decoder: &Value) -> Result<(Self, Lead), TextError> {
        let one = std::slice::from_ref(decoder);
        let steps = match kind(decoder) {
            "Sequence" => decoder["decoders"]
                .as_array()
                .map(Vec::as_slice)
                .unwrap_or_default(),
            _ => one,
        };
        within("decoder steps", steps.len(), DECODER_STEPS_MAX)?;
        if let [step] = steps
            && kind(step) == "ByteLevel"
        {
            return Ok((Self::ByteLevel, Lead::Keep));
        }

        let mut replace = Vec::new();
        let mut byte_fallback = false;
        let mut fused = false;
        let mut lead = Lead::Keep;
        for step in steps {
            match kind(step) {
                // Bytes that spell `▁` are text, so replacing comes before them.
                "Replace" if !byte_fallback && !fused => {
                    let from = step["pattern"]["String"].as_str();
                    let to = step["content"].as_str();
                    let (Some(from), Some(to)) = (from, to) else {
                        return Err(unsupported("Replace without a plain string"));
                    };
                    if from.is_empty() {
                        return Err(unsupported("Replace of nothing"));
                    }
                    replace.push((from.to_owned(), to.to_owned()));
                }
                "Metaspace" if !byte_fallback && !fused => {
                    let mark = match step["replacement"].as_str() {
                        None => '▁',
                        Some(text) => match text.chars().next() {
                            Some(mark) if text.len() == mark.len_utf8() => mark,
                            _ => return Err(unsupported("Metaspace mark")),
                        },
                    };
                    let keeps = step["prepend_scheme"] == "never"
                        || (step["prepend_scheme"].is_null() && step["add_prefix_space"] == false);
                    if !keeps {
                        lead = Lead::DropMarks { mark };
                    }
                    replace.push((mark.to_string(), " ".to_owned()));
                }
                "ByteFallback" if !fused => byte_fallback = true,
                "Fuse" => fused = true,
                "Strip" if fused && step["stop"] == 0 => {
                    let ch = step["content"]
                        .as_str()
                        .and_then(|text| text.chars().next());
                    let n = step["start"].as_u64().and_then(|n| usize::try_from(n).ok());
                    let (Some(ch), Some(n), Lead::Keep) = (ch, n, lead) else {
                        return Err(unsupported("Strip"));
                    };
                    lead = Lead::Strip { ch, n };
                }
                other => return Err(unsupported(other)),
            }
        }
        if replace.is_empty() && !byte_fallback && !fused {
            return Err(unsupported("no decoder"));
        }
        Ok((
            Self::Pieces {
                replace,
                byte_fallback,
            },
            lead,
        ))
    }

    /// The bytes of the vocabulary entry `entry`.
    pub(crate) fn bytes(&self, entry: &str) -> Vec<u8> {
        match self {
            // An added token may hold characters outside the byte alphabet;
            // it is then text already.
            Self::ByteLevel => entry
                .chars()
                .map(byte_of_char)
                .collect::<Option<Vec<u8>>>()
                .unwrap_or_else(|| entry.as_bytes().to_vec()),
            Self::Pieces {
                replace,
                byte_fallback,
            } => {
                let mut text = entry.to_owned();
                for (from, to) in replace {
                    // No decoder in use grows a token; one that would is cut
                    // off here and found too long by the caller.
                    if text.len().saturating_mul(to.len().max(1)) > TOKEN_BYTES_MAX * 8 {
                        return vec![0; TOKEN_BYTES_MAX + 1];
                    }
                    text = text.replace(from.as_str(), to);
                }
                match byte_of_fallback(&text) {
                    Some(byte) if *byte_fallback => vec![byte],
                    _ => text.into_bytes(),
                }
            }
        }
    }
}

/// The bytes of every token of a vocabulary, in one allocation.
#[derive(Debug)]
pub(crate) struct Pieces {
    /// The bytes of all tokens, end to end in the order of their ids.
    bytes: Vec<u8>,
    /// The end of each token in `bytes`.
    ends: Vec<u32>,
}

impl Pieces {
    /// Builds the table for ids `0..n_ids`. Ids without an `entry`, as at the end of a padded
    /// vocabulary, have no bytes.
    ///
    /// # Errors
    ///
    /// [`TextError::TooLarge`] if a token or all tokens together have too many bytes.
    pub(crate) fn new(
        rule: &PieceRule,
        n_ids: usize,
        entry: impl Fn(u32) -> Option<String>,
    ) -> Result<Self, TextError> {
        let mut pieces = Self {
            bytes: Vec::new(),
            ends: Vec::with_capacity(n_ids),
        };
        for id in 0..n_ids as u32 {
            if let Some(entry) = entry(id) {
                within("token bytes", entry.len(), TOKEN_BYTES_MAX)?;
                let bytes = rule.bytes(&entry);
                within("token bytes", bytes.len(), TOKEN_BYTES_MAX)?;
                pieces.bytes.extend_from_slice(&bytes);
            }
            within("vocabulary bytes", pieces.bytes.len(), u32::MAX as usize)?;
            pieces.ends.push(pieces.bytes.len() as u32);
        }
        Ok(pieces)
    }

    /// The number of ids.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The bytes of `id`; empty for an id outside the vocabulary.
    pub(crate) fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        if id >= self.ends.len() {
            return &[];
        }
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start as usize..self.ends[id] as usize]
    }
}

/// The type of a step of a decoder.
fn kind(step: &Value) -> &str {
    step["type"].as_str().unwrap_or("no decoder")
}

/// The error for a decoder whose tokens have no bytes of their own.
fn unsupported(what: &str) -> TextError {
    let what: String = what.chars().take(64).collect();
    TextError::BadTokenizer {
        reason: format!("its decoder is not supported: {what}"),
    }
}

/// Whether the byte-level alphabet writes a byte as itself.
fn is_plain(byte: u32) -> bool {
    matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// The byte that a character of the byte-level alphabet stands for: plain
/// bytes are their own character, the rest are U+0100 onwards in byte order.
fn byte_of_char(ch: char) -> Option<u8> {
    let code = ch as u32;
    match code {
        _ if is_plain(code) => Some(code as u8),
        // 0x00..=0x20, then 0x7F..=0xA0, then 0xAD: 33 + 34 + 1 bytes.
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7F) as u8),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// The byte of `<0xNN>`, two hexadecimal digits of either case.
fn byte_of_fallback(entry: &str) -> Option<u8> {
    let digits = entry.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_byte_alphabet_covers_every_byte_once() {
        let mut seen = [0; 256];
        for code in 0..0x200 {
            if let Some(byte) = char::from_u32(code).and_then(byte_of_char) {
                seen[usize::from(byte)] += 1;
            }
        }
        assert_eq!(seen, [1; 256]);
        assert_eq!(byte_of_char('Ġ'), Some(b' '));
        assert_eq!(byte_of_char('Ċ'), Some(b'\n'));
    }

    #[test]
    fn fallback_tokens_are_exactly_two_digits() {
        assert_eq!(byte_of_fallback("<0xE5>"), Some(0xE5));
        assert_eq!(byte_of_fallback("<0x0a>"), Some(10));
        for other in ["<0x>", "<0x1>", "<0x123>", "<0x+1>", "0x41", "<0xé>"] {
            assert_eq!(byte_of_fallback(other), None, "{other}");
        }
    }

    #[test]
    fn decoders_that_need_their_neighbors_are_refused() {
        for decoder in [
            json!(null),
            json!({"type": "WordPiece"}),
            json!({"type": "Sequence", "decoders": []}),
            json!({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]}),
            json!({"type": "Replace", "pattern": {"Regex": "a+"}, "content": " "}),
            json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]}),
        ] {
            assert!(PieceRule::from_json(&decoder).is_err(), "{decoder}");
        }
    }
}
