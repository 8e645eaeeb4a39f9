//! Draft lengths that are compared.

use engine::{DRAFT_MAX, DraftLength, Guesser, Guessers, ModelInfo};
use serde::{Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// How long the drafts of a run are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BenchLength {
    /// This many tokens in every round, by the draft head if there is one.
    Fixed(usize),
    /// What a server does: in each round as many as pay, by whoever promises more.
    Auto,
}

impl BenchLength {
    /// Tokens of the longest draft.
    pub(super) fn longest(self) -> usize {
        match self {
            BenchLength::Fixed(n) => n,
            BenchLength::Auto => DRAFT_MAX,
        }
    }

    /// What a request to the model of `info` says of its drafts, and of who may guess.
    pub(super) fn of_request(self, info: &ModelInfo) -> (Option<DraftLength>, Guessers) {
        match self {
            BenchLength::Fixed(n) => {
                let first = info.drafter.and_then(|name| info.guesser(name));
                let first = first.unwrap_or(Guesser::HEAD);
                (Some(DraftLength::Fixed(n)), Guessers::from_iter([first]))
            }
            BenchLength::Auto => (None, Guessers::default()),
        }
    }

    /// The names of those who may guess; none without drafts.
    pub(super) fn drafters(self, info: &ModelInfo) -> Option<String> {
        match self {
            BenchLength::Fixed(0) => None,
            BenchLength::Fixed(_) => info.drafter.map(str::to_owned),
            BenchLength::Auto => Some(info.drafters.join("+")),
        }
    }
}

impl Default for BenchLength {
    fn default() -> Self {
        BenchLength::Fixed(0)
    }
}

impl fmt::Display for BenchLength {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BenchLength::Fixed(n) => n.fmt(f),
            BenchLength::Auto => f.write_str("auto"),
        }
    }
}

impl FromStr for BenchLength {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s.parse() {
            Ok(n) if n <= DRAFT_MAX => Ok(BenchLength::Fixed(n)),
            _ if s == "auto" => Ok(BenchLength::Auto),
            _ => Err(format!("must be a number up to {DRAFT_MAX}, or auto")),
        }
    }
}

impl Serialize for BenchLength {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            BenchLength::Fixed(n) => serializer.serialize_u64(*n as u64),
            BenchLength::Auto => serializer.serialize_str("auto"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_numbers_or_auto() {
        let read = |s: &str| s.parse::<BenchLength>().ok();
        assert_eq!(read("3"), Some(BenchLength::Fixed(3)));
        assert_eq!(read("auto"), Some(BenchLength::Auto));
        assert_eq!(["17", "-1", "", "x"].map(read), [None; 4]);
    }
}
