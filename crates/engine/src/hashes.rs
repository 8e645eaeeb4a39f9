//! Content hashes of files, remembered.
//!
//! Reading a model to hash it takes as long as reading it from disk. So the hash
//! of a file is kept under its path, size and time of change, in one small JSON
//! file; where any of them differs the file is read again. What lies there is only
//! a shortcut: a file that cannot be read or written means hashing again.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::UNIX_EPOCH;

/// Name of the file in the cache folder.
const FILE: &str = "hashes.json";
/// Hashes that are kept; each takes some 200 bytes.
const MAX_ENTRIES: usize = 4096;
/// Bytes that the file may have: [`MAX_ENTRIES`] with long paths.
const MAX_BYTES: u64 = 4 << 20;

/// What is known of a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Known {
    len: u64,
    /// Nanoseconds since 1970.
    changed: u64,
    sha256: String,
}

/// Hashes by path.
pub(crate) struct Hashes {
    file: Option<PathBuf>,
    known: BTreeMap<PathBuf, Known>,
    is_changed: bool,
}

impl Hashes {
    /// What `folder` remembers; nothing if there is none.
    pub(crate) fn open(folder: Option<&Path>) -> Hashes {
        let file = folder.map(|folder| folder.join(FILE));
        let known = file.as_deref().and_then(|file| read_json(file, MAX_BYTES));
        Hashes {
            file,
            known: known.unwrap_or_default(),
            is_changed: false,
        }
    }

    /// The SHA-256 of the file at `path`, which has these `bytes`.
    pub(crate) fn of(&mut self, path: &Path, bytes: &[u8]) -> String {
        let Some((path, len, changed)) = identity(path) else {
            return sha256(bytes);
        };
        if let Some(known) = self.known.get(&path)
            && (known.len, known.changed) == (len, changed)
        {
            return known.sha256.clone();
        }
        let sha256 = sha256(bytes);
        if self.known.len() >= MAX_ENTRIES {
            self.known.clear();
        }
        let known = Known {
            len,
            changed,
            sha256: sha256.clone(),
        };
        self.known.insert(path, known);
        self.is_changed = true;
        sha256
    }

    /// Keeps what has been added.
    pub(crate) fn save(&self) {
        if let Some(file) = &self.file
            && self.is_changed
        {
            write_json(file, &self.known);
        }
    }
}

/// Where a file really lies, its size, and when it was changed.
fn identity(path: &Path) -> Option<(PathBuf, u64, u64)> {
    let path = path.canonicalize().ok()?;
    let meta = path.metadata().ok()?;
    let changed = meta.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some((path, meta.len(), changed.as_nanos() as u64))
}

/// SHA-256 in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The JSON in `file`, if it is there, is no longer than `limit` and says what it
/// should.
pub fn read_json<T: serde::de::DeserializeOwned>(file: &Path, limit: u64) -> Option<T> {
    let meta = std::fs::metadata(file).ok()?;
    if !meta.is_file() || meta.len() > limit {
        return None;
    }
    serde_json::from_slice(&std::fs::read(file).ok()?).ok()
}

/// Writes `value` beside `file` and puts it in its place, so that neither another process nor another
/// thread reads half of it. A failure is told to the log: nothing is lost but time.
pub fn write_json(file: &Path, value: &impl Serialize) {
    static WRITTEN: AtomicU64 = AtomicU64::new(0);
    let write = || -> std::io::Result<()> {
        let folder = file.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder)?;
        let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
        let part = file.with_extension(format!("{}-{number}.part", std::process::id()));
        let value = serde_json::to_vec(value)?;
        let written = std::fs::write(&part, value).and_then(|()| std::fs::rename(&part, file));
        written.inspect_err(|_| drop(std::fs::remove_file(&part)))
    };
    if let Err(error) = write() {
        tracing::debug!(%error, file = %file.display(), "cannot remember");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_write_the_same_file_leave_it_whole() {
        let folder = std::env::temp_dir().join(format!("paceline-json-{}", std::process::id()));
        let file = folder.join("numbers.json");
        write_json(&file, &vec![0; 100_000]);
        std::thread::scope(|scope| {
            let writers = [1, 2, 3, 4].map(|number| {
                let (file, numbers) = (&file, vec![number; 100_000]);
                scope.spawn(move || (0..100).for_each(|_| write_json(file, &numbers)))
            });
            while writers.iter().any(|writer| !writer.is_finished()) {
                let numbers: Vec<u8> = read_json(&file, 1 << 20).expect("a whole file");
                assert_eq!(numbers, vec![numbers[0]; 100_000]);
            }
        });
        let files = std::fs::read_dir(&folder).unwrap().count();
        assert_eq!(files, 1, "no other file is left");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_hash_is_remembered_until_the_file_changes() {
        let folder = std::env::temp_dir().join(format!("paceline-hashes-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("weights");
        std::fs::write(&file, b"one").unwrap();
        let mut hashes = Hashes::open(Some(&folder));
        let one = hashes.of(&file, b"one");
        assert_eq!(one, sha256(b"one"));
        hashes.save();
        // Remembered: the bytes are not looked at.
        let mut again = Hashes::open(Some(&folder));
        assert_eq!(again.of(&file, b"never read"), one);
        std::fs::write(&file, b"three").unwrap();
        assert_eq!(again.of(&file, b"three"), sha256(b"three"));
        // A damaged file is no memory, and no failure.
        std::fs::write(folder.join(FILE), b"{").unwrap();
        assert_eq!(
            Hashes::open(Some(&folder)).of(&file, b"three"),
            sha256(b"three")
        );
        std::fs::remove_dir_all(folder).unwrap();
    }
}
