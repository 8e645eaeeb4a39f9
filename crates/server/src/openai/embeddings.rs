//! `POST /v1/embeddings`: vectors of texts, in OpenAI's form.

use std::sync::LazyLock;

use axum::body::Body;
use axum::http::Response;
use base64::prelude::{BASE64_STANDARD, Engine};
use engine::{Embedding, Pooling};
use serde_json::{Value, json};

use super::completions::tokens;
use super::{bytes, tables};
use crate::arrival::Received;
use crate::dialect::{self, X_IGNORED_FIELDS};
use crate::embeddings;
use crate::errors::ApiError;
use crate::fields::{Fields, ignored_header};
use crate::request::Prompt;
use crate::table::Kind::{Any, Integer, Text};
use crate::table::{self, Known, Table, Unsupported, known, unless};

const INPUT: &str = "input";

/// Honored in a request.
const HONORED: &[Known] = &[
    known(
        "model",
        Text,
        "with one model any name will do, unless `--strict-model-names` is set; with several, the name of one. The response names the true one",
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

/// Refused by the requests for vectors of all APIs: they change the vectors, or whose turn it is.
pub(crate) const REFUSED: &[Unsupported] = &[
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

/// Answers a request for embeddings whose body has been read.
pub(crate) async fn embeddings(received: Received) -> Result<Response<Body>, ApiError> {
    let Received {
        head,
        mut object,
        worker,
        app,
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
    let pooling = embeddings::pooling(&app);
    if pooling == Pooling::None {
        let message = "this server pools nothing (--pooling none), and OpenAI's API has one vector for each input: send the request to /embedding, or serve with another --pooling";
        return Err(ApiError::request(message));
    }
    let embedding = Embedding {
        pooling,
        dimensions: dimensions.map(|n| n as usize),
        ..Embedding::default()
    };
    let ignored = ignored_header(&fields);
    let prompts = embeddings::encode(&app, worker, INPUT, inputs, false).await?;
    let outcomes = embeddings::vectors(&app, &head, prompts, embedding).await?;
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

/// A string, a list of token ids, or a list of these.
fn read_inputs(input: Value) -> Result<Vec<Prompt>, ApiError> {
    let list = match input {
        Value::Null => return Err(ApiError::field(INPUT, "is missing")),
        Value::Array(list) if list.iter().any(|one| !one.is_number()) => list,
        one => vec![one],
    };
    embeddings::check_count(INPUT, list.len())?;
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
    use crate::embeddings::INPUTS_MAX;

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
