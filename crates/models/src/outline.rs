//! The sizes of a model, from its configuration alone, for programs that write
//! checkpoints.
//!
//! [`Outline::read`] checks a configuration exactly as loading the model does, but
//! reads no tensor and needs no device.

use crate::gemma4::LayerType;
use crate::{ModelError, gemma4, gemma4_assistant, qwen3_5};
use serde_json::Value;
use weights::Checkpoint;

/// Sizes of a target, or of an assistant that drafts for one.
///
/// ```no_run
/// let checkpoint = weights::Checkpoint::open("models/tiny-qwen3.5".as_ref())?;
/// let outline = models::Outline::read(&checkpoint)?;
/// println!("{}: {} columns", outline.family.name(), outline.hidden_size);
/// # Ok::<(), models::ModelError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outline {
    /// Whose equations the layers follow.
    pub family: OutlineFamily,
    /// Width of a hidden row.
    pub hidden_size: usize,
    /// Width of the target's hidden rows; 0 for a target.
    pub backbone_hidden_size: usize,
    /// Columns of a dense feed-forward block; 0 where no layer has one.
    pub intermediate_size: usize,
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// For each layer, whether it is one of full attention.
    pub full_attention: Vec<bool>,
    /// Heads of the gated delta rule, in families with such layers.
    pub delta: Option<DeltaHeads>,
    /// Whether the table of embeddings is the head too.
    pub tie_word_embeddings: bool,
    /// Whether layers have experts.
    pub has_experts: bool,
    /// Whether layers have embeddings of their own.
    pub has_per_layer_embeddings: bool,
}

/// Families that an [`Outline`] tells apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutlineFamily {
    /// Gemma 4, a target.
    Gemma4,
    /// The assistant that drafts for Gemma 4.
    Gemma4Assistant,
    /// Qwen 3.5, a target with an MTP head or without.
    Qwen35,
}

impl OutlineFamily {
    /// The family of an architecture ([`Checkpoint::architecture`]).
    pub fn of(architecture: &str) -> Option<OutlineFamily> {
        let families = [
            (OutlineFamily::Gemma4Assistant, gemma4_assistant::NAMES),
            (OutlineFamily::Gemma4, gemma4::FAMILY.names),
            (OutlineFamily::Qwen35, qwen3_5::FAMILY.names),
        ];
        let found = families
            .iter()
            .find(|(_, names)| names.contains(&architecture));
        found.map(|(family, _)| *family)
    }

    /// The name of the family; an assistant's is its target's.
    pub const fn name(self) -> &'static str {
        match self {
            OutlineFamily::Gemma4 | OutlineFamily::Gemma4Assistant => "gemma4",
            OutlineFamily::Qwen35 => "qwen3_5",
        }
    }
}

/// Heads of a gated delta layer and their sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaHeads {
    /// Key heads.
    pub key_heads: usize,
    /// Value heads, a multiple of the key heads.
    pub value_heads: usize,
    /// Columns of a key.
    pub key_dim: usize,
    /// Columns of a value.
    pub value_dim: usize,
}

impl Outline {
    /// Reads the configuration of `checkpoint`.
    ///
    /// # Errors
    ///
    /// [`ModelError`]: an architecture without an outline, or a configuration with
    /// which the model could not be loaded.
    pub fn read(checkpoint: &Checkpoint) -> Result<Outline, ModelError> {
        let found = checkpoint.architecture()?;
        match OutlineFamily::of(found) {
            Some(OutlineFamily::Qwen35) => Self::qwen3_5(checkpoint),
            Some(family) => Self::gemma4(checkpoint, family),
            None => Err(ModelError::UnknownArchitecture {
                found: found.to_owned(),
            }),
        }
    }

    fn gemma4(checkpoint: &Checkpoint, family: OutlineFamily) -> Result<Outline, ModelError> {
        let config = gemma4::Config::read(checkpoint)?;
        let backbone = checkpoint.config().get("backbone_hidden_size");
        let types = config.layer_types()?;
        Ok(Outline {
            family,
            hidden_size: config.hidden_size,
            backbone_hidden_size: backbone.and_then(Value::as_u64).unwrap_or(0) as usize,
            intermediate_size: config.intermediate_size,
            vocab_size: config.vocab_size,
            full_attention: types.iter().map(|t| *t == LayerType::Full).collect(),
            delta: None,
            tie_word_embeddings: tied(checkpoint).unwrap_or(true),
            has_experts: config.enable_moe_block,
            has_per_layer_embeddings: config.per_layer_width().is_some(),
        })
    }

    fn qwen3_5(checkpoint: &Checkpoint) -> Result<Outline, ModelError> {
        let config = qwen3_5::Config::read(checkpoint)?;
        let size = |key: &str| {
            let value = checkpoint.text_config().get(key);
            value.and_then(Value::as_u64).unwrap_or(0) as usize
        };
        let delta = config.delta();
        Ok(Outline {
            family: OutlineFamily::Qwen35,
            hidden_size: config.hidden_size,
            backbone_hidden_size: 0,
            intermediate_size: size("intermediate_size"),
            vocab_size: config.vocab_size,
            full_attention: config.full_layers()?,
            delta: Some(DeltaHeads {
                key_heads: delta.key_heads,
                value_heads: delta.value_heads,
                key_dim: delta.key_dim,
                value_dim: delta.value_dim,
            }),
            tie_word_embeddings: tied(checkpoint).unwrap_or(false),
            has_experts: size("num_experts") > 0,
            has_per_layer_embeddings: false,
        })
    }
}

fn tied(checkpoint: &Checkpoint) -> Option<bool> {
    checkpoint
        .text_config()
        .get("tie_word_embeddings")?
        .as_bool()
}
