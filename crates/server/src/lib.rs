//! HTTP: OpenAI's, Anthropic's, llama-server's and Ollama's APIs over one engine.
//!
//! ```text
//! socket ─ connection ─ router (host, origin, key) ─ dialect ─ generation ─→ engine
//!          deadlines                                 openai/*   mailbox
//! ```
//!
//! | room | what it does |
//! | --- | --- |
//! | `connection` | accepts, watches deadlines, shuts down |
//! | `resting` | lets clients in, and closes idle connections where there is no room |
//! | `router`, `paths` | the table of routes, how they are spelled, and what every request passes |
//! | [`auth`] | keys, Host names, origins |
//! | `body`, `strict`, `fields` | bytes → JSON → values, within limits |
//! | `lanes` | where requests wait for that |
//! | `turns` | who is let into the queue, and when the others come back |
//! | `dialect` | what an API has to say of itself, and the way of a request that all share |
//! | `render` | the tokens that a request becomes, for routers |
//! | `request`, `options` | a request as the engine understands it, and its options |
//! | `media`, `sources` | pictures and videos of requests, and where their bytes come from |
//! | `results` | the pictures in results of tools, for templates that show texts alone |
//! | `embeddings` | vectors of texts, for the paths of all dialects |
//! | `generation` | a request on its way through the engine |
//! | `run` | how far the requests are that run, and in which slots |
//! | `samplers` | which samplers act |
//! | `sse` | a generation as a stream |
//! | `openai/*` | OpenAI's dialect, one file an endpoint |
//! | `anthropic/*` | Anthropic's dialect |
//! | `llama/*` | llama-server's dialect |
//! | `page` | the chat page for browsers, whose files are in `page/` |
//! | `ollama/*` | Ollama's dialect |
//! | `metrics` | what Prometheus reads |
//! | [`limits`] | every limit, by name |
//!
//! No flags, no environment, no files but those of a media folder, and prompts are never logged.

#![forbid(unsafe_code)]

mod anthropic;
pub mod auth;
mod body;
mod connection;
mod dialect;
mod embeddings;
mod errors;
mod fields;
mod generation;
mod grammar;
mod health;
mod ids;
pub mod kv_events;
mod lanes;
pub mod limits;
mod llama;
mod media;
mod metrics;
mod offer;
mod ollama;
mod openai;
mod openapi;
mod options;
mod page;
mod paths;
mod render;
mod request;
mod resting;
mod results;
mod router;
mod routes;
mod run;
mod samplers;
mod sources;
mod sse;
mod strict;
mod table;
mod template;
mod thinking;
mod turns;

use std::fmt::Write;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::http::HeaderMap;
use engine::{Engine, ModelInfo, Pooling};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use text::{Text, TextError};
use tokio::net::TcpListener;
use tokio::sync::watch;

pub use auth::{Keys, check_bind, parse_origin};
pub use fetch::{Folder, HostError, Hosts};
pub use limits::Limits;
pub use sources::MediaSources;

use body::Budget;
use connection::Stage;
use errors::ApiError;
use fields::Fields;
use lanes::{Lanes, Worker};
use metrics::Metrics;
use openai::responses::store::Store;
use run::Slots;
use turns::Turns;

/// Names that a server takes for its model even where it is strict about names.
const ANY_MODEL: &[&str] = &["", "default"];

/// The tables of the fields of OpenAI's chat and completions requests as Markdown, as they stand
/// in `docs/server.md`: what is honored, refused and ignored.
pub fn fields_as_markdown() -> String {
    openai::tables::markdown()
}

/// The table of the fields of OpenAI's Responses API as Markdown, as it stands in
/// `docs/server.md`.
pub fn responses_fields_as_markdown() -> String {
    openai::responses::tables::markdown()
}

/// The table of the fields of requests for embeddings as Markdown, as it stands in
/// `docs/server.md`.
pub fn embedding_fields_as_markdown() -> String {
    openai::embeddings::markdown()
}

/// The table of request fields of Anthropic's Messages API as Markdown, as it stands in
/// `docs/server.md`.
pub fn messages_fields_as_markdown() -> String {
    anthropic::tables::markdown()
}

/// The table of request fields of llama-server's own API as Markdown, as it stands in
/// `docs/server.md`.
pub fn llama_fields_as_markdown() -> String {
    llama::tables::markdown()
}

/// The table of request fields of Ollama's API as Markdown, as it stands in `docs/server.md`.
pub fn ollama_fields_as_markdown() -> String {
    ollama::tables::markdown()
}

/// How a server behaves.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// Names of the model, the one that responses carry first; the engine's name
    /// for it if there is none.
    pub model_names: Vec<String>,
    /// Whether a request for a model of another name is refused. Otherwise the model that
    /// is served answers it, and the response names that one.
    pub strict_model_names: bool,
    /// Whether a conversation that ends with a message of the assistant is answered by a turn of
    /// its own; otherwise the answer goes on from that message, unless a request says which.
    pub whole_assistant_turns: bool,
    /// Whether the model reasons where a request does not say; otherwise its chat template
    /// decides. Messages of Anthropic's API always say.
    pub reasoning: Option<bool>,
    /// How the rows of a text become its embedding; the last row is one where this is not said.
    pub pooling: Option<Pooling>,
    /// The API keys, one of which a request must carry; without any, everyone may ask.
    pub keys: Keys,
    /// Whether the network may ask without a key.
    pub insecure: bool,
    /// Names of this machine that a Host header may carry, beside those of the
    /// loopback interface; `*` is any, and so is every name in a request with a valid key.
    pub allowed_hosts: Vec<String>,
    /// Origins of web pages that may ask, such as `http://localhost:3000`,
    /// beside this server's own; `localhost` is any page of this machine, `*` is any.
    pub allowed_origins: Vec<String>,
    /// What media requests may name instead of sending them.
    pub media: MediaSources,
    /// Times, sizes and counts.
    pub limits: Limits,
}

/// Why a server does not serve.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The network could ask without a key.
    #[error(
        "refusing to serve the network without an API key: set one with --api-key, or say --insecure, for {address}"
    )]
    OpenToTheNetwork {
        /// The address that the server was to listen on.
        address: SocketAddr,
    },
    /// The listener does not work.
    #[error("cannot accept connections on this address")]
    Listener(#[from] std::io::Error),
}

/// Serves `engine` on `listener` until `shutdown` resolves and what runs has
/// ended.
///
/// After `shutdown` no connection and no generation begins; running ones get
/// [`Limits::drain_timeout`] to finish, then are cancelled: every open stream
/// gets a last event.
///
/// # Errors
///
/// [`ServeError`], before the first connection is accepted.
pub async fn serve(
    config: Config,
    engine: Arc<Engine>,
    listener: TcpListener,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let local = listener.local_addr()?;
    check_bind(&config, local)?;
    let (stage, watcher) = watch::channel(Stage::Serving);
    let limits = config.limits.clone();
    let app = Arc::new(App::new(config, engine, local, watcher));
    connection::run(listener, router::router(app), &limits, &stage, shutdown).await;
    Ok(())
}

/// What all requests share.
pub(crate) struct App {
    engine: Arc<Engine>,
    config: Config,
    local: SocketAddr,
    /// Names of the model, at least one.
    names: Vec<String>,
    fingerprint: String,
    started: u64,
    stage: watch::Receiver<Stage>,
    bodies: Budget,
    lanes: Lanes,
    turns: Turns,
    /// What the Responses API keeps.
    responses: Store,
    metrics: Arc<Metrics>,
    slots: Arc<Slots>,
}

impl App {
    fn new(
        config: Config,
        engine: Arc<Engine>,
        local: SocketAddr,
        stage: watch::Receiver<Stage>,
    ) -> Self {
        let names = match &config.model_names[..] {
            [] => vec![engine.info().name.clone()],
            names => names.to_vec(),
        };
        let metrics = Arc::new(Metrics::new(engine.info().context));
        App {
            fingerprint: fingerprint(engine.info()),
            bodies: Budget::new(config.limits.bodies_bytes),
            lanes: Lanes::new(&config.limits),
            turns: Turns::new(config.limits.turn_grace),
            responses: Store::new(&config.limits),
            slots: Arc::new(Slots::new(engine.info().sequences)),
            names,
            engine,
            config,
            local,
            started: ids::unix_seconds(),
            stage,
            metrics,
        }
    }

    /// The model's name in responses.
    fn model(&self) -> &str {
        &self.names[0]
    }

    /// Refuses work once a shutdown has begun.
    fn refuse_late(&self) -> Result<(), ApiError> {
        if *self.stage.borrow() > Stage::Serving {
            Err(ApiError::shutting_down())
        } else {
            Ok(())
        }
    }

    /// The model's name in the response to a request: the one it was asked for under, if
    /// that is one of its names, else the first of them.
    fn check_model(&self, fields: &Fields<'_>) -> Result<String, ApiError> {
        match fields.string("model")? {
            None => Ok(self.model().to_owned()),
            Some(name) if self.names.iter().any(|own| own == name) => Ok(name.to_owned()),
            Some(name) if !self.config.strict_model_names || ANY_MODEL.contains(&name) => {
                Ok(self.model().to_owned())
            }
            Some(name) => Err(ApiError::no_model(name, self.model())),
        }
    }

    /// Receives the JSON object of a request, of at most `limit` bytes, and reads it once it
    /// is its turn; what is read may be held only as long as the worker.
    async fn read_object(
        &self,
        headers: &HeaderMap,
        body: Body,
        limit: usize,
    ) -> Result<(Map<String, Value>, Worker), ApiError> {
        let limits = &self.config.limits;
        let received = body::receive(headers, body, limit, &self.bodies, limits).await?;
        let worker = self.lanes.enter(received.bytes.len()).await;
        Ok((strict::parse_object(&received.bytes)?, worker))
    }

    /// Renders or tokenizes text away from the threads that serve connections. The worker
    /// counts until it ends, also when its client is gone.
    async fn text_work<T: Send + 'static>(
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

/// The end of a message about a prompt that does not fit a context of `context`: how the program
/// makes room where the model knows more, `context_max`; empty where it does not.
pub fn longer_context(context: usize, context_max: usize) -> String {
    if context < context_max {
        format!(" (--context sets the length, up to {context_max} for this model)")
    } else {
        String::new()
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
