//! `paceline serve`: start, answers, keys, files and the end.

use crate::{PROMPT, Server, alone, bad, folder, good, paceline, run_json, signal};
use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

#[test]
#[cfg(unix)]
fn a_server_answers_like_run_and_ends_when_told() {
    let folder = folder("serve");
    fs::write(folder.join("keys"), "# ours\nsesame\n").unwrap();
    let mut server = Server::start(&folder, &["--api-key-file", "keys", "--alias", "tiny"]);
    let body = json!({"model": "tiny", "temperature": 0, "max_tokens": 12, "messages": [{"role": "user", "content": PROMPT}]});
    let post = |headers| server.post("/v1/chat/completions", headers, &body.to_string());
    assert!(post("").starts_with("HTTP/1.1 401"));
    let answer = post("Authorization: Bearer sesame\r\n");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let record: Value = serde_json::from_str(answer.split("\r\n\r\n").nth(1).unwrap()).unwrap();
    let expected = run_json(&folder, &[PROMPT, "-n", "12"]);
    assert_eq!(record["choices"][0]["message"]["content"], expected["text"]);
    signal(&server.child, "TERM");
    let mut rest = String::new();
    server.stderr.read_to_string(&mut rest).unwrap();
    assert!(server.child.wait().unwrap().success(), "{rest}");
}

/// The address of the one server that runs in `folder`, once it has begun.
#[cfg(target_os = "linux")]
fn registered(folder: &Path) -> String {
    let start = std::time::Instant::now();
    loop {
        let (stdout, _) = good(paceline(folder, &["ps", "--json"]));
        let listed: Value = serde_json::from_str(&stdout).unwrap();
        if let Some(address) = listed["servers"][0]["address"].as_str() {
            return address.to_owned();
        }
        assert!(start.elapsed().as_secs() < 120, "{stdout}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Asks a server whether it is well until it is, and leaves the connection open.
#[cfg(target_os = "linux")]
fn health(address: &str) -> TcpStream {
    let start = std::time::Instant::now();
    let mut stream = loop {
        match TcpStream::connect(address) {
            Ok(stream) => break stream,
            Err(error) => assert!(start.elapsed().as_secs() < 120, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let patience = Some(Duration::from_secs(60));
    stream.set_read_timeout(patience).unwrap();
    loop {
        write!(stream, "GET /health HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
        let (mut answer, mut piece) = (String::new(), [0; 1024]);
        while !answer.ends_with('}') {
            let n = stream.read(&mut piece).unwrap();
            assert!(n > 0, "{answer}");
            answer += std::str::from_utf8(&piece[..n]).unwrap();
        }
        // Until the model is there it says how far that is.
        match answer.ends_with(r#"{"status":"ok"}"#) {
            true => return stream,
            false => assert!(start.elapsed().as_secs() < 120, "{answer}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_log_that_cannot_be_written_stops_nothing() {
    let folder = folder("serve-mute");
    // A full disk.
    let mut full = paceline(&folder, &["serve", "-vv", "--port", "0"]);
    let full = full.stderr(fs::File::create("/dev/full").unwrap());
    let mut full = Server {
        child: full.spawn().unwrap(),
        address: String::new(),
        stderr: Box::new(std::io::empty()),
    };
    full.address = registered(&folder);
    // A pipe whose reader has left.
    let mut left = Server::start(&folder, &["-vv"]);
    left.stderr = Box::new(std::io::empty());
    let body = json!({"prompt": "Hi", "max_tokens": 2}).to_string();
    for mut server in [full, left] {
        let (mut stream, address) = (health(&server.address), &server.address);
        let n = body.len();
        write!(stream, "POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {n}\r\n\r\n{body}").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        signal(&server.child, "TERM");
        assert!(server.child.wait().unwrap().success());
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_server_has_all_files_that_it_may_and_serves_when_idle_clients_take_them() {
    let folder = folder("serve-files");
    let limited = |ulimit: &str| {
        let mut shell = alone(Command::new("sh"), &folder);
        let script = format!("ulimit {ulimit} && exec \"$0\" serve --port 0");
        shell.args(["-c", &script, env!("CARGO_BIN_EXE_paceline")]);
        Server::spawn(shell)
    };
    let server = limited("-Sn 100");
    let limits = fs::read_to_string(format!("/proc/{}/limits", server.child.id())).unwrap();
    let files = limits.lines().find(|l| l.starts_with("Max open files"));
    let files: Vec<&str> = files.unwrap().split_whitespace().collect();
    assert_eq!(files[3], files[4], "{limits}");
    // 100 files, and 200 clients that have asked and stay.
    let server = limited("-n 100");
    let idle: Vec<TcpStream> = (0..200).map(|_| health(&server.address)).collect();
    drop(idle);
}

#[test]
fn a_server_for_the_network_needs_a_key() {
    let folder = folder("serve-open");
    let error = bad(paceline(
        &folder,
        &["serve", "--host", "0.0.0.0", "--port", "0"],
    ));
    assert!(
        error.contains("--api-key") && error.contains("--insecure"),
        "{error}"
    );
    fs::write(folder.join("keys"), "# none yet\n").unwrap();
    let error = bad(paceline(
        &folder,
        &["serve", "--port", "0", "--api-key-file", "keys"],
    ));
    assert!(error.ends_with("there is no API key in `keys`"), "{error}");
}

#[test]
#[cfg(unix)]
fn a_server_has_the_template_and_the_reasoning_that_it_is_told() {
    let folder = folder("serve-template");
    fs::write(folder.join("own.jinja"), "{{ messages[0].content }}!").unwrap();
    let user = json!({"role": "user", "content": "Hi"});
    let assistant = json!({"role": "assistant", "content": "Yo"});
    let prompt = |options: &[&str], messages: Value| {
        let mut server = Server::start(&folder, options);
        let body = json!({"messages": messages}).to_string();
        let answer = server.post("/apply-template", "", &body);
        signal(&server.child, "TERM");
        assert!(server.child.wait().unwrap().success());
        let document: Value =
            serde_json::from_str(answer.split("\r\n\r\n").nth(1).unwrap()).unwrap();
        document["prompt"].as_str().unwrap().to_owned()
    };
    let chatml = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
    let built_in = ["--chat-template", "chatml"];
    assert_eq!(prompt(&built_in, json!([user])), chatml);
    let begun = prompt(&built_in, json!([user, assistant]));
    assert_eq!(begun, format!("{chatml}Yo"));
    let whole = ["--chat-template", "chatml", "--no-prefill-assistant"];
    let whole = prompt(&whole, json!([user, assistant]));
    assert_eq!(
        whole,
        format!("{chatml}Yo<|im_end|>\n<|im_start|>assistant\n")
    );
    assert_eq!(
        prompt(&["--chat-template", "own.jinja"], json!([user])),
        "Hi!"
    );
    let [on, off] = ["on", "off"].map(|when| prompt(&["--reasoning", when], json!([user])));
    assert!(
        on.contains("<|think|>") && !off.contains("<|think|>"),
        "{on} {off}"
    );
    for (template, told) in [
        ("none", "those that are built in are chatml: `none`"),
        ("broken.jinja", "template"),
    ] {
        fs::write(folder.join("broken.jinja"), "{% if").unwrap();
        let options = ["serve", "--port", "0", "--chat-template", template];
        let output = paceline(&folder, &options).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        // A server that listens logs before it fails.
        let error = stderr.lines().last().unwrap_or_default();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(
            error.starts_with("paceline: ") && error.contains(told),
            "{stderr}"
        );
    }
}

#[test]
#[cfg(unix)]
fn a_server_of_several_models_has_options_for_each() {
    let folder = folder("serve-several");
    let toml = "[serve]\nno-probe = true\n[models.\"fast\"]\npath = \"tiny-qwen3.5\"\ntemperature = 0\nmax-tokens = 5\ncontext = 256\nalias = [\"quick\"]\n";
    fs::write(folder.join("paceline.toml"), toml).unwrap();
    let mut server = Server::start(&folder, &["-m", "tiny-gemma4", "--models-max", "1"]);
    let ask = |model: &str, more: Value| -> Value {
        let mut body = json!({"model": model, "messages": [{"role": "user", "content": PROMPT}]});
        let object = body.as_object_mut().unwrap();
        object.extend(more.as_object().unwrap().clone());
        let answer = server.post("/v1/chat/completions", "", &body.to_string());
        serde_json::from_str(answer.split("\r\n\r\n").nth(1).unwrap()).unwrap()
    };
    let fast = ask("quick", json!({}));
    let args = [
        PROMPT,
        "-m",
        "tiny-qwen3.5",
        "--temperature",
        "0",
        "-n",
        "5",
    ];
    let expected = run_json(&folder, &args);
    let text = |answer: &Value| answer["choices"][0]["message"]["content"].clone();
    assert_eq!(text(&fast), expected["text"]);
    assert_eq!(fast["model"], "quick");
    // A request's own value counts more.
    let longer = ask("quick", json!({"max_tokens": 7}));
    assert_eq!(longer["usage"]["completion_tokens"], 7);
    let other = ask("tiny-gemma4", json!({"temperature": 0, "max_tokens": 12}));
    let expected = run_json(&folder, &[PROMPT, "--temperature", "0", "-n", "12"]);
    assert_eq!(text(&other), expected["text"]);
    let unknown = ask("fast", json!({}));
    let said = unknown["error"]["message"].as_str().unwrap();
    assert!(said.contains("`tiny-gemma4` or `quick`"), "{said}");
    let (stdout, _) = good(paceline(&folder, &["ps", "--json"]));
    let listed: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(
        listed["servers"][0]["models"],
        json!(["tiny-gemma4", "quick"])
    );
    good(paceline(&folder, &["stop", "quick"]));
    assert!(server.child.wait().unwrap().success());
}

#[test]
fn a_model_that_is_not_there_or_an_odd_default_is_an_error_at_the_start() {
    let folder = folder("serve-missing");
    let refuse = |args: &[&str]| {
        bad(paceline(
            &folder,
            &[&["serve", "--port", "0"], args].concat(),
        ))
    };
    let error = refuse(&["-m", "tiny-gemma4", "-m", "no-such-model"]);
    assert!(error.contains("`no-such-model`"), "{error}");
    let error = refuse(&["-m", "tiny-gemma4", "-m", "tiny-gemma4"]);
    assert!(
        error.contains("two models are called `tiny-gemma4`"),
        "{error}"
    );
    fs::create_dir_all(folder.join("empty")).unwrap();
    let error = refuse(&["--models-dir", "empty"]);
    assert!(error.contains("there is no model in `empty`"), "{error}");
    let error = refuse(&["--temperature", "3"]);
    assert!(
        error.contains("--temperature must be between 0 and 2"),
        "{error}"
    );
}
