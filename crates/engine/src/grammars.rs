//! Compiles grammars for a model's vocabulary, which is prepared when first asked for.

use constrain::{Compiler, Error, Grammar, Limits, Spec, Token, Vocabulary};
use std::sync::{Arc, OnceLock};
use text::tools::ToolMark;
use text::{ReasoningMarks, Text};

/// Compiles what replies of one model are to follow.
pub(crate) struct Grammars {
    text: Arc<Text>,
    /// Tokens that the model has logits for.
    vocab: usize,
    compiler: OnceLock<Result<Compiler, Error>>,
}

impl Grammars {
    pub(crate) fn new(text: Arc<Text>, vocab: usize) -> Self {
        Grammars {
            text,
            vocab,
            compiler: OnceLock::new(),
        }
    }

    /// Compiles `spec`, or finds it compiled.
    pub(crate) fn compile(&self, spec: &Spec) -> Result<Grammar, Error> {
        let prepare = || {
            let vocabulary = vocabulary(&self.text, self.vocab)?;
            Ok(Compiler::new(vocabulary, Limits::default()))
        };
        let compiler = self.compiler.get_or_init(prepare);
        compiler.as_ref().map_err(Error::clone)?.compile(spec)
    }
}

/// The first `n` tokens of the model as a grammar sees them.
fn vocabulary(text: &Arc<Text>, n: usize) -> Result<Vocabulary, Error> {
    let tokenizer = &text.tokenizer;
    // Some models' marks are no special tokens, and plain text must not hold them all the same.
    let of_tools = text
        .tools
        .iter()
        .flat_map(|format| ToolMark::ALL.map(|mark| format.id(mark)));
    let of_reasoning = text.reasoning.iter().flat_map(ReasoningMarks::ids);
    let marks: Vec<u32> = of_tools.flatten().chain(of_reasoning).collect();
    let token = |id: u32| {
        let bytes = tokenizer.token_bytes(id);
        let is_special = tokenizer.is_special(id) || marks.contains(&id);
        match tokenizer.entry(id) {
            Some(spelling) if is_special => Token::Special(spelling),
            Some(_) if !bytes.is_empty() => Token::Bytes(bytes.to_vec()),
            _ => Token::Unused,
        }
    };
    let n = n.min(tokenizer.vocab_size()) as u32;
    let stops = text.stop_tokens.ids().iter().copied();
    let stops: Vec<u32> = stops.filter(|&id| id < n).collect();
    let of = text.clone();
    let tokenize = Arc::new(move |bytes: &[u8]| {
        let text = std::str::from_utf8(bytes).ok();
        let tokens = text.and_then(|text| of.tokenizer.encode(text, false).ok());
        tokens.unwrap_or_default()
    });
    Vocabulary::new((0..n).map(token).collect(), &stops, tokenize)
}
