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

    /// The probability of each row's likeliest token, to a few digits: how sure a row of logits is. 0 for a row that
    /// [gives no token](gives_token). Nothing that is written may depend on it.
    fn confidences(&self, x: &Tensor) -> Vec<f32> {
        let (values, cols) = (self.download(x), x.cols());
        values.chunks_exact(cols).map(confidence).collect()
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

/// The probability of the likeliest token of a row of logits, to a few digits; 0 for a row that [gives no
/// token](gives_token).
#[inline(always)]
pub fn confidence(row: &[f32]) -> f32 {
    let (lanes, rest) = row.as_chunks::<16>();
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut largest = [f32::NEG_INFINITY; 16];
    for x in lanes {
        (0..16).for_each(|i| largest[i] = larger(largest[i], x[i]));
    }
    let all = largest.into_iter().chain(rest.iter().copied());
    let largest = all.fold(f32::NEG_INFINITY, larger);
    let mut sums = [0.0; 16];
    for x in lanes {
        (0..16).for_each(|i| sums[i] += rough_exp(x[i] - largest));
    }
    let sum: f32 =
        sums.iter().sum::<f32>() + rest.iter().map(|&x| rough_exp(x - largest)).sum::<f32>();
    let confidence = 1.0 / sum;
    if confidence.is_finite() {
        confidence
    } else {
        0.0
    }
}

/// `e^d` for `d <= 0`, to 4 digits; 0 from about -87 on. NaN stays NaN.
#[inline(always)]
fn rough_exp(d: f32) -> f32 {
    // 2^d = 2^n 2^r: n to the exponent, r in -0.5..=0.5 by its series.
    let x = (d * std::f32::consts::LOG2_E).max(-126.0);
    let shifted = x + 12_582_912.0;
    let r = (x - (shifted - 12_582_912.0)) * std::f32::consts::LN_2;
    let power = 1.0 + r * (1.0 + r * (0.5 + r * (1.0 / 6.0 + r / 24.0)));
    let n = shifted.to_bits().wrapping_sub(0x4b40_0000) << 23;
    let e = f32::from_bits(power.to_bits().wrapping_add(n));
    match d {
        d if d.is_nan() => d,
        d if d > -87.0 => e,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::confidence;

    #[test]
    fn the_likeliest_token_has_its_share_of_all_exponentials() {
        let row: Vec<f32> = (0..1003)
            .map(|i| ((i * 37) % 101) as f32 * 0.09 - 4.0)
            .collect();
        for row in [
            &row[..],
            &row[..5],
            &row[..16],
            &[3.0],
            &[0.0, -200.0, -1e30],
        ] {
            let largest = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            let sum: f64 = row.iter().map(|&x| (f64::from(x) - largest).exp()).sum();
            let told = f64::from(confidence(row));
            assert!((told * sum - 1.0).abs() < 1e-3, "{told} of {}", 1.0 / sum);
        }
        assert_eq!(confidence(&[0.0, f32::NEG_INFINITY]), 1.0);
        for bad in [
            [f32::NAN, 0.0],
            [0.0, f32::NAN],
            [f32::NEG_INFINITY; 2],
            [f32::INFINITY, 0.0],
        ] {
            assert_eq!(confidence(&bad), 0.0, "{bad:?}");
        }
    }
}
