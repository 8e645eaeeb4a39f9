//! The grid as a table that grows, and its last line.

use super::cells::{Cell, Engagement, Verdict};
use serde::Serialize;
use std::fmt::Write as _;

/// Columns of a result, as wide as `differs at token 1234`.
const RESULT_WIDTH: usize = 21;

/// How many cells there are of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Counts {
    pub(super) cells: usize,
    pub(super) equal: usize,
    /// Equal cells in which tokens were both accepted and refused.
    pub(super) engaged: usize,
    pub(super) differ: usize,
    pub(super) not_engaged: usize,
    pub(super) failed: usize,
    pub(super) not_applicable: usize,
}

impl Counts {
    pub(super) fn of(cells: &[Cell]) -> Counts {
        let mut counts = Counts {
            cells: cells.len(),
            ..Counts::default()
        };
        for cell in cells {
            match cell.result {
                Verdict::Equal => counts.equal += 1,
                Verdict::Differs => counts.differ += 1,
                Verdict::NotEngaged => counts.not_engaged += 1,
                Verdict::Failed => counts.failed += 1,
                Verdict::NotApplicable => counts.not_applicable += 1,
            }
            let is_engaged = cell.engagement == Engagement::Engaged;
            counts.engaged += usize::from(cell.result == Verdict::Equal && is_engaged);
        }
        counts
    }

    /// The last line.
    pub(super) fn line(&self) -> String {
        format!(
            "{} cells: {} == ({} engaged), {} differ, {} not engaged, {} failed, {} n/a",
            self.cells,
            self.equal,
            self.engaged,
            self.differ,
            self.not_engaged,
            self.failed,
            self.not_applicable
        )
    }
}

/// A result in a word.
fn result(cell: &Cell) -> String {
    match (cell.result, &cell.difference) {
        (Verdict::Equal, _) if cell.engagement == Engagement::Drafted => "== (drafted)".into(),
        (Verdict::Equal, _) => "==".into(),
        (Verdict::Differs, Some(first)) => format!("differs at token {}", first.token),
        (Verdict::Differs, None) => "differs".into(),
        (Verdict::NotEngaged, _) => "not engaged".into(),
        (Verdict::Failed, _) => "failed".into(),
        (Verdict::NotApplicable, _) => "n/a".into(),
    }
}

/// What a result needs to be understood.
fn note(cell: &Cell) -> Option<String> {
    match &cell.difference {
        Some(first) => Some(format!(
            "{}: text {} after `{}`, drafts of {}",
            cell.mode, first.text, first.prompt, first.draft
        )),
        None => cell.reason.clone(),
    }
}

/// Lines of equal columns.
pub(super) struct Table {
    drafter: usize,
    feature: usize,
}

impl Table {
    /// A table for drafters and features with these names.
    pub(super) fn new<'a>(
        drafters: impl Iterator<Item = &'a str>,
        features: impl Iterator<Item = &'a str>,
    ) -> Table {
        let width = |head: &str, names: &mut dyn Iterator<Item = &'a str>| {
            names
                .map(|name| name.chars().count())
                .max()
                .unwrap_or(0)
                .max(head.len())
        };
        let (mut drafters, mut features) = (drafters, features);
        Table {
            drafter: width("drafter", &mut drafters),
            feature: width("feature", &mut features),
        }
    }

    /// The first line.
    pub(super) fn head(&self) -> String {
        self.line(
            "drafter",
            "feature",
            &["greedy".into(), "sampled".into()],
            ["drafted", "accepted", "seconds"],
        )
    }

    /// The line of a feature: its cells with one drafter, greedy and sampled.
    pub(super) fn row(&self, cells: &[Cell]) -> String {
        let results: Vec<String> = cells.iter().map(result).collect();
        let drafted: u64 = cells.iter().map(|cell| cell.drafted).sum();
        let accepted: u64 = cells.iter().map(|cell| cell.accepted).sum();
        let seconds: f64 = cells.iter().map(|cell| cell.seconds).sum();
        let numbers = [
            drafted.to_string(),
            accepted.to_string(),
            format!("{seconds:.1}"),
        ];
        let numbers = [&*numbers[0], &*numbers[1], &*numbers[2]];
        let (drafter, feature) = (&cells[0].drafter, cells[0].feature);
        let mut line = self.line(drafter, feature, &results, numbers);
        let mut notes: Vec<String> = cells.iter().filter_map(note).collect();
        notes.dedup();
        if !notes.is_empty() {
            let _ = write!(line, "  {}", notes.join("; "));
        }
        line
    }

    fn line(
        &self,
        drafter: &str,
        feature: &str,
        results: &[String],
        [drafted, accepted, seconds]: [&str; 3],
    ) -> String {
        let Table {
            drafter: d,
            feature: f,
        } = self;
        let mut line = format!("{drafter:<d$}  {feature:<f$}");
        for result in results {
            let _ = write!(line, "  {result:<RESULT_WIDTH$}");
        }
        let _ = write!(line, "  {drafted:>7}  {accepted:>8}  {seconds:>7}");
        line
    }
}
