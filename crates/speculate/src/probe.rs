//! The promise of the round, tried on the weights and the device at hand.
//!
//! Losslessness rests on one fact: a row's bits do not depend on the rows it is
//! computed with. Tests prove it for the kernels of this repository; this proves
//! it for one checkpoint on one device, in the time of a few steps.

use crate::{RoundError, Speculator};
use backend::{Batch, Tensor, gives_token};
use cache::Sequence;

/// The first score that a block of rows gave other bits than its rows one by one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Difference {
    /// Row of the block.
    pub row: usize,
    /// Token whose score differs.
    pub token: usize,
    /// Its score in the block.
    pub block: f32,
    /// Its score alone.
    pub alone: f32,
}

impl Speculator {
    /// Scores the tokens of `block` after `prompt` in the steps that a round takes,
    /// and again one row at a time; the first difference in a bit, if there is one.
    ///
    /// # Errors
    ///
    /// [`RoundError`], as in a round; [`RoundError::NoToken`] if scores give no token.
    ///
    /// # Panics
    ///
    /// If `prompt` or `block` is empty, or longer than a step can be.
    pub fn probe_rows(
        &mut self,
        prompt: &[u32],
        block: &[u32],
    ) -> Result<Option<Difference>, RoundError> {
        assert!(
            !prompt.is_empty() && !block.is_empty(),
            "rows to be compared"
        );
        let together = self.in_a_sequence(|this, sequence| {
            this.step(sequence, prompt, prompt.len())?;
            // The pending token is certain, the draft is not.
            let hidden = this.step(sequence, block, 1)?;
            this.scores(&hidden)
        })?;
        let alone = self.in_a_sequence(|this, sequence| {
            for &token in prompt {
                this.step(sequence, &[token], 1)?;
            }
            let mut alone = Vec::with_capacity(together.len());
            for &token in block {
                let hidden = this.step(sequence, &[token], 1)?;
                alone.extend(this.scores(&hidden)?);
            }
            Ok(alone)
        })?;
        let vocab = self.target.vocab_size();
        let mut pairs = together.iter().zip(&alone).enumerate();
        Ok(pairs
            .find(|(_, (block, alone))| block.to_bits() != alone.to_bits())
            .map(|(i, (&block, &alone))| Difference {
                row: i / vocab,
                token: i % vocab,
                block,
                alone,
            }))
    }

    /// Runs `work` on a sequence of its own.
    fn in_a_sequence<T>(
        &mut self,
        work: impl FnOnce(&mut Self, &mut Sequence) -> Result<T, RoundError>,
    ) -> Result<T, RoundError> {
        let mut sequence = self.memory.open()?;
        let result = work(self, &mut sequence);
        self.memory.close(sequence);
        result
    }

    /// Runs `tokens` after `sequence`; their hidden rows.
    fn step(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        certain: usize,
    ) -> Result<Tensor, RoundError> {
        let mut batch = Batch::default();
        self.memory.push(&mut batch, sequence, tokens, certain)?;
        let hidden = self.target.forward(&*self.b, &batch, &mut self.memory);
        self.b.finish()?;
        Ok(hidden)
    }

    /// The scores of every token after each of `hidden`'s rows.
    fn scores(&self, hidden: &Tensor) -> Result<Vec<f32>, RoundError> {
        let logits = self.target.logits(&*self.b, hidden);
        let scores = self.b.download(&logits).into_owned();
        self.b.finish()?;
        let mut rows = scores.chunks_exact(logits.cols());
        match rows.all(gives_token) {
            true => Ok(scores),
            false => Err(RoundError::NoToken),
        }
    }
}
