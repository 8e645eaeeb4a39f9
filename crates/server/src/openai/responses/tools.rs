//! What a request to the Responses API says of tools: the API's own form of them.
//!
//! A tool that is no function runs on other servers, not here. Agents send such tools whether
//! or not they are of use, so these are passed over and named as ignored.

use serde_json::{Map, Value, json};

use crate::app::App;
use crate::errors::{ApiError, excerpt};
use crate::fields::Fields;
use crate::limits::{IGNORED_FIELDS_MAX, TOOLS_MAX};
use crate::offer::{Offer, OfferFields, Offering, ToolChoice};

const TOOLS: &str = "tools";
const CHOICE: &str = "tool_choice";
/// The only type of tool that a model can be offered.
const FUNCTION: &str = "function";

/// The names of the fields that offer tools.
pub(super) const FIELDS: &OfferFields = &OfferFields {
    tools: TOOLS,
    function: "",
    choice: CHOICE,
};

/// What a request says of tools.
pub(super) struct Asked<'a> {
    /// What the model may call.
    pub(super) offer: Option<Offer>,
    /// The functions of `tools`, for the response to repeat.
    pub(super) functions: Vec<Value>,
    /// The field `tool_choice`, for the response to repeat.
    pub(super) choice: Option<&'a Value>,
    /// Whether several calls may come in one answer.
    pub(super) parallel: bool,
    /// Calls of one answer, at most.
    pub(super) calls_max: Option<usize>,
}

/// Which of the tools may be called, and whether one must be.
struct Choice<'a> {
    tool: ToolChoice,
    /// The names of the only tools that may be called.
    allowed: Option<Vec<&'a str>>,
}

/// Reads what a request offers the model to call.
///
/// # Errors
///
/// 400 for an offer that is malformed or not supported.
pub(super) fn read<'a>(fields: &Fields<'a>, app: &App) -> Result<Asked<'a>, ApiError> {
    let value = fields.get(CHOICE);
    let choice = match value {
        Some(value) => choice(fields, value)?,
        None => Choice {
            tool: ToolChoice::Auto,
            allowed: None,
        },
    };
    let parallel = fields.bool("parallel_tool_calls")?.unwrap_or(true);
    let calls_max = fields.integer("max_tool_calls", 1..=i64::from(u32::MAX))?;
    let calls_max = calls_max.map(|n| n as usize);
    let list = match fields.get(TOOLS) {
        None => &[],
        Some(Value::Array(list)) => list.as_slice(),
        Some(_) => return Err(fields.error(TOOLS, "must be a list")),
    };
    let functions = list
        .iter()
        .enumerate()
        .map(|(i, tool)| function_of(i, tool));
    let functions: Vec<Option<Value>> = functions.collect::<Result<_, _>>()?;
    let mut offer = offer(fields, app, &functions, &choice)?;
    if let Some(offer) = &mut offer {
        offer.calls_max = match parallel {
            true => calls_max,
            false => Some(1),
        };
    }
    Ok(Asked {
        offer,
        functions: functions.iter().flatten().map(spell).collect(),
        choice: value,
        parallel,
        calls_max,
    })
}

/// The tool in place `i` without its type, if it is a function.
fn function_of(i: usize, tool: &Value) -> Result<Option<Value>, ApiError> {
    let Some(tool) = tool.as_object() else {
        return Err(ApiError::field(
            format!("{TOOLS}[{i}]"),
            "must be an object",
        ));
    };
    let kind = match tool.get("type") {
        Some(Value::String(kind)) => kind,
        None | Some(Value::Null) => {
            return Err(ApiError::field(format!("{TOOLS}[{i}].type"), "is missing"));
        }
        Some(_) => {
            let at = format!("{TOOLS}[{i}].type");
            return Err(ApiError::field(at, "must be a string"));
        }
    };
    let of_function = || {
        let mut function = tool.clone();
        function.remove("type");
        Value::Object(function)
    };
    Ok((kind == FUNCTION).then(of_function))
}

/// A function as responses repeat it.
fn spell(tool: &Value) -> Value {
    let field = |name: &str| tool.get(name).cloned().unwrap_or_default();
    json!({
        "type": FUNCTION,
        "name": field("name"),
        "description": field("description"),
        "parameters": field("parameters"),
        "strict": tool["strict"].as_bool().unwrap_or(false),
    })
}

/// The offer of those `functions` that `choice` allows; nothing if there are none, or if all are
/// declined. Tools that are no functions have an empty place among them.
fn offer(
    fields: &Fields<'_>,
    app: &App,
    functions: &[Option<Value>],
    choice: &Choice<'_>,
) -> Result<Option<Offer>, ApiError> {
    let places = functions.iter().enumerate();
    let others = places.filter(|(_, function)| function.is_none());
    let others = others.take(IGNORED_FIELDS_MAX);
    fields.note_ignored(others.map(|(i, _)| format!("{TOOLS}[{i}]")));
    if choice.tool == ToolChoice::None {
        // What is offered and declined changes nothing.
        let declined = functions.iter().flatten().take(1);
        fields.note_ignored(declined.map(|_| TOOLS.to_owned()));
        return Ok(None);
    }
    let is_allowed = |function: &Value| match &choice.allowed {
        None => true,
        Some(allowed) => allowed.iter().any(|name| function["name"] == *name),
    };
    let n = functions.iter().flatten().filter(|f| is_allowed(f)).count();
    if n == 0 && choice.allowed.as_ref().is_none_or(Vec::is_empty) {
        return match choice.tool {
            ToolChoice::None | ToolChoice::Auto => Ok(None),
            ToolChoice::Required | ToolChoice::Named(_) => {
                let message = format!("needs a function in `{TOOLS}`, and there is none");
                Err(fields.error(CHOICE, message))
            }
        };
    }
    let mut offering = Offering::new(app.engine.text(), n, TOOLS)?;
    let mut missing: Vec<&str> = choice.allowed.clone().unwrap_or_default();
    for (i, function) in functions.iter().enumerate() {
        match function {
            Some(function) if is_allowed(function) => {
                missing.retain(|allowed| function["name"] != *allowed);
                offering.add(&format!("{TOOLS}[{i}]"), function)?;
            }
            _ => offering.skip(),
        }
    }
    if let Some(name) = missing.first() {
        let message = format!(
            "allows a function that `{TOOLS}` does not have: `{}`",
            excerpt(name)
        );
        return Err(fields.error(CHOICE, message));
    }
    let (offer, ignored) = offering.finish(choice.tool.clone(), FIELDS)?;
    fields.note_ignored(ignored);
    Ok(Some(offer))
}

/// Reads which calls must be made, and which may be.
fn choice<'a>(fields: &Fields<'_>, value: &'a Value) -> Result<Choice<'a>, ApiError> {
    let of = |tool| {
        Ok(Choice {
            tool,
            allowed: None,
        })
    };
    let wrong = || {
        let message = "must be \"none\", \"auto\", \"required\", {\"type\": \"function\", \"name\": NAME} \
                       or {\"type\": \"allowed_tools\", \"mode\": MODE, \"tools\": LIST}";
        fields.error(CHOICE, message)
    };
    match value {
        Value::String(word) => match word.as_str() {
            "none" => of(ToolChoice::None),
            "auto" => of(ToolChoice::Auto),
            "required" => of(ToolChoice::Required),
            _ => Err(wrong()),
        },
        Value::Object(map) => {
            let name = map.get("name").and_then(Value::as_str);
            match (map.get("type").and_then(Value::as_str), name) {
                (Some(FUNCTION), Some(name)) => of(ToolChoice::Named(name.to_owned())),
                (Some("allowed_tools"), _) => allowed(map).ok_or_else(wrong),
                (Some(FUNCTION) | None, _) => Err(wrong()),
                (Some(kind), _) => {
                    let hint = format!(
                        " (it is of type `{}`, and only functions can be called)",
                        excerpt(kind)
                    );
                    Err(ApiError::unsupported(format!("{CHOICE}.type"), &hint))
                }
            }
        }
        _ => Err(wrong()),
    }
}

/// Reads a choice among some of the tools.
fn allowed(map: &Map<String, Value>) -> Option<Choice<'_>> {
    let tool = match map.get("mode").and_then(Value::as_str) {
        Some("auto") => ToolChoice::Auto,
        Some("required") => ToolChoice::Required,
        _ => return None,
    };
    let mut allowed = Vec::new();
    let list = map.get("tools")?.as_array()?;
    for tool in list.iter().take(TOOLS_MAX) {
        // Tools that are no functions are offered to no model.
        if tool.get("type")?.as_str()? == FUNCTION {
            allowed.push(tool.get("name")?.as_str()?);
        }
    }
    Some(Choice {
        tool,
        allowed: Some(allowed),
    })
}
