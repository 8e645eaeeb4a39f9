//! The models that a server knows: which of them are loaded, and for whom.
//!
//! ```text
//! request names a model ─→ Registry::hold ─→ Hold ─→ … the answer is over ─→ Hold dropped
//!                            │ not loaded: make room, load, wait                │
//!                            └──────────────── Table, behind one lock ──────────┘
//! ```
//!
//! | file | what |
//! | --- | --- |
//! | [`table`] | each model's state, and the rules: who makes room for whom, and when |
//! | [`hold`] | a request's hold on a model, and the wait for it |
//! | [`work`] | loading and unloading, on threads of their own |
//! | [`spec`] | what a program says of a model that its server may load |
//!
//! A model is loaded for the first request that names it, and stays until its time without requests
//! is over or another one needs its room. One that somebody holds is never unloaded. Models are
//! loaded one after another, so that each finds out truthfully what memory is left.

mod hold;
mod spec;
mod table;
mod work;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use engine::{Counters, Engine, ModelInfo};
use tokio::sync::watch;

use crate::app::Loaded;
use crate::errors::ApiError;
use crate::metrics::Metrics;
use crate::{LoadError, ModelConfig};

pub(crate) use hold::{Hold, Keep};
pub(crate) use spec::Snapshot;
pub use spec::{LoadFailure, Loader, Loading, ModelSpec, Models, ModelsOptions};
use table::{State, Table};

/// A model as it is known before it is loaded.
pub(crate) struct Entry {
    pub(crate) config: ModelConfig,
    /// Names of the model, at least one.
    pub(crate) names: Vec<String>,
    /// Bytes of the model's files, where they are known before it is loaded.
    pub(crate) bytes: u64,
    /// Whether the model is loaded when the server starts.
    pub(crate) preload: bool,
    /// What loads the model; a model without it was there from the beginning and stays.
    load: Option<Loader>,
    /// Counters that go on when the model is loaded again.
    pub(crate) counters: Arc<Counters>,
}

/// The models of a server.
pub(crate) struct Registry {
    pub(crate) entries: Vec<Entry>,
    options: ModelsOptions,
    table: Mutex<Table>,
    /// Told of every change in the table.
    changes: watch::Sender<u64>,
}

/// How a model is, for whoever only looks.
#[derive(Clone)]
pub(crate) enum Status {
    /// Not in memory; whether the last try to load it failed.
    Unloaded { has_failed: bool },
    /// Being loaded.
    Loading(Snapshot),
    /// In memory.
    Loaded(Arc<Loaded>),
    /// Leaving memory.
    Unloading,
}

impl Status {
    /// llama-server's word for it.
    pub(crate) fn word(&self) -> &'static str {
        match self {
            Status::Unloaded { .. } => "unloaded",
            Status::Loading(_) => "loading",
            Status::Loaded(_) => "loaded",
            Status::Unloading => "unloading",
        }
    }

    /// The model, if it is loaded.
    pub(crate) fn loaded(&self) -> Option<&Arc<Loaded>> {
        match self {
            Status::Loaded(loaded) => Some(loaded),
            _ => None,
        }
    }
}

impl Registry {
    /// The registry of `models`.
    ///
    /// # Panics
    ///
    /// If there are none, or one has no name.
    pub(crate) fn new(models: Vec<ModelSpec>, options: ModelsOptions) -> Self {
        assert!(!models.is_empty(), "a server has a model");
        let mut table = Table::new(&options);
        let mut entries = Vec::new();
        for spec in models {
            let ModelSpec {
                config,
                bytes,
                preload,
                load,
                engine,
            } = spec;
            let names = match (&config.names[..], &engine) {
                ([], Some(engine)) => vec![engine.info().name.clone()],
                (names, _) => names.to_vec(),
            };
            assert!(!names.is_empty(), "a model has a name");
            table.add(bytes, load.is_some());
            let entry = Entry {
                config,
                names,
                bytes,
                preload,
                load,
                counters: Arc::default(),
            };
            if let Some(engine) = engine {
                let loaded = entry.loaded(engine, None);
                table.is_loaded(entries.len(), Arc::new(loaded));
            }
            entries.push(entry);
        }
        Registry {
            entries,
            options,
            table: Mutex::new(table),
            changes: watch::Sender::new(0),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells everyone who waits that the table has changed.
    fn tell(&self) {
        self.changes.send_modify(|n| *n += 1);
    }

    /// Whether the server knows one model only, which answers to any name.
    pub(crate) fn is_single(&self) -> bool {
        self.entries.len() == 1
    }

    /// The model of this name, also with the tag that Ollama's clients add.
    pub(crate) fn named(&self, name: &str) -> Option<usize> {
        let bare = name.strip_suffix(crate::ollama::TAG).unwrap_or(name);
        let called = |name: &str| {
            let has = |entry: &Entry| entry.names.iter().any(|own| own == name);
            self.entries.iter().position(has)
        };
        called(name).or_else(|| called(bare))
    }

    /// The model that a request asks for by name, if it names one: the only one under any name, else
    /// the one that is called so.
    ///
    /// # Errors
    ///
    /// 404 for a name that no model has, 400 for none.
    pub(crate) fn find(&self, name: Option<&str>) -> Result<usize, ApiError> {
        match name {
            _ if self.is_single() => Ok(0),
            Some(name) => {
                let found = self.named(name);
                found.ok_or_else(|| ApiError::no_model(name, &self.names()))
            }
            None => Err(ApiError::model_missing(&self.names())),
        }
    }

    /// Models that are loaded at the same time, at most.
    pub(crate) fn max_loaded(&self) -> usize {
        let n = self.entries.len();
        self.options.max_loaded.map_or(n, |most| most.clamp(1, n))
    }

    /// The name of each model.
    pub(crate) fn names(&self) -> Vec<&str> {
        self.entries.iter().map(|e| e.names[0].as_str()).collect()
    }

    /// How model `i` is.
    pub(crate) fn status(&self, i: usize) -> Status {
        let table = self.table();
        let slot = &table.slots[i];
        match &slot.state {
            State::Unloaded => Status::Unloaded {
                has_failed: slot.failure.is_some(),
            },
            State::Loading(progress) => Status::Loading(progress.snapshot()),
            State::Loaded(loaded) => Status::Loaded(loaded.clone()),
            State::Unloading => Status::Unloading,
        }
    }

    /// The models that are loaded.
    pub(crate) fn loaded(&self) -> Vec<Arc<Loaded>> {
        let table = self.table();
        let loaded = table.slots.iter().filter_map(|slot| slot.loaded().cloned());
        loaded.collect()
    }

    /// How long model `i` stays loaded from now on if no request comes; none if it leaves only where
    /// its room is needed.
    pub(crate) fn time_left(&self, i: usize) -> Option<Duration> {
        let table = self.table();
        let slot = &table.slots[i];
        match slot.expires() {
            Some(at) => Some(at.saturating_duration_since(Instant::now())),
            // Its time begins when the last request ends.
            None => slot.keep.filter(|_| slot.holds > 0 && slot.may_leave),
        }
    }

    /// What is known of model `i` since it was last loaded, if it ever was.
    pub(crate) fn last_info(&self, i: usize) -> Option<ModelInfo> {
        self.table().slots[i].info.clone()
    }

    /// What was counted of model `i`, if it was ever loaded.
    pub(crate) fn metrics(&self, i: usize) -> Option<Arc<Metrics>> {
        self.table().slots[i].metrics.clone()
    }

    /// Whether the thread of some engine has ended, which only a new start mends.
    pub(crate) fn has_lost_an_engine(&self) -> bool {
        let is_lost = |loaded: &Arc<Loaded>| loaded.metrics.is_engine_lost();
        self.loaded().iter().any(is_lost)
    }

    /// How far the models are that are loaded when the server starts; none once all of them are
    /// loaded or have failed.
    pub(crate) fn starting(&self) -> Option<(usize, Snapshot)> {
        let table = self.table();
        let mut waited_for = (0..self.entries.len())
            .filter(|&i| self.entries[i].preload && !table.slots[i].is_settled);
        let first = waited_for.next()?;
        let progress = match &table.slots[first].state {
            State::Loading(progress) => progress.snapshot(),
            _ => Snapshot::default(),
        };
        Some((first, progress))
    }

    /// Waits until the models are loaded that are when the server starts.
    ///
    /// # Errors
    ///
    /// If the only model could not be loaded.
    pub(crate) async fn ready(&self) -> Result<(), LoadError> {
        let mut changes = self.changes.subscribe();
        loop {
            changes.borrow_and_update();
            if self.starting().is_none() {
                break;
            }
            // The registry is there, so the sender is.
            let _ = changes.changed().await;
        }
        let table = self.table();
        match &table.slots[0].failure {
            Some(failure) if self.is_single() && table.slots[0].info.is_none() => {
                Err(LoadError(failure.message.clone()))
            }
            _ => Ok(()),
        }
    }
}

impl Entry {
    /// Whether the model can be loaded again, and so may be unloaded.
    pub(crate) fn may_leave(&self) -> bool {
        self.load.is_some()
    }

    /// The model with `engine`, counted on in `metrics` if it was loaded before.
    fn loaded(&self, engine: Arc<Engine>, metrics: Option<Arc<Metrics>>) -> Loaded {
        Loaded::new(engine, self.names.clone(), self.config.clone(), metrics)
    }
}
