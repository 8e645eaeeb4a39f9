//! Which tensors are quantised, and how a checkpoint becomes one of MLX layout.
//!
//! [`POLICY`] is a table of patterns over canonical names; the first that fits
//! decides. What no line names is quantised as the user asks, if it is a matrix
//! whose rows are whole blocks; vectors and integers stay as stored.

use crate::{ModelError, qwen3_5};
use quant::{Format, Owned, Scalar};
use weights::{Checkpoint, Data, Item, Recipe};

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
        quant::Layout::Affine { bits, group } if bits < 8 => quant::affine(8, group.into()),
        quant::Layout::Block { cols, bytes } if bytes < cols => quant::format("q8_0"),
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

/// The tensors of `checkpoint` in MLX layout: offset norms hold `1 + w`, fused
/// experts are apart, convolutions end in their one channel.
///
/// # Errors
///
/// If a tensor cannot be read.
pub fn convert(checkpoint: &Checkpoint) -> Result<Recipe<'_>, ModelError> {
    let is_qwen = qwen3_5::FAMILY.names.contains(&checkpoint.architecture()?);
    let mut items = Vec::new();
    for name in checkpoint.item_names() {
        items.extend(layout(checkpoint, name, is_qwen)?);
    }
    let mut config = checkpoint.config().clone();
    if is_qwen && let Some(serde_json::Value::String(kind)) = config.get_mut("model_type") {
        // mlx-lm knows a Qwen without vision by the same name as one with it.
        let len = kind.trim_end_matches("_text").len();
        kind.truncate(len);
    }
    Ok(Recipe {
        config,
        items,
        is_mlx: true,
    })
}

/// Tensor `name` as MLX files have it; two, where gate and up are one.
fn layout<'a>(
    checkpoint: &'a Checkpoint,
    name: &str,
    is_qwen: bool,
) -> Result<Vec<Item<'a>>, ModelError> {
    let mut item = checkpoint.item(name)?;
    let Data::Matrix { format, .. } = item.data else {
        return Ok(vec![item]);
    };
    let n = item.rows() * item.cols();
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let is_decoder =
        name == "norm.weight" || name.starts_with("layers.") || name.starts_with("mtp.");
    if is_qwen && is_decoder && module.ends_with("norm") && !module.ends_with("linear_attn.norm") {
        // In `f32`: `1 + w` may need more digits than `w`.
        let shape = item.shape;
        return Ok(vec![Item::vector(name, shape, checkpoint.norm(name, n)?)]);
    }
    // GGUF files have two axes.
    if let ([channels, 1, taps] | [channels, taps], true) =
        (&item.shape[..], name.ends_with(".conv1d.weight"))
    {
        item = Item::stored(
            name,
            vec![*channels, *taps, 1],
            checkpoint.matrix(name, channels * taps, 1)?,
        );
    }
    let stacked = |part: &str| {
        let inside = if is_qwen {
            "switch_mlp"
        } else {
            "experts.switch_glu"
        };
        let block = module.strip_suffix(&format!("experts.{part}"))?;
        Some(move |name: &str| format!("{block}{inside}.{name}.weight"))
    };
    if let ([count, both, hidden], Some(called)) = (&item.shape[..], stacked("gate_up_proj")) {
        let (inner, count) = (both / 2, *count);
        let from = checkpoint.matrix(name, count * both, *hidden)?;
        let part = |name: &str, first: usize| Item {
            name: called(name),
            shape: vec![count, inner, *hidden],
            data: Data::Matrix {
                format,
                scale: from.scale,
                rows: Box::new(move |rows| {
                    Owned::gather(
                        &from,
                        rows.map(|row| row / inner * 2 * inner + first + row % inner),
                    )
                }),
            },
        };
        return Ok(vec![part("gate_proj", 0), part("up_proj", inner)]);
    }
    if let (3, Some(called)) = (item.shape.len(), stacked("down_proj")) {
        item.name = called("down_proj");
    }
    Ok(vec![item])
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
