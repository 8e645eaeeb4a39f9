//! The rows of a cell: the same texts with every draft length.

use super::super::prompts::Prompt;
use super::super::runs::{Positions, is_exact, request, warm_up};
use super::super::steps::median;
use super::rounds::Rounds;
use super::{BenchLength, Cell, Row, Sizes};
use crate::args::BenchArgs;
use crate::machine;
use anyhow::{Result, bail};
use engine::{Engine, Event, Rejected, Request, RequestOutcome, Sink};
use std::collections::HashMap;
use std::sync::mpsc::{Receiver, channel};

/// The texts that every cell writes.
pub(super) struct Texts {
    pub(super) prompts: Vec<Prompt>,
    /// How many there are; prompts come again, with other seeds, where these are more.
    pub(super) n: usize,
}

impl Texts {
    /// Tokens of the longest prompt.
    pub(super) fn longest(&self) -> usize {
        let lengths = self.prompts.iter().map(|prompt| prompt.ids.len());
        lengths.max().unwrap_or(0)
    }

    /// The texts in waves of `batch` at once; the last wave has some texts again, to be whole.
    fn waves(&self, batch: usize) -> Vec<Vec<usize>> {
        let text = |wave: usize, i: usize| (wave * batch + i) % self.n;
        let wave = |wave| (0..batch).map(|i| text(wave, i)).collect();
        (0..self.n.div_ceil(batch)).map(wave).collect()
    }
}

/// What was written first, by temperature and text: what all other rows have to write as well.
pub(super) type Known = HashMap<(u32, usize), Vec<u32>>;

/// What writes the rows of a cell.
pub(super) struct Writer<'a> {
    pub(super) args: &'a BenchArgs,
    pub(super) engine: &'a Engine,
    pub(super) rounds: &'a Rounds,
    pub(super) cell: &'a Cell,
    pub(super) sizes: &'a Sizes,
}

impl Writer<'_> {
    /// Writes all of `texts` with drafts of one length, or says why the engine did not.
    ///
    /// # Errors
    ///
    /// If a text is not the `known` one.
    pub(super) fn row(
        &self,
        texts: &Texts,
        temperature: f32,
        draft: BenchLength,
        known: &mut Known,
    ) -> Result<Result<Row, String>> {
        let wave = (0..self.cell.batch).map(|text| self.warm_up(texts, text, temperature, draft));
        if let Err(error) = self.write(wave.collect()) {
            return Ok(Err(error.to_string()));
        }
        self.rounds.take(self.cell.batch);
        let mut positions = Positions::default();
        let mut first_tokens_ms = Vec::new();
        let (mut n_texts, mut n_tokens) = (0, 0);
        for wave in texts.waves(self.cell.batch) {
            let requests = wave
                .iter()
                .map(|&text| self.request(texts, text, temperature, draft));
            let written = match self.write(requests.collect()) {
                Ok(written) => written,
                Err(error) => return Ok(Err(error.to_string())),
            };
            self.rounds.pause();
            for (text, (tokens, outcome)) in wave.into_iter().zip(written) {
                n_texts += 1;
                n_tokens += outcome.usage.completion_tokens;
                first_tokens_ms.push(outcome.timings.queued_ms + outcome.timings.prefill_ms);
                positions.add(&outcome.speculation);
                if is_exact(&outcome) {
                    let first = known.entry((temperature.to_bits(), text));
                    if *first.or_insert_with(|| tokens.clone()) != tokens {
                        bail!(
                            "{}: drafts of length {draft} changed text {text}: this is a bug",
                            self.cell.name()
                        );
                    }
                }
            }
        }
        let rates = self.rounds.take(self.cell.batch);
        Ok(Ok(Row {
            cell: self.cell.clone(),
            temperature,
            drafter: draft.drafters(self.engine.info()),
            draft,
            texts: n_texts,
            tokens: n_tokens,
            tok_s: rates.tok_s,
            tok_s_per_stream: rates.tok_s_per_stream,
            speedup: None,
            rounds: rates.rounds,
            ms_per_round: rates.ms_per_round,
            tokens_per_round: rates.tokens_per_round,
            first_token_ms: median(first_tokens_ms),
            accepted_by_position: positions.shares(),
            sizes: self.sizes.clone(),
            resident_bytes: machine::resident(),
        }))
    }

    fn warm_up(&self, texts: &Texts, text: usize, temperature: f32, draft: BenchLength) -> Request {
        let prompt = &texts.prompts[text % texts.prompts.len()];
        warm_up(self.args, self.engine.info(), prompt, temperature, draft)
    }

    fn request(&self, texts: &Texts, text: usize, temperature: f32, draft: BenchLength) -> Request {
        let prompt = &texts.prompts[text % texts.prompts.len()];
        let mut request = request(self.args, prompt, text as u64, temperature);
        (request.draft, request.drafters) = draft.of_request(self.engine.info());
        request.ignore_eos = true;
        request
    }

    /// What all of `requests` write at once, in their order.
    fn write(&self, requests: Vec<Request>) -> Result<Vec<(Vec<u32>, RequestOutcome)>, Rejected> {
        let heard = |request| {
            let (events, inbox) = channel();
            let sink: Sink = Box::new(move |event| events.send(event).is_ok());
            ((request, sink), inbox)
        };
        let (requests, inboxes): (Vec<_>, Vec<_>) = requests.into_iter().map(heard).unzip();
        self.engine.submit_all(requests)?;
        inboxes.into_iter().map(listen).collect()
    }
}

/// The tokens of a request, and how it ended.
fn listen(inbox: Receiver<Event>) -> Result<(Vec<u32>, RequestOutcome), Rejected> {
    let mut tokens = Vec::new();
    for event in inbox {
        match event {
            Event::Prefill { .. } | Event::Round(_) => {}
            Event::Text(segments) => {
                let written = segments.into_iter().flat_map(|segment| segment.tokens);
                tokens.extend(written.map(|token| token.id));
            }
            Event::Done(outcome) => return Ok((tokens, *outcome)),
            Event::Failed(reason) => return Err(Rejected::Failed(reason)),
        }
    }
    Err(Rejected::Stopped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waves_are_whole_and_have_every_text() {
        let waves = |n, batch| {
            let texts = Texts {
                prompts: Vec::new(),
                n,
            };
            texts.waves(batch)
        };
        assert_eq!(waves(4, 2), [[0, 1], [2, 3]]);
        assert_eq!(waves(4, 4), [[0, 1, 2, 3]]);
        assert_eq!(waves(4, 3), [[0, 1, 2], [3, 0, 1]]);
    }
}
