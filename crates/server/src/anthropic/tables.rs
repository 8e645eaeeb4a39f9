//! How every known field of a Messages request is treated, as
//! [`openai::tables`](crate::openai::tables) has it for OpenAI's: only fields that are listed may
//! be read, and `docs/server.md` shows the table.
//!
//! The options of sampling and speculation are read by the same code in all dialects, so they
//! are listed there. What another dialect refuses or ignores by name is treated the same here.

use std::sync::LazyLock;

use crate::openai::tables as openai;
use crate::table::Kind::{Any, Bool, Integer, List, Object, Text, Texts};
use crate::table::{self, Harmless, Known, Table, Unsupported, harmless, known, unless};

/// Honored, beside [`AS_IN_OPENAI`] and the numbers of the sampler.
const HONORED: &[Known] = &[
    known(
        "model",
        Text,
        "with one model any name will do, unless `--strict-model-names` is set; with several, the name of one. The response names the true one",
    ),
    known("max_tokens", Integer, "required; -1 is no limit"),
    known("system", Any, "a string or blocks of text"),
    known("messages", List, "see its fields"),
    known(
        "messages[].role",
        Text,
        "`user`, `assistant` or `system`; the answer goes on from a last message of the assistant",
    ),
    known(
        "messages[].content",
        Any,
        "a string, or blocks: `text`, `image`, `tool_use`, `tool_result`, `thinking`, `redacted_thinking`",
    ),
    known(
        "stop_sequences",
        Texts,
        "a list of up to 16 strings, each of 256 characters at most",
    ),
    known("stream", Bool, "server-sent events"),
    known(
        "thinking",
        Object,
        "turns reasoning on or off; off if it is left out",
    ),
    known(
        "thinking.type",
        Text,
        "`enabled` and `adaptive` turn it on, `disabled` off",
    ),
    known(
        "thinking.budget_tokens",
        Integer,
        "tokens of reasoning, at most",
    ),
    known("output_config", Object, "see its fields"),
    known(
        "output_config.effort",
        Text,
        "`low`, `medium`, `high`, `xhigh` or `max`. A chat template that reads `reasoning_effort` is told; for one that does not, `low` allows 1,024 tokens of reasoning, and the others any number",
    ),
    known("output_config.format", Object, "see its fields"),
    known("output_config.format.type", Text, "`json_schema`"),
    known(
        "output_config.format.schema",
        Any,
        "a JSON schema, which is always enforced",
    ),
    known(
        "output_format",
        Object,
        "the older name of `output_config.format`, with the same fields",
    ),
    known("output_format.type", Text, "`json_schema`"),
    known(
        "output_format.schema",
        Any,
        "as `output_config.format.schema`",
    ),
    known(
        "tools",
        List,
        "tools with `name` and `input_schema` that the model may call: 128 and 512 KB at most. Calls of a tool with `strict: true` always fit its schema",
    ),
    known("tool_choice", Object, "see its fields"),
    known(
        "tool_choice.type",
        Text,
        "`auto`; `none`, which leaves `tools` out; `any` or `tool`: the answer is calls whose input fits the schema",
    ),
    known(
        "tool_choice.name",
        Text,
        "the tool that must be called, with `tool`",
    ),
    known(
        "tool_choice.disable_parallel_tool_use",
        Bool,
        "`true` ends the text after the first call",
    ),
    known("thread", Object, "see its fields; no conversation is kept"),
    known(
        "thread.type",
        Text,
        "`create` changes nothing; `continue` is answered by `thread_not_found`, upon which libraries send the whole conversation",
    ),
    known("thread.previous_message_id", Text, "names what is not kept"),
    known(
        "cache_control",
        Any,
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
    "speculation.max_draft",
    "speculation.draft_fixed",
    "speculation.drafters",
    "speculation.accept",
    "repeat_last_n",
    "mirostat",
    "mirostat_mode",
    "mirostat_tau",
    "mirostat_eta",
    "samplers",
];

/// Refused, beside what OpenAI's requests may not have.
pub(crate) const REFUSED: &[Unsupported] = &[
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
    unless("mm_processor_kwargs", "[{}]"),
    unless("media_io_kwargs", "[{}]"),
    unless(openai::CHAT_TEMPLATE, "[]"),
    // What this API's answers have no place for.
    unless("logprobs", "[false]"),
    unless("top_logprobs", "[0]"),
];

/// Ignored, and known to change nothing: named in the header, not in the log.
const HARMLESS: &[Harmless] = &[
    harmless("metadata", "names the caller"),
    harmless("service_tier", "there is one"),
    harmless("speed", "there is one"),
    harmless(
        "context_management",
        "nothing is taken out of a conversation",
    ),
    harmless("compaction", "nothing is taken out of a conversation"),
    harmless("thinking.display", "reasoning is always shown"),
    harmless("timings_per_token", "`timings` come at the end"),
    harmless("return_progress", "comments in the stream say the progress"),
    harmless("verbose", "debugging output of llama-server"),
    harmless("inference_geo", "the model runs where the server is"),
    harmless("user_profile_id", "names the caller"),
    harmless("workspace_id", "names the caller"),
    harmless("billing_policy", "nothing is billed"),
    harmless(
        "diagnostics",
        "the response has `timings` and `speculation`",
    ),
    harmless("fallbacks", "no request is sent to another model"),
    harmless(
        "fallback_credit_token",
        "no request is sent to another model",
    ),
    harmless("betas", "features are there or refused by name"),
    harmless("anthropic_beta", "features are there or refused by name"),
    harmless("anthropic_version", "there is one"),
];

/// Fields of Messages requests.
pub(crate) static MESSAGES: LazyLock<Table> = LazyLock::new(|| {
    Table::new("MessagesRequest", &["messages"])
        .honors("", HONORED)
        .shares_sampler_numbers("")
        .shares("", &openai::CHAT, AS_IN_OPENAI.iter().copied())
        .refuses("", REFUSED)
        .ignores(HARMLESS)
        .refuses_as_elsewhere("", openai::REFUSED)
        .refuses_as_elsewhere("", openai::REFUSED_BY_CHAT)
        .ignores_as_elsewhere(openai::HARMLESS)
});

/// The table of this module as Markdown, as it stands in `docs/server.md`.
pub(crate) fn markdown() -> String {
    table::markdown(&[&MESSAGES], "as [above](#honored)")
}
