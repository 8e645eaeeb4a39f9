//! `/props`, `/slots` and `/lora-adapters`.

use serde_json::{Value, json};
use tokio::time::timeout;

use super::{error, story};
use crate::client::{PATIENCE, Server, Setup, request};

#[tokio::test]
async fn properties_are_those_of_the_model_and_the_defaults() {
    let server = Server::start(Setup::default()).await;
    let props = server.get("/props").await.json();
    let defaults = &props["default_generation_settings"];
    assert_eq!(defaults["n_ctx"], 512);
    for name in [
        "temperature",
        "top_k",
        "samplers",
        "n_predict",
        "stop",
        "speculative.n_max",
    ] {
        assert!(!defaults["params"][name].is_null(), "{name}: {props}");
    }
    assert_eq!(props["total_slots"], 2);
    assert_eq!(props["model_path"], "tiny-qwen3.5");
    assert_eq!(
        props["modalities"],
        json!({"vision": false, "audio": false, "video": false})
    );
    let template = props["chat_template"].as_str().unwrap();
    assert_eq!(
        Some(template),
        server.engine.text().template.as_ref().map(|t| t.source())
    );
    assert!(
        props["build_info"]
            .as_str()
            .unwrap()
            .starts_with("paceline-")
    );
    assert_eq!(
        (&props["bos_token"], &props["eos_token"]),
        (&json!(""), &json!("<|endoftext|>"))
    );
    let told = error(&server.post("/props", &json!({})).await, 501);
    assert_eq!(told["type"], "not_supported_error");
}

#[tokio::test]
async fn slots_show_what_runs_and_nothing_that_was_written() {
    let server = Server::start(Setup::default()).await;
    let idle = server.get("/slots").await.json();
    let slot = |id| json!({"id": id, "n_ctx": 512, "speculative": true, "is_processing": false});
    assert_eq!(idle, json!([slot(0), slot(1)]));
    let long = story(&json!({"n_predict": -1, "ignore_eos": true, "stream": true, "top_k": 9}));
    let bytes = request("/completion", "", long.to_string().as_bytes());
    let mut one = server.open(&bytes).await;
    one.until("\"content\"").await;
    let busy = server.get("/slots").await.json();
    assert_eq!(busy[1], slot(1));
    let first = &busy[0];
    assert_eq!(
        (&first["is_processing"], &first["id_task"]),
        (&json!(true), &json!(0))
    );
    assert_eq!(first["params"]["top_k"], 9);
    let next = &first["next_token"][0];
    assert!(
        next["n_decoded"].as_u64().unwrap() > 0 && next["n_remain"] == -1,
        "{first}"
    );
    let told = busy.to_string();
    assert!(
        !told.contains("rabbit") && !told.contains("prompt\""),
        "{told}"
    );
    assert_eq!(server.get("/slots?fail_on_no_slot=1").await.status, 200);
    let mut two = server.open(&bytes).await;
    two.until("\"content\"").await;
    let told = error(&server.get("/slots?fail_on_no_slot=1").await, 503);
    assert_eq!(told["type"], "unavailable_error");
    assert_eq!(server.get("/slots").await.status, 200);
    // A client that leaves frees its slot.
    drop((one, two));
    server.until_idle().await;
    // The server learns it from the engine, a little later.
    let free = async { while server.get("/slots").await.json() != idle {} };
    timeout(PATIENCE, free).await.expect("both slots are free");
}

#[tokio::test]
async fn there_are_no_adapters() {
    let server = Server::start(Setup::default()).await;
    assert_eq!(server.get("/lora-adapters").await.json(), json!([]));
    let reply = server.post("/lora-adapters", &json!({})).await;
    let told: Value = error(&reply, 501);
    assert!(
        told["message"]
            .as_str()
            .unwrap()
            .contains("no LoRA adapters")
    );
}
