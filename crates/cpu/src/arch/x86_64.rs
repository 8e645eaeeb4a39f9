//! AVX2 (two vectors of 8) and AVX-512 (one of 16).
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one reason for all, stated here"
)]
// SAFETY of every block: lanes are made only inside kernels that `Detected::run`
// enters after the features were found, references to arrays are readable and
// writable for their whole size, and unaligned loads and stores are used.

use super::{ByteKernel, Bytes, Kernel, Lanes, TileKernel, Tiles, word};
use backend::math::Float;
use half::{bf16, f16};
use std::arch::x86_64::*;
use std::ops::{Add, Div, Mul, Sub};

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
pub(super) unsafe fn avx512_tiles<T: Tiles, K: TileKernel>(kernel: K) -> K::Output {
    kernel.run::<T>()
}

/// Rounds toward the nearest integer, ties to even, quietly.
const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

#[derive(Clone, Copy)]
pub(super) struct Avx512(__m512);

macro_rules! operator512 {
    ($($trait:ident $method:ident $intrinsic:ident;)*) => {$(
        impl $trait for Avx512 {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                Avx512(unsafe { $intrinsic(self.0, other.0) })
            }
        }
    )*};
}
operator512! { Add add _mm512_add_ps; Sub sub _mm512_sub_ps; Mul mul _mm512_mul_ps; Div div _mm512_div_ps; }

impl Float for Avx512 {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        Avx512(unsafe { _mm512_set1_ps(x) })
    }
    #[inline(always)]
    fn mul_add(self, by: Self, plus: Self) -> Self {
        Avx512(unsafe { _mm512_fmadd_ps(self.0, by.0, plus.0) })
    }
    #[inline(always)]
    fn maximum(self, other: Self) -> Self {
        // Gives the second operand for NaN and for equal zeros, as `Float` says.
        Avx512(unsafe { _mm512_max_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn minimum(self, other: Self) -> Self {
        Avx512(unsafe { _mm512_min_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn round_even(self) -> Self {
        Avx512(unsafe { _mm512_roundscale_ps::<NEAREST>(self.0) })
    }
    #[inline(always)]
    fn root(self) -> Self {
        Avx512(unsafe { _mm512_sqrt_ps(self.0) })
    }
    #[inline(always)]
    fn exp2_integer(self) -> Self {
        Avx512(unsafe {
            let n = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(n))
        })
    }
    #[inline(always)]
    fn if_below(self, than: Self, then: Self, otherwise: Self) -> Self {
        Avx512(unsafe {
            let below = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, than.0);
            _mm512_mask_blend_ps(below, otherwise.0, then.0)
        })
    }
}

impl Lanes for Avx512 {
    const SUMS: usize = 24;

    #[inline(always)]
    fn load(x: &[f32; 16]) -> Self {
        Avx512(unsafe { _mm512_loadu_ps(x.as_ptr()) })
    }
    #[inline(always)]
    fn load_bf16(x: &[bf16; 16]) -> Self {
        Avx512(unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        })
    }
    #[inline(always)]
    fn load_u8(x: &[u8; 16]) -> Self {
        Avx512(unsafe {
            _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(x.as_ptr().cast())))
        })
    }
    #[inline(always)]
    fn load_f16(x: &[f16; 16]) -> Self {
        Avx512(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())) })
    }
    #[inline(always)]
    fn load_i8(x: &[i8; 16]) -> Self {
        Avx512(unsafe {
            let wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast()));
            _mm512_cvtepi32_ps(wide)
        })
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; 16]) {
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self.0) };
    }
    #[inline(always)]
    fn store_bf16(self, to: &mut [bf16; 16]) {
        unsafe {
            let bits = _mm512_castps_si512(self.0);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
            let upper = _mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(nan, rounded, quiet));
            _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(upper));
        }
    }
    #[inline(always)]
    fn store_f16(self, to: &mut [f16; 16]) {
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtps_ph::<NEAREST>(self.0)) };
    }
    #[inline(always)]
    fn store_i8(self, to: &mut [i8; 16]) {
        unsafe {
            _mm_storeu_si128(
                to.as_mut_ptr().cast(),
                _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(self.0)),
            )
        };
    }
    #[inline(always)]
    fn lookup(table: &[f32; 16], codes: &[u8; 16]) -> Self {
        Avx512(unsafe {
            let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(codes.as_ptr().cast()));
            _mm512_permutexvar_ps(codes, Self::load(table).0)
        })
    }
    #[inline(always)]
    fn negate(self) -> Self {
        Avx512(unsafe { _mm512_xor_ps(self.0, _mm512_set1_ps(-0.0)) })
    }
    #[inline(always)]
    fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) };
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        unsafe {
            sum8(_mm256_add_ps(
                _mm512_castps512_ps256(self.0),
                _mm512_extractf32x8_ps::<1>(self.0),
            ))
        }
    }
    #[inline(always)]
    fn max_lane(self) -> f32 {
        unsafe { _mm512_reduce_max_ps(self.0) }
    }
    #[inline(always)]
    fn load_part(x: &[f32]) -> Self {
        assert!(x.len() <= 16, "at most all lanes");
        Avx512(unsafe { _mm512_maskz_loadu_ps(((1u32 << x.len()) - 1) as u16, x.as_ptr()) })
    }
    #[inline(always)]
    fn store_part(self, to: &mut [f32]) {
        assert!(to.len() <= 16, "at most all lanes");
        unsafe { _mm512_mask_storeu_ps(to.as_mut_ptr(), ((1u32 << to.len()) - 1) as u16, self.0) };
    }
}

/// The last steps of the sum tree.
#[inline(always)]
unsafe fn sum8(x: __m256) -> f32 {
    unsafe {
        let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
    }
}

#[inline(always)]
unsafe fn exp2_integer(x: __m256) -> __m256 {
    unsafe {
        let n = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(n))
    }
}

/// The upper halves, rounded, as 32-bit integers.
#[inline(always)]
unsafe fn round_bf16(x: __m256) -> __m256i {
    unsafe {
        let bits = _mm256_castps_si256(x);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
        _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan))
    }
}

/// Lanes 0–7 and 8–15.
#[derive(Clone, Copy)]
pub(super) struct Avx2(__m256, __m256);

macro_rules! operator256 {
    ($($trait:ident $method:ident $intrinsic:ident;)*) => {$(
        impl $trait for Avx2 {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                unsafe { Avx2($intrinsic(self.0, other.0), $intrinsic(self.1, other.1)) }
            }
        }
    )*};
}
operator256! { Add add _mm256_add_ps; Sub sub _mm256_sub_ps; Mul mul _mm256_mul_ps; Div div _mm256_div_ps; }

impl Float for Avx2 {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        let all = unsafe { _mm256_set1_ps(x) };
        Avx2(all, all)
    }
    #[inline(always)]
    fn mul_add(self, by: Self, plus: Self) -> Self {
        unsafe {
            Avx2(
                _mm256_fmadd_ps(self.0, by.0, plus.0),
                _mm256_fmadd_ps(self.1, by.1, plus.1),
            )
        }
    }
    #[inline(always)]
    fn maximum(self, other: Self) -> Self {
        unsafe {
            Avx2(
                _mm256_max_ps(self.0, other.0),
                _mm256_max_ps(self.1, other.1),
            )
        }
    }
    #[inline(always)]
    fn minimum(self, other: Self) -> Self {
        unsafe {
            Avx2(
                _mm256_min_ps(self.0, other.0),
                _mm256_min_ps(self.1, other.1),
            )
        }
    }
    #[inline(always)]
    fn round_even(self) -> Self {
        unsafe {
            Avx2(
                _mm256_round_ps::<NEAREST>(self.0),
                _mm256_round_ps::<NEAREST>(self.1),
            )
        }
    }
    #[inline(always)]
    fn root(self) -> Self {
        unsafe { Avx2(_mm256_sqrt_ps(self.0), _mm256_sqrt_ps(self.1)) }
    }
    #[inline(always)]
    fn exp2_integer(self) -> Self {
        unsafe { Avx2(exp2_integer(self.0), exp2_integer(self.1)) }
    }
    #[inline(always)]
    fn if_below(self, than: Self, then: Self, otherwise: Self) -> Self {
        unsafe {
            let below = _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, than.0);
            let below2 = _mm256_cmp_ps::<_CMP_LT_OQ>(self.1, than.1);
            Avx2(
                _mm256_blendv_ps(otherwise.0, then.0, below),
                _mm256_blendv_ps(otherwise.1, then.1, below2),
            )
        }
    }
}

impl Lanes for Avx2 {
    const SUMS: usize = 6;

    #[inline(always)]
    fn load(x: &[f32; 16]) -> Self {
        unsafe {
            Avx2(
                _mm256_loadu_ps(x.as_ptr()),
                _mm256_loadu_ps(x.as_ptr().add(8)),
            )
        }
    }
    #[inline(always)]
    fn load_bf16(x: &[bf16; 16]) -> Self {
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().add(8).cast()));
            let (low, high) = (_mm256_slli_epi32::<16>(low), _mm256_slli_epi32::<16>(high));
            Avx2(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high))
        }
    }
    #[inline(always)]
    fn load_i8(x: &[i8; 16]) -> Self {
        unsafe {
            let low = _mm_loadu_si128(x.as_ptr().cast());
            let high = _mm_srli_si128::<8>(low);
            Avx2(
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high)),
            )
        }
    }
    #[inline(always)]
    fn load_f16(x: &[f16; 16]) -> Self {
        unsafe {
            let low = _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast()));
            Avx2(
                low,
                _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().add(8).cast())),
            )
        }
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; 16]) {
        unsafe {
            _mm256_storeu_ps(to.as_mut_ptr(), self.0);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), self.1);
        }
    }
    #[inline(always)]
    fn store_bf16(self, to: &mut [bf16; 16]) {
        unsafe {
            // Packing works within halves of the vector: quarters 0, 2, 1, 3 put it in order.
            let packed = _mm256_packus_epi32(round_bf16(self.0), round_bf16(self.1));
            _mm256_storeu_si256(
                to.as_mut_ptr().cast(),
                _mm256_permute4x64_epi64::<0b11_01_10_00>(packed),
            );
        }
    }
    #[inline(always)]
    fn store_f16(self, to: &mut [f16; 16]) {
        unsafe {
            _mm_storeu_si128(
                to.as_mut_ptr().cast(),
                _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0),
            );
            _mm_storeu_si128(
                to.as_mut_ptr().add(8).cast(),
                _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1),
            );
        }
    }
    #[inline(always)]
    fn store_i8(self, to: &mut [i8; 16]) {
        unsafe {
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(self.0), _mm256_cvtps_epi32(self.1));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let bytes = _mm_packs_epi16(
                _mm256_castsi256_si128(words),
                _mm256_extracti128_si256::<1>(words),
            );
            _mm_storeu_si128(to.as_mut_ptr().cast(), bytes);
        }
    }
    #[inline(always)]
    fn lookup(table: &[f32; 16], codes: &[u8; 16]) -> Self {
        let Avx2(low, high) = Self::load(table);
        unsafe {
            let codes = _mm_loadu_si128(codes.as_ptr().cast());
            let wide = [codes, _mm_srli_si128::<8>(codes)].map(|c| _mm256_cvtepu8_epi32(c));
            let [a, b] = wide.map(|c| {
                let of = |table| _mm256_permutevar8x32_ps(table, c);
                // The fourth bit says which half.
                let is_high = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(c));
                _mm256_blendv_ps(of(low), of(high), is_high)
            });
            Avx2(a, b)
        }
    }
    #[inline(always)]
    fn negate(self) -> Self {
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            Avx2(_mm256_xor_ps(self.0, sign), _mm256_xor_ps(self.1, sign))
        }
    }
    #[inline(always)]
    fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) };
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        unsafe { sum8(_mm256_add_ps(self.0, self.1)) }
    }
}

/// Products of bytes on 64 of them.
pub(super) struct Avx512Bytes;

impl Bytes for Avx512Bytes {
    type Lanes = Avx512;
    type Codes = __m512i;
    type Sums = __m512i;

    #[inline(always)]
    fn load(codes: &[u8; 64]) -> __m512i {
        unsafe { _mm512_loadu_si512(codes.as_ptr().cast()) }
    }
    #[inline(always)]
    fn store(codes: __m512i, to: &mut [u8; 64]) {
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), codes) };
    }
    #[inline(always)]
    fn load_sums(sums: &[i32; 16]) -> __m512i {
        unsafe { _mm512_loadu_si512(sums.as_ptr().cast()) }
    }
    const OFFSET: i32 = 128;
    #[inline(always)]
    fn lookup(table: __m512i, codes: __m512i) -> __m512i {
        unsafe { _mm512_shuffle_epi8(table, codes) }
    }
    #[inline(always)]
    fn signed(codes: __m512i) -> __m512i {
        unsafe { _mm512_xor_si512(codes, _mm512_set1_epi8(-128)) }
    }
    #[inline(always)]
    fn add_signed(sums: __m512i, codes: __m512i, x: [i8; 4]) -> __m512i {
        Self::add(sums, codes, x)
    }
    #[inline(always)]
    fn start(at: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(at) }
    }
    #[inline(always)]
    fn low(codes: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(codes, _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    fn high(codes: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(_mm512_srli_epi16::<4>(codes), _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    fn zero() -> __m512i {
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    fn add_small(sums: __m512i, codes: __m512i, x: [i8; 4]) -> __m512i {
        Self::add(sums, codes, x)
    }
    #[inline(always)]
    fn add(sums: __m512i, codes: __m512i, x: [i8; 4]) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(sums, codes, _mm512_set1_epi32(word(x))) }
    }
    #[inline(always)]
    fn float(sums: __m512i) -> Avx512 {
        Avx512(unsafe { _mm512_cvtepi32_ps(sums) })
    }
}

/// The lower and the upper four bits of each byte, less 8 if `SIGNED`.
///
/// # Safety
///
/// The CPU has GFNI.
#[inline(always)]
pub(super) unsafe fn halves<const SIGNED: bool>(codes: __m512i) -> [__m512i; 2] {
    /// Bit `i` of a result is the parity of the byte and the matrix's byte `7 - i`. A code
    /// less 8 has the opposite of the code's bit 3 there and in all bits above.
    const fn matrix(signed: bool, from: usize) -> i64 {
        let (mut rows, mut bit) = (0u64, 0);
        while bit < if signed { 8 } else { 4 } {
            let kept = if bit < 3 { bit } else { 3 };
            rows |= 1 << (8 * (7 - bit) + kept + from);
            bit += 1;
        }
        rows as i64
    }
    unsafe {
        let lower = _mm512_set1_epi64(const { matrix(SIGNED, 0) });
        let upper = _mm512_set1_epi64(const { matrix(SIGNED, 4) });
        match SIGNED {
            true => [
                _mm512_gf2p8affine_epi64_epi8::<0xf8>(codes, lower),
                _mm512_gf2p8affine_epi64_epi8::<0xf8>(codes, upper),
            ],
            false => [
                _mm512_and_si512(codes, _mm512_set1_epi8(15)),
                _mm512_gf2p8affine_epi64_epi8::<0>(codes, upper),
            ],
        }
    }
}

/// Products of bytes on two times 32 of them.
pub(super) struct Avx2Bytes<const VNNI: bool>;

impl<const VNNI: bool> Avx2Bytes<VNNI> {
    /// Adds products with codes below 16, or any codes with VNNI.
    #[inline(always)]
    unsafe fn half(sums: __m256i, codes: __m256i, x: __m256i) -> __m256i {
        unsafe {
            if VNNI {
                _mm256_dpbusd_avx_epi32(sums, codes, x)
            } else {
                // Pairs reach 2 · 15 · 128, far from the limit of 16 bits.
                let pairs = _mm256_maddubs_epi16(codes, x);
                _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
            }
        }
    }
}

impl<const VNNI: bool> Bytes for Avx2Bytes<VNNI> {
    type Lanes = Avx2;
    type Codes = (__m256i, __m256i);
    type Sums = (__m256i, __m256i);

    #[inline(always)]
    fn load(codes: &[u8; 64]) -> Self::Codes {
        let p = codes.as_ptr();
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
        unsafe {
            _mm256_storeu_si256(p.cast(), codes.0);
            _mm256_storeu_si256(p.add(32).cast(), codes.1);
        }
    }
    #[inline(always)]
    fn load_sums(sums: &[i32; 16]) -> Self::Sums {
        let p = sums.as_ptr();
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
        unsafe {
            (
                _mm256_shuffle_epi8(table.0, codes.0),
                _mm256_shuffle_epi8(table.1, codes.1),
            )
        }
    }
    #[inline(always)]
    fn signed(codes: Self::Codes) -> Self::Codes {
        unsafe {
            let sign = _mm256_set1_epi8(-128);
            (
                _mm256_xor_si256(codes.0, sign),
                _mm256_xor_si256(codes.1, sign),
            )
        }
    }
    #[inline(always)]
    fn add_signed(sums: Self::Sums, codes: Self::Codes, x: [i8; 4]) -> Self::Sums {
        Self::add(sums, codes, x)
    }
    #[inline(always)]
    fn start(at: i32) -> Self::Sums {
        unsafe { (_mm256_set1_epi32(at), _mm256_set1_epi32(at)) }
    }
    #[inline(always)]
    fn low(codes: Self::Codes) -> Self::Codes {
        unsafe {
            let mask = _mm256_set1_epi8(15);
            (
                _mm256_and_si256(codes.0, mask),
                _mm256_and_si256(codes.1, mask),
            )
        }
    }
    #[inline(always)]
    fn high(codes: Self::Codes) -> Self::Codes {
        Self::low(unsafe {
            (
                _mm256_srli_epi16::<4>(codes.0),
                _mm256_srli_epi16::<4>(codes.1),
            )
        })
    }
    #[inline(always)]
    fn zero() -> Self::Sums {
        unsafe { (_mm256_setzero_si256(), _mm256_setzero_si256()) }
    }
    #[inline(always)]
    fn add_small(sums: Self::Sums, codes: Self::Codes, x: [i8; 4]) -> Self::Sums {
        unsafe {
            let x = _mm256_set1_epi32(word(x));
            (
                Self::half(sums.0, codes.0, x),
                Self::half(sums.1, codes.1, x),
            )
        }
    }
    #[inline(always)]
    fn add(sums: Self::Sums, codes: Self::Codes, x: [i8; 4]) -> Self::Sums {
        if VNNI {
            return Self::add_small(sums, codes, x);
        }
        // Pairs of whole bytes would leave 16 bits: upper and lower halves apart.
        let sums = Self::add_small(sums, Self::low(codes), x);
        let upper = Self::add_small(Self::zero(), Self::high(codes), x);
        unsafe {
            (
                _mm256_add_epi32(sums.0, _mm256_slli_epi32::<4>(upper.0)),
                _mm256_add_epi32(sums.1, _mm256_slli_epi32::<4>(upper.1)),
            )
        }
    }
    #[inline(always)]
    fn float(sums: Self::Sums) -> Avx2 {
        unsafe { Avx2(_mm256_cvtepi32_ps(sums.0), _mm256_cvtepi32_ps(sums.1)) }
    }
}
