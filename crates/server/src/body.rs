//! From a connection to the bytes of a request's body, within limits.
//!
//! The type is checked before a byte is read, the size while reading. What the bytes
//! say is [`crate::strict`]'s business.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderMap, header};
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::errors::ApiError;
use crate::limits::Limits;

/// Bytes of one permit of the budget for all bodies.
const PERMIT_BYTES: usize = 4 << 10;

/// Memory for the bodies that are being received or wait to be read.
#[derive(Clone, Debug)]
pub(crate) struct Budget(Arc<Semaphore>);

impl Budget {
    pub(crate) fn new(bytes: usize) -> Self {
        let permits = (bytes / PERMIT_BYTES).clamp(1, Semaphore::MAX_PERMITS);
        Budget(Arc::new(Semaphore::new(permits)))
    }
}

/// A body, and the part of the budget that it takes until it is dropped.
#[derive(Debug)]
pub(crate) struct Received {
    /// The bytes of the body.
    pub(crate) bytes: Vec<u8>,
    _permit: OwnedSemaphorePermit,
}

/// Receives a body of at most `limit` bytes that is said to be JSON.
pub(crate) async fn receive(
    headers: &HeaderMap,
    body: Body,
    limit: usize,
    budget: &Budget,
    limits: &Limits,
) -> Result<Received, ApiError> {
    check_type(headers)?;
    let read = read(body, declared_length(headers), limit, budget);
    timeout(limits.body_timeout, read)
        .await
        .map_err(|_| ApiError::slow_body(limits.body_timeout.as_secs()))?
}

/// The type must be JSON. A form or plain text is what a web page can send to
/// any server without asking it first, so nothing else is guessed at. Programs may leave the type
/// out, which a page cannot without its origin.
fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let kind = headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .map(|value| value.split(';').next().unwrap_or_default().trim());
    let is_json = match kind {
        Some(kind) => kind.eq_ignore_ascii_case("application/json"),
        None => {
            !headers.contains_key(header::CONTENT_TYPE) && !headers.contains_key(header::ORIGIN)
        }
    };
    if !is_json {
        return Err(ApiError::media_type(
            "the body must be JSON, with the header `Content-Type: application/json`",
        ));
    }
    match headers.get(header::CONTENT_ENCODING) {
        Some(encoding) if encoding != "identity" => Err(ApiError::media_type(
            "a compressed body is not supported: send no Content-Encoding",
        )),
        _ => Ok(()),
    }
}

fn declared_length(headers: &HeaderMap) -> usize {
    let length = headers.get(header::CONTENT_LENGTH);
    let length = length.and_then(|value| value.to_str().ok()?.parse().ok());
    length.unwrap_or(0)
}

async fn read(
    mut body: Body,
    declared: usize,
    limit: usize,
    budget: &Budget,
) -> Result<Received, ApiError> {
    if declared > limit {
        return Err(ApiError::body_too_large(limit));
    }
    let take = |n: usize| {
        let n = u32::try_from(n).unwrap_or(u32::MAX);
        budget
            .0
            .clone()
            .try_acquire_many_owned(n)
            .map_err(|_| ApiError::busy())
    };
    // Memory is taken as bytes arrive, not as they are announced: announcing
    // costs a client nothing.
    let mut permit = take(1)?;
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| ApiError::request("the request body is incomplete"))?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        if bytes.len() + data.len() > limit {
            return Err(ApiError::body_too_large(limit));
        }
        let wanted = (bytes.len() + data.len()).div_ceil(PERMIT_BYTES);
        if let Some(more) = wanted.checked_sub(permit.num_permits()).filter(|&n| n > 0) {
            permit.merge(take(more)?);
        }
        bytes.extend_from_slice(&data);
    }
    Ok(Received {
        bytes,
        _permit: permit,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bodies_stay_within_limit_and_budget() {
        let limits = Limits::default();
        let budget = Budget::new(64 << 10);
        let json: HeaderMap = [(
            header::CONTENT_TYPE,
            "application/json; charset=utf-8".parse().unwrap(),
        )]
        .into_iter()
        .collect();
        let object = |n: usize| Body::from(format!("{{\"a\":\"{}\"}}", "x".repeat(n)));
        let read = |body, limit| receive(&json, body, limit, &budget, &limits);
        assert!(read(object(100), 200).await.is_ok());
        assert_eq!(read(object(100), 100).await.unwrap_err().status(), 413);
        assert_eq!(
            read(object(100_000), 1 << 20).await.unwrap_err().status(),
            503
        );
        // What a refused body had taken is free again.
        assert!(read(object(60_000), 1 << 20).await.is_ok());
        let bare = HeaderMap::new();
        assert!(
            receive(&bare, object(1), 200, &budget, &limits)
                .await
                .is_ok()
        );
        let mut page = HeaderMap::new();
        page.insert(header::ORIGIN, "http://localhost".parse().unwrap());
        let error = receive(&page, object(1), 200, &budget, &limits).await;
        assert_eq!(error.unwrap_err().status(), 415);
        for (name, value, status) in [
            (header::CONTENT_TYPE, "text/plain", 415),
            (header::CONTENT_TYPE, "", 415),
            (header::CONTENT_ENCODING, "gzip", 415),
            (header::CONTENT_LENGTH, "999999", 413),
        ] {
            let mut headers = json.clone();
            headers.insert(name, value.parse().unwrap());
            let error = receive(&headers, object(1), 200, &budget, &limits).await;
            assert_eq!(error.unwrap_err().status(), status);
        }
    }

    #[tokio::test]
    async fn a_body_that_does_not_arrive_times_out() {
        let limits = Limits {
            body_timeout: std::time::Duration::from_millis(20),
            ..Limits::default()
        };
        let headers: HeaderMap = [(header::CONTENT_TYPE, "application/json".parse().unwrap())]
            .into_iter()
            .collect();
        let never = Body::from_stream(futures_util::stream::pending::<
            Result<Vec<u8>, std::io::Error>,
        >());
        let error = receive(&headers, never, 200, &Budget::new(1 << 20), &limits).await;
        assert_eq!(error.unwrap_err().status(), 408);
    }
}
