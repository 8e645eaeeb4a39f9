//! How every known field of a request to the Responses API is treated.
//!
//! What the API shares with chat is taken from [`crate::openai::tables`]; here is what it has
//! beside that, and what has another name in it.

use std::fmt::Write;

use engine::{SAMPLER_NUMBERS, SamplerNumber};

use crate::fields::{self, Unsupported, neutral, unless};
use crate::openai::tables::{
    self, CHAT_TEMPLATE, HARMLESS, HONORED, HONORED_BY_CHAT, Known, REFUSED, REFUSED_BY_CHAT,
    STRUCTURED, Structured, known,
};

/// What is known of the fields of requests to the Responses API.
pub(super) const FIELDS: &fields::Known = &fields::Known {
    is_listed: |path| cfg!(test) || is_listed(path),
    is_harmless,
};

/// Honored here alone, or under a name or in a form that only this API has.
const OWN: &[Known] = &[
    known(
        "input",
        "a string, or a list of items: messages, calls and their results, reasoning, references to stored items",
    ),
    known("instructions", "a system message before the input"),
    known(
        "previous_response_id",
        "the stored response that this one goes on from: its conversation comes before `input`",
    ),
    known("max_output_tokens", "-1 is no limit"),
    known("max_tool_calls", "ends the text after that many calls"),
    known(
        "parallel_tool_calls",
        "`false` ends the text after the first call",
    ),
    known(
        "tools",
        "functions that the model may call: 128 and 512 KB at most. Tools of other types are ignored",
    ),
    known(
        "tool_choice",
        "`\"none\"`, `\"auto\"`, `\"required\"`, a function by name, or `allowed_tools`, which leaves the others out",
    ),
    known("text", "see its fields"),
    known(
        "text.format",
        "`text`, `json_object`, or `json_schema` with a schema, which is always enforced",
    ),
    known("text.format.type", "`text`, `json_object` or `json_schema`"),
    known("text.format.schema", "the JSON schema"),
    known("text.format.name", "names the schema; changes nothing"),
    known(
        "text.format.description",
        "describes the schema; changes nothing",
    ),
    known(
        "text.format.strict",
        "changes nothing: a schema is always enforced",
    ),
    known(
        "text.verbosity",
        "the argument `verbosity` of the chat template; ignored where the template reads none",
    ),
    known(
        "include",
        "`message.output_text.logprobs` and `reasoning.encrypted_content`; others are ignored",
    ),
    known(
        "top_logprobs",
        "0 to 20; the text has its log-probabilities as if `include` asked for them",
    ),
    known(
        "store",
        "`false` keeps nothing; otherwise the response can be read and gone on from until newer ones take its place",
    ),
    known(
        "truncation",
        "`auto` or `disabled`: nothing is truncated, a conversation that does not fit is refused",
    ),
    known("metadata", "up to 16 strings, which the response repeats"),
    known("user", "the response repeats it"),
    known("safety_identifier", "the response repeats it"),
    known("prompt_cache_key", "the response repeats it"),
    known(
        "stream_options",
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
    unless("reasoning_format", r#"["auto", "deepseek"]"#),
];

/// Ignored here alone, and known to change nothing.
const OWN_HARMLESS: &[Known] = &[
    known("client_metadata", "for the caller's own records"),
    known("reasoning.summary", "there are no summaries"),
    known("reasoning.generate_summary", "there are no summaries"),
    known("context_management", "nothing is compacted"),
    known("timings_per_token", "`timings` come at the end"),
    known("return_progress", "comments in the stream say the progress"),
    known("verbose", "debugging output of llama-server"),
    known("prompt_cache_options", "the cache keeps what fits"),
    known("stream_options.include_usage", "`usage` always comes"),
];

/// Fields that this API shares with chat, in the order of the page.
fn shared() -> impl Iterator<Item = &'static Known> {
    let is_here = |known: &&Known| {
        let outer = known.field.split('.').next().unwrap_or_default();
        !NOT_HERE.contains(&outer)
    };
    let as_in_chat = |known: &&Known| AS_IN_CHAT.contains(&known.field);
    let by_chat = HONORED_BY_CHAT.iter().filter(as_in_chat);
    HONORED.iter().filter(is_here).chain(by_chat)
}

/// Fields that change what is written and are not implemented.
pub(super) fn refused() -> impl Iterator<Item = &'static Unsupported> {
    let is_own = |field: &str| {
        let honored = OWN.iter().map(|known| known.field);
        let refused = OWN_REFUSED.iter().map(|entry| entry.field);
        honored.chain(refused).any(|own| own == field)
    };
    let is_renamed = |field: &str| RENAMED.iter().any(|(name, _)| *name == field);
    let others = REFUSED.iter().chain(REFUSED_BY_CHAT);
    let others = others.filter(move |entry| !is_own(entry.field) && !is_renamed(entry.field));
    OWN_REFUSED.iter().chain(others)
}

/// Whether a handler may read the field `path`.
fn is_listed(path: &str) -> bool {
    // Readers that all of OpenAI's paths share look inside objects.
    (path.contains('.') && tables::is_listed(path))
        || path == CHAT_TEMPLATE
        || OWN.iter().chain(shared()).any(|known| known.field == path)
        || SAMPLER_NUMBERS.iter().any(|number| number.name == path)
        || STRUCTURED.iter().any(|entry| entry.field == path)
        || RENAMED.iter().any(|(name, _)| *name == path)
        || refused().any(|entry| entry.field == path)
}

/// Whether ignoring the field `path` needs no warning.
fn is_harmless(path: &str) -> bool {
    let all = HARMLESS.iter().chain(OWN_HARMLESS);
    let mut all = all.filter(|known| !OWN.iter().any(|own| own.field == known.field));
    all.any(|known| known.field == path)
}

/// The tables of this module as Markdown, as they stand in `docs/server.md`.
pub(crate) fn markdown() -> String {
    let mut page =
        String::from("\n### Honored by the Responses API\n\n| field | what |\n| --- | --- |\n");
    let mut row = |field: &str, about: &str| {
        let _ = writeln!(page, "| `{field}` | {about} |");
    };
    for Known { field, about } in OWN {
        row(field, about);
    }
    for Known { field, about } in shared() {
        row(field, about);
    }
    for SamplerNumber { name, about, .. } in SAMPLER_NUMBERS {
        row(name, about);
    }
    for Structured { field, kind } in STRUCTURED {
        row(field, kind.about());
    }
    page.push_str(
        "\n### Refused by the Responses API\n\nBeside what chat refuses:\n\n\
         | field | accepted with, or what to send |\n| --- | --- |\n",
    );
    for entry in OWN_REFUSED {
        let values = neutral(entry).into_iter().map(|v| format!("`{v}`"));
        let values: Vec<String> = values.chain(["`null`".to_owned()]).collect();
        let _ = writeln!(page, "| `{}` | {} |", entry.field, values.join(", "));
    }
    for (name, instead) in RENAMED {
        let _ = writeln!(page, "| `{name}` | send `{instead}` |");
    }
    page.push_str(
        "\n### Ignored by the Responses API\n\nBeside what chat ignores:\n\n\
         | field | why |\n| --- | --- |\n",
    );
    for Known { field, about } in OWN_HARMLESS {
        let _ = writeln!(page, "| `{field}` | {about} |");
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_field_is_treated_in_two_ways() {
        let mut all: Vec<&str> = OWN.iter().chain(shared()).map(|k| k.field).collect();
        all.extend(refused().map(|entry| entry.field));
        all.extend(RENAMED.iter().map(|(name, _)| *name));
        all.extend(OWN_HARMLESS.iter().map(|k| k.field));
        all.extend(STRUCTURED.iter().map(|entry| entry.field));
        all.sort_unstable();
        let twice = all.windows(2).find(|pair| pair[0] == pair[1]);
        assert_eq!(twice, None);
        assert!(all.len() > 150, "{}", all.len());
        let named = AS_IN_CHAT.iter().filter(|name| all.contains(name));
        assert_eq!(named.count(), AS_IN_CHAT.len());
    }
}
