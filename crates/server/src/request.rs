//! A request for text as the engine understands it, whatever API it came by.

use std::sync::Arc;

use axum::http::HeaderValue;
use engine::{Channel, ClipOptions};
use serde_json::{Map, Value, json};
use text::messages::MESSAGES_MAX;
use text::{Infill, PromptEnd, Text};

use crate::errors::ApiError;
use crate::media::{Image, Media};
use crate::options::Options;

/// What a client asks for.
pub(crate) struct Asked {
    /// What the text is to follow.
    pub(crate) prompt: Prompt,
    /// How it is to be written.
    pub(crate) options: Options,
    /// The names of fields that change nothing, as they stand in a header.
    pub(crate) ignored: Option<HeaderValue>,
}

/// What a text is to follow.
#[derive(Debug, PartialEq)]
pub(crate) enum Prompt {
    /// Messages, which the model's chat template makes a prompt.
    Conversation(Conversation),
    /// A text, which needs no template.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
    /// Texts and lists of token ids that follow each other.
    Mixed(Vec<Prompt>),
    /// Text with pictures.
    Pictured(Pictured),
    /// What stands around a gap to fill.
    Infill(Infill),
    /// Several prompts of the kinds before, each of which gets answers of its own.
    Several(Vec<Prompt>),
}

/// Texts with a picture between each two.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Pictured {
    /// The texts, one more than pictures.
    pub(crate) texts: Vec<String>,
    /// The pictures; none once they were taken.
    pub(crate) images: Vec<Image>,
}

impl Prompt {
    /// Takes the data of media out of the prompt, in the order in which they stand there.
    pub(crate) fn take_media(&mut self) -> Vec<Media> {
        match self {
            Prompt::Conversation(conversation) => conversation.take_media(),
            Prompt::Pictured(pictured) => {
                let images = std::mem::take(&mut pictured.images);
                images.into_iter().map(Media::Picture).collect()
            }
            _ => Vec::new(),
        }
    }

    /// The prompt with the token `placeholder` in the place of each picture. A conversation gets its
    /// own from the chat template.
    pub(crate) fn with_places(self, placeholder: u32) -> Prompt {
        let Prompt::Pictured(Pictured { texts, .. }) = self else {
            return self;
        };
        let mut parts = Vec::with_capacity(2 * texts.len());
        for (i, text) in texts.into_iter().enumerate() {
            if i > 0 {
                parts.push(Prompt::Tokens(vec![placeholder]));
            }
            parts.push(Prompt::Text(text));
        }
        Prompt::Mixed(parts)
    }
}

/// Messages to answer.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Conversation {
    /// The messages, the oldest first.
    pub(crate) messages: Vec<Message>,
    /// Arguments of the model's chat template.
    pub(crate) arguments: Map<String, Value>,
    /// The tools that the model is told of, as chat templates read them.
    pub(crate) tools: Option<Arc<Value>>,
    /// Where the prompt ends: after the beginning of the model's turn, if absent.
    pub(crate) end: Option<PromptEnd>,
}

/// One message of a conversation.
#[derive(Debug, PartialEq)]
pub(crate) struct Message {
    /// The speaker of the message.
    pub(crate) role: Role,
    /// What is said; nothing where a message only calls tools.
    pub(crate) content: Vec<Part>,
    /// What else the chat template may read, under the names that templates have for it:
    /// `tool_calls`, `reasoning_content`, `name`.
    pub(crate) others: Map<String, Value>,
}

/// A part of a message.
#[derive(Debug, PartialEq)]
pub(crate) enum Part {
    /// Text; the texts of a message follow each other without anything between.
    Text(String),
    /// A picture, a video or a sound, where it stands among the texts.
    Media(Media),
}

impl Part {
    /// The text of the part; nothing of media.
    fn text(&self) -> &str {
        match self {
            Part::Text(text) => text,
            Part::Media(_) => "",
        }
    }

    /// The part as chat templates read it.
    fn for_template(self) -> Value {
        match self {
            Part::Text(text) => Value::String(text),
            Part::Media(media) => json!({"type": media.template_type()}),
        }
    }
}

/// The speaker of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
    Function,
}

impl Role {
    /// Every role.
    pub(crate) const ALL: [Role; 6] = [
        Role::System,
        Role::Developer,
        Role::User,
        Role::Assistant,
        Role::Tool,
        Role::Function,
    ];

    /// The role's name in requests and templates.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::Developer => "developer",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
            Role::Function => "function",
        }
    }

    /// The role called `name`.
    pub(crate) fn named(name: &str) -> Option<Role> {
        Role::ALL.into_iter().find(|role| role.name() == name)
    }
}

/// Whether an answer goes on from the last message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Continue {
    /// If that is the assistant's, and calls nothing.
    IfPossible,
    /// If that is the assistant's.
    IfLast,
    /// From what it says, or what it has reasoned where it says nothing.
    Always,
    /// From what it says.
    Content,
    /// From what it has reasoned.
    Reasoning,
    /// Never.
    Never,
}

impl Conversation {
    /// Has the answer go on from the last message where `asked` says so; `name` is the field that
    /// does, or the list of messages.
    ///
    /// # Errors
    ///
    /// 400 if the answer cannot go on from that message, or the one before is the assistant's too.
    pub(crate) fn go_on(
        &mut self,
        asked: Continue,
        name: &str,
        text: &Text,
    ) -> Result<(), ApiError> {
        let last = self.messages.last();
        let last = last.filter(|last| last.role == Role::Assistant);
        let calls = last.is_some_and(Message::has_calls);
        let is_left = match asked {
            Continue::Never => true,
            Continue::IfPossible => last.is_none() || calls,
            Continue::IfLast => last.is_none(),
            Continue::Always | Continue::Content | Continue::Reasoning => false,
        };
        if is_left {
            return Ok(());
        }
        let Some(last) = last else {
            let message = "needs a last message of the assistant";
            return Err(ApiError::field(name, message));
        };
        if calls {
            let message = "cannot go on from a message that calls tools; send their results";
            return Err(ApiError::field(name, message));
        }
        let before = self.messages.iter().rev().nth(1);
        if before.is_some_and(|before| before.role == Role::Assistant) {
            let path = format!("messages[{}]", self.messages.len() - 1);
            let message = "is the second message of the assistant at the end, and an answer goes on from one; join the two, or send `continue_final_message: false`";
            return Err(ApiError::field(path, message));
        }
        let end = match asked {
            Continue::Content => PromptEnd::Content,
            Continue::Reasoning => PromptEnd::Reasoning,
            _ => {
                let said: String = last.content.iter().map(Part::text).collect();
                let mut message = last.others.clone();
                message.insert("content".to_owned(), said.into());
                text.continuation(&Value::Object(message))
            }
        };
        self.end = Some(end);
        Ok(())
    }

    /// What the answer goes on with where it goes on from the last message.
    pub(crate) fn continues(&self) -> Option<Channel> {
        match self.end {
            Some(PromptEnd::Content) => Some(Channel::Answer),
            Some(PromptEnd::Reasoning) => Some(Channel::Reasoning),
            Some(PromptEnd::Turn | PromptEnd::Message) | None => None,
        }
    }

    /// Has the model look at the frames of videos that `options` ask for, where a video itself asks for
    /// nothing.
    pub(crate) fn ask_of_videos(&mut self, options: ClipOptions) {
        for part in self.messages.iter_mut().flat_map(|m| &mut m.content) {
            if let Part::Media(Media::Video(video)) = part {
                video.with_defaults(options);
            }
        }
    }

    /// Takes the data of media out of the messages, in the order in which they stand there.
    fn take_media(&mut self) -> Vec<Media> {
        let parts = self.messages.iter_mut().flat_map(|m| &mut m.content);
        let taken = parts.filter_map(|part| match part {
            Part::Text(_) => None,
            Part::Media(media) => Some(media.take()),
        });
        taken.collect()
    }

    /// The messages in the form that the text crate takes, and the template's arguments.
    pub(crate) fn for_template(self) -> (Value, Map<String, Value>) {
        let messages = self.messages.into_iter().map(Message::for_template);
        (messages.collect(), self.arguments)
    }
}

impl Message {
    /// Whether the message calls tools.
    fn has_calls(&self) -> bool {
        let calls = self.others.get("tool_calls").and_then(Value::as_array);
        calls.is_some_and(|calls| !calls.is_empty())
    }

    fn for_template(self) -> Value {
        let mut parts = self.content.into_iter();
        let content = match (parts.next(), parts.len()) {
            (None, _) => Value::Null,
            (Some(Part::Text(only)), 0) => Value::String(only),
            (Some(first), _) => {
                let all = std::iter::once(first).chain(parts);
                all.map(Part::for_template).collect()
            }
        };
        let mut message = Map::new();
        message.insert("role".into(), json!(self.role.name()));
        message.insert("content".into(), content);
        message.extend(self.others);
        Value::Object(message)
    }
}

/// The messages of a request's field `messages`.
///
/// # Errors
///
/// 400 for a field that is missing, no list, empty or too long.
pub(crate) fn message_list(messages: Option<Value>) -> Result<Vec<Value>, ApiError> {
    const NAME: &str = "messages";
    let list = match messages {
        None | Some(Value::Null) => return Err(ApiError::field(NAME, "is missing")),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(ApiError::field(NAME, "must be a list")),
    };
    if list.is_empty() {
        return Err(ApiError::field(NAME, "is empty"));
    }
    if list.len() > MESSAGES_MAX {
        let message = format!("has {} messages, {MESSAGES_MAX} at most", list.len());
        return Err(ApiError::field(NAME, message));
    }
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sources::Data;

    #[test]
    fn a_conversation_takes_the_form_of_templates() {
        let message = |role, texts: &[&str], others: Value| Message {
            role,
            content: texts.iter().map(|t| Part::Text((*t).into())).collect(),
            others: others.as_object().cloned().unwrap_or_default(),
        };
        let picture = |data: &str| {
            Part::Media(Media::Picture(Image {
                path: String::new(),
                data: Data::Base64(data.into()),
                rows: None,
            }))
        };
        let mut conversation = Conversation {
            messages: vec![
                message(Role::User, &["a"], json!({"name": "x"})),
                message(Role::Assistant, &[], json!({"tool_calls": [{}]})),
                message(Role::Tool, &["b", "c"], json!({})),
                Message {
                    content: vec![Part::Text("d".into()), picture("x"), picture("y")],
                    ..message(Role::User, &[], json!({}))
                },
                Message {
                    content: vec![picture("z")],
                    ..message(Role::User, &[], json!({}))
                },
            ],
            arguments: Map::from_iter([("think".into(), json!(true))]),
            tools: None,
            end: None,
        };
        let data = |media| match media {
            Media::Picture(image) => image.data,
            other => panic!("{other:?}"),
        };
        let taken = conversation.take_media().into_iter();
        let all = ["x", "y", "z"].map(|data| Data::Base64(data.into()));
        assert_eq!(taken.map(data).collect::<Vec<_>>(), all);
        let (messages, arguments) = conversation.for_template();
        let image = json!({"type": "image"});
        assert_eq!(
            messages,
            json!([
                {"role": "user", "content": "a", "name": "x"},
                {"role": "assistant", "content": null, "tool_calls": [{}]},
                {"role": "tool", "content": ["b", "c"]},
                {"role": "user", "content": ["d", image, image]},
                {"role": "user", "content": [image]},
            ])
        );
        assert_eq!(arguments["think"], true);
        for role in Role::ALL {
            assert_eq!(Role::named(role.name()), Some(role));
        }
        assert_eq!(Role::named("robot"), None);
    }
}
