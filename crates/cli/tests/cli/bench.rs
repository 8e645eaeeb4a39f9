//! `paceline bench`.

use crate::{WITH_MTP, folder, paceline, text};
use serde_json::Value;

#[test]
fn rows_have_their_rates_and_chosen_lengths_are_set_against_fixed_ones() {
    let folder = folder("bench");
    let args = [
        "bench",
        "-q",
        "--no-steps",
        "--no-probe",
        "--device",
        "cpu",
        "-m",
        WITH_MTP,
        "--draft-lengths",
        "0,2,auto",
        "--max-tokens",
        "8",
    ];
    let output = paceline(&folder, &[&args[..], &["--json"]].concat()).output();
    let output = output.unwrap();
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{}", text(&output.stderr)));
    let runs = report["runs"].as_array().unwrap();
    for class in ["story", "chat", "exact", "random", "all"] {
        let own: Vec<&Value> = runs.iter().filter(|run| run["class"] == class).collect();
        assert_eq!(own.len(), 3, "a row for each draft length: {class}");
        for (run, draft) in own.iter().zip([Value::from(0), 2.into(), "auto".into()]) {
            assert_eq!(run["draft"], draft);
            assert!(run["first_token_ms"].as_f64().unwrap() > 0.0, "{run}");
            assert!(run["tokens"].as_u64().unwrap() > 0, "{run}");
            let temperature = if class == "random" { 1.5 } else { 0.0 };
            assert_eq!(run["temperature"], temperature, "{run}");
        }
        let summaries = report["summary"].as_array().unwrap().iter();
        let own: Vec<&Value> = summaries.filter(|s| s["class"] == class).collect();
        assert_eq!(own.len(), 1, "{class}");
        for name in ["auto_over_best_fixed", "auto_over_none"] {
            assert!(own[0][name].as_f64().unwrap() > 0.0, "{}", own[0]);
        }
    }
    // Random texts end at the limit alone, and are not part of the sum.
    let tokens = |class: &str| -> u64 {
        let own = runs
            .iter()
            .filter(|run| run["class"] == class && run["draft"] == 0);
        own.map(|run| run["tokens"].as_u64().unwrap()).sum()
    };
    assert_eq!(tokens("random"), 3 * 8);
    assert_eq!(
        tokens("all"),
        tokens("story") + tokens("chat") + tokens("exact")
    );
}
