//! Any bytes as a picture and as a clip: what is decoded keeps to the limits and can be resized.
//!
//! A picture is decoded on the fuzzer's thread: a panic of a decoder, which a server would contain, is
//! a finding.

#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use media::{ClipRule, Limits, MediaError, VideoTools, decode_clip, decode_here};

/// Every third frame, as it is.
struct Third;

impl ClipRule for Third {
    fn frames(&self, count: usize, _: Option<f64>) -> Vec<usize> {
        (0..count).step_by(3).collect()
    }

    fn size(&self, _: usize, height: usize, width: usize) -> Result<[usize; 2], String> {
        Ok([height, width])
    }
}

fuzz_target!(|data: &[u8]| {
    let limits = Limits {
        bytes: 1 << 20,
        // Small, so that a promise of pixels does not take the time of many other inputs.
        side: 1024,
        pixels: 1 << 16,
        frames: 32,
        seconds: 60,
        clip_pixels: 1 << 18,
        time: Duration::from_secs(10),
    };
    match decode_here(data, &limits) {
        Ok(frame) => {
            let pixels = frame.height() * frame.width();
            assert!((1..=limits.pixels).contains(&(pixels as u64)));
            // The sizes of the resized frame are arbitrary too, and small.
            let side = |i: usize| 1 + usize::from(data[i % data.len()]) % 64;
            let small = frame.resized(side(7), side(11));
            assert_eq!(small.rgb().len(), side(7) * side(11) * 3);
        }
        Err(error) => check(&error),
    }
    // Only animations are more than a picture. No program decodes anything here.
    if !data.starts_with(b"GIF8") && !data.starts_with(b"RIFF") {
        return;
    }
    let tools = VideoTools {
        ffmpeg: "/nonexistent/ffmpeg".into(),
        ffprobe: "/nonexistent/ffprobe".into(),
    };
    match decode_clip(data.to_vec(), Third, &limits, &tools) {
        Ok(clip) => {
            assert!((1..=limits.frames).contains(&clip.frames().len()));
            assert!(clip.numbers().iter().all(|n| n % 3 == 0));
            assert!(clip.fps().is_none_or(|fps| fps > 0.0));
        }
        Err(error) => check(&error),
    }
});

fn check(error: &MediaError) {
    assert!(
        !matches!(error, MediaError::TooSlow(_)),
        "a file within the limits takes seconds"
    );
    assert!(error.to_string().len() < 400);
}
