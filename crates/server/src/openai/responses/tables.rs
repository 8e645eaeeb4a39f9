//! How every known field of a request to the Responses API is treated.
//!
//! What the API shares with chat is taken from [`crate::openai::tables`]; here is what it has
//! beside that, and what has another name in it.

use std::sync::LazyLock;

use crate::openai::tables as openai;
use crate::table::Kind::{Any, Bool, Integer, List, Object, Text, Texts};
use crate::table::{self, Harmless, Known, Table, Unsupported, harmless, known, unless};

/// Honored here alone, or under a name or in a form that only this API has.
const OWN: &[Known] = &[
    known(
        "input",
        Any,
        "a string, or a list of items: messages, calls and their results, reasoning, references to stored items",
    ),
    known("instructions", Text, "a system message before the input"),
    known(
        "previous_response_id",
        Text,
        "the stored response that this one goes on from: its conversation comes before `input`",
    ),
    known("max_output_tokens", Integer, "-1 is no limit"),
    known(
        "max_tool_calls",
        Integer,
        "ends the text after that many calls",
    ),
    known(
        "parallel_tool_calls",
        Bool,
        "`false` ends the text after the first call",
    ),
    known(
        "tools",
        List,
        "functions that the model may call: 128 and 512 KB at most. Tools of other types are ignored",
    ),
    known(
        "tool_choice",
        Any,
        "`\"none\"`, `\"auto\"`, `\"required\"`, a function by name, or `allowed_tools`, which leaves the others out",
    ),
    known("text", Object, "see its fields"),
    known(
        "text.format",
        Object,
        "`text`, `json_object`, or `json_schema` with a schema, which is always enforced",
    ),
    known(
        "text.format.type",
        Text,
        "`text`, `json_object` or `json_schema`",
    ),
    known("text.format.schema", Any, "the JSON schema"),
    known(
        "text.format.name",
        Text,
        "names the schema; changes nothing",
    ),
    known(
        "text.format.description",
        Text,
        "describes the schema; changes nothing",
    ),
    known(
        "text.format.strict",
        Bool,
        "changes nothing: a schema is always enforced",
    ),
    known(
        "text.verbosity",
        Text,
        "the argument `verbosity` of the chat template; ignored where the template reads none",
    ),
    known(
        "include",
        Texts,
        "`message.output_text.logprobs` and `reasoning.encrypted_content`; others are ignored",
    ),
    known(
        "top_logprobs",
        Integer,
        "0 to 20; the text has its log-probabilities as if `include` asked for them",
    ),
    known(
        "store",
        Bool,
        "`false` keeps nothing; otherwise the response can be read and gone on from until newer ones take its place",
    ),
    known(
        "truncation",
        Text,
        "`auto` or `disabled`: nothing is truncated, a conversation that does not fit is refused",
    ),
    known(
        "metadata",
        Object,
        "up to 16 strings, which the response repeats",
    ),
    known("user", Text, "the response repeats it"),
    known("safety_identifier", Text, "the response repeats it"),
    known("prompt_cache_key", Text, "the response repeats it"),
    known(
        "stream_options",
        Object,
        "all of its fields are ignored: the last event always has `usage`",
    ),
];

/// Fields of `HONORED` that are not here, with all fields inside them.
const NOT_HERE: &[&str] = &[
    "n",
    "n_cmpl",
    "best_of",
    "max_tokens",
    "n_predict",
    "timings_per_token",
    "return_progress",
    "verbose",
    "stream_options",
    "logprobs",
    "response_format",
];

/// Fields of `HONORED_BY_CHAT` that are here too.
const AS_IN_CHAT: &[&str] = &[
    "chat_template_kwargs",
    "enable_thinking",
    "think",
    "reasoning_effort",
    "thinking",
    "thinking.type",
    "thinking.budget_tokens",
    "reasoning",
    "reasoning.enabled",
    "reasoning.effort",
    "reasoning.max_tokens",
    "thinking_budget",
    "thinking_token_budget",
    "reasoning_budget",
    "reasoning_budget_tokens",
    "thinking_budget_tokens",
];

/// Fields of other APIs for what this one has under another name, and that name.
pub(super) const RENAMED: &[(&str, &str)] = &[
    ("messages", "input"),
    ("max_tokens", "max_output_tokens"),
    ("n_predict", "max_output_tokens"),
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format", "text.format"),
    ("functions", "tools"),
    ("function_call", "tool_choice"),
    ("verbosity", "text.verbosity"),
    ("logprobs", "top_logprobs"),
];

/// Refused here, whatever other paths do with it.
const OWN_REFUSED: &[Unsupported] = &[
    unless("n", "[1]"),
    unless("n_cmpl", "[1]"),
    unless("best_of", "[1]"),
    unless("continue_final_message", "[false]"),
    unless("add_generation_prompt", "[true]"),
    unless("background", "[false]"),
    unless("conversation", "[]"),
    unless("prompt", "[]"),
    unless("moderation", "[]"),
    unless("mm_processor_kwargs", "[{}]"),
    unless("media_io_kwargs", "[{}]"),
    unless("reasoning_format", r#"["auto", "deepseek"]"#),
];

/// Ignored here alone, and known to change nothing.
const OWN_HARMLESS: &[Harmless] = &[
    harmless("client_metadata", "for the caller's own records"),
    harmless("reasoning.summary", "there are no summaries"),
    harmless("reasoning.generate_summary", "there are no summaries"),
    harmless(
        "context_management",
        "nothing is compacted by itself: `/v1/responses/compact` does",
    ),
    harmless("timings_per_token", "`timings` come at the end"),
    harmless("return_progress", "comments in the stream say the progress"),
    harmless("verbose", "debugging output of llama-server"),
    harmless("prompt_cache_options", "the cache keeps what fits"),
    harmless("stream_options.include_usage", "`usage` always comes"),
];

/// Fields that this API shares with chat, in the order of the page.
fn shared() -> impl Iterator<Item = &'static str> {
    let outer = |field: &str| field.split('.').next().unwrap_or_default().to_owned();
    let honored = openai::HONORED.iter().map(|known| known.field);
    let honored = honored.filter(move |field| {
        let outer = outer(field);
        let is_own = OWN.iter().any(|own| own.field == outer);
        !is_own && !NOT_HERE.contains(&outer.as_str())
    });
    honored.chain(AS_IN_CHAT.iter().copied())
}

/// Fields of requests to the Responses API.
pub(crate) static RESPONSES: LazyLock<Table> = LazyLock::new(|| {
    let formats = openai::STRUCTURED.iter().map(|entry| entry.field);
    Table::new("ResponsesRequest", &[])
        .honors("", OWN)
        .shares_sampler_numbers("")
        .shares("", &openai::CHAT, shared().chain(formats))
        .renames(RENAMED.iter().copied())
        .refuses("", OWN_REFUSED)
        .ignores(OWN_HARMLESS)
        .refuses_as_elsewhere("", openai::REFUSED)
        .refuses_as_elsewhere("", openai::REFUSED_BY_CHAT)
        .ignores_as_elsewhere(openai::HARMLESS)
});

/// The table of this module as Markdown, as it stands in `docs/server.md`.
pub(crate) fn markdown() -> String {
    table::markdown(&[&RESPONSES], "as [above](#honored)")
}
