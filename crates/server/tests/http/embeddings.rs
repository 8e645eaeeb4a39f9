//! `/v1/embeddings`: forms of inputs and of vectors, limits and errors.

use base64::prelude::{BASE64_STANDARD, Engine};
use serde_json::{Value, json};

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
