//! Which guesses of a draft are worth a row, once the drafter has told how sure it is of each.
//!
//! A draft is planned by how often guesses at each position were accepted. How sure a head is of a guess, the probability
//! of its likeliest token, says more: so drafts are cut again before they are verified, all of a batch together, to the
//! most expected tokens a millisecond. What a head's confidence is worth is counted, for the model and for each text, in
//! classes of log-odds.

use super::ledger::{Acceptance, from_log_odds, log_odds};
use super::{Guesser, KEEP_MODEL, KEEP_STREAM, Ledger, LengthInput, Lengths, Longest, Plan};

/// Log-odds of the first class of confidences, and how far classes are apart.
const CLASSES: (f64, f64) = (-3.0, 0.75);
/// Classes of confidences.
pub(super) const N_CLASSES: usize = 13;

/// How many times as long a step is taken to last whose kind is not recorded. The first two take twice as long and more;
/// part of that is worth it for those that follow.
const RECORDING: f64 = 1.25;

/// A draft that was made and not verified yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Drafted<'a> {
    /// What its length depended on.
    pub(crate) input: LengthInput<'a>,
    /// What was planned.
    pub(crate) plan: Plan,
    /// Tokens of the draft.
    pub(crate) tokens: usize,
    /// The first of these, which a constraint left no choice about.
    pub(crate) given: usize,
    /// Whether it may be cut.
    pub(crate) may_be_cut: bool,
    /// How sure the drafter is of each token; empty where it does not say.
    pub(crate) confidences: &'a [f32],
}

/// The class of a confidence.
pub(super) fn class(confidence: f32) -> usize {
    let odds = log_odds(f64::from(confidence));
    let class = (odds - CLASSES.0) / CLASSES.1;
    (class.round().max(0.0) as usize).min(N_CLASSES - 1)
}

/// The chance, for all texts, that a guess with a confidence of this class is accepted: what the head says itself, as far
/// as nothing is known.
fn prior(all: &Acceptance, class: usize) -> f64 {
    let own = from_log_odds(CLASSES.0 + class as f64 * CLASSES.1);
    all.chance(class, own)
}

impl Lengths {
    /// Takes note of how sure `head` was of the guesses that a round has tested, of which the first `n_right` were
    /// right.
    pub(crate) fn was_sure(
        &mut self,
        ledger: &mut Ledger,
        head: usize,
        confidences: &[f32],
        n_right: usize,
    ) {
        if confidences.is_empty() {
            return;
        }
        let tested = confidences.iter().enumerate();
        let tested = tested.map(|(i, &confidence)| (class(confidence), i < n_right));
        let all = &mut self.acceptance.by_confidence[head];
        let own = &mut ledger.acceptance.by_confidence[head];
        own.learn_each(KEEP_STREAM, tested.clone());
        own.fit_shift(|class| prior(all, class));
        all.learn_each(KEEP_MODEL, tested);
    }

    /// Takes note that `n_kept` tokens of a draft of `head` were kept, of `n_drafted`.
    pub(crate) fn cut(&mut self, head: usize, n_drafted: usize, n_kept: usize) {
        if n_drafted > 0 {
            self.kept[head].learn(KEEP_MODEL, n_drafted, n_kept);
        }
    }

    /// How many tokens of each of `drafts` are worth a row, the first one always: those of most expected tokens a
    /// millisecond. Steps of so many
    /// rows of which `is_recorded` says no take longer, the first times.
    pub(crate) fn worth(
        &self,
        drafts: &[Drafted<'_>],
        is_recorded: &dyn Fn(usize) -> bool,
    ) -> Vec<usize> {
        let all: Vec<usize> = drafts.iter().map(|draft| draft.tokens).collect();
        let context = drafts.iter().map(|draft| draft.input.context).max();
        let context = context.unwrap_or(0);
        if !self.costs.has(context) {
            return all;
        }
        let chances: Vec<Vec<f64>> = drafts.iter().map(|draft| self.chances(draft)).collect();
        let can_cut = |i: usize| drafts[i].may_be_cut;
        let mut kept: Vec<usize> = (0..drafts.len())
            .map(|i| {
                if can_cut(i) {
                    drafts[i].given.max(1).min(all[i])
                } else {
                    all[i]
                }
            })
            .collect();
        let next = self.next(drafts.iter().map(|draft| &draft.input), context);
        let longest = Longest::of(drafts.iter().map(|draft| draft.plan));
        let drafting = self.costs.draft_ms(context, drafts.len(), longest);
        let ms = |kept: &[usize]| {
            let plans = drafts.iter().zip(kept).map(|(draft, &tokens)| Plan {
                tokens,
                ..draft.plan
            });
            let plans: Vec<Plan> = plans.collect();
            let experts = next.unions.as_ref().map(|unions| unions.of(&plans));
            let rows = kept.len() + kept.iter().sum::<usize>();
            let verify = self.costs.verify_ms(context, kept.len(), (rows, experts));
            drafting + verify * if is_recorded(rows) { 1.0 } else { RECORDING }
        };
        let mut reached: Vec<f64> = (0..drafts.len())
            .map(|i| chances[i][..kept[i]].iter().product())
            .collect();
        let mut tokens: f64 = drafts.len() as f64;
        for (chances, &kept) in chances.iter().zip(&kept) {
            let mut reached = 1.0;
            for chance in &chances[..kept] {
                reached *= chance;
                tokens += reached;
            }
        }
        let (mut best, mut best_rate) = (kept.clone(), tokens / ms(&kept));
        loop {
            let likeliest = (0..drafts.len())
                .filter(|&i| can_cut(i) && kept[i] < all[i])
                .map(|i| (i, reached[i] * chances[i][kept[i]]))
                .max_by(|a, b| a.1.total_cmp(&b.1));
            let Some((i, chance)) = likeliest else {
                return best;
            };
            kept[i] += 1;
            reached[i] = chance;
            tokens += chance;
            let rate = tokens / ms(&kept);
            if rate > best_rate {
                best_rate = rate;
                best.copy_from_slice(&kept);
            }
        }
    }

    /// The chance that a guess of `head` is accepted of which it is so sure, if those before it are.
    pub(super) fn chance_if_sure(
        &self,
        stream: &LengthInput<'_>,
        head: usize,
        confidence: f32,
    ) -> f64 {
        self.chance_of_class(stream, head, class(confidence))
    }

    /// [`Self::chance_if_sure`] for a confidence of this class.
    pub(super) fn chance_of_class(
        &self,
        stream: &LengthInput<'_>,
        head: usize,
        class: usize,
    ) -> f64 {
        let all = &self.acceptance.by_confidence[head];
        let own = &stream.ledger.acceptance.by_confidence[head];
        own.chance(class, prior(all, class))
    }

    /// The chance that each token of a draft is accepted if those before it are.
    fn chances(&self, draft: &Drafted<'_>) -> Vec<f64> {
        let guesser = draft.plan.guesser;
        let chance = |i: usize| match (guesser, draft.confidences.get(i)) {
            _ if i < draft.given => 1.0,
            (Guesser::Head(head), Some(&confidence)) => {
                self.chance_if_sure(&draft.input, head, confidence)
            }
            _ => self.chance(&draft.input, guesser, i),
        };
        (0..draft.tokens).map(chance).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::length::{DraftLength, Guessers, MAX_HEADS, RoundCost};
    use std::time::Duration;

    /// A machine on which a step takes 10 ms and 1 for each further row, and a draft nothing.
    fn timed() -> Lengths {
        let mut lengths = Lengths::default();
        for rows in [1, 2, 5, 9, 17].repeat(3) {
            lengths.took(&RoundCost {
                streams: 1,
                rows,
                context: 100,
                experts: None,
                drafts: Longest::by(Guesser::HEAD, rows - 1),
                verify: Duration::from_millis(9 + rows as u64),
                draft: Duration::ZERO,
                by_head: [None; MAX_HEADS],
            });
        }
        lengths
    }

    fn draft<'a>(ledger: &'a Ledger, given: usize, confidences: &'a [f32]) -> Drafted<'a> {
        Drafted {
            input: LengthInput {
                may_be_cut: true,
                ledger,
                wish: DraftLength::UpTo(8),
                room: 16,
                context: 100,
                heads: Guessers::heads(1),
                pinned: None,
                copy: None,
            },
            plan: Plan {
                guesser: Guesser::HEAD,
                tokens: confidences.len(),
            },
            tokens: confidences.len(),
            given,
            may_be_cut: true,
            confidences,
        }
    }

    #[test]
    fn a_draft_ends_before_a_guess_that_is_not_worth_a_row() {
        let (lengths, ledger) = (timed(), Ledger::default());
        let worth =
            |confidences: &[f32]| lengths.worth(&[draft(&ledger, 0, confidences)], &|_| true)[0];
        assert_eq!(worth(&[0.99, 0.99, 0.99, 0.99]), 4);
        assert_eq!(worth(&[0.99, 0.99, 0.04, 0.99]), 2);
        assert_eq!(worth(&[0.02, 0.99, 0.99, 0.99]), 1);
        assert_eq!(worth(&[0.02, 0.02, 0.99, 0.99]), 1);
        // Two tokens that come for sure are worth a row that may fail.
        assert_eq!(worth(&[0.6, 0.99, 0.99, 0.99]), 4);
        // Forced tokens are right whatever the head thinks of them.
        let forced = lengths.worth(&[draft(&ledger, 2, &[0.01, 0.01, 0.99])], &|_| true);
        assert_eq!(forced, [3]);
        // A step that a device has to record first is not worth it for one token more or less.
        let recorded = |rows| rows != 4;
        assert_eq!(
            lengths.worth(&[draft(&ledger, 0, &[0.99, 0.99, 0.9])], &recorded),
            [2]
        );
        // In a batch, rows go to the likeliest guesses.
        let (sure, unsure) = ([0.99; 4], [0.3; 4]);
        let both = [draft(&ledger, 0, &sure), draft(&ledger, 0, &unsure)];
        let both = lengths.worth(&both, &|_| true);
        assert_eq!(both[0], 4);
        assert!(both[1] < 2, "{both:?}");
        // Before any round was timed, drafts stay as they were planned.
        let unknown = Lengths::default().worth(&[draft(&ledger, 0, &[0.02; 3])], &|_| true);
        assert_eq!(unknown, [3]);
    }

    #[test]
    fn what_a_confidence_is_worth_is_counted() {
        let (mut lengths, mut ledger) = (timed(), Ledger::default());
        let boast = [0.95; 4];
        fn worth(lengths: &Lengths, ledger: &Ledger) -> usize {
            lengths.worth(&[draft(ledger, 0, &[0.95; 4])], &|_| true)[0]
        }
        assert_eq!(worth(&lengths, &ledger), 4);
        // A head that is sure of itself, and wrong.
        (0..40).for_each(|_| lengths.was_sure(&mut ledger, 0, &boast[..1], 0));
        assert_eq!(worth(&lengths, &ledger), 1);
        let fresh = Ledger::default();
        assert_eq!(worth(&lengths, &fresh), 1, "a new text goes by the others");
        // In this text it is right again.
        let mut other = Ledger::default();
        (0..40).for_each(|_| lengths.was_sure(&mut other, 0, &boast, 4));
        assert_eq!(worth(&lengths, &other), 4);
    }

    #[test]
    fn drafts_of_a_batch_are_made_of_one_length() {
        let mut lengths = timed();
        let (mut often, mut seldom) = (Ledger::default(), Ledger::default());
        for _ in 0..40 {
            lengths.verified(&mut often, Guesser::HEAD, 8, 5);
            lengths.verified(&mut seldom, Guesser::HEAD, 8, 1);
        }
        let input = |ledger, may_be_cut, room| LengthInput {
            may_be_cut,
            room,
            ..draft(ledger, 0, &[]).input
        };
        let plans = |may_be_cut, room| {
            let streams = [
                input(&often, may_be_cut, 16),
                input(&seldom, may_be_cut, room),
            ];
            let plans = lengths.choose(&streams);
            [plans[0].tokens, plans[1].tokens]
        };
        let [long, short] = plans(false, 16);
        assert!(short > 0 && short < long, "{short}, {long}");
        let [first, second] = plans(true, 16);
        assert!(first == second && first >= long, "{first}, {second}");
        assert_eq!(plans(true, 2)[1], 2, "no longer than there is room");
    }

    #[test]
    fn plans_are_longer_where_unsure_guesses_are_cut() {
        let (mut lengths, mut ledger) = (timed(), Ledger::default());
        for _ in 0..60 {
            lengths.verified(&mut ledger, Guesser::HEAD, 8, 2);
        }
        let plan = |lengths: &Lengths| lengths.choose(&[draft(&ledger, 0, &[]).input])[0].tokens;
        let before = plan(&lengths);
        assert!(before < 6, "{before}");
        (0..60).for_each(|_| lengths.cut(0, 8, 1));
        assert!(plan(&lengths) > before, "{} of {before}", plan(&lengths));
    }
}
