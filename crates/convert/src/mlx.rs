//! How a checkpoint becomes one of MLX's layout, the layout in which everything is
//! written.

use crate::{ConvertError, Data, Item, Recipe};
use models::OutlineFamily;
use quant::Owned;
use serde_json::Value;
use weights::Checkpoint;

/// What MLX's converter does to a family, beside what it does to all.
struct Form {
    /// Norms are stored as the scale `1 + w` ([`Checkpoint::norm`]).
    folds_norms: bool,
    /// What stands for `experts` in the names of stacked experts.
    experts: &'static str,
    /// `_text` is taken from `model_type`: a model without vision has the name of one
    /// with it.
    drops_text: bool,
}

/// Families with peculiarities; the first line is every other's.
const FORMS: &[(Option<OutlineFamily>, Form)] = &[
    (
        None,
        Form {
            folds_norms: false,
            experts: "experts.switch_glu",
            drops_text: false,
        },
    ),
    (
        Some(OutlineFamily::Qwen35),
        Form {
            folds_norms: true,
            experts: "switch_mlp",
            drops_text: true,
        },
    ),
];

/// The tensors of `checkpoint` in MLX layout: offset norms hold `1 + w`, fused
/// experts are apart, convolutions end in their one channel.
///
/// # Errors
///
/// If a tensor cannot be read.
pub fn convert(checkpoint: &Checkpoint) -> Result<Recipe<'_>, ConvertError> {
    let family = OutlineFamily::of(checkpoint.architecture()?);
    let own = FORMS.iter().find(|(of, _)| of.is_some() && *of == family);
    let (_, form) = own.unwrap_or(&FORMS[0]);
    let mut items = Vec::new();
    for name in checkpoint.weight_names() {
        items.extend(layout(checkpoint, name, form)?);
    }
    let mut config = checkpoint.whole_config();
    if form.drops_text
        && let Some(Value::String(kind)) = config.get_mut("model_type")
    {
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
    form: &Form,
) -> Result<Vec<Item<'a>>, ConvertError> {
    let mut item = Item::of(checkpoint, name)?;
    let Data::Matrix { format, .. } = item.data else {
        return Ok(vec![item]);
    };
    let n = item.rows() * item.cols();
    let module = name.strip_suffix(".weight").unwrap_or(name);
    if form.folds_norms && Checkpoint::is_offset_norm(name) {
        // In `f32`: `1 + w` may need more digits than `w`. Of a head's inputs, norms that
        // hold the scale already stay as stored.
        let scale = checkpoint.norm(name, n)?;
        let is_input = name.starts_with("mtp.pre_fc_norm_");
        if !is_input || scale != checkpoint.vector(name, n)? {
            return Ok(vec![Item::vector(name, item.shape, scale)]);
        }
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
        let block = module.strip_suffix(&format!("experts.{part}"))?;
        Some(move |name: &str| format!("{block}{}.{name}.weight", form.experts))
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
