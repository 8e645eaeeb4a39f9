//! Writes checkpoints: in other number formats, in another container, grown to the
//! size of a real model.
//!
//! ```text
//! weights::Checkpoint ─→ convert() or inflate() ─→ Recipe ─→ Quantize::apply ─→ Recipe
//! Recipe ─→ write()  a folder of safetensors
//!        ─→ write_gguf()  a GGUF file
//!        ─→ checkpoint()  in memory, ready to be loaded
//! ```
//!
//! A [`Recipe`] makes its tensors a few rows at a time, so a model of any size is
//! converted in little memory. `weights` reads what is written here.
//!
//! No downloads, no command line, no tokenizer beyond the vocabulary that a GGUF file
//! carries.

#![forbid(unsafe_code)]

mod container;
mod error;
pub mod gguf;
mod head;
mod inflate;
mod mlx;
mod partial;
mod pins;
mod quantize;
mod recipe;
mod safetensors;
mod vocabulary;

pub use container::Container;
pub use error::ConvertError;
pub use inflate::{Growth, inflate};
pub use mlx::convert;
pub use pins::Pins;
pub use quantize::{POLICY, Quantize, Treatment};
pub use recipe::{Data, Item, Recipe, Rows};
pub use vocabulary::{vocabulary, vocabulary_keys};

use vocabulary::text_size;
