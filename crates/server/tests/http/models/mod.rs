//! Several models in one server: which of them are loaded, for whom, and what is said meanwhile.

mod loading;
mod names;
mod room;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex};

use cpu::Cpu;
use engine::{Engine, EngineOptions, LoadOptions, Source};
use serde_json::{Value, json};
use server::{Config, LoadFailure, Loading, ModelConfig, ModelSpec, Models, ModelsOptions};
use tokio::time::{Duration, Instant, sleep};

use crate::client::{PATIENCE, Peer, Reply};

/// The backend of all models here.
static BACKEND: LazyLock<Arc<Cpu>> = LazyLock::new(|| {
    let options = cpu::CpuOptions {
        threads: 1,
        ..cpu::CpuOptions::default()
    };
    Arc::new(Cpu::new(options).unwrap())
});

/// A model that a test may load.
#[derive(Clone)]
struct Known {
    name: &'static str,
    folder: &'static str,
    control: Arc<Control>,
}

/// What a test knows and decides of a model.
struct Control {
    /// Tries to load the model.
    tries: AtomicUsize,
    /// Whether loading fails.
    fails: AtomicBool,
    /// Whether loading may go on.
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Known {
    /// The model in `folder`, called `name`.
    fn new(name: &'static str, folder: &'static str) -> Self {
        let control = Control {
            tries: AtomicUsize::new(0),
            fails: AtomicBool::new(false),
            is_open: Mutex::new(true),
            opened: Condvar::new(),
        };
        Known {
            name,
            folder,
            control: Arc::new(control),
        }
    }

    /// Has loading wait before its end, or go on.
    fn open(&self, is_open: bool) {
        *self.control.is_open.lock().unwrap() = is_open;
        self.control.opened.notify_all();
    }

    /// Has loading fail, or succeed.
    fn fail(&self, fails: bool) {
        self.control.fails.store(fails, Ordering::Relaxed);
    }

    /// How often it was tried to load the model.
    fn tries(&self) -> usize {
        self.control.tries.load(Ordering::Relaxed)
    }

    fn load(&self, loading: &Loading) -> Result<Engine, LoadFailure> {
        let control = &self.control;
        control.tries.fetch_add(1, Ordering::Relaxed);
        loading.report("weights", 0.5);
        let is_open = control.is_open.lock().unwrap();
        let waited = control
            .opened
            .wait_timeout_while(is_open, PATIENCE, |is_open| !*is_open);
        assert!(!waited.unwrap().1.timed_out(), "nobody opens");
        let failure = |message: String| LoadFailure {
            message,
            is_too_large: false,
        };
        if control.fails.load(Ordering::Relaxed) {
            return Err(failure("on purpose".to_owned()));
        }
        let model = engine::load(BACKEND.clone(), &source(self.folder), &options(self.folder));
        let model = model.map_err(|error| failure(error.to_string()))?;
        let options = EngineOptions {
            counters: loading.counters(),
            ..EngineOptions::default()
        };
        Ok(Engine::start(model, options))
    }

    fn spec(&self) -> ModelSpec {
        let config = ModelConfig {
            names: vec![self.name.to_owned()],
            ..ModelConfig::default()
        };
        let known = self.clone();
        ModelSpec::new(config, Box::new(move |loading| known.load(loading)))
    }
}

fn source(folder: &str) -> Source {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    Source::Folder(models.join(folder))
}

fn options(folder: &str) -> LoadOptions {
    let drafters = match folder {
        "tiny-gemma4" => vec![source("tiny-gemma4-assistant")],
        _ => Vec::new(),
    };
    LoadOptions {
        drafters,
        sequences: 2,
        context: Some(8 << 10),
        ..LoadOptions::default()
    }
}

/// Two models of different families.
fn two() -> [Known; 2] {
    [
        Known::new("qwen", "tiny-qwen3.5"),
        Known::new("gemma", "tiny-gemma4"),
    ]
}

/// A server of `models`.
async fn serve(models: &[Known], options: ModelsOptions, config: Config) -> Peer {
    let specs = models.iter().map(Known::spec).collect();
    Peer::start(config, Models::new(specs, options)).await
}

/// A request for a short story from `model`.
fn story(model: &str) -> Value {
    json!({
        "model": model, "temperature": 0, "max_tokens": 24,
        "messages": [{"role": "user", "content": "Tell me a story about a kite."}],
    })
}

/// A request for stories that nobody waits the end of: four times as many as are written at a time,
/// and each as long as the context.
fn endless(model: &str) -> Vec<u8> {
    let body = json!({
        "model": model, "temperature": 0, "ignore_eos": true, "stream": true, "prompt": "Once",
        "n": 8, "max_tokens": -1,
    });
    crate::client::request("/v1/completions", "", body.to_string().as_bytes())
}

/// The state of each model by name, as the list of models has it.
async fn states(peer: &Peer) -> Vec<(String, String)> {
    let list = peer.get("/v1/models").await.json();
    let models = list["data"].as_array().unwrap().iter();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    models
        .map(|model| (text(&model["id"]), text(&model["status"]["value"])))
        .collect()
}

/// The state of the model called `name`.
async fn state(peer: &Peer, name: &str) -> String {
    let states = states(peer).await;
    let found = states.into_iter().find(|(id, _)| id == name);
    found.unwrap().1
}

/// Waits until the model called `name` is in `state`.
async fn until_state(peer: &Peer, name: &str, expected: &str) {
    let start = Instant::now();
    loop {
        let now = state(peer, name).await;
        if now == expected {
            return;
        }
        assert!(
            start.elapsed() < PATIENCE,
            "{name} is {now}, not {expected}"
        );
        sleep(Duration::from_millis(2)).await;
    }
}

/// Unloads the model called `name` by hand, and waits until it is.
async fn unload(peer: &Peer, name: &str) {
    let reply = peer.post("/models/unload", &json!({"model": name})).await;
    assert_eq!(reply.json(), json!({"success": true}));
    until_state(peer, name, "unloaded").await;
}

/// The status and the code of an error.
fn refusal(reply: &Reply) -> (u16, String) {
    let code = reply.error()["code"].as_str().unwrap().to_owned();
    (reply.status, code)
}
