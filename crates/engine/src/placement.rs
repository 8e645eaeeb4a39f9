//! Where weights are while a model runs: packed for speed, or mapped to save memory.
//!
//! A backend packs weights into the order that its kernels read, which takes as much
//! memory again as the files. It may also leave them in their mapped files: memory holds
//! the file's pages, which the system can drop and read again, and every product packs
//! what it multiplies. The results have the same bits.

use crate::load::{EngineError, LoadOptions};
use backend::Backend;
use cache::{Memory, MemorySize};
use models::Target;
use weights::Checkpoint;

/// Where weights are to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// Packed, unless they and what requests remember take more than this many bytes.
    Auto(u64),
    /// Packed, or as the device has it.
    #[default]
    Packed,
    /// In their files.
    Mapped,
}

/// Where they are, and why.
pub(crate) struct Placed {
    pub(crate) mapped: bool,
    pub(crate) reason: String,
}

/// Loads the target and says where its weights are. `size` says how much requests
/// remember.
pub(crate) fn load_target(
    b: &dyn Backend,
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    size: impl Fn(&dyn Target) -> MemorySize,
) -> Result<(Box<dyn Target>, Placed), EngineError> {
    let load = |mapped: bool, reason: String| {
        checkpoint.keep_mapped(mapped);
        let target = models::load_target(b, checkpoint)?;
        Ok((target, Placed { mapped, reason }))
    };
    // Nothing yet.
    let leaves = b.left_in_files().is_some();
    let obstacle = match options.quantize {
        Some(_) => Some("--quant makes weights that lie in no file".to_owned()),
        None if !leaves => Some(format!("{} packs what it computes with", b.name())),
        None if !checkpoint.is_mapped() => Some("the model is part of the program".to_owned()),
        None => None,
    };
    let free = match (options.weights, obstacle) {
        (Placement::Mapped, Some(obstacle)) => {
            return Err(EngineError::BadOption(format!(
                "--weights mapped: {obstacle}; leave the option out"
            )));
        }
        (Placement::Mapped, None) => return load(true, "--weights mapped".into()),
        (Placement::Packed, _) => return load(false, "--weights packed".into()),
        (Placement::Auto(_), Some(obstacle)) => return load(false, obstacle),
        (Placement::Auto(free), None) => free,
    };
    // Mapped weights cost next to nothing to load, and tell what packed ones would take.
    let (target, mut placed) = load(true, String::new())?;
    let packed = b.left_in_files().unwrap_or(0);
    let remembered = Memory::bytes(&target.plan(), &size(&*target)) as u64;
    let all = packed + remembered;
    if all <= free {
        drop(target);
        return load(false, "fits the free memory".into());
    }
    let gb = |bytes: u64| bytes as f64 / 1e9;
    placed.reason = format!(
        "packed, with what requests remember, they take {:.1} GB of the {:.1} GB that are free",
        gb(all),
        gb(free)
    );
    Ok((target, placed))
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
        let quantize = quantize.then(|| models::Quantize::new(quant::affine(8, 64).unwrap()));
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
    fn weights_that_lie_in_no_file_cannot_stay_there() {
        assert_eq!(place(Placement::Auto(0), true).unwrap().0, "packed");
        let error = place(Placement::Mapped, true).unwrap_err().to_string();
        assert!(error.contains("--weights mapped: --quant"), "{error}");
    }
}
