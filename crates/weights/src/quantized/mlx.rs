//! Weights as MLX quantizes them (`checkpoints.md` §2.1): codes in `@.weight`, and
//! scales in `@.scales`, with `@.biases` (affine) or without (mxfp4, nvfp4, mxfp8).

use super::{Scheme, Stack, float, wrong_shape, wrong_type};
use crate::{Checkpoint, LoadError};
use quant::{Stored, Tiles};

pub(super) const SCHEME: Scheme = Scheme {
    stores: |checkpoint, name| scales(name).is_some_and(|s| checkpoint.find(&s).is_some()),
    read: |checkpoint, name, rows, cols| checkpoint.mlx(name, rows, cols),
    shape: |checkpoint, name| checkpoint.mlx_shape(name),
};

/// MLX's `global_scale` is the largest magnitude: that of E2M1 times that of E4M3.
const FULL_SCALE: f32 = 6.0 * 448.0;

/// Bits, group and format of the modes without biases.
const FLOATS: &[(usize, usize, &str)] = &[(4, 16, "fp4-nv"), (4, 32, "fp4-mx"), (8, 32, "fp8-mx")];

/// The name of the scales of the weight `name`.
fn scales(name: &str) -> Option<String> {
    Some(format!("{}.scales", name.strip_suffix(".weight")?))
}

impl Checkpoint {
    fn mlx(&self, name: &str, rows: usize, cols: usize) -> Result<Stored<'_>, LoadError> {
        let scales_name = scales(name).expect("looked for by `stores`");
        let scales = self.tensor(&scales_name)?;
        let words = self.companion(name, &scales_name)?;
        if words.entry.dtype.name != "U32" {
            return Err(wrong_type(name, words, "u32 beside scales"));
        }
        let shape = stack_of(&words.entry.shape, &scales.entry.shape, rows, cols);
        let misfit = || LoadError::WrongGroups {
            name: name.into(),
            expected: vec![rows, cols],
            words: words.entry.shape.clone(),
            scales: scales.entry.shape.clone(),
        };
        let (stack, bits, group) = shape.ok_or_else(misfit)?;
        let module = name.strip_suffix(".weight").unwrap_or(name);
        if scales.entry.dtype.name == "U8" {
            let known = FLOATS.iter().find(|(b, g, _)| (*b, *g) == (bits, group));
            let format = known
                .and_then(|(.., f)| quant::format(f))
                .ok_or_else(misfit)?;
            let global = format!("{module}.global_scale");
            let factor = self.find(&global).is_some().then_some(global);
            let derived = self.factors(words, factor.as_deref(), stack.count, |f| {
                (f / FULL_SCALE).into()
            })?;
            let tiles = Tiles::of_rows(group);
            return Ok(self.join((words, scales), format, &stack, tiles, derived));
        }
        let biases_name = format!("{module}.biases");
        let scale = float(&scales_name, scales)?;
        let biases = self.companion(&biases_name, &scales_name)?;
        if biases.entry.dtype != scales.entry.dtype {
            return Err(wrong_type(&biases_name, biases, "the type of its scales"));
        }
        if biases.entry.shape != scales.entry.shape {
            return Err(wrong_shape(&biases_name, &scales.entry.shape, biases));
        }
        Ok(Stored {
            format: quant::affine(bits, group).ok_or_else(misfit)?,
            rows,
            cols,
            codes: self.data(words),
            scale,
            scales: self.data(scales),
            biases: self.data(biases),
            tiles: Tiles::of_rows(0),
            mapping: self.mapping(words),
        })
    }

    /// The shape of a weight without biases, whose bits and groups the shapes tell
    /// apart; `None` for an affine one.
    fn mlx_shape(&self, name: &str) -> Option<Vec<usize>> {
        let tensor = self.find(name)?;
        let scales = self.find(&scales(name)?)?;
        if scales.entry.dtype.name != "U8" {
            return None;
        }
        let (words, groups) = (*tensor.entry.shape.last()?, *scales.entry.shape.last()?);
        let group = FLOATS
            .iter()
            .find(|(bits, group, _)| groups.checked_mul(group * bits) == words.checked_mul(32))?
            .1;
        let mut shape = tensor.entry.shape.clone();
        *shape.last_mut()? = groups.checked_mul(group)?;
        Some(shape)
    }
}

/// The stack, bits and group with which `words: […, cols·bits/32]` and
/// `scales: […, cols/group]` are a matrix `[rows, cols]`, if they are one.
fn stack_of(
    words: &[usize],
    scales: &[usize],
    rows: usize,
    cols: usize,
) -> Option<(Stack, usize, usize)> {
    let (&n_words, lead) = words.split_last()?;
    let (&n_groups, scales_lead) = scales.split_last()?;
    let count = lead
        .split_last()
        .map_or(1, |(_, stack)| stack.iter().product());
    if lead != scales_lead || lead.iter().product::<usize>() != rows {
        return None;
    }
    let stack = Stack {
        count,
        rows: rows / count,
        cols,
        words: n_words,
    };
    let group = cols.is_multiple_of(n_groups).then(|| cols / n_groups)?;
    Some((stack, stack.bits(32)?, group))
}
