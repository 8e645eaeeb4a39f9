//! `completion_probabilities`: how likely tokens were, before or after the samplers.

use engine::{Logprobs, LogprobsOf, WrittenToken};
use serde::Serialize;
use text::Tokenizer;

use crate::generation::Piece;

/// What is said of a token that is impossible; JSON has no infinity.
const LEAST: f32 = f32::MIN;

/// How likely one token was.
#[derive(Serialize)]
struct Likely<'a> {
    id: u32,
    token: &'a str,
    bytes: &'a [u8],
    #[serde(skip_serializing_if = "Option::is_none")]
    logprob: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prob: Option<f32>,
}

impl<'a> Likely<'a> {
    /// A token that is spelled `text` where it stands, else as its bytes are.
    fn new(
        id: u32,
        logprob: f32,
        text: Option<&'a str>,
        tokenizer: &'a Tokenizer,
        of: LogprobsOf,
    ) -> Self {
        let bytes = tokenizer.token_bytes(id);
        let is_prob = of == LogprobsOf::Choice;
        Likely {
            id,
            token: text.unwrap_or_else(|| whole_characters(bytes)),
            bytes,
            logprob: (!is_prob).then_some(logprob.max(LEAST)),
            prob: is_prob.then(|| logprob.exp()),
        }
    }
}

/// The whole characters that `bytes` begin with.
fn whole_characters(bytes: &[u8]) -> &str {
    match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default(),
    }
}

/// How likely a token of the text was, and the likeliest beside it.
#[derive(Serialize)]
pub(super) struct Entry<'a> {
    #[serde(flatten)]
    own: Likely<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<Likely<'a>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_probs: Option<Vec<Likely<'a>>>,
}

impl<'a> Entry<'a> {
    /// The entry of a token with its log-probabilities `of` one or the other.
    pub(super) fn new(
        token: &'a WrittenToken,
        logprobs: &Logprobs,
        tokenizer: &'a Tokenizer,
        of: LogprobsOf,
    ) -> Self {
        let likely = |&(id, logprob): &(u32, f32)| Likely::new(id, logprob, None, tokenizer, of);
        let top = Some(logprobs.top.iter().map(likely).collect());
        let (top_logprobs, top_probs) = match of {
            LogprobsOf::Logits => (top, None),
            LogprobsOf::Choice => (None, top),
        };
        Entry {
            own: Likely::new(token.id, logprobs.logprob, Some(&token.text), tokenizer, of),
            top_logprobs,
            top_probs,
        }
    }

    /// The entries of all tokens of a piece that come with log-probabilities.
    pub(super) fn of_piece(
        piece: &'a Piece,
        tokenizer: &'a Tokenizer,
        of: LogprobsOf,
    ) -> Vec<Entry<'a>> {
        let judged = piece.judged();
        judged
            .map(|(_, token, logprobs)| Entry::new(token, logprobs, tokenizer, of))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_spelled_as_far_as_they_are_characters() {
        for (bytes, text) in [
            (&b"abc"[..], "abc"),
            ("é".as_bytes(), "é"),
            (b"a\xc3", "a"),
            (b"\xff", ""),
            (b"", ""),
        ] {
            assert_eq!(whole_characters(bytes), text);
        }
    }
}
