//! The sizes of a model before and after it has grown.

use super::{WIDER, inflate, require, unsupported};
use crate::ConvertError;
use models::{Outline, OutlineFamily as Family};
use serde_json::Value;
use weights::Checkpoint;

/// Sizes of released models' vocabularies.
const VOCABULARY: [(&str, usize); 2] = [("gemma4", 262_144), ("qwen3_5", 248_320)];

/// The size that [`inflate`] grows a model to. All but `layers` is at least what the
/// model has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// Times as many heads of every kind.
    pub heads: usize,
    /// Columns of the feed-forward blocks.
    pub inner: usize,
    /// Columns of the feed-forward blocks of an assistant.
    pub drafter_inner: usize,
    /// Layers of the target.
    pub layers: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
}

impl Growth {
    /// The shape of a real model with at most `parameters` weights: feed-forward
    /// blocks three times as wide as the hidden rows, the vocabulary of released
    /// models, and as many layers as fit.
    ///
    /// # Errors
    ///
    /// If `checkpoint` cannot be grown, or has more weights than that without a
    /// single new layer.
    pub fn to(checkpoint: &Checkpoint, parameters: u64) -> Result<Growth, ConvertError> {
        let shape = Shape::read(checkpoint)?;
        let hidden = shape.hidden * WIDER;
        let vocab = VOCABULARY
            .iter()
            .find(|(family, _)| *family == shape.family.name());
        let mut growth = Growth {
            heads: WIDER,
            inner: 3 * hidden,
            drafter_inner: 2048,
            layers: shape.types.len(),
            vocab: vocab.map_or(shape.vocab, |v| v.1).max(shape.vocab),
        };
        let size = |growth: &Growth| -> Result<u64, ConvertError> {
            let recipe = inflate(checkpoint, growth)?;
            Ok(recipe
                .items
                .iter()
                .map(|item| (item.rows() * item.cols()) as u64)
                .sum())
        };
        let least = size(&growth)?;
        require(least <= parameters, || {
            format!(
                "grown to the width of a real model it has {least} weights, more than {parameters}"
            )
        })?;
        let period = shape.period();
        let more = Growth {
            layers: growth.layers + period,
            ..growth
        };
        growth.layers += ((parameters - least) / (size(&more)? - least)) as usize * period;
        Ok(growth)
    }
}

/// What of a configuration decides how a model grows.
pub(super) struct Shape {
    pub(super) family: Family,
    pub(super) hidden: usize,
    /// Width of the target's hidden rows, for an assistant.
    pub(super) backbone: usize,
    pub(super) inner: usize,
    pub(super) vocab: usize,
    /// Whether a layer is of its family's rarer kind.
    pub(super) types: Vec<bool>,
    /// Rows of the gated delta rule: key heads, value heads, their sizes.
    pub(super) delta: (usize, usize, usize, usize),
    pub(super) tied: bool,
}

impl Shape {
    pub(super) fn read(checkpoint: &Checkpoint) -> Result<Shape, ConvertError> {
        let outline = Outline::read(checkpoint)?;
        let refuse = |feature: &str| Err(unsupported(feature));
        let shares = checkpoint.text_config().get("num_kv_shared_layers");
        let shares = shares.and_then(Value::as_u64).unwrap_or(0) > 0;
        match outline.family {
            Family::Qwen35 if outline.has_experts => return refuse("experts"),
            _ if outline.has_experts || outline.has_per_layer_embeddings => {
                return refuse("experts and per-layer embeddings");
            }
            Family::Gemma4 if shares => return refuse("layers that share keys and values"),
            Family::Gemma4 | Family::Gemma4Assistant
                if checkpoint.has("masked_embedding.centroids.weight") =>
            {
                return refuse("a head with centroids");
            }
            _ => {}
        }
        let delta = outline.delta.map_or((0, 0, 0, 0), |delta| {
            (
                delta.key_heads,
                delta.value_heads,
                delta.key_dim,
                delta.value_dim,
            )
        });
        Ok(Shape {
            family: outline.family,
            hidden: outline.hidden_size,
            backbone: outline.backbone_hidden_size,
            inner: outline.intermediate_size,
            vocab: outline.vocab_size,
            types: outline.full_attention,
            delta,
            tied: outline.tie_word_embeddings,
        })
    }

    /// Layers after which their types repeat.
    pub(super) fn period(&self) -> usize {
        let n = self.types.len();
        let repeats = |p: &usize| (0..n).all(|i| self.types[i] == self.types[i % p]);
        (1..n)
            .filter(|p| n.is_multiple_of(*p))
            .find(repeats)
            .unwrap_or(n)
    }
}
