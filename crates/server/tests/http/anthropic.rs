//! Anthropic's Messages API: requests of every kind, whole and streamed.

use serde_json::{Value, json};
use tokio::time::{Duration, timeout};

use crate::client::{PATIENCE, Reply, Server, Setup, altered_in, request};
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

#[tokio::test]
async fn an_answer_has_blocks_usage_and_the_decision_record() {
    let server = Server::start(Setup::default()).await;
    let body = with(&ask(STORY, 12), json!({"seed": 7}));
    let message = answer(&server, &body).await;
    assert!(message["id"].as_str().unwrap().starts_with("msg_"));
    for (name, value) in [
        ("type", json!("message")),
        ("role", json!("assistant")),
        ("model", json!("tiny-qwen3.5")),
        ("stop_reason", json!("max_tokens")),
        ("stop_sequence", json!(null)),
        ("seed", json!(7)),
    ] {
        assert_eq!(message[name], value, "{name}");
    }
    let [block] = &message["content"].as_array().unwrap()[..] else {
        panic!("one block: {message}");
    };
    assert_eq!(block["type"], "text");
    assert_eq!(message["usage"]["output_tokens"], 12);
    assert_eq!(message["speculation"]["drafter"], "mtp");
    assert_eq!(message["timings"]["predicted_n"], 12);

    // The same prompt and text as OpenAI's.
    let chat = json!({"messages": [user(json!(STORY))], "max_tokens": 12, "temperature": 0, "seed": 7, "enable_thinking": false});
    let chat = server.chat(&chat).await.json();
    assert_eq!(block["text"], chat["choices"][0]["message"]["content"]);
    let prompt = chat["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(
        message["usage"]["input_tokens"],
        chat["usage"]["prompt_tokens"]
    );

    // A seed and a temperature give one text too.
    let warm = with(
        &body,
        json!({"temperature": 0.9, "top_p": 0.95, "top_k": 40, "max_tokens": 40}),
    );
    answer(&server, &warm).await;
}

#[tokio::test]
async fn an_end_is_named_and_a_stop_sequence_told() {
    let server = Server::start(Setup::default()).await;
    let short = answer(&server, &ask("Hi", 200)).await;
    assert_eq!(short["stop_reason"], "end_turn");
    let text = short["content"][0]["text"].as_str().unwrap();
    let stop: String = text.chars().skip(3).take(3).collect();
    let body = with(&ask("Hi", 200), json!({"stop_sequences": ["never@", stop]}));
    let stopped = answer(&server, &body).await;
    assert_eq!(stopped["stop_reason"], "stop_sequence");
    assert_eq!(stopped["stop_sequence"], stop);
    let before = &text[..text.find(&stop).unwrap()];
    assert_eq!(stopped["content"][0]["text"], before);
}

#[tokio::test]
async fn a_stream_says_the_prompt_first_and_pings_while_it_is_quiet() {
    let mut setup = Setup {
        chunk: 1,
        context: 2048,
        ..Setup::default()
    };
    setup.config.limits.keep_alive = Duration::from_millis(1);
    let server = Server::start(setup).await;
    let body = with(&ask(&"word ".repeat(600), 4), json!({"stream": true}));
    let reply = server.post(MESSAGES, &body).await;
    assert!(
        reply
            .header("content-type")
            .unwrap()
            .starts_with("text/event-stream")
    );
    let events = events(&reply);
    let n = |name: &str| events.iter().filter(|event| event["type"] == name).count();
    assert!(n("ping") > 0, "{events:?}");
    assert_eq!(events[1], json!({"type": "ping"}));
    assert!(!reply.body.contains("\n:"), "no comments");
    let start = &events[0]["message"];
    let prompt = start["usage"]["input_tokens"].as_u64().unwrap();
    assert!(prompt > 600, "{start}");
    assert_eq!(start["usage"]["output_tokens"], 0);
    let message = joined(&events);
    assert_eq!(message["usage"]["input_tokens"], prompt);
    assert_eq!(message["seed"], start["seed"]);
    assert_eq!(n("message_delta"), 1);
}

#[tokio::test]
async fn a_model_calls_and_goes_on_from_the_result() {
    for model in ["tiny-qwen3.5", "tiny-gemma4"] {
        let server = Server::start(Setup {
            model,
            ..Setup::default()
        })
        .await;
        let message = answer(&server, &ask_weather()).await;
        assert_eq!(message["stop_reason"], "tool_use", "{model}: {message}");
        let [call] = &message["content"].as_array().unwrap()[..] else {
            panic!("one call: {message}");
        };
        assert_eq!(call["type"], "tool_use");
        assert_eq!(call["name"], "get_weather");
        assert_eq!(call["input"], json!({"city": "Rome"}));

        // The next turn has the call and its result, in any form.
        let next = |result: Value| {
            let result = with(
                &json!({"type": "tool_result", "tool_use_id": call["id"]}),
                result,
            );
            let mut next = ask_weather();
            next["messages"].as_array_mut().unwrap().extend([
                json!({"role": "assistant", "content": message["content"]}),
                user(json!([result])),
            ]);
            next
        };
        let sunny = "{\"temperature\": 21, \"sky\": \"sunny\"}";
        let text = |text: &str| json!({"type": "text", "text": text});
        let told = answer(&server, &next(json!({"content": sunny}))).await;
        assert_eq!(told["stop_reason"], "end_turn");
        let words = told["content"][0]["text"].as_str().unwrap();
        assert!(words.contains("21"), "{model}: {words}");
        let (begin, end) = sunny.split_at(9);
        let parts = json!({"content": [text(begin), text(end)], "is_error": false, "cache_control": {"type": "ephemeral"}});
        let parts = answer(&server, &next(parts)).await;
        assert_eq!(said(&parts), said(&told));

        // The prompt is that of the same conversation in OpenAI's form.
        let function = json!({"name": "get_weather", "description": weather()["description"], "parameters": weather()["input_schema"]});
        let chat = json!({
            "messages": [
                user(json!("What is the weather in Rome?")),
                {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function",
                    "function": {"name": "get_weather", "arguments": "{\"city\": \"Rome\"}"}}]},
                {"role": "tool", "tool_call_id": "c", "content": sunny},
            ],
            "tools": [{"type": "function", "function": function}],
            "temperature": 0, "max_tokens": 100,
        });
        let chat = server.chat(&chat).await.json();
        assert_eq!(chat["choices"][0]["message"]["content"], words);
        let count = server.post(COUNT, &next(json!({"content": sunny}))).await;
        assert_eq!(count.json()["input_tokens"], chat["usage"]["prompt_tokens"]);

        // An error is told, and once.
        let n = async |result: Value| {
            let count = server.post(COUNT, &next(result)).await.json();
            count["input_tokens"].as_u64().unwrap()
        };
        let error = n(json!({"content": "Error: no such city"})).await;
        assert_eq!(
            n(json!({"content": "no such city", "is_error": true})).await,
            error
        );
        assert_eq!(
            n(json!({"content": "Error: no such city", "is_error": true})).await,
            error
        );
        assert_eq!(
            n(json!({"is_error": true})).await,
            n(json!({"content": "Error"})).await
        );
        assert_eq!(n(json!({})).await, n(json!({"content": ""})).await);
    }
}

#[tokio::test]
async fn calls_that_must_come_come_and_fit() {
    for model in ["tiny-gemma4", "tiny-qwen3.5"] {
        let server = Server::start(Setup {
            model,
            context: 2048,
            ..Setup::default()
        })
        .await;
        for (choice, temperature) in [
            (
                json!({"type": "any", "disable_parallel_tool_use": true}),
                0.0,
            ),
            (
                json!({"type": "tool", "name": "book_table", "disable_parallel_tool_use": true}),
                0.0,
            ),
            (
                json!({"type": "tool", "name": "book_table", "disable_parallel_tool_use": true}),
                1.2,
            ),
        ] {
            let body = with(
                &ask_weather(),
                json!({"tools": [weather(), booking()], "tool_choice": choice, "max_tokens": 600, "temperature": temperature, "seed": 5}),
            );
            let message = answer(&server, &body).await;
            let what = format!("{model} {choice}: {message}");
            assert_eq!(message["stop_reason"], "tool_use", "{what}");
            let [call] = &message["content"].as_array().unwrap()[..] else {
                panic!("one call: {what}");
            };
            assert!(
                message["speculation"]["forced"].as_u64().unwrap() > 0,
                "{what}"
            );
            match call["name"].as_str().unwrap() {
                "get_weather" => assert!(
                    choice["type"] == "any" && call["input"]["city"].is_string(),
                    "{what}"
                ),
                _ => assert_fits_booking(&call["input"], &what),
            }
        }
        // A strict tool's calls fit, and text stays free.
        let mut tool = weather();
        tool["strict"] = json!(true);
        tool["input_schema"]["additionalProperties"] = json!(false);
        let message = answer(&server, &with(&ask_weather(), json!({"tools": [tool]}))).await;
        assert_eq!(message["content"][0]["input"], json!({"city": "Rome"}));
        let free = with(&ask(STORY, 20), json!({"tools": [tool]}));
        assert_eq!(answer(&server, &free).await["content"][0]["type"], "text");
        // What is declined is left out, and named.
        let plain = answer(&server, &ask(STORY, 20)).await;
        let declined = with(&free, json!({"tool_choice": {"type": "none"}}));
        let reply = server.post(MESSAGES, &declined).await;
        assert_eq!(said(&reply.json()), said(&plain));
        assert_eq!(reply.header("x-ignored-fields"), Some("tools"));
    }
}

#[tokio::test]
async fn a_call_that_is_cut_off_is_text() {
    let server = Server::start(Setup::default()).await;
    let whole = answer(&server, &ask_weather()).await;
    let tokens = whole["usage"]["output_tokens"].as_u64().unwrap();
    let mut has_begun = false;
    for n in 1..tokens {
        let body = with(&ask_weather(), json!({"max_tokens": n}));
        let cut = server.post(MESSAGES, &body).await.json();
        assert_eq!(cut["stop_reason"], "max_tokens", "{n}: {cut}");
        let blocks = cut["content"].as_array().unwrap();
        if blocks.iter().any(|block| block["type"] == "tool_use") {
            // The form was left open behind a whole call.
            assert_eq!(
                cut["content"],
                json!([with(&whole["content"][0], json!({"id": blocks[0]["id"]}))])
            );
            continue;
        }
        // A stream may have begun to say the call; the text is the same.
        let stream = with(&body, json!({"stream": true}));
        let streamed = joined(&events(&server.post(MESSAGES, &stream).await));
        assert_eq!(streamed["stop_reason"], "max_tokens");
        let blocks = streamed["content"].as_array().unwrap();
        has_begun |= blocks.iter().any(|block| block["type"] == "tool_use");
        let text: String = blocks
            .iter()
            .filter_map(|block| block["text"].as_str())
            .collect();
        assert_eq!(
            text,
            cut["content"][0]["text"].as_str().unwrap_or_default(),
            "{n}"
        );
    }
    assert!(has_begun, "no call was ever begun in {tokens} tokens");
}

#[tokio::test]
async fn thinking_comes_in_a_block_where_it_is_asked_for() {
    for model in ["tiny-qwen3.5", "tiny-gemma4"] {
        let server = Server::start(Setup {
            model,
            context: 1024,
            ..Setup::default()
        })
        .await;
        let base = ask("What is 7 plus 5?", 200);
        let off = answer(&server, &base).await;
        let disabled = with(
            &base,
            json!({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}),
        );
        assert_eq!(said(&answer(&server, &disabled).await), said(&off));
        assert!(off["content"][0]["type"] == "text", "{model}: {off}");
        assert!(off["usage"].get("output_tokens_details").is_none());

        let on = json!({"thinking": {"type": "adaptive"}});
        let on = answer(&server, &with(&base, on)).await;
        let [thinking, text] = &on["content"].as_array().unwrap()[..] else {
            panic!("two blocks: {on}");
        };
        assert_eq!(
            (&thinking["type"], &thinking["signature"]),
            (&json!("thinking"), &json!(""))
        );
        assert!(!thinking["thinking"].as_str().unwrap().is_empty());
        assert_eq!(text["type"], "text");
        let thought = on["usage"]["output_tokens_details"]["thinking_tokens"]
            .as_u64()
            .unwrap();
        assert!(thought > 3, "{on}");
        let enabled = json!({"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"}});
        assert_eq!(
            said(&answer(&server, &with(&base, enabled)).await),
            said(&on)
        );
        let chat = json!({"messages": base["messages"], "temperature": 0, "max_tokens": 200, "enable_thinking": true});
        let chat = server.chat(&chat).await.json();
        assert_eq!(
            thinking["thinking"],
            chat["choices"][0]["message"]["reasoning_content"]
        );

        let budget = json!({"thinking": {"type": "enabled", "budget_tokens": 8}});
        let less = answer(&server, &with(&base, budget)).await;
        let cut = less["content"][0]["thinking"].as_str().unwrap();
        assert!(
            thinking["thinking"].as_str().unwrap().starts_with(cut),
            "{less}"
        );
        assert!(cut.len() < thinking["thinking"].as_str().unwrap().len());
        assert_eq!(less["content"][1]["type"], "text", "{less}");

        // Sent back, it is read where the template reads it: after the last question.
        let call = json!({"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}});
        let result = json!({"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"});
        let turn = async |blocks: Value| {
            let mut body = ask_weather();
            let list = body["messages"].as_array_mut().unwrap();
            list.extend([
                json!({"role": "assistant", "content": blocks}),
                user(json!([result])),
            ]);
            server.post(COUNT, &body).await
        };
        let thought =
            json!({"type": "thinking", "thinking": "Rome is a city.", "signature": "c2ln"});
        let with_thought = turn(json!([thought, call])).await;
        let without = turn(json!([call])).await;
        let n = |reply: &Reply| reply.json()["input_tokens"].as_u64().unwrap();
        assert!(n(&with_thought) > n(&without) + 3);
        assert_eq!(with_thought.header("x-ignored-fields"), None);
        // What only its writer can read is left out, and named.
        let redacted = turn(json!([{"type": "redacted_thinking", "data": "c2VjcmV0"}, call])).await;
        assert_eq!(n(&redacted), n(&without));
        assert_eq!(
            redacted.header("x-ignored-fields"),
            Some("messages[1].content[0].data")
        );
    }
}

#[tokio::test]
async fn an_answer_may_have_to_follow_a_schema() {
    let server = Server::start(Setup {
        context: 1024,
        ..Setup::default()
    })
    .await;
    let format = json!({"type": "json_schema", "schema": booking()["input_schema"]});
    let base = ask("Book a table for two.", 200);
    let newer = with(&base, json!({"output_config": {"format": format}}));
    let message = answer(&server, &newer).await;
    let text = message["content"][0]["text"].as_str().unwrap();
    assert_fits_booking(&serde_json::from_str(text).unwrap(), text);
    let older = answer(&server, &with(&base, json!({"output_format": format}))).await;
    assert_eq!(said(&older), said(&message));
    let thinking = with(
        &newer,
        json!({"thinking": {"type": "enabled", "budget_tokens": 20}}),
    );
    let message = answer(&server, &thinking).await;
    let text = message["content"][1]["text"].as_str().unwrap();
    assert_fits_booking(&serde_json::from_str(text).unwrap(), text);
}

#[tokio::test]
async fn every_form_of_a_conversation_is_the_prompt_that_it_says() {
    let server = Server::start(Setup::default()).await;
    let text = |text: &str| json!({"type": "text", "text": text, "cache_control": {"type": "ephemeral"}, "citations": null});
    let n = async |more: Value| {
        let reply = server.post(COUNT, &with(&ask("Hi", 1), more)).await;
        assert_eq!(reply.header("x-ignored-fields"), None, "{reply:?}");
        reply.json()["input_tokens"].as_u64().unwrap()
    };
    let billing =
        "x-anthropic-billing-header: cc_version=2.1.197.99d; cc_entrypoint=sdk-cli; cch=1a2b3;";
    let plain = n(json!({"system": "Be brief.\n\nBe kind."})).await;
    for system in [
        json!([text("Be brief."), text("Be kind.")]),
        json!([text(billing), text("Be brief."), text("Be kind.")]),
        json!([text(&format!("{billing}\nBe brief.")), text("Be kind.")]),
        json!(format!("{billing}\nBe brief.\n\nBe kind.")),
    ] {
        assert_eq!(n(json!({"system": system})).await, plain, "{system}");
    }
    let none = n(json!({})).await;
    for system in [
        json!(billing),
        json!([text(billing)]),
        json!([]),
        json!(""),
        json!(null),
    ] {
        assert_eq!(n(json!({"system": system})).await, none, "{system}");
    }
    assert!(none < plain);
    // A system message after a question is said in its turn.
    let later = json!({"messages": [user(json!([text("Hi"), text(" there")])), {"role": "system", "content": [text("Be kind.")]}]});
    let joined = json!({"messages": [user(json!("Hi there\n\nBe kind."))]});
    assert_eq!(n(later).await, n(joined).await);
    // Results before what is said, and a conversation that begins with the assistant.
    let call = |id: &str| json!({"type": "tool_use", "id": id, "name": "get_weather", "input": {"city": "Rome"}});
    let result =
        |id: &str| json!({"type": "tool_result", "tool_use_id": id, "content": [text("rain")]});
    let turns = |last: Value| {
        let calls =
            json!({"role": "assistant", "content": [text("Let me see."), call("a"), call("b")]});
        let mut turns = vec![user(json!("Hi")), calls];
        turns.extend(last.as_array().unwrap().clone());
        json!({"messages": turns})
    };
    let together = turns(json!([user(json!([
        result("a"),
        result("b"),
        text("And?")
    ]))]));
    let apart = turns(json!([
        user(json!([result("a")])),
        user(json!([result("b")])),
        user(json!("And?"))
    ]));
    assert_eq!(n(together).await, n(apart).await);
    n(json!({"messages": [{"role": "assistant", "content": "Hello!"}, user(json!("Hi"))]})).await;
    n(json!({"messages": [user(json!([]))], "cache_control": {"type": "ephemeral"}})).await;
}

#[tokio::test]
async fn the_billing_line_does_not_cost_the_cache() {
    let server = Server::start(Setup {
        model: "tiny-gemma4",
        context: 2048,
        ..Setup::default()
    })
    .await;
    let ask = async |id: &str| {
        let line = format!("x-anthropic-billing-header: cc_version=2; cch={id};");
        let words = "Say only what is asked for. ".repeat(40);
        let system = [&line[..], &words].map(|text| json!({"type": "text", "text": text}));
        let body = with(&ask("Hi", 4), json!({"system": system}));
        server.post(MESSAGES, &body).await.json()["usage"].clone()
    };
    let first = ask("00001").await;
    assert_eq!(first["cache_read_input_tokens"], 0);
    // The second time it is in the cache, and not counted twice.
    let second = ask("99999").await;
    let read = second["cache_read_input_tokens"].as_u64().unwrap();
    assert!(read > 200, "{second}");
    let prompt = first["input_tokens"].as_u64().unwrap();
    assert_eq!(second["input_tokens"], prompt - read);
}

#[tokio::test]
async fn what_cannot_be_read_is_named() {
    let server = Server::start(Setup::default()).await;
    let messages = |content: Value| json!({"messages": [user(content)]});
    let block = |block: Value| messages(json!([{"type": "text", "text": "Hi"}, block]));
    let answer = |block: Value| json!({"messages": [user(json!("Hi")), {"role": "assistant", "content": [block]}, user(json!("Hi"))]});
    let tool = |more: Value| json!({"tools": [with(&weather(), more)]});
    for (param, more) in [
        ("max_tokens", json!({"max_tokens": null})),
        ("max_tokens", json!({"max_tokens": "many"})),
        ("messages", json!({"messages": null})),
        ("messages", json!({"messages": []})),
        ("messages", json!({"messages": "Hi"})),
        ("messages[0]", json!({"messages": ["Hi"]})),
        ("messages[0].role", json!({"messages": [{"content": "Hi"}]})),
        (
            "messages[0].role",
            json!({"messages": [{"role": "tool", "content": "Hi"}]}),
        ),
        ("messages[0].content", messages(json!(null))),
        ("messages[0].content", messages(json!(3))),
        ("messages[0].content[0]", messages(json!(["Hi"]))),
        ("messages[0].content[1].type", block(json!({"text": "Hi"}))),
        (
            "messages[0].content[1].text",
            block(json!({"type": "text"})),
        ),
        (
            "messages[0].content[1]",
            block(
                json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}),
            ),
        ),
        (
            "messages[0].content[1]",
            block(json!({"type": "document", "source": {"type": "text", "data": "a"}})),
        ),
        (
            "messages[0].content[1]",
            block(json!({"type": "tool_use", "id": "a", "name": "f", "input": {}})),
        ),
        (
            "messages[0].content[1].tool_use_id",
            block(json!({"type": "tool_result"})),
        ),
        (
            "messages[0].content[1].content",
            block(json!({"type": "tool_result", "tool_use_id": "a", "content": 3})),
        ),
        (
            "messages[0].content[1].content[0]",
            block(
                json!({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}),
            ),
        ),
        (
            "messages[0].content[1].is_error",
            block(json!({"type": "tool_result", "tool_use_id": "a", "is_error": "yes"})),
        ),
        (
            "messages[1].content[0]",
            answer(json!({"type": "tool_result", "tool_use_id": "a"})),
        ),
        (
            "messages[1].content[0]",
            answer(
                json!({"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}}),
            ),
        ),
        (
            "messages[1].content[0].input",
            answer(json!({"type": "tool_use", "id": "a", "name": "f", "input": "{}"})),
        ),
        (
            "messages[1].content[0].name",
            answer(json!({"type": "tool_use", "id": "a", "input": {}})),
        ),
        (
            "messages[1].content[0].thinking",
            answer(json!({"type": "thinking"})),
        ),
        (
            "messages[1]",
            json!({"messages": [user(json!("Hi")), {"role": "assistant", "content": "I"}]}),
        ),
        ("system", json!({"system": 3})),
        ("system[0]", json!({"system": [{"type": "image"}]})),
        ("stop_sequences", json!({"stop_sequences": [""]})),
        ("temperature", json!({"temperature": 3})),
        ("thinking.type", json!({"thinking": {"type": "sometimes"}})),
        (
            "thinking.budget_tokens",
            json!({"thinking": {"type": "enabled", "budget_tokens": -1}}),
        ),
        (
            "output_config.effort",
            json!({"output_config": {"effort": "huge"}}),
        ),
        (
            "output_config.format.type",
            json!({"output_config": {"format": {"type": "xml"}}}),
        ),
        (
            "output_config.format.schema",
            json!({"output_config": {"format": {"type": "json_schema"}}}),
        ),
        ("output_format.type", json!({"output_format": {}})),
        (
            "output_format",
            json!({"output_format": {"type": "json_schema", "schema": {}}, "output_config": {"format": {"type": "json_schema", "schema": {}}}}),
        ),
        ("tools", json!({"tools": {}})),
        ("tools[0]", json!({"tools": ["f"]})),
        (
            "tools[0]",
            json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ),
        (
            "tools[1]",
            json!({"tools": [weather(), {"type": "bash_20250124", "name": "bash"}]}),
        ),
        ("tools[0].input_schema", json!({"tools": [{"name": "f"}]})),
        (
            "tools[0].input_schema",
            json!({"tools": [{"type": "custom", "name": "f"}]}),
        ),
        ("tools[0].input_schema", tool(json!({"input_schema": []}))),
        ("tools[0].name", tool(json!({"name": "a b"}))),
        ("tools[0].description", tool(json!({"description": 1}))),
        ("tools[0].strict", tool(json!({"strict": 1}))),
        (
            "tools[0].strict",
            tool(
                json!({"strict": true, "input_schema": {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}}),
            ),
        ),
        ("tool_choice", json!({"tool_choice": "any"})),
        ("tool_choice", json!({"tool_choice": {"type": "any"}})),
        (
            "tool_choice",
            json!({"tools": [weather()], "tool_choice": {"type": "tool", "name": "other"}}),
        ),
        (
            "tool_choice.name",
            json!({"tools": [weather()], "tool_choice": {"type": "tool"}}),
        ),
        (
            "tool_choice.type",
            json!({"tools": [weather()], "tool_choice": {"type": "required"}}),
        ),
        ("thread.type", json!({"thread": {}})),
        ("container", json!({"container": "c"})),
        ("mcp_servers", json!({"mcp_servers": [{"type": "url"}]})),
        ("stop", json!({"stop": "x"})),
        (
            "response_format",
            json!({"response_format": {"type": "json_object"}}),
        ),
        ("n", json!({"n": 2})),
        ("reasoning_effort", json!({"reasoning_effort": "low"})),
    ] {
        for path in [MESSAGES, COUNT] {
            if path == COUNT && more["max_tokens"].is_null() && param == "max_tokens" {
                continue;
            }
            let reply = server.post(path, &with(&ask("Hi", 1), more.clone())).await;
            let error = error(&reply);
            assert_eq!(reply.status, 400, "{more}");
            assert_eq!(error["type"], "invalid_request_error");
            let told = error["message"].as_str().unwrap();
            assert!(told.starts_with(&format!("`{param}` ")), "{param}: {told}");
        }
    }
    let told = |reply: &Reply| error(reply)["message"].as_str().unwrap().to_owned();
    let image = server
        .post(
            MESSAGES,
            &with(&ask("Hi", 1), block(json!({"type": "image"}))),
        )
        .await;
    assert!(told(&image).contains("`image`"));
    let search = json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]});
    let search = server.post(MESSAGES, &with(&ask("Hi", 1), search)).await;
    assert!(told(&search).contains("`web_search_20250305`"));
}

#[tokio::test]
async fn what_changes_nothing_is_listed() {
    let server = Server::start(Setup::default()).await;
    let more = json!({
        "metadata": {"user_id": "u"}, "service_tier": "auto", "container": null, "mcp_servers": [],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "thinking": {"type": "disabled", "display": "omitted"},
        "output_config": {"effort": "high", "task_budget": {}},
        "tool_choice": {"type": "auto", "odd": 1},
        "tools": [with(&weather(), json!({"type": "custom", "cache_control": {}, "defer_loading": true}))],
        "messages": [{"role": "user", "odd": 1, "content": [{"type": "text", "text": "Hi", "stranger": 1}]}],
        "cache_control": {"type": "ephemeral"}, "temprature": 1,
    });
    for path in [MESSAGES, COUNT] {
        let reply = server.post(path, &with(&ask("Hi", 1), more.clone())).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        let ignored = [
            "context_management",
            "messages[0].content[0].stranger",
            "messages[0].odd",
            "metadata",
            "output_config.task_budget",
            "service_tier",
            "temprature",
            "thinking.display",
            "tool_choice.odd",
            "tools[0].defer_loading",
        ];
        let listed = reply.header("x-ignored-fields");
        assert_eq!(listed, Some(ignored.join(", ").as_str()));
    }
}

#[tokio::test]
async fn refusals_of_every_kind_have_anthropic_s_shape() {
    let mut setup = Setup::default();
    setup.config.keys = server::Keys::new(["secret".to_owned()]);
    setup.config.strict_model_names = true;
    setup.config.limits.chat_body_bytes = 4096;
    let server = Server::start(setup).await;
    let key = "x-api-key: secret\r\n";
    let hi = ask("Hi", 1).to_string();
    let big = ask(&"x".repeat(5000), 1).to_string();
    let long = with(&ask(&"word ".repeat(700), 1), json!({"model": "default"})).to_string();
    for (path, headers, body, status, kind) in [
        (MESSAGES, String::new(), &hi, 401, "authentication_error"),
        (
            COUNT,
            "authorization: Bearer no\r\n".to_owned(),
            &hi,
            401,
            "authentication_error",
        ),
        (
            MESSAGES,
            format!("{key}origin: http://evil.example\r\n"),
            &hi,
            403,
            "permission_error",
        ),
        (MESSAGES, key.to_owned(), &hi, 404, "not_found_error"),
        (
            MESSAGES,
            key.to_owned(),
            &"{".to_owned(),
            400,
            "invalid_request_error",
        ),
        (COUNT, key.to_owned(), &big, 413, "request_too_large"),
        (
            MESSAGES,
            key.to_owned(),
            &long,
            400,
            "invalid_request_error",
        ),
        (
            "/v1/messages/batches",
            format!("{key}anthropic-version: 2023-06-01\r\n"),
            &hi,
            404,
            "not_found_error",
        ),
        (
            "/v1/models",
            format!("{key}anthropic-version: 2023-06-01\r\n"),
            &hi,
            405,
            "invalid_request_error",
        ),
    ] {
        let reply = server.send(&request(path, &headers, body.as_bytes())).await;
        assert_eq!(reply.status, status, "{path}: {reply:?}");
        assert_eq!(error(&reply)["type"], kind, "{path}");
    }
    let reply = server.send(&request(MESSAGES, key, long.as_bytes())).await;
    let told = error(&reply)["message"].as_str().unwrap().to_owned();
    assert!(
        told.starts_with("prompt is too long: this model's maximum context length is 512"),
        "{told}"
    );
    // It can be counted all the same.
    let count = server.send(&request(COUNT, key, long.as_bytes())).await;
    assert!(
        count.json()["input_tokens"].as_u64().unwrap() > 600,
        "{count:?}"
    );
    // OpenAI's paths keep OpenAI's shape.
    let reply = server
        .send(&request(
            "/v1/chat/completions",
            "anthropic-version: 1\r\n",
            b"{}",
        ))
        .await;
    assert_eq!(reply.error()["code"], "invalid_api_key");
}

#[tokio::test]
async fn a_conversation_is_not_kept_and_libraries_are_told_to_send_it() {
    let server = Server::start(Setup::default()).await;
    let created = with(&ask("Hi", 4), json!({"thread": {"type": "create"}}));
    let reply = server.post(MESSAGES, &created).await;
    assert_eq!(
        said(&reply.json()),
        said(&server.post(MESSAGES, &ask("Hi", 4)).await.json())
    );
    let go_on = json!({"thread": {"type": "continue", "previous_message_id": reply.json()["id"]}});
    let reply = server.post(MESSAGES, &with(&ask("Hi", 4), go_on)).await;
    assert_eq!(reply.status, 404);
    let error = reply.json()["error"].clone();
    assert_eq!(error["type"], "not_found_error");
    assert_eq!(error["details"], json!({"error_code": "thread_not_found"}));
}

#[tokio::test]
async fn the_model_is_listed_in_the_form_that_is_asked_for() {
    let server = Server::start(Setup::default()).await;
    let get = async |path: &str| {
        let head = format!(
            "GET {path} HTTP/1.1\r\nhost: localhost\r\nanthropic-version: 2023-06-01\r\n\r\n"
        );
        server.send(head.as_bytes()).await
    };
    let list = get("/v1/models?limit=1000").await.json();
    let model = &list["data"][0];
    assert_eq!(list["has_more"], false);
    assert_eq!(
        (&list["first_id"], &model["id"]),
        (&json!("tiny-qwen3.5"), &json!("tiny-qwen3.5"))
    );
    assert_eq!(
        (&model["type"], &model["display_name"]),
        (&json!("model"), &json!("tiny-qwen3.5"))
    );
    assert_eq!(model["max_input_tokens"], 512);
    let created = model["created_at"].as_str().unwrap();
    assert!(
        created.starts_with("20") && created.ends_with('Z') && created.len() == 20,
        "{created}"
    );
    assert_eq!(&get("/v1/models/tiny-qwen3.5").await.json(), model);
    let reply = get("/v1/models/claude").await;
    assert_eq!(
        (reply.status, &error(&reply)["type"]),
        (404, &json!("not_found_error"))
    );
    assert_eq!(
        server.get("/v1/models").await.json()["data"][0]["object"],
        "model"
    );
}

#[tokio::test]
async fn an_error_in_a_stream_is_an_event() {
    let mut setup = Setup::default();
    setup.config.limits.cancel_grace = Duration::from_millis(500);
    setup.config.limits.drain_timeout = Duration::from_millis(1);
    let mut server = Server::start(setup).await;
    let body = with(
        &ask(STORY, 400),
        json!({"stream": true, "ignore_eos": true}),
    );
    let mut exchange = server
        .open(&request(MESSAGES, "", body.to_string().as_bytes()))
        .await;
    exchange.until("content_block_delta").await;
    server.stop();
    let reply = timeout(PATIENCE, exchange.reply()).await.unwrap();
    let last = reply.body.trim_end().rsplit("\n\n").next().unwrap();
    let data = last
        .strip_prefix("event: error\ndata: ")
        .unwrap_or_else(|| panic!("{last}"));
    let data: Value = serde_json::from_str(data).unwrap();
    assert_eq!(
        data,
        json!({"type": "error", "error": {"type": "overloaded_error", "message": "the server is shutting down"}})
    );
}

#[tokio::test]
async fn a_template_without_calls_refuses_earlier_ones() {
    let server = Server::start(Setup {
        model: altered_in(
            "no-calls",
            "chat_template.jinja",
            "{{ messages[0].content }}",
        ),
        ..Setup::default()
    })
    .await;
    let reply = server.post(MESSAGES, &ask_weather()).await;
    assert!(
        error(&reply)["message"]
            .as_str()
            .unwrap()
            .starts_with("`tools` ")
    );
    let call = json!({"type": "tool_use", "id": "a", "name": "f", "input": {}});
    let list =
        json!([user(json!("Hi")), {"role": "assistant", "content": [call]}, user(json!("Hi"))]);
    let reply = server
        .post(MESSAGES, &with(&ask("Hi", 1), json!({"messages": list})))
        .await;
    assert!(
        error(&reply)["message"]
            .as_str()
            .unwrap()
            .starts_with("`messages[1].content[0]` cannot be read")
    );
    // Thoughts that the template does not read are left out, and named.
    let thought = json!({"type": "thinking", "thinking": "Hm.", "signature": ""});
    let list =
        json!([user(json!("Hi")), {"role": "assistant", "content": [thought]}, user(json!("Hi"))]);
    let reply = server
        .post(MESSAGES, &with(&ask("Hi", 1), json!({"messages": list})))
        .await;
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(
        reply.header("x-ignored-fields"),
        Some("messages[1].content[0].thinking")
    );
}

/// The requests of Claude Code's first turn with a call, as it sends them, with other texts and
/// some of its tools.
const CLAUDE_CODE: &str = include_str!("../../../../tests/clients/recorded/claude-code.json");

#[tokio::test]
async fn claude_code_s_requests_are_answered() {
    let recorded: Value = serde_json::from_str(CLAUDE_CODE).unwrap();
    for model in ["tiny-qwen3.5", "tiny-gemma4"] {
        let mut setup = Setup {
            model,
            context: 8192,
            ..Setup::default()
        };
        setup.config.keys = server::Keys::new(["none".to_owned()]);
        let server = Server::start(setup).await;
        let mut n = 0;
        for request in recorded["requests"].as_array().unwrap() {
            let path = request["path"].as_str().unwrap();
            if request["method"] == "HEAD" {
                assert_eq!(path, "/");
                continue;
            }
            // A body that such a model can answer within a test.
            let mut body = with(&request["body"], json!({"temperature": 0}));
            body["max_tokens"] = json!(60);
            let headers: String = request["headers"]
                .as_object()
                .unwrap()
                .iter()
                .filter(|(name, _)| *name != "content-type")
                .map(|(name, value)| format!("{name}: {}\r\n", value.as_str().unwrap()))
                .collect();
            let send = async |path: &str, body: &Value| {
                let body = body.to_string();
                let bytes = crate::client::request(path, &headers, body.as_bytes());
                let reply = server.send(&bytes).await;
                assert_eq!(reply.status, 200, "{reply:?}");
                reply
            };
            let reply = send(path, &body).await;
            assert_eq!(
                reply.header("x-ignored-fields"),
                Some("context_management, metadata")
            );
            let message = joined(&events(&reply));
            let count = send(&path.replace('?', "/count_tokens?"), &body)
                .await
                .json();
            let usage = &message["usage"];
            assert_eq!(
                count["input_tokens"].as_u64().unwrap(),
                usage["input_tokens"].as_u64().unwrap()
                    + usage["cache_read_input_tokens"].as_u64().unwrap()
            );
            assert!(!message["content"].as_array().unwrap().is_empty());
            // Repeated without a stream and without speculation, it is the same.
            let repeated = with(&body, json!({"stream": false, "speculation": "off"}));
            assert_eq!(said(&send(path, &repeated).await.json()), said(&message));
            // Another billing line is the same prompt.
            body["system"][0]["text"] =
                json!("x-anthropic-billing-header: cc_version=9; cc_entrypoint=cli; cch=0a1b2;");
            assert_eq!(
                said(&joined(&events(&send(path, &body).await))),
                said(&message)
            );
            n += 1;
        }
        assert_eq!(n, 2);
    }
}
