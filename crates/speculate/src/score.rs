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
        assert!(
            (1..=text.len()).contains(&first),
            "a scored token has one before it"
        );
        // The last token predicts nothing that is scored.
        let read = &text[..text.len() - 1];
        let step_rows = self.memory.size().step_rows;
        self.with_sequence(|this, sequence| {
            let mut scores = Vec::with_capacity(text.len() - first);
            for chunk in read.chunks(step_rows) {
                let start = sequence.len();
                let hidden = this.forward(sequence, chunk, chunk.len())?;
                let next = |row: usize| start + row + 1;
                let rows: Vec<usize> = (0..chunk.len()).filter(|&r| next(r) >= first).collect();
                for rows in rows.chunks(LOGIT_ROWS) {
                    let logits = this.logits(&this.b.gather(&hidden, rows))?;
                    let vocab = logits.len() / rows.len();
                    for (&row, logits) in rows.iter().zip(logits.chunks_exact(vocab)) {
                        scores.push(log_prob(logits, text[next(row)] as usize));
                    }
                }
                this.b.finish()?;
            }
            Ok(scores)
        })
    }
}

/// `ln softmax(logits)[token]`, summed in `f64`.
fn log_prob(logits: &[f32], token: usize) -> f64 {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - top).exp()).sum();
    f64::from(logits[token] - top) - sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uniform_guess_among_four_has_perplexity_four() {
        let p = log_prob(&[2.0, 2.0, 2.0, 2.0], 1);
        assert!(((-p).exp() - 4.0).abs() < 1e-12, "{p}");
    }
}
