//! The engine as its users hold it: submits requests to the thread that runs them all.

use crate::counters::{Counters, GaugesOfThread};
use crate::disk::CacheFolder;
use crate::footprint::Planned;
use crate::grammars::Grammars;
use crate::info::{Model, ModelInfo};
use crate::multimodal::{Hearing, MediaKind, Senses, Vision, check_places};
use crate::pages::PageSink;
use crate::placement::Budget;
use crate::queue::Job;
use crate::request::{CancelToken, Event, Rejected, Request, RequestOutcome, Sink};
use crate::sampler::check_ranges;
use crate::scheduler::Scheduler;
use crate::steps::StepSink;
use constrain::{Grammar, Spec};
use speculate::sample::MAX_LISTED_TOKENS;
use speculate::{MAX_TOP_LOGPROBS, Sampling, Speculator};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;
use text::{Channel, StopStrings, Text};

/// How the engine runs.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Requests that may wait for a free sequence.
    pub queue: usize,
    /// Whether requests use the keys and values of others, ended or running, whose text begins
    /// like their prompt. What they write is the same.
    pub reuse: bool,
    /// Who is told which pages come into the prefix cache and leave it.
    pub page_sink: Option<PageSink>,
    /// Who is told what each step did.
    pub step_sink: Option<StepSink>,
    /// Where texts that have ended outlive the engine, of a model that was loaded with
    /// [`LoadOptions::identify`](crate::LoadOptions::identify).
    pub disk: Option<CacheFolder>,
    /// For how long a tower may look at pictures, clips and sounds between two rounds, in percent of a
    /// round's time, beside seven requests or more; beside fewer, `7 / requests` times as long, and beside
    /// none until it is done. Embeddings are the same.
    pub tower_share: u32,
    /// Whether what a round has brought is turned into text and sent while the next tokens are drafted, by
    /// a thread of its own. Texts are the same.
    pub overlap: bool,
    /// What the engine counts in; those of an engine that has ended go on.
    pub counters: Arc<Counters>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            queue: 64,
            reuse: true,
            page_sink: None,
            step_sink: None,
            disk: None,
            tower_share: 10,
            overlap: true,
            counters: Arc::default(),
        }
    }
}

/// A running engine. Dropping it cancels what runs and waits for the thread.
pub struct Engine {
    jobs: Mutex<Option<Sender<Vec<Job>>>>,
    thread: Mutex<Option<JoinHandle<Speculator>>>,
    /// What the engine's thread does not need of the model.
    rest: ModelRest,
    counters: Arc<Counters>,
    text: Arc<Text>,
    senses: Senses,
    info: ModelInfo,
    queue: usize,
    grammars: Grammars,
}

/// What makes a [`Model`] of an engine's parts.
struct ModelRest {
    chunk: usize,
    plans: Vec<Planned>,
    budget: Budget,
}

impl Engine {
    /// Starts the engine's thread.
    ///
    /// # Panics
    ///
    /// If the system cannot start a thread.
    pub fn start(model: Model, options: EngineOptions) -> Engine {
        let (jobs, inbox) = channel();
        let counters = options.counters.clone();
        let (text, info) = (model.text.clone(), model.info.clone());
        let senses = model.senses.clone();
        let queue = options.queue;
        let own = counters.clone();
        let rest = ModelRest {
            chunk: model.chunk,
            plans: model.plans.clone(),
            budget: model.budget,
        };
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || {
                let _gauges = GaugesOfThread(own.clone());
                Scheduler::new(model, options, inbox, own).run()
            });
        let thread = Mutex::new(Some(thread.expect("the engine's thread starts")));
        Engine {
            jobs: Mutex::new(Some(jobs)),
            thread,
            rest,
            counters,
            grammars: Grammars::new(text.clone(), info.vocab_size),
            text,
            senses,
            info,
            queue,
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

    /// What pictures and clips are brought into a prompt with; none if the model takes none, as
    /// [`ModelInfo::vision_reason`] explains.
    pub fn vision(&self) -> Option<&Arc<Vision>> {
        self.senses.vision.as_ref()
    }

    /// What sounds are brought into a prompt with; none if the model takes none, as
    /// [`ModelInfo::hearing_reason`] explains.
    pub fn hearing(&self) -> Option<&Arc<Hearing>> {
        self.senses.hearing.as_ref()
    }

    /// What pictures, clips and sounds are given their places in a prompt with.
    pub fn senses(&self) -> &Senses {
        &self.senses
    }

    /// What the engine has done.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// Compiles what a reply is to follow, for [`Request::grammar`]. Takes milliseconds, for
    /// large schemas up to the limits of [`constrain::Limits`], and the first time as long as it
    /// takes to prepare the vocabulary, about a second for 262,144 tokens: not for a thread
    /// that must not wait.
    ///
    /// # Errors
    ///
    /// [`constrain::Error`] says what of `spec` is wrong or too large.
    pub fn compile(&self, spec: &Spec) -> Result<Grammar, constrain::Error> {
        self.grammars.compile(spec)
    }

    /// Submits `request`; its events go to `sink`. The token cancels it.
    ///
    /// # Errors
    ///
    /// [`Rejected`], before any work; `sink` is not called then.
    pub fn submit(&self, request: Request, sink: Sink) -> Result<CancelToken, Rejected> {
        let mut cancels = self.submit_all(vec![(request, sink)])?;
        Ok(cancels.pop().expect("one for each request"))
    }

    /// Submits `requests` at once: those that there is room for start in the same step. Each has a token that
    /// cancels it.
    ///
    /// # Errors
    ///
    /// [`Rejected`] as of [`Engine::submit`] if one of them cannot be taken; then none is.
    pub fn submit_all(&self, requests: Vec<(Request, Sink)>) -> Result<Vec<CancelToken>, Rejected> {
        for (request, _) in &requests {
            self.check(request)?;
        }
        let n = requests.len();
        let waiting = self.counters.waiting.fetch_add(n, Ordering::AcqRel);
        if waiting + n > self.most_waiting() {
            self.counters.leave_queue(n);
            return Err(Rejected::QueueFull { waiting });
        }
        let job = |(mut request, sink): (Request, Sink)| {
            // 0 keeps the likeliest token only; the sampler's own range excludes it.
            request.sampling.top_p = request.sampling.top_p.max(f32::MIN_POSITIVE);
            Job {
                request,
                sink,
                cancel: CancelToken::new(),
                submitted: Instant::now(),
                fetch: None,
            }
        };
        let submitted: Vec<Job> = requests.into_iter().map(job).collect();
        let cancels = submitted.iter().map(|job| job.cancel.clone()).collect();
        let jobs = self
            .jobs
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let sent = jobs
            .as_ref()
            .is_some_and(|jobs| jobs.send(submitted).is_ok());
        if !sent {
            self.counters.leave_queue(n);
            return Err(Rejected::Stopped);
        }
        Ok(cancels)
    }

    /// Requests that would be taken now: those that may run and wait beside those that do.
    pub fn places(&self) -> usize {
        let waiting = self.counters.waiting.load(Ordering::Acquire);
        self.most_waiting().saturating_sub(waiting)
    }

    /// Requests that can be taken at once when nothing runs.
    pub fn places_max(&self) -> usize {
        self.queue.saturating_add(self.info.sequences)
    }

    /// Requests that may wait: for their turn, or for the thread to start them.
    fn most_waiting(&self) -> usize {
        let running = self.counters.running.load(Ordering::Acquire);
        let free = self.info.sequences.saturating_sub(running);
        self.queue.saturating_add(free)
    }

    /// Submits `request` and waits for its end: the answer, all tokens and the outcome.
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
                Event::Prefill { .. } | Event::Round(_) => {}
                Event::Text(segments) => {
                    for segment in segments {
                        if segment.channel == Channel::Answer {
                            whole.push_str(&segment.text);
                        }
                        ids.extend(segment.tokens.iter().map(|token| token.id));
                    }
                }
                Event::Done(outcome) => return Ok((whole, ids, *outcome)),
                Event::Failed(reason) => return Err(Rejected::Failed(reason)),
            }
        }
        Err(Rejected::Stopped)
    }

    /// Cancels what runs, takes no more requests, and waits until ended texts are where
    /// [`EngineOptions::disk`] has them.
    pub fn stop(&self) {
        self.join();
    }

    /// Stops the engine and gives its model back, with an empty prefix cache. None if the engine had
    /// been stopped before, or its thread has panicked.
    pub fn into_model(self) -> Option<Model> {
        let mut speculator = self.join()?;
        speculator.discard_all();
        Some(Model {
            speculator,
            text: self.text.clone(),
            senses: self.senses.clone(),
            info: self.info.clone(),
            chunk: self.rest.chunk,
            plans: self.rest.plans.clone(),
            identity: None,
            budget: self.rest.budget,
        })
    }

    /// Ends the engine's thread, and waits for it.
    fn join(&self) -> Option<Speculator> {
        let lock = std::sync::PoisonError::into_inner;
        *self.jobs.lock().unwrap_or_else(lock) = None;
        let mut thread = self
            .thread
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        // A panic of the thread has been printed; there is nobody to tell here.
        thread.take()?.join().ok()
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
        // A text needs room for one token at least.
        let room = context - usize::from(request.embedding.is_none());
        if request.prompt.len() > room {
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
        if !request.media.is_empty() {
            for placed in &request.media {
                let (sense, reason) = match placed.kind() {
                    MediaKind::Sound => (self.hearing().is_some(), &self.info.hearing_reason),
                    _ => (self.vision().is_some(), &self.info.vision_reason),
                };
                if !sense {
                    return Err(Rejected::NoMedia(placed.kind(), reason.clone()));
                }
            }
            check_places(request).map_err(Rejected::BadParameter)?;
        }
        let bad = |e: &dyn std::fmt::Display| Rejected::BadParameter(e.to_string());
        let dimensions = request.embedding.and_then(|asked| asked.dimensions);
        let width = self.info.hidden_size;
        if dimensions.is_some_and(|n| !(1..=width).contains(&n)) {
            return Err(Rejected::BadParameter(format!(
                "embeddings of this model have 1 to {width} dimensions"
            )));
        }
        check_ranges(&request.sampling)?;
        let sampling = Sampling {
            top_p: request.sampling.top_p.max(f32::MIN_POSITIVE),
            ..request.sampling.clone()
        };
        sampling.validate(vocab_size).map_err(|e| bad(&e))?;
        StopStrings::new(&request.stop).map_err(|e| bad(&e))?;
        let stop_tokens = &request.stop_token_ids;
        if stop_tokens.len() > MAX_LISTED_TOKENS {
            return Err(Rejected::BadParameter(format!(
                "stop_token_ids has {} tokens, at most {MAX_LISTED_TOKENS} are allowed",
                stop_tokens.len()
            )));
        }
        if let Some(token) = stop_tokens.iter().find(|&&t| t as usize >= vocab_size) {
            return Err(Rejected::BadParameter(format!(
                "stop_token_ids has token {token}, but the vocabulary ends at {vocab_size}"
            )));
        }
        if request.draft.is_some_and(|n| n.max() > self.info.draft_max) {
            let limit = self.info.draft_max;
            return Err(Rejected::BadParameter(format!(
                "drafts of this engine have at most {limit} tokens"
            )));
        }
        if request
            .logprobs
            .is_some_and(|asked| asked.top > MAX_TOP_LOGPROBS)
        {
            return Err(Rejected::BadParameter(format!(
                "log-probabilities come with at most {MAX_TOP_LOGPROBS} of the likeliest tokens"
            )));
        }
        Ok(())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
    }
}
