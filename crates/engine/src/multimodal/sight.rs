//! Whether a model that is being loaded takes pictures and clips, and with which tower.

use super::vision::span_rows;
use super::{OwnFile, Vision};
use crate::options::{DEFAULT_CONTEXT, LoadOptions};
use crate::source::Source;
use backend::Backend;
use models::{Tower, TowerPlan};
use std::path::Path;
use std::sync::Arc;
use text::Text;
use weights::Checkpoint;

/// Bytes of a configuration of how pictures or frames are resized, at most; it has a few hundred.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// The tower of a model that is being loaded.
pub(crate) struct Sight {
    /// What the configuration says of the tower, or why no pictures are taken.
    plan: Result<TowerPlan, String>,
    tower: Option<Box<dyn Tower>>,
    /// The tower's own file.
    file: OwnFile,
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
        Sight {
            plan,
            tower: None,
            file,
        }
    }

    /// Rows that a picture or a part of a clip becomes, at most; 0 if nothing is looked at.
    pub(crate) fn most_rows(&self) -> usize {
        self.plan.as_ref().map_or(0, span_rows)
    }

    /// Bytes that the tower takes beside its weights while it looks.
    pub(crate) fn step_bytes(&self) -> u64 {
        let bytes = |plan: &TowerPlan| plan.outline.step_bytes(span_rows(plan));
        self.plan.as_ref().map_or(0, bytes)
    }

    /// Brings the weights of the tower to device `b`, in the place of those that are there. A tower
    /// that cannot be had does not keep a model from writing.
    pub(crate) fn load_tower(&mut self, b: &dyn Backend, checkpoint: &Checkpoint) {
        self.tower = None;
        if self.plan.is_err() {
            return;
        }
        match models::load_tower(b, checkpoint) {
            Ok(tower) => self.tower = Some(tower),
            Err(error) => {
                tracing::warn!(%error, "the model takes no pictures");
                self.plan = Err(error.to_string());
            }
        }
    }

    /// What the model looks at pictures with on device `b`.
    ///
    /// # Errors
    ///
    /// Why it takes none.
    pub(crate) fn vision(self, b: &Arc<dyn Backend>, text: &Text) -> Result<Arc<Vision>, String> {
        let plan = self.plan?;
        let tower = self.tower.expect("a tower that is planned was loaded");
        Vision::new(tower, b.clone(), plan, &text.tokenizer, self.file).map(Arc::new)
    }
}

/// How the checkpoint in `folder` has pictures or frames resized: a file called `name`, or `part` of the
/// one file that newer checkpoints have for all that is read.
fn config(folder: &Path, name: &str, part: &str) -> Option<serde_json::Value> {
    let read = |name: &str| -> Option<serde_json::Value> {
        let path = folder.join(name);
        let meta = std::fs::metadata(&path).ok()?;
        let is_small = meta.is_file() && meta.len() <= CONFIG_BYTES_MAX;
        let text = is_small.then(|| std::fs::read(&path).ok()).flatten()?;
        serde_json::from_slice(&text).ok()
    };
    let joint =
        || Some(read("processor_config.json")?[part].take()).filter(|part| part.is_object());
    read(name).or_else(joint)
}
