//! The instructions of AVX2, FMA, F16C and AVX-512 (F, BW, DQ, VL) that lanes are made of.

use crate::arch::instructions::instructions;
use std::arch::x86_64::{
    self as arch, __m128, __m128i, __m256, __m256i, __m512, __m512i, __mmask16,
};

// AVX2, FMA and F16C.
instructions! {
    fn(__m128) -> f32: _mm_cvtss_f32;
    fn(__m128, __m128) -> __m128: _mm_add_ps _mm_add_ss _mm_movehl_ps;
    [i32](__m128, __m128) -> __m128: _mm_shuffle_ps;
    [i32](__m128i) -> __m128i: _mm_srli_si128;
    fn(__m128i, __m128i) -> __m128i: _mm_packs_epi16;

    fn(f32) -> __m256: _mm256_set1_ps;
    fn(__m256) -> __m256: _mm256_sqrt_ps;
    [i32](__m256) -> __m256: _mm256_round_ps;
    fn(__m256, __m256) -> __m256: _mm256_add_ps _mm256_sub_ps _mm256_mul_ps _mm256_div_ps
        _mm256_max_ps _mm256_min_ps _mm256_xor_ps;
    [i32](__m256, __m256) -> __m256: _mm256_cmp_ps;
    fn(__m256, __m256, __m256) -> __m256: _mm256_fmadd_ps _mm256_blendv_ps;
    fn(__m256, __m256i) -> __m256: _mm256_permutevar8x32_ps;
    fn(__m256) -> __m128: _mm256_castps256_ps128;
    [i32](__m256) -> __m128: _mm256_extractf128_ps;
    fn(__m256) -> __m256i: _mm256_castps_si256 _mm256_cvtps_epi32;
    [i32](__m256) -> __m128i: _mm256_cvtps_ph;

    fn() -> __m256i: _mm256_setzero_si256;
    fn(i8) -> __m256i: _mm256_set1_epi8;
    fn(i16) -> __m256i: _mm256_set1_epi16;
    fn(i32) -> __m256i: _mm256_set1_epi32;
    [i32](__m256i) -> __m256i: _mm256_slli_epi32 _mm256_srli_epi16 _mm256_srli_epi32
        _mm256_permute4x64_epi64;
    fn(__m256i, __m256i) -> __m256i: _mm256_add_epi8 _mm256_add_epi32 _mm256_and_si256 _mm256_or_si256
        _mm256_xor_si256 _mm256_packs_epi32 _mm256_packus_epi32 _mm256_shuffle_epi8
        _mm256_madd_epi16 _mm256_maddubs_epi16;
    fn(__m256i, __m256i, __m256i) -> __m256i: _mm256_blendv_epi8;
    fn(__m256i) -> __m256: _mm256_castsi256_ps _mm256_cvtepi32_ps;
    fn(__m256i) -> __m128i: _mm256_castsi256_si128;
    [i32](__m256i) -> __m128i: _mm256_extracti128_si256;
    fn(__m128i) -> __m256i: _mm256_cvtepi8_epi32 _mm256_cvtepu8_epi32 _mm256_cvtepu16_epi32;
    fn(__m128i) -> __m256: _mm256_cvtph_ps;
}

// AVX-512.
instructions! {
    fn(f32) -> __m512: _mm512_set1_ps;
    fn(__m512) -> f32: _mm512_reduce_max_ps;
    fn(__m512) -> __m512: _mm512_sqrt_ps;
    [i32](__m512) -> __m512: _mm512_roundscale_ps;
    fn(__m512, __m512) -> __m512: _mm512_add_ps _mm512_sub_ps _mm512_mul_ps _mm512_div_ps
        _mm512_max_ps _mm512_min_ps _mm512_xor_ps;
    fn(__m512, __m512, __m512) -> __m512: _mm512_fmadd_ps;
    fn(__m512i, __m512) -> __m512: _mm512_permutexvar_ps;
    [i32](__m512, __m512) -> __mmask16: _mm512_cmp_ps_mask;
    fn(__mmask16, __m512, __m512) -> __m512: _mm512_mask_blend_ps;
    fn(__m512) -> __m256: _mm512_castps512_ps256;
    [i32](__m512) -> __m256: _mm512_extractf32x8_ps;
    fn(__m512) -> __m512i: _mm512_castps_si512 _mm512_cvtps_epi32;
    [i32](__m512) -> __m256i: _mm512_cvtps_ph;

    fn() -> __m512i: _mm512_setzero_si512;
    fn(i8) -> __m512i: _mm512_set1_epi8;
    fn(i32) -> __m512i: _mm512_set1_epi32;
    fn(i64) -> __m512i: _mm512_set1_epi64;
    [u32](__m512i) -> __m512i: _mm512_slli_epi32 _mm512_srli_epi16 _mm512_srli_epi32;
    fn(__m512i, __m512i) -> __m512i: _mm512_add_epi8 _mm512_add_epi32 _mm512_and_si512 _mm512_or_si512
        _mm512_xor_si512 _mm512_shuffle_epi8;
    fn(__mmask16, __m512i, __m512i) -> __m512i: _mm512_mask_blend_epi32;
    fn(__m512i) -> __m512: _mm512_castsi512_ps _mm512_cvtepi32_ps;
    fn(__m512i) -> __m256i: _mm512_cvtepi32_epi16;
    fn(__m512i) -> __m128i: _mm512_cvtepi32_epi8;
    fn(__m128i) -> __m512i: _mm512_cvtepi8_epi32 _mm512_cvtepu8_epi32;
    fn(__m256i) -> __m512i: _mm512_cvtepu16_epi32;
    fn(__m256i) -> __m512: _mm512_cvtph_ps;
}
