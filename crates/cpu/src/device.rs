//! The CPU as a device: an instruction set, threads and memory for tensors. Knows no op.

use crate::ahead::Sequence;
use crate::arch::{Detected, Isa};
use crate::cores::{cores, memory_nodes};
use crate::memory::{self, Arena};
use crate::pool::Pool;
use crate::tuning::Tuning;
use backend::Tensor;
use std::sync::Arc;

/// How to use the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// How many threads work, the calling one included; 0 for one on each core.
    pub threads: usize,
    /// The instruction set to use; `None` for the best that this CPU has.
    pub isa: Option<Isa>,
    /// In which precision products with quantized weights take their input.
    pub activations: Activations,
    /// Binds each thread but the calling one to a core of its own.
    pub pin: bool,
    /// How products read their weights.
    pub tuning: Tuning,
}

/// In which precision products with quantized weights take their input. Products with plain
/// weights always take it in `f32`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// Input is quantized to 8 bits, with a factor for each of the weights' groups, as
    /// [`dot_int8`](crate::dot_int8) defines. A product differs from that of exact activations by
    /// about 4e-3 of its size. Weights keep their codes in memory.
    #[default]
    Int8,
    /// Input stays in `f32`. Weights are dequantized to `f32` when they are loaded, so each takes
    /// four bytes.
    F32,
}

/// Why the CPU cannot be used as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CpuError {
    /// The instruction set asked for is not one of this CPU's.
    #[error("this CPU has no {}; it has {}", wanted.name(), names(available))]
    MissingIsa {
        /// What was asked for.
        wanted: Isa,
        /// What there is.
        available: Vec<Isa>,
    },
    /// The system cannot bind threads to cores, or refuses to.
    #[error("threads cannot be bound to cores: {reason}")]
    Pin {
        /// What the system says.
        reason: String,
    },
    /// More threads than [`MAX_THREADS`] were asked for.
    #[error("{threads} threads are more than {MAX_THREADS}")]
    TooManyThreads {
        /// What was asked for.
        threads: usize,
    },
}

/// The most threads that one backend may have.
pub const MAX_THREADS: usize = 1024;

fn names(all: &[Isa]) -> String {
    all.iter()
        .map(|isa| isa.name())
        .collect::<Vec<_>>()
        .join(", ")
}

/// What every op runs on.
pub(crate) struct Device {
    pub(crate) isa: Detected,
    pub(crate) pool: Pool,
    /// Memory of tensors, which they return to.
    pub(crate) arena: Arc<Arena>,
    pub(crate) activations: Activations,
    pub(crate) tuning: Tuning,
    /// Which product comes after which, for idle workers.
    pub(crate) sequence: Sequence,
    pub(crate) is_pinned: bool,
}

impl Device {
    /// Starts the threads.
    ///
    /// # Errors
    ///
    /// If this CPU lacks the instruction set, the threads are too many, or they are to
    /// be bound to cores and cannot be.
    pub(crate) fn new(options: CpuOptions) -> Result<Self, CpuError> {
        let wanted = options.isa.unwrap_or_else(Isa::detect);
        let isa = Detected::new(wanted).ok_or_else(|| CpuError::MissingIsa {
            wanted,
            available: Isa::available(),
        })?;
        let threads = match options.threads {
            0 => cores().cores.min(MAX_THREADS),
            n if n > MAX_THREADS => return Err(CpuError::TooManyThreads { threads: n }),
            n => n,
        };
        let mut device = Device::with(isa, threads, options.activations);
        device.tuning = options.tuning;
        if options.pin {
            device.pool.pin().map_err(|e| CpuError::Pin {
                reason: e.to_string(),
            })?;
            device.is_pinned = true;
        } else {
            // A system that refuses costs speed only: threads then read memory of other nodes.
            let _ = device.pool.bind_to_nodes();
        }
        device.pool.share_matrices(memory_nodes() > 1);
        Ok(device)
    }

    /// A device with `threads` threads, not bound to cores, and default tuning.
    pub(crate) fn with(isa: Detected, threads: usize, activations: Activations) -> Self {
        memory::give_blocks_back();
        Device {
            isa,
            pool: Pool::new(threads),
            arena: Arc::new(Arena::new()),
            activations,
            tuning: Tuning::default(),
            sequence: Sequence::default(),
            is_pinned: false,
        }
    }

    /// A tensor of unspecified content.
    pub(crate) fn tensor(&self, rows: usize, cols: usize) -> Tensor {
        self.arena.tensor(rows, cols)
    }
}
