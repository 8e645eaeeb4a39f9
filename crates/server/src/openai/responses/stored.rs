//! The paths of responses that are kept.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, RawQuery, State};
use axum::http::{HeaderMap, Response};
use serde_json::json;

use super::store::Stored;
use crate::auth;
use crate::dialect;
use crate::errors::{ApiError, excerpt};
use crate::openai::bytes;
use crate::server::Server;

/// Items of one page, where the query does not say how many, and at most.
const PAGE: usize = 20;
const PAGE_MAX: usize = 100;

type Id = Result<Path<String>, PathRejection>;

/// `GET /v1/responses/{id}`: the response as it was answered.
pub(crate) async fn get(
    State(server): State<Arc<Server>>,
    id: Id,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Result<Response<Body>, ApiError> {
    let stored = find(&server, id, &headers)?;
    let query = query.unwrap_or_default();
    if pairs(&query).any(|pair| pair == ("stream", "true")) {
        return Err(ApiError::unsupported("stream", ""));
    }
    Ok(dialect::json(stored.document.clone().into_bytes()))
}

/// `DELETE /v1/responses/{id}`: forgets a response.
pub(crate) async fn delete(
    State(server): State<Arc<Server>>,
    id: Id,
    headers: HeaderMap,
) -> Result<Response<Body>, ApiError> {
    let stored = find(&server, id, &headers)?;
    server.responses.forget(&stored.id, stored.caller);
    let document = json!({"id": stored.id, "object": "response", "deleted": true});
    Ok(dialect::json(bytes(&document)))
}

/// `GET /v1/responses/{id}/input_items`: the items of a response's own input, the newest first
/// unless the query says `order=asc`, from the one behind `after`, `limit` at most.
pub(crate) async fn input_items(
    State(server): State<Arc<Server>>,
    id: Id,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Result<Response<Body>, ApiError> {
    let stored = find(&server, id, &headers)?;
    let query = query.unwrap_or_default();
    let (mut limit, mut is_ascending, mut after) = (PAGE, false, None);
    for (name, value) in pairs(&query) {
        match name {
            "limit" => {
                let number = value.parse().ok().filter(|n| (1..=PAGE_MAX).contains(n));
                limit = number.ok_or_else(|| {
                    ApiError::field(name, format!("must be a whole number from 1 to {PAGE_MAX}"))
                })?;
            }
            "order" => {
                is_ascending = match value {
                    "asc" => true,
                    "desc" => false,
                    _ => return Err(ApiError::field(name, "must be asc or desc")),
                }
            }
            "after" => after = Some(value),
            _ => {}
        }
    }
    let mut items: Vec<_> = stored.input.iter().collect();
    if !is_ascending {
        items.reverse();
    }
    let id_of = |place: usize| items.get(place).and_then(|item| item["id"].as_str());
    let first = match after {
        None => 0,
        Some(after) => match (0..items.len()).find(|&place| id_of(place) == Some(after)) {
            Some(place) => place + 1,
            None => return Err(ApiError::no_item("after".to_owned(), after)),
        },
    };
    let end = items.len().min(first + limit);
    let document = json!({
        "object": "list",
        "data": items[first..end],
        "first_id": id_of(first).filter(|_| first < end),
        "last_id": end.checked_sub(1).filter(|_| first < end).and_then(id_of),
        "has_more": end < items.len(),
    });
    Ok(dialect::json(bytes(&document)))
}

/// `POST /v1/responses/{id}/cancel`: a 400, since nothing runs in the background.
pub(crate) async fn cancel(
    State(server): State<Arc<Server>>,
    id: Id,
    headers: HeaderMap,
) -> Result<Response<Body>, ApiError> {
    let stored = find(&server, id, &headers)?;
    Err(ApiError::request(format!(
        "only a response in the background can be cancelled; close the connection to end one that is being written: `{}`",
        stored.id
    )))
}

/// The response that a path names.
fn find(server: &Server, id: Id, headers: &HeaderMap) -> Result<Arc<Stored>, ApiError> {
    let Path(id) = id.map_err(|_| ApiError::request("the path is not UTF-8"))?;
    let caller = auth::caller(&server.config.keys, headers);
    let found = server.responses.get(&id, caller);
    found.ok_or_else(|| ApiError::no_response(None, &excerpt(&id), &id))
}

/// The names and values of a query; ids and numbers have nothing to decode.
fn pairs(query: &str) -> impl Iterator<Item = (&str, &str)> {
    query.split('&').filter_map(|pair| pair.split_once('='))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_is_read_by_name() {
        let all: Vec<_> = pairs("a=1&b&c=x=y&").collect();
        assert_eq!(all, [("a", "1"), ("c", "x=y")]);
        assert_eq!(pairs("").count(), 0);
    }
}
