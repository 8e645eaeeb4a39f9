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
//! Streams are lines of JSON. The model that is served is the only one and stays loaded, so
//! whatever fetches, makes or deletes models is deliberately absent, and so are Ollama's templates.

pub(crate) mod answer;
pub(crate) mod embed;
pub(crate) mod models;
mod request;
pub(crate) mod tables;

use serde_json::{Value, json};

use crate::App;
use crate::dialect::Dialect;
use crate::errors::ApiError;

/// How Ollama's API spells what all of its paths share.
pub(crate) const DIALECT: Dialect = Dialect {
    name: "Ollama",
    error: |error, _| self::error(error).to_string(),
    id_header: None,
};

/// What Ollama adds to a name without a tag. Some clients ask for a listed name with it, so
/// names are listed with it.
const TAG: &str = ":latest";

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
        Some(name) if app.config.strict_model_names && !crate::ANY_MODEL.contains(&name) => {
            Err(ApiError::no_model(name, &tagged(app.model())))
        }
        _ => Ok(tagged(app.model())),
    }
}

/// Whether `name` is one of the model's, with or without a tag.
fn is_own(app: &App, name: &str) -> bool {
    let bare = name.strip_suffix(TAG).unwrap_or(name);
    app.names.iter().any(|own| own == name || own == bare)
}

/// Whether the model can be told to reason.
fn can_reason(app: &App) -> bool {
    let text = app.engine.text();
    text.reasoning.is_some() && crate::template::template_uses(text, "enable_thinking")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_one_string_and_names_have_a_tag() {
        let error = error(&ApiError::field("top_p", "is odd"));
        assert_eq!(error, json!({"error": "`top_p` is odd"}));
        assert_eq!(tagged("a"), "a:latest");
        assert_eq!(tagged("a:1b"), "a:1b");
    }
}
