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

#[test]
fn perplexity_compares_formats_of_the_kv_cache() {
    let folder = folder("divergence");
    let text =
        "Once upon a time there was a little rabbit who had a red kite. The wind was strong.";
    fs::write(folder.join("text.txt"), text).unwrap();
    let report = |kv: &str, against: &str| -> Value {
        let args = [
            "perplexity",
            "-q",
            "-m",
            "tiny-qwen3.5",
            "text.txt",
            "--json",
            "--context",
            "16",
            "--activations",
            "f32",
            "--kv",
            kv,
            "--kl-divergence",
            against,
        ];
        let (stdout, _) = good(paceline(&folder, &args));
        serde_json::from_str(&stdout).unwrap()
    };
    let number = |value: &Value| value.as_f64().unwrap();
    let same = report("bf16", "bf16");
    assert_eq!(number(&same["against"]["kl_divergence"]), 0.0);
    assert_eq!(number(&same["against"]["same_top"]), 1.0);
    let [fine, coarse] = ["q8_0", "turbo2"].map(|kv| report(kv, "bf16"));
    assert_eq!(coarse["against"]["kv_format"], "bf16");
    let [fine, coarse] = [&fine, &coarse].map(|r| {
        let bytes = number(&r["kv_token_bytes"]);
        (number(&r["against"]["kl_divergence"]), bytes)
    });
    assert!(
        0.0 < fine.0 && 10.0 * fine.0 < coarse.0,
        "{fine:?} {coarse:?}"
    );
    assert_eq!(fine.1 * 2.25, coarse.1 * 8.5, "bits of heads of 64 columns");
}
