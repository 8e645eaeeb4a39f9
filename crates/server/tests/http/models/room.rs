//! Models that make room for others, or leave for want of requests.

use serde_json::json;
use server::{Config, ModelsOptions};
use tokio::time::{Duration, Instant};

use super::{Known, endless, refusal, serve, state, story, two, unload, until_state};

/// At most so many models at a time.
fn most(max_loaded: usize) -> ModelsOptions {
    ModelsOptions {
        max_loaded: Some(max_loaded),
        ..ModelsOptions::default()
    }
}

#[tokio::test]
async fn the_model_that_was_used_longest_ago_makes_room() {
    let models = ["a", "b", "c"].map(|name| Known::new(name, "tiny-qwen3.5"));
    let peer = serve(&models, most(2), Config::default()).await;
    for name in ["a", "b", "a", "c"] {
        assert_eq!(peer.chat(&story(name)).await.status, 200);
    }
    assert_eq!(state(&peer, "a").await, "loaded");
    assert_eq!(state(&peer, "b").await, "unloaded");
    assert_eq!(state(&peer, "c").await, "loaded");
    assert_eq!(peer.chat(&story("b")).await.status, 200);
    assert_eq!(state(&peer, "a").await, "unloaded");
    assert_eq!(models.each_ref().map(Known::tries), [1, 2, 1]);
}

#[tokio::test]
async fn a_model_that_writes_makes_no_room() {
    let models = two();
    let peer = serve(&models, most(1), Config::default()).await;
    let mut writing = peer.open(&endless("qwen")).await;
    writing.until("\"text\":\"").await;
    let mut hasty = story("gemma");
    hasty["timeout"] = json!(0.2);
    let refused = peer.chat(&hasty).await;
    assert_eq!(refusal(&refused), (504, "request_timeout".to_owned()));
    assert_eq!(models[1].tries(), 0);
    assert_eq!(state(&peer, "qwen").await, "loaded");
    writing.buffer.clear();
    writing.until("\"text\":\"").await;

    // Who came first is first, though the model of the second is there.
    let order = std::sync::Mutex::new(Vec::new());
    let ask = async |name: &'static str| {
        let reply = peer.chat(&story(name)).await;
        order.lock().unwrap().push(name);
        reply.text()
    };
    let first = ask("gemma");
    let then = async {
        // The first waits once the model that it needs takes no more requests: one that it takes has its
        // token long before this timeout.
        let mut hasty = story("qwen");
        (hasty["timeout"], hasty["max_tokens"]) = (json!(5), json!(1));
        while peer.chat(&hasty).await.status != 504 {}
        let second = ask("qwen");
        let leave = async { drop(writing) };
        tokio::join!(second, leave).0
    };
    let (gemma, qwen) = tokio::join!(first, then);
    assert!(!gemma.is_empty() && !qwen.is_empty());
    assert_eq!(*order.lock().unwrap(), ["gemma", "qwen"]);
    assert_eq!([models[0].tries(), models[1].tries()], [2, 1]);
}

#[tokio::test]
async fn models_share_the_memory_that_they_may_take() {
    let models = two();
    let peer = serve(&models, ModelsOptions::default(), Config::default()).await;
    let mut sizes = Vec::new();
    for name in ["qwen", "gemma"] {
        peer.chat(&story(name)).await.text();
        let listed = peer.get(&format!("/v1/models/{name}")).await.json();
        let size = |key: &str| listed["meta"][key].as_u64().unwrap();
        sizes.push(size("size") + size("memory_bytes"));
    }
    let all: u64 = sizes.iter().sum();
    // The assistant's own weights come on top.
    for (memory, first_stays) in [(2 * all, true), (all - 1, false)] {
        let options = ModelsOptions {
            memory: Some(memory),
            ..ModelsOptions::default()
        };
        let peer = serve(&models, options, Config::default()).await;
        for name in ["qwen", "gemma"] {
            assert_eq!(peer.chat(&story(name)).await.status, 200, "{memory}");
        }
        let expected = if first_stays { "loaded" } else { "unloaded" };
        assert_eq!(state(&peer, "qwen").await, expected, "{memory}");
    }
    let tight = ModelsOptions {
        memory: Some(1000),
        ..ModelsOptions::default()
    };
    let peer = serve(&models, tight, Config::default()).await;
    let refused = peer.chat(&story("qwen")).await;
    assert_eq!(refusal(&refused), (500, "model_load_failed".to_owned()));
}

#[tokio::test]
async fn a_model_without_requests_leaves() {
    const IDLE: Duration = Duration::from_millis(30);
    let options = ModelsOptions {
        idle_unload: Some(IDLE),
        ..ModelsOptions::default()
    };
    let models = two();
    let peer = serve(&models, options, Config::default()).await;
    assert_eq!(peer.chat(&story("gemma")).await.status, 200);
    let mut writing = peer.open(&endless("qwen")).await;
    writing.until("\"text\":\"").await;
    until_state(&peer, "gemma", "unloaded").await;
    // One that writes stays, though no request has come for longer.
    let start = Instant::now();
    while start.elapsed() < 3 * IDLE {
        writing.buffer.clear();
        writing.until("\"text\":\"").await;
    }
    assert_eq!(state(&peer, "qwen").await, "loaded");
    drop(writing);
    until_state(&peer, "qwen", "unloaded").await;
    // Neither was unloaded before those had it that it was loaded for.
    assert_eq!(models.each_ref().map(Known::tries), [1, 1]);
}

#[tokio::test]
async fn ollama_s_requests_say_how_long_a_model_stays() {
    let options = ModelsOptions {
        idle_unload: Some(Duration::from_millis(30)),
        ..ModelsOptions::default()
    };
    let models = two();
    let peer = serve(&models, options, Config::default()).await;
    let ask = async |name: &str, keep: serde_json::Value| {
        let body = json!({"model": name, "prompt": "Hi", "stream": false, "keep_alive": keep, "options": {"num_predict": 1}});
        peer.post("/api/generate", &body).await
    };
    assert_eq!(ask("qwen", json!("10m")).await.status, 200);
    assert_eq!(ask("gemma", json!(-1)).await.status, 200);
    // A third model with the server's own time is gone by then; these are not.
    let listed = peer.get("/api/ps").await.json();
    let year = |i: usize| listed["models"][i]["expires_at"].as_str().unwrap()[..4].to_owned();
    let year = |i: usize| year(i).parse::<u64>().unwrap();
    assert!(year(1) > year(0) + 50, "{listed}");
    assert_eq!(ask("qwen", json!(0)).await.status, 200);
    until_state(&peer, "qwen", "unloaded").await;
    assert_eq!(state(&peer, "gemma").await, "loaded");
    // A request that asks for nothing has it unloaded.
    let over = json!({"model": "gemma", "keep_alive": 0});
    let reply = peer.post("/api/generate", &over).await.json();
    assert_eq!(
        (&reply["done"], &reply["done_reason"]),
        (&json!(true), &json!("unload"))
    );
    until_state(&peer, "gemma", "unloaded").await;
    assert_eq!(
        peer.post("/api/chat", &over).await.json()["done_reason"],
        "unload"
    );
    assert_eq!((models[0].tries(), models[1].tries()), (1, 1));
    // What says nothing of it goes by the server again.
    assert_eq!(ask("gemma", json!(-1)).await.status, 200);
    assert_eq!(peer.chat(&story("gemma")).await.status, 200);
    until_state(&peer, "gemma", "unloaded").await;
    let wrong = ask("gemma", json!("soon")).await;
    assert_eq!(wrong.status, 400, "{wrong:?}");
}

#[tokio::test]
async fn counters_go_on_when_a_model_comes_back() {
    let peer = serve(&two(), ModelsOptions::default(), Config::default()).await;
    let count = async |name: &str| -> f64 {
        let page = peer.get("/metrics").await.body;
        let series = format!("{name}{{model_name=\"qwen\"}} ");
        let value = page.lines().find_map(|line| line.strip_prefix(&series));
        value.unwrap_or_else(|| panic!("{page}")).parse().unwrap()
    };
    let body = story("qwen");
    peer.chat(&body).await.text();
    let once = count("vllm:prompt_tokens_total").await;
    assert!(once > 0.0);
    unload(&peer, "qwen").await;
    assert_eq!(count("vllm:prompt_tokens_total").await, once);
    assert_eq!(count("vllm:num_requests_running").await, 0.0);
    assert_eq!(count("paceline:prefix_cache_texts").await, 0.0);
    peer.chat(&body).await.text();
    assert_eq!(count("vllm:prompt_tokens_total").await, 2.0 * once);
    assert_eq!(count("vllm:e2e_request_latency_seconds_count").await, 2.0);
}
