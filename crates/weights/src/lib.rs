//! Checkpoint files → named tensors.
//!
//! [`Checkpoint`] opens a folder of safetensors, a GGUF file, or the same bytes from
//! memory, and hands out matrices as [`quant::Stored`], the bytes where they lie, and
//! small tensors as `f32`. `names.rs` maps every published naming to one, so a
//! model file knows `layers.0.self_attn.q_proj.weight` and nothing of who
//! wrote the file. Bytes come from strangers: every number is checked, every
//! refusal is one line of [`LoadError`], every limit has a name.
//!
//! ```text
//! open.rs                        a folder, a GGUF file or memory, from the first to the last step
//! folder.rs, gguf/split.rs       which files make a checkpoint
//! safetensors.rs, gguf/read.rs   one file a container: a proven `container::Entry` a tensor
//! assemble.rs, gguf/assemble.rs  tensors of all files under canonical names
//! families/                      what GGUF files and norms have of a family, as data
//! quantized/                     one file a scheme: which tensors make a quantized weight
//! tensor.rs, checkpoint.rs       a stored tensor, and all of a model's by name
//! reading.rs, norms.rs, weight.rs
//!                                handing them out
//! ```
//!
//! Deliberately absent: writing files (`convert` does), tokenizers, generation settings,
//! downloads, and arithmetic on weights beyond the `1 + w` of [`Checkpoint::norm`] and
//! undoing what GGUF's converters did.

#![deny(unsafe_code)]

mod assemble;
mod checkpoint;
mod container;
mod error;
mod families;
mod folder;
mod folding;
pub mod gguf;
mod hash;
mod index;
mod mapped;
mod mtp;
mod names;
mod norms;
mod open;
mod quantized;
mod reading;
mod safetensors;
mod tensor;
mod tower;
mod weight;

pub use checkpoint::Checkpoint;
pub use error::LoadError;
pub use mtp::CONTRACT as MTP_CONTRACT;
pub use norms::NormFacts;
pub use weight::{Weight, WeightData};
