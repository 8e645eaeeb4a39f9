//! Text inside messages never becomes control tokens.
//!
//! A tokenizer reads `<|im_end|>` as one token wherever it stands, so whoever writes
//! that into a message could end a turn and begin another. What a client sends is
//! therefore *broken* before the template sees it, and mended after the prompt was cut:
//!
//! 1. In every string (contents, reasoning, names, tool definitions, calls, results,
//!    template arguments) the first character of each spelling of a control token is
//!    replaced by a private one that occurs nowhere else in the request or the template.
//! 2. The template is rendered. One character stands for one, so trimming, slicing,
//!    splitting, changing case, escaping and concatenating keep the replacement.
//! 3. The prompt is cut at control tokens. A broken spelling is none.
//! 4. The characters are put back, and what lies between control tokens is encoded.
//!
//! Text that spells no control token is not touched: the template sees it as it is, and
//! the prompt is encoded as a whole, so honest conversations have the ids that they had
//! without all this. In a broken conversation, too, only the cuts differ: normalizer,
//! pre-tokenizer and merges see one text from control token to control token.
//!
//! Pieces of a spelling are broken as well where they could be completed: a string that
//! ends with the beginning of a control token (`<|im_` before `end|>` of the next
//! string), and one that goes on with what the template has begun (`think>` after a
//! template's `'<' + key`). Letters count in either case, since templates change it.
//!
//! A template that tests for a control token in a message (`'<tool_call>' in content`,
//! `content.startswith('<tool_response>')`) does not find one: it is text, not a mark.
//! Reasoning that a client sends back inside the content of the model's own message is
//! taken out before, so that a template which splits at `</think>` need not.
//! Spellings of tokens that are not control tokens are found as ever.
//!
//! Control tokens are those that the tokenizer calls special, those that the template
//! spells, and the marks of reasoning. Spellings of letters and digits alone, or of
//! white space, are words and not marks, and stay tokens in messages.
//!
//! A key that begins with a control token, or is the beginning of one, is sorted behind
//! the others where a template sorts keys.
//!
//! Not covered: a template that deletes text out of the middle of a message, so that
//! what is left on both sides becomes a spelling. Roles that the API knows are the
//! template's own words. Plain completions are raw text and no messages: there,
//! spellings are tokens.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Bound;

use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::{Map, Value};

use crate::error::TextError;
use crate::tokenizer::Tokenizer;

/// Roles that a message may have.
const ROLES: &[&str] = &[
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
];
/// The first private character that may stand for another.
const FIRST_PRIVATE: char = '\u{f0000}';

/// The spellings of a model's control tokens.
#[derive(Debug)]
pub(crate) struct Control {
    /// Finds all spellings, in either case.
    spellings: AhoCorasick,
    /// The spellings in lower case.
    lower: BTreeSet<String>,
    /// Bytes of the longest spelling.
    longest: usize,
    /// What completes a spelling that the template begins, in lower case.
    completions: BTreeSet<String>,
    /// Private characters of the template.
    private: HashSet<char>,
    ids: HashSet<u32>,
}

/// What a client sent, without spellings of control tokens.
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) messages: Value,
    pub(crate) tools: Option<Value>,
    pub(crate) extra: Map<String, Value>,
    pub(crate) stand_ins: StandIns,
}

/// Private characters and what they stand for.
#[derive(Debug, Default)]
pub(crate) struct StandIns {
    taken: HashSet<char>,
    of: HashMap<char, char>,
    for_private: HashMap<char, char>,
}

impl StandIns {
    fn replace(&mut self, original: char) -> Result<char, TextError> {
        if let Some(&private) = self.of.get(&original) {
            return Ok(private);
        }
        let free = (FIRST_PRIVATE..=char::MAX).find(|c| !self.taken.contains(c));
        let private = free.ok_or(TextError::Encode {
            reason: "the messages use every private character of Unicode".to_owned(),
        })?;
        self.taken.insert(private);
        self.of.insert(original, private);
        self.for_private.insert(private, original);
        Ok(private)
    }

    /// The character that the stand-in `c` stands for.
    pub(crate) fn original(&self, c: char) -> Option<char> {
        if c < FIRST_PRIVATE {
            return None;
        }
        self.for_private.get(&c).copied()
    }
}

impl Control {
    /// The control tokens of `tokenizer` and a chat template's `sources`.
    pub(crate) fn new<'a>(
        tokenizer: &Tokenizer,
        marks: impl IntoIterator<Item = u32>,
        sources: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, TextError> {
        let sources: Vec<&str> = sources.into_iter().collect();
        let marks: HashSet<u32> = marks.into_iter().collect();
        let mut ids = marks.clone();
        let mut spelled = Vec::new();
        for (id, spelling) in tokenizer.added_spellings() {
            let is_control = tokenizer.is_special(id)
                || marks.contains(&id)
                || sources.iter().any(|source| source.contains(&spelling));
            if is_control && spelling.chars().any(is_mark) {
                ids.insert(id);
                spelled.push(spelling);
            }
        }
        let lower: BTreeSet<String> = spelled.iter().map(|s| s.to_ascii_lowercase()).collect();
        let longest = lower.iter().map(String::len).max().unwrap_or(0);
        let completions = sources
            .iter()
            .flat_map(|source| completions(source, &lower, longest))
            .collect();
        let spellings = AhoCorasick::builder()
            .match_kind(MatchKind::Standard)
            .ascii_case_insensitive(true)
            .build(&lower)
            .map_err(|err| TextError::BadTokenizer {
                reason: err.to_string(),
            })?;
        Ok(Control {
            spellings,
            longest,
            ids,
            lower,
            completions,
            private: sources
                .iter()
                .flat_map(|s| s.chars())
                .filter(|&c| c >= FIRST_PRIVATE)
                .collect(),
        })
    }

    /// What a client sent with broken spellings; none if it has no spelling.
    pub(crate) fn broken(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        extra: &Map<String, Value>,
    ) -> Result<Option<Broken>, TextError> {
        let is_clean = self.is_clean(messages, Keys::Api)
            && tools.is_none_or(|tools| self.is_clean(tools, Keys::Api))
            && extra.values().all(|value| self.is_clean(value, Keys::Api));
        if is_clean {
            return Ok(None);
        }
        let mut stand_ins = StandIns {
            taken: self.private.clone(),
            ..StandIns::default()
        };
        let mut note = |text: &str| {
            let private = text.chars().filter(|&c| c >= FIRST_PRIVATE);
            stand_ins.taken.extend(private);
        };
        each_text(messages, &mut note);
        tools
            .into_iter()
            .for_each(|tools| each_text(tools, &mut note));
        extra.values().for_each(|value| each_text(value, &mut note));
        let s = &mut stand_ins;
        let broken = Broken {
            messages: self.break_value(messages, Keys::Api, s)?,
            tools: tools
                .map(|tools| self.break_value(tools, Keys::Api, s))
                .transpose()?,
            extra: extra
                .iter()
                .map(|(name, value)| Ok((name.clone(), self.break_value(value, Keys::Api, s)?)))
                .collect::<Result<_, TextError>>()?,
            stand_ins: StandIns::default(),
        };
        Ok(Some(Broken {
            stand_ins,
            ..broken
        }))
    }

    /// Whether `id` is a control token.
    pub(crate) fn contains(&self, id: u32) -> bool {
        self.ids.contains(&id)
    }

    fn is_clean(&self, value: &Value, keys: Keys) -> bool {
        match value {
            Value::String(text) => self.breaks(text, true).is_empty(),
            Value::Array(list) => list.iter().all(|value| self.is_clean(value, keys)),
            Value::Object(map) => map.iter().all(|(key, value)| {
                is_known_role(key, value)
                    || self.breaks(key, keys != Keys::Api).is_empty()
                        && self.is_clean(value, keys.under(key))
            }),
            _ => true,
        }
    }

    fn break_value(
        &self,
        value: &Value,
        keys: Keys,
        stand_ins: &mut StandIns,
    ) -> Result<Value, TextError> {
        Ok(match value {
            Value::String(text) => Value::String(self.break_text(text, true, stand_ins)?.into()),
            Value::Array(list) => list
                .iter()
                .map(|value| self.break_value(value, keys, stand_ins))
                .collect::<Result<_, _>>()?,
            Value::Object(map) => {
                let mut out = Map::new();
                for (key, value) in map {
                    let broken = if is_known_role(key, value) {
                        value.clone()
                    } else {
                        self.break_value(value, keys.under(key), stand_ins)?
                    };
                    out.insert(
                        self.break_text(key, keys != Keys::Api, stand_ins)?.into(),
                        broken,
                    );
                }
                Value::Object(out)
            }
            other => other.clone(),
        })
    }

    fn break_text<'t>(
        &self,
        text: &'t str,
        completes: bool,
        stand_ins: &mut StandIns,
    ) -> Result<Cow<'t, str>, TextError> {
        let breaks = self.breaks(text, completes);
        if breaks.is_empty() {
            return Ok(text.into());
        }
        let mut out = String::with_capacity(text.len() + 3 * breaks.len());
        let mut from = 0;
        for at in breaks {
            let original = text[at..].chars().next().unwrap_or_default();
            out.push_str(&text[from..at]);
            out.push(stand_ins.replace(original)?);
            from = at + original.len_utf8();
        }
        out.push_str(&text[from..]);
        Ok(out.into())
    }

    /// Where characters of `text` are to be broken; `completes` if it may stand right
    /// behind what the template writes.
    fn breaks(&self, text: &str, completes: bool) -> BTreeSet<usize> {
        let mut breaks: BTreeSet<usize> = self
            .spellings
            .find_overlapping_iter(text)
            .map(|found| found.start())
            .collect();
        // The beginning of a spelling at the end, which trimming may lay bare.
        let end = text.trim_end();
        for at in (end.len().saturating_sub(self.longest)..end.len())
            .filter(|&at| end.is_char_boundary(at))
        {
            let tail = end[at..].to_ascii_lowercase();
            if tail.chars().any(is_mark) && begins(&self.lower, &tail) {
                breaks.insert(at);
            }
        }
        if completes && !self.completions.is_empty() {
            let start = text.trim_start();
            let at = text.len() - start.len();
            let head: String = start.chars().take(self.longest).collect();
            let head = head.to_ascii_lowercase();
            let completed = (1..=head.len().min(self.longest))
                .filter(|&n| head.is_char_boundary(n))
                .any(|n| self.completions.contains(&head[..n]));
            let whole = head.trim_end();
            if completed || !whole.is_empty() && begins(&self.completions, whole) {
                breaks.insert(at);
            }
        }
        breaks
    }
}

/// Whether one of `spellings` begins with `text`.
fn begins(spellings: &BTreeSet<String>, text: &str) -> bool {
    let mut from = spellings.range::<str, _>((Bound::Included(text), Bound::Unbounded));
    let next = from.next();
    next.is_some_and(|spelling| spelling.starts_with(text))
}

/// Whether `c` is neither of a word nor white space.
fn is_mark(c: char) -> bool {
    !c.is_alphanumeric() && !c.is_whitespace()
}

fn is_known_role(key: &str, value: &Value) -> bool {
    key == "role" && value.as_str().is_some_and(|role| ROLES.contains(&role))
}

/// Who has chosen the keys of an object.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keys {
    /// The API's.
    Api,
    /// The client's, those of objects in it the API's: the properties of a schema.
    Client,
    /// The client's, all the way down: the arguments of a call.
    AllClient,
}

impl Keys {
    /// The keys of what stands under `key`.
    fn under(self, key: &str) -> Self {
        match key {
            _ if self == Keys::AllClient => self,
            "arguments" => Keys::AllClient,
            "properties" if self == Keys::Api => Keys::Client,
            _ => Keys::Api,
        }
    }
}

/// What completes those of `spellings` that a template begins: text that ends before a
/// quotation mark or a tag.
fn completions(source: &str, spellings: &BTreeSet<String>, longest: usize) -> BTreeSet<String> {
    let mut source = source.to_ascii_lowercase();
    // A quotation mark inside a whole spelling, such as `<|"|>`, ends nothing.
    for spelling in spellings.iter().filter(|s| s.contains(['\'', '"', '{'])) {
        source = source.replace(spelling.as_str(), " ");
    }
    let mut begun: BTreeSet<&str> = BTreeSet::new();
    for (end, _) in source.match_indices(['\'', '"', '{']) {
        let written = &source[..end];
        // A tag may trim what stands before it.
        for text in [written, written.trim_end()] {
            let starts = text.len().saturating_sub(longest)..text.len();
            begun.extend(
                starts
                    .filter(|&start| text.is_char_boundary(start))
                    .map(|start| &text[start..])
                    .filter(|tail| tail.chars().any(is_mark) && begins(spellings, tail)),
            );
        }
    }
    let complete = |begun: &&str| {
        let all = spellings.range::<str, _>((Bound::Included(*begun), Bound::Unbounded));
        let n = begun.len();
        let same = all.take_while(move |s| s.as_bytes()[..n.min(s.len())] == begun.as_bytes()[..]);
        same.map(|s| s[n..].to_owned())
            .filter(|rest| !rest.is_empty())
            .collect::<Vec<_>>()
    };
    begun.iter().flat_map(complete).collect()
}

/// Hands every string of `value` to `note`, keys included.
fn each_text(value: &Value, note: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => note(text),
        Value::Array(list) => list.iter().for_each(|value| each_text(value, note)),
        Value::Object(map) => {
            for (key, value) in map {
                note(key);
                each_text(value, note);
            }
        }
        _ => {}
    }
}
