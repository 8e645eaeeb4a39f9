//! When a head that guesses token by token, as on a CPU, stops before the end of its plan.
//!
//! A plan counts on what guesses are usually worth. Once a head has been unsure, those that would follow are rarely
//! reached, and each takes its time whether it is verified or not. So before each guess its expected tokens are compared
//! with the tokens that its time usually brings; whether a guess that was made is worth a row is decided by how sure the
//! head was of it (`worth.rs`). Where a device chains all guesses by itself, nobody can stop it.

use super::worth::{N_CLASSES, class};
use super::{Guesser, LengthInput, Lengths, Longest, Plan};

/// When a draft of a text ends early, by how sure the head was of its guesses so far.
#[derive(Clone, Debug)]
pub struct StopRule {
    /// The number of the head that guesses.
    head: usize,
    /// The chance that a guess of each class of confidences is accepted if those before it are.
    chances: [f64; N_CLASSES],
    /// The chance that the guess at each position is accepted if those before it are, before its confidence is known.
    by_position: Vec<f64>,
    /// The tokens that are usually written in the time that one more guess takes this text.
    least: f64,
}

impl StopRule {
    /// The head that the rule is for.
    pub(crate) fn head(&self) -> usize {
        self.head
    }

    /// The tokens that one more guess is expected to bring, after guesses of such `confidences`, less those that are
    /// usually written in its time.
    pub(crate) fn gain(&self, confidences: &[f32]) -> f64 {
        let reached: f64 = confidences
            .iter()
            .map(|&c| self.chances[class(c)])
            .product();
        let next = self.by_position.get(confidences.len());
        reached * next.copied().unwrap_or(0.0) - self.least
    }
}

impl Lengths {
    /// The rule of each stream's draft in `plans`; `None` for copies, for a single guess, for drafts that must not be cut,
    /// where the device chains guesses by itself, and before times are known.
    pub(crate) fn stop_rules(
        &self,
        streams: &[LengthInput<'_>],
        plans: &[Plan],
    ) -> Vec<Option<StopRule>> {
        let context = streams.iter().map(|s| s.context).max().unwrap_or(0);
        if self.records || !self.costs.has(context) {
            return vec![None; streams.len()];
        }
        let rate = self.rate(streams, plans);
        let longest = Longest::of(plans.iter().copied());
        let rule = |(stream, plan): (&LengthInput<'_>, &Plan)| {
            let Guesser::Head(head) = plan.guesser else {
                return None;
            };
            if !stream.may_be_cut || plan.tokens < 2 {
                return None;
            }
            let ms = |tokens| {
                let mut drafts = longest;
                drafts.by_head[head] = tokens;
                self.costs.draft_ms(context, streams.len(), drafts)
            };
            let most = longest.by_head[head];
            let guess = (ms(most) - ms(1)) / (most - 1) as f64;
            let sharing = plans
                .iter()
                .filter(|other| other.guesser == plan.guesser && other.tokens > 0);
            let guess = guess / sharing.count() as f64;
            Some(StopRule {
                head,
                chances: std::array::from_fn(|class| self.chance_of_class(stream, head, class)),
                by_position: (0..plan.tokens)
                    .map(|position| self.chance(stream, plan.guesser, position))
                    .collect(),
                least: rate * guess.max(0.0),
            })
        };
        streams.iter().zip(plans).map(rule).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::length::{Costs, DraftLength, Guessers, Ledger, MAX_HEADS, RoundCost};
    use std::time::Duration;

    /// A machine on which a step takes 10 ms however many rows it has, and each guess 2 ms.
    fn timed(lengths: &mut Lengths) {
        for rows in [1, 2, 5, 9].repeat(3) {
            lengths.took(&RoundCost {
                streams: 1,
                rows,
                context: 100,
                experts: None,
                drafts: Longest::by(Guesser::HEAD, rows - 1),
                verify: Duration::from_millis(10),
                draft: Duration::from_millis(2 * (rows - 1) as u64),
                by_head: [None; MAX_HEADS],
            });
        }
    }

    fn input(ledger: &Ledger) -> LengthInput<'_> {
        LengthInput {
            may_be_cut: true,
            ledger,
            wish: DraftLength::UpTo(8),
            room: 16,
            context: 100,
            heads: Guessers::heads(1),
            pinned: None,
            copy: None,
        }
    }

    const PLAN: Plan = Plan {
        guesser: Guesser::HEAD,
        tokens: 4,
    };

    #[test]
    fn a_draft_goes_on_while_the_head_is_sure_and_ends_once_it_is_not() {
        let mut lengths = Lengths::default();
        timed(&mut lengths);
        let ledger = Ledger::default();
        let rules = lengths.stop_rules(&[input(&ledger)], &[PLAN]);
        let rule = rules[0].as_ref().expect("times are known");
        assert!(rule.gain(&[0.97]) > 0.0);
        assert!(rule.gain(&[0.97, 0.95, 0.97]) > 0.0);
        assert!(rule.gain(&[0.05]) < 0.0);
        assert!(rule.gain(&[0.97, 0.05]) < 0.0);
        // Nothing is planned after the last one.
        assert!(rule.gain(&[0.99; 4]) < 0.0);
    }

    #[test]
    fn guesses_that_cost_nothing_are_all_made() {
        let mut lengths = Lengths::default();
        timed(&mut lengths);
        let free = lengths.costs().points().into_iter().map(|mut point| {
            point.ns = 10_000_000;
            point
        });
        lengths.set_costs(Costs::of_points(&free.collect::<Vec<_>>()));
        let ledger = Ledger::default();
        let rules = lengths.stop_rules(&[input(&ledger)], &[PLAN]);
        let rule = rules[0].as_ref().expect("times are known");
        assert!(rule.gain(&[0.05; 3]) >= 0.0);
    }

    #[test]
    fn only_drafts_that_may_be_cut_and_are_not_recorded_end_early() {
        let ledger = Ledger::default();
        let whole = LengthInput {
            may_be_cut: false,
            ..input(&ledger)
        };
        let one = Plan { tokens: 1, ..PLAN };
        let copied = Plan {
            guesser: Guesser::Ngram,
            ..PLAN
        };
        let mut lengths = Lengths::default();
        assert!(lengths.stop_rules(&[input(&ledger)], &[PLAN])[0].is_none());
        timed(&mut lengths);
        let inputs = [whole, input(&ledger), input(&ledger), input(&ledger)];
        let rules = lengths.stop_rules(&inputs, &[PLAN, one, copied, PLAN]);
        let has: Vec<bool> = rules.iter().map(Option::is_some).collect();
        assert_eq!(has, [false, false, false, true]);
        let mut recording = Lengths::on_device(true);
        timed(&mut recording);
        assert!(recording.stop_rules(&[input(&ledger)], &[PLAN])[0].is_none());
    }
}
