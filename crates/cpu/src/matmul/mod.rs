//! Products `y = x wᵀ`, however the weights are stored.
//!
//! The data's way, for quantized weights and 8-bit activations:
//!
//! ```text
//! stored rows (file)                         x: [rows, cols] f32
//!      │ pack, pack_quantized                     │ activations: quantize, by group
//!      ▼                                          ▼
//! weights: panels of 16 rows                 blocks of rows: int8, factors d, d Σ q
//!      │ at load, or for each product             │ once for all matrices of an input
//!      └───────────────────┬──────────────────────┘
//!                          ▼
//!            dispatch: work ranges of some panels, claimed by workers
//!                          │
//!        few rows          │           more rows, where there is AMX
//!      ┌───────────────────┴──────────────────────┐
//!      ▼                                          ▼
//! vectors: microkernels of M rows x R panels  amx: tiles of 16 x 16 sums
//!      └───────────────────┬──────────────────────┘
//!                          ▼
//!            y: fma(scale Σ code q, d, y), fma(bias, d Σ q, y), group by group
//! ```
//!
//! Plain weights, and all weights where activations stay in `f32`, go through `plain` instead:
//! the same panels with a number for each code.
//!
//! | file | what is in it | may use |
//! | --- | --- | --- |
//! | `definition` | the product, a row at a time: what all kernels equal | - |
//! | `pack_buffer` | a worker's memory for packing | - |
//! | `pack` | from stored rows to panels, and where panels come from | `pack_buffer` |
//! | `activations` | activations in 8 bits | - |
//! | `quantized` | panels of codes | `pack`, `activations` |
//! | `pack_quantized` | how panels of codes are filled | `quantized`, `pack` |
//! | `vectors` | quantized microkernels in vector registers | `quantized` |
//! | `amx` | the same in tiles: for few rows, for many | `quantized` |
//! | `plain` | panels of numbers and their microkernels | `pack` |
//! | `weights` | one matrix, of either kind | `plain`, `quantized` |
//! | `dispatch` | the ops: from a product to work ranges to a kernel | all above |
//! | `measure` | upper bounds of speed: plain reads, products in registers | `weights` |
//! | `trial` | products of weights in memory that are read in any way, to be timed | all above |

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
mod trial;
mod vectors;
mod weights;

pub use definition::dot;
pub(crate) use dispatch::{embed, matmul_into, matmul_rows, matmul_runs};
pub(crate) use measure::{read, saturate};
pub(crate) use pack_buffer::PackBuffer;
pub use trial::Trial;
pub(crate) use weights::matrix;
