//! Finds out what a chat template reads, by rendering small conversations.
//!
//! A template does not say whether it takes strings or lists of parts, nor whether
//! it writes a system message that stands in the middle. What it makes of messages
//! with known words shows both. Each role is tried: many templates walk
//! through the parts of a user message and print a system message as it is.

use serde_json::{Value, json};

use crate::error::TextError;
use crate::messages::{ContentForm, Reads, SystemPlace};

/// The text of the messages; no template writes it by itself.
const WORD: &str = "paceline-probe";
/// A value beside the text of a part: a template that writes it prints lists as they are.
const BESIDE: &str = "paceline-beside";

/// Renders small conversations until one exhausts the template's budget.
struct Probe<R> {
    /// Renders messages to a prompt.
    render: R,
    /// Whether a rendering has exhausted the budget.
    is_exhausted: bool,
}

impl<R: FnMut(&Value) -> Result<String, TextError>> Probe<R> {
    /// The prompt of `messages`; `None` if the template fails or refuses them.
    fn render(&mut self, messages: &Value) -> Option<String> {
        if self.is_exhausted {
            return None;
        }
        match (self.render)(messages) {
            Ok(text) => Some(text),
            Err(err) => {
                self.is_exhausted =
                    !matches!(err, TextError::Template { .. } | TextError::Refused { .. });
                None
            }
        }
    }

    /// The form that the template reads in one message. `messages` makes a conversation that
    /// ends with the message of this content; `None` if the template writes it in no form.
    fn form(&mut self, messages: impl Fn(Value) -> Value) -> Option<ContentForm> {
        let part = json!([{"type": "text", "text": WORD, "beside": BESIDE}]);
        let mut show = |content: Value| {
            let text = self.render(&messages(content))?;
            (text.contains(WORD) && !text.contains(BESIDE)).then_some(text)
        };
        match (show(json!(WORD)), show(part)) {
            (Some(text), Some(parts)) if text == parts => Some(ContentForm::Either),
            (Some(_), _) => Some(ContentForm::Text),
            (None, Some(_)) => Some(ContentForm::Parts),
            (None, None) => None,
        }
    }

    /// Whether the template writes each message of a conversation of these `roles` where it
    /// stands, and once.
    fn says_in_order(&mut self, reads: &Reads, roles: &[&str]) -> bool {
        let word = |i: usize| format!("{WORD}-{i}-");
        let messages: Value = roles
            .iter()
            .enumerate()
            .map(|(i, role)| json!({"role": role, "content": spelled(word(i), reads.form(role))}))
            .collect();
        let Some(text) = self.render(&messages) else {
            return false;
        };
        let places: Option<Vec<usize>> = (0..roles.len())
            .map(|i| {
                text.find(&word(i))
                    .filter(|_| text.matches(&word(i)).count() == 1)
            })
            .collect();
        places.is_some_and(|places| places.is_sorted())
    }
}

/// Content with this `text` in the given form.
fn spelled(text: String, form: ContentForm) -> Value {
    match form {
        ContentForm::Parts => json!([{"type": "text", "text": text}]),
        ContentForm::Text | ContentForm::Either => json!(text),
    }
}

/// Finds out what a template reads; `render` renders messages with it.
pub(crate) fn probe(render: impl FnMut(&Value) -> Result<String, TextError>) -> Reads {
    let mut probe = Probe {
        render,
        is_exhausted: false,
    };
    let user = probe.form(|content| json!([{"role": "user", "content": content}]));
    let user = user.unwrap_or(ContentForm::Text);
    let said = || spelled("Hi".to_owned(), user);
    let system = probe.form(
        |content| json!([{"role": "system", "content": content}, {"role": "user", "content": said()}]),
    );
    let assistant = probe.form(
        |content| json!([{"role": "user", "content": said()}, {"role": "assistant", "content": content}]),
    );
    let assistant = assistant.unwrap_or(user);
    let call = json!([{"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {}}}]);
    let tool = probe.form(|content| {
        json!([
            {"role": "user", "content": said()},
            {"role": "assistant", "content": spelled(String::new(), assistant), "tool_calls": call},
            {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": content},
        ])
    });
    let mut reads = Reads {
        system: system.unwrap_or(user),
        user,
        assistant,
        tool: tool.unwrap_or(user),
        place: SystemPlace::First,
    };
    let middles: [&[&str]; 3] = [
        &["user", "system"],
        &["system", "user", "system", "assistant", "user"],
        &["user", "assistant", "system", "user"],
    ];
    if middles
        .iter()
        .all(|roles| probe.says_in_order(&reads, roles))
    {
        reads.place = SystemPlace::Anywhere;
    } else if system.is_none() && !probe.is_exhausted && probe.says_in_order(&reads, &["user"]) {
        reads.place = SystemPlace::Nowhere;
    }
    reads
}
