//! Sound towers and what language models make of their rows, against the public implementations
//! (`tests/golden/audio.py`).

use super::towers::exact_cpu;
use super::{Golden, TOLERANCE};
use backend::{Backend, Reference};
use cache::{KeptSize, KvPlan, Memory, MemorySize};
use models::{Frames, SoundTower, encode, encode_sound, load_sound_tower, load_target, load_tower};
use serde_json::Value;
use speculate::{MediaSpan, Prompt, Speculator};
use std::sync::Arc;
use suites::{Recorder, golden, repository, test_pixels, test_samples};
use weights::Checkpoint;

/// Seeded models with sound towers, and samples of their two sounds.
const MODELS: [(&str, [usize; 2]); 2] = [
    ("gemma4-audio", [20_877, 3_000]),
    ("gemma4-unified-audio", [1500, 450]),
];

fn open(model: &str) -> (Checkpoint, Golden) {
    let outputs = format!("tests/golden/outputs/{model}.safetensors");
    (golden(model), Golden::open(&repository(outputs)))
}

fn tower(b: &dyn Backend, checkpoint: &Checkpoint) -> Box<dyn SoundTower> {
    load_sound_tower(b, checkpoint, &Value::Null).unwrap()
}

#[test]
fn sound_towers_make_the_rows_of_the_public_implementations() {
    let backends: [fn() -> Box<dyn Backend>; 2] =
        [|| Box::new(Reference), || Box::new(exact_cpu())];
    for ((model, lengths), new) in MODELS.iter().flat_map(|m| backends.map(|new| (m, new))) {
        let (checkpoint, golden) = open(model);
        let b = Recorder::new(new());
        let case = format!("{model} on {}", b.name());
        let tower = tower(&b, &checkpoint);
        for (i, (name, n)) in ["a", "b"].into_iter().zip(lengths).enumerate() {
            let samples = test_samples(*n, i);
            let rows = encode_sound(&*tower, &b, &samples).unwrap();
            let n_rows = tower.rows(*n).unwrap();
            assert_eq!(
                rows.len(),
                n_rows * tower.embedding_size(),
                "{case}: {name}"
            );
            for inside in ["embed", "layers.0.out", "layers.1.out"] {
                let stored = format!("{name}.{inside}");
                if golden.values.contains_key(&stored) {
                    let noted = b.note_at(&format!("audio.{inside}"), i).unwrap();
                    golden.assert_close(&case, &stored, &noted);
                }
            }
            golden.assert_close(&case, &format!("{name}.rows"), &rows);
        }
    }
}

#[test]
fn features_are_those_of_the_public_extractor() {
    let (_, golden) = open("gemma4-audio");
    let features = models::sound_features(&test_samples(20_877, 0), &Value::Null);
    let want = &golden.values["a.features"];
    // One frame of eight is stored.
    let got = features.chunks_exact(128).step_by(8).flatten();
    let far = got.clone().zip(want).map(|(g, w)| (g - w).abs());
    assert_eq!(got.count(), want.len());
    assert!(
        far.clone().fold(0.0, f32::max) < 1e-5,
        "{:?}",
        far.fold(0.0, f32::max)
    );
}

/// The spans of a golden file's prompt, of which the first `n` tokens are read.
fn prompt(
    golden: &Golden,
    (checkpoint, lengths): (&Checkpoint, [usize; 2]),
    b: &dyn Backend,
    n: usize,
) -> Prompt {
    let tokens = golden.integers["tokens"][..n].to_vec();
    let tower = tower(b, checkpoint);
    let row = tower.tokens().unwrap();
    let mut spans = Vec::new();
    let mut start = 0;
    for (i, length) in lengths.into_iter().enumerate() {
        start += tokens[start..].iter().position(|t| *t == row.row).unwrap();
        let end = start + tower.rows(length).unwrap();
        assert!(tokens[start..end].iter().all(|t| *t == row.row));
        assert_eq!((tokens[start - 1], tokens[end]), (row.begin, row.end));
        let samples = test_samples(length, i);
        spans.push(MediaSpan {
            rows: start..end,
            hash: [i as u8; 16],
            grid: [1, end - start],
            is_causal: true,
            embeddings: encode_sound(&*tower, b, &samples).unwrap().into(),
        });
        start = end;
    }
    if models::has_tower(checkpoint) {
        let tower = load_tower(b, checkpoint).unwrap();
        let side = tower.outline().patch * tower.outline().merge;
        let (height, width) = (2 * side, 3 * side);
        let rgb = test_pixels(1, height, width);
        let frames = Frames {
            height,
            width,
            rgb: &rgb,
        };
        let token = tower.tokens().unwrap().picture;
        start += tokens[start..].iter().position(|t| *t == token).unwrap();
        let (grid, rows) = encode(&*tower, b, &frames).unwrap();
        spans.push(MediaSpan {
            rows: start..start + grid.rows(),
            hash: [9; 16],
            grid: [grid.height, grid.width],
            is_causal: false,
            embeddings: rows.into(),
        });
    }
    Prompt::with_media(tokens, spans)
}

#[test]
fn language_models_read_sounds_as_the_public_implementations_do() {
    for (model, lengths) in MODELS {
        let (checkpoint, golden) = open(model);
        let b = Arc::new(Recorder::new(Box::new(exact_cpu())));
        let target = load_target(&*b, &checkpoint).unwrap();
        let (all, cols) = (golden.integers["tokens"].len(), target.vocab_size());
        let size = MemorySize {
            sequences: 1,
            context: 256,
            step_rows: 256,
            kv_format: KvPlan::both(&quant::kv::F32),
            kept: KeptSize::default(),
            running_pages: None,
        };
        let memory = Memory::new(&*b, target.plan(), size);
        let mut speculator = Speculator::new(b.clone(), target, memory, None);
        let stored = &golden.values["logits"];
        for (i, want) in stored.chunks_exact(cols).enumerate() {
            let n = all - stored.len() / cols + 1 + i;
            let prompt = prompt(&golden, (&checkpoint, lengths), &*b, n);
            let mut stream = speculator.open(prompt, suites::greedy(1)).unwrap();
            speculator.round(&mut [&mut stream], 256).unwrap();
            let got = b.note_at("logits", i).unwrap();
            let scale = want.iter().fold(1.0f32, |m, x| m.max(x.abs()));
            let apart = got.iter().zip(want).map(|(g, w)| (g - w).abs());
            let worst = apart.fold(0.0, f32::max);
            assert!(
                got.len() == cols && worst <= TOLERANCE * scale,
                "{model}: logits after {n} tokens differ by {worst} (values up to {scale})"
            );
            speculator.close(stream);
        }
    }
}
