//! The trace of an answer: which tokens came from where, round by round.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::client::{Server, Setup};
use crate::wire::{COMPLETIONS, with};

/// Requests whose traces differ in kind: a plain text, a sampled one with reasoning, one that a
/// stop string ends, one that a schema forces, and one of plain completions.
fn requests() -> Vec<(&'static str, Value)> {
    let chat = "/v1/chat/completions";
    let messages = json!([{"role": "user", "content": "Tell me a story about a fox."}]);
    let base = json!({"messages": messages, "max_tokens": 60, "temperature": 0, "seed": 3});
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["favorite_color", "age"],
        "properties": {"favorite_color": {"enum": ["red", "green"]}, "age": {"enum": [1, 2, 3]}},
    });
    vec![
        (chat, base.clone()),
        (
            chat,
            with(
                &base,
                json!({"temperature": 0.8, "enable_thinking": true, "thinking_budget": 20}),
            ),
        ),
        (chat, with(&base, json!({"stop": ["was"]}))),
        (chat, with(&base, json!({"json_schema": schema}))),
        (
            COMPLETIONS,
            json!({"prompt": "Once upon", "max_tokens": 60, "temperature": 0, "seed": 3}),
        ),
    ]
}

/// The rounds of an answer, whole or streamed, and its record of speculation.
fn traced(documents: &[Value]) -> (Vec<Value>, Value) {
    let traces = documents
        .iter()
        .filter_map(|d| d["choices"][0].get("trace"));
    let rounds = traces.flat_map(|trace| trace.as_array().unwrap().clone());
    let record = documents.last().unwrap()["speculation"].clone();
    (rounds.collect(), record)
}

/// Asserts that `rounds` add up to the counts of `record`, and returns the text of the answer that
/// they have.
fn add_up(rounds: &[Value], record: &Value, what: &str) -> String {
    let of = |round: &Value, name: &str| round[name].as_u64().unwrap();
    let sum = |name: &str| rounds.iter().map(|round| of(round, name)).sum::<u64>();
    assert_eq!(sum("drafted"), of(record, "drafted"), "{what}");
    assert_eq!(sum("accepted"), of(record, "accepted"), "{what}");
    let numbers: Vec<u64> = rounds.iter().map(|round| of(round, "round")).collect();
    let all: Vec<u64> = (0..=of(record, "rounds")).collect();
    assert_eq!(numbers, all, "{what}");
    for (i, position) in record["by_position"].as_array().unwrap().iter().enumerate() {
        let reaching = |name: &str| {
            let reaching = rounds.iter().filter(|round| of(round, name) > i as u64);
            reaching.count() as u64
        };
        assert_eq!(reaching("drafted"), of(position, "drafted"), "{what}");
        assert_eq!(reaching("accepted"), of(position, "accepted"), "{what}");
    }
    let mut text = String::new();
    let mut guessed = BTreeMap::<&str, u64>::new();
    for round in rounds {
        for (i, token) in round["tokens"].as_array().unwrap().iter().enumerate() {
            let is_forced = token["forced"] == true;
            let position = of(token, "position");
            if position == 0 {
                assert_eq!(i as u64, of(round, "accepted"), "{what}: {round}");
                assert!(!is_forced, "{what}: {round}");
            } else {
                assert_eq!(position, i as u64 + 1, "{what}: {round}");
            }
            let is_guess = position > 0 && !is_forced;
            assert_eq!(token["drafter"].is_string(), is_guess, "{what}: {round}");
            if let Some(name) = token["drafter"].as_str() {
                *guessed.entry(name).or_default() += 1;
            }
            if token.get("channel").is_none() {
                text += token["text"].as_str().unwrap();
            }
        }
    }
    // The last round may have accepted tokens behind the end of the text.
    let unlisted = rounds.last().map_or(0, |round| {
        let listed = round["tokens"].as_array().unwrap();
        of(round, "accepted").saturating_sub(listed.len() as u64)
    });
    for counts in record["by_drafter"].as_array().into_iter().flatten() {
        let listed = guessed.remove(counts["drafter"].as_str().unwrap());
        let (listed, accepted) = (listed.unwrap_or(0), of(counts, "accepted"));
        let can_be = accepted.saturating_sub(unlisted)..=accepted;
        assert!(can_be.contains(&listed), "{what}: {listed} of {counts}");
    }
    assert!(guessed.is_empty(), "{what}: {guessed:?} without counts");
    text
}

#[tokio::test]
async fn a_trace_adds_up_to_the_record_and_leaves_the_text_as_it_is() {
    // A fixed length: drafts do not depend on what rounds take on the machine.
    let on = json!({"speculation": {"trace": true, "draft_fixed": 3}});
    for model in ["tiny-gemma4", "tiny-qwen3.5"] {
        let server = Server::start(Setup {
            model,
            context: 1024,
            ..Setup::default()
        })
        .await;
        let (mut n_guessed, mut n_forced) = (0, 0);
        for (path, body) in requests() {
            let what = format!("{model}: {body}");
            let plain = server.post(path, &body).await.json();
            let mut whole = server.post(path, &with(&body, on.clone())).await.json();
            let (rounds, record) = traced(std::slice::from_ref(&whole));
            let text = add_up(&rounds, &record, &what);
            let tokens = rounds.iter().map(|r| r["tokens"].as_array().unwrap().len());
            assert_eq!(whole["usage"]["completion_tokens"], tokens.sum::<usize>());
            let choice = whole["choices"][0].as_object_mut().unwrap();
            choice.remove("trace").unwrap();
            assert_eq!(whole["choices"], plain["choices"], "{what}");
            let answer = server.post(path, &body).await.text();
            match body["stop"].is_null() {
                true => assert_eq!(text.trim(), answer.trim(), "{what}"),
                false => assert!(text.starts_with(&answer) && text.ends_with("was"), "{what}"),
            }

            let streaming = with(&with(&body, on.clone()), json!({"stream": true}));
            let streamed = server.post(path, &streaming).await;
            assert_eq!(streamed.text(), answer, "{what}");
            let (rounds, record) = traced(&streamed.events());
            assert_eq!(add_up(&rounds, &record, &what), text, "{what}");
            let sum = |name: &str| rounds.iter().filter_map(|r| r[name].as_u64()).sum::<u64>();
            n_guessed += sum("accepted");
            n_forced += sum("forced");
            let forced = record["forced"].as_u64().unwrap_or(0);
            assert_eq!(sum("forced"), forced, "{what}");

            let off = json!({"speculation": {"draft_max": 0, "trace": true}});
            let off = server.post(path, &with(&body, off)).await.json();
            let (rounds, record) = traced(std::slice::from_ref(&off));
            assert_eq!(add_up(&rounds, &record, &what), text, "{what}");
            assert_eq!(record["drafted"], 0, "{what}");
        }
        assert!(n_guessed > 20 && n_forced > 5, "{n_guessed} {n_forced}");
    }
}

#[tokio::test]
async fn each_of_several_answers_has_its_trace_and_none_has_one_unasked() {
    let server = Server::start(Setup::default()).await;
    let body = json!({
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": 20, "temperature": 0.8, "seed": 3, "n": 2,
    });
    for stream in [false, true] {
        let stream = json!({"stream": stream});
        let asked = with(&body, json!({"speculation": {"trace": true}}));
        let documents = |reply: crate::client::Reply| match stream["stream"] == true {
            true => reply.events(),
            false => vec![reply.json()],
        };
        let reply = documents(server.chat(&with(&asked, stream.clone())).await);
        for index in 0..2 {
            let choices = reply.iter().flat_map(|d| d["choices"].as_array().unwrap());
            let own: Vec<&Value> = choices.filter(|c| c["index"] == index).collect();
            let rounds = own
                .iter()
                .filter_map(|c| c.get("trace")?.as_array())
                .flatten();
            let rounds: Vec<Value> = rounds.cloned().collect();
            add_up(&rounds, &own.last().unwrap()["speculation"], "several");
        }
        for more in [json!({}), json!({"speculation": {"trace": false}})] {
            let silent = server.chat(&with(&with(&body, stream.clone()), more)).await;
            assert!(!silent.body.contains("\"trace\""), "{}", silent.body);
        }
    }
}

#[tokio::test]
async fn paths_without_a_place_for_a_trace_refuse_it() {
    let server = Server::start(Setup::default()).await;
    let on = json!({"speculation": {"trace": true}});
    let messages = json!([{"role": "user", "content": "hi"}]);
    for (path, body) in [
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 2}),
        ),
        (
            "/v1/responses",
            json!({"input": "hi", "max_output_tokens": 2}),
        ),
    ] {
        assert_eq!(server.post(path, &body).await.status, 200);
        let refused = server.post(path, &with(&body, on.clone())).await;
        assert_eq!(refused.status, 400, "{path}");
        assert!(refused.body.contains("speculation"), "{}", refused.body);
    }
    let odd = json!({"messages": messages, "speculation": {"trace": "yes"}});
    let odd = server.chat(&odd).await;
    assert_eq!(
        (odd.status, &odd.error()["param"]),
        (400, &json!("speculation.trace"))
    );
}
