//! `POST /v1/completions`: a prompt as text or as token ids, no template.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use engine::{Channel, RequestOutcome};
use serde::Serialize;
use serde_json::Value;

use super::logprobs::{self, CompletionLogprobs};
use super::options::Options;
use super::tables;
use super::{Meta, Tally, finish_reason, ignored_header, json, name_ignored};
use crate::App;
use crate::errors::ApiError;
use crate::fields::Fields;
use crate::generation::{Generation, Piece};
use crate::sse::{self, Dialect, Frames};

const OBJECT: &str = "text_completion";

/// OpenAI's default for `max_tokens` of this endpoint.
const MAX_TOKENS: usize = 16;

/// A prompt as it was sent.
#[derive(Debug, PartialEq, Eq)]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// Continues a prompt.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    app.refuse_late()?;
    let (head, body) = request.into_parts();
    let limits = &app.config.limits;
    let (mut object, worker) = app
        .read_object(&head.headers, body, limits.body_bytes)
        .await?;
    let prompt = object.remove("prompt").unwrap_or_default();
    let fields = Fields::new(&object);
    let model = app.check_model(&fields)?;
    fields.refuse(tables::REFUSED_BY_COMPLETIONS)?;
    let options = Options::read(&fields, &app.engine, &["max_tokens"], Some(MAX_TOKENS))?;
    let logprobs = logprobs::read_completion(&fields)?;
    let ignored = ignored_header(&fields);
    drop(object);
    let prompt = match prompt_of(prompt)? {
        Prompt::Text(prompt) => {
            let context = app.engine.info().context;
            app.text_work(worker, move |text| {
                text.encode_prompt_within(&prompt, context)
            })
            .await?
        }
        Prompt::Tokens(prompt) => {
            drop(worker);
            prompt
        }
    };
    let n_prompt = prompt.len();
    let request = engine::Request {
        logprobs,
        ..options.request(prompt)
    };
    let generation = Generation::start(&app, &head.extensions, request)?;
    let meta = Meta::new(&app, model, "cmpl", options.sampling.seed);
    let response = if options.stream {
        sse::respond(
            generation,
            Stream {
                meta,
                tally: Tally::new(options.usage, n_prompt),
                has_logprobs: logprobs.is_some(),
                offset: 0,
            },
        )
    } else {
        let (whole, outcome) = generation.collect().await?;
        let choice = Choice {
            index: 0,
            text: &whole.text(Channel::Answer),
            logprobs: logprobs.map(|_| CompletionLogprobs::new(&whole, meta.tokenizer(), &mut 0)),
            finish_reason: Some(finish_reason(&outcome.finish)),
        };
        json(
            &meta
                .envelope(OBJECT, &[choice])
                .with_usage(&outcome)
                .with_record(meta.seed, &outcome),
        )
    };
    Ok(name_ignored(response, ignored))
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

/// A streamed continuation.
struct Stream {
    meta: Meta,
    tally: Tally,
    has_logprobs: bool,
    /// Characters sent, as far as tokens tell.
    offset: usize,
}

impl Stream {
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

impl Dialect for Stream {
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
