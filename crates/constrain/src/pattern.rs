//! Regular expressions, in the dialect of JSON Schema.
//!
//! JSON Schema's `pattern` is an ECMA-262 regular expression; the grammar engine reads the Rust
//! dialect. The two agree on most patterns and quietly differ on others: what `.` and `\d`
//! match, `[a&&b]`, a brace that is no repetition, `$`. So a pattern is parsed here and written
//! out again in the small part that both read alike.
//!
//! - Sequences, `|`, groups (named ones too), classes, `.`, `* + ? {m} {m,} {m,n}`, lazy forms
//!   of these (a language has no laziness), and the escapes of ECMA-262 with the `u` flag,
//!   `\p{…}` included. `\d` and `\w` are ASCII, `\s` is the white space of ECMA-262.
//! - `^` and `$` where the text begins and ends: at the edges of the pattern or of a group
//!   there. Elsewhere they could only fail.
//! - Not `\b`, look-around and references to groups, which are not regular or not supported:
//!   an error.
//!
//! The same dialect serves [`Spec::Regex`](crate::Spec::Regex), which matches from start to end.

use std::fmt::Write;

use crate::{Error, Limits};

/// One past the last code point.
const END: u32 = 0x11_0000;
/// The white space of ECMA-262, line ends included.
const SPACES: &[(u32, u32)] = &[
    (0x09, 0x0D),
    (0x20, 0x20),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
];
const DIGITS: &[(u32, u32)] = &[(0x30, 0x39)];
const WORDS: &[(u32, u32)] = &[(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)];
const LINE_ENDS: &[(u32, u32)] = &[(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)];

/// A set of characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Class {
    /// First and last code point, ascending and apart.
    pub(crate) ranges: Vec<(u32, u32)>,
    /// Unicode properties whose characters belong to it too, such as `\p{Lu}`.
    properties: Vec<String>,
    /// Whether it is everything else; only with properties, as ranges are inverted at once.
    is_negated: bool,
}

impl Class {
    /// The class of these ranges, in any order.
    pub(crate) fn new(mut ranges: Vec<(u32, u32)>) -> Self {
        ranges.sort_unstable();
        let mut merged: Vec<(u32, u32)> = Vec::with_capacity(ranges.len());
        for (lo, hi) in ranges {
            match merged.last_mut() {
                Some(last) if lo <= last.1 + 1 => last.1 = last.1.max(hi),
                _ => merged.push((lo, hi)),
            }
        }
        Self {
            ranges: merged,
            properties: Vec::new(),
            is_negated: false,
        }
    }

    /// The class of one character.
    pub(crate) fn one(ch: char) -> Self {
        Self::new(vec![(ch as u32, ch as u32)])
    }

    /// Everything that is not in it.
    pub(crate) fn negated(mut self) -> Self {
        if self.properties.is_empty() {
            self.ranges = invert(&self.ranges);
        } else {
            self.is_negated = !self.is_negated;
        }
        self
    }

    /// Whether both have a character; true if either has a property.
    pub(crate) fn meets(&self, other: &Self) -> bool {
        if !self.properties.is_empty() || !other.properties.is_empty() {
            return true;
        }
        let (mut i, mut j) = (0, 0);
        while let (Some(a), Some(b)) = (self.ranges.get(i), other.ranges.get(j)) {
            if a.0 <= b.1 && b.0 <= a.1 {
                return true;
            }
            if a.1 < b.1 { i += 1 } else { j += 1 }
        }
        false
    }

    /// Whether no character is in it.
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty() && self.properties.is_empty() && !self.is_negated
    }

    fn write(&self, out: &mut String) {
        if let ([(lo, hi)], []) = (&*self.ranges, &*self.properties)
            && lo == hi
            && !self.is_negated
        {
            return write_char(*lo, out);
        }
        out.push_str(if self.is_negated { "[^" } else { "[" });
        for &(lo, hi) in &self.ranges {
            write_char(lo, out);
            if hi > lo {
                out.push('-');
                write_char(hi, out);
            }
        }
        self.properties
            .iter()
            .for_each(|property| out.push_str(property));
        out.push(']');
    }
}

/// The code points that are not in `ranges`, without surrogates, which are no characters.
fn invert(ranges: &[(u32, u32)]) -> Vec<(u32, u32)> {
    let mut out = Vec::with_capacity(ranges.len() + 2);
    let mut next = 0;
    let surrogates = (0xD800, 0xDFFF);
    let mut taken: Vec<(u32, u32)> = ranges.to_vec();
    taken.push(surrogates);
    for (lo, hi) in Class::new(taken).ranges {
        if lo > next {
            out.push((next, lo - 1));
        }
        next = hi + 1;
    }
    if next < END {
        out.push((next, END - 1));
    }
    out
}

/// A character that stands for itself inside and outside of classes.
fn write_char(code: u32, out: &mut String) {
    match char::from_u32(code) {
        Some(ch) if ch.is_ascii_alphanumeric() => out.push(ch),
        // Writing to a string does not fail.
        _ => _ = write!(out, "\\x{{{code:X}}}"),
    }
}

/// `text` as a regular expression that matches it alone.
pub(crate) fn literal(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    text.chars().for_each(|ch| write_char(ch as u32, &mut out));
    out
}

/// A regular expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Re {
    Class(Class),
    Concat(Vec<Re>),
    Alternatives(Vec<Re>),
    /// From `.1` to `.2` times.
    Repeat(Box<Re>, u32, Option<u32>),
    /// `^`
    Start,
    /// `$`
    Finish,
}

impl Re {
    /// Writes an expression that both dialects read alike. Anchors must be resolved.
    pub(crate) fn write(&self, out: &mut String) {
        match self {
            Self::Class(class) if class.is_empty() => out.push_str(r"[^\s\S]"),
            Self::Class(class) => class.write(out),
            Self::Concat(parts) => {
                for part in parts {
                    let group = matches!(part, Self::Alternatives(_));
                    write_group(part, group, out);
                }
            }
            Self::Alternatives(parts) => {
                for (i, part) in parts.iter().enumerate() {
                    if i > 0 {
                        out.push('|');
                    }
                    part.write(out);
                }
            }
            Self::Repeat(part, min, max) => {
                write_group(part, !matches!(**part, Self::Class(_)), out);
                match (min, max) {
                    (0, None) => out.push('*'),
                    (1, None) => out.push('+'),
                    (0, Some(1)) => out.push('?'),
                    (min, None) => _ = write!(out, "{{{min},}}"),
                    (min, Some(max)) => _ = write!(out, "{{{min},{max}}}"),
                }
            }
            Self::Start | Self::Finish => unreachable!("anchors are resolved before"),
        }
    }

    /// Characters of the expression with its counted repetitions written out.
    pub(crate) fn size(&self) -> u64 {
        match self {
            Self::Class(_) => 1,
            Self::Start | Self::Finish => 0,
            Self::Concat(parts) | Self::Alternatives(parts) => parts
                .iter()
                .fold(0, |sum: u64, part| sum.saturating_add(part.size())),
            Self::Repeat(part, min, max) => {
                let times = u64::from(max.unwrap_or(*min).max(1));
                part.size().saturating_mul(times)
            }
        }
    }

    fn has_anchor(&self) -> bool {
        match self {
            Self::Class(_) => false,
            Self::Start | Self::Finish => true,
            Self::Concat(parts) | Self::Alternatives(parts) => parts.iter().any(Self::has_anchor),
            Self::Repeat(part, ..) => part.has_anchor(),
        }
    }

    /// The expression that matches a whole text where `self` is found in it, from its start if
    /// `first`, to its end if `last`: anything may stand before and after, unless an anchor
    /// says no. Otherwise an error if there is an anchor.
    fn found(self, first: Option<&Re>, last: Option<&Re>) -> Result<Re, String> {
        let anchors = || "`^` or `$` stands inside the pattern, where it cannot match".to_owned();
        match self {
            Self::Alternatives(parts) => {
                let parts = parts.into_iter().map(|part| part.found(first, last));
                Ok(Self::Alternatives(parts.collect::<Result<_, _>>()?))
            }
            Self::Concat(parts) if parts.iter().any(Self::has_anchor) => {
                let mut parts = parts;
                let (mut first, mut last) = (first, last);
                let n_start = parts
                    .iter()
                    .take_while(|part| **part == Self::Start)
                    .count();
                if n_start > 0 {
                    first.is_some().then_some(()).ok_or_else(anchors)?;
                    parts.drain(..n_start);
                }
                let n_end = parts.iter().rev().take_while(|part| **part == Self::Finish);
                let n_end = n_end.count();
                if n_end > 0 {
                    last.is_some().then_some(()).ok_or_else(anchors)?;
                    parts.truncate(parts.len() - n_end);
                }
                first = first.filter(|_| n_start == 0);
                last = last.filter(|_| n_end == 0);
                let n = parts.len();
                if n == 0 {
                    return Ok(Self::Concat(
                        first.into_iter().chain(last).cloned().collect(),
                    ));
                }
                let mut out = Vec::with_capacity(n);
                for (i, part) in parts.into_iter().enumerate() {
                    let first = first.filter(|_| i == 0);
                    let last = last.filter(|_| i + 1 == n);
                    out.push(part.found(first, last)?);
                }
                Ok(Self::Concat(out))
            }
            Self::Start => match first {
                Some(_) => Ok(Self::Concat(last.cloned().into_iter().collect())),
                None => Err(anchors()),
            },
            Self::Finish => match last {
                Some(_) => Ok(Self::Concat(first.cloned().into_iter().collect())),
                None => Err(anchors()),
            },
            other if other.has_anchor() => Err("`^` or `$` is repeated".to_owned()),
            other => {
                let parts = first.cloned().into_iter().chain([other]);
                Ok(Self::Concat(parts.chain(last.cloned()).collect()))
            }
        }
    }
}

fn write_group(part: &Re, group: bool, out: &mut String) {
    if group {
        out.push_str("(?:");
        part.write(out);
        out.push(')');
    } else {
        part.write(out);
    }
}

/// Any text.
fn anything() -> Re {
    let class = Class::new(Vec::new()).negated();
    Re::Repeat(Box::new(Re::Class(class)), 0, None)
}

/// `pattern` as a Lark grammar that it matches from start to end.
pub(crate) fn to_lark(pattern: &str, limits: &Limits) -> Result<String, Error> {
    let invalid = |reason| Error::Invalid {
        what: "regular expression",
        reason,
    };
    let re = parse(pattern, limits.depth).map_err(invalid)?;
    check_size(&re, limits)?;
    // Anchors at the edges say what is so anyway.
    let edge = Re::Concat(Vec::new());
    let re = re.found(Some(&edge), Some(&edge)).map_err(invalid)?;
    let mut out = "start: TEXT\nTEXT: /".to_owned();
    let before = out.len();
    re.write(&mut out);
    if out.len() == before {
        return Err(invalid("it matches nothing but the empty text".to_owned()));
    }
    out.push_str("/\n");
    Ok(out)
}

/// `pattern` of a JSON Schema, which is found anywhere in a text, in the common dialect and
/// anchored at both ends.
pub(crate) fn to_schema(pattern: &str, limits: &Limits) -> Result<String, String> {
    let re = parse(pattern, limits.depth)?;
    check_size(&re, limits).map_err(|err| err.to_string())?;
    let anything = anything();
    let re = re.found(Some(&anything), Some(&anything))?;
    let mut out = "^(?:".to_owned();
    re.write(&mut out);
    out.push_str(")$");
    Ok(out)
}

/// Refuses an expression whose repetitions are too many.
pub(crate) fn check_size(re: &Re, limits: &Limits) -> Result<(), Error> {
    match re.size() <= limits.repetitions {
        true => Ok(()),
        false => Err(Error::TooLarge {
            what: "number of characters of a regular expression, repetitions written out,",
            limit: limits.repetitions,
        }),
    }
}

/// Parses `pattern`, whose groups are nested at most `depth` levels.
pub(crate) fn parse(pattern: &str, depth: usize) -> Result<Re, String> {
    let mut parser = Parser {
        chars: pattern.chars().collect(),
        at: 0,
    };
    let re = parser.alternatives(depth)?;
    match parser.peek() {
        None => Ok(re),
        Some(_) => Err(format!("`)` without a group, at character {}", parser.at)),
    }
}

struct Parser {
    chars: Vec<char>,
    at: usize,
}

impl Parser {
    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn next(&mut self) -> Option<char> {
        let ch = self.peek()?;
        self.at += 1;
        Some(ch)
    }

    fn eat(&mut self, text: &str) -> bool {
        let here = self.chars[self.at..].iter();
        let n = text.chars().count();
        let found = here.take(n).copied().eq(text.chars());
        if found {
            self.at += n;
        }
        found
    }

    fn error<T>(&self, what: &str) -> Result<T, String> {
        Err(format!("{what}, at character {}", self.at))
    }

    fn alternatives(&mut self, depth: usize) -> Result<Re, String> {
        let Some(depth) = depth.checked_sub(1) else {
            return self.error("groups are nested too deeply");
        };
        let mut options = vec![self.sequence(depth)?];
        while self.eat("|") {
            options.push(self.sequence(depth)?);
        }
        match options.len() {
            1 => Ok(options.swap_remove(0)),
            _ => Ok(Re::Alternatives(options)),
        }
    }

    fn sequence(&mut self, depth: usize) -> Result<Re, String> {
        let mut parts = Vec::new();
        while !matches!(self.peek(), None | Some('|' | ')')) {
            let part = self.atom(depth)?;
            parts.push(self.repeated(part)?);
        }
        match parts.len() {
            1 => Ok(parts.swap_remove(0)),
            _ => Ok(Re::Concat(parts)),
        }
    }

    fn repeated(&mut self, part: Re) -> Result<Re, String> {
        let (min, max) = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => match self.counts()? {
                Some(counts) => counts,
                None => return Ok(part),
            },
            _ => return Ok(part),
        };
        if matches!(part, Re::Start | Re::Finish) {
            return self.error("an anchor is repeated");
        }
        self.at += 1;
        self.eat("?");
        if matches!(self.peek(), Some('*' | '+' | '?')) {
            return self.error("a repetition is repeated");
        }
        Ok(Re::Repeat(Box::new(part), min, max))
    }

    /// The counts of `{m}`, `{m,}` or `{m,n}`, with the position left at the closing brace;
    /// `None`, and the position as it was, for a brace that is text.
    fn counts(&mut self) -> Result<Option<(u32, Option<u32>)>, String> {
        let begin = self.at;
        self.at += 1;
        let Some(min) = self.number() else {
            self.at = begin;
            return Ok(None);
        };
        let max = match self.peek() {
            Some(',') => {
                self.at += 1;
                self.number()
            }
            _ => Some(min),
        };
        if self.peek() != Some('}') {
            self.at = begin;
            return Ok(None);
        }
        if max.is_some_and(|max| max < min) {
            return self.error("a repetition has its counts in the wrong order");
        }
        Ok(Some((min, max)))
    }

    /// A decimal number; one that is too large is the largest.
    fn number(&mut self) -> Option<u32> {
        let begin = self.at;
        let mut number: u32 = 0;
        while let Some(digit) = self.peek().and_then(|ch| ch.to_digit(10)) {
            number = number.saturating_mul(10).saturating_add(digit);
            self.at += 1;
        }
        (self.at > begin).then_some(number)
    }

    fn atom(&mut self, depth: usize) -> Result<Re, String> {
        let Some(ch) = self.next() else {
            return self.error("the pattern ends");
        };
        match ch {
            '^' => Ok(Re::Start),
            '$' => Ok(Re::Finish),
            '.' => Ok(Re::Class(Class::new(LINE_ENDS.to_vec()).negated())),
            '[' => self.class().map(Re::Class),
            '(' => self.group(depth),
            '\\' => match self.peek() {
                Some('b' | 'B') => self.error("word boundaries are not supported"),
                Some('1'..='9' | 'k') => self.error("references to groups are not supported"),
                _ => self.escape().map(Re::Class),
            },
            '*' | '+' | '?' => self.error("a repetition of nothing"),
            ch => Ok(Re::Class(Class::one(ch))),
        }
    }

    fn group(&mut self, depth: usize) -> Result<Re, String> {
        if self.eat("?") {
            let looks = ["=", "!", "<=", "<!"];
            if looks.iter().any(|look| self.eat(look)) {
                return self.error("look-around is not supported");
            }
            if self.eat("<") || self.eat("P<") {
                while !matches!(self.next(), None | Some('>')) {}
            } else if !self.eat(":") {
                return self.error("flags of a group are not supported");
            }
        }
        let re = self.alternatives(depth)?;
        match self.eat(")") {
            true => Ok(re),
            false => self.error("a group is not closed"),
        }
    }

    fn class(&mut self) -> Result<Class, String> {
        let negated = self.eat("^");
        let mut ranges = Vec::new();
        let mut properties = Vec::new();
        loop {
            let class = match self.next() {
                None => return self.error("a class is not closed"),
                Some(']') => break,
                Some('\\') => self.escape_in_class()?,
                Some(ch) => Class::one(ch),
            };
            let dash = self.peek() == Some('-')
                && self.chars.get(self.at + 1).is_some_and(|&ch| ch != ']');
            if !dash {
                ranges.extend(class.ranges);
                match class.is_negated {
                    true => return self.error("a negated property in a class is not supported"),
                    false => properties.extend(class.properties),
                }
                continue;
            }
            self.at += 1;
            let end = match self.next() {
                Some('\\') => self.escape_in_class()?,
                Some(ch) => Class::one(ch),
                None => return self.error("a class is not closed"),
            };
            let (Some(lo), Some(hi)) = (class.single(), end.single()) else {
                return self.error("a range of a class has no single character at an end");
            };
            if lo > hi {
                return self.error("a range of a class is in the wrong order");
            }
            ranges.push((lo, hi));
        }
        let mut class = Class::new(ranges);
        class.properties = properties;
        Ok(if negated { class.negated() } else { class })
    }

    fn escape_in_class(&mut self) -> Result<Class, String> {
        match self.peek() {
            Some('b') => {
                self.at += 1;
                Ok(Class::one('\u{8}'))
            }
            Some('-') => {
                self.at += 1;
                Ok(Class::one('-'))
            }
            _ => self.escape(),
        }
    }

    /// What follows a backslash.
    fn escape(&mut self) -> Result<Class, String> {
        let Some(ch) = self.next() else {
            return self.error("the pattern ends in a backslash");
        };
        let class = match ch {
            'd' => Class::new(DIGITS.to_vec()),
            'D' => Class::new(DIGITS.to_vec()).negated(),
            'w' => Class::new(WORDS.to_vec()),
            'W' => Class::new(WORDS.to_vec()).negated(),
            's' => Class::new(SPACES.to_vec()),
            'S' => Class::new(SPACES.to_vec()).negated(),
            'n' => Class::one('\n'),
            'r' => Class::one('\r'),
            't' => Class::one('\t'),
            'f' => Class::one('\u{c}'),
            'v' => Class::one('\u{b}'),
            '0' if !matches!(self.peek(), Some('0'..='9')) => Class::one('\0'),
            'c' => match self.next() {
                Some(ch) if ch.is_ascii_alphabetic() => {
                    let code = ch as u32 % 32;
                    Class::new(vec![(code, code)])
                }
                _ => return self.error("`\\c` without a letter"),
            },
            'x' => self.hexadecimal(2)?,
            'u' if self.eat("{") => self.braced()?,
            'u' => self.unicode()?,
            'p' | 'P' => self.property(ch)?,
            ch if ch.is_ascii_alphanumeric() => {
                return self.error(&format!("the escape `\\{ch}` is not supported"));
            }
            ch => Class::one(ch),
        };
        Ok(class)
    }

    fn code(&self, code: u32) -> Result<Class, String> {
        match char::from_u32(code) {
            Some(ch) => Ok(Class::one(ch)),
            None => self.error("an escape is no character"),
        }
    }

    fn digits(&mut self, n: usize) -> Result<u32, String> {
        let mut code = 0;
        for _ in 0..n {
            match self.next().and_then(|ch| ch.to_digit(16)) {
                Some(digit) => code = code * 16 + digit,
                None => return self.error("an escape has too few hexadecimal digits"),
            }
        }
        Ok(code)
    }

    fn hexadecimal(&mut self, n: usize) -> Result<Class, String> {
        let code = self.digits(n)?;
        self.code(code)
    }

    /// `\uXXXX`, or two of them that spell one character.
    fn unicode(&mut self) -> Result<Class, String> {
        let high = self.digits(4)?;
        if !(0xD800..0xDC00).contains(&high) {
            return self.code(high);
        }
        if !self.eat("\\u") {
            return self.error("half of a surrogate pair");
        }
        let low = self.digits(4)?;
        if !(0xDC00..0xE000).contains(&low) {
            return self.error("half of a surrogate pair");
        }
        self.code(0x1_0000 + ((high - 0xD800) << 10) + (low - 0xDC00))
    }

    fn braced(&mut self) -> Result<Class, String> {
        let mut code: u32 = 0;
        while let Some(digit) = self.peek().and_then(|ch| ch.to_digit(16)) {
            code = code.saturating_mul(16).saturating_add(digit);
            self.at += 1;
        }
        match self.eat("}") {
            true => self.code(code),
            false => self.error("an escape is not closed"),
        }
    }

    fn property(&mut self, letter: char) -> Result<Class, String> {
        if !self.eat("{") {
            return self.error("a property without braces");
        }
        let mut name = String::new();
        loop {
            match self.next() {
                Some('}') => break,
                Some(ch) if ch.is_ascii_alphanumeric() || matches!(ch, '_' | '=') => name.push(ch),
                _ => return self.error("a property has no name"),
            }
        }
        let mut class = Class::new(Vec::new());
        class.properties.push(format!("\\{letter}{{{name}}}"));
        Ok(class)
    }
}

impl Class {
    /// The one character of the class.
    fn single(&self) -> Option<u32> {
        match (&*self.ranges, &*self.properties) {
            (&[(lo, hi)], []) if lo == hi => Some(lo),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schema(pattern: &str) -> Result<String, String> {
        to_schema(pattern, &Limits::default())
    }

    const ANY: &str = r"[\x{0}-\x{D7FF}\x{E000}-\x{10FFFF}]*";

    #[test]
    fn a_pattern_is_found_anywhere_unless_anchored() {
        for (pattern, expected) in [
            ("a", format!("^(?:{ANY}a{ANY})$")),
            ("^a", format!("^(?:a{ANY})$")),
            ("a$", format!("^(?:{ANY}a)$")),
            ("^a$", "^(?:a)$".to_owned()),
            ("^a|b$", format!("^(?:a{ANY}|{ANY}b)$")),
            ("(^a|b)$", format!("^(?:(?:a|{ANY}b))$")),
            ("", format!("^(?:{ANY}{ANY})$")),
            ("^$", "^(?:)$".to_owned()),
            ("^", format!("^(?:{ANY})$")),
        ] {
            assert_eq!(schema(pattern).as_deref(), Ok(&*expected), "{pattern}");
        }
        for pattern in ["a^", "$a", "(^)*a", "a(b|^c)", "a$b"] {
            assert!(schema(pattern).is_err(), "{pattern}");
        }
    }

    #[test]
    fn what_the_dialects_read_differently_is_spelled_out() {
        for (pattern, expected) in [
            (r"^\d$", "[0-9]"),
            (
                r"^.$",
                r"[\x{0}-\x{9}\x{B}-\x{C}\x{E}-\x{2027}\x{202A}-\x{D7FF}\x{E000}-\x{10FFFF}]",
            ),
            (r"^[a&&b]$", r"[\x{26}a-b]"),
            (r"^[[a]$", r"[\x{5B}a]"),
            (r"^{x}$", r"\x{7B}x\x{7D}"),
            (r"^a{2}$", "a{2,2}"),
            (r"^a+?$", "a+"),
            (r"^\u00e9\ud83d\ude00$", r"\x{E9}\x{1F600}"),
            (r"^\/\-\.$", r"\x{2F}\x{2D}\x{2E}"),
            (r"^\cA$", r"\x{1}"),
            (r"^(?<y>a)(?:b|c)$", "a(?:b|c)"),
            (r"^[^\s\S]$", r"[^\s\S]"),
            (r"^\p{Lu}[^\p{L}]$", r"[\p{Lu}][^\p{L}]"),
        ] {
            assert_eq!(
                schema(pattern),
                Ok(format!("^(?:{expected})$")),
                "{pattern}"
            );
        }
    }

    #[test]
    fn what_is_not_regular_or_not_written_right_is_refused() {
        let deep = "(".repeat(10_000) + &")".repeat(10_000);
        for pattern in [
            r"\bword",
            r"(a)\1",
            "(?=a)",
            "(?<!a)b",
            "(?i)a",
            "a**",
            "+",
            "(",
            ")",
            "[",
            r"\",
            "[b-a]",
            r"\ud83d",
            r"a{3,2}",
            r"\xg0",
            r"\u{110000}",
            r"\p{a-b}",
            r"\A",
            &deep,
        ] {
            assert!(schema(pattern).is_err(), "{pattern}");
        }
        assert!(matches!(
            to_lark("(a{1000}){1000}", &Limits::default()),
            Err(Error::TooLarge { .. })
        ));
    }
}
