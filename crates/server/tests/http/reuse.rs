//! Requests that go on from what others have left.

use crate::client::{Server, Setup};
use serde_json::{Value, json};

fn setup() -> Setup {
    Setup {
        context: 2048,
        // As much room for what ended requests leave as for eight that run.
        sequences: 8,
        ..Setup::default()
    }
}

fn turn(messages: &[Value]) -> Value {
    json!({"messages": messages, "temperature": 0, "max_tokens": 40})
}

fn said(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

fn cached(body: &Value) -> u64 {
    body["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap()
}

#[tokio::test]
async fn a_second_turn_runs_what_is_new_and_says_the_same() {
    let server = Server::start(setup()).await;
    let long = "Tell me about the rabbit, the kite and the wind. ".repeat(25);
    let mut messages = vec![said("user", &long)];
    let first = server.chat(&turn(&messages)).await.json();
    assert_eq!(cached(&first), 0);
    let reply = first["choices"][0]["message"]["content"].as_str().unwrap();
    messages.extend([said("assistant", reply), said("user", "And then?")]);

    let fresh = Server::start(setup()).await;
    let want = fresh.chat(&turn(&messages)).await.json();
    assert_eq!(cached(&want), 0);

    let second = server.chat(&turn(&messages)).await.json();
    assert_eq!(second["choices"], want["choices"]);
    let prompt = second["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(cached(&second) > prompt / 2, "{}", second["usage"]);
    assert_eq!(second["timings"]["cache_n"], cached(&second));
    let metrics = server.get("/metrics").await.body;
    let asked = prompt + first["usage"]["prompt_tokens"].as_u64().unwrap();
    for (name, count) in [("queries", asked), ("hits", cached(&second))] {
        let line =
            format!("vllm:prefix_cache_{name}_total{{model_name=\"tiny-qwen3.5\"}} {count}\n");
        assert!(metrics.contains(&line), "{line}{metrics}");
    }

    // Another conversation finds a sequence, whatever is left in the others.
    for other in ["One", "Two", "Three"] {
        let body = server.chat(&turn(&[said("user", other)])).await.json();
        assert_eq!(cached(&body), 0, "{other}");
    }
}

#[tokio::test]
async fn a_short_first_turn_is_found_by_the_second_and_by_its_system_prompt() {
    let server = Server::start(setup()).await;
    let system = said(
        "system",
        "You are a patient gardener who answers children in short sentences about plants. \
         You know every flower, tree and bird, and you never talk of anything else.",
    );
    let mut messages = vec![
        system.clone(),
        said(
            "user",
            &"What does a seed need, and what does a tree need? ".repeat(4),
        ),
    ];
    let first = server.chat(&turn(&messages)).await.json();
    assert_eq!(cached(&first), 0);
    let asked = first["usage"]["prompt_tokens"].as_u64().unwrap();
    let reply = first["choices"][0]["message"]["content"].as_str().unwrap();
    messages.extend([said("assistant", reply), said("user", "And then?")]);
    let second = server.chat(&turn(&messages)).await.json();
    // All but how the template begins a reply.
    assert!(
        cached(&second) + 16 >= asked,
        "{} of {asked}",
        second["usage"]
    );
    // Four other conversations begin with the system prompt.
    for question in ["Why is it green?", "Who eats it?", "When?", "Where?"] {
        let other = [system.clone(), said("user", question)];
        let body = server.chat(&turn(&other)).await.json();
        let fresh = Server::start(setup()).await;
        let want = fresh.chat(&turn(&other)).await.json();
        assert_eq!(body["choices"], want["choices"], "{question}");
        assert!(cached(&body) > 16, "{question}: {}", body["usage"]);
    }
    // Both conversations are still there.
    let again = server.chat(&turn(&messages)).await.json();
    assert_eq!(again["choices"], second["choices"]);
    assert!(cached(&again) + 16 >= asked, "{}", again["usage"]);
}

#[tokio::test]
async fn a_response_that_goes_on_from_a_stored_one_finds_its_prompt() {
    let server = Server::start(setup()).await;
    let ask = async |body: Value| {
        let reply = server.post("/v1/responses", &body).await;
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.json()
    };
    let input = "Tell me what the rabbit saw from the top of the hill when the wind turned.";
    let first = ask(json!({"input": input, "temperature": 0, "max_output_tokens": 20})).await;
    let id = &first["id"];
    let next = json!({"input": "And then?", "temperature": 0, "max_output_tokens": 8, "previous_response_id": id});
    let second = ask(next).await;
    let found = second["usage"]["input_tokens_details"]["cached_tokens"].as_u64();
    let asked = first["usage"]["input_tokens"].as_u64().unwrap();
    assert!(
        found.unwrap() + 16 >= asked,
        "{} of {asked}",
        second["usage"]
    );
}

#[tokio::test]
async fn keys_and_salts_keep_prompts_apart() {
    let mut setup = setup();
    setup.config.keys = server::Keys::new(["one", "two"]);
    let server = Server::start(setup).await;
    let long = "Tell me about the rabbit, the kite and the wind. ".repeat(12);
    let ask = async |key: &str, more: Value| {
        let mut body = turn(&[said("user", &long)]);
        let more = more.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(more);
        let headers = format!("authorization: Bearer {key}\r\n");
        let body = body.to_string();
        let request = crate::client::request("/v1/chat/completions", &headers, body.as_bytes());
        let reply = server.send(&request).await;
        assert_eq!(reply.status, 200, "{}", reply.body);
        let body = reply.json();
        (
            cached(&body),
            body["choices"][0]["message"]["content"].clone(),
        )
    };
    let salt = |salt: &str| json!({"cache_salt": salt});
    let (found, text) = ask("one", json!({})).await;
    assert_eq!(found, 0);
    for (key, more, is_found) in [
        ("two", json!({}), false),
        ("one", json!({}), true),
        ("one", salt("a"), false),
        ("two", salt("a"), false),
        ("one", salt("b"), false),
        ("one", salt("a"), true),
        ("two", json!({}), true),
        ("two", json!({"cache_prompt": false}), false),
        (
            "two",
            json!({"cache_prompt": true, "prompt_cache_key": "x"}),
            true,
        ),
    ] {
        let (found, again) = ask(key, more.clone()).await;
        assert_eq!(found > 0, is_found, "{key} {more}: {found}");
        assert_eq!(again, text, "{key} {more}");
    }
}
