//! What is refused, and in which words; the list of models.

use serde_json::{Value, json};

use super::{COUNT, MESSAGES, ask, error, user, weather};
use crate::client::{Reply, Server, Setup, request};
use crate::wire::with;

#[tokio::test]
async fn what_cannot_be_read_is_named() {
    let server = Server::start(Setup::default()).await;
    let messages = |content: Value| json!({"messages": [user(content)]});
    let block = |block: Value| messages(json!([{"type": "text", "text": "Hi"}, block]));
    let answer = |block: Value| json!({"messages": [user(json!("Hi")), {"role": "assistant", "content": [block]}, user(json!("Hi"))]});
    let tool = |more: Value| json!({"tools": [with(&weather(), more)]});
    for (param, more) in [
        ("max_tokens", json!({"max_tokens": null})),
        ("max_tokens", json!({"max_tokens": "many"})),
        ("messages", json!({"messages": null})),
        ("messages", json!({"messages": []})),
        ("messages", json!({"messages": "Hi"})),
        ("messages[0]", json!({"messages": ["Hi"]})),
        ("messages[0].role", json!({"messages": [{"content": "Hi"}]})),
        (
            "messages[0].role",
            json!({"messages": [{"role": "tool", "content": "Hi"}]}),
        ),
        ("messages[0].content", messages(json!(null))),
        ("messages[0].content", messages(json!(3))),
        ("messages[0].content[0]", messages(json!(["Hi"]))),
        ("messages[0].content[1].type", block(json!({"text": "Hi"}))),
        (
            "messages[0].content[1].text",
            block(json!({"type": "text"})),
        ),
        (
            "messages[0].content[1].source",
            block(
                json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}),
            ),
        ),
        (
            "messages[0].content[1]",
            block(json!({"type": "document", "source": {"type": "text", "data": "a"}})),
        ),
        (
            "messages[0].content[1]",
            block(json!({"type": "tool_use", "id": "a", "name": "f", "input": {}})),
        ),
        (
            "messages[0].content[1].tool_use_id",
            block(json!({"type": "tool_result"})),
        ),
        (
            "messages[0].content[1].content",
            block(json!({"type": "tool_result", "tool_use_id": "a", "content": 3})),
        ),
        (
            "messages[0].content[1].content[0].source",
            block(
                json!({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}),
            ),
        ),
        (
            "messages[0].content[1].is_error",
            block(json!({"type": "tool_result", "tool_use_id": "a", "is_error": "yes"})),
        ),
        (
            "messages[1].content[0]",
            answer(json!({"type": "tool_result", "tool_use_id": "a"})),
        ),
        (
            "messages[1].content[0]",
            answer(
                json!({"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}}),
            ),
        ),
        (
            "messages[1].content[0].input",
            answer(json!({"type": "tool_use", "id": "a", "name": "f", "input": "{}"})),
        ),
        (
            "messages[1].content[0].name",
            answer(json!({"type": "tool_use", "id": "a", "input": {}})),
        ),
        (
            "messages[1].content[0].thinking",
            answer(json!({"type": "thinking"})),
        ),
        (
            "messages[2]",
            json!({"messages": [user(json!("Hi")), {"role": "assistant", "content": "I"}, {"role": "assistant", "content": "am"}]}),
        ),
        ("system", json!({"system": 3})),
        ("system[0]", json!({"system": [{"type": "image"}]})),
        ("stop_sequences", json!({"stop_sequences": [""]})),
        ("temperature", json!({"temperature": 3})),
        ("thinking.type", json!({"thinking": {"type": "sometimes"}})),
        (
            "thinking.budget_tokens",
            json!({"thinking": {"type": "enabled", "budget_tokens": -1}}),
        ),
        (
            "output_config.effort",
            json!({"output_config": {"effort": "huge"}}),
        ),
        (
            "output_config.format.type",
            json!({"output_config": {"format": {"type": "xml"}}}),
        ),
        (
            "output_config.format.schema",
            json!({"output_config": {"format": {"type": "json_schema"}}}),
        ),
        ("output_format.type", json!({"output_format": {}})),
        (
            "output_format",
            json!({"output_format": {"type": "json_schema", "schema": {}}, "output_config": {"format": {"type": "json_schema", "schema": {}}}}),
        ),
        ("tools", json!({"tools": {}})),
        ("tools[0]", json!({"tools": ["f"]})),
        (
            "tools[0]",
            json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ),
        (
            "tools[1]",
            json!({"tools": [weather(), {"type": "bash_20250124", "name": "bash"}]}),
        ),
        ("tools[0].input_schema", json!({"tools": [{"name": "f"}]})),
        (
            "tools[0].input_schema",
            json!({"tools": [{"type": "custom", "name": "f"}]}),
        ),
        ("tools[0].input_schema", tool(json!({"input_schema": []}))),
        ("tools[0].name", tool(json!({"name": "a b"}))),
        ("tools[0].description", tool(json!({"description": 1}))),
        ("tools[0].strict", tool(json!({"strict": 1}))),
        (
            "tools[0].strict",
            tool(
                json!({"strict": true, "input_schema": {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}}),
            ),
        ),
        ("tool_choice", json!({"tool_choice": "any"})),
        ("tool_choice", json!({"tool_choice": {"type": "any"}})),
        (
            "tool_choice",
            json!({"tools": [weather()], "tool_choice": {"type": "tool", "name": "other"}}),
        ),
        (
            "tool_choice.name",
            json!({"tools": [weather()], "tool_choice": {"type": "tool"}}),
        ),
        (
            "tool_choice.type",
            json!({"tools": [weather()], "tool_choice": {"type": "required"}}),
        ),
        ("thread.type", json!({"thread": {}})),
        ("container", json!({"container": "c"})),
        ("mcp_servers", json!({"mcp_servers": [{"type": "url"}]})),
        ("stop", json!({"stop": "x"})),
        (
            "response_format",
            json!({"response_format": {"type": "json_object"}}),
        ),
        ("n", json!({"n": 2})),
        ("reasoning_effort", json!({"reasoning_effort": "low"})),
    ] {
        for path in [MESSAGES, COUNT] {
            if path == COUNT && more["max_tokens"].is_null() && param == "max_tokens" {
                continue;
            }
            let reply = server.post(path, &with(&ask("Hi", 1), more.clone())).await;
            let error = error(&reply);
            assert_eq!(reply.status, 400, "{more}");
            assert_eq!(error["type"], "invalid_request_error");
            let told = error["message"].as_str().unwrap();
            assert!(told.starts_with(&format!("`{param}` ")), "{param}: {told}");
        }
    }
    let told = |reply: &Reply| error(reply)["message"].as_str().unwrap().to_owned();
    let document = server
        .post(
            MESSAGES,
            &with(&ask("Hi", 1), block(json!({"type": "document"}))),
        )
        .await;
    assert!(told(&document).contains("`document`"));
    let search = json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]});
    let search = server.post(MESSAGES, &with(&ask("Hi", 1), search)).await;
    assert!(told(&search).contains("`web_search_20250305`"));
}

#[tokio::test]
async fn refusals_of_every_kind_have_anthropic_s_shape() {
    let mut setup = Setup::default();
    setup.config.keys = server::Keys::new(["secret".to_owned()]);
    setup.config.strict_model_names = true;
    setup.config.limits.chat_body_bytes = 4096;
    let server = Server::start(setup).await;
    let key = "x-api-key: secret\r\n";
    let hi = ask("Hi", 1).to_string();
    let big = ask(&"x".repeat(5000), 1).to_string();
    let long = with(&ask(&"word ".repeat(700), 1), json!({"model": "default"})).to_string();
    for (path, headers, body, status, kind) in [
        (MESSAGES, String::new(), &hi, 401, "authentication_error"),
        (
            COUNT,
            "authorization: Bearer no\r\n".to_owned(),
            &hi,
            401,
            "authentication_error",
        ),
        (
            MESSAGES,
            format!("{key}origin: http://evil.example\r\n"),
            &hi,
            403,
            "permission_error",
        ),
        (MESSAGES, key.to_owned(), &hi, 404, "not_found_error"),
        (
            MESSAGES,
            key.to_owned(),
            &"{".to_owned(),
            400,
            "invalid_request_error",
        ),
        (COUNT, key.to_owned(), &big, 413, "request_too_large"),
        (
            MESSAGES,
            key.to_owned(),
            &long,
            400,
            "invalid_request_error",
        ),
        (
            "/v1/messages/batches",
            format!("{key}anthropic-version: 2023-06-01\r\n"),
            &hi,
            404,
            "not_found_error",
        ),
        (
            "/v1/models",
            format!("{key}anthropic-version: 2023-06-01\r\n"),
            &hi,
            405,
            "invalid_request_error",
        ),
    ] {
        let reply = server.send(&request(path, &headers, body.as_bytes())).await;
        assert_eq!(reply.status, status, "{path}: {reply:?}");
        assert_eq!(error(&reply)["type"], kind, "{path}");
    }
    let reply = server.send(&request(MESSAGES, key, long.as_bytes())).await;
    let told = error(&reply)["message"].as_str().unwrap().to_owned();
    assert!(
        told.starts_with("prompt is too long: this model's maximum context length is 512"),
        "{told}"
    );
    // It can be counted all the same.
    let count = server.send(&request(COUNT, key, long.as_bytes())).await;
    assert!(
        count.json()["input_tokens"].as_u64().unwrap() > 600,
        "{count:?}"
    );
    // OpenAI's paths keep OpenAI's shape.
    let reply = server
        .send(&request(
            "/v1/chat/completions",
            "anthropic-version: 1\r\n",
            b"{}",
        ))
        .await;
    assert_eq!(reply.error()["code"], "invalid_api_key");
}

#[tokio::test]
async fn the_model_is_listed_in_the_form_that_is_asked_for() {
    let server = Server::start(Setup::default()).await;
    let get = async |path: &str| {
        let head = format!(
            "GET {path} HTTP/1.1\r\nhost: localhost\r\nanthropic-version: 2023-06-01\r\n\r\n"
        );
        server.send(head.as_bytes()).await
    };
    let list = get("/v1/models?limit=1000").await.json();
    let model = &list["data"][0];
    assert_eq!(list["has_more"], false);
    assert_eq!(
        (&list["first_id"], &model["id"]),
        (&json!("tiny-qwen3.5"), &json!("tiny-qwen3.5"))
    );
    assert_eq!(
        (&model["type"], &model["display_name"]),
        (&json!("model"), &json!("tiny-qwen3.5"))
    );
    assert_eq!(model["max_input_tokens"], 512);
    let created = model["created_at"].as_str().unwrap();
    assert!(
        created.starts_with("20") && created.ends_with('Z') && created.len() == 20,
        "{created}"
    );
    assert_eq!(&get("/v1/models/tiny-qwen3.5").await.json(), model);
    let reply = get("/v1/models/claude").await;
    assert_eq!(
        (reply.status, &error(&reply)["type"]),
        (404, &json!("not_found_error"))
    );
    assert_eq!(
        server.get("/v1/models").await.json()["data"][0]["object"],
        "model"
    );
}
