//! Continuous batching: one thread that takes every running request through the
//! same rounds.
//!
//! ```text
//! loop:  take submissions → admit → round → deliver
//! ```
//!
//! A request is admitted when a sequence is free, and leaves in the round it
//! ends in. Its keys and values stay for requests whose prompts begin like its text, until
//! others need the room. Requests that run share the pages of a
//! common beginning: one whose prompt begins like a prompt that is being read waits for it, and
//! those behind it in the queue are admitted before. Prompts run in chunks beside the
//! others' decoding ([`crate::pace`]). A cancelled request leaves before the next round; the
//! others do not notice.

use crate::constraint::{Following, ReasoningRules, ReplyConstraint};
use crate::delivery::{Running, Writing, progress};
use crate::disk::{Disk, Fetch};
use crate::engine::EngineOptions;
use crate::info::Model;
use crate::multimodal::{Looking, MediaCounts, MediaRowCounts, PlacedMedia, is_seen};
use crate::pace::Pace;
use crate::pages::PageSink;
use crate::queue::{Job, Queue};
use crate::request::{Event, FinishReason, Request};
use speculate::{
    Constraint, DraftLength, Finish, NO_TOKEN_REASON, Prompt, Sampling, Speculator, Stream,
    StreamOptions,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;
use text::{Channel, ReasoningMarks, ReplyStart, StopStrings, Text};

/// What the engine has done since it started.
#[derive(Debug, Default)]
pub struct Counters {
    /// Requests that run now.
    pub running: AtomicUsize,
    /// Requests that wait now.
    pub waiting: AtomicUsize,
    /// Requests that have ended by themselves.
    pub finished: AtomicU64,
    /// Requests that were cancelled.
    pub cancelled: AtomicU64,
    /// Requests that failed.
    pub failed: AtomicU64,
    /// Prompt tokens.
    pub prompt_tokens: AtomicU64,
    /// Prompt tokens that were looked for in the prefix cache.
    pub cache_queries: AtomicU64,
    /// Prompt tokens that were found in the prefix cache.
    pub cached_tokens: AtomicU64,
    /// Tokens written.
    pub completion_tokens: AtomicU64,
    /// Drafts verified.
    pub drafts: AtomicU64,
    /// Tokens drafted.
    pub drafted: AtomicU64,
    /// Draft tokens accepted.
    pub accepted: AtomicU64,
    /// Draft tokens accepted, by position.
    pub accepted_by_position: [AtomicU64; backend::MAX_TENTATIVE],
    /// Pages of keys and values in use by requests that run.
    pub pages_used: AtomicUsize,
    /// Pages of keys and values.
    pub pages: AtomicUsize,
    /// Texts in the prefix cache that have ended.
    pub kept_texts: AtomicUsize,
    /// Bytes of keys, values and states that only those texts have.
    pub kept_bytes: AtomicUsize,
    /// Texts that made room in the prefix cache, whole or in part.
    pub evicted_texts: AtomicU64,
    /// Snapshots that made room in the prefix cache while their texts stayed.
    pub evicted_snapshots: AtomicU64,
    /// Texts of the prefix cache on disk that can be read.
    pub disk_files: AtomicUsize,
    /// Bytes of their files.
    pub disk_bytes: AtomicUsize,
    /// Texts that were read from disk for a request.
    pub disk_hits: AtomicU64,
    /// Bytes of keys, values and states that were read from disk.
    pub disk_read_bytes: AtomicU64,
    /// Bytes of files that were written.
    pub disk_written_bytes: AtomicU64,
    /// Files on disk that were damaged, or of another form.
    pub disk_discarded_files: AtomicU64,
    /// Pictures and parts of clips, by how their embeddings were found.
    pub media: MediaCounts,
}

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
    inbox: Receiver<Job>,
    waiting: Queue,
    running: Vec<Running>,
    reuse: bool,
    page_sink: Option<PageSink>,
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
        inbox: Receiver<Job>,
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
        Scheduler {
            speculator: model.speculator,
            text: model.text,
            looking: model.vision.map(Looking::new),
            chunk: model.chunk,
            pace: Pace::default(),
            draft_max: info.draft_max,
            no_draft: info.drafter.is_none().then_some(info.drafter_reason),
            inbox,
            waiting: Queue::default(),
            running: Vec::new(),
            reuse,
            page_sink: options.page_sink,
            disk,
            counters,
        }
    }

    /// Runs until the engine is dropped.
    pub(crate) fn run(mut self) {
        self.count();
        while self.receive() {
            if let Some(disk) = &mut self.disk
                && self.running.is_empty()
            {
                disk.hurry(&mut self.speculator);
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
            let mut streams: Vec<&mut Stream> =
                self.running.iter_mut().map(|r| &mut r.stream).collect();
            let due = streams.iter();
            let due: Vec<usize> = due.map(|s| s.n_prompt() - s.n_prefilled()).collect();
            let chunk = self.pace.chunk(&due, self.chunk);
            let start = Instant::now();
            let round = self.speculator.round(&mut streams, chunk);
            let rows = due.iter().map(|&rows| rows.min(chunk)).sum();
            let took = start.elapsed();
            self.pace.note(rows, took);
            match round {
                Ok(()) => self.deliver(),
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
        if let Some(disk) = &mut self.disk {
            disk.finish(&mut self.speculator);
        }
    }

    /// Takes what was submitted; waits if there is nothing else to do. False once
    /// the engine is being dropped.
    fn receive(&mut self) -> bool {
        let speculator = &self.speculator;
        let is_busy = self.disk.as_ref().is_some_and(|d| d.is_busy(speculator));
        if self.running.is_empty() && self.waiting.is_empty() && !is_busy {
            match self.inbox.recv() {
                Ok(job) => self.waiting.push(job),
                Err(_) => return false,
            }
        }
        loop {
            match self.inbox.try_recv() {
                Ok(job) => self.waiting.push(job),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    /// Has the tower look at one picture or part of a clip of the requests that could start next, so that those which
    /// run wait for no more than one.
    fn look(&mut self) {
        let Some(looking) = &mut self.looking else {
            return;
        };
        let sequences = self.speculator.memory().size().sequences;
        let free = sequences.saturating_sub(self.running.len());
        let running: Vec<u64> = self.running.iter().map(|running| running.client).collect();
        for index in self.waiting.order(&running).into_iter().take(free) {
            let job = self.waiting.get_mut(index);
            if job.cancel.is_cancelled() {
                continue;
            }
            match looking.see(&mut job.request, &self.counters.media) {
                Ok(false) => {}
                Ok(true) => return,
                Err(error) => {
                    tracing::error!(error, "a picture or a clip was not encoded");
                    let mut job = self.waiting.take(index);
                    self.counters.waiting.fetch_sub(1, Ordering::AcqRel);
                    self.counters.failed.fetch_add(1, Ordering::Relaxed);
                    (job.sink)(Event::Failed(error));
                    return;
                }
            }
        }
    }

    /// Starts waiting requests while there is room.
    fn admit(&mut self) {
        let sequences = self.speculator.memory().size().sequences;
        self.waiting.retain(|job| {
            let keep = !job.cancel.is_cancelled();
            if !keep {
                self.counters.waiting.fetch_sub(1, Ordering::AcqRel);
                self.counters.cancelled.fetch_add(1, Ordering::Relaxed);
            }
            keep
        });
        while self.running.len() < sequences {
            let Some(mut job) = self.next() else {
                break;
            };
            let client = job.request.client;
            self.counters.waiting.fetch_sub(1, Ordering::AcqRel);
            let request = job.request;
            let writing = Writing::new(&self.text, &request);
            let constraint = self.constraint(&request);
            let prompt = self.prompt(&request);
            let options = self.options(&request);
            let media_tokens = MediaRowCounts::of(&request.media);
            let stops = StopStrings::new(&request.stop);
            let speculates = options.draft.max() > 0;
            let accept = self.speculator.accept().with(&options.sampling);
            let running: Vec<&Stream> = self.running.iter().map(|r| &r.stream).collect();
            let stream = match self.reuses(&request) {
                true => self.speculator.start(prompt, options, &running),
                false => self.speculator.start_afresh(prompt, options, &running),
            };
            match (stream, stops) {
                (Ok(mut stream), Ok(stops)) => {
                    if let Some(constraint) = constraint {
                        stream.constrain(Box::new(constraint));
                    }
                    if request.trace {
                        stream.trace();
                    }
                    if let Some(embedding) = request.embedding {
                        stream.pool(embedding.pooling);
                    }
                    self.counters.running.fetch_add(1, Ordering::AcqRel);
                    (job.sink)(progress(&stream));
                    self.running.push(Running {
                        stream,
                        sink: job.sink,
                        cancel: job.cancel,
                        writing,
                        stops,
                        stop_strings: request.stop,
                        delivered: 0,
                        queued_ms: job.submitted.elapsed().as_secs_f64() * 1e3,
                        speculates,
                        accept,
                        first_token: None,
                        client,
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
        // A request for no tokens at all has ended before its first round.
        self.leave(|running| running.stream.finish().map(|_| FinishReason::Length));
    }

    /// The next request to start; `None` if none waits that should start now.
    fn next(&mut self) -> Option<Job> {
        let running: Vec<u64> = self.running.iter().map(|running| running.client).collect();
        let mut order = self.waiting.order(&running).into_iter();
        let index = order.find(|&index| {
            let request = &self.waiting.get(index).request;
            is_seen(request)
                && !(self.reuses(request) && (self.should_wait(request) || self.fetches(index)))
        })?;
        Some(self.waiting.take(index))
    }

    /// Whether the request at `index` waits for rows that are read from disk. That is begun for it
    /// once.
    fn fetches(&mut self, index: usize) -> bool {
        if self.disk.is_none() {
            return false;
        }
        let job = self.waiting.get(index);
        if let Some(is_over) = &job.fetch {
            return !is_over.load(Ordering::Acquire);
        }
        let (prompt, drafts) = (self.prompt(&job.request), drafts(&job.request));
        let running: Vec<&Stream> = self.running.iter().map(|r| &r.stream).collect();
        let Some(disk) = &mut self.disk else {
            return false;
        };
        let fetch = disk.fetch(&mut self.speculator, &prompt, &running, drafts);
        let job = self.waiting.get_mut(index);
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

    fn drop_cancelled(&mut self) {
        self.leave(|running| {
            running
                .cancel
                .is_cancelled()
                .then_some(FinishReason::Cancelled)
        });
    }

    /// Sends what the round has brought.
    fn deliver(&mut self) {
        let text = self.text.clone();
        self.leave(|running| running.deliver(&text));
    }

    /// Ends one request that has failed. What it remembers is not used again.
    fn fail_one(&mut self, mut running: Running) {
        let failure = running.stream.failure().map(ToString::to_string);
        let error = failure.unwrap_or_else(|| NO_TOKEN_REASON.to_owned());
        tracing::error!(error, "request failed");
        self.counters.running.fetch_sub(1, Ordering::AcqRel);
        self.counters.failed.fetch_add(1, Ordering::Relaxed);
        self.speculator.close(running.stream);
        (running.sink)(Event::Failed(error));
    }

    /// Ends every running request for which `end` has a reason.
    fn leave(&mut self, mut end: impl FnMut(&mut Running) -> Option<FinishReason>) {
        let mut i = 0;
        while i < self.running.len() {
            match end(&mut self.running[i]) {
                Some(reason) => {
                    let running = self.running.remove(i);
                    match (running.stream.finish(), &reason) {
                        (Some(Finish::NoToken | Finish::Constraint), FinishReason::Length) => {
                            self.fail_one(running);
                        }
                        _ => self.end(running, reason),
                    }
                }
                None => i += 1,
            }
        }
    }

    fn end(&mut self, mut running: Running, finish: FinishReason) {
        self.counters.running.fetch_sub(1, Ordering::AcqRel);
        let ended = if finish == FinishReason::Cancelled {
            &self.counters.cancelled
        } else {
            &self.counters.finished
        };
        ended.fetch_add(1, Ordering::Relaxed);
        let mut outcome =
            running.outcome(finish, self.speculator.drafter(), self.no_draft.as_deref());
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
        let speculation = &outcome.speculation;
        self.counters.drafts.fetch_add(
            speculation.by_position.first().map_or(0, |p| p.drafted),
            Ordering::Relaxed,
        );
        self.counters
            .drafted
            .fetch_add(speculation.drafted, Ordering::Relaxed);
        self.counters
            .accepted
            .fetch_add(speculation.accepted, Ordering::Relaxed);
        for (counter, position) in self
            .counters
            .accepted_by_position
            .iter()
            .zip(&speculation.by_position)
        {
            counter.fetch_add(position.accepted, Ordering::Relaxed);
        }
        if self.reuse && running.embedding.is_none_or(|of| of.may_reuse()) {
            self.counters
                .cache_queries
                .fetch_add(outcome.usage.prompt_tokens as u64, Ordering::Relaxed);
        }
        let is_fault = matches!(
            running.stream.finish(),
            Some(Finish::NoToken | Finish::Constraint)
        );
        // Many documents would push out the conversations that somebody goes on with.
        if self.reuse && !is_fault && running.embedding.is_none() {
            self.speculator.park(running.stream);
        } else {
            self.speculator.close(running.stream);
        }
        (running.sink)(Event::Done(Box::new(outcome)));
    }

    /// Ends everything after a failed round.
    fn fail(&mut self, error: &str) {
        tracing::error!(error, requests = self.running.len(), "round failed");
        for mut running in std::mem::take(&mut self.running) {
            self.counters.running.fetch_sub(1, Ordering::AcqRel);
            self.counters.failed.fetch_add(1, Ordering::Relaxed);
            self.speculator.close(running.stream);
            (running.sink)(Event::Failed(error.to_owned()));
        }
        self.speculator.discard_all();
    }

    /// Tells which pages of the prefix cache came and went.
    fn tell_pages(&mut self) {
        let Some(PageSink(sink)) = &self.page_sink else {
            return;
        };
        let changes = self.speculator.take_page_changes();
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

/// Whether there may be drafts for `request`.
fn drafts(request: &Request) -> bool {
    request.embedding.is_none() && request.draft.is_none_or(|draft| draft.max() > 0)
}
