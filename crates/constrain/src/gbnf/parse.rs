//! GBNF → rules.

use std::collections::HashMap;

use crate::pattern::Class;
use crate::{Error, Limits};

/// A part of a rule.
#[derive(Clone, Debug)]
pub(super) enum Node {
    /// One character.
    Class(Class),
    /// One after the other; the empty text if there are none.
    Sequence(Vec<Node>),
    /// One of these.
    Alternatives(Vec<Node>),
    /// From `.1` to `.2` times.
    Repeat(Box<Node>, u32, Option<u32>),
    /// The rule of this number.
    Rule(usize),
}

/// The rules of a grammar; a [`Node::Rule`] is an index of `bodies`.
pub(super) struct Rules {
    pub(super) bodies: Vec<Node>,
    pub(super) root: usize,
}

/// The error for a grammar that is not valid.
pub(super) fn invalid(reason: String) -> Error {
    Error::Invalid {
        what: "GBNF grammar",
        reason,
    }
}

/// Parses a grammar.
pub(super) fn parse(text: &str, limits: &Limits) -> Result<Rules, Error> {
    let mut parser = Parser {
        chars: text.chars().collect(),
        at: 0,
        names: HashMap::new(),
        bodies: Vec::new(),
        n_nodes: 0,
        limits,
    };
    parser.space(true);
    while parser.peek().is_some() {
        parser.rule()?;
    }
    let missing = |name: &str| invalid(format!("there is no rule `{name}`"));
    let mut bodies = Vec::with_capacity(parser.bodies.len());
    for (id, body) in parser.bodies.into_iter().enumerate() {
        let name = parser.names.iter().find(|(_, other)| **other == id);
        let name = name.map_or("", |(name, _)| name);
        bodies.push(body.ok_or_else(|| missing(name))?);
    }
    let root = *parser.names.get("root").ok_or_else(|| missing("root"))?;
    Ok(Rules { bodies, root })
}

struct Parser<'a> {
    chars: Vec<char>,
    at: usize,
    names: HashMap<String, usize>,
    /// The rules by number; `None` for one that was only mentioned so far.
    bodies: Vec<Option<Node>>,
    n_nodes: usize,
    limits: &'a Limits,
}

impl Parser<'_> {
    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn next(&mut self) -> Option<char> {
        let ch = self.peek()?;
        self.at += 1;
        Some(ch)
    }

    fn eat(&mut self, text: &str) -> bool {
        let n = text.chars().count();
        let found = self.chars[self.at..]
            .iter()
            .take(n)
            .copied()
            .eq(text.chars());
        if found {
            self.at += n;
        }
        found
    }

    fn error<T>(&self, what: &str) -> Result<T, Error> {
        let before = &self.chars[..self.at.min(self.chars.len())];
        let line = before.iter().filter(|ch| **ch == '\n').count() + 1;
        Err(invalid(format!("{what}, in line {line}")))
    }

    /// Counts a part of a rule.
    fn count(&mut self) -> Result<(), Error> {
        self.n_nodes += 1;
        match self.n_nodes <= self.limits.schema_nodes {
            true => Ok(()),
            false => Err(Error::TooLarge {
                what: "number of parts of the grammar",
                limit: self.limits.schema_nodes as u64,
            }),
        }
    }

    /// Skips blanks and comments, and line ends if `lines`.
    fn space(&mut self, lines: bool) {
        while let Some(ch) = self.peek() {
            match ch {
                ' ' | '\t' => self.at += 1,
                '\r' | '\n' if lines => self.at += 1,
                '#' => {
                    while !matches!(self.peek(), None | Some('\r' | '\n')) {
                        self.at += 1;
                    }
                }
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Option<usize> {
        let begin = self.at;
        let is_word = |ch: char| ch.is_ascii_alphanumeric() || ch == '-' || ch == '_';
        while self.peek().is_some_and(is_word) {
            self.at += 1;
        }
        if self.at == begin {
            return None;
        }
        let name: String = self.chars[begin..self.at].iter().collect();
        let next = self.bodies.len();
        let id = *self.names.entry(name).or_insert(next);
        if id == next {
            self.bodies.push(None);
        }
        Some(id)
    }

    fn rule(&mut self) -> Result<(), Error> {
        let Some(id) = self.name() else {
            return self.error("a rule begins with its name");
        };
        self.space(false);
        if !self.eat("::=") {
            return self.error("`::=` follows the name of a rule");
        }
        self.space(true);
        let body = self.alternatives(self.limits.depth, false)?;
        if !matches!(self.peek(), None | Some('\r' | '\n')) {
            return self.error("a rule ends with its line");
        }
        self.space(true);
        if self.bodies[id].replace(body).is_some() {
            return self.error("a rule is there twice");
        }
        Ok(())
    }

    fn alternatives(&mut self, depth: usize, nested: bool) -> Result<Node, Error> {
        let Some(depth) = depth.checked_sub(1) else {
            return self.error("groups are nested too deeply");
        };
        let mut options = vec![self.sequence(depth, nested)?];
        while self.eat("|") {
            self.space(true);
            options.push(self.sequence(depth, nested)?);
        }
        self.count()?;
        match options.len() {
            1 => Ok(options.swap_remove(0)),
            _ => Ok(Node::Alternatives(options)),
        }
    }

    fn sequence(&mut self, depth: usize, nested: bool) -> Result<Node, Error> {
        let mut parts = Vec::new();
        while let Some(part) = self.part(depth)? {
            self.count()?;
            self.space(nested);
            let part = self.repeated(part)?;
            self.space(nested);
            parts.push(part);
        }
        match parts.len() {
            1 => Ok(parts.swap_remove(0)),
            _ => Ok(Node::Sequence(parts)),
        }
    }

    fn part(&mut self, depth: usize) -> Result<Option<Node>, Error> {
        let node = match self.peek() {
            Some('"') => self.literal()?,
            Some('[') => Node::Class(self.class()?),
            Some('.') => {
                self.at += 1;
                Node::Class(Class::new(Vec::new()).negated())
            }
            Some('(') => {
                self.at += 1;
                self.space(true);
                let inner = self.alternatives(depth, true)?;
                if !self.eat(")") {
                    return self.error("a group is not closed");
                }
                inner
            }
            Some('<' | '!') => return self.error("names of tokens are not supported"),
            _ => return Ok(self.name().map(Node::Rule)),
        };
        Ok(Some(node))
    }

    fn repeated(&mut self, part: Node) -> Result<Node, Error> {
        let (min, max) = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => {
                self.at += 1;
                self.counts()?
            }
            _ => return Ok(part),
        };
        self.at += 1;
        if u64::from(max.unwrap_or(min).max(min)) > self.limits.repetitions {
            return Err(Error::TooLarge {
                what: "count of a repetition",
                limit: self.limits.repetitions,
            });
        }
        match max {
            Some(0) => Ok(Node::Sequence(Vec::new())),
            _ => Ok(Node::Repeat(Box::new(part), min, max)),
        }
    }

    /// The counts of a repetition, with the position left at the closing brace.
    fn counts(&mut self) -> Result<(u32, Option<u32>), Error> {
        self.space(false);
        let Some(min) = self.number() else {
            return self.error("a repetition begins with a count");
        };
        self.space(false);
        let mut max = Some(min);
        if self.eat(",") {
            self.space(false);
            max = self.number();
            self.space(false);
        }
        if self.peek() != Some('}') || max.is_some_and(|max| max < min) {
            return self.error("a repetition is `{m}`, `{m,}` or `{m,n}`");
        }
        Ok((min, max))
    }

    fn number(&mut self) -> Option<u32> {
        let begin = self.at;
        let mut number: u32 = 0;
        while let Some(digit) = self.peek().and_then(|ch| ch.to_digit(10)) {
            number = number.saturating_mul(10).saturating_add(digit);
            self.at += 1;
        }
        (self.at > begin).then_some(number)
    }

    fn literal(&mut self) -> Result<Node, Error> {
        self.at += 1;
        let mut chars = Vec::new();
        loop {
            match self.peek() {
                None | Some('\r' | '\n') => return self.error("a literal is not closed"),
                Some('"') => break,
                Some(_) => {
                    self.count()?;
                    chars.push(Node::Class(Class::one(self.character()?)));
                }
            }
        }
        self.at += 1;
        match chars.len() {
            1 => Ok(chars.swap_remove(0)),
            _ => Ok(Node::Sequence(chars)),
        }
    }

    fn class(&mut self) -> Result<Class, Error> {
        self.at += 1;
        let negated = self.eat("^");
        let mut ranges = Vec::new();
        loop {
            match self.peek() {
                None | Some('\r' | '\n') => return self.error("a class is not closed"),
                Some(']') => break,
                Some(_) => {}
            }
            self.count()?;
            let low = self.character()?;
            let mut high = low;
            let after = self.chars.get(self.at + 1);
            if self.peek() == Some('-') && after.is_some_and(|&ch| ch != ']') {
                self.at += 1;
                high = self.character()?;
            }
            if high < low {
                return self.error("a range of a class is in the wrong order");
            }
            ranges.push((low as u32, high as u32));
        }
        self.at += 1;
        let class = Class::new(ranges);
        Ok(if negated { class.negated() } else { class })
    }

    /// A character of a literal or class, or an escape.
    fn character(&mut self) -> Result<char, Error> {
        let escaped = match self.next() {
            Some('\\') => self.next(),
            Some(ch) => return Ok(ch),
            None => None,
        };
        let n_digits = match escaped {
            Some('t') => return Ok('\t'),
            Some('r') => return Ok('\r'),
            Some('n') => return Ok('\n'),
            Some(ch @ ('\\' | '"' | '[' | ']' | '-' | '^')) => return Ok(ch),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            _ => return self.error("an escape is not known"),
        };
        let mut code: u32 = 0;
        for _ in 0..n_digits {
            match self.next().and_then(|ch| ch.to_digit(16)) {
                Some(digit) => code = (code << 4) | digit,
                None => return self.error("an escape has too few hexadecimal digits"),
            }
        }
        match char::from_u32(code) {
            Some(ch) => Ok(ch),
            None => self.error("an escape is no character"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistakes_are_named_with_their_line() {
        for (text, reason) in [
            (
                "root ::= \"a\"\nroot ::= \"b\"",
                "a rule is there twice, in line 2",
            ),
            ("root ::= other", "there is no rule `other`"),
            ("start ::= \"a\"", "there is no rule `root`"),
            ("root ::= \"a", "a literal is not closed, in line 1"),
            ("# c\nroot ::= [a", "a class is not closed, in line 2"),
            ("root ::= (\"a\"\n", "a group is not closed, in line 2"),
            (
                "root := \"a\"",
                "`::=` follows the name of a rule, in line 1",
            ),
            (
                "root ::= \"a\"{,2}",
                "a repetition begins with a count, in line 1",
            ),
            (
                "root ::= \"a\"{3,2}",
                "a repetition is `{m}`, `{m,}` or `{m,n}`, in line 1",
            ),
            ("root ::= \"\\q\"", "an escape is not known, in line 1"),
            (
                "root ::= [b-a]",
                "a range of a class is in the wrong order, in line 1",
            ),
            (
                "root ::= <think>",
                "names of tokens are not supported, in line 1",
            ),
            (
                "root ::= \"a\" ) \"b\"",
                "a rule ends with its line, in line 1",
            ),
        ] {
            let found = parse(text, &Limits::default()).err();
            assert_eq!(found, Some(invalid(reason.to_owned())), "{text}");
        }
    }
}
