//! Any bytes as sound: what is decoded keeps to the limits, and becomes the features that a tower reads.
//!
//! Everything is decoded on the fuzzer's thread: a panic of a decoder, which a server would contain, is
//! a finding.

#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use media::{MediaError, SoundLimits, decode_sound_here};
use models::{SOUND_RATE, sound_features};

/// Samples of which features are made: more of them tell nothing new, and take their time.
const HEARD: usize = 4000;

fuzz_target!(|data: &[u8]| {
    let limits = SoundLimits {
        bytes: 1 << 20,
        seconds: 5,
        channels: 4,
        rates: 4_000..=192_000,
        // By the clock, which a busy machine stretches: the fuzzer has a limit of its own.
        time: Duration::from_secs(600),
    };
    match decode_sound_here(data, SOUND_RATE, &limits) {
        Ok(sound) => {
            let samples = sound.samples();
            assert!((1..=5 * SOUND_RATE as usize).contains(&samples.len()));
            assert!(samples.iter().all(|sample| sample.is_finite()));
            let heard = &samples[..samples.len().min(HEARD)];
            let features = sound_features(heard, &serde_json::Value::Null);
            assert!(features.iter().all(|feature| feature.is_finite()));
        }
        Err(MediaError::TooSlow(_)) => panic!("a file within the limits takes minutes"),
        Err(error) => assert!(error.to_string().len() < 400),
    }
});
