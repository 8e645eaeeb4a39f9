//! Weights of E2M1 codes, two a byte, under scales of E8M0 (MXFP4), or of E4M3 with a
//! factor in `f32` (NVFP4): compressed-tensors' and ModelOpt's.

use super::{NONE, scale_type};
use crate::tensor::Tensor;
use crate::{Checkpoint, LoadError};
use quant::{Code, ScaleType, Stored};

impl Checkpoint {
    /// The weight `name` of the tensors `codes_name` and `scales_name`. `factor` is the
    /// name of the scales' factor, and what makes it one to multiply with.
    pub(super) fn fp4(
        &self,
        name: &str,
        (codes_name, scales_name): (&str, &str),
        (factor_name, of_factor): (String, fn(f32) -> f64),
        rows: usize,
        cols: usize,
    ) -> Result<Stored<'_>, LoadError> {
        self.refuse_zeros(name)?;
        let (codes, scales) = (self.tensor(codes_name)?, self.tensor(scales_name)?);
        let stack = self.stack(codes_name, codes, 2, rows, cols)?;
        let tiles = self.tiles(scales_name, scales, &stack)?;
        let scale_type = scale_type(scales_name, scales)?;
        let kind = (4, Code::E2m1, scale_type);
        let format = self.format(name, kind, (codes, scales), &tiles, &stack)?;
        let mut derived = &NONE;
        if scale_type == ScaleType::E4m3 {
            self.companion(&factor_name, codes_name)?;
            derived = self.factors(codes, Some(&factor_name), stack.count, of_factor)?;
        }
        Ok(self.join((codes, scales), format, &stack, tiles, derived))
    }

    /// The shape of the weight whose codes are `tensor`, if they are two a byte beside
    /// their scales, called `scales`.
    pub(super) fn shape_of_nibbles(&self, tensor: &Tensor, scales: &str) -> Option<Vec<usize>> {
        let nibbles = tensor.entry.dtype.name == "U8" && self.find(scales).is_some();
        let mut shape = tensor.entry.shape.clone();
        *shape.last_mut()? = shape.last()?.checked_mul(2)?;
        nibbles.then_some(shape)
    }
}
