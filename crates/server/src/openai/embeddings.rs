//! `POST /v1/embeddings`: vectors of texts, in OpenAI's form.
//!
//! Every input is a request of its own, so that they run together in the engine's batch. A few at
//! a time wait in its queue, and others find room between them.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use base64::prelude::{BASE64_STANDARD, Engine};
use engine::{Embedding, RequestOutcome};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use serde_json::{Value, json};

use super::completions::tokens;
use super::{bytes, tables};
use crate::App;
use crate::auth;
use crate::dialect::{self, Received, X_IGNORED_FIELDS};
use crate::errors::ApiError;
use crate::fields::{Fields, ignored_header};
use crate::generation::{Generation, Wants};
use crate::options::owned;
use crate::request::Prompt;
use crate::table::Kind::{Any, Integer, Text};
use crate::table::{self, Known, Table, Unsupported, known, unless};
use crate::turns::Client;

const INPUT: &str = "input";
/// Inputs of a request, the same as OpenAI's.
const INPUTS_MAX: usize = 2048;

/// Honored in a request.
const HONORED: &[Known] = &[
    known(
        "model",
        Text,
        "any name is answered by the model that is served; the response names the true one",
    ),
    known(
        INPUT,
        Any,
        "a text, a list of token ids, or a list of up to 2,048 of these; none may be empty",
    ),
    known(
        "encoding_format",
        Text,
        "`float`, the default, or `base64`: the vector's 32-bit floats, little-endian",
    ),
    known(
        "dimensions",
        Integer,
        "the first so many numbers of the vector, normalized again; as many as it has, at most",
    ),
];

/// Refused: they change the vectors, or whose turn it is.
const REFUSED: &[Unsupported] = &[
    unless("truncate_prompt_tokens", "[]"),
    unless("add_special_tokens", "[true]"),
    unless("embed_dtype", r#"["float32"]"#),
    unless("priority", "[0]"),
    unless("timeout", "[]"),
    unless("cache_salt", "[]"),
];

/// Fields of requests for embeddings.
pub(crate) static EMBEDDINGS: LazyLock<Table> = LazyLock::new(|| {
    Table::new("EmbeddingRequest", &[INPUT])
        .honors("", HONORED)
        .refuses("", REFUSED)
        .ignores_as_elsewhere(tables::HARMLESS)
});

/// The table of this module as Markdown, as it stands in `docs/server.md`.
pub(crate) fn markdown() -> String {
    table::markdown(&[&EMBEDDINGS], "")
}

/// `POST /v1/embeddings`.
pub(crate) async fn embeddings(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let received = Received::new(&app, request, app.config.limits.body_bytes).await?;
    let Received {
        head,
        mut object,
        worker,
    } = received;
    let inputs = read_inputs(object.remove(INPUT).unwrap_or_default())?;
    let fields = Fields::new(&object, &EMBEDDINGS);
    let model = app.check_model(&fields)?;
    fields.refuse()?;
    let is_base64 = match fields.string("encoding_format")? {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => return Err(fields.error("encoding_format", "must be \"float\" or \"base64\"")),
    };
    let width = app.engine.info().hidden_size as i64;
    let dimensions = fields.integer("dimensions", 1..=width)?;
    let embedding = Embedding {
        dimensions: dimensions.map(|n| n as usize),
        ..Embedding::default()
    };
    let ignored = ignored_header(&fields);
    let context = app.engine.info().context;
    let prompts = dialect::encode(&app, worker, Prompt::Several(inputs), context).await?;
    let prompts: Vec<Vec<u32>> = prompts.into_iter().map(|prompt| prompt.tokens).collect();
    if let Some(i) = prompts.iter().position(Vec::is_empty) {
        return Err(ApiError::field(format!("{INPUT}[{i}]"), "is empty"));
    }
    let caller = auth::caller(&app.config.keys, &head.headers);
    let client = head.extensions.get::<Arc<Client>>();
    let client = client.map_or(0, |client| client.number(caller.as_ref()));
    let request = |prompt| engine::Request {
        embedding: Some(embedding),
        namespace: owned(engine::Namespace::default(), caller),
        client,
        ..engine::Request::new(prompt)
    };
    let start = |prompt| {
        Generation::start(
            &app,
            &head.extensions,
            request(prompt),
            Wants::default(),
            None,
        )
    };
    let most = app.config.limits.request_timeout;
    let outcomes = tokio::time::timeout(most, run(&app, prompts, start)).await;
    let outcomes = outcomes.map_err(|_| timed_out(&app, most))??;
    let spell = |vector: &[f32]| match is_base64 {
        true => json!(base64(vector)),
        false => json!(vector),
    };
    let data = outcomes.iter().enumerate().map(|(index, outcome)| {
        let vector = spell(&outcome.embedding[0]);
        json!({"object": "embedding", "index": index, "embedding": vector})
    });
    let n: usize = outcomes.iter().map(|o| o.usage.prompt_tokens).sum();
    let document = json!({
        "object": "list",
        "data": data.collect::<Vec<_>>(),
        "model": model,
        "usage": {"prompt_tokens": n, "total_tokens": n},
        "speculation": outcomes[0].speculation,
    });
    let mut response = dialect::json(bytes(&document));
    if let Some(ignored) = ignored {
        response.headers_mut().insert(X_IGNORED_FIELDS, ignored);
    }
    Ok(response)
}

/// The error of a request that has taken as long as any may, counted.
fn timed_out(app: &App, most: Duration) -> ApiError {
    let error = ApiError::timed_out(most);
    app.metrics.faults.count(error.label());
    error
}

/// Runs all prompts, and gives their outcomes in order. While one runs, another that finds no
/// place in the queue waits for it.
async fn run(
    app: &App,
    prompts: Vec<Vec<u32>>,
    start: impl Fn(Vec<u32>) -> Result<Generation, ApiError>,
) -> Result<Vec<Box<RequestOutcome>>, ApiError> {
    let width = 2 * app.engine.info().sequences;
    let mut outcomes: Vec<Option<Box<RequestOutcome>>> = vec![None; prompts.len()];
    let mut waiting = prompts.into_iter().enumerate();
    let mut running = FuturesUnordered::new();
    loop {
        while running.is_empty() || running.len() < width && app.engine.places() > 0 {
            let Some((i, prompt)) = waiting.next() else {
                break;
            };
            let generation = start(prompt)?;
            running.push(async move { (i, generation.collect().await) });
        }
        let Some((i, ended)) = running.next().await else {
            break;
        };
        outcomes[i] = Some(ended?.1);
    }
    Ok(outcomes.into_iter().flatten().collect())
}

/// A string, a list of token ids, or a list of these.
fn read_inputs(input: Value) -> Result<Vec<Prompt>, ApiError> {
    let list = match input {
        Value::Null => return Err(ApiError::field(INPUT, "is missing")),
        Value::Array(list) if list.iter().any(|one| !one.is_number()) => list,
        one => vec![one],
    };
    if list.len() > INPUTS_MAX {
        let message = format!("has {} inputs, {INPUTS_MAX} at most", list.len());
        return Err(ApiError::field(INPUT, message));
    }
    let one = |(i, one)| {
        let path = format!("{INPUT}[{i}]");
        let wrong = || ApiError::field(&path, "must be a string or a list of token ids");
        match one {
            Value::String(text) if text.is_empty() => Err(ApiError::field(&path, "is empty")),
            Value::String(text) => Ok(Prompt::Text(text)),
            Value::Array(ids) if ids.is_empty() => Err(ApiError::field(&path, "is empty")),
            Value::Array(ids) => tokens(&ids).ok_or_else(wrong),
            _ => Err(wrong()),
        }
    };
    list.into_iter().enumerate().map(one).collect()
}

/// The little-endian bytes of a vector in base64.
fn base64(vector: &[f32]) -> String {
    let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
    BASE64_STANDARD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_spelled_in_base64() {
        assert_eq!(base64(&[1.0]), "AACAPw==");
        assert_eq!(base64(&[1.0, -2.0]), "AACAPwAAAMA=");
        assert_eq!(base64(&[1.0, -2.0, 0.0]), "AACAPwAAAMAAAAAA");
    }

    #[test]
    fn inputs_have_four_forms() {
        let n = |value: Value| read_inputs(value).ok().map(|all| all.len());
        for value in [json!("a"), json!([1, 2]), json!(["a"]), json!([[1, 2]])] {
            assert_eq!(n(value), Some(1));
        }
        assert_eq!(n(json!(["a", "b", [1]])), Some(3));
        for bad in [
            json!(null),
            json!(""),
            json!([]),
            json!(["a", ""]),
            json!([[]]),
            json!(7),
            json!([1, "a"]),
        ] {
            assert_eq!(n(bad), None);
        }
        assert_eq!(n(json!(vec!["a"; INPUTS_MAX])), Some(INPUTS_MAX));
        assert_eq!(n(json!(vec!["a"; INPUTS_MAX + 1])), None);
    }
}
