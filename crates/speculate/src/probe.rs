//! Row invariance, checked on the weights and the device at hand.
//!
//! Losslessness rests on one fact: a row's bits do not depend on the rows it is
//! computed with. Tests prove it for the kernels of this repository; this checks
//! it for one checkpoint on one device, in the time of a few steps.

use crate::{RoundError, Speculator};

/// The first logit that a block of rows gave other bits than its rows one by one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Difference {
    /// Row of the block.
    pub row: usize,
    /// Token whose logit differs.
    pub token: usize,
    /// The logit in the block.
    pub block: f32,
    /// The logit of the row alone.
    pub alone: f32,
}

impl Speculator {
    /// Computes the logits after each token of `block`, which follows `prompt`, in the steps
    /// that a round takes and again one row at a time. Returns the first logit that differs
    /// in a bit, if one does.
    ///
    /// # Errors
    ///
    /// [`RoundError`], as in a round; [`RoundError::NoToken`] if logits give no token.
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
        let together = self.with_sequence(|this, sequence| {
            this.forward(sequence, prompt, prompt.len())?;
            this.b.finish()?;
            // The pending token is certain, the draft is not.
            let hidden = this.forward(sequence, block, 1)?;
            this.logits(&hidden)
        })?;
        let alone = self.with_sequence(|this, sequence| {
            for &token in prompt {
                this.forward(sequence, &[token], 1)?;
                this.b.finish()?;
            }
            let mut alone = Vec::with_capacity(together.len());
            for &token in block {
                let hidden = this.forward(sequence, &[token], 1)?;
                alone.extend(this.logits(&hidden)?);
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
}
