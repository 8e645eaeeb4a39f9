//! `POST /v1/messages/count_tokens`: how many tokens the prompt of a request has.
//!
//! The request is read and its prompt written by the code of `POST /v1/messages`, so the number
//! is that of the answer's usage: `input_tokens` and `cache_read_input_tokens` together.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use serde_json::json;

use super::request::{self, Length};
use crate::arrival::Received;
use crate::dialect::{self, X_IGNORED_FIELDS};
use crate::errors::ApiError;
use crate::openai;
use crate::server::Server;

/// Counts the tokens of a prompt, which may be longer than the context: only what a template may
/// render ([`text::template`]) bounds it.
pub(crate) async fn count_tokens(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let limit = server.config.limits.chat_body_bytes;
    let received = Received::new(&server, request, limit).await?;
    let Received {
        object,
        worker,
        app,
        ..
    } = received;
    let asked = request::read(object, &app, Length::Optional)?.asked;
    let prompts = dialect::encode(&app, worker, asked.prompt, usize::MAX).await?;
    let tokens: usize = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
    let count = json!({"input_tokens": tokens});
    let mut response = dialect::json(openai::bytes(&count));
    if let Some(ignored) = asked.ignored {
        response.headers_mut().insert(X_IGNORED_FIELDS, ignored);
    }
    Ok(response)
}
