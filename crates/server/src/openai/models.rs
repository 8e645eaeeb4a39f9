//! `GET /v1/models`: what is served, and how.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, Response};
use engine::{Accept, SAMPLER_NUMBERS, Sampling};
use serde_json::{Value, json};

use super::tables;
use crate::anthropic;
use crate::app::Loaded;
use crate::dialect;
use crate::errors::ApiError;
use crate::registry::{self, Status};
use crate::server::Server;
use crate::table::Entry;

/// Lists the models, loaded or not, in the form of the API that the client speaks.
pub(crate) async fn list(State(server): State<Arc<Server>>, headers: HeaderMap) -> Response<Body> {
    if anthropic::is_spoken(&headers) {
        return document(&anthropic::models::list(&server));
    }
    let all = 0..server.registry.entries.len();
    let models = all.clone().map(|i| {
        let status = server.registry.status(i);
        let name = &server.registry.entries[i].names[0];
        // llama-server's clients look for capabilities in a list of its own.
        let perceives = |loaded: &Arc<Loaded>| loaded.engine.senses().is_some();
        let capabilities: &[&str] = match status.loaded().is_some_and(perceives) {
            true => &["completion", "multimodal"],
            false => &["completion"],
        };
        json!({"name": name, "model": name, "capabilities": capabilities})
    });
    let models: Vec<Value> = models.collect();
    let data: Vec<Value> = all.map(|i| model(&server, i)).collect();
    document(&json!({"object": "list", "data": data, "models": models}))
}

/// Describes a model, for any of its names.
pub(crate) async fn get(
    State(server): State<Arc<Server>>,
    headers: HeaderMap,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response<Body>, ApiError> {
    let Path(id) = id.map_err(|_| ApiError::request("the path is not UTF-8"))?;
    let id = id.strip_suffix('/').unwrap_or(&id);
    let registry = &server.registry;
    let called = |entry: &registry::Entry| entry.names.iter().any(|name| name == id);
    let Some(i) = registry.entries.iter().position(called) else {
        return Err(ApiError::no_model(id, &registry.names()));
    };
    Ok(document(&match anthropic::is_spoken(&headers) {
        true => anthropic::models::model(&server, i),
        false => model(&server, i),
    }))
}

fn document(document: &Value) -> Response<Body> {
    dialect::json(super::bytes(document))
}

/// Model `i`: what is known of it before it is loaded, and of one that is loaded how it is served.
fn model(server: &Server, i: usize) -> Value {
    let entry = &server.registry.entries[i];
    let status = server.registry.status(i);
    let mut model = json!({
        "id": entry.names[0],
        "aliases": entry.names[1..],
        "object": "model",
        "created": server.started,
        "owned_by": "paceline",
        "status": state(&status),
    });
    if let Some(loaded) = status.loaded() {
        model["max_model_len"] = json!(loaded.engine.info().context);
        model["meta"] = meta(loaded);
    }
    model
}

/// A model's state, as llama-server has it: a word, and how far one is that is being loaded.
fn state(status: &Status) -> Value {
    let mut state = json!({"value": status.word()});
    match status {
        Status::Unloaded { has_failed: true } => state["failed"] = json!(true),
        Status::Loading(progress) => {
            state["stage"] = json!(progress.stage);
            state["fraction"] = json!(progress.fraction);
        }
        _ => {}
    }
    state
}

/// What is known of a model that is loaded.
fn meta(loaded: &Loaded) -> Value {
    let info = loaded.engine.info();
    json!({
        "n_ctx": info.context,
        "n_vocab": info.vocab_size,
        "size": info.weight_bytes,
        "family": info.family,
        "backend": info.backend,
        "sequences": info.sequences,
        "kv_format": info.kv_format,
        "kv_layers": info.kv_layers,
        "kv_token_bytes": info.kv_token_bytes,
        "memory_bytes": info.memory_bytes,
        "has_chat_template": loaded.engine.text().template.is_some(),
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
        "options": options(loaded),
        "speculation": {
            "drafter": info.drafter,
            "drafters": info.drafters,
            "reason": info.drafter_reason,
            "draft_max": info.draft_max,
            "draft_vocab": info.draft_vocab,
            "accept": info.accept,
            "accept_rules": Accept::ALL.map(Accept::name),
        },
        "preflight": info.preflight,
        "calibration": info.calibration,
        "unused_tensors": info.unused_tensors,
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
fn options(loaded: &Loaded) -> Value {
    let defaults = &loaded.settings.defaults;
    let own = Sampling::default();
    let numbers = SAMPLER_NUMBERS.iter().map(|number| {
        let usual = loaded.number(number).unwrap_or_else(|| (number.get)(&own));
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
                "top_k" => json!(loaded.top_k()),
                "max_tokens" => json!(defaults.max_tokens),
                "seed" => json!(defaults.seed),
                _ => Value::Null,
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
