//! Checks and changes of a template's source before it is compiled: how deeply it is nested,
//! and what the compiler would compute.
//!
//! The compiler recurses along a chain such as `a.b.b.b` or `a + a + a`, and along
//! `elif`, but checks only brackets and blocks.

use minijinja::Environment;
use minijinja::machinery::{Token, tokenize};
use std::borrow::Cow;

use super::hooks::SAME;
use super::limits::{OPERATORS_MAX, TEMPLATE_BYTES_MAX};
use crate::error::{TextError, within};

/// Most words and signs of one chain of operators. Each item of a list and each argument of a
/// call is a chain of its own, so a long table of constants is short.
const CHAIN_MAX: usize = 1500;
/// Most `elif` tags of one template.
const ELIFS_MAX: usize = 1000;

/// Checks `source` against the limits of a template, and returns the source to compile.
///
/// # Errors
///
/// [`TextError::TooLarge`] if it is too long, has too many operators or is nested too deeply.
pub(super) fn prepare(env: &Environment<'_>, source: &str) -> Result<String, TextError> {
    within("chat template bytes", source.len(), TEMPLATE_BYTES_MAX)?;
    let n_operators = source
        .bytes()
        .filter(|byte| b"+-*/%~".contains(byte))
        .count();
    within("chat template operators", n_operators, OPERATORS_MAX)?;
    let source = without_generation(source).into_owned();
    let (chain, n_elifs) = measure(env, &source);
    within("chat template words in a chain", chain, CHAIN_MAX)?;
    within("chat template `elif` tags", n_elifs, ELIFS_MAX)?;
    Ok(without_repeated_constants(env, source))
}

/// The length of the longest chain in `source`, and the number of `elif` tags. A part that is
/// not a token ends the count: the compiler refuses it too, and names the line.
fn measure(env: &Environment<'_>, source: &str) -> (usize, usize) {
    let (mut longest, mut n_elifs) = (0, 0);
    let mut length = 0;
    // The length of the chain where each open bracket is.
    let mut open: Vec<usize> = Vec::new();
    for token in tokenize(source, false, env.syntax().clone()).map_while(Result::ok) {
        length += 1;
        match token.0 {
            Token::TemplateData(_) | Token::BlockStart | Token::VariableStart => {
                length = 0;
                open.clear();
            }
            Token::BracketOpen | Token::ParenOpen | Token::BraceOpen => open.push(length),
            Token::BracketClose | Token::ParenClose | Token::BraceClose => {
                open.pop();
            }
            Token::Comma => length = open.last().copied().unwrap_or(length),
            Token::Ident("elif") => n_elifs += 1,
            _ => {}
        }
        longest = longest.max(length);
    }
    (longest, n_elifs)
}

/// Puts the filter [`SAME`] before each `*` of `source`, so that no product is a constant.
///
/// The compiler computes constant expressions, before any budget: `'x' * 99999999` would be
/// 100 MB in the compiled program, and such texts joined are terabytes. The result of a
/// filter is not a constant, and a filter binds more tightly than any operator.
fn without_repeated_constants(env: &Environment<'_>, source: String) -> String {
    let mut places = Vec::new();
    let mut is_operand = false;
    for token in tokenize(&source, false, env.syntax().clone()).map_while(Result::ok) {
        if matches!(token.0, Token::Mul) && is_operand {
            places.push(token.1.start_offset as usize);
        }
        // Behind a bracket or a comma, `*` unpacks arguments.
        is_operand = !matches!(
            token.0,
            Token::ParenOpen | Token::BracketOpen | Token::Comma
        );
    }
    if places.is_empty() {
        return source;
    }
    let mut out = String::with_capacity(source.len() + places.len() * (SAME.len() + 2));
    let mut done = 0;
    for place in places {
        out.push_str(&source[done..place]);
        out.push('|');
        out.push_str(SAME);
        out.push(' ');
        done = place;
    }
    out.push_str(&source[done..]);
    out
}

/// Turns `{% generation %}`, which marks training targets, into `{% with %}`: the same scope,
/// without a meaning.
fn without_generation(source: &str) -> Cow<'_, str> {
    if !source.contains("generation") {
        return Cow::Borrowed(source);
    }
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        out.push_str(before);
        rest = tag;
        let Some(end) = tag.find("%}") else { break };
        let inside = &tag[..end];
        let word = inside
            .trim_start_matches(['-', '+'])
            .trim_end_matches(['-', '+'])
            .trim();
        let new = match word {
            "generation" => "with",
            "endgeneration" => "endwith",
            _ => continue,
        };
        out.push_str(&inside.replacen(word, new, 1));
        rest = &tag[end..];
    }
    out.push_str(rest);
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_marks_are_scopes() {
        assert_eq!(
            without_generation(
                "{%- generation -%} {% set generation = 1 %} {%endgeneration%} {% broken"
            ),
            "{%- with -%} {% set generation = 1 %} {%endwith%} {% broken"
        );
    }
}
