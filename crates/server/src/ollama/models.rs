//! `GET /api/version`, `GET /api/tags`, `GET /api/ps`, `POST /api/show`, and the refusal of
//! whatever would change the models that are there.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use engine::SAMPLER_NUMBERS;
use serde_json::{Map, Value, json};
use text::strftime;

use super::{can_reason, is_own, tables, tagged};
use crate::App;
use crate::dialect;
use crate::errors::ApiError;
use crate::fields::Fields;
use crate::openai;

/// The version of Ollama whose API this is. Clients refuse servers without one, and older ones:
/// VS Code wants 0.6.4 at least, and what has come since until this one is here or refused by
/// name.
const VERSION: &str = "0.18.3";
/// How long a model stays loaded, in seconds, where that is for ever: a hundred years.
const FOR_EVER: i64 = 100 * 365 * 24 * 60 * 60;
/// How Ollama writes a time, in UTC.
const TIME: &str = "%Y-%m-%dT%H:%M:%SZ";

/// `GET /api/version`.
pub(crate) async fn version() -> Response<Body> {
    document(&json!({"version": VERSION}))
}

/// `GET /api/tags`: the models that are there, which is the one that is served, by all its names.
pub(crate) async fn tags(State(app): State<Arc<App>>) -> Response<Body> {
    let models = app
        .names
        .iter()
        .map(|name| Value::Object(model(&app, name)));
    document(&json!({"models": models.collect::<Vec<_>>()}))
}

/// `GET /api/ps`: the models that are loaded.
pub(crate) async fn ps(State(app): State<Arc<App>>) -> Response<Body> {
    let info = app.engine.info();
    let size = info.weight_bytes + info.drafter_weight_bytes + info.memory_bytes as u64;
    let mut model = model(&app, app.model());
    model.remove("modified_at");
    model.insert("size".into(), json!(size));
    let on_device = if info.own_memory { size } else { 0 };
    model.insert("size_vram".into(), json!(on_device));
    model.insert("context_length".into(), json!(info.context));
    let end = strftime(TIME, since(&app) + FOR_EVER);
    model.insert("expires_at".into(), json!(end));
    document(&json!({"models": [model]}))
}

/// `POST /api/show`: what a model can do.
///
/// # Errors
///
/// 404 for any name but the model's.
pub(crate) async fn show(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let (head, body) = request.into_parts();
    let limit = app.config.limits.body_bytes;
    let (object, _worker) = app.read_object(&head.headers, body, limit).await?;
    let fields = Fields::new(&object, &tables::CHAT);
    let older = fields.string("name")?;
    let Some(name) = fields.string("model")?.or(older) else {
        return Err(fields.error("model", "is missing"));
    };
    if !is_own(&app, name) {
        return Err(ApiError::no_model(name, &tagged(app.model())));
    }
    let info = app.engine.info();
    let template = app.engine.text().template.as_ref();
    let of_family = |name: &str| format!("{}.{name}", info.family);
    Ok(document(&json!({
        "license": "",
        "modelfile": format!("# {} is served by paceline, which has no modelfiles\n", app.model()),
        "parameters": parameters(&app),
        "template": template.map_or("", |template| template.source()),
        "details": details(&app),
        "model_info": {
            "general.architecture": info.family,
            "general.basename": app.model(),
            "general.parameter_count": info.parameters,
            of_family("context_length"): info.context,
            of_family("embedding_length"): info.hidden_size,
            of_family("block_count"): info.layers,
            of_family("vocab_size"): info.vocab_size,
        },
        "capabilities": capabilities(&app),
        "modified_at": strftime(TIME, since(&app)),
    })))
}

/// Refuses to fetch, make, copy or delete models.
pub(crate) async fn refuse_change() -> ApiError {
    ApiError::request(
        "models are not managed over this API: fetch one with `paceline pull ORG/NAME`, and serve it with `paceline serve -m ORG/NAME`",
    )
}

/// Seconds from 1970 to the start of the server.
fn since(app: &App) -> i64 {
    i64::try_from(app.started).unwrap_or_default()
}

/// The model as lists have it, under `name`.
fn model(app: &App, name: &str) -> Map<String, Value> {
    let info = app.engine.info();
    let name = tagged(name);
    // A model that was not tried has not been hashed.
    let digest = info.preflight.target_sha256.as_deref().unwrap_or_default();
    let model = json!({
        "name": name,
        "model": name,
        "modified_at": strftime(TIME, since(app)),
        "size": info.weight_bytes,
        "digest": digest,
        "details": details(app),
        "capabilities": capabilities(app),
    });
    match model {
        Value::Object(model) => model,
        _ => unreachable!("it is an object"),
    }
}

/// What kind of model it is.
fn details(app: &App) -> Value {
    let info = app.engine.info();
    json!({
        "parent_model": "",
        "format": info.container,
        "family": info.family,
        "families": [info.family],
        "parameter_size": short(info.parameters),
        "quantization_level": info.weight_format.to_uppercase(),
    })
}

/// What the model can do, in Ollama's words.
fn capabilities(app: &App) -> Vec<&'static str> {
    let mut all = vec!["completion"];
    if app.engine.text().tools.is_some() {
        all.push("tools");
    }
    if app.engine.vision().is_some() {
        all.push("vision");
    }
    if app.engine.hearing().is_some() {
        all.push("audio");
    }
    if can_reason(app) {
        all.push("thinking");
    }
    if app.engine.text().infill.is_some() {
        all.push("insert");
    }
    // Any model gives vectors; whoever serves one for them says so.
    if app.config.pooling.is_some() {
        all.push("embedding");
    }
    all
}

/// The sampling that the checkpoint recommends, a line each.
fn parameters(app: &App) -> String {
    let advice = &app.engine.text().sampling;
    let numbers = SAMPLER_NUMBERS.iter();
    let numbers = numbers.filter_map(|number| Some((number.name, (number.advised)(advice)?)));
    let lines = numbers.map(|(name, value)| format!("{name} {value}"));
    lines
        .chain(advice.top_k.map(|k| format!("top_k {k}")))
        .collect::<Vec<_>>()
        .join("\n")
}

/// A number of parameters as people write it: `8.0B`.
fn short(n: u64) -> String {
    let of = |unit: f64| n as f64 / unit;
    match n {
        1_000_000_000.. => format!("{:.1}B", of(1e9)),
        1_000_000.. => format!("{:.2}M", of(1e6)),
        1_000.. => format!("{:.2}K", of(1e3)),
        _ => n.to_string(),
    }
}

fn document(document: &Value) -> Response<Body> {
    dialect::json(openai::bytes(document))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_counted_in_few_letters() {
        for (n, text) in [
            (7, "7"),
            (1_500, "1.50K"),
            (14_100_000, "14.10M"),
            (8_030_000_000, "8.0B"),
        ] {
            assert_eq!(short(n), text);
        }
    }
}
