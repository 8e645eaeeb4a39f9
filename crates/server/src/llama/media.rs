//! Pictures in prompts: which of them stands where.
//!
//! | form | pictures | in the text |
//! | --- | --- | --- |
//! | `{"prompt_string", "multimodal_data"}` | a list of base64 | [`MARKER`] for each, in order |
//! | `prompt` and `image_data` | a list of `{"data": base64, "id": N}` | `[img-N]` wherever one stands |

use serde_json::Value;

use crate::errors::ApiError;
use crate::media::{self, Image};
use crate::request::{Pictured, Prompt};
use crate::sources::Data;

/// What stands for a picture of `multimodal_data` in a text.
pub(super) const MARKER: &str = "<__media__>";
/// The older list of pictures.
pub(super) const IMAGE_DATA: &str = "image_data";

/// The prompt `text`, at `path`, with the pictures `data`, its list `multimodal_data`.
///
/// # Errors
///
/// 400 for a list that is none, and for another number of markers.
pub(super) fn with_data(path: &str, text: String, data: Value) -> Result<Prompt, ApiError> {
    let images = media::read_list(&format!("{path}.multimodal_data"), data)?;
    if images.is_empty() {
        return Ok(Prompt::Text(text));
    }
    let texts: Vec<String> = text.split(MARKER).map(str::to_owned).collect();
    let (places, n) = (texts.len() - 1, images.len());
    if places != n {
        let message = format!(
            "has the marker `{MARKER}` {places} times, and {n} files come with it: write one for each"
        );
        return Err(ApiError::field(format!("{path}.prompt_string"), message));
    }
    Ok(Prompt::Pictured(Pictured { texts, images }))
}

/// `prompt` with the pictures `list`, the field [`IMAGE_DATA`] of its request.
///
/// # Errors
///
/// 400 for a list that is none, and for a picture that stands nowhere in the text.
pub(super) fn with_images(prompt: Prompt, list: Value) -> Result<Prompt, ApiError> {
    let list = match list {
        Value::Null => return Ok(prompt),
        Value::Array(list) if list.is_empty() => return Ok(prompt),
        Value::Array(list) => list,
        _ => return Err(ApiError::field(IMAGE_DATA, "must be a list of objects")),
    };
    let Prompt::Text(text) = prompt else {
        let message = "goes with one `prompt` that is a text";
        return Err(ApiError::field(IMAGE_DATA, message));
    };
    let named = list.into_iter().enumerate().map(|(i, one)| named(i, one));
    let named: Vec<(String, Image)> = named.collect::<Result<_, _>>()?;
    let mut pictured = Pictured::default();
    let (mut rest, mut begun) = (&*text, String::new());
    // Whatever looks like a marker and is none is text.
    while let Some(at) = rest.find("[img-") {
        let tail = &rest[at..];
        let marked = named.iter().find(|(marker, _)| tail.starts_with(&**marker));
        let length = marked.map_or(1, |(marker, _)| marker.len());
        begun += &rest[..at];
        match marked {
            Some((_, image)) => {
                pictured.texts.push(std::mem::take(&mut begun));
                pictured.images.push(image.clone());
            }
            None => begun += &tail[..length],
        }
        rest = &tail[length..];
    }
    pictured.texts.push(begun + rest);
    if let Some((marker, image)) = named.iter().find(|(marker, _)| !text.contains(&**marker)) {
        let message = format!("stands nowhere in the prompt: write `{marker}` where it belongs");
        return Err(ApiError::field(&*image.path, message));
    }
    Ok(Prompt::Pictured(pictured))
}

/// The picture number `i` of a list, and its marker.
fn named(i: usize, one: Value) -> Result<(String, Image), ApiError> {
    let path = format!("{IMAGE_DATA}[{i}]");
    let Value::Object(mut one) = one else {
        return Err(ApiError::field(path, "must be an object"));
    };
    let Some(id) = one.get("id").and_then(Value::as_u64) else {
        let path = format!("{path}.id");
        return Err(ApiError::field(path, "must be a whole number from 0 on"));
    };
    match one.remove("data") {
        Some(Value::String(data)) => {
            let image = Image {
                path,
                data: Data::Base64(data),
                rows: None,
            };
            Ok((format!("[img-{id}]"), image))
        }
        _ => Err(ApiError::field(
            format!("{path}.data"),
            "must be a text in base64",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The texts and the data of the pictures between them.
    fn parts(prompt: Prompt) -> (Vec<String>, Vec<Data>) {
        let Prompt::Pictured(Pictured { texts, images }) = prompt else {
            panic!("{prompt:?}")
        };
        (texts, images.into_iter().map(|image| image.data).collect())
    }

    fn data(all: &[&str]) -> Vec<Data> {
        all.iter().map(|one| Data::Base64((*one).into())).collect()
    }

    #[test]
    fn markers_stand_for_pictures_in_order() {
        let read = |text: &str, list| with_data("prompt", text.to_owned(), list);
        let two = read("<__media__>a<__media__>", json!(["x", "y"])).unwrap();
        assert_eq!(
            parts(two),
            (["", "a", ""].map(str::to_owned).to_vec(), data(&["x", "y"]))
        );
        let none = read("<__media__>", json!([])).unwrap();
        assert_eq!(none, Prompt::Text(MARKER.to_owned()));
        for (text, list, told) in [
            ("a", json!(["x"]), "`prompt.prompt_string` has the marker"),
            ("<__media__>", json!(["x", "y"]), "1 times, and 2 files"),
            (
                "<__media__>",
                json!([7]),
                "`prompt.multimodal_data[0]` must be",
            ),
            (
                "<__media__>",
                json!("x"),
                "`prompt.multimodal_data` must be a list",
            ),
        ] {
            let message = read(text, list).unwrap_err().message;
            assert!(message.contains(told), "{message}");
        }
    }

    #[test]
    fn numbers_say_which_picture_stands_where() {
        let read = |text: &str, list| with_images(Prompt::Text(text.to_owned()), list);
        let list = json!([{"data": "x", "id": 1}, {"data": "y", "id": 12}]);
        let prompt = read("a[img-12]b[img-1][img-3] [img-[img-12]", list.clone()).unwrap();
        let texts = ["a", "b", "[img-3] [img-", ""].map(str::to_owned).to_vec();
        assert_eq!(parts(prompt), (texts, data(&["y", "x", "y"])));
        let text = || Prompt::Text("a".to_owned());
        assert_eq!(with_images(text(), json!([])).unwrap(), text());
        assert_eq!(with_images(text(), json!(null)).unwrap(), text());
        for (text, list, told) in [
            ("[img-1]", list, "`image_data[1]` stands nowhere"),
            ("a", json!([{"data": "x"}]), "`image_data[0].id` must be"),
            ("a", json!([{"id": 1}]), "`image_data[0].data` must be"),
            ("a", json!(["x"]), "`image_data[0]` must be an object"),
            ("a", json!(7), "`image_data` must be a list"),
        ] {
            let message = read(text, list).unwrap_err().message;
            assert!(message.starts_with(told), "{message}");
        }
        let tokens = with_images(Prompt::Tokens(vec![1]), json!([{"data": "x", "id": 1}]));
        assert!(
            tokens
                .unwrap_err()
                .message
                .contains("goes with one `prompt`")
        );
    }
}
