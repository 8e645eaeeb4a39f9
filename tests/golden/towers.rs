//! Towers and what language models make of their rows, against the public implementations
//! (`tests/golden/vision.py`).

use super::{Golden, TOLERANCE};
use backend::{Backend, Reference};
use cache::{KeptSize, KvPlan, Memory, MemorySize};
use cpu::{Activations, Cpu, CpuOptions};
use models::{Frames, MediaGrid, Tower, encode, load_target, load_tower};
use speculate::{MediaSpan, Prompt, Speculator};
use std::sync::Arc;
use suites::{Recorder, repository, test_pixels};
use weights::Checkpoint;

/// Folders of models with towers.
const MODELS: &[&str] = &[
    "tests/golden/checkpoints/gemma4-vision-clipped",
    "tests/golden/checkpoints/gemma4-vision-standard",
    "tests/golden/checkpoints/gemma4-unified",
    "models/tiny-gemma4-vision",
    "models/tiny-qwen3.5-vision",
];

/// Height and width of the pictures, and frames, height and width of the clip, in rows and frames.
const PICTURES: [(&str, [usize; 2]); 2] = [("a", [2, 3]), ("b", [4, 2])];
const CLIP: [usize; 3] = [3, 2, 2];

fn open(model: &str) -> (Checkpoint, Golden) {
    let name = model.rsplit('/').next().unwrap();
    let outputs = format!("tests/golden/outputs/vision-{name}.safetensors");
    let checkpoint = Checkpoint::open(&repository(model)).unwrap();
    (checkpoint, Golden::open(&repository(outputs)))
}

pub(super) fn exact_cpu() -> Cpu {
    let activations = Activations::F32;
    Cpu::new(CpuOptions {
        activations,
        ..CpuOptions::default()
    })
    .unwrap()
}

/// Pixels of a side of what becomes a row.
fn side(tower: &dyn Tower) -> usize {
    tower.outline().patch * tower.outline().merge
}

/// The embeddings of `frames` frames of `height` by `width` rows.
fn rows(
    tower: &dyn Tower,
    b: &dyn Backend,
    frames: usize,
    size: [usize; 2],
) -> (MediaGrid, Vec<f32>) {
    let [height, width] = size.map(|n| n * side(tower));
    let rgb = test_pixels(frames, height, width);
    let frames = Frames {
        height,
        width,
        rgb: &rgb,
    };
    encode(tower, b, &frames).unwrap()
}

#[test]
fn towers_make_the_rows_of_the_public_implementations() {
    let backends: [fn() -> Box<dyn Backend>; 2] =
        [|| Box::new(Reference), || Box::new(exact_cpu())];
    for (model, new) in MODELS.iter().flat_map(|m| backends.map(|new| (m, new))) {
        let (checkpoint, golden) = open(model);
        let b = Recorder::new(new());
        let case = format!("{model} on {}", b.name());
        let tower = load_tower(&b, &checkpoint).unwrap();
        for (i, (name, size)) in PICTURES.into_iter().enumerate() {
            let (grid, rows) = rows(&*tower, &b, 1, size);
            assert_eq!([grid.runs, grid.height, grid.width], [1, size[0], size[1]]);
            let noted = |name: &str| b.note_at(&format!("vision.{name}"), i);
            if name == "a" {
                let layer = |l: usize| format!("layers.{l}.out");
                let layers = (0..tower.outline().layers).map(layer);
                for inside in ["embed".to_owned()].into_iter().chain(layers) {
                    let stored = format!("a.{inside}");
                    if golden.values.contains_key(&stored) {
                        golden.assert_close(&case, &stored, &noted(&inside).unwrap());
                    }
                }
            }
            golden.assert_close(&case, &format!("{name}.rows"), &rows);
        }
        let [frames, height, width] = CLIP;
        let (_, clip) = rows(&*tower, &b, frames, [height, width]);
        golden.assert_close(&case, "clip.rows", &clip);
    }
}

/// The prompt of a golden file, with the pictures that stand in it; only its first `n` tokens.
fn prompt(golden: &Golden, tower: &dyn Tower, b: &dyn Backend, n: usize) -> Prompt {
    let tokens = golden.integers["tokens"][..n].to_vec();
    let mut spans = Vec::new();
    let mut start = 0;
    for (name, size) in PICTURES {
        let is_row = |&token: &u32| token == tower.tokens().unwrap().picture;
        start += tokens[start..].iter().position(is_row).unwrap();
        let (grid, rows) = rows(tower, b, 1, size);
        let end = start + grid.rows();
        assert!(
            tokens[start..end].iter().all(is_row),
            "a placeholder for each row"
        );
        assert_eq!(
            (tokens[start - 1], tokens[end]),
            (tower.tokens().unwrap().begin, tower.tokens().unwrap().end)
        );
        spans.push(MediaSpan {
            rows: start..end,
            hash: [name.as_bytes()[0]; 16],
            grid: [grid.height, grid.width],
            is_causal: false,
            embeddings: rows.into(),
        });
        start = end;
    }
    Prompt::with_media(tokens, spans)
}

#[test]
fn language_models_read_pictures_as_the_public_implementations_do() {
    for model in MODELS {
        let (checkpoint, golden) = open(model);
        let b = Arc::new(Recorder::new(Box::new(exact_cpu())));
        let tower = load_tower(&*b, &checkpoint).unwrap();
        let target = load_target(&*b, &checkpoint).unwrap();
        let (all, cols) = (golden.integers["tokens"].len(), target.vocab_size());
        let size = MemorySize {
            sequences: 1,
            context: 256,
            step_rows: 256,
            kv_format: KvPlan::both(&quant::kv::F32),
            running_pages: None,
            kept: KeptSize::default(),
        };
        let memory = Memory::new(&*b, target.plan(), size);
        let mut speculator = Speculator::new(b.clone(), target, memory, None);
        // The last rows, one at a time: a round has the logits of the row that it chooses after.
        let stored = &golden.values["logits"];
        for (i, want) in stored.chunks_exact(cols).enumerate() {
            let n = all - stored.len() / cols + 1 + i;
            let prompt = prompt(&golden, &*tower, &*b, n);
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
