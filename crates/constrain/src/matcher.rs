//! The state of one text that follows a grammar.

use std::sync::{Arc, Mutex, PoisonError};

use crate::{Error, Vocabulary};

/// A compiled grammar. Immutable; a clone is cheap.
#[derive(Clone)]
pub struct Grammar {
    shared: Arc<Compiled>,
}

struct Compiled {
    /// The state before the first token. Behind a lock, which is held for a copy, since the
    /// lexer inside is not shared between threads.
    fresh: Mutex<llguidance::Matcher>,
    vocabulary: Vocabulary,
    bytes: usize,
}

impl Grammar {
    pub(crate) fn new(fresh: llguidance::Matcher, vocabulary: Vocabulary, bytes: usize) -> Self {
        Self {
            shared: Arc::new(Compiled {
                fresh: Mutex::new(fresh),
                vocabulary,
                bytes,
            }),
        }
    }

    /// The matcher of a new text. It shares nothing that changes with other texts, so what
    /// others write cannot change a mask or an error of this one.
    pub fn start(&self) -> Matcher {
        let inner = self.parser();
        Matcher {
            grammar: self.clone(),
            base: inner.clone(),
            base_len: 0,
            tokens: Vec::new(),
            inner,
            vocabulary: self.shared.vocabulary.clone(),
            state: State::default(),
            before: Vec::new(),
        }
    }

    /// A parser that has seen nothing.
    fn parser(&self) -> llguidance::Matcher {
        let fresh = self.shared.fresh.lock();
        fresh.unwrap_or_else(PoisonError::into_inner).deep_clone()
    }

    /// About how many bytes the compiled grammar holds.
    pub fn bytes(&self) -> usize {
        self.shared.bytes
    }
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar")
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

/// What a matcher knows beside the parser. Small, and saved before each push, so that taking
/// tokens back restores it.
#[derive(Clone, Default)]
struct State {
    /// Whether an end token was pushed.
    ended: bool,
    /// The tokens that the grammar forces from here, `None` until someone asks.
    plan: Option<Plan>,
}

/// Forced tokens: `tokens[at..]` are still to come.
///
/// A plan is made where the one before is used up, and followed to its end. So which tokens
/// are forced depends on the tokens of the text alone, even where the tokenizer would cut the
/// rest of a plan differently from the whole.
#[derive(Clone)]
struct Plan {
    tokens: Arc<[u32]>,
    at: usize,
}

impl Plan {
    fn rest(&self) -> &[u32] {
        &self.tokens[self.at..]
    }
}

/// The state of one text: which tokens may come next, and the tokens so far.
///
/// What may come next is a function of the grammar and of the tokens that were pushed and not
/// popped, whatever else was asked or taken back between.
pub struct Matcher {
    inner: llguidance::Matcher,
    grammar: Grammar,
    /// The parser after the first `base_len` tokens, from where tokens are taken back: the
    /// parser's own way back leaves it in states that refuse tokens of its masks.
    base: llguidance::Matcher,
    base_len: usize,
    /// The tokens that the parser has seen.
    tokens: Vec<u32>,
    vocabulary: Vocabulary,
    state: State,
    before: Vec<State>,
}

impl Matcher {
    /// Sets the bits of the tokens that may come next: bit `i % 32` of `words[i / 32]` is
    /// token `i`. All other bits are cleared. The tokens that end a text are allowed exactly
    /// where the text may end; after one of them, nothing is.
    ///
    /// Where the grammar forces the text, the one allowed token is the tokenizer's own.
    ///
    /// # Errors
    ///
    /// [`Error::TooComplex`] if the grammar is too ambiguous here, whatever was pushed and
    /// taken back before.
    ///
    /// # Panics
    ///
    /// If `words` is shorter than [`Vocabulary::words`].
    pub fn allowed(&mut self, words: &mut [u32]) -> Result<(), Error> {
        self.twice(|matcher| matcher.try_allowed(words))
    }

    fn try_allowed(&mut self, words: &mut [u32]) -> Result<(), Error> {
        let n_words = self.vocabulary.words();
        assert!(words.len() >= n_words, "a mask has a bit for each token");
        words.fill(0);
        let mut set = |token: u32| words[token as usize / 32] |= 1 << (token % 32);
        if self.state.ended {
            return Ok(());
        }
        if let Some(&token) = self.plan()?.rest().first() {
            set(token);
            return Ok(());
        }
        let may_end = self.inner_may_end()?;
        let mask = match self.inner.is_stopped() {
            true => None,
            false => Some(self.inner.compute_mask().map_err(too_complex)?),
        };
        if let Some(mask) = mask {
            words[..n_words].copy_from_slice(&mask.as_slice()[..n_words]);
            // The set may have room for one token more.
            let spare = n_words * 32 - self.vocabulary.len();
            words[n_words - 1] &= u32::MAX >> spare;
        }
        for &token in self.vocabulary.eos() {
            let bit = 1 << (token % 32);
            let word = &mut words[token as usize / 32];
            *word = if may_end { *word | bit } else { *word & !bit };
        }
        match words.iter().any(|&word| word != 0) {
            true => Ok(()),
            false => Err(Error::TooComplex {
                reason: "no token of the vocabulary continues the text".to_owned(),
            }),
        }
    }

    /// Appends `token` to the text if it is allowed; otherwise returns `false` and changes
    /// nothing.
    ///
    /// # Errors
    ///
    /// As [`Matcher::allowed`].
    pub fn push(&mut self, token: u32) -> Result<bool, Error> {
        self.twice(|matcher| matcher.try_push(token))
    }

    fn try_push(&mut self, token: u32) -> Result<bool, Error> {
        if self.state.ended || token as usize >= self.vocabulary.len() {
            return Ok(false);
        }
        let plan = self.plan()?;
        let next = match plan.rest().first() {
            Some(&forced) if forced != token => return Ok(false),
            Some(_) => State {
                ended: false,
                plan: Some(Plan {
                    tokens: plan.tokens.clone(),
                    at: plan.at + 1,
                })
                .filter(|plan| !plan.rest().is_empty()),
            },
            None if self.vocabulary.eos().contains(&token) => {
                if !self.inner_may_end()? {
                    return Ok(false);
                }
                State {
                    ended: true,
                    plan: None,
                }
            }
            None => {
                let valid = self.inner.validate_tokens(&[token]).map_err(too_complex)?;
                if valid == 0 {
                    return Ok(false);
                }
                State::default()
            }
        };
        if !next.ended {
            self.inner.consume_token(token).map_err(too_complex)?;
            self.tokens.push(token);
        }
        self.before.push(std::mem::replace(&mut self.state, next));
        Ok(true)
    }

    /// Takes the last `n` pushed tokens back.
    ///
    /// # Panics
    ///
    /// If fewer than `n` tokens were pushed.
    pub fn pop(&mut self, n: usize) {
        assert!(n <= self.before.len(), "only pushed tokens are taken back");
        if n == 0 {
            return;
        }
        // The parser never sees the token that ends the text.
        let n_parsed = n - usize::from(self.state.ended);
        let kept = self.before.len() - n;
        self.state = self.before[kept].clone();
        self.before.truncate(kept);
        if n_parsed > 0 {
            self.rebuild(n_parsed);
        }
    }

    /// Does `work`; if it fails, once more with a parser that has seen the text and nothing else:
    /// what failed may have been left by tokens that were taken back.
    fn twice<T>(
        &mut self,
        mut work: impl FnMut(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        work(self).or_else(|_| {
            (self.base, self.base_len) = (self.grammar.parser(), 0);
            self.rebuild(0);
            work(self)
        })
    }

    /// Builds the parser anew without the last `n` tokens that it has seen.
    fn rebuild(&mut self, n: usize) {
        let kept = self.tokens.len() - n;
        self.tokens.truncate(kept);
        if kept < self.base_len {
            (self.base, self.base_len) = (self.grammar.parser(), 0);
        }
        for &token in &self.tokens[self.base_len..] {
            // Fails only where it failed before, and then every call says so.
            let _ = self.base.consume_token(token);
        }
        self.base_len = kept;
        self.inner = self.base.clone();
    }

    /// The number of tokens of the text, the one that ended it included.
    pub fn len(&self) -> usize {
        self.before.len()
    }

    /// Whether the text has no token.
    pub fn is_empty(&self) -> bool {
        self.before.is_empty()
    }

    /// At most `most` tokens that the grammar leaves no choice about, one after the other, as
    /// the tokenizer cuts them. [`Matcher::allowed`] allows each after the ones before, and
    /// nothing else. The text stays as it is. Empty where there is a choice, where only the
    /// end may follow, and in a matcher that has failed.
    pub fn forced(&mut self, most: usize) -> Vec<u32> {
        match self.plan() {
            Ok(plan) => plan.rest().iter().copied().take(most).collect(),
            Err(_) => Vec::new(),
        }
    }

    /// Whether the text may end here. False after a token that ended it, and in a matcher that
    /// has failed.
    pub fn may_end(&mut self) -> bool {
        !self.state.ended && self.inner_may_end().unwrap_or(false)
    }

    /// Whether nothing but the end may follow. True after a token that ended the text.
    pub fn must_end(&mut self) -> bool {
        if self.state.ended {
            return true;
        }
        if !self.may_end() {
            return false;
        }
        // The parser looks whether it has stopped only after a token.
        self.inner.is_stopped() || (self.is_empty() && self.only_ends())
    }

    /// Whether the mask allows nothing but end tokens.
    fn only_ends(&mut self) -> bool {
        let mut words = vec![0; self.vocabulary.words()];
        if self.allowed(&mut words).is_err() {
            return false;
        }
        for &token in self.vocabulary.eos() {
            words[token as usize / 32] &= !(1 << (token % 32));
        }
        words.iter().all(|&word| word == 0)
    }

    fn inner_may_end(&mut self) -> Result<bool, Error> {
        if self.plan()?.rest().is_empty() {
            return self.inner.is_accepting().map_err(too_complex);
        }
        Ok(false)
    }

    /// The forced tokens from here, worked out when first asked.
    fn plan(&mut self) -> Result<Plan, Error> {
        if let Some(plan) = &self.state.plan {
            return Ok(plan.clone());
        }
        let tokens: Arc<[u32]> = match self.state.ended || self.inner.is_stopped() {
            true => self.check().map(|()| Arc::default())?,
            false => {
                let tokens = self.inner.compute_ff_tokens();
                self.check()?;
                tokens.into()
            }
        };
        let plan = Plan { tokens, at: 0 };
        self.state.plan = Some(plan.clone());
        Ok(plan)
    }

    /// The error of a parser that has failed.
    fn check(&self) -> Result<(), Error> {
        match self.inner.get_error() {
            Some(err) => Err(too_complex(err)),
            None => Ok(()),
        }
    }
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher")
            .field("tokens", &self.before.len())
            .field("ended", &self.state.ended)
            .finish_non_exhaustive()
    }
}

/// An error of the parser while a text is written.
pub(crate) fn too_complex(err: impl std::fmt::Display) -> Error {
    let reason = err.to_string();
    Error::TooComplex {
        reason: reason.lines().next().unwrap_or_default().to_owned(),
    }
}
