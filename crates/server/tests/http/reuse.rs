//! Requests that go on from what others have left.

use crate::client::{Server, Setup};
use serde_json::{Value, json};

fn setup() -> Setup {
    Setup {
        context: 2048,
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
