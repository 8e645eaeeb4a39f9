//! `paceline replay`: what other draft lengths would have brought, by a trace (`docs/traces.md`).

use crate::args::{OutputArgs, ReplayArgs};
use crate::bench::table;
use anyhow::{Context, Result, anyhow};
use engine::DraftLength;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, BufReader, IsTerminal, Write};
use std::process::ExitCode;
use trace::Trace;
use trace::replay::{Lengths, Replay, Row, replay};

/// Runs the command.
pub(crate) fn run(args: &ReplayArgs, output: OutputArgs) -> Result<ExitCode> {
    let cannot = || format!("cannot read the trace `{}`", args.file.display());
    let file = File::open(&args.file).with_context(cannot)?;
    let trace = Trace::read(BufReader::new(file)).with_context(cannot)?;
    let replays = replays(args, &trace)?;
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
        print(replay, stdout.is_terminal(), &mut stdout)?;
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

/// Writes what a replay says, and its table.
fn print(replay: &Replay, aligned: bool, out: &mut impl Write) -> Result<()> {
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
    for of in &replay.acceptance {
        let shares = of.by_position.iter().map(|a| format!("{a:.2}"));
        let shares: Vec<String> = shares.collect();
        writeln!(
            out,
            "guesses of {} accepted by position, if those before were: {}",
            of.drafter,
            shares.join(" ")
        )?;
    }
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
    writeln!(out)?;
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
    table(&head, &[0], &rows, aligned, out)?;
    Ok(())
}

/// A row of the table.
fn cells(row: &Row) -> Vec<String> {
    let lengths = match row.lengths {
        Lengths::Recorded => "as recorded".to_owned(),
        Lengths::Plain => "none".to_owned(),
        Lengths::Fixed => row.draft.to_string(),
        Lengths::Adaptive => format!("adaptive, up to {}", row.draft),
    };
    let share = |share: f64| format!("{:.0} %", 100.0 * share);
    vec![
        lengths,
        format!("{:.0}", row.rounds),
        format!("{:.2}", row.tokens_per_round),
        format!("{:.1}", row.ms),
        format!("{:.1}", row.tokens_per_second),
        format!("{:.1}", row.ms_saved),
        share(row.extrapolated),
        share(row.untimed),
    ]
}
