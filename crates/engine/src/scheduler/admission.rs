//! Admission: which requests that wait start or go on, and with what.
//!
//! ```text
//! pages of running requests, grown by a little, and of the new one  <=  pages that they can have
//! ```
//!
//! A request is admitted by what it needs soon, not by what it may come to need: how long its text gets,
//! nobody knows. Where that goes wrong, a request is preempted ([`super::preemption`]). The request whose
//! turn it is waits for room, and those behind it wait too, so that long prompts do not starve.

use super::Scheduler;
use crate::constraint::{Following, ReasoningRules, ReplyConstraint};
use crate::delivery::{End, Reply, Running, Writing};
use crate::disk::Fetch;
use crate::multimodal::{MediaRowCounts, PlacedMedia, is_seen};
use crate::queue::{Job, Rank, Waiting};
use crate::request::{Event, FinishReason, Request};
use speculate::{Constraint, DraftLength, Prompt, Sampling, Stream, StreamOptions};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use text::{Channel, ReasoningMarks, ReplyStart, StopStrings};

/// Rows that each request should be able to grow by before another one has to be preempted for it.
const GROWTH: usize = 64;

impl Scheduler {
    /// Has the tower go on with one picture or part of a clip of the requests that could start next, for its share of
    /// the time of rounds. What it has begun comes first.
    pub(super) fn look(&mut self) {
        self.forget_unwanted();
        let candidates = self.unseen();
        let Some(looking) = &mut self.looking else {
            return;
        };
        for index in candidates {
            let Waiting::New(job) = self.waiting.get_mut(index) else {
                continue;
            };
            let beside = (&job.cancel, self.running.len());
            match looking.see(&mut job.request, beside, &self.counters.media) {
                Ok(false) => {}
                Ok(true) => return,
                Err(error) => {
                    tracing::error!(error, "a picture, a clip or a sound was not encoded");
                    if let (_, Waiting::New(mut job)) = self.waiting.take(index) {
                        self.counters.waiting.fetch_sub(1, Ordering::AcqRel);
                        self.counters.failed.fetch_add(1, Ordering::Relaxed);
                        (job.sink)(Event::Failed(error));
                    }
                    return;
                }
            }
        }
    }

    /// The requests whose media the tower may look at, by index: the one that it is at work for, then those that
    /// could start next.
    fn unseen(&self) -> Vec<usize> {
        let Some(looking) = &self.looking else {
            return Vec::new();
        };
        let sequences = self.speculator.memory().size().sequences;
        let free = sequences.saturating_sub(self.running.len());
        let running: Vec<u64> = self.running.iter().map(|running| running.client).collect();
        let last = self.running.iter().map(|running| running.rank).max();
        // One that could take the place of another.
        let order = self.waiting.order(&running);
        let first = order.first().map(|&index| self.waiting.rank(index));
        let outranks = first
            .zip(last)
            .is_some_and(|(first, last)| first.priority < last.priority);
        let new = |index: &usize| match self.waiting.get(*index) {
            Waiting::New(job) if !job.cancel.is_cancelled() => Some(&job.request),
            _ => None,
        };
        let is_begun = |index: &usize| new(index).is_some_and(|r| looking.is_at_work_for(r));
        let begun = order.iter().copied().find(is_begun);
        let next = order.iter().take(free.max(usize::from(outranks)));
        let next = next.copied().filter(|index| new(index).is_some());
        begun.into_iter().chain(next).collect()
    }

    /// Drops what the tower has begun for requests that are not there any more.
    fn forget_unwanted(&mut self) {
        let Some(looking) = &mut self.looking else {
            return;
        };
        let is_wanted = self.waiting.iter().any(|waiting| match waiting {
            Waiting::New(job) => !job.cancel.is_cancelled() && looking.is_at_work_for(&job.request),
            Waiting::Preempted(_) => false,
        });
        if !is_wanted {
            looking.forget();
        }
    }

    /// Starts waiting requests, or has them go on, while there is room or somebody of lower rank makes
    /// some.
    pub(super) fn admit(&mut self) {
        let cancelled = self.waiting.take_cancelled();
        if !cancelled.is_empty() {
            cancelled.into_iter().for_each(|job| self.drop_waiting(job));
            self.forget_unwanted();
        }
        while let Some(index) = self.next() {
            if !self.has_room(index) && !self.preempt_for(index) {
                break;
            }
            let (rank, waiting) = self.waiting.take(index);
            self.counters.waiting.fetch_sub(1, Ordering::AcqRel);
            match waiting {
                Waiting::New(job) => self.start(rank, *job),
                Waiting::Preempted(running) => self.go_on(*running),
            }
        }
        // A request for no tokens at all has ended before its first round.
        self.leave(|running| {
            let has_ended = running.stream.finish().is_some();
            has_ended.then_some(End::Text(FinishReason::Length))
        });
    }

    /// Ends a request that waits and was cancelled.
    pub(super) fn drop_waiting(&mut self, waiting: Waiting) {
        match waiting {
            Waiting::New(_) => {
                self.counters.waiting.fetch_sub(1, Ordering::AcqRel);
                self.counters.cancelled.fetch_add(1, Ordering::Relaxed);
            }
            Waiting::Preempted(running) => self.end(*running, FinishReason::Cancelled),
        }
    }

    /// Starts a request.
    fn start(&mut self, rank: Rank, mut job: Job) {
        let request = job.request;
        let writing = Writing::new(&self.text, &request);
        let constraint = self.constraint(&request);
        let prompt = self.prompt(&request);
        let options = self.options(&request);
        let media_tokens = MediaRowCounts::of(&request.media);
        let stops = StopStrings::new(&request.stop);
        let speculates = options.draft.max() > 0;
        let reuses = self.reuses(&request);
        let running: Vec<&Stream> = self.running.iter().map(|r| &r.stream).collect();
        let stream = match reuses {
            true => self.speculator.start(prompt, options, &running),
            false => self.speculator.start_afresh(prompt, options, &running),
        };
        match (stream, stops) {
            (Ok(mut stream), Ok(stops)) => {
                if let Some(constraint) = constraint {
                    stream.constrain(Box::new(constraint));
                }
                stream.restrict_drafters(request.drafters);
                if request.drafters_take_turns {
                    stream.take_turns();
                }
                if let Some(accept) = request.accept {
                    stream.accept_by(accept);
                }
                if request.trace {
                    stream.trace();
                }
                if let Some(embedding) = request.embedding {
                    stream.pool(embedding.pooling);
                }
                self.counters.running.fetch_add(1, Ordering::AcqRel);
                let reply = Reply::begin(job.sink, writing, (stops, request.stop), &stream);
                self.running.push(Running {
                    stream,
                    reply: Some(reply),
                    cancel: job.cancel,
                    queued_ms: job.submitted.elapsed().as_secs_f64() * 1e3,
                    speculates,
                    number: request.number.unwrap_or(rank.arrival),
                    client: request.client,
                    rank,
                    reuses,
                    embedding: request.embedding,
                    media_tokens,
                });
            }
            (stream, stops) => {
                self.counters.failed.fetch_add(1, Ordering::Relaxed);
                let error = stream.as_ref().err().map(ToString::to_string);
                let error = error
                    .or_else(|| stops.err().map(|e| e.to_string()))
                    .unwrap_or_default();
                if let Ok(stream) = stream {
                    self.speculator.close(stream);
                }
                (job.sink)(Event::Failed(error));
            }
        }
    }

    /// The index of the next request to start; `None` if none waits that should start now.
    fn next(&mut self) -> Option<usize> {
        let running: Vec<u64> = self.running.iter().map(|running| running.client).collect();
        let mut order = self.waiting.order(&running).into_iter();
        order.find(|&index| {
            let Waiting::New(job) = self.waiting.get(index) else {
                return true;
            };
            let request = &job.request;
            is_seen(request)
                && !(self.reuses(request) && (self.should_wait(request) || self.fetches(index)))
        })
    }

    /// Whether the request at `index` has a place and pages beside those that run.
    pub(super) fn has_room(&self, index: usize) -> bool {
        let running: Vec<&Stream> = self.running.iter().map(|r| &r.stream).collect();
        self.has_room_beside(index, &running)
    }

    /// Whether the request at `index` would have a place and pages beside the streams `running`. Whoever
    /// is alone always has.
    pub(super) fn has_room_beside(&self, index: usize, running: &[&Stream]) -> bool {
        let size = self.speculator.memory().size();
        if running.is_empty() {
            return true;
        }
        if running.len() >= size.sequences {
            return false;
        }
        if size.running_pages.is_none() {
            return true;
        }
        let wanted = match self.waiting.get(index) {
            Waiting::New(job) => {
                let (rows, request) = (job.request.prompt.len(), &job.request);
                let most = request.max_tokens.unwrap_or(usize::MAX);
                let most = if request.embedding.is_some() { 0 } else { most };
                let most = rows.saturating_add(most).min(size.context);
                let shared = self.reuses(request).then(|| {
                    let prompt = self.prompt(request);
                    self.speculator.best_fork(running, &prompt, drafts(request))
                });
                (rows, most, shared.flatten().map_or(0, |(_, rows)| rows))
            }
            Waiting::Preempted(waiting) => {
                let stream = &waiting.stream;
                let shared = waiting
                    .reuses
                    .then(|| self.speculator.shared_of(stream, running));
                let most = stream.most_rows(size.context);
                (stream.tokens().len(), most, shared.unwrap_or(0))
            }
        };
        self.speculator.has_room(wanted, running, GROWTH)
    }

    /// Whether the request at `index` waits for rows that are read from disk. That is begun for it
    /// once.
    fn fetches(&mut self, index: usize) -> bool {
        let Waiting::New(job) = self.waiting.get(index) else {
            return false;
        };
        if self.disk.is_none() {
            return false;
        }
        if let Some(is_over) = &job.fetch {
            return !is_over.load(Ordering::Acquire);
        }
        let (prompt, drafts) = (self.prompt(&job.request), drafts(&job.request));
        let running: Vec<&Stream> = self.running.iter().map(|r| &r.stream).collect();
        let Some(disk) = &mut self.disk else {
            return false;
        };
        let fetch = disk.fetch(&mut self.speculator, &prompt, &running, drafts);
        let Waiting::New(job) = self.waiting.get_mut(index) else {
            return false;
        };
        match fetch {
            Fetch::Later => true,
            Fetch::Begun(is_over) => {
                job.fetch = Some(is_over);
                true
            }
            Fetch::Nothing => {
                job.fetch = Some(Arc::new(AtomicBool::new(true)));
                false
            }
        }
    }

    /// Whether `request` looks for its prompt in the prefix cache.
    fn reuses(&self, request: &Request) -> bool {
        let embedding = request.embedding;
        self.reuse && request.reuse && embedding.is_none_or(|embedding| embedding.may_reuse())
    }

    /// How long the drafts for `request` are.
    fn draft_length(&self, request: &Request) -> DraftLength {
        match request.embedding {
            Some(_) => DraftLength::UpTo(0),
            None => request.draft.unwrap_or(DraftLength::UpTo(self.draft_max)),
        }
    }

    /// Whether most of the prompt of `request` is being read for another one that runs.
    fn should_wait(&self, request: &Request) -> bool {
        let running: Vec<&Stream> = self.running.iter().map(|r| &r.stream).collect();
        if !running.iter().any(|stream| stream.is_reading()) {
            return false;
        }
        let prompt = self.prompt(request);
        self.speculator
            .should_wait(&running, &prompt, drafts(request))
    }

    /// The prompt of `request`. Its messages end with tokens that end a text.
    fn prompt(&self, request: &Request) -> Prompt {
        let ends = self.text.stop_tokens.ids();
        let tokens = (1..).zip(&request.prompt);
        let marks = tokens.filter(|(_, token)| ends.contains(token));
        let marks = marks.map(|(rows, _)| rows).collect();
        let spans = request.media.iter().map(PlacedMedia::span);
        let prompt = Prompt::with_media(request.prompt.clone(), spans.collect());
        prompt.with_marks(marks).in_namespace(request.namespace)
    }

    /// How the stream for `request` writes.
    fn options(&self, request: &Request) -> StreamOptions {
        let stop_tokens = self.stop_tokens(request);
        let end_tokens = match request.sampling.min_tokens {
            0 => Vec::new(),
            _ => stop_tokens.to_vec(),
        };
        StreamOptions {
            sampling: Sampling {
                end_tokens,
                ..request.sampling.clone()
            },
            max_tokens: request.max_tokens.unwrap_or(usize::MAX),
            stop_tokens,
            draft: self.draft_length(request),
            logprobs: request.logprobs,
        }
    }

    /// The tokens that end the reply to `request`.
    fn stop_tokens(&self, request: &Request) -> Arc<[u32]> {
        let own = match request.ignore_eos {
            true => &[],
            false => self.text.stop_tokens.ids(),
        };
        [own, &request.stop_token_ids].concat().into()
    }

    /// What limits the reply to `request`, if anything does.
    fn constraint(&self, request: &Request) -> Option<ReplyConstraint> {
        let may_reason = request.splits_reasoning || request.shows_reasoning_marks;
        let marks = self.text.reasoning.filter(|_| may_reason);
        let budget = request.reasoning_budget;
        let (tokenizer, prompt) = (&self.text.tokenizer, &request.prompt);
        let start = |marks: &ReasoningMarks| match request.continues {
            None => marks.start(tokenizer, prompt),
            Some(Channel::Reasoning) => ReplyStart::Reasoning,
            Some(Channel::Answer | Channel::ToolCall) => ReplyStart::Answer,
        };
        let rules = marks.map(|marks| ReasoningRules::new(marks, tokenizer, start(&marks), budget));
        let answer = request.grammar.as_ref();
        let answer = answer.map(|g| Box::new(Following(g.start())) as Box<dyn Constraint>);
        let stops = self.text.stop_tokens.ids().to_vec();
        ReplyConstraint::new(rules, answer, stops)
    }
}

/// Whether there may be drafts for `request`.
fn drafts(request: &Request) -> bool {
    request.embedding.is_none() && request.draft.is_none_or(|draft| draft.max() > 0)
}
