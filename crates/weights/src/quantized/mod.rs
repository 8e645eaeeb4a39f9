//! Which stored tensors make one quantized weight (`checkpoints.md` §1.1, §2.1): one
//! file a scheme.
//!
//! | writer | codes | scales and more | file |
//! | --- | --- | --- | --- |
//! | MLX, affine | `@.weight` U32 | `@.scales`, `@.biases` floats | `mlx.rs` |
//! | MLX, mxfp4, nvfp4, mxfp8 | `@.weight` U32 | `@.scales` U8, `@.global_scale` F32 or none | `mlx.rs` |
//! | FP8 | `@.weight` F8_E4M3 | `@.weight_scale_inv` or `@.weight_scale`: one, one a row, a group, or a block | `bytes.rs` |
//! | int-quantized | `@.weight` I8 | `@.weight_scale`, the same | `bytes.rs` |
//! | pack-quantized | `@.weight_packed` I32 | `@.weight_scale`, the same; `@.weight_zero_point` or none | `compressed_tensors.rs` |
//! | nvfp4-pack-quantized | `@.weight_packed` U8 | `@.weight_scale` F8_E4M3, `@.weight_global_scale` divides | `fp4.rs` |
//! | mxfp4-pack-quantized | `@.weight_packed` U8 | `@.weight_scale` U8 | `fp4.rs` |
//! | ModelOpt NVFP4 | `@.weight` U8 | `@.weight_scale` F8_E4M3, `@.weight_scale_2` multiplies | `fp4.rs` |
//!
//! The tensors decide. A module is quantized if and only if its scales are
//! stored, so lists of ignored or differing modules need no reading, and bits and
//! groups follow from shapes, since the caller knows the width. The config is
//! asked for what tensors cannot tell: the size of blocks, whether zero points
//! belong to the codes, and whether inputs have to be rotated first (`settings.rs`).
//!
//! Everything stays where it lies but zero points, which are packed along the
//! other axis, and factors of scales.

mod bytes;
mod compressed_tensors;
mod fp4;
mod mlx;
mod settings;

use crate::tensor::{Derived, Tensor};
use crate::{Checkpoint, LoadError};
use quant::{Code, Format, Scalar, ScaleType, Stored, Tiles};

/// One way of storing a quantized weight.
struct Scheme {
    /// Whether the weight called so is stored this way: whether the tensors that show
    /// it are there.
    stores: fn(&Checkpoint, &str) -> bool,
    read: ReadWeight,
    /// The weight's shape, where it is not that of the stored elements and can be told
    /// without knowing the width.
    shape: fn(&Checkpoint, &str) -> Option<Vec<usize>>,
}

/// Reads the weight called so as a matrix `[rows, cols]`.
type ReadWeight = for<'a> fn(&'a Checkpoint, &str, usize, usize) -> Result<Stored<'a>, LoadError>;

/// Every way, in the order in which they are looked for. A new one is a file beside
/// this one and a line here.
const SCHEMES: &[Scheme] = &[mlx::SCHEME, compressed_tensors::SCHEME, bytes::SCHEME];

/// A weight whose parts are all read where they lie.
static NONE: Derived = Derived {
    zeros: Vec::new(),
    factors: Vec::new(),
};

/// Rows and columns of a block where no config says otherwise.
const BLOCK: (usize, usize) = (128, 128);

/// A stack of `count` matrices `[rows, cols]` of codes, `words` elements a row.
#[derive(Clone, Copy)]
struct Stack {
    count: usize,
    rows: usize,
    cols: usize,
    words: usize,
}

impl Stack {
    /// `shape` as such a stack of `rows` rows in all.
    fn of(shape: &[usize], rows: usize, cols: usize) -> Option<Stack> {
        let (&words, lead) = shape.split_last()?;
        let (&each, stack) = lead.split_last()?;
        let count = stack.iter().product();
        (each.checked_mul(count)? == rows).then_some(Stack {
            count,
            rows: each,
            cols,
            words,
        })
    }

    /// Rows of all its matrices together.
    fn all_rows(&self) -> usize {
        self.rows * self.count
    }

    /// Bits of a code in words of `width` bits.
    fn bits(&self, width: usize) -> Option<usize> {
        let bits = self.words.checked_mul(width)?;
        bits.is_multiple_of(self.cols).then(|| bits / self.cols)
    }

    /// What each of the scales of shape `scales` covers: everything, a matrix, some
    /// columns of a row, or a block.
    fn tiles(&self, scales: &[usize], block: Option<(usize, usize)>) -> Option<Tiles<'static>> {
        let tile = |rows, cols| Tiles {
            rows,
            ..Tiles::of_rows(cols)
        };
        let n: usize = scales.iter().product();
        if n == 1 {
            return Some(tile(self.all_rows(), self.cols));
        }
        if n == self.count {
            return Some(tile(self.rows, self.cols));
        }
        let (down, across) = match *scales {
            [down] => (down, 1),
            [.., down, across] => (down, across),
            [] => return None,
        };
        if Some(n) != down.checked_mul(across)?.checked_mul(self.count) {
            return None;
        }
        let in_rows = || {
            let whole = down == self.rows && self.cols.is_multiple_of(across);
            whole.then(|| tile(1, self.cols / across))
        };
        let in_blocks = |(rows, cols): (usize, usize)| {
            let fits = (down, across) == (self.rows.div_ceil(rows), self.cols.div_ceil(cols));
            (fits && (self.count == 1 || self.rows.is_multiple_of(rows))).then(|| tile(rows, cols))
        };
        match block {
            Some(block) => in_blocks(block).or_else(in_rows),
            None => in_rows().or_else(|| in_blocks(BLOCK)),
        }
    }
}

impl Checkpoint {
    /// Tensor `name` as a matrix `[rows, cols]` of codes; `None` if it is not
    /// stored as codes.
    pub(crate) fn quantized(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Option<Stored<'_>>, LoadError> {
        let scheme = SCHEMES.iter().find(|scheme| (scheme.stores)(self, name));
        scheme
            .map(|scheme| (scheme.read)(self, name, rows, cols))
            .transpose()
    }

    /// The shape of the quantized weight `name`, where it is not the shape of the
    /// stored elements and can be told without knowing the width.
    pub(crate) fn quantized_shape(&self, name: &str) -> Option<Vec<usize>> {
        let mut schemes = SCHEMES.iter();
        let scheme = schemes.find(|scheme| (scheme.stores)(self, name))?;
        (scheme.shape)(self, name)
    }

    /// A companion without which `of` means nothing. Marks it used.
    fn companion(&self, name: &str, of: &str) -> Result<&Tensor, LoadError> {
        match self.find(name) {
            Some(_) => self.tensor(name),
            None => Err(self.without(name, of)),
        }
    }

    /// The stack that `codes`, with `per` columns an element, has to be.
    fn stack(
        &self,
        name: &str,
        codes: &Tensor,
        per: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Stack, LoadError> {
        let stack = Stack::of(&codes.entry.shape, rows, cols);
        stack
            .filter(|s| s.words.checked_mul(per) == Some(cols))
            .ok_or_else(|| wrong_shape(name, &[rows, cols / per], codes))
    }

    /// What each of the scales `name` covers.
    fn tiles(
        &self,
        name: &str,
        scales: &Tensor,
        stack: &Stack,
    ) -> Result<Tiles<'static>, LoadError> {
        let block = self.block().or(name.ends_with("_inv").then_some(BLOCK));
        stack.tiles(&scales.entry.shape, block).ok_or_else(|| {
            let (rows, cols) = block.unwrap_or(BLOCK);
            LoadError::WrongScales {
                name: name.into(),
                found: scales.entry.shape.clone(),
                of: vec![stack.all_rows(), stack.cols],
                block: vec![rows, cols],
            }
        })
    }

    /// The format of codes of some bits and kind under scales of some type.
    fn format(
        &self,
        name: &str,
        (bits, kind, scale): (usize, Code, ScaleType),
        (codes, scales): (&Tensor, &Tensor),
        tiles: &Tiles<'_>,
        stack: &Stack,
    ) -> Result<&'static Format, LoadError> {
        let format = quant::scaled(bits, kind, scale, tiles.cols, stack.cols);
        format.ok_or_else(|| LoadError::WrongGroups {
            name: name.into(),
            expected: vec![stack.all_rows(), stack.cols],
            words: codes.entry.shape.clone(),
            scales: scales.entry.shape.clone(),
        })
    }

    /// The factors of the scales of `codes`: `name` holds one, or one a matrix of
    /// the stack.
    pub(crate) fn factors<'a>(
        &self,
        codes: &'a Tensor,
        name: Option<&str>,
        count: usize,
        of_factor: impl Fn(f32) -> f64,
    ) -> Result<&'a Derived, LoadError> {
        let Some(name) = name else {
            return Ok(&NONE);
        };
        let tensor = self.tensor(name)?;
        if tensor.entry.dtype.name != "F32" {
            return Err(wrong_type(name, tensor, "f32"));
        }
        let n = tensor.entry.elements();
        if n != 1 && n != count {
            return Err(wrong_shape(name, &[count], tensor));
        }
        let values = (0..n).map(|i| Scalar::F32.get(self.data(tensor), i));
        if let Some((at, value)) = values.clone().enumerate().find(|(_, v)| !v.is_normal()) {
            return Err(LoadError::BadFactor {
                name: name.into(),
                at,
                value,
            });
        }
        Ok(codes.derived(|| Derived {
            factors: values.map(of_factor).collect(),
            zeros: Vec::new(),
        }))
    }

    /// Puts the proven parts of a weight together.
    fn join<'a>(
        &'a self,
        (codes, scales): (&'a Tensor, &'a Tensor),
        format: &'static Format,
        stack: &Stack,
        tiles: Tiles<'static>,
        derived: &'a Derived,
    ) -> Stored<'a> {
        let (rows, factors) = (stack.all_rows(), &derived.factors);
        let plain = scales.entry.dtype.scalar();
        let exact = if factors.is_empty() {
            Scalar::F16
        } else {
            Scalar::F32
        };
        Stored {
            format,
            rows,
            cols: stack.cols,
            codes: self.data(codes),
            scale: plain.unwrap_or(exact),
            scales: self.data(scales),
            biases: &derived.zeros,
            tiles: Tiles {
                factors,
                factor_rows: if factors.len() > 1 { stack.rows } else { rows },
                ..tiles
            },
            mapping: self.mapping(codes),
        }
    }

    /// The error of a weight in a format that cannot be read.
    fn unknown(&self, name: &str, format: &'static str) -> LoadError {
        LoadError::UnknownFormat {
            name: name.into(),
            format,
        }
    }
}

fn wrong_type(name: &str, tensor: &Tensor, wanted: &'static str) -> LoadError {
    LoadError::WrongType {
        name: name.into(),
        found: tensor.entry.dtype.name.into(),
        wanted,
    }
}

fn wrong_shape(name: &str, expected: &[usize], tensor: &Tensor) -> LoadError {
    LoadError::WrongShape {
        name: name.into(),
        expected: expected.into(),
        found: tensor.entry.shape.clone(),
    }
}

/// The type of floats that are scales.
fn float(name: &str, scales: &Tensor) -> Result<Scalar, LoadError> {
    let scalar = scales.entry.dtype.scalar();
    scalar.ok_or_else(|| wrong_type(name, scales, "f32, f16, bf16 or u8 (scales)"))
}

fn scale_type(name: &str, scales: &Tensor) -> Result<ScaleType, LoadError> {
    match scales.entry.dtype.name {
        "U8" | "F8_E8M0" => Ok(ScaleType::E8m0),
        "F8_E4M3" => Ok(ScaleType::E4m3),
        _ => float(name, scales).map(|_| ScaleType::Float),
    }
}
