//! How every known field of a request of llama-server's own API is treated, as
//! [`openai::tables`](crate::openai::tables) has it for OpenAI's: only fields that are listed may
//! be read, and `docs/server.md` shows the table.
//!
//! The options of sampling, formats and speculation are read by the same code in all dialects, so
//! they are listed there. What another dialect refuses or ignores by name is treated the same here.

use std::fmt::Write;
use std::slice;

use engine::SAMPLER_NUMBERS;
use serde_json::{Map, Value};

use crate::errors::ApiError;
use crate::fields::{self, Fields, Unsupported, neutral, unless};
use crate::openai::tables::{self as openai, Known, known};

/// What is known of the fields of requests for text.
pub(super) const FIELDS: &fields::Known = &fields::Known {
    is_listed: |path| cfg!(test) || is_listed(path),
    is_harmless,
};

/// What is known of the fields of requests to tokenize.
pub(super) const TOKENIZER_FIELDS: &fields::Known = &fields::Known {
    is_listed: |path| cfg!(test) || TOKENIZER.iter().any(|k| k.field == path),
    is_harmless: openai::is_harmless,
};

/// Honored by requests for text, beside what is honored as in OpenAI's.
const HONORED: &[Known] = &[
    known(
        "model",
        "any name is answered by the model that is served; the response names the true one",
    ),
    known(
        "prompt",
        "`/completion`: a text, token ids, a list of both, `{\"prompt_string\": TEXT}`, or a list of up to 128 of these, which is answered by a list; `/infill`: how the gap begins",
    ),
    known("input_prefix", "`/infill`: the text before the gap"),
    known("input_suffix", "`/infill`: the text after the gap"),
    known(
        "input_extra",
        "`/infill`: other files, each `{\"filename\": NAME, \"text\": TEXT}`",
    ),
    known("n_predict", "-1 is no limit; comes before `max_tokens`"),
    known("max_tokens", "another name of `n_predict`"),
    known("max_completion_tokens", "another name of `n_predict`"),
    known(
        "seed",
        "64 bits; -1 and 4294967295 are a new one. `generation_settings` has the seed that was used",
    ),
    known(
        "n_probs",
        "0 to 20: tokens come with log-probabilities, beside those of so many of the likeliest",
    ),
    known("logprobs", "another name of `n_probs`"),
    known(
        "post_sampling_probs",
        "`true`: probabilities after the samplers, of the tokens that are left",
    ),
    known(
        "return_tokens",
        "`true`: a whole answer has its token ids; a stream has them anyway",
    ),
    known(
        "response_fields",
        "the fields that the last document has, paths with `/` among them",
    ),
    known(
        "timings_per_token",
        "`true`: every chunk of a stream has `timings`",
    ),
    known(
        "return_progress",
        "`true`: chunks of a stream tell how far the prompt is",
    ),
    known(
        "t_max_predict_ms",
        "milliseconds from the first token after which a text that has a line break ends; 0 and less is no limit",
    ),
    known(
        "n_indent",
        "spaces and tabs that every line but the first begins with; the text ends before one that has fewer",
    ),
];

/// Read as OpenAI's requests have it.
const AS_IN_OPENAI: &[&str] = &[
    "n",
    "n_cmpl",
    "best_of",
    "top_k",
    "repeat_penalty",
    "typ_p",
    "typical",
    "nsigma",
    "dynamic_temperature",
    "dynatemp_low",
    "dynatemp_high",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "logit_bias",
    "samplers",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "min_new_tokens",
    "cache_salt",
    "cache_prompt",
    "priority",
    "timeout",
    "ignore_eos",
    "skip_special_tokens",
    "stream",
    "speculation",
    "speculation.draft_max",
    "repeat_last_n",
    "mirostat",
    "mirostat_mode",
    "mirostat_tau",
    "mirostat_eta",
    "response_format",
    "response_format.type",
    "response_format.json_schema",
    "response_format.json_schema.schema",
    "response_format.json_schema.name",
    "response_format.json_schema.description",
    "response_format.json_schema.strict",
    "response_format.schema",
    "structured_outputs",
    "structured_outputs.json",
    "structured_outputs.regex",
    "structured_outputs.choice",
    "structured_outputs.grammar",
    "structured_outputs.json_object",
];

/// Honored by requests to tokenize.
const TOKENIZER: &[Known] = &[
    known(
        "content",
        "`/tokenize`: a text, or a list of texts and token ids",
    ),
    known(
        "add_special",
        "`/tokenize`: `true` begins as a prompt does, with the beginning-of-sequence token",
    ),
    known(
        "parse_special",
        "`/tokenize`: `false` takes spellings of special tokens for text",
    ),
    known(
        "with_pieces",
        "`/tokenize`: `true`: each token has its text, or its bytes where they are none",
    ),
    known("tokens", "`/detokenize`: token ids"),
];

/// Refused by requests for text, beside what OpenAI's may not have.
const REFUSED: &[Unsupported] = &[
    unless("messages", "[]"),
    unless("suffix", r#"[""]"#),
    unless("echo", "[false]"),
    unless("image_data", "[[]]"),
    unless("system_prompt", r#"[""]"#),
    unless("top_logprobs", "[0]"),
];

/// Ignored, and known to change nothing: named in the header, not in the log.
const HARMLESS: &[Known] = &[
    known("t_max_prompt_ms", "prompts take the time they take"),
    known("slot_id", "the older name of `id_slot`"),
    known("penalize_nl", "the penalties know no such exception"),
    known("api_key", "send it as a header"),
    known("stream_options", "the last chunk always has all numbers"),
    known("speculative.n_min", "changes speed only"),
    known("speculative.n_max", "changes speed only"),
    known("speculative.p_min", "changes speed only"),
    known("speculative.type", "changes speed only"),
    known("reasoning_format", "the text is not taken apart"),
    known(
        "samplers.infill",
        "the end of a text is a token like others",
    ),
];

/// Fields by which a body sent to `/completions` is one of this API: OpenAI's own has none of them.
const NATIVE: &[&str] = &[
    "n_predict",
    "n_probs",
    "post_sampling_probs",
    "cache_prompt",
    "id_slot",
    "n_keep",
    "n_discard",
    "n_cache_reuse",
    "n_indent",
    "t_max_predict_ms",
    "t_max_prompt_ms",
    "samplers",
    "min_keep",
    "return_tokens",
    "return_progress",
    "timings_per_token",
    "response_fields",
    "lora",
];

/// Whether a body that OpenAI's completions could have too is one of this API: it has a field that
/// only this API has, or a prompt in a form that only this API knows.
pub(super) fn is_native(body: &Map<String, Value>) -> bool {
    let is_mixed =
        |list: &[Value]| list.iter().any(Value::is_number) && list.iter().any(Value::is_string);
    let has_own_prompt = match body.get("prompt") {
        Some(Value::Object(_)) => true,
        Some(Value::Array(list)) => {
            let mut inner = list.iter();
            is_mixed(list)
                || inner.any(|one| one.is_object() || one.as_array().is_some_and(|l| is_mixed(l)))
        }
        _ => false,
    };
    has_own_prompt || NATIVE.iter().any(|field| body.contains_key(*field))
}

/// Refuses the fields that ask for what is not implemented.
///
/// # Errors
///
/// 400 for the first of them.
pub(super) fn refuse(fields: &Fields<'_>) -> Result<(), ApiError> {
    fields.refuse(REFUSED)?;
    refused_elsewhere().try_for_each(|entry| fields.refuse(slice::from_ref(entry)))
}

/// What OpenAI's requests may not have, but for what is treated in another way here.
fn refused_elsewhere() -> impl Iterator<Item = &'static Unsupported> {
    let all = openai::REFUSED.iter();
    all.filter(|entry| {
        let own = HONORED.iter().chain(HARMLESS).map(|k| k.field);
        let own = own.chain(AS_IN_OPENAI.iter().copied());
        own.chain(REFUSED.iter().map(|u| u.field))
            .all(|field| field != entry.field)
    })
}

/// The table of this module as Markdown, as it stands in `docs/server.md`.
pub(crate) fn markdown() -> String {
    let mut page =
        String::from("| field | treatment | what, why, or accepted with |\n| --- | --- | --- |\n");
    for Known { field, about } in HONORED.iter().chain(TOKENIZER) {
        let _ = writeln!(page, "| `{field}` | honored | {about} |");
    }
    let numbers = SAMPLER_NUMBERS.iter().map(|number| number.name);
    let formats = openai::STRUCTURED.iter().map(|entry| entry.field);
    let shared = numbers.chain(AS_IN_OPENAI.iter().copied()).chain(formats);
    let shared: Vec<String> = shared.map(|field| format!("`{field}`")).collect();
    let _ = writeln!(
        page,
        "| {} | honored | as [above](#honored) |",
        shared.join(", ")
    );
    for entry in REFUSED {
        let values = neutral(entry).into_iter().map(|v| format!("`{v}`"));
        let values: Vec<String> = values.chain(["`null`".to_owned()]).collect();
        let field = entry.field;
        let _ = writeln!(page, "| `{field}` | refused | {} |", values.join(", "));
    }
    for Known { field, about } in HARMLESS {
        let _ = writeln!(page, "| `{field}` | ignored | {about} |");
    }
    page
}

/// Whether the field `path` of a request for text may be read.
fn is_listed(path: &str) -> bool {
    let is_refused_inside = path
        .strip_prefix("structured_outputs.")
        .is_some_and(|field| {
            openai::REFUSED_IN_STRUCTURED_OUTPUTS
                .iter()
                .any(|u| u.field == field)
        });
    is_refused_inside
        || HONORED.iter().any(|k| k.field == path)
        || AS_IN_OPENAI.contains(&path)
        || SAMPLER_NUMBERS.iter().any(|n| n.name == path)
        || openai::STRUCTURED.iter().any(|s| s.field == path)
        || REFUSED.iter().any(|u| u.field == path)
        || refused_elsewhere().any(|u| u.field == path)
}

/// Whether ignoring the field `path` needs no warning.
fn is_harmless(path: &str) -> bool {
    HARMLESS.iter().any(|k| k.field == path) || openai::is_harmless(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn no_field_is_treated_in_two_ways() {
        let mut all: Vec<&str> = HONORED.iter().map(|k| k.field).collect();
        all.extend(AS_IN_OPENAI);
        all.extend(SAMPLER_NUMBERS.iter().map(|n| n.name));
        all.extend(openai::STRUCTURED.iter().map(|s| s.field));
        all.extend(REFUSED.iter().map(|u| u.field));
        all.extend(refused_elsewhere().map(|u| u.field));
        all.extend(HARMLESS.iter().map(|k| k.field));
        all.sort_unstable();
        let twice = all.windows(2).find(|pair| pair[0] == pair[1]);
        assert_eq!(twice, None);
        assert!(HARMLESS.iter().all(|k| !is_listed(k.field)));
    }

    #[test]
    fn what_openai_s_completions_honor_is_read_or_refused_here() {
        let tables = [openai::HONORED, openai::HONORED_BY_COMPLETIONS];
        let own = tables.into_iter().flatten().map(|k| k.field);
        // Where `speculation` is read, any field of it but `draft_max` is a 400.
        let elsewhere = ["verbose", "speculation.trace"];
        let is_here =
            |path: &&str| !path.starts_with("stream_options") && !elsewhere.contains(path);
        let own = own.filter(is_here);
        for field in own.chain(openai::STRUCTURED.iter().map(|s| s.field)) {
            assert!(is_listed(field), "`{field}` would be ignored");
        }
    }

    #[test]
    fn a_body_is_told_from_openai_s_by_what_only_this_api_has() {
        for (body, is_own) in [
            (
                json!({"prompt": "a", "max_tokens": 3, "grammar": "x", "top_k": 1}),
                false,
            ),
            (json!({"prompt": ["a", "b"]}), false),
            (json!({"prompt": [[1, 2], "a"]}), false),
            (json!({"prompt": "a", "n_predict": 3}), true),
            (json!({"prompt": "a", "cache_prompt": true}), true),
            (json!({"prompt": [1, "a"]}), true),
            (json!({"prompt": [[1, "a"], "b"]}), true),
            (json!({"prompt": {"prompt_string": "a"}}), true),
            (json!({"prompt": ["b", {"prompt_string": "a"}]}), true),
        ] {
            assert_eq!(is_native(body.as_object().unwrap()), is_own, "{body}");
        }
    }
}
