//! The Responses API: items and events of text, reasoning and structured answers.

mod fields;
mod kept;
mod socket;
mod tools;

use serde_json::{Value, json};

use crate::client::{Reply, Server, Setup, data};
use crate::wire::with;

const RESPONSES: &str = "/v1/responses";

/// A server of the bundled model of this name.
async fn server(model: &'static str) -> Server {
    Server::start(Setup {
        model,
        context: 2048,
        ..Setup::default()
    })
    .await
}

async fn respond(server: &Server, body: &Value) -> Value {
    let reply = server.post(RESPONSES, body).await;
    assert_eq!(reply.status, 200, "{body:.300}: {reply:?}");
    reply.json()
}

fn hello() -> Value {
    json!({"input": "Tell me a story about a rabbit and a kite.", "temperature": 0, "max_output_tokens": 24})
}

fn weather() -> Value {
    json!({"type": "function", "name": "get_weather", "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {
            "city": {"type": "string", "description": "The name of the city."}}, "required": ["city"]}})
}

fn ask() -> Value {
    json!({"input": "What is the weather in Rome?", "tools": [weather()], "temperature": 0, "max_output_tokens": 100})
}

/// The events of a stream, after checking that each has its name and its number.
fn events(reply: &Reply) -> Vec<Value> {
    assert_eq!(reply.status, 200, "{reply:?}");
    let names: Vec<&str> = reply
        .body
        .lines()
        .filter_map(|line| line.strip_prefix("event: "))
        .collect();
    let all: Vec<Value> = data(&reply.body)
        .iter()
        .map(|event| serde_json::from_str(event).unwrap())
        .collect();
    assert_eq!(names.len(), all.len());
    for (i, (name, event)) in names.iter().zip(&all).enumerate() {
        assert_eq!(event["type"], *name);
        assert_eq!(event["sequence_number"], i);
    }
    all
}

/// What a client puts together from the events of a stream without the last one: the items that
/// have ended whole.
fn assembled(events: &[Value]) -> Vec<Value> {
    let mut items: Vec<Value> = Vec::new();
    for event in events {
        let place = event["output_index"].as_u64().unwrap_or(0) as usize;
        let append = |to: &mut Value| {
            let old = to.as_str().unwrap().to_owned();
            *to = json!(old + event["delta"].as_str().unwrap());
        };
        let of_item = |items: &[Value]| assert_eq!(items[place]["id"], event["item_id"]);
        match event["type"].as_str().unwrap() {
            "response.output_item.added" => {
                assert_eq!(place, items.len(), "{event}");
                assert_eq!(event["item"]["status"], "in_progress");
                items.push(event["item"].clone());
            }
            "response.content_part.added" => {
                of_item(&items);
                assert_eq!(event["part"]["text"], "");
                items[place]["content"] = json!([event["part"]]);
            }
            "response.output_text.delta" => {
                of_item(&items);
                let part = &mut items[place]["content"][0];
                append(&mut part["text"]);
                let new = event["logprobs"].as_array().unwrap().clone();
                part["logprobs"].as_array_mut().unwrap().extend(new);
            }
            "response.reasoning_text.delta" => {
                of_item(&items);
                append(&mut items[place]["content"][0]["text"]);
            }
            "response.function_call_arguments.delta" => {
                of_item(&items);
                append(&mut items[place]["arguments"]);
            }
            "response.output_text.done" | "response.reasoning_text.done" => {
                assert_eq!(event["text"], items[place]["content"][0]["text"]);
            }
            "response.content_part.done" => assert_eq!(event["part"], items[place]["content"][0]),
            "response.function_call_arguments.done" => {
                assert_eq!(event["arguments"], items[place]["arguments"]);
                assert_eq!(event["name"], items[place]["name"]);
            }
            "response.output_item.done" => {
                items[place]["status"] = event["item"]["status"].clone();
                if let Some(sealed) = event["item"].get("encrypted_content") {
                    items[place]["encrypted_content"] = sealed.clone();
                }
                assert_eq!(event["item"], items[place]);
            }
            _ => {}
        }
    }
    items
}

/// Items without their ids, which are new each time.
fn bare(items: &Value) -> Vec<Value> {
    let mut items = items.as_array().unwrap().clone();
    for item in &mut items {
        let item = item.as_object_mut().unwrap();
        assert!(item.remove("id").unwrap().is_string());
        item.remove("call_id");
    }
    items
}

fn text(response: &Value) -> String {
    let items = response["output"].as_array().unwrap().iter();
    let messages = items.filter(|item| item["type"] == "message");
    messages
        .map(|item| item["content"][0]["text"].as_str().unwrap())
        .collect()
}

/// Asserts that `body` streams what it answers whole, without speculation too, and returns the
/// whole answer.
async fn same_every_way(server: &Server, body: &Value) -> Value {
    let whole = respond(server, body).await;
    for more in [
        json!({"stream": true}),
        json!({"stream": true, "speculation": "off"}),
        json!({"speculation": "off"}),
    ] {
        let is_stream = more["stream"] == true;
        let reply = server.post(RESPONSES, &with(body, more)).await;
        let (other, assembled) = if is_stream {
            let events = events(&reply);
            let [created, begun, .., last] = &events[..] else {
                panic!("too few events: {events:?}");
            };
            assert_eq!(created["type"], "response.created");
            assert_eq!(begun["type"], "response.in_progress");
            assert_eq!(created["response"]["status"], "in_progress");
            assert_eq!(created["response"]["output"], json!([]));
            let name = format!("response.{}", whole["status"].as_str().unwrap());
            assert_eq!(last["type"], name);
            // The first object has every field of the last but what is known at the end.
            for (name, value) in last["response"].as_object().unwrap() {
                if ["speculation", "timings"].contains(&name.as_str()) {
                    continue;
                }
                let first = created["response"].get(name);
                assert!(first.is_some(), "{name}");
                let changes = [
                    "status",
                    "output",
                    "usage",
                    "completed_at",
                    "incomplete_details",
                ];
                assert!(
                    first == Some(value) || changes.contains(&name.as_str()),
                    "{name}"
                );
            }
            (last["response"].clone(), Some(assembled(&events)))
        } else {
            (reply.json(), None)
        };
        assert_eq!(
            bare(&other["output"]),
            bare(&whole["output"]),
            "{body:.300}"
        );
        assert_eq!(other["status"], whole["status"]);
        assert_eq!(
            other["usage"]["output_tokens"],
            whole["usage"]["output_tokens"]
        );
        if let Some(assembled) = assembled {
            let is_whole =
                |item: &&Value| item["type"] != "function_call" || item["status"] == "completed";
            let kept: Vec<&Value> = assembled.iter().filter(is_whole).collect();
            assert_eq!(json!(kept), other["output"]);
        }
    }
    whole
}

#[tokio::test]
async fn a_response_has_what_libraries_look_for() {
    let server = server("tiny-qwen3.5").await;
    let body = with(
        &hello(),
        json!({"instructions": "Be brief.", "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s",
            "prompt_cache_key": "p", "truncation": "auto", "seed": 7}),
    );
    let reply = server.post(RESPONSES, &body).await;
    assert_eq!(reply.header("x-ignored-fields"), None);
    let response = reply.json();
    for (name, value) in [
        ("object", json!("response")),
        ("model", json!("tiny-qwen3.5")),
        ("status", json!("incomplete")),
        ("incomplete_details", json!({"reason": "max_output_tokens"})),
        ("error", Value::Null),
        ("completed_at", Value::Null),
        ("background", json!(false)),
        ("instructions", json!("Be brief.")),
        ("max_output_tokens", json!(24)),
        ("max_tool_calls", Value::Null),
        ("metadata", json!({"a": "b"})),
        ("parallel_tool_calls", json!(true)),
        ("previous_response_id", Value::Null),
        ("prompt_cache_key", json!("p")),
        ("reasoning", json!({"effort": null, "summary": null})),
        ("safety_identifier", json!("s")),
        ("service_tier", json!("default")),
        ("store", json!(true)),
        ("temperature", json!(0.0)),
        ("presence_penalty", json!(0.0)),
        ("frequency_penalty", json!(0.0)),
        (
            "text",
            json!({"format": {"type": "text"}, "verbosity": "medium"}),
        ),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("top_logprobs", json!(0)),
        ("truncation", json!("disabled")),
        ("user", json!("u")),
        ("seed", json!(7)),
    ] {
        assert_eq!(response.get(name), Some(&value), "{name}");
    }
    assert!(response["id"].as_str().unwrap().starts_with("resp_"));
    assert!(response["top_p"].is_number() && response["created_at"].is_u64());
    assert_eq!(response["speculation"]["engaged"], true);
    assert!(response["timings"]["predicted_n"].is_u64());
    let usage = &response["usage"];
    assert_eq!(usage["output_tokens"], 24);
    assert_eq!(usage["input_tokens_details"]["cached_tokens"], 0);
    assert_eq!(usage["output_tokens_details"]["reasoning_tokens"], 0);
    let sum = usage["input_tokens"].as_u64().unwrap() + 24;
    assert_eq!(usage["total_tokens"], sum);
    let [item] = &response["output"].as_array().unwrap()[..] else {
        panic!("one item: {response}");
    };
    assert_eq!(
        (&item["type"], &item["role"]),
        (&json!("message"), &json!("assistant"))
    );
    assert_eq!(item["status"], "incomplete");
    assert!(item["id"].as_str().unwrap().starts_with("msg_"));
    let part = &item["content"][0];
    assert_eq!(
        (&part["type"], &part["annotations"], &part["logprobs"]),
        (&json!("output_text"), &json!([]), &json!([]))
    );
    // It is the answer of a chat with the same messages.
    let chat = json!({"messages": [{"role": "system", "content": "Be brief."},
        {"role": "user", "content": hello()["input"]}], "temperature": 0, "max_tokens": 24});
    let chat = server.chat(&chat).await;
    assert_eq!(chat.text(), text(&response));
    assert_eq!(chat.json()["usage"]["prompt_tokens"], usage["input_tokens"]);
    // One that ends by itself has a time.
    let done = respond(
        &server,
        &with(&hello(), json!({"stop": " ", "max_output_tokens": null})),
    )
    .await;
    assert_eq!(done["status"], "completed");
    assert!(done["completed_at"].as_u64() >= done["created_at"].as_u64());
    assert_eq!(done["output"][0]["status"], "completed");
}

#[tokio::test]
async fn a_stream_tells_of_each_step_and_ends_with_the_whole() {
    for model in ["tiny-qwen3.5", "tiny-gemma4"] {
        let server = server(model).await;
        same_every_way(&server, &hello()).await;
        let body = with(
            &hello(),
            json!({"temperature": 1.2, "seed": 3, "top_p": 0.9}),
        );
        same_every_way(&server, &body).await;
    }
}

#[tokio::test]
async fn a_model_that_says_nothing_has_an_empty_message() {
    let server = server("tiny-qwen3.5").await;
    let first = text(&respond(&server, &hello()).await);
    let stop = first.chars().next().unwrap().to_string();
    let silent = same_every_way(&server, &with(&hello(), json!({"stop": stop}))).await;
    assert_eq!(silent["status"], "completed");
    assert_eq!(silent["output"][0]["content"][0]["text"], "");
}

#[tokio::test]
async fn answers_follow_a_schema() {
    let schema = json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["name", "age"], "additionalProperties": false});
    for model in ["tiny-qwen3.5", "tiny-gemma4"] {
        let server = server(model).await;
        for temperature in [0.0, 0.8, 1.5] {
            let format =
                json!({"type": "json_schema", "name": "person", "strict": true, "schema": schema});
            let body = with(
                &hello(),
                json!({"text": {"format": format}, "max_output_tokens": 200, "temperature": temperature, "seed": 4}),
            );
            let response = same_every_way(&server, &body).await;
            assert_eq!(response["status"], "completed");
            let person: Value = serde_json::from_str(&text(&response)).unwrap();
            assert!(
                (1..=99).contains(&person["age"].as_u64().unwrap()) && person["name"].is_string()
            );
            assert_eq!(person.as_object().unwrap().len(), 2);
            assert_eq!(response["text"]["format"], format);
        }
        let body = with(
            &hello(),
            json!({"text": {"format": {"type": "json_object"}}, "max_output_tokens": 300, "temperature": 0.3, "seed": 1}),
        );
        let response = respond(&server, &body).await;
        if response["status"] == "completed" {
            assert!(
                serde_json::from_str::<Value>(&text(&response))
                    .unwrap()
                    .is_object()
            );
        }
    }
}

#[tokio::test]
async fn reasoning_is_an_item_before_the_answer_and_comes_back() {
    let server = server("tiny-qwen3.5").await;
    let body = json!({"input": "What is 3 + 4?", "reasoning": {"effort": "high", "summary": "auto"}, "temperature": 0, "max_output_tokens": 200,
        "include": ["reasoning.encrypted_content"]});
    let reply = server.post(RESPONSES, &body).await;
    assert_eq!(reply.header("x-ignored-fields"), Some("reasoning.summary"));
    let response = same_every_way(&server, &body).await;
    let [reasoning, message] = &response["output"].as_array().unwrap()[..] else {
        panic!("reasoning and an answer: {response}");
    };
    assert_eq!(
        (&reasoning["type"], &message["type"]),
        (&json!("reasoning"), &json!("message"))
    );
    assert_eq!(reasoning["summary"], json!([]));
    let words = reasoning["content"][0]["text"].as_str().unwrap();
    assert!(!words.is_empty() && reasoning["content"][0]["type"] == "reasoning_text");
    assert!(response["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64() > Some(0));
    assert_eq!(
        response["reasoning"],
        json!({"effort": "high", "summary": "auto"})
    );
    // Sent back before a call of the same turn, the template writes it, in each of its forms.
    let call =
        json!({"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"});
    let result = json!({"type": "function_call_output", "call_id": "c", "output": "1"});
    let tokens = async |item: Option<Value>| {
        let user = json!({"role": "user", "content": "What is 3 + 4?"});
        let items: Vec<Value> = [user]
            .into_iter()
            .chain(item)
            .chain([call.clone(), result.clone()])
            .collect();
        let body = json!({"input": items, "max_output_tokens": 1, "temperature": 0});
        respond(&server, &body).await["usage"]["input_tokens"]
            .as_u64()
            .unwrap()
    };
    let without = tokens(None).await;
    let own = tokens(Some(reasoning.clone())).await;
    assert!(own > without);
    let sealed = json!({"type": "reasoning", "summary": [], "encrypted_content": reasoning["encrypted_content"]});
    assert_eq!(tokens(Some(sealed)).await, own);
    let summary = json!({"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": words}]});
    assert_eq!(tokens(Some(summary)).await, own);
    let foreign = json!({"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"});
    assert_eq!(tokens(Some(foreign)).await, without);
    // It is one message with what follows it, as a chat has it.
    let said = json!({"role": "assistant", "content": "I see."});
    let user = json!({"role": "user", "content": "What is 3 + 4?"});
    let items = json!({"input": [user, reasoning, said, call, result], "max_output_tokens": 1, "temperature": 0});
    let items = respond(&server, &items).await;
    let function = json!({"name": "get_weather", "arguments": "{}"});
    let messages = json!([user, {"role": "assistant", "content": "I see.", "reasoning_content": words,
        "tool_calls": [{"id": "c", "type": "function", "function": function}]}, {"role": "tool", "tool_call_id": "c", "content": "1"}]);
    let chat = json!({"messages": messages, "max_tokens": 1, "temperature": 0});
    let chat = server.chat(&chat).await.json();
    assert_eq!(
        chat["usage"]["prompt_tokens"],
        items["usage"]["input_tokens"]
    );
    // Off is off.
    let off = with(
        &body,
        json!({"reasoning": {"effort": "none"}, "max_output_tokens": 20}),
    );
    assert_eq!(respond(&server, &off).await["output"][0]["type"], "message");
}

#[tokio::test]
async fn log_probabilities_come_with_the_text() {
    let server = server("tiny-qwen3.5").await;
    let include = json!(["message.output_text.logprobs"]);
    let body = with(
        &hello(),
        json!({"include": include, "top_logprobs": 2, "max_output_tokens": 8}),
    );
    let response = same_every_way(&server, &body).await;
    let logprobs = response["output"][0]["content"][0]["logprobs"]
        .as_array()
        .unwrap();
    assert_eq!(logprobs.len(), 8);
    let joined: String = logprobs
        .iter()
        .map(|entry| entry["token"].as_str().unwrap())
        .collect();
    assert_eq!(joined, text(&response));
    assert!(
        logprobs
            .iter()
            .all(|entry| entry["top_logprobs"].as_array().unwrap().len() == 2)
    );
    assert_eq!(response["top_logprobs"], 2);
    let chat = json!({"messages": [{"role": "user", "content": hello()["input"]}], "temperature": 0, "max_tokens": 8, "logprobs": true, "top_logprobs": 2});
    let chat = server.chat(&chat).await.json();
    assert_eq!(chat["choices"][0]["logprobs"]["content"], json!(logprobs));
}

#[tokio::test]
async fn a_stream_that_cannot_go_on_says_so() {
    let server = Server::start(Setup {
        context: 8 << 10,
        ..Setup::default()
    })
    .await;
    // Time enough for a few words, but not for a whole context; more where a machine is busy.
    let mut patience = 0.3;
    let all = loop {
        let endless = with(
            &hello(),
            json!({"max_output_tokens": null, "ignore_eos": true, "stream": true, "timeout": patience}),
        );
        let all = events(&server.post(RESPONSES, &endless).await);
        let has_text = all
            .iter()
            .any(|event| event["type"] == "response.output_text.delta");
        if has_text || patience > 60.0 {
            break all;
        }
        patience *= 4.0;
    };
    let [.., error, last] = &all[..] else {
        panic!("too few events: {all:?}");
    };
    assert_eq!(
        (&error["type"], &error["code"]),
        (&json!("error"), &json!("request_timeout"))
    );
    assert_eq!(error["error"]["message"], error["message"]);
    assert_eq!(last["type"], "response.failed");
    let response = &last["response"];
    assert_eq!(
        (&response["status"], &response["error"]["code"]),
        (&json!("failed"), &json!("request_timeout"))
    );
    assert_eq!(response["output"][0]["status"], "incomplete");
    assert!(!text(response).is_empty());
    let path = format!("{RESPONSES}/{}", response["id"].as_str().unwrap());
    assert_eq!(server.get(&path).await.status, 404);
}
