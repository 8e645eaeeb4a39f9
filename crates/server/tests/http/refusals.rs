//! What a client that misbehaves gets: an error in words, before any work.

use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};
use server::{Config, Keys, ModelConfig, Models, ServeError};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::time::timeout;

use crate::client::{Reply, Server, Setup, altered, request};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn hello() -> Value {
    json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1})
}

fn with(base: &Value, field: &str, value: Value) -> Value {
    let mut body = base.clone();
    body[field] = value;
    body
}

#[tokio::test]
async fn fields_that_change_meaning_and_are_not_implemented_are_named() {
    let server = Server::start(Setup::default()).await;
    for (field, value) in [
        ("structural_tag", json!({"type": "structural_tag"})),
        ("guided_whitespace_pattern", json!(" ?")),
        ("audio", json!({"voice": "x"})),
        ("modalities", json!(["text", "audio"])),
        ("web_search_options", json!({})),
        ("min_length", json!(3)),
        ("echo", json!(true)),
        ("max_new_tokens", json!(5)),
        ("stop_sequences", json!(["a"])),
        ("banned_tokens", json!(["a"])),
        ("tfs_z", json!(0.5)),
        ("stopping_strings", json!(["a"])),
        ("return_token_ids", json!(true)),
        ("system", json!("Be brief.")),
        ("json", json!({"type": "object"})),
        ("format", json!("json")),
    ] {
        let reply = server.chat(&with(&hello(), field, value.clone())).await;
        assert_eq!(reply.status, 400, "{field} {value}");
        let error = reply.error();
        assert_eq!(error["param"], field, "{value}");
        assert_eq!(error["code"], "unsupported_parameter", "{field} {value}");
    }
    let prompt = json!({"prompt": "a", "max_tokens": 1});
    for (field, value) in [("echo", json!(true)), ("return_full_text", json!(true))] {
        let reply = server
            .post(COMPLETIONS, &with(&prompt, field, value.clone()))
            .await;
        assert_eq!(
            (reply.status, &reply.error()["param"]),
            (400, &json!(field)),
            "{value}"
        );
    }
    for (part, at) in [
        (
            json!({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}),
            "messages[0].content[1].input_audio",
        ),
        (
            json!({"type": "file", "file": {}}),
            "messages[0].content[1]",
        ),
    ] {
        let messages = json!([{"role": "user", "content": ["Hi", part]}]);
        let reply = server.chat(&with(&hello(), "messages", messages)).await;
        assert_eq!((reply.status, &reply.error()["param"]), (400, &json!(at)));
    }
}

#[tokio::test]
async fn mistyped_values_inside_objects_are_named_with_their_paths() {
    let server = Server::start(Setup::default()).await;
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let said = |more: Value| {
        let user = json!({"role": "user", "content": "Hi"});
        json!({"messages": [user.clone(), more, user], "max_tokens": 1})
    };
    let calls = |call: Value| said(json!({"role": "assistant", "tool_calls": call}));
    let result = |field: &str, value: Value| {
        let mut message = json!({"role": "tool", "content": "1"});
        message[field] = value;
        said(message)
    };
    let schema = json!({"type": "object"});
    for (body, param) in [
        (calls(json!("x")), "messages[1].tool_calls"),
        (calls(json!(["x"])), "messages[1].tool_calls[0]"),
        (
            calls(json!([{"function": 1}])),
            "messages[1].tool_calls[0].function",
        ),
        (
            calls(json!([{"function": {"name": 5, "arguments": "{}"}}])),
            "messages[1].tool_calls[0].function.name",
        ),
        (
            calls(json!([{"function": {"name": "f", "arguments": [1]}}])),
            "messages[1].tool_calls[0].function.arguments",
        ),
        (result("tool_call_id", json!(5)), "messages[1].tool_call_id"),
        (result("name", json!(5)), "messages[1].name"),
        (
            with(
                &hello(),
                "structured_outputs",
                json!({"json": schema, "whitespace_pattern": " "}),
            ),
            "structured_outputs.whitespace_pattern",
        ),
        (
            with(
                &hello(),
                "structured_outputs",
                json!({"json": schema, "disable_any_whitespace": true}),
            ),
            "structured_outputs.disable_any_whitespace",
        ),
    ] {
        let reply = server.chat(&body).await;
        assert_eq!(
            (reply.status, &reply.error()["param"]),
            (400, &json!(param)),
            "{body}"
        );
    }
    // What changes nothing is listed.
    for (field, value, listed) in [
        (
            "response_format",
            json!({"type": "text", "odd": 1}),
            "response_format.odd",
        ),
        (
            "tool_choice",
            json!({"type": "function", "odd": 1, "function": {"name": "f", "even": 2}}),
            "tool_choice.function.even, tool_choice.odd",
        ),
    ] {
        let body = with(&with(&hello(), "tools", tools.clone()), field, value);
        let reply = server.chat(&body).await;
        assert_eq!(reply.status, 200, "{body}");
        assert_eq!(reply.header("x-ignored-fields"), Some(listed), "{body}");
    }
}

#[tokio::test]
async fn tool_calls_need_a_template_that_knows_them() {
    let server = Server::start(Setup {
        model: altered("chat_template.jinja", "{{ messages[0].content }}"),
        ..Setup::default()
    })
    .await;
    let calls = json!([{"function": {"name": "f", "arguments": "{}"}}]);
    let messages = json!([{"role": "assistant", "tool_calls": calls}]);
    let reply = server.chat(&with(&hello(), "messages", messages)).await;
    assert_eq!(
        (reply.status, &reply.error()["param"]),
        (400, &json!("messages[0].tool_calls"))
    );
}

#[tokio::test]
async fn values_out_of_range_are_named() {
    let server = Server::start(Setup::default()).await;
    let many = |n: usize| Value::Array((0..n).map(|i| json!(i.to_string())).collect());
    let biases: serde_json::Map<String, Value> =
        (0..1025).map(|i| (i.to_string(), json!(1))).collect();
    for (field, value) in [
        ("temperature", json!(-0.1)),
        ("temperature", json!(2.1)),
        ("temperature", json!("hot")),
        ("top_p", json!(1.1)),
        ("min_p", json!(-1)),
        ("top_k", json!(-2)),
        ("top_k", json!(1.5)),
        ("seed", json!(1.5)),
        ("seed", json!("x")),
        ("presence_penalty", json!(3)),
        ("frequency_penalty", json!(-3)),
        ("repetition_penalty", json!(0)),
        ("max_tokens", json!(-2)),
        ("max_tokens", json!(1e300)),
        ("max_completion_tokens", json!("7")),
        ("stop", many(17)),
        ("stop", json!("")),
        ("stop", json!([1])),
        ("stop", json!("x".repeat(257))),
        ("logit_bias", json!({"": 1})),
        ("logit_bias", json!({"x": "1"})),
        ("logit_bias", json!({"x": true})),
        ("logit_bias", json!(["x"])),
        ("logit_bias", json!([["x"]])),
        ("logit_bias", json!([[99999999, 1]])),
        ("logit_bias", json!([[5, 101]])),
        ("logit_bias", json!("x")),
        ("stop_token_ids", json!(5)),
        ("stop_token_ids", json!([-1])),
        ("stop_token_ids", json!([99999999])),
        ("stop_token_ids", json!(vec![1; 1025])),
        ("min_tokens", json!(-1)),
        ("min_tokens", json!(1000)),
        ("typical_p", json!(1.5)),
        ("typ_p", json!(-0.5)),
        ("top_n_sigma", json!("1")),
        ("xtc_probability", json!(2)),
        ("xtc_threshold", json!(-1)),
        ("dynatemp_range", json!(3)),
        ("dynamic_temperature", json!(1)),
        ("dynatemp_low", json!(-1)),
        ("dry_base", json!(0.5)),
        ("dry_allowed_length", json!(-1)),
        ("dry_penalty_last_n", json!(-2)),
        ("repeat_last_n", json!(-2)),
        ("mirostat", json!(3)),
        ("mirostat_mode", json!(true)),
        ("mirostat_tau", json!(-1)),
        ("mirostat_eta", json!("0.1")),
        ("dry_sequence_breakers", json!([1])),
        ("dry_sequence_breakers", json!("x")),
        ("dry_sequence_breakers", json!(["x".repeat(41)])),
        ("dry_sequence_breakers", json!(vec!["x"; 33])),
        ("logit_bias", json!({"5": 101})),
        ("logit_bias", json!({"99999999": 1})),
        ("logit_bias", Value::Object(biases)),
        ("stream", json!("yes")),
        ("stream_options", json!({"include_usage": true})),
        ("ignore_eos", json!(1)),
        ("speculation", json!("on")),
        ("speculation", json!({"draft_max": 1, "x": 1})),
        ("speculation", json!(true)),
        ("speculation.draft_max", json!({"draft_max": 99})),
        ("speculation.draft_fixed", json!({"draft_fixed": 99})),
        ("speculation", json!({"draft_fixed": 1, "draft_max": 1})),
        ("speculation.max_draft", json!({"max_draft": 99})),
        (
            "speculation.max_draft",
            json!({"max_draft": 1, "draft_max": 1}),
        ),
        ("speculation", json!({"draft_fixed": 1, "max_draft": 1})),
        ("speculation.accept", json!({"accept": "typical"})),
        ("speculation.accept", json!({"accept": true})),
        ("speculation.drafters", json!({"drafters": []})),
        ("speculation.drafters", json!({"drafters": "ngram"})),
        (
            "speculation.drafters",
            json!({"drafters": ["ngram", "oracle"]}),
        ),
        ("chat_template", json!("{{ 1 }}")),
        ("chat_template_kwargs", json!([])),
        ("chat_template_kwargs", json!({"messages": []})),
        (
            "chat_template_kwargs.chat_template",
            json!({"chat_template": "{{ 1 }}"}),
        ),
        ("messages", json!([])),
        ("messages", json!(null)),
        ("messages", json!("Hi")),
        ("messages[0]", json!(["Hi"])),
        ("messages[0].role", json!([{"content": "Hi"}])),
        (
            "messages[0].role",
            json!([{"role": "wizard", "content": "Hi"}]),
        ),
        (
            "messages[1].content",
            json!([{"role": "system", "content": ""}, {"role": "user", "content": null}]),
        ),
        (
            "messages[0].content",
            json!([{"role": "user", "content": 1}]),
        ),
        (
            "messages[0].content[0].text",
            json!([{"role": "user", "content": [{"type": "text"}]}]),
        ),
        ("model", json!(1)),
    ] {
        let name = field.split(['[', '.']).next().unwrap();
        let reply = server.chat(&with(&hello(), name, value.clone())).await;
        assert_eq!(reply.status, 400, "{field} {value} {reply:?}");
        assert_eq!(reply.error()["param"], field, "{value}");
    }
    let reply = server
        .post(COMPLETIONS, &json!({"prompt": [1, 99_999_999]}))
        .await;
    assert_eq!(reply.status, 400);
    for prompt in [json!([]), json!(""), json!([""]), json!(null)] {
        let reply = server.post(COMPLETIONS, &json!({"prompt": prompt})).await;
        assert_eq!(reply.status, 400, "{prompt}");
    }
}

#[tokio::test]
async fn a_prompt_over_the_context_is_refused_with_counts() {
    let server = Server::start(Setup {
        context: 64,
        ..Setup::default()
    })
    .await;
    let long = json!([{"role": "user", "content": "word ".repeat(200)}]);
    for stream in [false, true] {
        let reply = server
            .chat(&with(
                &with(&hello(), "messages", long.clone()),
                "stream",
                json!(stream),
            ))
            .await;
        assert_eq!(reply.status, 400);
        let error = reply.error();
        assert_eq!(error["code"], "context_length_exceeded");
        assert!(error["message"].as_str().unwrap().contains("64"));
    }
    // LiteLLM, LangChain and programs on top of them know an overflow by these words.
    let known =
        "prompt is too long: this model's maximum context length is 64 tokens; the prompt has ";
    let option = " (--context sets the length, up to ";
    for (words, end) in [(80, "93 tokens"), (20_000, "at least 65 tokens")] {
        let text = json!([{"role": "user", "content": "word ".repeat(words)}]);
        let reply = server.chat(&with(&hello(), "messages", text)).await;
        let error = reply.error();
        assert_eq!(error["code"], "context_length_exceeded");
        let message = error["message"].as_str().unwrap();
        assert!(message.starts_with(&format!("{known}{end}")), "{message}");
        assert!(message.contains(option), "{message}");
    }
    let reply = server
        .post(COMPLETIONS, &json!({"prompt": vec![5; 64]}))
        .await;
    assert_eq!(reply.error()["code"], "context_length_exceeded");
    assert_eq!(
        server
            .post(
                COMPLETIONS,
                &json!({"prompt": vec![5; 63], "max_tokens": 1})
            )
            .await
            .status,
        200
    );
}

#[tokio::test]
async fn a_text_that_takes_long_holds_up_nobody() {
    let mut setup = Setup::default();
    setup.config.limits.text_workers = 1;
    let server = Server::start(setup).await;
    // So many bytes that no context of 512 tokens holds them, and as many of which that
    // cannot be said before they are tokenized.
    let of = |text: &str| {
        let content = text.repeat((4 << 20) / text.len());
        with(
            &hello(),
            "messages",
            json!([{"role": "user", "content": content}]),
        )
    };
    let reply = server.chat(&of("rabbit ")).await;
    let error = reply.error();
    assert_eq!(error["code"], "context_length_exceeded");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("at least 513 tokens"), "{message}");
    let slow = of("字").to_string();
    let mut slow = server.open(&request(CHAT, "", slow.as_bytes())).await;
    assert_eq!(server.chat(&hello()).await.status, 200);
    let waited = timeout(Duration::from_millis(1), slow.until("HTTP/1.1")).await;
    assert!(waited.is_err(), "the long text was done first");
    slow.until("context_length_exceeded").await;
}

#[tokio::test]
async fn a_full_context_of_token_ids_is_read() {
    let server = Server::start(Setup::default()).await;
    let ids = vec![248_319; 262_144];
    let reply = server.post(COMPLETIONS, &json!({"prompt": ids})).await;
    assert_eq!(reply.error()["code"], "context_length_exceeded");
}

#[tokio::test]
async fn many_values_that_nobody_reads_are_refused() {
    let server = Server::start(Setup::default()).await;
    let nested = format!("{}0{}", r#"{"":"#.repeat(61), "}".repeat(61));
    let zz = vec![nested; 16_700].join(",");
    let body = format!(r#"{{"prompt":"hi","max_tokens":6000,"ignore_eos":true,"zz":[{zz}]}}"#);
    let reply = server
        .send(&request(COMPLETIONS, "", body.as_bytes()))
        .await;
    assert_eq!(reply.status, 400);
    let fewer = vec!["0"; 20_000].join(",");
    let body = format!(r#"{{"prompt":"hi","max_tokens":1,"zz":[{fewer}]}}"#);
    let reply = server
        .send(&request(COMPLETIONS, "", body.as_bytes()))
        .await;
    assert_eq!((reply.status, &reply.error()["param"]), (400, &json!("zz")));
}

#[tokio::test]
async fn a_name_that_comes_twice_is_refused() {
    let server = Server::start(Setup::default()).await;
    for (body, param) in [
        (
            r#"{"prompt":"hi","max_tokens":1,"max_tokens":2}"#,
            "max_tokens",
        ),
        (
            r#"{"prompt":"hi","stream_options":{"a":1,"a":1}}"#,
            "stream_options.a",
        ),
    ] {
        let reply = server
            .send(&request(COMPLETIONS, "", body.as_bytes()))
            .await;
        assert_eq!(
            (reply.status, &reply.error()["param"]),
            (400, &json!(param))
        );
    }
}

#[tokio::test]
async fn paths_methods_and_types_are_checked() {
    let server = Server::start(Setup::default()).await;
    let reply = server.get("/").await;
    assert_eq!(reply.status, 200);
    assert!(reply.body.contains("/v1/models"), "{}", reply.body);
    for path in [
        "/v2",
        "/v1/chat",
        "/v1/chat/completions/x",
        "/%00",
        "/v1/../health",
    ] {
        let reply = server.get(path).await;
        assert_eq!(reply.status, 404, "{path}");
        let error = reply.error();
        assert_eq!(error["code"], "not_found");
        assert!(error["message"].as_str().unwrap().contains("/v1/models"));
    }
    let reply = server.get("/v1/models/%ff%fe").await;
    assert_eq!(reply.status, 400);
    reply.error();
    let reply = server.get(CHAT).await;
    assert_eq!((reply.status, reply.header("allow")), (405, Some("POST")));
    assert_eq!(reply.error()["code"], "method_not_allowed");
    assert_eq!(server.post("/v1/models", &json!({})).await.status, 405);

    let body = hello().to_string();
    let typed = |kind: &str| {
        String::from_utf8(request(CHAT, "", body.as_bytes()))
            .unwrap()
            .replace("application/json", kind)
    };
    for kind in [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "",
    ] {
        let reply = server.send(typed(kind).as_bytes()).await;
        assert_eq!(reply.status, 415, "{kind}");
        reply.error();
    }
    assert_eq!(
        server
            .send(typed("Application/JSON; charset=utf-8").as_bytes())
            .await
            .status,
        200
    );
    for bad in [
        "",
        "{",
        "[]",
        "null",
        "\"x\"",
        "{\"messages\": [}",
        "{} {}",
        "\u{feff}{}",
    ] {
        let reply = server.send(&request(CHAT, "", bad.as_bytes())).await;
        assert_eq!(reply.status, 400, "{bad}");
        reply.error();
    }
}

#[tokio::test]
async fn bodies_and_headers_over_the_limit_are_refused() {
    let mut setup = Setup::default();
    setup.config.limits.chat_body_bytes = 4 << 10;
    let server = Server::start(setup).await;
    let long = with(&hello(), "user", json!("x".repeat(8 << 10))).to_string();
    let reply = server.send(&request(CHAT, "", long.as_bytes())).await;
    assert_eq!(
        (reply.status, &reply.error()["code"]),
        (413, &json!("body_too_large"))
    );
    // Without an announced length the limit holds while reading.
    let chunked = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n{long}\r\n0\r\n\r\n",
        long.len()
    );
    assert_eq!(server.send(chunked.as_bytes()).await.status, 413);
    let header = format!("x-long: {}\r\n", "x".repeat(20 << 10));
    let reply = server
        .send(&request(CHAT, &header, hello().to_string().as_bytes()))
        .await;
    assert_eq!(reply.status, 431);
    let header: String = (0..200).map(|i| format!("x-{i}: 1\r\n")).collect();
    assert_eq!(
        server.send(&request(CHAT, &header, b"{}")).await.status,
        431
    );
    assert_eq!(server.chat(&hello()).await.status, 200);
}

#[tokio::test]
async fn every_route_but_health_needs_the_key() {
    let mut setup = Setup::default();
    setup.config.keys = Keys::new(["right"]);
    let server = Server::start(setup).await;
    let body = hello().to_string();
    let ask = async |headers: &str| server.send(&request(CHAT, headers, body.as_bytes())).await;
    for headers in [
        "",
        "authorization: Bearer wrong\r\n",
        "x-api-key: wrong\r\n",
        "authorization: right\r\n",
    ] {
        let reply = ask(headers).await;
        assert_eq!(
            (reply.status, &reply.error()["code"]),
            (401, &json!("invalid_api_key")),
            "{headers}"
        );
        assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
    }
    assert_eq!(ask("authorization: Bearer right\r\n").await.status, 200);
    assert_eq!(ask("x-api-key: right\r\n").await.status, 200);
    for path in [
        "/metrics",
        "/v1/models",
        "/v1/models/x",
        CHAT,
        COMPLETIONS,
        "/nothing",
        "/",
    ] {
        assert_eq!(server.get(path).await.status, 401, "{path}");
    }
    assert_eq!(server.get("/health").await.status, 200);
}

#[tokio::test]
async fn web_pages_of_others_are_kept_out() {
    let mut setup = Setup::default();
    setup.config.allowed_origins = vec!["http://friend.example".into()];
    setup.config.allowed_hosts = vec!["box.lan".into()];
    let server = Server::start(setup).await;
    let ask = async |head: &str| server.send(format!("{head}\r\n\r\n").as_bytes()).await;
    let rebound = ask("GET /v1/models HTTP/1.1\r\nhost: evil.example").await;
    assert_eq!(
        (rebound.status, &rebound.error()["code"]),
        (403, &json!("host_not_allowed"))
    );
    assert_eq!(
        ask("GET /health HTTP/1.1\r\nhost: evil.example")
            .await
            .status,
        403
    );
    assert_eq!(
        ask("GET /health HTTP/1.1\r\nhost: box.lan:80").await.status,
        200
    );

    let foreign =
        ask("GET /v1/models HTTP/1.1\r\nhost: localhost\r\norigin: http://evil.example").await;
    assert_eq!(
        (foreign.status, &foreign.error()["code"]),
        (403, &json!("origin_not_allowed"))
    );
    assert_eq!(foreign.header("access-control-allow-origin"), None);
    let own =
        ask("GET /v1/models HTTP/1.1\r\nhost: localhost:1\r\norigin: http://localhost:1").await;
    assert_eq!(
        (own.status, own.header("access-control-allow-origin")),
        (200, None)
    );
    let friend =
        ask("GET /v1/models HTTP/1.1\r\nhost: localhost\r\norigin: http://friend.example").await;
    assert_eq!(
        friend.header("access-control-allow-origin"),
        Some("http://friend.example")
    );

    let preflight = |origin: &str| {
        format!(
            "OPTIONS {CHAT} HTTP/1.1\r\nhost: localhost\r\norigin: {origin}\r\naccess-control-request-method: POST\r\naccess-control-request-headers: authorization,content-type"
        )
    };
    let friend = ask(&preflight("http://friend.example")).await;
    assert_eq!(
        (friend.status, friend.header("access-control-allow-headers")),
        (200, Some("authorization,content-type"))
    );
    let evil = ask(&preflight("http://evil.example")).await;
    assert_eq!(
        (evil.status, evil.header("access-control-allow-origin")),
        (403, None)
    );
}

#[tokio::test]
async fn a_preflight_answers_with_200_and_title_case_and_the_connection_lives_on() {
    let mut setup = Setup::default();
    setup.config.allowed_origins = vec!["localhost".into()];
    let server = Server::start(setup).await;
    let preflight = format!(
        "OPTIONS {CHAT} HTTP/1.1\r\nhost: mybox\r\norigin: http://localhost:3000\r\naccess-control-request-method: POST\r\n\r\n"
    );
    let mut exchange = server.open(preflight.as_bytes()).await;
    exchange.until("\r\n\r\n").await;
    let head = String::from_utf8_lossy(&exchange.buffer).into_owned();
    for line in [
        "HTTP/1.1 200 OK",
        "Access-Control-Allow-Origin: http://localhost:3000",
        "Access-Control-Allow-Methods: GET, POST, DELETE, OPTIONS",
        "Content-Length: 0",
    ] {
        assert!(head.lines().any(|l| l == line), "{line} in {head}");
    }
    assert_eq!(exchange.reply().await.status, 200);
    let next = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n";
    exchange.stream.write_all(next).await.unwrap();
    assert_eq!(exchange.reply().await.body, r#"{"status":"ok"}"#);
}

#[tokio::test]
async fn an_unknown_host_is_named_with_the_flag_that_allows_it_and_a_key_is_enough() {
    let mut setup = Setup::default();
    setup.config.keys = Keys::new(["right"]);
    let server = Server::start(setup).await;
    let ask = async |path: &str, headers: &str| {
        let request = format!("GET {path} HTTP/1.1\r\nhost: mybox:8080\r\n{headers}\r\n");
        server.send(request.as_bytes()).await
    };
    let reply = ask("/v1/models", "x-api-key: right\r\n").await;
    assert_eq!(reply.status, 200);
    for (path, headers) in [
        ("/v1/models", "x-api-key: wrong\r\n"),
        ("/v1/models", ""),
        ("/health", ""),
    ] {
        let reply = ask(path, headers).await;
        let error = reply.error();
        assert_eq!(
            (reply.status, &error["code"]),
            (403, &json!("host_not_allowed"))
        );
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("`--allow-host mybox`"), "{message}");
        assert!(message.contains("valid API key"), "{message}");
    }
    // A page that had its own name resolved to this machine knows no key.
    let page = "origin: http://mybox:8080\r\n";
    assert_eq!(ask("/v1/models", page).await.status, 403);
    let doubled = "x-api-key: wrong\r\nx-api-key: right\r\n";
    let reply = ask("/v1/models", doubled).await;
    assert_eq!(reply.status, 400);
    assert!(
        reply.error()["message"]
            .as_str()
            .unwrap()
            .contains("x-api-key")
    );
}

#[tokio::test]
async fn the_network_is_not_served_without_a_key() {
    let server = Server::start(Setup::default()).await;
    let open = async || TcpListener::bind("0.0.0.0:0").await.unwrap();
    let serve = |config, listener| {
        let models = Models::one(server.engine.clone(), ModelConfig::default());
        server::serve(config, models, listener, async {})
    };
    let refused = serve(Config::default(), open().await).await;
    assert!(matches!(refused, Err(ServeError::OpenToTheNetwork { .. })));
    let keyed = Config {
        keys: Keys::new(["k"]),
        ..Config::default()
    };
    assert!(serve(keyed, open().await).await.is_ok());
    let insecure = Config {
        insecure: true,
        ..Config::default()
    };
    assert!(serve(insecure, open().await).await.is_ok());
}

/// Values that a field may be replaced with.
fn junk() -> Vec<Value> {
    let deep = (0..40).fold(json!(1), |inner, _| json!([inner]));
    vec![
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(1.5),
        json!(1e308),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(""),
        json!("x"),
        json!("\u{0}\u{202e}🤯"),
        json!("a".repeat(5000)),
        json!([]),
        json!([null]),
        json!([1, "a", {}]),
        json!({}),
        json!({"type": "text"}),
        json!({"": {"": []}}),
        deep,
    ]
}

fn check_mutant(reply: &Reply, what: &str) {
    assert!((200..500).contains(&reply.status), "{what}: {reply:?}");
    assert!(reply.body.len() < 64 << 10, "{what}");
    if reply.status != 200 {
        let error = reply.error().to_string();
        for leak in ["src/", "panicked", ".rs", "0x", "Some(", "/root", "Error {"] {
            assert!(!error.contains(leak), "{what}: {error}");
        }
    }
}

#[tokio::test]
async fn malformed_requests_get_an_answer_below_500() {
    let server = Server::start(Setup {
        context: 128,
        ..Setup::default()
    })
    .await;
    let chat = json!({
        "model": "default", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "n"}],
        "max_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "stop": ["x"],
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"5": 1},
        "stream": false, "stream_options": null, "ignore_eos": false, "speculation": "auto", "n": 1,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "auto", "parallel_tool_calls": true,
        "chat_template_kwargs": {"enable_thinking": false}, "response_format": {"type": "text"}, "user": "u",
        "logprobs": true, "top_logprobs": 2,
    });
    let prompt =
        json!({"prompt": "Hi", "max_tokens": 1, "logprobs": 1, "echo": false, "suffix": ""});
    let mut n_mutants = 0;
    for (path, base) in [(CHAT, &chat), (COMPLETIONS, &prompt)] {
        assert_eq!(server.post(path, base).await.status, 200);
        let pointers: Vec<String> = base
            .as_object()
            .unwrap()
            .keys()
            .map(|key| format!("/{key}"))
            .collect();
        let inner = [
            "/messages/0",
            "/messages/0/role",
            "/messages/0/content",
            "/messages/0/content/0",
            "/messages/0/content/0/text",
            "/messages/0/name",
        ];
        let inner = inner
            .iter()
            .map(|p| (*p).to_owned())
            .filter(|p| base.pointer(p).is_some());
        for pointer in pointers.iter().cloned().chain(inner) {
            for value in junk() {
                let mut mutant = base.clone();
                *mutant.pointer_mut(&pointer).unwrap() = value.clone();
                // What may run to the end of the context would only cost time.
                if pointer == "/max_tokens" && mutant["max_tokens"].as_f64().is_none_or(|n| n < 0.0)
                {
                    mutant["ignore_eos"] = json!(false);
                }
                let reply = server.post(path, &mutant).await;
                check_mutant(&reply, &format!("{pointer} = {value:.80}"));
                n_mutants += 1;
            }
        }
        // Cut, and with one byte changed.
        let text = base.to_string();
        for i in (0..text.len()).step_by(7) {
            let cut = &text.as_bytes()[..i];
            check_mutant(&server.send(&request(path, "", cut)).await, "cut");
            let mut flipped = text.as_bytes().to_vec();
            flipped[i] ^= 1 << (i % 8);
            check_mutant(&server.send(&request(path, "", &flipped)).await, "flipped");
            n_mutants += 2;
        }
    }
    assert!(n_mutants >= 200, "{n_mutants}");
    server.until_idle().await;
    assert_eq!(server.engine.counters().failed.load(Ordering::Relaxed), 0);
    assert_eq!(server.chat(&hello()).await.status, 200);
}
