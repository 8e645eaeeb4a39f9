//! Rows and matrices in a format: borrowed from wherever their bytes lie, or owned.

use crate::{BF16, Code, F16, F32, Format, Mapping, Scalar, Tiles, WeightLayout};
use std::sync::Arc;

/// One row of a matrix as stored.
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
    /// Rows: outputs of a linear layer, entries of a table of embeddings.
    pub rows: usize,
    /// Columns: inputs of a linear layer, width of an embedding.
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
    /// A matrix of plain elements.
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

    /// Bytes of a row's scales, and of the row's biases or zero points.
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
    assert!(cols > 0 && values.len().is_multiple_of(cols), "whole rows");
    assert!(
        cols.is_multiple_of(format.block),
        "{cols} columns are not whole blocks of {}",
        format.block
    );
    let encode = format
        .encode
        .unwrap_or_else(|| panic!("{} can only be read", format.name));
    let mut out = Owned {
        rows: values.len() / cols,
        ..Owned::empty(format, cols, scale)
    };
    for row in values.chunks_exact(cols) {
        encode(format, row, scale, &mut out);
    }
    out
}
