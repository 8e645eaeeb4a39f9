//! Which token of a stream came from where, round by round, for those who want to see
//! speculation at work. What is written does not depend on whether it is traced.

use crate::accept::Verdict;
use crate::length::Guesser;
use crate::stream::Stream;

/// Where a written token came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// The target chose it: the first token of all, or the recovered or bonus token of a round.
    Target,
    /// This drafter guessed the token, at this position of the draft, from 0, and it was accepted.
    Guess(usize, Guesser),
    /// A [constraint](crate::Constraint) left no choice about it: it was put into the draft at this
    /// position, from 0, and accepted.
    Forced(usize),
}

/// What one round did for a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoundTrace {
    /// The number of the round, from 1. 0 is the prompt's last step, which is no round and writes
    /// the first token.
    pub number: u64,
    /// Tokens of the draft that was verified.
    pub drafted: usize,
    /// Tokens of the draft that the constraint left no choice about.
    pub forced: usize,
    /// Tokens of the draft that were accepted, those behind the end of the text among them.
    pub accepted: usize,
    /// The source of each token that was written, in order; a token that ends the text has one too.
    pub sources: Vec<TokenSource>,
}

impl Stream {
    /// Has the stream note what each of its rounds does, for [`Stream::take_rounds`].
    pub fn trace(&mut self) {
        self.trace = Some(Vec::new());
    }

    /// What the rounds since the last call did; nothing unless [`Stream::trace`] was called.
    pub fn take_rounds(&mut self) -> Vec<RoundTrace> {
        self.trace.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// How many of the first `n` tokens of the draft the constraint left no choice about.
    pub(crate) fn n_forced(&self, n: usize) -> usize {
        let forced = self.draft_forced.iter().take(n);
        forced.filter(|&&is_forced| is_forced).count()
    }

    /// Notes that the tokens after the first `n_known` were written by a round that verified
    /// `n_drafted` tokens with this verdict, and that chose the first token of all if `is_first`.
    pub(crate) fn note_round(
        &mut self,
        n_known: usize,
        n_drafted: usize,
        verdict: &Verdict,
        is_first: bool,
    ) {
        let forced = self.n_forced(n_drafted);
        let Some(trace) = &mut self.trace else {
            return;
        };
        let is_forced = |i: usize| self.draft_forced.get(i) == Some(&true);
        let source = |i| match i < verdict.n_accepted {
            true if is_forced(i) => TokenSource::Forced(i),
            true => TokenSource::Guess(i, self.guesser),
            false => TokenSource::Target,
        };
        trace.push(RoundTrace {
            number: match is_first {
                true => 0,
                false => self.stats.rounds + 1,
            },
            drafted: n_drafted,
            forced,
            accepted: verdict.n_accepted,
            sources: (0..self.tokens.len() - n_known).map(source).collect(),
        });
    }
}
