//! GGUF files: writing them, and the values of their metadata
//! (`checkpoints.md` §3).

mod value;
mod write;

pub use value::{Kind, Value};
pub use write::{Store, TensorInfo, Writer};

const MAGIC: &[u8] = b"GGUF";
const VERSION: u32 = 3;
/// Where a file says nothing else.
const ALIGNMENT: usize = 32;
/// Axes of a tensor.
const MAX_AXES: usize = 4;
