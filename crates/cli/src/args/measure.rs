//! The commands that measure and prove: `bench`, `perplexity` and `conformance`.

use super::draft::{DrafterArgs, OverlapArgs, accept_rule};
use super::kv::{entry as kv_entry, plan as kv_plan};
use super::model::{LoadArgs, ModelArg};
use super::values::{count, some};
use crate::bench::BenchLength;
use clap::Args;
use engine::{Accept, DraftChoice, KvPlan};
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
    #[command(flatten)]
    pub(crate) overlap: OverlapArgs,
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
    /// Context lengths to compare, such as 1k,8k,32k: so many tokens of text stand before each prompt, at least
    #[arg(
        long,
        value_name = "TOKENS,…",
        value_delimiter = ',',
        value_parser = count,
        help_heading = "Bench"
    )]
    pub(crate) contexts: Vec<usize>,
    /// Formats of the KV cache to compare, each as for --kv but with plus signs in place of commas:
    /// bf16,q8_0+turbo4,turbo4+turbo3+protect=2
    #[arg(
        long,
        value_name = "FORMAT,…",
        value_delimiter = ',',
        value_parser = kv_entry,
        help_heading = "Bench"
    )]
    pub(crate) kv_formats: Vec<KvPlan>,
    /// Numbers of texts written at once to compare, by continuous batching
    #[arg(
        long,
        value_name = "N,…",
        value_delimiter = ',',
        value_parser = some,
        help_heading = "Bench"
    )]
    pub(crate) batch: Vec<usize>,
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
    /// Also compare with a KV cache in this format, such as bf16: the mean KL divergence of what may come
    /// next, and how often the likeliest token is the same
    #[arg(long, value_name = "FORMAT", value_parser = kv_plan, help_heading = "Text")]
    pub(crate) kl_divergence: Option<KvPlan>,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

/// `paceline count`.
#[derive(Debug, Args)]
pub(crate) struct CountArgs {
    /// The file to write, whose name ends in .json, for --draft-vocab
    #[arg(value_name = "OUT", value_parser = json_file)]
    pub(crate) out: PathBuf,
    /// Texts to count, as perplexity takes them [default: answers that the model writes]
    #[arg(value_name = "TEXT")]
    pub(crate) texts: Vec<PathBuf>,
    /// Which model.
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// How it is loaded.
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    /// Prompts to answer: JSON lines with `messages` or `prompt` [default: nine short ones]
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "texts",
        help_heading = "Text"
    )]
    pub(crate) prompts: Option<PathBuf>,
    /// Answers to each prompt: the first greedy, the others sampled at temperature 1
    #[arg(
        long,
        value_name = "N",
        default_value_t = 4,
        value_parser = clap::value_parser!(u64).range(1..),
        conflicts_with = "texts",
        help_heading = "Text"
    )]
    pub(crate) answers: u64,
    /// Tokens an answer may have
    #[arg(
        long,
        value_name = "N",
        default_value_t = 256,
        conflicts_with = "texts",
        help_heading = "Text"
    )]
    pub(crate) max_tokens: usize,
}

/// A file that `--draft-vocab` takes.
fn json_file(name: &str) -> Result<PathBuf, String> {
    match name.ends_with(".json") {
        true => Ok(name.into()),
        false => Err("its name must end in .json".into()),
    }
}

/// `paceline conformance`.
#[derive(Debug, Args)]
pub(crate) struct ConformanceArgs {
    /// Which model.
    #[command(flatten)]
    pub(crate) model: ModelArg,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    /// A drafter to prove beside n-grams and those that are found, as for `run`; may be repeated
    #[arg(long, value_name = "DRAFTER", help_heading = "Speculative decoding")]
    pub(crate) draft: Vec<DraftChoice>,
    /// How drafted tokens are accepted: exact is what is proved; with residual (rejection sampling),
    /// sampled cells differ, which shows that a difference is found
    #[arg(
        long,
        value_name = "RULE",
        default_value = "exact",
        value_parser = accept_rule(),
        help_heading = "Speculative decoding"
    )]
    pub(crate) accept: Accept,
    /// One prompt a cell and shorter texts, instead of several kinds of prompts
    #[arg(long, help_heading = "Conformance")]
    pub(crate) quick: bool,
    /// Print one JSON object, with all cells
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}
