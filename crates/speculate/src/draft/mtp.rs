//! Drafts with a multi-token-prediction head, chained on itself.
//!
//! The head has keys and values of its own, a row for each of the target's. Rows
//! built from true hidden rows stay; the chain's rows are forgotten as soon as
//! the draft is made, and rebuilt from true hidden rows if their tokens are
//! accepted. So the head's memory never holds a guess.

use super::{DraftRequest, Drafter, TargetView, choose, wanting};
use crate::sample::Scratch;
use backend::{Batch, Tensor};
use cache::{Memory, MemoryFull, Sequence};
use models::Qwen35Mtp;

/// The drafter of a [`Qwen35Mtp`].
pub struct Mtp {
    head: Qwen35Mtp,
    memory: Memory,
    /// By the target's slot.
    sequences: Vec<Option<Sequence>>,
    scratch: Scratch,
}

impl Mtp {
    /// Drafts with `head`, which remembers in `memory`, planned by
    /// [`Qwen35Mtp::plan`].
    pub fn new(head: Qwen35Mtp, memory: Memory) -> Self {
        let sequences = (0..memory.size().sequences).map(|_| None).collect();
        Mtp {
            head,
            memory,
            sequences,
            scratch: Scratch::default(),
        }
    }

    /// Adds rows for the tokens of `request` to `batch`.
    fn push(
        &mut self,
        batch: &mut Batch,
        request: &DraftRequest<'_>,
        tokens: &[u32],
        certain: usize,
    ) {
        let sequence = self.sequences[request.sequence.slot()]
            .as_mut()
            .expect("opened with the stream");
        let pushed = self.memory.push(batch, sequence, tokens, certain);
        pushed.expect("the head's memory is as large as the target's");
    }
}

impl Drafter for Mtp {
    fn name(&self) -> &'static str {
        "mtp"
    }

    fn open(&mut self, slot: usize) -> Result<(), MemoryFull> {
        self.sequences[slot] = Some(self.memory.open()?);
        Ok(())
    }

    fn close(&mut self, slot: usize) {
        if let Some(sequence) = self.sequences[slot].take() {
            self.memory.close(sequence);
        }
    }

    fn draft(
        &mut self,
        target: TargetView<'_>,
        hidden: &Tensor,
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>> {
        let b = target.b;
        let mut drafts = vec![Vec::new(); requests.len()];
        let mut batch = Batch::default();
        let mut rows = Vec::new();
        let mut last = Vec::new();
        for request in requests.iter() {
            self.push(&mut batch, request, request.following(), request.kept.len());
            rows.extend(request.kept.clone());
            last.push(rows.len() - 1);
        }
        let mut m = self.head.forward(
            b,
            target.model,
            &b.gather(hidden, &rows),
            &batch,
            &mut self.memory,
        );
        let mut active = wanting(requests, 0);
        let mut from: Vec<usize> = active.iter().map(|&r| last[r]).collect();
        for n in 1.. {
            if active.is_empty() {
                break;
            }
            m = b.gather(&m, &from); // [n, H]
            choose(
                b,
                &target.model.logits(b, &m),
                None,
                &active,
                requests,
                &mut drafts,
                &mut self.scratch,
            );
            from = (0..active.len())
                .filter(|&i| requests[active[i]].limit > n)
                .collect();
            active = from.iter().map(|&i| active[i]).collect();
            if active.is_empty() {
                break;
            }
            batch = Batch::default();
            for &r in &active {
                let newest = *drafts[r].last().expect("chosen above");
                self.push(&mut batch, &requests[r], &[newest], 0);
            }
            m = self.head.forward(
                b,
                target.model,
                &b.gather(&m, &from),
                &batch,
                &mut self.memory,
            );
            from = (0..active.len()).collect();
        }
        for request in requests.iter() {
            let sequence = self.sequences[request.sequence.slot()]
                .as_mut()
                .expect("opened with the stream");
            self.memory.truncate(sequence, request.sequence.len());
        }
        drafts
    }
}
