//! Sounds as clients send them.

use serde_json::{Map, Value};

use crate::errors::{ApiError, excerpt};
use crate::sources::Data;

/// What a sound's data should look like in a URL, for messages.
const FORM: &str = "`data:audio/wav;base64,...`";

/// The formats that a part may name; files are told apart by their bytes all the same.
const FORMATS: [&str; 4] = ["wav", "mp3", "flac", "ogg"];

/// A sound as a request has it.
#[derive(Clone, PartialEq)]
pub(crate) struct Audio {
    /// The place of the sound in the request, for messages.
    pub(crate) path: String,
    /// The file, or what it is found by.
    pub(crate) data: Data,
}

impl Audio {
    /// Takes its data out.
    pub(super) fn take(&mut self) -> Audio {
        Audio {
            path: self.path.clone(),
            data: self.data.take(),
        }
    }
}

impl std::fmt::Debug for Audio {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Audio({})", self.path)
    }
}

/// Whether a part of this type is a sound, in OpenAI's requests.
pub(super) fn is_sound(kind: &str) -> bool {
    matches!(kind, "input_audio" | "audio_url")
}

/// Checks the part at `path` of a message, which is a sound in OpenAI's form; the names of its fields
/// that are read.
///
/// # Errors
///
/// 400 for a part that has no sound and names none.
pub(super) fn check(
    path: &str,
    part: &Map<String, Value>,
) -> Result<&'static [&'static str], ApiError> {
    find(path, part)?;
    Ok(&["type", "input_audio", "audio_url"])
}

/// The sound in the part at `path` of a message, in OpenAI's form.
///
/// # Errors
///
/// 400 for a part that has no sound and names none.
pub(super) fn read(path: &str, part: &Map<String, Value>) -> Result<Audio, ApiError> {
    let (path, data) = find(path, part)?;
    let data = data.into_owned();
    Ok(Audio { path, data })
}

/// The place of the sound in the part at `path`, and its data.
fn find<'a>(path: &str, part: &'a Map<String, Value>) -> Result<(String, Data<&'a str>), ApiError> {
    match part.get("type").and_then(Value::as_str) {
        Some("audio_url") => of_url(format!("{path}.audio_url"), part.get("audio_url")),
        _ => of_data(format!("{path}.input_audio"), part.get("input_audio")),
    }
}

/// The data of a URL, alone or as `url` in an object.
fn of_url(at: String, url: Option<&Value>) -> Result<(String, Data<&str>), ApiError> {
    let url = match url {
        Some(Value::Object(inner)) => inner.get("url"),
        url => url,
    };
    match url {
        Some(Value::String(url)) => {
            let (_, data) = Data::of_url(&at, url, FORM)?;
            Ok((at, data))
        }
        None | Some(Value::Null) => Err(ApiError::field(at, "is missing")),
        Some(_) => Err(ApiError::field(at, format!("must be a string, {FORM}"))),
    }
}

/// The data of an object with `data` and `format`.
fn of_data(at: String, audio: Option<&Value>) -> Result<(String, Data<&str>), ApiError> {
    let audio = match audio {
        Some(Value::Object(audio)) => audio,
        None | Some(Value::Null) => return Err(ApiError::field(at, "is missing")),
        Some(_) => {
            let message = "must be an object with `data`, base64, and `format`";
            return Err(ApiError::field(at, message));
        }
    };
    match audio.get("format") {
        None | Some(Value::Null) => {}
        Some(Value::String(format)) if FORMATS.contains(&&**format) => {}
        Some(other) => {
            let found = excerpt(other.as_str().unwrap_or("another value"));
            let message = format!("must be one of {}, and is `{found}`", FORMATS.join(", "));
            return Err(ApiError::field(format!("{at}.format"), message));
        }
    }
    match audio.get("data") {
        // Some clients send the whole URL here.
        Some(Value::String(url)) if url.starts_with("data:") => {
            let (_, data) = Data::of_url(&at, url, FORM)?;
            Ok((at, data))
        }
        Some(Value::String(data)) => Ok((at, Data::Base64(data))),
        None | Some(Value::Null) => Err(ApiError::field(format!("{at}.data"), "is missing")),
        Some(_) => Err(ApiError::field(
            format!("{at}.data"),
            "must be a string in base64",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_sound_comes_inside_the_request() {
        let part = |part: Value| read("messages[0].content[1]", part.as_object().unwrap());
        for (form, field) in [
            (
                json!({"type": "input_audio", "input_audio": {"data": "TWFu", "format": "wav"}}),
                "input_audio",
            ),
            (
                json!({"type": "input_audio", "input_audio": {"data": "TWFu"}}),
                "input_audio",
            ),
            (
                json!({"type": "input_audio", "input_audio": {"data": "data:audio/mp3;base64,TWFu"}}),
                "input_audio",
            ),
            (
                json!({"type": "audio_url", "audio_url": {"url": "data:audio/ogg;base64,TWFu"}}),
                "audio_url",
            ),
            (
                json!({"type": "audio_url", "audio_url": "data:audio/ogg;base64,TWFu"}),
                "audio_url",
            ),
        ] {
            let audio = part(form).unwrap();
            assert_eq!(audio.path, format!("messages[0].content[1].{field}"));
            assert_eq!(audio.data, Data::Base64("TWFu".to_owned()));
        }
        for (form, told) in [
            (json!({"type": "input_audio"}), "is missing"),
            (
                json!({"type": "input_audio", "input_audio": "TWFu"}),
                "must be an object",
            ),
            (
                json!({"type": "input_audio", "input_audio": {"format": "wav"}}),
                "is missing",
            ),
            (
                json!({"type": "input_audio", "input_audio": {"data": 7, "format": "wav"}}),
                "must be a string",
            ),
            (
                json!({"type": "input_audio", "input_audio": {"data": "TWFu", "format": "opus"}}),
                "must be one of wav, mp3, flac, ogg, and is `opus`",
            ),
            (
                json!({"type": "audio_url", "audio_url": {"url": 7}}),
                "must be a string",
            ),
            (json!({"type": "audio_url"}), "is missing"),
        ] {
            let error = part(form.clone()).unwrap_err();
            assert!(error.message.contains(told), "{form}: {}", error.message);
            let param = error.param.unwrap();
            assert!(param.starts_with("messages[0].content[1]."), "{param}");
        }
    }
}
