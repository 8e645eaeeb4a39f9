//! Log-probabilities: how likely the target held the tokens that it wrote.
//!
//! ```text
//! logprob(i) = ln softmax(l)_i,  l the target's logits as they are
//! ```
//!
//! `l` is the row that chose the token, whether the token was drafted, recovered or a bonus,
//! so log-probabilities have the same bits with any drafter or none. Temperature, penalties,
//! bias and suppression are not in them, as in vLLM's and llama.cpp's: they say how likely
//! the model held the token and not how it was picked.
//!
//! A stream may ask for the latter instead, as llama.cpp's `post_sampling_probs` does: then they
//! are of the probabilities of [`sample::token_probs`](crate::sample::token_probs).

use crate::sample::TokenProbs;
use backend::Likeliest;
use backend::math::ln;

/// Most alternatives that a stream may ask for beside each of its tokens.
pub const MAX_TOP_LOGPROBS: usize = 20;

/// What log-probabilities say of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogprobsOf {
    /// How likely the target held them: they are of its logits as they are.
    Logits,
    /// How likely they were to be chosen, after penalties, temperature, truncation and the
    /// stream's constraint.
    Choice,
}

/// Which log-probabilities come with each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopLogprobs {
    /// How many of the likeliest tokens come beside it; [`MAX_TOP_LOGPROBS`] at most.
    pub top: usize,
    /// Which log-probabilities: of the logits, or of the choice.
    pub of: LogprobsOf,
}

impl TopLogprobs {
    /// Log-probabilities of the target's logits as they are, and those of the `top` likeliest tokens.
    pub fn of_logits(top: usize) -> Self {
        TopLogprobs {
            top,
            of: LogprobsOf::Logits,
        }
    }
}

/// The log-probability of one token, and the likeliest tokens beside it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logprobs {
    /// The token's log-probability; -inf where no softmax is defined.
    pub logprob: f32,
    /// The likeliest tokens and their log-probabilities, the likeliest first.
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    /// Converts a backend's summary of one row of logits to log-probabilities.
    pub(crate) fn of(row: &Likeliest) -> Self {
        let top = row.top.iter();
        Logprobs {
            logprob: row.logprob(row.logit),
            top: top.map(|&(id, logit)| (id, row.logprob(logit))).collect(),
        }
    }

    /// The logarithms of `probs`, which `token` was chosen from, with the `most` likeliest tokens;
    /// of equal ones the lower id comes first. A token that could not be chosen has -inf.
    pub(crate) fn of_choice(mut probs: TokenProbs, token: u32, most: usize) -> Self {
        let log = |prob: f32| match prob > 0.0 {
            true => ln(prob),
            false => f32::NEG_INFINITY,
        };
        let own = probs.iter().find(|(id, _)| *id == token);
        let logprob = own.map_or(f32::NEG_INFINITY, |&(_, prob)| log(prob));
        let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if (1..probs.len()).contains(&most) {
            probs.select_nth_unstable_by(most - 1, order);
        }
        probs.truncate(most);
        probs.sort_unstable_by(order);
        Logprobs {
            logprob,
            top: probs
                .into_iter()
                .map(|(id, prob)| (id, log(prob)))
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_token_was_chosen_from_is_sorted_and_cut() {
        let probs = vec![(7, 0.125), (3, 0.5), (9, 0.25), (1, 0.125)];
        let logprobs = Logprobs::of_choice(probs.clone(), 9, 3);
        let ids: Vec<u32> = logprobs.top.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, [3, 9, 1]);
        assert_eq!(logprobs.logprob, ln(0.25));
        assert_eq!(logprobs.top[0].1, ln(0.5));
        assert_eq!(Logprobs::of_choice(probs.clone(), 3, 9).top.len(), 4);
        let other = Logprobs::of_choice(probs, 5, 0);
        assert_eq!(other.logprob, f32::NEG_INFINITY);
        assert!(other.top.is_empty());
    }
}
