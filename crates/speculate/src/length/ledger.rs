//! What is known of guesses: how often they were accepted, and what drafting has cost a
//! stream.

/// Plain steps that speculation may lose a stream before it pauses.
pub const LOSS_STEPS: f64 = 4.0;
/// Part of a stream's time that speculation may lose besides.
pub const LOSS_SHARE: f64 = 0.02;

/// Rounds that a guess about a stream's acceptance weighs, before its own.
const PRIOR_ROUNDS: f64 = 4.0;
/// Plain rounds after which a draft is tried again; twice as many after each try
/// that brought nothing, up to the second number.
const PROBE: (u32, u32) = (4, 64);

/// How often guesses were accepted, by position in the draft, of those whose
/// predecessors all were. Newer rounds count more.
#[derive(Clone, Debug, Default)]
pub(super) struct Acceptance(Vec<Tested>);

/// Weighted counts of one position.
#[derive(Clone, Copy, Debug, Default)]
struct Tested {
    tested: f64,
    accepted: f64,
}

impl Acceptance {
    /// Takes note of a verified draft; `keep` of what was known before still counts.
    pub(super) fn learn(&mut self, keep: f64, n_drafted: usize, n_accepted: usize) {
        if self.0.len() < n_drafted {
            self.0.resize(n_drafted, Tested::default());
        }
        for (i, position) in self.0.iter_mut().enumerate() {
            position.tested *= keep;
            position.accepted *= keep;
            if i < n_drafted && i <= n_accepted {
                position.tested += 1.0;
                position.accepted += f64::from(u8::from(i < n_accepted));
            }
        }
    }

    /// The chance that the guess at `position` is accepted if those before it
    /// are; `prior` is the answer where nothing is known.
    pub(super) fn chance(&self, position: usize, prior: f64) -> f64 {
        let known = self.0.get(position).copied().unwrap_or_default();
        (known.accepted + PRIOR_ROUNDS * prior) / (known.tested + PRIOR_ROUNDS)
    }
}

/// Matches of this many tokens and more share what is known of the copies after them.
const LONGEST_MATCH: usize = 5;

/// How often guesses were accepted, by who made them.
#[derive(Clone, Debug, Default)]
pub(super) struct Acceptances {
    /// How often guesses of the head were accepted.
    pub(super) head: Acceptance,
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

/// What speculation has cost one stream and saved it.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    pub(super) acceptance: Acceptances,
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

    /// Notes how many rounds ago the last draft was, and how long to wait for the next try.
    pub(super) fn verified(&mut self, n_drafted: usize, n_accepted: usize) {
        if n_drafted > 0 {
            self.tried = true;
            self.idle = 0;
            let patience = (2 * self.patience.max(PROBE.0 / 2)).min(PROBE.1);
            self.patience = if n_accepted > 0 { 0 } else { patience };
        } else {
            self.idle += 1;
        }
    }

    /// Enters a round that took `ms` and brought `emitted` tokens, each of which a plain step
    /// would have brought in `plain_step` milliseconds.
    pub(super) fn enter(&mut self, ms: f64, emitted: usize, plain_step: f64) {
        self.elapsed += ms;
        self.saved += emitted as f64 * plain_step - ms;
        // What was saved long ago does not pay for a loss now.
        let least = -2.0 * LOSS_STEPS * plain_step;
        self.lost = (self.lost + ms - emitted as f64 * plain_step).max(least);
    }
}
