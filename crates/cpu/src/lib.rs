//! The CPU as a backend: SIMD kernels and one thread pool.
//!
//! Every kernel is one generic function over 16 lanes (`arch`), compiled for
//! each instruction set and chosen when the backend is made. All of them, and
//! any number of threads, give the bits of [`backend::Reference`]; products of
//! quantised weights with 8-bit activations those of [`dot_int8`].
//!
//! Weights are repacked when loaded, into panels of 16 rows (`panels`, `coded`,
//! whose products with more than a few rows are in `tiles` where the CPU has AMX), or, to save
//! memory, anew for each product (`packing`);
//! keys lie in blocks of 16, a key a lane (`kv`). No files, no models, no
//! clock.

mod arch;
mod attention;
mod coded;
mod delta;
mod elementwise;
mod kv;
mod matmul;
mod memory;
mod moe;
mod norm;
mod packing;
mod panels;
mod pool;
mod rope;
mod rows;
#[cfg(test)]
mod tests;
mod tile;
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "no other architecture has tiles")
)]
mod tiles;

pub use arch::Isa;
pub use coded::dot as dot_int8;

use arch::Detected;
use backend::{
    Activation, Attention, Backend, Batch, Capabilities, Delta, DeltaSpec, DeltaWeights,
    DeviceError, Experts, Kv, KvSpec, Matrix, Ops, Record, Rope, Sample, Store, Tensor,
};
use memory::{Arena, values, values_mut};
use pool::Pool;
use quant::Stored;
use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

/// How to use the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads, the calling one included; 0 for one a core.
    pub threads: usize,
    /// Instruction set; the best there is, if absent.
    pub isa: Option<Isa>,
    /// How products with quantised weights see their input.
    pub activations: Activations,
    /// Binds each thread but the calling one to a core of its own.
    pub pin: bool,
}

/// How products with quantised weights see their input. Plain weights always
/// take it in `f32`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// Rounded to 8 bits, with a factor for each of the weights' groups: what
    /// [`dot_int8`] defines. Relative to exact activations a product moves by
    /// about 4e-3; weights keep their codes in memory.
    #[default]
    Int8,
    /// As they are. Weights are dequantized to `f32` when loaded, so each takes
    /// four bytes.
    F32,
}

/// Why the CPU cannot be used as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CpuError {
    /// Its instructions would be illegal here.
    #[error("this CPU has no {}; it has {}", wanted.name(), names(available))]
    MissingIsa {
        /// What was asked for.
        wanted: Isa,
        /// What there is.
        available: Vec<Isa>,
    },
    /// The system does not bind threads to cores.
    #[error("threads cannot be bound to cores: {reason}")]
    Pin {
        /// What the system says.
        reason: String,
    },
    /// More than [`MAX_THREADS`].
    #[error("{threads} threads are more than {MAX_THREADS}")]
    TooManyThreads {
        /// What was asked for.
        threads: usize,
    },
}

/// Threads of one backend, at most.
pub const MAX_THREADS: usize = 1024;

fn names(all: &[Isa]) -> String {
    all.iter()
        .map(|isa| isa.name())
        .collect::<Vec<_>>()
        .join(", ")
}

/// The CPU.
pub struct Cpu {
    isa: Detected,
    pool: Pool,
    arena: Arc<Arena>,
    plan: Mutex<attention::Plan>,
    moe: Mutex<moe::Plan>,
    /// One for each worker.
    rooms: Vec<Mutex<kv::Room>>,
    /// One for each worker.
    packing: Vec<Mutex<packing::Room>>,
    /// Bytes that matrices would take which lie in files.
    left: AtomicU64,
    activations: Activations,
    is_pinned: bool,
}

impl Cpu {
    /// Starts the threads.
    ///
    /// # Errors
    ///
    /// If this CPU lacks the instruction set, the threads are too many, or they are to
    /// be bound to cores and cannot be.
    pub fn new(options: CpuOptions) -> Result<Self, CpuError> {
        let wanted = options.isa.unwrap_or_else(Isa::detect);
        let isa = Detected::new(wanted).ok_or_else(|| CpuError::MissingIsa {
            wanted,
            available: Isa::available(),
        })?;
        let threads = match options.threads {
            0 => std::thread::available_parallelism()
                .map_or(1, usize::from)
                .min(MAX_THREADS),
            n if n > MAX_THREADS => return Err(CpuError::TooManyThreads { threads: n }),
            n => n,
        };
        let mut cpu = Cpu::with(isa, threads, options.activations);
        if options.pin {
            cpu.pool.pin().map_err(|e| CpuError::Pin {
                reason: e.to_string(),
            })?;
            cpu.is_pinned = true;
        }
        Ok(cpu)
    }

    /// Multiplies bytes in registers as fast as the CPU can, on all threads, and
    /// returns the operations, a product and a sum being two: what the time of a
    /// product with 8-bit activations cannot beat. With `tiles` in AMX tiles;
    /// `None` where there are none.
    pub fn saturate(&self, tiles: bool, steps: usize) -> Option<u64> {
        matmul::saturate(self, tiles, steps)
    }

    fn with(isa: Detected, threads: usize, activations: Activations) -> Self {
        memory::give_blocks_back();
        Cpu {
            isa,
            pool: Pool::new(threads),
            arena: Arc::new(Arena::new()),
            plan: Mutex::default(),
            moe: Mutex::default(),
            rooms: (0..threads.max(1)).map(|_| Mutex::default()).collect(),
            packing: (0..threads.max(1)).map(|_| Mutex::default()).collect(),
            left: AtomicU64::new(0),
            activations,
            is_pinned: false,
        }
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa.isa()
    }

    /// Threads in use, the calling one included.
    pub fn threads(&self) -> usize {
        self.pool.n_workers()
    }

    /// Whether threads are bound to cores.
    pub fn is_pinned(&self) -> bool {
        self.is_pinned
    }

    fn tensor(&self, rows: usize, cols: usize) -> Tensor {
        self.arena.tensor(rows, cols)
    }
}

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
}

impl Record for Cpu {
    fn finish(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}
