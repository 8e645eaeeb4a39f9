//! The messages of a chat request: their shape is checked, so that an error names the
//! place, and nothing that changes the answer is dropped on the way to the model.
//!
//! How messages become a prompt is the text crate's part.

use serde_json::{Map, Value, json};
use text::Text;

use super::tables;
use crate::errors::{ApiError, excerpt};
use crate::limits::IGNORED_FIELDS_MAX;
use crate::media::{self, is_media};
use crate::request::{Message, Part, Role, message_list};
use crate::results;
use crate::template::template_uses;

/// Types of a content part that is text.
const TEXT_PARTS: &[&str] = &["text", "input_text", "output_text", "refusal"];
/// Fields of a call in a message that templates are given in one form.
const CALL_FIELDS: &[&str] = &["id", "index", "type", "function"];
/// Fields of the function of a call.
const FUNCTION_FIELDS: &[&str] = &["name", "arguments"];

/// Reads a conversation; beside it come the paths of the fields in it that change nothing, once
/// for each name.
///
/// # Errors
///
/// 400 for the first message that is not one, or that asks for what is not implemented.
pub(crate) fn read(messages: Value, text: &Text) -> Result<(Vec<Message>, Vec<String>), ApiError> {
    let list = message_list(Some(messages))?;
    let mut check = Check {
        text,
        names: Vec::new(),
        ignored: Vec::new(),
    };
    let roles = list
        .iter()
        .enumerate()
        .map(|(i, message)| check.message(&format!("messages[{i}]"), message));
    let roles: Vec<Role> = roles.collect::<Result<_, _>>()?;
    let ignored = check.ignored;
    let messages = list.into_iter().zip(roles).enumerate();
    let messages = messages.map(|(i, (m, role))| message(&format!("messages[{i}]"), m, role));
    let mut messages: Vec<Message> = messages.collect::<Result<_, _>>()?;
    results::prepare(&mut messages, text);
    Ok((messages, ignored))
}

/// The message at `path`, which has been checked.
fn message(path: &str, message: Value, role: Role) -> Result<Message, ApiError> {
    let Value::Object(mut others) = message else {
        unreachable!("checked to be an object");
    };
    others.remove("role");
    // The older names of a call and of its result.
    if let Some(call) = others
        .remove("function_call")
        .filter(|call| !call.is_null())
    {
        let call = json!({"type": "function", "function": call});
        others.entry("tool_calls").or_insert_with(|| json!([call]));
    }
    let role = match role {
        Role::Function => Role::Tool,
        role => role,
    };
    let content = match others.remove("content") {
        Some(Value::String(text)) => vec![Part::Text(text)],
        Some(Value::Array(parts)) => {
            let parts = parts.into_iter().enumerate();
            let parts = parts.map(|(j, p)| part(&|| format!("{path}.content[{j}]"), p));
            parts.collect::<Result<_, _>>()?
        }
        _ => Vec::new(),
    };
    Ok(Message {
        role,
        content,
        others,
    })
}

/// A part of a message that has been checked: media, a text, or the words of a refusal, which
/// stand under a name of their own.
fn part(path: &dyn Fn() -> String, part: Value) -> Result<Part, ApiError> {
    let text = match part {
        Value::String(text) => text,
        Value::Object(mut part) => {
            let own = part.get("type").and_then(Value::as_str).map(str::to_owned);
            if own.as_deref().is_some_and(is_media) {
                return media::read(&path(), &part).map(Part::Media);
            }
            let text = part.remove("text");
            match text.or_else(|| part.remove(own.as_deref()?)) {
                Some(Value::String(text)) => text,
                _ => unreachable!("checked to have a text"),
            }
        }
        _ => unreachable!("checked to be a part"),
    };
    Ok(Part::Text(text))
}

/// A conversation on its way through the checks.
struct Check<'a> {
    text: &'a Text,
    /// Names that have been looked at; a conversation repeats them.
    names: Vec<&'a str>,
    ignored: Vec<String>,
}

impl<'a> Check<'a> {
    /// Notes the fields of `map`, at `path`, that are neither in `known` nor used by the
    /// template. What is null or empty says nothing.
    fn note(&mut self, path: &str, map: &'a Map<String, Value>, known: &[&str]) {
        for (name, value) in map {
            // More are not listed; so a conversation of nothing but names costs little.
            if self.ignored.len() >= IGNORED_FIELDS_MAX {
                return;
            }
            let is_empty = match value {
                Value::Null => true,
                Value::Array(list) => list.is_empty(),
                _ => false,
            };
            let name = name.as_str();
            if is_empty || known.contains(&name) || self.names.contains(&name) {
                continue;
            }
            self.names.push(name);
            // The text crate hands `reasoning` to templates under the longer name.
            let word = match name {
                "reasoning" => "reasoning_content",
                name => name,
            };
            if !template_uses(self.text, word) {
                self.ignored.push(format!("{path}.{name}"));
            }
        }
    }

    /// Checks a message; who speaks in it.
    fn message(&mut self, path: &str, message: &'a Value) -> Result<Role, ApiError> {
        let at = |rest: &str| format!("{path}{rest}");
        let Some(message) = message.as_object() else {
            return Err(ApiError::field(at(""), "must be an object"));
        };
        let role = match message.get("role") {
            None => return Err(ApiError::field(at(".role"), "is missing")),
            Some(role) => role.as_str().and_then(Role::named),
        };
        let Some(role) = role else {
            let all = Role::ALL.map(Role::name).join(", ");
            return Err(ApiError::field(
                at(".role"),
                format!("must be one of {all}"),
            ));
        };
        let asks = |name: &str| {
            message
                .get(name)
                .is_some_and(|value| !value.is_null() && value != &Value::Array(vec![]))
        };
        for name in ["tool_calls", "function_call"] {
            let knows = template_uses(self.text, "tool_calls");
            if asks(name) && self.text.template.is_some() && !knows {
                return Err(ApiError::field(
                    at(&format!(".{name}")),
                    "cannot be read by this model: its chat template knows no such field",
                ));
            }
        }
        for entry in tables::REFUSED_IN_MESSAGES {
            let value = message.get(entry.field).unwrap_or(&Value::Null);
            if !entry.is_neutral(value) {
                return Err(ApiError::unsupported(at(&format!(".{}", entry.field)), ""));
            }
        }
        match message.get("content") {
            Some(Value::String(_)) => {}
            Some(Value::Array(parts)) => {
                for (j, part) in parts.iter().enumerate() {
                    self.part(&at(&format!(".content[{j}]")), part)?;
                }
            }
            // Clients send these back after a turn of tool calls or an aborted one.
            None | Some(Value::Null) if role == Role::Assistant => {}
            None | Some(Value::Null) => return Err(ApiError::field(at(".content"), "is missing")),
            Some(_) => {
                return Err(ApiError::field(
                    at(".content"),
                    "must be a string or a list of parts",
                ));
            }
        }
        if let Some(call) = message.get("function_call").filter(|call| !call.is_null()) {
            let Some(call) = call.as_object() else {
                return Err(ApiError::field(at(".function_call"), "must be an object"));
            };
            self.note(&at(".function_call"), call, FUNCTION_FIELDS);
        }
        self.calls(path, message)?;
        for name in ["name", "tool_call_id"] {
            let value = message.get(name).filter(|value| !value.is_null());
            if value.is_some_and(|value| !value.is_string()) {
                return Err(ApiError::field(at(&format!(".{name}")), "must be a string"));
            }
        }
        let honored = tables::HONORED_IN_MESSAGES.iter().map(|k| k.field);
        let refused = tables::REFUSED_IN_MESSAGES.iter().map(|u| u.field);
        let quiet = tables::QUIET_IN_MESSAGES.iter().copied();
        let known: Vec<&str> = honored.chain(refused).chain(quiet).collect();
        self.note(path, message, &known);
        Ok(role)
    }

    /// Checks the calls of a message, if it has any.
    fn calls(&mut self, path: &str, message: &'a Map<String, Value>) -> Result<(), ApiError> {
        let calls = match message.get("tool_calls") {
            None | Some(Value::Null) => return Ok(()),
            Some(Value::Array(calls)) => calls,
            Some(_) => {
                return Err(ApiError::field(
                    format!("{path}.tool_calls"),
                    "must be a list",
                ));
            }
        };
        for (j, call) in calls.iter().enumerate() {
            let path = format!("{path}.tool_calls[{j}]");
            let Some(call) = call.as_object() else {
                return Err(ApiError::field(path, "must be an object"));
            };
            self.note(&path, call, CALL_FIELDS);
            // Some clients send a call without its wrapping.
            let function = match call.get("function") {
                None | Some(Value::Null) => continue,
                Some(Value::Object(function)) => function,
                Some(_) => {
                    return Err(ApiError::field(
                        format!("{path}.function"),
                        "must be an object",
                    ));
                }
            };
            let path = format!("{path}.function");
            self.note(&path, function, FUNCTION_FIELDS);
            if function.get("name").is_some_and(|name| !name.is_string()) {
                return Err(ApiError::field(format!("{path}.name"), "must be a string"));
            }
            match function.get("arguments") {
                None | Some(Value::Null | Value::String(_) | Value::Object(_)) => {}
                Some(_) => {
                    let message = "must be a JSON object, or its text";
                    return Err(ApiError::field(format!("{path}.arguments"), message));
                }
            }
        }
        Ok(())
    }

    fn part(&mut self, path: &str, part: &'a Value) -> Result<(), ApiError> {
        match media_of(part) {
            Some(part) => {
                let known = media::check(path, part)?;
                self.note(path, part, known);
            }
            None => {
                text_of(path, part)?;
                if let Some(part) = part.as_object() {
                    let kind = part.get("type").and_then(Value::as_str).unwrap_or("text");
                    self.note(path, part, &["type", "text", kind]);
                }
            }
        }
        Ok(())
    }
}

/// The fields of `part`, if it shows something.
pub(super) fn media_of(part: &Value) -> Option<&Map<String, Value>> {
    let is_one = part["type"].as_str().is_some_and(is_media);
    part.as_object().filter(|_| is_one)
}

/// The text of a part at `path`: the part itself if it is a string, else what stands in it under
/// `text`, or under the part's type, as the words of a refusal do.
///
/// # Errors
///
/// 400 for a part that is malformed, or that is no text.
pub(super) fn text_of<'a>(path: &str, part: &'a Value) -> Result<&'a str, ApiError> {
    let at = |rest: &str| format!("{path}{rest}");
    let part = match part {
        Value::String(text) => return Ok(text),
        Value::Object(part) => part,
        _ => return Err(ApiError::field(at(""), "must be an object")),
    };
    let kind = match part.get("type") {
        Some(Value::String(kind)) => kind.as_str(),
        None => "text",
        Some(_) => return Err(ApiError::field(at(".type"), "must be a string")),
    };
    if !TEXT_PARTS.contains(&kind) {
        return Err(ApiError::unsupported(
            at(""),
            &format!(
                " (it is of type `{}`, and only text, pictures, video and sounds are read)",
                excerpt(kind)
            ),
        ));
    }
    match part.get("text").or_else(|| part.get(kind)) {
        Some(Value::String(text)) => Ok(text),
        _ => Err(ApiError::field(at(".text"), "must be a string")),
    }
}
