//! Drafts with a model of its own: any [`Target`] with the vocabulary of the one it drafts for.
//!
//! ```text
//! tokens   … t t t | d d d        rows of the draft model after a draft of 4
//!          true rows  guesses     (the last guess has no row)
//! verify     → the first guess stays, the others do not
//! next       … t t t t | t       guesses that stayed are true rows, the others are forgotten;
//!                                rows that are missing and the pending token run in one step
//! ```
//!
//! The draft model needs nothing of the target but its tokens. So it may be behind: where nobody
//! wants a draft, or where the target has found rows in the prefix cache that the draft model has
//! not read. It catches up before the next draft: what it guesses depends on the text alone.
//!
//! Rows of guesses that stay are not run again, but for models with recurrent state, which a chain of
//! steps changes for good: these go back to where the chain began ([`Memory::rewind`]).
//!
//! Rows of media are read as their placeholder tokens: what a picture shows is hidden from the draft
//! model.

use super::head_state::lock;
use super::model_state::{self, ModelState};
use super::stretch::Links;
use super::{
    DraftRequest, DraftState, Drafter, HiddenRows, Restored, SavedDraft, TargetView, wanting,
};
use crate::sample::Scratch;
use backend::{Backend, Batch, MAX_TENTATIVE, StepKey, Tensor};
use cache::{Memory, MemoryFull};
use models::{HeadLogits, Scored, Target};
use std::sync::{Arc, Mutex};

/// The name of the drafter, as users type it.
pub const MODEL: &str = "model";

/// The drafter that is a model of its own.
pub struct DraftModel {
    model: Box<dyn Target>,
    memory: Arc<Mutex<Memory>>,
    /// Tokens of the target's vocabulary.
    vocab: usize,
    scratch: Scratch,
    key: StepKey,
}

impl DraftModel {
    /// Drafts with `model`, which remembers in `memory`, planned by [`Target::plan`], for a target with
    /// `vocab` tokens. Tokens that one of both does not have are never drafted.
    pub fn new(model: Box<dyn Target>, memory: Memory, vocab: usize) -> Self {
        DraftModel {
            model,
            memory: Arc::new(Mutex::new(memory)),
            vocab,
            scratch: Scratch::default(),
            key: StepKey::fresh(),
        }
    }

    /// Makes `request` ready to be read: guesses that were wrong are forgotten, and it wants no more
    /// than can be drafted. Returns whether it has rows that are to run now.
    fn prepare(&self, memory: &mut Memory, request: &mut DraftRequest<'_>) -> bool {
        let len = request.sequence.len();
        drop_unknown(request, self.model.vocab_size());
        // All rows but that of the draft's last token have to fit.
        let room = memory.size().context.saturating_sub(len);
        request.limit = request.limit.min(room);
        let state = request.state.of::<ModelState>();
        state.settle(memory, request.tokens, len);
        request.limit > 0 || missing(memory, request) >= MAX_TENTATIVE
    }

    /// Gives `batch` the next `n` rows of `request`, and that of its pending token where no other is
    /// missing and a draft is wanted. Returns false if there is no room, and then none is wanted.
    fn push(
        &self,
        memory: &mut Memory,
        batch: &mut Batch,
        request: &mut DraftRequest<'_>,
        n: usize,
    ) -> bool {
        let (vocab, is_all) = (self.model.vocab_size(), n == missing(memory, request));
        let state = request.state.of::<ModelState>();
        let have = state.sequence.len();
        let rows = have..have + n + usize::from(is_all && request.limit > 0);
        let tokens = request.tokens[rows.clone()].iter();
        let tokens: Vec<u32> = tokens.map(|&token| known(token, vocab)).collect();
        let certain = match memory.has_state() {
            true => model_state::certain(request.sequence, &rows).unwrap_or(n),
            false => n,
        };
        let pushed = memory.push(batch, &mut state.sequence, &tokens, certain);
        // Pages that others need are worth more than a draft.
        if pushed.is_err() {
            request.limit = 0;
        }
        pushed.is_ok()
    }

    /// Runs `batch`, and takes the snapshots that are due of those of `requests` that have rows in it.
    fn run(
        &self,
        b: &dyn Backend,
        memory: &mut Memory,
        batch: &Batch,
        (requests, readers): (&mut [DraftRequest<'_>], &[usize]),
    ) -> Tensor {
        let model = &self.model;
        let mut made = b.step(self.key.part("read"), batch, &[], &mut |_| {
            vec![model.forward(b, batch, memory)]
        });
        for &r in readers {
            let request = &mut requests[r];
            let state = request.state.of::<ModelState>();
            state.take_snapshots(b, memory, request.sequence);
        }
        made.pop().expect("the model's rows")
    }

    /// Has the model read what `requests` have and it has not, and the pending tokens of those that want
    /// a draft. Returns rows of the last step, `[n, H]`, and the last one of each request that wants a
    /// draft therein; nothing if there are none.
    fn read(
        &self,
        b: &dyn Backend,
        memory: &mut Memory,
        requests: &mut [DraftRequest<'_>],
    ) -> Option<(Tensor, Vec<usize>)> {
        let all = 0..requests.len();
        let mut readers: Vec<usize> = all
            .filter(|&r| self.prepare(memory, &mut requests[r]))
            .collect();
        loop {
            let mut batch = Batch::default();
            readers.retain(|&r| match rows_before(memory, &mut requests[r]) {
                0 => true,
                n => self.push(memory, &mut batch, &mut requests[r], n),
            });
            if batch.n_rows() == 0 {
                break;
            }
            self.run(b, memory, &batch, (requests, &readers));
        }
        let mut batch = Batch::default();
        let mut last = vec![0; requests.len()];
        readers.retain(|&r| {
            let n = missing(memory, &mut requests[r]);
            let pushed = self.push(memory, &mut batch, &mut requests[r], n);
            last[r] = batch.n_rows().saturating_sub(1);
            pushed
        });
        if batch.n_rows() == 0 {
            return None;
        }
        Some((self.run(b, memory, &batch, (requests, &readers)), last))
    }

    /// Leaves room for the rows of the drafts that are wanted, or wants no more than a token of each:
    /// that takes none.
    fn reserve(memory: &Memory, requests: &mut [DraftRequest<'_>]) {
        let lacks = |request: &mut DraftRequest<'_>| {
            let state = request.state.of::<ModelState>();
            let rows = state.sequence.len() + request.limit.saturating_sub(1);
            state.sequence.lacking_pages(rows)
        };
        if requests.iter_mut().map(lacks).sum::<usize>() > memory.n_free_pages() {
            for request in requests {
                request.limit = request.limit.min(1);
            }
        }
    }

    /// Drafts from rows `last` of `x`, one of each of `requests`.
    fn chain(
        &mut self,
        b: &dyn Backend,
        memory: &mut Memory,
        from: (Tensor, &[usize]),
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>> {
        let (model, vocab) = (&self.model, self.vocab);
        let links = Links {
            key: self.key,
            chain: self.key.part("chain"),
            list: None,
            push: &|memory, batch, request, newest| {
                let state = request.state.of::<ModelState>();
                let pushed = memory.push(batch, &mut state.sequence, &[newest], 0);
                pushed.expect("room was left for it");
            },
            forward: &|memory, batch, _| model.forward(b, batch, memory),
            score: &|hidden| HeadLogits {
                logits: match model.logits(b, hidden) {
                    logits if logits.cols() > vocab => b.columns(&logits, 0, vocab),
                    logits => logits,
                },
                scored: Scored::All,
            },
        };
        links.draft(b, memory, from, requests, &mut self.scratch)
    }
}

/// Rows of `request` that have not run, all but that of its pending token.
fn missing(memory: &Memory, request: &mut DraftRequest<'_>) -> usize {
    let len = request.sequence.len().min(memory.size().context);
    let have = request.state.of::<ModelState>().sequence.len();
    len.saturating_sub(have)
}

/// How many of the missing rows of `request` have to run in a step before the last one, which takes
/// only so many, and after which a snapshot of recurrent state is due.
fn rows_before(memory: &Memory, request: &mut DraftRequest<'_>) -> usize {
    let step_rows = memory.size().step_rows;
    let missing = missing(memory, request);
    let more = missing.saturating_sub(step_rows + MAX_TENTATIVE - 1);
    let have = request.state.of::<ModelState>().sequence.len();
    let end = have + missing;
    let due = match memory.has_state() {
        true => model_state::due(request.sequence, have..end),
        false => None,
    };
    let due = due.filter(|at| end + 1 - at > MAX_TENTATIVE);
    due.map_or(more, |at| at - have).min(step_rows)
}

/// `token` as the draft model reads it, which has `vocab` tokens: one that it does not know is its
/// first one.
fn known(token: u32, vocab: usize) -> u32 {
    if (token as usize) < vocab { token } else { 0 }
}

/// Ends the draft of `request` before a given token that is none of the `vocab` tokens of the draft
/// model, which could not read it.
fn drop_unknown(request: &mut DraftRequest<'_>, vocab: usize) {
    let is_unknown = |&token: &u32| token as usize >= vocab;
    if let Some(n) = request.given.iter().position(is_unknown) {
        request.given = &request.given[..n];
        request.limit = request.limit.min(n);
    }
}

impl Drafter for DraftModel {
    fn name(&self) -> &'static str {
        MODEL
    }

    fn stops(&self) -> bool {
        true
    }

    fn state(&self) -> Result<Box<dyn DraftState>, MemoryFull> {
        Ok(Box::new(ModelState::open(&self.memory)?))
    }

    fn fits(&self, saved: Option<&SavedDraft>, n_pieces: usize) -> bool {
        model_state::fits(&self.memory, saved, n_pieces)
    }

    fn restore(&self, saved: Option<&SavedDraft>, rows: usize) -> Result<Restored, MemoryFull> {
        model_state::restore(&self.memory, saved, rows)
    }

    fn n_free_pages(&self) -> usize {
        lock(&self.memory).n_free_pages()
    }

    fn needs_all_hidden(&self) -> bool {
        false
    }

    fn draft(
        &mut self,
        target: TargetView<'_>,
        _hidden: &HiddenRows,
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>> {
        let b = target.b;
        let shared = self.memory.clone();
        let mut memory = lock(&shared);
        let none = vec![Vec::new(); requests.len()];
        let Some((x, last)) = self.read(b, &mut memory, requests) else {
            return none;
        };
        Self::reserve(&memory, requests);
        let active = wanting(requests, 0);
        if active.is_empty() {
            return none;
        }
        for &r in &active {
            let request = &mut requests[r];
            let state = request.state.of::<ModelState>();
            if !state.begin_guesses(b, &mut memory, request.limit) {
                request.limit = 1;
            }
        }
        let drafts = self.chain(b, &mut memory, (x, &last), requests);
        for r in active {
            let state = requests[r].state.of::<ModelState>();
            state.end_guesses(&mut memory, &drafts[r]);
        }
        drafts
    }
}
