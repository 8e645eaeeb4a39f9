//! Copies: drafts of what followed the last time the text ended like this.
//!
//! A copy costs no step of a model, so it is looked up before it is decided who drafts, and what it would
//! have been worth is known after every round, whoever drafted.

use super::ngram_index::NgramIndex;

/// The name of drafting by n-grams, as users type it and as records have it.
pub const NGRAM: &str = "ngram";

/// What drafting by n-grams is, in a few words for a help text.
pub const NGRAM_HELP: &str = "repetitions of the text";

/// The n-grams of one text, and what they propose to come next.
#[derive(Debug, Default)]
pub(crate) struct Ngrams {
    index: NgramIndex,
    /// Tokens of the match that the copy follows; 0 if there is none.
    matched: usize,
    copy: Vec<u32>,
}

impl Ngrams {
    /// Looks up what follows `text`, which begins with the text of the last time: at most `limit`
    /// tokens.
    pub(crate) fn look_up(&mut self, text: &[u32], limit: usize) {
        for &token in &text[self.index.len()..] {
            self.index.push(token);
        }
        self.matched = self.index.matched();
        self.copy = self.index.propose(limit);
    }

    /// Forgets the copy that was looked up.
    pub(crate) fn clear(&mut self) {
        self.matched = 0;
        self.copy.clear();
    }

    /// The copy that was looked up, and the tokens of the match that it follows.
    pub(crate) fn copy(&self) -> Option<(usize, &[u32])> {
        (!self.copy.is_empty()).then_some((self.matched, &self.copy[..]))
    }

    /// `limit` tokens at most of a draft that begins with `given`.
    pub(crate) fn draft(&self, given: &[u32], limit: usize) -> Vec<u32> {
        let mut draft = given.to_vec();
        draft.extend(
            self.index
                .propose_after(given, limit.saturating_sub(given.len())),
        );
        draft
    }
}
