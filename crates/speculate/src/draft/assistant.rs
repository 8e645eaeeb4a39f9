//! Drafts with Gemma 4's assistant.
//!
//! The assistant has no KV cache of its own: each draft starts from the hidden row of the
//! last token that stayed, and reads the target's keys and values, rejected rows already
//! forgotten.

use super::coverage::{self, Coverage};
use super::{
    Derived, DraftRequest, DraftState, Drafter, HiddenRows, Stretch, TargetView, newest, steps,
    stop, wanting,
};
use crate::sample::Scratch;
use backend::{Batch, StepKey, Tensor};
use cache::MemoryFull;
use models::{Gemma4Assistant, Shortlist};

/// The drafter of a [`Gemma4Assistant`].
pub struct Assistant {
    head: Gemma4Assistant,
    scratch: Scratch,
    key: StepKey,
}

/// What the assistant's drafter counts of a text.
#[derive(Default)]
struct AssistantState {
    coverage: Coverage,
}

impl Derived for AssistantState {}

impl Assistant {
    /// Drafts with `head`.
    pub fn new(head: Gemma4Assistant) -> Self {
        Assistant {
            head,
            scratch: Scratch::default(),
            key: StepKey::fresh(),
        }
    }
}

impl Drafter for Assistant {
    fn name(&self) -> &'static str {
        "assistant"
    }

    fn needs_all_hidden(&self) -> bool {
        false
    }

    fn stops(&self) -> bool {
        true
    }

    fn state(&self) -> Result<Box<dyn DraftState>, MemoryFull> {
        Ok(Box::new(AssistantState::default()))
    }

    fn draft(
        &mut self,
        target: TargetView<'_>,
        hidden: &HiddenRows,
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>> {
        let b = target.b;
        let mut drafts = vec![Vec::new(); requests.len()];
        let is_listed = coverage::is_enough(self.head.shortlist(), requests, |state| {
            &mut state.of::<AssistantState>().coverage
        });
        let mut active = wanting(requests, 0);
        if active.is_empty() {
            return drafts;
        }
        let last: Vec<usize> = active.iter().map(|&r| requests[r].kept.end - 1).collect();
        let mut x = hidden.gather(b, &last); // [n, B]
        let list = self.head.shortlist().filter(|_| is_listed);
        let (head, key) = (&self.head, self.key);
        let link = |z: &Tensor| head.chained_logits(b, z);
        let mut n = 0;
        loop {
            let steps = steps(requests, &active, n);
            let batch = |_| {
                let mut batch = Batch::default();
                for &r in &active {
                    let request = &requests[r];
                    let newest = newest(&drafts[r]).or(request.tokens.last().copied());
                    let newest = newest.expect("a stream has tokens");
                    target.memory.peek(&mut batch, request.sequence, newest);
                }
                batch
            };
            let stretch = Stretch {
                key,
                chain: key.part(if is_listed { "listed" } else { "chain" }),
                batches: (0..steps).map(batch).collect(),
                active: &active,
                list: list.map(Shortlist::list),
                link: head.scores_some().then_some(&link),
            };
            x = stretch.draft(
                b,
                x,
                &mut |batch, x| {
                    let (z, next) = head.step(b, target.model, x, batch, target.memory);
                    vec![z, next]
                },
                &|z| match list {
                    Some(list) => list.logits(b, z),
                    None => head.logits(b, z),
                },
                (requests, &mut drafts),
                &mut self.scratch,
            );
            n += steps;
            if stop(requests, &active) {
                break;
            }
            let still: Vec<usize> = (0..active.len())
                .filter(|&i| requests[active[i]].limit > n)
                .collect();
            if still.is_empty() {
                break;
            }
            x = b.gather(&x, &still);
            active = still.iter().map(|&i| active[i]).collect();
        }
        drafts
    }
}
