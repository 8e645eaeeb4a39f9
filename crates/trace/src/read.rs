//! Traces, read: as far as a file is whole.
//!
//! A program that was killed leaves half a line, and a newer version writes fields and lines that this
//! one does not know. Neither keeps anyone from reading the rest; both are counted.

use crate::schema::{Header, Line, Model, Round, SCHEMA, StreamRound, Summary, VERSION};
use serde::Deserialize;
use std::io::{self, BufRead, Read};

/// Bytes of a line, at most: a round of a thousand requests takes 400,000.
const LINE_BYTES_MAX: u64 = 4 << 20;
/// Models of a trace, at most.
const MODELS_MAX: usize = 4096;
/// Milliseconds of a round, at most: a day.
const MS_MAX: f64 = 86_400e3;
/// Tokens of a draft, at most; far more than any has.
const DRAFT_MAX: usize = 1024;
/// Tokens of a text, at most.
const CONTEXT_MAX: usize = 1 << 40;

/// What a file of a trace says.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// The first line.
    pub header: Header,
    /// Each model and its rounds, in order.
    pub models: Vec<ModelTrace>,
    /// The last line, unless the file is cut off.
    pub summary: Option<Summary>,
    /// Lines that are no JSON, or say what cannot be.
    pub broken: u64,
    /// Lines of types that this version does not know.
    pub unknown: u64,
}

/// What a trace says of one model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelTrace {
    /// The model.
    pub model: Model,
    /// The model's rounds, in order.
    pub rounds: Vec<Round>,
}

/// Why a trace cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The file cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The first line is no header.
    #[error("the first line is not the header of a trace, as `--trace FILE` writes it")]
    NoHeader,
    /// The trace has a version that this program does not know.
    #[error(
        "this is a trace of version {version}, written by paceline {paceline}; this paceline reads version {VERSION}"
    )]
    Version {
        /// The version.
        version: u64,
        /// The version of paceline that has written it.
        paceline: String,
    },
}

/// As much of a header as any version has.
#[derive(Deserialize)]
struct AnyHeader {
    schema: String,
    version: u64,
    #[serde(default)]
    paceline: String,
}

/// The type of a line.
#[derive(Deserialize)]
struct AnyLine {
    #[serde(rename = "type")]
    kind: String,
}

impl Trace {
    /// Reads a trace.
    ///
    /// # Errors
    ///
    /// [`ReadError`]. Lines after the first that are broken are none: [`Trace::broken`] counts them.
    pub fn read(mut from: impl BufRead) -> Result<Self, ReadError> {
        let mut line = Vec::new();
        read_line(&mut from, &mut line)?;
        let any: AnyHeader = serde_json::from_slice(&line).map_err(|_| ReadError::NoHeader)?;
        if any.schema != SCHEMA {
            return Err(ReadError::NoHeader);
        }
        if any.version != VERSION {
            return Err(ReadError::Version {
                version: any.version,
                paceline: any.paceline,
            });
        }
        let Ok(Line::Header(header)) = serde_json::from_slice(&line) else {
            return Err(ReadError::NoHeader);
        };
        let mut trace = Trace {
            header,
            models: Vec::new(),
            summary: None,
            broken: 0,
            unknown: 0,
        };
        while let Some(is_whole) = read_line(&mut from, &mut line)? {
            match is_whole {
                true => trace.take(&line),
                false => trace.broken += 1,
            }
        }
        Ok(trace)
    }

    /// Takes a line after the first.
    fn take(&mut self, line: &[u8]) {
        match serde_json::from_slice(line) {
            Ok(Line::Round(round)) if is_sane(&round) => {
                self.of(round.model).rounds.push(round);
            }
            Ok(Line::Model(model)) if model.model < MODELS_MAX => {
                let number = model.model;
                self.of(number).model = model;
            }
            Ok(Line::Summary(summary)) => self.summary = Some(summary),
            Ok(_) => self.broken += 1,
            Err(_) => {
                let known = ["header", "model", "round", "summary"];
                let kind = serde_json::from_slice::<AnyLine>(line);
                match kind.is_ok_and(|line| !known.contains(&line.kind.as_str())) {
                    true => self.unknown += 1,
                    false => self.broken += 1,
                }
            }
        }
    }

    /// What is said of the model `number`, which may have been said in a line that is broken.
    fn of(&mut self, number: usize) -> &mut ModelTrace {
        while self.models.len() <= number {
            let mut model = ModelTrace::default();
            model.model.model = self.models.len();
            self.models.push(model);
        }
        &mut self.models[number]
    }
}

/// Reads the next line, without its end, into `line`; nothing at the end of the file. False if the line
/// is too long, or the file ends within it.
fn read_line(from: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<Option<bool>> {
    line.clear();
    from.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', line)?;
    if line.is_empty() {
        return Ok(None);
    }
    if line.last() == Some(&b'\n') {
        line.pop();
        return Ok(Some(true));
    }
    let is_long = line.len() as u64 == LINE_BYTES_MAX;
    if is_long {
        from.skip_until(b'\n')?;
        return Ok(Some(false));
    }
    // The last line may be whole and lack its end.
    Ok(Some(serde_json::from_slice::<AnyLine>(line).is_ok()))
}

/// Whether a round can have been so.
fn is_sane(round: &Round) -> bool {
    let is_time = |ms: f64| (0.0..=MS_MAX).contains(&ms);
    round.model < MODELS_MAX
        && is_time(round.verify_ms)
        && is_time(round.draft_ms)
        && round.plain_ms.is_none_or(is_time)
        && round.rows <= CONTEXT_MAX
        && round.draft_asked.max(round.copy_asked) <= DRAFT_MAX
        && (round.heads.iter()).all(|head| head.asked <= DRAFT_MAX && is_time(head.ms))
        && round.streams.iter().all(is_sane_stream)
}

fn is_sane_stream(stream: &StreamRound) -> bool {
    stream.drafted <= DRAFT_MAX
        && stream.asked.max(stream.found.unwrap_or(0)) <= DRAFT_MAX
        && stream.accepted <= stream.drafted
        && stream.forced <= stream.drafted
        && stream.forced_accepted <= stream.forced.min(stream.accepted)
        && (stream.expected_tokens).is_none_or(|n| (0.0..=1.0 + DRAFT_MAX as f64).contains(&n))
        && stream.emitted <= stream.accepted + 1
        && stream.context <= CONTEXT_MAX
        && stream.left.is_none_or(|left| left <= CONTEXT_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str =
        r#"{"type":"header","schema":"paceline-trace","version":1,"paceline":"0.1.0","started":5}"#;
    const ROUND: &str = r#"{"type":"round","verify_ms":4,"draft_ms":1,"streams":[
        {"request":1,"context":9,"drafted":3,"accepted":2,"emitted":3}]}"#;

    fn read(lines: &[&str]) -> Result<Trace, ReadError> {
        let lines: Vec<String> = lines.iter().map(|line| line.replace('\n', "")).collect();
        Trace::read(lines.join("\n").as_bytes())
    }

    #[test]
    fn what_is_broken_or_not_known_is_counted_and_skipped() {
        let newer = ROUND.replace("\"request\"", "\"mood\":\"fine\",\"request\"");
        let trace = read(&[
            HEADER,
            ROUND,
            &newer,
            r#"{"type":"weather","sun":true}"#,
            "",
            "[1]",
            r#"{"type":"round","verify_ms":4}"#,
            &ROUND[..90],
        ]);
        let trace = trace.unwrap();
        assert_eq!(trace.models[0].rounds.len(), 2);
        assert_eq!(trace.models[0].rounds[0], trace.models[0].rounds[1]);
        assert_eq!((trace.broken, trace.unknown), (4, 1));
        assert_eq!(trace.summary, None);
        // The last line may lack its end.
        assert_eq!(read(&[HEADER, ROUND]).unwrap().models[0].rounds.len(), 1);
    }

    #[test]
    fn what_cannot_have_been_is_broken() {
        for (from, to) in [
            ("\"verify_ms\":4", "\"verify_ms\":-1"),
            ("\"verify_ms\":4", "\"verify_ms\":1e300"),
            ("\"accepted\":2", "\"accepted\":4"),
            ("\"emitted\":3", "\"emitted\":4"),
            ("\"emitted\":3", "\"emitted\":3,\"forced\":4"),
            (
                "\"emitted\":3",
                "\"emitted\":3,\"forced\":2,\"forced_accepted\":3",
            ),
            ("\"emitted\":3", "\"emitted\":3,\"expected_tokens\":1e300"),
            (
                "\"streams\"",
                "\"heads\":[{\"asked\":1,\"ms\":-1}],\"streams\"",
            ),
            ("\"drafted\":3", "\"drafted\":4000000000000"),
            ("\"context\":9", "\"context\":18446744073709551615"),
            ("\"streams\"", "\"model\":99999999,\"streams\""),
        ] {
            let line = ROUND.replace(from, to);
            assert_ne!(line, ROUND);
            let trace = read(&[HEADER, &line]).unwrap();
            assert_eq!((trace.broken, trace.models.len()), (1, 0), "{line}");
        }
    }

    #[test]
    fn the_first_line_says_what_the_file_is() {
        let newer = HEADER.replace("\"version\":1", "\"version\":7");
        let error = read(&[&newer]).unwrap_err().to_string();
        assert_eq!(
            error,
            "this is a trace of version 7, written by paceline 0.1.0; this paceline reads version 1"
        );
        for first in ["", ROUND, "{}", &HEADER.replace("paceline-trace", "other")] {
            let error = read(&[first, ROUND]).unwrap_err();
            assert!(matches!(error, ReadError::NoHeader), "{error}");
        }
    }

    #[test]
    fn a_line_without_end_is_skipped() {
        let long = format!("{{\"type\":\"{}", "x".repeat(LINE_BYTES_MAX as usize));
        let trace = read(&[HEADER, &long, ROUND]).unwrap();
        assert_eq!((trace.broken, trace.models[0].rounds.len()), (1, 1));
    }
}
