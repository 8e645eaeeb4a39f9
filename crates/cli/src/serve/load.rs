//! How `serve` loads a model, whenever somebody asks for it.

use super::known::Known;
use crate::args::{Activations, Device, LoadArgs, ServeArgs};
use crate::traced::Traced;
use crate::{model, one_line, resolve};
use anyhow::{Context, Result};
use backend::Backend;
use engine::{CacheFolder, Engine, EngineOptions, PageSink};
use server::kv_events::Publisher;
use server::{LoadFailure, Loading, ModelConfig, ModelSpec};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// What the models of a server share.
pub(super) struct Shared {
    pub(super) address: SocketAddr,
    /// Whether there are several models.
    pub(super) has_several: bool,
    /// Who publishes events about prefix caches, if somebody does.
    pub(super) publisher: Option<Publisher>,
    /// The trace of what all models do, if one is asked for.
    pub(super) traced: Traced,
    /// What is known of each model that was loaded, by its name.
    pub(super) described: Mutex<HashMap<String, Described>>,
    /// Bytes of weights of the largest model.
    largest: AtomicU64,
    /// Threads of the CPU that loaded models compute with: two sets would wait for each other's cores.
    processors: Mutex<HashMap<String, Weak<dyn Backend>>>,
}

/// What is said of a model once it is loaded.
#[derive(Clone)]
pub(super) struct Described {
    /// Weights, memory, drafter and self-test, in lines.
    pub(super) lines: String,
    /// Tokens that prompt and answer may have.
    pub(super) context: usize,
    /// Why the model cannot chat, if it cannot.
    pub(super) chats: Result<(), String>,
}

impl Shared {
    pub(super) fn new(
        address: SocketAddr,
        has_several: bool,
        publisher: Option<Publisher>,
        traced: Traced,
    ) -> Self {
        Shared {
            address,
            has_several,
            publisher,
            traced,
            described: Mutex::default(),
            largest: AtomicU64::new(0),
            processors: Mutex::default(),
        }
    }

    /// The device that `args` ask for: the threads of a CPU are one set for all models with the same
    /// options, for as long as one is loaded. A GPU is opened for each model.
    fn backend(&self, args: &LoadArgs) -> Result<Arc<dyn Backend>> {
        if !matches!(args.device, Device::Cpu | Device::Auto) {
            return model::backend(args, 0);
        }
        let activations = match args.activations {
            Activations::Int8 => "int8",
            Activations::F32 => "f32",
        };
        let key = format!(
            "{:?} {:?} {activations} {} {:?}",
            args.device, args.threads, args.pin_threads, args.isa
        );
        let lock = PoisonError::into_inner;
        let mut processors = self.processors.lock().unwrap_or_else(lock);
        if let Some(shared) = processors.get(&key).and_then(Weak::upgrade) {
            return Ok(shared);
        }
        let opened = model::backend(args, self.largest.load(Relaxed))?;
        if !opened.capabilities().own_memory {
            processors.insert(key, Arc::downgrade(&opened));
        }
        Ok(opened)
    }

    /// Who is told of the prefix cache of the model called `name`.
    fn page_sink(&self, args: &ServeArgs, name: &str) -> Option<PageSink> {
        let publisher = self.publisher.as_ref()?;
        let topic = match &args.kv_events.topic {
            // Subscribers tell models by their topics.
            Some(topic) if self.has_several => format!("{topic}@{name}"),
            Some(topic) => topic.clone(),
            None => format!("kv@{}@{name}", self.address),
        };
        Some(publisher.sink(&topic))
    }
}

/// The server's description of a model.
pub(super) fn spec(known: Known, shared: &Arc<Shared>) -> ModelSpec {
    let args = &known.args;
    let config = ModelConfig {
        names: known.names.clone(),
        whole_assistant_turns: args.no_prefill_assistant,
        reasoning: args.reasoning.default_of_requests(),
        defaults: args.defaults.of_requests(),
        pooling: args.pooling,
    };
    let bytes = resolve::source(&known.what).map_or(0, |source| model::bytes_of(&source));
    shared.largest.fetch_max(bytes, Relaxed);
    let preload = !shared.has_several || args.models.preload;
    let shared = shared.clone();
    let load = move |loading: &Loading| load(&known, &shared, loading);
    ModelSpec::new(config, Box::new(load))
        .bytes(bytes)
        .preload(preload)
}

/// Loads a model, and starts its engine.
fn load(known: &Known, shared: &Shared, loading: &Loading) -> Result<Engine, LoadFailure> {
    try_load(known, shared, loading).map_err(|error| LoadFailure {
        is_too_large: error.downcast_ref::<model::Oversized>().is_some(),
        message: one_line(&error),
    })
}

fn try_load(known: &Known, shared: &Shared, loading: &Loading) -> Result<Engine> {
    let args = &known.args;
    let name = &known.names[0];
    let disk = cache_folder(args)?;
    let backend = shared.backend(&args.load)?;
    let model = model::load_on(backend, &known.what, args, loading)?;
    let described = Described {
        lines: model::describe(&model.info),
        context: model.info.context,
        chats: model::check_chats(&model.text).map_err(|why| why.to_string()),
    };
    let lock = PoisonError::into_inner;
    let mut all = shared.described.lock().unwrap_or_else(lock);
    all.insert(name.clone(), described);
    drop(all);
    let step_sink = shared.traced.sink(&model.info);
    let options = EngineOptions {
        queue: args.queue,
        reuse: !args.no_prefix_cache,
        page_sink: shared.page_sink(args, name),
        step_sink,
        disk,
        tower_share: args.tower_share,
        overlap: !args.overlap.no_overlap,
        counters: loading.counters(),
    };
    Ok(Engine::start(model, options))
}

/// The folder in which the prefix cache outlives the server, if there is to be one.
fn cache_folder(args: &ServeArgs) -> Result<Option<CacheFolder>> {
    let folder = args.cache_dir.as_ref().filter(|_| !args.no_prefix_cache);
    let open = |path: &PathBuf| {
        let opened = CacheFolder::open(path, args.cache_disk);
        opened.with_context(|| {
            format!(
                "cannot use the folder of the prefix cache `{}`",
                path.display()
            )
        })
    };
    folder.map(open).transpose()
}
