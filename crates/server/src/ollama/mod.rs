//! Ollama's API.
//!
//! | file | what |
//! | --- | --- |
//! | [`answer`] | `POST /api/chat` and `POST /api/generate`: the answer, whole and as a stream |
//! | [`embed`] | `POST /api/embed` and `POST /api/embeddings`: vectors of texts |
//! | [`models`] | the version, what is served, and the refusal to change that |
//! | [`request`] | a request for text |
//! | [`tables`] | how every known field is treated |
//!
//! Streams are lines of JSON. Which models there are is said when the server starts, so whatever
//! fetches, makes or deletes models is deliberately absent, and so are Ollama's templates.

pub(crate) mod answer;
pub(crate) mod embed;
pub(crate) mod models;
mod request;
pub(crate) mod tables;

use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use crate::app::{App, Loaded};
use crate::dialect::Dialect;
use crate::errors::ApiError;
use crate::registry::Keep;

/// How Ollama's API spells what all of its paths share.
pub(crate) const DIALECT: Dialect = Dialect {
    name: "Ollama",
    error: |error, _| self::error(error).to_string(),
    id_header: None,
};

/// What Ollama adds to a name without a tag. Some clients ask for a listed name with it, so
/// names are listed with it.
pub(crate) const TAG: &str = ":latest";

/// The field that says how long a model stays loaded.
const KEEP_ALIVE: &str = "keep_alive";

/// An error's document: `{"error": "…"}`.
fn error(error: &ApiError) -> Value {
    json!({"error": error.message})
}

/// `name` as Ollama lists it, with a tag.
fn tagged(name: &str) -> String {
    match name.contains(':') {
        true => name.to_owned(),
        false => format!("{name}{TAG}"),
    }
}

/// The name of the model in the answer to a request for `asked`: that name if it is one of the
/// model's, with or without a tag, else the model's own.
///
/// # Errors
///
/// 404 for another name, where names are strict.
fn model_name(app: &App, asked: Option<&str>) -> Result<String, ApiError> {
    match asked {
        Some(name) if is_own(app, name) => Ok(name.to_owned()),
        Some(name) if app.is_strict() && !crate::app::ANY_MODEL.contains(&name) => {
            Err(ApiError::no_model(name, &[&tagged(app.model())]))
        }
        _ => Ok(tagged(app.model())),
    }
}

/// Whether `name` is one of the model's, with or without a tag.
fn is_own(app: &App, name: &str) -> bool {
    let bare = name.strip_suffix(TAG).unwrap_or(name);
    app.names.iter().any(|own| own == name || own == bare)
}

/// How long a model is to stay loaded after a request: `keep_alive`, a number of seconds or a
/// duration such as `"5m"`; less than nothing is for ever.
///
/// # Errors
///
/// 400 for anything else.
fn keep_alive(object: &Map<String, Value>) -> Result<Keep, ApiError> {
    let seconds = match object.get(KEEP_ALIVE) {
        None | Some(Value::Null) => return Ok(Keep::Default),
        Some(Value::String(text)) if text.is_empty() => return Ok(Keep::Default),
        Some(Value::String(text)) => duration(text),
        Some(value) => value.as_f64(),
    };
    let message = "must be a number of seconds, or a duration such as \"5m\" or \"1h30m\"";
    let seconds = seconds.ok_or_else(|| ApiError::field(KEEP_ALIVE, message))?;
    // What no clock can add is for ever as well.
    let keep = Duration::try_from_secs_f64(seconds).ok();
    let keep = keep.filter(|&keep| Instant::now().checked_add(keep).is_some());
    Ok(keep.map_or(Keep::Forever, Keep::For))
}

/// Seconds of a duration as Go writes it, such as `1h30m` or `-1s`, or of a bare number.
fn duration(text: &str) -> Option<f64> {
    const UNITS: &[(&str, f64)] = &[
        ("ms", 1e-3),
        ("us", 1e-6),
        ("µs", 1e-6),
        ("ns", 1e-9),
        ("h", 3600.0),
        ("m", 60.0),
        ("s", 1.0),
    ];
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text.strip_prefix('+').unwrap_or(text)),
    };
    if let Ok(seconds) = rest.parse::<f64>() {
        return Some(sign * seconds).filter(|seconds| seconds.is_finite());
    }
    let mut seconds = 0.0;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, unit) = rest.split_at(end);
        let (name, size) = UNITS.iter().find(|(name, _)| unit.starts_with(name))?;
        seconds += number.parse::<f64>().ok()? * size;
        rest = &unit[name.len()..];
    }
    Some(sign * seconds)
}

/// Whether the model can be told to reason.
fn can_reason(app: &Loaded) -> bool {
    let text = app.engine.text();
    text.reasoning.is_some() && crate::template::template_uses(text, "enable_thinking")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_kept_for_a_time() {
        let keep = |value: Value| {
            let object = Map::from_iter([("keep_alive".to_owned(), value)]);
            keep_alive(&object).ok()
        };
        let seconds = |s| Some(Keep::For(Duration::from_secs(s)));
        for (value, kept) in [
            (json!(null), Some(Keep::Default)),
            (json!(""), Some(Keep::Default)),
            (json!(0), seconds(0)),
            (json!("0"), seconds(0)),
            (json!(90), seconds(90)),
            (json!("90s"), seconds(90)),
            (json!("1h30m"), seconds(5400)),
            (json!("1.5m"), seconds(90)),
            (json!("2000ms"), seconds(2)),
            (json!(-1), Some(Keep::Forever)),
            (json!("-1m"), Some(Keep::Forever)),
            (json!(1e300), Some(Keep::Forever)),
            (json!("5 minutes"), None),
            (json!("m"), None),
            (json!("5x"), None),
            (json!(true), None),
        ] {
            assert_eq!(keep(value.clone()), kept, "{value}");
        }
    }

    #[test]
    fn errors_are_one_string_and_names_have_a_tag() {
        let error = error(&ApiError::field("top_p", "is odd"));
        assert_eq!(error, json!({"error": "`top_p` is odd"}));
        assert_eq!(tagged("a"), "a:latest");
        assert_eq!(tagged("a:1b"), "a:1b");
    }
}
