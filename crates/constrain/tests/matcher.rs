//! Masks, pushes, pops and forced tokens.

mod common;

use common::{CALL, END, allowed, bundled, bytes, compiler, vocabulary};
use constrain::{Compiler, Error, Grammar, Limits, Spec, Token, Vocabulary};
use proptest::prelude::*;
use serde_json::json;
use std::sync::Arc;

#[test]
fn the_end_is_allowed_exactly_where_the_text_may_end() {
    let grammar = compiler().compile(&Spec::Regex("ab?".to_owned())).unwrap();
    let vocabulary = bytes();
    let mut matcher = grammar.start();
    assert_eq!(allowed(&mut matcher, &vocabulary), [u32::from(b'a'), 265]);
    assert!(!matcher.may_end() && !matcher.must_end());
    assert!(!matcher.push(END).unwrap());
    assert!(matcher.push(u32::from(b'a')).unwrap());
    assert_eq!(allowed(&mut matcher, &vocabulary), [u32::from(b'b'), END]);
    assert!(matcher.may_end() && !matcher.must_end());
    assert!(matcher.push(u32::from(b'b')).unwrap());
    assert_eq!(allowed(&mut matcher, &vocabulary), [END]);
    assert!(matcher.may_end() && matcher.must_end());
    assert!(!matcher.push(u32::from(b'b')).unwrap());
    assert!(matcher.push(END).unwrap());
    assert_eq!(allowed(&mut matcher, &vocabulary), [0_u32; 0]);
    assert!(!matcher.may_end() && matcher.must_end());
    assert!(!matcher.push(END).unwrap());
    matcher.pop(2);
    assert_eq!(allowed(&mut matcher, &vocabulary), [u32::from(b'b'), END]);
    assert_eq!(matcher.len(), 1);
}

#[test]
fn a_grammar_of_one_text_ends_with_it() {
    let grammar = compiler()
        .compile(&Spec::Choice(vec!["ab".to_owned()]))
        .unwrap();
    let mut matcher = grammar.start();
    while let Some(&token) = matcher.forced(1).first() {
        assert!(matcher.push(token).unwrap());
    }
    assert!(matcher.must_end());
    let empty = compiler()
        .compile(&Spec::Lark("start: \"\"".to_owned()))
        .unwrap();
    let mut matcher = empty.start();
    assert!(matcher.may_end() && matcher.must_end());
}

#[test]
fn plain_text_has_no_control_tokens_and_unused_tokens_never_come() {
    let grammar = compiler()
        .compile(&Spec::Lark("start: /(?s:.)+/".to_owned()))
        .unwrap();
    let mut matcher = grammar.start();
    assert!(matcher.push(u32::from(b'a')).unwrap());
    let ids = allowed(&mut matcher, &bytes());
    assert!(ids.contains(&u32::from(b'<')) && ids.contains(&END));
    for id in [CALL, 258, 0xC0, 0xFF] {
        assert!(!ids.contains(&id) && !matcher.push(id).unwrap(), "{id}");
    }
    assert!(!matcher.push(u32::MAX).unwrap());
}

#[test]
fn forced_tokens_are_the_tokenizers_and_the_only_ones() {
    let schema = json!({"type": "object", "properties": {"abc": {"type": "boolean"}}, "required": ["abc"], "additionalProperties": false});
    let grammar = compiler().compile(&Spec::JsonSchema(schema)).unwrap();
    let mut matcher = grammar.start();
    let forced = matcher.forced(9);
    assert_eq!(forced[..2], [259, 266], "`{{\"` and `abc`: {forced:?}");
    assert_eq!(matcher.forced(1), [259]);
    assert_eq!(matcher.forced(0), [0_u32; 0]);
    assert_eq!(allowed(&mut matcher, &bytes()), [259]);
    assert!(
        !matcher.push(u32::from(b'{')).unwrap(),
        "it would be cut differently"
    );
    assert!(matcher.push(259).unwrap());
    assert_eq!(matcher.forced(1), [266]);
}

#[test]
fn a_plan_is_followed_to_its_end_even_if_its_rest_would_be_cut_differently() {
    // A text of twelve bytes is cut in threes and others in letters.
    let tokens = (0..=255).map(|byte| Token::Bytes(vec![byte]));
    let more = [
        Token::Bytes(b"abc".to_vec()),
        Token::Special("<|end|>".to_owned()),
    ];
    let tokenize = |bytes: &[u8]| match bytes.len() == 12 {
        true => vec![256; bytes.len() / 3],
        false => bytes.iter().map(|&byte| u32::from(byte)).collect(),
    };
    let vocabulary = Vocabulary::new(tokens.chain(more).collect(), &[257], Arc::new(tokenize));
    let vocabulary = vocabulary.unwrap();
    let compiler = Compiler::new(vocabulary.clone(), Limits::default());
    let grammar = compiler
        .compile(&Spec::Choice(vec!["abcabcabcabc".to_owned()]))
        .unwrap();
    let mut matcher = grammar.start();
    assert_eq!(matcher.forced(9), [256; 4]);
    for left in [3, 2, 1] {
        assert!(matcher.push(256).unwrap());
        assert_eq!(matcher.forced(9), vec![256; left]);
    }
    matcher.pop(1);
    assert_eq!(matcher.forced(9), [256, 256]);
    assert_eq!(allowed(&mut matcher, &vocabulary), [256]);
    assert!(!matcher.push(u32::from(b'a')).unwrap());
}

#[test]
fn texts_of_one_grammar_do_not_touch_each_other() {
    let grammar = compiler().compile(&Spec::JsonObject).unwrap();
    let vocabulary = bytes();
    let (mut a, mut b) = (grammar.start(), grammar.start());
    for byte in b"{\"x\": [1, {" {
        assert!(a.push(u32::from(*byte)).unwrap());
    }
    let fresh = allowed(&mut grammar.start(), &vocabulary);
    assert_eq!(allowed(&mut b, &vocabulary), fresh);
    let moved = std::thread::spawn(move || a.push(u32::from(b'}')).unwrap());
    assert!(moved.join().unwrap());
}

#[test]
fn a_vocabulary_that_cannot_work_is_refused() {
    let tokenize: constrain::Tokenize = Arc::new(|_| Vec::new());
    let one = || vec![Token::Bytes(b"a".to_vec())];
    for (tokens, eos) in [(vec![], &[0][..]), (one(), &[]), (one(), &[1])] {
        let found = Vocabulary::new(tokens, eos, tokenize.clone());
        assert!(matches!(found, Err(Error::Vocabulary { .. })));
    }
    // A token that is too long for the trie is left out.
    let long = vec![
        Token::Bytes(vec![b'a'; 5000]),
        Token::Bytes(b"a".to_vec()),
        Token::Special("<e>".into()),
    ];
    let vocabulary = Vocabulary::new(long, &[2], tokenize).unwrap();
    let compiler = Compiler::new(vocabulary.clone(), Limits::default());
    let mut matcher = compiler.compile(&Spec::Regex("a*".into())).unwrap().start();
    assert_eq!(allowed(&mut matcher, &vocabulary), [1, 2]);
}

/// The grammars of the walks below.
fn grammars(compiler: &Compiler) -> Vec<Grammar> {
    let person = json!({"type": "object", "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "greenish"]}, "maxItems": 3},
        "more": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
    }, "required": ["name", "tags"]});
    let specs = [
        Spec::JsonObject,
        Spec::JsonSchema(person),
        Spec::Regex("([a-d]+[0-9]{2,4} ?)+".to_owned()),
        Spec::Choice(["ab", "abc", "b字", "bc"].map(str::to_owned).to_vec()),
        Spec::Lark("start: item+\nitem: \"(\" item* \")\" | /[ab]+/ \";\"".to_owned()),
    ];
    specs
        .iter()
        .map(|spec| compiler.compile(spec).unwrap())
        .collect()
}

/// Walks `grammar` by `choices`: pops, chains of forced tokens, refused tokens and allowed
/// ones; compares with a fresh matcher.
fn walk(grammar: &Grammar, vocabulary: &Vocabulary, choices: &[u16]) {
    let mut matcher = grammar.start();
    let mut tokens: Vec<u32> = Vec::new();
    for &choice in choices {
        let n = usize::from(choice / 8);
        match choice % 8 {
            0 if !tokens.is_empty() => {
                let n = n % tokens.len() + 1;
                matcher.pop(n);
                tokens.truncate(tokens.len() - n);
            }
            1 => {
                for token in matcher.forced(n % 5) {
                    assert_eq!(allowed(&mut matcher, vocabulary), [token]);
                    assert!(matcher.push(token).unwrap());
                    tokens.push(token);
                }
            }
            2 => {
                let token = (n % vocabulary.len()) as u32;
                let ok = allowed(&mut matcher, vocabulary).contains(&token);
                assert_eq!(matcher.push(token).unwrap(), ok, "{token} after {tokens:?}");
                tokens.extend(ok.then_some(token));
            }
            _ => {
                let ids = allowed(&mut matcher, vocabulary);
                // The end alone would end most walks at once.
                let Some(&token) = ids.get(n % ids.len().max(1)) else {
                    continue;
                };
                assert!(matcher.push(token).unwrap(), "{token} after {tokens:?}");
                tokens.push(token);
            }
        }
        assert_eq!(matcher.len(), tokens.len());
        if choice % 3 == 0 {
            let mut fresh = grammar.start();
            for &token in &tokens {
                assert!(fresh.push(token).unwrap(), "{token} of {tokens:?}");
            }
            assert_eq!(
                allowed(&mut fresh, vocabulary),
                allowed(&mut matcher, vocabulary),
                "{tokens:?}"
            );
            assert_eq!(fresh.forced(9), matcher.forced(9));
            assert_eq!(fresh.may_end(), matcher.may_end());
            assert_eq!(fresh.must_end(), matcher.must_end());
            let ids = allowed(&mut matcher, vocabulary);
            let ends = ids
                .iter()
                .filter(|id| vocabulary.eos().contains(id))
                .count();
            assert_eq!(ends > 0, matcher.may_end(), "{tokens:?}");
            let ended = tokens
                .last()
                .is_some_and(|token| vocabulary.eos().contains(token));
            assert_eq!(
                matcher.must_end(),
                ended || (ends > 0 && ends == ids.len()),
                "{tokens:?}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_walk_back_and_forth_is_the_walk_of_what_remains(choices in prop::collection::vec(any::<u16>(), 1..60)) {
        static SETUP: std::sync::LazyLock<Vec<(Vocabulary, Vec<Grammar>)>> = std::sync::LazyLock::new(|| {
            let of = |vocabulary: Vocabulary| {
                let compiler = Compiler::new(vocabulary.clone(), Limits::default());
                let grammars = grammars(&compiler);
                (vocabulary, grammars)
            };
            vec![of(bytes()), of(vocabulary(&bundled("tiny-gemma4"))), of(vocabulary(&bundled("tiny-qwen3.5")))]
        });
        for (vocabulary, grammars) in SETUP.iter() {
            for grammar in grammars {
                walk(grammar, vocabulary, &choices);
            }
        }
    }
}

/// A schema with values of every kind, some of which begin alike.
fn booking() -> serde_json::Value {
    let phone = json!({"type": "string", "pattern": "^\\d{3}-\\d{4}$", "maxLength": 20});
    json!({"type": "object", "properties": {
        "name": {"type": "string", "format": "ipv4"},
        "color": {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 15}, {"type": "object", "properties": {"owner": phone}, "required": ["owner"], "additionalProperties": false}]},
        "price": {"type": "object", "properties": {
            "is_open": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
            "notes": {"type": "array", "items": {"type": "null"}, "minItems": 0, "maxItems": 0},
            "age": {"type": "array", "items": phone, "maxItems": 1},
        }, "required": ["is_open", "age"], "additionalProperties": false},
    }, "required": ["name", "color", "price"], "additionalProperties": false})
}

#[test]
fn tokens_that_come_without_a_mask_between_are_those_of_a_fresh_matcher() {
    let vocabulary = vocabulary(&bundled("tiny-gemma4"));
    let compiler = Compiler::new(vocabulary.clone(), Limits::default());
    let grammar = compiler.compile(&Spec::JsonSchema(booking())).unwrap();
    let mut seed = 7u64;
    let mut below = move |n: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) as usize % n
    };
    for _ in 0..40 {
        let (mut matcher, mut fresh) = (grammar.start(), grammar.start());
        for _ in 0..150 {
            // A draft: forced tokens, then a guess; all of it is taken back, once with masks
            // and once without.
            for has_masks in [false, true] {
                let mut draft = matcher.forced(16);
                draft.push(below(vocabulary.len()) as u32);
                let mut pushed = 0;
                for token in draft {
                    if has_masks {
                        allowed(&mut matcher, &vocabulary);
                    }
                    pushed += usize::from(matcher.push(token).unwrap());
                }
                matcher.pop(pushed);
            }
            // The text goes on by the forced tokens and one more.
            for token in fresh.forced(16) {
                assert!(fresh.push(token).unwrap());
                assert!(matcher.push(token).unwrap());
            }
            assert_eq!(matcher.must_end(), fresh.must_end());
            if fresh.must_end() {
                break;
            }
            let ids = allowed(&mut fresh, &vocabulary);
            let token = ids[below(ids.len())];
            assert!(fresh.push(token).unwrap());
            assert!(matcher.push(token).unwrap(), "{token} of {ids:?}");
        }
    }
}
