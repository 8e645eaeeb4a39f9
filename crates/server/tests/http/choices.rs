//! Several answers by one request: `n`, and lists of prompts.

use serde_json::{Value, json};

use crate::client::{Server, Setup};
use crate::wire::{COMPLETIONS, hello, with};

fn setup(model: &'static str) -> Setup {
    Setup {
        model,
        context: 2048,
        sequences: 4,
        ..Setup::default()
    }
}

/// A conversation whose prompt has whole pages to share.
fn long() -> Value {
    let text = "Tell me about the rabbit, the kite and the wind. ".repeat(25);
    json!({
        "messages": [{"role": "user", "content": text}],
        "temperature": 0.9, "seed": 7, "max_tokens": 24,
    })
}

/// The choices of a whole answer, without what only several have.
fn choices(body: &Value) -> Vec<Value> {
    let mut choices = body["choices"].as_array().unwrap().clone();
    for choice in &mut choices {
        let choice = choice.as_object_mut().unwrap();
        for name in ["index", "seed", "speculation", "timings"] {
            choice.remove(name);
        }
    }
    choices
}

/// The texts of a stream by choice, and how each ended.
fn texts(events: &[Value], n: usize) -> Vec<(String, Value)> {
    let mut texts = vec![(String::new(), Value::Null); n];
    for choice in events.iter().flat_map(|e| e["choices"].as_array().unwrap()) {
        let of = &mut texts[choice["index"].as_u64().unwrap() as usize];
        assert_eq!(of.1, Value::Null, "nothing comes after the end");
        let text = choice["delta"]["content"].as_str();
        of.0 += text.or(choice["text"].as_str()).unwrap_or_default();
        of.1 = choice["finish_reason"].clone();
    }
    texts
}

#[tokio::test]
async fn each_of_n_answers_is_that_of_its_seed_alone() {
    for model in ["tiny-qwen3.5", "tiny-gemma4"] {
        let server = Server::start(setup(model)).await;
        let alone = Server::start(setup(model)).await;
        let mut want = Vec::new();
        for seed in 7..10 {
            let body = alone.chat(&with(&long(), json!({"seed": seed}))).await;
            want.extend(choices(&body.json()));
        }
        assert_ne!(want[0], want[1], "answers differ, or nothing is shown");
        let several = with(&long(), json!({"n": 3}));
        let body = server.chat(&several).await.json();
        assert_eq!(choices(&body), want, "{model}");
        for (i, choice) in body["choices"].as_array().unwrap().iter().enumerate() {
            assert_eq!(choice["index"], i);
            assert_eq!(choice["seed"], 7 + i as u64);
            assert!(choice["timings"]["predicted_n"].is_u64());
            assert!(choice["speculation"]["rounds"].is_u64());
        }
        // The prompt counts once, the answers all.
        let usage = &body["usage"];
        let prompt = alone.chat(&long()).await.json()["usage"]["prompt_tokens"].clone();
        assert_eq!(usage["prompt_tokens"], prompt);
        let written = body["choices"].as_array().unwrap().iter();
        let written: u64 = written
            .map(|c| c["timings"]["predicted_n"].as_u64().unwrap())
            .sum();
        assert_eq!(usage["completion_tokens"], written);
        // Rows of the prompt are computed once: the second and third answer find them.
        for i in [1, 2] {
            let shared = body["choices"][i]["timings"]["cache_n"].as_u64().unwrap();
            assert!(
                shared * 2 > prompt.as_u64().unwrap(),
                "{model} {i}: {shared}"
            );
        }
        let off = with(&several, json!({"speculation": "off"}));
        assert_eq!(choices(&server.chat(&off).await.json()), want, "{model}");

        let usage = json!({"stream": true, "stream_options": {"include_usage": true}});
        let events = server.chat(&with(&several, usage)).await.events();
        let streamed = texts(&events, 3);
        for (i, (text, finish)) in streamed.iter().enumerate() {
            assert_eq!(text, &want[i]["message"]["content"], "{model} {i}");
            assert_eq!(finish, &want[i]["finish_reason"]);
        }
        let last = events.last().unwrap();
        assert_eq!(last["choices"], json!([]));
        assert_eq!(last["usage"]["completion_tokens"], written);
        assert_eq!(last["usage"]["prompt_tokens"], prompt);
    }
}

#[tokio::test]
async fn each_prompt_of_a_list_is_answered_as_if_alone() {
    let server = Server::start(setup("tiny-qwen3.5")).await;
    let body = json!({"max_tokens": 12, "temperature": 0.9, "seed": 3, "logprobs": 1});
    let prompts = [json!("Once upon a time"), json!([5, 6, 7]), json!("The")];
    let mut want = Vec::new();
    for prompt in &prompts {
        for seed in [3, 4] {
            let one = with(&body, json!({"prompt": prompt, "seed": seed}));
            want.extend(choices(&server.post(COMPLETIONS, &one).await.json()));
        }
    }
    let all = with(&body, json!({"prompt": prompts, "n": 2}));
    let reply = server.post(COMPLETIONS, &all).await.json();
    assert_eq!(choices(&reply), want);
    let all = with(&all, json!({"stream": true}));
    let streamed = texts(&server.post(COMPLETIONS, &all).await.events(), 6);
    for (i, (text, finish)) in streamed.iter().enumerate() {
        assert_eq!(text, &want[i]["text"], "{i}");
        assert_eq!(finish, &want[i]["finish_reason"]);
    }
}

#[tokio::test]
async fn every_one_of_n_answers_follows_the_grammar() {
    let server = Server::start(setup("tiny-qwen3.5")).await;
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
    let body = json!({"n": 4, "response_format": format, "temperature": 1.2, "seed": 5});
    let body = server.chat(&with(&hello(60), body)).await.json();
    assert_eq!(choices(&body).len(), 4);
    for choice in choices(&body) {
        let text = choice["message"]["content"].as_str().unwrap();
        let value: Value = serde_json::from_str(text).unwrap();
        assert!(value["a"].is_i64() || value["a"].is_u64(), "{text}");
    }
}

#[tokio::test]
async fn requests_that_begin_alike_compute_the_beginning_once() {
    for model in ["tiny-qwen3.5", "tiny-gemma4"] {
        let server = Server::start(setup(model)).await;
        let system = "You know all about rabbits, kites and the wind. ".repeat(30);
        let ask = |question: &'static str| {
            let body = json!({"messages": [
                {"role": "system", "content": system}, {"role": "user", "content": question},
            ], "temperature": 0, "max_tokens": 8});
            let server = &server;
            async move { server.chat(&body).await.json() }
        };
        let (a, b, c, d) = tokio::join!(ask("Why?"), ask("Who?"), ask("How?"), ask("When?"));
        let all = [a, b, c, d];
        let tokens = |body: &Value, path: &str| body.pointer(path).unwrap().as_u64().unwrap();
        let cached = all
            .iter()
            .map(|b| tokens(b, "/usage/prompt_tokens_details/cached_tokens"));
        let (cached, prompt): (u64, u64) = (cached.sum(), tokens(&all[0], "/usage/prompt_tokens"));
        assert!(
            cached * 10 >= prompt * 3 * 8,
            "{model}: {cached} of 3 × {prompt}"
        );
        let fresh = Server::start(setup(model)).await;
        let questions = ["Why?", "Who?", "How?", "When?"];
        for (body, question) in all.iter().zip(questions) {
            let alone = json!({"messages": [
                {"role": "system", "content": system}, {"role": "user", "content": question},
            ], "temperature": 0, "max_tokens": 8});
            let alone = fresh.chat(&alone).await.json();
            assert_eq!(body["choices"], alone["choices"], "{model} {question}");
        }
    }
}

#[tokio::test]
async fn wrong_numbers_of_answers_are_named() {
    let server = Server::start(setup("tiny-qwen3.5")).await;
    for (more, param) in [
        (json!({"n": 0}), "n"),
        (json!({"n": 129}), "n"),
        (json!({"n": "2"}), "n"),
        (json!({"n": 2, "best_of": 3}), "best_of"),
        (json!({"best_of": 2}), "best_of"),
        // More than may run and wait.
        (json!({"n": 128}), "n"),
    ] {
        let reply = server.chat(&with(&hello(2), more.clone())).await;
        assert_eq!(reply.status, 400, "{more}");
        assert_eq!(reply.error()["param"], param, "{more}");
    }
    let reply = server
        .chat(&with(&hello(2), json!({"n": 2, "best_of": 2})))
        .await;
    assert_eq!(reply.status, 200);
    for prompt in [json!(["a", ""]), json!(["a", [[1]]]), json!([["a"], "b"])] {
        let body = json!({"prompt": prompt, "max_tokens": 1});
        let reply = server.post(COMPLETIONS, &body).await;
        assert_eq!(reply.status, 400, "{body}");
        let param = reply.error()["param"].as_str().unwrap().to_owned();
        assert!(param.starts_with("prompt"), "{body}: {param}");
    }
}
