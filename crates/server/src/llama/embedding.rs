//! `POST /embedding`, and `/embeddings` where a body is of this API: vectors of texts.
//!
//! ```text
//! [{"index": 0, "embedding": [[…]]}, …]        a list of vectors for each text: one if they are pooled
//! ```

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use axum::response::IntoResponse;
use engine::{Embedding, Norm, Pooling};
use serde_json::{Map, Value, json};

use super::{DIALECT, prompt, tables};
use crate::arrival::Received;
use crate::dialect::{self, X_IGNORED_FIELDS};
use crate::embeddings;
use crate::errors::ApiError;
use crate::fields::{Fields, ignored_header};
use crate::openai;
use crate::server::Server;

/// What this API calls a text, and what OpenAI's calls it, which this one reads too.
const NAMES: [&str; 2] = ["content", "input"];
/// The prefix of paths that OpenAI's API has.
const V1: &str = "/v1/";
/// Fields by which a body sent to `/embeddings` is one of OpenAI's API, whose libraries always send the
/// first.
const OPENAI_S: [&str; 2] = ["encoding_format", "dimensions"];
/// The greatest p of a p-norm.
const POWER_MAX: i64 = 1 << 10;
/// What the largest number of a vector becomes where it is to fit 16-bit integers.
const LARGEST: u16 = 32_760;

/// `POST /embedding`.
pub(crate) async fn embedding(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let received = Received::new(&server, request, server.config.limits.body_bytes).await?;
    answer(received).await
}

/// `POST /v1/embeddings`, which is OpenAI's, and `/embeddings`, which both APIs have.
pub(crate) async fn embeddings(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let is_openai_s = request.uri().path().starts_with(V1);
    let received = Received::new(&server, request, server.config.limits.body_bytes).await?;
    if is_openai_s || !is_native(&received.object) {
        return openai::embeddings::embeddings(received).await;
    }
    let answered = answer(received).await;
    Ok(answered.unwrap_or_else(|error| {
        // The path's own dialect would spell it otherwise.
        let mut response = error.into_response();
        DIALECT.spell_error(&mut response, "");
        response
    }))
}

/// Whether a body that both APIs could have is one of this API.
fn is_native(body: &Map<String, Value>) -> bool {
    let has = |name: &&str| body.get(*name).is_some_and(|value| !value.is_null());
    !OPENAI_S.iter().any(has)
}

async fn answer(received: Received) -> Result<Response<Body>, ApiError> {
    let Received {
        head,
        mut object,
        worker,
        app,
    } = received;
    let given = NAMES.iter().find(|name| object.contains_key(**name));
    let name = *given.unwrap_or(&NAMES[0]);
    let inputs = object.remove(name).unwrap_or_default();
    let inputs = prompt::read_all(name, inputs, |n| embeddings::check_count(name, n))?;
    let fields = Fields::new(&object, &tables::EMBEDDING);
    app.check_model(&fields)?;
    fields.refuse()?;
    let pooling = embeddings::pooling(&app);
    let norm = match fields.integer("embd_normalize", -1..=POWER_MAX)? {
        _ if pooling == Pooling::None => Norm::None,
        None => Norm::default(),
        Some(-1) => Norm::None,
        Some(0) => Norm::Max(LARGEST),
        Some(power) => Norm::Power(power as u16),
    };
    let embedding = Embedding {
        pooling,
        norm,
        dimensions: None,
    };
    let ignored = ignored_header(&fields);
    let prompts = embeddings::encode(&app, worker, name, inputs, false).await?;
    let outcomes = embeddings::vectors(&app, &head, prompts, embedding).await?;
    let each = outcomes.iter().enumerate();
    let each = each.map(|(index, outcome)| json!({"index": index, "embedding": outcome.embedding}));
    let document = each.collect::<Vec<Value>>();
    let mut response = dialect::json(openai::bytes(&document));
    if let Some(ignored) = ignored {
        response.headers_mut().insert(X_IGNORED_FIELDS, ignored);
    }
    Ok(response)
}
