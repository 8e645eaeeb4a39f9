//! Keys and values as codes in groups of 32 columns with an `f16` scale each: the
//! blocks of GGUF files without a bias.

use super::{KvLayout, KvRowFormat};
use crate::gguf::{Q4_0 as Q4_0_WEIGHTS, Q8_0 as Q8_0_WEIGHTS};

/// Keys or values in 8 bits: `value = scale · (code − 128)`.
pub const Q8_0: KvRowFormat = KvRowFormat::like(
    &Q8_0_WEIGHTS,
    KvLayout::Coded {
        bits: 8,
        group: 32,
        offset: 128,
    },
);

/// Keys or values in 4 bits: `value = scale · (code − 8)`.
pub const Q4_0: KvRowFormat = KvRowFormat::like(
    &Q4_0_WEIGHTS,
    KvLayout::Coded {
        bits: 4,
        group: 32,
        offset: 8,
    },
);
