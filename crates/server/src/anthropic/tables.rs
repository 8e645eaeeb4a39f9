//! How every known field of a Messages request is treated, as
//! [`openai::tables`](crate::openai::tables) has it for OpenAI's: only fields that are listed may
//! be read, and `docs/server.md` shows the table.
//!
//! The options of sampling and speculation are read by the same code in all dialects, so they
//! are listed there. What another dialect refuses or ignores by name is treated the same here.

use std::fmt::Write;
use std::slice;

use engine::SAMPLER_NUMBERS;

use crate::errors::ApiError;
use crate::fields::{self, Fields, Unsupported, neutral, unless};
use crate::openai::tables::{self as openai, Known, known};

/// What is known of the fields of Messages requests.
pub(crate) const FIELDS: &fields::Known = &fields::Known {
    is_listed: |path| cfg!(test) || is_listed(path),
    is_harmless,
};

/// Honored, beside [`AS_IN_OPENAI`] and the numbers of the sampler.
const HONORED: &[Known] = &[
    known(
        "model",
        "any name is answered by the model that is served; the response names the true one",
    ),
    known("max_tokens", "required; -1 is no limit"),
    known("system", "a string or blocks of text"),
    known("messages", "see its fields"),
    known(
        "messages[].role",
        "`user`, `assistant` or `system`; the answer goes on from a last message of the assistant",
    ),
    known(
        "messages[].content",
        "a string, or blocks: `text`, `tool_use`, `tool_result`, `thinking`, `redacted_thinking`",
    ),
    known(
        "stop_sequences",
        "a list of up to 16 strings, each of 256 characters at most",
    ),
    known("stream", "server-sent events"),
    known(
        "thinking",
        "turns reasoning on or off; off if it is left out",
    ),
    known(
        "thinking.type",
        "`enabled` and `adaptive` turn it on, `disabled` off",
    ),
    known("thinking.budget_tokens", "tokens of reasoning, at most"),
    known("output_config", "see its fields"),
    known(
        "output_config.effort",
        "`low` allows 1,024 tokens of reasoning; `medium`, `high`, `xhigh` and `max` any number. Templates that read `reasoning_effort` are told",
    ),
    known("output_config.format", "see its fields"),
    known("output_config.format.type", "`json_schema`"),
    known(
        "output_config.format.schema",
        "a JSON schema, which is always enforced",
    ),
    known(
        "output_format",
        "the older name of `output_config.format`, with the same fields",
    ),
    known("output_format.type", "`json_schema`"),
    known("output_format.schema", "as `output_config.format.schema`"),
    known(
        "tools",
        "tools with `name` and `input_schema` that the model may call: 128 and 512 KB at most. Calls of a tool with `strict: true` always fit its schema",
    ),
    known("tool_choice", "see its fields"),
    known(
        "tool_choice.type",
        "`auto`; `none`, which leaves `tools` out; `any` or `tool`: the answer is calls whose input fits the schema",
    ),
    known(
        "tool_choice.name",
        "the tool that must be called, with `tool`",
    ),
    known(
        "tool_choice.disable_parallel_tool_use",
        "`true` ends the text after the first call",
    ),
    known("thread", "see its fields; no conversation is kept"),
    known(
        "thread.type",
        "`create` changes nothing; `continue` is answered by `thread_not_found`, upon which libraries send the whole conversation",
    ),
    known("thread.previous_message_id", "names what is not kept"),
    known(
        "cache_control",
        "anywhere, and changes nothing: every prompt is looked for in the cache",
    ),
];

/// Read as OpenAI's requests have it.
pub(crate) const AS_IN_OPENAI: &[&str] = &[
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
    "seed",
    "stop_token_ids",
    "min_tokens",
    "min_new_tokens",
    "priority",
    "timeout",
    "ignore_eos",
    "cache_salt",
    "cache_prompt",
    "skip_special_tokens",
    "speculation",
    "speculation.draft_max",
    "repeat_last_n",
    "mirostat",
    "mirostat_mode",
    "mirostat_tau",
    "mirostat_eta",
    "samplers",
];

/// Refused, beside what OpenAI's requests may not have.
const REFUSED: &[Unsupported] = &[
    // What Anthropic's servers keep, run or ask others for.
    unless("container", "[]"),
    unless("mcp_servers", "[[]]"),
    // Names of OpenAI's and other APIs for what has a name of its own here.
    unless("n", "[1]"),
    unless("n_cmpl", "[1]"),
    unless("best_of", "[1]"),
    unless("stop", "[[]]"),
    unless("prompt", r#"[""]"#),
    unless("max_completion_tokens", "[]"),
    unless("n_predict", "[-1]"),
    unless("suffix", r#"[""]"#),
    unless("continue_final_message", "[false]"),
    unless("add_generation_prompt", "[true]"),
    unless("parallel_tool_calls", "[true]"),
    unless("functions", "[[]]"),
    unless("function_call", "[]"),
    unless("response_format", r#"[{"type": "text"}]"#),
    unless("structured_outputs", "[]"),
    unless("guided_json", "[]"),
    unless("guided_regex", "[]"),
    unless("guided_choice", "[]"),
    unless("guided_grammar", "[]"),
    unless("json_schema", "[]"),
    unless("grammar", "[]"),
    unless("regex", "[]"),
    unless("ebnf", "[]"),
    unless("enable_thinking", "[]"),
    unless("think", "[]"),
    unless("reasoning", "[]"),
    unless("reasoning_effort", "[]"),
    unless("thinking_budget", "[]"),
    unless("thinking_token_budget", "[]"),
    unless("reasoning_budget", "[]"),
    unless("reasoning_budget_tokens", "[]"),
    unless("thinking_budget_tokens", "[]"),
    unless("reasoning_format", r#"["auto", "deepseek"]"#),
    unless("chat_template_kwargs", "[{}]"),
    unless(openai::CHAT_TEMPLATE, "[]"),
    // What this API's answers have no place for.
    unless("logprobs", "[false]"),
    unless("top_logprobs", "[0]"),
];

/// Ignored, and known to change nothing: named in the header, not in the log.
const HARMLESS: &[Known] = &[
    known("metadata", "names the caller"),
    known("service_tier", "there is one"),
    known("speed", "there is one"),
    known(
        "context_management",
        "nothing is taken out of a conversation",
    ),
    known("compaction", "nothing is taken out of a conversation"),
    known("thinking.display", "reasoning is always shown"),
    known("timings_per_token", "`timings` come at the end"),
    known("return_progress", "comments in the stream say the progress"),
    known("verbose", "debugging output of llama-server"),
    known("inference_geo", "the model runs where the server is"),
    known("user_profile_id", "names the caller"),
    known("workspace_id", "names the caller"),
    known("billing_policy", "nothing is billed"),
    known(
        "diagnostics",
        "the response has `timings` and `speculation`",
    ),
    known("fallbacks", "there is one model"),
    known("fallback_credit_token", "there is one model"),
    known("betas", "features are there or refused by name"),
    known("anthropic_beta", "features are there or refused by name"),
    known("anthropic_version", "there is one"),
];

/// Refuses the fields that ask for what is not implemented.
///
/// # Errors
///
/// 400 for the first of them.
pub(super) fn refuse(fields: &Fields<'_>) -> Result<(), ApiError> {
    fields.refuse(REFUSED)?;
    refused_elsewhere().try_for_each(|entry| fields.refuse(slice::from_ref(entry)))
}

/// What OpenAI's requests may not have, but for what has a meaning of its own here.
fn refused_elsewhere() -> impl Iterator<Item = &'static Unsupported> {
    let all = openai::REFUSED.iter().chain(openai::REFUSED_BY_CHAT);
    all.filter(|entry| HONORED.iter().all(|own| own.field != entry.field))
}

/// The table of this module as Markdown, as it stands in `docs/server.md`.
pub(crate) fn markdown() -> String {
    let mut page =
        String::from("| field | treatment | what, why, or accepted with |\n| --- | --- | --- |\n");
    for Known { field, about } in HONORED {
        let _ = writeln!(page, "| `{field}` | honored | {about} |");
    }
    let numbers = SAMPLER_NUMBERS.iter().map(|number| number.name);
    let shared = numbers.chain(AS_IN_OPENAI.iter().copied());
    let shared: Vec<String> = shared.map(|field| format!("`{field}`")).collect();
    let _ = writeln!(
        page,
        "| {} | honored | as [above](#honored) |",
        shared.join(", ")
    );
    for entry in REFUSED {
        let values = neutral(entry).into_iter().map(|v| format!("`{v}`"));
        let values: Vec<String> = values.chain(["`null`".to_owned()]).collect();
        let _ = writeln!(
            page,
            "| `{}` | refused | {} |",
            entry.field,
            values.join(", ")
        );
    }
    for Known { field, about } in HARMLESS {
        let _ = writeln!(page, "| `{field}` | ignored | {about} |");
    }
    page
}

/// Whether the field `path` may be read.
fn is_listed(path: &str) -> bool {
    HONORED.iter().any(|k| k.field == path)
        || AS_IN_OPENAI.contains(&path)
        || SAMPLER_NUMBERS.iter().any(|n| n.name == path)
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

    #[test]
    fn no_field_is_treated_in_two_ways() {
        let mut all: Vec<&str> = HONORED.iter().map(|k| k.field).collect();
        all.extend(AS_IN_OPENAI);
        all.extend(SAMPLER_NUMBERS.iter().map(|n| n.name));
        all.extend(REFUSED.iter().map(|u| u.field));
        all.extend(refused_elsewhere().map(|u| u.field));
        all.extend(HARMLESS.iter().map(|k| k.field));
        all.sort_unstable();
        let twice = all.windows(2).find(|pair| pair[0] == pair[1]);
        assert_eq!(twice, None);
        assert!(HARMLESS.iter().all(|k| !is_listed(k.field)));
    }

    #[test]
    fn what_openai_s_requests_honor_is_read_or_refused_here() {
        let tables = [
            openai::HONORED,
            openai::HONORED_BY_CHAT,
            openai::HONORED_BY_COMPLETIONS,
        ];
        let own = tables.into_iter().flatten().map(|k| k.field);
        let own = own.filter(|path| !path.contains('.') && *path != "stream_options");
        for field in own.chain(openai::STRUCTURED.iter().map(|s| s.field)) {
            let is_harmless = HARMLESS.iter().any(|k| k.field == field);
            assert!(
                is_listed(field) || is_harmless,
                "`{field}` would be ignored"
            );
        }
    }
}
