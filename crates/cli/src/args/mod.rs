//! The command line: every flag with its default, its range and its help.
//!
//! A flag is declared once, as a field in this folder. Its environment variable and its key in
//! `paceline.toml` are derived from its long name by `config.rs`, so the three
//! cannot drift apart.
//!
//! | file | flags of |
//! | --- | --- |
//! | `model` | every command that loads a model: which one, and how |
//! | `kv` | the formats of its KV cache |
//! | `draft` | every command that drafts: who guesses ahead, and how far |
//! | `text`, `form` | `run` and `chat`: how tokens are chosen, what the text has to follow |
//! | `serve`, `convert` | these commands |
//! | `launch` | `launch`, `ps` and `stop` |
//! | `measure` | `bench`, `perplexity` and `conformance` |
//! | `trace` | commands that write a trace, and `replay`, which reads one |
//! | `mod` | the other commands, and verbosity |
//!
//! How a value is spelled is beside the flags that take it, or in `values` if several files do.

mod convert;
mod draft;
mod form;
mod kv;
mod launch;
mod measure;
mod media;
mod model;
mod serve;
mod text;
mod trace;
mod values;

pub(crate) use convert::{Container, ConvertArgs};
pub(crate) use draft::DraftArgs;
pub(crate) use form::{FormArgs, TextForm};
pub(crate) use launch::{LaunchArgs, PsArgs, StopArgs};
pub(crate) use measure::{BenchArgs, ConformanceArgs, CountArgs, PerplexityArgs};
pub(crate) use media::MediaArgs;
pub(crate) use model::{Activations, Device, KvShare, LoadArgs, ModelArg, Weights};
pub(crate) use serve::{KvEventsArgs, KvEventsEncoding, ModelsArgs, ServeArgs};
pub(crate) use text::{ChatArgs, RunArgs, TextArgs};
pub(crate) use trace::{ReplayArgs, TraceArgs};

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use std::ffi::OsString;
use std::path::PathBuf;

const AFTER_HELP: &str = "\
An option may also come from the environment (PACELINE_DRAFT_MAX for --draft-max) or from \
paceline.toml, in this folder or in ~/.config/paceline. The command line counts most, then the \
environment, then the files. `paceline config show` prints the result.";

/// Below the help of `run`.
const RUN_EXAMPLES: &str = "\
Examples:
  paceline run \"Tell me a story about a kite.\"
  cat letter.txt | paceline run \"Summarize this letter:\"
  paceline run -m ORG/NAME --temperature 0.7 --seed 1 -n 200 \"Write a poem.\"
  paceline run --schema city.schema.json \"Describe a city.\"
  paceline run --raw --json \"Once upon a time\" > record.json";

/// Below the help of `launch`.
const LAUNCH_EXAMPLES: &str = "\
The client uses the server that runs, or one that is started for it and ends with it. Its own \
configuration files are neither read nor changed for that.

Examples:
  paceline launch claude -m ORG/NAME
  paceline launch codex -- exec \"Explain this repository.\"
  paceline launch opencode --print";

/// Runs language models with speculative decoding: same text, sooner
#[derive(Debug, Parser)]
#[command(
    name = "paceline",
    version,
    long_version = crate::version(),
    max_term_width = 100,
    after_help = AFTER_HELP
)]
pub(crate) struct Cli {
    /// The command to run.
    #[command(subcommand)]
    pub(crate) command: Command,
    /// How much the program says on stderr.
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Write one text and exit
    #[command(after_help = RUN_EXAMPLES)]
    Run(Box<RunArgs>),
    /// Talk with a model
    Chat(Box<ChatArgs>),
    /// Serve the OpenAI API over HTTP
    Serve(Box<ServeArgs>),
    /// Start a coding agent or another client that uses a model here
    #[command(after_help = LAUNCH_EXAMPLES)]
    Launch(Box<LaunchArgs>),
    /// List the servers that run
    Ps(PsArgs),
    /// Stop servers, after what they are writing
    Stop(StopArgs),
    /// Show what a model is, who drafts for it and how much memory it takes
    Inspect(Box<InspectArgs>),
    /// Measure steps, prefill and what speculation saves
    Bench(Box<BenchArgs>),
    /// Measure how well a model predicts a text
    Perplexity(Box<PerplexityArgs>),
    /// Count the tokens of a model's text, for --draft-vocab
    Count(Box<CountArgs>),
    /// Prove on a model and a device that speculation changes no token
    Conformance(Box<ConformanceArgs>),
    /// Tell from a trace what other draft lengths would have brought
    Replay(ReplayArgs),
    /// Write a checkpoint in another format or size
    Convert(Box<ConvertArgs>),
    /// Fetch a model, and who drafts for it, from the hub into its cache
    Pull(PullArgs),
    /// List the models that are here: bundled, and in the hub cache
    List(ListArgs),
    /// Remove models from the hub cache
    Rm(RmArgs),
    /// Check this machine: processor, memory, kernels, caches
    Doctor(DoctorArgs),
    /// Show the configuration, and which file or variable each value is from
    Config(ConfigArgs),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the manual page, or write one for every command into a folder
    Man {
        /// The folder; it is made if it is missing
        #[arg(value_name = "FOLDER")]
        folder: Option<PathBuf>,
    },
}

/// Verbosity.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct OutputArgs {
    /// More messages on stderr; twice for internals
    #[arg(short, long, global = true, action = clap::ArgAction::Count, help_heading = "Output")]
    pub(crate) verbose: u8,
    /// Only errors on stderr
    #[arg(
        short,
        long,
        global = true,
        conflicts_with = "verbose",
        help_heading = "Output"
    )]
    pub(crate) quiet: bool,
}

/// `paceline inspect`
#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// The model, as for -m
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    pub(crate) positional: Option<String>,
    #[command(flatten)]
    pub(crate) model: ModelArg,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    #[command(flatten)]
    pub(crate) draft: DraftArgs,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

/// `paceline pull`
#[derive(Debug, Args)]
pub(crate) struct PullArgs {
    /// ORG/NAME on the hub, ORG/NAME@REVISION, or ORG/NAME:FORMAT for GGUF files, such as Q4_K_M
    #[arg(value_name = "MODEL")]
    pub(crate) model: String,
    /// Fetch its drafter too: an assistant, or the head that a conversion has dropped
    #[arg(long)]
    pub(crate) draft: bool,
    /// Fetch only the `mtp.*` tensors, for conversions of this model
    #[arg(long, conflicts_with = "draft")]
    pub(crate) head_only: bool,
    /// Leave out the vision tower's file (`mmproj`) that goes with GGUF files
    #[arg(long)]
    pub(crate) no_mmproj: bool,
}

/// `paceline list`
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `paceline rm`
#[derive(Debug, Args)]
pub(crate) struct RmArgs {
    /// ORG/NAME of each
    #[arg(value_name = "MODEL", required = true)]
    pub(crate) models: Vec<String>,
}

/// `paceline doctor`
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Measure again how this CPU reads weights fastest, and how each GPU multiplies
    #[arg(long)]
    pub(crate) recalibrate: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `paceline config`
#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    /// What to do with the configuration.
    #[command(subcommand)]
    pub(crate) command: ConfigCommand,
}

/// `paceline config …`
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Print what a command would run with, as a paceline.toml
    Show {
        /// Print command lines instead, with every option that is not at its default
        #[arg(long)]
        as_command: bool,
        /// A command and its options; every command if absent
        #[arg(
            value_name = "COMMAND",
            trailing_var_arg = true,
            allow_hyphen_values = true
        )]
        line: Vec<OsString>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
