//! How numbers are stored: one file a format.
//!
//! A [`Format`] says how a row of `cols` values lies in bytes and turns it into
//! `f32` and back. A [`Stored`] is one matrix in such a format, borrowed from
//! wherever its bytes live: row-major, a row never shares a block with another.
//! [`kv`] has the formats of keys and values. Nothing here is fast; backends repack at
//! load and have their own kernels, tested against these.
//!
//! ```
//! let row = [0.25f32, -1.0, 0.5, 2.0].repeat(16);
//! let format = quant::format("q8_0").expect("one of FORMATS");
//! let stored = quant::encode(format, &row, 64, quant::Scalar::F32);
//! assert_eq!(stored.codes.len(), format.matrix_bytes(1, 64, quant::Scalar::F32));
//! let read = stored.view().to_f32();
//! assert!(row.iter().zip(&read).all(|(a, b)| (a - b).abs() < 0.01));
//! ```
//!
//! Deliberately absent: files, names of tensors, arithmetic on matrices.

#![forbid(unsafe_code)]

mod affine;
mod block;
mod gguf;
mod kept;
pub mod kv;
mod plain;
mod rotated;
mod scaled;
mod small;
mod stored;

pub use affine::{AFFINE, affine, widen};
pub use gguf::{K_QUANTS, NONLINEAR, SIMPLE, TURBO, gguf_format, nvfp4_times};
pub use kept::{Kept, Mapping};
pub use kv::{KV_FORMATS, KvLayout, KvRowFormat, Rotation, kv_format, turbo};
pub use plain::{BF16, F16, F32};
pub use rotated::Rotated;
pub use scaled::{Code, SCALED, ScaleType, Tiles, scaled};
pub use small::{e4m3, e8m0};
pub use stored::{Owned, Row, Stored, encode};

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

/// How a row of weights lies in bytes: what a backend must know to repack it.
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

/// A format of weights seen as codes of `bits` with a scale, and a bias or none, for each
/// `group` columns, however the bytes lie. Backends repack from this view, so a format
/// that has it needs nothing of its own in them.
///
/// Scales and biases are products, `scale = d · s` and `bias = m · t`, of a
/// float for each `super_group` columns and an integer for each group; in formats
/// without such integers `super_group` is `group` and the integers are 1. In
/// blocks the products, and those of a scale and a level, are exact in `f32`.
#[derive(Clone, Copy, Debug, PartialEq)]
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
    /// Set where columns were rotated before they were coded: codes stand for the rotated ones.
    pub rotated: Option<Rotated>,
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
    /// The offset `o` if every level is its code less `o`.
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

/// One way of storing a row of weights. [`KvRowFormat`] is its like for keys and values.
pub struct Format {
    /// The name users see and type.
    pub name: &'static str,
    /// How a row's bytes lie, for backends that repack.
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
    /// [`Stored::decode_row`], bit for bit, except in formats with rotated columns
    /// ([`Codes::rotated`]).
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
