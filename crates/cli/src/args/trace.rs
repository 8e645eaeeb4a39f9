//! Traces: `--trace`, and `paceline replay`.

use clap::Args;
use std::path::PathBuf;

/// Whether a trace is written.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct TraceArgs {
    /// Write what every round did to this file, a JSON line each: drafts, times, what they saved; no
    /// text. A file that is there is overwritten. `paceline replay` reads it
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
}

/// `paceline replay`
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// The file that `--trace FILE` wrote
    #[arg(value_name = "TRACE")]
    pub(crate) file: PathBuf,
    /// Longest draft to compare, in tokens [default: that of the trace]
    #[arg(long, value_name = "N", value_parser = length, conflicts_with = "draft_fixed")]
    pub(crate) draft_max: Option<usize>,
    /// Compare drafts of this many tokens alone
    #[arg(long, value_name = "N", value_parser = length)]
    pub(crate) draft_fixed: Option<usize>,
    /// Tell of the rounds alone that this drafter guessed for, such as mtp or ngram
    #[arg(long, value_name = "NAME")]
    pub(crate) drafter: Option<String>,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

/// The length of a draft that there is.
fn length(text: &str) -> Result<usize, String> {
    let length = text.parse().ok();
    let length = length.filter(|n| (1..=engine::DRAFT_MAX).contains(n));
    length.ok_or_else(|| format!("expected a number from 1 to {}", engine::DRAFT_MAX))
}
