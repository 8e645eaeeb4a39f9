//! `GET /v1/models`: what is served, and how.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, Response};
use serde_json::{Value, json};

use crate::App;
use crate::anthropic;
use crate::dialect;
use crate::errors::ApiError;

/// Lists the one model, in the form of the API that the client speaks.
pub(crate) async fn list(State(app): State<Arc<App>>, headers: HeaderMap) -> Response<Body> {
    if anthropic::is_spoken(&headers) {
        return document(&anthropic::models::list(&app));
    }
    let name = app.model();
    // llama-server's clients look for capabilities in a list of its own.
    let models = [json!({"name": name, "model": name, "capabilities": ["completion"]})];
    document(&json!({"object": "list", "data": [model(&app)], "models": models}))
}

/// Describes the model, for any of its names.
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response<Body>, ApiError> {
    let Path(id) = id.map_err(|_| ApiError::request("the path is not UTF-8"))?;
    let id = id.strip_suffix('/').unwrap_or(&id);
    if app.names.iter().all(|name| name != id) {
        return Err(ApiError::no_model(id, app.model()));
    }
    Ok(document(&match anthropic::is_spoken(&headers) {
        true => anthropic::models::model(&app),
        false => model(&app),
    }))
}

fn document(document: &Value) -> Response<Body> {
    dialect::json(super::bytes(document))
}

fn model(app: &App) -> Value {
    let info = app.engine.info();
    json!({
        "id": app.model(),
        "aliases": app.names[1..],
        "object": "model",
        "created": app.started,
        "owned_by": "paceline",
        "max_model_len": info.context,
        "meta": {
            "n_ctx": info.context,
            "n_vocab": info.vocab_size,
            "size": info.weight_bytes,
            "family": info.family,
            "backend": info.backend,
            "sequences": info.sequences,
            "kv_format": info.kv_format,
            "memory_bytes": info.memory_bytes,
            "has_chat_template": app.engine.text().template.is_some(),
            "speculation": {
                "drafter": info.drafter,
                "reason": info.drafter_reason,
                "draft_max": info.draft_max,
                "draft_vocab": info.draft_vocab,
                "accept": info.accept,
            },
            "preflight": info.preflight,
            "unused_tensors": info.unused_tensors,
        },
    })
}
