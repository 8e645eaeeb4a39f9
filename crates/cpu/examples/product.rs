//! One product of 4-bit weights on the CPU, beside the reference.
//!
//! `cargo run --release -p cpu --example product`
//!
//! With `f32` activations the CPU backend gives the bits of [`Reference`]. With 8-bit
//! activations (the default) it gives those of [`dot_int8`], which are close.

use backend::{Backend, Reference};
use cpu::{Activations, Cpu, CpuOptions, dot_int8};
use quant::Scalar;

fn main() {
    const OUTPUTS: usize = 48;
    const COLS: usize = 256;
    let wave = |i: usize| (i as f32 * 0.37).sin();
    let values: Vec<f32> = (0..OUTPUTS * COLS).map(wave).collect();
    let x: Vec<f32> = (0..COLS).map(|i| wave(7 * i + 1)).collect();

    // Weights as a file holds them: blocks of 32 codes of 4 bits and a scale.
    let format = quant::format("q4_0").expect("a known format");
    let stored = quant::encode(format, &values, COLS, Scalar::F16);
    let product = |b: &dyn Backend| {
        let w = b.matrix(&[stored.view()]);
        let y = b.matmul(&b.upload(1, COLS, &x), &w);
        b.download(&y).into_owned()
    };
    let cpu = |activations| {
        let options = CpuOptions {
            activations,
            ..CpuOptions::default()
        };
        Cpu::new(options).expect("the best instruction set is there")
    };

    let want = product(&Reference);
    let exact = cpu(Activations::F32);
    assert_eq!(product(&exact), want, "the bits of the reference");

    let fast = cpu(Activations::Int8);
    let y = product(&fast);
    for (i, y) in y.iter().enumerate() {
        let defined = dot_int8(format, stored.view().row(i), &x);
        assert_eq!(y.to_bits(), defined.to_bits(), "the bits of `dot_int8`");
    }
    println!("{}", (&fast as &dyn Backend).name());
    println!("| output | reference | 8-bit activations |");
    println!("|---|---|---|");
    for (i, (want, y)) in want.iter().zip(&y).take(4).enumerate() {
        println!("| {i} | {want:.5} | {y:.5} |");
    }
}
