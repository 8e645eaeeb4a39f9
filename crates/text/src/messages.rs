//! Messages as clients send them → messages as templates read them.
//!
//! Clients differ in ways that mean nothing: text as a string or as a list of
//! parts, `content: null`, `developer` for `system`, tool arguments as a
//! string of JSON. Templates were written against one of the forms, so all are
//! brought to the form that the template at hand understands. What the
//! template cannot show (an image, for a template of text only) is an error,
//! never dropped.
//!
//! Fields not named here, such as `reasoning_content`, `name` or
//! `tool_call_id`, pass through.

use serde_json::{Map, Value, json};

use crate::error::{TextError, within};

/// Messages of one conversation.
pub const MESSAGES_MAX: usize = 16_384;
/// Messages out of order that are looked for in the whole prompt.
const MISSES_MAX: usize = 16;

/// The form of `content` that a template understands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentForm {
    /// A string only; parts are joined by line breaks.
    Text,
    /// A list of parts only; strings become one part.
    Parts,
    /// Either; passed as it came.
    Either,
}

/// Brings `messages` to the form that a template with `form` reads.
pub(crate) fn normalize(messages: &Value, form: ContentForm) -> Result<Value, TextError> {
    let list = messages.as_array().ok_or(TextError::BadMessage {
        index: 0,
        reason: "messages must be a list",
    })?;
    within("messages", list.len(), MESSAGES_MAX)?;
    list.iter()
        .enumerate()
        .map(|(index, message)| {
            one(message, form).map_err(|reason| TextError::BadMessage { index, reason })
        })
        .collect()
}

fn one(message: &Value, form: ContentForm) -> Result<Value, &'static str> {
    let message = message.as_object().ok_or("must be an object")?;
    let mut out = Map::new();
    for (key, value) in message {
        let value = match key.as_str() {
            "role" => match value.as_str() {
                Some("developer") => json!("system"),
                Some(_) => value.clone(),
                None => return Err("role must be a string"),
            },
            "content" => content(value, form)?,
            "tool_calls" if value.is_null() => continue,
            "tool_calls" => tool_calls(value)?,
            // Clients send these as null where they mean "absent"; templates
            // test whether they are defined.
            "name" | "tool_call_id" | "reasoning_content" | "reasoning" | "refusal"
                if value.is_null() =>
            {
                continue;
            }
            _ => value.clone(),
        };
        out.insert(key.clone(), value);
    }
    if !out.contains_key("role") {
        return Err("role is missing");
    }
    if !out.contains_key("content") {
        out.insert("content".to_owned(), content(&Value::Null, form)?);
    }
    // Two names are in use for the same field; templates know the longer one.
    if !out.contains_key("reasoning_content")
        && let Some(reasoning @ Value::String(_)) = out.get("reasoning").cloned()
    {
        out.insert("reasoning_content".to_owned(), reasoning);
    }
    Ok(Value::Object(out))
}

fn content(content: &Value, form: ContentForm) -> Result<Value, &'static str> {
    match (content, form) {
        (Value::Null, ContentForm::Parts) => Ok(json!([])),
        (Value::Null, _) => Ok(json!("")),
        (Value::String(text), ContentForm::Parts) => Ok(json!([{"type": "text", "text": text}])),
        (Value::String(_), _) => Ok(content.clone()),
        (Value::Array(parts), ContentForm::Text) => {
            let texts: Result<Vec<&str>, _> = parts.iter().map(text_of).collect();
            Ok(Value::String(texts?.join("\n")))
        }
        (Value::Array(parts), _) => parts.iter().map(part).collect(),
        _ => Err("content must be a string, a list of parts or null"),
    }
}

/// The text of a part for a template that knows text only.
fn text_of(part: &Value) -> Result<&str, &'static str> {
    if let Some(text) = part.as_str() {
        return Ok(text);
    }
    if part["type"].as_str().is_some_and(|kind| !is_text(kind)) {
        return Err("this model's chat template takes text only");
    }
    part["text"].as_str().ok_or("a text part has no text")
}

/// A part in the spelling of templates. Pixels and samples stay outside: a
/// template writes a placeholder for them.
fn part(part: &Value) -> Result<Value, &'static str> {
    if let Some(text) = part.as_str() {
        return Ok(json!({"type": "text", "text": text}));
    }
    match part["type"].as_str() {
        Some(kind) if is_text(kind) => match part["text"].as_str() {
            Some(text) => Ok(json!({"type": "text", "text": text})),
            None => Err("a text part has no text"),
        },
        Some("image" | "image_url" | "input_image") => Ok(json!({"type": "image"})),
        Some("audio" | "audio_url" | "input_audio") => Ok(json!({"type": "audio"})),
        Some("video" | "video_url" | "input_video") => Ok(json!({"type": "video"})),
        Some(_) => Err("a part has an unknown type"),
        None if part["text"].is_string() => Ok(json!({"type": "text", "text": part["text"]})),
        None => Err("a part has no type"),
    }
}

/// Refuses a conversation if the template has left instructions out of `prompt`: some read a
/// system message at the start only. What others say a template may spell anew.
pub(crate) fn check_all_said(messages: &Value, prompt: &str) -> Result<(), TextError> {
    // Templates nearly keep the order: the prompt is read once, rarely from its start.
    let (mut at, mut misses) = (0, 0);
    let mut is_said = |text: &Value| {
        let text = text.as_str().unwrap_or_default().trim();
        if let Some(found) = prompt[at..].find(text) {
            at += found + text.len();
            return true;
        }
        misses += 1;
        misses > MISSES_MAX || prompt.contains(text)
    };
    for (index, message) in messages.as_array().into_iter().flatten().enumerate() {
        let role = message["role"].as_str();
        let instructs = matches!(role, Some("system" | "developer"));
        let content = &message["content"];
        let mut parts = content.as_array().into_iter().flatten();
        if instructs
            && !(is_said(content) && parts.all(|part| is_said(part) && is_said(&part["text"])))
        {
            return Err(TextError::BadMessage {
                index,
                reason: "the chat template leaves it out; a system message may have to come first",
            });
        }
    }
    Ok(())
}

fn is_text(kind: &str) -> bool {
    matches!(kind, "text" | "input_text" | "output_text" | "refusal")
}

/// Arguments travel as a string of JSON; templates walk through an object.
fn tool_calls(calls: &Value) -> Result<Value, &'static str> {
    let calls = calls.as_array().ok_or("tool_calls must be a list")?;
    calls
        .iter()
        .map(|call| {
            let mut call = call.clone();
            if !call.is_object() {
                return Err("a tool call must be an object");
            }
            for pointer in ["/function/arguments", "/arguments"] {
                if let Some(arguments) = call.pointer_mut(pointer)
                    && let Some(text) = arguments.as_str()
                {
                    let parsed = if text.trim().is_empty() {
                        Some(json!({}))
                    } else {
                        serde_json::from_str(text).ok().filter(Value::is_object)
                    };
                    // Broken arguments in the history are the model's own
                    // words; it sees them again as it wrote them.
                    if let Some(parsed) = parsed {
                        *arguments = parsed;
                    }
                }
            }
            Ok(call)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(messages: Value) -> Value {
        normalize(&messages, ContentForm::Text).unwrap()
    }

    #[test]
    fn content_takes_the_form_of_the_template() {
        let parts = json!([{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}]);
        assert_eq!(
            text(parts.clone()),
            json!([{"role": "user", "content": "a\nb"}])
        );
        assert_eq!(
            normalize(&parts, ContentForm::Either).unwrap()[0]["content"][1],
            json!({"type": "text", "text": "b"})
        );
        let string = json!([{"role": "user", "content": "a"}]);
        assert_eq!(normalize(&string, ContentForm::Either).unwrap(), string);
        assert_eq!(
            normalize(&string, ContentForm::Parts).unwrap()[0]["content"],
            json!([{"type": "text", "text": "a"}])
        );
    }

    #[test]
    fn images_are_placeholders_or_errors_but_never_dropped() {
        let image = json!([{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]);
        assert_eq!(
            normalize(&image, ContentForm::Parts).unwrap()[0]["content"],
            json!([{"type": "image"}])
        );
        assert!(matches!(
            normalize(&image, ContentForm::Text),
            Err(TextError::BadMessage { index: 0, .. })
        ));
    }

    #[test]
    fn harmless_variants_are_accepted() {
        assert_eq!(
            text(json!([
                {"role": "developer", "content": "be brief"},
                {"role": "assistant", "content": null, "tool_calls": null, "tool_call_id": null},
                {"role": "assistant", "reasoning": "hm", "extra": 1}
            ])),
            json!([
                {"role": "system", "content": "be brief"},
                {"role": "assistant", "content": ""},
                {"role": "assistant", "reasoning": "hm", "extra": 1, "content": "", "reasoning_content": "hm"}
            ])
        );
    }

    #[test]
    fn tool_arguments_become_objects_if_they_are() {
        let call = |arguments: &str| {
            let messages = json!([{"role": "assistant", "tool_calls": [
                {"function": {"name": "f", "arguments": arguments}}]}]);
            text(messages)[0]["tool_calls"][0]["function"]["arguments"].clone()
        };
        assert_eq!(call(r#"{"b": 1, "a": 2}"#).to_string(), r#"{"b":1,"a":2}"#);
        assert_eq!(call(""), json!({}));
        assert_eq!(call("{broken"), json!("{broken"));
        assert_eq!(call("[1]"), json!("[1]"));
    }

    #[test]
    fn instructions_that_a_template_leaves_out_are_an_error() {
        let messages = json!([
            {"role": "system", "content": " Be brief. "},
            {"role": "user", "content": "<b>"},
            {"role": "developer", "content": ["Be", {"type": "text", "text": "kind\n"}, {"type": "image"}]},
            {"role": "assistant", "content": "<think>hm</think> Hello!"}
        ]);
        let index = |prompt| match check_all_said(&messages, prompt) {
            Err(TextError::BadMessage { index, .. }) => Some(index),
            _ => None,
        };
        assert_eq!(index("Be brief.|&lt;b&gt;|Be|kind|Hello!"), None);
        assert_eq!(index("&lt;b&gt;|Be|kind|Hello!"), Some(0));
        assert_eq!(index("Be brief.|&lt;b&gt;|Be|Hello!"), Some(2));
    }

    #[test]
    fn shapeless_messages_are_errors() {
        for messages in [
            json!({}),
            json!([1]),
            json!([{}]),
            json!([{"role": 1}]),
            json!([{"role": "user", "content": 1}]),
            json!([{"role": "user", "content": [{"type": "text"}]}]),
            json!([{"role": "user", "content": [{"type": "hologram"}]}]),
            json!([{"role": "user", "tool_calls": 1}]),
            json!([{"role": "user", "tool_calls": ["x"]}]),
            Value::Array(vec![json!({"role": "user"}); MESSAGES_MAX + 1]),
        ] {
            assert!(normalize(&messages, ContentForm::Text).is_err());
            assert!(normalize(&messages, ContentForm::Parts).is_err());
        }
    }
}
