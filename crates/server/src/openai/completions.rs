//! `POST /v1/completions`: a prompt as text or as token ids, no template.

use std::sync::Arc;

use axum::http::HeaderMap;
use engine::{Channel, RequestOutcome};
use serde::Serialize;
use serde_json::{Map, Value};

use super::logprobs::{self, CompletionLogprobs};
use super::{Meta, StreamUsage, Tally, bytes, finish_reason, structured, tables};
use crate::App;
use crate::dialect::Endpoint;
use crate::errors::ApiError;
use crate::fields::{Fields, ignored_header};
use crate::generation::Piece;
use crate::limits::Limits;
use crate::options::Options;
use crate::request::{Asked, Prompt};
use crate::sse::{Frames, StreamFormat};

const OBJECT: &str = "text_completion";

/// OpenAI's default for `max_tokens` of this endpoint.
const MAX_TOKENS: usize = 16;

/// A continuation of a prompt, whole or as a stream.
pub(crate) struct Completion {
    meta: Meta,
    tally: Tally,
    has_logprobs: bool,
    /// Characters sent, as far as tokens tell.
    offset: usize,
}

impl Endpoint for Completion {
    fn body_bytes(limits: &Limits) -> usize {
        limits.body_bytes
    }

    fn read(
        mut object: Map<String, Value>,
        _headers: &HeaderMap,
        app: &Arc<App>,
    ) -> Result<(Asked, Self), ApiError> {
        let prompt = object.remove("prompt").unwrap_or_default();
        let fields = Fields::new(&object, tables::FIELDS);
        let model = app.check_model(&fields)?;
        fields.refuse(tables::REFUSED_BY_COMPLETIONS)?;
        fields.refuse(tables::REFUSED)?;
        let mut options = Options::read(&fields, &app.engine, &super::NAMES, Some(MAX_TOKENS))?;
        let usage = StreamUsage::read(&fields, options.stream)?;
        options.logprobs = logprobs::read_completion(&fields)?;
        options.grammar = structured::read(&fields)?;
        let ignored = ignored_header(&fields);
        let completion = Completion {
            meta: Meta::new(app, model, "cmpl", options.sampling.seed),
            tally: Tally::new(usage),
            has_logprobs: options.logprobs.is_some(),
            offset: 0,
        };
        let asked = Asked {
            prompt: prompt_of(prompt)?,
            options,
            ignored,
        };
        Ok((asked, completion))
    }

    fn begin(&mut self, prompt_tokens: usize) {
        self.tally.prompt_tokens = prompt_tokens;
    }

    fn document(&self, whole: &Piece, outcome: &RequestOutcome) -> Vec<u8> {
        let logprobs = || CompletionLogprobs::new(whole, self.meta.tokenizer(), &mut 0);
        let choice = Choice {
            index: 0,
            text: &whole.text(Channel::Answer),
            logprobs: self.has_logprobs.then(logprobs),
            finish_reason: Some(finish_reason(&outcome.finish)),
        };
        bytes(
            &self
                .meta
                .envelope(OBJECT, &[choice])
                .with_usage(outcome)
                .with_record(self.meta.seed, outcome),
        )
    }
}

/// A string, a list of token ids, or a list of one of these.
fn prompt_of(prompt: Value) -> Result<Prompt, ApiError> {
    const NAME: &str = "prompt";
    let wrong = || ApiError::field(NAME, "must be a string or a list of token ids");
    let list = match prompt {
        Value::Null => return Err(ApiError::field(NAME, "is missing")),
        Value::String(text) if text.is_empty() => return Err(ApiError::field(NAME, "is empty")),
        Value::String(text) => return Ok(Prompt::Text(text)),
        Value::Array(list) => list,
        _ => return Err(wrong()),
    };
    match <[Value; 1]>::try_from(list) {
        Ok([Value::String(text)]) => prompt_of(Value::String(text)),
        Ok([Value::Array(inner)]) if inner.iter().all(Value::is_number) => {
            prompt_of(Value::Array(inner))
        }
        Ok([one]) => tokens(&[one]).ok_or_else(wrong),
        Err(list) if list.iter().any(|item| item.is_string() || item.is_array()) => {
            Err(ApiError::many_prompts(list.len()))
        }
        Err(list) => tokens(&list).ok_or_else(wrong),
    }
}

fn tokens(list: &[Value]) -> Option<Prompt> {
    let ids = list.iter().map(|id| u32::try_from(id.as_u64()?).ok());
    ids.collect::<Option<_>>().map(Prompt::Tokens)
}

#[derive(Serialize)]
struct Choice<'a> {
    index: u32,
    text: &'a str,
    logprobs: Option<CompletionLogprobs<'a>>,
    finish_reason: Option<&'static str>,
}

impl Completion {
    fn chunk(
        &self,
        text: &str,
        logprobs: Option<CompletionLogprobs<'_>>,
        finish: Option<&RequestOutcome>,
        frames: &mut Frames,
    ) {
        let finish_reason = finish.map(|outcome| finish_reason(&outcome.finish));
        let choices = [Choice {
            index: 0,
            text,
            logprobs,
            finish_reason,
        }];
        let mut chunk = self.meta.envelope(OBJECT, &choices);
        chunk.usage = self.tally.of_chunk(finish);
        if let Some(outcome) = finish.filter(|_| !self.tally.asked.at_end) {
            chunk = chunk.with_record(self.meta.seed, outcome);
        }
        frames.data(&chunk);
    }
}

impl StreamFormat for Completion {
    /// The format has no chunk without text; the headers are the sign of life.
    fn open(&mut self, _frames: &mut Frames) {}

    fn text(&mut self, piece: &Piece, frames: &mut Frames) {
        self.tally.completion_tokens += piece.n_tokens;
        let mut offset = self.offset;
        let whole = || CompletionLogprobs::new(piece, self.meta.tokenizer(), &mut offset);
        let logprobs = self.has_logprobs.then(whole);
        self.chunk(&piece.text(Channel::Answer), logprobs, None, frames);
        self.offset = offset;
    }

    fn end(&mut self, outcome: &RequestOutcome, frames: &mut Frames) {
        self.chunk("", None, Some(outcome), frames);
        if self.tally.asked.at_end {
            let nothing: [Choice<'_>; 0] = [];
            let last = self.meta.envelope(OBJECT, &nothing);
            frames.data(
                &last
                    .with_usage(outcome)
                    .with_record(self.meta.seed, outcome),
            );
        }
        frames.raw("[DONE]");
    }

    fn fail(&mut self, error: &ApiError, frames: &mut Frames) {
        frames.raw(&super::error(error));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_prompt_is_text_or_tokens_and_only_one() {
        let text = |text: &str| Some(Prompt::Text(text.into()));
        for (value, prompt) in [
            (json!("a"), text("a")),
            (json!(["a"]), text("a")),
            (json!([1, 2]), Some(Prompt::Tokens(vec![1, 2]))),
            (json!([[1, 2]]), Some(Prompt::Tokens(vec![1, 2]))),
            (json!([[7]]), Some(Prompt::Tokens(vec![7]))),
            (json!([7]), Some(Prompt::Tokens(vec![7]))),
            (json!([]), Some(Prompt::Tokens(vec![]))),
            (json!(null), None),
            (json!(""), None),
            (json!([""]), None),
            (json!(1), None),
            (json!({}), None),
            (json!(["a", "b"]), None),
            (json!([[1], [2]]), None),
            (json!([1, "a"]), None),
            (json!([1.5, 2]), None),
            (json!([-1, 2]), None),
            (json!([4294967296_u64]), None),
            (json!([true]), None),
            (json!([[["a"]]]), None),
        ] {
            assert_eq!(prompt_of(value.clone()).ok(), prompt, "{value}");
        }
    }
}
