//! How every known field of Ollama's requests is treated, as
//! [`openai::tables`](crate::openai::tables) has it for OpenAI's: only fields that are listed may
//! be read, and `docs/server.md` shows the table.
//!
//! What another dialect refuses or ignores by name is treated the same here, in a request and in
//! its `options`.

use std::sync::LazyLock;

use engine::SAMPLER_NUMBERS;

use crate::anthropic::tables::{self as anthropic, AS_IN_OPENAI};
use crate::openai::embeddings::REFUSED as EMBEDDING_REFUSED;
use crate::openai::tables as openai;
use crate::table::Kind::{Any, Bool, Integer, List, Object, Text, TextOrTexts};
use crate::table::{self, Harmless, Known, Table, Unsupported, harmless, known, unless};

/// Where the options are, with a dot.
pub(super) const OPTIONS: &str = "options.";

/// Honored in every request.
const HONORED: &[Known] = &[
    known(
        "model",
        Text,
        "the model, with or without `:latest`; any name is answered by one that is the only one",
    ),
    known("name", Text, "show: the older name of `model`"),
    known("stream", Bool, "lines of JSON, unless it is `false`"),
    known(
        "format",
        Any,
        "`\"json\"`, or a JSON schema, which is always enforced",
    ),
    known(
        "think",
        Any,
        "turns reasoning on or off, or an effort by name, such as `\"low\"`, of which a chat template that reads `reasoning_effort` is told, and which else allows 1,024 tokens of reasoning",
    ),
    known("options", Object, "see its fields"),
];

/// Honored in every request that needs the model, those for vectors too.
const HONORED_OF_MODELS: &[Known] = &[known(
    "keep_alive",
    Any,
    "how long the model stays loaded after the request: seconds, or a duration such as `\"5m\"`; 0 unloads it, less than 0 keeps it until its room is needed",
)];

/// Honored in a chat request, beside [`HONORED`].
const HONORED_BY_CHAT: &[Known] = &[
    known(
        "messages",
        List,
        "chat: `role`, `content`, `images`, `thinking`, `tool_calls`, `tool_name`, `tool_call_id`; without any the answer says `load`",
    ),
    known("tools", List, "chat: functions that the model may call"),
];

/// Honored in a request to generate, beside [`HONORED`].
const HONORED_BY_GENERATE: &[Known] = &[
    known(
        "prompt",
        Any,
        "generate: a string; an empty one is answered by `load`",
    ),
    known(
        "system",
        Text,
        "generate: a system message before the prompt",
    ),
    known(
        "images",
        List,
        "generate: [pictures](#pictures-and-video) in base64, before the prompt",
    ),
    known(
        "suffix",
        Text,
        "generate: the text behind the gap that the answer fills, whose beginning is `prompt`; for models whose vocabulary marks gaps",
    ),
    known(
        "raw",
        Bool,
        "generate: `true` leaves the model's template out",
    ),
];

/// Honored in a request for vectors.
const HONORED_BY_EMBED: &[Known] = &[
    known(
        "model",
        Text,
        "with one model any name will do, unless `--strict-model-names` is set; with several, the name of one, with or without `:latest`",
    ),
    known(
        "input",
        Any,
        "embed: a string, or a list of up to 2,048; without any the answer has no vector",
    ),
    known(
        "truncate",
        Bool,
        "embed: whether texts are cut at their end where they are longer than the context, which is the default; `false` makes one an error",
    ),
    known(
        "dimensions",
        Integer,
        "embed: the first so many numbers of the vector, normalized again; as many as it has, at most",
    ),
    known("options", Object, "see its fields"),
];

/// Honored in a request for a vector in its older form.
const HONORED_BY_EMBEDDINGS: &[Known] = &[
    known(
        "model",
        Text,
        "with one model any name will do, unless `--strict-model-names` is set; with several, the name of one, with or without `:latest`",
    ),
    known(
        "prompt",
        Text,
        "embeddings: a string, cut at its end where it is longer than the context",
    ),
    known("options", Object, "see its fields"),
];

/// Honored in `options`, beside what other dialects read there.
const HONORED_IN_OPTIONS: &[Known] = &[
    known(
        "num_predict",
        Integer,
        "tokens to write, at most; -1 and -2 are no limit",
    ),
    known(
        "stop",
        TextOrTexts,
        "a string or up to 16, each of 256 characters at most",
    ),
];

/// Refused in a request, beside what OpenAI's requests may not have.
const REFUSED: &[Unsupported] = &[
    unless("template", r#"[""]"#),
    unless("context", "[[]]"),
    unless("logprobs", "[false]"),
    unless("top_logprobs", "[0]"),
    // Names of other APIs.
    unless("max_tokens", "[]"),
    unless("response_format", "[]"),
    unless("n", "[1]"),
    unless("thinking", "[]"),
    unless("tool_choice", r#"["auto"]"#),
];

/// Refused in a chat request: honored in one to generate.
const REFUSED_BY_CHAT: &[Unsupported] = &[
    unless("system", r#"[""]"#),
    unless("raw", "[false]"),
    unless("suffix", r#"[""]"#),
    unless("images", "[[]]"),
];

/// Refused in a request to generate: honored in a chat request.
const REFUSED_BY_GENERATE: &[Unsupported] = &[unless("tools", "[[]]"), unless("messages", "[[]]")];

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

/// Refused in the `options` of requests for vectors, as elsewhere.
const REFUSED_IN_OPTIONS_OF_VECTORS: &[Unsupported] = &[
    unless("rope_frequency_base", "[0]"),
    unless("rope_frequency_scale", "[0, 1]"),
    unless("vocab_only", "[false]"),
];

/// Ignored, and known to change nothing: named in the header, not in the log.
const HARMLESS: &[Harmless] = &[
    harmless("truncate", "a conversation that does not fit is an error"),
    harmless("shift", "a context is never shifted"),
    harmless("verbose", "`show` says the same to all"),
    harmless("timings_per_token", "the last line has all numbers"),
    harmless("return_progress", "progress is not reported here"),
    harmless("options.num_ctx", "`--context` sets it"),
    harmless("options.num_keep", "a context is never shifted"),
    harmless("options.num_batch", "changes speed only"),
    harmless("options.num_gpu", "changes speed only"),
    harmless("options.main_gpu", "changes speed only"),
    harmless("options.num_thread", "`--threads` sets it"),
    harmless("options.num_gqa", "the model has its own"),
    harmless("options.numa", "changes speed only"),
    harmless("options.use_mmap", "changes speed only"),
    harmless("options.use_mlock", "changes speed only"),
    harmless("options.low_vram", "changes speed only"),
    harmless("options.f16_kv", "`--kv` sets it"),
    harmless("options.logits_all", "changes speed only"),
];

/// Fields of chat requests, and of requests to show the model.
pub(crate) static CHAT: LazyLock<Table> =
    LazyLock::new(|| table("OllamaChatRequest", HONORED_BY_CHAT, REFUSED_BY_CHAT));

/// Fields of requests to generate.
pub(crate) static GENERATE: LazyLock<Table> = LazyLock::new(|| {
    table(
        "OllamaGenerateRequest",
        HONORED_BY_GENERATE,
        REFUSED_BY_GENERATE,
    )
});

/// Fields of requests for vectors.
pub(crate) static EMBED: LazyLock<Table> =
    LazyLock::new(|| vectors("OllamaEmbedRequest", HONORED_BY_EMBED));

/// Fields of requests for a vector in their older form.
pub(crate) static EMBEDDINGS: LazyLock<Table> =
    LazyLock::new(|| vectors("OllamaEmbeddingsRequest", HONORED_BY_EMBEDDINGS));

/// A table of requests for vectors. Options of sampling change none.
fn vectors(name: &'static str, honored: &'static [Known]) -> Table {
    let table = Table::new(name, &[])
        .honors("", HONORED_OF_MODELS)
        .honors("", honored)
        .refuses_as_elsewhere("", EMBEDDING_REFUSED)
        .refuses_as_elsewhere(OPTIONS, EMBEDDING_REFUSED)
        .refuses_as_elsewhere(OPTIONS, REFUSED_IN_OPTIONS_OF_VECTORS);
    table.ignores_as_elsewhere(HARMLESS)
}

/// A table with what only some requests honor, and what they refuse that others honor.
fn table(name: &'static str, honored: &'static [Known], refused: &'static [Unsupported]) -> Table {
    let numbers = SAMPLER_NUMBERS.iter().map(|number| number.name);
    let own = HONORED_IN_OPTIONS.iter().map(|known| known.field);
    let options = numbers.chain(own).chain(AS_IN_OPENAI.iter().copied());
    Table::new(name, &[])
        .honors("", HONORED)
        .honors("", HONORED_OF_MODELS)
        .honors("", honored)
        .shares(
            "",
            &openai::CHAT,
            [
                "speculation",
                "speculation.draft_max",
                "speculation.max_draft",
                "speculation.draft_fixed",
                "speculation.drafters",
                "speculation.accept",
            ],
        )
        .honors(OPTIONS, HONORED_IN_OPTIONS)
        .shares_sampler_numbers(OPTIONS)
        .shares(OPTIONS, &openai::CHAT, AS_IN_OPENAI.iter().copied())
        .refuses("", REFUSED)
        .refuses(OPTIONS, REFUSED_IN_OPTIONS)
        .ignores(HARMLESS)
        .belong_in("options", options)
        .refuses_as_elsewhere("", refused)
        .refuses_as_elsewhere("", anthropic::REFUSED)
        .refuses_as_elsewhere("", openai::REFUSED)
        .refuses_as_elsewhere("", openai::REFUSED_BY_CHAT)
        .refuses_as_elsewhere(OPTIONS, openai::REFUSED)
        .ignores_as_elsewhere(openai::HARMLESS)
}

/// The tables of this module as Markdown, as they stand in `docs/server.md`.
pub(crate) fn markdown() -> String {
    let shared = "as [above](#honored); a `seed` of -1 is any";
    table::markdown(&[&CHAT, &GENERATE, &EMBED, &EMBEDDINGS], shared)
}
