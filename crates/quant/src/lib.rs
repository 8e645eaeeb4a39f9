//! How numbers are stored: one file a format.
//!
//! A [`Format`] says how a row of `cols` values lies in bytes and turns it into
//! `f32` and back. A [`Stored`] is one matrix in such a format, borrowed from
//! wherever its bytes live: row-major, a row never shares a block with another.
//! Nothing here is fast; backends repack at load and have their own kernels,
//! tested against these.
//!
//! No files, no names of tensors, no arithmetic on matrices.

#![forbid(unsafe_code)]

mod affine;
mod block;
mod gguf;
mod kept;
pub mod kv;
mod plain;
mod scaled;
mod small;

pub use affine::{AFFINE, affine, widen};
pub use gguf::{K_QUANTS, NONLINEAR, SIMPLE, TURBO, gguf_format, nvfp4_times};
pub use kept::{Kept, Mapping};
pub use kv::{KV_FORMATS, KvLayout, KvRowFormat, kv_format, turbo};
pub use plain::{BF16, F16, F32};
pub use scaled::{Code, SCALED, ScaleType, Tiles, scaled};
pub use small::{e4m3, e8m0};

use std::sync::Arc;

/// The element type of plain tensors and of scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scalar {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an `f32`.
    Bf16,
}

impl Scalar {
    /// Bytes of one element.
    #[inline]
    pub const fn bytes(self) -> usize {
        match self {
            Scalar::F32 => 4,
            Scalar::F16 | Scalar::Bf16 => 2,
        }
    }

    /// Element `i` of little-endian `bytes`.
    ///
    /// # Panics
    ///
    /// If `bytes` ends before element `i` does.
    #[inline]
    pub fn get(self, bytes: &[u8], i: usize) -> f32 {
        let two = |i: usize| [bytes[2 * i], bytes[2 * i + 1]];
        match self {
            Scalar::F32 => {
                f32::from_le_bytes(bytes[4 * i..4 * i + 4].try_into().expect("four bytes"))
            }
            Scalar::F16 => half::f16::from_le_bytes(two(i)).to_f32(),
            Scalar::Bf16 => half::bf16::from_le_bytes(two(i)).to_f32(),
        }
    }

    /// Writes `value` as element `i`, rounded to nearest even.
    ///
    /// # Panics
    ///
    /// If `bytes` ends before element `i` does.
    #[inline]
    pub fn put(self, bytes: &mut [u8], i: usize, value: f32) {
        let at = i * self.bytes()..(i + 1) * self.bytes();
        match self {
            Scalar::F32 => bytes[at].copy_from_slice(&value.to_le_bytes()),
            Scalar::F16 => bytes[at].copy_from_slice(&half::f16::from_f32(value).to_le_bytes()),
            Scalar::Bf16 => bytes[at].copy_from_slice(&half::bf16::from_f32(value).to_le_bytes()),
        }
    }
}

/// What a backend must know of a format to repack it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightLayout {
    /// Elements one after the other.
    Plain(Scalar),
    /// Unsigned codes of `bits` in one little-endian bit stream a row, with a
    /// scale and a bias for each `group` columns:
    /// `value = scale * code + bias`.
    Affine {
        /// Bits of a code.
        bits: u8,
        /// Columns that share a scale and a bias.
        group: u16,
    },
    /// Blocks that hold codes and all that turns them into numbers, one after
    /// the other; [`Format::codes`] and [`Format::unpack`] take them apart.
    Block {
        /// Columns of a block.
        cols: u16,
        /// Bytes of a block.
        bytes: u16,
    },
    /// Codes of `bits` in one little-endian bit stream a row, with scales in a
    /// matrix of their own, each for a tile ([`Stored::tiles`]).
    Scaled {
        /// Bits of a code.
        bits: u8,
        /// What a code stands for.
        code: Code,
        /// How scales are stored.
        scale: ScaleType,
    },
}

/// A format seen as codes of `bits` with a scale, and a bias or none, for each
/// `group` columns, however its bytes lie. What backends repack from.
///
/// Scales and biases are products, `scale = d · s` and `bias = m · t`, of a
/// float for each `super_group` columns and an integer for each group; in formats
/// without such integers `super_group` is `group` and the integers are 1. In
/// blocks the products, and those of a scale and a level, are exact in `f32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Codes {
    /// Bits of a code, at most 8.
    pub bits: u8,
    /// Columns that share a scale and a bias; a divisor of the format's block.
    pub group: usize,
    /// Columns that share `d` and `m`; a multiple of `group`, a divisor of the
    /// block.
    pub super_group: usize,
    /// The narrowest type that holds all scales and biases exactly; `None` where
    /// each matrix has its own ([`Stored::scale`]). `d` and `m` fit
    /// [`Scalar::F16`] wherever `super_group` is not `group`.
    pub scale: Option<Scalar>,
    /// What a code stands for.
    pub zero: Zero,
}

/// How a code becomes a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zero {
    /// `value = fma(scale, code, bias)`.
    Bias,
    /// `value = scale * levels[code]`, a level for every code; biases are 0.
    Levels(&'static [i8]),
}

impl Zero {
    /// `o` where each level is its code less `o`.
    pub fn offset(&self) -> Option<i32> {
        let Zero::Levels(levels) = self else {
            return None;
        };
        let offset = -i32::from(levels[0]);
        let mut levels = (0..).zip(levels.iter());
        levels
            .all(|(code, &level)| i32::from(level) == code - offset)
            .then_some(offset)
    }
}

/// One way of storing a row of numbers.
pub struct Format {
    /// The name users see and type.
    pub name: &'static str,
    /// The layout, for backends that repack.
    pub layout: WeightLayout,
    /// A row's length must be a multiple of this.
    pub block: usize,
    /// The number of the type in GGUF files, if it has one.
    pub ggml: Option<u32>,
    view: Option<Codes>,
    /// What formats of [`WeightLayout::Block`] with a view of codes consist of.
    pieces: Option<block::Block>,
    decode: fn(&Format, Row<'_>, &mut [f32]),
    encode: Option<Encode>,
}

/// Appends a row to a matrix.
type Encode = fn(&Format, &[f32], Scalar, &mut Owned);

impl std::fmt::Debug for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for Format {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

/// Every format that weights may have, in the order users see them.
pub const FORMATS: &[&[Format]] = &[
    &[F32, F16, BF16],
    AFFINE,
    SIMPLE,
    K_QUANTS,
    NONLINEAR,
    TURBO,
    SCALED,
];

/// The format of weights called `name`.
pub fn format(name: &str) -> Option<&'static Format> {
    FORMATS.iter().copied().flatten().find(|f| f.name == name)
}

impl Format {
    /// Bytes of one row's codes.
    pub const fn code_bytes(&self, cols: usize) -> usize {
        match self.layout {
            WeightLayout::Plain(scalar) => cols * scalar.bytes(),
            WeightLayout::Affine { bits, .. } | WeightLayout::Scaled { bits, .. } => {
                cols * bits as usize / 8
            }
            WeightLayout::Block {
                cols: block, bytes, ..
            } => cols / block as usize * bytes as usize,
        }
    }

    /// Scales of one row that lie apart from its codes; there are as many
    /// biases. 0 where each matrix has its own tiles ([`Stored::tiles`]).
    pub const fn scales(&self, cols: usize) -> usize {
        match self.layout {
            WeightLayout::Plain(_) | WeightLayout::Block { .. } | WeightLayout::Scaled { .. } => 0,
            WeightLayout::Affine { group, .. } => cols / group as usize,
        }
    }

    /// Bytes of a matrix, scales and biases included but for those in tiles.
    pub const fn matrix_bytes(&self, rows: usize, cols: usize, scale: Scalar) -> usize {
        rows * (self.code_bytes(cols) + 2 * self.scales(cols) * scale.bytes())
    }

    /// The format as codes with scales; `None` for plain formats and those that
    /// can only be decoded.
    pub const fn codes(&self) -> Option<Codes> {
        self.view
    }

    /// The scale of tile `t` of a row, in [`WeightLayout::Scaled`]; its factor is in it.
    ///
    /// # Panics
    ///
    /// If the format has another layout or the row no such tile.
    pub fn tile_scale(&self, row: &Row<'_>, t: usize) -> f32 {
        match self.layout {
            WeightLayout::Scaled { scale, .. } => scaled::scale_of(row, scale, t),
            _ => panic!("{} keeps no scales of tiles", self.name),
        }
    }

    /// Whether [`encode`] can write the format.
    pub const fn can_encode(&self) -> bool {
        self.encode.is_some()
    }

    /// Takes a row apart: a code a column, a scale and a bias a group. Biases are
    /// 0 where the format has levels. Values made from these are those of
    /// [`Stored::decode_row`], bit for bit.
    ///
    /// # Panics
    ///
    /// If the format has no [`Format::codes`] or a length does not fit the row.
    pub fn unpack(&self, row: Row<'_>, codes: &mut [u8], scales: &mut [f32], biases: &mut [f32]) {
        let view = self.view_of(codes.len(), row);
        let groups = codes.len() / view.group;
        assert_eq!(
            (scales.len(), biases.len()),
            (groups, groups),
            "a scale and a bias a group"
        );
        match self.layout {
            WeightLayout::Affine { .. } => return affine::unpack(self, row, codes, scales, biases),
            WeightLayout::Scaled { .. } => {
                return scaled::unpack(self, view.group, row, codes, scales, biases);
            }
            WeightLayout::Plain(_) | WeightLayout::Block { .. } => {}
        }
        let n = self.block / view.group;
        let mut factors = scales.iter_mut().zip(biases);
        block::each(self, row, |first, pieces| {
            pieces.put_codes(&mut codes[first..first + self.block]);
            for (g, (scale, bias)) in factors.by_ref().take(n).enumerate() {
                (*scale, *bias) = pieces.factors(&view, g);
            }
        });
    }

    /// A row's codes, and the factors of its scales and biases: `d` and `m` a
    /// super-group, `s` and `t` a group, with `scale = d · s` and `bias = m · t`. `m` is
    /// not above 0 in K-quants, whose own `dmin` it is with the sign turned.
    ///
    /// # Panics
    ///
    /// If the format is none of [`WeightLayout::Block`] with [`Format::codes`], or a
    /// length does not fit the row.
    pub fn unpack_super(
        &self,
        row: Row<'_>,
        codes: &mut [u8],
        d: &mut [f32],
        m: &mut [f32],
        s: &mut [i8],
        t: &mut [i8],
    ) {
        assert!(
            self.pieces.is_some(),
            "{} has no blocks of codes",
            self.name
        );
        let view = self.view_of(codes.len(), row);
        let supers = codes.len() / view.super_group;
        assert_eq!(
            (d.len(), m.len(), t.len()),
            (supers, supers, s.len()),
            "factors of a row"
        );
        assert_eq!(s.len(), codes.len() / view.group, "factors of groups");
        block::each(self, row, |first, pieces| {
            pieces.put_codes(&mut codes[first..first + self.block]);
            let n = self.block / view.super_group;
            let at = first / view.super_group;
            d[at..at + n].copy_from_slice(&pieces.d[..n]);
            m[at..at + n].copy_from_slice(&pieces.m[..n]);
            let n = self.block / view.group;
            let at = first / view.group;
            s[at..at + n].copy_from_slice(&pieces.scales[..n]);
            t[at..at + n].copy_from_slice(&pieces.mins[..n]);
        });
    }

    /// The view of codes, proven to fit a row of `cols` columns.
    fn view_of(&self, cols: usize, row: Row<'_>) -> Codes {
        let view = self
            .view
            .unwrap_or_else(|| panic!("{} has no codes", self.name));
        assert!(
            cols.is_multiple_of(self.block) && row.codes.len() == self.code_bytes(cols),
            "codes of a whole row"
        );
        view
    }
}

/// One stored row.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// Codes or plain elements.
    pub codes: &'a [u8],
    /// Element type of `scales` and `biases`.
    pub scale: Scalar,
    /// One scale a group or tile; empty for plain formats and blocks.
    pub scales: &'a [u8],
    /// One bias a group, or one zero point, a byte, a tile; empty where the format
    /// has none.
    pub biases: &'a [u8],
    /// Columns of a tile, in formats with tiles.
    pub width: usize,
    /// What scales are multiplied by, in formats with tiles.
    pub factor: f64,
}

/// A matrix as stored, `[rows, cols]`, row-major.
#[derive(Clone, Copy, Debug)]
pub struct Stored<'a> {
    /// How a row is stored.
    pub format: &'static Format,
    /// Outputs of a linear, entries of a table.
    pub rows: usize,
    /// Inputs of a linear, width of a table.
    pub cols: usize,
    /// Codes or plain elements.
    pub codes: &'a [u8],
    /// Element type of `scales` and `biases`; where those are bytes, one that holds
    /// their values, times [`Tiles::factors`], exactly.
    pub scale: Scalar,
    /// Scales, empty for plain formats and blocks.
    pub scales: &'a [u8],
    /// Biases or zero points, empty where the format has none.
    pub biases: &'a [u8],
    /// What each scale covers, in [`WeightLayout::Scaled`].
    pub tiles: Tiles<'a>,
    /// The file that the bytes lie in, where it is mapped.
    pub mapping: Option<&'a Arc<dyn Mapping>>,
}

impl<'a> Stored<'a> {
    /// A plain matrix.
    ///
    /// # Panics
    ///
    /// If `codes` is not exactly `rows * cols` elements.
    pub fn plain(scalar: Scalar, rows: usize, cols: usize, codes: &'a [u8]) -> Self {
        let format = match scalar {
            Scalar::F32 => &F32,
            Scalar::F16 => &F16,
            Scalar::Bf16 => &BF16,
        };
        Stored::new(format, rows, cols, codes)
    }

    /// A matrix in a format that keeps nothing apart from `codes`.
    ///
    /// # Panics
    ///
    /// If the format keeps scales apart, `cols` is not whole blocks, or `codes` is
    /// not exactly `rows` rows.
    pub fn new(format: &'static Format, rows: usize, cols: usize, codes: &'a [u8]) -> Self {
        assert!(
            matches!(
                format.layout,
                WeightLayout::Plain(_) | WeightLayout::Block { .. }
            ) && cols.is_multiple_of(format.block),
            "{cols} columns of {}",
            format.name
        );
        assert_eq!(
            codes.len(),
            rows * format.code_bytes(cols),
            "bytes of a matrix"
        );
        Stored {
            format,
            rows,
            cols,
            codes,
            scale: Scalar::F32,
            scales: &[],
            biases: &[],
            tiles: Tiles::of_rows(0),
            mapping: None,
        }
    }

    /// Bytes of a row's scales, and of its biases or zero points.
    fn row_bytes(&self) -> (usize, usize) {
        match self.format.layout {
            WeightLayout::Scaled { code, scale, .. } => {
                let tiles = self.cols.div_ceil(self.tiles.cols);
                let zeros = if code == Code::ZeroPoint { tiles } else { 0 };
                (tiles * scale.bytes(self.scale), zeros)
            }
            _ => {
                let n = self.format.scales(self.cols) * self.scale.bytes();
                (n, n)
            }
        }
    }

    /// Row `row` as stored.
    ///
    /// # Panics
    ///
    /// If there is no such row.
    pub fn row(&self, row: usize) -> Row<'a> {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        let part = |bytes: &'a [u8], row: usize, n: usize| &bytes[row * n..(row + 1) * n];
        let (scales, biases) = self.row_bytes();
        let tile = (self.tiles.skip + row) / self.tiles.rows;
        Row {
            codes: part(self.codes, row, self.format.code_bytes(self.cols)),
            scale: self.scale,
            scales: part(self.scales, tile, scales),
            biases: part(self.biases, tile, biases),
            width: self.tiles.cols,
            factor: self.tiles.factor(row),
        }
    }

    /// Dequantizes row `row` into `out: [cols]`.
    ///
    /// # Panics
    ///
    /// If there is no such row or `out` has another length.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols, "one value a column");
        (self.format.decode)(self.format, self.row(row), out);
    }

    /// The whole matrix in `f32`, row-major.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        if self.cols > 0 {
            for (row, out) in out.chunks_exact_mut(self.cols).enumerate() {
                self.decode_row(row, out);
            }
        }
        out
    }

    /// Rows `rows` as a matrix of their own. Rows are independent in every
    /// format, so this is exact.
    ///
    /// # Panics
    ///
    /// If the range reaches past the last row.
    pub fn slice(&self, rows: std::ops::Range<usize>) -> Stored<'a> {
        let part = |bytes: &'a [u8], n: usize| &bytes[rows.start * n..rows.end * n];
        let codes = part(self.codes, self.format.code_bytes(self.cols));
        let (n_scales, n_biases) = self.row_bytes();
        let slice = Stored {
            rows: rows.len(),
            codes,
            ..*self
        };
        if matches!(self.format.layout, WeightLayout::Scaled { .. }) {
            let tiles = Tiles {
                skip: self.tiles.skip + rows.start,
                ..self.tiles
            };
            return Stored { tiles, ..slice };
        }
        Stored {
            scales: part(self.scales, n_scales),
            biases: part(self.biases, n_biases),
            ..slice
        }
    }
}

/// A matrix that owns its bytes.
#[derive(Clone, Debug)]
pub struct Owned {
    /// How a row is stored.
    pub format: &'static Format,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Element type of scales and biases.
    pub scale: Scalar,
    /// Codes or plain elements.
    pub codes: Vec<u8>,
    /// Scales, empty for plain formats and blocks.
    pub scales: Vec<u8>,
    /// Biases or zero points, empty where the format has none.
    pub biases: Vec<u8>,
    /// Columns that a scale covers, in [`WeightLayout::Scaled`]; it covers one row.
    pub width: usize,
    /// What a row's scales are multiplied by; empty if by nothing.
    pub factors: Vec<f64>,
}

impl Owned {
    /// A matrix without rows.
    pub(crate) fn empty(format: &'static Format, cols: usize, scale: Scalar) -> Owned {
        Owned {
            format,
            rows: 0,
            cols,
            scale,
            codes: Vec::new(),
            scales: Vec::new(),
            biases: Vec::new(),
            width: 0,
            factors: Vec::new(),
        }
    }

    /// Borrows the matrix.
    pub fn view(&self) -> Stored<'_> {
        Stored {
            format: self.format,
            rows: self.rows,
            cols: self.cols,
            codes: &self.codes,
            scale: self.scale,
            scales: &self.scales,
            biases: &self.biases,
            tiles: Tiles {
                factors: &self.factors,
                ..Tiles::of_rows(self.width)
            },
            mapping: None,
        }
    }

    /// Gathers the rows `order` of `from` into a new matrix, bytes unchanged; what
    /// rows share becomes their own.
    ///
    /// # Panics
    ///
    /// If a row does not exist.
    pub fn gather(from: &Stored<'_>, order: impl IntoIterator<Item = usize>) -> Owned {
        let mut out = Owned {
            width: from.tiles.cols,
            ..Owned::empty(from.format, from.cols, from.scale)
        };
        for row in order {
            let row = from.row(row);
            if !from.tiles.factors.is_empty() {
                out.factors.push(row.factor);
            }
            out.codes.extend_from_slice(row.codes);
            out.scales.extend_from_slice(row.scales);
            out.biases.extend_from_slice(row.biases);
            out.rows += 1;
        }
        out
    }
}

/// Stores `values: [rows, cols]` in `format`, with scales of type `scale`.
///
/// # Panics
///
/// If `values` is not whole rows, `cols` not a multiple of the format's block, or
/// the format can only be read ([`Format::can_encode`]).
pub fn encode(format: &'static Format, values: &[f32], cols: usize, scale: Scalar) -> Owned {
    let mut out = Owned::empty(format, cols, scale);
    encode_into(format, values, cols, scale, &mut out);
    out
}

/// [`encode`] in the memory of `out`, whatever it held.
///
/// # Panics
///
/// As [`encode`].
pub fn encode_into(
    format: &'static Format,
    values: &[f32],
    cols: usize,
    scale: Scalar,
    out: &mut Owned,
) {
    assert!(cols > 0 && values.len().is_multiple_of(cols), "whole rows");
    assert!(
        cols.is_multiple_of(format.block),
        "{cols} columns are not whole blocks of {}",
        format.block
    );
    let encode = format
        .encode
        .unwrap_or_else(|| panic!("{} can only be read", format.name));
    (out.format, out.rows, out.cols) = (format, values.len() / cols, cols);
    (out.scale, out.width) = (scale, 0);
    for bytes in [&mut out.codes, &mut out.scales, &mut out.biases] {
        bytes.clear();
    }
    out.factors.clear();
    for row in values.chunks_exact(cols) {
        encode(format, row, scale, out);
    }
}
