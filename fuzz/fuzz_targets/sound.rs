//! Any bytes as sound: what is decoded keeps to the limits.

#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use media::{MediaError, SoundLimits, decode_sound};

fuzz_target!(|data: &[u8]| {
    let limits = SoundLimits {
        bytes: 1 << 20,
        seconds: 20,
        channels: 4,
        rates: 8_000..=48_000,
        time: Duration::from_secs(10),
    };
    match decode_sound(data.to_vec(), 16_000, &limits) {
        Ok(sound) => {
            let n = sound.samples().len();
            assert!((1..=20 * 16_000).contains(&n));
            assert!(sound.samples().iter().all(|sample| sample.is_finite()));
        }
        Err(MediaError::TooSlow(_)) => panic!("a file within the limits takes seconds"),
        Err(error) => assert!(error.to_string().len() < 400),
    }
});
