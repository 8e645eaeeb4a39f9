//! Anthropic's Messages API.
//!
//! | file | what |
//! | --- | --- |
//! | [`answer`] | `POST /v1/messages`: the answer, whole and as a stream |
//! | [`count`] | `POST /v1/messages/count_tokens` |
//! | [`models`] | `GET /v1/models`, `GET /v1/models/{id}` for clients of this API |
//! | [`request`] | a request, but for what has a file of its own |
//! | [`turns`] | `system` and `messages` of a request |
//! | [`tools`] | `tools` and `tool_choice` of a request |
//! | [`tables`] | how every known field is treated |
//!
//! Prompt caching needs no `cache_control` here: every prompt is looked for in the cache. Message
//! batches, files and the tools that Anthropic's own servers run are deliberately absent.

pub(crate) mod answer;
pub(crate) mod count;
pub(crate) mod models;
mod request;
pub(crate) mod tables;
mod tools;
mod turns;

use axum::http::{HeaderMap, StatusCode};
use serde::Serialize;

use crate::dialect::Dialect;
use crate::errors::ApiError;

/// How Anthropic's API spells what all of its paths share.
pub(crate) const DIALECT: Dialect = Dialect {
    name: "Anthropic",
    error: |error, id| {
        let document = ErrorDocument::new(error, Some(id));
        serde_json::to_string(&document).expect("strings serialize")
    },
    id_header: Some("request-id"),
};

/// The header that every client of Anthropic's API sends, and no other.
const VERSION: &str = "anthropic-version";

/// Codes of errors upon which libraries send another request of their own accord: the whole
/// conversation, where they wanted the server to keep it.
const DETAILED: &[&str] = &["thread_not_found"];

/// Whether the client of a request with these headers speaks Anthropic's API.
pub(crate) fn is_spoken(headers: &HeaderMap) -> bool {
    headers.contains_key(VERSION)
}

/// An error's document: `{"type": "error", "error": {type, message}, "request_id"}`. As the event
/// of a stream it has no id, which the response's header has told.
#[derive(Debug, Serialize)]
struct ErrorDocument {
    r#type: &'static str,
    error: ErrorBody,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<String>,
}

/// What is wrong, in Anthropic's words.
#[derive(Debug, Serialize)]
struct ErrorBody {
    r#type: &'static str,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    details: Option<Details>,
}

/// What programs go by, for the errors that they can do something about.
#[derive(Debug, Serialize)]
struct Details {
    error_code: &'static str,
}

impl ErrorDocument {
    fn new(error: &ApiError, id: Option<&str>) -> Self {
        ErrorDocument {
            r#type: "error",
            error: ErrorBody {
                r#type: kind(error.status()),
                message: error.message.clone(),
                details: error
                    .code
                    .filter(|code| DETAILED.contains(code))
                    .map(|error_code| Details { error_code }),
            },
            request_id: id.map(str::to_owned),
        }
    }
}

/// Anthropic's name for the errors of a status.
fn kind(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        StatusCode::REQUEST_TIMEOUT | StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn errors_have_anthropic_s_shape_and_names() {
        let spell = |error: &ApiError| -> Value {
            serde_json::from_str(&(DIALECT.error)(error, "req_1")).unwrap()
        };
        assert_eq!(
            spell(&ApiError::field("top_p", "is odd")),
            json!({"type": "error", "error": {"type": "invalid_request_error", "message": "`top_p` is odd"}, "request_id": "req_1"})
        );
        for (error, kind) in [
            (ApiError::unauthorized(), "authentication_error"),
            (ApiError::malformed_host(), "permission_error"),
            (ApiError::no_model("a", &["b"]), "not_found_error"),
            (ApiError::method("POST", "GET"), "invalid_request_error"),
            (ApiError::slow_body(1), "timeout_error"),
            (ApiError::body_too_large(1), "request_too_large"),
            (ApiError::media_type("odd"), "invalid_request_error"),
            (
                engine::Rejected::QueueFull { waiting: 1 }.into(),
                "rate_limit_error",
            ),
            (ApiError::internal(), "api_error"),
            (ApiError::busy(), "overloaded_error"),
            (
                ApiError::timed_out(std::time::Duration::from_secs(1)),
                "timeout_error",
            ),
        ] {
            assert_eq!(spell(&error)["error"]["type"], kind);
        }
        assert_eq!(
            spell(&ApiError::no_thread("thread"))["error"]["details"],
            json!({"error_code": "thread_not_found"})
        );
        let long = spell(&ApiError::too_long("9 of 8", 9, 8));
        assert_eq!(long["error"]["message"], "prompt is too long: 9 of 8");
    }
}
