//! Text: what stands between a client's messages and a model's token ids.
//!
//! ```text
//! messages ─ template ─→ prompt ─ tokenizer ─→ ids ─→ model
//! client ←─ stop strings ←─ detokenizer ←─ ids ←────────┘
//! ```
//!
//! | room | what it does |
//! | --- | --- |
//! | [`tokenizer`] | text → ids, ids → bytes, with the checkpoint's `tokenizer.json` |
//! | `added` | finds the tokens beside the learned vocabulary, such as control tokens |
//! | `control` | escapes control tokens that clients spell |
//! | `unescape` | text → ids, where escaped control tokens are text |
//! | `cover` | a lower bound of the number of tokens, without encoding |
//! | [`pieces`] | the bytes that a token stands for |
//! | [`detokenizer`] | ids → text one token at a time, never splitting a character |
//! | [`template`] | messages → prompt, with the checkpoint's Jinja program on a budget |
//! | [`messages`] | clients' forms of messages → the form that a template reads |
//! | `probe` | finds that form by rendering small conversations |
//! | [`conversation`] | messages → prompt → ids, up to the end that is asked for |
//! | [`infill`] | what stands around a gap → ids |
//! | [`stop`] | stop strings and stop tokens |
//! | [`reasoning`] | tells reasoning from the answer |
//! | [`tools`] | tells tool calls from the answer |
//! | [`gguf`] | the vocabulary of a GGUF file |
//! | [`sampling`] | the sampling that a checkpoint recommends |
//!
//! All input comes from outside: checkpoint files and requests. Every size has a named
//! limit, and a panic of a library becomes an error of the one call. No model, no
//! sampling, no clock except in a template's `strftime_now`. `examples/conversation.rs`
//! walks through both directions.

#![forbid(unsafe_code)]

mod added;
mod channel;
mod control;
pub mod conversation;
mod cover;
pub mod detokenizer;
mod error;
pub mod gguf;
pub mod infill;
pub mod messages;
pub mod pieces;
mod probe;
mod python_json;
pub mod reasoning;
pub mod sampling;
pub mod stop;
mod strftime;
pub mod template;
#[cfg(test)]
mod testing;
pub mod tokenizer;
pub mod tools;
mod unescape;

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use crate::control::ControlTokens;

pub use channel::Channel;
pub use conversation::PromptEnd;
pub use detokenizer::{Detokenizer, Specials};
pub use error::TextError;
pub use infill::{Infill, InfillMarks};
pub use messages::{ContentForm, Reads, SystemPlace};
pub use reasoning::{Reasoning, ReasoningMarks, ReplyStart};
pub use sampling::SamplingDefaults;
pub use stop::{StopOutcome, StopStrings, StopTokens};
pub use strftime::strftime;
pub use template::ChatTemplate;
pub use tokenizer::Tokenizer;
pub use tools::{ToolCalls, ToolEvent, ToolFormat, ToolMark, Tools};

use error::within;
use tokenizer::TOKENIZER_FILE_BYTES_MAX;

/// Largest `config.json`, `generation_config.json` or `tokenizer_config.json` in bytes; a
/// `tokenizer_config.json` lists added tokens and reaches 1.2 MB.
pub const CONFIG_FILE_BYTES_MAX: usize = 16 << 20;

/// The contents of a checkpoint's files that concern text.
///
/// For checkpoints that are not a folder: bundled in the binary, or carried in the
/// metadata of another file. Absent files are `None`.
#[derive(Clone, Copy, Debug, Default)]
pub struct TextFiles<'a> {
    /// Contents of `tokenizer.json`.
    pub tokenizer: &'a [u8],
    /// Contents of `tokenizer_config.json`.
    pub tokenizer_config: Option<&'a [u8]>,
    /// Contents of `chat_template.jinja`.
    pub chat_template: Option<&'a [u8]>,
    /// Contents of `generation_config.json`.
    pub generation_config: Option<&'a [u8]>,
    /// Contents of `config.json`.
    pub config: Option<&'a [u8]>,
}

impl TextFiles<'_> {
    /// Loads the text side of the checkpoint in `folder`; only `tokenizer.json` is required.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, is over its limit or is unusable.
    pub fn open(folder: &Path) -> Result<Text, TextError> {
        Self::open_with(folder, None)
    }

    /// Loads the text side of the checkpoint in `folder`, with `template` for its chat template if
    /// there is one.
    ///
    /// # Errors
    ///
    /// As [`TextFiles::open`].
    pub fn open_with(folder: &Path, template: Option<&str>) -> Result<Text, TextError> {
        let tokenizer = read(folder, "tokenizer.json", TOKENIZER_FILE_BYTES_MAX)?;
        let optional = |name: &str, limit| match read(folder, name, limit) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(TextError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                Ok(None)
            }
            Err(err) => Err(err),
        };
        let tokenizer_config = optional("tokenizer_config.json", CONFIG_FILE_BYTES_MAX)?;
        let chat_template = optional("chat_template.jinja", template::TEMPLATE_BYTES_MAX)?;
        let generation_config = optional("generation_config.json", CONFIG_FILE_BYTES_MAX)?;
        let config = optional("config.json", CONFIG_FILE_BYTES_MAX)?;
        TextFiles {
            tokenizer: &tokenizer,
            tokenizer_config: tokenizer_config.as_deref(),
            chat_template: template.map(str::as_bytes).or(chat_template.as_deref()),
            generation_config: generation_config.as_deref(),
            config: config.as_deref(),
        }
        .load()
    }

    /// Loads the text side of a checkpoint from files that are in memory.
    ///
    /// # Errors
    ///
    /// If a file is over its limit or unusable. A missing chat template is an error only when
    /// a conversation is rendered.
    pub fn load(self) -> Result<Text, TextError> {
        let tokenizer_config = json("tokenizer_config.json", self.tokenizer_config)?;
        let generation_config = json("generation_config.json", self.generation_config)?;
        let config = json("config.json", self.config)?;
        let jinja = self
            .chat_template
            .map(std::str::from_utf8)
            .transpose()
            .map_err(|_| TextError::BadField {
                file: "chat_template.jinja",
                field: "text",
                reason: "expected UTF-8",
            })?;
        let template = match ChatTemplate::new(jinja, &tokenizer_config) {
            Ok(template) => Some(template),
            Err(TextError::NoTemplate) => None,
            Err(err) => return Err(err),
        };
        let tokenizer = Arc::new(Tokenizer::from_bytes(self.tokenizer)?);
        let bos = stop::token_content(&tokenizer_config["bos_token"]);
        let reasoning = ReasoningMarks::new(&tokenizer);
        let tools = template
            .as_ref()
            .and_then(|t| ToolFormat::new(&tokenizer, t));
        let control = match &template {
            Some(template) => {
                let marks = reasoning.iter().flat_map(ReasoningMarks::ids);
                Some(ControlTokens::new(&tokenizer, marks, template.sources())?)
            }
            None => None,
        };
        Ok(Text {
            stop_tokens: StopTokens::new(
                &config,
                &generation_config,
                &tokenizer_config,
                &tokenizer,
            )?,
            sampling: SamplingDefaults::from_json(&generation_config)?,
            bos: bos.and_then(|bos| tokenizer.id_of(bos)),
            add_bos: tokenizer_config["add_bos_token"].as_bool(),
            reasoning,
            infill: InfillMarks::new(&tokenizer),
            tools,
            allow_special_tokens: false,
            control,
            tokenizer,
            template,
        })
    }
}

/// The text side of a checkpoint: everything between messages and token ids.
#[derive(Debug)]
pub struct Text {
    /// The tokenizer: text to ids, and ids to text.
    pub tokenizer: Arc<Tokenizer>,
    /// The chat template: messages to text. Base models have none.
    pub template: Option<ChatTemplate>,
    /// The token ids that end a generation.
    pub stop_tokens: StopTokens,
    /// The sampling that the authors of the checkpoint recommend.
    pub sampling: SamplingDefaults,
    /// The tokens that mark reasoning, if the model may reason.
    pub reasoning: Option<ReasoningMarks>,
    /// The tokens that mark a gap to fill, if the vocabulary has them.
    pub infill: Option<InfillMarks>,
    /// The form in which the model writes tool calls, if its template knows tools.
    pub tools: Option<ToolFormat>,
    /// Whether spellings of control tokens inside messages, tools and template arguments
    /// become control tokens. Unless set, they are text.
    pub allow_special_tokens: bool,
    /// Escapes control tokens in requests; `None` without a template.
    control: Option<ControlTokens>,
    /// The beginning-of-sequence token.
    bos: Option<u32>,
    /// Whether plain completions begin with `bos`; `None` leaves it to the tokenizer.
    add_bos: Option<bool>,
}

impl Text {
    /// Encodes a prompt without a template, however long it is.
    ///
    /// # Errors
    ///
    /// As [`Tokenizer::encode`].
    pub fn encode_prompt(&self, prompt: &str) -> Result<Vec<u32>, TextError> {
        self.encode_prompt_within(prompt, usize::MAX)
    }

    /// Encodes a prompt for plain completion, without a template, unless a lower bound shows
    /// that it has more than `limit` tokens. The tokenizer's own tokens are added, but never
    /// two beginning-of-sequence tokens, even if the prompt spells one.
    ///
    /// # Errors
    ///
    /// As [`Tokenizer::encode`], and [`TextError::TooManyTokens`].
    pub fn encode_prompt_within(&self, prompt: &str, limit: usize) -> Result<Vec<u32>, TextError> {
        let bos = self.bos.and_then(|bos| self.tokenizer.entry(bos));
        // All beginning-of-sequence tokens at the start become one.
        let counted = bos.map_or(prompt, |bos| prompt.trim_start_matches(&bos));
        self.tokenizer.refuse_over(counted, limit)?;
        let mut ids = self.tokenizer.encode(prompt, true)?;
        if let Some(bos) = self.bos {
            let n_bos = ids.iter().take_while(|&&id| id == bos).count();
            if n_bos > 1 {
                ids.drain(1..n_bos);
            } else if n_bos == 0 && self.add_bos == Some(true) {
                ids.insert(0, bos);
            }
        }
        Ok(ids)
    }

    /// The beginning-of-sequence token, if the tokenizer names one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Whether the prompt of a plain completion begins with the beginning-of-sequence token.
    fn begins_with_bos(&self) -> bool {
        let empty = self.encode_prompt("");
        empty.is_ok_and(|ids| ids.first().copied() == self.bos && self.bos.is_some())
    }
}

/// Reads the file `name` in `folder`, of at most `limit` bytes.
fn read(folder: &Path, name: &str, limit: usize) -> Result<Vec<u8>, TextError> {
    let path = folder.join(name);
    let mut bytes = Vec::new();
    File::open(&path)
        // One byte more than allowed shows that there are more, even where the
        // file has no length (a pipe, a device).
        .and_then(|file| file.take(limit as u64 + 1).read_to_end(&mut bytes))
        .map_err(|source| TextError::Io { path, source })?;
    within("checkpoint file bytes", bytes.len(), limit)?;
    Ok(bytes)
}

/// Parses a configuration file; `null` if there is none.
fn json(file: &'static str, bytes: Option<&[u8]>) -> Result<Value, TextError> {
    let Some(bytes) = bytes else {
        return Ok(Value::Null);
    };
    within(
        "configuration file bytes",
        bytes.len(),
        CONFIG_FILE_BYTES_MAX,
    )?;
    serde_json::from_slice(bytes).map_err(|source| TextError::BadJson { file, source })
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;
    use crate::testing::{model_dir, small_bpe};

    #[test]
    fn bundled_checkpoints_open() {
        let gemma = TextFiles::open(&model_dir("tiny-gemma4")).unwrap();
        assert_eq!(gemma.stop_tokens.ids(), [1, 5, 13]);
        assert_eq!(gemma.tokenizer.id_of("<|tool_response>"), Some(13));
        assert_eq!(gemma.bos(), Some(2));
        let messages =
            json!([{"role": "user", "content": [{"type": "text", "text": "Hi <|turn>"}]}]);
        let ids = gemma
            .encode_chat(&messages, None, true, &Map::new())
            .unwrap();
        assert_eq!(
            gemma.tokenizer.detokenize(&ids, Specials::Show),
            "<bos><|turn>user\nHi <|turn><turn|>\n<|turn>model\n"
        );
        assert_eq!(ids.iter().filter(|&&id| id == 2).count(), 1);

        let qwen = TextFiles::open(&model_dir("tiny-qwen3.5")).unwrap();
        assert_eq!(qwen.stop_tokens.ids(), [8160, 8162]);
        assert_eq!(qwen.bos(), None);
        let ids = qwen
            .encode_chat(&messages, None, true, &Map::new())
            .unwrap();
        assert_eq!(
            qwen.tokenizer.detokenize(&ids, Specials::Show),
            "<|im_start|>user\nHi <|turn><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        );
        let greedy = SamplingDefaults {
            do_sample: Some(false),
            ..SamplingDefaults::default()
        };
        assert_eq!(qwen.sampling, greedy);

        // Its tokenizer is that of the dense model, by a link.
        let moe = TextFiles::open(&model_dir("tiny-gemma4-moe")).unwrap();
        assert_eq!(moe.stop_tokens.ids(), [1, 5, 13]);
    }

    #[test]
    fn bundled_templates_have_system_turns_thoughts_and_tools() {
        let messages = json!([
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Is it cold in Rome?"},
            {"role": "assistant", "tool_calls": [{"type": "function", "id": "a",
                "function": {"name": "weather", "arguments": {"city": "Rome", "days": 1}}}]},
            {"role": "tool", "content": "mild"},
        ]);
        let tools = json!([{"type": "function", "function": {"name": "weather", "description": "The sky.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]);
        let thinking = json!({"enable_thinking": true})
            .as_object()
            .unwrap()
            .clone();
        let show = |name: &str| {
            let text = TextFiles::open(&model_dir(name)).unwrap();
            let ids = text
                .encode_chat(&messages, Some(&tools), true, &thinking)
                .unwrap();
            text.tokenizer.detokenize(&ids, Specials::Show)
        };
        assert_eq!(
            show("tiny-gemma4"),
            concat!(
                "<bos><|turn>system\n<|think|>\nBe kind.",
                "<|tool>declaration:weather{description:<|\"|>The sky.<|\"|>,",
                "parameters:{properties:{city:{type:<|\"|>STRING<|\"|>}},",
                "required:[<|\"|>city<|\"|>],type:<|\"|>OBJECT<|\"|>}}<tool|><turn|>\n",
                "<|turn>user\nIs it cold in Rome?<turn|>\n",
                "<|turn>model\n",
                "<|tool_call>call:weather{city:<|\"|>Rome<|\"|>,days:1}<tool_call|>",
                "<|tool_response>response:weather{value:<|\"|>mild<|\"|>}<tool_response|>",
            )
        );
        let qwen = show("tiny-qwen3.5");
        assert!(qwen.starts_with("<|im_start|>system\n# Tools\n"), "{qwen}");
        assert!(
            qwen.ends_with(concat!(
                "</tool_call>\n\nBe kind.<|im_end|>\n",
                "<|im_start|>user\nIs it cold in Rome?<|im_end|>\n",
                "<|im_start|>assistant\n<think>\n\n</think>\n\n",
                "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n",
                "<parameter=days>\n1\n</parameter>\n</function>\n</tool_call><|im_end|>\n",
                "<|im_start|>user\n<tool_response>\nmild\n</tool_response><|im_end|>\n",
                "<|im_start|>assistant\n<think>\n",
            )),
            "{qwen}"
        );
    }

    #[test]
    fn a_prompt_starts_with_one_bos_whoever_writes_it() {
        let tokenizer = small_bpe().to_string();
        let mut files = TextFiles {
            tokenizer: tokenizer.as_bytes(),
            ..TextFiles::default()
        };
        let config =
            br#"{"bos_token": "<s>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}"#;
        files.tokenizer_config = Some(config);
        let text = files.load().unwrap();
        assert_eq!(text.encode_prompt("ab").unwrap(), [2, 0, 1]);
        assert_eq!(text.encode_prompt("<s>ab").unwrap(), [2, 0, 1]);
        let messages = json!([{"role": "user", "content": "ab"}]);
        assert_eq!(
            text.encode_chat(&messages, None, true, &Map::new())
                .unwrap(),
            [2, 0, 1]
        );

        let mut json = small_bpe();
        json["post_processor"] = Value::Null;
        let tokenizer = json.to_string();
        files.tokenizer = tokenizer.as_bytes();
        assert_eq!(files.load().unwrap().encode_prompt("ab").unwrap(), [0, 1]);
        files.tokenizer_config = Some(br#"{"bos_token": "<s>", "add_bos_token": true}"#);
        let text = files.load().unwrap();
        assert_eq!(text.encode_prompt("ab").unwrap(), [2, 0, 1]);
        assert!(matches!(
            text.encode_chat(&messages, None, true, &Map::new()),
            Err(TextError::NoTemplate)
        ));
    }

    #[test]
    fn unusable_files_are_errors() {
        assert!(matches!(
            TextFiles::open(Path::new("no such folder")),
            Err(TextError::Io { .. })
        ));
        let tokenizer = small_bpe().to_string();
        let good = TextFiles {
            tokenizer: tokenizer.as_bytes(),
            ..TextFiles::default()
        };
        assert!(good.load().is_ok());
        let long = vec![b' '; CONFIG_FILE_BYTES_MAX + 1];
        for files in [
            TextFiles {
                config: Some(b"{"),
                ..good
            },
            TextFiles {
                config: Some(br#"{"eos_token_id": "x"}"#),
                ..good
            },
            TextFiles {
                config: Some(&long),
                ..good
            },
            TextFiles {
                generation_config: Some(br#"{"top_p": 7}"#),
                ..good
            },
            TextFiles {
                tokenizer_config: Some(b"\xff"),
                ..good
            },
            TextFiles {
                chat_template: Some(b"\xff"),
                ..good
            },
            TextFiles {
                chat_template: Some(b"{% if"),
                ..good
            },
            TextFiles {
                tokenizer: b"",
                ..good
            },
        ] {
            assert!(files.load().is_err());
        }
    }
}
