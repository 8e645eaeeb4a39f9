//! Drafts with a head that is chained on itself: an MTP head, or EAGLE-3's.
//!
//! The head has keys and values of its own, a row for each of the target's. Rows
//! built from the target's true rows stay; the chain's rows are forgotten as soon as
//! the draft is made, and rebuilt from true rows if their tokens are accepted. So
//! the head's memory never holds a guess.

use super::coverage::Coverage;
use super::{DraftRequest, Drafter, Stretch, TargetView, shortest, wanting};
use crate::sample::Scratch;
use backend::{Batch, StepKey, Tensor};
use cache::{Memory, MemoryFull, Sequence};
use models::ChainedHead;

/// The drafter of a [`ChainedHead`].
pub struct Chained<H> {
    head: H,
    memory: Memory,
    /// By the target's slot.
    sequences: Vec<Option<Sequence>>,
    coverage: Coverage,
    scratch: Scratch,
    key: StepKey,
}

impl<H: ChainedHead> Chained<H> {
    /// Drafts with `head`, which remembers in `memory`, planned by
    /// [`ChainedHead::plan`].
    pub fn new(head: H, memory: Memory) -> Self {
        let sequences = (0..memory.size().sequences).map(|_| None).collect();
        Chained {
            head,
            memory,
            sequences,
            coverage: Coverage::default(),
            scratch: Scratch::default(),
            key: StepKey::fresh(),
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

impl<H: ChainedHead> Drafter for Chained<H> {
    fn name(&self) -> &'static str {
        self.head.name()
    }

    fn taps(&self) -> &[usize] {
        self.head.taps()
    }

    fn open(&mut self, slot: usize) -> Result<(), MemoryFull> {
        self.sequences[slot] = Some(self.memory.open()?);
        self.coverage.open(slot);
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
        let features = self.head.features(b, hidden, target.taps, &rows);
        let mut made = b.step(self.key, &batch, &[&features], &mut |x| {
            vec![
                self.head
                    .forward(b, target.model, x[0], &batch, &mut self.memory),
            ]
        });
        let mut x = made.pop().expect("the head's rows"); // [n, F]
        let is_listed = self.coverage.is_enough(self.head.shortlist(), requests);
        let mut active = wanting(requests, 0);
        let mut from: Vec<usize> = active.iter().map(|&r| last[r]).collect();
        let mut n = 0;
        while !active.is_empty() {
            x = b.gather(&x, &from);
            let steps = shortest(requests, &active, n);
            let mut batches = vec![Batch::default(); steps];
            // The first token is scored by the rows above.
            for batch in batches.iter_mut().skip(usize::from(n == 0)) {
                for &r in &active {
                    let newest = drafts[r].last().copied().unwrap_or(0);
                    self.push(batch, &requests[r], &[newest], 0);
                }
            }
            let (head, memory) = (&self.head, &mut self.memory);
            let list = head.shortlist().filter(|_| is_listed);
            let stretch = Stretch {
                key: self.key,
                chain: self.key.part(if is_listed { "listed" } else { "chain" }),
                batches,
                active: &active,
                list: list.map_or(head.list(), |list| Some(list.list())),
                link: None,
            };
            x = stretch.draft(
                b,
                x,
                &mut |batch, x| vec![head.forward(b, target.model, x, batch, memory)],
                &|m| match list {
                    Some(list) => list.logits(b, m),
                    None => head.logits(b, target.model, m),
                },
                (requests, &mut drafts),
                &mut self.scratch,
            );
            n += steps;
            from = (0..active.len())
                .filter(|&i| requests[active[i]].limit > n)
                .collect();
            active = from.iter().map(|&i| active[i]).collect();
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
