//! Draft length: how many tokens to ask the drafter for.
//!
//! A policy sees counts, not tokens; whatever it answers changes how soon the
//! tokens come, never which ones.

use crate::stats::Position;

/// What a policy may know of the request it answers for.
#[derive(Clone, Copy, Debug)]
pub struct LengthInput<'a> {
    /// The request's own drafted and accepted tokens by draft position. Shorter
    /// than the longest draft, and empty before the first.
    pub by_position: &'a [Position],
    /// Tokens the request may still emit.
    pub remaining: usize,
    /// Tokens of the request so far: prompt and output.
    pub context: usize,
    /// Requests in the round.
    pub batch_size: usize,
    /// The longest draft that has room.
    pub maximum: usize,
}

/// What became of one request's draft in one round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundOutcome {
    /// Tokens drafted.
    pub n_drafted: usize,
    /// Draft tokens accepted.
    pub n_accepted: usize,
}

/// Decides on draft lengths.
pub trait LengthPolicy: Send {
    /// The next draft's length for one request: at most `request.maximum`; 0 is
    /// plain decoding.
    fn length(&mut self, request: &LengthInput<'_>) -> usize;

    /// Takes note of a round that is over.
    fn learn(&mut self, outcome: &RoundOutcome);
}

/// The same length every round.
#[derive(Clone, Copy, Debug)]
pub struct Fixed(pub usize);

impl LengthPolicy for Fixed {
    fn length(&mut self, request: &LengthInput<'_>) -> usize {
        self.0.min(request.maximum)
    }

    fn learn(&mut self, _outcome: &RoundOutcome) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixed_never_exceeds_the_maximum() {
        let input = |maximum| LengthInput {
            by_position: &[],
            remaining: 9,
            context: 5,
            batch_size: 1,
            maximum,
        };
        let lengths = [0, 2, 4, 8].map(|maximum| Fixed(4).length(&input(maximum)));
        assert_eq!(lengths, [0, 2, 4, 4]);
    }
}
