//! Upper bounds of a product's speed: a plain read of its weights, and products in registers.

use super::dispatch::WORK_RANGE_BYTES;
use super::pack::PanelSource;
use super::weights::PackedWeights;
use crate::arch::{ByteKernel, Bytes, Kernel, Lanes, TileKernel, TileRegisters};
use crate::device::Device;
use crate::microkernel::PREFETCH_DISTANCE;
use backend::Matrix;
use quant::Kept;
use std::hint::black_box;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Adds up a slice of bytes as words.
struct Read<'a>(&'a [u8]);

impl Kernel for Read<'_> {
    type Output = u64;

    #[inline(always)]
    fn run<L: Lanes>(self) -> u64 {
        let words = self.0.as_chunks::<256>().0;
        let mut sums = [0u64; 32];
        for chunk in words {
            for line in [0, 64, 128, 192] {
                L::prefetch(chunk.as_ptr().wrapping_add(PREFETCH_DISTANCE + line));
            }
            for (sum, word) in sums.iter_mut().zip(chunk.as_chunks::<8>().0) {
                *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
            }
        }
        sums.into_iter().fold(0, u64::wrapping_add)
    }
}

/// Multiplies bytes in registers: `SUMS * steps` vectors of 64, or `4 * steps` tiles.
struct Saturate {
    steps: usize,
}

impl Saturate {
    /// Sums under way: more than the latency of a multiplication needs.
    const SUMS: usize = 16;
}

impl ByteKernel for Saturate {
    type Output = ();

    #[inline(always)]
    fn run<B: Bytes>(self) {
        let codes = B::load(&[3; 64]);
        let mut sums = [B::zero(); Self::SUMS];
        for step in 0..self.steps {
            let x = [step as i8; 4];
            for sums in &mut sums {
                *sums = B::add(*sums, codes, x);
            }
        }
        for sums in sums {
            black_box(B::float(sums).sum());
        }
    }
}

impl TileKernel for Saturate {
    type Output = ();

    #[inline(always)]
    fn run<T: TileRegisters>(self) {
        // SAFETY: entered through `run_tiles`.
        let tiles = unsafe { T::configure(16, 64) };
        tiles.saturate(self.steps);
    }
}

/// Multiplies bytes in registers as fast as the CPU can, on all threads, and returns the
/// operations, a product and a sum being two. With `tiles` in AMX tiles; `None` where there are
/// none.
pub(crate) fn saturate(device: &Device, tiles: bool, steps: usize) -> Option<u64> {
    let done = AtomicU64::new(0);
    if tiles && !device.isa.has_tiles() {
        return None;
    }
    device.pool.run(&|_| {
        let products = match tiles {
            true => {
                device.isa.run_tiles(Saturate { steps });
                4 * 16 * 16 * 64
            }
            false => {
                device.isa.run_bytes(Saturate { steps });
                Saturate::SUMS * 64
            }
        };
        done.fetch_add((2 * products * steps) as u64, Relaxed);
    });
    Some(done.into_inner())
}

/// Reads `bytes`, in the work ranges of a product, and returns their sum.
pub(crate) fn read_bytes(device: &Device, bytes: &[u8]) -> u64 {
    let total = AtomicU64::new(0);
    device.pool.each(bytes.len(), WORK_RANGE_BYTES, |_, range| {
        total.fetch_add(device.isa.run(Read(&bytes[range])), Relaxed);
    });
    total.into_inner()
}

/// Reads all bytes of `w`, in the work ranges of a product, and returns their sum.
pub(crate) fn read(device: &Device, w: &Matrix) -> u64 {
    let mut total = 0u64;
    let mut all = |bytes: &[u8]| total = total.wrapping_add(read_bytes(device, bytes));
    match w.storage::<PackedWeights>().layout().source() {
        PanelSource::Packed(data) => all(data.elements()),
        PanelSource::Mapped(kept) => {
            for part in kept.iter().map(Kept::view) {
                [part.codes, part.scales, part.biases]
                    .into_iter()
                    .for_each(&mut all);
            }
        }
    }
    total
}
