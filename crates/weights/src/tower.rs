//! A vision tower in a file of its own, beside the model that it is for.

use crate::Checkpoint;
use crate::error::LoadError;
use serde_json::Value;

/// The architecture of files that hold a tower and nothing else.
const TOWER: &str = "clip";
/// The parts of a configuration that describe towers.
const PARTS: [&str; 2] = ["vision_config", "audio_config"];

impl Checkpoint {
    /// Whether this is a file of a vision tower alone, an `mmproj` of GGUF.
    pub fn is_tower(&self) -> bool {
        self.architecture().is_ok_and(|name| name == TOWER)
    }

    /// The name of the tower's own file, if one was [attached](Checkpoint::attach_tower).
    pub fn tower_file(&self) -> Option<&str> {
        let first = self.files.len() - self.tower_files;
        self.files.get(first).map(|file| file.name.as_str())
    }

    /// Adds `tower`, a file of towers alone, to the model that it was made for: its tensors, and its
    /// parts of the configuration in the place of those that are there. The
    /// [content hash](Checkpoint::content_hash) stays that of the model's own files.
    ///
    /// # Errors
    ///
    /// If `tower` is something else, is for hidden rows of another width, or the model has a tensor
    /// of one of its names.
    pub fn attach_tower(&mut self, tower: Checkpoint) -> Result<(), LoadError> {
        let file = tower.files().next().unwrap_or_default().to_owned();
        let bad = |reason: String| LoadError::BadHeader {
            reason,
            file: file.clone(),
        };
        if !tower.is_tower() {
            let reason = "this is no file of a vision tower (`mmproj`)";
            return Err(bad(reason.to_owned()));
        }
        let width = |of: &Checkpoint| of.text_config().get("hidden_size").and_then(Value::as_u64);
        let (theirs, own) = (width(&tower), width(self));
        if theirs != own {
            let number =
                |n: Option<u64>| n.map_or("an unknown number".to_owned(), |n| n.to_string());
            return Err(bad(format!(
                "the tower was made for a model with hidden rows of {} columns, and this one has {}",
                number(theirs),
                number(own)
            )));
        }
        // Nothing is changed unless all of it fits.
        if let Some(name) = tower
            .tensors
            .keys()
            .find(|name| self.tensors.contains_key(*name))
        {
            return Err(LoadError::NameClash {
                name: name.clone(),
                first: "in the model's own files, which have a tower".to_owned(),
                second: format!("in `{file}`"),
            });
        }
        let first = self.files.len();
        self.tower_files += tower.files.len();
        self.files.extend(tower.files);
        for (name, mut tensor) in tower.tensors {
            tensor.file += first;
            self.insert(name, tensor)?;
        }
        if let (Value::Object(own), Value::Object(mut theirs)) = (&mut self.config, tower.config) {
            for part in PARTS {
                if let Some(tower) = theirs.remove(part) {
                    own.insert(part.to_owned(), tower);
                }
            }
        }
        Ok(())
    }
}
