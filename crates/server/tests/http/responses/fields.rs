//! What is read of a request to the Responses API, and what is refused or named as ignored.

use serde_json::{Value, json};

use super::{RESPONSES, ask, bare, hello, respond, server, weather};
use crate::client::{Server, Setup, altered_in};
use crate::wire::with;

#[tokio::test]
async fn every_kind_of_item_is_read() {
    let server = server("tiny-qwen3.5").await;
    let user = json!({"role": "user", "content": "Hi"});
    let tokens = async |items: Vec<Value>| {
        let reply = server
            .post(RESPONSES, &json!({"input": items, "max_output_tokens": 1}))
            .await;
        assert_eq!(reply.status, 200, "{items:?}: {reply:?}");
        assert_eq!(reply.header("x-ignored-fields"), None, "{items:?}");
        reply.json()["usage"]["input_tokens"].as_u64().unwrap()
    };
    let one = tokens(vec![user.clone()]).await;
    for same in [
        json!({"type": "message", "id": "msg_1", "status": "completed", "role": "user", "content": "Hi"}),
        json!({"role": "user", "content": [{"type": "input_text", "text": "H"}, {"type": "text", "text": "i"}]}),
        json!({"type": null, "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}),
    ] {
        assert_eq!(tokens(vec![same]).await, one);
    }
    // Each of these is read: the prompt has its words.
    for items in [
        vec![
            json!({"role": "assistant", "content": [{"type": "output_text", "text": "Yes", "annotations": [], "logprobs": []}], "phase": "final_answer"}),
        ],
        vec![json!({"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]})],
        vec![
            json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{\"a\": 1}"}),
            json!({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}]}),
        ],
        vec![
            json!({"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "free text"}),
            json!({"type": "custom_tool_call_output", "call_id": "c", "output": "1"}),
        ],
        vec![
            json!({"type": "local_shell_call", "id": "l", "call_id": "c", "status": "completed", "action": {"type": "exec", "command": ["ls"], "env": {}}}),
            json!({"type": "local_shell_call_output", "id": "c", "output": "a.txt"}),
        ],
        vec![
            json!({"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}}),
            json!({"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]}),
        ],
        vec![
            json!({"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}}),
            json!({"type": "apply_patch_call_output", "call_id": "c", "status": "completed", "output": "ok"}),
        ],
    ] {
        for n in 1..=items.len() {
            let mut some = vec![user.clone()];
            some.extend(items[..n].iter().cloned());
            let fewer = tokens(some[..n].to_vec()).await;
            assert!(tokens(some.clone()).await > fewer, "{some:?}");
        }
    }
    // Instructions are leading system messages.
    let system = |role: &str| json!({"role": role, "content": "Be kind."});
    let apart = tokens(vec![system("system"), system("developer"), user.clone()]).await;
    let joined = json!({"input": [system("developer"), user], "instructions": "Be kind.", "max_output_tokens": 1});
    assert_eq!(
        respond(&server, &joined).await["usage"]["input_tokens"],
        apart
    );
    // Fields that nobody reads are named.
    let body = json!({"max_output_tokens": 1, "input": [with(&user, json!({"odd": 1})),
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "nowhere": "n", "odd": 2}]});
    let reply = server.post(RESPONSES, &body).await;
    assert_eq!(
        reply.header("x-ignored-fields"),
        Some("input[0].odd, input[1].nowhere")
    );
}

#[tokio::test]
async fn what_is_wrong_is_named() {
    let server = server("tiny-qwen3.5").await;
    let item = |item: Value| json!({"input": [{"role": "user", "content": "Hi"}, item]});
    let part = |part: Value| item(json!({"role": "user", "content": [part]}));
    for (param, body) in [
        ("input", json!({"input": null})),
        ("input", json!({"input": []})),
        ("input", json!({"input": 1})),
        ("input[0]", json!({"input": ["Hi"]})),
        ("input[1].type", item(json!({"content": "x"}))),
        ("input[1].type", item(json!({"type": 1}))),
        (
            "input[1].role",
            item(json!({"type": "message", "content": "x"})),
        ),
        (
            "input[1].role",
            item(json!({"role": "tool", "content": "x"})),
        ),
        ("input[1].content", item(json!({"role": "user"}))),
        (
            "input[1].content",
            item(json!({"role": "user", "content": 1})),
        ),
        (
            "input[1].content[0].image_url",
            part(json!({"type": "input_image", "image_url": "data:,"})),
        ),
        (
            "input[1].content[0]",
            part(json!({"type": "input_file", "file_id": "f"})),
        ),
        (
            "input[1].content[0].text",
            part(json!({"type": "input_text"})),
        ),
        (
            "input[1]",
            item(json!({"type": "image_generation_call", "id": "i"})),
        ),
        (
            "input[1]",
            item(json!({"type": "web_search_call", "id": "i"})),
        ),
        (
            "input[1].encrypted_content",
            item(json!({"type": "compaction", "encrypted_content": "x"})),
        ),
        (
            "input[1].name",
            item(json!({"type": "function_call", "call_id": "c", "arguments": "{}"})),
        ),
        (
            "input[1].call_id",
            item(json!({"type": "function_call", "name": "f", "arguments": "{}"})),
        ),
        (
            "input[1].arguments",
            item(json!({"type": "function_call", "call_id": "c", "name": "f"})),
        ),
        (
            "input[1].output",
            item(json!({"type": "function_call_output", "call_id": "c"})),
        ),
        (
            "input[1].output[0].image_url",
            item(
                json!({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}),
            ),
        ),
        (
            "input[1].content",
            item(json!({"type": "reasoning", "content": "x"})),
        ),
        ("messages", json!({"messages": []})),
        ("max_tokens", json!({"max_tokens": 1})),
        (
            "response_format",
            json!({"response_format": {"type": "text"}}),
        ),
        ("n", json!({"n": 2})),
        ("background", json!({"background": true})),
        ("conversation", json!({"conversation": "c"})),
        ("prompt", json!({"prompt": {"id": "p"}})),
        ("truncation", json!({"truncation": "some"})),
        ("store", json!({"store": "yes"})),
        ("metadata", json!({"metadata": {"a": 1}})),
        ("metadata", json!({"metadata": []})),
        ("include", json!({"include": "x"})),
        ("top_logprobs", json!({"top_logprobs": 21})),
        ("text.format.type", json!({"text": {"format": {}}})),
        (
            "text.format.type",
            json!({"text": {"format": {"type": "xml"}}}),
        ),
        (
            "text.format.schema",
            json!({"text": {"format": {"type": "json_schema", "name": "a"}}}),
        ),
        (
            "text.format.schema",
            json!({"text": {"format": {"type": "json_schema", "schema": 1}}}),
        ),
        (
            "guided_regex",
            json!({"guided_regex": "a", "text": {"format": {"type": "json_object"}}}),
        ),
        ("reasoning", json!({"reasoning": {"effort": "huge"}})),
        ("tools", json!({"tools": {}})),
        ("tools[0]", json!({"tools": ["f"]})),
        ("tools[0].type", json!({"tools": [{"name": "f"}]})),
        (
            "tools[1].name",
            json!({"tools": [{"type": "web_search"}, {"type": "function"}]}),
        ),
        (
            "tools[1].strict",
            json!({"tools": [{"type": "custom", "name": "c"}, {"type": "function", "name": "f", "strict": true,
            "parameters": {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}}]}),
        ),
        ("tool_choice", json!({"tool_choice": "sometimes"})),
        ("tool_choice", json!({"tool_choice": "required"})),
        (
            "tool_choice",
            json!({"tools": [{"type": "web_search"}], "tool_choice": "required"}),
        ),
        (
            "tool_choice",
            json!({"tools": [weather()], "tool_choice": {"type": "function", "name": "g"}}),
        ),
        (
            "tool_choice",
            json!({"tools": [weather()], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}}),
        ),
        (
            "tool_choice.type",
            json!({"tools": [weather()], "tool_choice": {"type": "web_search"}}),
        ),
        ("max_tool_calls", json!({"max_tool_calls": 0})),
        ("chat_template", json!({"chat_template": "x"})),
    ] {
        let base = json!({"input": "Hi", "max_output_tokens": 1});
        let reply = server.post(RESPONSES, &with(&base, body.clone())).await;
        assert_eq!(reply.status, 400, "{body}: {reply:?}");
        assert_eq!(reply.error()["param"], param, "{body}: {reply:?}");
    }
    for (status, param, body) in [
        (
            400,
            "previous_response_id",
            json!({"previous_response_id": "resp_none"}),
        ),
        (
            404,
            "input[0].id",
            json!({"input": [{"type": "item_reference", "id": "msg_none"}]}),
        ),
    ] {
        let reply = server.post(RESPONSES, &with(&hello(), body)).await;
        assert_eq!(
            (reply.status, &reply.error()["param"]),
            (status, &json!(param))
        );
    }
    let long = json!({"input": "word ".repeat(5000)});
    assert_eq!(
        server.post(RESPONSES, &long).await.error()["code"],
        "context_length_exceeded"
    );
}

#[tokio::test]
async fn fields_are_treated_as_the_tables_say() {
    let server = server("tiny-qwen3.5").await;
    let page = server::responses_fields_as_markdown();
    let honored = page.lines().filter(|line| line.contains("| honored |"));
    let fields = honored.flat_map(|line| line.split('|').nth(1).unwrap().split(','));
    let mut n = 0;
    for field in fields.map(|field| field.trim().trim_matches('`')) {
        let mut body = hello();
        let mut at = &mut body;
        for name in field.split('.') {
            at = &mut at[name];
        }
        // No field takes this.
        *at = json!(1e300);
        if field == "text.format.schema" {
            body["text"]["format"]["type"] = json!("json_schema");
        }
        let reply = server.post(RESPONSES, &body).await;
        assert_eq!(
            (reply.status, &reply.error()["param"]),
            (400, &json!(field)),
            "{reply:?}"
        );
        n += 1;
    }
    assert!(n > 70, "{n}");
    // Tools of other kinds and wishes that nobody can grant are named, and change nothing.
    let more = json!({
        "tools": [{"type": "web_search"}, weather(), {"type": "namespace", "name": "n", "tools": [weather()]}, {"type": "custom", "name": "c"}],
        "client_metadata": {"a": "b"}, "service_tier": "auto", "text": {"verbosity": "low", "odd": 1}, "include": ["file_search_call.results"],
        "stream_options": {"include_obfuscation": false}, "reasoning": {"summary": "auto"}, "temprature": 1});
    let reply = server.post(RESPONSES, &with(&ask(), more)).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let ignored = [
        "client_metadata",
        "include[0]",
        "reasoning.summary",
        "service_tier",
        "stream_options.include_obfuscation",
        "temprature",
        "text.odd",
        "text.verbosity",
        "tools[0]",
        "tools[2]",
        "tools[3]",
    ];
    assert_eq!(
        reply.header("x-ignored-fields"),
        Some(ignored.join(", ").as_str())
    );
    let plain = respond(&server, &ask()).await;
    assert_eq!(bare(&reply.json()["output"]), bare(&plain["output"]));
    assert_eq!(
        reply.json()["usage"]["input_tokens"],
        plain["usage"]["input_tokens"]
    );
}

#[tokio::test]
async fn a_template_is_told_of_what_it_reads_only() {
    let server = Server::start(Setup {
        model: altered_in("verbose", "chat_template.jinja",
            "{{ verbosity }}{% for m in messages %}{{ m.role }}: {{ m.content }} {{ m.reasoning_content }}{% endfor %}"),
        ..Setup::default()
    })
    .await;
    let tokens = async |verbosity: &str| {
        let body = json!({"input": "Hi", "text": {"verbosity": verbosity}, "max_output_tokens": 1});
        let reply = server.post(RESPONSES, &body).await;
        assert_eq!(reply.header("x-ignored-fields"), None);
        reply.json()["usage"]["input_tokens"].as_u64().unwrap()
    };
    assert!(tokens("low low low").await > tokens("low").await);
    let call = json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"});
    let reply = server.post(RESPONSES, &json!({"input": [call]})).await;
    assert_eq!(
        (reply.status, &reply.error()["param"]),
        (400, &json!("input[0]"))
    );
    let reply = server.post(RESPONSES, &ask()).await;
    assert_eq!(
        (reply.status, &reply.error()["param"]),
        (400, &json!("tools"))
    );
}
