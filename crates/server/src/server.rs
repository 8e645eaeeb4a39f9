//! What all requests share, whatever model they are for.

use axum::body::Body;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{Extensions, HeaderMap};
use percent_encoding::percent_decode_str;
use serde_json::{Map, Value};
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::app::App;
use crate::body::{self, Budget};
use crate::connection::Stage;
use crate::errors::ApiError;
use crate::lanes::{Lanes, Worker};
use crate::metrics::Http;
use crate::openai::responses::store::Store;
use crate::registry::{Keep, Models, Registry};
use crate::turns::Turns;
use crate::{Config, ids, strict};

/// What all requests share.
pub(crate) struct Server {
    pub(crate) config: Config,
    /// Where the server listens.
    pub(crate) local: SocketAddr,
    /// When the server was started, in seconds since 1970.
    pub(crate) started: u64,
    pub(crate) stage: watch::Receiver<Stage>,
    bodies: Budget,
    pub(crate) lanes: Lanes,
    /// What the Responses API keeps.
    pub(crate) responses: Store,
    /// The models.
    pub(crate) registry: Arc<Registry>,
    /// What is owed to the clients of each model.
    pub(crate) turns: Vec<Turns>,
    /// The responses to requests for each model, and to those for none.
    pub(crate) http: Http,
}

impl Server {
    pub(crate) fn new(
        config: Config,
        models: &Models,
        local: SocketAddr,
        stage: watch::Receiver<Stage>,
    ) -> Self {
        let n = models.0.entries.len();
        let turns = (0..n).map(|_| Turns::new(config.limits.turn_grace));
        Server {
            bodies: Budget::new(config.limits.bodies_bytes),
            lanes: Lanes::new(&config.limits),
            responses: Store::new(&config.limits),
            turns: turns.collect(),
            http: Http::new(n),
            registry: models.0.clone(),
            config,
            local,
            started: ids::unix_seconds(),
            stage,
        }
    }

    /// Refuses work once a shutdown has begun.
    pub(crate) fn refuse_late(&self) -> Result<(), ApiError> {
        if *self.stage.borrow() > Stage::Serving {
            Err(ApiError::shutting_down())
        } else {
            Ok(())
        }
    }

    /// Receives the body of a request, of at most `limit` bytes.
    pub(crate) async fn receive(
        &self,
        headers: &HeaderMap,
        body: Body,
        limit: usize,
    ) -> Result<body::Received, ApiError> {
        let limits = &self.config.limits;
        body::receive(headers, body, limit, &self.bodies, limits).await
    }

    /// Reads a body as a JSON object once it is its turn; what is read may be held only as long as
    /// the worker.
    pub(crate) async fn parse(
        &self,
        body: &body::Received,
    ) -> Result<(Map<String, Value>, Worker), ApiError> {
        let worker = self.lanes.enter(body.bytes.len()).await;
        Ok((strict::parse_object(&body.bytes)?, worker))
    }

    /// The model that a query names, or the only one that is loaded; it is loaded if need be.
    async fn app_of_query(self: &Arc<Self>, parts: &Parts) -> Result<Arc<App>, ApiError> {
        let registry = &self.registry;
        let name = queried_model(parts.uri.query().unwrap_or_default());
        let model = match registry.find(name.as_deref()) {
            Err(error) if name.is_none() => {
                let all = 0..registry.entries.len();
                let mut loaded = all.filter(|&i| registry.status(i).loaded().is_some());
                let only = loaded.next().filter(|_| loaded.next().is_none());
                only.ok_or(error)?
            }
            found => found?,
        };
        Chosen::note(&parts.extensions, model);
        if let Some(progress) = registry.starts(model) {
            return Err(ApiError::loading(&progress));
        }
        let most = self.config.limits.request_timeout;
        let held = timeout(most, registry.hold(model, Keep::Default)).await;
        let held = held.map_err(|_| ApiError::timed_out(most))??;
        Ok(Arc::new(App::new(self, model, held, Duration::ZERO)))
    }
}

/// The model that the query of a request without a body names, as `?model=NAME`.
pub(crate) struct Queried(pub(crate) Arc<App>);

impl FromRequestParts<Arc<Server>> for Queried {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, server: &Arc<Server>) -> Result<Self, ApiError> {
        server.app_of_query(parts).await.map(Queried)
    }
}

/// The name of the model in a query, if it has one.
pub(crate) fn queried_model(query: &str) -> Option<String> {
    let name = query
        .split('&')
        .find_map(|pair| pair.strip_prefix("model="))?;
    let name = name.replace('+', " ");
    let name = percent_decode_str(&name).decode_utf8_lossy();
    Some(name.into_owned()).filter(|name| !name.is_empty())
}

/// The model that a request turns out to be for: an extension of the request, for whoever counts its
/// response.
#[derive(Clone, Debug, Default)]
pub(crate) struct Chosen(Arc<OnceLock<usize>>);

impl Chosen {
    /// Notes that the request with these extensions is for model `i`.
    pub(crate) fn note(extensions: &Extensions, i: usize) {
        if let Some(chosen) = extensions.get::<Chosen>() {
            // Who asks twice asks for the same.
            let _ = chosen.0.set(i);
        }
    }

    /// The model, once it is known.
    pub(crate) fn get(&self) -> Option<usize> {
        self.0.get().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_names_a_model() {
        for (query, name) in [
            ("", None),
            ("model=", None),
            ("a=1&model=org%2Fname", Some("org/name")),
            ("model=a+b&c=2", Some("a b")),
            ("models=x", None),
        ] {
            assert_eq!(queried_model(query).as_deref(), name, "{query}");
        }
    }
}
