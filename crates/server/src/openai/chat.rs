//! `POST /v1/chat/completions`.

use std::borrow::Cow;
use std::sync::Arc;

use axum::http::HeaderMap;
use engine::{Channel, FinishReason, RequestOutcome};
use serde::Serialize;
use serde_json::{Map, Value};
use text::PromptEnd;

use super::logprobs::{self, ChatLogprobs};
use super::tools::{self, CallDeltas, Calls, Spelling};
use super::{
    Meta, Record, StreamUsage, Tally, bytes, finish_reason, messages, structured, tables, trace,
};
use crate::app::App;
use crate::dialect::{Answer, Endpoint};
use crate::errors::ApiError;
use crate::fields::{Fields, ignored_header};
use crate::generation::{Call, Piece, Prefill};
use crate::limits::{IGNORED_FIELDS_MAX, Limits};
use crate::media;
use crate::options::{Names, Options, answers};
use crate::request::{Asked, Continue, Conversation, Prompt};
use crate::run::Run;
use crate::sse::{Frames, StreamFormat};
use crate::template::template_uses;
use crate::thinking::Thinking;

const OBJECT: &str = "chat.completion";
const CHUNK: &str = "chat.completion.chunk";

/// The names of options in chat requests.
const NAMES: &Names = &Names {
    max_tokens: &["n_predict", "max_completion_tokens", "max_tokens"],
    ..super::NAMES
};

/// An answer to a conversation, whole or as a stream.
#[derive(Clone)]
pub(crate) struct Chat {
    meta: Meta,
    /// Number of the answer.
    index: usize,
    tally: Tally,
    has_logprobs: bool,
    has_trace: bool,
    /// How calls are spelled.
    calls: Spelling,
}

impl Endpoint for Chat {
    fn body_bytes(limits: &Limits) -> usize {
        limits.chat_body_bytes
    }

    fn read(
        object: Map<String, Value>,
        _headers: &HeaderMap,
        app: &Arc<App>,
    ) -> Result<(Asked, Self), ApiError> {
        read(object, app, Turns::Model)
    }

    fn choices(mut self, n: usize) -> Vec<Self> {
        self.meta.n_choices = n;
        let choice = |index| Self {
            index,
            ..self.clone()
        };
        (0..n).map(choice).collect()
    }

    fn begin(&mut self, prompt_tokens: usize) {
        self.tally.prompt_tokens = prompt_tokens;
    }

    fn note_prompt(&mut self, prompt: &[u32]) {
        self.meta.note_prompt(prompt);
    }

    fn note_run(&mut self, run: &Arc<Run>) {
        self.meta.note_run(run);
    }

    fn document(&self, answers: &[Answer]) -> Vec<u8> {
        let choices = answers.iter().enumerate();
        let texts: Vec<_> = answers.iter().map(Texts::new).collect();
        let choices = choices
            .zip(&texts)
            .map(|((i, answer), texts)| self.choice(i, answer, texts));
        let choices: Vec<_> = choices.collect();
        let outcomes: Vec<_> = answers.iter().map(|answer| &*answer.outcome).collect();
        let mut document = self.meta.ended(OBJECT, &choices, &outcomes);
        let whole = Some(&answers[0].whole);
        document.verbose = self.meta.verbose(&texts[0].answer, whole, outcomes[0]);
        bytes(&document)
    }
}

/// Whose turn it may be after a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turns {
    /// The model's.
    Model,
    /// Anyone's: the prompt is only shown.
    Any,
}

/// Reads a request for the next turn of a conversation.
///
/// # Errors
///
/// 400 for a field that is wrong, missing, or asks for what is not implemented.
pub(crate) fn read(
    mut object: Map<String, Value>,
    app: &Arc<App>,
    turns: Turns,
) -> Result<(Asked, Chat), ApiError> {
    let text = app.engine.text();
    let messages = object.remove("messages").unwrap_or_default();
    let has_trace = trace::take(&mut object)?;
    let fields = Fields::new(&object, &tables::CHAT);
    let model = app.check_model(&fields)?;
    refuse_template(&fields)?;
    fields.refuse()?;
    let mut options = Options::read(&fields, app, NAMES, None)?;
    options.trace = has_trace;
    options.n = answers(&fields)?;
    let usage = StreamUsage::read(&fields, options.stream)?;
    let mut arguments = template_arguments(&fields, app)?;
    let thinking = Thinking::read(&fields)?.or(app.settings.reasoning);
    options.reasoning_budget = thinking.tell(&mut arguments, |name| template_uses(text, name));
    app.settings.defaults.fill(&mut arguments);
    options.splits_reasoning = splits_reasoning(&fields)?;
    options.shows_reasoning_marks = !options.splits_reasoning;
    options.logprobs = logprobs::read_chat(&fields)?;
    options.grammar = structured::read(&fields)?;
    let (offer, calls) = tools::read(&fields, app)?;
    let told = options.offer(offer, calls.fields(), text)?;
    let (messages, unread) = messages::read(messages, text)?;
    fields.note_ignored(unread);
    let mut conversation = Conversation {
        messages,
        arguments,
        tools: told,
        end: None,
    };
    end_prompt(&fields, &mut conversation, app, turns)?;
    for (name, kind) in [
        ("mm_processor_kwargs", None),
        ("media_io_kwargs", Some("video")),
    ] {
        conversation.ask_of_videos(media::defaults(name, fields.get(name), kind)?);
    }
    let mut meta = Meta::new(app, model, "chatcmpl", &options);
    options.wants = meta.read_live(&fields, &options, &object)?;
    let chat = Chat {
        meta,
        index: 0,
        tally: Tally::new(usage),
        has_logprobs: options.logprobs.is_some(),
        has_trace,
        calls,
    };
    let asked = Asked {
        prompt: Prompt::Conversation(conversation),
        options,
        ignored: ignored_header(&fields),
    };
    Ok((asked, chat))
}

/// Reads whether the answer goes on from the last message: vLLM's two fields, and llama-server's
/// rule where they are silent.
fn end_prompt(
    fields: &Fields<'_>,
    conversation: &mut Conversation,
    app: &App,
    turns: Turns,
) -> Result<(), ApiError> {
    const CONTINUE: &str = "continue_final_message";
    const TURN: &str = "add_generation_prompt";
    let begins_turn = fields.bool(TURN)?;
    let asked = match fields.get(CONTINUE) {
        None if app.settings.whole_assistant_turns || begins_turn == Some(true) => Continue::Never,
        None => Continue::IfPossible,
        Some(Value::Bool(false)) => Continue::Never,
        Some(Value::Bool(true)) => Continue::Always,
        Some(Value::String(part)) if part == "content" => Continue::Content,
        Some(Value::String(part)) if part == "reasoning_content" => Continue::Reasoning,
        Some(_) => {
            let message = "must be true, false, \"content\" or \"reasoning_content\"";
            return Err(fields.error(CONTINUE, message));
        }
    };
    let is_asked = !matches!(asked, Continue::Never | Continue::IfPossible);
    if is_asked && begins_turn == Some(true) {
        let message = format!("cannot be combined with `{TURN}: true`; send one of the two");
        return Err(fields.error(CONTINUE, message));
    }
    conversation.go_on(asked, CONTINUE, app.engine.text())?;
    if conversation.end.is_none() && begins_turn == Some(false) {
        if turns == Turns::Model {
            let hint = ", or send true: an answer begins with the model's turn";
            return Err(ApiError::unsupported(TURN, hint));
        }
        conversation.end = Some(PromptEnd::Message);
    }
    Ok(())
}

/// Where a request has arguments for the chat template.
const TEMPLATE_ARGUMENTS: &str = "chat_template_kwargs";

/// Refuses a chat template, wherever it stands: it is a program.
///
/// # Errors
///
/// 400 that names the field.
pub(super) fn refuse_template(fields: &Fields<'_>) -> Result<(), ApiError> {
    let arguments = fields.object(TEMPLATE_ARGUMENTS)?;
    let at = match fields.get(tables::CHAT_TEMPLATE) {
        Some(_) => tables::CHAT_TEMPLATE,
        None if arguments.is_some_and(|map| map.contains_key(tables::CHAT_TEMPLATE)) => {
            "chat_template_kwargs.chat_template"
        }
        None => return Ok(()),
    };
    let message = "is refused: a chat template is a program, and only the model's own runs";
    Err(fields.error(at, message))
}

/// Arguments for the chat template; those that it does not use are noted as ignored.
pub(super) fn template_arguments(
    fields: &Fields<'_>,
    app: &App,
) -> Result<Map<String, Value>, ApiError> {
    let Some(arguments) = fields.object(TEMPLATE_ARGUMENTS)? else {
        return Ok(Map::new());
    };
    let unused = |name: &&String| !template_uses(app.engine.text(), name);
    let unused = arguments.keys().filter(unused).take(IGNORED_FIELDS_MAX);
    fields.note_ignored(unused.map(|name| format!("{TEMPLATE_ARGUMENTS}.{name}")));
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
    index: usize,
    message: Message<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace: Option<Vec<trace::Round<'a>>>,
    #[serde(flatten)]
    record: Option<Record<'a>>,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(flatten)]
    calls: Calls<'a>,
    refusal: Option<()>,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    delta: Delta<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace: Option<Vec<trace::Round<'a>>>,
    #[serde(flatten)]
    record: Option<Record<'a>>,
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(flatten)]
    calls: CallDeltas<'a>,
}

/// The texts of a whole answer.
struct Texts<'a> {
    answer: Cow<'a, str>,
    reasoning: Cow<'a, str>,
    calls: Vec<Call<'a>>,
}

impl<'a> Texts<'a> {
    fn new(Answer { whole, .. }: &'a Answer) -> Self {
        Texts {
            answer: whole.text(Channel::Answer),
            reasoning: whole.text(Channel::Reasoning),
            calls: whole.calls(),
        }
    }
}

impl Chat {
    /// The answer number `index`, whole.
    fn choice<'a>(&'a self, index: usize, answer: &'a Answer, texts: &'a Texts<'a>) -> Choice<'a> {
        let Answer { whole, outcome } = answer;
        let Texts {
            answer,
            reasoning,
            calls,
        } = texts;
        // An answer that only calls says nothing; any other one has a text, if an empty one.
        let is_silent = answer.is_empty() && !calls.is_empty();
        let logprobs = || ChatLogprobs::new(whole, self.meta.tokenizer());
        Choice {
            index,
            message: Message {
                role: "assistant",
                content: (!is_silent).then_some(answer),
                reasoning_content: some(reasoning),
                calls: Calls::new(calls, self.calls),
                refusal: None,
            },
            logprobs: self.has_logprobs.then(logprobs),
            finish_reason: self.finish_reason(outcome),
            trace: self.has_trace.then(|| self.meta.trace(whole)),
            record: self.meta.record_of(index, outcome),
        }
    }

    /// The word for the end of a text; a call by the older name has one of its own.
    fn finish_reason(&self, outcome: &RequestOutcome) -> &'static str {
        match (&outcome.finish, self.calls) {
            (FinishReason::ToolCalls, Spelling::Functions) => "function_call",
            (finish, _) => finish_reason(finish),
        }
    }

    fn chunk(
        &self,
        delta: Delta<'_>,
        logprobs: Option<ChatLogprobs<'_>>,
        seed: Option<u64>,
        finish: Option<&RequestOutcome>,
        frames: &mut Frames,
    ) {
        let choice = ChunkChoice {
            index: self.index,
            delta,
            logprobs,
            finish_reason: finish.map(|outcome| self.finish_reason(outcome)),
            trace: None,
            record: finish.and_then(|outcome| self.meta.record_of(self.index, outcome)),
        };
        self.send(choice, seed, finish, frames);
    }

    fn send(
        &self,
        choice: ChunkChoice<'_>,
        seed: Option<u64>,
        finish: Option<&RequestOutcome>,
        frames: &mut Frames,
    ) {
        let choices = [choice];
        let mut chunk = self.meta.envelope(CHUNK, &choices);
        chunk.seed = seed;
        chunk.usage = self.tally.of_chunk(finish);
        chunk.timings = self.meta.timings_so_far().filter(|_| finish.is_none());
        let is_alone = self.meta.n_choices == 1;
        if let Some(outcome) = finish.filter(|_| is_alone && !self.tally.asked.at_end) {
            chunk = chunk.with_record(self.meta.seed, outcome);
        }
        if let Some(outcome) = finish.filter(|_| self.index == 0) {
            chunk.verbose = self.meta.verbose("", None, outcome);
        }
        frames.data(&chunk);
    }
}

impl StreamFormat for Chat {
    fn open(&mut self, frames: &mut Frames) {
        let delta = Delta {
            role: Some("assistant"),
            content: Some(""),
            ..Delta::default()
        };
        // Several answers say their seeds at their ends.
        let seed = (self.meta.n_choices == 1).then_some(self.meta.seed);
        self.chunk(delta, None, seed, None, frames);
    }

    fn text(&mut self, piece: &Piece, frames: &mut Frames) {
        self.tally.completion_tokens += piece.n_tokens;
        // In a chunk of its own before the text that it tells of.
        if !piece.rounds.is_empty() {
            let choice = ChunkChoice {
                index: self.index,
                delta: Delta::default(),
                logprobs: None,
                finish_reason: None,
                trace: Some(self.meta.trace(piece)),
                record: None,
            };
            self.send(choice, None, None, frames);
        }
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
        for (call, arguments) in piece.call_parts() {
            let mut send = |calls| {
                let delta = Delta {
                    calls,
                    ..Delta::default()
                };
                self.chunk(delta, None, None, None, frames);
            };
            if let Some(begin) = &call.begin {
                let (id, name) = (&begin.id, &begin.name);
                send(CallDeltas::begin(call.index, id, name, self.calls));
            }
            if !arguments.is_empty() {
                send(CallDeltas::arguments(call.index, arguments, self.calls));
            }
        }
    }

    fn prefill(&mut self, prefill: Prefill, frames: &mut Frames) {
        let choices = [ChunkChoice {
            index: self.index,
            delta: Delta::default(),
            logprobs: None,
            finish_reason: None,
            trace: None,
            record: None,
        }];
        let mut chunk = self.meta.envelope(CHUNK, &choices);
        chunk.usage = self.tally.of_chunk(None);
        chunk.prompt_progress = Some(self.meta.progress(prefill));
        frames.data(&chunk);
    }

    fn end(&mut self, outcome: &RequestOutcome, frames: &mut Frames) {
        self.chunk(Delta::default(), None, None, Some(outcome), frames);
    }

    fn close(&mut self, outcomes: &[Box<RequestOutcome>], frames: &mut Frames) {
        if self.tally.asked.at_end {
            let nothing: [ChunkChoice<'_>; 0] = [];
            let outcomes: Vec<_> = outcomes.iter().map(|outcome| &**outcome).collect();
            frames.data(&self.meta.ended(CHUNK, &nothing, &outcomes));
        }
        frames.raw("[DONE]");
    }

    fn refuse(error: &ApiError, frames: &mut Frames) {
        frames.raw(&super::error(error));
    }
}
