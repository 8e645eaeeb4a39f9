//! The command line as users meet it: exit codes, what goes to which stream,
//! and messages. One file a command; what several of them need is here.
//!
//! `--help` and the shape of `--json` are snapshots in `tests/snapshots`;
//! `UPDATE_SNAPSHOTS=1 cargo test -p paceline` writes them anew.

mod bench;
mod chat;
mod command_line;
mod config;
mod conformance;
mod convert;
mod doctor;
mod drafters;
mod form;
#[path = "../../../hub/tests/it/server.rs"]
#[allow(dead_code, reason = "not every fault of the test's hub is needed here")]
mod hub_server;
mod inspect;
mod media;
#[cfg(target_os = "linux")]
mod memory;
mod perplexity;
mod pictures;
#[path = "../../../../tests/src/projector.rs"]
#[allow(unreachable_pub, reason = "other suites have it from a crate")]
mod projector;
mod pull;
mod run;
mod serve;
#[cfg(unix)]
mod servers;
mod trace;

use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

/// A bundled target with an assistant beside it.
const WITH_ASSISTANT: &str = "tiny-gemma4";
/// The name of that assistant.
const ASSISTANT: &str = "tiny-gemma4-assistant";

/// A bundled target with an MTP head in it.
const WITH_MTP: &str = "tiny-qwen3.5";

const PROMPT: &str = "Tell me a story about a rabbit and a kite.";

/// A folder of this test's own, empty.
fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

/// The binary with `args`, where nothing of the user's own is in its way.
fn paceline(folder: &Path, args: &[&str]) -> Command {
    let mut command = alone(Command::new(env!("CARGO_BIN_EXE_paceline")), folder);
    command.args(args);
    command
}

/// The command in `folder`, where nothing of the user's own is in its way.
fn alone(mut command: Command, folder: &Path) -> Command {
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("PACELINE_") || text.starts_with("HF_") {
            command.env_remove(name);
        }
    }
    command
        .current_dir(folder)
        .env("HOME", folder)
        .env("XDG_CONFIG_HOME", folder)
        .env("XDG_DATA_HOME", folder)
        // Of all tests together: each model is tried once.
        .env(
            "XDG_CACHE_HOME",
            Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"),
        )
        .env("HF_HOME", folder.join("hf"))
        .env("XDG_STATE_HOME", folder)
        .stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs to a good end; returns stdout and stderr.
fn good(mut command: Command) -> (String, String) {
    let output = command.output().unwrap();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{command:?}\n{stdout}\n{stderr}");
    (stdout, stderr)
}

/// Runs to a failure that is one line; returns that line.
fn bad(mut command: Command) -> String {
    let output = command.output().unwrap();
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{command:?}\n{stderr}");
    let line = stderr.strip_suffix('\n').unwrap();
    assert!(
        !line.contains('\n') && line.starts_with("paceline: "),
        "{stderr}"
    );
    line.to_owned()
}

fn feed(mut command: Command, input: &str) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that fails early has closed its end.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

fn snapshot(name: &str, found: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/snapshots")
        .join(name);
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, found).unwrap();
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    assert!(found == expected, "{name} differs:\n{found}");
}

fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../models")
        .canonicalize()
        .unwrap()
}

/// The files of a bundled model.
fn files(model: &str) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(models().join(model)).unwrap();
    let file = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().unwrap();
        (name, fs::read(entry.path()).unwrap())
    };
    entries.map(|entry| file(entry.unwrap())).collect()
}

/// A copy of a bundled model that may be damaged.
fn copy(folder: &Path, model: &str) -> PathBuf {
    let to = folder.join(model);
    fs::create_dir_all(&to).unwrap();
    for (name, bytes) in files(model) {
        fs::write(to.join(name), bytes).unwrap();
    }
    to
}

/// Replaces `from` by `to`, of equal length, in the header of a checkpoint.
fn rename_tensors(model: &Path, from: &str, to: &str) {
    let path = model.join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = text(&bytes[8..end]).replace(from, to);
    bytes[8..end].copy_from_slice(header.as_bytes());
    fs::write(path, bytes).unwrap();
}

fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

fn run_json(folder: &Path, args: &[&str]) -> Value {
    let (stdout, _) = good(paceline(folder, &[&["run", "--json"], args].concat()));
    assert_eq!(stdout.lines().count(), 1);
    serde_json::from_str(&stdout).unwrap()
}

#[cfg(unix)]
fn signal(child: &Child, name: &str) {
    let id = child.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-s", name, &id])
            .status()
            .unwrap()
            .success()
    );
}

/// A running server, ended with the test.
struct Server {
    child: Child,
    address: String,
    stderr: Box<dyn BufRead>,
}

impl Server {
    fn start(folder: &Path, args: &[&str]) -> Server {
        Server::spawn(paceline(
            folder,
            &[&["serve", "--port", "0"], args].concat(),
        ))
    }

    fn spawn(mut command: Command) -> Server {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let address = loop {
            let mut line = String::new();
            assert!(
                stderr.read_line(&mut line).unwrap() > 0,
                "the server says where it is"
            );
            if let Some((_, rest)) = line.split_once("base URL: http://") {
                break rest.trim_end().trim_end_matches("/v1").to_owned();
            }
        };
        Server {
            child,
            address,
            stderr: Box::new(stderr),
        }
    }

    fn post(&self, path: &str, headers: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        let (address, n) = (&self.address, body.len());
        write!(stream, "POST {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Type: application/json\r\n{headers}Content-Length: {n}\r\n\r\n{body}").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the model at `path` answers, in a few greedy tokens.
fn answer(folder: &Path, path: &str, more: &[&str]) -> String {
    let mut args = words("run -q --temperature 0 -n 12 -m");
    args.extend([path, "Tell me a story."]);
    args.extend(more);
    good(paceline(folder, &args)).0
}

/// Puts a bundled model into the hub cache under `id`; its snapshot.
fn cached(folder: &Path, id: &str, model: &str) -> PathBuf {
    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
    let root = folder
        .join("hf/hub")
        .join(format!("models--{}", id.replace('/', "--")));
    fs::create_dir_all(root.join("refs")).unwrap();
    fs::write(root.join("refs/main"), COMMIT).unwrap();
    let (snapshot, blobs) = (root.join("snapshots").join(COMMIT), root.join("blobs"));
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(&blobs).unwrap();
    for (name, bytes) in files(model) {
        fs::write(blobs.join(&name), bytes).unwrap();
        let blob = Path::new("../../blobs").join(&name);
        std::os::unix::fs::symlink(blob, snapshot.join(name)).unwrap();
    }
    snapshot
}
