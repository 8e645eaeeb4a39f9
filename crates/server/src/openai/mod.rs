//! OpenAI's API: what its endpoints share.
//!
//! | file | path |
//! | --- | --- |
//! | [`chat`] | `POST /v1/chat/completions` |
//! | [`completions`] | `POST /v1/completions` |
//! | [`embeddings`] | `POST /v1/embeddings` |
//! | [`responses`] | `/v1/responses` |
//! | [`models`] | `GET /v1/models`, `GET /v1/models/{id}` |
//!
//! [`tools`] reads what a model may call and spells calls. [`tables`] says of every known field how it is treated.

pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod embeddings;
mod logprobs;
pub(crate) mod messages;
pub(crate) mod models;
pub(crate) mod responses;
pub(crate) mod structured;
pub(crate) mod tables;
pub(crate) mod tools;
mod trace;

use std::sync::Arc;

use engine::{FinishReason, RequestOutcome, Speculation};
use serde::Serialize;
use serde_json::{Map, Value};
use text::Tokenizer;

use crate::app::App;
use crate::dialect::Dialect;
use crate::errors::ApiError;
use crate::fields::Fields;
use crate::generation::{Piece, Prefill, Wants};
use crate::ids;
use crate::llama::document::{Note, Progress, Shape, Spelling};
use crate::options::{Names, Options, seed_of};
use crate::run::Run;

/// How OpenAI's API spells what all of its paths share.
pub(crate) const DIALECT: Dialect = Dialect {
    name: "OpenAI",
    error: |error, _| self::error(error),
    id_header: None,
};

/// The names of options in which OpenAI's API differs from others; the samplers' other names are
/// those of llama-server and text-generation-webui.
pub(crate) const NAMES: Names = Names {
    max_tokens: &["n_predict", "max_tokens"],
    stop: "stop",
    sampling: &[
        ("repeat_penalty", "repetition_penalty"),
        ("typ_p", "typical_p"),
        ("typical", "typical_p"),
        ("nsigma", "top_n_sigma"),
    ],
    passes_infill: false,
};

/// An error's document: `{"error": {message, type, param, code}}`.
fn error(error: &ApiError) -> String {
    #[derive(Serialize)]
    struct Document<'a> {
        error: Inner<'a>,
    }
    #[derive(Serialize)]
    struct Inner<'a> {
        message: &'a str,
        r#type: &'a str,
        param: Option<&'a str>,
        code: Option<&'a str>,
        /// Under llama-server's names.
        #[serde(skip_serializing_if = "Option::is_none")]
        n_prompt_tokens: Option<usize>,
        #[serde(skip_serializing_if = "Option::is_none")]
        n_ctx: Option<usize>,
    }
    let error = Inner {
        message: &error.message,
        r#type: error.kind,
        param: error.param.as_deref(),
        code: error.code,
        n_prompt_tokens: error
            .overflow
            .as_ref()
            .map(|overflow| overflow.prompt_tokens),
        n_ctx: error.overflow.as_ref().map(|overflow| overflow.context),
    };
    serde_json::to_string(&Document { error }).expect("strings serialize")
}

/// Where a stream says how many tokens it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct StreamUsage {
    /// In one more chunk at the end, without choices.
    at_end: bool,
    /// In every chunk, so far.
    in_chunks: bool,
}

impl StreamUsage {
    fn read(fields: &Fields<'_>, stream: bool) -> Result<Self, ApiError> {
        let Some(map) = fields.object("stream_options")? else {
            return Ok(StreamUsage::default());
        };
        if !stream {
            return Err(fields.error("stream_options", "needs `stream: true`"));
        }
        let inner = fields.inside(map, "stream_options.");
        let usage = StreamUsage {
            at_end: inner.bool("include_usage")?.unwrap_or(false),
            in_chunks: inner.bool("continuous_usage_stats")?.unwrap_or(false),
        };
        fields.note_ignored(inner.ignored());
        Ok(usage)
    }
}

/// What every document of one response repeats.
#[derive(Clone)]
struct Meta {
    id: String,
    created: u64,
    app: Arc<App>,
    /// The name that the request gave the model.
    model: String,
    /// The seed of the first answer.
    seed: u64,
    /// Answers to each prompt.
    n: usize,
    /// Answers to all prompts.
    n_choices: usize,
    /// Whether chunks have times.
    has_timings: bool,
    /// How llama-server would spell the answer, where that is asked for too.
    spelling: Option<Arc<Spelling>>,
    /// What becomes known of the answer's request.
    note: Note,
}

impl Meta {
    fn new(app: &Arc<App>, model: String, prefix: &str, options: &Options) -> Self {
        Meta {
            id: format!("{prefix}-{}", ids::unique()),
            created: ids::unix_seconds(),
            app: app.clone(),
            model,
            seed: options.sampling.seed,
            n: options.n,
            n_choices: 1,
            has_timings: false,
            spelling: None,
            note: Note::default(),
        }
    }

    /// Reads what llama-server's clients ask for while a text is written, in a request with this
    /// `body` that has been read as `options`; what of it the generation has to tell.
    fn read_live(
        &mut self,
        fields: &Fields<'_>,
        options: &Options,
        body: &Map<String, Value>,
    ) -> Result<Wants, ApiError> {
        self.has_timings = fields.bool("timings_per_token")?.unwrap_or(false);
        let has_progress = fields.bool("return_progress")?.unwrap_or(false);
        if fields.bool("verbose")?.unwrap_or(false) {
            let model = self.model.clone();
            let spelling = Spelling::new(&self.app, model, options, body, Shape::default());
            self.spelling = Some(Arc::new(spelling));
        }
        Ok(Wants {
            tokens: false,
            prefill: options.stream && has_progress,
        })
    }

    /// Keeps the tokens of the prompt, if the answer repeats it.
    fn note_prompt(&mut self, prompt: &[u32]) {
        if self.spelling.is_some() {
            self.note.prompt.get_or_init(|| prompt.to_vec());
        }
    }

    fn note_run(&mut self, run: &Arc<Run>) {
        self.note.run.get_or_init(|| run.clone());
    }

    /// The times so far, where chunks have them.
    fn timings_so_far(&self) -> Option<Timings> {
        let run = self.note.run.get().filter(|_| self.has_timings);
        run.filter(|run| run.written() > 0)
            .map(|run| Timings::so_far(run))
    }

    /// How far the prompt is.
    fn progress(&self, prefill: Prefill) -> Progress {
        Progress::new(prefill, self.note.run.get())
    }

    /// llama-server's document of an answer that has ended, where that is asked for too.
    fn verbose(
        &self,
        content: &str,
        whole: Option<&Piece>,
        outcome: &RequestOutcome,
    ) -> Option<Value> {
        let spelling = self.spelling.as_ref()?;
        Some(spelling.last_value(&self.note, content, whole, outcome))
    }

    /// How the answer number `i` was written, where it is not the only one.
    fn record_of<'a>(&self, i: usize, outcome: &'a RequestOutcome) -> Option<Record<'a>> {
        (self.n_choices > 1).then(|| Record {
            seed: seed_of(self.seed, i % self.n),
            speculation: &outcome.speculation,
            timings: Timings::new(outcome),
        })
    }

    /// A document of answers that have ended so, with the tokens of all; of an only one it says
    /// how it was written too.
    fn ended<'a, C>(
        &'a self,
        object: &'static str,
        choices: &'a [C],
        outcomes: &[&'a RequestOutcome],
    ) -> Envelope<'a, C> {
        let mut envelope = self.envelope(object, choices);
        envelope.usage = Some(Some(Usage::of_all(outcomes, self.n)));
        match outcomes {
            [only] => envelope.with_record(self.seed, only),
            _ => envelope,
        }
    }

    /// What the rounds of `piece` did.
    fn trace<'a>(&self, piece: &'a Piece) -> Vec<trace::Round<'a>> {
        trace::rounds(piece, &self.app.engine.info().drafters)
    }

    fn tokenizer(&self) -> &Tokenizer {
        &self.app.engine.text().tokenizer
    }

    /// A document without anything but its choices.
    fn envelope<'a, C>(&'a self, object: &'static str, choices: &'a [C]) -> Envelope<'a, C> {
        Envelope {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            system_fingerprint: &self.app.fingerprint,
            seed: None,
            choices,
            usage: None,
            speculation: None,
            timings: None,
            prompt_progress: None,
            verbose: None,
        }
    }
}

/// A response or a chunk of one, with choices of type `C`.
#[derive(Serialize)]
struct Envelope<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    /// The seed that reproduces the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    choices: &'a [C],
    /// `Some(None)` is `null`: chunks of a stream that will say it at its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    speculation: Option<&'a Speculation>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<Timings>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_progress: Option<Progress>,
    #[serde(rename = "__verbose", skip_serializing_if = "Option::is_none")]
    verbose: Option<Value>,
}

impl<'a, C> Envelope<'a, C> {
    /// Adds what is known at the end.
    fn with_record(mut self, seed: u64, outcome: &'a RequestOutcome) -> Self {
        self.seed = Some(seed);
        self.speculation = Some(&outcome.speculation);
        self.timings = Some(Timings::new(outcome));
        self
    }
}

/// How one of several answers was written.
#[derive(Serialize)]
struct Record<'a> {
    /// The seed that reproduces the answer alone.
    seed: u64,
    speculation: &'a Speculation,
    timings: Timings,
}

/// The tokens of a stream so far, and where it says them.
#[derive(Clone)]
struct Tally {
    asked: StreamUsage,
    prompt_tokens: usize,
    completion_tokens: usize,
}

impl Tally {
    fn new(asked: StreamUsage) -> Self {
        Tally {
            asked,
            prompt_tokens: 0,
            completion_tokens: 0,
        }
    }

    /// The `usage` of a chunk: absent, or null where it comes at the end, unless every
    /// chunk is to say it. `outcome` is there in the last chunk with choices.
    fn of_chunk(&self, outcome: Option<&RequestOutcome>) -> Option<Option<Usage>> {
        let so_far = || Usage::so_far(self.prompt_tokens, self.completion_tokens);
        match self.asked {
            StreamUsage {
                in_chunks: true, ..
            } => Some(Some(outcome.map_or_else(so_far, Usage::new))),
            StreamUsage { at_end: true, .. } => Some(None),
            StreamUsage { .. } => None,
        }
    }
}

/// Tokens of a request.
#[derive(Clone, Copy, Serialize)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    /// Absent as long as it is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens_details: Option<PromptDetails>,
    /// Absent where no token was told apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_tokens_details: Option<TokenDetails>,
}

/// Which of the prompt's tokens did not have to run, and which stand for media.
#[derive(Clone, Copy, Serialize)]
struct PromptDetails {
    cached_tokens: usize,
    /// Absent of a prompt without pictures.
    #[serde(skip_serializing_if = "Option::is_none")]
    image_tokens: Option<usize>,
    /// Absent of a prompt without video.
    #[serde(skip_serializing_if = "Option::is_none")]
    video_tokens: Option<usize>,
    /// Absent of a prompt without sounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    audio_tokens: Option<usize>,
}

/// Which of the tokens written are not the answer's.
#[derive(Clone, Copy, Serialize)]
struct TokenDetails {
    reasoning_tokens: usize,
}

impl Usage {
    /// The usage of a request that still runs.
    fn so_far(prompt_tokens: usize, completion_tokens: usize) -> Self {
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: None,
            completion_tokens_details: None,
        }
    }

    fn new(outcome: &RequestOutcome) -> Self {
        let engine::Usage {
            prompt_tokens,
            cached_tokens,
            media_tokens,
            completion_tokens,
            reasoning_tokens,
        } = outcome.usage;
        let some = |n: usize| (n > 0).then_some(n);
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: Some(PromptDetails {
                cached_tokens,
                image_tokens: some(media_tokens.pictures),
                video_tokens: some(media_tokens.videos),
                audio_tokens: some(media_tokens.sounds),
            }),
            completion_tokens_details: (reasoning_tokens > 0)
                .then_some(TokenDetails { reasoning_tokens }),
        }
    }

    /// The usage of a request for `n` answers to each of its prompts, which ended so: each prompt
    /// counts once.
    fn of_all(outcomes: &[&RequestOutcome], n: usize) -> Self {
        let mut prompts = outcomes.iter().step_by(n).map(|of| Usage::new(of));
        let mut all = prompts.next().expect("a request has an answer");
        for usage in prompts {
            all.prompt_tokens += usage.prompt_tokens;
            if let (Some(all), Some(one)) =
                (&mut all.prompt_tokens_details, usage.prompt_tokens_details)
            {
                all.cached_tokens += one.cached_tokens;
            }
        }
        let written = outcomes.iter().map(|of| of.usage);
        all.completion_tokens = written.clone().map(|u| u.completion_tokens).sum();
        all.total_tokens = all.prompt_tokens + all.completion_tokens;
        let reasoning_tokens = written.map(|u| u.reasoning_tokens).sum();
        all.completion_tokens_details =
            (reasoning_tokens > 0).then_some(TokenDetails { reasoning_tokens });
        all
    }
}

/// Times, under llama-server's names.
#[derive(Serialize)]
pub(crate) struct Timings {
    queued_ms: f64,
    /// Tokens of the prompt that another request had left, and those that ran.
    cache_n: usize,
    prompt_n: usize,
    prompt_ms: f64,
    prompt_per_token_ms: f64,
    prompt_per_second: f64,
    predicted_n: usize,
    predicted_ms: f64,
    predicted_per_token_ms: f64,
    predicted_per_second: f64,
    /// Absent as long as they are not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    draft_n: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    draft_n_accepted: Option<u64>,
    /// How often the request was preempted; absent if never, and while it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    preemptions: Option<u64>,
}

impl Timings {
    /// The times of a request that has ended.
    pub(crate) fn new(outcome: &RequestOutcome) -> Self {
        let times = outcome.timings;
        let (prompt_n, predicted_n) = (
            outcome.usage.prompt_tokens - outcome.usage.cached_tokens,
            outcome.usage.completion_tokens,
        );
        Timings {
            queued_ms: times.queued_ms,
            cache_n: outcome.usage.cached_tokens,
            prompt_n,
            prompt_ms: times.prefill_ms,
            prompt_per_token_ms: share(times.prefill_ms, prompt_n),
            prompt_per_second: times.prefill_tokens_per_second,
            predicted_n,
            predicted_ms: times.decode_ms,
            predicted_per_token_ms: share(times.decode_ms, predicted_n.saturating_sub(1)),
            predicted_per_second: times.decode_tokens_per_second,
            draft_n: Some(outcome.speculation.drafted),
            draft_n_accepted: Some(outcome.speculation.accepted),
            preemptions: Some(times.preemptions).filter(|&n| n > 0),
        }
    }

    /// The times of a request that still runs, as the server sees them.
    pub(crate) fn so_far(run: &Run) -> Self {
        let so_far = run.so_far();
        let prompt_n = so_far.prompt_tokens - so_far.cached_tokens;
        let since_first = so_far.written.saturating_sub(1);
        Timings {
            queued_ms: so_far.queued_ms,
            cache_n: so_far.cached_tokens,
            prompt_n,
            prompt_ms: so_far.prompt_ms,
            prompt_per_token_ms: share(so_far.prompt_ms, prompt_n),
            prompt_per_second: rate(prompt_n, so_far.prompt_ms),
            predicted_n: so_far.written,
            predicted_ms: so_far.written_ms,
            predicted_per_token_ms: share(so_far.written_ms, since_first),
            predicted_per_second: rate(since_first, so_far.written_ms),
            draft_n: None,
            draft_n_accepted: None,
            preemptions: None,
        }
    }
}

/// `ms` for each of `n`; 0 if there is none.
fn share(ms: f64, n: usize) -> f64 {
    match n {
        0 => 0.0,
        n => ms / n as f64,
    }
}

/// `n` in `ms`, a second; 0 in no time.
fn rate(n: usize, ms: f64) -> f64 {
    match ms > 0.0 {
        true => n as f64 / ms * 1e3,
        false => 0.0,
    }
}

/// OpenAI's word for the end of a text.
fn finish_reason(finish: &FinishReason) -> &'static str {
    match finish {
        FinishReason::Length => "length",
        FinishReason::ToolCalls => "tool_calls",
        FinishReason::Stop | FinishReason::StopString(_) | FinishReason::Cancelled => "stop",
    }
}

/// A whole JSON document.
pub(crate) fn bytes(document: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(document).expect("responses have string keys")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn errors_have_openai_s_shape() {
        let document = error(&ApiError::field("top_p", "is odd"));
        let document: Value = serde_json::from_str(&document).unwrap();
        assert_eq!(
            document,
            json!({"error": {"message": "`top_p` is odd", "type": "invalid_request_error", "param": "top_p", "code": null}})
        );
    }
}
