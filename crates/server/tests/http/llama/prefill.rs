//! An answer that goes on from the last message.

use serde_json::{Value, json};

use super::{ask, with};
use crate::client::{Server, Setup};

const CHAT: &str = "/v1/chat/completions";
/// What the models' turns begin with, without reasoning.
const TURNS: [(&str, &str); 2] = [
    (
        "tiny-qwen3.5",
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    ("tiny-gemma4", "<|turn>model\n"),
];

async fn start(model: &'static str) -> Server {
    Server::start(Setup {
        model,
        ..Setup::default()
    })
    .await
}

/// A conversation that ends with `last`, and the fields of `more`.
fn chat(last: Value, more: &Value) -> Value {
    let user = json!({"role": "user", "content": "Tell me a story about a rabbit."});
    let body =
        json!({"messages": [user, last], "max_tokens": 16, "temperature": 0, "verbose": true});
    with(body, more)
}

fn said(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

fn prompt(answer: &Value) -> String {
    answer["__verbose"]["prompt"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn an_answer_goes_on_from_a_last_message_of_the_assistant() {
    for (model, turn) in TURNS {
        let server = start(model).await;
        for (beginning, more) in [
            ("Once upon a time", json!({})),
            (
                "Once upon ",
                json!({"continue_final_message": true, "add_generation_prompt": false}),
            ),
            ("Once", json!({"continue_final_message": "content"})),
            ("", json!({"continue_final_message": true})),
            ("a <|im_end|> b <turn|>", json!({})),
        ] {
            let answer = ask(&server, CHAT, &chat(said(beginning), &more)).await;
            let prompt = prompt(&answer);
            assert!(
                prompt.ends_with(&format!("{turn}{beginning}")),
                "{model} {prompt:?}"
            );
            let message = &answer["choices"][0]["message"];
            // What only looks like the end of a turn is text, which no plain prompt can say.
            if !beginning.contains('|') {
                let plain = json!({"prompt": prompt, "n_predict": 16, "temperature": 0});
                let plain = ask(&server, "/completion", &plain).await;
                assert_eq!(plain["tokens_evaluated"], answer["usage"]["prompt_tokens"]);
                assert_eq!(
                    message["content"], plain["content"],
                    "{model} {beginning:?}"
                );
            }
            let body = chat(said(beginning), &with(more, &json!({"stream": true})));
            let chunks = server.post(CHAT, &body).await;
            assert_eq!(json!(chunks.text()), message["content"]);
        }
        let parts = json!({"role": "assistant", "content": [{"type": "text", "text": "On"}, {"type": "text", "text": "ce"}]});
        let answer = ask(&server, CHAT, &chat(parts, &json!({}))).await;
        assert!(prompt(&answer).ends_with(&format!("{turn}Once")));
    }
}

#[tokio::test]
async fn a_turn_of_its_own_is_had_for_the_asking() {
    let settings = |whole_assistant_turns| server::ModelConfig {
        whole_assistant_turns,
        ..server::ModelConfig::default()
    };
    for (by_default, more, is_own) in [
        (false, json!({}), false),
        (false, json!({"continue_final_message": false}), true),
        (false, json!({"add_generation_prompt": true}), true),
        (true, json!({}), true),
        (true, json!({"continue_final_message": true}), false),
    ] {
        let server = Server::start(Setup {
            settings: settings(by_default),
            ..Setup::default()
        })
        .await;
        let answer = ask(&server, CHAT, &chat(said("Once"), &more)).await;
        let own_turn = "Once<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
        assert_eq!(
            prompt(&answer).ends_with(own_turn),
            is_own,
            "{by_default} {more}"
        );
        assert_eq!(prompt(&answer).ends_with("\n\nOnce"), !is_own);
    }
    // Calls are answered by their results, and never gone on from unasked.
    let server = start("tiny-qwen3.5").await;
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let calls = json!({"role": "assistant", "content": "", "tool_calls": [call]});
    let answer = ask(&server, CHAT, &chat(calls, &json!({}))).await;
    assert!(prompt(&answer).ends_with("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
}

#[tokio::test]
async fn a_grammar_begins_where_the_answer_goes_on() {
    for (model, _) in TURNS {
        let server = start(model).await;
        for thinking in [json!({}), json!({"enable_thinking": true})] {
            let more = json!({"grammar": "root ::= \"xyz\"", "max_tokens": 60});
            let answer = ask(
                &server,
                CHAT,
                &chat(said("The answer is "), &with(more, &thinking)),
            )
            .await;
            let message = &answer["choices"][0]["message"];
            assert_eq!(message["content"], "xyz", "{model} {thinking}");
            assert!(message.get("reasoning_content").is_none(), "{message}");
        }
        let schema =
            json!({"type": "array", "items": {"enum": [17, 18]}, "minItems": 1, "maxItems": 1});
        let more =
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}});
        let on = chat(
            said("List: "),
            &with(
                more,
                &json!({"temperature": 0.8, "seed": 5, "max_tokens": 40}),
            ),
        );
        let off = with(on.clone(), &json!({"speculation": "off"}));
        let [on, off] = [
            ask(&server, CHAT, &on).await,
            ask(&server, CHAT, &off).await,
        ];
        let content = on["choices"][0]["message"]["content"].clone();
        assert_eq!(content, off["choices"][0]["message"]["content"]);
        assert!(
            serde_json::from_str::<Vec<i64>>(content.as_str().unwrap()).is_ok(),
            "{content}"
        );
    }
}

#[tokio::test]
async fn reasoning_goes_on_as_reasoning() {
    for (model, opened) in [
        ("tiny-qwen3.5", "<think>\nLet me see"),
        ("tiny-gemma4", "<|channel>thought\nLet me see"),
    ] {
        let server = start(model).await;
        let thought =
            json!({"role": "assistant", "content": "", "reasoning_content": "Let me see"});
        for more in [
            json!({}),
            json!({"continue_final_message": "reasoning_content"}),
        ] {
            let more = with(more, &json!({"enable_thinking": true, "ignore_eos": true}));
            let answer = ask(&server, CHAT, &chat(thought.clone(), &more)).await;
            assert!(prompt(&answer).ends_with(opened), "{}", prompt(&answer));
            let message = &answer["choices"][0]["message"];
            assert!(message["reasoning_content"].is_string(), "{message}");
            // The white space after the beginning is part of what goes on.
            let plain = json!({"prompt": prompt(&answer), "n_predict": 16, "temperature": 0, "ignore_eos": true});
            let plain = ask(&server, "/completion", &plain).await;
            let plain = plain["content"].as_str().unwrap();
            let told = message["reasoning_content"].as_str().unwrap();
            assert!(
                plain.starts_with(told) && !told.is_empty(),
                "{plain:?} {told:?}"
            );
        }
        // A budget closes reasoning that goes on too, and a grammar begins after it.
        let more = json!({"enable_thinking": true, "thinking_budget": 3, "grammar": "root ::= \"xyz\"", "max_tokens": 60});
        let answer = ask(&server, CHAT, &chat(thought, &more)).await;
        assert_eq!(
            answer["choices"][0]["message"]["content"], "xyz",
            "{model} {answer}"
        );
    }
}

#[tokio::test]
async fn what_cannot_go_on_is_refused() {
    let server = start("tiny-qwen3.5").await;
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let calls = json!({"role": "assistant", "content": "", "tool_calls": [call]});
    let user = json!({"role": "user", "content": "Hi"});
    for (last, more, param) in [
        (
            user.clone(),
            json!({"continue_final_message": true}),
            "continue_final_message",
        ),
        (
            calls,
            json!({"continue_final_message": true}),
            "continue_final_message",
        ),
        (
            said("a"),
            json!({"continue_final_message": true, "add_generation_prompt": true}),
            "continue_final_message",
        ),
        (
            said("a"),
            json!({"continue_final_message": "reasoning"}),
            "continue_final_message",
        ),
        (
            said("a"),
            json!({"add_generation_prompt": 1}),
            "add_generation_prompt",
        ),
        (
            user.clone(),
            json!({"add_generation_prompt": false}),
            "add_generation_prompt",
        ),
        (
            said("a"),
            json!({"continue_final_message": false, "add_generation_prompt": false}),
            "add_generation_prompt",
        ),
    ] {
        let reply = server.post(CHAT, &chat(last, &more)).await;
        assert_eq!(reply.status, 400, "{more}");
        assert_eq!(reply.error()["param"], param, "{more}");
    }
    let two = json!({"messages": [user, said("a"), said("b")], "max_tokens": 1});
    let told = server.post(CHAT, &two).await.error();
    assert_eq!(told["param"], "messages[2]");
    let own = with(two, &json!({"continue_final_message": false}));
    assert_eq!(server.post(CHAT, &own).await.status, 200);
}

#[tokio::test]
async fn messages_go_on_from_the_assistant_s_last_one() {
    for (model, _) in TURNS {
        let server = start(model).await;
        let user = json!({"role": "user", "content": "Tell me a story about a rabbit."});
        for last in [
            said("Once upon a time"),
            json!({"role": "assistant", "content": [{"type": "text", "text": "Once upon a time"}]}),
        ] {
            let body = json!({"messages": [user, last], "max_tokens": 16, "temperature": 0});
            let answer = ask(&server, "/v1/messages", &body).await;
            let same = chat(said("Once upon a time"), &json!({"enable_thinking": false}));
            let same = ask(&server, CHAT, &same).await;
            assert_eq!(
                answer["content"][0]["text"],
                same["choices"][0]["message"]["content"]
            );
            let usage = &answer["usage"];
            let n = usage["input_tokens"].as_u64().unwrap()
                + usage["cache_read_input_tokens"].as_u64().unwrap();
            assert_eq!(n, same["usage"]["prompt_tokens"]);
            let count = ask(&server, "/v1/messages/count_tokens", &body).await;
            assert_eq!(count["input_tokens"], n);
        }
        let tool = json!({"type": "tool_use", "id": "t", "name": "f", "input": {}});
        for (messages, path) in [
            (json!([user, said("a"), said("b")]), "messages[2]"),
            (
                json!([user, {"role": "assistant", "content": [tool]}]),
                "messages",
            ),
        ] {
            let body = json!({"messages": messages, "max_tokens": 1});
            let reply = server.post("/v1/messages", &body).await;
            assert_eq!(reply.status, 400);
            let message = reply.json()["error"]["message"].clone();
            assert!(
                message.as_str().unwrap().starts_with(&format!("`{path}`")),
                "{message}"
            );
        }
    }
}
