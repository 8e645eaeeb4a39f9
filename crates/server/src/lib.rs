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
//! | `registry/*` | the models: loaded when they are asked for, unloaded when their room is needed |
//! | `arrival` | a request on its way to its model |
//! | `server`, `app` | what all requests share, and what those for one model do |
//! | `router`, `paths` | the table of routes, how they are spelled, and what every request passes |
//! | [`auth`] | keys, Host names, origins |
//! | `body`, `strict`, `fields` | bytes → JSON → values, within limits |
//! | `lanes` | where requests wait for that |
//! | `turns` | who is let into the queue, and when the others come back |
//! | `dialect` | what an API has to say of itself, and the way of a request that all share |
//! | `render` | the tokens that a request becomes, for routers |
//! | `reader` | requests of the API for whoever runs them without HTTP |
//! | `request`, `options`, `defaults` | a request as the engine understands it, its options, and what it does not say |
//! | `media`, `sources` | pictures and videos of requests, and where their bytes come from |
//! | `results` | the pictures in results of tools, for templates that show texts alone |
//! | `embeddings` | vectors of texts, for the paths of all dialects |
//! | `generation` | a request on its way through the engine |
//! | `run` | how far the requests are that run, and in which slots |
//! | `samplers` | which samplers act |
//! | `speculation` | who drafts for a request, how far, and which guesses stay |
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
mod app;
mod arrival;
pub mod auth;
mod body;
mod connection;
mod defaults;
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
mod reader;
mod registry;
mod render;
mod request;
mod resting;
mod results;
mod router;
mod routes;
mod run;
mod samplers;
mod server;
mod sources;
mod speculation;
mod sse;
mod strict;
mod table;
mod template;
mod thinking;
mod turns;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use engine::Pooling;
use tokio::net::TcpListener;
use tokio::sync::watch;

pub use auth::{Keys, check_bind, parse_origin};
pub use defaults::Defaults;
pub use fetch::{Folder, HostError, Hosts};
pub use limits::Limits;
pub use reader::RequestReader;
pub use registry::{LoadFailure, Loader, Loading, ModelSpec, Models, ModelsOptions};
pub use sources::MediaSources;

use connection::Stage;
use server::Server;

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

/// How a model answers where a request does not say.
#[derive(Clone, Debug, Default)]
pub struct ModelConfig {
    /// Names of the model, the one that responses carry first; the engine's name
    /// for it if there is none.
    pub names: Vec<String>,
    /// Whether a conversation that ends with a message of the assistant is answered by a turn of
    /// its own; otherwise the answer goes on from that message, unless a request says which.
    pub whole_assistant_turns: bool,
    /// Whether the model reasons where a request does not say; otherwise its chat template
    /// decides. Messages of Anthropic's API always say.
    pub reasoning: Option<bool>,
    /// How the rows of a text become its embedding; the last row is one where this is not said.
    pub pooling: Option<Pooling>,
    /// Sampling, length and arguments of the chat template where a request does not say.
    pub defaults: Defaults,
}

/// How a server behaves.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// Whether a request for a model of another name is refused. Otherwise the model that
    /// is served answers it, and the response names that one.
    pub strict_model_names: bool,
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
    /// The only model could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The listener does not work.
    #[error("cannot accept connections on this address")]
    Listener(#[from] std::io::Error),
}

/// Why a model could not be loaded.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct LoadError(pub(crate) String);

/// Serves `models` on `listener` until `shutdown` resolves and what runs has ended.
///
/// Connections are accepted at once; while models are loaded, `/health` says how far they are. The
/// models end with the server.
///
/// After `shutdown` no connection and no generation begins; running ones get
/// [`Limits::drain_timeout`] to finish, then are cancelled: every open stream
/// gets a last event.
///
/// # Errors
///
/// [`ServeError`]: before the first connection is accepted, or where the only model could not be
/// loaded.
pub async fn serve(
    config: Config,
    models: Models,
    listener: TcpListener,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let local = listener.local_addr()?;
    check_bind(&config, local)?;
    let (stage, watcher) = watch::channel(Stage::Serving);
    let limits = config.limits.clone();
    let server = Arc::new(Server::new(config, &models, local, watcher));
    let registry = models.0;
    let lost = Arc::new(OnceLock::new());
    let end = {
        let (registry, lost) = (registry.clone(), lost.clone());
        async move {
            let failed = async {
                match registry.ready().await {
                    Ok(()) => std::future::pending().await,
                    Err(error) => error,
                }
            };
            tokio::select! {
                () = shutdown => {}
                error = failed => drop(lost.set(error)),
            }
        }
    };
    let background = [
        tokio::spawn(registry.clone().preload()),
        tokio::spawn(registry.clone().retire()),
    ];
    connection::run(listener, router::router(server), &limits, &stage, end).await;
    background.iter().for_each(|task| task.abort());
    // It waits for the engines' threads.
    let stopped = tokio::task::spawn_blocking(move || registry.stop());
    // A panic of an engine's thread has been printed.
    let _ = stopped.await;
    match lost.get() {
        Some(error) => Err(error.clone().into()),
        None => Ok(()),
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
