//! `/v1/embeddings`: forms of inputs and of vectors, limits and errors.

use base64::prelude::{BASE64_STANDARD, Engine};
use engine::Pooling;
use serde_json::{Value, json};
use server::ModelConfig;

use crate::client::{Server, Setup};

/// The vectors of a response.
fn vectors(document: &Value) -> Vec<Vec<f32>> {
    let data = document["data"].as_array().unwrap().iter().enumerate();
    let vector = |(i, one): (usize, &Value)| {
        assert_eq!(
            (&one["index"], &one["object"]),
            (&json!(i), &json!("embedding"))
        );
        serde_json::from_value(one["embedding"].clone()).unwrap()
    };
    data.map(vector).collect()
}

#[tokio::test]
async fn inputs_of_every_form_have_the_vectors_that_they_have_alone() {
    let server = Server::start(Setup::default()).await;
    let ask = async |body: Value| {
        let reply = server.post("/v1/embeddings", &body).await;
        assert_eq!(reply.status, 200, "{body}");
        reply.json()
    };
    let words = ["a kite", "a rabbit and a kite", "nothing else"];
    let mut alone = Vec::new();
    for word in words {
        let document = ask(json!({"input": word, "encoding_format": "float"})).await;
        let ids = server.engine.text().encode_prompt(word).unwrap();
        assert_eq!(
            document["usage"],
            json!({"prompt_tokens": ids.len(), "total_tokens": ids.len()})
        );
        assert_eq!(document["speculation"]["engaged"], false);
        assert_eq!(
            vectors(&ask(json!({"input": ids})).await),
            vectors(&document)
        );
        alone.extend(vectors(&document));
    }
    assert!(alone[0] != alone[1] && alone[0].len() == server.engine.info().hidden_size);
    // More than wait in the queue at one time.
    let many: Vec<&str> = words.iter().copied().cycle().take(90).collect();
    let got = vectors(&ask(json!({"input": many})).await);
    assert!(
        got.len() == 90
            && got
                .iter()
                .zip(alone.iter().cycle())
                .all(|(got, want)| got == want)
    );
    let short = vectors(&ask(json!({"input": words[0], "dimensions": 8})).await);
    let norm: f64 = short[0].iter().map(|&x| f64::from(x).powi(2)).sum();
    assert!(short[0].len() == 8 && (norm - 1.0).abs() < 1e-6, "{norm}");
    let packed = ask(json!({"input": words[0], "encoding_format": "base64"})).await;
    let packed = packed["data"][0]["embedding"].as_str().unwrap();
    let bytes = BASE64_STANDARD.decode(packed).unwrap();
    let floats = bytes
        .chunks(4)
        .map(|four| f32::from_le_bytes(four.try_into().unwrap()));
    assert_eq!(floats.collect::<Vec<f32>>(), alone[0]);
}

#[tokio::test]
async fn what_is_no_input_is_refused() {
    let server = Server::start(Setup::default()).await;
    let width = server.engine.info().hidden_size;
    for body in [
        json!({}),
        json!({"input": ""}),
        json!({"input": ["a", ""]}),
        json!({"input": [[999_999_999]]}),
        json!({"input": "a", "encoding_format": "int8"}),
        json!({"input": "a", "dimensions": width + 1}),
        json!({"input": "a", "dimensions": 0}),
        json!({"input": "kite ".repeat(40_000)}),
    ] {
        let reply = server.post("/v1/embeddings", &body).await;
        assert_eq!(reply.status, 400, "{body}");
    }
}

/// A server with this kind of pooling.
async fn pooling(kind: Pooling) -> Server {
    Server::start(Setup {
        settings: ModelConfig {
            pooling: Some(kind),
            ..ModelConfig::default()
        },
        ..Setup::default()
    })
    .await
}

/// The first vector of a llama-server's answer, and how many vectors that text has.
fn llama_vector(document: &Value, index: usize) -> (Vec<f64>, usize) {
    let one = &document[index];
    assert_eq!(one["index"], index);
    let vectors: Vec<Vec<f64>> = serde_json::from_value(one["embedding"].clone()).unwrap();
    (vectors[0].clone(), vectors.len())
}

#[tokio::test]
async fn llama_server_s_paths_answer_in_its_form() {
    let server = Server::start(Setup::default()).await;
    let ask = async |path: &str, body: Value| {
        let reply = server.post(path, &body).await;
        assert_eq!(reply.status, 200, "{body} {reply:?}");
        reply.json()
    };
    let openai = ask("/v1/embeddings", json!({"input": ["a kite", "a rabbit"]})).await;
    let wanted: Vec<f64> = serde_json::from_value(openai["data"][1]["embedding"].clone()).unwrap();
    for (path, body) in [
        ("/embedding", json!({"content": ["a kite", "a rabbit"]})),
        ("/embeddings", json!({"content": ["a kite", "a rabbit"]})),
        (
            "/embeddings",
            json!({"input": ["a kite", "a rabbit"], "model": "any"}),
        ),
    ] {
        let document = ask(path, body).await;
        assert_eq!(llama_vector(&document, 1), (wanted.clone(), 1), "{path}");
    }
    // A library for OpenAI's API whose address has no `/v1` says what only that has.
    let body = json!({"input": "a kite", "encoding_format": "float"});
    assert_eq!(ask("/embeddings", body).await["object"], "list");
    let ids = server.engine.text().encode_prompt("a rabbit").unwrap();
    for content in [json!("a rabbit"), json!(ids)] {
        let document = ask("/embedding", json!({"content": content})).await;
        assert_eq!(llama_vector(&document, 0), (wanted.clone(), 1));
    }
    let norm = async |p: i64| {
        let body = json!({"content": "a rabbit", "embd_normalize": p});
        llama_vector(&ask("/embedding", body).await, 0).0
    };
    let near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-5, "{a} {b}");
    assert_eq!(norm(2).await, wanted);
    let raw = norm(-1).await;
    let length = raw.iter().map(|x| x * x).sum::<f64>().sqrt();
    raw.iter()
        .zip(&wanted)
        .for_each(|(raw, one)| near(*raw, one * length));
    near(norm(1).await.iter().map(|x| x.abs()).sum(), 1.0);
    near(norm(3).await.iter().map(|x| x.abs().powi(3)).sum(), 1.0);
    let largest = norm(0).await.into_iter().map(f64::abs).fold(0.0, f64::max);
    near(largest, 32_760.0);
    for wrong in [
        json!({}),
        json!({"content": ""}),
        json!({"content": []}),
        json!({"content": ["a", 1.5]}),
        json!({"content": "a", "embd_normalize": -2}),
    ] {
        for path in ["/embedding", "/embeddings"] {
            let reply = server.post(path, &wrong).await;
            assert_eq!(reply.status, 400, "{wrong}");
            assert_eq!(reply.json()["error"]["code"], 400, "{reply:?}");
        }
    }
}

#[tokio::test]
async fn a_server_pools_as_it_is_told() {
    let ids = json!([300, 301, 302, 303, 304]);
    let mut all = Vec::new();
    for kind in Pooling::ALL {
        let server = pooling(kind).await;
        let body = json!({"content": ids, "embd_normalize": -1});
        let document = server.post("/embedding", &body).await.json();
        let (first, n) = llama_vector(&document, 0);
        assert_eq!(n, if kind == Pooling::None { 5 } else { 1 }, "{kind:?}");
        all.push((first, document));
        let tags = server.get("/api/tags").await.json();
        let capabilities = tags["models"][0]["capabilities"]
            .as_array()
            .unwrap()
            .clone();
        assert!(
            capabilities.contains(&json!("embedding")),
            "{capabilities:?}"
        );
        // The other two have one vector for each text.
        let status = if kind == Pooling::None { 400 } else { 200 };
        let asked = json!({"input": "a kite"});
        for path in ["/v1/embeddings", "/api/embed"] {
            let reply = server.post(path, &asked).await;
            assert_eq!(reply.status, status, "{path} {reply:?}");
            assert_eq!(reply.body.contains("--pooling none"), status == 400);
        }
    }
    let rows = &all[3].1[0]["embedding"];
    // In the order of `Pooling::ALL`: last, mean, cls, none.
    assert_eq!(json!(all[0].0), rows[4], "the last row");
    assert_eq!(json!(all[2].0), rows[0], "the first row");
    let mean = (0..5)
        .map(|row| rows[row][0].as_f64().unwrap())
        .sum::<f64>()
        / 5.0;
    assert!((mean - all[1].0[0]).abs() < 1e-5, "{mean}");
}

#[tokio::test]
async fn ollama_s_paths_answer_in_its_forms() {
    let server = Server::start(Setup::default()).await;
    let ask = async |path: &str, body: Value| {
        let reply = server.post(path, &body).await;
        assert_eq!(reply.status, 200, "{body} {reply:?}");
        reply.json()
    };
    let texts = ["a kite", "a rabbit and a kite"];
    let openai = ask("/v1/embeddings", json!({"input": texts})).await;
    let wanted = vectors(&openai);
    let answer = ask(
        "/api/embed",
        json!({"model": "tiny-qwen3.5", "input": texts, "keep_alive": "5m", "options": {"num_ctx": 64}}),
    )
    .await;
    let got = |answer: &Value| -> Vec<Vec<f32>> {
        serde_json::from_value(answer["embeddings"].clone()).unwrap()
    };
    assert_eq!(got(&answer), wanted);
    assert_eq!(answer["model"], "tiny-qwen3.5");
    assert_eq!(
        answer["prompt_eval_count"],
        openai["usage"]["prompt_tokens"]
    );
    assert!(answer["total_duration"].as_u64().unwrap() > 0);
    assert_eq!(answer["load_duration"], 0);
    let one = ask("/api/embed", json!({"input": texts[0]})).await;
    assert_eq!(got(&one), wanted[..1]);
    let short = got(&ask("/api/embed", json!({"input": texts[0], "dimensions": 8})).await);
    assert_eq!(short[0].len(), 8);
    assert_eq!(
        got(&ask("/api/embed", json!({"input": texts[0], "dimensions": 0})).await),
        wanted[..1]
    );
    for nothing in [json!({}), json!({"input": ""}), json!({"input": []})] {
        assert_eq!(ask("/api/embed", nothing).await["embeddings"], json!([]));
    }
    // The older form has the numbers as the model does.
    let older = ask("/api/embeddings", json!({"prompt": texts[0]})).await;
    let raw: Vec<f64> = serde_json::from_value(older["embedding"].clone()).unwrap();
    let length = raw.iter().map(|x| x * x).sum::<f64>().sqrt();
    assert!((length - 1.0).abs() > 1e-3, "no length of 1");
    let near = |(raw, one): (&f64, &f32)| (raw / length - f64::from(*one)).abs() < 1e-5;
    assert!(raw.iter().zip(&wanted[0]).all(near));
    assert_eq!(
        ask("/api/embeddings", json!({})).await,
        json!({"embedding": []})
    );
    // A text that is too long is cut, or refused if that is asked for.
    let long = "kite ".repeat(4_000);
    let cut = ask("/api/embed", json!({"input": long})).await;
    assert_eq!(cut["prompt_eval_count"], 512);
    assert_eq!(got(&cut).len(), 1);
    for (path, wrong, word) in [
        (
            "/api/embed",
            json!({"input": long, "truncate": false}),
            "too long",
        ),
        ("/api/embed", json!({"input": [1, 2]}), "`input`"),
        ("/api/embed", json!({"input": ["a", ""]}), "`input[1]`"),
        (
            "/api/embed",
            json!({"input": "a", "dimensions": 100_000}),
            "`dimensions`",
        ),
        (
            "/api/embed",
            json!({"input": "a", "options": 3}),
            "`options`",
        ),
        ("/api/embeddings", json!({"prompt": ["a"]}), "`prompt`"),
    ] {
        let reply = server.post(path, &wrong).await;
        assert_eq!(reply.status, 400, "{reply:?}");
        let error = reply.json()["error"].as_str().unwrap().to_owned();
        assert!(error.contains(word), "{word}: {error}");
    }
}
