//! Towers: pictures and video become rows of a language model.
//!
//! A [`Tower`] takes frames of pixels that somebody has decoded and resized
//! ([`Tower::size_rule`] says to what), cuts them into patches and returns embeddings, which
//! stand in the place of token embeddings in a target's step
//! ([`Target::inputs`](crate::Target::inputs)). A frame's rows depend on that frame alone and
//! have the same bits whatever else is computed with them. [`encode`] runs a tower from pixels to
//! embeddings; a [`TowerRun`] does so in slices, between which a device may do other things.
//!
//! Absent: decoding, resizing, prompts, and any cache of what was computed.

mod attention;
mod mel;
mod parallel;
mod patches;
mod run;
mod size;
mod sound;
mod sound_run;
mod video;

pub use attention::FrameAttention;
pub(crate) use attention::FrameMemory;
pub(crate) use mel::MelRule;
pub(crate) use parallel::in_parallel;
pub(crate) use patches::{Cut, PatchOrder, Patches, channel_first, channel_last, in_order};
pub(crate) use run::gathered;
pub use run::{Phase, TowerRun};
pub use size::SizeRule;
pub use sound::{
    SOUND_RATE, SOUND_SECONDS_MAX, SOUND_TOWER_PREFIXES, SoundError, SoundOutline, SoundTokens,
    SoundTower, encode_sound, load_sound_tower, sound_features, sound_outline,
};
pub(crate) use sound::{SoundKind, matrix_of, project_sound, sound_projection, sound_tokens};
pub use sound_run::SoundRun;
pub use video::VideoRule;

use crate::{ModelError, gemma4_unified, gemma4_vision, qwen3_5_vision, require};
use backend::{Backend, Batch, DeviceError, Tensor};
use std::ops::Range;
use weights::Checkpoint;

/// Pixels on their way into a tower: a picture is one frame, a video several of one size.
#[derive(Clone, Copy, Debug)]
pub struct Frames<'a> {
    /// Rows of pixels.
    pub height: usize,
    /// Columns of pixels.
    pub width: usize,
    /// Red, green and blue of each pixel, `[frames, height, width, 3]`.
    pub rgb: &'a [u8],
}

impl<'a> Frames<'a> {
    /// Bytes of a frame.
    fn frame_bytes(&self) -> usize {
        self.height.saturating_mul(self.width).saturating_mul(3)
    }

    /// Number of frames; 0 if there is no pixel, or the last frame lacks some.
    pub fn count(&self) -> usize {
        match self.frame_bytes() {
            0 => 0,
            bytes if self.rgb.len().is_multiple_of(bytes) => self.rgb.len() / bytes,
            _ => 0,
        }
    }
}

/// How many rows frames become: `runs` spans of a prompt, each a grid of `height` by `width` rows,
/// row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediaGrid {
    /// Spans: one of a picture; of a video one for each frame, or each pair of frames.
    pub runs: usize,
    /// Rows of a span from top to bottom.
    pub height: usize,
    /// Rows of a span from left to right.
    pub width: usize,
}

impl MediaGrid {
    /// Rows of one span.
    pub fn run_rows(&self) -> usize {
        self.height * self.width
    }

    /// Rows of all spans.
    pub fn rows(&self) -> usize {
        self.runs * self.run_rows()
    }
}

/// The tokens of a prompt that stand for what a tower has seen: `begin`, then a placeholder for each
/// row of a span, then `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediaTokens {
    /// Before a span.
    pub begin: u32,
    /// After a span.
    pub end: u32,
    /// A row of a picture.
    pub picture: u32,
    /// A row of a video.
    pub video: u32,
}

/// Sizes of a tower, for people and for the plan of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TowerOutline {
    /// The architecture, as in `vision_config.model_type`.
    pub name: &'static str,
    /// Layers; 0 of a front end without an encoder.
    pub layers: usize,
    /// Columns of a patch's row inside.
    pub hidden_size: usize,
    /// Columns of a layer's feed-forward block; 0 without layers.
    pub inner_size: usize,
    /// Pixels of a patch's side.
    pub patch: usize,
    /// Patches of a side that become one row.
    pub merge: usize,
    /// Frames that become one span.
    pub frames_a_run: usize,
}

impl TowerOutline {
    /// Bytes that the tower takes beside its weights while it looks at a picture of `rows` rows, about:
    /// the patches' pixels, on the host and the device, or what is alive within a layer with its keys
    /// and values. A video is looked at in pieces of about 8192 patches.
    pub fn step_bytes(&self, rows: usize) -> u64 {
        let patches = rows.saturating_mul(self.merge * self.merge);
        let numbers = self.patch * self.patch * 3 * self.frames_a_run;
        let pixels = 2 * numbers + 2 * self.hidden_size;
        // The residual stream, its norm, and queries, keys and values before and after they are
        // rotated, and what is remembered of these; or the sides of a gate. A device may keep the
        // memory of the pixels meanwhile.
        let layer = numbers + 14 * self.hidden_size + 2 * self.inner_size;
        4 * (patches as u64).saturating_mul(pixels.max(layer) as u64)
    }
}

/// What the configuration of a tower says of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TowerPlan {
    /// The tower's sizes.
    pub outline: TowerOutline,
    /// To which size pictures are resized.
    pub picture: SizeRule,
    /// Which frames of a video are looked at.
    pub video: VideoRule,
    /// To which size these frames are resized, all of them together where the rule is one of pixels.
    pub frames: SizeRule,
}

/// Why frames cannot become rows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MediaError {
    /// No frame, or one that is cut off.
    #[error("there are no whole frames of pixels")]
    NoFrames,
    /// Sides that were not made what the size rule says.
    #[error("sides must be multiples of {side} pixels: resize first, found {height}x{width}")]
    Sides {
        /// What both must be a multiple of.
        side: usize,
        /// Rows of pixels.
        height: usize,
        /// Columns of pixels.
        width: usize,
    },
    /// More patches from side to side than the tower has positions for.
    #[error("the model knows {most} positions a side, a picture has {patches}: make it smaller")]
    TooWide {
        /// Positions of a side.
        most: usize,
        /// Patches of the longer side.
        patches: usize,
    },
    /// A size that cannot be kept in shape.
    #[error(
        "a picture cannot be {height}x{width} pixels: one side is too much longer than the other"
    )]
    Aspect {
        /// Rows of pixels.
        height: usize,
        /// Columns of pixels.
        width: usize,
    },
}

/// What makes embeddings of frames.
pub trait Tower: Send + Sync {
    /// The tower's sizes.
    fn outline(&self) -> TowerOutline;

    /// Width of an embedding: that of the target's hidden rows.
    fn embedding_size(&self) -> usize;

    /// What stands for rows in a prompt; nothing if the tower's file does not say, as one beside the
    /// model's: then a tokenizer knows the tokens by [`Tower::token_texts`].
    fn tokens(&self) -> Option<MediaTokens>;

    /// The texts of the tokens that stand for rows, in the order of [`MediaTokens`]: before a span,
    /// after it, a row of a picture, a row of a video.
    fn token_texts(&self) -> [&'static str; 4];

    /// To which size a picture is to be resized, by the checkpoint's own limits; `rows` is how many
    /// rows it may become, if somebody asks for another number.
    fn size_rule(&self, rows: Option<usize>) -> SizeRule;

    /// How many rows `frames` become.
    ///
    /// # Errors
    ///
    /// [`MediaError`], if there are no frames or they have no size that the tower takes.
    fn grid(&self, frames: &Frames<'_>) -> Result<MediaGrid, MediaError>;

    /// Row and column of each patch of a run of `grid`, in the order of the tower's rows.
    fn places(&self, grid: MediaGrid) -> Vec<[usize; 2]>;

    /// Patches `rows` of `frames` as rows of the tower, those of one run after those of the one before:
    /// `[n, hidden size]`. `places` are [`Tower::places`].
    fn embed(
        &self,
        b: &dyn Backend,
        frames: &Frames<'_>,
        places: &[[usize; 2]],
        rows: Range<usize>,
    ) -> Tensor;

    /// The layers between [`Tower::embed`] and [`Tower::merge`], if there are any.
    fn layers(&self) -> Option<&dyn TowerLayers>;

    /// Embeddings `rows`, of whole runs of `grid` whose patches are the rows of `x`: `[n, H]`.
    fn merge(&self, b: &dyn Backend, x: &Tensor, grid: MediaGrid, rows: Range<usize>) -> Tensor;
}

/// Layers of a tower, whose rows see each other in attention and nowhere else: what comes before it and
/// after it may be asked of any rows, with the same bits.
pub trait TowerLayers: Send + Sync {
    /// How rows attend.
    fn attention(&self) -> FrameAttention;

    /// Queries, keys and values of `layer`, of rows `x`: `[n, hidden size]`, whose places are in `batch`.
    fn heads(&self, b: &dyn Backend, layer: usize, x: &Tensor, batch: &Batch) -> [Tensor; 3];

    /// What `layer` makes of rows `x`, whose attention is `a`: `[n, hidden size]`.
    fn mix(&self, b: &dyn Backend, layer: usize, x: Tensor, a: Tensor) -> Tensor;
}

/// Embeddings of `frames`, span after span, row-major, `grid.rows() * embedding_size` numbers, and how
/// many spans they are. Waits for the device.
///
/// # Errors
///
/// [`EncodeError`]: what is wrong with the frames, or with the device.
pub fn encode(
    tower: &dyn Tower,
    b: &dyn Backend,
    frames: &Frames<'_>,
) -> Result<(MediaGrid, Vec<f32>), EncodeError> {
    let mut run = TowerRun::new(tower, frames)?;
    while let Some(phase) = run.next_phase() {
        run.advance(tower, b, frames, phase.rows);
    }
    b.finish()?;
    Ok(run.into_rows())
}

/// Why frames were not encoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// The frames are wrong.
    #[error(transparent)]
    Media(#[from] MediaError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Loads a tower of one architecture.
pub(crate) type LoadTower = fn(&dyn Backend, &Checkpoint) -> Result<Box<dyn Tower>, ModelError>;

/// An architecture of towers.
pub(crate) struct TowerKind {
    /// Values of `vision_config.model_type`.
    pub(crate) names: &'static [&'static str],
    pub(crate) load: LoadTower,
    /// Reads the tower's sizes and rules from the configuration alone.
    pub(crate) plan: fn(&Checkpoint) -> Result<TowerPlan, ModelError>,
}

/// Every architecture of towers.
const TOWERS: &[TowerKind] = &[
    gemma4_vision::TOWER,
    gemma4_unified::TOWER,
    qwen3_5_vision::TOWER,
];

/// How the names of a tower's tensors begin, by canonical name.
pub const TOWER_PREFIXES: &[&str] = &[
    "vision_tower.",
    "vision_embedder.",
    "embed_vision.",
    "visual.",
];

/// Whether `checkpoint` holds tensors of a tower. A text-only conversion keeps the configuration of
/// the tower that it has dropped.
pub fn has_tower(checkpoint: &Checkpoint) -> bool {
    let is_of_tower = |name: &str| TOWER_PREFIXES.iter().any(|p| name.starts_with(p));
    checkpoint.names().any(is_of_tower)
}

/// Loads the tower of `checkpoint`, the target's own or a file of a tower alone.
///
/// # Errors
///
/// [`ModelError`]: there is none, its architecture is not known, its configuration is bad, or a
/// tensor is missing or misshapen.
pub fn load_tower(b: &dyn Backend, checkpoint: &Checkpoint) -> Result<Box<dyn Tower>, ModelError> {
    (find(checkpoint)?.load)(b, checkpoint)
}

/// The sizes and rules of the tower of `checkpoint`, from the configuration alone: no tensor is read.
///
/// # Errors
///
/// As [`load_tower`].
pub fn tower_plan(checkpoint: &Checkpoint) -> Result<TowerPlan, ModelError> {
    (find(checkpoint)?.plan)(checkpoint)
}

/// The kind of the tower of `checkpoint`.
fn find(checkpoint: &Checkpoint) -> Result<&'static TowerKind, ModelError> {
    let config = checkpoint.config().get("vision_config");
    let Some(config) = config.filter(|c| c.is_object()) else {
        let reason = match checkpoint.metadata() {
            None => "the model reads text alone: its configuration has no `vision_config`",
            Some(_) => {
                "a GGUF model reads text alone without the file of its vision tower (`mmproj`), and \
                 there is none beside it"
            }
        };
        return Err(ModelError::NoTower(reason.into()));
    };
    if !has_tower(checkpoint) {
        return Err(ModelError::NoTower(
            "the checkpoint has no tensors of the vision tower that its configuration describes: a \
             conversion for text alone has dropped them, so add the tower's own file (`mmproj`)"
                .into(),
        ));
    }
    // Early files of Qwen 3.5 call their tower by the name of the model.
    let of_model = checkpoint.config().get("model_type");
    let found = config.get("model_type").or(of_model);
    let found = found.and_then(|v| v.as_str()).unwrap_or_default();
    let kind = TOWERS.iter().find(|kind| kind.names.contains(&found));
    kind.ok_or_else(|| ModelError::Unsupported {
        feature: format!("a vision tower of the kind `{found}`"),
    })
}

/// The most pixels of a patch's side, and patches of a side that become a row: products of them and
/// of other sizes stay far from overflowing.
const MAX_SIDE: usize = 1 << 10;

/// An error unless patches of `size` pixels a side, `merge` of a side a row, can be.
pub(crate) fn require_sides(size: usize, merge: usize) -> Result<(), ModelError> {
    let most = size.max(merge);
    require(most <= MAX_SIDE && size.min(merge) > 0, || {
        format!("patches of {size} pixels, {merge} of a side a row, are out of range")
    })
}

/// The tokens of a prompt that configuration `config` names; `begin` and `end` are the keys of those
/// around a span.
pub(crate) fn tokens(config: &serde_json::Value, begin: &str, end: &str) -> Option<MediaTokens> {
    let id = |key: &str| u32::try_from(config.get(key)?.as_u64()?).ok();
    Some(MediaTokens {
        begin: id(begin)?,
        end: id(end)?,
        picture: id("image_token_id")?,
        video: id("video_token_id")?,
    })
}
