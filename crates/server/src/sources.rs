//! Where the bytes of media come from: a request has them in base64, or names an address or a file.
//!
//! ```text
//! Data::Base64 ───────────────────────────────────┐
//! Data::Address ─ fetch::Fetcher ─→ Data::Bytes ──┼─→ decode, on a worker's thread
//! Data::File    ─ fetch::Folder  ─→ Data::Bytes ──┘
//! ```
//!
//! Addresses and files are for operators to permit. What is named is read on a thread of its own that
//! holds no worker's place meanwhile, of a few requests at a time, within one limit of bytes and one
//! of time for all that a request names.

use std::sync::Arc;
use std::time::Instant;

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use fetch::{Fetcher, Folder, Hosts};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::errors::ApiError;
use crate::limits::{NAMED_BYTES_MAX, NAMED_REQUESTS_MAX, NAMED_TIME_MAX, NAMED_WAITING_MAX};

/// What a request may name instead of sending it.
#[derive(Clone, Debug)]
pub struct MediaSources {
    fetcher: Option<Arc<Fetcher>>,
    folder: Option<Folder>,
    /// Requests that hold what they have read.
    places: Arc<Semaphore>,
    /// Requests that wait for that.
    waiting: Arc<Semaphore>,
}

/// The right to hold files that a request has named.
pub(crate) type Place = OwnedSemaphorePermit;

impl Default for MediaSources {
    /// Nothing: all comes inside the request.
    fn default() -> Self {
        MediaSources::new(None, None)
    }
}

impl MediaSources {
    /// Files at `hosts`, and files of `folder`.
    pub fn new(hosts: Option<Hosts>, folder: Option<Folder>) -> Self {
        MediaSources {
            fetcher: hosts.map(|hosts| Arc::new(Fetcher::new(hosts))),
            folder,
            places: Arc::new(Semaphore::new(NAMED_REQUESTS_MAX)),
            waiting: Arc::new(Semaphore::new(NAMED_WAITING_MAX)),
        }
    }

    /// Refuses what the field at `path` names if nothing of the kind may be named.
    ///
    /// # Errors
    ///
    /// 400 that says which option permits it.
    pub(crate) fn check(&self, path: &str, data: &Data) -> Result<(), ApiError> {
        let told = match data {
            Data::Address(_) if self.fetcher.is_none() => {
                "is an address, and this server fetches nothing: send the file in base64, or start the server with --allow-fetch"
            }
            Data::File(_) if self.folder.is_none() => {
                "names a file, and this server reads none: send the file in base64, or start the server with --media-root"
            }
            _ => return Ok(()),
        };
        Err(ApiError::field(path, told))
    }

    /// Reads what `list` names, each at its place in the request. Waits for its turn, and then for
    /// other machines, up to a limit. What is read may be held as long as the place that comes with it.
    ///
    /// # Errors
    ///
    /// 400 that names the place of the first file that cannot be had; 503 if too many requests wait.
    pub(crate) async fn bring(
        &self,
        list: Vec<(String, Data)>,
        bytes_max: usize,
    ) -> Result<(Vec<(String, Data)>, Place), ApiError> {
        let seat = self.waiting.try_acquire().map_err(|_| ApiError::busy())?;
        let place = self.places.clone().acquire_owned().await;
        let place = place.expect("never closed");
        drop(seat);
        let (fetcher, folder) = (self.fetcher.clone(), self.folder.clone());
        // The place goes along: it counts to the end, also where the client is gone before.
        let read = move || {
            let mut reading = Reading {
                fetcher: fetcher.as_deref(),
                folder: folder.as_ref(),
                until: Instant::now() + NAMED_TIME_MAX,
                bytes_left: NAMED_BYTES_MAX,
            };
            let read = list.into_iter().map(|(path, data)| {
                let data = reading.read(&path, data, bytes_max)?;
                Ok((path, data))
            });
            let read: Result<Vec<_>, ApiError> = read.collect();
            read.map(|read| (read, place))
        };
        // A panic in there is that request's end, and only its.
        let read = tokio::task::spawn_blocking(read).await;
        read.map_err(|_| ApiError::internal())?
    }
}

/// What is left for the files that a request names.
struct Reading<'a> {
    fetcher: Option<&'a Fetcher>,
    folder: Option<&'a Folder>,
    until: Instant,
    bytes_left: usize,
}

impl Reading<'_> {
    /// The bytes of what `data`, at `path`, names.
    fn read(&mut self, path: &str, data: Data, bytes_max: usize) -> Result<Data, ApiError> {
        let most = bytes_max.min(self.bytes_left);
        let read = match &data {
            Data::Base64(_) | Data::Bytes(_) => return Ok(data),
            Data::Address(url) => {
                let fetcher = self.fetcher.expect("checked to be permitted");
                fetcher
                    .get(url, most, self.until)
                    .map_err(|e| e.to_string())
            }
            Data::File(name) => {
                let folder = self.folder.expect("checked to be permitted");
                folder.read(name, most).map_err(|e| e.to_string())
            }
        };
        let bytes = read.map_err(|error| ApiError::field(path, error))?;
        self.bytes_left -= bytes.len();
        Ok(Data::Bytes(bytes))
    }
}

/// The bytes of a file, or what they are found by.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Data<S = String> {
    /// The file in base64.
    Base64(S),
    /// A URL of HTTP or HTTPS.
    Address(S),
    /// A URL of a file, or its path.
    File(S),
    /// The file.
    Bytes(Vec<u8>),
}

impl<'a> Data<&'a str> {
    /// What `url`, in the field at `path`, is, after the type that it says it has; `form` says for
    /// messages how a URL with the file in it begins.
    ///
    /// # Errors
    ///
    /// 400 for a URL of another kind.
    pub(crate) fn of_url(
        path: &str,
        url: &'a str,
        form: &str,
    ) -> Result<(&'a str, Self), ApiError> {
        let begins = |with: &str| {
            let head = url.get(..with.len());
            head.is_some_and(|head| head.eq_ignore_ascii_case(with))
        };
        if begins("http://") || begins("https://") {
            return Ok(("", Data::Address(url)));
        }
        if begins("data:") {
            let data = url.split_once(',');
            let is_base64 = |head: &str| head.to_ascii_lowercase().ends_with(";base64");
            if let Some((head, data)) = data.filter(|(head, _)| is_base64(head)) {
                let kind = head["data:".len()..].split(';').next();
                return Ok((kind.unwrap_or_default(), Data::Base64(data)));
            }
        } else if begins("file:") || !url.is_empty() && !url.contains("://") {
            return Ok(("", Data::File(url)));
        }
        Err(ApiError::field(path, format!("must have the form {form}")))
    }

    /// The same with strings of its own.
    pub(crate) fn into_owned(self) -> Data {
        match self {
            Data::Base64(text) => Data::Base64(text.to_owned()),
            Data::Address(url) => Data::Address(url.to_owned()),
            Data::File(name) => Data::File(name.to_owned()),
            Data::Bytes(bytes) => Data::Bytes(bytes),
        }
    }
}

impl Data {
    /// Takes the data out.
    pub(crate) fn take(&mut self) -> Data {
        std::mem::replace(self, Data::Bytes(Vec::new()))
    }

    /// Whether it is somewhere else.
    pub(crate) fn is_named(&self) -> bool {
        matches!(self, Data::Address(_) | Data::File(_))
    }

    /// Bytes that are held for it.
    pub(crate) fn held(&self) -> usize {
        match self {
            Data::Base64(text) | Data::Address(text) | Data::File(text) => text.len(),
            Data::Bytes(bytes) => bytes.len(),
        }
    }

    /// The file, which is in the request or has been read; nothing if it is no base64.
    pub(crate) fn into_bytes(self) -> Option<Vec<u8>> {
        match self {
            Data::Base64(text) => base64(text.as_bytes()),
            Data::Bytes(bytes) => Some(bytes),
            Data::Address(_) | Data::File(_) => unreachable!("read before it is decoded"),
        }
    }
}

/// The bytes that `text` stands for, with or without padding and line breaks, in the usual alphabet
/// or that of URLs; `None` if it is no base64.
fn base64(text: &[u8]) -> Option<Vec<u8>> {
    const LENIENT: GeneralPurpose = GeneralPurpose::new(
        &STANDARD,
        GeneralPurposeConfig::new()
            .with_decode_padding_mode(DecodePaddingMode::Indifferent)
            .with_decode_allow_trailing_bits(true),
    );
    let letters = text.iter().filter(|c| !b"\n\r \t".contains(c));
    let usual = letters.map(|c| match c {
        b'-' => b'+',
        b'_' => b'/',
        c => *c,
    });
    LENIENT.decode(usual.collect::<Vec<u8>>()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_read_in_all_its_spellings() {
        let read = |text: &str| base64(text.as_bytes());
        assert_eq!(read(""), Some(vec![]));
        assert_eq!(read("TQ=="), Some(b"M".to_vec()));
        assert_eq!(read("TWE"), Some(b"Ma".to_vec()));
        assert_eq!(read("TW\r\nFu"), Some(b"Man".to_vec()));
        assert_eq!(read("-_-_"), read("+/+/"));
        assert_eq!(read("+/+/"), Some(vec![0xfb, 0xff, 0xbf]));
        for wrong in ["T", "TWFuT", "TQ==TQ==", "T*Fu", "data:,"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn urls_are_told_apart_by_their_beginnings() {
        let of = |url| Data::of_url("at", url, "FORM");
        for (url, expected) in [
            ("data:image/png;base64,TWFu", Data::Base64("TWFu")),
            ("DATA:;x;BASE64,TWFu", Data::Base64("TWFu")),
            ("HTTPS://a.b/c", Data::Address("HTTPS://a.b/c")),
            ("file:///a.png", Data::File("file:///a.png")),
            ("a/b.png", Data::File("a/b.png")),
        ] {
            assert_eq!(of(url).unwrap().1, expected, "{url}");
        }
        for url in [
            "",
            "data:image/png,abc",
            "data:image/png;base64",
            "ftp://a.b/c",
        ] {
            let error = of(url).unwrap_err();
            assert!(error.message.contains("must have the form FORM"), "{url}");
        }
    }
}
