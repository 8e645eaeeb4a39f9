//! One text being written: what was asked for, what has come of it, and what is remembered.

use crate::accept::{Accept, Verdict};
use crate::constraint::{Constraint, ConstraintError};
use crate::draft::{DraftRequest, DraftState, Ngrams};
use crate::length::{Copy, DraftLength, Guesser, Guessers, Ledger, LengthInput, StopRule};
use crate::logprobs::{Logprobs, LogprobsOf, TopLogprobs};
use crate::pooling::Pool;
use crate::preempt::PutBy;
use crate::prompt::{Prompt, Spans};
use crate::sample::{History, Sampling, TokenProbs};
use crate::stats::Stats;
use crate::trace::RoundTrace;
use backend::{Backend, MAX_TENTATIVE, NO_TOKEN, PAGE_ROWS};
use cache::{Entry, Memory, MemoryFull, Sequence};
use models::MediaRows;
use std::ops::Range;
use std::sync::Arc;

/// Why a stream has ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The target chose a stop token. It is the last of the stream's tokens.
    Stop,
    /// As many tokens as asked for, or prompt and output fill the context; or the prompt has been
    /// read, and [its rows were to be pooled](Stream::pool).
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
    /// Whether its tokens come with their log-probabilities, and with which.
    pub logprobs: Option<TopLogprobs>,
}

impl StreamOptions {
    /// How many of the likeliest tokens are asked for `of` one or the other, if any are.
    pub(crate) fn logprobs_of(&self, of: LogprobsOf) -> Option<usize> {
        let asked = self.logprobs.filter(|asked| asked.of == of);
        asked.map(|asked| asked.top)
    }
}

/// What is remembered of one text: cut back and forked as one.
pub(crate) struct StreamState {
    /// The target's keys, values and recurrent state.
    pub(crate) sequence: Sequence,
    /// What each head remembers.
    pub(crate) heads: Vec<Box<dyn DraftState>>,
}

impl StreamState {
    /// The most rows, `rows` at most, that [`StreamState::fork`] can share. Where drafts are
    /// wanted (`drafts`), the heads have learned all of them.
    pub(crate) fn forkable(&self, memory: &Memory, rows: usize, drafts: bool) -> usize {
        let heads = if drafts { &self.heads[..] } else { &[] };
        settle(
            rows,
            |rows| memory.forkable(&self.sequence, rows),
            |rows| heads.iter().fold(rows, |rows, head| head.forkable(rows)),
        )
    }

    /// Ends the text: the state is only forked and cut from now on.
    pub(crate) fn keep(&mut self, memory: &mut Memory) {
        memory.keep(&mut self.sequence);
        self.heads.iter_mut().for_each(|head| head.keep());
    }

    /// Whether whoever could go on from `part`, the state of a text that this one begins with, can
    /// as well go on from here.
    pub(crate) fn has_all_of(&self, memory: &Memory, part: &StreamState) -> bool {
        let rows = part.sequence.len();
        let mut theirs = part.sequence.snapshots().iter().filter(|s| !s.is_freed());
        let own = self.sequence.snapshots();
        theirs.all(|s| own.iter().any(|own| Arc::ptr_eq(own, s)))
            && memory.forkable(&self.sequence, rows) >= memory.forkable(&part.sequence, rows)
            && self.heads.len() == part.heads.len()
            && (self.heads.iter().zip(&part.heads))
                .all(|(own, theirs)| own.forkable(rows) >= theirs.forkable(rows))
    }

    /// Has the state of an ended text forget all rows from row `rows` on.
    pub(crate) fn cut(&mut self, memory: &mut Memory, rows: usize) {
        memory.cut(&mut self.sequence, rows);
        self.heads.iter_mut().for_each(|head| head.cut(rows));
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
        let heads = self.heads.iter();
        let heads = heads.map(|head| head.fork(b, head.forkable(rows)));
        Ok(StreamState {
            heads: heads.collect::<Result<_, _>>()?,
            sequence: memory.fork(b, &self.sequence, rows)?,
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
    pub(crate) spans: Spans,
    /// Whether a step takes all rows of a span or none: they see each other.
    keeps_spans_whole: bool,
    pub(crate) n_prompt: usize,
    pub(crate) draft: Vec<u32>,
    /// What the draft's tokens were drawn from, where acceptance asks for it.
    pub(crate) draft_probs: Vec<TokenProbs>,
    /// How sure the drafter was of each token that it guessed, where it told and the draft may be cut by that.
    pub(crate) confidences: Vec<f32>,
    /// The first token that was cut off the draft because it was not worth a row.
    pub(crate) cut_off: Option<u32>,
    /// Whether the drafter is asked how sure it is though drafts are not cut, so that they take as long.
    pub(crate) is_calibration: bool,
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
    /// How it is decided which of its drafted tokens stay.
    pub(crate) accept: Accept,
    /// Who may guess.
    pub(crate) guessers: Guessers,
    /// Who is to guess wherever it can.
    pinned: Option<Guesser>,
    /// Whether all that can guess do so in turn.
    takes_turns: bool,
    /// The text's n-grams, where these may guess.
    pub(crate) ngrams: Ngrams,
    /// Who has guessed the draft.
    pub(crate) guesser: Guesser,
    /// Tokens of the draft that were guessed, before the first forced one.
    pub(crate) n_guessed: usize,
    /// Tokens that the drafter was asked for, of which the draft was made.
    pub(crate) n_asked: usize,
    /// Which tokens of the draft the constraint left no choice about; empty without one.
    pub(crate) draft_forced: Vec<bool>,
    pub(crate) finish: Option<Finish>,
    pub(crate) stats: Stats,
    /// What the newest rounds did, if that is to be noted.
    pub(crate) trace: Option<Vec<RoundTrace>>,
    /// What is pooled of the rows, where that is asked for instead of text.
    pub(crate) pool: Option<Pool>,
    pub(crate) ledger: Ledger,
    /// Rows of the prompt that another text had left or shares.
    n_reused: usize,
    /// Snapshots that are to be taken while the prompt is read, ascending by rows.
    pub(crate) snapshots_due: Vec<SnapshotDue>,
    /// All snapshots of the prompt, those that were taken included.
    pub(crate) snapshots: Vec<SnapshotDue>,
    /// The draft that the stream had when it was preempted, until its known rows have run again.
    pub(crate) put_by: Option<PutBy>,
    /// Whether the target has recurrent state, which is saved as it is after a step.
    has_state: bool,
}

/// A snapshot that is to be taken while a prompt is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SnapshotDue {
    /// Rows after which.
    pub(crate) rows: usize,
    /// Whether nothing makes room for it.
    pub(crate) is_extra: bool,
}

impl Stream {
    /// A stream after `prompt`, whose first rows `state` remembers and whose media rows stand in it by
    /// the target's `rule`.
    pub(crate) fn new(
        state: StreamState,
        entry: Entry,
        prompt: Prompt,
        options: StreamOptions,
        memory: &Memory,
        rule: MediaRows,
    ) -> Self {
        let n_reused = state.sequence.len();
        let snapshots = match memory.takes_snapshots() {
            true => {
                let stride = stride(memory.has_state(), memory.size().step_rows);
                snapshots_due(&prompt, stride)
            }
            false => Vec::new(),
        };
        let due = |due: &&SnapshotDue| due.rows > n_reused;
        let snapshots_due = snapshots.iter().filter(due).copied().collect();
        let Prompt { tokens, spans, .. } = prompt;
        let has_room = options.max_tokens > 0 && tokens.len() < memory.size().context;
        Stream {
            state,
            entry,
            n_reused,
            snapshots_due,
            snapshots,
            put_by: None,
            has_state: memory.has_state(),
            n_prompt: tokens.len(),
            draft: Vec::new(),
            draft_probs: Vec::new(),
            confidences: Vec::new(),
            cut_off: None,
            is_calibration: false,
            logprobs: Vec::new(),
            history: History::new(&options.sampling, &tokens),
            constraint: None,
            failure: None,
            given: Vec::new(),
            accept: Accept::default(),
            guessers: Guessers::default(),
            pinned: None,
            takes_turns: false,
            ngrams: Ngrams::default(),
            guesser: Guesser::default(),
            n_guessed: 0,
            n_asked: 0,
            draft_forced: Vec::new(),
            trace: None,
            pool: None,
            finish: (!has_room).then_some(Finish::Length),
            stats: Stats::default(),
            ledger: Ledger::default(),
            tokens,
            spans,
            keeps_spans_whole: rule.see_their_span,
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

    /// Known rows that have to run before the next token can be chosen: of a prompt, or of a text that
    /// was [preempted](crate::Speculator::preempt). 0 where only the pending token has to.
    pub fn n_due(&self) -> usize {
        let n = self.tokens.len() - self.state.sequence.len();
        if self.is_reading() || n > 1 { n } else { 0 }
    }

    /// Prompt rows that ran for another text ([`resume`](crate::Speculator::resume),
    /// [`fork`](crate::Speculator::fork)).
    pub fn n_reused(&self) -> usize {
        self.n_reused
    }

    /// The most of its first rows, `rows` at most, that the stream can share once it has read its
    /// prompt.
    pub(crate) fn will_share(&self, memory: &Memory, rows: usize) -> usize {
        if !memory.has_state() {
            return rows;
        }
        let due = self.snapshots_due.iter().rev();
        let due = due.filter(|due| !due.is_extra).map(|due| due.rows);
        due.into_iter().find(|&due| due <= rows).unwrap_or(0)
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

    /// Lets `guessers` alone guess for the stream, of those that the [`Speculator`](crate::Speculator) has.
    pub fn restrict_drafters(&mut self, guessers: Guessers) {
        self.guessers = guessers;
    }

    /// Has `guesser` make the next drafts wherever it can, instead of whoever promises most; none leaves
    /// that to what rounds cost and bring.
    pub fn draft_by(&mut self, guesser: Option<Guesser>) {
        self.pinned = guesser;
    }

    /// Has those that can guess make the next drafts in turn, round by round, instead of whoever promises most.
    pub fn take_turns(&mut self) {
        self.takes_turns = true;
    }

    /// Decides by `accept`, instead of by the [`Speculator`](crate::Speculator)'s own rule, which of the stream's
    /// drafted tokens stay. Call it before the stream's first round.
    pub fn accept_by(&mut self, accept: Accept) {
        self.accept = accept;
    }

    /// The rule by which the stream's drafted tokens stay: exact where it is greedy.
    pub fn accept(&self) -> Accept {
        self.accept.with(&self.options.sampling)
    }

    /// Whether drafted tokens stay by rejection sampling, which wants to know what they were drawn from.
    pub(crate) fn rejects(&self) -> bool {
        self.accept() == Accept::Residual
    }

    /// Whether `head` reads the stream's rows: it may guess for it.
    pub(crate) fn is_read_by(&self, head: usize) -> bool {
        self.options.draft.max() > 0 && self.guessers.has(Guesser::Head(head))
    }

    /// Looks up what its n-grams propose as the next draft, if the text is to go on from here
    /// (`chooses`) and may be drafted for.
    pub(crate) fn look_up_copy(&mut self, chooses: bool, context: usize) {
        let most = self.draft_room(context).min(self.options.draft.max());
        let may_copy = self.guessers.has(Guesser::Ngram);
        match chooses && may_copy && self.finish.is_none() && most > 0 {
            true => self.ngrams.look_up(&self.tokens, most),
            false => self.ngrams.clear(),
        }
    }

    /// What the length of the next draft depends on, of a model with so many heads; there is room for none
    /// while the prompt has not ended.
    pub(crate) fn length_input(
        &self,
        prompt_ended: bool,
        context: usize,
        n_heads: usize,
    ) -> LengthInput<'_> {
        let copy = self.ngrams.copy().map(|(matched, tokens)| Copy {
            matched,
            tokens: tokens.len(),
        });
        let input = LengthInput {
            may_be_cut: self.may_be_cut(),
            heads: self.guessers.among(n_heads),
            copy,
            pinned: self.pinned,
            ledger: &self.ledger,
            wish: self.options.draft,
            room: if prompt_ended {
                self.draft_room(context)
            } else {
                0
            },
            context: self.tokens.len(),
        };
        LengthInput {
            pinned: match self.takes_turns {
                true => input.in_turn(self.stats.rounds as usize),
                false => self.pinned,
            },
            ..input
        }
    }

    /// Known tokens that the next step runs: `chunk` at most and none past a snapshot that is due;
    /// where rows of a media span see each other, no part of a span, and more for a longer one. The
    /// last rows of a prompt go along
    /// with those before a snapshot, as rows that could be taken back ([`Stream::certain_rows`]).
    pub(crate) fn next_chunk(&self, chunk: usize) -> usize {
        let first = self.state.sequence.len();
        let left = (self.tokens.len() - first).min(chunk);
        let reaches_end = first + left == self.tokens.len();
        let due = self.next_snapshot();
        let is_last = due.is_some_and(|due| {
            let n_after = self.tokens.len() + self.n_put_by() - due;
            reaches_end && self.snapshots_due.len() == 1 && n_after <= MAX_TENTATIVE
        });
        let due = due
            .filter(|_| !is_last)
            .map_or(usize::MAX, |due| due - first);
        let rows = left.min(due);
        match self.keeps_spans_whole {
            true => self.spans.whole_chunk(first, rows),
            false => rows,
        }
    }

    /// How many of the next `n` known rows the recurrent state is to have seen for good after their
    /// step: those before a snapshot, as it saves the state.
    pub(crate) fn certain_rows(&self, n: usize) -> usize {
        let first = self.state.sequence.len();
        let due = self.next_snapshot().map(|due| due - first);
        due.filter(|&rows| rows < n).unwrap_or(n)
    }

    /// Rows after which the next snapshot of recurrent state is due.
    fn next_snapshot(&self) -> Option<usize> {
        let first = self.state.sequence.len();
        let mut due = self.snapshots_due.iter().map(|due| due.rows);
        due.find(|&rows| rows > first).filter(|_| self.has_state)
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

    /// The wish for a draft of at most `limit` tokens by `head` after rows `kept` of the batch, if there
    /// is such a head. Residual acceptance wants the draft_probs of the draft's tokens.
    pub(crate) fn draft_request<'s>(
        &'s mut self,
        head: usize,
        kept: Range<usize>,
        limit: usize,
        wants_draft_probs: bool,
        wants_confidences: bool,
        stop: Option<&'s StopRule>,
    ) -> Option<DraftRequest<'s>> {
        Some(DraftRequest {
            sequence: &self.state.sequence,
            state: &mut **self.state.heads.get_mut(head)?,
            tokens: &self.tokens,
            spans: &self.spans,
            kept,
            limit,
            given: if limit > 0 { &self.given } else { &[] },
            sampling: &self.options.sampling,
            history: &mut self.history,
            draft_probs: wants_draft_probs.then_some(&mut self.draft_probs),
            confidences: wants_confidences.then_some(&mut self.confidences),
            stop,
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
        self.confidences.truncate(draft.len());
        self.n_guessed = draft.len();
        self.draft = draft;
    }

    /// Whether its drafts may be cut where guesses are not worth a row. Rejection sampling asks for the draft as it
    /// was drawn.
    pub(crate) fn may_be_cut(&self) -> bool {
        matches!(self.options.draft, DraftLength::UpTo(_)) && !self.rejects()
    }

    /// Cuts the draft to its first `n` tokens: as if so many had been asked for.
    pub(crate) fn cut_draft(&mut self, n: usize) {
        let n_cut = self.draft.len().saturating_sub(n);
        if n_cut == 0 {
            return;
        }
        // A constraint may yet put other tokens in the place of the first one that is cut off.
        let follows = self.draft[n];
        self.cut_off = self.constraint.is_none().then_some(follows);
        self.draft.truncate(n);
        self.n_guessed = n;
        self.n_asked = n.saturating_sub(self.given.len());
        self.stats.unverified += n_cut as u64;
    }

    /// How many guesses of the draft the text shows to be right or wrong, and how many of these are right; `n_known`
    /// are the tokens before the round, and `n_accepted` of `n_guessed` tokens stayed. The token that was cut off shows
    /// too if all before it were right.
    pub(crate) fn tested_guesses(&self, n_known: usize, n_accepted: usize) -> (usize, usize) {
        let n_guessed = self.draft.len().min(self.n_guessed);
        let n_right = n_accepted.min(n_guessed);
        let next = self.tokens.get(n_known + n_guessed);
        match (self.cut_off, next) {
            (Some(cut_off), Some(&next)) if n_right == n_guessed => {
                (n_guessed + 1, n_right + usize::from(cut_off == next))
            }
            _ => (n_guessed, n_right),
        }
    }
}

/// Fewest rows of a prompt without marks that are worth a snapshot, and so a step that ends there.
const LEAST_SNAPSHOT: usize = 128;

/// Fewest rows that are worth a snapshot at the last mark, which costs no step.
const LEAST_LAST: usize = 16;

/// Fewest rows that are worth a snapshot at the first mark, and so a step that ends there.
const LEAST_FIRST: usize = 32;

/// Rows of a long prompt between snapshots that are taken where there is room, at least.
const STRIDE: usize = 1024;

/// Rows between such snapshots, whole pages. A step ends where recurrent state is to be saved, so the state of a model
/// that reads up to `step_rows` rows in a step, which are more, is saved after so many.
fn stride(has_state: bool, step_rows: usize) -> usize {
    match has_state {
        true => (step_rows / PAGE_ROWS * PAGE_ROWS).max(STRIDE),
        false => STRIDE,
    }
}

/// Last rows of a prompt without marks that a snapshot leaves out: often a template's way to begin
/// the reply, which a later turn writes in another way.
const REPLY_ROWS: usize = 16;

/// The snapshots to take while `prompt` is read, for texts that begin like it: at the first mark,
/// where the system prompt ends, at the last, from which a later turn goes on however it writes the
/// reply, behind the last media span, from which another question about the same picture goes on, and on
/// the way every `stride` rows. Each leaves all media spans whole.
fn snapshots_due(prompt: &Prompt, stride: usize) -> Vec<SnapshotDue> {
    let (n, spans) = (prompt.tokens.len(), &prompt.spans);
    let marks = prompt.marks.iter().copied();
    let marks: Vec<usize> = marks.filter(|&at| at < n && spans.can_cut(at)).collect();
    let page = last_page(n, spans);
    let mut rows = match (marks.first(), marks.last()) {
        (Some(&first), Some(&last)) if first < last => {
            vec![if first >= LEAST_FIRST { first } else { last }, last]
        }
        // Prompts of one message may part within it.
        (_, Some(&last)) => vec![page.min(last), last],
        _ => vec![page],
    };
    rows.retain(|&rows| rows >= LEAST_LAST);
    rows.extend(spans.end().filter(|&at| LEAST_FIRST <= at && at < n));
    rows.sort_unstable();
    rows.dedup();
    let due = |is_extra| move |rows| SnapshotDue { rows, is_extra };
    let far = |at: &usize| rows.iter().all(|rows| rows.abs_diff(*at) >= stride / 2);
    let strides = (stride..n).step_by(stride);
    let strides = strides.filter(|at| spans.can_cut(*at) && far(at));
    let mut all: Vec<SnapshotDue> = strides.map(due(true)).collect();
    all.extend(rows.iter().copied().map(due(false)));
    all.sort_by_key(|due| due.rows);
    all
}

/// After how many rows of a prompt of `n` without marks a snapshot is taken; 0 for none. Whole
/// pages, and whole spans.
fn last_page(n: usize, spans: &Spans) -> usize {
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
    fn without_marks_a_snapshot_is_taken_after_whole_pages_before_the_reply() {
        let none = Spans::default();
        for (n, rows) in [(0, 0), (143, 0), (144, 128), (207, 128), (208, 192)] {
            assert_eq!(last_page(n, &none), rows, "prompt of {n}");
        }
    }

    #[test]
    fn a_snapshot_cuts_no_span() {
        let span = |rows: Range<usize>| MediaSpan {
            grid: [1, rows.len()],
            is_causal: false,
            rows,
            hash: [0; 16],
            embeddings: Arc::default(),
        };
        let spans = |rows: Range<usize>| Prompt::with_media(vec![0; 400], vec![span(rows)]).spans;
        assert_eq!(last_page(400, &spans(300..390)), 384 - 64 - 64);
        assert_eq!(last_page(400, &spans(384..390)), 384);
        assert_eq!(last_page(400, &spans(10..390)), 0);
        let prompt = Prompt::with_media(vec![0; 400], vec![span(300..390)]);
        let due = snapshots_due(&prompt.with_marks(vec![250, 350]), STRIDE);
        assert_eq!(
            due.iter().map(|due| due.rows).collect::<Vec<_>>(),
            [250, 390]
        );
    }

    #[test]
    fn a_snapshot_is_due_behind_the_last_picture() {
        let due = |n: usize, ends: &[usize], marks: &[usize]| {
            let span = |&end: &usize| MediaSpan {
                grid: [1, 20],
                is_causal: true,
                rows: end - 20..end,
                hash: [0; 16],
                embeddings: Arc::default(),
            };
            let media = ends.iter().map(span).collect();
            let prompt = Prompt::with_media(vec![0; n], media).with_marks(marks.to_vec());
            let due = snapshots_due(&prompt, STRIDE).into_iter();
            due.map(|due| due.rows).collect::<Vec<_>>()
        };
        assert_eq!(due(300, &[100, 200], &[40, 290]), [40, 200, 290]);
        assert_eq!(due(300, &[200], &[40, 290]), [40, 200, 290]);
        assert_eq!(
            due(300, &[290], &[40, 290]),
            [40, 290],
            "the last mark is there"
        );
        assert_eq!(due(300, &[240], &[40, 230]), [40, 240]);
        assert_eq!(
            due(300, &[25], &[40, 290]),
            [40, 290],
            "few rows are read again"
        );
        assert_eq!(
            due(300, &[300], &[40, 270]),
            [40, 270],
            "nothing follows it"
        );
    }

    #[test]
    fn snapshots_are_due_at_the_first_and_the_last_mark_and_on_the_way() {
        let due_every = |stride: usize, n: usize, marks: &[usize]| {
            let prompt = Prompt::from(vec![0; n]).with_marks(marks.to_vec());
            let due = snapshots_due(&prompt, stride).into_iter();
            due.map(|due| (due.rows, due.is_extra)).collect::<Vec<_>>()
        };
        let due = |n: usize, marks: &[usize]| due_every(STRIDE, n, marks);
        assert_eq!(due(300, &[100, 150, 290]), [(100, false), (290, false)]);
        assert_eq!(due(300, &[20, 290]), [(290, false)]);
        assert_eq!(due(300, &[270, 290]), [(270, false), (290, false)]);
        assert_eq!(due(30, &[10, 25]), [(25, false)]);
        assert_eq!(due(20, &[10]), []);
        let long = due(4000, &[900, 3990]);
        let extra = [(2048, true), (3072, true)];
        assert_eq!(
            long,
            [&[(900, false)], &extra[..], &[(3990, false)]].concat()
        );
        // Steps of more rows end less often.
        let strides = [256, 1500, 8192].map(|rows| [stride(true, rows), stride(false, rows)]);
        assert_eq!(strides, [[1024, 1024], [1472, 1024], [8192, 1024]]);
        let long = due_every(4096, 9000, &[900, 8990]);
        assert_eq!(long, [(900, false), (4096, true), (8990, false)]);
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
