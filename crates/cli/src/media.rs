//! Pictures, videos and sounds in files, for `--image`, `--video` and `--audio` of `paceline run`, and
//! `/image`, `/video` and `/audio` of `paceline chat`.

use anyhow::{Context, Result, bail};
use engine::{
    ClipOptions, ClipSource, Engine, MediaItem, MediaKind, MediaLimits, PlacedMedia, SoundLimits,
    Vision,
};
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Time for decoding a video.
const VIDEO_TIME: Duration = Duration::from_secs(120);
/// Bytes of a video.
const VIDEO_BYTES_MAX: usize = 1 << 30;

/// Decodes the picture in `file` and resizes it for the model.
///
/// # Errors
///
/// If the model takes no pictures, or the file cannot be read or is no picture.
pub(crate) fn picture(engine: &Engine, file: &Path) -> Result<MediaItem> {
    let vision = vision(engine, "pictures")?;
    let limits = MediaLimits::default();
    let bytes = bytes(file, limits.bytes)?;
    let opened = vision.open(bytes, None, &limits);
    opened.map_err(|error| anyhow::anyhow!("the picture {error}: `{}`", file.display()))
}

/// Decodes the video in `file`, as far as the model looks at it.
///
/// # Errors
///
/// If the model takes no video, or the file cannot be read or is no video.
pub(crate) fn video(engine: &Engine, file: &Path) -> Result<MediaItem> {
    let vision = vision(engine, "video")?;
    let limits = MediaLimits {
        bytes: VIDEO_BYTES_MAX,
        time: VIDEO_TIME,
        ..MediaLimits::default()
    };
    let source = ClipSource::File(bytes(file, limits.bytes)?);
    let opened = vision.open_clip(source, ClipOptions::default(), &limits);
    opened.map_err(|error| anyhow::anyhow!("the video {error}: `{}`", file.display()))
}

/// Decodes the sound in `file`.
///
/// # Errors
///
/// If the model takes no sounds, or the file cannot be read or is no sound.
pub(crate) fn sound(engine: &Engine, file: &Path) -> Result<MediaItem> {
    let Some(hearing) = engine.hearing() else {
        let reason = &engine.info().hearing_reason;
        bail!("the model takes no sounds: {reason}");
    };
    let limits = SoundLimits::default();
    let bytes = bytes(file, limits.bytes)?;
    let opened = hearing.open(bytes, &limits);
    opened.map_err(|error| anyhow::anyhow!("the sound {error}: `{}`", file.display()))
}

/// What the model sees with.
fn vision<'a>(engine: &'a Engine, what: &str) -> Result<&'a Arc<Vision>> {
    let Some(vision) = engine.vision() else {
        let reason = &engine.info().vision_reason;
        bail!("the model takes no {what}: {reason}");
    };
    Ok(vision)
}

/// The bytes of `file`, and one more if it has more than `most`.
fn bytes(file: &Path, most: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // One byte more than allowed shows that there are more, even where the file has no length.
    File::open(file)
        .and_then(|from| from.take(most as u64 + 1).read_to_end(&mut bytes))
        .with_context(|| format!("cannot read `{}`", file.display()))?;
    Ok(bytes)
}

/// The file that a line means which is nothing but the path of a picture, or its `file://` URL, as
/// terminals paste it: quoted, or with `\` before what a shell would take apart.
pub(crate) fn pasted(line: &str) -> Option<PathBuf> {
    const ENDINGS: &[&str] = &["png", "jpg", "jpeg", "webp", "gif"];
    let line = line.trim();
    let quoted = ['\'', '"']
        .iter()
        .find_map(|&q| line.strip_prefix(q)?.strip_suffix(q));
    let path: PathBuf = match (line.strip_prefix("file://"), quoted) {
        (Some(url), _) => percent_decode_str(url).decode_utf8().ok()?.as_ref().into(),
        (None, Some(inner)) => inner.into(),
        (None, None) => without_backslashes(line).into(),
    };
    let ending = path.extension()?.to_str()?.to_lowercase();
    (ENDINGS.contains(&&*ending) && path.is_file()).then_some(path)
}

/// `line` with what stands after each backslash in the place of both.
fn without_backslashes(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => out.extend(chars.next()),
            c => out.push(c),
        }
    }
    out
}

/// What a message says that shows `items` and then asks `words`.
pub(crate) fn content(items: &[MediaItem], words: &str) -> Value {
    if items.is_empty() {
        return json!(words);
    }
    let part = |item: &MediaItem| match item.kind() {
        MediaKind::Video => json!({"type": "video"}),
        MediaKind::Sound => json!({"type": "audio"}),
        _ => json!({"type": "image"}),
    };
    let words = json!({"type": "text", "text": words});
    items.iter().map(part).chain([words]).collect()
}

/// The words of what a message says, as [`content`] has made it.
pub(crate) fn words(content: &Value) -> &str {
    let last = content.as_array().and_then(|parts| parts.last());
    let words = last.map_or(content, |part| &part["text"]);
    words.as_str().unwrap_or_default()
}

/// Gives `items` their places in the prompt `ids`.
///
/// # Errors
///
/// If the prompt has another number of places.
pub(crate) fn place(
    engine: &Engine,
    ids: Vec<u32>,
    items: Vec<MediaItem>,
) -> Result<(Vec<u32>, Vec<PlacedMedia>)> {
    match items.is_empty() {
        true => Ok((ids, Vec::new())),
        false => Ok(engine
            .senses()
            .place(ids, items, &engine.text().tokenizer)?),
    }
}
