//! Media in requests: what clients send in the place of a picture, a video or a sound, and how it comes
//! into a prompt.
//!
//! ```text
//! dialect ─→ Media (as sent) ─→ bytes of files ─→ decode and resize ─→ Senses::place ─→ engine
//!  a connection's thread                           a worker's thread
//! ```
//!
//! Where the bytes of files come from is told by [`crate::sources`].

mod picture;
mod sound;
mod video;

use engine::{MediaItem, MediaLimits, ModelInfo, PlacedMedia, Senses, SoundLimits};
use serde_json::{Map, Value};

use crate::errors::ApiError;
use crate::limits::{
    MEDIA_BYTES_MAX, MEDIA_PIXELS_MAX, PICTURES_MAX, SOUNDS_MAX, VIDEO_SECONDS_MAX, VIDEO_TIME,
    VIDEOS_MAX,
};
use crate::sources::{Data, MediaSources, Place};

pub(crate) use picture::{Image, read_list, read_source};
pub(crate) use sound::Audio;
pub(crate) use video::{Video, defaults};

/// A picture, a video or a sound, as a request has it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Media {
    Picture(Image),
    Video(Video),
    Sound(Audio),
}

impl Media {
    /// The place in the request, for messages.
    fn path(&self) -> &str {
        match self {
            Media::Picture(image) => &image.path,
            Media::Video(video) => &video.path,
            Media::Sound(audio) => &audio.path,
        }
    }

    /// Takes its data out.
    pub(crate) fn take(&mut self) -> Media {
        match self {
            Media::Picture(image) => Media::Picture(image.take()),
            Media::Video(video) => Media::Video(video.take()),
            Media::Sound(audio) => Media::Sound(audio.take()),
        }
    }

    /// The files of a picture, video or sound.
    fn files(&self) -> &[Data] {
        match self {
            Media::Picture(image) => std::slice::from_ref(&image.data),
            Media::Video(video) => video.files(),
            Media::Sound(audio) => std::slice::from_ref(&audio.data),
        }
    }

    /// The files of a picture, video or sound, to be replaced by what was read.
    fn files_mut(&mut self) -> &mut [Data] {
        match self {
            Media::Picture(image) => std::slice::from_mut(&mut image.data),
            Media::Video(video) => video.files_mut(),
            Media::Sound(audio) => std::slice::from_mut(&mut audio.data),
        }
    }

    /// What it is, for messages.
    fn word(&self) -> &'static str {
        match self {
            Media::Picture(_) => "picture",
            Media::Video(_) => "video",
            Media::Sound(_) => "sound",
        }
    }

    /// The type of the part that chat templates read.
    pub(crate) fn template_type(&self) -> &'static str {
        match self {
            Media::Picture(_) => "image",
            Media::Video(_) => "video",
            Media::Sound(_) => "audio",
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

/// Whether a part of this type is no text but media, in OpenAI's requests.
pub(crate) fn is_media(kind: &str) -> bool {
    picture::is_picture(kind) || video::is_video(kind) || sound::is_sound(kind)
}

/// The media in the part at `path` of a message, in OpenAI's form.
///
/// # Errors
///
/// 400 for a part without data in it.
pub(crate) fn read(path: &str, part: &Map<String, Value>) -> Result<Media, ApiError> {
    match part.get("type").and_then(Value::as_str) {
        Some(kind) if video::is_video(kind) => video::read(path, part).map(Media::Video),
        Some(kind) if sound::is_sound(kind) => sound::read(path, part).map(Media::Sound),
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
        Some(kind) if sound::is_sound(kind) => sound::check(path, part),
        _ => picture::check(path, part),
    }
}

/// Refuses `media` where the model of `info` takes none of their kind, and where they are too many.
///
/// # Errors
///
/// 400 that names the first one, or the first that is one too many.
pub(crate) fn admit(media: &[Media], info: &ModelInfo) -> Result<(), ApiError> {
    let refused = media.iter().find_map(|media| {
        let (takes, reason) = match media {
            Media::Sound(_) => (info.hearing.is_some(), &info.hearing_reason),
            Media::Picture(_) | Media::Video(_) => (info.vision.is_some(), &info.vision_reason),
        };
        (!takes).then_some((media, reason))
    });
    if let Some((first, reason)) = refused {
        let message = format!("is a {}, and this model takes none: {reason}", first.word());
        return Err(ApiError::field(first.path(), message));
    }
    for (word, most) in [
        ("picture", PICTURES_MAX),
        ("video", VIDEOS_MAX),
        ("sound", SOUNDS_MAX),
    ] {
        let mut of_kind = media.iter().filter(|media| media.word() == word);
        if let Some(extra) = of_kind.nth(most) {
            let message = format!("is one {word} too many: a request has {most} at most");
            return Err(ApiError::field(extra.path(), message));
        }
    }
    Ok(())
}

/// Whether a file of `media` is somewhere else.
pub(crate) fn are_named(media: &[Media]) -> bool {
    media.iter().flat_map(Media::files).any(Data::is_named)
}

/// Bytes that are held for the files of `media`.
pub(crate) fn held(media: &[Media]) -> usize {
    media.iter().flat_map(Media::files).map(Data::held).sum()
}

/// Reads the files of `media` that are at addresses or in a folder.
///
/// # Errors
///
/// 400 that names the first that may not be read, or cannot be; 503 if too many requests wait for
/// that.
pub(crate) async fn bring(
    sources: &MediaSources,
    mut media: Vec<Media>,
) -> Result<(Vec<Media>, Place), ApiError> {
    let mut list = Vec::new();
    for one in &mut media {
        let path = one.path().to_owned();
        for file in one.files_mut() {
            sources.check(&path, file)?;
            list.push((path.clone(), file.take()));
        }
    }
    let (list, place) = sources.bring(list, MEDIA_BYTES_MAX).await?;
    let files = media.iter_mut().flat_map(Media::files_mut);
    for (file, (_, data)) in files.zip(list) {
        *file = data;
    }
    Ok((media, place))
}

/// Decodes `media` for a model with these `senses`, which takes them. Takes milliseconds to seconds.
///
/// # Errors
///
/// 400 that names the first that is broken, too large, or none.
pub(crate) fn decode(
    senses: &Senses,
    media: impl Iterator<Item = Media>,
) -> Result<Vec<MediaItem>, ApiError> {
    const SENSE: &str = "media are refused that the model does not take";
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
    let sounds = SoundLimits {
        bytes: MEDIA_BYTES_MAX,
        ..SoundLimits::default()
    };
    let vision = || senses.vision.as_ref().expect(SENSE);
    let decode = |media| {
        let (path, opened) = match media {
            Media::Picture(Image { path, data, rows }) => {
                let file = file_of(&path, data)?;
                (path, vision().open(file, rows, &pictures))
            }
            Media::Video(video) => {
                let (path, options) = (video.path.clone(), video.options);
                let source = video.source()?;
                (path, vision().open_clip(source, options, &videos))
            }
            Media::Sound(Audio { path, data }) => {
                let file = file_of(&path, data)?;
                let hearing = senses.hearing.as_ref().expect(SENSE);
                (path, hearing.open(file, &sounds))
            }
        };
        opened.map_err(|error| ApiError::field(path, error.to_string()))
    };
    media.map(decode).collect()
}

/// The bytes of the file `data` at `path`, which has been read.
///
/// # Errors
///
/// 400 for what is no base64.
fn file_of(path: &str, data: Data) -> Result<Vec<u8>, ApiError> {
    let file = data.into_bytes();
    file.ok_or_else(|| ApiError::field(path, "is not base64"))
}
