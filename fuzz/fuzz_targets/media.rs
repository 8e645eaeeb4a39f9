//! Any bytes as a picture or an animation: what is decoded keeps to the limits and can be resized.

#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use media::{Limits, MediaError, decode};

fuzz_target!(|data: &[u8]| {
    let limits = Limits {
        bytes: 1 << 20,
        side: 4096,
        pixels: 1 << 20,
        frames: 32,
        clip_pixels: 1 << 22,
        time: Duration::from_secs(10),
    };
    match decode(data.to_vec(), &limits) {
        Ok(clip) => {
            assert!((1..=limits.frames).contains(&clip.frames().len()));
            let frame = clip.frame(0);
            let pixels = frame.height() * frame.width();
            assert!((1..=limits.pixels).contains(&(pixels as u64)));
            // The sizes of the resized frame are arbitrary too, and small.
            let side = |i: usize| 1 + usize::from(data[i % data.len()]) % 64;
            let small = frame.resized(side(7), side(11));
            assert_eq!(small.rgb().len(), side(7) * side(11) * 3);
        }
        Err(MediaError::TooSlow(_)) => panic!("a file within the limits takes seconds"),
        Err(error) => assert!(error.to_string().len() < 400),
    }
});
