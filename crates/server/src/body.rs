//! From the bytes of a request to its JSON, within limits.
//!
//! The type is checked before a byte is read, the size while reading, depth and
//! number of values before parsing: each check bounds what the next one costs.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderMap, header};
use http_body_util::BodyExt;
use serde_json::{Map, Value};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::errors::ApiError;
use crate::limits::{JSON_DEPTH_MAX, JSON_VALUES_MAX, Limits};

/// Bytes of one permit of the budget for all bodies.
const PERMIT_BYTES: usize = 4 << 10;

/// Memory for the bodies that are being read.
#[derive(Clone, Debug)]
pub(crate) struct Budget(Arc<Semaphore>);

impl Budget {
    pub(crate) fn new(bytes: usize) -> Self {
        let permits = (bytes / PERMIT_BYTES).clamp(1, Semaphore::MAX_PERMITS);
        Budget(Arc::new(Semaphore::new(permits)))
    }
}

/// Reads a JSON object of at most `limit` bytes.
pub(crate) async fn read_object(
    headers: &HeaderMap,
    body: Body,
    limit: usize,
    budget: &Budget,
    limits: &Limits,
) -> Result<Map<String, Value>, ApiError> {
    check_type(headers)?;
    let read = read(body, declared_length(headers), limit, budget);
    let (bytes, _permit) = timeout(limits.body_timeout, read)
        .await
        .map_err(|_| ApiError::slow_body(limits.body_timeout.as_secs()))??;
    parse_object(&bytes)
}

/// The type must be JSON. A form or plain text is what a web page can send to
/// any server without asking it first, so nothing else is guessed at.
fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let kind = headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .map(|value| value.split(';').next().unwrap_or_default().trim());
    let is_json = kind.is_some_and(|kind| kind.eq_ignore_ascii_case("application/json"));
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
) -> Result<(Vec<u8>, OwnedSemaphorePermit), ApiError> {
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
    Ok((bytes, permit))
}

fn parse_object(bytes: &[u8]) -> Result<Map<String, Value>, ApiError> {
    check_shape(bytes)?;
    let value: Value = serde_json::from_slice(bytes).map_err(|error| {
        ApiError::request(format!(
            "the body is not valid JSON (line {}, column {})",
            error.line(),
            error.column()
        ))
    })?;
    match value {
        Value::Object(map) => Ok(map),
        _ => Err(ApiError::request("the body must be a JSON object")),
    }
}

/// Bounds nesting and number of values, whether or not the rest is JSON.
fn check_shape(bytes: &[u8]) -> Result<(), ApiError> {
    let (mut depth, mut n_values) = (0_usize, 1_usize);
    let (mut in_string, mut escaped) = (false, false);
    for &byte in bytes {
        if in_string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'[' | b'{' => {
                depth += 1;
                n_values += 1;
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            b',' => n_values += 1,
            _ => {}
        }
        if depth > JSON_DEPTH_MAX {
            return Err(ApiError::request(format!(
                "the body nests deeper than {JSON_DEPTH_MAX} levels"
            )));
        }
        if n_values > JSON_VALUES_MAX {
            return Err(ApiError::request(format!(
                "the body has more than {JSON_VALUES_MAX} values"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depth_and_values_are_bounded_and_strings_do_not_count() {
        let nested = |n| format!("{{\"a\": {}{}}}", "[".repeat(n - 1), "]".repeat(n - 1));
        assert!(parse_object(nested(JSON_DEPTH_MAX).as_bytes()).is_ok());
        assert!(parse_object(nested(JSON_DEPTH_MAX + 1).as_bytes()).is_err());
        assert!(check_shape(&[b'['; 1 << 20]).is_err());
        let many = format!("{{\"a\": [0{}]}}", ",0".repeat(JSON_VALUES_MAX));
        assert!(parse_object(many.as_bytes()).is_err());
        let text = format!("{{\"a\": \"{}\\\"[[\"}}", "[{,".repeat(JSON_VALUES_MAX));
        assert!(parse_object(text.as_bytes()).is_ok());
    }

    #[test]
    fn anything_but_an_object_is_refused() {
        for bad in [
            "",
            "[]",
            "1",
            "null",
            "{",
            "{}{}",
            "{\"a\":\"\\ud800\"}",
            "\u{feff}{}",
            "{'a':1}",
        ] {
            assert!(parse_object(bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(parse_object(b"{\"a\":\"\xff\"}").is_err());
        assert!(parse_object(b" {} ").is_ok());
    }

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
        let read = |body, limit| read_object(&json, body, limit, &budget, &limits);
        assert!(read(object(100), 200).await.is_ok());
        assert_eq!(read(object(100), 100).await.unwrap_err().status(), 413);
        assert_eq!(
            read(object(100_000), 1 << 20).await.unwrap_err().status(),
            503
        );
        // What a refused body had taken is free again.
        assert!(read(object(60_000), 1 << 20).await.is_ok());
        for (name, value, status) in [
            (header::CONTENT_TYPE, "text/plain", 415),
            (header::CONTENT_ENCODING, "gzip", 415),
            (header::CONTENT_LENGTH, "999999", 413),
        ] {
            let mut headers = json.clone();
            headers.insert(name, value.parse().unwrap());
            let error = read_object(&headers, object(1), 200, &budget, &limits).await;
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
        let error = read_object(&headers, never, 200, &Budget::new(1 << 20), &limits).await;
        assert_eq!(error.unwrap_err().status(), 408);
    }
}
