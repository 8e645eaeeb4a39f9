//! Control tokens: what clients write never becomes one.
//!
//! A tokenizer reads `<|im_end|>` as one token wherever it stands, so whoever writes
//! that into a message could end a turn and begin another (prompt injection). Spellings
//! of control tokens in a request are therefore escaped before the template runs, and
//! unescaped when the prompt is encoded:
//!
//! 1. In every string (contents, reasoning, names, tool definitions, calls, results,
//!    template arguments) the first character of each spelling of a control token is
//!    replaced by a placeholder: a private-use character of Unicode that occurs nowhere
//!    else in the request or the template.
//! 2. The template is rendered. One character stands for one, so trimming, slicing,
//!    splitting, changing case, HTML escaping and concatenating keep the placeholder.
//! 3. The prompt is split at control tokens. An escaped spelling is not one.
//! 4. The characters are put back, and what lies between control tokens is encoded.
//!
//! A request that spells no control token is not changed: the template sees it as it is,
//! and the prompt is encoded as a whole, to the same ids as without escaping. In an
//! escaped request only the splits differ: normalizer, pre-tokenizer and merges see one
//! text from control token to control token.
//!
//! Parts of a spelling are escaped as well where they could be completed: a string that
//! ends with the beginning of a control token (`<|im_` before `end|>` of the next
//! string), and one that goes on with what the template has begun (`think>` after a
//! template's `'<' + key`). Letters match in either case, since templates change it.
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
//! An escaped key (one that begins with a control token or is the beginning of one) comes
//! after all others where a template sorts keys.
//!
//! Not covered: a template that deletes text out of the middle of a message, so that
//! what is left on both sides becomes a spelling. Roles that the API knows are not
//! escaped, for templates compare them. Plain completions are raw text without messages:
//! there, spellings are tokens.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Bound;

use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::{Map, Value};

use crate::error::TextError;
use crate::tokenizer::Tokenizer;

/// The roles of messages that the API knows; any other role is a client's text.
const ROLES: &[&str] = &[
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
];
/// The first character that may be a placeholder: the start of Unicode's last private-use
/// planes.
const FIRST_PRIVATE: char = '\u{f0000}';

/// The control tokens of a model, and how to escape their spellings in a request.
#[derive(Debug)]
pub(crate) struct ControlTokens {
    /// Finds every spelling of a control token, in either case.
    spellings: AhoCorasick,
    /// The spellings of all control tokens in lower case.
    lower: BTreeSet<String>,
    /// Length of the longest spelling in bytes.
    longest: usize,
    /// Texts in lower case that complete a spelling which the template has begun.
    completions: BTreeSet<String>,
    /// Private-use characters that the template itself writes; none is a placeholder.
    private: HashSet<char>,
    /// The ids of all control tokens.
    ids: HashSet<u32>,
}

/// A request whose spellings of control tokens are escaped.
#[derive(Debug)]
pub(crate) struct Escaped {
    /// The messages, escaped.
    pub(crate) messages: Value,
    /// The tool definitions, escaped.
    pub(crate) tools: Option<Value>,
    /// The template arguments, escaped.
    pub(crate) extra: Map<String, Value>,
    /// The placeholders in it, to put the original characters back.
    pub(crate) placeholders: Placeholders,
}

/// The placeholders of one request and the characters they stand for.
#[derive(Debug, Default)]
pub(crate) struct Placeholders {
    /// Private-use characters that cannot be placeholders, or are already.
    taken: HashSet<char>,
    /// The placeholder of each original character.
    placeholder_of: HashMap<char, char>,
    /// The original character of each placeholder.
    original_of: HashMap<char, char>,
}

impl Placeholders {
    /// The placeholder of `original`, the same at each call.
    ///
    /// # Errors
    ///
    /// [`TextError::Encode`] if no private-use character is free.
    fn replace(&mut self, original: char) -> Result<char, TextError> {
        if let Some(&private) = self.placeholder_of.get(&original) {
            return Ok(private);
        }
        let free = (FIRST_PRIVATE..=char::MAX).find(|c| !self.taken.contains(c));
        let private = free.ok_or(TextError::Encode {
            reason: "the messages use every private-use character of Unicode: leave some out"
                .to_owned(),
        })?;
        self.taken.insert(private);
        self.placeholder_of.insert(original, private);
        self.original_of.insert(private, original);
        Ok(private)
    }

    /// The character that `c` stands for; `None` if `c` is not a placeholder.
    pub(crate) fn original(&self, c: char) -> Option<char> {
        if c < FIRST_PRIVATE {
            return None;
        }
        self.original_of.get(&c).copied()
    }
}

impl ControlTokens {
    /// Finds the control tokens of a model: those that `tokenizer` calls special, the `marks`
    /// of reasoning, and added tokens that the `sources` of its chat template spell.
    ///
    /// # Errors
    ///
    /// [`TextError::BadTokenizer`] if there are too many spellings to search for.
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
        Ok(ControlTokens {
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

    /// Escapes the spellings of control tokens in a request; `None` if there are none, so
    /// that it can be rendered as it is.
    ///
    /// # Errors
    ///
    /// [`TextError::Encode`] if no placeholder is free.
    pub(crate) fn escape(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        extra: &Map<String, Value>,
    ) -> Result<Option<Escaped>, TextError> {
        let is_clean = self.is_clean(messages, Keys::Api)
            && tools.is_none_or(|tools| self.is_clean(tools, Keys::Api))
            && extra.values().all(|value| self.is_clean(value, Keys::Api));
        if is_clean {
            return Ok(None);
        }
        let mut placeholders = Placeholders {
            taken: self.private.clone(),
            ..Placeholders::default()
        };
        let mut note = |text: &str| {
            let private = text.chars().filter(|&c| c >= FIRST_PRIVATE);
            placeholders.taken.extend(private);
        };
        each_text(messages, &mut note);
        tools
            .into_iter()
            .for_each(|tools| each_text(tools, &mut note));
        extra.values().for_each(|value| each_text(value, &mut note));
        let s = &mut placeholders;
        let escaped = Escaped {
            messages: self.escape_value(messages, Keys::Api, s)?,
            tools: tools
                .map(|tools| self.escape_value(tools, Keys::Api, s))
                .transpose()?,
            extra: extra
                .iter()
                .map(|(name, value)| Ok((name.clone(), self.escape_value(value, Keys::Api, s)?)))
                .collect::<Result<_, TextError>>()?,
            placeholders: Placeholders::default(),
        };
        Ok(Some(Escaped {
            placeholders,
            ..escaped
        }))
    }

    /// Whether `id` is a control token.
    pub(crate) fn contains(&self, id: u32) -> bool {
        self.ids.contains(&id)
    }

    /// Whether nothing in `value` has to be escaped. `keys` tells words of the API from the
    /// client's.
    fn is_clean(&self, value: &Value, keys: Keys) -> bool {
        match value {
            Value::String(text) => self.places(text, true).is_empty(),
            Value::Array(list) => list.iter().all(|value| self.is_clean(value, keys)),
            Value::Object(map) => map.iter().all(|(key, value)| {
                is_known_role(key, value)
                    || self.places(key, keys != Keys::Api).is_empty()
                        && self.is_clean(value, keys.under(key))
            }),
            _ => true,
        }
    }

    /// `value` with every string escaped, keys included.
    fn escape_value(
        &self,
        value: &Value,
        keys: Keys,
        placeholders: &mut Placeholders,
    ) -> Result<Value, TextError> {
        Ok(match value {
            Value::String(text) => {
                Value::String(self.escape_text(text, true, placeholders)?.into())
            }
            Value::Array(list) => list
                .iter()
                .map(|value| self.escape_value(value, keys, placeholders))
                .collect::<Result<_, _>>()?,
            Value::Object(map) => {
                let mut out = Map::new();
                for (key, value) in map {
                    let escaped = if is_known_role(key, value) {
                        value.clone()
                    } else {
                        self.escape_value(value, keys.under(key), placeholders)?
                    };
                    out.insert(
                        self.escape_text(key, keys != Keys::Api, placeholders)?
                            .into(),
                        escaped,
                    );
                }
                Value::Object(out)
            }
            other => other.clone(),
        })
    }

    /// `text` with a placeholder for the first character of each spelling.
    fn escape_text<'t>(
        &self,
        text: &'t str,
        completes: bool,
        placeholders: &mut Placeholders,
    ) -> Result<Cow<'t, str>, TextError> {
        let places = self.places(text, completes);
        if places.is_empty() {
            return Ok(text.into());
        }
        let mut out = String::with_capacity(text.len() + 3 * places.len());
        let mut from = 0;
        for at in places {
            let original = text[at..].chars().next().unwrap_or_default();
            out.push_str(&text[from..at]);
            out.push(placeholders.replace(original)?);
            from = at + original.len_utf8();
        }
        out.push_str(&text[from..]);
        Ok(out.into())
    }

    /// The bytes of `text` at which a character has to be replaced. `completes` if the text
    /// may stand right behind what the template writes.
    fn places(&self, text: &str, completes: bool) -> BTreeSet<usize> {
        let mut places: BTreeSet<usize> = self
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
                places.insert(at);
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
                places.insert(at);
            }
        }
        places
    }
}

/// Whether one of `spellings` begins with `text`.
fn begins(spellings: &BTreeSet<String>, text: &str) -> bool {
    let mut from = spellings.range::<str, _>((Bound::Included(text), Bound::Unbounded));
    let next = from.next();
    next.is_some_and(|spelling| spelling.starts_with(text))
}

/// Whether `c` is neither a letter, a digit nor white space.
fn is_mark(c: char) -> bool {
    !c.is_alphanumeric() && !c.is_whitespace()
}

/// Whether a field is the role of a message, and one that the API knows.
fn is_known_role(key: &str, value: &Value) -> bool {
    key == "role" && value.as_str().is_some_and(|role| ROLES.contains(&role))
}

/// Tells whether the keys of an object are words of the API or of the client. A key of the API
/// cannot complete what a template has begun.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keys {
    /// The keys are the API's own, such as `content`.
    Api,
    /// The keys are the client's, those of objects within are the API's: the properties of
    /// a schema.
    Client,
    /// The keys are the client's all the way down: the arguments of a tool call.
    AllClient,
}

impl Keys {
    /// Tells whether the keys in the value under `key` are words of the API or of the client.
    fn under(self, key: &str) -> Self {
        match key {
            _ if self == Keys::AllClient => self,
            "arguments" => Keys::AllClient,
            "properties" if self == Keys::Api => Keys::Client,
            _ => Keys::Api,
        }
    }
}

/// The texts that complete one of `spellings` which the template with this `source` begins:
/// a spelling is begun where the template's own text ends, at a quotation mark or a tag.
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
