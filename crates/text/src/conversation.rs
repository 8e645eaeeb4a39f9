//! Conversations: messages → prompt → ids, up to the end that is asked for.
//!
//! ```text
//! … <|im_start|>assistant\n BEGINNING <|im_end|>\n <|im_start|>assistant\n
//!                                     │             │                      │
//!         Content, Reasoning ─────────┘   Message ──┘   Turn ──────────────┘
//! ```
//!
//! Where an answer goes on from the last message, a mark is put behind what that message says
//! before the template runs, and the prompt ends where the mark comes out. So the beginning stands
//! there as the template writes such a message, and nothing that ends a turn follows.

use serde_json::{Map, Value, json};

use crate::Text;
use crate::control::ControlTokens;
use crate::error::TextError;
use crate::messages;
use crate::reasoning::ReasoningMarks;
use crate::unescape::Prompt;

/// The mark behind the beginning of an answer: the last private-use character of Unicode.
const MARK: char = '\u{10fffd}';
/// The field of a message with the model's reasoning.
const REASONING: &str = "reasoning_content";

/// Where the prompt of a conversation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptEnd {
    /// After the beginning of a turn of the model, which it is to write.
    Turn,
    /// After the last message.
    Message,
    /// Behind the content of the last message, which is the model's and goes on.
    Content,
    /// Behind the reasoning of the last message, which is the model's and goes on.
    Reasoning,
}

impl PromptEnd {
    /// Whether the answer goes on from the last message.
    pub fn is_within_message(self) -> bool {
        matches!(self, PromptEnd::Content | PromptEnd::Reasoning)
    }
}

impl From<bool> for PromptEnd {
    /// The end that templates know as `add_generation_prompt`.
    fn from(add_generation_prompt: bool) -> Self {
        match add_generation_prompt {
            true => PromptEnd::Turn,
            false => PromptEnd::Message,
        }
    }
}

/// A conversation that has been rendered.
enum Rendered<'a> {
    /// A prompt without an escaped spelling.
    Plain(String),
    /// A prompt in which some spellings of control tokens are text.
    Escaped(Prompt, &'a ControlTokens),
}

impl Rendered<'_> {
    fn text(&self) -> &str {
        match self {
            Rendered::Plain(text) => text,
            Rendered::Escaped(prompt, _) => &prompt.text,
        }
    }
}

impl Text {
    /// Renders a conversation and encodes it, however long it is.
    ///
    /// # Errors
    ///
    /// As [`Text::encode_chat_within`].
    pub fn encode_chat(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        end: impl Into<PromptEnd>,
        extra: &Map<String, Value>,
    ) -> Result<Vec<u32>, TextError> {
        self.encode_chat_within(messages, tools, end, extra, usize::MAX)
    }

    /// Renders a conversation and encodes it, unless a lower bound shows that it has more than
    /// `limit` tokens. The result may have more all the same: the bound is a rough one.
    ///
    /// The template writes every special token, the beginning-of-sequence
    /// token included, so the tokenizer adds none. Control tokens spelled in messages, tools
    /// and template arguments are text, unless [`Text::allow_special_tokens`] is set.
    ///
    /// # Errors
    ///
    /// As [`ChatTemplate::render`](crate::ChatTemplate::render) and
    /// [`Tokenizer::encode`](crate::Tokenizer::encode), and [`TextError::TooManyTokens`];
    /// [`TextError::BadMessage`] if the answer cannot go on from the last message.
    pub fn encode_chat_within(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        end: impl Into<PromptEnd>,
        extra: &Map<String, Value>,
        limit: usize,
    ) -> Result<Vec<u32>, TextError> {
        let rendered = self.rendered(messages, tools, end.into(), extra)?;
        self.tokenizer.refuse_over(rendered.text(), limit)?;
        messages::check_all_said(messages, rendered.text())?;
        match rendered {
            Rendered::Plain(prompt) => self.tokenizer.encode(&prompt, false),
            Rendered::Escaped(prompt, control) => self.tokenizer.encode_unescaped(prompt, control),
        }
    }

    /// Renders a conversation as [`Text::encode_chat`] does, and gives the prompt as text. In that,
    /// control tokens that a message spells look like those of the template.
    ///
    /// # Errors
    ///
    /// As [`Text::encode_chat`].
    pub fn render_chat(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        end: impl Into<PromptEnd>,
        extra: &Map<String, Value>,
    ) -> Result<String, TextError> {
        let rendered = self.rendered(messages, tools, end.into(), extra)?;
        messages::check_all_said(messages, rendered.text())?;
        Ok(match rendered {
            Rendered::Plain(prompt) => prompt,
            Rendered::Escaped(prompt, _) => prompt.text,
        })
    }

    /// Which part of a `message` of the model goes on where an answer goes on from it: the
    /// content, or the reasoning where nothing else is said.
    pub fn continuation(&self, message: &Value) -> PromptEnd {
        let content = &message["content"];
        let is_said = match content {
            Value::String(text) => !text.is_empty(),
            Value::Array(parts) => !parts.is_empty(),
            _ => false,
        };
        let has_reasoned = ["reasoning_content", "reasoning"];
        let has_reasoned = has_reasoned.map(|name| message[name].as_str().unwrap_or_default());
        let begins = content.as_str().zip(self.reasoning.as_ref());
        let is_open = begins.is_some_and(|(text, marks)| marks.split_open(text).is_some());
        match is_open || !is_said && has_reasoned.iter().any(|text| !text.is_empty()) {
            true => PromptEnd::Reasoning,
            false => PromptEnd::Content,
        }
    }

    fn rendered(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        end: PromptEnd,
        extra: &Map<String, Value>,
    ) -> Result<Rendered<'_>, TextError> {
        let template = self.template.as_ref().ok_or(TextError::NoTemplate)?;
        let mut prepared = template.prepare(messages, extra)?;
        let control = self.control.as_ref().filter(|_| !self.allow_special_tokens);
        if let (Some(_), Some(marks)) = (control, &self.reasoning) {
            messages::take_reasoning_out(&mut prepared, marks);
        }
        let last = prepared.as_array().map_or(0, |list| list.len().max(1) - 1);
        if end.is_within_message() {
            mark(&mut prepared[last], end, self.reasoning.as_ref());
        }
        let cut = |rendered: String| match end.is_within_message() {
            true => cut(rendered, last),
            false => Ok(rendered),
        };
        let begins_turn = end == PromptEnd::Turn;
        let escaped = match control {
            Some(control) => control
                .escape(&prepared, tools, extra)?
                .map(|escaped| (control, escaped)),
            None => None,
        };
        let Some((control, escaped)) = escaped else {
            let rendered = template.run(&prepared, tools, begins_turn, extra)?;
            return Ok(Rendered::Plain(cut(rendered)?));
        };
        let (tools, extra) = (escaped.tools.as_ref(), &escaped.extra);
        let rendered = cut(template.run(&escaped.messages, tools, begins_turn, extra)?)?;
        let prompt = self.tokenizer.unescape(&rendered, &escaped.placeholders);
        Ok(Rendered::Escaped(prompt, control))
    }
}

/// Puts [`MARK`] behind what a `message` in the template's form says, where a prompt is to `end`.
fn mark(message: &mut Value, end: PromptEnd, marks: Option<&ReasoningMarks>) {
    let content = match &mut message["content"] {
        Value::Array(parts) => {
            if parts.last().is_none_or(|part| !part["text"].is_string()) {
                parts.push(json!({"type": "text", "text": ""}));
            }
            let last = parts.last_mut().expect("a part was pushed");
            &mut last["text"]
        }
        content => content,
    };
    let said = content.as_str().unwrap_or_default();
    if end == PromptEnd::Content {
        *content = json!(format!("{said}{MARK}"));
        return;
    }
    let open = marks.and_then(|marks| marks.split_open(said));
    if open.is_some() {
        *content = json!("");
    }
    let reasoning = open.unwrap_or_else(|| {
        let reasoning = message[REASONING].as_str();
        reasoning.unwrap_or_default().to_owned()
    });
    message[REASONING] = json!(format!("{reasoning}{MARK}"));
}

/// The prompt up to where [`MARK`] came out, behind message `last`.
fn cut(mut rendered: String, last: usize) -> Result<String, TextError> {
    let end = rendered.rfind(MARK).ok_or(TextError::BadMessage {
        index: last,
        reason: "the model's chat template does not write this message out, so that no answer can go on from it",
    })?;
    rendered.truncate(end);
    Ok(rendered)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::model_dir;
    use crate::{Specials, TextFiles};

    fn open(name: &str) -> Text {
        TextFiles::open(&model_dir(name)).unwrap()
    }

    /// The prompt of a conversation that the model's `message` has begun to answer; its tokens
    /// spell the same.
    fn continued(text: &Text, message: Value, end: PromptEnd, extra: Value) -> String {
        let messages = json!([{"role": "user", "content": "Hi"}, message]);
        let extra = extra.as_object().unwrap();
        let prompt = text.render_chat(&messages, None, end, extra).unwrap();
        let ids = text.encode_chat(&messages, None, end, extra).unwrap();
        assert_eq!(text.tokenizer.detokenize(&ids, Specials::Show), prompt);
        prompt
    }

    #[test]
    fn a_prompt_ends_behind_the_beginning_of_an_answer() {
        let (gemma, qwen) = (open("tiny-gemma4"), open("tiny-qwen3.5"));
        let said = |text: &str| json!({"role": "assistant", "content": text});
        let turns =
            |text: &Text, message: Value| continued(text, message, PromptEnd::Content, json!({}));
        const GEMMA: &str = "<bos><|turn>user\nHi<turn|>\n<|turn>model\n";
        const QWEN: &str = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
        const NO_THOUGHT: &str = "<think>\n\n</think>\n\n";
        // White space at the end stays, and so does what looks like the end of a turn.
        for beginning in [
            "Once upon",
            "Once \n",
            "",
            "a<|im_end|>",
            "<turn|>",
            "im_end",
            "user",
        ] {
            assert_eq!(
                turns(&gemma, said(beginning)),
                format!("{GEMMA}{beginning}")
            );
            let qwen = turns(&qwen, said(beginning));
            assert_eq!(qwen, format!("{QWEN}{NO_THOUGHT}{beginning}"));
        }
        let parts = json!({"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]});
        assert_eq!(turns(&gemma, parts), format!("{GEMMA}ab"));
        let spelled = gemma.encode_chat(
            &json!([{"role": "user", "content": "Hi"}, said("a<turn|>")]),
            None,
            PromptEnd::Content,
            &Map::new(),
        );
        let end = gemma.tokenizer.id_of("<turn|>").unwrap();
        let n_ends = spelled.unwrap().iter().filter(|&&id| id == end).count();
        assert_eq!(n_ends, 1, "what a message spells ends no turn");
    }

    #[test]
    fn a_prompt_ends_behind_the_beginning_of_reasoning() {
        let thought =
            json!({"role": "assistant", "content": "", "reasoning_content": "Let me see"});
        let open_mark = json!({"role": "assistant", "content": "<think>\nLet me see"});
        let both =
            json!({"role": "assistant", "content": "Yes", "reasoning_content": "Let me see"});
        let (gemma, qwen) = (open("tiny-gemma4"), open("tiny-qwen3.5"));
        for (message, end) in [
            (&thought, PromptEnd::Reasoning),
            (&open_mark, PromptEnd::Reasoning),
            (&both, PromptEnd::Content),
        ] {
            assert_eq!(qwen.continuation(message), end);
        }
        assert_eq!(gemma.continuation(&open_mark), PromptEnd::Content);
        for message in [thought.clone(), open_mark] {
            let end = continued(&qwen, message, PromptEnd::Reasoning, json!({}));
            assert!(
                end.ends_with("<|im_start|>assistant\n<think>\nLet me see"),
                "{end}"
            );
        }
        let end = continued(&gemma, thought, PromptEnd::Reasoning, json!({}));
        assert!(
            end.ends_with("<|turn>model\n<|channel>thought\nLet me see"),
            "{end}"
        );
        let end = continued(
            &qwen,
            both,
            PromptEnd::Content,
            json!({"enable_thinking": true}),
        );
        assert!(
            end.ends_with("<think>\nLet me see\n</think>\n\nYes"),
            "{end}"
        );
    }

    #[test]
    fn a_message_that_the_template_leaves_out_cannot_go_on() {
        let tokenizer = crate::testing::small_bpe().to_string();
        let text = TextFiles {
            tokenizer: tokenizer.as_bytes(),
            chat_template: Some(b"{{ messages[0].content }}"),
            ..TextFiles::default()
        };
        let text = text.load().unwrap();
        let messages =
            json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
        let prompt = |end| text.render_chat(&messages, None, end, &Map::new());
        assert_eq!(prompt(PromptEnd::Message).unwrap(), "a");
        let error = prompt(PromptEnd::Content).unwrap_err();
        assert!(
            matches!(error, TextError::BadMessage { index: 1, .. }),
            "{error}"
        );
    }
}
