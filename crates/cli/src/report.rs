//! A record of JSON, told to people: lines of a label and a value.

use serde_json::Value;
use std::fmt::{Display, Write as _};

/// Lines of a label of 14 columns and a value.
#[derive(Default)]
pub(crate) struct Report {
    text: String,
}

impl Report {
    /// Adds a line. The label is empty where a line belongs to the one above it.
    pub(crate) fn line(&mut self, label: &str, value: impl Display) {
        let _ = writeln!(self.text, "{label:<14} {value}");
    }

    /// The whole report.
    pub(crate) fn into_text(self) -> String {
        self.text
    }
}

/// A number of the record; 0 where there is none.
pub(crate) fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}

/// A list of the record; empty where there is none.
pub(crate) fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}
