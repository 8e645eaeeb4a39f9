//! How many experts of a mixture a step touches, predicted from what the router chose of late.
//!
//! ```text
//! s_i(n)  = the share of all experts that n rows of text i touch
//! union   = E (1 - Π_i (1 - s_i(n_i))^c)
//! ```
//!
//! Rows of one text share experts, the more the more monotonous it is, so `s` is counted: each step tells it for all
//! `n` at once, by its first rows and, where it has fewer, the newest rows of the text before it. The newest steps count
//! most; a text that has told little goes by what others did, and where these have not, rows choose independently. So
//! do texts of each other, except that all like the same experts: `c` is how much of the union of independent ones,
//! by the logarithm of what it leaves out, steps of several texts have touched (1 for a single text).
//!
//! Decisions only: which experts rows have chosen a device says ([`backend::ExpertMarks`]), if it can.

use super::Plan;
use backend::{ExpertMarks, ExpertSet, MAX_TENTATIVE};
use std::collections::VecDeque;
use std::ops::Range;

/// Rows of a text in a step, at most: a pending token and its draft.
const ROWS_MAX: usize = MAX_TENTATIVE + 1;
/// How much of what a step told of its own text still counts a step later.
const KEEP_TEXT: f64 = 0.95;
/// How much of what a step told of texts to come still counts a step later.
const KEEP_MODEL: f64 = 0.998;
/// Steps that a guess weighs, before those that were counted.
const PRIOR_STEPS: f64 = 4.0;
/// A share of experts that is not to be told from all of them.
const ALMOST_ALL: f64 = 0.999;

/// The mean of what steps told, the newest most.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    sum: f64,
    weight: f64,
}

impl Mean {
    fn learn(&mut self, keep: f64, value: f64) {
        self.sum = keep * self.sum + value;
        self.weight = keep * self.weight + 1.0;
    }

    /// The mean, where `prior` counts as so many steps as a guess weighs.
    fn or(self, prior: f64) -> f64 {
        (self.sum + PRIOR_STEPS * prior) / (self.weight + PRIOR_STEPS)
    }
}

/// The share of experts that rows of a text touch, by their number from 1.
#[derive(Clone, Copy, Debug, Default)]
struct Shares([Mean; ROWS_MAX]);

/// What is known of the experts of one text.
#[derive(Clone, Debug, Default)]
pub(super) struct TextUnions {
    shares: Shares,
    /// The experts of its newest rows, the newest last.
    recent: VecDeque<ExpertSet>,
}

/// The rows of one text in a step.
#[derive(Clone, Debug)]
pub(crate) struct TextRows {
    /// Their numbers in the step.
    pub(crate) rows: Range<usize>,
    /// How many of them stay.
    pub(crate) kept: usize,
}

/// What is known of the experts that steps touch, over all texts.
#[derive(Clone, Debug, Default)]
pub(super) struct Unions {
    /// Experts of all mixtures of the model; 0 until a step has told.
    n_experts: usize,
    shares: Shares,
    /// `c` of steps of several texts.
    overlap: Mean,
}

/// What the step after this one may touch.
#[derive(Clone, Debug)]
pub(super) struct NextUnions {
    n_experts: f64,
    overlap: f64,
    /// The share of experts that each text's rows touch, by their number from 1.
    shares: Vec<[f64; ROWS_MAX]>,
}

impl Unions {
    /// Takes note of what one text of a step has touched, by its `rows` of `marks`. Returns its share of all experts.
    pub(super) fn learn(
        &mut self,
        text: &mut TextUnions,
        marks: &ExpertMarks,
        TextRows { rows, kept }: &TextRows,
    ) -> f64 {
        if self.n_experts != marks.n_experts() {
            // Another model, or the first step.
            *self = Unions {
                n_experts: marks.n_experts(),
                ..Unions::default()
            };
        }
        let share = |set: &ExpertSet| set.len() as f64 / self.n_experts as f64;
        // Of a prompt, its newest rows are what the text goes on like.
        let newest = match rows.len() > ROWS_MAX {
            true => rows.end - ROWS_MAX..rows.end,
            false => rows.clone(),
        };
        let mut union = ExpertSet::default();
        let before = text.recent.iter().rev();
        let of_step = newest.clone().map(|row| marks.union(row..row + 1));
        let sets = of_step.chain(before.cloned()).take(ROWS_MAX);
        for (n, set) in sets.enumerate() {
            union.add(&set);
            let share = share(&union);
            text.shares.0[n].learn(KEEP_TEXT, share);
            self.shares.0[n].learn(KEEP_MODEL, share);
        }
        let kept = rows.start..rows.start + kept;
        for row in kept.start.max(kept.end.saturating_sub(ROWS_MAX))..kept.end {
            if text.recent.len() == ROWS_MAX {
                text.recent.pop_front();
            }
            text.recent.push_back(marks.union(row..row + 1));
        }
        share(&marks.union(rows.clone()))
    }

    /// Takes note of a step of several texts: of all experts, each touched one of `shares`, and together they touched
    /// `share`.
    pub(super) fn learn_overlap(&mut self, shares: &[f64], share: f64) {
        let left: f64 = shares.iter().map(|share| 1.0 - share).product();
        let is_telling = 1.0 - left < ALMOST_ALL && share < ALMOST_ALL && left < 1.0;
        if shares.len() > 1 && is_telling {
            let overlap = (1.0 - share).ln() / left.ln();
            self.overlap.learn(KEEP_MODEL, overlap.clamp(0.0, 1.0));
        }
    }

    /// What the next step of these texts may touch; nothing if no step has told.
    pub(super) fn next<'a>(
        &self,
        texts: impl Iterator<Item = &'a TextUnions>,
    ) -> Option<NextUnions> {
        (self.n_experts > 0).then(|| NextUnions {
            n_experts: self.n_experts as f64,
            overlap: self.overlap.or(1.0),
            shares: texts.map(|text| self.shares_of(text)).collect(),
        })
    }

    /// The share of experts that rows of `text` touch, by their number from 1.
    fn shares_of(&self, text: &TextUnions) -> [f64; ROWS_MAX] {
        // Every row touches as many, and each step tells it.
        let Mean { sum, weight } = self.shares.0[0];
        let one = if weight > 0.0 { sum / weight } else { 0.0 };
        let (mut of_all, mut of_text) = ([one; ROWS_MAX], [one; ROWS_MAX]);
        for n in 1..ROWS_MAX {
            let independent = |fewer: f64| 1.0 - (1.0 - fewer) * (1.0 - one);
            of_all[n] = self.shares.0[n].or(independent(of_all[n - 1]));
            of_text[n] = text.shares.0[n].or(of_all[n]).max(of_text[n - 1]);
        }
        of_text
    }
}

impl NextUnions {
    /// Experts that a step of these texts touches where each has rows for a pending token and the tokens of its plan.
    pub(super) fn of(&self, plans: &[Plan]) -> f64 {
        let left = self.shares.iter().zip(plans).map(|(shares, plan)| {
            let more = plan.tokens.min(ROWS_MAX - 1);
            1.0 - shares[more]
        });
        let left: f64 = left.product();
        let several = self.shares.len() > 1;
        let left = if several {
            left.powf(self.overlap)
        } else {
            left
        };
        self.n_experts * (1.0 - left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::length::Guesser;
    use backend::Choice;

    const EXPERTS: usize = 64;

    /// What rows have chosen that like these experts, in each of two mixtures.
    fn marks(rows: &[[usize; 2]]) -> ExpertMarks {
        let choice = |row: &[usize; 2]| row.map(|e| (e % EXPERTS, 0.5)).to_vec();
        let choices: Vec<Choice> = rows.iter().map(choice).collect();
        let mut marks = ExpertMarks::default();
        (0..2).for_each(|_| marks.push(EXPERTS, &choices));
        marks
    }

    fn all(rows: Range<usize>) -> TextRows {
        let kept = rows.len();
        TextRows { rows, kept }
    }

    fn plan(tokens: usize) -> Plan {
        let guesser = Guesser::HEAD;
        Plan { guesser, tokens }
    }

    /// Experts that `rows` rows of `text` are expected to touch.
    fn expected(unions: &Unions, text: &TextUnions, rows: usize) -> f64 {
        let next = unions.next([text].into_iter()).expect("steps have told");
        next.of(&[plan(rows - 1)])
    }

    fn near(got: f64, want: f64) -> bool {
        (got - want).abs() < 0.03 * want
    }

    #[test]
    fn rows_choose_independently_until_steps_tell() {
        let (mut unions, mut text) = (Unions::default(), TextUnions::default());
        assert!(unions.next([&text].into_iter()).is_none());
        unions.learn(&mut text, &marks(&[[0, 1]]), &all(0..1));
        for rows in [1, 2, 5, 17] {
            let one = 1.0 - 2.0 / EXPERTS as f64;
            let want = 2.0 * EXPERTS as f64 * (1.0 - one.powi(rows));
            let got = expected(&unions, &TextUnions::default(), rows as usize);
            assert!((got - want).abs() < 1e-9, "{got} of {want}");
        }
    }

    #[test]
    fn plain_steps_tell_what_several_rows_would_touch() {
        let (mut unions, mut text) = (Unions::default(), TextUnions::default());
        // Every other row chooses the same two of four experts.
        for step in 0..200 {
            unions.learn(
                &mut text,
                &marks(&[[2 * (step % 2), 2 * (step % 2) + 1]]),
                &all(0..1),
            );
        }
        assert_eq!(expected(&unions, &text, 1), 4.0);
        for rows in [2, 3, 8, 17] {
            let got = expected(&unions, &text, rows);
            assert!((7.99..10.0).contains(&got), "{rows} rows: {got}");
        }
    }

    #[test]
    fn rows_that_do_not_stay_count_in_their_step_and_not_after_it() {
        let (mut unions, mut text) = (Unions::default(), TextUnions::default());
        let step = marks(&[[0, 1], [10, 11], [20, 21]]);
        for _ in 0..300 {
            let rows = TextRows {
                rows: 0..3,
                kept: 1,
            };
            let share = unions.learn(&mut text, &step, &rows);
            assert_eq!(share, 6.0 / EXPERTS as f64);
        }
        assert!(near(expected(&unions, &text, 3), 12.0));
        // Rows before it were all like its first one.
        assert!(near(expected(&unions, &text, 9), 12.0));
    }

    #[test]
    fn a_text_goes_by_others_at_first_and_then_by_itself() {
        let mut unions = Unions::default();
        let mut same = TextUnions::default();
        for _ in 0..400 {
            unions.learn(&mut same, &marks(&[[0, 1]; 4]), &all(0..4));
        }
        let mut other = TextUnions::default();
        assert!(near(expected(&unions, &other, 4), 4.0));
        for step in 0..60 {
            let rows = [0, 1, 2, 3].map(|i| [8 * i + step, 8 * i + step + 1]);
            unions.learn(&mut other, &marks(&rows), &all(0..4));
        }
        let got = expected(&unions, &other, 4);
        assert!(got > 0.85 * 16.0, "{got}");
        assert!(expected(&unions, &same, 4) < 4.5);
    }

    #[test]
    fn texts_add_up_as_independent_ones_and_less_where_they_like_the_same_experts() {
        let mut unions = Unions::default();
        let (mut one, mut two) = (TextUnions::default(), TextUnions::default());
        for _ in 0..400 {
            unions.learn(&mut one, &marks(&[[0, 1]; 2]), &all(0..2));
            unions.learn(&mut two, &marks(&[[0, 1]; 2]), &all(0..2));
        }
        let together = |unions: &Unions| {
            let next = unions.next([&one, &two].into_iter()).expect("steps told");
            next.of(&[plan(1), plan(1)])
        };
        let share = 2.0 / EXPERTS as f64;
        let independent = 2.0 * EXPERTS as f64 * (1.0 - (1.0 - share).powi(2));
        assert!(near(together(&unions), independent));
        for _ in 0..400 {
            unions.learn_overlap(&[share, share], share);
        }
        assert!(near(together(&unions), 4.0), "{}", together(&unions));
        // Steps of one text, or of all experts, tell nothing of it.
        let before = together(&unions);
        unions.learn_overlap(&[0.5], 0.5);
        unions.learn_overlap(&[0.9, 1.0], 1.0);
        assert_eq!(together(&unions), before);
    }

    #[test]
    fn the_newest_rows_of_a_prompt_are_what_the_text_goes_on_like() {
        let (mut unions, mut text) = (Unions::default(), TextUnions::default());
        let mut rows: Vec<[usize; 2]> = (0..80).map(|i| [2 * i, 2 * i + 1]).collect();
        rows.extend([[0, 1]; 20]);
        unions.learn(&mut text, &marks(&rows), &all(0..100));
        assert!(text.recent.len() == ROWS_MAX && text.recent.iter().all(|set| set.len() == 4));
        let first = expected(&unions, &text, 9);
        let rows = 1.0 - 2.0 / EXPERTS as f64;
        assert!(
            first < 2.0 * EXPERTS as f64 * (1.0 - rows.powi(9)),
            "{first}"
        );
        // Another model starts again.
        let mut other = ExpertMarks::default();
        other.push(8, &[vec![(0, 1.0)]]);
        unions.learn(&mut TextUnions::default(), &other, &all(0..1));
        assert_eq!(expected(&unions, &TextUnions::default(), 1), 1.0);
    }
}
