//! Messages as clients send them → messages as templates read them.
//!
//! Clients differ in ways that mean nothing: text as a string or as a list of
//! parts, `content: null`, `developer` for `system`, tool arguments as a
//! string of JSON. Templates were written against one of the forms, so all are
//! brought to the form that the template at hand understands.
//!
//! **Text is a string.** Where every part of a list is text, in a message of any
//! role, the parts are joined with nothing between them, as templates that walk
//! through a list do themselves. So a string, one part and several parts make the
//! same prompt. A list reaches a template only if a part is not text, or as one text
//! part if the template takes nothing but lists. What the template cannot show (an
//! image, if it takes text only) is an error, never dropped.
//!
//! **No instruction is lost.** Leading system messages become one, with a blank line
//! between them. Later ones are written where they stand if the template does that,
//! and else become part of a user turn ([`SystemPlace`]).
//!
//! Fields not named here, such as `reasoning_content`, `name` or
//! `tool_call_id`, pass through.

use serde_json::{Map, Value, json};

use crate::error::{TextError, within};
use crate::reasoning::ReasoningMarks;

/// Most messages of one conversation.
pub const MESSAGES_MAX: usize = 16_384;
/// Most instructions that are looked for in the whole prompt because they are not in order.
const MISSES_MAX: usize = 16;
/// The text between instructions that become one message.
const BLANK_LINE: &str = "\n\n";

/// The form of a message's `content` that a template reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentForm {
    /// Only a string.
    Text,
    /// Only a list of parts; a string becomes one part.
    Parts,
    /// A string or a list, with the same prompt; text is passed as a string.
    Either,
}

/// The place where a template writes system messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SystemPlace {
    /// Wherever a system message stands in the conversation.
    Anywhere,
    /// Only at the start. A later system message becomes the end of the user message before
    /// it, else the start of the user message after it, else a user message of its own.
    First,
    /// Nowhere: even the first system message becomes part of a user message.
    Nowhere,
}

/// The forms of messages that a template reads, found by rendering small conversations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reads {
    /// The form of system and developer messages.
    pub system: ContentForm,
    /// The form of user messages.
    pub user: ContentForm,
    /// The form of the model's own messages.
    pub assistant: ContentForm,
    /// The form of tool results.
    pub tool: ContentForm,
    /// The place where the template writes system messages.
    pub place: SystemPlace,
}

impl Reads {
    /// One form for all roles, and a place for system messages.
    pub(crate) fn all(form: ContentForm, place: SystemPlace) -> Self {
        Reads {
            system: form,
            user: form,
            assistant: form,
            tool: form,
            place,
        }
    }

    /// The form for messages of `role`.
    pub(crate) fn form(&self, role: &str) -> ContentForm {
        match role {
            "system" | "developer" => self.system,
            "assistant" => self.assistant,
            "tool" | "function" => self.tool,
            _ => self.user,
        }
    }
}

/// Brings `messages` to the forms that a template reads.
///
/// # Errors
///
/// [`TextError::BadMessage`] if a message has no usable shape, or a part that the template
/// cannot show; [`TextError::TooLarge`] for more than [`MESSAGES_MAX`] messages.
pub(crate) fn normalize(messages: &Value, reads: &Reads) -> Result<Value, TextError> {
    let list = messages.as_array().ok_or(TextError::BadMessage {
        index: 0,
        reason: "messages must be a list",
    })?;
    within("messages", list.len(), MESSAGES_MAX)?;
    let normal: Result<Vec<_>, _> = list
        .iter()
        .enumerate()
        .map(|(index, message)| {
            one(message, reads).map_err(|reason| TextError::BadMessage { index, reason })
        })
        .collect();
    let mut placed = place_instructions(normal?, reads.place);
    for message in &mut placed {
        if reads.form(role(message)) == ContentForm::Parts {
            let content = &mut message["content"];
            match content.take() {
                Value::Null => *content = json!([]),
                Value::String(text) => *content = json!([{"type": "text", "text": text}]),
                list => *content = list,
            }
        } else if message["content"].is_null() {
            message["content"] = json!("");
        }
    }
    Ok(placed.into_iter().map(Value::Object).collect())
}

/// Brings one message to a common form: its content becomes null, a string, or a list with
/// at least one part that is not text.
fn one(message: &Value, reads: &Reads) -> Result<Map<String, Value>, &'static str> {
    let message = message.as_object().ok_or("must be an object")?;
    let role = message.get("role").ok_or("role is missing")?;
    let role = role.as_str().ok_or("role must be a string")?;
    let mut out = Map::new();
    for (key, value) in message {
        let value = match key.as_str() {
            "role" if role == "developer" => json!("system"),
            "content" => content(value, reads.form(role))?,
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
    if !out.contains_key("content") {
        out.insert("content".to_owned(), Value::Null);
    }
    // Two names are in use for the same field; templates know the longer one.
    if !out.contains_key("reasoning_content")
        && let Some(reasoning @ Value::String(_)) = out.get("reasoning").cloned()
    {
        out.insert("reasoning_content".to_owned(), reasoning);
    }
    Ok(out)
}

/// Moves reasoning that stands inside the content of the model's own messages to where
/// templates look for it.
pub(crate) fn take_reasoning_out(messages: &mut Value, marks: &ReasoningMarks) {
    for message in messages.as_array_mut().into_iter().flatten() {
        if message["role"] != "assistant" || message.get("reasoning_content").is_some() {
            continue;
        }
        let content = match &mut message["content"] {
            Value::Array(parts) if parts.len() == 1 => &mut parts[0]["text"],
            content => content,
        };
        if let Some((reasoning, answer)) = content.as_str().and_then(|text| marks.split(text)) {
            *content = json!(answer);
            message["reasoning_content"] = json!(reasoning);
        }
    }
}

/// Brings `content` to a common form: text becomes a string, a list with other parts stays a
/// list.
fn content(content: &Value, form: ContentForm) -> Result<Value, &'static str> {
    let parts = match content {
        Value::Null | Value::String(_) => return Ok(content.clone()),
        Value::Array(parts) => parts,
        _ => return Err("content must be a string, a list of parts or null"),
    };
    let parts: Vec<Value> = parts.iter().map(part).collect::<Result<_, _>>()?;
    let texts: Option<Vec<&str>> = parts.iter().map(|part| part["text"].as_str()).collect();
    match texts {
        Some(texts) => Ok(Value::String(texts.concat())),
        None if form == ContentForm::Text => Err("this model's chat template takes text only"),
        None => Ok(Value::Array(parts)),
    }
}

/// Brings one part of a list to the form that templates read. Images and sounds themselves
/// are left out: a template writes a placeholder for each.
fn part(part: &Value) -> Result<Value, &'static str> {
    if let Some(text) = part.as_str() {
        return Ok(json!({"type": "text", "text": text}));
    }
    match part["type"].as_str() {
        // A refusal carries its words under its own name.
        Some(kind) if is_text(kind) => match part["text"].as_str().or(part[kind].as_str()) {
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

/// The role of a message in the common form.
fn role(message: &Map<String, Value>) -> &str {
    message["role"].as_str().unwrap_or_default()
}

/// Moves system messages to the `place` where a template writes them.
fn place_instructions(
    messages: Vec<Map<String, Value>>,
    place: SystemPlace,
) -> Vec<Map<String, Value>> {
    let mut rest = messages.into_iter().peekable();
    let mut first: Option<Map<String, Value>> = None;
    while let Some(mut next) = rest.next_if(|message| role(message) == "system") {
        match &mut first {
            Some(first) => join(&mut first["content"], next["content"].take()),
            None => first = Some(next),
        }
    }
    let mut out: Vec<Map<String, Value>> = Vec::new();
    // Instructions on their way to the next user message.
    let mut waiting = Value::Null;
    let user =
        |content| Map::from_iter([("role".into(), json!("user")), ("content".into(), content)]);
    match (first, place) {
        (Some(mut first), SystemPlace::Nowhere) => waiting = first["content"].take(),
        (first, _) => out.extend(first),
    }
    for mut message in rest {
        let is_system = role(&message) == "system" && place != SystemPlace::Anywhere;
        match out.last_mut() {
            Some(last) if is_system && role(last) == "user" => {
                join(&mut last["content"], message["content"].take());
                continue;
            }
            _ if is_system => {
                join(&mut waiting, message["content"].take());
                continue;
            }
            _ => {}
        }
        let mut instructions = waiting.take();
        if role(&message) == "user" {
            if !is_blank(&instructions) {
                join(&mut instructions, message["content"].take());
                message["content"] = instructions;
            }
        } else if !is_blank(&instructions) {
            out.push(user(instructions));
        }
        out.push(message);
    }
    if !is_blank(&waiting) {
        out.push(user(waiting));
    }
    out
}

/// Whether content is empty or white space.
fn is_blank(content: &Value) -> bool {
    match content {
        Value::String(text) => text.trim().is_empty(),
        Value::Array(parts) => parts.is_empty(),
        _ => true,
    }
}

/// Puts `next` after `content`, with a blank line between them.
fn join(content: &mut Value, next: Value) {
    if is_blank(&next) {
        return;
    }
    *content = match (content.take(), next) {
        (first, next) if is_blank(&first) => next,
        (Value::String(first), Value::String(next)) => json!(first + BLANK_LINE + &next),
        (first, next) => {
            let parts = |content| match content {
                Value::Array(parts) => parts,
                text => vec![json!({"type": "text", "text": text})],
            };
            let mut all = parts(first);
            all.push(json!({"type": "text", "text": BLANK_LINE}));
            all.extend(parts(next));
            Value::Array(all)
        }
    };
}

/// Refuses a conversation if the template has left a system message out of `prompt`. Messages
/// of other roles are not checked, for a template may rewrite what they say.
///
/// # Errors
///
/// [`TextError::BadMessage`] names the message that is missing.
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
                reason: "the model's chat template leaves out what this message says; put it into the first system message, or send it as a user message",
            });
        }
    }
    Ok(())
}

/// Whether a part of this type is text.
fn is_text(kind: &str) -> bool {
    matches!(kind, "text" | "input_text" | "output_text" | "refusal")
}

/// Tool calls with their arguments as objects, which templates walk through, instead of the
/// strings of JSON that clients send.
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
        normalize(&messages, &reads(ContentForm::Text)).unwrap()
    }

    fn reads(form: ContentForm) -> Reads {
        Reads::all(form, SystemPlace::First)
    }

    #[test]
    fn text_of_every_form_becomes_one_string() {
        let forms = [
            json!("a\nb c"),
            json!([{"type": "text", "text": "a\nb c"}]),
            json!([{"type": "text", "text": "a\n"}, {"type": "input_text", "text": "b"}, {"text": " c"}]),
            json!(["a\nb", " ", "c"]),
            json!([{"type": "output_text", "text": "a\nb"}, {"type": "refusal", "refusal": " c"}]),
        ];
        for role in ["system", "user", "assistant", "tool", "function"] {
            for content in &forms {
                let messages = json!([{"role": role, "content": content}]);
                for form in [ContentForm::Text, ContentForm::Either] {
                    assert_eq!(
                        normalize(&messages, &reads(form)).unwrap(),
                        json!([{"role": role, "content": "a\nb c"}])
                    );
                }
                assert_eq!(
                    normalize(&messages, &reads(ContentForm::Parts)).unwrap(),
                    json!([{"role": role, "content": [{"type": "text", "text": "a\nb c"}]}])
                );
            }
        }
    }

    #[test]
    fn instructions_go_where_the_template_writes_them() {
        // A letter and a text a message: system, user, assistant, tool.
        let messages = |text: &str| -> Value {
            let message = |m: &str| {
                let role = match &m[..1] {
                    "s" => "system",
                    "d" => "developer",
                    "u" => "user",
                    "a" => "assistant",
                    _ => "tool",
                };
                json!({"role": role, "content": m[1..].replace('_', "\n\n")})
            };
            text.split(' ').map(message).collect()
        };
        let place = |text: &str, place| {
            normalize(&messages(text), &Reads::all(ContentForm::Text, place)).unwrap()
        };
        for (sent, first, nowhere) in [
            ("s1 u2", "s1 u2", "u1_2"),
            ("s1 d2 s3 u4", "s1_2_3 u4", "u1_2_3_4"),
            ("d1 d2 u3 u4", "s1_2 u3 u4", "u1_2_3 u4"),
            ("u1 s2", "u1_2", "u1_2"),
            ("u1 s2 s3 a4 u5", "u1_2_3 a4 u5", "u1_2_3 a4 u5"),
            ("s1 u2 a3 s4 d5 u6", "s1 u2 a3 u4_5_6", "u1_2 a3 u4_5_6"),
            ("u1 a2 t3 s4 a5", "u1 a2 t3 u4 a5", "u1 a2 t3 u4 a5"),
            ("u1 a2 s3", "u1 a2 u3", "u1 a2 u3"),
            ("s1 s s2 u3 s", "s1_2 u3", "u1_2_3"),
            ("s1", "s1", "u1"),
        ] {
            assert_eq!(place(sent, SystemPlace::First), messages(first), "{sent}");
            assert_eq!(
                place(sent, SystemPlace::Nowhere),
                messages(nowhere),
                "{sent}"
            );
        }
        assert_eq!(
            place("s1 d2 u3 d4 s5 a6", SystemPlace::Anywhere),
            messages("s1_2 u3 s4 s5 a6")
        );
        let image = json!([{"role": "system", "content": "a"}, {"role": "system", "content": ["b", {"type": "image"}]}]);
        assert_eq!(
            normalize(&image, &Reads::all(ContentForm::Either, SystemPlace::First)).unwrap()[0]["content"],
            json!([{"type": "text", "text": "a"}, {"type": "text", "text": "\n\n"}, {"type": "text", "text": "b"}, {"type": "image"}])
        );
    }

    #[test]
    fn images_are_placeholders_or_errors_but_never_dropped() {
        let image = json!([{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]);
        assert_eq!(
            normalize(&image, &reads(ContentForm::Parts)).unwrap()[0]["content"],
            json!([{"type": "image"}])
        );
        assert!(matches!(
            normalize(&image, &reads(ContentForm::Text)),
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
            assert!(normalize(&messages, &reads(ContentForm::Text)).is_err());
            assert!(normalize(&messages, &reads(ContentForm::Parts)).is_err());
        }
    }
}
