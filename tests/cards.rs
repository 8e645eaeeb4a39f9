//! Steps of models of true sizes on cards that are not here, in a dry run: none is asked for more
//! shared memory, threads or blocks than it has.

#[path = "../benchmarks/steps/random.rs"]
mod random;
#[path = "../benchmarks/steps/shapes.rs"]
#[expect(dead_code, reason = "the measurements use more of a shape")]
mod shapes;

use backend::Record;
use cache::{KeptSize, KvPlan, Memory, MemorySize};
use cuda::Cuda;
use models::load_target;
use random::Random;
use std::path::Path;
use std::sync::Mutex;
use suites::cards::{CARDS, Card, rows_of_step};
use weights::Checkpoint;

const MODELS: &[&str] = &[
    "gemma4-31b",
    "gemma4-26b-a4b",
    "gemma4-e4b",
    "qwen3.5-27b",
    "qwen3.5-35b-a3b",
];

/// Rows of a step: of one text, with drafts, of several texts, and of prompts.
const ROWS: &[usize] = &[1, 2, 4, 8, 16, 20, 33, 64, 200, 1024];

/// Formats of weights: two of 4 bits, the one that takes most shared memory, and plain numbers.
const FORMATS: &[&str] = &["affine4-g64", "tq4_1s", "affine8-g32", "bf16"];

/// Formats of the KV cache, for weights in the first format; products do not depend on them.
const KV_FORMATS: &[&str] = &["bf16", "q8_0,turbo4", "turbo4,turbo3", "f32"];

/// What fails of steps of `model` on `card`, with weights in `format`.
fn failures(card: Card, model: &str, checkpoint: &Checkpoint, format: &str) -> Vec<String> {
    let format = quant::format(format).unwrap();
    let shape = shapes::shape(model);
    let b = Random {
        inner: Cuda::dry_run(card.device),
        format,
        experts: shape.experts,
        table: shape.table,
        bytes: Mutex::default(),
    };
    let target = load_target(&b, checkpoint).unwrap();
    let mut failed = Vec::new();
    let kv_formats = match format.name == FORMATS[0] {
        true => KV_FORMATS,
        false => &KV_FORMATS[..1],
    };
    for &kv in kv_formats {
        let size = MemorySize {
            sequences: 1,
            context: 4096,
            step_rows: 1024,
            kv_format: KvPlan::parse(kv, ',').unwrap(),
            running_pages: None,
            kept: KeptSize::default(),
        };
        let mut memory = Memory::new(&b, target.plan(), size);
        for &n in ROWS {
            let (batch, sequence) = rows_of_step(&mut memory, n);
            let hidden = target.forward(&b, &batch, &mut memory);
            let logits = target.logits(&b, &hidden);
            if let Err(error) = b.finish() {
                failed.push(format!(
                    "{model} on {}, {}, {kv}, {n} rows: {error}",
                    card.name, format.name
                ));
            }
            drop((hidden, logits));
            memory.close(sequence);
        }
    }
    failed
}

#[test]
fn no_card_is_asked_for_more_than_it_has() {
    let mut failed = Vec::new();
    for model in MODELS {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cards-{model}"));
        shapes::write(&folder, &shapes::shape(model), &quant::BF16);
        let checkpoint = Checkpoint::open(&folder).unwrap();
        for &card in CARDS {
            for format in FORMATS {
                failed.extend(failures(card, model, &checkpoint, format));
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
