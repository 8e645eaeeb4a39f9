//! The CPU as a backend: SIMD kernels and one thread pool.
//!
//! Every kernel is one generic function over 16 lanes (`arch`), compiled for each instruction
//! set; which one runs is chosen when the backend is made. All of them, and any number of
//! threads, give the bits of [`backend::Reference`]; products of quantized weights with 8-bit
//! activations those of [`dot_int8`]. No models, no clock, and no files but those in which the
//! system describes its processors.
//!
//! | module | what is in it |
//! | --- | --- |
//! | `memory`, `shares` | regions and recycled buffers; the pieces of a job that a worker begins with |
//! | `cores`, `tuning` | cores and hardware threads; choices of how products read weights |
//! | `arch` | instruction sets: lanes, products of bytes, tile registers |
//! | `ahead`, `pool` | weights that idle threads prefetch; the threads and their work ranges |
//! | `device` | what every op runs on: an instruction set, threads, memory of tensors |
//! | `microkernel` | the inner loop of plain products and attention; the table of block shapes |
//! | `norm`, `rope`, `elementwise`, `rows` | the small ops |
//! | `matmul` | products, with a drawing of the data's way |
//! | `kv`, `attention` | cached keys and values, and what reads them |
//! | `near` | attention to the rows right before a row |
//! | `delta` | the gated delta rule |
//! | `moe` | mixtures of experts |
//! | `cpu` | [`Cpu`]: the device, what ops keep between calls, and the ops by their traits |
//!
//! Modules use those above them in the table, never those below. `examples/product.rs` is one
//! product, beside the reference.

mod ahead;
mod arch;
mod attention;
mod cores;
mod cpu;
mod delta;
mod device;
mod elementwise;
mod kv;
mod matmul;
mod memory;
mod microkernel;
mod moe;
mod near;
mod norm;
mod pool;
mod rope;
mod rows;
mod shares;
#[cfg(test)]
mod tests;
mod tuning;

pub use arch::Isa;
pub use cores::{Cores, cores, memory_nodes};
pub use cpu::Cpu;
pub use device::{Activations, CpuError, CpuOptions, MAX_THREADS};
pub use matmul::{Trial, dot as dot_int8};
pub use tuning::{PrefetchHint, Tuning, WeightKind, WeightReads};
