//! Follows a JSON Schema token by token, with a "model" that chooses at random.
//!
//! ```text
//! cargo run -p constrain --example shopping_list
//! ```
//!
//! Each line is a choice: `forced` where the schema leaves none, else how many tokens there
//! were to choose from.

use std::sync::Arc;

use constrain::{Compiler, Limits, Spec, Token, Vocabulary};
use serde_json::{Value, json};

fn main() -> Result<(), constrain::Error> {
    // A real vocabulary comes from the model's tokenizer. This one has the bytes, some words
    // and a token that ends the text.
    let mut tokens: Vec<Token> = (0..=255).map(|byte| Token::Bytes(vec![byte])).collect();
    let words = [
        "{\"", "item", "\": \"", "milk", "bread", "\", \"", "count", "\": ", "12",
    ];
    tokens.extend(words.map(|word| Token::Bytes(word.into())));
    let end = tokens.len() as u32;
    tokens.push(Token::Special("<end>".to_owned()));
    let tokenize = |bytes: &[u8]| bytes.iter().map(|&byte| u32::from(byte)).collect();
    let vocabulary = Vocabulary::new(tokens, &[end], Arc::new(tokenize))?;

    let compiler = Compiler::new(vocabulary.clone(), Limits::default());
    let schema = json!({
        "type": "object",
        "properties": {
            "item": {"enum": ["milk", "bread", "butter"]},
            "count": {"type": "integer", "minimum": 1, "maximum": 12},
        },
        "required": ["item", "count"],
        "additionalProperties": false,
    });
    let mut matcher = compiler.compile(&Spec::JsonSchema(schema))?.start();

    let mut text = Vec::new();
    let mut words = vec![0; vocabulary.words()];
    let mut random: u32 = 7;
    while !matcher.must_end() {
        let forced = matcher.forced(1);
        matcher.allowed(&mut words)?;
        let allowed = |id: &u32| words[*id as usize / 32] >> (id % 32) & 1 == 1;
        let ids: Vec<u32> = (0..vocabulary.len() as u32).filter(allowed).collect();
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let token = ids[(random >> 16) as usize % ids.len()];
        assert!(matcher.push(token)?);
        let bytes = vocabulary.bytes(token).unwrap_or_default();
        match forced.as_slice() {
            [] => print!("one of {:3}", ids.len()),
            _ => print!("forced    "),
        }
        println!("  {:?}", String::from_utf8_lossy(bytes));
        text.extend_from_slice(bytes);
        if token == end {
            break;
        }
    }
    let value: Value = serde_json::from_slice(&text).expect("the text is JSON");
    println!("{value}");
    Ok(())
}
