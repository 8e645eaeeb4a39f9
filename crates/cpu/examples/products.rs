//! How fast products read their weights, beside a plain read of as many bytes.
//!
//! `cargo run --release -p cpu --example products [threads] [MiB of weights]`
//!
//! Weights rotate over more than the caches; all cases of a shape take turns, so
//! that ratios hold when the machine's memory does not. `step(M) / step(1)` is
//! what verifying `M` rows costs against plain decoding.

use backend::{Backend, Matrix, Tensor};
use cpu::{Cpu, CpuOptions};
use quant::{Owned, Scalar, Stored};
use std::hint::black_box;
use std::time::Instant;

/// Rows of a step.
const ROWS: [usize; 6] = [1, 2, 3, 4, 6, 8];

/// Outputs and inputs of a product.
const SHAPES: [(usize, usize); 4] = [(4096, 4096), (14336, 4096), (4096, 14336), (151_936, 2048)];

const FORMATS: [&str; 5] = ["affine4-g64", "affine4-g32", "affine8-g64", "bf16", "f32"];

/// Rounds of all cases; medians are shown.
const ROUNDS: usize = 11;

/// A matrix of noise: plausible values, made fast.
fn noise(format: &'static quant::Format, rows: usize, cols: usize, seed: u64) -> Owned {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut codes = Vec::with_capacity(rows * format.code_bytes(cols) + 8);
    while codes.len() < rows * format.code_bytes(cols) {
        match format.layout {
            quant::Layout::Plain(Scalar::F32) => {
                codes.extend_from_slice(&(next() as i32 as f32 / 2f32.powi(31)).to_le_bytes());
            }
            quant::Layout::Plain(_) => {
                let upper = (next() as i32 as f32 / 2f32.powi(31)).to_bits() >> 16;
                codes.extend_from_slice(&(upper as u16).to_le_bytes());
            }
            _ => codes.extend_from_slice(&next().to_le_bytes()),
        }
    }
    codes.truncate(rows * format.code_bytes(cols));
    let n = rows * format.scales(cols);
    let filled = |value: f32| {
        let mut out = vec![0; 2 * n];
        (0..n).for_each(|i| Scalar::Bf16.put(&mut out, i, value));
        out
    };
    Owned {
        format,
        rows,
        cols,
        scale: Scalar::Bf16,
        codes,
        scales: filled(0.01),
        biases: filled(-0.07),
        width: 0,
        factors: Vec::new(),
    }
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    let mut args = std::env::args()
        .skip(1)
        .map(|a| a.parse().expect("a number"));
    let threads = args.next().unwrap_or(0);
    let total = args.next().unwrap_or(512) << 20;
    let cpu = Cpu::new(CpuOptions {
        threads,
        ..CpuOptions::default()
    })
    .expect("the best instruction set is there");
    let b: &dyn Backend = &cpu;
    println!("{}\n", b.name());
    println!(
        "| weights | outputs x inputs | plain read GB/s | M=1 GB/s | share | M=2 | 3 | 4 | 6 | 8 | prefill 256, rows/s | Gop/s |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|");
    for name in FORMATS {
        let format = quant::format(name).expect("a format");
        for (n, k) in SHAPES {
            let stored = noise(format, n, k, 7);
            let view: Stored<'_> = stored.view();
            let first = b.matrix(&[view]);
            let count = (total / first.bytes).max(1);
            let mut matrices: Vec<Matrix> = (1..count).map(|_| b.matrix(&[view])).collect();
            matrices.push(first);
            let bytes = matrices[0].bytes;
            let x = |m: usize| -> Tensor {
                let values: Vec<f32> = (0..m * k)
                    .map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0)
                    .collect();
                b.upload(m, k, &values)
            };
            let inputs = ROWS.map(x);
            let mut read = Vec::new();
            let mut steps = ROWS.map(|_| Vec::new());
            for round in 0..=ROUNDS {
                let start = Instant::now();
                for w in &matrices {
                    black_box(cpu.read(w));
                }
                let time = start.elapsed().as_secs_f64() / count as f64;
                if round > 0 {
                    read.push(time);
                }
                for (x, times) in inputs.iter().zip(&mut steps) {
                    let start = Instant::now();
                    for w in &matrices {
                        black_box(b.matmul(x, w));
                    }
                    if round > 0 {
                        times.push(start.elapsed().as_secs_f64() / count as f64);
                    }
                }
            }
            let read = median(&mut read);
            let steps = steps.map(|mut t| median(&mut t));
            let prompt = x(256);
            black_box(b.matmul(&prompt, &matrices[0]));
            let start = Instant::now();
            black_box(b.matmul(&prompt, &matrices[0]));
            let prefill = start.elapsed().as_secs_f64();
            let gb = |t: f64| bytes as f64 / t / 1e9;
            println!(
                "| {name} | {n} x {k} | {:.1} | {:.1} | {:.0} % | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {:.0} | {:.0} |",
                gb(read),
                gb(steps[0]),
                100.0 * read / steps[0],
                steps[1] / steps[0],
                steps[2] / steps[0],
                steps[3] / steps[0],
                steps[4] / steps[0],
                steps[5] / steps[0],
                256.0 / prefill,
                2.0 * 256.0 * (n * k) as f64 / prefill / 1e9,
            );
        }
    }
}
