//! `POST /v1/completions`: a prompt as text or as token ids, no template.

use std::sync::Arc;

use axum::http::HeaderMap;
use engine::{Channel, RequestOutcome};
use serde::Serialize;
use serde_json::{Map, Value};
use text::Infill;

use super::logprobs::{self, CompletionLogprobs};
use super::{Meta, Record, StreamUsage, Tally, bytes, finish_reason, structured, tables, trace};
use crate::app::App;
use crate::dialect::{Answer, Endpoint};
use crate::errors::ApiError;
use crate::fields::{Fields, ignored_header};
use crate::generation::{Piece, Prefill};
use crate::limits::{Limits, PROMPTS_MAX};
use crate::llama::completion::{check_infill, end_at_marks};
use crate::options::{Options, answers};
use crate::request::{Asked, Prompt};
use crate::run::Run;
use crate::sse::{Frames, StreamFormat};

const OBJECT: &str = "text_completion";

/// OpenAI's default for `max_tokens` of this endpoint.
const MAX_TOKENS: usize = 16;

/// A continuation of a prompt, whole or as a stream.
#[derive(Clone)]
pub(crate) struct Completion {
    meta: Meta,
    /// Number of the answer.
    index: usize,
    tally: Tally,
    has_logprobs: bool,
    has_trace: bool,
    /// Characters sent, as far as tokens tell.
    offset: usize,
}

impl Endpoint for Completion {
    fn body_bytes(limits: &Limits) -> usize {
        limits.body_bytes
    }

    fn read(
        mut object: Map<String, Value>,
        _headers: &HeaderMap,
        app: &Arc<App>,
    ) -> Result<(Asked, Self), ApiError> {
        let prompt = object.remove("prompt").unwrap_or_default();
        let has_trace = trace::take(&mut object)?;
        let fields = Fields::new(&object, &tables::COMPLETIONS);
        let model = app.check_model(&fields)?;
        fields.refuse()?;
        let mut options = Options::read(&fields, app, &super::NAMES, Some(MAX_TOKENS))?;
        options.trace = has_trace;
        options.n = answers(&fields)?;
        let usage = StreamUsage::read(&fields, options.stream)?;
        options.logprobs = logprobs::read_completion(&fields)?;
        options.grammar = structured::read(&fields)?;
        let suffix = fields.string("suffix")?.filter(|suffix| !suffix.is_empty());
        let mut prompt = prompt_of(prompt)?;
        if let Some(suffix) = suffix {
            prompt = with_suffix(prompt, suffix, app)?;
            end_at_marks(&mut options, app);
        }
        let mut meta = Meta::new(app, model, "cmpl", &options);
        options.wants = meta.read_live(&fields, &options, &object)?;
        let ignored = ignored_header(&fields);
        let completion = Completion {
            meta,
            index: 0,
            tally: Tally::new(usage),
            has_logprobs: options.logprobs.is_some(),
            has_trace,
            offset: 0,
        };
        let asked = Asked {
            prompt,
            options,
            ignored,
        };
        Ok((asked, completion))
    }

    fn choices(mut self, n: usize) -> Vec<Self> {
        self.meta.n_choices = n;
        let choice = |index| Self {
            index,
            ..self.clone()
        };
        (0..n).map(choice).collect()
    }

    fn begin(&mut self, prompt_tokens: usize) {
        self.tally.prompt_tokens = prompt_tokens;
    }

    fn note_prompt(&mut self, prompt: &[u32]) {
        self.meta.note_prompt(prompt);
    }

    fn note_run(&mut self, run: &Arc<Run>) {
        self.meta.note_run(run);
    }

    fn document(&self, answers: &[Answer]) -> Vec<u8> {
        let choices = answers.iter().enumerate();
        let texts = answers.iter();
        let texts: Vec<_> = texts
            .map(|answer| answer.whole.text(Channel::Answer))
            .collect();
        let choices = choices
            .zip(&texts)
            .map(|((i, answer), texts)| self.choice(i, answer, texts));
        let choices: Vec<_> = choices.collect();
        let outcomes: Vec<_> = answers.iter().map(|answer| &*answer.outcome).collect();
        let whole = answers.first().map(|answer| &answer.whole);
        let mut document = self.meta.ended(OBJECT, &choices, &outcomes);
        document.verbose = self.meta.verbose(&texts[0], whole, outcomes[0]);
        bytes(&document)
    }
}

/// The prompt of what fills the gap between `prompt` and `suffix`, the field of that name.
pub(crate) fn with_suffix(prompt: Prompt, suffix: &str, app: &App) -> Result<Prompt, ApiError> {
    const NAME: &str = "suffix";
    check_infill(app, NAME)?;
    match prompt {
        Prompt::Text(prefix) => Ok(Prompt::Infill(Infill {
            prefix,
            suffix: suffix.to_owned(),
            room: usize::MAX,
            ..Infill::default()
        })),
        Prompt::Several(prompts) => {
            let prompts = prompts.into_iter().map(|one| with_suffix(one, suffix, app));
            prompts.collect::<Result<_, _>>().map(Prompt::Several)
        }
        _ => Err(ApiError::field(NAME, "needs a prompt that is a text")),
    }
}

/// A string, a list of token ids, or a list of these.
fn prompt_of(prompt: Value) -> Result<Prompt, ApiError> {
    const NAME: &str = "prompt";
    let wrong = || {
        let message =
            "must be a string, a list of token ids, or a list of strings or of such lists";
        ApiError::field(NAME, message)
    };
    match prompt {
        Value::Null => Err(ApiError::field(NAME, "is missing")),
        Value::String(text) if text.is_empty() => Err(ApiError::field(NAME, "is empty")),
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(list) if list.iter().any(|one| one.is_string() || one.is_array()) => {
            if list.len() > PROMPTS_MAX {
                let message = format!("has {} prompts, {PROMPTS_MAX} at most", list.len());
                return Err(ApiError::field(NAME, message));
            }
            let several = list.into_iter().enumerate().map(|(i, one)| match one {
                Value::String(text) if text.is_empty() => {
                    Err(ApiError::field(format!("{NAME}[{i}]"), "is empty"))
                }
                Value::String(text) => Ok(Prompt::Text(text)),
                Value::Array(ids) => tokens(&ids).ok_or_else(wrong),
                _ => Err(wrong()),
            });
            let several: Vec<Prompt> = several.collect::<Result<_, _>>()?;
            Ok(match <[Prompt; 1]>::try_from(several) {
                Ok([one]) => one,
                Err(several) => Prompt::Several(several),
            })
        }
        Value::Array(ids) => tokens(&ids).ok_or_else(wrong),
        _ => Err(wrong()),
    }
}

/// A prompt of token ids, if the list is one.
pub(crate) fn tokens(list: &[Value]) -> Option<Prompt> {
    let ids = list.iter().map(|id| u32::try_from(id.as_u64()?).ok());
    ids.collect::<Option<_>>().map(Prompt::Tokens)
}

#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    text: &'a str,
    logprobs: Option<CompletionLogprobs<'a>>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace: Option<Vec<trace::Round<'a>>>,
    #[serde(flatten)]
    record: Option<Record<'a>>,
}

impl Completion {
    /// The answer number `index`, whole.
    fn choice<'a>(&'a self, index: usize, answer: &'a Answer, text: &'a str) -> Choice<'a> {
        let Answer { whole, outcome } = answer;
        let logprobs = || CompletionLogprobs::new(whole, self.meta.tokenizer(), &mut 0);
        Choice {
            index,
            text,
            logprobs: self.has_logprobs.then(logprobs),
            finish_reason: Some(finish_reason(&outcome.finish)),
            trace: self.has_trace.then(|| self.meta.trace(whole)),
            record: self.meta.record_of(index, outcome),
        }
    }

    fn chunk(
        &self,
        text: &str,
        logprobs: Option<CompletionLogprobs<'_>>,
        trace: Option<Vec<trace::Round<'_>>>,
        finish: Option<&RequestOutcome>,
        frames: &mut Frames,
    ) {
        let finish_reason = finish.map(|outcome| finish_reason(&outcome.finish));
        let choices = [Choice {
            index: self.index,
            text,
            logprobs,
            finish_reason,
            trace,
            record: finish.and_then(|outcome| self.meta.record_of(self.index, outcome)),
        }];
        let mut chunk = self.meta.envelope(OBJECT, &choices);
        chunk.usage = self.tally.of_chunk(finish);
        chunk.timings = self.meta.timings_so_far().filter(|_| finish.is_none());
        let is_alone = self.meta.n_choices == 1;
        if let Some(outcome) = finish.filter(|_| is_alone && !self.tally.asked.at_end) {
            chunk = chunk.with_record(self.meta.seed, outcome);
        }
        if let Some(outcome) = finish.filter(|_| self.index == 0) {
            chunk.verbose = self.meta.verbose("", None, outcome);
        }
        frames.data(&chunk);
    }
}

impl StreamFormat for Completion {
    /// The format has no chunk without text; the headers are the sign of life.
    fn open(&mut self, _frames: &mut Frames) {}

    fn text(&mut self, piece: &Piece, frames: &mut Frames) {
        self.tally.completion_tokens += piece.n_tokens;
        let mut offset = self.offset;
        let whole = || CompletionLogprobs::new(piece, self.meta.tokenizer(), &mut offset);
        let logprobs = self.has_logprobs.then(whole);
        let trace = (!piece.rounds.is_empty()).then(|| self.meta.trace(piece));
        self.chunk(&piece.text(Channel::Answer), logprobs, trace, None, frames);
        self.offset = offset;
    }

    fn prefill(&mut self, prefill: Prefill, frames: &mut Frames) {
        let choices = [Choice {
            index: self.index,
            text: "",
            logprobs: None,
            finish_reason: None,
            trace: None,
            record: None,
        }];
        let mut chunk = self.meta.envelope(OBJECT, &choices);
        chunk.usage = self.tally.of_chunk(None);
        chunk.prompt_progress = Some(self.meta.progress(prefill));
        frames.data(&chunk);
    }

    fn end(&mut self, outcome: &RequestOutcome, frames: &mut Frames) {
        self.chunk("", None, None, Some(outcome), frames);
    }

    fn close(&mut self, outcomes: &[Box<RequestOutcome>], frames: &mut Frames) {
        if self.tally.asked.at_end {
            let nothing: [Choice<'_>; 0] = [];
            let outcomes: Vec<_> = outcomes.iter().map(|outcome| &**outcome).collect();
            frames.data(&self.meta.ended(OBJECT, &nothing, &outcomes));
        }
        frames.raw("[DONE]");
    }

    fn refuse(error: &ApiError, frames: &mut Frames) {
        frames.raw(&super::error(error));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn prompts_are_texts_or_tokens() {
        let text = |text: &str| Some(Prompt::Text(text.into()));
        for (value, prompt) in [
            (json!("a"), text("a")),
            (json!(["a"]), text("a")),
            (json!([1, 2]), Some(Prompt::Tokens(vec![1, 2]))),
            (json!([[1, 2]]), Some(Prompt::Tokens(vec![1, 2]))),
            (json!([[7]]), Some(Prompt::Tokens(vec![7]))),
            (json!([7]), Some(Prompt::Tokens(vec![7]))),
            (json!([]), Some(Prompt::Tokens(vec![]))),
            (json!(null), None),
            (json!(""), None),
            (json!([""]), None),
            (json!(1), None),
            (json!({}), None),
            (
                json!(["a", "b"]),
                Some(Prompt::Several(
                    ["a", "b"].map(|t| Prompt::Text(t.into())).into(),
                )),
            ),
            (
                json!([[1], [2, 3], "a"]),
                Some(Prompt::Several(vec![
                    Prompt::Tokens(vec![1]),
                    Prompt::Tokens(vec![2, 3]),
                    Prompt::Text("a".into()),
                ])),
            ),
            (json!([1, "a"]), None),
            (json!(["a", ""]), None),
            (json!(vec!["a"; PROMPTS_MAX + 1]), None),
            (json!([1.5, 2]), None),
            (json!([-1, 2]), None),
            (json!([4294967296_u64]), None),
            (json!([true]), None),
            (json!([[["a"]]]), None),
        ] {
            assert_eq!(prompt_of(value.clone()).ok(), prompt, "{value}");
        }
    }
}
