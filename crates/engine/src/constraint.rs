//! What a request lets its reply be: reasoning within a budget, then an answer that follows a
//! grammar.
//!
//! ```text
//! prompt … <think>\n │ reasoning … </think> │ \n\n │ answer
//!                    │ all but the end      │ one  │ what the grammar allows
//! ```
//!
//! The grammar sees the answer alone. A mark decides which part a token belongs to, so a
//! draft may cross from one part to the next, and each of its rows has the mask of its own part.

use constrain::Matcher;
use speculate::{Constraint, ConstraintError};
use text::{ReasoningMarks, ReplyStart, Tokenizer};

/// How the reply to a prompt reasons.
#[derive(Clone, Debug)]
pub(crate) struct ReasoningRules {
    /// The token that begins reasoning, and the one that ends it.
    marks: [u32; 2],
    /// The tokens between reasoning and answer, as the model's template writes them.
    separator: Vec<u32>,
    start: ReplyStart,
    /// Tokens of reasoning, at most.
    budget: Option<usize>,
}

impl ReasoningRules {
    pub(crate) fn new(
        marks: ReasoningMarks,
        tokenizer: &Tokenizer,
        start: ReplyStart,
        budget: Option<usize>,
    ) -> Self {
        ReasoningRules {
            marks: marks.ids(),
            separator: marks.separator(tokenizer),
            start,
            budget,
        }
    }
}

/// A part of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// Nothing is written yet: reasoning or the answer may begin.
    Start,
    /// Reasoning of so many tokens.
    Reasoning(usize),
    /// So many tokens of the separator are written.
    Separator(usize),
    Answer,
}

/// A token that was pushed.
#[derive(Clone, Copy, Debug)]
struct Pushed {
    /// The part before it.
    before: Part,
    /// Whether the answer's constraint has it.
    in_answer: bool,
}

/// Limits a reply of the two parts.
pub(crate) struct ReplyConstraint {
    reasoning: Option<ReasoningRules>,
    answer: Option<Box<dyn Constraint>>,
    /// Tokens that end a reply.
    stop_tokens: Vec<u32>,
    part: Part,
    pushed: Vec<Pushed>,
}

impl ReplyConstraint {
    /// Limits reasoning by `reasoning`, if the model reasons, and the answer by `answer`.
    /// `None` if that limits nothing. With a budget of 0, a reply whose answer is limited begins
    /// with the answer: of all that such a model would write, the mask would leave little but
    /// the mark that opens reasoning.
    pub(crate) fn new(
        reasoning: Option<ReasoningRules>,
        answer: Option<Box<dyn Constraint>>,
        stop_tokens: Vec<u32>,
    ) -> Option<Self> {
        let has_budget = reasoning.as_ref().is_some_and(|r| r.budget.is_some());
        if answer.is_none() && !has_budget {
            return None;
        }
        let is_off = reasoning.as_ref().is_some_and(|r| r.budget == Some(0));
        let part = match reasoning.as_ref().map(|r| r.start) {
            Some(ReplyStart::Reasoning) => Part::Reasoning(0),
            Some(ReplyStart::Free) if answer.is_none() || !is_off => Part::Start,
            Some(ReplyStart::Free | ReplyStart::Answer) | None => Part::Answer,
        };
        Some(ReplyConstraint {
            reasoning,
            answer,
            stop_tokens,
            part,
            pushed: Vec::new(),
        })
    }

    /// The only token that may come next, where the reasoning's rules leave one.
    fn only(&self) -> Option<u32> {
        let rules = self.reasoning.as_ref()?;
        match self.part {
            Part::Reasoning(n) if rules.budget.is_some_and(|budget| n >= budget) => {
                Some(rules.marks[1])
            }
            Part::Separator(n) => Some(rules.separator[n]),
            _ => None,
        }
    }

    /// The part after `token`; `None` if it may not come.
    fn after(&mut self, token: u32) -> Result<Option<(Part, bool)>, ConstraintError> {
        if self.only().is_some_and(|only| only != token) {
            return Ok(None);
        }
        if let Some(rules) = &self.reasoning {
            let [open, close] = rules.marks;
            let is_free = self.answer.is_none();
            match self.part {
                Part::Start if token == open => return Ok(Some((Part::Reasoning(0), false))),
                Part::Answer if token == open && is_free => {
                    return Ok(Some((Part::Reasoning(0), false)));
                }
                Part::Reasoning(_) if token == close => {
                    let is_separated = !is_free && !rules.separator.is_empty();
                    let next = match is_separated {
                        true => Part::Separator(0),
                        false => Part::Answer,
                    };
                    return Ok(Some((next, false)));
                }
                Part::Reasoning(_) if !is_free && self.stop_tokens.contains(&token) => {
                    return Ok(None);
                }
                Part::Reasoning(n) => return Ok(Some((Part::Reasoning(n + 1), false))),
                Part::Separator(n) if n + 1 < rules.separator.len() => {
                    return Ok(Some((Part::Separator(n + 1), false)));
                }
                Part::Separator(_) => return Ok(Some((Part::Answer, false))),
                Part::Start | Part::Answer => {}
            }
        }
        match &mut self.answer {
            Some(answer) => Ok(answer.push(token)?.then_some((Part::Answer, true))),
            None => Ok(Some((Part::Answer, false))),
        }
    }
}

impl Constraint for ReplyConstraint {
    fn allowed(&mut self, allowed: &mut [u32]) -> Result<bool, ConstraintError> {
        if let Some(only) = self.only() {
            set(allowed, only);
            return Ok(true);
        }
        let Some(answer) = &mut self.answer else {
            return Ok(false);
        };
        if let Part::Reasoning(_) = self.part {
            // Bits past the vocabulary count for nothing.
            allowed.fill(u32::MAX);
            for &token in &self.stop_tokens {
                // A checkpoint may name one beyond its vocabulary.
                if let Some(bits) = allowed.get_mut(token as usize / 32) {
                    *bits &= !(1 << (token % 32));
                }
            }
            return Ok(true);
        }
        let is_limited = answer.allowed(allowed)?;
        if let (Part::Start, Some(rules)) = (self.part, &self.reasoning) {
            set(allowed, rules.marks[0]);
        }
        Ok(is_limited)
    }

    fn push(&mut self, token: u32) -> Result<bool, ConstraintError> {
        let Some((next, in_answer)) = self.after(token)? else {
            return Ok(false);
        };
        let before = std::mem::replace(&mut self.part, next);
        self.pushed.push(Pushed { before, in_answer });
        Ok(true)
    }

    fn pop(&mut self, n: usize) {
        let mut in_answer = 0;
        for _ in 0..n {
            let pushed = self.pushed.pop().expect("a push for every pop");
            self.part = pushed.before;
            in_answer += usize::from(pushed.in_answer);
        }
        if let Some(answer) = self.answer.as_mut().filter(|_| in_answer > 0) {
            answer.pop(in_answer);
        }
    }

    fn forced(&mut self, most: usize) -> Vec<u32> {
        let mut forced = Vec::new();
        while forced.len() < most {
            let left = most - forced.len();
            let next = match (self.only(), self.part, &mut self.answer) {
                (Some(only), ..) => vec![only],
                // At the start reasoning is a choice.
                (None, Part::Answer, Some(answer)) => answer.forced(left),
                _ => Vec::new(),
            };
            let n_before = forced.len();
            for token in next {
                match self.push(token) {
                    Ok(true) => forced.push(token),
                    _ => break,
                }
            }
            if forced.len() == n_before {
                break;
            }
        }
        self.pop(forced.len());
        forced
    }

    fn must_end(&mut self) -> bool {
        let answer = self.answer.as_mut();
        self.part == Part::Answer && answer.is_some_and(|answer| answer.must_end())
    }
}

/// A text that follows a grammar.
pub(crate) struct Following(pub(crate) Matcher);

fn failed(error: constrain::Error) -> ConstraintError {
    ConstraintError(error.to_string())
}

impl Constraint for Following {
    fn allowed(&mut self, allowed: &mut [u32]) -> Result<bool, ConstraintError> {
        self.0.allowed(allowed).map(|()| true).map_err(failed)
    }

    fn push(&mut self, token: u32) -> Result<bool, ConstraintError> {
        self.0.push(token).map_err(failed)
    }

    fn pop(&mut self, n: usize) {
        self.0.pop(n);
    }

    fn forced(&mut self, most: usize) -> Vec<u32> {
        self.0.forced(most)
    }

    fn must_end(&mut self) -> bool {
        self.0.must_end()
    }
}

fn set(words: &mut [u32], token: u32) {
    words[token as usize / 32] |= 1 << (token % 32);
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPEN: u32 = 50;
    const CLOSE: u32 = 51;
    const STOP: u32 = 60;
    const VOCAB: usize = 70;

    /// Answers that are one text.
    struct Exactly {
        text: Vec<u32>,
        n: usize,
    }

    impl Constraint for Exactly {
        fn allowed(&mut self, allowed: &mut [u32]) -> Result<bool, ConstraintError> {
            set(allowed, *self.text.get(self.n).unwrap_or(&STOP));
            Ok(true)
        }

        fn push(&mut self, token: u32) -> Result<bool, ConstraintError> {
            let is_next = self.text.get(self.n) == Some(&token);
            self.n += usize::from(is_next);
            Ok(is_next)
        }

        fn pop(&mut self, n: usize) {
            self.n -= n;
        }

        fn forced(&mut self, most: usize) -> Vec<u32> {
            self.text[self.n..].iter().copied().take(most).collect()
        }

        fn must_end(&mut self) -> bool {
            self.n == self.text.len()
        }
    }

    fn reply(start: ReplyStart, budget: Option<usize>, answer: Option<&[u32]>) -> ReplyConstraint {
        let rules = ReasoningRules {
            marks: [OPEN, CLOSE],
            separator: vec![7, 8],
            start,
            budget,
        };
        let answer = answer.map(|text| {
            let text = text.to_vec();
            Box::new(Exactly { text, n: 0 }) as Box<dyn Constraint>
        });
        // One of the stop tokens is none of the vocabulary.
        ReplyConstraint::new(Some(rules), answer, vec![STOP, 1 << 20]).expect("limits something")
    }

    fn allowed(reply: &mut ReplyConstraint) -> Option<Vec<u32>> {
        let mut words = vec![0; VOCAB.div_ceil(32)];
        let is_limited = reply.allowed(&mut words).unwrap();
        let has = |&token: &u32| words[token as usize / 32] >> (token % 32) & 1 == 1;
        is_limited.then(|| (0..VOCAB as u32).filter(has).collect())
    }

    #[test]
    fn the_answer_begins_after_the_reasoning_and_the_separator() {
        let mut reply = reply(ReplyStart::Reasoning, None, Some(&[1, 2]));
        let all: Vec<u32> = (0..VOCAB as u32).filter(|&t| t != STOP).collect();
        let mut seen = Vec::new();
        for token in [3, OPEN, 7, CLOSE, 7, 8, 1, 2] {
            let before = allowed(&mut reply);
            assert!(before.as_ref().unwrap().contains(&token), "{token}");
            seen.push(before);
            assert!(!reply.must_end());
            assert_eq!(reply.push(STOP), Ok(false));
            assert_eq!(reply.push(token), Ok(true));
        }
        assert!(reply.must_end());
        assert_eq!(seen[0], Some(all.clone()));
        assert_eq!(seen[3], Some(all));
        assert_eq!(seen[4..], [7, 8, 1, 2].map(|token| Some(vec![token])));
        for n in (0..seen.len()).rev() {
            reply.pop(1);
            assert_eq!(allowed(&mut reply), seen[n], "after a pop");
        }
    }

    #[test]
    fn a_budget_that_runs_out_ends_the_reasoning() {
        let mut reply = reply(ReplyStart::Reasoning, Some(2), Some(&[1, 2]));
        assert!(reply.forced(9).is_empty());
        assert_eq!(reply.push(3), Ok(true));
        assert_eq!(reply.push(3), Ok(true));
        assert_eq!(allowed(&mut reply), Some(vec![CLOSE]));
        assert_eq!(reply.push(3), Ok(false));
        assert_eq!(reply.forced(9), [CLOSE, 7, 8, 1, 2]);
        assert_eq!(reply.forced(3), [CLOSE, 7, 8]);
        assert_eq!(allowed(&mut reply), Some(vec![CLOSE]), "nothing was pushed");
    }

    #[test]
    fn a_budget_alone_leaves_the_answer_free() {
        let mut reply = reply(ReplyStart::Free, Some(1), None);
        assert_eq!(allowed(&mut reply), None);
        for token in [OPEN, 4] {
            assert_eq!(reply.push(token), Ok(true));
        }
        assert_eq!(allowed(&mut reply), Some(vec![CLOSE]));
        for token in [CLOSE, STOP] {
            assert_eq!(reply.push(token), Ok(true));
        }
        assert_eq!((allowed(&mut reply), reply.must_end()), (None, false));
        assert!(ReplyConstraint::new(None, None, vec![]).is_none());
    }

    #[test]
    fn a_reply_that_may_reason_begins_with_the_mark_or_the_answer() {
        let mut reply = reply(ReplyStart::Free, None, Some(&[1, 2]));
        assert_eq!(allowed(&mut reply), Some(vec![1, OPEN]));
        assert!(reply.forced(9).is_empty(), "reasoning is a choice");
        assert_eq!(reply.push(1), Ok(true));
        assert_eq!(allowed(&mut reply), Some(vec![2]));
        reply.pop(1);
        assert_eq!(reply.push(OPEN), Ok(true));
        assert_eq!(reply.push(CLOSE), Ok(true));
        assert_eq!(allowed(&mut reply), Some(vec![7]));
    }

    #[test]
    fn a_reply_that_may_not_reason_begins_with_the_answer() {
        let mut reply = reply(ReplyStart::Free, Some(0), Some(&[1, 2]));
        assert_eq!(allowed(&mut reply), Some(vec![1]));
        assert_eq!(reply.forced(9), [1, 2]);
        assert_eq!(reply.push(OPEN), Ok(false));
        assert_eq!(reply.push(1), Ok(true));
    }
}
