//! Stores one row of numbers in every format that can be written, and prints what it
//! costs in bytes and in error:
//!
//! ```sh
//! cargo run -p quant --example formats
//! ```

use quant::{FORMATS, KV_FORMATS, Scalar};

/// Columns of the row: whole blocks of every format.
const COLS: usize = 1024;

fn main() {
    let row = normal(COLS);
    println!(
        "{:<14} {:>12} {:>14}",
        "weights", "bits a value", "relative error"
    );
    for format in FORMATS.iter().copied().flatten().filter(|f| f.can_encode()) {
        let stored = quant::encode(format, &row, COLS, Scalar::F16);
        let bytes = format.matrix_bytes(1, COLS, Scalar::F16);
        print(format.name, bytes, &row, &stored.view().to_f32());
    }
    println!("\nkeys and values");
    for format in KV_FORMATS {
        let (mut bytes, mut read) = (Vec::new(), vec![0.0; COLS]);
        format.encode(&row, &mut bytes);
        format.decode(&bytes, &mut read);
        if let Some(rotation) = format.rotation {
            rotation.undo(&mut read);
        }
        print(format.name, bytes.len(), &row, &read);
    }
}

fn print(name: &str, bytes: usize, row: &[f32], read: &[f32]) {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let power: f64 = row.iter().map(|&x| square(x)).sum();
    let error: f64 = row.iter().zip(read).map(|(a, b)| square(a - b)).sum();
    let bits = 8.0 * bytes as f64 / row.len() as f64;
    println!("{name:<14} {bits:>12.2} {:>14.6}", (error / power).sqrt());
}

/// Numbers like draws of a normal distribution: sums of twelve others.
fn normal(n: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    (0..n)
        .map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0)
        .collect()
}
