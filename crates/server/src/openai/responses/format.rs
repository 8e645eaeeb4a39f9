//! What a request to the Responses API says of the form of its answer.

use engine::GrammarSpec;
use serde_json::{Map, Value, json};

use crate::errors::ApiError;
use crate::fields::Fields;
use crate::grammar::AnswerGrammar;
use crate::openai::logprobs::MOST;
use crate::openai::structured;

/// Pairs of `metadata`.
const METADATA_MAX: usize = 16;

/// The parts of a response that only come if `include` or a field of its own asks for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Include {
    /// Log-probabilities of the text, with so many of the likeliest tokens.
    pub(super) logprobs: Option<usize>,
    /// Reasoning in the field that other servers encrypt it in.
    pub(super) sealed_reasoning: bool,
}

impl Include {
    /// Reads `include` and `top_logprobs`.
    ///
    /// # Errors
    ///
    /// 400 for what is not a list of strings, and for too many tokens.
    pub(super) fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        const NAME: &str = "include";
        let wrong = || fields.error(NAME, "must be a list of strings");
        let mut include = Include::default();
        let top = fields.integer("top_logprobs", 0..=MOST)?.unwrap_or(0) as usize;
        if top > 0 {
            include.logprobs = Some(top);
        }
        let list = match fields.get(NAME) {
            None => return Ok(include),
            Some(list) => list.as_array().ok_or_else(wrong)?,
        };
        for (i, name) in list.iter().enumerate() {
            match name.as_str().ok_or_else(wrong)? {
                "message.output_text.logprobs" => include.logprobs = Some(top),
                "reasoning.encrypted_content" => include.sealed_reasoning = true,
                _ => fields.note_ignored([format!("{NAME}[{i}]")]),
            }
        }
        Ok(include)
    }
}

/// What `text` asks for.
#[derive(Debug, Default)]
pub(super) struct TextFormat {
    /// What the answer has to follow.
    pub(super) grammar: Option<AnswerGrammar>,
    /// How much the model is to say, for its chat template.
    pub(super) verbosity: Option<String>,
}

impl TextFormat {
    /// Reads `text`, and what else says what the answer has to follow.
    ///
    /// # Errors
    ///
    /// 400 for a wrong value, and if two fields ask for something.
    pub(super) fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        const NAME: &str = "text";
        let mut text = TextFormat::default();
        if let Some(map) = fields.object(NAME)? {
            let inner = fields.inside(map, "text.");
            text.verbosity = inner.string("verbosity")?.map(str::to_owned);
            if let Some(format) = inner.object("format")? {
                text.grammar = format_of(fields, &fields.inside(format, "text.format."))?;
            }
            fields.note_ignored(inner.ignored());
        }
        match (&text.grammar, structured::read(fields)?) {
            (_, None) => {}
            (None, other) => text.grammar = other,
            (Some(_), Some(other)) => {
                let message = "cannot be combined with `text.format`; send one of them";
                return Err(ApiError::field(other.field, message));
            }
        }
        Ok(text)
    }
}

/// Reads `text.format`, whose fields are `inner`.
fn format_of(fields: &Fields<'_>, inner: &Fields<'_>) -> Result<Option<AnswerGrammar>, ApiError> {
    const SCHEMA: &str = "text.format.schema";
    let schema = inner.get("schema");
    // These name and describe the schema, which is always enforced.
    inner.string("name")?;
    inner.string("description")?;
    inner.bool("strict")?;
    let kind = inner.string("type")?;
    fields.note_ignored(inner.ignored());
    let (field, spec) = match (kind, schema) {
        (Some("text"), _) => return Ok(None),
        (Some("json_object"), _) => ("text.format", GrammarSpec::JsonObject),
        (Some("json_schema"), Some(value)) => {
            let schema = structured::schema(inner, "schema", value)?;
            (SCHEMA, GrammarSpec::JsonSchema(schema))
        }
        (Some("json_schema"), None) => return Err(ApiError::field(SCHEMA, "is missing")),
        (Some(_), _) => {
            return Err(inner.error("type", "must be one of text, json_object, json_schema"));
        }
        (None, _) => return Err(inner.error("type", "is missing")),
    };
    Ok(Some(AnswerGrammar {
        field: field.to_owned(),
        spec,
    }))
}

/// The field `text`, for the response to repeat.
pub(super) fn spell_text(object: &Map<String, Value>) -> Value {
    let field = |name: &str| object.get("text").and_then(|text| text.get(name));
    let of = |name: &str| field(name).filter(|value| !value.is_null()).cloned();
    json!({
        "format": of("format").unwrap_or_else(|| json!({"type": "text"})),
        "verbosity": of("verbosity").unwrap_or_else(|| json!("medium")),
    })
}

/// The field `reasoning`, for the response to repeat.
pub(super) fn spell_reasoning(object: &Map<String, Value>) -> Value {
    let field = |name: &str| object.get("reasoning").and_then(|inner| inner.get(name));
    json!({
        "effort": field("effort").or_else(|| object.get("reasoning_effort")),
        "summary": field("summary"),
    })
}

/// Reads `metadata`, for the response to repeat.
///
/// # Errors
///
/// 400 for what is not an object of strings, or too large a one.
pub(super) fn metadata(fields: &Fields<'_>) -> Result<Value, ApiError> {
    const NAME: &str = "metadata";
    let Some(map) = fields.object(NAME)? else {
        return Ok(json!({}));
    };
    if map.len() > METADATA_MAX {
        let message = format!("has {} pairs, {METADATA_MAX} at most", map.len());
        return Err(fields.error(NAME, message));
    }
    if !map.values().all(Value::is_string) {
        return Err(fields.error(NAME, "must be an object of strings"));
    }
    Ok(Value::Object(map.clone()))
}
