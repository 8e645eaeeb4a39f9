//! `/v1/responses`: OpenAI's Responses API.
//!
//! | file | what |
//! | --- | --- |
//! | [`tables`] | how every known field is treated |
//! | [`items`] | the items of a conversation → messages |
//! | [`tools`], [`format`] | what a request says of tools, and of the form of its answer |
//! | [`output`] | what is written → items and events |
//! | [`document`] | the response object |
//! | [`socket`] | the same over a WebSocket, one response after another |
//! | [`compact`] | a conversation that becomes a summary of itself |
//! | [`store`] | responses that are kept |
//! | [`stored`] | the paths that read, delete and cancel them |
//!
//! Absent: tools that the server runs, conversations and prompts that are kept by name,
//! responses in the background.

pub(crate) mod compact;
mod document;
mod format;
mod items;
mod output;
pub(crate) mod socket;
pub(crate) mod store;
pub(crate) mod stored;
pub(crate) mod tables;
mod tools;

use std::collections::HashSet;
use std::sync::Arc;

use axum::http::HeaderMap;
use engine::RequestOutcome;
use serde::Serialize;
use serde_json::{Map, Value, json};
use text::Text;
use text::messages::MESSAGES_MAX;

use self::document::{Document, Echo, End};
use self::format::{Include, TextFormat, metadata, spell_reasoning, spell_text};
use self::items::{INPUT, Turns};
use self::output::{Events, Output, Status};
use self::socket::Latest;
use self::store::Stored;
use super::bytes;
use super::chat::{refuse_template, template_arguments};
use crate::app::App;
use crate::auth::{self, Caller};
use crate::dialect::{Answer, Endpoint};
use crate::errors::ApiError;
use crate::fields::{Fields, ignored_header};
use crate::generation::Piece;
use crate::ids;
use crate::limits::Limits;
use crate::options::{Names, Options};
use crate::request::{Asked, Conversation, Message, Prompt};
use crate::sse::{Frames, StreamFormat};
use crate::template::template_uses;
use crate::thinking::Thinking;

/// The names of options in requests.
const NAMES: &Names = &Names {
    max_tokens: &["max_output_tokens"],
    ..super::NAMES
};
/// The field that names the response to go on from.
const PREVIOUS: &str = "previous_response_id";
/// The argument of chat templates that says how much the model is to say.
const VERBOSITY: &str = "verbosity";

/// A response, whole or as a stream.
pub(crate) struct Respond {
    app: Arc<App>,
    caller: Option<Caller>,
    echo: Echo,
    /// The items of the input, if the response is to be kept.
    input: Arc<Vec<Map<String, Value>>>,
    /// The responses that this one goes on from, the earliest first.
    before: Vec<Arc<Stored>>,
    /// Where the conversation is kept for the next response on the same WebSocket.
    latest: Option<Arc<Latest>>,
    output: Output,
    has_sealed_reasoning: bool,
    /// The number of the stream's next event.
    next_event: u64,
}

impl Endpoint for Respond {
    fn body_bytes(limits: &Limits) -> usize {
        limits.chat_body_bytes
    }

    fn read(
        object: Map<String, Value>,
        headers: &HeaderMap,
        app: &Arc<App>,
    ) -> Result<(Asked, Self), ApiError> {
        Respond::read_on(object, headers, app, None)
    }

    fn begin(&mut self, _prompt_tokens: usize) {}

    fn document(&self, answers: &[Answer]) -> Vec<u8> {
        let end = End::Ended(&answers[0].outcome);
        let output = self.written(&answers[0]);
        let document = bytes(&self.echo.document(&output.items, &end));
        self.keep(&output, &document);
        document
    }
}

impl Respond {
    /// Reads a request, on a WebSocket if there is `latest`: the conversation that ended there
    /// with the response before.
    ///
    /// # Errors
    ///
    /// As [`Endpoint::read`].
    fn read_on(
        mut object: Map<String, Value>,
        headers: &HeaderMap,
        app: &Arc<App>,
        latest: Option<Arc<Latest>>,
    ) -> Result<(Asked, Self), ApiError> {
        let input = object.remove(INPUT).unwrap_or_default();
        let fields = Fields::new(&object, &tables::RESPONSES);
        let model = app.check_model(&fields)?;
        refuse(&fields)?;
        let mut options = Options::read(&fields, app, NAMES, None)?;
        let include = Include::read(&fields)?;
        let format = TextFormat::read(&fields)?;
        let asked = tools::read(&fields, app)?;
        options.splits_reasoning = true;
        options.logprobs = include.logprobs;
        options.grammar = format.grammar;
        let told = options.offer(asked.offer, tools::FIELDS, app.engine.text())?;
        let arguments = arguments(&fields, app, format.verbosity, &mut options)?;
        let caller = auth::caller(&app.server.config.keys, headers);
        let mut input = items::list(input)?;
        resolve(&mut input, app, caller)?;
        let before = before(&fields, &input, app, caller, latest.as_deref())?;
        let (messages, unread) = conversation(&fields, &before, &input, app)?;
        fields.note_ignored(unread);
        let store = fields.bool("store")?.unwrap_or(true);
        let kept = match store || latest.is_some() {
            true => {
                input.iter_mut().for_each(items::complete);
                input
            }
            false => Vec::new(),
        };
        let echo = Echo {
            model,
            store,
            top_logprobs: include.logprobs.unwrap_or(0),
            max_tool_calls: asked.calls_max,
            parallel_tool_calls: asked.parallel,
            tool_choice: asked.choice.cloned().unwrap_or_else(|| json!("auto")),
            tools: asked.functions,
            ..echo(&fields, &object, app, &options)?
        };
        let respond = Respond {
            app: app.clone(),
            caller,
            echo,
            input: Arc::new(kept),
            before,
            latest,
            output: Output::new(include.sealed_reasoning),
            has_sealed_reasoning: include.sealed_reasoning,
            next_event: 0,
        };
        let asked = Asked {
            prompt: Prompt::Conversation(Conversation {
                messages,
                arguments,
                tools: told,
                end: None,
            }),
            options,
            ignored: ignored_header(&fields),
        };
        Ok((asked, respond))
    }

    /// The items of a whole answer.
    fn written(&self, answer: &Answer) -> Output {
        let mut output = Output::new(self.has_sealed_reasoning);
        let mut events = Events::unread();
        let status = End::Ended(&answer.outcome).status();
        output.take(
            &answer.whole,
            &self.app.engine.text().tokenizer,
            &mut events,
        );
        output.finish(status, &mut events);
        output
    }

    /// Keeps the response for who goes on from it: under its id if it is to be stored, and for
    /// the next one on its WebSocket.
    fn keep(&self, output: &Output, document: &[u8]) {
        if !self.echo.store && self.latest.is_none() {
            return;
        }
        let stored = Arc::new(Stored {
            id: self.echo.id.clone(),
            caller: self.caller,
            previous: self.echo.previous_response_id.clone(),
            input: self.input.clone(),
            output: output.items.iter().map(|item| item.for_store()).collect(),
            document: String::from_utf8_lossy(document).into_owned(),
        });
        if let Some(latest) = &self.latest {
            latest.keep(&self.before, &stored);
        }
        if self.echo.store {
            self.app.server.responses.keep(stored);
        }
    }
}

/// What the response repeats of the request, with OpenAI's defaults for what is not read here.
fn echo(
    fields: &Fields<'_>,
    object: &Map<String, Value>,
    app: &App,
    options: &Options,
) -> Result<Echo, ApiError> {
    let owned = |name| fields.string(name).map(|text| text.map(str::to_owned));
    let sampling = &options.sampling;
    Ok(Echo {
        id: format!("resp_{}", ids::unique()),
        created_at: ids::unix_seconds(),
        model: String::new(),
        fingerprint: app.fingerprint.clone(),
        seed: sampling.seed,
        instructions: owned("instructions")?,
        max_output_tokens: options.max_tokens,
        max_tool_calls: None,
        metadata: metadata(fields)?,
        parallel_tool_calls: true,
        previous_response_id: owned(PREVIOUS)?,
        prompt_cache_key: owned("prompt_cache_key")?,
        reasoning: spell_reasoning(object),
        safety_identifier: owned("safety_identifier")?,
        store: false,
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        text: spell_text(object),
        tool_choice: json!("auto"),
        tools: Vec::new(),
        top_logprobs: 0,
        user: owned("user")?,
    })
}

/// Refuses what is not implemented, and what has another name here.
fn refuse(fields: &Fields<'_>) -> Result<(), ApiError> {
    refuse_template(fields)?;
    fields.refuse()?;
    match fields.string("truncation")? {
        None | Some("auto" | "disabled") => {}
        Some(_) => return Err(fields.error("truncation", "must be auto or disabled")),
    }
    if let Some(map) = fields.object("stream_options")? {
        let inner = fields.inside(map, "stream_options.");
        fields.note_ignored(inner.ignored());
    }
    Ok(())
}

/// Arguments for the chat template, and how long the model may reason.
fn arguments(
    fields: &Fields<'_>,
    app: &App,
    verbosity: Option<String>,
    options: &mut Options,
) -> Result<Map<String, Value>, ApiError> {
    let uses = |name: &str| template_uses(app.engine.text(), name);
    let mut arguments = template_arguments(fields, app)?;
    let thinking = Thinking::read(fields)?.or(app.settings.reasoning);
    options.reasoning_budget = thinking.tell(&mut arguments, uses);
    app.settings.defaults.fill(&mut arguments);
    match verbosity {
        Some(verbosity) if uses(VERBOSITY) => {
            arguments.entry(VERBOSITY).or_insert(json!(verbosity));
        }
        Some(verbosity) if verbosity != "medium" => {
            fields.note_ignored([format!("text.{VERBOSITY}")]);
        }
        _ => {}
    }
    Ok(arguments)
}

/// Puts stored items in the places of references to them.
fn resolve(
    input: &mut [Map<String, Value>],
    app: &App,
    caller: Option<Caller>,
) -> Result<(), ApiError> {
    let ids: HashSet<&str> = input.iter().filter_map(items::reference).collect();
    if ids.is_empty() {
        return Ok(());
    }
    let mut found = app.server.responses.items(&ids, caller);
    for (i, item) in input.iter_mut().enumerate() {
        let Some(id) = items::reference(item) else {
            continue;
        };
        // Nobody has a use for the same item twice.
        match found.remove(id) {
            Some(stored) => *item = stored,
            None => {
                let at = format!("{INPUT}[{i}].id");
                return Err(ApiError::no_item(at, id));
            }
        }
    }
    Ok(())
}

/// The responses that a request goes on from, the earliest first.
///
/// # Errors
///
/// 404 for a response that is not kept for `caller`; 400 if `input` has the result of a call that
/// the conversation has not.
fn before(
    fields: &Fields<'_>,
    input: &[Map<String, Value>],
    app: &App,
    caller: Option<Caller>,
    latest: Option<&Latest>,
) -> Result<Vec<Arc<Stored>>, ApiError> {
    let Some(id) = fields.string(PREVIOUS)? else {
        return Ok(Vec::new());
    };
    let before = match latest.and_then(|latest| latest.conversation(id)) {
        Some(before) => before,
        None => {
            let found = app.server.responses.conversation(id, caller);
            found.map_err(|missing| ApiError::no_response(Some(PREVIOUS), id, &missing))?
        }
    };
    items::check_results(before.iter().flat_map(|stored| stored.items()), input)?;
    Ok(before)
}

/// The messages: instructions, what came before, and `input`; beside them the paths of fields
/// that change nothing.
fn conversation(
    fields: &Fields<'_>,
    before: &[Arc<Stored>],
    input: &[Map<String, Value>],
    app: &App,
) -> Result<(Vec<Message>, Vec<String>), ApiError> {
    let text: &Text = app.engine.text();
    let n_before: usize = before.iter().map(|stored| stored.items().count()).sum();
    if n_before + input.len() > MESSAGES_MAX {
        let message = format!("make a conversation of more than {MESSAGES_MAX} items");
        return Err(ApiError::field(INPUT, message));
    }
    let mut turns = Turns::new(text, fields.string("instructions")?);
    for item in before.iter().flat_map(|stored| stored.items()) {
        turns.add(PREVIOUS, item)?;
    }
    for (i, item) in input.iter().enumerate() {
        turns.add(&format!("{INPUT}[{i}]"), item)?;
    }
    Ok(turns.finish())
}

#[derive(Serialize)]
struct OfResponse<'a> {
    response: Document<'a>,
}

impl StreamFormat for Respond {
    fn open(&mut self, frames: &mut Frames) {
        let mut events = Events::into_frames(frames, &mut self.next_event);
        for name in ["response.created", "response.in_progress"] {
            let response = self.echo.document(&[], &End::Not);
            events.send(name, OfResponse { response });
        }
    }

    fn text(&mut self, piece: &Piece, frames: &mut Frames) {
        let mut events = Events::into_frames(frames, &mut self.next_event);
        let tokenizer = &self.app.engine.text().tokenizer;
        self.output.take(piece, tokenizer, &mut events);
    }

    fn end(&mut self, outcome: &RequestOutcome, frames: &mut Frames) {
        let end = End::Ended(outcome);
        let mut events = Events::into_frames(frames, &mut self.next_event);
        self.output.finish(end.status(), &mut events);
        let response = self.echo.document(&self.output.items, &end);
        let kept = self.echo.store.then(|| bytes(&response));
        events.send(end.event(), OfResponse { response });
        self.keep(&self.output, &kept.unwrap_or_default());
    }

    fn fail(&mut self, error: &ApiError, frames: &mut Frames) {
        let end = End::Failed(error);
        self.output
            .finish(Status::Incomplete, &mut Events::unread());
        let mut events = Events::into_frames(frames, &mut self.next_event);
        // On a WebSocket an error ends the response: the event after this one says it.
        if self.latest.is_none() {
            send_error(error, &mut events);
        }
        let response = self.echo.document(&self.output.items, &end);
        events.send(end.event(), OfResponse { response });
    }

    fn refuse(error: &ApiError, frames: &mut Frames) {
        send_error(error, &mut Events::into_frames(frames, &mut 0));
    }
}

/// Sends the event of an error.
fn send_error(error: &ApiError, events: &mut Events<'_>) {
    #[derive(Serialize)]
    struct OfError<'a> {
        code: Option<&'a str>,
        message: &'a str,
        param: Option<&'a str>,
        /// The error again, under the name where OpenAI's libraries look for it.
        error: Inner<'a>,
    }
    #[derive(Serialize)]
    struct Inner<'a> {
        r#type: &'a str,
        code: Option<&'a str>,
        message: &'a str,
        param: Option<&'a str>,
    }
    let (code, message, param) = (error.code, &*error.message, error.param.as_deref());
    let inner = Inner {
        r#type: error.kind,
        code,
        message,
        param,
    };
    let body = OfError {
        code,
        message,
        param,
        error: inner,
    };
    events.send("error", body);
}
