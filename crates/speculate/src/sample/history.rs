//! What penalties and limits depend on of the tokens so far, with `push` and `pop` for drafts.

use super::Sampling;
use super::dry::Passages;
use std::collections::HashMap;

/// Where and how often a token has been seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Count {
    /// Whether it is in the prompt, where that matters.
    pub(super) in_prompt: bool,
    /// Times it is in the output.
    pub(super) n_output: u32,
}

/// The tokens of prompt and output, as far as sampling needs them.
///
/// Rows under verification push what was drafted and pop it again.
#[derive(Clone, Debug)]
pub struct History {
    is_needed: bool,
    counts_tokens: bool,
    counts: HashMap<u32, Count>,
    /// Pushed tokens, which `pop` takes back.
    output: Vec<u32>,
    /// Prompt and output in their order, where DRY asks for it.
    passages: Option<Passages>,
}

impl History {
    /// The history before the first token of output. If no option of `sampling` depends on
    /// it, it stays empty and nothing costs anything.
    pub fn new(sampling: &Sampling, prompt: &[u32]) -> Self {
        let counted = if sampling.counts_prompt() {
            prompt
        } else {
            &[]
        };
        let seen = Count {
            in_prompt: true,
            n_output: 0,
        };
        let has_passages = sampling.penalizes_passages();
        History {
            is_needed: sampling.depends_on_text(),
            counts_tokens: sampling.counts_tokens(),
            counts: counted.iter().map(|&token| (token, seen)).collect(),
            output: Vec::new(),
            passages: has_passages.then(|| Passages::new(&sampling.dry_breakers, prompt)),
        }
    }

    /// Appends a token of output.
    pub fn push(&mut self, token: u32) {
        if !self.is_needed {
            return;
        }
        if self.counts_tokens {
            self.counts.entry(token).or_default().n_output += 1;
        }
        if let Some(passages) = &mut self.passages {
            passages.push(token);
        }
        self.output.push(token);
    }

    /// Undoes the last [`History::push`].
    ///
    /// # Panics
    ///
    /// If there is none, and sampling depends on the history.
    pub fn pop(&mut self) {
        if !self.is_needed {
            return;
        }
        let token = self.output.pop().expect("a push for every pop");
        if self.counts_tokens {
            let count = self.counts.get_mut(&token).expect("counted when pushed");
            count.n_output -= 1;
        }
        if let Some(passages) = &mut self.passages {
            passages.pop();
        }
    }

    /// Tokens of output, if sampling depends on the history.
    pub(super) fn n_output(&self) -> usize {
        self.output.len()
    }

    /// The passages of the text, where DRY asks for them.
    pub(super) fn passages(&self) -> Option<&Passages> {
        self.passages.as_ref()
    }

    /// The tokens that have been seen, in no order; some of them zero times after a pop.
    pub(super) fn counts(&self) -> impl Iterator<Item = (u32, Count)> {
        self.counts.iter().map(|(&token, &count)| (token, count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(history: &History) -> Vec<(u32, bool, u32)> {
        let counts = history.counts().map(|(t, c)| (t, c.in_prompt, c.n_output));
        let mut counts: Vec<_> = counts.filter(|c| c.1 || c.2 > 0).collect();
        counts.sort_unstable();
        counts
    }

    #[test]
    fn a_pop_takes_back_what_was_pushed_last() {
        let sampling = Sampling {
            repetition_penalty: 1.1,
            ..Sampling::default()
        };
        let mut history = History::new(&sampling, &[5, 6, 5]);
        let before = counts(&history);
        assert_eq!(before, [(5, true, 0), (6, true, 0)]);
        [6, 7, 7].iter().for_each(|&token| history.push(token));
        assert_eq!(
            counts(&history),
            [(5, true, 0), (6, true, 1), (7, false, 2)]
        );
        history.pop();
        assert_eq!(
            counts(&history),
            [(5, true, 0), (6, true, 1), (7, false, 1)]
        );
        history.pop();
        history.pop();
        assert_eq!(counts(&history), before);
    }

    #[test]
    fn only_what_penalties_need_is_counted() {
        let presence = Sampling {
            presence_penalty: 0.5,
            ..Sampling::default()
        };
        let mut history = History::new(&presence, &[5, 6]);
        history.push(7);
        assert_eq!(counts(&history), [(7, false, 1)]);
        let mut none = History::new(&Sampling::default(), &[5, 6]);
        none.push(7);
        assert_eq!(counts(&none), []);
        // Nothing was pushed, and nothing is missed.
        none.pop();
        none.pop();
    }

    #[test]
    fn tokens_of_output_are_counted_where_a_least_length_asks_for_them() {
        let sampling = Sampling {
            min_tokens: 2,
            ..Sampling::default()
        };
        let mut history = History::new(&sampling, &[5, 6]);
        assert_eq!(history.n_output(), 0);
        history.push(7);
        history.push(7);
        assert_eq!((history.n_output(), counts(&history)), (2, vec![]));
        history.pop();
        assert_eq!(history.n_output(), 1);
    }
}
