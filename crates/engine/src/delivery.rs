//! Delivery: from a stream's tokens to the events of its request.
//!
//! ```text
//! token ─ detokenizer ─ stop strings ─ reasoning ─→ segments by channel ─→ sink
//! ```
//!
//! Text is whole characters, and nothing that may still become a stop string is sent.

use crate::request::{
    CancelToken, Event, FinishReason, Request, RequestOutcome, Segment, Sink, Speculation, Timings,
    Usage, WrittenToken,
};
use speculate::{Accept, Finish, Stream};
use std::time::Instant;
use text::{
    Channel, Detokenizer, Reasoning, ReasoningMarks, Specials, StopOutcome, StopStrings, Text,
};

/// A request that runs: its stream, and what turns its tokens into events.
pub(crate) struct Running {
    pub(crate) stream: Stream,
    /// Takes the request's events.
    pub(crate) sink: Sink,
    pub(crate) cancel: CancelToken,
    pub(crate) writing: Writing,
    /// Holds text back that may become a stop string.
    pub(crate) stops: StopStrings,
    /// The stop strings, in the order of the request.
    pub(crate) stop_strings: Vec<String>,
    /// Tokens of the stream's output that have been delivered.
    pub(crate) delivered: usize,
    /// Milliseconds from submission to admission.
    pub(crate) queued_ms: f64,
    /// Whether the request may draft at all.
    pub(crate) speculates: bool,
    /// The rule by which its drafted tokens are accepted.
    pub(crate) accept: Accept,
    /// When the first token came, if one has come.
    pub(crate) first_token: Option<Instant>,
}

/// What turns tokens into text by channel.
pub(crate) struct Writing {
    detokenizer: Detokenizer,
    /// Tells reasoning apart, if that is asked for and the model may reason.
    reasoning: Option<Reasoning>,
    reasoning_tokens: usize,
    /// Marks of reasoning that are part of the text.
    shown_marks: Option<ReasoningMarks>,
    /// What the prompt has begun and the text shows.
    begun: String,
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
        let reasoning = marks.map(|m| Reasoning::new(m, &text.tokenizer, &request.prompt));
        let shown = request.shows_reasoning_marks && !request.splits_reasoning;
        let shown_marks = text.reasoning.filter(|_| shown);
        let begun = shown_marks.and_then(|m| m.begun(&text.tokenizer, &request.prompt));
        Writing {
            detokenizer: Detokenizer::new(specials),
            reasoning,
            reasoning_tokens: 0,
            shown_marks,
            begun: begun.unwrap_or_default(),
        }
    }

    /// Sorts text into channels.
    fn say(&mut self, text: &str, segments: &mut Vec<Segment>) {
        let mut emit = |channel, text: &str| {
            if !text.is_empty() {
                Segment::last_of(segments, channel).text.push_str(text);
            }
        };
        match &mut self.reasoning {
            Some(reasoning) => reasoning.push(text, &mut emit),
            None => emit(Channel::Answer, text),
        }
    }
}

/// What became of a token.
struct Taken {
    /// The characters that it completes.
    text: String,
    channel: Channel,
    /// The stop string that they complete.
    hit: Option<usize>,
}

impl Running {
    /// Sends the newest tokens; the reason to end, if there is one.
    pub(crate) fn deliver(&mut self, text: &Text) -> Option<FinishReason> {
        let (done, total) = (self.stream.n_prefilled(), self.stream.n_prompt());
        if self.stream.output().is_empty() && self.stream.finish().is_none() {
            let listening = (self.sink)(Event::Prefill { done, total });
            return (!listening).then_some(FinishReason::Cancelled);
        }
        self.first_token.get_or_insert_with(Instant::now);
        let finish = self.stream.finish();
        let end = self.n_written(finish);
        let mut segments = Vec::new();
        if !self.writing.begun.is_empty() {
            Segment::last_of(&mut segments, Channel::Answer).text =
                std::mem::take(&mut self.writing.begun);
        }
        let mut n_tokens = 0;
        let mut logprobs = self.stream.take_logprobs().into_iter();
        let mut reason = None;
        for i in self.delivered..end {
            let token = self.stream.output()[i];
            n_tokens += 1;
            let taken = self.take(text, token, &mut segments);
            let written = WrittenToken {
                id: token,
                text: taken.text,
                logprobs: logprobs.next(),
            };
            Segment::last_of(&mut segments, taken.channel)
                .tokens
                .push(written);
            if let Some(stop) = taken.hit {
                reason = Some(FinishReason::StopString(self.stop_strings[stop].clone()));
                break;
            }
        }
        self.delivered += n_tokens;
        if reason.is_none()
            && let Some(finish) = finish
        {
            let detokenizer = std::mem::replace(
                &mut self.writing.detokenizer,
                Detokenizer::new(Specials::Skip),
            );
            let outcome = self.stops.push(detokenizer.finish());
            self.writing.say(&outcome.emit, &mut segments);
            reason = Some(match (outcome.hit, finish) {
                (Some(stop), _) => FinishReason::StopString(self.stop_strings[stop].clone()),
                (None, Finish::Stop | Finish::Complete) => FinishReason::Stop,
                // A fault fails, in `leave`.
                (None, Finish::Length | Finish::NoToken | Finish::Constraint) => {
                    FinishReason::Length
                }
            });
            if outcome.hit.is_none() {
                let stops = std::mem::replace(
                    &mut self.stops,
                    StopStrings::new(&[]).expect("no stops are allowed"),
                );
                self.writing.say(&stops.finish(), &mut segments);
            }
        }
        let listening = (self.sink)(Event::Text(segments));
        if listening {
            reason
        } else {
            reason.or(Some(FinishReason::Cancelled))
        }
    }

    /// Takes one token's text.
    fn take(&mut self, text: &Text, token: u32, segments: &mut Vec<Segment>) -> Taken {
        let mark = self.writing.reasoning.as_ref().and_then(|r| r.mark(token));
        let was_open = self
            .writing
            .reasoning
            .as_ref()
            .is_some_and(Reasoning::is_open);
        let mut is_reasoning = was_open || mark.is_some();
        self.writing.reasoning_tokens += usize::from(is_reasoning);
        let (piece, StopOutcome { emit, hit }) = match mark {
            None => {
                let shown = self
                    .writing
                    .shown_marks
                    .as_ref()
                    .and_then(|m| m.spelling(token));
                let piece = match shown {
                    Some(mark) => self.writing.detokenizer.part().to_owned() + mark,
                    None => self.writing.detokenizer.push(&text.tokenizer, token),
                };
                is_reasoning |= self
                    .writing
                    .reasoning
                    .as_ref()
                    .is_some_and(|r| r.skips(&piece));
                let outcome = self.stops.push(&piece);
                (piece, outcome)
            }
            Some(mark) => {
                let mut emit = self.stops.push(self.writing.detokenizer.part()).emit;
                let passed = self.stops.pass(mark);
                emit += &passed.emit;
                (mark.to_owned(), StopOutcome { emit, ..passed })
            }
        };
        self.writing.say(&emit, segments);
        if let Some(reasoning) = self.writing.reasoning.as_mut().filter(|_| mark.is_some()) {
            reasoning.turn(token);
        }
        Taken {
            text: piece,
            channel: if is_reasoning {
                Channel::Reasoning
            } else {
                Channel::Answer
            },
            hit,
        }
    }

    /// Output tokens that count: all but the stop token.
    fn n_written(&self, finish: Option<Finish>) -> usize {
        self.stream.output().len() - usize::from(finish == Some(Finish::Stop))
    }

    pub(crate) fn outcome(
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
            reasoning_tokens: self.writing.reasoning_tokens,
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
