//! What a model hears with: files become what its sound tower reads.

use super::item::{Input, MediaItem, MediaKind, MediaPart};
use super::place::KindTokens;
use super::vision::OpenError;
use backend::Backend;
use media::{Sound, SoundLimits};
use models::{SOUND_RATE, SOUND_SECONDS_MAX, SoundTokens, SoundTower};
use sha2::{Digest, Sha256};
use std::sync::Arc;
use text::Tokenizer;

/// What a model hears with: its sound tower, and what stands for sounds in its prompts.
pub struct Hearing {
    tower: Box<dyn SoundTower>,
    b: Arc<dyn Backend>,
    tokens: SoundTokens,
    /// Rows that a sound becomes, at most.
    rows_max: usize,
    /// The hash of the tower's own file, where anything outlives the program.
    file_sha256: String,
}

/// What is known of how a model hears.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct HearingInfo {
    /// The architecture of the tower, as in `audio_config.model_type`.
    pub name: &'static str,
    /// Layers of the tower; 0 of a front end without an encoder.
    pub layers: usize,
    /// Rows of a prompt that a sound becomes, at most.
    pub rows_max: usize,
    /// Seconds of a sound, at most.
    pub seconds_max: u32,
    /// Bytes that the tower takes beside its weights while it hears such a sound, about.
    pub step_bytes: u64,
}

impl std::fmt::Debug for Hearing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Hearing({})", self.tower.outline().name)
    }
}

impl Hearing {
    /// What a model hears with whose `tower` is on device `b`, from a file with this hash if it has its
    /// own; a sound becomes `rows_max` rows at most.
    ///
    /// # Errors
    ///
    /// Says which tokens `tokenizer` lacks.
    pub(crate) fn new(
        tower: Box<dyn SoundTower>,
        b: Arc<dyn Backend>,
        rows_max: usize,
        tokenizer: &Tokenizer,
        file_sha256: String,
    ) -> Result<Self, String> {
        let tokens = tower.tokens().or_else(|| {
            let ids = tower.token_texts().map(|said| tokenizer.id_of(said));
            Some(SoundTokens {
                begin: ids[0]?,
                end: ids[1]?,
                row: ids[2]?,
            })
        });
        let Some(tokens) = tokens else {
            let all = tower.token_texts().join("`, `");
            return Err(format!("the tokenizer lacks one of the tokens `{all}`"));
        };
        Ok(Hearing {
            rows_max: rows_max.min(tower.outline().rows_max()),
            tower,
            b,
            tokens,
            file_sha256,
        })
    }

    /// The tower, and the device that it is on.
    pub(super) fn tower(&self) -> (&dyn SoundTower, &dyn Backend) {
        (&*self.tower, &*self.b)
    }

    /// The tokens that stand for sounds.
    pub(super) fn tokens(&self) -> KindTokens {
        KindTokens {
            kind: MediaKind::Sound,
            begin: self.tokens.begin,
            end: self.tokens.end,
            row: self.tokens.row,
        }
    }

    /// What is known of the model's tower for sound.
    pub fn info(&self) -> HearingInfo {
        let outline = self.tower.outline();
        HearingInfo {
            name: outline.name,
            layers: outline.layers,
            rows_max: self.rows_max,
            seconds_max: SOUND_SECONDS_MAX,
            step_bytes: outline.step_bytes(self.rows_max),
        }
    }

    /// Decodes a WAV, FLAC, MP3 or Ogg Vorbis for the model. Takes milliseconds to seconds: not for a
    /// thread that must not wait.
    ///
    /// # Errors
    ///
    /// [`OpenError`]: the file is broken, exceeds `limits`, or is too short or too long for the model.
    pub fn open(&self, file: Vec<u8>, limits: &SoundLimits) -> Result<MediaItem, OpenError> {
        self.sound(&media::decode_sound(file, SOUND_RATE, limits)?)
    }

    /// What `sound` becomes, as [`Hearing::open`] has it.
    ///
    /// # Errors
    ///
    /// [`OpenError::Sound`], [`OpenError::Rows`]
    pub fn sound(&self, sound: &Sound) -> Result<MediaItem, OpenError> {
        let sound = sound.clone().resampled(SOUND_RATE);
        let rows = self.tower.rows(sound.samples().len())?;
        if rows > self.rows_max {
            let most = self.rows_max;
            return Err(OpenError::Rows { rows, most });
        }
        let part = MediaPart {
            label: String::new(),
            grid: [1, rows],
            hash: self.hash(sound.samples()),
            input: Input::Samples(sound.samples().into()),
        };
        Ok(MediaItem {
            kind: MediaKind::Sound,
            parts: vec![part],
        })
    }

    /// The first 16 bytes of the SHA-256 of `samples` and of what their encoding depends on.
    fn hash(&self, samples: &[f32]) -> [u8; 16] {
        let mut hash = Sha256::new();
        let outline = self.tower.outline();
        let file = &self.file_sha256;
        hash.update(format!("{outline:?} {file} {}\n", self.b.name()));
        for sample in samples {
            hash.update(sample.to_le_bytes());
        }
        let all: [u8; 32] = hash.finalize().into();
        all[..16].try_into().expect("16 of 32 bytes")
    }
}
