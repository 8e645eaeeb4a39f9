//! Scoring: how likely the target holds each token of a given text.
//!
//! ```text
//! score_i = ln softmax(l_{i-1})[x_i],  l_{i-1} the logits after x_0 .. x_{i-1}
//! ```
//!
//! Perplexity is `exp` of the negative mean of these. The logits are the target's as they
//! are, without penalties, bias or temperature, and sums run in `f64`.

use crate::{RoundError, Speculator};

/// Rows whose logits are computed at once: a row of logits is as long as the vocabulary.
const LOGIT_ROWS: usize = 32;

impl Speculator {
    /// Log-probabilities (natural logarithms) of `text[first..]`, one for each of these
    /// tokens given all tokens before it in `text`. The tokens before `first` are only read.
    ///
    /// # Errors
    ///
    /// [`RoundError::Memory`] if the text is longer than the context or no sequence is free,
    /// [`RoundError::NoToken`] if logits of a scored token give none.
    ///
    /// # Panics
    ///
    /// If `first` is 0 or beyond the text's end: the first token has nothing before it.
    pub fn score(&mut self, text: &[u32], first: usize) -> Result<Vec<f64>, RoundError> {
        let mut scores = Vec::with_capacity(text.len().saturating_sub(first));
        self.each_logits(text, first, |token, logits| {
            scores.push(log_prob(logits, token as usize));
        })?;
        Ok(scores)
    }

    /// Shows `visit` each token of `text[first..]` with the logits of what may come in its place, after all
    /// tokens before it in `text`.
    ///
    /// # Errors
    ///
    /// As of [`Self::score`].
    ///
    /// # Panics
    ///
    /// If `first` is 0 or beyond the text's end.
    pub fn each_logits(
        &mut self,
        text: &[u32],
        first: usize,
        mut visit: impl FnMut(u32, &[f32]),
    ) -> Result<(), RoundError> {
        assert!(
            (1..=text.len()).contains(&first),
            "a scored token has one before it"
        );
        // The last token predicts nothing that is scored.
        let read = &text[..text.len() - 1];
        let step_rows = self.memory.size().step_rows;
        self.with_sequence(|this, sequence| {
            for chunk in read.chunks(step_rows) {
                let start = sequence.len();
                let hidden = this.forward(sequence, chunk, chunk.len())?;
                let next = |row: usize| start + row + 1;
                let rows: Vec<usize> = (0..chunk.len()).filter(|&r| next(r) >= first).collect();
                for rows in rows.chunks(LOGIT_ROWS) {
                    let logits = this.logits(&this.b.gather(&hidden, rows))?;
                    let vocab = logits.len() / rows.len();
                    for (&row, logits) in rows.iter().zip(logits.chunks_exact(vocab)) {
                        visit(text[next(row)], logits);
                    }
                }
                this.b.finish()?;
            }
            Ok(())
        })
    }
}

/// `ln softmax(logits)[token]`, summed in `f64`.
pub fn log_prob(logits: &[f32], token: usize) -> f64 {
    f64::from(logits[token]) - log_sum(logits)
}

/// How far the distribution of `other` is from that of `logits`, in nats: the Kullback-Leibler divergence
/// `Σ p ln(p / q)` with `p = softmax(logits)` and `q = softmax(other)`, summed in `f64`.
///
/// # Panics
///
/// If the lengths differ.
pub fn divergence(logits: &[f32], other: &[f32]) -> f64 {
    assert_eq!(logits.len(), other.len(), "logits of one vocabulary");
    let (p_sum, q_sum) = (log_sum(logits), log_sum(other));
    let terms = logits.iter().zip(other).map(|(&p, &q)| {
        let (p, q) = (f64::from(p) - p_sum, f64::from(q) - q_sum);
        // A token that cannot come adds nothing.
        if p == f64::NEG_INFINITY {
            0.0
        } else {
            p.exp() * (p - q)
        }
    });
    terms.sum()
}

/// `ln Σ exp(logits)`.
fn log_sum(logits: &[f32]) -> f64 {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - top).exp()).sum();
    f64::from(top) + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uniform_guess_among_four_has_perplexity_four() {
        let p = log_prob(&[2.0, 2.0, 2.0, 2.0], 1);
        assert!(((-p).exp() - 4.0).abs() < 1e-12, "{p}");
    }

    #[test]
    fn a_distribution_diverges_from_others_and_not_from_itself() {
        let none = f32::NEG_INFINITY;
        // Half and half, as other numbers say it too.
        assert_eq!(divergence(&[1.0, 1.0, none], &[7.0, 7.0, none]), 0.0);
        // p = (1/2, 1/2), q = (3/4, 1/4): ln 2 - ln(3) / 2.
        let found = divergence(&[0.0, 0.0], &[3f32.ln(), 0.0]);
        assert!(
            (found - (2f64.ln() - 3f64.ln() / 2.0)).abs() < 1e-6,
            "{found}"
        );
        assert_eq!(divergence(&[0.0, 0.0], &[0.0, none]), f64::INFINITY);
    }
}
