//! JSON text, one character at a time: what is written for arguments, and what is read.

use super::DEPTH_MAX;

/// Appends `c` as it stands inside a JSON string.
pub(super) fn escape_onto(json: &mut String, c: char) {
    match c {
        '"' => json.push_str("\\\""),
        '\\' => json.push_str("\\\\"),
        '\n' => json.push_str("\\n"),
        '\r' => json.push_str("\\r"),
        '\t' => json.push_str("\\t"),
        c if (c as u32) < 0x20 => json.push_str(&format!("\\u{:04x}", c as u32)),
        c => json.push(c),
    }
}

/// Appends `text` as a JSON string.
pub(super) fn string_onto(json: &mut String, text: &str) {
    json.push('"');
    text.chars().for_each(|c| escape_onto(json, c));
    json.push('"');
}

/// What the next character of a JSON value may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A value begins.
    Value,
    /// A list's first value begins, or it ends.
    ValueOrEnd,
    /// An object's next name begins.
    Name,
    /// An object's first name begins, or it ends.
    NameOrEnd,
    /// The colon after a name.
    Colon,
    /// A value has ended.
    After,
    /// Inside a string.
    Text,
    /// After a backslash.
    Escape,
    /// Inside `\uXXXX`: digits that are missing.
    Unicode(u8),
    /// Inside a word, of which this is missing.
    Word(&'static str),
    /// After the sign of a number.
    Minus,
    /// After a leading zero.
    Zero,
    /// Inside the whole part of a number.
    Whole,
    /// After a number's point.
    Point,
    /// Inside the digits after the point.
    Fraction,
    /// After the `e` of a number.
    E,
    /// After the sign of the exponent.
    ESign,
    /// Inside the exponent.
    Exponent,
}

/// What a character did to a JSON value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Read {
    /// The value goes on.
    More,
    /// The value ends with this character.
    Done,
    /// The value has ended before this character.
    DoneBefore,
    /// This character does not fit.
    Bad,
}

/// Reads one JSON value and repeats it as JSON text.
///
/// Control characters inside strings, which models write and JSON forbids, are escaped.
#[derive(Clone, Debug)]
pub(super) struct Value {
    state: State,
    /// What is open: true for an object, false for a list.
    open: Vec<bool>,
    /// Whether the string that is being read is a name.
    is_name: bool,
    /// The code unit that is being read.
    unit: u32,
    /// Whether the second half of a surrogate pair must follow.
    is_half: bool,
}

impl Value {
    /// A value that has not begun.
    pub(super) fn new() -> Self {
        Value {
            state: State::Value,
            open: Vec::new(),
            is_name: false,
            unit: 0,
            is_half: false,
        }
    }

    /// Takes one character; appends to `json` what it stands for.
    pub(super) fn push(&mut self, c: char, json: &mut String) -> Read {
        match self.step(c) {
            read @ (Read::Bad | Read::DoneBefore) => read,
            read => {
                if self.state == State::Text && (c as u32) < 0x20 {
                    escape_onto(json, c);
                } else {
                    json.push(c);
                }
                read
            }
        }
    }

    fn step(&mut self, c: char) -> Read {
        let is_blank = matches!(c, ' ' | '\t' | '\n' | '\r');
        let next = match (self.state, c) {
            (
                State::Value
                | State::ValueOrEnd
                | State::Name
                | State::NameOrEnd
                | State::Colon
                | State::After,
                _,
            ) if is_blank => self.state,
            (State::ValueOrEnd, ']') | (State::NameOrEnd, '}') => return self.pop(),
            (State::Value | State::ValueOrEnd, _) => match self.begin(c) {
                Some(state) => state,
                None => return Read::Bad,
            },
            (State::Name | State::NameOrEnd, '"') => {
                self.is_name = true;
                State::Text
            }
            (State::Colon, ':') => State::Value,
            (State::After, _) => return self.after(c),
            (State::Text, _) if self.is_half && c != '\\' => return Read::Bad,
            (State::Text, '"') if self.is_name => State::Colon,
            (State::Text, '"') => return self.ended(),
            (State::Text, '\\') => State::Escape,
            (State::Text, _) => State::Text,
            (State::Escape, 'u') => {
                self.unit = 0;
                State::Unicode(4)
            }
            (State::Escape, _) if self.is_half => return Read::Bad,
            (State::Escape, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't') => State::Text,
            (State::Unicode(left), _) => match (c.to_digit(16), left) {
                (Some(digit), 1) => match self.unit_read(self.unit * 16 + digit) {
                    true => State::Text,
                    false => return Read::Bad,
                },
                (Some(digit), _) => {
                    self.unit = self.unit * 16 + digit;
                    State::Unicode(left - 1)
                }
                (None, _) => return Read::Bad,
            },
            (State::Word(rest), _) => match rest.strip_prefix(c) {
                Some("") => return self.ended(),
                Some(rest) => State::Word(rest),
                None => return Read::Bad,
            },
            (State::Minus, '0') => State::Zero,
            (State::Minus | State::Whole, '0'..='9') => State::Whole,
            (State::Zero | State::Whole, '.') => State::Point,
            (State::Zero | State::Whole | State::Fraction, 'e' | 'E') => State::E,
            (State::Point | State::Fraction, '0'..='9') => State::Fraction,
            (State::E, '+' | '-') => State::ESign,
            (State::E | State::ESign | State::Exponent, '0'..='9') => State::Exponent,
            (State::Zero | State::Whole | State::Fraction | State::Exponent, _) => {
                return match self.ended() {
                    Read::Done => Read::DoneBefore,
                    _ if is_blank => Read::More,
                    _ => self.after(c),
                };
            }
            _ => return Read::Bad,
        };
        self.state = next;
        Read::More
    }

    /// The state after the first character of a value.
    fn begin(&mut self, c: char) -> Option<State> {
        match c {
            '{' | '[' if self.open.len() == DEPTH_MAX => None,
            '{' => {
                self.open.push(true);
                Some(State::NameOrEnd)
            }
            '[' => {
                self.open.push(false);
                Some(State::ValueOrEnd)
            }
            '"' => {
                self.is_name = false;
                Some(State::Text)
            }
            '-' => Some(State::Minus),
            '0' => Some(State::Zero),
            '1'..='9' => Some(State::Whole),
            't' => Some(State::Word("rue")),
            'f' => Some(State::Word("alse")),
            'n' => Some(State::Word("ull")),
            _ => None,
        }
    }

    /// Takes a code unit that a string has spelled; false if it is half a character.
    fn unit_read(&mut self, unit: u32) -> bool {
        let (is_first, is_second) = (unit & 0xfc00 == 0xd800, unit & 0xfc00 == 0xdc00);
        let fits = is_second == self.is_half;
        self.is_half = is_first;
        fits
    }

    /// What follows a value inside what is open.
    fn after(&mut self, c: char) -> Read {
        match (self.open.last(), c) {
            (Some(true), ',') => self.state = State::Name,
            (Some(false), ',') => self.state = State::Value,
            (Some(true), '}') | (Some(false), ']') => return self.pop(),
            _ => return Read::Bad,
        }
        Read::More
    }

    /// Ends the innermost list or object.
    fn pop(&mut self) -> Read {
        self.open.pop();
        self.ended()
    }

    /// Ends a value.
    fn ended(&mut self) -> Read {
        self.state = State::After;
        if self.open.is_empty() {
            Read::Done
        } else {
            Read::More
        }
    }
}

/// Whether `text` is a JSON number.
pub(super) fn is_number(text: &str) -> bool {
    let begins = text.starts_with(|c: char| c == '-' || c.is_ascii_digit());
    let (mut value, mut json) = (Value::new(), String::new());
    begins
        && text.chars().all(|c| value.push(c, &mut json) == Read::More)
        && matches!(
            value.state,
            State::Zero | State::Whole | State::Fraction | State::Exponent
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is read of `text`, and whether it is one whole value.
    fn read(text: &str) -> (String, bool) {
        let (mut value, mut json) = (Value::new(), String::new());
        let mut last = Read::More;
        for c in text.chars() {
            assert_eq!(last, Read::More, "{text}");
            last = value.push(c, &mut json);
            if last == Read::Bad {
                break;
            }
        }
        (json, last == Read::Done)
    }

    #[test]
    fn values_are_repeated_and_anything_else_is_bad() {
        for text in [
            r#"{"a": [1, -0.5e+3, true, null, "x\n\u00e9\ud83d\ude00"], "b": {}}"#,
            "[]",
            "[[], {}, 0, 10]",
            r#""""#,
            "{\"a\" : 0 }",
        ] {
            assert_eq!(read(text), (text.to_owned(), true));
            assert!(serde_json::from_str::<serde_json::Value>(text).is_ok());
        }
        for text in [
            "[1,]",
            "{,}",
            "{\"a\"}",
            "[01]",
            "[1.]",
            "[.5]",
            "[+1]",
            "{a:1}",
            "[tru]",
            "[nulll]",
            r#"["\x"]"#,
            r#"["\ud83d"]"#,
            r#"["\ude00"]"#,
            r#"["\ud83d\n"]"#,
            "]",
            "[}",
            "[1 2]",
            "[\u{a0}1]",
        ] {
            assert!(!read(text).1, "{text}");
            assert!(
                serde_json::from_str::<serde_json::Value>(text).is_err(),
                "{text}"
            );
        }
        assert_eq!(
            read("[\"a\nb\u{1}\"]"),
            (r#"["a\nb\u0001"]"#.to_owned(), true)
        );
        let deep = "[".repeat(DEPTH_MAX) + &"]".repeat(DEPTH_MAX);
        assert!(read(&deep).1);
        assert!(!read(&format!("[{deep}]")).1);
    }

    #[test]
    fn a_number_ends_where_the_next_character_does_not_fit() {
        let (mut value, mut json) = (Value::new(), String::new());
        assert_eq!(value.push('7', &mut json), Read::More);
        assert_eq!(value.push(',', &mut json), Read::DoneBefore);
        assert_eq!(json, "7");
        for (text, is) in [
            ("1", true),
            ("-1.5e3", true),
            ("1e999", true),
            ("01", false),
            ("", false),
            ("1 ", false),
            ("x", false),
        ] {
            assert_eq!(is_number(text), is, "{text}");
        }
    }
}
