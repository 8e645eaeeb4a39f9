//! The token counts that penalties depend on.

use super::Sampling;
use std::collections::HashMap;

/// How often a token has been seen.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Count {
    pub(super) in_prompt: bool,
    pub(super) n_output: u32,
}

/// The tokens of prompt and output, as far as penalties need them.
///
/// Rows under verification push what was drafted and pop it again.
#[derive(Clone, Debug)]
pub struct History {
    is_needed: bool,
    pub(super) counts: HashMap<u32, Count>,
    /// What `pop` undoes.
    output: Vec<u32>,
}

impl History {
    /// The history before the first token of output. Without penalties in
    /// `sampling` it stays empty and nothing costs anything.
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
        History {
            is_needed: sampling.counts_tokens(),
            counts: counted.iter().map(|&token| (token, seen)).collect(),
            output: Vec::new(),
        }
    }

    /// Appends a token of output.
    pub fn push(&mut self, token: u32) {
        if self.is_needed {
            self.counts.entry(token).or_default().n_output += 1;
            self.output.push(token);
        }
    }

    /// Undoes the last [`History::push`].
    ///
    /// # Panics
    ///
    /// If there is none, and there are penalties.
    pub fn pop(&mut self) {
        if self.is_needed {
            let token = self.output.pop().expect("a push for every pop");
            let count = self.counts.get_mut(&token).expect("counted when pushed");
            count.n_output -= 1;
        }
    }
}
