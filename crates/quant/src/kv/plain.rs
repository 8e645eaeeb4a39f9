//! Keys and values as plain elements.

use super::{KvLayout, KvRowFormat};
use crate::{Scalar, plain};

/// Keys or values in IEEE single precision.
pub const F32: KvRowFormat = KvRowFormat::like(&plain::F32, KvLayout::Plain(Scalar::F32));
/// Keys or values in IEEE half precision.
pub const F16: KvRowFormat = KvRowFormat::like(&plain::F16, KvLayout::Plain(Scalar::F16));
/// Keys or values as the upper halves of `f32`s.
pub const BF16: KvRowFormat = KvRowFormat::like(&plain::BF16, KvLayout::Plain(Scalar::Bf16));
