//! `paceline run`: the text on stdout, its record, where the prompt comes from, and how a text ends.

use crate::{
    PROMPT, WITH_ASSISTANT, WITH_MTP, bad, copy, feed, folder, good, models, paceline, run_json,
    signal, snapshot, text,
};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

#[test]
fn stdout_is_the_text_and_nothing_else() {
    let folder = folder("stdout");
    let record = run_json(&folder, &[PROMPT, "-n", "24"]);
    let expected = format!("{}\n", record["text"].as_str().unwrap());
    let (stdout, stderr) = good(paceline(&folder, &["run", PROMPT, "-n", "24"]));
    assert_eq!(stdout, expected);
    let last = stderr.lines().last().unwrap();
    // A text of some length has enough guesses to say how many were accepted by position.
    let (_, long) = good(paceline(&folder, &["run", PROMPT, "-n", "200"]));
    assert!(long.trim_end().ends_with(" (1st, 2nd, …)"), "{long}");
    assert!(
        last.starts_with("24 tokens, ") && last.contains(", accepted draft tokens: "),
        "{stderr}"
    );
    assert!(
        last.contains(" tok/s, cut off by --max-tokens · "),
        "{last}"
    );
    let (_, whole) = good(paceline(&folder, &["run", "Hello!"]));
    assert!(!whole.contains("cut off"), "{whole}");
    let (_, full) = good(paceline(&folder, &["run", PROMPT, "--context=40"]));
    assert!(full.contains(", cut off by --context · "), "{full}");
    let (stdout, stderr) = good(paceline(&folder, &["run", PROMPT, "-n", "24", "--quiet"]));
    assert_eq!((stdout, stderr), (expected.clone(), String::new()));
    let (_, stderr) = good(paceline(&folder, &["run", PROMPT, "-n", "24", "-v"]));
    assert_eq!(stderr.matches("loaded").count(), 1, "{stderr}");

    let output = feed(
        paceline(&folder, &["run", "-n", "24"]),
        &format!("{PROMPT}\n"),
    );
    assert_eq!(text(&output.stdout), expected);
    let output = feed(paceline(&folder, &["run", "-n", "24", "-"]), PROMPT);
    assert_eq!(text(&output.stdout), expected);
    fs::write(folder.join("prompt.txt"), format!("{PROMPT}\r\n")).unwrap();
    let (stdout, _) = good(paceline(&folder, &["run", "-n", "24", "-f", "prompt.txt"]));
    assert_eq!(stdout, expected);
}

#[test]
fn a_folder_and_its_bundled_copy_are_one_model() {
    let folder = folder("bundled");
    let path = models().join(WITH_ASSISTANT);
    let args = [PROMPT, "-n", "12"];
    let run = |args: &[&str]| {
        let mut record = run_json(&folder, args);
        // Whichever run comes first does the trial and measures rounds, the other remembers it.
        record["model"]["preflight"]["trial"]["cached"].take();
        record["model"]["calibration"]["cached"].take();
        record["model"]["calibration"]["took_ms"].take();
        record
    };
    let mut bundled = run(&args);
    let mut from_folder = run(&[&args[..], &["-m", path.to_str().unwrap()]].concat());
    // Both are packed, each for a reason of its own.
    let reason = |of: &mut Value| of["model"]["weights_reason"].take();
    assert_eq!(reason(&mut bundled), "the model is part of the program");
    assert_eq!(reason(&mut from_folder), "fits the free memory");
    assert_eq!(bundled["token_ids"], from_folder["token_ids"]);
    assert_eq!(bundled["model"], from_folder["model"]);
    assert_eq!(
        bundled["speculation"]["drafter"],
        from_folder["speculation"]["drafter"]
    );
}

/// Values become the names of their types, lists the shape of their first entry.
fn shape(value: &Value) -> Value {
    match value {
        Value::Null => json!(null),
        Value::Bool(_) => json!("bool"),
        Value::Number(n) if n.is_u64() => json!("count"),
        Value::Number(_) => json!("number"),
        Value::String(_) => json!("text"),
        Value::Array(list) => list.iter().take(1).map(shape).collect(),
        Value::Object(map) => map
            .iter()
            .map(|(k, v)| (k.clone(), shape(v)))
            .collect::<serde_json::Map<_, _>>()
            .into(),
    }
}

#[test]
fn json_keeps_its_shape() {
    let folder = folder("json");
    let args = [PROMPT, "-n", "24", "--temperature", "0.7", "--seed", "1"];
    snapshot(
        "run.json",
        &format!("{:#}\n", shape(&run_json(&folder, &args))),
    );
    let (stdout, _) = good(paceline(&folder, &["inspect", WITH_MTP, "--json"]));
    let record: Value = serde_json::from_str(&stdout).unwrap();
    snapshot("inspect.json", &format!("{:#}\n", shape(&record)));
}

#[test]
fn a_checkpoint_says_how_its_text_is_sampled() {
    let folder = folder("sampled");
    let model = copy(&folder, "tiny-gemma4");
    let record = |config: Value, args: &[&str]| {
        fs::write(model.join("generation_config.json"), config.to_string()).unwrap();
        let args = [&[PROMPT, "-n", "20", "-m", "tiny-gemma4/"], args].concat();
        run_json(&folder, &[&args[..], &["--no-probe"]].concat())
    };
    let temperature =
        |config, args: &[&str]| record(config, args)["sampling"]["temperature"].clone();
    assert_eq!(temperature(json!({}), &[]), 1.0);
    assert_eq!(temperature(json!({"do_sample": false}), &[]), 0.0);
    assert_eq!(temperature(json!({"temperature": 0.5}), &[]), 0.5);
    assert_eq!(temperature(json!({"do_sample": true}), &[]), 1.0);
    assert_eq!(
        temperature(json!({"temperature": 0.5}), &["--temperature", "0"]),
        0.0
    );
    // Greedy text is not spared a penalty.
    let text = |config, args: &[&str]| record(config, args)["text"].clone();
    let greedy = || json!({"do_sample": false});
    let asked = text(greedy(), &["--repetition-penalty", "2"]);
    let told = json!({"do_sample": false, "repetition_penalty": 2});
    assert_eq!(text(told, &[]), asked);
    assert_ne!(text(greedy(), &[]), asked);
}

#[test]
fn the_end_of_a_text_has_its_reason() {
    let folder = folder("ends");
    let whole = run_json(&folder, &[PROMPT, "-n", "30"]);
    assert_eq!(
        (&whole["finish"], &whole["usage"]["completion_tokens"]),
        (&json!("length"), &json!(30))
    );
    let words: Vec<&str> = whole["text"].as_str().unwrap().split(' ').collect();
    let stopped = run_json(
        &folder,
        &[
            PROMPT,
            "-n",
            "30",
            "--stop",
            "no such words",
            "--stop",
            words[5],
        ],
    );
    assert_eq!(stopped["finish"], "stop_string");
    assert_eq!(stopped["stop_string"], words[5]);
    assert!(
        whole["text"]
            .as_str()
            .unwrap()
            .starts_with(stopped["text"].as_str().unwrap())
    );
    let nothing = run_json(&folder, &["Hello!", "-n", "0"]);
    assert_eq!(nothing["finish"], "length");
    assert_eq!(nothing["speculation"]["reason"], "no token was asked for");
    let hello = run_json(&folder, &["Hello!", "-n", "200"]);
    assert_eq!(hello["finish"], "stop");
    let n = hello["usage"]["completion_tokens"].as_u64().unwrap() + 5;
    let on = run_json(&folder, &["Hello!", "--ignore-eos", "-n", &n.to_string()]);
    assert_eq!(
        (&on["finish"], &on["usage"]["completion_tokens"]),
        (&json!("length"), &json!(n))
    );
}

#[test]
fn raw_prompts_pass_no_template() {
    let folder = folder("raw");
    let raw = run_json(&folder, &["Once upon a time", "--raw", "-n", "4"]);
    let chat = run_json(&folder, &["Once upon a time", "-n", "4"]);
    let with_system = run_json(
        &folder,
        &["Once upon a time", "-n", "4", "--system", "Be brief."],
    );
    let n = |record: &Value| record["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(n(&raw) < n(&chat) && n(&chat) < n(&with_system));
}

#[test]
fn text_piped_to_stdin_goes_before_the_prompt() {
    let folder = folder("piped");
    let args = ["run", "--json", "-n", "1"];
    let ids = |command: Command, input: &str| -> Value {
        let output = feed(command, input);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let record: Value = serde_json::from_slice(&output.stdout).unwrap();
        record["prompt_token_ids"].clone()
    };
    let run = |more: &[&str]| paceline(&folder, &[&args[..], more].concat());
    let joined = "Dear Ann,\nall is well.\n\nSummarise:";
    let expected = run_json(&folder, &[joined, "-n", "1"])["prompt_token_ids"].clone();
    let letter = "Dear Ann,\nall is well.\n";
    assert_eq!(ids(run(&["Summarise:"]), letter), expected);
    assert_eq!(ids(run(&["-p", "Summarise:"]), letter), expected);
    fs::write(folder.join("prompt"), "Summarise:\n").unwrap();
    assert_eq!(ids(run(&["-f", "prompt"]), letter), expected);
    assert_eq!(ids(run(&["-"]), joined), expected);
    // An empty pipe is no text, and neither is /dev/null.
    let alone = run_json(&folder, &["Summarise:", "-n", "1"])["prompt_token_ids"].clone();
    assert_eq!(ids(run(&["Summarise:"]), ""), alone);
    // A file is read, too.
    fs::write(folder.join("letter"), letter).unwrap();
    let mut command = run(&["Summarise:"]);
    command.stdin(fs::File::open(folder.join("letter")).unwrap());
    let (stdout, _) = good(command);
    let record: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(record["prompt_token_ids"], expected);
}

#[test]
fn a_pipe_that_stays_open_is_said_to_be_waited_for() {
    let folder = folder("open-pipe");
    let mut command = paceline(&folder, &["run", "Hi", "-n", "1"]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    stderr.read_line(&mut line).unwrap();
    assert!(line.contains("waiting for the end of stdin"), "{line}");
    drop(child.stdin.take());
    stderr.read_to_string(&mut line).unwrap();
    assert!(child.wait().unwrap().success(), "{line}");
}

#[test]
fn sampling_has_the_ranges_of_the_api_and_an_empty_prompt_is_refused() {
    let folder = folder("ranges");
    let run = |args: &[&str]| bad(paceline(&folder, &[&["run"], args].concat()));
    assert!(run(&[""]).ends_with("the prompt is empty"));
    assert!(run(&["hi", "--temperature", "5"]).contains("between 0 and 2"));
    let record = run_json(&folder, &["hi", "--temp", "1", "--top-p", "0", "-n", "4"]);
    let greedy = run_json(&folder, &["hi", "--temp", "0", "-n", "4"]);
    assert_eq!(record["token_ids"], greedy["token_ids"]);
}

#[test]
fn weights_left_in_their_files_write_the_same_text() {
    let folder = folder("mapped");
    let model = models().join("tiny-qwen3.5");
    let model = model.to_str().unwrap();
    let weights = |weights: &str, more: &[&str]| {
        let args = ["run", PROMPT, "-n", "24", "--no-probe", "-m", model];
        paceline(
            &folder,
            &[&args[..], &["--weights", weights], more].concat(),
        )
    };
    let (mapped, _) = good(weights("mapped", &[]));
    assert_eq!(mapped, good(weights("packed", &[])).0);
    let error = bad(weights("mapped", &["--quant", "q8"]));
    assert!(
        error.contains("--weights mapped: --quant makes weights"),
        "{error}"
    );
    let error = bad(paceline(&folder, &["run", PROMPT, "--weights", "mapped"]));
    assert!(
        error.contains("--weights mapped: the model is part"),
        "{error}"
    );
    let inspect = ["inspect", model, "--no-probe", "--weights", "mapped"];
    let (stdout, _) = good(paceline(&folder, &inspect));
    assert!(
        stdout.contains("weights        mapped: --weights mapped"),
        "{stdout}"
    );
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    let folder = folder("pipe");
    let mut command = paceline(&folder, &["run", PROMPT, "--ignore-eos", "-n", "300"]);
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 4]).unwrap();
    drop(stdout);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(text(&output.stderr), "");
}

#[test]
#[cfg(unix)]
fn an_interrupt_ends_the_text_and_keeps_it() {
    let folder = folder("interrupt");
    let mut command = paceline(&folder, &["run", PROMPT, "--ignore-eos", "-n", "6000"]);
    for (name, code) in [("INT", 130), ("TERM", 143)] {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdout = child.stdout.take().unwrap();
        stdout.read_exact(&mut [0; 4]).unwrap();
        signal(&child, name);
        stdout.read_to_end(&mut Vec::new()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code));
        assert!(
            text(&output.stderr).contains(" tok/s"),
            "{}",
            text(&output.stderr)
        );
    }
}
