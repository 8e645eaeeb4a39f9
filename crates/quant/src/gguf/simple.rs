//! Blocks of 32 columns with a scale, and a bias or none.
//!
//! ```text
//! q4_0: d qs[16]       q5_0: d qh[4] qs[16]       q8_0: d qs[32]
//! q4_1: d m qs[16]     q5_1: d m qh[4] qs[16]
//! ```
//!
//! Low nibbles are columns 0 to 15, high ones 16 to 31; `qh` has the fifth bits.
//! Codes are chosen as GGUF's own tools do, bit for bit.

use crate::block::{self, Block, Pieces, half, levels, nibbles, put_half, put_nibbles, to_half};
use crate::{Codes, Format, Scalar, Zero};

const fn of(
    name: &'static str,
    ggml: u32,
    bytes: u16,
    bits: u8,
    zero: Zero,
    block: Block,
) -> Format {
    let view = Codes {
        bits,
        group: 32,
        super_group: 32,
        scale: Some(Scalar::F16),
        zero,
        rotated: None,
    };
    block::format(name, ggml, (32, bytes), view, block)
}

/// Blocks of 32 codes in 4 bits with a scale.
pub(crate) const Q4_0: Format = of(
    "q4_0",
    2,
    18,
    4,
    Zero::Levels(&levels::<16>(8)),
    Block {
        read: read_q4_0,
        write: write_q4_0,
        fit: Some(fit_symmetric),
    },
);
/// Blocks of 32 codes in 5 bits with a scale.
pub(crate) const Q5_0: Format = of(
    "q5_0",
    6,
    22,
    5,
    Zero::Levels(&levels::<32>(16)),
    Block {
        read: read_q5_0,
        write: write_q5_0,
        fit: Some(fit_symmetric),
    },
);
/// Blocks of 32 codes in 8 bits with a scale.
pub(crate) const Q8_0: Format = of(
    "q8_0",
    8,
    34,
    8,
    Zero::Levels(&levels::<256>(128)),
    Block {
        read: read_q8_0,
        write: write_q8_0,
        fit: Some(fit_q8_0),
    },
);

/// GGUF's blocks of 32 columns with one scale, and one bias or none: q4_0 to q8_0.
pub const SIMPLE: &[Format] = &[
    Q4_0,
    of(
        "q4_1",
        3,
        20,
        4,
        Zero::Bias,
        Block {
            read: read_q4_1,
            write: write_q4_1,
            fit: Some(fit_range),
        },
    ),
    Q5_0,
    of(
        "q5_1",
        7,
        24,
        5,
        Zero::Bias,
        Block {
            read: read_q5_1,
            write: write_q5_1,
            fit: Some(fit_range),
        },
    ),
    Q8_0,
];

fn read_q4_0(block: &[u8], p: &mut Pieces) {
    p.d[0] = half(block, 0);
    nibbles(&block[2..], &mut p.codes);
}

fn write_q4_0(p: &Pieces, block: &mut [u8]) {
    put_half(block, 0, p.d[0]);
    put_nibbles(&mut block[2..], &p.codes[..32]);
}

fn read_q4_1(block: &[u8], p: &mut Pieces) {
    p.m[0] = half(block, 2);
    p.d[0] = half(block, 0);
    nibbles(&block[4..], &mut p.codes);
}

fn write_q4_1(p: &Pieces, block: &mut [u8]) {
    put_half(block, 0, p.d[0]);
    put_half(block, 2, p.m[0]);
    put_nibbles(&mut block[4..], &p.codes[..32]);
}

/// Fifth bits from four bytes.
fn fifth_bits(bits: &[u8], codes: &mut [u8]) {
    for (i, code) in codes[..32].iter_mut().enumerate() {
        *code |= (bits[i / 8] >> (i % 8) & 1) << 4;
    }
}

fn put_fifth_bits(bits: &mut [u8], codes: &[u8]) {
    for (i, code) in codes[..32].iter().enumerate() {
        bits[i / 8] |= (code >> 4) << (i % 8);
    }
}

fn read_q5_0(block: &[u8], p: &mut Pieces) {
    p.d[0] = half(block, 0);
    nibbles(&block[6..], &mut p.codes);
    fifth_bits(&block[2..6], &mut p.codes);
}

fn write_q5_0(p: &Pieces, block: &mut [u8]) {
    put_half(block, 0, p.d[0]);
    put_fifth_bits(&mut block[2..6], &p.codes);
    put_nibbles(&mut block[6..], &p.codes[..32]);
}

fn read_q5_1(block: &[u8], p: &mut Pieces) {
    (p.d[0], p.m[0]) = (half(block, 0), half(block, 2));
    nibbles(&block[8..], &mut p.codes);
    fifth_bits(&block[4..8], &mut p.codes);
}

fn write_q5_1(p: &Pieces, block: &mut [u8]) {
    put_half(block, 0, p.d[0]);
    put_half(block, 2, p.m[0]);
    put_fifth_bits(&mut block[4..8], &p.codes);
    put_nibbles(&mut block[8..], &p.codes[..32]);
}

fn read_q8_0(block: &[u8], p: &mut Pieces) {
    p.d[0] = half(block, 0);
    let codes = p.codes.iter_mut().zip(&block[2..]);
    codes.for_each(|(code, byte)| *code = byte ^ 0x80);
}

fn write_q8_0(p: &Pieces, block: &mut [u8]) {
    put_half(block, 0, p.d[0]);
    let bytes = block[2..].iter_mut().zip(&p.codes);
    bytes.for_each(|(byte, code)| *byte = code ^ 0x80);
}

/// `1 / d`, or 0 where there is no step.
fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// The value farthest from zero, the first of several, becomes the lowest level.
fn fit_symmetric(view: &Codes, x: &[f32], p: &mut Pieces) {
    let offset = (1 << (view.bits - 1)) as f32;
    let far = x
        .iter()
        .fold(0.0f32, |far, &x| if x.abs() > far.abs() { x } else { far });
    let d = far / -offset;
    for (code, &x) in p.codes.iter_mut().zip(x) {
        *code = (x * inverse(d) + (offset + 0.5)).clamp(0.0, 2.0 * offset - 1.0) as u8;
    }
    p.d[0] = to_half(d);
}

/// Codes run from the lowest value to the highest.
fn fit_range(view: &Codes, x: &[f32], p: &mut Pieces) {
    let top = ((1 << view.bits) - 1) as f32;
    let low = x.iter().copied().fold(f32::INFINITY, f32::min);
    let high = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let d = (high - low) / top;
    for (code, &x) in p.codes.iter_mut().zip(x) {
        *code = ((x - low) * inverse(d) + 0.5).clamp(0.0, top) as u8;
    }
    (p.d[0], p.m[0]) = (to_half(d), to_half(low));
}

fn fit_q8_0(_: &Codes, x: &[f32], p: &mut Pieces) {
    let d = x.iter().fold(0.0f32, |top, x| top.max(x.abs())) / 127.0;
    for (code, &x) in p.codes.iter_mut().zip(x) {
        *code = (x * inverse(d)).round() as i8 as u8 ^ 0x80;
    }
    p.d[0] = to_half(d);
}
