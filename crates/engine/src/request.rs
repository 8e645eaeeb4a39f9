//! What goes into the engine and what comes out.

use crate::embedding::Embedding;
use crate::lines::LineLimits;
use crate::multimodal::{MediaKind, MediaRowCounts, PlacedMedia};
use cache::Namespace;
use constrain::Grammar;
use serde::Serialize;
use speculate::{
    Accept, DraftLength, Guesser, Guessers, Logprobs, MAX_HEADS, Sampling, Stats, TokenSource,
    TopLogprobs,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use text::{Channel, Tools};

/// One text to write, or one to make vectors of.
#[derive(Clone, Debug)]
pub struct Request {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// The pictures and parts of clips of the prompt, in order ([`Senses::place`](crate::Senses::place)).
    pub media: Vec<PlacedMedia>,
    /// How tokens are chosen. Its [`end_tokens`](Sampling::end_tokens) are those that end this
    /// text, whatever it says.
    pub sampling: Sampling,
    /// Tokens to write, at most; as many as fit the context if absent.
    pub max_tokens: Option<usize>,
    /// Strings that end the text; they are not part of it.
    pub stop: Vec<String>,
    /// Tokens that end the text, beside the model's own; they are not part of it.
    pub stop_token_ids: Vec<u32>,
    /// Whether to write on after the model's own stop tokens, as benchmarks do.
    pub ignore_eos: bool,
    /// Whether stop tokens and other special tokens show up in the text.
    pub show_specials: bool,
    /// Whether what the model writes before its answer comes apart from it.
    pub splits_reasoning: bool,
    /// Whether marks of reasoning are part of the text, though they are special tokens: those that
    /// the model writes, and before them the one that the prompt ends with. Means nothing where
    /// `splits_reasoning` is set.
    pub shows_reasoning_marks: bool,
    /// The tools that the prompt offers, so that calls come apart from the answer; calls are
    /// text if absent.
    pub tools: Option<ToolUse>,
    /// How long drafts are; as long as pays, up to the engine's own limit, if
    /// absent. At most 0 turns speculation off.
    pub draft: Option<DraftLength>,
    /// Who may guess, of those that the model has ([`ModelInfo::guesser`](crate::ModelInfo::guesser)).
    pub drafters: Guessers,
    /// Whether those that may guess do so in turn, round by round, instead of whoever promises most: for checks,
    /// which want drafts of all of them.
    pub drafters_take_turns: bool,
    /// The rule by which drafted tokens are accepted; the engine's own if absent.
    pub accept: Option<Accept>,
    /// Whether tokens come with their log-probabilities, and with which. Those of the logits are
    /// of all tokens, whatever a grammar allows.
    pub logprobs: Option<TopLogprobs>,
    /// Whether each round says what it did ([`Event::Round`]).
    pub trace: bool,
    /// What the answer has to follow ([`Engine::compile`](crate::Engine::compile)). Reasoning before it is free, where
    /// `splits_reasoning` or `shows_reasoning_marks` says that there may be some.
    pub grammar: Option<Grammar>,
    /// Tokens of reasoning, at most; then it is closed by the model's own mark.
    pub reasoning_budget: Option<usize>,
    /// Whose texts the prompt may begin like in the prefix cache: those of requests of the same
    /// namespace, and no others.
    pub namespace: Namespace,
    /// Whether the prompt is looked for in the prefix cache.
    pub reuse: bool,
    /// Whose turn it is when more requests wait than can run: the smallest comes first. A request that
    /// waits takes the place of one with a greater number that runs.
    pub priority: i64,
    /// The number that [`StepReport`](crate::StepReport) has for the request, which no other one of the
    /// engine may have; by the order of arrival, from 0, if absent.
    pub number: Option<u64>,
    /// Who asks. Clients with equal priority take turns.
    pub client: u64,
    /// What the reply goes on with where the prompt ends in the middle of it, its answer or its
    /// reasoning; otherwise the prompt's last tokens tell what the reply begins with.
    pub continues: Option<Channel>,
    /// Limits that count from the text's first line break.
    pub lines: LineLimits,
    /// The vectors that are wanted of the prompt, [`RequestOutcome::embedding`]. No text is written
    /// then: beside this, only the fields count that say whose turn it is and what of the prefix
    /// cache the prompt may begin with. A mean, a first row and a vector a token are made of rows
    /// that have all run, and take nothing from the cache.
    pub embedding: Option<Embedding>,
}

impl Request {
    /// A greedy continuation of `prompt`, without limits of its own.
    pub fn new(prompt: Vec<u32>) -> Self {
        Request {
            prompt,
            media: Vec::new(),
            sampling: Sampling::default(),
            max_tokens: None,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            show_specials: false,
            splits_reasoning: false,
            shows_reasoning_marks: false,
            tools: None,
            draft: None,
            drafters: Guessers::default(),
            drafters_take_turns: false,
            accept: None,
            logprobs: None,
            trace: false,
            grammar: None,
            reasoning_budget: None,
            namespace: Namespace::default(),
            reuse: true,
            priority: 0,
            number: None,
            client: 0,
            continues: None,
            lines: LineLimits::default(),
            embedding: None,
        }
    }
}

/// What a model may call.
#[derive(Clone, Debug)]
pub struct ToolUse {
    /// The tools.
    pub tools: Arc<Tools>,
    /// Calls of the text, at most; the text ends after the last.
    pub calls_max: Option<usize>,
}

/// Receives a request's events, in order, on a thread of the engine; it must not
/// block. Returns whether anyone still listens: `false` cancels the request.
pub type Sink = Box<dyn FnMut(Event) -> bool + Send>;

/// Cancels a request from outside, at the next round at the latest. Dropping it
/// does nothing.
#[derive(Clone, Debug, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// A token that is not cancelled.
    pub fn new() -> Self {
        CancelToken::default()
    }

    /// Cancels the request.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether the request was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Rejected {
    /// The prompt has no token.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The prompt does not fit.
    #[error(
        "this model's maximum context length is {context} tokens; the prompt has {tokens} tokens{}",
        full_context(*tokens, *context)
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Tokens that a sequence may have.
        context: usize,
        /// Tokens that a sequence may have at most, whatever is asked for at load.
        context_max: usize,
    },
    /// The prompt names a token that does not exist.
    #[error("token {token} is outside the vocabulary of {vocab}")]
    BadToken {
        /// The token that does not exist.
        token: u32,
        /// Tokens in the vocabulary.
        vocab: usize,
    },
    /// The model takes no media of a kind, for a reason.
    #[error("this model takes no {0}: {1}")]
    NoMedia(MediaKind, String),
    /// A sampling parameter is out of range.
    #[error("{0}")]
    BadParameter(String),
    /// Too many requests wait.
    #[error("{waiting} requests are waiting already")]
    QueueFull {
        /// Length of the queue.
        waiting: usize,
    },
    /// The request was taken and failed; what else runs goes on.
    #[error("{0}")]
    Failed(String),
    /// The engine has stopped.
    #[error("the engine has stopped")]
    Stopped,
}

/// The end of a message about a prompt of `tokens` in a context of `context`: why one that just
/// fills it is refused.
pub fn full_context(tokens: usize, context: usize) -> &'static str {
    if tokens == context {
        ", and the answer needs at least one"
    } else {
        ""
    }
}

/// What happens to a request, in order: `Prefill`*, then `Text`*, each after a `Round` if
/// [`Request::trace`] is set, then one of `Done` and `Failed`. A request for an embedding has no
/// `Text`.
#[derive(Clone, Debug)]
pub enum Event {
    /// Rows of the prompt that have run, of how many. The first says that the request is
    /// admitted.
    Prefill {
        /// Rows that have run, those of `cached` among them.
        done: usize,
        /// Rows of the prompt.
        total: usize,
        /// Rows that were found in the prefix cache.
        cached: usize,
    },
    /// What the round did whose text comes next; only where [`Request::trace`] is set.
    Round(Box<RoundEvent>),
    /// Tokens of one round and the text that they complete, in order. While a character or a
    /// possible stop string is held back, segments have tokens and no text.
    Text(Vec<Segment>),
    /// The text has ended. A request that is cancelled before it is admitted, or still waits when its engine
    /// stops, has no event at all: its sink is dropped.
    Done(Box<RequestOutcome>),
    /// The request could not go on, for this reason. Text that was sent stays as it is.
    Failed(String),
}

/// A part of a reply that belongs to one channel.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// What the part is. All is the answer unless [`Request::splits_reasoning`] or
    /// [`Request::tools`] is set.
    pub channel: Channel,
    /// The text of the part, in whole characters; may be empty. Of a call it is the next piece
    /// of the arguments, which make up one JSON object.
    pub text: String,
    /// The tokens, without the stop token. What they complete may come in a later segment.
    pub tokens: Vec<WrittenToken>,
    /// Which call the part belongs to; absent where it is none, and while it may be none.
    pub call: Option<CallPart>,
}

impl Segment {
    /// A part of `channel` without anything in it.
    pub fn new(channel: Channel) -> Self {
        Segment {
            channel,
            text: String::new(),
            tokens: Vec::new(),
            call: None,
        }
    }

    /// The last of `segments` if it belongs to `channel`, else a new one after it.
    pub fn last_of(segments: &mut Vec<Segment>, channel: Channel) -> &mut Segment {
        if segments.last().is_none_or(|last| last.channel != channel) {
            segments.push(Segment::new(channel));
        }
        segments.last_mut().expect("one was pushed")
    }

    /// The last of `segments` if it belongs to call `index`, else a new one after it; and its
    /// call.
    pub fn last_of_call(segments: &mut Vec<Segment>, index: usize) -> (&mut String, &mut CallPart) {
        let is_same = |call: &CallPart| call.index == index;
        let fits = |last: &Segment| {
            last.channel == Channel::ToolCall && last.call.as_ref().is_none_or(is_same)
        };
        if !segments.last().is_some_and(fits) {
            segments.push(Segment::new(Channel::ToolCall));
        }
        let last = segments.last_mut().expect("one was pushed");
        let call = last.call.get_or_insert(CallPart {
            index,
            begin: None,
            end: None,
        });
        (&mut last.text, call)
    }
}

/// What a segment says of a tool call, beside a piece of its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallPart {
    /// The number of the call in the reply, from 0.
    pub index: usize,
    /// The call's beginning, in its first segment.
    pub begin: Option<CallBegin>,
    /// The call's end, in its last segment.
    pub end: Option<CallEnd>,
}

/// The beginning of a tool call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallBegin {
    /// The call's id; no other call has it.
    pub id: String,
    /// The name of the tool.
    pub name: String,
}

/// The end of a tool call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallEnd {
    /// The arguments are whole.
    Whole,
    /// The model left the form of calls, or its text ended. What it wrote for the call follows
    /// as text of the answer.
    Broken,
}

/// A token of a reply.
#[derive(Clone, Debug, PartialEq)]
pub struct WrittenToken {
    /// The token's id.
    pub id: u32,
    /// The characters that it completes, or how a mark of reasoning or of a call is spelled. All
    /// of a reply's make up its text, but for a stop string, for a character that stays
    /// unfinished, for the form of calls, and for white space around reasoning and calls.
    pub text: String,
    /// How likely the target held it, if [`Request::logprobs`] asks for that.
    pub logprobs: Option<Logprobs>,
}

/// What one round did for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoundEvent {
    /// The number of the round, from 1. 0 is the prompt's last step, which is no round and writes
    /// the first token.
    pub number: u64,
    /// Tokens of the draft that was verified.
    pub drafted: usize,
    /// Tokens of the draft that a grammar left no choice about.
    pub forced: usize,
    /// Tokens of the draft that were accepted, those behind the end of the text among them.
    pub accepted: usize,
    /// The tokens that the round has written, in order, without the stop token.
    pub tokens: Vec<TracedToken>,
}

/// A token of a reply, and where it came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracedToken {
    /// The characters that the token completes, as [`WrittenToken::text`] has them.
    pub text: String,
    /// What the token is a part of.
    pub channel: Channel,
    /// Where the token came from.
    pub source: TokenSource,
}

/// Why a text has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model chose a stop token.
    Stop,
    /// A stop string was written.
    StopString(String),
    /// The text has ended by itself, and tools are called in it.
    ToolCalls,
    /// The text has as many tokens as were asked for, or as fit the context. A request for an
    /// embedding asks for none.
    Length,
    /// The request was cancelled, or nobody listened any more.
    Cancelled,
}

/// Tokens of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Prompt tokens found in the prefix cache, which did not have to run.
    pub cached_tokens: usize,
    /// Prompt tokens that stand for media.
    #[serde(flatten)]
    pub media_tokens: MediaRowCounts,
    /// Tokens written, without the stop token.
    pub completion_tokens: usize,
    /// Written tokens that are reasoning or mark it, if reasoning was asked for apart.
    pub reasoning_tokens: usize,
}

/// Milliseconds of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Timings {
    /// Milliseconds from submission to the first round, without those after a preemption.
    pub queued_ms: f64,
    /// Milliseconds of the rounds with prompt rows.
    pub prefill_ms: f64,
    /// Milliseconds from the first token to the last.
    pub decode_ms: f64,
    /// Tokens a second from the first token to the last; 0 for fewer than two.
    pub decode_tokens_per_second: f64,
    /// Prompt tokens that did run a second.
    pub prefill_tokens_per_second: f64,
    /// How often the request had to give its memory to others, wait, and run its tokens again.
    #[serde(skip_serializing_if = "is_zero")]
    pub preemptions: u64,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RequestOutcome {
    /// Why the text ended.
    pub finish: FinishReason,
    /// Tokens of prompt and text.
    pub usage: Usage,
    /// Times and rates.
    pub timings: Timings,
    /// What speculation did for the request.
    pub speculation: Speculation,
    /// The vectors that [`Request::embedding`] asks for: one, or one a token of the prompt if they
    /// are not pooled; none of a text. Not serialized.
    #[serde(skip)]
    pub embedding: Vec<Vec<f32>>,
}

/// One draft position's counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PositionCounts {
    /// Rounds that drafted a token here.
    pub drafted: u64,
    /// Rounds in which it was accepted, and so all before it.
    pub accepted: u64,
}

/// What one drafter has guessed of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DrafterCounts {
    /// The name of the drafter.
    pub drafter: String,
    /// Rounds whose draft it has guessed.
    pub rounds: u64,
    /// Tokens that it has guessed.
    pub drafted: u64,
    /// Drafted tokens that were accepted.
    pub accepted: u64,
}

impl DrafterCounts {
    /// Adds `more` to `all`, drafter by drafter.
    pub fn add(all: &mut Vec<DrafterCounts>, more: &[DrafterCounts]) {
        for more in more {
            match all.iter_mut().find(|of| of.drafter == more.drafter) {
                Some(of) => {
                    of.rounds += more.rounds;
                    of.drafted += more.drafted;
                    of.accepted += more.accepted;
                }
                None => all.push(more.clone()),
            }
        }
    }
}

/// The decision record: whether a request was speculated on, and what came of
/// it. Every response carries one.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Speculation {
    /// Whether any token was drafted.
    pub engaged: bool,
    /// Why nothing was drafted, if nothing was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The name of the drafter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drafter: Option<String>,
    /// The rule by which drafted tokens were accepted: `exact` or `residual`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accept: Option<&'static str>,
    /// Rounds: verifications of a draft.
    pub rounds: u64,
    /// Tokens drafted.
    pub drafted: u64,
    /// Draft tokens accepted.
    pub accepted: u64,
    /// Drafted tokens that a grammar left no choice about: no drafter has guessed them.
    #[serde(skip_serializing_if = "is_zero")]
    pub forced: u64,
    /// Forced tokens that were accepted.
    #[serde(skip_serializing_if = "is_zero")]
    pub forced_accepted: u64,
    /// Tokens written per round, one that ends the text among them.
    pub tokens_per_round: f64,
    /// What each of the drafters that guessed has done.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub by_drafter: Vec<DrafterCounts>,
    /// Drafted and accepted tokens by draft position, from the first.
    pub by_position: Vec<PositionCounts>,
    /// Milliseconds in the drafter.
    pub ms_draft: f64,
    /// Milliseconds in the target.
    pub ms_verify: f64,
    /// Milliseconds saved against plain decoding, negative if lost: estimated from what rounds of each
    /// kind usually take. Rounds of which that is not known yet count as 0.
    pub ms_saved: f64,
}

/// Whether `n` is 0; serde hands a reference over.
fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl Speculation {
    /// The record of a stream's `stats` with `ms_saved` milliseconds saved, drafted by `drafters`, heads first,
    /// and accepted by `accept`; `reason` says why nothing was drafted, if nothing was.
    pub(crate) fn new(
        stats: &Stats,
        ms_saved: f64,
        drafters: &[&str],
        accept: Accept,
        reason: Option<String>,
    ) -> Self {
        let engaged = stats.drafted() > 0;
        let ms = |d: std::time::Duration| d.as_secs_f64() * 1e3;
        let counts = |p: &speculate::Position| PositionCounts {
            drafted: p.drafted,
            accepted: p.accepted,
        };
        let by_drafter = |guesser: Guesser| {
            let guesses = stats.guesses(guesser);
            let name = guesser.name(drafters).filter(|_| guesses.rounds > 0)?;
            Some(DrafterCounts {
                drafter: name.to_owned(),
                rounds: guesses.rounds,
                drafted: guesses.drafted,
                accepted: guesses.accepted,
            })
        };
        // Of several heads, the one that guessed in most rounds.
        let mut drafter = drafters.first().copied();
        let mut most = stats.guesses(Guesser::HEAD).rounds;
        for head in (1..MAX_HEADS).map(Guesser::Head) {
            if stats.guesses(head).rounds > most {
                (drafter, most) = (head.name(drafters), stats.guesses(head).rounds);
            }
        }
        let emitted = stats.emitted_by_rounds();
        Speculation {
            engaged,
            reason: if engaged { None } else { reason },
            drafter: drafter.map(str::to_owned),
            accept: drafter.map(|_| accept.name()),
            rounds: stats.rounds,
            drafted: stats.drafted(),
            accepted: stats.accepted(),
            forced: stats.forced,
            forced_accepted: stats.forced_accepted,
            tokens_per_round: if stats.rounds == 0 {
                0.0
            } else {
                emitted as f64 / stats.rounds as f64
            },
            by_drafter: Guesser::ALL.into_iter().filter_map(by_drafter).collect(),
            by_position: stats.by_position.iter().map(counts).collect(),
            ms_draft: ms(stats.draft),
            ms_verify: ms(stats.verify),
            ms_saved,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_that_fills_the_context_is_told_why_it_is_refused() {
        let message = |tokens| {
            Rejected::PromptTooLong {
                tokens,
                context: 8,
                context_max: 32,
            }
            .to_string()
        };
        let limit = "this model's maximum context length is 8 tokens; the prompt has";
        assert_eq!(message(9), format!("{limit} 9 tokens"));
        assert_eq!(
            message(8),
            format!("{limit} 8 tokens, and the answer needs at least one")
        );
    }
}
