//! What monitoring asks: `/health`, its two halves, and `/metrics`.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::body::Body;
use axum::extract::State;
use axum::http::{Response, StatusCode, header};
use axum::response::IntoResponse;

use crate::App;
use crate::connection::Stage;

/// `GET /health/live`: 200 unless the engine is lost, which only a new start mends.
pub(crate) async fn live(State(app): State<Arc<App>>) -> Response<Body> {
    match app.metrics.engine_lost.load(Ordering::Relaxed) {
        true => status(StatusCode::SERVICE_UNAVAILABLE, r#"{"status":"failed"}"#),
        false => status(StatusCode::OK, r#"{"status":"ok"}"#),
    }
}

/// `GET /health` and `GET /health/ready`: 200 while requests are taken.
pub(crate) async fn ready(State(app): State<Arc<App>>) -> Response<Body> {
    if app.metrics.engine_lost.load(Ordering::Relaxed) {
        status(StatusCode::SERVICE_UNAVAILABLE, r#"{"status":"failed"}"#)
    } else if *app.stage.borrow() > Stage::Serving {
        status(StatusCode::SERVICE_UNAVAILABLE, r#"{"status":"draining"}"#)
    } else {
        status(StatusCode::OK, r#"{"status":"ok"}"#)
    }
}

/// A small JSON document about the server.
fn status(status: StatusCode, body: &'static str) -> Response<Body> {
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// `GET /metrics`.
pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Response<Body> {
    let info = app.engine.info();
    let positions = if info.drafter.is_some() {
        info.draft_max
    } else {
        0
    };
    let page = app
        .metrics
        .render(app.engine.counters(), app.model(), positions);
    (
        [(
            header::CONTENT_TYPE,
            "text/plain; version=0.0.4; charset=utf-8",
        )],
        page,
    )
        .into_response()
}
