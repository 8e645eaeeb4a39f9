//! Log-probabilities: how likely the target held the tokens that it wrote.
//!
//! ```text
//! logprob(i) = ln softmax(l)_i,  l the target's logits as they are
//! ```
//!
//! Of the row that chose the token, whether the token was drafted, recovered or a bonus:
//! so they have the same bits with any drafter or none. Temperature, penalties, bias and
//! suppression are not in them, as in vLLM's and llama.cpp's: they say what the model
//! thought and not how the token was picked.

use backend::Likeliest;

/// Likeliest tokens that a stream may ask for beside each of its own.
pub const MAX_TOP_LOGPROBS: usize = 20;

/// How likely one token was, and which were likelier than most.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logprobs {
    /// The token's own; -inf where no softmax is defined.
    pub logprob: f32,
    /// The likeliest tokens and theirs, the likeliest first.
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    /// Those of what a row says.
    pub(crate) fn of(row: &Likeliest) -> Self {
        let top = row.top.iter();
        Logprobs {
            logprob: row.logprob(row.logit),
            top: top.map(|&(id, logit)| (id, row.logprob(logit))).collect(),
        }
    }
}
