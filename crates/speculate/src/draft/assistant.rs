//! Drafts with Gemma 4's assistant.
//!
//! It has no memory: each draft starts from the hidden row of the last token
//! that stayed, and reads the target's keys and values, rejected rows already
//! forgotten.

use super::coverage::Coverage;
use super::{DraftRequest, Drafter, TargetView, choose, wanting};
use crate::sample::Scratch;
use backend::{Batch, StepKey, Tensor};
use cache::MemoryFull;
use models::Gemma4Assistant;

/// The drafter of a [`Gemma4Assistant`].
pub struct Assistant {
    head: Gemma4Assistant,
    coverage: Coverage,
    scratch: Scratch,
    key: StepKey,
}

impl Assistant {
    /// Drafts with `head`.
    pub fn new(head: Gemma4Assistant) -> Self {
        Assistant {
            head,
            coverage: Coverage::default(),
            scratch: Scratch::default(),
            key: StepKey::fresh(),
        }
    }
}

impl Drafter for Assistant {
    fn name(&self) -> &'static str {
        "assistant"
    }

    fn open(&mut self, slot: usize) -> Result<(), MemoryFull> {
        self.coverage.open(slot);
        Ok(())
    }

    fn close(&mut self, _slot: usize) {}

    fn draft(
        &mut self,
        target: TargetView<'_>,
        hidden: &Tensor,
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>> {
        let b = target.b;
        let mut drafts = vec![Vec::new(); requests.len()];
        let is_listed = self.coverage.is_enough(self.head.shortlist(), requests);
        let mut active = wanting(requests, 0);
        if active.is_empty() {
            return drafts;
        }
        let last: Vec<usize> = active.iter().map(|&r| requests[r].kept.end - 1).collect();
        let mut hidden = b.gather(hidden, &last); // [n, B]
        for n in 1.. {
            let mut batch = Batch::default();
            for &r in &active {
                let request = &requests[r];
                let newest = drafts[r]
                    .last()
                    .or(request.tokens.last())
                    .expect("a stream has tokens");
                target.memory.peek(&mut batch, request.sequence, *newest);
            }
            let mut made = b.step(self.key, &batch, &[&hidden], &mut |inputs| {
                let (z, next) = self
                    .head
                    .step(b, target.model, inputs[0], &batch, target.memory);
                vec![next, z]
            });
            let z = made.pop().expect("the rows to score");
            let next = made.pop().expect("the next hidden rows");
            let scored = match self.head.shortlist().filter(|_| is_listed) {
                Some(list) => list.logits(b, &z),
                None => self.head.logits(b, &z),
            };
            choose(
                b,
                &scored,
                &active,
                requests,
                &mut drafts,
                &mut self.scratch,
            );
            let still: Vec<usize> = (0..active.len())
                .filter(|&i| requests[active[i]].limit > n)
                .collect();
            if still.is_empty() {
                break;
            }
            hidden = if still.len() == active.len() {
                next
            } else {
                b.gather(&next, &still)
            };
            active = still.iter().map(|&i| active[i]).collect();
        }
        drafts
    }
}
