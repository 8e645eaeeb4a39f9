//! `paceline chat`: turns, commands between them, and models that cannot chat.

use crate::{Server, bad, copy, feed, folder, good, paceline, run_json, text};
use serde_json::{Value, json};
use std::fs;
use std::io::BufRead;

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
fn conversations_go_on_from_files_and_options_change_between_turns() {
    let folder = folder("chat-commands");
    let say = |input: &str| {
        let output = feed(
            paceline(&folder, &["chat", "--temperature=0", "-n", "20"]),
            input,
        );
        (text(&output.stdout), text(&output.stderr))
    };
    let (whole, _) = say("Hello!\n/save a.json\nAnd then?\n/save whole.json\n");
    let second = whole.lines().nth(1).unwrap();
    let (resumed, _) = say("/load a.json\nAnd then?\n/save resumed.json\n/export story.md\n");
    assert_eq!(resumed.trim_end(), second);
    let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
    assert_eq!(read("resumed.json"), read("whole.json"));
    let story = read("story.md");
    assert!(
        story
            .starts_with("# Conversation with tiny-gemma4\n\n## You\n\nHello!\n\n## tiny-gemma4\n"),
        "{story}"
    );
    assert!(story.contains("\n## You\n\nAnd then?\n"), "{story}");

    // Text is the same whatever is drafted; the seed alone changes it.
    let (drafted, shown) =
        say("/set temperature 1\n/set seed 5\nHello!\n/draft\n/set temperature\n");
    assert!(
        shown.contains("assistant drafts as many tokens as pay"),
        "{shown}"
    );
    assert!(shown.ends_with("temperature 1\n"), "{shown}");
    let (plain, shown) =
        say("/draft off\n/set temperature 1\n/set seed 5\nHello!\n/draft\n/stats\n");
    assert_eq!(drafted, plain);
    assert!(
        shown.contains("speculation is off") && shown.contains("0 tokens drafted"),
        "{shown}"
    );
    let (twice, _) = say("/set temperature 1\n/set seed 4\nHello!\n/retry\n/save b.json\n");
    assert_eq!(twice.lines().last(), drafted.trim_end().lines().last());
    assert_eq!(
        serde_json::from_str::<Value>(&read("b.json"))
            .unwrap()
            .as_array()
            .unwrap()
            .len(),
        2
    );
    let (stopped, _) = say("/set max-tokens 3\nHello!\n");
    assert!(stopped.len() < whole.lines().next().unwrap().len());
    let (_, list) = say("/set\n");
    assert!(
        list.contains("top_k") && list.contains("dry_multiplier"),
        "{list}"
    );

    fs::write(
        folder.join("odd.json"),
        r#"[{"role": "user", "content": "a"}]"#,
    )
    .unwrap();
    for (line, said) in [
        ("/set speed 3", "there is no option `speed`"),
        ("/set top_p 2", "top_p takes 0 to 1"),
        ("/set seed x", "seed takes a whole number, not `x`"),
        (
            "/draft 99",
            "/draft takes auto, off, or a number of tokens up to",
        ),
        ("/retry", "there is no answer yet"),
        ("/load", "/load needs the name of a file"),
        ("/load missing.json", "cannot read `missing.json`"),
        (
            "/load odd.json",
            "questions (user) and answers (assistant) in turn",
        ),
        ("/export story.md", "cannot create `story.md`"),
    ] {
        let (_, error) = say(&format!("{line}\n"));
        assert!(error.contains(said), "{line}: {error}");
    }
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
