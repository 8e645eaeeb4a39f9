//! `POST /api/embed`, and the older `POST /api/embeddings`: vectors of texts.
//!
//! ```text
//! /api/embed        {"input": TEXT or [TEXT, …]}  →  {"embeddings": [[…], …], …}    of length 1
//! /api/embeddings   {"prompt": TEXT}              →  {"embedding": […]}             as the model has it
//! ```

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Response};
use engine::{Embedding, Norm, Pooling, RequestOutcome};
use serde_json::{Value, json};

use super::{KEEP_ALIVE, keep_alive, model_name, tables};
use crate::arrival::{Parsed, Received};
use crate::dialect::{self, X_IGNORED_FIELDS};
use crate::embeddings;
use crate::errors::ApiError;
use crate::fields::{Fields, ignored_header};
use crate::openai;
use crate::request::Prompt;
use crate::server::Server;

const INPUT: &str = "input";
const PROMPT: &str = "prompt";

/// `POST /api/embed`.
pub(crate) async fn embed(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let start = Instant::now();
    let received = receive(&server, request).await?;
    let Embedded {
        model,
        outcomes,
        ignored,
    } = run(received, INPUT).await?;
    let vectors: Vec<_> = outcomes.iter().map(|o| &o.embedding[0]).collect();
    let n: usize = outcomes.iter().map(|o| o.usage.prompt_tokens).sum();
    let document = json!({
        "model": model,
        "embeddings": vectors,
        "total_duration": u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX),
        "load_duration": 0,
        "prompt_eval_count": n,
    });
    Ok(answer(&document, ignored))
}

/// `POST /api/embeddings`.
pub(crate) async fn embeddings(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let received = receive(&server, request).await?;
    let embedded = run(received, PROMPT).await?;
    let first = embedded.outcomes.first();
    let vector = first.map_or(&[][..], |outcome| &outcome.embedding[0]);
    Ok(answer(&json!({"embedding": vector}), embedded.ignored))
}

/// Receives a request, and waits for its model.
async fn receive(server: &Arc<Server>, request: Request) -> Result<Received, ApiError> {
    let parsed = Parsed::new(server, request, server.config.limits.body_bytes).await?;
    let keep = keep_alive(&parsed.object)?;
    parsed.wait(keep).await
}

/// A request that has run.
struct Embedded {
    /// The model's name in the answer.
    model: String,
    outcomes: Vec<RequestOutcome>,
    ignored: Option<HeaderValue>,
}

/// Reads a request whose texts are in the field `name`, and runs it.
async fn run(received: Received, name: &'static str) -> Result<Embedded, ApiError> {
    let Received {
        head,
        mut object,
        worker,
        app,
    } = received;
    let settings = match object.remove("options") {
        None | Some(Value::Null) => Default::default(),
        Some(Value::Object(settings)) => settings,
        Some(_) => return Err(ApiError::field("options", "must be an object")),
    };
    let inputs = inputs(name, object.remove(name).unwrap_or_default())?;
    let is_older = name == PROMPT;
    let table = if is_older {
        &tables::EMBEDDINGS
    } else {
        &tables::EMBED
    };
    let fields = Fields::new(&object, table);
    let model = model_name(&app, fields.string("model")?)?;
    // It was read when the request came.
    fields.get(KEEP_ALIVE);
    fields.refuse()?;
    let inner = fields.inside(&settings, tables::OPTIONS);
    inner.refuse()?;
    fields.note_ignored(inner.ignored());
    let (mut truncates, mut dimensions) = (true, None);
    if !is_older {
        let width = app.engine.info().hidden_size as i64;
        truncates = fields.bool("truncate")?.unwrap_or(true);
        // 0 is as many as there are.
        let asked = fields.integer("dimensions", 0..=width)?;
        dimensions = asked.filter(|&n| n > 0).map(|n| n as usize);
    }
    let pooling = embeddings::pooling(&app);
    if pooling == Pooling::None {
        let message = "this server pools nothing (--pooling none), and Ollama's API has one vector for each text: send the request to /embedding, or serve with another --pooling";
        return Err(ApiError::request(message));
    }
    let embedding = Embedding {
        pooling,
        norm: if is_older {
            Norm::None
        } else {
            Norm::default()
        },
        dimensions,
    };
    let ignored = ignored_header(&fields);
    let outcomes = match inputs.is_empty() {
        true => Vec::new(),
        false => {
            let prompts = embeddings::encode(&app, worker, name, inputs, truncates).await?;
            embeddings::vectors(&app, &head, prompts, embedding).await?
        }
    };
    Ok(Embedded {
        model,
        outcomes,
        ignored,
    })
}

/// The texts in the field `name`; none where it asks for the model to be loaded.
fn inputs(name: &str, input: Value) -> Result<Vec<Prompt>, ApiError> {
    let list = match input {
        Value::Null => return Ok(Vec::new()),
        Value::String(text) if text.is_empty() => return Ok(Vec::new()),
        Value::Array(list) if name == INPUT => list,
        one => vec![one],
    };
    crate::embeddings::check_count(name, list.len())?;
    let one = |(i, one)| match one {
        Value::String(text) if text.is_empty() => {
            Err(ApiError::field(format!("{name}[{i}]"), "is empty"))
        }
        Value::String(text) => Ok(Prompt::Text(text)),
        _ if name == INPUT => Err(ApiError::field(
            name,
            "must be a string or a list of strings",
        )),
        _ => Err(ApiError::field(name, "must be a string")),
    };
    list.into_iter().enumerate().map(one).collect()
}

/// A response of `document`, with the header for what was ignored.
fn answer(document: &Value, ignored: Option<HeaderValue>) -> Response<Body> {
    let mut response = dialect::json(openai::bytes(document));
    if let Some(ignored) = ignored {
        response.headers_mut().insert(X_IGNORED_FIELDS, ignored);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_texts() {
        let n = |name, value: Value| inputs(name, value).ok().map(|all| all.len());
        for nothing in [json!(null), json!("")] {
            assert_eq!(n(INPUT, nothing.clone()), Some(0));
            assert_eq!(n(PROMPT, nothing), Some(0));
        }
        assert_eq!(n(INPUT, json!([])), Some(0));
        assert_eq!(n(INPUT, json!("a")), Some(1));
        assert_eq!(n(INPUT, json!(["a", "b"])), Some(2));
        assert_eq!(n(PROMPT, json!("a")), Some(1));
        for bad in [json!(7), json!([1, 2]), json!(["a", ""]), json!([["a"]])] {
            assert_eq!(n(INPUT, bad), None);
        }
        assert_eq!(n(PROMPT, json!(["a"])), None);
    }
}
