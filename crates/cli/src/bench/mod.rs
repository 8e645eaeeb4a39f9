//! `paceline bench`: what a step costs on this machine, and what speculation
//! saves.
//!
//! Figures of one run only may be compared: memory bandwidth of a shared machine
//! moves by a factor within minutes. So every prompt runs all draft lengths one
//! after the other, and step times are medians of rounds that visit every row
//! count in turn.

mod length;
mod prompts;
mod runs;
mod steps;
mod summary;
mod table;

pub(crate) use table::table;

use crate::args::{BenchArgs, DraftArgs, OutputArgs};
use crate::model;
use anyhow::{Context, Result};
use engine::{Engine, EngineOptions};
pub(crate) use length::BenchLength;
use prompts::{prompts, random};
use runs::Run;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::num::NonZeroUsize;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;
use steps::Times;
use summary::{Summary, summaries};

/// Everything that was measured, as `--json` prints it.
#[derive(Serialize)]
struct Report {
    version: &'static str,
    commit: Option<&'static str>,
    model: engine::ModelInfo,
    environment: BTreeMap<&'static str, String>,
    threads: usize,
    /// Rate of a plain read of as many bytes as a step reads, in the rounds of the steps.
    read_gbs: Option<f64>,
    /// Milliseconds of that read.
    read_ms: Option<f64>,
    /// What a step reads of the target's weights.
    weights_gb: f64,
    load_ms: f64,
    step_ms: BTreeMap<usize, f64>,
    prefill_tok_s: BTreeMap<usize, f64>,
    draft_ms: Option<f64>,
    runs: Vec<Run>,
    /// Chosen draft lengths against fixed ones.
    summary: Vec<Summary>,
}

/// Runs the command.
pub(crate) fn run(args: &BenchArgs, output: OutputArgs) -> Result<ExitCode> {
    let longest = args.draft_lengths.iter().map(|length| length.longest());
    let longest = longest.max().unwrap_or(0);
    let draft = DraftArgs {
        drafter: args.drafter.clone(),
        draft_max: longest,
    };
    // A file that is not there should not cost a minute to find out.
    let file = args.prompts.as_deref().map(read).transpose()?;
    let start = Instant::now();
    let mut model = model::load(&args.model.model, &args.load, &draft, 1)?;
    let load_ms = start.elapsed().as_secs_f64() * 1e3;
    if !output.quiet {
        say!("{}", model::describe(&model.info));
    }
    let mut prompts = prompts(args, file.as_deref(), &model.text)?;
    prompts.extend(random(&model.text, model.info.vocab_size));
    let times = if args.no_steps {
        Times::default()
    } else {
        steps::measure(&mut model, args.reps)?
    };
    let options = EngineOptions {
        reuse: false, // the same prompts come again
        ..EngineOptions::default()
    };
    let engine = Engine::start(model, options);
    let runs = runs::generate(args, &engine, &prompts, output)?;
    let report = report(args, &engine, load_ms, times, runs);
    let mut stdout = io::stdout().lock();
    if args.json {
        writeln!(stdout, "{}", serde_json::to_string(&report)?)?;
    } else {
        let aligned = stdout.is_terminal();
        table::print(&report, aligned, &mut stdout)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Puts together what was measured, and where.
fn report(args: &BenchArgs, engine: &Engine, load_ms: f64, times: Times, runs: Vec<Run>) -> Report {
    let info = engine.info();
    let bytes = info.step_bytes as f64;
    let drafting = runs.iter().filter(|r| r.drafted > 0);
    let (ms, n) = drafting.fold((0.0, 0), |(ms, n), r| (ms + r.draft_ms, n + r.drafted));
    Report {
        version: env!("CARGO_PKG_VERSION"),
        commit: option_env!("PACELINE_COMMIT"),
        environment: environment(),
        model: info.clone(),
        threads: args.load.threads.map_or_else(cores, NonZeroUsize::get),
        read_gbs: times.read_ms.map(|ms| bytes / ms / 1e6),
        read_ms: times.read_ms,
        weights_gb: bytes / 1e9,
        load_ms,
        step_ms: times.step_ms,
        prefill_tok_s: times.prefill_tok_s,
        draft_ms: (n > 0).then(|| ms / n as f64),
        summary: summaries(&runs),
        runs,
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

/// What the figures depend on and the program did not choose.
fn environment() -> BTreeMap<&'static str, String> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let line = |text: &str, key: &str| {
        let line = text.lines().find(|line| line.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let cpu = read("/proc/cpuinfo").and_then(|text| line(&text, "model name"));
    let memory = read("/proc/meminfo").and_then(|text| line(&text, "MemTotal"));
    let pages = read("/sys/kernel/mm/transparent_hugepage/enabled");
    let governor = read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
    let load = read("/proc/loadavg");
    [
        ("cpu", cpu),
        ("cores", Some(cores().to_string())),
        ("memory", memory),
        ("huge_pages", pages),
        ("governor", governor),
        ("load_average", load),
        (
            "system",
            Some(format!(
                "{} {}",
                std::env::consts::OS,
                std::env::consts::ARCH
            )),
        ),
    ]
    .into_iter()
    .filter_map(|(key, value)| Some((key, value?.trim().to_owned())))
    .collect()
}

/// The text in a file.
pub(crate) fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read `{}`", path.display()))
}
