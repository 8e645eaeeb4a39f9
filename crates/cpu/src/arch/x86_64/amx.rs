//! AMX: one instruction multiplies 16 rows of activations with 16 of weights over
//! 64 columns, in 16 cycles where `vpdpbusd` takes 128.
//!
//! The compiler knows no stable intrinsics, and the system must grant the
//! registers first. Tiles 0, 1 and 2 hold sums, activations and codes; 3 to 5 more sums.
//! A core has few registers behind the eight names, and its other thread may need them:
//! products that use seven then take twice as long as with five (Sapphire Rapids).

use super::avx512::{self, Avx512Bytes};
use crate::arch::bytes::Bytes;
use crate::arch::tiles::{TILE_ROWS, TileRegisters};
use std::arch::asm;
use std::sync::OnceLock;

/// Whether this CPU has tiles of bytes and the system lets this process use them.
pub(in crate::arch) fn granted() -> bool {
    static GRANTED: OnceLock<bool> = OnceLock::new();
    *GRANTED.get_or_init(|| found() && permitted())
}

/// Whether the CPU has `AMX-TILE` and `AMX-INT8` (`CPUID` leaf 7), and GFNI and AVX512-VBMI, which
/// unpack codes for the tiles.
fn found() -> bool {
    const WANTED: u32 = 1 << 24 | 1 << 25;
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    __cpuid(0).eax >= 7
        && __cpuid_count(7, 0).edx & WANTED == WANTED
        && is_x86_feature_detected!("gfni")
        && is_x86_feature_detected!("avx512vbmi")
}

/// Asks the system for the tile registers, for all threads of the process.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    /// From the kernel's `asm/prctl.h`.
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    /// The state component of tile data.
    const XTILEDATA: libc::c_long = 18;
    // SAFETY: the request changes no memory of this process.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Tile registers that are configured, until dropped.
pub(in crate::arch) struct Amx(());

impl Drop for Amx {
    fn drop(&mut self) {
        // SAFETY: tiles exist on this CPU, as `configure` was told.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }
}

impl TileRegisters for Amx {
    type Bytes = Avx512Bytes;

    #[inline(always)]
    unsafe fn configure(rows: usize, depth: usize) -> Self {
        assert!(
            (1..=TILE_ROWS).contains(&rows) && (1..=TILE_ROWS).contains(&(depth / 4)),
            "a tile has at most 16 rows of 64 bytes"
        );
        let mut shapes = Shapes {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        let (rows, depth) = (rows as u8, depth as u8);
        for (tile, shape) in [(rows, 64), (rows, depth), (depth / 4, 64)]
            .into_iter()
            .chain([(rows, 64); 3])
            .enumerate()
        {
            (shapes.rows[tile], shapes.row_bytes[tile]) = (shape.0, shape.1.into());
        }
        // SAFETY: the caller found tiles; the shapes are within palette 1.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const shapes, options(nostack, readonly, preserves_flags));
        }
        Amx(())
    }

    #[inline(always)]
    fn saturate(&self, steps: usize) {
        for _ in 0..steps {
            // SAFETY: the tiles have shapes; what they hold does not matter.
            unsafe {
                asm!(
                    "tdpbsud tmm0, tmm1, tmm2",
                    "tdpbsud tmm3, tmm1, tmm2",
                    "tdpbsud tmm4, tmm1, tmm2",
                    "tdpbsud tmm5, tmm1, tmm2",
                    out("tmm0") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
                    options(nostack, preserves_flags),
                );
            }
        }
    }

    #[inline(always)]
    unsafe fn multiply<const SIGNED: bool>(
        &self,
        x: *const i8,
        x_stride: usize,
        codes: *const u8,
        twice: bool,
        sums: *mut [i32; 16],
    ) {
        macro_rules! tile {
            ($($line:literal),*) => {
                asm!(
                    "tilezero tmm0",
                    $($line,)*
                    "tilestored [{sums} + {line}], tmm0",
                    x = in(reg) x,
                    x_stride = in(reg) x_stride,
                    codes = in(reg) codes,
                    line = in(reg) 64usize,
                    sums = in(reg) sums,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _,
                    options(nostack, preserves_flags),
                )
            };
        }
        macro_rules! product {
            ($product:literal) => {
                match twice {
                    false => tile!(
                        "tileloadd tmm1, [{x} + {x_stride}]",
                        "tileloadd tmm2, [{codes} + {line}]",
                        $product
                    ),
                    true => tile!(
                        "tileloadd tmm1, [{x} + {x_stride}]",
                        "tileloadd tmm2, [{codes} + {line}]",
                        $product,
                        "tileloadd tmm1, [{x} + {x_stride} + 64]",
                        "tileloadd tmm2, [{codes} + {line} + 1024]",
                        $product
                    ),
                }
            };
        }
        // SAFETY: the caller vouches for the operands, the shapes are set.
        unsafe {
            match SIGNED {
                true => product!("tdpbssd tmm0, tmm1, tmm2"),
                false => product!("tdpbsud tmm0, tmm1, tmm2"),
            }
        }
    }

    #[inline(always)]
    unsafe fn load(&self, x: *const i8, x_stride: usize) {
        // SAFETY: the caller vouches for the rows, the shapes are set.
        unsafe {
            asm!(
                "tileloadd tmm1, [{x} + {x_stride}]",
                x = in(reg) x,
                x_stride = in(reg) x_stride,
                out("tmm1") _,
                options(nostack, readonly, preserves_flags),
            );
        }
    }

    #[inline(always)]
    unsafe fn multiply_in_turn<const SIGNED: bool, const TWICE: bool>(
        &self,
        turn: usize,
        x: *const i8,
        x_stride: usize,
        codes: *const u8,
        sums: *mut [i32; 16],
    ) {
        macro_rules! turn {
            ($product:literal, $into:literal, $leaving:literal) => {
                match TWICE {
                    false => turn!(@ $into, $leaving,
                        "tileloadd tmm2, [{codes} + {line}]",
                        concat!($product, " ", $into, ", tmm1, tmm2"),
                        "/* {x} {x_stride} */"),
                    true => turn!(@ $into, $leaving,
                        "tileloadd tmm2, [{codes} + {line}]",
                        concat!($product, " ", $into, ", tmm1, tmm2"),
                        "tileloadd tmm1, [{x} + {x_stride} + 64]",
                        "tileloadd tmm2, [{codes} + {line} + 1024]",
                        concat!($product, " ", $into, ", tmm1, tmm2")),
                }
            };
            (@ $into:literal, $leaving:literal, $($line:expr),*) => {
                asm!(
                    concat!("tilezero ", $into),
                    $($line,)*
                    concat!("tilestored [{sums} + {line}], ", $leaving),
                    x = in(reg) x,
                    x_stride = in(reg) x_stride,
                    codes = in(reg) codes,
                    line = in(reg) 64usize,
                    sums = in(reg) sums,
                    out("tmm1") _, out("tmm2") _,
                    options(nostack, preserves_flags),
                )
            };
        }
        macro_rules! turns {
            ($product:literal) => {
                match turn {
                    0 => turn!($product, "tmm0", "tmm3"),
                    1 => turn!($product, "tmm3", "tmm4"),
                    _ => turn!($product, "tmm4", "tmm0"),
                }
            };
        }
        // SAFETY: the caller vouches for the operands, the shapes are set.
        unsafe {
            match SIGNED {
                true => turns!("tdpbssd"),
                false => turns!("tdpbsud"),
            }
        }
    }

    #[inline(always)]
    fn halves<const SIGNED: bool>(
        codes: <Self::Bytes as Bytes>::Codes,
    ) -> [<Self::Bytes as Bytes>::Codes; 2] {
        // SAFETY: `found` looked for GFNI and AVX512-VBMI.
        unsafe { avx512::halves::<SIGNED>(codes) }
    }
}
