//! Pictures as clients send them.

use serde_json::{Map, Value};

use crate::errors::{ApiError, excerpt};
use crate::sources::Data;

/// Rows of a prompt that a picture becomes, at most, where a request asks for little detail.
const LOW_DETAIL_ROWS: usize = 70;

/// What a picture's data should look like, for messages.
const FORM: &str = "`data:image/png;base64,...`";

/// What a source of Anthropic's should be, for messages.
const BASE64_SOURCE: &str = "a source of type `base64`";

/// A picture as a request has it.
#[derive(Clone, PartialEq)]
pub(crate) struct Image {
    /// The place of the picture in the request, for messages.
    pub(crate) path: String,
    /// The file, or what it is found by.
    pub(crate) data: Data,
    /// Rows of a prompt that it may become, where the request limits them.
    pub(crate) rows: Option<usize>,
}

impl Image {
    /// Takes its data out.
    pub(super) fn take(&mut self) -> Image {
        Image {
            path: self.path.clone(),
            data: self.data.take(),
            rows: self.rows,
        }
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Image({})", self.path)
    }
}

/// Whether a part of this type is a picture, in OpenAI's requests.
pub(super) fn is_picture(kind: &str) -> bool {
    matches!(kind, "image_url" | "input_image")
}

/// Checks the part at `path` of a message, which is a picture in OpenAI's form; the names of its fields
/// that are read.
///
/// # Errors
///
/// 400 for a part that has no picture and names none.
pub(super) fn check(
    path: &str,
    part: &Map<String, Value>,
) -> Result<&'static [&'static str], ApiError> {
    find(path, part)?;
    Ok(&["type", "image_url", "detail"])
}

/// The picture in the part at `path` of a message, in OpenAI's form.
///
/// # Errors
///
/// 400 for a part that has no picture and names none.
pub(super) fn read(path: &str, part: &Map<String, Value>) -> Result<Image, ApiError> {
    let (path, data, rows) = find(path, part)?;
    Ok(Image {
        path,
        data: data.into_owned(),
        rows,
    })
}

/// The place of the picture in the part at `path`, its data, and its rows, at most.
fn find<'a>(
    path: &str,
    part: &'a Map<String, Value>,
) -> Result<(String, Data<&'a str>, Option<usize>), ApiError> {
    const URL: &str = "image_url";
    let at = format!("{path}.{URL}");
    // The Responses API has the text and the detail side by side, chat one within the other.
    let (url, detail) = match part.get(URL) {
        Some(Value::Object(inner)) => (inner.get("url"), inner.get("detail")),
        url => (url, part.get("detail")),
    };
    let url = match url {
        Some(Value::String(url)) => url,
        None | Some(Value::Null) if part.get("file_id").is_some_and(|id| !id.is_null()) => {
            let message = format!("names a file, and no files are kept here; send {FORM}");
            return Err(ApiError::field(format!("{path}.file_id"), message));
        }
        None | Some(Value::Null) => return Err(ApiError::field(at, "is missing")),
        Some(_) => return Err(ApiError::field(at, format!("must be a string, {FORM}"))),
    };
    let (_, data) = Data::of_url(&at, url, FORM)?;
    let rows = match detail {
        None | Some(Value::Null) => None,
        Some(Value::String(word)) if matches!(&**word, "auto" | "high" | "original") => None,
        Some(Value::String(word)) if word == "low" => Some(LOW_DETAIL_ROWS),
        Some(_) => {
            let message = "must be one of auto, low, high, original";
            return Err(ApiError::field(format!("{at}.detail"), message));
        }
    };
    Ok((at, data, rows))
}

/// The picture in the field `source` of a block of Anthropic's at `path`.
///
/// # Errors
///
/// 400 for a source that has no picture and names none.
pub(crate) fn read_source(path: &str, block: &mut Map<String, Value>) -> Result<Image, ApiError> {
    let path = format!("{path}.source");
    let Some(Value::Object(mut source)) = block.remove("source") else {
        return Err(ApiError::field(path, "must be an object"));
    };
    let mut string = |name: &str| match source.remove(name) {
        Some(Value::String(text)) => Ok(text),
        _ => Err(ApiError::field(
            format!("{path}.{name}"),
            "must be a string",
        )),
    };
    let data = match &*string("type")? {
        "base64" => Data::Base64(string("data")?),
        "url" => {
            let url = string("url")?;
            let (_, data) = Data::of_url(&format!("{path}.url"), &url, FORM)?;
            data.into_owned()
        }
        "file" => {
            let message = format!("names a file, and no files are kept here; send {BASE64_SOURCE}");
            return Err(ApiError::field(path, message));
        }
        kind => {
            let kind = excerpt(kind);
            let message = format!("must be {BASE64_SOURCE} or `url`, and is of type `{kind}`");
            return Err(ApiError::field(path, message));
        }
    };
    Ok(Image {
        path,
        data,
        rows: None,
    })
}

/// The pictures of a list of base64 at `path`, as Ollama's requests have it.
///
/// # Errors
///
/// 400 for what is no such list.
pub(crate) fn read_list(path: &str, list: Value) -> Result<Vec<Image>, ApiError> {
    let list = match list {
        Value::Null => return Ok(Vec::new()),
        Value::Array(list) => list,
        _ => return Err(ApiError::field(path, "must be a list of texts in base64")),
    };
    let image = |(i, data)| {
        let path = format!("{path}[{i}]");
        match data {
            Value::String(data) => Ok(Image {
                path,
                data: Data::Base64(data),
                rows: None,
            }),
            _ => Err(ApiError::field(path, "must be a text in base64")),
        }
    };
    list.into_iter().enumerate().map(image).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_picture_comes_inside_the_request() {
        let part = |part: Value| {
            let Value::Object(part) = part else {
                unreachable!("an object")
            };
            read("messages[0].content[1]", &part)
        };
        let url = "DATA:image/png;charset=x;BASE64,TWFu";
        for (form, rows) in [
            (json!({"image_url": {"url": url}}), None),
            (
                json!({"image_url": {"url": url, "detail": "low"}}),
                Some(70),
            ),
            (json!({"image_url": url, "detail": "low"}), Some(70)),
            (json!({"image_url": url, "detail": "high"}), None),
        ] {
            let image = part(form).unwrap();
            assert_eq!(image.path, "messages[0].content[1].image_url");
            assert_eq!(
                (image.data, image.rows),
                (Data::Base64("TWFu".into()), rows)
            );
        }
        for (form, told) in [
            (
                json!({"image_url": {"url": "data:image/png,abc"}}),
                "must have the form",
            ),
            (
                json!({"image_url": {"url": "ftp://a.b/c.png"}}),
                "must have the form",
            ),
            (json!({"image_url": {"url": 7}}), "must be a string"),
            (
                json!({"image_url": {"url": url, "detail": "much"}}),
                "must be one of",
            ),
            (json!({"file_id": "a"}), "no files are kept"),
            (json!({}), "is missing"),
        ] {
            let error = part(form.clone()).unwrap_err();
            assert!(error.message.contains(told), "{form}: {}", error.message);
            let param = error.param.unwrap();
            assert!(param.starts_with("messages[0].content[1]."), "{param}");
        }
    }
}
