//! Grammars that would cost too much: refused or compiled, in bounded time either way.

mod common;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::bytes;
use constrain::{Compiler, Error, Grammar, Limits, Spec, Token, Vocabulary};
use serde_json::{Value, json};

/// Compiles `spec` and makes sure that something else than the clock bounds what that takes:
/// on a machine with nothing else to do, each takes less than a second. Then writes 40 tokens.
#[track_caller]
fn bounded(spec: Spec) -> Result<Grammar, Error> {
    let limits = Limits {
        compile_ms: 30_000,
        ..Limits::default()
    };
    let compiler = Compiler::new(bytes(), limits);
    let begin = Instant::now();
    let found = compiler.compile(&spec);
    let took = begin.elapsed();
    assert!(!matches!(found, Err(Error::TimedOut { .. })), "{took:?}");
    if let Ok(grammar) = &found {
        let vocabulary = bytes();
        let mut words = vec![0; vocabulary.words()];
        let mut matcher = grammar.start();
        for i in 0..40_u32 {
            let begin = Instant::now();
            if matcher.allowed(&mut words).is_err() {
                break;
            }
            assert!(
                begin.elapsed() < Duration::from_secs(30),
                "mask {i}: {:?}",
                begin.elapsed()
            );
            let bits = |id: &u32| words[*id as usize / 32] >> (id % 32) & 1 == 1;
            let ids: Vec<u32> = (0..256).filter(bits).collect();
            let Some(&token) = ids.get((i * 7) as usize % ids.len().max(1)) else {
                break;
            };
            if matcher.push(token).is_err() {
                break;
            }
        }
    }
    found
}

#[track_caller]
fn bounded_schema(schema: Value) -> Result<Grammar, Error> {
    bounded(Spec::JsonSchema(schema))
}

#[track_caller]
fn too_large(found: Result<Grammar, Error>) {
    assert!(matches!(found, Err(Error::TooLarge { .. })), "{found:?}");
}

#[test]
fn enums_of_many_entries() {
    let names = |n| {
        (0..n)
            .map(|i| format!("entry number {i}"))
            .collect::<Vec<_>>()
    };
    assert!(bounded_schema(json!({"type": "string", "enum": names(2_000)})).is_ok());
    too_large(bounded_schema(
        json!({"type": "string", "enum": names(100_000)}),
    ));
    let numbers: Vec<u32> = (0..15_000).collect();
    let _ = bounded_schema(json!({"enum": numbers}));
    let _ = bounded(Spec::Choice(names(15_000)));
    too_large(bounded(Spec::Choice(names(100_000))));
}

#[test]
fn deep_and_wide_schemas() {
    let mut deep = json!({"type": "string"});
    for _ in 0..100 {
        deep = json!({"type": "array", "items": deep});
    }
    assert!(bounded_schema(deep.clone()).is_ok());
    for _ in 0..60 {
        deep = json!({"anyOf": [deep]});
    }
    too_large(bounded_schema(deep));

    let wide = |n: usize, more: bool| {
        let properties = (0..n).map(|i| (format!("property_{i}"), json!({"type": "integer"})));
        json!({"type": "object", "properties": properties.collect::<serde_json::Map<_, _>>(), "additionalProperties": more})
    };
    assert!(bounded_schema(wide(1_000, false)).is_ok());
    for more in [false, true] {
        too_large(bounded_schema(wide(9_000, more)));
    }
    let many: Vec<Value> = (0..100).map(|_| wide(100, true)).collect();
    assert!(bounded_schema(json!({"type": "array", "prefixItems": many, "items": false})).is_ok());
    too_large(bounded_schema(wide(40_000, false)));
    too_large(bounded_schema(json!({"description": "x".repeat(1 << 20)})));
}

#[test]
fn chains_and_loops_of_references() {
    let chain = |n: usize| {
        let link = |i: usize| match i + 1 < n {
            true => {
                json!({"type": "object", "properties": {"next": {"$ref": format!("#/$defs/d{}", i + 1)}}, "required": ["next"]})
            }
            false => json!({"type": "null"}),
        };
        let definitions: serde_json::Map<_, _> =
            (0..n).map(|i| (format!("d{i}"), link(i))).collect();
        json!({"$ref": "#/$defs/d0", "$defs": definitions})
    };
    assert!(bounded_schema(chain(100)).is_ok());
    too_large(bounded_schema(chain(5_000)));
    // A chain of references alone.
    let alone: serde_json::Map<_, _> = (0..10_000)
        .map(|i| {
            (
                format!("d{i}"),
                json!({"$ref": format!("#/$defs/d{}", (i + 1) % 10_000)}),
            )
        })
        .collect();
    assert!(bounded_schema(json!({"$ref": "#/$defs/d0", "$defs": alone})).is_err());
    // Two conditions that each contain themselves.
    let tree = |name: &str| json!({"type": "object", "properties": {"child": {"$ref": format!("#/$defs/{name}")}}});
    let _ = bounded_schema(
        json!({"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": tree("a"), "b": tree("b")}}),
    );
    // Every combination of alternatives.
    let pair = |i: usize| json!({"anyOf": [{"minimum": i}, {"maximum": 1_000 - i}]});
    let _ =
        bounded_schema(json!({"type": "integer", "allOf": (0..30).map(pair).collect::<Vec<_>>()}));
    // A definition that mentions the next one twice.
    let twice: serde_json::Map<_, _> = (0..60)
        .map(|i| (format!("d{i}"), json!({"allOf": [{"$ref": format!("#/$defs/d{}", i + 1)}, {"$ref": format!("#/$defs/d{}", i + 1)}]})))
        .chain([("d60".to_owned(), json!({"type": "object"}))])
        .collect();
    let _ = bounded_schema(json!({"$ref": "#/$defs/d0", "$defs": twice}));
}

#[test]
fn lengths_and_counts() {
    for schema in [
        json!({"type": "array", "maxItems": 1_000_000}),
        json!({"type": "array", "items": {"type": "array", "maxItems": 1_000_000}, "maxItems": 1_000_000}),
        json!({"type": "string", "maxLength": 1_000_000_000}),
        json!({"type": "array", "items": {"enum": [1, 2]}, "minItems": 90_000}),
        json!({"type": "string", "minLength": 90_000}),
        json!({"type": "object", "additionalProperties": {"type": "string", "maxLength": 5_000}, "maxProperties": 100_000}),
        json!({"type": "string", "pattern": "^[a-z]{0,50000}$", "minLength": 10, "maxLength": 40_000}),
    ] {
        let found = bounded_schema(schema.clone());
        assert!(found.is_ok(), "{schema}: {found:?}");
    }
    too_large(bounded_schema(
        json!({"type": "array", "minItems": 1_000_000}),
    ));
    too_large(bounded_schema(
        json!({"type": "string", "minLength": 1_000_000}),
    ));
}

#[test]
fn regular_expressions() {
    too_large(bounded(Spec::Regex("(a{1000}){1000}".to_owned())));
    too_large(bounded(Spec::Regex("((a{100}){100}){100}".to_owned())));
    for text in [
        "(a+)+b",
        "(a|aa)+$",
        "(a|b)*a(a|b){20}",
        "(.*a){12}",
        "((a?){30}){30}",
        "([a-z]{1,50} ){1,500}",
        "(x+x+)+y",
        "(?:[^a]*a){1,200}[^b]*",
    ] {
        let found = bounded(Spec::Regex(text.to_owned()));
        assert!(
            matches!(
                found,
                Ok(_) | Err(Error::TooLarge { .. } | Error::TooComplex { .. })
            ),
            "{text}: {found:?}"
        );
        let _ = bounded_schema(json!({"type": "string", "pattern": text}));
    }
    let names: Vec<String> = (0..200).map(|i| format!("^(.*{i}.*){{3}}$")).collect();
    let patterns: serde_json::Map<_, _> = names.into_iter().map(|name| (name, json!({}))).collect();
    assert!(bounded_schema(json!({"patternProperties": patterns})).is_err());
    let both: Vec<Value> = (2..40)
        .map(|i| json!({"pattern": format!("^(.{{{i}}})*$")}))
        .collect();
    let _ = bounded_schema(json!({"type": "string", "allOf": both}));
    let _ = bounded_schema(json!({"type": "number", "multipleOf": 0.000_001}));
    let _ = bounded_schema(json!({"type": "integer", "multipleOf": 9_007_199_254_740_991_u64}));
    let many: Vec<Value> = (2..60).map(|i| json!({"multipleOf": i})).collect();
    let _ = bounded_schema(json!({"type": "integer", "allOf": many}));
}

#[test]
fn grammars() {
    let doubling: String = (0..60)
        .map(|i| format!("r{i} ::= r{} r{}\n", i + 1, i + 1))
        .collect();
    let doubling = format!("root ::= r0\n{doubling}r60 ::= \"a\"");
    let long: String = (0..3_000)
        .map(|i| format!("r{i} ::= \"a\" r{} | \"b\"\n", i + 1))
        .collect();
    let long = format!("root ::= r0\n{long}r3000 ::= \"c\"");
    let deep = format!("root ::= {}\"a\"{}", "(".repeat(5_000), ")".repeat(5_000));
    for text in [
        doubling,
        long,
        deep,
        "root ::= root root | \"a\" | \"\"".to_owned(),
        "root ::= \"a\"{90000}".to_owned(),
        "root ::= (\"a\"{300}){300}".to_owned(),
        "root ::= ((\"a\"*)*)* (root \"b\")*".to_owned(),
        "root ::= ([a-z] root [a-z])?".to_owned(),
        format!(
            "root ::= \"x\" root | {}",
            (0..800)
                .map(|i| format!("\"word {i}\""))
                .collect::<Vec<_>>()
                .join(" | ")
        ),
    ] {
        let _ = bounded(Spec::Gbnf(text));
    }
    for text in [
        "start: start start | \"a\"",
        "start: (\"a\"? \"b\"?){1000}",
        "start: A{10000}\nA: /a{1000}/",
        "start: start \"a\" | \"a\" start | \"a\"",
    ] {
        let _ = bounded(Spec::Lark(text.to_owned()));
    }
}

#[test]
fn a_late_grammar_is_given_up_and_keeps_its_place_until_it_ends() {
    let tokens = (0..=255).map(|byte| Token::Bytes(vec![byte]));
    let tokens = tokens
        .chain([Token::Special("<|end|>".to_owned())])
        .collect();
    // The tokenizer, asked about the forced text, waits until the test lets it go.
    let gate = Arc::new(Mutex::new(()));
    let held = gate.lock().unwrap();
    let tokenize = {
        let gate = gate.clone();
        move |bytes: &[u8]| {
            drop(gate.lock());
            bytes.iter().map(|&byte| u32::from(byte)).collect()
        }
    };
    let vocabulary = Vocabulary::new(tokens, &[256], Arc::new(tokenize)).unwrap();
    let limits = Limits {
        compiling: 1,
        compile_ms: 20,
        ..Limits::default()
    };
    let compiler = Compiler::new(vocabulary, limits);
    let forced = Spec::Choice(vec!["abc".to_owned()]);
    let found = compiler.compile(&forced);
    assert_eq!(found.err(), Some(Error::TimedOut { limit_ms: 20 }));
    assert_eq!(compiler.compile(&forced).err(), Some(Error::Busy));
    drop(held);
    let begin = Instant::now();
    while compiler.compile(&forced).is_err() {
        assert!(begin.elapsed() < Duration::from_secs(30));
    }
}
