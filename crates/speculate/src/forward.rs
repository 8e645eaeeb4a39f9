//! Steps of the target outside of a stream.
//!
//! Scoring, timing and the row check run tokens that are given: nothing is chosen and
//! nothing is drafted. They share what is here: a sequence that is closed when the work on
//! it ends, and one step of the target after it. The target runs as in a round, so a row
//! has the bits that it has there.

use crate::{RoundError, Speculator};
use backend::{Batch, MAX_RECORDED_ROWS, Tensor, gives_token};
use cache::Sequence;
use models::Taps;

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

    /// Runs all of `tokens` after `sequence`, in as many steps as they take. Returns the hidden row of the last one,
    /// `[1, H]`, or nothing without any. The caller has the backend `finish` after the last step's last op.
    pub(crate) fn prefill(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
    ) -> Result<Option<Tensor>, RoundError> {
        let mut last = None;
        for chunk in tokens.chunks(self.memory.size().step_rows) {
            if last.take().is_some() {
                self.b.finish()?;
            }
            let mut batch = Batch::default();
            self.with_room(None, &[], |this| {
                this.memory.push(&mut batch, sequence, chunk, chunk.len())
            })?;
            let (b, n) = (&*self.b, chunk.len());
            let some = self.may_leave_out(n, |_| true);
            let mut taps = Taps::new(&[]).with_outputs(some.then(|| vec![n - 1]));
            let memory = &mut self.memory;
            let hidden = self.target.forward_tapped(b, &batch, memory, &mut taps);
            last = Some(match some {
                true => hidden,
                false => b.gather(&hidden, &[n - 1]),
            });
        }
        Ok(last)
    }

    /// Whether rows of a step of `n_rows` whose hidden rows nobody reads may be left out of the target's last layers, for
    /// texts that are read by those heads for which `reads` says so. Smaller steps may be recorded, and a device that
    /// tells which experts rows chose is asked about all layers.
    pub(crate) fn may_leave_out(&self, n_rows: usize, reads: impl Fn(usize) -> bool) -> bool {
        let mut heads = self.drafters.heads.iter().enumerate();
        let tells_experts = || self.target.chosen_experts() < 1.0 && self.b.capabilities().experts;
        n_rows > MAX_RECORDED_ROWS
            && !tells_experts()
            && !heads.any(|(number, head)| head.needs_all_hidden() && reads(number))
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
