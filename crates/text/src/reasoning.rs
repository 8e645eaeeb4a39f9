//! Reasoning: tells what a model writes before its answer from the answer.
//!
//! ```text
//! Qwen 3.5   <think>\n REASONING \n</think>\n\n ANSWER
//! Gemma 4    <|channel>thought\n REASONING \n<channel|> ANSWER
//! ```
//!
//! The marks are tokens of the vocabulary, so ids decide and not characters: a
//! model that spells `</think>` letter by letter writes about it. A template may
//! have written the first mark already. The white space around a mark belongs to
//! neither part: templates write it themselves when a turn comes back in a
//! conversation, and a turn that is taken apart and put together again is the
//! same prompt.

use crate::channel::Channel;
use crate::detokenizer::Specials;
use crate::tokenizer::Tokenizer;

/// The marks of reasoning in one family of models.
#[derive(Debug)]
struct Spelling {
    open: &'static str,
    close: &'static str,
    /// The line that reasoning begins with; `None` if it needs none.
    name: Option<&'static str>,
    /// What a template writes between reasoning and answer.
    separator: &'static str,
}

/// The marks of every known family.
const SPELLINGS: &[Spelling] = &[
    // Qwen 3.5 and 3.6
    Spelling {
        open: "<think>",
        close: "</think>",
        name: None,
        separator: "\n\n",
    },
    // Gemma 4
    Spelling {
        open: "<|channel>",
        close: "<channel|>",
        name: Some("thought\n"),
        separator: "",
    },
];

/// Tokens at the end of a prompt that may hold the mark which opens the reply: the mark, a name
/// and line breaks.
const PROMPT_TAIL: usize = 16;

/// What a reply begins with, as far as its prompt says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyStart {
    /// Reasoning: the prompt ends with the mark that opens it.
    Reasoning,
    /// The answer: the prompt ends with the mark that closes reasoning.
    Answer,
    /// Either.
    Free,
}

/// The tokens that mark a model's reasoning.
#[derive(Clone, Copy, Debug)]
pub struct ReasoningMarks {
    spelling: &'static Spelling,
    open: u32,
    close: u32,
}

impl ReasoningMarks {
    /// Finds the marks of reasoning in a vocabulary; `None` if it has none.
    pub fn new(tokenizer: &Tokenizer) -> Option<Self> {
        SPELLINGS.iter().find_map(|spelling| {
            Some(ReasoningMarks {
                spelling,
                open: tokenizer.id_of(spelling.open)?,
                close: tokenizer.id_of(spelling.close)?,
            })
        })
    }

    /// The token that begins reasoning, and the one that ends it.
    pub fn ids(&self) -> [u32; 2] {
        [self.open, self.close]
    }

    /// The tokens that the model's template writes between reasoning and answer.
    pub fn separator(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let separator = tokenizer.encode(self.spelling.separator, false);
        separator.unwrap_or_default()
    }

    /// What a reply to `prompt` begins with.
    pub fn start(&self, tokenizer: &Tokenizer, prompt: &[u32]) -> ReplyStart {
        if self.opened(tokenizer, prompt).is_some() {
            return ReplyStart::Reasoning;
        }
        let tail = &prompt[prompt.len().saturating_sub(PROMPT_TAIL)..];
        let closed = tail
            .iter()
            .rposition(|&id| id == self.close)
            .is_some_and(|at| {
                let after = tokenizer.detokenize(&tail[at + 1..], Specials::Show);
                after.trim().is_empty()
            });
        match closed {
            true => ReplyStart::Answer,
            false => ReplyStart::Free,
        }
    }

    /// The spelling of `token` if it is a mark.
    pub fn spelling(&self, token: u32) -> Option<&'static str> {
        match token {
            _ if token == self.open => Some(self.spelling.open),
            _ if token == self.close => Some(self.spelling.close),
            _ => None,
        }
    }

    /// The beginning of the reply that `prompt` already holds: the mark that opens reasoning,
    /// and what follows it. `None` if the reply does not begin with reasoning.
    pub fn begun(&self, tokenizer: &Tokenizer, prompt: &[u32]) -> Option<String> {
        let after = self.opened(tokenizer, prompt)?;
        Some(self.spelling.open.to_owned() + &after)
    }

    /// Splits a reply that begins with reasoning into reasoning and answer. Clients that got
    /// both in one text send such replies back.
    pub(crate) fn split(&self, reply: &str) -> Option<(String, String)> {
        let Spelling {
            open, close, name, ..
        } = *self.spelling;
        let (reasoning, answer) = reply.trim_start().strip_prefix(open)?.split_once(close)?;
        let reasoning = name.map_or(reasoning, |name| {
            reasoning.strip_prefix(name).unwrap_or(reasoning)
        });
        let answer = answer.trim_start_matches('\n');
        Some((reasoning.trim().to_owned(), answer.to_owned()))
    }

    /// The reasoning that a reply begins with and does not end; `None` if it does end, or begins
    /// with something else.
    pub(crate) fn split_open(&self, reply: &str) -> Option<String> {
        let Spelling {
            open, close, name, ..
        } = *self.spelling;
        let reasoning = reply.trim_start().strip_prefix(open)?;
        if reasoning.contains(close) {
            return None;
        }
        let reasoning = name.map_or(reasoning, |name| {
            reasoning.strip_prefix(name).unwrap_or(reasoning)
        });
        Some(reasoning.trim_start().to_owned())
    }

    /// The part of the reasoning's name that follows the mark at the end of `prompt`; `None` if
    /// the reply does not begin with reasoning.
    fn opened(&self, tokenizer: &Tokenizer, prompt: &[u32]) -> Option<String> {
        let tail = &prompt[prompt.len().saturating_sub(PROMPT_TAIL)..];
        let is_mark = |id: &u32| [self.open, self.close].contains(id);
        let at = tail.iter().rposition(is_mark)?;
        let after = tokenizer.detokenize(&tail[at + 1..], Specials::Show);
        let name = self.spelling.name.unwrap_or_default();
        // Anything else is what a message says about marks.
        let is_start = after.trim().is_empty() || name.starts_with(&after);
        (tail[at] == self.open && is_start).then_some(after)
    }
}

/// Tells the reasoning of one reply from its answer.
///
/// Each part is whole and in order; where a reply reasons several times, the
/// reasoning is joined by line breaks.
#[derive(Clone, Debug)]
pub struct Reasoning {
    marks: ReasoningMarks,
    is_open: bool,
    /// The beginning of the reasoning, held back while it may be the name.
    head: Option<String>,
    /// White space that is held back: a mark drops it, text writes it.
    blank: String,
    /// Whether nothing of this part was written yet, so that white space is dropped.
    is_start: bool,
    /// Whether the reply has reasoned before.
    has_reasoned: bool,
}

impl Reasoning {
    /// Starts a reply to `prompt`, which may have opened the reasoning already.
    pub fn new(marks: ReasoningMarks, tokenizer: &Tokenizer, prompt: &[u32]) -> Self {
        let opened = marks.opened(tokenizer, prompt);
        Reasoning {
            marks,
            is_open: opened.is_some(),
            is_start: opened.is_some(),
            head: opened.filter(|_| marks.spelling.name.is_some()),
            blank: String::new(),
            has_reasoned: false,
        }
    }

    /// Goes on with a reply whose beginning the prompt holds, in the middle of its reasoning or of
    /// its answer: nothing is taken for the white space around a mark.
    pub fn within(marks: ReasoningMarks, is_open: bool) -> Self {
        Reasoning {
            marks,
            is_open,
            is_start: false,
            head: None,
            blank: String::new(),
            has_reasoned: false,
        }
    }

    /// Whether the text that comes next is reasoning.
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// Whether `text`, which comes next, is white space that belongs to the mark before it and
    /// so not to the answer.
    pub fn skips(&self, text: &str) -> bool {
        let is_blank = !text.is_empty() && text.trim_start_matches('\n').is_empty();
        !self.is_open && self.is_start && is_blank
    }

    /// The spelling of `token` if it is a mark here. A mark is not text:
    /// [`turn`](Self::turn) takes it.
    pub fn mark(&self, token: u32) -> Option<&'static str> {
        let ReasoningMarks {
            spelling,
            open,
            close,
        } = self.marks;
        if token == open {
            Some(spelling.open)
        } else {
            (token == close && self.is_open).then_some(spelling.close)
        }
    }

    /// Takes a mark: reasoning begins or ends.
    pub fn turn(&mut self, token: u32) {
        let opens = token == self.marks.open;
        if opens == self.is_open {
            return;
        }
        self.is_open = opens;
        self.is_start = true;
        let has_name = self.marks.spelling.name.is_some();
        self.head = (opens && has_name).then(String::new);
        self.blank.clear();
        if opens && self.has_reasoned {
            self.blank.push('\n');
        }
    }

    /// Takes text that no mark interrupts, and passes on what is clear by now, in order.
    pub fn push(&mut self, text: &str, emit: &mut impl FnMut(Channel, &str)) {
        if self.is_open {
            self.reason(text, emit);
        } else if self.is_start {
            // Spaces may be the indentation of code.
            let text = text.trim_start_matches('\n');
            self.is_start = text.is_empty();
            emit(Channel::Answer, text);
        } else {
            emit(Channel::Answer, text);
        }
    }

    fn reason(&mut self, text: &str, emit: &mut impl FnMut(Channel, &str)) {
        let named = self.head.take().map(|head| head + text);
        let mut text = named.as_deref().unwrap_or(text);
        if let (Some(whole), Some(name)) = (&named, self.marks.spelling.name) {
            if whole.len() < name.len() && name.starts_with(whole) {
                self.head = named;
                return;
            }
            text = whole.strip_prefix(name).unwrap_or(whole);
        }
        if self.is_start {
            text = text.trim_start();
        }
        let written = text.trim_end();
        if !written.is_empty() {
            self.is_start = false;
            self.has_reasoned = true;
            emit(Channel::Reasoning, &std::mem::take(&mut self.blank));
            emit(Channel::Reasoning, written);
        }
        self.blank.push_str(&text[written.len()..]);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{GEMMA, QWEN};

    /// Text by channel.
    #[derive(Default)]
    struct Said {
        reasoning: String,
        answer: String,
    }

    impl Said {
        fn take(&mut self) -> impl FnMut(Channel, &str) {
            |channel, text| match channel {
                Channel::Reasoning => self.reasoning.push_str(text),
                _ => self.answer.push_str(text),
            }
        }
    }

    /// What `reply` says after `prompt`; every character comes alone.
    fn split(tokenizer: &Tokenizer, prompt: &str, reply: &str) -> (String, String, bool) {
        let marks = ReasoningMarks::new(tokenizer).unwrap();
        let prompt = tokenizer.encode(prompt, false).unwrap();
        let mut reasoning = Reasoning::new(marks, tokenizer, &prompt);
        let mut said = Said::default();
        for id in tokenizer.encode(reply, false).unwrap() {
            match reasoning.mark(id) {
                Some(_) => reasoning.turn(id),
                None => tokenizer
                    .detokenize(&[id], Specials::Show)
                    .chars()
                    .for_each(|c| reasoning.push(&c.to_string(), &mut said.take())),
            }
        }
        (said.reasoning, said.answer, reasoning.is_open())
    }

    #[test]
    fn both_families_reason_before_they_answer() {
        let qwen = "<|im_start|>assistant\n<think>\n";
        let closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n";
        let asked = "<|im_start|>user\nWhat is <think><|im_end|>\n<|im_start|>assistant\n";
        for (prompt, reply, reasoning, answer) in [
            (
                qwen,
                "I add.\n\nTwice.\n</think>\n\n  b = 3\n",
                "I add.\n\nTwice.",
                "  b = 3\n",
            ),
            (qwen, "\n</think>\n\nSo", "", "So"),
            (qwen, "I ad", "I ad", ""),
            // A model may repeat what the template has written.
            (qwen, "<think>\nI add.\n</think>\n\nSo", "I add.", "So"),
            (closed, "\nSo", "", "\nSo"),
            (asked, "\nA mark", "", "\nA mark"),
            (asked, "<think>\nI add.\n</think>\n\nSo", "I add.", "So"),
        ] {
            let (r, a, is_open) = split(&QWEN, prompt, reply);
            assert_eq!((r.as_str(), a.as_str()), (reasoning, answer), "{reply:?}");
            assert_eq!(is_open, reply == "I ad");
        }
        // Prompt, reply, reasoning and answer; a line break is spelled `/`.
        for case in [
            "<|turn>model/ _ <|channel>thought/I add./<channel|>So _ I add. _ So",
            // What larger models write when they are asked not to reason.
            "<|turn>model/ _ <|channel>thought/<channel|>So _  _ So",
            "<|turn>model/ _ <|channel>thou<channel|>So _  _ So",
            "<|turn>model/ _ <|channel>thoughts/<channel|>So _ thoughts _ So",
            "<|turn>model/ _ So<|channel>thought/a/<channel|>b<|channel>thought/c<channel|>d _ a/c _ Sobd",
            "<|turn>model/ _ thought/So _  _ thought/So",
            "<|turn>model/<|channel>thought/ _ I add./<channel|>So _ I add. _ So",
            "<|channel> _ thought/I add./<channel|>So _ I add. _ So",
            "<|turn>user/<|channel>thought/<turn|>/<|turn>model/ _ So _  _ So",
        ] {
            let case = case.replace('/', "\n");
            let [prompt, reply, reasoning, answer] = case.split(" _ ").collect::<Vec<_>>()[..]
            else {
                panic!("four parts: {case}");
            };
            let (r, a, _) = split(&GEMMA, prompt, reply);
            assert_eq!((r.as_str(), a.as_str()), (reasoning, answer), "{reply:?}");
        }
    }

    #[test]
    fn a_prompt_says_what_its_reply_begins_with() {
        for (tokenizer, prompt, start, separator) in [
            (
                &*QWEN,
                "<|im_start|>assistant\n<think>\n",
                ReplyStart::Reasoning,
                "\n\n",
            ),
            (
                &*QWEN,
                "<think>\n\n</think>\n\n",
                ReplyStart::Answer,
                "\n\n",
            ),
            (&*QWEN, "</think>So", ReplyStart::Free, "\n\n"),
            (&*QWEN, "<|im_start|>assistant\n", ReplyStart::Free, "\n\n"),
            (&*GEMMA, "<|turn>model\n", ReplyStart::Free, ""),
            (
                &*GEMMA,
                "<|channel>thought\n<channel|>",
                ReplyStart::Answer,
                "",
            ),
            (&*GEMMA, "<|channel>thought\n", ReplyStart::Reasoning, ""),
        ] {
            let marks = ReasoningMarks::new(tokenizer).unwrap();
            let tokens = tokenizer.encode(prompt, false).unwrap();
            assert_eq!(marks.start(tokenizer, &tokens), start, "{prompt:?}");
            let tokens = marks.separator(tokenizer);
            assert_eq!(tokenizer.detokenize(&tokens, Specials::Show), separator);
        }
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(
            thoughts in proptest::collection::vec("[a\n ]{0,6}", 0..8),
            answers in proptest::collection::vec("[b\n ]{0,6}", 0..8),
            name in 0..9_usize,
        ) {
            let marks = ReasoningMarks::new(&GEMMA).unwrap();
            let mut reasoning = Reasoning::new(marks, &GEMMA, &[]);
            let mut said = Said::default();
            reasoning.push("So", &mut said.take());
            reasoning.turn(marks.open);
            let (first, second) = "thought\n".split_at(name.min(8));
            [first, second].iter().for_each(|piece| reasoning.push(piece, &mut said.take()));
            thoughts.iter().for_each(|piece| reasoning.push(piece, &mut said.take()));
            reasoning.turn(marks.close);
            answers.iter().for_each(|piece| reasoning.push(piece, &mut said.take()));
            let whole = thoughts.concat();
            prop_assert_eq!(said.reasoning, whole.trim());
            prop_assert_eq!(said.answer, "So".to_owned() + answers.concat().trim_start_matches('\n'));
        }
    }
}
