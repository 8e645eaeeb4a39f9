//! A grammar over lexemes → Lark.

use std::fmt::Write;

use super::lexemes::{Grammar, Part};

/// `grammar` in Lark, where rule 3 is `r3` and lexeme 3 is `L3`.
pub(super) fn lark(grammar: &Grammar) -> String {
    let mut out = "start: ".to_owned();
    write(&grammar.root, &mut out);
    out.push('\n');
    for (id, rule) in grammar.rules.iter().enumerate() {
        if let Some(rule) = rule {
            // Writing to a string does not fail.
            _ = write!(out, "r{id}: ");
            write(rule, &mut out);
            out.push('\n');
        }
    }
    for id in grammar.used() {
        let lexeme = &grammar.lexemes[id];
        _ = write!(out, "L{id}: /");
        lexeme.re.write(&mut out);
        out.push('/');
        if lexeme.is_nullable {
            out.push_str(" & /(?s:.)+/");
        }
        out.push('\n');
    }
    out
}

fn write(part: &Part, out: &mut String) {
    match part {
        Part::Lexeme(id) => _ = write!(out, "L{id}"),
        Part::Rule(id) => _ = write!(out, "r{id}"),
        Part::Sequence(parts) if parts.is_empty() => out.push_str("\"\""),
        Part::Sequence(parts) => list(parts, " ", out),
        Part::Alternatives(parts) => list(parts, " | ", out),
        Part::Repeat(part, min, max) => {
            out.push('(');
            write(part, out);
            out.push(')');
            match (min, max) {
                (0, None) => out.push('*'),
                (1, None) => out.push('+'),
                (0, Some(1)) => out.push('?'),
                (min, None) => _ = write!(out, "{{{min},}}"),
                (min, Some(max)) => _ = write!(out, "{{{min},{max}}}"),
            }
        }
    }
}

fn list(parts: &[Part], between: &str, out: &mut String) {
    out.push('(');
    for (i, part) in parts.iter().enumerate() {
        if i > 0 {
            out.push_str(between);
        }
        write(part, out);
    }
    out.push(')');
}
