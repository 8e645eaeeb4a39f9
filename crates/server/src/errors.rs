//! What a client is told when something goes wrong.
//!
//! Every message is written here or next to the check that fails: it names the
//! cause, the limit and the field, and never shows the inside of a library.

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use axum::response::IntoResponse;
use engine::{GrammarError, Rejected};
use text::TextError;

use crate::limits::{ECHO_CHARS_MAX, LISTED_MODELS_MAX};
use crate::registry::Snapshot;

/// When a refused client is told to come back, where nothing better is known.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// An error, for whichever [`Dialect`](crate::dialect::Dialect) spells it. As a response it has no
/// body until the router, which knows the dialect of the path, writes one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    status: StatusCode,
    /// The class of error, in OpenAI's words.
    pub(crate) kind: &'static str,
    /// The error's own name, where it has one.
    pub(crate) code: Option<&'static str>,
    /// The field that is wrong.
    pub(crate) param: Option<String>,
    /// What is wrong and what to do, for a person.
    pub(crate) message: String,
    /// Whether the same request may succeed later; unset where clients decide
    /// rightly by the status alone.
    should_retry: Option<bool>,
    /// Milliseconds to wait before trying again.
    retry_after_ms: Option<u32>,
    /// What the log says instead of `message`, where that may repeat a prompt.
    logged: Option<&'static str>,
    /// What did not fit, where a prompt did not.
    pub(crate) overflow: Option<Box<Overflow>>,
}

/// A prompt that does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overflow {
    /// Tokens of the prompt, or a lower bound of them.
    pub(crate) prompt_tokens: usize,
    /// Tokens of the context.
    pub(crate) context: usize,
}

/// Why a request was refused, as an extension of the response, for the log.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    /// The error's code, or its kind where it has none.
    pub(crate) code: &'static str,
    /// The error's message, without anything of a prompt.
    pub(crate) message: String,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        ApiError {
            status,
            kind,
            code: None,
            param: None,
            message: message.into(),
            should_retry: None,
            retry_after_ms: None,
            logged: None,
            overflow: None,
        }
    }

    /// This error, with the time after which the client should try again.
    pub(crate) fn retry_after(self, wait: Duration) -> Self {
        Self {
            retry_after_ms: Some(u32::try_from(wait.as_millis()).unwrap_or(u32::MAX)),
            ..self
        }
    }

    /// 400: `param` is unusable.
    pub(crate) fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        let param = param.into();
        let message = format!("`{param}` {}", message.into());
        ApiError {
            param: Some(param),
            ..Self::request(message)
        }
    }

    /// 400: the grammar that the field at `path` asks for cannot be compiled; 503 if others are
    /// being compiled.
    pub(crate) fn grammar(path: String, error: &GrammarError) -> Self {
        match error {
            GrammarError::Busy => ApiError::busy(),
            _ => ApiError::field(path, format!("is refused: {error}")),
        }
    }

    /// 400: the request as a whole is unusable.
    pub(crate) fn request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 400: a field that changes the meaning of a request is not implemented.
    pub(crate) fn unsupported(param: impl Into<String>, neutral: &str) -> Self {
        Self {
            code: Some("unsupported_parameter"),
            ..Self::field(
                param,
                format!("is not supported yet; leave it out{neutral}"),
            )
        }
    }

    /// 400: the prompt, of so many tokens, does not fit the `context`.
    ///
    /// Programs tell that by OpenAI's code, by llama-server's class of error, or by how
    /// Anthropic begins to say so.
    pub(crate) fn too_long(message: &str, prompt_tokens: usize, context: usize) -> Self {
        Self {
            kind: "exceed_context_size_error",
            code: Some("context_length_exceeded"),
            overflow: Some(Box::new(Overflow {
                prompt_tokens,
                context,
            })),
            ..Self::request(format!("prompt is too long: {message}"))
        }
    }

    /// 501: this server deliberately has no such thing.
    pub(crate) fn not_here(message: &str) -> Self {
        Self {
            should_retry: Some(false),
            ..Self::new(StatusCode::NOT_IMPLEMENTED, "not_supported_error", message)
        }
    }

    /// 503: every slot is taken.
    pub(crate) fn no_slot() -> Self {
        Self {
            code: Some("no_slot_available"),
            should_retry: Some(true),
            ..Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "unavailable_error",
                "no slot is free",
            )
        }
    }

    /// 401.
    pub(crate) fn unauthorized() -> Self {
        Self {
            code: Some("invalid_api_key"),
            ..Self::new(
                StatusCode::UNAUTHORIZED,
                "authentication_error",
                "the API key is missing or wrong; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
            )
        }
    }

    /// 403: the Host header names somebody else. With a key any name will do.
    pub(crate) fn host(name: &str, has_keys: bool) -> Self {
        let name = quotable(name);
        let key = if has_keys {
            ", or send a valid API key"
        } else {
            ""
        };
        Self::forbidden(
            "host_not_allowed",
            format!(
                "this server does not answer to the host name `{name}`; start it with `--allow-host {name}`{key}"
            ),
        )
    }

    /// 403: the Host header is missing or names no host.
    pub(crate) fn malformed_host() -> Self {
        Self::forbidden(
            "host_not_allowed",
            "the Host header must be a host name or an address, with or without a port",
        )
    }

    /// 403: a page of another origin asks.
    pub(crate) fn origin(origin: &str) -> Self {
        let origin = quotable(origin);
        Self::forbidden(
            "origin_not_allowed",
            format!(
                "web pages of `{origin}` may not use this server; start it with `--allow-origin {origin}`"
            ),
        )
    }

    fn forbidden(code: &'static str, message: impl Into<String>) -> Self {
        Self {
            code: Some(code),
            ..Self::new(StatusCode::FORBIDDEN, "permission_error", message)
        }
    }

    /// 404: no such path; `routes` are those there are, and `meant` the nearest.
    pub(crate) fn no_route(meant: Option<&str>, routes: &str) -> Self {
        let hint = match meant {
            Some(meant) => format!("did you mean {meant}? All paths: {routes}"),
            None => format!("all paths: {routes}"),
        };
        Self::not_found(format!("there is nothing at this path; {hint}"))
    }

    /// 404: a path of another API, `name`; the one that is served is at `base`.
    pub(crate) fn foreign_route(name: &str, base: &str) -> Self {
        Self::not_found(format!(
            "{name} is not supported yet; use OpenAI's chat completions, with the base URL {base}"
        ))
    }

    fn not_found(message: String) -> Self {
        Self {
            code: Some("not_found"),
            ..Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
        }
    }

    /// 404: a conversation that the server was to keep.
    pub(crate) fn no_thread(param: &str) -> Self {
        Self {
            code: Some("thread_not_found"),
            param: Some(param.to_owned()),
            ..Self::not_found(format!(
                "`{param}` goes on from a conversation, and none is kept here; send all of its messages"
            ))
        }
    }

    /// 404: no such model; `served` are those there are.
    pub(crate) fn no_model(asked: &str, served: &[&str]) -> Self {
        Self {
            code: Some("model_not_found"),
            param: Some("model".into()),
            ..Self::new(
                StatusCode::NOT_FOUND,
                "invalid_request_error",
                format!(
                    "the model `{}` is not served here; use {}",
                    excerpt(asked),
                    listed(served)
                ),
            )
        }
    }

    /// 400: no model is named, and there are several: `served`.
    pub(crate) fn model_missing(served: &[&str]) -> Self {
        Self {
            code: Some("model_missing"),
            ..Self::field("model", format!("is missing; use {}", listed(served)))
        }
    }

    /// 503: the only model is being loaded.
    pub(crate) fn loading(progress: &Snapshot) -> Self {
        Self {
            code: Some("model_loading"),
            should_retry: Some(true),
            ..Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "unavailable_error",
                "Loading model",
            )
        }
        .retry_after(progress.rest())
    }

    /// 500: the model could not be loaded. Another request tries again.
    pub(crate) fn not_loaded(name: &str) -> Self {
        Self {
            code: Some("model_load_failed"),
            should_retry: Some(false),
            ..Self::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "server_error",
                format!(
                    "the model `{}` could not be loaded; the server's log says why",
                    excerpt(name)
                ),
            )
        }
    }

    /// The response `asked` is not kept, or `missing` is not, which it goes on from: 400 if `param` is
    /// the field that names it, 404 if the path does.
    pub(crate) fn no_response(param: Option<&str>, asked: &str, missing: &str) -> Self {
        let (asked, missing) = (excerpt(asked), excerpt(missing));
        let which = match asked == missing {
            true => format!("`{asked}`"),
            false => format!("`{missing}`, which `{asked}` goes on from"),
        };
        let (status, code, instead) = match param {
            Some(_) => (
                StatusCode::BAD_REQUEST,
                "previous_response_not_found",
                "; send the whole conversation as `input`",
            ),
            None => (StatusCode::NOT_FOUND, "response_not_found", ""),
        };
        Self {
            code: Some(code),
            param: param.map(str::to_owned),
            ..Self::new(
                status,
                "invalid_request_error",
                format!(
                    "no such response is kept: it was never stored, was deleted, or made room for newer ones{instead}: {which}"
                ),
            )
        }
    }

    /// 400: a WebSocket has been open for as long as it may.
    pub(crate) fn socket_expired() -> Self {
        Self {
            code: Some("websocket_connection_limit_reached"),
            ..Self::request(
                "the connection has been open for as long as it may; open a new one and send the whole conversation as `input`",
            )
        }
    }

    /// 404: no response that is kept has the item `id`, which `param` names.
    pub(crate) fn no_item(param: String, id: &str) -> Self {
        Self {
            code: Some("item_not_found"),
            param: Some(param),
            ..Self::new(
                StatusCode::NOT_FOUND,
                "invalid_request_error",
                format!(
                    "no response that is kept has this item; send the item itself: `{}`",
                    excerpt(id)
                ),
            )
        }
    }

    /// 405: the path is served, but not with the method `used`.
    pub(crate) fn method(allowed: &str, used: &str) -> Self {
        Self {
            code: Some("method_not_allowed"),
            ..Self::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "invalid_request_error",
                format!("use {allowed} here, not {}", excerpt(used)),
            )
        }
    }

    /// 408: the body did not arrive in time.
    pub(crate) fn slow_body(seconds: u64) -> Self {
        Self {
            should_retry: Some(false),
            ..Self::new(
                StatusCode::REQUEST_TIMEOUT,
                "invalid_request_error",
                format!("the request body did not arrive within {seconds} seconds"),
            )
        }
    }

    /// 413.
    pub(crate) fn body_too_large(limit: usize) -> Self {
        Self {
            code: Some("body_too_large"),
            ..Self::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                "invalid_request_error",
                format!("the request body is larger than the limit of {limit} bytes"),
            )
        }
    }

    /// 415.
    pub(crate) fn media_type(message: &'static str) -> Self {
        Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "invalid_request_error",
            message,
        )
    }

    /// 503: too many bodies are being read.
    pub(crate) fn busy() -> Self {
        Self {
            code: Some("overloaded"),
            should_retry: Some(true),
            ..Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "server_error",
                "the server is busy reading other large requests; try again",
            )
        }
    }

    /// 503: the server is going away.
    pub(crate) fn shutting_down() -> Self {
        Self {
            code: Some("shutting_down"),
            should_retry: Some(true),
            ..Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "server_error",
                "the server is shutting down",
            )
        }
    }

    /// 504: the request took longer than it may.
    pub(crate) fn timed_out(after: Duration) -> Self {
        Self {
            code: Some("request_timeout"),
            // A retry would run into the same limit after the same work.
            should_retry: Some(false),
            ..Self::new(
                StatusCode::GATEWAY_TIMEOUT,
                "server_error",
                format!(
                    "the request took longer than {} seconds and was stopped",
                    after.as_secs_f64()
                ),
            )
        }
    }

    /// The client reads slower than the model writes.
    pub(crate) fn slow_reader(limit: usize) -> Self {
        Self {
            code: Some("slow_reader"),
            ..Self::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "server_error",
                format!(
                    "the client reads too slowly: more than {limit} bytes of text were waiting to be read"
                ),
            )
        }
    }

    /// 500: our fault; the log says more.
    pub(crate) fn internal() -> Self {
        Self {
            code: Some("internal_error"),
            ..Self::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "server_error",
                "the server failed on this request; see its log for the reason",
            )
        }
    }

    /// 500: the model computed NaN or infinities for this request.
    pub(crate) fn no_number() -> Self {
        Self {
            code: Some("model_failed"),
            should_retry: Some(false),
            ..Self::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "server_error",
                engine::NO_TOKEN_REASON,
            )
        }
    }

    /// The HTTP status it is sent with, where the response has not begun.
    pub(crate) fn status(&self) -> StatusCode {
        self.status
    }

    /// A short name for logs and metrics.
    pub(crate) fn label(&self) -> &'static str {
        self.code.unwrap_or(self.kind)
    }
}

/// The names of models, for a message.
fn listed(names: &[&str]) -> String {
    let (shown, rest) = names.split_at(names.len().min(LISTED_MODELS_MAX));
    let shown: Vec<String> = shown.iter().map(|name| format!("`{name}`")).collect();
    match (&shown[..], rest.len()) {
        ([only], 0) => only.clone(),
        ([first @ .., last], 0) => format!("{} or {last}", first.join(", ")),
        (_, n) => format!("{} or one of {n} others", shown.join(", ")),
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response<Body> {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = self.status;
        response.extensions_mut().insert(Refusal {
            code: self.label(),
            message: match self.logged {
                Some(logged) => logged.to_owned(),
                None => self.message.clone(),
            },
        });
        let headers = response.headers_mut();
        let mut set = |name, value| headers.insert(name, HeaderValue::from_static(value));
        set(header::CONTENT_TYPE, "application/json");
        if self.status == StatusCode::UNAUTHORIZED {
            set(header::WWW_AUTHENTICATE, "Bearer");
        }
        let retry = header::HeaderName::from_static("x-should-retry");
        match self.should_retry {
            Some(true) => {
                set(retry, "true");
                let wait = self.retry_after_ms.map(u64::from);
                let wait = wait.map_or(RETRY_AFTER, Duration::from_millis);
                // SDKs know both; whole seconds alone would bring all back together.
                let millis = header::HeaderName::from_static("retry-after-ms");
                let seconds = wait.as_secs_f64().ceil() as u64;
                headers.insert(header::RETRY_AFTER, seconds.into());
                headers.insert(millis, (wait.as_millis() as u64).into());
            }
            Some(false) => {
                set(retry, "false");
            }
            None => {}
        }
        response.extensions_mut().insert(self);
        response
    }
}

impl From<Rejected> for ApiError {
    fn from(rejected: Rejected) -> Self {
        match rejected {
            Rejected::EmptyPrompt => Self::request("the prompt is empty"),
            Rejected::PromptTooLong {
                tokens,
                context,
                context_max,
            } => {
                let longer = crate::longer_context(context, context_max);
                Self::too_long(&format!("{rejected}{longer}"), tokens, context)
            }
            Rejected::BadToken { .. } => Self::request(rejected.to_string()),
            Rejected::NoMedia(..) => Self::request(rejected.to_string()),
            Rejected::BadParameter(message) => Self::request(message),
            Rejected::QueueFull { waiting } => Self {
                code: Some("queue_full"),
                should_retry: Some(true),
                ..Self::new(
                    StatusCode::TOO_MANY_REQUESTS,
                    "rate_limit_error",
                    format!(
                        "the queue is full: {waiting} requests are waiting; try again (the server's --queue sets its length)"
                    ),
                )
            },
            _ => {
                tracing::error!(error = %rejected, "request rejected");
                Self::internal()
            }
        }
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        match &error {
            TextError::NoTemplate => Self {
                code: Some("no_chat_template"),
                ..Self::request("the model has no chat template; use /v1/completions")
            },
            TextError::TooManyTokens { at_least, limit } => {
                Self::too_long(&error.to_string(), *at_least, *limit)
            }
            // Conversations differ in what they ask of a template, so these
            // are the request's doing more often than the checkpoint's.
            TextError::OutOfFuel { .. } => Self::request(error.to_string()),
            TextError::Template { line, reason } => {
                tracing::warn!(line, reason, "chat template failed");
                Self::request(format!(
                    "the chat template failed at line {line}; the server's log has the reason"
                ))
            }
            TextError::Encode { reason } => {
                tracing::warn!(reason, "tokenizer failed");
                Self::request("the tokenizer failed on this text")
            }
            // The template's words may repeat the conversation's.
            TextError::Refused { message } => Self {
                logged: Some("the chat template refused the messages"),
                ..Self::request(format!(
                    "the chat template refused the messages: {}",
                    excerpt(message)
                ))
            },
            TextError::BadMessage { index, reason } => Self::field(
                format!("messages[{index}]"),
                format!("cannot be used: {reason}"),
            ),
            TextError::ReservedArgument { name } => Self::field(
                "chat_template_kwargs",
                format!(
                    "has `{}`, which the server sets itself; leave that out",
                    excerpt(name)
                ),
            ),
            _ if error.is_callers_fault() => Self::request(error.to_string()),
            _ => {
                tracing::error!(error = %error, "text work failed");
                Self::internal()
            }
        }
    }
}

/// The beginning of something that a client wrote, for a message to it.
pub(crate) fn excerpt(text: &str) -> String {
    text.chars()
        .take(ECHO_CHARS_MAX)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

/// The name of a host or an origin, if it can stand in a command line as it is.
fn quotable(name: &str) -> &str {
    let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"-._:/[]".contains(&b);
    if (1..=ECHO_CHARS_MAX).contains(&name.len()) && name.bytes().all(is_plain) {
        name
    } else {
        "NAME"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_that_pass_say_when_to_come_back() {
        let full = ApiError::from(Rejected::QueueFull { waiting: 64 }).into_response();
        assert_eq!(full.status(), 429);
        assert_eq!(full.headers()["retry-after"], "1");
        assert_eq!(full.headers()["retry-after-ms"], "1000");
        let later = ApiError::busy().retry_after(Duration::from_millis(2250));
        let later = later.into_response();
        assert_eq!(later.headers()["retry-after"], "3");
        assert_eq!(later.headers()["retry-after-ms"], "2250");
        assert_eq!(full.headers()["x-should-retry"], "true");
        let late = ApiError::timed_out(Duration::from_secs(1)).into_response();
        assert_eq!(late.headers()["x-should-retry"], "false");
    }

    #[test]
    fn counts_reach_the_client_and_library_words_do_not() {
        let long = ApiError::from(Rejected::PromptTooLong {
            tokens: 9,
            context: 8,
            context_max: 8,
        });
        assert_eq!(long.code, Some("context_length_exceeded"));
        assert!(long.message.contains('9') && long.message.contains('8'));
        let template = TextError::Template {
            line: 3,
            reason: "secret".into(),
        };
        assert!(!ApiError::from(template).message.contains("secret"));
    }
}
