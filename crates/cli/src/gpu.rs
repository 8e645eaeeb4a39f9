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
    use cuda::{Cuda, CudaOptions, EQUAL_OPS};
    use serde_json::json;
    use std::sync::Arc;

    pub(crate) use cuda::device_count as count;

    /// Opens the GPU `ordinal`.
    pub(crate) fn open(ordinal: usize) -> Result<Arc<Cuda>> {
        let options = CudaOptions {
            ordinal,
            cache: places::cache().map(|folder| folder.join("cuda")),
            ..CudaOptions::default()
        };
        Ok(Arc::new(Cuda::new(options)?))
    }

    /// Opens all there are; why there is none, if there is none.
    pub(crate) fn all() -> Vec<Result<Gpu>> {
        let gpu = |ordinal| {
            let backend = open(ordinal)?;
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

    pub(crate) fn all() -> Vec<Result<Gpu>> {
        vec![open(0).map(|_| unreachable!("it cannot be opened"))]
    }
}

#[cfg(feature = "cuda")]
pub(crate) use with_cuda::{all, count, open};
#[cfg(not(feature = "cuda"))]
pub(crate) use without_cuda::{all, count, open};
