//! `completion_probabilities`, before and after the samplers.

use serde_json::{Value, json};

use super::{story, stream, tell, with};
use crate::client::{Server, Setup};

/// Checks the entries of an answer, and gives them: each has `top` others at most.
fn entries(answer: &Value, own: &str, others: &str, top: usize) -> Vec<Value> {
    let entries = answer["completion_probabilities"].as_array().unwrap();
    for entry in entries {
        let list = entry[others].as_array().unwrap();
        assert!((1..=top).contains(&list.len()), "{entry}");
        for one in list.iter().chain([entry]) {
            assert!(one["id"].is_u64() && one["token"].is_string(), "{one}");
            assert!(one["bytes"].is_array() && one[own].is_number(), "{one}");
        }
        let likely: Vec<f64> = list.iter().map(|one| one[own].as_f64().unwrap()).collect();
        assert!(likely.is_sorted_by(|a, b| a >= b), "{entry}");
    }
    entries.clone()
}

#[tokio::test]
async fn tokens_come_with_log_probabilities_before_sampling() {
    let server = Server::start(Setup::default()).await;
    let asked = json!({"n_probs": 10, "return_tokens": true});
    let answer = tell(&server, &asked).await;
    let all = entries(&answer, "logprob", "top_logprobs", 10);
    assert_eq!(all.len(), 12);
    let tokens: Vec<Value> = all.iter().map(|entry| entry["id"].clone()).collect();
    assert_eq!(json!(tokens), answer["tokens"]);
    let text: String = all
        .iter()
        .map(|entry| entry["token"].as_str().unwrap())
        .collect();
    assert_eq!(json!(text), answer["content"]);
    for entry in &all {
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 10);
        assert!(entry["logprob"].as_f64().unwrap() <= 0.0);
        // Greedy: the likeliest was taken.
        assert_eq!(entry["top_logprobs"][0]["id"], entry["id"]);
        assert_eq!(entry["top_logprobs"][0]["logprob"], entry["logprob"]);
    }
    let alias = tell(&server, &json!({"logprobs": 10})).await;
    assert_eq!(
        alias["completion_probabilities"],
        answer["completion_probabilities"]
    );
    let none = tell(&server, &json!({"n_probs": 0, "post_sampling_probs": true})).await;
    assert!(none.get("completion_probabilities").is_none());
}

#[tokio::test]
async fn a_chunk_has_the_probabilities_of_one_token() {
    let server = Server::start(Setup::default()).await;
    for more in [
        json!({"n_probs": 3}),
        json!({"n_probs": 2, "stop": ["."], "n_predict": 40}),
        json!({"n_probs": 2, "post_sampling_probs": true, "temperature": 1}),
    ] {
        let whole = tell(&server, &more).await;
        let chunks = stream(&server, "/completion", &story(&more)).await;
        let (last, before) = chunks.split_last().unwrap();
        let mut all = Vec::new();
        for chunk in before {
            let list = chunk["completion_probabilities"].as_array().unwrap();
            assert_eq!(list.len(), 1, "{chunk}");
            assert_eq!(chunk["tokens"], json!([list[0]["id"]]));
            all.extend(list.clone());
        }
        assert_eq!(json!(all), whole["completion_probabilities"]);
        assert_eq!(json!(super::content(before)), whole["content"]);
        assert!(last.get("completion_probabilities").is_none());
    }
}

#[tokio::test]
async fn probabilities_after_sampling_are_those_that_are_left() {
    let server = Server::start(Setup::default()).await;
    let asked = json!({"n_probs": 10, "post_sampling_probs": true});
    let greedy = tell(&server, &asked).await;
    for entry in entries(&greedy, "prob", "top_probs", 10) {
        assert_eq!(entry["prob"], 1.0);
        assert_eq!(entry["top_probs"].as_array().unwrap().len(), 1);
        assert_eq!(entry["top_probs"][0]["id"], entry["id"]);
        assert!(entry.get("logprob").is_none() && entry.get("top_logprobs").is_none());
    }
    let sampling = json!({"temperature": 1.5, "top_k": 3});
    let sampled = tell(&server, &with(asked.clone(), &sampling)).await;
    let all = entries(&sampled, "prob", "top_probs", 3);
    let mut n_open = 0;
    for entry in &all {
        let top = entry["top_probs"].as_array().unwrap();
        let sum: f64 = top.iter().map(|one| one["prob"].as_f64().unwrap()).sum();
        assert!((sum - 1.0).abs() < 1e-5, "{entry}");
        assert!(
            top.iter()
                .any(|one| one["id"] == entry["id"] && one["prob"] == entry["prob"])
        );
        n_open += usize::from(entry["prob"].as_f64().unwrap() < 1.0);
    }
    assert!(n_open > 3, "{sampled}");
    // Which tokens are written does not depend on what is told of them.
    let untold = tell(&server, &with(sampling, &json!({"n_probs": 3}))).await;
    assert_eq!(untold["content"], sampled["content"]);
    let grammar = json!({"grammar": "root ::= \"ab\"", "temperature": 1});
    let forced = tell(&server, &with(asked, &grammar)).await;
    let all = entries(&forced, "prob", "top_probs", 10);
    let text: String = all
        .iter()
        .map(|entry| entry["token"].as_str().unwrap())
        .collect();
    assert_eq!(text, "ab");
}
