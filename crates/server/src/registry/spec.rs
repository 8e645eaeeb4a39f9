//! What a program says of the models that its server may load.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use engine::{Counters, Engine};

use super::Registry;
use crate::{LoadError, ModelConfig};

/// Loads a model, on a thread that may wait.
pub type Loader = Box<dyn Fn(&Loading) -> Result<Engine, LoadFailure> + Send + Sync>;

/// A model that a server may load.
pub struct ModelSpec {
    pub(super) config: ModelConfig,
    pub(super) bytes: u64,
    pub(super) preload: bool,
    pub(super) load: Option<Loader>,
    pub(super) engine: Option<Arc<Engine>>,
}

impl ModelSpec {
    /// A model that is loaded with `load` when a request names it, and unloaded when nobody needs
    /// it. `config` has at least one name.
    pub fn new(config: ModelConfig, load: Loader) -> Self {
        ModelSpec {
            config,
            bytes: 0,
            preload: false,
            load: Some(load),
            engine: None,
        }
    }

    /// A model that is loaded already, and stays so.
    pub fn loaded(config: ModelConfig, engine: Arc<Engine>) -> Self {
        ModelSpec {
            config,
            bytes: 0,
            preload: true,
            load: None,
            engine: Some(engine),
        }
    }

    /// The model, whose files have so many `bytes`: what it is taken to need of
    /// [`ModelsOptions::memory`] until it has been loaded once.
    #[must_use]
    pub fn bytes(self, bytes: u64) -> Self {
        ModelSpec { bytes, ..self }
    }

    /// The model, loaded when the server starts; until then the server is not ready.
    #[must_use]
    pub fn preload(self, preload: bool) -> Self {
        ModelSpec { preload, ..self }
    }
}

/// How many models are loaded, and for how long.
#[derive(Clone, Copy, Debug, Default)]
pub struct ModelsOptions {
    /// Models that are loaded at the same time, at most; as many as there is memory for, if absent.
    pub max_loaded: Option<usize>,
    /// Bytes of weights and KV caches that loaded models may take together; no limit if absent.
    pub memory: Option<u64>,
    /// How long a model stays loaded after its last request, where a request does not say; until
    /// its room is needed, if absent.
    pub idle_unload: Option<Duration>,
}

/// The models of a server; a clone stands for the same models.
#[derive(Clone)]
pub struct Models(pub(crate) Arc<Registry>);

impl Models {
    /// The models that `specs` describe, in the order in which they are listed.
    ///
    /// # Panics
    ///
    /// If there are none, or one has no name.
    pub fn new(specs: Vec<ModelSpec>, options: ModelsOptions) -> Self {
        Models(Arc::new(Registry::new(specs, options)))
    }

    /// One model, which is loaded already.
    pub fn one(engine: Arc<Engine>, config: ModelConfig) -> Self {
        let spec = ModelSpec::loaded(config, engine);
        Models::new(vec![spec], ModelsOptions::default())
    }

    /// Waits until the models are loaded that are when the server starts. Somebody has to
    /// [serve](crate::serve) them meanwhile.
    ///
    /// # Errors
    ///
    /// If the only model could not be loaded.
    pub async fn ready(&self) -> Result<(), LoadError> {
        self.0.ready().await
    }
}

/// Why a model was not loaded.
#[derive(Clone, Debug)]
pub struct LoadFailure {
    /// The reason, for the log.
    pub message: String,
    /// Whether the memory that is left was too small for the model: other models make room then,
    /// and it is tried again.
    pub is_too_large: bool,
}

/// A model that is being loaded, as its [`Loader`] sees it; a clone reports of the same.
#[derive(Clone)]
pub struct Loading {
    pub(super) progress: Arc<Progress>,
    pub(super) room: Option<u64>,
    pub(super) counters: Arc<Counters>,
}

impl Loading {
    /// Tells whoever asks how far it is: the stage, and the share of all work that is done.
    pub fn report(&self, stage: &'static str, fraction: f64) {
        self.progress.set(stage, fraction);
    }

    /// Bytes of memory that weights and KV cache may take, if there is a limit.
    pub fn room(&self) -> Option<u64> {
        self.room
    }

    /// The counters for [`EngineOptions::counters`](engine::EngineOptions::counters), which go on
    /// from when the model was last loaded.
    pub fn counters(&self) -> Arc<Counters> {
        self.counters.clone()
    }
}

impl fmt::Debug for Loading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.progress.snapshot())
    }
}

/// How far a model is that is being loaded.
#[derive(Debug)]
pub(crate) struct Progress {
    started: Instant,
    stage: Mutex<&'static str>,
    millionths: AtomicU64,
}

/// How far a model was at some time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Snapshot {
    /// What is being done.
    pub(crate) stage: &'static str,
    /// The share of all work that is done.
    pub(crate) fraction: f64,
    /// The time since loading began.
    pub(crate) elapsed: Duration,
}

impl Progress {
    /// Nothing done yet.
    pub(super) fn new() -> Self {
        Progress {
            started: Instant::now(),
            stage: Mutex::new("starting"),
            millionths: AtomicU64::new(0),
        }
    }

    fn set(&self, stage: &'static str, fraction: f64) {
        *self.stage.lock().unwrap_or_else(PoisonError::into_inner) = stage;
        let millionths = (fraction.clamp(0.0, 1.0) * 1e6) as u64;
        self.millionths.fetch_max(millionths, Ordering::Relaxed);
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        Snapshot {
            stage: *self.stage.lock().unwrap_or_else(PoisonError::into_inner),
            fraction: self.millionths.load(Ordering::Relaxed) as f64 / 1e6,
            elapsed: self.started.elapsed(),
        }
    }
}

impl Snapshot {
    /// How long it will take, by how long it has taken so far: between one second and half a minute.
    pub(crate) fn rest(&self) -> Duration {
        const BOUNDS: [f64; 2] = [1.0, 30.0];
        let elapsed = self.elapsed.as_secs_f64();
        let rest = elapsed / self.fraction.max(0.01) * (1.0 - self.fraction);
        Duration::from_secs_f64(rest.clamp(BOUNDS[0], BOUNDS[1]))
    }
}
