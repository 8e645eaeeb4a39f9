//! Why a model cannot be used.
//!
//! Each error carries what a caller needs to say it in its own words: a command line names its
//! options, a library its fields.

use crate::reason::{DrafterReason, Unmappable};
use crate::request::Rejected;
use backend::{KvFormat, KvFormats};
use convert::ConvertError;
use models::ModelError;
use std::fmt;

/// Why a model cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The checkpoint or its drafter is damaged, incomplete or of an unknown kind.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The tokenizer, the chat template or a configuration beside them cannot be read.
    #[error(transparent)]
    Text(#[from] text::TextError),
    /// The checkpoint is a draft head and no target.
    #[error("this checkpoint is a draft head ({drafter}) and writes no text alone")]
    IsDrafter {
        /// The drafter that it is a head of.
        drafter: &'static str,
    },
    /// A drafter was asked for that is not there, or does not work.
    #[error("the drafter `{asked}` cannot be used: {reason}")]
    NoDrafter {
        /// The drafter that was asked for.
        asked: &'static str,
        /// Why it cannot be had.
        reason: DrafterReason,
    },
    /// Nobody here knows a drafter of this name.
    #[error("`{name}` is not a drafter")]
    UnknownDrafter {
        /// What was asked for.
        name: &'static str,
    },
    /// The weights cannot be stored as asked.
    #[error(transparent)]
    Quantize(#[from] ConvertError),
    /// The weights were asked to stay in their files and cannot.
    #[error("the weights cannot stay in their files: {0}")]
    Unmappable(Unmappable),
    /// The device failed while the model was tried.
    #[error("the model cannot be tried")]
    Round(#[from] speculate::RoundError),
    /// Drafts are asked for that are longer than a step can verify.
    #[error("drafts of {asked} tokens are longer than {most}")]
    DraftTooLong {
        /// Tokens that were asked for.
        asked: usize,
        /// Tokens that a draft may have.
        most: usize,
    },
    /// One of the sizes is 0: sequences, rows of a prompt in a step, or the context.
    #[error("sequences, rows in a step and context must be at least 1")]
    NoSize,
    /// The context asked for is longer than the model was made for.
    #[error("a context of {asked} is more than the {most} tokens that this model knows")]
    ContextTooLong {
        /// Tokens that were asked for.
        asked: usize,
        /// Tokens that the model knows.
        most: usize,
    },
    /// The tokenizer has more tokens than the model.
    #[error("the tokenizer has {tokenizer} tokens, the model {model}: they do not belong together")]
    OtherTokenizer {
        /// Tokens of the tokenizer.
        tokenizer: usize,
        /// Tokens of the model's vocabulary.
        model: usize,
    },
    /// Keys cannot be stored in this format, only values can.
    #[error("a KV cache of {kv}: {} keeps values only", kv.k.name)]
    NoKeys {
        /// The format asked for.
        kv: KvFormat,
    },
    /// The device cannot keep keys and values in this format.
    #[error("a KV cache of {kv}: {device} keeps {}", kept_formats(supported))]
    NoKv {
        /// The format asked for.
        kv: KvFormat,
        /// The device's name.
        device: String,
        /// The formats that it can keep.
        supported: KvFormats,
    },
    /// Blocks of the format do not divide a head's values.
    #[error(
        "a KV cache of {kv}: {format} has blocks of {block} values, of which heads of {head_dim} are no multiple"
    )]
    KvMisfit {
        /// The format asked for.
        kv: KvFormat,
        /// The one of its two formats that does not fit.
        format: &'static str,
        /// Values in a block of that format.
        block: usize,
        /// Values in a head of the model.
        head_dim: usize,
    },
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

/// The formats that a device keeps, for people: `keys and values in bf16 or f16, both alike`.
pub fn kept_formats(kept: &KvFormats) -> String {
    let list = |formats: &[&quant::KvRowFormat]| {
        let names: Vec<&str> = formats.iter().map(|f| f.name).collect();
        match names.split_last() {
            Some((last, [])) => (*last).to_owned(),
            Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
            None => "no format".to_owned(),
        }
    };
    if kept.same {
        return format!("keys and values in {}, both alike", list(&kept.keys));
    }
    format!(
        "keys in {}, values in {}",
        list(&kept.keys),
        list(&kept.values)
    )
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
    /// Tokens of each request, prompt and output together.
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
