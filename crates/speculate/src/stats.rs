//! What speculation did for one stream.

use crate::length::Guesser;
use std::time::Duration;

/// How often one position of the draft was drafted and accepted, over all rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Rounds that drafted a token here.
    pub drafted: u64,
    /// Rounds in which that token was accepted, and so all before it.
    pub accepted: u64,
}

/// What one drafter has guessed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Guesses {
    /// Rounds whose draft it has guessed.
    pub rounds: u64,
    /// Tokens that it has guessed. Tokens that a [constraint](crate::Constraint) left no choice
    /// about, and what follows them, do not count.
    pub drafted: u64,
    /// Drafted tokens that were accepted.
    pub accepted: u64,
}

/// Counts and times of one stream's rounds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Rounds that emitted a token: verifies, not prefill.
    pub rounds: u64,
    /// Counts by position in the draft, from the first.
    pub by_position: Vec<Position>,
    /// Counts by who has guessed, in the order of [`Guesser::ALL`].
    pub by_guesser: [Guesses; Guesser::ALL.len()],
    /// Tokens of verified drafts that a [constraint](crate::Constraint) left no choice about, in place of
    /// the drafter's guesses or after them.
    pub forced: u64,
    /// Forced tokens that were accepted: all but those behind a guess that was not.
    pub forced_accepted: u64,
    /// Tokens emitted.
    pub emitted: u64,
    /// Rounds after which there was room for a draft and none was asked for,
    /// because the stream wanted none or none would have paid.
    pub held_back: u64,
    /// Drafts that were cut short where the drafter had computed NaN or an infinity.
    pub drafts_cut: u64,
    /// Tokens that were guessed and cut off again before they were verified, because they were not worth a row.
    pub unverified: u64,
    /// Time the target took for rounds this stream decoded in, from the batch
    /// to the choice of its tokens.
    pub verify: Duration,
    /// Time the drafter took in those rounds.
    pub draft: Duration,
    /// Time of the rounds that ran prompt rows of this stream, or rows again after a preemption.
    pub prefill: Duration,
    /// How often the stream was [preempted](crate::Speculator::preempt).
    pub preemptions: u64,
}

impl Stats {
    /// What `guesser` has guessed.
    pub fn guesses(&self, guesser: Guesser) -> Guesses {
        self.by_guesser[guesser.index()]
    }

    /// Tokens drafted.
    pub fn drafted(&self) -> u64 {
        self.by_position.iter().map(|p| p.drafted).sum()
    }

    /// Draft tokens accepted.
    pub fn accepted(&self) -> u64 {
        self.by_position.iter().map(|p| p.accepted).sum()
    }

    /// Tokens that rounds have emitted: all but the first, which comes with the prompt.
    pub fn emitted_by_rounds(&self) -> u64 {
        self.emitted.saturating_sub(1)
    }

    /// Books the time of a round that emitted `n_emitted` tokens, and that ran rows of the prompt or
    /// of a preempted text if `is_prefill`.
    pub(crate) fn book(
        &mut self,
        is_prefill: bool,
        n_emitted: u64,
        verify: Duration,
        draft: Duration,
    ) {
        self.emitted += n_emitted;
        if is_prefill {
            self.prefill += verify + draft;
        } else {
            self.verify += verify;
            self.draft += draft;
        }
    }

    /// Notes that a verified draft had `n_forced` tokens that a constraint left no choice about, `n_accepted` of
    /// which stayed.
    pub(crate) fn count_forced(&mut self, n_forced: usize, n_accepted: usize) {
        self.forced += n_forced as u64;
        self.forced_accepted += n_accepted as u64;
    }

    /// Notes that `guesser` guessed `n_guessed` tokens of the draft of a round, `n_accepted` of which stayed.
    pub(crate) fn count_guesses(&mut self, guesser: Guesser, n_guessed: usize, n_accepted: usize) {
        let of = &mut self.by_guesser[guesser.index()];
        of.rounds += u64::from(n_guessed > 0);
        of.drafted += n_guessed as u64;
        of.accepted += n_accepted as u64;
    }

    /// Notes a verified draft of `n_drafted` tokens, `n_accepted` of which stayed.
    pub(crate) fn count(&mut self, n_drafted: usize, n_accepted: usize) {
        if self.by_position.len() < n_drafted {
            self.by_position.resize(n_drafted, Position::default());
        }
        for (i, position) in self.by_position.iter_mut().take(n_drafted).enumerate() {
            position.drafted += 1;
            position.accepted += u64::from(i < n_accepted);
        }
    }
}
