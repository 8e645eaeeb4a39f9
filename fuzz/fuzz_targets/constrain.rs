//! Any grammar: refused, or followed by masks, pushes and pops that agree with each other.
//!
//! The first byte says what the rest is: changes of a good JSON Schema, or the text of a
//! regular expression, a GBNF grammar, a Lark grammar or a choice. The same bytes choose the
//! tokens.

#![no_main]

use constrain::{Compiler, Error, Grammar, Limits, Spec, Token, Vocabulary};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

const WORDS: &[&str] = &[
    "",
    "a",
    "b",
    "type",
    "string",
    "integer",
    "number",
    "object",
    "array",
    "boolean",
    "null",
    "properties",
    "required",
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "multipleOf",
    "enum",
    "const",
    "anyOf",
    "allOf",
    "oneOf",
    "not",
    "$ref",
    "#",
    "#/$defs/a",
    "#/properties/a",
    "$defs",
    "$anchor",
    "$id",
    "^a",
    "a|b",
    "(a+)+b",
    "[^a]{2,5}$",
    "date",
    "date-time",
    "email",
    "uri",
    "ipv6",
    "uuid",
    "minProperties",
    "maxProperties",
    "uniqueItems",
    "unevaluatedProperties",
    "x-guidance",
    "contentEncoding",
    "base64",
];

/// Longest time of a compilation, on a slow machine.
const COMPILE: Duration = Duration::from_secs(20);

static COMPILER: LazyLock<Compiler> = LazyLock::new(|| {
    let mut tokens: Vec<Token> = (0..=255).map(|byte| Token::Bytes(vec![byte])).collect();
    let words = [
        "{\"", "\": ", "\", \"", "ab", "abc", "12", "true", "é", "}}",
    ];
    tokens.extend(words.map(|word| Token::Bytes(word.into())));
    tokens.push(Token::Special("<|end|>".to_owned()));
    tokens.push(Token::Special("<|call|>".to_owned()));
    let end = tokens.len() as u32 - 2;
    let tokenize = |bytes: &[u8]| bytes.iter().map(|&byte| u32::from(byte)).collect();
    let vocabulary = Vocabulary::new(tokens, &[end], Arc::new(tokenize)).unwrap();
    let limits = Limits {
        compile_ms: COMPILE.as_millis() as u64,
        cached_grammars: 0,
        ..Limits::default()
    };
    Compiler::new(vocabulary, limits)
});

fuzz_target!(
    init: {
        // A panic while compiling becomes an error, which is looked for below.
        std::panic::set_hook(Box::new(|_| {}));
    },
    |data: &[u8]| {
        let Some((which, data)) = data.split_first() else {
            return;
        };
        let text = || String::from_utf8_lossy(data).into_owned();
        let spec = match which % 6 {
            0 | 1 => {
                let mut schema = good();
                fuzz::edit(&mut schema, WORDS, data);
                Spec::JsonSchema(schema)
            }
            2 => Spec::Regex(text()),
            3 => Spec::Gbnf(text()),
            4 => Spec::Lark(text()),
            _ => Spec::Choice(text().split('|').map(str::to_owned).collect()),
        };
        if std::env::var_os("FUZZ_SHOW").is_some() {
            eprintln!("{spec:?}");
        }
        let begin = Instant::now();
        let found = COMPILER.compile(&spec);
        assert!(begin.elapsed() < COMPILE, "{:?}", begin.elapsed());
        match found {
            Ok(grammar) => follow(&grammar, data),
            Err(Error::Invalid { what: "grammar", reason }) => panic!("{reason}"),
            Err(_) => {}
        }
    }
);

/// Writes, takes back, and compares with a text that was never taken back.
fn follow(grammar: &Grammar, data: &[u8]) {
    let vocabulary = COMPILER.vocabulary();
    let n = vocabulary.len() as u32;
    let mut words = vec![0; vocabulary.words()];
    let mut matcher = grammar.start();
    let mut tokens: Vec<u32> = Vec::new();
    for &byte in data.iter().take(64) {
        if byte < 32 && !tokens.is_empty() {
            let k = usize::from(byte) % tokens.len() + 1;
            matcher.pop(k);
            tokens.truncate(tokens.len() - k);
        }
        let forced = matcher.forced(1);
        if matcher.allowed(&mut words).is_err() {
            return;
        }
        let allowed = |id: u32| words[id as usize / 32] >> (id % 32) & 1 == 1;
        let ids: Vec<u32> = (0..n).filter(|&id| allowed(id)).collect();
        assert!(forced.is_empty() || ids == forced, "{ids:?} and {forced:?}");
        let other = u32::from(byte) % n;
        let next = ids
            .get(usize::from(byte) % ids.len().max(1))
            .copied()
            .unwrap_or(other);
        // A token that is not allowed changes nothing.
        let tries = [other, next];
        for token in tries.into_iter().skip(usize::from(allowed(other))) {
            let Ok(pushed) = matcher.push(token) else {
                return;
            };
            assert_eq!(pushed, allowed(token), "{token} after {tokens:?}");
            tokens.extend(pushed.then_some(token));
        }
    }
    let mut fresh = grammar.start();
    for &token in &tokens {
        match fresh.push(token) {
            Ok(pushed) => assert!(pushed, "{token} of {tokens:?}"),
            Err(_) => return,
        }
    }
    let mut other = words.clone();
    if fresh.allowed(&mut words).is_ok() && matcher.allowed(&mut other).is_ok() {
        assert_eq!(words, other, "{tokens:?}");
    }
}

fn good() -> Value {
    json!({
        "type": "object",
        "properties": {
            "a": {"anyOf": [{"type": "string", "maxLength": 4}, {"$ref": "#/$defs/a"}]},
            "b": {"type": "array", "items": {"enum": [1, "b", null]}, "minItems": 1, "maxItems": 3},
            "c": {"type": "number", "minimum": 0, "exclusiveMaximum": 10.5},
        },
        "required": ["b"],
        "additionalProperties": {"oneOf": [{"type": "boolean"}, {"const": 2}]},
        "$defs": {"a": {"type": "object", "patternProperties": {"^a": {"$ref": "#"}}, "maxProperties": 2}},
    })
}
