//! Ollama's API: what is served, and answers whole and as lines of JSON.

use serde_json::{Value, json};

use crate::client::{Reply, Server, Setup};
use crate::wire::with;

const CHAT: &str = "/api/chat";
const GENERATE: &str = "/api/generate";
const STORY: &str = "Tell me a story about a rabbit and a kite.";

fn ask(content: &str, tokens: usize) -> Value {
    json!({"model": "tiny-qwen3.5", "messages": [{"role": "user", "content": content}],
        "options": {"temperature": 0, "num_predict": tokens, "seed": 7}})
}

fn weather() -> Value {
    json!({"type": "function", "function": {"name": "get_weather", "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {
            "city": {"type": "string", "description": "The name of the city."}}, "required": ["city"]}}})
}

/// The lines of a stream, the last of which must be the end.
fn lines(reply: &Reply) -> Vec<Value> {
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(reply.header("content-type"), Some("application/x-ndjson"));
    assert!(reply.body.ends_with('\n'), "{reply:?}");
    let lines = reply
        .body
        .lines()
        .map(|line| serde_json::from_str(line).unwrap());
    let lines: Vec<Value> = lines.collect();
    let (last, others) = lines.split_last().unwrap();
    assert_eq!(last["done"], true, "{last}");
    assert!(
        others.iter().all(|line| line["done"] == false),
        "{others:?}"
    );
    lines
}

/// What an answer says: content, reasoning, calls without their ids, why it ended, and its tokens.
fn said(documents: &[Value]) -> Value {
    let text = |name: &str| -> String {
        let of = |d: &Value| {
            let text = d["message"].get(name).or(d.get(name));
            let text = text.or(d.get("response").filter(|_| name == "content"));
            text.and_then(Value::as_str).unwrap_or_default().to_owned()
        };
        documents.iter().map(of).collect()
    };
    let calls = documents
        .iter()
        .filter_map(|d| d["message"]["tool_calls"].as_array());
    let calls: Vec<Value> = calls
        .flatten()
        .map(|call| call["function"].clone())
        .collect();
    let last = documents.last().unwrap();
    json!([
        text("content"),
        text("thinking"),
        calls,
        last["done_reason"],
        last["eval_count"],
        last["prompt_eval_count"]
    ])
}

/// The answer to `body`, after checking that it is the same as a stream, and without speculation.
async fn answer(server: &Server, path: &str, body: &Value) -> Value {
    let reply = server
        .post(path, &with(body, json!({"stream": false})))
        .await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let whole = reply.json();
    let expected = said(std::slice::from_ref(&whole));
    assert_eq!(whole["speculation"]["engaged"], true, "{whole}");
    for more in [json!({}), json!({"speculation": "off"})] {
        let reply = server.post(path, &with(body, more.clone())).await;
        let lines = lines(&reply);
        assert_eq!(said(&lines), expected, "{more} {body}");
        let is_on = more["speculation"] != "off";
        assert_eq!(lines.last().unwrap()["speculation"]["engaged"], is_on);
    }
    whole
}

#[tokio::test]
async fn what_is_served_is_listed_shown_and_loaded() {
    let server = Server::start(Setup::default()).await;
    let version = server.get("/api/version").await.json();
    let numbers: Vec<u64> = version["version"]
        .as_str()
        .unwrap()
        .split('.')
        .map(|n| n.parse().unwrap())
        .collect();
    assert!(numbers >= vec![0, 18, 3], "{version}");
    let info = server.engine.info();
    let listed = server.get("/api/tags").await.json()["models"][0].clone();
    assert_eq!(listed["name"], "tiny-qwen3.5:latest");
    assert_eq!(listed["size"], info.weight_bytes);
    assert_eq!(listed["digest"].as_str().unwrap().len(), 64, "{listed}");
    assert_eq!(listed["details"]["format"], "safetensors");
    assert_eq!(
        listed["capabilities"],
        json!(["completion", "tools", "thinking", "insert"])
    );
    for name in ["tiny-qwen3.5", "tiny-qwen3.5:latest"] {
        let shown = server
            .post("/api/show", &json!({"model": name}))
            .await
            .json();
        assert_eq!(shown["capabilities"], listed["capabilities"]);
        let facts = &shown["model_info"];
        let family = facts["general.architecture"].as_str().unwrap();
        assert_eq!(facts[format!("{family}.context_length")], 512);
        assert_eq!(
            facts[format!("{family}.embedding_length")],
            info.hidden_size
        );
        assert!(
            facts["general.parameter_count"].as_u64().unwrap() > 100_000,
            "{shown}"
        );
        assert!(shown["template"].as_str().unwrap().contains("im_start"));
        assert_eq!(shown["details"], listed["details"]);
    }
    let loaded = server.get("/api/ps").await.json()["models"][0].clone();
    assert!(
        loaded["size"].as_u64() > listed["size"].as_u64(),
        "{loaded}"
    );
    assert_eq!(
        (&loaded["size_vram"], &loaded["context_length"]),
        (&json!(0), &json!(512))
    );
    let other = server.post("/api/show", &json!({"name": "other"})).await;
    assert_eq!(other.status, 404);
    assert!(other.json()["error"].as_str().unwrap().contains("`other`"));
}

#[tokio::test]
async fn a_chat_is_that_of_openai_s_api_and_counts_its_tokens() {
    for model in ["tiny-qwen3.5", "tiny-gemma4"] {
        let server = Server::start(Setup {
            model,
            ..Setup::default()
        })
        .await;
        let whole = answer(
            &server,
            CHAT,
            &with(&ask(STORY, 24), json!({"model": model})),
        )
        .await;
        let chat = json!({"messages": [{"role": "user", "content": STORY}], "max_tokens": 24, "temperature": 0, "seed": 7});
        let chat = server.chat(&chat).await.json();
        assert_eq!(
            whole["message"]["content"],
            chat["choices"][0]["message"]["content"]
        );
        assert_eq!(whole["model"], model);
        assert_eq!(whole["done_reason"], "length");
        assert_eq!(whole["eval_count"], 24);
        assert_eq!(whole["prompt_eval_count"], chat["usage"]["prompt_tokens"]);
        for name in ["total_duration", "eval_duration"] {
            // More than a microsecond, in nanoseconds.
            assert!(whole[name].as_u64().unwrap() > 1000, "{name}: {whole}");
        }
        let sampled = json!({"options": {"temperature": 0.9, "top_k": 40, "min_p": 0.05, "seed": 3,
            "repeat_penalty": 1.2, "repeat_last_n": 32, "num_predict": 30, "num_ctx": 4096, "stop": ["zzz"]}});
        answer(&server, CHAT, &with(&ask(STORY, 1), sampled)).await;
    }
}

#[tokio::test]
async fn reasoning_comes_apart_where_it_is_asked_for() {
    let server = Server::start(Setup::default()).await;
    let whole = answer(
        &server,
        CHAT,
        &with(&ask(STORY, 60), json!({"think": true})),
    )
    .await;
    let thinking = whole["message"]["thinking"].as_str().unwrap();
    assert!(
        !thinking.is_empty() && !thinking.contains("<think>"),
        "{whole}"
    );
    let whole = answer(
        &server,
        CHAT,
        &with(&ask(STORY, 60), json!({"think": false})),
    )
    .await;
    assert_eq!(whole["message"].get("thinking"), None);
}

#[tokio::test]
async fn a_model_calls_and_goes_on_from_the_result() {
    for model in ["tiny-qwen3.5", "tiny-gemma4"] {
        let server = Server::start(Setup {
            model,
            ..Setup::default()
        })
        .await;
        let body = with(
            &ask("What is the weather in Rome?", 100),
            json!({"tools": [weather()]}),
        );
        let whole = answer(&server, CHAT, &body).await;
        let call = &whole["message"]["tool_calls"][0]["function"];
        assert_eq!(call["name"], "get_weather", "{whole}");
        assert!(call["arguments"]["city"].is_string(), "{whole}");
        assert_eq!(whole["done_reason"], "stop");
        let mut messages = body["messages"].as_array().unwrap().clone();
        messages.push(whole["message"].clone());
        messages.push(json!({"role": "tool", "tool_name": "get_weather", "content": "21 degrees"}));
        let named = answer(&server, CHAT, &with(&body, json!({"messages": messages}))).await;
        // A result without a name answers the call before it.
        messages
            .last_mut()
            .unwrap()
            .as_object_mut()
            .unwrap()
            .remove("tool_name");
        let unnamed = answer(&server, CHAT, &with(&body, json!({"messages": messages}))).await;
        assert_eq!(named["message"], unnamed["message"]);
        assert_eq!(named["prompt_eval_count"], unnamed["prompt_eval_count"]);
    }
}

#[tokio::test]
async fn a_format_is_kept() {
    let server = Server::start(Setup::default()).await;
    let schema = json!({"type": "object", "properties": {"size": {"enum": ["small", "large"]}},
        "required": ["size"], "additionalProperties": false});
    let whole = answer(
        &server,
        CHAT,
        &with(&ask("How large?", 60), json!({"format": schema})),
    )
    .await;
    let object: Value =
        serde_json::from_str(whole["message"]["content"].as_str().unwrap()).unwrap();
    assert!(
        object["size"] == "small" || object["size"] == "large",
        "{object}"
    );
    let reply = server
        .post(
            CHAT,
            &with(&ask("Hi", 5), json!({"format": "json", "stream": false})),
        )
        .await;
    let text = reply.json()["message"]["content"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(text.trim_start().starts_with('{'), "{text}");
}

#[tokio::test]
async fn a_prompt_is_a_message_or_raw() {
    let server = Server::start(Setup::default()).await;
    let prompt = json!({"prompt": STORY, "options": {"temperature": 0, "num_predict": 20}});
    let whole = answer(&server, GENERATE, &prompt).await;
    let chat = answer(&server, CHAT, &ask(STORY, 20)).await;
    assert_eq!(whole["response"], chat["message"]["content"]);
    let begun =
        json!({"prompt": "Once upon a time", "options": {"temperature": 0, "num_predict": 20}});
    let raw = answer(&server, GENERATE, &with(&begun, json!({"raw": true}))).await;
    let plain = json!({"prompt": "Once upon a time", "temperature": 0, "max_tokens": 20});
    let plain = server.post("/v1/completions", &plain).await.json();
    assert_eq!(raw["response"], plain["choices"][0]["text"]);
    let told = answer(
        &server,
        GENERATE,
        &with(&prompt, json!({"system": "Be brief."})),
    )
    .await;
    assert!(told["prompt_eval_count"].as_u64() > whole["prompt_eval_count"].as_u64());
}

#[tokio::test]
async fn nothing_to_say_loads_the_model() {
    let server = Server::start(Setup::default()).await;
    for (path, body) in [
        (CHAT, json!({"model": "a"})),
        (CHAT, json!({"messages": []})),
        (GENERATE, json!({"prompt": "", "keep_alive": -1})),
    ] {
        let reply = server.post(path, &body).await.json();
        assert_eq!(
            (&reply["done"], &reply["done_reason"]),
            (&json!(true), &json!("load")),
            "{reply}"
        );
        assert_eq!(reply["model"], "tiny-qwen3.5:latest");
    }
}

#[tokio::test]
async fn a_suffix_has_the_gap_before_it_filled() {
    let server = Server::start(Setup::default()).await;
    let (prefix, suffix) = ("int main() {\n", "}\n");
    let options = json!({"temperature": 0, "num_predict": 8});
    let body = json!({"prompt": prefix, "suffix": suffix, "options": options, "think": false});
    let answer = answer(&server, GENERATE, &body).await;
    let infill =
        json!({"input_prefix": prefix, "input_suffix": suffix, "temperature": 0, "n_predict": 8});
    let filled = server.post("/infill", &infill).await.json();
    assert_eq!(answer["response"], filled["content"]);
    assert_eq!(answer["prompt_eval_count"], filled["tokens_evaluated"]);
    assert_eq!(answer.get("thinking"), None, "{answer}");
    // A vocabulary without marks of gaps.
    let server = Server::start(Setup {
        model: "tiny-gemma4",
        ..Setup::default()
    })
    .await;
    let reply = server.post(GENERATE, &body).await;
    assert_eq!(reply.status, 400, "{reply:?}");
    let error = reply.json()["error"].as_str().unwrap().to_owned();
    assert!(
        error.contains("`suffix`") && error.contains("fills no gaps"),
        "{error}"
    );
}

#[tokio::test]
async fn what_is_not_there_is_refused_by_name() {
    let server = Server::start(Setup::default()).await;
    let refused = async |path: &str, more: Value, word: &str| {
        let base = match path {
            CHAT => ask("Hi", 1),
            _ => json!({"prompt": "Hi"}),
        };
        let reply = server.post(path, &with(&base, more)).await;
        assert_eq!(reply.status, 400, "{reply:?}");
        let error = reply.json()["error"].as_str().unwrap().to_owned();
        assert!(error.contains(word), "{word}: {error}");
    };
    let picture = json!({"messages": [{"role": "user", "content": "Hi", "images": ["AAAA"]}]});
    refused(CHAT, picture, "`messages[0].images[0]`").await;
    refused(GENERATE, json!({"images": ["AAAA"]}), "`images[0]`").await;
    refused(CHAT, json!({"images": ["AAAA"]}), "`images`").await;
    refused(CHAT, json!({"suffix": "end"}), "`suffix`").await;
    for with in [
        json!({"raw": true}),
        json!({"system": "x"}),
        json!({"images": ["AAAA"]}),
    ] {
        let field = with.as_object().unwrap().keys().next().unwrap().clone();
        let more = crate::wire::with(&with, json!({"suffix": "end"}));
        refused(GENERATE, more, &field).await;
    }
    refused(GENERATE, json!({"template": "{{ .Prompt }}"}), "`template`").await;
    refused(GENERATE, json!({"context": [1, 2]}), "`context`").await;
    refused(GENERATE, json!({"tools": [weather()]}), "`tools`").await;
    refused(GENERATE, json!({"raw": true, "system": "x"}), "`system`").await;
    refused(CHAT, json!({"temperature": 0.5}), "belongs in `options`").await;
    refused(
        CHAT,
        json!({"options": {"temperature": 9}}),
        "`options.temperature`",
    )
    .await;
    refused(
        CHAT,
        json!({"options": {"penalize_newline": false}}),
        "`options.penalize_newline`",
    )
    .await;
    refused(CHAT, json!({"options": {"tfs_z": 0.5}}), "`options.tfs_z`").await;
    refused(CHAT, json!({"options": 3}), "`options`").await;
    refused(CHAT, json!({"format": 3}), "`format`").await;
    refused(CHAT, json!({"think": "huge"}), "`think`").await;
    for path in ["pull", "push", "create", "copy", "blobs/sha256:0"] {
        refused(&format!("/api/{path}"), json!({}), "paceline pull").await;
    }
    let reply = server.post(CHAT, &with(&ask("Hi", 1), json!({"stream": false, "keep_alive": "5m", "odd": 1, "options": {"num_ctx": 9, "odder": 1}}))).await;
    assert_eq!(
        reply.header("x-ignored-fields"),
        Some("odd, options.num_ctx, options.odder")
    );
}

#[tokio::test]
async fn a_quiet_stream_has_lines_that_say_nothing() {
    let mut setup = Setup {
        chunk: 1,
        context: 2048,
        ..Setup::default()
    };
    setup.config.limits.keep_alive = std::time::Duration::from_millis(1);
    let server = Server::start(setup).await;
    let reply = server.post(CHAT, &ask(&"word ".repeat(600), 4)).await;
    let lines = lines(&reply);
    assert_eq!(
        lines[0]["message"],
        json!({"role": "assistant", "content": ""})
    );
}
