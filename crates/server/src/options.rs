//! The options that requests of all dialects share: sampling, length, stops, streaming,
//! speculation. Dialects differ in the names of some ([`Names`]).
//!
//! Where a request is silent, the checkpoint's `generation_config.json` speaks,
//! then OpenAI's defaults; the command line does the same.

use engine::{
    DraftLength, Engine, GrammarSpec, Request, SAMPLER_NUMBERS, Sampling, ToolUse, Tools,
};
use serde_json::Value;
use text::sampling::LOGIT_BIAS;
use text::stop::{STOP_CHARS_MAX, STOPS_MAX};

use crate::errors::ApiError;
use crate::fields::{Fields, Unsupported, unless, whole};
use crate::ids;
use crate::limits::LOGIT_BIAS_MAX;
use crate::request::Offer;

/// Largest `top_k`; no vocabulary is larger.
const TOP_K_MAX: i64 = 1 << 24;
/// Largest `max_tokens`; no context is longer.
const MAX_TOKENS_MAX: i64 = u32::MAX as i64;

/// How much of the text penalties look at: all of it here, so any other number changes
/// the text where one is set.
const LAST_TOKENS: &[Unsupported] = &[unless("repeat_last_n", "[-1]")];

/// The names of fields in which dialects differ.
#[derive(Debug)]
pub(crate) struct Names {
    /// The most tokens to write; where several are there, the first counts.
    pub(crate) max_tokens: &'static [&'static str],
    /// Strings that end the text.
    pub(crate) stop: &'static str,
    /// Other names of sampling options, each with the option's own.
    pub(crate) sampling: &'static [(&'static str, &'static str)],
}

/// The options of one request.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) sampling: Sampling,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) stop: Vec<String>,
    pub(crate) ignore_eos: bool,
    pub(crate) show_specials: bool,
    pub(crate) draft: Option<DraftLength>,
    /// Whether reasoning comes apart from the answer; its marks are text where it does not and
    /// `shows_reasoning_marks` is set.
    pub(crate) splits_reasoning: bool,
    pub(crate) shows_reasoning_marks: bool,
    /// Whether tokens come with log-probabilities, and with how many of the likeliest.
    pub(crate) logprobs: Option<usize>,
    /// What the model may call.
    pub(crate) tools: Option<Offer>,
    pub(crate) stream: bool,
    /// What the answer has to follow.
    pub(crate) grammar: Option<Grammar>,
    /// Tokens of reasoning, at most.
    pub(crate) reasoning_budget: Option<usize>,
}

/// What an answer has to follow, and the field that says so.
#[derive(Clone, Debug)]
pub(crate) struct Grammar {
    /// Path of the field.
    pub(crate) field: String,
    pub(crate) spec: GrammarSpec,
}

impl Options {
    /// Reads and checks the options. `max_tokens` is what silence about that means.
    pub(crate) fn read(
        fields: &Fields<'_>,
        engine: &Engine,
        names: &Names,
        max_tokens: Option<usize>,
    ) -> Result<Self, ApiError> {
        let stream = fields.bool("stream")?.unwrap_or(false);
        let mut limit = None;
        for &name in names.max_tokens {
            // -1 is how clients of several local servers spell "no limit".
            limit = limit.or(fields.integer(name, -1..=MAX_TOKENS_MAX)?);
        }
        Ok(Options {
            sampling: sampling(fields, engine, names.sampling)?,
            max_tokens: limit.map_or(max_tokens, |n| usize::try_from(n).ok()),
            stop: stop(fields, names.stop)?,
            ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
            show_specials: !fields.bool("skip_special_tokens")?.unwrap_or(true),
            draft: speculation(fields, engine.info().draft_max)?,
            splits_reasoning: false,
            shows_reasoning_marks: false,
            logprobs: None,
            tools: None,
            stream,
            grammar: None,
            reasoning_budget: None,
        })
    }

    /// The engine's request for `prompt`, with an answer that follows `grammar`.
    pub(crate) fn request(self, prompt: Vec<u32>, grammar: Option<engine::Grammar>) -> Request {
        Request {
            prompt,
            sampling: self.sampling,
            max_tokens: self.max_tokens,
            stop: self.stop,
            ignore_eos: self.ignore_eos,
            show_specials: self.show_specials,
            splits_reasoning: self.splits_reasoning,
            shows_reasoning_marks: self.shows_reasoning_marks,
            tools: self.tools.map(|offer| ToolUse {
                tools: Tools::new(&offer.definitions).into(),
                calls_max: offer.calls_max,
            }),
            draft: self.draft,
            logprobs: self.logprobs,
            grammar,
            reasoning_budget: self.reasoning_budget,
        }
    }
}

fn sampling(
    fields: &Fields<'_>,
    engine: &Engine,
    aliases: &[(&'static str, &'static str)],
) -> Result<Sampling, ApiError> {
    let advice = &engine.text().sampling;
    let mut sampling = Sampling {
        top_k: match fields.integer("top_k", -1..=TOP_K_MAX)? {
            // Servers differ in which of the two means "all"; neither means none.
            Some(k) => usize::try_from(k).unwrap_or(0),
            None => advice.top_k.map_or(0, |k| k as usize),
        },
        suppress: advice.suppress_tokens.clone(),
        ..Sampling::default()
    };
    for option in SAMPLER_NUMBERS {
        if let Some(advised) = (option.advised)(advice) {
            (option.set)(&mut sampling, advised);
        }
        let aliases = aliases.iter().filter(|(_, own)| *own == option.name);
        for name in [option.name]
            .into_iter()
            .chain(aliases.map(|(name, _)| *name))
        {
            if let Some(number) = fields.number(name, option.range.clone())? {
                (option.set)(&mut sampling, number as f32);
            }
        }
    }
    let penalties = [
        sampling.repetition_penalty - 1.0,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    ];
    if penalties.iter().any(|&p| p != 0.0) {
        fields.refuse(LAST_TOKENS)?;
    } else {
        fields.integer(LAST_TOKENS[0].field, -1..=MAX_TOKENS_MAX)?;
    }
    sampling.logit_bias = logit_bias(fields, engine.info().vocab_size)?;
    sampling.seed = seed(fields)?;
    Ok(sampling)
}

/// Any 64-bit number, signed or not; a new one if there is none.
fn seed(fields: &Fields<'_>) -> Result<u64, ApiError> {
    let Some(value) = fields.get("seed") else {
        return Ok(ids::random_seed());
    };
    let seed = value
        .as_u64()
        .or_else(|| whole(value).map(i64::cast_unsigned));
    seed.ok_or_else(|| fields.error("seed", "must be a whole number that fits 64 bits"))
}

fn logit_bias(fields: &Fields<'_>, vocab_size: usize) -> Result<Vec<(u32, f32)>, ApiError> {
    const NAME: &str = "logit_bias";
    let Some(map) = fields.object(NAME)? else {
        return Ok(Vec::new());
    };
    if map.len() > LOGIT_BIAS_MAX {
        return Err(fields.error(
            NAME,
            format!("has {} entries, {LOGIT_BIAS_MAX} at most", map.len()),
        ));
    }
    let entry = |(id, bias): (&String, &Value)| {
        let id = id
            .parse::<u32>()
            .ok()
            .filter(|&id| (id as usize) < vocab_size);
        let bias = bias.as_f64().filter(|bias| LOGIT_BIAS.contains(bias));
        Some((id?, bias? as f32))
    };
    let wrong = || {
        let message = format!(
            "must be an object from token ids below {vocab_size} to numbers from -100 to 100"
        );
        fields.error(NAME, message)
    };
    map.iter()
        .map(entry)
        .collect::<Option<_>>()
        .ok_or_else(wrong)
}

/// A string or a list of strings.
fn stop(fields: &Fields<'_>, name: &'static str) -> Result<Vec<String>, ApiError> {
    let wrong = || fields.error(name, "must be a string or a list of strings");
    let stops = match fields.get(name) {
        None => return Ok(Vec::new()),
        Some(Value::String(stop)) => vec![stop.clone()],
        Some(Value::Array(list)) => {
            if list.len() > STOPS_MAX {
                let message = format!("has {} strings, {STOPS_MAX} at most", list.len());
                return Err(fields.error(name, message));
            }
            let strings = list.iter().map(|stop| stop.as_str().map(str::to_owned));
            strings.collect::<Option<Vec<_>>>().ok_or_else(wrong)?
        }
        Some(_) => return Err(wrong()),
    };
    for stop in &stops {
        let n_chars = stop.chars().count();
        if n_chars == 0 {
            return Err(fields.error(name, "has an empty string; leave that out"));
        }
        if n_chars > STOP_CHARS_MAX {
            let message = format!("has a string of {n_chars} characters, {STOP_CHARS_MAX} at most");
            return Err(fields.error(name, message));
        }
    }
    Ok(stops)
}

/// `"auto"`, `"off"` or `{"draft_max": N}`.
fn speculation(fields: &Fields<'_>, limit: usize) -> Result<Option<DraftLength>, ApiError> {
    const NAME: &str = "speculation";
    let wrong = || fields.error(NAME, "must be \"auto\", \"off\" or {\"draft_max\": N}");
    match fields.get(NAME) {
        None => Ok(None),
        Some(Value::String(word)) if word == "auto" => Ok(None),
        Some(Value::String(word)) if word == "off" => Ok(Some(DraftLength::UpTo(0))),
        Some(Value::Object(map)) if map.keys().all(|key| key == "draft_max") => {
            let inner = fields.inside(map, "speculation.");
            let draft_max =
                inner.integer("draft_max", 0..=i64::try_from(limit).unwrap_or(i64::MAX))?;
            let draft_max = draft_max.and_then(|n| usize::try_from(n).ok());
            Ok(draft_max.map(DraftLength::UpTo))
        }
        Some(_) => Err(wrong()),
    }
}
