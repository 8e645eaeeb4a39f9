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
//! [`Spec::Regex`](crate::Spec::Regex) has this dialect too, and matches from start to end.

mod parse;

use std::fmt::Write;

use crate::{Error, Limits};
use parse::parse;

/// One past the last code point.
const END: u32 = 0x11_0000;
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
