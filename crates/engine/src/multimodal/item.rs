//! What a request shows: pictures, clips and sounds, decoded and resized for the model, and where they stand in
//! a prompt.

use models::Frames;
use speculate::MediaSpan;
use std::ops::Range;
use std::sync::Arc;

/// A kind of media.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MediaKind {
    /// A picture.
    Picture,
    /// A clip of frames.
    Video,
    /// A sound.
    Sound,
}

impl std::fmt::Display for MediaKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            MediaKind::Picture => "picture",
            MediaKind::Video => "video",
            MediaKind::Sound => "sound",
        })
    }
}

/// A picture, a clip or a sound that has been decoded for the model.
#[derive(Clone, Debug)]
pub struct MediaItem {
    pub(super) kind: MediaKind,
    pub(super) parts: Vec<MediaPart>,
}

impl MediaItem {
    /// The kind of medium.
    pub fn kind(&self) -> MediaKind {
        self.kind
    }

    /// Rows of a prompt that it becomes, beside what is said of the times of frames.
    pub fn rows(&self) -> usize {
        self.parts.iter().map(MediaPart::rows).sum()
    }

    /// How often the tower looks: once at a picture, at a clip once a frame or a pair of frames.
    pub fn looks(&self) -> usize {
        self.parts.len()
    }

    /// The first 16 bytes of the SHA-256 of the pixels of each look, their size, and what their encoding
    /// depends on.
    pub fn hashes(&self) -> Vec<[u8; 16]> {
        self.parts.iter().map(|part| part.hash).collect()
    }
}

/// What a tower makes one span of: a picture, frames of a clip, or a sound.
#[derive(Clone)]
pub(super) struct MediaPart {
    /// What a prompt says before the span.
    pub(super) label: String,
    pub(super) input: Input,
    /// Rows of a prompt from top to bottom, and from left to right.
    pub(super) grid: [usize; 2],
    pub(super) hash: [u8; 16],
}

impl MediaPart {
    pub(super) fn rows(&self) -> usize {
        self.grid[0] * self.grid[1]
    }
}

impl std::fmt::Debug for MediaPart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [height, width] = self.grid;
        write!(f, "{}{height}x{width} rows", self.label)
    }
}

/// What a tower reads.
#[derive(Clone)]
pub(super) enum Input {
    /// Frames of pixels.
    Pixels {
        height: usize,
        width: usize,
        /// Red, green and blue of each pixel, `[frames, height, width, 3]`.
        rgb: Arc<[u8]>,
    },
    /// Samples of one channel.
    Samples(Arc<[f32]>),
}

/// The frames of `rgb`.
pub(super) fn frames(height: usize, width: usize, rgb: &[u8]) -> Frames<'_> {
    Frames { height, width, rgb }
}

/// A picture, a part of a clip or a sound in a prompt.
#[derive(Clone, Debug)]
pub struct PlacedMedia {
    pub(super) kind: MediaKind,
    pub(super) part: MediaPart,
    /// The rows of the prompt; their tokens are placeholders.
    pub(super) rows: Range<usize>,
    /// What the target reads in the place of the placeholders; empty until the tower has run.
    pub(super) embeddings: Arc<[f32]>,
}

impl PlacedMedia {
    /// What the rows are of.
    pub fn kind(&self) -> MediaKind {
        self.kind
    }

    /// The rows of the prompt; their tokens are placeholders.
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Rows from top to bottom, and from left to right.
    pub fn grid(&self) -> [usize; 2] {
        self.part.grid
    }

    /// The rows as prompts of the target have them.
    pub(crate) fn span(&self) -> MediaSpan {
        MediaSpan {
            rows: self.rows.clone(),
            hash: self.part.hash,
            grid: self.part.grid,
            is_causal: self.kind == MediaKind::Sound,
            embeddings: self.embeddings.clone(),
        }
    }
}

/// Tokens of a prompt that stand for media, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct MediaRowCounts {
    /// Tokens of pictures.
    #[serde(rename = "picture_tokens")]
    pub pictures: usize,
    /// Tokens of clips.
    #[serde(rename = "video_tokens")]
    pub videos: usize,
    /// Tokens of sounds.
    #[serde(rename = "audio_tokens")]
    pub sounds: usize,
}

impl MediaRowCounts {
    /// Counts the rows of `media`.
    pub(crate) fn of(media: &[PlacedMedia]) -> Self {
        let mut counts = MediaRowCounts::default();
        for placed in media {
            *match placed.kind {
                MediaKind::Picture => &mut counts.pictures,
                MediaKind::Video => &mut counts.videos,
                MediaKind::Sound => &mut counts.sounds,
            } += placed.rows.len();
        }
        counts
    }
}
