//! Whether a model that is being loaded takes pictures, clips and sounds, and with which towers.

use super::vision::span_rows;
use super::{Hearing, OwnFile, TowerFile, Vision};
use crate::options::{DEFAULT_CONTEXT, LoadOptions};
use crate::source::Source;
use backend::Backend;
use models::{SoundOutline, SoundTower, Tower, TowerPlan};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use text::Text;
use weights::Checkpoint;

/// Bytes of a configuration of how pictures or frames are resized, at most; it has a few hundred.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// The towers of a model that is being loaded.
pub(crate) struct Sight {
    /// What the configuration says of the tower, or why no pictures are taken.
    plan: Result<TowerPlan, String>,
    tower: Option<Box<dyn Tower>>,
    /// The tower's own file.
    file: OwnFile,
    /// What the configuration says of the sound tower, or why no sounds are taken.
    heard: Result<SoundPlan, String>,
    ear: Option<Box<dyn SoundTower>>,
    /// Whether somebody named the file of the towers.
    is_asked_for: bool,
}

/// What is known of a sound tower before it is loaded.
struct SoundPlan {
    outline: SoundOutline,
    /// The configuration of the public feature extractor, or null.
    extractor: Value,
    /// Rows that a sound becomes, at most.
    rows_max: usize,
    /// The hash of the tower's own file, as [`OwnFile`] has it.
    file_sha256: String,
}

impl Sight {
    /// What the configuration of `checkpoint`, whose files are at `source`, says of its tower. A
    /// picture or a clip becomes no more rows than half of the context has.
    pub(crate) fn plan(
        source: &Source,
        checkpoint: &Checkpoint,
        file: OwnFile,
        options: &LoadOptions,
    ) -> Self {
        let plan = match options.pictures {
            false => Err("pictures are turned off".to_owned()),
            true => models::tower_plan(checkpoint).map_err(|error| error.to_string()),
        };
        let folder = match source {
            Source::Folder(path) if path.is_dir() => Some(path.as_path()),
            Source::Folder(_) | Source::Files(_) => None,
        };
        let context = options.context.unwrap_or(DEFAULT_CONTEXT);
        let plan = plan.map(|plan| {
            let of_folder = |name, part| folder.and_then(|folder| config(folder, name, part));
            let (mut picture, mut video, mut frames) = (plan.picture, plan.video, plan.frames);
            if let Some(config) = of_folder("preprocessor_config.json", "image_processor") {
                picture = picture.read(&config);
            }
            if let Some(config) = of_folder("video_preprocessor_config.json", "video_processor") {
                video = video.read(&config);
                frames = frames.read(&config);
            }
            let video = video.at_most(context / 2);
            TowerPlan {
                picture: picture.at_most(context / 2),
                video,
                frames: frames.at_most(context / 2 * video.frames_a_run()),
                ..plan
            }
        });
        let heard = match options.pictures {
            false => Err("pictures and sounds are turned off".to_owned()),
            true => models::sound_outline(checkpoint).map_err(|error| error.to_string()),
        };
        let heard = heard.map(|outline| SoundPlan {
            extractor: folder.and_then(extractor).unwrap_or_default(),
            rows_max: outline.rows_max().min(context / 2),
            file_sha256: file.sha256.clone(),
            outline,
        });
        Sight {
            plan,
            tower: None,
            file,
            heard,
            ear: None,
            is_asked_for: matches!(options.tower, TowerFile::At(_)),
        }
    }

    /// Rows that a picture or a part of a clip becomes, at most; 0 if nothing is looked at.
    pub(crate) fn most_rows(&self) -> usize {
        self.plan.as_ref().map_or(0, span_rows)
    }

    /// Bytes that a tower takes beside its weights while it works: one at a time does.
    pub(crate) fn step_bytes(&self) -> u64 {
        let bytes = |plan: &TowerPlan| plan.outline.step_bytes(span_rows(plan));
        let seen = self.plan.as_ref().map_or(0, bytes);
        let bytes = |plan: &SoundPlan| plan.outline.step_bytes(plan.rows_max);
        seen.max(self.heard.as_ref().map_or(0, bytes))
    }

    /// Brings the weights of the towers to device `b`, in the place of those that are there. A tower
    /// that cannot be had does not keep a model from writing, unless its file was asked for: then the caller
    /// makes an error of it, if no other tower is there.
    pub(crate) fn load_towers(&mut self, b: &dyn Backend, checkpoint: &Checkpoint) {
        (self.tower, self.ear) = (None, None);
        let mut missing = Vec::new();
        if let Ok(plan) = &self.heard {
            match models::load_sound_tower(b, checkpoint, &plan.extractor) {
                Ok(tower) => self.ear = Some(tower),
                Err(error) => {
                    missing.push(("sounds", error.to_string()));
                    self.heard = Err(error.to_string());
                }
            }
        }
        if self.plan.is_ok() {
            match models::load_tower(b, checkpoint) {
                Ok(tower) => self.tower = Some(tower),
                Err(error) => {
                    missing.push(("pictures", error.to_string()));
                    self.plan = Err(error.to_string());
                }
            }
        }
        if self.is_asked_for && self.tower.is_none() && self.ear.is_none() {
            return;
        }
        for (what, error) in missing {
            tracing::warn!(%error, "the model takes no {what}");
        }
    }

    /// What the model looks at pictures with on device `b`.
    ///
    /// # Errors
    ///
    /// Why it takes none.
    pub(crate) fn vision(
        &mut self,
        b: &Arc<dyn Backend>,
        text: &Text,
    ) -> Result<Arc<Vision>, String> {
        let plan = self.plan.clone()?;
        let tower = self.tower.take();
        let file = std::mem::take(&mut self.file);
        let tower = tower.expect("a tower that is planned was loaded");
        Vision::new(tower, b.clone(), plan, &text.tokenizer, file).map(Arc::new)
    }

    /// What the model hears with on device `b`.
    ///
    /// # Errors
    ///
    /// Why it takes no sounds.
    pub(crate) fn hearing(self, b: &Arc<dyn Backend>, text: &Text) -> Result<Arc<Hearing>, String> {
        let plan = self.heard?;
        let tower = self.ear.expect("a tower that is planned was loaded");
        let (rows_max, file) = (plan.rows_max, plan.file_sha256);
        Hearing::new(tower, b.clone(), rows_max, &text.tokenizer, file).map(Arc::new)
    }
}

/// The configuration of the public extractor of features of sound: where both are in one file, its part.
fn extractor(folder: &Path) -> Option<Value> {
    joint(folder, "feature_extractor").or_else(|| read(folder, "preprocessor_config.json"))
}

/// How the checkpoint in `folder` has pictures or frames resized: a file called `name`, or `part` of the
/// one file that newer checkpoints have for all that is read.
fn config(folder: &Path, name: &str, part: &str) -> Option<Value> {
    read(folder, name).or_else(|| joint(folder, part))
}

/// `part` of the one file that newer checkpoints in `folder` have for all that is read.
fn joint(folder: &Path, part: &str) -> Option<Value> {
    let part = read(folder, "processor_config.json")?[part].take();
    Some(part).filter(Value::is_object)
}

/// The configuration `name` in `folder`.
fn read(folder: &Path, name: &str) -> Option<Value> {
    let path = folder.join(name);
    let meta = std::fs::metadata(&path).ok()?;
    let is_small = meta.is_file() && meta.len() <= CONFIG_BYTES_MAX;
    let text = is_small.then(|| std::fs::read(&path).ok()).flatten()?;
    serde_json::from_slice(&text).ok()
}
