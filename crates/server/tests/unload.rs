//! What a model leaves behind that was loaded and unloaded: no memory and no thread. Memory is
//! counted by the allocator, in a program of its own.

#[path = "http/client.rs"]
#[allow(dead_code, reason = "other tests need more of it")]
mod client;

use std::path::Path;
use std::sync::Arc;

use engine::{Engine, EngineOptions, LoadOptions, Source};
use peak_alloc::PeakAlloc;
use serde_json::json;
use server::{Config, LoadFailure, Loading, ModelConfig, ModelSpec, Models, ModelsOptions};
use tokio::time::{Duration, Instant, sleep};

use client::{PATIENCE, Peer};

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Cycles after which everything is there that is made once.
const WARM: usize = 2;
/// Cycles that are counted.
const COUNTED: usize = 6;
/// Bytes that a cycle may leave, such as a longer list in the log's or the runtime's own tables; the
/// tokenizer alone takes a hundred times as much.
const LEFT_MAX: usize = 16 << 10;

/// Loads the model in `folder`, on threads of its own.
fn load(folder: &str, loading: &Loading) -> Result<Engine, LoadFailure> {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    let options = LoadOptions {
        sequences: 2,
        context: Some(512),
        ..LoadOptions::default()
    };
    let backend = cpu::Cpu::new(cpu::CpuOptions {
        threads: 2,
        ..cpu::CpuOptions::default()
    });
    let source = Source::Folder(models.join(folder));
    let model = engine::load(Arc::new(backend.unwrap()), &source, &options).unwrap();
    let options = EngineOptions {
        counters: loading.counters(),
        ..EngineOptions::default()
    };
    Ok(Engine::start(model, options))
}

/// Threads of this program that a model starts.
#[cfg(target_os = "linux")]
fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| {
        // One that has just ended has no name.
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
    });
    let is_model_s = |name: &String| {
        let name = name.trim();
        ["engine", "load", "unload"].contains(&name) || name.starts_with("cpu-")
    };
    names.filter(is_model_s).count()
}

async fn until(what: &str, is_so: impl AsyncFn() -> bool) {
    let start = Instant::now();
    while !is_so().await {
        assert!(start.elapsed() < PATIENCE, "{what}");
        sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn a_model_that_is_unloaded_leaves_no_memory_and_no_thread() {
    let names = ["tiny-qwen3.5", "tiny-gemma4"];
    let specs = names.map(|name| {
        let config = ModelConfig {
            names: vec![name.to_owned()],
            ..ModelConfig::default()
        };
        ModelSpec::new(config, Box::new(move |loading| load(name, loading)))
    });
    let models = Models::new(Vec::from(specs), ModelsOptions::default());
    let peer = Peer::start(Config::default(), models).await;
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false});
    let mut before = 0;
    for cycle in 0..WARM + COUNTED {
        for name in names {
            // A chat, a stream and a grammar: what a model keeps between requests is there.
            let chat = json!({
                "model": name, "temperature": 0, "max_tokens": 16, "messages": [{"role": "user", "content": "Hi"}],
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            });
            assert_eq!(peer.chat(&chat).await.status, 200);
            let stream = json!({"model": name, "prompt": "Once upon a time", "max_tokens": 16, "stream": true});
            assert_eq!(peer.post("/v1/completions", &stream).await.status, 200);
            let reply = peer.post("/models/unload", &json!({"model": name})).await;
            assert_eq!(reply.status, 200, "{reply:?}");
            until("it is unloaded", async || {
                let listed = peer.get(&format!("/v1/models/{name}")).await.json();
                listed["status"]["value"] == "unloaded"
            })
            .await;
        }
        #[cfg(target_os = "linux")]
        until("its threads have ended", async || threads() == 0).await;
        let now = ALLOCATOR.current_usage();
        eprintln!("cycle {cycle}: {now} bytes");
        if cycle + 1 == WARM {
            before = now;
        }
    }
    // A connection that has been closed here ends there a little later.
    until("cycles leave memory behind", async || {
        let left = ALLOCATOR.current_usage().saturating_sub(before);
        left <= COUNTED * LEFT_MAX
    })
    .await;
}
