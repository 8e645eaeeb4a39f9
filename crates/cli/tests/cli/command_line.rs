//! Command lines, good and wrong: help, version, completions, and what a mistake is told.

use crate::{
    ASSISTANT, PROMPT, WITH_ASSISTANT, WITH_MTP, bad, folder, good, models, paceline, run_json,
    snapshot, text, words,
};
use std::fs;

#[test]
fn help_is_as_written() {
    let folder = folder("help");
    for line in [
        "",
        "run",
        "chat",
        "serve",
        "launch",
        "ps",
        "stop",
        "man",
        "inspect",
        "bench",
        "perplexity",
        "count",
        "replay",
        "conformance",
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
fn every_command_has_a_manual_page() {
    let folder = folder("man");
    let (page, _) = good(paceline(&folder, &["man"]));
    assert!(page.contains(".TH paceline 1"), "{page}");
    good(paceline(&folder, &["man", "pages/man1"]));
    let (help, _) = good(paceline(&folder, &["--help"]));
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let commands = commands.take_while(|line| !line.is_empty());
    let names: Vec<&str> = commands
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert!(names.contains(&"launch"), "{help}");
    for name in names.into_iter().filter(|name| *name != "help") {
        let page = folder.join(format!("pages/man1/paceline-{name}.1"));
        let page = fs::read_to_string(page).unwrap();
        assert!(page.contains(&format!(".TH paceline-{name} 1")), "{page}");
    }
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
            "`f8` is none of bf16, f16, f32, q8_0, q5_0, q4_0, rot-q8_0",
        ),
        (
            &["bench", "--kv-formats", "bf16,q8_0,turbo5"],
            "`turbo5` is none of bf16, f16, f32, q8_0",
        ),
        (
            &["bench", "--kv-formats", "q8_0+q5"],
            "turbo4, turbo3, turbo2; keys and values may differ, as in q8_0+turbo4",
        ),
        (
            &["run", PROMPT, "--kv", "bf16,protect=2"],
            "`protect=2` has no effect: q8_0 is no finer than bf16",
        ),
        (
            &["run", PROMPT, "--kv", "turbo,layers=2"],
            "`layers=2` is no rule of a KV cache: rules are protect=N",
        ),
        (&["bench", "--batch", "1,0"], "expected a number from 1 on"),
        (
            &["bench", "--contexts", "1k,x"],
            "expected a number such as 4096 or 4k",
        ),
        (
            &["bench", "--contexts", "1k", "--context", "2k"],
            "--context has no effect with --contexts 1k",
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
    assert!(text(&output.stderr).contains("turbo4, turbo3, turbo2"));
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
