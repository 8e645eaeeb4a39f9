//! `paceline conformance`.

use crate::{ASSISTANT, WITH_ASSISTANT, WITH_MTP, bad, folder, good, models, paceline, text};
use serde_json::Value;

/// The report of a quick run, and its exit code.
fn quick(name: &str, model: &str, more: &[&str]) -> (Value, Option<i32>) {
    let folder = folder(name);
    let args = [
        "conformance",
        "-q",
        "--quick",
        "--json",
        "--device",
        "cpu",
        "-m",
        model,
    ];
    let output = paceline(&folder, &[&args, more].concat()).output().unwrap();
    let report = serde_json::from_slice(&output.stdout);
    let report = report.unwrap_or_else(|_| panic!("{}", text(&output.stderr)));
    (report, output.status.code())
}

#[test]
fn speculation_changes_nothing_of_a_bundled_model() {
    let (report, code) = quick("conformance", WITH_ASSISTANT, &["--draft", "assistant"]);
    let counts = &report["counts"];
    assert_eq!(code, Some(0), "{report}");
    let cells = report["cells"].as_array().unwrap();
    // 14 features, greedy and sampled, with the assistant, with n-grams, and with both.
    assert_eq!(cells.len(), 14 * 2 * 3);
    assert_eq!(counts["cells"], cells.len());
    assert_eq!(counts["differ"], 0);
    for label in ["assistant", "assistant+ngram", "ngram"] {
        assert!(cells.iter().any(|cell| cell["drafter"] == label), "{label}");
    }
    for cell in cells {
        let is_proved = cell["result"] == "equal" && cell["drafted"].as_u64() > Some(0);
        assert!(is_proved || cell["result"] == "not_applicable", "{cell}");
    }
    // What was named is what was found.
    assert_eq!(report["drafters"].as_array().unwrap().len(), 3);
}

#[test]
fn heads_that_are_joined_all_draft_and_change_nothing() {
    let dspark = format!("dspark:{}", models().join("tiny-qwen3.5-dspark").display());
    let draft = format!("mtp+{dspark}+ngram");
    let (report, code) = quick("conformance-joined", WITH_MTP, &["--draft", &draft]);
    assert_eq!(code, Some(0), "{report}");
    let cells = report["cells"].as_array().unwrap();
    let joined = cells
        .iter()
        .filter(|cell| cell["drafter"] == "mtp+dspark+ngram");
    let joined: Vec<&Value> = joined.collect();
    assert_eq!(joined.len(), 14 * 2);
    for cell in joined {
        let drafted = |name: &str| {
            let all = cell["by_drafter"].as_array().unwrap();
            let own = all.iter().find(|of| of["drafter"] == name);
            own.map_or(0, |of| of["drafted"].as_u64().unwrap())
        };
        let both = drafted("mtp") > 0 && drafted("dspark") > 0;
        assert!(both || cell["result"] == "not_applicable", "{cell}");
    }
    let mut guesses = cells
        .iter()
        .flat_map(|cell| cell["by_drafter"].as_array().unwrap());
    assert!(guesses.any(|of| of["drafter"] == "ngram"), "{report}");
    let named = report["drafters"].as_array().unwrap();
    let named: Vec<&Value> = named.iter().filter(|of| of["named"] == true).collect();
    assert_eq!(named.len(), 1);
    assert_eq!(named[0]["label"], "mtp+dspark+ngram");
}

#[test]
fn an_acceptance_rule_that_changes_texts_is_found_out() {
    let (report, code) = quick(
        "conformance-residual",
        WITH_ASSISTANT,
        &["--accept", "residual"],
    );
    assert_eq!(code, Some(1));
    let cells = report["cells"].as_array().unwrap();
    let differ = |mode: &str| {
        let of = cells.iter().filter(|cell| cell["mode"] == mode);
        of.filter(|cell| cell["result"] == "differs").count()
    };
    assert_eq!(differ("greedy"), 0, "{report}");
    assert!(differ("sampled") > 0, "{report}");
    assert_eq!(report["counts"]["differ"], differ("sampled"));
}

#[test]
fn a_drafter_that_is_named_must_be_there() {
    let folder = folder("conformance-missing");
    let args = ["conformance", "-q", "--draft", "eagle3:nowhere"];
    let line = bad(paceline(&folder, &args));
    assert!(line.contains("no such drafter: `nowhere`"), "{line}");
    // An assistant is no EAGLE-3 head.
    let wrong = format!("eagle3:{ASSISTANT}");
    let line = bad(paceline(&folder, &["conformance", "-q", "--draft", &wrong]));
    assert!(line.contains("`eagle3` cannot draft"), "{line}");
    let (help, _) = good(paceline(&folder, &["conformance", "--help"]));
    assert!(help.contains("--quick"));
}
