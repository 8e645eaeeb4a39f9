//! `GET /props`, `GET /slots` and `GET /lora-adapters`: what is served, and what runs.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::Response;
use serde_json::{Map, Value, json};

use super::media::MARKER;
use super::{models, request, settings};
use crate::app::App;
use crate::dialect;
use crate::errors::ApiError;
use crate::openai;
use crate::run::Run;
use crate::server::{Queried, Server, queried_model};
use crate::template::template_uses;

/// The parameter of a query by which a client asks for an error where no slot is free.
const FAIL_ON_NO_SLOT: &str = "fail_on_no_slot";

/// `GET /props`: what is served, and how a request that says nothing is answered.
pub(crate) async fn props(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let is_for_one = queried_model(request.uri().query().unwrap_or_default()).is_some();
    if !is_for_one && !server.registry.is_single() {
        return Ok(document(&models::props(&server)));
    }
    let (mut parts, _) = request.into_parts();
    let Queried(app) = Queried::from_request_parts(&mut parts, &server).await?;
    let (info, text) = (app.engine.info(), app.engine.text());
    let silent = request::read(Map::new(), &app, false)?;
    let params = silent.spelling.settings();
    let entry = |id: Option<u32>| {
        id.and_then(|id| text.tokenizer.entry(id))
            .unwrap_or_default()
    };
    let uses = |name: &str| template_uses(text, name);
    Ok(document(&json!({
        "default_generation_settings": {
            "id": 0,
            "id_task": -1,
            "n_ctx": info.context,
            "speculative": info.drafter.is_some(),
            "is_processing": false,
            "params": params,
        },
        "total_slots": info.sequences,
        "model_alias": app.model(),
        "model_path": info.name,
        "modalities": {
            "vision": info.vision.is_some(),
            "audio": info.hearing.is_some(),
            "video": false,
        },
        "media_marker": MARKER,
        "endpoint_slots": true,
        "endpoint_props": false,
        "endpoint_metrics": true,
        "webui": false,
        "webui_settings": {},
        "chat_template": text.template.as_ref().map_or("", |template| template.source()),
        "chat_template_caps": {
            "supports_tools": text.tools.is_some(),
            "supports_tool_calls": uses("tool_calls"),
            "supports_parallel_tool_calls": text.tools.is_some(),
            "supports_system_role": true,
            "supports_preserve_reasoning": uses("reasoning_content"),
            "supports_enable_thinking": uses("enable_thinking"),
        },
        "bos_token": entry(text.bos()),
        "eos_token": entry(text.stop_tokens.ids().first().copied()),
        "build_info": concat!("paceline-", env!("CARGO_PKG_VERSION")),
        "is_sleeping": false,
    })))
}

/// `POST /props`: refused.
pub(crate) async fn set_props() -> ApiError {
    ApiError::not_here(
        "properties cannot be changed while the server runs; start it with other options",
    )
}

/// `GET /slots`: what runs in each slot, without anything that a client has written.
pub(crate) async fn slots(
    Queried(app): Queried,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let runs = app.slots.all();
    let asks = asks_for_a_slot(request.uri().query().unwrap_or_default());
    if asks && runs.iter().all(Option::is_some) {
        return Err(ApiError::no_slot());
    }
    let slots = runs.iter().enumerate();
    let slots = slots.map(|(id, run)| slot(&app, id, run.as_deref()));
    Ok(document(&slots.collect()))
}

/// Whether a query has [`FAIL_ON_NO_SLOT`] with any value, as llama-server reads it.
fn asks_for_a_slot(query: &str) -> bool {
    let mut names = query.split('&').map(|pair| pair.split('=').next());
    names.any(|name| name == Some(FAIL_ON_NO_SLOT))
}

/// The slot `id`, in which `run` runs, if anything does.
fn slot(app: &App, id: usize, run: Option<&Run>) -> Value {
    let info = app.engine.info();
    let mut slot = json!({
        "id": id,
        "n_ctx": info.context,
        "speculative": info.drafter.is_some(),
        "is_processing": run.is_some(),
    });
    let Some(run) = run else { return slot };
    let so_far = run.so_far();
    let left = run
        .max_tokens
        .map(|most| most.saturating_sub(so_far.written));
    let more = json!({
        "id_task": run.id,
        "n_prompt_tokens": so_far.prompt_tokens,
        "n_prompt_tokens_cache": so_far.cached_tokens,
        "params": settings::of_run(run, &app.engine),
        "next_token": [{
            "has_next_token": true,
            "has_new_line": run.has_line_break(),
            "n_remain": left.map_or(-1, |n| n as i64),
            "n_decoded": so_far.written,
        }],
    });
    if let (Value::Object(slot), Value::Object(more)) = (&mut slot, more) {
        slot.extend(more);
    }
    slot
}

/// `GET /lora-adapters`: none.
pub(crate) async fn adapters() -> Response<Body> {
    document(&json!([]))
}

/// `POST /lora-adapters`: refused.
pub(crate) async fn set_adapters() -> ApiError {
    ApiError::not_here("no LoRA adapters are loaded: merge one into its model before it is served")
}

fn document(document: &Value) -> Response<Body> {
    dialect::json(openai::bytes(document))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_asks_for_a_free_slot_by_a_name() {
        for (query, asks) in [
            ("fail_on_no_slot=1", true),
            ("a=b&fail_on_no_slot", true),
            ("fail_on_no_slots=1", false),
            ("", false),
        ] {
            assert_eq!(asks_for_a_slot(query), asks, "{query}");
        }
    }
}
