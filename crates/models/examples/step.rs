//! One step of a bundled model on the CPU: `cargo run -p models --example step`.

use backend::{Batch, Store};
use cache::{KeptSize, KvPlan, Memory, MemorySize};
use cpu::{Cpu, CpuOptions};
use std::path::Path;
use weights::Checkpoint;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-gemma4");
    let checkpoint = Checkpoint::open(&folder)?;
    let b = Cpu::new(CpuOptions::default())?;
    let target = models::load_target(&b, &checkpoint)?;
    let size = MemorySize {
        sequences: 1,
        context: 128,
        step_rows: 16,
        kv_format: KvPlan::both(&quant::kv::BF16),
        running_pages: None,
        kept: KeptSize::default(),
    };
    let mut memory = Memory::new(&b, target.plan(), size);
    let mut sequence = memory.open()?;
    // Four tokens of a prompt, all of them certain.
    let (mut batch, prompt) = (Batch::default(), [2, 10, 11, 12]);
    memory.push(&mut batch, &mut sequence, &prompt, prompt.len())?;
    let hidden = target.forward(&b, &batch, &mut memory);
    let logits = target.logits(&b, &hidden);
    let values = b.download(&logits);
    let last = &values[values.len() - target.vocab_size()..];
    let best = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b]));
    println!(
        "{} layers, {} tokens",
        target.n_layers(),
        target.vocab_size()
    );
    println!("after {prompt:?} the likeliest token is {best:?}");
    Ok(())
}
