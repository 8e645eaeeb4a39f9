//! `paceline replay`: what other draft lengths would have brought, by a trace (`docs/traces.md`).

use crate::args::{OutputArgs, ReplayArgs};
use crate::bench::table;
use anyhow::{Context, Result, anyhow, bail};
use engine::DraftLength;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, BufReader, IsTerminal, Write};
use std::process::ExitCode;
use trace::Trace;
use trace::replay::{DrafterReplay, DrafterRow, Lengths, Replay, Row, replay};

/// Runs the command.
pub(crate) fn run(args: &ReplayArgs, output: OutputArgs) -> Result<ExitCode> {
    let cannot = || format!("cannot read the trace `{}`", args.file.display());
    let file = File::open(&args.file).with_context(cannot)?;
    let trace = Trace::read(BufReader::new(file)).with_context(cannot)?;
    let mut replays = replays(args, &trace)?;
    if let Some(name) = &args.drafter {
        keep_drafter(&mut replays, name)?;
    }
    if !output.quiet {
        tell_faults(&trace);
    }
    let mut stdout = io::stdout().lock();
    if args.json {
        writeln!(stdout, "{}", report(&trace, &replays))?;
        return Ok(ExitCode::SUCCESS);
    }
    for (i, replay) in replays.iter().enumerate() {
        if i > 0 {
            writeln!(stdout)?;
        }
        let aligned = stdout.is_terminal();
        print_head(replay, &mut stdout)?;
        if args.drafter.is_none() {
            print_all(replay, aligned, &mut stdout)?;
        }
        print_drafters(replay, args.drafter.is_some(), aligned, &mut stdout)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The replay of each model that the trace says enough of.
fn replays(args: &ReplayArgs, trace: &Trace) -> Result<Vec<Replay>> {
    let fixed = args.draft_fixed.map(DraftLength::Fixed);
    let length = fixed.or(args.draft_max.map(DraftLength::UpTo));
    let (mut replays, mut why) = (Vec::new(), "it has no rounds".to_owned());
    for model in trace.models.iter().filter(|m| !m.rounds.is_empty()) {
        match replay(model, length) {
            Ok(replay) => replays.push(replay),
            Err(error) => why = error.to_string(),
        }
    }
    match replays.is_empty() {
        false => Ok(replays),
        true => {
            let what = format!("nothing to replay in `{}`", args.file.display());
            Err(anyhow!(why).context(what))
        }
    }
}

/// Leaves of `replays` what is told of the drafter `name`.
fn keep_drafter(replays: &mut Vec<Replay>, name: &str) -> Result<()> {
    let mut known: Vec<&str> = Vec::new();
    for drafter in replays.iter().flat_map(|replay| &replay.drafters) {
        if !known.contains(&drafter.as_str()) {
            known.push(drafter);
        }
    }
    if !known.contains(&name) {
        let drafted = match &known[..] {
            [] => "nobody drafted".to_owned(),
            names => format!("its drafters are {}", names.join(", ")),
        };
        bail!("no round of the trace was drafted by `{name}`: {drafted}");
    }
    for replay in &mut *replays {
        replay.by_drafter.retain(|of| of.drafter == name);
    }
    replays.retain(|replay| !replay.by_drafter.is_empty());
    Ok(())
}

/// The object that `--json` prints.
fn report(trace: &Trace, replays: &[Replay]) -> Value {
    json!({
        "trace": {
            "version": trace.header.version,
            "paceline": trace.header.paceline,
            "started": trace.header.started,
            "is_whole": trace.summary.is_some(),
            "lost_lines": trace.summary.as_ref().map(|summary| summary.lost),
            "broken_lines": trace.broken,
            "unknown_lines": trace.unknown,
        },
        "models": replays,
    })
}

/// Says on stderr what of the trace is missing.
fn tell_faults(trace: &Trace) {
    let lines = |n: u64| format!("{n} line{}", if n == 1 { "" } else { "s" });
    if trace.summary.is_none() {
        say!("paceline: the trace has no last line: it is still being written, or was cut off");
    }
    if trace.broken > 0 {
        say!(
            "paceline: {} of the trace cannot be read",
            lines(trace.broken)
        );
    }
    if trace.unknown > 0 {
        let are = match trace.unknown {
            1 => "is of a kind",
            _ => "are of kinds",
        };
        say!(
            "paceline: {} of the trace {are} that this version does not know",
            lines(trace.unknown)
        );
    }
    let lost = trace.summary.as_ref().map_or(0, |summary| summary.lost);
    if lost > 0 {
        say!(
            "paceline: {} could not be written while the engine ran",
            lines(lost)
        );
    }
}

/// Writes what a replay is of.
fn print_head(replay: &Replay, out: &mut impl Write) -> Result<()> {
    let tokens = replay.rows.first().map_or(0, |row| row.tokens);
    let drafters = match &replay.drafters[..] {
        [] => "nobody drafted".to_owned(),
        names => format!("drafted by {}", names.join(", ")),
    };
    let texts = if replay.texts == 1 { "text" } else { "texts" };
    writeln!(
        out,
        "{}: {} {texts}, {tokens} tokens after the first, {drafters}",
        replay.model, replay.texts
    )?;
    writeln!(
        out,
        "rounds took {:.2} times what rounds of their kind usually do; so do those below",
        replay.ms_over_usual
    )?;
    if replay.left_out > 0 {
        writeln!(
            out,
            "left out: {} rounds of preempted texts that ran rows again",
            replay.left_out
        )?;
    }
    Ok(())
}

/// Writes the table of whole texts by draft length.
fn print_all(replay: &Replay, aligned: bool, out: &mut impl Write) -> Result<()> {
    let head = [
        "drafts",
        "rounds",
        "tokens a round",
        "ms",
        "tok/s",
        "ms saved",
        "extrapolated",
        "untimed",
    ];
    let rows: Vec<Vec<String>> = replay.rows.iter().map(cells).collect();
    writeln!(out)?;
    table(&head, &[0], &rows, aligned, out)?;
    Ok(())
}

/// Writes what each drafter has done, and its rounds by draft length where there are several or one is asked for.
fn print_drafters(replay: &Replay, asked: bool, aligned: bool, out: &mut impl Write) -> Result<()> {
    if replay.by_drafter.is_empty() {
        return Ok(());
    }
    let head = [
        "drafter",
        "rounds",
        "drafted",
        "accepted",
        "tokens a round",
        "expected",
        "ms a draft",
        "ms a guess",
        "ms reading",
    ];
    let rows: Vec<Vec<String>> = replay.by_drafter.iter().map(drafter_cells).collect();
    writeln!(out)?;
    table(&head, &[0], &rows, aligned, out)?;
    writeln!(out)?;
    for of in &replay.by_drafter {
        let shares = of.by_position.iter().map(|a| format!("{a:.2}"));
        let shares: Vec<String> = shares.collect();
        writeln!(
            out,
            "guesses of {} accepted by position, if those before were: {}",
            of.drafter,
            shares.join(" ")
        )?;
    }
    if !asked && replay.by_drafter.len() < 2 {
        return Ok(());
    }
    let head = [
        "drafts",
        "tokens a round",
        "ms a round",
        "tok/s",
        "extrapolated",
        "untimed",
    ];
    for of in &replay.by_drafter {
        writeln!(
            out,
            "\nthe rounds that {} drafted for, each by itself:\n",
            of.drafter
        )?;
        let rows: Vec<Vec<String>> = of.rows.iter().map(alone_cells).collect();
        table(&head, &[0], &rows, aligned, out)?;
    }
    Ok(())
}

/// A row of the table of drafters.
fn drafter_cells(of: &DrafterReplay) -> Vec<String> {
    let known = |number: Option<f64>, digits: usize| {
        number.map_or("-".to_owned(), |number| format!("{number:.digits$}"))
    };
    vec![
        of.drafter.clone(),
        of.rounds.to_string(),
        of.drafted.to_string(),
        of.accepted.to_string(),
        format!("{:.2}", of.tokens_per_round),
        known(of.expected_tokens_per_round, 2),
        known(of.ms_per_draft, 3),
        known(of.ms_per_guess, 3),
        known(of.ms_reading, 1),
    ]
}

/// A row of the table of a drafter's rounds.
fn alone_cells(row: &DrafterRow) -> Vec<String> {
    vec![
        lengths_cell(row.lengths, row.draft),
        format!("{:.2}", row.tokens_per_round),
        format!("{:.3}", row.ms_per_round),
        format!("{:.1}", row.tokens_per_second),
        share(row.extrapolated),
        share(row.untimed),
    ]
}

/// What lengths a row is about.
fn lengths_cell(lengths: Lengths, draft: usize) -> String {
    match lengths {
        Lengths::Recorded => "as recorded".to_owned(),
        Lengths::Plain => "none".to_owned(),
        Lengths::Fixed => draft.to_string(),
        Lengths::Adaptive => format!("adaptive, up to {draft}"),
    }
}

/// A share in percent.
fn share(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

/// A row of the table.
fn cells(row: &Row) -> Vec<String> {
    vec![
        lengths_cell(row.lengths, row.draft),
        format!("{:.0}", row.rounds),
        format!("{:.2}", row.tokens_per_round),
        format!("{:.1}", row.ms),
        format!("{:.1}", row.tokens_per_second),
        format!("{:.1}", row.ms_saved),
        share(row.extrapolated),
        share(row.untimed),
    ]
}
