//! The report as tables: aligned for people, Markdown for files.

use super::summary::Chosen;
use super::{Report, axes};
use std::io::{self, Write};

/// Positions of the draft whose acceptance people are shown; files have all.
const POSITIONS_SHOWN: usize = 4;

/// Writes the times of steps and prefill, if they were measured, and what speculation saves.
pub(super) fn print(report: &Report, aligned: bool, out: &mut impl Write) -> io::Result<()> {
    if let Some(&one) = report.step_ms.get(&1) {
        print_steps(report, one, aligned, out)?;
    }
    if let Some(axes) = &report.axes {
        return axes::print(axes, aligned, out);
    }
    print_runs(report, aligned, out)?;
    print_summary(report, aligned, out)
}

/// Steps against the one of a single row, which takes `one` milliseconds; then prefill.
fn print_steps(report: &Report, one: f64, aligned: bool, out: &mut impl Write) -> io::Result<()> {
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
    writeln!(out)
}

fn plain_read(report: &Report) -> String {
    match (report.read_ms, report.read_gbs) {
        (Some(ms), Some(rate)) => {
            format!(", a plain read of them takes {ms:.2} ms ({rate:.1} GB/s)")
        }
        _ => String::new(),
    }
}

/// A row for each class of prompts, temperature and draft length.
fn print_runs(report: &Report, aligned: bool, out: &mut impl Write) -> io::Result<()> {
    let runs = report.runs.iter().map(|run| {
        let mut accepted: Vec<String> = run
            .accepted_by_position
            .iter()
            .map(|a| format!("{a:.2}"))
            .collect();
        // Sixteen positions are wider than most terminals.
        if aligned && accepted.len() > POSITIONS_SHOWN {
            accepted.truncate(POSITIONS_SHOWN);
            accepted.push("…".to_owned());
        }
        vec![
            run.class.clone(),
            run.temperature.to_string(),
            run.drafter.clone().unwrap_or_else(|| "none".to_owned()),
            run.draft.to_string(),
            run.tokens.to_string(),
            format!("{:.1}", run.tok_s),
            format!("{:.2}", run.speedup),
            format!("{:.1}", run.first_token_ms),
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
        "first ms",
        "tokens/round",
        "accepted by position",
    ];
    table(&head, &[0, 2, 9], &runs.collect::<Vec<_>>(), aligned, out)
}

/// Chosen draft lengths against fixed ones, a row for each class and temperature.
fn print_summary(report: &Report, aligned: bool, out: &mut impl Write) -> io::Result<()> {
    if report.summary.is_empty() {
        return Ok(());
    }
    let rows = report.summary.iter().map(|summary| {
        let mut row = vec![summary.class.clone(), summary.temperature.to_string()];
        row.extend(chosen_cells(&summary.chosen));
        row
    });
    let head = [&["class", "T"][..], &CHOSEN].concat();
    writeln!(
        out,
        "\nchosen draft lengths (auto) against fixed ones, tok/s:\n"
    )?;
    table(&head, &[0], &rows.collect::<Vec<_>>(), aligned, out)
}

/// The columns of [`chosen_cells`].
pub(super) const CHOSEN: [&str; 5] = [
    "none",
    "best fixed",
    "auto",
    "auto ÷ best fixed",
    "auto ÷ none",
];

/// Chosen draft lengths against fixed ones, as cells of a row.
pub(super) fn chosen_cells(chosen: &Chosen) -> [String; 5] {
    let number =
        |x: Option<f64>, digits: usize| x.map_or(String::new(), |x| format!("{x:.digits$}"));
    [
        number(chosen.none_tok_s, 1),
        format!("{:.1} ({})", chosen.best_fixed_tok_s, chosen.best_fixed),
        number(Some(chosen.auto_tok_s), 1),
        number(Some(chosen.auto_over_best_fixed), 2),
        number(chosen.auto_over_none, 2),
    ]
}

/// Writes a table: aligned for people, or as Markdown for files. Columns are right-aligned
/// except those of `left`.
pub(crate) fn table(
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
