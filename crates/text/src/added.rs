//! Added tokens: finding them in a text, and splitting the text at them.
//!
//! An added token stands beside the learned vocabulary: control tokens, and marks of
//! reasoning or tool calls. The `tokenizers` crate splits a text at them before it
//! normalizes, pre-tokenizes and encodes what lies between; the splits here are the same.

use std::ops::Range;
use std::sync::LazyLock;

use aho_corasick::{AhoCorasick, MatchKind};
use regex::Regex;
use tokenizers::{AddedToken, NormalizedString, Normalizer};

use crate::error::TextError;

/// The added tokens of a tokenizer, ready to be found in a text.
#[derive(Debug)]
pub(crate) struct AddedTokens {
    /// Tokens that are looked for before the text is normalized.
    pub(crate) plain: Finder,
    /// Tokens that are looked for in the normalized text.
    pub(crate) normalized: Finder,
}

/// Finds some added tokens in a text.
#[derive(Debug)]
pub(crate) struct Finder {
    spellings: Option<AhoCorasick>,
    /// Id and properties of each token, in the order of the spellings.
    tokens: Vec<(u32, AddedToken)>,
}

/// A part of a text at some of its bytes: the id of a token, or `None` for text.
pub(crate) type Piece = (Option<u32>, Range<usize>);

impl Finder {
    /// Prepares to find `tokens`: id, properties, and the spelling to look for.
    fn new(tokens: Vec<(u32, AddedToken, String)>) -> Result<Self, TextError> {
        let spellings = tokens.iter().map(|(.., spelling)| spelling);
        let spellings = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(spellings)
            .map_err(|err| TextError::BadTokenizer {
                reason: err.to_string(),
            })?;
        let tokens: Vec<_> = tokens
            .into_iter()
            .map(|(id, token, _)| (id, token))
            .collect();
        Ok(Finder {
            spellings: Some(spellings).filter(|_| !tokens.is_empty()),
            tokens,
        })
    }

    /// Adds the tokens in `text` to `found`: each token's number among those of this finder,
    /// and its bytes in the whole text, in which `text` starts at byte `base`.
    pub(crate) fn find(&self, text: &str, base: usize, found: &mut Vec<(usize, Range<usize>)>) {
        let all = self.spellings.iter().flat_map(|s| s.find_iter(text));
        found.extend(all.map(|m| (m.pattern().as_usize(), base + m.start()..base + m.end())));
    }

    /// Splits `text` at the tokens `found` in it for which `is_split` is true.
    pub(crate) fn split(
        &self,
        text: &str,
        found: Vec<(usize, Range<usize>)>,
        is_split: impl Fn(u32, &AddedToken, &Range<usize>) -> bool,
    ) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut from = 0;
        for (n, bytes) in found {
            let (id, token) = &self.tokens[n];
            let (before, after) = (&text[..bytes.start], &text[bytes.end..]);
            let is_inside = || {
                before.chars().next_back().is_some_and(is_word)
                    || after.chars().next().is_some_and(is_word)
            };
            if token.single_word && is_inside() || !is_split(*id, token, &bytes) {
                continue;
            }
            let (mut start, mut end) = (bytes.start, bytes.end);
            if token.lstrip {
                start = before.trim_end().len().max(from);
            }
            if token.rstrip {
                end += after.len() - after.trim_start().len();
            }
            if from < start {
                pieces.push((None, from..start));
            }
            pieces.push((Some(*id), start..end));
            from = end;
        }
        if from < text.len() {
            pieces.push((None, from..text.len()));
        }
        pieces
    }
}

/// Matches a character of a word, as the `tokenizers` crate defines it.
static WORD: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"^\w").expect("a valid pattern"));

/// Whether `c` is a letter, a digit or another character of a word.
fn is_word(c: char) -> bool {
    WORD.is_match(c.encode_utf8(&mut [0; 4]))
}

impl AddedTokens {
    /// Collects the added tokens of `inner`.
    ///
    /// # Errors
    ///
    /// [`TextError`] if a token cannot be normalized or there are too many to search for.
    pub(crate) fn new(inner: &tokenizers::Tokenizer) -> Result<Self, TextError> {
        let mut all: Vec<_> = inner.get_added_tokens_decoder().into_iter().collect();
        all.sort_unstable_by_key(|(id, _)| *id);
        let (mut plain, mut normalized) = (Vec::new(), Vec::new());
        for (id, token) in all {
            let mut spelling = NormalizedString::from(token.content.as_str());
            if !token.normalized {
                plain.push((id, token.clone(), token.content));
                continue;
            }
            if let Some(normalizer) = inner.get_normalizer() {
                normalizer.normalize(&mut spelling).map_err(failed)?;
            }
            normalized.push((id, token, spelling.get().to_owned()));
        }
        Ok(AddedTokens {
            plain: Finder::new(plain)?,
            normalized: Finder::new(normalized)?,
        })
    }
}

/// The error for a text that the `tokenizers` crate refused.
pub(crate) fn failed(err: tokenizers::Error) -> TextError {
    TextError::Encode {
        reason: err.to_string(),
    }
}
