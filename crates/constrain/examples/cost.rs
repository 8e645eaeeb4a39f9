//! What grammars cost: building vocabularies, compiling schemas by size, masks by percentile.
//!
//! ```text
//! cargo run --release -p constrain --example cost -- models/tiny-gemma4 models/tiny-qwen3.5
//! ```
//!
//! The texts are random choices among the allowed tokens, plain characters preferred, so that
//! strings end and objects fill up.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use constrain::{Compiler, Limits, Spec, Token, Vocabulary};
use serde_json::{Map, Value, json};
use text::{Text, TextFiles};

fn main() {
    for folder in std::env::args().skip(1) {
        let text = Arc::new(TextFiles::open(Path::new(&folder)).expect("a checkpoint"));
        println!("{folder}");
        let (tokens, eos) = tokens(&text);
        let tokenize = move |bytes: &[u8]| {
            let whole = std::str::from_utf8(bytes).ok();
            let ids = whole.and_then(|whole| text.tokenizer.encode(whole, false).ok());
            ids.unwrap_or_default()
        };
        report(tokens, &eos, Arc::new(tokenize));
    }
    println!("262,144 made-up tokens");
    let (tokens, eos) = made_up(262_144);
    report(tokens, &[eos], Arc::new(|_| Vec::new()));
}

/// The tokens of a checkpoint.
fn tokens(text: &Text) -> (Vec<Token>, Vec<u32>) {
    let tokenizer = &text.tokenizer;
    let token = |id| match (tokenizer.is_special(id), tokenizer.token_bytes(id)) {
        (true, _) => Token::Special(tokenizer.entry(id).unwrap_or_default()),
        (false, []) => Token::Unused,
        (false, bytes) => Token::Bytes(bytes.to_vec()),
    };
    let tokens = (0..tokenizer.vocab_size() as u32).map(token).collect();
    (tokens, text.stop_tokens.ids().to_vec())
}

/// `n` tokens: the bytes, and words of two to five syllables with and without a space before.
fn made_up(n: u32) -> (Vec<Token>, u32) {
    let mut tokens: Vec<Token> = (0..=255).map(|byte| Token::Bytes(vec![byte])).collect();
    let syllables = [
        "an", "ter", "ing", "o", "pre", "s", "el", "qu", "\"", "1", "\":", "é", "字", "Th", ".",
        "_",
    ];
    for i in 0..n - 257 {
        let mut word = if i % 2 == 0 {
            String::from(" ")
        } else {
            String::new()
        };
        let mut rest = i / 2 + 16;
        while rest > 0 {
            word.push_str(syllables[rest as usize % 16]);
            rest /= 16;
        }
        tokens.push(Token::Bytes(word.into_bytes()));
    }
    tokens.push(Token::Special("<end>".to_owned()));
    (tokens, n - 1)
}

/// A schema of `n` objects with nine properties each.
fn schema(n: usize) -> Value {
    let person = |i: usize| {
        json!({"type": "object", "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "email": {"type": "string", "format": "email"},
            "kind": {"enum": ["a", "b", format!("kind {i}")]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
            "score": {"type": ["number", "null"]},
            "born": {"type": "string", "format": "date"},
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,6}$"},
            format!("extra {i}"): {"type": "boolean"},
        }, "required": ["name", "age", "kind", "tags"], "additionalProperties": false})
    };
    let properties: Map<String, Value> = (0..n).map(|i| (format!("p{i}"), person(i))).collect();
    json!({"type": "object", "properties": properties, "required": properties.keys().collect::<Vec<_>>(), "additionalProperties": false})
}

fn report(tokens: Vec<Token>, eos: &[u32], tokenize: constrain::Tokenize) {
    let (n, before) = (tokens.len(), resident());
    let begin = Instant::now();
    let vocabulary = Vocabulary::new(tokens, eos, tokenize).expect("a vocabulary");
    let took = begin.elapsed();
    let grown = resident().saturating_sub(before);
    println!("  vocabulary of {n} tokens: {took:.0?}, {grown} MiB");
    let compiler = Compiler::new(vocabulary, Limits::default());
    for (name, spec) in [
        ("any object".to_owned(), Spec::JsonObject),
        ("1 object".to_owned(), Spec::JsonSchema(schema(1))),
        ("10 objects".to_owned(), Spec::JsonSchema(schema(10))),
        ("100 objects".to_owned(), Spec::JsonSchema(schema(100))),
    ] {
        let bytes = match &spec {
            Spec::JsonSchema(schema) => schema.to_string().len(),
            _ => 0,
        };
        let begin = Instant::now();
        let grammar = compiler.compile(&spec);
        let took = begin.elapsed();
        match grammar {
            Ok(grammar) => {
                println!(
                    "  {name}, {bytes} bytes: compiled in {took:.1?}, {} KiB",
                    grammar.bytes() >> 10
                );
                masks(&compiler, &grammar);
            }
            Err(err) => println!("  {name}, {bytes} bytes: {took:.1?}, {err}"),
        }
    }
}

/// Writes texts and prints how long starts, masks and pushes took.
fn masks(compiler: &Compiler, grammar: &constrain::Grammar) {
    let vocabulary = compiler.vocabulary();
    let mut words = vec![0; vocabulary.words()];
    let (mut starts, mut masks, mut pushes) = (Vec::new(), Vec::new(), Vec::new());
    let (mut n_tokens, mut n_forced) = (0, 0);
    let mut random: u32 = 1;
    for _ in 0..8 {
        let begin = Instant::now();
        let mut matcher = grammar.start();
        starts.push(begin.elapsed());
        for _ in 0..200 {
            let begin = Instant::now();
            let forced = !matcher.forced(1).is_empty();
            if matcher.allowed(&mut words).is_err() {
                return println!("    too complex");
            }
            masks.push(begin.elapsed());
            let allowed = |id: &u32| words[*id as usize / 32] >> (id % 32) & 1 == 1;
            let ids: Vec<u32> = (0..vocabulary.len() as u32).filter(allowed).collect();
            let short = |id: &&u32| vocabulary.bytes(**id).is_some_and(|bytes| bytes.len() == 1);
            let singles: Vec<u32> = ids.iter().filter(short).copied().collect();
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let from = if random & 1 << 30 == 0 && !singles.is_empty() {
                &singles
            } else {
                &ids
            };
            let Some(&token) = from.get((random >> 8) as usize % from.len().max(1)) else {
                break;
            };
            let begin = Instant::now();
            let pushed = matcher.push(token);
            pushes.push(begin.elapsed());
            n_tokens += 1;
            n_forced += usize::from(forced);
            if pushed != Ok(true) || matcher.must_end() {
                break;
            }
        }
    }
    println!("    {n_tokens} tokens, {n_forced} forced");
    for (name, mut times) in [("start", starts), ("mask", masks), ("push", pushes)] {
        times.sort_unstable();
        let at = |percent: usize| times[(times.len() - 1) * percent / 100];
        println!(
            "    {name}: p50 {:.1?}, p90 {:.1?}, p99 {:.1?}, worst {:.1?}, sum {:.1?}",
            at(50),
            at(90),
            at(99),
            at(100),
            times.iter().sum::<Duration>(),
        );
    }
}

/// Memory of this process in MiB; 0 where the system does not say.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<usize>().ok());
    kib.unwrap_or(0) >> 10
}
