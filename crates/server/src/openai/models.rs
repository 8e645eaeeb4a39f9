//! `GET /v1/models`: what is served, and how.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::Response;
use serde_json::{Value, json};

use super::json;
use crate::App;
use crate::errors::ApiError;

/// Lists the one model, under each of its names.
pub(crate) async fn list(State(app): State<Arc<App>>) -> Response<Body> {
    let data: Vec<Value> = app.names.iter().map(|name| model(&app, name)).collect();
    // llama-server's clients look for capabilities in a list of its own.
    let models: Vec<Value> = app
        .names
        .iter()
        .map(|name| json!({"name": name, "model": name, "capabilities": ["completion"]}))
        .collect();
    json(&json!({"object": "list", "data": data, "models": models}))
}

/// Describes one model.
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response<Body>, ApiError> {
    let Path(id) = id.map_err(|_| ApiError::request("the path is not UTF-8"))?;
    match app.names.iter().find(|name| **name == id) {
        Some(name) => Ok(json(&model(&app, name))),
        None => Err(ApiError::no_model(&id, app.model())),
    }
}

fn model(app: &App, name: &str) -> Value {
    let info = app.engine.info();
    json!({
        "id": name,
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
