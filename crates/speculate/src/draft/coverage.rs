//! Whether a head's shortlist has the tokens that streams write.
//!
//! A shortlist makes guesses cheap, and a token outside of it cannot be guessed. What
//! lies outside depends on the text: vocabularies are ordered by how often a token
//! occurs in texts that are mostly English. So each stream's own tokens are counted,
//! prompt and reply alike, as part of its draft state, and a stream whose tokens are often
//! missing is drafted for from the whole vocabulary.

use super::{DraftRequest, DraftState};
use models::Shortlist;

/// Share of a stream's tokens that the shortlist must have. A missing token costs the
/// rest of a draft, and the shortlist saves most of what drafting costs. Chosen, not
/// measured: no model with a large vocabulary and text beyond its list was at hand.
const ENOUGH: f32 = 0.9;

/// Tokens that the share is taken over, later ones weighing more.
const MEMORY: f32 = 128.0;

/// The share of one stream's tokens that a shortlist has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Coverage {
    /// Share of listed tokens among the newest.
    listed: f32,
    /// Tokens seen, [`MEMORY`] at most.
    tokens: f32,
}

impl Default for Coverage {
    fn default() -> Self {
        Coverage {
            listed: 1.0,
            tokens: 0.0,
        }
    }
}

impl Coverage {
    fn observe(&mut self, is_listed: bool) {
        self.tokens = (self.tokens + 1.0).min(MEMORY);
        self.listed += (f32::from(u8::from(is_listed)) - self.listed) / self.tokens;
    }
}

/// Counts the tokens of `requests` that are new since the last round, in the coverage that
/// `of` finds in a state. Whether `list` has enough of what those of them write that want a
/// draft.
pub(super) fn is_enough(
    list: Option<&Shortlist>,
    requests: &mut [DraftRequest<'_>],
    of: impl Fn(&mut dyn DraftState) -> &mut Coverage,
) -> bool {
    let Some(list) = list else { return false };
    let mut enough = true;
    for request in requests {
        let following = request.following();
        let coverage = of(request.state);
        for token in following {
            coverage.observe(list.ids().binary_search(token).is_ok());
        }
        enough &= request.limit == 0 || coverage.listed >= ENOUGH;
    }
    enough
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_covered_until_it_writes_other_tokens() {
        let mut coverage = Coverage::default();
        for _ in 0..200 {
            coverage.observe(true);
        }
        assert_eq!(coverage.listed, 1.0);
        let missed = (0..50).find(|_| {
            coverage.observe(false);
            coverage.listed < ENOUGH
        });
        assert!(matches!(missed, Some(9..20)), "{missed:?}");
        let back = (0..500).find(|_| {
            coverage.observe(true);
            coverage.listed >= ENOUGH
        });
        assert!(back.is_some_and(|n| n < 20), "{back:?}");
    }
}
