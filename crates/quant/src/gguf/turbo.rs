//! Blocks of 32 columns that were rotated before they were coded
//! (TurboQuant, arXiv:2504.19874, in the weight types of llama.cpp forks).
//!
//! ```text
//! tq3_1s: d0 d1, then 4 groups of 8 three-bit indices     y_j = W[idx_j] d_{j/16}
//! tq4_1s: d0 d1 qs[16], even columns low                  w = D(s) H/√32 y
//! ```
//!
//! `H` is the Hadamard butterfly and `D(s)` fixed signs, so a value depends on all
//! codes of its block: there is no view as codes, and rows are only decoded.
//! Deliberately absent: an encoder; at its size the format errs more than others.

use crate::block::half;
use crate::{Format, Row, WeightLayout};

const W3: [f32; 8] = [
    -1.996684, -1.291398, -0.740341, -0.247508, 0.230106, 0.725222, 1.277503, 1.988943,
];

const W4: [f32; 16] = [
    -2.73259, -2.069017, -1.618046, -1.256231, -0.942340, -0.656759, -0.388048, -0.128395,
    0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.73259,
];

/// Column `i` changes its sign where bit `i` is set: the signs of
/// `frac(i · 0.618…) ≥ 1/2`.
const SIGNS: u32 = 0x696B_4B4A;

const fn of(
    name: &'static str,
    ggml: u32,
    bytes: u16,
    decode: fn(&Format, Row<'_>, &mut [f32]),
) -> Format {
    Format {
        name,
        layout: WeightLayout::Block { cols: 32, bytes },
        block: 32,
        ggml: Some(ggml),
        view: None,
        pieces: None,
        decode,
        encode: None,
    }
}

/// GGUF's blocks of rotated columns, which can only be read: tq3_1s and tq4_1s.
pub const TURBO: &[Format] = &[
    of("tq3_1s", 45, 16, |_, row, out| {
        decode(row, out, 16, |block, j| {
            let word = &block[4 + j / 8 * 3..][..3];
            let word = u32::from_le_bytes([word[0], word[1], word[2], 0]);
            W3[(word >> (j % 8 * 3) & 7) as usize]
        })
    }),
    of("tq4_1s", 46, 20, |_, row, out| {
        decode(row, out, 20, |block, j| {
            W4[usize::from(block[4 + j / 2] >> (j % 2 * 4) & 15)]
        })
    }),
];

fn decode(row: Row<'_>, out: &mut [f32], bytes: usize, level: fn(&[u8], usize) -> f32) {
    for (block, out) in row
        .codes
        .chunks_exact(bytes)
        .zip(out.as_chunks_mut::<32>().0)
    {
        let d = [half(block, 0), half(block, 2)];
        for (j, value) in out.iter_mut().enumerate() {
            *value = level(block, j) * d[j / 16];
        }
        unrotate(out);
    }
}

/// `D(s) H/√32`, smallest steps first.
fn unrotate(y: &mut [f32; 32]) {
    let mut step = 1;
    while step < 32 {
        for i in (0..32).filter(|i| i & step == 0) {
            (y[i], y[i + step]) = (y[i] + y[i + step], y[i] - y[i + step]);
        }
        step *= 2;
    }
    let scale = 1.0 / 32f32.sqrt();
    for (i, value) in y.iter_mut().enumerate() {
        let signed = if SIGNS >> i & 1 == 1 { -scale } else { scale };
        *value *= signed;
    }
}
