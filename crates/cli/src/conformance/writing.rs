//! Runs the requests of a cell, and keeps everything that a client could see of their texts.

use engine::{
    CancelToken, Channel, DraftLength, DrafterCounts, Engine, Event, FinishReason, Namespace,
    Request, RequestOutcome, Segment, WrittenToken,
};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};

/// Tokens that a request writes before it is cancelled.
const CANCEL_AFTER: usize = 4;

/// Plain decoding, as a request asks for it.
pub(super) const OFF: Option<DraftLength> = Some(DraftLength::UpTo(0));

/// Requests, and how they follow each other.
#[derive(Clone, Default)]
pub(super) struct Script {
    /// Requests of one list run at once, one list after the other.
    pub(super) waves: Vec<Vec<Request>>,
    /// Whether the first request is cancelled in the middle.
    pub(super) cancels_first: bool,
}

impl Script {
    /// A script of the same requests, each of which runs alone and to its end.
    pub(super) fn alone(&self) -> Script {
        let waves = self.waves.iter().flatten();
        Script {
            waves: waves.map(|request| vec![request.clone()]).collect(),
            cancels_first: false,
        }
    }
}

/// A text: its tokens with their log-probabilities, what they say, and how it ended.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Written {
    pub(super) tokens: Vec<(Channel, WrittenToken)>,
    /// What is said, by channel, in order.
    pub(super) parts: Vec<(Channel, String)>,
    /// Names of the tools that are called.
    pub(super) calls: Vec<String>,
    pub(super) finish: FinishReason,
}

/// What a script has brought.
#[derive(Clone, Debug, Default)]
pub(super) struct Run {
    pub(super) texts: Vec<Written>,
    pub(super) drafted: u64,
    pub(super) accepted: u64,
    /// What each drafter has guessed of them.
    pub(super) by_drafter: Vec<DrafterCounts>,
    /// Prompt tokens of the last request that the prefix cache had.
    pub(super) cached: usize,
}

impl Written {
    fn new() -> Self {
        Written {
            tokens: Vec::new(),
            parts: Vec::new(),
            calls: Vec::new(),
            finish: FinishReason::Cancelled,
        }
    }

    fn push(&mut self, segment: Segment) {
        let Segment {
            channel,
            text,
            tokens,
            call,
        } = segment;
        self.calls
            .extend(call.and_then(|part| part.begin).map(|begin| begin.name));
        self.tokens
            .extend(tokens.into_iter().map(|token| (channel, token)));
        match self.parts.last_mut() {
            _ if text.is_empty() => {}
            Some((last, whole)) if *last == channel => whole.push_str(&text),
            _ => self.parts.push((channel, text)),
        }
    }

    /// The answer, without reasoning and calls.
    pub(super) fn answer(&self) -> String {
        let answer = self.parts.iter().filter(|(c, _)| *c == Channel::Answer);
        answer.map(|(_, text)| text.as_str()).collect()
    }

    /// The first token at which `other` is not the same; its length if the tokens are the same and
    /// something else is not.
    pub(super) fn differs_from(&self, other: &Written) -> Option<usize> {
        // A cancelled text is as long as it happened to get.
        let is_cut = |a: &Written, b: &Written| {
            a.finish == FinishReason::Cancelled && a.tokens.len() < b.tokens.len()
        };
        let same = self.tokens.iter().zip(&other.tokens);
        let same = same.take_while(|(a, b)| a == b).count();
        let shorter = self.tokens.len().min(other.tokens.len());
        let is_prefix = same == shorter && (is_cut(self, other) || is_cut(other, self));
        (self != other && !is_prefix).then_some(same)
    }
}

/// Runs `script` with drafts as long as `draft` says. Drafts of a fixed length are made by all drafters in turn.
///
/// # Errors
///
/// What the engine says of a request that it refuses or that fails.
pub(super) fn run(
    engine: &Engine,
    script: &Script,
    draft: Option<DraftLength>,
) -> Result<Run, String> {
    /// Prefix caches of earlier runs are not to be found.
    static SALT: AtomicU64 = AtomicU64::new(1);
    let mut namespace = Namespace::default();
    namespace.0[..8].copy_from_slice(&SALT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    let mut run = Run::default();
    for (w, wave) in script.waves.iter().enumerate() {
        let mut running = Vec::new();
        for (i, request) in wave.iter().enumerate() {
            let (events, inbox) = channel();
            let request = Request {
                draft,
                drafters_take_turns: matches!(draft, Some(DraftLength::Fixed(_))),
                namespace,
                ..request.clone()
            };
            let sink = Box::new(move |event| events.send(event).is_ok());
            let cancel = engine.submit(request, sink).map_err(|e| e.to_string())?;
            let is_cancelled = script.cancels_first && (w, i) == (0, 0);
            running.push((inbox, is_cancelled.then_some(cancel)));
        }
        for (inbox, cancel) in running {
            let (written, outcome) = listen(&inbox, cancel.as_ref())?;
            run.texts.push(written);
            run.drafted += outcome.speculation.drafted;
            run.accepted += outcome.speculation.accepted;
            DrafterCounts::add(&mut run.by_drafter, &outcome.speculation.by_drafter);
            run.cached = outcome.usage.cached_tokens;
        }
    }
    Ok(run)
}

/// Waits for the end of a text, and cancels it in the middle if it is given a way to.
fn listen(
    inbox: &Receiver<Event>,
    cancel: Option<&CancelToken>,
) -> Result<(Written, RequestOutcome), String> {
    let mut written = Written::new();
    for event in inbox {
        match event {
            Event::Prefill { .. } | Event::Round(_) => {}
            Event::Text(segments) => {
                segments.into_iter().for_each(|part| written.push(part));
                if let Some(cancel) = cancel.filter(|_| written.tokens.len() >= CANCEL_AFTER) {
                    cancel.cancel();
                }
            }
            Event::Done(outcome) => {
                written.finish = outcome.finish.clone();
                return Ok((written, *outcome));
            }
            Event::Failed(reason) => return Err(reason),
        }
    }
    Err("the engine has stopped".into())
}
