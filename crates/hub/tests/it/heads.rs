//! Only the draft head of a checkpoint.

use crate::server::{COMMIT, Fault, Hub, folder, repo};
use hub::HubError;
use std::fs;
use std::path::PathBuf;

/// A safetensors file of u8 tensors: name and bytes.
fn safetensors(tensors: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut entries, mut data) = (Vec::new(), Vec::new());
    for (name, bytes) in tensors {
        let begin = data.len();
        data.extend_from_slice(bytes);
        entries.push(format!(
            r#""{name}": {{"dtype": "U8", "shape": [{}], "data_offsets": [{begin}, {}]}}"#,
            bytes.len(),
            data.len()
        ));
    }
    let header = format!("{{{}}}", entries.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

const FC: &[u8] = &[1; 3000];
const NORM: &[u8] = &[2; 50];

/// An original in two shards; the head is in both, between other weights.
fn original() -> Vec<(&'static str, Vec<u8>)> {
    let trunk = vec![9u8; 400_000];
    let index = r#"{"weight_map": {
        "model.embed": "a.safetensors", "mtp.fc.weight": "a.safetensors",
        "model.norm": "b.safetensors", "mtp.norm.weight": "b.safetensors", "model.x": "c.safetensors"}}"#;
    vec![
        ("model.safetensors.index.json", index.as_bytes().to_vec()),
        (
            "a.safetensors",
            safetensors(&[("model.embed", &trunk), ("mtp.fc.weight", FC)]),
        ),
        (
            "b.safetensors",
            safetensors(&[("mtp.norm.weight", NORM), ("model.norm", &trunk)]),
        ),
        ("c.safetensors", safetensors(&[("model.x", &trunk)])),
    ]
}

fn fetch(hub: &Hub, name: &str) -> Result<PathBuf, HubError> {
    let root = folder(name);
    let client = hub.client(&root.join("cache"));
    let info = client.info(&repo(), "main")?;
    hub::head::fetch(&client, &repo(), &info, &root, &mut |p| {
        assert!(p.done <= p.total)
    })
}

#[test]
fn only_the_heads_bytes_are_fetched() {
    let hub = Hub::start(&original());
    let found = fetch(&hub, "head").unwrap();
    let file = fs::read(found.join("model.safetensors")).unwrap();
    let n = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&file[8..8 + n]).unwrap();
    assert_eq!(
        header.as_object().unwrap().len(),
        3,
        "two tensors and the metadata"
    );
    for (name, bytes) in [("mtp.fc.weight", FC), ("mtp.norm.weight", NORM)] {
        let offsets = &header[name]["data_offsets"];
        let at = |i: usize| 8 + n + offsets[i].as_u64().unwrap() as usize;
        assert_eq!(&file[at(0)..at(1)], bytes, "{name}");
    }
    let config = fs::read_to_string(found.join("config.json")).unwrap();
    assert!(
        config.contains("qwen3_5_mtp") && config.contains("org/model"),
        "{config}"
    );
    let ranges: Vec<(u64, u64)> = hub
        .seen()
        .iter()
        .filter_map(|s| {
            s.headers
                .get("range")?
                .strip_prefix("bytes=")?
                .split_once('-')
        })
        .map(|(a, b)| (a.parse().unwrap(), b.parse().unwrap()))
        .collect();
    let asked: u64 = ranges.iter().map(|(a, b)| b - a + 1).sum();
    assert!(asked < 5000, "{asked} bytes of {ranges:?}");
    assert!(
        hub.seen()
            .iter()
            .all(|s| !s.path.ends_with("c.safetensors"))
    );
}

#[test]
fn a_head_that_is_there_is_not_fetched_again() {
    let (hub, root) = (Hub::start(&original()), folder("head-twice"));
    let client = hub.client(&root.join("cache"));
    let info = client.info(&repo(), "main").unwrap();
    let fetch = || hub::head::fetch(&client, &repo(), &info, &root, &mut |_| {}).unwrap();
    let found = fetch();
    let weights = found.join("model.safetensors");
    let before = fs::read(&weights).unwrap();
    hub.set(Fault::None);
    assert_eq!(fetch(), found);
    assert!(hub.seen().is_empty(), "{:?}", hub.seen());
    // One of another commit is replaced.
    let config = found.join("config.json");
    let old = fs::read_to_string(&config).unwrap().replace(COMMIT, "old");
    fs::write(&config, old).unwrap();
    fs::write(&weights, "old").unwrap();
    fetch();
    assert_eq!(fs::read(&weights).unwrap(), before);
    assert!(fs::read_to_string(&config).unwrap().contains(COMMIT));
}

#[test]
fn a_head_that_breaks_off_arrives_whole() {
    let hub = Hub::start(&original());
    hub.set(Fault::BreaksOff(1000));
    let found = fetch(&hub, "head-breaks").unwrap();
    let file = fs::read(found.join("model.safetensors")).unwrap();
    assert!(file.ends_with(&[FC, NORM].concat()));
}

#[test]
fn a_head_that_cannot_be_had_leaves_nothing_that_loads() {
    let hub = Hub::start(&original());
    for (fault, words) in [
        (
            Fault::NoRanges,
            "sent the whole file although a range was asked for",
        ),
        (Fault::WrongRange, "another range"),
        (Fault::Status(404, usize::MAX), "the hub has no"),
        (Fault::Status(401, usize::MAX), "was denied (401)"),
        (Fault::Status(503, usize::MAX), "answered 503"),
    ] {
        hub.set(fault);
        let error = fetch(&hub, "head-refused").unwrap_err().to_string();
        assert!(error.contains(words), "{fault:?}: {error}");
        assert!(
            !folder("head-refused")
                .join("models--org--model/model.safetensors")
                .exists()
        );
    }
    let stripped = Hub::start(&[("model.safetensors", safetensors(&[("model.x", &[1, 2])]))]);
    let error = fetch(&stripped, "head-none").unwrap_err().to_string();
    assert_eq!(
        error,
        "`org/model` has no MTP head (`mtp.*` tensors): conversions drop it, so name the original model"
    );
}

#[test]
fn headers_of_strangers_are_errors() {
    let with_header = |header: &str| {
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend([0; 64]);
        file
    };
    let entry = |a: u64, b: u64| {
        format!(r#"{{"mtp.x": {{"dtype": "U8", "shape": [1], "data_offsets": [{a}, {b}]}}}}"#)
    };
    for (file, words) in [
        (
            u64::MAX.to_le_bytes().to_vec(),
            "a header of 18446744073709551615 bytes",
        ),
        (with_header("{"), "is invalid"),
        (with_header(&entry(5, 1)), "lies nowhere"),
        (with_header(&entry(1, u64::MAX)), "lies nowhere"),
        (with_header(&entry(1, 1 << 50)), "lies nowhere"),
        (with_header(r#"{"mtp.x": 3}"#), "is invalid"),
        (vec![1, 2, 3], ""),
    ] {
        let hub = Hub::start(&[("model.safetensors", file)]);
        let error = fetch(&hub, "head-hostile").unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}
