//! Paths as clients spell them.

use serde_json::{Value, json};
use tokio::io::AsyncReadExt;

use crate::client::{Server, Setup};

#[tokio::test]
async fn every_path_is_served_with_and_without_v1_and_a_slash() {
    let server = Server::start(Setup::default()).await;
    for path in ["", "/health", "/metrics", "/models", "/models/tiny-qwen3.5"] {
        for spelled in [
            path.to_owned(),
            format!("{path}/"),
            format!("/v1{path}"),
            format!("/v1{path}/"),
        ] {
            let spelled = if spelled.is_empty() { "/" } else { &spelled };
            assert_eq!(server.get(spelled).await.status, 200, "{spelled}");
        }
    }
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1});
    let plain = json!({"prompt": "Hi", "max_tokens": 1});
    for (path, body) in [
        ("/chat/completions", chat.clone()),
        ("/completions", plain),
        ("/messages", chat.clone()),
        ("/messages/count_tokens", chat),
    ] {
        for spelled in [
            path.to_owned(),
            format!("{path}/"),
            format!("/v1{path}"),
            format!("/v1{path}/"),
        ] {
            assert_eq!(server.post(&spelled, &body).await.status, 200, "{spelled}");
        }
    }
    let greeting = server.get("/").await.body;
    assert!(
        greeting.contains("OpenAI base URL: http://localhost/v1\n"),
        "{greeting}"
    );
    let metrics = server.get("/metrics").await.body;
    let line = "paceline:http_responses_total{model_name=\"tiny-qwen3.5\",route=\"/v1/completions\",status=\"200\"} 4";
    assert!(metrics.lines().any(|l| l == line), "{metrics}");
}

#[tokio::test]
async fn a_wrong_path_or_method_is_told_the_right_one() {
    let server = Server::start(Setup::default()).await;
    let message = async |path: &str| {
        let reply = server.get(path).await;
        assert_eq!(reply.status, 404, "{path}");
        reply.error()["message"].as_str().unwrap().to_owned()
    };
    let told = message("/v1/v1/chat/completions").await;
    assert!(
        told.contains("did you mean /v1/chat/completions?"),
        "{told}"
    );
    let told = message("/nothing/at/all").await;
    assert!(!told.contains("did you mean"), "{told}");
    assert!(told.contains("/v1/models"), "{told}");
    for (path, name) in [
        (
            "/api/web_search",
            "this part of Ollama's API is not supported yet",
        ),
        (
            "/v1/messages/batches",
            "Anthropic's Message Batches API is not supported yet",
        ),
    ] {
        let told = message(path).await;
        assert!(told.starts_with(name), "{told}");
        assert!(told.ends_with("the base URL http://localhost/v1"), "{told}");
    }
    let reply = server.get("/v1/chat/completions").await;
    assert_eq!((reply.status, reply.header("allow")), (405, Some("POST")));
    assert_eq!(reply.error()["message"], "use POST here, not GET");
    let reply = server.post("/models/", &json!({})).await;
    assert_eq!(reply.status, 405);
    assert_eq!(reply.error()["message"], "use GET here, not POST");
}

#[tokio::test]
async fn head_works_wherever_get_does() {
    let server = Server::start(Setup::default()).await;
    for path in ["/", "/health", "/v1/models"] {
        let head = format!("HEAD {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        let mut exchange = server.open(head.as_bytes()).await;
        let mut answer = String::new();
        exchange.stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
        assert!(answer.ends_with("\r\n\r\n"), "{path}: {answer}");
    }
}

#[tokio::test]
async fn the_description_of_the_server_says_what_is_required() {
    let server = Server::start(Setup::default()).await;
    let reply = server.get("/openapi.json").await;
    assert_eq!(reply.status, 200);
    let page = reply.json();
    let mut n = 0;
    for (path, operations) in page["paths"].as_object().unwrap() {
        let body = &operations["post"]["requestBody"]["content"]["application/json"]["schema"];
        let Some(name) = body["$ref"].as_str() else {
            continue;
        };
        let schema = page.pointer(name.trim_start_matches('#')).unwrap();
        let [Value::String(field)] = &schema["required"].as_array().unwrap()[..] else {
            continue;
        };
        let reply = server.post(path, &json!({"max_tokens": 1})).await;
        assert_eq!(reply.status, 400, "{path}");
        assert!(
            reply.body.contains(&format!("`{field}` ")),
            "{path}: {reply:?}"
        );
        n += 1;
    }
    assert!(n >= 3, "{n}");
}
