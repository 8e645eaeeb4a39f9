//! Acceptance: which drafted tokens survive verification.
//!
//! ```text
//! a       = length of the longest prefix of the draft with draft[i] = chosen[i]
//! pending = chosen[a]
//! ```
//!
//! `chosen[i]` is the target's own choice after `draft[..i]`, made with the noise
//! of its position ([`crate::noise`]). A draft token stays if it *is* that choice,
//! so what is emitted is what the target alone would have emitted: greedy or
//! sampled, under any penalty. How likely the two agree is the coupling of Daliri,
//! Musco and Suresh 2024, arXiv:2408.07978.
//!
//! The other rule, [`Accept::Residual`], is the rejection sampling of Leviathan et al.
//! 2023, arXiv:2211.17192, §2.3:
//!
//! ```text
//! x drawn from draft_probs
//! x stays        if u < target_probs(x) / draft_probs(x),  u uniform
//! else pending   drawn from max(target_probs - draft_probs, 0), normalized
//! ```
//!
//! What is emitted is distributed as the target's own text, but is another text than the
//! target alone would have emitted with the seed.
//!
//! Pure functions: no model, no cache, no clock, no logits.

use crate::noise::{Noise, coin};
use crate::sample::{Sampling, TokenProbs};
use backend::math::ln;
use std::collections::HashMap;

/// How it is decided which drafted tokens stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Accept {
    /// Drafted tokens stay that the target chooses itself: the text of plain decoding.
    #[default]
    Exact,
    /// Drafted tokens stay that rejection sampling keeps: another text of the same
    /// distribution, more of it drafted. Greedy decoding is exact all the same.
    Residual,
}

impl Accept {
    /// Every rule.
    pub const ALL: [Accept; 2] = [Accept::Exact, Accept::Residual];

    /// The rule for a stream of this sampling: greedy choices leave nothing to reject.
    pub fn with(self, sampling: &Sampling) -> Accept {
        if sampling.temperature == 0.0 {
            Accept::Exact
        } else {
            self
        }
    }

    /// Name of the rule, as users type it.
    pub fn name(self) -> &'static str {
        match self {
            Accept::Exact => "exact",
            Accept::Residual => "residual",
        }
    }
}

/// Rejection sampling of one drafted token: returns `drafted` itself or a recovered token,
/// distributed as `target_probs` if `drafted` was drawn from `draft_probs`. Without
/// `draft_probs`, `drafted` was the only token that could be drawn.
///
/// The drafted token must have been drawn without [`coin`] and
/// [`Noise::recovering`] of this seed and position.
///
/// # Panics
///
/// If `target_probs` is empty.
pub fn residual(
    drafted: u32,
    target_probs: &TokenProbs,
    draft_probs: Option<&TokenProbs>,
    seed: u64,
    position: u64,
) -> u32 {
    let of_drafted = |probs: &TokenProbs| {
        let found = probs.iter().find(|(token, _)| *token == drafted);
        found.map_or(0.0, |(_, prob)| *prob)
    };
    let target_prob = of_drafted(target_probs);
    let draft_prob = draft_probs.map_or(1.0, of_drafted);
    if coin(seed, position) * draft_prob < target_prob {
        return drafted;
    }
    let point = vec![(drafted, 1.0)];
    let draft_probs: HashMap<u32, f32> = draft_probs.unwrap_or(&point).iter().copied().collect();
    let noise = Noise::recovering(seed, position);
    let score = |&(token, prob): &(u32, f32)| {
        let rest = prob - draft_probs.get(&token).copied().unwrap_or(0.0);
        (rest > 0.0).then(|| (ln(rest) + noise.gumbel(token), token))
    };
    // The lower token of equal scores, as everywhere.
    let better = |a: &(f32, u32), b: &(f32, u32)| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1));
    match target_probs.iter().filter_map(score).max_by(better) {
        Some((_, token)) => token,
        // The two differ by less than rounding, so what was drawn from one is as good from
        // the other.
        None if draft_prob > 0.0 && target_prob > 0.0 => drafted,
        None => target_probs[0].0,
    }
}

/// What became of a draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Draft tokens that stay, from the first.
    pub n_accepted: usize,
    /// The token after them: recovered, or the bonus token of a draft that stays
    /// whole.
    pub pending: u32,
}

/// Accepts the longest prefix of `draft` that the target has chosen itself.
///
/// `chosen[i]` is its choice after `draft[..i]`, so `chosen` has one entry more
/// than `draft`. An empty draft is plain decoding.
///
/// # Panics
///
/// If `chosen.len() != draft.len() + 1`.
///
/// ```
/// # use speculate::accept::{accept, Verdict};
/// let verdict = accept(&[7, 8, 9], &[7, 8, 4, 1]);
/// assert_eq!(verdict, Verdict { n_accepted: 2, pending: 4 });
/// ```
pub fn accept(draft: &[u32], chosen: &[u32]) -> Verdict {
    assert_eq!(
        chosen.len(),
        draft.len() + 1,
        "one choice per draft token, plus one"
    );
    accept_with(draft, |i| chosen[i])
}

/// [`accept`] with choices made on demand: `choose(i)` is asked for 0, 1, … and
/// not beyond the first that differs from the draft.
///
/// ```
/// # use speculate::accept::{accept_with, Verdict};
/// let mut asked = Vec::new();
/// let verdict = accept_with(&[7, 8, 9], |i| {
///     asked.push(i);
///     [7, 5, 9, 1][i]
/// });
/// assert_eq!(verdict, Verdict { n_accepted: 1, pending: 5 });
/// assert_eq!(asked, [0, 1]);
/// ```
pub fn accept_with(draft: &[u32], mut choose: impl FnMut(usize) -> u32) -> Verdict {
    for (i, &drafted) in draft.iter().enumerate() {
        let chosen = choose(i);
        if chosen != drafted {
            return Verdict {
                n_accepted: i,
                pending: chosen,
            };
        }
    }
    Verdict {
        n_accepted: draft.len(),
        pending: choose(draft.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    #[test]
    fn an_empty_draft_is_plain_decoding() {
        let verdict = accept(&[], &[3]);
        assert_eq!((verdict.n_accepted, verdict.pending), (0, 3));
    }

    /// Numbers that add up to 1, some of them 0.
    fn probs(weights: [u32; 6]) -> TokenProbs {
        let total: u32 = weights.iter().sum();
        let share = |&(_, w): &(u32, u32)| w > 0 && total > 0;
        (0..)
            .zip(weights)
            .filter(share)
            .map(|(token, w)| (token, w as f32 / total as f32))
            .collect()
    }

    /// Draws from `probs` as drafters do.
    fn draw(probs: &TokenProbs, seed: u64, position: u64) -> u32 {
        let noise = Noise::new(seed, position);
        let score = |&(token, prob): &(u32, f32)| ln(prob) + noise.gumbel(token);
        let best = probs.iter().max_by(|a, b| score(a).total_cmp(&score(b)));
        best.expect("some token can be drawn").0
    }

    #[test]
    fn residual_acceptance_keeps_the_targets_distribution() {
        const DRAWS: u64 = 200_000;
        let cases = [
            ([3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]),
            ([3, 1, 4, 1, 5, 9], [9, 5, 1, 4, 1, 3]),
            // Tokens that only one of the two can choose.
            ([5, 5, 0, 1, 0, 2], [0, 3, 3, 1, 0, 1]),
            ([1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 2, 3]),
            ([8, 0, 0, 1, 1, 0], [8, 0, 0, 1, 1, 0]),
            ([1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 0, 0]),
        ];
        for (seed, (target, draft)) in cases.into_iter().enumerate() {
            let (target_probs, draft_probs) = (probs(target), probs(draft));
            let is_point = draft_probs.len() == 1;
            let (mut counts, mut accepted) = ([0u64; 6], 0);
            for position in 0..DRAWS {
                let drafted = draw(&draft_probs, seed as u64, position);
                let drawn_from = (!is_point).then_some(&draft_probs);
                let token = residual(drafted, &target_probs, drawn_from, seed as u64, position);
                counts[token as usize] += 1;
                accepted += u64::from(token == drafted);
            }
            let of = |probs: &TokenProbs, t: usize| {
                let found = probs.iter().find(|(token, _)| *token as usize == t);
                found.map_or(0.0, |(_, prob)| f64::from(*prob))
            };
            let n = DRAWS as f64;
            let mut chi2 = 0.0;
            for (t, &count) in counts.iter().enumerate() {
                let expected = of(&target_probs, t) * n;
                if expected == 0.0 {
                    assert_eq!(count, 0, "case {seed}: token {t} cannot be chosen");
                } else {
                    chi2 += (count as f64 - expected).powi(2) / expected;
                }
            }
            // Exceeded once in 10^6 by five degrees of freedom.
            assert!(chi2 < 35.9, "case {seed}: chi-square {chi2}, {counts:?}");
            let overlap = |t| of(&target_probs, t).min(of(&draft_probs, t));
            let overlap: f64 = (0..6).map(overlap).sum();
            let error = (accepted as f64 / n - overlap).abs();
            assert!(
                error < 5.0 * (0.25 / n).sqrt(),
                "case {seed}: accepted {accepted}"
            );
        }
    }

    proptest! {
        /// A target that chooses by what came before is decoded token by token and
        /// with a draft; the texts agree.
        #[test]
        fn any_draft_gives_the_tokens_of_none(draft in vec(0u32..3, 0..12), salt in 0u32..9) {
            let choice = |before: &[u32]| (before.iter().sum::<u32>() + salt + before.len() as u32) % 3;
            let mut asked = 0;
            let verdict = accept_with(&draft, |i| {
                assert_eq!(i, asked, "in order, each once");
                asked += 1;
                choice(&draft[..i])
            });
            let mut emitted = draft[..verdict.n_accepted].to_vec();
            emitted.push(verdict.pending);
            let mut plain = Vec::new();
            while plain.len() < emitted.len() {
                plain.push(choice(&plain));
            }
            prop_assert_eq!(emitted, plain);
            prop_assert_eq!(asked, verdict.n_accepted + 1);
            let chosen: Vec<u32> = (0..=draft.len()).map(|i| choice(&draft[..i])).collect();
            prop_assert_eq!(accept(&draft, &chosen), verdict);
        }
    }
}
