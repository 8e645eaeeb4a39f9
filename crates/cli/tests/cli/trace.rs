//! `--trace FILE`.

use crate::{PROMPT, Server, WITH_ASSISTANT, WITH_MTP, bad, folder, paceline, run_json, signal};
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
