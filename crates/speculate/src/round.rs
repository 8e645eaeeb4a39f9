//! The round.
//!
//! ```text
//! rows     = tokens not remembered yet, then the draft           gather
//! hidden   = target(rows)                                        verify
//! y_i      = choice after the last known token and draft[..i], of what may follow them
//! a        = length of the draft's prefix that equals y          accept
//! text    += y_0 .. y_a
//! memory  -= rows after the accepted ones                        rollback
//! draft    = drafter(rows that stay)                             draft
//! times, counts and the prefix index                             record
//! ```
//!
//! The tokens not remembered yet are the prompt, or a chunk of it, or the one
//! pending token. A chunk that does not reach the prompt's end chooses nothing, nor does the
//! prompt of a stream that [pools its rows](crate::pooling).

mod guess;

use crate::accept::{Verdict, accept_with, residual};
use crate::choosing::{Chosen, Source};
use crate::draft::{self, HiddenRows};
use crate::host_choices::{self, OpenRows};
use crate::length::{Guesser, HeadTimes, Longest, RoundCost, TextRows};
use crate::logprobs::{Logprobs, LogprobsOf};
use crate::sample;
use crate::speculator::Speculator;
use crate::stream::{Finish, Stream};
use backend::{DeviceError, NO_TOKEN, Tensor, gives_token};
use cache::{MemoryFull, RowKey};
use models::Taps;
use std::ops::Range;
use std::time::Instant;

/// Why a round failed. The streams in it cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RoundError {
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A sequence found no room.
    #[error(transparent)]
    Memory(#[from] MemoryFull),
    /// A target's logits [give no token](backend::gives_token). A round says so of a stream
    /// alone ([`Finish::NoToken`]).
    #[error("{NO_TOKEN_REASON}")]
    NoToken,
}

/// What is wrong where logits [give no token](backend::gives_token).
pub const NO_TOKEN_REASON: &str = "the model computed a value that is not a number; \
    the checkpoint may be damaged: fetch or convert it again";

/// One stream's rows in a round: known tokens, then its draft.
pub(crate) struct StreamRows {
    /// Number of the first row in the batch.
    first: usize,
    /// Rows that the stream's sequence had before.
    n_before: usize,
    /// Rows of known tokens.
    n_known: usize,
    /// Rows of the draft.
    pub(crate) n_drafted: usize,
    /// Whether a token is chosen after the known ones: the rows reach the end of a text that is to
    /// go on.
    pub(crate) chooses: bool,
}

impl StreamRows {
    /// The rows of the batch after which a token is chosen.
    fn choosing(&self) -> Range<usize> {
        let last_known = self.first + self.n_known - 1;
        match self.chooses {
            true => last_known..last_known + 1 + self.n_drafted,
            false => last_known..last_known,
        }
    }

    /// The known rows, by their numbers in the text.
    pub(crate) fn of_text(&self) -> Range<usize> {
        self.n_before..self.n_before + self.n_known
    }

    /// The number in the batch of row `row` of the text.
    pub(crate) fn in_batch(&self, row: usize) -> usize {
        self.first + row - self.n_before
    }

    /// Whether they are the prompt's: if they choose a token, it is the first one.
    pub(crate) fn are_prompt(&self, stream: &Stream) -> bool {
        self.n_before + self.n_known <= stream.n_prompt
    }

    /// Whether they are more than a pending token and its draft: rows of the prompt, or of a text that
    /// was preempted.
    pub(crate) fn is_prefill(&self, stream: &Stream) -> bool {
        self.n_before < stream.n_prompt || self.n_known > 1
    }

    /// The tokens that the round has appended to the stream's text.
    fn emitted<'a>(&self, stream: &'a Stream) -> &'a [u32] {
        match self.chooses {
            true => &stream.tokens[self.n_before + self.n_known..],
            false => &[],
        }
    }
}

/// What the target has computed of a round's rows.
struct Verified {
    hidden: HiddenRows,
    /// The rows inside the target that the heads read, one head after the other, `[n, H]` each.
    taps: Vec<Tensor>,
    /// The rows after which a token is chosen, one stream after the other, if there are any.
    chosen: Option<Chosen>,
    /// Whether the device has told which experts the rows chose.
    has_marks: bool,
}

impl Speculator {
    /// One round for all of `streams`; none of them may have ended. Each runs at most
    /// `chunk` rows of its prompt, or one span of media rows that see each other if that is longer.
    ///
    /// # Errors
    ///
    /// [`RoundError`]; the streams must then be closed.
    ///
    /// # Panics
    ///
    /// If a stream has ended, or `chunk` is 0.
    pub fn round(&mut self, streams: &mut [&mut Stream], chunk: usize) -> Result<(), RoundError> {
        self.round_telling(streams, chunk, &mut |_| {})
    }

    /// A [round](Speculator::round) that calls `written` as soon as its tokens are part of the
    /// streams' texts, before the next ones are drafted. What streams tell of the round is
    /// complete then: tokens, [log-probabilities](Stream::take_logprobs),
    /// [sources](Stream::take_rounds), whether they have ended. A round that fails may have called
    /// it: its tokens are right, but no round follows.
    ///
    /// # Errors
    ///
    /// [`RoundError`]; the streams must then be closed.
    ///
    /// # Panics
    ///
    /// If a stream has ended, or `chunk` is 0.
    pub fn round_telling(
        &mut self,
        streams: &mut [&mut Stream],
        chunk: usize,
        written: &mut dyn FnMut(&mut [&mut Stream]),
    ) -> Result<(), RoundError> {
        assert!(
            chunk > 0 && streams.iter().all(|s| s.finish.is_none()),
            "streams that go on, and rows for them"
        );
        let start = Instant::now();
        let rows = self.gather(streams, chunk)?;
        let before = self.before_step(streams, &rows);
        let verified = self.verify(streams, &rows)?;
        self.accept_drafts(streams, &rows, &verified);
        self.collect_logprobs(streams, &rows, &verified)?;
        if streams.iter().any(|stream| stream.pools()) {
            self.pool_rows(streams, &rows, &verified.hidden)?;
        }
        self.rollback(streams, &rows);
        let verify = start.elapsed();
        let experts = self.count_experts(streams, &rows, verified.has_marks);
        written(streams);
        let start = Instant::now();
        let (longest, by_head) = self.draft(streams, &rows, &verified)?;
        let draft = start.elapsed();
        self.ran_first = self.b.take_first_runs();
        let cost = RoundCost {
            streams: streams.len(),
            rows: self.batch.n_rows(),
            context: streams.iter().map(|s| s.tokens.len()).max().unwrap_or(0),
            experts: experts.map(|experts| experts as f64),
            drafts: longest,
            verify,
            draft,
            by_head,
        };
        self.record(streams, &rows, &cost);
        self.note_step(before, streams, &rows, (&cost, experts));
        Ok(())
    }

    /// How many experts the step has touched, if the device has told which.
    fn count_experts(
        &mut self,
        streams: &mut [&mut Stream],
        rows: &[StreamRows],
        has_marks: bool,
    ) -> Option<usize> {
        if !has_marks {
            return None;
        }
        let text = |(stream, rows): (&mut &mut Stream, &StreamRows)| {
            let n_rows = rows.n_known + rows.n_drafted;
            TextRows {
                rows: rows.first..rows.first + n_rows,
                kept: (stream.state.sequence.len() - rows.n_before).min(n_rows),
            }
        };
        let texts: Vec<TextRows> = streams.iter_mut().zip(rows).map(text).collect();
        let ledgers = streams.iter_mut().map(|stream| &mut stream.ledger);
        let mut texts: Vec<_> = ledgers.zip(texts).collect();
        Some(self.lengths.touched(&self.marks, &mut texts))
    }

    /// Collects the round's rows in the batch.
    fn gather(
        &mut self,
        streams: &mut [&mut Stream],
        chunk: usize,
    ) -> Result<Vec<StreamRows>, MemoryFull> {
        self.batch.clear();
        self.embeddings.clear();
        let rule = self.target.media_rows();
        let mut rows = Vec::with_capacity(streams.len());
        let running: Vec<&Stream> = streams.iter().map(|stream| &**stream).collect();
        self.make_room_for_heads(&running, chunk);
        for i in 0..streams.len() {
            let stream = &mut *streams[i];
            let n_before = stream.state.sequence.len();
            let n_known = stream.next_chunk(chunk);
            let chooses = n_before + n_known == stream.tokens.len() && !stream.pools();
            match chooses {
                true => stream.take_up_draft(),
                false => stream.draft.clear(),
            }
            let first = self.batch.n_rows();
            let mut tokens = stream.tokens[n_before..n_before + n_known].to_vec();
            tokens.extend_from_slice(&stream.draft);
            let n_drafted = stream.draft.len();
            let certain = stream.certain_rows(n_known);
            loop {
                let sequence = &mut streams[i].state.sequence;
                let pushed = self
                    .memory
                    .push(&mut self.batch, sequence, &tokens, certain);
                let Err(full) = pushed else { break };
                let running: Vec<&Stream> = streams.iter().map(|stream| &**stream).collect();
                if !self.evict(full, None, &running) {
                    return Err(full);
                }
            }
            let (batch, embeddings) = (&mut self.batch, &mut self.embeddings);
            let read = n_before..n_before + tokens.len();
            let spans = &streams[i].spans;
            spans.place(batch, first, read, rule, embeddings);
            rows.push(StreamRows {
                first,
                n_before,
                n_known,
                n_drafted,
                chooses,
            });
        }
        Ok(rows)
    }

    /// The rows of the batch that run through all of the target's layers: those after which a token is chosen, the
    /// last row if there are none. Absent if all rows do, because somebody reads all hidden rows.
    fn outputs(&self, streams: &[&mut Stream], choosing: &[usize]) -> Option<Vec<usize>> {
        let n_rows = self.batch.n_rows();
        let reads_all = |head| streams.iter().any(|stream| stream.is_read_by(head));
        let all = choosing.len() == n_rows
            || !self.may_leave_out(n_rows, reads_all)
            || streams.iter().any(|stream| stream.pools());
        (!all).then(|| match choosing {
            [] => vec![n_rows - 1],
            rows => rows.to_vec(),
        })
    }

    /// Runs the target over the batch, and waits for it.
    fn verify(
        &mut self,
        streams: &mut [&mut Stream],
        rows: &[StreamRows],
    ) -> Result<Verified, DeviceError> {
        let b = &*self.b;
        let choosing: Vec<usize> = rows.iter().flat_map(StreamRows::choosing).collect();
        let all = choosing.len() == self.batch.n_rows();
        let key = self.key.part(if all { "verify" } else { "prefill" });
        let outputs = self.outputs(streams, &choosing);
        let (target, batch, memory) = (&*self.target, &self.batch, &mut self.memory);
        let tapped = self.drafters.taps();
        let media = draft::media(b, batch, &self.embeddings);
        let media: Vec<&Tensor> = media.iter().collect();
        b.note_experts();
        let mut made = b.step(key, batch, &media, &mut |media| {
            let mut taps = Taps::new(&tapped).with_outputs(outputs.clone());
            let inputs = target.inputs(b, batch, media);
            let hidden = target.forward_inputs(b, inputs, batch, memory, &mut taps);
            let logits = all.then(|| target.logits(b, &hidden));
            let kept = [hidden].into_iter().chain(taps.into_rows());
            kept.chain(logits).collect()
        });
        let logits = if all { made.pop() } else { None };
        let taps = made.split_off(1);
        let hidden = HiddenRows {
            tensor: made.pop().expect("a step's hidden rows"),
            of: outputs,
        };
        let logits = logits.or_else(|| {
            (!choosing.is_empty()).then(|| target.logits(b, &hidden.gather(b, &choosing)))
        });
        // All of it asked for before the wait, so that a device goes on with it at once. The
        // host finds the masks while the device computes what they are for.
        let source = Source {
            hidden: &hidden,
            choosing: &choosing,
        };
        let choose = |logits| self.choose_on_device(streams, rows, logits, source);
        let chosen = logits.map(choose);
        self.b.finish()?;
        let has_marks = self.b.take_experts(&mut self.marks);
        let n_rows = self.batch.n_rows();
        Ok(Verified {
            hidden,
            taps,
            chosen,
            has_marks: has_marks && self.marks.n_rows() == n_rows,
        })
    }

    /// Appends to each stream what stays of its draft, and the token after it.
    fn accept_drafts(
        &mut self,
        streams: &mut [&mut Stream],
        rows: &[StreamRows],
        verified: &Verified,
    ) {
        let Some(chosen) = &verified.chosen else {
            return;
        };
        let open = chosen.open();
        let scores = open.map_or_else(Default::default, |open| self.b.download(open));
        let cols = open.map_or(0, Tensor::cols);
        let choosing = || streams.iter().zip(rows).filter(|(_, r)| r.chooses);
        let n_rows = choosing().map(|(_, rows)| rows.n_drafted + 1);
        let mut choices = host_choices::open_rows(n_rows, &chosen.tokens, (&scores, cols));
        let choosing: Vec<&Stream> = choosing().map(|(stream, _)| &**stream).collect();
        host_choices::choose_ahead(&*self.b, &choosing, &mut choices, cols);
        let context = self.memory.size().context;
        let choosing = streams.iter_mut().zip(rows).filter(|(_, r)| r.chooses);
        for ((stream, rows), choices) in choosing.zip(choices) {
            if stream.finish.is_some() {
                continue;
            }
            let n_judged = stream.logprobs.len();
            let verdict = self.verdict(stream, &choices);
            let (n_known, is_first) = (stream.tokens.len(), rows.are_prompt(stream));
            stream.emit(&verdict, context);
            if stream.options.logprobs_of(LogprobsOf::Choice).is_some() {
                let n_emitted = rows.emitted(stream).len();
                stream.logprobs.truncate(n_judged + n_emitted);
            }
            stream.note_round(n_known, rows.n_drafted, &verdict, is_first);
            if !is_first {
                let n_accepted = verdict.n_accepted;
                stream.stats.count(rows.n_drafted, n_accepted);
                let n_forced = stream.n_forced(rows.n_drafted);
                let n_forced_accepted = stream.n_forced(n_accepted);
                // Forced tokens say nothing of what the drafter's guesses are worth, and change
                // what those after them are.
                let (n_tested, n_right) = stream.tested_guesses(n_known, n_accepted);
                let Stream {
                    stats,
                    ledger,
                    guesser,
                    confidences,
                    ..
                } = &mut **stream;
                stats.count_forced(n_forced, n_forced_accepted);
                let n_own = rows.n_drafted - n_forced;
                stats.count_guesses(*guesser, n_own, n_accepted - n_forced_accepted);
                // A token that was cut off was not accepted, right or not: drafts are as long as pays with cuts.
                let n_stayed = n_accepted.min(n_right);
                self.lengths.verified(ledger, *guesser, n_tested, n_stayed);
                if let Guesser::Head(head) = *guesser {
                    let tested = &confidences[..n_tested.min(confidences.len())];
                    self.lengths.was_sure(ledger, head, tested, n_right);
                }
            }
            self.judge_copy(stream, n_known);
        }
    }

    /// Notes what the copy that `stream`'s n-grams have proposed was worth: the round has written the tokens
    /// after the first `n_known`.
    fn judge_copy(&mut self, stream: &mut Stream, n_known: usize) {
        let Some((matched, copy)) = stream.ngrams.copy() else {
            return;
        };
        let pairs = copy.iter().zip(&stream.tokens[n_known..]);
        let n_tested = pairs.len();
        let n_right = pairs.take_while(|(copied, token)| copied == token).count();
        self.lengths
            .proposed(&mut stream.ledger, matched, n_tested, n_right);
    }

    /// Which tokens of `stream`'s draft stay, and the token after them. All of these are in
    /// the stream's history then.
    fn verdict(&mut self, stream: &mut Stream, choices: &OpenRows<'_>) -> Verdict {
        let rejects = stream.rejects();
        let Stream {
            tokens,
            draft,
            draft_probs,
            history,
            options,
            logprobs,
            ..
        } = stream;
        let (sampling, scratch) = (&options.sampling, &mut self.scratch);
        let top_of_choice = options.logprobs_of(LogprobsOf::Choice);
        let verdict = accept_with(draft, |i| {
            if i > 0 {
                history.push(draft[i - 1]);
            }
            if let Some(token) = choices.made[i] {
                return token;
            }
            let scores = choices.logits[i];
            let position = (tokens.len() + i) as u64;
            let token = match draft.get(i) {
                Some(&drafted) if rejects && gives_token(scores) => {
                    let target =
                        sample::token_probs(sampling, history, position, None, scores, scratch);
                    let drawn_from = draft_probs.get(i);
                    residual(drafted, &target, drawn_from, sampling.seed, position)
                }
                _ => sample::choose(sampling, history, position, scores, scratch),
            };
            if let Some(top) = top_of_choice.filter(|_| token != NO_TOKEN) {
                let probs = sample::token_probs(sampling, history, position, None, scores, scratch);
                logprobs.push(Logprobs::of_choice(probs, token, top));
            }
            if token != NO_TOKEN {
                sample::observe(sampling, history, position, scores, token, scratch);
            }
            token
        });
        if verdict.pending != NO_TOKEN {
            history.push(verdict.pending);
        }
        verdict
    }

    /// Computes log-probabilities of the tokens just chosen by the logits as they are, for the
    /// streams that asked for these.
    fn collect_logprobs(
        &self,
        streams: &mut [&mut Stream],
        rows: &[StreamRows],
        verified: &Verified,
    ) -> Result<(), DeviceError> {
        let Some(logits) = verified.chosen.as_ref().map(Chosen::as_they_are) else {
            return Ok(());
        };
        let mut asked = Vec::new();
        let mut most = 0;
        let mut row = 0;
        for (stream, rows) in streams.iter().zip(rows).filter(|(_, r)| r.chooses) {
            if let Some(top) = stream.options.logprobs_of(LogprobsOf::Logits) {
                most = most.max(top);
                let emitted = rows.emitted(stream).iter().copied();
                asked.extend((row..).zip(emitted));
            }
            row += rows.n_drafted + 1;
        }
        if asked.is_empty() {
            return Ok(());
        }
        let mut likeliest = self.b.likeliest(logits, &asked, most).into_iter();
        self.b.finish()?;
        for (stream, rows) in streams.iter_mut().zip(rows) {
            if let Some(top) = stream.options.logprobs_of(LogprobsOf::Logits) {
                let n_emitted = rows.emitted(stream).len();
                let own = likeliest.by_ref().take(n_emitted).map(|mut row| {
                    row.top.truncate(top);
                    Logprobs::of(&row)
                });
                stream.logprobs.extend(own);
            }
        }
        Ok(())
    }

    /// Has the target's memory forget the rows of draft tokens that were not accepted, and
    /// takes the snapshots that are due.
    fn rollback(&mut self, streams: &mut [&mut Stream], rows: &[StreamRows]) {
        for (stream, rows) in streams.iter_mut().zip(rows) {
            // A chosen token is pending: known, not remembered.
            let len = if !rows.chooses {
                rows.n_before + rows.n_known
            } else if stream.finish.is_some_and(Finish::is_fault) {
                stream.tokens.len()
            } else {
                stream.tokens.len() - 1
            };
            self.memory.truncate(&mut stream.state.sequence, len);
            self.take_snapshots(stream);
        }
    }

    /// Takes the snapshots of `stream` that are due and can be had. One of more worth than another
    /// that somebody has left takes its place.
    fn take_snapshots(&mut self, stream: &mut Stream) {
        let sequence = &mut stream.state.sequence;
        while let Some(&due) = stream.snapshots_due.first()
            && self.memory.has_for_snapshot(sequence, due.rows)
        {
            stream.snapshots_due.remove(0);
            let full = MemoryFull::Snapshots(0);
            while !self.memory.snapshot(&*self.b, sequence, due.rows)
                && !due.is_extra
                && self.evict(full, None, &[])
            {}
        }
    }

    /// Lets the drafters see the rows that stay, and guess. Returns the longest drafts, and the time of each head.
    fn draft(
        &mut self,
        streams: &mut [&mut Stream],
        rows: &[StreamRows],
        verified: &Verified,
    ) -> Result<(Longest, HeadTimes), DeviceError> {
        for stream in streams.iter_mut() {
            stream.draft.clear();
            stream.draft_probs.clear();
            stream.confidences.clear();
            stream.cut_off = None;
            stream.n_asked = 0;
        }
        let guessed = self.guess(streams, rows, verified)?;
        for (stream, rows) in streams.iter_mut().zip(rows) {
            let speculates = stream.options.draft.max() > 0 && stream.finish.is_none();
            if rows.chooses && speculates {
                let room = stream.draft_room(self.memory.size().context);
                let rejects = stream.rejects();
                stream.fit_draft(room, rejects);
            }
        }
        Ok(guessed)
    }

    /// Books what the round has cost and brought, and adds new tokens to the prefix index.
    fn record(&mut self, streams: &mut [&mut Stream], rows: &[StreamRows], cost: &RoundCost) {
        for (stream, rows) in streams.iter_mut().zip(rows) {
            let emitted = rows.emitted(stream).iter();
            self.index
                .extend(stream.entry, emitted.map(|&token| RowKey::Token(token)));
            let n_emitted = rows.emitted(stream).len() as u64;
            let is_round = rows.chooses && !rows.are_prompt(stream);
            stream.stats.rounds += u64::from(is_round);
            let is_prefill = rows.is_prefill(stream);
            stream
                .stats
                .book(is_prefill, n_emitted, cost.verify, cost.draft);
        }
        let mut pairs = streams.iter().zip(rows);
        if pairs.any(|(stream, rows)| rows.is_prefill(stream)) {
            return;
        }
        // What runs for the first time takes longer than it will.
        if !self.ran_first {
            self.lengths.took(cost);
        }
        for (stream, rows) in streams.iter_mut().zip(rows) {
            let n_emitted = rows.emitted(stream).len();
            self.lengths.book(&mut stream.ledger, cost, n_emitted);
        }
    }
}
