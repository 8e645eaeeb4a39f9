//! Files of the hub into its cache.
//!
//! ```text
//! GET  /api/models/ORG/NAME/revision/REV?blobs=true    commit, names, sizes
//! HEAD /ORG/NAME/resolve/COMMIT/FILE                   name of the blob, size
//! GET  the same, Range: bytes=HAVE-                    contents, wherever redirects lead
//! ```
//!
//! A blob's name is its SHA-256 for large files, and then the contents must have
//! it. A file that breaks off is resumed where it stopped, in this call and in the
//! next. The token goes to the endpoint alone, never where a redirect leads.

use crate::cache::{Cache, io, is_commit, is_inside, make_parent};
use crate::lookup::Lookup;
use crate::{HubError, RepoId, Settings};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;
use ureq::http::{Response, StatusCode, header};
use ureq::unversioned::transport::DefaultConnector;
use ureq::{Agent, Body};

/// Redirects that are followed; the hub uses one.
const MAX_REDIRECTS: u32 = 5;
/// Tries without a byte of progress before giving up.
const MAX_TRIES: u32 = 5;
/// Longest pause that a server can ask for.
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// Bytes of an answer in JSON: 0.2 KB a file.
const MAX_JSON: u64 = 32 << 20;
/// Files of a repository.
const MAX_FILES: usize = 100_000;
/// Bytes of a file that are believed; the largest shards have 50 GB.
pub(crate) const MAX_FILE: u64 = 1 << 44;
/// Bytes copied at once.
const COPY: usize = 1 << 20;
/// Ends of the names of files that a model is made of.
const MODEL_FILES: &[&str] = &[".safetensors", ".json", ".jinja"];
/// Folders that hold the same weights for other programs.
const OTHER_FOLDERS: &[&str] = &["original/", "onnx/", "openvino/", "coreml/"];

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileInfo {
    /// Its name, relative to the repository.
    pub name: String,
    /// Its bytes, where the hub says so.
    pub size: Option<u64>,
}

/// A repository at one commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoInfo {
    /// The commit.
    pub commit: String,
    /// Its files.
    pub files: Vec<FileInfo>,
}

/// How far a file has come.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// The file.
    pub file: &'a str,
    /// Bytes that are here.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
}

/// Whether `name` is a file that a model is made of.
pub fn is_model_file(name: &str) -> bool {
    MODEL_FILES.iter().any(|end| name.ends_with(end))
        && !name.starts_with("consolidated")
        && !OTHER_FOLDERS.iter().any(|folder| name.starts_with(folder))
}

/// Fetches from one hub into one cache.
pub struct Client {
    agent: Agent,
    settings: Settings,
    cache: Cache,
    pause: Duration,
}

/// What the hub says of a file before it is fetched.
struct Meta {
    etag: String,
    size: u64,
}

impl Client {
    /// A client for `settings`.
    pub fn new(settings: Settings) -> Client {
        Client::with_pause(settings, Duration::from_secs(1))
    }

    /// The same, with another pause before the second try; it doubles with each.
    pub fn with_pause(settings: Settings, pause: Duration) -> Client {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("paceline/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(Duration::from_secs(15)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .timeout_per_read(Some(Duration::from_secs(60)))
            .build();
        let lookup = Lookup::new(&settings.endpoint);
        Client {
            agent: Agent::with_parts(config, DefaultConnector::default(), lookup),
            cache: Cache::new(&settings.cache),
            settings,
            pause,
        }
    }

    /// The cache it fetches into.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// What `repo` holds at `revision`.
    ///
    /// # Errors
    ///
    /// [`HubError`].
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
                what: format!("revision `{}`", revision.escape_debug()),
            });
        }
        let escaped: String = revision.bytes().map(escape).collect();
        let url = format!(
            "{}/api/models/{repo}/revision/{}?blobs=true",
            self.settings.endpoint,
            escaped.replace('/', "%2F")
        );
        let answer = self.request(&url, None, &what)?;
        let mut bytes = Vec::new();
        let body = answer.into_body().into_reader();
        body.take(MAX_JSON)
            .read_to_end(&mut bytes)
            .map_err(|e| network(&what, &e))?;
        let answer: Answer = serde_json::from_slice(&bytes).map_err(|e| bad(e.to_string()))?;
        if !is_commit(&answer.sha) || answer.siblings.len() > MAX_FILES {
            return Err(bad("no commit, or too many files".into()));
        }
        let files = answer.siblings.into_iter().map(|s| {
            if is_inside(&s.rfilename) {
                Ok(FileInfo {
                    name: s.rfilename,
                    size: s.size,
                })
            } else {
                Err(bad(format!(
                    "a file called `{}`",
                    s.rfilename.escape_debug()
                )))
            }
        });
        Ok(RepoInfo {
            files: files.collect::<Result<_, _>>()?,
            commit: answer.sha,
        })
    }

    /// Fetches `files` of `repo` at `info`'s commit and lets `revision` stand for it;
    /// the snapshot's folder.
    ///
    /// # Errors
    ///
    /// [`HubError`]; what has arrived stays, and the next call goes on from there.
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
                self.resume(&url, &part, &meta, file, &what, progress)?;
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

    pub(crate) fn file_url(&self, repo: &RepoId, commit: &str, file: &str) -> String {
        let escaped: String = file.bytes().map(escape).collect();
        format!(
            "{}/{repo}/resolve/{commit}/{escaped}",
            self.settings.endpoint
        )
    }

    /// Keeps other programs from fetching the same blob.
    fn lock(&self, repo: &RepoId, etag: &str, what: &str) -> Result<File, HubError> {
        let path = self.cache.root().join(".locks").join(repo.folder());
        let path = path.join(format!("{etag}.lock"));
        make_parent(&path)?;
        let file = File::create(&path).map_err(|source| io(&path, source))?;
        match file.try_lock() {
            Ok(()) => Ok(file),
            Err(fs::TryLockError::WouldBlock) => Err(HubError::Busy {
                what: what.to_owned(),
            }),
            // A file system without locks: there, each fetches for itself.
            Err(fs::TryLockError::Error(_)) => Ok(file),
        }
    }

    fn meta(&self, url: &str, what: &str) -> Result<Meta, HubError> {
        let answer = self.tries(what, |_| self.once("HEAD", url, None))?;
        let header = |name: &str| answer.headers().get(name)?.to_str().ok();
        let bad = |reason: &str| HubError::BadAnswer {
            what: what.to_owned(),
            reason: reason.to_owned(),
        };
        let etag = header("x-linked-etag").or_else(|| header("etag"));
        let etag = etag.ok_or_else(|| bad("no ETag"))?;
        let etag = etag.trim_start_matches("W/").trim_matches('"');
        let is_name = |b: u8| b.is_ascii_alphanumeric() || b"-_".contains(&b);
        if etag.is_empty() || etag.len() > 128 || !etag.bytes().all(is_name) {
            return Err(bad("an ETag that is no name"));
        }
        let size = header("x-linked-size").or_else(|| header("content-length"));
        let size = size.and_then(|s| s.parse().ok());
        let size = size.filter(|size| *size <= MAX_FILE);
        Ok(Meta {
            etag: etag.to_owned(),
            size: size.ok_or_else(|| bad("no size, or none that a file has"))?,
        })
    }

    /// Fetches what `part` lacks of its `meta.size` bytes.
    fn resume(
        &self,
        url: &str,
        part: &Path,
        meta: &Meta,
        file: &str,
        what: &str,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(), HubError> {
        let failed = |source| io(part, source);
        let mut out = File::options()
            .create(true)
            .append(true)
            .open(part)
            .map_err(failed)?;
        let mut have = out.seek(SeekFrom::End(0)).map_err(failed)?;
        let mut tries = 0;
        loop {
            if have > meta.size {
                // Of another file, or cut wrongly: no use.
                out.set_len(0).map_err(failed)?;
                have = 0;
            }
            progress(Progress {
                file,
                done: have,
                total: meta.size,
            });
            if have == meta.size {
                return Ok(());
            }
            let range = (have > 0).then_some((have, meta.size));
            let answer = self.request(url, range, what)?;
            if have > 0 && answer.status() != StatusCode::PARTIAL_CONTENT {
                // The server knows no ranges: from the start.
                out.set_len(0).map_err(failed)?;
                have = 0;
            }
            let before = have;
            // One byte more than wanted shows that there are more.
            let mut body = answer.into_body().into_reader().take(meta.size - have + 1);
            let mut buffer = vec![0; COPY];
            let broken = loop {
                match body.read(&mut buffer) {
                    Ok(0) => break None,
                    Err(e) => break Some(e.to_string()),
                    Ok(n) => {
                        out.write_all(&buffer[..n]).map_err(failed)?;
                        have += n as u64;
                        progress(Progress {
                            file,
                            done: have,
                            total: meta.size,
                        });
                    }
                }
            };
            if have > meta.size {
                out.set_len(0).map_err(failed)?;
                return Err(HubError::Checksum {
                    what: what.to_owned(),
                    expected: format!("{} bytes", meta.size),
                    found: "more".into(),
                });
            }
            tries = if have > before { 0 } else { tries + 1 };
            if have < meta.size && tries >= MAX_TRIES {
                return Err(HubError::Network {
                    what: what.to_owned(),
                    reason: broken.unwrap_or_else(|| "the answer is empty".into()),
                });
            }
        }
    }

    /// The bytes `range` of a file, all of them and no others.
    pub(crate) fn bytes(
        &self,
        url: &str,
        (begin, end): (u64, u64),
        what: &str,
    ) -> Result<Vec<u8>, HubError> {
        let mut bytes = Vec::new();
        self.stream(url, (begin, end), what, &mut |piece| {
            bytes.extend_from_slice(piece);
            Ok(())
        })?;
        Ok(bytes)
    }

    /// The same, piece by piece; an answer that breaks off is taken up again.
    pub(crate) fn stream(
        &self,
        url: &str,
        (begin, end): (u64, u64),
        what: &str,
        take: &mut dyn FnMut(&[u8]) -> Result<(), HubError>,
    ) -> Result<(), HubError> {
        let (mut at, mut tries) = (begin, 0);
        let mut buffer = vec![0; COPY];
        while at < end {
            let answer = self.request(url, Some((at, end)), what)?;
            if answer.status() != StatusCode::PARTIAL_CONTENT {
                return Err(HubError::BadAnswer {
                    what: what.to_owned(),
                    reason: "the server sends whole files where a range is asked for".into(),
                });
            }
            let before = at;
            let mut body = answer.into_body().into_reader().take(end - at);
            let broken = loop {
                match body.read(&mut buffer) {
                    Ok(0) => break None,
                    Err(e) => break Some(e.to_string()),
                    Ok(n) => {
                        take(&buffer[..n])?;
                        at += n as u64;
                    }
                }
            };
            tries = if at > before { 0 } else { tries + 1 };
            if at < end && tries >= MAX_TRIES {
                return Err(HubError::Network {
                    what: what.to_owned(),
                    reason: broken.unwrap_or_else(|| "the answer is empty".into()),
                });
            }
        }
        Ok(())
    }

    /// A good answer to GET, wherever redirects lead; with a range, one that begins
    /// where it should.
    fn request(
        &self,
        url: &str,
        range: Option<(u64, u64)>,
        what: &str,
    ) -> Result<Response<Body>, HubError> {
        let answer = self.tries(what, |_| {
            let mut url = url.to_owned();
            for _ in 0..MAX_REDIRECTS {
                let answer = self.once("GET", &url, range)?;
                if !answer.status().is_redirection() {
                    return Ok(answer);
                }
                let location = answer.headers().get(header::LOCATION);
                let location = location.and_then(|l| l.to_str().ok()).unwrap_or_default();
                url = self.resolve(location)?;
            }
            Err(ureq::Error::TooManyRedirects)
        })?;
        let begins = || {
            let range = answer.headers().get(header::CONTENT_RANGE)?.to_str().ok()?;
            let begin = range.strip_prefix("bytes ")?.split_once('-')?.0;
            begin.parse::<u64>().ok()
        };
        if answer.status() == StatusCode::PARTIAL_CONTENT && begins() != range.map(|r| r.0) {
            return Err(HubError::BadAnswer {
                what: what.to_owned(),
                reason: "another range than asked for".into(),
            });
        }
        Ok(answer)
    }

    /// Where a redirect of the endpoint leads.
    fn resolve(&self, location: &str) -> Result<String, ureq::Error> {
        if location.starts_with('/') && !location.starts_with("//") {
            return Ok(format!("{}{location}", self.settings.endpoint));
        }
        // From a hub that is reached safely no redirect leads to one that is not.
        let is_safe = location.starts_with("https://")
            || location.starts_with("http://") && self.settings.endpoint.starts_with("http://");
        if is_safe {
            Ok(location.to_owned())
        } else {
            let to = location.escape_debug();
            Err(ureq::Error::BadUri(format!("a redirect leads to `{to}`")))
        }
    }

    /// One request, no redirect followed.
    fn once(
        &self,
        method: &str,
        url: &str,
        range: Option<(u64, u64)>,
    ) -> Result<Response<Body>, ureq::Error> {
        let mut request = match method {
            "HEAD" => self.agent.head(url),
            _ => self.agent.get(url),
        };
        request = request.header(header::ACCEPT_ENCODING, "identity");
        if let Some((begin, end)) = range {
            request = request.header(header::RANGE, format!("bytes={begin}-{}", end - 1));
        }
        let after = url.strip_prefix(&self.settings.endpoint);
        if let (Some(token), Some(true)) = (&self.settings.token, after.map(|a| a.starts_with('/')))
        {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        request.call()
    }

    /// Tries `attempt` until it succeeds or there is no point in it.
    fn tries(
        &self,
        what: &str,
        attempt: impl Fn(u32) -> Result<Response<Body>, ureq::Error>,
    ) -> Result<Response<Body>, HubError> {
        if self.settings.offline {
            return Err(HubError::Offline {
                what: what.to_owned(),
            });
        }
        let mut pause = self.pause;
        for tries in 1.. {
            let is_last = tries == MAX_TRIES;
            let wait = match attempt(tries) {
                Err(error) if is_last => return Err(network(what, &error)),
                Err(ureq::Error::BadUri(why)) => return Err(network(what, &why)),
                Err(_) => pause,
                Ok(answer) => match answer.status().as_u16() {
                    200 | 206 | 301..=308 => return Ok(answer),
                    status @ (429 | 500..=599) if is_last => {
                        return Err(HubError::Unavailable {
                            status,
                            what: what.to_owned(),
                            tries,
                        });
                    }
                    429 | 500..=599 => retry_after(&answer).unwrap_or(pause),
                    status => return Err(self.refusal(status, what)),
                },
            };
            std::thread::sleep(wait.min(MAX_PAUSE));
            pause *= 2;
        }
        unreachable!("the last try returns")
    }

    fn refusal(&self, status: u16, what: &str) -> HubError {
        let what = what.to_owned();
        match status {
            401 => HubError::Unauthorized {
                what,
                advice: if self.settings.token.is_some() {
                    "the token in HF_TOKEN is not enough"
                } else {
                    "if you have access, set HF_TOKEN"
                },
            },
            403 => HubError::Forbidden { what },
            404 => HubError::NotFound { what },
            416 => HubError::BadAnswer {
                what,
                reason: "the file ends before the bytes that were announced".into(),
            },
            _ => HubError::Status { status, what },
        }
    }
}

fn network(what: &str, error: &dyn std::fmt::Display) -> HubError {
    HubError::Network {
        what: what.to_owned(),
        reason: error.to_string(),
    }
}

/// The pause a server asks for, in seconds.
fn retry_after(answer: &Response<Body>) -> Option<Duration> {
    let value = answer.headers().get(header::RETRY_AFTER)?.to_str().ok()?;
    value.parse().ok().map(Duration::from_secs)
}

/// A byte of a file's name as it stands in a URL.
fn escape(byte: u8) -> String {
    if byte.is_ascii_alphanumeric() || b"-_.~/".contains(&byte) {
        char::from(byte).to_string()
    } else {
        format!("%{byte:02X}")
    }
}

/// Holds a whole file against what was announced, and removes it if it differs.
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
