//! How codes of 2 to 8 bits lie in a row of bytes, for keys and for values.
//!
//! ```text
//! a row of n columns:   low bits of all codes (8, 4 or 2 each), then the one bit left of codes
//!                       with 5 or 3, in n/8 bytes
//! keys      a byte has neighboring columns, the first in its low bits: units hold bytes of 16
//!           keys together, so each column of 16 keys is a shift and a mask away
//! values    strips of 32 columns; a byte has columns that lie 16 apart (low bits of 4) or 8
//!           (of 2), and of bits left, byte i of a strip has columns i, i + 8, … and in its upper
//!           half i + 4, i + 12, …: a strip unpacks into two vectors of 16 columns
//! ```

use super::encode::{KeysOrValues, STRIP};
use crate::kv::BLOCK;

/// Bits of a code in the first part of a row.
const fn low_bits(bits: usize) -> usize {
    bits & !1
}

/// Packs `codes`, whole strips of values or whole eights of keys, as they lie in memory.
#[inline(always)]
pub(super) fn pack(bits: usize, kind: KeysOrValues, codes: &[u8], packed: &mut Vec<u8>) {
    packed.clear();
    let low = low_bits(bits);
    let low_part = |code: u8, part: usize| (code & (0xff >> (8 - low))) << (part * low);
    match (low, kind) {
        (8, _) => packed.extend_from_slice(codes),
        (4, KeysOrValues::Keys) => {
            let pairs = codes.as_chunks::<2>().0.iter();
            packed.extend(pairs.map(|&[a, b]| low_part(a, 0) | low_part(b, 1)));
        }
        (4, KeysOrValues::Values) => {
            for strip in codes.as_chunks::<STRIP>().0 {
                let (a, b) = strip.split_at(STRIP / 2);
                let pairs = a.iter().zip(b);
                packed.extend(pairs.map(|(&a, &b)| low_part(a, 0) | low_part(b, 1)));
            }
        }
        (_, KeysOrValues::Keys) => {
            let fours = codes.as_chunks::<4>().0.iter();
            packed.extend(fours.map(|four| {
                let parts = four.iter().enumerate();
                parts.fold(0, |byte, (part, &code)| byte | low_part(code, part))
            }));
        }
        (_, KeysOrValues::Values) => {
            for strip in codes.as_chunks::<STRIP>().0 {
                let byte = |i: usize| {
                    (0..4).fold(0, |byte, part| byte | low_part(strip[i + 8 * part], part))
                };
                packed.extend((0..STRIP / 4).map(byte));
            }
        }
    }
    if bits == low {
        return;
    }
    match kind {
        KeysOrValues::Keys => packed.extend(codes.as_chunks::<8>().0.iter().map(|eight| {
            let columns = eight.iter().enumerate();
            columns.fold(0, |byte, (c, &code)| byte | (code >> low) << c)
        })),
        KeysOrValues::Values => {
            for strip in codes.as_chunks::<STRIP>().0 {
                let byte = |i: usize| {
                    (0..4).fold(0, |byte, part| {
                        let bit = |c: usize| strip[c + 8 * part] >> low;
                        byte | bit(i) << part | bit(i + 4) << (part + 4)
                    })
                };
                packed.extend((0..STRIP / 8).map(byte));
            }
        }
    }
}

/// The codes of columns `8 eight .. 8 eight + 8` of 16 keys, whose bytes are `block`: `cols BITS / 8`
/// of them for each key.
#[inline(always)]
pub(super) fn keys<const BITS: usize>(
    block: &[[u8; BLOCK]],
    cols: usize,
    eight: usize,
) -> [[u8; BLOCK]; 8] {
    let low = low_bits(BITS);
    let (mask, in_byte) = (0xff >> (8 - low), 8 / low);
    let bytes = &block[eight * low..][..low];
    let mut codes = [[0; BLOCK]; 8];
    for (c, codes) in codes.iter_mut().enumerate() {
        for (code, byte) in codes.iter_mut().zip(&bytes[c / in_byte]) {
            *code = byte >> (c % in_byte * low) & mask;
        }
    }
    if BITS != low {
        let bits = &block[cols * low / 8 + eight];
        for (c, codes) in codes.iter_mut().enumerate() {
            for (code, bits) in codes.iter_mut().zip(bits) {
                *code |= (bits >> c & 1) << low;
            }
        }
    }
    codes
}

/// The codes of strip `strip` of a row of values, whose bytes are `row`: of its first 16 columns, and
/// of the others.
#[inline(always)]
pub(super) fn values<const BITS: usize>(row: &[u8], strip: usize) -> [[u8; 16]; 2] {
    let low = low_bits(BITS);
    let bytes = &row[strip * STRIP * low / 8..][..STRIP * low / 8];
    match low {
        8 => [0, 1].map(|half| {
            *bytes[16 * half..]
                .first_chunk()
                .expect("32 bytes of a strip")
        }),
        4 => {
            let mut halves = nibbles(bytes.first_chunk().expect("16 bytes of a strip"));
            if BITS == 5 {
                let bits = bits_left(row, strip, low);
                let left = |part: usize| u128::from(bits >> part & 0x0101_0101_0101_0101);
                for (half, codes) in halves.iter_mut().enumerate() {
                    let sixteen = left(2 * half) | left(2 * half + 1) << 64;
                    for (code, bit) in codes.iter_mut().zip(sixteen.to_le_bytes()) {
                        *code |= bit << 4;
                    }
                }
            }
            halves
        }
        _ => {
            let low_bits = u64::from_le_bytes(*bytes.first_chunk().expect("8 bytes of a strip"));
            let bits = if BITS == 3 {
                bits_left(row, strip, low)
            } else {
                0
            };
            let eight = |part: usize| {
                let third = (bits >> part & 0x0101_0101_0101_0101) << 2;
                u128::from(low_bits >> (2 * part) & 0x0303_0303_0303_0303 | third)
            };
            // Put together in a register: what was stored by halves is slow to load.
            [0, 2].map(|part| (eight(part) | eight(part + 1) << 64).to_le_bytes())
        }
    }
}

/// The bits left of a strip of values: a byte for each of eight columns, a bit for each eight.
#[inline(always)]
fn bits_left(row: &[u8], strip: usize, low: usize) -> u64 {
    let start = row.len() / (low + 1) * low + strip * STRIP / 8;
    let bits = row[start..].first_chunk().expect("4 bytes of a strip");
    let bits = u64::from(u32::from_le_bytes(*bits));
    bits & 0x0f0f_0f0f | (bits & 0xf0f0_f0f0) << 28
}

/// The low and the high four bits of each byte.
#[inline(always)]
fn nibbles(codes: &[u8; 16]) -> [[u8; 16]; 2] {
    let mut halves = [[0; 16]; 2];
    for (i, code) in codes.iter().enumerate() {
        (halves[0][i], halves[1][i]) = (code & 15, code >> 4);
    }
    halves
}

#[cfg(test)]
mod tests {
    use super::*;

    fn codes(bits: usize, n: usize) -> Vec<u8> {
        let code = |i: usize| (i * i * 37 + 11 * i) as u8 >> (8 - bits);
        (0..n).map(code).collect()
    }

    fn assert_packed_values<const BITS: usize>() {
        for cols in [32, 64, 96, 192] {
            let codes = codes(BITS, cols);
            let mut packed = vec![9; 3];
            pack(BITS, KeysOrValues::Values, &codes, &mut packed);
            assert_eq!(packed.len(), cols * BITS / 8);
            let strips = 0..cols / STRIP;
            let found: Vec<u8> = strips
                .flat_map(|s| values::<BITS>(&packed, s))
                .flatten()
                .collect();
            assert_eq!(found, codes, "{BITS} bits, {cols} columns");
        }
    }

    fn assert_packed_keys<const BITS: usize>() {
        for cols in [32, 64, 96, 192] {
            let all = codes(BITS, cols * BLOCK);
            let bytes = cols * BITS / 8;
            let mut block = vec![[0; BLOCK]; bytes];
            for (key, codes) in all.chunks(cols).enumerate() {
                let mut packed = Vec::new();
                pack(BITS, KeysOrValues::Keys, codes, &mut packed);
                assert_eq!(packed.len(), bytes);
                for (block, byte) in block.iter_mut().zip(packed) {
                    block[key] = byte;
                }
            }
            for eight in 0..cols / 8 {
                for (c, found) in keys::<BITS>(&block, cols, eight).iter().enumerate() {
                    let want: [u8; BLOCK] =
                        std::array::from_fn(|key| all[key * cols + 8 * eight + c]);
                    assert_eq!(*found, want, "{BITS} bits, column {}", 8 * eight + c);
                }
            }
        }
    }

    #[test]
    fn codes_are_read_as_they_were_packed() {
        assert_packed_values::<2>();
        assert_packed_values::<3>();
        assert_packed_values::<4>();
        assert_packed_values::<5>();
        assert_packed_values::<8>();
        assert_packed_keys::<2>();
        assert_packed_keys::<3>();
        assert_packed_keys::<4>();
        assert_packed_keys::<5>();
        assert_packed_keys::<8>();
    }
}
