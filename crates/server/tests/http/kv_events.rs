//! KV events, read by a subscriber.

use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use server::kv_events::{EventEncoding, KvEvents, Publisher};
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep, timeout};
use zeromq::{ReqSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

use crate::client::{PATIENCE, Server, Setup};

/// A port that nobody uses. It lies below those that systems give to connections, one of which could take it before the
/// test does.
async fn port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = std::process::id() % 5000;
    for _ in 0..100 {
        let port = 20_000 + first as u16 + NEXT.fetch_add(1, Ordering::Relaxed);
        if TcpListener::bind(("0.0.0.0", port)).await.is_ok() {
            return port;
        }
    }
    panic!("no port is free");
}

/// An endpoint that nobody uses.
async fn endpoint() -> String {
    format!("tcp://*:{}", port().await)
}

/// Where others find what waits at `endpoint`.
fn there(endpoint: &str) -> String {
    endpoint.replace('*', "127.0.0.1")
}

/// The topic, the number and the events of a message.
fn read(message: &ZmqMessage) -> (String, i64, Value) {
    let frame = |i: usize| message.get(i).unwrap().to_vec();
    let number = i64::from_be_bytes(frame(1).try_into().unwrap());
    let batch: Value = rmp_serde::from_slice(&frame(2)).unwrap();
    assert!(batch[0].as_f64().unwrap() > 1.7e9, "{batch}");
    assert_eq!((batch.as_array().unwrap().len(), &batch[2]), (3, &json!(0)));
    (
        String::from_utf8(frame(0)).unwrap(),
        number,
        batch[1].clone(),
    )
}

/// A subscriber that `server` publishes to, and the number of the last message that it has read.
async fn subscribe(endpoint: &str, server: &Server) -> (SubSocket, i64) {
    let mut socket = SubSocket::new();
    socket.connect(&there(endpoint)).await.unwrap();
    socket.subscribe("kv@").await.unwrap();
    // Until the publisher has seen the subscription, messages are lost.
    let mut first = 1000;
    let mut last = loop {
        assert!(first < 20_000, "the subscription is never seen");
        let prompt: Vec<u32> = (first..first + 66).collect();
        first += 66;
        let body = json!({"prompt": prompt, "max_tokens": 1});
        assert_eq!(server.post("/v1/completions", &body).await.status, 200);
        if let Ok(message) = timeout(Duration::from_millis(200), socket.recv()).await {
            break read(&message.unwrap()).1;
        }
    };
    // The rest of what these prompts brought comes before what a later one brings.
    while let Ok(message) = timeout(Duration::from_millis(200), socket.recv()).await {
        last = read(&message.unwrap()).1;
    }
    (socket, last)
}

/// A server that publishes at `endpoint`, with room for few texts.
async fn publishing(events: KvEvents) -> Server {
    // A child that another test has just started may still hold the port that was tried.
    let start = Instant::now();
    let publisher = loop {
        match Publisher::start(events.clone()).await {
            Ok(publisher) => break publisher,
            Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
        }
        sleep(Duration::from_millis(10)).await;
    };
    let setup = Setup {
        page_sink: Some(publisher.sink("kv@here@tiny-qwen3.5")),
        ..Setup::default()
    };
    Server::start(setup).await
}

#[tokio::test]
async fn a_subscriber_learns_the_blocks_of_a_prompt_and_when_they_go() {
    let (endpoint, replay) = (endpoint().await, endpoint().await);
    let server = publishing(KvEvents {
        endpoint: endpoint.clone(),
        replay: Some(replay.clone()),
        encoding: EventEncoding::Map,
    })
    .await;
    let (mut subscriber, mut last) = subscribe(&endpoint, &server).await;
    let mut next = async |last: &mut i64| -> (String, Value) {
        let message = timeout(PATIENCE, subscriber.recv()).await.unwrap().unwrap();
        let (topic, number, events) = read(&message);
        assert_eq!(number, *last + 1, "no message is lost");
        *last = number;
        (topic, events)
    };

    let prompt: Vec<u32> = (0..200).map(|i| 100 + i % 50).collect();
    let body = json!({"prompt": prompt, "max_tokens": 4});
    assert_eq!(server.post("/v1/completions", &body).await.status, 200);
    // Messages of the prompts before it may still come.
    let of_prompt = |events: &Value| {
        let mut all = events.as_array().unwrap().iter();
        let stored = all.find(|event| event["token_ids"][0] == prompt[0]);
        stored.cloned()
    };
    let (topic, events, stored) = loop {
        let (topic, events) = next(&mut last).await;
        if let Some(stored) = of_prompt(&events) {
            break (topic, events, stored);
        }
    };
    let of_prompt_at = last;
    assert_eq!(topic, "kv@here@tiny-qwen3.5");
    assert_eq!(stored["type"], "BlockStored");
    assert_eq!(stored["block_size"], 64);
    assert_eq!(stored["parent_block_hash"], Value::Null);
    assert_eq!(stored["block_hashes"].as_array().unwrap().len(), 3);
    assert_eq!(stored["token_ids"], json!(prompt[..192]));
    assert_eq!(stored["kv_cache_spec_kind"], "full_attention");
    // The recurrent state is kept where a prompt is likely to be gone on from.
    let of_state = |events: &Value| {
        let mut all = events.as_array().unwrap().iter();
        let stored = all.find(|event| event["group_idx"] == 1 && event["type"] == "BlockStored");
        stored.cloned()
    };
    let mut state = of_state(&events);
    while state.is_none() {
        state = of_state(&next(&mut last).await.1);
    }
    let state = state.unwrap();
    assert_eq!(
        (&state["type"], &state["kv_cache_spec_kind"]),
        (&json!("BlockStored"), &json!("mamba"))
    );
    let blocks = state["block_hashes"].as_array().unwrap();
    let hashes = stored["block_hashes"].as_array().unwrap();
    assert!(!blocks.is_empty() && blocks.iter().all(|hash| hashes.contains(hash)));
    assert_eq!(
        state["token_ids"].as_array().unwrap().len(),
        64 * blocks.len()
    );

    // Other prompts take the room of the first.
    let hashes = stored["block_hashes"].clone();
    let mut missing: Vec<Value> = hashes.as_array().unwrap().clone();
    for i in 0..64 {
        let prompt: Vec<u32> = (0..400).map(|j| 300 + (i * 7 + j) % 90).collect();
        let body = json!({"prompt": prompt, "max_tokens": 1});
        assert_eq!(server.post("/v1/completions", &body).await.status, 200);
    }
    // All blocks of the first prompt go.
    while !missing.is_empty() {
        for event in next(&mut last).await.1.as_array().unwrap() {
            if event["type"] == "BlockRemoved" && event["group_idx"] == 0 {
                let gone = event["block_hashes"].as_array().unwrap();
                missing.retain(|hash| !gone.contains(hash));
            }
        }
    }

    let mut asking = ReqSocket::new();
    asking.connect(&there(&replay)).await.unwrap();
    let first = ZmqMessage::from(of_prompt_at.to_be_bytes().to_vec());
    asking.send(first).await.unwrap();
    let answer = timeout(PATIENCE, asking.recv()).await.unwrap().unwrap();
    let (topic, number, events) = read(&answer);
    assert_eq!(
        (topic.as_str(), number),
        ("kv@here@tiny-qwen3.5", of_prompt_at)
    );
    assert_eq!(of_prompt(&events).unwrap()["block_hashes"], hashes);
}

/// A subscriber that waits at `endpoint`, which the one before it may still hold.
async fn waiting(endpoint: &str) -> SubSocket {
    let start = Instant::now();
    loop {
        let mut subscriber = SubSocket::new();
        match subscriber.bind(endpoint).await {
            Ok(_) => return subscriber,
            Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
        }
        sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_subscriber_that_waits_is_found_and_found_again() {
    let endpoint = format!("tcp://127.0.0.1:{}", port().await);
    let server = publishing(KvEvents {
        endpoint: endpoint.clone(),
        replay: None,
        encoding: EventEncoding::Array,
    })
    .await;
    // Nobody is there yet, which no request notices.
    let body =
        |first: u32| json!({"prompt": (first..first + 130).collect::<Vec<u32>>(), "max_tokens": 1});
    assert_eq!(server.post("/v1/completions", &body(10)).await.status, 200);
    for round in 1..3u32 {
        let mut subscriber = waiting(&endpoint).await;
        subscriber.subscribe("").await.unwrap();
        let mut first = 1000 * round;
        // The first message may tell of blocks that went only.
        let stored = loop {
            first += 7;
            assert!(first < 1000 * round + 700, "the subscriber is never found");
            assert_eq!(
                server.post("/v1/completions", &body(first)).await.status,
                200
            );
            let patience = Duration::from_millis(300);
            if let Ok(message) = timeout(patience, subscriber.recv()).await {
                let (_, number, events) = read(&message.unwrap());
                assert!(number > 0);
                let mut events = events.as_array().unwrap().iter();
                if let Some(stored) = events.find(|e| e[0] == "BlockStored") {
                    break stored.clone();
                }
            }
        };
        let stored = stored.as_array().unwrap();
        assert_eq!((stored.len(), &stored[4]), (7, &json!(64)));
        let _ = subscriber.close().await;
    }
}

#[tokio::test]
async fn an_endpoint_that_is_taken_or_malformed_is_an_error() {
    let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let taken = format!("tcp://*:{}", listener.local_addr().unwrap().port());
    for endpoint in [taken.as_str(), "udp:/nowhere"] {
        let events = KvEvents {
            endpoint: endpoint.to_owned(),
            replay: None,
            encoding: EventEncoding::Map,
        };
        let error = Publisher::start(events).await.unwrap_err().to_string();
        assert!(error.contains(endpoint), "{error}");
    }
}
