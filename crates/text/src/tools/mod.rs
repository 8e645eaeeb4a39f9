//! Tool calls: tells the calls that a model writes from its answer, while the text streams.
//!
//! ```text
//! Gemma 4    <|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>
//! Qwen 3.5   <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>
//! Hermes     <tool_call>\n{"name": "NAME", "arguments": {…}}\n</tool_call>
//! ```
//!
//! Whatever the wire form, a call comes out as a name, which is said once, and as pieces of
//! JSON text that make up one object: the arguments. A piece leaves as soon as it is certain.
//! Strings stream; a value whose type is not known before its end comes whole.
//!
//! The marks around a call are tokens in nearly all vocabularies. Where they are, ids decide
//! and not characters, as in [`crate::reasoning`]; where they are not, the characters do.
//!
//! **Nothing is lost.** What is not a call in the model's form is answer text, its marks
//! spelled out. A call can break after its name was said; then [`ToolEvent::Broken`] takes it
//! back, and its whole wire form follows as text. A call whose arguments are complete counts,
//! even if its closing mark is missing.
//!
//! **White space around a call belongs to the call**: templates write it themselves when a
//! turn comes back in a conversation. Between a call and text after it, white space stays if
//! text came before as well.
//!
//! Every parser takes one character at a time and looks at none twice but for a tag's length,
//! so the work is linear in the text. Nothing here keeps a model to a form: it may write what
//! it likes, unless its choices follow a [`grammar`].

mod gemma;
pub mod grammar;
mod hermes;
mod json;
mod qwen;
mod schema;
#[cfg(test)]
mod tests;

use std::fmt::Debug;
use std::sync::Arc;

use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;

pub use schema::Tools;

/// Most bytes of a tool's name in a call; what is longer is answer text.
pub const NAME_BYTES_MAX: usize = 256;
/// Deepest nesting of a call's arguments; what nests deeper is answer text.
pub const DEPTH_MAX: usize = 64;

/// A wire form of calls.
#[derive(Debug)]
struct Format {
    /// The form's name in messages and tests.
    name: &'static str,
    /// The mark before a call.
    open: &'static str,
    /// The mark after a call.
    close: &'static str,
    /// The mark around a string in the arguments; `None` if the form has none.
    quote: Option<&'static str>,
    /// Whether the vocabulary must have the marks as tokens.
    needs_tokens: bool,
    /// A text that a chat template in this form has; empty if any template will do.
    hint: &'static str,
    /// Starts the parser of what stands between the marks.
    body: fn(&Arc<Tools>) -> Box<dyn Body>,
}

/// Every known wire form. The first that a model's vocabulary and template fit is the model's;
/// the last fits all.
const FORMATS: &[Format] = &[
    Format {
        name: "gemma4",
        open: "<|tool_call>",
        close: "<tool_call|>",
        quote: Some("<|\"|>"),
        needs_tokens: true,
        hint: "",
        body: |_| Box::new(gemma::Gemma::default()),
    },
    Format {
        name: "qwen3.5",
        open: "<tool_call>",
        close: "</tool_call>",
        quote: None,
        needs_tokens: false,
        hint: "<function=",
        body: |tools| Box::new(qwen::Qwen::new(tools.clone())),
    },
    Format {
        name: "hermes",
        open: "<tool_call>",
        close: "</tool_call>",
        quote: None,
        needs_tokens: false,
        hint: "",
        body: |_| Box::new(hermes::Hermes::default()),
    },
];

/// A mark of a wire form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolMark {
    /// A call begins.
    Open,
    /// A call ends.
    Close,
    /// A string in the arguments begins or ends.
    Quote,
}

impl ToolMark {
    /// Every mark.
    pub const ALL: [ToolMark; 3] = [ToolMark::Open, ToolMark::Close, ToolMark::Quote];
}

/// The wire form in which a model writes calls.
#[derive(Clone, Copy, Debug)]
pub struct ToolFormat {
    format: &'static Format,
    /// Token ids of the opening mark, the closing mark and the quote; `None` if the marks are
    /// characters.
    ids: Option<[Option<u32>; 3]>,
}

impl ToolFormat {
    /// Finds the form of a model by its vocabulary and chat template; `None` if the template
    /// knows no tools.
    pub fn new(tokenizer: &Tokenizer, template: &ChatTemplate) -> Option<Self> {
        let says = |text: &str| template.sources().any(|source| source.contains(text));
        if !says("tools") {
            return None;
        }
        FORMATS.iter().find_map(|format| {
            let found = ToolFormat { format, ids: None };
            let ids = ToolMark::ALL.map(|mark| tokenizer.id_of(found.spelling(mark)?));
            let needed = [true, true, format.quote.is_some()];
            let has_tokens = (0..3).all(|i| ids[i].is_some() || !needed[i]);
            let fits = (has_tokens || !format.needs_tokens) && says(format.hint);
            fits.then_some(ToolFormat {
                format,
                ids: has_tokens.then_some(ids),
            })
        })
    }

    /// The form called `name`, with marks of characters: for text that no vocabulary has split.
    pub fn named(name: &str) -> Option<Self> {
        let format = FORMATS.iter().find(|format| format.name == name)?;
        Some(ToolFormat { format, ids: None })
    }

    /// The names of every known form.
    pub fn names() -> impl Iterator<Item = &'static str> {
        FORMATS.iter().map(|format| format.name)
    }

    /// The form's name.
    pub fn name(&self) -> &'static str {
        self.format.name
    }

    /// How `mark` is spelled; `None` if the form does not have it.
    pub fn spelling(&self, mark: ToolMark) -> Option<&'static str> {
        match mark {
            ToolMark::Open => Some(self.format.open),
            ToolMark::Close => Some(self.format.close),
            ToolMark::Quote => self.format.quote,
        }
    }

    /// The token id of `mark`; `None` if the mark is characters or the form does not have it.
    pub fn id(&self, mark: ToolMark) -> Option<u32> {
        let at = ToolMark::ALL.iter().position(|&m| m == mark)?;
        self.ids?[at]
    }

    /// The mark that `token` is.
    pub fn mark_of(&self, token: u32) -> Option<ToolMark> {
        let at = self.ids?.iter().position(|&id| id == Some(token))?;
        Some(ToolMark::ALL[at])
    }

    /// The mark that `text` begins with, and whether `text` is the beginning of one.
    fn spelled_at(&self, text: &str) -> (Option<ToolMark>, bool) {
        let spelled = |mark| self.spelling(mark).unwrap_or("\0");
        let mark = ToolMark::ALL
            .into_iter()
            .find(|&m| text.starts_with(spelled(m)));
        let begins = ToolMark::ALL
            .into_iter()
            .any(|m| spelled(m).starts_with(text));
        (mark, begins)
    }
}

/// What happens in a text that may have calls, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolEvent<'a> {
    /// Text of the answer.
    Text(&'a str),
    /// A call begins. Calls are numbered from 0 as they begin.
    Begin {
        /// The number of the call.
        index: usize,
        /// The name of the tool.
        name: &'a str,
    },
    /// The next piece of a call's arguments. All of a call's make up one JSON object.
    Arguments {
        /// The number of the call.
        index: usize,
        /// A piece of JSON text, not empty.
        json: &'a str,
    },
    /// A call is whole.
    End {
        /// The number of the call.
        index: usize,
        /// What the model wrote for the call, with its marks and the white space before.
        wire: &'a str,
    },
    /// A call that has begun is none after all: what the model wrote follows as text.
    Broken {
        /// The number of the call.
        index: usize,
    },
}

/// One character or mark between the marks of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Symbol {
    Char(char),
    Quote,
}

/// What a symbol did to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The call goes on.
    More,
    /// The call's arguments are complete, with this symbol.
    Whole,
    /// The call is none: this symbol does not fit.
    Broken,
}

/// The parser of what stands between the marks of one call.
trait Body: Debug + Send {
    /// Takes the next symbol.
    fn push(&mut self, symbol: Symbol, said: &mut Said) -> Step;

    /// Whether the call is whole if it is closed here, without an ending of its own; takes
    /// what is left.
    fn close(&mut self, said: &mut Said) -> bool {
        let _ = said;
        false
    }
}

/// What a parser has found out and nobody has heard yet.
#[derive(Clone, Debug, Default)]
struct Said {
    /// The name of the tool, once it is known.
    name: Option<String>,
    /// JSON text of the arguments.
    json: String,
}

/// A call that is being written.
#[derive(Debug)]
struct Call {
    body: Box<dyn Body>,
    said: Said,
    /// The number of the call, once it has begun.
    index: Option<usize>,
    /// Whether the arguments are complete, so that only the closing mark is missing.
    is_whole: bool,
    /// Bytes of `wire` that are white space before the opening mark.
    n_blank: usize,
    /// What the model has written for the call.
    wire: String,
}

/// Tells the calls of one reply from its answer.
///
/// ```
/// use std::sync::Arc;
/// use text::tools::{ToolCalls, ToolEvent, ToolFormat, Tools};
///
/// let format = ToolFormat::named("hermes").unwrap();
/// let mut calls = ToolCalls::new(format, Arc::new(Tools::default()));
/// let (mut answer, mut arguments) = (String::new(), String::new());
/// for piece in ["Wait.\n<tool_", "call>{\"name\": \"add\", \"argu", "ments\": {\"a\": 1}}</tool_call>"] {
///     calls.push(piece, &mut |event| match event {
///         ToolEvent::Text(text) => answer += text,
///         ToolEvent::Arguments { json, .. } => arguments += json,
///         _ => {}
///     });
/// }
/// assert_eq!((answer.as_str(), arguments.as_str()), ("Wait.", "{\"a\": 1}"));
/// assert_eq!(calls.n_whole(), 1);
/// ```
#[derive(Debug)]
pub struct ToolCalls {
    format: ToolFormat,
    tools: Arc<Tools>,
    call: Option<Call>,
    /// White space that is held back: a call takes it, text writes it.
    blank: String,
    /// The beginning of a mark that is spelled with characters.
    held: String,
    /// Whether text came already.
    has_text: bool,
    /// Whether a call came since the last text.
    is_after_call: bool,
    n_begun: usize,
    n_whole: usize,
    /// Calls of the reply, at most.
    most: usize,
}

impl ToolCalls {
    /// Starts a reply in which the model may call `tools`.
    pub fn new(format: ToolFormat, tools: Arc<Tools>) -> Self {
        ToolCalls::up_to(usize::MAX, format, tools)
    }

    /// Starts a reply in which the model may call `tools`, `most` times. What comes after the
    /// last call is passed over.
    pub fn up_to(most: usize, format: ToolFormat, tools: Arc<Tools>) -> Self {
        ToolCalls {
            format,
            tools,
            call: None,
            blank: String::new(),
            held: String::new(),
            has_text: false,
            is_after_call: false,
            n_begun: 0,
            n_whole: 0,
            most,
        }
    }

    /// Whether the reply has all the calls that it may have.
    pub fn is_full(&self) -> bool {
        self.n_whole >= self.most
    }

    /// Calls that are whole by now.
    pub fn n_whole(&self) -> usize {
        self.n_whole
    }

    /// Whether what comes next is part of a call.
    pub fn is_open(&self) -> bool {
        self.call.is_some()
    }

    /// The number of the call that is being written, once its name was said.
    pub fn index(&self) -> Option<usize> {
        self.call.as_ref()?.index
    }

    /// The mark that `token` is here. A mark is not text: [`turn`](Self::turn) takes it.
    pub fn mark(&self, token: u32) -> Option<ToolMark> {
        let mark = self.format.mark_of(token)?;
        (mark == ToolMark::Open || self.call.is_some()).then_some(mark)
    }

    /// How `token` is spelled if it is a mark, wherever it stands.
    pub fn spelling_of(&self, token: u32) -> Option<&'static str> {
        self.format.spelling(self.format.mark_of(token)?)
    }

    /// How `mark` is spelled.
    pub fn spelling(&self, mark: ToolMark) -> &'static str {
        self.format.spelling(mark).unwrap_or_default()
    }

    /// Takes text that no mark interrupts, and passes on what is clear by now, in order.
    pub fn push(&mut self, text: &str, emit: &mut dyn FnMut(ToolEvent<'_>)) {
        if self.format.ids.is_some() {
            self.take(text, emit);
            return;
        }
        let whole = std::mem::take(&mut self.held) + text;
        let mut rest = whole.as_str();
        // Every mark begins with this character.
        let mut from = 0;
        while let Some(at) = rest[from..].find('<').map(|at| from + at) {
            match self.format.spelled_at(&rest[at..]) {
                (Some(mark), _) => {
                    self.take(&rest[..at], emit);
                    self.turn(mark, emit);
                    rest = &rest[at + self.spelling(mark).len()..];
                    from = 0;
                }
                (None, true) => {
                    self.held = rest[at..].to_owned();
                    rest = &rest[..at];
                    break;
                }
                (None, false) => from = at + 1,
            }
        }
        self.take(rest, emit);
    }

    /// Takes a mark.
    pub fn turn(&mut self, mark: ToolMark, emit: &mut dyn FnMut(ToolEvent<'_>)) {
        if self.call.as_ref().is_some_and(|call| call.is_whole) && mark != ToolMark::Close {
            self.end(emit);
        }
        if self.is_full() {
            return;
        }
        match (mark, self.call.is_some()) {
            (ToolMark::Open, is_open) => {
                if is_open {
                    self.give_up("", emit);
                }
                let wire = std::mem::take(&mut self.blank);
                self.call = Some(Call {
                    body: (self.format.format.body)(&self.tools),
                    said: Said::default(),
                    index: None,
                    is_whole: false,
                    n_blank: wire.len(),
                    wire: wire + self.format.format.open,
                });
            }
            (ToolMark::Close, true) => {
                let close = self.format.format.close;
                let call = self.call.as_mut().expect("one is open");
                if call.is_whole || call.body.close(&mut call.said) {
                    call.wire.push_str(close);
                    self.say(emit);
                    self.end(emit);
                } else {
                    self.give_up(close, emit);
                }
            }
            (ToolMark::Quote, true) => {
                let quote = self.spelling(mark);
                let call = self.call.as_mut().expect("one is open");
                match call.body.push(Symbol::Quote, &mut call.said) {
                    Step::Broken => self.give_up(quote, emit),
                    step => {
                        call.wire.push_str(quote);
                        call.is_whole = step == Step::Whole;
                        self.say(emit);
                    }
                }
            }
            (ToolMark::Close | ToolMark::Quote, false) => self.write(self.spelling(mark), emit),
        }
    }

    /// Ends the reply: what was held back is said.
    pub fn finish(&mut self, emit: &mut dyn FnMut(ToolEvent<'_>)) {
        let held = std::mem::take(&mut self.held);
        self.take(&held, emit);
        if self.is_full() {
            return;
        }
        match &self.call {
            Some(call) if call.is_whole => self.end(emit),
            Some(_) => self.give_up("", emit),
            None => {}
        }
        if !self.is_after_call && !self.blank.is_empty() {
            emit(ToolEvent::Text(&std::mem::take(&mut self.blank)));
        }
    }

    /// Takes text without marks.
    fn take(&mut self, text: &str, emit: &mut dyn FnMut(ToolEvent<'_>)) {
        let Some(call) = &mut self.call else {
            return self.write(text, emit);
        };
        for (at, c) in text.char_indices() {
            let step = match call.is_whole {
                true if c.is_whitespace() => Step::Whole,
                true => {
                    self.say(emit);
                    self.end(emit);
                    return self.write(&text[at..], emit);
                }
                false => call.body.push(Symbol::Char(c), &mut call.said),
            };
            match step {
                Step::Broken => {
                    self.say(emit);
                    self.give_up("", emit);
                    return self.write(&text[at..], emit);
                }
                step => {
                    call.wire.push(c);
                    call.is_whole = step == Step::Whole;
                }
            }
        }
        self.say(emit);
    }

    /// Passes on what is clear of the call that is being written.
    fn say(&mut self, emit: &mut dyn FnMut(ToolEvent<'_>)) {
        let Some(call) = &mut self.call else { return };
        if let Some(name) = call.said.name.take() {
            call.index = Some(self.n_begun);
            self.n_begun += 1;
            let index = self.n_begun - 1;
            emit(ToolEvent::Begin { index, name: &name });
        }
        if let Some(index) = call.index
            && !call.said.json.is_empty()
        {
            let json = std::mem::take(&mut call.said.json);
            emit(ToolEvent::Arguments { index, json: &json });
        }
    }

    /// Ends the call that is being written: it is whole.
    fn end(&mut self, emit: &mut dyn FnMut(ToolEvent<'_>)) {
        let Some(call) = self.call.take() else { return };
        let index = call.index.expect("a whole call has begun");
        // White space after the arguments is white space after the call.
        let wire = call.wire.trim_end();
        emit(ToolEvent::End { index, wire });
        self.blank = call.wire[wire.len()..].to_owned();
        self.is_after_call = true;
        self.n_whole += 1;
    }

    /// Ends the call that is being written: it is none, and what was written is text, with
    /// `rest` after it.
    fn give_up(&mut self, rest: &str, emit: &mut dyn FnMut(ToolEvent<'_>)) {
        let Some(call) = self.call.take() else { return };
        if let Some(index) = call.index {
            emit(ToolEvent::Broken { index });
        }
        let (blank, wire) = call.wire.split_at(call.n_blank);
        self.blank.push_str(blank);
        self.write(wire, emit);
        self.write(rest, emit);
    }

    /// Writes text of the answer; white space at its end is held back.
    fn write(&mut self, text: &str, emit: &mut dyn FnMut(ToolEvent<'_>)) {
        if self.is_full() {
            return;
        }
        let written = text.trim_end();
        if !written.is_empty() {
            let mut blank = std::mem::take(&mut self.blank);
            blank.push_str(written);
            let mut text = blank.as_str();
            if self.is_after_call && !self.has_text {
                // Spaces may be the indentation of code.
                text = text.trim_start_matches('\n');
            }
            self.is_after_call = false;
            self.has_text = true;
            emit(ToolEvent::Text(text));
        }
        self.blank.push_str(&text[written.len()..]);
    }
}

/// Whether `name` can be the name of a tool in every wire form.
pub fn is_tool_name(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len()) && name.chars().all(is_name)
}

/// Whether `c` may stand in the name of a tool.
fn is_name(c: char) -> bool {
    !c.is_whitespace() && !c.is_control() && !"<>{}()[]\"'`,".contains(c)
}
