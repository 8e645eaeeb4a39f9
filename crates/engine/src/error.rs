//! Why a model cannot be used.

use crate::request::Rejected;
use models::ModelError;
use std::fmt;
use weights::WriteError;

/// Why a model cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The checkpoint or its drafter.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Tokenizer, template or a configuration beside them.
    #[error(transparent)]
    Text(#[from] text::TextError),
    /// A drafter was asked for that is not there, or does not work.
    #[error("--draft {asked}: {reason}")]
    NoDrafter {
        /// What was asked for.
        asked: &'static str,
        /// Why it cannot be had.
        reason: String,
    },
    /// The weights cannot be stored as asked.
    #[error(transparent)]
    Quantize(#[from] WriteError),
    /// The device failed while the model was tried.
    #[error("the model cannot be tried")]
    Round(#[from] speculate::RoundError),
    /// An option is out of range.
    #[error("{0}")]
    BadOption(String),
    /// Weights and KV cache take more memory than they may.
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    /// The request cannot be taken.
    #[error(transparent)]
    Rejected(#[from] Rejected),
    /// The device cannot hold the model, or failed while loading it.
    #[error(transparent)]
    Device(#[from] backend::DeviceError),
}

/// Weights and KV cache take more memory than they may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLarge {
    /// Bytes of packed weights; 0 where they stay in their files.
    pub weights: u64,
    /// Bytes of keys, values and recurrent states of all requests.
    pub remembered: u64,
    /// Bytes that both may take together.
    pub limit: u64,
    /// Requests at once.
    pub sequences: usize,
    /// Tokens of each, prompt and output together.
    pub context: usize,
}

impl fmt::Display for TooLarge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gb = |bytes: u64| bytes as f64 / 1e9;
        write!(
            f,
            "the KV cache of {} requests of {} tokens needs {:.1} GB",
            self.sequences,
            self.context,
            gb(self.remembered)
        )?;
        if self.weights > 0 {
            write!(f, ", the weights {:.1} GB", gb(self.weights))?;
        }
        write!(f, "; {:.1} GB are free", gb(self.limit))
    }
}

impl std::error::Error for TooLarge {}
