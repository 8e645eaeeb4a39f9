//! GGUF files: container, metadata, names, and the changes to values that
//! converters make (`checkpoints.md` §3 and §4).
//!
//! A file, or the parts of a split one, become what a folder of safetensors is:
//! tensors by canonical name and a configuration.

mod config;
mod edit;
mod export;
mod make;
mod names;
mod read;
mod split;
mod value;
mod write;

pub(crate) use config::Source;
pub(crate) use edit::{Edit, Sizes};
pub use export::{Export, Rewrite};
pub use make::stored_as;
pub(crate) use names::Family;
pub(crate) use read::parse;
pub(crate) use split::{SUFFIX, check_parts, parts};
pub(crate) use value::Place;
pub use value::{Kind, Metadata, Value};
pub use write::{Store, TensorInfo, Writer};

const MAGIC: &[u8] = b"GGUF";
const VERSION: u32 = 3;
/// Where a file says nothing else.
const ALIGNMENT: usize = 32;
/// Axes of a tensor.
const MAX_AXES: usize = 4;
