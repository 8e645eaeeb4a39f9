//! Models that are loaded because a request names them.

use serde_json::{Value, json};
use server::{Config, ModelsOptions};

use super::{Known, endless, refusal, serve, state, states, story, two, unload, until_state};
use crate::client::{Server, Setup};

#[tokio::test]
async fn two_models_write_together_what_each_writes_alone() {
    let models = two();
    let mut alone = Vec::new();
    for Known { name, folder, .. } in &models {
        let server = Server::start(Setup {
            model: folder,
            draft: engine::DraftChoice::None,
            context: 1024,
            ..Setup::default()
        })
        .await;
        alone.push(server.chat(&story(name)).await.text());
    }
    let peer = serve(&models, ModelsOptions::default(), Config::default()).await;
    let unloaded = |name: &str| (name.to_owned(), "unloaded".to_owned());
    assert_eq!(states(&peer).await, [unloaded("qwen"), unloaded("gemma")]);
    assert_eq!(peer.get("/health").await.status, 200);
    let [qwen, gemma] = [story("qwen"), story("gemma")];
    for _ in 0..2 {
        let (qwen, gemma) = tokio::join!(peer.chat(&qwen), peer.chat(&gemma));
        for (reply, expected) in [(&qwen, &alone[0]), (&gemma, &alone[1])] {
            assert_eq!(&reply.text(), expected);
            assert_eq!(reply.json()["speculation"]["engaged"], true, "{reply:?}");
        }
        assert_eq!(qwen.json()["model"], "qwen");
        assert_eq!(gemma.json()["model"], "gemma");
    }
    assert_eq!([models[0].tries(), models[1].tries()], [1, 1]);
    let page = peer.get("/metrics").await.body;
    for line in [
        "vllm:request_success_total{model_name=\"qwen\",finished_reason=\"length\"} 2",
        "vllm:request_success_total{model_name=\"gemma\",finished_reason=\"length\"} 2",
        "paceline:http_responses_total{model_name=\"gemma\",route=\"/v1/chat/completions\",status=\"200\"} 2",
        "paceline:model_loaded{model_name=\"gemma\"} 1",
    ] {
        assert!(page.lines().any(|l| l == line), "{line}\n{page}");
    }
}

#[tokio::test]
async fn every_dialect_loads_the_model_that_it_names() {
    let models = [
        Known::new("a", "tiny-qwen3.5"),
        Known::new("b", "tiny-qwen3.5"),
    ];
    let peer = serve(&models, ModelsOptions::default(), Config::default()).await;
    let user = json!([{"role": "user", "content": "Hi"}]);
    let answers = [
        (
            "/v1/chat/completions",
            json!({"messages": user, "max_tokens": 2}),
            "/model",
            "b",
        ),
        (
            "/v1/completions",
            json!({"prompt": "Hi", "max_tokens": 2}),
            "/model",
            "b",
        ),
        (
            "/v1/responses",
            json!({"input": "Hi", "max_output_tokens": 2}),
            "/model",
            "b",
        ),
        (
            "/v1/messages",
            json!({"messages": user, "max_tokens": 2}),
            "/model",
            "b",
        ),
        (
            "/v1/messages/count_tokens",
            json!({"messages": user}),
            "/input_tokens",
            "",
        ),
        (
            "/completion",
            json!({"prompt": "Hi", "n_predict": 2}),
            "/model",
            "b",
        ),
        ("/tokenize", json!({"content": "Hi"}), "/tokens", ""),
        ("/apply-template", json!({"messages": user}), "/prompt", ""),
        ("/v1/embeddings", json!({"input": "Hi"}), "/model", "b"),
        (
            "/api/chat",
            json!({"messages": user, "stream": false, "options": {"num_predict": 2}}),
            "/model",
            "b",
        ),
        (
            "/api/generate",
            json!({"prompt": "Hi", "stream": false, "options": {"num_predict": 2}}),
            "/model",
            "b",
        ),
        ("/api/generate", json!({}), "/done_reason", "load"),
    ];
    for (i, (path, body, pointer, expected)) in answers.into_iter().enumerate() {
        let mut body = body;
        body["model"] = json!("b");
        let reply = peer.post(path, &body).await;
        assert_eq!(reply.status, 200, "{path}: {reply:?}");
        let said = reply.json().pointer(pointer).cloned().unwrap_or_default();
        match expected {
            "" => assert!(!said.is_null(), "{path}: {reply:?}"),
            name => assert_eq!(said, name, "{path}"),
        }
        assert_eq!((models[0].tries(), models[1].tries()), (0, i + 1), "{path}");
        unload(&peer, "b").await;
    }
    // A query names it where there is no body, and Ollama's tag changes nothing.
    assert_eq!(peer.get("/props?model=b").await.json()["model_alias"], "b");
    assert_eq!(peer.get("/slots").await.json().as_array().unwrap().len(), 2);
    let tagged = json!({"model": "b:latest", "messages": user, "stream": false, "options": {"num_predict": 2}});
    assert_eq!(
        peer.post("/api/chat", &tagged).await.json()["model"],
        "b:latest"
    );
    assert_eq!(state(&peer, "a").await, "unloaded");
}

#[tokio::test]
async fn a_name_that_no_model_has_is_an_error_that_lists_those_there_are() {
    let peer = serve(&two(), ModelsOptions::default(), Config::default()).await;
    let user = json!([{"role": "user", "content": "Hi"}]);
    let body = json!({"model": "gpt", "messages": user, "max_tokens": 1});
    let unknown = peer.chat(&body).await;
    assert_eq!(refusal(&unknown), (404, "model_not_found".to_owned()));
    let said = |reply: &crate::client::Reply| reply.body.clone();
    assert!(
        said(&unknown).contains("use `qwen` or `gemma`"),
        "{unknown:?}"
    );
    for path in ["/v1/messages", "/api/chat", "/v1/messages/count_tokens"] {
        let reply = peer.post(path, &body).await;
        assert_eq!(reply.status, 404, "{path}");
        assert!(said(&reply).contains("`gemma`"), "{reply:?}");
    }
    let of_llama = json!({"model": "gpt", "prompt": "Hi"});
    let reply = peer.post("/completion", &of_llama).await;
    assert_eq!(reply.json()["error"]["type"], "not_found_error");
    for path in ["/models/load", "/models/unload"] {
        assert_eq!(peer.post(path, &of_llama).await.status, 404, "{path}");
    }
    let unnamed = peer.chat(&json!({"messages": user})).await;
    assert_eq!(refusal(&unnamed), (400, "model_missing".to_owned()));
    assert_eq!(peer.get("/slots").await.status, 400);
    assert_eq!(peer.get("/v1/models/gpt").await.status, 404);
    assert_eq!(peer.get("/v1/models/gemma").await.json()["id"], "gemma");
    assert_eq!(peer.get("/props").await.json()["role"], "router");
    assert_eq!(
        states(&peer).await[1].1,
        "unloaded",
        "nothing of this loads a model"
    );
}

#[tokio::test]
async fn requests_at_the_same_time_load_a_model_once() {
    let [qwen, gemma] = two();
    let peer = serve(
        &[qwen.clone(), gemma],
        ModelsOptions::default(),
        Config::default(),
    )
    .await;
    qwen.open(false);
    let body = story("qwen");
    let ask = async || peer.chat(&body).await.text();
    let open = async {
        until_state(&peer, "qwen", "loading").await;
        qwen.open(true);
    };
    let (first, second, third, ()) = tokio::join!(ask(), ask(), ask(), open);
    assert_eq!((&first, &first), (&second, &third));
    assert_eq!(qwen.tries(), 1);
}

#[tokio::test]
async fn ollama_lists_all_models_and_those_that_are_loaded() {
    let peer = serve(&two(), ModelsOptions::default(), Config::default()).await;
    let names = |reply: Value| -> Vec<String> {
        let models = reply["models"].as_array().unwrap().clone();
        let name = |model: &Value| model["name"].as_str().unwrap().to_owned();
        models.iter().map(name).collect()
    };
    assert_eq!(
        names(peer.get("/api/tags").await.json()),
        ["qwen:latest", "gemma:latest"]
    );
    assert!(names(peer.get("/api/ps").await.json()).is_empty());
    let shown = peer
        .post("/api/show", &json!({"model": "gemma"}))
        .await
        .json();
    assert_eq!(shown["capabilities"], json!(["completion"]));
    let loaded = peer.post("/api/generate", &json!({"model": "gemma"})).await;
    assert_eq!(loaded.json()["done_reason"], "load");
    assert_eq!(names(peer.get("/api/ps").await.json()), ["gemma:latest"]);
    let shown = peer
        .post("/api/show", &json!({"model": "gemma"}))
        .await
        .json();
    assert_eq!(shown["details"]["family"], "gemma4");
}

#[tokio::test]
async fn models_are_loaded_and_unloaded_by_hand() {
    let [qwen, gemma] = two();
    let peer = serve(&[qwen, gemma], ModelsOptions::default(), Config::default()).await;
    let load = json!({"model": "qwen"});
    let not_loaded = peer.post("/models/unload", &load).await;
    assert_eq!(not_loaded.status, 400, "{not_loaded:?}");
    assert_eq!(
        peer.post("/models/load", &load).await.json(),
        json!({"success": true})
    );
    until_state(&peer, "qwen", "loaded").await;
    assert_eq!(peer.post("/models/load", &load).await.status, 400);
    // One that writes leaves after that.
    let mut writing = peer.open(&endless("qwen")).await;
    writing.until("\"text\":\"").await;
    assert_eq!(peer.post("/models/unload", &load).await.status, 200);
    writing.buffer.clear();
    writing.until("\"text\":\"").await;
    assert_eq!(state(&peer, "qwen").await, "loaded");
    drop(writing);
    until_state(&peer, "qwen", "unloaded").await;
}
