//! What a server says while a model is loaded, and when that fails.

use serde_json::{Value, json};
use server::{Config, Limits, Models, ModelsOptions, ServeError};
use tokio::time::Duration;

use super::{Known, refusal, serve, story, two, until_state};
use crate::client::{Peer, Reply, request};

/// A server of one model, which is loaded when it starts.
async fn single(known: &Known) -> Peer {
    let specs = vec![known.spec().preload(true)];
    let models = Models::new(specs, ModelsOptions::default());
    Peer::start(Config::default(), models).await
}

/// Waits until the server is ready.
async fn until_ready(peer: &Peer) {
    let start = tokio::time::Instant::now();
    while peer.get("/health/ready").await.status != 200 {
        assert!(start.elapsed() < crate::client::PATIENCE);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn a_server_listens_while_its_model_is_loaded_and_says_how_far_it_is() {
    let known = Known::new("qwen", "tiny-qwen3.5");
    known.open(false);
    let peer = single(&known).await;
    until_state(&peer, "qwen", "loading").await;
    let start = tokio::time::Instant::now();
    let health = loop {
        let health = peer.get("/health").await;
        if health.json()["stage"] == "weights" {
            break health;
        }
        assert!(start.elapsed() < crate::client::PATIENCE, "{health:?}");
    };
    let said = health.json();
    assert_eq!((health.status, &said["status"]), (503, &json!("loading")));
    assert_eq!(
        (&said["model"], &said["fraction"]),
        (&json!("qwen"), &json!(0.5))
    );
    let known_to_llama =
        json!({"code": 503, "message": "Loading model", "type": "unavailable_error"});
    assert_eq!(said["error"], known_to_llama);
    assert!(health.header("retry-after").is_some(), "{health:?}");
    assert_eq!(peer.get("/health/ready").await.status, 503);
    assert_eq!(peer.get("/health/live").await.status, 200);
    let listed = peer.get("/v1/models").await.json()["data"][0].clone();
    assert_eq!(listed["status"]["value"], "loading");
    assert_eq!(peer.get("/metrics").await.status, 200);
    assert_eq!(peer.get("/props").await.json()["error"], known_to_llama);

    let user = json!([{"role": "user", "content": "Hi"}]);
    let ask = async |path: &str, body: Value| -> Reply {
        let reply = peer.post(path, &body).await;
        assert_eq!(reply.status, 503, "{path}: {reply:?}");
        let wait: u64 = reply.header("retry-after").unwrap().parse().unwrap();
        assert!((1..=30).contains(&wait), "{path}: {reply:?}");
        reply
    };
    for path in ["/v1/chat/completions", "/v1/responses", "/v1/embeddings"] {
        let reply = ask(path, json!({"messages": user, "input": "Hi"})).await;
        let error = reply.error();
        assert_eq!(
            (&error["message"], &error["code"]),
            (&json!("Loading model"), &json!("model_loading"))
        );
    }
    let messages = ask("/v1/messages", json!({"messages": user, "max_tokens": 1})).await;
    assert_eq!(messages.json()["error"]["type"], "overloaded_error");
    assert_eq!(messages.json()["error"]["message"], "Loading model");
    let completion = ask("/completion", json!({"prompt": "Hi", "stream": true})).await;
    assert_eq!(completion.json()["error"], known_to_llama);
    let chat = ask("/api/chat", json!({"model": "x", "messages": user})).await;
    assert_eq!(chat.json(), json!({"error": "Loading model"}));

    known.open(true);
    until_ready(&peer).await;
    assert_eq!(peer.get("/health").await.json(), json!({"status": "ok"}));
    // With one model any name will do, and nothing has loaded it twice.
    assert_eq!(peer.chat(&story("other")).await.json()["model"], "qwen");
    assert_eq!(known.tries(), 1);
}

#[tokio::test]
async fn a_server_ends_if_its_only_model_cannot_be_loaded() {
    let known = Known::new("qwen", "tiny-qwen3.5");
    known.fail(true);
    let peer = single(&known).await;
    let ended = peer.ended().await;
    assert!(
        matches!(&ended, Err(ServeError::Load(error)) if error.to_string() == "on purpose"),
        "{ended:?}"
    );
}

#[tokio::test]
async fn a_model_that_is_not_loaded_is_an_error_and_is_tried_again() {
    let [qwen, gemma] = two();
    let peer = serve(
        &[qwen.clone(), gemma],
        ModelsOptions::default(),
        Config::default(),
    )
    .await;
    qwen.fail(true);
    qwen.open(false);
    let body = story("qwen");
    let open = async {
        until_state(&peer, "qwen", "loading").await;
        qwen.open(true);
    };
    let (first, second, ()) = tokio::join!(peer.chat(&body), peer.chat(&body), open);
    for reply in [first, second] {
        assert_eq!(refusal(&reply), (500, "model_load_failed".to_owned()));
        assert!(
            !reply.body.contains("on purpose"),
            "the log says why: {reply:?}"
        );
    }
    assert_eq!(qwen.tries(), 1, "both have waited for one try");
    let listed = peer.get("/v1/models/qwen").await.json();
    assert_eq!(
        listed["status"],
        json!({"value": "unloaded", "failed": true})
    );
    assert_eq!(peer.get("/health").await.status, 200);
    let messages = json!({"model": "qwen", "messages": body["messages"], "max_tokens": 1});
    let reply = peer.post("/v1/messages", &messages).await;
    assert_eq!(
        (reply.status, &reply.json()["error"]["type"]),
        (500, &json!("api_error"))
    );
    qwen.fail(false);
    assert!(!peer.chat(&body).await.text().is_empty());
    assert_eq!(qwen.tries(), 3);
}

/// A configuration in which a stream that is silent for a moment gets a sign of life.
fn restless() -> Config {
    Config {
        limits: Limits {
            keep_alive: Duration::from_millis(5),
            ..Limits::default()
        },
        ..Config::default()
    }
}

/// What is sent to ask for a stream.
fn streaming(path: &str, mut body: Value) -> Vec<u8> {
    body["stream"] = json!(true);
    request(path, "", body.to_string().as_bytes())
}

#[tokio::test]
async fn a_stream_has_signs_of_life_while_its_model_is_loaded() {
    let [qwen, gemma] = two();
    let models = [qwen.clone(), gemma];
    let expected = {
        let peer = serve(&models, ModelsOptions::default(), Config::default()).await;
        peer.chat(&story("qwen")).await.text()
    };
    let body = story("qwen");
    for (path, sign, end) in [
        (
            "/v1/chat/completions",
            ": loading weights 50 %\n\n",
            "[DONE]",
        ),
        ("/v1/messages", ": loading weights 50 %\n\n", "message_stop"),
        (
            "/api/chat",
            "\"content\":\"\"},\"done\":false}\n",
            "\"done\":true",
        ),
    ] {
        let peer = serve(&models, ModelsOptions::default(), restless()).await;
        qwen.open(false);
        let asked = match path {
            "/api/chat" => {
                json!({"model": "qwen", "messages": body["messages"], "options": {"num_predict": 4}})
            }
            _ => body.clone(),
        };
        let mut stream = peer.open(&streaming(path, asked)).await;
        stream.until(sign).await;
        qwen.open(true);
        stream.until(end).await;
        let reply = stream.reply().await;
        assert_eq!(reply.status, 200);
        if path == "/v1/chat/completions" {
            assert_eq!(reply.text(), expected);
        }
    }
}

#[tokio::test]
async fn a_stream_that_waited_in_vain_ends_with_an_error() {
    let [qwen, gemma] = two();
    let peer = serve(&[qwen.clone(), gemma], ModelsOptions::default(), restless()).await;
    qwen.fail(true);
    for (path, told) in [
        ("/v1/chat/completions", "\"code\":\"model_load_failed\""),
        (
            "/v1/responses",
            "event: error\ndata: {\"type\":\"error\",\"sequence_number\":0",
        ),
        (
            "/v1/messages",
            "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\"",
        ),
        ("/completion", "\"code\":500"),
        (
            "/api/chat",
            "{\"error\":\"the model `qwen` could not be loaded",
        ),
    ] {
        qwen.open(false);
        let mut body = story("qwen");
        body["input"] = json!("Hi");
        body["prompt"] = json!("Hi");
        let mut stream = peer.open(&streaming(path, body)).await;
        stream.until("HTTP/1.1 200").await;
        qwen.open(true);
        stream.until(told).await;
        stream.reply().await;
    }
    // Where nothing has been sent, the status tells.
    let peer = serve(&[qwen], ModelsOptions::default(), Config::default()).await;
    let reply = peer
        .send(&streaming("/v1/chat/completions", story("qwen")))
        .await;
    assert_eq!(refusal(&reply), (500, "model_load_failed".to_owned()));
}

#[tokio::test]
async fn a_request_waits_no_longer_than_it_may_and_ends_with_the_server() {
    let [qwen, gemma] = two();
    let mut config = Config::default();
    config.limits.drain_timeout = Duration::from_millis(1);
    let mut peer = serve(&[qwen.clone(), gemma], ModelsOptions::default(), config).await;
    qwen.open(false);
    let mut hasty = story("qwen");
    hasty["timeout"] = json!(0.05);
    let reply = peer.chat(&hasty).await;
    assert_eq!(refusal(&reply), (504, "request_timeout".to_owned()));
    let body = story("qwen").to_string();
    let mut waiting = peer
        .open(&request("/v1/chat/completions", "", body.as_bytes()))
        .await;
    until_state(&peer, "qwen", "loading").await;
    // The request has been read once its connection is busy.
    peer.get("/health").await;
    peer.stop();
    let reply = tokio::time::timeout(crate::client::PATIENCE, waiting.reply())
        .await
        .unwrap();
    assert_eq!(reply.status, 503, "{reply:?}");
    qwen.open(true);
    peer.ended().await.unwrap();
}
