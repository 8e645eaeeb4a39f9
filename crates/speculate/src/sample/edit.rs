//! What is done to logits before they are compared: penalties, bias, suppression.

use super::{History, Sampling};

/// Penalties, bias, suppression; `place(token)` is where the token's logit is.
pub(super) fn edit(
    sampling: &Sampling,
    history: &History,
    row: &mut [f32],
    place: impl Fn(u32) -> Option<usize>,
) {
    // Each entry concerns its own token, so their order does not show.
    for (&token, count) in &history.counts {
        let Some(i) = place(token) else { continue };
        let l = &mut row[i];
        if count.in_prompt || count.n_output > 0 {
            *l = if *l > 0.0 {
                *l / sampling.repetition_penalty
            } else {
                *l * sampling.repetition_penalty
            };
        }
        if count.n_output > 0 {
            *l -= sampling.presence_penalty + sampling.frequency_penalty * count.n_output as f32;
        }
    }
    for &(token, bias) in &sampling.logit_bias {
        if let Some(i) = place(token) {
            row[i] += bias;
        }
    }
    for &token in &sampling.suppress {
        if let Some(i) = place(token) {
            row[i] = f32::NEG_INFINITY;
        }
    }
}
