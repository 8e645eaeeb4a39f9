//! Blocks of 32 columns that were rotated before they were coded
//! (TurboQuant, arXiv:2504.19874, in the weight types of llama.cpp forks).
//!
//! ```text
//! tq3_1s: d0 d1, then 4 groups of 8 three-bit indices     y_j = W[idx_j] d_{j/16}
//! tq4_1s: d0 d1 qs[16], even columns low                  w = R⁻¹ y
//! ```
//!
//! with the rotation `R` of [`Rotated`]. As codes, a half of a block is a group of 16 columns with
//! the scale `d`, and the levels are integers near `W / step`: at most 0.012 from `W`, which has
//! unit variance, and 0.0032 (`tq4_1s`) or 0.0024 (`tq3_1s`) in the root of the mean square, where
//! the formats themselves err by 0.073 and 0.151. `step` is the one with the least such error.
//!
//! Codes are chosen as the forks' own encoder does, bit for bit where that is compiled without
//! contracted multiply-adds; but scales beyond half precision become its largest number and not
//! infinity.

use crate::block::{self, Block, Pieces, half, put_half, to_half};
use crate::rotated::{self, Rotated};
use crate::{Codes, Format, Row, Scalar, WeightLayout, Zero};

const W3: [f32; 8] = [
    -1.996684, -1.291398, -0.740341, -0.247508, 0.230106, 0.725222, 1.277503, 1.988943,
];

/// Where the nearest of [`W3`] changes.
const BETWEEN3: [f32; 7] = [
    -1.644041, -1.01587, -0.493925, -0.008701, 0.477664, 1.001363, 1.633223,
];

const LEVELS3: [i8; 8] = [-113, -73, -42, -14, 13, 41, 72, 112];

const STEP3: f32 = 0.017_704_26;

const W4: [f32; 16] = [
    -2.73259, -2.069017, -1.618046, -1.256231, -0.942340, -0.656759, -0.388048, -0.128395,
    0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.73259,
];

/// Where the nearest of [`W4`] changes.
const BETWEEN4: [f32; 15] = [
    -2.400804, -1.843532, -1.437139, -1.099286, -0.799550, -0.522404, -0.258222, 0.0, 0.258222,
    0.522404, 0.799550, 1.099286, 1.437139, 1.843532, 2.400804,
];

const LEVELS4: [i8; 16] = [
    -104, -79, -62, -48, -36, -25, -15, -5, 5, 15, 25, 36, 48, 62, 79, 104,
];

const STEP4: f32 = 0.026_168_65;

/// Scales that are tried, as parts of the root of a half's mean square.
const TRIED: [f32; 9] = [0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5];

/// Rounds of choosing codes and then the best scale for them.
const ROUNDS: usize = 6;

/// What is no larger counts as zero.
const TINY: f32 = 1e-10;

const fn of(
    name: &'static str,
    ggml: u32,
    (bits, bytes): (u8, u16),
    (levels, step, own): (&'static [i8], f32, &'static [f32]),
    block: Block,
) -> Format {
    Format {
        name,
        layout: WeightLayout::Block { cols: 32, bytes },
        block: 32,
        ggml: Some(ggml),
        view: Some(Codes {
            bits,
            group: 16,
            super_group: 16,
            scale: Some(Scalar::F16),
            zero: Zero::Levels(levels),
            rotated: Some(Rotated { step, levels: own }),
        }),
        pieces: Some(block),
        decode,
        encode: Some(block::encode),
    }
}

/// GGUF's blocks of rotated columns: tq3_1s and tq4_1s.
pub const TURBO: &[Format] = &[
    of(
        "tq3_1s",
        45,
        (3, 16),
        (&LEVELS3, STEP3, &W3),
        Block {
            read: read3,
            write: write3,
            fit: Some(|_, x, p| fit(&W3, &BETWEEN3, x, p)),
        },
    ),
    of(
        "tq4_1s",
        46,
        (4, 20),
        (&LEVELS4, STEP4, &W4),
        Block {
            read: read4,
            write: write4,
            fit: Some(|_, x, p| fit(&W4, &BETWEEN4, x, p)),
        },
    ),
];

fn read3(block: &[u8], p: &mut Pieces) {
    (p.d[0], p.d[1]) = (half(block, 0), half(block, 2));
    let eights = p.codes.as_chunks_mut::<8>().0.iter_mut();
    for (codes, word) in eights.zip(block[4..].as_chunks::<3>().0) {
        let word = u32::from_le_bytes([word[0], word[1], word[2], 0]);
        *codes = std::array::from_fn(|i| (word >> (3 * i) & 7) as u8);
    }
}

fn write3(p: &Pieces, block: &mut [u8]) {
    put_half(block, 0, p.d[0]);
    put_half(block, 2, p.d[1]);
    let words = block[4..].as_chunks_mut::<3>().0.iter_mut();
    for (to, codes) in words.zip(p.codes.as_chunks::<8>().0) {
        let codes = codes.iter().enumerate();
        let word = codes.fold(0, |word, (i, &code)| word | u32::from(code) << (3 * i));
        to.copy_from_slice(&word.to_le_bytes()[..3]);
    }
}

fn read4(block: &[u8], p: &mut Pieces) {
    (p.d[0], p.d[1]) = (half(block, 0), half(block, 2));
    let pairs = p.codes.as_chunks_mut::<2>().0.iter_mut();
    for (codes, byte) in pairs.zip(&block[4..]) {
        *codes = [byte & 15, byte >> 4];
    }
}

fn write4(p: &Pieces, block: &mut [u8]) {
    put_half(block, 0, p.d[0]);
    put_half(block, 2, p.d[1]);
    let pairs = p.codes.as_chunks::<2>().0;
    for (to, [low, high]) in block[4..].iter_mut().zip(pairs) {
        *to = low | high << 4;
    }
}

fn decode(format: &Format, row: Row<'_>, out: &mut [f32]) {
    let rotated = format.view.and_then(|view| view.rotated);
    let levels = rotated.expect("formats of rotated columns").levels;
    block::each(format, row, |first, pieces| {
        let out = &mut out[first..][..32];
        let out: &mut [f32; 32] = out.try_into().expect("a block");
        for (j, value) in out.iter_mut().enumerate() {
            *value = levels[usize::from(pieces.codes[j])] * pieces.d[j / 16];
        }
        rotated::undo(out);
    });
}

/// The code of the level that is nearest to `x`; the last one if `x` is no number. Counts, because
/// that takes no branches.
fn nearest<const N: usize>(between: &[f32; N], x: f32) -> usize {
    N - between.iter().map(|&b| usize::from(x < b)).sum::<usize>()
}

/// What values are divided by, as a factor.
fn inverse(d: f32) -> f32 {
    if d > TINY { 1.0 / d } else { 0.0 }
}

/// Scales that both halves are tried with at once, and from the best pair on the one that is best
/// for the codes, and codes for it, some times.
fn fit<const N: usize>(levels: &[f32], between: &[f32; N], x: &[f32], p: &mut Pieces) {
    let mut y: [f32; 32] = x.try_into().expect("a block");
    rotated::rotate(&mut y);
    let halves = y.as_chunks::<16>().0;
    let level = |y: f32, inverse: f32| levels[nearest(between, y * inverse)];
    let rms = |y: &[f32; 16]| (y.iter().fold(0.0, |sum, y| sum + y * y) / 16.0).sqrt();
    let rms = [rms(&halves[0]), rms(&halves[1])];
    let (mut d, mut least) = (rms, 1e30f32);
    for tried in TRIED {
        let scales = rms.map(|rms| rms * tried);
        let mut error = 0.0;
        for (y, d) in halves.iter().zip(scales) {
            for &y in y {
                let off = y - level(y, inverse(d)) * d;
                error += off * off;
            }
        }
        if error < least {
            (d, least) = (scales, error);
        }
    }
    for (y, d) in halves.iter().zip(&mut d) {
        for _ in 0..ROUNDS {
            let (mut product, mut square) = (0.0, 0.0);
            for &y in y {
                let level = level(y, inverse(*d));
                product += y * level;
                square += level * level;
            }
            if square > TINY {
                *d = product / square;
            }
        }
    }
    for ((codes, y), d) in p.codes.chunks_exact_mut(16).zip(halves).zip(d) {
        for (code, &y) in codes.iter_mut().zip(y) {
            *code = nearest(between, y * inverse(d)) as u8;
        }
    }
    (p.d[0], p.d[1]) = (to_half(d[0]), to_half(d[1]));
}
