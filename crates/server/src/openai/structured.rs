//! What an answer has to follow, under the names that OpenAI, vLLM, SGLang and llama-server have for it.
//!
//! | field | from | what |
//! | --- | --- | --- |
//! | `response_format` | OpenAI | `json_object`, or `json_schema` with a schema |
//! | `structured_outputs` | vLLM | an object with one of the kinds below |
//! | `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar` | vLLM, older | one kind each |
//! | `json_schema`, `grammar` | llama-server | a schema, a GBNF grammar |
//! | `regex`, `ebnf` | SGLang | a regular expression, a grammar |
//!
//! A grammar with `::=` is GBNF, any other is llguidance's Lark.

use engine::GrammarSpec;
use serde_json::Value;

use super::tables::{STRUCTURED, StructuredKind};
use crate::errors::ApiError;
use crate::fields::Fields;
use crate::grammar::AnswerGrammar;

/// What the answer has to follow, if anything.
///
/// # Errors
///
/// 400 for a wrong value, and if two fields ask for something.
pub(crate) fn read(fields: &Fields<'_>) -> Result<Option<AnswerGrammar>, ApiError> {
    let mut found: Option<AnswerGrammar> = response_format(fields)?;
    let structured = structured_outputs(fields)?;
    let own = STRUCTURED.iter().map(|entry| {
        let value = fields.get(entry.field).filter(|value| !is_nothing(value));
        let spec = value.map(|value| spec(fields, entry.field, entry.kind, value));
        let grammar = |spec| AnswerGrammar {
            field: entry.field.to_owned(),
            spec,
        };
        spec.transpose().map(|spec| spec.map(grammar))
    });
    for next in std::iter::once(Ok(structured)).chain(own) {
        match (&found, next?) {
            (_, None) => {}
            (None, next) => found = next,
            (Some(first), Some(next)) => {
                let message = format!(
                    "cannot be combined with `{}`; send one of them",
                    first.field
                );
                return Err(ApiError::field(next.field, message));
            }
        }
    }
    Ok(found)
}

/// Values by which clients say that they want nothing.
fn is_nothing(value: &Value) -> bool {
    value == "" || value.as_array().is_some_and(Vec::is_empty)
}

/// What `value` of a field of this kind asks for.
fn spec(
    fields: &Fields<'_>,
    field: &str,
    kind: StructuredKind,
    value: &Value,
) -> Result<GrammarSpec, ApiError> {
    let text = || {
        let text = value.as_str().map(str::to_owned);
        text.ok_or_else(|| fields.error(field, "must be a string"))
    };
    Ok(match kind {
        StructuredKind::Schema => GrammarSpec::JsonSchema(schema(fields, field, value)?),
        StructuredKind::Regex => GrammarSpec::Regex(text()?),
        StructuredKind::Grammar => grammar(text()?),
        StructuredKind::Choice => {
            let wrong = || fields.error(field, "must be a list of strings, not empty");
            let list = value
                .as_array()
                .filter(|list| !list.is_empty())
                .ok_or_else(wrong)?;
            let choices = list.iter().map(|item| item.as_str().map(str::to_owned));
            GrammarSpec::Choice(choices.collect::<Option<_>>().ok_or_else(wrong)?)
        }
    })
}

/// A schema as an object, as `true` or `false`, or as JSON text of one.
pub(super) fn schema(fields: &Fields<'_>, field: &str, value: &Value) -> Result<Value, ApiError> {
    let wrong = || {
        fields.error(
            field,
            "must be a JSON schema: an object, or the JSON text of one",
        )
    };
    match value {
        Value::String(text) => {
            let parsed = serde_json::from_str::<Value>(text).ok();
            parsed
                .filter(|v| v.is_object() || v.is_boolean())
                .ok_or_else(wrong)
        }
        Value::Object(_) | Value::Bool(_) => Ok(value.clone()),
        _ => Err(wrong()),
    }
}

fn grammar(text: String) -> GrammarSpec {
    match text.contains("::=") {
        true => GrammarSpec::Gbnf(text),
        false => GrammarSpec::Lark(text),
    }
}

fn response_format(fields: &Fields<'_>) -> Result<Option<AnswerGrammar>, ApiError> {
    const NAME: &str = "response_format";
    const SCHEMA: &str = "response_format.json_schema.schema";
    const BESIDE: &str = "response_format.schema";
    let Some(map) = fields.object(NAME)? else {
        return Ok(None);
    };
    let inner = fields.inside(map, "response_format.");
    let mut found = None;
    if let Some(format) = inner.object("json_schema")? {
        let format = fields.inside(format, "response_format.json_schema.");
        // These name and describe the schema, which is always enforced.
        format.string("name")?;
        format.string("description")?;
        format.bool("strict")?;
        if let Some(value) = format.get("schema") {
            found = Some((SCHEMA, schema(fields, SCHEMA, value)?));
        }
        fields.note_ignored(format.ignored());
    }
    // llama-server's clients put a schema beside the type.
    if let (None, Some(value)) = (&found, inner.get("schema")) {
        found = Some((BESIDE, schema(fields, BESIDE, value)?));
    }
    let spec = match (inner.string("type")?, found) {
        (Some("text"), _) => {
            fields.note_ignored(inner.ignored());
            return Ok(None);
        }
        (Some("json_object"), None) => (NAME, GrammarSpec::JsonObject),
        (Some("json_object" | "json_schema"), Some((field, value))) => {
            (field, GrammarSpec::JsonSchema(value))
        }
        (Some("json_schema"), None) => return Err(ApiError::field(SCHEMA, "is missing")),
        (Some(_), _) => {
            return Err(inner.error("type", "must be one of text, json_object, json_schema"));
        }
        (None, _) => return Err(inner.error("type", "is missing")),
    };
    fields.note_ignored(inner.ignored());
    let (field, spec) = spec;
    Ok(Some(AnswerGrammar {
        field: field.to_owned(),
        spec,
    }))
}

fn structured_outputs(fields: &Fields<'_>) -> Result<Option<AnswerGrammar>, ApiError> {
    const NAME: &str = "structured_outputs";
    let Some(map) = fields.object(NAME)? else {
        return Ok(None);
    };
    let inner = fields.inside(map, "structured_outputs.");
    inner.refuse()?;
    let kinds = [
        ("json", StructuredKind::Schema),
        ("regex", StructuredKind::Regex),
        ("choice", StructuredKind::Choice),
        ("grammar", StructuredKind::Grammar),
    ];
    let mut found = Vec::new();
    for (name, kind) in kinds {
        if let Some(value) = inner.get(name) {
            found.push((name, spec(&inner, name, kind, value)?));
        }
    }
    if inner.bool("json_object")? == Some(true) {
        found.push(("json_object", GrammarSpec::JsonObject));
    }
    fields.note_ignored(inner.ignored());
    let mut found = found.into_iter();
    match (found.next(), found.next()) {
        (Some((name, spec)), None) => Ok(Some(AnswerGrammar {
            field: format!("{NAME}.{name}"),
            spec,
        })),
        (None, _) => Err(fields.error(
            NAME,
            "needs one of json, regex, choice, grammar, json_object",
        )),
        (Some((first, _)), Some((second, _))) => {
            let message = format!("has both `{first}` and `{second}`; send one of them");
            Err(fields.error(NAME, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::tables::CHAT;
    use serde_json::{Map, json};

    fn asked(body: Value) -> Result<Option<(String, GrammarSpec)>, String> {
        let map: &Map<String, Value> = body.as_object().unwrap();
        let fields = Fields::new(map, &CHAT);
        let read = read(&fields).map_err(|error| error.message.clone())?;
        Ok(read.map(|grammar| (grammar.field, grammar.spec)))
    }

    #[test]
    fn every_spelling_is_read() {
        let schema = json!({"type": "object"});
        let text = schema.to_string();
        let is_schema = GrammarSpec::JsonSchema(schema.clone());
        let format = |value: Value| json!({"response_format": value});
        for (body, field, spec) in [
            (
                format(json!({"type": "json_object"})),
                "response_format",
                GrammarSpec::JsonObject,
            ),
            (
                format(
                    json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": true}}),
                ),
                "response_format.json_schema.schema",
                is_schema.clone(),
            ),
            (
                format(json!({"type": "json_object", "schema": schema})),
                "response_format.schema",
                is_schema.clone(),
            ),
            (
                json!({"guided_json": schema}),
                "guided_json",
                is_schema.clone(),
            ),
            (
                json!({"guided_json": text}),
                "guided_json",
                is_schema.clone(),
            ),
            (
                json!({"json_schema": schema}),
                "json_schema",
                is_schema.clone(),
            ),
            (
                json!({"regex": "a+"}),
                "regex",
                GrammarSpec::Regex("a+".into()),
            ),
            (
                json!({"guided_regex": "a+"}),
                "guided_regex",
                GrammarSpec::Regex("a+".into()),
            ),
            (
                json!({"guided_choice": ["a", "b"]}),
                "guided_choice",
                GrammarSpec::Choice(vec!["a".into(), "b".into()]),
            ),
            (
                json!({"grammar": "root ::= \"a\""}),
                "grammar",
                GrammarSpec::Gbnf("root ::= \"a\"".into()),
            ),
            (
                json!({"guided_grammar": "start: \"a\""}),
                "guided_grammar",
                GrammarSpec::Lark("start: \"a\"".into()),
            ),
            (
                json!({"structured_outputs": {"json": schema}}),
                "structured_outputs.json",
                is_schema.clone(),
            ),
            (
                json!({"structured_outputs": {"json_object": true}}),
                "structured_outputs.json_object",
                GrammarSpec::JsonObject,
            ),
        ] {
            let read = asked(body.clone()).unwrap().unwrap();
            assert_eq!((read.0.as_str(), &read.1), (field, &spec), "{body}");
        }
    }

    #[test]
    fn nothing_is_asked_for_by_empty_values() {
        for body in [
            json!({}),
            json!({"response_format": {"type": "text"}}),
            json!({"response_format": null, "grammar": "", "guided_choice": [], "regex": null}),
        ] {
            assert_eq!(asked(body), Ok(None));
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (body, message) in [
            (
                json!({"response_format": {}}),
                "`response_format.type` is missing",
            ),
            (
                json!({"response_format": {"type": "xml"}}),
                "`response_format.type` must be one of text, json_object, json_schema",
            ),
            (
                json!({"response_format": {"type": "json_schema"}}),
                "`response_format.json_schema.schema` is missing",
            ),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}),
                "`response_format.json_schema.schema` must be a JSON schema: an object, or the JSON text of one",
            ),
            (
                json!({"guided_json": "{"}),
                "`guided_json` must be a JSON schema: an object, or the JSON text of one",
            ),
            (json!({"regex": 3}), "`regex` must be a string"),
            (
                json!({"guided_choice": [1]}),
                "`guided_choice` must be a list of strings, not empty",
            ),
            (
                json!({"regex": "a", "response_format": {"type": "json_object"}}),
                "`regex` cannot be combined with `response_format`; send one of them",
            ),
            (
                json!({"structured_outputs": {}}),
                "`structured_outputs` needs one of json, regex, choice, grammar, json_object",
            ),
            (
                json!({"structured_outputs": {"regex": "a", "json": {}}}),
                "`structured_outputs` has both `json` and `regex`; send one of them",
            ),
        ] {
            assert_eq!(asked(body.clone()), Err(message.to_owned()), "{body}");
        }
    }
}
