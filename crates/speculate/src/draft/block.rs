//! Drafts with a block drafter: DFlash, or DSpark with its Markov and confidence heads.
//!
//! The head guesses a whole block from one step: the pending token and masks, of all streams that
//! want a draft together. It has keys and values of the target's true rows alone, made from what
//! it taps there; a block's rows are forgotten as soon as it has run. Tokens are then chosen from
//! the left, each with what the one before it says ([`BlockHead::after`]) and with the noise that
//! the target will use.
//!
//! Where the head says how likely a guess stays, a draft ends before the one that stays with less
//! than [`WORTH`]: the likelihood that it and all before it stay is the product of theirs. How
//! long drafts may be at most is not decided here.

use super::head_state::{self, HeadState, leave_unread, lock, may_wait, push, with_unread};
use super::stretch::{choose, replace_given, take_given};
use super::{
    DraftRequest, DraftState, Drafter, HiddenRows, Restored, SavedDraft, TargetView, newest,
    wanting,
};
use crate::sample::Scratch;
use backend::{Backend, Batch, MAX_TENTATIVE, StepKey, Tensor};
use cache::{Memory, MemoryFull};
use models::{BlockHead, HeadLogits};
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Least likelihood of a guess to stay that is worth a row of the target's step, but for the
/// first guess, which is always made. A row of a step costs between a twentieth (GPUs, whose steps
/// read weights) and a third (CPUs, whose steps multiply) of a step of one row, and saves one
/// where its guess stays; so the likelihood at which it pays lies between these.
const WORTH: f32 = 0.2;

/// The drafter of a [`BlockHead`].
pub struct Block {
    head: BlockHead,
    memory: Arc<Mutex<Memory>>,
    scratch: Scratch,
    key: StepKey,
}

/// What a step has made of the blocks of some requests.
struct Guesses {
    /// The requests with a block, ascending.
    active: Vec<usize>,
    /// The row of `z` that guesses each request's first token; the others follow.
    first: Vec<usize>,
    /// How many tokens each request's block guesses.
    n: Vec<usize>,
    z: Tensor,
}

/// A draft that goes on.
struct Open {
    request: usize,
    /// Rows of the scored ones that guess the draft's tokens.
    rows: Range<usize>,
    /// How likely all guesses of the draft stay, as the head has it.
    likely: f32,
    /// The draft's newest token, or the pending one before there is any.
    previous: u32,
    /// The draft's row of what the head carries from guess to guess.
    carried: usize,
}

impl Block {
    /// Drafts with `head`, which remembers in `memory`, planned by [`BlockHead::plan`].
    pub fn new(head: BlockHead, memory: Memory) -> Self {
        Block {
            head,
            memory: Arc::new(Mutex::new(memory)),
            scratch: Scratch::default(),
            key: StepKey::fresh(),
        }
    }

    /// Has the head remember `features`: all rows that `requests` have and it has not read.
    fn read(
        &self,
        b: &dyn Backend,
        memory: &mut Memory,
        features: &Tensor,
        requests: &mut [DraftRequest<'_>],
    ) {
        let mut batch = Batch::default();
        for request in requests {
            let (len, tokens) = (request.sequence.len(), request.tokens);
            let sequence = &mut request.state.of::<HeadState>().sequence;
            let tokens = &tokens[sequence.len()..len];
            push(memory, &mut batch, sequence, tokens, tokens.len());
        }
        let head = &self.head;
        b.step(self.key.part("read"), &batch, &[features], &mut |x| {
            head.remember(b, x[0], &batch, memory);
            Vec::new()
        });
    }

    /// Rows of the block of a stream with `len` rows that wants `limit` tokens: all, as the head
    /// was trained, up to where its memory ends and no more than can be forgotten again.
    fn block_rows(&self, memory: &Memory, len: usize) -> usize {
        let room = memory.size().context.saturating_sub(len);
        self.head.block_rows().min(room).min(MAX_TENTATIVE)
    }

    /// Runs a block of each request that wants a draft and has room for one.
    fn run(
        &self,
        target: TargetView<'_>,
        memory: &mut Memory,
        requests: &mut [DraftRequest<'_>],
    ) -> Option<Guesses> {
        let (b, head) = (target.b, &self.head);
        let mut batch = Batch::default();
        let (mut active, mut first, mut n) = (Vec::new(), Vec::new(), Vec::new());
        let mut starts = Vec::new();
        for r in wanting(requests, 0) {
            let request = &mut requests[r];
            let sequence = &mut request.state.of::<HeadState>().sequence;
            let n_rows = self.block_rows(memory, sequence.len());
            let guesses = n_rows.saturating_sub(head.first_guess());
            let mut tokens = vec![head.mask_token(); n_rows];
            let (Some(pending), true) = (tokens.first_mut(), guesses > 0) else {
                continue;
            };
            *pending = *request.tokens.last().expect("a stream has tokens");
            let start = batch.n_rows();
            // Pages that others need are worth more than a draft.
            if memory.push(&mut batch, sequence, &tokens, 0).is_err() {
                continue;
            }
            let end = sequence.len() as u32;
            for row in &mut batch.rows[start..] {
                row.sees.end = end;
            }
            active.push(r);
            starts.push(start);
            first.push(start + head.first_guess());
            n.push(guesses);
        }
        if active.is_empty() {
            return None;
        }
        let starts = head.starts(b, batch.n_rows(), &starts);
        let inputs: Vec<&Tensor> = starts.iter().collect();
        let mut made = b.step(self.key.part("block"), &batch, &inputs, &mut |x| {
            vec![head.forward(b, target.model, &batch, x.first().copied(), memory)]
        });
        for &r in &active {
            let request = &mut requests[r];
            let state = request.state.of::<HeadState>();
            memory.truncate(&mut state.sequence, request.sequence.len());
        }
        let z = made.pop().expect("the head's rows");
        Some(Guesses {
            active,
            first,
            n,
            z,
        })
    }

    /// Chooses tokens from `guesses`, from the left.
    fn choose(
        &mut self,
        target: TargetView<'_>,
        guesses: &Guesses,
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>> {
        let b = target.b;
        let mut drafts = vec![Vec::new(); requests.len()];
        // Rows that are needed, a request after the other.
        let mut rows = Vec::new();
        let mut open = Vec::with_capacity(guesses.active.len());
        for ((&request, &first), &n) in guesses.active.iter().zip(&guesses.first).zip(&guesses.n) {
            let n = requests[request].limit.min(n);
            open.push(Open {
                request,
                rows: rows.len()..rows.len() + n,
                likely: 1.0,
                previous: *requests[request].tokens.last().expect("a pending token"),
                carried: open.len(),
            });
            rows.extend(first..first + n);
        }
        let z = b.gather(&guesses.z, &rows);
        let logits = self.head.logits(b, target.model, &z);
        let mut carried = self.head.start(b, open.len());
        for i in 0.. {
            open.retain(|open| i < open.rows.len());
            self.drop_unlikely(b, &z, i, &mut open, requests);
            if open.is_empty() {
                break;
            }
            let active: Vec<usize> = open.iter().map(|open| open.request).collect();
            let is_given = take_given(&active, requests, &mut drafts);
            if !is_given || carried.is_some() {
                let (scored, next) =
                    score(&self.head, b, (&z, &logits), i, &open, carried.as_ref());
                carried = next;
                if !is_given {
                    choose(b, scored, &active, requests, &mut drafts, &mut self.scratch);
                    replace_given(&active, requests, &mut drafts);
                }
            }
            for (row, open) in open.iter_mut().enumerate() {
                open.carried = row;
                open.previous = newest(&drafts[open.request]).expect("chosen just now");
            }
        }
        drafts
    }

    /// Ends the drafts of those of `open` whose guess `i` is not worth a row. The first guess and
    /// given ones always are.
    fn drop_unlikely(
        &self,
        b: &dyn Backend,
        z: &Tensor,
        i: usize,
        open: &mut Vec<Open>,
        requests: &[DraftRequest<'_>],
    ) {
        if open.is_empty() || !self.head.has_confidences() {
            return;
        }
        let at: Vec<usize> = open.iter().map(|open| open.rows.start + i).collect();
        let previous: Vec<u32> = open.iter().map(|open| open.previous).collect();
        let confidences = self.head.confidences(b, &b.gather(z, &at), &previous);
        let mut confidences = confidences.into_iter();
        open.retain_mut(|open| {
            let confidence = confidences.next().expect("one for each row");
            if i < requests[open.request].given.len() {
                return true;
            }
            open.likely *= confidence;
            i == 0 || open.likely >= WORTH
        });
    }
}

/// Scores of guess `i` of each of `open`, of which `z` and `logits` have all rows, and what the head
/// carries to the next one from `carried`.
fn score<'h>(
    head: &'h BlockHead,
    b: &dyn Backend,
    (z, logits): (&Tensor, &Tensor),
    i: usize,
    open: &[Open],
    carried: Option<&Tensor>,
) -> (HeadLogits<'h>, Option<Tensor>) {
    let at: Vec<usize> = open.iter().map(|open| open.rows.start + i).collect();
    let previous: Vec<u32> = open.iter().map(|open| open.previous).collect();
    let from: Vec<usize> = open.iter().map(|open| open.carried).collect();
    let carried = carried.map(|rows| b.gather(rows, &from));
    let (z, logits) = (b.gather(z, &at), b.gather(logits, &at));
    head.after(b, logits, &z, &previous, carried.as_ref())
}

impl Drafter for Block {
    fn name(&self) -> &'static str {
        self.head.kind().head().name
    }

    fn taps(&self) -> &[usize] {
        self.head.taps()
    }

    fn needs_all_hidden(&self) -> bool {
        false
    }

    fn state(&self) -> Result<Box<dyn DraftState>, MemoryFull> {
        Ok(Box::new(HeadState::open(&self.memory, 0)?))
    }

    fn fits(&self, saved: Option<&SavedDraft>, n_pieces: usize) -> bool {
        head_state::fits(&self.memory, (self.head.feature_cols(), 0), saved, n_pieces)
    }

    fn restorable(&self, saved: Option<&SavedDraft>, rows: usize) -> usize {
        head_state::restorable(&self.memory, 0, saved, rows)
    }

    fn restore(&self, saved: Option<&SavedDraft>, rows: usize) -> Result<Restored, MemoryFull> {
        head_state::restore(&self.memory, (self.head.feature_cols(), 0), saved, rows)
    }

    fn n_free_pages(&self) -> usize {
        lock(&self.memory).n_free_pages()
    }

    fn draft(
        &mut self,
        target: TargetView<'_>,
        _hidden: &HiddenRows,
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>> {
        let b = target.b;
        let rows: Vec<usize> = requests.iter().flat_map(|r| r.kept.clone()).collect();
        let features = self.head.features(b, target.taps, &rows);
        let none = vec![Vec::new(); requests.len()];
        if requests.iter_mut().all(may_wait) {
            leave_unread(b, &features, requests);
            return none;
        }
        let features = with_unread(b, features, requests);
        let shared = self.memory.clone();
        let mut memory = lock(&shared);
        self.read(b, &mut memory, &features, requests);
        match self.run(target, &mut memory, requests) {
            Some(guesses) => self.choose(target, &guesses, requests),
            None => none,
        }
    }
}
