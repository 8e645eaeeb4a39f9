//! What a file may cost.

use std::ops::RangeInclusive;
use std::time::Duration;

/// What one file may cost. What is more is refused, from the file's header where that tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of the file.
    pub bytes: usize,
    /// Pixels of a side.
    pub side: u32,
    /// Pixels of a frame of up to 4 bytes a pixel; of deeper ones as many fewer.
    pub pixels: u64,
    /// Frames of a clip.
    pub frames: usize,
    /// Seconds of a clip.
    pub seconds: u64,
    /// Pixels of all frames of a clip that are looked at, in the size in which they are.
    pub clip_pixels: u64,
    /// Time for decoding, on a thread of its own.
    pub time: Duration,
}

impl Default for Limits {
    /// 32 MiB, 16,384 pixels a side, 64 million pixels a frame; clips of 131,072 frames and an hour,
    /// of which frames of 64 million pixels together are looked at, which take 192 MB; 20 seconds.
    fn default() -> Self {
        Limits {
            bytes: 32 << 20,
            side: 16_384,
            pixels: 64_000_000,
            frames: 131_072,
            seconds: 3_600,
            clip_pixels: 64_000_000,
            time: Duration::from_secs(20),
        }
    }
}

impl Limits {
    /// Bytes that a decoder may allocate at once, beside the pixels that it returns: some formats
    /// keep a picture of 8 bytes a pixel.
    pub(crate) fn decoder_bytes(&self) -> u64 {
        self.pixels.saturating_mul(8).saturating_add(16 << 20)
    }
}

/// What one sound may cost. What is more is refused, from the file's header where that tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SoundLimits {
    /// Bytes of the file.
    pub bytes: usize,
    /// Seconds.
    pub seconds: u32,
    /// Channels.
    pub channels: usize,
    /// Samples a second, at least and at most.
    pub rates: RangeInclusive<u32>,
    /// Time for decoding, on a thread of its own.
    pub time: Duration,
}

impl Default for SoundLimits {
    /// 32 MiB, 60 seconds, 8 channels, 4,000 to 192,000 samples a second, 20 seconds of work. What
    /// is decoded takes 46 MB at most.
    fn default() -> Self {
        SoundLimits {
            bytes: 32 << 20,
            seconds: 60,
            channels: 8,
            rates: 4_000..=192_000,
            time: Duration::from_secs(20),
        }
    }
}
