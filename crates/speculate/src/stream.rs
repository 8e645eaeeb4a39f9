//! One text being written: what was asked for, what has come of it, and what is remembered.

use crate::length::{DraftLength, Ledger, LengthInput};
use crate::logprobs::Logprobs;
use crate::sample::{History, Law, Sampling};
use crate::stats::Stats;
use backend::MAX_TENTATIVE;
use cache::Sequence;
use std::sync::Arc;

/// Why a stream has ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The target chose a stop token. It is the last of the stream's tokens.
    Stop,
    /// As many tokens as asked for, or prompt and output fill the context.
    Length,
    /// The target's logits [give no token](backend::gives_token): it has computed NaN or an
    /// infinity. What it remembers of the text is worth nothing.
    NoToken,
}

/// What a stream is to write.
#[derive(Clone, Debug)]
pub struct StreamOptions {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens to write, at most.
    pub max_tokens: usize,
    /// Tokens that end the text.
    pub stop_tokens: Arc<[u32]>,
    /// How long its drafts are; at most 0 turns speculation off for this stream.
    pub draft: DraftLength,
    /// Whether its tokens come with their log-probabilities, and beside each with those of
    /// how many of the likeliest; [`MAX_TOP_LOGPROBS`](crate::MAX_TOP_LOGPROBS) at most.
    pub logprobs: Option<usize>,
}

/// One text being written.
pub struct Stream {
    pub(crate) sequence: Sequence,
    pub(crate) tokens: Vec<u32>,
    pub(crate) n_prompt: usize,
    pub(crate) draft: Vec<u32>,
    /// What its tokens were drawn from, where acceptance asks for it.
    pub(crate) laws: Vec<Law>,
    /// Of the newest tokens, if asked for.
    pub(crate) logprobs: Vec<Logprobs>,
    pub(crate) options: StreamOptions,
    pub(crate) history: History,
    pub(crate) finish: Option<Finish>,
    pub(crate) stats: Stats,
    pub(crate) ledger: Ledger,
    /// Rows of the prompt that another text had left.
    pub(crate) reused: usize,
    /// Rows that the drafter has learned, if they are all up to there.
    pub(crate) shown: usize,
    /// Rows after which recurrent state is to be kept aside, if any is.
    pub(crate) checkpoint: Option<usize>,
}

impl Stream {
    /// Prompt and text so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The text so far.
    pub fn output(&self) -> &[u32] {
        &self.tokens[self.n_prompt..]
    }

    /// Those of the tokens written since the last call, one for each if they are asked for.
    pub fn take_logprobs(&mut self) -> Vec<Logprobs> {
        std::mem::take(&mut self.logprobs)
    }

    /// Tokens of the prompt.
    pub fn n_prompt(&self) -> usize {
        self.n_prompt
    }

    /// Prompt rows that have run.
    pub fn n_prefilled(&self) -> usize {
        self.sequence.len().min(self.n_prompt)
    }

    /// Those of them that ran for another text before ([`Speculator::resume`]).
    pub fn n_reused(&self) -> usize {
        self.reused
    }

    /// Why the stream has ended, if it has.
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// What speculation did for it.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Tokens that the stream may still write: its `max_tokens` in all, and of prompt and
    /// output together as many as `context`.
    pub(crate) fn left(&self, context: usize) -> usize {
        let of_output = self.options.max_tokens.saturating_sub(self.output().len());
        of_output.min(context.saturating_sub(self.tokens.len()))
    }

    /// What its next draft's length depends on; there is room for none while its
    /// prompt has not ended.
    pub(crate) fn length_input(&self, prompt_ended: bool, context: usize) -> LengthInput<'_> {
        let left = self.left(context);
        // A round writes one token more than stay of the draft.
        let room = left.saturating_sub(1).min(MAX_TENTATIVE);
        LengthInput {
            ledger: &self.ledger,
            wish: self.options.draft,
            room: if prompt_ended { room } else { 0 },
            context: self.tokens.len(),
        }
    }
}
