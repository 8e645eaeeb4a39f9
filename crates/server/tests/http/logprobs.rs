//! Log-probabilities, in both spellings.

use serde_json::{Value, json};

use crate::client::{Server, Setup};

const COMPLETIONS: &str = "/v1/completions";

fn asking(more: &Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": "Tell me a story about a café and a kite 🪁."}],
        "max_tokens": 40, "temperature": 0, "seed": 3, "logprobs": true, "top_logprobs": 3,
    });
    let more = more.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(more);
    body
}

fn joined(entries: &Value) -> String {
    let strings = entries.as_array().unwrap().iter();
    strings.map(|e| e["token"].as_str().unwrap()).collect()
}

/// Its strings make up `text`, its numbers are those of a distribution.
fn check(entries: &Value, text: &str, top: usize) {
    assert_eq!(joined(entries), text);
    for entry in entries.as_array().unwrap() {
        let own = entry["logprob"].as_f64().unwrap();
        assert!(own <= 0.0, "{entry}");
        assert!(!entry["bytes"].as_array().unwrap().is_empty());
        let tops = entry["top_logprobs"].as_array().unwrap();
        let tops: Vec<f64> = tops
            .iter()
            .map(|t| t["logprob"].as_f64().unwrap())
            .collect();
        assert_eq!(tops.len(), top);
        assert!(tops.iter().rev().is_sorted());
        assert!(tops.first().is_none_or(|&best| own <= best));
        assert!(tops.iter().map(|l| l.exp()).sum::<f64>() <= 1.0 + 1e-5);
    }
}

#[tokio::test]
async fn every_token_of_an_answer_has_one_whoever_drafted_it() {
    let server = Server::start(Setup::default()).await;
    for more in [
        json!({}),
        json!({"temperature": 1, "top_p": 0.9}),
        json!({"frequency_penalty": 0.5, "logit_bias": {"7": 3}, "top_logprobs": 20}),
        json!({"top_logprobs": 0}),
    ] {
        let reply = server.chat(&asking(&more)).await.json();
        let choice = &reply["choices"][0];
        let content = &choice["logprobs"]["content"];
        let n = content.as_array().unwrap().len();
        assert_eq!(
            n as u64,
            reply["usage"]["completion_tokens"].as_u64().unwrap()
        );
        let text = choice["message"]["content"].as_str().unwrap();
        let top = more["top_logprobs"].as_u64().unwrap_or(3);
        check(content, text, top as usize);
        assert!(
            reply["speculation"]["accepted"].as_u64().unwrap() > 0,
            "{more}"
        );

        let mut alone = asking(&more);
        alone["speculation"] = json!("off");
        let plain = server.chat(&alone).await.json();
        assert_eq!(plain["choices"], reply["choices"], "{more}");
        for field in ["logprobs", "top_logprobs"] {
            alone[field] = Value::Null;
        }
        let silent = server.chat(&alone).await.json();
        assert_eq!(silent["choices"][0]["message"], choice["message"]);
        assert_eq!(silent["choices"][0]["logprobs"], Value::Null);

        let mut streamed = asking(&more);
        streamed["stream"] = json!(true);
        let events = server.chat(&streamed).await.events();
        let mut entries = Vec::new();
        let mut said = String::new();
        for event in &events {
            let choice = &event["choices"][0];
            said += choice["delta"]["content"].as_str().unwrap_or_default();
            if let Some(more) = choice["logprobs"]["content"].as_array() {
                entries.extend(more.iter().cloned());
            }
            // What is held back may make tokens late, never early.
            assert!(joined(&json!(entries)).starts_with(&said), "{event}");
        }
        assert_eq!(&json!(entries), content, "{more}");
    }
    // Greedy, and nothing moves a logit: the token is the likeliest.
    let reply = server.chat(&asking(&json!({}))).await.json();
    for entry in reply["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap()
    {
        assert_eq!(entry["bytes"], entry["top_logprobs"][0]["bytes"]);
        assert_eq!(entry["logprob"], entry["top_logprobs"][0]["logprob"]);
    }
}

#[tokio::test]
async fn those_of_reasoning_come_apart() {
    for model in ["tiny-qwen3.5", "tiny-gemma4"] {
        let setup = Setup {
            model,
            ..Setup::default()
        };
        let server = Server::start(setup).await;
        let thinking = json!({"messages": [{"role": "user", "content": "What is 3 + 4?"}],
            "chat_template_kwargs": {"enable_thinking": true}, "max_tokens": 100});
        let reply = server.chat(&asking(&thinking)).await.json();
        let (choice, usage) = (&reply["choices"][0], &reply["usage"]);
        let text = |name: &str| choice["message"][name].as_str().unwrap().to_owned();
        let logprobs = &choice["logprobs"];
        check(&logprobs["content"], &text("content"), 3);
        assert!(joined(&logprobs["reasoning_content"]).contains(&text("reasoning_content")));
        let n = |name: &str| logprobs[name].as_array().unwrap().len() as u64;
        let all = n("content") + n("reasoning_content");
        assert_eq!(all, usage["completion_tokens"].as_u64().unwrap());

        let mut streamed = asking(&thinking);
        streamed["stream"] = json!(true);
        let events = server.chat(&streamed).await.events();
        for name in ["content", "reasoning_content"] {
            let part = |e: &Value| e["choices"][0]["logprobs"][name].as_array().cloned();
            let entries: Vec<Value> = events.iter().filter_map(part).flatten().collect();
            assert_eq!(json!(entries), logprobs[name], "{model} {name}");
        }
    }
}

#[tokio::test]
async fn a_completion_has_lists_of_them() {
    let server = Server::start(Setup::default()).await;
    let body =
        json!({"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "logprobs": 2});
    let reply = server.post(COMPLETIONS, &body).await.json();
    let choice = &reply["choices"][0];
    let list = |name: &str| choice["logprobs"][name].as_array().unwrap().clone();
    let tokens: Vec<String> = list("tokens")
        .iter()
        .map(|t| t.as_str().unwrap().to_owned())
        .collect();
    assert_eq!(tokens.concat(), choice["text"].as_str().unwrap());
    assert_eq!(tokens.len(), 12);
    let mut offset = 0;
    for (i, token) in tokens.iter().enumerate() {
        assert_eq!(list("text_offset")[i], offset);
        offset += token.chars().count();
        let top = &list("top_logprobs")[i];
        assert_eq!(top.as_object().unwrap().len(), 2);
        assert_eq!(top[token], list("token_logprobs")[i], "the likeliest");
    }
    let with = |field: &str, value: Value| {
        let mut body = body.clone();
        body[field] = value;
        body
    };
    let events = server.post(COMPLETIONS, &with("stream", json!(true))).await;
    let part = |e: &Value| {
        e["choices"][0]["logprobs"]["text_offset"]
            .as_array()
            .cloned()
    };
    let offsets: Vec<Value> = events.events().iter().filter_map(part).flatten().collect();
    assert_eq!(offsets, list("text_offset"));
    // The chosen one's own, though none of the likeliest was asked for.
    let reply = server
        .post(COMPLETIONS, &with("logprobs", json!(0)))
        .await
        .json();
    let logprobs = &reply["choices"][0]["logprobs"];
    assert_eq!(
        logprobs["token_logprobs"],
        choice["logprobs"]["token_logprobs"]
    );
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 1);
}

#[tokio::test]
async fn what_makes_no_sense_is_refused() {
    let server = Server::start(Setup::default()).await;
    for (field, value) in [
        ("logprobs", json!(3)),
        ("logprobs", json!(false)),
        ("top_logprobs", json!(21)),
        ("top_logprobs", json!(-1)),
    ] {
        let reply = server.chat(&asking(&json!({field: value}))).await;
        assert_eq!(reply.status, 400, "{field} {value}");
        let param = reply.error()["param"].clone();
        assert!(param == field || param == "top_logprobs", "{param}");
    }
    for value in [json!(true), json!(21), json!(-1), json!("3")] {
        let body = json!({"prompt": "a", "max_tokens": 1, "logprobs": value});
        let reply = server.post(COMPLETIONS, &body).await;
        assert_eq!(
            (reply.status, &reply.error()["param"]),
            (400, &json!("logprobs"))
        );
    }
}
