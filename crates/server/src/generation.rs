//! One request on its way through the engine, seen from the async side.
//!
//! ```text
//! engine's thread ─ Sink ─→ Mailbox ─→ Generation::next ─→ dialect ─→ client
//! engine's thread ←──────── CancelToken ←── drop
//! ```
//!
//! The engine must never wait for a client, so the mailbox takes everything at
//! once: text that nobody has fetched yet grows into one piece. It may grow to a
//! limit; a client that far behind is cut off.
//!
//! Dropping a [`Generation`] cancels its request. A handler holds it while it
//! collects, a stream's body holds it while it is sent, and hyper drops both as
//! soon as the connection is gone.

use std::borrow::Cow;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::Extensions;
use engine::{
    CallEnd, CallPart, CancelToken, Channel, Event, FinishReason, Logprobs, NO_TOKEN_REASON,
    Rejected, Request, RequestOutcome, RoundEvent, Segment, WrittenToken,
};
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, sleep_until};

use crate::app::App;
use crate::connection::Stage;
use crate::errors::ApiError;
use crate::ids;
use crate::metrics::Metrics;
use crate::run::{Run, Slots};
use crate::turns::Client;

/// What happens next in a generation.
#[derive(Debug)]
pub(crate) enum Step {
    /// Text, or tokens that left none; not empty.
    Text(Piece),
    /// More rows of the prompt have run, where that is asked for.
    Prefill(Prefill),
    /// Nothing for a while: it is time for a sign of life.
    Quiet(Progress),
    /// The text has ended.
    End(Box<RequestOutcome>),
    /// There will be no more.
    Failed(ApiError),
}

/// What is told of a generation beside its text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wants {
    /// Every token, also one without log-probabilities.
    pub(crate) tokens: bool,
    /// The progress of the prompt.
    pub(crate) prefill: bool,
}

/// Text, and its tokens where they or log-probabilities are asked for. While no text comes the
/// tokens wait for it, as a character or a possible stop string is held back.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Piece {
    /// Parts of the reply, in order; only tokens that are asked for are kept.
    segments: Vec<Segment>,
    /// What the rounds did that wrote it, where that is asked for.
    pub(crate) rounds: Vec<RoundEvent>,
    /// Tokens written since the last piece.
    pub(crate) n_tokens: usize,
}

impl Piece {
    fn new(mut segments: Vec<Segment>, keeps_tokens: bool) -> Self {
        let n_tokens = segments.iter().map(|segment| segment.tokens.len()).sum();
        for segment in segments.iter_mut().filter(|_| !keeps_tokens) {
            segment.tokens.retain(|token| token.logprobs.is_some());
        }
        segments.retain(|segment| {
            !segment.text.is_empty() || !segment.tokens.is_empty() || segment.call.is_some()
        });
        Piece {
            segments,
            rounds: Vec::new(),
            n_tokens,
        }
    }

    /// The parts of the reply, in order.
    pub(crate) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The text of one channel.
    pub(crate) fn text(&self, channel: Channel) -> Cow<'_, str> {
        let of_channel = self.segments.iter().filter(|s| s.channel == channel);
        let mut texts = of_channel.map(|segment| segment.text.as_str());
        let first = texts.next().unwrap_or_default();
        texts.fold(Cow::Borrowed(first), |whole, text| whole + text)
    }

    /// The tokens that are kept, in order.
    pub(crate) fn tokens(&self) -> impl Iterator<Item = &WrittenToken> {
        self.segments.iter().flat_map(|segment| &segment.tokens)
    }

    /// The tokens that come with log-probabilities, in order, each with its channel.
    pub(crate) fn judged(&self) -> impl Iterator<Item = (Channel, &WrittenToken, &Logprobs)> {
        self.segments.iter().flat_map(|segment| {
            let tokens = segment.tokens.iter();
            tokens.filter_map(|token| Some((segment.channel, token, token.logprobs.as_ref()?)))
        })
    }

    /// What is said of calls, in order: each part, and the piece of the arguments with it.
    pub(crate) fn call_parts(&self) -> impl Iterator<Item = (&CallPart, &str)> {
        let parts = self.segments.iter();
        parts.filter_map(|segment| Some((segment.call.as_ref()?, segment.text.as_str())))
    }

    /// The calls that are whole, in order.
    pub(crate) fn calls(&self) -> Vec<Call<'_>> {
        let mut calls: Vec<(usize, bool, Call<'_>)> = Vec::new();
        for (part, arguments) in self.call_parts() {
            if let Some(begin) = &part.begin {
                let call = Call {
                    id: &begin.id,
                    name: &begin.name,
                    arguments: String::new(),
                };
                calls.push((part.index, false, call));
            }
            // Parts of one call follow each other.
            if let Some((index, is_whole, call)) = calls.last_mut()
                && *index == part.index
            {
                call.arguments.push_str(arguments);
                *is_whole |= part.end == Some(CallEnd::Whole);
            }
        }
        let whole = calls.into_iter().filter(|(_, is_whole, _)| *is_whole);
        whole.map(|(.., call)| call).collect()
    }

    /// Whether there is something for a client to read.
    fn has_text(&self) -> bool {
        let mut segments = self.segments.iter();
        segments.any(|segment| !segment.text.is_empty() || segment.call.is_some())
    }

    /// Whether the text has a line break.
    fn has_line_break(&self) -> bool {
        let mut segments = self.segments.iter();
        segments.any(|segment| segment.text.contains('\n'))
    }

    fn is_empty(&self) -> bool {
        self.segments.is_empty() && self.rounds.is_empty() && self.n_tokens == 0
    }

    /// Bytes of text and tokens.
    fn len(&self) -> usize {
        let of_token = |token: &WrittenToken| {
            let top = token.logprobs.iter().map(|l| size_of_val(l.top.as_slice()));
            size_of::<WrittenToken>() + token.text.len() + top.sum::<usize>()
        };
        let of_call = |segment: &Segment| {
            let begin = segment.call.as_ref().and_then(|call| call.begin.as_ref());
            begin.map_or(0, |begin| begin.id.len() + begin.name.len())
        };
        let of_segment = |segment: &Segment| {
            segment.text.len()
                + of_call(segment)
                + segment.tokens.iter().map(of_token).sum::<usize>()
        };
        let of_round = |round: &RoundEvent| {
            let texts = round.tokens.iter().map(|token| token.text.len());
            size_of::<RoundEvent>() + size_of_val(round.tokens.as_slice()) + texts.sum::<usize>()
        };
        let segments = self.segments.iter().map(of_segment).sum::<usize>();
        segments + self.rounds.iter().map(of_round).sum::<usize>()
    }

    fn push(&mut self, next: Piece) {
        for mut segment in next.segments {
            if let Some(part) = segment.call {
                let (_, call) = Segment::last_of_call(&mut self.segments, part.index);
                call.begin = call.begin.take().or(part.begin);
                call.end = call.end.or(part.end);
            }
            let last = Segment::last_of(&mut self.segments, segment.channel);
            last.text.push_str(&segment.text);
            last.tokens.append(&mut segment.tokens);
        }
        self.rounds.extend(next.rounds);
        self.n_tokens += next.n_tokens;
    }
}

/// A call that is whole.
#[derive(Debug, PartialEq)]
pub(crate) struct Call<'a> {
    /// The call's id.
    pub(crate) id: &'a str,
    /// The name of the tool.
    pub(crate) name: &'a str,
    /// The arguments: one JSON object.
    pub(crate) arguments: String,
}

/// Rows of a prompt that have run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Prefill {
    /// Rows that have run, those of `cached` among them.
    pub(crate) done: usize,
    /// Rows of the prompt.
    pub(crate) total: usize,
    /// Rows that were found in the prefix cache.
    pub(crate) cached: usize,
}

/// How far a generation is that has no new text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The request waits for its turn.
    Queued,
    /// The request's prompt runs.
    Prefill(Prefill),
    /// The request writes.
    Decode,
}

/// A submitted request.
pub(crate) struct Generation {
    mailbox: Arc<Mailbox>,
    run: Arc<Run>,
    cancel: CancelToken,
    has_ended: bool,
    stage: watch::Receiver<Stage>,
    started: Instant,
    /// How long the request may take.
    timeout: Duration,
    client: Option<Arc<Client>>,
    /// The span of the request, whose id every line in the log carries: a stream is sent
    /// after its handler has ended.
    span: tracing::Span,
    app: Arc<App>,
}

impl Generation {
    /// Submits `request`, of the client that `from` names. It may take as long as `timeout` says,
    /// and no longer than the server lets any.
    pub(crate) fn start(
        app: &Arc<App>,
        from: &Extensions,
        mut request: Request,
        wants: Wants,
        timeout: Option<Duration>,
    ) -> Result<Self, ApiError> {
        let client = from.get::<Arc<Client>>().cloned();
        let most = app.server.config.limits.request_timeout;
        let mailbox = Arc::new(Mailbox::new(
            app.server.config.limits.stream_buffer_bytes,
            wants,
        ));
        let run = app.slots.run(&request);
        request.number = Some(run.id);
        let inlet = Inlet {
            mailbox: mailbox.clone(),
            metrics: app.metrics.clone(),
            slots: app.slots.clone(),
            run: run.clone(),
            started: Instant::now(),
            span: tracing::Span::current(),
            last: None,
        };
        let cancel = enter(app, client.as_ref(), request, inlet).inspect_err(|error| {
            app.metrics.faults.count(error.label());
        })?;
        Ok(Generation {
            mailbox,
            run,
            cancel,
            has_ended: false,
            stage: app.server.stage.clone(),
            started: Instant::now(),
            timeout: timeout.map_or(most, |timeout| timeout.min(most)),
            client,
            span: tracing::Span::current(),
            app: app.clone(),
        })
    }

    /// What is known of the request while it runs.
    pub(crate) fn run(&self) -> &Arc<Run> {
        &self.run
    }

    /// Waits for what comes next; nothing comes after `End` and `Failed`.
    pub(crate) async fn next(&mut self) -> Step {
        let limits = &self.app.server.config.limits;
        let deadline = (self.started + self.timeout).into();
        let quiet = sleep(limits.keep_alive);
        tokio::pin!(quiet);
        let step = loop {
            // Before the mailbox: it could be filled faster than it is emptied.
            if *self.stage.borrow() == Stage::Stopping {
                break Step::Failed(ApiError::shutting_down());
            }
            if let Some(step) = self.mailbox.take() {
                break step;
            }
            tokio::select! {
                () = self.mailbox.ready.notified() => {}
                _ = self.stage.changed() => {}
                () = sleep_until(deadline) => {
                    break Step::Failed(ApiError::timed_out(self.timeout));
                }
                () = &mut quiet => break Step::Quiet(self.mailbox.progress()),
            }
        };
        match &step {
            Step::Text(_) | Step::Prefill(_) | Step::Quiet(_) => {}
            Step::End(outcome) => self.log_end(outcome),
            Step::Failed(error) => {
                self.app.metrics.faults.count(error.label());
                self.span
                    .in_scope(|| tracing::warn!(error = error.label(), "generation failed"));
                self.cancel_now();
            }
        }
        step
    }

    /// Waits for the end and gives the whole text.
    pub(crate) async fn collect(mut self) -> Result<(Piece, Box<RequestOutcome>), ApiError> {
        let mut whole = Piece::default();
        loop {
            match self.next().await {
                Step::Text(piece) => whole.push(piece),
                Step::Prefill(_) | Step::Quiet(_) => {}
                Step::End(outcome) => return Ok((whole, outcome)),
                Step::Failed(error) => return Err(error),
            }
        }
    }

    fn log_end(&mut self, outcome: &RequestOutcome) {
        self.has_ended = true;
        if let Some(client) = &self.client {
            self.app.turns().served(client, Instant::now());
        }
        self.app
            .metrics
            .request_latency
            .observe(self.started.elapsed());
        let _span = self.span.enter();
        tracing::info!(
            prompt_tokens = outcome.usage.prompt_tokens,
            completion_tokens = outcome.usage.completion_tokens,
            drafted = outcome.speculation.drafted,
            accepted = outcome.speculation.accepted,
            ms = self.started.elapsed().as_millis(),
            "generation ended"
        );
    }

    fn cancel_now(&mut self) {
        if !self.has_ended {
            self.has_ended = true;
            self.mailbox.leave();
            self.cancel.cancel();
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if !self.has_ended {
            let _span = self.span.enter();
            tracing::info!(ms = self.started.elapsed().as_millis(), "client went away");
        }
        self.cancel_now();
    }
}

/// Submits `request` if it is its client's turn; who is refused is told when to come back.
fn enter(
    app: &App,
    client: Option<&Arc<Client>>,
    request: Request,
    inlet: Inlet,
) -> Result<CancelToken, ApiError> {
    let now = Instant::now();
    let counters = app.engine.counters();
    let waiting = counters.waiting.load(Ordering::Acquire);
    // While less waits than runs the next free sequence could find nobody.
    let is_busy = waiting >= app.engine.info().sequences;
    let may_enter = |client| !is_busy || app.turns().may_enter(client, app.engine.places(), now);
    let submitted = if client.is_none_or(may_enter) {
        app.engine.submit(request, inlet.into_sink())
    } else {
        Err(Rejected::QueueFull { waiting })
    };
    match (submitted, client) {
        (Ok(cancel), client) => {
            if let Some(client) = client {
                app.turns().entered(client, now);
            }
            Ok(cancel)
        }
        (Err(rejected @ Rejected::QueueFull { .. }), Some(client)) => {
            let wait = app.turns().refused(client, ids::fraction(), now);
            Err(ApiError::from(rejected).retry_after(wait))
        }
        (Err(rejected), _) => Err(rejected.into()),
    }
}

/// What the engine has said and the client has not heard.
struct Mailbox {
    state: Mutex<State>,
    ready: Notify,
    limit: usize,
    wants: Wants,
}

struct State {
    piece: Piece,
    end: Option<End>,
    progress: Progress,
    /// Progress of the prompt that the reader has not been told of.
    prefill: Option<Prefill>,
    /// When the reader left, if it has.
    left: Option<Instant>,
}

enum End {
    Done(Box<RequestOutcome>),
    Failed(ApiError),
}

impl Mailbox {
    fn new(limit: usize, wants: Wants) -> Self {
        let state = State {
            piece: Piece::default(),
            end: None,
            progress: Progress::Queued,
            prefill: None,
            left: None,
        };
        Mailbox {
            state: Mutex::new(state),
            ready: Notify::new(),
            limit,
            wants,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Option<Step> {
        let mut state = self.state();
        if let Some(prefill) = state.prefill.take() {
            return Some(Step::Prefill(prefill));
        }
        let State { piece, end, .. } = &*state;
        let is_last = end.is_some() && !(piece.segments.is_empty() && piece.rounds.is_empty());
        if is_last || state.piece.has_text() {
            return Some(Step::Text(std::mem::take(&mut state.piece)));
        }
        state.end.take().map(|end| match end {
            End::Done(outcome) => Step::End(outcome),
            End::Failed(error) => Step::Failed(error),
        })
    }

    fn progress(&self) -> Progress {
        self.state().progress
    }

    /// Notes how far the prompt is; whether anyone listens.
    fn prefill(&self, prefill: Prefill) -> bool {
        let mut state = self.state();
        state.progress = Progress::Prefill(prefill);
        let is_heard = state.left.is_none();
        if self.wants.prefill {
            state.prefill = Some(prefill);
            drop(state);
            self.ready.notify_one();
        }
        is_heard
    }

    fn leave(&self) {
        self.state().left.get_or_insert_with(Instant::now);
    }

    /// Takes a piece of text; false if it is one too many, or nobody reads.
    fn push(&self, piece: Piece) -> bool {
        let mut state = self.state();
        if state.left.is_some() || matches!(state.end, Some(End::Failed(_))) {
            return false;
        }
        if let Progress::Prefill(prefill) = state.progress {
            // The last rows of a prompt have run with the first token.
            let done = prefill.total;
            state.prefill = self.wants.prefill.then_some(Prefill { done, ..prefill });
        }
        state.progress = Progress::Decode;
        if state.piece.len() + piece.len() > self.limit {
            state.piece = Piece::default();
            state.end = Some(End::Failed(ApiError::slow_reader(self.limit)));
            drop(state);
            self.ready.notify_one();
            return false;
        }
        if piece.is_empty() {
            return true;
        }
        state.piece.push(piece);
        drop(state);
        self.ready.notify_one();
        true
    }

    /// Ends the text; the first end counts.
    fn end(&self, end: End) {
        self.state().end.get_or_insert(end);
        self.ready.notify_one();
    }
}

/// The engine's end of a mailbox. It lives on the engine's thread, so it must not
/// own the engine: the last owner waits for that thread.
struct Inlet {
    mailbox: Arc<Mailbox>,
    metrics: Arc<Metrics>,
    slots: Arc<Slots>,
    run: Arc<Run>,
    started: Instant,
    span: tracing::Span,
    /// When the newest text came.
    last: Option<Instant>,
}

impl Inlet {
    fn into_sink(mut self) -> engine::Sink {
        Box::new(move |event| self.take(event))
    }

    fn take(&mut self, event: Event) -> bool {
        match event {
            Event::Prefill {
                done,
                total,
                cached,
            } => {
                self.slots.admit(&self.run, total, cached);
                let prefill = Prefill {
                    done,
                    total,
                    cached,
                };
                self.mailbox.prefill(prefill)
            }
            Event::Round(round) => self.mailbox.push(Piece {
                rounds: vec![*round],
                ..Piece::default()
            }),
            Event::Text(segments) => {
                let now = Instant::now();
                let piece = Piece::new(segments, self.mailbox.wants.tokens);
                self.run.wrote(piece.n_tokens, piece.has_line_break());
                match self.last.replace(now) {
                    None => self.metrics.time_to_first_token.observe(now - self.started),
                    Some(last) => self.metrics.count_tokens(piece.n_tokens, now - last),
                }
                self.mailbox.push(piece)
            }
            Event::Done(outcome) => {
                self.metrics.count_outcome(&outcome);
                let end = match outcome.finish {
                    // Nobody but this server cancels, and where it does, it
                    // has already said why; what is left is the engine's end.
                    FinishReason::Cancelled => End::Failed(ApiError::shutting_down()),
                    _ => End::Done(outcome),
                };
                self.mailbox.end(end);
                true
            }
            Event::Failed(error) => {
                self.span
                    .in_scope(|| tracing::error!(error, "the engine failed on a request"));
                let error = match error.as_str() {
                    NO_TOKEN_REASON => ApiError::no_number(),
                    _ => ApiError::internal(),
                };
                self.mailbox.end(End::Failed(error));
                true
            }
        }
    }
}

impl Drop for Inlet {
    fn drop(&mut self) {
        self.slots.leave(&self.run);
        let left = self.mailbox.state().left;
        match left {
            Some(left) => self.metrics.cancel_latency.observe(left.elapsed()),
            // An engine that lets go without a word has lost its thread. The
            // first end counts, so after `Done` this says nothing.
            None => {
                if std::thread::panicking() {
                    self.metrics.engine_lost.store(true, Ordering::Relaxed);
                }
                self.mailbox.end(End::Failed(ApiError::internal()));
            }
        }
    }
}

#[cfg(test)]
mod tests;
