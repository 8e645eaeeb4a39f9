//! `paceline bench`: what a step costs on this machine, and what speculation
//! saves.
//!
//! Figures of one run only may be compared: memory bandwidth of a shared machine
//! moves by a factor within minutes. So every prompt runs all draft lengths one
//! after the other, and step times are medians of rounds that visit every row
//! count in turn.

use crate::args::{BenchArgs, DraftArgs, OutputArgs};
use crate::model;
use anyhow::{Context, Result, bail};
use backend::{Backend, Batch};
use cache::{Memory, MemorySize};
use engine::{Accept, DraftLength, Engine, EngineOptions, Request, RequestOutcome, Sampling, Text};
use quant::{Scalar, Stored};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

/// Rows of a step that are timed.
const STEP_ROWS: [usize; 7] = [1, 2, 3, 4, 6, 8, 16];
/// Tokens that a timed step follows.
const STEP_CONTEXT: usize = 64;
/// Bytes of one matrix of the plain read.
const READ_PART: usize = 64 << 20;
/// Bytes that a plain read has at least: more than the caches hold, or it would
/// say nothing about memory.
const READ_MIN: usize = 256 << 20;
/// Prompt lengths that are timed.
const PREFILL: [usize; 2] = [512, 2048];

/// The prompts without `--prompts`, by class.
const PROMPTS: &[(&str, &[&str])] = &[
    (
        "story",
        &[
            "Tell me a story about a rabbit and a kite.",
            "Write a short story about two friends who find a map.",
            "Tell me a story about an old clock that stopped.",
        ],
    ),
    (
        "chat",
        &[
            "What should I cook for dinner tonight?",
            "Do you like music? What kind?",
            "Why is the sky blue?",
        ],
    ),
    (
        "exact",
        &[
            "What is 27 + 45?",
            "Name the days of the week.",
            "Count from one to twenty.",
        ],
    ),
];

/// A line of `--prompts`.
#[derive(Deserialize)]
struct PromptLine {
    #[serde(default = "no_category")]
    category: String,
    #[serde(default)]
    messages: Vec<serde_json::Value>,
    /// A text to continue, without the template.
    #[serde(default, alias = "raw", alias = "text")]
    prompt: Option<String>,
}

fn no_category() -> String {
    "prompts".into()
}

/// One prompt, ready to run.
struct Prompt {
    class: String,
    ids: Vec<u32>,
}

/// Everything that was measured, as `--json` prints it.
#[derive(Serialize)]
struct Report {
    version: &'static str,
    commit: Option<&'static str>,
    model: engine::ModelInfo,
    environment: BTreeMap<&'static str, String>,
    threads: usize,
    /// A plain read of as many bytes as a step reads, in the rounds of the steps.
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
}

/// One class of prompts with one draft length and temperature.
#[derive(Default, Serialize)]
struct Run {
    class: String,
    drafter: Option<&'static str>,
    draft_max: usize,
    temperature: f32,
    prompts: usize,
    tokens: usize,
    tok_s: f64,
    /// This rate over that of the same prompts without drafts.
    speedup: f64,
    tokens_per_round: f64,
    /// Share of the rounds with a draft at this position in which it was
    /// accepted, and so all before it.
    accepted_by_position: Vec<f64>,
    ms_draft_per_token: f64,
    #[serde(skip)]
    decode_ms: f64,
    #[serde(skip)]
    rounds: u64,
    #[serde(skip)]
    emitted: u64,
    #[serde(skip)]
    positions: Vec<(u64, u64)>,
    #[serde(skip)]
    draft_ms: f64,
    #[serde(skip)]
    drafted: u64,
}

impl Run {
    fn add(&mut self, outcome: &RequestOutcome) {
        let s = &outcome.speculation;
        self.prompts += 1;
        self.tokens += outcome.usage.completion_tokens;
        // The first token comes from the prefill.
        self.emitted += (outcome.usage.completion_tokens as u64).saturating_sub(1);
        self.decode_ms += outcome.timings.decode_ms;
        self.rounds += s.rounds;
        self.draft_ms += s.ms_draft;
        self.drafted += s.drafted;
        if self.positions.len() < s.by_position.len() {
            self.positions.resize(s.by_position.len(), (0, 0));
        }
        for (sum, p) in self.positions.iter_mut().zip(&s.by_position) {
            sum.0 += p.drafted;
            sum.1 += p.accepted;
        }
    }

    fn finish(&mut self) {
        let per = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
        self.tok_s = per(self.emitted as f64, self.decode_ms / 1e3);
        self.tokens_per_round = per(
            (self.positions.iter().map(|p| p.1).sum::<u64>() + self.rounds) as f64,
            self.rounds as f64,
        );
        self.accepted_by_position = self
            .positions
            .iter()
            .map(|p| per(p.1 as f64, p.0 as f64))
            .collect();
        self.ms_draft_per_token = per(self.draft_ms, self.drafted as f64);
    }
}

/// Runs the command.
pub(crate) fn run(args: &BenchArgs, output: OutputArgs) -> Result<ExitCode> {
    let longest = args.draft_lengths.iter().copied().max().unwrap_or(0);
    let draft = DraftArgs {
        drafter: args.drafter.clone(),
        draft_max: longest,
    };
    // A file that is not there should not cost a minute to find out.
    let file = args.prompts.as_deref().map(read).transpose()?;
    let start = Instant::now();
    let model = model::load(&args.model.model, &args.load, &draft, 1)?;
    let load_ms = start.elapsed().as_secs_f64() * 1e3;
    if !output.quiet {
        say!("{}", model::describe(&model.info));
    }
    let prompts = prompts(args, file.as_deref(), &model.text)?;
    let backend = model.speculator.backend().clone();
    let bytes = model.info.step_bytes as usize;
    let (step_ms, prefill_tok_s, read_ms) = if args.no_steps {
        Default::default()
    } else {
        let (steps, read) = steps(&model, &*backend, args.reps, bytes)?;
        let prefill = prefill(&model, &*backend, args.reps.div_ceil(4))?;
        (steps, prefill, read)
    };
    let options = EngineOptions {
        reuse: false, // the same prompts come again
        ..EngineOptions::default()
    };
    let engine = Engine::start(model, options);
    let runs = generate(args, &engine, &prompts, output)?;
    let drafting = runs.iter().filter(|r| r.drafted > 0);
    let (ms, n) = drafting.fold((0.0, 0), |(ms, n), r| (ms + r.draft_ms, n + r.drafted));
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        commit: option_env!("PACELINE_COMMIT"),
        environment: environment(),
        model: engine.info().clone(),
        threads: args
            .load
            .threads
            .map_or_else(cores, std::num::NonZeroUsize::get),
        read_gbs: read_ms.map(|ms| bytes as f64 / ms / 1e6),
        read_ms,
        weights_gb: bytes as f64 / 1e9,
        load_ms,
        step_ms,
        prefill_tok_s,
        draft_ms: (n > 0).then(|| ms / n as f64),
        runs,
    };
    let mut stdout = io::stdout().lock();
    if args.json {
        writeln!(stdout, "{}", serde_json::to_string(&report)?)?;
    } else {
        let aligned = stdout.is_terminal();
        print(&report, aligned, &mut stdout)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get)
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

/// Median milliseconds of a step by its rows, logits included, and of the plain
/// read of `bytes` in the same rounds.
fn steps(
    model: &engine::Model,
    b: &dyn Backend,
    reps: usize,
    bytes: usize,
) -> Result<(BTreeMap<usize, f64>, Option<f64>)> {
    let target = model.speculator.target();
    let size = MemorySize {
        sequences: 1,
        context: STEP_CONTEXT + 16,
        step_rows: STEP_CONTEXT,
        kv_format: model.speculator.memory().size().kv_format,
    };
    let mut memory = Memory::new(b, target.plan(), size);
    let token = |i: usize| (i * 37 % target.vocab_size()) as u32;
    let prompt: Vec<u32> = (0..STEP_CONTEXT).map(token).collect();
    let mut times: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    let mut reads = Vec::new();
    let parts = read_parts(b, bytes.max(READ_MIN));
    for rep in 0..=reps {
        for rows in STEP_ROWS {
            let mut sequence = memory.open().context("a sequence for the bench")?;
            let mut batch = Batch::default();
            memory.push(&mut batch, &mut sequence, &prompt, prompt.len())?;
            target.forward(b, &batch, &mut memory);
            b.finish()?;
            batch.clear();
            let tokens: Vec<u32> = (0..rows).map(token).collect();
            memory.push(&mut batch, &mut sequence, &tokens, 1)?;
            let start = Instant::now();
            let hidden = target.forward(b, &batch, &mut memory);
            let best = b.argmax(&target.logits(b, &hidden));
            b.finish()?;
            let ms = start.elapsed().as_secs_f64() * 1e3;
            std::hint::black_box(best);
            memory.close(sequence);
            if rep > 0 {
                times.entry(rows).or_default().push(ms);
            }
        }
        let start = Instant::now();
        let sums: Vec<_> = parts.iter().map(|part| b.read(part)).collect();
        let ms = start.elapsed().as_secs_f64() * 1e3;
        if rep > 0 && sums.iter().all(Option::is_some) {
            reads.push(ms * bytes as f64 / bytes.max(READ_MIN) as f64);
        }
        std::hint::black_box(sums);
    }
    let medians = times
        .into_iter()
        .map(|(rows, times)| (rows, median(times)))
        .collect();
    Ok((medians, (!reads.is_empty()).then(|| median(reads))))
}

/// Matrices of `bytes` together, for a plain read.
fn read_parts(b: &dyn Backend, bytes: usize) -> Vec<backend::Matrix> {
    // Rows of a page each; panels hold 16 of them.
    const ROW: usize = 1024;
    let part = |bytes: usize| {
        let rows = (bytes / (4 * ROW)).max(16);
        let zeros = vec![0; rows * 4 * ROW];
        b.matrix(&[Stored::plain(Scalar::F32, rows, ROW, &zeros)])
    };
    (0..bytes)
        .step_by(READ_PART)
        .map(|at| part(READ_PART.min(bytes - at)))
        .collect()
}

/// Prompt tokens a second by prompt length, the first token included.
fn prefill(model: &engine::Model, b: &dyn Backend, reps: usize) -> Result<BTreeMap<usize, f64>> {
    let target = model.speculator.target();
    let chunk = model.chunk;
    let mut rates = BTreeMap::new();
    for n in PREFILL.into_iter().filter(|&n| n <= target.max_context()) {
        let size = MemorySize {
            sequences: 1,
            context: n,
            step_rows: chunk,
            kv_format: model.speculator.memory().size().kv_format,
        };
        let mut memory = Memory::new(b, target.plan(), size);
        let tokens: Vec<u32> = (0..n)
            .map(|i| (i * 37 % target.vocab_size()) as u32)
            .collect();
        let mut times = Vec::new();
        for rep in 0..=reps.max(1) {
            let mut sequence = memory.open().context("a sequence for the bench")?;
            let start = Instant::now();
            let mut batch = Batch::default();
            let mut hidden = None;
            for part in tokens.chunks(chunk) {
                batch.clear();
                memory.push(&mut batch, &mut sequence, part, part.len())?;
                hidden = Some(target.forward(b, &batch, &mut memory));
                let len = sequence.len();
                memory.truncate(&mut sequence, len);
            }
            let hidden = hidden.context("a prompt has tokens")?;
            let last = b.gather(&hidden, &[hidden.rows() - 1]);
            std::hint::black_box(b.argmax(&target.logits(b, &last)));
            b.finish()?;
            if rep > 0 {
                times.push(start.elapsed().as_secs_f64());
            }
            memory.close(sequence);
        }
        rates.insert(n, n as f64 / median(times));
    }
    Ok(rates)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// The text in a file.
pub(crate) fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read `{}`", path.display()))
}

/// The prompts of `file`, which is `--prompts`, or the built-in ones.
fn prompts(args: &BenchArgs, file: Option<&str>, text: &Text) -> Result<Vec<Prompt>> {
    let mut prompts = Vec::new();
    let (Some(path), Some(file)) = (&args.prompts, file) else {
        for (class, texts) in PROMPTS {
            for prompt in *texts {
                let message = serde_json::json!({"role": "user", "content": prompt});
                prompts.push(Prompt {
                    class: (*class).into(),
                    ids: model::encode_chat(text, vec![message], None)?,
                });
            }
        }
        return Ok(prompts);
    };
    for (n, line) in file
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
    {
        let place = || format!("line {} of `{}`", n + 1, path.display());
        let line: PromptLine = serde_json::from_str(line).with_context(place)?;
        let ids = match line.prompt {
            Some(prompt) if line.messages.is_empty() => text.encode_prompt(&prompt)?,
            _ if line.messages.is_empty() => {
                bail!("{} has neither `messages` nor `prompt`", place())
            }
            _ => model::encode_chat(text, line.messages, None).with_context(place)?,
        };
        prompts.push(Prompt {
            class: line.category,
            ids,
        });
    }
    if prompts.is_empty() {
        bail!("there are no prompts in `{}`", path.display());
    }
    Ok(prompts)
}

/// Writes after every prompt with every draft length and temperature.
fn generate(
    args: &BenchArgs,
    engine: &Engine,
    prompts: &[Prompt],
    output: OutputArgs,
) -> Result<Vec<Run>> {
    let info = engine.info();
    let mut lengths = args.draft_lengths.clone();
    if info.drafter.is_none() {
        lengths.retain(|&n| n == 0);
        if lengths.is_empty() {
            lengths.push(0);
        }
    }
    let mut runs: Vec<Run> = Vec::new();
    for (i, prompt) in prompts.iter().enumerate() {
        for &temperature in &args.temperatures {
            let mut plain: Option<Vec<u32>> = None;
            for &draft_max in &lengths {
                let mut request = Request::new(prompt.ids.clone());
                request.max_tokens = Some(args.max_tokens);
                request.draft = Some(DraftLength::Fixed(draft_max));
                request.sampling = Sampling {
                    temperature,
                    top_p: if temperature > 0.0 { args.top_p } else { 1.0 },
                    seed: i as u64,
                    ..Sampling::default()
                };
                let (_, tokens, outcome) = match engine.complete(request) {
                    Ok(done) => done,
                    Err(error) => {
                        if !output.quiet {
                            say!("prompt {i} is left out: {error}");
                        }
                        continue;
                    }
                };
                // A benchmark checks its own answer.
                let is_exact = outcome.speculation.accept != Some(Accept::Residual.name());
                match &plain {
                    None => plain = Some(tokens),
                    Some(plain) if is_exact && *plain != tokens => {
                        bail!(
                            "prompt {i}: drafts of {draft_max} tokens changed the text: this is a bug"
                        )
                    }
                    Some(_) => {}
                }
                for class in [&prompt.class, "all"] {
                    let same = |r: &&mut Run| {
                        r.class == class && r.draft_max == draft_max && r.temperature == temperature
                    };
                    let run = match runs.iter_mut().find(same) {
                        Some(run) => run,
                        None => {
                            runs.push(Run {
                                class: class.into(),
                                drafter: info.drafter.filter(|_| draft_max > 0),
                                draft_max,
                                temperature,
                                ..Run::default()
                            });
                            runs.last_mut().expect("pushed above")
                        }
                    };
                    run.add(&outcome);
                }
            }
        }
    }
    runs.iter_mut().for_each(Run::finish);
    let plain: Vec<(String, f32, f64)> = runs
        .iter()
        .filter(|r| r.draft_max == 0)
        .map(|r| (r.class.clone(), r.temperature, r.tok_s))
        .collect();
    for run in &mut runs {
        let base = plain
            .iter()
            .find(|(class, t, _)| *class == run.class && *t == run.temperature);
        run.speedup = base.map_or(
            0.0,
            |(.., rate)| if *rate > 0.0 { run.tok_s / rate } else { 0.0 },
        );
    }
    // Classes in the order of the prompts, the sum of all last.
    runs.sort_by_key(|r| r.class == "all");
    Ok(runs)
}

fn plain_read(report: &Report) -> String {
    match (report.read_ms, report.read_gbs) {
        (Some(ms), Some(rate)) => {
            format!(", a plain read of them takes {ms:.2} ms ({rate:.1} GB/s)")
        }
        _ => String::new(),
    }
}

fn print(report: &Report, aligned: bool, out: &mut impl Write) -> io::Result<()> {
    if let Some(&one) = report.step_ms.get(&1) {
        writeln!(
            out,
            "a step reads {:.3} GB of weights{} · loaded in {:.0} ms\n",
            report.weights_gb,
            plain_read(report),
            report.load_ms
        )?;
        let steps = report.step_ms.iter().map(|(rows, ms)| {
            let share = report
                .read_ms
                .map_or(String::new(), |read| format!("{:.0} %", 100.0 * read / ms));
            vec![
                rows.to_string(),
                format!("{ms:.2}"),
                format!("{:.2}", ms / one),
                share,
            ]
        });
        let head = [
            "rows",
            "ms a step",
            "against one row",
            "share of the plain read",
        ];
        table(&head, &[], &steps.collect::<Vec<_>>(), aligned, out)?;
        writeln!(out)?;
        for (n, rate) in &report.prefill_tok_s {
            writeln!(out, "prefill of {n} tokens: {rate:.0} tok/s")?;
        }
        writeln!(out)?;
    }
    let runs = report.runs.iter().map(|run| {
        let accepted: Vec<String> = run
            .accepted_by_position
            .iter()
            .map(|a| format!("{a:.2}"))
            .collect();
        vec![
            run.class.clone(),
            run.temperature.to_string(),
            run.drafter.unwrap_or("none").to_owned(),
            run.draft_max.to_string(),
            run.tokens.to_string(),
            format!("{:.1}", run.tok_s),
            format!("{:.2}", run.speedup),
            format!("{:.2}", run.tokens_per_round),
            accepted.join(" "),
        ]
    });
    let head = [
        "class",
        "T",
        "drafter",
        "draft",
        "tokens",
        "tok/s",
        "speedup",
        "tokens a round",
        "accepted by position",
    ];
    table(&head, &[0, 2, 8], &runs.collect::<Vec<_>>(), aligned, out)
}

/// Writes a table: aligned for people, or as Markdown for files. Columns are right-aligned
/// except those of `left`.
fn table(
    head: &[&str],
    left: &[usize],
    rows: &[Vec<String>],
    aligned: bool,
    out: &mut impl Write,
) -> io::Result<()> {
    if !aligned {
        let rule = |i| if left.contains(&i) { "---" } else { "---:" };
        let rules: Vec<&str> = (0..head.len()).map(rule).collect();
        writeln!(out, "| {} |\n|{}|", head.join(" | "), rules.join("|"))?;
        for row in rows {
            writeln!(out, "| {} |", row.join(" | "))?;
        }
        return Ok(());
    }
    let head: Vec<String> = head.iter().map(|&cell| cell.to_owned()).collect();
    let widths: Vec<usize> = (0..head.len())
        .map(|i| {
            let cells = std::iter::once(&head).chain(rows).map(|row| &row[i]);
            let widths = cells.map(|cell| console::measure_text_width(cell));
            widths.max().unwrap_or(0)
        })
        .collect();
    for row in std::iter::once(&head).chain(rows) {
        let cell = |(i, cell): (usize, &String)| {
            let side = if left.contains(&i) {
                console::Alignment::Left
            } else {
                console::Alignment::Right
            };
            console::pad_str(cell, widths[i], side, None).into_owned()
        };
        let line: Vec<String> = row.iter().enumerate().map(cell).collect();
        writeln!(out, "{}", line.join("  ").trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_aligned_for_people_and_markdown_for_files() {
        let rows = [
            vec!["story".to_owned(), "9.5".to_owned()],
            vec!["é".to_owned(), "10".to_owned()],
        ];
        let written = |aligned| {
            let mut out = Vec::new();
            table(&["class", "tok/s"], &[0], &rows, aligned, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(written(true), "class  tok/s\nstory    9.5\né         10\n");
        assert_eq!(
            written(false),
            "| class | tok/s |\n|---|---:|\n| story | 9.5 |\n| é | 10 |\n"
        );
    }
}
