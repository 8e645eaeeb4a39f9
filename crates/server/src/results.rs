//! Results of tools: what chat templates want to know of them, and where pictures in them go.

use std::collections::HashMap;

use serde_json::{Map, Value};
use text::Text;
use text::messages::ContentForm;

use crate::request::{Message, Part, Role};

/// What a result says that is nothing but pictures, where these follow in a message of the user.
const PICTURE: &str = "[image]";

/// Prepares the results of tools among `messages` for the model's chat template.
pub(crate) fn prepare(messages: &mut Vec<Message>, text: &Text) {
    name_results(messages);
    let template = text.template.as_ref();
    if template.is_some_and(|template| template.reads().tool == ContentForm::Text) {
        move_pictures(messages);
    }
}

/// Gives results of tools that say which call they answer, and no name, the name of the tool:
/// templates tell results of several calls apart by it.
fn name_results(messages: &mut [Message]) {
    let mut names: HashMap<String, Value> = HashMap::new();
    for Message { role, others, .. } in messages {
        let calls = others.get("tool_calls").and_then(Value::as_array);
        for call in calls.into_iter().flatten() {
            if let Some(id) = call["id"].as_str() {
                names.insert(id.to_owned(), call["function"]["name"].clone());
            }
        }
        let answered = others.get("tool_call_id").and_then(Value::as_str);
        let name = answered.and_then(|id| names.get(id));
        let is_unnamed = others.get("name").is_none_or(Value::is_null);
        if let Some(name) = name.filter(|_| *role == Role::Tool && is_unnamed).cloned() {
            others.insert("name".to_owned(), name);
        }
    }
}

/// Moves pictures and videos out of results, for a template that shows only their text: they begin the user's
/// message that follows, or are one of their own.
fn move_pictures(messages: &mut Vec<Message>) {
    let is_picture = |part: &Part| matches!(part, Part::Media(_));
    let has_some = |m: &Message| m.role == Role::Tool && m.content.iter().any(is_picture);
    if !messages.iter().any(has_some) {
        return;
    }
    let mut waiting: Vec<Part> = Vec::new();
    let mut out = Vec::with_capacity(messages.len() + 1);
    let user = |content| Message {
        role: Role::User,
        content,
        others: Map::new(),
    };
    for mut message in messages.drain(..) {
        match message.role {
            Role::Tool => {
                let (pictures, texts): (Vec<_>, Vec<_>) =
                    message.content.into_iter().partition(is_picture);
                message.content = match texts.is_empty() && !pictures.is_empty() {
                    true => vec![Part::Text(PICTURE.to_owned())],
                    false => texts,
                };
                waiting.extend(pictures);
            }
            Role::User => {
                waiting.append(&mut message.content);
                message.content = std::mem::take(&mut waiting);
            }
            _ if waiting.is_empty() => {}
            _ => out.push(user(std::mem::take(&mut waiting))),
        }
        out.push(message);
    }
    if !waiting.is_empty() {
        out.push(user(waiting));
    }
    *messages = out;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::media::{Image, Media};
    use crate::sources::Data;
    use serde_json::json;

    fn picture(name: &str) -> Part {
        Part::Media(Media::Picture(Image {
            path: name.to_owned(),
            data: Data::Bytes(Vec::new()),
            rows: None,
        }))
    }

    fn words(text: &str) -> Part {
        Part::Text(text.to_owned())
    }

    #[test]
    fn pictures_of_results_begin_the_next_message_of_the_user() {
        let message = |role, content| Message {
            role,
            content,
            others: Map::new(),
        };
        let mut messages = vec![
            message(Role::User, vec![picture("0")]),
            message(Role::Assistant, vec![]),
            message(Role::Tool, vec![words("a"), picture("1"), words("b")]),
            message(Role::Tool, vec![picture("2")]),
            message(Role::User, vec![words("c"), picture("3")]),
            message(Role::Tool, vec![picture("4")]),
            message(Role::Assistant, vec![words("d")]),
            message(Role::Tool, vec![]),
            message(Role::Tool, vec![picture("5")]),
        ];
        move_pictures(&mut messages);
        let expected = vec![
            message(Role::User, vec![picture("0")]),
            message(Role::Assistant, vec![]),
            message(Role::Tool, vec![words("a"), words("b")]),
            message(Role::Tool, vec![words("[image]")]),
            message(
                Role::User,
                vec![picture("1"), picture("2"), words("c"), picture("3")],
            ),
            message(Role::Tool, vec![words("[image]")]),
            message(Role::User, vec![picture("4")]),
            message(Role::Assistant, vec![words("d")]),
            message(Role::Tool, vec![]),
            message(Role::Tool, vec![words("[image]")]),
            message(Role::User, vec![picture("5")]),
        ];
        assert_eq!(messages, expected);
    }

    #[test]
    fn results_get_the_names_of_the_calls_that_they_answer() {
        let call = |id: &str, name: &str| json!({"id": id, "function": {"name": name}});
        let list = [
            json!({"role": "assistant", "tool_calls": [call("a", "first"), call("b", "second")]}),
            json!({"role": "tool", "tool_call_id": "b"}),
            json!({"role": "tool", "tool_call_id": "a", "content": "1", "name": null}),
            json!({"role": "tool", "tool_call_id": "a", "content": "1", "name": "own"}),
            json!({"role": "tool", "tool_call_id": "c", "content": "3"}),
            json!({"role": "user", "tool_call_id": "a", "content": "4"}),
        ];
        let message = |value: Value| {
            let role = Role::named(value["role"].as_str().unwrap()).unwrap();
            let others = value.as_object().unwrap().clone();
            Message {
                role,
                content: Vec::new(),
                others,
            }
        };
        let mut messages: Vec<Message> = list.into_iter().map(message).collect();
        name_results(&mut messages);
        let names = messages.iter().map(|m| m.others.get("name").cloned());
        assert_eq!(
            names.collect::<Vec<_>>(),
            [
                None,
                Some(json!("second")),
                Some(json!("first")),
                Some(json!("own")),
                None,
                None
            ]
        );
    }
}
