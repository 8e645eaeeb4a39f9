//! How every known field of Ollama's requests is treated, as
//! [`openai::tables`](crate::openai::tables) has it for OpenAI's: only fields that are listed may
//! be read, and `docs/server.md` shows the table.
//!
//! What another dialect refuses or ignores by name is treated the same here, in a request and in
//! its `options`.

use std::fmt::Write;
use std::slice;

use engine::SAMPLER_NUMBERS;

use crate::anthropic::tables::AS_IN_OPENAI;
use crate::errors::ApiError;
use crate::fields::{self, Fields, Unsupported, neutral, unless};
use crate::openai::tables::{self as openai, Known, known};

/// What is known of the fields of Ollama's requests.
pub(crate) const FIELDS: &fields::Known = &fields::Known {
    is_listed: |path| cfg!(test) || is_listed(path),
    is_harmless,
};

/// Where the options are, with a dot.
pub(super) const OPTIONS: &str = "options.";

/// Honored in a request.
const HONORED: &[Known] = &[
    known(
        "model",
        "any name is answered by the model that is served, with or without `:latest`",
    ),
    known("name", "show: the older name of `model`"),
    known(
        "messages",
        "chat: `role`, `content`, `thinking`, `tool_calls`, `tool_name`, `tool_call_id`; without any the answer says `load`",
    ),
    known(
        "prompt",
        "generate: a string; an empty one is answered by `load`",
    ),
    known("system", "generate: a system message before the prompt"),
    known("raw", "generate: `true` leaves the model's template out"),
    known("stream", "lines of JSON, unless it is `false`"),
    known(
        "format",
        "`\"json\"`, or a JSON schema, which is always enforced",
    ),
    known("tools", "chat: functions that the model may call"),
    known(
        "think",
        "turns reasoning on or off, or an effort by name, such as `\"low\"`, which allows 1,024 tokens of it",
    ),
    known("options", "see its fields"),
];

/// Honored in `options`, beside what other dialects read there.
const HONORED_IN_OPTIONS: &[Known] = &[
    known(
        "num_predict",
        "tokens to write, at most; -1 and -2 are no limit",
    ),
    known(
        "stop",
        "a string or up to 16, each of 256 characters at most",
    ),
];

/// Refused in a request, beside what OpenAI's requests may not have.
const REFUSED: &[Unsupported] = &[
    unless("suffix", r#"[""]"#),
    unless("template", r#"[""]"#),
    unless("images", "[[]]"),
    unless("context", "[[]]"),
    unless("logprobs", "[false]"),
    unless("top_logprobs", "[0]"),
    // Names of other APIs.
    unless("max_tokens", "[]"),
    unless("response_format", "[]"),
    unless("n", "[1]"),
];

/// Refused in `options`, beside what OpenAI's requests may not have.
const REFUSED_IN_OPTIONS: &[Unsupported] = &[
    unless("penalize_newline", "[true]"),
    unless("rope_frequency_base", "[0]"),
    unless("rope_frequency_scale", "[0, 1]"),
    unless("vocab_only", "[false]"),
    unless("embedding_only", "[false]"),
    // Names that belong outside of it, or to other APIs.
    unless("stream", "[]"),
    unless("think", "[]"),
    unless("max_tokens", "[]"),
];

/// Ignored, and known to change nothing: named in the header, not in the log.
const HARMLESS: &[Known] = &[
    known("keep_alive", "the model stays loaded"),
    known("truncate", "a conversation that does not fit is an error"),
    known("shift", "a context is never shifted"),
    known("verbose", "`show` says the same to all"),
    known("options.num_ctx", "`--context` sets it"),
    known("options.num_keep", "a context is never shifted"),
    known("options.num_batch", "changes speed only"),
    known("options.num_gpu", "changes speed only"),
    known("options.main_gpu", "changes speed only"),
    known("options.num_thread", "`--threads` sets it"),
    known("options.num_gqa", "the model has its own"),
    known("options.numa", "changes speed only"),
    known("options.use_mmap", "changes speed only"),
    known("options.use_mlock", "changes speed only"),
    known("options.low_vram", "changes speed only"),
    known("options.f16_kv", "`--kv` sets it"),
    known("options.logits_all", "changes speed only"),
];

/// The names that are read as options, and so do not belong beside them.
fn option_names() -> impl Iterator<Item = &'static str> {
    let numbers = SAMPLER_NUMBERS.iter().map(|number| number.name);
    let own = HONORED_IN_OPTIONS.iter().map(|k| k.field);
    numbers.chain(AS_IN_OPENAI.iter().copied()).chain(own)
}

/// Whether `field` has a meaning of its own in a request of this API.
fn is_own(field: &str) -> bool {
    HONORED.iter().any(|k| k.field == field)
        || HARMLESS.iter().any(|k| k.field == field)
        || REFUSED.iter().any(|u| u.field == field)
}

/// Refuses the fields that ask for what is not implemented, or that belong in `options`.
///
/// # Errors
///
/// 400 for the first of them.
pub(super) fn refuse(fields: &Fields<'_>, is_chat: bool) -> Result<(), ApiError> {
    fields.refuse(REFUSED)?;
    refused_elsewhere().try_for_each(|entry| fields.refuse(slice::from_ref(entry)))?;
    let only_generate = [unless("system", r#"[""]"#), unless("raw", "[false]")];
    let only_chat = [unless("tools", "[[]]")];
    let others = if is_chat {
        &only_generate[..]
    } else {
        &only_chat
    };
    fields.refuse(others)?;
    let misplaced = |name: &&'static str| *name != "speculation" && fields.get(name).is_some();
    let top = |name: &&str| !name.contains('.');
    match option_names().filter(top).find(misplaced) {
        Some(name) => Err(fields.error(name, "belongs in `options`")),
        None => Ok(()),
    }
}

/// Refuses the options that ask for what is not implemented.
///
/// # Errors
///
/// 400 for the first of them.
pub(super) fn refuse_options(options: &Fields<'_>) -> Result<(), ApiError> {
    options.refuse(REFUSED_IN_OPTIONS)?;
    refused_in_options().try_for_each(|entry| options.refuse(slice::from_ref(entry)))
}

/// What OpenAI's requests may not have, but for what has a meaning of its own here.
fn refused_elsewhere() -> impl Iterator<Item = &'static Unsupported> {
    let all = openai::REFUSED.iter().chain(openai::REFUSED_BY_CHAT);
    all.filter(|entry| !is_own(entry.field) && option_names().all(|name| name != entry.field))
}

/// What OpenAI's requests may not have, but for what is an option here.
fn refused_in_options() -> impl Iterator<Item = &'static Unsupported> {
    let own = |field: &str| {
        HONORED_IN_OPTIONS.iter().any(|k| k.field == field)
            || REFUSED_IN_OPTIONS.iter().any(|u| u.field == field)
    };
    openai::REFUSED
        .iter()
        .filter(move |entry| !own(entry.field))
}

/// The table of this module as Markdown, as it stands in `docs/server.md`.
pub(crate) fn markdown() -> String {
    let mut page =
        String::from("| field | treatment | what, why, or accepted with |\n| --- | --- | --- |\n");
    for (table, path) in [(HONORED, ""), (HONORED_IN_OPTIONS, OPTIONS)] {
        for Known { field, about } in table {
            let _ = writeln!(page, "| `{path}{field}` | honored | {about} |");
        }
    }
    let numbers = SAMPLER_NUMBERS.iter().map(|number| number.name);
    let shared = numbers.chain(AS_IN_OPENAI.iter().copied());
    let shared: Vec<String> = shared.map(|field| format!("`{OPTIONS}{field}`")).collect();
    let _ = writeln!(
        page,
        "| {} | honored | as [above](#honored); `speculation` also beside `options`, and a `seed` of -1 is any |",
        shared.join(", ")
    );
    for (table, path) in [(REFUSED, ""), (REFUSED_IN_OPTIONS, OPTIONS)] {
        for entry in table {
            let values = neutral(entry).into_iter().map(|v| format!("`{v}`"));
            let values: Vec<String> = values.chain(["`null`".to_owned()]).collect();
            let field = entry.field;
            let _ = writeln!(
                page,
                "| `{path}{field}` | refused | {} |",
                values.join(", ")
            );
        }
    }
    for Known { field, about } in HARMLESS {
        let _ = writeln!(page, "| `{field}` | ignored | {about} |");
    }
    page
}

/// Whether the field `path` may be read.
fn is_listed(path: &str) -> bool {
    match path.strip_prefix(OPTIONS) {
        Some(option) => {
            option_names().any(|name| name == option)
                || REFUSED_IN_OPTIONS.iter().any(|u| u.field == option)
                || refused_in_options().any(|u| u.field == option)
        }
        None => {
            HONORED.iter().any(|k| k.field == path)
                || REFUSED.iter().any(|u| u.field == path)
                || refused_elsewhere().any(|u| u.field == path)
                || option_names().any(|name| name == path)
        }
    }
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
        all.extend(REFUSED.iter().map(|u| u.field));
        all.extend(refused_elsewhere().map(|u| u.field));
        all.extend(option_names());
        let top = HARMLESS.iter().map(|k| k.field);
        all.extend(top.filter(|field| !field.starts_with(OPTIONS)));
        let mut options: Vec<&str> = option_names().collect();
        options.extend(REFUSED_IN_OPTIONS.iter().map(|u| u.field));
        options.extend(refused_in_options().map(|u| u.field));
        options.extend(
            HARMLESS
                .iter()
                .filter_map(|k| k.field.strip_prefix(OPTIONS)),
        );
        for mut names in [all, options] {
            names.sort_unstable();
            let twice = names.windows(2).find(|pair| pair[0] == pair[1]);
            assert_eq!(twice, None);
        }
    }
}
