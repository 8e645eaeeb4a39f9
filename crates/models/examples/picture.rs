//! A picture as rows of a bundled language model: `cargo run -p models --example picture`.

use cpu::{Cpu, CpuOptions};
use models::Frames;
use std::path::Path;
use weights::Checkpoint;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-gemma4-vision");
    let checkpoint = Checkpoint::open(&folder)?;
    let b = Cpu::new(CpuOptions::default())?;
    let tower = models::load_tower(&b, &checkpoint)?;
    // What a photo of 4000 × 3000 pixels is resized to, here a gradient from black to blue.
    let [height, width] = tower.size_rule(None).fit(1, 3000, 4000)?;
    let blue = |i: usize| (255 * (i % width) / width) as u8;
    let rgb: Vec<u8> = (0..height * width).flat_map(|i| [0, 0, blue(i)]).collect();
    let frames = Frames {
        height,
        width,
        rgb: &rgb,
    };
    let (grid, rows) = models::encode(&*tower, &b, &frames)?;
    println!(
        "{height} × {width} pixels are {} rows of {}",
        grid.rows(),
        rows.len() / grid.rows()
    );
    let norm = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>().sqrt();
    let norms = rows.chunks_exact(tower.embedding_size()).map(norm);
    println!(
        "as long as {:.2?}",
        norms.take(grid.width).collect::<Vec<_>>()
    );
    Ok(())
}
