//! The CPU as a backend: SIMD kernels and one thread pool.
//!
//! Every kernel is one generic function over 16 lanes (`arch`), compiled for each instruction
//! set; which one runs is chosen when the backend is made. All of them, and any number of
//! threads, give the bits of [`backend::Reference`]; products of quantized weights with 8-bit
//! activations those of [`dot_int8`]. No files, no models, no clock.
//!
//! | module | what is in it |
//! | --- | --- |
//! | `arch` | instruction sets: lanes, products of bytes, tile registers |
//! | `memory`, `pool` | regions and recycled buffers; the threads and their work ranges |
//! | `device` | [`Cpu`]: an instruction set, threads, memory and scratch space |
//! | `microkernel` | the inner loop of plain products and attention; the table of block shapes |
//! | `matmul` | products, with a drawing of the data's way |
//! | `kv`, `attention` | cached keys and values, and what reads them |
//! | `delta` | the gated delta rule |
//! | `moe` | mixtures of experts |
//! | `norm`, `rope`, `elementwise`, `rows` | the small ops |
//!
//! Modules use those above them in the table, never those below (`attention` and `moe` keep
//! plain data in `device`). `examples/product.rs` is one product, beside the reference.

mod arch;
mod attention;
mod delta;
mod device;
mod elementwise;
mod kv;
mod matmul;
mod memory;
mod microkernel;
mod moe;
mod norm;
mod pool;
mod rope;
mod rows;
#[cfg(test)]
mod tests;

pub use arch::Isa;
pub use device::{Activations, Cpu, CpuError, CpuOptions, MAX_THREADS};
pub use matmul::dot as dot_int8;

use backend::{
    Activation, Attention, Backend, Batch, Capabilities, Delta, DeltaSpec, DeltaWeights,
    DeviceError, Experts, Kv, KvSpec, Matrix, Ops, Record, Rope, Sample, Store, Tensor, TokenMask,
};
use memory::{values, values_mut};
use quant::Stored;
use std::borrow::Cow;
use std::sync::atomic::Ordering::Relaxed;

impl Backend for Cpu {
    fn name(&self) -> String {
        let threads = self.threads();
        let s = if threads == 1 { "" } else { "s" };
        let pinned = if self.is_pinned { ", pinned" } else { "" };
        let activations = match self.activations {
            Activations::Int8 => "",
            Activations::F32 => ", f32 activations",
        };
        format!(
            "cpu ({}, {threads} thread{s}{pinned}{activations})",
            self.isa().name()
        )
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            mapped_weights: true,
            masks: true,
            ..Capabilities::default()
        }
    }
}

impl Store for Cpu {
    fn matrix(&self, parts: &[Stored<'_>]) -> Matrix {
        matmul::matrix(self, parts)
    }

    fn left_in_files(&self) -> u64 {
        self.left.swap(0, Relaxed)
    }

    fn upload(&self, rows: usize, cols: usize, from: &[f32]) -> Tensor {
        let mut x = self.tensor(rows, cols);
        values_mut(&mut x).copy_from_slice(from);
        x
    }

    fn download<'a>(&self, x: &'a Tensor) -> Cow<'a, [f32]> {
        Cow::Borrowed(values(x))
    }

    fn kv(&self, spec: KvSpec) -> Kv {
        kv::kv(spec)
    }

    fn delta(&self, spec: DeltaSpec) -> Delta {
        delta::delta(spec)
    }

    fn delta_copy(&self, delta: &mut Delta, from: usize, to: usize) {
        delta::copy(delta, from, to);
    }

    fn read(&self, w: &Matrix) -> Option<u64> {
        Some(matmul::read(self, w))
    }

    fn scratch(&self, rows: usize, cols: usize) -> Tensor {
        self.tensor(rows, cols)
    }
}

impl Ops for Cpu {
    fn embed(&self, table: &Matrix, tokens: &[u32], scale: f32) -> Tensor {
        matmul::embed(self, table, tokens, scale)
    }

    fn replace_rows(&self, x: Tensor, embeddings: &Tensor, source: u32, batch: &Batch) -> Tensor {
        rows::replace(x, embeddings, source, batch)
    }

    fn matmul_into(&self, x: &Tensor, w: &[&Matrix], y: &mut [Tensor]) {
        matmul::matmul_into(self, x, w, y);
    }

    fn matmul_rows(&self, x: &Tensor, w: &Matrix, ids: &[Vec<u32>]) -> Tensor {
        matmul::matmul_rows(self, x, w, ids)
    }

    fn rms_norm(&self, x: &Tensor, weight: Option<&Tensor>, width: usize, eps: f32) -> Tensor {
        norm::rms_norm(self, x, weight, width, eps)
    }

    fn add(&self, x: Tensor, y: &Tensor) -> Tensor {
        elementwise::apply(self, elementwise::Add, x, Some(y))
    }

    fn scale(&self, x: Tensor, factor: f32) -> Tensor {
        elementwise::apply(self, elementwise::Scale(factor), x, None)
    }

    fn glu(&self, gate: Tensor, x: &Tensor, activation: Activation) -> Tensor {
        elementwise::glu(self, gate, x, activation)
    }

    fn softcap(&self, x: Tensor, cap: f32) -> Tensor {
        elementwise::apply(self, elementwise::Softcap(cap), x, None)
    }

    fn gather(&self, x: &Tensor, rows: &[usize]) -> Tensor {
        rows::gather(self, x, rows)
    }

    fn columns(&self, x: &Tensor, first: usize, cols: usize) -> Tensor {
        rows::columns(self, x, first, cols)
    }

    fn concat(&self, a: &Tensor, b: &Tensor) -> Tensor {
        rows::concat(self, a, b)
    }

    fn rope(&self, x: Tensor, rope: &Rope, batch: &Batch) -> Tensor {
        rope::rope(self, x, rope, batch)
    }

    fn kv_append(&self, kv: &mut Kv, k: &Tensor, v: &Tensor, group: usize, batch: &Batch) {
        kv::append(self, kv, k, v, group, batch);
    }

    fn attend(&self, q: &Tensor, kv: &Kv, attention: &Attention, batch: &Batch) -> Tensor {
        attention::attend(self, q, kv, attention, batch)
    }

    fn gated_delta(
        &self,
        state: &mut Delta,
        weights: &DeltaWeights,
        qkv: &Tensor,
        b: &Tensor,
        a: &Tensor,
        batch: &Batch,
    ) -> Tensor {
        delta::gated_delta(self, state, weights, qkv, b, a, batch)
    }

    fn moe(&self, x: &Tensor, scores: &Tensor, experts: &Experts) -> Tensor {
        moe::moe(self, x, scores, experts)
    }

    fn gate_rows(&self, x: &Tensor, gate: &Tensor, activation: Activation) -> Tensor {
        moe::gate_rows(self, x, gate, activation)
    }
}

impl Sample for Cpu {
    fn argmax(&self, x: &Tensor) -> Vec<u32> {
        rows::argmax(self, x)
    }

    fn mask_logits(&self, mut x: Tensor, masks: &[Option<TokenMask>]) -> Tensor {
        TokenMask::apply(masks, x.cols(), values_mut(&mut x));
        x
    }
}

impl Record for Cpu {
    fn finish(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}
