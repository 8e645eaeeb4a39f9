//! Routes, and what every request passes on the way to one.
//!
//! ```text
//! request id → Host → origin → key → handler → access log
//! ```
//!
//! A panic of a handler ends as a 500 of that request alone.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::IntoResponse;
use futures_util::FutureExt;
use tracing::Instrument;

use crate::auth::{self, Origin};
use crate::dialect::Dialect;
use crate::errors::{ApiError, Refusal};
use crate::limits::{ECHO_CHARS_MAX, REQUEST_ID_CHARS_MAX};
use crate::routes::{ROUTES, Route};
use crate::server::{Chosen, Server};
use crate::{anthropic, ids, openai, page, paths};

const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Methods that some route knows.
const METHODS: &str = "GET, POST, DELETE, OPTIONS";
/// Seconds a browser may remember a preflight.
const PREFLIGHT_SECONDS: &str = "600";
/// Response headers that pages of other origins may read.
const EXPOSED_HEADERS: &str =
    "x-request-id, x-ignored-fields, x-should-retry, retry-after, retry-after-ms";

/// The dialect of a request: its path's, or the one that its headers speak where several APIs
/// have the path or none has it.
fn dialect(route: Option<&Route>, headers: &HeaderMap) -> &'static Dialect {
    let is_shared = route.is_none_or(|route| route.path.starts_with("/v1/models"));
    match is_shared && anthropic::is_spoken(headers) {
        true => &anthropic::DIALECT,
        false => route.map_or(&openai::DIALECT, |route| route.dialect),
    }
}

/// The router over [every path](ROUTES).
pub(crate) fn router(server: Arc<Server>) -> Router {
    let mut router = Router::new();
    for route in ROUTES {
        for path in paths::spellings(route.path) {
            router = router.route(&path, (route.methods)());
        }
    }
    router
        .fallback(no_route)
        .method_not_allowed_fallback(other_method)
        .layer(middleware::from_fn_with_state(server.clone(), gate))
        .with_state(server)
}

/// The route that axum has matched, under any of its spellings.
fn matched(path: Option<&MatchedPath>) -> Option<&'static Route> {
    let path = path?.as_str();
    let is_spelled = |route: &&Route| paths::spellings(route.path).iter().any(|p| p == path);
    ROUTES.iter().find(is_spelled)
}

/// The paths that a client can use.
fn served() -> Vec<&'static str> {
    let paths = ROUTES.iter().map(|route| route.path);
    paths.filter(|path| !path.contains('{')).collect()
}

/// 404, with the path that was probably meant, or what API is not served.
async fn no_route(State(server): State<Arc<Server>>, request: Request) -> ApiError {
    let path = request.uri().path();
    match paths::foreign(path) {
        Some(name) => ApiError::foreign_route(name, &base_url(&server, request.headers())),
        None => ApiError::no_route(paths::nearest(path, &served()), &served().join(", ")),
    }
}

/// The base URL of this server for OpenAI's clients, under the name that the client has
/// for it.
fn base_url(server: &Server, headers: &HeaderMap) -> String {
    let host = headers
        .get(header::HOST)
        .and_then(|host| host.to_str().ok());
    let is_plain = |host: &&str| {
        host.len() <= ECHO_CHARS_MAX
            && host
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"-.:[]".contains(&b))
    };
    let own = server.local.to_string();
    format!("http://{}/v1", host.filter(is_plain).unwrap_or(&own))
}

/// 405, with the method that the path takes.
async fn other_method(path: MatchedPath, method: Method) -> ApiError {
    let allowed = matched(Some(&path)).map_or("another method", |route| route.method);
    ApiError::method(allowed, method.as_str())
}

/// What every request passes.
async fn gate(
    State(server): State<Arc<Server>>,
    mut request: Request,
    next: Next,
) -> Response<Body> {
    let started = Instant::now();
    let id = request_id(request.headers());
    let route = matched(request.extensions().get::<MatchedPath>());
    let label = route.map_or("unmatched", |r| r.path);
    let dialect = dialect(route, request.headers());
    let method = request.method().clone();
    // At the level of errors, so that no line of a request is ever without its id.
    let span = tracing::error_span!("request", id, %method, route = label);
    let origin = request.headers().get(header::ORIGIN).cloned();
    let chosen = Chosen::default();
    request.extensions_mut().insert(chosen.clone());
    let answer = AssertUnwindSafe(pass(&server, route, request, next)).catch_unwind();
    let (mut response, from) = answer.instrument(span.clone()).await.unwrap_or_else(|_| {
        let only = server.registry.is_single().then_some(0);
        let metrics = chosen
            .get()
            .or(only)
            .and_then(|i| server.registry.metrics(i));
        if let Some(metrics) = metrics {
            metrics.faults.count("panic");
        }
        (ApiError::internal().into_response(), Origin::Same)
    });
    dialect.spell_error(&mut response, &id);
    let headers = response.headers_mut();
    if let Ok(id) = HeaderValue::from_str(&id) {
        if let Some(name) = dialect.id_header {
            headers.insert(HeaderName::from_static(name), id.clone());
        }
        headers.insert(X_REQUEST_ID, id);
    }
    headers.insert(
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    );
    if !server.config.allowed_origins.is_empty() {
        headers.append(header::VARY, HeaderValue::from_static("origin"));
    }
    if let (Origin::Allowed, Some(origin)) = (from, origin) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(
            header::ACCESS_CONTROL_EXPOSE_HEADERS,
            HeaderValue::from_static(EXPOSED_HEADERS),
        );
    }
    let status = response.status().as_u16();
    server.http.count(chosen.get(), label, status);
    let ms = started.elapsed().as_millis();
    span.in_scope(|| match response.extensions().get::<Refusal>() {
        None => tracing::info!(status, ms, "response"),
        Some(Refusal {
            code,
            message: reason,
        }) => {
            tracing::info!(status, ms, code, reason, "response");
        }
    });
    response
}

/// The checks, then the handler.
async fn pass(
    server: &Server,
    route: Option<&Route>,
    request: Request,
    next: Next,
) -> (Response<Body>, Origin) {
    let headers = request.headers();
    if let Err(error) = auth::check_single(headers) {
        return (error.into_response(), Origin::Same);
    }
    let from = auth::check_origin(&server.config, headers);
    // A preflight asks before it shows a key, and the key may make up for the Host.
    if from == Ok(Origin::Allowed) && request.method() == Method::OPTIONS {
        return (preflight(headers), Origin::Allowed);
    }
    // The page's files hold nothing of this server, and its requests bring the key that makes up for
    // the Host: so a person can reach it under any name where there are keys.
    let is_page = route.is_some_and(|route| page::is_asked(route.path, headers));
    let host = match is_page && !server.config.keys.is_empty() {
        true => Ok(()),
        false => auth::check_host(&server.config, server.local, &request),
    };
    let from = match host.and(from) {
        Ok(from) => from,
        Err(error) => return (error.into_response(), Origin::Same),
    };
    let is_public = is_page || route.is_some_and(|route| route.is_public);
    if !is_public && let Err(error) = auth::check_key(&server.config.keys, headers) {
        return (error.into_response(), from);
    }
    (next.run(request).await, from)
}

/// Tells a browser what a page of an allowed origin may send: whatever it asks
/// for, since the origin is trusted as a whole.
fn preflight(headers: &HeaderMap) -> Response<Body> {
    // Not 204: some clients look for 200.
    let mut response = StatusCode::OK.into_response();
    let answer = response.headers_mut();
    if let Some(asked) = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        answer.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, asked.clone());
    }
    answer.insert(
        header::ACCESS_CONTROL_ALLOW_METHODS,
        HeaderValue::from_static(METHODS),
    );
    answer.insert(
        header::ACCESS_CONTROL_MAX_AGE,
        HeaderValue::from_static(PREFLIGHT_SECONDS),
    );
    response
}

/// The client's own id for a request if it is harmless, else a new one. It goes
/// into the log and back to the client, and never finds anything.
fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get(X_REQUEST_ID).and_then(|id| id.to_str().ok());
    let is_plain = |id: &&str| {
        (1..=REQUEST_ID_CHARS_MAX).contains(&id.len())
            && id
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    };
    given
        .filter(is_plain)
        .map_or_else(|| format!("req_{}", ids::unique()), str::to_owned)
}

/// `GET /`: the chat page for browsers, a few lines for programs.
pub(crate) async fn greeting(
    State(server): State<Arc<Server>>,
    headers: HeaderMap,
) -> Response<Body> {
    if page::wants_html(&headers) {
        return page::document(&headers);
    }
    let text = format!(
        "paceline {} serves {}\nOpenAI base URL: {}\npaths: {}\n",
        env!("CARGO_PKG_VERSION"),
        server.registry.names().join(", "),
        base_url(&server, &headers),
        served().join(", ")
    );
    ([(header::VARY, "accept")], text).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::Stage;
    use crate::health;
    use axum::routing::get;

    #[test]
    fn request_ids_are_echoed_only_if_plain() {
        let id = |value: &[u8]| {
            let mut headers = HeaderMap::new();
            headers.insert(X_REQUEST_ID, HeaderValue::from_bytes(value).unwrap());
            request_id(&headers)
        };
        assert_eq!(id(b"abc-1_2.3"), "abc-1_2.3");
        for odd in [
            &b""[..],
            b"a b",
            b"a\xff",
            b"<x>",
            &[b'a'; REQUEST_ID_CHARS_MAX + 1],
        ] {
            assert!(id(odd).starts_with("req_"));
        }
    }

    #[tokio::test]
    async fn a_handler_that_panics_fails_its_own_request_only() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tiny-gemma4");
        let backend = Arc::new(cpu::Cpu::new(cpu::CpuOptions::default()).unwrap());
        let options = engine::LoadOptions {
            context: Some(64),
            ..engine::LoadOptions::default()
        };
        let model = engine::load(backend, &engine::Source::Folder(folder.into()), &options);
        let engine = Arc::new(engine::Engine::start(
            model.unwrap(),
            engine::EngineOptions::default(),
        ));
        let (_stage, watcher) = tokio::sync::watch::channel(Stage::Serving);
        let local = "127.0.0.1:80".parse().unwrap();
        let config = crate::Config::default();
        let models = crate::Models::one(engine, crate::ModelConfig::default());
        let server = Arc::new(Server::new(config, &models, local, watcher));
        let broken = async || -> StatusCode { panic!("on purpose") };
        let mut router = Router::new()
            .route("/broken", get(broken))
            .route("/health", get(health::ready))
            .layer(middleware::from_fn_with_state(server.clone(), gate))
            .with_state(server.clone());
        for (path, status) in [("/broken", 500), ("/health", 200)] {
            let request = Request::get(path).header(header::HOST, "localhost");
            let request = request.body(Body::empty()).unwrap();
            let response = tower_service::Service::call(&mut router, request).await;
            assert_eq!(response.unwrap().status(), status, "{path}");
        }
        let page = health::metrics(State(server)).await.into_body();
        let page = http_body_util::BodyExt::collect(page).await.unwrap();
        let page = String::from_utf8(page.to_bytes().to_vec()).unwrap();
        assert!(page.contains("request_faults_total{model_name=\"tiny-gemma4\",code=\"panic\"} 1"));
    }
}
