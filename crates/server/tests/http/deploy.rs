//! The rules, dashboards and manifests in `deploy/` name only metrics that the server has.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::client::{Server, Setup};

/// The names of metrics in `text`: a prefix of ours, then a word with an underscore, which
/// neither the tag of an image nor a port has.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for prefix in ["vllm:", "paceline:"] {
        for (start, _) in text.match_indices(prefix) {
            let word: String = text[start + prefix.len()..]
                .chars()
                .take_while(|c| c.is_ascii_alphanumeric() || *c == '_')
                .collect();
            if word.contains('_') {
                names.insert(format!("{prefix}{word}"));
            }
        }
    }
    names
}

/// Every file under `folder`.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.push(path);
        }
    }
    found
}

#[tokio::test]
async fn every_metric_named_in_deploy_is_on_the_page() {
    let server = Server::start(Setup::default()).await;
    let page = server.get("/metrics").await.body;
    let is_served = |name: &str| {
        let is_typed = |name: &str| page.contains(&format!("# TYPE {name} "));
        is_typed(name)
            || ["_bucket", "_sum", "_count"]
                .iter()
                .any(|part| name.strip_suffix(part).is_some_and(is_typed))
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
    let mut seen = BTreeSet::new();
    for file in files(&folder) {
        let names = metrics_in(&fs::read_to_string(&file).unwrap());
        for name in &names {
            assert!(is_served(name), "{}: no metric {name}", file.display());
        }
        seen.extend(names);
    }
    for name in [
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "paceline:http_responses_total",
    ] {
        assert!(seen.contains(name), "{name} is used nowhere in deploy/");
    }
}
