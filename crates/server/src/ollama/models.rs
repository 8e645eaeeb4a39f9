//! `GET /api/version`, `GET /api/tags`, `GET /api/ps`, `POST /api/show`, and the refusal of
//! whatever would change the models that are there.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use engine::{ModelInfo, SAMPLER_NUMBERS};
use serde_json::{Map, Value, json};
use text::strftime;

use super::{can_reason, tables, tagged};
use crate::app::Loaded;
use crate::dialect;
use crate::errors::ApiError;
use crate::fields::Fields;
use crate::ids;
use crate::openai;
use crate::server::{Chosen, Server};

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

/// `GET /api/tags`: the models that are there, loaded or not, by all their names.
pub(crate) async fn tags(State(server): State<Arc<Server>>) -> Response<Body> {
    let all = 0..server.registry.entries.len();
    let models = all.flat_map(|i| {
        let names = server.registry.entries[i].names.iter();
        let server = &server;
        names.map(move |name| Value::Object(model(server, i, name)))
    });
    document(&json!({"models": models.collect::<Vec<_>>()}))
}

/// `GET /api/ps`: the models that are loaded.
pub(crate) async fn ps(State(server): State<Arc<Server>>) -> Response<Body> {
    let all = 0..server.registry.entries.len();
    let models = all.filter_map(|i| {
        let status = server.registry.status(i);
        let loaded = status.loaded()?;
        let info = loaded.engine.info();
        let size = info.weight_bytes + info.drafter_weight_bytes + info.memory_bytes as u64;
        let mut model = model(&server, i, loaded.model());
        model.remove("modified_at");
        model.insert("size".into(), json!(size));
        let on_device = if info.own_memory { size } else { 0 };
        model.insert("size_vram".into(), json!(on_device));
        model.insert("context_length".into(), json!(info.context));
        let left = server.registry.time_left(i);
        let end = left.and_then(|left| i64::try_from(left.as_secs()).ok());
        let end = match end {
            Some(left) => i64::try_from(ids::unix_seconds()).unwrap_or_default() + left,
            None => since(&server) + FOR_EVER,
        };
        model.insert("expires_at".into(), json!(strftime(TIME, end)));
        Some(model)
    });
    document(&json!({"models": models.collect::<Vec<_>>()}))
}

/// `POST /api/show`: what a model can do. One that is not loaded stays so.
///
/// # Errors
///
/// 404 for any name but a model's.
pub(crate) async fn show(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let (head, body) = request.into_parts();
    let limit = server.config.limits.body_bytes;
    let bytes = server.receive(&head.headers, body, limit).await?;
    let (object, _worker) = server.parse(&bytes).await?;
    let fields = Fields::new(&object, &tables::CHAT);
    let older = fields.string("name")?;
    let Some(name) = fields.string("model")?.or(older) else {
        return Err(fields.error("model", "is missing"));
    };
    let registry = &server.registry;
    let Some(i) = registry.named(name) else {
        let names: Vec<String> = registry.names().into_iter().map(tagged).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        return Err(ApiError::no_model(name, &names));
    };
    Chosen::note(&head.extensions, i);
    let status = registry.status(i);
    let loaded = status.loaded();
    let name = &registry.entries[i].names[0];
    let template = loaded.and_then(|loaded| loaded.engine.text().template.as_ref());
    let mut document_of = json!({
        "license": "",
        "modelfile": format!("# {name} is served by paceline, which has no modelfiles\n"),
        "parameters": loaded.map_or_else(String::new, |loaded| parameters(loaded)),
        "template": template.map_or("", |template| template.source()),
        "details": details(registry.last_info(i).as_ref()),
        "model_info": {"general.basename": name},
        "capabilities": capabilities(loaded.map(|loaded| &**loaded)),
        "modified_at": strftime(TIME, since(&server)),
    });
    if let Some(info) = registry.last_info(i) {
        let of_family = |name: &str| format!("{}.{name}", info.family);
        document_of["model_info"] = json!({
            "general.architecture": info.family,
            "general.basename": name,
            "general.parameter_count": info.parameters,
            of_family("context_length"): info.context,
            of_family("embedding_length"): info.hidden_size,
            of_family("block_count"): info.layers,
            of_family("vocab_size"): info.vocab_size,
        });
    }
    Ok(document(&document_of))
}

/// Refuses to fetch, make, copy or delete models.
pub(crate) async fn refuse_change() -> ApiError {
    ApiError::request(
        "models are not managed over this API: fetch one with `paceline pull ORG/NAME`, and serve it with `paceline serve -m ORG/NAME`",
    )
}

/// Seconds from 1970 to the start of the server.
fn since(server: &Server) -> i64 {
    i64::try_from(server.started).unwrap_or_default()
}

/// Model `i` as lists have it, under `name`.
fn model(server: &Server, i: usize, name: &str) -> Map<String, Value> {
    let registry = &server.registry;
    let info = registry.last_info(i);
    let info = info.as_ref();
    let name = tagged(name);
    // A model that was not tried has not been hashed.
    let digest = info.and_then(|info| info.preflight.target_sha256.as_deref());
    let status = registry.status(i);
    let model = json!({
        "name": name,
        "model": name,
        "modified_at": strftime(TIME, since(server)),
        "size": info.map_or(registry.entries[i].bytes, |info| info.weight_bytes),
        "digest": digest.unwrap_or_default(),
        "details": details(info),
        "capabilities": capabilities(status.loaded().map(|loaded| &**loaded)),
    });
    match model {
        Value::Object(model) => model,
        _ => unreachable!("it is an object"),
    }
}

/// What kind of model it is, as far as known: a model that was never loaded is not.
fn details(info: Option<&ModelInfo>) -> Value {
    json!({
        "parent_model": "",
        "format": info.map_or("", |info| info.container),
        "family": info.map_or("", |info| info.family),
        "families": info.map(|info| [info.family]),
        "parameter_size": info.map_or_else(String::new, |info| short(info.parameters)),
        "quantization_level": info.map_or_else(String::new, |info| info.weight_format.to_uppercase()),
    })
}

/// What the model can do, in Ollama's words: of one that is not loaded, what all can.
fn capabilities(loaded: Option<&Loaded>) -> Vec<&'static str> {
    let mut all = vec!["completion"];
    let Some(loaded) = loaded else { return all };
    if loaded.engine.text().tools.is_some() {
        all.push("tools");
    }
    if loaded.engine.vision().is_some() {
        all.push("vision");
    }
    if loaded.engine.hearing().is_some() {
        all.push("audio");
    }
    if can_reason(loaded) {
        all.push("thinking");
    }
    if loaded.engine.text().infill.is_some() {
        all.push("insert");
    }
    // Any model gives vectors; whoever serves one for them says so.
    if loaded.settings.pooling.is_some() {
        all.push("embedding");
    }
    all
}

/// The sampling of requests that do not say, a line each.
fn parameters(loaded: &Loaded) -> String {
    let numbers = SAMPLER_NUMBERS.iter();
    let numbers = numbers.filter_map(|number| Some((number.name, loaded.number(number)?)));
    let lines = numbers.map(|(name, value)| format!("{name} {value}"));
    lines
        .chain(
            Some(loaded.top_k())
                .filter(|&k| k > 0)
                .map(|k| format!("top_k {k}")),
        )
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
