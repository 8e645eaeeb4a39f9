//! What is computed on a GPU, beside the reference; and that every kernel compiles without one.

mod attention;
mod cases;
mod choose;
mod delta;
mod experts;
mod fused;
mod kernels;
mod products;
mod tuning;

use crate::compile::Compiler;
use crate::driver::Driver;
use crate::machine::lock;
use crate::tuning::Tunings;
use crate::{Cuda, CudaError, CudaOptions, DryRun};
use backend::{Reference, Store, Tensor};
use quant::{Scalar, Stored};
use std::path::PathBuf;

/// Where compiled code is kept: it is named by its content, so that tests can share it.
fn cache() -> Option<PathBuf> {
    Some(std::env::temp_dir().join("paceline-cuda-tests"))
}

/// Where kernels lie that are to be tried in place of the crate's.
fn sources() -> Option<PathBuf> {
    std::env::var_os("CUDA_KERNELS").map(Into::into)
}

/// A GPU, or nothing, loudly: where there is none, these tests test nothing.
fn gpu() -> Option<Cuda> {
    gpu_with(|_| {})
}

fn gpu_with(change: impl Fn(&mut Driver)) -> Option<Cuda> {
    let options = CudaOptions {
        cache: cache(),
        kernels: sources(),
        ..CudaOptions::default()
    };
    match Driver::new(options) {
        Ok(mut driver) => {
            change(&mut driver);
            Some(Cuda::on(driver, Tunings::new(None, false)))
        }
        Err(e @ (CudaError::NoDriver | CudaError::NoCompiler | CudaError::NoDevice { .. })) => {
            eprintln!("!!! SKIPPED, nothing is tested on a GPU: {e}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

/// Compiles what `work` launches, on all cores, so that it finds its kernels when it runs on `cuda`: one after
/// the other they would take the longest part of a test. Runs it on made-up numbers.
fn compile_ahead(cuda: &Cuda, work: impl Fn(&Cuda)) {
    let driver = &cuda.device.driver;
    let dry = Cuda::dry_run(DryRun {
        capability: (driver.arch / 10, driver.arch % 10),
        multiprocessors: driver.sms,
        shared_memory: driver.shared,
    });
    work(&dry);
    dry.take_launches();
    let log = dry.device.driver.log.as_deref().expect("a dry run's");
    let kernels = lock(log).kernels.iter().cloned().collect();
    Compiler::new(driver.arch, cache(), sources()).compile_all(kernels);
}

/// `‖got - want‖ / ‖want‖`
fn distance(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |x: f64| x * x;
    let sum = |f: &dyn Fn(f64, f64) -> f64| -> f64 {
        got.iter()
            .zip(want)
            .map(|(g, w)| f(f64::from(*g), f64::from(*w)))
            .sum()
    };
    let (d, n) = (sum(&|g, w| square(g - w)), sum(&|_, w| square(w)));
    (d / n.max(1e-30)).sqrt()
}

/// Numbers of no pattern in `-1 .. 1`.
fn noise(seed: u32, n: usize) -> Vec<f32> {
    (0..n as u32)
        .map(|i| {
            let mut x = i.wrapping_mul(0x9e37_79b9) ^ seed.wrapping_mul(0x85eb_ca6b);
            x ^= x >> 16;
            x = x.wrapping_mul(0x7feb_352d);
            x ^= x >> 15;
            x = x.wrapping_mul(0x846c_a68b);
            ((x >> 8) as f32 / (1 << 23) as f32) - 1.0
        })
        .collect()
}

/// How far a product may be from exact activations: f16 has 11 bits.
const PRODUCT: f64 = 5e-4;
/// How far a sum in `f32` may be from one in another order.
const SUM: f64 = 2e-6;

fn close(what: &str, cuda: &Cuda, got: &Tensor, want: &Tensor, tolerance: f64) {
    let d = distance(&cuda.download(got), &Reference.download(want));
    assert!(
        d <= tolerance,
        "{what}: {d:.1e} is more than {tolerance:.1e}"
    );
}

/// Codes of `[rows, cols]` E4M3 weights of no pattern, and a scale in f32 for every `tile` columns of a row.
fn fp8_noise(seed: u32, [rows, cols]: [usize; 2], tile: usize) -> [Vec<u8>; 2] {
    let code = |v: f32| ((v.to_bits() >> 20) as u8 & 0xbf) | (v.to_bits() >> 24) as u8 & 0x80;
    let codes = noise(seed, rows * cols).into_iter().map(code).collect();
    let scales = noise(seed + 2, rows * cols.div_ceil(tile));
    [codes, scales.iter().flat_map(|s| s.to_le_bytes()).collect()]
}

/// `[rows, cols]` E4M3 codes with an f32 scale for every `tile` columns of a row.
pub(crate) fn fp8<'a>(
    rows: usize,
    cols: usize,
    tile: usize,
    codes: &'a [u8],
    scales: &'a [u8],
) -> Stored<'a> {
    Stored {
        format: quant::format("fp8").unwrap(),
        rows,
        cols,
        codes,
        scale: Scalar::F32,
        scales,
        biases: &[],
        tiles: quant::Tiles::of_rows(tile),
        mapping: None,
    }
}
