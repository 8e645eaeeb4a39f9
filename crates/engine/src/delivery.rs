//! Delivery: from a stream's tokens to the events of its request.
//!
//! ```text
//! token ─ detokenizer ─ stop strings ─ reasoning ─ calls ─→ segments by channel ─→ sink
//! ```
//!
//! A call inside reasoning is reasoning, and a mark of reasoning inside a call is text. Text is whole characters, and nothing that may still become a stop string is sent.

mod beside;

pub(crate) use beside::{Beside, Slot};

use crate::embedding::Embedding;
use crate::lines::Lines;
use crate::multimodal::MediaRowCounts;
use crate::queue::Rank;
use crate::request::{
    CallBegin, CallEnd, CancelToken, Event, FinishReason, Request, RequestOutcome, RoundEvent,
    Segment, Sink, Speculation, Timings, TracedToken, Usage, WrittenToken,
};
use speculate::{Finish, Logprobs, RoundTrace, Stream, TokenSource};
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use text::{
    Channel, Detokenizer, Reasoning, ReasoningMarks, Specials, StopOutcome, StopStrings, Text,
    ToolCalls, ToolEvent,
};

/// A request that runs.
pub(crate) struct Running {
    pub(crate) stream: Stream,
    /// What turns the stream's tokens into events; [`Beside`] has it while it delivers them.
    pub(crate) reply: Option<Box<Reply>>,
    pub(crate) cancel: CancelToken,
    /// Milliseconds from submission to admission.
    pub(crate) queued_ms: f64,
    /// Whether the request may draft at all.
    pub(crate) speculates: bool,
    /// The request's number, for whoever keeps records of the engine.
    pub(crate) number: u64,
    /// Who asked.
    pub(crate) client: u64,
    /// Who comes before whom, where not all can run.
    pub(crate) rank: Rank,
    /// Whether it takes from the prefix cache what that has of its text.
    pub(crate) reuses: bool,
    /// The vectors that are asked for instead of text.
    pub(crate) embedding: Option<Embedding>,
    /// Prompt tokens that stand for media.
    pub(crate) media_tokens: MediaRowCounts,
}

/// What turns the tokens of a request into its events.
pub(crate) struct Reply {
    /// Takes the events.
    sink: Sink,
    writing: Writing,
    /// Holds text back that may become a stop string.
    stops: StopStrings,
    /// The stop strings, in the order of the request.
    stop_strings: Vec<String>,
    /// Rows of the prompt that were told to have run.
    read: usize,
    /// Tokens of the stream's output that have been delivered.
    delivered: usize,
    /// When the first token came, and when the newest one did, if one has come.
    token_times: Option<(Instant, Instant)>,
}

/// How a request ends.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum End {
    /// The text ends, for this reason.
    Text(FinishReason),
    /// The stream has failed, and no token before that ends the text.
    Fault,
}

impl End {
    /// Of a request whose stream has ended so, and nothing has ended its text before.
    fn of_stream(finish: Finish) -> Self {
        match finish {
            Finish::Stop | Finish::Complete => End::Text(FinishReason::Stop),
            Finish::Length => End::Text(FinishReason::Length),
            Finish::NoToken | Finish::Constraint => End::Fault,
        }
    }
}

/// How much of a prompt has run.
#[derive(Clone, Copy)]
struct Progress {
    done: usize,
    total: usize,
    cached: usize,
}

/// What a round has brought a request.
pub(crate) struct News {
    progress: Progress,
    /// Tokens of the output, a stop token among them.
    n_output: usize,
    /// Tokens of the output that are not delivered yet, without a stop token.
    tokens: Vec<u32>,
    logprobs: Vec<Logprobs>,
    /// What the round did, if that is traced.
    round: Option<RoundTrace>,
    finish: Option<Finish>,
    /// Whether vectors are asked for instead of text.
    pools: bool,
}

/// Why a reply is there whenever the scheduler asks for it.
const HERE: &str = "replies are back when a round has ended";

/// What turns tokens into text by channel.
pub(crate) struct Writing {
    detokenizer: Detokenizer,
    /// Tells reasoning apart, if that is asked for and the model may reason.
    reasoning: Option<Reasoning>,
    reasoning_tokens: usize,
    /// Tells calls apart, if tools are offered and the model can call them.
    calls: Option<ToolCalls>,
    /// Follows reasoning that is part of the text, where calls must be told from it.
    unsplit: Option<Reasoning>,
    /// Marks of reasoning that are part of the text.
    shown_marks: Option<ReasoningMarks>,
    /// What the prompt has begun and the text shows.
    begun: String,
    lines: Lines,
}

impl Writing {
    /// The writing of the reply to `request`.
    pub(crate) fn new(text: &Text, request: &Request) -> Self {
        let specials = if request.show_specials {
            Specials::Show
        } else {
            Specials::Skip
        };
        let marks = text.reasoning.filter(|_| request.splits_reasoning);
        let reasoning = |m| match request.continues {
            None => Reasoning::new(m, &text.tokenizer, &request.prompt),
            Some(channel) => Reasoning::within(m, channel == Channel::Reasoning),
        };
        let shown = request.shows_reasoning_marks && !request.splits_reasoning;
        let shown_marks = text.reasoning.filter(|_| shown);
        let begins = shown_marks.filter(|_| request.continues.is_none());
        let begun = begins.and_then(|m| m.begun(&text.tokenizer, &request.prompt));
        let offered = text.tools.zip(request.tools.as_ref());
        let calls = offered.map(|(format, offered)| {
            let most = offered.calls_max.unwrap_or(usize::MAX);
            ToolCalls::up_to(most, format, offered.tools.clone())
        });
        let is_unsplit = calls.is_some() && !request.splits_reasoning;
        Writing {
            detokenizer: Detokenizer::new(specials),
            reasoning: marks.map(reasoning),
            reasoning_tokens: 0,
            calls,
            unsplit: text.reasoning.filter(|_| is_unsplit).map(reasoning),
            shown_marks,
            begun: begun.unwrap_or_default(),
            lines: Lines::new(request.lines),
        }
    }

    /// Sorts text into channels.
    fn say(&mut self, text: &str, segments: &mut Vec<Segment>) {
        let is_thought = self.unsplit.as_ref().is_some_and(Reasoning::is_open);
        let calls = &mut self.calls;
        let mut emit = |channel, text: &str| match calls {
            _ if text.is_empty() => {}
            Some(calls) if channel == Channel::Answer && !is_thought => {
                calls.push(text, &mut |event| note(event, segments));
            }
            _ => Segment::last_of(segments, channel).text.push_str(text),
        };
        match &mut self.reasoning {
            Some(reasoning) => reasoning.push(text, &mut emit),
            None => emit(Channel::Answer, text),
        }
    }

    /// Takes one token.
    fn take(
        &mut self,
        text: &Text,
        token: u32,
        stops: &mut StopStrings,
        segments: &mut Vec<Segment>,
    ) -> Taken {
        let (was_reasoning, was_call) = (self.is_reasoning(), self.is_call());
        let reasoning = self.reasoning.as_ref().filter(|_| !was_call);
        let thought_mark = reasoning.and_then(|r| r.mark(token));
        let is_free = thought_mark.is_none() && !was_reasoning;
        let calls = self.calls.as_ref().filter(|_| is_free);
        let call_mark =
            calls.and_then(|calls| Some((calls.mark(token)?, calls.spelling_of(token)?)));
        let splits = self.reasoning.is_some();
        let mut is_reasoning = splits && (was_reasoning || thought_mark.is_some());
        self.reasoning_tokens += usize::from(is_reasoning);
        let mark = thought_mark.or(call_mark.map(|(_, spelling)| spelling));
        let (piece, StopOutcome { emit, hit }) = match mark {
            None => {
                let piece = match self.shown(text, token, was_reasoning, was_call) {
                    Some(mark) => self.detokenizer.part().to_owned() + mark,
                    None => self.detokenizer.push(&text.tokenizer, token),
                };
                let reasoning = self.reasoning.as_ref();
                is_reasoning |= reasoning.is_some_and(|r| r.skips(&piece));
                let outcome = stops.push(&piece);
                (piece, outcome)
            }
            Some(mark) => {
                let mut emit = stops.push(self.detokenizer.part()).emit;
                let passed = stops.pass(mark);
                emit += &passed.emit;
                (mark.to_owned(), StopOutcome { emit, ..passed })
            }
        };
        let is_last = self.say_lines(&emit, segments);
        if let Some(reasoning) = self.reasoning.as_mut().filter(|_| thought_mark.is_some()) {
            reasoning.turn(token);
        }
        if let Some(unsplit) = self.unsplit.as_mut().filter(|_| !was_call)
            && unsplit.mark(token).is_some()
        {
            unsplit.turn(token);
        }
        if let (Some(calls), Some((mark, _))) = (&mut self.calls, call_mark)
            && hit.is_none()
        {
            calls.turn(mark, &mut |event| note(event, segments));
        }
        let channel = match is_reasoning {
            true => Channel::Reasoning,
            false if was_call || call_mark.is_some() => Channel::ToolCall,
            false => Channel::Answer,
        };
        Taken {
            text: piece,
            channel,
            hit,
            is_last,
        }
    }

    /// Sorts text into channels, up to where the limits of lines end it. Whether they do.
    fn say_lines(&mut self, text: &str, segments: &mut Vec<Segment>) -> bool {
        let last = self.lines.push(text);
        self.say(&text[..last.unwrap_or(text.len())], segments);
        last.is_some()
    }

    /// The spelling of `token` if it is a mark that is text here, although it may be a special
    /// token: one of reasoning that the text shows or that stands in a call, or one of calls that
    /// stands in reasoning.
    fn shown(
        &self,
        text: &Text,
        token: u32,
        is_reasoning: bool,
        is_call: bool,
    ) -> Option<&'static str> {
        let thought = self.shown_marks.or(text.reasoning.filter(|_| is_call));
        let thought = thought.and_then(|marks| marks.spelling(token));
        let calls = self.calls.as_ref().filter(|_| is_reasoning);
        thought.or_else(|| calls?.spelling_of(token))
    }

    /// Whether the text that comes next is reasoning.
    fn is_reasoning(&self) -> bool {
        let reasoning = self.reasoning.as_ref().or(self.unsplit.as_ref());
        reasoning.is_some_and(Reasoning::is_open)
    }

    /// Whether the text that comes next is part of a call.
    fn is_call(&self) -> bool {
        self.calls.as_ref().is_some_and(ToolCalls::is_open)
    }

    /// Whether the text has all the calls that it may have.
    fn is_full(&self) -> bool {
        self.calls.as_ref().is_some_and(ToolCalls::is_full)
    }

    /// Ends the text, for `reason`: says what was held back as the beginning of a call.
    fn finish(&mut self, reason: FinishReason, segments: &mut Vec<Segment>) -> FinishReason {
        let Some(calls) = &mut self.calls else {
            return reason;
        };
        calls.finish(&mut |event| note(event, segments));
        match reason {
            FinishReason::Stop | FinishReason::StopString(_) if calls.n_whole() > 0 => {
                FinishReason::ToolCalls
            }
            reason => reason,
        }
    }
}

/// Writes what the parser of calls says into segments.
fn note(event: ToolEvent<'_>, segments: &mut Vec<Segment>) {
    match event {
        ToolEvent::Text(text) => {
            Segment::last_of(segments, Channel::Answer)
                .text
                .push_str(text);
        }
        ToolEvent::Begin { index, name } => {
            Segment::last_of_call(segments, index).1.begin = Some(CallBegin {
                id: call_id(),
                name: name.to_owned(),
            });
        }
        ToolEvent::Arguments { index, json } => {
            Segment::last_of_call(segments, index).0.push_str(json);
        }
        ToolEvent::End { index, .. } => {
            Segment::last_of_call(segments, index).1.end = Some(CallEnd::Whole);
        }
        ToolEvent::Broken { index } => {
            Segment::last_of_call(segments, index).1.end = Some(CallEnd::Broken);
        }
    }
}

/// A call's id that no other call has: a hash, keyed by the system's randomness, of a counter.
fn call_id() -> String {
    static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let random = || KEY.hash_one(COUNT.fetch_add(1, Ordering::Relaxed));
    format!("call_{:016x}{:08x}", random(), random() >> 32)
}

impl Progress {
    /// How much of the prompt of `stream` has run.
    fn of(stream: &Stream) -> Self {
        Progress {
            done: stream.n_prefilled(),
            total: stream.n_prompt(),
            cached: stream.n_reused(),
        }
    }

    fn event(self) -> Event {
        Event::Prefill {
            done: self.done,
            total: self.total,
            cached: self.cached,
        }
    }
}

impl RoundEvent {
    /// The event of a round, without its tokens, and the sources of these.
    fn new(round: RoundTrace) -> (Self, std::vec::IntoIter<TokenSource>) {
        let event = RoundEvent {
            number: round.number,
            drafted: round.drafted,
            forced: round.forced,
            accepted: round.accepted,
            tokens: Vec::new(),
        };
        (event, round.sources.into_iter())
    }
}

/// What became of a token.
struct Taken {
    /// The characters that it completes.
    text: String,
    channel: Channel,
    /// The stop string that they complete.
    hit: Option<usize>,
    /// Whether the text ends with them by its [`LineLimits`](crate::LineLimits).
    is_last: bool,
}

impl Reply {
    /// The reply of a stream that starts. Says how much of its prompt was cached.
    pub(crate) fn begin(
        mut sink: Sink,
        writing: Writing,
        (stops, stop_strings): (StopStrings, Vec<String>),
        stream: &Stream,
    ) -> Box<Self> {
        let progress = Progress::of(stream);
        sink(progress.event());
        Box::new(Reply {
            sink,
            writing,
            stops,
            stop_strings,
            read: progress.done,
            delivered: 0,
            token_times: None,
        })
    }

    /// Takes from `stream` what the round has brought it.
    fn news(&self, stream: &mut Stream) -> News {
        let (output, finish) = (stream.output(), stream.finish());
        let end = output.len() - usize::from(finish == Some(Finish::Stop));
        let tokens = output[self.delivered.min(end)..end].to_vec();
        News {
            progress: Progress::of(stream),
            n_output: output.len(),
            tokens,
            logprobs: stream.take_logprobs(),
            round: stream.take_rounds().pop(),
            finish,
            pools: stream.pools(),
        }
    }

    /// Sends what the round has brought; how the request ends, if it does.
    fn deliver(&mut self, text: &Text, news: News) -> Option<End> {
        if news.finish.is_none() && self.is_behind(&news) {
            return None;
        }
        if news.n_output == 0 && news.finish.is_none() {
            self.read = news.progress.done;
            let listening = (self.sink)(news.progress.event());
            return (!listening).then_some(End::Text(FinishReason::Cancelled));
        }
        if news.pools {
            return Some(
                news.finish
                    .map_or(End::Text(FinishReason::Length), End::of_stream),
            );
        }
        if !news.tokens.is_empty() {
            let now = Instant::now();
            self.token_times.get_or_insert((now, now)).1 = now;
        }
        let mut segments = Vec::new();
        if !self.writing.begun.is_empty() {
            Segment::last_of(&mut segments, Channel::Answer).text =
                std::mem::take(&mut self.writing.begun);
        }
        let mut logprobs = news.logprobs.into_iter();
        let mut round = news.round.map(RoundEvent::new);
        let mut end = None;
        for token in news.tokens {
            self.delivered += 1;
            let taken = self
                .writing
                .take(text, token, &mut self.stops, &mut segments);
            if let Some((event, sources)) = &mut round {
                event
                    .tokens
                    .extend(sources.next().map(|source| TracedToken {
                        text: taken.text.clone(),
                        channel: taken.channel,
                        source,
                    }));
            }
            let written = WrittenToken {
                id: token,
                text: taken.text,
                logprobs: logprobs.next(),
            };
            Segment::last_of(&mut segments, taken.channel)
                .tokens
                .push(written);
            if let Some(stop) = taken.hit {
                let stop = self.stop_strings[stop].clone();
                end = Some(End::Text(FinishReason::StopString(stop)));
                break;
            }
            if self.writing.is_full() {
                end = Some(End::Text(FinishReason::ToolCalls));
                break;
            }
            if taken.is_last {
                end = Some(End::Text(FinishReason::Length));
                break;
            }
        }
        if end.is_none() {
            end = news.finish.map(|f| self.say_rest(f, &mut segments));
        }
        let end = end.map(|end| match end {
            End::Text(reason) => End::Text(self.writing.finish(reason, &mut segments)),
            End::Fault => {
                self.writing.finish(FinishReason::Length, &mut segments);
                End::Fault
            }
        });
        // Text comes after what tells of it; a sink that has stopped listening says so again.
        if let Some((event, _)) = round {
            (self.sink)(Event::Round(Box::new(event)));
        }
        let listening = (self.sink)(Event::Text(segments));
        match listening {
            true => end,
            false => end.or(Some(End::Text(FinishReason::Cancelled))),
        }
    }

    /// Says what was held back of a text whose stream has ended. Returns why the text ends.
    fn say_rest(&mut self, finish: Finish, segments: &mut Vec<Segment>) -> End {
        let detokenizer = std::mem::replace(
            &mut self.writing.detokenizer,
            Detokenizer::new(Specials::Skip),
        );
        let outcome = self.stops.push(detokenizer.finish());
        if self.writing.say_lines(&outcome.emit, segments) {
            return End::Text(FinishReason::Length);
        }
        if let Some(stop) = outcome.hit {
            return End::Text(FinishReason::StopString(self.stop_strings[stop].clone()));
        }
        let stops = std::mem::replace(
            &mut self.stops,
            StopStrings::new(&[]).expect("no stops are allowed"),
        );
        if self.writing.say_lines(&stops.finish(), segments) {
            return End::Text(FinishReason::Length);
        }
        End::of_stream(finish)
    }

    /// Sends an event that no round has brought.
    pub(crate) fn tell(&mut self, event: Event) {
        (self.sink)(event);
    }

    /// Whether the round has brought nothing that is new: after a preemption, rows run again.
    fn is_behind(&self, news: &News) -> bool {
        match news.n_output {
            0 => news.progress.done < self.read,
            n => n == self.delivered,
        }
    }
}

impl Running {
    /// Sends the newest tokens; how the request ends, if it does.
    pub(crate) fn deliver(&mut self, text: &Text) -> Option<End> {
        let Running { stream, reply, .. } = self;
        let reply = reply.as_mut().expect(HERE);
        let news = reply.news(stream);
        reply.deliver(text, news)
    }

    /// Takes the reply of a request that leaves, for its last event.
    pub(crate) fn take_reply(&mut self) -> Box<Reply> {
        self.reply.take().expect(HERE)
    }

    /// What the reply has come to so far.
    fn reply(&self) -> &Reply {
        self.reply.as_ref().expect(HERE)
    }

    pub(crate) fn outcome(
        &self,
        finish: FinishReason,
        drafters: &[&str],
        no_draft: Option<&str>,
    ) -> RequestOutcome {
        let (stats, reply) = (self.stream.stats(), self.reply());
        let reason = if self.speculates {
            no_draft.map_or_else(
                || {
                    if finish == FinishReason::Cancelled && reply.delivered == 0 {
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
        } else if self.embedding.is_some() {
            "an embedding was asked for, which writes no text".to_owned()
        } else {
            "speculation was turned off for the request".to_owned()
        };
        let usage = Usage {
            prompt_tokens: self.stream.n_prompt(),
            cached_tokens: self.stream.n_reused(),
            media_tokens: self.media_tokens,
            completion_tokens: reply.delivered,
            reasoning_tokens: reply.writing.reasoning_tokens,
        };
        let decode_ms = reply.token_times.map_or(0.0, |(first, newest)| {
            newest.duration_since(first).as_secs_f64() * 1e3
        });
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
                decode_tokens_per_second: rate(reply.delivered.saturating_sub(1), decode_ms),
                prefill_tokens_per_second: rate(
                    usage.prompt_tokens - usage.cached_tokens,
                    prefill_ms,
                ),
                preemptions: stats.preemptions,
            },
            speculation: Speculation::new(
                stats,
                self.stream.ms_saved(),
                if self.speculates { drafters } else { &[] },
                self.stream.accept(),
                Some(reason),
            ),
            embedding: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests;
