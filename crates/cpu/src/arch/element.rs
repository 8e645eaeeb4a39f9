//! Numbers in memory that load as lanes of `f32`.

use super::lanes::Lanes;
use crate::memory::Plain;
use half::{bf16, f16};

/// A type of numbers that load as lanes of `f32`, and that lanes are rounded to when stored.
pub(crate) trait Element: Plain + Default {
    fn load<L: Lanes>(x: &[Self; 16]) -> L;
    fn store<L: Lanes>(x: L, to: &mut [Self; 16]);
    /// The number as `f32`.
    fn widen(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    fn load<L: Lanes>(x: &[f32; 16]) -> L {
        L::load(x)
    }
    #[inline(always)]
    fn store<L: Lanes>(x: L, to: &mut [f32; 16]) {
        x.store(to);
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn load<L: Lanes>(x: &[bf16; 16]) -> L {
        L::load_bf16(x)
    }
    #[inline(always)]
    fn store<L: Lanes>(x: L, to: &mut [bf16; 16]) {
        x.store_bf16(to);
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

impl Element for f16 {
    #[inline(always)]
    fn load<L: Lanes>(x: &[f16; 16]) -> L {
        L::load_f16(x)
    }
    #[inline(always)]
    fn store<L: Lanes>(x: L, to: &mut [f16; 16]) {
        x.store_f16(to);
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

/// Runs `$body` with `$t` as the Rust type of `$scalar`.
macro_rules! with_element {
    ($scalar:expr, $t:ident => $body:expr) => {
        match $scalar {
            quant::Scalar::F32 => {
                type $t = f32;
                $body
            }
            quant::Scalar::F16 => {
                type $t = half::f16;
                $body
            }
            quant::Scalar::Bf16 => {
                type $t = half::bf16;
                $body
            }
        }
    };
}
pub(crate) use with_element;
