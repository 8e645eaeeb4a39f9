//! What rounds cost on this machine, measured before a model is ready, and remembered.
//!
//! Draft lengths follow from it, so that a first text need not find it out
//! ([`Speculator::calibrate`]). While texts are written the times follow the machine; the remembered ones
//! are where it starts from.

use crate::hashes::{read_json, sha256, write_json};
use crate::options::LoadOptions;
use crate::preflight::{self, Key, Probing};
use serde::Serialize;
use serde_json::json;
use speculate::length::{CostPoint, Costs};
use speculate::{RoundError, Speculator};
use std::path::Path;
use std::time::{Duration, Instant};
use text::Text;

/// The longest time that measuring may take.
const LIMIT: Duration = Duration::from_secs(1);
/// The folder of times in the cache folder.
const FOLDER: &str = "round-times";
/// Changes when what is measured does, so that old times do not count.
const VERSION: u32 = 4;
/// The times of a model take about 2 KB, and as much again for each number of texts that a GPU has run at once.
const BYTES_MAX: u64 = 1 << 20;

/// Times of steps and drafts, and where they are from.
#[derive(Clone, Debug, Serialize)]
pub struct Calibration {
    /// Whether the times were measured at an earlier start, and remembered.
    pub cached: bool,
    /// Milliseconds that measuring took at this start.
    pub took_ms: f64,
    /// The usual time of each kind of step and draft.
    pub times: Vec<CostPoint>,
}

/// Measures what rounds cost after one of the trial's prompts, or finds what an earlier start measured; nothing where
/// nobody drafts, no prompt fits, or the model is not to be tried. `weights` says where weights are.
///
/// # Errors
///
/// If the device fails, or the model computes values that are not numbers.
pub(crate) fn run(
    speculator: &mut Speculator,
    text: &Text,
    options: &LoadOptions,
    (key, weights): (&Key<'_>, &str),
) -> Result<Option<Calibration>, RoundError> {
    if matches!(options.probing, Probing::Skip { .. })
        || key.draft_max == 0
        || speculator.drafters().is_empty()
    {
        return Ok(None);
    }
    let name = json!([
        VERSION,
        env!("CARGO_PKG_VERSION"),
        options.machine,
        speculator.drafters(),
        weights,
        key
    ]);
    let name = format!("{}.json", sha256(name.to_string().as_bytes()));
    let file = options
        .probing
        .cache()
        .map(|folder| folder.join(FOLDER).join(name));
    if let Some(times) = file.as_deref().and_then(read) {
        speculator.set_costs(Costs::of_points(&times));
        return Ok(Some(Calibration {
            cached: true,
            took_ms: 0.0,
            times,
        }));
    }
    let context = speculator.memory().size().context;
    let Ok(prompts) = preflight::prompts(text, context) else {
        return Ok(None);
    };
    let start = Instant::now();
    speculator.calibrate(&prompts[0], key.draft_max, LIMIT)?;
    let took_ms = start.elapsed().as_secs_f64() * 1e3;
    let times = speculator.costs().points();
    if let Some(file) = &file {
        write_json(file, &times);
    }
    Ok(Some(Calibration {
        cached: false,
        took_ms,
        times,
    }))
}

/// The times in `file`, if it has some.
fn read(file: &Path) -> Option<Vec<CostPoint>> {
    let times: Vec<CostPoint> = read_json(file, BYTES_MAX)?;
    (!times.is_empty()).then_some(times)
}
