//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use engine::RequestOutcome;
use serde::Serialize;
use serde_json::{Map, Value};
use text::messages::MESSAGES_MAX;

use super::logprobs::{self, ChatLogprobs};
use super::options::Options;
use super::{Meta, finish_reason, ignored_header, json, name_ignored};
use crate::errors::{ApiError, excerpt};
use crate::fields::{Fields, Unsupported, unless};
use crate::generation::{Generation, Piece};
use crate::sse::{self, Dialect, Frames};
use crate::{App, body};

const OBJECT: &str = "chat.completion";
const CHUNK: &str = "chat.completion.chunk";

/// Fields that change the answer and are not implemented, beside the shared ones.
const UNSUPPORTED: &[Unsupported] = &[
    unless("modalities", r#"[["text"]]"#),
    unless("audio", "[]"),
    unless("web_search_options", "[]"),
    unless("reasoning_effort", r#"["medium"]"#),
    unless("verbosity", r#"["medium"]"#),
    unless("documents", "[[]]"),
    unless("mm_processor_kwargs", "[{}]"),
    unless("echo", "[false]"),
    unless("add_generation_prompt", "[true]"),
    unless("continue_final_message", "[false]"),
];

/// Offers of calls, each with the field that may decline it.
const OFFERS: &[([Unsupported; 1], &str, [Unsupported; 1])] = &[
    (
        [unless("tools", "[[]]")],
        "tool_choice",
        [unless("tool_choice", r#"["none", "auto"]"#)],
    ),
    (
        [unless("functions", "[[]]")],
        "function_call",
        [unless("function_call", r#"["none", "auto"]"#)],
    ),
];

/// Roles of a message.
const ROLES: &[&str] = &[
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
];
/// Types of a content part that is text.
const TEXT_PARTS: &[&str] = &["text", "input_text", "output_text", "refusal"];

/// Answers a conversation.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    app.refuse_late()?;
    let (head, body) = request.into_parts();
    let limits = &app.config.limits;
    let mut object = body::read_object(
        &head.headers,
        body,
        limits.chat_body_bytes,
        &app.bodies,
        limits,
    )
    .await?;
    let messages = object.remove("messages").unwrap_or_default();
    let fields = Fields::new(&object);
    let model = app.check_model(&fields)?;
    fields.refuse(UNSUPPORTED)?;
    for (offer, choice, choices) in OFFERS {
        // What is offered and declined changes nothing; it is named as ignored.
        if fields.string(choice).ok().flatten() != Some("none") {
            fields.refuse(offer)?;
        }
        fields.refuse(choices)?;
    }
    let options = Options::read(
        &fields,
        &app.engine,
        &["max_completion_tokens", "max_tokens"],
        None,
    )?;
    let arguments = template_arguments(&fields)?;
    let splits_reasoning = splits_reasoning(&fields)?;
    let logprobs = logprobs::read_chat(&fields)?;
    check_messages(&messages, &app)?;
    let ignored = ignored_header(&fields);
    let bytes = text_bytes(&messages) + arguments.values().map(text_bytes).sum::<usize>();
    let context = app.engine.info().context;
    let prompt = app
        .text_work(bytes, move |text| {
            text.encode_chat_within(&messages, None, true, &arguments, context)
        })
        .await?;
    let request = engine::Request {
        splits_reasoning,
        shows_reasoning_marks: !splits_reasoning,
        logprobs,
        ..options.request(prompt)
    };
    let generation = Generation::start(&app, request)?;
    let meta = Meta::new(&app, model, "chatcmpl", options.sampling.seed);
    let response = if options.stream {
        sse::respond(
            generation,
            Stream {
                meta,
                include_usage: options.include_usage,
                has_logprobs: logprobs.is_some(),
            },
        )
    } else {
        let (Piece { said, judged }, outcome) = generation.collect().await?;
        let choice = Choice {
            index: 0,
            message: Message {
                role: "assistant",
                content: &said.answer,
                reasoning_content: some(&said.reasoning),
                refusal: None,
            },
            logprobs: logprobs.map(|_| ChatLogprobs::new(&judged, meta.tokenizer())),
            finish_reason: finish_reason(&outcome.finish),
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

/// Bytes of all strings in `value`.
fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(list) => list.iter().map(text_bytes).sum(),
        Value::Object(map) => map.values().map(text_bytes).sum(),
        _ => 0,
    }
}

/// Arguments for the chat template. A template itself is a program and is
/// refused, wherever it stands.
fn template_arguments(fields: &Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let refused = |at: &str| {
        let message = "is refused: a chat template is a program, and only the model's own runs";
        Err(fields.error(at, message))
    };
    if fields.get("chat_template").is_some() {
        return refused("chat_template");
    }
    let arguments = fields.object("chat_template_kwargs")?;
    if arguments.is_some_and(|map| map.contains_key("chat_template")) {
        return refused("chat_template_kwargs.chat_template");
    }
    Ok(arguments.cloned().unwrap_or_default())
}

/// Whether reasoning comes apart from the answer, under llama-server's name for it.
fn splits_reasoning(fields: &Fields<'_>) -> Result<bool, ApiError> {
    const NAME: &str = "reasoning_format";
    match fields.string(NAME)? {
        None | Some("auto" | "deepseek") => Ok(true),
        Some("none") => Ok(false),
        Some(_) => Err(fields.error(NAME, "must be one of auto, deepseek, none")),
    }
}

/// Nothing, rather than nothing written.
fn some(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
}

/// Checks the shape of a conversation, so that an error names the place, and
/// that nothing in it would be dropped on the way to the model.
fn check_messages(messages: &Value, app: &App) -> Result<(), ApiError> {
    let list = match messages {
        Value::Null => return Err(ApiError::field("messages", "is missing")),
        Value::Array(list) => list,
        _ => return Err(ApiError::field("messages", "must be a list")),
    };
    if list.is_empty() {
        return Err(ApiError::field("messages", "is empty"));
    }
    if list.len() > MESSAGES_MAX {
        let message = format!("has {} messages, {MESSAGES_MAX} at most", list.len());
        return Err(ApiError::field("messages", message));
    }
    list.iter()
        .enumerate()
        .try_for_each(|(i, message)| check_message(i, message, app))
}

fn check_message(i: usize, message: &Value, app: &App) -> Result<(), ApiError> {
    let at = |rest: &str| format!("messages[{i}]{rest}");
    let Some(message) = message.as_object() else {
        return Err(ApiError::field(at(""), "must be an object"));
    };
    let role = match message.get("role") {
        None => return Err(ApiError::field(at(".role"), "is missing")),
        Some(role) => role.as_str().filter(|role| ROLES.contains(role)),
    };
    let Some(role) = role else {
        return Err(ApiError::field(
            at(".role"),
            format!("must be one of {}", ROLES.join(", ")),
        ));
    };
    let asks = |name: &str| {
        message
            .get(name)
            .is_some_and(|value| !value.is_null() && value != &Value::Array(vec![]))
    };
    let knows_tool_calls = || {
        app.engine
            .text()
            .template
            .as_ref()
            .is_none_or(|t| t.source().contains("tool_calls"))
    };
    for name in ["tool_calls", "function_call"] {
        if asks(name) && !knows_tool_calls() {
            return Err(ApiError::field(
                at(&format!(".{name}")),
                "is unknown to this model's chat template",
            ));
        }
    }
    if asks("audio") {
        return Err(ApiError::unsupported(at(".audio"), ""));
    }
    match message.get("content") {
        Some(Value::String(_)) => Ok(()),
        Some(Value::Array(parts)) => parts
            .iter()
            .enumerate()
            .try_for_each(|(j, part)| check_part(i, j, part)),
        // Clients send these back after a turn of tool calls or an aborted one.
        None | Some(Value::Null) if role == "assistant" => Ok(()),
        None | Some(Value::Null) => Err(ApiError::field(at(".content"), "is missing")),
        Some(_) => Err(ApiError::field(
            at(".content"),
            "must be a string or a list of parts",
        )),
    }
}

fn check_part(i: usize, j: usize, part: &Value) -> Result<(), ApiError> {
    let at = |rest: &str| format!("messages[{i}].content[{j}]{rest}");
    if part.is_string() {
        return Ok(());
    }
    let Some(part) = part.as_object() else {
        return Err(ApiError::field(at(""), "must be an object"));
    };
    let kind = match part.get("type") {
        Some(Value::String(kind)) => kind.as_str(),
        None => "text",
        Some(_) => return Err(ApiError::field(at(".type"), "must be a string")),
    };
    if !TEXT_PARTS.contains(&kind) {
        return Err(ApiError::unsupported(
            at(""),
            &format!(
                " (it is of type `{}`, and only text is read)",
                excerpt(kind)
            ),
        ));
    }
    // A refusal carries its words under its own name.
    let text = part.get("text").or_else(|| part.get(kind));
    match text {
        Some(Value::String(_)) => Ok(()),
        _ => Err(ApiError::field(at(".text"), "must be a string")),
    }
}

#[derive(Serialize)]
struct Choice<'a> {
    index: u32,
    message: Message<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: &'static str,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    refusal: Option<()>,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: u32,
    delta: Delta<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
}

/// A streamed answer.
struct Stream {
    meta: Meta,
    include_usage: bool,
    has_logprobs: bool,
}

impl Stream {
    fn chunk(
        &self,
        delta: Delta<'_>,
        logprobs: Option<ChatLogprobs<'_>>,
        seed: Option<u64>,
        finish: Option<&RequestOutcome>,
        frames: &mut Frames,
    ) {
        let finish_reason = finish.map(|outcome| finish_reason(&outcome.finish));
        let choices = [ChunkChoice {
            index: 0,
            delta,
            logprobs,
            finish_reason,
        }];
        let mut chunk = self.meta.envelope(CHUNK, &choices);
        chunk.seed = seed;
        if self.include_usage {
            chunk.usage = Some(None);
        } else if let Some(outcome) = finish {
            chunk = chunk.with_record(self.meta.seed, outcome);
        }
        frames.data(&chunk);
    }
}

impl Dialect for Stream {
    fn open(&mut self, frames: &mut Frames) {
        let delta = Delta {
            role: Some("assistant"),
            content: Some(""),
            reasoning_content: None,
        };
        self.chunk(delta, None, Some(self.meta.seed), None, frames);
    }

    fn text(&mut self, piece: &Piece, frames: &mut Frames) {
        let Piece { said, judged } = piece;
        let (reasoning, answer) = ChatLogprobs::new(judged, self.meta.tokenizer()).apart();
        // Clients show one of the two at a time, so they come in chunks of their own.
        if !said.reasoning.is_empty() || !reasoning.is_empty() {
            let delta = Delta {
                reasoning_content: some(&said.reasoning),
                ..Delta::default()
            };
            let logprobs = self.has_logprobs.then_some(reasoning);
            self.chunk(delta, logprobs, None, None, frames);
        }
        if !said.answer.is_empty() || !answer.is_empty() {
            let delta = Delta {
                content: some(&said.answer),
                ..Delta::default()
            };
            let logprobs = self.has_logprobs.then_some(answer);
            self.chunk(delta, logprobs, None, None, frames);
        }
    }

    fn end(&mut self, outcome: &RequestOutcome, frames: &mut Frames) {
        self.chunk(Delta::default(), None, None, Some(outcome), frames);
        if self.include_usage {
            let nothing: [ChunkChoice<'_>; 0] = [];
            let last = self.meta.envelope(CHUNK, &nothing);
            frames.data(
                &last
                    .with_usage(outcome)
                    .with_record(self.meta.seed, outcome),
            );
        }
        frames.raw("[DONE]");
    }
}
