//! What penalties and limits depend on of the tokens so far, with `push` and `pop` for drafts.

use super::Sampling;
use super::dry::Passages;
use std::collections::BTreeMap;

/// How often a token is in the text, or in as many of its last tokens as count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Count {
    /// Times it is in the prompt, where that matters.
    pub(super) n_prompt: u32,
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
    counts: BTreeMap<u32, Count>,
    /// Tokens of the prompt that count, the last of it; empty where none does.
    prompt: Vec<u32>,
    /// Tokens of the whole prompt.
    n_prompt: usize,
    /// How many of the last tokens count; all if absent.
    window: Option<usize>,
    /// Pushed tokens, which `pop` takes back.
    output: Vec<u32>,
    /// Prompt and output in their order, where DRY asks for it.
    passages: Option<Passages>,
    /// The bound of mirostat, in bits.
    bound: f32,
}

impl History {
    /// The history before the first token of output. If no option of `sampling` depends on
    /// it, it stays empty and nothing costs anything.
    pub fn new(sampling: &Sampling, prompt: &[u32]) -> Self {
        let window = sampling.repeat_last_n;
        let counted = match sampling.counts_prompt() {
            true => &prompt[prompt.len() - window.map_or(prompt.len(), |n| n.min(prompt.len()))..],
            false => &[],
        };
        let mut counts: BTreeMap<u32, Count> = BTreeMap::new();
        for &token in counted {
            counts.entry(token).or_default().n_prompt += 1;
        }
        let has_passages = sampling.penalizes_passages();
        History {
            is_needed: sampling.depends_on_text(),
            counts_tokens: sampling.counts_tokens(),
            counts,
            // Only a window lets go of tokens that have counted.
            prompt: window.map_or(Vec::new(), |_| counted.to_vec()),
            n_prompt: prompt.len(),
            window,
            output: Vec::new(),
            passages: has_passages.then(|| Passages::new(&sampling.dry_breakers, prompt)),
            bound: 2.0 * sampling.mirostat_tau,
        }
    }

    /// Appends a token of output.
    pub fn push(&mut self, token: u32) {
        if !self.is_needed {
            return;
        }
        self.output.push(token);
        if self.counts_tokens {
            self.counts.entry(token).or_default().n_output += 1;
            if let Some(count) = self.behind_window() {
                *count -= 1;
            }
        }
        if let Some(passages) = &mut self.passages {
            passages.push(token);
        }
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
        if self.counts_tokens
            && let Some(count) = self.behind_window()
        {
            *count += 1;
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

    /// The count of the token right before those that count, which the last push has put there.
    fn behind_window(&mut self) -> Option<&mut u32> {
        let n = self.n_prompt + self.output.len();
        let at = n.checked_sub(self.window?.checked_add(1)?)?;
        if let Some(i) = at.checked_sub(self.n_prompt) {
            let count = self.counts.get_mut(&self.output[i])?;
            return Some(&mut count.n_output);
        }
        // The prompt's tokens are kept from the first on that has ever counted.
        let token = self
            .prompt
            .get(self.prompt.len().checked_sub(self.n_prompt - at)?)?;
        Some(&mut self.counts.get_mut(token)?.n_prompt)
    }

    /// The bound of mirostat for the next token, in bits.
    pub(super) fn bound(&self) -> f32 {
        self.bound
    }

    /// Moves the bound of mirostat after a token of `surprise` bits.
    pub(super) fn adapt(&mut self, sampling: &Sampling, surprise: f32) {
        self.bound -= sampling.mirostat_eta * (surprise - sampling.mirostat_tau);
    }

    /// Tokens of output, if sampling depends on the history.
    pub(super) fn n_output(&self) -> usize {
        self.output.len()
    }

    /// The passages of the text, where DRY asks for them.
    pub(super) fn passages(&self) -> Option<&Passages> {
        self.passages.as_ref()
    }

    /// The tokens that have been seen, in ascending order; some of them zero times after a pop.
    pub(super) fn counts(&self) -> impl Iterator<Item = (u32, Count)> {
        self.counts.iter().map(|(&token, &count)| (token, count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(history: &History) -> Vec<(u32, bool, u32)> {
        let counts = history
            .counts()
            .map(|(t, c)| (t, c.n_prompt > 0, c.n_output));
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

    /// The counts, by looking at the last tokens of the text.
    fn naive(sampling: &Sampling, prompt: &[u32], output: &[u32]) -> Vec<(u32, bool, u32)> {
        let prompt_counts = sampling.counts_prompt();
        let text = prompt.iter().map(|&t| (t, prompt_counts, 0));
        let text: Vec<_> = text.chain(output.iter().map(|&t| (t, false, 1))).collect();
        let n = sampling.repeat_last_n.unwrap_or(text.len()).min(text.len());
        let mut counts: BTreeMap<u32, (bool, u32)> = BTreeMap::new();
        for &(token, in_prompt, n_output) in &text[text.len() - n..] {
            let count = counts.entry(token).or_default();
            *count = (count.0 || in_prompt, count.1 + n_output);
        }
        let counts = counts.into_iter().map(|(t, (p, o))| (t, p, o));
        counts.filter(|c| c.1 || c.2 > 0).collect()
    }

    #[test]
    fn only_the_last_tokens_count_whatever_is_pushed_and_popped() {
        let prompt: Vec<u32> = (0..9).map(|i| i * i % 5).collect();
        let windows = [
            Some(1),
            Some(2),
            Some(5),
            Some(9),
            Some(12),
            Some(usize::MAX),
            None,
        ];
        for window in windows {
            for repetition_penalty in [1.0, 1.3] {
                let sampling = Sampling {
                    repetition_penalty,
                    frequency_penalty: 0.5,
                    repeat_last_n: window,
                    ..Sampling::default()
                };
                let mut history = History::new(&sampling, &prompt);
                let mut output = Vec::new();
                // Three steps forth and as many back as the step's number says, and again.
                for step in 0..40u32 {
                    for i in 0..3 {
                        output.push((step * 7 + i) % 6);
                        history.push((step * 7 + i) % 6);
                        assert_eq!(counts(&history), naive(&sampling, &prompt, &output));
                    }
                    for _ in 0..[2, 0, 3, 1, 3][step as usize % 5] {
                        output.pop();
                        history.pop();
                        assert_eq!(counts(&history), naive(&sampling, &prompt, &output));
                    }
                }
            }
        }
        // A window of nothing is no penalty at all.
        let none = Sampling {
            repetition_penalty: 1.3,
            repeat_last_n: Some(0),
            ..Sampling::default()
        };
        assert!(none.is_plain_greedy());
        assert_eq!(counts(&History::new(&none, &prompt)), []);
    }
}
