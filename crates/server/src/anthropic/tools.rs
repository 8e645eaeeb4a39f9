//! Tools: what a request says of them.

use serde_json::{Map, Value};

use crate::app::App;
use crate::errors::{ApiError, excerpt};
use crate::fields::Fields;
use crate::offer::{Offer, OfferFields, Offering, ToolChoice};

const TOOLS: &str = "tools";
const CHOICE: &str = "tool_choice";
/// Where the schema of a tool's input stands, and where the other dialects have it.
const SCHEMA: &str = "input_schema";
const PARAMETERS: &str = "parameters";

/// The fields that offer tools.
pub(super) const FIELDS: &OfferFields = &OfferFields {
    tools: TOOLS,
    function: "",
    choice: CHOICE,
};

/// Reads what a request offers the model to call, if it offers anything.
///
/// # Errors
///
/// 400 for an offer that is malformed or not supported.
pub(super) fn read(fields: &Fields<'_>, app: &App) -> Result<Option<Offer>, ApiError> {
    let (choice, is_single) = choice(fields)?;
    // What is offered and declined changes nothing: it is named as ignored.
    if choice == ToolChoice::None {
        return Ok(None);
    }
    let list = match fields.get(TOOLS) {
        None => &[],
        Some(Value::Array(list)) => list.as_slice(),
        Some(_) => return Err(fields.error(TOOLS, "must be a list")),
    };
    if list.is_empty() {
        return match choice {
            ToolChoice::Required | ToolChoice::Named(_) => {
                Err(fields.error(CHOICE, "needs `tools`, and there are none"))
            }
            ToolChoice::None | ToolChoice::Auto => Ok(None),
        };
    }
    // The number and the model are checked before anything is copied.
    let mut offering = Offering::new(app.engine.text(), list.len(), TOOLS)?;
    let path = |i: usize| format!("{TOOLS}[{i}]");
    let functions = list.iter().enumerate();
    let functions = functions.map(|(i, tool)| function(&path(i), tool));
    let functions: Vec<Value> = functions.collect::<Result<_, _>>()?;
    for (i, function) in functions.iter().enumerate() {
        offering.add(&path(i), function)?;
    }
    let (mut offer, ignored) = offering.finish(choice, FIELDS)?;
    fields.note_ignored(ignored);
    if is_single {
        offer.calls_max = Some(1);
    }
    Ok(Some(offer))
}

/// The tool at `path` as a function under the names that other dialects have.
///
/// Tools without a schema are those that Anthropic's servers run (`web_search_20250305`) or that
/// its models know by heart (`bash_20250124`). No model here can be told of them, and an answer
/// that is written as if they were not there would not be the one that was asked for. So they
/// are refused; clients that send them let their users turn them off.
fn function(path: &str, tool: &Value) -> Result<Value, ApiError> {
    let at = |name: &str| format!("{path}.{name}");
    let Some(tool) = tool.as_object() else {
        return Err(ApiError::field(path, "must be an object"));
    };
    let kind = match tool.get("type") {
        None | Some(Value::Null) => "custom",
        Some(Value::String(kind)) => kind,
        Some(_) => return Err(ApiError::field(at("type"), "must be a string")),
    };
    match tool.get(SCHEMA) {
        Some(Value::Object(_)) => {}
        None | Some(Value::Null) if kind == "custom" => {
            return Err(ApiError::field(at(SCHEMA), "is missing"));
        }
        None | Some(Value::Null) => {
            let kind = excerpt(kind);
            let hint = format!(
                " (it is of type `{kind}`, which has no `{SCHEMA}` that a model could be told)"
            );
            return Err(ApiError::unsupported(path, &hint));
        }
        Some(_) => return Err(ApiError::field(at(SCHEMA), "must be an object")),
    }
    let function = tool.iter().filter_map(|(name, value)| match name.as_str() {
        "type" | "cache_control" => None,
        SCHEMA => Some((PARAMETERS.to_owned(), value.clone())),
        // It would stand beside the schema under the same name.
        PARAMETERS => None,
        name => Some((name.to_owned(), value.clone())),
    });
    Ok(Value::Object(function.collect::<Map<_, _>>()))
}

/// Reads which calls must be made, and whether there may be one at most.
fn choice(fields: &Fields<'_>) -> Result<(ToolChoice, bool), ApiError> {
    let Some(map) = fields.object(CHOICE)? else {
        return Ok((ToolChoice::Auto, false));
    };
    let inner = fields.inside(map, "tool_choice.");
    let is_single = inner.bool("disable_parallel_tool_use")?.unwrap_or(false);
    let name = inner.string("name")?;
    let choice = match (inner.string("type")?, name) {
        (Some("auto"), _) => ToolChoice::Auto,
        (Some("any"), _) => ToolChoice::Required,
        (Some("none"), _) => ToolChoice::None,
        (Some("tool"), Some(name)) => ToolChoice::Named(name.to_owned()),
        (Some("tool"), None) => return Err(inner.error("name", "is missing")),
        _ => return Err(inner.error("type", "must be one of auto, any, tool, none")),
    };
    fields.note_ignored(inner.ignored());
    Ok((choice, is_single))
}
