//! Our rendering of chat templates against Jinja2's, byte for byte.
//!
//! `render.json` is written by `render.py` beside it.

use serde_json::{Map, Value, json};
use text::{ChatTemplate, TextError};

#[test]
fn templates_render_as_in_jinja2() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("render.json")).unwrap();
    let config = json!({"bos_token": "<bos>", "eos_token": {"content": "<eos>"}});
    let mut wrong = Vec::new();
    for case in &cases {
        let name = case["name"].as_str().unwrap();
        let template = match ChatTemplate::new(case["template"].as_str(), &config) {
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
    assert!(cases.len() > 40);
    assert!(
        wrong.is_empty(),
        "{} differ\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}
