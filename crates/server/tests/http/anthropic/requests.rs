//! What is sent: every form of a conversation is the prompt that it says.

use serde_json::{Value, json};

use super::{COUNT, MESSAGES, ask, ask_weather, error, events, joined, said, user, weather};
use crate::client::{Server, Setup, altered_in, request};
use crate::wire::with;

#[tokio::test]
async fn every_form_of_a_conversation_is_the_prompt_that_it_says() {
    let server = Server::start(Setup::default()).await;
    let text = |text: &str| json!({"type": "text", "text": text, "cache_control": {"type": "ephemeral"}, "citations": null});
    let n = async |more: Value| {
        let reply = server.post(COUNT, &with(&ask("Hi", 1), more)).await;
        assert_eq!(reply.header("x-ignored-fields"), None, "{reply:?}");
        reply.json()["input_tokens"].as_u64().unwrap()
    };
    let billing =
        "x-anthropic-billing-header: cc_version=2.1.197.99d; cc_entrypoint=sdk-cli; cch=1a2b3;";
    let plain = n(json!({"system": "Be brief.\n\nBe kind."})).await;
    for system in [
        json!([text("Be brief."), text("Be kind.")]),
        json!([text(billing), text("Be brief."), text("Be kind.")]),
        json!([text(&format!("{billing}\nBe brief.")), text("Be kind.")]),
        json!(format!("{billing}\nBe brief.\n\nBe kind.")),
    ] {
        assert_eq!(n(json!({"system": system})).await, plain, "{system}");
    }
    let none = n(json!({})).await;
    for system in [
        json!(billing),
        json!([text(billing)]),
        json!([]),
        json!(""),
        json!(null),
    ] {
        assert_eq!(n(json!({"system": system})).await, none, "{system}");
    }
    assert!(none < plain);
    // A system message after a question is said in its turn.
    let later = json!({"messages": [user(json!([text("Hi"), text(" there")])), {"role": "system", "content": [text("Be kind.")]}]});
    let joined = json!({"messages": [user(json!("Hi there\n\nBe kind."))]});
    assert_eq!(n(later).await, n(joined).await);
    // Results before what is said, and a conversation that begins with the assistant.
    let call = |id: &str| json!({"type": "tool_use", "id": id, "name": "get_weather", "input": {"city": "Rome"}});
    let result =
        |id: &str| json!({"type": "tool_result", "tool_use_id": id, "content": [text("rain")]});
    let turns = |last: Value| {
        let calls =
            json!({"role": "assistant", "content": [text("Let me see."), call("a"), call("b")]});
        let mut turns = vec![user(json!("Hi")), calls];
        turns.extend(last.as_array().unwrap().clone());
        json!({"messages": turns})
    };
    let together = turns(json!([user(json!([
        result("a"),
        result("b"),
        text("And?")
    ]))]));
    let apart = turns(json!([
        user(json!([result("a")])),
        user(json!([result("b")])),
        user(json!("And?"))
    ]));
    assert_eq!(n(together).await, n(apart).await);
    n(json!({"messages": [{"role": "assistant", "content": "Hello!"}, user(json!("Hi"))]})).await;
    n(json!({"messages": [user(json!([]))], "cache_control": {"type": "ephemeral"}})).await;
}

#[tokio::test]
async fn the_billing_line_does_not_cost_the_cache() {
    let server = Server::start(Setup {
        model: "tiny-gemma4",
        context: 2048,
        ..Setup::default()
    })
    .await;
    let ask = async |id: &str| {
        let line = format!("x-anthropic-billing-header: cc_version=2; cch={id};");
        let words = "Say only what is asked for. ".repeat(40);
        let system = [&line[..], &words].map(|text| json!({"type": "text", "text": text}));
        let body = with(&ask("Hi", 4), json!({"system": system}));
        server.post(MESSAGES, &body).await.json()["usage"].clone()
    };
    let first = ask("00001").await;
    assert_eq!(first["cache_read_input_tokens"], 0);
    // The second time it is in the cache, and not counted twice.
    let second = ask("99999").await;
    let read = second["cache_read_input_tokens"].as_u64().unwrap();
    assert!(read > 200, "{second}");
    let prompt = first["input_tokens"].as_u64().unwrap();
    assert_eq!(second["input_tokens"], prompt - read);
}

#[tokio::test]
async fn what_changes_nothing_is_listed() {
    let server = Server::start(Setup::default()).await;
    let more = json!({
        "metadata": {"user_id": "u"}, "service_tier": "auto", "container": null, "mcp_servers": [],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "thinking": {"type": "disabled", "display": "omitted"},
        "output_config": {"effort": "high", "task_budget": {}},
        "tool_choice": {"type": "auto", "odd": 1},
        "tools": [with(&weather(), json!({"type": "custom", "cache_control": {}, "defer_loading": true}))],
        "messages": [{"role": "user", "odd": 1, "content": [{"type": "text", "text": "Hi", "stranger": 1}]}],
        "cache_control": {"type": "ephemeral"}, "temprature": 1,
    });
    for path in [MESSAGES, COUNT] {
        let reply = server.post(path, &with(&ask("Hi", 1), more.clone())).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        let ignored = [
            "context_management",
            "messages[0].content[0].stranger",
            "messages[0].odd",
            "metadata",
            "output_config.task_budget",
            "service_tier",
            "temprature",
            "thinking.display",
            "tool_choice.odd",
            "tools[0].defer_loading",
        ];
        let listed = reply.header("x-ignored-fields");
        assert_eq!(listed, Some(ignored.join(", ").as_str()));
    }
}

#[tokio::test]
async fn a_conversation_is_not_kept_and_libraries_are_told_to_send_it() {
    let server = Server::start(Setup::default()).await;
    let created = with(&ask("Hi", 4), json!({"thread": {"type": "create"}}));
    let reply = server.post(MESSAGES, &created).await;
    assert_eq!(
        said(&reply.json()),
        said(&server.post(MESSAGES, &ask("Hi", 4)).await.json())
    );
    let go_on = json!({"thread": {"type": "continue", "previous_message_id": reply.json()["id"]}});
    let reply = server.post(MESSAGES, &with(&ask("Hi", 4), go_on)).await;
    assert_eq!(reply.status, 404);
    let error = reply.json()["error"].clone();
    assert_eq!(error["type"], "not_found_error");
    assert_eq!(error["details"], json!({"error_code": "thread_not_found"}));
}

#[tokio::test]
async fn a_template_without_calls_refuses_earlier_ones() {
    let server = Server::start(Setup {
        model: altered_in(
            "no-calls",
            "chat_template.jinja",
            "{{ messages[0].content }}",
        ),
        ..Setup::default()
    })
    .await;
    let reply = server.post(MESSAGES, &ask_weather()).await;
    assert!(
        error(&reply)["message"]
            .as_str()
            .unwrap()
            .starts_with("`tools` ")
    );
    let call = json!({"type": "tool_use", "id": "a", "name": "f", "input": {}});
    let list =
        json!([user(json!("Hi")), {"role": "assistant", "content": [call]}, user(json!("Hi"))]);
    let reply = server
        .post(MESSAGES, &with(&ask("Hi", 1), json!({"messages": list})))
        .await;
    assert!(
        error(&reply)["message"]
            .as_str()
            .unwrap()
            .starts_with("`messages[1].content[0]` cannot be read")
    );
    // Thoughts that the template does not read are left out, and named.
    let thought = json!({"type": "thinking", "thinking": "Hm.", "signature": ""});
    let list =
        json!([user(json!("Hi")), {"role": "assistant", "content": [thought]}, user(json!("Hi"))]);
    let reply = server
        .post(MESSAGES, &with(&ask("Hi", 1), json!({"messages": list})))
        .await;
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(
        reply.header("x-ignored-fields"),
        Some("messages[1].content[0].thinking")
    );
}

/// The requests of Claude Code's first turn with a call, as it sends them, with other texts and
/// some of its tools.
const CLAUDE_CODE: &str = include_str!("../../../../../tests/clients/recorded/claude-code.json");

#[tokio::test]
async fn claude_code_s_requests_are_answered() {
    let recorded: Value = serde_json::from_str(CLAUDE_CODE).unwrap();
    for model in ["tiny-qwen3.5", "tiny-gemma4"] {
        let mut setup = Setup {
            model,
            context: 8192,
            ..Setup::default()
        };
        setup.config.keys = server::Keys::new(["none".to_owned()]);
        let server = Server::start(setup).await;
        let mut n = 0;
        for sent in recorded["requests"].as_array().unwrap() {
            let path = sent["path"].as_str().unwrap();
            // A body that such a model can answer within a test.
            let mut body = with(&sent["body"], json!({"temperature": 0}));
            body["max_tokens"] = json!(60);
            let headers: String = sent["headers"]
                .as_object()
                .unwrap()
                .iter()
                .filter(|(name, _)| *name != "content-type")
                .map(|(name, value)| format!("{name}: {}\r\n", value.as_str().unwrap()))
                .collect();
            let send = async |path: &str, body: &Value| {
                let body = body.to_string();
                let bytes = request(path, &headers, body.as_bytes());
                let reply = server.send(&bytes).await;
                assert_eq!(reply.status, 200, "{reply:?}");
                reply
            };
            let reply = send(path, &body).await;
            assert_eq!(
                reply.header("x-ignored-fields"),
                Some("context_management, metadata")
            );
            let message = joined(&events(&reply));
            let count = send(&path.replace('?', "/count_tokens?"), &body)
                .await
                .json();
            let usage = &message["usage"];
            assert_eq!(
                count["input_tokens"].as_u64().unwrap(),
                usage["input_tokens"].as_u64().unwrap()
                    + usage["cache_read_input_tokens"].as_u64().unwrap()
            );
            assert!(!message["content"].as_array().unwrap().is_empty());
            // Repeated without a stream and without speculation, it is the same.
            let repeated = with(&body, json!({"stream": false, "speculation": "off"}));
            assert_eq!(said(&send(path, &repeated).await.json()), said(&message));
            // Another billing line is the same prompt.
            body["system"][0]["text"] =
                json!("x-anthropic-billing-header: cc_version=9; cc_entrypoint=cli; cch=0a1b2;");
            assert_eq!(
                said(&joined(&events(&send(path, &body).await))),
                said(&message)
            );
            n += 1;
        }
        assert_eq!(n, 2);
    }
}
