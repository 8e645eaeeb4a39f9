//! Calls of Qwen 3.5 and 3.6: a tag for the function, and one for each parameter.
//!
//! ```text
//! <function=NAME>
//! <parameter=KEY>
//! VALUE
//! </parameter>
//! </function>
//! ```
//!
//! A string stands as it is, anything else as JSON, so the tool's schema says what a value is
//! ([`Types`]). A value ends at `</parameter>` before the next tag; anywhere else that is part
//! of the value. One line break on either side of the value is not.

use std::collections::HashSet;
use std::sync::Arc;

use super::json;
use super::schema::{Tools, Types};
use super::{Body, NAME_BYTES_MAX, Said, Step, Symbol, is_name};

const FUNCTION: &str = "<function=";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
const FUNCTION_END: &str = "</function>";

/// How far the end of a value is, of which every part may turn out to be the value's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// Not begun.
    None,
    /// After a line break.
    Break,
    /// Inside the closing tag, of which so many bytes are there.
    Tag(usize),
    /// In the white space after the closing tag.
    Blank,
    /// Inside the tag after that, of which so many bytes are there.
    Next(usize),
}

/// What the next character may be.
#[derive(Debug)]
enum State {
    /// The function's opening tag.
    Head(String),
    /// The next parameter, or the end of the function.
    Between(String),
    /// Inside a parameter's name.
    Key(String),
    /// The line break before a value, or its first character.
    Start,
    /// Inside a value.
    Value,
}

/// The parser of one call.
#[derive(Debug)]
pub(super) struct Qwen {
    tools: Arc<Tools>,
    state: State,
    function: String,
    keys: HashSet<String>,
    /// What the value that is being written may be.
    types: Types,
    /// The value, where it is not passed on as it comes.
    value: String,
    ending: Ending,
    /// The text of the ending so far.
    tail: String,
}

impl Qwen {
    /// A call of one of `tools`, which has not begun.
    pub(super) fn new(tools: Arc<Tools>) -> Self {
        Qwen {
            tools,
            state: State::Head(String::new()),
            function: String::new(),
            keys: HashSet::new(),
            types: Types::ANY,
            value: String::new(),
            ending: Ending::None,
            tail: String::new(),
        }
    }

    /// Begins a parameter.
    fn begin(&mut self, key: String, json: &mut String) -> Step {
        if key.is_empty() || !self.keys.insert(key.clone()) {
            return Step::Broken;
        }
        if self.keys.len() > 1 {
            json.push(',');
        }
        json::string_onto(json, &key);
        json.push(':');
        self.types = self.tools.types(&self.function, &key);
        if self.types == Types::TEXT {
            json.push('"');
        }
        self.state = State::Start;
        self.ending = Ending::None;
        Step::More
    }

    /// Takes text of the value.
    fn take(&mut self, text: &str, json: &mut String) {
        if self.types == Types::TEXT {
            text.chars().for_each(|c| json::escape_onto(json, c));
        } else {
            self.value.push_str(text);
        }
    }

    /// Ends the value.
    fn end_value(&mut self, json: &mut String) {
        if self.types == Types::TEXT {
            json.push('"');
        } else {
            self.types.write(&std::mem::take(&mut self.value), json);
        }
        self.tail.clear();
        self.ending = Ending::None;
    }

    /// Takes a character of a value or of what ends it.
    fn value(&mut self, c: char, json: &mut String) -> Step {
        let next = match self.ending {
            Ending::None if c == '\n' => Some(Ending::Break),
            Ending::None | Ending::Break if c == '<' => Some(Ending::Tag(1)),
            Ending::Tag(n) if PARAMETER_END[n..].starts_with(c) => {
                Some(match n + 1 == PARAMETER_END.len() {
                    true => Ending::Blank,
                    false => Ending::Tag(n + 1),
                })
            }
            Ending::Blank if c.is_whitespace() => Some(Ending::Blank),
            Ending::Blank if c == '<' => Some(Ending::Next(1)),
            Ending::Next(n) => self.next_tag(n, c),
            _ => None,
        };
        if let Some(next) = next {
            self.ending = next;
            self.tail.push(c);
            let Ending::Next(n) = next else {
                return Step::More;
            };
            let tag = &self.tail[self.tail.len() - n..];
            let is_end = tag == FUNCTION_END;
            if is_end || tag == PARAMETER {
                self.end_value(json);
                self.state = State::Key(String::new());
            }
            if is_end {
                json.push('}');
                return Step::Whole;
            }
            return Step::More;
        }
        // The ending was none. What follows its last `<` may be the beginning of another.
        let tail = std::mem::take(&mut self.tail);
        let again = match std::mem::replace(&mut self.ending, Ending::None) {
            Ending::Next(n) => {
                let at = tail.len() - n;
                at - usize::from(tail[..at].ends_with('\n'))
            }
            _ => tail.len(),
        };
        self.take(&tail[..again], json);
        for c in tail[again..].chars() {
            self.value(c, json);
        }
        if tail.is_empty() {
            self.take(c.encode_utf8(&mut [0; 4]), json);
            return Step::More;
        }
        self.value(c, json)
    }

    /// The ending after `c` follows `n` bytes of a tag that may end a value.
    fn next_tag(&self, n: usize, c: char) -> Option<Ending> {
        let begun = &self.tail[self.tail.len() - n..];
        [PARAMETER, FUNCTION_END]
            .iter()
            .any(|tag| {
                tag.strip_prefix(begun)
                    .is_some_and(|rest| rest.starts_with(c))
            })
            .then_some(Ending::Next(n + 1))
    }
}

impl Body for Qwen {
    fn push(&mut self, symbol: Symbol, said: &mut Said) -> Step {
        let Symbol::Char(c) = symbol else {
            return Step::Broken;
        };
        let json = &mut said.json;
        match &mut self.state {
            State::Head(head) | State::Between(head) if head.is_empty() && c.is_whitespace() => {}
            State::Head(head) => {
                if let Some(name) = head.strip_prefix(FUNCTION) {
                    match c {
                        '>' if !name.is_empty() => {
                            self.function = name.to_owned();
                            said.name = Some(self.function.clone());
                            json.push('{');
                            self.state = State::Between(String::new());
                            return Step::More;
                        }
                        c if !is_name(c) || name.len() >= NAME_BYTES_MAX => return Step::Broken,
                        _ => {}
                    }
                } else if !FUNCTION[head.len()..].starts_with(c) {
                    return Step::Broken;
                }
                head.push(c);
            }
            State::Between(tag) => {
                tag.push(c);
                match tag.as_str() {
                    PARAMETER => self.state = State::Key(String::new()),
                    FUNCTION_END => {
                        json.push('}');
                        return Step::Whole;
                    }
                    tag if PARAMETER.starts_with(tag) || FUNCTION_END.starts_with(tag) => {}
                    _ => return Step::Broken,
                }
            }
            State::Key(key) => match c {
                '>' => {
                    let key = std::mem::take(key);
                    return self.begin(key, json);
                }
                '<' | '\n' => return Step::Broken,
                c => key.push(c),
            },
            State::Start => {
                self.state = State::Value;
                if c != '\n' {
                    return self.value(c, json);
                }
            }
            State::Value => return self.value(c, json),
        }
        Step::More
    }

    fn close(&mut self, said: &mut Said) -> bool {
        match &self.state {
            State::Between(tag) if tag.is_empty() => {}
            State::Value if self.ending == Ending::Blank => self.end_value(&mut said.json),
            _ => return false,
        }
        said.json.push('}');
        true
    }
}
