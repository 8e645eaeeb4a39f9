//! Weights in the order that tensor cores take them.
//!
//! A matrix is cut into tiles of 16 rows by [`TILE`] columns. Rows of small tiles make a
//! band ([`Packing::band`]), all of it stored even if rows are missing: the tiles of its
//! first columns, those of the next, and so on, so that whoever reads several rows of
//! tiles reads memory in long pieces. In a tile, lane `l` of a warp owns the rows `g = l / 4` and
//! `g + 8` ("halves"), and of each the columns `32 h + 8 (l % 4) + 0..8` for `h`
//! in 0, 1. Codes of 4 bits and more start with a plane of nibbles: word
//! `(lane, half, h)`, the codes `2 i` and `2 i + 1` in bits `4 i` and `16 + 4 i`;
//! so one mask leaves a pair of f16. What codes have above 4 bits (or above 2, for
//! 3 bits) follows in planes of 2 bits or 1, laid out likewise. Codes of 8 bits
//! and floats lie in parts of 16 bytes: `(half, lane)` or `(half, h, lane)`.
//! Scales and biases end the tile, by group and row.
//!
//! Floats of 8 bits (E4M3) lie as codes of 8 bits do, with scales in `f32`. Shifted to
//! the place of an f16 they are 256 times too small, which their scales make up for.
//!
//! bf16 becomes f16 with a power of two for each row, which loses nothing down to
//! 2^-32 of the row's largest value; so do formats whose codes tensor cores cannot
//! take, which are rounded to f16.

use quant::{Codes, Layout, Scalar, Stored, Zero};

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
    Codes {
        bits: usize,
        group: usize,
        scale: Scalar,
    },
    /// E4M3 with a scale every `group` columns, 32 or 64.
    E4m3 { group: usize },
}

/// Whether the kernels can multiply the codes themselves.
fn is_linear(codes: &Codes) -> bool {
    let linear = codes.zero == Zero::Bias || codes.zero.offset().is_some();
    linear && [32, 64, 128].contains(&codes.group) && [2, 3, 4, 5, 6, 8].contains(&codes.bits)
}

/// A packed matrix.
pub(crate) struct Packed {
    pub(crate) bytes: Vec<u8>,
    /// By row, for bf16.
    pub(crate) factors: Option<Vec<f32>>,
}

impl Packing {
    /// What the parts of a matrix have in common; nothing, if they are `f32` or
    /// differ. Formats whose codes tensor cores cannot take as they are, because a
    /// group is narrower than 32 columns or codes name levels, become f16.
    pub(crate) fn of(parts: &[Stored<'_>]) -> Option<Self> {
        let first = parts.first()?;
        let format = first.format;
        if format.layout == Layout::Plain(Scalar::F32) || parts.iter().any(|p| p.format != format) {
            return None;
        }
        let Some(codes) = format.codes().filter(is_linear) else {
            let whole =
                |n| move |p: &Stored<'_>| p.tiles.cols >= p.cols || p.tiles.cols.is_multiple_of(n);
            let group = [TILE, 32].into_iter().find(|&n| parts.iter().all(whole(n)));
            let fits = group.filter(|_| is_e4m3(first));
            return Some(fits.map_or(Packing::Plain, |group| Packing::E4m3 { group }));
        };
        let one = parts.iter().all(|p| p.scale == first.scale);
        let own = if one { first.scale } else { Scalar::F32 };
        Some(Packing::Codes {
            bits: codes.bits.into(),
            group: codes.group.min(TILE),
            scale: codes.scale.unwrap_or(own),
        })
    }

    /// Bytes of a tile.
    pub(crate) fn tile_bytes(self) -> usize {
        match self {
            Packing::Plain => 2 * TILE * TILE_ROWS,
            Packing::Codes { bits, group, scale } => {
                TILE * TILE_ROWS * bits / 8 + TILE / group * TILE_ROWS * 2 * scale.bytes()
            }
            Packing::E4m3 { group } => TILE_ROWS * (TILE + TILE / group * 4),
        }
    }

    /// Rows of tiles that lie beside each other: as many as the copy engine brings at a time.
    pub(crate) fn band(self) -> usize {
        match self {
            Packing::E4m3 { .. } => 2,
            Packing::Plain | Packing::Codes { .. } => 1,
        }
    }

    /// What the kernels are compiled with.
    pub(crate) fn defines(self) -> Vec<(&'static str, usize)> {
        match self {
            Packing::Plain => vec![("FORMAT", 16)],
            Packing::Codes { bits, group, scale } => vec![
                ("FORMAT", bits),
                ("GROUP", group),
                ("SCALE", 8 * scale.bytes()),
                ("SCALE_BF16", usize::from(scale == Scalar::Bf16)),
            ],
            Packing::E4m3 { group } => vec![("FORMAT", 9), ("GROUP", group), ("SCALE", 32)],
        }
    }
}

/// Bytes of a packed matrix.
pub(crate) fn bytes(packing: Packing, rows: usize, cols: usize) -> usize {
    let band = packing.band();
    rows.div_ceil(band * TILE_ROWS) * band * cols.div_ceil(TILE) * packing.tile_bytes()
}

/// Packs the parts of one matrix, rows in order. Missing rows and columns of the
/// last tiles are zeros.
pub(crate) fn pack(packing: Packing, parts: &[Stored<'_>]) -> Packed {
    let cols = parts[0].cols;
    let rows: usize = parts.iter().map(|p| p.rows).sum();
    let (tiles, tile_bytes) = (cols.div_ceil(TILE), packing.tile_bytes());
    let mut bytes = vec![0u8; bytes(packing, rows, cols)];
    let scaled = packing == Packing::Plain && parts.iter().any(is_scaled);
    let mut factors = vec![1.0f32; if scaled { rows } else { 0 }];
    let find = |mut row: usize| {
        for part in parts {
            if row < part.rows {
                return (part, row);
            }
            row -= part.rows;
        }
        unreachable!("a row of some part")
    };
    let band_rows = packing.band() * TILE_ROWS;
    let bands = bytes
        .chunks_mut(packing.band() * tiles * tile_bytes)
        .enumerate();
    let mut factor_bands = factors.chunks_mut(band_rows);
    let jobs: Vec<_> = bands
        .map(|(band, bytes)| (band, bytes, factor_bands.next().unwrap_or_default()))
        .collect();
    in_parallel(jobs, rows * cols, |(band, bytes, factors)| {
        for i in 0..band_rows.min(rows - band * band_rows) {
            let (part, row) = find(band * band_rows + i);
            // The row of tiles, from its first one on, and the row in it.
            let (bytes, r) = (&mut bytes[i / TILE_ROWS * tile_bytes..], i % TILE_ROWS);
            match packing {
                Packing::Plain => {
                    let factor = pack_plain_row(part, row, r, bytes);
                    if let Some(f) = factors.get_mut(i) {
                        *f = factor;
                    }
                }
                Packing::Codes { bits, group, scale } => {
                    let numbers = [bits, group, tile_bytes, packing.band() * tile_bytes];
                    pack_code_row(part, row, r, bytes, numbers, scale);
                }
                Packing::E4m3 { group } => pack_e4m3_row(part, row, r, bytes, group),
            }
        }
    });
    Packed {
        bytes,
        factors: scaled.then_some(factors),
    }
}

/// Runs `f` over `jobs`, on all cores if there are many `values`.
fn in_parallel<T: Send>(jobs: Vec<T>, values: usize, f: impl Fn(T) + Sync) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    if values < 1 << 18 || threads == 1 {
        return jobs.into_iter().for_each(f);
    }
    let mut shares: Vec<Vec<T>> = (0..threads).map(|_| Vec::new()).collect();
    for (i, job) in jobs.into_iter().enumerate() {
        shares[i % threads].push(job);
    }
    std::thread::scope(|scope| {
        for share in shares {
            scope.spawn(|| share.into_iter().for_each(&f));
        }
    });
}

/// Whether f16 needs a factor a row to hold the values.
fn is_scaled(part: &Stored<'_>) -> bool {
    part.format.layout != Layout::Plain(Scalar::F16)
}

/// Whether its codes are E4M3.
fn is_e4m3(part: &Stored<'_>) -> bool {
    matches!(part.format.layout, Layout::Scaled { code, .. } if code == quant::Code::E4m3)
}

/// Where column `c` of a tile lies: lane within its row's four, `h`, and place.
fn column(c: usize) -> (usize, usize, usize) {
    (c % 32 / 8, c / 32, c % 8)
}

/// Writes one row of f16 into its band; returns what the values are to be
/// multiplied by.
fn pack_plain_row(part: &Stored<'_>, row: usize, r: usize, band: &mut [u8]) -> f32 {
    let mut values = vec![0.0f32; part.cols];
    part.decode_row(row, &mut values);
    let mut factor = 1.0;
    if is_scaled(part) {
        let max = values.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let exponent = ((max.to_bits() >> 23) as i32).clamp(27, 240) - 127 - 14;
        factor = f32::from_bits(((127 + exponent) as u32) << 23);
        values.iter_mut().for_each(|v| *v /= factor);
    }
    for (c, &value) in values.iter().enumerate() {
        let tile = &mut band[c / TILE * Packing::Plain.band() * Packing::Plain.tile_bytes()..];
        let (t, h, at) = column(c % TILE);
        let part = (r / 8 * 2 + h) * 32 + r % 8 * 4 + t;
        Scalar::F16.put(&mut tile[16 * part..], at, value);
    }
    factor
}

/// Writes one row of codes and scales into its band.
fn pack_code_row(
    part: &Stored<'_>,
    row: usize,
    r: usize,
    band: &mut [u8],
    [bits, group, tile_bytes, along]: [usize; 4],
    scale: Scalar,
) {
    let view = part.format.codes().expect("only codes are packed here");
    let groups = part.cols / view.group;
    let mut codes = vec![0u8; part.cols];
    let (mut scales, mut biases) = (vec![0.0; groups], vec![0.0; groups]);
    part.format
        .unpack(part.row(row), &mut codes, &mut scales, &mut biases);
    if let Some(offset) = view.zero.offset() {
        biases
            .iter_mut()
            .zip(&scales)
            .for_each(|(b, s)| *b = -(offset as f32) * s);
    }
    for (k, tile) in band.chunks_mut(along).enumerate() {
        let (words, factors) = tile[..tile_bytes].split_at_mut(TILE * TILE_ROWS * bits / 8);
        for (c, &code) in codes[k * TILE..].iter().take(TILE).enumerate() {
            put(words, bits, r, c, code.into());
        }
        for i in 0..TILE / group {
            let column = k * TILE + i * group;
            if column < part.cols {
                let (g, at) = (column / view.group, 2 * scale_at(i, r));
                scale.put(factors, at, scales[g]);
                scale.put(factors, at + 1, biases[g]);
            }
        }
    }
}

/// Writes one row of E4M3 and its scales into its band. A group with a code that is no
/// number gets a scale that is none.
fn pack_e4m3_row(part: &Stored<'_>, row: usize, r: usize, band: &mut [u8], group: usize) {
    let stored = part.row(row);
    let packing = Packing::E4m3 { group };
    let tile_bytes = packing.tile_bytes();
    for (k, tile) in band.chunks_mut(packing.band() * tile_bytes).enumerate() {
        let (words, scales) = tile[..tile_bytes].split_at_mut(TILE * TILE_ROWS);
        for (i, codes) in stored.codes[k * TILE..]
            .chunks(group)
            .take(TILE / group)
            .enumerate()
        {
            for (c, &code) in codes.iter().enumerate() {
                put(words, 8, r, i * group + c, code.into());
            }
            let numbers = codes.iter().all(|code| code & 0x7f != 0x7f);
            let scale = part
                .format
                .tile_scale(&stored, (k * TILE + i * group) / stored.width);
            let scale = if numbers { 256.0 * scale } else { f32::NAN };
            Scalar::F32.put(scales, scale_at(i, r), scale);
        }
    }
}

/// Where the scale of a group and of row `r` lies in a tile: the rows that a lane has, `g`
/// and `g + 8`, beside each other.
fn scale_at(group: usize, r: usize) -> usize {
    group * TILE_ROWS + r % 8 * 2 + r / 8
}

/// Writes the code of row `r`, column `c` of a tile.
fn put(codes: &mut [u8], bits: usize, r: usize, c: usize, code: u32) {
    let (t, h, at) = column(c);
    let (half, lane) = (r / 8, r % 8 * 4 + t);
    let (pair, high) = (at / 2, 16 * (at % 2));
    let mut or = |word: usize, bits: u32| {
        let bytes = &mut codes[4 * word..4 * word + 4];
        let old = u32::from_le_bytes(bytes.try_into().expect("four bytes"));
        bytes.copy_from_slice(&(old | bits).to_le_bytes());
    };
    match bits {
        8 => codes[(half * 32 + lane) * 16 + h * 8 + at] = code as u8,
        4..=6 => {
            or(lane * 4 + half * 2 + h, (code & 15) << (4 * pair + high));
            match bits {
                5 => or(128 + lane, (code >> 4) << (half * 8 + h * 4 + pair + high)),
                6 => or(
                    128 + lane * 2 + half,
                    (code >> 4) << (2 * (h * 4 + pair) + high),
                ),
                _ => {}
            }
        }
        _ => {
            or(lane * 2 + half, (code & 3) << (2 * (h * 4 + pair) + high));
            if bits == 3 {
                or(64 + lane, (code >> 2) << (half * 8 + h * 4 + pair + high));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fp8;
    use proptest::prelude::*;

    /// Reads a packed value back, the way the kernels find it: from the fragment of
    /// a lane to the value.
    fn unpack(packing: Packing, packed: &Packed, tiles: usize, row: usize, col: usize) -> f32 {
        let size = packing.tile_bytes();
        let band = packing.band();
        let at = (row / 16 / band * tiles + col / 64) * band + row / 16 % band;
        let tile = &packed.bytes[at * size..][..size];
        let word = |i: usize| u32::from_le_bytes(tile[4 * i..4 * i + 4].try_into().unwrap());
        // Of 16 products of columns, j takes four columns of every lane's 16.
        let c = col % 64;
        let (lane, half) = (row % 8 * 4 + c % 32 / 8, row % 16 / 8);
        let j = c / 32 * 2 + c % 8 / 4;
        let (pair, end) = (c % 4 / 2, c % 2);
        match packing {
            Packing::Plain => {
                let w = word((lane + 32 * (half * 2 + j / 2)) * 4 + 2 * (j % 2) + pair);
                let v = half::f16::from_bits((w >> (16 * end)) as u16).to_f32();
                packed.factors.as_ref().map_or(v, |f| v * f[row])
            }
            Packing::E4m3 { group } => {
                let code = word((lane + 32 * half) * 4 + j) >> (16 * pair + 8 * end) & 255;
                let scale = Scalar::F32.get(&tile[1024..], scale_at(c / group, row % 16));
                let bits = (code & 0x80) << 8 | (code & 0x7f) << 7;
                scale * half::f16::from_bits(bits as u16).to_f32()
            }
            Packing::Codes { bits, group, scale } => {
                let q = j / 2 * 4 + 2 * (j % 2) + pair;
                let code = match bits {
                    8 => word((lane + 32 * half) * 4 + j) >> (16 * pair + 8 * end) & 255,
                    _ if bits >= 4 => {
                        let low = word(lane * 4 + half * 2 + j / 2)
                            >> (8 * (j % 2) + 4 * pair + 16 * end)
                            & 15;
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
                };
                let at = 2 * scale_at(c / group, row % 16);
                let scales = &tile[128 * bits..];
                let (s, b) = (scale.get(scales, at), scale.get(scales, at + 1));
                s.mul_add(code as f32, b)
            }
        }
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
            let scales: Vec<u8> = (0..rows * cols.div_ceil(tile)).flat_map(|i| (0.01 + i as f32).to_le_bytes()).collect();
            let stored = fp8(rows, cols, tile, &codes, &scales);
            let packing = Packing::of(&[stored]).unwrap();
            prop_assert_eq!(packing, if group > 0 { Packing::E4m3 { group } } else { Packing::Plain });
            let packed = pack(packing, &[stored]);
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
                    let packed = pack(packing, &parts);
                    let want = stored.view().to_f32();
                    for (i, want) in want.into_iter().enumerate() {
                        let got = unpack(packing, &packed, cols.div_ceil(TILE), i / cols, i % cols);
                        let exact = packing != Packing::Plain || matches!(format.layout, Layout::Plain(_));
                        let off = if exact { 0.0 } else { want.abs() / 2048.0 };
                        prop_assert!((got - want).abs() <= off, "{} row {} column {}: {got} not {want}", format.name, i / cols, i % cols);
                    }
                }
            }
        }
    }
}
