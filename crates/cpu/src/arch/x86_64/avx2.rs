//! AVX2: two vectors of 8 lanes.

use super::instructions::*;
use super::{ByteVariants, Variants};
use crate::arch::bytes::{ByteKernel, Bytes, word};
use crate::arch::lanes::{Kernel, Lanes, Registers};
use backend::math::Float;
use half::{bf16, f16};
use std::arch::x86_64::{
    __m256, __m256i, _CMP_LT_OQ, _CMP_UNORD_Q, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT,
    _mm_loadu_si128, _mm_storeu_si128, _mm256_dpbusd_avx_epi32, _mm256_loadu_ps,
    _mm256_loadu_si256, _mm256_storeu_ps, _mm256_storeu_si256,
};
use std::ops::{Add, Div, Mul, Sub};

/// The rounding mode: to the nearest, ties to even, without raising exceptions.
pub(super) const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// The sum of eight lanes, in the order of the last steps of [`backend::math::sum_tree`].
#[inline(always)]
pub(super) fn sum8(x: __m256) -> f32 {
    let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
}

/// For each lane of `codes`, which are below 16, a value of a table: of `low`, or of `high` from code 8 on.
#[inline(always)]
fn lookup8(low: __m256, high: __m256, codes: __m256i) -> __m256 {
    // The fourth bit says which half.
    let is_high = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes));
    _mm256_blendv_ps(
        _mm256_permutevar8x32_ps(low, codes),
        _mm256_permutevar8x32_ps(high, codes),
        is_high,
    )
}

/// `2ˣ` of whole numbers, made as the exponents of floats.
#[inline(always)]
fn exp2_integer(x: __m256) -> __m256 {
    let n = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(n))
}

/// Rounds to the upper 16 bits, to nearest even, and moves them to the lower ones. A NaN becomes
/// quiet and is not rounded.
#[inline(always)]
fn round_bf16(x: __m256) -> __m256i {
    let bits = _mm256_castps_si256(x);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
    let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
    _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan))
}

/// Lanes 0–7 and 8–15.
#[derive(Clone, Copy)]
pub(in crate::arch) struct Avx2(__m256, __m256);

macro_rules! operator256 {
    ($($trait:ident $method:ident $intrinsic:ident;)*) => {$(
        impl $trait for Avx2 {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                Avx2($intrinsic(self.0, other.0), $intrinsic(self.1, other.1))
            }
        }
    )*};
}
operator256! { Add add _mm256_add_ps; Sub sub _mm256_sub_ps; Mul mul _mm256_mul_ps; Div div _mm256_div_ps; }

impl Float for Avx2 {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        let all = _mm256_set1_ps(x);
        Avx2(all, all)
    }
    #[inline(always)]
    fn mul_add(self, by: Self, plus: Self) -> Self {
        Avx2(
            _mm256_fmadd_ps(self.0, by.0, plus.0),
            _mm256_fmadd_ps(self.1, by.1, plus.1),
        )
    }
    #[inline(always)]
    fn maximum(self, other: Self) -> Self {
        Avx2(
            _mm256_max_ps(self.0, other.0),
            _mm256_max_ps(self.1, other.1),
        )
    }
    #[inline(always)]
    fn minimum(self, other: Self) -> Self {
        Avx2(
            _mm256_min_ps(self.0, other.0),
            _mm256_min_ps(self.1, other.1),
        )
    }
    #[inline(always)]
    fn round_even(self) -> Self {
        Avx2(
            _mm256_round_ps::<NEAREST>(self.0),
            _mm256_round_ps::<NEAREST>(self.1),
        )
    }
    #[inline(always)]
    fn root(self) -> Self {
        Avx2(_mm256_sqrt_ps(self.0), _mm256_sqrt_ps(self.1))
    }
    #[inline(always)]
    fn exp2_integer(self) -> Self {
        Avx2(exp2_integer(self.0), exp2_integer(self.1))
    }
    #[inline(always)]
    fn if_below(self, than: Self, then: Self, otherwise: Self) -> Self {
        let below = _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, than.0);
        let below2 = _mm256_cmp_ps::<_CMP_LT_OQ>(self.1, than.1);
        Avx2(
            _mm256_blendv_ps(otherwise.0, then.0, below),
            _mm256_blendv_ps(otherwise.1, then.1, below2),
        )
    }
}

impl Lanes for Avx2 {
    #[inline(always)]
    fn call<K: Kernel>(kernel: K) -> K::Output {
        // SAFETY: whoever has these lanes is on a CPU with AVX2.
        unsafe { kernel.avx2() }
    }
    const REGISTERS: Registers = Registers::Narrow;

    #[inline(always)]
    fn load(x: &[f32; 16]) -> Self {
        let p = x.as_ptr();
        // SAFETY: the first eight of 16 values, and the last eight.
        unsafe { Avx2(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }
    #[inline(always)]
    fn load_bf16(x: &[bf16; 16]) -> Self {
        let p = x.as_ptr();
        // SAFETY: the first eight of 16 values of two bytes, and the last eight.
        let (low, high) = unsafe { (_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(8).cast())) };
        let (low, high) = (_mm256_cvtepu16_epi32(low), _mm256_cvtepu16_epi32(high));
        let (low, high) = (_mm256_slli_epi32::<16>(low), _mm256_slli_epi32::<16>(high));
        Avx2(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high))
    }
    #[inline(always)]
    fn load_i8(x: &[i8; 16]) -> Self {
        // SAFETY: `x` is 16 bytes.
        let low = unsafe { _mm_loadu_si128(x.as_ptr().cast()) };
        let high = _mm_srli_si128::<8>(low);
        Avx2(
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high)),
        )
    }
    #[inline(always)]
    fn load_f16(x: &[f16; 16]) -> Self {
        let p = x.as_ptr();
        // SAFETY: the first eight of 16 values of two bytes, and the last eight.
        let (low, high) = unsafe { (_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(8).cast())) };
        Avx2(_mm256_cvtph_ps(low), _mm256_cvtph_ps(high))
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; 16]) {
        let p = to.as_mut_ptr();
        // SAFETY: the first eight of 16 values, and the last eight.
        unsafe {
            _mm256_storeu_ps(p, self.0);
            _mm256_storeu_ps(p.add(8), self.1);
        }
    }
    #[inline(always)]
    fn store_bf16(self, to: &mut [bf16; 16]) {
        // Packing works within halves of the vector: quarters 0, 2, 1, 3 put it in order.
        let packed = _mm256_packus_epi32(round_bf16(self.0), round_bf16(self.1));
        let ordered = _mm256_permute4x64_epi64::<0b11_01_10_00>(packed);
        // SAFETY: `to` is 16 values of two bytes.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), ordered) };
    }
    #[inline(always)]
    fn store_f16(self, to: &mut [f16; 16]) {
        let low = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0);
        let high = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1);
        let p = to.as_mut_ptr();
        // SAFETY: the first eight of 16 values of two bytes, and the last eight.
        unsafe {
            _mm_storeu_si128(p.cast(), low);
            _mm_storeu_si128(p.add(8).cast(), high);
        }
    }
    #[inline(always)]
    fn store_i8(self, to: &mut [i8; 16]) {
        let words = _mm256_packs_epi32(_mm256_cvtps_epi32(self.0), _mm256_cvtps_epi32(self.1));
        let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
        let bytes = _mm_packs_epi16(
            _mm256_castsi256_si128(words),
            _mm256_extracti128_si256::<1>(words),
        );
        // SAFETY: `to` is 16 bytes.
        unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), bytes) };
    }
    #[inline(always)]
    fn lookup(table: &[f32; 16], codes: &[u8; 16]) -> Self {
        let Avx2(low, high) = Self::load(table);
        // SAFETY: `codes` is 16 bytes.
        let codes = unsafe { _mm_loadu_si128(codes.as_ptr().cast()) };
        let a = _mm256_cvtepu8_epi32(codes);
        let b = _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(codes));
        Avx2(lookup8(low, high, a), lookup8(low, high, b))
    }
    #[inline(always)]
    fn negate(self) -> Self {
        let sign = _mm256_set1_ps(-0.0);
        Avx2(_mm256_xor_ps(self.0, sign), _mm256_xor_ps(self.1, sign))
    }
    #[inline(always)]
    fn prefetch_to<const HINT: u8>(p: *const u8) {
        super::prefetch::<HINT>(p);
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        sum8(_mm256_add_ps(self.0, self.1))
    }
}

/// Products of bytes in two vectors of 32, with `vpdpbusd` if `VNNI`.
pub(in crate::arch) struct Avx2Bytes<const VNNI: bool>;

impl<const VNNI: bool> Avx2Bytes<VNNI> {
    /// [`Bytes::spare`] of one vector.
    #[inline(always)]
    fn spare_half(a: __m256i, b: __m256i, c: __m256i) -> __m256i {
        let mask = _mm256_set1_epi8(0x88u8 as i8);
        let a = _mm256_srli_epi16::<3>(_mm256_and_si256(a, mask));
        let b = _mm256_srli_epi16::<2>(_mm256_and_si256(b, mask));
        let c = _mm256_srli_epi16::<1>(_mm256_and_si256(c, mask));
        _mm256_or_si256(a, _mm256_or_si256(b, c))
    }

    /// [`Bytes::six`] of one vector.
    #[inline(always)]
    fn six_half(codes: __m256i) -> __m256i {
        _mm256_and_si256(codes, _mm256_set1_epi8(63))
    }

    /// [`Bytes::less_32`] of one vector.
    #[inline(always)]
    fn less_32_half(codes: __m256i) -> __m256i {
        _mm256_add_epi8(codes, _mm256_set1_epi8((Self::OFFSET - 32) as i8))
    }

    /// [`Bytes::spare_six`] of one vector.
    #[inline(always)]
    fn spare_six_half(a: __m256i, b: __m256i, c: __m256i) -> __m256i {
        let a = _mm256_and_si256(_mm256_srli_epi16::<6>(a), _mm256_set1_epi8(0x03));
        let b = _mm256_and_si256(_mm256_srli_epi16::<4>(b), _mm256_set1_epi8(0x0c));
        let c = _mm256_and_si256(_mm256_srli_epi16::<2>(c), _mm256_set1_epi8(0x30));
        _mm256_or_si256(a, _mm256_or_si256(b, c))
    }

    /// Adds products of one vector. Without `VNNI` the codes are below 16.
    #[inline(always)]
    fn half(sums: __m256i, codes: __m256i, x: __m256i) -> __m256i {
        if VNNI {
            // SAFETY: kernels run with `VNNI` where `Detected` found AVX-VNNI.
            unsafe { _mm256_dpbusd_avx_epi32(sums, codes, x) }
        } else {
            // Pairs reach 2 · 15 · 128, far from the limit of 16 bits.
            let pairs = _mm256_maddubs_epi16(codes, x);
            _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }
}

impl<const VNNI: bool> Bytes for Avx2Bytes<VNNI> {
    #[inline(always)]
    fn call<K: ByteKernel>(kernel: K) -> K::Output {
        // SAFETY: whoever multiplies in this way is on a CPU with AVX2, and AVX-VNNI if `VNNI`.
        unsafe {
            match VNNI {
                true => kernel.avx_vnni_bytes(),
                false => kernel.avx2_bytes(),
            }
        }
    }
    type Lanes = Avx2;
    type Codes = (__m256i, __m256i);
    type Sums = (__m256i, __m256i);

    #[inline(always)]
    fn load(codes: &[u8; 64]) -> Self::Codes {
        let p = codes.as_ptr();
        // SAFETY: the first 32 of 64 bytes, and the last 32.
        unsafe {
            (
                _mm256_loadu_si256(p.cast()),
                _mm256_loadu_si256(p.add(32).cast()),
            )
        }
    }
    #[inline(always)]
    fn store(codes: Self::Codes, to: &mut [u8; 64]) {
        let p = to.as_mut_ptr();
        // SAFETY: the first 32 of 64 bytes, and the last 32.
        unsafe {
            _mm256_storeu_si256(p.cast(), codes.0);
            _mm256_storeu_si256(p.add(32).cast(), codes.1);
        }
    }
    #[inline(always)]
    fn load_sums(sums: &[i32; 16]) -> Self::Sums {
        let p = sums.as_ptr();
        // SAFETY: the first eight of 16 values of four bytes, and the last eight.
        unsafe {
            (
                _mm256_loadu_si256(p.cast()),
                _mm256_loadu_si256(p.add(8).cast()),
            )
        }
    }
    const OFFSET: i32 = 128;
    #[inline(always)]
    fn lookup(table: Self::Codes, codes: Self::Codes) -> Self::Codes {
        (
            _mm256_shuffle_epi8(table.0, codes.0),
            _mm256_shuffle_epi8(table.1, codes.1),
        )
    }
    #[inline(always)]
    fn signed(codes: Self::Codes) -> Self::Codes {
        let sign = _mm256_set1_epi8(-128);
        (
            _mm256_xor_si256(codes.0, sign),
            _mm256_xor_si256(codes.1, sign),
        )
    }
    #[inline(always)]
    fn add_signed(sums: Self::Sums, codes: Self::Codes, x: [i8; 4]) -> Self::Sums {
        Self::add(sums, codes, x)
    }
    #[inline(always)]
    fn start(at: i32) -> Self::Sums {
        (_mm256_set1_epi32(at), _mm256_set1_epi32(at))
    }
    #[inline(always)]
    fn low(codes: Self::Codes) -> Self::Codes {
        let mask = _mm256_set1_epi8(15);
        (
            _mm256_and_si256(codes.0, mask),
            _mm256_and_si256(codes.1, mask),
        )
    }
    #[inline(always)]
    fn high(codes: Self::Codes) -> Self::Codes {
        Self::low((
            _mm256_srli_epi16::<4>(codes.0),
            _mm256_srli_epi16::<4>(codes.1),
        ))
    }
    #[inline(always)]
    fn spare(a: Self::Codes, b: Self::Codes, c: Self::Codes) -> Self::Codes {
        (
            Self::spare_half(a.0, b.0, c.0),
            Self::spare_half(a.1, b.1, c.1),
        )
    }
    #[inline(always)]
    fn six(codes: Self::Codes) -> Self::Codes {
        (Self::six_half(codes.0), Self::six_half(codes.1))
    }
    #[inline(always)]
    fn less_32(codes: Self::Codes) -> Self::Codes {
        (Self::less_32_half(codes.0), Self::less_32_half(codes.1))
    }
    #[inline(always)]
    fn spare_six(a: Self::Codes, b: Self::Codes, c: Self::Codes) -> Self::Codes {
        (
            Self::spare_six_half(a.0, b.0, c.0),
            Self::spare_six_half(a.1, b.1, c.1),
        )
    }
    #[inline(always)]
    fn zero() -> Self::Sums {
        (_mm256_setzero_si256(), _mm256_setzero_si256())
    }
    #[inline(always)]
    fn add_small(sums: Self::Sums, codes: Self::Codes, x: [i8; 4]) -> Self::Sums {
        let x = _mm256_set1_epi32(word(x));
        (
            Self::half(sums.0, codes.0, x),
            Self::half(sums.1, codes.1, x),
        )
    }
    #[inline(always)]
    fn add(sums: Self::Sums, codes: Self::Codes, x: [i8; 4]) -> Self::Sums {
        if VNNI {
            return Self::add_small(sums, codes, x);
        }
        // Pairs of whole bytes would leave 16 bits: upper and lower halves apart.
        let sums = Self::add_small(sums, Self::low(codes), x);
        let upper = Self::add_small(Self::zero(), Self::high(codes), x);
        (
            _mm256_add_epi32(sums.0, _mm256_slli_epi32::<4>(upper.0)),
            _mm256_add_epi32(sums.1, _mm256_slli_epi32::<4>(upper.1)),
        )
    }
    #[inline(always)]
    fn float(sums: Self::Sums) -> Avx2 {
        Avx2(_mm256_cvtepi32_ps(sums.0), _mm256_cvtepi32_ps(sums.1))
    }
}
