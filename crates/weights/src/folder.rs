//! Which files of a folder make a checkpoint (`checkpoints.md` §1 and §2.5).
//!
//! The index decides where it exists, else `model.safetensors` is all; files of
//! [`mtp::FILES`] are taken whether the index lists them or not.

use crate::LoadError;
use crate::container::MAX_FILES;
use crate::error::printable;
use crate::index::{INDEX, Index, MAX_INDEX_BYTES};
use crate::mapped::Bytes;
use crate::mtp::{self, MANIFEST};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::Read;
use std::path::Path;

/// A real `config.json` takes some 10 KB.
pub(crate) const MAX_CONFIG_BYTES: u64 = 4 << 20;
/// Values in a configuration, which take some 50 bytes each; one for every module of
/// the largest mixture comes to 100 000.
pub(crate) const MAX_CONFIG_VALUES: u64 = 250_000;

/// The file that holds all tensors where there is no index.
const SINGLE: &str = "model.safetensors";

/// What lies in a folder.
pub(crate) struct Folder {
    pub(crate) config: Vec<u8>,
    pub(crate) index: Option<Index>,
    pub(crate) manifest: Option<Value>,
    /// Name relative to the folder, and contents; sorted by name.
    pub(crate) files: Vec<(String, Bytes)>,
}

/// Reads the JSON of the folder at `path` and maps its weights.
pub(crate) fn open(path: &Path) -> Result<Folder, LoadError> {
    let config = read(
        &path.join("config.json"),
        MAX_CONFIG_BYTES,
        "config length in bytes",
    )?
    .ok_or_else(|| LoadError::MissingConfig {
        folder: path.into(),
    })?;
    let index = read(&path.join(INDEX), MAX_INDEX_BYTES, "index length in bytes")?
        .map(|bytes| Index::parse(bytes.into()))
        .transpose()?;
    let manifest = json(&path.join(MANIFEST))?;
    let mut wanted: BTreeSet<&str> = mtp::FILES
        .iter()
        .copied()
        .filter(|f| path.join(f).exists())
        .collect();
    match &index {
        Some(index) => {
            let exists: Vec<bool> = (index.files().iter())
                .map(|shard| path.join(shard).exists())
                .collect();
            if let Some((name, file)) = index.entries().find(|(_, file)| !exists[*file]) {
                return Err(LoadError::MissingShard {
                    name: name.into(),
                    shard: index.files()[file].clone(),
                });
            }
            wanted.extend(index.files().iter().map(String::as_str));
        }
        None if path.join(SINGLE).exists() => {
            wanted.insert(SINGLE);
        }
        None => {
            return Err(LoadError::MissingWeights {
                folder: path.into(),
            });
        }
    }
    if wanted.len() > MAX_FILES {
        return Err(LoadError::TooLarge {
            what: "number of files",
            found: wanted.len() as u64,
            limit: MAX_FILES as u64,
            file: INDEX.into(),
        });
    }
    let files = wanted
        .into_iter()
        .map(|name| Ok((name.into(), Bytes::map(&path.join(name))?)))
        .collect::<Result<_, LoadError>>()?;
    Ok(Folder {
        config,
        index,
        manifest,
        files,
    })
}

/// An error if the JSON in `bytes` has more than `limit` values: a few bytes of text
/// become many in memory. Counted by what separates and opens them, before anything
/// is parsed; what stands in strings counts too.
pub(crate) fn few_values(bytes: &[u8], limit: u64, file: &str) -> Result<(), LoadError> {
    let marks = bytes
        .iter()
        .filter(|b| matches!(b, b',' | b':' | b'[' | b'{'));
    let found = marks.count() as u64;
    if found <= limit {
        return Ok(());
    }
    Err(LoadError::TooLarge {
        what: "number of JSON values",
        found,
        limit,
        file: file.into(),
    })
}

/// The JSON file at `path`, of the size of a configuration at most, or `None` where there is none.
pub(crate) fn json(path: &Path) -> Result<Option<Value>, LoadError> {
    let Some(bytes) = read(path, MAX_CONFIG_BYTES, "length in bytes")? else {
        return Ok(None);
    };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    few_values(&bytes, MAX_CONFIG_VALUES, &name)?;
    let parsed = serde_json::from_slice(&bytes).map_err(|e| LoadError::BadJson {
        reason: printable(&e.to_string()),
        file: name.into_owned(),
    });
    parsed.map(Some)
}

/// The whole file at `path`, or `None` where there is none.
fn read(path: &Path, limit: u64, what: &'static str) -> Result<Option<Vec<u8>>, LoadError> {
    use std::io::ErrorKind::{NotADirectory, NotFound};
    let io = |source| LoadError::Io {
        path: path.into(),
        source,
    };
    match std::fs::metadata(path) {
        Err(e) if matches!(e.kind(), NotFound | NotADirectory) => return Ok(None),
        Err(e) => return Err(io(e)),
        // Asked before opening: opening a named pipe would wait for a writer.
        Ok(meta) if !meta.is_file() => return Err(io(std::io::Error::other("not a regular file"))),
        Ok(meta) if meta.len() > limit => {
            return Err(LoadError::TooLarge {
                what,
                found: meta.len(),
                limit,
                file: path.display().to_string(),
            });
        }
        Ok(_) => {}
    }
    let mut bytes = Vec::new();
    std::fs::File::open(path)
        .map_err(io)?
        .take(limit)
        .read_to_end(&mut bytes)
        .map_err(io)?;
    Ok(Some(bytes))
}
