//! `POST /models/load` and `POST /models/unload`: models that are loaded and unloaded by hand, as
//! llama-server has it where it serves several.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use serde_json::{Value, json};

use super::tables;
use crate::dialect;
use crate::errors::ApiError;
use crate::fields::Fields;
use crate::openai;
use crate::server::{Chosen, Server};

/// `POST /models/load`: begins to load a model, and does not wait for it.
///
/// # Errors
///
/// 404 for a model that is not known, 400 for one that is loaded.
pub(crate) async fn load(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    server.refuse_late()?;
    let model = named(&server, request).await?;
    if server.registry.status(model).loaded().is_some() {
        return Err(ApiError::field("model", "is loaded already"));
    }
    server.registry.load_in_background(model);
    Ok(success())
}

/// `POST /models/unload`: unloads a model as soon as no request needs it, and does not wait for
/// that.
///
/// # Errors
///
/// 404 for a model that is not known, 400 for one that is not loaded or cannot be loaded again.
pub(crate) async fn unload(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let model = named(&server, request).await?;
    if !server.registry.entries[model].may_leave() {
        let message = "cannot be unloaded: this server could not load it again";
        return Err(ApiError::field("model", message));
    }
    match server.registry.unload(model) {
        true => Ok(success()),
        false => Err(ApiError::field("model", "is not loaded")),
    }
}

/// The model that the body of a request names.
async fn named(server: &Arc<Server>, request: Request) -> Result<usize, ApiError> {
    let (head, body) = request.into_parts();
    let limit = server.config.limits.body_bytes;
    let bytes = server.receive(&head.headers, body, limit).await?;
    let (object, _worker) = server.parse(&bytes).await?;
    let fields = Fields::new(&object, &tables::MODELS);
    let names = || server.registry.names();
    let name = fields.string("model")?;
    let name = name.ok_or_else(|| ApiError::model_missing(&names()))?;
    let model = server.registry.named(name);
    let model = model.ok_or_else(|| ApiError::no_model(name, &names()))?;
    Chosen::note(&head.extensions, model);
    Ok(model)
}

/// What is said of a server of several models as a whole, where `GET /props` names none.
pub(super) fn props(server: &Server) -> Value {
    json!({
        "role": "router",
        "max_instances": server.registry.max_loaded(),
        "models": server.registry.names(),
        "model_alias": "paceline",
        "model_path": "none",
        "default_generation_settings": {"params": {}, "n_ctx": 0},
        "webui": false,
        "webui_settings": {},
        "build_info": concat!("paceline-", env!("CARGO_PKG_VERSION")),
    })
}

fn success() -> Response<Body> {
    dialect::json(openai::bytes(&json!({"success": true})))
}
