//! What requests to a server may name instead of sending it.

use clap::Args;
use server::Hosts;
use std::path::PathBuf;

/// Where media of requests may come from.
#[derive(Clone, Debug, Args)]
pub(crate) struct MediaArgs {
    /// Fetch pictures and videos that requests name by http and https addresses, from these hosts (HOST or
    /// HOST:PORT), or from any without a list. Names lead to addresses of the public internet alone;
    /// an address that stands in the list may be a private one
    #[arg(
        long,
        value_name = "HOST",
        num_args = 0..=1,
        default_missing_value = "*",
        value_delimiter = ',',
        value_parser = host,
        help_heading = "Server"
    )]
    pub(crate) allow_fetch: Vec<String>,
    /// Read pictures and videos that requests name by file:// URLs or paths, from this folder and those below it
    #[arg(long, value_name = "DIR", help_heading = "Server")]
    pub(crate) media_root: Option<PathBuf>,
}

/// A host that files may be fetched from.
fn host(text: &str) -> Result<String, String> {
    let parsed = Hosts::parse([text]);
    parsed.map_err(|e| e.to_string())?;
    Ok(text.trim().to_owned())
}
