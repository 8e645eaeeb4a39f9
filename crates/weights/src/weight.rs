//! Tensors as whole weights: a matrix of codes with its scales, not one by one.

use crate::names::{self, COMPANIONS};
use crate::{Checkpoint, LoadError};
use quant::Stored;

/// A weight of a checkpoint: a tensor with its scales, biases and zero points.
#[derive(Debug)]
pub struct Weight<'a> {
    /// Logical shape, outermost axis first.
    pub shape: Vec<usize>,
    /// What it holds.
    pub data: WeightData<'a>,
}

/// What a [`Weight`] holds.
#[derive(Debug)]
pub enum WeightData<'a> {
    /// Numbers, as a matrix of `rows: product of the leading axes` and `cols: the last
    /// axis`.
    Matrix(Stored<'a>),
    /// Anything else, as stored.
    Raw {
        /// The type's name in a safetensors header.
        dtype: &'static str,
        /// Little-endian elements.
        bytes: &'a [u8],
    },
}

impl Checkpoint {
    /// Tensor `name` with its scales, in whatever type it is stored. Marks it used.
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::matrix`]; also if it is quantized and its width cannot be
    /// told ([`Checkpoint::shape`]).
    pub fn weight(&self, name: &str) -> Result<Weight<'_>, LoadError> {
        let is_coded = self.quantized_shape(name).is_some() || self.is_companioned(name);
        let plain = (!is_coded).then(|| self.raw(name)).transpose()?;
        if let Some(raw) =
            plain.filter(|(_, dtype, _)| dtype.scalar().is_none() && dtype.format.is_none())
        {
            let (bytes, dtype, shape) = raw;
            let data = WeightData::Raw {
                dtype: dtype.name,
                bytes,
            };
            return Ok(Weight { shape, data });
        }
        let shape = self.shape(name).ok_or(LoadError::MissingField {
            field: "`quantization` that says how wide its matrices are",
        })?;
        let cols = shape.last().copied().unwrap_or(1);
        let rows = shape.iter().product::<usize>() / cols;
        let data = WeightData::Matrix(self.matrix(name, rows, cols)?);
        Ok(Weight { shape, data })
    }

    /// The names of all [`Checkpoint::weight`]s, sorted: all tensors but those that
    /// belong to a weight of codes, change no weight or are there once more.
    pub fn weight_names(&self) -> impl Iterator<Item = &str> {
        let belongs = |name: &str| {
            let (module, end) = name.rsplit_once('.').unwrap_or(("", name));
            let of_codes = end != "weight" && self.is_companioned(&format!("{module}.weight"));
            let factor = name.strip_suffix("_scale_2");
            names::is_of_activations(name)
                || self.shared(name).is_some()
                || of_codes && is_companion(end)
                || factor.is_some_and(|weight| self.find(weight).is_some())
        };
        // Packed codes stand for their weight.
        self.names()
            .filter(move |name| !belongs(name))
            .map(|name| name.strip_suffix("_packed").unwrap_or(name))
    }

    /// What the layers of an MTP head share, if `name` is a layer's copy of it.
    fn shared(&self, name: &str) -> Option<&crate::tensor::Tensor> {
        let (_, shared) = name.strip_prefix("mtp.layers.")?.split_once('.')?;
        self.find(&format!("mtp.{shared}"))
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
