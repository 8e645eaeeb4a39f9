//! Checkpoint files → named tensors.
//!
//! [`Checkpoint`] opens a folder of safetensors, a GGUF file, or the same bytes from
//! memory, and hands out matrices as [`quant::Stored`], the bytes where they lie, and
//! small tensors as `f32`. `names.rs` maps every published naming to one, so a
//! model file knows `layers.0.self_attn.q_proj.weight` and nothing of who
//! wrote the file. Bytes come from strangers: every number is checked, every
//! refusal is one line of [`LoadError`], every limit has a name.
//!
//! One module a container (`safetensors.rs`, `gguf`); each yields the same
//! `container::Entry`. Files are written by `convert`. No tokenizer, no generation settings, no download, no
//! arithmetic on weights beyond the `1 + w` of [`Checkpoint::norm`] and what GGUF's
//! converters did.

#![deny(unsafe_code)]

mod assemble;
mod checkpoint;
mod container;
mod error;
mod families;
mod folder;
pub mod gguf;
mod index;
mod mapped;
mod mtp;
mod names;
mod norms;
mod quantized;
mod safetensors;
mod weight;

pub use checkpoint::Checkpoint;
pub use error::LoadError;
pub use norms::NormFacts;
pub use weight::{Weight, WeightData};
