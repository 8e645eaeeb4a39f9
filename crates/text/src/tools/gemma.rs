//! Calls of Gemma 4: `call:NAME{key:<|"|>text<|"|>,n:1,list:[true],inner:{k:null}}`.
//!
//! Names of arguments are bare, strings stand between quote marks and have no escapes. Taken
//! as well: names in quote marks, names and strings in plain quotes, a comma too many,
//! Python's `None`, `True` and `False`, and words without any quotes, which become strings.

use std::collections::HashSet;

use super::json::{self, Read};
use super::{Body, DEPTH_MAX, NAME_BYTES_MAX, Said, Step, Symbol, is_name};

/// What stands before a tool's name.
const HEAD: &str = "call:";

/// What the next symbol may be.
#[derive(Debug, Default)]
enum State {
    /// `call:` and the tool's name.
    #[default]
    Head,
    /// A name, or the end of the object.
    Name,
    /// Inside a bare name.
    BareName(String),
    /// Inside a name in quote marks.
    QuotedName(String),
    /// Inside a name in plain quotes: the name as JSON text.
    JsonName(json::Value, String),
    /// The colon after a name.
    Colon,
    /// A value, or the end of the list.
    Value,
    /// Inside a string in quote marks.
    Text,
    /// Inside a string in plain quotes.
    JsonText(json::Value),
    /// Inside a word: a number, a constant or a string without quotes.
    Word(String),
    /// After a value.
    After,
}

/// An object or a list that is open.
#[derive(Debug)]
struct Open {
    /// The names in the object so far; `None` for a list.
    names: Option<HashSet<String>>,
    /// Whether it has an item.
    has_items: bool,
}

/// The parser of one call.
#[derive(Debug, Default)]
pub(super) struct Gemma {
    state: State,
    head: String,
    open: Vec<Open>,
}

impl Body for Gemma {
    fn push(&mut self, symbol: Symbol, said: &mut Said) -> Step {
        match self.step(symbol, said) {
            Some(true) => Step::Whole,
            Some(false) => Step::More,
            None => Step::Broken,
        }
    }

    fn close(&mut self, said: &mut Said) -> bool {
        // A call without arguments may come without braces.
        if !matches!(self.state, State::Head) || self.name().is_none() {
            return false;
        }
        said.name = self.name().map(str::to_owned);
        said.json.push_str("{}");
        true
    }
}

impl Gemma {
    /// The tool's name, if the head is whole.
    fn name(&self) -> Option<&str> {
        let name = self.head.trim().strip_prefix(HEAD)?.trim();
        let fits = (1..=NAME_BYTES_MAX).contains(&name.len()) && name.chars().all(is_name);
        fits.then_some(name)
    }

    /// Takes a symbol; whether the call is whole with it, `None` if it does not fit.
    fn step(&mut self, symbol: Symbol, said: &mut Said) -> Option<bool> {
        let json = &mut said.json;
        match (&mut self.state, symbol) {
            (State::Head, Symbol::Char('{')) => {
                said.name = Some(self.name()?.to_owned());
                self.begin('{', json)?;
            }
            (State::Head, Symbol::Char(c)) => {
                self.head.push(c);
                let head = self.head.trim_start();
                let begins = HEAD.starts_with(head)
                    || head.strip_prefix(HEAD).is_some_and(|name| {
                        name.len() <= NAME_BYTES_MAX && name.trim().chars().all(is_name)
                    });
                begins.then_some(())?;
            }
            (State::Name | State::Colon | State::Value | State::After, Symbol::Char(c))
                if c.is_whitespace() => {}
            (State::Name, Symbol::Char('}')) => return self.end('}', json),
            (State::Name, Symbol::Quote) => self.state = State::QuotedName(String::new()),
            (State::Name, Symbol::Char('"')) => {
                let (mut value, mut name) = (json::Value::new(), String::new());
                value.push('"', &mut name);
                self.state = State::JsonName(value, name);
            }
            (State::Name, Symbol::Char(c)) => {
                is_bare(c).then_some(())?;
                self.state = State::BareName(c.into());
            }
            (State::BareName(name), Symbol::Char(':')) => {
                let name = std::mem::take(name);
                self.named(name.trim_end(), json)?;
                self.state = State::Value;
            }
            (State::BareName(name), Symbol::Char(c)) if is_bare(c) => name.push(c),
            (State::QuotedName(name), Symbol::Char(c)) => name.push(c),
            (State::QuotedName(name), Symbol::Quote) => {
                let name = std::mem::take(name);
                self.named(&name, json)?;
                self.state = State::Colon;
            }
            (State::JsonName(value, text), Symbol::Char(c)) => match value.push(c, text) {
                Read::More => {}
                Read::Done => {
                    let name: String = serde_json::from_str(text).ok()?;
                    self.named(&name, json)?;
                    self.state = State::Colon;
                }
                Read::DoneBefore | Read::Bad => return None,
            },
            (State::Colon, Symbol::Char(':')) => self.state = State::Value,
            (State::Value, Symbol::Char(']')) if self.open.last()?.names.is_none() => {
                return self.end(']', json);
            }
            (State::Value, Symbol::Char(c @ ('{' | '['))) => {
                self.item(json);
                self.begin(c, json)?;
            }
            (State::Value, Symbol::Quote) => {
                self.item(json);
                json.push('"');
                self.state = State::Text;
            }
            (State::Value, Symbol::Char('"')) => {
                self.item(json);
                let mut value = json::Value::new();
                value.push('"', json);
                self.state = State::JsonText(value);
            }
            (State::Value, Symbol::Char(c)) => {
                (is_bare(c) || c == ':').then_some(())?;
                self.state = State::Word(c.into());
            }
            (State::Text, Symbol::Char(c)) => json::escape_onto(json, c),
            (State::Text, Symbol::Quote) => {
                json.push('"');
                self.state = State::After;
            }
            (State::JsonText(value), Symbol::Char(c)) => match value.push(c, json) {
                Read::More => {}
                Read::Done => self.state = State::After,
                Read::DoneBefore | Read::Bad => return None,
            },
            (State::Word(word), Symbol::Char(c)) if is_bare(c) || c == ':' || c.is_whitespace() => {
                word.push(c);
            }
            (State::Word(word), Symbol::Char(c @ (',' | '}' | ']'))) => {
                let word = std::mem::take(word);
                self.item(json);
                word_onto(word.trim_end(), json);
                self.state = State::After;
                return self.after(c, json);
            }
            (State::After, Symbol::Char(c)) => return self.after(c, json),
            _ => return None,
        }
        Some(false)
    }

    /// Takes what follows a value.
    fn after(&mut self, c: char, json: &mut String) -> Option<bool> {
        let is_object = self.open.last()?.names.is_some();
        match c {
            ',' if is_object => self.state = State::Name,
            ',' => self.state = State::Value,
            '}' | ']' => return self.end(c, json),
            _ => return None,
        }
        Some(false)
    }

    /// Begins an object or a list.
    fn begin(&mut self, bracket: char, json: &mut String) -> Option<()> {
        (self.open.len() < DEPTH_MAX).then_some(())?;
        let is_object = bracket == '{';
        self.open.push(Open {
            names: is_object.then(HashSet::new),
            has_items: false,
        });
        json.push(bracket);
        self.state = if is_object { State::Name } else { State::Value };
        Some(())
    }

    /// Ends the innermost object or list; whether the call is whole with it.
    fn end(&mut self, bracket: char, json: &mut String) -> Option<bool> {
        let is_object = self.open.pop()?.names.is_some();
        (is_object == (bracket == '}')).then_some(())?;
        json.push(bracket);
        self.state = State::After;
        Some(self.open.is_empty())
    }

    /// Begins an item of a list; the names of an object do that for theirs.
    fn item(&mut self, json: &mut String) {
        if let Some(open) = self.open.last_mut()
            && open.names.is_none()
            && std::mem::replace(&mut open.has_items, true)
        {
            json.push(',');
        }
    }

    /// Writes the name of an argument; `None` if the object has it already.
    fn named(&mut self, name: &str, json: &mut String) -> Option<()> {
        let open = self.open.last_mut()?;
        open.names.as_mut()?.insert(name.to_owned()).then_some(())?;
        if std::mem::replace(&mut open.has_items, true) {
            json.push(',');
        }
        json::string_onto(json, name);
        json.push(':');
        Some(())
    }
}

/// Whether `c` may stand in a name or a word without quotes.
pub(super) fn is_bare(c: char) -> bool {
    !matches!(c, ',' | ':' | '{' | '}' | '[' | ']' | '"' | '\n' | '\r')
}

/// Writes a word: a number or a constant as it is, anything else as a string.
fn word_onto(word: &str, json: &mut String) {
    match word {
        "true" | "True" => json.push_str("true"),
        "false" | "False" => json.push_str("false"),
        "null" | "None" => json.push_str("null"),
        number if json::is_number(number) => json.push_str(number),
        text => json::string_onto(json, text),
    }
}
