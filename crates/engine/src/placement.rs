//! Where weights are while a model runs: packed for speed, or mapped to save memory.
//!
//! A backend packs weights into the order that its kernels read, which takes as much
//! memory again as the files. It may also leave them in their mapped files: memory holds
//! the file's pages, which the system can drop and read again, and every product packs
//! what it multiplies. The results have the same bits.

use crate::drafters::Outlook;
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
    /// Whether it is memory of the device's own.
    pub(crate) own_memory: bool,
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
            shared: size.running_pages.is_some(),
            own_memory: self.own_memory,
        })
    }
}

/// Where weights are, and why.
pub(crate) struct Placed {
    pub(crate) mapped: bool,
    pub(crate) reason: WeightsReason,
}

/// Loads the target, says where its weights are, and loads its tower where `sight` says that there
/// is one. `drafter` is what a draft model will take beside it; `size` says how much requests remember.
pub(crate) fn load_target(
    b: &dyn Backend,
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    sight: &mut Sight,
    drafter: Option<&Outlook>,
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
    let size = size(&*target)?;
    let remembered = Planned::target(&*target).bytes(&size) as u64;
    let of_drafter = drafter.map_or(0, |drafter| {
        let remembered = drafter.planned.bytes(&size) as u64;
        drafter.weights.saturating_add(remembered)
    });
    let needed = (packed + remembered + tower_bytes).saturating_add(of_drafter);
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

    /// Options for a model that drafts for itself, or for one without a drafter.
    fn drafted(by_itself: bool) -> LoadOptions {
        LoadOptions {
            draft: match by_itself {
                true => DraftChoice::Named("model", Some(qwen())),
                false => DraftChoice::None,
            },
            probing: Probing::Skip {
                reason: "a test".into(),
            },
            ..LoadOptions::default()
        }
    }

    fn qwen() -> Source {
        Source::Folder(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-qwen3.5"))
    }

    fn load_qwen(options: &LoadOptions) -> Result<crate::ModelInfo, EngineError> {
        let cpu = Arc::new(cpu::Cpu::new(cpu::CpuOptions::default()).unwrap());
        Ok(load(cpu, &qwen(), options)?.info)
    }

    #[test]
    fn a_draft_model_counts_where_weights_are_placed() {
        let bytes = |by_itself| {
            let mapped = LoadOptions {
                weights: Placement::Mapped,
                ..drafted(by_itself)
            };
            load_qwen(&mapped).unwrap().memory_bytes as u64
        };
        let remembered = bytes(true) - bytes(false);
        let is_packed = |free: u64, by_itself| {
            let options = LoadOptions {
                weights: Placement::Auto(free),
                ..drafted(by_itself)
            };
            load_qwen(&options).unwrap().weights == "packed"
        };
        // The least that packs the target alone, to a megabyte.
        let (mut too_little, mut enough) = (0, 1 << 30);
        while enough - too_little > 1 << 20 {
            let free = (enough + too_little) / 2;
            match is_packed(free, false) {
                true => enough = free,
                false => too_little = free,
            }
        }
        assert!(!is_packed(enough + remembered, true));
        // As much again has room for both: the draft model is the target.
        assert!(is_packed(2 * enough + (2 << 20), true));
    }

    #[test]
    fn a_draft_model_shares_the_memory_of_running_requests() {
        let within = |by_itself, kv_memory| {
            let options = LoadOptions {
                sequences: 4,
                context: Some(2048),
                kv_memory: crate::KvMemory::Bytes(kv_memory),
                ..drafted(by_itself)
            };
            match load_qwen(&options) {
                Ok(info) => Ok(info.memory_bytes as u64),
                Err(EngineError::KvTooSmall { least, .. }) => Err(least),
                Err(other) => panic!("{other}"),
            }
        };
        let alone = within(false, 1).unwrap_err();
        let both = within(true, 1).unwrap_err();
        assert!(both > 2 * alone - (1 << 16), "{alone} {both}");
        assert!(within(true, both).unwrap() <= both);
        let more = both + (8 << 20);
        let taken = within(true, more).unwrap();
        assert!(taken > both && taken <= more, "{both} {taken} {more}");
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
