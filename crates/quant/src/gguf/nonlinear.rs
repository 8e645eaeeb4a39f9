//! Blocks whose codes stand for levels of a table.
//!
//! ```text
//! iq4_nl: d qs[16]               32 columns, w = d T[q]
//! iq4_xs: d sh[2] sl[4] qs[128]  8 groups of 32, w = d (s − 32) T[q]
//! mxfp4:  e qs[16]               32 columns, w = 2^(e − 127) fp4[q]
//! nvfp4:  e[4] qs[32]            4 groups of 16, w = E4M3(e) fp4[q]
//! ```
//!
//! Levels of `fp4` are doubled to make them integers and scales halved, which
//! changes no value.

use crate::block::{self, Block, Pieces, half, nibbles, put_half, put_nibbles};
use crate::gguf::fit::{self, fit_k_levels, fit_levels};
use crate::small::E2M1_DOUBLED as FP4;
use crate::{Code, Codes, Format, Owned, Scalar, ScaleType, Stored, Zero, scaled};

/// The levels of `iq4_nl` and `iq4_xs`.
const IQ4: &[i8] = &[
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

const fn view(group: usize, super_group: usize, scale: Scalar, levels: &'static [i8]) -> Codes {
    Codes {
        bits: 4,
        group,
        super_group,
        scale: Some(scale),
        zero: Zero::Levels(levels),
        rotated: None,
    }
}

/// GGUF's blocks whose codes are looked up in a table of levels: iq4_nl, iq4_xs, mxfp4
/// and nvfp4.
pub const NONLINEAR: &[Format] = &[
    block::format(
        "iq4_nl",
        20,
        (32, 18),
        view(32, 32, Scalar::F16, IQ4),
        Block {
            read: read_nl,
            write: write_nl,
            fit: Some(fit_levels),
        },
    ),
    block::format(
        "iq4_xs",
        23,
        (256, 136),
        view(32, 256, Scalar::F32, IQ4),
        Block {
            read: read_xs,
            write: write_xs,
            fit: Some(|v, x, p| fit_k_levels(v, fit::SIX_BITS, x, p)),
        },
    ),
    block::format(
        "mxfp4",
        39,
        (32, 17),
        view(32, 32, Scalar::Bf16, FP4),
        Block {
            read: read_mx,
            write: write_mx,
            fit: Some(fit_mx),
        },
    ),
    block::format(
        "nvfp4",
        40,
        (64, 36),
        view(16, 16, Scalar::F16, FP4),
        Block {
            read: read_nv,
            write: write_nv,
            fit: None,
        },
    ),
];

fn read_nl(block: &[u8], p: &mut Pieces) {
    p.d[0] = half(block, 0);
    nibbles(&block[2..], &mut p.codes);
}

fn write_nl(p: &Pieces, block: &mut [u8]) {
    put_half(block, 0, p.d[0]);
    put_nibbles(&mut block[2..], &p.codes[..32]);
}

fn read_xs(block: &[u8], p: &mut Pieces) {
    p.d[0] = half(block, 0);
    for j in 0..8 {
        let (low, high) = (
            block[4 + j / 2] >> (j % 2 * 4) & 15,
            block[2 + j / 4] >> (j % 4 * 2) & 3,
        );
        p.scales[j] = (low | high << 4) as i8 - 32;
    }
    let codes = p.codes.chunks_exact_mut(32);
    block[8..]
        .chunks_exact(16)
        .zip(codes)
        .for_each(|(packed, codes)| nibbles(packed, codes));
}

fn write_xs(p: &Pieces, block: &mut [u8]) {
    put_half(block, 0, p.d[0]);
    for j in 0..8 {
        let six = (p.scales[j] + 32) as u8;
        block[4 + j / 2] |= (six & 15) << (j % 2 * 4);
        block[2 + j / 4] |= (six >> 4) << (j % 4 * 2);
    }
    let codes = p.codes.chunks_exact(32);
    block[8..]
        .chunks_exact_mut(16)
        .zip(codes)
        .for_each(|(packed, codes)| put_nibbles(packed, codes));
}

/// `2^(e − 128)`: half of what the byte `e` means.
fn half_e8m0(e: u8) -> f32 {
    f32::from_bits(if e < 2 {
        0x0020_0000 << e
    } else {
        u32::from(e - 1) << 23
    })
}

fn read_mx(block: &[u8], p: &mut Pieces) {
    p.d[0] = half_e8m0(block[0]);
    nibbles(&block[1..], &mut p.codes);
}

fn write_mx(p: &Pieces, block: &mut [u8]) {
    let bits = p.d[0].to_bits();
    block[0] = if bits < 0x0080_0000 {
        (bits >> 22) as u8
    } else {
        (bits >> 23) as u8 + 1
    };
    put_nibbles(&mut block[1..], &p.codes[..32]);
}

/// Half of an unsigned E4M3; the bytes `0x7f` and `0xff`, no numbers, count as 0.
fn half_e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (byte >> 3 & 15, f32::from(byte & 7));
    match (exponent, byte & 0x7f) {
        (_, 0x7f) => 0.0,
        (0, _) => mantissa / 1024.0,
        _ => (8.0 + mantissa) * f32::from_bits((u32::from(exponent) + 127 - 11) << 23),
    }
}

fn read_nv(block: &[u8], p: &mut Pieces) {
    for b in 0..4 {
        p.d[b] = half_e4m3(block[b]);
        nibbles(&block[4 + 8 * b..][..8], &mut p.codes[16 * b..]);
    }
}

fn write_nv(p: &Pieces, block: &mut [u8]) {
    for b in 0..4 {
        let same = |byte: &u8| half_e4m3(*byte) == p.d[b];
        block[b] = (0..0x7f)
            .find(same)
            .expect("a scale that was read from a byte");
        put_nibbles(&mut block[4 + 8 * b..][..8], &p.codes[16 * b..][..16]);
    }
}

/// Rows of `nvfp4` whose scales have a factor besides, row `i` that of `factor(i)`.
///
/// Blocks have no place for it, so codes and scales come apart, as `fp4-nv`.
///
/// # Panics
///
/// If `stored` is in another format.
pub fn nvfp4_times(stored: &Stored<'_>, factor: impl Fn(usize) -> f64) -> Owned {
    assert_eq!(stored.format.name, "nvfp4", "blocks that can have a factor");
    let format = scaled(4, Code::E2m1, ScaleType::E4m3, 16, stored.cols);
    let mut out = Owned {
        format: format.expect("whole blocks are whole groups"),
        ..Owned::gather(stored, [])
    };
    (out.rows, out.width) = (stored.rows, 16);
    out.factors = (0..stored.rows).map(factor).collect();
    for block in stored.codes.chunks_exact(36) {
        let (scales, groups) = block.split_at(4);
        // What is no number elsewhere is 0 here, and there is no sign.
        let scales = scales.iter().map(|scale| scale & 0x7f);
        out.scales
            .extend(scales.map(|s| if s == 0x7f { 0 } else { s }));
        for group in groups.chunks_exact(8) {
            let mut codes = [0; 16];
            nibbles(group, &mut codes);
            let pairs = codes.chunks_exact(2);
            out.codes.extend(pairs.map(|pair| pair[0] | pair[1] << 4));
        }
    }
    out
}

/// The power of two that leaves the largest value two places above one, and the
/// nearest levels: what GGUF's own tools choose.
fn fit_mx(view: &Codes, x: &[f32], p: &mut Pieces) {
    let top = x.iter().fold(0.0f32, |top, x| top.max(x.abs()));
    // Exponent bits are the floor of the logarithm, of subnormal numbers a bound.
    let e = ((top.to_bits() >> 23) as u8).saturating_sub(2);
    p.d[0] = half_e8m0(e);
    fit::choose(view, x, p);
}
