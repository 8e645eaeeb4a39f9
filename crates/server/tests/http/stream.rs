//! The shape of streams: chunks, usage, and their end.

use serde_json::{Value, json};
use tokio::time::timeout;

use crate::client::{PATIENCE, Server, Setup, request};
use crate::wire::{CHAT, COMPLETIONS, hello, with};

#[tokio::test]
async fn a_stream_opens_with_the_role_and_ends_with_done() {
    let server = Server::start(Setup::default()).await;
    let reply = server
        .chat(&with(&hello(12), json!({"stream": true})))
        .await;
    assert!(
        reply
            .header("content-type")
            .unwrap()
            .starts_with("text/event-stream")
    );
    assert_eq!(reply.header("cache-control"), Some("no-cache"));
    let events = reply.events();
    let (first, last) = (&events[0], events.last().unwrap());
    assert_eq!(
        first["choices"][0]["delta"],
        json!({"role": "assistant", "content": ""})
    );
    assert!(first["seed"].is_u64());
    for event in &events {
        assert_eq!(event["object"], "chat.completion.chunk");
        assert_eq!(event["id"], first["id"]);
        assert!(event.get("usage").is_none());
    }
    for event in &events[1..events.len() - 1] {
        assert!(
            !event["choices"][0]["delta"]["content"]
                .as_str()
                .unwrap()
                .is_empty()
        );
        assert_eq!(event["choices"][0]["finish_reason"], Value::Null);
        assert!(event["choices"][0]["delta"].get("role").is_none());
    }
    assert_eq!(last["choices"][0]["finish_reason"], "length");
    assert_eq!(last["choices"][0]["delta"], json!({}));
    assert_eq!(last["speculation"]["engaged"], true);
    assert_eq!(last["timings"]["predicted_n"], 12);
    assert_eq!(last["seed"], first["seed"]);
}

#[tokio::test]
async fn a_stream_with_usage_has_one_more_chunk_without_choices() {
    let server = Server::start(Setup::default()).await;
    let more = json!({"stream": true, "stream_options": {"include_usage": true}});
    let chat = server.chat(&with(&hello(6), more.clone())).await.events();
    let prompt = json!({"prompt": "Once upon", "max_tokens": 6, "temperature": 0});
    let plain = server
        .post(COMPLETIONS, &with(&prompt, more))
        .await
        .events();
    for events in [chat, plain] {
        let (last, before) = events.split_last().unwrap();
        assert_eq!(last["choices"], json!([]));
        assert_eq!(last["usage"]["completion_tokens"], 6);
        assert_eq!(last["speculation"]["engaged"], true);
        assert_eq!(last["timings"]["predicted_n"], 6);
        assert_eq!(
            before.last().unwrap()["choices"][0]["finish_reason"],
            "length"
        );
        for event in before {
            assert_eq!(event["usage"], Value::Null);
            assert!(event.get("usage").is_some() && event.get("speculation").is_none());
        }
    }
}

#[tokio::test]
async fn chunks_say_the_usage_so_far_if_asked() {
    /// So many that a client cannot be too slow to see the first ones alone.
    const N: u64 = 200;
    let server = Server::start(Setup::default()).await;
    let prompt = json!({"prompt": "Once upon", "max_tokens": N, "temperature": 0});
    for (path, body) in [(CHAT, &hello(N as usize)), (COMPLETIONS, &prompt)] {
        let whole = server
            .post(path, &with(body, json!({"ignore_eos": true})))
            .await
            .json()["usage"]
            .clone();
        for at_end in [true, false] {
            let options = json!({"include_usage": at_end, "continuous_usage_stats": true});
            let more =
                json!({"stream": true, "stream_options": options, "seed": 1, "ignore_eos": true});
            let events = server.post(path, &with(body, more)).await.events();
            let mut n = 0;
            for event in &events {
                let usage = &event["usage"];
                let of = |name: &str| usage[name].as_u64().unwrap();
                assert_eq!(usage["prompt_tokens"], whole["prompt_tokens"]);
                assert!((n..=N).contains(&of("completion_tokens")), "{event}");
                n = of("completion_tokens");
                assert_eq!(of("total_tokens"), of("prompt_tokens") + n);
            }
            let texts = events.len() - usize::from(at_end) - 1;
            let first = &events[usize::from(path == CHAT)]["usage"]["completion_tokens"];
            assert!((1..N).contains(&first.as_u64().unwrap()), "{events:?}");
            assert_eq!(events[texts]["choices"][0]["finish_reason"], "length");
            assert_eq!(events[texts]["usage"]["completion_tokens"], N);
            let last = events.last().unwrap();
            assert_eq!(last["choices"] == json!([]), at_end);
            assert_eq!(last["timings"]["predicted_n"], N);
        }
    }
}

#[tokio::test]
async fn chunks_repeat_what_identifies_the_answer_and_have_every_field() {
    let server = Server::start(Setup::default()).await;
    let more = json!({"stream": true});
    let fingerprint = server.chat(&hello(1)).await.json()["system_fingerprint"].clone();
    let prompt = json!({"prompt": "Once upon", "max_tokens": 4, "temperature": 0});
    for (path, body, text) in [(CHAT, hello(4), "delta"), (COMPLETIONS, prompt, "text")] {
        let events = server.post(path, &with(&body, more.clone())).await.events();
        for event in &events {
            for name in ["id", "object", "created", "model"] {
                assert_eq!(event[name], events[0][name], "{name}");
            }
            assert_eq!(event["system_fingerprint"], fingerprint);
            let choice = event["choices"][0].as_object().unwrap();
            let names: Vec<&str> = choice.keys().map(String::as_str).collect();
            assert_eq!(names, ["index", text, "logprobs", "finish_reason"]);
            assert_eq!(choice["logprobs"], Value::Null);
        }
    }
    let again = Server::start(Setup::default()).await;
    assert_eq!(
        again.chat(&hello(1)).await.json()["system_fingerprint"],
        fingerprint
    );
}

#[tokio::test]
async fn the_body_ends_with_the_last_frame_and_the_connection_lives_on() {
    let server = Server::start(Setup::default()).await;
    let body = with(&hello(4), json!({"stream": true})).to_string();
    let mut exchange = server.open(&request(CHAT, "", body.as_bytes())).await;
    exchange.until("[DONE]\n\n").await;
    let reply = timeout(PATIENCE, exchange.reply())
        .await
        .expect("the body ends");
    reply.events();
    // The same connection again.
    use tokio::io::AsyncWriteExt;
    exchange
        .stream
        .write_all(&request(CHAT, "", body.as_bytes()))
        .await
        .unwrap();
    assert_eq!(
        timeout(PATIENCE, exchange.reply()).await.unwrap().text(),
        reply.text()
    );
}
