//! What it takes to look at a picture with a vision tower of the size that is released: that of
//! Qwen 3.5 27B, 27 layers, with random weights.
//!
//! `towers FOLDER [--device cpu|cuda] [--width H] [--sides N,N,…] [--rounds N] [--slice ROWS]` writes the tower into
//! FOLDER as `mmproj.gguf`, with matrices in 16 bits, as llama.cpp's converter does, and a picture
//! `N.png` for each side, so that other engines can look at the same ones with the same weights. H is
//! how wide a row of the language model is. One line of JSON for each picture, on stdout: its rows and
//! the milliseconds from pixels to embeddings on the host, the median over the rounds. Then those of each kind
//! of work, one after the other, of which the host takes `host_ms` before it waits for the device: `embed` is
//! cutting patches, their positions, copying both to the device and the first product; `heads` and `mix` are the
//! layers before and behind attention's keys; `merge` ends with the copy to the host. With `--slice`, `sliced_ms` is
//! what all takes in slices of so many rows, waiting for each as a server does beside other requests.

use backend::Backend;
use cpu::{Cpu, CpuOptions};
use cuda::{Cuda, CudaOptions};
use models::{Frames, Tower, TowerRun, encode, load_tower};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;
use suites::projector::{Tensor, projector_file_in, projector_tensors};
use suites::test_pixels;
use weights::Checkpoint;

const LAYERS: usize = 27;
const HIDDEN: usize = 1152;
const INNER: usize = 4304;
const PATCH: usize = 16;
const POSITIONS: usize = 48 * 48;
/// Columns of four patches side by side.
const MERGED: usize = 4 * HIDDEN;

/// Numbers of no pattern, in -1 to 1.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = self.0.wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// The tensors of the tower, for a language model of `width` columns.
fn tensors(width: usize) -> Vec<Tensor> {
    let mut noise = Noise(27);
    let mut all = Vec::new();
    let mut add = |name: String, shape: Vec<usize>, middle: f32| {
        // Sums of a row's products keep the size of what goes in.
        let inputs: usize = shape[1..].iter().product();
        let scale = if shape.len() > 1 {
            (3.0 / inputs as f32).sqrt()
        } else {
            0.02
        };
        let values = (0..shape.iter().product()).map(|_| middle + scale * noise.next());
        let values = values.collect();
        all.push((format!("visual.{name}"), shape, values));
    };
    let mut linear = |name: &str, rows: usize, cols: &[usize]| {
        let shape = [&[rows], cols].concat();
        add(format!("{name}.weight"), shape, 0.0);
        add(format!("{name}.bias"), vec![rows], 0.0);
    };
    linear("patch_embed.proj", HIDDEN, &[3, 2, PATCH, PATCH]);
    for layer in 0..LAYERS {
        let of = |name: &str| format!("blocks.{layer}.{name}");
        linear(&of("attn.qkv"), 3 * HIDDEN, &[HIDDEN]);
        linear(&of("attn.proj"), HIDDEN, &[HIDDEN]);
        linear(&of("mlp.linear_fc1"), INNER, &[HIDDEN]);
        linear(&of("mlp.linear_fc2"), HIDDEN, &[INNER]);
    }
    linear("merger.linear_fc1", MERGED, &[MERGED]);
    linear("merger.linear_fc2", width, &[MERGED]);
    let norms = (0..LAYERS).flat_map(|layer| [1, 2].map(|n| format!("blocks.{layer}.norm{n}")));
    for norm in norms.chain(["merger.norm".to_owned()]) {
        add(format!("{norm}.weight"), vec![HIDDEN], 1.0);
        add(format!("{norm}.bias"), vec![HIDDEN], 0.0);
    }
    add("pos_embed.weight".to_owned(), vec![POSITIONS, HIDDEN], 0.0);
    all
}

/// Writes the tower's file, unless it is there.
fn write(file: &Path, width: usize) {
    if file.exists() {
        return;
    }
    let config = json!({"vision_config": {
        "depth": LAYERS, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_heads": 16,
        "patch_size": PATCH, "spatial_merge_size": 2, "out_hidden_size": width,
        "num_position_embeddings": POSITIONS,
    }});
    let tensors = projector_tensors("qwen3vl_merger", tensors(width));
    let bytes = projector_file_in(&quant::F16, "qwen3vl_merger", &config, tensors);
    std::fs::write(file, bytes).unwrap();
}

/// The value of an option.
fn option(name: &str, default: &str) -> String {
    let mut arguments = std::env::args().skip_while(|argument| argument != name);
    arguments.nth(1).unwrap_or_else(|| default.to_owned())
}

/// Looks at `frames` phase by phase, in slices of `rows` rows, waiting for each: milliseconds of each kind of
/// work, those of the host before it waits and all.
fn phases(
    tower: &dyn Tower,
    b: &dyn Backend,
    frames: &Frames<'_>,
    rows: usize,
) -> BTreeMap<&'static str, [f64; 2]> {
    let mut run = TowerRun::new(tower, frames).unwrap();
    let mut took = BTreeMap::new();
    while let Some(phase) = run.next_phase() {
        let start = Instant::now();
        run.advance(tower, b, frames, rows);
        let host = start.elapsed();
        b.finish().unwrap();
        let of: &mut [f64; 2] = took.entry(phase.kind).or_default();
        for (sum, took) in of.iter_mut().zip([host, start.elapsed()]) {
            *sum += took.as_secs_f64() * 1e3;
        }
    }
    took
}

fn main() {
    let folder = std::env::args().nth(1).expect("a folder");
    let folder = PathBuf::from(folder);
    std::fs::create_dir_all(&folder).unwrap();
    let width = option("--width", "5120").parse().unwrap();
    let rounds: usize = option("--rounds", "5").parse().unwrap();
    let slice: usize = option("--slice", "0").parse().unwrap();
    let file = folder.join("mmproj.gguf");
    write(&file, width);
    let b: Box<dyn Backend> = match &*option("--device", "cpu") {
        "cpu" => Box::new(Cpu::new(CpuOptions::default()).unwrap()),
        "cuda" => Box::new(Cuda::new(CudaOptions::default()).unwrap()),
        other => panic!("no device `{other}`: cpu or cuda"),
    };
    let tower = load_tower(&*b, &Checkpoint::open(&file).unwrap()).unwrap();
    for side in option("--sides", "256,512,768,1024").split(',') {
        let side: usize = side.parse().unwrap();
        let rgb = test_pixels(1, side, side);
        let size = side as u32;
        let picture = image::RgbImage::from_raw(size, size, rgb.clone()).unwrap();
        picture.save(folder.join(format!("{side}.png"))).unwrap();
        let frames = Frames {
            height: side,
            width: side,
            rgb: &rgb,
        };
        let mut times = Vec::new();
        let mut rows = 0;
        // The first one is not counted: it takes memory that the others find.
        for round in 0..=rounds {
            let start = Instant::now();
            let (grid, embeddings) = encode(&*tower, &*b, &frames).unwrap();
            let ms = start.elapsed().as_secs_f64() * 1e3;
            assert!(embeddings.iter().all(|x| x.is_finite()));
            rows = grid.rows();
            if round > 0 {
                times.push(ms);
            }
        }
        times.sort_by(f64::total_cmp);
        let ms = times[times.len() / 2];
        let mut line = json!({"device": b.name(), "side": side, "rows": rows, "ms": ms});
        for (kind, [host, all]) in phases(&*tower, &*b, &frames, usize::MAX) {
            line[kind] = json!({"host_ms": host, "ms": all});
        }
        if slice > 0 {
            let took = phases(&*tower, &*b, &frames, slice);
            line["sliced_ms"] = json!(took.values().map(|[_, all]| all).sum::<f64>());
        }
        println!("{line}");
    }
}
