//! What the engine's thread sees and hears with.

use super::cache::Embeddings;
use super::item::{Input, frames};
use super::{PlacedMedia, Senses};
use crate::request::Request;
use models::{encode, encode_sound};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Bytes of embeddings that are kept for later questions about what they are of.
const CACHE_BYTES: usize = 256 << 20;

/// Towers, and what they have made.
pub(crate) struct Looking {
    senses: Senses,
    embeddings: Embeddings,
}

impl Looking {
    pub(crate) fn new(senses: Senses) -> Self {
        Looking {
            senses,
            embeddings: Embeddings::new(CACHE_BYTES),
        }
    }

    /// Gives media of `request` what is known of them, and has the tower look at the first picture or
    /// part of a clip that is unknown. Whether the tower has worked, as `counts` are told.
    ///
    /// # Errors
    ///
    /// What the device says.
    pub(crate) fn see(
        &mut self,
        request: &mut Request,
        counts: &MediaCounts,
    ) -> Result<bool, String> {
        for placed in &mut request.media {
            if !placed.embeddings.is_empty() {
                continue;
            }
            let hash = placed.part.hash;
            counts.shown.fetch_add(1, Ordering::Relaxed);
            if let Some(known) = self.embeddings.get(&hash) {
                placed.embeddings = known;
                counts.known.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            let start = Instant::now();
            let encoded = self.encode(&placed.part.input);
            let micros = start.elapsed().as_micros() as u64;
            counts.tower_micros.fetch_add(micros, Ordering::Relaxed);
            placed.embeddings = encoded?.into();
            self.embeddings.put(hash, placed.embeddings.clone());
            counts.encoded.fetch_add(1, Ordering::Relaxed);
            return Ok(true);
        }
        Ok(false)
    }

    /// What a tower makes of `input`, which was decoded for it.
    fn encode(&self, input: &Input) -> Result<Vec<f32>, String> {
        const HAS: &str = "media are decoded by the tower's own model";
        match input {
            Input::Pixels { height, width, rgb } => {
                let (tower, b) = self.senses.vision.as_ref().expect(HAS).tower();
                let made = encode(tower, b, &frames(*height, *width, rgb));
                made.map(|(_, rows)| rows)
                    .map_err(|error| error.to_string())
            }
            Input::Samples(samples) => {
                let (tower, b) = self.senses.hearing.as_ref().expect(HAS).tower();
                encode_sound(tower, b, samples).map_err(|error| error.to_string())
            }
        }
    }
}

/// Pictures and parts of clips since the engine has started.
#[derive(Debug, Default)]
pub struct MediaCounts {
    /// Pictures and parts of clips that the tower has encoded.
    pub encoded: AtomicU64,
    /// Pictures and parts of clips whose embeddings were found by their content.
    pub known: AtomicU64,
    /// Pictures and parts of clips of requests, encoded or found.
    pub shown: AtomicU64,
    /// Microseconds that the tower and its device have taken.
    pub tower_micros: AtomicU64,
}

/// Checks that the media of `request` stand in its prompt, one after the other.
///
/// # Errors
///
/// Says which rows do not.
pub(crate) fn check_places(request: &Request) -> Result<(), String> {
    let mut free = 0;
    for PlacedMedia { rows, .. } in &request.media {
        if rows.start < free || rows.end > request.prompt.len() {
            return Err(format!(
                "the rows of media ascend within the prompt; {rows:?} does not"
            ));
        }
        free = rows.end;
    }
    Ok(())
}

/// Whether the tower has looked at all media of `request`.
pub(crate) fn is_seen(request: &Request) -> bool {
    let mut media = request.media.iter();
    media.all(|placed| !placed.embeddings.is_empty())
}
