//! `--trace FILE`: what engines do, in a file.

use crate::args::TraceArgs;
use anyhow::{Context, Result};
use engine::{ModelInfo, StepSink};
use std::sync::Arc;
use trace::Writer;
use trace::schema::{Delivery, Model};

/// The trace that is written, if one is asked for.
#[derive(Clone)]
pub(crate) struct Traced(Option<Arc<Writer>>);

impl Traced {
    /// Creates the file that `args` name, if they name one.
    ///
    /// # Errors
    ///
    /// If the file cannot be created or written.
    pub(crate) fn create(args: &TraceArgs) -> Result<Self> {
        let create = |path: &std::path::PathBuf| {
            let cannot = || format!("cannot write the trace `{}`", path.display());
            Writer::create(path).with_context(cannot)
        };
        let writer = args.trace.as_ref().map(create).transpose()?;
        Ok(Traced(writer.map(Arc::new)))
    }

    /// Who is told what the engine of a model does, if somebody is.
    pub(crate) fn sink(&self, info: &ModelInfo) -> Option<StepSink> {
        let writer = self.0.clone()?;
        let model = writer.model(Model {
            model: 0,
            name: info.name.clone(),
            family: info.family.to_string(),
            device: info.backend.to_string(),
            weight_format: info.weight_format.to_owned(),
            kv_format: info.kv_format.clone(),
            drafters: info.drafters.iter().map(|&name| name.to_owned()).collect(),
            draft_max: info.draft_max,
            accept: info.accept.to_owned(),
            context: info.context,
            sequences: info.sequences,
        });
        Some(StepSink(Arc::new(move |report| {
            let delivery = report.delivery.map(|times| Delivery {
                took: times.took,
                waited: times.waited,
            });
            writer.round(model, &report.requests, &report.step, delivery);
        })))
    }

    /// Writes what is left. Engines that still run are not heard any more.
    pub(crate) fn finish(&self) {
        if let Some(writer) = &self.0 {
            writer.finish();
        }
    }
}
