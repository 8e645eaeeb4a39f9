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
use std::sync::LazyLock;

use crate::table::Kind::{
    self, Any, Bool, Integer, List, Number, Object, Text, TextOrTexts, Texts,
};
use crate::table::{
    Entry, Harmless, Known, Table, Treatment, Unsupported, harmless, known, unless,
};

/// Entries of [`HONORED`] that the page has before the numbers of the sampler.
const HONORED_FIRST: usize = 2;

/// Honored by chat and by plain completions, beside the numbers of the sampler
/// ([`engine::SAMPLER_NUMBERS`]).
pub(crate) const HONORED: &[Known] = &[
    known(
        "model",
        Text,
        "with one model any name will do, unless `--strict-model-names` is set; with several, the name of one. The response names the true one",
    ),
    known("max_tokens", Integer, "-1 is no limit"),
    known(
        "n_predict",
        Integer,
        "another name of `max_tokens`; comes first",
    ),
    known(
        "n",
        Integer,
        "answers to each prompt, 1 to 128, with the seeds `seed`, `seed` + 1, …; they share the prompt's rows",
    ),
    known("n_cmpl", Integer, "another name of `n`"),
    known("best_of", Integer, "must be `n`"),
    known("top_k", Integer, "0 and -1 keep all tokens"),
    known(
        "repeat_penalty",
        Number,
        "another name of `repetition_penalty`",
    ),
    known("typ_p", Number, "another name of `typical_p`"),
    known("typical", Number, "another name of `typical_p`"),
    known("nsigma", Number, "another name of `top_n_sigma`"),
    known(
        "dynamic_temperature",
        Bool,
        "`true`: the temperature is between `dynatemp_low` and `dynatemp_high`",
    ),
    known(
        "dynatemp_low",
        Number,
        "0 to 2, 1 by default; matters with `dynamic_temperature` only",
    ),
    known(
        "dynatemp_high",
        Number,
        "0 to 2, 1 by default; matters with `dynamic_temperature` only",
    ),
    known(
        "dry_allowed_length",
        Integer,
        "tokens that may be repeated before DRY acts, 2 by default",
    ),
    known(
        "dry_penalty_last_n",
        Integer,
        "how many of the last tokens DRY looks at; -1, the default, is all, 0 is off",
    ),
    known(
        "dry_sequence_breakers",
        Texts,
        "up to 32 strings of up to 40 characters that no repetition reaches over; line break, `:`, `\"` and `*` by default",
    ),
    known(
        "logit_bias",
        Any,
        "an object, or a list of pairs, from token ids or texts (each of its tokens) to numbers from -100 to 100, or `false` for never; 1,024 at most",
    ),
    known(
        "seed",
        Integer,
        "64 bits; same seed, same text. Responses carry the seed that was used",
    ),
    known(
        "stop",
        TextOrTexts,
        "a string or up to 16, each of 256 characters at most",
    ),
    known(
        "stop_token_ids",
        List,
        "up to 1,024 ids of tokens that end the text, beside the model's own",
    ),
    known(
        "min_tokens",
        Integer,
        "tokens before one that ends the text is chosen; stop strings and grammars end it earlier",
    ),
    known("min_new_tokens", Integer, "another name of `min_tokens`"),
    known(
        "priority",
        Integer,
        "-1000 to 1000, 0 by default: of requests that wait, those with the smallest start first, and take the place of one with a greater number that runs. Callers (by API key, else by address) with equal priority take turns",
    ),
    known(
        "timeout",
        Number,
        "seconds that the request may take, with the time it waits; after that it is stopped with a 504, or an error in its stream",
    ),
    known(
        "ignore_eos",
        Bool,
        "writes on after the model's own end of text",
    ),
    known(
        "cache_salt",
        Text,
        "a string: the prompt is looked for in the prefix cache among those of the same string and the same API key only",
    ),
    known(
        "cache_prompt",
        Bool,
        "`false`: the prompt is not looked for in the prefix cache",
    ),
    known("skip_special_tokens", Bool, "`false` shows special tokens"),
    known("stream", Bool, "server-sent events"),
    known(
        "stream_options",
        Object,
        "see its fields; needs `stream: true`",
    ),
    known(
        "stream_options.include_usage",
        Bool,
        "one more chunk before `[DONE]`, with `usage` and without choices",
    ),
    known(
        "stream_options.continuous_usage_stats",
        Bool,
        "every chunk carries the usage so far",
    ),
    known(
        "logprobs",
        Any,
        "chat: `true`; completions: a number up to 20",
    ),
    known(
        "speculation",
        Any,
        "`\"auto\"`, `\"off\"`, or an object of the fields below ([how](speculation.md#turning-it-on-and-off)); the text is the same, unless `accept` is `residual`",
    ),
    known(
        "speculation.draft_max",
        Integer,
        "tokens of a draft, at most",
    ),
    known(
        "speculation.max_draft",
        Integer,
        "another name of `speculation.draft_max`",
    ),
    known(
        "speculation.draft_fixed",
        Integer,
        "tokens of every draft, even where fewer are faster: to measure acceptance by position",
    ),
    known(
        "speculation.drafters",
        Any,
        "a list of those that may guess, of the drafters that `/v1/models` names, such as `[\"ngram\"]` or one of several heads",
    ),
    known(
        "speculation.accept",
        Any,
        "`\"exact\"` or `\"residual\"`: which guesses stay ([rules](speculation.md#which-guesses-stay)), whatever `--accept` says",
    ),
    known(
        "response_format",
        Object,
        "`text`, `json_object`, or `json_schema` with a schema, which is always enforced",
    ),
    known(
        "response_format.type",
        Text,
        "`text`, `json_object` or `json_schema`",
    ),
    known("response_format.json_schema", Object, "see its fields"),
    known("response_format.json_schema.schema", Any, "the JSON schema"),
    known(
        "response_format.json_schema.name",
        Text,
        "names the schema; changes nothing",
    ),
    known(
        "response_format.json_schema.description",
        Text,
        "describes the schema; changes nothing",
    ),
    known(
        "response_format.json_schema.strict",
        Bool,
        "changes nothing: a schema is always enforced",
    ),
    known(
        "response_format.schema",
        Any,
        "a schema beside `json_object`, as llama-server's clients send it",
    ),
    known("structured_outputs", Object, "one of its fields"),
    known("structured_outputs.json", Any, "a JSON schema"),
    known("structured_outputs.regex", Text, "a regular expression"),
    known("structured_outputs.choice", Texts, "a list of strings"),
    known(
        "structured_outputs.grammar",
        Text,
        "a grammar, in GBNF or Lark",
    ),
    known(
        "structured_outputs.json_object",
        Bool,
        "`true`: any JSON object",
    ),
    known(
        "repeat_last_n",
        Integer,
        "how many of the last tokens of prompt and output the penalties look at; -1, the default, is all, 0 is none",
    ),
    known(
        "mirostat",
        Integer,
        "0, 1 or 2, a version; it stands for `top_k`, `top_p`, `min_p` and all else that rules tokens out, and for dynamic temperature; 0 is off",
    ),
    known("mirostat_mode", Integer, "`mirostat` by another name"),
    known(
        "mirostat_tau",
        Number,
        "0 to 100, 5 by default: how surprising tokens are to be, in bits; matters with `mirostat` only",
    ),
    known(
        "mirostat_eta",
        Number,
        "0 to 100, 0.1 by default: how fast `mirostat` follows the text; matters with it only",
    ),
    known(
        "samplers",
        Any,
        "the samplers that act, in this order: `penalties`, `dry`, `top_n_sigma`, `top_k`, `typ_p`, `top_p`, `min_p`, `xtc`, and `temperature` anywhere; a list, a string with `;`, or llama-server's letters. Those left out do nothing; a list in another order is refused",
    ),
    known(
        "timings_per_token",
        Bool,
        "`true`: every chunk of a stream has `timings`; the last one has them anyway",
    ),
    known(
        "return_progress",
        Bool,
        "`true`: chunks of a stream tell how far the prompt is, under `prompt_progress`",
    ),
    known(
        "verbose",
        Bool,
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
    /// The JSON type of the value.
    fn json(self) -> Kind {
        match self {
            StructuredKind::Schema => Any,
            StructuredKind::Regex | StructuredKind::Grammar => Text,
            StructuredKind::Choice => Texts,
        }
    }

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
    known("messages", List, "see its fields"),
    known(
        "max_completion_tokens",
        Integer,
        "the newer name of `max_tokens`; comes first",
    ),
    known("top_logprobs", Integer, "0 to 20; needs `logprobs: true`"),
    TRACE,
    known(
        "chat_template_kwargs",
        Object,
        "arguments of the model's chat template, such as `{\"enable_thinking\": true}`; names that the template does not use are ignored",
    ),
    known("enable_thinking", Bool, "turns reasoning on or off"),
    known("think", Any, "the same; or an effort by name"),
    known(
        "reasoning_effort",
        Text,
        "`none` turns reasoning off, `high` and `xhigh` turn it on. A chat template that reads `reasoning_effort` is told; for one that does not, `minimal` and `low` allow 1,024 tokens of reasoning",
    ),
    known("thinking", Object, "see its fields"),
    known("thinking.type", Text, "`enabled`, `disabled` or `adaptive`"),
    known(
        "thinking.budget_tokens",
        Integer,
        "tokens of reasoning, at most",
    ),
    known("reasoning", Object, "see its fields"),
    known("reasoning.enabled", Bool, "turns reasoning on or off"),
    known("reasoning.effort", Text, "as `reasoning_effort`"),
    known(
        "reasoning.max_tokens",
        Integer,
        "tokens of reasoning, at most",
    ),
    known(
        "thinking_budget",
        Integer,
        "tokens of reasoning, at most, then the model's own mark closes it; -1 is no limit, 0 turns reasoning off",
    ),
    known(
        "thinking_token_budget",
        Integer,
        "another name of `thinking_budget`",
    ),
    known(
        "reasoning_budget",
        Integer,
        "another name of `thinking_budget`",
    ),
    known(
        "thinking_budget_tokens",
        Integer,
        "another name of `thinking_budget`",
    ),
    known(
        "reasoning_budget_tokens",
        Integer,
        "another name of `thinking_budget`",
    ),
    known(
        "tools",
        List,
        "functions that the model may call: 128 and 512 KB at most; the answer has `tool_calls`. Calls of a tool with `strict: true` always fit its schema",
    ),
    known(
        "tool_choice",
        Any,
        "`\"auto\"`; `\"none\"`, which leaves `tools` out; `\"required\"` or a named function: the answer is calls, or one of it, whose arguments fit its schema",
    ),
    known(
        "parallel_tool_calls",
        Bool,
        "`false` ends the text after the first call",
    ),
    known(
        "functions",
        List,
        "the older name of `tools`, for one call at most; the answer has `function_call`",
    ),
    known("function_call", Any, "the older name of `tool_choice`"),
    known(
        "reasoning_format",
        Text,
        "`auto` and `deepseek` put reasoning into `reasoning_content`, `none` leaves it in `content`",
    ),
    known(
        "continue_final_message",
        Any,
        "`true`: the answer goes on from the last message, which is the assistant's, from its `content` or, where that is empty, its `reasoning_content`; either by name says which. `false`: never. Left out, it goes on from a last message of the assistant (`--no-prefill-assistant` changes that)",
    ),
    known(
        "add_generation_prompt",
        Bool,
        "`true`: the model begins a turn, whoever spoke last; `false` needs an answer that goes on from the last message",
    ),
    known(
        "mm_processor_kwargs",
        Object,
        "`fps`, `num_frames` and `max_frames`: which frames of [videos](#pictures-and-video) are looked at, where a part itself does not say",
    ),
    known(
        "media_io_kwargs",
        Object,
        "`video`, an object of the same fields; `mm_processor_kwargs` comes first",
    ),
];

/// Honored by plain completions alone.
pub(crate) const HONORED_BY_COMPLETIONS: &[Known] = &[
    known(
        "prompt",
        Any,
        "a text or a list of token ids, not empty; a list of up to 128 of these",
    ),
    known(
        "suffix",
        Text,
        "what follows the text: it fills the gap, where the vocabulary has tokens that mark one",
    ),
    TRACE,
];

/// Honored by chat and by plain completions, and by no other path: only their answers have a place
/// for a trace.
const TRACE: Known = known(
    "speculation.trace",
    Bool,
    "`true`: `trace` of each choice says of every round which tokens came from where ([more](speculation.md#the-trace))",
);

/// Honored in a message.
pub(crate) const HONORED_IN_MESSAGES: &[Known] = &[
    known(
        "role",
        Text,
        "`system`, `developer`, `user`, `assistant`, `tool` or `function`",
    ),
    known(
        "content",
        Any,
        "a string or a list of parts: text, [pictures and video](#pictures-and-video), [sounds](#sounds)",
    ),
    known(
        "tool_calls",
        List,
        "of an earlier turn, where the template knows them",
    ),
    known(
        "function_call",
        Object,
        "the older name of one `tool_calls`",
    ),
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

/// Refused by chat whatever it holds: a chat template is a program.
pub(crate) const CHAT_TEMPLATE: &str = "chat_template";

/// Refused by chat alone.
pub(crate) const REFUSED_BY_CHAT: &[Unsupported] = &[
    unless(CHAT_TEMPLATE, "[]"),
    unless("modalities", r#"[["text"]]"#),
    unless("audio", "[]"),
    unless("web_search_options", "[]"),
    unless("enable_search", "[false]"),
    unless("verbosity", r#"["medium"]"#),
    unless("documents", "[[]]"),
    unless("echo", "[false]"),
    unless("add_special_tokens", "[false]"),
    unless("generation_prompt", r#"[""]"#),
    unless("parse_tool_calls", "[true]"),
];

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
pub(crate) const HARMLESS: &[Harmless] = &[
    harmless("user", "names the caller"),
    harmless("safety_identifier", "names the caller"),
    harmless("metadata", "for the caller's own records"),
    harmless("store", "nothing is stored"),
    harmless("service_tier", "there is one"),
    harmless("request_id", "send the header `x-request-id` instead"),
    harmless("session_id", "names a conversation"),
    harmless(
        "prompt_cache_key",
        "every prompt is looked for in the cache",
    ),
    harmless("prompt_cache_retention", "the cache keeps what fits"),
    harmless("n_cache_reuse", "changes speed only"),
    harmless("id_slot", "changes speed only"),
    harmless(
        "keep_alive",
        "`--idle-unload` sets it; only Ollama's API takes it of a request",
    ),
    harmless("prediction", "changes speed only"),
    harmless("draft_model", "changes speed only"),
    harmless("num_draft_tokens", "changes speed only"),
    harmless("backend_sampling", "changes speed only"),
    harmless("stream_interval", "changes the size of chunks only"),
    harmless("sse_ping_interval", "a comment comes every 10 seconds"),
    harmless(
        "stream_options.include_obfuscation",
        "chunks are not padded",
    ),
    harmless("n_keep", "a context is never shifted"),
    harmless("n_discard", "a context is never shifted"),
    harmless("num_ctx", "`--context` sets it"),
    harmless("truncation_side", "nothing is truncated"),
    harmless("truncation_length", "nothing is truncated"),
    harmless("smoothing_curve", "matters with `smoothing_factor` only"),
    harmless("adaptive_decay", "matters with `adaptive_target` only"),
    harmless("rep_pen_range", "matters with `rep_pen` only"),
    harmless(
        "reasoning_control",
        "reasoning that has begun ends by a budget, and not from outside",
    ),
    harmless("reasoning_budget_message", "matters with a budget only"),
    harmless("reasoning_budget_start_tag", "matters with a budget only"),
    harmless("reasoning_budget_end_tag", "matters with a budget only"),
    harmless("reasoning_budget_end_tags", "matters with a budget only"),
];

/// Fields of a message that pass without a word: they name things, or the client's
/// library adds them to what it sends back.
pub(crate) const QUIET_IN_MESSAGES: &[&str] = &["id", "tool_call_id", "refusal", "annotations"];

/// Fields of requests for the next turn of a conversation.
pub(crate) static CHAT: LazyLock<Table> = LazyLock::new(|| {
    honored_by_both("ChatRequest", &["messages"])
        .honors("", HONORED_BY_CHAT)
        .honors("messages[].", HONORED_IN_MESSAGES)
        .honors("", structured_fields())
        .refuses("", REFUSED)
        .refuses("", REFUSED_BY_CHAT)
        .refuses("structured_outputs.", REFUSED_IN_STRUCTURED_OUTPUTS)
        .refuses("messages[].", REFUSED_IN_MESSAGES)
        .ignores(HARMLESS)
});

/// Fields of requests for the rest of a text.
pub(crate) static COMPLETIONS: LazyLock<Table> = LazyLock::new(|| {
    honored_by_both("CompletionRequest", &["prompt"])
        .honors("", HONORED_BY_COMPLETIONS)
        .honors("", structured_fields())
        .refuses("", REFUSED)
        .refuses("", REFUSED_BY_COMPLETIONS)
        .refuses("structured_outputs.", REFUSED_IN_STRUCTURED_OUTPUTS)
        .ignores(HARMLESS)
});

/// The beginning of both tables.
fn honored_by_both(name: &'static str, required: &'static [&'static str]) -> Table {
    let (first, others) = HONORED.split_at(HONORED_FIRST);
    Table::new(name, required)
        .honors("", first)
        .honors_sampler_numbers()
        .honors("", others)
}

/// The fields of [`STRUCTURED`] as a table has them.
fn structured_fields() -> impl Iterator<Item = Known> {
    let field = |s: &Structured| known(s.field, s.kind.json(), s.kind.about());
    STRUCTURED.iter().map(field)
}

/// The tables of this module as Markdown, as they stand in `docs/server.md`.
pub(crate) fn markdown() -> String {
    let of = |path: &str| match (CHAT.entry(path), COMPLETIONS.entry(path)) {
        (Some(_), Some(_)) => "both",
        (Some(_), None) => "chat",
        _ => "completions",
    };
    let only_plain = COMPLETIONS.entries().iter();
    let only_plain = only_plain.filter(|entry| CHAT.entry(&entry.path).is_none());
    let all: Vec<&Entry> = CHAT.entries().iter().chain(only_plain).collect();
    let mut page = String::from("### Honored\n\n| field | of | what |\n| --- | --- | --- |\n");
    for entry in &all {
        if let Some(about) = entry.about() {
            let _ = writeln!(
                page,
                "| `{0}` | {1} | {about} |",
                entry.path,
                of(&entry.path)
            );
        }
    }
    page.push_str("\n### Refused\n\n| field | of | accepted with |\n| --- | --- | --- |\n");
    // `echo` and `add_special_tokens` are refused by both, with other values.
    for (table, other) in [(&CHAT, &COMPLETIONS), (&COMPLETIONS, &CHAT)] {
        for entry in table.entries() {
            let Treatment::Refused(refused) = entry.treatment else {
                continue;
            };
            let accepted = refused.accepted();
            let there = other.entry(&entry.path).map(|entry| entry.treatment);
            let is_same = matches!(there, Some(Treatment::Refused(r)) if r.accepted() == accepted);
            let is_chat = std::ptr::eq(table, &CHAT);
            let of = match (is_chat, is_same) {
                (true, true) => "both",
                (true, false) => "chat",
                (false, true) => continue,
                (false, false) => "completions",
            };
            let _ = writeln!(page, "| `{}` | {of} | {accepted} |", entry.path);
        }
    }
    page.push_str("\n### Ignored\n\n| field | why |\n| --- | --- |\n");
    for Harmless { field, why } in HARMLESS {
        let _ = writeln!(page, "| `{field}` | {why} |");
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::Fields;
    use serde_json::{Map, Value, json};

    #[test]
    fn every_refused_field_passes_with_what_changes_nothing_and_only_then() {
        let mut n = 0;
        for table in [&CHAT, &COMPLETIONS] {
            for (name, treatment) in table.refused("") {
                let Treatment::Refused(entry) = treatment else {
                    panic!("`{name}` has another name");
                };
                let check = |value: Value| {
                    let map = Map::from_iter([(name.to_owned(), value)]);
                    Fields::new(&map, table).refuse()
                };
                for value in entry.neutral().into_iter().chain([Value::Null]) {
                    assert!(check(value.clone()).is_ok(), "{name} = {value}");
                }
                for value in [json!({"a": 1}), json!(0.37), json!("odd")] {
                    let error = check(value.clone()).unwrap_err();
                    assert_eq!(error.code, Some("unsupported_parameter"), "{error:?}");
                    let field = format!("`{name}`");
                    assert!(error.message.contains(&field), "{error:?}");
                }
                n += 1;
            }
        }
        assert!(n > 200, "{n}");
    }
}
