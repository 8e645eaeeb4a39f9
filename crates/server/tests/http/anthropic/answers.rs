//! What comes back: blocks, calls, reasoning, streams.

use serde_json::{Value, json};
use tokio::time::{Duration, timeout};

use super::{
    COUNT, MESSAGES, STORY, answer, ask, ask_weather, assert_fits_booking, booking, events, joined,
    said, user, weather,
};
use crate::client::{PATIENCE, Reply, Server, Setup, request};
use crate::wire::with;

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

    // The prompt and the text are those of OpenAI's chat completions.
    let chat = json!({"messages": [user(json!(STORY))], "max_tokens": 12, "temperature": 0, "seed": 7, "enable_thinking": false});
    let chat = server.chat(&chat).await.json();
    assert_eq!(block["text"], chat["choices"][0]["message"]["content"]);
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
    // A text that fills the context has not as many tokens as it may have.
    let endless = json!({"ignore_eos": true, "max_tokens": 32000});
    let full = answer(&server, &with(&ask(STORY, 1), endless)).await;
    assert_eq!(full["stop_reason"], "model_context_window_exceeded");
    let written = full["usage"]["output_tokens"].as_u64().unwrap();
    assert_eq!(
        written + full["usage"]["input_tokens"].as_u64().unwrap(),
        512
    );

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
async fn an_error_in_a_stream_is_an_event() {
    let mut setup = Setup {
        context: 8 << 10,
        ..Setup::default()
    };
    setup.config.limits.cancel_grace = PATIENCE;
    setup.config.limits.drain_timeout = Duration::from_millis(1);
    let mut server = Server::start(setup).await;
    let body = with(
        &ask(STORY, 8000),
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
