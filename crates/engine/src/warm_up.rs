//! What a device does once for each kind of step: compile kernels, allocate memory, record the step. Done before a model
//! is ready, so that the first request does not wait for it.

use crate::options::LoadOptions;
use crate::preflight::{self, Probing};
use speculate::{RoundError, Speculator};
use std::time::Duration;
use text::Text;

/// No prompt starts later. Only kernels that were never compiled take so long.
const PROMPTS_LIMIT: Duration = Duration::from_secs(5);
/// The longest time that steps of one text may take; those of several texts may take twice as long.
const STEPS_LIMIT: Duration = Duration::from_secs(1);

/// Runs each kind of step on a device that [records steps](backend::Capabilities::records), with drafts of up to `longest`
/// tokens; nothing where no prompt fits, or the model is not to be tried.
///
/// # Errors
///
/// If the device fails, or the model computes values that are not numbers.
pub(crate) fn run(
    speculator: &mut Speculator,
    text: &Text,
    options: &LoadOptions,
    longest: usize,
) -> Result<(), RoundError> {
    let records = speculator.backend().capabilities().records;
    if !records || matches!(options.probing, Probing::Skip { .. }) {
        return Ok(());
    }
    let context = speculator.memory().size().context;
    let Ok(prompts) = preflight::prompts(text, context) else {
        return Ok(());
    };
    let longest = match speculator.drafters().is_empty() {
        true => 0,
        false => longest,
    };
    speculator.warm_up_prompts(&prompts[0], PROMPTS_LIMIT)?;
    speculator.warm_up(&prompts[0], longest, STEPS_LIMIT)
}
