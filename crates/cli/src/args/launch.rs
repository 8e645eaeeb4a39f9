//! `launch`, `ps` and `stop`: clients that are started, and the servers that run.

use super::draft::DraftArgs;
use super::model::LoadArgs;
use clap::Args;
use clap::builder::PossibleValuesParser;
use std::ffi::OsString;

/// `paceline launch`
#[derive(Debug, Args)]
pub(crate) struct LaunchArgs {
    /// The client
    #[arg(value_name = "CLIENT", value_parser = PossibleValuesParser::new(crate::launch::names()))]
    pub(crate) client: String,
    /// Arguments of the client, after `--`
    #[arg(value_name = "ARGUMENTS", last = true)]
    pub(crate) arguments: Vec<OsString>,
    /// Print the client's settings as lines for a shell instead of starting it
    #[arg(long, help_heading = "Launch")]
    pub(crate) print: bool,
    /// The key that a running server asks for
    #[arg(long, value_name = "KEY", help_heading = "Launch")]
    pub(crate) api_key: Option<String>,
    /// The model, as for `serve`; the running server's if absent, else the bundled one
    #[arg(short, long, value_name = "MODEL", help_heading = "Model")]
    pub(crate) model: Option<String>,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    #[command(flatten)]
    pub(crate) draft: DraftArgs,
}

/// `paceline ps`
#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `paceline stop`
#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    /// Which servers, by process, port, URL or model; the only one that runs if absent
    #[arg(value_name = "SERVER", conflicts_with = "all")]
    pub(crate) servers: Vec<String>,
    /// Every server of this user
    #[arg(long)]
    pub(crate) all: bool,
}
