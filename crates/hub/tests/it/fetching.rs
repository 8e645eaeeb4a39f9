//! Files into the cache.

use crate::server::{COMMIT, Fault, Hub, REPO, Seen, etag, folder, repo};
use hub::{Cache, Client, HubError, Incomplete, is_model_file};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, SystemTime};

const WEIGHTS: &str = "model.safetensors";

fn weights() -> Vec<u8> {
    (0..300_000u32)
        .flat_map(|i| (i * 7).to_le_bytes())
        .collect()
}

fn files() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("config.json", br#"{"model_type": "tiny"}"#.to_vec()),
        (WEIGHTS, weights()),
        ("sub/more.json", b"{}".to_vec()),
        ("README.md", b"a card".to_vec()),
        ("pytorch_model.bin", b"other weights".to_vec()),
        (
            "original/consolidated.safetensors",
            b"the same again".to_vec(),
        ),
    ]
}

fn pull(client: &Client) -> Result<PathBuf, HubError> {
    let info = client.info(&repo(), "main")?;
    let mut files = info.files.clone();
    files.retain(|f| is_model_file(&f.name));
    client.fetch(&repo(), "main", &info, &files, &mut |_| {})
}

fn blob(cache: &Path, name: &str) -> PathBuf {
    let bytes = files().into_iter().find(|(n, _)| *n == name).unwrap().1;
    cache
        .join("models--org--model/blobs")
        .join(etag(name, &bytes))
}

#[test]
fn a_model_arrives_in_the_layout_of_other_tools() {
    let (hub, cache) = (Hub::start(&files()), folder("arrives"));
    let mut last = (0, 0);
    let client = hub.client(&cache);
    let info = client.info(&repo(), "main").unwrap();
    assert_eq!((info.commit.as_str(), info.files.len()), (COMMIT, 6));
    let wanted: Vec<_> = info
        .files
        .iter()
        .filter(|f| is_model_file(&f.name))
        .cloned()
        .collect();
    let snapshot = client
        .fetch(&repo(), "main", &info, &wanted, &mut |p| {
            if p.file == WEIGHTS {
                assert!(p.done >= last.0 && p.done <= p.total);
                last = (p.done, p.total);
            }
        })
        .unwrap();
    assert_eq!(last, (1_200_000, 1_200_000));
    let root = cache.join("models--org--model");
    assert_eq!(snapshot, root.join("snapshots").join(COMMIT));
    assert_eq!(fs::read_to_string(root.join("refs/main")).unwrap(), COMMIT);
    assert_eq!(fs::read(snapshot.join(WEIGHTS)).unwrap(), weights());
    let link = fs::read_link(snapshot.join("sub/more.json")).unwrap();
    assert_eq!(link, Path::new("../../../blobs").join(etag("", b"{}")));
    assert!(!snapshot.join("README.md").exists() && !snapshot.join("original").exists());
    let found = Cache::new(&cache).snapshot(&repo(), "main");
    assert_eq!(found, Some(snapshot.clone()));
    assert_eq!(
        Cache::new(&cache).incomplete(&repo(), found.as_deref()),
        None
    );

    // Once more asks for names, and fetches nothing.
    hub.set(Fault::None);
    assert_eq!(pull(&client).unwrap(), snapshot);
    assert!(
        hub.seen()
            .iter()
            .all(|s| s.method == "HEAD" || s.path.starts_with("/api"))
    );
    assert!(
        hub.seen()
            .iter()
            .all(|s| s.headers["authorization"] == "Bearer secret")
    );
}

#[test]
fn what_breaks_off_goes_on_where_it_stopped() {
    let (hub, cache) = (Hub::start(&files()), folder("breaks-off"));
    hub.set(Fault::BreaksOff(500_000));
    let snapshot = pull(&hub.client(&cache)).unwrap();
    assert_eq!(fs::read(snapshot.join(WEIGHTS)).unwrap(), weights());
    let begins: Vec<String> = hub
        .seen()
        .iter()
        .filter(|s| s.method == "GET" && s.path.ends_with(WEIGHTS))
        .map(|s| s.headers.get("range").cloned().unwrap_or_default())
        .collect();
    assert_eq!(
        begins,
        ["", "bytes=500000-1199999", "bytes=1000000-1199999"]
    );
}

#[test]
fn a_download_that_was_stopped_goes_on_in_the_next_run() {
    let (hub, cache) = (Hub::start(&files()), folder("stopped"));
    let part = blob(&cache, WEIGHTS).with_extension("incomplete");
    fs::create_dir_all(part.parent().unwrap()).unwrap();
    fs::write(&part, &weights()[..900_000]).unwrap();
    let found = Cache::new(&cache);
    assert_eq!(found.incomplete(&repo(), None), Some(Incomplete::Nothing));
    let snapshot = pull(&hub.client(&cache)).unwrap();
    assert_eq!(fs::read(snapshot.join(WEIGHTS)).unwrap(), weights());
    let asked = hub.seen().iter().any(|s| {
        s.headers
            .get("range")
            .is_some_and(|r| r == "bytes=900000-1199999")
    });
    assert!(asked && !part.exists());
    // Longer than the file: of another one, and no use.
    fs::remove_file(blob(&cache, WEIGHTS)).unwrap();
    fs::write(&part, vec![0; 1_300_000]).unwrap();
    pull(&hub.client(&cache)).unwrap();
    assert_eq!(fs::read(snapshot.join(WEIGHTS)).unwrap(), weights());
}

#[test]
fn a_server_without_ranges_sends_from_the_start() {
    let (hub, cache) = (Hub::start(&files()), folder("no-ranges"));
    let part = blob(&cache, WEIGHTS).with_extension("incomplete");
    fs::create_dir_all(part.parent().unwrap()).unwrap();
    fs::write(&part, &weights()[..900_000]).unwrap();
    hub.set(Fault::NoRanges);
    let snapshot = pull(&hub.client(&cache)).unwrap();
    assert_eq!(fs::read(snapshot.join(WEIGHTS)).unwrap(), weights());
}

#[test]
fn a_server_without_ranges_that_ends_files_early_is_not_asked_forever() {
    let (hub, cache) = (Hub::start(&files()), folder("no-ranges-early-end"));
    hub.set(Fault::NoRangesAndBreaksOff(500_000));
    let pauses = Arc::new(Mutex::new(Vec::new()));
    let noted = pauses.clone();
    let client = Client::new(hub.settings(&cache))
        .with_sleep(move |pause| noted.lock().unwrap().push(pause.as_secs()));
    let error = pull(&client).unwrap_err();
    let HubError::Stalled { reached, total, .. } = error else {
        panic!("{error}");
    };
    assert_eq!((reached, total), (500_000, 1_200_000));
    let error = error.to_string();
    assert!(error.contains("no further than byte 500000"), "{error}");
    assert!(error.contains("ignores range requests"), "{error}");
    // The first try makes progress, five more make none.
    let is_asked = |s: &&Seen| s.method == "GET" && s.path.ends_with(WEIGHTS);
    assert_eq!(hub.seen().iter().filter(is_asked).count(), 6);
    assert_eq!(*pauses.lock().unwrap(), [1, 2, 4, 8, 16]);
}

#[test]
fn pulls_at_the_same_time_wait_for_each_other() {
    let (hub, cache) = (Hub::start(&files()), folder("at-once"));
    let lock = cache.join(".locks/models--org--model");
    fs::create_dir_all(&lock).unwrap();
    let lock = lock.join(format!("{}.lock", etag(WEIGHTS, &weights())));
    let other = fs::File::create(lock).unwrap();
    other.lock().unwrap();
    let (say, said) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let pulls: Vec<_> = (0..4)
            .map(|_| {
                let say = say.clone();
                let client = hub.client(&cache);
                let client = client.with_notice(move |line| say.send(line.to_owned()).unwrap());
                scope.spawn(move || pull(&client).map_err(|e| e.to_string()))
            })
            .collect();
        // Small files may make one wait for another too.
        let mut waiting = 0;
        while waiting < 4 {
            let line = said.recv_timeout(Duration::from_secs(60)).unwrap();
            let (begin, what) = line.split_once(" of ").unwrap();
            assert_eq!(begin, "waiting for another paceline pull");
            waiting += usize::from(what == "`model.safetensors` of `org/model`");
        }
        drop(other);
        for pull in pulls {
            let snapshot = pull.join().unwrap().unwrap();
            assert_eq!(fs::read(snapshot.join(WEIGHTS)).unwrap(), weights());
        }
    });
    let is_asked = |s: &&Seen| s.method == "GET" && s.path.ends_with(WEIGHTS);
    assert_eq!(hub.seen().iter().filter(is_asked).count(), 1);
}

#[test]
fn a_pull_of_what_is_there_writes_nothing() {
    let (hub, cache) = (Hub::start(&files()), folder("read-only"));
    let snapshot = pull(&hub.client(&cache)).unwrap();
    let name = cache.join("models--org--model/refs/main");
    // Root may write anywhere, so the time of the file shows it.
    let file = fs::File::options().write(true).open(&name).unwrap();
    file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
    fs::remove_dir_all(cache.join(".locks")).unwrap();
    assert_eq!(pull(&hub.client(&cache)).unwrap(), snapshot);
    let time = name.metadata().unwrap().modified().unwrap();
    assert_eq!(time, SystemTime::UNIX_EPOCH);
    assert!(!cache.join(".locks").exists());
}

#[test]
fn a_long_redirect_is_not_printed_whole() {
    static PLACE: LazyLock<String> = LazyLock::new(|| format!("gopher://{}", "a".repeat(60_000)));
    let (hub, cache) = (Hub::start(&files()), folder("long-redirect"));
    for place in [&*PLACE, "http://a\u{202e}b\u{1b}[2J/"] {
        hub.set(Fault::RedirectsTo(place));
        let error = pull(&hub.client(&cache)).unwrap_err().to_string();
        assert!(error.chars().count() < 600, "{error}");
        assert!(!error.contains(['\u{1b}', '\u{202e}']), "{error:?}");
    }
}

#[test]
fn lies_are_found_and_nothing_wrong_stays() {
    let hub = Hub::start(&files());
    for (name, fault, words) in [
        (
            "other",
            Fault::OtherContents,
            "other contents than announced",
        ),
        (
            "wrong-range",
            Fault::WrongRange,
            "another range than asked for",
        ),
        (
            "too-long",
            Fault::TooLong,
            "the file is shorter than announced",
        ),
        ("no-such-size", Fault::NoSuchSize, "an impossible one"),
        (
            "named-outside",
            Fault::NamedSo("../../../refs/main"),
            "its ETag is not a valid file name",
        ),
        (
            "long-name",
            Fault::NamedSo(concat!(
                "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
                "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdefX",
            )),
            "its ETag is not a valid file name",
        ),
        (
            "no-name",
            Fault::NamedSo(""),
            "its ETag is not a valid file name",
        ),
        (
            "to-a-file",
            Fault::RedirectsTo("file:///etc/passwd"),
            "a redirect leads to `file:///etc/passwd`",
        ),
        (
            "to-no-scheme",
            Fault::RedirectsTo("//127.0.0.1/x"),
            "a redirect leads to `//127.0.0.1/x`",
        ),
        (
            "to-nowhere",
            Fault::RedirectsTo(""),
            "a redirect leads to ``",
        ),
    ] {
        let cache = folder(name);
        let part = blob(&cache, WEIGHTS).with_extension("incomplete");
        fs::create_dir_all(part.parent().unwrap()).unwrap();
        fs::write(&part, &weights()[..600_000]).unwrap();
        hub.set(fault);
        let error = pull(&hub.client(&cache)).unwrap_err().to_string();
        assert!(error.contains(words), "{name}: {error}");
        assert!(!blob(&cache, WEIGHTS).exists(), "{name}");
    }
}

#[test]
fn refusals_say_what_to_do() {
    let (hub, cache) = (Hub::start(&files()), folder("refusals"));
    for (status, words) in [
        (401, "the token in HF_TOKEN does not give access"),
        (403, "accept its terms"),
        (404, "the hub has no `config.json` of `org/model`"),
        (410, "answered 410"),
    ] {
        hub.set(Fault::Status(status, usize::MAX));
        let error = pull(&hub.client(&cache)).unwrap_err().to_string();
        assert!(error.contains(words), "{status}: {error}");
        assert_eq!(hub.seen().len(), 2, "{status} is not asked again");
    }
    for status in [429, 503] {
        hub.set(Fault::Status(status, usize::MAX));
        let error = pull(&hub.client(&cache)).unwrap_err().to_string();
        assert!(
            error.contains(&format!("answered {status}")) && error.contains("5 requests"),
            "{error}"
        );
        hub.set(Fault::Status(status, 3));
        pull(&hub.client(&cache)).unwrap();
        Cache::new(&cache).remove(&repo()).unwrap().unwrap();
    }
    let mut anonymous = hub.settings(&cache);
    anonymous.token = None;
    hub.set(Fault::Status(401, usize::MAX));
    let error = pull(&Client::new(anonymous)).unwrap_err().to_string();
    assert!(error.contains("set HF_TOKEN"), "{error}");
}

#[test]
fn a_redirect_takes_no_token_along() {
    let (hub, cache) = (Hub::start(&files()), folder("redirect"));
    hub.set(Fault::Redirect);
    let snapshot = pull(&hub.client(&cache)).unwrap();
    assert_eq!(fs::read(snapshot.join(WEIGHTS)).unwrap(), weights());
    let (away, home): (Vec<_>, Vec<_>) = hub
        .seen()
        .into_iter()
        .partition(|s| s.path.starts_with("/cdn"));
    assert_eq!(away.len(), 3);
    assert!(
        away.iter()
            .all(|s| !s.headers.contains_key("authorization"))
    );
    assert!(home.iter().all(|s| s.headers.contains_key("authorization")));
}

#[test]
fn offline_asks_nobody() {
    let (hub, cache) = (Hub::start(&files()), folder("offline"));
    let mut settings = hub.settings(&cache);
    settings.offline = true;
    hub.set(Fault::None);
    let error = pull(&Client::new(settings)).unwrap_err().to_string();
    assert!(
        error.contains("HF_HUB_OFFLINE") && error.contains(REPO),
        "{error}"
    );
    assert!(hub.seen().is_empty());
}

#[test]
fn a_file_that_is_gone_makes_a_snapshot_incomplete() {
    let (hub, cache) = (Hub::start(&files()), folder("gone"));
    let snapshot = pull(&hub.client(&cache)).unwrap();
    let found = Cache::new(&cache);
    let index = r#"{"weight_map": {"a": "model.safetensors", "b": "second.safetensors"}}"#;
    let path = snapshot.join("model.safetensors.index.json");
    fs::write(&path, index).unwrap();
    let missing = |file: &str| Some(Incomplete::Missing(file.into()));
    assert_eq!(
        found.incomplete(&repo(), Some(&snapshot)),
        missing("second.safetensors")
    );
    fs::remove_file(path).unwrap();
    fs::remove_file(blob(&cache, WEIGHTS)).unwrap();
    assert_eq!(found.incomplete(&repo(), Some(&snapshot)), missing(WEIGHTS));
    let listed = found.list().unwrap();
    assert_eq!((listed.len(), &*listed[0].id), (1, REPO));
    assert_eq!(listed[0].incomplete, missing(WEIGHTS));
    assert!(found.remove(&repo()).unwrap().is_some());
    assert!(found.list().unwrap().is_empty() && found.remove(&repo()).unwrap().is_none());
}
