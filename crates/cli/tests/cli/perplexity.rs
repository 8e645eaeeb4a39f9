//! `paceline perplexity`.

use crate::{folder, good, paceline};
use serde_json::{Value, json};
use std::fs;

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
