//! Whether a model that is being loaded takes pictures, and with which tower.

use super::Vision;
use crate::options::{DEFAULT_CONTEXT, LoadOptions};
use crate::source::Source;
use backend::Backend;
use models::{SizeRule, Tower, TowerOutline};
use std::path::Path;
use std::sync::Arc;
use text::Text;
use weights::Checkpoint;

/// Bytes of a configuration of how pictures are resized, at most; it has a few hundred.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// The tower of a model that is being loaded.
pub(crate) struct Sight {
    /// What the configuration says of the tower, or why no pictures are taken.
    plan: Result<(TowerOutline, SizeRule), String>,
    tower: Option<Box<dyn Tower>>,
}

impl Sight {
    /// What the configuration of `checkpoint`, whose files are at `source`, says of its tower. A
    /// picture becomes no more rows than half of the context has.
    pub(crate) fn plan(source: &Source, checkpoint: &Checkpoint, options: &LoadOptions) -> Self {
        let plan = match options.pictures {
            false => Err("pictures are turned off".to_owned()),
            true => models::tower_outline(checkpoint).map_err(|error| error.to_string()),
        };
        let folder = match source {
            Source::Folder(path) if path.is_dir() => Some(path.as_path()),
            Source::Folder(_) | Source::Files(_) => None,
        };
        let context = options.context.unwrap_or(DEFAULT_CONTEXT);
        let plan = plan.map(|(outline, rule)| {
            let config = folder.and_then(config);
            let rule = config.map_or(rule, |config| rule.read(&config));
            (outline, rule.at_most(context / 2))
        });
        Sight { plan, tower: None }
    }

    /// Rows that a picture becomes, at most; 0 if no pictures are taken.
    pub(crate) fn most_rows(&self) -> usize {
        self.plan.as_ref().map_or(0, |(_, rule)| rule.most_rows())
    }

    /// Bytes that the tower takes beside its weights while it looks at a picture.
    pub(crate) fn step_bytes(&self) -> u64 {
        let bytes =
            |(outline, rule): &(TowerOutline, SizeRule)| outline.step_bytes(rule.most_rows());
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
        let (_, rule) = self.plan?;
        let tower = self.tower.expect("a tower that is planned was loaded");
        Vision::new(tower, b.clone(), rule, &text.tokenizer).map(Arc::new)
    }
}

/// How the checkpoint in `folder` has pictures resized.
fn config(folder: &Path) -> Option<serde_json::Value> {
    let read = |name: &str| -> Option<serde_json::Value> {
        let path = folder.join(name);
        let meta = std::fs::metadata(&path).ok()?;
        let is_small = meta.is_file() && meta.len() <= CONFIG_BYTES_MAX;
        let text = is_small.then(|| std::fs::read(&path).ok()).flatten()?;
        serde_json::from_slice(&text).ok()
    };
    // Newer checkpoints have one file for all that is read.
    let joint = || Some(read("processor_config.json")?["image_processor"].take());
    read("preprocessor_config.json").or_else(joint)
}
