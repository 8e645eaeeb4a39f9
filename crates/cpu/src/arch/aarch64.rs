//! NEON: four vectors of 4.
#![allow(clippy::undocumented_unsafe_blocks, reason = "one reason for all, stated here")]
// SAFETY of every block: lanes are made only inside kernels that `Detected::run`
// enters after NEON was found, and references to arrays are readable and writable
// for their whole size.

use super::{Kernel, Lanes};
use backend::math::Float;
use half::{bf16, f16};
use std::arch::aarch64::*;
use std::ops::{Add, Div, Mul, Sub};

/// # Safety
///
/// The CPU has NEON.
#[target_feature(enable = "neon")]
pub(super) unsafe fn neon<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Neon>()
}

/// Lanes 0–3, 4–7, 8–11, 12–15.
#[derive(Clone, Copy)]
pub(super) struct Neon([float32x4_t; 4]);

/// An expression for each of the four vectors.
macro_rules! quarters {
    ($i:ident => $quarter:expr) => {
        Neon([quarters!(@ $i 0 $quarter), quarters!(@ $i 1 $quarter), quarters!(@ $i 2 $quarter), quarters!(@ $i 3 $quarter)])
    };
    (@ $i:ident $n:literal $quarter:expr) => {{
        let $i: usize = $n;
        unsafe { $quarter }
    }};
}

macro_rules! operator {
    ($($trait:ident $method:ident $intrinsic:ident;)*) => {$(
        impl $trait for Neon {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                quarters!(i => $intrinsic(self.0[i], other.0[i]))
            }
        }
    )*};
}
operator! { Add add vaddq_f32; Sub sub vsubq_f32; Mul mul vmulq_f32; Div div vdivq_f32; }

impl Float for Neon {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        quarters!(_i => vdupq_n_f32(x))
    }
    #[inline(always)]
    fn mul_add(self, by: Self, plus: Self) -> Self {
        quarters!(i => vfmaq_f32(plus.0[i], self.0[i], by.0[i]))
    }
    #[inline(always)]
    fn maximum(self, other: Self) -> Self {
        // `vmaxq` would return NaN for NaN.
        quarters!(i => vbslq_f32(vcgtq_f32(self.0[i], other.0[i]), self.0[i], other.0[i]))
    }
    #[inline(always)]
    fn minimum(self, other: Self) -> Self {
        quarters!(i => vbslq_f32(vcltq_f32(self.0[i], other.0[i]), self.0[i], other.0[i]))
    }
    #[inline(always)]
    fn round_even(self) -> Self {
        quarters!(i => vrndnq_f32(self.0[i]))
    }
    #[inline(always)]
    fn root(self) -> Self {
        quarters!(i => vsqrtq_f32(self.0[i]))
    }
    #[inline(always)]
    fn exp2_integer(self) -> Self {
        quarters!(i => {
            let n = vaddq_s32(vcvtq_s32_f32(self.0[i]), vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(n))
        })
    }
    #[inline(always)]
    fn if_below(self, than: Self, then: Self, otherwise: Self) -> Self {
        quarters!(i => vbslq_f32(vcltq_f32(self.0[i], than.0[i]), then.0[i], otherwise.0[i]))
    }
}

impl Lanes for Neon {
    const SUMS: usize = 6;

    #[inline(always)]
    fn load(x: &[f32; 16]) -> Self {
        quarters!(i => vld1q_f32(x.as_ptr().add(4 * i)))
    }
    #[inline(always)]
    fn load_bf16(x: &[bf16; 16]) -> Self {
        quarters!(i => vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(x.as_ptr().add(4 * i).cast()))))
    }
    #[inline(always)]
    fn load_f16(x: &[f16; 16]) -> Self {
        quarters!(i => vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x.as_ptr().add(4 * i).cast()))))
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; 16]) {
        for i in 0..4 {
            unsafe { vst1q_f32(to.as_mut_ptr().add(4 * i), self.0[i]) };
        }
    }
    #[inline(always)]
    fn store_bf16(self, to: &mut [bf16; 16]) {
        for i in 0..4 {
            unsafe {
                let bits = vreinterpretq_u32_f32(self.0[i]);
                let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
                let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
                let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
                let number = vceqq_f32(self.0[i], self.0[i]);
                let upper = vshrn_n_u32::<16>(vbslq_u32(number, rounded, quiet));
                vst1_u16(to.as_mut_ptr().add(4 * i).cast(), upper);
            }
        }
    }
    #[inline(always)]
    fn store_f16(self, to: &mut [f16; 16]) {
        for i in 0..4 {
            unsafe { vst1_u16(to.as_mut_ptr().add(4 * i).cast(), vreinterpret_u16_f16(vcvt_f16_f32(self.0[i]))) };
        }
    }
    #[inline(always)]
    fn negate(self) -> Self {
        quarters!(i => vnegq_f32(self.0[i]))
    }
    #[inline(always)]
    fn prefetch(p: *const u8) {
        // There is no stable intrinsic: the hint for data that is read once.
        unsafe { std::arch::asm!("prfm pldl1strm, [{}]", in(reg) p, options(nostack, readonly, preserves_flags)) };
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        unsafe {
            let four = vaddq_f32(vaddq_f32(self.0[0], self.0[2]), vaddq_f32(self.0[1], self.0[3]));
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        }
    }
}
