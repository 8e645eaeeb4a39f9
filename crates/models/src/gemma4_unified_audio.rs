//! What stands in the place of a sound tower in Gemma 4 12B (`specs/gemma4.md` §13).
//!
//! ```text
//! e = rms(s) E                              the target's embedding, s the samples of 40 ms
//! ```
//!
//! Rows do not hear each other. Silence fills what the last one lacks.

use crate::layers::Loader;
use crate::media::{
    SOUND_RATE, SOUND_SECONDS_MAX, SoundError, SoundKind, SoundOutline, SoundTokens, SoundTower,
    project_sound, sound_projection, sound_tokens,
};
use crate::{ModelError, parse, require_sizes};
use backend::{Backend, Matrix, Tensor};
use serde::Deserialize;
use weights::Checkpoint;

pub(crate) const TOWER: SoundKind = SoundKind {
    name: "gemma4_unified_audio",
    load: |b, checkpoint, _| Ok(Box::new(Gemma4UnifiedAudio::load(b, checkpoint)?)),
    outline: |checkpoint| Ok(Config::read(checkpoint)?.outline()),
};

/// `audio_config`.
#[derive(Clone, Debug, Deserialize)]
struct Config {
    #[serde(default = "default_samples")]
    audio_embed_dim: usize,
    #[serde(default = "default_eps")]
    rms_norm_eps: f32,
}

fn default_samples() -> usize {
    640
}

fn default_eps() -> f32 {
    1e-6
}

impl Config {
    fn read(checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let config: Config = parse(&checkpoint.config()["audio_config"])?;
        let size = ("audio_config.audio_embed_dim", config.audio_embed_dim);
        require_sizes(1, &[size])?;
        Ok(config)
    }

    fn outline(&self) -> SoundOutline {
        SoundOutline {
            name: TOWER.name,
            layers: 0,
            hidden_size: self.audio_embed_dim,
            samples_a_row: self.audio_embed_dim,
            row_numbers: 3 * self.audio_embed_dim,
        }
    }
}

/// The sound front end of Gemma 4 12B.
pub(crate) struct Gemma4UnifiedAudio {
    config: Config,
    tokens: Option<SoundTokens>,
    projection: Matrix,
}

impl Gemma4UnifiedAudio {
    pub(crate) fn load(b: &dyn Backend, checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let config = Config::read(checkpoint)?;
        let projection = sound_projection(&Loader::new(b, checkpoint), config.audio_embed_dim)?;
        Ok(Gemma4UnifiedAudio {
            tokens: sound_tokens(checkpoint.config()),
            projection,
            config,
        })
    }
}

impl SoundTower for Gemma4UnifiedAudio {
    fn outline(&self) -> SoundOutline {
        self.config.outline()
    }

    fn embedding_size(&self) -> usize {
        self.projection.rows
    }

    fn tokens(&self) -> Option<SoundTokens> {
        self.tokens
    }

    fn rows(&self, samples: usize) -> Result<usize, SoundError> {
        match samples {
            0 => Err(SoundError::TooShort { samples, least: 1 }),
            _ if samples > (SOUND_RATE * SOUND_SECONDS_MAX) as usize => {
                Err(SoundError::TooLong { samples })
            }
            _ => Ok(samples.div_ceil(self.config.audio_embed_dim)),
        }
    }

    fn embed(&self, b: &dyn Backend, samples: &[f32]) -> Tensor {
        let width = self.config.audio_embed_dim;
        let rows = self.rows(samples.len()).expect("a sound for the tower");
        let mut values = samples.to_vec();
        values.resize(rows * width, 0.0);
        b.upload(rows, width, &values)
    }

    fn layer(&self, _: &dyn Backend, _: usize, _: &Tensor) -> Tensor {
        unreachable!("a front end without layers")
    }

    fn reach(&self) -> usize {
        0
    }

    fn project(&self, b: &dyn Backend, x: &Tensor) -> Tensor {
        project_sound(b, x, &self.projection, self.config.rms_norm_eps)
    }
}
