//! `POST /v1/…/render`: the tokens that a request for text becomes, in vLLM's form.
//!
//! Routers of vLLM servers ask for them to find the server whose prefix cache has most of a prompt:
//! they compare them with the tokens of KV events.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Response};
use serde_json::{Value, json};

use crate::arrival::Received;
use crate::dialect::{self, Endpoint, X_IGNORED_FIELDS};
use crate::errors::ApiError;
use crate::media::Encoded;
use crate::server::Server;
use crate::{ids, openai};

/// The tokens of each prompt of a request that [`Endpoint`] `E` would answer, a document each.
async fn rendered<E: Endpoint>(
    server: &Arc<Server>,
    request: Request,
    prefix: &str,
) -> Result<(Vec<Value>, Option<HeaderValue>), ApiError> {
    let limit = E::body_bytes(&server.config.limits);
    let Received {
        head,
        object,
        worker,
        app,
    } = Received::new(server, request, limit).await?;
    let (asked, _) = E::read(object, &head.headers, &app)?;
    let context = app.engine.info().context;
    let prompts = dialect::encode(&app, worker, asked.prompt, context).await?;
    let document = |prompt: Encoded| {
        json!({
            "request_id": format!("{prefix}-{}", ids::unique()),
            "model": app.model(),
            "token_ids": prompt.tokens,
            "features": null,
            "sampling_params": {},
        })
    };
    Ok((prompts.into_iter().map(document).collect(), asked.ignored))
}

/// Renders the one prompt of a conversation.
pub(crate) async fn one<E: Endpoint>(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let (documents, ignored) = rendered::<E>(&server, request, "chatcmpl").await?;
    Ok(answer(&documents[0], ignored))
}

/// Renders each of the prompts of a completion.
pub(crate) async fn several<E: Endpoint>(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let (documents, ignored) = rendered::<E>(&server, request, "cmpl").await?;
    Ok(answer(&json!(documents), ignored))
}

/// A response of `document`, with the header for what was ignored.
fn answer(document: &Value, ignored: Option<HeaderValue>) -> Response<Body> {
    let mut response = dialect::json(openai::bytes(document));
    if let Some(ignored) = ignored {
        response.headers_mut().insert(X_IGNORED_FIELDS, ignored);
    }
    response
}
