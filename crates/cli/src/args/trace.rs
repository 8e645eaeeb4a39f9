//! Traces: `--trace`.

use clap::Args;
use std::path::PathBuf;

/// Whether a trace is written.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct TraceArgs {
    /// Write what every round did to this file, a JSON line each: drafts, times, what they saved; no
    /// text. A file that is there is overwritten
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
}
