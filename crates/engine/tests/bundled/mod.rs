//! Bundled models for tests, on a CPU.

use cpu::{Cpu, CpuOptions};
use engine::{DraftChoice, LoadOptions, Model, Probing, Source};
use std::path::Path;
use std::sync::Arc;

/// The bundled model `name`, untried, which `draft` drafts for, computed by so many threads; 0 for one on each core.
pub(crate) fn load(name: &str, draft: DraftChoice, threads: usize) -> Model {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    let options = LoadOptions {
        draft,
        probing: Probing::Skip {
            reason: "a test".into(),
        },
        context: Some(256),
        sequences: 4,
        ..LoadOptions::default()
    };
    let backend = Cpu::new(CpuOptions {
        threads,
        ..CpuOptions::default()
    });
    let source = Source::Folder(folder.join(name));
    engine::load(Arc::new(backend.unwrap()), &source, &options).unwrap()
}
