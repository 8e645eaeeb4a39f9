//! Reading tensors of a checkpoint: as matrices where they lie, and as `f32`.

use crate::tensor::Tensor;
use crate::{Checkpoint, LoadError};
use quant::{Scalar, Stored};
use serde_json::Value;

impl Checkpoint {
    /// The logical shape of `name`: of a quantized matrix `[…, out, in]`, not
    /// its packed words.
    ///
    /// `None` if there is no such tensor, or if it is quantized and its width
    /// cannot be told: 4 bits in groups of 32 and 2 bits in groups of 64 pack to
    /// the same shapes, and only `quantization` in the config, which may be wrong,
    /// separates them. [`Checkpoint::matrix`] is told the width and has no such
    /// doubt.
    pub fn shape(&self, name: &str) -> Option<Vec<usize>> {
        if let Some(shape) = self.quantized_shape(name) {
            return Some(shape);
        }
        let tensor = self.tensors.get(name)?;
        let mut shape = tensor.entry.shape.clone();
        if let Some((module, scales)) = self.scales_of(name) {
            let (words, groups) = (*shape.last()?, *scales.entry.shape.last()?);
            *shape.last_mut()? = self.packed_width(module, tensor, words, groups)?;
        }
        Some(shape)
    }

    /// Tensor `name` as a matrix `[rows, cols]`, the bytes where they lie.
    ///
    /// Plain elements, GGUF's blocks, or codes where scales are stored beside it
    /// (`quantized` has the layouts): bits and group follow from the shapes, whatever
    /// the config says. Where a GGUF file's writer moved rows or columns, they are
    /// moved back into memory of their own, kept until the checkpoint is dropped.
    /// Stacked and convolution weights count as matrices if their leading axes
    /// multiply to `rows` and the others to `cols`. Marks the tensor and its scales
    /// used.
    ///
    /// # Errors
    ///
    /// If it is missing, of another shape (none has no rows or no columns), or in a
    /// format that is no [`quant::Format`].
    pub fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Stored<'_>, LoadError> {
        if rows == 0 || cols == 0 {
            return Err(LoadError::WrongShape {
                name: name.into(),
                expected: vec![rows, cols],
                found: self.tensor(name)?.entry.shape.clone(),
            });
        }
        if let Some(quantized) = self.quantized(name, rows, cols)? {
            return Ok(quantized);
        }
        let tensor = self.tensor(name)?;
        if tensor.entry.dtype.name == "U32" {
            // Packed codes, whose scales some writer has dropped.
            let module = name.strip_suffix("weight").unwrap_or(name);
            return Err(LoadError::MissingTensor {
                name: format!("{module}scales"),
            });
        }
        let shape = &tensor.entry.shape;
        // Blocks lie in rows of the innermost axis.
        let blocks = tensor.entry.dtype.block().0;
        if !splits_into(shape, rows, cols) || !cols.is_multiple_of(blocks) {
            return Err(LoadError::WrongShape {
                name: name.into(),
                expected: vec![rows, cols],
                found: shape.clone(),
            });
        }
        let stored = self.stored(name, tensor)?;
        Ok(Stored {
            rows,
            cols,
            ..stored
        })
    }

    /// A tensor of one piece with its natural rows, edits undone.
    fn stored<'a>(&'a self, name: &str, tensor: &'a Tensor) -> Result<Stored<'a>, LoadError> {
        let (rows, cols) = tensor.natural();
        let as_written = match tensor.entry.dtype.format {
            Some(format) => Stored::new(format, rows, cols, self.data(tensor)),
            None => Stored::plain(self.scalar(name, tensor)?, rows, cols, self.data(tensor)),
        };
        let as_written = Stored {
            mapping: self.mapping(tensor),
            ..as_written
        };
        let factor = format!("{name}_scale_2");
        let has_factor = as_written.format.name == "nvfp4" && self.find(&factor).is_some();
        let moves = tensor.edit.changes(&self.sizes);
        if !has_factor && !moves {
            return Ok(as_written);
        }
        let shape = &tensor.entry.shape;
        let count = shape[..shape.len().saturating_sub(2)].iter().product();
        let factors = self.factors(tensor, has_factor.then_some(&factor), count, f64::from)?;
        let undo = || {
            let undo = |stored: &Stored<'_>| tensor.edit.undo(&self.sizes, stored);
            if !has_factor {
                return undo(&as_written);
            }
            let each = &factors.factors;
            let times = quant::nvfp4_times(&as_written, |row| each[row * each.len() / rows]);
            if moves { undo(&times.view()) } else { times }
        };
        Ok(tensor.undone.get_or_init(undo).view())
    }

    /// Tensor `name` of `n` elements in all, whatever its axes, as `f32`. Marks
    /// it used.
    ///
    /// # Errors
    ///
    /// If it is missing, has another number of elements, or is not f32, f16 or
    /// bf16.
    pub fn vector(&self, name: &str, n: usize) -> Result<Vec<f32>, LoadError> {
        let tensor = self.tensor(name)?;
        self.scalar(name, tensor)?;
        tensor.has_elements(name, n)?;
        Ok(self.stored(name, tensor)?.to_f32())
    }

    fn scalar(&self, name: &str, tensor: &Tensor) -> Result<Scalar, LoadError> {
        let dtype = tensor.entry.dtype;
        dtype.scalar().ok_or_else(|| LoadError::WrongType {
            name: name.into(),
            found: dtype.name.into(),
            wanted: "f32, f16 or bf16",
        })
    }

    /// Module path and scales of `name` if it is quantized.
    fn scales_of<'n>(&self, name: &'n str) -> Option<(&'n str, &Tensor)> {
        let module = name.strip_suffix(".weight")?;
        Some((module, self.tensors.get(&format!("{module}.scales"))?))
    }

    /// The columns of a quantized tensor, from its own entry or the default in
    /// the config's `quantization`, where the shapes confirm it.
    fn packed_width(
        &self,
        module: &str,
        tensor: &Tensor,
        words: usize,
        groups: usize,
    ) -> Option<usize> {
        let config = ["quantization", "quantization_config"]
            .iter()
            .find_map(|key| self.config.get(key))?;
        let stored = tensor.entry.name.strip_suffix(".weight")?;
        [config.get(stored), config.get(module), Some(config)]
            .into_iter()
            .flatten()
            .find_map(|settings| {
                let setting = |key| {
                    settings
                        .get(key)
                        .and_then(Value::as_u64)
                        .and_then(|v| usize::try_from(v).ok())
                };
                let (bits, group) = (setting("bits")?, setting("group_size")?);
                quant::affine(bits, group)?;
                let cols = groups.checked_mul(group)?;
                (cols.checked_mul(bits)? == words.checked_mul(32)?).then_some(cols)
            })
    }
}

/// Whether some leading axes multiply to `rows` and the rest to `cols`.
fn splits_into(shape: &[usize], rows: usize, cols: usize) -> bool {
    (0..=shape.len()).any(|at| {
        shape[..at].iter().product::<usize>() == rows
            && shape[at..].iter().product::<usize>() == cols
    })
}
