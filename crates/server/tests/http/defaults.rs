//! What requests mean that do not say, where the server was told.

use serde_json::{Map, Value, json};
use server::{Defaults, ModelConfig};

use crate::client::{Server, Setup};

/// A server whose requests are greedy, short and of one seed, and whose model reasons.
async fn server() -> Server {
    let template_arguments = Map::from_iter([("enable_thinking".to_owned(), json!(true))]);
    let defaults = Defaults {
        numbers: vec![("temperature", 0.0), ("min_p", 0.25)],
        top_k: Some(40),
        seed: Some(7),
        max_tokens: Some(5),
        template_arguments,
    };
    Server::start(Setup {
        settings: ModelConfig {
            defaults,
            ..ModelConfig::default()
        },
        ..Setup::default()
    })
    .await
}

fn user() -> Value {
    json!([{"role": "user", "content": "Tell me a story"}])
}

#[tokio::test]
async fn every_dialect_takes_the_server_s_defaults_and_a_request_counts_more() {
    let server = server().await;
    for (path, silent, own, tokens) in [
        (
            "/v1/chat/completions",
            json!({"messages": user(), "ignore_eos": true}),
            json!({"max_tokens": 3}),
            "/usage/completion_tokens",
        ),
        (
            "/v1/completions",
            json!({"prompt": "Once", "ignore_eos": true}),
            json!({"max_tokens": 3}),
            "/usage/completion_tokens",
        ),
        (
            "/v1/responses",
            json!({"input": "Once"}),
            json!({"max_output_tokens": 3}),
            "/usage/output_tokens",
        ),
        (
            "/completion",
            json!({"prompt": "Once", "ignore_eos": true}),
            json!({"n_predict": 3}),
            "/tokens_predicted",
        ),
        (
            "/api/generate",
            json!({"prompt": "Once", "raw": true, "stream": false}),
            json!({"options": {"num_predict": 3}}),
            "/eval_count",
        ),
    ] {
        let ask = async |body: &Value| {
            let reply = server.post(path, body).await;
            assert_eq!(reply.status, 200, "{path}: {reply:?}");
            reply.json()
        };
        let first = ask(&silent).await;
        assert_eq!(first.pointer(tokens), Some(&json!(5)), "{path}: {first}");
        let mut body = silent.clone();
        let own = own.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(own);
        let shorter = ask(&body).await;
        assert_eq!(
            shorter.pointer(tokens),
            Some(&json!(3)),
            "{path}: {shorter}"
        );
    }
    let greedy = json!({"prompt": "Once", "temperature": 0, "max_tokens": 5});
    let silent = json!({"prompt": "Once"});
    let ask = async |body: &Value| server.post("/v1/completions", body).await.text();
    assert_eq!(ask(&silent).await, ask(&greedy).await);
    // The seed is the server's, unless the request has one or asks for any.
    let seed = async |more: Value| {
        let mut body = json!({"prompt": "Once", "n_predict": 1});
        let more = more.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(more);
        let reply = server.post("/completion", &body).await.json();
        reply["generation_settings"]["seed"].clone()
    };
    assert_eq!(seed(json!({})).await, 7);
    assert_eq!(seed(json!({"seed": 8})).await, 8);
    assert_ne!(seed(json!({"seed": -1})).await, 7);
}

#[tokio::test]
async fn the_chat_template_s_arguments_have_defaults() {
    let server = server().await;
    let is_open = async |more: Value| {
        let mut body = json!({"messages": user()});
        let more = more.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(more);
        let prompt = server.post("/apply-template", &body).await.json()["prompt"].clone();
        prompt.as_str().unwrap().ends_with("<think>\n")
    };
    assert!(is_open(json!({})).await);
    assert!(!is_open(json!({"enable_thinking": false})).await);
    assert!(!is_open(json!({"reasoning_effort": "none"})).await);
    assert!(!is_open(json!({"chat_template_kwargs": {"enable_thinking": false}})).await);
}

#[tokio::test]
async fn defaults_are_shown() {
    let server = server().await;
    let props = server.get("/props").await.json();
    let params = &props["default_generation_settings"]["params"];
    for (name, value) in [
        ("temperature", json!(0.0)),
        ("min_p", json!(0.25)),
        ("top_k", json!(40)),
        ("seed", json!(7)),
        ("n_predict", json!(5)),
    ] {
        assert_eq!(params[name], value, "{name}");
    }
    let listed = server.get("/v1/models").await.json();
    let options = listed["data"][0]["meta"]["options"]
        .as_array()
        .unwrap()
        .clone();
    let default = |name: &str| {
        let option = options.iter().find(|option| option["name"] == name);
        option.unwrap()["default"].clone()
    };
    assert_eq!(default("temperature"), 0.0);
    assert_eq!(default("max_tokens"), 5);
    let shown = server
        .post("/api/show", &json!({"model": "tiny-qwen3.5"}))
        .await;
    let parameters = shown.json()["parameters"].as_str().unwrap().to_owned();
    assert!(
        parameters.contains("temperature 0\n") && parameters.ends_with("top_k 40"),
        "{parameters}"
    );
}
