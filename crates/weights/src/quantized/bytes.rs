//! Weights of a byte a code beside `@.weight_scale_inv` or `@.weight_scale`: FP8
//! (`F8_E4M3`), int-quantized of compressed-tensors (`I8`), and ModelOpt's NVFP4
//! (`U8`, two codes a byte, with the factor `@.weight_scale_2`).

use super::{NONE, Scheme, scale_type, wrong_type};
use crate::{Checkpoint, LoadError};
use quant::{Code, Stored};

pub(super) const SCHEME: Scheme = Scheme {
    stores: |checkpoint, name| {
        let is_fp8 = |tensor: &crate::tensor::Tensor| tensor.entry.dtype.name == "F8_E4M3";
        let has_scales = || checkpoint.scales_beside(name).is_some();
        checkpoint
            .find(name)
            .is_some_and(|tensor| is_fp8(tensor) || has_scales())
    },
    read: |checkpoint, name, rows, cols| checkpoint.bytes_of_codes(name, rows, cols),
    shape: |checkpoint, name| {
        let tensor = checkpoint.find(name)?;
        checkpoint.shape_of_nibbles(tensor, &format!("{name}_scale"))
    },
};

impl Checkpoint {
    /// The name of the scales that are stored beside the weight `name`.
    fn scales_beside(&self, name: &str) -> Option<String> {
        let scales = ["_scale_inv", "_scale"].map(|end| format!("{name}{end}"));
        scales.into_iter().find(|s| self.find(s).is_some())
    }

    fn bytes_of_codes(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Stored<'_>, LoadError> {
        let Some(scales_name) = self.scales_beside(name) else {
            return Err(self.without(&format!("{name}_scale"), name));
        };
        let kind = match self.find(name).map(|tensor| tensor.entry.dtype.name) {
            Some("F8_E4M3") => Code::E4m3,
            Some("I8") => Code::Signed,
            Some("U8") => Code::E2m1,
            _ => {
                let wanted = "f8_e4m3, i8 or u8 beside its scale";
                return Err(wrong_type(name, self.tensor(name)?, wanted));
            }
        };
        self.refuse_rotations(name)?;
        let (codes, scales) = (self.tensor(name)?, self.tensor(&scales_name)?);
        if kind == Code::E2m1 {
            let factor = (format!("{name}_scale_2"), f64::from as fn(f32) -> f64);
            return self.fp4(name, (name, &scales_name), factor, rows, cols);
        }
        let stack = self.stack(name, codes, 1, rows, cols)?;
        let tiles = self.tiles(&scales_name, scales, &stack)?;
        let scale_type = scale_type(&scales_name, scales)?;
        self.refuse_zeros(name)?;
        let kind = (8, kind, scale_type);
        let format = self.format(name, kind, (codes, scales), &tiles, &stack)?;
        Ok(self.join((codes, scales), format, &stack, tiles, &NONE))
    }
}
