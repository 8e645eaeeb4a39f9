//! Axes: the same texts with several context lengths, formats of the KV cache and numbers of texts at once.
//!
//! ```text
//! context × KV format × batch = cells        one KV cache a cell; the weights stay where they are
//! cell × temperature × draft length = rows   the same texts, so many at once as the batch has
//! ```
//!
//! Every cell writes the same texts: as many as the largest batch has, or as there are prompts in `--prompts` if
//! these are more. Rates are those of rounds in which a whole batch decodes, so that neither prompts nor
//! the last text of a batch count; texts go on after the model's own end, to be of one length.
//!
//! | file | what |
//! | --- | --- |
//! | `cell` | the rows of a cell |
//! | `rounds` | what rounds took, by the engine's own reports |
//! | `table` | rows and summary as tables |

mod cell;
mod rounds;
mod table;

pub(super) use table::print;

use super::prompts::{Prompt, Wording, filler};
use super::runs::lengths;
use super::summary::{Chosen, chosen};
use super::{BenchLength, Loaded};
use crate::args::{BenchArgs, OutputArgs};
use crate::model;
use anyhow::Result;
use cell::{Known, Texts};
use engine::{DraftChoice, EngineOptions, KvPlan, LoadOptions, Model, ModelInfo, StepSink};
use serde::Serialize;
use std::sync::Arc;

/// Everything that was measured along the axes.
#[derive(Serialize)]
pub(super) struct Axes {
    pub(super) rows: Vec<Row>,
    /// Chosen draft lengths against fixed ones.
    summary: Vec<CellSummary>,
    left_out: Vec<LeftOut>,
}

/// A place on the axes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Cell {
    /// Tokens of text before each prompt, at least.
    context: usize,
    kv_format: String,
    /// Texts at once.
    batch: usize,
}

/// What a cell takes, in tokens and bytes.
#[derive(Clone, Debug, Serialize)]
struct Sizes {
    /// Tokens of the longest prompt.
    prompt_tokens: usize,
    /// Tokens that a text may have, with its prompt: what KV cache there is for each.
    sequence_tokens: usize,
    /// KV cache and recurrent state of one request of so many tokens, the drafter's included.
    request_bytes: u64,
    /// The drafter's part of it.
    request_drafter_bytes: u64,
    /// KV cache and recurrent state of all requests, with room for snapshots.
    memory_bytes: u64,
    /// Weights of the target and of a drafter with files of its own.
    weight_bytes: u64,
}

/// A cell with one temperature and draft length.
#[derive(Serialize)]
pub(super) struct Row {
    #[serde(flatten)]
    cell: Cell,
    temperature: f32,
    /// Who may guess.
    drafter: Option<String>,
    draft: BenchLength,
    texts: usize,
    tokens: usize,
    /// Tokens a second of all texts of a batch together.
    tok_s: f64,
    tok_s_per_stream: f64,
    /// The rate over that without drafts, if that was run.
    speedup: Option<f64>,
    /// Rounds that were timed: of a whole batch, and without prompts.
    rounds: usize,
    ms_per_round: f64,
    /// Tokens that a round writes of each text.
    tokens_per_round: f64,
    /// Milliseconds from a request to its first token: the median of the texts.
    first_token_ms: f64,
    accepted_by_position: Vec<f64>,
    #[serde(flatten)]
    sizes: Sizes,
    /// The program's resident memory after the texts, where the system says.
    resident_bytes: Option<u64>,
}

/// Chosen lengths against fixed ones in a cell, at one temperature.
#[derive(Serialize)]
struct CellSummary {
    #[serde(flatten)]
    cell: Cell,
    temperature: f32,
    #[serde(flatten)]
    chosen: Chosen,
}

/// A cell that was not run.
#[derive(Serialize)]
struct LeftOut {
    #[serde(flatten)]
    cell: Cell,
    reason: String,
}

/// Whether `args` ask for axes.
pub(super) fn are_asked(args: &BenchArgs) -> bool {
    !(args.contexts.is_empty() && args.kv_formats.is_empty() && args.batch.is_empty())
}

/// Runs every cell.
///
/// # Errors
///
/// If prompts cannot be encoded, a draft or a batch changes a text, or the engine fails. A cell that the model or the
/// memory is too small for is left out.
pub(super) fn run(
    args: &BenchArgs,
    loaded: Loaded,
    wordings: &[Wording],
    output: OutputArgs,
) -> Result<Axes> {
    let contexts = or_one(&args.contexts, 0);
    let kv_formats = or_one(&args.kv_formats, args.load.kv);
    let batches = or_one(&args.batch, 1);
    let most = batches.iter().copied().max().unwrap_or(1);
    let n_texts = match args.prompts {
        Some(_) => most.max(wordings.len()),
        None => most,
    };
    let Loaded {
        model,
        resolved,
        mut options,
    } = loaded;
    options.draft = settled(options.draft, &model.info);
    let mut grid = Grid {
        args,
        lengths: lengths(&args.draft_lengths, model.info.drafter.is_some()),
        source: resolved.source,
        options,
        output,
        axes: Axes {
            rows: Vec::new(),
            summary: Vec::new(),
            left_out: Vec::new(),
        },
    };
    let mut model = model;
    let most = model.info.context_max;
    for context in contexts {
        if context >= most {
            let reason = format!("the model knows {most} tokens");
            let cells = kv_formats
                .iter()
                .flat_map(|kv| batches.iter().map(move |n| (kv, n)));
            for (&kv, &batch) in cells {
                grid.leave_out(Cell::new(context, kv, batch), reason.clone());
            }
            continue;
        }
        let before = filler(&model.text, context)?;
        let wordings = wordings.iter().take(n_texts);
        let prompts = wordings.map(|wording| wording.encode(&model.text, &before));
        let texts = Texts {
            prompts: prompts.collect::<Result<Vec<Prompt>>>()?,
            n: n_texts,
        };
        for &kv in &kv_formats {
            let mut known = Known::default();
            for &batch in &batches {
                model = grid.cell(model, (context, kv, batch), &texts, &mut known)?;
            }
        }
    }
    Ok(grid.axes)
}

/// `list`, or `one` alone where nothing was asked for.
fn or_one<T: Copy>(list: &[T], one: T) -> Vec<T> {
    match list.is_empty() {
        true => vec![one],
        false => list.to_vec(),
    }
}

/// What `choice` has come to in the model of `info`: a head that its self-test has left out stays out.
fn settled(choice: DraftChoice, info: &ModelInfo) -> DraftChoice {
    let without_head = |name| engine::drafter_kinds().any(|k| k.name == name && !k.takes_place);
    match (&choice, info.drafter) {
        (DraftChoice::Auto, None) => DraftChoice::None,
        (DraftChoice::Auto, Some(name)) if without_head(name) => DraftChoice::Named(name, None),
        _ => choice,
    }
}

/// The cells while they run.
struct Grid<'a> {
    args: &'a BenchArgs,
    lengths: Vec<BenchLength>,
    source: engine::Source,
    options: LoadOptions,
    output: OutputArgs,
    axes: Axes,
}

impl Grid<'_> {
    /// Runs a cell, or leaves it out if it cannot be had. Gives the model back.
    fn cell(
        &mut self,
        mut model: Model,
        (context, kv, batch): (usize, KvPlan, usize),
        texts: &Texts,
        known: &mut Known,
    ) -> Result<Model> {
        let cell = Cell::new(context, kv, batch);
        if !self.output.quiet {
            say!("{}", cell.name());
        }
        let sizes = match self.resize(&mut model, (kv, batch), texts) {
            Ok(sizes) => sizes,
            Err(reason) => {
                self.leave_out(cell, reason);
                return Ok(model);
            }
        };
        let rounds = Arc::new(rounds::Rounds::default());
        let heard = rounds.clone();
        let options = EngineOptions {
            reuse: false, // the same prompts come again
            step_sink: Some(StepSink(Arc::new(move |report| heard.hear(&report.step)))),
            overlap: !self.args.overlap.no_overlap,
            ..EngineOptions::default()
        };
        let engine = engine::Engine::start(model, options);
        let first = self.axes.rows.len();
        for &temperature in &self.args.temperatures {
            for &draft in &self.lengths {
                let writer = cell::Writer {
                    args: self.args,
                    engine: &engine,
                    rounds: &rounds,
                    cell: &cell,
                    sizes: &sizes,
                };
                match writer.row(texts, temperature, draft, known)? {
                    Ok(row) => self.axes.rows.push(row),
                    Err(reason) => {
                        self.axes.rows.truncate(first);
                        self.leave_out(cell, reason);
                        return model::given_back(engine);
                    }
                }
            }
        }
        let own = &mut self.axes.rows[first..];
        compare(own);
        self.axes.summary.extend(summaries(own));
        model::given_back(engine)
    }

    /// Has `model` remember as many texts at once as `batch` says, or says why it cannot.
    fn resize(
        &self,
        model: &mut Model,
        (kv, batch): (KvPlan, usize),
        texts: &Texts,
    ) -> Result<Sizes, String> {
        let prompt_tokens = texts.longest();
        let needed = prompt_tokens + self.args.max_tokens;
        let asked = self
            .args
            .load
            .context
            .filter(|_| self.args.contexts.is_empty());
        let sequence_tokens = asked.unwrap_or(needed);
        let most = model.info.context_max;
        if sequence_tokens > most {
            return Err(format!(
                "the model knows {most} tokens, fewer than {prompt_tokens} of a prompt and {} of its text",
                self.args.max_tokens
            ));
        }
        let options = LoadOptions {
            context: Some(sequence_tokens),
            sequences: batch,
            kv_format: kv,
            ..self.options.clone()
        };
        let resized = model.resize(&self.source, &options);
        resized.map_err(|error| error.to_string())?;
        let request = model.request_bytes(sequence_tokens);
        let info = &model.info;
        Ok(Sizes {
            prompt_tokens,
            sequence_tokens,
            request_bytes: request.target + request.drafter,
            request_drafter_bytes: request.drafter,
            memory_bytes: info.memory_bytes as u64,
            weight_bytes: info.weight_bytes + info.drafter_weight_bytes,
        })
    }

    /// Notes that a cell is not run, and why.
    fn leave_out(&mut self, cell: Cell, reason: String) {
        if !self.output.quiet {
            say!("{} is left out: {reason}", cell.name());
        }
        self.axes.left_out.push(LeftOut { cell, reason });
    }
}

impl Cell {
    fn new(context: usize, kv: KvPlan, batch: usize) -> Cell {
        Cell {
            context,
            kv_format: kv.to_string(),
            batch,
        }
    }

    /// The cell for people.
    fn name(&self) -> String {
        let Cell {
            context,
            kv_format,
            batch,
        } = self;
        format!("context {context}, KV cache {kv_format}, batch {batch}")
    }
}

/// Sets the rate of every row of a cell against that without drafts.
fn compare(rows: &mut [Row]) {
    let plain = rows.iter().filter(|row| row.draft.longest() == 0);
    let plain: Vec<(f32, f64)> = plain.map(|row| (row.temperature, row.tok_s)).collect();
    for row in rows {
        let base = plain
            .iter()
            .find(|(t, rate)| *t == row.temperature && *rate > 0.0);
        row.speedup = base.map(|(_, rate)| row.tok_s / rate);
    }
}

/// Chosen lengths against fixed ones, by the rows of a cell.
fn summaries(rows: &[Row]) -> Vec<CellSummary> {
    let autos = rows.iter().filter(|row| row.draft == BenchLength::Auto);
    let summary = |auto: &Row| {
        let of_auto = rows
            .iter()
            .filter(|row| row.temperature == auto.temperature);
        Some(CellSummary {
            cell: auto.cell.clone(),
            temperature: auto.temperature,
            chosen: chosen(of_auto.map(|row| (row.draft, row.tok_s)))?,
        })
    };
    autos.filter_map(summary).collect()
}
