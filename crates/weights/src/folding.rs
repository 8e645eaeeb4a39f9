//! What the stored offset norms of a checkpoint's parts are; `norms.rs` decides it.

use crate::{LoadError, names};
use std::sync::OnceLock;

/// What the stored numbers of a part's offset norms are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Folding {
    /// `w`.
    Raw,
    /// `1 + w`.
    Folded,
}

/// The parts of a checkpoint that may come from different writers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Trunk,
    Mtp,
}

impl Part {
    pub(crate) fn of(name: &str) -> Part {
        if name.starts_with(names::MTP) {
            Part::Mtp
        } else {
            Part::Trunk
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Part::Trunk => "trunk",
            Part::Mtp => "MTP head",
        }
    }
}

/// Two facts that cannot both hold.
#[derive(Clone, Debug)]
pub(crate) struct Disagreement {
    pub(crate) part: Part,
    pub(crate) one: String,
    pub(crate) other: String,
}

impl From<Disagreement> for LoadError {
    fn from(d: Disagreement) -> LoadError {
        LoadError::NormsDisagree {
            part: d.part.name(),
            one: d.one,
            other: d.other,
        }
    }
}

/// What the offset norms of a checkpoint's parts hold, decided when it is first asked
/// for.
#[derive(Default)]
pub(crate) struct Norms {
    trunk: OnceLock<Result<Folding, Disagreement>>,
    mtp: OnceLock<Result<Folding, Disagreement>>,
}

impl Norms {
    /// What the norms of `part` hold; `decide` is asked the first time.
    pub(crate) fn folding(
        &self,
        part: Part,
        decide: impl FnOnce() -> Result<Folding, Disagreement>,
    ) -> Result<Folding, Disagreement> {
        let cell = match part {
            Part::Trunk => &self.trunk,
            Part::Mtp => &self.mtp,
        };
        cell.get_or_init(decide).clone()
    }
}
