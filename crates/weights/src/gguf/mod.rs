//! GGUF files: container, metadata, names, and the changes to values that
//! converters make (`checkpoints.md` §3 and §4).
//!
//! A file, or the parts of a split one, become what a folder of safetensors is:
//! tensors by canonical name and a configuration.

mod assemble;
mod config;
mod edit;
mod export;
mod names;
mod read;
mod split;
mod value;

pub(crate) use assemble::assemble;
#[cfg(test)]
pub(crate) use config::metadata;
pub(crate) use config::{FileView, Keys};
pub(crate) use edit::{Edit, Sizes};
pub use export::{Export, Rewrite};
pub(crate) use split::{SUFFIX, check_parts, parts};
pub(crate) use value::Place;
pub use value::{Kind, Metadata, Value};

/// The first bytes of a file.
pub const MAGIC: &[u8] = b"GGUF";
/// The version that is written; version 2 is read too.
pub const VERSION: u32 = 3;
/// Bytes of which every tensor's offset is a multiple, where a file says nothing else.
pub const ALIGNMENT: usize = 32;
/// Axes of a tensor, at most.
pub const MAX_AXES: usize = 4;
