//! What is known of guesses: how often they were accepted, and what drafting has cost a
//! stream.

use super::RoundCost;
use super::guesser::{Guesser, MAX_HEADS};
use super::unions::TextUnions;

/// Plain steps that speculation may lose a stream before it pauses.
pub const LOSS_STEPS: f64 = 4.0;
/// Part of a stream's time that speculation may lose besides.
pub const LOSS_SHARE: f64 = 0.02;

/// Rounds that a guess about a stream's acceptance weighs, before its own.
const PRIOR_ROUNDS: f64 = 4.0;
/// Plain rounds after which a draft is tried again; twice as many after each try
/// that brought nothing, up to the second number.
const PROBE: (u32, u32) = (4, 64);

/// Rounds without a draft of a head, where there are several, after which it is tried again; twice as many after
/// each try that brought less than the others do, up to the second number.
const TRIAL: (u32, u32) = (8, 256);
/// How much of a round's pace still counts a round later.
const KEEP_PACE: f64 = 0.96;

/// The variance, between texts, of how far the log-odds of acceptance lie from those of all texts: texts of one
/// model differ by about 1 either way.
const SHIFT_VARIANCE: f64 = 1.0;
/// The largest shift of log-odds that a text is believed to have.
const MOST_SHIFT: f64 = 4.0;
/// Steps of Newton's method that fit a shift.
const SHIFT_STEPS: usize = 4;

/// How often guesses were accepted, by position in the draft, of those whose
/// predecessors all were. Newer rounds count more.
#[derive(Clone, Debug, Default)]
pub(super) struct Acceptance {
    by_position: Vec<Tested>,
    /// How far the log-odds of acceptance lie from the prior's, at all positions alike: a text whose first guesses
    /// fail has few right ones further on.
    shift: f64,
}

/// Weighted counts of one position.
#[derive(Clone, Copy, Debug, Default)]
struct Tested {
    tested: f64,
    accepted: f64,
}

/// The log-odds of `p`, which is kept away from 0 and 1.
pub(super) fn log_odds(p: f64) -> f64 {
    let p = p.clamp(1e-4, 1.0 - 1e-4);
    (p / (1.0 - p)).ln()
}

/// The chance of which `x` are the log-odds.
pub(super) fn from_log_odds(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

impl Acceptance {
    /// Takes note of a verified draft; `keep` of what was known before still counts.
    pub(super) fn learn(&mut self, keep: f64, n_drafted: usize, n_accepted: usize) {
        let tested = (n_accepted + 1).min(n_drafted);
        self.learn_each(keep, (0..tested).map(|i| (i, i < n_accepted)));
    }

    /// Takes note of guesses that were tested in one round, by position or by whatever else they are counted;
    /// `keep` of what was known before still counts.
    pub(super) fn learn_each(&mut self, keep: f64, tested: impl Iterator<Item = (usize, bool)>) {
        for position in &mut self.by_position {
            position.tested *= keep;
            position.accepted *= keep;
        }
        for (i, is_accepted) in tested {
            if self.by_position.len() <= i {
                self.by_position.resize(i + 1, Tested::default());
            }
            self.by_position[i].tested += 1.0;
            self.by_position[i].accepted += f64::from(u8::from(is_accepted));
        }
    }

    /// Fits the shift of this text to what was tested in it: the likeliest one under a normal distribution of
    /// shifts. `prior` is the chance at a position for all texts.
    pub(super) fn fit_shift(&mut self, prior: impl Fn(usize) -> f64) {
        let odds: Vec<f64> = (0..self.by_position.len())
            .map(|i| log_odds(prior(i)))
            .collect();
        for _ in 0..SHIFT_STEPS {
            let mut slope = -self.shift / SHIFT_VARIANCE;
            let mut curvature = 1.0 / SHIFT_VARIANCE;
            for (position, odds) in self.by_position.iter().zip(&odds) {
                let chance = from_log_odds(odds + self.shift);
                slope += position.accepted - position.tested * chance;
                curvature += position.tested * chance * (1.0 - chance);
            }
            self.shift = (self.shift + slope / curvature).clamp(-MOST_SHIFT, MOST_SHIFT);
        }
    }

    /// The chance at `position`, where each position's answer stands for the next one as far as little is known of
    /// that, and `first` for the first.
    pub(super) fn prior(&self, position: usize, first: f64) -> f64 {
        (0..=position).fold(first, |prior, p| self.chance(p, prior))
    }

    /// The chance that the guess at `position` is accepted if those before it
    /// are; `prior` is the answer where nothing is known.
    pub(super) fn chance(&self, position: usize, prior: f64) -> f64 {
        let prior = match self.shift {
            0.0 => prior,
            shift => from_log_odds(log_odds(prior) + shift),
        };
        let known = self.by_position.get(position).copied().unwrap_or_default();
        (known.accepted + PRIOR_ROUNDS * prior) / (known.tested + PRIOR_ROUNDS)
    }
}

/// Matches of this many tokens and more share what is known of the copies after them.
const LONGEST_MATCH: usize = 5;

/// How often guesses were accepted, by who made them.
#[derive(Clone, Debug, Default)]
pub(super) struct Acceptances {
    /// How often guesses of each head were accepted.
    pub(super) heads: [Acceptance; MAX_HEADS],
    /// How often guesses of each head were accepted, by how sure it was of them.
    pub(super) by_confidence: [Acceptance; MAX_HEADS],
    /// How often copied tokens were accepted, by the tokens of the match before the copy.
    copies: [Acceptance; LONGEST_MATCH + 1],
}

impl Acceptances {
    /// How often copies were accepted that follow a match of `matched` tokens.
    pub(super) fn of_copies(&self, matched: usize) -> &Acceptance {
        &self.copies[matched.min(LONGEST_MATCH)]
    }

    /// How often copies were accepted that follow a match of `matched` tokens, to be changed.
    pub(super) fn copies(&mut self, matched: usize) -> &mut Acceptance {
        &mut self.copies[matched.min(LONGEST_MATCH)]
    }
}

/// What is known of one of several heads: when its drafts were last tried, and what they have cost beside those
/// of the others.
#[derive(Clone, Copy, Debug, Default)]
struct Trials {
    /// Rounds since its last draft.
    idle: u32,
    /// Rounds after which it is tried again, if it was ever in vain.
    patience: u32,
    /// Milliseconds that rounds with its drafts took beyond what their tokens take otherwise.
    lost: f64,
}

impl Trials {
    fn wait_longer(&mut self) {
        self.patience = (2 * self.patience.max(TRIAL.0)).min(TRIAL.1);
    }
}

/// Milliseconds and tokens of the newest rounds.
#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    ms: f64,
    tokens: f64,
}

/// What speculation has cost one stream and saved it.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    pub(super) acceptance: Acceptances,
    /// Which experts the stream's rows touch, of a mixture.
    pub(super) unions: TextUnions,
    /// Milliseconds more than plain rounds would have taken.
    lost: f64,
    /// Milliseconds in all.
    elapsed: f64,
    /// Milliseconds fewer than plain rounds would have taken, over all rounds.
    saved: f64,
    /// Whether a draft was ever verified.
    pub(super) tried: bool,
    /// Plain rounds since the last draft.
    idle: u32,
    /// Plain rounds after which a draft is tried again, if it was ever in vain.
    patience: u32,
    trials: [Trials; MAX_HEADS],
    pace: Pace,
    /// Milliseconds that the draft took that the next round verifies.
    drafting: f64,
    /// Rounds that are not entered yet, because it is not known what such rounds usually take, and the tokens that
    /// each has brought.
    pub(super) unknown: Vec<(RoundCost, usize)>,
    /// The head whose draft the newest round has verified.
    drafted_by: Option<usize>,
    /// Whether that was a try with some success, of which it is not known yet whether it paid.
    is_trial: bool,
}

impl Ledger {
    /// Milliseconds that the stream's rounds took beyond those of plain
    /// decoding, as far as that is known; negative if they were fewer.
    pub fn lost_ms(&self) -> f64 {
        self.lost
    }

    /// Milliseconds that the stream's rounds took less than plain decoding would have for the same
    /// tokens, negative if more: each round with what such a round usually takes. Rounds without
    /// anything to compare with are left out.
    pub fn saved_ms(&self) -> f64 {
        self.saved
    }

    /// Milliseconds of the rounds that [`Ledger::saved_ms`] is about.
    pub(crate) fn booked_ms(&self) -> f64 {
        self.elapsed
    }

    /// Whether a draft is to be tried though it does not promise to pay: a
    /// stream's first, and one after a long wait.
    pub(super) fn is_curious(&self) -> bool {
        !self.tried || self.idle >= self.patience.max(PROBE.0)
    }

    /// Whether speculation has lost so little that it may go on; `plain_step` are the
    /// milliseconds of a round without drafts.
    pub(super) fn may_draft(&self, plain_step: f64) -> bool {
        self.lost <= LOSS_STEPS * plain_step + LOSS_SHARE * self.elapsed
    }

    /// Rounds since the last draft of `head`, if it is to be tried beside others that promise more: after a
    /// long wait, as long as such tries have cost little; `plain_step` are the milliseconds of a round
    /// without drafts.
    pub(super) fn overdue(&self, head: usize, plain_step: f64) -> Option<u32> {
        let Trials {
            idle,
            patience,
            lost,
        } = self.trials[head];
        let is_affordable = lost <= LOSS_STEPS * plain_step + LOSS_SHARE * self.elapsed;
        (idle >= patience.max(TRIAL.0) && is_affordable).then_some(idle)
    }

    /// Notes who has drafted the newest round's draft, of which `n_accepted` tokens stayed, or that no head has.
    fn note_trials(&mut self, head: Option<usize>, n_accepted: usize) {
        self.drafted_by = head;
        self.is_trial = false;
        for (i, trials) in self.trials.iter_mut().enumerate() {
            if Some(i) != head {
                trials.idle = trials.idle.saturating_add(1);
                continue;
            }
            // Chosen twice in a row, it is tried no more: it is used.
            if trials.idle == 0 {
                trials.patience = 0;
            } else if n_accepted == 0 {
                trials.wait_longer();
            } else {
                self.is_trial = true;
            }
            trials.idle = 0;
        }
    }

    /// Notes how many rounds ago the last draft was, and how long to wait for the next try.
    pub(super) fn verified(&mut self, guesser: Guesser, n_drafted: usize, n_accepted: usize) {
        let head = match guesser {
            Guesser::Head(head) => (n_drafted > 0).then_some(head),
            Guesser::Ngram => None,
        };
        self.note_trials(head, n_accepted);
        if n_drafted > 0 {
            self.tried = true;
            self.idle = 0;
            let patience = (2 * self.patience.max(PROBE.0 / 2)).min(PROBE.1);
            self.patience = if n_accepted > 0 { 0 } else { patience };
        } else {
            self.idle += 1;
        }
    }

    /// Enters a round of some time ago that took `ms` and brought `emitted` tokens, each of which a plain step would have
    /// brought in `plain_step` milliseconds. Says nothing of who has drafted.
    pub(super) fn enter_late(&mut self, ms: f64, emitted: usize, plain_step: f64) {
        self.elapsed += ms;
        self.saved += emitted as f64 * plain_step - ms;
        // What was saved long ago does not pay for a loss now.
        let least = -2.0 * LOSS_STEPS * plain_step;
        self.lost = (self.lost + ms - emitted as f64 * plain_step).max(least);
    }

    /// Enters a round that took `ms` and brought `emitted` tokens, each of which a plain step
    /// would have brought in `plain_step` milliseconds. `drafting` are the milliseconds of these that the next draft
    /// took.
    pub(super) fn enter(&mut self, (ms, drafting): (f64, f64), emitted: usize, plain_step: f64) {
        self.enter_late(ms, emitted, plain_step);
        let least = -2.0 * LOSS_STEPS * plain_step;
        // The draft that the round has verified was made in the one before.
        let ms = ms - drafting + std::mem::replace(&mut self.drafting, drafting);
        if let Some(head) = self.drafted_by
            && self.pace.tokens > 0.0
        {
            let otherwise = emitted as f64 * self.pace.ms / self.pace.tokens;
            let trials = &mut self.trials[head];
            trials.lost = (trials.lost + ms - otherwise).max(least);
            match self.is_trial {
                true if ms > otherwise => trials.wait_longer(),
                true => trials.patience = 0,
                false => {}
            }
        }
        self.pace.ms = KEEP_PACE * self.pace.ms + ms;
        self.pace.tokens = KEEP_PACE * self.pace.tokens + emitted as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_whose_first_guesses_fail_is_expected_to_fail_further_on() {
        let prior = |_: usize| 0.8;
        let mut text = Acceptance::default();
        let fit = |text: &mut Acceptance, n_accepted: usize| {
            text.learn(0.96, 6, n_accepted);
            text.fit_shift(prior);
        };
        (0..3).for_each(|_| fit(&mut text, 0));
        // Never tested there, and all texts are right in 4 of 5 cases.
        let failed = text.chance(4, 0.8);
        assert!((0.45..0.7).contains(&failed), "{failed}");
        (0..12).for_each(|_| fit(&mut text, 6));
        assert!(text.chance(5, 0.8) > 0.8, "{:?}", text);
        // What happened as often as it was expected to shifts nothing.
        let mut usual = Acceptance::default();
        let tested = (0..5).map(|i| (0, i < 4));
        usual.learn_each(1.0, tested);
        usual.fit_shift(prior);
        assert!(usual.shift.abs() < 1e-9, "{usual:?}");
    }
}
