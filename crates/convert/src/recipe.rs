//! A checkpoint in the making: tensors that are computed when they are written.
//!
//! A [`Recipe`] is a configuration and [`Item`]s. An item knows its name, shape
//! and format, and makes any range of its rows on demand, so a model of any size
//! is converted in little memory: [`Recipe::write`] asks for a few rows of one
//! tensor at a time. Names are canonical, as [`Checkpoint::names`] has them.

use crate::ConvertError;
use quant::{Format, Owned, Scalar, Stored};
use serde_json::Value;
use std::borrow::Cow;
use std::ops::Range;
use weights::{Checkpoint, WeightData};

/// Makes a range of the rows of a matrix, whenever it is asked.
pub type Rows<'a> = Box<dyn Fn(Range<usize>) -> Owned + Send + Sync + 'a>;

/// A checkpoint that has not been written yet.
pub struct Recipe<'a> {
    /// What `config.json` is to hold, but for how matrices are quantized.
    pub config: Value,
    /// The tensors, in the order in which they are written.
    pub items: Vec<Item<'a>>,
    /// Whether norms hold `1 + w` and convolutions are `[C, K, 1]`, as in MLX files.
    pub is_mlx: bool,
}

/// One tensor of a [`Recipe`].
pub struct Item<'a> {
    /// Canonical name.
    pub name: String,
    /// Logical shape, outermost axis first.
    pub shape: Vec<usize>,
    /// What it holds.
    pub data: Data<'a>,
}

/// What an [`Item`] holds.
pub enum Data<'a> {
    /// Numbers, as a matrix of `rows: product of the leading axes` and
    /// `cols: the last axis`.
    Matrix {
        /// The format that `rows` makes.
        format: &'static Format,
        /// The type of its scales.
        scale: Scalar,
        /// Makes rows.
        rows: Rows<'a>,
    },
    /// Anything else, as stored.
    Raw {
        /// The type's name in a safetensors header.
        dtype: &'static str,
        /// Little-endian.
        bytes: Cow<'a, [u8]>,
    },
}

impl<'a> Item<'a> {
    /// Tensor `name` of `checkpoint` as it is. Marks it used.
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::weight`].
    pub fn of(checkpoint: &'a Checkpoint, name: &str) -> Result<Self, ConvertError> {
        let weight = checkpoint.weight(name)?;
        Ok(match weight.data {
            WeightData::Matrix(stored) => Item::stored(name, weight.shape, stored),
            WeightData::Raw { dtype, bytes } => Item {
                name: name.into(),
                shape: weight.shape,
                data: Data::Raw {
                    dtype,
                    bytes: Cow::Borrowed(bytes),
                },
            },
        })
    }

    /// A tensor whose rows are those of `from`.
    pub fn stored(name: impl Into<String>, shape: Vec<usize>, from: Stored<'a>) -> Self {
        Item {
            name: name.into(),
            shape,
            data: Data::Matrix {
                format: from.format,
                scale: from.scale,
                rows: Box::new(move |rows| Owned::gather(&from, rows)),
            },
        }
    }

    /// Values in `f32`.
    ///
    /// # Panics
    ///
    /// If `shape` has another number of elements.
    pub fn vector(name: impl Into<String>, shape: Vec<usize>, values: Vec<f32>) -> Self {
        assert_eq!(
            shape.iter().product::<usize>(),
            values.len(),
            "values of the shape"
        );
        let cols = shape.last().copied().unwrap_or(1);
        let rows = move |rows: Range<usize>| {
            let values = &values[rows.start * cols..rows.end * cols];
            quant::encode(&quant::F32, values, cols, Scalar::F32)
        };
        Item {
            name: name.into(),
            shape,
            data: Data::Matrix {
                format: &quant::F32,
                scale: Scalar::F32,
                rows: Box::new(rows),
            },
        }
    }

    /// The width of a row.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.shape.iter().product::<usize>() / self.cols()
    }

    /// The tensor in `format`, with scales of type `scale`: exact where the
    /// format can hold every value (see [`quant::widen`]), else rounded.
    ///
    /// # Panics
    ///
    /// If the width is not a multiple of the format's block.
    pub fn encoded(self, format: &'static Format, scale: Scalar) -> Self {
        let cols = self.cols();
        let data = match self.data {
            Data::Matrix {
                format: f, rows, ..
            } if f == format => Data::Matrix {
                format,
                scale,
                rows,
            },
            Data::Matrix { rows, .. } => Data::Matrix {
                format,
                scale,
                rows: Box::new(move |range| {
                    let from = rows(range);
                    quant::widen(&from.view(), format).unwrap_or_else(|| {
                        quant::encode(format, &from.view().to_f32(), cols, scale)
                    })
                }),
            },
            raw => raw,
        };
        Item { data, ..self }
    }
}
