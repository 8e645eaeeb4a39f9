//! Requests of the API for an engine whose caller runs them without HTTP.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderMap;
use engine::{Engine, Request};
use serde_json::{Map, Value};
use tokio::sync::watch;

use crate::app::App;
use crate::connection::Stage;
use crate::dialect::{self, Endpoint};
use crate::errors::ApiError;
use crate::openai::chat::Chat;
use crate::openai::completions::Completion;
use crate::registry::Keep;
use crate::server::Server;
use crate::{Config, ModelConfig, Models};

/// Makes the engine's requests of the bodies of OpenAI's API: what a server would run, and nothing
/// that it would refuse.
pub struct RequestReader {
    server: Arc<Server>,
}

impl RequestReader {
    /// A reader of requests for `engine`, which it holds, with `config` where a request is silent.
    pub fn new(engine: Arc<Engine>, config: ModelConfig) -> Self {
        let models = Models::one(engine, config);
        let (_, stage) = watch::channel(Stage::Serving);
        let nowhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let server = Server::new(Config::default(), &models, nowhere, stage);
        RequestReader {
            server: Arc::new(server),
        }
    }

    /// The requests for the answers to `body`, that of a request to `/v1/chat/completions`: one, or
    /// as many as its `n` says. Runs on a runtime of tokio.
    ///
    /// # Errors
    ///
    /// The message with which a server refuses `body`.
    pub async fn chat(&self, body: Map<String, Value>) -> Result<Vec<Request>, String> {
        let read = self.read::<Chat>(body).await;
        read.map_err(|error| error.message)
    }

    /// The requests for the answers to `body`, that of a request to `/v1/completions`: as many as its
    /// `n` says to each of its prompts. Runs on a runtime of tokio.
    ///
    /// # Errors
    ///
    /// The message with which a server refuses `body`.
    pub async fn completion(&self, body: Map<String, Value>) -> Result<Vec<Request>, String> {
        let read = self.read::<Completion>(body).await;
        read.map_err(|error| error.message)
    }

    async fn read<E: Endpoint>(&self, body: Map<String, Value>) -> Result<Vec<Request>, ApiError> {
        let held = self.server.registry.hold(0, Keep::Default).await?;
        let app = Arc::new(App::new(&self.server, 0, held, Duration::ZERO));
        // A place in the lane of short requests: there are no others to wait for.
        let worker = self.server.lanes.enter(0).await;
        let (asked, _) = E::read(body, &HeaderMap::new(), &app)?;
        let mut options = asked.options;
        dialect::requests(&app, worker, asked.prompt, &mut options).await
    }
}
