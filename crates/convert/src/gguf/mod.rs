//! Writes GGUF files (`docs/specs/checkpoints.md` §3 and §4).
//!
//! [`Writer`] writes the container, whatever is in it; [`crate::Recipe::write_gguf`]
//! writes a model, with the names, keys and changed values that
//! [`weights::gguf::Export`] knows of its family.

mod make;
mod write;

pub use make::stored_as;
pub use write::{Store, TensorInfo, Writer};
