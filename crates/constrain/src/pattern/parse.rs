//! A pattern of ECMA-262 → an expression.

use super::{Class, Re};

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

/// Parses `pattern`, whose groups are nested at most `depth` levels.
pub(super) fn parse(pattern: &str, depth: usize) -> Result<Re, String> {
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
