//! Weights as compressed-tensors packs them: codes in `@.weight_packed`, scales in
//! `@.weight_scale`, and, for `pack-quantized`, `@.weight_zero_point` or none.

use super::{NONE, Scheme, Stack, scale_type, wrong_shape, wrong_type};
use crate::tensor::{Derived, Tensor};
use crate::{Checkpoint, LoadError};
use quant::{Code, Stored, Tiles};
use serde_json::Value;

pub(super) const SCHEME: Scheme = Scheme {
    stores: |checkpoint, name| checkpoint.find(&packed(name)).is_some(),
    read: |checkpoint, name, rows, cols| {
        checkpoint.refuse_rotations(name)?;
        checkpoint.packed(name, rows, cols)
    },
    shape: |checkpoint, name| {
        let packed = checkpoint.find(&packed(name))?;
        let in_bytes = checkpoint.shape_of_nibbles(packed, &format!("{name}_scale"));
        in_bytes.or_else(|| checkpoint.written_shape(name, packed))
    },
};

/// The name of the codes of the weight `name`.
fn packed(name: &str) -> String {
    format!("{name}_packed")
}

impl Checkpoint {
    fn packed(&self, name: &str, rows: usize, cols: usize) -> Result<Stored<'_>, LoadError> {
        if let Some(plain) = self.find(name) {
            return Err(wrong_type(name, plain, "nothing beside its packed form"));
        }
        let (packed, scales_name) = (packed(name), format!("{name}_scale"));
        let codes = self.tensor(&packed)?;
        let scales = self.companion(&scales_name, &packed)?;
        self.check_shape(name, rows, cols)?;
        match codes.entry.dtype.name {
            "U8" => {
                let factor = (format!("{name}_global_scale"), invert as fn(f32) -> f64);
                self.fp4(name, (&packed, &scales_name), factor, rows, cols)
            }
            "I32" => self.packed_integers(name, (codes, scales), rows, cols),
            _ => Err(wrong_type(&packed, codes, "i32 or u8")),
        }
    }

    /// Whole numbers, packed into words.
    fn packed_integers<'a>(
        &'a self,
        name: &str,
        (codes, scales): (&'a Tensor, &'a Tensor),
        rows: usize,
        cols: usize,
    ) -> Result<Stored<'a>, LoadError> {
        let shape = &codes.entry.shape;
        let misfit = || LoadError::WrongGroups {
            name: name.into(),
            expected: vec![rows, cols],
            words: shape.clone(),
            scales: scales.entry.shape.clone(),
        };
        let stack = Stack::of(shape, rows, cols).ok_or_else(misfit)?;
        let bits = stack.bits(32).ok_or_else(misfit)?;
        let scales_name = format!("{name}_scale");
        let tiles = self.tiles(&scales_name, scales, &stack)?;
        self.check_order(name, tiles.cols, cols)?;
        let zeros_name = format!("{name}_zero_point");
        let zeros = self.find(&zeros_name).is_some();
        if !zeros && self.weights_setting("symmetric") == Some(&Value::Bool(false)) {
            return Err(self.without(&zeros_name, &packed(name)));
        }
        let kind = if zeros { Code::ZeroPoint } else { Code::Offset };
        let kind = (bits, kind, scale_type(&scales_name, scales)?);
        let format = self.format(name, kind, (codes, scales), &tiles, &stack)?;
        let mut derived = &NONE;
        if zeros {
            derived = self.zeros(&zeros_name, codes, bits, &stack, &tiles)?;
        }
        Ok(self.join((codes, scales), format, &stack, tiles, derived))
    }

    /// Zero points, packed along rows, as a byte a tile.
    fn zeros<'a>(
        &self,
        name: &str,
        codes: &'a Tensor,
        bits: usize,
        stack: &Stack,
        tiles: &Tiles<'_>,
    ) -> Result<&'a Derived, LoadError> {
        let tensor = self.tensor(name)?;
        if tensor.entry.dtype.name != "I32" {
            return Err(wrong_type(name, tensor, "i32"));
        }
        let across = stack.cols / tiles.cols;
        let expected = [(stack.rows * bits).div_ceil(32), across];
        if stack.count != 1 || tiles.rows != 1 || tensor.entry.shape != expected {
            return Err(wrong_shape(name, &expected, tensor));
        }
        let bytes = self.data(tensor);
        let zero = |i: usize| {
            let (bit, t) = (i / across * bits, i % across);
            let byte = bytes[(bit / 32 * across + t) * 4 + bit % 32 / 8];
            byte >> (bit % 8) & ((1u16 << bits) - 1) as u8
        };
        Ok(codes.derived(|| Derived {
            zeros: (0..stack.rows * across).map(zero).collect(),
            factors: Vec::new(),
        }))
    }

    /// An error if `NAME_shape` says another shape than the one that was asked for.
    fn check_shape(&self, name: &str, rows: usize, cols: usize) -> Result<(), LoadError> {
        let shape_name = format!("{name}_shape");
        if self.find(&shape_name).is_none() {
            return Ok(());
        }
        let found: Vec<usize> = self
            .integers(&shape_name, 2)?
            .into_iter()
            .map(|n| n as usize)
            .collect();
        if found != [rows, cols] {
            return Err(LoadError::WrongShape {
                name: name.into(),
                expected: vec![rows, cols],
                found,
            });
        }
        Ok(())
    }

    /// An error unless codes lie in the order of their groups.
    fn check_order(&self, name: &str, group: usize, cols: usize) -> Result<(), LoadError> {
        let index = format!("{name}_g_idx");
        if self.find(&index).is_none() {
            return Ok(());
        }
        self.tensor(&index)?;
        let in_order =
            |found: Vec<usize>| (0..).zip(found).all(|(c, g): (usize, _)| g == c / group);
        match self.numbers(&index, cols).map(in_order) {
            Some(true) => Ok(()),
            _ => Err(self.unknown(name, "codes in an order of activations (`g_idx`)")),
        }
    }

    /// The shape that `NAME_shape` says, if the codes `packed` confirm it.
    fn written_shape(&self, name: &str, packed: &Tensor) -> Option<Vec<usize>> {
        let shape = self.numbers(&format!("{name}_shape"), 2)?;
        let [rows, words] = packed.entry.shape[..] else {
            return None;
        };
        let fits = |bits| shape[1].checked_mul(bits) == words.checked_mul(32);
        (shape[0] == rows && [4, 8].into_iter().any(fits)).then_some(shape)
    }

    /// `n` integers called `name`, not marked used.
    fn numbers(&self, name: &str, n: usize) -> Option<Vec<usize>> {
        let values = self.integers_of(name, self.find(name)?, n).ok()?;
        Some(values.into_iter().map(|v| v as usize).collect())
    }
}

/// `@.weight_global_scale` divides.
fn invert(factor: f32) -> f64 {
    1.0 / f64::from(factor)
}
