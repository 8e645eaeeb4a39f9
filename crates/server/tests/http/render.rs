//! `/v1/…/render`: the tokens that requests become, as routers of vLLM servers ask for them.

use serde_json::{Value, json};

use crate::client::{Server, Setup, altered_in};

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

/// A template that reads what those of Qwen 3.8 read beside `enable_thinking`.
const EFFORT_TEMPLATE: &str = "\
{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if preserve_thinking is defined and preserve_thinking and m.reasoning_content -%}
[{{ m.reasoning_content }}]{%- endif -%}{{ m.content }}<|im_end|>
{%- endfor -%}<|im_start|>assistant
{{ reasoning_effort if reasoning_effort is defined else 'no effort' }}";

#[tokio::test]
async fn templates_are_told_the_effort_and_whether_to_keep_thoughts() {
    let server = Server::start(Setup {
        model: altered_in("effort", "chat_template.jinja", EFFORT_TEMPLATE),
        ..Setup::default()
    })
    .await;
    let prompt = async |more: Value| {
        let mut body = json!({"messages": [
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": "Yes?", "reasoning_content": "polite"},
            {"role": "user", "content": "Bye."},
        ]});
        let more = more.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(more);
        let reply = server.post("/apply-template", &body).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        reply.json()["prompt"].as_str().unwrap().to_owned()
    };
    let plain = prompt(json!({})).await;
    assert!(
        plain.ends_with("no effort") && !plain.contains("polite"),
        "{plain}"
    );
    for effort in ["low", "medium", "xhigh"] {
        for more in [
            json!({"reasoning_effort": effort}),
            json!({"reasoning": {"effort": effort}}),
            json!({"chat_template_kwargs": {"reasoning_effort": effort}}),
        ] {
            let told = prompt(more).await;
            assert!(told.ends_with(effort), "{told}");
        }
    }
    let kept = prompt(json!({"chat_template_kwargs": {"preserve_thinking": true}})).await;
    assert!(kept.contains("[polite]Yes?"), "{kept}");
}
