//! Log-probabilities, as the two endpoints spell them.
//!
//! Each token's own string is the characters that it completes, so that the strings of an
//! answer make up its text; the likeliest tokens beside it are spelled each by itself. The
//! bytes are always a token's own.

use std::borrow::Cow;

use engine::{Channel, Logprobs, MAX_TOP_LOGPROBS, WrittenToken};
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use serde_json::Value;
use text::Tokenizer;

use crate::errors::ApiError;
use crate::fields::Fields;
use crate::generation::Piece;

/// What OpenAI says of a token that is next to impossible; JSON has no infinity.
const LEAST: f32 = -9999.0;

pub(super) const MOST: i64 = MAX_TOP_LOGPROBS as i64;

/// Chat's fields: how many of the likeliest tokens come beside each, if any do.
pub(super) fn read_chat(fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    const TOP: &str = "top_logprobs";
    let is_on = fields.bool("logprobs")?.unwrap_or(false);
    let top = fields.integer(TOP, 0..=MOST)?.unwrap_or(0);
    if top > 0 && !is_on {
        return Err(fields.error(TOP, "needs `logprobs: true`"));
    }
    Ok(is_on.then_some(top as usize))
}

/// Plain completion's field.
pub(super) fn read_completion(fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    const NAME: &str = "logprobs";
    if fields.get(NAME) == Some(&Value::Bool(false)) {
        return Ok(None);
    }
    let top = fields.integer(NAME, 0..=MOST)?;
    Ok(top.map(|top| top as usize))
}

/// Chat's form.
#[derive(Default, Serialize)]
pub(super) struct ChatLogprobs<'a> {
    content: Vec<Entry<'a>>,
    refusal: Option<()>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    reasoning_content: Vec<Entry<'a>>,
}

impl<'a> ChatLogprobs<'a> {
    pub(super) fn new(piece: &'a Piece, tokenizer: &'a Tokenizer) -> Self {
        let entries = |channel| {
            let part = piece.judged().filter(|(of, ..)| *of == channel);
            part.map(|(_, token, logprobs)| Entry::new(token, logprobs, tokenizer))
                .collect()
        };
        ChatLogprobs {
            content: entries(Channel::Answer),
            refusal: None,
            reasoning_content: entries(Channel::Reasoning),
        }
    }

    /// The log-probabilities of the reasoning, and those of the answer.
    pub(super) fn apart(self) -> (Self, Self) {
        let answer = ChatLogprobs {
            content: self.content,
            ..ChatLogprobs::default()
        };
        let reasoning = ChatLogprobs {
            reasoning_content: self.reasoning_content,
            ..ChatLogprobs::default()
        };
        (reasoning, answer)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.content.is_empty() && self.reasoning_content.is_empty()
    }
}

/// The log-probability of one token, and of the likeliest beside it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Entry<'a> {
    #[serde(flatten)]
    own: Likely<'a>,
    top_logprobs: Vec<Likely<'a>>,
}

#[derive(Clone, Debug, Serialize)]
struct Likely<'a> {
    token: Cow<'a, str>,
    logprob: f32,
    bytes: Cow<'a, [u8]>,
}

impl Likely<'_> {
    fn into_owned(self) -> Likely<'static> {
        Likely {
            token: Cow::Owned(self.token.into_owned()),
            logprob: self.logprob,
            bytes: Cow::Owned(self.bytes.into_owned()),
        }
    }
}

impl<'a> Entry<'a> {
    pub(super) fn new(
        token: &'a WrittenToken,
        logprobs: &'a Logprobs,
        tokenizer: &'a Tokenizer,
    ) -> Self {
        let likely = |&(id, logprob): &(u32, f32)| Likely {
            token: spelled(id, tokenizer),
            logprob: finite(logprob),
            bytes: Cow::Borrowed(tokenizer.token_bytes(id)),
        };
        Entry {
            own: Likely {
                token: Cow::Borrowed(&token.text),
                logprob: finite(logprobs.logprob),
                bytes: Cow::Borrowed(tokenizer.token_bytes(token.id)),
            },
            top_logprobs: logprobs.top.iter().map(likely).collect(),
        }
    }

    /// An entry that owns its texts, for an answer that is put together piece by piece.
    pub(super) fn into_owned(self) -> Entry<'static> {
        let top = self.top_logprobs.into_iter().map(Likely::into_owned);
        Entry {
            own: self.own.into_owned(),
            top_logprobs: top.collect(),
        }
    }
}

/// Plain completion's form: lists with an item a token.
#[derive(Serialize)]
pub(super) struct CompletionLogprobs<'a> {
    tokens: Vec<&'a str>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<Top<'a>>,
    /// Characters of the text before each token.
    text_offset: Vec<usize>,
}

impl<'a> CompletionLogprobs<'a> {
    /// `offset` is the first token's, and then that of the one after the last.
    pub(super) fn new(piece: &'a Piece, tokenizer: &'a Tokenizer, offset: &mut usize) -> Self {
        let at = piece.judged().map(|(_, token, _)| {
            let at = *offset;
            *offset += token.text.chars().count();
            at
        });
        let text_offset = at.collect();
        let top = |(_, token, logprobs)| Top::new(token, logprobs, tokenizer);
        CompletionLogprobs {
            text_offset,
            tokens: piece.judged().map(|(_, t, _)| t.text.as_str()).collect(),
            token_logprobs: piece.judged().map(|(.., l)| finite(l.logprob)).collect(),
            top_logprobs: piece.judged().map(top).collect(),
        }
    }
}

/// The likeliest tokens by what they are spelled, and the chosen one if it is not among
/// them. Of tokens that are spelled alike the likeliest stands for all.
struct Top<'a>(Vec<(Cow<'a, str>, f32)>);

impl<'a> Top<'a> {
    fn new(token: &WrittenToken, logprobs: &Logprobs, tokenizer: &'a Tokenizer) -> Self {
        let own = (token.id, logprobs.logprob);
        let mut all: Vec<(Cow<'a, str>, f32)> = Vec::new();
        for &(id, logprob) in logprobs.top.iter().chain([&own]) {
            let spelled = spelled(id, tokenizer);
            if all.iter().all(|(other, _)| *other != spelled) {
                all.push((spelled, finite(logprob)));
            }
        }
        Top(all)
    }
}

impl Serialize for Top<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (token, logprob) in &self.0 {
            map.serialize_entry(token, logprob)?;
        }
        map.end()
    }
}

fn spelled(id: u32, tokenizer: &Tokenizer) -> Cow<'_, str> {
    String::from_utf8_lossy(tokenizer.token_bytes(id))
}

fn finite(logprob: f32) -> f32 {
    logprob.max(LEAST)
}
