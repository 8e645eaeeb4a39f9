//! Our rendering of chat templates against Jinja2's, byte for byte.
//!
//! `render.json` is written by `render.py` beside it.

use serde_json::{Map, Value, json};
use text::{ChatTemplate, TextError};

/// The template of a bundled model.
fn bundled(model: &str) -> String {
    let models = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models");
    std::fs::read_to_string(format!("{models}/{model}/chat_template.jinja")).unwrap()
}

#[test]
fn templates_render_as_in_jinja2() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("render.json")).unwrap();
    let config = json!({"bos_token": "<bos>", "eos_token": {"content": "<eos>"}});
    let mut wrong = Vec::new();
    for case in &cases {
        let name = case["name"].as_str().unwrap();
        let source = match case["model"].as_str() {
            Some(model) => bundled(model),
            None => case["template"].as_str().unwrap().to_owned(),
        };
        let template = match ChatTemplate::new(Some(&source), &config) {
            Ok(template) => template,
            Err(err) => {
                wrong.push(format!("{name}: {err}"));
                continue;
            }
        };
        let tools = Some(&case["tools"]).filter(|tools| !tools.is_null());
        let extra: Map<String, Value> = case["extra"].as_object().unwrap().clone();
        let add_prompt = case["add_generation_prompt"].as_bool().unwrap();
        let rendered = template.render(&case["messages"], tools, add_prompt, &extra);
        let expected = case["expected"].as_str();
        let is_right = match (&rendered, expected) {
            (Ok(text), Some(expected)) => text == expected,
            (Err(TextError::Refused { message }), None) => case["refused"] == *message,
            _ => false,
        };
        if !is_right {
            wrong.push(format!(
                "{name}:\n  ours   {rendered:?}\n  jinja2 {expected:?}"
            ));
        }
    }
    assert!(cases.len() > 80);
    assert!(
        wrong.is_empty(),
        "{} differ\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

/// llama.cpp has an interpreter of its own, with fewer filters, and `default` for
/// anything but a map.
#[test]
fn bundled_templates_use_what_other_engines_have() {
    for model in ["tiny-gemma4", "tiny-qwen3.5"] {
        let source = bundled(model);
        // A filter stands after a bar between spaces; the marks of the models have none.
        for filter in source.split(" | ").skip(1) {
            let name: String = filter
                .chars()
                .take_while(char::is_ascii_lowercase)
                .collect();
            assert!(
                ["default", "dictsort", "tojson", "upper"].contains(&name.as_str()),
                "{model}: {name}"
            );
        }
        assert!(!source.contains("default({"), "{model}: `default` of a map");
        for word in [
            "sameas",
            "escaped",
            "sort_keys",
            "ensure_ascii",
            "map(",
            "unique",
            "indent",
        ] {
            assert!(!source.contains(word), "{model}: {word}");
        }
    }
    // Without these words, llama.cpp rewrites the messages for Gemma's first template,
    // which knew no turns of tools.
    assert!(bundled("tiny-gemma4").starts_with("{#- OpenAI Chat Completions:"));
}
