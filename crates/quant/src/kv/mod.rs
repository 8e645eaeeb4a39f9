//! How keys and values lie in a KV cache: one file a family of formats.
//!
//! A row is one head's key or value of one token. Each is stored on its own, so that
//! a rollback can cut the cache between any two rows. A backend lays a page out as its
//! kernels like it; [`KvRowFormat::encode`] and [`KvRowFormat::decode`] say what
//! attention must read back, bit for bit.
//!
//! ```
//! let format = quant::kv_format("q8_0").expect("one of KV_FORMATS");
//! let row = [0.5; 64];
//! let (mut bytes, mut read) = (Vec::new(), [0.0; 64]);
//! format.encode(&row, &mut bytes);
//! assert_eq!(bytes.len(), format.row_bytes(64));
//! format.decode(&bytes, &mut read);
//! assert!((read[0] - 0.5).abs() < 0.01);
//! ```

mod coded;
mod plain;
mod rotation;
pub mod turbo;

pub use coded::{Q4_0, Q5_0, Q8_0, ROT_Q4_0, ROT_Q5_0, ROT_Q8_0};
pub use plain::{BF16, F16, F32};
pub use rotation::Rotation;
pub use turbo::{TURBO2, TURBO3, TURBO4};

use crate::{Format, Owned, Row, Scalar, block};

/// Every format of keys and values, in the order users see them; the first is the
/// default.
///
/// A new format is a file beside this one and a line here; `--kv` reads its spelling
/// from here. Each backend then says which formats it keeps.
pub const KV_FORMATS: &[KvRowFormat] = &[
    BF16, F16, F32, Q8_0, Q5_0, Q4_0, ROT_Q8_0, ROT_Q5_0, ROT_Q4_0, TURBO4, TURBO3, TURBO2,
];

/// The format of keys or values called `name`.
pub fn kv_format(name: &str) -> Option<&'static KvRowFormat> {
    KV_FORMATS.iter().find(|format| format.name == name)
}

/// How the row of one key or one value is stored.
pub struct KvRowFormat {
    /// The name users see and type.
    pub name: &'static str,
    /// What a backend must know to lay rows out for its kernels.
    pub layout: KvLayout,
    /// A row's length must be a multiple of this.
    pub block: usize,
    /// How rows are rotated before they are rounded, if they are. They are read as they were
    /// rotated: queries of such keys have to be rotated too, and sums of such values turned back.
    pub rotation: Option<Rotation>,
    /// The format of weights that has the same bytes, if there is one.
    same_as: Option<&'static Format>,
    encode: fn(&KvRowFormat, &[f32], &mut Vec<u8>),
    decode: fn(&KvRowFormat, &[u8], &mut [f32]),
}

/// What a backend must know of a KV format to lay it out for its kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvLayout {
    /// Elements one after the other.
    Plain(Scalar),
    /// Unsigned codes with an `f16` scale for each `group` columns:
    /// `value = scale · (code − offset)`. [`KvRowFormat::unpack`] takes a row apart.
    Coded {
        /// Bits of a code.
        bits: u8,
        /// Columns that share a scale.
        group: u16,
        /// The code that stands for 0.
        offset: u8,
    },
    /// Rotated rows whose columns were rounded to `2^bits` levels ([`turbo`]).
    Levels {
        /// Bits of an index.
        bits: u8,
    },
}

impl std::fmt::Debug for KvRowFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for KvRowFormat {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl KvRowFormat {
    /// A format whose rows are those of a format of weights, for keys and values.
    const fn like(weights: &'static Format, layout: KvLayout) -> KvRowFormat {
        KvRowFormat {
            name: weights.name,
            layout,
            block: weights.block,
            rotation: None,
            same_as: Some(weights),
            encode: encode_like,
            decode: decode_like,
        }
    }

    /// Bytes of a row of `cols` columns.
    pub const fn row_bytes(&self, cols: usize) -> usize {
        match self.layout {
            KvLayout::Plain(scalar) => cols * scalar.bytes(),
            KvLayout::Coded { bits, group, .. } => {
                let group = group as usize;
                cols / group * (group * bits as usize / 8 + Scalar::F16.bytes())
            }
            KvLayout::Levels { bits } => turbo::row_bytes(bits, cols),
        }
    }

    /// Stores `row` in `out`, in place of what it held.
    ///
    /// # Panics
    ///
    /// If the row is empty or not whole blocks.
    pub fn encode(&self, row: &[f32], out: &mut Vec<u8>) {
        self.check_blocks(row);
        out.clear();
        (self.encode)(self, row, out);
    }

    /// Stores a row that has been rotated already as [`Self::rotation`] says, in place of what `out`
    /// held: [`Self::encode`] for callers with memory of their own.
    ///
    /// # Panics
    ///
    /// If the row is empty or not whole blocks, or the format has [`KvLayout::Levels`], whose scales need
    /// the row as it was.
    pub fn encode_rotated(&self, row: &[f32], out: &mut Vec<u8>) {
        self.check_blocks(row);
        assert!(self.same_as.is_some(), "{} has codes", self.name);
        out.clear();
        encode_blocks(self, row, out);
    }

    fn check_blocks(&self, row: &[f32]) {
        assert!(
            !row.is_empty() && row.len().is_multiple_of(self.block),
            "{} columns are not whole blocks of {}",
            row.len(),
            self.block
        );
    }

    /// Reads a row of `out.len()` columns, in formats with a rotation still rotated.
    ///
    /// # Panics
    ///
    /// If `bytes` is not exactly such a row.
    pub fn decode(&self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(bytes.len(), self.row_bytes(out.len()), "bytes of a row");
        (self.decode)(self, bytes, out);
    }

    /// Takes a row in [`KvLayout::Coded`] apart: a code a column, a scale a group.
    ///
    /// # Panics
    ///
    /// If the format has another layout or a length does not fit the row.
    pub fn unpack(&self, bytes: &[u8], codes: &mut [u8], scales: &mut [f32]) {
        let KvLayout::Coded { group, .. } = self.layout else {
            panic!("{} has no codes", self.name);
        };
        let weights = self.same_as.expect("codes are those of weights");
        assert_eq!(bytes.len(), self.row_bytes(codes.len()), "bytes of a row");
        assert_eq!(
            scales.len() * usize::from(group),
            codes.len(),
            "a scale a group"
        );
        let view = weights.codes().expect("codes are those of weights");
        block::each(weights, row_of(bytes), |first, pieces| {
            pieces.put_codes(&mut codes[first..first + weights.block]);
            let groups = &mut scales[first / view.group..][..weights.block / view.group];
            for (g, scale) in groups.iter_mut().enumerate() {
                *scale = pieces.factors(&view, g).0;
            }
        });
    }
}

/// `bytes` as a row of a format that keeps nothing apart from its codes.
fn row_of(bytes: &[u8]) -> Row<'_> {
    Row {
        codes: bytes,
        scale: Scalar::F32,
        scales: &[],
        biases: &[],
        width: 0,
        factor: 1.0,
    }
}

fn encode_like(format: &KvRowFormat, row: &[f32], out: &mut Vec<u8>) {
    let Some(rotation) = format.rotation else {
        return encode_blocks(format, row, out);
    };
    let mut row = row.to_vec();
    rotation.rotate(&mut row);
    encode_blocks(format, &row, out);
}

/// Stores a row, rotated already if it has to be, as weights of the same bytes.
fn encode_blocks(format: &KvRowFormat, row: &[f32], out: &mut Vec<u8>) {
    let weights = format.same_as.expect("made by `like`");
    let encode = weights.encode.expect("a format that can be written");
    let mut owned = Owned {
        codes: std::mem::take(out),
        ..Owned::empty(weights, row.len(), Scalar::F32)
    };
    encode(weights, row, Scalar::F32, &mut owned);
    *out = owned.codes;
}

fn decode_like(format: &KvRowFormat, bytes: &[u8], out: &mut [f32]) {
    let weights = format.same_as.expect("made by `like`");
    (weights.decode)(weights, row_of(bytes), out);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Zero;

    /// Numbers of both signs, some far from the others.
    fn row(cols: usize) -> Vec<f32> {
        let value = |c: usize| ((c * c * 37 + 11 * c) % 251) as f32 / 31.0 - 4.0;
        (0..cols).map(value).collect()
    }

    #[test]
    fn a_row_is_what_the_same_format_of_weights_makes_of_it() {
        for format in KV_FORMATS {
            let mut row = row(128);
            let (mut bytes, mut read) = (vec![7; 3], vec![0.0; 128]);
            format.encode(&row, &mut bytes);
            assert_eq!(bytes.len(), format.row_bytes(128), "{}", format.name);
            format.decode(&bytes, &mut read);
            let Some(weights) = format.same_as else {
                assert!(matches!(format.layout, KvLayout::Levels { .. }));
                continue;
            };
            if let Some(rotation) = format.rotation {
                rotation.rotate(&mut row);
                let mut again = vec![9; 5];
                format.encode_rotated(&row, &mut again);
                assert_eq!(again, bytes, "{}", format.name);
            }
            let stored = crate::encode(weights, &row, 128, Scalar::F32);
            assert_eq!((&stored.codes, stored.view().to_f32()), (&bytes, read));
        }
    }

    #[test]
    fn a_layout_of_codes_is_that_of_the_format() {
        for format in KV_FORMATS {
            let KvLayout::Coded {
                bits,
                group,
                offset,
            } = format.layout
            else {
                continue;
            };
            let view = format.same_as.and_then(Format::codes).expect("codes");
            assert_eq!((view.bits, view.group), (bits, group.into()));
            assert_eq!(view.scale, Some(Scalar::F16));
            assert!(matches!(view.zero, Zero::Levels(_)));
            assert_eq!(view.zero.offset(), Some(offset.into()));
            let row = row(64);
            let (mut bytes, mut read) = (Vec::new(), vec![0.0; 64]);
            format.encode(&row, &mut bytes);
            format.decode(&bytes, &mut read);
            let (mut codes, mut scales) = (vec![0; 64], vec![0.0; 64 / usize::from(group)]);
            format.unpack(&bytes, &mut codes, &mut scales);
            for (c, value) in read.iter().enumerate() {
                let level = f32::from(codes[c]) - f32::from(offset);
                assert_eq!(*value, scales[c / usize::from(group)] * level);
            }
        }
    }

    /// A rotation spares a block's other columns the scale of a large one.
    #[test]
    fn rotated_codes_bear_a_large_column() {
        for (plain, rotated) in [(Q8_0, ROT_Q8_0), (Q5_0, ROT_Q5_0), (Q4_0, ROT_Q4_0)] {
            let mut row = row(64);
            row[5] = 60.0;
            let error = |format: &KvRowFormat| {
                let (mut bytes, mut read) = (Vec::new(), vec![0.0; 64]);
                format.encode(&row, &mut bytes);
                format.decode(&bytes, &mut read);
                if let Some(rotation) = format.rotation {
                    rotation.undo(&mut read);
                }
                let square = |(a, b): (&f32, &f32)| (a - b) * (a - b);
                row.iter().zip(&read).map(square).sum::<f32>()
            };
            assert_eq!(plain.row_bytes(64), rotated.row_bytes(64));
            let (plain, rotated) = (error(&plain), error(&rotated));
            assert!(2.0 * rotated < plain, "{rotated} against {plain}");
        }
    }

    #[test]
    fn names_are_found_and_differ() {
        for format in KV_FORMATS {
            assert_eq!(kv_format(format.name), Some(format));
        }
        assert_eq!(kv_format("q4_k"), None);
    }
}
