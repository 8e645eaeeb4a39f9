//! `paceline doctor`, and a dry run of `serve`.

use crate::{WITH_MTP, folder, good, paceline};
use serde_json::Value;

#[test]
fn the_doctor_and_a_dry_run_look_without_touching() {
    let folder = folder("doctor");
    let alone = |args: &[&str]| {
        let mut command = paceline(&folder, args);
        command.env("XDG_CACHE_HOME", &folder);
        good(command)
    };
    alone(&["inspect", "-m", WITH_MTP]);
    let (stdout, _) = alone(&["doctor", "--json"]);
    let record: Value = serde_json::from_str(&stdout).unwrap();
    let cases = record["self_test"].as_array().unwrap();
    assert!(
        cases.len() > 10 && cases.iter().all(|c| c["failure"].is_null()),
        "{record:#}"
    );
    let entries = |name: &str| record[name].as_array().map_or(0, Vec::len);
    // Where there is no GPU to test, the reason stands in its place.
    assert!(entries("gpus") + entries("gpus_not_used") > 0, "{record:#}");
    assert_eq!(record["hub"]["models"], 0);
    let (stdout, _) = alone(&["doctor"]);
    let lines = stdout.lines().filter(|l| l.starts_with("gpu "));
    assert_eq!(lines.count(), entries("gpus") + entries("gpus_not_used"));
    assert!(
        stdout.contains(&format!("{0} of {0} cases hold", cases.len()))
            && stdout.contains("not pinned to cores"),
        "{stdout}"
    );
    let trials = record["preflight"]["results"].as_array().unwrap();
    let trial = &trials[0];
    assert_eq!((trials.len(), &trial["model"]), (1, &WITH_MTP.into()));
    let guesses = &trial["guesses"];
    assert_eq!(
        (&trial["drafter"], &trial["rows"]),
        (&"mtp".into(), &"exact".into())
    );
    assert_eq!(trial["target_sha256"].as_str().map(str::len), Some(64));
    let line = format!(
        "{} {WITH_MTP} with mtp on {}: rows exact, chain exact, {} of {} first guesses accepted, \
         expected at least 30 %",
        trial["tried"].as_str().unwrap(),
        trial["backend"].as_str().unwrap(),
        guesses["accepted"],
        guesses["drafted"]
    );
    assert!(stdout.contains(&line), "{line}: {stdout}");

    assert!(
        stdout.contains("weights        read as by default"),
        "{stdout}"
    );
    assert!(record["processor"]["tuning"].is_null(), "{record:#}");

    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let (stdout, _) = good(paceline(&folder, &["serve", "--dry-run", "--port", &port]));
    for words in [
        "drafter assistant",
        "in all for 4 requests at once",
        "would listen on 127.0.0.1",
    ] {
        assert!(stdout.contains(words), "{words}: {stdout}");
    }
}

/// What is measured depends on the machine and what else runs; what is shown is what is kept.
#[test]
fn the_doctor_measures_how_the_cpu_reads_weights_and_remembers_it() {
    let folder = folder("recalibrate");
    let tuning = |args: &[&str]| {
        let mut command = paceline(&folder, args);
        command.env("XDG_CACHE_HOME", &folder);
        let (stdout, _) = good(command);
        let record: Value = serde_json::from_str(&stdout).unwrap();
        record["processor"]["tuning"].clone()
    };
    let measured = tuning(&["doctor", "--json", "--recalibrate"]);
    assert_eq!(tuning(&["doctor", "--json"]), measured, "remembered");
    let file = folder.join("paceline").join("cpu-tuning.json");
    // A busy machine keeps nothing.
    assert_eq!(file.exists(), !measured.is_null());
    if measured.is_null() {
        return;
    }
    let kinds = measured["kinds"].as_array().unwrap();
    let names: Vec<&str> = kinds.iter().filter_map(|of| of["kind"].as_str()).collect();
    assert_eq!(names, ["levels4", "affine4", "codes8", "plain"]);
    for of in kinds {
        let panels = of["reads"]["panels"].as_u64().unwrap();
        assert!([2, 4, 8].contains(&panels), "{of}");
        assert!(of["share"].as_f64().unwrap() > 0.0, "{of}");
    }
    std::fs::write(&file, "no JSON").unwrap();
    assert!(tuning(&["doctor", "--json"]).is_null(), "measured anew");
}
