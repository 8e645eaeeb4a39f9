//! Steps of the target outside of a stream.
//!
//! Scoring, timing and the row check run tokens that are given: nothing is chosen and
//! nothing is drafted. They share what is here: a sequence that is closed when the work on
//! it ends, and one step of the target after it. The target runs as in a round, so a row
//! has the bits that it has there.

use crate::{RoundError, Speculator};
use backend::{Batch, Tensor, gives_token};
use cache::Sequence;

impl Speculator {
    /// Runs `work` on a new sequence and closes it, whatever came of the work.
    pub(crate) fn with_sequence<T>(
        &mut self,
        work: impl FnOnce(&mut Self, &mut Sequence) -> Result<T, RoundError>,
    ) -> Result<T, RoundError> {
        let mut sequence = self.with_room(None, &[], |this| this.memory.open())?;
        let result = work(self, &mut sequence);
        self.memory.close(sequence);
        result
    }

    /// Runs `tokens` after `sequence` in one step and returns their hidden rows `[n, H]`. The
    /// first `certain` of them cannot be forgotten. The caller has the backend `finish` after
    /// the step's last op.
    pub(crate) fn forward(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        certain: usize,
    ) -> Result<Tensor, RoundError> {
        let mut batch = Batch::default();
        self.with_room(None, &[], |this| {
            this.memory.push(&mut batch, sequence, tokens, certain)
        })?;
        Ok(self.target.forward(&*self.b, &batch, &mut self.memory))
    }

    /// Runs all of `tokens` after `sequence`, in as many steps as they take.
    pub(crate) fn prefill(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
    ) -> Result<(), RoundError> {
        for chunk in tokens.chunks(self.memory.size().step_rows) {
            self.forward(sequence, chunk, chunk.len())?;
            self.b.finish()?;
        }
        Ok(())
    }

    /// The logits after each row of `hidden: [n, H]`, one row of the vocabulary after the
    /// other; [`RoundError::NoToken`] if one of them gives no token.
    pub(crate) fn logits(&self, hidden: &Tensor) -> Result<Vec<f32>, RoundError> {
        let logits = self.target.logits(&*self.b, hidden);
        let values = self.b.download(&logits).into_owned();
        self.b.finish()?;
        let mut rows = values.chunks_exact(logits.cols());
        if rows.all(gives_token) {
            Ok(values)
        } else {
            Err(RoundError::NoToken)
        }
    }
}
