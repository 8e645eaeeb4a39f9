//! Why a loaded model is as it is: who drafts, and where its weights are.
//!
//! Reasons are data. Each has plain words of its own; whoever has names for the options of
//! [`crate::load`], as a command line has, puts them in through [`Words`].

use crate::error::EngineError;
use crate::options::Placement;
use std::fmt;

/// How reasons are spelled in [`crate::ModelInfo`] and in the records of requests.
#[derive(Clone, Copy, Debug)]
pub struct Words {
    /// Spells why a drafter drafts, or why none does.
    pub drafter: fn(&DrafterReason) -> String,
    /// Spells why weights are where they are.
    pub weights: fn(&WeightsReason) -> String,
}

impl Default for Words {
    fn default() -> Self {
        Words {
            drafter: ToString::to_string,
            weights: ToString::to_string,
        }
    }
}

/// Why weights are where they are while the model runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WeightsReason {
    /// The caller asked for this place.
    Asked(Placement),
    /// The caller left it open, and the weights cannot stay in their files.
    Unmappable(Unmappable),
    /// Packed weights and KV cache fit the free memory.
    Fits,
    /// Packed weights and KV cache do not fit the free memory.
    TooLarge {
        /// Bytes that both would take.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
}

/// Why weights cannot stay in their files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unmappable {
    /// Weights are quantized while they are loaded, so no file holds them.
    Quantized,
    /// The device always packs weights.
    Device {
        /// The device's name.
        name: String,
    },
    /// The checkpoint is in memory already, not in files.
    InMemory,
}

impl fmt::Display for WeightsReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WeightsReason::Asked(Placement::Mapped) => f.write_str("asked to stay in their files"),
            WeightsReason::Asked(_) => f.write_str("asked to be packed"),
            WeightsReason::Unmappable(obstacle) => obstacle.fmt(f),
            WeightsReason::Fits => f.write_str("fits the free memory"),
            WeightsReason::TooLarge { needed, free } => {
                let gb = |bytes: u64| bytes as f64 / 1e9;
                write!(
                    f,
                    "packed, with what requests remember, they take {:.1} GB of the {:.1} GB that are free",
                    gb(*needed),
                    gb(*free)
                )
            }
        }
    }
}

impl fmt::Display for Unmappable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unmappable::Quantized => {
                f.write_str("weights that are quantized while loading lie in no file")
            }
            Unmappable::Device { name } => write!(f, "{name} packs what it computes with"),
            Unmappable::InMemory => f.write_str("the model is part of the program"),
        }
    }
}

/// Why a drafter drafts, or why none does.
#[derive(Debug)]
pub enum DrafterReason {
    /// The caller asked for plain decoding.
    NotAsked,
    /// The caller asked for drafts of no token.
    NoLength,
    /// The caller asked for this drafter, which needs no draft head.
    Asked {
        /// The drafter's name.
        drafter: &'static str,
    },
    /// A draft head was found and fits.
    Head {
        /// The head.
        head: FoundHead,
        /// Tokens that it scores and tokens of the vocabulary, unless it scores all.
        scoring: Option<(usize, usize)>,
    },
    /// No draft head can be used.
    NoHead(NoHead),
    /// The drafter was loaded and failed the trial; the text says how.
    Failed(String),
}

/// A draft head, and where it was found.
#[derive(Clone, Debug)]
pub struct FoundHead {
    /// The kind of head, as people call it: `MTP head`.
    pub what: &'static str,
    /// The name of its own checkpoint; absent for a head inside the target's.
    pub checkpoint: Option<String>,
}

/// Why no draft head can be used, and what could be done.
#[derive(Debug)]
pub struct NoHead {
    /// Heads that are there, and why each is not used.
    pub refused: Vec<RefusedHead>,
    /// What is missing, where no head is there.
    pub missing: MissingHead,
    /// What could be done about it, if anything is known.
    pub remedy: Option<Remedy>,
}

/// A draft head that is there and cannot be used.
#[derive(Debug)]
pub struct RefusedHead {
    /// Where its own checkpoint is; absent for a head inside the target's.
    pub place: Option<String>,
    /// Why it is not used.
    pub error: EngineError,
}

/// Which draft head is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MissingHead {
    /// Any: there is none in the target's checkpoint, beside it or in the other places.
    Anywhere,
    /// One inside the target's checkpoint, whose family has such heads.
    Inside {
        /// The target's family.
        family: &'static str,
        /// The drafter that was asked for.
        drafter: &'static str,
        /// The kind of head.
        what: &'static str,
    },
    /// One beside the target's checkpoint.
    Beside {
        /// The drafter that was asked for.
        drafter: &'static str,
    },
    /// The target's family has no such heads at all.
    Family {
        /// The target's family.
        family: &'static str,
        /// The kind of head.
        what: &'static str,
    },
}

/// What could be done where no draft head can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// The caller's own advice, [`crate::LoadOptions::advice`].
    Advice(String),
    /// The head inside the checkpoint is damaged or missing: the original model has a whole one.
    HeadOfOriginal {
        /// The drafter that it is for.
        drafter: &'static str,
    },
    /// The head's own checkpoint is damaged, or made for another target.
    OtherHead,
}

impl fmt::Display for FoundHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.checkpoint {
            None => write!(f, "the checkpoint's own {}", self.what),
            Some(name) => write!(f, "the {} `{name}`", self.what),
        }
    }
}

impl fmt::Display for DrafterReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DrafterReason::NotAsked => f.write_str("no drafter was asked for"),
            DrafterReason::NoLength => f.write_str("drafts of no token were asked for"),
            DrafterReason::Asked { drafter } => write!(f, "the drafter `{drafter}` was asked for"),
            DrafterReason::Head { head, scoring } => {
                head.fmt(f)?;
                match scoring {
                    Some((n, all)) => write!(f, ", scoring {n} of {all} tokens"),
                    None => Ok(()),
                }
            }
            DrafterReason::NoHead(none) => none.fmt(f),
            DrafterReason::Failed(how) => f.write_str(how),
        }
    }
}

impl NoHead {
    /// One line: the refused heads, or the missing one, and what could be done.
    pub fn spell(
        &self,
        error: impl Fn(&EngineError) -> String,
        missing: impl Fn(&MissingHead) -> String,
        remedy: impl Fn(&Remedy) -> String,
    ) -> String {
        let refused = self.refused.iter().map(|head| match &head.place {
            Some(place) => format!("`{place}`: {}", error(&head.error)),
            None => error(&head.error),
        });
        let mut parts: Vec<String> = refused.collect();
        if parts.is_empty() {
            parts.push(missing(&self.missing));
        }
        parts.extend(self.remedy.as_ref().map(remedy));
        parts.join("; ")
    }
}

impl fmt::Display for NoHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = self.spell(
            ToString::to_string,
            ToString::to_string,
            ToString::to_string,
        );
        f.write_str(&line)
    }
}

impl fmt::Display for MissingHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MissingHead::Anywhere => f.write_str("no draft head in or beside the checkpoint"),
            MissingHead::Inside { family, what, .. } => {
                write!(
                    f,
                    "this {family} checkpoint has no {what} and promises none"
                )
            }
            MissingHead::Beside { .. } => f.write_str("none lies beside the model"),
            MissingHead::Family { family, what } => {
                write!(f, "targets of the family {family} have no {what}s")
            }
        }
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Remedy::Advice(advice) => f.write_str(advice),
            Remedy::HeadOfOriginal { .. } => f.write_str("take the head of the original model"),
            Remedy::OtherHead => {
                f.write_str("fetch it again, or take the one that was made for this target")
            }
        }
    }
}
