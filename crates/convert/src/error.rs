//! Why a checkpoint could not be made or written.

use models::ModelError;
use std::io;
use std::path::{Path, PathBuf};
use weights::LoadError;

/// Why a checkpoint could not be made or written. Nothing half written stays on disk.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// A tensor of the source cannot be read, or what was made cannot be read back.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The configuration of the source.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A model, a tensor or a size that cannot be grown.
    #[error("{0}")]
    Growth(String),
    /// Something has the name of the output already.
    #[error("`{0}` exists already: choose another name, or remove it")]
    Exists(PathBuf),
    /// The operating system refused.
    #[error("cannot write `{path}`: {source}")]
    Io {
        /// What was to be written.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The container has no name for a format.
    #[error("{container} cannot hold {format}: quantize to {remedy}: `{name}`")]
    Format {
        /// The tensor.
        name: String,
        /// The tensor's format.
        format: &'static str,
        /// The kind of file.
        container: &'static str,
        /// What to do about it.
        remedy: &'static str,
    },
    /// GGUF has no place for something.
    #[error("{0}")]
    Gguf(String),
    /// A GGUF file is to be written without a vocabulary.
    #[error("a GGUF file needs a tokenizer, and the source has none")]
    NoTokenizer,
    /// The tokenizer, which a GGUF file is to hold.
    #[error(transparent)]
    Text(#[from] text::TextError),
}

pub(crate) fn io_error(path: &Path, source: io::Error) -> ConvertError {
    ConvertError::Io {
        path: path.into(),
        source,
    }
}
