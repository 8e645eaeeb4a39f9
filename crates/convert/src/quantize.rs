//! Which tensors are quantised, and how a checkpoint becomes one of MLX layout.
//!
//! [`POLICY`] is a table of patterns over canonical names; the first that fits
//! decides. What no line names is quantised as the user asks, if it is a matrix
//! whose rows are whole blocks; vectors and integers stay as stored.

use crate::{Data, Recipe};
use quant::{Format, Scalar};

/// What happens to a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Treatment {
    /// Quantised as asked.
    Asked,
    /// Kept as stored.
    Stored,
    /// At least 8 bits.
    Eight,
}

/// Patterns (`*` is anything), what happens, and the reason.
pub const POLICY: &[(&str, Treatment, &str)] = &[
    (
        "*norm*",
        Treatment::Stored,
        "a vector, and every row goes through it",
    ),
    ("*conv1d*", Treatment::Stored, "four taps a channel"),
    (
        "visual.*",
        Treatment::Stored,
        "not part of the language model",
    ),
    (
        "vision_*",
        Treatment::Stored,
        "not part of the language model",
    ),
    (
        "audio_*",
        Treatment::Stored,
        "not part of the language model",
    ),
    (
        "embed_vision.*",
        Treatment::Stored,
        "not part of the language model",
    ),
    (
        "embed_audio.*",
        Treatment::Stored,
        "not part of the language model",
    ),
    (
        "masked_embedding.*",
        Treatment::Stored,
        "chooses which tokens a draft may have",
    ),
    (
        "*.router.proj.*",
        Treatment::Eight,
        "a changed choice of experts changes all that follows",
    ),
    (
        "*.mlp.gate.*",
        Treatment::Eight,
        "a changed choice of experts changes all that follows",
    ),
    (
        "*.shared_expert_gate.*",
        Treatment::Eight,
        "one row, in front of an expert",
    ),
    (
        "mtp.fc.*",
        Treatment::Stored,
        "small, and all that a draft knows goes through it",
    ),
];

/// How to quantise a checkpoint.
#[derive(Clone, Debug)]
pub struct Quantize {
    /// For all tensors that nothing else names.
    pub format: &'static Format,
    /// The user's own lines, before those of [`POLICY`]: pattern and format, or
    /// none for "as stored".
    pub own: Vec<(String, Option<&'static Format>)>,
}

impl Quantize {
    /// Everything in `format` that may be.
    pub fn new(format: &'static Format) -> Self {
        Quantize {
            format,
            own: Vec::new(),
        }
    }

    /// `recipe` with its matrices in the formats that are asked for.
    pub fn apply<'a>(&self, recipe: Recipe<'a>) -> Recipe<'a> {
        let items = recipe.items.into_iter().map(|item| {
            let is_matrix = item.shape.len() > 1 && matches!(item.data, Data::Matrix { .. });
            match self
                .format_of(&item.name, item.cols())
                .filter(|_| is_matrix)
            {
                Some(format) => item.encoded(format, Scalar::Bf16),
                None => item,
            }
        });
        Recipe {
            items: items.collect(),
            ..recipe
        }
    }

    /// The format of tensor `name` with rows of `cols`; none if it stays as stored.
    fn format_of(&self, name: &str, cols: usize) -> Option<&'static Format> {
        let fits = |pattern: &str| matches(pattern, name);
        let format = match self.own.iter().find(|(pattern, _)| fits(pattern)) {
            Some((_, own)) => (*own)?,
            None => match POLICY.iter().find(|(pattern, ..)| fits(pattern)) {
                Some((_, Treatment::Stored, _)) => return None,
                Some((_, Treatment::Eight, _)) => eight(self.format),
                _ => self.format,
            },
        };
        cols.is_multiple_of(format.block).then_some(format)
    }
}

/// The relative of `format` with 8 bits; `format` itself if it has as many.
fn eight(format: &'static Format) -> &'static Format {
    let relative = match format.layout {
        quant::WeightLayout::Affine { bits, group } if bits < 8 => quant::affine(8, group.into()),
        quant::WeightLayout::Block { cols, bytes } if bytes < cols => quant::format("q8_0"),
        _ => None,
    };
    relative.unwrap_or(format)
}

/// Whether `name` is `pattern`, in which `*` stands for anything.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((start, rest)) => name.strip_prefix(start).is_some_and(|name| {
            name.char_indices()
                .map(|(i, _)| i)
                .chain([name.len()])
                .any(|i| matches(rest, &name[i..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_that_fits_decides() {
        let q4 = quant::affine(4, 64).unwrap();
        let mut quantize = Quantize::new(q4);
        let format = |q: &Quantize, name: &str| q.format_of(name, 256).map(|f| f.name);
        for (name, expected) in [
            ("layers.0.mlp.gate_proj.weight", Some("affine4-g64")),
            ("embed_tokens.weight", Some("affine4-g64")),
            ("layers.0.mlp.gate.weight", Some("affine8-g64")),
            ("layers.3.router.proj.weight", Some("affine8-g64")),
            ("mtp.layers.0.mlp.gate_proj.weight", Some("affine4-g64")),
            ("mtp.fc.weight", None),
            ("layers.0.linear_attn.conv1d.weight", None),
            ("masked_embedding.centroids.weight", None),
            ("visual.blocks.0.attn.qkv.weight", None),
        ] {
            assert_eq!(format(&quantize, name), expected, "{name}");
        }
        assert_eq!(
            quantize.format_of("layers.0.mlp.gate_proj.weight", 96),
            None,
            "no whole groups"
        );
        quantize.own = vec![("mtp.fc.*".into(), Some(q4)), ("layers.0.*".into(), None)];
        assert_eq!(format(&quantize, "mtp.fc.weight"), Some("affine4-g64"));
        assert_eq!(format(&quantize, "layers.0.mlp.gate_proj.weight"), None);
    }

    #[test]
    fn stars_stand_for_anything() {
        for (pattern, name, expected) in [
            ("*", "", true),
            ("a*c", "abbc", true),
            ("a*c", "abbcd", false),
            ("*norm*", "layers.0.input_layernorm.weight", true),
            ("mtp.*", "layers.0.mtp.weight", false),
            ("*.*.x", "a.b.x", true),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }
}
