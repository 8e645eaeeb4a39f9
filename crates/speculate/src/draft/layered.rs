//! Drafts with a head of several layers, each of which guesses one token further than the one before
//! (`specs/qwen3_5.md` §8).
//!
//! ```text
//! layer i, row p :  ( token p+i+1 , what layer i-1 made of row p )  →  the token at p+i+2
//! ```
//!
//! After row `p = n-1`, the last of the target's, layer 0 knows the token that follows and guesses the
//! one after it; layer 1 reads that guess in the same row, and so on. So layer `i` of the last `i` rows is
//! made of guesses. All layers have their rows in one sequence: what stays of it ends before the first
//! row that any layer made of a guess, and the rows after that wait as features
//! ([`HeadState`]), to be run again with what turned out to follow.
//!
//! A draft of more tokens than layers goes on in turns: what the layers made of the last row stands in
//! for the target's next rows, and the first layer begins again with these. A head of one layer that is
//! chained on itself ([`super::chained`]) does the same with one row a turn.

use super::chained::media;
use super::head_state::{HeadState, push};
use super::stretch::{choose, replace_given, take_given};
use super::{DraftRequest, wanting};
use crate::sample::Scratch;
use backend::{Backend, Batch, NO_TOKEN, StepKey, Tensor};
use cache::Memory;
use models::HeadLogits;
use std::ops::Range;

/// Keys of the layers' steps. There are at least as many as a head has layers.
const PARTS: [&str; 8] = [
    "layer 0", "layer 1", "layer 2", "layer 3", "layer 4", "layer 5", "layer 6", "layer 7",
];

/// Runs a layer over the rows of a batch: from its features, and after these the embeddings of media.
pub(super) type Forward<'a> = dyn Fn(&mut Memory, usize, &Batch, &[&Tensor]) -> Tensor + 'a;

/// How a head of several layers drafts.
pub(super) struct Layered<'a, 'h> {
    pub(super) key: StepKey,
    pub(super) n_layers: usize,
    /// Whether rows stand where the target's rows of media do.
    pub(super) follows_grid: bool,
    pub(super) forward: &'a Forward<'a>,
    /// Scores of the next token.
    pub(super) score: &'a dyn Fn(&Tensor) -> HeadLogits<'h>,
}

/// Rows that the layers run over, one layer after the other.
#[derive(Default)]
struct Turn {
    /// What the rows write and see. Tokens and media are each layer's own.
    batch: Batch,
    owners: Vec<Owner>,
    /// Tokens that were drafted before.
    n_drafted: usize,
}

/// The rows of one request.
struct Owner {
    request: usize,
    rows: Range<usize>,
    /// Which token of the text the first layer reads in the first row.
    token: usize,
}

impl Turn {
    /// The last rows of `requests`, which ascend.
    fn last_rows(&self, requests: &[usize]) -> Vec<usize> {
        let owners = self.owners.iter();
        let wanted = owners.filter(|owner| requests.binary_search(&owner.request).is_ok());
        wanted.map(|owner| owner.rows.end - 1).collect()
    }

    /// Adds `n` rows of request `r`, the first `certain` of which stay.
    fn push(
        &mut self,
        memory: &mut Memory,
        (r, request): (usize, &mut DraftRequest<'_>),
        (n, certain): (usize, usize),
        follows_grid: bool,
    ) {
        let sequence = &mut request.state.of::<HeadState>().sequence;
        let (first, token) = (self.batch.n_rows(), sequence.len() + 1);
        push(memory, &mut self.batch, sequence, &vec![0; n], certain);
        let (tokens, spans) = (token..token + n, request.spans);
        spans.place_following(
            &mut self.batch,
            first,
            tokens,
            follows_grid,
            &mut Vec::new(),
        );
        self.owners.push(Owner {
            request: r,
            rows: first..first + n,
            token,
        });
    }

    /// The rows as layer `layer` reads them, and the embeddings of media among them.
    fn of_layer(
        &self,
        layer: usize,
        requests: &[DraftRequest<'_>],
        drafts: &[Vec<u32>],
    ) -> (Batch, Vec<f32>) {
        let (mut batch, mut embeddings) = (self.batch.clone(), Vec::new());
        batch.media.clear();
        for owner in &self.owners {
            let (request, draft) = (&requests[owner.request], &drafts[owner.request]);
            let first = owner.token + layer;
            let tokens = first..first + owner.rows.len();
            for (row, token) in owner.rows.clone().zip(tokens.clone()) {
                batch.tokens[row] = token_at(request.tokens, draft, token);
            }
            let (first, spans) = (owner.rows.start, request.spans);
            spans.place_following(&mut batch, first, tokens, false, &mut embeddings);
        }
        (batch, embeddings)
    }
}

/// Token `i` of a text and its draft. Rows of tokens that are in neither are nobody's to read, and
/// after a row that gave no token the rest of the draft does not count: any token will do.
fn token_at(text: &[u32], draft: &[u32], i: usize) -> u32 {
    let drafted = |i: usize| draft.get(i).copied().filter(|&token| token != NO_TOKEN);
    match text.get(i) {
        Some(&token) => token,
        None => drafted(i - text.len()).unwrap_or(0),
    }
}

impl Layered<'_, '_> {
    /// Has the head read the rows of `features`, all those that `requests` have and the head's memory
    /// has not, and drafts for each request. The rows that the head is not to keep stay in `memory`.
    pub(super) fn draft(
        &self,
        b: &dyn Backend,
        memory: &mut Memory,
        mut features: Tensor,
        requests: &mut [DraftRequest<'_>],
        scratch: &mut Scratch,
    ) -> Vec<Vec<u32>> {
        let mut drafts = vec![Vec::new(); requests.len()];
        let mut turn = Turn::default();
        for (r, request) in requests.iter_mut().enumerate() {
            let state = request.state.of::<HeadState>();
            let n = request.sequence.len() - state.sequence.len();
            let certain = n - state.n_unread();
            turn.push(memory, (r, request), (n, certain), self.follows_grid);
        }
        loop {
            let made = self.run(
                b,
                memory,
                (&turn, features),
                (requests, &mut drafts),
                scratch,
            );
            let n_drafted = turn.n_drafted + self.n_layers;
            let active = wanting(requests, n_drafted);
            if active.is_empty() {
                return drafts;
            }
            features = by_request(b, &made);
            turn = Turn {
                n_drafted,
                ..Turn::default()
            };
            for r in active {
                let rows = (self.n_layers, 0);
                turn.push(memory, (r, &mut requests[r]), rows, self.follows_grid);
            }
        }
    }

    /// Runs the layers over the rows of `turn`, and drafts a token with each for the requests that want
    /// one. Returns what each layer made of the last rows of those that want more.
    fn run(
        &self,
        b: &dyn Backend,
        memory: &mut Memory,
        (turn, features): (&Turn, Tensor),
        (requests, drafts): (&mut [DraftRequest<'_>], &mut [Vec<u32>]),
        scratch: &mut Scratch,
    ) -> Vec<Tensor> {
        let going_on = turn.last_rows(&wanting(requests, turn.n_drafted + self.n_layers));
        let (mut x, mut made) = (features, Vec::new());
        for (layer, part) in PARTS.iter().enumerate().take(self.n_layers) {
            let active = wanting(requests, turn.n_drafted + layer);
            // All layers keep the target's rows, nobody those that stand in for them.
            if active.is_empty() && turn.n_drafted > 0 {
                break;
            }
            let (batch, embeddings) = turn.of_layer(layer, requests, drafts);
            let media = media(b, &batch, &embeddings);
            let inputs: Vec<&Tensor> = [&x].into_iter().chain(&media).collect();
            let mut rows = b.step(self.key.part(part), &batch, &inputs, &mut |x| {
                vec![(self.forward)(memory, layer, &batch, x)]
            });
            x = rows.pop().expect("the layer's rows");
            if !active.is_empty() && !take_given(&active, requests, drafts) {
                let last = b.gather(&x, &turn.last_rows(&active));
                choose(b, (self.score)(&last), &active, requests, drafts, scratch);
                replace_given(&active, requests, drafts);
            }
            if !going_on.is_empty() {
                made.push(b.gather(&x, &going_on));
            }
        }
        made
    }
}

/// Row `r` of each of `made`, one after the other, for each `r`.
fn by_request(b: &dyn Backend, made: &[Tensor]) -> Tensor {
    let values: Vec<_> = made.iter().map(|rows| b.download(rows)).collect();
    let (n, cols) = (made[0].rows(), made[0].cols());
    let rows = (0..n).flat_map(|r| values.iter().map(move |v| &v[r * cols..(r + 1) * cols]));
    let all: Vec<f32> = rows.flatten().copied().collect();
    b.upload(n * made.len(), cols, &all)
}
