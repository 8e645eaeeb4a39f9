//! Calibration: what rounds cost on this device, measured before anybody waits for one.
//!
//! Draft lengths follow from the times of steps and drafts ([`crate::length`]). Without any, the first text
//! has to find them out: it drafts too long, then not at all, then too short. So one stream that nobody
//! reads runs rounds with drafts of several lengths. Only times are kept: what its guesses were worth
//! says nothing of a text that somebody asked for.
//!
//! What an expert of a mixture takes does not show in that text, whose steps of as many rows touch about as many. So
//! steps of equal tokens, which touch few, are timed beside steps of tokens from all over the vocabulary.

use crate::length::{Costs, DraftLength, Guesser, LEVELS};
use crate::sample::Sampling;
use crate::speculator::Speculator;
use crate::stream::StreamOptions;
use crate::{RoundError, Stream};
use backend::Batch;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Lengths of the drafts, in this order, as far as drafts may be so long.
const LENGTHS: &[usize] = &[0, 3, 7, 1, 15];
/// Times that each is run: after so many a time is believed.
const PASSES: usize = crate::length::BELIEVED as usize;
/// Rounds of a length that are repeated, at most, because a device runs what is new to it slower.
const MOST_FIRST: usize = 4;
/// Tokens of the longest drafts of several streams that are run beforehand.
const BATCH_LENGTH: usize = 6;
/// Tokens of the shortest prompt that is run beforehand: shorter ones have about the rows of a step that verifies drafts.
const SHORTEST_PROMPT: usize = 65;
/// Rows of the steps that tell what an expert takes, at most.
const EXPERT_ROWS: usize = 8;
/// Steps of equal tokens, and steps of different ones, that tell it.
const EXPERT_PASSES: usize = 6;

/// Kinds of rounds of `n` streams with drafts of up to `longest` tokens: tokens that are drafted for each stream, and
/// those of all drafts that are verified. Of several streams, drafts have the lengths that a batch's drafts are made of, up
/// to [`BATCH_LENGTH`]: first all of them whole, and then half of them shorter by one, since drafts are cut.
fn kinds(n: usize, longest: usize) -> Vec<(usize, usize)> {
    let plain = (1, 0);
    if longest == 0 {
        return vec![plain];
    }
    if n == 1 {
        let drafts = (1..=longest).map(|length| (length, length));
        return [plain].into_iter().chain(drafts).collect();
    }
    let most = longest.min(BATCH_LENGTH);
    let shorter = LEVELS.into_iter().take_while(move |&length| length < most);
    let lengths = shorter.chain([most]);
    let whole = lengths.clone().map(|length| (length, length * n));
    let cut = lengths.map(|length| (length, length * n - n / 2));
    let drafts = whole.chain(cut.filter(|&(_, tokens)| tokens >= n));
    [plain].into_iter().chain(drafts).collect()
}

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
    /// of that time. Steps that tell what an expert of a mixture takes may follow, for a quarter of `limit`. Returns the rounds that were run, those of the prompt among them.
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
        let lengths = LENGTHS.iter().copied().filter(|&n| n <= longest);
        let lengths = lengths.collect::<Vec<usize>>().repeat(PASSES);
        let rounds = self.time_heads(prompt, &lengths, limit)?;
        self.time_experts(prompt, 1 + longest, limit / 4)?;
        Ok(rounds)
    }

    /// Runs rounds of one stream after `prompt` for each head, with drafts of `lengths`, one after the other. Returns how
    /// many; only their times are kept.
    fn time_heads(
        &mut self,
        prompt: &[u32],
        lengths: &[usize],
        limit: Duration,
    ) -> Result<usize, RoundError> {
        let heads = self.n_heads().max(1);
        let of_each = |this: &mut Self, head| {
            let mut streams = this.open_unread(prompt, 1, head)?;
            let result = this.time_rounds(&mut streams[0], lengths, limit / heads as u32);
            streams.into_iter().for_each(|stream| this.close(stream));
            result
        };
        self.keeping_times(|this| (0..heads).map(|head| of_each(this, head)).sum())
    }

    /// Does `work`, of which nothing but times is kept. Copies of what a text has already take no time to find, and the
    /// text may have none: a head guesses all drafts.
    fn keeping_times<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let copies = std::mem::take(&mut self.drafters.copies);
        let watch = std::mem::take(&mut self.watch);
        let before = self.lengths.clone();
        let result = work(self);
        self.lengths.forget_guesses_since(&before);
        self.watch = watch;
        self.drafters.copies = copies;
        result
    }

    /// `n` streams after `prompt` that nobody reads, whose drafts `head` makes.
    fn open_unread(
        &mut self,
        prompt: &[u32],
        n: usize,
        head: usize,
    ) -> Result<Vec<Stream>, RoundError> {
        let options = StreamOptions {
            sampling: Sampling::default(),
            max_tokens: usize::MAX,
            stop_tokens: Arc::new([]),
            draft: DraftLength::Fixed(0),
            logprobs: None,
        };
        let mut streams = Vec::with_capacity(n);
        for _ in 0..n {
            match self.open(prompt.to_vec(), options.clone()) {
                Ok(mut stream) => {
                    stream.draft_by(Some(Guesser::Head(head)));
                    stream.is_calibration = true;
                    streams.push(stream);
                }
                Err(error) => {
                    streams.into_iter().for_each(|stream| self.close(stream));
                    return Err(error.into());
                }
            }
        }
        Ok(streams)
    }

    /// Reads prompts that nobody asked for, on a device that [records steps](backend::Capabilities::records): of as many tokens
    /// as a step may have rows, of half as many and so on. So the first request's prompt finds its kernels compiled and
    /// its memory allocated. Starts none after `limit`.
    ///
    /// # Errors
    ///
    /// [`RoundError`], as in a round.
    ///
    /// # Panics
    ///
    /// As [`Speculator::open`] does.
    pub fn warm_up_prompts(&mut self, prompt: &[u32], limit: Duration) -> Result<(), RoundError> {
        if !self.lengths.records() {
            return Ok(());
        }
        let size = self.memory.size();
        let chunk = size.step_rows;
        let longest = chunk.min(size.context.saturating_sub(1));
        let lengths = std::iter::successors(Some(longest), |n| Some(n / 2));
        let start = Instant::now();
        for n in lengths.take_while(|&n| n >= SHORTEST_PROMPT) {
            if start.elapsed() > limit {
                break;
            }
            let tokens: Vec<u32> = prompt.iter().copied().cycle().take(n).collect();
            self.keeping_times(|this| {
                let mut streams = this.open_unread(&tokens, 1, 0)?;
                let mut result = Ok(());
                while result.is_ok()
                    && streams[0].output().is_empty()
                    && streams[0].finish().is_none()
                {
                    result = this.round(&mut [&mut streams[0]], chunk).map(|_| ());
                }
                streams.into_iter().for_each(|stream| this.close(stream));
                result
            })?;
        }
        Ok(())
    }

    /// Runs rounds with drafts of every length up to `longest`, by each head in turn, on a device that [records
    /// steps](backend::Capabilities::records), so that no text has to wait for that: of one stream after `prompt`, then of
    /// as many streams as there may be, of two, and of the numbers between. One stream has the time `limit`, and the
    /// others together have twice that: no round starts that would end later, if it takes as long as the one before it.
    ///
    /// # Errors
    ///
    /// [`RoundError`], as in a round.
    ///
    /// # Panics
    ///
    /// As [`Speculator::open`] does.
    pub fn warm_up(
        &mut self,
        prompt: &[u32],
        longest: usize,
        limit: Duration,
    ) -> Result<(), RoundError> {
        if !self.lengths.records() {
            return Ok(());
        }
        let most = self.memory.size().sequences;
        let fewer = (2..most).map(|n| if n == 2 { 2 } else { most + 2 - n });
        let numbers = [1, most].into_iter().take(most).chain(fewer);
        let (heads, start) = (self.n_heads().max(1), Instant::now());
        for n in numbers {
            let deadline = if n == 1 { limit } else { 3 * limit };
            for head in 0..heads {
                let now = start.elapsed();
                let share = deadline.saturating_sub(now) / (heads - head) as u32;
                if share.is_zero() {
                    break;
                }
                let done = self.keeping_times(|this| {
                    let mut streams = this.open_unread(prompt, n, head)?;
                    let result = this.run_kinds(&mut streams, &kinds(n, longest), share);
                    streams.into_iter().for_each(|stream| this.close(stream));
                    result
                });
                match done {
                    // The memory may be for fewer whole texts.
                    Err(RoundError::Memory(_)) if n > 1 => break,
                    done => done?,
                }
            }
        }
        Ok(())
    }

    /// Runs rounds of `streams` until a device has recorded what rounds of these kinds do: tokens that are drafted for each
    /// stream, and those of all drafts that are verified; fewer where the drafter makes shorter drafts. Starts no round that
    /// would end after `limit`, if it takes as long as the one before it.
    fn run_kinds(
        &mut self,
        streams: &mut [Stream],
        kinds: &[(usize, usize)],
        limit: Duration,
    ) -> Result<(), RoundError> {
        let start = Instant::now();
        let size = self.memory.size();
        let (chunk, context) = (size.step_rows, size.context);
        let (n, has_heads) = (streams.len(), !self.drafters.heads.is_empty());
        let (mut drafted, mut repeated, mut last) = (None, 0, Duration::ZERO);
        let mut kinds = kinds.iter().copied().peekable();
        while let Some(&kind) = kinds.peek()
            && streams.iter().all(|stream| stream.finish().is_none())
            && start.elapsed() + last <= limit
        {
            let (began, (length, tokens)) = (start.elapsed(), kind);
            for stream in &mut *streams {
                stream.options.draft = DraftLength::Fixed(length);
            }
            let mut all: Vec<&mut Stream> = streams.iter_mut().collect();
            self.round(&mut all, chunk)?;
            // Drafts are verified in the round behind theirs.
            if drafted == Some(kind) {
                repeated += 1;
                if !self.ran_first || repeated > MOST_FIRST {
                    kinds.next();
                    repeated = 0;
                }
            }
            let mut left = tokens;
            for (i, stream) in streams.iter_mut().enumerate() {
                let own = left.div_ceil(n - i);
                if !has_heads && !stream.output().is_empty() && stream.finish().is_none() {
                    // Whose tokens they are does not matter to the target's time.
                    stream.draft = vec![stream.tokens[0]; own.min(stream.draft_room(context))];
                }
                let own = own.min(stream.draft.len());
                stream.cut_draft(own);
                left -= own;
            }
            // Prompts may take several rounds.
            let has_begun = streams.iter().all(|stream| !stream.output().is_empty());
            drafted = has_begun.then_some(kind);
            last = start.elapsed() - began;
        }
        Ok(())
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
        let (mut rounds, mut last, mut repeated) = (0, Duration::ZERO, 0);
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
            // The prompt may take several rounds, and the first rounds of a kind are not timed.
            if !stream.output().is_empty() {
                repeated = if self.ran_first { repeated + 1 } else { 0 };
                if repeated == 0 || repeated > MOST_FIRST {
                    lengths.next();
                    repeated = 0;
                }
            }
            rounds += 1;
            last = start.elapsed() - began;
        }
        Ok(rounds)
    }

    /// Times steps of at most `rows` rows after `prompt`, of equal tokens and of different ones in turn, if the target
    /// is a mixture of experts and the device tells which they touch. Starts no step that would end after `limit`.
    fn time_experts(
        &mut self,
        prompt: &[u32],
        rows: usize,
        limit: Duration,
    ) -> Result<(), RoundError> {
        let rows = rows.min(EXPERT_ROWS).min(self.memory.size().step_rows);
        let steps = 2 * EXPERT_PASSES;
        let has_room = prompt.len() + steps + rows <= self.memory.size().context;
        if rows < 2 || !has_room || self.marks.n_rows() == 0 {
            return Ok(());
        }
        let start = Instant::now();
        self.with_sequence(|this, sequence| {
            this.prefill(sequence, prompt)?;
            this.b.finish()?;
            let (vocab, mut last) = (this.target.vocab_size(), Duration::ZERO);
            for step in 0..steps {
                if start.elapsed() + last > limit {
                    break;
                }
                let began = Instant::now();
                let spread = |i: usize| ((i * vocab / rows + step) % vocab) as u32;
                let tokens = (0..rows).map(|i| match step % 2 {
                    0 => prompt[0],
                    _ => spread(i),
                });
                let mut batch = Batch::default();
                let tokens: Vec<u32> = tokens.collect();
                this.memory.push(&mut batch, sequence, &tokens, 1)?;
                this.b.note_experts();
                let (b, target) = (&*this.b, &*this.target);
                let hidden = target.forward(b, &batch, &mut this.memory);
                let chosen = b.argmax(&target.logits(b, &hidden));
                b.finish()?;
                let time = began.elapsed();
                black_box(chosen);
                let is_told = this.b.take_experts(&mut this.marks);
                // The first steps of each kind run cold.
                if is_told && this.marks.n_rows() == rows && step >= 2 {
                    let experts = this.marks.union(0..rows).len() as f64;
                    this.lengths.timed_step(rows, experts, time);
                }
                let stays = sequence.len() + 1 - rows;
                this.memory.truncate(sequence, stays);
                last = began.elapsed();
            }
            Ok(())
        })
    }
}
