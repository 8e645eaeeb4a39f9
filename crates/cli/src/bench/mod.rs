//! `paceline bench`: what a step costs on this machine, and what speculation
//! saves.
//!
//! Figures of one run only may be compared: memory bandwidth of a shared machine
//! moves by a factor within minutes. So every prompt runs all draft lengths one
//! after the other, and step times are medians of rounds that visit every row
//! count in turn.
//!
//! With `--contexts`, `--kv-formats` or `--batch`, [`axes`] has the same texts written along these.

mod axes;
mod length;
mod prompts;
mod runs;
mod steps;
mod summary;
mod table;

pub(crate) use table::table;

use crate::args::{BenchArgs, DraftArgs, OutputArgs};
use crate::model;
use crate::resolve::{self, Resolved};
use anyhow::{Context, Result, bail};
use axes::Axes;
use engine::{Engine, EngineOptions, KvMemory, LoadOptions, Model, ModelInfo};
pub(crate) use length::BenchLength;
pub(crate) use prompts::wordings;
use prompts::{Wording, random};
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
    /// Rows by context, KV format and batch, if these were asked for: there are no `runs` then.
    #[serde(skip_serializing_if = "Option::is_none")]
    axes: Option<Axes>,
}

/// A model, where it was found, and the options that it was loaded with.
struct Loaded {
    model: Model,
    resolved: Resolved,
    options: LoadOptions,
}

/// Loads the model with room for drafts of all lengths.
fn load(args: &BenchArgs) -> Result<Loaded> {
    let longest = args.draft_lengths.iter().map(|length| length.longest());
    let draft = DraftArgs {
        drafter: args.drafter.clone(),
        draft_max: longest.max().unwrap_or(0),
    };
    let name = &args.model.model;
    let resolved = resolve::model(name)?;
    let mut options = model::options(&args.load, &draft, 1, &resolved)?;
    // A text that waits for memory would be measured as a slow one.
    options.kv_memory = KvMemory::Whole;
    Ok(Loaded {
        model: model::load_with(name, &args.load, &resolved, &options)?,
        resolved,
        options,
    })
}

/// Runs the command.
pub(crate) fn run(args: &BenchArgs, output: OutputArgs) -> Result<ExitCode> {
    // A file that is not there should not cost a minute to find out.
    let file = args.prompts.as_deref().map(read).transpose()?;
    let start = Instant::now();
    let mut loaded = load(args)?;
    let load_ms = start.elapsed().as_secs_f64() * 1e3;
    let info = loaded.model.info.clone();
    if !output.quiet {
        say!("{}", model::describe(&info));
    }
    let wordings = wordings(args.prompts.as_deref(), file.as_deref())?;
    let times = if args.no_steps {
        Times::default()
    } else {
        steps::measure(&mut loaded.model, args.reps)?
    };
    let mut report = report(args, info, load_ms, times);
    if axes::are_asked(args) {
        report.axes = Some(axes::run(args, loaded, &wordings, output)?);
    } else {
        report.runs = run_classes(args, loaded.model, &wordings, output)?;
        report.summary = summaries(&report.runs);
        report.draft_ms = draft_ms(&report.runs);
    }
    let mut stdout = io::stdout().lock();
    if args.json {
        writeln!(stdout, "{}", serde_json::to_string(&report)?)?;
    } else {
        let aligned = stdout.is_terminal();
        table::print(&report, aligned, &mut stdout)?;
    }
    match report.axes.is_some_and(|axes| axes.rows.is_empty()) {
        true => bail!("no cell could be run"),
        false => Ok(ExitCode::SUCCESS),
    }
}

/// Answers all prompts, one after the other, and some of random tokens.
fn run_classes(
    args: &BenchArgs,
    model: Model,
    wordings: &[Wording],
    output: OutputArgs,
) -> Result<Vec<Run>> {
    let encoded = wordings
        .iter()
        .map(|wording| wording.encode(&model.text, ""));
    let mut prompts = encoded.collect::<Result<Vec<_>>>()?;
    prompts.extend(random(&model.text, model.info.vocab_size));
    let options = EngineOptions {
        reuse: false, // the same prompts come again
        overlap: !args.overlap.no_overlap,
        ..EngineOptions::default()
    };
    let engine = Engine::start(model, options);
    runs::generate(args, &engine, &prompts, output)
}

/// Milliseconds that a drafted token takes, if any was drafted.
fn draft_ms(runs: &[Run]) -> Option<f64> {
    let drafting = runs.iter().filter(|r| r.drafted > 0);
    let (ms, n) = drafting.fold((0.0, 0), |(ms, n), r| (ms + r.draft_ms, n + r.drafted));
    (n > 0).then(|| ms / n as f64)
}

/// Puts together what was measured before any text was written, and where.
fn report(args: &BenchArgs, info: ModelInfo, load_ms: f64, times: Times) -> Report {
    let bytes = info.step_bytes as f64;
    Report {
        version: env!("CARGO_PKG_VERSION"),
        commit: option_env!("PACELINE_COMMIT"),
        environment: environment(),
        model: info,
        threads: args.load.threads.map_or_else(cores, NonZeroUsize::get),
        read_gbs: times.read_ms.map(|ms| bytes / ms / 1e6),
        read_ms: times.read_ms,
        weights_gb: bytes / 1e9,
        load_ms,
        step_ms: times.step_ms,
        prefill_tok_s: times.prefill_tok_s,
        draft_ms: None,
        runs: Vec::new(),
        summary: Vec::new(),
        axes: None,
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
