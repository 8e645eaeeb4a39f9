//! The contents of files over connections that break off.
//!
//! What has arrived is kept: a try resumes where the last one stopped (`retry`).

use crate::HubError;
use crate::cache::io;
use crate::http::Http;
use crate::retry::{MAX_TRIES, Tries};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use ureq::http::StatusCode;

/// Bytes that are copied at once.
pub(crate) const COPY: usize = 1 << 20;

/// The progress of a download.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// The name of the file.
    pub file: &'a str,
    /// Bytes that have arrived.
    pub done: u64,
    /// Bytes of the whole file.
    pub total: u64,
}

/// What the hub announces about a file before it is fetched.
pub(crate) struct Meta {
    /// The name of the blob.
    pub(crate) etag: String,
    /// The size in bytes.
    pub(crate) size: u64,
}

impl Http {
    /// Fetches what the file `part` lacks of the `meta.size` bytes at `url`. `file` names it for
    /// `progress`, `what` for errors.
    ///
    /// # Errors
    ///
    /// If tries make no progress any more, more bytes arrive than announced, or the file cannot
    /// be written.
    pub(crate) fn resume(
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
        if have > meta.size {
            // Left by another file, or damaged: of no use.
            out.set_len(0).map_err(failed)?;
            have = 0;
        }
        let total = meta.size;
        let mut tries = Tries::new(&self.sleep, have);
        let mut knows_ranges = true;
        loop {
            let done = have;
            progress(Progress { file, done, total });
            if have == total {
                return Ok(());
            }
            let range = (have > 0).then_some((have, total));
            let answer = self.request(url, range, what)?;
            if have > 0 && answer.status() != StatusCode::PARTIAL_CONTENT {
                // The server ignores ranges: from the start.
                out.set_len(0).map_err(failed)?;
                have = 0;
                knows_ranges = false;
            }
            // One byte more than wanted shows that there are more.
            let body = answer.into_body().into_reader().take(total - have + 1);
            let broken = copy(body, &mut |piece| {
                out.write_all(piece).map_err(failed)?;
                have += piece.len() as u64;
                let done = have.min(total);
                progress(Progress { file, done, total });
                Ok(())
            })?;
            if have > total {
                out.set_len(0).map_err(failed)?;
                return Err(HubError::Checksum {
                    what: what.to_owned(),
                    expected: format!("{total} bytes"),
                    found: "more".into(),
                });
            }
            if have < total && !tries.again(have, None) {
                return Err(stalled(what, tries.furthest, total, knows_ranges, broken));
            }
        }
    }

    /// The bytes `begin..end` of the file at `url`.
    ///
    /// # Errors
    ///
    /// As [`stream`](Self::stream).
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

    /// Hands the bytes `begin..end` of the file at `url` to `take`, piece by piece; an answer
    /// that breaks off is resumed where it stopped.
    ///
    /// # Errors
    ///
    /// If the server ignores ranges, tries make no progress any more, or `take` fails.
    pub(crate) fn stream(
        &self,
        url: &str,
        (begin, end): (u64, u64),
        what: &str,
        take: &mut dyn FnMut(&[u8]) -> Result<(), HubError>,
    ) -> Result<(), HubError> {
        let mut at = begin;
        let mut tries = Tries::new(&self.sleep, at);
        while at < end {
            let answer = self.request(url, Some((at, end)), what)?;
            if answer.status() != StatusCode::PARTIAL_CONTENT {
                return Err(HubError::BadAnswer {
                    what: what.to_owned(),
                    reason: "the server sent the whole file although a range was asked for".into(),
                });
            }
            let body = answer.into_body().into_reader().take(end - at);
            let broken = copy(body, &mut |piece| {
                at += piece.len() as u64;
                take(piece)
            })?;
            if at < end && !tries.again(at, None) {
                return Err(stalled(what, at - begin, end - begin, true, broken));
            }
        }
        Ok(())
    }
}

/// Hands `body` to `take` piece by piece. Returns the reason if the body breaks off.
fn copy(
    mut body: impl Read,
    take: &mut dyn FnMut(&[u8]) -> Result<(), HubError>,
) -> Result<Option<String>, HubError> {
    let mut buffer = vec![0; COPY];
    loop {
        match body.read(&mut buffer) {
            Ok(0) => return Ok(None),
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Ok(Some(e.to_string())),
            Ok(n) => take(&buffer[..n])?,
        }
    }
}

/// The error for a transfer that reached byte `reached` of `total` and no further.
fn stalled(
    what: &str,
    reached: u64,
    total: u64,
    knows_ranges: bool,
    broken: Option<String>,
) -> HubError {
    let mut reason = broken.unwrap_or_else(|| "the answer ends early".into());
    if !knows_ranges {
        reason += "; the server ignores range requests, so each try starts from the beginning";
    }
    HubError::Stalled {
        what: what.to_owned(),
        reached,
        total,
        tries: MAX_TRIES,
        reason,
    }
}
