//! Steps of models of true sizes on cards that are not here, in a dry run: none is asked for more
//! shared memory, threads or blocks than it has.

#[path = "../benchmarks/steps/random.rs"]
mod random;
#[path = "../benchmarks/steps/shapes.rs"]
#[expect(dead_code, reason = "the measurements use more of a shape")]
mod shapes;

use backend::{Backend, Record};
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

/// Rows of a step: of one text, with drafts, of several texts, and of prompts, twice as many as are the default at most.
const ROWS: &[usize] = &[1, 2, 4, 8, 16, 20, 33, 64, 200, 1024, 4096, 16_384];

/// Formats of weights: two of 4 bits, the one that takes most shared memory, and plain numbers.
const FORMATS: &[&str] = &["affine4-g64", "tq4_1s", "affine8-g32", "bf16"];

/// Formats of the KV cache, for weights in the first format; products do not depend on them.
const KV_FORMATS: &[&str] = &["bf16", "q8_0,turbo4", "turbo4,turbo3", "f32"];

/// A file of the names and sizes of `model`, without weights, of the test called `test`.
fn checkpoint(model: &str, test: &str) -> Checkpoint {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}-{model}"));
    shapes::write(&folder, &shapes::shape(model), &quant::BF16);
    Checkpoint::open(&folder).unwrap()
}

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
            context: 16_384,
            step_rows: 16_384,
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
fn models_of_few_active_weights_read_prompts_in_larger_steps() {
    for (model, rows) in MODELS.iter().zip([1024, 8192, 4096, 1024, 8192]) {
        let (checkpoint, shape) = (checkpoint(model, "rows"), shapes::shape(model));
        let b = Random {
            inner: Cuda::dry_run(CARDS[0].device),
            format: &quant::BF16,
            experts: shape.experts,
            table: shape.table,
            bytes: Mutex::default(),
        };
        let target = load_target(&b, &checkpoint).unwrap();
        let weights = target.row_weights(&checkpoint);
        // The other count has the output head in it.
        let head = (target.hidden_size() * target.vocab_size()) as f64;
        let active = shape.active - head;
        let off = weights as f64 / active;
        assert!(
            (0.97..1.03).contains(&off),
            "{model}: {weights} of {active}"
        );
        assert_eq!(b.capabilities().prompt_rows.of(weights), rows, "{model}");
    }
}

#[test]
fn no_card_is_asked_for_more_than_it_has() {
    let mut failed = Vec::new();
    for model in MODELS {
        let checkpoint = checkpoint(model, "cards");
        for &card in CARDS {
            for format in FORMATS {
                failed.extend(failures(card, model, &checkpoint, format));
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
