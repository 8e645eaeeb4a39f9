//! Calls over the Responses API, and the requests of Codex.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{
    RESPONSES, ask, assembled, bare, events, respond, same_every_way, server, text, weather,
};
use crate::client::{Server, Setup};
use crate::wire::with;

#[tokio::test]
async fn a_model_calls_and_goes_on_from_the_result() {
    for model in ["tiny-qwen3.5", "tiny-gemma4"] {
        let server = server(model).await;
        let first = same_every_way(&server, &ask()).await;
        let [call] = &first["output"].as_array().unwrap()[..] else {
            panic!("one call: {first}");
        };
        assert_eq!(
            (&call["type"], &call["name"]),
            (&json!("function_call"), &json!("get_weather"))
        );
        assert!(call["id"].as_str().unwrap().starts_with("fc_"));
        assert!(call["call_id"].as_str().unwrap().starts_with("call_"));
        assert_eq!(
            call["arguments"].as_str().unwrap().replace(' ', ""),
            r#"{"city":"Rome"}"#
        );
        assert_eq!(first["tools"][0]["strict"], false);
        let result = json!({"type": "function_call_output", "call_id": call["call_id"],
            "output": "{\"temperature\": 21, \"sky\": \"sunny\"}"});
        // Everything sent again, only what is new, and the call by reference.
        let user = json!({"role": "user", "content": "What is the weather in Rome?"});
        let mut said = Vec::new();
        let reference = json!({"type": "item_reference", "id": call["id"]});
        for more in [
            json!({"input": [user, call, result]}),
            json!({"input": [result], "previous_response_id": first["id"]}),
            json!({"input": [user, reference, result]}),
            json!({"input": [user, {"id": call["id"]}, result], "store": false}),
        ] {
            let next = same_every_way(&server, &with(&ask(), more)).await;
            assert!(text(&next).contains("21"), "{model}: {next}");
            said.push((text(&next), next["usage"]["input_tokens"].clone()));
        }
        assert!(said.windows(2).all(|pair| pair[0] == pair[1]), "{said:?}");
        // As the chat has it.
        let function = json!({"name": "get_weather", "arguments": call["arguments"]});
        let mut tool = json!({"type": "function", "function": weather()});
        tool["function"].as_object_mut().unwrap().remove("type");
        let chat = json!({"tools": [tool], "temperature": 0, "max_tokens": 100, "messages": [
            user, {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "c", "content": result["output"]}]});
        let chat = server.chat(&chat).await;
        assert_eq!(chat.text(), said[0].0);
        assert_eq!(chat.json()["usage"]["prompt_tokens"], said[0].1);
    }
}

#[tokio::test]
async fn calls_that_must_come_come_and_others_cannot() {
    for model in ["tiny-qwen3.5", "tiny-gemma4"] {
        let server = server(model).await;
        let other = json!({"type": "function", "name": "tell_time", "strict": true, "parameters": {
            "type": "object", "properties": {"zone": {"enum": ["utc", "local"]}}, "required": ["zone"], "additionalProperties": false}});
        let named = json!({"type": "function", "name": "tell_time"});
        let allowed = |mode: &str| json!({"type": "allowed_tools", "mode": mode, "tools": [named, {"type": "web_search"}]});
        for (choice, name) in [
            (json!("required"), None),
            (named.clone(), Some("tell_time")),
            (allowed("required"), Some("tell_time")),
        ] {
            let body = json!({"tools": [{"type": "web_search"}, weather(), other], "tool_choice": choice,
                "max_output_tokens": 400, "temperature": 0.8, "seed": 2, "parallel_tool_calls": false});
            let response = same_every_way(&server, &with(&ask(), body)).await;
            let calls = response["output"].as_array().unwrap();
            assert_eq!(calls.len(), 1, "{model} {choice}: {response}");
            let arguments: Value =
                serde_json::from_str(calls[0]["arguments"].as_str().unwrap()).unwrap();
            match calls[0]["name"].as_str().unwrap() {
                "tell_time" => {
                    assert!(["utc", "local"].contains(&arguments["zone"].as_str().unwrap()))
                }
                _ => assert!(arguments["city"].is_string() && name.is_none()),
            }
            assert_eq!(response["status"], "completed");
            assert_eq!(response["tool_choice"], choice);
            assert_eq!(response["tools"].as_array().unwrap().len(), 2);
            assert_eq!(response["parallel_tool_calls"], false);
        }
        // What may be called alone is all that the model is told of.
        let few = json!({"tools": [weather(), other], "tool_choice": allowed("auto")});
        let few = respond(&server, &with(&ask(), few)).await;
        let one = respond(&server, &with(&ask(), json!({"tools": [other]}))).await;
        assert_eq!(few["usage"]["input_tokens"], one["usage"]["input_tokens"]);
        // Where nothing may be called nothing is offered.
        let nothing =
            json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]});
        let nothing = respond(&server, &with(&ask(), json!({"tool_choice": nothing}))).await;
        let plain = respond(&server, &with(&ask(), json!({"tools": []}))).await;
        assert_eq!(
            nothing["usage"]["input_tokens"],
            plain["usage"]["input_tokens"]
        );
        let none = respond(&server, &with(&ask(), json!({"tool_choice": "none"}))).await;
        assert_eq!(none["output"][0]["type"], "message");
    }
}

#[tokio::test]
async fn calls_of_one_answer_are_counted() {
    let server = server("tiny-qwen3.5").await;
    let endless = with(&ask(), json!({"ignore_eos": true, "max_output_tokens": 60}));
    for more in [
        json!({"parallel_tool_calls": false}),
        json!({"max_tool_calls": 1}),
    ] {
        let response = same_every_way(&server, &with(&endless, more)).await;
        assert_eq!(response["status"], "completed");
        assert_eq!(response["output"].as_array().unwrap().len(), 1);
    }
}

#[tokio::test]
async fn a_call_that_is_cut_off_is_taken_back_and_shown_as_text() {
    for model in ["tiny-qwen3.5", "tiny-gemma4"] {
        let server = server(model).await;
        let whole = respond(&server, &ask()).await["usage"]["output_tokens"]
            .as_u64()
            .unwrap();
        let mut n_taken_back = 0;
        for most in 1..whole {
            let body = with(&ask(), json!({"max_output_tokens": most}));
            let response = same_every_way(&server, &body).await;
            assert!(
                response["status"] == "incomplete"
                    || response["output"][0]["type"] == "function_call"
            );
            let reply = server
                .post(RESPONSES, &with(&body, json!({"stream": true})))
                .await;
            let all = events(&reply);
            let items = assembled(&all);
            let is_broken =
                |item: &&Value| item["type"] == "function_call" && item["status"] == "incomplete";
            n_taken_back += items.iter().filter(is_broken).count();
            let chat = json!({"type": "function", "function": {"name": "get_weather",
                "description": weather()["description"], "parameters": weather()["parameters"]}});
            let chat = json!({"messages": [{"role": "user", "content": ask()["input"]}], "tools": [chat], "temperature": 0, "max_tokens": most});
            assert_eq!(
                server.chat(&chat).await.text(),
                text(&response),
                "{model} {most}"
            );
        }
        assert!(n_taken_back > 2, "{model}: {n_taken_back}");
    }
}

#[tokio::test]
async fn codex_is_answered() {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/clients/recorded/codex.json");
    let recorded: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let body = |i: usize| recorded["requests"][i]["body"].clone();
    for model in ["tiny-qwen3.5", "tiny-gemma4"] {
        let server = Server::start(Setup {
            model,
            context: 4096,
            chunk: 256,
            ..Setup::default()
        })
        .await;
        for i in [0, 1] {
            let bounded = with(&body(i), json!({"max_output_tokens": 100, "seed": 1}));
            let reply = server.post(RESPONSES, &bounded).await;
            let ignored = reply.header("x-ignored-fields").unwrap().to_owned();
            assert_eq!(
                ignored,
                "client_metadata, reasoning.summary, tools[4], tools[8]"
            );
            let all = events(&reply);
            assert_eq!(all[0]["response"]["store"], false);
            assert!(all[0]["response"]["tools"].as_array().unwrap().len() == 7);
            let last = &all.last().unwrap()["response"];
            assert!(!last["output"].as_array().unwrap().is_empty());
            let off = with(&bounded, json!({"speculation": "off", "stream": false}));
            assert_eq!(
                bare(&respond(&server, &off).await["output"]),
                bare(&last["output"])
            );
        }
        // A whole turn, with a call that the model makes if it must; a small model may write one
        // without end.
        let mut made = None;
        for seed in 0..40 {
            let must = json!({"tool_choice": {"type": "function", "name": "exec_command"},
                "max_output_tokens": 200, "temperature": 1.2, "seed": seed, "thinking_budget": 16});
            let all = events(&server.post(RESPONSES, &with(&body(0), must)).await);
            let items = all.last().unwrap()["response"]["output"].clone();
            let mut items = items.as_array().unwrap().iter();
            made = items.find(|item| item["type"] == "function_call").cloned();
            if made.is_some() {
                break;
            }
        }
        let mut call = made.expect(model);
        assert_eq!(call["name"], "exec_command", "{model}");
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        assert!(arguments["cmd"].is_string());
        // As Codex sends it back.
        call.as_object_mut().unwrap().remove("status");
        let mut next = body(1);
        let input = next["input"].as_array_mut().unwrap();
        let n = input.len();
        input[n - 1]["call_id"] = call["call_id"].clone();
        input[n - 2] = call;
        let all = events(
            &server
                .post(RESPONSES, &with(&next, json!({"max_output_tokens": 40})))
                .await,
        );
        let usage = &all.last().unwrap()["response"]["usage"];
        assert!(usage["total_tokens"].is_u64());
    }
}
