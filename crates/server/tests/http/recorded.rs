//! Recorded requests of agents and frameworks (`tests/clients/recorded`), sent again without
//! them: every request is answered, and a turn with a tool finishes in each client's own way.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::client::{Server, Setup};
use crate::tools::joined;
use crate::wire::with;

/// What one client sent, with long texts replaced by short ones.
struct Recording {
    client: String,
    requests: Vec<Value>,
}

fn recordings() -> Vec<Recording> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/clients/recorded");
    let read = |client: &str| {
        let text = fs::read_to_string(folder.join(format!("{client}.json"))).unwrap();
        let recording: Value = serde_json::from_str(&text).unwrap();
        let requests = recording["requests"].as_array().unwrap().iter();
        let bodies = requests.map(|request| {
            assert_eq!(request["path"], "/v1/chat/completions", "{client}");
            request["body"].clone()
        });
        Recording {
            client: client.to_owned(),
            requests: bodies.collect(),
        }
    };
    ["gptme", "opencode", "pydantic_ai", "smolagents"]
        .map(read)
        .into()
}

/// A server that holds the longest recorded request, and its model's name.
async fn server(model: &'static str) -> Server {
    Server::start(Setup {
        model,
        context: 2560,
        chunk: 256,
        ..Setup::default()
    })
    .await
}

/// What does not depend on speculation in an answer, streamed or not as `body` says: the message
/// without the ids of its calls, the reason why it ended, and how many tokens it has.
async fn answer(server: &Server, body: &Value) -> (Value, String, u64) {
    let reply = server.chat(body).await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    let counted = |usage: &Value| usage["completion_tokens"].as_u64().unwrap();
    if body["stream"] == true {
        let events = reply.events();
        let (message, finish) = joined(&events);
        return (message, finish, counted(&events.last().unwrap()["usage"]));
    }
    let document = reply.json();
    let choice = &document["choices"][0];
    let finish = choice["finish_reason"].as_str().unwrap().to_owned();
    let usage = counted(&document["usage"]);
    (choice["message"].clone(), finish, usage)
}

/// The calls of a message that name a tool that `body` offers.
fn calls<'a>(message: &'a Value, body: &Value) -> Vec<&'a Value> {
    let names: Vec<&Value> = body["tools"]
        .as_array()
        .unwrap()
        .iter()
        .map(|tool| &tool["function"]["name"])
        .collect();
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    calls
        .filter(|call| names.contains(&&call["function"]["name"]))
        .collect()
}

/// An answer to `body` with this seed, after checking that it is the same without speculation.
async fn checked(server: &Server, body: &Value, seed: u64, what: &str) -> (Value, String) {
    // No recording has a seed, which makes two answers comparable, and most have no limit.
    let body = with(body, json!({"seed": seed}));
    let body = match body.get("max_tokens") {
        Some(_) => body,
        None => with(&body, json!({"max_tokens": 240})),
    };
    let (message, finish, tokens) = answer(server, &body).await;
    let plain = with(&body, json!({"speculation": "off"}));
    let (same, other, count) = answer(server, &plain).await;
    let without_ids = |mut message: Value| {
        for call in message["tool_calls"].as_array_mut().into_iter().flatten() {
            let id = call.as_object_mut().unwrap().remove("id").unwrap();
            assert!(id.as_str().unwrap().starts_with("call_"), "{what}: {id}");
        }
        message
    };
    assert_eq!(
        (without_ids(same), other.as_str(), count),
        (without_ids(message.clone()), finish.as_str(), tokens),
        "{what}"
    );
    (message, finish)
}

/// The second request of a recorded turn, as the client would send it for `call` of this server.
fn with_result(recorded: &Value, call: &Value) -> Value {
    // Ids are random, and smolagents writes them into the prompt: with one id of theirs the answer
    // is the same in every run.
    let mut call = call.clone();
    call["id"] = json!("call_0123456789abcdef01234567");
    let (id, name) = (&call["id"], &call["function"]["name"]);
    let mut body = recorded.clone();
    for message in body["messages"].as_array_mut().unwrap() {
        if let Some(calls) = message["tool_calls"].as_array_mut() {
            *calls = vec![call.clone()];
        }
        if message["role"] == "tool" {
            message["tool_call_id"] = id.clone();
        }
        // smolagents tells calls as text.
        let text = message.pointer_mut("/content/0/text");
        if let Some(text) = text.filter(|text| text.as_str().unwrap().contains("'call_1'")) {
            let arguments = call["function"]["arguments"].as_str().unwrap();
            *text = json!(format!(
                "Calling tools:\n[{{'id': {id}, 'type': 'function', 'function': {{'name': {name}, 'arguments': {arguments}}}}}]"
            ));
        }
    }
    body
}

/// The first request of a turn with a tool, and the one that brings the result.
fn turn(recording: &Recording) -> (&Value, &Value) {
    let requests = &recording.requests;
    let length = |body: &Value| body["messages"].as_array().unwrap().len();
    let first = requests.iter().find(|body| body.get("tools").is_some());
    let first = first.unwrap();
    let messages = first["messages"].as_array().unwrap();
    let second = requests.iter().find(|body| {
        body["tools"] == first["tools"]
            && length(body) > length(first)
            && body["messages"].as_array().unwrap().starts_with(messages)
    });
    (first, second.unwrap())
}

/// A message with calls that answers `first`.
async fn called(server: &Server, first: &Value, what: &str) -> Value {
    let must = with(first, json!({"tool_choice": "required"}));
    // A model may call nothing of its own accord, and a limit or a stop string of the client
    // may cut off a call that must come.
    for (body, seed) in [(first, 1), (&must, 1), (&must, 2), (&must, 3)] {
        let (message, finish) = checked(server, body, seed, what).await;
        if finish == "tool_calls" && !calls(&message, first).is_empty() {
            return message;
        }
    }
    panic!("{what}: no call");
}

/// Plays the turn with a tool of each recording.
async fn finish_turns(model: &'static str) {
    let server = server(model).await;
    for recording in recordings() {
        let (first, second) = turn(&recording);
        let what = format!("{} on {model}", recording.client);
        let message = called(&server, first, &what).await;
        let call = calls(&message, first)[0];
        let arguments = call["function"]["arguments"].as_str().unwrap();
        let arguments: Value = serde_json::from_str(arguments).unwrap();
        assert!(arguments.is_object(), "{what}: {arguments}");

        let second = with_result(second, call);
        let (said, finish) = checked(&server, &second, 1, &what).await;
        let has_text = said["content"]
            .as_str()
            .is_some_and(|text| !text.is_empty());
        let has_ended = match finish.as_str() {
            "tool_calls" => !said["tool_calls"].as_array().unwrap().is_empty(),
            // A call that must come may be cut off by a stop string of the client.
            "stop" => {
                has_text && (second["tool_choice"] != "required" || second.get("stop").is_some())
            }
            _ => false,
        };
        assert!(has_ended, "{what}: {finish} {said}");
    }
}

#[tokio::test]
async fn a_turn_with_a_tool_of_each_client_finishes_on_qwen() {
    finish_turns("tiny-qwen3.5").await;
}

#[tokio::test]
async fn a_turn_with_a_tool_of_each_client_finishes_on_gemma() {
    finish_turns("tiny-gemma4").await;
}

/// Sends every recorded request, and checks what it demands of the answer.
async fn answer_all(model: &'static str) {
    let server = server(model).await;
    for Recording { client, requests } in recordings() {
        for (i, body) in requests.iter().enumerate() {
            let what = format!("{client} {i} on {model}");
            let (message, finish) = checked(&server, body, 1, &what).await;
            // A limit or a stop string of the client may cut an answer off.
            let text = message["content"].as_str().unwrap_or_default();
            let may_stop = body.get("stop").is_some() && finish == "stop";
            if finish == "length" || may_stop {
                assert!(!text.is_empty() || may_stop, "{what}: {message}");
                continue;
            }
            if body["tool_choice"] == "required" {
                assert_eq!(finish, "tool_calls", "{what}: {message}");
                assert!(!calls(&message, body).is_empty(), "{what}: {message}");
            } else if let Some(format) = body.get("response_format") {
                assert_eq!(finish, "stop", "{what}: {message}");
                let object: Value = serde_json::from_str(text).unwrap();
                let object = object.as_object().unwrap();
                let schema = &format["json_schema"]["schema"];
                for name in schema["required"].as_array().into_iter().flatten() {
                    assert!(object[name.as_str().unwrap()].is_string(), "{what}: {text}");
                }
            }
        }
    }
}

#[tokio::test]
async fn every_recorded_request_is_answered_by_qwen() {
    answer_all("tiny-qwen3.5").await;
}

#[tokio::test]
async fn every_recorded_request_is_answered_by_gemma() {
    answer_all("tiny-gemma4").await;
}
