//! A grammar over lexemes → Lark.

use std::fmt::Write;

use super::lexemes::{Grammar, Part};

/// Groups in groups that a rule may have; the library reads 30.
const DEPTH_MAX: usize = 16;

/// `grammar` in Lark, where rule 3 is `r3`, lexeme 3 is `L3`, and `g3` is a group that would be
/// nested too deeply.
pub(super) fn lark(grammar: &Grammar) -> String {
    let mut writer = Writer {
        out: "start: ".to_owned(),
        groups: Vec::new(),
    };
    writer.alternatives(&grammar.root, 0);
    for (id, rule) in grammar.rules.iter().enumerate() {
        if let Some(rule) = rule {
            // Writing to a string does not fail.
            _ = write!(writer.out, "\nr{id}: ");
            writer.alternatives(rule, 0);
        }
    }
    let mut done = 0;
    while let Some(part) = writer.groups.get(done).copied() {
        _ = write!(writer.out, "\ng{done}: ");
        writer.alternatives(part, 0);
        done += 1;
    }
    let mut out = writer.out;
    for id in grammar.used() {
        let lexeme = &grammar.lexemes[id];
        _ = write!(out, "\nL{id}: /");
        lexeme.re.write(&mut out);
        out.push('/');
        if lexeme.is_nullable {
            out.push_str(" & /(?s:.)+/");
        }
    }
    out.push('\n');
    out
}

struct Writer<'a> {
    out: String,
    /// Groups that became rules.
    groups: Vec<&'a Part>,
}

impl<'a> Writer<'a> {
    /// Writes what stands in a rule or group.
    fn alternatives(&mut self, part: &'a Part, depth: usize) {
        match part {
            Part::Alternatives(parts) if !parts.is_empty() => {
                for (i, part) in parts.iter().enumerate() {
                    if i > 0 {
                        self.out.push_str(" | ");
                    }
                    self.sequence(part, depth);
                }
            }
            part => self.sequence(part, depth),
        }
    }

    /// Writes one alternative.
    fn sequence(&mut self, part: &'a Part, depth: usize) {
        let Part::Sequence(parts) = part else {
            return self.single(part, depth);
        };
        // Parts that match nothing but the empty text only stand in the way.
        let is_empty = |part: &&Part| matches!(part, Part::Sequence(parts) if parts.is_empty());
        let before = self.out.len();
        for part in parts.iter().filter(|part| !is_empty(part)) {
            if self.out.len() > before {
                self.out.push(' ');
            }
            self.single(part, depth);
        }
        if self.out.len() == before {
            self.out.push_str("\"\"");
        }
    }

    fn single(&mut self, part: &'a Part, depth: usize) {
        match part {
            Part::Lexeme(id) => _ = write!(self.out, "L{id}"),
            Part::Rule(id) => _ = write!(self.out, "r{id}"),
            Part::Sequence(_) | Part::Alternatives(_) if depth == DEPTH_MAX => {
                _ = write!(self.out, "g{}", self.groups.len());
                self.groups.push(part);
            }
            Part::Sequence(_) | Part::Alternatives(_) => {
                self.out.push('(');
                self.alternatives(part, depth + 1);
                self.out.push(')');
            }
            Part::Repeat(part, min, max) => {
                match **part {
                    // What is repeated twice over is a group of its own.
                    Part::Repeat(..) if depth < DEPTH_MAX => {
                        self.out.push('(');
                        self.single(part, depth + 1);
                        self.out.push(')');
                    }
                    Part::Repeat(..) => {
                        _ = write!(self.out, "g{}", self.groups.len());
                        self.groups.push(part);
                    }
                    _ => self.single(part, depth),
                }
                match (min, max) {
                    (0, None) => self.out.push('*'),
                    (1, None) => self.out.push('+'),
                    (0, Some(1)) => self.out.push('?'),
                    (min, None) => _ = write!(self.out, "{{{min},}}"),
                    (min, Some(max)) => _ = write!(self.out, "{{{min},{max}}}"),
                }
            }
        }
    }
}
