//! The GPUs of this machine, as far as this build and its drivers can use them.

use anyhow::Result;
use backend::Backend;
use serde_json::Value;
use std::sync::Arc;

/// A GPU for `doctor`.
pub(crate) struct Gpu {
    pub(crate) facts: Value,
    pub(crate) backend: Arc<dyn Backend>,
    /// Ops whose results have the reference's bits on it.
    pub(crate) equal_ops: &'static [&'static str],
}

#[cfg(feature = "cuda")]
mod with_cuda {
    use super::{Gpu, Result};
    use crate::places;
    use backend::Record as _;
    use cuda::{Cuda, CudaOptions, EQUAL_OPS, TriedProducts};
    use serde_json::{Value, json};
    use std::sync::Arc;

    pub(crate) use cuda::device_count as count;

    /// What trials of products have found, as JSON.
    fn tuning(tried: &[TriedProducts]) -> Vec<Value> {
        let of = |tried: &TriedProducts| {
            json!({
                "weights": tried.weights,
                "products": tried.tuning,
                "summary": tried.tuning.to_string(),
                "speedup": tried.speedup,
                "bytes_per_second": tried.bytes_per_second,
                "took_ms": tried.took_ms,
            })
        };
        tried.iter().map(of).collect()
    }

    /// Opens the GPU `ordinal`.
    pub(crate) fn open(ordinal: usize) -> Result<Arc<Cuda>> {
        let options = CudaOptions {
            ordinal,
            cache: places::cache().map(|folder| folder.join("cuda")),
            trials: true,
            ..CudaOptions::default()
        };
        Ok(Arc::new(Cuda::new(options)?))
    }

    /// Formats whose products `doctor` times: the most common ones.
    const TRIED: [&str; 4] = ["q4_0", "affine4-g64", "q8_0", "bf16"];

    /// Opens all there are, and times how products are fastest on each, if `recalibrate`; why there is none, if there
    /// is none.
    pub(crate) fn all(recalibrate: bool) -> Vec<Result<Gpu>> {
        let gpu = |ordinal| {
            let backend = open(ordinal)?;
            if recalibrate {
                let formats = TRIED.iter().filter_map(|name| quant::format(name));
                for format in formats {
                    backend.try_products(format);
                }
                backend.finish()?;
            }
            let facts = backend.facts();
            let (major, minor) = facts.capability;
            let (total, free) = facts.memory;
            let facts = json!({
                "device": format!("cuda:{ordinal}"),
                "name": facts.name,
                "compute_capability": format!("{major}.{minor}"),
                "multiprocessors": facts.multiprocessors,
                "memory": {"total": total, "free": free},
                "products": facts.products,
                "nvrtc": facts.compiler,
                "tuning": tuning(&backend.tried_products()),
            });
            Ok(Gpu {
                facts,
                backend,
                equal_ops: EQUAL_OPS,
            })
        };
        (0..count().max(1)).map(gpu).collect()
    }
}

#[cfg(not(feature = "cuda"))]
mod without_cuda {
    use super::{Arc, Backend, Gpu, Result};
    use anyhow::anyhow;

    pub(crate) fn count() -> usize {
        0
    }

    pub(crate) fn open(_ordinal: usize) -> Result<Arc<dyn Backend>> {
        Err(anyhow!(
            "this build has no CUDA: it was made without the feature `cuda`"
        ))
    }

    pub(crate) fn all(_recalibrate: bool) -> Vec<Result<Gpu>> {
        vec![open(0).map(|_| unreachable!("it cannot be opened"))]
    }
}

#[cfg(feature = "cuda")]
pub(crate) use with_cuda::{all, count, open};
#[cfg(not(feature = "cuda"))]
pub(crate) use without_cuda::{all, count, open};
