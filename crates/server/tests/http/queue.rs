//! Whose turn it is when requests wait, and how long a request may take.

use std::sync::Mutex;
use std::sync::atomic::Ordering;

use futures_util::future::join_all;
use serde_json::{Value, json};
use server::{Config, Keys};
use tokio::time::timeout;

use crate::client::{PATIENCE, Server, Setup, request};

const CHAT: &str = "/v1/chat/completions";

/// A request of a caller whose key is `key`.
fn of(key: &str, body: &Value) -> Vec<u8> {
    let headers = format!("authorization: Bearer {key}\r\n");
    request(CHAT, &headers, body.to_string().as_bytes())
}

fn ask(more: &Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": "Once upon a time"}], "temperature": 0, "max_tokens": 4,
    });
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    body
}

/// A server that runs one request at a time.
async fn narrow() -> Server {
    Server::start(Setup {
        sequences: 1,
        context: 8 << 10,
        config: Config {
            keys: Keys::new(["ann", "ben", "cat"]),
            ..Config::default()
        },
        ..Setup::default()
    })
    .await
}

/// The order in which requests, each a key and a priority, end that came one after the other
/// while another one ran for `first`.
async fn ended(first: &str, requests: &[(&str, i64)]) -> Vec<usize> {
    let server = narrow().await;
    // Nobody takes its place.
    let endless =
        ask(&json!({"max_tokens": 8000, "ignore_eos": true, "stream": true, "priority": -1000}));
    let mut running = server.open(&of(first, &endless)).await;
    running.until("\"content\":\" ").await;
    let mut waiting = Vec::new();
    for (i, (key, priority)) in requests.iter().enumerate() {
        let body = ask(&json!({"priority": priority}));
        waiting.push(server.open(&of(key, &body)).await);
        server
            .until("it waits", |c| c.waiting.load(Ordering::Acquire) == i + 1)
            .await;
    }
    drop(running);
    let order = Mutex::new(Vec::new());
    let ends = waiting.iter_mut().enumerate().map(|(i, exchange)| {
        let order = &order;
        async move {
            let reply = timeout(PATIENCE, exchange.reply())
                .await
                .expect("an answer");
            assert_eq!(reply.status, 200, "{reply:?}");
            order.lock().unwrap().push(i);
        }
    });
    join_all(ends).await;
    order.into_inner().unwrap()
}

#[tokio::test]
async fn the_smallest_priority_goes_first() {
    let requests = [("ann", 0), ("ann", 7), ("ann", -7), ("ann", 0)];
    assert_eq!(ended("ann", &requests).await, [2, 0, 3, 1]);
}

#[tokio::test]
async fn a_request_of_smaller_priority_takes_the_place_of_one_that_runs() {
    let server = narrow().await;
    let long = |priority: i64, stream: bool| {
        let more = json!({
            "max_tokens": 400, "ignore_eos": true, "priority": priority, "stream": stream,
            "stream_options": if stream { json!({"include_usage": true}) } else { Value::Null },
        });
        of("ann", &ask(&more))
    };
    let want = server.send(&long(0, false)).await.json();
    let mut low = server.open(&long(3, true)).await;
    low.until("\"content\":\" ").await;
    // The answer comes while the long one still has most to write.
    let reply = server.send(&of("ben", &ask(&json!({})))).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(server.engine.counters().finished.load(Ordering::Acquire), 2);
    let reply = low.reply().await;
    let events = reply.events();
    let text: String = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(text, want["choices"][0]["message"]["content"]);
    let last = events.last().unwrap();
    assert_eq!(
        last["usage"]["completion_tokens"],
        want["usage"]["completion_tokens"]
    );
    assert_eq!(
        last["usage"]["prompt_tokens"],
        want["usage"]["prompt_tokens"]
    );
    let times: Vec<&Value> = events
        .iter()
        .map(|event| &event["timings"]["preemptions"])
        .collect();
    assert!(times.contains(&&json!(1)), "{times:?}");
    assert_eq!(want["timings"]["preemptions"], Value::Null);
    let asked = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer ann\r\n\r\n";
    let page = server.send(asked).await.body;
    let line = page
        .lines()
        .find(|line| line.starts_with("vllm:num_preemptions_total{"));
    assert!(line.is_some_and(|line| line.ends_with(" 1")), "{line:?}");
}

#[tokio::test]
async fn callers_take_turns() {
    let requests = [
        ("ann", 0),
        ("ann", 0),
        ("ann", 0),
        ("ben", 0),
        ("cat", 0),
        ("ben", 0),
    ];
    let order = ended("cat", &requests).await;
    // The request that ran was a turn of the third caller.
    assert_eq!(order, [0, 3, 4, 1, 5, 2]);
}

#[tokio::test]
async fn a_request_may_take_as_long_as_it_says() {
    let server = narrow().await;
    let endless = |more: Value| {
        let mut body = ask(&json!({"max_tokens": 8000, "ignore_eos": true}));
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        of("ann", &body)
    };
    let reply = server.send(&endless(json!({"timeout": 0.2}))).await;
    assert_eq!(
        (reply.status, reply.header("x-should-retry")),
        (504, Some("false"))
    );
    let message = reply.error()["message"].as_str().unwrap().to_owned();
    assert!(message.contains("longer than 0.2 seconds"), "{message}");

    // A stream says so in an event; one that waits for its turn is stopped as well.
    let mut running = server.open(&endless(json!({"stream": true}))).await;
    running.until("\"content\":\" ").await;
    let reply = server
        .send(&endless(json!({"stream": true, "timeout": 0.2})))
        .await;
    assert_eq!(reply.status, 200);
    assert!(reply.body.contains("request_timeout"), "{reply:?}");
    server
        .until("none waits", |c| c.waiting.load(Ordering::Acquire) == 0)
        .await;
    assert_eq!(server.engine.counters().running.load(Ordering::Acquire), 1);

    for wrong in [
        json!({"timeout": 0}),
        json!({"timeout": "5"}),
        json!({"priority": 1.5}),
        json!({"priority": 1001}),
    ] {
        let reply = server.send(&of("ann", &ask(&wrong))).await;
        assert_eq!(reply.status, 400, "{wrong}");
    }
    let reply = server
        .send(&of(
            "ann",
            &ask(&json!({"timeout": null, "priority": null})),
        ))
        .await;
    assert_eq!(
        (reply.status, reply.header("x-ignored-fields")),
        (200, None)
    );
}

#[tokio::test]
async fn requests_that_share_too_little_memory_all_answer_as_if_alone() {
    const N: usize = 24;
    let body = |i: usize| {
        json!({
            "prompt": format!("Number {i}: ") + &"once upon a time ".repeat(i % 5),
            "max_tokens": 20 + 20 * (i % 7), "ignore_eos": true, "temperature": 0.7, "seed": i,
        })
    };
    let answer = |reply: &Value| reply["choices"][0]["text"].clone();
    let alone = Server::start(Setup {
        context: 256,
        ..Setup::default()
    });
    let alone = alone.await;
    let mut want = Vec::new();
    for i in 0..N {
        want.push(answer(
            &alone.post("/v1/completions", &body(i)).await.json(),
        ));
    }
    let crowd = Server::start(Setup {
        sequences: N,
        context: 256,
        is_tight: true,
        ..Setup::default()
    });
    let crowd = crowd.await;
    let bodies: Vec<Value> = (0..N).map(body).collect();
    let asked = bodies
        .iter()
        .map(|body| crowd.post("/v1/completions", body));
    let replies = timeout(PATIENCE, join_all(asked)).await.expect("answers");
    for (i, (reply, want)) in replies.iter().zip(&want).enumerate() {
        assert_eq!(reply.status, 200, "{reply:?}");
        assert_eq!(answer(&reply.json()), *want, "request {i}");
    }
    assert_eq!(crowd.engine.info().kv_tokens, 256);
    let counters = crowd.engine.counters();
    assert_eq!(counters.finished.load(Ordering::Acquire), N as u64);
}
