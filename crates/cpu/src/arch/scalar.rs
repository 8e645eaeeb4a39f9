//! 16 lanes as an array: the definition of each operation, and the code for CPUs without one of
//! the other instruction sets.
//!
//! Operations that call a function for each lane are not inlined: kernels would repeat the 16
//! calls at every use, which took a tenth of the crate's code.

use super::bytes::ByteKernel;
use super::lanes::{Kernel, Lanes, Registers};
use backend::math::Float;
use half::{bf16, f16};
use std::array::from_fn;
use std::ops::{Add, Div, Mul, Sub};

/// 16 lanes, on a cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Scalar([f32; 16]);

macro_rules! operator {
    ($($trait:ident $method:ident;)*) => {$(
        impl $trait for Scalar {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                Scalar(from_fn(|i| self.0[i].$method(other.0[i])))
            }
        }
    )*};
}
operator! { Add add; Sub sub; Mul mul; Div div; }

/// `x * by + plus`, rounded once.
#[inline(always)]
fn fused(x: Scalar, by: Scalar, plus: Scalar) -> Scalar {
    Scalar(from_fn(|i| x.0[i].mul_add(by.0[i], plus.0[i])))
}

/// [`fused`] by the CPU's instruction for it, which rounds as the function does that a compiler calls without one, in a
/// twentieth of the time.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "fma")]
fn fused_by_instruction(x: Scalar, by: Scalar, plus: Scalar) -> Scalar {
    fused(x, by, plus)
}

impl Float for Scalar {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        Scalar([x; 16])
    }
    #[inline(never)]
    fn mul_add(self, by: Self, plus: Self) -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("fma") {
            // SAFETY: the CPU has FMA.
            return unsafe { fused_by_instruction(self, by, plus) };
        }
        fused(self, by, plus)
    }
    #[inline(always)]
    fn maximum(self, other: Self) -> Self {
        Scalar(from_fn(|i| Float::maximum(self.0[i], other.0[i])))
    }
    #[inline(always)]
    fn minimum(self, other: Self) -> Self {
        Scalar(from_fn(|i| Float::minimum(self.0[i], other.0[i])))
    }
    #[inline(never)]
    fn round_even(self) -> Self {
        Scalar(self.0.map(Float::round_even))
    }
    #[inline(always)]
    fn root(self) -> Self {
        Scalar(self.0.map(Float::root))
    }
    #[inline(never)]
    fn exp2_integer(self) -> Self {
        Scalar(self.0.map(Float::exp2_integer))
    }
    #[inline(always)]
    fn if_below(self, than: Self, then: Self, otherwise: Self) -> Self {
        Scalar(from_fn(|i| {
            self.0[i].if_below(than.0[i], then.0[i], otherwise.0[i])
        }))
    }
}

impl Lanes for Scalar {
    #[inline(never)]
    fn call<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<Self>()
    }
    const REGISTERS: Registers = Registers::One;

    #[inline(always)]
    fn load(x: &[f32; 16]) -> Self {
        Scalar(*x)
    }
    #[inline(always)]
    fn load_bf16(x: &[bf16; 16]) -> Self {
        Scalar(x.map(bf16::to_f32))
    }
    #[inline(never)]
    fn load_f16(x: &[f16; 16]) -> Self {
        Scalar(x.map(f16::to_f32))
    }
    #[inline(always)]
    fn load_i8(x: &[i8; 16]) -> Self {
        Scalar(x.map(f32::from))
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; 16]) {
        *to = self.0;
    }
    #[inline(never)]
    fn store_bf16(self, to: &mut [bf16; 16]) {
        *to = self.0.map(bf16::from_f32);
    }
    #[inline(never)]
    fn store_f16(self, to: &mut [f16; 16]) {
        *to = self.0.map(f16::from_f32);
    }
    #[inline(always)]
    fn store_i8(self, to: &mut [i8; 16]) {
        *to = self.0.map(|x| x as i8);
    }
    #[inline(always)]
    fn negate(self) -> Self {
        Scalar(self.0.map(|x| -x))
    }
    #[inline(always)]
    fn prefetch_to<const HINT: u8>(_: *const u8) {}
}

/// Products of bytes, one by one.
pub(super) struct Bytes;

impl super::bytes::Bytes for Bytes {
    #[inline(never)]
    fn call<K: ByteKernel>(kernel: K) -> K::Output {
        kernel.run::<Self>()
    }
    type Lanes = Scalar;
    type Codes = [u8; 64];
    type Sums = [i32; 16];

    #[inline(always)]
    fn load(codes: &[u8; 64]) -> [u8; 64] {
        *codes
    }
    #[inline(always)]
    fn store(codes: [u8; 64], to: &mut [u8; 64]) {
        *to = codes;
    }
    #[inline(always)]
    fn load_sums(sums: &[i32; 16]) -> [i32; 16] {
        *sums
    }
    const OFFSET: i32 = 0;
    #[inline(always)]
    fn lookup(table: [u8; 64], codes: [u8; 64]) -> [u8; 64] {
        codes.map(|c| table[usize::from(c)])
    }
    #[inline(always)]
    fn signed(codes: [u8; 64]) -> [u8; 64] {
        codes
    }
    #[inline(always)]
    fn add_signed(mut sums: [i32; 16], codes: [u8; 64], x: [i8; 4]) -> [i32; 16] {
        for (sum, codes) in sums.iter_mut().zip(codes.as_chunks::<4>().0) {
            for (&code, x) in codes.iter().zip(x) {
                *sum += i32::from(code as i8) * i32::from(x);
            }
        }
        sums
    }
    #[inline(always)]
    fn start(at: i32) -> [i32; 16] {
        [at; 16]
    }
    #[inline(always)]
    fn low(codes: [u8; 64]) -> [u8; 64] {
        codes.map(|c| c & 15)
    }
    #[inline(always)]
    fn high(codes: [u8; 64]) -> [u8; 64] {
        codes.map(|c| c >> 4)
    }
    #[inline(always)]
    fn spare(a: [u8; 64], b: [u8; 64], c: [u8; 64]) -> [u8; 64] {
        let bits = |of: u8, down: u8| (of & 0x88) >> down;
        std::array::from_fn(|i| bits(a[i], 3) | bits(b[i], 2) | bits(c[i], 1))
    }
    #[inline(always)]
    fn six(codes: [u8; 64]) -> [u8; 64] {
        codes.map(|c| c & 63)
    }
    #[inline(always)]
    fn less_32(codes: [u8; 64]) -> [u8; 64] {
        codes.map(|c| c.wrapping_sub(32))
    }
    #[inline(always)]
    fn spare_six(a: [u8; 64], b: [u8; 64], c: [u8; 64]) -> [u8; 64] {
        let six = |i: usize| a[i] >> 6 | b[i] >> 6 << 2 | c[i] >> 6 << 4;
        std::array::from_fn(six)
    }
    #[inline(always)]
    fn zero() -> [i32; 16] {
        [0; 16]
    }
    #[inline(always)]
    fn add_small(sums: [i32; 16], codes: [u8; 64], x: [i8; 4]) -> [i32; 16] {
        Self::add(sums, codes, x)
    }
    #[inline(always)]
    fn add(mut sums: [i32; 16], codes: [u8; 64], x: [i8; 4]) -> [i32; 16] {
        for (sum, codes) in sums.iter_mut().zip(codes.as_chunks::<4>().0) {
            for (&code, x) in codes.iter().zip(x) {
                *sum += i32::from(code) * i32::from(x);
            }
        }
        sums
    }
    #[inline(always)]
    fn float(sums: [i32; 16]) -> Scalar {
        Scalar(sums.map(|s| s as f32))
    }
}
