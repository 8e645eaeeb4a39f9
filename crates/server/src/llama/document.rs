//! The documents of an answer: the last one, which is the only one of a whole answer, and the
//! chunks before it in a stream.

use std::sync::{Arc, OnceLock};

use engine::{DRY_BREAKERS, FinishReason, RequestOutcome, Speculation};
use serde::Serialize;
use serde_json::{Map, Value, json};
use text::{Specials, Tokenizer};

use super::probabilities::Entry;
use super::settings::{self, Asked};
use crate::app::App;
use crate::generation::{Piece, Prefill};
use crate::openai::Timings;
use crate::options::{Options, seed_of};
use crate::run::Run;

/// What an answer is to hold beside its text.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shape {
    /// Whether a whole answer has its token ids.
    pub(super) returns_tokens: bool,
    /// Whether chunks have times.
    pub(super) has_timings: bool,
    /// The fields that the last document has; all if there are none.
    pub(super) fields: Vec<String>,
}

/// How all answers to one request are spelled.
pub(crate) struct Spelling {
    app: Arc<App>,
    model: String,
    options: Options,
    asked: Asked,
    pub(super) shape: Shape,
}

/// What becomes known of a request on its way.
#[derive(Clone, Default)]
pub(crate) struct Note {
    /// The tokens of the prompt.
    pub(crate) prompt: OnceLock<Vec<u32>>,
    /// Where it can be seen how far the request is.
    pub(crate) run: OnceLock<Arc<Run>>,
}

/// The last document of an answer, or what was asked for of it.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Document<'a> {
    Whole(Box<Last<'a>>),
    Part(Value),
}

/// The last document of an answer.
#[derive(Serialize)]
pub(super) struct Last<'a> {
    index: usize,
    content: &'a str,
    tokens: Vec<u32>,
    id_slot: i64,
    stop: bool,
    model: &'a str,
    tokens_predicted: usize,
    tokens_evaluated: usize,
    generation_settings: Value,
    prompt: String,
    has_new_line: bool,
    truncated: bool,
    stop_type: &'static str,
    stopping_word: &'a str,
    tokens_cached: usize,
    timings: Timings,
    /// What paceline says beside llama-server's fields.
    speculation: &'a Speculation,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_probabilities: Option<Vec<Entry<'a>>>,
}

/// A chunk before the last.
#[derive(Serialize)]
pub(super) struct Chunk<'a> {
    pub(super) index: usize,
    pub(super) content: &'a str,
    pub(super) tokens: Vec<u32>,
    stop: bool,
    id_slot: i64,
    tokens_predicted: usize,
    tokens_evaluated: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<Timings>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_progress: Option<Progress>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) completion_probabilities: Option<Vec<Entry<'a>>>,
}

/// How far a prompt is.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Progress {
    total: usize,
    cache: usize,
    processed: usize,
    time_ms: f64,
}

impl Progress {
    /// The progress of a request that runs.
    pub(crate) fn new(prefill: Prefill, run: Option<&Arc<Run>>) -> Self {
        Progress {
            total: prefill.total,
            cache: prefill.cached,
            processed: prefill.done,
            time_ms: run.map_or(0.0, |run| run.ms()),
        }
    }
}

impl Note {
    fn prompt(&self) -> &[u32] {
        self.prompt.get().map_or(&[], Vec::as_slice)
    }

    /// The slot of the request; -1 as long as it has none.
    fn id_slot(&self) -> i64 {
        let admitted = self.run.get().and_then(|run| run.admitted());
        admitted.map_or(-1, |admitted| admitted.slot as i64)
    }
}

impl Spelling {
    /// The spelling of answers to the request with this body, which has been read as `options`.
    pub(crate) fn new(
        app: &Arc<App>,
        model: String,
        options: &Options,
        body: &Map<String, Value>,
        shape: Shape,
    ) -> Self {
        let breakers = body.get("dry_sequence_breakers").cloned();
        let grammar = body.get("grammar").and_then(Value::as_str);
        Spelling {
            app: app.clone(),
            model,
            asked: Asked {
                breakers: breakers.unwrap_or_else(|| json!(DRY_BREAKERS)),
                grammar: grammar.unwrap_or_default().to_owned(),
                has_timings: shape.has_timings,
            },
            options: options.clone(),
            shape,
        }
    }

    /// How the texts are written.
    pub(super) fn settings(&self) -> Value {
        settings::of_options(&self.options, &self.app.engine, &self.asked)
    }

    pub(super) fn tokenizer(&self) -> &Tokenizer {
        &self.app.engine.text().tokenizer
    }

    /// The probabilities of the tokens of `piece`, if they are asked for.
    fn probabilities<'a>(&'a self, piece: &'a Piece) -> Option<Vec<Entry<'a>>> {
        let of = self.options.logprobs_of;
        let asked = self.options.logprobs.is_some();
        asked.then(|| Entry::of_piece(piece, self.tokenizer(), of))
    }

    /// Whether tokens come with probabilities.
    pub(super) fn has_probabilities(&self) -> bool {
        self.options.logprobs.is_some()
    }

    /// The entry of one token of `piece`, by its number among those with probabilities.
    pub(super) fn probability<'a>(&'a self, piece: &'a Piece, i: usize) -> Option<Entry<'a>> {
        let (_, token, logprobs) = piece.judged().nth(i)?;
        let of = self.options.logprobs_of;
        Some(Entry::new(token, logprobs, self.tokenizer(), of))
    }

    /// A chunk without text.
    pub(super) fn chunk(&self, index: usize, note: &Note) -> Chunk<'_> {
        let run = note.run.get();
        let has_begun = |run: &&Arc<Run>| self.shape.has_timings && run.written() > 0;
        Chunk {
            index,
            content: "",
            tokens: Vec::new(),
            stop: false,
            id_slot: note.id_slot(),
            tokens_predicted: run.map_or(0, |run| run.written()),
            tokens_evaluated: note.prompt().len(),
            timings: run.filter(has_begun).map(|run| Timings::so_far(run)),
            prompt_progress: None,
            completion_probabilities: None,
        }
    }

    /// A chunk that tells how far the prompt is.
    pub(super) fn progress(&self, index: usize, note: &Note, prefill: Prefill) -> Chunk<'_> {
        Chunk {
            prompt_progress: Some(Progress::new(prefill, note.run.get())),
            ..self.chunk(index, note)
        }
    }

    /// The last document of the answer number `index`, whose text is `content`; that of a stream
    /// has no text and no `whole`.
    pub(super) fn last<'a>(
        &'a self,
        index: usize,
        note: &Note,
        content: &'a str,
        whole: Option<&'a Piece>,
        outcome: &'a RequestOutcome,
    ) -> Document<'a> {
        let usage = outcome.usage;
        let n_all = usage.prompt_tokens + usage.completion_tokens;
        let (stop_type, stopping_word) = match &outcome.finish {
            FinishReason::Stop | FinishReason::ToolCalls => ("eos", ""),
            FinishReason::StopString(word) => ("word", word.as_str()),
            FinishReason::Length => ("limit", ""),
            FinishReason::Cancelled => ("none", ""),
        };
        let is_full = n_all >= self.app.engine.info().context;
        let settings = || {
            let mut options = self.options.clone();
            options.sampling.seed = seed_of(options.sampling.seed, index % options.n);
            settings::of_options(&options, &self.app.engine, &self.asked)
        };
        let prompt = || self.tokenizer().detokenize(note.prompt(), Specials::Show);
        let tokens = whole.filter(|_| self.shape.returns_tokens);
        let tokens = tokens.map(|whole| whole.tokens().map(|token| token.id).collect());
        let run = note.run.get();
        let last = Last {
            index,
            content,
            tokens: tokens.unwrap_or_default(),
            id_slot: note.id_slot(),
            stop: true,
            model: &self.model,
            tokens_predicted: usage.completion_tokens,
            tokens_evaluated: usage.prompt_tokens,
            generation_settings: match self.is_asked_for("generation_settings") {
                true => settings(),
                false => Value::Null,
            },
            prompt: match self.is_asked_for("prompt") {
                true => prompt(),
                false => String::new(),
            },
            has_new_line: run.is_some_and(|run| run.has_line_break()),
            truncated: outcome.finish == FinishReason::Length && is_full,
            stop_type,
            stopping_word,
            tokens_cached: n_all,
            timings: Timings::new(outcome),
            speculation: &outcome.speculation,
            completion_probabilities: whole.and_then(|whole| self.probabilities(whole)),
        };
        match self.shape.fields.is_empty() {
            true => Document::Whole(Box::new(last)),
            false => Document::Part(picked(&value(&last), &self.shape.fields)),
        }
    }

    /// The last document of the first answer, as a value.
    pub(crate) fn last_value(
        &self,
        note: &Note,
        content: &str,
        whole: Option<&Piece>,
        outcome: &RequestOutcome,
    ) -> Value {
        value(&self.last(0, note, content, whole, outcome))
    }

    /// Whether the last document has the field `name` or a part of it.
    fn is_asked_for(&self, name: &str) -> bool {
        let fields = &self.shape.fields;
        let mut names = fields.iter().map(|path| path.split('/').next());
        fields.is_empty() || names.any(|field| field == Some(name))
    }
}

/// A document as a value whose numbers have the digits that they are written with.
fn value(document: &impl Serialize) -> Value {
    let text = serde_json::to_vec(document).expect("responses have string keys");
    serde_json::from_slice(&text).expect("it was just written")
}

/// The values of a document at `paths`, each under its path; those that are not there are left out.
fn picked(document: &Value, paths: &[String]) -> Value {
    let at = |path: &String| Some((path.clone(), document.pointer(&format!("/{path}"))?.clone()));
    Value::Object(paths.iter().filter_map(at).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_picked_by_their_paths() {
        let document = json!({"content": "a", "timings": {"prompt_n": 3}, "tokens": [7]});
        let paths = ["content", "timings/prompt_n", "timings/none", "nothing"];
        assert_eq!(
            picked(&document, &paths.map(str::to_owned)),
            json!({"content": "a", "timings/prompt_n": 3})
        );
    }
}
