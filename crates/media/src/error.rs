//! Why a file is no picture, clip or sound.

use std::time::Duration;

/// A bound that a file exceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Bound {
    /// Bytes of the file.
    Bytes,
    /// Pixels of a side.
    Side,
    /// Pixels of a frame.
    Pixels,
    /// Frames of a clip.
    Frames,
    /// Seconds of a clip or a sound.
    Seconds,
    /// Pixels of all frames of a clip that are looked at.
    ClipPixels,
    /// Channels of a sound.
    Channels,
    /// Samples a second of a sound.
    SampleRate,
    /// Bytes of the headers and tags of a sound.
    Tags,
}

impl std::fmt::Display for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Bound::Bytes => "bytes",
            Bound::Side => "pixels a side",
            Bound::Pixels => "pixels",
            Bound::Frames => "frames",
            Bound::Seconds => "seconds",
            Bound::ClipPixels => "pixels in all frames",
            Bound::Channels => "channels",
            Bound::SampleRate => "samples a second",
            Bound::Tags => "bytes of headers and tags",
        })
    }
}

/// Why a file could not be decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MediaError {
    /// The first bytes are those of no known format.
    #[error("is in no known format: send PNG, JPEG, WebP or GIF")]
    UnknownFormat,
    /// The first bytes are those of no known format of clips.
    #[error("is in no known format: send MP4, WebM, an animated GIF or WebP, or a list of frames")]
    UnknownClip,
    /// The first bytes are those of no known format of sound, or the file's codec is not known.
    #[error("is in no known format: send WAV, FLAC, MP3 or Ogg Vorbis")]
    UnknownSound,
    /// The file is cut off, broken, or uses what the decoder does not know.
    #[error("is broken or cut off: {0}")]
    Broken(String),
    /// The file exceeds a bound.
    #[error("is too large: {most} {bound} at most, found {found}")]
    TooLarge {
        /// The bound.
        bound: Bound,
        /// The most that is taken.
        most: u64,
        /// What the file has.
        found: u64,
    },
    /// A program that the format takes cannot be found.
    #[error(
        "{format} needs the program {tool} on the PATH; send an animated GIF or WebP, or a list of frames"
    )]
    NoTool {
        /// The format.
        format: &'static str,
        /// The program.
        tool: &'static str,
    },
    /// A program that the format takes cannot be run.
    #[error("cannot be decoded: {tool} cannot be used: {reason}")]
    Tool {
        /// The program, or what it needs.
        tool: String,
        /// Why.
        reason: String,
    },
    /// A frame of a list is no picture.
    #[error("has a bad frame: frame {frame} {error}")]
    Frame {
        /// The number of the frame, from 0.
        frame: usize,
        /// What is wrong with it.
        error: Box<MediaError>,
    },
    /// A frame has another size than the first.
    #[error("has frames of several sizes: frame {frame} has another than the first")]
    OtherSize {
        /// The number of the frame among those that are looked at, from 0.
        frame: usize,
    },
    /// The frames cannot be resized for the model.
    #[error("{0}")]
    Size(String),
    /// The decoder did not end in time.
    #[error("took longer than {}s to decode: make it smaller", .0.as_secs_f64())]
    TooSlow(Duration),
}

impl MediaError {
    /// What a decoder says of a broken file, in at most a line.
    pub(crate) fn broken(text: &str) -> MediaError {
        let line = text.lines().next().unwrap_or_default();
        MediaError::Broken(line.chars().take(200).collect())
    }
}

/// Refuses `found` if it exceeds `most`.
pub(crate) fn check(bound: Bound, most: u64, found: u64) -> Result<(), MediaError> {
    match found > most {
        true => Err(MediaError::TooLarge { bound, most, found }),
        false => Ok(()),
    }
}
