//! Keys and values as codes in groups of 32 columns with an `f16` scale each: the
//! blocks of GGUF files without a bias. The formats named `rot-` have the same blocks of
//! rows that were rotated before ([`Rotation`]).

use super::rotation::{HALF, Rotation};
use super::{KvLayout, KvRowFormat};
use crate::Format;
use crate::gguf::{Q4_0 as Q4_0_WEIGHTS, Q5_0 as Q5_0_WEIGHTS, Q8_0 as Q8_0_WEIGHTS};

/// Blocks of `weights`, whose codes have `bits` and mean 0 in the middle.
const fn of(weights: &'static Format, bits: u8) -> KvRowFormat {
    KvRowFormat::like(
        weights,
        KvLayout::Coded {
            bits,
            group: 32,
            offset: 1 << (bits - 1),
        },
    )
}

/// `plain` under another name, of rows that are rotated first.
const fn rotated(name: &'static str, plain: KvRowFormat) -> KvRowFormat {
    KvRowFormat {
        name,
        block: HALF,
        rotation: Some(Rotation::Groups64),
        ..plain
    }
}

/// Keys or values in 8 bits: `value = scale · (code − 128)`.
pub const Q8_0: KvRowFormat = of(&Q8_0_WEIGHTS, 8);
/// Keys or values in 5 bits: `value = scale · (code − 16)`.
pub const Q5_0: KvRowFormat = of(&Q5_0_WEIGHTS, 5);
/// Keys or values in 4 bits: `value = scale · (code − 8)`.
pub const Q4_0: KvRowFormat = of(&Q4_0_WEIGHTS, 4);

/// [`Q8_0`] of rotated rows.
pub const ROT_Q8_0: KvRowFormat = rotated("rot-q8_0", Q8_0);
/// [`Q5_0`] of rotated rows.
pub const ROT_Q5_0: KvRowFormat = rotated("rot-q5_0", Q5_0);
/// [`Q4_0`] of rotated rows.
pub const ROT_Q4_0: KvRowFormat = rotated("rot-q4_0", Q4_0);
