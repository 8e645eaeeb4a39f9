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
//! Pure functions of tokens: no model, no cache, no clock, no logits.

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
