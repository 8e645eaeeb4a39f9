//! The binary `paceline`: flags, files and the environment on one side, the
//! engine and its server on the other.
//!
//! | room | what it does |
//! | --- | --- |
//! | `args` | every flag, its default and its help |
//! | `config` | command line over environment over files over defaults |
//! | `bundled` | the models inside the binary |
//! | `places` | the folders that a user's programs share: hub cache, heads, results |
//! | `usage`, `prompt` | options that cancel each other, hints; the prompt of `run` |
//! | `resolve` | what `-m` names, and where its drafter may lie |
//! | `model` | `-m` and its companions → a loaded model |
//! | `form` | options that constrain a reply → a grammar |
//! | `reply` | one request → text on a stream, and a line about it |
//! | `run`, `chat`, `serve`, `inspect`, `bench`, `perplexity`, `count`, `conformance`, `replay`, `convert`, `pull`, `doctor` | the commands |
//! | `traced` | `--trace`: the trace of what an engine does |
//! | `launch`, `servers` | clients that are started; which servers run |
//! | `machine`, `gpu`, `tuning` | the memory of this machine, its GPUs, and how its CPU reads weights |
//! | `progress`, `interrupts` | signs of life, and Ctrl-C |
//!
//! Only here are the environment and configuration files read. Text of a model
//! goes to stdout, everything else to stderr. A failure is one line there and
//! exit code 1; a wrong command line is exit code 2.

#![forbid(unsafe_code)]

/// Prints a line to stderr. If stderr is gone, there is nobody left to tell.
macro_rules! say {
    ($($line:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($line)*);
    }};
}

mod args;
mod bench;
mod bundled;
mod chat;
mod config;
mod conformance;
mod convert;
mod count;
mod doctor;
mod form;
mod gpu;
mod inspect;
mod interrupts;
mod launch;
mod machine;
mod media;
mod model;
mod perplexity;
mod places;
mod progress;
mod prompt;
mod pull;
mod replay;
mod reply;
mod report;
mod resolve;
mod run;
mod serve;
mod servers;
mod templates;
mod traced;
mod tuning;
mod usage;
mod words;
mod wrap;

use anyhow::{Context, Result};
use args::{Cli, Command, ConfigCommand, OutputArgs};
use clap::{CommandFactory, FromArgMatches, Parser};
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use tracing_subscriber::filter::LevelFilter;

/// Exit code after Ctrl-C, as shells have it.
const INTERRUPTED: u8 = 130;
/// Exit code after SIGTERM, as shells have it.
const TERMINATED: u8 = 143;
/// Exit code after a wrong command line, as `clap` has it.
const USAGE: i32 = 2;

fn main() -> ExitCode {
    match start() {
        Ok(code) => code,
        // Whoever read our stdout has seen enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            say!("paceline: {}", one_line(&error));
            ExitCode::FAILURE
        }
    }
}

fn start() -> Result<ExitCode> {
    let layered = match config::load() {
        Ok(layered) => layered,
        Err(error) => {
            // A broken file must not keep anyone from reading the help.
            return match Cli::parse().command {
                Command::Completions { shell } => completions(shell),
                _ => Err(error),
            };
        }
    };
    let matches = layered.command.clone().try_get_matches();
    let matches = matches.unwrap_or_else(|error| {
        let _ = error.print();
        if let Some(hint) = usage::hint(&error, &layered) {
            say!("\n  tip: {hint}");
        }
        std::process::exit(error.exit_code())
    });
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|e| e.exit());
    if let Err(message) = usage::check(&matches) {
        usage_error(&message);
    }
    let output = cli.output;
    if !output.quiet {
        let names = std::env::vars_os().map(|(name, _)| name);
        for name in layered.unknown_variables(names) {
            say!(
                "paceline: unknown variable `{}` is ignored: no option has this name",
                name.display()
            );
        }
    }
    match cli.command {
        Command::Run(args) => {
            log(output, LevelFilter::WARN);
            run::run(&args, output)
        }
        Command::Chat(args) => {
            log(output, LevelFilter::WARN);
            chat::run(&args, output)
        }
        Command::Serve(args) => {
            log(output, LevelFilter::INFO);
            let line: Vec<_> = std::env::args_os().collect();
            serve::run(&args, &layered, &line, output)
        }
        Command::Launch(args) => {
            log(output, LevelFilter::ERROR);
            launch::run(*args, output)
        }
        Command::Ps(args) => servers::list(&args),
        Command::Stop(args) => servers::stop(&args, output),
        Command::Inspect(args) => inspect::run(&args, output),
        Command::Bench(args) => {
            log(output, LevelFilter::WARN);
            bench::run(&args, output)
        }
        Command::Perplexity(args) => {
            log(output, LevelFilter::WARN);
            perplexity::run(&args, output)
        }
        Command::Count(args) => {
            log(output, LevelFilter::WARN);
            count::run(&args, output)
        }
        Command::Replay(args) => replay::run(&args, output),
        Command::Conformance(args) => {
            log(output, LevelFilter::WARN);
            conformance::run(&args, output)
        }
        Command::Convert(args) => convert::run(&args, output),
        Command::Pull(args) => pull::run(&args, output),
        Command::List(args) => pull::list(&args),
        Command::Rm(args) => pull::remove(&args, output),
        Command::Doctor(args) => doctor::run(&args),
        Command::Config(args) => {
            let ConfigCommand::Show { as_command, line } = args.command;
            io::stdout().write_all(layered.show(&line, as_command)?.as_bytes())?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Completions { shell } => completions(shell),
        Command::Man { folder } => manual(folder.as_deref()),
    }
}

/// Prints the manual page, or writes those of all commands into `folder`.
fn manual(folder: Option<&Path>) -> Result<ExitCode> {
    match folder {
        None => clap_mangen::Man::new(Cli::command()).render(&mut io::stdout())?,
        Some(folder) => {
            let cannot = || format!("cannot write `{}`", folder.display());
            std::fs::create_dir_all(folder).with_context(cannot)?;
            clap_mangen::generate_to(Cli::command(), folder).with_context(cannot)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn completions(shell: clap_complete::Shell) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut with_model_names(), "paceline", &mut script);
    io::stdout().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

/// The command line, with the models that are here as the values of `-m`.
fn with_model_names() -> clap::Command {
    let names = resolve::known_names();
    let command = Cli::command();
    let with_model = |c: &clap::Command| c.get_arguments().any(|a| a.get_id() == "model");
    let of: Vec<String> = command
        .get_subcommands()
        .filter(|c| with_model(c) && c.get_name() != "pull")
        .map(|c| c.get_name().to_owned())
        .collect();
    of.into_iter().fold(command, |command, name| {
        let values = clap::builder::PossibleValuesParser::new(&names);
        command.mut_subcommand(name, |c| {
            c.mut_arg("model", |arg| {
                if arg.get_long().is_some() {
                    arg.value_parser(values)
                } else {
                    arg
                }
            })
        })
    })
}

/// Sends what libraries log to stderr, from `level` up.
fn log(output: OutputArgs, level: LevelFilter) {
    let level = match output {
        OutputArgs { quiet: true, .. } => LevelFilter::ERROR,
        OutputArgs { verbose: 0, .. } => level,
        OutputArgs { verbose: 1, .. } => level.max(LevelFilter::DEBUG),
        _ => LevelFilter::TRACE,
    };
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(|| Log)
        // It would report what it cannot write there with `eprintln!`, which panics.
        .log_internal_errors(false)
        .with_target(false)
        .init();
}

/// Stderr for a log. A line that cannot be written, on a full disk or for a reader that has
/// left, is lost; what it was about goes on.
struct Log;

impl Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let _ = io::stderr().write_all(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Ends the program because of its command line.
fn usage_error(message: &str) -> ! {
    say!("paceline: {message}");
    std::process::exit(USAGE);
}

/// What `--version` prints.
fn version() -> String {
    let build = if cfg!(debug_assertions) {
        "debug"
    } else {
        "release"
    };
    format!(
        "{} ({build}, {}-{})\nbundled models: {}\narchitectures: {}",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::ARCH,
        std::env::consts::OS,
        bundled::names(),
        models::TARGETS
            .iter()
            .flat_map(|f| f.names)
            .copied()
            .collect::<Vec<_>>()
            .join(", "),
    )
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.chain().find_map(|e| e.downcast_ref::<io::Error>());
    io.is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

/// An error and its causes as one line. Some errors quote their cause: it is
/// not said twice. Control characters come from files and arguments, and stay
/// out of the terminal.
fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if line.ends_with(&cause) {
            continue;
        }
        if !line.is_empty() {
            line += ": ";
        }
        line += &cause;
    }
    let words = line.split_whitespace().collect::<Vec<_>>().join(" ");
    words
        .chars()
        .flat_map(|c| {
            if c.is_control() {
                c.escape_default().collect()
            } else {
                vec![c]
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn an_error_is_one_line_without_repetition() {
        let error = anyhow!("no such file")
            .context("cannot read `x`: no such file")
            .context("cannot\nload \u{1b}[1m");
        assert_eq!(
            one_line(&error),
            "cannot load \\u{1b}[1m: cannot read `x`: no such file"
        );
    }

    #[test]
    fn a_closed_pipe_is_no_failure() {
        let pipe = || io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(is_broken_pipe(&anyhow!(pipe()).context("writing")));
        assert!(!is_broken_pipe(&anyhow!("other")));
    }
}
