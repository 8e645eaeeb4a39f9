//! `generation_settings`: how a text is written, under llama-server's names.

use engine::{Engine, LogprobsOf, Mirostat, Sampling};
use serde_json::{Map, Value, json};

use crate::options::Options;
use crate::run::Run;
use crate::samplers;

/// A number with the digits that it needs; as a double it would have those of its rounding error.
fn number(x: f32) -> Value {
    x.to_string()
        .parse::<f64>()
        .map_or(Value::Null, Value::from)
}

/// A number of tokens; -1 where there is no limit.
fn limit(n: Option<usize>) -> Value {
    n.map_or(json!(-1), |n| json!(n))
}

/// The settings that say nothing of what is written, but for lists of tokens and texts.
fn numbers(sampling: &Sampling, max_tokens: Option<usize>, engine: &Engine) -> Map<String, Value> {
    let mirostat = match sampling.mirostat {
        Mirostat::Off => 0,
        Mirostat::V1 => 1,
        Mirostat::V2 => 2,
    };
    let draft_max = match engine.info().drafter {
        Some(_) => engine.info().draft_max,
        None => 0,
    };
    let document = json!({
        "seed": sampling.seed,
        "temperature": number(sampling.temperature),
        "dynatemp_range": number(sampling.dynatemp_range),
        "dynatemp_exponent": number(sampling.dynatemp_exponent),
        "top_k": sampling.top_k,
        "top_p": number(sampling.top_p),
        "min_p": number(sampling.min_p),
        "top_n_sigma": number(sampling.top_n_sigma),
        "xtc_probability": number(sampling.xtc_probability),
        "xtc_threshold": number(sampling.xtc_threshold),
        "typical_p": number(sampling.typical_p),
        "repeat_last_n": limit(sampling.repeat_last_n),
        "repeat_penalty": number(sampling.repetition_penalty),
        "presence_penalty": number(sampling.presence_penalty),
        "frequency_penalty": number(sampling.frequency_penalty),
        "dry_multiplier": number(sampling.dry_multiplier),
        "dry_base": number(sampling.dry_base),
        "dry_allowed_length": sampling.dry_allowed_length,
        "dry_penalty_last_n": limit(sampling.dry_penalty_last_n),
        "mirostat": mirostat,
        "mirostat_tau": number(sampling.mirostat_tau),
        "mirostat_eta": number(sampling.mirostat_eta),
        "max_tokens": limit(max_tokens),
        "n_predict": limit(max_tokens),
        "n_keep": 0,
        "n_discard": 0,
        "min_keep": 0,
        "chat_format": "Content-only",
        "samplers": samplers::names().collect::<Vec<_>>(),
        "speculative.n_max": draft_max,
        "speculative.n_min": 0,
        "speculative.p_min": 0.0,
        "speculative.type": engine.info().drafter.unwrap_or("none"),
        "backend_sampling": false,
        "lora": [],
    });
    let Value::Object(map) = document else {
        unreachable!("an object was written");
    };
    map
}

/// The settings of a request that runs.
pub(super) fn of_run(run: &Run, engine: &Engine) -> Value {
    Value::Object(numbers(&run.sampling, run.max_tokens, engine))
}

/// The settings of a request with these options.
pub(super) fn of_options(options: &Options, engine: &Engine, asked: &Asked) -> Value {
    let sampling = &options.sampling;
    let biases = sampling.logit_bias.iter();
    let biases = biases.map(|&(token, bias)| json!({"bias": number(bias), "token": token}));
    // JSON has no infinity, which is what llama-server adds to rule a token out.
    let ruled_out = sampling.suppress.iter();
    let ruled_out = ruled_out.map(|token| json!({"bias": null, "token": token}));
    let more = json!({
        "dry_sequence_breakers": asked.breakers,
        "stop": options.stop,
        "ignore_eos": options.ignore_eos,
        "stream": options.stream,
        "logit_bias": biases.chain(ruled_out).collect::<Vec<_>>(),
        "n_probs": options.logprobs.unwrap_or(0),
        "grammar": asked.grammar,
        "grammar_lazy": false,
        "grammar_triggers": [],
        "preserved_tokens": [],
        "reasoning_format": if options.splits_reasoning { "auto" } else { "none" },
        "reasoning_in_content": false,
        "timings_per_token": asked.has_timings,
        "post_sampling_probs": options.logprobs_of == LogprobsOf::Choice,
    });
    let mut settings = numbers(sampling, options.max_tokens, engine);
    settings.extend(more.as_object().cloned().unwrap_or_default());
    Value::Object(settings)
}

/// What a request asks for in words that its options have in another form.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    /// What no repetition reaches over, as DRY has it.
    pub(super) breakers: Value,
    /// The text of a grammar.
    pub(super) grammar: String,
    /// Whether chunks have times.
    pub(super) has_timings: bool,
}
