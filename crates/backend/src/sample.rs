//! Sampling: which tokens the rows of logits give, without sending the logits.

use crate::moments::Moments;
use crate::{Likeliest, RowEdits, Store, Tensor, TokenChoice, TokenList, TokenMask};
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

    /// `x`, rows of logits, with -inf in place of the logit of each token that the row's mask does
    /// not allow; a row without a mask stays as it is. Every choice is then made as without masks,
    /// so that a token which is not allowed is never chosen, and a row that allows none
    /// [gives no token](gives_token).
    ///
    /// The default changes a copy of the logits on the host, for which it waits for the device;
    /// [`Capabilities::masks`](crate::Capabilities::masks) says whether a device masks them where
    /// they lie.
    ///
    /// # Panics
    ///
    /// If there is not a mask, or `None`, for each row, or a mask is of another vocabulary.
    fn mask_logits(&self, x: Tensor, masks: &[Option<TokenMask>]) -> Tensor {
        let (rows, cols) = (x.rows(), x.cols());
        let mut logits = self.download(&x).into_owned();
        TokenMask::apply(masks, cols, &mut logits);
        self.upload(rows, cols, &logits)
    }

    /// `x`, rows of logits, each after its [edits](RowEdits::apply): what penalties, biases and
    /// suppression make of it, bit for bit. A row without edits stays as it is.
    ///
    /// The default changes a copy of the logits on the host, for which it waits for the device.
    ///
    /// # Panics
    ///
    /// If there are not edits for each row, or one is of a column that `x` does not have.
    fn edit_logits(&self, x: Tensor, edits: &[RowEdits]) -> Tensor {
        let (rows, cols) = (x.rows(), x.cols());
        let mut logits = self.download(&x).into_owned();
        RowEdits::apply_all(edits, cols, &mut logits);
        self.upload(rows, cols, &logits)
    }

    /// What some ways of sampling ask of the whole `rows` of `x`, as [`Moments::of`] has it. Waits for
    /// the device.
    fn moments(&self, x: &Tensor, rows: &[usize]) -> Vec<Moments> {
        let (values, cols) = (self.download(x), x.cols());
        let of = |&row: &usize| Moments::of(&values[row * cols..(row + 1) * cols]);
        rows.iter().map(of).collect()
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
