//! Drafts with a head that is chained on itself: an MTP head, or EAGLE-3's.
//!
//! The head has keys and values of its own, a row for each of the target's. Rows
//! built from the target's true rows stay; the chain's rows are forgotten as soon as
//! the draft is made, and rebuilt from true rows if their tokens are accepted. So
//! the head's memory never holds a guess.
//!
//! Where no stream wants a draft, true rows wait, as features, and are built some at a
//! time: a step of the head reads all its weights, however few rows it has.

use super::coverage::{self, Coverage};
use super::{
    DraftRequest, DraftState, Drafter, Restored, SavedDraft, Stretch, TargetView, newest, shortest,
    wanting,
};
use crate::sample::Scratch;
use backend::{Backend, Batch, MAX_TENTATIVE, StepKey, Tensor};
use cache::{Memory, MemoryFull, Piece, Sequence};
use models::ChainedHead;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Rows of a stream that wait to be read, at most: no more than a draft leaves, so that
/// reading them holds up a draft by little and takes no step of a new size.
const UNREAD_MAX: usize = MAX_TENTATIVE;

/// The drafter of a [`ChainedHead`].
pub struct Chained<H> {
    head: H,
    memory: Arc<Mutex<Memory>>,
    scratch: Scratch,
    key: StepKey,
}

/// What a chained head remembers of a text: its own keys and values of the rows that it has
/// read, and the features of rows that wait.
struct ChainedState {
    /// The head's memory, which all of its states share.
    memory: Arc<Mutex<Memory>>,
    sequence: Sequence,
    /// Features of the rows that follow those of `sequence`: `[n_unread, F]`.
    unread: Vec<f32>,
    n_unread: usize,
    coverage: Coverage,
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
            let state = request.state.of::<ChainedState>();
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
        (mut x, last): (Tensor, Vec<usize>),
        is_listed: bool,
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>> {
        let b = target.b;
        let mut drafts = vec![Vec::new(); requests.len()];
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
                    let state = requests[r].state.of::<ChainedState>();
                    let (token, first) = (state.sequence.len() + 1, batch.n_rows());
                    push(memory, batch, &mut state.sequence, &[newest], 0);
                    let (spans, follows) = (requests[r].spans, self.head.follows_grid());
                    spans.place_following(batch, first, token..token + 1, follows, &mut Vec::new());
                }
            }
            let head = &self.head;
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
                &mut |batch, x| vec![head.forward(b, target.model, x, &[], batch, memory)],
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
        drafts
    }
}

impl<H: ChainedHead> Drafter for Chained<H> {
    fn name(&self) -> &'static str {
        self.head.name()
    }

    fn taps(&self) -> &[usize] {
        self.head.taps()
    }

    fn state(&self) -> Result<Box<dyn DraftState>, MemoryFull> {
        let sequence = lock(&self.memory).open()?;
        Ok(Box::new(ChainedState::new(&self.memory, sequence)))
    }

    fn fits(&self, saved: Option<&SavedDraft>, n_pieces: usize) -> bool {
        saved.is_some_and(|saved| {
            let values = saved.n_unread.checked_mul(self.head.feature_cols());
            saved.n_unread <= UNREAD_MAX
                && values == Some(saved.unread.len())
                && lock(&self.memory).fits(&saved.outline, n_pieces)
        })
    }

    fn restorable(&self, saved: Option<&SavedDraft>, rows: usize) -> usize {
        let memory = lock(&self.memory);
        saved.map_or(0, |saved| {
            let forkable = |rows| memory.restorable(&saved.outline, rows);
            learned(rows, (saved.outline.rows, saved.n_unread), forkable)
        })
    }

    fn restore(&self, saved: Option<&SavedDraft>, rows: usize) -> Result<Restored, MemoryFull> {
        let none = SavedDraft::default();
        let saved = saved.unwrap_or(&none);
        let read = rows.min(saved.outline.rows);
        let (sequence, pieces) = lock(&self.memory).restore(&saved.outline, read)?;
        let mut state = ChainedState::new(&self.memory, sequence);
        state.n_unread = rows - read;
        state.unread = saved.unread[..state.n_unread * self.head.feature_cols()].to_vec();
        Ok((Box::new(state), pieces))
    }

    fn n_free_pages(&self) -> usize {
        lock(&self.memory).n_free_pages()
    }

    fn draft(
        &mut self,
        target: TargetView<'_>,
        hidden: &Tensor,
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>> {
        let b = target.b;
        let is_listed = coverage::is_enough(self.head.shortlist(), requests, |state| {
            &mut state.of::<ChainedState>().coverage
        });
        let rows: Vec<usize> = requests.iter().flat_map(|r| r.kept.clone()).collect();
        let features = self.head.features(b, hidden, target.taps, &rows);
        if requests.iter_mut().all(may_wait) {
            leave_unread(b, &features, requests);
            return vec![Vec::new(); requests.len()];
        }
        let features = with_unread(b, features, requests);
        let shared = self.memory.clone();
        let mut memory = lock(&shared);
        let read = self.read(target, &mut memory, &features, requests);
        let drafts = self.chain(target, &mut memory, read, is_listed, requests);
        for request in requests {
            let state = request.state.of::<ChainedState>();
            memory.truncate(&mut state.sequence, request.sequence.len());
        }
        drafts
    }
}

impl ChainedState {
    fn new(memory: &Arc<Mutex<Memory>>, sequence: Sequence) -> Self {
        ChainedState {
            memory: memory.clone(),
            sequence,
            unread: Vec::new(),
            n_unread: 0,
            coverage: Coverage::default(),
        }
    }

    /// Values of the features of a row that waits; 0 if none does.
    fn width(&self) -> usize {
        self.unread.len().checked_div(self.n_unread).unwrap_or(0)
    }

    /// The head's memory, locked, and the sequence in it that belongs to this state.
    fn own(&self) -> (MutexGuard<'_, Memory>, &Sequence) {
        (lock(&self.memory), &self.sequence)
    }
}

/// The most rows, `rows` at most, with which a state can begin after one of which `read` rows are in
/// the head's memory, where `forkable` says as much of these, and `n_unread` wait after them.
fn learned(
    rows: usize,
    (read, n_unread): (usize, usize),
    forkable: impl Fn(usize) -> usize,
) -> usize {
    if rows > read && forkable(read) == read {
        return rows.min(read + n_unread);
    }
    forkable(rows)
}

impl DraftState for ChainedState {
    fn keep(&mut self) {
        lock(&self.memory).keep(&mut self.sequence);
    }

    fn cut(&mut self, rows: usize) {
        let n_unread = rows.saturating_sub(self.sequence.len()).min(self.n_unread);
        self.unread.truncate(n_unread * self.width());
        self.n_unread = n_unread;
        lock(&self.memory).cut(&mut self.sequence, rows);
    }

    fn lacking_pages(&self, rows: usize) -> usize {
        self.sequence.lacking_pages(rows)
    }

    fn forkable(&self, rows: usize) -> usize {
        let (memory, sequence) = self.own();
        let forkable = |rows| memory.forkable(sequence, rows);
        learned(rows, (sequence.len(), self.n_unread), forkable)
    }

    fn fork(&self, backend: &dyn Backend, rows: usize) -> Result<Box<dyn DraftState>, MemoryFull> {
        let read = rows.min(self.sequence.len());
        let sequence = lock(&self.memory).fork(backend, &self.sequence, read)?;
        let mut fork = ChainedState::new(&self.memory, sequence);
        fork.n_unread = rows - read;
        fork.unread = self.unread[..fork.n_unread * self.width()].to_vec();
        Ok(Box::new(fork))
    }

    fn saved(&self) -> Option<(SavedDraft, Vec<Piece>)> {
        let (memory, sequence) = self.own();
        let (outline, pieces) = memory.outline(sequence);
        let (n_unread, unread) = (self.n_unread, self.unread.clone());
        let saved = SavedDraft {
            outline,
            n_unread,
            unread,
        };
        Some((saved, pieces))
    }

    fn has_all_of(&self, saved: &SavedDraft) -> bool {
        let (memory, sequence) = self.own();
        memory.has_all_of(sequence, &saved.outline) && self.n_unread == saved.n_unread
    }

    fn save_piece(&self, backend: &dyn Backend, piece: Piece) -> Vec<u8> {
        lock(&self.memory).save_piece(backend, piece)
    }

    fn load_piece(&mut self, backend: &dyn Backend, piece: Piece, bytes: &[u8]) -> bool {
        lock(&self.memory).load_piece(backend, piece, bytes)
    }
}

/// A head's memory. A panic elsewhere leaves it whole: sequences are changed in one go.
fn lock(memory: &Mutex<Memory>) -> MutexGuard<'_, Memory> {
    memory.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The embeddings of the media rows of `batch`, if it has any.
pub(crate) fn media(b: &dyn Backend, batch: &Batch, embeddings: &[f32]) -> Option<Tensor> {
    let n = batch.media.len();
    (n > 0).then(|| b.upload(n, embeddings.len() / n, embeddings))
}

/// Adds rows for `tokens` to `sequence` and `batch`.
fn push(
    memory: &mut Memory,
    batch: &mut Batch,
    sequence: &mut Sequence,
    tokens: &[u32],
    certain: usize,
) {
    let pushed = memory.push(batch, sequence, tokens, certain);
    pushed.expect("the head's memory is as large as the target's");
}

/// Whether the round's rows of `request` can wait until a draft is wanted.
fn may_wait(request: &mut DraftRequest<'_>) -> bool {
    let n_unread = request.state.of::<ChainedState>().n_unread;
    request.limit == 0 && n_unread + request.kept.len() <= UNREAD_MAX
}

/// Keeps the features of the round's rows, which are in the order of `requests`.
fn leave_unread(b: &dyn Backend, features: &Tensor, requests: &mut [DraftRequest<'_>]) {
    let values = b.download(features);
    let mut rest = &values[..];
    for request in requests {
        let (own, others) = rest.split_at(request.kept.len() * features.cols());
        let state = request.state.of::<ChainedState>();
        state.unread.extend_from_slice(own);
        state.n_unread += request.kept.len();
        rest = others;
    }
}

/// The features of all rows that the head has not read, in the order of `requests`; those
/// of the round's rows are `features`.
fn with_unread(b: &dyn Backend, features: Tensor, requests: &mut [DraftRequest<'_>]) -> Tensor {
    let waits = |r: &mut DraftRequest<'_>| r.state.of::<ChainedState>().n_unread > 0;
    if !requests.iter_mut().any(waits) {
        return features;
    }
    let cols = features.cols();
    let new = b.download(&features);
    let mut rest = &new[..];
    let mut values = Vec::new();
    for request in requests {
        let (own, others) = rest.split_at(request.kept.len() * cols);
        let state = request.state.of::<ChainedState>();
        values.append(&mut state.unread);
        state.n_unread = 0;
        values.extend_from_slice(own);
        rest = others;
    }
    b.upload(values.len() / cols, cols, &values)
}
