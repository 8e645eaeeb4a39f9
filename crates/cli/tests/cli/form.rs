//! `--format`, `--schema`, `--grammar` and `--regex` of `run` and `chat`.

use crate::{PROMPT, bad, feed, folder, good, paceline, run_json, text};
use serde_json::{Value, json};
use std::fs;

/// Arguments under which answers of the bundled models end soon.
const SHORT: &[&str] = &[PROMPT, "-n", "200", "--temperature", "0"];

#[test]
fn answers_follow_what_is_asked_for_with_and_without_drafts() {
    let folder = folder("form");
    let schema = json!({
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 3, "maximum": 9}, "kind": {"enum": ["hare", "owl"]}},
        "required": ["age", "kind"],
        "additionalProperties": false,
    });
    fs::write(folder.join("s.json"), schema.to_string()).unwrap();
    fs::write(folder.join("g.gbnf"), "root ::= \"yes\" | \"no\"").unwrap();
    fs::write(folder.join("g.lark"), "start: /(a|b){4}/").unwrap();
    let inline = schema.to_string();
    type Check = fn(&str) -> bool;
    let is_of_schema: Check = |text| {
        let value: Value = serde_json::from_str(text).unwrap();
        let kind = value["kind"].as_str().unwrap();
        value.as_object().unwrap().len() == 2
            && (3..=9).contains(&value["age"].as_i64().unwrap())
            && ["hare", "owl"].contains(&kind)
    };
    let forms: [(&[&str], Check); 6] = [
        (&["--schema", "s.json"], is_of_schema),
        (&["--schema", &inline, "--format", "json"], is_of_schema),
        (&["--grammar", "g.gbnf"], |text| {
            ["yes", "no"].contains(&text)
        }),
        (&["--grammar", "g.lark"], |text| {
            text.len() == 4 && text.chars().all(|c| "ab".contains(c))
        }),
        (&["--regex", "[0-9]{3}-[0-9]{2}"], |text| {
            text.len() == 6 && text.as_bytes()[3] == b'-'
        }),
        (&["--regex", "x", "--raw"], |text| text == "x"),
    ];
    for model in ["tiny-gemma4", "tiny-qwen3.5"] {
        for (form, is_right) in forms {
            let of =
                |more: &[&str]| run_json(&folder, &[SHORT, &["-m", model], form, more].concat());
            let [on, off] = [of(&[]), of(&["--draft", "none"])];
            let answer = on["text"].as_str().unwrap();
            assert!(is_right(answer), "{model} {form:?}: {answer}");
            assert_eq!(on["finish"], "stop", "{model} {form:?}");
            assert_eq!(on["token_ids"], off["token_ids"], "{model} {form:?}");
        }
    }
    // Any object, which these models end late: it is one as far as it goes.
    let free = run_json(&folder, &[SHORT, &["--format", "json"]].concat());
    assert!(free["text"].as_str().unwrap().starts_with('{'));
    let (stdout, _) = good(paceline(
        &folder,
        &[&["run"], SHORT, &["--format", "text"]].concat(),
    ));
    assert!(!stdout.starts_with('{'));

    let args = ["chat", "--temperature=0", "--schema", "s.json"];
    let output = feed(paceline(&folder, &args), "One?\nAnother?\n");
    let answers = text(&output.stdout);
    assert_eq!(answers.lines().count(), 2);
    assert!(answers.lines().all(is_of_schema), "{answers}");
}

#[test]
fn an_answer_may_be_thought_about_first() {
    let folder = folder("form-reasoning");
    for model in ["tiny-gemma4", "tiny-qwen3.5"] {
        let args = [
            "What is 3 + 4?",
            "-m",
            model,
            "--regex",
            "<[0-9]>",
            "--chat-template-kwargs",
            r#"{"enable_thinking": true}"#,
        ];
        let record = run_json(&folder, &args);
        assert!(record["reasoning"].as_str().unwrap().starts_with("Tens"));
        assert_eq!(record["text"].as_str().unwrap().len(), 3, "{record:#}");
    }
}

#[test]
fn what_cannot_be_followed_is_said() {
    let folder = folder("form-errors");
    fs::write(folder.join("no.json"), "{").unwrap();
    for (args, said) in [
        (
            &["--schema", "missing.json"][..],
            "cannot read `missing.json`",
        ),
        (&["--schema", "no.json"], "there is no JSON in `no.json`"),
        (&["--schema", "{\"type\""], "--schema is not JSON"),
        (
            &["--schema", "{}", "--format", "text"],
            "leave one of them out",
        ),
        (
            &["--schema", r#"{"type": "array", "uniqueItems": true}"#],
            "the model cannot follow --schema: ",
        ),
        (&["--regex", "("], "the model cannot follow --regex: "),
    ] {
        let error = bad(paceline(&folder, &[&["run", PROMPT], args].concat()));
        assert!(error.contains(said), "{args:?}: {error}");
    }
}
