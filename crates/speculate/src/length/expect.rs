//! What a round promises before it runs, by what is known of costs and acceptance.

use super::{Guesser, LengthInput, Lengths, Longest, Plan};

/// What is known of one stream's draft before it is verified.
#[derive(Clone, Copy, Debug)]
pub struct DraftInput<'a> {
    /// What the stream's next draft depended on when this one was made.
    pub input: LengthInput<'a>,
    /// Who has guessed it.
    pub guesser: Guesser,
    /// Tokens of the draft.
    pub drafted: usize,
    /// The first of them that the drafter has guessed; a constraint leaves no choice about the
    /// others.
    pub guessed: usize,
    /// How sure the drafter is of each of the first ones; empty where it did not tell.
    pub confidences: &'a [f32],
}

/// What a round is expected to bring and to take.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Expectation {
    /// Tokens for each stream.
    pub tokens: Vec<f64>,
    /// Experts that the step touches, each counted in every mixture; absent where no step has told.
    pub experts: Option<f64>,
    /// Milliseconds of the round; absent where no round of such a context was timed.
    pub ms: Option<f64>,
    /// Milliseconds of a round of the same streams without drafts, if one like it was timed.
    pub plain_ms: Option<f64>,
    /// Whether rounds of as many streams without drafts were timed often enough to be believed;
    /// otherwise `plain_ms` is derived from rounds of other kinds.
    pub is_plain_measured: bool,
}

impl Lengths {
    /// What a round with these drafts is expected to bring and to take, where the longest of the
    /// texts has `context` tokens.
    pub fn expect(&self, drafts: &[DraftInput<'_>], context: usize) -> Expectation {
        let plan = |draft: &DraftInput<'_>| Plan {
            guesser: draft.guesser,
            tokens: draft.drafted,
        };
        let plans: Vec<Plan> = drafts.iter().map(plan).collect();
        let streams = drafts.len();
        let is_known = self.costs.has(context);
        let next = self.next(drafts.iter().map(|draft| &draft.input), context);
        Expectation {
            tokens: drafts.iter().map(|draft| self.tokens(draft)).collect(),
            experts: next.unions.as_ref().map(|unions| unions.of(&plans)),
            ms: is_known.then(|| {
                let drafted: usize = plans.iter().map(|plan| plan.tokens).sum();
                self.round_ms(&next, &plans, (streams + drafted) as f64)
            }),
            plain_ms: self.costs.plain_step(context, streams),
            is_plain_measured: self.costs.is_believed(
                context,
                streams,
                streams,
                Longest::default(),
            ),
        }
    }

    /// Tokens that a round is expected to bring a stream: its own, and each of the draft that is
    /// accepted. Forced tokens are, if those before them are.
    fn tokens(&self, draft: &DraftInput<'_>) -> f64 {
        let guessed = draft.guessed.min(draft.drafted);
        let (mut reached, mut tokens) = (1.0, 1.0);
        for position in 0..guessed {
            reached *= match (draft.guesser, draft.confidences.get(position)) {
                (Guesser::Head(head), Some(&confidence)) => {
                    self.chance_if_sure(&draft.input, head, confidence)
                }
                _ => self.chance(&draft.input, draft.guesser, position),
            };
            tokens += reached;
        }
        tokens + reached * (draft.drafted - guessed) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::length::{DraftLength, Guessers, Ledger, MAX_HEADS, RoundCost};
    use std::time::Duration;

    /// A draft of two guesses and a forced token.
    fn input(ledger: &Ledger) -> DraftInput<'_> {
        DraftInput {
            input: LengthInput {
                may_be_cut: false,
                ledger,
                wish: DraftLength::UpTo(3),
                room: 16,
                context: 100,
                heads: Guessers::heads(1),
                pinned: None,
                copy: None,
            },
            guesser: Guesser::HEAD,
            drafted: 3,
            guessed: 2,
            confidences: &[],
        }
    }

    #[test]
    fn a_round_is_expected_to_be_as_those_before_it() {
        let (mut lengths, mut ledger) = (Lengths::default(), Ledger::default());
        let first = lengths.expect(&[input(&ledger)], 100);
        assert_eq!((first.ms, first.plain_ms), (None, None));
        for _ in 0..400 {
            lengths.verified(&mut ledger, Guesser::HEAD, 2, 1);
        }
        for (rows, asked) in [(1, 0), (4, 3)].repeat(3) {
            lengths.took(&RoundCost {
                streams: 1,
                rows,
                context: 100,
                experts: None,
                drafts: Longest::by(Guesser::HEAD, asked),
                verify: Duration::from_millis(10 + rows as u64),
                draft: Duration::from_millis(asked as u64),
                by_head: [None; MAX_HEADS],
            });
        }
        let expected = lengths.expect(&[input(&ledger)], 100);
        assert_eq!(expected.ms.map(f64::round), Some(17.0));
        assert_eq!(expected.plain_ms.map(f64::round), Some(11.0));
        assert!(expected.is_plain_measured);
        // One token of its own and the first guess; what comes after the second does not come.
        assert!((2.0..2.6).contains(&expected.tokens[0]), "{expected:?}");
    }
}
