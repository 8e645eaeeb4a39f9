//! Sampling: which tokens the rows of logits give, without sending the logits.

use crate::{Likeliest, Store, Tensor, TokenChoice, TokenList};
#[cfg(doc)]
use crate::{NO_TOKEN, gives_token};

/// What a device tells of rows of logits.
pub trait Sample: Store {
    /// The column of each row's largest value; the lowest of equal ones. [`NO_TOKEN`] for a
    /// row that [gives no token](gives_token).
    fn argmax(&self, x: &Tensor) -> Vec<u32>;

    /// The token that each row of logits gives, as [`TokenChoice`] defines it: for a
    /// device that need not send the logits for that. The columns are the tokens of
    /// `list`, or all. `None`, the default, leaves the choice to whoever asks.
    fn choose_tokens(
        &self,
        x: &Tensor,
        list: Option<&TokenList>,
        choices: &[TokenChoice],
    ) -> Option<Vec<u32>> {
        let _ = (x, list, choices);
        None
    }

    /// What the rows of logits that `asked` names say of the token beside each, and their
    /// `n` likeliest, as [`Likeliest::of`] has it. Waits for the device.
    fn likeliest(&self, x: &Tensor, asked: &[(usize, u32)], n: usize) -> Vec<Likeliest> {
        let (values, cols) = (self.download(x), x.cols());
        let of = |&(row, token): &(usize, u32)| {
            Likeliest::of(&values[row * cols..(row + 1) * cols], token, n)
        };
        asked.iter().map(of).collect()
    }
}
