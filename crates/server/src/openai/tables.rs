//! How every known field of a request is treated: honored, refused or ignored.
//!
//! The tables are the only lists of field names. Handlers may read only fields that are
//! listed here (a debug build asserts it), and `docs/server.md` shows the same tables (a
//! test compares them). A name in no table is ignored, and the response header
//! `x-ignored-fields` and the log name it.
//!
//! The refused names are those of OpenAI's, vLLM's, llama-server's, SGLang's, Ollama's,
//! Anthropic's and text-generation-webui's request schemas that would change the answer.

use std::fmt::Write;

use engine::{SAMPLER_NUMBERS, SamplerNumber};

use crate::fields::{self, Unsupported, neutral, unless};

/// What is known of the fields of OpenAI's requests.
pub(crate) const FIELDS: &fields::Known = &fields::Known {
    is_listed: |path| cfg!(test) || is_listed(path),
    is_harmless,
};

/// A field that is read, or one that is known to change nothing.
#[derive(Debug)]
pub(crate) struct Known {
    /// The field's name; inside an object, after the object's path.
    pub(crate) field: &'static str,
    /// What it does, or why it does nothing; one line of Markdown.
    pub(crate) about: &'static str,
}

pub(crate) const fn known(field: &'static str, about: &'static str) -> Known {
    Known { field, about }
}

/// Entries of [`HONORED`] that the page has before the numbers of the sampler.
const HONORED_FIRST: usize = 2;

/// Honored by chat and by plain completions, beside the numbers of the sampler
/// ([`engine::SAMPLER_NUMBERS`]).
pub(crate) const HONORED: &[Known] = &[
    known(
        "model",
        "any name is answered by the model that is served; the response names the true one",
    ),
    known("max_tokens", "-1 is no limit"),
    known("n_predict", "another name of `max_tokens`; comes first"),
    known(
        "n",
        "answers to each prompt, 1 to 128, with the seeds `seed`, `seed` + 1, …; they share the prompt's rows",
    ),
    known("n_cmpl", "another name of `n`"),
    known("best_of", "must be `n`"),
    known("top_k", "0 and -1 keep all tokens"),
    known("repeat_penalty", "another name of `repetition_penalty`"),
    known("typ_p", "another name of `typical_p`"),
    known("typical", "another name of `typical_p`"),
    known("nsigma", "another name of `top_n_sigma`"),
    known(
        "dynamic_temperature",
        "`true`: the temperature is between `dynatemp_low` and `dynatemp_high`",
    ),
    known(
        "dynatemp_low",
        "0 to 2, 1 by default; matters with `dynamic_temperature` only",
    ),
    known(
        "dynatemp_high",
        "0 to 2, 1 by default; matters with `dynamic_temperature` only",
    ),
    known(
        "dry_allowed_length",
        "tokens that may be repeated before DRY acts, 2 by default",
    ),
    known(
        "dry_penalty_last_n",
        "how many of the last tokens DRY looks at; -1, the default, is all, 0 is off",
    ),
    known(
        "dry_sequence_breakers",
        "up to 32 strings of up to 40 characters that no repetition reaches over; line break, `:`, `\"` and `*` by default",
    ),
    known(
        "logit_bias",
        "an object, or a list of pairs, from token ids or texts (each of its tokens) to numbers from -100 to 100, or `false` for never; 1,024 at most",
    ),
    known(
        "seed",
        "64 bits; same seed, same text. Responses carry the seed that was used",
    ),
    known(
        "stop",
        "a string or up to 16, each of 256 characters at most",
    ),
    known(
        "stop_token_ids",
        "up to 1,024 ids of tokens that end the text, beside the model's own",
    ),
    known(
        "min_tokens",
        "tokens before one that ends the text is chosen; stop strings and grammars end it earlier",
    ),
    known("min_new_tokens", "another name of `min_tokens`"),
    known(
        "priority",
        "-1000 to 1000, 0 by default: of requests that wait, those with the smallest start first. Callers (by API key, else by address) with equal priority take turns",
    ),
    known(
        "timeout",
        "seconds that the request may take, with the time it waits; after that it is stopped with a 504, or an error in its stream",
    ),
    known("ignore_eos", "writes on after the model's own end of text"),
    known(
        "cache_salt",
        "a string: the prompt is looked for in the prefix cache among those of the same string and the same API key only",
    ),
    known(
        "cache_prompt",
        "`false`: the prompt is not looked for in the prefix cache",
    ),
    known("skip_special_tokens", "`false` shows special tokens"),
    known("stream", "server-sent events"),
    known("stream_options", "see its fields; needs `stream: true`"),
    known(
        "stream_options.include_usage",
        "one more chunk before `[DONE]`, with `usage` and without choices",
    ),
    known(
        "stream_options.continuous_usage_stats",
        "every chunk carries the usage so far",
    ),
    known("logprobs", "chat: `true`; completions: a number up to 20"),
    known(
        "speculation",
        "`\"auto\"`, `\"off\"` or `{\"draft_max\": N}`; the text is the same",
    ),
    known("speculation.draft_max", "tokens of a draft, at most"),
    known(
        "response_format",
        "`text`, `json_object`, or `json_schema` with a schema, which is always enforced",
    ),
    known(
        "response_format.type",
        "`text`, `json_object` or `json_schema`",
    ),
    known("response_format.json_schema", "see its fields"),
    known("response_format.json_schema.schema", "the JSON schema"),
    known(
        "response_format.json_schema.name",
        "names the schema; changes nothing",
    ),
    known(
        "response_format.json_schema.description",
        "describes the schema; changes nothing",
    ),
    known(
        "response_format.json_schema.strict",
        "changes nothing: a schema is always enforced",
    ),
    known(
        "response_format.schema",
        "a schema beside `json_object`, as llama-server's clients send it",
    ),
    known("structured_outputs", "one of its fields"),
    known("structured_outputs.json", "a JSON schema"),
    known("structured_outputs.regex", "a regular expression"),
    known("structured_outputs.choice", "a list of strings"),
    known("structured_outputs.grammar", "a grammar, in GBNF or Lark"),
    known("structured_outputs.json_object", "`true`: any JSON object"),
    known(
        "repeat_last_n",
        "how many of the last tokens of prompt and output the penalties look at; -1, the default, is all, 0 is none",
    ),
    known(
        "mirostat",
        "0, 1 or 2, a version; it stands for `top_k`, `top_p`, `min_p` and all else that rules tokens out, and for dynamic temperature; 0 is off",
    ),
    known("mirostat_mode", "`mirostat` by another name"),
    known(
        "mirostat_tau",
        "0 to 100, 5 by default: how surprising tokens are to be, in bits; matters with `mirostat` only",
    ),
    known(
        "mirostat_eta",
        "0 to 100, 0.1 by default: how fast `mirostat` follows the text; matters with it only",
    ),
    known(
        "samplers",
        "the samplers that act, in this order: `penalties`, `dry`, `top_n_sigma`, `top_k`, `typ_p`, `top_p`, `min_p`, `xtc`, and `temperature` anywhere; a list, a string with `;`, or llama-server's letters. Those left out do nothing; a list in another order is refused",
    ),
    known(
        "timings_per_token",
        "`true`: every chunk of a stream has `timings`; the last one has them anyway",
    ),
    known(
        "return_progress",
        "`true`: chunks of a stream tell how far the prompt is, under `prompt_progress`",
    ),
    known(
        "verbose",
        "`true`: llama-server's own document of the first answer, under `__verbose`",
    ),
];

/// A field that says what an answer has to follow.
pub(crate) struct Structured {
    pub(crate) field: &'static str,
    pub(crate) kind: StructuredKind,
}

/// What the value of such a field is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StructuredKind {
    /// A JSON schema, or the JSON text of one.
    Schema,
    /// A regular expression that the whole answer matches.
    Regex,
    /// A list of the strings that the answer may be.
    Choice,
    /// A grammar, in GBNF or in Lark.
    Grammar,
}

impl StructuredKind {
    pub(crate) fn about(self) -> &'static str {
        match self {
            StructuredKind::Schema => {
                "a JSON schema that the answer follows, or the JSON text of one"
            }
            StructuredKind::Regex => "a regular expression that the whole answer matches",
            StructuredKind::Choice => "a list of strings, one of which is the answer",
            StructuredKind::Grammar => {
                "a grammar that the answer follows: GBNF, or Lark as llguidance has it"
            }
        }
    }
}

/// Fields that say what an answer has to follow, beside `response_format` and `structured_outputs`.
pub(crate) const STRUCTURED: &[Structured] = &[
    structured("guided_json", StructuredKind::Schema),
    structured("guided_regex", StructuredKind::Regex),
    structured("guided_choice", StructuredKind::Choice),
    structured("guided_grammar", StructuredKind::Grammar),
    structured("json_schema", StructuredKind::Schema),
    structured("grammar", StructuredKind::Grammar),
    structured("regex", StructuredKind::Regex),
    structured("ebnf", StructuredKind::Grammar),
];

const fn structured(field: &'static str, kind: StructuredKind) -> Structured {
    Structured { field, kind }
}

/// Honored by chat alone.
pub(crate) const HONORED_BY_CHAT: &[Known] = &[
    known("messages", "see its fields"),
    known(
        "max_completion_tokens",
        "the newer name of `max_tokens`; comes first",
    ),
    known("top_logprobs", "0 to 20; needs `logprobs: true`"),
    TRACE,
    known(
        "chat_template_kwargs",
        "arguments of the model's chat template, such as `{\"enable_thinking\": true}`; names that the template does not use are ignored",
    ),
    known("enable_thinking", "turns reasoning on or off"),
    known("think", "the same; or an effort by name"),
    known(
        "reasoning_effort",
        "`none` turns reasoning off, `minimal` and `low` allow 1,024 tokens of it, `medium` changes nothing, `high` and `xhigh` turn it on",
    ),
    known("thinking", "see its fields"),
    known("thinking.type", "`enabled`, `disabled` or `adaptive`"),
    known("thinking.budget_tokens", "tokens of reasoning, at most"),
    known("reasoning", "see its fields"),
    known("reasoning.enabled", "turns reasoning on or off"),
    known("reasoning.effort", "as `reasoning_effort`"),
    known("reasoning.max_tokens", "tokens of reasoning, at most"),
    known(
        "thinking_budget",
        "tokens of reasoning, at most, then the model's own mark closes it; -1 is no limit, 0 turns reasoning off",
    ),
    known("thinking_token_budget", "another name of `thinking_budget`"),
    known("reasoning_budget", "another name of `thinking_budget`"),
    known(
        "thinking_budget_tokens",
        "another name of `thinking_budget`",
    ),
    known(
        "reasoning_budget_tokens",
        "another name of `thinking_budget`",
    ),
    known(
        "tools",
        "functions that the model may call: 128 and 512 KB at most; the answer has `tool_calls`. Calls of a tool with `strict: true` always fit its schema",
    ),
    known(
        "tool_choice",
        "`\"auto\"`; `\"none\"`, which leaves `tools` out; `\"required\"` or a named function: the answer is calls, or one of it, whose arguments fit its schema",
    ),
    known(
        "parallel_tool_calls",
        "`false` ends the text after the first call",
    ),
    known(
        "functions",
        "the older name of `tools`, for one call at most; the answer has `function_call`",
    ),
    known("function_call", "the older name of `tool_choice`"),
    known(
        "reasoning_format",
        "`auto` and `deepseek` put reasoning into `reasoning_content`, `none` leaves it in `content`",
    ),
    known(
        "continue_final_message",
        "`true`: the answer goes on from the last message, which is the assistant's, from its `content` or, where that is empty, its `reasoning_content`; either by name says which. `false`: never. Left out, it goes on from a last message of the assistant (`--no-prefill-assistant` changes that)",
    ),
    known(
        "add_generation_prompt",
        "`true`: the model begins a turn, whoever spoke last; `false` needs an answer that goes on from the last message",
    ),
];

/// Honored by plain completions alone.
pub(crate) const HONORED_BY_COMPLETIONS: &[Known] = &[
    known(
        "prompt",
        "a text or a list of token ids, not empty; a list of up to 128 of these",
    ),
    known(
        "suffix",
        "what follows the text: it fills the gap, where the vocabulary has tokens that mark one",
    ),
    TRACE,
];

/// Honored by chat and by plain completions, and by no other path: only their answers have a place
/// for a trace.
const TRACE: Known = known(
    "speculation.trace",
    "`true`: `trace` of each choice says of every round which tokens came from where ([more](speculation.md#the-trace))",
);

/// Honored in a message.
pub(crate) const HONORED_IN_MESSAGES: &[Known] = &[
    known(
        "role",
        "`system`, `developer`, `user`, `assistant`, `tool` or `function`",
    ),
    known("content", "a string or a list of text parts"),
    known(
        "tool_calls",
        "of an earlier turn, where the template knows them",
    ),
    known("function_call", "the older name of one `tool_calls`"),
];

/// Refused by chat and by plain completions: they change the answer and are not implemented.
pub(crate) const REFUSED: &[Unsupported] = &[
    // Other searches than sampling.
    unless("use_beam_search", "[false]"),
    unless("num_beams", "[1]"),
    unless("length_penalty", "[1]"),
    unless("penalty_alpha", "[0]"),
    unless("do_sample", "[true]"),
    // Formats.
    unless("structural_tag", "[]"),
    unless("guided_whitespace_pattern", "[]"),
    unless("grammar_lazy", "[false]"),
    unless("grammar_triggers", "[[]]"),
    unless("preserved_tokens", "[[]]"),
    unless("json", "[]"),
    unless("format", r#"[""]"#),
    // Lengths and ends.
    unless("num_predict", "[-1]"),
    unless("max_new_tokens", "[]"),
    unless("max_output_tokens", "[]"),
    unless("max_length", "[]"),
    unless("min_length", "[0]"),
    unless("stop_sequences", "[[]]"),
    unless("stop_sequence", "[[]]"),
    unless("stopping_strings", "[[]]"),
    unless("custom_stopping_strings", r#"["", []]"#),
    unless("stop_regex", "[[]]"),
    unless("no_stop_trim", "[false]"),
    unless("include_stop_str_in_output", "[false]"),
    unless("eos_token_id", "[]"),
    unless("n_indent", "[0]"),
    unless("max_time", "[0]"),
    unless("t_max_predict_ms", "[-1, 0]"),
    unless("t_max_prompt_ms", "[-1, 0]"),
    unless("repetition_detection", "[]"),
    // Prompts.
    unless("truncate_prompt_tokens", "[]"),
    unless("truncate_sequence", "[false]"),
    unless("truncate", "[]"),
    unless("prompt_embeds", "[]"),
    unless("input_embeds", "[]"),
    unless("input_ids", "[]"),
    unless("input", r#"[""]"#),
    unless("system", r#"[""]"#),
    unless("instructions", r#"[""]"#),
    unless("template", r#"[""]"#),
    unless("images", "[[]]"),
    unless("raw", "[false]"),
    unless("options", "[{}]"),
    unless("parameters", "[{}]"),
    unless("add_bos_token", "[true]"),
    unless("negative_prompt", r#"[""]"#),
    unless("guidance_scale", "[1]"),
    unless("transforms", "[[]]"),
    // Tokens that are forced or forbidden.
    unless("bad_words", "[[]]"),
    unless("bad_words_ids", "[[]]"),
    unless("banned_tokens", "[[]]"),
    unless("custom_token_bans", r#"[""]"#),
    unless("ban_eos_token", "[false]"),
    unless("suppress_tokens", "[[]]"),
    unless("allowed_token_ids", "[]"),
    unless("logits_processors", "[[]]"),
    unless("custom_logit_processor", "[]"),
    unless("watermark", "[false]"),
    unless("watermarking", "[false]"),
    // Samplers.
    unless("sampler_order", "[[]]"),
    unless("sampler_priority", "[[]]"),
    unless("temp", "[]"),
    unless("temperature_last", "[false]"),
    unless("tfs", "[1]"),
    unless("tfs_z", "[1]"),
    unless("top_a", "[0]"),
    unless("epsilon_cutoff", "[0]"),
    unless("eta_cutoff", "[0]"),
    unless("smoothing_factor", "[0]"),
    unless("adaptive_target", "[-1]"),
    unless("min_keep", "[0]"),
    unless("rep_pen", "[1]"),
    unless("encoder_repetition_penalty", "[1]"),
    unless("repetition_penalty_range", "[0]"),
    unless("no_repeat_ngram_size", "[0]"),
    // Adapters and extensions.
    unless("lora", "[[]]"),
    unless("lora_path", "[]"),
    unless("adapters", "[]"),
    unless("vllm_xargs", "[{}]"),
    unless("custom_params", "[]"),
    // Thinking.
    unless("include_reasoning", "[true]"),
    unless("separate_reasoning", "[true]"),
    // What the response would hold besides.
    unless("prompt_logprobs", "[false]"),
    unless("n_probs", "[0]"),
    unless("post_sampling_probs", "[false]"),
    unless("logprob_token_ids", "[]"),
    unless("return_tokens_as_token_ids", "[false]"),
    unless("return_token_ids", "[false]"),
    unless("return_tokens", "[false]"),
    unless("return_prompt_text", "[false]"),
    unless("return_logprob", "[false]"),
    unless("return_full_text", "[false]"),
    unless("return_hidden_states", "[false]"),
    unless("response_fields", "[[]]"),
    unless("spaces_between_special_tokens", "[true]"),
    // Caches that are kept elsewhere.
    unless("kv_transfer_params", "[{}]"),
    unless("ec_transfer_params", "[{}]"),
];

/// Refused by chat alone.
pub(crate) const REFUSED_BY_CHAT: &[Unsupported] = &[
    unless("modalities", r#"[["text"]]"#),
    unless("audio", "[]"),
    unless("web_search_options", "[]"),
    unless("enable_search", "[false]"),
    unless("verbosity", r#"["medium"]"#),
    unless("documents", "[[]]"),
    unless("mm_processor_kwargs", "[{}]"),
    unless("media_io_kwargs", "[{}]"),
    unless("echo", "[false]"),
    unless("add_special_tokens", "[false]"),
    unless("generation_prompt", r#"[""]"#),
    unless("parse_tool_calls", "[true]"),
];

/// Refused by chat whatever it holds: a chat template is a program.
pub(crate) const CHAT_TEMPLATE: &str = "chat_template";

/// Refused by plain completions alone.
pub(crate) const REFUSED_BY_COMPLETIONS: &[Unsupported] = &[
    unless("echo", "[false]"),
    unless("add_special_tokens", "[true]"),
];

/// Refused in `structured_outputs`: other white space, and other properties than the schema has.
pub(crate) const REFUSED_IN_STRUCTURED_OUTPUTS: &[Unsupported] = &[
    unless("whitespace_pattern", "[]"),
    unless("disable_any_whitespace", "[false]"),
    unless("disable_additional_properties", "[false]"),
    unless("structural_tag", "[]"),
];

/// Refused in a message.
pub(crate) const REFUSED_IN_MESSAGES: &[Unsupported] = &[
    unless("audio", "[]"),
    unless("images", "[[]]"),
    unless("prefix", "[false]"),
    unless("partial", "[false]"),
];

/// Ignored, and known to change nothing: named in the header, not in the log.
pub(crate) const HARMLESS: &[Known] = &[
    known("user", "names the caller"),
    known("safety_identifier", "names the caller"),
    known("metadata", "for the caller's own records"),
    known("store", "nothing is stored"),
    known("service_tier", "there is one"),
    known("request_id", "send the header `x-request-id` instead"),
    known("session_id", "names a conversation"),
    known(
        "prompt_cache_key",
        "every prompt is looked for in the cache",
    ),
    known("prompt_cache_retention", "the cache keeps what fits"),
    known("n_cache_reuse", "changes speed only"),
    known("id_slot", "changes speed only"),
    known("keep_alive", "the model stays loaded"),
    known("prediction", "changes speed only"),
    known("draft_model", "changes speed only"),
    known("num_draft_tokens", "changes speed only"),
    known("backend_sampling", "changes speed only"),
    known("stream_interval", "changes the size of chunks only"),
    known("sse_ping_interval", "a comment comes every 10 seconds"),
    known(
        "stream_options.include_obfuscation",
        "chunks are not padded",
    ),
    known("n_keep", "a context is never shifted"),
    known("n_discard", "a context is never shifted"),
    known("num_ctx", "`--context` sets it"),
    known("truncation_side", "nothing is truncated"),
    known("truncation_length", "nothing is truncated"),
    known("smoothing_curve", "matters with `smoothing_factor` only"),
    known("adaptive_decay", "matters with `adaptive_target` only"),
    known("rep_pen_range", "matters with `rep_pen` only"),
    known(
        "reasoning_control",
        "reasoning that has begun ends by a budget, and not from outside",
    ),
    known("reasoning_budget_message", "matters with a budget only"),
    known("reasoning_budget_start_tag", "matters with a budget only"),
    known("reasoning_budget_end_tag", "matters with a budget only"),
    known("reasoning_budget_end_tags", "matters with a budget only"),
];

/// Fields of a message that pass without a word: they name things, or the client's
/// library adds them to what it sends back.
pub(crate) const QUIET_IN_MESSAGES: &[&str] = &["id", "tool_call_id", "refusal", "annotations"];

/// The tables of this module as Markdown, as they stand in `docs/server.md`.
pub(crate) fn markdown() -> String {
    let (chat, plain, both) = ("chat", "completions", "both");
    let mut page = String::from("### Honored\n\n| field | of | what |\n| --- | --- | --- |\n");
    let (first, others) = HONORED.split_at(HONORED_FIRST);
    for Known { field, about } in first {
        let _ = writeln!(page, "| `{field}` | {both} | {about} |");
    }
    for SamplerNumber { name, about, .. } in SAMPLER_NUMBERS {
        let _ = writeln!(page, "| `{name}` | {both} | {about} |");
    }
    let honored = [
        (others, both, ""),
        (HONORED_BY_CHAT, chat, ""),
        (HONORED_IN_MESSAGES, chat, "messages[]."),
        (HONORED_BY_COMPLETIONS, plain, ""),
    ];
    for (table, of, path) in honored {
        for Known { field, about } in table {
            let _ = writeln!(page, "| `{path}{field}` | {of} | {about} |");
        }
    }
    for Structured { field, kind } in STRUCTURED {
        let _ = writeln!(page, "| `{field}` | {both} | {} |", kind.about());
    }
    page.push_str("\n### Refused\n\n| field | of | accepted with |\n| --- | --- | --- |\n");
    let mut refused = |entry: &Unsupported, of: &str, path: &str| {
        let values = neutral(entry).into_iter().map(|v| format!("`{v}`"));
        let values: Vec<String> = values.chain(["`null`".to_owned()]).collect();
        let field = entry.field;
        let _ = writeln!(page, "| `{path}{field}` | {of} | {} |", values.join(", "));
    };
    for (table, of, path) in [
        (REFUSED, both, ""),
        (REFUSED_BY_CHAT, chat, ""),
        (REFUSED_IN_STRUCTURED_OUTPUTS, both, "structured_outputs."),
        (REFUSED_IN_MESSAGES, chat, "messages[]."),
        (REFUSED_BY_COMPLETIONS, plain, ""),
    ] {
        table.iter().for_each(|entry| refused(entry, of, path));
    }
    let _ = writeln!(page, "| `{CHAT_TEMPLATE}` | {chat} | `null` |");
    page.push_str("\n### Ignored\n\n| field | why |\n| --- | --- |\n");
    for Known { field, about } in HARMLESS {
        let _ = writeln!(page, "| `{field}` | {about} |");
    }
    page
}

/// Whether a handler may read the field `path`.
pub(crate) fn is_listed(path: &str) -> bool {
    let honored = [HONORED, HONORED_BY_CHAT, HONORED_BY_COMPLETIONS];
    let refused = [REFUSED, REFUSED_BY_CHAT, REFUSED_BY_COMPLETIONS];
    let is_refused_inside = path
        .strip_prefix("structured_outputs.")
        .is_some_and(|field| {
            REFUSED_IN_STRUCTURED_OUTPUTS
                .iter()
                .any(|u| u.field == field)
        });
    path == CHAT_TEMPLATE
        || is_refused_inside
        || honored.into_iter().flatten().any(|k| k.field == path)
        || SAMPLER_NUMBERS.iter().any(|n| n.name == path)
        || STRUCTURED.iter().any(|s| s.field == path)
        || refused.into_iter().flatten().any(|u| u.field == path)
}

/// Whether ignoring the field `path` needs no warning.
pub(crate) fn is_harmless(path: &str) -> bool {
    HARMLESS.iter().any(|k| k.field == path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::Fields;
    use serde_json::{Map, Value, json};

    #[test]
    fn every_refused_field_passes_with_what_changes_nothing_and_only_then() {
        let tables = [REFUSED, REFUSED_BY_CHAT, REFUSED_BY_COMPLETIONS];
        let mut n = 0;
        for entry in tables.into_iter().flatten() {
            let check = |value: Value| {
                let map = Map::from_iter([(entry.field.to_owned(), value)]);
                Fields::new(&map, FIELDS).refuse(std::slice::from_ref(entry))
            };
            for value in neutral(entry).into_iter().chain([Value::Null]) {
                assert!(check(value.clone()).is_ok(), "{} = {value}", entry.field);
            }
            for value in [json!({"a": 1}), json!(0.37), json!("odd")] {
                let error = check(value.clone()).unwrap_err();
                assert_eq!(error.code, Some("unsupported_parameter"), "{error:?}");
                let field = format!("`{}`", entry.field);
                assert!(error.message.contains(&field), "{error:?}");
            }
            n += 1;
        }
        assert!(n > 100, "{n}");
    }

    #[test]
    fn no_field_is_treated_in_two_ways() {
        let mut all: Vec<&str> = Vec::new();
        for table in [HONORED, HARMLESS] {
            all.extend(table.iter().map(|k| k.field));
        }
        all.extend(REFUSED.iter().map(|u| u.field));
        all.extend(STRUCTURED.iter().map(|s| s.field));
        for (honored, refused) in [
            (HONORED_BY_CHAT, REFUSED_BY_CHAT),
            (HONORED_BY_COMPLETIONS, REFUSED_BY_COMPLETIONS),
        ] {
            let mut own: Vec<&str> = honored.iter().map(|k| k.field).collect();
            own.extend(refused.iter().map(|u| u.field).chain(all.iter().copied()));
            own.sort_unstable();
            let twice = own.windows(2).find(|pair| pair[0] == pair[1]);
            assert_eq!(twice, None);
        }
        assert!(HARMLESS.iter().all(|k| !is_listed(k.field)));
    }
}
