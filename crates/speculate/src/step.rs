//! What a step did for every stream in it, for those who keep records of a whole engine.
//!
//! Numbers only, never a token. What is written and how long drafts are does not depend on whether
//! steps are watched.

use crate::length::{DraftInput, Expectation, HeadTimes, Longest, RoundCost};
use crate::round::StreamRows;
use crate::speculator::Speculator;
use crate::stream::Stream;
use std::time::Duration;

/// What one step did.
#[derive(Clone, Debug, PartialEq)]
pub struct StepRecord {
    /// Rows that the target ran.
    pub rows: usize,
    /// Experts that they touched, each counted in every mixture; absent of models without mixtures, and on devices that
    /// do not tell.
    pub experts: Option<usize>,
    /// The longest drafts after the rows, which the next step verifies.
    pub drafts: Longest,
    /// Time of the target, choosing included.
    pub verify: Duration,
    /// Time of drafting.
    pub draft: Duration,
    /// Time of each head therein.
    pub by_head: HeadTimes,
    /// What the step was expected to bring and to take; no times and experts where a stream ran rows of its
    /// prompt, since such steps are not comparable.
    pub expected: Expectation,
    /// What it did for each stream, in the order of the streams.
    pub streams: Vec<StreamStep>,
}

/// What one step did for one stream.
#[derive(Clone, Debug, PartialEq)]
pub struct StreamStep {
    /// Whether the stream ran rows of its prompt, or rows again after a preemption.
    pub is_prefill: bool,
    /// The number of the round, from 1; 0 for the prompt's last step, which chooses the first token;
    /// absent if the step chose nothing for the stream.
    pub round: Option<u64>,
    /// Rows of known tokens.
    pub known: usize,
    /// Tokens of prompt and text before the step.
    pub context: usize,
    /// Tokens that the stream could still write before the step.
    pub left: usize,
    /// Tokens that were asked for, of which the draft was made.
    pub asked: usize,
    /// The longest draft that could have been made, where no head guesses and less could be copied than the
    /// stream has room for and wishes.
    pub found: Option<usize>,
    /// Tokens of the draft.
    pub drafted: usize,
    /// Tokens of the draft that a constraint left no choice about.
    pub forced: usize,
    /// Forced tokens that were accepted.
    pub forced_accepted: usize,
    /// Tokens of the draft that were guessed, before the first forced one.
    pub guessed: usize,
    /// Tokens of the draft that were accepted, those behind the end of the text among them.
    pub accepted: usize,
    /// Tokens that the step has appended to the text.
    pub emitted: usize,
    /// Who guessed the draft's tokens; absent if there is none that a constraint has not forced.
    pub drafter: Option<&'static str>,
    /// Whether there was room for a draft after the step, and none was asked for: the stream wanted
    /// none, or none would have paid.
    pub is_held_back: bool,
    /// Milliseconds that the step has saved against plain decoding, by what such steps usually take
    /// ([`Ledger::saved_ms`](crate::length::Ledger::saved_ms)); absent where that is not known.
    pub saved_ms: Option<f64>,
}

/// Whether steps are watched, and what the last one did.
#[derive(Default)]
pub(crate) struct Watch {
    is_on: bool,
    last: Option<StepRecord>,
}

/// What is known of a step before it runs.
pub(crate) struct Before {
    expected: Expectation,
    streams: Vec<BeforeStream>,
}

/// What is known of a stream before the step: what it has come to, and what the step will say.
struct BeforeStream {
    accepted: u64,
    forced_accepted: u64,
    held_back: u64,
    booked_ms: f64,
    saved_ms: f64,
    step: StreamStep,
}

impl Stream {
    /// Milliseconds that speculation has saved the stream, as far as that is known
    /// ([`Ledger::saved_ms`](crate::length::Ledger::saved_ms)).
    pub fn ms_saved(&self) -> f64 {
        self.ledger.saved_ms()
    }
}

impl Speculator {
    /// Notes from now on what each round does, for [`Speculator::take_step`].
    pub fn watch_steps(&mut self) {
        self.watch.is_on = true;
    }

    /// What the last round did, once; nothing unless [`Speculator::watch_steps`] was called.
    pub fn take_step(&mut self) -> Option<StepRecord> {
        self.watch.last.take()
    }

    /// What is known of a step of `rows` before it runs, if steps are watched.
    pub(crate) fn before_step(
        &self,
        streams: &[&mut Stream],
        rows: &[StreamRows],
    ) -> Option<Before> {
        if !self.watch.is_on {
            return None;
        }
        let most = self.memory.size().context;
        let (n_heads, names) = (self.n_heads(), self.drafters());
        let drafts = streams.iter().zip(rows).map(|(stream, rows)| DraftInput {
            input: stream.length_input(rows.chooses, most, n_heads),
            guesser: stream.guesser,
            drafted: rows.n_drafted,
            guessed: stream.n_guessed,
            confidences: &stream.confidences,
        });
        let context = streams.iter().map(|s| s.tokens.len()).max().unwrap_or(0);
        let drafts: Vec<DraftInput<'_>> = drafts.collect();
        let mut expected = self.lengths.expect(&drafts, context);
        let mut pairs = streams.iter().zip(rows);
        if pairs.any(|(stream, rows)| rows.is_prefill(stream)) {
            (expected.ms, expected.plain_ms) = (None, None);
            expected.experts = None;
        }
        let pairs = streams.iter().zip(rows);
        let before = pairs.map(|(stream, rows)| {
            let forced = stream.n_forced(rows.n_drafted);
            BeforeStream {
                accepted: stream.stats.accepted(),
                forced_accepted: stream.stats.forced_accepted,
                held_back: stream.stats.held_back,
                booked_ms: stream.ledger.booked_ms(),
                saved_ms: stream.ledger.saved_ms(),
                step: StreamStep {
                    is_prefill: rows.is_prefill(stream),
                    round: None,
                    known: rows.of_text().len(),
                    context: stream.tokens.len(),
                    left: stream.left(most),
                    asked: stream.n_asked,
                    found: self.copy_found(stream),
                    drafted: rows.n_drafted,
                    forced,
                    forced_accepted: 0,
                    guessed: stream.n_guessed.min(rows.n_drafted),
                    accepted: 0,
                    emitted: 0,
                    drafter: match rows.n_drafted > forced {
                        true => stream.guesser.name(&names),
                        false => None,
                    },
                    is_held_back: false,
                    saved_ms: None,
                },
            }
        });
        Some(Before {
            streams: before.collect(),
            expected,
        })
    }

    /// The longest draft that could have been made for `stream`, if there was less to copy than it had
    /// room for, and no head to guess.
    fn copy_found(&self, stream: &Stream) -> Option<usize> {
        let room = stream.draft_room(self.memory.size().context);
        let most = room.min(stream.options.draft.max());
        let copied = stream.ngrams.copy().map_or(0, |(_, copy)| copy.len());
        let has_head = stream.guessers.among(self.n_heads()).n_heads() > 0;
        let is_less = !has_head && copied < most;
        is_less.then_some(copied)
    }

    /// Notes what the step did that is known to have been so `before`: what it cost, and the `experts` that it touched.
    pub(crate) fn note_step(
        &mut self,
        before: Option<Before>,
        streams: &[&mut Stream],
        rows: &[StreamRows],
        (cost, experts): (&RoundCost, Option<usize>),
    ) {
        let Some(Before {
            streams: of_streams,
            expected,
        }) = before
        else {
            return;
        };
        let done = |((before, stream), rows): ((BeforeStream, &&mut Stream), &StreamRows)| {
            let is_booked = stream.ledger.booked_ms() > before.booked_ms;
            StreamStep {
                round: rows.chooses.then_some(match rows.are_prompt(stream) {
                    true => 0,
                    false => stream.stats.rounds,
                }),
                accepted: (stream.stats.accepted() - before.accepted) as usize,
                forced_accepted: (stream.stats.forced_accepted - before.forced_accepted) as usize,
                emitted: stream.tokens.len() - before.step.context,
                is_held_back: stream.stats.held_back > before.held_back,
                saved_ms: is_booked.then(|| stream.ledger.saved_ms() - before.saved_ms),
                ..before.step
            }
        };
        let streams = of_streams.into_iter().zip(streams).zip(rows).map(done);
        self.watch.last = Some(StepRecord {
            rows: cost.rows,
            experts,
            drafts: cost.drafts,
            verify: cost.verify,
            draft: cost.draft,
            by_head: cost.by_head,
            expected,
            streams: streams.collect(),
        });
    }
}
