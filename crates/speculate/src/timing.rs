//! Timing: how long a step and a prefill of the target take on this device.
//!
//! The clock runs from the first op to the end of the device's work, the target's greedy
//! choice included, as in a round. One call is one measurement: repeating and taking
//! medians is the caller's.

use crate::{RoundError, Speculator};
use backend::Batch;
use std::hint::black_box;
use std::time::{Duration, Instant};

impl Speculator {
    /// Time of one step that runs `rows` after `context`, the first of them as a pending
    /// token and the others as its draft. Running `context` is not timed. A device that [records
    /// steps](backend::Capabilities::records) takes longer for the first two steps of each number of rows.
    ///
    /// # Errors
    ///
    /// [`RoundError`], as in a round.
    ///
    /// # Panics
    ///
    /// If `rows` is empty or longer than a step can be.
    pub fn time_step(&mut self, context: &[u32], rows: &[u32]) -> Result<Duration, RoundError> {
        self.with_sequence(|this, sequence| {
            this.prefill(sequence, context)?;
            this.b.finish()?;
            let mut batch = Batch::default();
            this.memory.push(&mut batch, sequence, rows, 1)?;
            let (b, target, memory) = (&*this.b, &*this.target, &mut this.memory);
            let start = Instant::now();
            let logits = b.step(this.key.part("timed"), &batch, &[], &mut |_| {
                let hidden = target.forward(b, &batch, memory);
                vec![target.logits(b, &hidden)]
            });
            let chosen = b.argmax(&logits[0]);
            b.finish()?;
            let elapsed = start.elapsed();
            black_box(chosen);
            Ok(elapsed)
        })
    }

    /// Time of running `prompt` in steps as long as they may be, with the choice of the
    /// first token after it.
    ///
    /// # Errors
    ///
    /// [`RoundError`], as in a round.
    ///
    /// # Panics
    ///
    /// If `prompt` is empty.
    pub fn time_prefill(&mut self, prompt: &[u32]) -> Result<Duration, RoundError> {
        self.with_sequence(|this, sequence| {
            let start = Instant::now();
            let last = this.prefill(sequence, prompt)?;
            let last = last.expect("a prompt has tokens");
            let (b, target) = (&*this.b, &*this.target);
            black_box(b.argmax(&target.logits(b, &last)));
            b.finish()?;
            Ok(start.elapsed())
        })
    }
}
