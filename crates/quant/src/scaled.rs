//! Codes in rows, with their scales in a matrix of their own.
//!
//! ```text
//! fp8     E4M3, a byte a column; fp8-mx with scales of E8M0
//! fp4-mx  E2M1 in groups of 32, scales of E8M0
//! fp4-nv  E2M1 in groups of 16, scales of E4M3
//! int     codes less half their range; sint8 two's complement
//! uint    codes less a zero point of each scale
//! ```
//!
//! A scale covers a tile of the matrix ([`Tiles`]): a group of columns, a row, a
//! block of 128 rows and columns, all of it. A row's codes are one little-endian
//! bit stream, code `c` in bits `c·bits .. (c + 1)·bits`.
//!
//! ```text
//! scale = round(s · factor)      value = round(scale · level)
//! uint:  bias = −round(scale · zero)    value = fma(scale, code, bias)
//! ```
//!
//! `factor` is 1 but for the scales of a scale that some writers add. It is in
//! `f64`, where it may be the inverse of an `f32`: a scale of 8 bits times that
//! inverse rounds to the `f32` that the division gives, since no quotient of 4 by
//! 24 bits lies within 2⁻⁴⁹ of the middle of two neighbors.
//!
//! Deliberately absent: encoding. Others write these formats.

use crate::affine;
use crate::small::{E2M1_DOUBLED, E4M3, e4m3, e8m0};
use crate::{Codes, Format, Row, Scalar, WeightLayout, Zero, block};

/// What a code of [`WeightLayout::Scaled`] stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// A float in E4M3 ([`crate::e4m3`]).
    E4m3,
    /// A float in E2M1: `0, ½, 1, 1½, 2, 3, 4, 6` and their negatives.
    E2m1,
    /// The code less `2^(bits − 1)`.
    Offset,
    /// An integer in two's complement.
    Signed,
    /// The code less the zero point of its tile, a byte in [`Row::biases`].
    ZeroPoint,
}

/// How scales of [`WeightLayout::Scaled`] are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleType {
    /// As the floats that [`crate::Stored::scale`] says.
    Float,
    /// As E8M0, a byte each ([`crate::e8m0`]).
    E8m0,
    /// As E4M3, a byte each.
    E4m3,
}

impl ScaleType {
    /// Bytes of a scale where floats are of type `float`.
    pub(crate) const fn bytes(self, float: Scalar) -> usize {
        match self {
            ScaleType::Float => float.bytes(),
            ScaleType::E8m0 | ScaleType::E4m3 => 1,
        }
    }
}

/// Which part of a matrix in [`WeightLayout::Scaled`] each of its scales covers: tiles
/// of `rows` by `cols`, those at the right and lower edges cut off.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tiles<'a> {
    /// Rows of a tile.
    pub rows: usize,
    /// Columns of a tile.
    pub cols: usize,
    /// Rows of the whole that lie above this part of it. Scales and factors are
    /// those of the whole.
    pub skip: usize,
    /// What scales are multiplied by, one for each `factor_rows` rows; empty if by
    /// nothing.
    pub factors: &'a [f64],
    /// Rows that share a factor.
    pub factor_rows: usize,
}

impl<'a> Tiles<'a> {
    /// A scale for each row and `cols` columns of it, without factors.
    pub const fn of_rows(cols: usize) -> Tiles<'a> {
        Tiles {
            rows: 1,
            cols,
            skip: 0,
            factors: &[],
            factor_rows: 1,
        }
    }

    /// The factor of row `row`.
    pub(crate) fn factor(&self, row: usize) -> f64 {
        let at = (self.skip + row) / self.factor_rows;
        if self.factors.is_empty() {
            1.0
        } else {
            self.factors[at]
        }
    }
}

const fn of(
    name: &'static str,
    (bits, group): (u8, u16),
    code: Code,
    scale: ScaleType,
    view: Option<(Option<Scalar>, Zero)>,
) -> Format {
    let group = group as usize;
    Format {
        name,
        layout: WeightLayout::Scaled { bits, code, scale },
        block: group,
        ggml: None,
        view: match view {
            None => None,
            Some((scale, zero)) => Some(Codes {
                bits,
                group,
                super_group: group,
                scale,
                zero,
                rotated: None,
            }),
        },
        pieces: None,
        decode,
        encode: None,
    }
}

const fn int(name: &'static str, bits: u8, group: u16, code: Code) -> Format {
    let view = match (code, bits) {
        (Code::ZeroPoint, _) => (Some(Scalar::F32), Zero::Bias),
        (_, 4) => (None, Zero::Levels(&const { block::levels::<16>(8) })),
        _ => (None, Zero::Levels(&const { block::levels::<256>(128) })),
    };
    of(name, (bits, group), code, ScaleType::Float, Some(view))
}

/// Every format of codes with scales apart. Of the integers there is one for each
/// group size that kernels know: longer tiles repeat a scale.
pub const SCALED: &[Format] = &[
    of("fp8", (8, 1), Code::E4m3, ScaleType::Float, None),
    of("fp8-mx", (8, 1), Code::E4m3, ScaleType::E8m0, None),
    of(
        "fp4-mx",
        (4, 32),
        Code::E2m1,
        ScaleType::E8m0,
        Some((Some(Scalar::Bf16), Zero::Levels(E2M1_DOUBLED))),
    ),
    of(
        "fp4-nv",
        (4, 16),
        Code::E2m1,
        ScaleType::E4m3,
        Some((None, Zero::Levels(E2M1_DOUBLED))),
    ),
    int("int4-g32", 4, 32, Code::Offset),
    int("int4-g64", 4, 64, Code::Offset),
    int("int4-g128", 4, 128, Code::Offset),
    int("int8-g32", 8, 32, Code::Offset),
    int("int8-g64", 8, 64, Code::Offset),
    int("int8-g128", 8, 128, Code::Offset),
    int("sint8-g32", 8, 32, Code::Signed),
    int("sint8-g64", 8, 64, Code::Signed),
    int("sint8-g128", 8, 128, Code::Signed),
    int("uint4-g32", 4, 32, Code::ZeroPoint),
    int("uint4-g64", 4, 64, Code::ZeroPoint),
    int("uint4-g128", 4, 128, Code::ZeroPoint),
    int("uint8-g32", 8, 32, Code::ZeroPoint),
    int("uint8-g64", 8, 64, Code::ZeroPoint),
    int("uint8-g128", 8, 128, Code::ZeroPoint),
];

/// The format of `bits`-wide `code`s under scales of type `scale` in a matrix of
/// `cols` columns whose tiles are `tile` columns wide: the longest group that
/// divides both, a tile as wide as the matrix being as good as any.
///
/// ```
/// use quant::{Code, ScaleType, scaled};
/// let name = |tile, cols| scaled(4, Code::Offset, ScaleType::Float, tile, cols).map(|f| f.name);
/// assert_eq!(name(256, 1024), Some("int4-g128"));
/// assert_eq!(name(320, 320), Some("int4-g64"));
/// assert_eq!(name(48, 96), None);
/// ```
pub fn scaled(
    bits: usize,
    code: Code,
    scale: ScaleType,
    tile: usize,
    cols: usize,
) -> Option<&'static Format> {
    let wanted = |f: &&Format| matches!(f.layout, WeightLayout::Scaled { bits: b, code: c, scale: s } if usize::from(b) == bits && c == code && s == scale);
    let fits = |f: &&Format| {
        cols.is_multiple_of(f.block) && (tile >= cols || tile.is_multiple_of(f.block))
    };
    let all = SCALED.iter().filter(wanted).filter(fits);
    all.max_by_key(|f| f.block)
}

/// The parts of a format made by [`of`].
fn parts(format: &Format) -> (usize, Code, ScaleType) {
    match format.layout {
        WeightLayout::Scaled { bits, code, scale } => (bits.into(), code, scale),
        _ => unreachable!("only formats with scales apart are made here"),
    }
}

/// The scale of tile `t` of a row.
pub(crate) fn scale_of(row: &Row<'_>, scale: ScaleType, t: usize) -> f32 {
    let stored = match scale {
        ScaleType::Float => row.scale.get(row.scales, t),
        ScaleType::E8m0 => e8m0(row.scales[t]),
        ScaleType::E4m3 => e4m3(row.scales[t]),
    };
    if row.factor == 1.0 {
        return stored;
    }
    (f64::from(stored) * row.factor) as f32
}

/// Scale and bias of tile `t` as [`Format::codes`] sees them.
fn factors(row: &Row<'_>, code: Code, scale: ScaleType, t: usize) -> (f32, f32) {
    let scale = scale_of(row, scale, t);
    match code {
        Code::E2m1 => (0.5 * scale, 0.0),
        Code::ZeroPoint => (scale, -(scale * f32::from(row.biases[t]))),
        Code::E4m3 | Code::Offset | Code::Signed => (scale, 0.0),
    }
}

fn decode(format: &Format, row: Row<'_>, out: &mut [f32]) {
    let (bits, kind, scale_type) = parts(format);
    for (t, out) in out.chunks_mut(row.width).enumerate() {
        let (scale, bias) = factors(&row, kind, scale_type, t);
        let codes = (t * row.width..).map(|c| affine::code(row.codes, bits, c) as u8);
        let values = out.iter_mut().zip(codes);
        match kind {
            Code::E4m3 => values.for_each(|(v, c)| *v = scale * E4M3[usize::from(c)]),
            Code::E2m1 => {
                values.for_each(|(v, c)| *v = scale * f32::from(E2M1_DOUBLED[usize::from(c)]));
            }
            Code::Offset => {
                let half = 1i16 << (bits - 1);
                values.for_each(|(v, c)| *v = scale * f32::from(i16::from(c) - half));
            }
            Code::Signed => values.for_each(|(v, c)| *v = scale * f32::from(c as i8)),
            Code::ZeroPoint => values.for_each(|(v, c)| *v = scale.mul_add(c.into(), bias)),
        }
    }
}

/// [`Format::unpack`], lengths proven. Codes in two's complement come out less
/// the lowest, as their levels are listed.
pub(crate) fn unpack(
    format: &Format,
    group: usize,
    row: Row<'_>,
    codes: &mut [u8],
    scales: &mut [f32],
    biases: &mut [f32],
) {
    let (bits, kind, scale_type) = parts(format);
    let flip = if kind == Code::Signed { 0x80 } else { 0 };
    affine::codes(row.codes, bits, codes);
    codes.iter_mut().for_each(|code| *code ^= flip);
    for (g, (scale, bias)) in scales.iter_mut().zip(biases).enumerate() {
        (*scale, *bias) = factors(&row, kind, scale_type, g * group / row.width);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Owned, Stored};
    use proptest::prelude::*;

    const ROWS: usize = 7;

    /// A matrix of the whole of which `stored` is a part, its values by definition:
    /// bit by bit, in double precision.
    fn by_definition(stored: &Stored<'_>, row: usize, c: usize) -> f32 {
        let (bits, kind, scale_type) = parts(stored.format);
        let start = 8 * row * stored.format.code_bytes(stored.cols) + c * bits;
        let bit = |b: usize| u32::from(stored.codes[(start + b) / 8]) >> ((start + b) % 8) & 1;
        let code: u32 = (0..bits).map(|b| bit(b) << b).sum();
        let whole = stored.tiles.skip + row;
        let across = stored.cols.div_ceil(stored.tiles.cols);
        let tile = whole / stored.tiles.rows * across + c / stored.tiles.cols;
        let mut scale = f64::from(match scale_type {
            ScaleType::Float => stored.scale.get(stored.scales, tile),
            ScaleType::E8m0 => e8m0(stored.scales[tile]),
            ScaleType::E4m3 => e4m3(stored.scales[tile]),
        });
        if let Some(factor) = stored.tiles.factors.get(whole / stored.tiles.factor_rows) {
            scale = f64::from((scale * factor) as f32);
        }
        let level = match kind {
            Code::E4m3 => f64::from(e4m3(code as u8)),
            Code::E2m1 => f64::from(E2M1_DOUBLED[code as usize]) / 2.0,
            Code::Offset => f64::from(code) - f64::from(1 << (bits - 1)),
            Code::Signed => f64::from(code as u8 as i8),
            Code::ZeroPoint => f64::from(code) - f64::from(stored.biases[tile]),
        };
        (scale * level) as f32
    }

    fn equal(got: &[f32], want: impl Iterator<Item = f32>) -> bool {
        got.iter()
            .zip(want)
            .all(|(g, w)| g == &w || g.is_nan() && w.is_nan())
    }

    proptest! {
        #[test]
        fn values_views_slices_and_gathers_follow_the_definition(
            seed in proptest::collection::vec(any::<u8>(), ROWS * 256 + 64),
            scales in proptest::collection::vec(0x3a00u16..0x4600, ROWS * 16),
            factors in proptest::collection::vec(0.001f64..1000.0, ROWS),
            (tile_rows, tile_cols, skip, shared) in (1usize..9, 1usize..18, 0usize..3, any::<bool>()),
        ) {
            for format in SCALED {
                let (_, kind, scale_type) = parts(format);
                let cols = if format.block == 1 { 250 } else { 256 };
                let scales: Vec<u8> = match scale_type {
                    ScaleType::Float => scales.iter().flat_map(|s| s.to_le_bytes()).collect(),
                    _ => scales.iter().map(|s| *s as u8).collect(),
                };
                let whole = Stored {
                    format,
                    rows: ROWS,
                    cols,
                    codes: &seed[..ROWS * format.code_bytes(cols)],
                    scale: Scalar::Bf16,
                    scales: &scales,
                    biases: if kind == Code::ZeroPoint { &seed[256..] } else { &[] },
                    tiles: Tiles {
                        rows: tile_rows,
                        cols: tile_cols * format.block.max(16),
                        skip: 0,
                        factors: if scale_type == ScaleType::E4m3 { &factors } else { &[] },
                        factor_rows: if shared { 4 } else { 1 },
                    },
                    mapping: None,
                };
                let mut values = vec![0.0; cols];
                let part = whole.slice(skip..ROWS);
                let order = [3, 0, 3, ROWS - 1 - skip];
                let gathered = Owned::gather(&part, order);
                for row in 0..part.rows {
                    part.decode_row(row, &mut values);
                    prop_assert!(equal(&values, (0..cols).map(|c| by_definition(&whole, skip + row, c))), "{} row {row}", format.name);
                    prop_assert!(equal(&values, (0..cols).map(|c| by_definition(&part, row, c))), "{} part, row {row}", format.name);
                }
                for (i, &row) in order.iter().enumerate() {
                    part.decode_row(row, &mut values);
                    prop_assert!(equal(&gathered.view().to_f32()[i * cols..(i + 1) * cols], values.iter().copied()), "{} gathered", format.name);
                }
                let Some(view) = format.codes() else { continue };
                let groups = cols / view.group;
                let (mut codes, mut scales, mut biases) = (vec![0; cols], vec![0.0; groups], vec![0.0; groups]);
                format.unpack(part.row(0), &mut codes, &mut scales, &mut biases);
                part.decode_row(0, &mut values);
                let rebuilt = codes.iter().enumerate().map(|(c, &code)| match view.zero {
                    Zero::Bias => scales[c / view.group].mul_add(code.into(), biases[c / view.group]),
                    Zero::Levels(levels) => scales[c / view.group] * f32::from(levels[usize::from(code)]),
                });
                prop_assert!(equal(&values, rebuilt), "{} from its view", format.name);
            }
        }

        #[test]
        fn a_scale_times_an_inverse_is_the_quotient(bits in 0x0080_0000u32..0x7f00_0000) {
            let by = f32::from_bits(bits);
            for byte in 0..0x7f {
                let quotient = e4m3(byte) / by;
                if quotient.is_normal() {
                    prop_assert_eq!((f64::from(e4m3(byte)) * (1.0 / f64::from(by))) as f32, quotient);
                }
            }
        }
    }

    #[test]
    fn whole_codes_keep_their_offset() {
        for format in SCALED {
            let offset = format.codes().and_then(|v| v.zero.offset());
            let expected = match parts(format) {
                (4, Code::Offset, _) => Some(8),
                (8, Code::Offset | Code::Signed, _) => Some(128),
                _ => None,
            };
            assert_eq!(offset, expected, "{}", format.name);
            assert!(!format.can_encode());
        }
    }
}
