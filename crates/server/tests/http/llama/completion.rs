//! `POST /completion`: what an answer holds, whole and as a stream.

use serde_json::{Value, json};

use super::{STORY, ask, content, error, story, stream, tell, with};
use crate::client::{Server, Setup};

#[tokio::test]
async fn a_whole_answer_has_every_field() {
    let server = Server::start(Setup::default()).await;
    let answer = tell(&server, &json!({})).await;
    let n_prompt = answer["tokens_evaluated"].as_u64().unwrap();
    assert!(n_prompt > 5, "{answer}");
    for (field, value) in [
        ("index", json!(0)),
        ("tokens", json!([])),
        ("id_slot", json!(0)),
        ("stop", json!(true)),
        ("model", json!("tiny-qwen3.5")),
        ("tokens_predicted", json!(12)),
        ("prompt", json!(STORY)),
        ("truncated", json!(false)),
        ("stop_type", json!("limit")),
        ("stopping_word", json!("")),
        ("tokens_cached", json!(n_prompt + 12)),
    ] {
        assert_eq!(answer[field], value, "{field}: {answer}");
    }
    assert!(answer["has_new_line"].is_boolean());
    assert!(!answer["content"].as_str().unwrap().is_empty());
    assert!(answer.get("completion_probabilities").is_none());
    let timings = &answer["timings"];
    let [cached, ran] = ["cache_n", "prompt_n"].map(|name| timings[name].as_u64().unwrap());
    assert_eq!(cached + ran, n_prompt);
    assert_eq!(timings["predicted_n"], 12);
    for name in [
        "prompt_ms",
        "prompt_per_token_ms",
        "prompt_per_second",
        "predicted_ms",
        "predicted_per_token_ms",
        "predicted_per_second",
        "draft_n",
        "draft_n_accepted",
    ] {
        assert!(timings[name].is_number(), "{name}: {timings}");
    }
    let settings = &answer["generation_settings"];
    for (field, value) in [
        ("n_predict", json!(12)),
        ("max_tokens", json!(12)),
        ("seed", json!(7)),
        ("temperature", json!(0.0)),
        ("stream", json!(false)),
        ("n_probs", json!(0)),
        ("lora", json!([])),
        ("grammar", json!("")),
    ] {
        assert_eq!(settings[field], value, "{field}: {settings}");
    }
}

#[tokio::test]
async fn settings_are_told_as_they_were_asked_for() {
    let server = Server::start(Setup::default()).await;
    let asked = json!({
        "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "typical_p": 0.9,
        "repeat_penalty": 1.1, "repeat_last_n": 64, "presence_penalty": 0.1, "frequency_penalty": 0.2,
        "dry_multiplier": 0.3, "dry_base": 2.0, "dry_allowed_length": 4, "dry_penalty_last_n": 99,
        "dry_sequence_breakers": ["\n"], "xtc_probability": 0.1, "xtc_threshold": 0.2,
        "dynatemp_range": 0.1, "dynatemp_exponent": 1.5, "top_n_sigma": 1.5, "mirostat": 2,
        "mirostat_tau": 4.0, "mirostat_eta": 0.2, "stop": ["\u{1}"], "ignore_eos": true,
        "logit_bias": [[5, -1.5], [6, false]], "n_predict": 3, "seed": 11, "n_probs": 2,
        "grammar": "root ::= [a-z ]+", "post_sampling_probs": true, "timings_per_token": true,
    });
    let answer = tell(&server, &asked).await;
    let settings = &answer["generation_settings"];
    for (field, value) in asked.as_object().unwrap() {
        let told = &settings[field];
        match field.as_str() {
            "logit_bias" => assert_eq!(
                *told,
                json!([{"bias": -1.5, "token": 5}, {"bias": null, "token": 6}])
            ),
            _ => assert_eq!(told, value, "{field}"),
        }
    }
}

#[tokio::test]
async fn a_stream_is_the_whole_answer_in_pieces() {
    let server = Server::start(Setup::default()).await;
    for more in [
        json!({}),
        json!({"temperature": 0.9, "top_k": 20}),
        json!({"stop": ["."], "n_predict": 60}),
        json!({"prompt": "Hi 媽 🤗 ", "logit_bias": {}}),
    ] {
        let whole = tell(
            &server,
            &with(more.clone(), &json!({"return_tokens": true})),
        )
        .await;
        let chunks = stream(&server, "/completion", &story(&more)).await;
        let (last, before) = chunks.split_last().unwrap();
        assert_eq!(json!(content(before)), whole["content"], "{more}");
        assert_eq!(
            (&last["content"], &last["tokens"]),
            (&json!(""), &json!([]))
        );
        let tokens: Vec<Value> = before
            .iter()
            .flat_map(|chunk| chunk["tokens"].as_array().unwrap().clone())
            .collect();
        assert_eq!(json!(tokens), whole["tokens"]);
        assert_eq!(
            tokens.len() as u64,
            whole["tokens_predicted"].as_u64().unwrap()
        );
        for field in [
            "tokens_predicted",
            "tokens_evaluated",
            "stop_type",
            "stopping_word",
            "has_new_line",
            "truncated",
            "prompt",
            "tokens_cached",
        ] {
            assert_eq!(last[field], whole[field], "{field}");
        }
        assert!(last["generation_settings"].is_object() && last["timings"].is_object());
        for chunk in before {
            assert_eq!(chunk["id_slot"], 0);
            assert_eq!(chunk["tokens_evaluated"], whole["tokens_evaluated"]);
            assert!(chunk.get("timings").is_none() && chunk.get("prompt_progress").is_none());
        }
    }
}

#[tokio::test]
async fn speculation_changes_nothing() {
    let server = Server::start(Setup::default()).await;
    let (mut drafted, grammar) = (0, r#"root ::= "a\n  b\n  c\nd" [a-z]+"#);
    for more in [
        json!({"n_predict": 40}),
        json!({"n_predict": 40, "temperature": 0.8, "top_p": 0.9, "samplers": ["top_p", "temperature"]}),
        json!({"n_probs": 3, "temperature": 0.8}),
        json!({"n_probs": 3, "temperature": 0.8, "post_sampling_probs": true, "repeat_penalty": 1.2}),
        json!({"n_probs": 3, "post_sampling_probs": true}),
        json!({"n_probs": 5, "post_sampling_probs": true, "temperature": 1, "mirostat": 2}),
        json!({"grammar": grammar, "n_indent": 2, "n_predict": 60}),
        json!({"grammar": grammar, "n_probs": 2, "post_sampling_probs": true, "temperature": 1}),
    ] {
        let more = with(more, &json!({"return_tokens": true, "speculation": "auto"}));
        let on = tell(&server, &more).await;
        let off = tell(&server, &with(more.clone(), &json!({"speculation": "off"}))).await;
        for field in [
            "content",
            "tokens",
            "tokens_predicted",
            "stop_type",
            "completion_probabilities",
        ] {
            assert_eq!(on.get(field), off.get(field), "{field} of {more}");
        }
        assert_eq!(off["timings"]["draft_n"], 0);
        drafted += on["timings"]["draft_n"].as_u64().unwrap();
    }
    assert!(drafted > 20, "{drafted}");
}

#[tokio::test]
async fn an_answer_says_why_it_has_ended() {
    let server = Server::start(Setup {
        context: 64,
        ..Setup::default()
    })
    .await;
    let whole = tell(&server, &json!({"n_predict": 10})).await;
    let text = whole["content"].as_str().unwrap();
    let word = text.split_whitespace().nth(2).unwrap();
    let stopped = tell(&server, &json!({"n_predict": 10, "stop": ["~~", word]})).await;
    assert_eq!(stopped["stop_type"], "word");
    assert_eq!(stopped["stopping_word"], word);
    assert_eq!(stopped["content"], text.split_once(word).unwrap().0);
    let full = tell(&server, &json!({"n_predict": -1, "ignore_eos": true})).await;
    assert_eq!(
        (&full["stop_type"], &full["truncated"]),
        (&json!("limit"), &json!(true))
    );
    assert_eq!(full["tokens_cached"], 64);
    let grammar = json!({"grammar": "root ::= \"ab\"", "n_predict": -1});
    let ended = tell(&server, &grammar).await;
    assert_eq!(
        (&ended["stop_type"], &ended["content"]),
        (&json!("eos"), &json!("ab"))
    );
    let none = tell(&server, &json!({"n_predict": 0})).await;
    assert_eq!(
        (&none["content"], &none["tokens_predicted"]),
        (&json!(""), &json!(0))
    );
}

#[tokio::test]
async fn lines_end_a_text() {
    let server = Server::start(Setup::default()).await;
    let text = |text: &str| format!("root ::= {}", json!(text));
    for (indent, written, left, stop_type) in [
        (2, "a\n  b\n    c\nd", "a\n  b\n    c\n", "limit"),
        (2, "a\n\t\tb", "a\n\t\tb", "eos"),
        (2, "a\n\n  b", "a\n", "limit"),
        (2, "a\n b", "a\n ", "limit"),
        (0, "a\nb", "a\nb", "eos"),
    ] {
        let asked = json!({"grammar": text(written), "n_indent": indent, "n_predict": 60});
        let answer = tell(&server, &asked).await;
        assert_eq!(answer["content"], left, "{indent} {written:?}");
        assert_eq!(answer["stop_type"], stop_type);
        assert_eq!(answer["has_new_line"], true);
    }
    let long = r#"root ::= "a\n" [bc]+"#;
    let hurried = json!({"grammar": long, "t_max_predict_ms": 1, "n_predict": 400});
    let answer = tell(&server, &hurried).await;
    assert_eq!(answer["stop_type"], "limit");
    assert!(answer["content"].as_str().unwrap().starts_with("a\n"));
    assert!(
        answer["tokens_predicted"].as_u64().unwrap() < 400,
        "{answer}"
    );
    let patient = json!({"grammar": "root ::= \"bbbbbb\"", "t_max_predict_ms": 1});
    assert_eq!(tell(&server, &patient).await["content"], "bbbbbb");
}

#[tokio::test]
async fn a_response_has_the_fields_that_are_asked_for() {
    let server = Server::start(Setup::default()).await;
    let fields = [
        "content",
        "generation_settings/n_predict",
        "prompt",
        "nothing",
    ];
    let asked = json!({"response_fields": fields});
    let answer = tell(&server, &asked).await;
    let whole = tell(&server, &json!({})).await;
    assert_eq!(
        answer,
        json!({"content": whole["content"], "generation_settings/n_predict": 12, "prompt": STORY})
    );
    assert_eq!(
        tell(
            &server,
            &json!({"response_fields": ["stop", "timings/predicted_n"]})
        )
        .await,
        json!({"stop": true, "timings/predicted_n": 12})
    );
    let all = tell(&server, &json!({"response_fields": []})).await;
    assert!(all["generation_settings"].is_object());
}

#[tokio::test]
async fn a_stream_tells_progress_and_times_to_those_who_ask() {
    let server = Server::start(Setup {
        chunk: 16,
        ..Setup::default()
    })
    .await;
    let body =
        json!({"prompt": STORY.repeat(8), "return_progress": true, "timings_per_token": true});
    for path in ["/completion", "/v1/completions"] {
        let body = with(story(&json!({})), &body);
        let reply = server
            .post(path, &with(body, &json!({"stream": true})))
            .await;
        let chunks = crate::client::data(&reply.body);
        let chunks = chunks.iter().filter(|chunk| *chunk != "[DONE]");
        let chunks: Vec<Value> = chunks.map(|c| serde_json::from_str(c).unwrap()).collect();
        let progress = chunks
            .iter()
            .filter_map(|chunk| chunk.get("prompt_progress"));
        let progress: Vec<&Value> = progress.collect();
        let last = progress.last().unwrap();
        assert_eq!(last["processed"], last["total"], "{path}");
        assert!(last["total"].as_u64().unwrap() > 40 && last["cache"].is_number());
        let processed = progress.iter().map(|p| p["processed"].as_u64().unwrap());
        assert!(processed.is_sorted());
        let timed = chunks.iter().filter_map(|chunk| chunk.get("timings"));
        let written = timed.map(|timings| timings["predicted_n"].as_u64().unwrap());
        let written: Vec<u64> = written.collect();
        assert!(
            written.len() > 1 && written.is_sorted(),
            "{path} {written:?}"
        );
        assert_eq!(written.last(), Some(&12));
    }
}

#[tokio::test]
async fn some_seeds_stand_for_a_new_one() {
    let server = Server::start(Setup::default()).await;
    for seed in [json!(-1), json!(4294967295_u32)] {
        let asked = json!({"seed": seed, "temperature": 1.0, "n_predict": 4});
        let [one, other] = [tell(&server, &asked).await, tell(&server, &asked).await];
        let seed = |answer: &Value| answer["generation_settings"]["seed"].clone();
        assert_ne!(seed(&one), seed(&other));
        let again = json!({"seed": seed(&one), "temperature": 1.0, "n_predict": 4});
        assert_eq!(tell(&server, &again).await["content"], one["content"]);
    }
}

#[tokio::test]
async fn several_answers_come_in_a_list() {
    let server = Server::start(Setup::default()).await;
    let list = tell(&server, &json!({"n_cmpl": 3, "temperature": 1.0})).await;
    let list = list.as_array().unwrap();
    assert_eq!(list.len(), 3);
    for (i, answer) in list.iter().enumerate() {
        assert_eq!(answer["index"], i);
        assert_eq!(answer["generation_settings"]["seed"], 7 + i);
        let seed = json!({"seed": 7 + i, "temperature": 1.0});
        assert_eq!(answer["content"], tell(&server, &seed).await["content"]);
    }
    let body = story(&json!({"n_cmpl": 2, "stream": true}));
    let reply = server.post("/completion", &body).await;
    let chunks = crate::client::data(&reply.body);
    let chunks: Vec<Value> = chunks
        .iter()
        .map(|c| serde_json::from_str(c).unwrap())
        .collect();
    let last = |i: u64| {
        chunks
            .iter()
            .filter(move |c| c["index"] == i && c["stop"] == true)
    };
    assert_eq!((last(0).count(), last(1).count()), (1, 1));
}

#[tokio::test]
async fn what_does_not_fit_is_told_as_every_client_knows_it() {
    let server = Server::start(Setup {
        context: 64,
        ..Setup::default()
    })
    .await;
    let long = STORY.repeat(20);
    let reply = server.post("/completion", &json!({"prompt": long})).await;
    let told = error(&reply, 400);
    assert_eq!(told["type"], "exceed_context_size_error");
    assert_eq!(told["n_ctx"], 64);
    let n = told["n_prompt_tokens"].as_u64().unwrap();
    assert!(n > 64);
    let messages = json!([{"role": "user", "content": long}]);
    for path in ["/v1/chat/completions", "/v1/responses"] {
        let body = json!({"messages": messages});
        let body = match path {
            "/v1/responses" => json!({"input": long}),
            _ => body,
        };
        let reply = server.post(path, &body).await;
        let told = reply.error();
        assert_eq!(told["code"], "context_length_exceeded", "{path}");
        assert_eq!(told["type"], "exceed_context_size_error");
        assert_eq!(told["n_ctx"], 64);
        assert!(told["n_prompt_tokens"].as_u64().unwrap() >= n);
        assert!(
            told["message"]
                .as_str()
                .unwrap()
                .starts_with("prompt is too long: ")
        );
    }
}

#[tokio::test]
async fn what_cannot_be_honored_is_refused_by_name() {
    let server = Server::start(Setup::default()).await;
    for (more, param) in [
        (json!({"prompt": null}), "prompt"),
        (
            json!({"prompt": {"prompt_string": "a", "multimodal_data": ["AA=="]}}),
            "prompt.prompt_string",
        ),
        (
            json!({"prompt": {"prompt_string": "<__media__>", "multimodal_data": ["AA=="]}}),
            "prompt.multimodal_data[0]",
        ),
        (json!({"lora": [{"id": 0, "scale": 1.0}]}), "lora"),
        (json!({"n_probs": 21}), "n_probs"),
        (json!({"n_probs": "many"}), "n_probs"),
        (json!({"samplers": ["top_p", "top_k"]}), "samplers"),
        (json!({"samplers": ["infill"]}), "samplers"),
        (json!({"response_fields": "content"}), "response_fields"),
        (json!({"n_indent": -1}), "n_indent"),
        (json!({"t_max_predict_ms": "soon"}), "t_max_predict_ms"),
        (json!({"grammar": "root ::= ["}), "grammar"),
        (json!({"json_schema": 7}), "json_schema"),
        (json!({"logit_bias": [["a"]]}), "logit_bias"),
        (json!({"stop": [1]}), "stop"),
        (json!({"n_predict": 1.5}), "n_predict"),
        (json!({"grammar_lazy": true}), "grammar_lazy"),
        (json!({"min_keep": 3}), "min_keep"),
        (json!({"messages": [{}]}), "messages"),
        (
            json!({"image_data": [{"data": "", "id": 1}]}),
            "image_data[0]",
        ),
        (json!({"suffix": "a"}), "suffix"),
    ] {
        let reply = server.post("/completion", &story(&more)).await;
        let told = error(&reply, 400);
        assert_eq!(told["param"], param, "{more}: {told}");
        let message = told["message"].as_str().unwrap();
        assert!(message.starts_with(&format!("`{param}` ")), "{message}");
    }
    let harmless = json!({
        "cache_prompt": false, "id_slot": 3, "n_keep": 5, "t_max_prompt_ms": 9, "api_key": "k",
        "speculative.n_max": 4, "n_cache_reuse": 1, "min_keep": 0, "lora": [], "unheard_of": 1,
    });
    let reply = server.post("/completion", &story(&harmless)).await;
    assert_eq!(
        reply.header("x-ignored-fields"),
        Some(
            "api_key, id_slot, n_cache_reuse, n_keep, speculative.n_max, t_max_prompt_ms, unheard_of"
        )
    );
    assert_eq!(
        reply.json()["content"],
        tell(&server, &json!({})).await["content"]
    );
}

#[tokio::test]
async fn biases_and_formats_are_those_of_all_dialects() {
    let server = Server::start(Setup::default()).await;
    let plain = tell(&server, &json!({"return_tokens": true})).await;
    let first = plain["tokens"][0].clone();
    let pieces = json!({"content": plain["content"], "with_pieces": true});
    let pieces = ask(&server, "/tokenize", &pieces).await;
    let text = pieces["tokens"][0]["piece"].clone();
    for bias in [
        json!([[first, false]]),
        json!([[first, -100]]),
        json!([[text, false]]),
        json!({first.to_string(): -100}),
        json!({text.as_str().unwrap(): -100}),
    ] {
        let asked = json!({"logit_bias": bias, "return_tokens": true});
        let tokens = tell(&server, &asked).await["tokens"].clone();
        assert!(!tokens.as_array().unwrap().contains(&first), "{bias}");
    }
    let schema = json!({"type": "object", "properties": {"a": {"enum": [7, 8]}}, "required": ["a"], "additionalProperties": false});
    let asked = json!({"json_schema": schema, "n_predict": 100});
    let answer = tell(&server, &asked).await;
    let answer: Value = serde_json::from_str(answer["content"].as_str().unwrap()).unwrap();
    assert!(answer["a"].is_i64());
}
