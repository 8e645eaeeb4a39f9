//! Anthropic's Messages API: requests of every kind, whole and streamed.

mod answers;
mod refusals;
mod requests;

use serde_json::{Value, json};

use crate::client::{Reply, Server};
use crate::wire::with;

const MESSAGES: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";
/// The answer to this is longer than what any test here lets the model write.
const STORY: &str = "Tell me a story about a rabbit and a kite.";

fn user(content: Value) -> Value {
    json!({"role": "user", "content": content})
}

fn ask(content: &str, max_tokens: usize) -> Value {
    json!({"model": "claude", "max_tokens": max_tokens, "temperature": 0, "messages": [user(json!(content))]})
}

/// A tool that the bundled models know.
fn weather() -> Value {
    json!({"name": "get_weather", "description": "Get the current weather in a city.",
        "input_schema": {"type": "object", "properties": {
            "city": {"type": "string", "description": "The name of the city."}}, "required": ["city"]}})
}

fn ask_weather() -> Value {
    with(
        &ask("What is the weather in Rome?", 100),
        json!({"tools": [weather()]}),
    )
}

/// A tool of several kinds of arguments, which no model was trained on.
fn booking() -> Value {
    json!({"name": "book_table", "input_schema": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 10},
            "guests": {"type": "integer", "minimum": 1, "maximum": 9},
            "outside": {"type": "boolean"},
        },
        "required": ["name", "guests", "outside"],
        "additionalProperties": false,
    }})
}

fn assert_fits_booking(input: &Value, what: &str) {
    let guests = input["guests"].as_u64().expect(what);
    let name = input["name"].as_str().expect(what);
    assert!(
        (1..=9).contains(&guests) && name.chars().count() <= 10,
        "{what}"
    );
    assert!(input["outside"].is_boolean(), "{what}");
    assert_eq!(input.as_object().unwrap().len(), 3, "{what}");
}

/// The error of a reply, after checking its shape and its id.
fn error(reply: &Reply) -> Value {
    let document = reply.json();
    assert_eq!(document["type"], "error", "{reply:?}");
    let id = reply.header("request-id");
    assert_eq!(document["request_id"].as_str(), id, "{reply:?}");
    assert_eq!(reply.header("x-request-id"), id);
    let error = document["error"].clone();
    assert_eq!(error.as_object().unwrap().len(), 2, "{reply:?}");
    assert!(!error["message"].as_str().unwrap().is_empty(), "{reply:?}");
    error
}

/// The events of a stream, each with the name that it says itself.
fn events(reply: &Reply) -> Vec<Value> {
    assert_eq!(reply.status, 200, "{reply:?}");
    let frames = reply.body.split("\n\n").filter(|frame| !frame.is_empty());
    let event = |frame: &str| {
        let (name, data) = frame.split_once('\n').unwrap();
        let event: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), event["type"].as_str());
        event
    };
    frames.map(event).collect()
}

/// The message that a client puts together from the events of a stream, after checking their
/// order.
fn joined(events: &[Value]) -> Value {
    let mut message = events[0]["message"].clone();
    assert_eq!(events[0]["type"], "message_start");
    assert_eq!(message["content"], json!([]));
    assert_eq!(message["stop_reason"], Value::Null);
    let (mut open, mut json) = (None, String::new());
    for event in &events[1..] {
        let n = message["content"].as_array().unwrap().len();
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!(open.replace(n), None, "one block at a time");
                assert_eq!(event["index"], n);
                let block = event["content_block"].clone();
                message["content"].as_array_mut().unwrap().push(block);
                json.clear();
            }
            "content_block_delta" => {
                assert_eq!(Some(n - 1), open);
                assert_eq!(event["index"], n - 1);
                let (block, delta) = (&mut message["content"][n - 1], &event["delta"]);
                let mut append = |name: &str| {
                    let more = delta[name].as_str().unwrap();
                    block[name] = json!(block[name].as_str().unwrap().to_owned() + more);
                };
                match delta["type"].as_str().unwrap() {
                    "text_delta" => append("text"),
                    "thinking_delta" => append("thinking"),
                    "signature_delta" => append("signature"),
                    "input_json_delta" => json += delta["partial_json"].as_str().unwrap(),
                    other => panic!("{other}"),
                }
            }
            "content_block_stop" => {
                assert_eq!(open.take(), Some(n - 1));
                assert_eq!(event["index"], n - 1);
                let block = &mut message["content"][n - 1];
                if block["type"] == "tool_use" {
                    assert_eq!(block["input"], json!({}));
                    block["input"] = serde_json::from_str(&json).unwrap_or(Value::Null);
                }
            }
            "message_delta" => {
                assert_eq!(open, None);
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["stop_sequence"] = event["delta"]["stop_sequence"].clone();
                for name in ["usage", "speculation", "timings", "seed"] {
                    message[name] = event[name].clone();
                }
            }
            "message_stop" | "ping" => {}
            other => panic!("{other}"),
        }
    }
    assert_eq!(events.last().unwrap(), &json!({"type": "message_stop"}));
    message
}

/// What two answers to the same request must have in common, with ids of calls left out.
fn said(message: &Value) -> Value {
    let mut content = message["content"].clone();
    for block in content.as_array_mut().unwrap() {
        if let Some(block) = block.as_object_mut()
            && let Some(id) = block.remove("id")
        {
            assert!(id.as_str().unwrap().starts_with("toolu_"), "{message}");
        }
    }
    json!([
        content,
        message["stop_reason"],
        message["stop_sequence"],
        message["usage"]["output_tokens"]
    ])
}

/// The answer to `body`, after checking that it is the same when streamed, and without speculation.
async fn answer(server: &Server, body: &Value) -> Value {
    let reply = server.post(MESSAGES, body).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let whole = reply.json();
    for more in [
        json!({"stream": true}),
        json!({"stream": true, "speculation": "off"}),
        json!({"speculation": "off"}),
    ] {
        let reply = server.post(MESSAGES, &with(body, more.clone())).await;
        let other = match more["stream"] == true {
            true => joined(&events(&reply)),
            false => reply.json(),
        };
        assert_eq!(said(&other), said(&whole), "{more} {body}");
        let total = |message: &Value| {
            let usage = &message["usage"];
            assert_eq!(usage["cache_creation_input_tokens"], 0);
            let of = |name: &str| usage[name].as_u64().unwrap();
            of("input_tokens") + of("cache_read_input_tokens")
        };
        assert_eq!(total(&other), total(&whole));
        assert_eq!(
            other["speculation"]["engaged"],
            more["speculation"] != "off"
        );
    }
    // The counted tokens are those of the prompt.
    let count = server.post(COUNT, body).await.json();
    let usage = &whole["usage"];
    let total = usage["input_tokens"].as_u64().unwrap()
        + usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(count, json!({"input_tokens": total}), "{body}");
    whole
}
