//! The turns of a request: `system` and `messages`, with their blocks, as the messages of a
//! conversation.
//!
//! | block | of | becomes |
//! | --- | --- | --- |
//! | `text` | system | a system message; those at the start become one, with a blank line between |
//! | `text` | user, assistant | a part of the message's text, with nothing between parts |
//! | `image` | user, in `tool_result` | a picture where it stands among the texts |
//! | `tool_use` | assistant | a call of the message |
//! | `tool_result` | user | a message of the tool |
//! | `thinking` | assistant | the message's reasoning, where the template reads that |
//! | `redacted_thinking` | assistant | nothing: only its writer can read it |
//!
//! All others are refused by name. Nothing that changes the answer is dropped silently, but for
//! [`BILLING`].

use serde_json::{Map, Value, json};
use text::Text;

use crate::errors::{ApiError, excerpt};
use crate::limits::IGNORED_FIELDS_MAX;
use crate::media::{self, Media};
use crate::request::{Message, Part, Role, message_list};
use crate::results;
use crate::template::template_uses;

/// How a line begins that Claude Code puts before its instructions. It differs from version to
/// version and may differ from request to request, so that a prompt with it is never found in
/// the prefix cache; and it is for Anthropic's accounts, not for the model. It is taken out
/// where it begins `system`.
const BILLING: &str = "x-anthropic-billing-header:";
/// The first word of a result that says that its call has failed.
const ERROR: &str = "Error";

/// Fields of blocks and messages that pass without a word: clients send back what they got, and
/// say where the cache is to begin.
const QUIET: &[&str] = &["cache_control", "signature", "citations", "caller", "id"];
/// The argument of templates that is an earlier turn's reasoning.
const REASONING: &str = "reasoning_content";

/// Reads a conversation; beside it come the paths of the fields in it that change nothing, once
/// for each name.
///
/// # Errors
///
/// 400 for the first message or block that is not one, or that asks for what is not implemented.
pub(super) fn read(
    system: Option<Value>,
    messages: Option<Value>,
    text: &Text,
) -> Result<(Vec<Message>, Vec<String>), ApiError> {
    let list = message_list(messages)?;
    let mut turns = Turns {
        text,
        messages: Vec::new(),
        names: Vec::new(),
        ignored: Vec::new(),
    };
    match system {
        None | Some(Value::Null) => {}
        Some(system) => turns.instructions("system", without_billing(system))?,
    }
    for (i, message) in list.into_iter().enumerate() {
        turns.message(&format!("messages[{i}]"), message)?;
    }
    let Turns {
        mut messages,
        ignored,
        ..
    } = turns;
    results::prepare(&mut messages, text);
    Ok((messages, ignored))
}

/// `system` without the line of [`BILLING`] at its beginning.
fn without_billing(system: Value) -> Value {
    let rest = |text: &str| {
        let line = text.strip_prefix(BILLING)?;
        tracing::debug!("a line beginning with {BILLING} was taken out of the instructions");
        Some(
            line.split_once('\n')
                .map_or("", |(_, rest)| rest)
                .to_owned(),
        )
    };
    match system {
        Value::String(text) => Value::String(rest(&text).unwrap_or(text)),
        Value::Array(mut blocks) => {
            let first = blocks.first().and_then(|block| block["text"].as_str());
            if let Some(rest) = first.and_then(rest) {
                blocks[0]["text"] = Value::String(rest);
            }
            Value::Array(blocks)
        }
        other => other,
    }
}

/// Turns that are being read.
struct Turns<'a> {
    text: &'a Text,
    messages: Vec<Message>,
    /// Names that have been looked at; a conversation repeats them.
    names: Vec<String>,
    ignored: Vec<String>,
}

/// A block: its type, and its other fields.
struct Block {
    kind: String,
    fields: Map<String, Value>,
}

impl Turns<'_> {
    /// Notes the fields of `rest`, at `path`, which nobody has taken. What is null or empty says
    /// nothing.
    fn note(&mut self, path: &str, rest: &Map<String, Value>) {
        for (name, value) in rest {
            // More are not listed; so a conversation of nothing but names costs little.
            if self.ignored.len() >= IGNORED_FIELDS_MAX {
                return;
            }
            let is_empty = match value {
                Value::Null => true,
                Value::Array(list) => list.is_empty(),
                _ => false,
            };
            let is_known = QUIET.contains(&name.as_str()) || self.names.contains(name);
            if !is_empty && !is_known {
                self.names.push(name.clone());
                self.ignored.push(format!("{path}.{name}"));
            }
        }
    }

    fn push(&mut self, role: Role, content: Vec<Part>, others: Map<String, Value>) {
        self.messages.push(Message {
            role,
            content,
            others,
        });
    }

    fn push_text(&mut self, role: Role, text: String) {
        self.push(role, vec![Part::Text(text)], Map::new());
    }

    /// Reads the message at `path`.
    fn message(&mut self, path: &str, message: Value) -> Result<(), ApiError> {
        let at = |name: &str| format!("{path}.{name}");
        let Value::Object(mut message) = message else {
            return Err(ApiError::field(path, "must be an object"));
        };
        let role = match message.remove("role") {
            None | Some(Value::Null) => return Err(ApiError::field(at("role"), "is missing")),
            Some(role) => role.as_str().and_then(|role| match role {
                "user" => Some(Role::User),
                "assistant" => Some(Role::Assistant),
                "system" => Some(Role::System),
                _ => None,
            }),
        };
        let Some(role) = role else {
            let message = "must be one of user, assistant, system";
            return Err(ApiError::field(at("role"), message));
        };
        let content = message.remove("content");
        self.note(path, &message);
        let path = at("content");
        match (role, content) {
            (_, None | Some(Value::Null)) => Err(ApiError::field(path, "is missing")),
            (Role::System, Some(content)) => self.instructions(&path, content),
            (role, Some(Value::String(text))) => {
                self.push_text(role, text);
                Ok(())
            }
            (Role::Assistant, Some(Value::Array(blocks))) => self.answer(&path, blocks),
            (_, Some(Value::Array(blocks))) => self.question(&path, blocks),
            (_, Some(_)) => Err(ApiError::field(
                path,
                "must be a string or a list of blocks",
            )),
        }
    }

    /// Reads instructions, a string or blocks of text, each of which is a message unless it is
    /// empty.
    fn instructions(&mut self, path: &str, content: Value) -> Result<(), ApiError> {
        let texts = match content {
            Value::String(text) => vec![text],
            Value::Array(blocks) => self.texts(path, blocks)?,
            _ => {
                return Err(ApiError::field(
                    path,
                    "must be a string or a list of blocks",
                ));
            }
        };
        for text in texts.into_iter().filter(|text| !text.is_empty()) {
            self.push_text(Role::System, text);
        }
        Ok(())
    }

    /// Reads the blocks of a user's message: text, pictures, and results of tools.
    fn question(&mut self, path: &str, blocks: Vec<Value>) -> Result<(), ApiError> {
        let mut said = Vec::new();
        let is_empty = blocks.is_empty();
        for (i, block) in blocks.into_iter().enumerate() {
            let path = format!("{path}[{i}]");
            let mut block = split(&path, block)?;
            match block.kind.as_str() {
                "text" => said.push(Part::Text(self.text_of(&path, block)?)),
                "image" => {
                    let image = media::read_source(&path, &mut block.fields)?;
                    said.push(Part::Media(Media::Picture(image)));
                    self.note(&path, &block.fields);
                }
                "tool_result" => {
                    if !said.is_empty() {
                        self.push(Role::User, std::mem::take(&mut said), Map::new());
                    }
                    let id = string(&path, &mut block.fields, "tool_use_id")?;
                    let content = self.result(&path, &mut block.fields)?;
                    self.note(&path, &block.fields);
                    let others = Map::from_iter([("tool_call_id".to_owned(), json!(id))]);
                    self.push(Role::Tool, content, others);
                }
                _ => return Err(unreadable(&path, &block.kind)),
            }
        }
        if !said.is_empty() || is_empty {
            self.push(Role::User, said, Map::new());
        }
        Ok(())
    }

    /// What a tool's result says.
    fn result(
        &mut self,
        path: &str,
        result: &mut Map<String, Value>,
    ) -> Result<Vec<Part>, ApiError> {
        let at = |name: &str| format!("{path}.{name}");
        let mut parts = match result.remove("content") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::String(text)) => vec![Part::Text(text)],
            Some(Value::Array(blocks)) => self.parts(&at("content"), blocks)?,
            Some(_) => {
                let message = "must be a string or a list of blocks";
                return Err(ApiError::field(at("content"), message));
            }
        };
        let is_error = match result.remove("is_error") {
            None | Some(Value::Null) => false,
            Some(Value::Bool(is_error)) => is_error,
            Some(_) => return Err(ApiError::field(at("is_error"), "must be true or false")),
        };
        if is_error {
            // Templates have no place for it, so the text says it, unless it does already.
            match parts.first_mut() {
                Some(Part::Text(first)) => {
                    let begins = first.trim_start().get(..ERROR.len());
                    if !begins.is_some_and(|b| b.eq_ignore_ascii_case(ERROR)) {
                        first.insert_str(0, &format!("{ERROR}: "));
                    }
                }
                _ => parts.insert(0, Part::Text(ERROR.to_owned())),
            }
        }
        if parts.is_empty() {
            parts.push(Part::Text(String::new()));
        }
        Ok(parts)
    }

    /// Reads the blocks of a result at `path`: texts and pictures.
    fn parts(&mut self, path: &str, blocks: Vec<Value>) -> Result<Vec<Part>, ApiError> {
        let parts = blocks.into_iter().enumerate().map(|(i, block)| {
            let path = format!("{path}[{i}]");
            let mut block = split(&path, block)?;
            match block.kind.as_str() {
                "text" => self.text_of(&path, block).map(Part::Text),
                "image" => {
                    let image = media::read_source(&path, &mut block.fields)?;
                    self.note(&path, &block.fields);
                    Ok(Part::Media(Media::Picture(image)))
                }
                kind => Err(unreadable(&path, kind)),
            }
        });
        parts.collect()
    }

    /// Reads the blocks of an earlier answer: reasoning, text and calls.
    fn answer(&mut self, path: &str, blocks: Vec<Value>) -> Result<(), ApiError> {
        let (mut said, mut thought, mut calls) = (Vec::new(), String::new(), Vec::new());
        for (i, block) in blocks.into_iter().enumerate() {
            let path = format!("{path}[{i}]");
            let mut block = split(&path, block)?;
            match block.kind.as_str() {
                "text" => said.push(Part::Text(self.text_of(&path, block)?)),
                "thinking" if template_uses(self.text, REASONING) => {
                    if !thought.is_empty() {
                        thought.push('\n');
                    }
                    thought += &string(&path, &mut block.fields, "thinking")?;
                    self.note(&path, &block.fields);
                }
                "thinking" | "redacted_thinking" => self.note(&path, &block.fields),
                "tool_use" => {
                    calls.push(self.call(&path, &mut block.fields)?);
                    self.note(&path, &block.fields);
                }
                _ => return Err(unreadable(&path, &block.kind)),
            }
        }
        let mut others = Map::new();
        if !thought.is_empty() {
            others.insert(REASONING.to_owned(), Value::String(thought));
        }
        if !calls.is_empty() {
            others.insert("tool_calls".to_owned(), Value::Array(calls));
        }
        self.push(Role::Assistant, said, others);
        Ok(())
    }

    /// The call in a block at `path`, as templates read it.
    fn call(&self, path: &str, block: &mut Map<String, Value>) -> Result<Value, ApiError> {
        if self.text.template.is_some() && !template_uses(self.text, "tool_calls") {
            let message = "cannot be read by this model: its chat template knows no calls";
            return Err(ApiError::field(path, message));
        }
        let id = string(path, block, "id")?;
        let name = string(path, block, "name")?;
        let input = match block.remove("input") {
            Some(input @ Value::Object(_)) => input,
            _ => {
                return Err(ApiError::field(
                    format!("{path}.input"),
                    "must be an object",
                ));
            }
        };
        Ok(json!({"id": id, "type": "function", "function": {"name": name, "arguments": input}}))
    }

    /// The texts of the blocks at `path`, which must all be text.
    fn texts(&mut self, path: &str, blocks: Vec<Value>) -> Result<Vec<String>, ApiError> {
        let texts = blocks.into_iter().enumerate().map(|(i, block)| {
            let path = format!("{path}[{i}]");
            let block = split(&path, block)?;
            match block.kind.as_str() {
                "text" => self.text_of(&path, block),
                kind => Err(unreadable(&path, kind)),
            }
        });
        texts.collect()
    }

    /// The text of a block of text.
    fn text_of(&mut self, path: &str, mut block: Block) -> Result<String, ApiError> {
        let text = string(path, &mut block.fields, "text")?;
        self.note(path, &block.fields);
        Ok(text)
    }
}

/// The type of the block at `path`, and its other fields.
fn split(path: &str, block: Value) -> Result<Block, ApiError> {
    let Value::Object(mut fields) = block else {
        return Err(ApiError::field(path, "must be an object"));
    };
    match fields.remove("type") {
        Some(Value::String(kind)) => Ok(Block { kind, fields }),
        None | Some(Value::Null) => Err(ApiError::field(format!("{path}.type"), "is missing")),
        Some(_) => Err(ApiError::field(format!("{path}.type"), "must be a string")),
    }
}

/// Takes a string that must be there.
fn string(path: &str, map: &mut Map<String, Value>, name: &str) -> Result<String, ApiError> {
    match map.remove(name) {
        Some(Value::String(text)) => Ok(text),
        None | Some(Value::Null) => Err(ApiError::field(format!("{path}.{name}"), "is missing")),
        Some(_) => Err(ApiError::field(
            format!("{path}.{name}"),
            "must be a string",
        )),
    }
}

/// The refusal of a block of a type that cannot be read, or not where it stands.
fn unreadable(path: &str, kind: &str) -> ApiError {
    let kind = excerpt(kind);
    let hint = format!(
        " (it is of type `{kind}`, and only text, a user's pictures, calls of tools and their results are read)"
    );
    ApiError::unsupported(path, &hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_billing_line_is_taken_out_where_it_begins_the_instructions() {
        let line = "x-anthropic-billing-header: cc_version=1; cch=00000;";
        let text = |text: &str| json!({"type": "text", "text": text});
        for (system, rest) in [
            (json!(line), json!("")),
            (json!(format!("{line}\nBe kind.")), json!("Be kind.")),
            (json!([text(line), text("a")]), json!([text(""), text("a")])),
            (json!([text(&format!("{line}\na"))]), json!([text("a")])),
            (json!([]), json!([])),
        ] {
            assert_eq!(without_billing(system), rest);
        }
        for kept in [
            json!(format!("Of lines:\n{line}")),
            json!([text("a"), text(line)]),
            json!(3),
        ] {
            assert_eq!(without_billing(kept.clone()), kept);
        }
    }
}
