//! `POST /v1/messages`: the answer, whole and as a stream.
//!
//! ```text
//! message_start                                    before the prompt has run
//! ping                                             every 10 s without another event
//! content_block_start, _delta …, content_block_stop    a block after the other
//! message_delta                                    why it ended, tokens, the record
//! message_stop
//! ```
//!
//! A stream says a call while it is written. Where that turns out to be none, its block is
//! closed as it is, and the text that the model wrote follows in a block of text; a whole answer
//! has the text only.

use std::sync::Arc;

use axum::http::HeaderMap;
use engine::{CallEnd, CallPart, Channel, FinishReason, RequestOutcome, Segment, Speculation};
use serde::Serialize;
use serde_json::{Map, Value};

use super::ErrorDocument;
use super::request::{self, Length};
use crate::app::App;
use crate::dialect::{Answer, Endpoint};
use crate::errors::ApiError;
use crate::generation::{Piece, Progress};
use crate::ids;
use crate::limits::Limits;
use crate::openai::{self, Timings};
use crate::request::Asked;
use crate::sse::{Frames, StreamFormat};

/// How the engine's ids of calls begin, and how those of this API do.
const CALL_PREFIXES: [&str; 2] = ["call_", "toolu_"];

/// An answer to a conversation, whole or as a stream.
pub(crate) struct Message {
    id: String,
    /// The name that the request gave the model.
    model: String,
    seed: u64,
    prompt_tokens: usize,
    /// Tokens that were asked for, at most.
    max_tokens: Option<usize>,
    /// The block of a stream that is being written.
    open: Option<Kind>,
    /// Blocks of a stream that have been closed.
    n_closed: usize,
}

/// What a block of a stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Thinking,
    Text,
    /// The call of this number.
    Call(usize),
}

/// A block of an answer.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Block {
    Thinking {
        thinking: String,
        /// Clients send it back with the block; nothing here checks who wrote one.
        signature: &'static str,
    },
    Text {
        text: String,
    },
    ToolUse {
        id: String,
        name: String,
        input: Value,
    },
}

/// A piece of a block.
#[derive(Serialize)]
#[serde(tag = "type")]
enum Delta<'a> {
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: &'a str },
    #[serde(rename = "signature_delta")]
    Signature { signature: &'static str },
    #[serde(rename = "text_delta")]
    Text { text: &'a str },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: &'a str },
}

/// A message, as far as it is known.
#[derive(Serialize)]
struct Document<'a> {
    id: &'a str,
    r#type: &'static str,
    role: &'static str,
    model: &'a str,
    content: Vec<Block>,
    #[serde(flatten)]
    stop: Stop<'a>,
    usage: Usage,
    #[serde(flatten)]
    record: Record<'a>,
}

/// Why a message has ended.
#[derive(Default, Serialize)]
struct Stop<'a> {
    stop_reason: Option<&'static str>,
    /// The string that ended it.
    stop_sequence: Option<&'a str>,
}

impl<'a> Stop<'a> {
    /// The end of an answer that was to have `max_tokens` at most.
    fn new(outcome: &'a RequestOutcome, max_tokens: Option<usize>) -> Self {
        let written = outcome.usage.completion_tokens;
        let (reason, sequence) = match &outcome.finish {
            FinishReason::Stop | FinishReason::Cancelled => ("end_turn", None),
            FinishReason::StopString(stop) => ("stop_sequence", Some(stop.as_str())),
            FinishReason::ToolCalls => ("tool_use", None),
            FinishReason::Length if max_tokens.is_some_and(|most| written >= most) => {
                ("max_tokens", None)
            }
            // More tokens may be asked for in vain.
            FinishReason::Length => ("model_context_window_exceeded", None),
        };
        Stop {
            stop_reason: Some(reason),
            stop_sequence: sequence,
        }
    }
}

/// Tokens of a message.
#[derive(Serialize)]
struct Usage {
    /// Tokens of the prompt that were not in the cache; at the start of a stream, when that is
    /// not known yet, all of them.
    input_tokens: usize,
    cache_creation_input_tokens: usize,
    cache_read_input_tokens: usize,
    output_tokens: usize,
    /// Absent where no token was told apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    output_tokens_details: Option<TokenDetails>,
}

/// Which of the tokens written are not the answer's.
#[derive(Serialize)]
struct TokenDetails {
    thinking_tokens: usize,
}

impl Usage {
    /// The usage of a request with a prompt of so many tokens that has not run yet.
    fn before(prompt_tokens: usize) -> Self {
        Usage {
            input_tokens: prompt_tokens,
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: 0,
            output_tokens: 0,
            output_tokens_details: None,
        }
    }

    fn new(outcome: &RequestOutcome) -> Self {
        let engine::Usage {
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            reasoning_tokens,
            ..
        } = outcome.usage;
        Usage {
            input_tokens: prompt_tokens - cached_tokens,
            cache_read_input_tokens: cached_tokens,
            output_tokens: completion_tokens,
            output_tokens_details: (reasoning_tokens > 0).then_some(TokenDetails {
                thinking_tokens: reasoning_tokens,
            }),
            ..Usage::before(0)
        }
    }
}

/// What paceline says beside the API's fields; clients of the API pass over it.
#[derive(Serialize)]
struct Record<'a> {
    /// The seed that reproduces the text.
    seed: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    speculation: Option<&'a Speculation>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<Timings>,
}

impl<'a> Record<'a> {
    fn new(seed: u64, outcome: Option<&'a RequestOutcome>) -> Self {
        Record {
            seed,
            speculation: outcome.map(|outcome| &outcome.speculation),
            timings: outcome.map(Timings::new),
        }
    }
}

/// An event of a stream.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Event<'a> {
    MessageStart {
        message: Document<'a>,
    },
    ContentBlockStart {
        index: usize,
        content_block: Block,
    },
    ContentBlockDelta {
        index: usize,
        delta: Delta<'a>,
    },
    ContentBlockStop {
        index: usize,
    },
    MessageDelta {
        delta: Stop<'a>,
        usage: Usage,
        #[serde(flatten)]
        record: Record<'a>,
    },
    MessageStop,
    Ping,
}

impl Event<'_> {
    fn name(&self) -> &'static str {
        match self {
            Event::MessageStart { .. } => "message_start",
            Event::ContentBlockStart { .. } => "content_block_start",
            Event::ContentBlockDelta { .. } => "content_block_delta",
            Event::ContentBlockStop { .. } => "content_block_stop",
            Event::MessageDelta { .. } => "message_delta",
            Event::MessageStop => "message_stop",
            Event::Ping => "ping",
        }
    }

    fn send(&self, frames: &mut Frames) {
        frames.event(self.name(), self);
    }
}

impl Endpoint for Message {
    fn body_bytes(limits: &Limits) -> usize {
        limits.chat_body_bytes
    }

    fn read(
        object: Map<String, Value>,
        _: &HeaderMap,
        app: &Arc<App>,
    ) -> Result<(Asked, Self), ApiError> {
        let request::Read { asked, model } = request::read(object, app, Length::Required)?;
        let message = Message {
            id: format!("msg_{}", ids::unique()),
            model,
            seed: asked.options.sampling.seed,
            prompt_tokens: 0,
            max_tokens: asked.options.max_tokens,
            open: None,
            n_closed: 0,
        };
        Ok((asked, message))
    }

    fn begin(&mut self, prompt_tokens: usize) {
        self.prompt_tokens = prompt_tokens;
    }

    fn document(&self, answers: &[Answer]) -> Vec<u8> {
        let Answer { whole, outcome } = &answers[0];
        openai::bytes(&Document {
            content: blocks(whole.segments()),
            stop: Stop::new(outcome, self.max_tokens),
            usage: Usage::new(outcome),
            record: Record::new(self.seed, Some(outcome)),
            ..self.empty()
        })
    }
}

/// The blocks of a whole answer.
fn blocks(segments: &[Segment]) -> Vec<Block> {
    let mut blocks = Vec::new();
    // The id, the name and the input so far of a call that has begun.
    let mut call: Option<(String, String, String)> = None;
    for Segment {
        channel,
        text,
        call: part,
        ..
    } in segments
    {
        match (channel, part) {
            (_, Some(CallPart { begin, end, .. })) => {
                if let Some(begin) = begin {
                    call = Some((call_id(&begin.id), begin.name.clone(), String::new()));
                }
                if let Some((.., input)) = &mut call {
                    input.push_str(text);
                }
                let ended = end.and_then(|end| Some((end, call.take()?)));
                if let Some((CallEnd::Whole, (id, name, input))) = ended {
                    let input = serde_json::from_str(&input).unwrap_or(Value::String(input));
                    blocks.push(Block::ToolUse { id, name, input });
                }
            }
            _ if text.is_empty() => {}
            (Channel::Reasoning, None) => match blocks.last_mut() {
                Some(Block::Thinking { thinking, .. }) => thinking.push_str(text),
                _ => blocks.push(Block::thinking(text)),
            },
            (Channel::Answer | Channel::ToolCall, None) => match blocks.last_mut() {
                Some(Block::Text { text: said }) => said.push_str(text),
                _ => blocks.push(Block::text(text)),
            },
        }
    }
    blocks
}

/// A call's id as this API spells it.
fn call_id(id: &str) -> String {
    let [own, prefix] = CALL_PREFIXES;
    format!("{prefix}{}", id.strip_prefix(own).unwrap_or(id))
}

impl Block {
    fn thinking(thinking: &str) -> Self {
        Block::Thinking {
            thinking: thinking.to_owned(),
            signature: "",
        }
    }

    fn text(text: &str) -> Self {
        Block::Text {
            text: text.to_owned(),
        }
    }
}

impl Message {
    /// The message before anything of it is written.
    fn empty(&self) -> Document<'_> {
        Document {
            id: &self.id,
            r#type: "message",
            role: "assistant",
            model: &self.model,
            content: Vec::new(),
            stop: Stop::default(),
            usage: Usage::before(self.prompt_tokens),
            record: Record::new(self.seed, None),
        }
    }

    /// Starts a block of a stream that begins as `block`, after the end of the one before it.
    fn start_block(&mut self, kind: Kind, block: Block, frames: &mut Frames) {
        self.stop_block(frames);
        self.open = Some(kind);
        let event = Event::ContentBlockStart {
            index: self.n_closed,
            content_block: block,
        };
        event.send(frames);
    }

    /// Starts a block of text or reasoning unless one is open.
    fn ensure_block(&mut self, kind: Kind, block: fn(&str) -> Block, frames: &mut Frames) {
        if self.open != Some(kind) {
            self.start_block(kind, block(""), frames);
        }
    }

    /// Writes a piece of the open block.
    fn delta(&self, delta: Delta<'_>, frames: &mut Frames) {
        let event = Event::ContentBlockDelta {
            index: self.n_closed,
            delta,
        };
        event.send(frames);
    }

    /// Ends the open block, if there is one.
    fn stop_block(&mut self, frames: &mut Frames) {
        let Some(kind) = self.open.take() else { return };
        if kind == Kind::Thinking {
            self.delta(Delta::Signature { signature: "" }, frames);
        }
        let index = self.n_closed;
        Event::ContentBlockStop { index }.send(frames);
        self.n_closed += 1;
    }

    /// Writes what a segment says of a call, and a piece of its arguments.
    fn call(&mut self, part: &CallPart, partial_json: &str, frames: &mut Frames) {
        let kind = Kind::Call(part.index);
        if let Some(begin) = &part.begin {
            let block = Block::ToolUse {
                id: call_id(&begin.id),
                name: begin.name.clone(),
                input: Value::Object(Map::new()),
            };
            self.start_block(kind, block, frames);
        }
        if !partial_json.is_empty() {
            self.delta(Delta::InputJson { partial_json }, frames);
        }
        if part.end.is_some() && self.open == Some(kind) {
            self.stop_block(frames);
        }
    }
}

impl StreamFormat for Message {
    fn open(&mut self, frames: &mut Frames) {
        let message = self.empty();
        Event::MessageStart { message }.send(frames);
    }

    fn text(&mut self, piece: &Piece, frames: &mut Frames) {
        for segment in piece.segments() {
            let text = segment.text.as_str();
            match (segment.channel, &segment.call) {
                (_, Some(part)) => self.call(part, text, frames),
                _ if text.is_empty() => {}
                (Channel::Reasoning, None) => {
                    self.ensure_block(Kind::Thinking, Block::thinking, frames);
                    self.delta(Delta::Thinking { thinking: text }, frames);
                }
                (Channel::Answer | Channel::ToolCall, None) => {
                    self.ensure_block(Kind::Text, Block::text, frames);
                    self.delta(Delta::Text { text }, frames);
                }
            }
        }
    }

    fn quiet(&mut self, _: Progress, frames: &mut Frames) {
        Event::Ping.send(frames);
    }

    fn end(&mut self, outcome: &RequestOutcome, frames: &mut Frames) {
        self.stop_block(frames);
        let event = Event::MessageDelta {
            delta: Stop::new(outcome, self.max_tokens),
            usage: Usage::new(outcome),
            record: Record::new(self.seed, Some(outcome)),
        };
        event.send(frames);
        Event::MessageStop.send(frames);
    }

    fn refuse(error: &ApiError, frames: &mut Frames) {
        frames.event("error", &ErrorDocument::new(error, None));
    }
}
