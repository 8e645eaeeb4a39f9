//! Calls as JSON: `{"name": "NAME", "arguments": {…}}`, as Hermes and Qwen 2.5 write them.
//!
//! The arguments may be called `parameters`, may come before the name, and may be a string of
//! JSON. Other fields are passed over. The arguments stream once the name is known.

use super::json::{self, Read};
use super::{Body, NAME_BYTES_MAX, Said, Step, Symbol};

/// What the next character may be.
#[derive(Debug, Default)]
enum State {
    /// The object.
    #[default]
    Start,
    /// A field's name; `true` if the object may end instead.
    Field(bool),
    /// Inside a field's name.
    InField(json::Value, String),
    /// The colon after a field's name.
    Colon(Field),
    /// Inside a field's value, or before it.
    Value(Field, json::Value),
    /// After a field's value.
    After,
}

/// A field of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Name,
    Arguments,
    Other,
}

/// The parser of one call.
#[derive(Debug, Default)]
pub(super) struct Hermes {
    state: State,
    /// The tool's name as JSON text.
    name: String,
    /// The name was said.
    is_named: bool,
    /// The arguments as JSON text, as long as they cannot be passed on.
    arguments: String,
    /// Whether the arguments are an object and were passed on from its first character.
    streams: bool,
    has_arguments: bool,
}

impl Body for Hermes {
    fn push(&mut self, symbol: Symbol, said: &mut Said) -> Step {
        let Symbol::Char(c) = symbol else {
            return Step::Broken;
        };
        match self.step(c, said) {
            Some(true) => Step::Whole,
            Some(false) => Step::More,
            None => Step::Broken,
        }
    }
}

impl Hermes {
    /// Takes a character; whether the call is whole with it, `None` if it does not fit.
    fn step(&mut self, c: char, said: &mut Said) -> Option<bool> {
        let is_blank = c.is_ascii_whitespace();
        match &mut self.state {
            State::Start | State::Field(_) | State::Colon(_) | State::After if is_blank => {}
            State::Start if c == '{' => self.state = State::Field(true),
            State::Field(_) if c == '"' => {
                let (mut value, mut name) = (json::Value::new(), String::new());
                value.push(c, &mut name);
                self.state = State::InField(value, name);
            }
            State::Field(true) | State::After if c == '}' => return self.end(said),
            State::InField(value, text) => match value.push(c, text) {
                Read::More => {}
                Read::Done => {
                    let field = match text.as_str() {
                        "\"name\"" if self.name.is_empty() => Field::Name,
                        "\"arguments\"" | "\"parameters\"" if !self.has_arguments => {
                            Field::Arguments
                        }
                        // A second name or second arguments: which of them counts?
                        "\"name\"" | "\"arguments\"" | "\"parameters\"" => return None,
                        _ => Field::Other,
                    };
                    self.state = State::Colon(field);
                }
                Read::DoneBefore | Read::Bad => return None,
            },
            State::Colon(field) if c == ':' => {
                self.state = State::Value(*field, json::Value::new());
            }
            State::Value(field, value) => {
                let field = *field;
                let before = self.arguments.len();
                let text = match field {
                    Field::Name => &mut self.name,
                    Field::Arguments if self.streams => &mut said.json,
                    Field::Arguments | Field::Other => &mut self.arguments,
                };
                let read = value.push(c, text);
                match field {
                    Field::Name if !self.name.trim_start().starts_with('"') && !is_blank => {
                        return None;
                    }
                    Field::Name if self.name.len() > NAME_BYTES_MAX => return None,
                    Field::Arguments
                        if self.is_named && !self.streams && self.arguments.trim_start() == "{" =>
                    {
                        self.arguments.clear();
                        said.json.push('{');
                        self.streams = true;
                    }
                    Field::Other => self.arguments.truncate(before),
                    _ => {}
                }
                match read {
                    Read::More => {}
                    Read::Done => self.ended(field, said)?,
                    Read::DoneBefore => {
                        self.ended(field, said)?;
                        return self.step(c, said);
                    }
                    Read::Bad => return None,
                }
            }
            State::After if c == ',' => self.state = State::Field(false),
            _ => return None,
        }
        Some(false)
    }

    /// Ends the value of a field.
    fn ended(&mut self, field: Field, said: &mut Said) -> Option<()> {
        self.state = State::After;
        match field {
            Field::Name => {
                let name: String = serde_json::from_str(&self.name).ok()?;
                (!name.is_empty() && name.chars().all(super::is_name)).then_some(())?;
                said.name = Some(name);
                self.is_named = true;
            }
            Field::Arguments => {
                self.has_arguments = true;
                if !self.streams {
                    self.arguments = object(self.arguments.trim())?;
                }
            }
            Field::Other => {}
        }
        if self.is_named && self.has_arguments {
            said.json.push_str(&std::mem::take(&mut self.arguments));
        }
        Some(())
    }

    /// Ends the call.
    fn end(&mut self, said: &mut Said) -> Option<bool> {
        self.is_named.then_some(())?;
        if !self.has_arguments {
            said.json.push_str("{}");
        }
        Some(true)
    }
}

/// The object that arguments stand for: themselves, or what a string of JSON says.
fn object(arguments: &str) -> Option<String> {
    if arguments.starts_with('{') {
        return Some(arguments.to_owned());
    }
    if arguments == "null" {
        return Some("{}".to_owned());
    }
    let inner: String = serde_json::from_str(arguments).ok()?;
    let inner = if inner.trim().is_empty() {
        "{}"
    } else {
        inner.trim()
    };
    let is_object =
        inner.starts_with('{') && serde_json::from_str::<serde_json::Value>(inner).is_ok();
    is_object.then(|| inner.to_owned())
}
