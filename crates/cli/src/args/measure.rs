//! The commands that measure: `bench` and `perplexity`.

use super::draft::DrafterArgs;
use super::model::{LoadArgs, ModelArg};
use super::values::count;
use crate::bench::BenchLength;
use clap::Args;
use std::path::PathBuf;

/// `paceline bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Which model.
    #[command(flatten)]
    pub(crate) model: ModelArg,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    /// Which drafter guesses ahead; `--draft-lengths` says how far.
    #[command(flatten)]
    pub(crate) drafter: DrafterArgs,
    /// Prompts to run: JSON lines with `category` and `messages` or `prompt` [default: nine short
    /// ones]
    #[arg(long, value_name = "FILE", help_heading = "Bench")]
    pub(crate) prompts: Option<PathBuf>,
    /// Draft lengths to compare
    #[arg(
        long,
        value_name = "N,…",
        value_delimiter = ',',
        default_value = "0,1,2,3,4,auto",
        help_heading = "Bench"
    )]
    pub(crate) draft_lengths: Vec<BenchLength>,
    /// Temperatures to compare
    #[arg(
        long,
        value_name = "T,…",
        value_delimiter = ',',
        default_value = "0",
        help_heading = "Bench"
    )]
    pub(crate) temperatures: Vec<f32>,
    /// Probability that samples are cut to, where the temperature is not 0
    #[arg(long, value_name = "P", default_value_t = 0.9, help_heading = "Bench")]
    pub(crate) top_p: f32,
    /// Tokens a text may have
    #[arg(long, value_name = "N", default_value_t = 128, help_heading = "Bench")]
    pub(crate) max_tokens: usize,
    /// Times that each step is timed; the median counts
    #[arg(
        long,
        value_name = "N",
        default_value_t = 21,
        conflicts_with = "no_steps",
        help_heading = "Bench"
    )]
    pub(crate) reps: usize,
    /// Leave out the timing of steps and prefill
    #[arg(long, help_heading = "Bench")]
    pub(crate) no_steps: bool,
    /// Print one JSON object
    #[arg(long, help_heading = "Bench")]
    pub(crate) json: bool,
}

/// `paceline perplexity`.
#[derive(Debug, Args)]
pub(crate) struct PerplexityArgs {
    /// The text: JSON lines with `text`, `messages`, or `prompt` and `response` if it ends in .jsonl,
    /// else one plain text
    pub(crate) file: PathBuf,
    /// Which model.
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// How it is loaded; `--context` is the length of a window.
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    /// Tokens from one window to the next [default: half a window]
    #[arg(long, value_name = "TOKENS", value_parser = count, help_heading = "Text")]
    pub(crate) stride: Option<usize>,
    /// Tokens at the start of every window that are read and not scored [default: those that the
    /// window before has scored]
    #[arg(long, value_name = "TOKENS", value_parser = count, help_heading = "Text")]
    pub(crate) lead: Option<usize>,
    /// Texts of the file to score, from the first [default: all]
    #[arg(long, value_name = "N", help_heading = "Text")]
    pub(crate) texts: Option<usize>,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}
