//! Fetches the draft head of a checkpoint alone.
//!
//! Conversions drop the `mtp.*` tensors (multi-token prediction) of Qwen 3.5 and 3.6; the
//! original has them, a few hundred megabytes among tens of gigabytes. The header of a
//! safetensors file says where each tensor lies, so three kinds of requests suffice:
//!
//! ```text
//! model.safetensors.index.json       the files that hold `mtp.*`
//! bytes 0..8, 8..8+n of each         where the tensors lie in it
//! the ranges of these tensors        neighbors in one request
//! ```
//!
//! The tensors are written as a checkpoint of their own, `model_type: qwen3_5_mtp`. The hub
//! has hashes of whole files only, so the bytes are checked against the header alone;
//! whether the head works is found by the trial when it is loaded.

use crate::cache::io;
use crate::client::{Client, FileInfo, MAX_FILE, RepoInfo};
use crate::transfer::Progress;
use crate::{HubError, RepoId, parts};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Beginnings of the stored names of a draft head's tensors.
const PREFIXES: &[&str] = &[
    "mtp.",
    "model.mtp.",
    "language_model.mtp.",
    "model.language_model.mtp.",
];
/// Most bytes of the header of a safetensors file, as when checkpoints are loaded.
const MAX_HEADER: u64 = 16 << 20;
/// Most bytes of an index of shards.
const MAX_INDEX: u64 = 64 << 20;
/// Most bytes of the configuration that a head is kept with.
const MAX_CONFIG: u64 = 1 << 16;
/// Most tensors of a head; one whose experts are separate tensors has some 800.
const MAX_TENSORS: usize = 1 << 14;
/// Most bytes between two tensors that are fetched with one request.
const GAP: u64 = 64 << 10;

/// A tensor of a draft head, as the header of its file describes it.
struct Tensor {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    /// The bytes of the tensor in its file, from and to.
    range: (u64, u64),
}

/// The folder under `root` that holds the draft head of `repo` once it is fetched.
pub fn folder(root: &Path, repo: &RepoId) -> PathBuf {
    root.join(repo.folder())
}

/// Fetches the draft head of `repo` at the commit of `info` into its folder under `root`, which
/// can then be loaded as a checkpoint. Returns that folder.
///
/// # Errors
///
/// [`HubError::NoHead`] if the checkpoint has none; else as [`Client::fetch`].
pub fn fetch(
    client: &Client,
    repo: &RepoId,
    info: &RepoInfo,
    root: &Path,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<PathBuf, HubError> {
    let folder = folder(root, repo);
    let path = folder.join("model.safetensors");
    let lock = folder.join(".lock");
    let _lock = client.lock_at(&lock, &format!("the MTP head of `{repo}`"))?;
    if path.is_file() && commit_of(&folder).is_some_and(|commit| commit == info.commit) {
        return Ok(folder);
    }
    let mut files = Vec::new();
    let mut is_mlx = false;
    for file in holders(client, repo, info)? {
        let (tensors, mlx) = tensors(client, repo, &info.commit, &file)?;
        is_mlx |= mlx;
        if !tensors.is_empty() {
            files.push((file, tensors));
        }
    }
    if files.is_empty() {
        return Err(HubError::NoHead {
            what: format!("`{repo}`"),
        });
    }
    let config = json!({
        "model_type": "qwen3_5_mtp",
        "source": {"repository": repo.as_str(), "commit": info.commit},
    });
    let part = folder.join("model.safetensors.incomplete");
    write(client, repo, info, &files, is_mlx, &part, progress)?;
    if path.exists() {
        // Weights of an older commit never lie beside the configuration of this one.
        std::fs::remove_file(&path).map_err(|source| io(&path, source))?;
    }
    let target = folder.join("config.json");
    std::fs::write(&target, config.to_string()).map_err(|source| io(&target, source))?;
    std::fs::rename(&part, &path).map_err(|source| io(&path, source))?;
    Ok(folder)
}

/// The commit that the head in `folder` was fetched from.
fn commit_of(folder: &Path) -> Option<String> {
    let file = folder.join("config.json");
    file.metadata().ok().filter(|m| m.len() <= MAX_CONFIG)?;
    let config: Value = serde_json::from_slice(&std::fs::read(file).ok()?).ok()?;
    config["source"]["commit"].as_str().map(str::to_owned)
}

/// The safetensors files of a repository that may hold a draft head.
fn holders(client: &Client, repo: &RepoId, info: &RepoInfo) -> Result<Vec<String>, HubError> {
    let has = |name: &str| info.files.iter().any(|f| f.name == name);
    const INDEX: &str = "model.safetensors.index.json";
    let mut files: Vec<String> = Vec::new();
    if has(INDEX) {
        let what = format!("`{INDEX}` of `{repo}`");
        let url = client.file_url(repo, &info.commit, INDEX);
        let size = size(info, INDEX).filter(|&s| s <= MAX_INDEX);
        let bytes = client.http.bytes(
            &url,
            (0, size.ok_or_else(|| bad(&what, "too large"))?),
            &what,
        )?;
        parts::weight_map(&bytes, is_head, |_, file| {
            if has(&file) && !files.contains(&file) {
                files.push(file);
            }
            Ok(())
        })
        .map_err(|e| bad(&what, e))?;
    } else if has("model.safetensors") {
        files.push("model.safetensors".into());
    }
    // Heads beside the shards are in no index.
    let apart = ["mtp.safetensors", "model-mtp.safetensors"];
    files.extend(
        apart
            .into_iter()
            .filter(|f| has(f))
            .map(str::to_owned)
            .take(1),
    );
    files.dedup();
    Ok(files)
}

/// The tensors of the draft head in `file`, in the order of their data, and whether the file
/// says that MLX wrote it.
fn tensors(
    client: &Client,
    repo: &RepoId,
    commit: &str,
    file: &str,
) -> Result<(Vec<Tensor>, bool), HubError> {
    #[derive(serde::Deserialize)]
    struct Entry {
        dtype: String,
        shape: Vec<u64>,
        data_offsets: (u64, u64),
    }
    #[derive(serde::Deserialize)]
    struct Metadata {
        format: Option<String>,
    }
    let what = format!("the header of `{file}` of `{repo}`");
    let url = client.file_url(repo, commit, file);
    let prefix = client.http.bytes(&url, (0, 8), &what)?;
    let prefix: [u8; 8] = prefix.try_into().map_err(|_| bad(&what, "too short"))?;
    let len = u64::from_le_bytes(prefix);
    if len == 0 || len > MAX_HEADER {
        return Err(bad(&what, format!("a header of {len} bytes")));
    }
    let header = client.http.bytes(&url, (8, 8 + len), &what)?;
    let mut mlx = false;
    parts::fields(
        &header,
        |name| name == "__metadata__",
        |_, metadata: Metadata| {
            mlx = metadata.format.as_deref() == Some("mlx");
            Ok(())
        },
    )
    .map_err(|e| bad(&what, e))?;
    let mut tensors: Vec<Tensor> = Vec::new();
    parts::fields(&header, is_head, |name, entry: Entry| {
        let (begin, end) = entry.data_offsets;
        if begin >= end || end > MAX_FILE {
            return Err(format!("tensor `{name}` lies nowhere"));
        }
        if tensors.len() == MAX_TENSORS {
            return Err(format!("a head of more than {MAX_TENSORS} tensors"));
        }
        tensors.push(Tensor {
            name,
            dtype: entry.dtype,
            shape: entry.shape,
            range: (8 + len + begin, 8 + len + end),
        });
        Ok(())
    })
    .map_err(|e| bad(&what, e))?;
    tensors.sort_by_key(|t| t.range.0);
    if tensors
        .windows(2)
        .any(|pair| pair[1].range.0 < pair[0].range.1)
    {
        return Err(bad(&what, "tensors overlap"));
    }
    Ok((tensors, mlx))
}

/// Fetches the tensors of `files` and writes them as one safetensors file at `part`.
fn write(
    client: &Client,
    repo: &RepoId,
    info: &RepoInfo,
    files: &[(String, Vec<Tensor>)],
    is_mlx: bool,
    part: &Path,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<(), HubError> {
    let mut header = Map::new();
    let source = format!("{repo}@{}", info.commit);
    let format = if is_mlx { "mlx" } else { "pt" };
    header.insert(
        "__metadata__".into(),
        json!({"format": format, "source": source}),
    );
    let mut total = 0;
    for tensor in files.iter().flat_map(|(_, tensors)| tensors) {
        let end = total + (tensor.range.1 - tensor.range.0);
        header.insert(
            tensor.name.clone(),
            json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [total, end]}),
        );
        total = end;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let failed = |source| io(part, source);
    let mut out = File::create(part).map_err(failed)?;
    out.write_all(&(header.len() as u64).to_le_bytes())
        .map_err(failed)?;
    out.write_all(&header).map_err(failed)?;
    let mut done = 0;
    for (file, tensors) in files {
        let url = client.file_url(repo, &info.commit, file);
        let what = format!("the head in `{file}` of `{repo}`");
        for run in runs(tensors) {
            let (begin, end) = (run[0].range.0, run[run.len() - 1].range.1);
            let mut at = begin;
            client
                .http
                .stream(&url, (begin, end), &what, &mut |piece| {
                    for wanted in run.iter().filter_map(|t| overlap(t.range, at, piece.len())) {
                        out.write_all(&piece[wanted.clone()])
                            .map_err(|source| io(part, source))?;
                        done += wanted.len() as u64;
                    }
                    at += piece.len() as u64;
                    progress(Progress { file, done, total });
                    Ok(())
                })?;
        }
    }
    out.sync_all().map_err(failed)
}

/// Groups of `tensors` that lie close together and are fetched with one request each.
fn runs(tensors: &[Tensor]) -> impl Iterator<Item = &[Tensor]> {
    tensors.chunk_by(|a, b| b.range.0 - a.range.1 <= GAP)
}

/// The bytes of a piece that lie in `range` of the file; the piece has `len` bytes and begins at
/// byte `at` of the file.
fn overlap(range: (u64, u64), at: u64, len: usize) -> Option<std::ops::Range<usize>> {
    let begin = range.0.max(at);
    let end = range.1.min(at + len as u64);
    (begin < end).then(|| (begin - at) as usize..(end - at) as usize)
}

/// Whether the tensor `name` belongs to a draft head.
fn is_head(name: &str) -> bool {
    PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// The size of a file in bytes, if the hub says it.
fn size(info: &RepoInfo, name: &str) -> Option<u64> {
    let is_it = |f: &&FileInfo| f.name == name;
    info.files.iter().find(is_it)?.size
}

/// The error for an invalid answer about `what`.
fn bad(what: &str, reason: impl std::fmt::Display) -> HubError {
    HubError::BadAnswer {
        what: what.to_owned(),
        reason: reason.to_string(),
    }
}
