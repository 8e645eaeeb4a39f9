//! `/tokenize`, `/detokenize` and `/apply-template`.

use serde_json::{Value, json};

use super::{ask, error};
use crate::client::{Server, Setup};

const TEXT: &str = "This is a test of 媽 and 🤗 <|im_end|> <turn|>.";

#[tokio::test]
async fn tokens_and_text_become_each_other() {
    for (model, special) in [("tiny-qwen3.5", "<|im_end|>"), ("tiny-gemma4", "<turn|>")] {
        let server = Server::start(Setup {
            model,
            ..Setup::default()
        })
        .await;
        let tokens = |more: Value| {
            let body = super::with(json!({"content": TEXT}), &more);
            let server = &server;
            async move {
                ask(server, "/tokenize", &body).await["tokens"]
                    .as_array()
                    .unwrap()
                    .clone()
            }
        };
        let back = |tokens: &[Value]| {
            let body = json!({"tokens": tokens});
            let server = &server;
            async move { ask(server, "/detokenize", &body).await["content"].clone() }
        };
        let plain = tokens(json!({})).await;
        assert_eq!(back(&plain).await, TEXT);
        let id = ask(&server, "/tokenize", &json!({"content": special})).await["tokens"].clone();
        let id = id.as_array().unwrap();
        assert_eq!(id.len(), 1, "{special} is one token");
        assert!(plain.contains(&id[0]));
        let as_text = tokens(json!({"parse_special": false})).await;
        assert!(!as_text.contains(&id[0]) && as_text.len() > plain.len());
        assert_eq!(back(&as_text).await, TEXT);
        let begun = tokens(json!({"add_special": true})).await;
        assert_eq!(
            json!(begun),
            json!(server.engine.text().encode_prompt(TEXT).unwrap())
        );
        let begun = tokens(json!({"add_special": true, "parse_special": false})).await;
        assert!(begun.ends_with(&as_text) && begun.len() <= as_text.len() + 1);
        // Pieces are bytes where they are not text, and make up the text.
        let pieces = tokens(json!({"with_pieces": true})).await;
        let ids: Vec<Value> = pieces.iter().map(|piece| piece["id"].clone()).collect();
        assert_eq!(ids, plain);
        let (mut bytes, mut n_lists) = (Vec::new(), 0);
        for piece in &pieces {
            match &piece["piece"] {
                Value::String(text) => bytes.extend(text.as_bytes()),
                list => {
                    n_lists += 1;
                    let list = list.as_array().unwrap().iter();
                    bytes.extend(list.map(|byte| byte.as_u64().unwrap() as u8));
                }
            }
        }
        assert_eq!(String::from_utf8(bytes).unwrap(), TEXT);
        assert!(n_lists > 2, "{pieces:?}");
        let mixed = json!({"content": [plain[0], "a", plain[1]]});
        let mixed = ask(&server, "/tokenize", &mixed).await["tokens"].clone();
        assert_eq!((&mixed[0], &mixed[2]), (&plain[0], &plain[1]));
    }
}

#[tokio::test]
async fn vllm_s_clients_get_vllm_s_document() {
    let server = Server::start(Setup::default()).await;
    let text = server.engine.text();
    let whole = ask(
        &server,
        "/tokenize",
        &json!({"prompt": TEXT, "return_token_strs": true}),
    )
    .await;
    let tokens = text.encode_prompt(TEXT).unwrap();
    assert_eq!(whole["tokens"], json!(tokens));
    assert_eq!(
        (&whole["count"], &whole["max_model_len"]),
        (&json!(tokens.len()), &json!(512))
    );
    let pieces = whole["token_strs"].as_array().unwrap();
    assert_eq!((pieces.len(), &pieces[0]), (tokens.len(), &json!("This")));
    let bare = ask(
        &server,
        "/tokenize",
        &json!({"prompt": TEXT, "add_special_tokens": false}),
    )
    .await;
    assert_eq!(
        bare["tokens"],
        json!(text.tokenizer.encode(TEXT, false).unwrap())
    );
    assert_eq!(bare["token_strs"], Value::Null);
    let messages = json!({"messages": [{"role": "user", "content": "Hi"}]});
    let chat = ask(&server, "/tokenize", &messages).await;
    let prompt = ask(&server, "/apply-template", &messages).await["prompt"].clone();
    let prompt = json!({"content": prompt});
    assert_eq!(
        chat["tokens"],
        ask(&server, "/tokenize", &prompt).await["tokens"]
    );
    let back = ask(&server, "/detokenize", &json!({"tokens": tokens})).await;
    assert_eq!(
        (&back["prompt"], &back["content"]),
        (&json!(TEXT), &json!(TEXT))
    );
    let odd = json!({"prompt": TEXT, "return_token_strs": 1});
    assert_eq!(server.post("/tokenize", &odd).await.status, 400);
}

#[tokio::test]
async fn what_is_no_text_and_no_token_is_named() {
    let server = Server::start(Setup::default()).await;
    for (path, body, param) in [
        ("/tokenize", json!({}), "content"),
        ("/tokenize", json!({"content": 1}), "content"),
        (
            "/tokenize",
            json!({"content": {"prompt_string": "a"}}),
            "content",
        ),
        ("/tokenize", json!({"content": [99999999]}), "content"),
        (
            "/tokenize",
            json!({"content": "a", "add_special": 1}),
            "add_special",
        ),
        (
            "/tokenize",
            json!({"content": "a", "parse_special": 1}),
            "parse_special",
        ),
        (
            "/tokenize",
            json!({"content": "a", "with_pieces": 1}),
            "with_pieces",
        ),
        ("/detokenize", json!({}), "tokens"),
        ("/detokenize", json!({"tokens": "a"}), "tokens"),
        ("/detokenize", json!({"tokens": ["a"]}), "tokens"),
        ("/detokenize", json!({"tokens": [-1]}), "tokens"),
        ("/detokenize", json!({"tokens": [99999999]}), "tokens"),
        ("/apply-template", json!({}), "messages"),
    ] {
        let told = error(&server.post(path, &body).await, 400);
        assert_eq!(told["param"], param, "{path} {body}");
    }
    let reply = server
        .post("/tokenize", &json!({"content": "a", "odd": 1}))
        .await;
    assert_eq!(reply.header("x-ignored-fields"), Some("odd"));
}

#[tokio::test]
async fn a_template_is_applied_as_chat_applies_it() {
    let server = Server::start(Setup::default()).await;
    let messages =
        json!([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]);
    let prompt = |more: Value| {
        let body = super::with(json!({"messages": messages}), &more);
        let server = &server;
        async move { ask(server, "/apply-template", &body).await["prompt"].clone() }
    };
    let turns = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n";
    let model = "<|im_start|>assistant\n<think>\n";
    assert_eq!(
        prompt(json!({})).await,
        format!("{turns}{model}\n</think>\n\n")
    );
    assert_eq!(prompt(json!({"add_generation_prompt": false})).await, turns);
    for on in [
        json!({"enable_thinking": true}),
        json!({"chat_template_kwargs": {"enable_thinking": true}}),
        json!({"reasoning_effort": "high"}),
    ] {
        assert_eq!(prompt(on).await, format!("{turns}{model}"));
    }
    let tool = json!({"type": "function", "function": {"name": "weather", "parameters": {}}});
    let with_tools = prompt(json!({"tools": [tool]})).await;
    assert!(
        with_tools
            .as_str()
            .unwrap()
            .contains("\"name\": \"weather\"")
    );
    let body = json!({"messages": messages, "max_tokens": 1, "verbose": true});
    let answer = ask(&server, "/v1/chat/completions", &body).await;
    assert_eq!(answer["__verbose"]["prompt"], prompt(json!({})).await);
    assert_eq!(
        answer["__verbose"]["content"],
        answer["choices"][0]["message"]["content"]
    );
    assert_eq!(answer["__verbose"]["tokens_predicted"], 1);
    let plain = ask(
        &server,
        "/v1/chat/completions",
        &json!({"messages": messages, "max_tokens": 1}),
    )
    .await;
    assert!(plain.get("__verbose").is_none());
    let body = json!({"prompt": "Hi", "max_tokens": 2, "verbose": true, "stream": true});
    let chunks = server.post("/v1/completions", &body).await.events();
    let told = chunks.iter().filter_map(|chunk| chunk.get("__verbose"));
    let told: Vec<&Value> = told.collect();
    assert_eq!(told.len(), 1);
    assert_eq!(
        (&told[0]["prompt"], &told[0]["tokens_predicted"]),
        (&json!("Hi"), &json!(2))
    );
}

#[tokio::test]
async fn the_server_says_whether_silence_means_reasoning() {
    for (reasoning, ends_open) in [(None, false), (Some(false), false), (Some(true), true)] {
        let server = Server::start(Setup {
            settings: server::ModelConfig {
                reasoning,
                ..server::ModelConfig::default()
            },
            ..Setup::default()
        })
        .await;
        let messages = json!([{"role": "user", "content": "Hi"}]);
        for (more, is_open) in [
            (json!({}), ends_open),
            (json!({"enable_thinking": false}), false),
            (json!({"think": true}), true),
            (
                json!({"chat_template_kwargs": {"enable_thinking": false}}),
                false,
            ),
        ] {
            let body = super::with(json!({"messages": messages}), &more);
            let prompt = ask(&server, "/apply-template", &body).await["prompt"].clone();
            let is_so = prompt.as_str().unwrap().ends_with("<think>\n");
            assert_eq!(is_so, is_open, "{reasoning:?} {more}");
        }
    }
}
