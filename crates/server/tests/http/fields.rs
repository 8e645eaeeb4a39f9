//! Every known field of a request is treated as the tables say, and the page says the same.

use std::path::Path;

use serde_json::{Value, json};

use crate::client::{Server, Setup};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// Begin and end of the tables in `docs/server.md`, and what writes them.
type Tables = (&'static str, &'static str, fn() -> String);
const TABLES: [Tables; 6] = [
    (
        "<!-- fields: UPDATE_DOCS=1 cargo test -p server fields:: -->\n",
        "<!-- end of fields -->\n",
        server::fields_as_markdown,
    ),
    (
        "<!-- responses: UPDATE_DOCS=1 cargo test -p server fields:: -->\n",
        "<!-- end of responses -->\n",
        server::responses_fields_as_markdown,
    ),
    (
        "<!-- embeddings: UPDATE_DOCS=1 cargo test -p server fields:: -->\n",
        "<!-- end of embeddings -->\n",
        server::embedding_fields_as_markdown,
    ),
    (
        "<!-- messages: UPDATE_DOCS=1 cargo test -p server fields:: -->\n",
        "<!-- end of messages -->\n",
        server::messages_fields_as_markdown,
    ),
    (
        "<!-- llama: UPDATE_DOCS=1 cargo test -p server fields:: -->\n",
        "<!-- end of llama -->\n",
        server::llama_fields_as_markdown,
    ),
    (
        "<!-- ollama: UPDATE_DOCS=1 cargo test -p server fields:: -->\n",
        "<!-- end of ollama -->\n",
        server::ollama_fields_as_markdown,
    ),
];

fn chat() -> Value {
    json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1})
}

/// Sets the field at `path`.
fn with(mut body: Value, path: &str, value: Value) -> Value {
    match path.split_once('.') {
        None => body[path] = value,
        Some(("messages[]", name)) => body["messages"][0][name] = value,
        Some((object, name)) => {
            body["stream"] = json!(true);
            body[object] = with(json!({}), name, value);
            if let Some(inner) = body[object].as_object_mut() {
                inner.remove("stream");
            }
        }
    }
    body
}

#[test]
fn the_page_about_the_server_has_the_tables_of_the_code() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/server.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let mut written = page.clone();
    for (begin, end, tables) in TABLES {
        let begin = written.find(begin).unwrap() + begin.len();
        let end = written.find(end).unwrap();
        written.replace_range(begin..end, &format!("\n{}\n", tables()));
    }
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, written).unwrap();
    } else {
        assert!(page == written, "UPDATE_DOCS=1 writes them anew");
    }
}

#[tokio::test]
async fn honoured_fields_are_read() {
    let server = Server::start(Setup::default()).await;
    let tables = server::fields_as_markdown();
    let honoured = tables.split("### Refused").next().unwrap();
    let mut n = 0;
    for line in honoured.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let (field, of) = (cells[1].trim_matches('`'), cells[2]);
        let prompt = json!({"prompt": "Hi", "max_tokens": 1});
        for (path, base) in [(CHAT, chat()), (COMPLETIONS, prompt)] {
            if of != "both" && (of == "chat") != (path == CHAT) {
                continue;
            }
            // No field takes this.
            let reply = server.post(path, &with(base, field, json!(1e300))).await;
            assert_eq!(reply.status, 400, "{field}: {reply:?}");
            if !field.starts_with("messages[]") {
                assert_eq!(reply.error()["param"], field);
            }
            n += 1;
        }
    }
    assert!(n > 40, "{n}");
}

#[tokio::test]
async fn honoured_fields_of_messages_are_read() {
    let server = Server::start(Setup::default()).await;
    let tables = server::messages_fields_as_markdown();
    let honoured = tables.lines().filter(|line| line.contains("| honored |"));
    let mut n = 0;
    for fields in honoured.map(|line| line.split('|').nth(1).unwrap()) {
        for field in fields
            .split(',')
            .map(|field| field.trim().trim_matches('`'))
        {
            // Objects and lists are read field by field; anything is taken for a place to cache.
            if field == "cache_control" {
                continue;
            }
            let (outer, inner) = field.rsplit_once('.').unwrap_or(("", field));
            let outer: Vec<&str> = outer.split('.').filter(|name| !name.is_empty()).collect();
            let mut value = json!({inner: 1e300});
            for name in outer.iter().rev() {
                value = match name.strip_suffix("[]") {
                    Some(name) => json!({name: [value]}),
                    None => json!({*name: value}),
                };
            }
            let mut body = chat();
            body.as_object_mut()
                .unwrap()
                .extend(value.as_object().unwrap().clone());
            let reply = server.post("/v1/messages", &body).await;
            assert_eq!(reply.status, 400, "{field}: {reply:?}");
            let told = reply.json()["error"]["message"].clone();
            let path = field.replace("[]", "[0]");
            let whole = format!("`{path}`");
            let missing = path.rsplit_once('.').map(|(outer, _)| format!("`{outer}."));
            let told = told.as_str().unwrap();
            let is_named = told.starts_with(&whole)
                || missing.is_some_and(|missing| told.starts_with(&missing));
            assert!(is_named, "{field}: {told}");
            n += 1;
        }
    }
    assert!(n > 50, "{n}");
}

#[tokio::test]
async fn honoured_fields_of_llama_server_are_read() {
    let server = Server::start(Setup::default()).await;
    let tables = server::llama_fields_as_markdown();
    let honoured = tables.lines().filter(|line| line.contains("| honored |"));
    let mut n = 0;
    for line in honoured {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let about = cells[3];
        let (path, base) = match about {
            _ if about.starts_with("`/infill`") => {
                ("/infill", json!({"input_prefix": "a", "input_suffix": "b"}))
            }
            _ if about.contains("vLLM's form") => ("/tokenize", json!({"prompt": "a"})),
            _ if about.starts_with("`/tokenize`") => ("/tokenize", json!({"content": "a"})),
            _ if about.starts_with("`/detokenize`") => ("/detokenize", json!({})),
            // One of two names of the text counts.
            _ if about.starts_with("`/embedding`") && cells[1] == "`input`" => {
                ("/embedding", json!({}))
            }
            _ if about.starts_with("`/embedding`") => ("/embedding", json!({"content": "a"})),
            _ => ("/completion", json!({"prompt": "Hi", "n_predict": 1})),
        };
        for field in cells[1]
            .split(',')
            .map(|field| field.trim().trim_matches('`'))
        {
            let mut base = base.clone();
            // One of several names of the length counts.
            if field.starts_with("max_") {
                base.as_object_mut().unwrap().remove("n_predict");
            }
            let mut value = json!(1e300);
            let (outer, inner) = field.rsplit_once('.').unwrap_or(("", field));
            value = json!({inner: value});
            for name in outer.rsplit('.').filter(|name| !name.is_empty()) {
                value = json!({name: value});
            }
            base.as_object_mut()
                .unwrap()
                .extend(value.as_object().unwrap().clone());
            let reply = server.post(path, &base).await;
            assert_eq!(reply.status, 400, "{field}: {reply:?}");
            assert_eq!(reply.json()["error"]["param"], field, "{reply:?}");
            n += 1;
        }
    }
    assert!(n > 60, "{n}");
}

#[tokio::test]
async fn ignored_fields_are_named_with_their_paths() {
    let server = Server::start(Setup::default()).await;
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", "oddly": 1}, "tomorrow": 1});
    let messages = json!([
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}], "zz": 1},
        {"role": "assistant", "tool_calls": [call], "refusal": null, "annotations": [], "id": "m"},
        {"role": "tool", "tool_call_id": "c", "content": "1", "zz": 2},
    ]);
    let more = [
        ("messages", messages),
        ("stream", json!(true)),
        (
            "stream_options",
            json!({"include_usage": true, "include_everything": 1, "include_obfuscation": false}),
        ),
        (
            "chat_template_kwargs",
            json!({"enable_thinking": false, "unheard_of": 1}),
        ),
        ("temprature", json!(1)),
    ];
    let body = more
        .into_iter()
        .fold(chat(), |body, (name, value)| with(body, name, value));
    let reply = server.chat(&body).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let ignored = [
        "chat_template_kwargs.unheard_of",
        "messages[0].content[0].cache_control",
        "messages[0].zz",
        "messages[1].tool_calls[0].function.oddly",
        "messages[1].tool_calls[0].tomorrow",
        "stream_options.include_everything",
        "stream_options.include_obfuscation",
        "temprature",
    ];
    assert_eq!(
        reply.header("x-ignored-fields"),
        Some(ignored.join(", ").as_str())
    );
}

#[tokio::test]
async fn pictures_and_beginnings_in_a_message_are_refused() {
    let server = Server::start(Setup::default()).await;
    for (field, value, neutral) in [
        ("images", json!(["AAAA"]), json!([])),
        ("audio", json!({"id": "x"}), json!(null)),
        ("prefix", json!(true), json!(false)),
        ("partial", json!(true), json!(false)),
    ] {
        let path = format!("messages[].{field}");
        let reply = server.chat(&with(chat(), &path, value)).await;
        assert_eq!(reply.status, 400, "{field}");
        assert_eq!(reply.error()["param"], format!("messages[0].{field}"));
        assert_eq!(reply.error()["code"], "unsupported_parameter");
        let reply = server.chat(&with(chat(), &path, neutral)).await;
        assert_eq!(reply.status, 200, "{field}");
        assert_eq!(reply.header("x-ignored-fields"), None);
    }
}

#[tokio::test]
async fn penalties_look_at_as_many_tokens_as_asked_for() {
    let server = Server::start(Setup::default()).await;
    let text = async |more: &[(&str, f64)]| {
        let story =
            json!([{"role": "user", "content": "Tell me a story about a rabbit and a kite."}]);
        let body = with(with(chat(), "messages", story), "max_tokens", json!(48));
        let set = |body, (name, value): &(&str, f64)| with(body, name, json!(value));
        let reply = server.chat(&more.iter().fold(body, set)).await;
        assert_eq!(reply.status, 200, "{more:?}");
        reply.text()
    };
    let last = |n: f64| ("repeat_last_n", n);
    let plain = text(&[last(64.0)]).await;
    for penalty in [
        ("repeat_penalty", 20.0),
        ("presence_penalty", -2.0),
        ("frequency_penalty", -2.0),
    ] {
        let all = text(&[penalty]).await;
        assert_ne!(all, plain, "{penalty:?}");
        assert_eq!(text(&[penalty, last(-1.0)]).await, all, "{penalty:?}");
        assert_eq!(text(&[penalty, last(1e5)]).await, all, "{penalty:?}");
        assert_eq!(text(&[penalty, last(0.0)]).await, plain, "{penalty:?}");
        assert_ne!(text(&[penalty, last(1.0)]).await, all, "{penalty:?}");
    }
}
