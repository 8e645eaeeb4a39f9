//! Which stored tensors make one weight of codes (`checkpoints.md` §1.1, §2.1).
//!
//! | writer | codes | scales and more |
//! | --- | --- | --- |
//! | MLX, affine | `@.weight` U32 | `@.scales`, `@.biases` floats |
//! | MLX, mxfp4, nvfp4, mxfp8 | `@.weight` U32 | `@.scales` U8, `@.global_scale` F32 or none |
//! | FP8 | `@.weight` F8_E4M3 | `@.weight_scale_inv` or `@.weight_scale`: one, one a row, a group, or a block |
//! | int-quantized | `@.weight` I8 | `@.weight_scale`, the same |
//! | pack-quantized | `@.weight_packed` I32 | `@.weight_scale`, the same; `@.weight_zero_point` or none |
//! | nvfp4-pack-quantized | `@.weight_packed` U8 | `@.weight_scale` F8_E4M3, `@.weight_global_scale` divides |
//! | mxfp4-pack-quantized | `@.weight_packed` U8 | `@.weight_scale` U8 |
//! | ModelOpt NVFP4 | `@.weight` U8 | `@.weight_scale` F8_E4M3, `@.weight_scale_2` multiplies |
//!
//! The tensors decide. A module is quantised if and only if its scales are
//! stored, so lists of ignored or differing modules need no reading, and bits and
//! groups follow from shapes, since the caller knows the width. The config is
//! asked for what tensors cannot tell: the size of blocks, whether zero points
//! belong to the codes, and whether inputs have to be rotated first.
//!
//! Everything stays where it lies but zero points, which are packed along the
//! other axis, and factors of scales.

use crate::checkpoint::Tensor;
use crate::{Checkpoint, LoadError};
use quant::{Code, Format, Scalar, ScaleType, Stored, Tiles};
use serde_json::Value;

/// What is not read where it lies.
pub(crate) struct Made {
    /// Zero points, a byte a tile.
    zeros: Vec<u8>,
    /// What scales are multiplied by, one for each matrix of a stack or for all.
    pub(crate) factors: Vec<f64>,
}

/// MLX's `global_scale` is the largest magnitude: that of E2M1 times that of E4M3.
const MLX_FULL_SCALE: f32 = 6.0 * 448.0;

/// Rows and columns of a block where no config says otherwise.
const BLOCK: (usize, usize) = (128, 128);

/// What belongs to a tensor called `NAME`, by the end of its name: stored alone,
/// the weight is missing.
pub(crate) const COMPANIONS: &[&str] = &[
    "_scale",
    "_scale_inv",
    "_scale_2",
    "_global_scale",
    "_zero_point",
    "_shape",
    "_g_idx",
];

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

    /// Bits of a code in words of `width` bits.
    fn bits(&self, width: usize) -> Option<usize> {
        let bits = self.words.checked_mul(width)?;
        bits.is_multiple_of(self.cols).then(|| bits / self.cols)
    }

    /// What each of the scales of shape `scales` covers: everything, a matrix, some
    /// columns of a row, or a block.
    fn tiles(&self, scales: &[usize], block: Option<(usize, usize)>) -> Option<Tiles<'static>> {
        let all = self.rows * self.count;
        let tile = |rows, cols| Tiles {
            rows,
            ..Tiles::of_rows(cols)
        };
        let n: usize = scales.iter().product();
        if n == 1 {
            return Some(tile(all, self.cols));
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
    pub(crate) fn coded(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Option<Stored<'_>>, LoadError> {
        let module = name.strip_suffix(".weight");
        let scales = module.map(|m| format!("{m}.scales"));
        if let (Some(module), Some(scales)) = (module, &scales)
            && self.find(scales).is_some()
        {
            return self.mlx(name, module, scales, rows, cols).map(Some);
        }
        let packed = format!("{name}_packed");
        if self.find(&packed).is_some() {
            self.refuse_rotations(name)?;
            return self.packed(name, &packed, rows, cols).map(Some);
        }
        let scales = ["_scale_inv", "_scale"].map(|end| format!("{name}{end}"));
        let Some(tensor) = self.find(name) else {
            return Ok(None);
        };
        let scales_name = scales.iter().find(|s| self.find(s).is_some());
        let kind = tensor.entry.dtype.name;
        let coded = ["F8_E4M3", "I8", "U8"].contains(&kind);
        match scales_name {
            Some(scales) if coded => {
                self.refuse_rotations(name)?;
                self.byte_codes(name, scales, rows, cols).map(Some)
            }
            None if kind == "F8_E4M3" => Err(self.without(&scales[1], name)),
            None => Ok(None),
            Some(_) => Err(wrong_type(
                name,
                tensor,
                "f8_e4m3, i8 or u8 beside its scale",
            )),
        }
    }

    /// The shape of what `name` stands for, where it is not the shape of its
    /// elements and does not need the width to be told; `None` where it is or does.
    pub(crate) fn coded_shape(&self, name: &str) -> Option<Vec<usize>> {
        let in_bytes = |tensor: &Tensor, scale: &str| {
            let nibbles = tensor.entry.dtype.name == "U8" && self.find(scale).is_some();
            let mut shape = tensor.entry.shape.clone();
            *shape.last_mut()? = shape.last()?.checked_mul(2)?;
            nibbles.then_some(shape)
        };
        let scale = format!("{name}_scale");
        if let Some(packed) = self.find(&format!("{name}_packed")) {
            let written = || {
                let shape = self.numbers(&format!("{name}_shape"), 2)?;
                let [rows, words] = packed.entry.shape[..] else {
                    return None;
                };
                let fits = |bits| shape[1].checked_mul(bits) == words.checked_mul(32);
                (shape[0] == rows && [4, 8].into_iter().any(fits)).then_some(shape)
            };
            return in_bytes(packed, &scale).or_else(written);
        }
        let tensor = self.find(name)?;
        if let Some(shape) = in_bytes(tensor, &scale) {
            return Some(shape);
        }
        let scales = self.find(&format!("{}.scales", name.strip_suffix(".weight")?))?;
        if scales.entry.dtype.name != "U8" {
            return None;
        }
        let (words, groups) = (*tensor.entry.shape.last()?, *scales.entry.shape.last()?);
        let group = MLX_FLOATS
            .iter()
            .find(|(bits, group, _)| groups.checked_mul(group * bits) == words.checked_mul(32))?
            .1;
        let mut shape = tensor.entry.shape.clone();
        *shape.last_mut()? = groups.checked_mul(group)?;
        Some(shape)
    }

    /// Why there is no `name`: its companion that is there, if one is.
    pub(crate) fn orphan(&self, name: &str) -> Option<LoadError> {
        let module = name.strip_suffix("weight").unwrap_or(name);
        let own = COMPANIONS.iter().map(|end| format!("{name}{end}"));
        let mlx = ["scales", "biases"].map(|end| format!("{module}{end}"));
        let found = own.chain(mlx).find(|n| self.find(n).is_some())?;
        Some(self.without(name, &found))
    }

    fn without(&self, missing: &str, of: &str) -> LoadError {
        LoadError::MissingCompanion {
            name: missing.into(),
            of: of.into(),
        }
    }

    /// A matrix as MLX writes it (§2.1).
    fn mlx(
        &self,
        name: &str,
        module: &str,
        scales_name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Stored<'_>, LoadError> {
        let scales = self.tensor(scales_name)?;
        let words = self.companion(name, scales_name)?;
        if words.entry.dtype.name != "U32" {
            return Err(wrong_type(name, words, "u32 beside scales"));
        }
        let shape = mlx_shape(&words.entry.shape, &scales.entry.shape, rows, cols);
        let misfit = || LoadError::WrongGroups {
            name: name.into(),
            expected: vec![rows, cols],
            words: words.entry.shape.clone(),
            scales: scales.entry.shape.clone(),
        };
        let (stack, bits, group) = shape.ok_or_else(misfit)?;
        if scales.entry.dtype.name == "U8" {
            let known = MLX_FLOATS
                .iter()
                .find(|(b, g, _)| (*b, *g) == (bits, group));
            let format = known
                .and_then(|(.., f)| quant::format(f))
                .ok_or_else(misfit)?;
            let global = format!("{module}.global_scale");
            let factor = self.find(&global).is_some().then_some(global);
            let tiles = Tiles::of_rows(group);
            let made = self.factors(words, factor.as_deref(), stack.count, |f| {
                (f / MLX_FULL_SCALE).into()
            })?;
            return Ok(self.assemble(
                (rows, cols),
                format,
                (words, scales),
                tiles,
                made,
                stack.rows,
            ));
        }
        let biases_name = format!("{module}.biases");
        let scale = float(scales_name, scales)?;
        let biases = self.companion(&biases_name, scales_name)?;
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

    /// A matrix of bytes under scales: FP8, whole numbers, or two E2M1 a byte.
    fn byte_codes(
        &self,
        name: &str,
        scales_name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Stored<'_>, LoadError> {
        let (codes, scales) = (self.tensor(name)?, self.tensor(scales_name)?);
        if codes.entry.dtype.name == "U8" {
            let factor = format!("{name}_scale_2");
            return self.fp4(name, (name, scales_name), &factor, f64::from, rows, cols);
        }
        let stack = self.stack(name, codes, 1, rows, cols)?;
        let tiles = self.tiles(scales_name, scales, &stack)?;
        let scale_type = scale_type(scales_name, scales)?;
        self.refuse_zeros(name)?;
        let kind = if codes.entry.dtype.name == "I8" {
            Code::Signed
        } else {
            Code::E4m3
        };
        let format = self.format(
            name,
            (8, kind, scale_type),
            (codes, scales),
            &tiles,
            (rows, cols),
        )?;
        Ok(self.assemble(
            (rows, cols),
            format,
            (codes, scales),
            tiles,
            &NONE,
            stack.rows,
        ))
    }

    /// A matrix of compressed-tensors' packed codes.
    fn packed(
        &self,
        name: &str,
        packed: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Stored<'_>, LoadError> {
        if let Some(plain) = self.find(name) {
            return Err(wrong_type(name, plain, "nothing beside its packed form"));
        }
        let scales_name = format!("{name}_scale");
        let codes = self.tensor(packed)?;
        let scales = self.companion(&scales_name, packed)?;
        self.check_shape(name, rows, cols)?;
        if codes.entry.dtype.name == "U8" {
            let factor = format!("{name}_global_scale");
            return self.fp4(
                name,
                (packed, &scales_name),
                &factor,
                |f| 1.0 / f64::from(f),
                rows,
                cols,
            );
        }
        if codes.entry.dtype.name != "I32" {
            return Err(wrong_type(packed, codes, "i32 or u8"));
        }
        let shape = &codes.entry.shape;
        let misfit = || LoadError::WrongGroups {
            name: name.into(),
            expected: vec![rows, cols],
            words: shape.clone(),
            scales: scales.entry.shape.clone(),
        };
        let stack = Stack::of(shape, rows, cols).ok_or_else(misfit)?;
        let bits = stack.bits(32).ok_or_else(misfit)?;
        let tiles = self.tiles(&scales_name, scales, &stack)?;
        self.check_order(name, tiles.cols, cols)?;
        let zeros_name = format!("{name}_zero_point");
        let zeros = self.find(&zeros_name).is_some();
        if !zeros && self.weights_setting("symmetric") == Some(&Value::Bool(false)) {
            return Err(self.without(&zeros_name, packed));
        }
        let kind = if zeros { Code::ZeroPoint } else { Code::Offset };
        let scale_type = scale_type(&scales_name, scales)?;
        let format = self.format(
            name,
            (bits, kind, scale_type),
            (codes, scales),
            &tiles,
            (rows, cols),
        )?;
        let mut made = &NONE;
        if zeros {
            made = self.zeros(&zeros_name, codes, bits, &stack, &tiles)?;
        }
        Ok(self.assemble(
            (rows, cols),
            format,
            (codes, scales),
            tiles,
            made,
            stack.rows,
        ))
    }

    /// A matrix of E2M1, two a byte, under scales of E8M0, or of E4M3 and a factor.
    fn fp4(
        &self,
        name: &str,
        (codes_name, scales_name): (&str, &str),
        factor_name: &str,
        of_factor: impl Fn(f32) -> f64,
        rows: usize,
        cols: usize,
    ) -> Result<Stored<'_>, LoadError> {
        self.refuse_zeros(name)?;
        let (codes, scales) = (self.tensor(codes_name)?, self.tensor(scales_name)?);
        let stack = self.stack(codes_name, codes, 2, rows, cols)?;
        let tiles = self.tiles(scales_name, scales, &stack)?;
        let scale_type = scale_type(scales_name, scales)?;
        let format = self.format(
            name,
            (4, Code::E2m1, scale_type),
            (codes, scales),
            &tiles,
            (rows, cols),
        )?;
        let mut made = &NONE;
        if scale_type == ScaleType::E4m3 {
            self.companion(factor_name, codes_name)?;
            made = self.factors(codes, Some(factor_name), stack.count, of_factor)?;
        }
        Ok(self.assemble(
            (rows, cols),
            format,
            (codes, scales),
            tiles,
            made,
            stack.rows,
        ))
    }

    /// Puts the proven pieces together.
    fn assemble<'a>(
        &'a self,
        (rows, cols): (usize, usize),
        format: &'static Format,
        (codes, scales): (&'a Tensor, &'a Tensor),
        tiles: Tiles<'static>,
        made: &'a Made,
        rows_each: usize,
    ) -> Stored<'a> {
        let plain = scales.entry.dtype.scalar();
        let exact = if made.factors.is_empty() {
            Scalar::F16
        } else {
            Scalar::F32
        };
        Stored {
            format,
            rows,
            cols,
            codes: self.data(codes),
            scale: plain.unwrap_or(exact),
            scales: self.data(scales),
            biases: &made.zeros,
            tiles: Tiles {
                factors: &made.factors,
                factor_rows: if made.factors.len() > 1 {
                    rows_each
                } else {
                    rows
                },
                ..tiles
            },
            mapping: self.mapping(codes),
        }
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
                of: vec![stack.count * stack.rows, stack.cols],
                block: vec![rows, cols],
            }
        })
    }

    fn format(
        &self,
        name: &str,
        (bits, kind, scale): (usize, Code, ScaleType),
        (codes, scales): (&Tensor, &Tensor),
        tiles: &Tiles<'_>,
        (rows, cols): (usize, usize),
    ) -> Result<&'static Format, LoadError> {
        let format = quant::scaled(bits, kind, scale, tiles.cols, cols);
        format.ok_or_else(|| LoadError::WrongGroups {
            name: name.into(),
            expected: vec![rows, cols],
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
    ) -> Result<&'a Made, LoadError> {
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
        Ok(codes.made(|| Made {
            factors: values.map(of_factor).collect(),
            zeros: Vec::new(),
        }))
    }

    /// Zero points, packed along rows, as a byte a tile.
    fn zeros<'a>(
        &self,
        name: &str,
        codes: &'a Tensor,
        bits: usize,
        stack: &Stack,
        tiles: &Tiles<'_>,
    ) -> Result<&'a Made, LoadError> {
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
        Ok(codes.made(|| Made {
            zeros: (0..stack.rows * across).map(zero).collect(),
            factors: Vec::new(),
        }))
    }

    /// What `NAME_shape` says must be what was asked for.
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

    /// Codes must lie in the order of their groups.
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

    /// `n` integers called `name`, not marked used.
    fn numbers(&self, name: &str, n: usize) -> Option<Vec<usize>> {
        let values = self.integers_of(name, self.find(name)?, n).ok()?;
        Some(values.into_iter().map(|v| v as usize).collect())
    }

    fn unknown(&self, name: &str, format: &'static str) -> LoadError {
        LoadError::UnknownFormat {
            name: name.into(),
            format,
        }
    }

    /// Zero points are known of packed whole numbers only.
    fn refuse_zeros(&self, name: &str) -> Result<(), LoadError> {
        match self.find(&format!("{name}_zero_point")) {
            Some(_) => Err(self.unknown(name, "floats or unpacked codes with zero points")),
            None => Ok(()),
        }
    }

    /// Weights that are true only for rotated inputs would give fluent nonsense.
    fn refuse_rotations(&self, name: &str) -> Result<(), LoadError> {
        let groups = self
            .quantization()
            .and_then(|q| q.get("transform_config")?.get("config_groups"));
        match groups.and_then(Value::as_object) {
            Some(groups) if !groups.is_empty() => {
                Err(self.unknown(name, "compressed-tensors with `transform_config`"))
            }
            _ => Ok(()),
        }
    }

    /// The config's part on quantised Hugging Face weights.
    fn quantization(&self) -> Option<&Value> {
        let keys = ["quantization_config", "compression_config"];
        let parts = [self.config(), self.text_config()];
        parts
            .into_iter()
            .find_map(|c| keys.iter().find_map(|k| c.get(k)))
    }

    /// What all groups of the config say of `key` of their weights, if they agree.
    fn weights_setting(&self, key: &str) -> Option<&Value> {
        let groups = self.quantization()?.get("config_groups")?.as_object()?;
        let mut found = groups.values().map(|g| g.get("weights")?.get(key));
        let first = found.next()??;
        found.all(|other| other == Some(first)).then_some(first)
    }

    /// Rows and columns of a block, if the config says.
    fn block(&self) -> Option<(usize, usize)> {
        let fp8 = self.quantization()?.get("weight_block_size");
        let sizes = fp8
            .filter(|b| !b.is_null())
            .or_else(|| self.weights_setting("block_structure"))?;
        let side = |i: usize| {
            usize::try_from(sizes.get(i)?.as_u64()?)
                .ok()
                .filter(|n| *n > 0)
        };
        Some((side(0)?, side(1)?))
    }
}

/// Nothing but what lies in the file.
static NONE: Made = Made {
    zeros: Vec::new(),
    factors: Vec::new(),
};

/// Bits, group and format of MLX's modes of floats.
const MLX_FLOATS: &[(usize, usize, &str)] =
    &[(4, 16, "fp4-nv"), (4, 32, "fp4-mx"), (8, 32, "fp8-mx")];

/// The stack, bits and group with which `words: […, cols·bits/32]` and
/// `scales: […, cols/group]` are a matrix `[rows, cols]`, if they are one.
fn mlx_shape(
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
