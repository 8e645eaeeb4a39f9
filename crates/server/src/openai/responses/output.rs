//! What a model writes becomes items, and the events of a stream that tell of them.
//!
//! ```text
//! reasoning   output_item.added · content_part.added · reasoning_text.delta* · reasoning_text.done · content_part.done · output_item.done
//! answer      output_item.added · content_part.added · output_text.delta* · output_text.done · content_part.done · output_item.done
//! call        output_item.added · function_call_arguments.delta* · function_call_arguments.done · output_item.done
//! ```
//!
//! One item follows another, in the order in which they are written. Whole answers go the same
//! way with nobody to tell, so they have the same items.
//!
//! A call that breaks is taken back: its item ends as `incomplete`, without a last word on its
//! arguments, and is not in the response. What the model wrote for it follows as text.

use engine::{CallEnd, CallPart, Channel};
use serde::Serialize;
use serde_json::{Map, Value};
use text::Tokenizer;

use super::items::SEALED;
use crate::generation::Piece;
use crate::ids;
use crate::openai::logprobs::Entry;
use crate::sse::Frames;

/// How far the writing of an item is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Status {
    InProgress,
    Completed,
    Incomplete,
}

/// An item of a response.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Item {
    /// What the model thought before it answered.
    Reasoning {
        id: String,
        /// Always empty: nobody writes summaries.
        summary: [(); 0],
        content: Vec<Part>,
        #[serde(skip_serializing_if = "Option::is_none")]
        encrypted_content: Option<String>,
        status: Status,
    },
    /// What the model answered.
    Message {
        id: String,
        role: &'static str,
        content: Vec<Part>,
        status: Status,
    },
    /// A call of a tool.
    FunctionCall {
        id: String,
        call_id: String,
        name: String,
        arguments: String,
        status: Status,
    },
}

/// The text of an item.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Part {
    ReasoningText {
        text: String,
    },
    OutputText {
        text: String,
        annotations: [(); 0],
        logprobs: Vec<Entry<'static>>,
    },
}

impl Item {
    fn id(&self) -> &str {
        match self {
            Item::Reasoning { id, .. }
            | Item::Message { id, .. }
            | Item::FunctionCall { id, .. } => id,
        }
    }

    fn set_status(&mut self, new: Status) {
        match self {
            Item::Reasoning { status, .. }
            | Item::Message { status, .. }
            | Item::FunctionCall { status, .. } => *status = new,
        }
    }

    /// The part that text is added to.
    fn part_mut(&mut self) -> Option<&mut Part> {
        match self {
            Item::Reasoning { content, .. } | Item::Message { content, .. } => content.last_mut(),
            Item::FunctionCall { .. } => None,
        }
    }

    /// The item as a conversation that goes on from it has it.
    pub(super) fn for_store(&self) -> Map<String, Value> {
        let mut item = self.clone();
        if let Some(Part::OutputText { logprobs, .. }) = item.part_mut() {
            logprobs.clear();
        }
        match serde_json::to_value(&item) {
            Ok(Value::Object(map)) => map,
            _ => unreachable!("an item is an object"),
        }
    }
}

/// Where the events of a stream go, and the number of the next one; nowhere for a whole answer.
pub(super) struct Events<'a>(Option<(&'a mut Frames, &'a mut u64)>);

#[derive(Serialize)]
struct Event<'a, T> {
    r#type: &'a str,
    sequence_number: u64,
    #[serde(flatten)]
    body: T,
}

impl<'a> Events<'a> {
    /// Events that nobody reads.
    pub(super) fn unread() -> Self {
        Events(None)
    }

    /// Events that are added to `frames`, numbered from `next`.
    pub(super) fn into_frames(frames: &'a mut Frames, next: &'a mut u64) -> Self {
        Events(Some((frames, next)))
    }

    /// Sends an event.
    pub(super) fn send(&mut self, name: &str, body: impl Serialize) {
        if let Some((frames, next)) = &mut self.0 {
            let event = Event {
                r#type: name,
                sequence_number: **next,
                body,
            };
            frames.event(name, &event);
            **next += 1;
        }
    }
}

#[derive(Serialize)]
struct OfItem<'a> {
    output_index: usize,
    item: &'a Item,
}

#[derive(Serialize)]
struct OfPart<'a> {
    item_id: &'a str,
    output_index: usize,
    content_index: usize,
    part: &'a Part,
}

#[derive(Serialize)]
struct OfText<'a> {
    item_id: &'a str,
    output_index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    arguments: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<&'a [Entry<'static>]>,
}

/// An answer on its way to become items.
#[derive(Default)]
pub(super) struct Output {
    /// The items so far; the last one may still be written.
    pub(super) items: Vec<Item>,
    is_open: bool,
    /// The number of the call that is being written.
    call: usize,
    /// The place of the next item in the stream, which also has calls that were taken back.
    next_index: usize,
    /// Log-probabilities of tokens that have left no text yet.
    waiting: Vec<Entry<'static>>,
    has_sealed_reasoning: bool,
}

impl Output {
    /// Nothing written yet; `has_sealed_reasoning` says whether reasoning comes in the field
    /// that other servers encrypt it in, too.
    pub(super) fn new(has_sealed_reasoning: bool) -> Self {
        Output {
            has_sealed_reasoning,
            ..Output::default()
        }
    }

    /// Takes the next piece.
    pub(super) fn take(&mut self, piece: &Piece, tokenizer: &Tokenizer, events: &mut Events<'_>) {
        for segment in piece.segments() {
            match (&segment.call, segment.channel) {
                (Some(call), _) => self.call(call, &segment.text, events),
                (None, Channel::Answer) => {
                    let judged = segment.tokens.iter().filter_map(|token| {
                        let logprobs = token.logprobs.as_ref()?;
                        Some(Entry::new(token, logprobs, tokenizer).into_owned())
                    });
                    self.waiting.extend(judged);
                    self.write(Channel::Answer, &segment.text, events);
                }
                (None, channel) => self.write(channel, &segment.text, events),
            }
        }
    }

    /// Ends the answer, which is cut off if the status says so.
    pub(super) fn finish(&mut self, status: Status, events: &mut Events<'_>) {
        let says_nothing = !self
            .items
            .iter()
            .any(|item| !matches!(item, Item::Reasoning { .. }));
        if says_nothing && status == Status::Completed {
            self.close(Status::Completed, events);
            self.open(message(), events);
        }
        self.close(status, events);
    }

    /// The text of the answer, without reasoning and calls.
    pub(super) fn text(&self) -> String {
        let parts = self.items.iter().filter_map(|item| match item {
            Item::Message { content, .. } => Some(content),
            _ => None,
        });
        let texts = parts.flatten().filter_map(|part| match part {
            Part::OutputText { text, .. } => Some(text.as_str()),
            Part::ReasoningText { .. } => None,
        });
        texts.collect()
    }

    fn is_in(&self, channel: Channel) -> bool {
        let last = self.items.last().filter(|_| self.is_open);
        match channel {
            Channel::Answer => matches!(last, Some(Item::Message { .. })),
            Channel::Reasoning => matches!(last, Some(Item::Reasoning { .. })),
            Channel::ToolCall => matches!(last, Some(Item::FunctionCall { .. })),
        }
    }

    fn write(&mut self, channel: Channel, text: &str, events: &mut Events<'_>) {
        if text.is_empty() || channel == Channel::ToolCall {
            return;
        }
        if !self.is_in(channel) {
            self.close(Status::Completed, events);
            let item = match channel {
                Channel::Reasoning => reasoning(),
                _ => message(),
            };
            self.open(item, events);
        }
        let (place, waiting) = (self.place(), std::mem::take(&mut self.waiting));
        let item = self.items.last_mut().expect("one is open");
        let (name, logprobs) = match item.part_mut().expect("texts have a part") {
            Part::ReasoningText { text: all } => {
                all.push_str(text);
                self.waiting = waiting;
                ("response.reasoning_text.delta", None)
            }
            Part::OutputText {
                text: all,
                logprobs,
                ..
            } => {
                all.push_str(text);
                let n_before = logprobs.len();
                logprobs.extend(waiting);
                ("response.output_text.delta", Some(n_before))
            }
        };
        let new = match (logprobs, part_of(item)) {
            (Some(n_before), Some(Part::OutputText { logprobs, .. })) => {
                Some(&logprobs[n_before..])
            }
            _ => None,
        };
        let body = OfText {
            delta: Some(text),
            logprobs: new,
            ..OfText::new(item, place, Some(0))
        };
        events.send(name, body);
    }

    fn call(&mut self, call: &CallPart, arguments: &str, events: &mut Events<'_>) {
        if let Some(begin) = &call.begin {
            self.close(Status::Completed, events);
            self.call = call.index;
            let item = Item::FunctionCall {
                id: format!("fc_{}", ids::unique()),
                call_id: begin.id.clone(),
                name: begin.name.clone(),
                arguments: String::new(),
                status: Status::InProgress,
            };
            self.open(item, events);
        }
        if !self.is_in(Channel::ToolCall) || self.call != call.index {
            return;
        }
        let place = self.place();
        let item = self.items.last_mut().expect("one is open");
        if let Item::FunctionCall { arguments: all, .. } = item
            && !arguments.is_empty()
        {
            all.push_str(arguments);
            let body = OfText {
                delta: Some(arguments),
                ..OfText::new(item, place, None)
            };
            events.send("response.function_call_arguments.delta", body);
        }
        match call.end {
            None => {}
            Some(CallEnd::Whole) => self.close(Status::Completed, events),
            Some(CallEnd::Broken) => {
                self.close(Status::Incomplete, events);
                self.items.pop();
            }
        }
    }

    /// The place of the open item in the stream.
    fn place(&self) -> usize {
        self.next_index - 1
    }

    fn open(&mut self, item: Item, events: &mut Events<'_>) {
        let (place, part) = (self.next_index, new_part(&item));
        self.next_index += 1;
        self.is_open = true;
        self.items.push(item);
        let item = self.items.last_mut().expect("one was pushed");
        let body = OfItem {
            output_index: place,
            item,
        };
        events.send("response.output_item.added", body);
        if let (Item::Reasoning { content, .. } | Item::Message { content, .. }, Some(part)) =
            (&mut *item, part)
        {
            content.push(part);
        }
        if let Some(part) = part_of(item) {
            events.send(
                "response.content_part.added",
                OfPart::new(item, place, part),
            );
        }
    }

    fn close(&mut self, status: Status, events: &mut Events<'_>) {
        if !std::mem::take(&mut self.is_open) {
            return;
        }
        let place = self.place();
        let item = self.items.last_mut().expect("one is open");
        item.set_status(status);
        if let Item::Reasoning {
            content,
            encrypted_content,
            ..
        } = item
            && let (true, [Part::ReasoningText { text }]) =
                (self.has_sealed_reasoning, &content[..])
        {
            *encrypted_content = Some(format!("{SEALED}{text}"));
        }
        let item = &*item;
        match (item, part_of(item)) {
            (_, Some(Part::ReasoningText { text })) => {
                let body = OfText {
                    text: Some(text),
                    ..OfText::new(item, place, Some(0))
                };
                events.send("response.reasoning_text.done", body);
            }
            (_, Some(Part::OutputText { text, logprobs, .. })) => {
                let body = OfText {
                    text: Some(text),
                    logprobs: Some(logprobs),
                    ..OfText::new(item, place, Some(0))
                };
                events.send("response.output_text.done", body);
            }
            (
                Item::FunctionCall {
                    name, arguments, ..
                },
                _,
            ) if status == Status::Completed => {
                let body = OfText {
                    name: Some(name),
                    arguments: Some(arguments),
                    ..OfText::new(item, place, None)
                };
                events.send("response.function_call_arguments.done", body);
            }
            _ => {}
        }
        if let Some(part) = part_of(item) {
            events.send("response.content_part.done", OfPart::new(item, place, part));
        }
        let body = OfItem {
            output_index: place,
            item,
        };
        events.send("response.output_item.done", body);
    }
}

impl<'a> OfText<'a> {
    fn new(item: &'a Item, output_index: usize, content_index: Option<usize>) -> Self {
        OfText {
            item_id: item.id(),
            output_index,
            content_index,
            delta: None,
            text: None,
            name: None,
            arguments: None,
            logprobs: None,
        }
    }
}

impl<'a> OfPart<'a> {
    fn new(item: &'a Item, output_index: usize, part: &'a Part) -> Self {
        OfPart {
            item_id: item.id(),
            output_index,
            content_index: 0,
            part,
        }
    }
}

fn part_of(item: &Item) -> Option<&Part> {
    match item {
        Item::Reasoning { content, .. } | Item::Message { content, .. } => content.last(),
        Item::FunctionCall { .. } => None,
    }
}

/// The empty part that a new item begins with.
fn new_part(item: &Item) -> Option<Part> {
    match item {
        Item::Reasoning { .. } => Some(Part::ReasoningText {
            text: String::new(),
        }),
        Item::Message { .. } => Some(Part::OutputText {
            text: String::new(),
            annotations: [],
            logprobs: Vec::new(),
        }),
        Item::FunctionCall { .. } => None,
    }
}

fn reasoning() -> Item {
    Item::Reasoning {
        id: format!("rs_{}", ids::unique()),
        summary: [],
        content: Vec::new(),
        encrypted_content: None,
        status: Status::InProgress,
    }
}

fn message() -> Item {
    Item::Message {
        id: format!("msg_{}", ids::unique()),
        role: "assistant",
        content: Vec::new(),
        status: Status::InProgress,
    }
}
