//! One text being written: what was asked for, what has come of it, and what is remembered.

use crate::accept::Verdict;
use crate::constraint::{Constraint, ConstraintError};
use crate::draft::{DraftRequest, DraftState};
use crate::length::{DraftLength, Ledger, LengthInput};
use crate::logprobs::Logprobs;
use crate::prompt::{Prompt, Spans};
use crate::sample::{History, Sampling, TokenProbs};
use crate::stats::Stats;
use backend::{Backend, MAX_TENTATIVE, NO_TOKEN, PAGE_ROWS};
use cache::{Entry, Memory, MemoryFull, Sequence};
use std::ops::Range;
use std::sync::Arc;

/// Why a stream has ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The target chose a stop token. It is the last of the stream's tokens.
    Stop,
    /// As many tokens as asked for, or prompt and output fill the context.
    Length,
    /// The target's logits [give no token](backend::gives_token): it has computed NaN or an
    /// infinity. What it remembers of the text is worth nothing.
    NoToken,
    /// The text is complete by its [constraint](crate::Constraint): nothing may follow its last token.
    Complete,
    /// The stream's constraint could not say what may come next ([`Stream::failure`]).
    Constraint,
}

impl Finish {
    /// Whether the text has ended for a fault, without a token that is chosen and not yet remembered.
    pub(crate) fn is_fault(self) -> bool {
        matches!(self, Finish::NoToken | Finish::Constraint)
    }
}

/// What a stream is to write.
#[derive(Clone, Debug)]
pub struct StreamOptions {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens to write, at most.
    pub max_tokens: usize,
    /// Tokens that end the text.
    pub stop_tokens: Arc<[u32]>,
    /// How long its drafts are; at most 0 turns speculation off for this stream.
    pub draft: DraftLength,
    /// Whether its tokens come with their log-probabilities, and beside each with those of
    /// how many of the likeliest; [`MAX_TOP_LOGPROBS`](crate::MAX_TOP_LOGPROBS) at most.
    pub logprobs: Option<usize>,
}

/// What is remembered of one text: cut back and forked as one.
pub(crate) struct StreamState {
    /// The target's keys, values and recurrent state.
    pub(crate) sequence: Sequence,
    /// What the drafter remembers, if there is a drafter.
    pub(crate) draft: Option<Box<dyn DraftState>>,
}

impl StreamState {
    /// The most rows, `rows` at most, that [`StreamState::restore`] can go back to. Where
    /// drafts are wanted (`drafts`), the drafter has learned all of them.
    pub(crate) fn restorable(&self, memory: &Memory, rows: usize, drafts: bool) -> usize {
        let draft = self.draft.as_ref().filter(|_| drafts);
        settle(
            rows,
            |rows| memory.restorable(&self.sequence, rows),
            |rows| draft.map_or(rows, |draft| draft.restorable(rows)),
        )
    }

    /// Forgets all rows from row `rows` on.
    ///
    /// # Panics
    ///
    /// If that is not [`StreamState::restorable`].
    pub(crate) fn restore(&mut self, b: &dyn Backend, memory: &mut Memory, rows: usize) {
        memory.restore(b, &mut self.sequence, rows);
        if let Some(draft) = &mut self.draft {
            draft.truncate(b, draft.restorable(rows));
        }
    }

    /// The most rows, `rows` at most, that [`StreamState::fork`] can share; `drafts` as for
    /// [`StreamState::restorable`].
    pub(crate) fn forkable(&self, memory: &Memory, rows: usize, drafts: bool) -> usize {
        let draft = self.draft.as_ref().filter(|_| drafts);
        settle(
            rows,
            |rows| memory.forkable(&self.sequence, rows),
            |rows| draft.map_or(rows, |draft| draft.forkable(rows)),
        )
    }

    /// The state of another text that begins with the same `rows` rows.
    ///
    /// # Panics
    ///
    /// If that is not [`StreamState::forkable`].
    pub(crate) fn fork(
        &self,
        b: &dyn Backend,
        memory: &mut Memory,
        rows: usize,
    ) -> Result<StreamState, MemoryFull> {
        let draft = self.draft.as_ref();
        let draft = draft.map(|draft| draft.fork(b, draft.forkable(rows)));
        Ok(StreamState {
            sequence: memory.fork(b, &self.sequence, rows)?,
            draft: draft.transpose()?,
        })
    }
}

/// The most rows, `rows` at most, that both limits allow: each says how many of so many.
pub(crate) fn settle(
    mut rows: usize,
    one: impl Fn(usize) -> usize,
    other: impl Fn(usize) -> usize,
) -> usize {
    loop {
        let allowed = other(one(rows));
        if allowed == rows {
            return rows;
        }
        rows = allowed;
    }
}

/// One text being written.
pub struct Stream {
    pub(crate) state: StreamState,
    /// The text in the prefix index.
    pub(crate) entry: Entry,
    pub(crate) tokens: Vec<u32>,
    /// Media spans of the prompt.
    spans: Spans,
    pub(crate) n_prompt: usize,
    pub(crate) draft: Vec<u32>,
    /// What the draft's tokens were drawn from, where acceptance asks for it.
    pub(crate) draft_probs: Vec<TokenProbs>,
    /// Log-probabilities of the newest tokens, if asked for.
    pub(crate) logprobs: Vec<Logprobs>,
    pub(crate) options: StreamOptions,
    pub(crate) history: History,
    /// What limits the tokens of the output, which it has seen.
    pub(crate) constraint: Option<Box<dyn Constraint>>,
    /// Why it could not go on, if it could not.
    pub(crate) failure: Option<ConstraintError>,
    /// Tokens that the next draft begins with.
    pub(crate) given: Vec<u32>,
    /// Tokens of the draft that the drafter has guessed, before the first forced one.
    pub(crate) n_guessed: usize,
    pub(crate) finish: Option<Finish>,
    pub(crate) stats: Stats,
    pub(crate) ledger: Ledger,
    /// Rows of the prompt that another text had left or shares.
    n_reused: usize,
    /// Rows after which a snapshot of recurrent state is to be taken, if one is.
    pub(crate) snapshot_at: Option<usize>,
}

impl Stream {
    /// A stream after `prompt`, whose first rows `state` remembers.
    pub(crate) fn new(
        state: StreamState,
        entry: Entry,
        prompt: Prompt,
        options: StreamOptions,
        memory: &Memory,
    ) -> Self {
        let Prompt { tokens, spans } = prompt;
        let n_reused = state.sequence.len();
        let snapshot_at = snapshot_at(tokens.len(), &spans);
        let takes_snapshot = !memory.delta.is_empty() && snapshot_at > n_reused;
        let has_room = options.max_tokens > 0 && tokens.len() < memory.size().context;
        Stream {
            state,
            entry,
            n_reused,
            snapshot_at: takes_snapshot.then_some(snapshot_at),
            n_prompt: tokens.len(),
            draft: Vec::new(),
            draft_probs: Vec::new(),
            logprobs: Vec::new(),
            history: History::new(&options.sampling, &tokens),
            constraint: None,
            failure: None,
            given: Vec::new(),
            n_guessed: 0,
            finish: (!has_room).then_some(Finish::Length),
            stats: Stats::default(),
            ledger: Ledger::default(),
            tokens,
            spans,
            options,
        }
    }

    /// Prompt and text so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The text so far.
    pub fn output(&self) -> &[u32] {
        &self.tokens[self.n_prompt..]
    }

    /// Log-probabilities of the tokens written since the last call, one for each; none if they
    /// are not asked for.
    pub fn take_logprobs(&mut self) -> Vec<Logprobs> {
        std::mem::take(&mut self.logprobs)
    }

    /// Tokens of the prompt.
    pub fn n_prompt(&self) -> usize {
        self.n_prompt
    }

    /// Prompt rows that have run.
    pub fn n_prefilled(&self) -> usize {
        self.state.sequence.len().min(self.n_prompt)
    }

    /// Whether rows of the prompt have still to run.
    pub fn is_reading(&self) -> bool {
        self.n_prefilled() < self.n_prompt
    }

    /// Prompt rows that ran for another text ([`resume`](crate::Speculator::resume),
    /// [`fork`](crate::Speculator::fork)).
    pub fn n_reused(&self) -> usize {
        self.n_reused
    }

    /// The most of its first rows, `rows` at most, that the stream can share once it has read its
    /// prompt.
    pub(crate) fn will_share(&self, memory: &Memory, rows: usize) -> usize {
        match self.snapshot_at {
            _ if memory.delta.is_empty() => rows / PAGE_ROWS * PAGE_ROWS,
            Some(at) if at <= rows => at,
            _ => 0,
        }
    }

    /// Why the stream has ended, if it has.
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// What speculation did for the stream.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Tokens that the stream may still write: its `max_tokens` in all, and of prompt and
    /// output together as many as `context`.
    pub(crate) fn left(&self, context: usize) -> usize {
        let of_output = self.options.max_tokens.saturating_sub(self.output().len());
        of_output.min(context.saturating_sub(self.tokens.len()))
    }

    /// The longest draft that there is room for. A round writes one token more than stay of it.
    pub(crate) fn draft_room(&self, context: usize) -> usize {
        self.left(context).saturating_sub(1).min(MAX_TENTATIVE)
    }

    /// What the length of the next draft depends on; there is room for none while the
    /// prompt has not ended.
    pub(crate) fn length_input(&self, prompt_ended: bool, context: usize) -> LengthInput<'_> {
        LengthInput {
            ledger: &self.ledger,
            wish: self.options.draft,
            room: if prompt_ended {
                self.draft_room(context)
            } else {
                0
            },
            context: self.tokens.len(),
        }
    }

    /// Known tokens that the next step runs: `chunk` at most but for a longer media span, none
    /// past a snapshot that is due, and no part of a span.
    pub(crate) fn next_chunk(&self, chunk: usize) -> usize {
        let first = self.state.sequence.len();
        let due = self.snapshot_at.filter(|&rows| rows > first);
        let due = due.map_or(usize::MAX, |rows| rows - first);
        let n = (self.tokens.len() - first).min(chunk).min(due);
        self.spans.whole_chunk(first, n)
    }

    /// Appends what stays of the draft and the pending token, as far as there is room, up to a
    /// token that ends the text.
    pub(crate) fn emit(&mut self, verdict: &Verdict, context: usize) {
        let left = self.left(context);
        let n_known = self.tokens.len();
        for i in 0..left.min(verdict.n_accepted + 1) {
            let token = match i < verdict.n_accepted {
                true => self.draft[i],
                false => verdict.pending,
            };
            if token == NO_TOKEN {
                self.finish = Some(Finish::NoToken);
                break;
            }
            self.append(token);
            if self.finish == Some(Finish::Constraint) {
                break;
            }
            if self.options.stop_tokens.contains(&token) {
                self.finish = Some(Finish::Stop);
            }
            if self.finish.is_some() {
                break;
            }
        }
        if self.finish.is_none() && self.tokens.len() == n_known + left {
            self.finish = Some(Finish::Length);
        }
    }

    /// The wish for a draft of at most `limit` tokens after rows `kept` of the batch, if there
    /// is a drafter. Residual acceptance wants the draft_probs of the draft's tokens.
    pub(crate) fn draft_request(
        &mut self,
        kept: Range<usize>,
        limit: usize,
        wants_draft_probs: bool,
    ) -> Option<DraftRequest<'_>> {
        Some(DraftRequest {
            sequence: &self.state.sequence,
            state: &mut **self.state.draft.as_mut()?,
            tokens: &self.tokens,
            kept,
            limit,
            given: if limit > 0 { &self.given } else { &[] },
            sampling: &self.options.sampling,
            history: &mut self.history,
            draft_probs: wants_draft_probs.then_some(&mut self.draft_probs),
        })
    }

    /// Takes the draft of the next round: up to where the drafter has computed NaN or an
    /// infinity, for no guess counts from there on.
    pub(crate) fn take_draft(&mut self, mut draft: Vec<u32>) {
        if let Some(n) = draft.iter().position(|&token| token == NO_TOKEN) {
            draft.truncate(n);
            self.draft_probs.truncate(n);
            self.stats.drafts_cut += 1;
        }
        self.n_guessed = draft.len();
        self.draft = draft;
    }
}

/// Fewest rows of a prompt that are worth a snapshot, and so a step that ends there.
const LEAST_SNAPSHOT: usize = 128;

/// Last rows of a prompt that a snapshot leaves out: often a template's way to begin the
/// reply, which a later turn writes in another way.
const REPLY_ROWS: usize = 16;

/// After how many rows of a prompt of `n` a snapshot of recurrent state is taken, for texts
/// that begin like it; 0 for none. Whole pages, so that a fork can share them, and whole
/// spans.
fn snapshot_at(n: usize, spans: &Spans) -> usize {
    let mut rows = n.saturating_sub(REPLY_ROWS) / PAGE_ROWS * PAGE_ROWS;
    while !spans.can_cut(rows) {
        rows -= PAGE_ROWS;
    }
    if rows < LEAST_SNAPSHOT { 0 } else { rows }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::MediaSpan;

    #[test]
    fn a_snapshot_is_taken_after_whole_pages_before_the_reply() {
        let none = Spans::default();
        for (n, rows) in [(0, 0), (143, 0), (144, 128), (207, 128), (208, 192)] {
            assert_eq!(snapshot_at(n, &none), rows, "prompt of {n}");
        }
    }

    #[test]
    fn a_snapshot_cuts_no_span() {
        let span = |rows| MediaSpan {
            rows,
            hash: [0; 16],
        };
        let spans = |rows| Prompt::with_media(vec![0; 400], vec![span(rows)]).spans;
        assert_eq!(snapshot_at(400, &spans(300..390)), 384 - 64 - 64);
        assert_eq!(snapshot_at(400, &spans(384..390)), 384);
        assert_eq!(snapshot_at(400, &spans(10..390)), 0);
    }

    #[test]
    fn settling_ends_where_both_limits_agree() {
        let pages = |rows: usize| rows / 64 * 64;
        let odd = |rows: usize| if rows > 100 { 90 } else { rows };
        assert_eq!(settle(300, pages, odd), 64);
        assert_eq!(settle(64, pages, odd), 64);
        assert_eq!(settle(10, pages, odd), 0);
    }
}
