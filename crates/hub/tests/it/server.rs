//! A hub on this machine: one repository, and faults on demand.

use hub::{Client, RepoId, Settings};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub(crate) const REPO: &str = "org/model";

/// What a server does wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) enum Fault {
    #[default]
    None,
    /// Each answer ends after so many bytes of its body.
    BreaksOff(usize),
    /// Says that there is more than there is, and hangs up.
    TooLong,
    /// Sends the whole file where a range is asked for.
    NoRanges,
    /// Sends the whole file where a range is asked for, and ends after so many bytes.
    NoRangesAndBreaksOff(usize),
    /// Sends a range, another one.
    WrongRange,
    /// Sends other contents than it announces.
    OtherContents,
    /// Answers the first so many requests for files with this status.
    Status(u16, usize),
    /// Sends readers of files to another address.
    Redirect,
    /// Sends them there.
    RedirectsTo(&'static str),
    /// Names the blobs of files so.
    NamedSo(&'static str),
    /// Says that a file has more bytes than any can have.
    NoSuchSize,
}

/// One request as it came.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: HashMap<String, String>,
}

struct State {
    files: BTreeMap<String, Vec<u8>>,
    fault: Mutex<Fault>,
    refused: Mutex<usize>,
    seen: Mutex<Vec<Seen>>,
}

/// A running hub; its thread ends with the process.
pub(crate) struct Hub {
    address: String,
    state: Arc<State>,
}

impl Hub {
    pub(crate) fn start(files: &[(&str, Vec<u8>)]) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(State {
            files: files
                .iter()
                .map(|(n, b)| (n.to_string(), b.clone()))
                .collect(),
            fault: Mutex::default(),
            refused: Mutex::default(),
            seen: Mutex::default(),
        });
        let (shared, base) = (state.clone(), address.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (state, base) = (shared.clone(), base.clone());
                std::thread::spawn(move || serve(&stream, &state, &base));
            }
        });
        Hub { address, state }
    }

    pub(crate) fn set(&self, fault: Fault) {
        *self.state.fault.lock().unwrap() = fault;
        *self.state.refused.lock().unwrap() = 0;
        self.state.seen.lock().unwrap().clear();
    }

    /// Where it is, as HF_ENDPOINT says it.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// What was asked for since the last call of `set`.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.state.seen.lock().unwrap().clone()
    }

    pub(crate) fn settings(&self, cache: &Path) -> Settings {
        Settings {
            cache: cache.into(),
            endpoint: self.address().to_owned(),
            token: Some("secret".into()),
            offline: false,
        }
    }

    pub(crate) fn client(&self, cache: &Path) -> Client {
        Client::new(self.settings(cache)).with_sleep(|_| {})
    }
}

pub(crate) fn repo() -> RepoId {
    RepoId::parse(REPO).unwrap()
}

/// A folder of this test's own, empty.
pub(crate) fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}

/// Large files are named by their SHA-256, small ones by a git hash, which here
/// only has its length.
pub(crate) fn etag(name: &str, bytes: &[u8]) -> String {
    let hash = sha256(bytes);
    if name.ends_with(".safetensors") {
        hash
    } else {
        hash[..40].to_owned()
    }
}

fn serve(stream: &TcpStream, state: &State, base: &str) {
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        let mut words = line.split_whitespace();
        let (method, path) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
        let mut headers = HashMap::new();
        loop {
            let mut header = String::new();
            reader.read_line(&mut header).unwrap();
            match header.trim().split_once(": ") {
                Some((name, value)) => headers.insert(name.to_lowercase(), value.to_owned()),
                None => break,
            };
        }
        let seen = Seen {
            method: method.to_owned(),
            path: path.to_owned(),
            headers,
        };
        state.seen.lock().unwrap().push(seen.clone());
        if !answer(stream, state, base, &seen) {
            return;
        }
    }
}

/// Answers; false if the connection is to be closed.
fn answer(mut stream: &TcpStream, state: &State, base: &str, seen: &Seen) -> bool {
    let mut send = |status: &str, headers: &str, body: &[u8], len: usize| {
        let head = format!("HTTP/1.1 {status}\r\nContent-Length: {len}\r\n{headers}\r\n");
        // A client that has seen enough may have gone.
        let _ = stream.write_all(head.as_bytes());
        if seen.method != "HEAD" {
            let _ = stream.write_all(body);
        }
        seen.method == "HEAD" || body.len() == len
    };
    let fault = *state.fault.lock().unwrap();
    if seen.path.starts_with("/api/models/") {
        let siblings: Vec<String> = state
            .files
            .iter()
            .map(|(name, bytes)| format!(r#"{{"rfilename": "{name}", "size": {}}}"#, bytes.len()))
            .collect();
        let body = format!(
            r#"{{"sha": "{COMMIT}", "siblings": [{}]}}"#,
            siblings.join(",")
        );
        return send("200 OK", "", body.as_bytes(), body.len());
    }
    let name = seen
        .path
        .rsplit_once(&format!("{COMMIT}/"))
        .map_or("", |(_, name)| name);
    let Some(bytes) = state.files.get(name) else {
        return send("404 Not Found", "", b"", 0);
    };
    if let Fault::Status(status, times) = fault {
        let mut refused = state.refused.lock().unwrap();
        if *refused < times {
            *refused += 1;
            return send(&format!("{status} No"), "Retry-After: 0\r\n", b"", 0);
        }
    }
    if fault == Fault::Redirect && seen.method == "GET" && !seen.path.starts_with("/cdn") {
        // Another name of this machine: another host.
        let elsewhere = base.replace("127.0.0.1", "localhost");
        let location = format!("Location: {elsewhere}/cdn{}\r\n", seen.path);
        return send("302 Found", &location, b"", 0);
    }
    if let (Fault::RedirectsTo(place), "GET") = (fault, &*seen.method) {
        return send("302 Found", &format!("Location: {place}\r\n"), b"", 0);
    }
    let name = match fault {
        Fault::NamedSo(name) => name.to_owned(),
        _ => etag(name, bytes),
    };
    let mut tag = format!("ETag: \"{name}\"\r\n");
    if fault == Fault::NoSuchSize {
        tag += &format!("X-Linked-Size: {}\r\n", u64::MAX);
    }
    let other: Vec<u8> = bytes.iter().map(|b| !b).collect();
    let bytes = if fault == Fault::OtherContents {
        &other
    } else {
        bytes
    };
    let range = seen
        .headers
        .get("range")
        .filter(|_| !matches!(fault, Fault::NoRanges | Fault::NoRangesAndBreaksOff(_)));
    let (status, begin, end) = match range.and_then(|r| r.strip_prefix("bytes=")?.split_once('-')) {
        None => ("200 OK", 0, bytes.len()),
        Some((begin, end)) => {
            let begin: usize = begin.parse().unwrap();
            let end = end
                .parse::<usize>()
                .map_or(bytes.len(), |e| bytes.len().min(e + 1));
            if begin >= end {
                return send("416 No", "", b"", 0);
            }
            ("206 Partial Content", begin, end)
        }
    };
    let said = begin + usize::from(fault == Fault::WrongRange);
    let place = format!(
        "Content-Range: bytes {said}-{}/{}\r\n",
        end - 1,
        bytes.len()
    );
    let body = &bytes[begin..end];
    match fault {
        Fault::BreaksOff(n) | Fault::NoRangesAndBreaksOff(n) => send(
            status,
            &(tag + &place),
            &body[..n.min(body.len())],
            body.len(),
        ),
        Fault::TooLong => send(status, &(tag + &place), body, body.len() + 10),
        _ => send(status, &(tag + &place), body, body.len()),
    }
}
