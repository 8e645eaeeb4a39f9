//! Which instruction sets this CPU has, and the one door into functions compiled for them.

#[cfg(target_arch = "aarch64")]
use super::aarch64;
use super::bytes::ByteKernel;
use super::lanes::Kernel;
use super::scalar;
use super::tiles::TileKernel;
#[cfg(target_arch = "x86_64")]
use super::x86_64::{self, ByteVariants, Variants, amx};

/// An instruction set that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Portable code, for any CPU of the architecture.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
    /// 64-bit Arm.
    Neon,
}

impl Isa {
    /// Every instruction set of this CPU, the best last.
    pub fn available() -> Vec<Isa> {
        #[allow(unused_mut, reason = "other architectures add nothing")]
        let mut all = vec![Isa::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
            {
                all.push(Isa::Avx2);
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                {
                    all.push(Isa::Avx512);
                }
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            all.push(Isa::Neon);
        }
        all
    }

    /// The best instruction set of this CPU.
    pub fn detect() -> Isa {
        *Isa::available()
            .last()
            .expect("scalar code runs everywhere")
    }

    /// The name in options and messages.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Neon => "neon",
        }
    }
}

/// How a CPU multiplies bytes. CPUs of one [`Isa`] differ in this, by their age.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "each architecture makes its own")]
enum ByteProducts {
    Scalar,
    /// `vpmaddubsw`: sums of two products in 16 bits.
    Avx2,
    /// `vpdpbusd` on 32 bytes.
    AvxVnni,
    /// `vpdpbusd` on 64 bytes.
    Avx512Vnni,
    /// `vpdpbusd` on 64 bytes for few rows, AMX tiles for more.
    Amx,
    /// `smull`: products of 16 bits.
    Neon,
    /// `sdot`.
    NeonDot,
    /// `sdot` and `usdot` for one row, `smmla` and `usmmla` for two at once.
    NeonMatrix,
}

/// An [`Isa`] that was found on this CPU, and a way of multiplying bytes. Whoever has such a
/// value may run kernels that are compiled for them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Detected {
    isa: Isa,
    products: ByteProducts,
}

impl Detected {
    /// `isa` with the best way of multiplying bytes; `None` if this CPU lacks it.
    pub(crate) fn new(isa: Isa) -> Option<Self> {
        Self::variants(isa).pop()
    }

    /// `isa` with each way of multiplying bytes that this CPU has, the best last.
    pub(crate) fn variants(isa: Isa) -> Vec<Self> {
        if !Isa::available().contains(&isa) {
            return Vec::new();
        }
        #[allow(unused_mut, reason = "depends on the architecture")]
        let mut all = match isa {
            Isa::Scalar => vec![ByteProducts::Scalar],
            Isa::Avx2 | Isa::Avx512 => vec![ByteProducts::Avx2],
            Isa::Neon => vec![ByteProducts::Neon],
        };
        #[cfg(target_arch = "x86_64")]
        {
            if isa != Isa::Scalar && is_x86_feature_detected!("avxvnni") {
                all.push(ByteProducts::AvxVnni);
            }
            if isa == Isa::Avx512 && is_x86_feature_detected!("avx512vnni") {
                all.push(ByteProducts::Avx512Vnni);
                if amx::granted() {
                    all.push(ByteProducts::Amx);
                }
            }
        }
        #[cfg(target_arch = "aarch64")]
        if isa == Isa::Neon && std::arch::is_aarch64_feature_detected!("dotprod") {
            all.push(ByteProducts::NeonDot);
            if std::arch::is_aarch64_feature_detected!("i8mm") {
                all.push(ByteProducts::NeonMatrix);
            }
        }
        all.into_iter()
            .map(|products| Detected { isa, products })
            .collect()
    }

    pub(crate) fn isa(self) -> Isa {
        self.isa
    }

    /// The most rows of activations that a kernel of byte products takes at once.
    pub(crate) fn most_byte_rows(self) -> usize {
        match (self.isa, self.products) {
            (Isa::Scalar, _) => 1,
            (_, ByteProducts::Avx512Vnni | ByteProducts::Amx) => 8,
            _ => 4,
        }
    }

    /// Runs `kernel` compiled for this instruction set.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.isa {
            Isa::Scalar => kernel.run::<scalar::Scalar>(),
            // SAFETY: `variants` found the features on this CPU.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { kernel.avx2() },
            // SAFETY: `variants` found the features on this CPU.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { kernel.avx512() },
            // SAFETY: `variants` found the features on this CPU.
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => unsafe { aarch64::neon(kernel) },
            #[allow(unreachable_patterns, reason = "depends on the architecture")]
            _ => unreachable!("`variants` found it on this CPU"),
        }
    }

    /// Whether the CPU has AMX tiles, and this process may use them.
    pub(crate) fn has_tiles(self) -> bool {
        self.products == ByteProducts::Amx
    }

    /// Runs `kernel` on AMX tiles.
    ///
    /// # Panics
    ///
    /// If [`Detected::has_tiles`] says that there are none.
    #[inline]
    #[allow(unused_variables, reason = "other architectures have no tiles")]
    pub(crate) fn run_tiles<K: TileKernel>(self, kernel: K) -> K::Output {
        match self.products {
            // SAFETY: `variants` found the features on this CPU and the registers granted.
            #[cfg(target_arch = "x86_64")]
            ByteProducts::Amx => unsafe { x86_64::avx512_tiles::<amx::Amx, K>(kernel) },
            _ => unreachable!("there are no tiles"),
        }
    }

    /// Runs `kernel` compiled for this way of multiplying bytes.
    #[inline]
    pub(crate) fn run_bytes<K: ByteKernel>(self, kernel: K) -> K::Output {
        match self.products {
            ByteProducts::Scalar => kernel.run::<scalar::Bytes>(),
            // SAFETY: `variants` found the features on this CPU.
            #[cfg(target_arch = "x86_64")]
            ByteProducts::Avx2 => unsafe { kernel.avx2_bytes() },
            // SAFETY: `variants` found the features on this CPU.
            #[cfg(target_arch = "x86_64")]
            ByteProducts::AvxVnni => unsafe { kernel.avx_vnni_bytes() },
            // SAFETY: `variants` found the features on this CPU.
            #[cfg(target_arch = "x86_64")]
            ByteProducts::Avx512Vnni | ByteProducts::Amx => unsafe { kernel.avx512_vnni_bytes() },
            // SAFETY: `variants` found the features on this CPU.
            #[cfg(target_arch = "aarch64")]
            ByteProducts::Neon => unsafe { aarch64::neon_bytes(kernel) },
            // SAFETY: `variants` found the features on this CPU.
            #[cfg(target_arch = "aarch64")]
            ByteProducts::NeonDot => unsafe { aarch64::neon_dot_bytes(kernel) },
            // SAFETY: `variants` found the features on this CPU.
            #[cfg(target_arch = "aarch64")]
            ByteProducts::NeonMatrix => unsafe { aarch64::neon_matrix_bytes(kernel) },
            #[allow(unreachable_patterns, reason = "depends on the architecture")]
            _ => unreachable!("`variants` found it on this CPU"),
        }
    }
}
