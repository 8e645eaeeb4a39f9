//! The options that requests of all dialects share: sampling, length, stops, streaming,
//! speculation. Dialects differ in the names of some ([`Names`]).
//!
//! Where a request is silent, the server's [`Defaults`](crate::Defaults) speak, then the checkpoint's
//! `generation_config.json`, then OpenAI's defaults.

use std::sync::Arc;

use engine::{
    Channel, DRY_BREAKERS, Engine, LineLimits, LogprobsOf, Mirostat, Namespace, Request,
    SAMPLER_NUMBERS, Sampling, ToolUse, Tools, TopLogprobs, sequence_breakers,
};
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::ops::RangeInclusive;
use std::time::Duration;
use text::Text;
use text::sampling::{LOGIT_BIAS, TEMPERATURE};
use text::stop::{STOP_CHARS_MAX, STOPS_MAX};

use crate::app::Loaded;
use crate::auth::Caller;
use crate::errors::ApiError;
use crate::fields::{Fields, whole};
use crate::generation::Wants;
use crate::grammar::AnswerGrammar;
use crate::ids;
use crate::limits::{DRY_BREAKER_CHARS_MAX, DRY_BREAKERS_MAX, LOGIT_BIAS_MAX, STOP_TOKENS_MAX};
use crate::offer::{Offer, OfferFields, hold};
use crate::samplers;
use crate::speculation::Speculation;

/// Largest `top_k`; no vocabulary is larger.
const TOP_K_MAX: i64 = 1 << 24;
/// Largest `max_tokens`; no context is longer.
const MAX_TOKENS_MAX: i64 = u32::MAX as i64;

/// What the numbers of mirostat may be.
const MIROSTAT: RangeInclusive<f64> = 0.0..=100.0;

/// Whose turn it is, as vLLM counts it: the smallest comes first.
const PRIORITY: RangeInclusive<i64> = -1000..=1000;
/// Seconds that a request may take.
const TIMEOUT: RangeInclusive<f64> = 0.001..=86_400.0;

/// Most answers to one prompt.
const N_MAX: i64 = 128;
/// Fields that are the number of answers to one prompt; the second is llama-server's.
const N: &[&str] = &["n", "n_cmpl"];

/// The names of fields in which dialects differ.
#[derive(Debug)]
pub(crate) struct Names {
    /// The most tokens to write; where several are there, the first counts.
    pub(crate) max_tokens: &'static [&'static str],
    /// Strings that end the text.
    pub(crate) stop: &'static str,
    /// Other names of sampling options, each with the option's own.
    pub(crate) sampling: &'static [(&'static str, &'static str)],
    /// Whether llama-server's sampler `infill` is passed over, instead of refused.
    pub(crate) passes_infill: bool,
}

/// The options of one request.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) sampling: Sampling,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) stop: Vec<String>,
    pub(crate) stop_token_ids: Vec<u32>,
    pub(crate) ignore_eos: bool,
    pub(crate) show_specials: bool,
    pub(crate) speculation: Speculation,
    /// Whether reasoning comes apart from the answer; its marks are text where it does not and
    /// `shows_reasoning_marks` is set.
    pub(crate) splits_reasoning: bool,
    pub(crate) shows_reasoning_marks: bool,
    /// Whether tokens come with log-probabilities, and with how many of the likeliest.
    pub(crate) logprobs: Option<usize>,
    /// What these say.
    pub(crate) logprobs_of: LogprobsOf,
    /// What is told beside the text.
    pub(crate) wants: Wants,
    /// Whether rounds say what they did.
    pub(crate) trace: bool,
    /// What the model may call.
    pub(crate) tools: Option<Offer>,
    pub(crate) stream: bool,
    /// Answers to each prompt.
    pub(crate) n: usize,
    /// What the answer has to follow.
    pub(crate) grammar: Option<AnswerGrammar>,
    /// Tokens of reasoning, at most.
    pub(crate) reasoning_budget: Option<usize>,
    /// Whose texts the prompts may begin like in the prefix cache.
    pub(crate) namespace: Namespace,
    /// Whether the prompts are looked for in the prefix cache.
    pub(crate) reuse: bool,
    /// Whose turn it is when requests wait; the smallest comes first.
    pub(crate) priority: i64,
    /// How long the request may take, with the time that it waits.
    pub(crate) timeout: Option<Duration>,
    /// Limits that count from the text's first line break.
    pub(crate) lines: LineLimits,
}

impl Options {
    /// Reads and checks the options of a request for `model`. `max_tokens` is what silence about that
    /// means, where the server has no default.
    pub(crate) fn read(
        fields: &Fields<'_>,
        model: &Loaded,
        names: &Names,
        max_tokens: Option<usize>,
    ) -> Result<Self, ApiError> {
        let engine = &model.engine;
        let stream = fields.bool("stream")?.unwrap_or(false);
        let mut limit = None;
        for &name in names.max_tokens {
            // -1 is how clients of several local servers spell "no limit".
            limit = limit.or(fields.integer(name, -1..=MAX_TOKENS_MAX)?);
        }
        let silent = model.settings.defaults.max_tokens.or(max_tokens);
        let max_tokens = limit.map_or(silent, |n| usize::try_from(n).ok());
        let sampling = sampling(fields, model, names)?;
        if let Some(most) = max_tokens.filter(|&most| sampling.min_tokens > most) {
            return Err(fields.error(
                "min_tokens",
                format!("must be {most} at most, as many as may be written"),
            ));
        }
        Ok(Options {
            sampling,
            max_tokens,
            stop: stop(fields, names.stop)?,
            stop_token_ids: stop_token_ids(fields, engine.info().vocab_size)?,
            ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
            show_specials: !fields.bool("skip_special_tokens")?.unwrap_or(true),
            speculation: Speculation::read(fields, engine.info())?,
            splits_reasoning: false,
            shows_reasoning_marks: false,
            logprobs: None,
            logprobs_of: LogprobsOf::Logits,
            wants: Wants::default(),
            trace: false,
            tools: None,
            stream,
            n: 1,
            grammar: None,
            reasoning_budget: None,
            namespace: salted(fields.string("cache_salt")?),
            reuse: fields.bool("cache_prompt")?.unwrap_or(true),
            priority: fields.integer("priority", PRIORITY)?.unwrap_or(0),
            timeout: fields
                .number("timeout", TIMEOUT)?
                .map(Duration::from_secs_f64),
            lines: LineLimits::default(),
        })
    }

    /// Keeps the prompts apart from those of other callers in the prefix cache.
    pub(crate) fn keep_apart(&mut self, caller: Option<Caller>) {
        self.namespace = owned(self.namespace, caller);
    }

    /// Offers the model tools, which stand in `fields`, beside the answer that is asked for so far.
    /// Returns their definitions, for the chat template.
    ///
    /// # Errors
    ///
    /// As [`hold`].
    pub(crate) fn offer(
        &mut self,
        offer: Option<Offer>,
        fields: &OfferFields,
        text: &Text,
    ) -> Result<Option<Arc<Value>>, ApiError> {
        if let Some(offer) = &offer {
            self.grammar = hold(offer, fields, self.grammar.take(), text)?;
        }
        let told = offer.as_ref().map(|offer| offer.definitions.clone());
        self.tools = offer;
        Ok(told)
    }

    /// The engine's request for the answer number `i` to `prompt`, which follows `grammar` and
    /// goes on with what `continues` says. Each answer has a seed of its own, the first that of
    /// the request.
    pub(crate) fn request_of(
        &self,
        i: usize,
        prompt: Vec<u32>,
        grammar: Option<engine::Grammar>,
        continues: Option<Channel>,
    ) -> Request {
        let mut options = self.clone();
        options.sampling.seed = seed_of(options.sampling.seed, i);
        Request {
            continues,
            ..options.request(prompt, grammar)
        }
    }

    /// The engine's request for `prompt`, with an answer that follows `grammar`.
    fn request(self, prompt: Vec<u32>, grammar: Option<engine::Grammar>) -> Request {
        Request {
            prompt,
            media: Vec::new(),
            sampling: self.sampling,
            max_tokens: self.max_tokens,
            stop: self.stop,
            stop_token_ids: self.stop_token_ids,
            ignore_eos: self.ignore_eos,
            show_specials: self.show_specials,
            splits_reasoning: self.splits_reasoning,
            shows_reasoning_marks: self.shows_reasoning_marks,
            tools: self.tools.map(|offer| ToolUse {
                tools: Tools::new(&offer.definitions).into(),
                calls_max: offer.calls_max,
            }),
            draft: self.speculation.draft,
            drafters: self.speculation.drafters,
            drafters_take_turns: false,
            accept: self.speculation.accept,
            logprobs: self.logprobs.map(|top| TopLogprobs {
                top,
                of: self.logprobs_of,
            }),
            trace: self.trace,
            grammar,
            reasoning_budget: self.reasoning_budget,
            namespace: self.namespace,
            reuse: self.reuse,
            priority: self.priority,
            number: None,
            client: 0,
            continues: None,
            lines: self.lines,
            embedding: None,
        }
    }
}

/// The namespace of requests with this `cache_salt`.
fn salted(salt: Option<&str>) -> Namespace {
    salt.map_or_else(Namespace::default, |salt| {
        Namespace(Sha256::digest(salt.as_bytes()).into())
    })
}

/// The part of `namespace` that is the caller's with this key alone.
pub(crate) fn owned(namespace: Namespace, caller: Option<Caller>) -> Namespace {
    caller.map_or(namespace, |caller| {
        let hash = Sha256::new().chain_update(caller).chain_update(namespace.0);
        Namespace(hash.finalize().into())
    })
}

/// The seed of the answer number `i` of a request whose seed is `seed`.
pub(crate) fn seed_of(seed: u64, i: usize) -> u64 {
    seed.wrapping_add(i as u64)
}

/// How many answers each prompt gets. `best_of` is the number to choose from, which is the same
/// where none is left out.
pub(crate) fn answers(fields: &Fields<'_>) -> Result<usize, ApiError> {
    const BEST_OF: &str = "best_of";
    let mut n = 1;
    for &name in N {
        if let Some(asked) = fields.integer(name, 1..=N_MAX)? {
            n = asked;
        }
    }
    if let Some(of) = fields.integer(BEST_OF, 1..=N_MAX)?
        && of != n
    {
        let message = "is not supported; ask for as many answers by `n`, and choose among them by their log-probabilities";
        return Err(fields.error(BEST_OF, message));
    }
    Ok(n as usize)
}

fn sampling(fields: &Fields<'_>, model: &Loaded, names: &Names) -> Result<Sampling, ApiError> {
    let (engine, defaults) = (&model.engine, &model.settings.defaults);
    let advice = &engine.text().sampling;
    let mut sampling = Sampling {
        top_k: match fields.integer("top_k", -1..=TOP_K_MAX)? {
            // Servers differ in which of the two means "all"; neither means none.
            Some(k) => usize::try_from(k).unwrap_or(0),
            None => model.top_k(),
        },
        suppress: advice.suppress_tokens.clone(),
        ..Sampling::default()
    };
    for option in SAMPLER_NUMBERS {
        if let Some(number) = model.number(option) {
            (option.set)(&mut sampling, number);
        }
        let aliases = names.sampling.iter().filter(|(_, own)| *own == option.name);
        for name in [option.name]
            .into_iter()
            .chain(aliases.map(|(name, _)| *name))
        {
            if let Some(number) = fields.number(name, option.range.clone())? {
                (option.set)(&mut sampling, number as f32);
            }
        }
    }
    dynamic_temperature(fields, &mut sampling)?;
    dry(fields, engine, &mut sampling)?;
    for name in ["min_tokens", "min_new_tokens"] {
        if let Some(n) = fields.integer(name, 0..=MAX_TOKENS_MAX)? {
            sampling.min_tokens = n as usize;
        }
    }
    if let Some(n) = fields.integer("repeat_last_n", -1..=MAX_TOKENS_MAX)? {
        sampling.repeat_last_n = usize::try_from(n).ok();
    }
    mirostat(fields, &mut sampling)?;
    samplers::read(fields, &mut sampling, names.passes_infill)?;
    logit_bias(fields, engine, &mut sampling)?;
    sampling.seed = seed(fields, defaults.seed)?;
    Ok(sampling)
}

/// Any 64-bit number, signed or not; if there is none, `default` or a new one.
fn seed(fields: &Fields<'_>, default: Option<u64>) -> Result<u64, ApiError> {
    let Some(value) = fields.get("seed") else {
        return Ok(default.unwrap_or_else(ids::random_seed));
    };
    let seed = value
        .as_u64()
        .or_else(|| whole(value).map(i64::cast_unsigned));
    seed.ok_or_else(|| fields.error("seed", "must be a whole number that fits 64 bits"))
}

/// Dynamic temperature between two bounds, as text-generation-webui has it.
fn dynamic_temperature(fields: &Fields<'_>, sampling: &mut Sampling) -> Result<(), ApiError> {
    let is_on = fields.bool("dynamic_temperature")?.unwrap_or(false);
    let low = fields.number("dynatemp_low", TEMPERATURE)?.unwrap_or(1.0);
    let high = fields.number("dynatemp_high", TEMPERATURE)?.unwrap_or(1.0);
    if !is_on {
        return Ok(());
    }
    if low > high {
        return Err(fields.error("dynatemp_low", "must not exceed `dynatemp_high`"));
    }
    if sampling.dynatemp_range > 0.0 {
        let message = "says the same as `dynamic_temperature`; send one of the two";
        return Err(fields.error("dynatemp_range", message));
    }
    sampling.temperature = ((low + high) / 2.0) as f32;
    sampling.dynatemp_range = ((high - low) / 2.0) as f32;
    Ok(())
}

/// Mirostat: a version of it, and its numbers.
fn mirostat(fields: &Fields<'_>, sampling: &mut Sampling) -> Result<(), ApiError> {
    for name in ["mirostat", "mirostat_mode"] {
        if let Some(version) = fields.integer(name, 0..=2)? {
            sampling.mirostat = match version {
                0 => Mirostat::Off,
                1 => Mirostat::V1,
                _ => Mirostat::V2,
            };
        }
    }
    if let Some(tau) = fields.number("mirostat_tau", MIROSTAT)? {
        sampling.mirostat_tau = tau as f32;
    }
    if let Some(eta) = fields.number("mirostat_eta", MIROSTAT)? {
        sampling.mirostat_eta = eta as f32;
    }
    Ok(())
}

/// DRY, but for its numbers.
fn dry(fields: &Fields<'_>, engine: &Engine, sampling: &mut Sampling) -> Result<(), ApiError> {
    const BREAKERS: &str = "dry_sequence_breakers";
    if let Some(n) = fields.integer("dry_allowed_length", 0..=MAX_TOKENS_MAX)? {
        sampling.dry_allowed_length = n as usize;
    }
    if let Some(n) = fields.integer("dry_penalty_last_n", -1..=MAX_TOKENS_MAX)? {
        sampling.dry_penalty_last_n = usize::try_from(n).ok();
    }
    let breakers = dry_breakers(fields, BREAKERS)?;
    if sampling.dry_multiplier > 0.0 && sampling.dry_penalty_last_n != Some(0) {
        let breakers = match breakers {
            Some(strings) => sequence_breakers(engine, &strings),
            None => sequence_breakers(engine, DRY_BREAKERS),
        };
        sampling.dry_breakers = breakers.map_err(|e| fields.error(BREAKERS, e.to_string()))?;
    }
    Ok(())
}

/// A list of strings, or its JSON text with brackets or without.
fn dry_breakers(fields: &Fields<'_>, name: &'static str) -> Result<Option<Vec<String>>, ApiError> {
    let strings = match fields.get(name) {
        None => return Ok(None),
        Some(Value::String(text)) if text.trim_start().starts_with('[') => {
            serde_json::from_str(text).ok()
        }
        Some(Value::String(text)) => serde_json::from_str(&format!("[{text}]")).ok(),
        Some(value) => Vec::<String>::deserialize(value).ok(),
    };
    let strings: Vec<String> =
        strings.ok_or_else(|| fields.error(name, "must be a list of strings"))?;
    if strings.len() > DRY_BREAKERS_MAX {
        let message = format!("has {} strings, {DRY_BREAKERS_MAX} at most", strings.len());
        return Err(fields.error(name, message));
    }
    let longest = strings.iter().map(|string| string.chars().count()).max();
    if let Some(n) = longest.filter(|&n| n > DRY_BREAKER_CHARS_MAX) {
        let message = format!("has a string of {n} characters, {DRY_BREAKER_CHARS_MAX} at most");
        return Err(fields.error(name, message));
    }
    Ok(Some(strings))
}

/// Tokens, each by its id or by a text whose tokens it stands for.
enum Biased {
    Id(u32),
    Text(String),
}

/// Reads `logit_bias` into `sampling`: an object, or a list of pairs. A bias that is `false`
/// rules its tokens out.
fn logit_bias(
    fields: &Fields<'_>,
    engine: &Engine,
    sampling: &mut Sampling,
) -> Result<(), ApiError> {
    const NAME: &str = "logit_bias";
    let vocab_size = engine.info().vocab_size;
    let wrong = || {
        let message = format!(
            "must be an object, or a list of pairs, from token ids below {vocab_size} or texts to \
             numbers from -100 to 100 or `false`"
        );
        fields.error(NAME, message)
    };
    let entries: Option<Vec<(Biased, &Value)>> = match fields.get(NAME) {
        None => return Ok(()),
        // A key that is a number is an id, even where a token is spelled like that.
        Some(Value::Object(map)) => {
            let key = |key: &String| match key.parse::<u64>() {
                Ok(id) => u32::try_from(id).ok().map(Biased::Id),
                Err(_) => Some(Biased::Text(key.clone())),
            };
            map.iter().map(|(k, bias)| Some((key(k)?, bias))).collect()
        }
        Some(Value::Array(list)) => {
            let pair = |pair: &'_ Value| match pair.as_array()?.as_slice() {
                [Value::String(text), _] => Some(Biased::Text(text.clone())),
                [id, _] => Some(Biased::Id(u32::try_from(whole(id)?).ok()?)),
                _ => None,
            };
            list.iter()
                .map(|entry| Some((pair(entry)?, &entry[1])))
                .collect()
        }
        Some(_) => None,
    };
    let entries = entries.ok_or_else(wrong)?;
    if entries.len() > LOGIT_BIAS_MAX {
        let message = format!("has {} entries, {LOGIT_BIAS_MAX} at most", entries.len());
        return Err(fields.error(NAME, message));
    }
    for (tokens, bias) in entries {
        let bias = match bias {
            Value::Bool(false) => None,
            bias => Some(
                bias.as_f64()
                    .filter(|b| LOGIT_BIAS.contains(b))
                    .ok_or_else(wrong)?,
            ),
        };
        let tokens = match tokens {
            Biased::Id(id) if (id as usize) < vocab_size => vec![id],
            Biased::Id(_) => return Err(wrong()),
            Biased::Text(text) => text_tokens(fields, engine, NAME, &text)?,
        };
        match bias {
            Some(bias) => {
                let biased = tokens.into_iter().map(|token| (token, bias as f32));
                sampling.logit_bias.extend(biased);
            }
            None => sampling.suppress.extend(tokens),
        }
    }
    Ok(())
}

/// The tokens of a text in the field `name`.
fn text_tokens(
    fields: &Fields<'_>,
    engine: &Engine,
    name: &'static str,
    text: &str,
) -> Result<Vec<u32>, ApiError> {
    let n_chars = text.chars().count();
    if n_chars == 0 || n_chars > STOP_CHARS_MAX {
        let message = format!("has a text of {n_chars} characters, must be 1 to {STOP_CHARS_MAX}");
        return Err(fields.error(name, message));
    }
    let tokens = engine.text().tokenizer.encode(text, false);
    tokens.map_err(|e| fields.error(name, e.to_string()))
}

/// Ids of tokens that end the text.
fn stop_token_ids(fields: &Fields<'_>, vocab_size: usize) -> Result<Vec<u32>, ApiError> {
    const NAME: &str = "stop_token_ids";
    let wrong = || {
        fields.error(
            NAME,
            format!("must be a list of token ids below {vocab_size}"),
        )
    };
    let list = match fields.get(NAME) {
        None => return Ok(Vec::new()),
        Some(value) => value.as_array().ok_or_else(wrong)?,
    };
    if list.len() > STOP_TOKENS_MAX {
        let message = format!("has {} tokens, {STOP_TOKENS_MAX} at most", list.len());
        return Err(fields.error(NAME, message));
    }
    let id = |value: &Value| {
        let id = u32::try_from(whole(value)?).ok()?;
        ((id as usize) < vocab_size).then_some(id)
    };
    list.iter().map(id).collect::<Option<_>>().ok_or_else(wrong)
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
