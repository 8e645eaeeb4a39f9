//! Blocks of 256 columns with integer sub-scales under one or two halves.
//!
//! ```text
//! q2_k: s[16] qs[64] d dmin            groups of 16, w = d lo(s) q − dmin hi(s)
//! q3_k: hmask[32] qs[64] s[12] d       groups of 16, w = d (s − 32) (q − 4)
//! q4_k: d dmin s[12] qs[128]           groups of 32, w = d sc q − dmin mn
//! q5_k: d dmin s[12] qh[32] qs[128]    as q4_k, with fifth bits
//! q6_k: ql[128] qh[64] s[16] d         groups of 16, w = d s (q − 32)
//! ```

use crate::block::{self, Block, Pieces, half, levels, nibbles, put_half, put_nibbles};
use crate::gguf::fit::{self, fit_k_bias, fit_k_levels};
use crate::{Codes, Format, Scalar, Zero};

const fn of(
    name: &'static str,
    ggml: u32,
    bytes: u16,
    (bits, group): (u8, usize),
    zero: Zero,
    block: Block,
) -> Format {
    let view = Codes {
        bits,
        group,
        super_group: 256,
        scale: Some(Scalar::F32),
        zero,
        rotated: None,
    };
    block::format(name, ggml, (256, bytes), view, block)
}

/// GGUF's K-quants, blocks of 256 columns with scales of scales: q2_k to q6_k.
pub const K_QUANTS: &[Format] = &[
    of(
        "q2_k",
        10,
        84,
        (2, 16),
        Zero::Bias,
        Block {
            read: read_q2,
            write: write_q2,
            fit: Some(|v, x, p| fit_k_bias(v, 15, x, p)),
        },
    ),
    of(
        "q3_k",
        11,
        110,
        (3, 16),
        Zero::Levels(&levels::<8>(4)),
        Block {
            read: read_q3,
            write: write_q3,
            fit: Some(|v, x, p| fit_k_levels(v, fit::SIX_BITS, x, p)),
        },
    ),
    of(
        "q4_k",
        12,
        144,
        (4, 32),
        Zero::Bias,
        Block {
            read: read_q4,
            write: write_q4,
            fit: Some(|v, x, p| fit_k_bias(v, 63, x, p)),
        },
    ),
    of(
        "q5_k",
        13,
        176,
        (5, 32),
        Zero::Bias,
        Block {
            read: read_q5,
            write: write_q5,
            fit: Some(|v, x, p| fit_k_bias(v, 63, x, p)),
        },
    ),
    of(
        "q6_k",
        14,
        210,
        (6, 16),
        Zero::Levels(&levels::<64>(32)),
        Block {
            read: read_q6,
            write: write_q6,
            fit: Some(|v, x, p| fit_k_levels(v, fit::EIGHT_BITS, x, p)),
        },
    ),
];

/// `d`, and `−dmin`: biases are subtracted.
fn halves(block: &[u8], at: usize, p: &mut Pieces) {
    (p.d[0], p.m[0]) = (half(block, at), -half(block, at + 2));
}

fn put_halves(block: &mut [u8], at: usize, p: &Pieces) {
    put_half(block, at, p.d[0]);
    put_half(block, at + 2, -p.m[0]);
}

/// Pairs of bits, four columns 32 apart to a byte.
fn pairs(packed: &[u8], mut each: impl FnMut(usize, u8)) {
    for i in 0..256 {
        each(i, packed[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3);
    }
}

/// The inverse of [`pairs`].
fn put_pairs(packed: &mut [u8], pair: impl Fn(usize) -> u8) {
    for i in 0..256 {
        packed[i / 128 * 32 + i % 32] |= pair(i) << (i % 128 / 32 * 2);
    }
}

fn read_q2(block: &[u8], p: &mut Pieces) {
    for (g, s) in block[..16].iter().enumerate() {
        (p.scales[g], p.mins[g]) = ((s & 15) as i8, (s >> 4) as i8);
    }
    pairs(&block[16..80], |i, q| p.codes[i] = q);
    halves(block, 80, p);
}

fn write_q2(p: &Pieces, block: &mut [u8]) {
    for (g, s) in block[..16].iter_mut().enumerate() {
        *s = p.scales[g] as u8 | (p.mins[g] as u8) << 4;
    }
    put_pairs(&mut block[16..80], |i| p.codes[i]);
    put_halves(block, 80, p);
}

/// Where the third bit of column `i` lies: byte and bit.
fn third(i: usize) -> (usize, usize) {
    (i % 32, i / 32)
}

/// Where `q3_k` has scale `g`: byte and shift of its low four bits, then of its
/// high two.
fn scale_q3(g: usize) -> [(usize, usize); 2] {
    [(g % 8, g / 8 * 4), (8 + g % 4, g / 4 * 2)]
}

fn read_q3(block: &[u8], p: &mut Pieces) {
    let s = &block[96..108];
    for g in 0..16 {
        let [low, high] = scale_q3(g);
        let six = s[low.0] >> low.1 & 15 | (s[high.0] >> high.1 & 3) << 4;
        p.scales[g] = six as i8 - 32;
    }
    pairs(&block[32..96], |i, q| {
        let (byte, bit) = third(i);
        p.codes[i] = q | (block[byte] >> bit & 1) << 2;
    });
    p.d[0] = half(block, 108);
}

fn write_q3(p: &Pieces, block: &mut [u8]) {
    for g in 0..16 {
        let [low, high] = scale_q3(g);
        let six = (p.scales[g] + 32) as u8;
        block[96 + low.0] |= (six & 15) << low.1;
        block[96 + high.0] |= (six >> 4) << high.1;
    }
    for i in 0..256 {
        let (byte, bit) = third(i);
        block[byte] |= (p.codes[i] >> 2) << bit;
    }
    put_pairs(&mut block[32..96], |i| p.codes[i] & 3);
    put_half(block, 108, p.d[0]);
}

/// Eight scales and eight mins of six bits each in twelve bytes.
fn sixes(s: &[u8], p: &mut Pieces) {
    for j in 0..8 {
        let (scale, min) = if j < 4 {
            (s[j] & 63, s[j + 4] & 63)
        } else {
            let (low, scale, min) = (s[j + 4], s[j - 4] >> 6, s[j] >> 6);
            (low & 15 | scale << 4, low >> 4 | min << 4)
        };
        (p.scales[j], p.mins[j]) = (scale as i8, min as i8);
    }
}

/// The inverse of [`sixes`].
fn put_sixes(s: &mut [u8], p: &Pieces) {
    for j in 0..8 {
        let (scale, min) = (p.scales[j] as u8, p.mins[j] as u8);
        if j < 4 {
            s[j] |= scale;
            s[j + 4] |= min;
        } else {
            s[j + 4] = scale & 15 | min << 4;
            s[j - 4] |= scale >> 4 << 6;
            s[j] |= min >> 4 << 6;
        }
    }
}

/// 64 columns to 32 bytes: the low nibbles, then the high ones.
fn fours(packed: &[u8], p: &mut Pieces) {
    let codes = p.codes.chunks_exact_mut(64);
    packed
        .chunks_exact(32)
        .zip(codes)
        .for_each(|(packed, codes)| nibbles(packed, codes));
}

fn put_fours(packed: &mut [u8], p: &Pieces) {
    let codes = p.codes.chunks_exact(64);
    packed
        .chunks_exact_mut(32)
        .zip(codes)
        .for_each(|(packed, codes)| put_nibbles(packed, codes));
}

fn read_q4(block: &[u8], p: &mut Pieces) {
    halves(block, 0, p);
    sixes(&block[4..16], p);
    fours(&block[16..], p);
}

fn write_q4(p: &Pieces, block: &mut [u8]) {
    put_halves(block, 0, p);
    put_sixes(&mut block[4..16], p);
    put_fours(&mut block[16..], p);
}

fn read_q5(block: &[u8], p: &mut Pieces) {
    halves(block, 0, p);
    sixes(&block[4..16], p);
    fours(&block[48..], p);
    for (i, code) in p.codes.iter_mut().enumerate() {
        *code |= (block[16 + i % 32] >> (i / 32) & 1) << 4;
    }
}

fn write_q5(p: &Pieces, block: &mut [u8]) {
    put_halves(block, 0, p);
    put_sixes(&mut block[4..16], p);
    put_fours(&mut block[48..], p);
    for (i, code) in p.codes.iter().enumerate() {
        block[16 + i % 32] |= (code >> 4) << (i / 32);
    }
}

/// 128 columns to 64 bytes: the low nibbles, then the high ones.
fn read_q6(block: &[u8], p: &mut Pieces) {
    let codes = p.codes.chunks_exact_mut(128);
    block[..128]
        .chunks_exact(64)
        .zip(codes)
        .for_each(|(packed, codes)| nibbles(packed, codes));
    pairs(&block[128..192], |i, q| p.codes[i] |= q << 4);
    let scales = p.scales.iter_mut().zip(&block[192..208]);
    scales.for_each(|(scale, &byte)| *scale = byte as i8);
    p.d[0] = half(block, 208);
}

fn write_q6(p: &Pieces, block: &mut [u8]) {
    let codes = p.codes.chunks_exact(128);
    block[..128]
        .chunks_exact_mut(64)
        .zip(codes)
        .for_each(|(packed, codes)| put_nibbles(packed, codes));
    put_pairs(&mut block[128..192], |i| p.codes[i] >> 4);
    let scales = block[192..208].iter_mut().zip(&p.scales);
    scales.for_each(|(byte, &scale)| *byte = scale as u8);
    put_half(block, 208, p.d[0]);
}
