//! How requests say which tokens may be chosen, and when a text ends.

use engine::Request;
use serde_json::{Map, Value, json};

use crate::client::{Server, Setup};
use crate::wire::{hello, with};

/// The tokens of the greedy answer to [`hello`].
fn answer(server: &Server) -> Vec<u32> {
    let text = server.engine.text();
    let messages = &hello(24)["messages"];
    let prompt = text.encode_chat(messages, None, true, &Map::new()).unwrap();
    let request = Request {
        max_tokens: Some(24),
        ..Request::new(prompt)
    };
    server.engine.complete(request).unwrap().1
}

#[tokio::test]
async fn a_token_that_ends_the_text_is_not_part_of_it() {
    let server = Server::start(Setup::default()).await;
    let whole = server.chat(&hello(24)).await.text();
    let ids = answer(&server);
    let token = ids[6];
    let first = ids.iter().position(|&id| id == token).unwrap();
    let reply = server
        .chat(&with(&hello(24), json!({"stop_token_ids": [1, token]})))
        .await
        .json();
    let text = reply["choices"][0]["message"]["content"].as_str().unwrap();
    assert_eq!(reply["choices"][0]["finish_reason"], "stop");
    assert_eq!(reply["usage"]["completion_tokens"], first);
    assert!(whole.starts_with(text) && text.len() < whole.len());
    // It does not end the text before so many tokens: it is not even chosen.
    let least = json!({"stop_token_ids": [token], "min_tokens": first + 1});
    let reply = server.chat(&with(&hello(24), least)).await.json();
    assert!(reply["usage"]["completion_tokens"].as_u64().unwrap() > first as u64);
    let other = reply["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(other.starts_with(text) && !whole.starts_with(other));
}

#[tokio::test]
async fn a_text_has_as_many_tokens_as_it_must() {
    let server = Server::start(Setup::default()).await;
    let ends = server.engine.text().stop_tokens.ids();
    let biases = ends.iter().map(|&id| (id.to_string(), json!(100)));
    let eager = with(
        &hello(24),
        json!({"logit_bias": Value::Object(biases.collect())}),
    );
    for speculation in ["auto", "off"] {
        for (least, n) in [
            (json!({}), 0),
            (json!({"min_tokens": 5}), 5),
            (json!({"min_new_tokens": 9, "temperature": 1}), 9),
            (json!({"min_tokens": 5, "ignore_eos": true}), 24),
        ] {
            let body = with(&with(&eager, least), json!({"speculation": speculation}));
            let reply = server.chat(&body).await.json();
            assert_eq!(reply["usage"]["completion_tokens"], n, "{body}");
        }
    }
}

#[tokio::test]
async fn a_bias_by_text_is_that_of_its_tokens() {
    let server = Server::start(Setup::default()).await;
    let plain = server.chat(&hello(24)).await.text();
    let ids = answer(&server);
    let tokenizer = &server.engine.text().tokenizer;
    let word = String::from_utf8(tokenizer.token_bytes(ids[5]).to_vec()).unwrap();
    let tokens = tokenizer.encode(&word, false).unwrap();
    for bias in [json!(-100), json!(30), json!(false)] {
        let by_id: Vec<Value> = tokens.iter().map(|id| json!([id, bias])).collect();
        let ids = tokens.iter().map(|id| (id.to_string(), bias.clone()));
        let mut texts = Vec::new();
        for biases in [
            json!({word.as_str(): bias}),
            json!([[word, bias]]),
            json!(by_id),
            Value::Object(ids.collect::<Map<_, _>>()),
        ] {
            let body = with(&hello(24), json!({"logit_bias": biases}));
            texts.push(server.chat(&body).await.text());
        }
        assert_ne!(texts[0], plain, "a bias of {bias}");
        assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    }
}

#[tokio::test]
async fn every_sampler_changes_the_text_and_speculation_does_not() {
    let server = Server::start(Setup::default()).await;
    let base = with(&hello(48), json!({"temperature": 2, "seed": 4}));
    for (more, same) in [
        (json!({"typical_p": 0.3}), json!({"typ_p": 0.3})),
        (json!({"typical": 0.3}), json!({"typical_p": 0.3})),
        (json!({"top_n_sigma": 0.5}), json!({"nsigma": 0.5})),
        (
            json!({"xtc_probability": 0.9}),
            json!({"xtc_probability": 0.9, "xtc_threshold": 0.1}),
        ),
        (
            json!({"dynatemp_range": 2}),
            json!({"dynatemp_range": 2, "dynatemp_exponent": 1}),
        ),
        (
            json!({"temperature": 1, "dynatemp_range": 1}),
            json!({"dynamic_temperature": true, "dynatemp_low": 0, "dynatemp_high": 2}),
        ),
        (
            json!({"temperature": 0, "dry_multiplier": 40, "dry_allowed_length": 1}),
            json!({
                "temperature": 0, "dry_multiplier": 40, "dry_allowed_length": 1, "dry_base": 1.75,
                "dry_penalty_last_n": -1,
                "dry_sequence_breakers": ["\n", ":", "\"", "*"],
            }),
        ),
        (
            json!({"temperature": 0, "dry_multiplier": 40, "dry_allowed_length": 1, "dry_sequence_breakers": "\"a\", \"\\n\""}),
            json!({"temperature": 0, "dry_multiplier": 40, "dry_allowed_length": 1, "dry_sequence_breakers": ["a", "\n"]}),
        ),
        (
            json!({"mirostat": 1}),
            json!({"mirostat": 1.0, "mirostat_tau": 5, "mirostat_eta": 0.1, "top_k": 3}),
        ),
        (
            json!({"mirostat": 2, "mirostat_tau": 2}),
            json!({"mirostat_mode": 2, "mirostat_tau": 2.0, "min_p": 0.5}),
        ),
        (
            json!({"temperature": 0, "repeat_penalty": 20, "repeat_last_n": 30}),
            json!({"temperature": 0, "repetition_penalty": 20, "repeat_last_n": 30.0}),
        ),
    ] {
        let text = server.chat(&with(&base, more.clone())).await.text();
        let is_greedy = more.get("temperature") == Some(&json!(0));
        let plain = with(&base, json!({"temperature": if is_greedy { 0 } else { 2 }}));
        assert_ne!(text, server.chat(&plain).await.text(), "{more}");
        assert_eq!(server.chat(&with(&base, same)).await.text(), text, "{more}");
        let off = with(&with(&base, more.clone()), json!({"speculation": "off"}));
        assert_eq!(server.chat(&off).await.text(), text, "{more}");
    }
}
