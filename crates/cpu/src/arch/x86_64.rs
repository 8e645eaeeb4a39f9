//! x86-64: AVX2, AVX-512 and AMX.

pub(super) mod amx;
mod avx2;
mod avx512;
mod instructions;

use super::bytes::ByteKernel;
use super::lanes::Kernel;
use super::tiles::{TileKernel, TileRegisters};
use avx2::{Avx2, Avx2Bytes};
use avx512::{Avx512, Avx512Bytes};

/// A kernel with the features of each instruction set. The compiler puts methods where
/// their type is, and works on modules side by side: functions here would be one module.
pub(super) trait Variants: Kernel + Sized {
    /// # Safety
    ///
    /// The CPU has the features.
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn avx2(self) -> Self::Output {
        self.run::<Avx2>()
    }

    /// # Safety
    ///
    /// The CPU has the features.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn avx512(self) -> Self::Output {
        self.run::<Avx512>()
    }
}

impl<K: Kernel> Variants for K {}

/// As [`Variants`].
pub(super) trait ByteVariants: ByteKernel + Sized {
    /// # Safety
    ///
    /// The CPU has the features.
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn avx2_bytes(self) -> Self::Output {
        self.run::<Avx2Bytes<false>>()
    }

    /// # Safety
    ///
    /// The CPU has the features.
    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
    unsafe fn avx_vnni_bytes(self) -> Self::Output {
        self.run::<Avx2Bytes<true>>()
    }

    /// # Safety
    ///
    /// The CPU has the features.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn avx512_vnni_bytes(self) -> Self::Output {
        self.run::<Avx512Bytes>()
    }
}

impl<K: ByteKernel> ByteVariants for K {}

/// # Safety
///
/// The CPU has the features and `T`'s.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,gfni")]
pub(super) unsafe fn avx512_tiles<T: TileRegisters, K: TileKernel>(kernel: K) -> K::Output {
    kernel.run::<T>()
}
