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

use crate::args::{DraftArgs, OutputArgs, PerplexityArgs};
use crate::{bench, model};
use anyhow::{Context, Result, bail};
use engine::Text;
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
}

/// Runs the command.
pub(crate) fn run(args: &PerplexityArgs, output: OutputArgs) -> Result<ExitCode> {
    let file = bench::read(&args.file)?;
    let mut model = model::load(&args.model.model, &args.load, &DraftArgs::none(), 1)?;
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
    let (mut nll, mut tokens) = (0.0, 0);
    for (i, text) in texts.iter().enumerate() {
        for (start, end, first) in windows(text.len(), context, stride, args.lead) {
            let mut window = text[start..end].to_vec();
            if Some(text[0]) == model.text.bos() {
                window[0] = text[0];
            }
            let scores = model.speculator.score(&window, first - start)?;
            nll -= scores.iter().sum::<f64>();
            tokens += end - first;
        }
        if output.verbose > 0 && !output.quiet {
            say!(
                "{} of {} texts: {:.4}",
                i + 1,
                texts.len(),
                (nll / tokens.max(1) as f64).exp()
            );
        }
    }
    if tokens == 0 {
        bail!(
            "`{}` has no text of two tokens or more",
            args.file.display()
        );
    }
    let nll = nll / tokens as f64;
    let report = Report {
        model: model.info.name.clone(),
        weights: model.info.weight_bytes,
        activations: args.load.activations.name(),
        texts: texts.len(),
        tokens,
        context,
        stride,
        lead: args.lead,
        nll,
        perplexity: nll.exp(),
    };
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        println!(
            "perplexity {:.4} over {tokens} tokens of {} text{}, windows of {context} tokens every {stride}, {} activations",
            report.perplexity,
            report.texts,
            if report.texts == 1 { "" } else { "s" },
            report.activations
        );
    }
    Ok(ExitCode::SUCCESS)
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
