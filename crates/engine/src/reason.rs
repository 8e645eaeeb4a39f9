//! Why a loaded model is as it is: who drafts, and where its weights are.
//!
//! Reasons are data. Each has plain words of its own; whoever has names for the options of
//! [`crate::load`], as a command line has, puts them in through [`Words`].

use crate::error::{DrafterReason, Unmappable};
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

/// Where weights are to be while the model runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// Packed, unless packed weights and the KV cache take more than this many bytes.
    Auto(u64),
    /// Packed, or as the device has them.
    #[default]
    Packed,
    /// In their memory-mapped files.
    Mapped,
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
