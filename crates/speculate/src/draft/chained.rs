//! Drafts with a head that is chained on itself: an MTP head, or EAGLE-3's.
//!
//! The head has keys and values of its own, a row for each of the target's. Rows
//! built from the target's true rows stay; the chain's rows are forgotten as soon as
//! the draft is made, and rebuilt from true rows if their tokens are accepted. So
//! the head's memory never holds a guess.
//!
//! Where no stream wants a draft, true rows wait, as features, and are built some at a
//! time: a step of the head reads all its weights, however few rows it has.

use super::coverage::Coverage;
use super::{DraftRequest, Drafter, Stretch, TargetView, newest, shortest, wanting};
use crate::sample::Scratch;
use backend::{Backend, Batch, MAX_TENTATIVE, StepKey, Tensor};
use cache::{Memory, MemoryFull, Sequence};
use models::ChainedHead;

/// Rows of a stream that wait, at most: no more than a draft leaves, so that building
/// them holds up a draft by little and takes no step of a new size.
const OWED_MAX: usize = MAX_TENTATIVE;

/// The drafter of a [`ChainedHead`].
pub struct Chained<H> {
    head: H,
    memory: Memory,
    /// By the target's slot.
    sequences: Vec<Option<Sequence>>,
    /// By the target's slot, features of rows that the head has not read: `[owed, F]`.
    owed: Vec<Vec<f32>>,
    coverage: Coverage,
    scratch: Scratch,
    key: StepKey,
}

impl<H: ChainedHead> Chained<H> {
    /// Drafts with `head`, which remembers in `memory`, planned by
    /// [`ChainedHead::plan`].
    pub fn new(head: H, memory: Memory) -> Self {
        let slots = memory.size().sequences;
        Chained {
            head,
            memory,
            sequences: (0..slots).map(|_| None).collect(),
            owed: vec![Vec::new(); slots],
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

    /// Rows of `request` that the head has not read before this round.
    fn n_owed(&self, request: &DraftRequest<'_>) -> usize {
        let sequence = self.sequences[request.sequence.slot()].as_ref();
        request.first_row() - sequence.expect("opened with the stream").len()
    }

    /// Keeps the features of the round's rows, in the order of `requests`.
    fn owe(&mut self, b: &dyn Backend, features: &Tensor, requests: &[DraftRequest<'_>]) {
        let values = b.download(features);
        let mut rest = &values[..];
        for request in requests {
            let (own, others) = rest.split_at(request.kept.len() * features.cols());
            self.owed[request.sequence.slot()].extend_from_slice(own);
            rest = others;
        }
    }

    /// The features of all rows that the head has not read, in the order of `requests`;
    /// those of the round's are `features`.
    fn with_owed(
        &mut self,
        b: &dyn Backend,
        features: Tensor,
        requests: &[DraftRequest<'_>],
    ) -> Tensor {
        let owes = |request: &DraftRequest<'_>| !self.owed[request.sequence.slot()].is_empty();
        if !requests.iter().any(owes) {
            return features;
        }
        let cols = features.cols();
        let new = b.download(&features);
        let mut rest = &new[..];
        let mut values = Vec::new();
        for request in requests {
            values.append(&mut self.owed[request.sequence.slot()]);
            let (own, others) = rest.split_at(request.kept.len() * cols);
            values.extend_from_slice(own);
            rest = others;
        }
        b.upload(values.len() / cols, cols, &values)
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
        self.owed[slot].clear();
        self.coverage.open(slot);
        Ok(())
    }

    fn close(&mut self, slot: usize) {
        if let Some(sequence) = self.sequences[slot].take() {
            self.memory.close(sequence);
        }
    }

    fn rewind(&mut self, b: &dyn Backend, slot: usize, from: usize, to: usize) {
        let sequence = self.sequences[slot].as_mut();
        let sequence = sequence.expect("opened with the stream");
        // Its row after target row i is of token i + 1 too, which is the same.
        let (owed, read) = (&mut self.owed[slot], sequence.len());
        if read < to {
            owed.truncate(owed.len() / (from - read) * (to - read));
        } else {
            owed.clear();
            self.memory.rewind(b, sequence, to);
        }
        self.coverage.open(slot);
    }

    fn can_rewind(&self, slot: usize, to: usize) -> bool {
        let sequence = self.sequences[slot].as_ref();
        let sequence = sequence.expect("opened with the stream");
        sequence.len() < to || self.memory.rewindable(sequence, to) == to
    }

    fn draft(
        &mut self,
        target: TargetView<'_>,
        hidden: &Tensor,
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>> {
        let b = target.b;
        let mut drafts = vec![Vec::new(); requests.len()];
        let is_listed = self.coverage.is_enough(self.head.shortlist(), requests);
        let rows: Vec<usize> = requests.iter().flat_map(|r| r.kept.clone()).collect();
        let features = self.head.features(b, hidden, target.taps, &rows);
        let may_wait =
            |r: &DraftRequest<'_>| r.limit == 0 && self.n_owed(r) + r.kept.len() <= OWED_MAX;
        if requests.iter().all(may_wait) {
            self.owe(b, &features, requests);
            return drafts;
        }
        let features = self.with_owed(b, features, requests);
        let mut batch = Batch::default();
        let mut last = Vec::new();
        for request in requests.iter() {
            let len = request.sequence.len();
            let n_unread = self.n_owed(request) + request.kept.len();
            let tokens = &request.tokens[len - n_unread + 1..=len];
            self.push(&mut batch, request, tokens, n_unread);
            last.push(batch.n_rows() - 1);
        }
        let mut made = b.step(self.key, &batch, &[&features], &mut |x| {
            vec![
                self.head
                    .forward(b, target.model, x[0], &batch, &mut self.memory),
            ]
        });
        let mut x = made.pop().expect("the head's rows"); // [n, F]
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
                    let newest = newest(&drafts[r]).unwrap_or(0);
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
