//! Calibration: what rounds cost on this device, measured before anybody waits for one.
//!
//! Draft lengths follow from the times of steps and drafts ([`crate::length`]). Without any, the first text
//! has to find them out: it drafts too long, then not at all, then too short. So one stream that nobody
//! reads runs rounds with drafts of several lengths. Only times are kept: what its guesses were worth
//! says nothing of a text that somebody asked for.

use crate::length::{Costs, DraftLength, Guesser};
use crate::sample::Sampling;
use crate::speculator::Speculator;
use crate::stream::StreamOptions;
use crate::{RoundError, Stream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Lengths of the drafts, in this order, as far as drafts may be so long.
const LENGTHS: &[usize] = &[0, 3, 7, 1, 15];
/// Times that each is run: after so many a time is believed.
const PASSES: usize = crate::length::BELIEVED as usize;

impl Speculator {
    /// What rounds have cost so far.
    pub fn costs(&self) -> &Costs {
        self.lengths.costs()
    }

    /// Takes `costs` for what rounds cost, until they are measured.
    pub fn set_costs(&mut self, costs: Costs) {
        self.lengths.set_costs(costs);
    }

    /// Times rounds of one stream after `prompt` for each head, with drafts of several lengths up to `longest` tokens.
    /// Starts no round that would end after `limit`, if it takes as long as the one before it; each head has its share
    /// of that time. Returns the rounds that were run, those of the prompt among them.
    ///
    /// # Errors
    ///
    /// [`RoundError`], as in a round.
    ///
    /// # Panics
    ///
    /// As [`Speculator::open`] does.
    pub fn calibrate(
        &mut self,
        prompt: &[u32],
        longest: usize,
        limit: Duration,
    ) -> Result<usize, RoundError> {
        let lengths: Vec<usize> = LENGTHS.iter().copied().filter(|&n| n <= longest).collect();
        let options = StreamOptions {
            sampling: Sampling::default(),
            max_tokens: usize::MAX,
            stop_tokens: Arc::new([]),
            draft: DraftLength::Fixed(0),
            logprobs: None,
        };
        // Copies take no time to find, and the text may have none: a head guesses all drafts.
        let copies = std::mem::take(&mut self.drafters.copies);
        let watch = std::mem::take(&mut self.watch);
        let before = self.lengths.clone();
        let heads = self.n_heads().max(1);
        let of_each = |head| {
            let mut stream = self.open(prompt.to_vec(), options.clone())?;
            stream.draft_by(Some(Guesser::Head(head)));
            let lengths = lengths.repeat(PASSES);
            let result = self.time_rounds(&mut stream, &lengths, limit / heads as u32);
            self.close(stream);
            result
        };
        let result = (0..heads).map(of_each).sum();
        self.lengths.forget_guesses_since(&before);
        self.watch = watch;
        self.drafters.copies = copies;
        result
    }

    /// Runs rounds of `stream`, with drafts of `lengths`, one after the other.
    fn time_rounds(
        &mut self,
        stream: &mut Stream,
        lengths: &[usize],
        limit: Duration,
    ) -> Result<usize, RoundError> {
        let start = Instant::now();
        let size = self.memory.size();
        let (chunk, context) = (size.step_rows, size.context);
        let (mut rounds, mut last) = (0, Duration::ZERO);
        // The draft that is asked for in the last round is not verified.
        let mut lengths = lengths.iter().copied().chain([0]).peekable();
        while let Some(&length) = lengths.peek()
            && stream.finish().is_none()
            && start.elapsed() + last <= limit
        {
            let began = start.elapsed();
            // A head reads no text that it is never to draft for, so it drafts where nothing is to be verified, too.
            stream.options.draft = DraftLength::Fixed(length.max(1));
            self.round(&mut [&mut *stream], chunk)?;
            if length == 0 {
                stream.draft.clear();
                stream.draft_probs.clear();
            } else if self.drafters.heads.is_empty() && stream.finish().is_none() {
                // Whose tokens they are does not matter to the target's time.
                let length = length.min(stream.draft_room(context));
                stream.draft = vec![stream.tokens[0]; length];
            }
            // The prompt may take several rounds.
            if !stream.output().is_empty() {
                lengths.next();
            }
            rounds += 1;
            last = start.elapsed() - began;
        }
        Ok(rounds)
    }
}
