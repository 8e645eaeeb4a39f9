//! Vocabularies and ways to follow a grammar that the tests share.

#![allow(dead_code, unreachable_pub)]

use std::path::Path;
use std::sync::Arc;

use constrain::{Compiler, Error, Grammar, Limits, Matcher, Spec, Token, Vocabulary};
use serde_json::Value;
use text::{Text, TextFiles};

/// The end token of [`bytes`].
pub const END: u32 = 256;
/// A control token of [`bytes`], spelled `<|call|>`.
pub const CALL: u32 = 257;

/// A vocabulary of the 256 bytes, an end token, a control token and some longer tokens.
pub fn bytes() -> Vocabulary {
    let mut tokens: Vec<Token> = (0..=255).map(|byte| Token::Bytes(vec![byte])).collect();
    tokens.push(Token::Special("<|end|>".to_owned()));
    tokens.push(Token::Special("<|call|>".to_owned()));
    tokens.push(Token::Unused);
    let longer = [
        "{\"", "\":", "\": ", "\", \"", "\"}", "}}", "ab", "abc", "bc", "  ", "\n  ", "12", "34",
        "é", "字", "true", "null", "},",
    ];
    tokens.extend(
        longer
            .iter()
            .map(|text| Token::Bytes(text.as_bytes().to_vec())),
    );
    let words: Vec<Vec<u8>> = longer.iter().map(|text| text.as_bytes().to_vec()).collect();
    let tokenize = move |mut text: &[u8]| {
        let mut out = Vec::new();
        while let Some(&byte) = text.first() {
            let fits = words
                .iter()
                .enumerate()
                .filter(|(_, word)| text.starts_with(word));
            let longest = fits.max_by_key(|(_, word)| word.len());
            let (id, n) = longest.map_or((u32::from(byte), 1), |(i, word)| {
                (259 + i as u32, word.len())
            });
            out.push(id);
            text = &text[n..];
        }
        out
    };
    Vocabulary::new(tokens, &[END], Arc::new(tokenize)).unwrap()
}

/// The tokenizer of a bundled model.
pub fn bundled(name: &str) -> Arc<Text> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../models")
        .join(name);
    Arc::new(TextFiles::open(&folder).unwrap())
}

/// The vocabulary of a bundled model.
pub fn vocabulary(text: &Arc<Text>) -> Vocabulary {
    let tokenizer = &text.tokenizer;
    let token = |id| match (tokenizer.is_special(id), tokenizer.token_bytes(id)) {
        (true, _) => Token::Special(tokenizer.entry(id).unwrap_or_default()),
        (false, []) => Token::Unused,
        (false, bytes) => Token::Bytes(bytes.to_vec()),
    };
    let tokens = (0..tokenizer.vocab_size() as u32).map(token).collect();
    let text = text.clone();
    let eos = text.stop_tokens.ids().to_vec();
    let tokenize = move |bytes: &[u8]| {
        let whole = std::str::from_utf8(bytes).ok();
        whole
            .and_then(|whole| text.tokenizer.encode(whole, false).ok())
            .unwrap_or_default()
    };
    Vocabulary::new(tokens, &eos, Arc::new(tokenize)).unwrap()
}

pub fn compiler() -> Compiler {
    Compiler::new(bytes(), Limits::default())
}

pub fn schema(schema: Value) -> Result<Grammar, Error> {
    compiler().compile(&Spec::JsonSchema(schema))
}

/// The tokens that may come next.
pub fn allowed(matcher: &mut Matcher, vocabulary: &Vocabulary) -> Vec<u32> {
    let mut words = vec![u32::MAX; vocabulary.words()];
    matcher.allowed(&mut words).unwrap();
    let ids = 0..words.len() as u32 * 32;
    ids.filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1)
        .collect()
}

/// Whether the text follows the grammar from start to end, a byte at a time or, where the
/// grammar forces longer tokens, by those.
pub fn accepts(grammar: &Grammar, text: &str) -> bool {
    let vocabulary = bytes();
    let mut matcher = grammar.start();
    let mut rest = text.as_bytes();
    while let Some(&byte) = rest.first() {
        let forced = matcher.forced(1);
        let token = forced.first().copied().unwrap_or(u32::from(byte));
        let word = vocabulary.bytes(token).unwrap_or_default().to_vec();
        if !rest.starts_with(&word) || word.is_empty() || !matcher.push(token).unwrap() {
            return false;
        }
        rest = &rest[word.len()..];
    }
    matcher.may_end()
}
