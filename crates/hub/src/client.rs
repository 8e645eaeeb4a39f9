//! Fetches files of the hub into its cache.
//!
//! ```text
//! GET  /api/models/ORG/NAME/revision/REV?blobs=true    commit, names, sizes
//! HEAD /ORG/NAME/resolve/COMMIT/FILE                   name of the blob, size
//! GET  the same, Range: bytes=HAVE-                    contents, through redirects
//! ```
//!
//! The name of a large blob is its SHA-256, which the contents must match. A download that
//! breaks off is resumed where it stopped, in this call and in the next.

use crate::cache::{Cache, io, is_commit, is_inside, make_parent};
use crate::error::line;
use crate::http::{Http, network};
use crate::transfer::{COPY, Meta, Progress};
use crate::{HubError, RepoId, Settings};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Most bytes of an answer in JSON; it takes 0.2 KB for each file.
const MAX_JSON: u64 = 32 << 20;
/// Most files of a repository.
const MAX_FILES: usize = 100_000;
/// Most bytes of a file; the largest shards have 50 GB.
pub(crate) const MAX_FILE: u64 = 1 << 44;
/// Endings of the names of files that a model is made of.
const MODEL_FILES: &[&str] = &[".safetensors", ".json", ".jinja"];
/// Folders with the same weights for other programs.
const OTHER_FOLDERS: &[&str] = &["original/", "onnx/", "openvino/", "coreml/"];

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileInfo {
    /// The name of the file, relative to the repository.
    pub name: String,
    /// The size of the file in bytes, if the hub says it.
    pub size: Option<u64>,
}

/// A repository at one commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoInfo {
    /// The hash of the commit.
    pub commit: String,
    /// The files of the repository at this commit.
    pub files: Vec<FileInfo>,
}

/// Whether `name` is a file that a model is made of.
pub fn is_model_file(name: &str) -> bool {
    MODEL_FILES.iter().any(|end| name.ends_with(end))
        && !name.starts_with("consolidated")
        && !OTHER_FOLDERS.iter().any(|folder| name.starts_with(folder))
}

/// Fetches files from one hub into one cache.
pub struct Client {
    /// Requests to the hub.
    pub(crate) http: Http,
    cache: Cache,
    notice: Notice,
}

/// Shows a line to the user.
type Notice = Box<dyn Fn(&str) + Send + Sync>;

impl Client {
    /// A client for the hub and the cache of `settings`.
    pub fn new(settings: Settings) -> Client {
        let Settings {
            cache,
            endpoint,
            token,
            offline,
        } = settings;
        Client {
            http: Http::new(endpoint, token, offline),
            cache: Cache::new(cache),
            notice: Box::new(|_| {}),
        }
    }

    /// Calls `sleep` for the pauses between tries, so that tests need not wait.
    #[must_use]
    pub fn with_sleep(self, sleep: impl Fn(Duration) + Send + Sync + 'static) -> Client {
        let mut client = self;
        client.http.sleep = Box::new(sleep);
        client
    }

    /// Calls `notice` with a line for the user when the client has to wait for another
    /// program.
    #[must_use]
    pub fn with_notice(self, notice: impl Fn(&str) + Send + Sync + 'static) -> Client {
        let notice = Box::new(notice);
        Client { notice, ..self }
    }

    /// The cache that files are fetched into.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Asks the hub for the commit and the files of `repo` at `revision`, which is a branch, a
    /// tag or a commit.
    ///
    /// # Errors
    ///
    /// If the hub refuses, is not reached, or sends an invalid answer.
    pub fn info(&self, repo: &RepoId, revision: &str) -> Result<RepoInfo, HubError> {
        #[derive(serde::Deserialize)]
        struct Sibling {
            rfilename: String,
            size: Option<u64>,
        }
        #[derive(serde::Deserialize)]
        struct Answer {
            sha: String,
            siblings: Vec<Sibling>,
        }
        let what = format!("`{repo}`");
        let bad = |reason: String| HubError::BadAnswer {
            what: what.clone(),
            reason,
        };
        if !is_inside(revision) {
            return Err(HubError::NotFound {
                what: format!("revision `{}` of `{repo}`", line(revision)),
            });
        }
        let escaped: String = revision.bytes().map(escape).collect();
        let url = format!(
            "{}/api/models/{repo}/revision/{}?blobs=true",
            self.http.endpoint,
            escaped.replace('/', "%2F")
        );
        let answer = self.http.request(&url, None, &what)?;
        let mut bytes = Vec::new();
        let body = answer.into_body().into_reader();
        body.take(MAX_JSON)
            .read_to_end(&mut bytes)
            .map_err(|e| network(&what, &e))?;
        let answer: Answer = serde_json::from_slice(&bytes).map_err(|e| bad(e.to_string()))?;
        if !is_commit(&answer.sha) || answer.siblings.len() > MAX_FILES {
            return Err(bad("it names no commit, or too many files".into()));
        }
        let files = answer.siblings.into_iter().map(|s| {
            if is_inside(&s.rfilename) {
                Ok(FileInfo {
                    name: s.rfilename,
                    size: s.size,
                })
            } else {
                Err(bad(format!("a file called `{}`", line(&s.rfilename))))
            }
        });
        Ok(RepoInfo {
            files: files.collect::<Result<_, _>>()?,
            commit: answer.sha,
        })
    }

    /// Fetches `files` of `repo` at the commit of `info`, for which `revision` stands from then
    /// on. Returns the folder of the snapshot.
    ///
    /// # Errors
    ///
    /// If a file cannot be fetched whole. What has arrived is kept, and the next call resumes
    /// there.
    pub fn fetch(
        &self,
        repo: &RepoId,
        revision: &str,
        info: &RepoInfo,
        files: &[FileInfo],
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<PathBuf, HubError> {
        for file in files {
            self.fetch_file(repo, &info.commit, &file.name, progress)?;
        }
        // Last, so that a branch never stands for a commit that is not there.
        self.cache.note(repo, revision, &info.commit)?;
        Ok(self.cache.folder(repo).join("snapshots").join(&info.commit))
    }

    /// Fetches one file unless the cache has it; returns its path in the snapshot.
    fn fetch_file(
        &self,
        repo: &RepoId,
        commit: &str,
        file: &str,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<PathBuf, HubError> {
        let what = format!("`{file}` of `{repo}`");
        let url = self.file_url(repo, commit, file);
        let meta = self.meta(&url, &what)?;
        let blob = self.cache.folder(repo).join("blobs").join(&meta.etag);
        let is_there = |blob: &Path| blob.metadata().is_ok_and(|m| m.len() == meta.size);
        if !is_there(&blob) {
            let _lock = self.lock(repo, &meta.etag, &what)?;
            if !is_there(&blob) {
                let part = blob.with_file_name(format!("{}.incomplete", meta.etag));
                make_parent(&part)?;
                self.http
                    .resume(&url, &part, &meta, file, &what, progress)?;
                check(&part, &meta, &what)?;
                fs::rename(&part, &blob).map_err(|source| io(&blob, source))?;
            }
        }
        progress(Progress {
            file,
            done: meta.size,
            total: meta.size,
        });
        self.cache.link(repo, commit, file, &meta.etag)
    }

    /// The URL of a file at a commit.
    pub(crate) fn file_url(&self, repo: &RepoId, commit: &str, file: &str) -> String {
        let escaped: String = file.bytes().map(escape).collect();
        format!("{}/{repo}/resolve/{commit}/{escaped}", self.http.endpoint)
    }

    /// Keeps other programs from fetching the blob `etag` of `repo`, and waits for one that does.
    fn lock(&self, repo: &RepoId, etag: &str, what: &str) -> Result<File, HubError> {
        let path = self.cache.root().join(".locks").join(repo.folder());
        self.lock_at(&path.join(format!("{etag}.lock")), what)
    }

    /// Locks the file at `path` until the result is dropped. If another program holds the
    /// lock, waits and tells the user for `what`.
    pub(crate) fn lock_at(&self, path: &Path, what: &str) -> Result<File, HubError> {
        make_parent(path)?;
        // Opened as by `huggingface_hub`, which locks the same files.
        let options = File::options().create(true).append(true).open(path);
        let file = options.map_err(|source| io(path, source))?;
        if let Err(fs::TryLockError::WouldBlock) = file.try_lock() {
            (self.notice)(&format!("waiting for another paceline pull of {what}"));
            file.lock().map_err(|source| io(path, source))?;
        }
        // A file system without locks: there, each fetches for itself.
        Ok(file)
    }

    /// Asks the hub for the name of a file's blob and its size.
    fn meta(&self, url: &str, what: &str) -> Result<Meta, HubError> {
        let answer = self.http.head(url, what)?;
        let header = |name: &str| answer.headers().get(name)?.to_str().ok();
        let bad = |reason: &str| HubError::BadAnswer {
            what: what.to_owned(),
            reason: reason.to_owned(),
        };
        let etag = header("x-linked-etag").or_else(|| header("etag"));
        let etag = etag.ok_or_else(|| bad("it has no ETag"))?;
        let etag = etag.trim_start_matches("W/").trim_matches('"');
        let is_name = |b: u8| b.is_ascii_alphanumeric() || b"-_".contains(&b);
        if etag.is_empty() || etag.len() > 128 || !etag.bytes().all(is_name) {
            return Err(bad("its ETag is not a valid file name"));
        }
        let size = header("x-linked-size").or_else(|| header("content-length"));
        let size = size.and_then(|s| s.parse().ok());
        let size = size.filter(|size| *size <= MAX_FILE);
        Ok(Meta {
            etag: etag.to_owned(),
            size: size.ok_or_else(|| bad("it has no size, or an impossible one"))?,
        })
    }
}

/// Escapes a byte of a file's name for a URL.
fn escape(byte: u8) -> String {
    if byte.is_ascii_alphanumeric() || b"-_.~/".contains(&byte) {
        char::from(byte).to_string()
    } else {
        format!("%{byte:02X}")
    }
}

/// Compares a file that has arrived with its announced SHA-256, and deletes it if they differ.
fn check(part: &Path, meta: &Meta, what: &str) -> Result<(), HubError> {
    let is_sha256 = meta.etag.len() == 64 && meta.etag.bytes().all(|b| b.is_ascii_hexdigit());
    if !is_sha256 {
        return Ok(()); // small files are named by their git hash; their size was held
    }
    let mut file = File::open(part).map_err(|source| io(part, source))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; COPY];
    loop {
        match file.read(&mut buffer).map_err(|source| io(part, source))? {
            0 => break,
            n => hash.update(&buffer[..n]),
        }
    }
    let found: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
    if found.eq_ignore_ascii_case(&meta.etag) {
        return Ok(());
    }
    fs::remove_file(part).map_err(|source| io(part, source))?;
    Err(HubError::Checksum {
        what: what.to_owned(),
        expected: meta.etag.clone(),
        found,
    })
}
