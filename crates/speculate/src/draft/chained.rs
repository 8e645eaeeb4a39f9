//! Drafts with a head that is chained on itself: an MTP head, or EAGLE-3's. A head of several layers
//! drafts with these in turn ([`super::layered`]).
//!
//! The head has keys and values of its own, a row for each of the target's. Rows
//! built from the target's true rows stay; the chain's rows are forgotten as soon as
//! the draft is made, and rebuilt from true rows if their tokens are accepted. So
//! the head's memory never holds a guess. Where no stream wants a draft, true rows wait, as
//! features.

use super::head_state::{self, HeadState, leave_unread, lock, may_wait, push, with_unread};
use super::layered::Layered;
use super::stretch::Links;
use super::{
    DraftRequest, DraftState, Drafter, HiddenRows, Restored, SavedDraft, TargetView, coverage,
};
use crate::sample::Scratch;
use backend::{Backend, Batch, StepKey, Tensor};
use cache::{Memory, MemoryFull};
use models::ChainedHead;
use std::sync::{Arc, Mutex};

/// The drafter of a [`ChainedHead`].
pub struct Chained<H> {
    head: H,
    memory: Arc<Mutex<Memory>>,
    scratch: Scratch,
    key: StepKey,
}

impl<H: ChainedHead> Chained<H> {
    /// Drafts with `head`, which remembers in `memory`, planned by
    /// [`ChainedHead::plan`].
    pub fn new(head: H, memory: Memory) -> Self {
        Chained {
            head,
            memory: Arc::new(Mutex::new(memory)),
            scratch: Scratch::default(),
            key: StepKey::fresh(),
        }
    }

    /// Has the head read `features`: all rows that `requests` have and it has not read.
    /// Returns what it makes of them, `[n, F]`, and the last row of each request therein.
    fn read(
        &self,
        target: TargetView<'_>,
        memory: &mut Memory,
        features: &Tensor,
        requests: &mut [DraftRequest<'_>],
    ) -> (Tensor, Vec<usize>) {
        let mut batch = Batch::default();
        let mut last = Vec::with_capacity(requests.len());
        let mut embeddings = Vec::new();
        for request in requests {
            let (len, tokens) = (request.sequence.len(), request.tokens);
            let state = request.state.of::<HeadState>();
            let (read, first) = (state.sequence.len() + 1..len + 1, batch.n_rows());
            let n = read.len();
            push(
                memory,
                &mut batch,
                &mut state.sequence,
                &tokens[read.clone()],
                n,
            );
            let (spans, follows) = (request.spans, self.head.follows_grid());
            spans.place_following(&mut batch, first, read, follows, &mut embeddings);
            last.push(batch.n_rows() - 1);
        }
        let (b, head) = (target.b, &self.head);
        let media = media(b, &batch, &embeddings);
        let inputs: Vec<&Tensor> = [features].into_iter().chain(&media).collect();
        let mut made = b.step(self.key, &batch, &inputs, &mut |x| {
            vec![head.forward(b, target.model, x[0], &x[1..], &batch, memory)]
        });
        (made.pop().expect("the head's rows"), last)
    }

    /// Drafts from rows `last` of `x`, one of each of `requests`. The head's rows for drafted
    /// tokens stay in `memory`.
    fn chain(
        &mut self,
        target: TargetView<'_>,
        memory: &mut Memory,
        from: (Tensor, &[usize]),
        is_listed: bool,
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>> {
        let (b, head) = (target.b, &self.head);
        let list = head.shortlist().filter(|_| is_listed);
        let links = Links {
            key: self.key,
            chain: self.key.part(if is_listed { "listed" } else { "chain" }),
            list: list.map_or(head.list(), |list| Some(list.list())),
            push: &|memory, batch, request, newest| {
                let state = request.state.of::<HeadState>();
                let (token, first) = (state.sequence.len() + 1, batch.n_rows());
                push(memory, batch, &mut state.sequence, &[newest], 0);
                let (spans, follows) = (request.spans, head.follows_grid());
                spans.place_following(batch, first, token..token + 1, follows, &mut Vec::new());
            },
            forward: &|memory, batch, x| head.forward(b, target.model, x, &[], batch, memory),
            score: &|m| {
                let listed = list.and_then(|_| head.listed_logits(b, m));
                listed.unwrap_or_else(|| head.logits(b, target.model, m))
            },
        };
        links.draft(b, memory, from, requests, &mut self.scratch)
    }

    /// Has all layers read `features` and draft in turn. The rows that the head is not to keep stay in
    /// `memory`.
    fn in_turn(
        &mut self,
        target: TargetView<'_>,
        memory: &mut Memory,
        features: Tensor,
        is_listed: bool,
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>> {
        let (b, head) = (target.b, &self.head);
        let layered = Layered {
            key: self.key,
            n_layers: head.layers(),
            follows_grid: head.follows_grid(),
            forward: &|memory, layer, batch, x| {
                head.forward_layer(layer, b, target.model, x, batch, memory)
            },
            score: &|m| {
                let listed = is_listed.then(|| head.listed_logits(b, m)).flatten();
                listed.unwrap_or_else(|| head.logits(b, target.model, m))
            },
        };
        layered.draft(b, memory, features, requests, &mut self.scratch)
    }

    /// Newest rows that it cannot keep, since a layer would have to guess what follows them.
    fn lookahead(&self) -> usize {
        self.head.layers() - 1
    }
}

impl<H: ChainedHead> Drafter for Chained<H> {
    fn name(&self) -> &'static str {
        self.head.name()
    }

    fn taps(&self) -> &[usize] {
        self.head.taps()
    }

    fn needs_all_hidden(&self) -> bool {
        self.head.taps().is_empty()
    }

    fn stops(&self) -> bool {
        self.head.layers() == 1
    }

    fn state(&self) -> Result<Box<dyn DraftState>, MemoryFull> {
        Ok(Box::new(HeadState::open(&self.memory, self.lookahead())?))
    }

    fn fits(&self, saved: Option<&SavedDraft>, n_pieces: usize) -> bool {
        let sizes = (self.head.feature_cols(), self.lookahead());
        head_state::fits(&self.memory, sizes, saved, n_pieces)
    }

    fn restorable(&self, saved: Option<&SavedDraft>, rows: usize) -> usize {
        head_state::restorable(&self.memory, self.lookahead(), saved, rows)
    }

    fn restore(&self, saved: Option<&SavedDraft>, rows: usize) -> Result<Restored, MemoryFull> {
        let sizes = (self.head.feature_cols(), self.lookahead());
        head_state::restore(&self.memory, sizes, saved, rows)
    }

    fn n_free_pages(&self) -> usize {
        lock(&self.memory).n_free_pages()
    }

    fn draft(
        &mut self,
        target: TargetView<'_>,
        hidden: &HiddenRows,
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>> {
        let b = target.b;
        let is_listed = coverage::is_enough(self.head.shortlist(), requests, |state| {
            &mut state.of::<HeadState>().coverage
        });
        let rows: Vec<usize> = requests.iter().flat_map(|r| r.kept.clone()).collect();
        let features = self.head.features(b, hidden.tensor(), target.taps, &rows);
        if requests.iter_mut().all(may_wait) {
            leave_unread(b, &features, requests);
            return vec![Vec::new(); requests.len()];
        }
        let features = with_unread(b, features, requests);
        let shared = self.memory.clone();
        let mut memory = lock(&shared);
        let drafts = if self.head.layers() > 1 {
            self.in_turn(target, &mut memory, features, is_listed, requests)
        } else {
            let (x, last) = self.read(target, &mut memory, &features, requests);
            self.chain(target, &mut memory, (x, &last), is_listed, requests)
        };
        for request in requests {
            let state = request.state.of::<HeadState>();
            let rows = request.sequence.len() - state.n_unread();
            memory.truncate(&mut state.sequence, rows);
        }
        drafts
    }
}

/// The embeddings of the media rows of `batch`, if it has any.
pub(crate) fn media(b: &dyn Backend, batch: &Batch, embeddings: &[f32]) -> Option<Tensor> {
    let n = batch.media.len();
    (n > 0).then(|| b.upload(n, embeddings.len() / n, embeddings))
}
