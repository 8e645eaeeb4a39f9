//! What speculation saves: every prompt answered with every draft length and temperature.

use super::length::BenchLength;
use super::prompts::{Prompt, RANDOM_TEMPERATURE};
use super::steps::median;
use crate::args::{BenchArgs, OutputArgs};
use anyhow::{Result, bail};
use engine::{Accept, Engine, ModelInfo, Request, RequestOutcome, Sampling, Speculation};
use serde::Serialize;

/// The class that sums up all others.
const ALL: &str = "all";

/// One class of prompts with one draft length and temperature.
#[derive(Default, Serialize)]
pub(super) struct Run {
    pub(super) class: String,
    /// Who may guess.
    pub(super) drafter: Option<String>,
    /// How long the drafts are.
    pub(super) draft: BenchLength,
    pub(super) temperature: f32,
    pub(super) prompts: usize,
    pub(super) tokens: usize,
    pub(super) tok_s: f64,
    /// Milliseconds from a request to its first token: the median of the prompts.
    pub(super) first_token_ms: f64,
    /// This rate over that of the same prompts without drafts.
    pub(super) speedup: f64,
    pub(super) tokens_per_round: f64,
    /// Share of the rounds with a draft at this position in which it was
    /// accepted, and so all before it.
    pub(super) accepted_by_position: Vec<f64>,
    pub(super) ms_draft_per_token: f64,
    #[serde(skip)]
    pub(super) first_tokens_ms: Vec<f64>,
    #[serde(skip)]
    pub(super) decode_ms: f64,
    #[serde(skip)]
    pub(super) rounds: u64,
    /// Tokens that rounds have written, those that end a text among them.
    #[serde(skip)]
    pub(super) written_by_rounds: f64,
    #[serde(skip)]
    pub(super) emitted: u64,
    #[serde(skip)]
    pub(super) positions: Positions,
    #[serde(skip)]
    pub(super) draft_ms: f64,
    #[serde(skip)]
    pub(super) drafted: u64,
}

impl Run {
    fn add(&mut self, outcome: &RequestOutcome) {
        let s = &outcome.speculation;
        self.prompts += 1;
        self.tokens += outcome.usage.completion_tokens;
        // The first token comes from the prefill.
        self.emitted += (outcome.usage.completion_tokens as u64).saturating_sub(1);
        let timings = &outcome.timings;
        self.first_tokens_ms
            .push(timings.queued_ms + timings.prefill_ms);
        self.decode_ms += timings.decode_ms;
        self.rounds += s.rounds;
        self.written_by_rounds += s.tokens_per_round * s.rounds as f64;
        self.draft_ms += s.ms_draft;
        self.drafted += s.drafted;
        self.positions.add(s);
    }

    /// Turns sums into rates.
    fn finish(&mut self) {
        self.first_token_ms = median(std::mem::take(&mut self.first_tokens_ms));
        self.tok_s = ratio(self.emitted as f64, self.decode_ms / 1e3);
        self.tokens_per_round = ratio(self.written_by_rounds, self.rounds as f64);
        self.accepted_by_position = self.positions.shares();
        self.ms_draft_per_token = ratio(self.draft_ms, self.drafted as f64);
    }
}

/// Drafted tokens and accepted ones, by position in the draft.
#[derive(Default)]
pub(super) struct Positions(Vec<(u64, u64)>);

impl Positions {
    /// Adds what a request tells.
    pub(super) fn add(&mut self, told: &Speculation) {
        if self.0.len() < told.by_position.len() {
            self.0.resize(told.by_position.len(), (0, 0));
        }
        for (sum, position) in self.0.iter_mut().zip(&told.by_position) {
            sum.0 += position.drafted;
            sum.1 += position.accepted;
        }
    }

    /// The share of drafted tokens that were accepted, by position.
    pub(super) fn shares(&self) -> Vec<f64> {
        let share = |&(drafted, accepted): &(u64, u64)| ratio(accepted as f64, drafted as f64);
        self.0.iter().map(share).collect()
    }
}

/// `a / b`, or 0 where nothing was counted.
pub(super) fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 0.0 }
}

/// Tokens that a text of a warm-up reads and writes, at most.
const WARM_UP_TOKENS: usize = 32;

/// A request like that after `prompt` with drafts of `draft`, but short: the first steps of a kind can take longer, as
/// where a GPU's kernels are compiled and recorded, and are not to be timed. A longer text has no other steps.
pub(super) fn warm_up(
    args: &BenchArgs,
    info: &ModelInfo,
    prompt: &Prompt,
    temperature: f32,
    draft: BenchLength,
) -> Request {
    let first = prompt.ids.len().saturating_sub(WARM_UP_TOKENS);
    let short = Prompt {
        ids: prompt.ids[first..].to_vec(),
        class: prompt.class.clone(),
        ..*prompt
    };
    let mut request = request(args, &short, 0, temperature);
    (request.draft, request.drafters) = draft.of_request(info);
    request.max_tokens = Some(args.max_tokens.min(WARM_UP_TOKENS));
    request.ignore_eos = true;
    request
}

/// Writes after every prompt with every draft length and temperature.
pub(super) fn generate(
    args: &BenchArgs,
    engine: &Engine,
    prompts: &[Prompt],
    output: OutputArgs,
) -> Result<Vec<Run>> {
    let info = engine.info();
    let lengths = lengths(&args.draft_lengths, info.drafter.is_some());
    if let (Some(prompt), Some(&temperature)) = (prompts.first(), args.temperatures.first()) {
        for &draft in &lengths {
            // Why one fails is told of the prompts that are timed.
            let _ = engine.complete(warm_up(args, info, prompt, temperature, draft));
        }
    }
    let mut runs: Vec<Run> = Vec::new();
    for (i, prompt) in prompts.iter().enumerate() {
        let temperatures = match prompt.is_random {
            true => &[RANDOM_TEMPERATURE][..],
            false => &args.temperatures,
        };
        for &temperature in temperatures {
            let mut plain: Option<Vec<u32>> = None;
            for &draft in &lengths {
                let mut request = request(args, prompt, i as u64, temperature);
                (request.draft, request.drafters) = draft.of_request(info);
                let (_, tokens, outcome) = match engine.complete(request) {
                    Ok(done) => done,
                    Err(error) => {
                        if !output.quiet {
                            say!("prompt {i} is left out: {error}");
                        }
                        continue;
                    }
                };
                match &plain {
                    None => plain = Some(tokens),
                    Some(plain) if is_exact(&outcome) && *plain != tokens => {
                        bail!(
                            "prompt {i}: drafts of length {draft} changed the text: this is a bug"
                        )
                    }
                    Some(_) => {}
                }
                let classes = [prompt.class.as_str(), ALL];
                // Texts that are hard to guess would blur what is told of all others.
                let n_classes = if prompt.is_random { 1 } else { 2 };
                for class in &classes[..n_classes] {
                    let drafter = draft.drafters(info);
                    run_of(&mut runs, class, drafter, draft, temperature).add(&outcome);
                }
            }
        }
    }
    runs.iter_mut().for_each(Run::finish);
    compare(&mut runs);
    // Classes in the order of the prompts, the sum of all last.
    runs.sort_by_key(|r| r.class == ALL);
    Ok(runs)
}

/// Whether drafts must not have changed the text. A benchmark checks its own answer.
pub(super) fn is_exact(outcome: &RequestOutcome) -> bool {
    outcome.speculation.accept != Some(Accept::Residual.name())
}

/// The draft lengths that are run: without a drafter, plain decoding alone.
pub(super) fn lengths(wished: &[BenchLength], drafts: bool) -> Vec<BenchLength> {
    let is_plain = |length: &&BenchLength| length.longest() == 0;
    match drafts {
        true => wished.to_vec(),
        false => vec![BenchLength::Fixed(0); wished.iter().filter(is_plain).count().max(1)],
    }
}

/// The request that answers `prompt`.
pub(super) fn request(args: &BenchArgs, prompt: &Prompt, seed: u64, temperature: f32) -> Request {
    let mut request = Request::new(prompt.ids.clone());
    request.max_tokens = Some(args.max_tokens);
    request.ignore_eos = prompt.is_random;
    request.sampling = Sampling {
        temperature,
        top_p: match temperature > 0.0 && !prompt.is_random {
            true => args.top_p,
            false => 1.0,
        },
        seed,
        ..Sampling::default()
    };
    request
}

/// The run of this class, draft length and temperature, a new one if there is none yet.
fn run_of<'a>(
    runs: &'a mut Vec<Run>,
    class: &str,
    drafter: Option<String>,
    draft: BenchLength,
    temperature: f32,
) -> &'a mut Run {
    let same = |r: &Run| r.class == class && r.draft == draft && r.temperature == temperature;
    let place = runs.iter().position(same).unwrap_or_else(|| {
        runs.push(Run {
            class: class.into(),
            drafter,
            draft,
            temperature,
            ..Run::default()
        });
        runs.len() - 1
    });
    &mut runs[place]
}

/// Sets every run's rate against that of the same prompts without drafts.
fn compare(runs: &mut [Run]) {
    let plain: Vec<(String, f32, f64)> = runs
        .iter()
        .filter(|r| r.draft.longest() == 0)
        .map(|r| (r.class.clone(), r.temperature, r.tok_s))
        .collect();
    for run in runs {
        let base = plain
            .iter()
            .find(|(class, t, _)| *class == run.class && *t == run.temperature);
        run.speedup = base.map_or(0.0, |(.., rate)| ratio(run.tok_s, *rate));
    }
}
