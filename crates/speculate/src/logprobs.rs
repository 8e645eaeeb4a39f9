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

use backend::Likeliest;

/// Most alternatives that a stream may ask for beside each of its tokens.
pub const MAX_TOP_LOGPROBS: usize = 20;

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
}
