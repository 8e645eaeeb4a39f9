//! Responses that are kept: what can be read and gone on from, by whom, and for how long.

use serde_json::{Value, json};
use server::Keys;

use super::{RESPONSES, events, hello, respond, server, text};
use crate::client::{Reply, Server, Setup, request};
use crate::wire::with;

async fn delete(server: &Server, path: &str, headers: &str) -> Reply {
    let head = format!("DELETE {path} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n");
    server.send(head.as_bytes()).await
}

#[tokio::test]
async fn responses_are_kept_read_and_deleted() {
    let server = server("tiny-qwen3.5").await;
    let items = json!([{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two", "id": "own"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, {"type": "function_call_output", "call_id": "c", "output": "x"}]);
    let body = with(
        &hello(),
        json!({"input": items, "instructions": "Be kind.", "max_output_tokens": 4}),
    );
    let first = respond(&server, &body).await;
    let path = format!("{RESPONSES}/{}", first["id"].as_str().unwrap());
    assert_eq!(server.get(&path).await.json(), first);
    // A stream is kept as well.
    let stream = server
        .post(RESPONSES, &with(&body, json!({"stream": true})))
        .await;
    let last = events(&stream).pop().unwrap()["response"].clone();
    let streamed = format!("/responses/{}/", last["id"].as_str().unwrap());
    assert_eq!(server.get(&streamed).await.json(), last);

    let list = server
        .get(&format!("{path}/input_items?order=asc"))
        .await
        .json();
    assert_eq!(
        (&list["object"], &list["has_more"]),
        (&json!("list"), &json!(false))
    );
    let data = list["data"].as_array().unwrap();
    let kinds: Vec<&str> = data
        .iter()
        .map(|item| item["type"].as_str().unwrap())
        .collect();
    assert_eq!(
        kinds,
        [
            "message",
            "message",
            "function_call",
            "function_call_output"
        ]
    );
    assert!(data.iter().all(|item| item["id"].is_string()));
    assert_eq!(
        data[0]["content"],
        json!([{"type": "input_text", "text": "One"}])
    );
    assert_eq!(
        (&data[1]["id"], &data[1]["content"][0]["type"]),
        (&json!("own"), &json!("output_text"))
    );
    assert_eq!(
        (&list["first_id"], &list["last_id"]),
        (&data[0]["id"], &data[3]["id"])
    );
    let page = server
        .get(&format!(
            "{path}/input_items?limit=2&after={}",
            data[3]["id"].as_str().unwrap()
        ))
        .await
        .json();
    assert_eq!(page["data"], json!([data[2], data[1]]));
    assert_eq!(page["has_more"], true);
    for bad in ["limit=0", "limit=x", "order=up"] {
        assert_eq!(
            server
                .get(&format!("{path}/input_items?{bad}"))
                .await
                .status,
            400
        );
    }
    assert_eq!(
        server
            .get(&format!("{path}/input_items?after=none"))
            .await
            .status,
        404
    );
    assert_eq!(server.get(&format!("{path}?stream=true")).await.status, 400);

    // What goes on from it has its conversation, and not its instructions.
    let next = with(
        &hello(),
        json!({"input": "And?", "previous_response_id": first["id"], "max_output_tokens": 4}),
    );
    let second = respond(&server, &next).await;
    assert_eq!(second["previous_response_id"], first["id"]);
    assert_eq!(second["instructions"], Value::Null);
    let mut whole = items.as_array().unwrap().clone();
    whole.extend(first["output"].as_array().unwrap().clone());
    whole.push(json!({"role": "user", "content": "And?"}));
    let whole = with(
        &hello(),
        json!({"input": whole, "store": false, "max_output_tokens": 4}),
    );
    let whole = respond(&server, &whole).await;
    assert_eq!(
        whole["usage"]["input_tokens"],
        second["usage"]["input_tokens"]
    );
    assert_eq!(text(&whole), text(&second));
    assert_eq!(whole["store"], false);
    let unkept = format!("{RESPONSES}/{}", whole["id"].as_str().unwrap());
    assert_eq!(server.get(&unkept).await.status, 404);

    let cancel = server.post(&format!("{path}/cancel"), &json!({})).await;
    assert_eq!(cancel.status, 400);
    assert!(
        cancel.error()["message"]
            .as_str()
            .unwrap()
            .contains("background")
    );
    let deleted = delete(&server, &path, "").await;
    assert_eq!(
        deleted.json(),
        json!({"id": first["id"], "object": "response", "deleted": true})
    );
    for reply in [
        delete(&server, &path, "").await,
        server.get(&path).await,
        server.get(&format!("{path}/input_items")).await,
        server.post(&format!("{path}/cancel"), &json!({})).await,
    ] {
        assert_eq!(
            (reply.status, &reply.error()["code"]),
            (404, &json!("response_not_found"))
        );
    }
    // The third response's conversation is gone, and the message says which part of it.
    let third = with(&hello(), json!({"previous_response_id": second["id"]}));
    let reply = server.post(RESPONSES, &third).await;
    assert_eq!(reply.status, 400);
    assert_eq!(reply.error()["code"], "previous_response_not_found");
    let message = reply.error()["message"].as_str().unwrap().to_owned();
    assert!(
        message.contains(first["id"].as_str().unwrap()) && message.contains("whole conversation"),
        "{message}"
    );
    assert_eq!(
        server
            .send(b"PUT /v1/responses/x HTTP/1.1\r\nhost: localhost\r\n\r\n")
            .await
            .error()["message"],
        "use GET or DELETE here, not PUT"
    );
}

#[tokio::test]
async fn the_store_is_bounded() {
    let mut setup = Setup::default();
    setup.config.limits.stored_responses = 2;
    let server = Server::start(setup).await;
    let body = with(&hello(), json!({"max_output_tokens": 1}));
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(
            respond(&server, &body).await["id"]
                .as_str()
                .unwrap()
                .to_owned(),
        );
    }
    let mut there = Vec::new();
    for id in &ids {
        there.push(server.get(&format!("{RESPONSES}/{id}")).await.status);
    }
    assert_eq!(there, [404, 200, 200]);
    let mut setup = Setup::default();
    setup.config.limits.stored_bytes = 5000;
    let server = Server::start(setup).await;
    let long = with(
        &body,
        json!({"instructions": "word ".repeat(80), "metadata": {"a": "x".repeat(5000)}}),
    );
    let id = respond(&server, &long).await["id"]
        .as_str()
        .unwrap()
        .to_owned();
    assert_eq!(server.get(&format!("{RESPONSES}/{id}")).await.status, 404);
}

#[tokio::test]
async fn a_response_belongs_to_its_key() {
    let mut setup = Setup::default();
    setup.config.keys = Keys::new(["one", "two"]);
    let server = Server::start(setup).await;
    let post = async |key: &str, body: &Value| {
        let headers = format!("authorization: Bearer {key}\r\n");
        server
            .send(&request(RESPONSES, &headers, body.to_string().as_bytes()))
            .await
    };
    let body = with(&hello(), json!({"max_output_tokens": 2}));
    let first = post("one", &body).await.json();
    let id = first["id"].as_str().unwrap();
    let get = async |path: &str, headers: &str| {
        server
            .send(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n").as_bytes())
            .await
    };
    let path = format!("{RESPONSES}/{id}");
    for path in [path.clone(), format!("{path}/input_items")] {
        assert_eq!(get(&path, "").await.status, 401);
        assert_eq!(get(&path, "x-api-key: two\r\n").await.status, 404);
        assert_eq!(get(&path, "x-api-key: one\r\n").await.status, 200);
    }
    let item = json!([{"type": "item_reference", "id": first["output"][0]["id"]}, {"role": "user", "content": "And?"}]);
    for (more, status) in [
        (json!({"previous_response_id": id}), 400),
        (json!({"input": item}), 404),
    ] {
        let body = with(&body, more);
        assert_eq!(post("two", &body).await.status, status);
        assert_eq!(post("one", &body).await.status, 200);
    }
    assert_eq!(
        delete(&server, &path, "x-api-key: two\r\n").await.status,
        404
    );
    assert_eq!(
        delete(&server, &path, "x-api-key: one\r\n").await.status,
        200
    );
}
