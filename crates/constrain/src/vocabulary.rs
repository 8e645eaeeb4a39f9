//! The tokens of a model as the grammar engine reads them.

use std::fmt;
use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};

use crate::Error;

/// The byte that marks control tokens in the trie. It is in no UTF-8 text.
const MARK: u8 = TokTrie::SPECIAL_TOKEN_MARKER;
/// Longest token that a grammar can allow, in bytes: the trie is at most 1,024 nodes deep.
const TOKEN_BYTES_MAX: usize = 1_000;
/// Most bytes of all tokens together: the trie counts its nodes in 22 bits.
const VOCABULARY_BYTES_MAX: usize = (1 << 22) - 1;
/// Most tokens: the trie counts them in 24 bits.
const TOKENS_MAX: usize = (1 << 24) - 2;

/// What a token is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Token {
    /// Text: the bytes that the token adds. A part of a character is fine.
    Bytes(Vec<u8>),
    /// A control token by its spelling, such as `<|im_end|>`. It is never part of plain text;
    /// a Lark grammar names it without quotes.
    Special(String),
    /// An id that is never allowed, such as a padding row of the embedding.
    Unused,
}

/// Turns bytes of text into tokens, without adding any.
pub type Tokenize = Arc<dyn Fn(&[u8]) -> Vec<u32> + Send + Sync>;

/// The tokens of a model. Built once a model; a clone is cheap.
#[derive(Clone)]
pub struct Vocabulary {
    shared: Arc<Shared>,
}

struct Shared {
    env: TokEnv,
    slicer: ParserFactory,
    eos: Vec<u32>,
    n_tokens: usize,
}

impl Vocabulary {
    /// Prepares `tokens`, where `tokens[i]` is token `i`. `eos` are the tokens that end a text.
    /// `tokenize` is the model's tokenizer for text that follows other text; it says how text
    /// that a grammar forces is cut into tokens.
    ///
    /// A token whose bytes are in no UTF-8 text, or that is longer than 1,000 bytes, is never
    /// allowed.
    ///
    /// # Errors
    ///
    /// [`Error::Vocabulary`] if there are no tokens or too many, no end token, or one outside
    /// the vocabulary.
    pub fn new(tokens: Vec<Token>, eos: &[u32], tokenize: Tokenize) -> Result<Self, Error> {
        let refuse = |reason: String| Err(Error::Vocabulary { reason });
        if tokens.is_empty() || tokens.len() > TOKENS_MAX {
            return refuse(format!("it has {} tokens", tokens.len()));
        }
        let Some(&first) = eos.first() else {
            return refuse("it has no token that ends a text".to_owned());
        };
        if let Some(id) = eos.iter().find(|&&id| id as usize >= tokens.len()) {
            return refuse(format!("the end token {id} is not in it"));
        }
        let words: Vec<Vec<u8>> = tokens.into_iter().map(word).collect();
        let bytes: usize = words.iter().map(Vec::len).sum();
        if bytes > VOCABULARY_BYTES_MAX {
            return refuse(format!("its tokens have {bytes} bytes"));
        }
        let n_tokens = words.len();
        let info = TokRxInfo::new(n_tokens as u32, first);
        let build = || {
            let trie = TokTrie::from(&info, &words).with_eos_tokens(eos);
            let env: TokEnv = Arc::new(Env { trie, tokenize });
            let slices = SlicedBiasComputer::general_slices();
            let slicer = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)?;
            Ok((env, slicer))
        };
        let built = llguidance::panic_utils::catch_unwind(std::panic::AssertUnwindSafe(build));
        let (env, slicer) = built.map_err(|err| Error::Vocabulary {
            reason: err.to_string(),
        })?;
        Ok(Self {
            shared: Arc::new(Shared {
                env,
                slicer,
                eos: eos.to_vec(),
                n_tokens,
            }),
        })
    }

    /// The number of tokens, [`Token::Unused`] ones included.
    pub fn len(&self) -> usize {
        self.shared.n_tokens
    }

    /// Whether there are no tokens; never true.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of words of a mask: one bit a token, 32 a word.
    pub fn words(&self) -> usize {
        self.len().div_ceil(32)
    }

    /// The tokens that end a text.
    pub fn eos(&self) -> &[u32] {
        &self.shared.eos
    }

    /// The bytes of `token`, if it is text.
    pub fn bytes(&self, token: u32) -> Option<&[u8]> {
        let bytes = self.shared.env.tok_trie().token(token);
        (!bytes.is_empty() && bytes[0] != MARK).then_some(bytes)
    }

    pub(crate) fn env(&self) -> &TokEnv {
        &self.shared.env
    }

    pub(crate) fn factory(&self) -> &ParserFactory {
        &self.shared.slicer
    }
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary")
            .field("tokens", &self.len())
            .field("eos", &self.eos())
            .finish_non_exhaustive()
    }
}

/// The entry of `token` in the trie; empty for a token that is never allowed.
fn word(token: Token) -> Vec<u8> {
    match token {
        Token::Bytes(bytes) => {
            // Bytes that UTF-8 never uses; the mark of control tokens is one.
            let stray = |b: &u8| matches!(b, 0xC0 | 0xC1 | 0xF5..=0xFF);
            match bytes.len() > TOKEN_BYTES_MAX || bytes.iter().any(stray) {
                true => Vec::new(),
                false => bytes,
            }
        }
        Token::Special(name) if name.is_empty() || name.len() >= TOKEN_BYTES_MAX => Vec::new(),
        Token::Special(name) => [&[MARK], name.as_bytes()].concat(),
        Token::Unused => Vec::new(),
    }
}

/// The vocabulary with the model's tokenizer.
struct Env {
    trie: TokTrie,
    tokenize: Tokenize,
}

impl TokenizerEnv for Env {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// The model's own segmentation, unless it is not one of exactly these bytes: a tokenizer
    /// may normalize text, or read a control token in it.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        let tokens = (self.tokenize)(bytes);
        let mut rest = bytes;
        for &token in &tokens {
            let word = self.trie.token(token);
            match rest.strip_prefix(word) {
                Some(after) if !word.is_empty() => rest = after,
                _ => return self.trie.greedy_tokenize(bytes),
            }
        }
        match rest.is_empty() {
            true => tokens,
            false => self.trie.greedy_tokenize(bytes),
        }
    }
}
