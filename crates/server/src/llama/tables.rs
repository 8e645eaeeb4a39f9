//! How every known field of a request of llama-server's own API is treated, as
//! [`openai::tables`](crate::openai::tables) has it for OpenAI's: only fields that are listed may
//! be read, and `docs/server.md` shows the table.
//!
//! The options of sampling, formats and speculation are read by the same code in all dialects, so
//! they are listed there. What another dialect refuses or ignores by name is treated the same here.

use std::sync::LazyLock;

use serde_json::{Map, Value};

use crate::openai::embeddings::REFUSED as EMBEDDING_REFUSED;
use crate::openai::tables as openai;
use crate::table::Kind::{Any, Bool, Integer, List, Text, Texts};
use crate::table::{self, Harmless, Known, Table, Unsupported, harmless, known, unless};

/// Honored by requests for text, beside what is honored as in OpenAI's.
const HONORED: &[Known] = &[
    known(
        "model",
        Text,
        "with one model any name will do, unless `--strict-model-names` is set; with several, the name of one. The response names the true one",
    ),
    known(
        "prompt",
        Any,
        "`/completion`: a text, token ids, a list of both, `{\"prompt_string\": TEXT}`, or a list of up to 128 of these, which is answered by a list; `/infill`: how the gap begins",
    ),
    known("input_prefix", Text, "`/infill`: the text before the gap"),
    known("input_suffix", Text, "`/infill`: the text after the gap"),
    known(
        "input_extra",
        List,
        "`/infill`: other files, each `{\"filename\": NAME, \"text\": TEXT}`",
    ),
    known(
        "n_predict",
        Integer,
        "-1 is no limit; comes before `max_tokens`",
    ),
    known("max_tokens", Integer, "another name of `n_predict`"),
    known(
        "max_completion_tokens",
        Integer,
        "another name of `n_predict`",
    ),
    known(
        "seed",
        Integer,
        "64 bits; -1 and 4294967295 are a new one. `generation_settings` has the seed that was used",
    ),
    known(
        "n_probs",
        Integer,
        "0 to 20: tokens come with log-probabilities, beside those of so many of the likeliest",
    ),
    known("logprobs", Integer, "another name of `n_probs`"),
    known(
        "post_sampling_probs",
        Bool,
        "`true`: probabilities after the samplers, of the tokens that are left",
    ),
    known(
        "return_tokens",
        Bool,
        "`true`: a whole answer has its token ids; a stream has them anyway",
    ),
    known(
        "response_fields",
        Texts,
        "the fields that the last document has, paths with `/` among them",
    ),
    known(
        "timings_per_token",
        Bool,
        "`true`: every chunk of a stream has `timings`",
    ),
    known(
        "return_progress",
        Bool,
        "`true`: chunks of a stream tell how far the prompt is",
    ),
    known(
        "t_max_predict_ms",
        Integer,
        "milliseconds from the first token after which a text that has a line break ends; 0 and less is no limit",
    ),
    known(
        "image_data",
        List,
        "`/completion`: [pictures](#pictures-and-video), objects with base64 in `data` and an `id`; `[img-ID]` in the prompt is their place",
    ),
    known(
        "n_indent",
        Integer,
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
    "speculation.max_draft",
    "speculation.draft_fixed",
    "speculation.drafters",
    "speculation.accept",
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
const HONORED_BY_TOKENIZER: &[Known] = &[
    known(
        "content",
        Any,
        "`/tokenize`: a text, or a list of texts and token ids",
    ),
    known(
        "add_special",
        Bool,
        "`/tokenize`: `true` begins as a prompt does, with the beginning-of-sequence token",
    ),
    known(
        "parse_special",
        Bool,
        "`/tokenize`: `false` takes spellings of special tokens for text",
    ),
    known(
        "with_pieces",
        Bool,
        "`/tokenize`: `true`: each token has its text, or its bytes where they are none",
    ),
    known("tokens", List, "`/detokenize`: token ids"),
];

/// Honored by requests to tokenize in vLLM's form, beside the fields of a chat.
const HONORED_BY_VLLM_TOKENIZER: &[Known] = &[
    known(
        "prompt",
        Text,
        "`/tokenize`, vLLM's form: a text, answered with `count`, `max_model_len` and `tokens`; or `messages` with the fields of a chat",
    ),
    known(
        "add_special_tokens",
        Bool,
        "`/tokenize`, vLLM's form: `false` leaves out the beginning-of-sequence token",
    ),
    known(
        "return_token_strs",
        Bool,
        "`/tokenize`, vLLM's form: `true`: `token_strs` has the text of each token",
    ),
];

/// Honored by requests for vectors.
const HONORED_BY_EMBEDDING: &[Known] = &[
    known(
        "model",
        Text,
        "with one model any name will do, unless `--strict-model-names` is set; with several, the name of one",
    ),
    known(
        "content",
        Any,
        "`/embedding`: a text, token ids, a list of both, or a list of up to 2,048 of these",
    ),
    known("input", Any, "`/embedding`: another name of `content`"),
    known(
        "embd_normalize",
        Integer,
        "`/embedding`: by what a vector is divided. -1: nothing; 0: such that its largest number is 32,760; 1: the sum of absolute values; 2, the default: its length; other p, up to 1,024: its p-norm. Means nothing with `--pooling none`",
    ),
];

/// Refused by requests for text, beside what OpenAI's may not have.
const REFUSED: &[Unsupported] = &[
    unless("messages", "[]"),
    unless("suffix", r#"[""]"#),
    unless("echo", "[false]"),
    unless("system_prompt", r#"[""]"#),
    unless("top_logprobs", "[0]"),
];

/// Ignored, and known to change nothing: named in the header, not in the log.
const HARMLESS: &[Harmless] = &[
    harmless("t_max_prompt_ms", "prompts take the time they take"),
    harmless("slot_id", "the older name of `id_slot`"),
    harmless("penalize_nl", "the penalties know no such exception"),
    harmless("api_key", "send it as a header"),
    harmless("stream_options", "the last chunk always has all numbers"),
    harmless("speculative.n_min", "changes speed only"),
    harmless("speculative.n_max", "changes speed only"),
    harmless("speculative.p_min", "changes speed only"),
    harmless("speculative.type", "changes speed only"),
    harmless("reasoning_format", "the text is not taken apart"),
    harmless(
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
    "image_data",
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

/// Fields of requests for text.
pub(crate) static TEXT: LazyLock<Table> = LazyLock::new(|| {
    let formats = openai::STRUCTURED.iter().map(|entry| entry.field);
    Table::new("LlamaCompletionRequest", &[])
        .honors("", HONORED)
        .shares_sampler_numbers("")
        .shares(
            "",
            &openai::CHAT,
            AS_IN_OPENAI.iter().copied().chain(formats),
        )
        .refuses("", REFUSED)
        .ignores(HARMLESS)
        .refuses_as_elsewhere("", openai::REFUSED)
        .refuses_as_elsewhere("structured_outputs.", openai::REFUSED_IN_STRUCTURED_OUTPUTS)
        .ignores_as_elsewhere(openai::HARMLESS)
});

/// Fields of requests to tokenize and to detokenize.
pub(crate) static TOKENIZER: LazyLock<Table> = LazyLock::new(|| {
    let table = Table::new("TokenizerRequest", &[]).honors("", HONORED_BY_TOKENIZER);
    table.ignores_as_elsewhere(openai::HARMLESS)
});

/// Fields of requests to tokenize a text in vLLM's form.
pub(crate) static VLLM_TOKENIZER: LazyLock<Table> = LazyLock::new(|| {
    let table = Table::new("VllmTokenizerRequest", &[]).honors("", HONORED_BY_VLLM_TOKENIZER);
    table.ignores_as_elsewhere(openai::HARMLESS)
});

/// Fields of requests for vectors.
pub(crate) static EMBEDDING: LazyLock<Table> = LazyLock::new(|| {
    Table::new("LlamaEmbeddingRequest", &[])
        .honors("", HONORED_BY_EMBEDDING)
        .refuses_as_elsewhere("", EMBEDDING_REFUSED)
        .ignores_as_elsewhere(openai::HARMLESS)
});

/// Honored by requests to load and to unload a model.
const HONORED_BY_MODELS: &[Known] = &[known(
    "model",
    Text,
    "`/models/load`, `/models/unload`: the name of the model",
)];

/// Fields of requests to load and to unload a model.
pub(crate) static MODELS: LazyLock<Table> = LazyLock::new(|| {
    let table = Table::new("ModelsRequest", &[]).honors("", HONORED_BY_MODELS);
    table.ignores_as_elsewhere(openai::HARMLESS)
});

/// The tables of this module as Markdown, as they stand in `docs/server.md`.
pub(crate) fn markdown() -> String {
    table::markdown(
        &[&TEXT, &TOKENIZER, &VLLM_TOKENIZER, &EMBEDDING],
        "as [above](#honored)",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
