//! Clients that go away, dawdle or are too many, and the end of the server.

use std::io::ErrorKind;
use std::sync::atomic::Ordering;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Duration, Instant, sleep, timeout};

use crate::client::{Exchange, PATIENCE, Server, Setup, data, request};

const CHAT: &str = "/v1/chat/completions";

fn endless(stream: bool) -> Vec<u8> {
    let body = json!({
        "messages": [{"role": "user", "content": "Once upon a time"}],
        "temperature": 0, "ignore_eos": true, "stream": stream,
    });
    request(CHAT, "", body.to_string().as_bytes())
}

fn short() -> Value {
    json!({"messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 60, "temperature": 0})
}

const HEALTH: &[u8] = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n";

/// A context that nothing here fills before it is cancelled.
fn long() -> Setup {
    Setup {
        context: 8 << 10,
        ..Setup::default()
    }
}

#[tokio::test]
async fn a_client_that_goes_away_cancels_its_request_and_no_other() {
    let server = Server::start(Setup {
        sequences: 3,
        ..long()
    })
    .await;
    let undisturbed = server.chat(&short()).await.text();
    for is_stream in [true, false] {
        let counters = server.engine.counters();
        let before = counters.cancelled.load(Ordering::Relaxed);
        let finished = counters.finished.load(Ordering::Relaxed);
        let mut leaving = server.open(&endless(is_stream)).await;
        let mut staying = server.open(&endless(true)).await;
        if is_stream {
            leaving.until("\"content\":\" ").await;
        }
        server
            .until("both run", |c| c.running.load(Ordering::Acquire) == 2)
            .await;
        let request = short();
        let survivor = server.chat(&request);
        let leave = async {
            server
                .until("all three have run", |c| {
                    let has_ended = c.finished.load(Ordering::Relaxed) > finished;
                    has_ended || c.running.load(Ordering::Acquire) == 3
                })
                .await;
            drop(leaving);
            // Only one that has not filled its context can be cancelled.
            server
                .until("one is cancelled", |c| {
                    c.cancelled.load(Ordering::Relaxed) == before + 1
                })
                .await;
        };
        let (survivor, ()) = tokio::join!(survivor, leave);
        assert_eq!(survivor.text(), undisturbed);
        // The other stream goes on.
        staying.buffer.clear();
        staying.until("\"content\":\"").await;
        drop(staying);
        server
            .until("the other is cancelled", |c| {
                c.cancelled.load(Ordering::Relaxed) == before + 2
            })
            .await;
    }
    server.until_idle().await;
    server.chat(&short()).await;
    server.until_idle().await;
    let metrics = server.get("/metrics").await.body;
    assert!(
        metrics.contains("cancel_latency_seconds_count{model_name=\"tiny-qwen3.5\"} 4"),
        "{metrics}"
    );
}

#[tokio::test]
async fn a_queued_request_whose_client_leaves_never_runs() {
    let server = Server::start(Setup {
        sequences: 1,
        ..long()
    })
    .await;
    let mut running = server.open(&endless(true)).await;
    running.until("\"content\":\" ").await;
    for is_stream in [true, false] {
        let before = server.engine.counters().cancelled.load(Ordering::Relaxed);
        let queued = server.open(&endless(is_stream)).await;
        server
            .until("one waits", |c| c.waiting.load(Ordering::Acquire) == 1)
            .await;
        drop(queued);
        server
            .until("it is cancelled", |c| {
                c.cancelled.load(Ordering::Relaxed) == before + 1
            })
            .await;
        assert_eq!(server.engine.counters().waiting.load(Ordering::Acquire), 0);
        assert_eq!(server.engine.counters().running.load(Ordering::Acquire), 1);
    }
    running.buffer.clear();
    running.until("\"content\":\"").await;
    // Only requests that ran have prompt tokens.
    assert_eq!(
        server
            .engine
            .counters()
            .prompt_tokens
            .load(Ordering::Relaxed),
        0
    );
}

#[tokio::test]
async fn a_full_queue_refuses_at_once_and_says_when_to_come_back() {
    let server = Server::start(Setup {
        sequences: 1,
        queue: 2,
        ..long()
    })
    .await;
    let mut running = server.open(&endless(true)).await;
    running.until("\"content\":\" ").await;
    let mut queued = Vec::new();
    for n in 1..=2 {
        queued.push(server.open(&endless(true)).await);
        server
            .until("one more waits", |c| c.waiting.load(Ordering::Acquire) == n)
            .await;
    }
    for stream in [false, true] {
        let mut body = short();
        body["stream"] = json!(stream);
        let reply = server.chat(&body).await;
        assert_eq!(
            (reply.status, &reply.error()["code"]),
            (429, &json!("queue_full"))
        );
        assert_eq!(reply.header("retry-after"), Some("1"));
        let wait: u64 = reply.header("retry-after-ms").unwrap().parse().unwrap();
        assert!((500..=1000).contains(&wait), "{wait}");
        assert_eq!(reply.header("x-should-retry"), Some("true"));
    }
}

#[tokio::test]
async fn who_was_refused_comes_before_who_was_just_served() {
    let mut setup = Setup {
        sequences: 1,
        queue: 3,
        ..long()
    };
    setup.config.limits.turn_grace = PATIENCE * 10;
    let server = Server::start(setup).await;
    let wait = |n: usize| {
        server.until("so many wait", move |c| {
            c.waiting.load(Ordering::Acquire) == n
        })
    };
    let quick = request(CHAT, "", short().to_string().as_bytes());
    let mut running = server.open(&endless(true)).await;
    running.until("\"content\":\" ").await;
    let mut served = server.open(&quick).await;
    wait(1).await;
    let _others = [
        server.open(&endless(true)).await,
        server.open(&endless(true)).await,
    ];
    wait(3).await;
    let mut refused = Vec::new();
    for _ in 0..2 {
        let mut client = server.open(&endless(true)).await;
        assert_eq!(client.reply().await.status, 429);
        refused.push(client);
    }
    // One is served; one waits still, so two places are free.
    drop(running);
    assert_eq!(served.reply().await.status, 200);
    wait(1).await;
    served.stream.write_all(&quick).await.unwrap();
    let reply = served.reply().await;
    assert_eq!(
        (reply.status, &reply.error()["code"]),
        (429, &json!("queue_full"))
    );
    for client in &mut refused {
        client.stream.write_all(&endless(true)).await.unwrap();
        client.until("\"role\"").await;
    }
    wait(3).await;
}

#[tokio::test]
async fn dribbling_clients_do_not_hold_up_others() {
    let mut setup = Setup::default();
    // None of them is dropped.
    setup.config.limits.header_timeout = PATIENCE * 10;
    let server = Server::start(setup).await;
    let mut slow = dribblers(&server).await;
    for _ in 0..5 {
        assert_eq!(server.get("/health").await.status, 200);
        for stream in &mut slow {
            stream.write_all(b"x").await.unwrap();
        }
    }
}

#[tokio::test]
async fn dribbling_clients_are_dropped() {
    let mut setup = Setup::default();
    setup.config.limits.header_timeout = Duration::from_millis(400);
    let server = Server::start(setup).await;
    let start = Instant::now();
    let mut slow = dribblers(&server).await;
    while !slow.is_empty() {
        assert!(start.elapsed() < PATIENCE, "{} are not dropped", slow.len());
        sleep(Duration::from_millis(50)).await;
        // One byte now and then does not help.
        for stream in &mut slow {
            let _ = stream.write_all(b"x").await;
        }
        // Closed or reset: either way it is over.
        slow.retain(|stream| match stream.try_read(&mut [0; 64]) {
            Ok(n) => n > 0,
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        });
    }
}

/// Clients of which half have begun a request that they do not end.
async fn dribblers(server: &Server) -> Vec<TcpStream> {
    let mut slow = Vec::new();
    for i in 0..200 {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        if i % 2 == 0 {
            let begun = b"GET /health HTTP/1.1\r\nhost: loc";
            stream.write_all(begun).await.unwrap();
        }
        slow.push(stream);
    }
    slow
}

#[tokio::test]
async fn a_connection_may_rest_between_two_requests() {
    let mut setup = Setup::default();
    setup.config.limits.header_timeout = Duration::from_millis(400);
    setup.config.limits.idle_timeout = PATIENCE * 10;
    let server = Server::start(setup).await;
    let mut exchange = server.open(HEALTH).await;
    assert_eq!(exchange.reply().await.status, 200);
    // Longer than a request may take to come.
    sleep(Duration::from_millis(500)).await;
    exchange.stream.write_all(HEALTH).await.unwrap();
    assert_eq!(exchange.reply().await.status, 200);
}

#[tokio::test]
async fn a_connection_that_rests_too_long_is_closed() {
    const IDLE: Duration = Duration::from_secs(1);
    let mut setup = Setup::default();
    setup.config.limits.header_timeout = PATIENCE * 10;
    setup.config.limits.idle_timeout = IDLE;
    let server = Server::start(setup).await;
    let start = Instant::now();
    let mut exchange = server.open(HEALTH).await;
    assert_eq!(exchange.reply().await.status, 200);
    let n = timeout(PATIENCE, exchange.stream.read(&mut [0; 1]))
        .await
        .unwrap();
    assert_eq!(n.unwrap_or(0), 0);
    assert!(start.elapsed() >= IDLE, "{:?}", start.elapsed());
}

#[tokio::test]
async fn idle_connections_make_room_and_busy_ones_stay() {
    const CONNECTIONS: usize = 8;
    let mut setup = long();
    // Nothing here may end by itself.
    setup.config.limits.connections = CONNECTIONS;
    setup.config.limits.idle_timeout = PATIENCE * 10;
    setup.config.limits.header_timeout = PATIENCE * 10;
    let server = Server::start(setup).await;
    let mut busy = server.open(&endless(true)).await;
    busy.until("\"content\":\"").await;
    // Three that have asked, four that have not.
    let mut asked = Vec::new();
    for _ in 0..3 {
        let mut exchange = server.open(HEALTH).await;
        assert_eq!(exchange.reply().await.status, 200);
        asked.push(exchange);
    }
    let mut silent = Vec::new();
    for _ in 3..CONNECTIONS - 1 {
        silent.push(TcpStream::connect(server.address).await.unwrap());
    }
    // The oldest but for the busy one asks again: it is the newest now.
    asked[0].stream.write_all(HEALTH).await.unwrap();
    assert_eq!(asked[0].reply().await.status, 200);
    let is_closed = async |stream: &mut TcpStream| {
        let end = timeout(PATIENCE, stream.read(&mut [0; 1])).await.unwrap();
        assert_eq!(end.unwrap_or(0), 0);
    };
    let mut new = Vec::new();
    for oldest in asked.iter_mut().skip(1) {
        new.push(server.open(HEALTH).await);
        let reply = timeout(PATIENCE, new.last_mut().unwrap().reply()).await;
        assert_eq!(reply.unwrap().status, 200);
        is_closed(&mut oldest.stream).await;
    }
    // As many as there were, and more: each is answered, and none takes the busy one's place.
    for _ in 0..3 * CONNECTIONS {
        new.push(server.open(HEALTH).await);
        let reply = timeout(PATIENCE, new.last_mut().unwrap().reply()).await;
        assert_eq!(reply.unwrap().status, 200);
    }
    for stream in &mut silent {
        is_closed(stream).await;
    }
    busy.buffer.clear();
    busy.until("\"content\":\"").await;
    // Where all are busy a new one waits for its turn, and gets it.
    drop((asked, new));
    let mut all = vec![busy];
    for _ in 1..CONNECTIONS {
        let mut exchange = server.open(&endless(true)).await;
        exchange.until("\"role\"").await;
        all.push(exchange);
    }
    let mut waits = server.open(HEALTH).await;
    let waited = timeout(Duration::from_millis(50), waits.reply()).await;
    assert!(waited.is_err(), "there is no room");
    drop(all.pop());
    let reply = timeout(PATIENCE, waits.reply()).await.unwrap();
    assert_eq!(reply.status, 200);
}

#[tokio::test]
async fn a_body_that_dribbles_is_cut_off() {
    let mut setup = Setup::default();
    setup.config.limits.body_timeout = Duration::from_millis(200);
    let server = Server::start(setup).await;
    let whole = request(CHAT, "", short().to_string().as_bytes());
    let reply = server.send(&whole[..whole.len() - 5]).await;
    assert_eq!(reply.status, 408);
    assert_eq!(reply.header("x-should-retry"), Some("false"));
}

#[tokio::test]
async fn a_request_that_runs_too_long_is_ended_with_words() {
    let mut setup = long();
    setup.config.limits.request_timeout = Duration::from_millis(300);
    let server = Server::start(setup).await;
    let reply = server.send(&endless(false)).await;
    assert_eq!(
        (reply.status, &reply.error()["code"]),
        (504, &json!("request_timeout"))
    );
    let reply = server.send(&endless(true)).await;
    let last: Value = serde_json::from_str(data(&reply.body).last().unwrap()).unwrap();
    assert_eq!(
        (reply.status, &last["error"]["code"]),
        (200, &json!("request_timeout"))
    );
    server.until_idle().await;
}

/// Streams that run at the same time, all past their first text.
async fn streams(server: &Server, request: &[u8], n: usize) -> Vec<Exchange> {
    let mut all = Vec::new();
    for _ in 0..n {
        all.push(server.open(request).await);
    }
    for exchange in &mut all {
        exchange.until("\"content\":\"").await;
    }
    all
}

#[tokio::test]
async fn a_shutdown_lets_running_streams_finish() {
    let mut server = Server::start(Setup {
        sequences: 4,
        ..long()
    })
    .await;
    let expected = server.chat(&short()).await.text();
    let mut body = short();
    body["stream"] = json!(true);
    // More streams than sequences: the queue is drained too.
    let request = request(CHAT, "", body.to_string().as_bytes());
    let running = streams(&server, &request, 8).await;
    let mut holding = server.open(&endless(true)).await;
    holding.until("\"role\"").await;
    let idle = TcpStream::connect(server.address).await.unwrap();
    server.stop();
    server_says_draining(&server).await;
    let refused = server.chat(&short()).await;
    assert_eq!(
        (refused.status, &refused.error()["code"]),
        (503, &json!("shutting_down"))
    );
    assert_eq!(refused.header("x-should-retry"), Some("true"));
    for mut exchange in running {
        let reply = timeout(PATIENCE, exchange.reply()).await.unwrap();
        assert_eq!(reply.text(), expected);
    }
    drop((holding, idle));
    let address = server.address;
    server.ended().await;
    // The server of another test may have got the port since, for a while.
    let start = Instant::now();
    while TcpStream::connect(address).await.is_ok() {
        assert!(start.elapsed() < PATIENCE, "the port is still open");
        sleep(Duration::from_millis(10)).await;
    }
}

async fn server_says_draining(server: &Server) {
    let start = Instant::now();
    loop {
        let health = server.get("/health").await;
        if health.status == 503 {
            assert_eq!(health.body, r#"{"status":"draining"}"#);
            assert_eq!(server.get("/health/ready").await.status, 503);
            assert_eq!(server.get("/health/live").await.status, 200);
            return;
        }
        assert!(start.elapsed() < PATIENCE);
    }
}

#[tokio::test]
async fn a_shutdown_ends_what_does_not_finish_with_a_last_event() {
    let mut setup = Setup {
        sequences: 4,
        ..long()
    };
    setup.config.limits.drain_timeout = Duration::from_millis(300);
    // Time to say so on a busy machine, too.
    setup.config.limits.cancel_grace = PATIENCE;
    let mut server = Server::start(setup).await;
    let running = streams(&server, &endless(true), 4).await;
    let mut queued = server.open(&endless(true)).await;
    queued.until("\"role\"").await;
    let mut whole = server.open(&endless(false)).await;
    server
        .until("two wait", |c| c.waiting.load(Ordering::Acquire) == 2)
        .await;
    let engine = server.engine.clone();
    let start = Instant::now();
    server.stop();
    let ended = server.ended();
    let read = async {
        for mut exchange in running.into_iter().chain([queued]) {
            let reply = timeout(PATIENCE, exchange.reply()).await.unwrap();
            let last: Value = serde_json::from_str(data(&reply.body).last().unwrap()).unwrap();
            assert_eq!(last["error"]["code"], "shutting_down", "{}", reply.body);
        }
        assert_eq!(timeout(PATIENCE, whole.reply()).await.unwrap().status, 503);
    };
    // A stream that ended by itself has no such event.
    tokio::join!(ended, read);
    let counters = engine.counters();
    while counters.running.load(Ordering::Acquire) + counters.waiting.load(Ordering::Acquire) > 0 {
        assert!(start.elapsed() < PATIENCE);
        sleep(Duration::from_millis(2)).await;
    }
}
