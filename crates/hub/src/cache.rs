//! The cache on disk, in the layout of `huggingface_hub`:
//!
//! ```text
//! models--ORG--NAME/blobs/ETAG            contents; ETAG.incomplete until they are whole
//! models--ORG--NAME/refs/main             the commit of a branch
//! models--ORG--NAME/snapshots/COMMIT/…    links to blobs, under the files' names
//! .locks/models--ORG--NAME/ETAG.lock      held while a blob is fetched
//! ```

use crate::error::line;
use crate::{HubError, RepoId, parts};
use serde::Serialize;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Most folders inside each other in a snapshot; the hub allows more, models have one or two.
const MAX_DEPTH: usize = 8;
/// Largest index of shards that is read, in bytes.
const MAX_INDEX: u64 = 64 << 20;
/// Most files that an index of shards may name.
const MAX_SHARDS: usize = 1024;

/// The cache of a hub on disk.
#[derive(Clone, Debug)]
pub struct Cache {
    /// The folder of the cache.
    root: PathBuf,
}

/// A model in the cache.
#[derive(Clone, Debug, Serialize)]
pub struct Cached {
    /// The repository, `ORG/NAME`.
    pub id: String,
    /// Bytes on disk of all commits together.
    pub bytes: u64,
    /// The folder of the commit that `main` stands for, or of the only commit.
    pub snapshot: Option<PathBuf>,
    /// The reason why the snapshot is not complete; `None` if it is.
    pub incomplete: Option<Incomplete>,
}

/// The reason why a download is not complete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Incomplete {
    /// No file has been downloaded completely.
    Nothing,
    /// So many files were only partly downloaded.
    Begun(usize),
    /// The snapshot or its index names this file, and it is not there.
    Missing(String),
}

impl std::fmt::Display for Incomplete {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Incomplete::Nothing => f.write_str("no file was downloaded completely"),
            Incomplete::Begun(1) => f.write_str("1 file was only partly downloaded"),
            Incomplete::Begun(n) => write!(f, "{n} files were only partly downloaded"),
            Incomplete::Missing(file) => write!(f, "`{}` is missing", line(file)),
        }
    }
}

impl Cache {
    /// The cache in `root`, which need not exist yet.
    pub fn new(root: impl Into<PathBuf>) -> Cache {
        Cache { root: root.into() }
    }

    /// The folder of the cache.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder of `repo` in the cache, which need not exist.
    pub fn folder(&self, repo: &RepoId) -> PathBuf {
        self.root.join(repo.folder())
    }

    /// The folder of the commit of `repo` that `revision` (a branch, a tag or a commit) stands
    /// for; `None` if it is not in the cache. `main` is also the only commit without a branch.
    pub fn snapshot(&self, repo: &RepoId, revision: &str) -> Option<PathBuf> {
        let folder = self.folder(repo);
        let snapshots = folder.join("snapshots");
        let commit = is_inside(revision)
            .then(|| fs::read_to_string(folder.join("refs").join(revision)).ok())
            .flatten();
        let commit = commit.as_deref().map_or(revision, str::trim);
        if is_commit(commit) {
            let snapshot = snapshots.join(commit);
            return snapshot.is_dir().then_some(snapshot);
        }
        let mut all = fs::read_dir(snapshots).ok()?.filter_map(Result::ok);
        match (revision, all.next(), all.next()) {
            ("main", Some(only), None) => Some(only.path()),
            _ => None,
        }
    }

    /// The reason why the `snapshot` of `repo` is not complete; `None` if it is.
    pub fn incomplete(&self, repo: &RepoId, snapshot: Option<&Path>) -> Option<Incomplete> {
        let begun = fs::read_dir(self.folder(repo).join("blobs")).map_or(0, |blobs| {
            let is_part =
                |e: &fs::DirEntry| e.file_name().to_string_lossy().ends_with(".incomplete");
            blobs.filter_map(Result::ok).filter(is_part).count()
        });
        let Some(snapshot) = snapshot else {
            return Some(Incomplete::Nothing);
        };
        let mut files = BTreeSet::new();
        if let Some(dangling) = walk(snapshot, snapshot, 0, &mut files) {
            return Some(Incomplete::Missing(dangling));
        }
        if files.is_empty() {
            return Some(Incomplete::Nothing);
        }
        let missing = shards(&snapshot.join("model.safetensors.index.json"))
            .into_iter()
            .find(|shard| !files.contains(shard));
        match (missing, begun) {
            (Some(shard), _) => Some(Incomplete::Missing(shard)),
            // Parts of files that this snapshot does not need are no loss.
            (None, n) if n > 0 && !has_weights(&files) => Some(Incomplete::Begun(n)),
            (None, _) => None,
        }
    }

    /// Lists every model in the cache, sorted by name.
    ///
    /// # Errors
    ///
    /// [`HubError::Io`] if the folder cannot be read. A folder that does not exist has no models.
    pub fn list(&self) -> Result<Vec<Cached>, HubError> {
        let entries = match fs::read_dir(&self.root) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(|source| io(&self.root, source))?,
        };
        let mut models: Vec<Cached> = entries
            .filter_map(Result::ok)
            .filter_map(|entry| {
                let repo = RepoId::of_folder(&entry.file_name().to_string_lossy())?;
                let snapshot = self.snapshot(&repo, "main");
                Some(Cached {
                    bytes: size(&self.folder(&repo).join("blobs")),
                    incomplete: self.incomplete(&repo, snapshot.as_deref()),
                    id: repo.as_str().to_owned(),
                    snapshot,
                })
            })
            .collect();
        models.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(models)
    }

    /// Removes `repo` with all its commits. Returns the bytes that were freed; `None` if it is
    /// not in the cache.
    ///
    /// # Errors
    ///
    /// [`HubError::Io`] if it cannot be removed.
    pub fn remove(&self, repo: &RepoId) -> Result<Option<u64>, HubError> {
        let folder = self.folder(repo);
        if !folder.is_dir() {
            return Ok(None);
        }
        let bytes = size(&folder.join("blobs"));
        fs::remove_dir_all(&folder).map_err(|source| io(&folder, source))?;
        // Locks are empty files; one that stays harms nobody.
        let _ = fs::remove_dir_all(self.root.join(".locks").join(repo.folder()));
        Ok(Some(bytes))
    }

    /// Links `file` in the snapshot of `commit` to the blob `etag`; returns the path of the link.
    pub(crate) fn link(
        &self,
        repo: &RepoId,
        commit: &str,
        file: &str,
        etag: &str,
    ) -> Result<PathBuf, HubError> {
        let path = self.folder(repo).join("snapshots").join(commit).join(file);
        let up = "../".repeat(2 + Path::new(file).components().count() - 1);
        let target = format!("{up}blobs/{etag}");
        let is_there = || fs::read_link(&path).is_ok_and(|found| found == Path::new(&target));
        if is_there() {
            return Ok(path);
        }
        make_parent(&path)?;
        let blob = self.folder(repo).join("blobs").join(etag);
        let made = symlink(&target, &blob, &path).or_else(|e| {
            if e.kind() != std::io::ErrorKind::AlreadyExists || is_there() {
                return Err(e);
            }
            // An old link, or a file of a tool that does not link.
            fs::remove_file(&path)?;
            symlink(&target, &blob, &path)
        });
        match made {
            // Another pull was faster.
            Err(_) if is_there() => Ok(path),
            made => made.map(|()| path.clone()).map_err(|e| io(&path, e)),
        }
    }

    /// Writes down that `revision` stands for `commit`.
    pub(crate) fn note(&self, repo: &RepoId, revision: &str, commit: &str) -> Result<(), HubError> {
        if revision == commit {
            return Ok(());
        }
        let path = self.folder(repo).join("refs").join(revision);
        if fs::read_to_string(&path).is_ok_and(|found| found.trim() == commit) {
            return Ok(());
        }
        make_parent(&path)?;
        // Whoever reads it meanwhile finds the old commit or the new one.
        static CALLS: AtomicU64 = AtomicU64::new(0);
        let call = CALLS.fetch_add(1, Ordering::Relaxed);
        let new = path.with_file_name(format!(".new-{}-{call}", std::process::id()));
        fs::write(&new, commit)
            .and_then(|()| fs::rename(&new, &path))
            .map_err(|source| {
                let _ = fs::remove_file(&new);
                io(&path, source)
            })
    }
}

/// Makes `path` a link to `target`.
#[cfg(unix)]
fn symlink(target: &str, _blob: &Path, path: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, path)
}

/// Copies `blob` to `path`: links need a privilege on other systems.
#[cfg(not(unix))]
fn symlink(_target: &str, blob: &Path, path: &Path) -> std::io::Result<()> {
    fs::copy(blob, path).map(|_| ())
}

/// The error for a file or folder of the cache.
pub(crate) fn io(path: &Path, source: std::io::Error) -> HubError {
    HubError::Io {
        path: path.into(),
        source,
    }
}

/// Creates the folder that `path` lies in.
pub(crate) fn make_parent(path: &Path) -> Result<(), HubError> {
    let parent = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(|source| io(parent, source))
}

/// Whether `name` is a path inside the folder that it is joined to.
pub(crate) fn is_inside(name: &str) -> bool {
    !name.is_empty()
        && !name
            .chars()
            .any(|c| c.is_control() || c == '\\' || c == ':')
        && Path::new(name)
            .components()
            .all(|c| matches!(c, Component::Normal(_)))
}

/// Whether `text` is the hash of a commit.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Adds the files under `folder`, relative to `root`, to `files`. Returns the first link that
/// leads nowhere, if there is one.
fn walk(root: &Path, folder: &Path, depth: usize, files: &mut BTreeSet<String>) -> Option<String> {
    for entry in fs::read_dir(folder).ok()?.filter_map(Result::ok) {
        let path = entry.path();
        let name = path.strip_prefix(root).ok()?.to_string_lossy().into_owned();
        match fs::metadata(&path) {
            Err(_) => return Some(name),
            Ok(meta) if meta.is_dir() && depth < MAX_DEPTH => {
                if let Some(dangling) = walk(root, &path, depth + 1, files) {
                    return Some(dangling);
                }
            }
            Ok(_) => {
                files.insert(name);
            }
        }
    }
    None
}

/// The files of a snapshot, relative to its folder, sorted.
pub fn files_of(snapshot: &Path) -> BTreeSet<String> {
    let mut files = BTreeSet::new();
    walk(snapshot, snapshot, 0, &mut files);
    files
}

/// Whether one of the files holds weights.
fn has_weights(files: &BTreeSet<String>) -> bool {
    let is_weights = |f: &String| f.ends_with(".safetensors") || f.ends_with(".gguf");
    files.iter().any(is_weights)
}

/// The files that an index of shards names; empty if the index does not exist.
fn shards(index: &Path) -> BTreeSet<String> {
    let read = || -> Option<BTreeSet<String>> {
        if index.metadata().ok()?.len() > MAX_INDEX {
            return None;
        }
        let mut files = BTreeSet::new();
        let take = |_, file| {
            files.insert(file);
            match files.len() {
                0..=MAX_SHARDS => Ok(()),
                _ => Err(format!("more than {MAX_SHARDS} files")),
            }
        };
        parts::weight_map(&fs::read(index).ok()?, |_| true, take).ok()?;
        Some(files)
    };
    read().unwrap_or_default()
}

/// Bytes of the files in `folder`, without those in folders below it.
fn size(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else {
        return 0;
    };
    let metas = entries
        .filter_map(Result::ok)
        .filter_map(|e| e.metadata().ok());
    metas.map(|meta| meta.len()).sum()
}
