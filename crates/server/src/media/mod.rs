//! Media in requests: what clients send in the place of a picture or a video, and how it comes into a
//! prompt.
//!
//! ```text
//! dialect ─→ Media (base64, as sent) ─→ decode and resize ─→ Vision::place ─→ engine
//!  a connection's thread                 a worker's thread
//! ```
//!
//! Media come inside the request. Nothing is fetched.

mod picture;
mod video;

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use engine::{MediaItem, MediaLimits, PlacedMedia, Vision};
use serde_json::{Map, Value};

use crate::errors::ApiError;
use crate::limits::{
    MEDIA_BYTES_MAX, MEDIA_PIXELS_MAX, PICTURES_MAX, VIDEO_SECONDS_MAX, VIDEO_TIME, VIDEOS_MAX,
};

pub(crate) use picture::{Image, read_list, read_source};
pub(crate) use video::{Video, defaults};

/// A picture or a video, as a request has it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Media {
    Picture(Image),
    Video(Video),
}

impl Media {
    /// The place in the request, for messages.
    fn path(&self) -> &str {
        match self {
            Media::Picture(image) => &image.path,
            Media::Video(video) => &video.path,
        }
    }

    /// Takes its data out.
    pub(crate) fn take(&mut self) -> Media {
        match self {
            Media::Picture(image) => Media::Picture(image.take()),
            Media::Video(video) => Media::Video(video.take()),
        }
    }

    /// What it is, for messages.
    fn word(&self) -> &'static str {
        match self {
            Media::Picture(_) => "picture",
            Media::Video(_) => "video",
        }
    }

    /// The type of the part that chat templates read.
    pub(crate) fn template_type(&self) -> &'static str {
        match self {
            Media::Picture(_) => "image",
            Media::Video(_) => "video",
        }
    }
}

/// A prompt as the engine takes it.
#[derive(Debug)]
pub(crate) struct Encoded {
    /// The tokens.
    pub(crate) tokens: Vec<u32>,
    /// The media among them.
    pub(crate) media: Vec<PlacedMedia>,
}

impl From<Vec<u32>> for Encoded {
    fn from(tokens: Vec<u32>) -> Self {
        Encoded {
            tokens,
            media: Vec::new(),
        }
    }
}

/// Whether a part of this type shows something, in OpenAI's requests.
pub(crate) fn is_media(kind: &str) -> bool {
    picture::is_picture(kind) || video::is_video(kind)
}

/// The media in the part at `path` of a message, in OpenAI's form.
///
/// # Errors
///
/// 400 for a part without data in it.
pub(crate) fn read(path: &str, part: &Map<String, Value>) -> Result<Media, ApiError> {
    match part.get("type").and_then(Value::as_str) {
        Some(kind) if video::is_video(kind) => video::read(path, part).map(Media::Video),
        _ => picture::read(path, part).map(Media::Picture),
    }
}

/// Checks the part at `path` of a message, which shows something in OpenAI's form; the names of its
/// fields that are read.
///
/// # Errors
///
/// 400 for a part without data in it.
pub(crate) fn check(
    path: &str,
    part: &Map<String, Value>,
) -> Result<&'static [&'static str], ApiError> {
    match part.get("type").and_then(Value::as_str) {
        Some(kind) if video::is_video(kind) => video::check(path, part),
        _ => picture::check(path, part),
    }
}

/// Refuses `media` where the model takes none, for `reason`, and where they are too many.
///
/// # Errors
///
/// 400 that names the first one, or the first that is one too many.
pub(crate) fn admit(media: &[Media], takes: bool, reason: &str) -> Result<(), ApiError> {
    if let Some(first) = media.first().filter(|_| !takes) {
        let message = format!("is a {}, and this model takes none: {reason}", first.word());
        return Err(ApiError::field(first.path(), message));
    }
    for (word, most) in [("picture", PICTURES_MAX), ("video", VIDEOS_MAX)] {
        let mut of_kind = media.iter().filter(|media| media.word() == word);
        if let Some(extra) = of_kind.nth(most) {
            let message = format!("is one {word} too many: a request has {most} at most");
            return Err(ApiError::field(extra.path(), message));
        }
    }
    Ok(())
}

/// Decodes `media` and resizes them for the model. Takes milliseconds to seconds.
///
/// # Errors
///
/// 400 that names the first that is broken, too large, or none.
pub(crate) fn decode(vision: &Vision, media: Vec<Media>) -> Result<Vec<MediaItem>, ApiError> {
    let pictures = MediaLimits {
        bytes: MEDIA_BYTES_MAX,
        pixels: MEDIA_PIXELS_MAX,
        clip_pixels: MEDIA_PIXELS_MAX,
        seconds: VIDEO_SECONDS_MAX,
        ..MediaLimits::default()
    };
    let videos = MediaLimits {
        time: VIDEO_TIME,
        ..pictures.clone()
    };
    let decode = |media| {
        let (path, opened) = match media {
            Media::Picture(Image { path, data, rows }) => {
                let file = file_of(&path, data)?;
                (path, vision.open(file, rows, &pictures))
            }
            Media::Video(video) => {
                let (path, options) = (video.path.clone(), video.options);
                let source = video.source()?;
                (path, vision.open_clip(source, options, &videos))
            }
        };
        opened.map_err(|error| ApiError::field(path, error.to_string()))
    };
    media.into_iter().map(decode).collect()
}

/// The bytes that `data` at `path` stands for.
///
/// # Errors
///
/// 400 for what is no base64.
fn file_of(path: &str, data: String) -> Result<Vec<u8>, ApiError> {
    base64(data.as_bytes()).ok_or_else(|| ApiError::field(path, "is not base64"))
}

/// The parts before and after the comma of the data URL at `path`, which has the form `form`.
///
/// # Errors
///
/// 400 for another URL.
fn data_url<'a>(
    path: &str,
    url: &'a str,
    (word, form): (&str, &str),
) -> Result<(&'a str, &'a str), ApiError> {
    let begins = |with: &str| {
        let head = url.get(..with.len());
        head.is_some_and(|head| head.eq_ignore_ascii_case(with))
    };
    if begins("http://") || begins("https://") {
        let message =
            format!("is an address, and this server fetches nothing; send the {word} as {form}");
        return Err(ApiError::field(path, message));
    }
    let data = url.split_once(',').filter(|_| begins("data:"));
    match data {
        Some((head, data)) if head.to_ascii_lowercase().ends_with(";base64") => Ok((head, data)),
        _ => Err(ApiError::field(path, format!("must have the form {form}"))),
    }
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
}
