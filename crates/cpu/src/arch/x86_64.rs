//! x86-64: AVX2, AVX-512 and AMX.

pub(super) mod amx;
mod avx2;
mod avx512;
mod instructions;

use super::bytes::ByteKernel;
use super::lanes::Kernel;
use super::tiles::{TileKernel, TileRegisters};
use crate::tuning::PrefetchHint;
use avx2::{Avx2, Avx2Bytes};
use avx512::{Avx512, Avx512Bytes};
use std::arch::x86_64::{_MM_HINT_NTA, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};

/// Prefetches the cache line at `p`, which may be any address, as the [`PrefetchHint`] whose number
/// is `HINT` says.
#[inline(always)]
fn prefetch<const HINT: u8>(p: *const u8) {
    // SAFETY: a hint, for which any address will do; every x86-64 has it.
    unsafe {
        match PrefetchHint::ALL[HINT as usize] {
            PrefetchHint::None => {}
            PrefetchHint::L1 => _mm_prefetch::<_MM_HINT_T0>(p.cast()),
            PrefetchHint::L2 => _mm_prefetch::<_MM_HINT_T1>(p.cast()),
            PrefetchHint::Once => _mm_prefetch::<_MM_HINT_NTA>(p.cast()),
        }
    }
}

/// A kernel compiled for each instruction set.
///
/// These are methods, because the compiler puts methods into the module of their type and works
/// on modules side by side: functions would all be in this module.
pub(super) trait Variants: Kernel + Sized {
    /// Runs the kernel compiled for AVX2.
    ///
    /// # Safety
    ///
    /// The CPU has the features.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn avx2(self) -> Self::Output {
        self.run::<Avx2>()
    }

    /// Runs the kernel compiled for AVX-512.
    ///
    /// # Safety
    ///
    /// The CPU has the features.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn avx512(self) -> Self::Output {
        self.run::<Avx512>()
    }
}

impl<K: Kernel> Variants for K {}

/// A kernel compiled for each way of multiplying bytes, in methods like those of [`Variants`].
pub(super) trait ByteVariants: ByteKernel + Sized {
    /// Runs the kernel compiled for AVX2.
    ///
    /// # Safety
    ///
    /// The CPU has the features.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn avx2_bytes(self) -> Self::Output {
        self.run::<Avx2Bytes<false>>()
    }

    /// Runs the kernel compiled for AVX2 and AVX-VNNI.
    ///
    /// # Safety
    ///
    /// The CPU has the features.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
    unsafe fn avx_vnni_bytes(self) -> Self::Output {
        self.run::<Avx2Bytes<true>>()
    }

    /// Runs the kernel compiled for AVX-512 and AVX512-VNNI.
    ///
    /// # Safety
    ///
    /// The CPU has the features.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn avx512_vnni_bytes(self) -> Self::Output {
        self.run::<Avx512Bytes>()
    }
}

impl<K: ByteKernel> ByteVariants for K {}

/// Runs a kernel on tiles, with AVX-512 beside them.
///
/// # Safety
///
/// The CPU has the features and the tiles of `T`, which this process may use.
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c,gfni"
)]
pub(super) unsafe fn avx512_tiles<T: TileRegisters, K: TileKernel>(kernel: K) -> K::Output {
    kernel.run::<T>()
}
