//! Stretches: parts of a draft through which the same requests want tokens, in one chain of
//! steps where the device can choose the tokens itself, else step by step; and whole drafts, made
//! of such parts.

use super::{DraftRequest, newest, steps, stop, wanting};
use crate::host_choices::{RowChoice, are_worthwhile, choose_each};
use crate::sample::{self, Scratch};
use backend::{
    Backend, Batch, Chain, Link, NO_TOKEN, RowEdits, StepKey, Tensor, TokenChoice, TokenList,
    gives_token,
};
use cache::Memory;
use models::{HeadLogits, Scored};

/// A part of a draft through which the same requests want tokens.
pub(super) struct Stretch<'a> {
    /// Key of single steps.
    pub(super) key: StepKey,
    /// Key of a chain of steps.
    pub(super) chain: StepKey,
    /// A batch for each token, of a row for each of `active`. Only the first one's tokens
    /// are known; without rows, it scores what the stretch starts from.
    pub(super) batches: Vec<Batch>,
    pub(super) active: &'a [usize],
    /// The tokens that the head scores, if not all, and the same ones after each row.
    pub(super) list: Option<&'a TokenList>,
    /// The head's scores as a chain takes them, if not [`HeadLogits::logits`].
    pub(super) link: Option<&'a LinkScores<'a>>,
}

/// Scores of some rows as a chain takes them, and their tokens where these depend on the
/// row.
pub(super) type LinkScores<'a> = dyn Fn(&Tensor) -> (Tensor, Option<Tensor>) + 'a;

/// How a drafter with a memory of its own is chained on itself: it runs a row for each token that it
/// has drafted, and drafts the next one from what it makes of that row.
pub(super) struct Links<'a, 'h> {
    /// Key of single steps.
    pub(super) key: StepKey,
    /// Key of a chain of steps.
    pub(super) chain: StepKey,
    /// The tokens that are scored, if not all.
    pub(super) list: Option<&'a TokenList>,
    /// Adds a row for a request's newest token to a batch.
    pub(super) push: &'a dyn Fn(&mut Memory, &mut Batch, &mut DraftRequest<'_>, u32),
    /// Runs a batch, from what it has made of the rows before. Returns what is scored, and what
    /// the next step starts from.
    pub(super) forward: &'a dyn Fn(&mut Memory, &Batch, &Tensor) -> Tensor,
    /// Scores of the next token.
    pub(super) score: &'a dyn Fn(&Tensor) -> HeadLogits<'h>,
}

impl Links<'_, '_> {
    /// Drafts for each request that wants a token, from row `last` of `x`, one for each of `requests`.
    /// The rows of drafted tokens stay in `memory`: of all but the last one.
    pub(super) fn draft(
        &self,
        b: &dyn Backend,
        memory: &mut Memory,
        (mut x, last): (Tensor, &[usize]),
        requests: &mut [DraftRequest<'_>],
        scratch: &mut Scratch,
    ) -> Vec<Vec<u32>> {
        let mut drafts = vec![Vec::new(); requests.len()];
        let mut active = wanting(requests, 0);
        let mut from: Vec<usize> = active.iter().map(|&r| last[r]).collect();
        let mut n = 0;
        while !active.is_empty() {
            x = b.gather(&x, &from);
            let steps = steps(requests, &active, n);
            let mut batches = vec![Batch::default(); steps];
            // The first token is scored by the rows above.
            for batch in batches.iter_mut().skip(usize::from(n == 0)) {
                for &r in &active {
                    let newest = newest(&drafts[r]).unwrap_or(0);
                    (self.push)(memory, batch, &mut requests[r], newest);
                }
            }
            let stretch = Stretch {
                key: self.key,
                chain: self.chain,
                batches,
                active: &active,
                list: self.list,
                link: None,
            };
            x = stretch.draft(
                b,
                x,
                &mut |batch, x| vec![(self.forward)(memory, batch, x)],
                self.score,
                (requests, &mut drafts),
                scratch,
            );
            n += steps;
            if stop(requests, &active) {
                break;
            }
            from = (0..active.len())
                .filter(|&i| requests[active[i]].limit > n)
                .collect();
            active = from.iter().map(|&i| active[i]).collect();
        }
        drafts
    }
}

impl Stretch<'_> {
    /// Drafts a token a batch for each active request, from `x` on: in one go if the
    /// device can choose all of them, else step by step. Returns what the next stretch
    /// starts from.
    ///
    /// `forward` runs a step's rows and returns what is to be scored and, if that is
    /// something else, then what the next step starts from.
    pub(super) fn draft<'h>(
        mut self,
        b: &dyn Backend,
        mut x: Tensor,
        forward: &mut dyn FnMut(&Batch, &Tensor) -> Vec<Tensor>,
        score: &dyn Fn(&Tensor) -> HeadLogits<'h>,
        (requests, drafts): (&mut [DraftRequest<'_>], &mut [Vec<u32>]),
        scratch: &mut Scratch,
    ) -> Tensor {
        if let Some(chained) = self.chained(b, &x, forward, score, requests, drafts) {
            for tokens in chained.tokens {
                for (&r, token) in self.active.iter().zip(tokens) {
                    drafts[r].push(token);
                }
            }
            for confidences in &chained.confidences {
                note_confidences(self.active, requests, confidences);
            }
            return chained.next.unwrap_or(x);
        }
        for (i, batch) in self.batches.iter_mut().enumerate() {
            if i > 0 {
                let newest = |&r: &usize| newest(&drafts[r]).expect("chosen in the step before");
                batch.tokens = self.active.iter().map(newest).collect();
            }
            let mut z = None;
            if batch.n_rows() > 0 {
                let mut made = b.step(self.key, batch, &[&x], &mut |x| forward(batch, x[0]));
                x = made.pop().expect("a step makes something");
                z = made.pop();
            }
            if !take_given(self.active, requests, drafts) {
                let scored = score(z.as_ref().unwrap_or(&x));
                choose(b, scored, self.active, requests, drafts, scratch);
                replace_given(self.active, requests, drafts);
            }
        }
        x
    }

    /// All its tokens from a chain of steps that the device runs alone.
    fn chained<'h>(
        &self,
        b: &dyn Backend,
        x: &Tensor,
        forward: &mut dyn FnMut(&Batch, &Tensor) -> Vec<Tensor>,
        score: &dyn Fn(&Tensor) -> HeadLogits<'h>,
        requests: &[DraftRequest<'_>],
        drafts: &[Vec<u32>],
    ) -> Option<backend::Chained> {
        let choices: Option<Vec<Vec<TokenChoice>>> = (0..self.batches.len())
            .map(|i| choices(self.active, requests, drafts, i, TokenChoices::OfLogits))
            .collect();
        let chain = Chain {
            key: self.chain,
            batches: &self.batches,
            choices: &choices?,
            list: self.list,
            wants_confidences: want_confidences(self.active, requests),
        };
        b.chain(&chain, x, &mut |_, batch, x| {
            let mut made = match batch.n_rows() {
                0 => Vec::new(),
                _ => forward(batch, x),
            };
            let next = made.pop();
            let z = made.pop();
            let z = z.as_ref().or(next.as_ref()).unwrap_or(x);
            let (logits, ids) = match self.link {
                Some(link) => link(z),
                None => (score(z).logits, None),
            };
            Link { logits, ids, next }
        })
    }
}

/// Chooses the next draft token of each of `active` with the noise the target
/// will use, and remembers it. Row `i` of `scored` belongs to request `active[i]`.
pub(super) fn choose(
    b: &dyn Backend,
    scored: HeadLogits<'_>,
    active: &[usize],
    requests: &mut [DraftRequest<'_>],
    drafts: &mut [Vec<u32>],
    scratch: &mut Scratch,
) {
    let HeadLogits { mut logits, scored } = scored;
    if want_confidences(active, requests) {
        note_confidences(active, requests, &b.confidences(&logits));
    }
    let by_row = matches!(scored, Scored::ByRow(_));
    let greedy = !by_row
        && active
            .iter()
            .all(|&r| requests[r].sampling.is_plain_greedy());
    if greedy {
        for (i, (&r, best)) in active.iter().zip(b.argmax(&logits)).enumerate() {
            let token = match scored.ids(i) {
                Some(ids) if best != NO_TOKEN => ids[best as usize],
                _ => best,
            };
            drafts[r].push(token);
        }
        return;
    }
    let list = match scored {
        Scored::All => Some(None),
        Scored::Same(list) => Some(Some(list)),
        Scored::ByRow(_) => None,
    };
    if let Some(list) = list
        && let Some(choices) = choices(active, requests, drafts, 0, TokenChoices::OfEdited)
    {
        let has_edits = active.iter().any(|&r| requests[r].sampling.edits_logits());
        if !has_edits || b.capabilities().edits {
            if has_edits {
                let edits = edits(active, requests, drafts, (list, logits.cols()), scratch);
                logits = b.edit_logits(logits, &edits);
            }
            if let Some(tokens) = b.choose_tokens(&logits, list, &choices) {
                for (&r, token) in active.iter().zip(tokens) {
                    drafts[r].push(token);
                }
                return;
            }
        }
    }
    let scores = b.download(&logits);
    if let Some(tokens) = each_by_row(b, &scores, &scored, active, requests, drafts) {
        for (&r, token) in active.iter().zip(tokens) {
            drafts[r].push(token);
        }
        return;
    }
    for (i, (&r, row)) in active
        .iter()
        .zip(scores.chunks_exact(logits.cols()))
        .enumerate()
    {
        let request = &mut requests[r];
        let position = (request.tokens.len() + drafts[r].len()) as u64;
        for &token in &drafts[r] {
            request.history.push(token);
        }
        let token = match scored.ids(i) {
            None => sample::choose(request.sampling, request.history, position, row, scratch),
            Some(ids) => sample::choose_among(
                request.sampling,
                request.history,
                position,
                ids,
                row,
                scratch,
            ),
        };
        if let Some(draft_probs) = request.draft_probs.as_mut().filter(|_| gives_token(row)) {
            let (sampling, history) = (request.sampling, &*request.history);
            draft_probs.push(sample::token_probs(
                sampling,
                history,
                position,
                scored.ids(i),
                row,
                scratch,
            ));
        }
        for _ in &drafts[r] {
            request.history.pop();
        }
        drafts[r].push(token);
    }
}

/// The next draft token of each of `active`, chosen by the device's threads on the host, if each
/// depends on its row of scores alone and that is worth it.
fn each_by_row(
    b: &dyn Backend,
    scores: &[f32],
    scored: &Scored<'_>,
    active: &[usize],
    requests: &[DraftRequest<'_>],
    drafts: &[Vec<u32>],
) -> Option<Vec<u32>> {
    let cols = scores.len() / active.len().max(1);
    let is_able = |&r: &usize| {
        requests[r].draft_probs.is_none() && requests[r].sampling.depends_on_row_alone()
    };
    if !are_worthwhile(b, active.len(), cols) || !active.iter().all(is_able) {
        return None;
    }
    let choice = |(i, &r): (usize, &usize)| {
        let request = &requests[r];
        RowChoice {
            sampling: request.sampling,
            history: request.history,
            position: (request.tokens.len() + drafts[r].len()) as u64,
            ids: scored.ids(i),
            logits: &scores[i * cols..][..cols],
        }
    };
    let choices: Vec<RowChoice<'_>> = active.iter().enumerate().map(choice).collect();
    Some(choose_each(b, &choices))
}

/// Takes the next token of each of `active` from those that are given; `false`, and nothing
/// changes, if one has to be guessed.
pub(super) fn take_given(
    active: &[usize],
    requests: &mut [DraftRequest<'_>],
    drafts: &mut [Vec<u32>],
) -> bool {
    let is_given = |&r: &usize| drafts[r].len() < requests[r].given.len();
    if !active.iter().all(is_given) {
        return false;
    }
    for &r in active {
        let token = requests[r].given[drafts[r].len()];
        drafts[r].push(token);
        if let Some(probs) = &mut requests[r].draft_probs {
            probs.push(vec![(token, 1.0)]);
        }
    }
    if want_confidences(active, requests) {
        note_confidences(active, requests, &vec![1.0; active.len()]);
    }
    true
}

/// Puts the given tokens of `active` in place of what was just guessed.
pub(super) fn replace_given(
    active: &[usize],
    requests: &mut [DraftRequest<'_>],
    drafts: &mut [Vec<u32>],
) {
    for &r in active {
        let given = requests[r].given.get(drafts[r].len() - 1).copied();
        let (Some(token), Some(last)) = (given, drafts[r].last_mut()) else {
            continue;
        };
        *last = token;
        let confidences = requests[r].confidences.as_mut();
        if let Some(confidence) = confidences.and_then(|all| all.last_mut()) {
            *confidence = 1.0;
        }
        if let Some(probs) = requests[r].draft_probs.as_mut().and_then(|p| p.last_mut()) {
            *probs = vec![(token, 1.0)];
        }
    }
}

/// Whether any of `active` wants to know how sure the head is of its guesses.
fn want_confidences(active: &[usize], requests: &[DraftRequest<'_>]) -> bool {
    active.iter().any(|&r| requests[r].confidences.is_some())
}

/// Tells those of `active` that want to know how sure the head is of its newest guess.
fn note_confidences(active: &[usize], requests: &mut [DraftRequest<'_>], confidences: &[f32]) {
    for (&r, &confidence) in active.iter().zip(confidences) {
        if let Some(all) = &mut requests[r].confidences {
            all.push(confidence);
        }
    }
}

/// What choices are made of.
#[derive(Clone, Copy, PartialEq)]
enum TokenChoices {
    /// Logits as they are, which is all that a chain of steps has.
    OfLogits,
    /// Logits after the edits of the text so far.
    OfEdited,
}

/// How the draft tokens of `active` are chosen once `later` more are drafted, if a device can
/// and nobody asks for their probabilities.
fn choices(
    active: &[usize],
    requests: &[DraftRequest<'_>],
    drafts: &[Vec<u32>],
    later: usize,
    of: TokenChoices,
) -> Option<Vec<TokenChoice>> {
    let choice = |&r: &usize| {
        let request = &requests[r];
        let n_drafted = drafts[r].len() + later;
        let position = (request.tokens.len() + n_drafted) as u64;
        let choice = match of {
            TokenChoices::OfLogits => request.sampling.on_device(position)?,
            TokenChoices::OfEdited => request.sampling.of_edited(position)?,
        };
        let is_open = request.draft_probs.is_none() && n_drafted >= request.given.len();
        is_open.then_some(choice)
    };
    active.iter().map(choice).collect()
}

/// The edits of the next row of logits of each of `active`, after what is drafted. Columns are the
/// tokens of a list, or all `cols` of them.
fn edits(
    active: &[usize],
    requests: &mut [DraftRequest<'_>],
    drafts: &[Vec<u32>],
    (list, cols): (Option<&TokenList>, usize),
    scratch: &mut Scratch,
) -> Vec<RowEdits> {
    let place = |token: u32| match list {
        Some(list) => list.column(token),
        None => Some(token).filter(|&token| (token as usize) < cols),
    };
    let of = |&r: &usize| {
        let request = &mut requests[r];
        drafts[r]
            .iter()
            .for_each(|&token| request.history.push(token));
        let edits = request.sampling.edits(request.history, scratch, place);
        drafts[r].iter().for_each(|_| request.history.pop());
        edits
    };
    active.iter().map(of).collect()
}
