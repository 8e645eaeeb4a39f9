//! Whether a head's shortlist has the tokens that streams write.
//!
//! A shortlist makes guesses cheap, and a token outside of it cannot be guessed. What
//! lies outside depends on the text: vocabularies are ordered by how often a token
//! occurs in texts that are mostly English. So each stream's own tokens are counted,
//! prompt and reply alike, and a stream whose tokens are often missing is drafted for
//! from the whole vocabulary.

use super::DraftRequest;
use models::Shortlist;

/// Share of a stream's tokens that the shortlist must have. A missing token costs the
/// rest of a draft, and the shortlist saves most of what drafting costs. Chosen, not
/// measured: no model with a large vocabulary and text beyond its list was at hand.
const ENOUGH: f32 = 0.9;

/// Tokens that the share is taken over, later ones weighing more.
const MEMORY: f32 = 128.0;

/// What is known of one stream.
#[derive(Clone, Copy, Debug)]
struct Share {
    listed: f32,
    tokens: f32,
}

impl Share {
    const NEW: Share = Share {
        listed: 1.0,
        tokens: 0.0,
    };

    fn observe(&mut self, is_listed: bool) {
        self.tokens = (self.tokens + 1.0).min(MEMORY);
        self.listed += (f32::from(u8::from(is_listed)) - self.listed) / self.tokens;
    }
}

/// Shares of the tokens that a shortlist has, by the target's slot.
#[derive(Debug, Default)]
pub(super) struct Coverage {
    streams: Vec<Share>,
}

impl Coverage {
    /// Forgets what the stream in `slot` wrote.
    pub(super) fn open(&mut self, slot: usize) {
        let slots = self.streams.len().max(slot + 1);
        self.streams.resize(slots, Share::NEW);
        self.streams[slot] = Share::NEW;
    }

    /// Counts the tokens of `requests` that are new since the last round. Whether
    /// `list` has enough of what those of them write that want a draft.
    pub(super) fn is_enough(
        &mut self,
        list: Option<&Shortlist>,
        requests: &[DraftRequest<'_>],
    ) -> bool {
        let Some(list) = list else { return false };
        let mut enough = true;
        for request in requests {
            let share = &mut self.streams[request.sequence.slot()];
            for token in request.following() {
                share.observe(list.ids().binary_search(token).is_ok());
            }
            enough &= request.limit == 0 || share.listed >= ENOUGH;
        }
        enough
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_covered_until_it_writes_other_tokens() {
        let mut share = Share::NEW;
        for _ in 0..200 {
            share.observe(true);
        }
        assert_eq!(share.listed, 1.0);
        let missed = (0..50).find(|_| {
            share.observe(false);
            share.listed < ENOUGH
        });
        assert!(matches!(missed, Some(9..20)), "{missed:?}");
        let back = (0..500).find(|_| {
            share.observe(true);
            share.listed >= ENOUGH
        });
        assert!(back.is_some_and(|n| n < 20), "{back:?}");
    }

    #[test]
    fn a_new_stream_owes_nothing_to_the_one_before() {
        let mut coverage = Coverage::default();
        coverage.open(1);
        coverage.streams[1].observe(false);
        assert_eq!(coverage.streams[1].listed, 0.0);
        coverage.open(1);
        assert_eq!(coverage.streams[1].listed, 1.0);
    }
}
