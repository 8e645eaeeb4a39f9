//! What a KV cache takes of the machine's memory: as much as was written to, however much is planned. Alone in
//! its program, whose memory is measured.

#![cfg(target_os = "linux")]

use cpu::{Cpu, CpuOptions};
use engine::{DraftChoice, Engine, EngineOptions, KvMemory, LoadOptions, Probing, Request, Source};
use std::path::Path;
use std::sync::Arc;

/// Bytes of this program that are in memory.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|l| l.trim().strip_suffix(" kB")).unwrap();
    kilobytes.parse::<u64>().unwrap() << 10
}

#[test]
fn a_cache_grows_with_what_is_in_it() {
    let mut taken = Vec::new();
    for sequences in [1, 400] {
        let options = LoadOptions {
            draft: DraftChoice::None,
            probing: Probing::Skip {
                reason: "a test".into(),
            },
            sequences,
            memory_limit: Some(16 << 30),
            kv_memory: KvMemory::Spare { models: 1 },
            ..LoadOptions::default()
        };
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-gemma4");
        let backend = Arc::new(Cpu::new(CpuOptions::default()).unwrap());
        let before = resident();
        let model = engine::load(backend, &Source::Folder(folder), &options).unwrap();
        let planned = model.info.memory_bytes as u64;
        let engine = Engine::start(model, EngineOptions::default());
        let request = Request {
            max_tokens: Some(20),
            ..Request::new(vec![300; 40])
        };
        engine.complete(request).unwrap();
        taken.push((planned, resident().saturating_sub(before)));
    }
    let [(small, of_one), (large, of_many)] = taken[..] else {
        unreachable!("two were loaded");
    };
    assert!(large > 2 << 30 && large > 100 * small, "{small} {large}");
    // What the first load has left to the second counts, so no more than that differs.
    let most = of_one + (64 << 20);
    assert!(of_many < most, "{of_one} of {small}, {of_many} of {large}");
}
