//! NEON: four vectors of 4.

mod instructions;

use super::bytes::{ByteKernel, Bytes, word};
use super::lanes::{Kernel, Lanes, Registers};
use crate::tuning::PrefetchHint;
use backend::math::Float;
use half::{bf16, f16};
use instructions::*;
use std::arch::aarch64::{
    float32x4_t, int8x16_t, int32x4_t, uint8x16_t, uint8x16x4_t, vld1_u16, vld1q_f32, vld1q_s8,
    vld1q_s32, vld1q_u8, vld4q_u8, vst1_u16, vst1q_f32, vst1q_u8,
};
use std::arch::asm;
use std::ops::{Add, Div, Mul, Sub};

/// Runs a kernel compiled for NEON.
///
/// # Safety
///
/// The CPU has NEON.
#[inline(never)]
#[target_feature(enable = "neon")]
pub(super) unsafe fn neon<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Neon>()
}

/// Runs a kernel compiled for NEON.
///
/// # Safety
///
/// The CPU has NEON.
#[inline(never)]
#[target_feature(enable = "neon")]
pub(super) unsafe fn neon_bytes<K: ByteKernel>(kernel: K) -> K::Output {
    kernel.run::<NeonBytes<WIDENING>>()
}

/// Runs a kernel compiled for NEON and the dot product extension.
///
/// # Safety
///
/// The CPU has NEON and the dot product extension.
#[inline(never)]
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn neon_dot_bytes<K: ByteKernel>(kernel: K) -> K::Output {
    kernel.run::<NeonBytes<DOT>>()
}

/// Runs a kernel compiled for NEON and the extensions of dot products and of 8-bit matrices.
///
/// # Safety
///
/// The CPU has NEON and the extensions of dot products and of 8-bit matrices.
#[inline(never)]
#[target_feature(enable = "neon,dotprod,i8mm")]
pub(super) unsafe fn neon_matrix_bytes<K: ByteKernel>(kernel: K) -> K::Output {
    kernel.run::<NeonBytes<MATRIX>>()
}

/// Lanes 0–3, 4–7, 8–11, 12–15.
#[derive(Clone, Copy)]
pub(super) struct Neon([float32x4_t; 4]);

/// The four vectors that an expression gives for `i` from 0 to 3.
macro_rules! quarters {
    ($i:ident => $quarter:expr) => {
        Neon([quarters!(@ $i 0 $quarter), quarters!(@ $i 1 $quarter), quarters!(@ $i 2 $quarter), quarters!(@ $i 3 $quarter)])
    };
    (@ $i:ident $n:literal $quarter:expr) => {{
        let $i: usize = $n;
        $quarter
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
    #[inline(always)]
    fn call<K: Kernel>(kernel: K) -> K::Output {
        // SAFETY: whoever has these lanes is on a CPU with NEON.
        unsafe { neon(kernel) }
    }
    const REGISTERS: Registers = Registers::Narrow;

    #[inline(always)]
    fn load(x: &[f32; 16]) -> Self {
        // SAFETY: each four of 16 values.
        quarters!(i => unsafe { vld1q_f32(x.as_ptr().add(4 * i)) })
    }
    #[inline(always)]
    fn load_bf16(x: &[bf16; 16]) -> Self {
        quarters!(i => {
            // SAFETY: each four of 16 values of two bytes.
            let upper = unsafe { vld1_u16(x.as_ptr().add(4 * i).cast()) };
            vreinterpretq_f32_u32(vshll_n_u16::<16>(upper))
        })
    }
    #[inline(always)]
    fn load_f16(x: &[f16; 16]) -> Self {
        quarters!(i => {
            // SAFETY: each four of 16 values of two bytes.
            let halves = unsafe { vld1_u16(x.as_ptr().add(4 * i).cast()) };
            vcvt_f32_f16(vreinterpret_f16_u16(halves))
        })
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; 16]) {
        for i in 0..4 {
            // SAFETY: each four of 16 values.
            unsafe { vst1q_f32(to.as_mut_ptr().add(4 * i), self.0[i]) };
        }
    }
    #[inline(always)]
    fn store_bf16(self, to: &mut [bf16; 16]) {
        for i in 0..4 {
            let bits = vreinterpretq_u32_f32(self.0[i]);
            let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
            let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
            let number = vceqq_f32(self.0[i], self.0[i]);
            let upper = vshrn_n_u32::<16>(vbslq_u32(number, rounded, quiet));
            // SAFETY: each four of 16 values of two bytes.
            unsafe { vst1_u16(to.as_mut_ptr().add(4 * i).cast(), upper) };
        }
    }
    #[inline(always)]
    fn store_f16(self, to: &mut [f16; 16]) {
        for i in 0..4 {
            let halves = vreinterpret_u16_f16(vcvt_f16_f32(self.0[i]));
            // SAFETY: each four of 16 values of two bytes.
            unsafe { vst1_u16(to.as_mut_ptr().add(4 * i).cast(), halves) };
        }
    }
    #[inline(always)]
    fn load_i8(x: &[i8; 16]) -> Self {
        let four = |i: usize| {
            // SAFETY: `x` is 16 bytes.
            let half = unsafe { vld1q_s8(x.as_ptr()) };
            let wide = match i / 2 {
                0 => vmovl_s8(vget_low_s8(half)),
                _ => vmovl_s8(vget_high_s8(half)),
            };
            vcvtq_f32_s32(match i % 2 {
                0 => vmovl_s16(vget_low_s16(wide)),
                _ => vmovl_s16(vget_high_s16(wide)),
            })
        };
        Neon([four(0), four(1), four(2), four(3)])
    }
    #[inline(always)]
    fn store_i8(self, to: &mut [i8; 16]) {
        *to = self.to_array().map(|x| x as i8);
    }
    #[inline(always)]
    fn lookup(table: &[f32; 16], codes: &[u8; 16]) -> Self {
        // SAFETY: the table is 64 bytes, and `codes` is 16.
        let (table, codes) = unsafe { (vld4q_u8(table.as_ptr().cast()), vld1q_u8(codes.as_ptr())) };
        // Each of the four bytes of all 16 numbers, then the bytes of each number side by side.
        let uint8x16x4_t(a, b, c, d) = table;
        let (a, b) = (vqtbl1q_u8(a, codes), vqtbl1q_u8(b, codes));
        let (c, d) = (vqtbl1q_u8(c, codes), vqtbl1q_u8(d, codes));
        let lower = [
            vreinterpretq_u16_u8(vzip1q_u8(a, b)),
            vreinterpretq_u16_u8(vzip2q_u8(a, b)),
        ];
        let upper = [
            vreinterpretq_u16_u8(vzip1q_u8(c, d)),
            vreinterpretq_u16_u8(vzip2q_u8(c, d)),
        ];
        quarters!(i => vreinterpretq_f32_u16(match i % 2 {
            0 => vzip1q_u16(lower[i / 2], upper[i / 2]),
            _ => vzip2q_u16(lower[i / 2], upper[i / 2]),
        }))
    }
    #[inline(always)]
    fn negate(self) -> Self {
        quarters!(i => vnegq_f32(self.0[i]))
    }
    #[inline(always)]
    fn prefetch_to<const HINT: u8>(p: *const u8) {
        // There is no stable intrinsic.
        macro_rules! prefetch {
            ($hint:literal) => {
                // SAFETY: a hint, for which any address will do.
                unsafe {
                    asm!(concat!("prfm ", $hint, ", [{}]"), in(reg) p, options(nostack, readonly, preserves_flags))
                }
            };
        }
        match PrefetchHint::ALL[HINT as usize] {
            PrefetchHint::None => {}
            PrefetchHint::L1 => prefetch!("pldl1keep"),
            PrefetchHint::L2 => prefetch!("pldl2keep"),
            PrefetchHint::Once => prefetch!("pldl1strm"),
        }
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        let four = vaddq_f32(
            vaddq_f32(self.0[0], self.0[2]),
            vaddq_f32(self.0[1], self.0[3]),
        );
        let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
        vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
    }
    #[inline(always)]
    fn max_lane(self) -> f32 {
        let (a, b) = (
            vmaxq_f32(self.0[0], self.0[1]),
            vmaxq_f32(self.0[2], self.0[3]),
        );
        vmaxvq_f32(vmaxq_f32(a, b))
    }
}

/// A way of multiplying bytes: `smull`, products of 16 bits.
const WIDENING: u8 = 0;
/// A way of multiplying bytes: `sdot`, for two rows at once with four bytes of a vector.
const DOT: u8 = 1;
/// A way of multiplying bytes: `smmla` and `usmmla` for two rows at once, `sdot` and `usdot` for
/// one.
const MATRIX: u8 = 2;

/// Products of bytes in four vectors of 16, in one of these ways.
pub(super) struct NeonBytes<const WAY: u8>;

impl<const WAY: u8> NeonBytes<WAY> {
    /// Adds products of one vector, four to a lane, with codes below 128 or signed ones.
    #[inline(always)]
    fn quarter(sums: int32x4_t, codes: uint8x16_t, x: int8x16_t) -> int32x4_t {
        let codes = vreinterpretq_s8_u8(codes);
        if WAY != WIDENING {
            let mut sums = sums;
            // There is no stable intrinsic.
            // SAFETY: kernels run with these ways where `Detected` found the dot product
            // extension, and the function that this is inlined into has the feature; no
            // memory is touched.
            unsafe {
                asm!(
                    "sdot {sums:v}.4s, {codes:v}.16b, {x:v}.16b",
                    sums = inout(vreg) sums,
                    codes = in(vreg) codes,
                    x = in(vreg) x,
                    options(pure, nomem, nostack, preserves_flags),
                );
            }
            sums
        } else {
            // Products of two bytes, then sums of two neighbors, which reach 2 · 128 · 127 and so
            // fit 16 bits, and of four. Where 32 bits were added in pairs, the compiler took those
            // apart, into two and a half times as many cycles (of a Cortex-A72, as llvm-mca counts).
            let low = vmull_s8(vget_low_s8(codes), vget_low_s8(x));
            let high = vmull_s8(vget_high_s8(codes), vget_high_s8(x));
            vpadalq_s16(sums, vpaddq_s16(low, high))
        }
    }

    /// Adds products of one vector, four to a lane, with any codes.
    ///
    /// # Safety
    ///
    /// The way is [`MATRIX`], and the CPU has the extension of 8-bit matrices.
    #[inline(always)]
    unsafe fn mixed_quarter(mut sums: int32x4_t, codes: uint8x16_t, x: int8x16_t) -> int32x4_t {
        // There is no stable intrinsic.
        // SAFETY: the CPU has the instruction, as promised, and so has the function that this
        // is inlined into; no memory is touched.
        unsafe {
            asm!(
                "usdot {sums:v}.4s, {codes:v}.16b, {x:v}.16b",
                sums = inout(vreg) sums,
                codes = in(vreg) codes,
                x = in(vreg) x,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        sums
    }

    /// Adds products of one vector with the four bytes `WORD` of `x` in every lane, the codes
    /// being below 128 or signed: nothing has to be copied to all lanes.
    ///
    /// # Safety
    ///
    /// The CPU has the dot product extension.
    #[inline(always)]
    unsafe fn quarter_of_word<const WORD: usize>(
        mut sums: int32x4_t,
        codes: uint8x16_t,
        x: int8x16_t,
    ) -> int32x4_t {
        // There is no stable intrinsic.
        // SAFETY: the CPU has the instruction, as promised, and so has the function that this
        // is inlined into; no memory is touched.
        unsafe {
            asm!(
                "sdot {sums:v}.4s, {codes:v}.16b, {x:v}.4b[{word}]",
                sums = inout(vreg) sums,
                codes = in(vreg) codes,
                x = in(vreg) x,
                word = const WORD,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        sums
    }

    /// Codes less 128, as signed bytes.
    #[inline(always)]
    fn less_128(codes: [uint8x16_t; 4]) -> [uint8x16_t; 4] {
        let sign = vdupq_n_u8(128);
        [
            veorq_u8(codes[0], sign),
            veorq_u8(codes[1], sign),
            veorq_u8(codes[2], sign),
            veorq_u8(codes[3], sign),
        ]
    }

    /// [`Bytes::add_pair`] by [`DOT`].
    ///
    /// # Safety
    ///
    /// The CPU has the dot product extension.
    #[inline(always)]
    unsafe fn add_pair_of_words<const SIGNED: bool>(
        sums: [[int32x4_t; 4]; 2],
        mut first: [uint8x16_t; 4],
        mut second: [uint8x16_t; 4],
        x: int8x16_t,
    ) -> [[int32x4_t; 4]; 2] {
        let [mut a, mut b] = sums;
        // SAFETY: the CPU has the extension, as promised.
        unsafe {
            if !SIGNED {
                // As in `add`.
                let (least, zero) = (vdupq_n_u8(128), vdupq_n_s32(0));
                let below_a = Self::quarter_of_word::<0>(zero, least, x);
                let below_a = Self::quarter_of_word::<1>(below_a, least, x);
                let below_b = Self::quarter_of_word::<2>(zero, least, x);
                let below_b = Self::quarter_of_word::<3>(below_b, least, x);
                for i in 0..4 {
                    a[i] = vsubq_s32(a[i], below_a);
                    b[i] = vsubq_s32(b[i], below_b);
                }
                (first, second) = (Self::less_128(first), Self::less_128(second));
            }
            for i in 0..4 {
                a[i] = Self::quarter_of_word::<0>(a[i], first[i], x);
                a[i] = Self::quarter_of_word::<1>(a[i], second[i], x);
                b[i] = Self::quarter_of_word::<2>(b[i], first[i], x);
                b[i] = Self::quarter_of_word::<3>(b[i], second[i], x);
            }
        }
        [a, b]
    }
}

/// `sums + codes x` of matrices `[2, 8]`, `x` being transposed. There are no stable
/// intrinsics.
///
/// # Safety
///
/// The CPU has the extension of 8-bit matrices, and so has the function that this is inlined
/// into.
#[inline(always)]
unsafe fn matrix<const SIGNED: bool>(
    mut sums: int32x4_t,
    codes: uint8x16_t,
    x: int8x16_t,
) -> int32x4_t {
    macro_rules! product {
        ($line:literal) => {
            asm!(
                $line,
                sums = inout(vreg) sums,
                codes = in(vreg) codes,
                x = in(vreg) x,
                options(pure, nomem, nostack, preserves_flags),
            )
        };
    }
    // SAFETY: the CPU has the instructions, as promised; no memory is touched.
    unsafe {
        match SIGNED {
            true => product!("smmla {sums:v}.4s, {codes:v}.16b, {x:v}.16b"),
            false => product!("usmmla {sums:v}.4s, {codes:v}.16b, {x:v}.16b"),
        }
    }
    sums
}

impl<const WAY: u8> Bytes for NeonBytes<WAY> {
    #[inline(always)]
    fn call<K: ByteKernel>(kernel: K) -> K::Output {
        // SAFETY: whoever multiplies in this way is on a CPU with its extensions.
        unsafe {
            match WAY {
                WIDENING => neon_bytes(kernel),
                DOT => neon_dot_bytes(kernel),
                _ => neon_matrix_bytes(kernel),
            }
        }
    }
    type Lanes = Neon;
    type Codes = [uint8x16_t; 4];
    type Sums = [int32x4_t; 4];

    #[inline(always)]
    fn load(codes: &[u8; 64]) -> Self::Codes {
        let p = codes.as_ptr();
        // SAFETY: each 16 of 64 bytes.
        unsafe {
            [
                vld1q_u8(p),
                vld1q_u8(p.add(16)),
                vld1q_u8(p.add(32)),
                vld1q_u8(p.add(48)),
            ]
        }
    }
    #[inline(always)]
    fn store(codes: Self::Codes, to: &mut [u8; 64]) {
        for (i, codes) in codes.into_iter().enumerate() {
            // SAFETY: each 16 of 64 bytes.
            unsafe { vst1q_u8(to.as_mut_ptr().add(16 * i), codes) };
        }
    }
    #[inline(always)]
    fn load_sums(sums: &[i32; 16]) -> Self::Sums {
        let p = sums.as_ptr();
        // SAFETY: each four of 16 values.
        unsafe {
            [
                vld1q_s32(p),
                vld1q_s32(p.add(4)),
                vld1q_s32(p.add(8)),
                vld1q_s32(p.add(12)),
            ]
        }
    }
    const OFFSET: i32 = 0;
    #[inline(always)]
    fn lookup(table: Self::Codes, codes: Self::Codes) -> Self::Codes {
        codes.map(|codes| vqtbl1q_u8(table[0], codes))
    }
    #[inline(always)]
    fn signed(codes: Self::Codes) -> Self::Codes {
        codes
    }
    #[inline(always)]
    fn add_signed(sums: Self::Sums, codes: Self::Codes, x: [i8; 4]) -> Self::Sums {
        // The codes are taken as signed bytes there.
        Self::add_small(sums, codes, x)
    }
    const PAIRED: bool = WAY != WIDENING;
    /// With [`MATRIX`], transposes a matrix `[lane, row]` for each two lanes: sums of the first
    /// vectors, then of the second.
    #[inline(always)]
    fn pair(sums: [Self::Sums; 2]) -> [Self::Sums; 2] {
        if WAY != MATRIX {
            return sums;
        }
        let [a, b] = sums;
        [
            [
                vzip1q_s32(a[0], b[0]),
                vzip2q_s32(a[0], b[0]),
                vzip1q_s32(a[1], b[1]),
                vzip2q_s32(a[1], b[1]),
            ],
            [
                vzip1q_s32(a[2], b[2]),
                vzip2q_s32(a[2], b[2]),
                vzip1q_s32(a[3], b[3]),
                vzip2q_s32(a[3], b[3]),
            ],
        ]
    }
    #[inline(always)]
    fn unpair(sums: [Self::Sums; 2]) -> [Self::Sums; 2] {
        if WAY != MATRIX {
            return sums;
        }
        let [a, b] = sums;
        [
            [
                vuzp1q_s32(a[0], a[1]),
                vuzp1q_s32(a[2], a[3]),
                vuzp1q_s32(b[0], b[1]),
                vuzp1q_s32(b[2], b[3]),
            ],
            [
                vuzp2q_s32(a[0], a[1]),
                vuzp2q_s32(a[2], a[3]),
                vuzp2q_s32(b[0], b[1]),
                vuzp2q_s32(b[2], b[3]),
            ],
        ]
    }
    #[inline(always)]
    unsafe fn add_pair<const SIGNED: bool>(
        sums: [Self::Sums; 2],
        first: Self::Codes,
        second: Self::Codes,
        x: *const [i8; 4],
    ) -> [Self::Sums; 2] {
        // SAFETY: four times four bytes are readable, as promised.
        let x = unsafe { vld1q_s8(x.cast()) };
        if WAY != MATRIX {
            // SAFETY: only kernels of `DOT` and `MATRIX` add pairs (`PAIRED`), and those run
            // where `Detected` found the extension.
            return unsafe { Self::add_pair_of_words::<SIGNED>(sums, first, second, x) };
        }
        let [mut a, mut b] = sums;
        for i in 0..4 {
            // Eight columns of two lanes.
            let (low, high) = (
                vreinterpretq_u32_u8(first[i]),
                vreinterpretq_u32_u8(second[i]),
            );
            let codes = [vzip1q_u32(low, high), vzip2q_u32(low, high)];
            let sums = if i < 2 { &mut a } else { &mut b };
            for (j, codes) in codes.into_iter().enumerate() {
                let sum = &mut sums[i % 2 * 2 + j];
                // SAFETY: kernels of `MATRIX` run where `Detected` found the extension.
                *sum = unsafe { matrix::<SIGNED>(*sum, vreinterpretq_u8_u32(codes), x) };
            }
        }
        [a, b]
    }
    #[inline(always)]
    fn start(at: i32) -> Self::Sums {
        [vdupq_n_s32(at); 4]
    }
    #[inline(always)]
    fn low(codes: Self::Codes) -> Self::Codes {
        let mask = vdupq_n_u8(15);
        [
            vandq_u8(codes[0], mask),
            vandq_u8(codes[1], mask),
            vandq_u8(codes[2], mask),
            vandq_u8(codes[3], mask),
        ]
    }
    #[inline(always)]
    fn high(codes: Self::Codes) -> Self::Codes {
        [
            vshrq_n_u8::<4>(codes[0]),
            vshrq_n_u8::<4>(codes[1]),
            vshrq_n_u8::<4>(codes[2]),
            vshrq_n_u8::<4>(codes[3]),
        ]
    }
    #[inline(always)]
    fn spare(a: Self::Codes, b: Self::Codes, c: Self::Codes) -> Self::Codes {
        let mask = vdupq_n_u8(0x88);
        let mut spare = a;
        for i in 0..4 {
            let a = vshrq_n_u8::<3>(vandq_u8(a[i], mask));
            let b = vshrq_n_u8::<2>(vandq_u8(b[i], mask));
            let c = vshrq_n_u8::<1>(vandq_u8(c[i], mask));
            spare[i] = vorrq_u8(a, vorrq_u8(b, c));
        }
        spare
    }
    #[inline(always)]
    fn six(codes: Self::Codes) -> Self::Codes {
        codes.map(|codes| vandq_u8(codes, vdupq_n_u8(63)))
    }
    #[inline(always)]
    fn less_32(codes: Self::Codes) -> Self::Codes {
        codes.map(|codes| vsubq_u8(codes, vdupq_n_u8(32)))
    }
    #[inline(always)]
    fn spare_six(a: Self::Codes, b: Self::Codes, c: Self::Codes) -> Self::Codes {
        let (second, third) = (vdupq_n_u8(0x0c), vdupq_n_u8(0x30));
        let mut six = a;
        for i in 0..4 {
            let a = vshrq_n_u8::<6>(a[i]);
            let b = vandq_u8(vshrq_n_u8::<4>(b[i]), second);
            let c = vandq_u8(vshrq_n_u8::<2>(c[i]), third);
            six[i] = vorrq_u8(a, vorrq_u8(b, c));
        }
        six
    }
    #[inline(always)]
    fn zero() -> Self::Sums {
        [vdupq_n_s32(0); 4]
    }
    #[inline(always)]
    fn add_small(sums: Self::Sums, codes: Self::Codes, x: [i8; 4]) -> Self::Sums {
        let x = vreinterpretq_s8_s32(vdupq_n_s32(word(x)));
        [
            Self::quarter(sums[0], codes[0], x),
            Self::quarter(sums[1], codes[1], x),
            Self::quarter(sums[2], codes[2], x),
            Self::quarter(sums[3], codes[3], x),
        ]
    }
    #[inline(always)]
    fn add(sums: Self::Sums, codes: Self::Codes, x: [i8; 4]) -> Self::Sums {
        let splat = vreinterpretq_s8_s32(vdupq_n_s32(word(x)));
        if WAY == MATRIX {
            // SAFETY: kernels of `MATRIX` run where `Detected` found the extension.
            return unsafe {
                [
                    Self::mixed_quarter(sums[0], codes[0], splat),
                    Self::mixed_quarter(sums[1], codes[1], splat),
                    Self::mixed_quarter(sums[2], codes[2], splat),
                    Self::mixed_quarter(sums[3], codes[3], splat),
                ]
            };
        }
        // Codes of 128 and more are no signed bytes: less 128 they are, and then `-128 Σ x` is
        // to be taken off, which is alike in all lanes.
        let below = Self::quarter(vdupq_n_s32(0), vdupq_n_u8(128), splat);
        let sums = [
            vsubq_s32(sums[0], below),
            vsubq_s32(sums[1], below),
            vsubq_s32(sums[2], below),
            vsubq_s32(sums[3], below),
        ];
        Self::add_signed(sums, Self::less_128(codes), x)
    }
    #[inline(always)]
    fn float(sums: Self::Sums) -> Neon {
        quarters!(i => vcvtq_f32_s32(sums[i]))
    }
}
