//! What every container file yields: entries with proven byte ranges.

use quant::{Format, Scalar};
use std::ops::Range;

/// Files of one checkpoint; the largest known one has some 200.
pub(crate) const MAX_FILES: usize = 1024;

/// The element type of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Dtype {
    /// The name in a safetensors header, or of the format.
    pub(crate) name: &'static str,
    /// Bits of one element; of a format, of a block.
    pub(crate) bits: usize,
    /// What blocks of several elements are.
    pub(crate) format: Option<&'static Format>,
}

const fn of(name: &'static str, bits: usize) -> Dtype {
    Dtype {
        name,
        bits,
        format: None,
    }
}

/// Every element type of the safetensors format. Most are never computed with,
/// but a file that holds one must still have its offsets proven.
pub(crate) const DTYPES: &[Dtype] = &[
    of("BF16", 16),
    of("F16", 16),
    of("F32", 32),
    of("F64", 64),
    of("U32", 32),
    of("I32", 32),
    of("I64", 64),
    of("U64", 64),
    of("U8", 8),
    of("I8", 8),
    of("U16", 16),
    of("I16", 16),
    of("BOOL", 8),
    of("F8_E4M3", 8),
    of("F8_E5M2", 8),
    of("F8_E8M0", 8),
    of("F8_E4M3FNUZ", 8),
    of("F8_E5M2FNUZ", 8),
    of("F6_E2M3", 6),
    of("F6_E3M2", 6),
    of("F4", 4),
    of("C64", 64),
];

impl Dtype {
    pub(crate) fn named(name: &str) -> Option<Dtype> {
        DTYPES.iter().copied().find(|d| d.name == name)
    }

    /// Rows of blocks in `format`, which keeps nothing apart from them.
    pub(crate) fn blocks(format: &'static Format) -> Dtype {
        Dtype {
            name: format.name,
            bits: 8 * format.code_bytes(format.block),
            format: Some(format),
        }
    }

    /// Elements of a block, and its whole bytes.
    pub(crate) fn block(self) -> (usize, usize) {
        (self.format.map_or(1, |format| format.block), self.bits / 8)
    }

    /// The type as something that can be computed with.
    pub(crate) fn scalar(self) -> Option<Scalar> {
        match self.name {
            "F32" => Some(Scalar::F32),
            "F16" => Some(Scalar::F16),
            "BF16" => Some(Scalar::Bf16),
            _ => None,
        }
    }
}

/// One stored tensor. `range` lies inside its file, overlaps no other entry, and
/// is exactly as long as `shape` and `dtype` say; no dimension is zero.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) range: Range<usize>,
}

impl Entry {
    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// One file's tensors.
#[derive(Debug)]
pub(crate) struct Contents {
    /// In the order of their data.
    pub(crate) entries: Vec<Entry>,
    /// The file says of itself that it follows MLX conventions.
    pub(crate) says_mlx: bool,
}
