//! `--trace FILE` and `paceline replay`.

use crate::{
    PROMPT, Server, WITH_ASSISTANT, WITH_MTP, bad, folder, good, models, paceline, run_json,
    signal, snapshot,
};
use serde_json::{Value, json};
use std::fs;
use std::io::Read;
use std::path::Path;

/// The lines of a trace.
fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    let line = |line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
    text.lines().map(line).collect()
}

/// The sum of a number over the streams of rounds for which `is_of` says so.
fn sum(
    trace: &[Value],
    is_of: impl Fn(&Value) -> bool,
    number: impl Fn(&Value, &Value) -> f64,
) -> f64 {
    let rounds = trace.iter().filter(|line| line["type"] == "round");
    let streams = rounds.flat_map(|round| {
        let streams = round["streams"].as_array().unwrap();
        streams.iter().map(move |stream| (round, stream))
    });
    let of = streams.filter(|(_, stream)| is_of(stream));
    of.map(|(round, stream)| number(round, stream)).sum()
}

fn field<'a>(name: &'a str) -> impl Fn(&Value, &Value) -> f64 + 'a {
    move |_, stream| stream[name].as_f64().unwrap_or(0.0)
}

fn is_round(stream: &Value) -> bool {
    stream["round"].as_u64().is_some_and(|number| number > 0)
}

#[test]
fn a_trace_adds_up_to_the_record_and_changes_no_text() {
    let folder = folder("trace");
    for (model, temperature) in [(WITH_ASSISTANT, "0"), (WITH_MTP, "0.8")] {
        let args = [
            PROMPT,
            "-n",
            "160",
            "-m",
            model,
            "--temperature",
            temperature,
            "--seed",
            "3",
        ];
        let plain = run_json(&folder, &args);
        let traced = run_json(&folder, &[&args[..], &["--trace", "t.jsonl"]].concat());
        assert_eq!(traced["token_ids"], plain["token_ids"]);
        let trace = lines(&folder.join("t.jsonl"));
        let record = &traced["speculation"];
        let all = |_: &Value| true;
        let decodes = |stream: &Value| stream["prefill"] == false;
        for (found, name) in [
            (sum(&trace, is_round, |_, _| 1.0), "rounds"),
            (sum(&trace, all, field("drafted")), "drafted"),
            (sum(&trace, all, field("accepted")), "accepted"),
        ] {
            assert_eq!(found, record[name].as_f64().unwrap(), "{model} {name}");
        }
        let written = traced["usage"]["completion_tokens"].as_f64().unwrap();
        let ends = f64::from(u8::from(traced["finish"] == "stop"));
        assert_eq!(sum(&trace, all, field("emitted")), written + ends);
        // The record has a thousandth of a millisecond, a line a tenth of that.
        let about = |found: f64, name: &str| {
            let said = record[name].as_f64().unwrap();
            let rounds = record["rounds"].as_f64().unwrap();
            assert!(
                (found - said).abs() < 1e-3 + 1e-4 * rounds,
                "{name}: {found} {said}"
            );
        };
        let of_round =
            |name: &'static str| move |round: &Value, _: &Value| round[name].as_f64().unwrap();
        about(sum(&trace, decodes, of_round("verify_ms")), "ms_verify");
        about(sum(&trace, decodes, of_round("draft_ms")), "ms_draft");
        about(sum(&trace, all, field("saved_ms_estimated")), "ms_saved");
        check_frame(&trace, &traced);
        let text = fs::read_to_string(folder.join("t.jsonl")).unwrap();
        assert!(
            !text.contains("rabbit") && !text.contains("token_ids"),
            "{text}"
        );
    }
}

#[test]
fn rounds_of_a_mixture_tell_the_experts_that_their_rows_touched() {
    let folder = folder("trace-experts");
    let run = |model: &str| {
        let args = [PROMPT, "-n", "100", "-m", model, "--temperature", "0.8"];
        run_json(
            &folder,
            &[&args[..], &["--seed", "3", "--trace", "t.jsonl"]].concat(),
        );
        let rounds = lines(&folder.join("t.jsonl")).into_iter();
        rounds
            .filter(|line| line["type"] == "round")
            .collect::<Vec<_>>()
    };
    let rounds = run(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../models/tiny-qwen3.5-moe"
    ));
    for round in &rounds {
        // Four mixtures of eight experts, of which a row chooses two.
        let (rows, touched) = (
            round["rows"].as_u64().unwrap(),
            round["experts"].as_u64().unwrap(),
        );
        assert!(touched >= 8 && touched <= 32.min(8 * rows), "{round}");
        let expected = round["expected_experts"].as_f64();
        assert_eq!(expected.is_none(), round["prefill"] == true, "{round}");
        let is_likely = |expected: f64| match rows {
            1 => (expected - 8.0).abs() < 1e-3,
            _ => (8.0..=32.0).contains(&expected),
        };
        assert!(expected.is_none_or(is_likely), "{round}");
    }
    assert!(
        rounds
            .iter()
            .any(|round| round["rows"].as_u64() > Some(1) && round["prefill"] == false)
    );
    let dense = run(WITH_MTP);
    assert!(
        dense
            .iter()
            .all(|round| round["experts"].is_null() && round["expected_experts"].is_null())
    );
}

/// Checks the lines that are not about rounds.
fn check_frame(trace: &[Value], record: &Value) {
    assert_eq!(trace[0]["type"], "header");
    assert_eq!(
        (&trace[0]["schema"], &trace[0]["version"]),
        (&json!("paceline-trace"), &json!(1))
    );
    let (model, known) = (&trace[1], &record["model"]);
    assert_eq!(model["type"], "model");
    for (name, of) in [
        ("name", "name"),
        ("kv_format", "kv_format"),
        ("device", "backend"),
        ("draft_max", "draft_max"),
        ("accept", "accept"),
    ] {
        assert_eq!(model[name], known[of], "{name}");
    }
    assert_eq!(model["drafters"], known["drafters"]);
    let (summary, rounds) = (trace.last().unwrap(), &trace[2..trace.len() - 1]);
    assert!(rounds.iter().all(|line| line["type"] == "round"));
    assert_eq!(summary["type"], "summary");
    assert_eq!(summary["rounds"], rounds.len());
    assert_eq!(summary["lost"], 0);
    assert_eq!(summary["drafted"], record["speculation"]["drafted"]);
    assert_eq!(summary["accepted"], record["speculation"]["accepted"]);
    // The prompt comes first, and the first token with it.
    assert_eq!(rounds[0]["prefill"], true);
    let first = rounds.iter().find(|line| line["streams"][0]["round"] == 0);
    assert_eq!(first.unwrap()["streams"][0]["emitted"], 1);
}

#[test]
#[cfg(unix)]
fn a_server_writes_a_trace_of_all_requests() {
    let folder = folder("trace-serve");
    let mut server = Server::start(&folder, &["--trace", "t.jsonl", "-m", WITH_MTP]);
    for seed in 0..3 {
        let body = json!({"temperature": 0.8, "seed": seed, "max_tokens": 60, "n": 2,
            "messages": [{"role": "user", "content": PROMPT}]});
        let answer = server.post("/v1/chat/completions", "", &body.to_string());
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    signal(&server.child, "TERM");
    let mut rest = String::new();
    server.stderr.read_to_string(&mut rest).unwrap();
    assert!(server.child.wait().unwrap().success(), "{rest}");
    let trace = lines(&folder.join("t.jsonl"));
    let summary = trace.last().unwrap();
    assert_eq!(
        (&summary["type"], &summary["lost"]),
        (&json!("summary"), &json!(0))
    );
    let streams = trace.iter().filter_map(|line| line["streams"].as_array());
    let requests = streams
        .flatten()
        .map(|stream| stream["request"].as_u64().unwrap());
    let requests: std::collections::BTreeSet<u64> = requests.collect();
    assert_eq!(requests.len(), 6, "{requests:?}");
    let (stdout, stderr) = good(paceline(&folder, &["replay", "t.jsonl", "--json"]));
    assert_eq!(stderr, "");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(report["models"][0]["texts"], 6);
    let rows = report["models"][0]["rows"].as_array().unwrap();
    let tokens = summary["emitted"].as_u64().unwrap() - 6;
    assert!(rows.iter().all(|row| row["tokens"] == tokens), "{rows:?}");
    let rounds = sum(&trace, is_round, |_, _| 1.0);
    assert_eq!(rows[0]["rounds"], rounds);
    assert_eq!(rows[1]["rounds"], tokens as f64);
}

/// The lines of a trace whose text was written with drafts of 0 to 3 tokens in turn; two of three are
/// right as a whole.
fn made() -> Vec<String> {
    let mut lines = vec![
        json!({"type": "header", "schema": "paceline-trace", "version": 1, "paceline": "0.1.0", "started": 1_700_000_000}),
        json!({"type": "model", "model": 0, "name": "made", "drafters": ["mtp"], "draft_max": 3}),
    ];
    let mut context = 200;
    for i in 0..400 {
        let (drafted, next) = (i % 4, (i + 1) % 4);
        let accepted = if i % 3 == 0 { drafted / 2 } else { drafted };
        lines.push(json!({
            "type": "round", "model": 0, "rows": 1 + drafted, "draft_asked": next,
            "verify_ms": 20.0 + drafted as f64, "draft_ms": 1.5 * next as f64,
            "streams": [{"request": 4, "round": i + 1, "known": 1, "context": context, "drafter": "mtp",
                "asked": drafted, "drafted": drafted, "accepted": accepted, "emitted": accepted + 1}],
        }));
        context += accepted + 1;
    }
    lines.push(json!({"type": "summary", "rounds": 400, "lost": 0}));
    lines.iter().map(Value::to_string).collect()
}

#[test]
fn replay_compares_lengths() {
    let folder = folder("replay");
    fs::write(folder.join("t.jsonl"), made().join("\n")).unwrap();
    let (stdout, stderr) = good(paceline(
        &folder,
        &["replay", "t.jsonl", "--draft-max", "4"],
    ));
    assert_eq!(stderr, "");
    snapshot("replay.txt", &stdout);
    let args = ["replay", "t.jsonl", "--draft-fixed", "2", "--json"];
    let (stdout, _) = good(paceline(&folder, &args));
    let report: Value = serde_json::from_str(&stdout).unwrap();
    let rows = report["models"][0]["rows"].as_array().unwrap();
    let lengths: Vec<&Value> = rows.iter().map(|row| &row["lengths"]).collect();
    assert_eq!(lengths, ["recorded", "plain", "fixed"]);
    assert_eq!(rows[2]["draft"], 2);
    assert_eq!(report["trace"]["is_whole"], true);
}

#[test]
fn replay_tells_of_each_drafter_what_the_record_says() {
    let folder = folder("replay-drafters");
    let dspark = models().join("tiny-qwen3.5-dspark");
    let draft = format!("mtp+dspark:{}+ngram", dspark.display());
    // The second text has forced tokens.
    let constrained = [
        "--regex",
        "(a red|a green) rabbit has [a-z ]{30,50} and it is (happy|sad)",
    ];
    for more in [&[][..], &constrained] {
        let args = [
            PROMPT, "-n", "200", "-m", WITH_MTP, "--draft", &draft, "--trace", "t.jsonl",
        ];
        let record = run_json(&folder, &[&args[..], more].concat())["speculation"].clone();
        assert_eq!(record["forced"].is_u64(), !more.is_empty(), "{record}");
        let (stdout, _) = good(paceline(&folder, &["replay", "t.jsonl", "--json"]));
        let report: Value = serde_json::from_str(&stdout).unwrap();
        let told = report["models"][0]["by_drafter"].as_array().unwrap();
        // Left out of a record where every drafted token is forced.
        let known = record["by_drafter"].as_array().cloned().unwrap_or_default();
        assert_eq!(told.len(), known.len(), "{record}");
        assert!(!known.is_empty() || !more.is_empty(), "{record}");
        for counts in &known {
            let own = told
                .iter()
                .find(|of| of["drafter"] == counts["drafter"])
                .unwrap();
            for name in ["rounds", "drafted", "accepted"] {
                assert_eq!(own[name], counts[name], "{name}: {own} {counts}");
            }
            let name = counts["drafter"].as_str().unwrap();
            let args = ["replay", "t.jsonl", "--drafter", name];
            let (text, _) = good(paceline(&folder, &args));
            let table = format!("the rounds that {name} drafted for, each by itself:");
            assert_eq!(
                text.matches("drafted for, each by itself").count(),
                1,
                "{text}"
            );
            assert!(text.contains(&table), "{text}");
        }
    }
    let error = bad(paceline(
        &folder,
        &["replay", "t.jsonl", "--drafter", "eagle3"],
    ));
    assert!(
        error.starts_with(
            "paceline: no round of the trace was drafted by `eagle3`: its drafters are "
        ),
        "{error}"
    );
}

#[test]
fn replay_reads_what_is_whole_of_a_trace_and_says_what_is_not() {
    let folder = folder("replay-broken");
    let mut lines = made();
    lines.truncate(300);
    lines.push(json!({"type": "weather", "sun": true}).to_string());
    let whole = lines.join("\n");
    fs::write(
        folder.join("cut.jsonl"),
        format!("{whole}\n{}", &lines[9][..50]),
    )
    .unwrap();
    let (stdout, stderr) = good(paceline(&folder, &["replay", "cut.jsonl"]));
    assert!(stdout.starts_with("made: 1 text, "), "{stdout}");
    assert_eq!(
        stderr.lines().collect::<Vec<_>>(),
        [
            "paceline: the trace has no last line: it is still being written, or was cut off",
            "paceline: 1 line of the trace cannot be read",
            "paceline: 1 line of the trace is of a kind that this version does not know",
        ]
    );
    let replay = |name: &str, text: &str| {
        fs::write(folder.join(name), text).unwrap();
        bad(paceline(&folder, &["replay", name]))
    };
    let newer = whole.replace("\"version\":1", "\"version\":9");
    assert_eq!(
        replay("newer", &newer),
        "paceline: cannot read the trace `newer`: this is a trace of version 9, written by paceline 0.1.0; this paceline reads version 1"
    );
    assert_eq!(
        replay("other", "{}\n"),
        "paceline: cannot read the trace `other`: the first line is not the header of a trace, as `--trace FILE` writes it"
    );
    assert_eq!(
        replay("none", &lines[0]),
        "paceline: nothing to replay in `none`: it has no rounds"
    );
    let missing = bad(paceline(&folder, &["replay", "missing"]));
    assert!(
        missing.starts_with("paceline: cannot read the trace `missing`: "),
        "{missing}"
    );
}

#[test]
fn a_trace_that_cannot_be_written_is_an_error_before_a_model_is_loaded() {
    let folder = folder("trace-error");
    for command in ["run", "serve"] {
        let args = [command, "--trace", "nowhere/t.jsonl", "-m", WITH_MTP];
        let prompt = if command == "run" {
            &[PROMPT][..]
        } else {
            &["--port", "0"]
        };
        let error = bad(paceline(&folder, &[&args[..], prompt].concat()));
        let expected = "paceline: cannot write the trace `nowhere/t.jsonl`: ";
        assert!(error.starts_with(expected), "{error}");
    }
    #[cfg(target_os = "linux")]
    {
        let error = bad(paceline(&folder, &["run", PROMPT, "--trace", "/dev/full"]));
        assert!(
            error.contains("cannot write the trace `/dev/full`"),
            "{error}"
        );
    }
}
