//! Vision towers in files of their own: GGUF models have theirs in an `mmproj` file.

use crate::error::EngineError;
use crate::hashes::Hashes;
use crate::source::Source;
use models::ModelError;
use std::path::{Path, PathBuf};
use weights::Checkpoint;

/// How the names of such files begin.
const BEGIN: &str = "mmproj";
/// How they end.
const SUFFIX: &str = ".gguf";
/// Number formats in their names, the one first that is taken where there are several: that of most
/// towers as they are published, then what loses little.
const FORMATS: &[&str] = &["bf16", "f16", "f32", "q8_0"];

/// Which file a tower comes from, where it is not in the model's own files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TowerFile {
    /// One beside the model that fits it, if there is one.
    #[default]
    Beside,
    /// This one.
    At(PathBuf),
}

/// What is known of a tower's own file, if it has one.
#[derive(Debug, Default)]
pub(crate) struct OwnFile {
    /// The name of the file.
    pub(crate) name: Option<String>,
    /// The hash of its content, where anything outlives the program.
    pub(crate) sha256: String,
}

impl OwnFile {
    /// The file at `path`, hashed if `hashes` are there.
    pub(crate) fn new(path: &Path, hashes: Option<&mut Hashes>) -> Result<Self, EngineError> {
        let name = path.file_name().unwrap_or_default();
        let sha256 = match hashes {
            None => String::new(),
            Some(hashes) => {
                let tower = Checkpoint::open(path).map_err(ModelError::from)?;
                tower.content_hash_with(|_, bytes| hashes.of(path, bytes))
            }
        };
        Ok(OwnFile {
            name: Some(name.to_string_lossy().into_owned()),
            sha256,
        })
    }
}

impl Source {
    /// Adds the tower's own file to `checkpoint`, which was opened from here, and returns where that
    /// is. A checkpoint that has its tower needs none. One beside the model that does not fit is left
    /// alone: its folder may hold several models.
    ///
    /// # Errors
    ///
    /// If the file that was asked for cannot be read or does not fit.
    pub fn attach_tower(
        &self,
        checkpoint: &mut Checkpoint,
        file: &TowerFile,
    ) -> Result<Option<PathBuf>, EngineError> {
        match file {
            TowerFile::At(path) => {
                let tower = Checkpoint::open(path).map_err(ModelError::from)?;
                checkpoint.attach_tower(tower).map_err(ModelError::from)?;
                Ok(Some(path.clone()))
            }
            TowerFile::Beside if models::has_tower(checkpoint) => Ok(None),
            TowerFile::Beside => Ok(self.beside().into_iter().find(|path| {
                let tower = Checkpoint::open(path);
                let attached = tower.and_then(|tower| checkpoint.attach_tower(tower));
                if let Err(error) = &attached {
                    let file = path.display();
                    tracing::warn!(%error, %file, "a vision tower beside the model is not used");
                }
                attached.is_ok()
            })),
        }
    }

    /// Files beside the model whose names are those of towers, the likeliest first.
    fn beside(&self) -> Vec<PathBuf> {
        let Source::Folder(path) = self else {
            return Vec::new();
        };
        let folder = match path.is_dir() {
            true => path.as_path(),
            false => path.parent().unwrap_or(Path::new("")),
        };
        let mut found = towers_in(folder);
        // A repository of the hub keeps each format of a large model in a folder of its own.
        let above = folder.parent().filter(|above| {
            let outer = above.parent();
            outer.is_some_and(|outer| outer.ends_with("snapshots"))
        });
        if found.is_empty() {
            found.extend(above.into_iter().flat_map(towers_in));
        }
        found
    }
}

/// The towers in `folder`, by name.
fn towers_in(folder: &Path) -> Vec<PathBuf> {
    let here = match folder.as_os_str().is_empty() {
        true => Path::new("."),
        false => folder,
    };
    let entries = std::fs::read_dir(here).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| is_tower(name)).collect();
    names.sort_by_key(|name| (rank(name), name.clone()));
    names.into_iter().map(|name| folder.join(name)).collect()
}

/// Whether a file of this name holds a tower.
fn is_tower(name: &str) -> bool {
    let name = name.to_lowercase();
    name.contains(BEGIN) && name.ends_with(SUFFIX)
}

/// How soon a tower of this name is taken.
fn rank(name: &str) -> usize {
    let name = name.to_lowercase();
    let words: Vec<&str> = name.split(['-', '.']).collect();
    let place = FORMATS.iter().position(|format| words.contains(format));
    place.unwrap_or(FORMATS.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_told_by_their_names() {
        for name in ["mmproj-F16.gguf", "gemma-mmproj-BF16.gguf", "mmproj.GGUF"] {
            assert!(is_tower(name), "{name}");
        }
        for name in ["model-Q4_K_M.gguf", "mmproj.safetensors", "mmproj"] {
            assert!(!is_tower(name), "{name}");
        }
        let mut names = [
            "mmproj-F32.gguf",
            "mmproj-F16.gguf",
            "mmproj.gguf",
            "mmproj-BF16.gguf",
        ];
        names.sort_by_key(|name| rank(name));
        assert_eq!(
            names,
            [
                "mmproj-BF16.gguf",
                "mmproj-F16.gguf",
                "mmproj-F32.gguf",
                "mmproj.gguf"
            ]
        );
    }
}
