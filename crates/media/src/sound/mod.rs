//! Sound: bytes become samples of one channel, at the rate that a model wants.

mod container;
mod read_budget;
mod resample;
mod vorbis;

use std::convert::Infallible;

use crate::deadline::Deadline;
use crate::decode::within;
use crate::error::check;
use crate::{Bound, MediaError, SoundLimits};
use container::Container;

/// Samples of one channel, about -1 to 1.
#[derive(Clone, PartialEq)]
pub struct Sound {
    rate: u32,
    samples: Vec<f32>,
}

impl Sound {
    /// A sound of `samples`, `rate` a second.
    ///
    /// # Panics
    ///
    /// Panics if the rate is 0.
    pub fn new(rate: u32, samples: Vec<f32>) -> Self {
        assert!(rate > 0, "a sound has samples a second");
        Sound { rate, samples }
    }

    /// Samples a second.
    pub fn rate(&self) -> u32 {
        self.rate
    }

    /// The samples.
    pub fn samples(&self) -> &[f32] {
        &self.samples
    }

    /// How long it lasts.
    pub fn seconds(&self) -> f64 {
        self.samples.len() as f64 / f64::from(self.rate)
    }

    /// The sound at `rate` samples a second; the same samples where that is its rate.
    ///
    /// A band-limited interpolation: every frequency below 91 % of half the lower rate keeps its
    /// amplitude within 2e-6, and what lies above half the lower rate is attenuated by 120 dB. There is
    /// silence before and after the sound. The number of samples is rounded to the nearest.
    ///
    /// # Panics
    ///
    /// Panics if `rate` is 0.
    #[must_use]
    pub fn resampled(self, rate: u32) -> Sound {
        let Ok(sound) = self.resampled_while(rate, || Ok::<_, Infallible>(()));
        sound
    }

    /// [`Sound::resampled`], for as long as `go_on` allows.
    fn resampled_while<E>(
        self,
        rate: u32,
        go_on: impl FnMut() -> Result<(), E>,
    ) -> Result<Sound, E> {
        assert!(rate > 0, "a sound has samples a second");
        if rate == self.rate {
            return Ok(self);
        }
        let samples = resample::resample(&self.samples, [self.rate, rate], go_on)?;
        Ok(Sound { rate, samples })
    }
}

impl std::fmt::Debug for Sound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sound({} at {})", self.samples.len(), self.rate)
    }
}

/// Decodes a file of sound (WAV, FLAC, MP3, or Ogg with Vorbis or FLAC) to one channel of `rate` samples
/// a second: first the mean of the channels, then [`Sound::resampled`]. Integers become what they are of
/// their largest value; a file of one channel and that rate keeps its samples.
///
/// What an encoder has added before and after a sound is left out where the file says so. A file that
/// holds less sound than its header states is broken; where the header states nothing, as those of
/// streams, it ends where it ends.
///
/// Works on a thread of its own. If time is up before it has ended, the thread is left to itself, and
/// ends with the packet that it is at.
///
/// # Errors
///
/// [`MediaError`] if the format is unknown, the file is broken or exceeds one of `limits`.
///
/// # Panics
///
/// Panics if `rate` is 0, or the system cannot start a thread.
pub fn decode_sound(bytes: Vec<u8>, rate: u32, limits: &SoundLimits) -> Result<Sound, MediaError> {
    assert!(rate > 0, "a sound has samples a second");
    let container = container(&bytes, limits)?;
    let own = limits.clone();
    within(limits.time, move |deadline| {
        let sound = container.decode(&bytes, &own, deadline)?;
        drop(bytes);
        sound.resampled_while(rate, || deadline.check())
    })
}

/// [`decode_sound`] on the caller's thread, which panics where a decoder does: for tests.
///
/// # Errors
///
/// As [`decode_sound`].
///
/// # Panics
///
/// Panics if `rate` is 0, and where a decoder does.
pub fn decode_sound_here(
    bytes: &[u8],
    rate: u32,
    limits: &SoundLimits,
) -> Result<Sound, MediaError> {
    let container = container(bytes, limits)?;
    let deadline = Deadline::after(limits.time);
    deadline.keep(|| {
        let sound = container.decode(bytes, limits, deadline)?;
        sound.resampled_while(rate, || deadline.check())
    })
}

/// The container that `bytes` are, if they are not too many.
fn container(bytes: &[u8], limits: &SoundLimits) -> Result<Container, MediaError> {
    check(Bound::Bytes, limits.bytes as u64, bytes.len() as u64)?;
    Container::of(bytes).ok_or(MediaError::UnknownSound)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn no_decoder_gives_samples_of_a_file_that_cannot_be_read() {
        let limits = SoundLimits::default();
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sound");
        for name in ["stereo.flac", "mono.mp3", "stereo.ogg"] {
            let bytes = std::fs::read(format!("{folder}/{name}")).unwrap();
            let container = Container::of(&bytes).unwrap();
            let decoded = |time| container.decode(&bytes, &limits, Deadline::after(time));
            assert!(decoded(limits.time).is_ok(), "{name}");
            assert!(decoded(Duration::ZERO).is_err(), "{name}");
        }
        // Resampling has no file to read.
        let sound = Sound::new(44_100, vec![0.5; 44_100]);
        let mut asked = 0;
        let ended = sound.resampled_while(16_000, || {
            asked += 1;
            if asked < 3 { Ok(()) } else { Err(asked) }
        });
        assert_eq!(ended, Err(3));
    }
}
