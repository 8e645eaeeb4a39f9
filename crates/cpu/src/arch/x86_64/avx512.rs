//! AVX-512: one vector of 16 lanes.

use super::avx2::{NEAREST, sum8};
use super::instructions::*;
use super::{ByteVariants, Variants};
use crate::arch::bytes::{ByteKernel, Bytes, word};
use crate::arch::lanes::{Kernel, Lanes, Registers};
use backend::math::Float;
use half::{bf16, f16};
use std::arch::x86_64::{
    __m512, __m512i, _CMP_LT_OQ, _CMP_UNORD_Q, _mm_loadu_si128, _mm_storeu_si128,
    _mm256_loadu_si256, _mm256_storeu_si256, _mm512_dpbusd_epi32, _mm512_gf2p8affine_epi64_epi8,
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps,
    _mm512_permutexvar_epi8, _mm512_storeu_ps, _mm512_storeu_si512, _mm512_ternarylogic_epi32,
};
use std::ops::{Add, Div, Mul, Sub};

/// 16 lanes in one vector.
#[derive(Clone, Copy)]
pub(in crate::arch) struct Avx512(__m512);

macro_rules! operator512 {
    ($($trait:ident $method:ident $intrinsic:ident;)*) => {$(
        impl $trait for Avx512 {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                Avx512($intrinsic(self.0, other.0))
            }
        }
    )*};
}
operator512! { Add add _mm512_add_ps; Sub sub _mm512_sub_ps; Mul mul _mm512_mul_ps; Div div _mm512_div_ps; }

impl Float for Avx512 {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        Avx512(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn mul_add(self, by: Self, plus: Self) -> Self {
        Avx512(_mm512_fmadd_ps(self.0, by.0, plus.0))
    }
    #[inline(always)]
    fn maximum(self, other: Self) -> Self {
        // Gives the second operand for NaN and for equal zeros, as `Float` says.
        Avx512(_mm512_max_ps(self.0, other.0))
    }
    #[inline(always)]
    fn minimum(self, other: Self) -> Self {
        Avx512(_mm512_min_ps(self.0, other.0))
    }
    #[inline(always)]
    fn round_even(self) -> Self {
        Avx512(_mm512_roundscale_ps::<NEAREST>(self.0))
    }
    #[inline(always)]
    fn root(self) -> Self {
        Avx512(_mm512_sqrt_ps(self.0))
    }
    #[inline(always)]
    fn exp2_integer(self) -> Self {
        let n = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
        Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(n)))
    }
    #[inline(always)]
    fn if_below(self, than: Self, then: Self, otherwise: Self) -> Self {
        let below = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, than.0);
        Avx512(_mm512_mask_blend_ps(below, otherwise.0, then.0))
    }
}

impl Lanes for Avx512 {
    #[inline(always)]
    fn call<K: Kernel>(kernel: K) -> K::Output {
        // SAFETY: whoever has these lanes is on a CPU with AVX-512.
        unsafe { kernel.avx512() }
    }
    const REGISTERS: Registers = Registers::Wide;

    #[inline(always)]
    fn load(x: &[f32; 16]) -> Self {
        // SAFETY: `x` is 16 values of four bytes.
        Avx512(unsafe { _mm512_loadu_ps(x.as_ptr()) })
    }
    #[inline(always)]
    fn load_bf16(x: &[bf16; 16]) -> Self {
        // SAFETY: `x` is 16 values of two bytes.
        let upper = unsafe { _mm256_loadu_si256(x.as_ptr().cast()) };
        let wide = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(upper));
        Avx512(_mm512_castsi512_ps(wide))
    }
    #[inline(always)]
    fn load_u8(x: &[u8; 16]) -> Self {
        // SAFETY: `x` is 16 bytes.
        let bytes = unsafe { _mm_loadu_si128(x.as_ptr().cast()) };
        Avx512(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)))
    }
    #[inline(always)]
    fn load_f16(x: &[f16; 16]) -> Self {
        // SAFETY: `x` is 16 values of two bytes.
        let halves = unsafe { _mm256_loadu_si256(x.as_ptr().cast()) };
        Avx512(_mm512_cvtph_ps(halves))
    }
    #[inline(always)]
    fn load_i8(x: &[i8; 16]) -> Self {
        // SAFETY: `x` is 16 bytes.
        let bytes = unsafe { _mm_loadu_si128(x.as_ptr().cast()) };
        Avx512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)))
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; 16]) {
        // SAFETY: `to` is 16 values of four bytes.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self.0) };
    }
    #[inline(always)]
    fn store_bf16(self, to: &mut [bf16; 16]) {
        let bits = _mm512_castps_si512(self.0);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
        let upper = _mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(nan, rounded, quiet));
        // SAFETY: `to` is 16 values of two bytes.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(upper)) };
    }
    #[inline(always)]
    fn store_f16(self, to: &mut [f16; 16]) {
        let halves = _mm512_cvtps_ph::<NEAREST>(self.0);
        // SAFETY: `to` is 16 values of two bytes.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), halves) };
    }
    #[inline(always)]
    fn store_i8(self, to: &mut [i8; 16]) {
        let bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(self.0));
        // SAFETY: `to` is 16 bytes.
        unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), bytes) };
    }
    #[inline(always)]
    fn lookup(table: &[f32; 16], codes: &[u8; 16]) -> Self {
        // SAFETY: `codes` is 16 bytes.
        let codes = unsafe { _mm_loadu_si128(codes.as_ptr().cast()) };
        let wide = _mm512_cvtepu8_epi32(codes);
        Avx512(_mm512_permutexvar_ps(wide, Self::load(table).0))
    }
    #[inline(always)]
    fn negate(self) -> Self {
        Avx512(_mm512_xor_ps(self.0, _mm512_set1_ps(-0.0)))
    }
    #[inline(always)]
    fn prefetch_to<const HINT: u8>(p: *const u8) {
        super::prefetch::<HINT>(p);
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        sum8(_mm256_add_ps(
            _mm512_castps512_ps256(self.0),
            _mm512_extractf32x8_ps::<1>(self.0),
        ))
    }
    #[inline(always)]
    fn max_lane(self) -> f32 {
        _mm512_reduce_max_ps(self.0)
    }
    #[inline(always)]
    fn load_part(x: &[f32]) -> Self {
        assert!(x.len() <= 16, "at most all lanes");
        let all = ((1u32 << x.len()) - 1) as u16;
        // SAFETY: the mask selects as many lanes as `x` has values; no others are read.
        Avx512(unsafe { _mm512_maskz_loadu_ps(all, x.as_ptr()) })
    }
    #[inline(always)]
    fn store_part(self, to: &mut [f32]) {
        assert!(to.len() <= 16, "at most all lanes");
        let all = ((1u32 << to.len()) - 1) as u16;
        // SAFETY: the mask selects as many lanes as `to` has values; no others are written.
        unsafe { _mm512_mask_storeu_ps(to.as_mut_ptr(), all, self.0) };
    }
}

/// Products of bytes in one vector of 64, with `vpdpbusd`.
pub(in crate::arch) struct Avx512Bytes;

impl Bytes for Avx512Bytes {
    #[inline(always)]
    fn call<K: ByteKernel>(kernel: K) -> K::Output {
        // SAFETY: whoever multiplies in this way is on a CPU with AVX-512 and AVX512-VNNI.
        unsafe { kernel.avx512_vnni_bytes() }
    }
    type Lanes = Avx512;
    type Codes = __m512i;
    type Sums = __m512i;

    #[inline(always)]
    fn load(codes: &[u8; 64]) -> __m512i {
        // SAFETY: `codes` is 64 bytes.
        unsafe { _mm512_loadu_si512(codes.as_ptr().cast()) }
    }
    #[inline(always)]
    fn store(codes: __m512i, to: &mut [u8; 64]) {
        // SAFETY: `to` is 64 bytes.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), codes) };
    }
    #[inline(always)]
    fn load_sums(sums: &[i32; 16]) -> __m512i {
        // SAFETY: `sums` is 16 values of four bytes.
        unsafe { _mm512_loadu_si512(sums.as_ptr().cast()) }
    }
    const OFFSET: i32 = 128;
    #[inline(always)]
    fn lookup(table: __m512i, codes: __m512i) -> __m512i {
        _mm512_shuffle_epi8(table, codes)
    }
    #[inline(always)]
    fn signed(codes: __m512i) -> __m512i {
        _mm512_xor_si512(codes, _mm512_set1_epi8(-128))
    }
    #[inline(always)]
    fn add_signed(sums: __m512i, codes: __m512i, x: [i8; 4]) -> __m512i {
        Self::add(sums, codes, x)
    }
    #[inline(always)]
    fn start(at: i32) -> __m512i {
        _mm512_set1_epi32(at)
    }
    #[inline(always)]
    fn low(codes: __m512i) -> __m512i {
        _mm512_and_si512(codes, _mm512_set1_epi8(15))
    }
    #[inline(always)]
    fn high(codes: __m512i) -> __m512i {
        _mm512_and_si512(_mm512_srli_epi16::<4>(codes), _mm512_set1_epi8(15))
    }
    #[inline(always)]
    fn spare(a: __m512i, b: __m512i, c: __m512i) -> __m512i {
        let mask = _mm512_set1_epi8(0x88u8 as i8);
        let a = _mm512_srli_epi16::<3>(_mm512_and_si512(a, mask));
        let b = _mm512_srli_epi16::<2>(_mm512_and_si512(b, mask));
        let c = _mm512_srli_epi16::<1>(_mm512_and_si512(c, mask));
        _mm512_or_si512(a, _mm512_or_si512(b, c))
    }
    #[inline(always)]
    fn six(codes: __m512i) -> __m512i {
        _mm512_and_si512(codes, _mm512_set1_epi8(63))
    }
    #[inline(always)]
    fn less_32(codes: __m512i) -> __m512i {
        _mm512_add_epi8(codes, _mm512_set1_epi8((Self::OFFSET - 32) as i8))
    }
    #[inline(always)]
    fn spare_six(a: __m512i, b: __m512i, c: __m512i) -> __m512i {
        let a = _mm512_and_si512(_mm512_srli_epi16::<6>(a), _mm512_set1_epi8(0x03));
        let b = _mm512_and_si512(_mm512_srli_epi16::<4>(b), _mm512_set1_epi8(0x0c));
        let c = _mm512_and_si512(_mm512_srli_epi16::<2>(c), _mm512_set1_epi8(0x30));
        _mm512_or_si512(a, _mm512_or_si512(b, c))
    }
    #[inline(always)]
    fn zero() -> __m512i {
        _mm512_setzero_si512()
    }
    #[inline(always)]
    fn add_small(sums: __m512i, codes: __m512i, x: [i8; 4]) -> __m512i {
        Self::add(sums, codes, x)
    }
    #[inline(always)]
    fn add(sums: __m512i, codes: __m512i, x: [i8; 4]) -> __m512i {
        // SAFETY: kernels run with these bytes where `Detected` found AVX512-VNNI.
        unsafe { _mm512_dpbusd_epi32(sums, codes, _mm512_set1_epi32(word(x))) }
    }
    #[inline(always)]
    fn float(sums: __m512i) -> Avx512 {
        Avx512(_mm512_cvtepi32_ps(sums))
    }
}

/// The lower and the upper four bits of each byte; if `SIGNED` 16 times those less 8, which takes
/// one instruction each.
///
/// # Safety
///
/// The CPU has GFNI and AVX512-VBMI.
#[inline(always)]
pub(super) unsafe fn halves<const SIGNED: bool>(codes: __m512i) -> [__m512i; 2] {
    /// 16 times each of four bits less 8, whatever the bits above are.
    const LEVELS: [i8; 64] = {
        let (mut levels, mut i) = ([0; 64], 0);
        while i < 64 {
            levels[i] = 16 * (i as i8 % 16 - 8);
            i += 1;
        }
        levels
    };
    /// The matrix that `gf2p8affineqb` multiplies a byte with, to have its upper four bits: bit `i`
    /// of the result is the parity of the byte and the matrix's byte `7 - i`.
    const UPPER: i64 = 0x1020_4080 << 32;
    /// `(codes ^ 0x88) & 0xf0` by bits: 1 where the third operand and one of the others are.
    const LESS_8: i32 = 0x28;
    match SIGNED {
        // SAFETY: the CPU has AVX512-VBMI, as promised; the levels are 64 bytes.
        true => unsafe {
            let levels = _mm512_loadu_si512(LEVELS.as_ptr().cast());
            let (eights, upper) = (
                _mm512_set1_epi8(0x88u8 as i8),
                _mm512_set1_epi8(0xf0u8 as i8),
            );
            [
                _mm512_permutexvar_epi8(codes, levels),
                _mm512_ternarylogic_epi32::<LESS_8>(codes, eights, upper),
            ]
        },
        false => {
            let low = _mm512_and_si512(codes, _mm512_set1_epi8(15));
            // SAFETY: the CPU has GFNI, as promised; no memory is touched.
            let high =
                unsafe { _mm512_gf2p8affine_epi64_epi8::<0>(codes, _mm512_set1_epi64(UPPER)) };
            [low, high]
        }
    }
}
