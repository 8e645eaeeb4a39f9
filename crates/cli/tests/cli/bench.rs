//! `paceline bench`.

use crate::{WITH_ASSISTANT, WITH_MTP, bad, folder, good, paceline, text};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

#[test]
fn rows_have_their_rates_and_chosen_lengths_are_set_against_fixed_ones() {
    let folder = folder("bench");
    let args = [
        "bench",
        "-q",
        "--no-steps",
        "--no-probe",
        "--device",
        "cpu",
        "-m",
        WITH_MTP,
        "--draft-lengths",
        "0,2,auto",
        "--max-tokens",
        "8",
    ];
    let output = paceline(&folder, &[&args[..], &["--json"]].concat()).output();
    let output = output.unwrap();
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{}", text(&output.stderr)));
    let runs = report["runs"].as_array().unwrap();
    for class in ["story", "chat", "exact", "random", "all"] {
        let own: Vec<&Value> = runs.iter().filter(|run| run["class"] == class).collect();
        assert_eq!(own.len(), 3, "a row for each draft length: {class}");
        for (run, draft) in own.iter().zip([Value::from(0), 2.into(), "auto".into()]) {
            assert_eq!(run["draft"], draft);
            assert!(run["first_token_ms"].as_f64().unwrap() > 0.0, "{run}");
            assert!(run["tokens"].as_u64().unwrap() > 0, "{run}");
            let temperature = if class == "random" { 1.5 } else { 0.0 };
            assert_eq!(run["temperature"], temperature, "{run}");
        }
        let summaries = report["summary"].as_array().unwrap().iter();
        let own: Vec<&Value> = summaries.filter(|s| s["class"] == class).collect();
        assert_eq!(own.len(), 1, "{class}");
        for name in ["auto_over_best_fixed", "auto_over_none"] {
            assert!(own[0][name].as_f64().unwrap() > 0.0, "{}", own[0]);
        }
    }
    // Random texts end at the limit alone, and are not part of the sum.
    let tokens = |class: &str| -> u64 {
        let own = runs
            .iter()
            .filter(|run| run["class"] == class && run["draft"] == 0);
        own.map(|run| run["tokens"].as_u64().unwrap()).sum()
    };
    assert_eq!(tokens("random"), 3 * 8);
    assert_eq!(
        tokens("all"),
        tokens("story") + tokens("chat") + tokens("exact")
    );
}

/// The report of short texts along some axes.
fn axes(folder: &Path, model: &str, more: &[&str]) -> Value {
    let args = [
        "bench",
        "-q",
        "--json",
        "--no-steps",
        "--no-probe",
        "--device",
        "cpu",
        "-m",
        model,
        "--max-tokens",
        "40",
    ];
    let (stdout, _) = good(paceline(folder, &[&args, more].concat()));
    serde_json::from_str(&stdout).unwrap()
}

/// The rows of a report at this place on the axes.
fn rows_at<'a>(report: &'a Value, (context, kv, batch): (usize, &str, usize)) -> Vec<&'a Value> {
    let rows = report["axes"]["rows"].as_array().unwrap().iter();
    let is_at =
        |row: &&Value| row["context"] == context && row["kv_format"] == kv && row["batch"] == batch;
    rows.filter(is_at).collect()
}

fn count(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value}"))
}

#[test]
fn every_cell_of_the_axes_has_its_rows() {
    let folder = folder("axes");
    for model in [WITH_MTP, WITH_ASSISTANT] {
        let report = axes(
            &folder,
            model,
            &[
                "--contexts",
                "64,300",
                "--kv-formats",
                "bf16,q8_0+q4_0",
                "--batch",
                "1,2",
                "--draft-lengths",
                "0,2,auto",
            ],
        );
        let all = &report["axes"];
        assert_eq!(all["rows"].as_array().unwrap().len(), 2 * 2 * 2 * 3);
        assert_eq!(all["summary"].as_array().unwrap().len(), 2 * 2 * 2);
        assert_eq!(
            (&report["runs"], &all["left_out"]),
            (&json!([]), &json!([]))
        );
        for summary in all["summary"].as_array().unwrap() {
            for name in ["auto_over_best_fixed", "auto_over_none"] {
                assert!(summary[name].as_f64().unwrap() > 0.0, "{summary}");
            }
        }
        for (context, kv, batch) in [64, 300].into_iter().flat_map(|context| {
            let kv = ["bf16", "q8_0,q4_0"].into_iter();
            kv.flat_map(move |kv| [1, 2].map(|batch| (context, kv, batch)))
        }) {
            let rows = rows_at(&report, (context, kv, batch));
            let drafts = rows.iter().map(|row| row["draft"].clone());
            assert_eq!(
                drafts.collect::<Vec<_>>(),
                [json!(0), json!(2), json!("auto")]
            );
            for row in rows {
                check_row(row, context as u64, batch as u64);
            }
        }
        let request = |context, kv| count(&rows_at(&report, (context, kv, 1))[0]["request_bytes"]);
        assert!(request(300, "bf16") > request(64, "bf16"));
        assert!(request(300, "q8_0,q4_0") < request(300, "bf16"));
    }
}

/// What holds for every row of two texts of forty tokens.
fn check_row(row: &Value, context: u64, batch: u64) {
    // Every cell writes as many texts as the largest batch has, whole ones.
    assert_eq!(
        (&row["texts"], &row["tokens"]),
        (&json!(2), &json!(80)),
        "{row}"
    );
    let prompt = count(&row["prompt_tokens"]);
    assert!((context..context + 100).contains(&prompt), "{row}");
    assert_eq!(count(&row["sequence_tokens"]), prompt + 40);
    assert!(
        count(&row["memory_bytes"]) >= batch * count(&row["request_bytes"]),
        "{row}"
    );
    assert!(
        count(&row["request_bytes"]) > count(&row["request_drafter_bytes"]),
        "{row}"
    );
    assert!(count(&row["weight_bytes"]) > 1_000_000, "{row}");
    for name in [
        "tok_s",
        "tok_s_per_stream",
        "ms_per_round",
        "first_token_ms",
        "speedup",
    ] {
        assert!(row[name].as_f64().unwrap() > 0.0, "{name}: {row}");
    }
    assert!(row["tokens_per_round"].as_f64().unwrap() >= 1.0, "{row}");
    // One prompt is read a step before the other at the most, so there are rounds of both.
    let both = row["tok_s"].as_f64().unwrap() / row["tok_s_per_stream"].as_f64().unwrap();
    assert!((both - batch as f64).abs() < 1e-6, "{row}");
    if cfg!(target_os = "linux") {
        assert!(
            count(&row["resident_bytes"]) > count(&row["weight_bytes"]),
            "{row}"
        );
    }
    assert_eq!(row["drafter"].is_null(), row["draft"] == 0, "{row}");
}

#[test]
fn a_request_takes_what_inspect_plans() {
    let folder = folder("axes-memory");
    for draft in ["auto", "none", "model:tiny-qwen3.5"] {
        let kv = ["--kv", "q8_0,turbo4", "--draft", draft];
        let axis = ["--kv-formats", "q8_0+turbo4", "--draft", draft];
        let lengths = ["--contexts", "100", "--draft-lengths", "0,1"];
        let report = axes(&folder, WITH_MTP, &[&axis[..], &lengths].concat());
        let row = &rows_at(&report, (100, "q8_0,turbo4", 1))[0];
        let tokens = count(&row["sequence_tokens"]).to_string();
        let args = [
            "inspect",
            WITH_MTP,
            "--json",
            "--no-probe",
            "--context",
            &tokens,
        ];
        let (stdout, _) = good(paceline(&folder, &[&args, &kv[..]].concat()));
        let planned: Value = serde_json::from_str(&stdout).unwrap();
        let planned = planned["memory"].as_array().unwrap().iter();
        let mut planned = planned.filter(|at| at["context"] == row["sequence_tokens"]);
        let planned = planned.next().unwrap();
        assert_eq!(row["request_bytes"], planned["bytes"], "{draft}");
        assert_eq!(
            row["request_drafter_bytes"], planned["drafter_bytes"],
            "{draft}"
        );
        // One request at a time: the plan of the whole memory is that of the request.
        assert_eq!(row["memory_bytes"], row["request_bytes"], "{draft}");
    }
}

#[test]
fn cells_that_do_not_fit_are_left_out() {
    let folder = folder("axes-room");
    let args = [
        "--contexts",
        "32,8100,1m",
        "--batch",
        "1,60",
        "--draft-lengths",
        "0",
        "--memory",
        "120MB",
        "--prompts",
        "prompts.jsonl",
    ];
    fs::write(folder.join("prompts.jsonl"), "{\"prompt\": \"Once\"}\n").unwrap();
    let report = axes(&folder, WITH_MTP, &args);
    let left = report["axes"]["left_out"].as_array().unwrap();
    let left: Vec<String> = left.iter().map(Value::to_string).collect();
    assert_eq!(rows_at(&report, (32, "bf16", 1)).len(), 1, "{report}");
    assert_eq!(
        (report["axes"]["rows"].as_array().unwrap().len(), left.len()),
        (1, 5)
    );
    assert!(left[0].contains("the KV cache of 60 requests"), "{left:?}");
    for reason in &left[1..] {
        assert!(reason.contains("the model knows 8192 tokens"), "{reason}");
    }
    // Nothing fits: the report is there, and says so.
    let none = [
        "bench",
        "-q",
        "--no-steps",
        "--no-probe",
        "--device",
        "cpu",
        "--contexts",
        "1m",
    ];
    let output = paceline(&folder, &none).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("context 1048576, KV cache bf16, batch 1: left out"));
    assert!(text(&output.stderr).contains("no cell could be run"));
}

#[test]
fn tables_of_the_axes_say_where_each_row_is() {
    let folder = folder("axes-table");
    let line = "bench -q --no-steps --no-probe --device cpu --batch 2 --max-tokens 4 --draft-lengths 0,auto";
    let (stdout, _) = good(paceline(&folder, &line.split(' ').collect::<Vec<_>>()));
    let lines: Vec<&str> = stdout.lines().collect();
    assert!(lines[0].starts_with("| context | KV cache | batch | T | drafter | draft | tok/s |"));
    assert!(
        lines[2].starts_with("| 0 | bf16 | 2 | 0 | none | 0 |"),
        "{stdout}"
    );
    assert!(
        lines[3].starts_with("| 0 | bf16 | 2 | 0 | assistant+ngram | auto |"),
        "{stdout}"
    );
    assert!(stdout.contains("auto ÷ best fixed"), "{stdout}");
}

#[test]
fn text_stands_before_what_users_say_alone() {
    let folder = folder("axes-prompts");
    let line = r#"{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]}"#;
    fs::write(folder.join("chat.jsonl"), line).unwrap();
    let args = [
        "--prompts",
        "chat.jsonl",
        "--contexts",
        "40",
        "--draft-lengths",
        "0",
    ];
    let report = axes(&folder, WITH_MTP, &args);
    assert!(count(&rows_at(&report, (40, "bf16", 1))[0]["prompt_tokens"]) >= 40);
    let line = r#"{"messages": [{"role": "assistant", "content": "Hello."}]}"#;
    fs::write(folder.join("nobody.jsonl"), line).unwrap();
    let args = [
        "bench",
        "-q",
        "--no-steps",
        "--prompts",
        "nobody.jsonl",
        "--contexts",
        "40",
    ];
    let line = bad(paceline(&folder, &args));
    assert!(
        line.contains("line 1 of `nobody.jsonl`: no user says anything"),
        "{line}"
    );
}
