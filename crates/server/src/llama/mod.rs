//! llama-server's own API.
//!
//! | file | path |
//! | --- | --- |
//! | [`completion`] | `POST /completion`, `POST /infill`, and `/completions` where a body is of this API |
//! | [`embedding`] | `POST /embedding`, and `/embeddings` where a body is of this API |
//! | [`tokens`] | `POST /tokenize`, `/detokenize`, `/apply-template` |
//! | [`props`] | `GET /props`, `/slots`, `/lora-adapters` |
//! | [`models`] | `POST /models/load`, `/models/unload` |
//!
//! [`request`], [`prompt`] and [`media`] read requests, [`document`], [`settings`] and [`probabilities`] spell
//! answers, and [`tables`] says of every known field how it is treated. OpenAI's chat completions
//! answer in the form of [`document`] too, under `__verbose`, where a request asks for that.
//!
//! Reranking, saved slots and changes of the server's properties are deliberately absent.

pub(crate) mod completion;
pub(crate) mod document;
pub(crate) mod embedding;
mod media;
pub(crate) mod models;
mod probabilities;
mod prompt;
pub(crate) mod props;
mod request;
mod settings;
pub(crate) mod tables;
pub(crate) mod tokens;

use axum::http::StatusCode;
use serde::Serialize;

use crate::dialect::Dialect;
use crate::errors::ApiError;

/// How llama-server spells what all of its paths share.
pub(crate) const DIALECT: Dialect = Dialect {
    name: "llama-server",
    error: |error, _| self::error(error),
    id_header: None,
};

/// An error's document: `{"error": {code, message, type}}`, whose code is the HTTP status.
fn error(error: &ApiError) -> String {
    #[derive(Serialize)]
    struct Document<'a> {
        error: Inner<'a>,
    }
    #[derive(Serialize)]
    struct Inner<'a> {
        code: u16,
        message: &'a str,
        r#type: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        param: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        n_prompt_tokens: Option<usize>,
        #[serde(skip_serializing_if = "Option::is_none")]
        n_ctx: Option<usize>,
    }
    let kind = match error.status() {
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::SERVICE_UNAVAILABLE => "unavailable_error",
        _ => error.kind,
    };
    let error = Inner {
        code: error.status().as_u16(),
        message: &error.message,
        r#type: kind,
        param: error.param.as_deref(),
        n_prompt_tokens: error
            .overflow
            .as_ref()
            .map(|overflow| overflow.prompt_tokens),
        n_ctx: error.overflow.as_ref().map(|overflow| overflow.context),
    };
    serde_json::to_string(&Document { error }).expect("strings serialize")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn errors_have_llama_server_s_shape() {
        for (error, told) in [
            (
                ApiError::field("top_p", "is odd"),
                json!({"code": 400, "message": "`top_p` is odd", "type": "invalid_request_error", "param": "top_p"}),
            ),
            (
                ApiError::too_long("9 of 8", 9, 8),
                json!({"code": 400, "message": "prompt is too long: 9 of 8", "type": "exceed_context_size_error", "n_prompt_tokens": 9, "n_ctx": 8}),
            ),
            (
                ApiError::no_slot(),
                json!({"code": 503, "message": "no slot is free", "type": "unavailable_error"}),
            ),
        ] {
            let document: Value = serde_json::from_str(&super::error(&error)).unwrap();
            assert_eq!(document["error"], told);
        }
    }
}
