//! `GET /v1/models`: what is served, and how.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, Response};
use engine::{SAMPLER_NUMBERS, Sampling};
use serde_json::{Value, json};

use super::tables;
use crate::App;
use crate::anthropic;
use crate::dialect;
use crate::errors::ApiError;
use crate::table::Entry;

/// Lists the one model, in the form of the API that the client speaks.
pub(crate) async fn list(State(app): State<Arc<App>>, headers: HeaderMap) -> Response<Body> {
    if anthropic::is_spoken(&headers) {
        return document(&anthropic::models::list(&app));
    }
    let name = app.model();
    // llama-server's clients look for capabilities in a list of its own.
    let capabilities: &[&str] = match app.engine.senses().is_some() {
        true => &["completion", "multimodal"],
        false => &["completion"],
    };
    let models = [json!({"name": name, "model": name, "capabilities": capabilities})];
    document(&json!({"object": "list", "data": [model(&app)], "models": models}))
}

/// Describes the model, for any of its names.
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response<Body>, ApiError> {
    let Path(id) = id.map_err(|_| ApiError::request("the path is not UTF-8"))?;
    let id = id.strip_suffix('/').unwrap_or(&id);
    if app.names.iter().all(|name| name != id) {
        return Err(ApiError::no_model(id, app.model()));
    }
    Ok(document(&match anthropic::is_spoken(&headers) {
        true => anthropic::models::model(&app),
        false => model(&app),
    }))
}

fn document(document: &Value) -> Response<Body> {
    dialect::json(super::bytes(document))
}

fn model(app: &App) -> Value {
    let info = app.engine.info();
    json!({
        "id": app.model(),
        "aliases": app.names[1..],
        "object": "model",
        "created": app.started,
        "owned_by": "paceline",
        "max_model_len": info.context,
        "meta": {
            "n_ctx": info.context,
            "n_vocab": info.vocab_size,
            "size": info.weight_bytes,
            "family": info.family,
            "backend": info.backend,
            "sequences": info.sequences,
            "kv_format": info.kv_format,
            "memory_bytes": info.memory_bytes,
            "has_chat_template": app.engine.text().template.is_some(),
            "pictures": {
                "taken": info.vision.is_some(),
                "reason": info.vision_reason,
                "rows_max": info.vision.as_ref().map(|vision| vision.rows_max),
            },
            "video": {
                "taken": info.vision.is_some(),
                "frames_max": info.vision.as_ref().map(|vision| vision.frames_max),
            },
            "sounds": {
                "taken": info.hearing.is_some(),
                "reason": info.hearing_reason,
                "rows_max": info.hearing.as_ref().map(|hearing| hearing.rows_max),
                "seconds_max": info.hearing.as_ref().map(|hearing| hearing.seconds_max),
            },
            "options": options(app),
            "speculation": {
                "drafter": info.drafter,
                "reason": info.drafter_reason,
                "draft_max": info.draft_max,
                "draft_vocab": info.draft_vocab,
                "accept": info.accept,
            },
            "preflight": info.preflight,
            "unused_tensors": info.unused_tensors,
        },
    })
}

/// A whole number, or a number that is not one of the sampler's table, among a request's options.
struct Other {
    name: &'static str,
    is_whole: bool,
    low: i64,
    high: Option<i64>,
}

const fn whole(name: &'static str, low: i64, high: Option<i64>) -> Other {
    Other {
        name,
        is_whole: true,
        low,
        high,
    }
}

/// The options that are numbers, beside those of [`SAMPLER_NUMBERS`] and without other names of
/// these.
const OTHERS: &[Other] = &[
    whole("top_k", -1, None),
    whole("max_tokens", -1, None),
    whole("min_tokens", 0, None),
    whole("seed", 0, None),
    whole("repeat_last_n", -1, None),
    whole("dry_allowed_length", 0, None),
    whole("dry_penalty_last_n", -1, None),
    whole("mirostat", 0, Some(2)),
    Other {
        is_whole: false,
        ..whole("mirostat_tau", 0, Some(100))
    },
    Other {
        is_whole: false,
        ..whole("mirostat_eta", 0, Some(100))
    },
];

/// The numbers that a request may set, with what they may be and what silence means; what depends
/// on more than the model has no default.
fn options(app: &App) -> Value {
    let advice = &app.engine.text().sampling;
    let own = Sampling::default();
    let numbers = SAMPLER_NUMBERS.iter().map(|number| {
        let usual = (number.advised)(advice).unwrap_or_else(|| (number.get)(&own));
        // As it would be written, and not as the nearest number of twice the digits.
        let usual: f64 = usual
            .to_string()
            .parse()
            .expect("a number as it is written");
        json!({
            "name": number.name,
            "type": "number",
            "low": number.range.start(),
            "high": number.range.end(),
            "default": usual,
            "about": number.about,
        })
    });
    let others = OTHERS.iter().map(|option| {
        let about = tables::CHAT.entry(option.name).and_then(Entry::about);
        json!({
            "name": option.name,
            "type": if option.is_whole { "integer" } else { "number" },
            "low": option.low,
            "high": option.high,
            "default": match option.name {
                "top_k" => Some(advice.top_k.unwrap_or(0)),
                _ => None,
            },
            "about": about,
        })
    });
    numbers.chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_that_is_reported_is_one_that_requests_may_set() {
        for option in OTHERS {
            assert!(
                tables::CHAT
                    .entry(option.name)
                    .and_then(Entry::about)
                    .is_some(),
                "{}",
                option.name
            );
            assert!(SAMPLER_NUMBERS.iter().all(|n| n.name != option.name));
        }
    }
}
