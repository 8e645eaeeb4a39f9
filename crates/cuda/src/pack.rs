//! Weights in the order that tensor cores take them.
//!
//! A matrix is cut into tiles of 16 rows by [`TILE`] columns. Rows of small tiles make a
//! band ([`Packing::band`]), all of it stored even if rows are missing: the tiles of its
//! first columns, those of the next, and so on, so that whoever reads several rows of
//! tiles reads memory in long pieces. In a tile, lane `l` of a warp owns the rows `g = l / 4` and
//! `g + 8` ("halves"), and of each the columns `32 h + 8 (l % 4) + 0..8` for `h`
//! in 0, 1. Codes of 4 bits and more start with a plane of nibbles: word
//! `(lane, half, h)`, the codes `2 i` and `2 i + 1` in bits `4 i` and `16 + 4 i`;
//! so one mask leaves a pair. What codes have above 4 bits (or above 2, for
//! 3 bits) follows in planes of 2 bits or 1, laid out likewise. Codes of 8 bits
//! and floats lie in parts of 16 bytes: `(half, lane)` or `(half, h, lane)`.
//! Scales and biases end the tile, by group and row, as f16.
//!
//! After all tiles a float for each row of tiles, a power of two: what their sums are to be
//! multiplied by. It brings their values near one another's range in f16: so bf16 loses nothing
//! down to 2^-32 of the largest of 16 rows; codes, which the kernels read as f16 of 2^-24 and up,
//! have scales of up to 2^15. Floats of 8 bits (E4M3) lie as codes of 8 bits do; shifted to
//! the place of an f16 they are 256 times too small, which their scales make up for. Codes of
//! columns that were rotated lie as codes of as many bits do, with a scale for each 16 columns;
//! the kernels look up their levels, in f16. Formats whose codes tensor cores cannot take are
//! rounded to f16.

use half::f16;
use half::slice::HalfFloatSliceExt;
use quant::{Codes, Scalar, Stored, WeightLayout, Zero};
use rayon::prelude::*;
use std::fmt;

/// Columns of a tile.
pub(crate) const TILE: usize = 64;

/// Rows of a tile.
pub(crate) const TILE_ROWS: usize = 16;

/// How tiles of a matrix are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Packing {
    /// f16, 2 KiB a tile.
    Plain,
    /// Codes of `bits` with a scale and a bias every `group` columns, 32 or 64.
    Codes { bits: usize, group: usize },
    /// E4M3 with a scale every `group` columns, 32 or 64.
    E4m3 { group: usize },
    /// Codes of 3 or 4 bits of rotated columns ([`Codes::rotated`]), with a scale every 16.
    Rotated { bits: usize },
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Packing::Plain => write!(f, "f16"),
            Packing::Codes { bits, group } => write!(f, "{bits} bits in groups of {group}"),
            Packing::E4m3 { group } => write!(f, "E4M3 in groups of {group}"),
            Packing::Rotated { bits } => write!(f, "{bits} bits, rotated"),
        }
    }
}

/// Columns that share a scale in [`Packing::Rotated`].
const ROTATED_GROUP: usize = 16;

/// Whether the kernels can multiply the codes themselves.
fn is_linear(codes: &Codes) -> bool {
    let linear = codes.zero == Zero::Bias || codes.zero.offset().is_some();
    linear && [32, 64, 128].contains(&codes.group) && [2, 3, 4, 5, 6, 8].contains(&codes.bits)
}

impl Packing {
    /// What the parts of a matrix have in common; nothing, if they are `f32` or
    /// differ. Formats whose codes tensor cores cannot take as they are, because a
    /// group is narrower than 32 columns or codes name levels, become f16, but for those with rotated columns.
    pub(crate) fn of(parts: &[Stored<'_>]) -> Option<Self> {
        let first = parts.first()?;
        let format = first.format;
        if format.layout == WeightLayout::Plain(Scalar::F32)
            || parts.iter().any(|p| p.format != format)
        {
            return None;
        }
        if let Some(codes) = format.codes().filter(|codes| codes.rotated.is_some()) {
            let bits = codes.bits.into();
            return Some(Packing::Rotated { bits });
        }
        let Some(codes) = format.codes().filter(is_linear) else {
            let whole =
                |n| move |p: &Stored<'_>| p.tiles.cols >= p.cols || p.tiles.cols.is_multiple_of(n);
            let group = [TILE, 32].into_iter().find(|&n| parts.iter().all(whole(n)));
            let fits = group.filter(|_| is_e4m3(first));
            return Some(fits.map_or(Packing::Plain, |group| Packing::E4m3 { group }));
        };
        Some(Packing::Codes {
            bits: codes.bits.into(),
            group: codes.group.min(TILE),
        })
    }

    /// Bytes of a tile.
    pub(crate) fn tile_bytes(self) -> usize {
        match self {
            Packing::Plain => 2 * TILE * TILE_ROWS,
            Packing::Codes { bits, group } => TILE_ROWS * (TILE * bits / 8 + TILE / group * 4),
            Packing::E4m3 { group } => TILE_ROWS * (TILE + TILE / group * 2),
            Packing::Rotated { bits } => TILE_ROWS * (TILE * bits / 8 + TILE / ROTATED_GROUP * 2),
        }
    }

    /// Rows of tiles that lie beside each other: as many as the copy engine brings at a time.
    pub(crate) fn band(self) -> usize {
        match self {
            Packing::E4m3 { .. } => 2,
            Packing::Plain | Packing::Codes { .. } | Packing::Rotated { .. } => 1,
        }
    }

    /// Bytes from a tile to that of its rows' next columns.
    fn along(self) -> usize {
        self.band() * self.tile_bytes()
    }

    /// What the kernels are compiled with.
    pub(crate) fn defines(self) -> Vec<(&'static str, usize)> {
        match self {
            // Plain weights have no groups of columns with a scale each.
            Packing::Plain => vec![("FORMAT", 16), ("GROUP", 64)],
            Packing::Codes { bits, group } => vec![("FORMAT", bits), ("GROUP", group)],
            Packing::E4m3 { group } => vec![("FORMAT", 9), ("GROUP", group)],
            Packing::Rotated { bits } => {
                let [low, high] = level_bytes(bits);
                vec![
                    ("FORMAT", 10 + bits),
                    ("GROUP", 32),
                    ("LEVELS_LOW_0", low[0]),
                    ("LEVELS_LOW_4", low[1]),
                    ("LEVELS_HIGH_0", high[0]),
                    ("LEVELS_HIGH_4", high[1]),
                ]
            }
        }
    }
}

/// The levels of rotated columns in codes of `bits`.
fn levels(bits: usize) -> &'static [f32] {
    let mut all = quant::TURBO.iter().filter_map(quant::Format::codes);
    let codes = all.find(|codes| usize::from(codes.bits) == bits);
    let rotated = codes.and_then(|codes| codes.rotated);
    rotated.expect("a format of such codes").levels
}

/// The last eight levels in f16: their low bytes and their high ones, four to a word.
fn level_bytes(bits: usize) -> [[usize; 2]; 2] {
    let levels = levels(bits);
    let eight = &levels[levels.len() - 8..];
    [0, 1].map(|byte| {
        [0, 4].map(|first| {
            let four = eight[first..first + 4].iter();
            let bytes = four.map(|&level| f16::from_f32(level).to_le_bytes()[byte]);
            bytes
                .rev()
                .fold(0, |word, byte| word << 8 | usize::from(byte))
        })
    })
}

/// Bytes of a matrix' tiles, and of its factors, which follow.
pub(crate) fn bytes(packing: Packing, rows: usize, cols: usize) -> (usize, usize) {
    let row_tiles = rows.div_ceil(packing.band() * TILE_ROWS) * packing.band();
    let tiles = row_tiles * cols.div_ceil(TILE);
    (tiles * packing.tile_bytes(), 4 * row_tiles)
}

/// The parts of one matrix, rows in order, to be packed band by band. Missing rows and columns of the last tiles are
/// zeros.
pub(crate) struct Packer<'a> {
    packing: Packing,
    parts: &'a [Stored<'a>],
    rows: usize,
    cols: usize,
}

impl<'a> Packer<'a> {
    pub(crate) fn new(packing: Packing, parts: &'a [Stored<'a>]) -> Self {
        Packer {
            packing,
            parts,
            rows: parts.iter().map(|p| p.rows).sum(),
            cols: parts[0].cols,
        }
    }

    pub(crate) fn bands(&self) -> usize {
        self.rows.div_ceil(self.packing.band() * TILE_ROWS)
    }

    /// Bytes of a band's tiles, and of its factors.
    pub(crate) fn band_bytes(&self) -> (usize, usize) {
        let tiles = self.cols.div_ceil(TILE) * self.packing.along();
        (tiles, 4 * self.packing.band())
    }

    /// Part and row within it of a row of the matrix.
    fn find(&self, mut row: usize) -> (&'a Stored<'a>, usize) {
        for part in self.parts {
            if row < part.rows {
                return (part, row);
            }
            row -= part.rows;
        }
        unreachable!("a row of some part")
    }

    /// Packs the bands from `first` on that `tiles` has room for, on all cores, and writes their factors.
    pub(crate) fn pack(&self, first: usize, tiles: &mut [u8], factors: &mut [u8]) {
        let (of_tiles, of_factors) = self.band_bytes();
        let factors = factors.par_chunks_mut(of_factors);
        let bands = tiles.par_chunks_mut(of_tiles).zip(factors).enumerate();
        bands.for_each(|(i, (tiles, factors))| self.pack_band(first + i, tiles, factors));
    }

    fn pack_band(&self, at: usize, tiles: &mut [u8], factors: &mut [u8]) {
        let packing = self.packing;
        tiles.fill(0);
        for i in 0..packing.band() {
            let first = (at * packing.band() + i) * TILE_ROWS;
            let own = first..self.rows.min(first + TILE_ROWS);
            let own = own.map(|row| self.find(row)).collect();
            let tiles = &mut tiles[i * packing.tile_bytes()..];
            let factor: f32 = match packing {
                Packing::Plain => pack_plain(own, tiles),
                Packing::Codes { bits, group } => pack_codes(own, tiles, packing, bits, group),
                Packing::E4m3 { group } => pack_e4m3(own, tiles, packing, group),
                Packing::Rotated { bits } => pack_rotated(own, tiles, packing, bits),
            };
            factors[4 * i..4 * i + 4].copy_from_slice(&factor.to_le_bytes());
        }
    }
}

/// Up to [`TILE_ROWS`] rows of parts.
type Rows<'a> = Vec<(&'a Stored<'a>, usize)>;

/// The largest of the finite, without their signs.
fn largest(values: impl Iterator<Item = f32>) -> f32 {
    // Floats that are not negative are in the order of their bits.
    let finite = |bits: u32| {
        if bits < f32::INFINITY.to_bits() {
            bits
        } else {
            0
        }
    };
    let all = values.map(|v| finite(v.abs().to_bits()));
    f32::from_bits(all.fold(0, u32::max))
}

/// The power of two that takes `max` to `2^to .. 2^(to + 1)`, or as near as it is safe.
fn up_to(max: f32, to: i32) -> f32 {
    let exponent = (max.to_bits() >> 23) as i32 - 127;
    f32::from_bits(((127 + (to - exponent).clamp(-100, 100)) as u32) << 23)
}

/// Whether its codes are E4M3.
fn is_e4m3(part: &Stored<'_>) -> bool {
    matches!(part.format.layout, WeightLayout::Scaled { code, .. } if code == quant::Code::E4m3)
}

/// Whose the eight columns of a row from `8 e` on are: a lane within the row's four, and `h`.
fn eight(e: usize) -> (usize, usize) {
    (e % 4, e / 4 % 2)
}

/// Writes rows of f16 into their tiles; returns what the values are to be multiplied by.
fn pack_plain(rows: Rows<'_>, tiles: &mut [u8]) -> f32 {
    let decode = |(part, row): (&Stored<'_>, usize)| {
        let mut values = vec![0.0f32; part.cols];
        part.decode_row(row, &mut values);
        values
    };
    let is_f16 =
        |(part, _): &(&Stored<'_>, usize)| part.format.layout == WeightLayout::Plain(Scalar::F16);
    let as_they_are = rows.iter().all(is_f16);
    let rows: Vec<_> = rows.into_iter().map(decode).collect();
    let most = largest(rows.iter().flatten().copied());
    let by = if as_they_are { 1.0 } else { up_to(most, 14) };
    let mut rounded = vec![f16::ZERO; rows[0].len()];
    for (r, mut values) in rows.into_iter().enumerate() {
        values.iter_mut().for_each(|v| *v *= by);
        rounded.convert_from_f32_slice(&values);
        for (k, values) in rounded.chunks(TILE).enumerate() {
            let tile = &mut tiles[k * Packing::Plain.along()..];
            for (e, values) in values.chunks(8).enumerate() {
                let (t, h) = eight(e);
                let to = &mut tile[16 * ((r / 8 * 2 + h) * 32 + r % 8 * 4 + t)..][..16];
                for (to, value) in to.as_chunks_mut().0.iter_mut().zip(values) {
                    *to = value.to_le_bytes();
                }
            }
        }
    }
    by.recip()
}

/// A row's codes, and a scale and a bias for each of its groups.
struct Unpacked {
    codes: Vec<u8>,
    scales: Vec<f32>,
    biases: Vec<f32>,
    group: usize,
}

fn unpack_row((part, row): (&Stored<'_>, usize)) -> Unpacked {
    let view = part.format.codes().expect("only codes are packed here");
    let groups = part.cols / view.group;
    let mut v = Unpacked {
        codes: vec![0; part.cols],
        scales: vec![0.0; groups],
        biases: vec![0.0; groups],
        group: view.group,
    };
    part.format
        .unpack(part.row(row), &mut v.codes, &mut v.scales, &mut v.biases);
    if let Some(offset) = view.zero.offset() {
        let both = v.biases.iter_mut().zip(&v.scales);
        both.for_each(|(b, s)| *b = -(offset as f32) * s);
    }
    v
}

/// Writes rows of codes and scales into their tiles; returns what their values are to be
/// multiplied by.
fn pack_codes(
    rows: Rows<'_>,
    tiles: &mut [u8],
    packing: Packing,
    bits: usize,
    group: usize,
) -> f32 {
    let rows: Vec<_> = rows.into_iter().map(unpack_row).collect();
    let most = |of: fn(&Unpacked) -> &Vec<f32>| largest(rows.iter().flat_map(of).copied());
    // A code is worth 2^-24: scales of 2^15 at most, and values below 2^15 with any bias.
    let by = up_to(most(|r| &r.scales), -10).min(up_to(most(|r| &r.biases), 13));
    for (r, row) in rows.iter().enumerate() {
        let cols = row.codes.len();
        for (k, tile) in tiles.chunks_mut(packing.along()).enumerate() {
            let (words, scales) = tile.split_at_mut(TILE * TILE_ROWS * bits / 8);
            put_codes(
                words,
                bits,
                r,
                &row.codes[k * TILE..cols.min((k + 1) * TILE)],
            );
            for i in (0..TILE / group).filter(|i| k * TILE + i * group < cols) {
                let (g, at) = ((k * TILE + i * group) / row.group, 2 * scale_at(i, r));
                Scalar::F16.put(scales, at, row.scales[g] * by * 2f32.powi(24));
                Scalar::F16.put(scales, at + 1, row.biases[g] * by);
            }
        }
    }
    by.recip()
}

/// Writes rows of codes of rotated columns and their scales into their tiles; returns what their
/// values are to be multiplied by.
fn pack_rotated(rows: Rows<'_>, tiles: &mut [u8], packing: Packing, bits: usize) -> f32 {
    let rows: Vec<_> = rows.into_iter().map(unpack_row).collect();
    // Levels are below 2^2.
    let by = up_to(largest(rows.iter().flat_map(|r| &r.scales).copied()), 12);
    for (r, row) in rows.iter().enumerate() {
        let groups = row.scales.chunks(TILE / ROTATED_GROUP);
        let columns = row.codes.chunks(TILE).zip(groups);
        for (tile, (codes, scales)) in tiles.chunks_mut(packing.along()).zip(columns) {
            let (words, to) = tile.split_at_mut(TILE * TILE_ROWS * bits / 8);
            put_codes(words, bits, r, codes);
            for (i, scale) in scales.iter().enumerate() {
                Scalar::F16.put(to, scale_at(i, r), scale * by);
            }
        }
    }
    by.recip()
}

/// Writes rows of E4M3 and their scales into their tiles; returns what their values are to be
/// multiplied by. A group with a code that is no number gets a scale that is none.
fn pack_e4m3(rows: Rows<'_>, tiles: &mut [u8], packing: Packing, group: usize) -> f32 {
    let scale_of = |part: &Stored<'_>, row: &quant::Row<'_>, column: usize| {
        let codes = &row.codes[column..column + group.min(part.cols - column)];
        let numbers = codes.iter().all(|code| code & 0x7f != 0x7f);
        let scale = part.format.tile_scale(row, column / row.width);
        if numbers { scale } else { f32::NAN }
    };
    let all = rows.iter().flat_map(|&(part, row)| {
        let row = part.row(row);
        (0..part.cols)
            .step_by(group)
            .map(move |c| scale_of(part, &row, c))
    });
    // Values of 448 at most, codes 256 times too small.
    let by = up_to(largest(all), 5);
    for (r, &(part, row)) in rows.iter().enumerate() {
        let stored = part.row(row);
        for (k, tile) in tiles.chunks_mut(packing.along()).enumerate() {
            let (words, scales) = tile.split_at_mut(TILE * TILE_ROWS);
            let (from, until) = (k * TILE, part.cols.min((k + 1) * TILE));
            put_codes(words, 8, r, &stored.codes[from.min(until)..until]);
            for column in (from..until).step_by(group) {
                let scale = scale_of(part, &stored, column);
                let at = scale_at((column - from) / group, r);
                Scalar::F16.put(scales, at, scale * by * 256.0);
            }
        }
    }
    by.recip()
}

/// Where the scale of a group and of row `r` lies in a tile: the rows that a lane has, `g`
/// and `g + 8`, beside each other.
fn scale_at(group: usize, r: usize) -> usize {
    group * TILE_ROWS + r % 8 * 2 + r / 8
}

/// Writes the codes of row `r` of a tile, which are zeros as yet.
fn put_codes(words: &mut [u8], bits: usize, r: usize, codes: &[u8]) {
    let half = r / 8;
    if let (4, Ok(codes)) = (bits, codes.try_into()) {
        return put_nibbles(words, r, codes);
    }
    for (e, codes) in codes.chunks(8).enumerate() {
        let mut bytes = [0; 8];
        bytes[..codes.len()].copy_from_slice(codes);
        let (t, h) = eight(e);
        let lane = r % 8 * 4 + t;
        if bits == 8 {
            let at = (half * 32 + lane) * 16 + h * 8;
            words[at..at + 8].copy_from_slice(&bytes);
            continue;
        }
        let all = u64::from_le_bytes(bytes);
        let mut or = |word: usize, bits: u32| {
            let bytes = &mut words[4 * word..4 * word + 4];
            let old = u32::from_le_bytes(bytes.try_into().expect("four bytes"));
            bytes.copy_from_slice(&(old | bits).to_le_bytes());
        };
        if bits >= 4 {
            or(lane * 4 + half * 2 + h, spread::<4>(all));
            match bits {
                5 => or(128 + lane, spread::<1>(all >> 4) << (half * 8 + h * 4)),
                6 => or(128 + lane * 2 + half, spread::<2>(all >> 4) << (8 * h)),
                _ => {}
            }
        } else {
            or(lane * 2 + half, spread::<2>(all) << (8 * h));
            if bits == 3 {
                or(64 + lane, spread::<1>(all >> 2) << (half * 8 + h * 4));
            }
        }
    }
}

/// Writes the codes of row `r` of a tile, of 4 bits: eight are a word of their own.
fn put_nibbles(words: &mut [u8], r: usize, codes: &[u8; TILE]) {
    let words = &mut words.as_chunks_mut::<4>().0[..8 * TILE_ROWS];
    for (e, codes) in codes.as_chunks().0.iter().enumerate() {
        let (t, h) = eight(e);
        let word = spread::<4>(u64::from_le_bytes(*codes));
        words[(r % 8 * 4 + t) * 4 + r / 8 * 2 + h] = word.to_le_bytes();
    }
}

/// The `BITS` lowest bits of eight bytes: of those with even numbers one after the other,
/// and from the 16th bit on those of the others.
fn spread<const BITS: u32>(bytes: u64) -> u32 {
    let every_second = 0x0001_0001_0001_0001 * ((1u64 << BITS) - 1);
    let close = |of: u64| {
        let all = of | of >> (16 - BITS) | of >> (32 - 2 * BITS) | of >> (48 - 3 * BITS);
        all as u32 & ((1 << (4 * BITS)) - 1)
    };
    close(bytes & every_second) | close(bytes >> 8 & every_second) << 16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fp8;
    use proptest::prelude::*;

    /// A code, from the place in a tile that a lane finds it at.
    fn code_at(
        word: &impl Fn(usize) -> u32,
        bits: usize,
        (lane, half, j, pair, end): (usize, usize, usize, usize, usize),
    ) -> u32 {
        let q = j / 2 * 4 + 2 * (j % 2) + pair;
        match bits {
            8 => word((lane + 32 * half) * 4 + j) >> (16 * pair + 8 * end) & 255,
            _ if bits >= 4 => {
                let low =
                    word(lane * 4 + half * 2 + j / 2) >> (8 * (j % 2) + 4 * pair + 16 * end) & 15;
                low | match bits {
                    5 => (word(128 + lane) >> (half * 8 + q + 16 * end) & 1) << 4,
                    6 => (word(128 + lane * 2 + half) >> (2 * q + 16 * end) & 3) << 4,
                    _ => 0,
                }
            }
            _ => {
                let low = word(lane * 2 + half) >> (2 * q + 16 * end) & 3;
                let high = if bits == 3 {
                    word(64 + lane) >> (half * 8 + q + 16 * end) & 1
                } else {
                    0
                };
                low | high << 2
            }
        }
    }

    /// Reads a packed value back, the way the kernels find it: from the fragment of
    /// a lane to the value.
    fn unpack(packing: Packing, packed: &[u8], tiles: usize, row: usize, col: usize) -> f32 {
        let size = packing.tile_bytes();
        let band = packing.band();
        let at = (row / 16 / band * tiles + col / 64) * band + row / 16 % band;
        let tile = &packed[at * size..][..size];
        let row_tiles = packed.len() / (band * (tiles * size + 4)) * band;
        let factor = &packed[row_tiles * tiles * size + row / 16 * 4..][..4];
        let factor = f32::from_le_bytes(factor.try_into().unwrap());
        let word = |i: usize| u32::from_le_bytes(tile[4 * i..4 * i + 4].try_into().unwrap());
        // Of 16 products of columns, j takes four columns of every lane's 16.
        let c = col % 64;
        let (lane, half) = (row % 8 * 4 + c % 32 / 8, row % 16 / 8);
        let j = c / 32 * 2 + c % 8 / 4;
        let (pair, end) = (c % 4 / 2, c % 2);
        match packing {
            Packing::Plain => {
                let w = word((lane + 32 * (half * 2 + j / 2)) * 4 + 2 * (j % 2) + pair);
                half::f16::from_bits((w >> (16 * end)) as u16).to_f32() * factor
            }
            Packing::E4m3 { group } => {
                let code = word((lane + 32 * half) * 4 + j) >> (16 * pair + 8 * end) & 255;
                let scale = Scalar::F16.get(&tile[1024..], scale_at(c / group, row % 16));
                let bits = (code & 0x80) << 8 | (code & 0x7f) << 7;
                scale * half::f16::from_bits(bits as u16).to_f32() * factor
            }
            Packing::Rotated { bits } => {
                let code = code_at(&word, bits, (lane, half, j, pair, end));
                let scale =
                    Scalar::F16.get(&tile[128 * bits..], scale_at(c / ROTATED_GROUP, row % 16));
                let level = f16::from_f32(levels(bits)[code as usize]).to_f32();
                scale * level * factor
            }
            Packing::Codes { bits, group } => {
                let code = code_at(&word, bits, (lane, half, j, pair, end));
                let at = 2 * scale_at(c / group, row % 16);
                let scales = &tile[128 * bits..];
                let get = |at| Scalar::F16.get(scales, at);
                get(at).mul_add(code as f32 / 2f32.powi(24), get(at + 1)) * factor
            }
        }
    }

    /// All of a matrix, packed a few bands at a time.
    fn packed(packing: Packing, parts: &[Stored<'_>]) -> Vec<u8> {
        let of = Packer::new(packing, parts);
        let (of_tiles, of_factors) = of.band_bytes();
        let (mut tiles, mut factors) = (Vec::new(), vec![0; of.bands() * of_factors]);
        for (i, factors) in factors.chunks_mut(2 * of_factors).enumerate() {
            // Memory that was used before.
            let mut some = vec![0xff; factors.len() / of_factors * of_tiles];
            of.pack(2 * i, &mut some, factors);
            tiles.append(&mut some);
        }
        [tiles, factors].concat()
    }

    /// What rotated columns are before they are rotated back.
    fn rotated_values(stored: &Stored<'_>) -> Vec<f32> {
        let rows = (0..stored.rows).map(|row| unpack_row((stored, row)));
        let values = rows.map(|row| {
            let levels = levels(stored.format.codes().unwrap().bits.into());
            let codes = row.codes.iter().enumerate();
            let value =
                |(c, &code): (usize, &u8)| row.scales[c / row.group] * levels[usize::from(code)];
            codes.map(value).collect::<Vec<_>>()
        });
        values.flatten().collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn kernels_find_every_e4m3(seed in any::<u32>(), rows in 1usize..40, blocks in 1usize..5, tile in 0usize..4) {
            // Tiles of scales: of a group of columns, of a block, of a row, of none of these.
            let (tile, group) = [(32, 32), (128, 64), (10_000, 64), (48, 0)][tile];
            let cols = 96 * blocks;
            let codes: Vec<u8> = (0..rows * cols).map(|i| ((i as u32 ^ seed).wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            let codes: Vec<u8> = codes.into_iter().map(|c| if c & 0x7f == 0x7f { c - 1 } else { c }).collect();
            let scales: Vec<u8> = (0..rows * cols.div_ceil(tile)).flat_map(|i| ((1 + i) as f32 / 128.0).to_le_bytes()).collect();
            let stored = fp8(rows, cols, tile, &codes, &scales);
            let packing = Packing::of(&[stored]).unwrap();
            prop_assert_eq!(packing, if group > 0 { Packing::E4m3 { group } } else { Packing::Plain });
            let packed = packed(packing, &[stored]);
            for (i, want) in stored.to_f32().into_iter().enumerate() {
                let got = unpack(packing, &packed, cols.div_ceil(TILE), i / cols, i % cols);
                let off = if group > 0 { 0.0 } else { want.abs() / 2048.0 };
                prop_assert!((got - want).abs() <= off, "row {} column {}: {got} not {want}", i / cols, i % cols);
            }
        }

        #[test]
        fn kernels_find_every_value(seed in any::<u32>(), rows in 1usize..40, blocks in 1usize..5) {
            let all = quant::FORMATS.iter().copied().flatten();
            for format in all.filter(|f| f.can_encode()) {
                let cols = if format.block == 1 { 37 * blocks } else { format.block * blocks };
                let values: Vec<f32> = (0..rows * cols)
                    .map(|i| ((i as u32).wrapping_mul(2_654_435_761) ^ seed) as f32 / 2e9 - 1.0)
                    .collect();
                for scale in [Scalar::F32, Scalar::F16, Scalar::Bf16] {
                    let stored = quant::encode(format, &values, cols, scale);
                    let parts = [stored.view().slice(0..rows / 2), stored.view().slice(rows / 2..rows)];
                    let Some(packing) = Packing::of(&parts) else { continue };
                    let packed = packed(packing, &parts);
                    let want = match packing {
                        Packing::Rotated { .. } => rotated_values(&stored.view()),
                        _ => stored.view().to_f32(),
                    };
                    for (i, want) in want.into_iter().enumerate() {
                        let got = unpack(packing, &packed, cols.div_ceil(TILE), i / cols, i % cols);
                        let off = match (packing, format.layout) {
                            // Levels are rounded.
                            (Packing::Rotated { .. }, _) => want.abs() / 2048.0,
                            (_, WeightLayout::Plain(_)) => 0.0,
                            (Packing::Plain, _) => want.abs() / 2048.0,
                            _ if scale != Scalar::F32 && format.codes().is_some_and(|c| c.scale.is_none()) => 0.0,
                            // Scales and biases are rounded; values are up to 1.2, and a step of 8 bits 1 / 128.
                            _ => 1.0 / 512.0,
                        };
                        prop_assert!((got - want).abs() <= off, "{} row {} column {}: {got} not {want}", format.name, i / cols, i % cols);
                    }
                }
            }
        }
    }
}
