//! The templates: those of the bundled models, those of `render.json`, and one in the
//! style of each family of published templates, with a vocabulary that has its marks.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use text::{Specials, Text, TextFiles};

/// A template with a tokenizer.
pub(crate) struct Subject {
    pub(crate) name: String,
    pub(crate) text: Text,
}

/// Name of the file, marks that its tokenizer has as control tokens, and whether these
/// swallow the white space behind them.
const WRITTEN: &[(&str, &str, bool)] = &[
    ("chatml", "<|im_start|> <|im_end|>", false),
    (
        "headers",
        "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>",
        false,
    ),
    ("inst", "<s> </s> [INST] [/INST]", false),
    (
        "start-of-turn",
        "<bos> <start_of_turn> <end_of_turn>",
        false,
    ),
    (
        "start-of-turn-parts",
        "<bos> <start_of_turn> <end_of_turn> <start_of_image>",
        false,
    ),
    (
        "composed",
        "<|system|> <|user|> <|assistant|> <|tool|> <|/tool|> <|end|>",
        true,
    ),
    (
        "fullwidth",
        "<｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>",
        false,
    ),
    (
        "shouted",
        "<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|> <|SYSTEM_TOKEN|> <|CHATBOT_TOKEN|>",
        false,
    ),
    ("plain-roles", "<s> </s>", false),
    ("speakers", "<s> </s>", false),
    ("sections", "<s> </s>", false),
    ("agent", "<|im_start|> <|im_end|>", false),
    (
        "role-marks",
        "<|start_of_role|> <|end_of_role|> <|end_of_text|>",
        false,
    ),
    ("only-parts", "<end_of_utterance> <image>", false),
    (
        "parts-of-users",
        "<|system|> <|user|> <|assistant|> <|end|> <|image|>",
        true,
    ),
    ("tags", "<|system|> <|user|> <|assistant|> <|tool|>", false),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn bytes(path: impl AsRef<Path>) -> Vec<u8> {
    std::fs::read(root().join(path)).unwrap()
}

/// The tokenizer of the bundled Qwen with more control tokens.
fn tokenizer(marks: &str, strips: bool) -> Vec<u8> {
    let mut json: Value =
        serde_json::from_slice(&bytes("models/tiny-qwen3.5/tokenizer.json")).unwrap();
    let added = json["added_tokens"].as_array_mut().unwrap();
    for (id, mark) in (8186..).zip(marks.split(' ')) {
        if added.iter().all(|token| token["content"] != mark) {
            added.push(
                json!({"id": id, "content": mark, "special": true, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": strips}),
            );
        }
    }
    json.to_string().into_bytes()
}

/// The tokenizer of a bundled model, which cuts a text nowhere.
pub(crate) fn without_added_tokens(model: &str) -> text::Tokenizer {
    let json = bytes(format!("models/{model}/tokenizer.json"));
    let mut json: Value = serde_json::from_slice(&json).unwrap();
    json["added_tokens"] = json!([]);
    text::Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
}

fn load(name: &str, tokenizer: &[u8], config: &Value, template: &[u8]) -> Subject {
    let config = config.to_string();
    let files = TextFiles {
        tokenizer,
        tokenizer_config: Some(config.as_bytes()),
        chat_template: Some(template),
        ..TextFiles::default()
    };
    Subject {
        name: name.to_owned(),
        text: files.load().unwrap(),
    }
}

/// The bundled templates with their own tokenizers.
pub(crate) fn bundled() -> Vec<Subject> {
    let mut all = Vec::new();
    for folder in std::fs::read_dir(root().join("models")).unwrap() {
        let path = folder.unwrap().path();
        if path.join("chat_template.jinja").exists() {
            all.push(Subject {
                name: path.file_name().unwrap().to_str().unwrap().to_owned(),
                text: TextFiles::open(&path).unwrap(),
            });
        }
    }
    assert!(all.len() >= 6);
    all
}

/// All templates.
pub(crate) fn all() -> Vec<Subject> {
    let mut all = bundled();
    for (name, marks, strips) in WRITTEN {
        let template = bytes(format!(
            "crates/text/tests/conversations/templates/{name}.jinja"
        ));
        let marks_of = |pick: &[&str]| marks.split(' ').find(|mark| pick.contains(mark));
        let config = json!({
            "bos_token": marks_of(&["<s>", "<bos>", "<BOS_TOKEN>", "<|begin_of_text|>"]).unwrap_or(""),
            "eos_token": marks_of(&["</s>", "<|end|>"]).unwrap_or("<|im_end|>"),
        });
        all.push(load(name, &tokenizer(marks, *strips), &config, &template));
    }
    let cases: Vec<Value> =
        serde_json::from_slice(&bytes("crates/text/tests/render.json")).unwrap();
    for name in ["plain", "turns", "agent"] {
        let case = cases.iter().find(|case| case["name"] == name).unwrap();
        let template = case["template"].as_str().unwrap().as_bytes();
        let config = json!({"bos_token": "<bos>", "eos_token": "<|im_end|>"});
        let marks = tokenizer("<bos> <|turn> <turn|> <start> <end>", false);
        all.push(load(&format!("render {name}"), &marks, &config, template));
    }
    all
}

impl Subject {
    /// The ids of a conversation; how it was refused, if it was.
    pub(crate) fn ids(&self, messages: &Value, tools: Option<&Value>) -> Result<Vec<u32>, String> {
        let ids = self.text.encode_chat(messages, tools, true, &Map::new());
        ids.map_err(|err| err.to_string())
    }

    /// The text of `ids`, control tokens included.
    pub(crate) fn spell(&self, ids: &[u32]) -> String {
        self.text.tokenizer.detokenize(ids, Specials::Show)
    }
}

/// A conversation with `content` in the message of `role`.
pub(crate) fn conversation(role: &str, content: &Value) -> Value {
    let message = json!({"role": role, "content": content});
    let call = json!([{"id": "abcdefghi", "type": "function",
        "function": {"name": "look", "arguments": "{\"at\": \"sky\"}"}}]);
    match role {
        "system" | "developer" => json!([message, {"role": "user", "content": "Hi"}]),
        "user" => json!([message]),
        "assistant" => {
            json!([{"role": "user", "content": "Hi"}, message, {"role": "user", "content": "So?"}])
        }
        _ => json!([{"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "tool_calls": call},
            {"role": role, "tool_call_id": "abcdefghi", "content": content}]),
    }
}
