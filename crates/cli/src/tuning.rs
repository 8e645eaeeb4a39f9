//! How products read their weights on this machine: measured once, and remembered.
//!
//! Each choice is timed beside a plain read of as many bytes in the same milliseconds, for memory
//! shared with others is faster and slower from one second to the next. A choice replaces the
//! default only if it was clearly faster ([`clear_choice`]).

use crate::{machine, places};
use anyhow::Result;
use backend::trial::{WORTH, clear_choice, quartiles};
use cpu::{CpuOptions, PrefetchHint, Trial, Tuning, WeightKind, WeightReads};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Bytes of weights from which on a model is worth a measurement: smaller ones are in caches.
const MODEL_BYTES: u64 = 256 << 20;
/// Changes when what is measured does, so that old results do not count.
const VERSION: u32 = 1;
/// Name of the file of results in the cache folder.
const FILE: &str = "cpu-tuning.json";
/// Results that are kept, of several numbers of threads and instruction sets; each takes about a kilobyte.
const RESULTS: usize = 64;
/// Bytes that the file may have.
const FILE_BYTES: u64 = 1 << 20;

/// Bytes of weights that are read in turns.
const WEIGHT_BYTES: usize = 128 << 20;
/// The time of one comparison, of which there are four or five for each kind of weights; and the
/// least and most rounds of it.
const LIMIT: Duration = Duration::from_millis(6);
const ROUNDS: std::ops::RangeInclusive<usize> = 5..=41;
/// How many times as long as a fast plain read a slow one may take (their quarters) for a result to be kept:
/// beside another program that computes, nothing can be measured.
const STEADY: f64 = 1.6;
/// Rows of a step with drafts of 3 tokens.
const FEW_ROWS: usize = 4;

/// What was measured of one kind of weights.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct KindResult {
    /// The kind of weights.
    pub(crate) kind: WeightKind,
    /// The fastest way to read them.
    pub(crate) reads: WeightReads,
    /// The speed of one row that reads its weights so, as a share of a plain read.
    pub(crate) share: f64,
    /// The speed of one row that reads its weights in the default way, as a share of a plain read.
    pub(crate) default_share: f64,
}

/// What was measured of this machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Measured {
    /// Threads that compute.
    pub(crate) threads: usize,
    /// How weights of each kind are read, and what that rests on.
    pub(crate) kinds: Vec<KindResult>,
    /// Bytes a second of a plain read, by all threads.
    pub(crate) read_bytes_per_second: f64,
    /// How many times as long as a fast plain read a slow one took, by their quarters.
    pub(crate) spread: f64,
    /// Milliseconds that measuring took.
    pub(crate) took_ms: f64,
}

/// The options with what is known of this machine, or, where `model_bytes` of weights are worth
/// it, with what is measured now.
pub(crate) fn tuned(options: CpuOptions, model_bytes: u64) -> Result<CpuOptions> {
    if options.activations != cpu::Activations::Int8 {
        return Ok(options);
    }
    let known = known(options);
    let measured = match known {
        None if model_bytes >= MODEL_BYTES => measure(options)?,
        known => known,
    };
    Ok(measured.map_or(options, |measured| measured.applied_to(options)))
}

/// What an earlier start has measured with these options.
pub(crate) fn known(options: CpuOptions) -> Option<Measured> {
    results(&file()?).remove(&key(options))
}

/// Measures and remembers; `None` if there is too little memory to, or times were not steady.
///
/// # Errors
///
/// If the processor cannot be used as `options` ask.
pub(crate) fn measure(options: CpuOptions) -> Result<Option<Measured>> {
    let cores = cpu::cores();
    let mut best = of_threads(options)?;
    // Several hardware threads of a core, if nobody has said how many threads are to work.
    if options.threads == 0
        && cores.threads > cores.cores
        && let Some(one_a_core) = &best
    {
        let all = of_threads(CpuOptions {
            threads: cores.threads,
            ..options
        })?;
        if let Some(all) = all
            && all.row_speed() > (1.0 + WORTH) * one_a_core.row_speed()
        {
            best = Some(all);
        }
    }
    best = best.filter(|measured| measured.spread <= STEADY);
    if let (Some(measured), Some(file)) = (&best, file()) {
        let mut all = results(&file);
        if all.len() >= RESULTS {
            all.clear();
        }
        all.insert(key(options), measured.clone());
        engine::write_json(&file, &all);
    }
    Ok(best)
}

impl Measured {
    /// `options` with what is fastest; threads only where nobody has said how many.
    pub(crate) fn applied_to(&self, options: CpuOptions) -> CpuOptions {
        let mut tuning = Tuning::default();
        for of in &self.kinds {
            tuning.set(of.kind, of.reads);
        }
        let threads = match options.threads {
            0 => self.threads.min(cpu::cores().threads),
            asked => asked,
        };
        CpuOptions {
            threads,
            tuning,
            ..options
        }
    }

    /// Bytes of weights a second that one row multiplies, on average over kinds of weights.
    fn row_speed(&self) -> f64 {
        let shares: f64 = self.kinds.iter().map(|kind| kind.share).sum();
        self.read_bytes_per_second * shares / self.kinds.len().max(1) as f64
    }
}

/// The file of results; `None` without a cache folder.
fn file() -> Option<PathBuf> {
    Some(places::cache()?.join(FILE))
}

/// What a result depends on: this program, the processor, and the options.
fn key(options: CpuOptions) -> String {
    let cpu::Cores { cores, threads } = cpu::cores();
    let CpuOptions { isa, pin, .. } = options;
    let isa = isa.map_or("best", cpu::Isa::name);
    let pinned = if pin { ", pinned" } else { "" };
    format!(
        "{} ({VERSION}): {}; {cores} cores, {threads} hardware threads; {} threads, {isa}{pinned}",
        env!("CARGO_PKG_VERSION"),
        machine::processor(),
        options.threads,
    )
}

/// The results in `file`; none if it is missing or no such file.
fn results(file: &Path) -> BTreeMap<String, Measured> {
    engine::read_json(file, FILE_BYTES).unwrap_or_default()
}

/// What is fastest with as many threads as `options` say.
fn of_threads(options: CpuOptions) -> Result<Option<Measured>> {
    let start = Instant::now();
    let Some(mut trial) = Trial::new(options, WEIGHT_BYTES)? else {
        return Ok(None);
    };
    let mut reads = Vec::new();
    let kinds = WeightKind::ALL.map(|kind| best_of_kind(&mut trial, kind, &mut reads));
    let [quarter, half, three] = quartiles(&mut reads);
    Ok(Some(Measured {
        threads: trial.threads(),
        kinds: kinds.into(),
        read_bytes_per_second: trial.part_bytes() as f64 / half,
        spread: three / quarter,
        took_ms: start.elapsed().as_secs_f64() * 1e3,
    }))
}

/// The fastest way to read weights of `kind`: one thing after the other is changed, and in the end all changes
/// together have to be worth it. Adds the seconds of each plain read to `reads`.
fn best_of_kind(trial: &mut Trial, kind: WeightKind, reads: &mut Vec<f64>) -> KindResult {
    let default = WeightReads::default();
    let mut best = default;
    let mut choose = |best: WeightReads, rows: usize, others: Vec<WeightReads>| {
        let choices = [vec![best], others].concat();
        let (chosen, shares) = fastest(trial, kind, rows, &choices, reads);
        (choices[chosen], shares[0], shares[chosen])
    };
    let panels = [2, 8].map(|panels| WeightReads { panels, ..best });
    best = choose(best, 1, panels.into()).0;
    let distances = [1024, 2048, 8192].map(|distance| WeightReads { distance, ..best });
    best = choose(best, 1, distances.into()).0;
    if kind != WeightKind::Plain {
        let hints = PrefetchHint::ALL
            .into_iter()
            .filter(|&hint| hint != best.hint);
        let hints = hints.map(|hint| WeightReads { hint, ..best }).collect();
        best = choose(best, 1, hints).0;
    }
    let changed = (best != default).then_some(best);
    let (reads, default_share, share) = choose(default, 1, changed.into_iter().collect());
    let two = WeightReads {
        panels_of_few_rows: 2,
        ..reads
    };
    let (reads, ..) = choose(reads, FEW_ROWS, vec![two]);
    KindResult {
        kind,
        reads,
        share,
        default_share,
    }
}

/// Which of `choices` multiplies `rows` rows fastest, the first one if none is clearly faster, and the
/// speed of each as a share of a plain read: medians over rounds in which all take turns.
fn fastest(
    trial: &mut Trial,
    kind: WeightKind,
    rows: usize,
    choices: &[WeightReads],
    reads: &mut Vec<f64>,
) -> (usize, Vec<f64>) {
    let seconds = |work: &mut dyn FnMut()| {
        let start = Instant::now();
        work();
        start.elapsed().as_secs_f64().max(1e-9)
    };
    let start = Instant::now();
    let mut shares = vec![Vec::new(); choices.len()];
    // A first round wakes the threads.
    for round in 0..=*ROUNDS.end() {
        if round > *ROUNDS.start() && start.elapsed() > LIMIT {
            break;
        }
        let read = seconds(&mut || trial.read());
        let times: Vec<f64> = choices
            .iter()
            .map(|&reads| seconds(&mut || _ = trial.multiply(kind, rows, reads)))
            .collect();
        if round > 0 {
            reads.push(read);
            for (shares, time) in shares.iter_mut().zip(times) {
                shares.push(read / time);
            }
        }
    }
    clear_choice(&shares)
}
