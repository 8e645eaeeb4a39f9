//! What rounds of a batch took: the time from one round's end to the next one's, delivery included.

use super::super::runs::ratio;
use engine::StepRecord;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// What the engine has told of its rounds since the last [`Rounds::take`].
#[derive(Default)]
pub(super) struct Rounds(Mutex<Heard>);

#[derive(Default)]
struct Heard {
    /// When the last round ended.
    last: Option<Instant>,
    rounds: Vec<Round>,
}

/// A round without prompts.
#[derive(Clone, Copy, Debug)]
struct Round {
    /// Texts in it.
    streams: usize,
    /// Tokens written.
    emitted: usize,
    ms: f64,
}

/// What rounds took, as rates.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Rates {
    pub(super) rounds: usize,
    pub(super) tok_s: f64,
    pub(super) tok_s_per_stream: f64,
    pub(super) ms_per_round: f64,
    pub(super) tokens_per_round: f64,
}

impl Rounds {
    /// Notes a round that has just ended.
    pub(super) fn hear(&self, step: &StepRecord) {
        let now = Instant::now();
        let mut heard = self.lock();
        let last = heard.last.replace(now);
        let Some(last) = last.filter(|_| !step.streams.iter().any(|stream| stream.is_prefill))
        else {
            return;
        };
        heard.rounds.push(Round {
            streams: step.streams.len(),
            emitted: step.streams.iter().map(|stream| stream.emitted).sum(),
            ms: (now - last).as_secs_f64() * 1e3,
        });
    }

    /// Forgets when the last round ended: the next one is of other texts.
    pub(super) fn pause(&self) {
        self.lock().last = None;
    }

    /// The rates of the rounds with `batch` texts, or of all if there are none.
    pub(super) fn take(&self, batch: usize) -> Rates {
        self.pause();
        rates(&std::mem::take(&mut self.lock().rounds), batch)
    }

    fn lock(&self) -> MutexGuard<'_, Heard> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn rates(rounds: &[Round], batch: usize) -> Rates {
    let is_whole = |round: &&Round| round.streams == batch;
    let mut counted: Vec<&Round> = rounds.iter().filter(is_whole).collect();
    if counted.is_empty() {
        counted = rounds.iter().collect();
    }
    let n = counted.len() as f64;
    let tokens = counted.iter().map(|round| round.emitted).sum::<usize>() as f64;
    let streams = counted.iter().map(|round| round.streams).sum::<usize>() as f64;
    let ms: f64 = counted.iter().map(|round| round.ms).sum();
    let tok_s = ratio(tokens, ms / 1e3);
    Rates {
        rounds: counted.len(),
        tok_s,
        tok_s_per_stream: ratio(tok_s, ratio(streams, n)),
        ms_per_round: ratio(ms, n),
        tokens_per_round: ratio(tokens, streams),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_whole_batches() {
        let round = |streams, emitted, ms| Round {
            streams,
            emitted,
            ms,
        };
        let rounds = [round(2, 4, 10.0), round(2, 8, 10.0), round(1, 1, 10.0)];
        let expected = Rates {
            rounds: 2,
            tok_s: 600.0,
            tok_s_per_stream: 300.0,
            ms_per_round: 10.0,
            tokens_per_round: 3.0,
        };
        assert_eq!(rates(&rounds, 2), expected);
        // Where no batch was whole, all count.
        assert_eq!(rates(&rounds[2..], 2).tok_s_per_stream, 100.0);
        assert_eq!(rates(&[], 2), Rates::default());
    }
}
