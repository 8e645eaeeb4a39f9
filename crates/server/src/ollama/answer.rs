//! `POST /api/chat` and `POST /api/generate`: the answer, whole and as a stream.
//!
//! ```text
//! {…, "message": {"thinking": "…"}, "done": false}     reasoning, then the answer
//! {…, "message": {"tool_calls": […]}, "done": false}   each call once it is whole
//! {…, "done": true, "done_reason": "stop", …}          why it ended, counts, times, the record
//! ```
//!
//! `generate` has `response` and `thinking` where `chat` has a message.

use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderMap;
use engine::{CallEnd, Channel, FinishReason, RequestOutcome, Speculation};
use serde::Serialize;
use serde_json::{Map, Value};
use text::strftime;

use super::{error, keep_alive, model_name, request, tagged};
use crate::app::App;
use crate::dialect::{Answer, Endpoint};
use crate::errors::ApiError;
use crate::generation::{Piece, Progress};
use crate::ids;
use crate::limits::Limits;
use crate::openai;
use crate::registry::{Keep, Status};
use crate::request::Asked;
use crate::server::Server;
use crate::sse::{Frames, StreamFormat};

/// An answer to a conversation.
pub(crate) type Chat = Reply<true>;
/// An answer to a prompt.
pub(crate) type Generate = Reply<false>;

/// An answer, whole or as a stream.
pub(crate) struct Reply<const IS_CHAT: bool> {
    /// The model's name in the answer.
    model: String,
    seed: u64,
    /// The call of a stream that is being written.
    open: Option<Call>,
}

/// A call of a tool.
#[derive(Serialize)]
struct Call {
    id: String,
    function: Function,
}

/// What is called.
#[derive(Serialize)]
struct Function {
    /// The number of the call in the answer.
    index: usize,
    name: String,
    /// The arguments: an object, or its text so far while it is written.
    arguments: Value,
}

impl Call {
    fn new(index: usize, id: &str, name: &str, arguments: &str) -> Self {
        Call {
            id: id.to_owned(),
            function: Function {
                index,
                name: name.to_owned(),
                arguments: Value::String(arguments.to_owned()),
            },
        }
    }

    /// The call with its arguments as an object.
    fn whole(mut self) -> Self {
        let arguments = self.function.arguments.as_str();
        if let Some(object) = arguments.and_then(|text| serde_json::from_str(text).ok()) {
            self.function.arguments = object;
        }
        self
    }
}

/// What is said in a document.
#[derive(Default)]
struct Said<'a> {
    content: &'a str,
    thinking: &'a str,
    calls: Vec<Call>,
}

/// A whole answer, or a line of a stream.
#[derive(Serialize)]
struct Document<'a> {
    model: &'a str,
    created_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<Message<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response: Option<&'a str>,
    #[serde(skip_serializing_if = "str::is_empty")]
    thinking: &'a str,
    done: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    done_reason: Option<&'static str>,
    #[serde(flatten)]
    record: Option<Record<'a>>,
}

/// The message of a chat.
#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    thinking: &'a str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call>,
}

/// Counts, times in nanoseconds, and what paceline says beside Ollama's fields.
#[derive(Serialize)]
struct Record<'a> {
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: usize,
    prompt_eval_duration: u64,
    eval_count: usize,
    eval_duration: u64,
    /// The seed that reproduces the text.
    seed: u64,
    speculation: &'a Speculation,
}

impl<'a> Record<'a> {
    fn new(outcome: &'a RequestOutcome, seed: u64) -> Self {
        let times = outcome.timings;
        let nanos = |ms: f64| (ms * 1e6) as u64;
        Record {
            total_duration: nanos(times.queued_ms + times.prefill_ms + times.decode_ms),
            load_duration: 0,
            prompt_eval_count: outcome.usage.prompt_tokens,
            prompt_eval_duration: nanos(times.prefill_ms),
            eval_count: outcome.usage.completion_tokens,
            eval_duration: nanos(times.decode_ms),
            seed,
            speculation: &outcome.speculation,
        }
    }
}

/// A document of `model` that says so much and no more.
fn document<'a, const IS_CHAT: bool>(model: &'a str, said: Said<'a>) -> Document<'a> {
    let seconds = i64::try_from(ids::unix_seconds()).unwrap_or_default();
    let Said {
        content,
        thinking,
        calls,
    } = said;
    Document {
        model,
        created_at: strftime("%Y-%m-%dT%H:%M:%SZ", seconds),
        message: IS_CHAT.then_some(Message {
            role: "assistant",
            content,
            thinking,
            tool_calls: calls,
        }),
        response: (!IS_CHAT).then_some(content),
        thinking: if IS_CHAT { "" } else { thinking },
        done: false,
        done_reason: None,
        record: None,
    }
}

/// Ollama's word for the end of a text.
fn done_reason(finish: &FinishReason) -> &'static str {
    match finish {
        FinishReason::Length => "length",
        FinishReason::Stop
        | FinishReason::StopString(_)
        | FinishReason::ToolCalls
        | FinishReason::Cancelled => "stop",
    }
}

/// Whether a request asks for no text, but for the model to be loaded or unloaded.
fn asks_nothing<const IS_CHAT: bool>(object: &Map<String, Value>) -> bool {
    match object.get(if IS_CHAT { "messages" } else { "prompt" }) {
        None | Some(Value::Null) => true,
        Some(Value::String(prompt)) => prompt.is_empty(),
        Some(Value::Array(messages)) => messages.is_empty(),
        Some(_) => false,
    }
}

/// The answer of `model` to a request that asks for no text.
fn ended_at_once<const IS_CHAT: bool>(model: &str, reason: &'static str) -> Vec<u8> {
    openai::bytes(&Document {
        done: true,
        done_reason: Some(reason),
        ..document::<IS_CHAT>(model, Said::default())
    })
}

impl<const IS_CHAT: bool> Reply<IS_CHAT> {
    fn line(&self, said: Said<'_>, frames: &mut Frames) {
        frames.line(&document::<IS_CHAT>(&self.model, said));
    }

    /// The document of the end, with what is `said` in it.
    fn ended<'a>(&'a self, said: Said<'a>, outcome: &'a RequestOutcome) -> Document<'a> {
        Document {
            done: true,
            done_reason: Some(done_reason(&outcome.finish)),
            record: Some(Record::new(outcome, self.seed)),
            ..document::<IS_CHAT>(&self.model, said)
        }
    }
}

impl<const IS_CHAT: bool> Endpoint for Reply<IS_CHAT> {
    fn body_bytes(limits: &Limits) -> usize {
        limits.chat_body_bytes
    }

    const STREAMS: bool = true;

    fn keep(object: &Map<String, Value>) -> Result<Keep, ApiError> {
        keep_alive(object)
    }

    fn unload(
        object: &Map<String, Value>,
        server: &Server,
        model: usize,
    ) -> Result<Option<Vec<u8>>, ApiError> {
        let is_over = keep_alive(object)? == Keep::For(Duration::ZERO);
        let entry = &server.registry.entries[model];
        let unloads = is_over && asks_nothing::<IS_CHAT>(object) && entry.may_leave();
        Ok(unloads.then(|| ended_at_once::<IS_CHAT>(&tagged(&entry.names[0]), "unload")))
    }

    fn at_once(object: &Map<String, Value>, app: &App) -> Result<Option<Vec<u8>>, ApiError> {
        if !asks_nothing::<IS_CHAT>(object) {
            return Ok(None);
        }
        let model = model_name(app, object.get("model").and_then(Value::as_str))?;
        Ok(Some(ended_at_once::<IS_CHAT>(&model, "load")))
    }

    fn read(
        object: Map<String, Value>,
        _: &HeaderMap,
        app: &Arc<App>,
    ) -> Result<(Asked, Self), ApiError> {
        let (asked, model) = request::read(object, app, IS_CHAT)?;
        let reply = Reply {
            model,
            seed: asked.options.sampling.seed,
            open: None,
        };
        Ok((asked, reply))
    }

    fn begin(&mut self, _prompt_tokens: usize) {}

    fn document(&self, answers: &[Answer]) -> Vec<u8> {
        let Answer { whole, outcome } = &answers[0];
        let calls = whole.calls();
        let calls = calls.iter().enumerate();
        let calls = calls.map(|(i, c)| Call::new(i, c.id, c.name, &c.arguments).whole());
        let said = Said {
            content: &whole.text(Channel::Answer),
            thinking: &whole.text(Channel::Reasoning),
            calls: calls.collect(),
        };
        openai::bytes(&self.ended(said, outcome))
    }
}

impl<const IS_CHAT: bool> StreamFormat for Reply<IS_CHAT> {
    const CONTENT_TYPE: &str = "application/x-ndjson";

    /// A line before the text would be one without a word; the headers are the sign of life.
    fn open(&mut self, _frames: &mut Frames) {}

    fn text(&mut self, piece: &Piece, frames: &mut Frames) {
        let thinking = &*piece.text(Channel::Reasoning);
        if !thinking.is_empty() {
            let said = Said {
                thinking,
                ..Said::default()
            };
            self.line(said, frames);
        }
        let content = &*piece.text(Channel::Answer);
        if !content.is_empty() {
            let said = Said {
                content,
                ..Said::default()
            };
            self.line(said, frames);
        }
        for (part, arguments) in piece.call_parts() {
            if let Some(begin) = &part.begin {
                self.open = Some(Call::new(part.index, &begin.id, &begin.name, ""));
            }
            if let Some(Value::String(text)) =
                self.open.as_mut().map(|call| &mut call.function.arguments)
            {
                text.push_str(arguments);
            }
            // What a broken call has written follows as text.
            let ended = part.end.and_then(|end| Some((end, self.open.take()?)));
            if let Some((CallEnd::Whole, call)) = ended {
                let said = Said {
                    calls: vec![call.whole()],
                    ..Said::default()
                };
                self.line(said, frames);
            }
        }
    }

    /// Clients read every line as JSON, so the sign of life is a line that says nothing.
    fn quiet(&mut self, _: Progress, frames: &mut Frames) {
        self.line(Said::default(), frames);
    }

    fn end(&mut self, outcome: &RequestOutcome, frames: &mut Frames) {
        frames.line(&self.ended(Said::default(), outcome));
    }

    fn refuse(failure: &ApiError, frames: &mut Frames) {
        frames.line(&error(failure));
    }

    /// A line that says nothing, as [`quiet`](StreamFormat::quiet) writes it.
    fn waits(model: &str, _: &Status, frames: &mut Frames) {
        frames.line(&document::<IS_CHAT>(&tagged(model), Said::default()));
    }
}
