//! A model as its requests have it.

use std::fmt::Write;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use engine::{Engine, ModelInfo, SamplerNumber};
use sha2::{Digest, Sha256};
use text::{Text, TextError};

use crate::errors::ApiError;
use crate::fields::Fields;
use crate::lanes::Worker;
use crate::metrics::Metrics;
use crate::registry::Hold;
use crate::run::Slots;
use crate::server::Server;
use crate::turns::Turns;
use crate::{ModelConfig, longer_context};

/// Names that a server takes for its model even where it is strict about names.
pub(crate) const ANY_MODEL: &[&str] = &["", "default"];

/// A model that is loaded, and what the requests for it share.
pub(crate) struct Loaded {
    pub(crate) engine: Arc<Engine>,
    pub(crate) settings: ModelConfig,
    /// Names of the model, at least one.
    pub(crate) names: Vec<String>,
    pub(crate) fingerprint: String,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) slots: Arc<Slots>,
}

impl Loaded {
    /// A model with these names, counted on in `metrics` if there are any.
    pub(crate) fn new(
        engine: Arc<Engine>,
        names: Vec<String>,
        settings: ModelConfig,
        metrics: Option<Arc<Metrics>>,
    ) -> Self {
        let metrics = metrics.unwrap_or_else(|| Arc::new(Metrics::new(engine.info().context)));
        Loaded {
            fingerprint: fingerprint(engine.info()),
            metrics,
            slots: Arc::new(Slots::new(engine.info().sequences)),
            engine,
            settings,
            names,
        }
    }

    /// A number of the sampler where a request does not say, if the server or the checkpoint does.
    pub(crate) fn number(&self, of: &SamplerNumber) -> Option<f32> {
        let own = self.settings.defaults.number(of.name);
        own.or_else(|| (of.advised)(&self.engine.text().sampling))
    }

    /// How many of the likeliest tokens are sampled from where a request does not say; 0 is all.
    pub(crate) fn top_k(&self) -> usize {
        let advised = self.engine.text().sampling.top_k.map(|k| k as usize);
        self.settings.defaults.top_k.or(advised).unwrap_or(0)
    }

    /// The model's name in responses.
    pub(crate) fn model(&self) -> &str {
        &self.names[0]
    }
}

/// The model that a request is for, and the server around it: the model stays loaded for as long as
/// this exists.
pub(crate) struct App {
    loaded: Arc<Loaded>,
    pub(crate) server: Arc<Server>,
    /// The model's number in the registry.
    model: usize,
    /// How long the request has waited for the model.
    waited: Duration,
    /// Dropped after `loaded`, so that whoever unloads the model has it alone.
    _hold: Hold,
}

impl Deref for App {
    type Target = Loaded;

    fn deref(&self) -> &Loaded {
        &self.loaded
    }
}

impl App {
    /// Model `model` of the registry, which is held.
    pub(crate) fn new(
        server: &Arc<Server>,
        model: usize,
        held: (Arc<Loaded>, Hold),
        waited: Duration,
    ) -> Self {
        let (loaded, hold) = held;
        App {
            loaded,
            server: server.clone(),
            model,
            waited,
            _hold: hold,
        }
    }

    /// What is owed to the model's clients.
    pub(crate) fn turns(&self) -> &Turns {
        &self.server.turns[self.model]
    }

    /// How long the request may take beside the wait for its model, if it asks for `asked`.
    pub(crate) fn time_left(&self, asked: Option<Duration>) -> Duration {
        let most = self.server.config.limits.request_timeout;
        let all = asked.map_or(most, |asked| asked.min(most));
        all.saturating_sub(self.waited)
    }

    /// Whether a request for a model of another name is refused that has come so far. Where there
    /// are several models, it would not have.
    pub(crate) fn is_strict(&self) -> bool {
        self.server.config.strict_model_names && self.server.registry.is_single()
    }

    /// The model's name in the response to a request: the one it was asked for under, if
    /// that is one of its names, else the first of them.
    pub(crate) fn check_model(&self, fields: &Fields<'_>) -> Result<String, ApiError> {
        let is_strict = self.is_strict();
        match fields.string("model")? {
            None => Ok(self.model().to_owned()),
            Some(name) if self.names.iter().any(|own| own == name) => Ok(name.to_owned()),
            Some(name) if !is_strict || ANY_MODEL.contains(&name) => Ok(self.model().to_owned()),
            Some(name) => Err(ApiError::no_model(name, &[self.model()])),
        }
    }

    /// Renders or tokenizes text away from the threads that serve connections. The worker
    /// counts until it ends, also when its client is gone.
    pub(crate) async fn text_work<T: Send + 'static>(
        &self,
        worker: Worker,
        work: impl FnOnce(&Text) -> Result<T, TextError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let text = self.engine.text().clone();
        let done = tokio::task::spawn_blocking(move || {
            let _worker = worker;
            work(&text)
        });
        // A panic in there is that request's end, and only its.
        done.await
            .map_err(|_| ApiError::internal())?
            .map_err(|error| match error {
                TextError::TooManyTokens { at_least, limit } => {
                    let message = format!(
                        "{error}{}{}",
                        engine::full_context(at_least, limit),
                        longer_context(limit, self.engine.info().context_max)
                    );
                    ApiError::too_long(&message, at_least, limit)
                }
                error => error.into(),
            })
    }
}

/// Short hash of what a text depends on beside the request.
fn fingerprint(info: &ModelInfo) -> String {
    let ModelInfo {
        name,
        family,
        backend,
        context,
        vocab_size,
        weight_bytes,
        kv_format,
        ..
    } = info;
    let version = env!("CARGO_PKG_VERSION");
    let all = format!(
        "{version}|{name}|{family}|{backend}|{context}|{vocab_size}|{weight_bytes}|{kv_format}"
    );
    Sha256::digest(all)
        .iter()
        .take(5)
        .fold("fp_".to_owned(), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        })
}
