//! Tools that a request offers the model.

use std::sync::Arc;

use engine::GrammarSpec;
use serde_json::{Map, Value, json};
use text::Text;
use text::tools::NAME_BYTES_MAX;
use text::tools::grammar::{CallGrammar, Want, grammar};

use crate::errors::{ApiError, excerpt};
use crate::grammar::AnswerGrammar;
use crate::limits::{IGNORED_FIELDS_MAX, TOOLS_BYTES_MAX, TOOLS_MAX};
use crate::template::template_uses;

/// Fields of a function that a model is told of.
const TOLD: &[&str] = &["name", "description", "parameters"];

/// What a model may call.
#[derive(Clone, Debug)]
pub(crate) struct Offer {
    /// The tools, as chat templates read them: `{"type": "function", "function": {…}}` each.
    pub(crate) definitions: Arc<Value>,
    /// Which of the tools' calls must fit their schemas, in the same order.
    pub(crate) strict: Vec<bool>,
    /// The place of each tool in the request's list, which may have others that are not offered.
    places: Vec<usize>,
    /// Whether the model must call.
    pub(crate) choice: ToolChoice,
    /// Calls of one answer, at most.
    pub(crate) calls_max: Option<usize>,
}

/// Whether a model must call a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// The model must not call.
    None,
    /// The model decides.
    Auto,
    /// The model must call some tool.
    Required,
    /// The model must call the tool of this name.
    Named(String),
}

/// Fields of a request that offer tools, by which errors name what is wrong.
#[derive(Debug)]
pub(crate) struct OfferFields {
    /// The list of tools.
    pub(crate) tools: &'static str,
    /// Path of the function inside a tool, with its dot; empty where a tool is one.
    pub(crate) function: &'static str,
    /// Whether the model must call.
    pub(crate) choice: &'static str,
}

/// An offer that is being read, tool by tool.
pub(crate) struct Offering<'a> {
    text: &'a Text,
    names: Vec<&'a str>,
    definitions: Vec<Value>,
    strict: Vec<bool>,
    places: Vec<usize>,
    n_skipped: usize,
    /// Paths of fields that change nothing.
    pub(crate) ignored: Vec<String>,
}

impl<'a> Offering<'a> {
    /// An offer of `n` tools, which stand in the field `field`, to a model that reads `text`.
    ///
    /// # Errors
    ///
    /// 400 for too many tools, and for a model that knows none.
    pub(crate) fn new(text: &'a Text, n: usize, field: &str) -> Result<Self, ApiError> {
        if n > TOOLS_MAX {
            let message = format!("has {n} tools, {TOOLS_MAX} at most");
            return Err(ApiError::field(field, message));
        }
        if text.tools.is_none() {
            let message = "cannot be offered to this model: its chat template knows no tools";
            return Err(ApiError::field(field, message));
        }
        Ok(Offering {
            text,
            names: Vec::new(),
            definitions: Vec::new(),
            strict: Vec::new(),
            places: Vec::new(),
            n_skipped: 0,
            ignored: Vec::new(),
        })
    }

    /// Passes over the next tool of the request's list: it is not offered.
    pub(crate) fn skip(&mut self) {
        self.n_skipped += 1;
    }

    /// Adds the function at `path`: an object with `name`, `description`, `parameters` and
    /// `strict`.
    ///
    /// # Errors
    ///
    /// 400 for a function that is malformed, or named like an earlier one.
    pub(crate) fn add(&mut self, path: &str, function: &'a Value) -> Result<(), ApiError> {
        let at = |name: &str| format!("{path}.{name}");
        let Some(function) = function.as_object() else {
            return Err(ApiError::field(path, "must be an object"));
        };
        let field = |name: &str| function.get(name).filter(|value| !value.is_null());
        let name = match field("name") {
            Some(Value::String(name)) if text::tools::is_tool_name(name) => name,
            Some(Value::String(name)) => {
                let message = format!(
                    "must have 1 to {NAME_BYTES_MAX} bytes, without white space, quotes and brackets: `{}`",
                    excerpt(name)
                );
                return Err(ApiError::field(at("name"), message));
            }
            Some(_) => return Err(ApiError::field(at("name"), "must be a string")),
            None => return Err(ApiError::field(at("name"), "is missing")),
        };
        if field("description").is_some_and(|text| !text.is_string()) {
            return Err(ApiError::field(at("description"), "must be a string"));
        }
        if field("parameters").is_some_and(|schema| !schema.is_object()) {
            return Err(ApiError::field(at("parameters"), "must be an object"));
        }
        let is_strict = match field("strict") {
            None => false,
            Some(Value::Bool(is_strict)) => *is_strict,
            Some(_) => return Err(ApiError::field(at("strict"), "must be true or false")),
        };
        if self.names.contains(&name.as_str()) {
            let message = format!("is the name of an earlier tool: `{}`", excerpt(name));
            return Err(ApiError::field(at("name"), message));
        }
        let mut told = Map::new();
        for (name, value) in function.iter().filter(|(_, value)| !value.is_null()) {
            // A template that writes whole definitions would show the model what it never saw.
            // More unknown names than are listed are not looked at.
            let is_known = TOLD.contains(&name.as_str());
            let may_ask = self.ignored.len() < IGNORED_FIELDS_MAX && name != "strict";
            if is_known || (may_ask && template_uses(self.text, name)) {
                told.insert(name.clone(), value.clone());
            } else if may_ask {
                self.ignored.push(at(name));
            }
        }
        self.places.push(self.names.len() + self.n_skipped);
        self.names.push(name);
        self.definitions
            .push(json!({"type": "function", "function": told}));
        self.strict.push(is_strict);
        Ok(())
    }

    /// The offer with its `choice`, and the paths of fields that change nothing.
    ///
    /// # Errors
    ///
    /// 400 for a choice of a tool that is not there, and for too many bytes.
    pub(crate) fn finish(
        self,
        choice: ToolChoice,
        fields: &OfferFields,
    ) -> Result<(Offer, Vec<String>), ApiError> {
        if let ToolChoice::Named(asked) = &choice
            && !self.names.contains(&asked.as_str())
        {
            let message = format!(
                "names a tool that `{}` does not have: `{}`",
                fields.tools,
                excerpt(asked)
            );
            return Err(ApiError::field(fields.choice, message));
        }
        let definitions = Value::Array(self.definitions);
        let bytes = definitions.to_string().len();
        if bytes > TOOLS_BYTES_MAX {
            let message = format!("has {bytes} bytes of JSON, {TOOLS_BYTES_MAX} at most");
            return Err(ApiError::field(fields.tools, message));
        }
        let offer = Offer {
            definitions: Arc::new(definitions),
            strict: self.strict,
            places: self.places,
            choice,
            calls_max: None,
        };
        Ok((offer, self.ignored))
    }
}

/// What an answer has to follow so that calls come where they must and fit their schemas: the
/// grammar of the calls, and of `answer` where the model may answer instead.
///
/// # Errors
///
/// 400 for a schema that calls of this model cannot be held to, and for calls that must come
/// beside an answer that must follow something else.
pub(crate) fn hold(
    offer: &Offer,
    fields: &OfferFields,
    answer: Option<AnswerGrammar>,
    text: &Text,
) -> Result<Option<AnswerGrammar>, ApiError> {
    let choice = fields.choice;
    let strict = offer.strict.iter().position(|&is_strict| is_strict);
    let (field, want) = match (&offer.choice, strict, &answer) {
        (ToolChoice::Required, ..) => (choice.to_owned(), Want::Required),
        (ToolChoice::Named(name), ..) => (choice.to_owned(), Want::Named(name)),
        // Free text follows no grammar, so calls beside an answer that does are all held.
        (_, _, Some(answer)) => (answer.field.clone(), Want::Required),
        (_, Some(i), None) => {
            let place = offer.places[i];
            let path = format!("{}[{place}]{}.strict", fields.tools, fields.function);
            (path, Want::Strict(&offer.strict))
        }
        (_, None, None) => return Ok(None),
    };
    if let (ToolChoice::Required | ToolChoice::Named(_), Some(answer)) = (&offer.choice, &answer) {
        let message = format!("asks for calls, and `{choice}` leaves no room for an answer");
        return Err(ApiError::field(answer.field.clone(), message));
    }
    let Some(format) = &text.tools else {
        return Ok(answer);
    };
    let calls = grammar(format, &offer.definitions, want, offer.calls_max);
    let CallGrammar { lark, mut schemas } = calls
        .map_err(|error| ApiError::field(field.clone(), format!("cannot be kept: {error}")))?;
    let lark = match answer.map(|answer| answer.spec) {
        None => lark,
        Some(spec) => {
            let schema = match spec {
                GrammarSpec::JsonSchema(schema) => schema,
                GrammarSpec::JsonObject => json!({"type": "object"}),
                _ => {
                    let message = "cannot be combined with `tools`; only JSON can";
                    return Err(ApiError::field(field, message));
                }
            };
            schemas.push(("answer".to_owned(), schema));
            format!(
                "start: @answer | calls\n{}",
                lark.replacen("start:", "calls:", 1)
            )
        }
    };
    let spec = GrammarSpec::LarkWithSchemas { lark, schemas };
    Ok(Some(AnswerGrammar { field, spec }))
}
