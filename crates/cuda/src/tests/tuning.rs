//! Ways to compute products: that all have the same bits, and what trials keep.

use super::{gpu, gpu_with, noise};
use crate::driver::Driver;
use crate::gemm;
use crate::matmul::{has_pipelines, packing_of};
use crate::pack::Packing;
use crate::trial::{Field, is_steady, launch_all};
use crate::tuning::{ProductTuning, TriedProducts, Tunings};
use crate::{Cuda, CudaOptions, DryRun, most_prompt_rows};
use backend::{Backend, Record, Store};
use quant::Scalar;
use std::collections::HashSet;
use std::path::PathBuf;

/// Every tuning that a trial compares on `cuda`: each value of each field, the others being the defaults, without
/// pipelines too where there are any.
fn all(cuda: &Cuda, packing: Packing) -> Vec<ProductTuning> {
    let default = ProductTuning::default_of(&cuda.device.driver, packing);
    let portable = ProductTuning {
        pipelines: false,
        ..default
    };
    let mut all = vec![default];
    for field in Field::ALL {
        for of in [default, portable] {
            all.extend(field.others(&cuda.device, packing, of));
        }
    }
    let mut seen = HashSet::new();
    all.retain(|tuning| seen.insert(tuning.to_string()));
    all
}

/// A device of so many KiB of shared memory a block, as a dry run pretends to be one.
const fn device(capability: (u32, u32), multiprocessors: usize, shared_kib: usize) -> DryRun {
    DryRun {
        capability,
        multiprocessors,
        shared_memory: shared_kib << 10,
    }
}

/// Devices of several generations.
const DEVICES: [DryRun; 6] = [
    device((8, 0), 108, 163),
    device((8, 6), 28, 99),
    device((8, 9), 128, 99),
    device((9, 0), 132, 227),
    device((10, 0), 148, 227),
    device((12, 0), 170, 99),
];

#[test]
fn every_device_takes_the_launches_of_a_trial() {
    for device in DEVICES {
        let cuda = Cuda::dry_run(device);
        let driver = &cuda.device.driver;
        assert_eq!(
            has_pipelines(driver),
            [9, 10].contains(&device.capability.0)
        );
        assert_eq!(gemm::warpgroups(driver), device.capability.0 == 9);
        for packing in [
            Packing::Plain,
            Packing::Codes { bits: 4, group: 32 },
            Packing::Codes { bits: 8, group: 64 },
            Packing::E4m3 { group: 64 },
            Packing::Rotated { bits: 3 },
        ] {
            let all = all(&cuda, packing);
            assert!(all.len() >= 8, "{all:?}");
            cuda.take_launches();
            assert!(launch_all(&cuda.device, packing, &all), "memory for it");
            let launches = cuda.take_launches();
            for kernel in ["gemv_1x8", "gemv_2x8", "gemv_1x16"] {
                assert!(launches.iter().any(|l| l.contains(kernel)), "{kernel}");
            }
            let pipelined = launches.iter().any(|l| l.contains("gemv_pipelined"));
            assert_eq!(pipelined, has_pipelines(driver));
            cuda.finish()
                .unwrap_or_else(|e| panic!("{device:?}, {packing}: {e}"));
        }
    }
}

/// A folder of this process for a test's files.
fn folder(name: &str) -> PathBuf {
    let own = format!("paceline-cuda-{}-{name}", std::process::id());
    std::env::temp_dir().join(own)
}

#[test]
fn results_are_kept_for_each_device() {
    let folder = folder("results");
    let open = |device: DryRun| Cuda::on(Driver::dry(device), Tunings::new(Some(&folder), false));
    let [a100, other, ..] = DEVICES;
    let cuda = open(a100);
    let packing = Packing::Codes { bits: 4, group: 32 };
    let tried = TriedProducts {
        weights: packing.to_string(),
        tuning: all(&cuda, packing)[3],
        speedup: 1.25,
        bytes_per_second: 1.5e12,
        took_ms: 250.0,
    };
    assert_eq!(cuda.tried_products(), [], "no file");
    cuda.device.remember(packing, &tried);
    assert_eq!(open(a100).tried_products(), std::slice::from_ref(&tried));
    assert_eq!(open(other).tried_products(), [], "another device");
    // What was kept counts for large matrices of the kind, unless no trial can have found it.
    let used = |cuda: &Cuda, bytes| {
        cuda.device.prepare(packing, bytes);
        cuda.device.tuning(packing)
    };
    let with_trials = || Cuda::on(Driver::dry(a100), Tunings::new(Some(&folder), true));
    let default = ProductTuning::default_of(&cuda.device.driver, packing);
    assert_ne!(tried.tuning, default);
    assert_eq!(used(&with_trials(), 8 << 20), tried.tuning);
    assert_eq!(used(&with_trials(), 1 << 20), default, "a small matrix");
    assert_eq!(used(&open(a100), 8 << 20), default, "no trials");
    let of = |tuning| TriedProducts {
        tuning,
        ..tried.clone()
    };
    for impossible in [
        ProductTuning {
            unroll: 0,
            ..default
        },
        ProductTuning {
            pipelines: true,
            ..default
        },
    ] {
        cuda.device.remember(packing, &of(impossible));
        assert_eq!(used(&with_trials(), 8 << 20), default, "{impossible:?}");
    }
    let file = folder.join("product-tuning.json");
    std::fs::write(&file, "not what it was").unwrap();
    assert_eq!(open(a100).tried_products(), []);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn gpu_small_products_have_the_same_bits_however_they_are_tuned() {
    for cuda in [gpu(), gpu_with(|driver| driver.shared = 0)] {
        let Some(cuda) = cuda else { return };
        for name in ["bf16", "affine4-g64", "affine8-g32", "tq3_1s"] {
            let format = quant::format(name).unwrap();
            let packing = packing_of(format).unwrap();
            // Enough row tiles for several at once, and for two in each block.
            let (rows, cols) = ([19_200, 700, 40], 1088);
            let w = rows.map(|rows| {
                let w = quant::encode(format, &noise(1, rows * cols), cols, Scalar::Bf16);
                cuda.matrix(&[w.view()])
            });
            for n in [1, 3, 8, 16, 20, 40, 60] {
                let x = noise(2, n * cols);
                let made = |tuning| {
                    cuda.device.set_tuning(packing, tuning);
                    let b: &dyn Backend = &cuda;
                    let x = b.upload(n, cols, &x);
                    b.matmul_many(&x, w.each_ref())
                        .map(|y| b.download(&y).into_owned())
                };
                let all = all(&cuda, packing);
                let want = made(all[0]);
                for tuning in &all[1..] {
                    assert!(made(*tuning) == want, "{name}, {n} rows: {tuning}");
                }
            }
        }
        cuda.finish().unwrap();
    }
}

#[test]
fn gpu_small_trials_are_made_once() {
    let folder = folder("trials");
    let open = |trials| {
        let options = CudaOptions {
            cache: Some(folder.clone()),
            trials,
            ..CudaOptions::default()
        };
        Cuda::new(options).ok()
    };
    let Some(cuda) = open(true) else {
        eprintln!("!!! SKIPPED, nothing is tested on a GPU");
        return;
    };
    let small = cuda.random_matrix(64, 64, &quant::BF16);
    assert_eq!(cuda.tried_products(), [], "a small matrix");
    let format = quant::format("affine4-g64").unwrap();
    let large = |cuda: &Cuda| cuda.random_matrix(4096, 4096, format);
    drop((small, large(&cuda)));
    cuda.finish().unwrap();
    let [tried] = &cuda.tried_products()[..] else {
        panic!("one kind of weights: {:?}", cuda.tried_products());
    };
    eprintln!("{}: {}, {tried:?}", tried.weights, tried.tuning);
    assert!(tried.bytes_per_second > 1e10);
    let packing = packing_of(format).unwrap();
    assert_eq!(cuda.device.tuning(packing), tried.tuning);
    // Nobody times again what is known.
    let again = open(true).unwrap();
    drop(large(&again));
    assert_eq!(again.tried_products(), std::slice::from_ref(tried));
    assert_eq!(again.device.tuning(packing), tried.tuning);
    let without = open(false).unwrap();
    drop(large(&without));
    let default = ProductTuning::default_of(&without.device.driver, packing);
    assert_eq!(without.device.tuning(packing), default);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn trials_beside_other_work_do_not_count() {
    assert!(is_steady(&[1.0, 1.1, 0.9, 1.0, 0.2]), "one slow round");
    assert!(!is_steady(&[1.0, 0.5, 1.0, 0.5, 0.9, 0.4]));
}

#[test]
fn gpu_small_trials_need_no_pipelines() {
    let Some(cuda) = gpu_with(|driver| driver.shared = 0) else {
        return;
    };
    for name in ["affine4-g64", "bf16"] {
        let format = quant::format(name).unwrap();
        let tried = cuda
            .try_products(format)
            .expect("a trial that did not fail");
        eprintln!("{}: {}, {tried:?}", tried.weights, tried.tuning);
        assert!(!tried.tuning.pipelines);
        assert!(tried.bytes_per_second > 1e10);
    }
    assert_eq!(cuda.tried_products(), [], "nothing is kept without a cache");
    cuda.finish().unwrap();
}

#[test]
fn gpus_with_more_memory_read_prompts_in_larger_steps() {
    let rows = [8, 24, 48, 80, 141, 288].map(|gb| most_prompt_rows(gb * 1_000_000_000));
    assert_eq!(rows, [1024, 1024, 2048, 4096, 8192, 8192]);
}
