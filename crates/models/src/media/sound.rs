//! Sound towers: samples become rows of a language model.

use super::SoundRun;
use super::mel::MelRule;
use super::patches::picked;
use crate::{ModelError, gemma4_audio, gemma4_unified_audio, require_sizes};
use backend::{Backend, DeviceError, Matrix, Tensor};
use serde_json::Value;
use weights::Checkpoint;

/// Samples a second of what a tower hears.
pub const SOUND_RATE: u32 = 16_000;

/// Seconds that a tower hears at once, at most: what the models were made for.
pub const SOUND_SECONDS_MAX: u32 = 30;

/// The tokens of a prompt that stand for what a tower has heard: `begin`, then `row` for each row, then
/// `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoundTokens {
    /// Before the rows.
    pub begin: u32,
    /// After the rows.
    pub end: u32,
    /// A row.
    pub row: u32,
}

/// Sizes of a sound tower, for people and for the plan of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoundOutline {
    /// The architecture, as in `audio_config.model_type`.
    pub name: &'static str,
    /// Layers; 0 of a front end without an encoder.
    pub layers: usize,
    /// Columns of a row inside.
    pub hidden_size: usize,
    /// Samples that become one row, about.
    pub samples_a_row: usize,
    /// Numbers that are alive at once for each row, about.
    pub(crate) row_numbers: usize,
}

impl SoundOutline {
    /// Rows that a sound becomes, at most.
    pub fn rows_max(&self) -> usize {
        (SOUND_RATE * SOUND_SECONDS_MAX) as usize / self.samples_a_row
    }

    /// Bytes that the tower takes beside its weights while it hears a sound of `rows` rows, about.
    pub fn step_bytes(&self, rows: usize) -> u64 {
        4 * (rows as u64).saturating_mul(self.row_numbers as u64)
    }
}

/// Why a sound cannot become rows.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SoundError {
    /// Nothing is heard of so little.
    #[error("lasts {} ms: the model hears nothing of less than {} ms", ms(*.samples), ms(*.least))]
    TooShort {
        /// Samples that there are.
        samples: usize,
        /// Samples that it takes.
        least: usize,
    },
    /// More than the model was made for.
    #[error("lasts {:.1} s, and the model hears {} s at most: cut it into parts", *.samples as f64 / f64::from(SOUND_RATE), SOUND_SECONDS_MAX)]
    TooLong {
        /// Samples that there are.
        samples: usize,
    },
}

/// Milliseconds of `samples` samples, rounded up.
fn ms(samples: usize) -> usize {
    (samples * 1000).div_ceil(SOUND_RATE as usize)
}

/// What makes embeddings of sound.
pub trait SoundTower: Send + Sync {
    /// The tower's sizes.
    fn outline(&self) -> SoundOutline;

    /// Width of an embedding: that of the target's hidden rows.
    fn embedding_size(&self) -> usize;

    /// What stands for rows in a prompt; nothing if the tower's file does not say, as one beside the
    /// model's: then a tokenizer knows the tokens by [`SoundTower::token_texts`].
    fn tokens(&self) -> Option<SoundTokens>;

    /// The texts of the tokens that stand for rows, in the order of [`SoundTokens`].
    fn token_texts(&self) -> [&'static str; 3] {
        ["<|audio>", "<audio|>", "<|audio|>"]
    }

    /// How many rows `samples` samples of [`SOUND_RATE`] become.
    ///
    /// # Errors
    ///
    /// [`SoundError`], if they are too few or too many.
    fn rows(&self, samples: usize) -> Result<usize, SoundError>;

    /// `samples`, of one channel at [`SOUND_RATE`], as rows of the tower: `[rows, hidden size]`.
    ///
    /// # Panics
    ///
    /// If [`SoundTower::rows`] gives an error.
    fn embed(&self, b: &dyn Backend, samples: &[f32]) -> Tensor;

    /// What `layer` makes of rows `x`, of which the first is that of silence before: `[n, hidden size]`.
    fn layer(&self, b: &dyn Backend, layer: usize, x: &Tensor) -> Tensor;

    /// Rows before a row that a layer's result for it depends on.
    fn reach(&self) -> usize;

    /// Embeddings of rows `x` behind the last layer: `[n, H]`.
    fn project(&self, b: &dyn Backend, x: &Tensor) -> Tensor;
}

/// Embeddings of `samples`, row-major, `rows * embedding_size` numbers. Waits for the device.
///
/// # Errors
///
/// What is wrong with the device.
///
/// # Panics
///
/// If [`SoundTower::rows`] gives an error.
pub fn encode_sound(
    tower: &dyn SoundTower,
    b: &dyn Backend,
    samples: &[f32],
) -> Result<Vec<f32>, DeviceError> {
    let mut run = SoundRun::new(tower);
    while let Some(phase) = run.next_phase() {
        run.advance(tower, b, samples, phase.rows);
    }
    b.finish()?;
    Ok(run.into_rows())
}

/// What a tower with an encoder reads of `samples`: features of 128 bands of each frame, row-major.
/// `config` is that of the public feature extractor, or null.
pub fn sound_features(samples: &[f32], config: &Value) -> Vec<f32> {
    MelRule::default().read(config).features(samples)
}

/// Loads a sound tower of one architecture, with the configuration of its feature extractor where there
/// is one.
pub(crate) type LoadSoundTower =
    fn(&dyn Backend, &Checkpoint, &Value) -> Result<Box<dyn SoundTower>, ModelError>;

/// An architecture of sound towers.
pub(crate) struct SoundKind {
    /// The value of `audio_config.model_type`.
    pub(crate) name: &'static str,
    pub(crate) load: LoadSoundTower,
    /// Reads the tower's sizes from the configuration alone.
    pub(crate) outline: fn(&Checkpoint) -> Result<SoundOutline, ModelError>,
}

/// Every architecture of sound towers.
const SOUND_TOWERS: &[SoundKind] = &[gemma4_audio::TOWER, gemma4_unified_audio::TOWER];

/// How the names of a sound tower's tensors begin, by canonical name.
pub const SOUND_TOWER_PREFIXES: &[&str] = &["audio_tower.", "embed_audio."];

/// Loads the sound tower of `checkpoint`, the target's own or a file of towers alone. `config` is that of
/// the public feature extractor, or null.
///
/// # Errors
///
/// [`ModelError`]: there is none, its architecture is not known, its configuration is bad, or a
/// tensor is missing or misshapen.
pub fn load_sound_tower(
    b: &dyn Backend,
    checkpoint: &Checkpoint,
    config: &Value,
) -> Result<Box<dyn SoundTower>, ModelError> {
    (find(checkpoint)?.load)(b, checkpoint, config)
}

/// The sizes of the sound tower of `checkpoint`, from the configuration alone: no tensor is read.
///
/// # Errors
///
/// As [`load_sound_tower`].
pub fn sound_outline(checkpoint: &Checkpoint) -> Result<SoundOutline, ModelError> {
    (find(checkpoint)?.outline)(checkpoint)
}

/// The kind of the sound tower of `checkpoint`.
fn find(checkpoint: &Checkpoint) -> Result<&'static SoundKind, ModelError> {
    let config = checkpoint.config().get("audio_config");
    let Some(config) = config.filter(|c| c.is_object()) else {
        return Err(ModelError::NoTower(
            "the model does not hear: its configuration has no `audio_config`".into(),
        ));
    };
    let is_of_tower = |name: &str| SOUND_TOWER_PREFIXES.iter().any(|p| name.starts_with(p));
    if !checkpoint.names().any(is_of_tower) {
        return Err(ModelError::NoTower(
            "the checkpoint has no tensors of the sound tower that its configuration describes: a \
             conversion for text alone has dropped them, so add the tower's own file (`mmproj`)"
                .into(),
        ));
    }
    let found = config.get("model_type").and_then(Value::as_str);
    let found = found.unwrap_or_default();
    let kind = SOUND_TOWERS.iter().find(|kind| kind.name == found);
    kind.ok_or_else(|| ModelError::Unsupported {
        feature: format!("a sound tower of the kind `{found}`"),
    })
}

/// The tokens of a prompt that configuration `config` names.
pub(crate) fn sound_tokens(config: &Value) -> Option<SoundTokens> {
    let id = |key: &str| u32::try_from(config.get(key)?.as_u64()?).ok();
    Some(SoundTokens {
        begin: id("boa_token_id")?,
        // The first name is the public one, as odd as it is.
        end: id("eoa_token_index").or_else(|| id("eoa_token_id"))?,
        row: id("audio_token_id")?,
    })
}

/// The projection to the target's hidden size from rows of `cols` columns.
pub(crate) fn sound_projection(
    load: &crate::layers::Loader<'_>,
    cols: usize,
) -> Result<Matrix, ModelError> {
    let target = load.checkpoint.text_config().get("hidden_size");
    let target = target.and_then(Value::as_u64).unwrap_or(0) as usize;
    require_sizes(1, &[("hidden_size", target)])?;
    load.at("embed_audio")
        .matrix("embedding_projection", target, cols)
}

/// `rms(x) E`: `[rows, H]`.
pub(crate) fn project_sound(b: &dyn Backend, x: &Tensor, projection: &Matrix, eps: f32) -> Tensor {
    let e = b.matmul(&b.rms_norm(x, None, x.cols(), eps), projection);
    b.note(format_args!("audio.rows"), &e);
    e
}

/// A matrix of some columns of `stored`, with its column `pick(i)` as column `i`.
pub(crate) fn matrix_of(
    b: &dyn Backend,
    stored: &quant::Stored<'_>,
    cols: usize,
    pick: impl Fn(usize) -> usize,
) -> Matrix {
    b.matrix(&[picked(stored, cols, pick).view()])
}
