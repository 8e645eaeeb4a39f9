//! Where weights are while a model runs: packed for speed, or mapped to save memory.
//!
//! A backend packs weights into the order that its kernels read, which takes as much
//! memory again as the files. It may also leave them in their mapped files: memory holds
//! the file's pages, which the system can drop and read again, and every product packs
//! what it multiplies. The results have the same bits.

use crate::error::{EngineError, TooLarge, Unmappable};
use crate::footprint::Planned;
use crate::multimodal::Sight;
use crate::options::{LoadOptions, LoadProgress};
use crate::reason::{Placement, WeightsReason};
use backend::Backend;
use cache::MemorySize;
use models::Target;
use std::ops::Range;
use weights::Checkpoint;

/// The share of loading that weights are, roughly: from when they begin to when all are there.
const WEIGHTS: Range<f64> = 0.05..0.85;

/// The memory that a model may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    /// Bytes in all; no limit if absent.
    pub(crate) limit: Option<u64>,
    /// Bytes of packed weights.
    pub(crate) weights: u64,
    /// Bytes that a vision tower takes beside its weights while it looks.
    pub(crate) tower: u64,
}

impl Budget {
    /// This budget with `weights` more bytes of packed weights, those of a draft model beside the target.
    pub(crate) fn beside(self, weights: u64) -> Budget {
        Budget {
            weights: self.weights.saturating_add(weights),
            ..self
        }
    }

    /// Checks what all of `plans` take beside a target's memory of `size`, before any of it is allocated.
    pub(crate) fn check(&self, plans: &[Planned], size: &MemorySize) -> Result<(), TooLarge> {
        let remembered = Planned::all_bytes(plans, size) as u64;
        let remembered = remembered.saturating_add(self.tower);
        let limit = self.limit.unwrap_or(isize::MAX as u64);
        let fits = self.weights.saturating_add(remembered) <= limit;
        if fits && plans.iter().all(|plan| plan.has_numbers(size)) {
            return Ok(());
        }
        Err(TooLarge {
            weights: self.weights,
            remembered,
            limit,
            sequences: size.sequences,
            context: size.context,
        })
    }
}

/// Where weights are, and why.
pub(crate) struct Placed {
    pub(crate) mapped: bool,
    pub(crate) reason: WeightsReason,
}

/// Loads the target, says where its weights are, and loads its tower where `sight` says that there
/// is one. `size` says how much requests remember.
pub(crate) fn load_target(
    b: &dyn Backend,
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    sight: &mut Sight,
    size: impl Fn(&dyn Target) -> Result<MemorySize, EngineError>,
) -> Result<(Box<dyn Target>, Placed), EngineError> {
    let tower_bytes = sight.step_bytes();
    let mut load = |mapped: bool, reason: WeightsReason| {
        checkpoint.keep_mapped(mapped);
        if !mapped {
            follow(checkpoint, &options.progress);
        }
        let target = models::load_target(b, checkpoint)?;
        sight.load_towers(b, checkpoint);
        Ok((target, Placed { mapped, reason }))
    };
    // From here on it counts what this model leaves in its files.
    b.left_in_files();
    let obstacle = obstacle(b, checkpoint, options);
    let free = match (options.weights, obstacle) {
        (Placement::Mapped, Some(obstacle)) => return Err(EngineError::Unmappable(obstacle)),
        (Placement::Auto(_), Some(obstacle)) => {
            return load(false, WeightsReason::Unmappable(obstacle));
        }
        (asked @ Placement::Mapped, None) => return load(true, WeightsReason::Asked(asked)),
        (asked @ Placement::Packed, _) => return load(false, WeightsReason::Asked(asked)),
        (Placement::Auto(free), None) => free,
    };
    // Mapped weights cost next to nothing to load, and tell what packed ones would take.
    let (target, mut placed) = load(true, WeightsReason::Fits)?;
    let packed = b.left_in_files();
    let remembered = Planned::target(&*target).bytes(&size(&*target)?) as u64;
    let needed = packed + remembered + tower_bytes;
    if needed <= free {
        drop(target);
        return load(false, WeightsReason::Fits);
    }
    placed.reason = WeightsReason::TooLarge { needed, free };
    Ok((target, placed))
}

/// Reports how many weights are on the device.
fn follow(checkpoint: &Checkpoint, progress: &LoadProgress) {
    let (all, progress) = (checkpoint.bytes().max(1), progress.clone());
    progress.report("weights", WEIGHTS.start);
    checkpoint.follow(move |read| {
        let share = (read as f64 / all as f64).min(1.0);
        let fraction = WEIGHTS.start + share * (WEIGHTS.end - WEIGHTS.start);
        progress.report("weights", fraction);
    });
}

/// Why the weights cannot stay in their files, if they cannot.
fn obstacle(b: &dyn Backend, checkpoint: &Checkpoint, options: &LoadOptions) -> Option<Unmappable> {
    if options.quantize.is_some() {
        Some(Unmappable::Quantized)
    } else if !b.capabilities().mapped_weights {
        Some(Unmappable::Device { name: b.name() })
    } else if !checkpoint.is_mapped() {
        Some(Unmappable::InMemory)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DraftChoice, Probing, Source, load};
    use std::path::Path;
    use std::sync::Arc;

    fn place(weights: Placement, quantize: bool) -> Result<(&'static str, String), EngineError> {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
        let cpu = cpu::Cpu::new(cpu::CpuOptions::default()).unwrap();
        let quantize = quantize.then(|| convert::Quantize::new(quant::affine(8, 64).unwrap()));
        let options = LoadOptions {
            draft: DraftChoice::None,
            probing: Probing::Skip {
                reason: "a test".into(),
            },
            weights,
            quantize,
            ..LoadOptions::default()
        };
        let source = Source::Folder(models.join("tiny-qwen3.5"));
        let info = load(Arc::new(cpu), &source, &options)?.info;
        Ok((info.weights, info.weights_reason))
    }

    #[test]
    fn weights_are_packed_if_they_fit_and_stay_in_their_files_if_not() {
        let place = |weights| place(weights, false).unwrap();
        assert_eq!(place(Placement::Packed).0, "packed");
        assert_eq!(place(Placement::Mapped).0, "mapped");
        assert_eq!(place(Placement::Auto(1 << 40)).0, "packed");
        let (weights, reason) = place(Placement::Auto(1 << 20));
        assert_eq!(weights, "mapped");
        assert!(reason.ends_with("of the 0.0 GB that are free"), "{reason}");
    }

    #[test]
    fn a_kv_cache_that_does_not_fit_is_an_error_before_it_is_allocated() {
        let load = |sequences, context, memory_limit| {
            let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
            let options = LoadOptions {
                probing: Probing::Skip {
                    reason: "a test".into(),
                },
                sequences,
                context,
                memory_limit,
                ..LoadOptions::default()
            };
            let cpu = Arc::new(cpu::Cpu::new(cpu::CpuOptions::default()).unwrap());
            match load(cpu, &Source::Folder(models.join("tiny-qwen3.5")), &options) {
                Ok(model) => Ok(model.info.memory_bytes),
                Err(crate::EngineError::TooLarge(too_large)) => Err(too_large),
                Err(other) => panic!("{other}"),
            }
        };
        let one = load(1, Some(512), None).unwrap() as u64;
        let weights = load(1, Some(512), Some(one)).unwrap_err().weights;
        assert!(load(1, Some(512), Some(one + weights)).is_ok());
        // The head's part counts as well.
        let short = load(1, Some(512), Some(one + weights - 1)).unwrap_err();
        assert_eq!(
            (short.remembered, short.sequences, short.context),
            (one, 1, 512)
        );
        for sequences in [1 << 20, 1 << 40, usize::MAX] {
            let error = load(sequences, None, Some(1 << 40)).unwrap_err();
            assert_eq!(error.sequences, sequences);
        }
        // Too many pages for their numbers, whatever memory there is.
        assert!(load(usize::MAX, None, None).is_err());
    }

    #[test]
    fn weights_that_lie_in_no_file_cannot_stay_there() {
        assert_eq!(place(Placement::Auto(0), true).unwrap().0, "packed");
        let error = place(Placement::Mapped, true).unwrap_err();
        assert!(
            matches!(error, EngineError::Unmappable(Unmappable::Quantized)),
            "{error}"
        );
    }
}
