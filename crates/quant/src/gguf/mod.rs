//! The formats of GGUF files (`specs/checkpoints.md` §3), one file a family.
//!
//! A row is whole blocks, and all of it lies in [`crate::Stored::codes`].
//! Deliberately absent: the types with fixed codebooks (IQ1, IQ2, IQ3), the
//! ternary types, and whatever number above 40 two programs use differently.

mod fit;
mod k;
mod nonlinear;
mod simple;
#[cfg(test)]
mod tests;
mod turbo;

use crate::Format;

pub use k::K_QUANTS;
pub use nonlinear::{NONLINEAR, nvfp4_times};
pub use simple::SIMPLE;
pub(crate) use simple::{Q4_0, Q5_0, Q8_0};
pub use turbo::TURBO;

/// The format that GGUF numbers `ggml_type`; `None` if it is unknown or holds
/// integers.
///
/// ```
/// assert_eq!(quant::gguf_format(12).map(|f| f.name), Some("q4_k"));
/// assert_eq!(quant::gguf_format(31), None);
/// ```
pub fn gguf_format(ggml_type: u32) -> Option<&'static Format> {
    let mut all = crate::FORMATS.iter().copied().flatten();
    all.find(|f| f.ggml == Some(ggml_type))
}
