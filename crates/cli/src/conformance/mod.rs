//! `paceline conformance`: a proof, on this model and device, that speculation changes no token.
//!
//! ```text
//! plain     no drafter: what every feature writes, greedy and sampled
//! drafter   the same requests with each drafter and several draft lengths, compared with ==
//! ```
//!
//! | file | what |
//! | --- | --- |
//! | `features` | what requests ask for, as bodies of the API; the server's own code reads them |
//! | `writing` | runs requests, and keeps what a client could see of their texts |
//! | `cells` | plain texts against drafted ones, and what comes of it |
//! | `table` | the grid as a table |
//!
//! The model is loaded once; drafters are exchanged.

mod cells;
mod features;
mod table;
#[cfg(test)]
mod tests;
mod writing;

use crate::args::{ConformanceArgs, DraftArgs, OutputArgs};
use crate::progress::GridBar;
use crate::resolve::{self, Resolved};
use crate::{model, words};
use anyhow::{Context, Result};
use cells::{Author, Cell, Plain};
use engine::{
    DraftChoice, DraftLength, Engine, EngineOptions, KvMemory, LoadOptions, Model, Source,
};
use features::{FEATURES, Mode};
use serde::Serialize;
use server::{ModelConfig, RequestReader};
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use table::{Counts, Table};

/// Requests that run at once: as many as a batch has texts.
const SEQUENCES: usize = features::PROMPTS.len();
/// Draft lengths, beside those that adapt.
const LENGTHS: &[usize] = &[2, 5];
/// The draft length of `--quick`, beside those that adapt.
const QUICK_LENGTHS: &[usize] = &[4];

/// A drafter of the grid.
#[derive(Serialize)]
struct Drafter {
    /// What tables call it: its name, and its place where several have the name.
    label: String,
    #[serde(skip)]
    choice: DraftChoice,
    /// Whether the command line names it.
    named: bool,
    /// Why it drafts.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// Why it cannot be used.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl Drafter {
    /// The heads that are joined in it, each of which has to draft in every cell; none of a drafter with one head.
    fn joined(&self) -> Vec<&'static str> {
        match &self.choice {
            DraftChoice::Several { heads, .. } => heads.iter().map(|(name, _)| *name).collect(),
            _ => Vec::new(),
        }
    }
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    version: &'static str,
    model: String,
    device: String,
    kv_format: String,
    accept: &'static str,
    /// Longest drafts of the runs; `auto` beside them.
    draft_lengths: Vec<String>,
    drafters: Vec<Drafter>,
    cells: Vec<Cell>,
    counts: Counts,
}

/// Runs the command.
pub(crate) fn run(args: &ConformanceArgs, output: OutputArgs) -> Result<ExitCode> {
    let name = &args.model.model;
    let resolved = resolve::model(name)?;
    let mut options = model::options(&args.load, &DraftArgs::none(), SEQUENCES, &resolved)?;
    options.accept = args.accept;
    options.kv_memory = KvMemory::Whole;
    let mut loaded = model::load_with(name, &args.load, &resolved, &options)?;
    let lengths = lengths(args.quick);
    options.draft_max = lengths.iter().flatten().map(|n| n.max()).max().unwrap_or(0);
    let drafters = drafters(&loaded, &resolved, &options, &args.draft)?;
    check_named(&mut loaded, &resolved, options.clone(), &drafters)?;
    if !output.quiet {
        let (info, labels) = (&loaded.info, drafters.iter().map(|d| d.label.as_str()));
        say!(
            "{} on {}, KV cache as {}; drafters: {}",
            info.name,
            info.backend,
            info.kv_format,
            labels.collect::<Vec<_>>().join(", ")
        );
    }
    let all = drafters.len() * FEATURES.len() * Mode::ALL.len();
    let mut grid = Grid {
        is_json: args.json,
        table: Table::new(
            drafters.iter().map(|drafter| drafter.label.as_str()),
            FEATURES.iter().map(|feature| feature.name),
        ),
        bar: GridBar::new(all + FEATURES.len() * Mode::ALL.len(), !output.quiet),
        cells: Vec::new(),
        lengths,
    };
    let report = grid.report(loaded, &resolved, options, drafters, args.quick)?;
    grid.bar.clear();
    let code = exit_code(&report.cells);
    let last = if args.json {
        serde_json::to_string(&report)?
    } else {
        report.counts.line()
    };
    writeln!(io::stdout().lock(), "{last}")?;
    Ok(code)
}

/// Failure if a cell differs, failed or proves nothing, or if there is none.
fn exit_code(cells: &[Cell]) -> ExitCode {
    if cells.is_empty() || cells.iter().any(Cell::is_bad) {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

/// The draft lengths of each request: fixed ones, and one that adapts.
fn lengths(is_quick: bool) -> Vec<Option<DraftLength>> {
    let fixed = if is_quick { QUICK_LENGTHS } else { LENGTHS };
    let fixed = fixed.iter().map(|&n| Some(DraftLength::Fixed(n)));
    fixed.chain([None]).collect()
}

/// Every drafter that may fit `model`, and those that `named` adds.
fn drafters(
    model: &Model,
    resolved: &Resolved,
    options: &LoadOptions,
    named: &[DraftChoice],
) -> Result<Vec<Drafter>> {
    let found = model.drafters(&resolved.source, options);
    let mut all: Vec<(DraftChoice, bool)> = Vec::new();
    for choice in found.map_err(words::load_error)? {
        all.push((choice, false));
    }
    for choice in named {
        let choice = model::drafter(choice)?;
        // `auto` is what is found, and `none` what is compared with.
        let Some(asked) = Key::of(&choice) else {
            continue;
        };
        let is_same = |(known, _): &&mut (DraftChoice, bool)| {
            Key::of(known).is_some_and(|known| asked.means(&known))
        };
        match all.iter_mut().find(is_same) {
            Some((_, named)) => *named = true,
            None => all.push((choice, true)),
        }
    }
    let names: Vec<String> = all.iter().map(|(choice, _)| name_of(choice)).collect();
    let label = |(choice, name): (&DraftChoice, &String)| {
        let is_only = names.iter().filter(|other| *other == name).count() == 1;
        match choice {
            DraftChoice::Named(_, Some(source)) | DraftChoice::WithNgrams(_, Some(source))
                if !is_only =>
            {
                format!("{name}:{}", source.name())
            }
            DraftChoice::Several { heads, ngrams } if !is_only => {
                let heads = heads.iter().map(|(name, source)| match source {
                    Some(source) => format!("{name}:{}", source.name()),
                    None => (*name).to_owned(),
                });
                let ngrams = ngrams.then(|| "ngram".to_owned());
                heads.chain(ngrams).collect::<Vec<_>>().join("+")
            }
            _ => name.clone(),
        }
    };
    let choices = all.iter().map(|(choice, _)| choice);
    let labels: Vec<String> = choices.zip(&names).map(label).collect();
    let all = all.into_iter().zip(labels);
    let drafter = |((choice, named), label)| Drafter {
        label,
        choice,
        named,
        reason: None,
        error: None,
    };
    Ok(all.map(drafter).collect())
}

/// Finds out before anything is written whether the drafters that the command line names can be
/// used. Leaves `model` without one.
fn check_named(
    model: &mut Model,
    resolved: &Resolved,
    mut options: LoadOptions,
    drafters: &[Drafter],
) -> Result<()> {
    for drafter in drafters.iter().filter(|drafter| drafter.named) {
        options.draft = drafter.choice.clone();
        let redrafted = model.redraft(&resolved.source, &options);
        let cannot = || format!("`{}` cannot draft", drafter.label);
        redrafted.map_err(words::load_error).with_context(cannot)?;
    }
    options.draft = DraftChoice::None;
    model
        .redraft(&resolved.source, &options)
        .map_err(words::load_error)
}

/// The name of a drafter, as users type it without a place.
fn name_of(choice: &DraftChoice) -> String {
    match choice {
        DraftChoice::Named(name, _) => (*name).to_owned(),
        DraftChoice::WithNgrams(name, _) => format!("{name}+ngram"),
        DraftChoice::Several { heads, ngrams } => {
            let mut names: Vec<&str> = heads.iter().map(|(name, _)| *name).collect();
            names.extend(ngrams.then_some("ngram"));
            names.join("+")
        }
        DraftChoice::Auto | DraftChoice::None => String::new(),
    }
}

/// What tells one drafter from another: its name and its place.
struct Key {
    name: String,
    place: Option<String>,
}

impl Key {
    /// The key of a drafter that is asked for by name.
    fn of(choice: &DraftChoice) -> Option<Key> {
        let place = |source: &Source| match source {
            Source::Folder(path) => {
                let whole = path.canonicalize();
                whole.as_ref().unwrap_or(path).display().to_string()
            }
            Source::Files(files) => files.name.clone(),
        };
        let named = choice.named();
        let places: Vec<String> = named
            .iter()
            .filter_map(|(_, source)| source.map(place))
            .collect();
        (!named.is_empty()).then(|| Key {
            name: name_of(choice),
            place: (!places.is_empty()).then(|| places.join("+")),
        })
    }

    /// Whether whoever asks for this drafter means `known`: any place will do where none is named.
    fn means(&self, known: &Key) -> bool {
        self.name == known.name && (self.place.is_none() || self.place == known.place)
    }
}

/// The grid while it runs.
struct Grid {
    is_json: bool,
    table: Table,
    bar: GridBar,
    cells: Vec<Cell>,
    lengths: Vec<Option<DraftLength>>,
}

impl Grid {
    /// Runs everything. `model` has no drafter yet.
    fn report(
        &mut self,
        model: Model,
        resolved: &Resolved,
        mut options: LoadOptions,
        mut drafters: Vec<Drafter>,
        is_quick: bool,
    ) -> Result<Report> {
        let (mut model, plain) = self.plain(model, is_quick)?;
        self.print(|table| table.head())?;
        for drafter in &mut drafters {
            options.draft = drafter.choice.clone();
            if let Err(error) = model.redraft(&resolved.source, &options) {
                let error = words::load_error(error);
                let error = crate::one_line(&error);
                self.bar
                    .say(&format!("{} is left out: {error}", drafter.label));
                self.bar.pass(plain.len());
                drafter.error = Some(error);
                continue;
            }
            drafter.reason = Some(model.info.drafter_reason.clone());
            model = self.drafted(model, drafter, &plain)?;
        }
        let cells = std::mem::take(&mut self.cells);
        let info = &model.info;
        let length = |length: &Option<DraftLength>| {
            length.map_or("auto".to_owned(), |length| length.max().to_string())
        };
        Ok(Report {
            version: env!("CARGO_PKG_VERSION"),
            model: info.name.clone(),
            device: info.backend.clone(),
            kv_format: info.kv_format.clone(),
            accept: info.accept,
            draft_lengths: self.lengths.iter().map(length).collect(),
            drafters,
            counts: Counts::of(&cells),
            cells,
        })
    }

    /// The texts of plain decoding.
    fn plain(&mut self, model: Model, is_quick: bool) -> Result<(Model, Vec<Plain>)> {
        let engine = Arc::new(Engine::start(model, EngineOptions::default()));
        let author = Author {
            engine: &engine,
            reader: RequestReader::new(engine.clone(), ModelConfig::default()),
            runtime: tokio::runtime::Builder::new_current_thread().build()?,
            is_quick,
        };
        let plain = author.all(|| self.bar.pass(1));
        drop(author);
        let engine = Arc::into_inner(engine).context("the engine is still in use")?;
        Ok((model::given_back(engine)?, plain))
    }

    /// The cells of a drafter, which `model` has.
    fn drafted(&mut self, model: Model, drafter: &Drafter, plain: &[Plain]) -> Result<Model> {
        let who = (drafter.label.as_str(), &drafter.joined()[..]);
        let engine = Engine::start(model, EngineOptions::default());
        for pair in plain.chunks(Mode::ALL.len()) {
            let mut row = Vec::new();
            for plain in pair {
                let write = &mut |script: &_, length| writing::run(&engine, script, length);
                row.push(plain.compare(who, &self.lengths, write));
                self.bar.pass(1);
            }
            self.print(|table| table.row(&row))?;
            self.cells.append(&mut row);
        }
        model::given_back(engine)
    }

    /// Prints a line of the table, unless JSON is wanted.
    fn print(&self, line: impl FnOnce(&Table) -> String) -> io::Result<()> {
        if self.is_json {
            return Ok(());
        }
        let line = line(&self.table);
        self.bar.aside(|| writeln!(io::stdout().lock(), "{line}"))
    }
}
