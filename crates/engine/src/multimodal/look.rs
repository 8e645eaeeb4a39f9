//! What the engine's thread sees and hears with.

use super::cache::Embeddings;
use super::item::{Input, frames};
use super::slices::Slices;
use super::{PlacedMedia, Senses};
use crate::request::{CancelToken, Request};
use models::{Phase, SoundRun, TowerRun};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of embeddings that are kept for later questions about what they are of.
const CACHE_BYTES: usize = 256 << 20;

/// How long a tower works beside no other request before it is seen whether one has come.
const ALONE: Duration = Duration::from_millis(50);

/// Towers, what one of them is looking at, and what they have made.
pub(crate) struct Looking {
    senses: Senses,
    embeddings: Embeddings,
    slices: Slices,
    at_work: Option<AtWork>,
}

/// What a tower is looking at or hearing.
struct AtWork {
    /// The hash of the input.
    hash: [u8; 16],
    input: Input,
    run: Run,
}

enum Run {
    Vision(Box<TowerRun>),
    Hearing(SoundRun),
}

const HAS: &str = "media are decoded by the tower's own model";

impl AtWork {
    /// The beginning of a tower's work on `input`.
    fn new(senses: &Senses, hash: [u8; 16], input: Input) -> Result<Self, String> {
        let run = match &input {
            Input::Pixels { height, width, rgb } => {
                let (tower, _) = senses.vision.as_ref().expect(HAS).tower();
                let run = TowerRun::new(tower, &frames(*height, *width, rgb));
                Run::Vision(Box::new(run.map_err(|error| error.to_string())?))
            }
            Input::Samples(_) => {
                let (tower, _) = senses.hearing.as_ref().expect(HAS).tower();
                Run::Hearing(SoundRun::new(tower))
            }
        };
        Ok(AtWork { hash, input, run })
    }

    /// What comes next; nothing once all is done.
    fn next_phase(&self) -> Option<Phase> {
        match &self.run {
            Run::Vision(run) => run.next_phase(),
            Run::Hearing(run) => run.next_phase(),
        }
    }

    /// Runs the next `rows` rows, without waiting for the device.
    fn advance(&mut self, senses: &Senses, rows: usize) {
        match (&mut self.run, &self.input) {
            (Run::Vision(run), Input::Pixels { height, width, rgb }) => {
                let (tower, b) = senses.vision.as_ref().expect(HAS).tower();
                run.advance(tower, b, &frames(*height, *width, rgb), rows);
            }
            (Run::Hearing(run), Input::Samples(samples)) => {
                let (tower, b) = senses.hearing.as_ref().expect(HAS).tower();
                run.advance(tower, b, samples, rows);
            }
            _ => unreachable!("begun by its input"),
        }
    }

    /// Waits for the device.
    fn finish(&self, senses: &Senses) -> Result<(), String> {
        let b = match &self.run {
            Run::Vision(_) => senses.vision.as_ref().expect(HAS).tower().1,
            Run::Hearing(_) => senses.hearing.as_ref().expect(HAS).tower().1,
        };
        b.finish().map_err(|error| error.to_string())
    }

    /// The embeddings, once all is done.
    fn into_rows(self) -> Arc<[f32]> {
        match self.run {
            Run::Vision(run) => run.into_rows().1.into(),
            Run::Hearing(run) => run.into_rows().into(),
        }
    }
}

impl Looking {
    /// Looks with `senses`, for `percent` of a round's time beside seven requests or more.
    pub(crate) fn new(senses: Senses, percent: u32) -> Self {
        Looking {
            senses,
            embeddings: Embeddings::new(CACHE_BYTES),
            slices: Slices::new(percent),
            at_work: None,
        }
    }

    /// Gives media of `request` what is known of them, and has a tower go on with the first picture or
    /// part of a clip that is unknown: as long as it may beside `running` requests, or beside none until
    /// it is done or others may have come. Whether there was one, as `counts` are told.
    ///
    /// # Errors
    ///
    /// What the device says.
    pub(crate) fn see(
        &mut self,
        request: &mut Request,
        (cancel, running): (&CancelToken, usize),
        counts: &MediaCounts,
    ) -> Result<bool, String> {
        for placed in &mut request.media {
            if !placed.embeddings.is_empty() {
                continue;
            }
            let hash = placed.part.hash;
            if let Some(known) = self.embeddings.get(&hash) {
                placed.embeddings = known;
                counts.shown.fetch_add(1, Ordering::Relaxed);
                counts.known.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            let at_work = match self.at_work.take_if(|work| work.hash == hash) {
                Some(work) => work,
                None => AtWork::new(&self.senses, hash, placed.part.input.clone())?,
            };
            // What has failed is dropped.
            let at_work = self.work(at_work, (cancel, running), counts)?;
            if at_work.next_phase().is_some() {
                self.at_work = Some(at_work);
                return Ok(true);
            }
            placed.embeddings = at_work.into_rows();
            self.embeddings.put(hash, placed.embeddings.clone());
            counts.shown.fetch_add(1, Ordering::Relaxed);
            counts.encoded.fetch_add(1, Ordering::Relaxed);
            return Ok(true);
        }
        Ok(false)
    }

    /// Goes on with `at_work`.
    fn work(
        &mut self,
        mut at_work: AtWork,
        (cancel, running): (&CancelToken, usize),
        counts: &MediaCounts,
    ) -> Result<AtWork, String> {
        let start = Instant::now();
        let mut result = Ok(());
        while let Some(phase) = at_work.next_phase() {
            if running == 0 {
                if cancel.is_cancelled() || start.elapsed() > ALONE {
                    break;
                }
                at_work.advance(&self.senses, phase.rows);
                continue;
            }
            let Some(rows) = self.slices.next_rows(phase) else {
                break;
            };
            let start = Instant::now();
            at_work.advance(&self.senses, rows);
            result = at_work.finish(&self.senses);
            self.slices.note(phase, rows, start.elapsed());
            if result.is_err() {
                break;
            }
        }
        if running == 0 {
            result = at_work.finish(&self.senses);
        }
        let micros = start.elapsed().as_micros() as u64;
        counts.tower_micros.fetch_add(micros, Ordering::Relaxed);
        result.map(|()| at_work)
    }

    /// A round of `running` requests took so long: the tower may take its share of it.
    pub(crate) fn round(&mut self, took: Duration, running: usize) {
        self.slices.round(took, running, self.at_work.is_some());
    }

    /// Whether a tower is looking at something of `request`.
    pub(crate) fn is_at_work_for(&self, request: &Request) -> bool {
        let mut unseen = request.media.iter().filter(|of| of.embeddings.is_empty());
        let at_work = self.at_work.as_ref();
        at_work.is_some_and(|work| unseen.any(|of| of.part.hash == work.hash))
    }

    /// Drops what a tower has made so far of what nobody wants any more.
    pub(crate) fn forget(&mut self) {
        self.at_work = None;
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
