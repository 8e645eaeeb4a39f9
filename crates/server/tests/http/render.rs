//! `/v1/…/render`: the tokens that requests become, as routers of vLLM servers ask for them.

use serde_json::{Value, json};

use crate::client::{Server, Setup};

#[tokio::test]
async fn requests_of_every_kind_are_rendered_to_the_tokens_that_they_run() {
    let server = Server::start(Setup::default()).await;
    let post = async |path: &str, body: &Value| {
        let reply = server.post(path, body).await;
        assert_eq!(reply.status, 200, "{path} {reply:?}");
        reply.json()
    };
    let messages = json!([{"role": "user", "content": "Tell me a story."}]);
    let chat = json!({"model": "any", "messages": messages, "max_tokens": 1});
    let said = json!({"input": "Tell me a story.", "max_output_tokens": 1});
    for (path, body, of_usage) in [
        ("/v1/chat/completions", &chat, "prompt_tokens"),
        ("/v1/messages", &chat, "input_tokens"),
        ("/v1/responses", &said, "input_tokens"),
    ] {
        let document = post(&format!("{path}/render"), body).await;
        let ids: Vec<u32> = serde_json::from_value(document["token_ids"].clone()).unwrap();
        assert!(
            document["request_id"]
                .as_str()
                .unwrap()
                .starts_with("chatcmpl-")
        );
        assert_eq!(document["model"], "tiny-qwen3.5");
        assert!(document["sampling_params"].is_object(), "{document}");
        let ran = post(path, body).await;
        assert_eq!(ran["usage"][of_usage], ids.len(), "{path}");
    }
    let several = json!({"prompt": ["a kite", [300, 301]], "max_tokens": 1});
    let documents = post("/v1/completions/render", &several).await;
    let text = server.engine.text();
    assert_eq!(
        documents[0]["token_ids"],
        json!(text.encode_prompt("a kite").unwrap())
    );
    assert_eq!(documents[1]["token_ids"], json!([300, 301]));
    // What would not run is not rendered.
    let wrong = json!({"messages": messages, "temperature": 9});
    let reply = server.post("/v1/chat/completions/render", &wrong).await;
    assert_eq!(reply.error()["param"], "temperature");
}
