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
use std::time::Instant;

use axum::http::Extensions;
use engine::{
    CallEnd, CallPart, CancelToken, Channel, Event, FinishReason, Logprobs, NO_TOKEN_REASON,
    Rejected, Request, RequestOutcome, Segment, WrittenToken,
};
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, sleep_until};

use crate::connection::Stage;
use crate::errors::ApiError;
use crate::metrics::Metrics;
use crate::turns::Client;
use crate::{App, ids};

/// What happens next in a generation.
#[derive(Debug)]
pub(crate) enum Step {
    /// Text, or tokens that left none; not empty.
    Text(Piece),
    /// Nothing for a while: it is time for a sign of life.
    Quiet(Progress),
    /// The text has ended.
    End(Box<RequestOutcome>),
    /// There will be no more.
    Failed(ApiError),
}

/// Text, and its tokens where log-probabilities are asked for. While no text comes the
/// tokens wait for it, as a character or a possible stop string is held back.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Piece {
    /// Parts of the reply, in order; only tokens with log-probabilities are kept.
    segments: Vec<Segment>,
    /// Tokens written since the last piece.
    pub(crate) n_tokens: usize,
}

impl Piece {
    fn new(mut segments: Vec<Segment>) -> Self {
        let n_tokens = segments.iter().map(|segment| segment.tokens.len()).sum();
        for segment in &mut segments {
            segment.tokens.retain(|token| token.logprobs.is_some());
        }
        segments.retain(|segment| {
            !segment.text.is_empty() || !segment.tokens.is_empty() || segment.call.is_some()
        });
        Piece { segments, n_tokens }
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

    fn is_empty(&self) -> bool {
        self.segments.is_empty() && self.n_tokens == 0
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
        self.segments.iter().map(of_segment).sum()
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

/// How far a generation is that has no new text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The request waits for its turn.
    Queued,
    /// The request's prompt runs: rows done, and rows in all.
    Prefill(usize, usize),
    /// The request writes.
    Decode,
}

/// A submitted request.
pub(crate) struct Generation {
    mailbox: Arc<Mailbox>,
    cancel: CancelToken,
    has_ended: bool,
    stage: watch::Receiver<Stage>,
    started: Instant,
    client: Option<Arc<Client>>,
    /// The span of the request, whose id every line in the log carries: a stream is sent
    /// after its handler has ended.
    span: tracing::Span,
    app: Arc<App>,
}

impl Generation {
    /// Submits `request`, of the client that `from` names.
    pub(crate) fn start(
        app: &Arc<App>,
        from: &Extensions,
        request: Request,
    ) -> Result<Self, ApiError> {
        let client = from.get::<Arc<Client>>().cloned();
        let mailbox = Arc::new(Mailbox::new(app.config.limits.stream_buffer_bytes));
        let inlet = Inlet {
            mailbox: mailbox.clone(),
            metrics: app.metrics.clone(),
            started: Instant::now(),
            span: tracing::Span::current(),
            last: None,
        };
        let cancel = enter(app, client.as_ref(), request, inlet).inspect_err(|error| {
            app.metrics.faults.count(error.label());
        })?;
        Ok(Generation {
            mailbox,
            cancel,
            has_ended: false,
            stage: app.stage.clone(),
            started: Instant::now(),
            client,
            span: tracing::Span::current(),
            app: app.clone(),
        })
    }

    /// Waits for what comes next; nothing comes after `End` and `Failed`.
    pub(crate) async fn next(&mut self) -> Step {
        let limits = &self.app.config.limits;
        let deadline = (self.started + limits.request_timeout).into();
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
                    break Step::Failed(ApiError::timed_out(limits.request_timeout.as_secs()));
                }
                () = &mut quiet => break Step::Quiet(self.mailbox.progress()),
            }
        };
        match &step {
            Step::Text(_) | Step::Quiet(_) => {}
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
                Step::Quiet(_) => {}
                Step::End(outcome) => return Ok((whole, outcome)),
                Step::Failed(error) => return Err(error),
            }
        }
    }

    fn log_end(&mut self, outcome: &RequestOutcome) {
        self.has_ended = true;
        if let Some(client) = &self.client {
            self.app.turns.served(client, Instant::now());
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
    let may_enter = |client| !is_busy || app.turns.may_enter(client, app.engine.places(), now);
    let submitted = if client.is_none_or(may_enter) {
        app.engine.submit(request, inlet.into_sink())
    } else {
        Err(Rejected::QueueFull { waiting })
    };
    match (submitted, client) {
        (Ok(cancel), client) => {
            if let Some(client) = client {
                app.turns.entered(client, now);
            }
            Ok(cancel)
        }
        (Err(rejected @ Rejected::QueueFull { .. }), Some(client)) => {
            let wait = app.turns.refused(client, ids::fraction(), now);
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
}

struct State {
    piece: Piece,
    end: Option<End>,
    progress: Progress,
    /// When the reader left, if it has.
    left: Option<Instant>,
}

enum End {
    Done(Box<RequestOutcome>),
    Failed(ApiError),
}

impl Mailbox {
    fn new(limit: usize) -> Self {
        let state = State {
            piece: Piece::default(),
            end: None,
            progress: Progress::Queued,
            left: None,
        };
        Mailbox {
            state: Mutex::new(state),
            ready: Notify::new(),
            limit,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Option<Step> {
        let mut state = self.state();
        let is_last = state.end.is_some() && !state.piece.segments.is_empty();
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

    fn leave(&self) {
        self.state().left.get_or_insert_with(Instant::now);
    }

    /// Takes a piece of text; false if it is one too many, or nobody reads.
    fn push(&self, piece: Piece) -> bool {
        let mut state = self.state();
        if state.left.is_some() || matches!(state.end, Some(End::Failed(_))) {
            return false;
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
            Event::Prefill { done, total } => {
                let mut state = self.mailbox.state();
                state.progress = Progress::Prefill(done, total);
                state.left.is_none()
            }
            Event::Text(segments) => {
                let now = Instant::now();
                let piece = Piece::new(segments);
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
mod tests {
    use engine::CallBegin;

    use super::*;

    fn said(reasoning: &str, answer: &str) -> Piece {
        let segment = |channel, text: &str| Segment {
            text: text.to_owned(),
            ..Segment::new(channel)
        };
        Piece::new(vec![
            segment(Channel::Reasoning, reasoning),
            segment(Channel::Answer, answer),
        ])
    }

    #[test]
    fn text_grows_into_one_piece_and_the_end_comes_after_it() {
        let mailbox = Mailbox::new(100);
        assert!(mailbox.take().is_none());
        assert!(mailbox.push(said("", "a")));
        assert!(mailbox.push(said("", "")) && mailbox.push(said("c", "b")));
        mailbox.end(End::Failed(ApiError::internal()));
        mailbox.end(End::Failed(ApiError::busy()));
        let Some(Step::Text(whole)) = mailbox.take() else {
            panic!("text");
        };
        // In the order in which it was written, and whole by channel.
        assert_eq!(whole.segments.len(), 3);
        assert_eq!(whole.text(Channel::Reasoning), "c");
        assert_eq!(whole.text(Channel::Answer), "ab");
        assert_eq!(whole.text(Channel::ToolCall), "");
        assert!(
            matches!(mailbox.take(), Some(Step::Failed(error)) if error == ApiError::internal())
        );
        assert!(mailbox.take().is_none());
    }

    #[test]
    fn calls_grow_piece_by_piece_and_broken_ones_are_none() {
        let part = |index, name: Option<&str>, json: &str, end| {
            let begin = name.map(|name| CallBegin {
                id: format!("call_{index}"),
                name: name.to_owned(),
            });
            Piece::new(vec![Segment {
                text: json.to_owned(),
                call: Some(CallPart { index, begin, end }),
                ..Segment::new(Channel::ToolCall)
            }])
        };
        let (whole, broken) = (Some(CallEnd::Whole), Some(CallEnd::Broken));
        let mailbox = Mailbox::new(100);
        for piece in [
            part(0, Some("f"), "", None),
            part(0, None, "{\"a\":", None),
            part(0, None, "1}", None),
            part(0, None, "", whole),
            part(1, Some("g"), "{\"b", None),
            part(1, None, "", broken),
            said("", "text"),
            part(2, Some("f"), "{}", whole),
        ] {
            assert!(mailbox.push(piece));
        }
        let Some(Step::Text(piece)) = mailbox.take() else {
            panic!("text");
        };
        let calls = piece.calls();
        let calls: Vec<_> = calls
            .iter()
            .map(|c| (c.id, c.name, c.arguments.as_str()))
            .collect();
        assert_eq!(calls, [("call_0", "f", "{\"a\":1}"), ("call_2", "f", "{}")]);
        assert_eq!(piece.text(Channel::Answer), "text");
        assert_eq!(piece.call_parts().count(), 3);
        // What is kept for a slow reader includes calls.
        assert!(!Mailbox::new(6).push(part(0, Some("f"), "", None)));
    }

    #[test]
    fn a_reader_too_far_behind_is_cut_off() {
        let mailbox = Mailbox::new(4);
        assert!(mailbox.push(said("ab", "cd")));
        assert!(!mailbox.push(said("", "e")));
        assert!(!mailbox.push(said("", "")));
        assert!(
            matches!(mailbox.take(), Some(Step::Failed(error)) if error == ApiError::slow_reader(4))
        );
    }

    #[test]
    fn nothing_is_kept_for_a_reader_that_left() {
        let mailbox = Mailbox::new(4);
        mailbox.leave();
        assert!(!mailbox.push(said("", "a")));
        assert!(mailbox.take().is_none());
    }

    #[test]
    fn tokens_wait_for_text_but_not_beyond_the_end() {
        let token = |id| {
            let token = WrittenToken {
                id,
                text: String::new(),
                logprobs: Some(Logprobs::default()),
            };
            Piece::new(vec![Segment {
                tokens: vec![token],
                ..Segment::new(Channel::Answer)
            }])
        };
        let mailbox = Mailbox::new(1000);
        assert!(mailbox.push(token(1)));
        assert!(mailbox.take().is_none());
        assert!(mailbox.push(said("", "a")));
        let whole = |piece: &Piece| {
            (
                piece.judged().count(),
                piece.text(Channel::Answer).into_owned(),
            )
        };
        assert!(
            matches!(mailbox.take(), Some(Step::Text(piece)) if whole(&piece) == (1, "a".into()))
        );
        assert!(mailbox.push(token(2)));
        mailbox.end(End::Failed(ApiError::internal()));
        assert!(
            matches!(mailbox.take(), Some(Step::Text(piece)) if whole(&piece) == (1, "".into()))
        );
        assert!(matches!(mailbox.take(), Some(Step::Failed(_))));
        assert!(mailbox.take().is_none());
        // What is kept for a slow reader includes calls.
        let small = Mailbox::new(20);
        assert!(!small.push(token(1)));
    }

    #[test]
    fn an_engine_that_lets_go_without_a_word_is_an_error_and_not_a_hang() {
        let metrics = Arc::new(Metrics::new(8));
        let mailbox = Arc::new(Mailbox::new(4));
        let inlet = || Inlet {
            mailbox: mailbox.clone(),
            metrics: metrics.clone(),
            started: Instant::now(),
            span: tracing::Span::none(),
            last: None,
        };
        let is_failed = |step| matches!(step, Some(Step::Failed(e)) if e == ApiError::internal());
        drop(inlet());
        assert!(is_failed(mailbox.take()));
        assert!(!metrics.engine_lost.load(Ordering::Relaxed));
        let mut lost = inlet();
        assert!(lost.take(Event::Prefill { done: 1, total: 2 }));
        let engine = std::thread::spawn(move || {
            let _lost = lost;
            panic!("on purpose");
        });
        engine.join().unwrap_err();
        assert!(is_failed(mailbox.take()));
        assert!(metrics.engine_lost.load(Ordering::Relaxed));
    }
}
