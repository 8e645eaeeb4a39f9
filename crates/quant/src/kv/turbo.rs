//! Keys or values rotated and then rounded to a few fixed levels (TurboQuant,
//! arXiv:2504.19874; the same scheme with other scales is DRIVE, NeurIPS 2021, and
//! EDEN, ICML 2022).
//!
//! ```text
//! a row is cut into groups of n = 128 columns, and one of 64 at its end if need be
//! y     = R x                                  Rotation::Groups128
//! idx_j = number of midpoints m ≤ y_j √n/‖x‖   between neighboring levels
//! scale = ‖x‖ / ‖level[idx]‖                   in f16: what is read has the norm of x
//! read    y'_j = level[idx_j] scale            rotated, as attention scores keys and adds values up
//! ```
//!
//! Rotated, the columns of any vector look like draws of one normal distribution, so the
//! levels that round such draws best need no calibration. A group lies as the `f16`
//! scale, the two low bits of every index (four bits in `turbo4`), and in `turbo3` the third bits.
//!
//! Deliberately absent: the residual of signs, which keys of other caches have.

use super::rotation::{self, HALF, Rotation};
use super::{KvLayout, KvRowFormat};
use crate::Scalar;

/// How rows are rotated before they are rounded to levels.
const ROTATION: Rotation = Rotation::Groups128;

/// Columns of a group; the last of a row may have half of them.
pub const GROUP: usize = rotation::GROUP;

/// Levels above zero, of a group of 128 with norm 1; those below mirror them. The best for
/// a normal distribution by Lloyd and Max.
const POSITIVE: [&[f32]; 3] = [
    &[0.039994, 0.133462],
    &[0.021460, 0.065717, 0.117832, 0.190685],
    &[
        0.011353, 0.034311, 0.058069, 0.083317, 0.111065, 0.143047, 0.182907, 0.241556,
    ],
];

/// Vectors shorter than this are zero.
const LEAST_NORM: f32 = 1e-10;

const fn of(name: &'static str, bits: u8) -> KvRowFormat {
    KvRowFormat {
        name,
        layout: KvLayout::Levels { bits },
        block: HALF,
        rotation: Some(ROTATION),
        same_as: None,
        encode,
        decode,
    }
}

/// Keys or values in 4 bits.
pub const TURBO4: KvRowFormat = of("turbo4", 4);
/// Keys or values in 3 bits.
pub const TURBO3: KvRowFormat = of("turbo3", 3);
/// Keys or values in 2 bits.
pub const TURBO2: KvRowFormat = of("turbo2", 2);

/// Bits of an index in a format that [`of`] makes.
fn bits_of(format: &KvRowFormat) -> u8 {
    match format.layout {
        KvLayout::Levels { bits } => bits,
        _ => unreachable!("only formats of levels are made here"),
    }
}

/// The levels of indices of `bits`, ascending: `2^bits` of them, and zeros behind.
pub const fn levels(bits: u8) -> [f32; 16] {
    let positive = POSITIVE[bits as usize - 2];
    let n = positive.len();
    let mut all = [0.0; 16];
    let mut i = 0;
    while i < n {
        all[n + i] = positive[i];
        all[n - 1 - i] = -positive[i];
        i += 1;
    }
    all
}

/// Bytes of a row of `cols` columns.
pub(crate) const fn row_bytes(bits: u8, cols: usize) -> usize {
    cols * bits as usize / 8 + cols.div_ceil(GROUP) * 2
}

/// Rotates one row and rounds it to levels: an index for each column in `codes`, a scale
/// for each group in `scales`. Leaves the levels in `row`.
///
/// # Panics
///
/// If the row is not whole groups, or a length does not fit it.
#[inline(always)]
pub fn round(bits: u8, row: &mut [f32], codes: &mut [u8], scales: &mut [f32]) {
    assert!(
        row.len().is_multiple_of(HALF)
            && codes.len() == row.len()
            && scales.len() == row.len().div_ceil(GROUP),
        "an index a column and a scale a group"
    );
    let groups = row.chunks_mut(GROUP).zip(codes.chunks_mut(GROUP));
    for ((group, codes), scale) in groups.zip(scales) {
        *scale = match bits {
            4 => round_group::<8>(POSITIVE[2], group, codes),
            3 => round_group::<4>(POSITIVE[1], group, codes),
            _ => round_group::<2>(POSITIVE[0], group, codes),
        };
    }
}

/// `N` levels on either side.
#[inline(always)]
fn round_group<const N: usize>(positive: &[f32], x: &mut [f32], codes: &mut [u8]) -> f32 {
    let norm = sum_of_squares(x).sqrt();
    if norm <= LEAST_NORM {
        codes.fill(N as u8);
        return 0.0;
    }
    ROTATION.rotate(x);
    // Levels are those of 128 columns of norm 1.
    let unit = (x.len() as f32 / GROUP as f32).sqrt() / norm;
    for (x, code) in x.iter_mut().zip(codes) {
        let y = *x * unit;
        // Midpoints are odd, so the size of `y` finds the level, and its sign the side; a zero
        // of either sign is above.
        let size = y.abs();
        let mut k = 0;
        for i in 1..N {
            k += u8::from(size >= 0.5 * (positive[i - 1] + positive[i]));
        }
        let (level, is_below) = (positive[usize::from(k)], y < 0.0);
        *x = level;
        *code = if is_below {
            N as u8 - 1 - k
        } else {
            N as u8 + k
        };
    }
    // What was rounded has the norm of what was not. What is not a number stays none.
    let scale = norm / sum_of_squares(x).sqrt();
    if scale > 65504.0 { 65504.0 } else { scale }
}

/// In 16 lanes, added as a tree.
#[inline(always)]
fn sum_of_squares(x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    for x in x.as_chunks::<16>().0 {
        for (lane, x) in lanes.iter_mut().zip(x) {
            *lane += x * x;
        }
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0]
}

fn encode(format: &KvRowFormat, values: &[f32], out: &mut Vec<u8>) {
    let bits = bits_of(format);
    let mut row = values.to_vec();
    let mut codes = vec![0; row.len()];
    let mut scales = vec![0.0; row.len().div_ceil(GROUP)];
    round(bits, &mut row, &mut codes, &mut scales);
    for (codes, &scale) in codes.chunks(GROUP).zip(&scales) {
        let start = out.len();
        out.resize(start + row_bytes(bits, codes.len()), 0);
        let group = &mut out[start..];
        Scalar::F16.put(group, 0, scale);
        let group = &mut group[2..];
        for (j, &code) in codes.iter().enumerate() {
            if bits == 4 {
                group[j / 2] |= code << (j % 2 * 4);
            } else {
                group[j / 4] |= (code & 3) << (j % 4 * 2);
                if bits == 3 {
                    group[codes.len() / 4 + j / 8] |= (code >> 2) << (j % 8);
                }
            }
        }
    }
}

fn decode(format: &KvRowFormat, row: &[u8], out: &mut [f32]) {
    let bits = bits_of(format);
    let levels = levels(bits);
    let mut rest = row;
    for out in out.chunks_mut(GROUP) {
        let (group, after) = rest.split_at(row_bytes(bits, out.len()));
        rest = after;
        let scale = Scalar::F16.get(group, 0);
        let group = &group[2..];
        let n = out.len();
        for (j, value) in out.iter_mut().enumerate() {
            let low = || group[j / 4] >> (j % 4 * 2) & 3;
            let code = match bits {
                4 => group[j / 2] >> (j % 2 * 4) & 15,
                3 => low() | (group[n / 4 + j / 8] >> (j % 8) & 1) << 2,
                _ => low(),
            };
            *value = levels[usize::from(code)] * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All formats of levels, the most exact first.
    const ALL: &[KvRowFormat] = &[TURBO4, TURBO3, TURBO2];

    /// Rows of `cols` columns, one after the other.
    fn encode_rows(format: &KvRowFormat, values: &[f32], cols: usize) -> Vec<u8> {
        let row = |row| {
            let mut out = Vec::new();
            format.encode(row, &mut out);
            out
        };
        values.chunks(cols).flat_map(row).collect()
    }

    /// What `bytes` hold, still rotated.
    fn decode_rows(format: &KvRowFormat, bytes: &[u8], cols: usize) -> Vec<f32> {
        let row = |row| {
            let mut out = vec![0.0; cols];
            format.decode(row, &mut out);
            out
        };
        bytes.chunks(format.row_bytes(cols)).flat_map(row).collect()
    }

    fn bytes(hex: &str) -> Vec<u8> {
        let digits = hex.as_bytes().chunks(2);
        let byte = |pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap();
        digits.map(byte).collect()
    }

    /// The bytes are those of another implementation; `turbo3` and `turbo2` are also what the
    /// scalar encoders of llama.cpp's forks write.
    #[test]
    fn groups_are_those_of_other_encoders() {
        let value = |i: i64| {
            let x = ((37 * i * i + 11 * i + 5) % 251 - 125) as f32 / 64.0;
            if i % 29 == 3 { 6.0 * x } else { x }
        };
        let row: Vec<f32> = (0..128).map(value).collect();
        for (format, hex) in ALL.iter().zip([
            "d34c77ca58495ab84a5c7b682ad5d6e86bbd67345f24288b8dd872334b5888947ab73e415435767565b837418455127842887929897e4ca7caab89c6935c8aa90b54",
            "054d9f8849a9cea5cb6d6f6b14825d85207d8769ef8e87a2c1094cf07a59b0a141915c5d95de10fd509b01c020c475f96b1f",
            "0c4de526a67667d2edb60517a2eb04628a96431455e5015960a4267a93aeda78aa42",
        ]) {
            assert_eq!(encode_rows(format, &row, 128), bytes(hex), "{}", format.name);
        }
    }

    /// Numbers like draws of a normal distribution: sums of twelve others.
    fn normal(n: usize) -> Vec<f32> {
        let mut state = 1u64;
        let mut uniform = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 40) as f32 / (1 << 24) as f32
        };
        (0..n)
            .map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0)
            .collect()
    }

    fn norm(x: &[f32]) -> f64 {
        x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
    }

    #[test]
    fn a_row_is_read_back_as_exactly_as_its_bits_allow() {
        for cols in [64, 128, 192, 256, 512] {
            let values = normal(cols * 1024);
            for (format, error) in ALL.iter().zip([0.00912, 0.0338, 0.1185]) {
                let stored = encode_rows(format, &values, cols);
                assert_eq!(stored.len(), 1024 * format.row_bytes(cols));
                let mut read = decode_rows(format, &stored, cols);
                let (mut off, mut all) = (0.0, 0.0);
                for (read, row) in read.chunks_mut(cols).zip(values.chunks(cols)) {
                    ROTATION.undo(read);
                    let apart: Vec<f32> = read.iter().zip(row).map(|(a, b)| a - b).collect();
                    off += norm(&apart).powi(2);
                    all += norm(row).powi(2);
                    assert!((norm(read) / norm(row) - 1.0).abs() < 1e-3);
                }
                let found = off / all;
                assert!(
                    (found / error - 1.0).abs() < 0.04,
                    "{} {cols}: {found}",
                    format.name
                );
            }
        }
    }

    #[test]
    fn odd_rows_are_read_back_as_well_as_can_be() {
        for format in ALL {
            let back = |row: &[f32]| {
                let stored = encode_rows(format, row, row.len());
                let mut read = decode_rows(format, &stored, row.len());
                ROTATION.undo(&mut read);
                read
            };
            assert!(back(&[0.0; 192]).iter().all(|&x| x == 0.0));
            assert!(back(&[1e-12; 64]).iter().all(|&x| x == 0.0));
            let large = back(&[65504.0; 128]);
            assert!(large.iter().all(|x| x.is_finite()));
            let mut broken = [1.0; 128];
            broken[3] = f32::NAN;
            assert!(back(&broken).iter().any(|x| x.is_nan()));
            // A group on its own: what is in the next one does not matter.
            let mut two = normal(256);
            let first = encode_rows(format, &two, 256);
            two[200] = 99.0;
            let second = encode_rows(format, &two, 256);
            let n = first.len() / 2;
            assert_eq!(first[..n], second[..n]);
            assert_ne!(first[n..], second[n..]);
        }
    }
}
