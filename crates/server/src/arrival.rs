//! A request on its way from its bytes to the model that it is for.
//!
//! ```text
//! bytes ─→ Parsed ─→ Arrival::Ready(Received)      the model is loaded
//!                 └→ Arrival::Waits(Waiting) ─→ Received
//! ```
//!
//! A request that waits for its model holds the bytes that were sent and nothing else: what is read
//! from them is dropped, and read again once it is the request's turn.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;
use axum::http::request::Parts;
use serde_json::{Map, Value};
use tokio::time::{Instant, timeout_at};

use crate::app::App;
use crate::body;
use crate::connection::Stage;
use crate::errors::ApiError;
use crate::lanes::Worker;
use crate::registry::{Keep, Status};
use crate::server::{Chosen, Server};

/// A request whose body has been read.
pub(crate) struct Parsed {
    server: Arc<Server>,
    head: Parts,
    bytes: body::Received,
    /// The body.
    pub(crate) object: Map<String, Value>,
    worker: Worker,
    /// The model that the request is for.
    pub(crate) model: usize,
}

/// A request whose body has been read and whose model is loaded.
pub(crate) struct Received {
    /// The request's headers, and what is known of its connection.
    pub(crate) head: Parts,
    /// The body.
    pub(crate) object: Map<String, Value>,
    /// The right to work on its text.
    pub(crate) worker: Worker,
    /// The model that the request is for.
    pub(crate) app: Arc<App>,
}

/// A request whose body has been read.
pub(crate) enum Arrival {
    /// The model of the request is loaded.
    Ready(Received),
    /// The model of the request is not loaded.
    Waits(Waiting),
}

/// A request that waits for its model.
pub(crate) struct Waiting {
    server: Arc<Server>,
    head: Parts,
    bytes: body::Received,
    model: usize,
    keep: Keep,
    since: Instant,
    /// How long the request may take.
    timeout: Duration,
    /// Whether the answer is to be a stream, where the request says.
    pub(crate) stream: Option<bool>,
}

impl Parsed {
    /// Receives a request with a body of at most `limit` bytes.
    ///
    /// # Errors
    ///
    /// As [`Server::receive`]; 404 for a model that is not known; once a shutdown has begun; while
    /// the only model is loaded for the first time.
    pub(crate) async fn new(
        server: &Arc<Server>,
        request: Request,
        limit: usize,
    ) -> Result<Self, ApiError> {
        server.refuse_late()?;
        let (head, body) = request.into_parts();
        let bytes = server.receive(&head.headers, body, limit).await?;
        let (object, worker) = server.parse(&bytes).await?;
        let name = object.get("model").and_then(Value::as_str);
        let model = server.registry.find(name)?;
        Chosen::note(&head.extensions, model);
        if let Some(progress) = server.registry.starts(model) {
            return Err(ApiError::loading(&progress));
        }
        Ok(Parsed {
            server: server.clone(),
            head,
            bytes,
            object,
            worker,
            model,
        })
    }

    /// The server.
    pub(crate) fn server(&self) -> &Arc<Server> {
        &self.server
    }

    /// Waits for the request's model, which stays loaded as `keep` says.
    ///
    /// # Errors
    ///
    /// As [`Waiting::ready`].
    pub(crate) async fn wait(self, keep: Keep) -> Result<Received, ApiError> {
        match self.arrive(keep) {
            Arrival::Ready(received) => Ok(received),
            Arrival::Waits(waiting) => waiting.ready().await,
        }
    }

    /// Takes the request's model, which stays loaded as `keep` says.
    pub(crate) fn arrive(self, keep: Keep) -> Arrival {
        let Parsed {
            server,
            head,
            bytes,
            object,
            worker,
            model,
        } = self;
        if let Some(held) = server.registry.try_hold(model, keep) {
            return Arrival::Ready(Received {
                head,
                object,
                worker,
                app: Arc::new(App::new(&server, model, held, Duration::ZERO)),
            });
        }
        let most = server.config.limits.request_timeout;
        let asked = object.get("timeout").and_then(Value::as_f64);
        let asked = asked.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        Arrival::Waits(Waiting {
            head,
            bytes,
            model,
            keep,
            since: Instant::now(),
            timeout: asked.map_or(most, |asked| asked.min(most)),
            stream: object.get("stream").and_then(Value::as_bool),
            server,
        })
    }
}

impl Received {
    /// Receives a request with a body of at most `limit` bytes, and waits for its model.
    ///
    /// # Errors
    ///
    /// As [`Parsed::new`] and [`Waiting::ready`].
    pub(crate) async fn new(
        server: &Arc<Server>,
        request: Request,
        limit: usize,
    ) -> Result<Self, ApiError> {
        let parsed = Parsed::new(server, request, limit).await?;
        parsed.wait(Keep::Default).await
    }
}

impl Waiting {
    /// How the model is that the request waits for.
    pub(crate) fn watch(&self) -> impl Fn() -> Status + Send + 'static {
        let (server, model) = (self.server.clone(), self.model);
        move || server.registry.status(model)
    }

    /// The name of the model that the request waits for.
    pub(crate) fn model(&self) -> String {
        self.server.registry.entries[self.model].names[0].clone()
    }

    /// Waits for the model, and reads the request again.
    ///
    /// # Errors
    ///
    /// If the model cannot be loaded, in time or at all, and when the server ends.
    pub(crate) async fn ready(self) -> Result<Received, ApiError> {
        let Waiting {
            server,
            head,
            bytes,
            model,
            keep,
            since,
            timeout,
            ..
        } = self;
        let mut stage = server.stage.clone();
        let held = tokio::select! {
            held = timeout_at(since + timeout, server.registry.hold(model, keep)) => {
                held.map_err(|_| ApiError::timed_out(timeout))??
            }
            _ = stage.wait_for(|&stage| stage == Stage::Stopping) => {
                return Err(ApiError::shutting_down());
            }
        };
        let app = Arc::new(App::new(&server, model, held, since.elapsed()));
        let (object, worker) = server.parse(&bytes).await?;
        Ok(Received {
            head,
            object,
            worker,
            app,
        })
    }
}
