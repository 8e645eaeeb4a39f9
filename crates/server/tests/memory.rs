//! What a request holds of memory while it waits for its answer: counted by the
//! allocator, in a program of its own.

#[path = "http/client.rs"]
#[allow(dead_code, reason = "other tests need more of it")]
mod client;

use std::sync::atomic::Ordering;

use peak_alloc::PeakAlloc;
use serde_json::json;

use client::{Exchange, Server, Setup, request};

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
/// Requests that wait at the same time.
const N: usize = 6;

/// `n` objects in each other and beside each other, each of one empty name.
fn objects(n: usize) -> String {
    let nested = format!("{}0{}", r#"{"":"#.repeat(50), "}".repeat(50));
    vec![nested; n / 50].join(",")
}

/// A server whose only place is taken.
async fn busy() -> (Server, Exchange) {
    let server = Server::start(Setup {
        sequences: 1,
        context: 8 << 10,
        ..Setup::default()
    })
    .await;
    let endless = json!({"prompt": "Once", "max_tokens": 8000, "ignore_eos": true, "stream": true});
    let mut running = server
        .open(&request(COMPLETIONS, "", endless.to_string().as_bytes()))
        .await;
    running.until("\"text\"").await;
    (server, running)
}

#[tokio::test]
async fn a_request_that_waits_holds_at_most_three_times_its_body() {
    let (server, _running) = busy().await;
    let long = "x".repeat(4 << 20);
    let zz = objects(15_000);
    let ids = vec!["1"; 8000].join(",");
    let options = r#""max_tokens":5,"temperature":0"#;
    let objects =
        || format!(r#"{{{options},"messages":[{{"role":"user","content":"hi","zz":[{zz}]}}]}}"#);
    for (what, path, body) in [
        // The first that wait have the server make what it keeps for good, such as the compiled template.
        ("", CHAT, objects()),
        ("objects in a message", CHAT, objects()),
        (
            "objects in tools that are declined",
            CHAT,
            format!(
                r#"{{{options},"tool_choice":"none","tools":[{zz}],"messages":[{{"role":"user","content":"hi"}}]}}"#
            ),
        ),
        (
            "a long text in an unknown field",
            COMPLETIONS,
            format!(r#"{{{options},"prompt":"hi","zz":"{long}"}}"#),
        ),
        (
            "token ids and a long text",
            COMPLETIONS,
            format!(r#"{{{options},"prompt":[{ids}],"zz":"{long}"}}"#),
        ),
    ] {
        let bytes = request(path, "", body.as_bytes());
        let before = ALLOCATOR.current_usage();
        ALLOCATOR.reset_peak_usage();
        let mut waiting = Vec::new();
        for _ in 0..N {
            waiting.push(server.open(&bytes).await);
        }
        server
            .until("all wait", |c| c.waiting.load(Ordering::Acquire) == N)
            .await;
        let held = ALLOCATOR.current_usage().saturating_sub(before);
        let peak = ALLOCATOR.peak_usage().saturating_sub(before);
        eprintln!("{what}: {} bytes, {N} hold {held}, peak {peak}", body.len());
        let is_measured = !what.is_empty();
        assert!(
            !is_measured || held <= 3 * N * body.len(),
            "{what}: {held} held"
        );
        drop(waiting);
        server
            .until("none waits", |c| c.waiting.load(Ordering::Acquire) == 0)
            .await;
    }
}
