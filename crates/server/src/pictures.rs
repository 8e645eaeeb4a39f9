//! Pictures in requests: what clients send in the place of one, and how it comes into a prompt.
//!
//! ```text
//! dialect ─→ Image (base64, as sent) ─→ decode and resize ─→ Vision::place ─→ engine
//!  a connection's thread                 a worker's thread
//! ```
//!
//! A picture comes inside the request. Nothing is fetched.

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use engine::{Picture, PictureLimits, PlacedPicture, Vision};
use serde_json::{Map, Value};

use crate::errors::{ApiError, excerpt};
use crate::limits::{PICTURE_BYTES_MAX, PICTURE_PIXELS_MAX, PICTURES_MAX};

/// Rows of a prompt that a picture becomes, at most, where a request asks for little detail.
const LOW_DETAIL_ROWS: usize = 70;

/// What a picture's data should look like, for messages.
const FORM: &str = "`data:image/png;base64,...`";

/// A picture as a request has it.
#[derive(Clone, PartialEq)]
pub(crate) struct Image {
    /// The place of the picture in the request, for messages.
    pub(crate) path: String,
    /// The file in base64.
    pub(crate) data: String,
    /// Rows of a prompt that it may become, where the request limits them.
    pub(crate) rows: Option<usize>,
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Image({})", self.path)
    }
}

/// A prompt as the engine takes it.
#[derive(Debug)]
pub(crate) struct Encoded {
    /// The tokens.
    pub(crate) tokens: Vec<u32>,
    /// The pictures among them.
    pub(crate) pictures: Vec<PlacedPicture>,
}

impl From<Vec<u32>> for Encoded {
    fn from(tokens: Vec<u32>) -> Self {
        Encoded {
            tokens,
            pictures: Vec::new(),
        }
    }
}

/// Whether a part of this type is a picture, in OpenAI's requests.
pub(crate) fn is_picture(kind: &str) -> bool {
    matches!(kind, "image_url" | "input_image")
}

/// Checks the part at `path` of a message, which is a picture in OpenAI's form.
///
/// # Errors
///
/// 400 for a part without data in it.
pub(crate) fn check(path: &str, part: &Map<String, Value>) -> Result<(), ApiError> {
    find(path, part).map(|_| ())
}

/// The picture in the part at `path` of a message, in OpenAI's form.
///
/// # Errors
///
/// 400 for a part without data in it.
pub(crate) fn read(path: &str, part: &Map<String, Value>) -> Result<Image, ApiError> {
    let (path, data, rows) = find(path, part)?;
    Ok(Image {
        path,
        data: data.to_owned(),
        rows,
    })
}

/// The place of the picture in the part at `path`, its data in base64, and its rows, at most.
fn find<'a>(
    path: &str,
    part: &'a Map<String, Value>,
) -> Result<(String, &'a str, Option<usize>), ApiError> {
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
    let data = data_of(&at, url)?;
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

/// The base64 in the URL at `path`.
fn data_of<'a>(path: &str, url: &'a str) -> Result<&'a str, ApiError> {
    let begins = |with: &str| {
        let head = url.get(..with.len());
        head.is_some_and(|head| head.eq_ignore_ascii_case(with))
    };
    if begins("http://") || begins("https://") {
        let message =
            format!("is an address, and this server fetches nothing; send the picture as {FORM}");
        return Err(ApiError::field(path, message));
    }
    let data = url.split_once(',').filter(|_| begins("data:"));
    match data {
        Some((head, data)) if head.to_ascii_lowercase().ends_with(";base64") => Ok(data),
        _ => Err(ApiError::field(path, format!("must have the form {FORM}"))),
    }
}

/// The picture in the field `source` of a block of Anthropic's at `path`.
///
/// # Errors
///
/// 400 for a source that is not in the request.
pub(crate) fn read_source(path: &str, block: &mut Map<String, Value>) -> Result<Image, ApiError> {
    let path = format!("{path}.source");
    let Some(Value::Object(mut source)) = block.remove("source") else {
        return Err(ApiError::field(path, "must be an object"));
    };
    match source.get("type").and_then(Value::as_str) {
        Some("base64") => {}
        Some("url") => {
            let message =
                "is an address, and this server fetches nothing; send a source of type `base64`";
            return Err(ApiError::field(path, message));
        }
        kind => {
            let kind = excerpt(kind.unwrap_or_default());
            let message = format!("must be of type `base64`, and is of type `{kind}`");
            return Err(ApiError::field(path, message));
        }
    }
    match source.remove("data") {
        Some(Value::String(data)) => Ok(Image {
            path,
            data,
            rows: None,
        }),
        _ => Err(ApiError::field(format!("{path}.data"), "must be a string")),
    }
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
                data,
                rows: None,
            }),
            _ => Err(ApiError::field(path, "must be a text in base64")),
        }
    };
    list.into_iter().enumerate().map(image).collect()
}

/// Refuses `images` where the model takes none, for `reason`, and where they are too many.
///
/// # Errors
///
/// 400 that names the first picture, or the first that is one too many.
pub(crate) fn admit(images: &[Image], takes: bool, reason: &str) -> Result<(), ApiError> {
    if let Some(first) = images.first().filter(|_| !takes) {
        let message = format!("is a picture, and this model takes none: {reason}");
        return Err(ApiError::field(&*first.path, message));
    }
    if let Some(extra) = images.get(PICTURES_MAX) {
        let message = format!("is one picture too many: a request has {PICTURES_MAX} at most");
        return Err(ApiError::field(&*extra.path, message));
    }
    Ok(())
}

/// Decodes `images` and resizes them for the model. Takes milliseconds to seconds.
///
/// # Errors
///
/// 400 that names the first picture that is broken, too large, or none.
pub(crate) fn decode(vision: &Vision, images: Vec<Image>) -> Result<Vec<Picture>, ApiError> {
    let limits = PictureLimits {
        bytes: PICTURE_BYTES_MAX,
        pixels: PICTURE_PIXELS_MAX,
        clip_pixels: PICTURE_PIXELS_MAX,
        ..PictureLimits::default()
    };
    let decode = |Image { path, data, rows }| {
        let file = base64(data.as_bytes());
        let Some(file) = file else {
            return Err(ApiError::field(path, "is not base64"));
        };
        drop(data);
        let opened = vision.open(file, rows, &limits);
        opened.map_err(|error| ApiError::field(path, error.to_string()))
    };
    images.into_iter().map(decode).collect()
}

/// The bytes that `text` stands for, with or without padding and line breaks, in the usual alphabet
/// or that of URLs; `None` if it is no base64.
fn base64(text: &[u8]) -> Option<Vec<u8>> {
    const LENIENT: GeneralPurpose = GeneralPurpose::new(
        &STANDARD,
        GeneralPurposeConfig::new()
            .with_decode_padding_mode(DecodePaddingMode::Indifferent)
            .with_decode_allow_trailing_bits(true),
    );
    let letters = text.iter().filter(|c| !b"\n\r \t".contains(c));
    let usual = letters.map(|c| match c {
        b'-' => b'+',
        b'_' => b'/',
        c => *c,
    });
    LENIENT.decode(usual.collect::<Vec<u8>>()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn base64_is_read_in_all_its_spellings() {
        let read = |text: &str| base64(text.as_bytes());
        assert_eq!(read(""), Some(vec![]));
        assert_eq!(read("TQ=="), Some(b"M".to_vec()));
        assert_eq!(read("TWE"), Some(b"Ma".to_vec()));
        assert_eq!(read("TW\r\nFu"), Some(b"Man".to_vec()));
        assert_eq!(read("-_-_"), read("+/+/"));
        assert_eq!(read("+/+/"), Some(vec![0xfb, 0xff, 0xbf]));
        for wrong in ["T", "TWFuT", "TQ==TQ==", "T*Fu", "data:,"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

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
            assert_eq!((&*image.data, image.rows), ("TWFu", rows));
        }
        for (form, told) in [
            (
                json!({"image_url": {"url": "https://a.b/c.png"}}),
                "fetches nothing",
            ),
            (
                json!({"image_url": {"url": "data:image/png,abc"}}),
                "must have the form",
            ),
            (
                json!({"image_url": {"url": "file:///a.png"}}),
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
