//! How fast products read their weights, beside a plain read of as many bytes.
//!
//! `cargo run --release -p cpu --example products [threads] [MiB of weights] [formats]`
//!
//! Weights rotate over more than the caches; all cases of a shape take turns, so
//! that ratios hold when the machine's memory does not. `M=4` is `step(4) / step(1)`:
//! what verifying 4 rows costs against plain decoding. A prompt's rate is compared
//! with multiplying bytes in registers, measured in the same rounds. With one thread
//! the time is the processor's, so that neighbors count less.

mod clock;

use backend::{Backend, Matrix, Store, Tensor};
use clock::now;
use cpu::{Cpu, CpuOptions};
use quant::{Owned, Scalar, Stored};
use std::hint::black_box;

/// Rows of a step.
const ROWS: [usize; 8] = [1, 2, 3, 4, 6, 7, 8, 16];

/// Rows of a prompt.
const PROMPT: usize = 512;

/// Outputs and inputs of a product.
const SHAPES: [(usize, usize); 4] = [(4096, 4096), (14336, 4096), (4096, 14336), (151_936, 2048)];

const FORMATS: [&str; 9] = [
    "q4_0",
    "q8_0",
    "q6_k",
    "affine4-g64",
    "affine4-g32",
    "affine4-g128",
    "affine8-g64",
    "bf16",
    "f32",
];

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
    if let quant::WeightLayout::Block { .. } = format.layout {
        // Few rows, over and over: encoding takes long.
        let values: Vec<f32> = (0..64 * cols).map(|_| next() as i32 as f32).collect();
        let few = quant::encode(format, &values, cols, Scalar::Bf16);
        return Owned::gather(&few.view(), (0..rows).map(|row| row % 64));
    }
    let mut codes = Vec::with_capacity(rows * format.code_bytes(cols) + 8);
    while codes.len() < rows * format.code_bytes(cols) {
        match format.layout {
            quant::WeightLayout::Plain(Scalar::F32) => {
                codes.extend_from_slice(&(next() as i32 as f32 / 2f32.powi(31)).to_le_bytes());
            }
            quant::WeightLayout::Plain(_) => {
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

/// Operations a second in registers, in tiles or not; 0 where there are none.
fn peak(cpu: &Cpu, tiles: bool) -> f64 {
    let steps = if tiles { 20_000 } else { 50_000 };
    let start = now(cpu);
    let done = cpu.saturate(tiles, steps).unwrap_or(0);
    1e6 * done as f64 / (now(cpu) - start)
}

fn main() {
    let mut args = std::env::args().skip(1);
    let mut number = |default: usize| {
        args.next()
            .map_or(default, |a| a.parse().expect("a number"))
    };
    let (threads, total) = (number(0), number(512) << 20);
    let only: Vec<String> = args.collect();
    let cpu = Cpu::new(CpuOptions {
        threads,
        ..CpuOptions::default()
    })
    .expect("the best instruction set is there");
    let b: &dyn Backend = &cpu;
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("{}; load average {}\n", b.name(), load.trim());
    println!(
        "| weights | outputs x inputs | plain read GB/s | M=1 GB/s | share | {} | prefill {PROMPT}, Gop/s | of vectors' peak | of tiles' |",
        ROWS.map(|m| format!("M={m}"))[1..].join(" | "),
    );
    println!(
        "|---|---|---|---|---|{}---|---|---|",
        "---|".repeat(ROWS.len() - 1)
    );
    for name in FORMATS {
        if !only.is_empty() && !only.iter().any(|o| o == name) {
            continue;
        }
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
            // A prompt's time does not depend on where the weights are read from.
            let prompt = x(PROMPT);
            let mut read = Vec::new();
            let mut steps = ROWS.map(|_| Vec::new());
            let (mut prefill, mut vectors, mut tiles) = (Vec::new(), Vec::new(), Vec::new());
            for round in 0..=ROUNDS {
                let timed = |times: &mut Vec<f64>, part: f64, work: &dyn Fn()| {
                    let start = now(&cpu);
                    work();
                    if round > 0 {
                        times.push((now(&cpu) - start) / (1e6 * part));
                    }
                };
                timed(&mut read, count as f64, &|| {
                    for w in &matrices {
                        black_box(cpu.read(w));
                    }
                });
                for (x, times) in inputs.iter().zip(&mut steps) {
                    timed(times, count as f64, &|| {
                        for w in &matrices {
                            black_box(b.matmul(x, w));
                        }
                    });
                }
                if round % 3 == 0 {
                    timed(&mut prefill, 1.0, &|| {
                        black_box(b.matmul(&prompt, &matrices[round % count]));
                    });
                    vectors.push(peak(&cpu, false));
                    tiles.push(peak(&cpu, true));
                }
            }
            let read = median(&mut read);
            let steps = steps.map(|mut t| median(&mut t));
            let rate = 2.0 * (PROMPT * n * k) as f64 / median(&mut prefill);
            let gb = |t: f64| bytes as f64 / t / 1e9;
            let ratios = steps.map(|t| format!("{:.2}", t / steps[0]));
            println!(
                "| {name} | {n} x {k} | {:.1} | {:.1} | {:.0} % | {} | {:.0} | {:.0} % | {:.0} % |",
                gb(read),
                gb(steps[0]),
                100.0 * read / steps[0],
                ratios[1..].join(" | "),
                rate / 1e9,
                100.0 * rate / median(&mut vectors),
                100.0 * rate / median(&mut tiles),
            );
        }
    }
}
