//! How a checkpoint becomes one of MLX layout, the layout in which everything is
//! written.

use crate::{ConvertError, Data, Item, Recipe};
use models::OutlineFamily;
use quant::Owned;
use weights::Checkpoint;

/// The tensors of `checkpoint` in MLX layout: offset norms hold `1 + w`, fused
/// experts are apart, convolutions end in their one channel.
///
/// # Errors
///
/// If a tensor cannot be read.
pub fn convert(checkpoint: &Checkpoint) -> Result<Recipe<'_>, ConvertError> {
    let is_qwen = OutlineFamily::of(checkpoint.architecture()?) == Some(OutlineFamily::Qwen35);
    let mut items = Vec::new();
    for name in checkpoint.weight_names() {
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
) -> Result<Vec<Item<'a>>, ConvertError> {
    let mut item = Item::of(checkpoint, name)?;
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
