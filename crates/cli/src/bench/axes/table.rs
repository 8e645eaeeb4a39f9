//! Rows and summary of the axes as tables.

use super::super::table::{CHOSEN, chosen_cells, table};
use super::{Axes, Cell, Row};
use crate::model::bytes;
use std::io::{self, Write};

/// Writes a row for each cell, temperature and draft length, then chosen lengths against fixed ones, then what was
/// left out.
pub(in crate::bench) fn print(axes: &Axes, aligned: bool, out: &mut impl Write) -> io::Result<()> {
    if !axes.rows.is_empty() {
        print_rows(&axes.rows, aligned, out)?;
    }
    if !axes.summary.is_empty() {
        let rows = axes.summary.iter().map(|summary| {
            let mut row = place(&summary.cell, summary.temperature);
            row.extend(chosen_cells(&summary.chosen));
            row
        });
        let head = [&PLACE[..], &CHOSEN].concat();
        writeln!(
            out,
            "\nchosen draft lengths (auto) against fixed ones, tok/s of all texts at once:\n"
        )?;
        table(&head, &[1], &rows.collect::<Vec<_>>(), aligned, out)?;
    }
    for (i, left) in axes.left_out.iter().enumerate() {
        if i == 0 {
            writeln!(out)?;
        }
        writeln!(out, "{}: left out, {}", left.cell.name(), left.reason)?;
    }
    Ok(())
}

/// The columns that say which cell and temperature a row is of.
const PLACE: [&str; 4] = ["context", "KV cache", "batch", "T"];

fn place(cell: &Cell, temperature: f32) -> Vec<String> {
    vec![
        cell.context.to_string(),
        cell.kv_format.clone(),
        cell.batch.to_string(),
        temperature.to_string(),
    ]
}

fn print_rows(rows: &[Row], aligned: bool, out: &mut impl Write) -> io::Result<()> {
    let cells = |row: &Row| {
        let mut cells = place(&row.cell, row.temperature);
        cells.extend([
            row.drafter.clone().unwrap_or_else(|| "none".to_owned()),
            row.draft.to_string(),
            format!("{:.1}", row.tok_s),
            format!("{:.1}", row.tok_s_per_stream),
            row.speedup.map_or(String::new(), |x| format!("{x:.2}")),
            format!("{:.2}", row.ms_per_round),
            format!("{:.2}", row.tokens_per_round),
            format!("{:.1}", row.first_token_ms),
            bytes(row.sizes.request_bytes),
            bytes(row.sizes.weight_bytes),
            row.resident_bytes.map_or(String::new(), bytes),
        ]);
        cells
    };
    let figures = [
        "drafter",
        "draft",
        "tok/s",
        "a text",
        "speedup",
        "ms/round",
        "tokens/round",
        "first ms",
        "a request",
        "weights",
        "resident",
    ];
    let head = [&PLACE[..], &figures].concat();
    let rows: Vec<Vec<String>> = rows.iter().map(cells).collect();
    table(&head, &[1, 4], &rows, aligned, out)
}
