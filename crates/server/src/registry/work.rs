//! Loading and unloading, on threads of their own.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use engine::ModelInfo;
use tokio::time::sleep_until;

use super::hold::Keep;
use super::spec::{LoadFailure, Loading, Progress};
use super::table::{State, Table, memory_of};
use super::{Registry, Status};
use crate::app::Loaded;
use crate::metrics::Metrics;

impl Registry {
    /// Begins to load model `i`.
    pub(super) fn begin_to_load(self: &Arc<Self>, table: &mut Table, i: usize) {
        let progress = Arc::new(Progress::new());
        let loading = Loading {
            progress: progress.clone(),
            room: table.room(),
            counters: self.entries[i].counters.clone(),
        };
        let slot = &mut table.slots[i];
        slot.tries += 1;
        slot.failure = None;
        slot.state = State::Loading(progress);
        let metrics = slot.metrics.clone();
        let registry = self.clone();
        let load = move || registry.load(i, &loading, metrics);
        let thread = thread::Builder::new().name("load".into()).spawn(load);
        if let Err(error) = thread {
            let message = format!("no thread can be started: {error}");
            let is_too_large = false;
            table.has_failed(
                i,
                LoadFailure {
                    message,
                    is_too_large,
                },
            );
        }
        self.tell();
    }

    /// Loads model `i` and notes what came of it.
    fn load(self: Arc<Self>, i: usize, loading: &Loading, metrics: Option<Arc<Metrics>>) {
        let entry = &self.entries[i];
        let name = &entry.names[0];
        let started = Instant::now();
        tracing::info!(model = name, "loading");
        let load = entry.load.as_ref().expect("only such models are loaded");
        // A panic is this try's end, and only its.
        let loaded = catch_unwind(AssertUnwindSafe(|| {
            let engine = Arc::new(load(loading)?);
            self.check_room(i, engine.info(), loading.room)?;
            let metrics = metrics.filter(|m| m.context() == engine.info().context);
            Ok(entry.loaded(engine, metrics))
        }));
        let loaded = loaded.unwrap_or_else(|_| {
            Err(LoadFailure {
                message: "loading has panicked".to_owned(),
                is_too_large: false,
            })
        });
        let ms = started.elapsed().as_millis();
        match &loaded {
            Ok(_) => tracing::info!(model = name, ms, "loaded"),
            // Who serves it says why it ends.
            Err(_) if self.starts(i).is_some() => {}
            Err(failure) => {
                tracing::error!(model = name, ms, reason = failure.message, "not loaded");
            }
        }
        let mut table = self.table();
        match loaded {
            Ok(loaded) => table.is_loaded(i, Arc::new(loaded)),
            Err(failure) => table.has_failed(i, failure),
        }
        drop(table);
        self.tell();
    }

    /// Refuses a model that takes more memory than was left to it: a device with memory of its own
    /// knows of no limit.
    fn check_room(&self, i: usize, info: &ModelInfo, room: Option<u64>) -> Result<(), LoadFailure> {
        let needs = memory_of(info);
        match room {
            Some(room) if needs > room => {
                self.table().slots[i].needs = needs;
                Err(LoadFailure {
                    message: format!(
                        "the model takes {:.1} GB, and loaded models leave {:.1} GB of what all may take",
                        needs as f64 / 1e9,
                        room as f64 / 1e9
                    ),
                    is_too_large: true,
                })
            }
            _ => Ok(()),
        }
    }

    /// Begins to unload model `i`, which nobody holds.
    pub(super) fn begin_to_unload(self: &Arc<Self>, table: &mut Table, i: usize) {
        let loaded = table.begin_to_leave(i);
        let registry = self.clone();
        let unload = move || {
            registry.end(i, loaded);
            registry.table().slots[i].state = State::Unloaded;
            registry.tell();
        };
        let thread = thread::Builder::new().name("unload".into()).spawn(unload);
        if let Err(error) = thread {
            // The closure was dropped, and the model with it.
            tracing::warn!(%error, "no thread can be started to unload a model");
            table.slots[i].state = State::Unloaded;
        }
        self.tell();
    }

    /// Ends a model and gives its memory back.
    fn end(&self, i: usize, loaded: Arc<Loaded>) {
        let name = &self.entries[i].names[0];
        let started = Instant::now();
        loaded.engine.stop();
        drop(loaded);
        let ms = started.elapsed().as_millis();
        tracing::info!(model = name, ms, "unloaded");
    }

    /// Loads model `i` for nobody in particular.
    pub(crate) fn load_in_background(self: &Arc<Self>, i: usize) {
        let registry = self.clone();
        tokio::spawn(async move {
            // What went wrong is in the log.
            drop(registry.hold(i, Keep::Default).await);
        });
    }

    /// Unloads model `i` as soon as nobody holds it; false if it is not loaded.
    pub(crate) fn unload(self: &Arc<Self>, i: usize) -> bool {
        let mut table = self.table();
        let slot = &mut table.slots[i];
        let is_loaded = slot.loaded().is_some();
        if is_loaded && slot.may_leave {
            slot.leaves = true;
            if slot.is_free() {
                self.begin_to_unload(&mut table, i);
            }
        }
        is_loaded
    }

    /// Loads the models that are loaded when the server starts, one after another.
    pub(crate) async fn preload(self: Arc<Self>) {
        for i in (0..self.entries.len()).filter(|&i| self.entries[i].preload) {
            if self.status(i).loaded().is_none() {
                drop(self.hold(i, Keep::Default).await);
            }
        }
    }

    /// Unloads models whose time without requests is over, for as long as it is polled.
    pub(crate) async fn retire(self: Arc<Self>) {
        let mut changes = self.changes.subscribe();
        loop {
            changes.borrow_and_update();
            let next = {
                let mut table = self.table();
                let (over, next) = table.expired(Instant::now());
                for i in over {
                    self.begin_to_unload(&mut table, i);
                }
                next
            };
            let later = async {
                match next {
                    Some(at) => sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = changes.changed() => {}
                () = later => {}
            }
        }
    }

    /// Ends all models. Requests that still hold one are cancelled.
    pub(crate) fn stop(&self) {
        for i in 0..self.entries.len() {
            if let Status::Loaded(loaded) = self.status(i) {
                loaded.engine.stop();
            }
        }
    }
}
