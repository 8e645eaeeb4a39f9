//! Which tensors are quantized, and how a checkpoint becomes one of MLX layout.
//!
//! [`POLICY`] is a table of patterns over canonical names; the first that fits
//! decides. What no line names is quantized as the user asks, if it is a matrix
//! whose rows are whole blocks; vectors and integers stay as stored.

use crate::pins::{Pins, finer};
use crate::{Data, Item, Recipe};
use quant::{Format, Scalar};

/// What happens to a tensor that is quantized with its checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Treatment {
    /// Quantized as asked.
    Asked,
    /// Kept as stored.
    Stored,
    /// At least 8 bits.
    Eight,
}

/// Patterns of canonical names (`*` is anything), what happens to the tensors that fit,
/// and the reason. The first that fits decides.
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

/// How to quantize a checkpoint.
#[derive(Clone, Debug)]
pub struct Quantize {
    /// The format of all matrices that neither `own` nor [`POLICY`] names.
    pub format: &'static Format,
    /// The user's own lines, before those of [`POLICY`]: pattern and format, or
    /// none for "as stored".
    pub own: Vec<(String, Option<&'static Format>)>,
    /// Matrices that are stored finer, unless `own` or [`POLICY`] names them.
    pub pins: Pins,
}

impl Quantize {
    /// Quantizes to `format` all matrices that [`POLICY`] does not except, with the format's own
    /// [`Pins`].
    pub fn new(format: &'static Format) -> Self {
        Quantize {
            format,
            own: Vec::new(),
            pins: Pins::of(format),
        }
    }

    /// `recipe` with its matrices in the formats that are asked for. Matrices whose rows
    /// are not whole blocks stay as stored ([`Quantize::misfits`]).
    pub fn apply<'a>(&self, recipe: Recipe<'a>) -> Recipe<'a> {
        let items = recipe.items.into_iter().map(|item| {
            let format = self.format_of(&item);
            match format.filter(|format| item.cols().is_multiple_of(format.block)) {
                Some(format) => item.encoded(format, Scalar::Bf16),
                None => item,
            }
        });
        Recipe {
            items: items.collect(),
            ..recipe
        }
    }

    /// The matrices of `recipe` that [`Quantize::apply`] leaves as stored because their
    /// rows are not whole blocks of the format asked for: name and format.
    pub fn misfits<'r>(&self, recipe: &'r Recipe<'_>) -> Vec<(&'r str, &'static Format)> {
        let misfit = |item: &'r Item<'_>| {
            let format = self.format_of(item)?;
            let fits = item.cols().is_multiple_of(format.block);
            (!fits).then_some((item.name.as_str(), format))
        };
        recipe.items.iter().filter_map(misfit).collect()
    }

    /// The matrices of `recipe` that [`Quantize::pins`] has stored finer: name and format.
    pub fn pinned<'r>(&self, recipe: &'r Recipe<'_>) -> Vec<(&'r str, &'static Format)> {
        let pinned = |item: &'r Item<'_>| {
            let format = self.format_of(item)?;
            let bare = Quantize {
                pins: Pins::NONE,
                ..self.clone()
            };
            let fits = item.cols().is_multiple_of(format.block);
            let is_pinned = fits && bare.format_of(item) != Some(format);
            is_pinned.then_some((item.name.as_str(), format))
        };
        recipe.items.iter().filter_map(pinned).collect()
    }

    /// The format asked for `item`; none if it stays as stored, as all but matrices do.
    fn format_of(&self, item: &Item<'_>) -> Option<&'static Format> {
        let is_matrix = item.shape.len() > 1 && matches!(item.data, Data::Matrix { .. });
        is_matrix.then(|| self.format_named(&item.name, item.cols()))?
    }

    /// The format asked for a matrix called `name` with rows of `cols` columns; none if it stays as
    /// stored.
    fn format_named(&self, name: &str, cols: usize) -> Option<&'static Format> {
        let fits = |pattern: &str| matches(pattern, name);
        match self.own.iter().find(|(pattern, _)| fits(pattern)) {
            Some((_, own)) => *own,
            None => match POLICY.iter().find(|(pattern, ..)| fits(pattern)) {
                Some((_, Treatment::Stored, _)) => None,
                Some((_, Treatment::Eight, _)) => {
                    Some(finer(self.format, 8, cols).unwrap_or(self.format))
                }
                _ => self
                    .pins
                    .format(name, cols, self.format)
                    .or(Some(self.format)),
            },
        }
    }
}

/// Whether `name` is `pattern`, in which `*` stands for anything.
pub(crate) fn matches(pattern: &str, name: &str) -> bool {
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
        let format = |q: &Quantize, name: &str| q.format_named(name, 512).map(|f| f.name);
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
        let pinned = Quantize::new(quant::format("tq4_1s").unwrap());
        for (name, expected) in [
            ("mtp.layers.0.mlp.up_proj.weight", Some("q8_0")),
            ("mtp.fc.weight", None),
            ("layers.0.mlp.gate.weight", Some("q8_0")),
            ("layers.0.self_attn.k_proj.weight", Some("q6_k")),
            ("layers.0.self_attn.v_proj.weight", Some("tq4_1s")),
        ] {
            assert_eq!(format(&pinned, name), expected, "{name}");
        }
        quantize.own = vec![("mtp.fc.*".into(), Some(q4)), ("layers.0.*".into(), None)];
        assert_eq!(format(&quantize, "mtp.fc.weight"), Some("affine4-g64"));
        assert_eq!(format(&quantize, "layers.0.mlp.gate_proj.weight"), None);
    }

    #[test]
    fn matrices_whose_rows_are_no_whole_blocks_stay_and_are_named() {
        let item = |name: &str, shape: [usize; 2]| {
            Item::vector(name, shape.into(), vec![0.5; shape[0] * shape[1]])
        };
        let recipe = || Recipe {
            config: serde_json::json!({}),
            items: vec![
                item("layers.0.mlp.up_proj.weight", [2, 64]),
                item("layers.0.mlp.down_proj.weight", [2, 96]),
                item("layers.0.input_layernorm.weight", [2, 96]),
            ],
            is_mlx: true,
        };
        let quantize = Quantize::new(quant::affine(4, 64).unwrap());
        let misfits = |recipe: &Recipe<'_>| {
            let misfits = quantize.misfits(recipe).into_iter();
            misfits
                .map(|(name, f)| (name.to_owned(), f.name))
                .collect::<Vec<_>>()
        };
        let down = "layers.0.mlp.down_proj.weight".to_owned();
        assert_eq!(misfits(&recipe()), [(down, "affine4-g64")]);
        let formats: Vec<_> = quantize
            .apply(recipe())
            .items
            .iter()
            .map(|item| match item.data {
                Data::Matrix { format, .. } => format.name,
                Data::Raw { dtype, .. } => dtype,
            })
            .collect();
        assert_eq!(formats, ["affine4-g64", "f32", "f32"]);
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
