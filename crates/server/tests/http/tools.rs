//! Tools: calls of the bundled models, which were trained to call, whole and streamed.

use serde_json::{Value, json};

use crate::client::{Server, Setup, altered_in};
use crate::wire::with;

/// A tool that the bundled models know.
fn weather() -> Value {
    json!({"type": "function", "function": {
        "name": "get_weather", "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {
            "city": {"type": "string", "description": "The name of the city."}}, "required": ["city"]}}})
}

fn ask() -> Value {
    json!({
        "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
        "tools": [weather()], "temperature": 0, "max_tokens": 100,
    })
}

/// What a client puts together from the chunks of a stream, and how it ended.
pub(crate) fn joined(events: &[Value]) -> (Value, String) {
    let mut message = json!({"content": ""});
    let mut finish = String::new();
    for event in events {
        let Some(choice) = event["choices"].get(0) else {
            continue;
        };
        if let Some(reason) = choice["finish_reason"].as_str() {
            finish = reason.to_owned();
        }
        let delta = &choice["delta"];
        for name in ["content", "reasoning_content"] {
            if let Some(text) = delta[name].as_str() {
                let old = message[name].as_str().unwrap_or_default().to_owned();
                message[name] = json!(old + text);
            }
        }
        let append = |function: &mut Value, delta: &Value| {
            if function.is_null() {
                assert_eq!(delta["arguments"], "", "the name comes alone");
                *function = delta.clone();
            } else {
                assert!(delta.get("name").is_none(), "the name comes once");
                let old = function["arguments"].as_str().unwrap().to_owned();
                function["arguments"] = json!(old + delta["arguments"].as_str().unwrap());
            }
        };
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().unwrap() as usize;
            if message["tool_calls"].get(index).is_none() {
                let head = json!({"id": call["id"], "type": call["type"], "function": null});
                match &mut message["tool_calls"] {
                    Value::Array(calls) => calls.push(head),
                    none => *none = json!([head]),
                }
            } else {
                assert!(call.get("id").is_none() && call.get("type").is_none());
            }
            append(
                &mut message["tool_calls"][index]["function"],
                &call["function"],
            );
        }
        if let Some(call) = delta.get("function_call") {
            append(&mut message["function_call"], call);
        }
    }
    (message, finish)
}

#[tokio::test]
async fn a_model_calls_and_goes_on_from_the_result() {
    for model in ["tiny-qwen3.5", "tiny-gemma4"] {
        let server = Server::start(Setup {
            model,
            ..Setup::default()
        })
        .await;
        let body = server.chat(&ask()).await.json();
        let choice = &body["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{model}: {choice}");
        let message = &choice["message"];
        assert_eq!(message["content"], Value::Null, "{model}");
        let [call] = &message["tool_calls"].as_array().unwrap()[..] else {
            panic!("one call: {message}");
        };
        assert_eq!(call["type"], "function");
        assert!(call["id"].as_str().unwrap().starts_with("call_"));
        assert_eq!(call["function"]["name"], "get_weather");
        let arguments = call["function"]["arguments"].as_str().unwrap();
        assert_eq!(
            serde_json::from_str::<Value>(arguments).unwrap(),
            json!({"city": "Rome"})
        );
        assert_eq!(body["speculation"]["engaged"], true);
        let usage = &body["usage"];
        assert!(usage["completion_tokens"].as_u64().unwrap() > 5);

        // Streamed, and without speculation: the same.
        for more in [
            json!({"stream": true}),
            json!({"stream": true, "speculation": "off"}),
        ] {
            let events = server.chat(&with(&ask(), more)).await.events();
            let (streamed, finish) = joined(&events);
            assert_eq!(finish, "tool_calls");
            assert_eq!(streamed["content"], "");
            let [same] = &streamed["tool_calls"].as_array().unwrap()[..] else {
                panic!("one call: {streamed}");
            };
            assert_eq!(same["function"], call["function"]);
            assert_ne!(same["id"], call["id"]);
            assert_eq!(
                events.last().unwrap()["timings"]["predicted_n"],
                usage["completion_tokens"]
            );
        }

        // The next turn has the call and its result.
        let result = json!({"role": "tool", "tool_call_id": call["id"],
            "content": "{\"temperature\": 21, \"sky\": \"sunny\"}"});
        let mut next = ask();
        let messages = next["messages"].as_array_mut().unwrap();
        messages.extend([message.clone(), result]);
        let body = server.chat(&next).await.json();
        let choice = &body["choices"][0];
        assert_eq!(choice["finish_reason"], "stop");
        let said = choice["message"]["content"].as_str().unwrap();
        assert!(said.contains("21"), "{model}: {said}");
        assert!(choice["message"].get("tool_calls").is_none());
    }
}

#[tokio::test]
async fn calls_by_the_older_names_are_answered_by_them() {
    let server = Server::start(Setup::default()).await;
    let mut body = ask();
    let tool = body.as_object_mut().unwrap().remove("tools").unwrap();
    body["functions"] = json!([tool[0]["function"]]);
    let choice = server.chat(&body).await.json()["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "function_call", "{choice}");
    let call = &choice["message"]["function_call"];
    assert_eq!(call["name"], "get_weather");
    assert!(choice["message"].get("tool_calls").is_none());
    let (streamed, finish) = joined(
        &server
            .chat(&with(&body, json!({"stream": true})))
            .await
            .events(),
    );
    assert_eq!(
        (&streamed["function_call"], finish.as_str()),
        (call, "function_call")
    );
    // The next turn is the same prompt as by the newer names.
    let messages = |call: Value, result: Value| {
        let user = json!({"role": "user", "content": "What is the weather in Rome?"});
        json!([
            user,
            with(&json!({"role": "assistant", "content": null}), call),
            result
        ])
    };
    let older = messages(
        json!({"function_call": call}),
        json!({"role": "function", "name": "get_weather", "content": "rain"}),
    );
    let newer = messages(
        json!({"tool_calls": [{"id": "c", "type": "function", "function": call}]}),
        json!({"role": "tool", "tool_call_id": "c", "content": "rain"}),
    );
    let older = server
        .chat(&with(&body, json!({"messages": older})))
        .await
        .json();
    let newer = server
        .chat(&with(&ask(), json!({"messages": newer})))
        .await
        .json();
    assert_eq!(
        older["choices"][0]["message"]["content"],
        newer["choices"][0]["message"]["content"]
    );
    assert_eq!(
        older["usage"]["prompt_tokens"],
        newer["usage"]["prompt_tokens"]
    );
}

#[tokio::test]
async fn tools_that_are_declined_are_left_out() {
    let server = Server::start(Setup::default()).await;
    let mut plain = ask();
    plain.as_object_mut().unwrap().remove("tools");
    let expected = server.chat(&plain).await;
    for more in [
        json!({"tools": [weather()], "tool_choice": "none"}),
        json!({"functions": [{"name": "f"}], "function_call": "none"}),
        json!({"tools": [], "tool_choice": "auto", "parallel_tool_calls": false}),
    ] {
        let reply = server.chat(&with(&plain, more.clone())).await;
        assert_eq!(reply.text(), expected.text(), "{more}");
        assert_eq!(
            reply.json()["usage"]["prompt_tokens"],
            expected.json()["usage"]["prompt_tokens"]
        );
        let offered = more.as_object().unwrap().keys().next().unwrap();
        let is_declined = more.as_object().unwrap().values().any(|v| v == "none");
        let ignored = reply.header("x-ignored-fields");
        assert_eq!(ignored, is_declined.then_some(offered.as_str()), "{more}");
    }
}

#[tokio::test]
async fn the_text_ends_after_the_only_call_that_it_may_have() {
    let server = Server::start(Setup::default()).await;
    // The model would write on after its call.
    let endless = with(&ask(), json!({"ignore_eos": true, "max_tokens": 60}));
    let many = server.chat(&endless).await.json();
    assert_eq!(many["choices"][0]["finish_reason"], "length");
    assert_eq!(many["usage"]["completion_tokens"], 60);
    let one = with(&endless, json!({"parallel_tool_calls": false}));
    for more in [json!({}), json!({"speculation": "off"})] {
        let body = server.chat(&with(&one, more)).await.json();
        let choice = &body["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls");
        assert_eq!(choice["message"]["content"], Value::Null);
        assert_eq!(choice["message"]["tool_calls"].as_array().unwrap().len(), 1);
        let whole = server.chat(&ask()).await.json();
        assert_eq!(
            body["usage"]["completion_tokens"],
            whole["usage"]["completion_tokens"]
        );
    }
}

#[tokio::test]
async fn offers_that_cannot_be_read_are_named() {
    let server = Server::start(Setup::default()).await;
    let function = |more: Value| {
        let base = json!({"name": "f", "parameters": {"type": "object"}});
        json!([{"type": "function", "function": with(&base, more)}])
    };
    let many: Vec<Value> = (0..129)
        .map(|i| function(json!({"name": format!("f{i}")}))[0].clone())
        .collect();
    let long = "x".repeat(513 << 10);
    for (param, more) in [
        ("tools", json!({"tools": {}})),
        ("tools", json!({"tools": many})),
        (
            "tools",
            json!({"tools": function(json!({"description": long}))}),
        ),
        ("tools[0]", json!({"tools": ["f"]})),
        (
            "tools[0].type",
            json!({"tools": [{"function": {"name": "f"}}]}),
        ),
        (
            "tools[1].type",
            json!({"tools": [weather(), {"type": "web_search"}]}),
        ),
        (
            "tools[0].function",
            json!({"tools": [{"type": "function"}]}),
        ),
        (
            "tools[0].function",
            json!({"tools": [{"type": "function", "function": "f"}]}),
        ),
        (
            "tools[0].function.name",
            json!({"tools": [{"type": "function", "function": {}}]}),
        ),
        (
            "tools[0].function.name",
            json!({"tools": function(json!({"name": "a b"}))}),
        ),
        (
            "tools[0].function.name",
            json!({"tools": function(json!({"name": ""}))}),
        ),
        (
            "tools[0].function.name",
            json!({"tools": function(json!({"name": 1}))}),
        ),
        (
            "tools[1].function.name",
            json!({"tools": [weather(), weather()]}),
        ),
        (
            "tools[0].function.description",
            json!({"tools": function(json!({"description": 1}))}),
        ),
        (
            "tools[0].function.parameters",
            json!({"tools": function(json!({"parameters": []}))}),
        ),
        (
            "tools[0].function.strict",
            json!({"tools": function(json!({"strict": 1}))}),
        ),
        ("tool_choice", json!({"tool_choice": "sometimes"})),
        ("tool_choice", json!({"tool_choice": 1})),
        (
            "tool_choice",
            json!({"tool_choice": {"type": "allowed_tools"}}),
        ),
        (
            "tool_choice",
            json!({"tool_choice": {"type": "function", "function": {"name": "other"}}}),
        ),
        (
            "tool_choice",
            json!({"tools": [], "tool_choice": "required"}),
        ),
        ("parallel_tool_calls", json!({"parallel_tool_calls": "no"})),
        ("functions", json!({"functions": [{"name": "f"}]})),
        ("functions[0].name", json!({"tools": [], "functions": [{}]})),
        (
            "function_call",
            json!({"tools": [], "functions": [{"name": "f"}], "function_call": "required"}),
        ),
        // What a call cannot be held to.
        (
            "tools[0].function.strict",
            json!({"tools": function(json!({"strict": true, "parameters": {
                "type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}}))}),
        ),
        (
            "response_format",
            json!({"tool_choice": "required", "response_format": {"type": "json_object"}}),
        ),
        ("regex", json!({"regex": "a"})),
    ] {
        let reply = server.chat(&with(&ask(), more.clone())).await;
        let shown = format!("{more:.200}");
        assert_eq!(reply.status, 400, "{shown}");
        assert_eq!(reply.error()["param"], param, "{shown}");
    }
    let unknown = json!({"tools": [{"type": "web_search", "user_location": {}}]});
    let error = server.chat(&with(&ask(), unknown)).await.error();
    assert_eq!(error["code"], "unsupported_parameter");
    assert!(
        error["message"].as_str().unwrap().contains("`web_search`"),
        "{error}"
    );
    // What nobody reads is named.
    let tool = json!([with(
        &function(json!({"strict": false, "odd": 1, "parameters": null}))[0],
        json!({"extra": 1})
    )]);
    let reply = server.chat(&with(&ask(), json!({"tools": tool}))).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(
        reply.header("x-ignored-fields"),
        Some("tools[0].extra, tools[0].function.odd")
    );
}

#[tokio::test]
async fn a_template_without_tools_cannot_offer_any() {
    let server = Server::start(Setup {
        model: altered_in(
            "no-tools",
            "chat_template.jinja",
            "{{ messages[0].content }}",
        ),
        ..Setup::default()
    })
    .await;
    let reply = server.chat(&ask()).await;
    assert_eq!(
        (reply.status, &reply.error()["param"]),
        (400, &json!("tools"))
    );
    let declined = with(&ask(), json!({"tool_choice": "none"}));
    assert_eq!(server.chat(&declined).await.status, 200);
}

/// A tool of several kinds of arguments.
fn booking() -> Value {
    json!({"type": "function", "function": {"name": "book_table", "parameters": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 10},
            "guests": {"type": "integer", "minimum": 1, "maximum": 9},
            "outside": {"type": "boolean"},
            "courses": {"type": "array", "items": {"enum": ["soup", "fish"]}, "minItems": 1, "maxItems": 2},
        },
        "required": ["name", "guests", "outside", "courses"],
        "additionalProperties": false,
    }}})
}

/// Asserts that `call` is one of [`weather`] or [`booking`], and fits.
fn assert_fits(call: &Value, what: &str) {
    let arguments = call["function"]["arguments"].as_str().expect(what);
    let arguments: Value = serde_json::from_str(arguments).expect(what);
    match call["function"]["name"].as_str().unwrap() {
        "get_weather" => assert!(arguments["city"].is_string(), "{what}"),
        "book_table" => {
            let guests = arguments["guests"].as_u64().expect(what);
            let name = arguments["name"].as_str().expect(what);
            let courses = arguments["courses"].as_array().expect(what);
            assert!(
                (1..=9).contains(&guests) && name.chars().count() <= 10,
                "{what}"
            );
            assert!(arguments["outside"].is_boolean(), "{what}");
            assert!((1..=2).contains(&courses.len()), "{what}");
            assert!(courses.iter().all(|c| c == "soup" || c == "fish"), "{what}");
            assert_eq!(arguments.as_object().unwrap().len(), 4, "{what}");
        }
        other => panic!("no such tool: {other} in {what}"),
    }
}

#[tokio::test]
async fn calls_that_must_come_come_and_fit_with_speculation_as_without() {
    for model in ["tiny-gemma4", "tiny-qwen3.5"] {
        let server = Server::start(Setup {
            model,
            context: 2048,
            ..Setup::default()
        })
        .await;
        let named = json!({"type": "function", "function": {"name": "book_table"}});
        for (choice, parallel) in [
            (json!("required"), true),
            (json!("required"), false),
            (named, true),
        ] {
            for temperature in [0.0, 0.8, 1.5] {
                let mut body = with(
                    &ask(),
                    json!({
                        "tools": [weather(), booking()], "tool_choice": choice, "max_tokens": 600,
                        "parallel_tool_calls": parallel, "temperature": temperature, "seed": 5,
                    }),
                );
                let reply = server.chat(&body).await.json();
                let what = format!("{model} {choice} {parallel} {temperature}: {reply}");
                let answer = &reply["choices"][0];
                let calls = answer["message"]["tool_calls"].as_array().expect(&what);
                assert!(!calls.is_empty(), "{what}");
                if answer["finish_reason"] != "length" {
                    assert_eq!(answer["finish_reason"], "tool_calls", "{what}");
                    calls.iter().for_each(|call| assert_fits(call, &what));
                }
                if !parallel || choice.is_object() {
                    assert_eq!(calls.len(), 1, "{what}");
                    assert_ne!(answer["finish_reason"], "length", "{what}");
                }
                if choice.is_object() {
                    assert_eq!(calls[0]["function"]["name"], "book_table", "{what}");
                }
                assert_eq!(answer["message"]["content"], Value::Null, "{what}");
                assert!(
                    reply["speculation"]["forced"].as_u64().unwrap() > 0,
                    "{what}"
                );

                body["speculation"] = json!("off");
                let plain = server.chat(&body).await.json();
                let functions = |reply: &Value| -> Vec<Value> {
                    let calls = reply["choices"][0]["message"]["tool_calls"].as_array();
                    calls
                        .unwrap()
                        .iter()
                        .map(|call| call["function"].clone())
                        .collect()
                };
                assert_eq!(functions(&plain), functions(&reply), "{what}");
            }
        }
    }
}

#[tokio::test]
async fn a_strict_tool_s_calls_fit_and_text_stays_free() {
    for model in ["tiny-gemma4", "tiny-qwen3.5"] {
        let server = Server::start(Setup {
            model,
            context: 1024,
            ..Setup::default()
        })
        .await;
        let mut tool = weather();
        tool["function"]["strict"] = json!(true);
        tool["function"]["parameters"]["additionalProperties"] = json!(false);
        let body = with(&ask(), json!({"tools": [tool]}));
        let reply = server.chat(&body).await.json();
        let call = &reply["choices"][0]["message"]["tool_calls"][0];
        assert_fits(call, &reply.to_string());
        let body = with(
            &body,
            json!({"messages": [{"role": "user", "content": "Tell me a story about a kite."}]}),
        );
        let free = server.chat(&body).await.json();
        let text = free["choices"][0]["message"]["content"].as_str();
        assert!(text.is_some_and(|text| text.len() > 20), "{free}");
    }
}

#[tokio::test]
async fn a_model_may_call_or_answer_in_json() {
    let server = Server::start(Setup {
        context: 1024,
        ..Setup::default()
    })
    .await;
    let schema = json!({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false});
    let format =
        json!({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}});
    let reply = server.chat(&with(&ask(), format)).await.json();
    let message = &reply["choices"][0]["message"];
    match message["tool_calls"].get(0) {
        Some(call) => assert_fits(call, &reply.to_string()),
        None => {
            let text = message["content"].as_str().unwrap();
            assert!(
                ["{\"a\": true}", "{\"a\": false}"]
                    .contains(&&*text.replace(":t", ": t").replace(":f", ": f"))
            );
        }
    }
}
