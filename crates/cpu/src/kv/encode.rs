//! Encodes rows of keys and values as their format stores them.

use crate::arch::{Kernel, Lanes};
use quant::{KvRowFormat, turbo};

/// How many columns of values are converted together.
pub(crate) const STRIP: usize = 32;

/// Whether a store holds keys or values.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum KeysOrValues {
    Keys,
    Values,
}

/// A worker's memory for encoding rows, kept from step to step.
#[derive(Default)]
pub(crate) struct RowEncoder {
    /// A row in the cache's format.
    stored: Vec<u8>,
    /// A row while it is rotated and rounded.
    pub(super) rounded: Vec<f32>,
    pub(super) codes: Vec<u8>,
    pub(super) scales: Vec<f32>,
    /// Codes as they lie in memory.
    pub(super) packed: Vec<u8>,
}

impl RowEncoder {
    /// Encodes `x` into codes and scales of groups of `group` columns.
    pub(super) fn unpack(&mut self, format: &KvRowFormat, x: &[f32], group: usize) {
        format.encode(x, &mut self.stored);
        self.codes.resize(x.len(), 0);
        self.scales.resize(x.len() / group, 0.0);
        format.unpack(&self.stored, &mut self.codes, &mut self.scales);
    }

    /// Packs the codes as they lie in memory, in pairs or each in a byte.
    pub(super) fn pack(&mut self, pairs: bool, kind: KeysOrValues) {
        let RowEncoder { codes, packed, .. } = self;
        packed.clear();
        let pair = |(low, high): (&u8, &u8)| low | high << 4;
        match (pairs, kind) {
            (false, _) => packed.extend_from_slice(codes),
            (true, KeysOrValues::Keys) => {
                packed.extend(codes.as_chunks().0.iter().map(|[a, b]| pair((a, b))))
            }
            (true, KeysOrValues::Values) => {
                for strip in codes.chunks_exact(STRIP) {
                    let (low, high) = strip.split_at(STRIP / 2);
                    packed.extend(low.iter().zip(high).map(pair));
                }
            }
        }
    }
}

/// Rotates one head of one row of values, rounds it to levels and packs their indices.
pub(super) struct Rotate<'a> {
    pub(super) bits: u8,
    pub(super) encoder: &'a mut RowEncoder,
    pub(super) from: &'a [f32],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let RowEncoder {
            rounded,
            codes,
            scales,
            packed,
            ..
        } = self.encoder;
        let cols = self.from.len();
        rounded.clear();
        rounded.extend_from_slice(self.from);
        codes.resize(cols, 0);
        scales.resize(cols.div_ceil(turbo::GROUP), 0.0);
        turbo::round(self.bits, rounded, codes, scales);
        if self.bits == 4 {
            return self.encoder.pack(true, KeysOrValues::Values);
        }
        packed.clear();
        packed.resize(cols / 8 * 3, 0);
        for (strip, codes) in codes.as_chunks::<STRIP>().0.iter().enumerate() {
            put_triples(packed, strip, codes);
        }
    }
}

/// Bytes of the low two bits of a strip's indices of three bits.
const LOW: usize = STRIP / 4;

/// Bytes of the third bits of a strip's indices of three bits.
const THIRD: usize = STRIP / 8;

/// Packs indices of three bits as strip `strip` of `row`.
#[inline(always)]
pub(super) fn put_triples(row: &mut [u8], strip: usize, codes: &[u8; STRIP]) {
    // Byte `i` has columns `i`, `i + 8`, `i + 16` and `i + 24`.
    for (i, to) in row[strip * LOW..][..LOW].iter_mut().enumerate() {
        let low = |part: usize| (codes[i + 8 * part] & 3) << (2 * part);
        *to = low(0) | low(1) | low(2) | low(3);
    }
    // Byte `i` has columns `i`, `i + 8`, …, and in its upper half `i + 4`, `i + 12`, ….
    let thirds = row.len() / 3 * 2 + strip * THIRD;
    for (i, to) in row[thirds..][..THIRD].iter_mut().enumerate() {
        let third = |part: usize| {
            let at = |c: usize| codes[c + 8 * part] >> 2;
            at(i) << part | at(i + 4) << (part + 4)
        };
        *to = third(0) | third(1) | third(2) | third(3);
    }
}

/// Unpacks the indices of strip `strip` of `row`: of its first 16 columns, and of the others.
#[inline(always)]
pub(super) fn indices(bits: u8, row: &[u8], strip: usize) -> [[u8; 16]; 2] {
    if bits == 4 {
        return nibbles(
            row[strip * 16..]
                .first_chunk()
                .expect("16 bytes of a strip"),
        );
    }
    let low = row[strip * LOW..].first_chunk();
    let low = u64::from_le_bytes(*low.expect("8 bytes of a strip"));
    let thirds = row[row.len() / 3 * 2 + strip * THIRD..].first_chunk();
    let thirds = u64::from(u32::from_le_bytes(*thirds.expect("4 bytes of a strip")));
    // A byte for each of eight columns, a bit for each eight.
    let thirds = thirds & 0x0f0f_0f0f | (thirds & 0xf0f0_f0f0) << 28;
    let eight = |part: usize| {
        let third = (thirds >> part & 0x0101_0101_0101_0101) << 2;
        u128::from(low >> (2 * part) & 0x0303_0303_0303_0303 | third)
    };
    // Put together in a register: what was stored by halves is slow to load.
    [0, 2].map(|part| (eight(part) | eight(part + 1) << 64).to_le_bytes())
}

/// The low and the high four bits of each byte.
#[inline(always)]
pub(super) fn nibbles(codes: &[u8; 16]) -> [[u8; 16]; 2] {
    let mut halves = [[0; 16]; 2];
    for (i, code) in codes.iter().enumerate() {
        (halves[0][i], halves[1][i]) = (code & 15, code >> 4);
    }
    halves
}
