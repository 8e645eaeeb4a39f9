//! Answers that follow a schema, an expression or a grammar, with speculation on.

use serde_json::{Value, json};

use crate::client::{Server, Setup};
use crate::wire::with;

/// A server of the bundled model of this name.
async fn server(name: &'static str) -> Server {
    Server::start(Setup {
        model: name,
        context: 1024,
        ..Setup::default()
    })
    .await
}

fn asking(more: &Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": "Describe a person."}],
        "max_tokens": 200, "temperature": 0, "seed": 3,
    });
    let more = more.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(more);
    body
}

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "first_name": {"type": "string", "minLength": 1, "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "favorite_color": {"enum": ["red", "green", "blue"]},
            "is_a_student": {"type": "boolean"},
            "pets": {
                "type": "array", "minItems": 1, "maxItems": 2,
                "items": {"type": "object", "properties": {"kind": {"type": "string", "maxLength": 8}}, "required": ["kind"], "additionalProperties": false},
            },
        },
        "required": ["first_name", "age", "favorite_color", "is_a_student", "pets"],
        "additionalProperties": false,
    })
}

/// Whether `value` fits `schema`, as far as [`person`] needs it.
fn fits(schema: &Value, value: &Value) -> bool {
    if let Some(allowed) = schema["enum"].as_array() {
        return allowed.contains(value);
    }
    let number = |key: &str| schema[key].as_u64();
    let within = |n: u64, least: &str, most: &str| {
        number(least).is_none_or(|least| n >= least) && number(most).is_none_or(|most| n <= most)
    };
    match schema["type"].as_str().unwrap() {
        "string" => value
            .as_str()
            .is_some_and(|text| within(text.chars().count() as u64, "minLength", "maxLength")),
        "integer" => value
            .as_u64()
            .is_some_and(|n| within(n, "minimum", "maximum")),
        "boolean" => value.is_boolean(),
        "array" => value.as_array().is_some_and(|items| {
            within(items.len() as u64, "minItems", "maxItems")
                && items.iter().all(|item| fits(&schema["items"], item))
        }),
        "object" => value.as_object().is_some_and(|object| {
            let known = schema["properties"].as_object().unwrap();
            let required = schema["required"].as_array().unwrap();
            object
                .iter()
                .all(|(key, value)| known.get(key).is_some_and(|s| fits(s, value)))
                && required
                    .iter()
                    .all(|key| object.contains_key(key.as_str().unwrap()))
        }),
        other => panic!("no such type: {other}"),
    }
}

#[test]
fn the_check_can_fail() {
    let good = json!({"first_name": "Ann", "age": 3, "favorite_color": "red", "is_a_student": true, "pets": [{"kind": "cat"}]});
    assert!(fits(&person(), &good));
    for (key, value) in [
        ("age", json!(121)),
        ("first_name", json!("")),
        ("favorite_color", json!("pink")),
        ("pets", json!([])),
        ("more", json!(1)),
    ] {
        let mut bad = good.clone();
        bad[key] = value;
        assert!(!fits(&person(), &bad), "{key}");
    }
}

fn format(schema: Value) -> Value {
    json!({"response_format": {"type": "json_schema", "json_schema": {"name": "person", "strict": true, "schema": schema}}})
}

#[tokio::test]
async fn an_answer_follows_its_schema_and_is_the_same_without_speculation() {
    for name in ["tiny-gemma4", "tiny-qwen3.5"] {
        let server = server(name).await;
        for (temperature, thinking) in [(0.0, false), (0.8, false), (1.5, false), (0.8, true)] {
            let mut body = asking(&format(person()));
            body["temperature"] = json!(temperature);
            body["max_tokens"] = json!(400);
            body["enable_thinking"] = json!(thinking);
            body["thinking_budget"] = json!(40);
            let reply = server.chat(&body).await;
            assert_eq!(reply.status, 200, "{}", reply.json());
            let reply = reply.json();
            let what = format!("{name} {temperature} {thinking}: {reply}");
            let choice = &reply["choices"][0];
            assert_eq!(choice["finish_reason"], "stop", "{what}");
            let answer = choice["message"]["content"].as_str().unwrap();
            let value: Value = serde_json::from_str(answer).expect(&what);
            assert!(fits(&person(), &value), "{what}");
            assert!(
                reply["speculation"]["accepted"].as_u64().unwrap() > 10,
                "{what}"
            );

            body["speculation"] = json!("off");
            let plain = server.chat(&body).await.json();
            assert_eq!(plain["choices"], reply["choices"], "{what}");
            assert_eq!(plain["speculation"]["drafted"], 0);

            body["stream"] = json!(true);
            body["speculation"] = json!("auto");
            let streamed = server.chat(&body).await;
            assert_eq!(streamed.text(), answer, "{what}");
        }
    }
}

#[tokio::test]
async fn every_kind_of_grammar_is_followed_by_both_endpoints() {
    let server = server("tiny-gemma4").await;
    let digits = |text: &str| text.len() == 4 && text.bytes().all(|b| b.is_ascii_digit());
    for (more, check) in [
        (
            json!({"response_format": {"type": "json_object"}}),
            (|text| serde_json::from_str::<Value>(text).is_ok_and(|v| v.is_object()))
                as fn(&str) -> bool,
        ),
        (json!({"regex": "[0-9]{4}"}), digits),
        (json!({"structured_outputs": {"regex": "[0-9]{4}"}}), digits),
        (json!({"grammar": "root ::= [0-9]{4}"}), digits),
        (json!({"guided_grammar": "start: /[0-9]{4}/"}), digits),
        (json!({"guided_choice": ["left", "right"]}), |text| {
            ["left", "right"].contains(&text)
        }),
    ] {
        let reply = server.chat(&asking(&more)).await.json();
        let choice = &reply["choices"][0];
        // An object may go on for ever.
        if choice["finish_reason"] == "stop" || !more["response_format"].is_object() {
            assert!(
                check(choice["message"]["content"].as_str().unwrap()),
                "{more}: {reply}"
            );
        }
        let mut body = more.clone();
        body["prompt"] = json!("Once upon a time");
        body["max_tokens"] = json!(200);
        let reply = server.post("/v1/completions", &body).await.json();
        let choice = &reply["choices"][0];
        if choice["finish_reason"] == "stop" || !more["response_format"].is_object() {
            assert!(check(choice["text"].as_str().unwrap()), "{more}: {reply}");
        }
    }
}

#[tokio::test]
async fn a_grammar_that_cannot_be_followed_is_refused_by_name() {
    let server = server("tiny-gemma4").await;
    for (more, param, says) in [
        (
            format(json!({"type": "array", "uniqueItems": true})),
            "response_format.json_schema.schema",
            "uniqueItems",
        ),
        (json!({"regex": "(a"}), "regex", "regular expression"),
        (json!({"grammar": "root ::= missing"}), "grammar", "missing"),
        (
            json!({"regex": "a", "guided_choice": ["a"]}),
            "regex",
            "cannot be combined",
        ),
    ] {
        let reply = server.chat(&asking(&more)).await;
        assert_eq!(reply.status, 400, "{more}");
        let error = reply.error();
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().contains(says), "{error}");
    }
}

#[tokio::test]
async fn a_budget_closes_the_reasoning_with_the_model_s_own_mark() {
    let server = server("tiny-qwen3.5").await;
    let mut body = asking(&json!({"enable_thinking": true, "thinking_budget": 5}));
    let reply = server.chat(&body).await.json();
    let tokens = &reply["usage"]["completion_tokens_details"]["reasoning_tokens"];
    assert!(tokens.as_u64().unwrap() <= 6, "five and the mark: {reply}");
    body["reasoning_format"] = json!("none");
    let reply = server.chat(&body).await.json();
    let text = reply["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(
        text.starts_with("<think>") && text.contains("</think>"),
        "{text}"
    );
}

/// Going back over forced tokens once left the parser refusing a token of its own mask.
#[tokio::test]
async fn drafts_of_forced_tokens_that_are_taken_back_leave_no_trace() {
    let server = Server::start(Setup {
        model: "tiny-gemma4",
        context: 2048,
        draft: engine::DraftChoice::Named("ngram", None),
        ..Setup::default()
    })
    .await;
    let schema: Value = serde_json::from_str(
        r#"{"type": "object", "properties": {"name": {"type": "string", "format": "ipv4"}, "color": {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 15}, {"type": "object", "properties": {"tags": {"type": "string", "minLength": 2, "maxLength": 7}, "name": {"type": "string", "minLength": 2, "maxLength": 5}, "owner": {"type": "string", "pattern": "^\\d{3}-\\d{4}$", "maxLength": 20}}, "required": ["owner"], "additionalProperties": false}]}, "owner": {"type": "object", "properties": {"name": {"type": "array", "items": {"type": "string", "minLength": 0, "maxLength": 16}, "minItems": 0, "maxItems": 2}, "color": {"type": ["string", "null"], "maxLength": 10}, "notes": {"type": "array", "items": {"type": ["string", "null"], "maxLength": 10}, "minItems": 1, "maxItems": 1}, "age": {"type": "string", "pattern": "^\\d{3}-\\d{4}$", "maxLength": 20}, "id": {"type": "object", "properties": {"color": {"type": "string", "format": "uuid"}, "city": {"type": "null"}}, "required": ["color", "city"], "additionalProperties": false}}, "required": ["name", "color", "age", "id"], "additionalProperties": false}, "age": {"anyOf": [{"type": "string", "pattern": "^[A-Z][a-z]{2,8}$", "maxLength": 20}, {"type": "string", "minLength": 1, "maxLength": 10}]}, "price": {"type": "object", "properties": {"is_open": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}, "color": {"type": "null"}, "notes": {"type": "array", "items": {"type": "null"}, "minItems": 0, "maxItems": 0}, "age": {"type": "array", "items": {"type": "string", "pattern": "^\\d{3}-\\d{4}$", "maxLength": 20}, "minItems": 0, "maxItems": 1}, "owner": {"type": "array", "items": {"type": "number", "minimum": 0, "exclusiveMaximum": 10}, "minItems": 0, "maxItems": 1}}, "required": ["is_open", "age", "owner"], "additionalProperties": false}}, "required": ["name", "color", "owner", "age", "price"], "additionalProperties": false}"#,
    )
    .unwrap();
    for thinking in [false, true] {
        let mut body = json!({
            "messages": [{"role": "user", "content": "Describe something as JSON."}],
            "max_tokens": 600, "temperature": 0.8, "seed": 11, "enable_thinking": thinking,
            "thinking_budget": 32, "speculation": "auto",
        });
        let more = format(schema.clone());
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let drafted = server.chat(&body).await;
        assert_eq!(drafted.status, 200, "{drafted:?}");
        body["speculation"] = json!("off");
        let plain = server.chat(&body).await.json();
        assert_eq!(drafted.json()["choices"], plain["choices"]);
    }
}

#[tokio::test]
async fn no_thought_stands_before_an_answer_that_was_not_to_reason() {
    let server = server("tiny-gemma4").await;
    let format = json!({"response_format": {"type": "json_schema",
        "json_schema": {"name": "person", "schema": person()}},
        "messages": [{"role": "user", "content": "Invent a pet."}]});
    // Of what the model would say by itself, the mask leaves little but the mark of a thought.
    for more in [
        json!({}),
        json!({"enable_thinking": false}),
        json!({"temperature": 1.0}),
        json!({"speculation": "off"}),
    ] {
        let body = with(&asking(&format), more.clone());
        let document = server.chat(&body).await.json();
        let choice = &document["choices"][0];
        assert_eq!(choice["finish_reason"], "stop", "{more}: {choice}");
        let message = &choice["message"];
        assert!(
            message.get("reasoning_content").is_none(),
            "{more}: {message}"
        );
        let text = message["content"].as_str().unwrap();
        assert!(
            fits(&person(), &serde_json::from_str(text).unwrap()),
            "{text}"
        );
    }
    let thinking = with(&asking(&format), json!({"enable_thinking": true}));
    let document = server.chat(&thinking).await.json();
    let message = &document["choices"][0]["message"];
    assert!(message["reasoning_content"].is_string(), "{message}");
}
