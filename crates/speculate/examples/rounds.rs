//! A small model writes the same text with and without a drafter.
//!
//! `cargo run -p speculate --example rounds`

use backend::Backend;
use cache::{KeptSize, KvPlan, Memory, MemorySize};
use cpu::{Cpu, CpuOptions};
use models::{ChainedHead, Qwen35Mtp, load_target};
use speculate::draft::Chained;
use speculate::{DraftLength, Drafter, Sampling, Speculator, StreamOptions};
use std::path::Path;
use std::sync::Arc;
use weights::Checkpoint;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let b: Arc<dyn Backend> = Arc::new(Cpu::new(CpuOptions::default())?);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-qwen3.5");
    let checkpoint = Checkpoint::open(&folder)?;
    let size = MemorySize {
        sequences: 1,
        context: 256,
        step_rows: 64,
        kv_format: KvPlan::both(&quant::kv::BF16),
        running_pages: None,
        kept: KeptSize::default(),
    };
    let write = |drafts: usize| -> Result<Vec<u32>, Box<dyn std::error::Error>> {
        let target = load_target(&*b, &checkpoint)?;
        let head = Qwen35Mtp::load(&*b, &checkpoint, &*target)?;
        let drafter: Box<dyn Drafter> = {
            let memory = Memory::new(&*b, head.plan(), size);
            Box::new(Chained::new(head, memory))
        };
        let memory = Memory::new(&*b, target.plan(), size);
        let mut speculator = Speculator::new(b.clone(), target, memory, Some(drafter));
        let options = StreamOptions {
            sampling: Sampling {
                temperature: 0.8,
                seed: 7,
                ..Sampling::default()
            },
            max_tokens: 100,
            stop_tokens: Arc::new([]),
            draft: DraftLength::Fixed(drafts),
            logprobs: None,
        };
        let prompt: Vec<u32> = (300..340).collect();
        let mut stream = speculator.open(prompt, options)?;
        while stream.finish().is_none() {
            speculator.round(&mut [&mut stream], size.step_rows)?;
        }
        let (stats, tokens) = (stream.stats(), stream.output().to_vec());
        println!(
            "drafts of {drafts}: {} tokens in {} rounds, {} of {} drafted tokens accepted",
            tokens.len(),
            stats.rounds,
            stats.accepted(),
            stats.drafted()
        );
        speculator.close(stream);
        Ok(tokens)
    };
    assert_eq!(write(3)?, write(0)?, "the same text, sooner");
    Ok(())
}
