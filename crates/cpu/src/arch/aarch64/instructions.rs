//! The instructions of NEON that lanes are made of.

use crate::arch::instructions::instructions;
use std::arch::aarch64::{
    self as arch, float16x4_t, float32x2_t, float32x4_t, int8x8_t, int8x16_t, int16x4_t, int16x8_t,
    int32x4_t, uint8x16_t, uint16x4_t, uint16x8_t, uint32x4_t,
};

instructions! {
    fn(f32) -> float32x4_t: vdupq_n_f32;
    fn(float32x4_t) -> float32x4_t: vnegq_f32 vrndnq_f32 vsqrtq_f32;
    fn(float32x4_t, float32x4_t) -> float32x4_t: vaddq_f32 vsubq_f32 vmulq_f32 vdivq_f32
        vmaxq_f32;
    fn(float32x4_t, float32x4_t, float32x4_t) -> float32x4_t: vfmaq_f32;
    fn(float32x4_t, float32x4_t) -> uint32x4_t: vceqq_f32 vcgtq_f32 vcltq_f32;
    fn(uint32x4_t, float32x4_t, float32x4_t) -> float32x4_t: vbslq_f32;
    fn(float32x4_t) -> float32x2_t: vget_low_f32 vget_high_f32;
    fn(float32x2_t, float32x2_t) -> float32x2_t: vadd_f32;
    fn(float32x4_t) -> f32: vmaxvq_f32;
    [i32](float32x2_t) -> f32: vget_lane_f32;
    fn(float32x4_t) -> int32x4_t: vcvtq_s32_f32;
    fn(float32x4_t) -> uint32x4_t: vreinterpretq_u32_f32;
    fn(float32x4_t) -> float16x4_t: vcvt_f16_f32;
    fn(float16x4_t) -> float32x4_t: vcvt_f32_f16;
    fn(float16x4_t) -> uint16x4_t: vreinterpret_u16_f16;
    fn(uint16x4_t) -> float16x4_t: vreinterpret_f16_u16;

    fn(i32) -> int32x4_t: vdupq_n_s32;
    fn(int32x4_t, int32x4_t) -> int32x4_t: vaddq_s32 vsubq_s32 vuzp1q_s32 vuzp2q_s32 vzip1q_s32
        vzip2q_s32;
    [i32](int32x4_t) -> int32x4_t: vshlq_n_s32;
    fn(int32x4_t) -> float32x4_t: vcvtq_f32_s32 vreinterpretq_f32_s32;
    fn(int32x4_t) -> int8x16_t: vreinterpretq_s8_s32;

    fn(u32) -> uint32x4_t: vdupq_n_u32;
    fn(uint32x4_t, uint32x4_t) -> uint32x4_t: vaddq_u32 vandq_u32 vorrq_u32 vzip1q_u32 vzip2q_u32;
    fn(uint32x4_t, uint32x4_t, uint32x4_t) -> uint32x4_t: vbslq_u32;
    [i32](uint32x4_t) -> uint32x4_t: vshrq_n_u32;
    [i32](uint32x4_t) -> uint16x4_t: vshrn_n_u32;
    [i32](uint16x4_t) -> uint32x4_t: vshll_n_u16;
    fn(uint32x4_t) -> float32x4_t: vreinterpretq_f32_u32;
    fn(uint32x4_t) -> uint8x16_t: vreinterpretq_u8_u32;

    fn(int8x16_t) -> int8x8_t: vget_low_s8 vget_high_s8;
    fn(int8x8_t) -> int16x8_t: vmovl_s8;
    fn(int8x8_t, int8x8_t) -> int16x8_t: vmull_s8;
    fn(int16x8_t) -> int16x4_t: vget_low_s16 vget_high_s16;
    fn(int16x4_t) -> int32x4_t: vmovl_s16;
    fn(int16x8_t, int16x8_t) -> int16x8_t: vpaddq_s16;
    fn(int32x4_t, int16x8_t) -> int32x4_t: vpadalq_s16;

    fn(u8) -> uint8x16_t: vdupq_n_u8;
    fn(uint8x16_t, uint8x16_t) -> uint8x16_t: vandq_u8 veorq_u8 vorrq_u8 vsubq_u8 vqtbl1q_u8
        vzip1q_u8 vzip2q_u8;
    [i32](uint8x16_t) -> uint8x16_t: vshrq_n_u8;
    fn(uint8x16_t) -> int8x16_t: vreinterpretq_s8_u8;
    fn(uint8x16_t) -> uint32x4_t: vreinterpretq_u32_u8;
    fn(uint8x16_t) -> uint16x8_t: vreinterpretq_u16_u8;
    fn(uint16x8_t, uint16x8_t) -> uint16x8_t: vzip1q_u16 vzip2q_u16;
    fn(uint16x8_t) -> float32x4_t: vreinterpretq_f32_u16;
}
