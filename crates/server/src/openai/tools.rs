//! Tools: what a chat request says of them, and how calls are spelled in the answer.
//!
//! `functions` and `function_call` are the older names of `tools` and `tool_choice`; who asks
//! by them is answered by them, with one call at most.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::app::App;
use crate::errors::{ApiError, excerpt};
use crate::fields::Fields;
use crate::generation::Call;
use crate::limits::IGNORED_FIELDS_MAX;
use crate::offer::{Offer, OfferFields, Offering, ToolChoice};

const TOOLS: &str = "tools";
const FUNCTIONS: &str = "functions";
/// The only type of tool that a model can be offered.
const FUNCTION: &str = "function";
/// How calls are spelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spelling {
    /// `tool_calls`, a list.
    Tools,
    /// `function_call`, one.
    Functions,
}

impl Spelling {
    /// The fields of requests that are answered by this spelling.
    pub(crate) fn fields(self) -> &'static OfferFields {
        match self {
            Spelling::Tools => &OfferFields {
                tools: TOOLS,
                function: ".function",
                choice: "tool_choice",
            },
            Spelling::Functions => &OfferFields {
                tools: FUNCTIONS,
                function: "",
                choice: "function_call",
            },
        }
    }
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

/// The fields that offer tools by the name `name`.
fn fields_of(name: &str) -> &'static OfferFields {
    match name {
        TOOLS => Spelling::Tools.fields(),
        _ => Spelling::Functions.fields(),
    }
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
            let Some(named) = named.filter(|_| is_typed) else {
                return Err(wrong());
            };
            let is_other = |key: &&String| !["type", FUNCTION, "name"].contains(&key.as_str());
            let others = map
                .keys()
                .filter(is_other)
                .map(|key| format!("{name}.{key}"));
            let inner = function.into_iter().flat_map(Map::keys);
            let inner = inner.filter(|key| *key != "name");
            let inner = inner.map(|key| format!("{name}.{FUNCTION}.{key}"));
            fields.note_ignored(others.chain(inner).take(IGNORED_FIELDS_MAX));
            ToolChoice::Named(named.to_owned())
        }
        _ => return Err(wrong()),
    };
    Ok(Some(choice))
}

/// Reads the tools in the field `name`; nothing if there are none.
///
/// # Errors
///
/// 400 for an offer that is malformed or not supported.
pub(crate) fn offer(
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
                let message = format!("needs `{name}`, and there are none");
                Err(fields.error(fields_of(name).choice, message))
            }
        };
    }
    let mut offering = Offering::new(app.engine.text(), list.len(), name)?;
    for (i, tool) in list.iter().enumerate() {
        let path = format!("{name}[{i}]");
        match name {
            TOOLS => {
                let function = function_of(&path, tool, &mut offering.ignored)?;
                offering.add(&format!("{path}.function"), function)?;
            }
            _ => offering.add(&path, tool)?,
        }
    }
    let (offer, ignored) = offering.finish(choice, fields_of(name))?;
    fields.note_ignored(ignored);
    Ok(Some(offer))
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
