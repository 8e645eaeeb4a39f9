//! Rows whose inputs come from elsewhere than the table of token embeddings.

use backend::{Backend, Batch, MediaRow, Reference, StepKey};
use cache::{KeptSize, KvPlan, Memory, MemorySize, Sequence};
use cpu::{Cpu, CpuOptions};
use models::{Taps, Target, load_target};
use suites::golden;

const TOKENS: [u32; 12] = [2, 9, 17, 5, 33, 8, 8, 41, 3, 12, 27, 6];

/// Rows that tokens get from a tensor, in two sources.
const MEDIA: [MediaRow; 5] = [
    media(2, 1, 1),
    media(3, 1, 0),
    media(5, 0, 2),
    media(6, 0, 0),
    media(7, 0, 1),
];

const fn media(row: u32, source: u32, embedding: u32) -> MediaRow {
    MediaRow {
        row,
        source,
        embedding,
    }
}

fn memory(b: &dyn Backend, target: &dyn Target) -> Memory {
    let size = MemorySize {
        sequences: 1,
        context: 64,
        step_rows: 64,
        kv_format: KvPlan::both(&quant::kv::BF16),
        running_pages: None,
        kept: KeptSize::default(),
    };
    Memory::new(b, target.plan(), size)
}

/// Logits after a step of `tokens`, some of which have the embeddings of `instead`, by
/// source, and of one more token.
fn logits(
    b: &dyn Backend,
    target: &dyn Target,
    tokens: &[u32; 12],
    instead: Option<[&[u32]; 2]>,
) -> Vec<f32> {
    let mut memory = memory(b, target);
    let mut sequence: Sequence = memory.open().unwrap();
    let mut batch = Batch::default();
    memory
        .push(&mut batch, &mut sequence, tokens, tokens.len())
        .unwrap();
    if instead.is_some() {
        batch.media = MEDIA.to_vec();
    }
    let rows = instead.map(|by_source| by_source.map(|tokens| target.embed(b, tokens)));
    let rows = rows
        .as_ref()
        .map_or(Vec::new(), |rows| rows.iter().collect());
    let key = StepKey::fresh();
    let mut out = Vec::new();
    // Twice more than it takes to be recorded.
    for _ in 0..4 {
        let made = b.step(key, &batch, &rows, &mut |media| {
            let x = target.inputs(b, &batch, media);
            let hidden = target.forward_inputs(b, x, &batch, &mut memory, &mut Taps::new(&[]));
            vec![target.logits(b, &hidden)]
        });
        out = b.download(&made[0]).into_owned();
    }
    memory.close(sequence);
    b.finish().unwrap();
    out
}

fn check(b: &dyn Backend) {
    let target = load_target(b, &golden("gemma4-dense")).unwrap();
    let plain = logits(b, &*target, &TOKENS, None);
    let own: [&[u32]; 2] = [&[8, 41, 8], &[5, 17]];
    assert!(
        logits(b, &*target, &TOKENS, Some(own)) == plain,
        "own embeddings"
    );
    let other: [&[u32]; 2] = [&[8, 41, 8], &[5, 18]];
    assert!(
        logits(b, &*target, &TOKENS, Some(other)) != plain,
        "another embedding"
    );
    // Per-layer embeddings are those of tokens: of padding, for rows that have none.
    let target = load_target(b, &golden("gemma4-ple")).unwrap();
    let with_padding = TOKENS.map(|token| token.min(4));
    let mut placeholders = TOKENS;
    MEDIA
        .iter()
        .for_each(|media| placeholders[media.row as usize] = 64);
    let with = |tokens: &[u32; 12]| logits(b, &*target, tokens, Some(own));
    assert!(
        with(&TOKENS) == with(&placeholders),
        "whatever stands for them"
    );
    assert!(
        with(&TOKENS) != with(&with_padding),
        "other tokens beside them"
    );
}

#[test]
fn rows_that_have_their_tokens_own_embeddings_change_nothing() {
    check(&Reference);
    check(&Cpu::new(CpuOptions::default()).unwrap());
}

#[test]
fn gpu_rows_that_have_their_tokens_own_embeddings_change_nothing() {
    match cuda::Cuda::new(cuda::CudaOptions::default()) {
        Ok(gpu) => check(&gpu),
        Err(e) => eprintln!("!!! SKIPPED, nothing is tested on a GPU: {e}"),
    }
}
