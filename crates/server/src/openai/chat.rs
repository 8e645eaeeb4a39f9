//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use engine::{Channel, RequestOutcome};
use serde::Serialize;
use serde_json::{Map, Value};

use super::logprobs::{self, ChatLogprobs};
use super::options::Options;
use super::tables::{self, Offer};
use super::{Meta, Tally, finish_reason, ignored_header, json, messages, name_ignored};
use crate::App;
use crate::errors::ApiError;
use crate::fields::Fields;
use crate::generation::{Generation, Piece};
use crate::limits::IGNORED_FIELDS_MAX;
use crate::sse::{self, Dialect, Frames};

const OBJECT: &str = "chat.completion";
const CHUNK: &str = "chat.completion.chunk";

/// Answers a conversation.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    app.refuse_late()?;
    let (head, body) = request.into_parts();
    let limits = &app.config.limits;
    let (mut object, worker) = app
        .read_object(&head.headers, body, limits.chat_body_bytes)
        .await?;
    let messages = object.remove("messages").unwrap_or_default();
    let fields = Fields::new(&object);
    let model = app.check_model(&fields)?;
    fields.refuse(tables::REFUSED_BY_CHAT)?;
    for Offer { offer, choice } in tables::OFFERS {
        // What is offered and declined changes nothing; it is named as ignored.
        if fields.string(choice[0].field).ok().flatten() != Some("none") {
            fields.refuse(offer)?;
        }
        fields.refuse(choice)?;
    }
    let options = Options::read(
        &fields,
        &app.engine,
        &["max_completion_tokens", "max_tokens"],
        None,
    )?;
    let arguments = template_arguments(&fields, &app)?;
    let splits_reasoning = splits_reasoning(&fields)?;
    let logprobs = logprobs::read_chat(&fields)?;
    fields.note_ignored(messages::check(&messages, app.engine.text())?);
    let ignored = ignored_header(&fields);
    drop(object);
    let context = app.engine.info().context;
    let prompt = app
        .text_work(worker, move |text| {
            text.encode_chat_within(&messages, None, true, &arguments, context)
        })
        .await?;
    let n_prompt = prompt.len();
    let request = engine::Request {
        splits_reasoning,
        shows_reasoning_marks: !splits_reasoning,
        logprobs,
        ..options.request(prompt)
    };
    let generation = Generation::start(&app, &head.extensions, request)?;
    let meta = Meta::new(&app, model, "chatcmpl", options.sampling.seed);
    let response = if options.stream {
        sse::respond(
            generation,
            Stream {
                meta,
                tally: Tally::new(options.usage, n_prompt),
                has_logprobs: logprobs.is_some(),
            },
        )
    } else {
        let (whole, outcome) = generation.collect().await?;
        let (answer, reasoning) = (whole.text(Channel::Answer), whole.text(Channel::Reasoning));
        let choice = Choice {
            index: 0,
            message: Message {
                role: "assistant",
                content: &answer,
                reasoning_content: some(&reasoning),
                refusal: None,
            },
            logprobs: logprobs.map(|_| ChatLogprobs::new(&whole, meta.tokenizer())),
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

/// Arguments for the chat template; those that it does not use are noted as ignored. A
/// template itself is a program and is refused, wherever it stands.
fn template_arguments(fields: &Fields<'_>, app: &App) -> Result<Map<String, Value>, ApiError> {
    const NAME: &str = "chat_template_kwargs";
    let refused = |at: &str| {
        let message = "is refused: a chat template is a program, and only the model's own runs";
        Err(fields.error(at, message))
    };
    if fields.get(tables::CHAT_TEMPLATE).is_some() {
        return refused(tables::CHAT_TEMPLATE);
    }
    let Some(arguments) = fields.object(NAME)? else {
        return Ok(Map::new());
    };
    if arguments.contains_key(tables::CHAT_TEMPLATE) {
        return refused("chat_template_kwargs.chat_template");
    }
    let unused = |name: &&String| !messages::template_uses(app.engine.text(), name);
    let unused = arguments.keys().filter(unused).take(IGNORED_FIELDS_MAX);
    fields.note_ignored(unused.map(|name| format!("{NAME}.{name}")));
    Ok(arguments.clone())
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
    tally: Tally,
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
        chunk.usage = self.tally.of_chunk(finish);
        if let Some(outcome) = finish.filter(|_| !self.tally.asked.at_end) {
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
        self.tally.completion_tokens += piece.n_tokens;
        let (reasoning, answer) = ChatLogprobs::new(piece, self.meta.tokenizer()).apart();
        // Clients show one of the two at a time, so they come in chunks of their own.
        let text = piece.text(Channel::Reasoning);
        if !text.is_empty() || !reasoning.is_empty() {
            let delta = Delta {
                reasoning_content: some(&text),
                ..Delta::default()
            };
            let logprobs = self.has_logprobs.then_some(reasoning);
            self.chunk(delta, logprobs, None, None, frames);
        }
        let text = piece.text(Channel::Answer);
        if !text.is_empty() || !answer.is_empty() {
            let delta = Delta {
                content: some(&text),
                ..Delta::default()
            };
            let logprobs = self.has_logprobs.then_some(answer);
            self.chunk(delta, logprobs, None, None, frames);
        }
    }

    fn end(&mut self, outcome: &RequestOutcome, frames: &mut Frames) {
        self.chunk(Delta::default(), None, None, Some(outcome), frames);
        if self.tally.asked.at_end {
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
