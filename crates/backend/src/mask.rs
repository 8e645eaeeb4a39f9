//! Which tokens of a vocabulary may come next: what a grammar or a schema allows.

use std::sync::Arc;

/// A set of tokens, one bit each. Copies share their bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenMask {
    words: Arc<[u32]>,
    n_tokens: usize,
}

impl TokenMask {
    /// The set of those of `allowed` that are below `n_tokens`, the size of the vocabulary.
    ///
    /// ```
    /// let mask = backend::TokenMask::new(100, [3, 64]);
    /// assert!(mask.allows(3) && mask.allows(64) && !mask.allows(4));
    /// ```
    pub fn new(n_tokens: usize, allowed: impl IntoIterator<Item = u32>) -> Self {
        let mut words = vec![0u32; n_tokens.div_ceil(32)];
        let known = allowed.into_iter().filter(|&t| (t as usize) < n_tokens);
        known.for_each(|token| words[token as usize / 32] |= 1 << (token % 32));
        TokenMask {
            words: words.into(),
            n_tokens,
        }
    }

    /// The set whose bits are `words`, 32 tokens a word, the lowest bit first, in a vocabulary of
    /// `n_tokens`. Bits past the last token count for nothing.
    ///
    /// # Panics
    ///
    /// If there are not as many words as the vocabulary needs.
    ///
    /// ```
    /// let mask = backend::TokenMask::from_words(40, vec![1 << 3, 1 << 2]);
    /// assert!(mask.allows(3) && mask.allows(34) && !mask.allows(4));
    /// ```
    pub fn from_words(n_tokens: usize, mut words: Vec<u32>) -> Self {
        assert_eq!(words.len(), n_tokens.div_ceil(32), "a bit for each token");
        let unused = words.len() * 32 - n_tokens;
        if let Some(last) = words.last_mut() {
            *last &= u32::MAX >> unused;
        }
        TokenMask {
            words: words.into(),
            n_tokens,
        }
    }

    /// Tokens of the vocabulary, allowed or not.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Whether `token` is in the set. No token outside of the vocabulary is.
    pub fn allows(&self, token: u32) -> bool {
        let word = self.words.get(token as usize / 32);
        word.is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Masks the rows of `logits`, of `cols` each, with `masks` in place: a logit becomes -inf where
    /// the row's mask does not allow the token. A row without a mask stays as it is.
    ///
    /// # Panics
    ///
    /// If there is not a mask, or `None`, for each row, or a mask is of another vocabulary.
    pub fn apply(masks: &[Option<TokenMask>], cols: usize, logits: &mut [f32]) {
        assert_eq!(
            masks.len() * cols,
            logits.len(),
            "a mask, or none, for each row"
        );
        for (row, mask) in logits.chunks_exact_mut(cols.max(1)).zip(masks) {
            let Some(mask) = mask else { continue };
            assert_eq!(mask.n_tokens, cols, "a bit for each token");
            for (logits, &word) in row.chunks_mut(32).zip(&*mask.words) {
                for (bit, logit) in logits.iter_mut().enumerate() {
                    if word >> bit & 1 == 0 {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }

    /// The bits, 32 tokens a word, the lowest bit first; those past the last token are 0.
    pub fn words(&self) -> &[u32] {
        &self.words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_allows_its_tokens_and_none_outside_of_the_vocabulary() {
        for n_tokens in [0, 1, 31, 32, 33, 1000] {
            let every_third = (0..n_tokens as u32 + 100).step_by(3);
            let mask = TokenMask::new(n_tokens, every_third);
            for token in 0..n_tokens as u32 + 100 {
                let is_third = token % 3 == 0 && (token as usize) < n_tokens;
                assert_eq!(mask.allows(token), is_third, "{token} of {n_tokens}");
            }
        }
    }
}
