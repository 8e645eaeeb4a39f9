//! The strings that no repetition of DRY reaches over, as tokens.

use crate::Engine;
use speculate::sample::Breakers;
use text::{TextError, Tokenizer};

/// What no repetition reaches over where a request does not say: line breaks, and marks with which
/// names and quotations begin.
pub const DRY_BREAKERS: &[&str] = &["\n", ":", "\"", "*"];

/// Tokens of a breaker after its first, at most; more are cut off.
const TAIL_MAX: usize = 20;

/// The tokens of the breakers `strings`, in the vocabulary of `engine`: each token that has one of
/// them inside, and each that ends with a part of one, followed by the tokens of the rest.
///
/// Looks at the whole vocabulary, which takes milliseconds.
///
/// # Errors
///
/// If the tokenizer fails.
pub fn sequence_breakers<S: AsRef<str>>(
    engine: &Engine,
    strings: &[S],
) -> Result<Breakers, TextError> {
    let tokenizer = &engine.text().tokenizer;
    let n = tokenizer.vocab_size().min(engine.info().vocab_size);
    let strings = strings.iter().map(AsRef::as_ref).filter(|s| !s.is_empty());
    let strings = strings.map(|string| Ok((string.as_bytes(), tails(tokenizer, string)?)));
    let strings: Vec<(&[u8], Vec<Tail>)> = strings.collect::<Result<_, TextError>>()?;
    let mut sequences = Vec::new();
    for token in 0..n as u32 {
        let bytes = tokenizer.token_bytes(token);
        for (string, tails) in &strings {
            if bytes.windows(string.len()).any(|part| part == *string) {
                sequences.push(vec![token]);
                continue;
            }
            let fits = tails.iter().take_while(|tail| tail.from <= bytes.len());
            let begun = fits.filter(|tail| bytes.ends_with(&string[..tail.from]));
            let whole = begun.map(|tail| [&[token], &tail.tokens[..]].concat());
            sequences.extend(whole);
        }
    }
    sequences.retain(|sequence| sequence.iter().all(|&token| (token as usize) < n));
    Ok(Breakers::new(sequences))
}

/// The end of a string from byte `from` on.
struct Tail {
    from: usize,
    tokens: Vec<u32>,
}

/// Every end of `string` but itself and the empty one, the longest first.
fn tails(tokenizer: &Tokenizer, string: &str) -> Result<Vec<Tail>, TextError> {
    let tail = |from: usize| {
        let mut tokens = tokenizer.encode(&string[from..], false)?;
        tokens.truncate(TAIL_MAX);
        Ok(Tail { from, tokens })
    };
    let from = (1..string.len()).filter(|&from| string.is_char_boundary(from));
    from.map(tail).collect()
}
