//! Any bytes as a picture and as a clip: what is decoded keeps to the limits, and becomes the pixels
//! that a tower reads.
//!
//! Everything is decoded on the fuzzer's thread: a panic of a decoder, which a server would contain, is
//! a finding.

#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use media::{ClipRule, Frame, Limits, MediaError, VideoTools, decode_clip_here, decode_here};
use models::{SizeRule, VideoRule};

/// How the models here look at media, at pictures of some thousand pixels.
#[derive(Clone, Copy)]
struct Looks {
    size: SizeRule,
    video: VideoRule,
}

/// Gemma 4, and Qwen 3.5.
const LOOKS: [Looks; 2] = [
    Looks {
        size: SizeRule::Rows { side: 48, most: 3 },
        video: VideoRule::Even {
            frames: 3,
            rows: 2,
            fps: None,
        },
    },
    Looks {
        size: SizeRule::Pixels {
            side: 32,
            least: 1024,
            most: 4096,
            frames_a_run: 2,
        },
        video: VideoRule::Rate {
            fps: 2.0,
            least: 2,
            most: 6,
            frames_a_run: 2,
        },
    },
];

impl ClipRule for Looks {
    fn frames(&self, count: usize, fps: Option<f64>) -> Vec<usize> {
        self.video.frames(count, fps)
    }

    fn size(&self, frames: usize, height: usize, width: usize) -> Result<[usize; 2], String> {
        let frames = frames.max(self.video.frames_a_run());
        let size = self.size.fit(frames, height, width);
        size.map_err(|error| error.to_string())
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
        // By the clock, which a busy machine stretches: the fuzzer has a limit of its own.
        time: Duration::from_secs(600),
    };
    match decode_here(data, &limits) {
        Ok(frame) => {
            let pixels = frame.height() * frame.width();
            assert!((1..=limits.pixels).contains(&(pixels as u64)));
            for look in LOOKS {
                // A picture that is too long is refused.
                if let Ok([height, width]) = look.size.fit(1, frame.height(), frame.width()) {
                    let small = frame.resized(height, width);
                    assert_eq!(small.rgb().len(), height * width * 3);
                }
            }
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
    let look = LOOKS[data.len() % LOOKS.len()];
    match decode_clip_here(data, look, &limits, &tools) {
        Ok(clip) => {
            assert!((1..=limits.frames).contains(&clip.frames().len()));
            assert!(clip.fps().is_none_or(|fps| fps > 0.0));
            let pixels = clip.frames().iter().map(Frame::rgb).map(<[u8]>::len);
            assert!(pixels.sum::<usize>() as u64 <= 3 * limits.clip_pixels);
            let labels = look.video.labels(clip.numbers(), clip.fps());
            assert!((1..=clip.frames().len()).contains(&labels.len()));
        }
        Err(error) => check(&error),
    }
});

fn check(error: &MediaError) {
    assert!(
        !matches!(error, MediaError::TooSlow(_)),
        "a file within the limits takes minutes"
    );
    assert!(error.to_string().len() < 400);
}
