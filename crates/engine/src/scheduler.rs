//! Continuous batching: one thread that takes every running request through the
//! same rounds.
//!
//! ```text
//! loop:  take submissions → admit → make room → round, delivery beside its drafting → leave
//! ```
//!
//! A request is admitted when a sequence is free and there are pages for it ([`admission`]), and leaves in
//! the round it ends in, or is preempted and goes on later ([`preemption`]). Its keys and values stay for requests whose prompts begin like its text, until
//! others need the room. Requests that run share the pages of a
//! common beginning: one whose prompt begins like a prompt that is being read waits for it, and
//! those behind it in the queue are admitted before. Prompts run in chunks beside the
//! others' decoding ([`crate::pace`]). A cancelled request leaves before the next round; the
//! others do not notice.

mod admission;
mod preemption;

use crate::counters::Counters;
use crate::delivery::{Beside, End, Running, Slot};
use crate::disk::Disk;
use crate::engine::EngineOptions;
use crate::info::Model;
use crate::multimodal::Looking;
use crate::pace::Pace;
use crate::pages::PageSink;
use crate::queue::{Job, Queue};
use crate::request::{Event, FinishReason};
use crate::steps::{DeliveryTimes, StepReport, StepSink};
use speculate::{Finish, NO_TOKEN_REASON, Speculator, Stream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;
use text::Text;

/// The engine's thread: every request that waits or runs, and what they write with.
pub(crate) struct Scheduler {
    speculator: Speculator,
    text: Arc<Text>,
    /// What looks at media, if the model takes any.
    looking: Option<Looking>,
    chunk: usize,
    pace: Pace,
    draft_max: usize,
    no_draft: Option<String>,
    inbox: Receiver<Vec<Job>>,
    waiting: Queue,
    running: Vec<Running>,
    /// What delivers beside drafting; without it, delivery waits for drafts.
    beside: Option<Beside>,
    reuse: bool,
    page_sink: Option<PageSink>,
    step_sink: Option<StepSink>,
    /// Where ended texts outlive the engine.
    disk: Option<Disk>,
    counters: Arc<Counters>,
}

impl Scheduler {
    /// A scheduler that takes requests from `inbox`; if so in `options`, they use the keys and values of
    /// others whose text begins like their prompt, and somebody is told which pages these have.
    pub(crate) fn new(
        mut model: Model,
        options: EngineOptions,
        inbox: Receiver<Vec<Job>>,
        counters: Arc<Counters>,
    ) -> Self {
        let info = model.info;
        let reuse = options.reuse;
        let folder = options.disk.filter(|_| reuse);
        let disk = folder.zip(model.identity).map(|(folder, identity)| {
            Disk::open(folder, identity, &model.speculator, counters.clone())
        });
        if options.page_sink.is_some() {
            model.speculator.watch_pages();
        }
        if options.step_sink.is_some() {
            model.speculator.watch_steps();
        }
        let beside = (options.overlap && model.speculator.has_head())
            .then(|| Beside::start(model.text.clone()));
        Scheduler {
            speculator: model.speculator,
            text: model.text,
            looking: (model.senses.is_some())
                .then(|| Looking::new(model.senses, options.tower_share)),
            chunk: model.chunk,
            pace: Pace::default(),
            draft_max: info.draft_max,
            no_draft: info.drafter.is_none().then_some(info.drafter_reason),
            inbox,
            waiting: Queue::default(),
            running: Vec::new(),
            beside,
            reuse,
            page_sink: options.page_sink,
            step_sink: options.step_sink,
            disk,
            counters,
        }
    }

    /// Runs until the engine ends; gives back what it wrote with.
    pub(crate) fn run(mut self) -> Speculator {
        self.count();
        while self.receive() {
            if let Some(disk) = &mut self.disk
                && self.running.is_empty()
            {
                disk.hurry(&mut self.speculator);
            }
            if self.running.is_empty() {
                // Texts do not wait for a tower that has all the time.
                self.admit();
            }
            self.look();
            self.admit();
            self.drop_cancelled();
            if self.running.is_empty() {
                if let Some(disk) = &mut self.disk {
                    disk.idle(&mut self.speculator);
                    self.count();
                }
                self.tell_pages();
                continue;
            }
            let chunk = self.pace.chunk(&self.due(), self.chunk);
            self.make_room(chunk);
            let due = self.due();
            let parts = self.running.iter_mut().map(Running::parts);
            let (mut streams, mut slots): (Vec<&mut Stream>, Vec<Slot<'_>>) = parts.unzip();
            let beside = &mut self.beside;
            let start = Instant::now();
            let round = self
                .speculator
                .round_telling(&mut streams, chunk, &mut |streams| {
                    if let Some(beside) = beside {
                        beside.begin(streams, &mut slots);
                    }
                });
            let rows = due.iter().map(|&rows| rows.min(chunk)).sum();
            let took = start.elapsed();
            self.pace.note(rows, took);
            if let Some(looking) = &mut self.looking {
                looking.round(took, due.len());
            }
            let delivered = self.beside.as_mut().and_then(|b| b.end(&mut self.running));
            match round {
                Ok(()) => {
                    self.tell_step(delivered.as_ref().map(|(_, times)| *times));
                    self.deliver(delivered.map(|(ends, _)| ends));
                }
                Err(error) => self.fail(&error.to_string()),
            }
            if let Some(disk) = &mut self.disk {
                disk.beside(&mut self.speculator, took);
            }
            self.count();
            self.tell_pages();
        }
        for running in std::mem::take(&mut self.running) {
            self.end(running, FinishReason::Cancelled);
        }
        for waiting in self.waiting.take_all() {
            self.drop_waiting(waiting);
        }
        if let Some(disk) = &mut self.disk {
            disk.finish(&mut self.speculator);
        }
        self.speculator
    }

    /// Known rows of each request that have to run before its next token.
    fn due(&self) -> Vec<usize> {
        let running = self.running.iter();
        running.map(|running| running.stream.n_due()).collect()
    }

    /// Takes what was submitted; waits if there is nothing else to do. False once
    /// the engine is being dropped.
    fn receive(&mut self) -> bool {
        let speculator = &self.speculator;
        let is_busy = self.disk.as_ref().is_some_and(|d| d.is_busy(speculator));
        if self.running.is_empty() && self.waiting.is_empty() && !is_busy {
            match self.inbox.recv() {
                Ok(jobs) => self.take(jobs),
                Err(_) => return false,
            }
        }
        loop {
            match self.inbox.try_recv() {
                Ok(jobs) => self.take(jobs),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    /// Has what was submitted wait for its turn.
    fn take(&mut self, jobs: Vec<Job>) {
        jobs.into_iter().for_each(|job| self.waiting.push(job));
    }

    fn drop_cancelled(&mut self) {
        self.leave(|running| {
            let is_cancelled = running.cancel.is_cancelled();
            is_cancelled.then_some(End::Text(FinishReason::Cancelled))
        });
    }

    /// Sends what the round has brought, unless that was done beside its drafting and has found
    /// these `ends`. Ends the requests that have one.
    fn deliver(&mut self, ends: Option<Vec<Option<End>>>) {
        let Some(ends) = ends else {
            let text = self.text.clone();
            return self.leave(|running| running.deliver(&text));
        };
        let mut ends = ends.into_iter();
        self.leave(|_| ends.next().flatten());
    }

    /// Ends one request that has failed. What it remembers is not used again.
    fn fail_one(&mut self, mut running: Running) {
        let failure = running.stream.failure().map(ToString::to_string);
        let error = failure.unwrap_or_else(|| NO_TOKEN_REASON.to_owned());
        tracing::error!(error, "request failed");
        self.counters.running.fetch_sub(1, Ordering::AcqRel);
        self.counters.failed.fetch_add(1, Ordering::Relaxed);
        let mut reply = running.take_reply();
        self.speculator.close(running.stream);
        reply.tell(Event::Failed(error));
    }

    /// Ends every running request for which `end` says how.
    fn leave(&mut self, mut end: impl FnMut(&mut Running) -> Option<End>) {
        let mut i = 0;
        while i < self.running.len() {
            match end(&mut self.running[i]) {
                Some(end) => {
                    let running = self.running.remove(i);
                    match end {
                        End::Text(reason) => self.end(running, reason),
                        End::Fault => self.fail_one(running),
                    }
                }
                None => i += 1,
            }
        }
    }

    /// Ends a request that runs, or that was preempted.
    fn end(&mut self, mut running: Running, finish: FinishReason) {
        let is_preempted = running.stream.is_preempted();
        match is_preempted {
            true => self.counters.waiting.fetch_sub(1, Ordering::AcqRel),
            false => self.counters.running.fetch_sub(1, Ordering::AcqRel),
        };
        let ended = if finish == FinishReason::Cancelled {
            &self.counters.cancelled
        } else {
            &self.counters.finished
        };
        ended.fetch_add(1, Ordering::Relaxed);
        let mut outcome = running.outcome(
            finish,
            &self.speculator.drafters(),
            self.no_draft.as_deref(),
        );
        if let Some(embedding) = running.embedding {
            let pooled = self.speculator.vectors(&running.stream);
            outcome.embedding = pooled.map(|vector| embedding.finish(vector)).collect();
        }
        self.counters
            .prompt_tokens
            .fetch_add(outcome.usage.prompt_tokens as u64, Ordering::Relaxed);
        self.counters
            .cached_tokens
            .fetch_add(outcome.usage.cached_tokens as u64, Ordering::Relaxed);
        self.counters
            .completion_tokens
            .fetch_add(outcome.usage.completion_tokens as u64, Ordering::Relaxed);
        self.counters.add_speculation(&outcome.speculation);
        if running.reuses {
            self.counters
                .cache_queries
                .fetch_add(outcome.usage.prompt_tokens as u64, Ordering::Relaxed);
        }
        let is_fault = matches!(
            running.stream.finish(),
            Some(Finish::NoToken | Finish::Constraint)
        );
        let mut reply = running.take_reply();
        // Many documents would push out the conversations that somebody goes on with.
        let keeps = self.reuse && !is_fault && !is_preempted;
        if keeps && running.embedding.is_none() {
            self.speculator.park(running.stream);
        } else {
            self.speculator.close(running.stream);
        }
        reply.tell(Event::Done(Box::new(outcome)));
    }

    /// Ends everything after a failed round.
    fn fail(&mut self, error: &str) {
        tracing::error!(error, requests = self.running.len(), "round failed");
        for mut running in std::mem::take(&mut self.running) {
            self.counters.running.fetch_sub(1, Ordering::AcqRel);
            self.counters.failed.fetch_add(1, Ordering::Relaxed);
            let mut reply = running.take_reply();
            self.speculator.close(running.stream);
            reply.tell(Event::Failed(error.to_owned()));
        }
        self.speculator.discard_all();
    }

    /// Tells what the round did, before any of its requests leaves.
    fn tell_step(&mut self, delivery: Option<DeliveryTimes>) {
        let Some(StepSink(sink)) = &self.step_sink else {
            return;
        };
        if let Some(step) = self.speculator.take_step() {
            let requests = self.running.iter().map(|running| running.number).collect();
            sink(StepReport {
                requests,
                step,
                delivery,
            });
        }
    }

    /// Tells which pages of the prefix cache came and went.
    fn tell_pages(&mut self) {
        let Some(PageSink(sink)) = &self.page_sink else {
            return;
        };
        let running: Vec<&Stream> = self.running.iter().map(|r| &r.stream).collect();
        let changes = self.speculator.take_page_changes(&running);
        if !changes.is_empty() {
            sink(changes);
        }
    }

    fn count(&self) {
        let (running, all) = self.speculator.pages_running();
        self.counters.pages_used.store(running, Ordering::Relaxed);
        self.counters.pages.store(all, Ordering::Relaxed);
        let (texts, bytes) = self.speculator.kept();
        self.counters.kept_texts.store(texts, Ordering::Relaxed);
        self.counters.kept_bytes.store(bytes, Ordering::Relaxed);
        let evictions = self.speculator.evictions();
        let of = &self.counters;
        of.evicted_texts.store(evictions.texts, Ordering::Relaxed);
        of.evicted_snapshots
            .store(evictions.snapshots, Ordering::Relaxed);
    }
}
