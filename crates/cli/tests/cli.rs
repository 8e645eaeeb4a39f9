//! The command line as users meet it: exit codes, what goes to which stream,
//! and messages.
//!
//! `--help` and the shape of `--json` are snapshots in `tests/snapshots`;
//! `UPDATE_SNAPSHOTS=1 cargo test -p paceline` writes them anew.

#[cfg(target_os = "linux")]
mod memory;
#[path = "../../hub/tests/it/server.rs"]
#[allow(dead_code, reason = "not every fault of the test's hub is needed here")]
mod server;

use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

/// A bundled target with an assistant beside it.
const WITH_ASSISTANT: &str = "tiny-gemma4";
const ASSISTANT: &str = "tiny-gemma4-assistant";
/// A bundled target with an MTP head in it.
const WITH_MTP: &str = "tiny-qwen3.5";

const PROMPT: &str = "Tell me a story about a rabbit and a kite.";

/// A folder of this test's own, empty.
fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

/// The binary with `args`, where nothing of the user's own is in its way.
fn paceline(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_paceline"));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("PACELINE_") || text.starts_with("HF_") {
            command.env_remove(name);
        }
    }
    command
        .args(args)
        .current_dir(folder)
        .env("HOME", folder)
        .env("XDG_CONFIG_HOME", folder)
        .env("XDG_DATA_HOME", folder)
        // Of all tests together: each model is tried once.
        .env(
            "XDG_CACHE_HOME",
            Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"),
        )
        .env("HF_HOME", folder.join("hf"))
        .env("XDG_STATE_HOME", folder)
        .stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs to a good end; returns stdout and stderr.
fn good(mut command: Command) -> (String, String) {
    let output = command.output().unwrap();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{command:?}\n{stdout}\n{stderr}");
    (stdout, stderr)
}

/// Runs to a failure that is one line; returns that line.
fn bad(mut command: Command) -> String {
    let output = command.output().unwrap();
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{command:?}\n{stderr}");
    let line = stderr.strip_suffix('\n').unwrap();
    assert!(
        !line.contains('\n') && line.starts_with("paceline: "),
        "{stderr}"
    );
    line.to_owned()
}

fn feed(mut command: Command, input: &str) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that fails early has closed its end.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

fn snapshot(name: &str, found: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/snapshots")
        .join(name);
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, found).unwrap();
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    assert!(found == expected, "{name} differs:\n{found}");
}

fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../models")
        .canonicalize()
        .unwrap()
}

/// The files of a bundled model.
fn files(model: &str) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(models().join(model)).unwrap();
    let file = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().unwrap();
        (name, fs::read(entry.path()).unwrap())
    };
    entries.map(|entry| file(entry.unwrap())).collect()
}

/// A copy of a bundled model that may be damaged.
fn copy(folder: &Path, model: &str) -> PathBuf {
    let to = folder.join(model);
    fs::create_dir_all(&to).unwrap();
    for (name, bytes) in files(model) {
        fs::write(to.join(name), bytes).unwrap();
    }
    to
}

/// Replaces `from` by `to`, of equal length, in the header of a checkpoint.
fn rename_tensors(model: &Path, from: &str, to: &str) {
    let path = model.join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = text(&bytes[8..end]).replace(from, to);
    bytes[8..end].copy_from_slice(header.as_bytes());
    fs::write(path, bytes).unwrap();
}

fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

fn run_json(folder: &Path, args: &[&str]) -> Value {
    let (stdout, _) = good(paceline(folder, &[&["run", "--json"], args].concat()));
    assert_eq!(stdout.lines().count(), 1);
    serde_json::from_str(&stdout).unwrap()
}

#[test]
fn help_is_as_written() {
    let folder = folder("help");
    for line in [
        "",
        "run",
        "chat",
        "serve",
        "inspect",
        "bench",
        "perplexity",
        "convert",
        "config",
        "config show",
        "completions",
        "pull",
        "list",
        "rm",
        "doctor",
    ] {
        let mut args: Vec<&str> = line.split_whitespace().collect();
        args.push("--help");
        let (stdout, _) = good(paceline(&folder, &args));
        let name = if line.is_empty() { "paceline" } else { line };
        snapshot(&format!("help-{}.txt", name.replace(' ', "-")), &stdout);
    }
}

#[test]
fn version_says_what_is_inside() {
    let (stdout, _) = good(paceline(&folder("version"), &["--version"]));
    assert!(
        stdout.starts_with(concat!("paceline ", env!("CARGO_PKG_VERSION"))),
        "{stdout}"
    );
    assert!(stdout.contains(WITH_MTP), "{stdout}");
}

#[test]
fn completions_know_the_commands() {
    for shell in ["bash", "zsh", "fish"] {
        let (stdout, _) = good(paceline(&folder("completions"), &["completions", shell]));
        for word in ["inspect", "draft-max", WITH_MTP] {
            assert!(stdout.contains(word), "{shell} {word}");
        }
    }
}

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
fn any_drafter_gives_the_same_text() {
    let folder = folder("drafters");
    let path = format!("assistant:{}", models().join(ASSISTANT).display());
    for (model, drafters) in [
        (WITH_ASSISTANT, &["auto", "assistant", "ngram", &path][..]),
        (WITH_MTP, &["auto", "mtp", "ngram"]),
    ] {
        for sampling in [
            &["--temperature=0"][..],
            &["--temperature=0.8", "--seed=7", "--top-p=0.9"],
        ] {
            let run = |draft: &str| {
                let draft = format!("--draft={draft}");
                run_json(
                    &folder,
                    &[&[PROMPT, "-n", "40", "-m", model, &draft], sampling].concat(),
                )
            };
            let plain = run("none");
            assert_eq!(plain["speculation"]["engaged"], false);
            assert_eq!(plain["speculation"]["reason"], "--draft none");
            for draft in drafters {
                let drafted = run(draft);
                assert_eq!(
                    drafted["token_ids"], plain["token_ids"],
                    "{model} {draft} {sampling:?}"
                );
                assert_eq!(drafted["text"], plain["text"]);
                assert_eq!(drafted["finish"], plain["finish"]);
                if *draft != "ngram" {
                    assert_eq!(drafted["speculation"]["engaged"], true, "{model} {draft}");
                }
            }
        }
    }
}

#[test]
fn a_folder_and_its_bundled_copy_are_one_model() {
    let folder = folder("bundled");
    let path = models().join(WITH_ASSISTANT);
    let args = [PROMPT, "-n", "12"];
    let run = |args: &[&str]| {
        let mut record = run_json(&folder, args);
        // The same trial: whichever comes first runs it, the other remembers it.
        record["model"]["preflight"]["trial"]["cached"].take();
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
fn reasoning_stays_off_stdout_and_in_the_conversation() {
    let folder = folder("reasoning");
    let kwargs = ["--chat-template-kwargs", r#"{"enable_thinking": true}"#];
    let ask = "What is 3 + 4?";
    for model in ["tiny-gemma4", "tiny-qwen3.5"] {
        let record = run_json(&folder, &[&[ask, "-m", model][..], &kwargs].concat());
        let part = |name: &str| record[name].as_str().unwrap().to_owned();
        let (reasoning, answer) = (part("reasoning"), part("text"));
        assert!(
            reasoning.starts_with("Tens: ") && answer.starts_with("3 "),
            "{record:#}"
        );
        let (n, all) = (
            &record["usage"]["reasoning_tokens"],
            &record["usage"]["completion_tokens"],
        );
        assert!((10..all.as_u64().unwrap()).contains(&n.as_u64().unwrap()));
        let args = [&["run", ask, "-m", model][..], &kwargs].concat();
        let (stdout, stderr) = good(paceline(&folder, &args));
        assert_eq!(stdout, format!("{answer}\n"));
        assert_eq!(stderr.lines().next(), Some(&reasoning[..]));
        let (_, stderr) = good(paceline(&folder, &[&args[..], &["--quiet"]].concat()));
        assert_eq!(stderr, "");

        let args = [&["chat", "--temperature=0", "-m", model][..], &kwargs].concat();
        let output = feed(
            paceline(&folder, &args),
            &format!("{ask}\n/save {model}.json\n"),
        );
        assert_eq!(text(&output.stdout), format!("{answer}\n"));
        assert_eq!(text(&output.stderr), format!("{reasoning}\n"));
        let saved = fs::read(folder.join(format!("{model}.json"))).unwrap();
        let saved: Value = serde_json::from_slice(&saved).unwrap();
        assert_eq!(
            saved[1],
            json!({"role": "assistant", "content": answer, "reasoning_content": reasoning})
        );
    }
    let plain = run_json(&folder, &[ask]);
    assert_eq!(
        (&plain["reasoning"], &plain["usage"]["reasoning_tokens"]),
        (&json!(""), &json!(0))
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
fn wrong_command_lines_end_with_code_2() {
    let folder = folder("usage");
    for (args, message) in [
        (
            &["run", PROMPT, "--draft", "oracle"][..],
            "`oracle` is not a drafter; known are auto, none, mtp",
        ),
        (
            &["run", PROMPT, "--kv", "f8"],
            "`f8` is none of bf16, f16, f32, q8_0, q4_0",
        ),
        (&["serve", "--api-key", ""], "an API key may not be empty"),
        (
            &["serve", "--allow-origin", "localhost:3000"],
            "such as http://localhost:3000",
        ),
        (
            &["run", PROMPT, "--seed", "1.5"],
            "a whole number of 64 bits",
        ),
        (
            &["run", PROMPT, "-n", "-1"],
            "expected a number such as 4096",
        ),
        (
            &["run", PROMPT, "--context", "many"],
            "expected a number such as 4096 or 4k",
        ),
        (&["run", PROMPT, "--threads", "0"], "a number from 1 on"),
        (&["run", PROMPT, "--threads", "9999"], "this machine runs"),
        (
            &["run", PROMPT, "--raw", "--system", "x"],
            "cannot be used with",
        ),
        (&["run", PROMPT, "--isa", "mmx"], "this CPU has"),
        (&["walk"], "unrecognized subcommand 'walk'"),
        (&[], "Usage: paceline"),
    ] {
        let output = paceline(&folder, args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(
            text(&output.stderr).contains(message),
            "{args:?}\n{}",
            text(&output.stderr)
        );
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn errors_are_one_line_with_the_cause_and_the_flag() {
    let folder = folder("errors");
    let run = |args: &[&str]| bad(paceline(&folder, &[&["run", PROMPT], args].concat()));
    fs::write(folder.join("file"), "").unwrap();
    let error = run(&["-m", "no-such-model"]);
    assert!(
        error.starts_with(
            "paceline: no such model: `no-such-model` is neither a folder, nor a .gguf file, nor bundled"
        )
    );
    assert!(error.contains(WITH_ASSISTANT) && error.contains(WITH_MTP));
    assert!(run(&["-m", "file"]).contains("and this is neither: `file`"));
    assert!(run(&["-m", "."]).contains("no `config.json` in `.`"));
    assert!(
        run(&["--draft", "mtp"])
            .ends_with("--draft mtp: targets of the family gemma4 have no MTP heads")
    );
    let assistant = models().join(ASSISTANT);
    let assistant = assistant.to_str().unwrap();
    let unpaired = run(&["-m", WITH_MTP, "--draft", &format!("assistant:{assistant}")]);
    assert!(unpaired.contains("does not fit the target"), "{unpaired}");
    assert!(
        run(&["-m", WITH_MTP, "--draft", "assistant"])
            .contains("name one with --draft assistant:PATH")
    );
    assert!(run(&["-m", assistant]).contains("this checkpoint is a drafter"));
    assert!(run(&["--draft-max", "99"]).contains("--draft-max 99 is more than 16"));
    assert!(
        run(&["--context", "1m"])
            .ends_with("--context 1048576 is more than the 8192 tokens that this model knows")
    );
    assert!(
        run(&["--context", "4"])
            .ends_with("(--context sets the length, up to 8192 for this model)")
    );
    assert!(run(&["--temperature=-1"]).contains("temperature"));
    assert!(run(&["--logit-bias", "99999=1"]).contains("99999"));
    assert!(bad(paceline(&folder, &["run"])).ends_with("the prompt is empty"));
    assert!(
        bad(paceline(&folder, &["run", "-f", "nowhere"]))
            .contains("cannot read `nowhere`: No such file")
    );
}

/// A folder with an EAGLE-3 head for [`WITH_ASSISTANT`] that has learnt nothing.
fn eagle3(folder: &Path) -> PathBuf {
    const HIDDEN: usize = 384;
    const DRAFTED: usize = 64;
    let config = json!({
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": DRAFTED,
        "norm_before_residual": true,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "vocab_size": 8192,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
        },
    });
    let attention = |name: &str| format!("layers.0.self_attn.{name}_proj.weight");
    let mlp = |name: &str| format!("layers.0.mlp.{name}_proj.weight");
    let norm = |name: &str| format!("{name}.weight");
    let matrices = [
        ("fc.weight".into(), HIDDEN, 3 * HIDDEN),
        (attention("q"), 64, 2 * HIDDEN),
        (attention("k"), 32, 2 * HIDDEN),
        (attention("v"), 32, 2 * HIDDEN),
        (attention("o"), HIDDEN, 64),
        (mlp("gate"), 64, HIDDEN),
        (mlp("up"), 64, HIDDEN),
        (mlp("down"), HIDDEN, 64),
        ("lm_head.weight".into(), DRAFTED, HIDDEN),
    ];
    let norms = [
        "layers.0.input_layernorm",
        "layers.0.hidden_norm",
        "layers.0.post_attention_layernorm",
        "norm",
    ];
    let mut header = serde_json::Map::new();
    let mut data: Vec<u8> = Vec::new();
    let mut put = |name: String, dtype: &str, shape: &[usize], bytes: Vec<u8>| {
        let range = [data.len(), data.len() + bytes.len()];
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": range});
        header.insert(name, entry);
        data.extend(bytes);
    };
    let ids: Vec<u8> = (0..DRAFTED)
        .flat_map(|i| (i as i64 * 7).to_le_bytes())
        .collect();
    put("d2t".into(), "I64", &[DRAFTED], ids);
    for (name, rows, cols) in matrices {
        let value = |i: usize| ((i * 2_654_435_761) % 1009) as f32 / 1009.0 - 0.5;
        let values = (0..rows * cols).flat_map(|i| (value(i) * 0.2).to_le_bytes());
        put(name, "F32", &[rows, cols], values.collect());
    }
    for name in norms {
        put(
            norm(name),
            "F32",
            &[HIDDEN],
            1f32.to_le_bytes().repeat(HIDDEN),
        );
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(data);
    let head = folder.join("eagle3-head");
    fs::create_dir_all(&head).unwrap();
    fs::write(head.join("config.json"), config.to_string()).unwrap();
    fs::write(head.join("model.safetensors"), file).unwrap();
    head
}

#[test]
fn an_eagle3_head_drafts_for_the_target_it_was_made_for() {
    let folder = folder("eagle3");
    let head = eagle3(&folder);
    let choice = format!("eagle3:{}", head.display());
    let args = [PROMPT, "-n", "24", "--no-probe", "--draft"];
    let drafted = run_json(&folder, &[&args[..], &[&choice]].concat());
    let plain = run_json(&folder, &[&args[..], &["none"]].concat());
    assert_eq!(drafted["text"], plain["text"]);
    assert_eq!(drafted["speculation"]["drafter"], "eagle3");
    assert_eq!(drafted["speculation"]["engaged"], true);
    // Its weights are random: tried, it is dead.
    let dead = bad(paceline(&folder, &["run", PROMPT, "--draft", &choice]));
    assert!(
        dead.contains(
            "--draft eagle3: the EAGLE-3 head `eagle3-head` loads and drafts, but its guesses"
        ),
        "{dead}"
    );
    let inspect = ["inspect", "--no-probe", "--draft", &choice];
    let (stdout, _) = good(paceline(&folder, &inspect));
    assert!(
        stdout.contains("eagle3: the EAGLE-3 head `eagle3-head`"),
        "{stdout}"
    );

    let run = |args: &[&str]| bad(paceline(&folder, &[&["run", PROMPT], args].concat()));
    let alone = run(&["-m", head.to_str().unwrap()]);
    assert!(alone.ends_with("it with --draft eagle3:PATH"), "{alone}");
    let assistant = format!("eagle3:{}", models().join(ASSISTANT).display());
    let other = run(&["--draft", &assistant]);
    assert!(other.contains("is no EAGLE-3 head"), "{other}");
    let config = fs::read_to_string(head.join("config.json")).unwrap();
    let config = config.replace("8192", "8191");
    fs::write(head.join("config.json"), config).unwrap();
    let unpaired = run(&["--draft", &choice]);
    assert!(
        unpaired.contains("its vocabulary size is 8191, the target's is 8192"),
        "{unpaired}"
    );
}

#[test]
fn residual_acceptance_is_recorded_and_leaves_greedy_text_alone() {
    let folder = folder("residual");
    let run = |args: &[&str]| {
        let fixed = [PROMPT, "-n", "24", "--seed", "7"];
        run_json(&folder, &[&fixed[..], args].concat())
    };
    let plain = run(&["--temperature=0"]);
    let greedy = run(&["--temperature=0", "--accept", "residual"]);
    assert_eq!(greedy["text"], plain["text"]);
    assert_eq!(greedy["speculation"]["accept"], "exact");
    let sampled = run(&["--temperature=1", "--accept", "residual"]);
    assert_eq!(sampled["speculation"]["accept"], "residual");
    assert_eq!(sampled["model"]["accept"], "residual");
}

#[test]
fn damaged_checkpoints_are_named_and_explained() {
    let folder = folder("damaged");
    let run = |model: &Path, args: &[&str]| {
        bad(paceline(
            &folder,
            &[
                &["run", PROMPT, "-n", "4", "-m", model.to_str().unwrap()],
                args,
            ]
            .concat(),
        ))
    };

    let model = copy(&folder, WITH_ASSISTANT);
    let weights = model.join("model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
    let error = run(&model, &[]);
    assert!(
        error.contains("cut short") && error.contains("`model.safetensors`"),
        "{error}"
    );
    fs::write(&weights, &bytes).unwrap();

    let index = model.join("model.safetensors.index.json");
    fs::write(
        &index,
        r#"{"weight_map": {"model.no.such.weight": "model.safetensors"}}"#,
    )
    .unwrap();
    let error = run(&model, &[]);
    assert!(error.ends_with(
        "puts tensor `model.no.such.weight` into `model.safetensors`, which does not contain it"
    ));
    fs::remove_file(index).unwrap();

    let config = model.join("config.json");
    let known = fs::read_to_string(&config).unwrap();
    fs::write(
        &config,
        known.replace("Gemma4ForCausalLM", "Oracle9ForCausalLM"),
    )
    .unwrap();
    let error = run(&model, &[]);
    assert!(
        error.contains("architecture `Oracle9ForCausalLM` is not supported; supported are"),
        "{error}"
    );
    // What it is can still be seen.
    let output = paceline(&folder, &["inspect", model.to_str().unwrap()])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stdout).contains("Oracle9ForCausalLM")
            && text(&output.stdout).contains("runs           no")
    );
    assert!(text(&output.stderr).contains("is not supported"));

    let model = copy(&folder, WITH_MTP);
    rename_tensors(&model, "\"mtp.", "\"old.");
    let error = run(&model, &["--draft", "mtp"]);
    assert!(
        error.contains("--draft mtp: config.json promises `mtp_num_hidden_layers: 1`"),
        "{error}"
    );
    assert!(error.contains("has dropped the head"), "{error}");
    let args = [
        "run",
        PROMPT,
        "-n",
        "4",
        "--draft",
        "none",
        "-m",
        model.to_str().unwrap(),
    ];
    let (_, stderr) = good(paceline(&folder, &args));
    assert!(
        stderr.ends_with("no speculation: --draft none\n"),
        "{stderr}"
    );
}

#[test]
fn a_drafter_is_inspected_as_one() {
    let assistant = models().join(ASSISTANT);
    let args = ["inspect", assistant.to_str().unwrap()];
    let (stdout, stderr) = good(paceline(&folder("inspect-drafter"), &args));
    assert!(stdout.contains("--draft assistant:PATH"), "{stdout}");
    assert!(!stderr.contains("cannot load"), "{stderr}");
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
fn a_model_named_without_m_brings_a_hint() {
    let folder = folder("hints");
    let (_, stderr) = good(paceline(&folder, &["run", WITH_MTP, "-n", "1"]));
    assert!(
        stderr.contains(&format!("did you mean -m {WITH_MTP}?")),
        "{stderr}"
    );
    for line in [
        format!("run {WITH_MTP} hi"),
        format!("chat {WITH_MTP}"),
        format!("serve {WITH_MTP}"),
    ] {
        let output = paceline(&folder, &words(&line)).output().unwrap();
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(
            stderr.contains(&format!("did you mean -m {WITH_MTP}?")),
            "{line}: {stderr}"
        );
    }
    let unknown = |name: &str| bad(paceline(&folder, &["run", "hi", "-m", name]));
    assert!(unknown("tiny-qwen").contains("did you mean tiny-qwen3.5?"));
    let far = unknown("llama3");
    assert!(
        far.contains("`paceline pull ORG/NAME`") && !far.contains("did you mean"),
        "{far}"
    );
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
fn the_names_of_llama_cli_are_known() {
    let folder = folder("aliases");
    let ours = ["--context", "256", "--seed", "3", "--temperature", "1"];
    let theirs = ["-c", "256", "-s", "3", "--temp", "1"];
    let [ours, theirs] = [ours, theirs].map(|names| {
        let line = [&["Hello", "-n", "6"], &names[..]].concat();
        run_json(&folder, &line)["token_ids"].clone()
    });
    assert_eq!(ours, theirs);
    let sized = run_json(&folder, &["-p", "Hello", "--ctx-size", "256", "-n", "1"]);
    assert_eq!(sized["model"]["context"], 256);
    let mut command = paceline(&folder, &["run", "hi"]);
    command.env("PACELINE_DRAFT_MAX", "x");
    let output = command.output().unwrap();
    assert!(text(&output.stderr).contains("the environment variable PACELINE_DRAFT_MAX"));
    let output = paceline(&folder, &["run", "hi", "--kv", "q3"])
        .output()
        .unwrap();
    assert!(text(&output.stderr).contains("turbo4 and turbo3"));
}

#[test]
fn variables_that_set_nothing_are_named() {
    let folder = folder("variables");
    let mut command = paceline(&folder, &["serve", "--dry-run"]);
    command
        .env("PACELINE_TEMPRATURE", "0")
        .env("PACELINE_API_KEY", "");
    let output = command.output().unwrap();
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr.contains("an API key may not be empty"), "{stderr}");
    let mut command = paceline(&folder, &["list"]);
    command
        .env("PACELINE_TEMPRATURE", "0")
        .env("PACELINE_DRAFT_MAX", "2");
    let (_, stderr) = good(command);
    assert!(stderr.contains("`PACELINE_TEMPRATURE`"), "{stderr}");
    assert!(!stderr.contains("DRAFT_MAX"), "{stderr}");
}

#[test]
fn gguf_files_are_known_by_their_names_or_their_first_bytes() {
    let folder = folder("gguf-names");
    let convert = paceline(&folder, &["convert", WITH_MTP, "x", "--format", "gguf"]);
    assert!(bad(convert).contains("must end in .gguf"));
    fs::write(folder.join("x"), "GGUF and more").unwrap();
    let damaged = bad(paceline(&folder, &["inspect", "x"]));
    assert!(!damaged.contains("neither"), "{damaged}");
    good(paceline(
        &folder,
        &["convert", WITH_MTP, "x.gguf", "--format", "gguf"],
    ));
    let answer = |model: &str| answer(&folder, model, &[]);
    let named = answer("x.gguf");
    fs::rename(folder.join("x.gguf"), folder.join("blob")).unwrap();
    assert_eq!(answer("blob"), named);
    fs::write(folder.join("y"), "else").unwrap();
    assert!(bad(paceline(&folder, &["inspect", "y"])).contains("neither: `y`"));
    let missing = bad(paceline(&folder, &["inspect", "w/nope.gguf"]));
    assert!(
        missing.ends_with("there is no file `w/nope.gguf`"),
        "{missing}"
    );
}

#[test]
fn inspect_tells_what_a_model_is() {
    let folder = folder("inspect");
    let (stdout, stderr) = good(paceline(&folder, &["inspect", WITH_MTP]));
    for words in [
        "architecture",
        "gated delta",
        "mtp: the checkpoint's own MTP head",
        "affine4-g128",
        "unused tensors none",
    ] {
        assert!(stdout.contains(words), "{words}\n{stdout}");
    }
    assert!(stderr.is_empty());
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
fn a_memory_plan_counts_the_weights_of_an_assistant() {
    let folder = folder("plan");
    let beyond_the_files = |draft: &str| {
        let args = [
            "inspect",
            "tiny-gemma4",
            "--json",
            "--no-probe",
            "--draft",
            draft,
        ];
        let (stdout, _) = good(paceline(&folder, &args));
        let record: Value = serde_json::from_str(&stdout).unwrap();
        let count = |value: &Value| value.as_u64().unwrap();
        let row = &record["memory"][0];
        count(&row["with_weights"]) - count(&row["bytes"]) - count(&record["file_bytes"])
    };
    assert_eq!(beyond_the_files("none"), 0);
    assert!(beyond_the_files("assistant") > 1 << 20);
}

#[test]
fn chat_without_a_terminal_takes_a_line_a_turn() {
    let folder = folder("chat");
    let say = |input: &str, args: &[&str]| {
        let args = [&["chat", "--temperature=0", "-n", "30"], args].concat();
        feed(paceline(&folder, &args), input)
    };
    let output = say("Hello!\n/stats\nHello!\n", &[]);
    assert!(output.status.success());
    let stderr = text(&output.stderr);
    assert!(stderr.starts_with("replies  1\n"), "{stderr}");
    let one = text(&say("Hello!", &[]).stdout);
    assert!(one.ends_with('\n') && text(&output.stdout).starts_with(&one));
    assert_eq!(
        text(&say("Hello!\n/reset\nHello!\n", &[]).stdout),
        [one.clone(), one.clone()].concat()
    );

    // The second turn saw the first.
    let files = ["a.json", "b.json"];
    say(
        &format!(
            "Hello!\n/save {}\n//not a command \\\nmore\n/save {}\n/save {}\n",
            files[0], files[1], files[1]
        ),
        &["--system", "Be kind."],
    );
    let saved = |name: &str| -> Value {
        serde_json::from_slice(&fs::read(folder.join(name)).unwrap()).unwrap()
    };
    let roles = |v: &Value| {
        v.as_array()
            .unwrap()
            .iter()
            .map(|m| m["role"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(roles(&saved("a.json")), ["system", "user", "assistant"]);
    assert_eq!(
        roles(&saved("b.json")),
        ["system", "user", "assistant", "user", "assistant"]
    );
    assert_eq!(saved("b.json")[3]["content"], "/not a command \nmore");

    // Several lines between triple quotes are one turn; the oldest turn can be dropped.
    say("one\n\"\"\"two\nthree\n\"\"\"\n/drop\n/save c.json\n", &[]);
    assert_eq!(roles(&saved("c.json")), ["user", "assistant"]);
    assert_eq!(saved("c.json")[0]["content"], "two\nthree");
    assert_eq!(
        text(&say("Hello!\n/clear\nHello!\n", &[]).stdout),
        [one.clone(), one.clone()].concat()
    );
    let dropped = say("/drop 1\n", &[]);
    assert!(text(&dropped.stderr).contains("/drop needs a number"));
    let help = text(&say("/help\n", &[]).stderr);
    assert!(
        help.lines().all(|line| line.chars().count() <= 80),
        "{help}"
    );
    let output = say("Hello!\n/save d.json\n", &["-v"]);
    assert!(text(&output.stderr).contains("2 messages written to `d.json`"));

    // A turn that fails is said, counted and forgotten.
    let output = say("/nope\nHello!\n", &[]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        text(&output.stderr),
        "paceline: no command `/nope`; /help lists them\n"
    );
    assert_eq!(text(&output.stdout), one);
    assert_eq!(text(&say("Hello!\n/exit\nHello!", &[]).stdout), one);
    let output = say("Hello!\n", &["--context", "8"]);
    assert!(
        text(&output.stderr)
            .contains("/drop N forgets the N oldest questions and answers, /clear starts anew")
    );
}

#[test]
fn the_command_line_counts_more_than_the_environment_and_that_more_than_files() {
    let folder = folder("config");
    fs::create_dir_all(folder.join("paceline")).unwrap();
    let user = folder.join("paceline/paceline.toml");
    fs::write(&user, "draft-max = 1\nmax-tokens = 3\nseed = 4\n").unwrap();
    fs::write(
        folder.join("paceline.toml"),
        "draft-max = 2\n[run]\nseed = 5\nstop = [\"x\"]\n",
    )
    .unwrap();
    let line = |command: &mut Command| text(&command.output().unwrap().stdout);
    let show = |args: &[&str]| {
        paceline(
            &folder,
            &[&["config", "show", "--as-command"], args].concat(),
        )
    };
    assert_eq!(
        line(&mut show(&["run"])),
        "paceline run --seed=5 --max-tokens=3 --stop=x --draft-max=2\n"
    );
    assert_eq!(
        line(&mut show(&["chat"])),
        "paceline chat --seed=4 --max-tokens=3 --draft-max=2\n"
    );
    let mut command = show(&["run", "--draft-max=4"]);
    command
        .env("PACELINE_DRAFT_MAX", "3")
        .env("PACELINE_SEED", "6")
        .env("PACELINE_RAW", "1");
    let expected = "paceline run --raw --seed=6 --max-tokens=3 --stop=x --draft-max=4\n";
    assert_eq!(line(&mut command), expected);

    // It is what `run` does, too.
    let record = run_json(&folder, &[PROMPT]);
    assert_eq!(record["usage"]["completion_tokens"], 3);
    assert_eq!(record["model"]["draft_max"], 2);

    // Configuration → command → the same configuration; and → file → the same.
    let shown = |folder: &Path, args: &[&str]| {
        let (stdout, _) = good(paceline(folder, &[&["config", "show"], args].concat()));
        let lines = stdout
            .lines()
            .filter(|l| !l.starts_with("# ") || l.ends_with("is not set"));
        lines
            .map(|l| l.split("  # ").next().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let here = shown(&folder, &["run"]);
    let elsewhere = self::folder("config-elsewhere");
    let command = line(&mut show(&["run"]));
    let words: Vec<&str> = command.split_whitespace().skip(1).collect();
    assert_eq!(shown(&elsewhere, &words), here);
    let (stdout, _) = good(paceline(&folder, &["config", "show"]));
    fs::write(elsewhere.join("paceline.toml"), stdout).unwrap();
    assert_eq!(shown(&elsewhere, &[]), shown(&folder, &[]));

    // Keys are not shown.
    let mut command = paceline(&elsewhere, &["config", "show", "serve"]);
    command.env("PACELINE_API_KEY", "sesame");
    let (stdout, _) = good(command);
    assert!(stdout.contains("# api-key is set, and not shown") && !stdout.contains("sesame"));
}

#[test]
fn a_broken_configuration_names_file_and_key_but_leaves_the_help() {
    let folder = folder("config-broken");
    fs::write(folder.join("paceline.toml"), "drift = 1\n").unwrap();
    assert_eq!(
        bad(paceline(&folder, &["run", PROMPT])),
        "paceline: paceline.toml: `drift` is not an option of any command"
    );
    assert!(
        good(paceline(&folder, &["run", "--help"]))
            .0
            .contains("Usage")
    );
    assert!(
        good(paceline(&folder, &["completions", "bash"]))
            .0
            .contains("paceline")
    );
    fs::write(folder.join("paceline.toml"), "kv = 'f8'\n").unwrap();
    let error = bad(paceline(&folder, &["run", PROMPT]));
    assert!(
        error.starts_with("paceline: paceline.toml: kv: invalid value 'f8'"),
        "{error}"
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

#[cfg(unix)]
fn signal(child: &Child, name: &str) {
    let id = child.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-s", name, &id])
            .status()
            .unwrap()
            .success()
    );
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

/// A running server, ended with the test.
struct Server {
    child: Child,
    address: String,
    stderr: Box<dyn BufRead>,
}

impl Server {
    fn start(folder: &Path, args: &[&str]) -> Server {
        Server::spawn(paceline(
            folder,
            &[&["serve", "--port", "0"], args].concat(),
        ))
    }

    fn spawn(mut command: Command) -> Server {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let address = loop {
            let mut line = String::new();
            assert!(
                stderr.read_line(&mut line).unwrap() > 0,
                "the server says where it is"
            );
            if let Some((_, rest)) = line.split_once("base URL: http://") {
                break rest.trim_end().trim_end_matches("/v1").to_owned();
            }
        };
        Server {
            child,
            address,
            stderr: Box::new(stderr),
        }
    }

    fn post(&self, path: &str, headers: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        let (address, n) = (&self.address, body.len());
        write!(stream, "POST {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Type: application/json\r\n{headers}Content-Length: {n}\r\n\r\n{body}").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

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

/// Asks a server whether it is well, once it listens, and leaves the connection open.
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
    write!(stream, "GET /health HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
    let (mut answer, mut piece) = (String::new(), [0; 1024]);
    while !answer.ends_with(r#"{"status":"ok"}"#) {
        let n = stream.read(&mut piece).unwrap();
        assert!(n > 0, "{answer}");
        answer += std::str::from_utf8(&piece[..n]).unwrap();
    }
    stream
}

#[test]
#[cfg(target_os = "linux")]
fn a_log_that_cannot_be_written_stops_nothing() {
    let folder = folder("serve-mute");
    // A full disk.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = port.local_addr().unwrap();
    drop(port);
    let mut full = paceline(
        &folder,
        &["serve", "-vv", "--port", &address.port().to_string()],
    );
    let full = full.stderr(fs::File::create("/dev/full").unwrap());
    let full = Server {
        child: full.spawn().unwrap(),
        address: address.to_string(),
        stderr: Box::new(std::io::empty()),
    };
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
        let mut shell = Command::new("sh");
        let script = format!("ulimit {ulimit} && exec \"$0\" serve --port 0");
        shell.args(["-c", &script, env!("CARGO_BIN_EXE_paceline")]);
        let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache");
        shell
            .current_dir(&folder)
            .env("HOME", &folder)
            .env("XDG_CACHE_HOME", cache)
            .stdin(Stdio::null());
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
fn a_model_that_cannot_chat_says_so_at_once() {
    let folder = folder("no-template");
    let model = copy(&folder, "tiny-gemma4");
    fs::remove_file(model.join("chat_template.jinja")).unwrap();
    let model = ["-m", "./tiny-gemma4", "--no-probe"];
    let error = bad(paceline(&folder, &[&["chat"], &model[..]].concat()));
    assert!(error.contains("`run --raw`"), "{error}");
    let mut server = Server::start(&folder, &model);
    let mut hint = String::new();
    for said in ["no chat template", "/v1/completions"] {
        server.stderr.read_line(&mut hint).unwrap();
        assert!(hint.contains(said), "{hint}");
    }
}

#[test]
fn mistakes_are_named_before_a_model_is_loaded() {
    let folder = folder("mistakes");
    for (line, said) in [
        ("bench --prompts nope", "cannot read `nope`"),
        ("perplexity nope", "cannot read `nope`"),
        ("run Hi --top-p 2", "top_p must be above 0"),
        ("chat --top-p 2", "top_p must be above 0"),
    ] {
        let args = [&words(line)[..], &["-m", "./model"]].concat();
        let error = bad(paceline(&folder, &args));
        assert!(error.contains(said), "{error}");
    }
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

/// What the model at `path` answers, in a few greedy tokens.
fn answer(folder: &Path, path: &str, more: &[&str]) -> String {
    let mut args = words("run -q --temperature 0 -n 12 -m");
    args.extend([path, "Tell me a story."]);
    args.extend(more);
    good(paceline(folder, &args)).0
}

#[test]
fn a_conversion_that_loses_nothing_answers_the_same() {
    let folder = folder("convert");
    let expected = answer(&folder, "tiny-qwen3.5", &[]);
    good(paceline(
        &folder,
        &["convert", "-q", "tiny-qwen3.5", "eight", "--quant", "q8"],
    ));
    assert_eq!(answer(&folder, "./eight", &[]), expected);
    assert_eq!(
        answer(&folder, "tiny-qwen3.5", &["--quant", "q8"]),
        expected
    );
    let head = ["convert", "-q", "tiny-qwen3.5", "head", "--extract-head"];
    good(paceline(&folder, &head));
    let attach = words("convert -q ./eight again --attach-head ./head");
    good(paceline(&folder, &attach));
    assert_eq!(answer(&folder, "./again", &["--draft", "mtp"]), expected);
    let gguf = words("convert -q tiny-qwen3.5 eight.gguf --quant q8_0 --format gguf");
    good(paceline(&folder, &gguf));
    assert!(answer(&folder, "./eight.gguf", &["--draft", "mtp"]).len() > 20);
    for (args, message) in [
        (&["tiny-qwen3.5", "eight"][..], "exists already"),
        (&["tiny-gemma4", "x", "--extract-head"], "has no MTP head"),
        (
            &["tiny-gemma4-moe", "x", "--inflate", "2b"],
            "growing experts",
        ),
        (
            &["tiny-qwen3.5", "x", "--inflate", "1m"],
            "more than 1000000",
        ),
        (
            &["tiny-qwen3.5", "x", "--quant", "q4_0"],
            "--quant q4_0: only GGUF files hold this format; use q8, q6, q4 or bf16, or let OUT end in .gguf",
        ),
    ] {
        let error = bad(paceline(&folder, &[&["convert"], args].concat()));
        assert!(error.contains(message), "{args:?}: {error}");
    }
    let left: Vec<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(left.len(), 4, "nothing half written: {left:?}");
}

#[test]
fn every_format_is_written_to_every_container_or_refused_in_one_line() {
    let folder = folder("convert-formats");
    let source = models().join("tiny-qwen3.5-moe");
    let source = source.to_str().unwrap();
    // An unknown name is answered with those that each container takes.
    let output = paceline(&folder, &["convert", source, "x", "--quant", "?"]);
    let said = text(&{ output }.output().unwrap().stderr);
    let (_, said) = said.split_once("known are ").unwrap();
    let (folders, files) = said.lines().next().unwrap().split_once(';').unwrap();
    let (_, files) = files.split_once("also have ").unwrap();
    let listed: Vec<&str> = folders.split(", ").chain(files.split(", ")).collect();
    let short = ["q2", "q3", "q4", "q5", "q6", "q8"];
    let all = quant::FORMATS.iter().copied().flatten().map(|f| f.name);
    let known: Vec<&str> = short.into_iter().chain(all).collect();
    assert!(known.len() > 40 && known.contains(&"tq3_1s"), "{known:?}");
    let mut refused = Vec::new();
    for &name in &known {
        for (container, out) in [("safetensors", "out"), ("gguf", "out.gguf")] {
            let args = ["convert", "-q", source, out, "--quant", name];
            let args = [&args[..], &["--format", container]].concat();
            let output = paceline(&folder, &args).output().unwrap();
            let stderr = text(&output.stderr);
            let path = folder.join(out);
            if output.status.success() {
                assert_eq!(stderr, "", "{args:?}");
                let weights = match container {
                    "gguf" => path.clone(),
                    _ => path.join("model.safetensors"),
                };
                assert!(weights.metadata().unwrap().len() > 100_000, "{args:?}");
                good(paceline(
                    &folder,
                    &["inspect", "-q", "--no-probe", &format!("./{out}")],
                ));
                let removed = if path.is_dir() {
                    fs::remove_dir_all(&path)
                } else {
                    fs::remove_file(&path)
                };
                removed.unwrap();
            } else {
                assert_eq!(output.status.code(), Some(1), "{args:?}: {stderr}");
                assert_eq!(stderr.lines().count(), 1, "{args:?}: {stderr}");
                assert!(
                    stderr.contains(&format!("--quant {name}: ")) && stderr.contains("; use q8"),
                    "{args:?}: {stderr}"
                );
                refused.push((name.to_owned(), container));
            }
            assert!(!path.exists());
        }
    }
    let is_refused = |name: &str, container| refused.contains(&(name.to_owned(), container));
    for name in known {
        let taken = !is_refused(name, "safetensors") || !is_refused(name, "gguf");
        assert_eq!(listed.contains(&name), taken, "{name}");
        assert_eq!(
            folders.split(", ").any(|listed| listed == name),
            !is_refused(name, "safetensors"),
            "{name}"
        );
    }
    for name in ["tq3_1s", "tq4_1s", "nvfp4", "fp8", "int4-g64"] {
        for container in ["safetensors", "gguf"] {
            assert!(is_refused(name, container), "{name} {container}");
        }
    }
    for name in ["q4", "affine6-g32", "bf16", "f32"] {
        for container in ["safetensors", "gguf"] {
            assert!(!is_refused(name, container), "{name} {container}");
        }
    }
    for name in ["q4_0", "q4_k", "iq4_xs"] {
        assert!(
            is_refused(name, "safetensors") && !is_refused(name, "gguf"),
            "{name}"
        );
    }
    // Formats of single tensors are looked at in the same way.
    let one = [
        "convert",
        source,
        "out",
        "--quant",
        "q4",
        "--tensor",
        "*mlp*=fp8",
    ];
    let error = bad(paceline(&folder, &one));
    assert!(error.contains("--tensor *mlp*=fp8: "), "{error}");
}

#[test]
fn a_converted_model_keeps_its_assistant() {
    let folder = folder("convert-assistant");
    let convert = |args: &str| {
        let args = words(args);
        good(paceline(&folder, &args)).1
    };
    let drafts = |model: &str, more: &[&str]| {
        let mut args = words("run --temperature 0 -n 24 --json -m");
        args.extend([model, PROMPT]);
        args.extend(more);
        let report: Value = serde_json::from_str(&good(paceline(&folder, &args)).0).unwrap();
        report
    };
    let said = convert("convert tiny-gemma4 out");
    assert!(
        said.contains("drafter: the assistant in out-assistant"),
        "{said}"
    );
    let (before, after) = (drafts("tiny-gemma4", &[]), drafts("./out", &[]));
    assert_eq!(after["text"], before["text"]);
    // How much is drafted depends on the time that rounds take: only who drafts is compared.
    for report in [&before, &after] {
        assert_eq!(report["model"]["drafter"], "assistant", "{report}");
    }

    let said = convert("convert tiny-gemma4 alone --no-drafter");
    let advice = "drafter: none is written; use --draft assistant:tiny-gemma4-assistant";
    assert!(said.contains(advice), "{said}");
    assert!(!folder.join("alone-assistant").exists());
    // The advice works: bundled drafters have names.
    let named = drafts("./alone", &["--draft", "assistant:tiny-gemma4-assistant"]);
    let reason = "the assistant `tiny-gemma4-assistant`";
    assert_eq!(named["model"]["drafter_reason"], reason);

    let said = convert("convert tiny-gemma4 file.gguf --quant q8");
    assert!(
        said.contains("GGUF has no affine8-g64: these matrices are stored as q8_0"),
        "{said}"
    );
    assert!(folder.join("file-assistant.gguf").is_file());
    // Rows of 384 columns are no whole blocks of 256.
    let said = convert("convert tiny-gemma4 blocks.gguf --quant q4_k --no-drafter");
    let kept = "keep their format, for their rows are not whole blocks of 256 (q4_k): ";
    assert!(said.contains(kept), "{said}");
    let said = convert("convert tiny-qwen3.5 qwen");
    assert!(
        said.contains("drafter: the MTP head, written with the model"),
        "{said}"
    );

    // A folder called like a file would not be found again.
    let args = words("convert tiny-qwen3.5 folder.gguf --format safetensors");
    let error = bad(paceline(&folder, &args));
    assert!(error.contains("must not end in .gguf"), "{error}");
    for (command, words) in [("pull", "needs no download"), ("rm", "cannot be removed")] {
        let error = bad(paceline(&folder, &[command, "tiny-gemma4"]));
        assert!(error.contains(words), "{error}");
    }

    fs::create_dir(folder.join("taken-assistant")).unwrap();
    let error = bad(paceline(&folder, &["convert", "tiny-gemma4", "taken"]));
    assert!(error.contains("add --no-drafter"), "{error}");
    assert!(!folder.join("taken").exists());
    let error = bad(paceline(&folder, &["run", "--draft", "mtp:nobody", "hi"]));
    assert!(error.contains("no such drafter: `nobody`"), "{error}");
}

#[test]
fn perplexity_barely_depends_on_the_activations() {
    let folder = folder("perplexity");
    let lines = [
        json!({"text": "Once upon a time there was a little rabbit who had a red kite."}),
        json!({"prompt": "What is two and two?", "response": "Two and two is four."}),
    ];
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(folder.join("text.jsonl"), text).unwrap();
    let perplexity = |activations: &str| {
        let args = [
            "perplexity",
            "-q",
            "-m",
            "tiny-gemma4",
            "text.jsonl",
            "--json",
            "--context",
            "16",
            "--activations",
            activations,
        ];
        let (stdout, _) = good(paceline(&folder, &args));
        let report: Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!(
            (&report["texts"], &report["stride"]),
            (&json!(2), &json!(8))
        );
        report["perplexity"].as_f64().unwrap()
    };
    let (rounded, exact) = (perplexity("int8"), perplexity("f32"));
    assert!(exact > 1.0 && exact < 100.0, "{exact}");
    assert!((rounded / exact - 1.0).abs() < 0.02, "{rounded} {exact}");
}

/// Puts a bundled model into the hub cache under `id`; its snapshot.
fn cached(folder: &Path, id: &str, model: &str) -> PathBuf {
    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
    let root = folder
        .join("hf/hub")
        .join(format!("models--{}", id.replace('/', "--")));
    fs::create_dir_all(root.join("refs")).unwrap();
    fs::write(root.join("refs/main"), COMMIT).unwrap();
    let (snapshot, blobs) = (root.join("snapshots").join(COMMIT), root.join("blobs"));
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(&blobs).unwrap();
    for (name, bytes) in files(model) {
        fs::write(blobs.join(&name), bytes).unwrap();
        let blob = Path::new("../../blobs").join(&name);
        std::os::unix::fs::symlink(blob, snapshot.join(name)).unwrap();
    }
    snapshot
}

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
fn a_stripped_conversion_says_where_its_head_is() {
    let folder = folder("stripped-advice");
    let model = copy(&folder, WITH_MTP);
    let model = {
        let renamed = folder.join("Qwen3.6-27B-4bit");
        fs::rename(model, &renamed).unwrap();
        renamed
    };
    rename_tensors(&model, "\"mtp.", "\"old.");
    let model = model.to_str().unwrap();
    let record = run_json(&folder, &[PROMPT, "-n", "4", "-m", model]);
    let reason = record["model"]["drafter_reason"].as_str().unwrap();
    assert!(
        reason.contains("a conversion has dropped the head")
            && reason.ends_with(
                "`paceline pull Qwen/Qwen3.6-27B --head-only` fetches the head of the original"
            ),
        "{reason}"
    );
    let error = bad(paceline(
        &folder,
        &["run", PROMPT, "-m", model, "--draft", "mtp"],
    ));
    assert!(
        error.contains("--draft mtp: config.json promises"),
        "{error}"
    );
}

#[test]
fn a_trial_is_remembered_and_can_be_left_out() {
    let folder = folder("trial");
    let inspect = |args: &[&str]| {
        let mut command = paceline(&folder, &[&["inspect", "--json"], args].concat());
        command.env("XDG_CACHE_HOME", &folder);
        let (stdout, _) = good(command);
        serde_json::from_str::<Value>(&stdout).unwrap()["model"]["preflight"].clone()
    };
    let first = inspect(&[]);
    assert_eq!(first["trial"]["cached"], false);
    assert_eq!(
        (&first["trial"]["rows"], &first["trial"]["chain"]),
        (&json!("exact"), &json!("exact"))
    );
    let again = inspect(&[]);
    assert_eq!(again["trial"]["cached"], true);
    assert_eq!(again["trial"]["guesses"], first["trial"]["guesses"]);
    assert_eq!(
        inspect(&["--no-probe"])["trial"],
        json!({"skipped": "--no-probe"})
    );
    // Another drafter, another trial.
    assert_eq!(inspect(&["--draft=ngram"])["trial"]["cached"], false);
}

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

#[test]
fn what_is_pulled_runs() {
    let folder = folder("pull");
    let files = files(WITH_ASSISTANT);
    let files: Vec<(&str, Vec<u8>)> = files.iter().map(|(n, b)| (&**n, b.clone())).collect();
    let hub = server::Hub::start(&files);
    let mut pull = paceline(&folder, &["pull", "org/model"]);
    pull.env("HF_ENDPOINT", hub.address());
    let (stdout, stderr) = good(pull);
    assert!(stdout.trim_end().ends_with(server::COMMIT), "{stdout}");
    assert!(
        stderr.starts_with("org/model: ") && stderr.contains(" files, "),
        "{stderr}"
    );
    let record = run_json(&folder, &[PROMPT, "-n", "4", "-m", "org/model"]);
    assert_eq!(record["model"]["name"], "org/model");
    hub.set(server::Fault::Status(404, usize::MAX));
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
        ("mmproj-tiny.gguf", b"not fetched".to_vec()),
    ];
    let hub = server::Hub::start(&files);
    let pull = |name: &str| {
        let mut pull = paceline(&folder, &["pull", name, "--quiet"]);
        pull.env("HF_ENDPOINT", hub.address());
        pull
    };
    let (stdout, _) = good(pull("org/model:q4_0"));
    let path = PathBuf::from(stdout.trim_end());
    assert_eq!(fs::read(&path).unwrap(), whole);
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
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
    let hub = server::Hub::start(&files);
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
