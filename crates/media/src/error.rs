//! Why a file is no picture.

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
    /// Pixels of all frames of a clip.
    ClipPixels,
}

impl std::fmt::Display for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Bound::Bytes => "bytes",
            Bound::Side => "pixels a side",
            Bound::Pixels => "pixels",
            Bound::Frames => "frames",
            Bound::ClipPixels => "pixels in all frames",
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
    /// The decoder did not end in time.
    #[error("took longer than {}s to decode: make it smaller", .0.as_secs_f64())]
    TooSlow(Duration),
}

/// Refuses `found` if it exceeds `most`.
pub(crate) fn check(bound: Bound, most: u64, found: u64) -> Result<(), MediaError> {
    match found > most {
        true => Err(MediaError::TooLarge { bound, most, found }),
        false => Ok(()),
    }
}
