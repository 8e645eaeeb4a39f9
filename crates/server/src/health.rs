//! What monitoring asks: `/health`, its two halves, and `/metrics`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::{Response, StatusCode, header};
use axum::response::IntoResponse;
use serde_json::{Value, json};

use crate::connection::Stage;
use crate::errors::ApiError;
use crate::metrics::{KvFormats, Source};
use crate::registry::Registry;
use crate::server::Server;

/// `GET /health/live`: 200 unless an engine is lost, which only a new start mends.
pub(crate) async fn live(State(server): State<Arc<Server>>) -> Response<Body> {
    match server.registry.has_lost_an_engine() {
        true => status(
            StatusCode::SERVICE_UNAVAILABLE,
            &json!({"status": "failed"}),
        ),
        false => status(StatusCode::OK, &json!({"status": "ok"})),
    }
}

/// `GET /health` and `GET /health/ready`: 200 while requests are taken; while the models are loaded
/// that are when the server starts, how far they are.
pub(crate) async fn ready(State(server): State<Arc<Server>>) -> Response<Body> {
    let away = StatusCode::SERVICE_UNAVAILABLE;
    if server.registry.has_lost_an_engine() {
        status(away, &json!({"status": "failed"}))
    } else if *server.stage.borrow() > Stage::Serving {
        status(away, &json!({"status": "draining"}))
    } else if let Some(progress) = starting(&server.registry) {
        let mut response = ApiError::loading(&progress.1).into_response();
        *response.body_mut() = Body::from(progress.0.to_string());
        // The body is written, and is no dialect's.
        response.extensions_mut().remove::<ApiError>();
        response
    } else {
        status(StatusCode::OK, &json!({"status": "ok"}))
    }
}

/// What is said of models that are being loaded; the error is what llama-server's clients know.
fn starting(registry: &Registry) -> Option<(Value, crate::registry::Snapshot)> {
    let (i, progress) = registry.starting()?;
    let document = json!({
        "status": "loading",
        "model": registry.entries[i].names[0],
        "stage": progress.stage,
        "fraction": progress.fraction,
        "error": {"code": 503, "message": "Loading model", "type": "unavailable_error"},
    });
    Some((document, progress))
}

/// A small JSON document about the server.
fn status(status: StatusCode, body: &Value) -> Response<Body> {
    let json = [(header::CONTENT_TYPE, "application/json")];
    (status, json, body.to_string()).into_response()
}

/// `GET /metrics`.
pub(crate) async fn metrics(State(server): State<Arc<Server>>) -> Response<Body> {
    let registry = &server.registry;
    let sources = registry.entries.iter().enumerate().map(|(i, entry)| {
        let status = registry.status(i);
        let info = registry.last_info(i);
        let kv = info.as_ref().map(|info| KvFormats {
            name: info.kv_format.clone(),
            layers: info.kv_layers.clone(),
        });
        let drafts = info.filter(|info| info.drafter.is_some());
        Source {
            model: entry.names[0].clone(),
            is_loaded: status.loaded().is_some(),
            metrics: registry.metrics(i),
            counters: match status.loaded() {
                Some(loaded) => loaded.engine.counters().clone(),
                None => entry.counters.clone(),
            },
            positions: drafts.as_ref().map_or(0, |info| info.draft_max),
            kv,
            drafters: drafts.map_or_else(Vec::new, |info| info.drafters),
        }
    });
    let page = crate::metrics::render(&sources.collect::<Vec<_>>(), &server.http);
    (
        [(
            header::CONTENT_TYPE,
            "text/plain; version=0.0.4; charset=utf-8",
        )],
        page,
    )
        .into_response()
}
