//! `paceline perplexity`: how well a model predicts a text.
//!
//! ```text
//! perplexity = exp(- Σ ln p(token | what is before it in its window) / tokens scored)
//! ```
//!
//! A text longer than the context is cut into windows, one every `stride` tokens.
//! Each scores the tokens that the one before it did not, so every token but the
//! first is scored once, with at least `context - stride` tokens before it. With
//! `--lead L` a window leaves its first `L` tokens to be read only: a context of
//! 512 with stride 512 and lead 256 is what llama.cpp's perplexity tool computes.
//! A window starts with the beginning-of-text token where the text does.
//!
//! With `--kl-divergence FORMAT` every window is read twice, first with keys and values in that format, whose
//! logits `p` are kept while those of `--kv`, `q`, come:
//!
//! ```text
//! KL divergence = Σ Σ p ln(p / q) / tokens scored          same top = tokens scored where argmax p = argmax q
//! ```

use crate::args::{DraftArgs, OutputArgs, PerplexityArgs};
use crate::{bench, model, resolve, words};
use anyhow::{Context, Result, bail};
use engine::{KvMemory, Model, Text, divergence, log_prob};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::Path;
use std::process::ExitCode;

/// A line of a file of JSON lines.
#[derive(Deserialize)]
struct Line {
    #[serde(default)]
    messages: Vec<serde_json::Value>,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    prompt: Option<String>,
    #[serde(default)]
    response: Option<String>,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    model: String,
    weights: u64,
    activations: &'static str,
    texts: usize,
    tokens: usize,
    context: usize,
    stride: usize,
    lead: Option<usize>,
    nll: f64,
    perplexity: f64,
    kv_format: String,
    kv_token_bytes: usize,
    against: Option<Against>,
}

/// How far the distributions are from those with another format of keys and values.
#[derive(Clone, Serialize)]
struct Against {
    kv_format: String,
    /// Nats a token.
    kl_divergence: f64,
    /// Of the tokens scored, how many have the same likeliest one.
    same_top: f64,
}

/// Sums over the tokens scored.
#[derive(Default)]
struct Sums {
    tokens: usize,
    nll: f64,
    divergence: f64,
    same_top: usize,
}

impl Sums {
    fn perplexity(&self) -> f64 {
        (self.nll / self.tokens.max(1) as f64).exp()
    }
}

/// Runs the command.
pub(crate) fn run(args: &PerplexityArgs, output: OutputArgs) -> Result<ExitCode> {
    let file = bench::read(&args.file)?;
    let name = &args.model.model;
    let resolved = resolve::model(name)?;
    let mut options = model::options(&args.load, &DraftArgs::none(), 1, &resolved)?;
    // Windows are as long as the context, which must not depend on the memory there is.
    options.kv_memory = KvMemory::Whole;
    let mut model = model::load_with(name, &args.load, &resolved, &options)?;
    let texts = texts(&args.file, &file, args.texts, &model.text)?;
    let context = model.info.context;
    let stride = args.stride.unwrap_or(context / 2).max(1);
    if stride > context - args.lead.unwrap_or(1).min(context) && args.lead.is_none()
        || stride > context
    {
        bail!(
            "windows of {context} tokens every {stride} leave tokens without any before them: use a smaller --stride"
        );
    }
    let mut sums = Sums::default();
    for (i, text) in texts.iter().enumerate() {
        for (start, end, first) in windows(text.len(), context, stride, args.lead) {
            let mut window = text[start..end].to_vec();
            if Some(text[0]) == model.text.bos() {
                window[0] = text[0];
            }
            score(&mut model, args, (&window, first - start), &mut sums)?;
        }
        if output.verbose > 0 && !output.quiet {
            say!(
                "{} of {} texts: {:.4}",
                i + 1,
                texts.len(),
                sums.perplexity()
            );
        }
    }
    if sums.tokens == 0 {
        bail!(
            "`{}` has no text of two tokens or more",
            args.file.display()
        );
    }
    let share = |sum: f64| sum / sums.tokens as f64;
    let report = Report {
        model: model.info.name.clone(),
        weights: model.info.weight_bytes,
        activations: args.load.activations.name(),
        texts: texts.len(),
        tokens: sums.tokens,
        context,
        stride,
        lead: args.lead,
        nll: share(sums.nll),
        perplexity: sums.perplexity(),
        kv_format: args.load.kv.to_string(),
        kv_token_bytes: model.info.kv_token_bytes,
        against: args.kl_divergence.map(|kv| Against {
            kv_format: kv.to_string(),
            kl_divergence: share(sums.divergence),
            same_top: share(sums.same_top as f64),
        }),
    };
    print(&report, args.json)?;
    Ok(ExitCode::SUCCESS)
}

/// Scores the tokens of a window from number `first` on.
fn score(
    model: &mut Model,
    args: &PerplexityArgs,
    (window, first): (&[u32], usize),
    sums: &mut Sums,
) -> Result<()> {
    let mut wanted: Vec<f32> = Vec::new();
    if let Some(kv) = args.kl_divergence {
        model.change_kv(kv).map_err(words::load_error)?;
        let speculator = &mut model.speculator;
        speculator.each_logits(window, first, |_, logits| wanted.extend_from_slice(logits))?;
        model.change_kv(args.load.kv).map_err(words::load_error)?;
    }
    let mut row = 0;
    model
        .speculator
        .each_logits(window, first, |token, logits| {
            sums.tokens += 1;
            sums.nll -= log_prob(logits, token as usize);
            if !wanted.is_empty() {
                let wanted = &wanted[row * logits.len()..][..logits.len()];
                sums.divergence += divergence(wanted, logits);
                sums.same_top += usize::from(top(wanted) == top(logits));
                row += 1;
            }
        })?;
    Ok(())
}

/// The likeliest token, the first of several.
fn top(logits: &[f32]) -> usize {
    let larger = |best: usize, token: usize| match logits[token] > logits[best] {
        true => token,
        false => best,
    };
    (0..logits.len()).fold(0, larger)
}

fn print(report: &Report, json: bool) -> Result<()> {
    if json {
        println!("{}", serde_json::to_string(report)?);
        return Ok(());
    }
    println!(
        "perplexity {:.4} over {} tokens of {} text{}, windows of {} tokens every {}, {} activations, KV cache as {}, {} a token",
        report.perplexity,
        report.tokens,
        report.texts,
        if report.texts == 1 { "" } else { "s" },
        report.context,
        report.stride,
        report.activations,
        report.kv_format,
        model::bytes(report.kv_token_bytes as u64),
    );
    if let Some(against) = &report.against {
        println!(
            "against {}: KL divergence {:.6}, the likeliest token is the same for {:.2} %",
            against.kv_format,
            against.kl_divergence,
            100.0 * against.same_top
        );
    }
    Ok(())
}

/// Windows `(start, end, first scored)` over a text of `n` tokens.
fn windows(
    n: usize,
    context: usize,
    stride: usize,
    lead: Option<usize>,
) -> Vec<(usize, usize, usize)> {
    let mut windows = Vec::new();
    // The first token has nothing before it.
    let mut scored = 1;
    for start in (0..n).step_by(stride) {
        let end = (start + context).min(n);
        let first = lead.map_or(scored, |lead| scored.max(start + lead.max(1)));
        if first < end {
            windows.push((start, end, first));
            scored = end;
        }
    }
    windows
}

/// The texts of `file`, the contents of the file at `path`, as tokens; the first `most` of them, or
/// all.
pub(crate) fn texts(
    path: &Path,
    file: &str,
    most: Option<usize>,
    text: &Text,
) -> Result<Vec<Vec<u32>>> {
    let is_lines = path.extension().is_some_and(|e| e == "jsonl");
    if !is_lines {
        return Ok(vec![text.encode_prompt(file)?]);
    }
    let path = path.display();
    let lines = file
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty());
    let texts = lines.map(|(n, line)| {
        let place = || format!("line {} of `{path}`", n + 1);
        let line: Line = serde_json::from_str(line).with_context(place)?;
        if let Some(whole) = line.text {
            return Ok(text.encode_prompt(&whole)?);
        }
        let mut messages = line.messages;
        for (role, content) in [("user", line.prompt), ("assistant", line.response)] {
            messages.extend(content.map(|content| json!({"role": role, "content": content})));
        }
        if messages.is_empty() {
            bail!(
                "{} has none of `text`, `messages`, `prompt` and `response`",
                place()
            );
        }
        // A conversation that is over: nobody is asked to answer.
        model::encode_conversation(text, messages).with_context(place)
    });
    texts.take(most.unwrap_or(usize::MAX)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_score_every_token_but_the_first_once() {
        for n in 0..40 {
            for context in 2..12 {
                for stride in 1..context {
                    let mut scored = Vec::new();
                    for (start, end, first) in windows(n, context, stride, None) {
                        assert!(
                            start < first && end - start <= context,
                            "{n} {context} {stride}"
                        );
                        scored.extend(first..end);
                    }
                    let all: Vec<usize> = (1..n).collect();
                    assert_eq!(scored, all, "{n} {context} {stride}");
                }
            }
        }
    }

    #[test]
    fn a_lead_is_read_and_not_scored() {
        assert_eq!(
            windows(11, 4, 4, Some(2)),
            [(0, 4, 2), (4, 8, 6), (8, 11, 10)]
        );
    }
}
