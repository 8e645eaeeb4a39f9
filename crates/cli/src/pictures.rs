//! Pictures in files, for `paceline run --image` and `/image` of `paceline chat`.

use anyhow::{Context, Result, bail};
use engine::{Engine, Picture, PictureLimits, PlacedPicture};
use serde_json::{Value, json};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Decodes the picture in `file` and resizes it for the model.
///
/// # Errors
///
/// If the model takes no pictures, or the file cannot be read or is no picture.
pub(crate) fn open(engine: &Engine, file: &Path) -> Result<Picture> {
    let Some(vision) = engine.vision() else {
        bail!(
            "the model takes no pictures: {}",
            engine.info().vision_reason
        );
    };
    let limits = PictureLimits::default();
    let mut bytes = Vec::new();
    // One byte more than allowed shows that there are more, even where the file has no length.
    File::open(file)
        .and_then(|from| from.take(limits.bytes as u64 + 1).read_to_end(&mut bytes))
        .with_context(|| format!("cannot read `{}`", file.display()))?;
    let opened = vision.open(bytes, None, &limits);
    opened.map_err(|error| anyhow::anyhow!("the picture {error}: `{}`", file.display()))
}

/// What a message says that shows `n` pictures and then asks `words`.
pub(crate) fn content(n: usize, words: &str) -> Value {
    if n == 0 {
        return json!(words);
    }
    let images = std::iter::repeat_n(json!({"type": "image"}), n);
    let words = json!({"type": "text", "text": words});
    images.chain([words]).collect()
}

/// The words of what a message says, as [`content`] has made it.
pub(crate) fn words(content: &Value) -> &str {
    let last = content.as_array().and_then(|parts| parts.last());
    let words = last.map_or(content, |part| &part["text"]);
    words.as_str().unwrap_or_default()
}

/// Gives `pictures` their places in the prompt `ids`.
///
/// # Errors
///
/// If the prompt has another number of places.
pub(crate) fn place(
    engine: &Engine,
    ids: Vec<u32>,
    pictures: Vec<Picture>,
) -> Result<(Vec<u32>, Vec<PlacedPicture>)> {
    match engine.vision() {
        Some(vision) if !pictures.is_empty() => Ok(vision.place(ids, pictures)?),
        _ => Ok((ids, Vec::new())),
    }
}
