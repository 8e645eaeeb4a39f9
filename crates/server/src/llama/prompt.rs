//! Prompts, in all the forms that llama-server reads.

use serde_json::{Map, Value};
use text::Infill;

use super::media;
use crate::errors::ApiError;
use crate::limits::PROMPTS_MAX;
use crate::openai::completions::tokens;
use crate::request::Prompt;

const NAME: &str = "prompt";
const EXTRA: &str = "input_extra";

/// The prompt or prompts of a completion.
///
/// # Errors
///
/// 400 for a prompt of no such form.
pub(super) fn read(prompt: Value) -> Result<Prompt, ApiError> {
    let several = read_all(NAME, prompt, |n| match n > PROMPTS_MAX {
        true => {
            let message = format!("has {n} prompts, {PROMPTS_MAX} at most");
            Err(ApiError::field(NAME, message))
        }
        false => Ok(()),
    })?;
    Ok(match <[Prompt; 1]>::try_from(several) {
        Ok([one]) => one,
        Err(several) => Prompt::Several(several),
    })
}

/// The prompts in the field `name`: one, or a list of as many as `check` allows.
///
/// # Errors
///
/// As [`read`].
pub(super) fn read_all(
    name: &str,
    prompts: Value,
    check: impl Fn(usize) -> Result<(), ApiError>,
) -> Result<Vec<Prompt>, ApiError> {
    let list = match prompts {
        Value::Array(list) if !is_one(&list) => list,
        one => return Ok(vec![read_one(name, one)?]),
    };
    if list.is_empty() {
        return Err(ApiError::field(name, "is empty"));
    }
    check(list.len())?;
    let several = list.into_iter().enumerate();
    let several = several.map(|(i, one)| read_one(&format!("{name}[{i}]"), one));
    several.collect()
}

/// Whether a list is one prompt: of token ids, and perhaps texts between them.
fn is_one(list: &[Value]) -> bool {
    let is_part = |part: &Value| part.is_number() || part.is_string();
    list.iter().all(is_part) && list.iter().any(Value::is_number)
}

/// The one prompt at `path`.
///
/// # Errors
///
/// As [`read`].
pub(super) fn read_one(path: &str, prompt: Value) -> Result<Prompt, ApiError> {
    let wrong = || {
        let message = "must be a text, a list of token ids and texts, an object with `prompt_string`, or a list of these";
        ApiError::field(path, message)
    };
    match prompt {
        Value::Null => Err(ApiError::field(path, "is missing")),
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(list) if list.iter().all(Value::is_number) => tokens(&list).ok_or_else(wrong),
        Value::Array(list) => {
            let parts = list.into_iter().map(|part| match part {
                Value::String(text) => Some(Prompt::Text(text)),
                id => tokens(&[id]),
            });
            let parts = parts.collect::<Option<_>>().ok_or_else(wrong)?;
            Ok(Prompt::Mixed(parts))
        }
        Value::Object(object) => read_object(path, object),
        _ => Err(wrong()),
    }
}

/// The prompt that an object at `path` holds.
fn read_object(path: &str, mut object: Map<String, Value>) -> Result<Prompt, ApiError> {
    let data = object.remove("multimodal_data").unwrap_or_default();
    match object.remove("prompt_string") {
        Some(Value::String(text)) => media::with_data(path, text, data),
        None => Err(ApiError::field(
            format!("{path}.prompt_string"),
            "is missing",
        )),
        Some(_) => {
            let path = format!("{path}.prompt_string");
            Err(ApiError::field(path, "must be a string"))
        }
    }
}

/// What stands around the gap that a request is to fill, for a prompt of at most `room` tokens.
///
/// # Errors
///
/// 400 for a part that is missing or no text.
pub(super) fn read_infill(
    object: &mut Map<String, Value>,
    room: usize,
) -> Result<Infill, ApiError> {
    let mut text = |name: &str, is_needed: bool| match object.remove(name) {
        Some(Value::String(text)) => Ok(text),
        None | Some(Value::Null) if !is_needed => Ok(String::new()),
        None | Some(Value::Null) => Err(ApiError::field(name, "is missing")),
        Some(_) => Err(ApiError::field(name, "must be a string")),
    };
    let [prefix, suffix] = [text("input_prefix", true)?, text("input_suffix", true)?];
    let beginning = text(NAME, false)?;
    let files = match object.remove(EXTRA) {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(list)) => {
            let files = list.into_iter().enumerate();
            let files = files.map(|(i, one)| file(&format!("{EXTRA}[{i}]"), one));
            files.collect::<Result<_, _>>()?
        }
        Some(_) => return Err(ApiError::field(EXTRA, "must be a list")),
    };
    Ok(Infill {
        prefix,
        suffix,
        beginning,
        files,
        room,
    })
}

/// The name and the text of the file at `path`.
fn file(path: &str, file: Value) -> Result<(Option<String>, String), ApiError> {
    let Value::Object(mut file) = file else {
        return Err(ApiError::field(path, "must be an object"));
    };
    let mut text = |name: &str| match file.remove(name) {
        Some(Value::String(text)) => Ok(Some(text)),
        None | Some(Value::Null) => Ok(None),
        Some(_) => {
            let path = format!("{path}.{name}");
            Err(ApiError::field(path, "must be a string"))
        }
    };
    let (name, text) = (text("filename")?, text("text")?);
    let text = text.ok_or_else(|| ApiError::field(format!("{path}.text"), "is missing"))?;
    Ok((name, text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn prompts_have_every_form() {
        let text = |text: &str| Prompt::Text(text.to_owned());
        let ids = |ids: &[u32]| Prompt::Tokens(ids.to_vec());
        let mixed = || Prompt::Mixed(vec![ids(&[1]), text("a"), ids(&[2])]);
        for (value, prompt) in [
            (json!("a"), text("a")),
            (json!(""), text("")),
            (json!([1, 2]), ids(&[1, 2])),
            (json!([1, "a", 2]), mixed()),
            (json!({"prompt_string": "a"}), text("a")),
            (
                json!({"prompt_string": "a", "multimodal_data": []}),
                text("a"),
            ),
            (json!(["a"]), text("a")),
            (json!([[1, "a", 2]]), mixed()),
            (
                json!(["a", [1], [1, "a", 2], {"prompt_string": "b"}]),
                Prompt::Several(vec![text("a"), ids(&[1]), mixed(), text("b")]),
            ),
        ] {
            assert_eq!(read(value.clone()).unwrap(), prompt, "{value}");
        }
    }

    #[test]
    fn what_is_no_prompt_is_named() {
        for (value, told) in [
            (json!(null), "`prompt` is missing"),
            (json!([]), "`prompt` is empty"),
            (json!(7), "`prompt` must be a text"),
            (json!([1.5]), "`prompt` must be a text"),
            (json!([-1, "a"]), "`prompt` must be a text"),
            (json!(["a", true]), "`prompt[1]` must be a text"),
            (json!({}), "`prompt.prompt_string` is missing"),
            (
                json!(["a", {"prompt_string": 1}]),
                "`prompt[1].prompt_string` must be a string",
            ),
            (
                json!(["a", {"prompt_string": "a", "multimodal_data": ["AAAA"]}]),
                "`prompt[1].prompt_string` has the marker `<__media__>` 0 times",
            ),
            (
                json!(vec!["a"; PROMPTS_MAX + 1]),
                "`prompt` has 129 prompts",
            ),
        ] {
            let message = read(value.clone()).unwrap_err().message;
            assert!(message.starts_with(told), "{value}: {message}");
        }
    }
}
