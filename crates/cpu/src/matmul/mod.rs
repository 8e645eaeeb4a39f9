//! Products, whichever way the weights are stored.

mod activations;
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "no other architecture has tiles")
)]
mod amx;
mod definition;
mod dispatch;
mod measure;
mod pack;
mod pack_buffer;
mod pack_quantized;
mod plain;
mod quantized;
mod vectors;
mod weights;

pub use definition::dot;
pub(crate) use dispatch::{embed, matmul_into, matmul_rows, matmul_runs};
pub(crate) use measure::read;
pub(crate) use pack_buffer::PackBuffer;
pub(crate) use weights::matrix;
