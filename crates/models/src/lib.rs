//! Targets, draft heads and vision towers: one file of equations a family, over `&dyn Backend`.
//! What a family's configuration says and how its tensors are loaded is in a folder of the same
//! name, unless it is little.
//!
//! A [`Target`] turns a step's rows into hidden rows and those into logits. A
//! draft head is paired with a target when it is loaded, and refuses a target it
//! was not made for. A [`Tower`] makes rows of pictures, which a target reads like those of
//! tokens. Families are entries of [`TARGETS`]; adding one is its files and a line there.
//!
//! No device test, no sampling, no rollback, no choice of a draft.

#![forbid(unsafe_code)]

mod block_head;
mod census;
mod eagle3;
mod gemma4;
mod gemma4_assistant;
mod gemma4_audio;
mod gemma4_unified;
mod gemma4_unified_audio;
mod gemma4_vision;
mod head;
mod head_config;
mod layers;
mod media;
mod outline;
mod qwen3_5;
mod qwen3_5_mtp;
mod qwen3_5_vision;
mod rope;
mod taps;

pub use block_head::{BlockHead, BlockKind};
pub use census::Census;
pub use eagle3::Eagle3;
pub use gemma4::Gemma4;
pub use gemma4_assistant::Gemma4Assistant;
pub use head::{ChainedHead, HeadLogits, Scored, Shortlist};
pub use media::{
    EncodeError, FrameAttention, Frames, MediaError, MediaGrid, MediaTokens, Phase, SOUND_RATE,
    SOUND_SECONDS_MAX, SOUND_TOWER_PREFIXES, SizeRule, SoundError, SoundOutline, SoundRun,
    SoundTokens, SoundTower, TOWER_PREFIXES, Tower, TowerLayers, TowerOutline, TowerPlan, TowerRun,
    VideoRule, encode, encode_sound, has_tower, load_sound_tower, load_tower, sound_features,
    sound_outline, tower_plan,
};
pub use outline::{DeltaHeads, Outline, OutlineFamily};
pub use qwen3_5::Qwen35;
pub use qwen3_5_mtp::Qwen35Mtp;
pub use taps::Taps;

use backend::{Backend, Batch, Tensor};
use cache::{Memory, MemoryPlan};
use weights::{Checkpoint, LoadError, NormFacts};

/// The model whose output counts.
pub trait Target: Send + Sync + std::any::Any {
    /// Family name, as in the configuration's `model_type`.
    fn family(&self) -> &'static str;

    /// Width `H` of a hidden row.
    fn hidden_size(&self) -> usize;

    /// Tokens in the vocabulary.
    fn vocab_size(&self) -> usize;

    /// Decoder layers.
    fn n_layers(&self) -> usize;

    /// Longest context the model was made for.
    fn max_context(&self) -> usize;

    /// What is remembered of each row.
    fn plan(&self) -> MemoryPlan;

    /// Input embeddings of `tokens`, scaled as the first layer wants them: `[n, H]`.
    fn embed(&self, b: &dyn Backend, tokens: &[u32]) -> Tensor;

    /// The scale of [`Target::embed`].
    fn embed_scale(&self) -> f32 {
        1.0
    }

    /// How rows of pictures and video stand in a text.
    fn media_rows(&self) -> MediaRows {
        MediaRows::default()
    }

    /// What the first layer of a step gets: [`Target::embed`] of the tokens and, for the
    /// batch's [media rows](backend::MediaRow), rows of `media`, a tensor a source:
    /// `[n, H]`.
    fn inputs(&self, b: &dyn Backend, batch: &Batch, media: &[&Tensor]) -> Tensor {
        with_media(b, self.embed(b, &batch.tokens), batch, media)
    }

    /// Runs a step from its `inputs: [n, H]` ([`Target::inputs`]) and remembers its rows.
    /// Returns the hidden rows after the final norm, `[n, H]`, or of those alone that `taps`
    /// names ([`Taps::with_outputs`]), and leaves in `taps` the rows it asks for.
    fn forward_inputs(
        &self,
        b: &dyn Backend,
        inputs: Tensor,
        batch: &Batch,
        memory: &mut Memory,
        taps: &mut Taps,
    ) -> Tensor;

    /// [`Target::forward_inputs`] of a step of tokens.
    fn forward_tapped(
        &self,
        b: &dyn Backend,
        batch: &Batch,
        memory: &mut Memory,
        taps: &mut Taps,
    ) -> Tensor {
        let inputs = self.inputs(b, batch, &[]);
        self.forward_inputs(b, inputs, batch, memory, taps)
    }

    /// [`Target::forward_tapped`] without taps.
    fn forward(&self, b: &dyn Backend, batch: &Batch, memory: &mut Memory) -> Tensor {
        self.forward_tapped(b, batch, memory, &mut Taps::new(&[]))
    }

    /// Scores of every token after each of `hidden`'s rows: `[n, V]`.
    fn logits(&self, b: &dyn Backend, hidden: &Tensor) -> Tensor;

    /// [`Target::logits`] before they are bounded, where the family bounds them.
    fn uncapped_logits(&self, b: &dyn Backend, hidden: &Tensor) -> Tensor {
        self.logits(b, hidden)
    }

    /// The kinds of draft heads that this family's authors publish, inside its checkpoints or
    /// beside them, by the drafters' names.
    fn draft_heads(&self) -> &'static [&'static str] {
        &[]
    }

    /// What the norms of `checkpoint`, the target's own or its draft head's, hold, in families
    /// whose norms may be stored with and without an offset of 1.
    fn norm_facts(&self, checkpoint: &Checkpoint) -> Vec<NormFacts> {
        let _ = checkpoint;
        Vec::new()
    }

    /// Bytes of the weights of `checkpoint`, the target's own, that a step of one row reads: not
    /// the draft head, not what reads images, and a table of embeddings only where it is the
    /// output head too. Experts count whole, though a row reads few of them.
    fn step_bytes(&self, checkpoint: &Checkpoint) -> u64 {
        step_bytes(checkpoint)
    }

    /// The share of a layer's experts that a row chooses; 1 without a mixture of experts.
    fn chosen_experts(&self) -> f64 {
        1.0
    }

    /// Weights of `checkpoint`, the target's own, that each row of a prompt is multiplied with: those of all layers, but
    /// of a mixture only the experts that the row chooses.
    fn row_weights(&self, checkpoint: &Checkpoint) -> u64 {
        row_weights(checkpoint, self.chosen_experts())
    }
}

/// How rows of media stand in a text, by the target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MediaRows {
    /// Whether a span's rows have positions on axes of their own: one time, a height and a width
    /// each, and the text goes on after the largest of them. Otherwise they are counted like
    /// tokens.
    pub has_grid: bool,
    /// Whether the rows of a span see each other, in layers that let them; otherwise each sees
    /// what is before it.
    pub see_their_span: bool,
}

/// `x` with rows of `media`, a tensor a source, in the place of those of the batch's media rows.
fn with_media(b: &dyn Backend, x: Tensor, batch: &Batch, media: &[&Tensor]) -> Tensor {
    let sources = (0..).zip(media);
    sources.fold(x, |x, (source, rows)| {
        b.replace_rows(x, rows, source, batch)
    })
}

/// [`Target::step_bytes`] where tensors have the usual names.
fn step_bytes(checkpoint: &Checkpoint) -> u64 {
    let head_apart = checkpoint.has("lm_head.weight");
    let is_read = |name: &str| {
        let is_table = name.starts_with("embed_tokens_per_layer.")
            || head_apart && name.starts_with("embed_tokens.");
        !is_table
            && ["layers.", "norm.", "lm_head.", "embed_tokens."]
                .iter()
                .any(|start| name.starts_with(start))
    };
    checkpoint
        .sizes()
        .filter(|(name, _)| is_read(name))
        .map(|(_, bytes)| bytes as u64)
        .sum()
}

/// [`Target::row_weights`] where tensors have the usual names.
fn row_weights(checkpoint: &Checkpoint, chosen_experts: f64) -> u64 {
    let of_layers = checkpoint
        .weight_names()
        .filter(|name| name.starts_with("layers."));
    let weights = of_layers.map(|name| {
        let shape = checkpoint.shape(name).unwrap_or_default();
        let all = shape.iter().map(|&n| n as f64).product::<f64>();
        let is_expert = [".experts.", ".switch_mlp."]
            .iter()
            .any(|part| name.contains(part));
        if is_expert { chosen_experts * all } else { all }
    });
    weights.sum::<f64>() as u64
}

/// Loads a target of one family.
pub type LoadTarget = fn(&dyn Backend, &Checkpoint) -> Result<Box<dyn Target>, ModelError>;

/// One family.
pub struct Family {
    /// Values of `architectures[0]` or `model_type` that name it.
    pub names: &'static [&'static str],
    /// Loads it.
    pub load: LoadTarget,
}

/// Every family of targets.
pub const TARGETS: &[Family] = &[gemma4::FAMILY, qwen3_5::FAMILY];

/// A kind of draft head with checkpoints of its own.
pub struct HeadKind {
    /// How users name it.
    pub name: &'static str,
    /// Values of `architectures[0]` or `model_type` that name it.
    pub architectures: &'static [&'static str],
}

/// Every kind of draft head that is a checkpoint of its own.
pub const DRAFT_HEADS: &[HeadKind] = &[
    HeadKind {
        name: "assistant",
        architectures: gemma4_assistant::NAMES,
    },
    HeadKind {
        name: "eagle3",
        architectures: eagle3::NAMES,
    },
    BlockKind::Dflash.head(),
    BlockKind::Dspark.head(),
];

/// Why a model could not be made from a checkpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file or a tensor is wrong.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Nobody here knows the architecture.
    #[error(
        "architecture `{found}` is not supported; supported are {}",
        supported()
    )]
    UnknownArchitecture {
        /// What the configuration says.
        found: String,
    },
    /// The configuration cannot be read as the family's.
    #[error("config.json: {message}")]
    Config {
        /// What is wrong.
        message: String,
    },
    /// The family has it, this engine does not yet.
    #[error("{feature} is not supported")]
    Unsupported {
        /// What is missing.
        feature: String,
    },
    /// The draft head was made for another target.
    #[error(
        "the draft head does not fit the target: its {what} is {drafter}, the target's is {target}"
    )]
    Unpaired {
        /// What differs.
        what: &'static str,
        /// The head's value.
        drafter: String,
        /// The target's value.
        target: String,
    },
    /// The draft head lacks tensors that its configuration implies.
    #[error(
        "the {head} is incomplete: {} of its {expected} tensors are missing: {}",
        missing.len(), census::list(missing)
    )]
    IncompleteHead {
        /// Which head.
        head: &'static str,
        /// Tensors that it should have.
        expected: usize,
        /// Tensors that it lacks.
        missing: Vec<String>,
    },
    /// A tensor belongs to a weight of the head, which was read without it.
    #[error(
        "the draft head has `{name}`, which cannot be applied here; without it the weight that it \
         belongs to would be another"
    )]
    UnreadPart {
        /// The tensor.
        name: String,
    },
    /// The draft head has a tensor of a part that is not implemented.
    #[error(
        "the draft head has `{name}`, which is not supported; without it the head would guess \
         something else"
    )]
    UnknownHeadTensor {
        /// The tensor.
        name: String,
    },
    /// Nothing here reads pictures.
    #[error("{0}")]
    NoTower(String),
    /// The configuration promises a head that the files lack, or the reverse.
    #[error("{0}")]
    MissingHead(String),
}

fn supported() -> String {
    TARGETS
        .iter()
        .flat_map(|f| f.names)
        .copied()
        .collect::<Vec<_>>()
        .join(", ")
}

/// Loads the target of `checkpoint`, whatever its family.
///
/// # Errors
///
/// [`ModelError`]: an unknown architecture, a bad configuration, a missing or
/// misshapen tensor.
pub fn load_target(
    b: &dyn Backend,
    checkpoint: &Checkpoint,
) -> Result<Box<dyn Target>, ModelError> {
    let found = checkpoint.architecture()?;
    let family = TARGETS.iter().find(|f| f.names.contains(&found));
    let family = family.ok_or_else(|| ModelError::UnknownArchitecture {
        found: found.to_owned(),
    })?;
    (family.load)(b, checkpoint)
}

/// Reads `value` as a family's configuration.
fn parse<T: serde::de::DeserializeOwned>(value: &serde_json::Value) -> Result<T, ModelError> {
    serde_json::from_value(value.clone()).map_err(|e| ModelError::Config {
        message: e.to_string(),
    })
}

/// The largest size that a configuration may name: more than any model has, and
/// products of sizes stay far from overflowing.
const MAX_SIZE: usize = 1 << 24;
/// Layers, which take memory before the first tensor is looked for.
const MAX_LAYERS: usize = 1 << 10;

/// An error unless there are 1 to [`MAX_LAYERS`] layers and each of `sizes`, by
/// field, is 1 to [`MAX_SIZE`].
fn require_sizes(layers: usize, sizes: &[(&str, usize)]) -> Result<(), ModelError> {
    let within = |name: &str, n: usize, most: usize| {
        require((1..=most).contains(&n), || {
            format!("{name} is {n}, which does not lie between 1 and {most}")
        })
    };
    within("num_hidden_layers", layers, MAX_LAYERS)?;
    sizes
        .iter()
        .try_for_each(|&(name, n)| within(name, n, MAX_SIZE))
}

/// An error unless `ok`.
fn require(ok: bool, message: impl FnOnce() -> String) -> Result<(), ModelError> {
    if ok {
        Ok(())
    } else {
        Err(ModelError::Config { message: message() })
    }
}
