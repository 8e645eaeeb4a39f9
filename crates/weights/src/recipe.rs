//! A checkpoint in the making: tensors that are computed when they are written.
//!
//! A [`Recipe`] is a configuration and [`Item`]s. An item knows its name, shape
//! and format, and makes any range of its rows on demand, so a model of any size
//! is converted in little memory: [`Recipe::write`] asks for a few rows of one
//! tensor at a time. Names are canonical (`names.rs`).

use crate::coded::COMPANIONS;
use crate::{Checkpoint, LoadError, names};
use quant::{Format, Owned, Scalar, Stored};
use serde_json::Value;
use std::borrow::Cow;
use std::ops::Range;

/// Makes rows of a matrix.
pub type Rows<'a> = Box<dyn Fn(Range<usize>) -> Owned + Send + Sync + 'a>;

/// A checkpoint that has not been written yet.
pub struct Recipe<'a> {
    /// Its `config.json`.
    pub config: Value,
    /// Its tensors.
    pub items: Vec<Item<'a>>,
    /// Norms hold `1 + w` and convolutions are `[C, K, 1]`, as in MLX files.
    pub is_mlx: bool,
}

/// One tensor.
pub struct Item<'a> {
    /// Canonical name.
    pub name: String,
    /// Logical shape, outermost axis first.
    pub shape: Vec<usize>,
    /// What it holds.
    pub data: Data<'a>,
}

/// What a tensor holds.
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
    /// If `shape` is not theirs.
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

    /// The same numbers in `format`, with scales of type `scale`: exact where the
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

impl Checkpoint {
    /// Tensor `name` as it is. Marks it used.
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::matrix`]; also if it is quantised and its width cannot be
    /// told ([`Checkpoint::shape`]).
    pub fn item(&self, name: &str) -> Result<Item<'_>, LoadError> {
        let is_coded = self.coded_shape(name).is_some() || self.is_companioned(name);
        let plain = (!is_coded).then(|| self.raw(name)).transpose()?;
        if let Some(raw) =
            plain.filter(|(_, dtype, _)| dtype.scalar().is_none() && dtype.format.is_none())
        {
            let (bytes, dtype, shape) = raw;
            let data = Data::Raw {
                dtype: dtype.name,
                bytes: Cow::Borrowed(bytes),
            };
            return Ok(Item {
                name: name.into(),
                shape,
                data,
            });
        }
        let shape = self.shape(name).ok_or(LoadError::MissingField {
            field: "`quantization` that says how wide its matrices are",
        })?;
        let cols = shape.last().copied().unwrap_or(1);
        let rows = shape.iter().product::<usize>() / cols;
        Ok(Item::stored(name, shape, self.matrix(name, rows, cols)?))
    }

    /// The names of [`Checkpoint::item`]s: all tensors but those that belong to a
    /// weight of codes or change no weight.
    pub fn item_names(&self) -> impl Iterator<Item = &str> {
        let belongs = |name: &str| {
            let (module, end) = name.rsplit_once('.').unwrap_or(("", name));
            let of_codes = end != "weight" && self.is_companioned(&format!("{module}.weight"));
            let factor = name.strip_suffix("_scale_2");
            names::is_of_activations(name)
                || of_codes && is_companion(end)
                || factor.is_some_and(|weight| self.find(weight).is_some())
        };
        // Packed codes stand for their weight.
        self.names()
            .filter(move |name| !belongs(name))
            .map(|name| name.strip_suffix("_packed").unwrap_or(name))
    }

    /// Whether something is stored without which the weight `name` is another one.
    fn is_companioned(&self, name: &str) -> bool {
        let module = name.strip_suffix("weight");
        module.is_some_and(|module| {
            [
                "weight_packed",
                "weight_scale",
                "weight_scale_inv",
                "scales",
            ]
            .iter()
            .any(|end| self.find(&format!("{module}{end}")).is_some())
        })
    }
}

/// Whether a tensor of a module called `end` belongs to its weight.
fn is_companion(end: &str) -> bool {
    let own = |rest: &str| rest != "_packed" && COMPANIONS.contains(&rest);
    ["scales", "biases", "global_scale"].contains(&end)
        || end.strip_prefix("weight").is_some_and(own)
}
