//! Where a request is sent, and in which forms its prompt comes.

use serde_json::{Value, json};

use super::{STORY, ask, error, story, tell, with};
use crate::client::{Server, Setup};

#[tokio::test]
async fn a_prompt_comes_in_many_forms() {
    for model in ["tiny-qwen3.5", "tiny-gemma4"] {
        let server = Server::start(Setup {
            model,
            ..Setup::default()
        })
        .await;
        let whole = tell(&server, &json!({})).await;
        let body = json!({"content": STORY, "add_special": true});
        let tokens = ask(&server, "/tokenize", &body).await["tokens"].clone();
        assert_eq!(tokens.as_array().unwrap().len(), whole["tokens_evaluated"]);
        for prompt in [
            tokens.clone(),
            json!({"prompt_string": STORY}),
            json!([tokens]),
            json!([STORY]),
        ] {
            let answer = tell(&server, &json!({"prompt": prompt})).await;
            for field in ["content", "prompt", "tokens_evaluated"] {
                assert_eq!(answer[field], whole[field], "{field} of {prompt}");
            }
        }
        let list = json!([STORY, tokens, {"prompt_string": STORY}]);
        let answers = tell(&server, &json!({"prompt": list})).await;
        let answers = answers.as_array().unwrap();
        assert_eq!(answers.len(), 3);
        for (i, answer) in answers.iter().enumerate() {
            assert_eq!(answer["index"], i);
            assert_eq!(answer["content"], whole["content"]);
            assert_eq!(answer["prompt"], whole["prompt"]);
        }
        // Only a text at the start begins as a prompt does.
        let [one, other] = ["Once upon", " a time"];
        let ids = |text: &str, add_special: bool| {
            let body = json!({"content": text, "add_special": add_special});
            let server = &server;
            async move {
                ask(server, "/tokenize", &body).await["tokens"]
                    .as_array()
                    .unwrap()
                    .clone()
            }
        };
        let middle: Vec<Value> = ids(" there", false).await;
        let mut mixed = vec![json!(one)];
        mixed.extend(middle.clone());
        mixed.extend([json!(other), middle[0].clone()]);
        let joined = [
            ids(one, true).await,
            middle.clone(),
            ids(other, false).await,
            vec![middle[0].clone()],
        ]
        .concat();
        let answer = tell(&server, &json!({"prompt": mixed})).await;
        let want = tell(&server, &json!({"prompt": joined})).await;
        assert_eq!(answer["content"], want["content"]);
        assert_eq!(answer["tokens_evaluated"], joined.len());
        let gone = tell(&server, &json!({"prompt": [middle[0], one]})).await;
        assert_eq!(gone["tokens_evaluated"], 1 + ids(one, false).await.len());
    }
}

#[tokio::test]
async fn every_path_has_two_spellings() {
    let server = Server::start(Setup::default()).await;
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}]});
    for (path, body) in [
        ("/completion", story(&json!({}))),
        (
            "/infill",
            json!({"input_prefix": "a", "input_suffix": "b", "n_predict": 2}),
        ),
        ("/tokenize", json!({"content": "a"})),
        ("/detokenize", json!({"tokens": [1]})),
        ("/apply-template", chat),
    ] {
        for path in [path.to_owned(), format!("/v1{path}"), format!("{path}/")] {
            ask(&server, &path, &body).await;
        }
    }
    for path in ["/props", "/slots", "/lora-adapters"] {
        for path in [path.to_owned(), format!("/v1{path}")] {
            let reply = server.get(&path).await;
            assert_eq!(reply.status, 200, "{path}: {reply:?}");
        }
    }
}

#[tokio::test]
async fn completions_are_answered_in_the_dialect_of_the_body() {
    let server = Server::start(Setup::default()).await;
    let openai = json!({"prompt": STORY, "max_tokens": 12, "temperature": 0});
    let native = tell(&server, &json!({})).await["content"].clone();
    for (path, more, is_native) in [
        ("/completions", json!({}), false),
        ("/completions", json!({"n_predict": 12}), true),
        ("/completions", json!({"cache_prompt": true}), true),
        (
            "/completions",
            json!({"prompt": {"prompt_string": STORY}}),
            true,
        ),
        ("/v1/completions", json!({}), false),
        (
            "/v1/completions",
            json!({"n_predict": 12, "cache_prompt": true}),
            false,
        ),
    ] {
        let answer = ask(&server, path, &with(openai.clone(), &more)).await;
        let content = match is_native {
            true => &answer["content"],
            false => &answer["choices"][0]["text"],
        };
        assert_eq!(*content, native, "{path} {more}: {answer}");
    }
    let wrong = json!({"prompt": STORY, "n_predict": "x"});
    error(&server.post("/completions", &wrong).await, 400);
    let told = server.post("/v1/completions", &wrong).await.error();
    assert_eq!(told["param"], "n_predict");
}

#[tokio::test]
async fn the_length_has_llama_server_s_name_everywhere() {
    let server = Server::start(Setup::default()).await;
    let messages = json!([{"role": "user", "content": "Tell me a story."}]);
    let body = json!({"messages": messages, "n_predict": 3, "max_tokens": 9});
    let answer = ask(&server, "/v1/chat/completions", &body).await;
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    let answer = ask(
        &server,
        "/v1/completions",
        &json!({"prompt": STORY, "n_predict": 5}),
    )
    .await;
    assert_eq!(answer["usage"]["completion_tokens"], 5);
    let reply = server
        .post("/v1/responses", &json!({"input": "Hi", "n_predict": 3}))
        .await;
    assert_eq!(reply.error()["param"], "n_predict");
}
