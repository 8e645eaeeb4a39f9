//! `paceline pull` and the hub cache: what is fetched, found and refused.

use crate::{
    ASSISTANT, PROMPT, WITH_ASSISTANT, WITH_MTP, bad, cached, copy, files, folder, good,
    hub_server, paceline, rename_tensors, run_json, words,
};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;

#[test]
fn the_hub_cache_is_searched_for_models_and_drafters() {
    let folder = folder("hub");
    let run = |args: &[&str]| run_json(&folder, &[&[PROMPT, "-n", "8"], args].concat());
    let bundled = run(&[]);
    cached(&folder, "org/some-model", WITH_ASSISTANT);
    let alone = run(&["-m", "org/some-model"]);
    assert_eq!(alone["text"], bundled["text"]);
    assert_eq!(alone["model"]["name"], "org/some-model");
    assert_eq!(alone["speculation"]["drafter"], "ngram");
    // A drafter is known by its configuration, wherever it lies.
    cached(&folder, "other/its-drafter", ASSISTANT);
    let both = run(&["-m", "org/some-model"]);
    assert_eq!(both["text"], bundled["text"]);
    assert_eq!(both["speculation"]["drafter"], "assistant");
    assert_eq!(
        both["model"]["drafter_reason"],
        "the assistant `other/its-drafter`"
    );
    let named = run(&words(
        "-m org/some-model --draft assistant:other/its-drafter",
    ));
    assert_eq!(named["speculation"]["drafter"], "assistant");

    let (stdout, _) = good(paceline(&folder, &["list", "--json"]));
    let list: Value = serde_json::from_str(&stdout).unwrap();
    let ids: Vec<&Value> = list["models"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| &m["id"])
        .collect();
    assert_eq!(ids, ["org/some-model", "other/its-drafter"]);
    let (stdout, _) = good(paceline(&folder, &["list"]));
    assert!(
        stdout.contains("  bundled  tiny-gemma4\n") && stdout.contains("  org/some-model\n"),
        "{stdout}"
    );

    good(paceline(&folder, &["rm", "other/its-drafter"]));
    assert!(bad(paceline(&folder, &["rm", "other/its-drafter"])).contains("is not in the cache"));
    assert!(bad(paceline(&folder, &["rm", "../x"])).contains("is not a repository name"));
    assert_eq!(
        run(&["-m", "org/some-model"])["speculation"]["drafter"],
        "ngram"
    );
}

#[test]
fn what_is_not_whole_in_the_hub_cache_is_named() {
    let folder = folder("hub-partial");
    let run = |name: &str| bad(paceline(&folder, &["run", PROMPT, "-m", name]));
    let error = run("google/gemma-4-E4B-it");
    assert!(
        error.contains("`paceline pull google/gemma-4-E4B-it` fetches it"),
        "{error}"
    );
    let snapshot = cached(&folder, "org/model", WITH_ASSISTANT);
    fs::remove_file(fs::canonicalize(snapshot.join("model.safetensors")).unwrap()).unwrap();
    let error = run("org/model");
    assert!(
        error.contains("incomplete: `model.safetensors` is missing"),
        "{error}"
    );
    let (stdout, _) = good(paceline(&folder, &["list"]));
    assert!(
        stdout.contains("org/model  (incomplete: `model.safetensors` is missing; `paceline pull org/model` resumes it)"),
        "{stdout}"
    );
    let mut offline = paceline(&folder, &["pull", "org/model"]);
    offline.env("HF_HUB_OFFLINE", "1");
    assert!(bad(offline).contains("HF_HUB_OFFLINE forbids"));
    let error = bad(paceline(&folder, &["pull", "no-name"]));
    assert!(
        error.contains("`no-name` is not a repository name: expected ORG/NAME"),
        "{error}"
    );
}

#[test]
fn what_is_pulled_runs() {
    let folder = folder("pull");
    let files = files(WITH_ASSISTANT);
    let files: Vec<(&str, Vec<u8>)> = files.iter().map(|(n, b)| (&**n, b.clone())).collect();
    let hub = hub_server::Hub::start(&files);
    let mut pull = paceline(&folder, &["pull", "org/model"]);
    pull.env("HF_ENDPOINT", hub.address());
    let (stdout, stderr) = good(pull);
    assert!(stdout.trim_end().ends_with(hub_server::COMMIT), "{stdout}");
    assert!(
        stderr.starts_with("org/model: ") && stderr.contains(" files, "),
        "{stderr}"
    );
    let record = run_json(&folder, &[PROMPT, "-n", "4", "-m", "org/model"]);
    assert_eq!(record["model"]["name"], "org/model");
    hub.set(hub_server::Fault::Status(404, usize::MAX));
    let mut pull = paceline(&folder, &["pull", "org/other", "--quiet"]);
    pull.env("HF_ENDPOINT", hub.address());
    assert!(bad(pull).contains("the hub has no `"));
}

#[test]
fn a_gguf_file_is_pulled_by_its_format_and_runs() {
    let folder = folder("pull-gguf");
    let file = folder.join("whole.gguf");
    let to = file.to_str().unwrap();
    good(paceline(
        &folder,
        &["convert", WITH_MTP, to, "--format", "gguf"],
    ));
    let whole = fs::read(&file).unwrap();
    let files = [
        ("tiny-Q4_0.gguf", whole.clone()),
        ("tiny-Q8_0.gguf", b"not fetched".to_vec()),
        ("mmproj-tiny.gguf", b"a tower".to_vec()),
    ];
    let hub = hub_server::Hub::start(&files);
    let pull = |name: &str| {
        let mut pull = paceline(&folder, &["pull", name, "--quiet"]);
        pull.env("HF_ENDPOINT", hub.address());
        pull
    };
    let (stdout, _) = good(pull("org/model:q4_0"));
    let path = PathBuf::from(stdout.trim_end());
    assert_eq!(fs::read(&path).unwrap(), whole);
    // With its tower, which stands beside it; without, if that is asked for.
    let beside = || {
        let files = fs::read_dir(path.parent().unwrap()).unwrap();
        let names = files.map(|f| f.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    };
    assert_eq!(beside(), ["mmproj-tiny.gguf", "tiny-Q4_0.gguf"]);
    fs::remove_file(path.with_file_name("mmproj-tiny.gguf")).unwrap();
    let mut bare = pull("org/model:q4_0");
    bare.arg("--no-mmproj");
    good(bare);
    assert_eq!(beside(), ["tiny-Q4_0.gguf"]);
    for name in ["org/model:Q4_0", "org/model"] {
        let record = run_json(&folder, &[PROMPT, "-n", "4", "-m", name]);
        assert_eq!(record["model"]["name"], "tiny-Q4_0.gguf");
    }
    let error = bad(pull("org/model:Q6_K"));
    assert!(
        error.contains("in the format `Q6_K`") && error.contains("`tiny-Q8_0`"),
        "{error}"
    );
    let error = bad(paceline(&folder, &["run", PROMPT, "-m", "org/model:Q8_0"]));
    assert!(error.contains("in the format `Q8_0`"), "{error}");
}

#[test]
fn the_head_of_the_original_drafts_for_a_stripped_conversion() {
    let folder = folder("pull-head");
    let files = files(WITH_MTP);
    let files: Vec<(&str, Vec<u8>)> = files.iter().map(|(n, b)| (&**n, b.clone())).collect();
    let hub = hub_server::Hub::start(&files);
    let stripped = folder.join("Qwen3.5-2B-4bit");
    fs::rename(copy(&folder, WITH_MTP), &stripped).unwrap();
    rename_tensors(&stripped, "\"mtp.", "\"old.");
    let run = || {
        run_json(
            &folder,
            &[PROMPT, "-n", "12", "-m", stripped.to_str().unwrap()],
        )
    };
    let before = run();
    assert_eq!(before["speculation"]["drafter"], "ngram");
    let mut pull = paceline(&folder, &["pull", "Qwen/Qwen3.5-2B", "--head-only"]);
    pull.env("HF_ENDPOINT", hub.address());
    good(pull);
    let after = run();
    assert_eq!(after["speculation"]["drafter"], "mtp");
    assert_eq!(
        after["model"]["drafter_reason"],
        "the MTP head `Qwen/Qwen3.5-2B`"
    );
    assert_eq!(after["text"], before["text"]);
    good(paceline(&folder, &["rm", "Qwen/Qwen3.5-2B"]));
    assert_eq!(run()["speculation"]["drafter"], "ngram");
}
