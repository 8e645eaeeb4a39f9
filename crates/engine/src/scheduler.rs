//! Continuous batching: one thread that takes every running request through the
//! same rounds.
//!
//! ```text
//! loop:  take submissions → admit → round → deliver
//! ```
//!
//! A request is admitted when a sequence is free, and leaves in the round it
//! ends in. What it remembers stays, until a request whose prompt begins like its text
//! goes on from there, or another one needs the room. Prompts run in chunks beside the
//! others' decoding ([`crate::pace`]). A cancelled request leaves before the next round; the
//! others do not notice.

use crate::load::{Model, ModelInfo};
use crate::pace::Pace;
use crate::request::{
    CancelToken, Event, FinishReason, JudgedToken, Rejected, Request, RequestOutcome, Sink,
    Speculation, Timings, Usage, check_ranges,
};
use speculate::{
    Accept, DraftLength, Finish, MAX_TOP_LOGPROBS, NO_TOKEN_REASON, Sampling, Speculator, Stream,
    StreamOptions,
};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;
use text::{
    Detokenizer, Reasoning, ReasoningMarks, Said, Specials, StopOutcome, StopStrings, Text,
};

/// How the engine runs.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// Requests that may wait for a free sequence.
    pub queue: usize,
    /// Whether a request goes on from what an ended one has left, if its prompt begins like
    /// that one's text. Its own text is the same.
    pub reuse: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            queue: 64,
            reuse: true,
        }
    }
}

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
    /// Those of them that were looked for in what ended requests had left.
    pub cache_queries: AtomicU64,
    /// Those of them that were found there.
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
}

struct Job {
    request: Request,
    sink: Sink,
    cancel: CancelToken,
    submitted: Instant,
}

/// A running engine. Dropping it cancels what runs and waits for the thread.
pub struct Engine {
    jobs: Mutex<Option<Sender<Job>>>,
    thread: Option<JoinHandle<()>>,
    counters: Arc<Counters>,
    text: Arc<Text>,
    info: ModelInfo,
    queue: usize,
}

impl Engine {
    /// Starts the engine's thread.
    ///
    /// # Panics
    ///
    /// If the system cannot start a thread.
    pub fn start(model: Model, options: EngineOptions) -> Engine {
        let (jobs, inbox) = channel();
        let counters = Arc::new(Counters::default());
        let (text, info) = (model.text.clone(), model.info.clone());
        let scheduler = Scheduler {
            speculator: model.speculator,
            text: text.clone(),
            chunk: model.chunk,
            pace: Pace::default(),
            draft_max: info.draft_max,
            no_draft: info.drafter.is_none().then(|| info.drafter_reason.clone()),
            inbox,
            waiting: VecDeque::new(),
            running: Vec::new(),
            reuse: options.reuse,
            counters: counters.clone(),
        };
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || scheduler.run());
        let thread = Some(thread.expect("the engine's thread starts"));
        Engine {
            jobs: Mutex::new(Some(jobs)),
            thread,
            counters,
            text,
            info,
            queue: options.queue,
        }
    }

    /// What is known of the model.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// Tokenizer, template, stop tokens.
    pub fn text(&self) -> &Arc<Text> {
        &self.text
    }

    /// What the engine has done.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Submits `request`; its events go to `sink`. The token cancels it.
    ///
    /// # Errors
    ///
    /// [`Rejected`], before any work; `sink` is not called then.
    pub fn submit(&self, mut request: Request, sink: Sink) -> Result<CancelToken, Rejected> {
        self.check(&request)?;
        // 0 keeps the likeliest token only; the sampler's own range excludes it.
        request.sampling.top_p = request.sampling.top_p.max(f32::MIN_POSITIVE);
        let waiting = self.counters.waiting.fetch_add(1, Ordering::AcqRel);
        if waiting >= self.most_waiting() {
            self.counters.waiting.fetch_sub(1, Ordering::AcqRel);
            return Err(Rejected::QueueFull { waiting });
        }
        let cancel = CancelToken::new();
        let job = Job {
            request,
            sink,
            cancel: cancel.clone(),
            submitted: Instant::now(),
        };
        let jobs = self
            .jobs
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let sent = jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        if !sent {
            self.counters.waiting.fetch_sub(1, Ordering::AcqRel);
            return Err(Rejected::Stopped);
        }
        Ok(cancel)
    }

    /// Requests that would be taken now: those that may run and wait beside those that do.
    pub fn places(&self) -> usize {
        let waiting = self.counters.waiting.load(Ordering::Acquire);
        self.most_waiting().saturating_sub(waiting)
    }

    /// Requests that may wait: for their turn, or for the thread to start them.
    fn most_waiting(&self) -> usize {
        let running = self.counters.running.load(Ordering::Acquire);
        let free = self.info.sequences.saturating_sub(running);
        self.queue.saturating_add(free)
    }

    /// Submits `request` and waits for its end: text, tokens and outcome.
    ///
    /// # Errors
    ///
    /// [`Rejected`]; [`Rejected::Failed`] if the request failed on the way, and
    /// [`Rejected::Stopped`] if the engine did.
    pub fn complete(
        &self,
        request: Request,
    ) -> Result<(String, Vec<u32>, RequestOutcome), Rejected> {
        let (events, inbox) = channel();
        self.submit(request, Box::new(move |event| events.send(event).is_ok()))?;
        let (mut whole, mut ids) = (String::new(), Vec::new());
        for event in inbox {
            match event {
                Event::Prefill { .. } => {}
                Event::Text { text, tokens, .. } => {
                    whole.push_str(&text);
                    ids.extend(tokens);
                }
                Event::Done(outcome) => return Ok((whole, ids, *outcome)),
                Event::Failed(reason) => return Err(Rejected::Failed(reason)),
            }
        }
        Err(Rejected::Stopped)
    }

    fn check(&self, request: &Request) -> Result<(), Rejected> {
        let ModelInfo {
            context,
            context_max,
            vocab_size,
            ..
        } = self.info;
        if request.prompt.is_empty() {
            return Err(Rejected::EmptyPrompt);
        }
        if request.prompt.len() >= context {
            return Err(Rejected::PromptTooLong {
                tokens: request.prompt.len(),
                context,
                context_max,
            });
        }
        if let Some(&token) = request.prompt.iter().find(|&&t| t as usize >= vocab_size) {
            return Err(Rejected::BadToken {
                token,
                vocab: vocab_size,
            });
        }
        let bad = |e: &dyn std::fmt::Display| Rejected::BadParameter(e.to_string());
        check_ranges(&request.sampling)?;
        let sampling = Sampling {
            top_p: request.sampling.top_p.max(f32::MIN_POSITIVE),
            ..request.sampling.clone()
        };
        sampling.validate(vocab_size).map_err(|e| bad(&e))?;
        StopStrings::new(&request.stop).map_err(|e| bad(&e))?;
        if request.draft.is_some_and(|n| n.max() > self.info.draft_max) {
            let limit = self.info.draft_max;
            return Err(Rejected::BadParameter(format!(
                "drafts of this engine have at most {limit} tokens"
            )));
        }
        if request.logprobs.is_some_and(|top| top > MAX_TOP_LOGPROBS) {
            return Err(Rejected::BadParameter(format!(
                "log-probabilities come with at most {MAX_TOP_LOGPROBS} of the likeliest tokens"
            )));
        }
        Ok(())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        *self
            .jobs
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner) = None;
        if let Some(thread) = self.thread.take() {
            // Its panic has been printed; there is nobody to tell here.
            let _ = thread.join();
        }
    }
}

/// One admitted request.
struct Running {
    stream: Stream,
    sink: Sink,
    cancel: CancelToken,
    detokenizer: Detokenizer,
    /// Tells reasoning apart, if that is asked for and the model may reason.
    reasoning: Option<Reasoning>,
    reasoning_tokens: usize,
    /// Marks of reasoning that are part of the text.
    shown_marks: Option<ReasoningMarks>,
    /// What the prompt has begun and the text shows.
    begun: String,
    stops: StopStrings,
    stop_strings: Vec<String>,
    /// Tokens of the stream's output that have been delivered.
    delivered: usize,
    queued_ms: f64,
    speculates: bool,
    accept: Accept,
    first_token: Option<Instant>,
}

/// What became of a token.
struct Taken {
    /// The characters that it completes.
    text: String,
    is_reasoning: bool,
    /// The stop string that they complete.
    hit: Option<usize>,
}

struct Scheduler {
    speculator: Speculator,
    text: Arc<Text>,
    chunk: usize,
    pace: Pace,
    draft_max: usize,
    no_draft: Option<String>,
    inbox: Receiver<Job>,
    waiting: VecDeque<Job>,
    running: Vec<Running>,
    reuse: bool,
    counters: Arc<Counters>,
}

impl Scheduler {
    fn run(mut self) {
        while self.receive() {
            self.admit();
            self.drop_cancelled();
            if self.running.is_empty() {
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
            self.pace.note(rows, start.elapsed());
            match round {
                Ok(()) => self.deliver(),
                Err(error) => self.fail(&error.to_string()),
            }
            self.count();
        }
        for running in std::mem::take(&mut self.running) {
            self.end(running, FinishReason::Cancelled);
        }
    }

    /// Takes what was submitted; waits if there is nothing else to do. False once
    /// the engine is being dropped.
    fn receive(&mut self) -> bool {
        if self.running.is_empty() && self.waiting.is_empty() {
            match self.inbox.recv() {
                Ok(job) => self.waiting.push_back(job),
                Err(_) => return false,
            }
        }
        loop {
            match self.inbox.try_recv() {
                Ok(job) => self.waiting.push_back(job),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
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
            let Some(mut job) = self.waiting.pop_front() else {
                break;
            };
            self.counters.waiting.fetch_sub(1, Ordering::AcqRel);
            let request = job.request;
            let stop_tokens: Arc<[u32]> = if request.ignore_eos {
                Arc::new([])
            } else {
                self.text.stop_tokens.ids().into()
            };
            let options = StreamOptions {
                sampling: request.sampling,
                max_tokens: request.max_tokens.unwrap_or(usize::MAX),
                stop_tokens,
                draft: request.draft.unwrap_or(DraftLength::UpTo(self.draft_max)),
                logprobs: request.logprobs,
            };
            let specials = if request.show_specials {
                Specials::Show
            } else {
                Specials::Skip
            };
            let stops = StopStrings::new(&request.stop);
            let marks = self.text.reasoning.filter(|_| request.splits_reasoning);
            let reasoning = marks.map(|m| Reasoning::new(m, &self.text.tokenizer, &request.prompt));
            let shown = request.shows_reasoning_marks && !request.splits_reasoning;
            let shown_marks = self.text.reasoning.filter(|_| shown);
            let begun = shown_marks.and_then(|m| m.begun(&self.text.tokenizer, &request.prompt));
            let speculates = options.draft.max() > 0;
            let accept = self.speculator.accept().with(&options.sampling);
            match (self.speculator.start(request.prompt, options), stops) {
                (Ok(stream), Ok(stops)) => {
                    self.counters.running.fetch_add(1, Ordering::AcqRel);
                    self.running.push(Running {
                        stream,
                        sink: job.sink,
                        cancel: job.cancel,
                        detokenizer: Detokenizer::new(specials),
                        reasoning,
                        reasoning_tokens: 0,
                        shown_marks,
                        begun: begun.unwrap_or_default(),
                        stops,
                        stop_strings: request.stop,
                        delivered: 0,
                        queued_ms: job.submitted.elapsed().as_secs_f64() * 1e3,
                        speculates,
                        accept,
                        first_token: None,
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
        tracing::error!(error = NO_TOKEN_REASON, "request failed");
        self.counters.running.fetch_sub(1, Ordering::AcqRel);
        self.counters.failed.fetch_add(1, Ordering::Relaxed);
        self.speculator.close(running.stream);
        (running.sink)(Event::Failed(NO_TOKEN_REASON.to_owned()));
    }

    /// Ends every running request for which `end` has a reason.
    fn leave(&mut self, mut end: impl FnMut(&mut Running) -> Option<FinishReason>) {
        let mut i = 0;
        while i < self.running.len() {
            match end(&mut self.running[i]) {
                Some(reason) => {
                    let running = self.running.remove(i);
                    match (running.stream.finish(), &reason) {
                        (Some(Finish::NoToken), FinishReason::Length) => self.fail_one(running),
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
        let outcome = running.outcome(finish, self.speculator.drafter(), self.no_draft.as_deref());
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
        if self.reuse {
            self.counters
                .cache_queries
                .fetch_add(outcome.usage.prompt_tokens as u64, Ordering::Relaxed);
            if running.stream.finish() != Some(Finish::NoToken) {
                self.speculator.park(running.stream);
            } else {
                self.speculator.close(running.stream);
            }
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

    fn count(&self) {
        let (running, all) = self.speculator.pages_running();
        self.counters.pages_used.store(running, Ordering::Relaxed);
        self.counters.pages.store(all, Ordering::Relaxed);
    }
}

impl Running {
    /// Sends the newest tokens; the reason to end, if there is one.
    fn deliver(&mut self, text: &Text) -> Option<FinishReason> {
        let (done, total) = (self.stream.n_prefilled(), self.stream.n_prompt());
        if self.stream.output().is_empty() && self.stream.finish().is_none() {
            let listening = (self.sink)(Event::Prefill { done, total });
            return (!listening).then_some(FinishReason::Cancelled);
        }
        self.first_token.get_or_insert_with(Instant::now);
        let finish = self.stream.finish();
        let end = self.n_written(finish);
        let mut said = Said {
            answer: std::mem::take(&mut self.begun),
            ..Said::default()
        };
        let (mut tokens, mut judged) = (Vec::new(), Vec::new());
        let mut logprobs = self.stream.take_logprobs().into_iter();
        let mut reason = None;
        for i in self.delivered..end {
            let token = self.stream.output()[i];
            tokens.push(token);
            let taken = self.take(text, token, &mut said);
            judged.extend(logprobs.next().map(|logprobs| JudgedToken {
                token,
                text: taken.text,
                is_reasoning: taken.is_reasoning,
                logprobs,
            }));
            if let Some(stop) = taken.hit {
                reason = Some(FinishReason::StopString(self.stop_strings[stop].clone()));
                break;
            }
        }
        self.delivered += tokens.len();
        if reason.is_none()
            && let Some(finish) = finish
        {
            let detokenizer =
                std::mem::replace(&mut self.detokenizer, Detokenizer::new(Specials::Skip));
            let outcome = self.stops.push(detokenizer.finish());
            self.say(&outcome.emit, &mut said);
            reason = Some(match (outcome.hit, finish) {
                (Some(stop), _) => FinishReason::StopString(self.stop_strings[stop].clone()),
                (None, Finish::Stop) => FinishReason::Stop,
                // One without a token fails, in `leave`.
                (None, Finish::Length | Finish::NoToken) => FinishReason::Length,
            });
            if outcome.hit.is_none() {
                let stops = std::mem::replace(
                    &mut self.stops,
                    StopStrings::new(&[]).expect("no stops are allowed"),
                );
                self.say(&stops.finish(), &mut said);
            }
        }
        let listening = (self.sink)(Event::Text {
            text: said.answer,
            reasoning: said.reasoning,
            tokens,
            judged,
        });
        if listening {
            reason
        } else {
            reason.or(Some(FinishReason::Cancelled))
        }
    }

    /// Takes one token's text.
    fn take(&mut self, text: &Text, token: u32, said: &mut Said) -> Taken {
        let mark = self.reasoning.as_ref().and_then(|r| r.mark(token));
        let was_open = self.reasoning.as_ref().is_some_and(Reasoning::is_open);
        let mut is_reasoning = was_open || mark.is_some();
        self.reasoning_tokens += usize::from(is_reasoning);
        let (piece, StopOutcome { emit, hit }) = match mark {
            None => {
                let shown = self.shown_marks.as_ref().and_then(|m| m.spelling(token));
                let piece = match shown {
                    Some(mark) => self.detokenizer.part().to_owned() + mark,
                    None => self.detokenizer.push(&text.tokenizer, token),
                };
                is_reasoning |= self.reasoning.as_ref().is_some_and(|r| r.skips(&piece));
                let outcome = self.stops.push(&piece);
                (piece, outcome)
            }
            Some(mark) => {
                let mut emit = self.stops.push(self.detokenizer.part()).emit;
                let passed = self.stops.pass(mark);
                emit += &passed.emit;
                (mark.to_owned(), StopOutcome { emit, ..passed })
            }
        };
        self.say(&emit, said);
        if let Some(reasoning) = self.reasoning.as_mut().filter(|_| mark.is_some()) {
            reasoning.turn(token);
        }
        Taken {
            text: piece,
            is_reasoning,
            hit,
        }
    }

    /// Sorts text into what it is.
    fn say(&mut self, text: &str, said: &mut Said) {
        match &mut self.reasoning {
            Some(reasoning) => reasoning.push(text, said),
            None => said.answer.push_str(text),
        }
    }

    /// Output tokens that count: all but the stop token.
    fn n_written(&self, finish: Option<Finish>) -> usize {
        self.stream.output().len() - usize::from(finish == Some(Finish::Stop))
    }

    fn outcome(
        &self,
        finish: FinishReason,
        drafter: Option<&str>,
        no_draft: Option<&str>,
    ) -> RequestOutcome {
        let stats = self.stream.stats();
        let reason = if self.speculates {
            no_draft.map_or_else(
                || {
                    if finish == FinishReason::Cancelled && self.delivered == 0 {
                        "it was cancelled before the first token".to_owned()
                    } else if self.stream.output().is_empty() {
                        "no token was asked for".to_owned()
                    } else if stats.rounds == 0 {
                        "the text ended before the first round".to_owned()
                    } else if stats.held_back == stats.rounds {
                        "drafting would not have paid".to_owned()
                    } else {
                        "the drafter found nothing to guess".to_owned()
                    }
                },
                str::to_owned,
            )
        } else {
            "speculation was turned off for the request".to_owned()
        };
        let usage = Usage {
            prompt_tokens: self.stream.n_prompt(),
            cached_tokens: self.stream.n_reused(),
            completion_tokens: self.delivered,
            reasoning_tokens: self.reasoning_tokens,
        };
        let decode_ms = self
            .first_token
            .map_or(0.0, |t| t.elapsed().as_secs_f64() * 1e3);
        let prefill_ms = stats.prefill.as_secs_f64() * 1e3;
        let rate = |tokens: usize, ms: f64| {
            if ms > 0.0 {
                tokens as f64 / ms * 1e3
            } else {
                0.0
            }
        };
        RequestOutcome {
            finish,
            usage,
            timings: Timings {
                queued_ms: self.queued_ms,
                prefill_ms,
                decode_ms,
                decode_tokens_per_second: rate(self.delivered.saturating_sub(1), decode_ms),
                prefill_tokens_per_second: rate(
                    usage.prompt_tokens - usage.cached_tokens,
                    prefill_ms,
                ),
            },
            speculation: Speculation::new(
                stats,
                drafter.filter(|_| self.speculates),
                self.accept,
                Some(reason),
            ),
        }
    }
}
