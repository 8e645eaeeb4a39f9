//! What is proved: a feature of requests a row, as bodies of OpenAI's API.

use engine::Text;
use serde_json::{Map, Value, json};

/// Most tokens of a text that nothing else ends.
const TOKENS: usize = 48;
/// Most tokens of `--quick`.
const QUICK_TOKENS: usize = 24;
/// Most tokens of an answer that a grammar ends.
const FORMED_TOKENS: usize = 96;
/// Temperature of sampled cells.
const TEMPERATURE: f64 = 0.8;
/// Seed of the first prompt of sampled cells.
const SEED: u64 = 17;
/// Tokens of reasoning that the thinking budget leaves.
const THINKING: usize = 12;

/// Prompts, by what kind of text they bring about.
pub(super) const PROMPTS: &[(&str, &str)] = &[
    (
        "repetition",
        "Say this again and again: the rabbit has a red kite. The rabbit has a red kite. The rabbit has a red kite.",
    ),
    ("prose", "Tell me a story about a rabbit and a kite."),
    (
        "code",
        "Complete this Python code:\ndef add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):",
    ),
    (
        "list",
        "Count from one to twenty: one, two, three. Then name the days of the week.",
    ),
];

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Greedy,
    Sampled,
}

impl Mode {
    pub(super) const ALL: [Mode; 2] = [Mode::Greedy, Mode::Sampled];

    /// The mode's name in tables and JSON.
    pub(super) fn name(self) -> &'static str {
        match self {
            Mode::Greedy => "greedy",
            Mode::Sampled => "sampled",
        }
    }
}

/// How the requests of a cell follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// The answers to one body at once.
    Each,
    /// A body whose stops are taken from the text that it has without them.
    Stopped,
    /// A conversation that goes on after its first answer.
    Warm,
    /// The bodies of several prompts at once, against each alone.
    Together,
    /// As `Together`, and the first is cancelled after a few tokens.
    Cancelled,
}

/// A feature of requests.
pub(super) struct Feature {
    pub(super) name: &'static str,
    pub(super) shape: Shape,
    /// The fields that ask for the feature.
    fields: fn() -> Value,
    /// Why a model cannot have it, if it cannot.
    pub(super) lacks: fn(&Text) -> Option<&'static str>,
}

/// Nothing is missing.
fn any(_: &Text) -> Option<&'static str> {
    None
}

/// A feature of single bodies that every model has.
const fn plain(name: &'static str, fields: fn() -> Value) -> Feature {
    Feature {
        name,
        shape: Shape::Each,
        fields,
        lacks: any,
    }
}

/// A feature of how requests follow each other.
const fn shaped(name: &'static str, shape: Shape) -> Feature {
    Feature {
        shape,
        ..plain(name, || json!({}))
    }
}

/// Every feature, a row each.
pub(super) const FEATURES: &[Feature] = &[
    plain("temperature", || json!({})),
    plain(
        "top-k, top-p, min-p",
        || json!({"top_k": 20, "top_p": 0.9, "min_p": 0.02}),
    ),
    plain(
        "penalties",
        || json!({"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}),
    ),
    plain(
        "logit bias",
        || json!({"logit_bias": {" the": 1.5, " and": -2.0}}),
    ),
    plain(
        "XTC and DRY",
        || json!({"xtc_probability": 0.5, "xtc_threshold": 0.1, "dry_multiplier": 0.8, "dry_allowed_length": 3}),
    ),
    plain("log-probabilities", || json!({"top_logprobs": 5})),
    plain("n > 1", || json!({"n": 3})),
    shaped("stop strings, tokens", Shape::Stopped),
    plain("JSON schema", || {
        json!({"ignore_eos": false, "max_tokens": FORMED_TOKENS, "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "animals", "schema": animals()},
        }})
    }),
    Feature {
        lacks: |text| match &text.tools {
            Some(_) => None,
            None => Some("the chat template knows no tools"),
        },
        ..plain("tool calls", || {
            json!({"ignore_eos": false, "max_tokens": FORMED_TOKENS, "tool_choice": "required", "tools": [{
                "type": "function",
                "function": {"name": "note_animals", "description": "Notes animals.", "parameters": animals()},
            }]})
        })
    },
    Feature {
        lacks: |text| match &text.reasoning {
            Some(_) => None,
            None => Some("the model does not reason"),
        },
        ..plain(
            "thinking budget",
            || json!({"enable_thinking": true, "thinking_budget": THINKING}),
        )
    },
    shaped("batch > 1", Shape::Together),
    shaped("warm prefix", Shape::Warm),
    shaped("cancel", Shape::Cancelled),
];

/// The schema of a list of animals, whose objects are alike.
fn animals() -> Value {
    let animal = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "kind": {"enum": ["rabbit", "bird", "fish"]},
        },
        "required": ["name", "kind"],
        "additionalProperties": false,
    });
    json!({
        "type": "object",
        "properties": {"animals": {"type": "array", "items": animal, "minItems": 2, "maxItems": 3}},
        "required": ["animals"],
        "additionalProperties": false,
    })
}

impl Feature {
    /// Whether the feature is one of conversations, which needs a chat template.
    fn converses(&self) -> bool {
        matches!(self.name, "tool calls" | "thinking budget")
    }

    /// The body that asks for the feature in answer to `PROMPTS[i]`: that of a chat completion, or of
    /// a plain one for a model without a template.
    ///
    /// # Errors
    ///
    /// The reason if the model cannot have the feature.
    pub(super) fn body(
        &self,
        text: &Text,
        i: usize,
        mode: Mode,
        is_quick: bool,
    ) -> Result<Map<String, Value>, String> {
        if let Some(reason) = (self.lacks)(text) {
            return Err(reason.into());
        }
        // A text that ends early leaves little to draft.
        let tokens = match is_quick && self.shape != Shape::Stopped {
            true => QUICK_TOKENS,
            false => TOKENS,
        };
        let mut body = object(json!({
            "max_tokens": tokens,
            "temperature": if mode == Mode::Greedy { 0.0 } else { TEMPERATURE },
            "seed": SEED + i as u64,
            "ignore_eos": true,
            "cache_prompt": self.shape == Shape::Warm,
        }));
        let prompt = match self.shape {
            Shape::Warm => long_prompt(i),
            _ => PROMPTS[i].1.to_owned(),
        };
        let mut fields = object((self.fields)());
        if text.template.is_some() {
            body.insert("messages".into(), json!([message("user", &prompt)]));
            body.insert("logprobs".into(), json!(true));
        } else if self.converses() {
            return Err("the model has no chat template".into());
        } else {
            let top = fields.remove("top_logprobs").unwrap_or(json!(0));
            body.insert("prompt".into(), json!(prompt));
            body.insert("logprobs".into(), top);
        }
        body.extend(fields);
        Ok(body)
    }
}

/// `PROMPTS[i]` after all of them: as long as a prompt must be so that recurrent states and sliding
/// windows are kept for texts that begin like it.
fn long_prompt(i: usize) -> String {
    let all = PROMPTS.iter().chain(PROMPTS).chain([&PROMPTS[i]]);
    let all: Vec<&str> = all.map(|(_, prompt)| *prompt).collect();
    all.join("\n")
}

/// The body that goes on after `answer` to `body`.
pub(super) fn next_turn(body: &Map<String, Value>, answer: &str) -> Map<String, Value> {
    const MORE: &str = "Say it once more.";
    let mut next = body.clone();
    if let Some(Value::Array(messages)) = next.get_mut("messages") {
        messages.push(message("assistant", answer));
        messages.push(message("user", MORE));
    } else if let Some(Value::String(prompt)) = next.get_mut("prompt") {
        *prompt = format!("{prompt}{answer} {MORE}");
    }
    next
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// The fields of a JSON object.
fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}
