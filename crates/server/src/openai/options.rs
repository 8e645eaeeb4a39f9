//! The options that chat and plain completion share: sampling, length, stops,
//! streaming, speculation.
//!
//! Where a request is silent, the checkpoint's `generation_config.json` speaks,
//! then OpenAI's defaults; the command line does the same.

use engine::{DraftLength, Engine, Request, Sampling};
use serde_json::Value;
use text::sampling::{LOGIT_BIAS, MIN_P, PENALTY, REPETITION_PENALTY, TEMPERATURE, TOP_P};
use text::stop::{STOP_CHARS_MAX, STOPS_MAX};

use super::tables;
use crate::errors::ApiError;
use crate::fields::{Fields, Unsupported, unless, whole};
use crate::ids;
use crate::limits::LOGIT_BIAS_MAX;

/// Largest `top_k`; no vocabulary is larger.
const TOP_K_MAX: i64 = 1 << 24;
/// Largest `max_tokens`; no context is longer.
const MAX_TOKENS_MAX: i64 = u32::MAX as i64;

/// How much of the text penalties look at: all of it here, so any other number changes
/// the text where one is set.
const LAST_TOKENS: &[Unsupported] = &[unless("repeat_last_n", "[-1]")];

/// The options of one request.
#[derive(Debug)]
pub(super) struct Options {
    pub(super) sampling: Sampling,
    pub(super) max_tokens: Option<usize>,
    pub(super) stop: Vec<String>,
    pub(super) ignore_eos: bool,
    pub(super) show_specials: bool,
    pub(super) draft: Option<DraftLength>,
    pub(super) stream: bool,
    pub(super) usage: StreamUsage,
}

/// Where a stream says how many tokens it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StreamUsage {
    /// In one more chunk at the end, without choices.
    pub(super) at_end: bool,
    /// In every chunk, so far.
    pub(super) in_chunks: bool,
}

impl Options {
    /// Reads and checks them. `max_tokens` are the names of that field, first
    /// come first served, and `max_tokens_default` is what silence means.
    pub(super) fn read(
        fields: &Fields<'_>,
        engine: &Engine,
        max_tokens: &[&'static str],
        max_tokens_default: Option<usize>,
    ) -> Result<Self, ApiError> {
        fields.refuse(tables::REFUSED)?;
        let stream = fields.bool("stream")?.unwrap_or(false);
        let mut limit = None;
        for &name in max_tokens {
            // -1 is how clients of several local servers spell "no limit".
            limit = limit.or(fields.integer(name, -1..=MAX_TOKENS_MAX)?);
        }
        Ok(Options {
            sampling: sampling(fields, engine)?,
            max_tokens: limit.map_or(max_tokens_default, |n| usize::try_from(n).ok()),
            stop: stop(fields)?,
            ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
            show_specials: !fields.bool("skip_special_tokens")?.unwrap_or(true),
            draft: speculation(fields, engine.info().draft_max)?,
            stream,
            usage: stream_usage(fields, stream)?,
        })
    }

    /// The engine's request for `prompt`.
    pub(super) fn request(&self, prompt: Vec<u32>) -> Request {
        Request {
            sampling: self.sampling.clone(),
            max_tokens: self.max_tokens,
            stop: self.stop.clone(),
            ignore_eos: self.ignore_eos,
            show_specials: self.show_specials,
            draft: self.draft,
            ..Request::new(prompt)
        }
    }
}

fn sampling(fields: &Fields<'_>, engine: &Engine) -> Result<Sampling, ApiError> {
    let model = &engine.text().sampling;
    let number = |name, range, default: f32| -> Result<f32, ApiError> {
        Ok(fields.number(name, range)?.map_or(default, |x| x as f32))
    };
    let top_k = match fields.integer("top_k", -1..=TOP_K_MAX)? {
        // Servers differ in which of the two means "all"; neither means none.
        Some(k) => usize::try_from(k).unwrap_or(0),
        None => model.top_k.map_or(0, |k| k as usize),
    };
    // llama-server's name for the same thing.
    let repetition = ["repetition_penalty", "repeat_penalty"];
    let mut repetition_penalty = model.repetition_penalty.unwrap_or(1.0);
    for name in repetition {
        repetition_penalty = number(name, REPETITION_PENALTY, repetition_penalty)?;
    }
    let presence_penalty = number("presence_penalty", PENALTY, 0.0)?;
    let frequency_penalty = number("frequency_penalty", PENALTY, 0.0)?;
    let penalties = [
        repetition_penalty - 1.0,
        presence_penalty,
        frequency_penalty,
    ];
    if penalties.iter().any(|&p| p != 0.0) {
        fields.refuse(LAST_TOKENS)?;
    } else {
        fields.integer(LAST_TOKENS[0].field, -1..=MAX_TOKENS_MAX)?;
    }
    Ok(Sampling {
        temperature: number("temperature", TEMPERATURE, model.temperature())?,
        top_k,
        top_p: number("top_p", TOP_P, model.top_p.unwrap_or(1.0))?,
        min_p: number("min_p", MIN_P, model.min_p.unwrap_or(0.0))?,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        logit_bias: logit_bias(fields, engine.info().vocab_size)?,
        suppress: model.suppress_tokens.clone(),
        seed: seed(fields)?,
    })
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
fn stop(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    const NAME: &str = "stop";
    let wrong = || fields.error(NAME, "must be a string or a list of strings");
    let stops = match fields.get(NAME) {
        None => return Ok(Vec::new()),
        Some(Value::String(stop)) => vec![stop.clone()],
        Some(Value::Array(list)) => {
            if list.len() > STOPS_MAX {
                let message = format!("has {} strings, {STOPS_MAX} at most", list.len());
                return Err(fields.error(NAME, message));
            }
            let strings = list.iter().map(|stop| stop.as_str().map(str::to_owned));
            strings.collect::<Option<Vec<_>>>().ok_or_else(wrong)?
        }
        Some(_) => return Err(wrong()),
    };
    for stop in &stops {
        let n_chars = stop.chars().count();
        if n_chars == 0 {
            return Err(fields.error(NAME, "has an empty string; leave that out"));
        }
        if n_chars > STOP_CHARS_MAX {
            let message = format!("has a string of {n_chars} characters, {STOP_CHARS_MAX} at most");
            return Err(fields.error(NAME, message));
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
            let inner = Fields::inside(map, "speculation.");
            let draft_max =
                inner.integer("draft_max", 0..=i64::try_from(limit).unwrap_or(i64::MAX))?;
            let draft_max = draft_max.and_then(|n| usize::try_from(n).ok());
            Ok(draft_max.map(DraftLength::UpTo))
        }
        Some(_) => Err(wrong()),
    }
}

fn stream_usage(fields: &Fields<'_>, stream: bool) -> Result<StreamUsage, ApiError> {
    let Some(map) = fields.object("stream_options")? else {
        return Ok(StreamUsage::default());
    };
    if !stream {
        return Err(fields.error("stream_options", "needs `stream: true`"));
    }
    let inner = Fields::inside(map, "stream_options.");
    let usage = StreamUsage {
        at_end: inner.bool("include_usage")?.unwrap_or(false),
        in_chunks: inner.bool("continuous_usage_stats")?.unwrap_or(false),
    };
    fields.note_ignored(inner.ignored());
    Ok(usage)
}
