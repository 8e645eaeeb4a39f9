//! The items of a conversation: those that a client sends, and those of stored responses,
//! become messages.
//!
//! | item | becomes |
//! | --- | --- |
//! | `message`, also without a type | a message |
//! | `function_call` and the other [`CALLS`] | a call in the model's own message |
//! | `function_call_output` and the other [`RESULTS`] | a tool's result |
//! | `reasoning` | the model's reasoning, where its template writes any |
//! | `compaction` | a user message with the summary of what came before |
//! | `item_reference` | the stored item |
//!
//! Items of one turn of the model that follow each other are one message, as templates have it.
//! Any other type is refused by name: its text would be lost.

use std::collections::HashSet;

use serde_json::{Map, Value, json};
use text::Text;
use text::messages::MESSAGES_MAX;

use crate::errors::{ApiError, excerpt};
use crate::ids;
use crate::limits::IGNORED_FIELDS_MAX;
use crate::media;
use crate::openai::messages::{media_of, text_of};
use crate::request::{Message, Part, Role};
use crate::results;
use crate::template::template_uses;

/// The field that items come in.
pub(super) const INPUT: &str = "input";
/// What the reasoning begins with in the field that other servers encrypt it in: with `store`
/// off, clients send back that field only.
pub(super) const SEALED: &str = "paceline:";
/// The type of the item that stands for a conversation that was summarized.
pub(super) const COMPACTION: &str = "compaction";
/// What a model reads before such a summary.
const SUMMARY_MARK: &str = "A summary of the conversation so far:";
/// Fields that only say which item it is, or how its writing went.
const QUIET: &[&str] = &["id", "status", "type"];

/// A type of item that calls a tool.
struct CallKind {
    kind: &'static str,
    /// The name of the tool, where the item has none.
    tool: &'static str,
    /// The field of the arguments.
    arguments: &'static str,
}

/// Types of items that call a tool.
const CALLS: &[CallKind] = &[
    call("function_call", "", "arguments"),
    call("custom_tool_call", "", "input"),
    call("local_shell_call", "local_shell", "action"),
    call("shell_call", "shell", "action"),
    call("apply_patch_call", "apply_patch", "operation"),
];

const fn call(kind: &'static str, tool: &'static str, arguments: &'static str) -> CallKind {
    CallKind {
        kind,
        tool,
        arguments,
    }
}

/// Types of items that are the result of a call.
const RESULTS: &[&str] = &[
    "function_call_output",
    "custom_tool_call_output",
    "local_shell_call_output",
    "shell_call_output",
    "apply_patch_call_output",
];

/// The items of `input`, as the request has them; a string is a message of the user's.
///
/// # Errors
///
/// 400 for what is neither a string nor a list of objects, and for a list that is empty or too
/// long.
pub(super) fn list(input: Value) -> Result<Vec<Map<String, Value>>, ApiError> {
    let list = match input {
        Value::Null => return Err(ApiError::field(INPUT, "is missing")),
        Value::String(text) => vec![json!({"role": "user", "content": text})],
        Value::Array(list) => list,
        _ => {
            let message = "must be a string or a list of items";
            return Err(ApiError::field(INPUT, message));
        }
    };
    if list.is_empty() {
        return Err(ApiError::field(INPUT, "is empty"));
    }
    if list.len() > MESSAGES_MAX {
        let message = format!("has {} items, {MESSAGES_MAX} at most", list.len());
        return Err(ApiError::field(INPUT, message));
    }
    let object = |(i, item)| match item {
        Value::Object(item) => Ok(item),
        _ => Err(ApiError::field(
            format!("{INPUT}[{i}]"),
            "must be an object",
        )),
    };
    list.into_iter().enumerate().map(object).collect()
}

/// The id of the stored item that `item` refers to, if it is a reference: an item of that type,
/// or one with nothing but an id.
pub(super) fn reference(item: &Map<String, Value>) -> Option<&str> {
    let id = item.get("id").and_then(Value::as_str)?;
    match kind_of(item) {
        Some("item_reference") => Some(id),
        None if !item.contains_key("role") => Some(id),
        _ => None,
    }
}

/// The type of an item, if it has one.
fn kind_of(item: &Map<String, Value>) -> Option<&str> {
    item.get("type").and_then(Value::as_str)
}

/// Gives an item what a stored one has: a type and an id, and as a message a list of parts and
/// a status.
pub(super) fn complete(item: &mut Map<String, Value>) {
    if kind_of(item).is_none() {
        item.insert("type".to_owned(), json!("message"));
    }
    let kind = kind_of(item).unwrap_or_default();
    let prefix = match kind {
        "message" => "msg",
        "reasoning" => "rs",
        "function_call" => "fc",
        "function_call_output" => "fco",
        _ => "item",
    };
    let is_message = kind == "message";
    if !item.get("id").is_some_and(Value::is_string) {
        let id = format!("{prefix}_{}", ids::unique());
        item.insert("id".to_owned(), json!(id));
    }
    if is_message {
        if let Some(Value::String(text)) = item.get("content") {
            let part = match item.get("role").and_then(Value::as_str) {
                Some("assistant") => {
                    json!({"type": "output_text", "text": text, "annotations": []})
                }
                _ => json!({"type": "input_text", "text": text}),
            };
            item.insert("content".to_owned(), json!([part]));
        }
        item.entry("status").or_insert(json!("completed"));
    }
}

/// Checks that each result in `input` is that of a call in it, or in the items that come before.
///
/// # Errors
///
/// 400 for the first result of no call.
pub(super) fn check_results<'a>(
    before: impl Iterator<Item = &'a Map<String, Value>>,
    input: &'a [Map<String, Value>],
) -> Result<(), ApiError> {
    let id = |item: &'a Map<String, Value>| call_id(INPUT, item).ok();
    let is_of = |item: &Map<String, Value>, kinds: &[&str]| {
        kind_of(item).is_some_and(|kind| kinds.contains(&kind))
    };
    let kinds: Vec<&str> = CALLS.iter().map(|call| call.kind).collect();
    let calls = before.chain(input).filter(|item| is_of(item, &kinds));
    let calls: HashSet<&str> = calls.filter_map(id).collect();
    for (i, item) in input.iter().enumerate() {
        if is_of(item, RESULTS)
            && let Some(id) = id(item).filter(|id| !calls.contains(id))
        {
            let message = format!("is `{}`, which no call before it has", excerpt(id));
            return Err(ApiError::field(format!("{INPUT}[{i}].call_id"), message));
        }
    }
    Ok(())
}

/// A conversation that is put together item by item.
pub(super) struct Turns<'a> {
    text: &'a Text,
    messages: Vec<Message>,
    /// Names of fields that change nothing; a conversation repeats them.
    names: Vec<String>,
    ignored: Vec<String>,
}

impl<'a> Turns<'a> {
    /// A conversation with a model that reads `text`, which begins with `instructions`.
    pub(super) fn new(text: &'a Text, instructions: Option<&str>) -> Self {
        let instructions = instructions.filter(|text| !text.is_empty());
        let message = |text: &str| Message {
            role: Role::System,
            content: vec![Part::Text(text.to_owned())],
            others: Map::new(),
        };
        Turns {
            text,
            messages: instructions.map(message).into_iter().collect(),
            names: Vec::new(),
            ignored: Vec::new(),
        }
    }

    /// Adds the item at `path`.
    ///
    /// # Errors
    ///
    /// 400 for an item that is malformed, or that is no text.
    pub(super) fn add(&mut self, path: &str, item: &Map<String, Value>) -> Result<(), ApiError> {
        let kind = match item.get("type") {
            None | Some(Value::Null) if item.contains_key("role") => "message",
            None | Some(Value::Null) => {
                return Err(ApiError::field(format!("{path}.type"), "is missing"));
            }
            Some(Value::String(kind)) => kind,
            Some(_) => return Err(ApiError::field(format!("{path}.type"), "must be a string")),
        };
        if let Some(kind) = CALLS.iter().find(|call| call.kind == kind) {
            return self.call(path, item, kind);
        }
        match kind {
            "message" => self.message(path, item),
            "reasoning" => self.reasoning(path, item),
            COMPACTION => self.compaction(path, item),
            _ if RESULTS.contains(&kind) => self.result(path, item),
            _ => {
                let hint = format!(
                    " (it is of type `{}`, which this server does not read)",
                    excerpt(kind)
                );
                Err(ApiError::unsupported(path, &hint))
            }
        }
    }

    /// The messages, and the paths of the fields in them that change nothing, once for each
    /// name.
    pub(super) fn finish(mut self) -> (Vec<Message>, Vec<String>) {
        results::prepare(&mut self.messages, self.text);
        (self.messages, self.ignored)
    }

    /// The fields of an item that are not in `known` and that the template reads; notes the
    /// others.
    fn others(
        &mut self,
        path: &str,
        item: &Map<String, Value>,
        known: &[&str],
    ) -> Map<String, Value> {
        let mut read = Map::new();
        for (name, value) in item {
            let is_known = known.contains(&name.as_str()) || QUIET.contains(&name.as_str());
            let is_empty = value.is_null() || value.as_array().is_some_and(Vec::is_empty);
            // More are not looked at; so an item of nothing but names costs little.
            if is_known || is_empty || self.ignored.len() >= IGNORED_FIELDS_MAX {
                continue;
            }
            if self.names.iter().any(|seen| seen == name) {
                continue;
            }
            if template_uses(self.text, name) {
                read.insert(name.clone(), value.clone());
            } else {
                self.names.push(name.clone());
                self.ignored.push(format!("{path}.{name}"));
            }
        }
        read
    }

    fn message(&mut self, path: &str, item: &Map<String, Value>) -> Result<(), ApiError> {
        let at = |rest: &str| format!("{path}{rest}");
        let role = item.get("role").and_then(Value::as_str);
        let role = match role.and_then(Role::named) {
            Some(role @ (Role::User | Role::Assistant | Role::System | Role::Developer)) => role,
            _ => {
                let message = "must be one of user, assistant, system, developer";
                return Err(ApiError::field(at(".role"), message));
            }
        };
        let content = match item.get("content") {
            None | Some(Value::Null) if role == Role::Assistant => Vec::new(),
            None | Some(Value::Null) => {
                return Err(ApiError::field(at(".content"), "is missing"));
            }
            Some(content) => parts(&at(".content"), content)?,
        };
        let others = self.others(path, item, &["role", "content", "phase"]);
        match self.messages.last_mut() {
            // What the model said after it had reasoned.
            Some(last) if role == Role::Assistant && is_begun(last) => {
                last.content = content;
                last.others.extend(others);
            }
            _ => self.messages.push(Message {
                role,
                content,
                others,
            }),
        }
        Ok(())
    }

    fn reasoning(&mut self, path: &str, item: &Map<String, Value>) -> Result<(), ApiError> {
        const NAME: &str = "reasoning_content";
        let texts = |name: &str| match item.get(name) {
            None | Some(Value::Null) => Ok(String::new()),
            Some(Value::Array(parts)) => {
                let texts = parts.iter().map(|part| part["text"].as_str());
                texts.collect::<Option<String>>().ok_or_else(|| {
                    ApiError::field(format!("{path}.{name}"), "must be a list of texts")
                })
            }
            Some(_) => Err(ApiError::field(
                format!("{path}.{name}"),
                "must be a list of texts",
            )),
        };
        let (own, summary) = (texts("content")?, texts("summary")?);
        let sealed = item.get("encrypted_content").and_then(Value::as_str);
        let sealed = sealed.and_then(|text| text.strip_prefix(SEALED));
        // The model's own words if they are there, else what was made of them.
        let words = [own.as_str(), sealed.unwrap_or_default(), &summary];
        let words = words.into_iter().find(|text| !text.is_empty());
        let Some(words) = words else {
            return Ok(());
        };
        if !template_uses(self.text, NAME) {
            let is_noted = self.names.iter().any(|name| name == NAME);
            if !is_noted && self.ignored.len() < IGNORED_FIELDS_MAX {
                self.names.push(NAME.to_owned());
                self.ignored.push(path.to_owned());
            }
            return Ok(());
        }
        match self.messages.last_mut() {
            Some(last) if is_begun(last) => {
                let so_far = last.others[NAME].as_str().unwrap_or_default();
                last.others[NAME] = json!(format!("{so_far}\n{words}"));
            }
            _ => self.messages.push(Message {
                role: Role::Assistant,
                content: Vec::new(),
                others: Map::from_iter([(NAME.to_owned(), json!(words))]),
            }),
        }
        Ok(())
    }

    fn compaction(&mut self, path: &str, item: &Map<String, Value>) -> Result<(), ApiError> {
        const NAME: &str = "encrypted_content";
        let sealed = string(path, item, NAME)?;
        let Some(summary) = sealed.strip_prefix(SEALED) else {
            let message = "was not written by this server; send the conversation itself";
            return Err(ApiError::field(format!("{path}.{NAME}"), message));
        };
        let others = self.others(path, item, &[NAME, "created_by"]);
        self.messages.push(Message {
            role: Role::User,
            content: vec![Part::Text(format!("{SUMMARY_MARK}\n\n{summary}"))],
            others,
        });
        Ok(())
    }

    fn call(
        &mut self,
        path: &str,
        item: &Map<String, Value>,
        kind: &CallKind,
    ) -> Result<(), ApiError> {
        const NAME: &str = "tool_calls";
        if self.text.template.is_some() && !template_uses(self.text, NAME) {
            let message = "cannot be read by this model: its chat template knows no calls";
            return Err(ApiError::field(path, message));
        }
        let name = match kind.tool {
            "" => string(path, item, "name")?,
            tool => tool,
        };
        let value = item.get(kind.arguments).unwrap_or(&Value::Null);
        let arguments = match (kind.kind, value) {
            (_, Value::Null) => {
                let at = format!("{path}.{}", kind.arguments);
                return Err(ApiError::field(at, "is missing"));
            }
            ("function_call", Value::String(text)) => text.clone(),
            (_, Value::String(_)) => json!({ kind.arguments: value }).to_string(),
            (_, value) => value.to_string(),
        };
        let mut call = json!({
            "id": call_id(path, item)?,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        });
        for (name, value) in self.others(path, item, &["name", "call_id", kind.arguments]) {
            if call.get(&name).is_none() {
                call[name] = value;
            }
        }
        match self.messages.last_mut() {
            Some(last) if last.role == Role::Assistant => {
                match last.others.get_mut(NAME).and_then(Value::as_array_mut) {
                    Some(calls) => calls.push(call),
                    None => {
                        last.others.insert(NAME.to_owned(), json!([call]));
                    }
                }
            }
            _ => self.messages.push(Message {
                role: Role::Assistant,
                content: Vec::new(),
                others: Map::from_iter([(NAME.to_owned(), json!([call]))]),
            }),
        }
        Ok(())
    }

    fn result(&mut self, path: &str, item: &Map<String, Value>) -> Result<(), ApiError> {
        let at = format!("{path}.output");
        let content = match item.get("output") {
            None | Some(Value::Null) => return Err(ApiError::field(at, "is missing")),
            Some(output) if is_of_parts(output) => parts(&at, output)?,
            // What a shell or a patch has come to is an object or a list of them.
            Some(output) => vec![Part::Text(output.to_string())],
        };
        let mut others = self.others(path, item, &["output", "call_id", "name"]);
        others.insert("tool_call_id".to_owned(), json!(call_id(path, item)?));
        self.messages.push(Message {
            role: Role::Tool,
            content,
            others,
        });
        Ok(())
    }
}

/// Whether `message` is the model's, and has nothing but reasoning yet.
fn is_begun(message: &Message) -> bool {
    message.role == Role::Assistant
        && message.content.is_empty()
        && message.others.contains_key("reasoning_content")
        && !message.others.contains_key("tool_calls")
}

/// Whether an output is a text or a list of parts.
fn is_of_parts(output: &Value) -> bool {
    let is_part = |part: &Value| {
        let kind = part["type"].as_str();
        part.is_string() || kind.is_some_and(|kind| kind.starts_with("input_") || kind == "text")
    };
    match output {
        Value::String(_) => true,
        Value::Array(list) => list.iter().all(is_part),
        _ => false,
    }
}

/// What a message's content at `path` says and shows: a string, or a list of parts.
fn parts(path: &str, content: &Value) -> Result<Vec<Part>, ApiError> {
    match content {
        Value::String(text) => Ok(vec![Part::Text(text.clone())]),
        Value::Array(list) => {
            let part = |(j, part)| {
                let path = format!("{path}[{j}]");
                match media_of(part) {
                    Some(part) => media::read(&path, part).map(Part::Media),
                    None => Ok(Part::Text(text_of(&path, part)?.to_owned())),
                }
            };
            list.iter().enumerate().map(part).collect()
        }
        _ => Err(ApiError::field(path, "must be a string or a list of parts")),
    }
}

/// A string that the item at `path` must have.
fn string<'a>(path: &str, item: &'a Map<String, Value>, name: &str) -> Result<&'a str, ApiError> {
    match item.get(name) {
        Some(Value::String(text)) => Ok(text),
        None | Some(Value::Null) => Err(ApiError::field(format!("{path}.{name}"), "is missing")),
        Some(_) => Err(ApiError::field(
            format!("{path}.{name}"),
            "must be a string",
        )),
    }
}

/// The id by which a call and its result belong together; older items have it as their own.
fn call_id<'a>(path: &str, item: &'a Map<String, Value>) -> Result<&'a str, ApiError> {
    match item.get("call_id").filter(|id| !id.is_null()) {
        None if item.get("id").is_some_and(Value::is_string) => string(path, item, "id"),
        _ => string(path, item, "call_id"),
    }
}
