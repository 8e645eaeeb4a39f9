//! Tools: what a chat request says of them, and how calls are spelled in the answer.
//!
//! `functions` and `function_call` are the older names of `tools` and `tool_choice`; who asks
//! by them is answered by them, with one call at most.

use std::sync::Arc;

use engine::GrammarSpec;
use serde::Serialize;
use serde_json::{Map, Value, json};
use text::Text;
use text::tools::NAME_BYTES_MAX;
use text::tools::grammar::{CallGrammar, Want, grammar};

use super::messages::template_uses;
use crate::App;
use crate::errors::{ApiError, excerpt};
use crate::fields::Fields;
use crate::generation::Call;
use crate::limits::{IGNORED_FIELDS_MAX, TOOLS_BYTES_MAX, TOOLS_MAX};
use crate::offer::{Offer, ToolChoice};
use crate::options::AnswerGrammar;

const TOOLS: &str = "tools";
const FUNCTIONS: &str = "functions";
/// The only type of tool that a model can be offered.
const FUNCTION: &str = "function";
/// Fields of a function that a model is told of.
const TOLD: &[&str] = &["name", "description", "parameters"];

/// How calls are spelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// `tool_calls`, a list.
    Tools,
    /// `function_call`, one.
    Functions,
}

/// Reads what a request offers the model to call, if it offers anything, and how calls are to
/// be spelled.
///
/// # Errors
///
/// 400 for an offer that is malformed or not supported.
pub(super) fn read(fields: &Fields<'_>, app: &App) -> Result<(Option<Offer>, Spelling), ApiError> {
    let tools = choice(fields, "tool_choice")?;
    let functions = choice(fields, "function_call")?;
    let parallel = fields.bool("parallel_tool_calls")?.unwrap_or(true);
    // What is offered and declined changes nothing: it is named as ignored.
    let tools = (tools != Some(ToolChoice::None)).then_some(tools);
    let functions = (functions != Some(ToolChoice::None)).then_some(functions);
    let mut read = None;
    for (name, choice, spelling) in [
        (TOOLS, tools, Spelling::Tools),
        (FUNCTIONS, functions, Spelling::Functions),
    ] {
        let Some(choice) = choice else { continue };
        let found = offer(fields, app, name, choice.unwrap_or(ToolChoice::Auto))?;
        if found.is_some() && read.is_some() {
            let message = "is the older name of `tools`; send one of the two";
            return Err(fields.error(name, message));
        }
        read = found.map(|offer| (offer, spelling)).or(read);
    }
    let Some((mut offer, spelling)) = read else {
        return Ok((None, Spelling::Tools));
    };
    if !parallel || spelling == Spelling::Functions {
        offer.calls_max = Some(1);
    }
    Ok((Some(offer), spelling))
}

/// What an answer has to follow so that calls come where they must and fit their schemas: the
/// grammar of the calls, and of `answer` where the model may answer instead.
///
/// # Errors
///
/// 400 for a schema that calls of this model cannot be held to, and for calls that must come
/// beside an answer that must follow something else.
pub(super) fn hold(
    offer: &Offer,
    spelling: Spelling,
    answer: Option<AnswerGrammar>,
    text: &Text,
) -> Result<Option<AnswerGrammar>, ApiError> {
    let [choice, tools] = match spelling {
        Spelling::Tools => ["tool_choice", TOOLS],
        Spelling::Functions => ["function_call", FUNCTIONS],
    };
    let strict = offer.strict.iter().position(|&is_strict| is_strict);
    let (field, want) = match (&offer.choice, strict, &answer) {
        (ToolChoice::Required, ..) => (choice.to_owned(), Want::Required),
        (ToolChoice::Named(name), ..) => (choice.to_owned(), Want::Named(name)),
        // Free text follows no grammar, so calls beside an answer that does are all held.
        (_, _, Some(answer)) => (answer.field.clone(), Want::Required),
        (_, Some(i), None) => {
            let inner = if tools == TOOLS { ".function" } else { "" };
            let path = format!("{tools}[{i}]{inner}.strict");
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

/// Reads which calls must be made.
fn choice(fields: &Fields<'_>, name: &'static str) -> Result<Option<ToolChoice>, ApiError> {
    let wrong = || {
        let named = match name {
            "tool_choice" => r#"{"type": "function", "function": {"name": NAME}}"#,
            _ => r#"{"name": NAME}"#,
        };
        fields.error(
            name,
            format!("must be \"none\", \"auto\", \"required\" or {named}"),
        )
    };
    let Some(value) = fields.get(name) else {
        return Ok(None);
    };
    let choice = match value {
        Value::String(word) => match word.as_str() {
            "none" => ToolChoice::None,
            "auto" => ToolChoice::Auto,
            "required" if name == "tool_choice" => ToolChoice::Required,
            _ => return Err(wrong()),
        },
        Value::Object(map) => {
            let is_typed = map.get("type").is_none_or(|kind| kind == FUNCTION);
            let function = map.get("function").and_then(Value::as_object);
            let named = function.unwrap_or(map).get("name").and_then(Value::as_str);
            match named.filter(|_| is_typed) {
                Some(named) => ToolChoice::Named(named.to_owned()),
                None => return Err(wrong()),
            }
        }
        _ => return Err(wrong()),
    };
    Ok(Some(choice))
}

/// Reads the tools in the field `name`; nothing if there are none.
fn offer(
    fields: &Fields<'_>,
    app: &App,
    name: &'static str,
    choice: ToolChoice,
) -> Result<Option<Offer>, ApiError> {
    let list = match fields.get(name) {
        None => &[],
        Some(Value::Array(list)) => list.as_slice(),
        Some(_) => return Err(fields.error(name, "must be a list")),
    };
    if list.is_empty() {
        return match choice {
            ToolChoice::None | ToolChoice::Auto => Ok(None),
            ToolChoice::Required | ToolChoice::Named(_) => {
                let field = if name == TOOLS {
                    "tool_choice"
                } else {
                    "function_call"
                };
                Err(fields.error(field, format!("needs `{name}`, and there are none")))
            }
        };
    }
    if list.len() > TOOLS_MAX {
        let message = format!("has {} tools, {TOOLS_MAX} at most", list.len());
        return Err(fields.error(name, message));
    }
    if app.engine.text().tools.is_none() {
        let message = "cannot be offered to this model: its chat template knows no tools";
        return Err(fields.error(name, message));
    }
    let mut names: Vec<&str> = Vec::new();
    let mut ignored = Vec::new();
    let (mut definitions, mut strict) = (Vec::new(), Vec::new());
    for (i, tool) in list.iter().enumerate() {
        let path = format!("{name}[{i}]");
        let (path, function) = match name {
            TOOLS => (
                format!("{path}.function"),
                function_of(&path, tool, &mut ignored)?,
            ),
            _ => (path, tool),
        };
        let (definition, is_strict) = definition(app, &path, function, &mut ignored)?;
        let own = function["name"].as_str().unwrap_or_default();
        if names.contains(&own) {
            let message = format!("is the name of an earlier tool: `{}`", excerpt(own));
            return Err(ApiError::field(format!("{path}.name"), message));
        }
        names.push(own);
        definitions.push(definition);
        strict.push(is_strict);
    }
    fields.note_ignored(ignored);
    if let ToolChoice::Named(asked) = &choice
        && !names.contains(&asked.as_str())
    {
        let field = if name == TOOLS {
            "tool_choice"
        } else {
            "function_call"
        };
        let message = format!(
            "names a tool that `{name}` does not have: `{}`",
            excerpt(asked)
        );
        return Err(fields.error(field, message));
    }
    let definitions = Value::Array(definitions);
    let bytes = definitions.to_string().len();
    if bytes > TOOLS_BYTES_MAX {
        let message = format!("has {bytes} bytes of JSON, {TOOLS_BYTES_MAX} at most");
        return Err(fields.error(name, message));
    }
    Ok(Some(Offer {
        definitions: Arc::new(definitions),
        strict,
        choice,
        calls_max: None,
    }))
}

/// The function of a tool.
fn function_of<'a>(
    path: &str,
    tool: &'a Value,
    ignored: &mut Vec<String>,
) -> Result<&'a Value, ApiError> {
    let Some(tool) = tool.as_object() else {
        return Err(ApiError::field(path, "must be an object"));
    };
    match tool.get("type") {
        Some(Value::String(kind)) if kind == FUNCTION => {}
        Some(Value::String(kind)) => {
            let hint = format!(
                " (it is of type `{}`, and only functions can be called)",
                excerpt(kind)
            );
            return Err(ApiError::unsupported(format!("{path}.type"), &hint));
        }
        None | Some(Value::Null) => {
            return Err(ApiError::field(format!("{path}.type"), "is missing"));
        }
        Some(_) => return Err(ApiError::field(format!("{path}.type"), "must be a string")),
    }
    let others = tool.keys().filter(|key| *key != "type" && *key != FUNCTION);
    let left = IGNORED_FIELDS_MAX.saturating_sub(ignored.len());
    ignored.extend(others.take(left).map(|key| format!("{path}.{key}")));
    match tool.get(FUNCTION) {
        Some(function) => Ok(function),
        None => Err(ApiError::field(format!("{path}.function"), "is missing")),
    }
}

/// What a model is told of a function, and whether its calls must fit its schema.
fn definition(
    app: &App,
    path: &str,
    function: &Value,
    ignored: &mut Vec<String>,
) -> Result<(Value, bool), ApiError> {
    let at = |name: &str| format!("{path}.{name}");
    let Some(function) = function.as_object() else {
        return Err(ApiError::field(path, "must be an object"));
    };
    let field = |name: &str| function.get(name).filter(|value| !value.is_null());
    match field("name") {
        Some(Value::String(name)) if text::tools::is_tool_name(name) => {}
        Some(Value::String(name)) => {
            let message = format!(
                "must have 1 to {NAME_BYTES_MAX} bytes, without white space, quotes and brackets: `{}`",
                excerpt(name)
            );
            return Err(ApiError::field(at("name"), message));
        }
        Some(_) => return Err(ApiError::field(at("name"), "must be a string")),
        None => return Err(ApiError::field(at("name"), "is missing")),
    }
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
    let mut told = Map::new();
    for (name, value) in function.iter().filter(|(_, value)| !value.is_null()) {
        // A template that writes whole definitions would show the model what it never saw. More
        // unknown names than are listed are not looked at.
        let is_known = TOLD.contains(&name.as_str());
        let may_ask = ignored.len() < IGNORED_FIELDS_MAX && name != "strict";
        if is_known || (may_ask && template_uses(app.engine.text(), name)) {
            told.insert(name.clone(), value.clone());
        } else if may_ask {
            ignored.push(at(name));
        }
    }
    Ok((json!({"type": FUNCTION, "function": told}), is_strict))
}

/// A call in a whole answer.
#[derive(Serialize)]
pub(super) struct ToolCall<'a> {
    id: &'a str,
    r#type: &'static str,
    function: Function<'a>,
}

/// The function that is called.
#[derive(Serialize)]
pub(super) struct Function<'a> {
    name: &'a str,
    arguments: &'a str,
}

/// The calls of a whole answer, each in the field for it.
#[derive(Serialize)]
pub(super) struct Calls<'a> {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    function_call: Option<Function<'a>>,
}

impl<'a> Calls<'a> {
    pub(super) fn new(calls: &'a [Call<'a>], spelling: Spelling) -> Self {
        let mut functions = calls.iter().map(|call| Function {
            name: call.name,
            arguments: &call.arguments,
        });
        match spelling {
            Spelling::Functions => Calls {
                tool_calls: Vec::new(),
                function_call: functions.next(),
            },
            Spelling::Tools => Calls {
                tool_calls: calls
                    .iter()
                    .zip(functions)
                    .map(|(call, function)| ToolCall {
                        id: call.id,
                        r#type: FUNCTION,
                        function,
                    })
                    .collect(),
                function_call: None,
            },
        }
    }
}

/// What a chunk of a stream says of calls.
#[derive(Default, Serialize)]
pub(super) struct CallDeltas<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[CallDelta<'a>; 1]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    function_call: Option<FunctionDelta<'a>>,
}

#[derive(Serialize)]
struct CallDelta<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: FunctionDelta<'a>,
}

#[derive(Serialize)]
struct FunctionDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

impl<'a> CallDeltas<'a> {
    /// Call `index` begins: its id and its name, which no later chunk repeats.
    pub(super) fn begin(index: usize, id: &'a str, name: &'a str, spelling: Spelling) -> Self {
        Self::new(index, Some(id), Some(name), "", spelling)
    }

    /// The next piece of the arguments of call `index`.
    pub(super) fn arguments(index: usize, arguments: &'a str, spelling: Spelling) -> Self {
        Self::new(index, None, None, arguments, spelling)
    }

    fn new(
        index: usize,
        id: Option<&'a str>,
        name: Option<&'a str>,
        arguments: &'a str,
        spelling: Spelling,
    ) -> Self {
        let function = FunctionDelta { name, arguments };
        match spelling {
            Spelling::Functions => CallDeltas {
                tool_calls: None,
                function_call: Some(function),
            },
            Spelling::Tools => CallDeltas {
                tool_calls: Some([CallDelta {
                    index,
                    id,
                    r#type: id.map(|_| FUNCTION),
                    function,
                }]),
                function_call: None,
            },
        }
    }
}
