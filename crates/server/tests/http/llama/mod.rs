//! llama-server's own API, as its clients use it.

mod completion;
mod forms;
mod infill;
mod media;
mod prefill;
mod probabilities;
mod props;
mod tokens;

use serde_json::{Value, json};

use crate::client::{Reply, Server, data};

/// A prompt that the bundled models go on with.
const STORY: &str = "Once upon a time there was a little rabbit";

/// `body` with the fields of `more`.
fn with(mut body: Value, more: &Value) -> Value {
    let fields = more.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(fields);
    body
}

/// A request for a greedy continuation of [`STORY`], with the fields of `more`.
fn story(more: &Value) -> Value {
    let body = json!({"prompt": STORY, "n_predict": 12, "temperature": 0, "seed": 7});
    with(body, more)
}

/// The whole answer to a request that must be answered.
async fn ask(server: &Server, path: &str, body: &Value) -> Value {
    let reply = server.post(path, body).await;
    assert_eq!(reply.status, 200, "{body}: {reply:?}");
    reply.json()
}

/// The answer to [`story`], whole.
async fn tell(server: &Server, more: &Value) -> Value {
    ask(server, "/completion", &story(more)).await
}

/// The chunks of a stream, the last of which says that it is the last.
async fn stream(server: &Server, path: &str, body: &Value) -> Vec<Value> {
    let body = with(body.clone(), &json!({"stream": true}));
    let reply = server.post(path, &body).await;
    assert_eq!(reply.status, 200, "{body}: {reply:?}");
    let chunks = data(&reply.body);
    let chunks: Vec<Value> = chunks
        .iter()
        .map(|chunk| serde_json::from_str(chunk).unwrap())
        .collect();
    let (last, before) = chunks.split_last().unwrap();
    assert_eq!(last["stop"], true, "{last}");
    assert!(before.iter().all(|chunk| chunk["stop"] == false));
    chunks
}

/// The texts of chunks end to end.
fn content(chunks: &[Value]) -> String {
    chunks
        .iter()
        .map(|chunk| chunk["content"].as_str().unwrap())
        .collect()
}

/// The error of a reply with this status, after checking llama-server's shape.
fn error(reply: &Reply, status: u16) -> Value {
    assert_eq!(reply.status, status, "{reply:?}");
    let error = reply.json()["error"].clone();
    assert_eq!(error["code"], status, "{reply:?}");
    assert!(
        error["type"].is_string() && error["message"].is_string(),
        "{reply:?}"
    );
    error
}
